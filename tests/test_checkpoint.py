"""checkpoint.py: files that open without running code, nanoGPT's format, GPT-2 from transformers, and damaged files."""
import io
import os
import pickle
import sys

import pytest
import torch

import checkpoint
from checkpoint import autocast, load_checkpoint, model_from_checkpoint, pick_device, pretrained, save_checkpoint
from configurator import UserError
from model import GPT, GPTConfig

ARGS = dict(block_size=16, vocab_size=20, n_layer=2, n_head=2, n_embd=16, dropout=0.0, bias=False)


def saved(path, **changes):
    model = GPT(GPTConfig(**ARGS))
    torch.save({'model': model.state_dict(), 'model_args': ARGS, **changes}, path)
    return model


# -----------------------------------------------------------------------------
# reading and writing

def test_round_trip(tmp_path):
    model = saved(tmp_path / 'a.pt')
    loaded = load_checkpoint(tmp_path / 'a.pt')
    again = model_from_checkpoint(loaded, 'a.pt', dropout=0.5)
    assert again.config == GPTConfig(**{**ARGS, 'dropout': 0.5})
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize('prefix', ['_orig_mod.', 'module.', '_orig_mod.module.'])
def test_prefixes_of_compile_and_ddp_go(tmp_path, prefix):
    model = GPT(GPTConfig(**ARGS))
    saved(tmp_path / 'a.pt', model={prefix + key: v for key, v in model.state_dict().items()})
    assert load_checkpoint(tmp_path / 'a.pt')['model'].keys() == model.state_dict().keys()


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / 'last.pt'
    save_checkpoint({'model': {}, 'model_args': {}, 'iter_num': 1}, path)
    before = path.read_bytes()

    def full_disk(checkpoint, aside):
        with open(aside, 'wb') as f:
            f.write(b'half of it')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full_disk)
    with pytest.raises(UserError, match=r'last\.pt: could not be written .*No space left'):
        save_checkpoint({'model': {}}, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ['last.pt']


def test_a_kill_while_saving_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / 'last.pt'
    save_checkpoint({'model': {}, 'model_args': {}}, path)
    before = path.read_bytes()

    def killed(checkpoint, aside):
        with open(aside, 'wb') as f:
            f.write(b'half of it')
        raise KeyboardInterrupt
    monkeypatch.setattr(torch, 'save', killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint({'model': {}}, path)
    assert path.read_bytes() == before


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(UserError, match=r'gone.last\.pt: could not be written'):
        save_checkpoint({}, tmp_path / 'gone' / 'last.pt')


def damaged():
    """name -> bytes that are no checkpoint"""
    whole = {}
    for name, new in ('zip', True), ('old', False):
        f = io.BytesIO()
        torch.save({'model': {'a': torch.ones(3)}, 'model_args': {}}, f, _use_new_zipfile_serialization=new)
        whole[name] = f.getvalue()
    cut = {f'{name} of {n}': b[:n] for name, b in whole.items()
           for n in (1, 2, 10, 40, 100, 200, len(b) // 2, len(b) - 9)}
    return {'empty': b'', 'text': b'not a checkpoint\n' * 9, 'zeros': bytes(100), 'random': bytes(range(255, 0, -1)),
            'two bytes': b'\x80\x02', 'stack': b'\x80\x02.', 'zip file': b'PK\x05\x06' + bytes(18), **cut,
            'list': pickle.dumps([1, 2], 2)}


@pytest.mark.parametrize('name', damaged())
def test_a_damaged_file_is_named(tmp_path, name):
    path = tmp_path / 'last.pt'
    path.write_bytes(damaged()[name])
    with pytest.raises(UserError, match=r'last\.pt: not a checkpoint, .*name another file') as e:
        load_checkpoint(path)
    assert 'weights_only' not in str(e.value)  # torch advises to read the file unsafely


@pytest.mark.parametrize('content', [
    [1, 2], torch.ones(3), {'state_dict': {}}, {'model': {}}, {'model_args': {}}, None, {'model': 1, 'model_args': {}},
    {'model': {}, 'model_args': [1]}, {'model': None, 'model_args': None}], ids=str)
def test_a_foreign_checkpoint_is_named(tmp_path, content):
    torch.save(content, tmp_path / 'last.pt')
    with pytest.raises(UserError, match=r'last\.pt: a foreign checkpoint'):
        load_checkpoint(tmp_path / 'last.pt')


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


@pytest.mark.parametrize('save', [torch.save, lambda c, path: path.write_bytes(pickle.dumps(c, 2))])
def test_reading_a_checkpoint_runs_no_code(tmp_path, save):
    save({'model': {}, 'model_args': {}, 'config': Evil(str(tmp_path / 'pwned'))}, tmp_path / 'last.pt')
    with pytest.raises(UserError, match=r'last\.pt: not a checkpoint'):
        load_checkpoint(tmp_path / 'last.pt')
    assert os.listdir(tmp_path) == ['last.pt']


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r'none\.pt: there is no such checkpoint; train first.*a checkpoint file'):
        load_checkpoint(tmp_path / 'none.pt')


@pytest.mark.parametrize('changes, message', [
    (dict(rotary=True), 'foreign checkpoint: model_args has rotary'),
    (dict(n_embd=15), 'n_embd = 15 is not a multiple of n_head'),
    (dict(n_layer='two'), 'x.pt: '),
    (dict(residual='magic'), "residual = 'magic' does not exist"),
    (dict(n_layer=3), 'do not fit its model_args .*transformer.h.2'),
    (dict(vocab_size=21), 'do not fit its model_args .*size mismatch'),
    (dict(residual='s2hc'), 'do not fit its model_args'),
])
def test_model_args_that_do_not_fit(changes, message):
    model = GPT(GPTConfig(**ARGS))
    with pytest.raises(UserError, match=f'x.pt: .*{message}|{message}') as e:
        model_from_checkpoint({'model': model.state_dict(), 'model_args': {**ARGS, **changes}}, 'x.pt')
    assert str(e.value).startswith('x.pt: ')


# -----------------------------------------------------------------------------
# nanoGPT's format

@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('prefix', ['', '_orig_mod.'])
@pytest.mark.parametrize('masks', [False, True])
def test_nanogpt(tmp_path, nanogpt_checkpoint, bias, prefix, masks):
    theirs = nanogpt_checkpoint(prefix=prefix, masks=masks, bias=bias)
    torch.save(theirs, tmp_path / 'ckpt.pt')
    model = model_from_checkpoint(load_checkpoint(tmp_path / 'ckpt.pt'), 'ckpt.pt')
    assert model.config.residual == 'pre_ln' and model.config.bias == bias and not model.config.gelu_tanh
    ours = model.state_dict()
    plain = nanogpt_checkpoint(bias=bias)['model']
    assert ours.keys() == plain.keys() and all(torch.equal(ours[key], plain[key]) for key in ours)


def test_an_early_nanogpt_without_bias_and_dropout(tmp_path, nanogpt_checkpoint):
    theirs = nanogpt_checkpoint(bias=True)  # its first checkpoints had no such keys: biases were always there
    del theirs['model_args']['bias'], theirs['model_args']['dropout']
    torch.save(theirs, tmp_path / 'ckpt.pt')
    assert model_from_checkpoint(load_checkpoint(tmp_path / 'ckpt.pt'), 'ckpt.pt').config.bias


# -----------------------------------------------------------------------------
# transformers, devices

def test_pretrained_errors_are_one_line(tmp_path):
    pytest.importorskip('transformers')
    for name in ('gpt2', str(tmp_path)):  # a hub that is offline, an empty folder
        with pytest.raises(UserError, match=f'{name}: could not be loaded as a GPT-2'):
            pretrained(name)


def test_pretrained_needs_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(UserError, match='gpt2 needs the package transformers: pip install transformers'):
        pretrained('gpt2')


@pytest.mark.parametrize('device', ['gpu', 'cud', '', 'meta', 'xla', 'cuda:x', 'cuda:-1', 'vulkan', 'cpu:0:0'])
def test_a_wrong_device_is_named(device):
    with pytest.raises(UserError, match=f'device = {device}: cannot be used .*--device=auto'):
        pick_device(device, 'auto')


def test_cuda_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    for device in ('cuda', 'cuda:1'):
        with pytest.raises(UserError, match=f'device = {device}: cannot be used .*no CUDA.*--device=auto'):
            pick_device(device, 'float32')


def test_auto(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
    assert pick_device('auto', 'auto') == (torch.device('cpu'), 'float32')
    assert pick_device('cpu', 'bfloat16') == (torch.device('cpu'), 'bfloat16')


def test_autocast():
    x = torch.ones(4, 4)
    for dtype, result in (('float32', torch.float32), ('float64', torch.float32), ('bfloat16', torch.bfloat16)):
        assert checkpoint.DTYPES[dtype] is getattr(torch, dtype)
        with autocast(torch.device('cpu'), dtype):
            assert (x @ x).dtype == result
