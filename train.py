"""
Trains a GPT whose residual connection is a config key.

On one CPU or GPU:            python train.py config/default.py
With another residual mode:   python train.py config/default.py --residual=s2hc
On one node with 8 GPUs:      torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

The keys below are all there is to set; `python train.py --help` lists them. The defaults are nanoGPT's: GPT-2 (124M) on
OpenWebText. Every random draw is a pure function of (seed, step, rank): evaluating more often or restarting a run does
not change it, and the data does not depend on the number of processes.
"""
import os

# Before torch is loaded: threads that wait shall sleep. Spinning ones make a tiny model several times slower as soon as
# anything else runs on the machine.
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from checkpoint import (
    DTYPES,
    autocast,
    build_model,
    load_checkpoint,
    model_from_checkpoint,
    pick_device,
    pretrained,
    save_checkpoint,
)
from configurator import UserError, configure, require
from data.common import replace_file
from dataloader import GPT2, ORDERS, TrainLoader, find_dataset, open_dataset, read_meta, val_batches
from model import CHOICES, GPTConfig
from spheretnorm import Bounded

# -----------------------------------------------------------------------------
# output
out_dir = 'out'                   # folder of metrics.jsonl, ckpt.pt (best), last.pt and loss.png
eval_interval = 2000              # steps between evaluations; the last step always evaluates
eval_tokens = 0                   # validation tokens of an evaluation, from the start of the split; 0 = all of it
eval_only = False                 # evaluate once, train nothing, write nothing
log_interval = 10                 # steps between lines of metrics.jsonl and of the console
always_save_checkpoint = True     # write last.pt at every evaluation, not only at the end
init_from = 'scratch'             # scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a checkpoint file, or a
                                  # folder of transformers' save_pretrained
seed = 1337                       # of weights, data order and dropout
# wandb
wandb_log = False                 # log to Weights & Biases too
wandb_project = 'residual-gpt'    # its project
wandb_run_name = ''               # its run; empty = out_dir
# data
dataset = 'openwebtext'           # a folder of data/, or a path to one
data_order = None                 # of the training windows; None = random for train.bin, sequential for shards
gradient_accumulation_steps = 40  # micro-steps of a step over all processes: divided by their number
batch_size = 12                   # windows of a micro-step of one process
block_size = 1024                 # tokens of a window
# model
n_layer = 12                      # blocks: an attention and an MLP each
n_head = 12                       # attention heads
n_embd = 768                      # channels
dropout = 0.0                     # 0 for pretraining, 0.1 and more for finetuning
bias = False                      # biases in Linears and norms
vocab_size = 0                    # size of the head; 0 = the data's, GPT-2's padded from 50257 to 50304
gelu_tanh = False                 # GPT-2's tanh form of the GELU
# residual connection
residual = 'pre_ln'               # the mode: a row of RESIDUALS in model.py
norm = None                       # its normalisation; None = the mode's
place = None                      # where a branch is normalised; None = the mode's
n_streams = 4                     # hyper-connections: number of streams; 1 = the plain residual
static = False                    # hyper-connections: matrices that do not depend on the token
readout = 'mean'                  # hyper-connections: how the streams are joined at the end
p = 0.5                           # p_spheret: order of the retraction, inf = exponential map
decay = None                      # sphere: step size over depth; None = the mode's
bound = 'project'                 # sphere: how the step size and the radius keep their bounds; clamp = the paper's
dyt_alpha = 0.5                   # norm dyt or derf: initial a0 of tanh(a0 x) and erf(a0 x)
embed_norm = False                # a norm of the embedding (Peri-LN's option)
embed_scale = False               # a learned scale of the embedding, first sqrt(n_embd) (DyT's option)
# optimizer: AdamW
learning_rate = 6e-4              # the largest one
max_iters = 600000                # steps
weight_decay = 1e-1               # of matrices and embeddings; nothing else decays
beta1 = 0.9                       # AdamW
beta2 = 0.95                      # AdamW
grad_clip = 1.0                   # largest norm of the gradient; 0 = off
# learning rate: linear warm-up, then a cosine
decay_lr = True                   # False: constant after the warm-up
warmup_iters = 2000               # steps of the warm-up
lr_decay_iters = 600000           # steps until min_lr
min_lr = 6e-5                     # the learning rate from there on
# system
device = 'auto'                   # cpu, cuda, cuda:N, mps; auto = the best that there is
dtype = 'auto'                    # auto = bfloat16 on CUDA (float16 where it has none), float32 elsewhere
compile = False                   # torch.compile: faster steps for a minute of waiting
backend = 'auto'                  # of torch.distributed; auto = nccl on CUDA, gloo elsewhere
# -----------------------------------------------------------------------------
config, given = configure(
    globals(),
    choices={**CHOICES, 'data_order': ORDERS, 'dtype': ('auto', *DTYPES), 'backend': ('auto', 'nccl', 'gloo')},
    positive=('eval_interval', 'log_interval', 'gradient_accumulation_steps', 'batch_size', 'block_size', 'n_layer',
              'n_head', 'n_embd', 'n_streams', 'p', 'learning_rate', 'max_iters', 'lr_decay_iters'),
    renamed={'eval_iters': 'set eval_tokens: it counts tokens, eval_iters x batch_size x block_size'})

out_dir, init_from = os.path.expanduser(out_dir), os.path.expanduser(init_from)

# -----------------------------------------------------------------------------
# processes and devices

rank, world, local_rank = (int(os.environ.get(key, default)) for key, default in
                           (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
ddp = 'RANK' in os.environ  # torchrun sets these
master = rank == 0
if gradient_accumulation_steps % world:
    raise UserError(f'gradient_accumulation_steps = {gradient_accumulation_steps} is not a multiple of the {world} '
                    f'processes: take {math.ceil(gradient_accumulation_steps / world) * world}')
micro_steps = gradient_accumulation_steps // world
if ddp and device in ('auto', 'cuda') and torch.cuda.is_available():
    device = f'cuda:{local_rank}'
device, dtype = pick_device(device, dtype)
if ddp and device.type == 'cuda':
    torch.cuda.set_device(device)
wandb = require('wandb', 'wandb_log=True') if wandb_log and not eval_only else None
pyplot = require('matplotlib.pyplot', 'loss.png') if not eval_only else None


def say(line):
    if master:
        tqdm.write(line)


# -----------------------------------------------------------------------------
# data and model

data_dir = find_dataset(dataset)
meta = read_meta(data_dir)
n_vocab = meta['vocab_size']
model_keys = list(GPTConfig.__dataclass_fields__)
iter_num, best_val_loss, checkpoint = 0, math.inf, {}
torch.manual_seed(seed)
if init_from == 'scratch':
    vocab_size = vocab_size or (50304 if n_vocab == 50257 else n_vocab)
    model = build_model({**{key: config[key] for key in model_keys}, 'vocab_size': vocab_size})
elif init_from == 'resume' or os.path.isfile(init_from):
    if init_from == 'resume':  # the newer one: with always_save_checkpoint=False, last.pt may be that of an older run
        names = [os.path.join(out_dir, name) for name in ('last.pt', 'ckpt.pt')]
        init_from = max(filter(os.path.isfile, names), key=os.path.getmtime, default=names[1])
    checkpoint = load_checkpoint(init_from)
    model = model_from_checkpoint(checkpoint, init_from, **({'dropout': dropout} if 'dropout' in given else {}))
elif init_from.startswith('gpt2') or os.path.isdir(init_from):
    model, checkpoint = pretrained(init_from, dropout=dropout), {'tokenizer': GPT2['tokenizer']}
else:
    raise UserError(f'init_from = {init_from}: none of scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl, nor a '
                    'checkpoint file or a folder that exists')
resuming = config['init_from'] == 'resume'

# where the weights come from somewhere, they decide what the model is; only the context may be made shorter
for key in model_keys:
    has, wanted = getattr(model.config, key), config[key]
    if key in given and has != wanted and not (key == 'vocab_size' and wanted == 0):
        if key == 'block_size' and wanted < has:
            model.crop_block_size(wanted)
        else:
            raise UserError(f'{init_from} has {key} = {has}, not {wanted}: drop the key, or take --init_from=scratch')
    config[key] = getattr(model.config, key)
block_size, vocab_size = model.config.block_size, model.config.vocab_size
if vocab_size < n_vocab:
    raise UserError(f'vocab_size = {vocab_size} is smaller than the vocabulary of {data_dir}, {n_vocab}: '
                    '--vocab_size=0 takes that')
if checkpoint.get('tokenizer', meta['tokenizer']) != meta['tokenizer']:
    raise UserError(f'{init_from} was trained with another tokenizer or vocabulary than that of {data_dir}: '
                    'take its own data set, or --init_from=scratch')
files = open_dataset(data_dir, meta, block_size, scan=master)
tokens_per_step = gradient_accumulation_steps * batch_size * block_size

if dtype == 'float64':  # for checks of exactness
    model.double()
model.to(device)
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device.type)
loader = TrainLoader(files['train'], block_size, (micro_steps, world, batch_size), rank, seed, data_order, device)
if resuming:
    try:
        iter_num, best_val_loss = checkpoint['iter_num'], float(checkpoint['best_val_loss'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        loader.load_state_dict(checkpoint.get('loader', {**loader.state_dict(), 'step': iter_num}))  # nanoGPT has none
        if any(state['exp_avg'].shape != weight.shape for weight, state in optimizer.state.items()):  # torch is silent
            raise ValueError('the shapes of the optimizer are not the shapes of the weights')
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise UserError(f'{init_from} cannot be resumed, its training state is missing or foreign ({e}): '
                        f'start from its weights with --init_from={init_from}') from None
    say(f'resumed {init_from} at step {iter_num}')
checkpoint = None  # frees the memory

say(f'residual = {model.config.residual}: {model.get_num_params():,} parameters, '
    f'{model.flops_per_token():,} FLOPs a token')
say('{}: {:,} tokens to train on, {:,} to validate on'.format(
    data_dir, *(sum(map(len, files[split])) for split in ('train', 'val'))))
say(f'{tokens_per_step:,} tokens a step, on {device} in {dtype}' + (f', {world} processes' if ddp else ''))
for key in sorted((given & set(model_keys)) - model.used):
    say(f'note: {key} has no effect with residual = {model.config.residual}')

raw_model = model
if compile:
    say('compiling the model (takes a minute)...')
    model = torch.compile(model)
eval_model = model  # without DDP, whose forward would talk to ranks that may have no batch left
if ddp:
    dist.init_process_group('nccl' if backend == 'auto' and device.type == 'cuda' else
                            'gloo' if backend == 'auto' else backend)
    model = DDP(model, device_ids=[device.index] if device.type == 'cuda' else None)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')

# -----------------------------------------------------------------------------
# evaluation, learning rate, log


@torch.no_grad()
def evaluate():
    """Mean loss in nats over the validation windows."""
    raw_model.eval()
    total, count = 0.0, 0
    for x, y, n in val_batches(files['val'], batch_size, block_size, eval_tokens, device, rank, world):
        with autocast(device, dtype):
            _, loss = eval_model(x, y)
        total, count = total + loss.item() * n, count + n
    raw_model.train()
    if ddp:
        sums = torch.tensor([total, count], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        total, count = sums.tolist()
    return total / count


def health():
    """What only some modes have: how many of a sphere's step sizes and its radius sit on their upper bound."""
    bounded = [m.on_bound() for m in raw_model.modules() if isinstance(m, Bounded)]
    return {'on_bound': int(torch.stack(bounded).sum()), 'bounded': len(bounded)} if bounded else {}


def learning_rate_at(step):
    """Linear warm-up, then a cosine down to min_lr: a pure function of the step."""
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if not decay_lr:
        return learning_rate
    done = min(1.0, (step - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - min_lr)


def log(**line):
    """A line of metrics.jsonl, written out at once."""
    line = {'step': iter_num, 'tokens': iter_num * tokens_per_step, **line}
    metrics.write(json.dumps(line) + '\n')
    metrics.flush()
    if wandb:
        wandb.log(line, step=iter_num)


def save(name):
    save_checkpoint({
        'model': raw_model.state_dict(),
        'optimizer': optimizer.state_dict(),
        'model_args': {key: getattr(raw_model.config, key) for key in model_keys},
        'iter_num': iter_num,
        'best_val_loss': best_val_loss,
        'config': config,
        'tokenizer': meta['tokenizer'],
        'loader': loader.state_dict(),
    }, os.path.join(out_dir, name))


def stop_unless_finite(loss, step, name='loss'):
    if not math.isfinite(loss):
        paths = [os.path.join(out_dir, name) for name in ('last.pt', 'ckpt.pt')]
        kept = next((f'{path} is untouched' for path in paths if os.path.isfile(path)), 'no checkpoint was written yet')
        raise UserError(f'the {name} of step {step} is {loss} with residual = {config["residual"]}: stopped, {kept}; '
                        'a smaller learning_rate or a longer warm-up may help')


class LossWatch:
    """
    Stops the run at the first loss that is not finite. On CUDA it looks at a loss when the next step is under way,
    through a copy that has arrived by then: the GPU never waits for the question.
    """

    def __init__(self):
        self.late = device.type == 'cuda'
        self.step = None
        if self.late:
            self.loss, self.arrived = torch.zeros((), pin_memory=True), torch.cuda.Event()

    def push(self, step, loss):
        self.check()
        self.step = step
        if self.late:
            self.loss.copy_(loss, non_blocking=True)
            self.arrived.record()
        else:
            self.loss = loss
            self.check()

    def check(self):
        if self.step is not None:
            if self.late:
                self.arrived.synchronize()
            stop_unless_finite(self.loss.item(), self.step)
        self.step = None


def draw_losses():
    """loss.png from metrics.jsonl"""
    with open(os.path.join(out_dir, 'metrics.jsonl'), encoding='utf-8') as f:
        lines = [json.loads(line) for line in f]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout='constrained')
    for key, label, style in (('loss', 'training', dict(alpha=0.5)), ('val_loss', 'validation', dict(marker='o'))):
        points = [(line['step'], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel='step', ylabel='loss (nats per token)',
             title=f'{raw_model.config.residual} on {os.path.basename(data_dir)}: validation loss {val_loss:.4f}')
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(os.path.join(out_dir, 'loss.png'), dpi=150)
    except OSError as e:
        say(f'note: loss.png could not be written ({e})')  # the run is done, and saved


if eval_only:
    say(f'step {iter_num}: validation loss {evaluate():.4f}')
    sys.exit(0)

# -----------------------------------------------------------------------------
# training

if master:
    path = os.path.join(out_dir, 'metrics.jsonl')
    kept = []
    try:
        os.makedirs(out_dir, exist_ok=True)
        if resuming and os.path.isfile(path):  # what was logged after the checkpoint will be logged again
            with open(path, encoding='utf-8') as f:
                lines = [(json.loads(line), line) for line in f if line.endswith('\n')]  # a kill may have cut the last
            kept = [line for fields, line in lines if fields['step'] <= iter_num - ('val_loss' in fields)]
        replace_file(path, lambda aside: Path(aside).write_text(''.join(kept), encoding='utf-8'))
        metrics = open(path, 'a', encoding='utf-8')
    except (OSError, ValueError) as e:
        raise UserError(f'out_dir = {out_dir}: {path} cannot be written or continued ({e}); '
                        'take another --out_dir') from None
    if wandb:
        wandb.init(project=wandb_project, name=wandb_run_name or out_dir, config=config)

watch = LossWatch()
bar = tqdm(total=max_iters, initial=iter_num, unit='step', disable=None if master else True)  # None: on a terminal
clock, clock_steps = time.perf_counter(), 0
while True:
    last = iter_num >= max_iters
    if last or iter_num % eval_interval == 0:
        watch.check()
        val_loss = evaluate()
        stop_unless_finite(val_loss, iter_num, 'validation loss')  # before anything is saved
        better = val_loss < best_val_loss and iter_num > 0  # what has learned nothing is not worth a checkpoint
        best_val_loss = val_loss if better else best_val_loss
        if master:
            say(f'step {iter_num}: validation loss {val_loss:.4f}')
            log(val_loss=val_loss, best_val_loss=min(best_val_loss, val_loss), **health())
            if better:
                save('ckpt.pt')
            if last or always_save_checkpoint and iter_num > 0:
                save('last.pt')
        clock, clock_steps = time.perf_counter(), 0  # evaluating and saving is not training time
    if last:
        break

    lr = learning_rate_at(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr
    torch.manual_seed(int(np.random.SeedSequence((seed, iter_num, rank)).generate_state(1)[0]))  # dropout's draws
    mean_loss = 0.0  # over micro-steps and ranks
    for micro_step, (x, y) in enumerate(loader.next()):
        if ddp:  # the gradients travel once a step
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        with autocast(device, dtype):
            _, loss = model(x, y)
        scaler.scale(loss / micro_steps).backward()
        mean_loss += loss.detach() / (micro_steps * world)
    if ddp:
        dist.all_reduce(mean_loss)
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    watch.push(iter_num, mean_loss)
    iter_num, clock_steps = iter_num + 1, clock_steps + 1
    bar.update()

    if iter_num % log_interval == 0 and master:
        step_loss, norm = mean_loss.item(), grad_norm.item()
        seconds = (time.perf_counter() - clock) / clock_steps
        log(loss=step_loss, lr=lr, grad_norm=norm, tokens_per_s=tokens_per_step / seconds)
        bar.set_postfix(loss=f'{step_loss:.3f}')
        if bar.disable:
            say(f'step {iter_num}: loss {step_loss:.4f}, {seconds * 1e3:.0f} ms')
        clock, clock_steps = time.perf_counter(), 0

bar.close()
if master:
    metrics.close()
    draw_losses()
    say(f'final validation loss {val_loss:.4f}, best {best_val_loss:.4f}; in {out_dir}: ckpt.pt (best), last.pt, '
        'metrics.jsonl, loss.png')
    if wandb:
        wandb.finish()
if ddp:
    dist.barrier()  # the files of the run are complete when any of its processes ends
    dist.destroy_process_group()
