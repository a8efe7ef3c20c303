"""train.py: the same seed is the same run however it is divided, interrupted or watched; mistakes end in one line."""
import itertools
import json
import math
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from killing import same

import checkpoint as checkpoint_module
from configurator import UserError
from data.shards import Tokens
from dataloader import ROOT, TrainLoader
from model import GPT, RESIDUALS, GPTConfig, Hyper, Sphere

MODES = ('pre_ln', 's2hc', 'proj_spheret')  # for what is slow: one mode of each connection
KEYS = {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config', 'tokenizer', 'loader', 'scaler',
        'run', 'job'}


def load(path):
    return torch.load(path, weights_only=True)


def largest_difference(weights, others):
    assert weights.keys() == others.keys()
    return max((weights[key] - others[key]).abs().max().item() for key in weights)


def without_speed(log):
    """The log without what two equal runs do not share."""
    return [{key: line[key] for key in line if key not in ('tokens_per_s', 'mfu', 'memory_mb')} for line in log]


def val_loss(model, data, max_windows=None):
    """Mean loss over the windows of val.bin, computed here, one window at a time."""
    tokens = torch.from_numpy(np.fromfile(data / 'val.bin', dtype='<u2').astype(np.int64))
    T = model.config.block_size
    model.eval()
    losses = []
    with torch.no_grad():
        for i in range((len(tokens) - 1) // T):
            logits, _ = model(tokens[i * T : i * T + T][None], torch.zeros(1, T, dtype=torch.long))
            losses.append(-logits[0].log_softmax(-1).gather(1, tokens[i * T + 1 : i * T + T + 1, None]).mean().item())
    return sum(losses[:max_windows]) / len(losses[:max_windows])


def fails_at(monkeypatch, step, training, value=math.nan, micro_steps=2):
    """The model's loss becomes `value` from a step, or an evaluation, of this process on (both count from 0)."""
    forward, calls = GPT.forward, itertools.count()

    def patched(self, idx, targets=None):
        logits, loss = forward(self, idx, targets)
        if targets is not None and self.training == training and next(calls) >= step * micro_steps:
            loss = loss * value
        return logits, loss
    monkeypatch.setattr(GPT, 'forward', patched)


# -----------------------------------------------------------------------------
# every residual mode, what a run leaves behind

@pytest.mark.parametrize('mode', RESIDUALS)
def test_every_mode_learns(train, data, tmp_path, mode):
    run = train(residual=mode, max_iters=25, eval_interval=10, log_interval=5)
    assert [(line['step'], 'val_loss' in line) for line in run.log] == [
        (0, True), (5, False), (10, False), (10, True), (15, False), (20, False), (20, True), (25, False), (25, True)]
    evaluation = {'val_loss', 'best_val_loss', 'stream_norm'}
    if RESIDUALS[mode].connection is Sphere:
        evaluation |= {'on_bound', 'bounded'}
    if RESIDUALS[mode].connection is Hyper:
        evaluation |= {'row_sums_off', 'column_sums_off'}
    for line in run.log:
        step = {'loss', 'lr', 'grad_norm', 'epoch', 'tokens_per_s', 'mfu', 'memory_mb'}
        assert line.keys() == {'step', 'tokens'} | (evaluation if 'val_loss' in line else step)
        assert line.pop('mfu', None) is None and all(map(math.isfinite, line.values()))  # the peak of a CPU is unknown
        assert line['tokens'] == line['step'] * 2 * 4 * 16
        if 'loss' in line:
            assert line['epoch'] == pytest.approx(line['tokens'] / 16 / (4499 // 16)) and line['memory_mb'] > 50
    assert run.val_losses[-1] < run.val_losses[0] - 0.2 and run.losses[-1] < run.losses[0]
    tokenizer = json.loads((data / 'meta.json').read_text(encoding='utf-8'))['tokenizer']
    best = [10, 20, 25][np.argmin(run.val_losses[1:])]
    for name, step in ('ckpt.pt', best), ('last.pt', 25):
        checkpoint = load(tmp_path / 'out' / name)
        assert checkpoint.keys() == KEYS and checkpoint['tokenizer'] == tokenizer
        assert checkpoint['iter_num'] == step and checkpoint['best_val_loss'] == min(run.val_losses)
        assert checkpoint['model_args'] == vars(run.raw_model.config) and checkpoint['model_args']['residual'] == mode
        assert checkpoint['config']['residual'] == mode and checkpoint['config']['learning_rate'] == 1e-2
        assert same(checkpoint['model'], dict(run.weights)) == (step == 25)
        assert len(checkpoint['optimizer']['state']) == len(list(run.raw_model.parameters()))
    assert sorted(os.listdir(tmp_path / 'out')) == ['.lock', 'ckpt.pt', 'last.pt', 'metrics.jsonl']


@pytest.mark.parametrize('mode', RESIDUALS)
def test_every_mode_trains_under_ddp(train, monkeypatch, mode):
    """One process of torch.distributed, in this one: DDP refuses a parameter that has no part in the loss."""
    alone = train(residual=mode, max_iters=3)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    for key, value in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR='127.0.0.1', MASTER_PORT=port).items():
        monkeypatch.setenv(key, str(value))
    ddp = train(residual=mode, max_iters=3)
    assert type(ddp.model).__name__ == 'DistributedDataParallel'
    assert ddp.losses == pytest.approx(alone.losses, abs=1e-6)
    assert ddp.val_losses == pytest.approx(alone.val_losses, abs=1e-4)


@pytest.mark.parametrize('max_iters, eval_interval', [(5, 2), (3, 100), (4, 2), (1, 1)])
def test_the_last_step_evaluates_and_saves(train, tmp_path, max_iters, eval_interval):
    run = train(max_iters=max_iters, eval_interval=eval_interval)
    steps = [line['step'] for line in run.log if 'val_loss' in line]
    assert steps == sorted({*range(0, max_iters, eval_interval), max_iters})
    assert load(tmp_path / 'out' / 'last.pt')['iter_num'] == max_iters
    assert same(load(tmp_path / 'out' / 'last.pt')['model'], dict(run.weights))


def test_best_and_last(train, data, tmp_path):
    """A run that gets better until step 6, and then, with an absurd learning rate, worse."""
    train(eval_interval=2)
    run = train(init_from='resume', max_iters=9, eval_interval=1, learning_rate=1.0, min_lr=1.0)
    val_losses = {line['step']: line['val_loss'] for line in run.log if 'val_loss' in line}
    assert list(val_losses) == [0, 2, 4, 6, 7, 8, 9]
    assert min(val_losses, key=val_losses.get) == 6 and val_losses[9] > val_losses[6] + 0.3
    assert [line['best_val_loss'] for line in run.log if 'val_loss' in line] == [
        min(loss for other, loss in val_losses.items() if other <= step) for step in val_losses]
    for name, step in ('ckpt.pt', 6), ('last.pt', 9):
        checkpoint = load(tmp_path / 'out' / name)
        assert checkpoint['iter_num'] == step and checkpoint['best_val_loss'] == val_losses[6]
        model = GPT(GPTConfig(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'])
        assert val_loss(model, data) == pytest.approx(val_losses[step], abs=1e-5)


def test_always_save_checkpoint(train, tmp_path, monkeypatch):
    fails_at(monkeypatch, 4, training=True)
    with pytest.raises(UserError, match=r'loss of step 4 is nan .*ckpt\.pt is untouched'):
        train(always_save_checkpoint=False, eval_interval=2)
    assert sorted(os.listdir(tmp_path / 'out')) == ['.lock', 'ckpt.pt', 'metrics.jsonl']
    assert load(tmp_path / 'out' / 'ckpt.pt')['iter_num'] == 4
    monkeypatch.undo()
    train(always_save_checkpoint=False, eval_interval=2)
    assert load(tmp_path / 'out' / 'last.pt')['iter_num'] == 6


def test_eval_only(script, trained, data, tmp_path, capsys, snapshot):
    def evaluate(**keys):
        with pytest.raises(SystemExit, match='0'):
            script('train.py', eval_only=True, dataset=data, device='cpu', wandb_log=True, batch_size=3, **keys)
        return re.search(r'validation loss ([\d.]+)\n', capsys.readouterr().out)[1]

    before = snapshot(trained)
    last = json.loads(before['metrics.jsonl'].splitlines()[-1])['val_loss']
    assert evaluate(init_from='resume', out_dir=trained) == f'{last:.4f}' and snapshot(trained) == before
    evaluate(out_dir=tmp_path / 'none', n_layer=1, n_head=2, n_embd=16, block_size=16)
    assert not (tmp_path / 'none').exists()


def test_wandb(train, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    run = train(wandb_log=True, wandb_project='p', wandb_run_name='r')
    assert wandb.init.call_args.kwargs['project'] == 'p' and wandb.init.call_args.kwargs['name'] == 'r'
    assert wandb.init.call_args.kwargs['config']['n_embd'] == 16
    assert [call.args[0] for call in wandb.log.call_args_list] == run.log
    assert [call.kwargs['step'] for call in wandb.log.call_args_list] == [line['step'] for line in run.log]
    wandb.finish.assert_called_once_with()


def test_compiled_names_stay_out_of_the_checkpoint(train, tmp_path, monkeypatch):
    class Compiled(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self._orig_mod = model

        def forward(self, *args):
            return self._orig_mod(*args)
    plain = train()
    monkeypatch.setattr(torch, 'compile', Compiled)
    run = train(compile=True, out_dir=tmp_path / 'compiled')
    assert isinstance(run.model, Compiled) and same(without_speed(run.log), without_speed(plain.log))
    assert same(load(tmp_path / 'compiled' / 'ckpt.pt')['model'], load(tmp_path / 'out' / 'ckpt.pt')['model'])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision(train, dtype):
    run = train(dtype=dtype, max_iters=8)
    assert run.val_losses[-1] < run.val_losses[0]
    assert all(p.dtype == torch.float32 for p in run.raw_model.parameters())


# -----------------------------------------------------------------------------
# the same run

def test_watching_a_run_does_not_change_it(train, tmp_path):
    keys = dict(dropout=0.2, max_iters=8)
    run = train(**keys)
    for i, watched in enumerate((dict(eval_interval=1), dict(eval_tokens=40), dict(log_interval=3),
                                 dict(eval_interval=7, eval_tokens=16, log_interval=2, always_save_checkpoint=False))):
        other = train(**keys, **watched, out_dir=tmp_path / str(i))
        assert same(dict(other.weights), dict(run.weights))
        every = watched.get('log_interval', 1)
        assert other.losses == run.losses[every - 1 :: every]


@pytest.mark.parametrize('mode', MODES)
def test_seeds(train, tmp_path, mode):
    first, again, other = (train(residual=mode, dropout=0.2, seed=seed, out_dir=tmp_path / name)
                           for seed, name in ((1, 'a'), (1, 'b'), (2, 'c')))
    assert same(without_speed(first.log), without_speed(again.log)) and same(dict(first.weights), dict(again.weights))
    assert not set(other.losses) & set(first.losses) and not same(dict(other.weights), dict(first.weights))


@pytest.fixture
def one_window(data, tmp_path):
    """A data set with a single window: only dropout can tell one step of an untrained model from the next."""
    folder = tmp_path / 'one_window'
    folder.mkdir()
    shutil.copy(data / 'meta.json', folder)
    for split in 'train.bin', 'val.bin':
        (folder / split).write_bytes((data / split).read_bytes()[: 2 * 17])
    return dict(dataset=folder, dropout=0.5, learning_rate=1e-30, min_lr=0, weight_decay=0)


def test_dropout_differs_from_step_to_step(train, one_window):
    run = train(**one_window, batch_size=1, gradient_accumulation_steps=1)
    assert len(set(run.losses)) == 6 and len(set(run.val_losses)) == 1


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-6), ('float64', 1e-12)])
def test_validation_loss(train, data, trained, dtype, tolerance):
    for eval_tokens, windows in ((0, None), (50, 3), (10**6, None)):
        losses = []
        for batch_size in (1, 3, 64):
            run = train(init_from=trained / 'last.pt', dtype=dtype, batch_size=batch_size, eval_tokens=eval_tokens,
                        max_iters=1, eval_interval=1, learning_rate=1e-30, weight_decay=0)
            losses.append(run.val_losses[0])
        assert losses == pytest.approx([val_loss(run.raw_model, data, windows)] * 3, abs=tolerance)


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('float64', 1e-11)])
@pytest.mark.parametrize('mode', MODES)
def test_accumulation_is_a_larger_batch(train, tmp_path, mode, dtype, tolerance):
    keys = dict(residual=mode, dtype=dtype, learning_rate=3e-4)
    run = train(batch_size=8, gradient_accumulation_steps=1, **keys)
    for batch_size in (2, 1):
        other = train(batch_size=batch_size, gradient_accumulation_steps=8 // batch_size, **keys)
        assert other.losses == pytest.approx(run.losses, abs=tolerance)
        assert other.val_losses == pytest.approx(run.val_losses, abs=tolerance)
        assert largest_difference(other.weights, run.weights) < tolerance


def test_the_logged_loss_is_the_mean_over_micro_steps(train, data):
    run = train(max_iters=1, dtype='float64', batch_size=3, gradient_accumulation_steps=4, seed=5)
    torch.manual_seed(5)
    model = GPT(run.raw_model.config).double()
    tokens = torch.from_numpy(np.fromfile(data / 'train.bin', dtype='<u2').astype(np.int64))
    loader = TrainLoader([Tokens(data / 'train.bin')], 16, (4, 1, 3), 0, 5, 'random', torch.device('cpu'))
    _, starts = loader.locate(step=0, epoch=0, window=0)
    x, y = (torch.stack([tokens[i + shift : i + shift + 16] for i in starts]) for shift in (0, 1))
    _, loss = model(x, y)
    assert run.losses == [pytest.approx(loss.item(), abs=1e-12)]
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert run.log[1]['grad_norm'] == pytest.approx(norm, rel=1e-6)


def test_grad_clip(train, tmp_path):
    """AdamW hardly sees the scale of a gradient, but its moments do."""
    for clip, largest in ((0, math.inf), (1e-3, 1e-3)):
        run = train(max_iters=1, grad_clip=clip, out_dir=tmp_path / str(clip))
        moments = load(tmp_path / str(clip) / 'last.pt')['optimizer']['state'].values()
        norm = math.sqrt(sum(m['exp_avg'].square().sum().item() for m in moments)) / 0.1  # 1 - beta1
        assert norm == pytest.approx(min(run.log[1]['grad_norm'], largest), rel=1e-3)
        assert run.log[1]['grad_norm'] > 0.1  # logged before the clipping


# -----------------------------------------------------------------------------
# learning rate

def learning_rates(run):
    return [line['lr'] for line in run.log if 'lr' in line]


def test_learning_rate(train):
    run = train(max_iters=14, learning_rate=1e-2, warmup_iters=4, lr_decay_iters=10, min_lr=1e-3)
    cosine = [1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(7)]
    expected = [1e-2 * i / 5 for i in (1, 2, 3, 4)] + cosine + [1e-3] * 3
    assert learning_rates(run) == pytest.approx(expected, rel=1e-12)
    assert [cosine[i] for i in (0, 3, 6)] == pytest.approx([1e-2, 5.5e-3, 1e-3])
    assert {group['lr'] for group in run.optimizer.param_groups} == {1e-3}


def test_a_constant_learning_rate(train):
    run = train(max_iters=5, learning_rate=1e-2, warmup_iters=1, lr_decay_iters=2, min_lr=1e-3, decay_lr=False)
    assert learning_rates(run) == [5e-3] + [1e-2] * 4


def test_the_learning_rate_is_used(train, tmp_path):
    start = train(max_iters=1, learning_rate=1e-3, weight_decay=0)
    more = train(max_iters=1, learning_rate=2e-3, weight_decay=0, out_dir=tmp_path / 'more')
    torch.manual_seed(1337)
    initial = GPT(start.raw_model.config).state_dict()
    steps = [largest_difference(run.weights, initial) for run in (start, more)]
    assert steps == pytest.approx([1e-3, 2e-3], rel=1e-2)  # AdamW's first step is the learning rate


# -----------------------------------------------------------------------------
# going on

@pytest.mark.parametrize('mode', MODES)
def test_resume_is_the_uninterrupted_run(train, tmp_path, monkeypatch, mode):
    keys = dict(residual=mode, dropout=0.2, max_iters=9)
    whole = train(**keys, out_dir=tmp_path / 'whole')
    with monkeypatch.context() as patch:  # a run that ends between two checkpoints
        fails_at(patch, 8, training=True)
        with pytest.raises(UserError, match=r'loss of step 8 is nan'):
            train(**keys)
    with open(tmp_path / 'out' / 'metrics.jsonl', 'a') as f:
        f.write('{"step": 8, "lo')  # as a kill leaves it
    resumed = train(**keys, init_from='resume')
    assert resumed.iter_num == 9 and same(dict(resumed.weights), dict(whole.weights))
    assert same(without_speed(resumed.log), without_speed(whole.log))
    for name in 'ckpt.pt', 'last.pt':
        one, other = (load(tmp_path / folder / name) for folder in ('whole', 'out'))
        for key in KEYS - {'config', 'run'}:
            assert same(one[key], other[key]), key


def test_resume_from_ckpt_alone(train, tmp_path):
    keys = dict(dropout=0.2)
    whole = train(**keys, max_iters=9, out_dir=tmp_path / 'whole')
    train(**keys, max_iters=6)
    os.replace(tmp_path / 'out' / 'last.pt', tmp_path / 'out' / 'ckpt.pt')  # as nanoGPT leaves it
    assert same(dict(train(**keys, max_iters=9, init_from='resume').weights), dict(whole.weights))


def test_a_finished_run_says_so_and_stays_as_it_is(train, trained, tmp_path, capsys, snapshot):
    shutil.copytree(trained, tmp_path / 'out')
    before = snapshot(tmp_path / 'out')
    with pytest.raises(SystemExit) as end:
        train(init_from='resume')
    assert end.value.code == 0 and 'has finished its max_iters = 6 steps; a larger --max_iters goes on' in \
        capsys.readouterr().out
    assert snapshot(tmp_path / 'out') == before


def test_start_from_a_checkpoint(train, trained, data, tmp_path):
    source = load(trained / 'last.pt')
    run = train(init_from=trained / 'last.pt', max_iters=2, dropout=0.1)
    last = json.loads((trained / 'metrics.jsonl').read_text().splitlines()[-1])
    assert run.log[0]['step'] == 0 and run.val_losses[0] == pytest.approx(last['val_loss'], abs=1e-6)
    checkpoint = load(tmp_path / 'out' / 'last.pt')
    assert checkpoint['model_args'] == {**source['model_args'], 'dropout': 0.1} and checkpoint['iter_num'] == 2
    assert {state['step'].item() for state in checkpoint['optimizer']['state'].values()} == {2.0}
    assert run.weights.keys() == source['model'].keys() and same(source, load(trained / 'last.pt'))


def test_a_shorter_context(train, trained, data):
    run = train(init_from=trained / 'last.pt', block_size=8, max_iters=1)
    assert run.raw_model.config.block_size == 8
    model = GPT(GPTConfig(**load(trained / 'last.pt')['model_args']))
    model.load_state_dict(load(trained / 'last.pt')['model'])
    model.crop_block_size(8)
    assert run.val_losses[0] == pytest.approx(val_loss(model, data), abs=1e-6)


@pytest.mark.parametrize('format', [dict(), dict(prefix='_orig_mod.', masks=True, bias=True)], ids=['new', 'old'])
def test_nanogpt(train, data, nanogpt_checkpoint, tmp_path, format):
    n_vocab = json.loads((data / 'meta.json').read_text(encoding='utf-8'))['vocab_size']
    theirs = nanogpt_checkpoint(vocab_size=n_vocab, dataset=data, **format)
    plain = nanogpt_checkpoint(vocab_size=n_vocab, bias=format.get('bias', False))
    (tmp_path / 'out').mkdir()
    torch.save(theirs, tmp_path / 'out' / 'ckpt.pt')

    finetuned = train(init_from=tmp_path / 'out' / 'ckpt.pt', out_dir=tmp_path / 'finetuned', max_iters=12,
                      learning_rate=3e-3)
    assert finetuned.val_losses[-1] < finetuned.val_losses[0]

    still = train(init_from='resume', max_iters=7)  # 7 steps are done: nothing is left to train
    assert same(dict(still.weights), plain['model']) and still.iter_num == 7
    groups = [[p for p in still.raw_model.parameters() if p.dim() == 2],
              [p for p in still.raw_model.parameters() if p.dim() == 1]]
    names = {p: name for name, p in still.raw_model.named_parameters()}
    theirs_in_order = [name for size in (2, 1) for name, w in plain['model'].items()
                       if w.dim() == size and name != 'lm_head.weight']
    assert [name.replace('lm_head', 'transformer.wte') for name in map(names.get, sum(groups, []))] == theirs_in_order
    for i, p in enumerate(sum(groups, [])):
        assert same(dict(still.optimizer.state[p]), plain['optimizer']['state'][i])

    resumed = train(init_from='resume', max_iters=10)
    assert [line['step'] for line in resumed.log if 'loss' in line] == [8, 9, 10]
    assert load(tmp_path / 'out' / 'last.pt').keys() == KEYS


# -----------------------------------------------------------------------------
# a loss that is not finite

@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(train, trained, tmp_path, monkeypatch, snapshot, value):
    shutil.copytree(trained, tmp_path / 'out')
    before = snapshot(tmp_path / 'out')
    fails_at(monkeypatch, 3, training=True, value=value)
    with pytest.raises(UserError, match=rf'the loss of step 9 is {value} with residual = pre_ln: stopped, .*last\.pt'):
        train(init_from='resume', max_iters=20, eval_interval=10)
    after = snapshot(tmp_path / 'out')
    assert [after[name] for name in ('ckpt.pt', 'last.pt')] == [before[name] for name in ('ckpt.pt', 'last.pt')]
    assert sorted(after) == sorted(before)


def test_a_validation_loss_that_is_not_finite_saves_nothing(train, tmp_path, monkeypatch, snapshot):
    train(eval_interval=3, max_iters=3)
    before = snapshot(tmp_path / 'out')
    fails_at(monkeypatch, 0, training=False)
    with pytest.raises(UserError, match='the validation loss of step 3 is nan with residual = pre_ln'):
        train(init_from='resume')
    assert snapshot(tmp_path / 'out')['last.pt'] == before['last.pt']
    monkeypatch.undo()
    assert math.isfinite(train(init_from='resume').val_losses[-1])


@pytest.mark.parametrize('mode', MODES)
def test_a_run_that_diverges(train, tmp_path, mode):
    """The last loss is fine, the weights after it are not: the evaluation finds out before they are saved."""
    with pytest.raises(UserError, match=rf'loss of step [12] is (nan|inf) .*{mode}.*smaller learning_rate'):
        train(residual=mode, learning_rate=1e38, grad_clip=0, eval_interval=1)
    assert 'last.pt' not in os.listdir(tmp_path / 'out') or load(tmp_path / 'out' / 'last.pt')['iter_num'] == 1


# -----------------------------------------------------------------------------
# notes

@pytest.mark.parametrize('keys, noted', [
    (dict(residual='pre_ln', p=2.0), ['p']),
    (dict(residual='keel', n_streams=2, res_init=-2.0), ['n_streams', 'res_init']),
    (dict(residual='hc_orthogonal', res_init=-2.0), ['res_init']),
    (dict(residual='mhc', res_init=-2.0), []),
    (dict(residual='geonorm', p=2.0), ['p']),
    (dict(residual='p_spheret', p=2.0), []),
    (dict(residual='s2hc', n_streams=2, static=True, readout='softmax'), []),
    (dict(residual='proj_spheret', decay='harmonic', bound='clamp', norm='rmsnorm', place='in'), []),
    (dict(residual='pre_ln', decay='linear', bound='clamp', static=True, readout='softmax', dyt_alpha=1.0),
     ['bound', 'decay', 'dyt_alpha', 'readout', 'static']),
    (dict(residual='pre_dyt', dyt_alpha=1.0, embed_scale=True, embed_norm=True, gelu_tanh=True, bias=True), []),
], ids=str)
def test_keys_without_effect_are_noted(train, capsys, keys, noted):
    train(max_iters=1, **keys)
    notes = re.findall(r'^note: (\w+) has no effect with residual = (\w+)$', capsys.readouterr().out, re.MULTILINE)
    assert notes == [(key, keys['residual']) for key in noted]


# -----------------------------------------------------------------------------
# wrong input: (script, what is done to `c`, a copy of a data set and of a run, what the one line says)

def bytes_of(path, content):
    """path: of a file below `c`; content: bytes, or what changes the bytes that are there."""
    def change(c):
        file = getattr(c, path[0]) / path[1]
        file.write_bytes(content(file.read_bytes()) if callable(content) else content)
    return change


def checkpoint_of(path, **changes):
    """last.pt of the run with keys changed; None takes one away."""
    def change(c):
        checkpoint = {**load(c.out / 'last.pt'), **changes}
        torch.save({key: value for key, value in checkpoint.items() if value is not None}, c.out / path)
    return change


def both(*changes):
    def change(c):
        for one in changes:
            one(c)
    return change


def nothing(c):
    pass


def no_package(name):
    def change(c):
        class Missing:
            @staticmethod
            def find_spec(module, *args):
                if module.split('.')[0] == name:
                    raise ModuleNotFoundError(f'No module named {module!r}', name=module)
        for module in [m for m in sys.modules if m.split('.')[0] == name]:
            c.monkeypatch.delitem(sys.modules, module)
        c.monkeypatch.setattr(sys, 'meta_path', [Missing, *sys.meta_path])
        c.monkeypatch.setattr(checkpoint_module, 'build_model', lambda *_: pytest.fail('built a model first'))
        c.keys['plot'] = True
    return change


def environment(**variables):
    return lambda c: [c.monkeypatch.setenv(key, str(value)) for key, value in variables.items()]


class Evil:
    def __reduce__(self):
        return os.mkdir, ('pwned',)


RESUME, FROM_LAST = dict(init_from='resume'), dict(init_from='{out}/last.pt')
BAD = [
    # data
    ('a name of no data set', nothing, dict(dataset='shakespear'), r'no folder .*shakespear; data/ has .*shakespeare'),
    ('a folder that is not there', nothing, dict(dataset='{tmp}/none'), r'there is no folder .*none; .*any path'),
    ('not prepared', lambda c: [file.unlink() for file in c.data.iterdir()], {}, r'data.*not prepared; run'),
    ('no val.bin', lambda c: os.remove(c.data / 'val.bin'), {}, r'val\.bin: missing; prepare'),
    ('an empty bin', bytes_of(('data', 'train.bin'), b''), {}, r'train\.bin: empty; prepare'),
    ('a short bin', bytes_of(('data', 'val.bin'), bytes(32)), {}, r'val\.bin: 16 tokens .*block_size = 16.*smaller'),
    ('an odd bin', bytes_of(('data', 'train.bin'), lambda b: b[:-1]), {}, r'train\.bin: .*cut off; prepare'),
    ('a foreign token', bytes_of(('data', 'val.bin'), lambda b: b + b'\0\1'), {}, r'val\.bin: token id 256.*prepare'),
    ('a corrupt meta.json', bytes_of(('data', 'meta.json'), lambda b: b[:40]), {}, r'meta\.json: not readable .*run'),
    ('an empty meta.json', bytes_of(('data', 'meta.json'), b''), {}, r'meta\.json: not readable .*run'),
    # checkpoints
    ('no checkpoint', lambda c: shutil.rmtree(c.out), RESUME, r'out.last\.pt: there is no such checkpoint; train'),
    ('an empty checkpoint', bytes_of(('out', 'last.pt'), b''), RESUME, r'last\.pt: not a checkpoint, a damaged one'),
    ('a cut checkpoint', bytes_of(('out', 'last.pt'), lambda b: b[:9999]), RESUME, r'last\.pt: not a checkpoint'),
    ('random bytes', bytes_of(('out', 'last.pt'), bytes(range(200))), RESUME, r'last\.pt: not a checkpoint'),
    ('a list', lambda c: torch.save([1, 2], c.out / 'last.pt'), RESUME, r'last\.pt: a foreign checkpoint'),
    ('no model', checkpoint_of('last.pt', model=None), RESUME, r'last\.pt: a foreign checkpoint'),
    ('an unknown model_arg', checkpoint_of('last.pt', model_args=dict(rope=1)), RESUME, r'last\.pt: a foreign .*rope'),
    ('code in a checkpoint', checkpoint_of('last.pt', config=Evil()), RESUME, r'last\.pt: not a checkpoint.*run code'),
    ('code in a pickle', bytes_of(('out', 'last.pt'), pickle.dumps(Evil(), 2)), RESUME, r'last\.pt: not a checkpoint'),
    ('a foreign optimizer', checkpoint_of('last.pt', optimizer={'state': {}, 'param_groups': []}), RESUME,
     r'last\.pt cannot be resumed.*--init_from=.*last\.pt'),
    ('another mode', nothing, dict(RESUME, residual='s2hc'), r'last\.pt has residual = pre_ln, not s2hc: drop .*'),
    ('another depth', nothing, dict(RESUME, n_layer=3), r'last\.pt has n_layer = 2, not 3: drop'),
    ('another width', nothing, dict(RESUME, n_embd=32), r'last\.pt has n_embd = 16, not 32: drop'),
    ('a longer context', nothing, dict(RESUME, block_size=32), r'last\.pt has block_size = 16, not 32: drop'),
    ('a shorter context', nothing, dict(RESUME, block_size=8), r'last\.pt cannot be resumed.*shapes.*init_from'),
    ('another mode of weights', nothing, dict(FROM_LAST, residual='keel'), r'last\.pt has residual = pre_ln, not keel'),
    ('another tokenizer', checkpoint_of('last.pt', tokenizer={'name': 'char', 'chars': 'abc'}), RESUME,
     r'last\.pt was trained with another tokenizer .*data.*scratch'),
    ('nowhere to start from', nothing, dict(init_from='{tmp}/x.pt'), r'init_from = .*x\.pt: none of scratch, resume'),
    ('a wrong word to start from', nothing, dict(init_from='Resume'), r'init_from = Resume: none of scratch, resume'),
    ('gpt2 without a network', nothing, dict(init_from='gpt2'), r'gpt2: could not be loaded as a GPT-2'),
    ('an empty folder to start from', nothing, dict(init_from='{tmp}'), r'.*: could not be loaded as a GPT-2'),
    # the model
    ('heads', nothing, dict(n_head=3), r'n_embd = 16 is not a multiple of n_head = 3'),
    *((f'{key}={value}', nothing, {key: value}, rf'--{key}={value}: {key} must be an integer > 0')
      for key in ('n_layer', 'n_head', 'n_embd', 'n_streams', 'block_size', 'batch_size', 'gradient_accumulation_steps',
                  'max_iters', 'eval_interval', 'log_interval') for value in (0, -1)),
    *((f'{key}={value}', nothing, {key: value}, rf'--{key}={value}: {key} must be')
      for key, value in (('learning_rate', 0), ('learning_rate', 'nan'), ('min_lr', -1), ('warmup_iters', -1),
                         ('eval_tokens', -1), ('vocab_size', -1), ('p', 0), ('grad_clip', -1), ('n_layer', 2.5),
                         ('weight_decay', -1), ('seed', -1))),
    ('dropout', nothing, dict(dropout=1.0), r'dropout = 1\.0: must be in \[0, 1\)'),
    ('kromhc', nothing, dict(residual='kromhc', n_streams=3), r'n_streams = 3|n = 3'),
    ('mhc_lite', nothing, dict(residual='mhc_lite', n_streams=7), r'n_streams = 7|n = 7'),
    ('res_init', nothing, dict(res_init=1), r'res_init = 1\.0: must be in \[-100, 0\]'),
    ('no res_init', nothing, dict(res_init='x'), r'--res_init=x: res_init must be a number or None'),
    ('no lm_eval', no_package('lm_eval'), dict(eval_tasks='piqa'), r'eval_tasks needs .*pip install lm_eval'),
    *((f'{key}', nothing, {key: 'nonsense'}, rf'--{key}=nonsense: {key} must be one of')
      for key in ('residual', 'norm', 'place', 'decay', 'bound', 'readout', 'dtype', 'backend')),
    ('a small vocabulary', nothing, dict(vocab_size=5), r'vocab_size = 5 is smaller than .*data, 18: .*size=0'),
    # the machine
    ('device', nothing, dict(device='nonsense'), r'device = nonsense: cannot be used .*--device=auto'),
    ('cuda', lambda c: c.monkeypatch.setattr(torch.cuda, 'is_available', lambda: False), dict(device='cuda'),
     r'device = cuda: cannot be used .*--device=auto'),
    ('no wandb', no_package('wandb'), dict(wandb_log=True), r'wandb_log=True needs .*pip install wandb'),
    ('no matplotlib', no_package('matplotlib'), {}, r'loss\.png needs .*pip install matplotlib'),
    ('no transformers', no_package('transformers'), dict(init_from='gpt2'), r'needs .*pip install transformers'),
    ('processes', environment(RANK=0, WORLD_SIZE=4, LOCAL_RANK=0), dict(gradient_accumulation_steps=6),
     r'gradient_accumulation_steps = 6 is not a multiple of the 4 processes: take 8'),
    ('a file where out_dir should be', nothing, dict(out_dir='{data}/meta.json'), r'out_dir = .*meta\.json: .*another'),
    ('a file above out_dir', nothing, dict(out_dir='{data}/meta.json/out'), r'out_dir = .*/out: .*another'),
    ('a folder for a log', lambda c: (os.remove(c.out / 'metrics.jsonl'), os.mkdir(c.out / 'metrics.jsonl')), {},
     r'metrics\.jsonl: cannot be written or continued'),
    ('a log that is none', bytes_of(('out', 'metrics.jsonl'), b'{}}\n'), dict(RESUME, max_iters=9),
     r'metrics\.jsonl: cannot be written or continued'),
]


@pytest.mark.parametrize('change, keys, message', [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_wrong_input_is_one_line_and_destroys_nothing(train, data, trained, tmp_path, monkeypatch, snapshot,
                                                      change, keys, message):
    monkeypatch.chdir(tmp_path)
    c = SimpleNamespace(tmp=tmp_path, data=tmp_path / 'data', out=tmp_path / 'out', monkeypatch=monkeypatch, keys={})
    shutil.copytree(data, c.data), shutil.copytree(trained, c.out)
    change(c)
    before = snapshot(tmp_path)
    keys = {key: value.format(**vars(c)) if isinstance(value, str) else value for key, value in keys.items()}
    with pytest.raises(UserError, match=message) as error:
        train(**{'dataset': c.data, **keys, **c.keys})
    assert '\n' not in str(error.value) and len(str(error.value)) < 500
    assert snapshot(tmp_path) == before


# -----------------------------------------------------------------------------
# processes of their own: another working folder, exit codes, torchrun

def python(*args, cwd, **env):
    process = subprocess.Popen([sys.executable, *map(str, args)], cwd=cwd, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, encoding='utf-8',
                               env={**os.environ, 'OMP_NUM_THREADS': '1', **env})
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: torchrun has to end its processes, which hold the pipes
        process.communicate()
        raise
    err = re.sub('.*building the font cache.*\n', '', err)  # matplotlib, where it is new
    return SimpleNamespace(returncode=process.returncode, stdout=out, stderr=err)


def as_words(keys):
    return [f'--{key}={value}' for key, value in keys.items()]


SHORT = dict(device='cpu', n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, gradient_accumulation_steps=1,
             max_iters=4, eval_interval=2, log_interval=1, warmup_iters=0, learning_rate=1e-2, lr_decay_iters=4)


def test_another_working_folder_and_an_ascii_locale(data, tmp_path):
    (tmp_path / 'short.py').write_text('n_layer = 2  # naïve — comment\nmax_iters = 2\n', encoding='utf-8')
    train = python(f'{ROOT}/train.py', 'short.py', *as_words({**SHORT, 'dataset': data, 'out_dir': 'läuft'}),
                   cwd=tmp_path, LC_ALL='C')
    assert (train.returncode, train.stderr) == (0, '') and 'in läuft: ckpt.pt (best), last.pt' in train.stdout
    assert sorted(os.listdir(tmp_path / 'läuft')) == ['.lock', 'ckpt.pt', 'last.pt', 'loss.png', 'metrics.jsonl']
    assert (tmp_path / 'läuft' / 'loss.png').read_bytes().startswith(b'\x89PNG')
    keys = dict(device='cpu', out_dir='läuft', start='naïve — ', num_samples=1, max_new_tokens=200, temperature=9)
    sample = python(f'{ROOT}/sample.py', *as_words(keys), cwd=tmp_path, LC_ALL='C')
    assert (sample.returncode, sample.stderr) == (0, '') and sample.stdout.startswith('naïve — ')


def test_a_failed_run_ends_with_code_1_and_one_line(data, tmp_path):
    failed = python(f'{ROOT}/train.py', *as_words({**SHORT, 'learning_rate': 1e30, 'dataset': data, 'out_dir': 'out'}),
                    cwd=tmp_path)
    assert failed.returncode == 1 and failed.stderr.count('\n') == 1
    assert re.match(r'error: the loss of step 1 is (nan|inf) with residual = pre_ln: stopped', failed.stderr)


def torchrun(*args, cwd):
    return python('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', *args, cwd=cwd)


def test_two_processes(train, data, one_window, tmp_path):
    """Losses, gradient norms and weights of one process; also with dropout, a resumption and a divergence."""
    keys = dict(SHORT, n_layer=2, batch_size=2, gradient_accumulation_steps=4, max_iters=6, eval_interval=3,
                learning_rate=3e-4, dataset=data)
    cases = {f'{mode}-{dtype}': dict(residual=mode, dtype=dtype)
             for mode in MODES for dtype in ('float32', 'float64')}
    cases['one window'] = dict(eval_tokens=16)  # the second process has nothing to evaluate
    runs = [dict(keys, **case, out_dir=tmp_path / name) for name, case in cases.items()]
    dropout = dict(keys, dropout=0.2)
    runs += [dict(dropout, out_dir=tmp_path / 'whole'),
             dict(dropout, max_iters=3, out_dir=tmp_path / 'resumed'),
             dict(dropout, init_from='resume', out_dir=tmp_path / 'resumed'),
             dict(keys | one_window, gradient_accumulation_steps=2, out_dir=tmp_path / 'masks'),
             dict(keys, learning_rate=1e30, out_dir=tmp_path / 'diverged')]
    done = torchrun(f'{ROOT}/tests/driver.py', json.dumps([as_words(run) for run in runs]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('2 processes') == len(runs)

    for name, case in cases.items():
        alone = train(**dict(keys, **case, out_dir=tmp_path / 'alone'))
        tolerance = 1e-11 if case.get('dtype') == 'float64' else 1e-5
        lines = [json.loads(line) for line in open(tmp_path / name / 'metrics.jsonl')]
        for key in ('step', 'tokens', 'loss', 'val_loss', 'lr', 'grad_norm'):
            assert [line[key] for line in lines if key in line] == pytest.approx(
                [line[key] for line in alone.log if key in line], abs=max(tolerance, 1e-9), rel=0), (name, key)
        assert largest_difference(load(tmp_path / name / 'last.pt')['model'], alone.weights) < tolerance, name

    whole, resumed = (load(tmp_path / name / 'last.pt') for name in ('whole', 'resumed'))
    assert same(whole['model'], resumed['model']) and same(whole['optimizer'], resumed['optimizer'])

    alone = train(**dict(keys | one_window, gradient_accumulation_steps=1))  # draws as the first process does
    losses = [json.loads(line)['loss'] for line in open(tmp_path / 'masks' / 'metrics.jsonl') if '"loss"' in line]
    assert len(losses) == 6 and not set(losses) & set(alone.losses)  # and the second draws otherwise

    errors = re.findall(r'rank (\d): UserError: the loss of step 1 is (?:nan|inf)', done.stdout)
    assert sorted(errors) == ['0', '1'] and done.stdout.count('Error') == 2


def test_torchrun_with_an_indivisible_accumulation(data, tmp_path):
    keys = dict(SHORT, gradient_accumulation_steps=3, dataset=data)
    failed = torchrun(f'{ROOT}/train.py', *as_words(keys), cwd=tmp_path)
    assert failed.returncode != 0 and not (tmp_path / 'out').exists()
    assert 'error: gradient_accumulation_steps = 3 is not a multiple of the 2 processes: take 4' in failed.stderr
