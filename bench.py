"""
What a residual connection costs: time of a training step against the first mode's.

    OMP_NUM_THREADS=1 python bench.py
    OMP_NUM_THREADS=1 python bench.py --modes=pre_ln,s2hc --steps=60

The modes take turns, step by step, in one process, so that a slower minute of the machine meets all of them. The ratio
is the median of the step-by-step ratios, with its 95% bootstrap interval. A step is forward, backward, clip and AdamW.
"""
import importlib.util
import time

import numpy as np
import torch
from tqdm import trange

from checkpoint import pick_device
from configurator import UserError, configure
from model import GPT, RESIDUALS, GPTConfig

# -----------------------------------------------------------------------------
modes = 'all'       # residual modes with commas between them, or all; the first is the one to compare with
steps = 30          # timed steps of each
yardstick = ''      # a Python file with PlainGPT(vocab, block, n_layer, n_head, n_embd) to compare with instead
n_layer = 6         # of the models, as in train.py
n_head = 8
n_embd = 256
n_streams = 4
bias = True
block_size = 128
batch_size = 8
vocab_size = 512
device = 'auto'     # cpu, cuda, cuda:N, mps; auto = the best that there is
# -----------------------------------------------------------------------------
configure(globals(), positive=('steps', 'n_layer', 'n_head', 'n_embd', 'n_streams', 'block_size', 'batch_size',
                               'vocab_size'))

names = list(RESIDUALS) if modes == 'all' else modes.split(',')
if unknown := set(names) - set(RESIDUALS):
    raise UserError(f'modes: {", ".join(sorted(unknown))} does not exist: choose from {", ".join(RESIDUALS)}')
device, _ = pick_device(device, 'float32')
torch.manual_seed(0)
idx, targets = torch.randint(0, vocab_size, (2, batch_size, block_size), device=device)


def contestant(model, optimizer, loss):
    """One training step as a function, and the number of parameters."""

    def step():
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == 'cuda':
            torch.cuda.synchronize()

    return step, sum(p.numel() for p in model.parameters())


contestants = {}
if yardstick:
    spec = importlib.util.spec_from_file_location('yardstick', yardstick)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain = module.PlainGPT(vocab_size, block_size, n_layer, n_head, n_embd).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    contestants['yardstick'] = contestant(plain, optimizer, lambda: plain(idx, targets))
for name in names:
    model = GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
                          bias=bias, residual=name, n_streams=n_streams)).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    contestants[name] = contestant(model, optimizer, lambda model=model: model(idx, targets)[1])

seconds = {name: [] for name in contestants}
for i in trange(steps + 2, disable=None, unit='round'):
    for name, (step, _) in contestants.items():
        start = time.perf_counter()
        step()
        if i >= 2:  # the first two warm up
            seconds[name].append(time.perf_counter() - start)

base = next(iter(contestants))
rng = np.random.default_rng(0)
print(f'{n_layer} layers, {n_head} heads, {n_embd} wide, block {block_size}, batch {batch_size}, n_streams {n_streams}'
      f', {device}, float32, {torch.get_num_threads()} threads, {steps} steps each')
print(f'{"mode":14} {"parameters":>12} {"ms/step":>9} {"ratio to " + base:>18}   95% interval')
for name, (_, parameters) in contestants.items():
    ratio = np.array(seconds[name]) / np.array(seconds[base])
    low, high = np.percentile(np.median(rng.choice(ratio, (10000, steps)), axis=1), (2.5, 97.5))
    print(f'{name:14} {parameters:12,} {np.median(seconds[name]) * 1e3:9.1f} {np.median(ratio):18.3f}   '
          f'{low:.3f} to {high:.3f}')
