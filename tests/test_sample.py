"""sample.py: what comes out is the model's, reproducible, and within the vocabulary."""
import json
import re
import shutil
import sys

import pytest
import torch

from checkpoint import load_checkpoint, model_from_checkpoint
from configurator import UserError
from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig

GPT2 = {'name': 'gpt2', 'n_vocab': 50257, 'eot': 50256}


@pytest.fixture
def sample(script, trained, capsys):
    """sample(key=value, ...) -> the texts that the script prints."""
    def sample(**keys):
        capsys.readouterr()
        script('sample.py', **{'device': 'cpu', 'out_dir': trained, 'num_samples': 1, 'max_new_tokens': 30, **keys})
        texts = capsys.readouterr().out.split('\n---------------\n')
        assert texts.pop() == ''
        return texts
    return sample


@pytest.fixture
def model(trained):
    checkpoint = load_checkpoint(trained / 'ckpt.pt')
    model = model_from_checkpoint(checkpoint, 'ckpt.pt').eval()
    model.tokenizer = get_tokenizer(checkpoint['tokenizer'])
    return model


def test_greedy_is_the_likeliest_token(sample, model):
    ids = model.tokenizer.encode('the cat')
    for _ in range(30):  # past block_size: the last 16 tokens count
        with torch.no_grad():
            ids.append(model(torch.tensor([ids[-16:]]))[0][0, -1].argmax().item())
    expected = model.tokenizer.decode(ids)
    greedy = dict(start='the cat', temperature=0)
    assert sample(**greedy, num_samples=3) == [expected] * 3
    assert sample(**greedy, seed=2) == [expected]
    assert sample(start='the cat', top_k=1, temperature=5.0) == [expected]


def test_seeds(sample):
    first = sample(num_samples=3)
    assert sample(num_samples=3) == first and sample(num_samples=3, seed=2) != first
    assert len(set(first)) == 3  # the samples of a run differ


def test_top_k_0_draws_from_all(sample, model):
    n = model.tokenizer.n_vocab
    hot = dict(temperature=1e6, max_new_tokens=400, start=' ')
    assert set(sample(**hot, top_k=0)[0]) == set(sample(**hot, top_k=n)[0]) == set(model.tokenizer.chars)
    assert len(set(sample(**hot, top_k=3)[0])) < n


def test_start(sample, tmp_path):
    assert sample(start='naïve — the', num_samples=2)[1].startswith('naïve — the')
    (tmp_path / 'prompt.txt').write_text('on a\nmat — ', encoding='utf-8')
    assert sample(start=f'FILE:{tmp_path}/prompt.txt')[0].startswith('on a\nmat — ')
    long = 'the cat sat on a mat ' * 5  # longer than block_size
    assert sample(start=long)[0].startswith(long)
    for empty in ('', f'FILE:{tmp_path}/empty.txt'):
        (tmp_path / 'empty.txt').write_bytes(b'')
        assert len(sample(start=empty)[0]) == 31 and sample(start=empty)[0][0] == '\n'


def test_an_empty_start_without_a_new_line_in_the_vocabulary(sample, tmp_path):
    model = GPT(GPTConfig(block_size=16, vocab_size=2, n_layer=1, n_head=2, n_embd=16))
    torch.save({'model': model.state_dict(), 'model_args': vars(model.config),
                'tokenizer': {'name': 'char', 'chars': 'ab'}}, tmp_path / 'ab.pt')
    text, = sample(init_from=tmp_path / 'ab.pt', start='')
    assert len(text) == 31 and set(text) <= {'a', 'b'}


@pytest.mark.parametrize('start, message', [
    ('FILE:{}/none.txt', r'start=FILE:.*none\.txt: cannot be read'),
    ('FILE:{}', r'start=FILE:.*: cannot be read'),
    ('FILE:{}/latin1.txt', r'start=FILE:.*latin1\.txt: cannot be read as UTF-8'),
    ('the Zebra', r"not in the vocabulary of .* 'Z', 'b'"),
])
def test_a_wrong_start_is_named(sample, tmp_path, start, message):
    (tmp_path / 'latin1.txt').write_bytes('naïve'.encode('latin-1'))
    with pytest.raises(UserError, match=message):
        sample(start=start.format(tmp_path))


def test_padding_of_the_vocabulary_never_comes_out(sample, train, tmp_path):
    run = train(vocab_size=64, max_iters=1, eval_interval=1)
    assert run.raw_model.lm_head.weight.shape == (64, 16)
    checkpoint = torch.load(tmp_path / 'out' / 'last.pt', weights_only=True)
    n = len(checkpoint['tokenizer']['chars'])
    assert n < 30
    for temperature in (0, 1.0):  # a padded id would be an error of the tokenizer
        for top_k in (0, 64, 5):
            text, = sample(out_dir=tmp_path / 'out', temperature=temperature, top_k=top_k, max_new_tokens=100)
            assert len(text) == 101


def test_other_residual_modes_and_dtypes(sample, train, tmp_path):
    for mode in ('s2hc', 'proj_spheret'):
        train(residual=mode, out_dir=tmp_path / mode, max_iters=1)
        texts = [sample(out_dir=tmp_path / mode, temperature=0, dtype=dtype)[0] for dtype in ('float32', 'float64')]
        assert texts[0] == texts[1] and len(texts[0]) == 31


def test_no_checkpoint(sample, tmp_path):
    with pytest.raises(UserError, match=r'ckpt\.pt: there is no such checkpoint; train first.*a checkpoint file'):
        sample(out_dir=tmp_path)
    with pytest.raises(UserError, match=r'nowhere\.pt: there is no such checkpoint'):
        sample(init_from=tmp_path / 'nowhere.pt')


@pytest.mark.parametrize('name', ['gpt2.pt', 'gpt2-run/ckpt.pt'])
def test_a_file_whose_name_begins_with_gpt2(sample, trained, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(trained / 'ckpt.pt', tmp_path / name)
    assert sample(init_from=name) == sample()


# -----------------------------------------------------------------------------
# nanoGPT's checkpoints, transformers' folders

@pytest.mark.parametrize('format', [dict(), dict(prefix='_orig_mod.', masks=True, bias=True)], ids=['new', 'old'])
def test_nanogpt(sample, data, nanogpt_checkpoint, tmp_path, format):
    """They name only the data set, so its meta.json tells the tokenizer."""
    meta = json.loads((data / 'meta.json').read_text(encoding='utf-8'))
    theirs = nanogpt_checkpoint(vocab_size=meta['vocab_size'], dataset=data, **format)
    torch.save(theirs, tmp_path / 'ckpt.pt')
    text, = sample(out_dir=tmp_path, start='the cat', temperature=0)
    assert text.startswith('the cat') and len(text) == 37 and set(text) <= set(meta['tokenizer']['chars'])

    torch.save(nanogpt_checkpoint(vocab_size=meta['vocab_size'] - 1, dataset=data), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=r'ckpt\.pt: the model has \d+ tokens, its tokenizer \d+; is that the data set'):
        sample(out_dir=tmp_path)
    torch.save(nanogpt_checkpoint(dataset=tmp_path / 'gone'), tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='there is no folder .*gone'):
        sample(out_dir=tmp_path)


def test_nanogpt_with_gpt2s_vocabulary(sample, nanogpt_checkpoint, tmp_path):
    torch.save(nanogpt_checkpoint(vocab_size=50304, dataset='openwebtext'), tmp_path / 'ckpt.pt')
    text, = sample(out_dir=tmp_path, start='Hello world', top_k=0)
    assert text.startswith('Hello world')
    assert sample(out_dir=tmp_path, start='')[0].startswith('<|endoftext|>')  # what stands between documents


@pytest.fixture(scope='module')
def hf_gpt2(tmp_path_factory):
    """(model, folder) of a tiny random GPT-2 of transformers, saved by save_pretrained."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50257, n_positions=16, n_layer=2, n_head=2, n_embd=16,
                                     initializer_range=0.3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    folder = tmp_path_factory.mktemp('hf') / 'gpt2-tiny'
    model.save_pretrained(folder)
    return model, folder


def test_a_folder_of_transformers(sample, hf_gpt2):
    theirs, folder = hf_gpt2
    tokenizer = get_tokenizer(GPT2)
    ids = tokenizer.encode('O Romeo')
    while len(ids) < 14:
        with torch.no_grad():
            ids.append(theirs(torch.tensor([ids])).logits[0, -1].argmax().item())
    text, = sample(init_from=folder, start='O Romeo', temperature=0,
                   max_new_tokens=14 - len(tokenizer.encode('O Romeo')))
    assert text == tokenizer.decode(ids)


def test_training_starts_from_a_folder_of_transformers(train, sample, hf_gpt2, data, tmp_path):
    theirs, folder = hf_gpt2
    bpe = tmp_path / 'bpe'
    bpe.mkdir()
    ids = torch.randint(50257, (400,), generator=torch.Generator().manual_seed(0)).numpy().astype('<u2')
    for split in ('train', 'val'):
        ids.tofile(bpe / f'{split}.bin')  # no meta.json: GPT-2's tokens, as nanoGPT prepares them
    run = train(init_from=folder, dataset=bpe, max_iters=3, learning_rate=1e-3)
    x = torch.from_numpy(ids[:384].astype('int64')).view(24, 16)
    y = torch.from_numpy(ids[1:385].astype('int64')).view(24, 16)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).item()
    assert run.val_losses[0] == pytest.approx(loss)
    assert run.val_losses[-1] < run.val_losses[0]
    checkpoint = torch.load(tmp_path / 'out' / 'ckpt.pt', weights_only=True)
    assert checkpoint['tokenizer'] == GPT2
    assert checkpoint['model_args']['bias'] and checkpoint['model_args']['gelu_tanh']
    assert sample(out_dir=tmp_path / 'out', start='O Romeo')[0].startswith('O Romeo')
    with pytest.raises(UserError, match=r'another tokenizer .*words'):  # its ids are GPT-2's, the data's are characters
        train(init_from=folder, out_dir=tmp_path / 'other')


def test_a_folder_of_transformers_with_another_vocabulary(sample, tmp_path):
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(vocab_size=100, n_positions=16, n_layer=1, n_head=2, n_embd=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match='the model has 100 tokens, its tokenizer 50257'):
        sample(init_from=tmp_path, start='O Romeo')


def test_gpt2_needs_transformers(sample, monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(UserError, match='gpt2 needs the package transformers: pip install transformers'):
        sample(init_from='gpt2')


@pytest.mark.parametrize('keys, message', [
    (dict(num_samples=0), 'num_samples must be an integer > 0'),
    (dict(max_new_tokens=0), 'max_new_tokens must be an integer > 0'),
    (dict(temperature=-1), 'temperature must be a number >= 0'),
    (dict(top_k=-1), 'top_k must be an integer >= 0'),
    (dict(dtype='fp8'), 'dtype must be one of auto, '),
    (dict(device='gpu'), 'device = gpu: cannot be used'),
    (dict(n_layer=3), 'there is no key n_layer'),
], ids=str)
def test_wrong_keys(sample, keys, message):
    with pytest.raises(UserError, match=re.escape(message)):
        sample(**keys)
