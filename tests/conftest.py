"""What the tests of train.py and sample.py share: a tiny data set, and the scripts run inside this process."""
import os

os.environ['HF_HUB_OFFLINE'] = '1'  # before transformers is imported: no test asks a hub

import json
import random
import re
import runpy
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

import kernels
from data.common import write_dataset
from data.tokenizer import get_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TINY = dict(device='cpu', n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4, gradient_accumulation_steps=2,
            max_iters=6, eval_interval=3, log_interval=1, learning_rate=1e-2, warmup_iters=0, lr_decay_iters=100)


def run_script(name, plot=False, **keys):
    """The globals of a script run as `python NAME --key=value ...`; loss.png, the slow part of a tiny run, only with
    plot=True."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [str(ROOT / name), *(f'--{key}={value}' for key, value in keys.items())])
        patch.setattr(sys, 'excepthook', sys.excepthook)  # configure() replaces it
        if not plot:
            pyplot = MagicMock()
            pyplot.subplots.return_value = MagicMock(), MagicMock()
            patch.setitem(sys.modules, 'matplotlib.pyplot', pyplot)
        try:
            return SimpleNamespace(**runpy.run_path(str(ROOT / name), run_name='__main__'))
        finally:
            kernels.select('auto')  # of the whole process
            signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if dist.is_initialized():
                dist.destroy_process_group()


def read_log(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()]


def run_train(**keys):
    """run_script for a tiny model, and: log (lines of metrics.jsonl), losses, val_losses, weights."""
    run = run_script('train.py', **{**TINY, **keys})
    run.log = read_log(keys['out_dir'])
    run.losses = [line['loss'] for line in run.log if 'loss' in line]
    run.val_losses = [line['val_loss'] for line in run.log if 'val_loss' in line]
    run.weights = run.raw_model.state_dict()
    return run


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Waiting for the disk takes longer than all else, and only a power cut could tell."""
    monkeypatch.setattr('data.common.sync', lambda path: None)


@pytest.fixture
def moved(monkeypatch):
    """Counts the bytes that the interpreter loads and stores, with the tiles that a GPU gets."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    count = Counter()
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def counting(function, way):
        def wrapped(self, pointers, *args):
            mask = args[0] if way == 'read' else args[1]
            count[way] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return function(self, pointers, *args)
        return wrapped

    monkeypatch.setattr(Builder, 'create_masked_load', counting(load, 'read'))
    monkeypatch.setattr(Builder, 'create_masked_store', counting(store, 'written'))
    monkeypatch.setattr(kernels, 'ELEMENTS', 512)
    kernels.select('triton')
    yield count
    kernels.select('auto')


@pytest.fixture
def triton_on():
    kernels.select('triton')
    yield
    kernels.select('auto')


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))


def compile_ahead(*args, **keys):
    """(what kernels.aot says, ptx) of a kernel that neither spills nor has atomics."""
    found = kernels.aot(*args, **keys)
    ptx = found.pop('ptx')
    assert found['spills'] == 0 and found['stack'] == 0, (args, keys, found)
    assert not re.search(r'\b(atom|red)\.', ptx), (args, keys)
    return found, ptx


def in_the_interpreter(path, marks):
    """Runs the tests of kernels in a file in a process of their own, where Triton interprets."""
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', marks, '-k',
               'TestKernels or TestBytes', path]
    env = {**os.environ, 'TRITON_INTERPRET': '1'}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r'\b[1-9]\d* passed', done.stdout) and 'skipped' not in done.stdout


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    """Folder of a data set of 5000 characters, 20 distinct ones, a few of them not in ASCII; not to be written to."""
    draw = random.Random(0)
    words = ['the', 'cat', 'sat', 'on', 'a', 'mat', 'dog', 'ran', 'to', 'him', 'naïve', '—']
    text = ''
    while len(text) < 5000:
        text += draw.choice(words) + draw.choice('    \n')
    text = text[:5000]
    folder = tmp_path_factory.mktemp('data') / 'words'
    write_dataset(folder, get_tokenizer({'name': 'char', 'chars': ''.join(sorted(set(text)))}), text, 'words', '0')
    return folder


@pytest.fixture(scope='session')
def trained(data, tmp_path_factory):
    """out_dir of a run of 6 steps; not to be written to."""
    out = tmp_path_factory.mktemp('trained') / 'out'
    run_train(dataset=data, out_dir=out)
    return out


@pytest.fixture
def train(data, tmp_path):
    """train(key=value, ...) trains a tiny model, into tmp_path/out unless out_dir says otherwise."""
    return lambda **keys: run_train(**{'dataset': data, 'out_dir': tmp_path / 'out', **keys})


@pytest.fixture
def script():
    return run_script


@pytest.fixture
def snapshot():
    """snapshot(folder): what is in it, to the byte."""
    return lambda folder: {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
                           for path in sorted(Path(folder).rglob('*'))}


def build_nanogpt_checkpoint(n_layer=2, n_embd=16, block_size=16, vocab_size=20, bias=False, dataset='words', prefix='',
                             masks=False, seed=0):
    """
    A checkpoint as nanoGPT's train.py writes it, from its documentation alone: random weights under its names, in its
    order, AdamW's state in its order (first what has two dimensions, then the rest), plain types in its config.
    prefix: of the names, where the model was compiled. masks: the buffers of the days before flash attention.
    """
    draw = torch.Generator().manual_seed(seed)
    C = n_embd
    shapes = {'transformer.wte.weight': (vocab_size, C), 'transformer.wpe.weight': (block_size, C)}
    for i in range(n_layer):
        for name, shape in (('ln_1', (C,)), ('attn.c_attn', (3 * C, C)), ('attn.c_proj', (C, C)),
                            ('ln_2', (C,)), ('mlp.c_fc', (4 * C, C)), ('mlp.c_proj', (C, 4 * C))):
            shapes[f'transformer.h.{i}.{name}.weight'] = shape
            if bias:
                shapes[f'transformer.h.{i}.{name}.bias'] = shape[:1]
    shapes['transformer.ln_f.weight'] = (C,)
    if bias:
        shapes['transformer.ln_f.bias'] = (C,)
    weights = {name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items()}
    groups = [[name for name in shapes if len(shapes[name]) == 2], [name for name in shapes if len(shapes[name]) == 1]]
    state = {i: {'step': torch.tensor(7.0), 'exp_avg': torch.randn(shapes[name], generator=draw) * 1e-3,
                 'exp_avg_sq': torch.rand(shapes[name], generator=draw) * 1e-5}
             for i, name in enumerate(sum(groups, []))}
    sizes = len(groups[0]), len(groups[1])
    common = {'lr': 1e-3, 'betas': (0.9, 0.95), 'eps': 1e-8, 'amsgrad': False, 'foreach': None, 'maximize': False,
              'capturable': False, 'differentiable': False, 'fused': None}
    model = {prefix + name: w for name, w in weights.items()}
    model[prefix + 'lm_head.weight'] = weights['transformer.wte.weight']
    if masks:
        for i in range(n_layer):
            model[f'{prefix}transformer.h.{i}.attn.bias'] = torch.ones(block_size, block_size).tril()[None, None]
    return {
        'model': model,
        'optimizer': {'state': state, 'param_groups': [
            {**common, 'weight_decay': 0.1, 'params': list(range(sizes[0]))},
            {**common, 'weight_decay': 0.0, 'params': list(range(sizes[0], sum(sizes)))}]},
        'model_args': {'n_layer': n_layer, 'n_head': 2, 'n_embd': C, 'block_size': block_size, 'bias': bias,
                       'vocab_size': vocab_size, 'dropout': 0.0},
        'iter_num': 7,
        'best_val_loss': torch.tensor(2.5),
        'config': {'out_dir': 'out', 'eval_interval': 5, 'wandb_log': False, 'dataset': str(dataset),
                   'learning_rate': 1e-3, 'device': 'cpu', 'dtype': 'float32', 'compile': bool(prefix)},
    }


@pytest.fixture
def nanogpt_checkpoint():
    return build_nanogpt_checkpoint
