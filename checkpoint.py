"""
The files of a run and the devices that it runs on: what the scripts share. Every error is a UserError that
names the file.

A checkpoint is nanoGPT's dict (model, optimizer, model_args, iter_num, best_val_loss, config) and the tokenizer's
identity. It holds only tensors and plain types, so torch.load(weights_only=True) opens it: reading one runs no code.
"""
import contextlib
import glob
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import kernels
from configurator import UserError, explain, require
from data.common import lock, replace_file
from data.tokenizer import get_tokenizer
from dataloader import GPT2, find_dataset, read_meta
from model import GPT, GPTConfig

DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def pick_device(device, dtype):
    """torch.device and name of the dtype for the keys of these names; 'auto' takes the best that the machine has."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        if not re.fullmatch(r'cpu|cuda(:\d+)?|mps', device):
            raise RuntimeError('not one of cpu, cuda, cuda:N, mps')
        device = torch.device(device)
        if device.type == 'cuda' and not torch.cuda.is_available():
            raise RuntimeError('this machine, or this build of torch, has no CUDA')
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        why = str(e).splitlines()[0]
        raise UserError(f'device = {device}: cannot be used ({why}); --device=auto takes what there is') from None
    if dtype == 'auto':
        bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported()
        dtype = 'bfloat16' if bf16 else 'float16' if device.type == 'cuda' else 'float32'
    if device.type == 'mps' and dtype == 'float64':
        raise UserError('dtype = float64: mps has none; take --device=cpu')
    return device, dtype


def start_process_group(backend, device):
    """torch.distributed for the processes that torchrun started; backend 'auto' is nccl on CUDA, else gloo."""
    if backend == 'auto':
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
    try:
        store, rank, world = next(dist.rendezvous('env://'))
        if os.environ.get('GROUP_WORLD_SIZE', '1') == '1':
            # torchrun keeps its store over a restart (seen in torch 2.13): without names of their own the new processes
            # find the addresses of the dead, and wait. Nodes count their restarts apart, see docs/training.md.
            store = dist.PrefixStore(f'start {os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    except (RuntimeError, ValueError) as e:  # DistError is a RuntimeError
        raise UserError(f'torch.distributed could not start with backend = {backend} ({str(e).splitlines()[0]}): start '
                        'all processes by torchrun, see docs/training.md') from None


def pick_kernels(choice):
    """kernels.select for the key kernels."""
    try:
        kernels.select(choice)
    except ValueError as e:
        raise UserError(str(e)) from None


# dense bf16 peaks of the data sheets, FLOPs a second; the first name that the name of the chip contains
PEAKS = {
    'B200': 2250e12, 'GB200': 2250e12, 'B300': 2250e12, 'GH200': 989e12, 'H200': 989e12, 'H100 PCIe': 756e12,
    'H100 NVL': 835e12, 'H100': 989e12, 'H800': 989e12, 'H20': 148e12, 'A100': 312e12, 'A800': 312e12, 'A40': 150e12,
    'A30': 165e12, 'A10G': 70e12, 'A10': 125e12, 'L40S': 362e12, 'L40': 181e12, 'L4': 121e12, 'RTX A6000': 155e12,
    'RTX 6000 Ada': 364e12, '5090': 210e12, '4090': 165e12, '3090': 71e12, 'MI355X': 2516e12, 'MI325X': 1307e12,
    'MI300X': 1307e12, 'MI250X': 383e12,
}


def peak_flops(device):
    """The dense bf16 peak of a device in FLOPs a second; None for one that PEAKS does not have."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else ''
    return next((peak for chip, peak in PEAKS.items() if re.search(rf'\b{chip}\b', name)), None)


def peak_memory(device):
    """The most memory in MiB that this process has had: on a CUDA device, else resident in the machine's."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def autocast(device, dtype):
    """The mixed precision context of a dtype; float32 and float64 have none."""
    half = dtype in ('bfloat16', 'float16')
    return torch.autocast(device.type, DTYPES[dtype]) if half else contextlib.nullcontext()


def build_model(model_args, what='the model'):
    """GPT from the fields of GPTConfig."""
    try:
        return GPT(GPTConfig(**model_args))
    except (ValueError, TypeError, RuntimeError) as e:  # RuntimeError: more memory than there is
        raise UserError(f'{what}: {explain(e) or str(e).splitlines()[0][:300]}') from None


def save_checkpoint(checkpoint, path):
    try:
        replace_file(path, lambda aside: torch.save(checkpoint, aside))
    except (OSError, RuntimeError) as e:
        why = str(e).splitlines()[0]
        raise UserError(f'{path}: could not be written ({why}); what was there before is untouched') from None


def identity(path):
    """(run, step) of a checkpoint, without reading its tensors; None if it cannot be read."""
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        return checkpoint.get('run'), checkpoint['iter_num']
    except Exception:  # as in load_checkpoint, which says what is wrong once it is the one to be read
        return None


def latest_checkpoint(out_dir):
    """
    The checkpoint with the highest step, None if there is none. A folder may also hold some of an older run that the
    present one has not replaced yet: the run is that of the newest file, the step counts within it, for a copied folder
    has new times.
    """
    paths = [os.path.join(out_dir, name) for name in ('last.pt', 'ckpt.pt')]
    paths += glob.glob(os.path.join(glob.escape(out_dir), 'step_*.pt'))
    found = {path: identity(path) for path in paths if os.path.isfile(path)}
    newest = max(found, key=os.path.getmtime, default=None)
    if not newest or not found[newest]:
        return newest
    own = [path for path in found if found[path] and found[path][0] == found[newest][0]]
    return max(own, key=lambda path: found[path][1])  # the first of equals, last.pt


def keep_copies(path, step, n):
    """A second name for the checkpoint `path` of a step, step_00001000.pt; the n newest such files stay."""
    out_dir, copy = os.path.dirname(path), os.path.join(os.path.dirname(path), f'step_{step:08}.pt')
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(copy)
        try:
            os.link(path, copy)
        except OSError:  # a file system without links
            replace_file(copy, lambda aside: shutil.copyfile(path, aside))
        run, _ = identity(path)
        copies = {old: identity(old) for old in glob.glob(os.path.join(glob.escape(out_dir), 'step_*.pt'))}
        own = sorted((known[1], old) for old, known in copies.items() if known and known[0] == run)
        for old in copies.keys() - {old for _, old in own[-n:]}:  # also those of an older run
            os.remove(old)
    except OSError as e:
        raise UserError(f'{copy}: could not be written ({e.strerror}); {path} is complete') from None


def load_checkpoint(path):
    """The dict of a checkpoint of this repository or of nanoGPT, on the CPU, the model's parameter names cleaned up."""
    if not os.path.isfile(path):
        raise UserError(f'{path}: there is no such checkpoint; train first, or name the folder of a run or a '
                        'checkpoint file')
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # a damaged file makes torch.load raise anything, or advise to read it unsafely
        raise UserError(f'{path}: not a checkpoint, a damaged one, or one that would run code when read '
                        f'({type(e).__name__}); remove it to resume from an older one, or name another '
                        'file') from None
    if not (isinstance(checkpoint, dict) and all(isinstance(checkpoint.get(k), dict) for k in ('model', 'model_args'))):
        raise UserError(f'{path}: a foreign checkpoint: no model and model_args, as this repository and nanoGPT write')
    # torch.compile and DDP prefix the names; old nanoGPTs saved the causal mask, which is no parameter
    state = {key.removeprefix('_orig_mod.').removeprefix('module.'): v for key, v in checkpoint['model'].items()}
    checkpoint['model'] = {key: v for key, v in state.items() if not key.endswith(('.attn.bias', '.attn.masked_bias'))}
    return checkpoint


def model_from_checkpoint(checkpoint, path, **overrides):
    """The GPT of a loaded checkpoint; overrides (such as dropout) change fields that its weights do not depend on."""
    unknown = set(checkpoint['model_args']) - set(GPTConfig.__dataclass_fields__)
    if unknown:
        names = ', '.join(sorted(map(str, unknown)))
        raise UserError(f'{path}: a foreign checkpoint: model_args has {names}, unknown here')
    state = checkpoint['model']
    embedding, head = state.get('transformer.wte.weight'), state.get('lm_head.weight')
    if embedding is not None and head is not None and not torch.equal(embedding, head):
        raise UserError(f'{path}: a foreign checkpoint: its head and token embedding differ, here they are one matrix')
    model = build_model({**checkpoint['model_args'], **overrides}, path)
    try:
        model.load_state_dict(state)
    except RuntimeError as e:
        raise UserError(f'{path}: the weights do not fit its model_args ({str(e).splitlines()[1].strip()})') from None
    return model


def restore(checkpoint, path, optimizer, loader, scaler):
    """Puts the training state of a loaded checkpoint into its three owners; returns its step and best loss. One with
    weights only leaves the optimizer as it is."""
    settings = [{key: value for key, value in group.items() if key != 'params'} for group in optimizer.param_groups]
    try:
        if 'optimizer' not in checkpoint:
            checkpoint = {'iter_num': 0, 'best_val_loss': math.inf, **checkpoint}
        step, best_val_loss = checkpoint['iter_num'], float(checkpoint['best_val_loss'])
        loader.load_state_dict(checkpoint.get('loader', {**loader.state_dict(), 'step': step}))  # nanoGPT has none
        scaler.load_state_dict(checkpoint.get('scaler') or scaler.state_dict())
        optimizer.load_state_dict(checkpoint.get('optimizer', optimizer.state_dict()))
        for group, values in zip(optimizer.param_groups, settings):
            group.update(values)  # the settings of this run, not those that load_state_dict brings
        if any(state['exp_avg'].shape != weight.shape for weight, state in optimizer.state.items()):  # torch is silent
            raise ValueError('the shapes of the optimizer are not the shapes of the weights')
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise UserError(f'{path} cannot be resumed, its training state is missing or foreign ({e}): '
                        f'start from its weights with --init_from={path}') from None
    return step, best_val_loss


def pretrained(name, **overrides):
    """GPT.from_pretrained with one-line errors."""
    require('transformers', name)
    try:
        return GPT.from_pretrained(name, overrides)
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise UserError(f'{name}: could not be loaded as a GPT-2 ({str(e).splitlines()[0]})') from None


def open_model(path, dataset=''):
    """
    (model, identity of its tokenizer, checkpoint) of the folder of a run (its ckpt.pt), a checkpoint file, gpt2,
    gpt2-medium, gpt2-large, gpt2-xl, or a folder of transformers' save_pretrained; for the last two checkpoint is {}.
    dataset: whose tokenizer a checkpoint of nanoGPT has, which names only that; empty = that name.
    """
    path = os.path.expanduser(path)
    file = os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path
    if not os.path.isfile(file) and (os.path.isfile(os.path.join(path, 'config.json')) or path.startswith('gpt2')):
        return pretrained(path), GPT2['tokenizer'], {}
    checkpoint = load_checkpoint(file)
    model, identity = model_from_checkpoint(checkpoint, file), checkpoint.get('tokenizer')
    if identity is None:
        dataset = dataset or (checkpoint.get('config') or {}).get('dataset', 'openwebtext')
        identity = (read_meta(find_dataset(dataset)) if model.config.vocab_size < 50257 else GPT2)['tokenizer']
    return model, identity, checkpoint


def open_tokenizer(identity, model, path):
    """The tokenizer of open_model(path), which must not have more tokens than the model."""
    tokenizer = get_tokenizer(identity)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise UserError(f'{path}: the model has {model.config.vocab_size} tokens, its tokenizer {tokenizer.n_vocab}; '
                        'is that the data set it was trained on?')
    return tokenizer


# -----------------------------------------------------------------------------
# the end and the other files of a run


def catch_signals(loud):
    """
    From now on SIGINT and SIGTERM only say that they came: the caller finishes its step, saves and ends. A second one
    that is not torchrun's or Slurm's copy of the first quits at once. Returns signal -> when it first came, a dict that
    fills. loud: print a line.
    """
    came = {}

    def on_signal(number, frame):
        if time.monotonic() - came.setdefault(number, time.monotonic()) > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif loud:
            name = signal.Signals(number).name
            with contextlib.suppress(OSError):  # nobody may read it any more
                os.write(2, f'\n{name}: saving after this step; once more quits at once\n'.encode())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return came


def lock_out_dir(out_dir):
    """Makes out_dir and keeps other runs out of it until this process ends; the caller keeps what this returns."""
    path = os.path.join(out_dir, '.lock')
    try:
        os.makedirs(out_dir, exist_ok=True)
        held = lock(path)
        if held is None:
            owner = Path(path).read_text(encoding='utf-8').strip()
            raise UserError(f'out_dir = {out_dir}: another run is writing to it ({owner}); wait for its end, or take '
                            'another --out_dir')
        held.truncate(0)
        held.write(f'process {os.getpid()} on {os.uname().nodename}\n')
        held.flush()
        return held
    except OSError as e:
        raise UserError(f'out_dir = {out_dir}: cannot be written to ({e}); take another --out_dir') from None


class Metrics:
    """
    metrics.jsonl in out_dir, a JSON object a line, written out at once, and the same to wandb (None = not).
    resume_at: keep the lines that a run resumed at this step had already written; what was logged after its checkpoint
    will be logged again.
    """

    def __init__(self, out_dir, wandb, tokens_per_step, resume_at=None):
        self.path, self.wandb = os.path.join(out_dir, 'metrics.jsonl'), wandb
        self.tokens_per_step = tokens_per_step
        kept = []
        try:
            if resume_at is not None and os.path.isfile(self.path):
                with open(self.path, encoding='utf-8') as f:
                    lines = [(json.loads(line), line) for line in f if line.endswith('\n')]  # a kill may cut the last
                kept = [line for fields, line in lines if fields['step'] <= resume_at - ('loss' not in fields)]
            replace_file(self.path, lambda aside: Path(aside).write_text(''.join(kept), encoding='utf-8'))
            self.file = open(self.path, 'a', encoding='utf-8')
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f'{self.path}: cannot be written or continued ({e}); remove it, or take another '
                            '--out_dir') from None

    def log(self, step, **values):
        line = {'step': step, 'tokens': step * self.tokens_per_step, **values}
        try:
            self.file.write(json.dumps(line) + '\n')
            self.file.flush()
        except OSError as e:
            raise UserError(f'{self.path}: could not be written ({e.strerror}); the checkpoints are whole: make room '
                            'and go on with --init_from=resume') from None
        if self.wandb:
            self.wandb.log(line, step=step)

    def close(self):
        self.file.close()
        if self.wandb:
            self.wandb.finish()

    def draw(self, pyplot, title):
        """loss.png beside it, by matplotlib's pyplot."""
        with open(self.path, encoding='utf-8') as f:
            lines = [json.loads(line) for line in f]
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout='constrained')
        for key, label, style in (('loss', 'training', dict(alpha=0.5)), ('val_loss', 'validation', dict(marker='o'))):
            points = [(line['step'], line[key]) for line in lines if key in line]
            if points:
                axes.plot(*zip(*points), label=label, **style)
        axes.set(xlabel='step', ylabel='loss (nats per token)', title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        path = os.path.join(os.path.dirname(self.path), 'loss.png')
        try:
            figure.savefig(path, dpi=150)
        except OSError as e:
            print(f'note: {path} could not be written ({e.strerror})')  # the run is done, and saved
