"""
Which residual connection should I use? Trains a grid of modes, seeds and settings by train.py and compares them.

    python ablate.py config/ablate_quick.py                                   8 modes x 3 seeds on two CPU cores
    python ablate.py config/default.py --modes=pre_ln,keel,s2hc --seeds=1,2,3 -j 2
    python ablate.py config/default.py --modes=p_spheret --grid='p=0.5,1,2,inf learning_rate=1e-3,3e-3'

Every key of train.py can be set too, in a file or on the line, and holds for all runs. The same command goes on where
a kill or Ctrl-C stopped it: finished runs stay, the others resume from their last checkpoint. A run that fails is a
result. In out_dir: report.md, report.json, report.html (one file with all pictures) and a folder a run.
"""
import ast
import base64
import functools
import hashlib
import html
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import checkpoint
import dataloader
import model
from configurator import UserError, configure, did_you_mean, read_keys, require, run_file
from data.common import replace_file

# -----------------------------------------------------------------------------
# the grid
modes = 'pre_ln'        # residual modes with commas between them, or all; the first is the one to compare with
seeds = '1,2,3'         # seeds with commas between them; the same for all modes
grid = ''               # further settings: 'key=v1,v2 key2=v3,v4' trains every combination
against = 'auto'        # what a verdict compares with: mode = the first mode at the same settings, grid = the first
                        # settings of the same mode; auto = grid where there is one mode
# how
out_dir = 'out-ablate'  # folder of the reports and of a folder a run
jobs = 1                # runs at once; -j N is short for it
nproc = 0               # processes a run, started by torchrun; 0 = one, without it
# -----------------------------------------------------------------------------
TRAIN_PY = os.path.join(dataloader.ROOT, 'train.py')
OWN = dict(choices={'against': ('auto', 'mode', 'grid')}, positive=('jobs',))
TAKEN = ('residual', 'seed', 'init_from', 'eval_only', 'out_dir')  # train.py's keys that differ between the runs


def read_train_keys():
    """name -> Key of train.py, whose choices stand in its configure() call."""
    call = next(node for node in ast.walk(ast.parse(Path(TRAIN_PY).read_text(encoding='utf-8')))
                if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'configure')
    names = {**vars(model), **vars(dataloader), **vars(checkpoint)}  # CHOICES, ORDERS, DTYPES
    rules = {word.arg: eval(ast.unparse(word.value), names) for word in call.keywords}
    return read_keys(TRAIN_PY, rules['choices'], rules['positive'])


def read_words(argv):
    """Sets the keys above from the command line; returns what it sets of train.py's keys, and the config files that are
    train.py's alone (they may hold a mode of the user's)."""
    argv = [word for word in re.sub('(^|\0)-j\0?', r'\1--jobs=', '\0'.join(argv)).split('\0') if word]
    own, settings, plain = read_keys(__file__, **OWN), {}, []
    files = {word: path for word in argv if word.endswith('.py')
             for path in (os.path.join(dataloader.ROOT, word), word) if os.path.isfile(path)}
    train = [word for word in argv if re.match(r'--\w+=', word) and word[2:].partition('=')[0] not in own]
    _, given = configure(globals(), **OWN, argv=[word for word in argv if word not in train and word not in files])

    def check(name, value, where):
        if name not in {**TRAIN, **own}:
            raise UserError(f'{where}: there is no key {name} in ablate.py or train.py'
                            f'{did_you_mean(name, {**TRAIN, **own}) or "; --help lists the keys of each"}')
        if name in TAKEN and name not in own and (where.startswith('--') or value != TRAIN[name].default):
            raise UserError(f'{where}: the runs differ in {name}, or start from scratch: see --modes and --seeds')
        return {**TRAIN, **own}[name].check(value, where)

    for word, path in files.items():
        values = run_file(word, path, {key.name: key.default for key in [*TRAIN.values(), *own.values()]} | settings)
        if not values.keys() & {'modes', 'seeds', 'grid', 'against'}:  # a config of train.py, that of a single run
            plain.append(word)
            values = {name: value for name, value in values.items() if name not in ('out_dir', 'residual', 'seed')}
        for name, value in values.items():
            value = check(name, value, f'{word}: {name} = {repr(value)[:60]}')
            (globals() if name in own else settings)[name] = globals()[name] if name in given else value
    for word in train:
        name, _, text = word[2:].partition('=')
        settings[name] = check(name, TRAIN[name].parse(text) if name in TRAIN else text, word)
    return settings, plain


TRAIN = read_train_keys()
base, base_files = read_words(sys.argv[1:])
require('matplotlib', 'the report').use('agg')
pyplot = require('matplotlib.pyplot', 'the report')

# -----------------------------------------------------------------------------
# the grid: points (settings) x modes = groups, groups x seeds = runs


def split(where, text, key):
    """The values of a list with commas, none of them twice."""
    values = [key.check(key.parse(word.strip()), f'{where}={word}') for word in text.split(',')]
    if twice := [value for value, n in Counter(values).items() if n > 1]:
        raise UserError(f'{where}: {twice[0]} stands there twice')
    return values


def parse_grid(text):
    """'key=v1,v2 key2=v3' -> [{key: v1, key2: v3}, {key: v2, key2: v3}]; [{}] for an empty text."""
    axes = {}
    for word in text.split():
        name, equals, values = word.partition('=')
        if name in TAKEN or name not in TRAIN or not equals or name in axes:
            hint = did_you_mean(name, TRAIN) if name not in TRAIN else ''
            raise UserError(f'grid: {word}: write key=v1,v2, with keys of train.py but {", ".join(TAKEN)}{hint}')
        axes[name] = split(f'grid: {name}', values, TRAIN[name])
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def full(keys):
    """All keys of train.py: these, and the defaults of the others."""
    return {**{name: key.default for name, key in TRAIN.items()}, **keys}


def label(mode, point):
    """What a group is called; a number as short as it stays the same."""
    short = {key: f'{v:g}' if isinstance(v, float) and float(f'{v:g}') == v else v for key, v in point.items()}
    return ' '.join([mode, *(f'{key}={value}' for key, value in short.items())]).strip()


@dataclass
class Run:
    """One training run: its folder in out_dir, its keys, how it went (status and numbers), lines of metrics.jsonl."""
    name: str
    seed: int
    keys: dict
    result: dict = field(default_factory=lambda: {'status': 'unfinished'})
    log: list = field(default_factory=list)
    revision: str = 'unknown'

    def __post_init__(self):
        self.folder, self.max_iters = os.path.join(out_dir, self.name), full(self.keys)['max_iters']
        torchrun = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}'] if nproc else []
        words = {**self.keys, 'out_dir': self.folder, 'init_from': 'auto'}
        words = [f'--{key}={value}' for key, value in words.items()]
        self.command = [*torchrun, os.path.relpath(TRAIN_PY), *base_files, *words]

    def record(self):
        settings = {key: str(value) for key, value in {**self.keys, 'nproc': nproc}.items()}
        return {'name': self.name, 'settings': settings, 'command': self.command, 'revision': self.revision,
                'result': self.result}


@dataclass
class Group:
    """The runs of a mode at a point of the grid, one a seed. point: its settings that have an effect in the mode."""
    mode: str
    point: dict
    runs: list
    parameters: int
    weights: dict  # name -> (shape, hash of the initial values at the first seed)

    def values(self, what):
        """seed -> a number of the runs that have finished."""
        return {run.seed: run.result[what] for run in self.runs if run.result.get(what) is not None}


@functools.cache
def inspect(*args):
    """(number of parameters, name -> (shape, hash), fields that have an effect, why it cannot be) of a model."""
    torch.manual_seed(seed_numbers[0])
    try:
        gpt = checkpoint.build_model(dict(args), dict(args)['residual'])
    except UserError as e:
        return 0, {}, set(dict(args)), str(e)
    hashes = {name: (tuple(p.shape), hashlib.blake2b(p.detach().numpy().tobytes()).hexdigest())
              for name, p in gpt.named_parameters()}
    return gpt.get_num_params(), hashes, gpt.used, None


def build_group(mode, point):
    args = {key: full({**base, **point})[key] for key in model.GPTConfig.__dataclass_fields__}
    args |= {'residual': mode, 'vocab_size': args['vocab_size'] or (50304 if vocabulary == 50257 else vocabulary)}
    parameters, weights, used, refused = inspect(*args.items())
    point = {key: value for key, value in point.items() if key not in args or key in used}
    runs = [Run(re.sub(r'[^\w.=+-]', '_', '-'.join([*label(mode, point).split(), str(seed)])), seed,
                {**base, 'residual': mode, **point, 'seed': seed}) for seed in seed_numbers]
    for run in runs if refused else ():
        run.result = {'status': 'refused', 'error': refused}
    return Group(mode, point, runs, parameters, weights)


mode_names = list(model.RESIDUALS) if modes == 'all' else split('modes', modes, TRAIN['residual'])
seed_numbers = split('seeds', seeds, TRAIN['seed'])
points = parse_grid(grid)
against = ('mode' if len(mode_names) > 1 else 'grid') if against == 'auto' else against
data_dir = dataloader.find_dataset(full(base)['dataset'])
meta = dataloader.read_meta(data_dir)
vocabulary = meta['vocab_size']
groups, at = {}, {}  # label -> Group; (mode, number of the point) -> Group
for (i, point), mode in itertools.product(enumerate(points), mode_names):
    group = build_group(mode, point)
    at[mode, i] = groups.setdefault(label(mode, group.point), group)
runs = [run for group in groups.values() for run in group.runs]
if all(run.result['status'] == 'refused' for run in runs):
    raise UserError(runs[0].result['error'])


def baseline(group):
    """The Group that a group is compared with, None for one that is such itself."""
    i = next(i for i in range(len(points)) if at[group.mode, i] is group)
    other = at[mode_names[0], i] if against == 'mode' else at[group.mode, 0]
    return None if other is group else other


# -----------------------------------------------------------------------------
# what the runs of a seed have in common


def check_weights():
    """(whether all is well, a line): weights of the same name and shape as in the first mode have the same values."""
    shares, differing = {}, []
    for (mode, i), group in at.items():
        first = at[mode_names[0], i].weights
        shared = [name for name, (shape, _) in group.weights.items() if name in first and first[name][0] == shape]
        differing += [f'{mode} {name}' for name in shared if group.weights[name] != first[name]]
        if mode != mode_names[0]:
            shares.setdefault(mode, f'{mode} {len(shared)} of {len(group.weights)}')
    text = (f'Initial weights at seed {seed_numbers[0]}, by hash, of the tensors with the name and shape of one in '
            f'{mode_names[0]} ({", ".join(shares.values()) or "one mode"})')
    return not differing, f'{text}: {"NOT the same: " + ", ".join(differing[:5]) if differing else "the same"}.'


def check_data():
    """(whether all is well, a line): the runs of a seed, at one point of the grid, see the same windows."""
    seen, same = {}, True
    for i, run in ((i, run) for (_, i), group in at.items() for run in group.runs):
        keys = full(run.keys)
        folder = dataloader.find_dataset(keys['dataset'])
        files = dataloader.open_dataset(folder, dataloader.read_meta(folder), keys['block_size'], scan=False)
        shape = keys['gradient_accumulation_steps'], 1, keys['batch_size']
        loader = dataloader.TrainLoader(files['train'], keys['block_size'], shape, 0, run.seed, keys['data_order'],
                                        torch.device('cpu'))
        places = [array.tolist() for step in (0, 1, 2, run.max_iters - 1) for array in
                  loader.locate(step, *divmod(step * shape[0] * shape[2], loader.windows.total))]
        same &= seen.setdefault((i, run.seed), places) == places
    return same, f'Training windows of steps 0, 1, 2 and the last, at each seed: {"" if same else "NOT "}the same.'


def token_entropy():
    """Validation loss in nats of a model that knows only how frequent each token is."""
    files = dataloader.open_dataset(data_dir, meta, 1)
    train, val = (np.bincount(files[split][0].tokens[:10**7], minlength=vocabulary) for split in ('train', 'val'))
    return float(-(val / val.sum() * np.log((train + 1) / (train + 1).sum())).sum())


repository = f'--git-dir={dataloader.ROOT}/.git', f'--work-tree={dataloader.ROOT}'  # not one that this folder lies in
describe = ['git', *repository, 'describe', '--always', '--dirty', '--abbrev=12']
git = subprocess.run(describe, capture_output=True, text=True).stdout.strip() if shutil.which('git') else ''
git = git or 'unknown'
entropy, checks = token_entropy(), [check_weights(), check_data()]
for ok, text in checks:
    print(('' if ok else 'warning: ') + text)

# -----------------------------------------------------------------------------
# running


def last_step(run):
    """The step of the last line of metrics.jsonl, from the end of the file."""
    try:
        with open(os.path.join(run.folder, 'metrics.jsonl'), 'rb') as f:
            f.seek(max(0, os.path.getsize(f.name) - 4096))
            return min(int((re.findall(rb'"step": (\d+),', f.read()) or [0])[-1]), run.max_iters)
    except FileNotFoundError:
        return 0


def measure(run):
    """Reads the log of a run; True, with its result, if it has reached its end."""
    run.log = []
    try:
        with open(os.path.join(run.folder, 'metrics.jsonl'), encoding='utf-8') as f:
            run.log += (json.loads(line) for line in f if line.endswith('\n'))  # a kill may have cut the last
    except FileNotFoundError:
        pass
    evaluations = {line['step']: line['val_loss'] for line in run.log if 'val_loss' in line}
    if run.max_iters not in evaluations:
        return False
    speeds, norms, memory = ([line[key] for line in run.log if line.get(key) and math.isfinite(line[key])]
                             for key in ('tokens_per_s', 'grad_norm', 'memory_mb'))
    run.result = {
        'status': 'finished', 'val_loss': evaluations[run.max_iters], 'best_val_loss': min(evaluations.values()),
        'grad_norm': statistics.median(norms) if norms else None, 'max_grad_norm': max(norms, default=None),
        'tokens_per_s': statistics.median(speeds) if speeds else None, 'memory_mb': max(memory, default=None)}
    return True


def judge(run, code):
    """The result of a run that ended with an exit code, from what it said last."""
    if measure(run) and code == 0:
        return
    said = Path(run.folder, 'train.log').read_text(encoding='utf-8', errors='replace')[run.said:].splitlines()
    errors = [line.removeprefix('error: ') for line in said if line.startswith('error: ')]
    ended = f'killed by {signal.Signals(-code).name}' if code < 0 else f'ended with code {code}: {"".join(said[-1:])}'
    error = errors[-1] if errors else ended
    run.result = {'status': 'out of memory' if error.startswith('out of memory') else 'failed', 'error': error}
    if diverged := re.match(r'the (?:validation )?loss of step (\d+) is', error):
        run.result |= {'status': 'diverged', 'step': int(diverged[1])}


def write(path, content):
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + '\n'
    replace_file(path, lambda aside: Path(aside).write_text(text, encoding='utf-8'))


def look_up(run):
    """Takes over what an earlier call left of a run; UserError if that had other settings."""
    path = os.path.join(run.folder, 'run.json')
    if not os.path.isdir(run.folder) or not set(os.listdir(run.folder)) - {'.lock'}:
        return
    try:
        was, new = json.loads(Path(path).read_text(encoding='utf-8')), run.record()['settings']
        old, run.revision, status = was['settings'], was['revision'], was['result']['status']
        changed = [f'{k} {old.get(k)} -> {new.get(k)}' for k in {**old, **new} if old.get(k) != new.get(k)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f'{path}: not readable ({e}): remove {run.folder}, or take another --out_dir') from None
    if changed:
        raise UserError(f'{run.folder} was trained with other settings ({", ".join(changed)}): remove it, or take '
                        'another --out_dir')
    if not measure(run) and status == 'diverged':  # it would again; after other failures it is tried again
        run.result = was['result']


def start(run, slot):
    """Popen of a run, its output in train.log. slot: 0 .. jobs - 1, chooses its GPUs."""
    env, own = {'OMP_NUM_THREADS': '1', **os.environ}, max(nproc, 1)
    gpus = env.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(torch.cuda.device_count())))).split(',')
    if jobs > 1 and len(gpus) > own:
        env['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[(slot * own + i) % len(gpus)] for i in range(own))
    os.makedirs(run.folder, exist_ok=True)
    run.revision, log = git, Path(run.folder, 'train.log')
    run.said = len(log.read_text(encoding='utf-8', errors='replace')) if log.exists() else 0
    write(os.path.join(run.folder, 'run.json'), run.record())
    with open(log, 'ab') as output:  # in a session of its own: Ctrl-C comes once, from us
        return subprocess.Popen([sys.executable, *run.command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                env=env, start_new_session=True)


def train_all():
    """Trains what is not finished, `jobs` at once; True if a signal stopped it."""
    todo = [run for run in runs if run.result['status'] != 'refused']
    for run in todo:
        look_up(run)
    queue, active, signals = deque(run for run in todo if run.result['status'] == 'unfinished'), {}, []

    def on_signal(number, frame):
        signals.append(number)
        for _, process in active.values():
            process.send_signal(number)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    print(f'{len(runs)} runs in {out_dir}, {len(queue)} of them to train')
    steps = {run.name: last_step(run) if run in queue else run.max_iters for run in todo}
    bar = tqdm(total=sum(run.max_iters for run in todo), initial=sum(steps.values()), unit='step', disable=None,
               smoothing=0.02)
    while active or queue and not signals:
        while queue and len(active) < jobs and not signals:
            slot, run = min(set(range(jobs)) - set(active)), queue.popleft()
            active[slot] = run, start(run, slot)
            if signals:  # it came while the process was being made
                active[slot][1].send_signal(signals[-1])
        time.sleep(0.2)
        for slot, (run, process) in list(active.items()):
            code, steps[run.name] = process.poll(), last_step(run)
            if code is None:
                continue
            del active[slot]
            judge(run, code)
            busy = 'another run is writing to it' in run.result.get('error', '')  # it has outlived its ablate.py
            if busy or signals and run.result['status'] == 'failed':
                run.result = {'status': 'unfinished'}
                queue += [run] * busy  # until the other one has ended
                continue
            write(os.path.join(run.folder, 'run.json'), run.record())
            steps[run.name] = run.max_iters
            tqdm.write(f'{run.name}: ' + (run.result.get('error') or f'validation loss {run.result["val_loss"]:.4f}'))
        bar.set_postfix_str(', '.join(run.name for run, _ in active.values())[:60], refresh=False)
        bar.update(sum(steps.values()) - bar.n)
    bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return bool(signals)


out_dir_lock = checkpoint.lock_out_dir(out_dir)
stopped = train_all()

# -----------------------------------------------------------------------------
# statistics


def spread(values):
    """(mean, standard deviation, standard error) of numbers; None for what too few of them cannot say."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return statistics.mean(values) if values else None, sd, None if sd is None else sd / math.sqrt(len(values))


def compare(a, b):
    """(mean of the differences a - b, taken seed by seed, its standard error, verdict) for seed -> number: lower or
    higher only past two standard errors."""
    difference, _, error = spread([a[seed] - b[seed] for seed in a])
    if error is None:
        return difference, None, 'none: one seed'
    return difference, error, 'undecided' if abs(difference) <= 2 * error else 'lower' if difference < 0 else 'higher'


def summary(group, what, other):
    """What report.json says about a number of a group, and about its difference to another group (None = to none)."""
    values = group.values(what)
    row = dict(zip(('mean', 'sd', 'se'), spread([*values.values()])), values=values)
    if other:
        missing = sorted({run.result['status'] for run in group.runs + other.runs} - {'finished'})
        found = (None, None, f'none: {", ".join(missing)}') if missing else compare(values, other.values(what))
        row |= dict(zip(('difference', 'difference_se', 'verdict'), found), against=label(other.mode, other.point))
    return row


rows = {}
for name, group in groups.items():
    other, trained = baseline(group), [run.result.get('val_loss', math.inf) < entropy - 0.1 for run in group.runs]
    rows[name] = {'mode': group.mode, 'settings': group.point, 'parameters': group.parameters, 'trains': all(trained)}
    for what in ('val_loss', 'grad_norm', 'max_grad_norm', 'tokens_per_s', 'memory_mb'):
        rows[name][what] = summary(group, what, other if what in ('val_loss', 'grad_norm') else None)

best = {}  # (mode, settings without the learning rate) -> the name of its group with the lowest mean loss
for name, group in groups.items():
    rest = label('', {key: value for key, value in group.point.items() if key != 'learning_rate'})
    means = [rows[which]['val_loss']['mean'] for which in (name, best.get((group.mode, rest), name))]
    if all(run.result['status'] == 'finished' for run in group.runs) and means[0] <= means[1]:
        best[group.mode, rest] = name

stability = {}  # mode and other settings -> {n_layer: the largest learning rate that trains at every seed, or 0}
for name, group in groups.items():
    if {'n_layer', 'learning_rate'} <= group.point.keys():
        rest = {key: value for key, value in group.point.items() if key not in ('n_layer', 'learning_rate')}
        cells, depth = stability.setdefault(label(group.mode, rest), {}), group.point['n_layer']
        cells[depth] = max(cells.get(depth, 0), group.point['learning_rate'] if rows[name]['trains'] else 0)

# -----------------------------------------------------------------------------
# pictures

CLAMP = 5.0  # of the gradient norms, as in Fig. 6 of arXiv 2603.20896
pyplot.rcParams.update({'font.size': 12, 'axes.grid': True, 'grid.alpha': 0.3, 'legend.fontsize': 'small'})
if len(mode_names) > 1 and len(points) > 1:  # a panel for each point of the grid
    panels = [(label('', point), [(mode, at[mode, i]) for mode in mode_names]) for i, point in enumerate(points)][:12]
else:
    panels = [('', list(groups.items()))]


def picture(name, rows, height):
    """A figure and its axes, one below another; saved as a file of out_dir by the caller."""
    figure, axes = pyplot.subplots(rows, figsize=(6.4, height), layout='constrained', squeeze=False)
    return axes[:, 0], lambda: (figure.savefig(os.path.join(out_dir, name), dpi=120), pyplot.close(figure))


def draw_curves(name, curves, clamp=1.5 * math.log(vocabulary)):
    """Mean and range over the seeds. curves: [(key of metrics.jsonl, its label, that of x, x of (run, line))]."""
    axes, save = picture(name, len(panels) * len(curves), 4.4 * len(panels) * len(curves))
    for axis, ((title, members), (key, ylabel, xlabel, x)) in zip(axes, itertools.product(panels, curves)):
        for n, (text, group) in enumerate(members):
            style = dict(color=f'C{n % 10}', linestyle=('-', '--', ':', '-.')[n // 10 % 4])
            lines = [{line['step']: (x(run, line), line[key]) for line in run.log if line.get(key) is not None
                      and (line['step'] or key != 'val_loss')} for run in group.runs]  # not the untrained model
            steps = sorted(set.intersection(*map(set, lines)))
            table = np.array([[line[step] for step in steps] for line in lines], dtype=float).reshape(len(lines), -1, 2)
            middle, y, above = table[..., 0].mean(0), np.minimum(table[..., 1], clamp), (table[..., 1] > clamp).any(0)
            axis.plot(middle, y.mean(0), label=text, **style)
            axis.fill_between(middle, y.min(0), y.max(0), alpha=0.15, color=style['color'], linewidth=0)
            axis.plot(middle[above], np.full(above.sum(), clamp), '^', color=style['color'], markersize=5)
        axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
        axis.legend(ncols=1 + (len(members) > 6))
    save()


def draw_losses():
    (axis,), save = picture('losses.png', 1, 1.5 + 0.34 * len(groups))
    for y, (name, group) in enumerate(groups.items()):
        loss = rows[name]['val_loss']
        axis.plot([*loss['values'].values()], [y] * len(loss['values']), '.', color='0.6')
        if loss['values']:
            axis.errorbar(loss['mean'], y, xerr=2 * (loss['se'] or 0), fmt='o', capsize=3,
                          color='C0' if len(loss['values']) == len(group.runs) else 'C3')
    axis.set(yticks=range(len(groups)), yticklabels=list(groups), ylim=(len(groups) - 0.5, -0.5),
             xlabel='final validation loss')
    axis.tick_params(labelsize='small')
    save()


def draw_stability():
    rates, depths = ([*dict.fromkeys(sorted(point[key] for point in points))] for key in ('learning_rate', 'n_layer'))
    table = np.array([[cells.get(depth, 0) for depth in depths] for cells in stability.values()], dtype=float)
    (axis,), save = picture('stability.png', 1, 1.8 + 0.36 * len(stability))
    axis.imshow(np.searchsorted(rates, table, side='right'), aspect='auto', cmap='viridis', vmin=0, vmax=len(rates))
    for (y, x), rate in np.ndenumerate(table):
        text = f'≥ {rate:g}' if rate == rates[-1] else f'{rate:g}' if rate else 'none'
        color = 'black' if rate > rates[len(rates) // 2] else 'white'
        axis.text(x, y, text, ha='center', va='center', color=color)
    axis.set(xticks=range(len(depths)), xticklabels=depths, yticks=range(len(table)), yticklabels=list(stability),
             xlabel='n_layer', title='largest learning rate that trains')
    axis.grid(False)
    save()


STEP = 'step', lambda run, line: line['step']
TOKENS = 'tokens', lambda run, line: line['tokens']
SECONDS = 'seconds of training', lambda run, line: line['tokens'] / (run.result.get('tokens_per_s') or math.nan)
draw_losses()
draw_curves('curves.png', [('loss', 'training loss', *STEP), ('val_loss', 'validation loss', *STEP)])
draw_curves('tokens_time.png', [('val_loss', 'validation loss', *TOKENS), ('val_loss', 'validation loss', *SECONDS)])
draw_curves('grad_norm.png', [('grad_norm', f'gradient norm, clamped at {CLAMP:g}', *STEP)], CLAMP)
if stability:
    draw_stability()

# -----------------------------------------------------------------------------
# report: one list of blocks, written as Markdown and as HTML


def number(value, digits=4):
    return '' if value is None else f'{value:,.{digits}f}'


def compared(found, digits=4):
    """Table of name -> summary()."""
    lines = []
    for name, row in found.items():
        values = row['values'].values()
        numbers = [row.get(key) for key in ('mean', 'se', 'difference', 'difference_se')]
        rest = [row['sd'], min(values, default=None), max(values, default=None)]
        lines.append((name, *(number(x, digits) for x in numbers), row.get('verdict', ''), str(len(values)),
                      *(number(x, digits) for x in rest)))
    return ('', 'mean', 'standard error', 'difference', 'its standard error', 'verdict', 'seeds', 'standard deviation',
            'lowest', 'highest'), lines


counts = Counter(run.result['status'] for run in runs)
failed = [run for run in runs if 'error' in run.result]
machine = platform.processor() or platform.machine()
if os.path.exists('/proc/cpuinfo'):
    machine = (re.findall(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text()) or [machine])[0]
machine = f'{os.cpu_count()} cores of {machine}, {jobs} runs at once'
if torch.cuda.is_available():
    machine = f'{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {machine}'
seconds = sum(run.log[-1]['tokens'] / run.result['tokens_per_s'] for run in runs if run.result.get('tokens_per_s'))
facts = {'command': shlex.join(['python', os.path.relpath(__file__), *sys.argv[1:]]),
         'date': time.strftime('%Y-%m-%d %H:%M %Z'), 'revision': ', '.join(sorted({run.revision for run in runs})),
         'python': platform.python_version(), 'torch': torch.__version__, 'numpy': np.__version__, 'machine': machine,
         'training': f'{seconds / 60 / jobs:.0f} minutes, by the throughput of the runs; no starting, no evaluating'}
rule = (f'{mode_names[0]} at the same settings' if against == 'mode' else 'the first settings of the same mode') + (
    ', seed by seed, where every seed of both has finished. Lower and higher: past two standard errors of the '
    'difference. Chance alone gets there in 18% of the comparisons at 3 seeds, 12% at 5, 8% at 10.')
blocks = [
    ('h1', f'Ablation: {", ".join(mode_names)}' + (f'; {grid}' if grid else '')),
    ('p', f'{len(runs)} runs at seeds {seeds}: {", ".join(f"{n} {status}" for status, n in counts.items())}.'),
    ('ul', [f'{key}: {value}' for key, value in facts.items()] + [text for _, text in checks]),
    ('h2', 'Final validation loss'),
    ('p', f'Nats per token after the last step. Differences: to {rule}'),
    ('table', compared({name: row['val_loss'] for name, row in rows.items()})),
    ('img', ('losses.png', 'Small dots: seeds. Bars: two standard errors. Red: not all seeds finished.'))]
if any('learning_rate' in point for point in points):
    blocks += [
        ('h2', 'At the best learning rate'),
        ('p', f'Each mode at the rate of its lowest mean loss, against {mode_names[0]} at its own. The rate is chosen '
              'by the losses that are compared: both look better than they are.'),
        ('table', compared({name: summary(groups[name], 'val_loss', mode != mode_names[0] and groups.get(
            best.get((mode_names[0], rest)))) for (mode, rest), name in best.items()}))]
if stability:
    caption = 'The largest learning rate at which all seeds train (see Failures). ≥: the largest that was tried.'
    blocks += [('h2', 'Stability'), ('img', ('stability.png', caption))]
blocks += [
    ('h2', 'Loss curves'),
    ('img', ('curves.png', 'Lines: mean over the seeds. Bands: from the lowest to the highest seed. A line ends where '
             'its first seed does. Triangles: a seed is above the picture.'
             + (f' The first {len(panels)} of {len(points)} settings.' if 1 < len(panels) < len(points) else ''))),
    ('img', ('tokens_time.png', 'Seconds: tokens by the median tokens/s of the run; no starting, no evaluating.')),
    ('h2', 'Gradient norm'), ('p', 'Before clipping: the median over the steps of each run.'),
    ('table', compared({name: row['grad_norm'] for name, row in rows.items()}, 3)),
    ('img', ('grad_norm.png', f'Clamped at {CLAMP:g}. Triangles: a seed is above.')),
    ('h2', 'Cost'),
    ('table', (('', 'tokens/s', 'peak memory (MiB)', 'parameters', 'largest gradient norm'), [
        (name, number(row['tokens_per_s']['mean'], 0), number(row['memory_mb']['mean'], 0),
         number(row['parameters'], 0), number(row['max_grad_norm']['mean'], 2)) for name, row in rows.items()])),
    ('h2', 'Failures'),
    ('p', f'These do not train, for not every seed ends 0.1 below {entropy:.3f}, the loss of token frequencies alone: '
          + (', '.join(name for name, row in rows.items() if not row['trains']) or 'none') + '.'),
    ('table', (('run', 'what', 'step', 'it said'), [(run.name, run.result['status'], str(run.result.get('step', '')),
                                                     run.result['error']) for run in failed])),
    ('h2', 'Commands'), ('pre', '\n'.join(shlex.join(['python', *group.runs[0].command]) for group in groups.values()))]


def markdown(kind, value):
    match kind:
        case 'ul':
            return '\n'.join(f'- {line}' for line in value)
        case 'table':
            return '\n'.join(f'| {" | ".join(text.replace("|", "/") for text in row)} |'
                             for row in (value[0], ['---'] * len(value[0]), *value[1]))
        case 'img':
            return f'![{value[0]}]({value[0]})\n\n{value[1]}'
        case 'pre':
            return f'```\n{value}\n```'
    return {'h1': '# ', 'h2': '## '}.get(kind, '') + value


def as_html(kind, value):
    match kind:
        case 'ul':
            return '<ul>' + ''.join(f'<li>{html.escape(line)}</li>' for line in value) + '</ul>'
        case 'table':
            lines = [''.join(f'<{cell}>{html.escape(text)}</{cell}>' for text in row)
                     for cell, row in [('th', value[0]), *(('td', row) for row in value[1])]]
            return f'<div><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'
        case 'img':
            data = base64.b64encode(Path(out_dir, value[0]).read_bytes()).decode()
            return (f'<figure><img alt="{value[0]}" src="data:image/png;base64,{data}">'
                    f'<figcaption>{html.escape(value[1])}</figcaption></figure>')
    return f'<{kind}>{html.escape(value)}</{kind}>'


CSS = '''body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; color: #222 }
div, pre { overflow-x: auto } table { border-collapse: collapse; font-size: .875rem } figure { margin: 1rem 0 }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left } img { max-width: 100%; height: auto }
li, h1 { overflow-wrap: anywhere }'''
texts = {'report.md': '\n\n'.join(itertools.starmap(markdown, blocks)) + '\n', 'report.html': (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
    f'<title>{html.escape(blocks[0][1])}</title>\n<style>{CSS}</style></head><body>\n'
    + '\n'.join(itertools.starmap(as_html, blocks)) + '\n</body></html>\n')}
for name, text in texts.items():
    write(os.path.join(out_dir, name), text)
write(os.path.join(out_dir, 'report.json'), {
    **facts, 'checks': dict(zip(('weights', 'data'), checks)), 'token_entropy': entropy, 'groups': list(rows.values()),
    'stability': stability, 'runs': [run.record() for run in runs]})
print(f'{out_dir}: report.html, report.md, report.json' + (f'; {len(failed)} runs failed' if failed else ''))
if stopped:
    print('stopped by a signal; the same command goes on')
    sys.exit(1)
