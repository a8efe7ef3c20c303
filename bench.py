"""
What a residual connection costs.

    OMP_NUM_THREADS=1 python bench.py                       a training step of every mode, eager and compiled
    python bench.py --modes=pre_ln,s2hc --engines=eager     of these two
    python bench.py --streams=2,3,4,5,6,7,8                 hyper-connections against the number of streams
    python bench.py --kernels=True                          the fused operations by themselves
    python bench.py --aot=True                              their registers and spills on GPUs that need not be there
    python bench.py --profile=True --modes=s2hc             where the time of a step goes
    python bench.py --preset=gpu                            the first, third and fourth on one GPU, in four minutes

Whatever is compared takes turns, call by call, in one process, so that a slower minute of the machine meets all of it.
A ratio is the median of the call-by-call ratios, with its 95% bootstrap interval. A step is forward, backward, clip and
AdamW. Tables are printed and, with all numbers, written to out_dir as bench.json and bench.png.
"""
import itertools
import json
import math
import os
import platform
import runpy
import sys
import time

import numpy as np
import torch
from tqdm import tqdm

import hyperconn
import kernels as fused
from checkpoint import DTYPES, autocast, build_model, pick_device
from configurator import UserError, configure, require
from model import RESIDUALS, Hyper
from spheretnorm import MAX_ANGLE, retract, retract_reference

# -----------------------------------------------------------------------------
# what to measure
modes = 'all'       # residual modes with commas between them, or all; the first is the one to compare with
engines = 'auto'    # eager, compile, triton (kernels.py), compile+triton, with commas between them; auto = all there is
streams = ''        # hyper-connections: numbers of streams with commas between them; empty = not measured
kernels = False     # the fused operations by themselves
aot = False         # registers and spills of the kernels on sm_80, sm_90 and sm_100
profile = False     # the operations of a step by time, for each of modes, eager
yardstick = ''      # a Python file with PlainGPT(vocab, block, n_layer, n_head, n_embd) to compare with instead
preset = None       # gpu: GPT-2 (124M) in bfloat16 and the kernels at its width
# how
steps = 30          # timed calls of each
seconds = 0.0       # begin nothing new after so many; 0 = no limit
out_dir = 'out-bench'  # folder of bench.json and bench.png
device = 'auto'     # cpu, cuda, cuda:N, mps; auto = the best that there is
dtype = 'auto'      # auto = bfloat16 on CUDA, float32 elsewhere
# the models, as in train.py
n_layer = 6         # blocks
n_head = 8          # attention heads
n_embd = 256        # channels
n_streams = 4       # hyper-connections: streams
bias = True         # biases in Linears and norms
block_size = 128    # tokens of a window
batch_size = 8      # windows of a step
vocab_size = 512    # size of the head
# -----------------------------------------------------------------------------
PRESETS = {'gpu': dict(modes='pre_ln,keel,proj_spheret,p_spheret,geonorm,s2hc,mhc,hc_identity', kernels=True,
                       engines='eager,compile,compile+triton', streams='2,4,8', steps=20, seconds=200, n_layer=12,
                       n_head=12, n_embd=768, block_size=1024, batch_size=16, vocab_size=50304)}
ENGINES = ('eager', 'compile', 'triton', 'compile+triton')
config, given = configure(
    globals(), choices={'preset': tuple(PRESETS), 'dtype': ('auto', *DTYPES)},
    positive=('steps', 'n_layer', 'n_head', 'n_embd', 'n_streams', 'block_size', 'batch_size', 'vocab_size'))
config |= {key: value for key, value in PRESETS.get(preset, {}).items() if key not in given}
globals().update(config)


def words(key, known):
    """The names that a key lists."""
    names = config[key].split(',')
    if unknown := [name for name in names if name not in known]:
        raise UserError(f'{key}: {", ".join(unknown)} does not exist: choose from {", ".join(known)}')
    return names


names = list(RESIDUALS) if modes == 'all' else words('modes', RESIDUALS)
device, dtype = pick_device(device, dtype)
on_gpu = device.type == 'cuda'
has_triton = on_gpu and fused.triton is not None
engines = [e for e in ENGINES if has_triton or 'triton' not in e] if engines == 'auto' else words('engines', ENGINES)
if any('triton' in engine for engine in engines):
    try:
        fused.select('triton')
    except ValueError as e:
        raise UserError(f'engines: {e}') from None
numbers = words('streams', [str(n) for n in range(1, 17)]) if streams else []
pyplot = require('matplotlib.pyplot', 'bench.png')
torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000  # a model is a variant
rng, began = np.random.default_rng(0), time.monotonic()
machine = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
results = {'command': ' '.join(sys.argv), 'machine': machine, 'threads': torch.get_num_threads(),
           'torch': torch.__version__, 'config': config}

# -----------------------------------------------------------------------------
# measuring


def out_of_time():
    return seconds and time.monotonic() - began > seconds


def take_turns(functions, rounds, repeat=1):
    """name -> seconds of a call, (rounds,), for functions name -> function. Two rounds warm up. repeat: calls that are
    timed together, for what is too short for a clock. What fails is left out, with a line."""
    times = {name: [] for name in functions}
    for _ in tqdm(range(rounds + 2), disable=None, unit='round', leave=False):
        for name in list(times):
            try:
                start = time.perf_counter()
                for _ in range(repeat):
                    functions[name]()
                if on_gpu:
                    torch.cuda.synchronize()
            except Exception as e:
                print(f'{name}: failed ({type(e).__name__}: {str(e).strip().splitlines()[0][:150]})')
                del times[name]
                continue
            times[name].append((time.perf_counter() - start) / repeat)
    return {name: np.array(seconds[2:]) for name, seconds in times.items()}


def ratio(a, b):
    """(median, low, high) of a / b, two rows of times that took turns."""
    r = a / b
    low, high = np.percentile(np.median(rng.choice(r, (10000, len(r))), axis=1), (2.5, 97.5))
    return float(np.median(r)), float(low), float(high)


def kept_bytes(model, loss):
    """Bytes that a forward pass keeps for its backward, parameters apart: what a CPU can tell about memory."""
    own, kept, tensors = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}, []

    def pack(x):
        tensors.append(x)  # alive, or another tensor may get its address
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss()
    return sum(size for address, size in kept.items() if address not in own)


class Step:
    """One training step of a mode by an engine, as a function."""

    def __init__(self, mode, engine, n=n_streams):
        torch.manual_seed(0)
        if mode == 'yardstick':
            try:
                plain = runpy.run_path(yardstick)['PlainGPT'](vocab_size, block_size, n_layer, n_head, n_embd)
            except Exception as e:  # whatever it is, it is the file's
                raise UserError(f'yardstick = {yardstick}: no PlainGPT comes out of it ({type(e).__name__}: '
                                f'{e})') from None
            self.model = plain.to(device)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        else:
            self.model = build_model(dict(block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head,
                                          n_embd=n_embd, bias=bias, residual=mode, n_streams=n), mode).to(device)
            self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
        if dtype == 'float64':
            self.model.double()
        self.kernels = 'triton' if 'triton' in engine else 'eager'
        self.compiled = torch.compile(self.model, fullgraph=True) if 'compile' in engine else self.model
        self.idx, self.targets = torch.randint(0, vocab_size, (2, batch_size, block_size), device=device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.flops = self.model.flops_per_token() if mode != 'yardstick' else None
        self.memory = None  # bytes of a step on top of weights and optimizer state
        self.calls = 0

    def loss(self):
        with autocast(device, dtype):
            out = self.compiled(self.idx, self.targets)
        return out[1] if isinstance(out, tuple) else out

    def __call__(self):
        fused.select(self.kernels)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        if on_gpu and self.calls == 1:
            torch.cuda.reset_peak_memory_stats(device)
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if on_gpu and self.calls == 1:  # the first call makes the optimizer's state
            self.memory = torch.cuda.max_memory_allocated(device) - before
        elif not on_gpu and self.calls == 1 and self.compiled is self.model:
            self.memory = kept_bytes(self.model, self.loss)
        self.optimizer.zero_grad(set_to_none=True)
        self.calls += 1


def show(head, rows):
    """A table; None is a dash."""
    rows = [head, *[['-' if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print('  '.join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))))
    print()


def in_words(r):
    """Speed, ratio with interval and memory of a row of measure_steps."""
    return [f'{r["tokens_per_s"]:,.0f}', f'{r["ratio"]:.3f}', f'{r["low"]:.3f} to {r["high"]:.3f}',
            r['memory'] and f'{r["memory"] / 2**20:,.1f}']


def measure_steps(cells):
    """Rows for the steps name -> Step, against the first of the same engine."""
    times, tokens = take_turns(cells, steps), batch_size * block_size
    first, rows = {}, {}
    for (mode, engine), t in times.items():
        base = first.setdefault(engine, mode)
        step = cells[mode, engine]
        middle, low, high = ratio(t, times[base, engine])
        extra = step.parameters - cells[base, engine].parameters
        rows[mode, engine] = dict(mode=mode, engine=engine, tokens_per_s=tokens / float(np.median(t)), ratio=middle,
                                  low=low, high=high, memory=step.memory, parameters=step.parameters, extra=extra,
                                  flops_per_token=step.flops, seconds=t.tolist())
    return rows


# -----------------------------------------------------------------------------
# a training step of every mode

def bench_modes():
    contestants = [*(['yardstick'] if yardstick else []), *names]
    cells = {}
    for engine in engines:
        for mode in contestants:
            if out_of_time():
                print(f'{mode}, {engine}: left out, {seconds} seconds are over')
            else:
                cells[mode, engine] = Step(mode, engine)
                for _ in range(2 if 'compile' in engine else 0):  # compiling counts against the time
                    cells[mode, engine]()
    rows = measure_steps(cells)
    print(f'{n_layer} layers, {n_head} heads, {n_embd} wide, block {block_size}, batch {batch_size}, '
          f'{n_streams} streams, {device}, {dtype}, {torch.get_num_threads()} threads, {steps} steps each, ratios to '
          f'{contestants[0]}')
    show(['mode', 'engine', 'tokens/s', 'ratio', '95% interval', 'MiB a step', 'parameters', 'extra', 'FLOPs a token'],
         [[r['mode'], r['engine'], *in_words(r), f'{r["parameters"]:,}', f'{r["extra"]:,}',
           r['flops_per_token'] and f'{r["flops_per_token"]:,}'] for r in rows.values()])
    results['modes'] = list(rows.values())

    def draw(axes):
        place = {mode: i for i, mode in enumerate(dict.fromkeys(mode for mode, _ in rows))}
        for i, engine in enumerate(engines):
            own = [r for r in rows.values() if r['engine'] == engine]
            axes.errorbar([r['ratio'] for r in own], [place[r['mode']] + 0.15 * i for r in own], fmt='o', label=engine,
                          xerr=[[r['ratio'] - r['low'] for r in own], [r['high'] - r['ratio'] for r in own]])
        axes.set(yticks=list(place.values()), yticklabels=list(place), title=f'a training step on {machine}',
                 xlabel=f'time of a step, ratio to {contestants[0]}')
        axes.axvline(1, color='gray', linewidth=0.8)
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis='x')
        axes.legend()
    return draw


# -----------------------------------------------------------------------------
# hyper-connections against the number of streams

def bench_streams():
    kinds, engine = [name for name, row in RESIDUALS.items() if row.connection is Hyper], engines[0]
    cells, refused = {('pre_ln', engine): Step('pre_ln', engine)}, {}
    for n in map(int, numbers):
        for kind in kinds:
            if out_of_time():
                print(f'{kind}, {n} streams: left out, {seconds} seconds are over')
                continue
            try:
                cells[(kind, n), engine] = Step(kind, engine, n)
            except UserError as e:
                refused[kind, n] = str(e)
    rows, alone = measure_steps(cells), 2 * n_layer * batch_size * block_size * n_embd * 4  # bytes, float32
    print(f'{n_layer} layers, {n_embd} wide, block {block_size}, batch {batch_size}, {device}, {dtype}, {engine}; '
          f'ratios to pre_ln; the streams alone: n x {alone / 2**20:,.1f} MiB')
    table = []
    for n in map(int, numbers):
        for kind in kinds:
            r = rows.get(((kind, n), engine))
            if r:
                table.append([kind, n, *in_words(r), f'{r["extra"]:,}'])
            elif (kind, n) in refused:  # the wall of mhc_lite: nC (n! + 2n + 1) parameters a sub-layer project
                extra = 2 * n_layer * n * n_embd * (math.factorial(n) + n * 2 + 1) if kind == 'mhc_lite' else None
                table.append([kind, n, 'refused', None, None, None, extra and f'{extra:,} and more'])
    show(['kind', 'n', 'tokens/s', 'ratio', '95% interval', 'MiB a step', 'extra parameters'], table)
    for (_, n), why in refused.items():
        print(f'n = {n}: {why}')
    results['streams'] = [{**r, 'mode': mode, 'n': n} for ((mode, n), _), r in list(rows.items())[1:]]

    def draw(axes):
        for kind in kinds:
            own = [n for n in map(int, numbers) if ((kind, n), engine) in rows]
            axes.plot(own, [rows[(kind, n), engine]['tokens_per_s'] for n in own], marker='o', label=kind)
        axes.axhline(rows['pre_ln', engine]['tokens_per_s'], color='gray', linewidth=0.8)
        axes.set(xlabel='streams n (gray: pre_ln)', ylabel='tokens a second', ylim=(0, None),
                 title='hyper-connections against the number of streams')
        axes.grid(alpha=0.3)
        axes.legend(fontsize='small')
    return draw


# -----------------------------------------------------------------------------
# operations by themselves

def directions(form, function, inputs, gs):
    """Forward and backward of a form of an operation, as two functions without arguments, and what they return once:
    results, then the gradients of the inputs."""
    choice = 'triton' if form == 'triton' else 'eager'

    def call(tensors):
        fused.select(choice)
        out = function(*tensors)
        return [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]

    def backward():
        return torch.autograd.grad(outs, inputs, gs, retain_graph=True)
    outs, plain = call(inputs), [x.detach() for x in inputs]
    gs = gs[:len(outs)]
    return lambda: call(plain), backward, [*(x.detach() for x in outs), *backward()]


def bench_kernels():
    """The retraction, forward and backward: time, bytes a second, and the share of what a copy reaches beside it."""
    branch = torch.bfloat16 if on_gpu else torch.float32
    forms = {'eager': retract}
    if 'compile' in engines:
        forms['compile'] = torch.compile(retract_reference, dynamic=False)
    if has_triton:
        forms['triton'] = retract
    table, results['kernels'] = [], []
    shapes = ((8192, 768), (8192, 1280), (8192, 2048), (32768, 1280)) if on_gpu else ((1024, 256), (4096, 768))
    for (n, width), p in ((shape, p) for shape in shapes for p in (1.0, 0.5, 2.0, math.inf)):
        if out_of_time():
            print(f'{n} x {width}, p = {p:g}: left out, {seconds} seconds are over')
            continue
        h, f, g = (torch.randn(n, width, device=device) for _ in range(3))
        h, f = h.requires_grad_(), f.to(branch).requires_grad_()
        alpha = torch.tensor(0.7, device=device, requires_grad=True)
        exact = [x.detach().double().requires_grad_() for x in (h, f, alpha)]
        _, _, expected = directions('exact', lambda *x, p=p: retract_reference(*x, p, MAX_ANGLE), exact, [g.double()])
        scale = torch.stack([x.detach().double().norm(dim=-1) for x in (h, f, g)]).amax(0)
        functions, errors = {('copy', ''): lambda a=torch.empty_like(g), b=g: a.copy_(b)}, {}
        for form, function in forms.items():
            forward, backward, found = directions(
                form, lambda *x, p=p, function=function: function(*x, p, MAX_ANGLE), [h, f, alpha], [g])
            functions |= {(form, 'forward'): forward, (form, 'backward'): backward}
            worst = [((a.double() - b).norm(dim=-1) / scale).max().item() for a, b in zip(found[:3], expected)]
            errors |= {(form, 'forward'): worst[0], (form, 'backward'): max(worst[1:])}
        times = take_turns(functions, steps, repeat=20 if on_gpu else 1)
        copied = 8 * n * width / float(np.median(times.pop(('copy', ''))))  # bytes a second, read and written
        for (form, direction), t in times.items():
            middle, moved = float(np.median(t)), fused.least_bytes(n, width, direction, 4, branch.itemsize)
            row = dict(rows=n, width=width, p=p, form=form, direction=direction, seconds=middle, bytes=moved,
                       share=moved / middle / copied, copy=copied, error=errors[form, direction])
            results['kernels'].append(row)
            table.append([f'{n} x {width}', f'{p:g}', direction, form, f'{middle * 1e6:,.0f}',
                          f'{moved / middle / 1e9:,.0f}', f'{row["share"]:.2f}', f'{row["error"]:.0e}'])
    fused.select('auto')
    print(f'the retraction, stream float32, branch {branch}, against a copy of the stream in the same rounds; error: '
          'largest of a row to float64, over max(|h|, |f|, |g|)')
    show(['rows', 'p', 'direction', 'form', 'us', 'GB/s', 'of copy', 'error'], table)


def bench_stream_kernels():
    """Read, write and the mapping of a hyper-connection, as bench_kernels does the retraction."""
    branch = torch.bfloat16 if on_gpu else torch.float32
    forms = ['eager'] + ['triton'] * has_triton
    table, results['stream_kernels'] = [], []
    shapes = ((8192, 768, 2), (8192, 768, 4), (8192, 2048, 4), (8192, 768, 8)) if on_gpu else ((1024, 256, 4),)
    for N, width, n in shapes:
        X, G = torch.randn(2, 1, N, n, width, device=device).unbind(0)
        f, g = torch.randn(2, 1, N, width, device=device).unbind(0)
        pre, post = torch.randn(2, 1, N, n, device=device).unbind(0)
        res = torch.randn(1, N, n, n, device=device)
        operations = {'read': (hyperconn.read, [pre, X], [g], 'read'),
                      'write': (hyperconn.write, [X, f.to(branch), post, res], [G], 'write')}
        for kind in hyperconn.KINDS:
            try:
                mapping = hyperconn.KINDS[kind](n, width, 0)
            except ValueError:  # n! logits
                continue
            mapping.reset_parameters()
            torch.nn.init.normal_(mapping.weight, std=(n * width) ** -0.5)
            weights = dict(mapping.to(device).named_parameters())
            operations[kind] = (
                lambda X, *weights, mapping=mapping: torch.func.functional_call(
                    mapping, dict(zip(dict(mapping.named_parameters()), weights)), X),
                [X, *weights.values()], [pre, post, res], 'project')
        for operation, (function, inputs, gs, name) in operations.items():
            if out_of_time():
                print(f'{operation}, {N} x {n} x {width}: left out, {seconds} seconds are over')
                continue
            inputs = [x.detach().requires_grad_() for x in inputs]
            exact = [x.detach().double().requires_grad_() for x in inputs]
            _, _, expected = directions('exact', function, exact, [x.double() for x in gs])
            functions, errors = {('copy', ''): lambda a=torch.empty_like(G), b=G: a.copy_(b)}, {}
            for form in forms:
                forward, backward, found = directions(form, function, inputs, gs)
                functions |= {(form, 'forward'): forward, (form, 'backward'): backward}
                worst = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected) if b.any()]
                errors[form] = max(worst)
            times = take_turns(functions, steps, repeat=20 if on_gpu else 1)
            copied = 8 * N * n * width / float(np.median(times.pop(('copy', ''))))
            for (form, direction), t in times.items():
                middle = float(np.median(t))
                moved = fused.least_bytes(N, width, name if direction == 'forward' else f'{name}_backward', 4,
                                          branch.itemsize, streams=n)
                row = dict(operation=operation, rows=N, width=width, n=n, form=form, direction=direction,
                           seconds=middle, bytes=moved, share=moved / middle / copied, copy=copied, error=errors[form])
                results['stream_kernels'].append(row)
                table.append([operation, f'{N} x {n} x {width}', direction, form, f'{middle * 1e6:,.0f}',
                              f'{moved / middle / 1e9:,.0f}', f'{row["share"]:.2f}', f'{row["error"]:.0e}'])
    fused.select('auto')
    print(f'hyper-connections, streams float32, branch {branch}: read, write and the mapping of every kind; of copy: '
          'the streams moved once each way, without the matrices; error: largest of results and gradients to float64')
    show(['operation', 'streams', 'direction', 'form', 'us', 'GB/s', 'of copy', 'error'], table)


def bench_aot():
    require('triton', 'aot=True')
    table, results['aot'] = [], []
    for capability in (80, 90, 100):
        for width in (768, 1024, 1280, 2048, 4096):
            for direction in ('forward', 'backward'):
                for norm in (None, 'layernorm'):
                    found = fused.aot(capability, width, direction, norm=norm)
                    found.pop('ptx')
                    place = dict(capability=capability, width=width, direction=direction, norm=norm)
                    results['aot'].append(place | found)
                    table.append([*place.values(), *found.values()])
    show(['chip', 'width', 'direction', 'norm', *found], table)

    table, results['stream_aot'] = [], []
    shapes = [(4, 768), (4, 1024), (4, 2048), (4, 4096), (2, 768), (3, 768), (8, 768)]
    cases = [(name, None, n, width) for name in ('read', 'write') for n, width in shapes]
    cases += [(name, kind, n, 768) for kind in fused.MAPPINGS for n in fused.MAPPINGS[kind][0]
              for name in ('project', 'matrices')]
    for capability, (name, kind, n, width) in itertools.product((80, 90, 100), cases):
        for direction in (name, f'{name}_backward'):
            found = fused.aot(capability, width, direction, streams=n, **({'kind': kind} if kind else {}))
            found.pop('ptx')
            place = dict(capability=capability, kernel=direction, kind=kind, n=n, width=width)
            results['stream_aot'].append(place | found)
            table.append([*place.values(), *found.values()])
    show([*place, *found], table)


def bench_profile():
    for mode in names:
        step = Step(mode, 'eager')
        step(), step()
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
        with torch.profiler.profile(activities=kinds) as record:
            for _ in range(5):
                step()
        key = 'self_device_time_total' if on_gpu else 'self_cpu_time_total'
        events = sorted(record.key_averages(), key=lambda e: -getattr(e, key))
        total = sum(getattr(e, key) for e in events)
        print(f'{mode}: a step is {total / 5e3:,.1f} ms')
        show(['operation', 'share', 'calls a step', 'ms a step'],
             [[e.key[:60], f'{getattr(e, key) / total:.1%}', e.count // 5, f'{getattr(e, key) / 5e3:.2f}']
              for e in events[:15]])
        results.setdefault('profile', {})[mode] = {e.key: getattr(e, key) / total for e in events}


# -----------------------------------------------------------------------------

drawings = []
if aot:
    bench_aot()
if kernels:
    bench_kernels()
    bench_stream_kernels()
if profile:
    bench_profile()
if preset or not (aot or kernels or profile or streams):
    drawings.append(bench_modes())
if streams:
    drawings.append(bench_streams())
try:
    os.makedirs(out_dir, exist_ok=True)
    with open(os.path.join(out_dir, 'bench.json'), 'w', encoding='utf-8') as file:
        json.dump(results, file, indent=1)
    if drawings:
        figure, axes = pyplot.subplots(1, len(drawings), figsize=(7 * len(drawings), 6), layout='constrained',
                                       squeeze=False)
        for draw, axis in zip(drawings, axes[0]):
            draw(axis)
        figure.savefig(os.path.join(out_dir, 'bench.png'), dpi=150)
except OSError as e:
    raise UserError(f'out_dir = {out_dir}: cannot be written to ({e}); take another --out_dir') from None
print(f'{out_dir}: bench.json' + (', bench.png' if drawings else ''))
