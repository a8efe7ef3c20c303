"""Runs that are killed, stopped, restarted and watched: nothing is lost, and nothing computes anything else."""
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from killing import same, what_is_left

import checkpoint
from checkpoint import PEAKS, latest_checkpoint, lock_out_dir, peak_flops, peak_memory
from configurator import UserError
from data.shards import header
from dataloader import ROOT, TrainLoader
from model import GPT, RESIDUALS, GPTConfig, Hyper, Sphere

CPU = torch.device('cpu')
HYPER = [name for name, row in RESIDUALS.items() if row.connection is Hyper]
SPHERE = [name for name, row in RESIDUALS.items() if row.connection is Sphere]
LONG = dict(dropout=0.2, eval_interval=3, max_iters=12)


def load(path):
    return torch.load(path, weights_only=True)


def python(*words, timeout=120, **env):
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, 'OMP_NUM_THREADS': '1', **env})


# -----------------------------------------------------------------------------
# kills and signals

@pytest.mark.parametrize('mode', ['s2hc'])
def test_twenty_kills_lose_nothing(mode):
    done = python('tests/killing.py', '--kills=20', f'--modes={mode}', '--seed=1')
    assert done.returncode == 0 and 'bit-equal' in done.stdout, done.stdout + done.stderr
    kills, saving, resumptions = map(int, re.findall(r'(\d+) (?:kills|of them|resump)', done.stdout))
    assert kills == 20 and saving >= 2 and resumptions >= 8, done.stdout


def signal_at(monkeypatch, step, *numbers):
    """The process gets signals while it reads the batch of a step."""
    following = TrainLoader.next

    def next_batch(loader):
        if loader.step == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return following(loader)
    monkeypatch.setattr(TrainLoader, 'next', next_batch)


@pytest.fixture(autouse=True)
def handlers():
    """train.py replaces them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize('numbers', [[signal.SIGTERM], [signal.SIGINT],
                                     [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]])
@pytest.mark.parametrize('step', [4, 5])  # the step after which it stops is one of an evaluation, or none
def test_a_signal_saves_and_ends_well(train, tmp_path, monkeypatch, capfd, numbers, step):
    train(**LONG, out_dir=tmp_path / 'whole')
    with monkeypatch.context() as patch:
        signal_at(patch, step, *numbers)
        train(**LONG)
    out = capfd.readouterr()
    assert f'{numbers[0].name}: saving after this step; once more quits' in out.err
    end = rf'stopped by {numbers[0].name}.* after step {step + 1}, saved in .*last\.pt; .*--init_from=resume'
    assert re.search(end, out.out)
    assert load(tmp_path / 'out' / 'last.pt')['iter_num'] == step + 1
    train(**LONG, init_from='resume')
    assert same(what_is_left(tmp_path / 'whole'), what_is_left(tmp_path / 'out'))


SLOW = """
import dataloader, os, time
following = dataloader.TrainLoader.next
def slow(loader):
    print('reading', flush=True)
    time.sleep(30)
dataloader.TrainLoader.next = slow
"""


def test_a_second_signal_quits(data, tmp_path):
    (tmp_path / 'slow.py').write_text(SLOW)
    keys = dict(dataset=data, out_dir=tmp_path / 'out', device='cpu', n_layer=1, n_head=1, n_embd=8, block_size=16,
                batch_size=1, gradient_accumulation_steps=1)
    run = subprocess.Popen([sys.executable, 'train.py', tmp_path / 'slow.py', *words(keys)], cwd=ROOT,
                           text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while 'reading' not in run.stdout.readline():
        pass
    start = time.monotonic()
    run.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=10) == -signal.SIGTERM and time.monotonic() - start < 10
    assert 'SIGTERM: saving after this step' in run.stderr.read()


def words(keys):
    return [f'--{key}={value}' for key, value in keys.items()]


# -----------------------------------------------------------------------------
# going on

def test_auto_starts_and_goes_on(train, tmp_path, capsys):
    train(**LONG, out_dir=tmp_path / 'whole')
    train(**{**LONG, 'max_iters': 7}, init_from='auto')
    assert 'resumed' not in capsys.readouterr().out
    train(**LONG, init_from='auto')
    assert f'resumed {tmp_path}/out/last.pt at step 7' in capsys.readouterr().out
    state, log = what_is_left(tmp_path / 'out')
    whole, whole_log = what_is_left(tmp_path / 'whole')
    assert same(state, whole)
    assert [line for line in log if 'loss' in line] == [line for line in whole_log if 'loss' in line]


def test_a_restart_by_torchrun_goes_on(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    train(max_iters=3)  # nothing to resume: as it was said
    assert 'resumed' not in capsys.readouterr().out
    train()
    assert 'last.pt at step 3' in capsys.readouterr().out


def test_a_restart_leaves_an_older_run_alone(train, trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path / 'out')
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'mine')
    train(max_iters=3)
    assert 'resumed' not in capsys.readouterr().out
    train()
    assert 'last.pt at step 3' in capsys.readouterr().out


def test_a_signal_does_not_save_ruined_weights(train, trained, tmp_path, monkeypatch, snapshot):
    shutil.copytree(trained, tmp_path / 'out')
    before = snapshot(tmp_path / 'out')
    signal_at(monkeypatch, 6, signal.SIGTERM)
    with pytest.raises(UserError, match='the validation loss of step 7 is (nan|inf)'):
        train(init_from='resume', max_iters=20, learning_rate=1e38, grad_clip=0, eval_interval=100)
    assert snapshot(tmp_path / 'out')['last.pt'] == before['last.pt']


def test_a_broken_pipe_loses_nothing(data, tmp_path):
    keys = dict(dataset=data, out_dir=tmp_path / 'out', device='cpu', n_layer=1, n_head=1, n_embd=8, block_size=16,
                batch_size=1, gradient_accumulation_steps=1, max_iters=10**6, eval_interval=10**6, log_interval=1)
    run = subprocess.Popen([sys.executable, '-u', 'train.py', *words(keys)], cwd=ROOT, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(run, 'step 5:')
    run.stdout.close()
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) == 0 and load(tmp_path / 'out' / 'last.pt')['iter_num'] >= 5


def test_changed_settings_are_named(train, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / 'out')
    keys = dict(init_from='resume', max_iters=8, eval_interval=2, log_interval=2, learning_rate=2e-2, weight_decay=0.5,
                dropout=0.1)
    train(**keys)
    note = 'note: other settings than those of .*last.pt: dropout 0.0 -> 0.1, learning_rate 0.01 -> 0.02, ' \
           'weight_decay 0.1 -> 0.5\n'
    assert re.search(note, capsys.readouterr().out)
    groups = load(tmp_path / 'out' / 'last.pt')['optimizer']['param_groups']
    assert [group['weight_decay'] for group in groups] == [0.5, 0.0]  # it is also used
    train(**{**keys, 'max_iters': 9})
    assert 'note: other settings' not in capsys.readouterr().out


def test_betas_are_used(train, trained, tmp_path):
    shutil.copytree(trained, tmp_path / 'out')
    train(init_from='resume', max_iters=7, beta1=0.5, beta2=0.5)
    groups = load(tmp_path / 'out' / 'last.pt')['optimizer']['param_groups']
    assert all(tuple(group['betas']) == (0.5, 0.5) for group in groups)


@pytest.mark.parametrize('left_out', [['optimizer'], ['optimizer', 'iter_num', 'best_val_loss', 'config', 'loader',
                                                      'scaler', 'run', 'job']])
def test_weights_alone_start_a_fresh_optimizer(train, trained, tmp_path, capsys, left_out):
    shutil.copytree(trained, tmp_path / 'out')
    os.remove(tmp_path / 'out' / 'ckpt.pt')
    state = load(trained / 'last.pt')
    torch.save({key: state[key] for key in state if key not in left_out}, tmp_path / 'out' / 'last.pt')
    first = 0 if 'iter_num' in left_out else 6
    run = train(init_from='resume', max_iters=first + 2)
    assert re.search(r'note: .*last\.pt has weights only: the optimizer starts afresh', capsys.readouterr().out)
    assert {state['step'].item() for state in run.optimizer.state.values()} == {2.0}
    assert [line['step'] for line in run.log if 'loss' in line][-2:] == [first + 1, first + 2]


def test_eval_only_writes_nothing(script, trained, data, tmp_path, snapshot):
    shutil.copytree(trained, tmp_path / 'out')
    before = snapshot(tmp_path)
    for keys in (dict(init_from='resume'), dict(init_from='scratch'), dict(init_from='auto')):
        with pytest.raises(SystemExit) as end:
            script('train.py', dataset=data, out_dir=tmp_path / 'out', device='cpu', block_size=16, eval_only=True,
                   **({} if keys['init_from'] != 'scratch' else dict(n_layer=1, n_head=1, n_embd=8)), **keys)
        assert end.value.code == 0
    assert snapshot(tmp_path) == before


# -----------------------------------------------------------------------------
# checkpoints

def test_keep_checkpoints(train, tmp_path):
    train(max_iters=10, eval_interval=2, keep_checkpoints=3)
    kept = sorted(name for name in os.listdir(tmp_path / 'out') if name.startswith('step_'))
    assert kept == ['step_00000006.pt', 'step_00000008.pt', 'step_00000010.pt']
    assert [load(tmp_path / 'out' / name)['iter_num'] for name in kept] == [6, 8, 10]
    assert same(load(tmp_path / 'out' / 'step_00000010.pt'), load(tmp_path / 'out' / 'last.pt'))
    for name in ('last.pt', 'ckpt.pt', 'step_00000010.pt'):  # lost: the one before takes over
        os.remove(tmp_path / 'out' / name)
    run = train(max_iters=10, eval_interval=2, init_from='resume')
    assert [line['step'] for line in run.log if 'loss' in line] == list(range(1, 11))


def test_a_new_run_over_an_old_one(train, tmp_path, capsys):
    train(max_iters=8, eval_interval=4, keep_checkpoints=2)
    assert 'has a run already' not in capsys.readouterr().out
    train(max_iters=4, eval_interval=2, keep_checkpoints=2)
    assert f'note: {tmp_path}/out has a run already, which this one replaces' in capsys.readouterr().out
    kept = sorted(name for name in os.listdir(tmp_path / 'out') if name.startswith('step_'))
    assert kept == ['step_00000002.pt', 'step_00000004.pt']  # the newest, not those of the highest steps


def test_keep_checkpoints_without_links(train, tmp_path, monkeypatch):
    def no_links(*args):
        raise OSError(95, 'Operation not supported')
    monkeypatch.setattr(os, 'link', no_links)
    train(max_iters=4, eval_interval=2, keep_checkpoints=1)
    assert same(load(tmp_path / 'out' / 'step_00000004.pt'), load(tmp_path / 'out' / 'last.pt'))
    assert not os.path.exists(tmp_path / 'out' / 'step_00000002.pt')


def test_the_newest_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / 'nowhere') is None and latest_checkpoint(tmp_path) is None
    for age, name in enumerate(['step_00000002.pt', 'ckpt.pt', 'last.pt']):
        (tmp_path / name).write_bytes(b'')
        os.utime(tmp_path / name, (age, age))
        assert latest_checkpoint(tmp_path) == str(tmp_path / name)
    os.link(tmp_path / 'last.pt', tmp_path / 'step_00000009.pt')
    assert latest_checkpoint(tmp_path) == str(tmp_path / 'last.pt')


def test_a_copied_run_resumes_at_its_end(train, tmp_path):
    train(max_iters=8, eval_interval=2, keep_checkpoints=2)
    for i, name in enumerate(['last.pt', 'step_00000006.pt', 'step_00000008.pt', 'ckpt.pt']):  # cp in another order
        shutil.copyfile(tmp_path / 'out' / ('step_00000006.pt' if name == 'ckpt.pt' else name), tmp_path / 'x')
        os.replace(tmp_path / 'x', tmp_path / 'out' / name)
        os.utime(tmp_path / 'out' / name, (i, i))
    assert latest_checkpoint(tmp_path / 'out') == str(tmp_path / 'out' / 'last.pt')
    os.remove(tmp_path / 'out' / 'last.pt')
    assert latest_checkpoint(tmp_path / 'out') == str(tmp_path / 'out' / 'step_00000008.pt')


def test_an_older_run_is_not_the_newest_for_its_steps(train, tmp_path):
    train(max_iters=8)
    train(max_iters=4, eval_interval=2, always_save_checkpoint=False)
    os.remove(tmp_path / 'out' / 'last.pt')
    best = load(tmp_path / 'out' / 'ckpt.pt')
    torch.save({**best, 'run': 'older', 'iter_num': 100}, tmp_path / 'out' / 'last.pt')
    os.utime(tmp_path / 'out' / 'last.pt', (1, 1))
    assert latest_checkpoint(tmp_path / 'out') == str(tmp_path / 'out' / 'ckpt.pt')


def test_a_full_disk_leaves_the_checkpoints(train, trained, tmp_path, monkeypatch, snapshot):
    shutil.copytree(trained, tmp_path / 'out')
    before = snapshot(tmp_path / 'out')

    def full(path):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr('data.common.sync', full)
    with pytest.raises(UserError, match=r'metrics\.jsonl: cannot be written .*No space left'):
        train(init_from='resume', max_iters=9)
    assert snapshot(tmp_path / 'out').items() >= before.items()
    monkeypatch.undo()
    log = checkpoint.Metrics.log

    def full_later(self, step, **values):
        if step == 8:
            self.file = SimpleNamespace(write=full, close=self.file.close)
        log(self, step, **values)
    monkeypatch.setattr(checkpoint.Metrics, 'log', full_later)
    with pytest.raises(UserError, match=r'metrics\.jsonl: could not be written \(No space left.*--init_from=resume'):
        train(init_from='resume', max_iters=9)
    assert load(tmp_path / 'out' / 'last.pt')['iter_num'] == 6


HOLD = """
import sys, time
from checkpoint import lock_out_dir
held = lock_out_dir(sys.argv[1])
print('held', flush=True)
time.sleep(60)
"""


def test_two_runs_do_not_share_an_out_dir(train, trained, tmp_path, snapshot):
    shutil.copytree(trained, tmp_path / 'out')
    other = subprocess.Popen([sys.executable, '-c', HOLD, tmp_path / 'out'], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE)
    assert other.stdout.readline() == 'held\n'
    before = snapshot(tmp_path / 'out')
    for keys in ({}, dict(init_from='resume', max_iters=8)):
        with pytest.raises(UserError, match=rf'out: another run .*process {other.pid} on .*another --out_dir'):
            train(**keys)
    assert snapshot(tmp_path / 'out') == before
    other.kill()  # whatever its end, the lock goes with it
    other.wait()
    train(init_from='resume', max_iters=8)


def test_lock_needs_a_folder(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='out_dir = .*file: cannot be written to .*another --out_dir'):
        lock_out_dir(tmp_path / 'file')


# -----------------------------------------------------------------------------
# memory

def saved_bytes(model, idx):
    """Bytes that the forward keeps for the backward, parameters apart."""
    own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        kept.append(x)  # or the storage of another tensor may get the same address
        return x
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(idx, idx)
    return sum(seen.values())


@pytest.mark.parametrize('mode', RESIDUALS)
def test_recompute_has_the_same_gradients(mode):
    torch.manual_seed(0)
    config = GPTConfig(block_size=32, vocab_size=64, n_layer=3, n_head=2, n_embd=32, dropout=0.1, residual=mode)
    model, idx = GPT(config), torch.randint(64, (2, 32))
    grads, losses = [], []
    for model.recompute in (False, True):
        torch.manual_seed(1)
        _, loss = model(idx, idx)
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads.append([p.grad.clone() for p in model.parameters()])
    assert losses[0] == losses[1] and all(map(torch.equal, *grads))
    whole = saved_bytes(model.train(), idx)
    model.recompute = False
    assert whole < 0.6 * saved_bytes(model, idx)


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['pre_ln', 'proj_spheret', 's2hc', 'mhc'])
def test_memory_of_recompute(mode):
    """GPT-2 (124M) with a batch of 1 x 1024, float32: a block's stream is all that stays."""
    model = GPT(GPTConfig(block_size=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768, residual=mode))
    idx, sizes = torch.randint(50304, (1, 1024)), []
    for model.recompute in (False, True):
        sizes.append(saved_bytes(model, idx) / 2**20)
    print(f'{mode}: {sizes[0]:,.0f} MiB kept for the backward, {sizes[1]:,.0f} MiB with recompute')
    streams = 12 * 1024 * 768 * 4 * (4 if mode in HYPER else 1) / 2**20
    logits = 2 * 1024 * 50304 * 4 / 2**20  # and their log-softmax
    assert sizes[1] < 1.2 * (streams + logits) < sizes[0]


def test_recompute_changes_no_run(train, tmp_path):
    for value in (False, True):
        train(dropout=0.2, recompute=value, residual='s2hc', out_dir=tmp_path / str(value))
    first, second = (what_is_left(tmp_path / name) for name in ('False', 'True'))
    assert same(first, second)


# -----------------------------------------------------------------------------
# what is logged

@pytest.mark.parametrize('mode', ['pre_ln', 'proj_spheret', 's2hc', 'mhc', 'hc'])
def test_health(mode):
    torch.manual_seed(0)
    config = GPTConfig(block_size=16, vocab_size=32, n_layer=2, n_head=2, n_embd=16, residual=mode)
    model, idx = GPT(config).double().eval(), torch.randint(32, (1, 16))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        health = model.health(idx)
        t = model.transformer
        x = t.open(t.drop(t.emb(t.wte(idx) + t.wpe.weight)))
        for block in t.h:
            x = block(x)
    assert health['stream_norm'] == pytest.approx(x.square().sum(-1).sqrt().mean().item(), rel=1e-6)
    assert ('on_bound' in health) == (mode in SPHERE)
    if mode in SPHERE:
        raw = {name: p.item() for name, p in model.named_parameters() if name.endswith('.raw')}
        scalars = {name: math.log1p(math.exp(x)) for name, x in raw.items()}
        on_bound = sum(y >= (4.0 if 'radius' in name else 1.0) for name, y in scalars.items())
        assert (health['bounded'], health['on_bound']) == (len(scalars), on_bound) and 0 < on_bound < len(scalars) == 5
    if mode in HYPER:
        H = np.concatenate([H_res.numpy().reshape(-1, 4, 4) for _, _, H_res in model.residual_matrices(idx)])
        assert health['row_sums_off'] == pytest.approx(abs(H.sum(2) - 1).max(), abs=1e-12)
        assert health['column_sums_off'] == pytest.approx(abs(H.sum(1) - 1).max(), abs=1e-12)
        assert (health['row_sums_off'] < 1e-9) == (mode != 'hc')
        assert (health['column_sums_off'] < 1e-9) == (mode == 's2hc')
    else:
        assert 'row_sums_off' not in health


def test_mfu_and_speed(train, monkeypatch):
    """5 of 8 steps are timed: the first three are not, nor is an evaluation; the peak is that of the chip."""
    monkeypatch.setattr(checkpoint, 'peak_flops', lambda device: 1e9)
    run = train(max_iters=8, eval_interval=4)
    lines = [line for line in run.log if 'loss' in line]
    assert [line['tokens_per_s'] is None for line in lines] == [True] * 3 + [False] * 5
    flops = run.raw_model.flops_per_token()
    for line in lines[3:]:
        assert line['mfu'] == pytest.approx(flops * line['tokens_per_s'] / 1e9)


def test_an_evaluation_is_not_in_the_throughput(train, monkeypatch):
    health = GPT.health

    def slow(model, idx):
        time.sleep(0.5)
        return health(model, idx)
    monkeypatch.setattr(GPT, 'health', slow)
    run = train(max_iters=8, eval_interval=4, log_interval=4)
    [last] = [line for line in run.log if line['step'] == 8 and 'loss' in line]
    assert last['tokens_per_s'] > 128 * 4 / 0.5


def test_the_first_steps_are_not_in_the_throughput(train, monkeypatch):
    following = TrainLoader.next

    def next_batch(loader):
        time.sleep(1.0 * (loader.step == 1))
        return following(loader)
    monkeypatch.setattr(TrainLoader, 'next', next_batch)
    [line] = [line for line in train(max_iters=8, eval_interval=8, log_interval=8).log if 'loss' in line]
    assert line['tokens_per_s'] > 2 * 128 * 8 / 1.0  # 8 steps and the slow one would be at most half of that


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA H200', 989e12), ('NVIDIA B200', 2250e12), ('NVIDIA GeForce RTX 4090', 165e12), ('NVIDIA L40S', 362e12),
    ('NVIDIA L4', 121e12), ('AMD Instinct MI300X', 1307e12), ('NVIDIA A10G', 70e12), ('NVIDIA A10', 125e12),
    ('NVIDIA GH200 480GB', 989e12), ('NVIDIA GeForce GTX 1080', None)])
def test_peaks(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: name)
    assert peak_flops(torch.device('cuda')) == peak and peak_flops(CPU) is None
    assert peak is None or peak in PEAKS.values()


def test_peak_memory():
    before = peak_memory(CPU)
    block = torch.ones(2**25)  # 128 MiB
    assert 100 < peak_memory(CPU) < 2**16 and peak_memory(CPU) >= before and block[0] == 1


def test_wandb_without_an_account(data, tmp_path):
    keys = dict(dataset=data, out_dir=tmp_path / 'out', device='cpu', n_layer=1, n_head=1, n_embd=8, block_size=16,
                batch_size=1, gradient_accumulation_steps=1, max_iters=2, wandb_log=True)
    env = dict(WANDB_DIR=str(tmp_path), HOME=str(tmp_path), WANDB_SILENT='true', NETRC=str(tmp_path / 'none'))
    ids = []
    for more in ({}, dict(init_from='resume', max_iters=4)):
        done = python('train.py', *words(keys | more), **env)
        assert done.returncode == 0, done.stderr
        ids.append(load(tmp_path / 'out' / 'last.pt')['run'])
    assert ids[0] and ids[0] == ids[1]  # one curve
    runs = [name for name in os.listdir(tmp_path / 'wandb') if name.startswith('offline-run-')]
    assert len(runs) == 2 and all(name.endswith(ids[0]) for name in runs)


# -----------------------------------------------------------------------------
# many processes

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def torchrun(*options, **keys):
    command = [sys.executable, '-m', 'torch.distributed.run', *options, 'train.py', *words(keys)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1'})


def wait_for(process, text, seen=''):
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


@pytest.fixture
def shards(tmp_path):
    """Three shards with tails, in which 20 steps of 8 windows of 16 pass two shard ends and an epoch end."""
    folder, rng = tmp_path / 'shards', np.random.default_rng(0)
    folder.mkdir()
    for split, i, n in (('val', 0, 200), ('train', 1, 1000), ('train', 2, 700)):
        (folder / f'web_{split}_{i:06}.bin').write_bytes(header(n) + rng.integers(50, size=n).astype('<u2').tobytes())
    return folder


MODEL = dict(device='cpu', n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=50304, batch_size=2, max_iters=20,
             gradient_accumulation_steps=4, eval_interval=10, log_interval=1, warmup_iters=0, learning_rate=3e-4)


@pytest.mark.slow
def test_one_two_and_four_processes(shards, tmp_path):
    cases = [(mode, dtype) for mode in ('pre_ln', 's2hc', 'proj_spheret') for dtype in ('float32', 'float64')]
    for world in (1, 2, 4):
        runs = [words({**MODEL, 'dataset': shards, 'residual': mode, 'dtype': dtype,
                       'out_dir': tmp_path / f'{mode}-{dtype}-{world}'}) for mode, dtype in cases]
        done = python('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={world}', 'tests/driver.py',
                      json.dumps(runs))
        assert done.returncode == 0, done.stderr
    for mode, dtype in cases:
        logs = [[json.loads(line) for line in open(tmp_path / f'{mode}-{dtype}-{world}' / 'metrics.jsonl')]
                for world in (1, 2, 4)]
        losses = [[line[key] for line in log for key in ('loss', 'val_loss') if key in line] for log in logs]
        assert [len(run) for run in losses] == [23] * 3 and logs[0][-2]['epoch'] > 1.5
        differences = [max(abs(a - b) for a, b in zip(losses[0], other)) for other in losses[1:]]
        print(f'{mode}, {dtype}: largest difference of a loss to one process: {differences[0]:.1e} with 2, '
              f'{differences[1]:.1e} with 4')
        assert max(differences) < (1e-11 if dtype == 'float64' else 1e-5)


def kill_a_rank(out_dir, restarts, **keys):
    """Starts two ranks, kills the second at step 20; returns torchrun's exit code, output and seconds to the end."""
    run = torchrun('--standalone', '--nproc_per_node=2', f'--max-restarts={restarts}', **keys, out_dir=out_dir)
    seen = wait_for(run, 'step 20: validation loss')
    start = time.monotonic()
    ranks = subprocess.run(['pgrep', '-P', str(run.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    out, _ = run.communicate(timeout=200)
    return run.returncode, seen + out, time.monotonic() - start


def test_torchrun_restarts_a_rank_that_dies(shards, tmp_path):
    keys = {**MODEL, 'dataset': shards, 'eval_interval': 5, 'dropout': 0.2, 'max_iters': 60}
    whole = torchrun('--standalone', '--nproc_per_node=2', **keys, out_dir=tmp_path / 'whole')
    code, out, _ = kill_a_rank(tmp_path / 'killed', 1, **keys)
    whole_out, _ = whole.communicate(timeout=200)
    assert whole.returncode == 0, whole_out
    assert code == 0 and re.search(r'resumed .*(last|ckpt)\.pt at step \d\d', out), out
    assert same(what_is_left(tmp_path / 'whole'), what_is_left(tmp_path / 'killed'))


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job(shards, tmp_path):
    keys = {**MODEL, 'dataset': shards, 'eval_interval': 5, 'max_iters': 10000}
    code, out, seconds = kill_a_rank(tmp_path / 'out', 0, **keys)
    assert code != 0 and 'Signal 9 (SIGKILL)' in out and seconds < 60
    assert load(tmp_path / 'out' / 'last.pt')['iter_num'] >= 20


@pytest.mark.slow
def test_torchrun_and_sigterm(shards, tmp_path):
    keys = {**MODEL, 'dataset': shards, 'max_iters': 100000, 'eval_interval': 100000, 'out_dir': tmp_path / 'out'}
    run = torchrun('--standalone', '--nproc_per_node=2', **keys)
    wait_for(run, 'step 20:')
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=60)
    [step] = re.findall(r'stopped by .* after step (\d+), saved', out)
    assert load(tmp_path / 'out' / 'last.pt')['iter_num'] == int(step) >= 20
    run = torchrun('--standalone', '--nproc_per_node=2', **{**keys, 'max_iters': int(step) + 2, 'init_from': 'resume'})
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0 and f'last.pt at step {step}' in out


@pytest.mark.slow
def test_two_nodes(shards, tmp_path):
    port = free_port()
    options = ['--nnodes=2', '--nproc_per_node=1', '--rdzv_backend=c10d', f'--rdzv_endpoint=127.0.0.1:{port}',
               '--rdzv_id=test']
    keys = {**MODEL, 'dataset': shards}
    nodes = [torchrun(*options, **keys, out_dir=tmp_path / 'two') for _ in range(2)]
    outs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    alone = torchrun('--standalone', '--nproc_per_node=1', **keys, out_dir=tmp_path / 'one')
    alone.communicate(timeout=60)
    losses = [[json.loads(line).get('loss', 0) for line in open(tmp_path / name / 'metrics.jsonl')]
              for name in ('one', 'two')]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.slow
def test_nodes_that_do_not_share_the_out_dir(shards, tmp_path, monkeypatch):
    """Rank 1 does not see the checkpoint."""
    keys = {**MODEL, 'dataset': shards, 'max_iters': 5, 'out_dir': tmp_path / 'a'}
    torchrun('--standalone', '--nproc_per_node=1', **keys).communicate(timeout=60)
    port, env = free_port(), {**os.environ, 'OMP_NUM_THREADS': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1'}
    keys |= dict(init_from='auto', max_iters=9)
    ranks = [subprocess.Popen([sys.executable, 'train.py', *words({**keys, 'out_dir': tmp_path / name})],
                              cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**env, 'MASTER_PORT': str(port), 'RANK': str(rank), 'LOCAL_RANK': str(rank)})
             for rank, name in enumerate('ab')]
    outs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert all(rank.returncode != 0 for rank in ranks)
    assert 'error: the processes would begin at different steps, [5, 0]: out_dir' in outs[0]


# -----------------------------------------------------------------------------
# torch.compile

@pytest.mark.slow
@pytest.mark.parametrize('mode', RESIDUALS)
def test_compiled_is_eager(train, tmp_path, mode):
    """Losses of 5 steps, and checkpoints that cross over: saved compiled and loaded eager, and back."""
    torch._dynamo.reset()  # it gives up, and runs eager, after a few models in one process
    torch._dynamo.utils.counters.clear()
    keys = dict(residual=mode, n_layer=1, max_iters=5, eval_interval=5, learning_rate=1e-3)
    logs = [train(**keys, compile=value, out_dir=tmp_path / str(value)) for value in (False, True)]
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] >= 2  # training and evaluation
    assert not torch._dynamo.utils.counters['graph_break']
    for name in ('losses', 'val_losses'):
        assert getattr(logs[0], name) == pytest.approx(getattr(logs[1], name), abs=1e-4)
    for saved, loaded in ((False, True), (True, False)):
        shutil.copytree(tmp_path / str(saved), tmp_path / f'{saved}-{loaded}')
        out_dir = tmp_path / f'{saved}-{loaded}'
        logs.append(train(**{**keys, 'max_iters': 8}, compile=loaded, out_dir=out_dir, init_from='resume'))
    assert logs[2].losses == pytest.approx(logs[3].losses, abs=1e-4) and len(logs[2].losses) == 8
