"""
Kills training runs, starts them again, and compares what is left at the end with an undisturbed run, to the bit.

    python tests/killing.py --kills=50 --modes=pre_ln,s2hc,proj_spheret,keel

Each run is a fork of this process, which has imported torch already: starting is what takes long. tests/test_resume.py
uses it too.
"""
import os

os.environ.setdefault('OMP_NUM_THREADS', '1')

import contextlib
import json
import random
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401
from tqdm import tqdm  # noqa: E402

import checkpoint  # noqa: E402, F401  what train.py imports, loaded once for all forks
import dataloader  # noqa: E402, F401
from configurator import configure  # noqa: E402

KEYS = dict(device='cpu', n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=2, gradient_accumulation_steps=2,
            max_iters=120, eval_interval=7, eval_tokens=64, log_interval=1, learning_rate=1e-2, warmup_iters=0,
            lr_decay_iters=100, dropout=0.2, keep_checkpoints=2)


def make_data(folder):
    """A small data set of random characters."""
    from data.common import write_dataset
    from data.tokenizer import get_tokenizer
    chars = 'abcdefghij \n'
    text = ''.join(random.Random(0).choices(chars, k=3000))
    with contextlib.redirect_stdout(None):
        write_dataset(folder, get_tokenizer({'name': 'char', 'chars': ''.join(sorted(chars))}), text, 'random', '0')
    return folder


def run(keys, log, kill_in_save=None):
    """The pid of a fork that runs train.py. kill_in_save: (n, moment): SIGKILL itself in its n-th save, at a moment of
    'half' (half of the file is written), 'before' or 'after' the file gets its name."""
    pid = os.fork()
    if pid:
        return pid
    if kill_in_save:
        arrange_kill(*kill_in_save)
    become([str(ROOT / 'train.py'), *(f'--{key}={value}' for key, value in keys.items())], log)


def become(words, log):
    """This fork, which has imported torch already, becomes `python WORDS` with its output at the end of the file log;
    it never returns."""
    code = 1
    try:
        with open(log, 'a') as f:
            os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
        sys.stdout = os.fdopen(1, 'w', buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        tqdm.set_lock(threading.RLock())  # its own is shared with forks: a killed one would lock the others out
        pyplot = MagicMock()  # loss.png is the slow part of a tiny run
        pyplot.subplots.return_value = MagicMock(), MagicMock()
        sys.modules['matplotlib.pyplot'], sys.argv = pyplot, words
        runpy.run_path(words[0], run_name='__main__')
        code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException as e:
        print(f'error: {e}')
    finally:
        sys.stdout.flush()
        os._exit(code)


def arrange_kill(n, moment):
    save, replace, seen = torch.save, os.replace, [0]

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def saving(state, aside):
        seen[0] += 1
        save(state, aside)
        if seen[0] == n and moment == 'half':
            os.truncate(aside, os.path.getsize(aside) // 2)
            die()

    def naming(aside, path):
        if seen[0] == n and moment == 'before' and str(path).endswith('.pt'):
            die()
        replace(aside, path)
        if seen[0] == n and moment == 'after' and str(path).endswith('.pt'):
            die()
    torch.save, os.replace = saving, naming


def same(a, b):
    """Equal to the bit, through dicts and lists of tensors."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def what_is_left(out_dir):
    """Weights, optimizer and loader of last.pt and ckpt.pt, and the lines of the log without times."""
    files = [torch.load(out_dir / name, weights_only=True) for name in ('last.pt', 'ckpt.pt')]
    keys = ('model', 'optimizer', 'loader', 'iter_num', 'best_val_loss')
    states = [{key: file[key] for key in keys} for file in files]
    lines, times = [json.loads(line) for line in open(out_dir / 'metrics.jsonl')], ('tokens_per_s', 'mfu', 'memory_mb')
    return states, [{key: line[key] for key in line if key not in times} for line in lines]


def kill_and_compare(folder, kills, seed=0, **keys):
    """
    Trains undisturbed; then kills a run `kills` times (two of three at a random moment, one while it saves) and starts
    it again. Returns (same, text): whether the same is left, and how the kills went. Raises if a restart fails.
    """
    folder, draw = Path(folder), random.Random(seed)
    keys = {**KEYS, 'dataset': make_data(folder / 'data'), **keys}
    start = time.monotonic()
    _, status = os.waitpid(run({**keys, 'out_dir': folder / 'whole'}, folder / 'whole.log'), 0)
    assert status == 0, (folder / 'whole.log').read_text()
    seconds, killed, saving, rounds = time.monotonic() - start, 0, 0, 0
    keys |= {'out_dir': folder / 'killed', 'init_from': 'auto'}
    while killed < kills:
        rounds += 1
        in_save = draw.random() < 1 / 3
        pid = run(keys, folder / 'killed.log', (draw.randint(1, 4), draw.choice(['half', 'before', 'after']))
                  if in_save else None)
        if not in_save:
            time.sleep(draw.uniform(0, 0.4 * seconds))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed, saving = killed + 1, saving + in_save
        else:
            assert status == 0, (folder / 'killed.log').read_text()
            (folder / 'killed').rename(folder / f'finished-{rounds}')  # it got through: once more from the start
    _, status = os.waitpid(run(keys, folder / 'killed.log'), 0)
    assert status == 0, (folder / 'killed.log').read_text()
    log = (folder / 'killed.log').read_text()
    outcomes = [folder / 'killed', *folder.glob('finished-*')]
    equal = all(same(what_is_left(folder / 'whole'), what_is_left(out_dir)) for out_dir in outcomes)
    return equal, (f'{killed} kills, {saving} of them while saving, {log.count("resumed")} resumptions, '
                   f'{len(outcomes)} complete runs')


kills = 50                               # kills a mode
modes = 'pre_ln,s2hc,proj_spheret,keel'  # residual modes with commas between them
seed = 0                                 # of the moments

if __name__ == '__main__':
    configure(globals())
    torch.set_num_threads(1)
    failed = False
    for mode in modes.split(','):
        with tempfile.TemporaryDirectory() as folder:
            equal, text = kill_and_compare(folder, kills, seed, residual=mode)
        print(f'{mode}: {text}: {"bit-equal to" if equal else "DIFFERENT from"} the undisturbed run')
        failed |= not equal
    sys.exit(failed)
