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

import math
import signal
import sys
import time
import uuid

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from checkpoint import (DTYPES, Metrics, autocast, build_model, catch_signals, keep_copies, latest_checkpoint,
                        load_checkpoint, lock_out_dir, model_from_checkpoint, peak_flops, peak_memory, pick_device,
                        pick_kernels, pretrained, restore, save_checkpoint, start_process_group)
from configurator import UserError, configure, require
from dataloader import GPT2, ORDERS, TrainLoader, find_dataset, open_dataset, read_meta, val_batches
from model import CHOICES, GPTConfig

# -----------------------------------------------------------------------------
# output
out_dir = 'out'                   # folder of metrics.jsonl, ckpt.pt (best), last.pt and loss.png
eval_interval = 2000              # steps between evaluations; the last step always evaluates
eval_tokens = 0                   # validation tokens of an evaluation, from the start of the split; 0 = all of it
eval_only = False                 # evaluate once, train nothing, write nothing
eval_tasks = ''                   # benchmarks at every evaluation: tasks of evaluate.py, with commas between them
eval_examples = 100               # examples of each of them, the first; 0 = all
log_interval = 10                 # steps between lines of metrics.jsonl and of the console
always_save_checkpoint = True     # write last.pt at every evaluation, not only at the end
keep_checkpoints = 0              # also keep the last.pt of this many evaluations, as step_00001000.pt
init_from = 'scratch'             # scratch, resume, auto (resume where there is a run, else scratch), gpt2,
                                  # gpt2-medium, gpt2-large, gpt2-xl, a checkpoint file, or a folder of
                                  # transformers' save_pretrained
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
res_init = None                   # mhc, mhc_lite, kromhc, s2hc: how even H_res starts; 0 = uniform, None = the mode's
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
recompute = False                 # compute each block again in the backward instead of keeping it: less memory
kernels = 'auto'                  # of kernels.py: auto = on CUDA; triton = or fail; eager = plain torch
compile = False                   # torch.compile: faster steps for a minute of waiting
backend = 'auto'                  # of torch.distributed; auto = nccl on CUDA, gloo elsewhere
# -----------------------------------------------------------------------------
config, given = configure(
    globals(),
    choices={**CHOICES, 'res_init': float, 'data_order': ORDERS, 'kernels': ('auto', 'triton', 'eager'),
             'dtype': ('auto', *DTYPES), 'backend': ('auto', 'nccl', 'gloo')},
    positive=('eval_interval', 'log_interval', 'gradient_accumulation_steps', 'batch_size', 'block_size', 'n_layer',
              'n_head', 'n_embd', 'n_streams', 'p', 'learning_rate', 'max_iters', 'lr_decay_iters'),
    renamed={'eval_iters': 'set eval_tokens: it counts tokens, eval_iters x batch_size x block_size'})

out_dir, init_from = os.path.expanduser(out_dir), os.path.expanduser(init_from)
# keys that may differ from those of a resumed checkpoint: they change nothing of what is computed
FREE = {'out_dir', 'eval_interval', 'eval_only', 'eval_tasks', 'eval_examples', 'log_interval', 'keep_checkpoints',
        'always_save_checkpoint', 'init_from', 'wandb_log', 'wandb_project', 'wandb_run_name', 'max_iters', 'device',
        'recompute', 'kernels', 'compile', 'backend'}

# -----------------------------------------------------------------------------
# processes and devices

rank, world, local_rank = (int(os.environ.get(key, default)) for key, default in
                           (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
ddp, master = 'RANK' in os.environ, rank == 0  # torchrun sets it
if gradient_accumulation_steps % world:
    raise UserError(f'gradient_accumulation_steps = {gradient_accumulation_steps} is not a multiple of the {world} '
                    f'processes: take {math.ceil(gradient_accumulation_steps / world) * world}')
micro_steps = gradient_accumulation_steps // world
if ddp and device in ('auto', 'cuda') and torch.cuda.is_available():
    device = f'cuda:{local_rank}'
device, dtype = pick_device(device, dtype)
pick_kernels(kernels)
if ddp and device.type == 'cuda':
    torch.cuda.set_device(device)
wandb = require('wandb', 'wandb_log=True') if wandb_log and not eval_only else None
pyplot = require('matplotlib.pyplot', 'loss.png') if not eval_only else None


def say(line):
    if master:
        try:
            tqdm.write(line)
        except BrokenPipeError:  # the reader is gone, as tee is after Ctrl-C; the run is not
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


# a restart by torchrun goes on from the last checkpoint of its job
job, newest = os.environ.get('TORCHELASTIC_RUN_ID'), latest_checkpoint(out_dir)
if init_from == 'auto' or int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)):
    own = newest and (init_from == 'auto' or load_checkpoint(newest).get('job') == job)
    init_from = 'resume' if own else 'scratch' if init_from == 'auto' else init_from
resuming = init_from == 'resume'
writes = master and not eval_only
out_dir_lock = lock_out_dir(out_dir) if writes and resuming and newest else None

# -----------------------------------------------------------------------------
# data and model

data_dir = find_dataset(dataset)
meta = read_meta(data_dir)
n_vocab, benchmarks = meta['vocab_size'], None
if eval_tasks:
    from evaluate import Benchmarks
    benchmarks = Benchmarks(eval_tasks, eval_examples, meta['tokenizer'], device, dtype)
model_keys = list(GPTConfig.__dataclass_fields__)
iter_num, best_val_loss, checkpoint = 0, math.inf, {}
torch.manual_seed(seed)
if init_from == 'scratch':
    vocab_size = vocab_size or (50304 if n_vocab == 50257 else n_vocab)
    model = build_model({**{key: config[key] for key in model_keys}, 'vocab_size': vocab_size})
elif init_from == 'resume' or os.path.isfile(init_from):
    if resuming:
        init_from = newest or os.path.join(out_dir, 'last.pt')
    checkpoint = load_checkpoint(init_from)
    model = model_from_checkpoint(checkpoint, init_from, **({'dropout': dropout} if 'dropout' in given else {}))
elif init_from.startswith('gpt2') or os.path.isdir(init_from):
    model, checkpoint = pretrained(init_from, dropout=dropout), {'tokenizer': GPT2['tokenizer']}
else:
    raise UserError(f'init_from = {init_from}: none of scratch, resume, auto, gpt2, gpt2-medium, gpt2-large, gpt2-xl, '
                    'nor a checkpoint file or a folder that exists')

# where the weights come from somewhere, they decide what the model is; only the context may be made shorter
for key in model_keys:
    has, wanted = getattr(model.config, key), config[key]
    if key in given and has != wanted and not (key == 'vocab_size' and wanted == 0):
        if key == 'block_size' and wanted < has:
            model.crop_block_size(wanted)
        else:
            raise UserError(f'{init_from} has {key} = {has}, not {wanted}: drop the key or set --{key}={has}, or take '
                            '--init_from=scratch')
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

model.to(device=device, dtype=torch.float64 if dtype == 'float64' else None)  # float64: for checks of exactness
model.recompute = recompute
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device.type)
loader = TrainLoader(files['train'], block_size, (micro_steps, world, batch_size), rank, seed, data_order, device)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
if resuming:
    iter_num, best_val_loss = restore(checkpoint, init_from, optimizer, loader, scaler)
    say(f'resumed {init_from} at step {iter_num}')
    if 'optimizer' not in checkpoint:
        say(f'note: {init_from} has weights only: the optimizer starts afresh')
    was = checkpoint.get('config', {})
    changed = ', '.join(f'{key} {was[key]} -> {config[key]}' for key in sorted((config.keys() & was.keys()) - FREE)
                        if config[key] != was[key])
    if changed:
        say(f'note: other settings than those of {init_from}: {changed}')
    if iter_num >= max_iters and os.path.basename(init_from) == 'last.pt' and not eval_only:
        say(f'the run in {out_dir} has finished its max_iters = {max_iters} steps; a larger --max_iters goes on')
        sys.exit(0)
run = resuming and checkpoint.get('run') or uuid.uuid4().hex[:8]  # the same over all resumptions
checkpoint = None  # frees the memory

say(f'residual = {model.config.residual}: {model.get_num_params():,} parameters, '
    f'{model.flops_per_token():,} FLOPs a token')
say('{}: {:,} tokens to train on, {:,} to validate on'.format(
    data_dir, *(sum(map(len, files[split])) for split in ('train', 'val'))))
say(f'{tokens_per_step:,} tokens a step, on {device} in {dtype}' + (f', {world} processes' if ddp else ''))
if writes and not resuming and newest:
    say(f'note: {out_dir} has a run already, which this one replaces')
for key in sorted((given & set(model_keys)) - model.used):
    say(f'note: {key} has no effect with residual = {model.config.residual}')

raw_model = model
if compile:
    say('compiling the model (takes a minute)...')
    model = torch.compile(model)
eval_model = model  # without DDP, whose forward would talk to ranks that may have no batch left
if ddp:
    start_process_group(backend, device)
    dist.all_gather_object(steps := [None] * world, iter_num)
    if len(set(steps)) > 1:
        raise UserError(f'the processes would begin at different steps, {steps}: out_dir = {out_dir} must be a folder '
                        'that all nodes share')
    model = DDP(model, device_ids=[device.index] if device.type == 'cuda' else None)

# -----------------------------------------------------------------------------
# evaluation, learning rate, log


health = {}  # of the stream, at the last evaluation


@torch.no_grad()
def evaluate(max_tokens):
    """Mean loss in nats over validation windows (0 = all); rank 0 also looks at the health of the stream."""
    raw_model.eval()
    total, count = 0.0, 0
    for x, y, n in val_batches(files['val'], batch_size, block_size, max_tokens, device, rank, world):
        with autocast(device, dtype):
            _, loss = eval_model(x, y)
        total, count = total + loss.item() * n, count + n
    if master:
        x, _, _ = next(val_batches(files['val'], 1, block_size, block_size, device))  # always the same window
        with autocast(device, dtype):
            health.update(raw_model.health(x))
    raw_model.train()
    if ddp:
        sums = torch.tensor([total, count], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        total, count = sums.tolist()
    return total / count


def learning_rate_at(step):
    """Linear warm-up, then a cosine down to min_lr: a pure function of the step."""
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if not decay_lr:
        return learning_rate
    done = min(1.0, (step - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (learning_rate - min_lr)


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
        'scaler': scaler.state_dict(),
        'run': run,
        'job': job,
    }, os.path.join(out_dir, name))


def stop_unless_finite(loss, step, name='loss'):
    if not math.isfinite(loss):
        paths = [os.path.join(out_dir, name) for name in ('last.pt', 'ckpt.pt')]
        kept = next((f'{path} is untouched' for path in paths if os.path.isfile(path)), 'no checkpoint was written yet')
        raise UserError(f'the {name} of step {step} is {loss} with residual = {config["residual"]}: stopped, {kept}; '
                        'a smaller learning_rate or a longer warm-up may help')


class Watch:
    """
    Stops the run at the first loss that is not finite, and after a signal that any process got. It looks at the sums
    over all processes, so that all of them decide the same; on CUDA when the next step is under way, through a copy
    that has arrived by then: the GPU never waits for the question.
    """

    def __init__(self):
        self.late, self.step, self.stop = device.type == 'cuda', None, False
        if self.late:
            self.totals, self.arrived = torch.zeros(2, pin_memory=True), torch.cuda.Event()

    def push(self, step, totals):
        """totals (2,): the mean loss, and whether (> 0) to stop."""
        self.check()
        self.step = step
        if self.late:
            self.totals.copy_(totals, non_blocking=True)
            self.arrived.record()
        else:
            self.totals = totals
            self.check()

    def check(self):
        if self.step is not None:
            if self.late:
                self.arrived.synchronize()
            loss, signalled = self.totals.tolist()
            stop_unless_finite(loss, self.step)
            self.stop |= signalled > 0
        self.step = None


if eval_only:
    say(f'step {iter_num}: validation loss {evaluate(eval_tokens):.4f}')
    benchmarks and benchmarks.score(raw_model, iter_num, say)
    sys.exit(0)
if benchmarks:  # what cannot be scored is an error now, before anything is written
    benchmarks.run(raw_model, 1)

# -----------------------------------------------------------------------------
# training

if master:
    out_dir_lock = out_dir_lock or lock_out_dir(out_dir)
    if wandb:
        no_account = not (os.environ.get('WANDB_MODE') or wandb.api.api_key)
        wandb.init(project=wandb_project, name=wandb_run_name or out_dir, config=config, id=run, resume='allow',
                   mode='offline' if no_account else None)
    metrics = Metrics(out_dir, wandb, tokens_per_step, resume_at=iter_num if resuming else None)
signals = catch_signals(loud=master)
watch = Watch()
first_iter, peak = iter_num, peak_flops(device)
bar = tqdm(total=max_iters, initial=iter_num, unit='step', disable=None if master else True)  # None: on a terminal
clock, clock_steps = time.perf_counter(), 0
while True:
    last = iter_num >= max_iters
    if last or iter_num % eval_interval == 0 and not watch.stop:
        watch.check()
        val_loss = evaluate(eval_tokens)
        say(f'step {iter_num}: validation loss {val_loss:.4f}')
        stop_unless_finite(val_loss, iter_num, 'validation loss')  # before anything is saved
        better = val_loss < best_val_loss and iter_num > 0  # what has learned nothing is not worth a checkpoint
        best_val_loss = val_loss if better else best_val_loss
        if master:
            metrics.log(iter_num, val_loss=val_loss, best_val_loss=min(best_val_loss, val_loss), **health)
            if better:
                save('ckpt.pt')
            if last or always_save_checkpoint and iter_num > 0:
                save('last.pt')
                if keep_checkpoints:
                    keep_copies(os.path.join(out_dir, 'last.pt'), iter_num, keep_checkpoints)
        scores = benchmarks and benchmarks.score(raw_model, iter_num, say)
        if master and scores:
            metrics.log(iter_num, **scores)
        clock, clock_steps = time.perf_counter(), 0  # evaluating and saving is not training time
    elif watch.stop:
        stop_unless_finite(evaluate(block_size), iter_num, 'validation loss')  # the last step may have ruined them
        if master:
            save('last.pt')
    if last or watch.stop:
        break

    lr = learning_rate_at(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr
    torch.manual_seed(int(np.random.SeedSequence((seed, iter_num, rank)).generate_state(1)[0]))  # dropout's draws
    totals = torch.zeros(2, dtype=DTYPES[dtype] if dtype == 'float64' else torch.float32, device=device)
    for micro_step, (x, y) in enumerate(loader.next()):
        if ddp:  # the gradients travel once a step
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        with autocast(device, dtype):
            _, loss = model(x, y)
        scaler.scale(loss / micro_steps).backward()
        totals[0] += loss.detach() / (micro_steps * world)  # the mean over micro-steps and ranks
    if signals:
        totals[1] += 1
    if ddp:
        dist.all_reduce(totals)
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    watch.push(iter_num, totals)
    iter_num, clock_steps = iter_num + 1, clock_steps + 1
    bar.update()

    if iter_num == first_iter + 3:  # the first steps compile and warm up
        clock, clock_steps = time.perf_counter(), 0
    if iter_num % log_interval == 0 and master:
        step_loss, norm = totals[0].item(), grad_norm.item()
        speed = mfu = None
        if clock_steps and iter_num > first_iter + 3:
            seconds = (time.perf_counter() - clock) / clock_steps
            speed = tokens_per_step / seconds
            mfu = peak and raw_model.estimate_mfu(tokens_per_step / block_size / world, seconds, peak)
        metrics.log(iter_num, loss=step_loss, lr=lr, grad_norm=norm, epoch=loader.epochs, tokens_per_s=speed, mfu=mfu,
                    memory_mb=peak_memory(device))
        text = f'{speed:,.0f} tokens/s, MFU {f"{mfu:.1%}" if mfu else "n/a"}' if speed else 'warming up'
        bar.set_postfix_str(f'loss {step_loss:.3f}, {text}')
        if bar.disable:
            say(f'step {iter_num}: loss {step_loss:.4f}, {text}')
        clock, clock_steps = time.perf_counter(), 0

bar.close()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # all is saved: a late copy of the signal is no second one
if master:
    if watch.stop and not last:
        names = ', '.join(signal.Signals(number).name for number in signals) or 'a signal to another process'
        say(f'stopped by {names} after step {iter_num}, saved in {out_dir}/last.pt; to go on, run the same command '
            'with --init_from=resume')
    else:
        name = f'{raw_model.config.residual} on {os.path.basename(data_dir)}'
        metrics.draw(pyplot, f'{name}: validation loss {val_loss:.4f}')
        say(f'final validation loss {val_loss:.4f}, best {best_val_loss:.4f}; in {out_dir}: ckpt.pt (best), last.pt, '
            'metrics.jsonl, loss.png')
    metrics.close()
if ddp:
    dist.barrier()  # the files of the run are complete when any of its processes ends
    dist.destroy_process_group()
