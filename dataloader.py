"""
Tokens on disk -> batches. A data set is a folder with train.bin and val.bin, or with shards (data/shards.py), and
meta.json (tokenizer and vocabulary, written by the folder's prepare.py).

The position in the data is global: what a step trains on depends on the seed and the position alone, never on how the
batch is divided over processes and micro-steps. The validation set is always the same windows of the same files.
"""
import contextlib
import glob
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from configurator import UserError
from data.common import replace_file
from data.shards import Tokens, list_files
from data.tokenizer import TOKENIZERS

ROOT = os.path.dirname(os.path.abspath(__file__))
# what a folder without meta.json holds: nanoGPT's openwebtext and the prebuilt shards have none
GPT2 = {'tokenizer': {'name': 'gpt2', 'n_vocab': 50257, 'eot': 50256}, 'vocab_size': 50257}
ORDERS = ('random', 'sequential', 'shuffled')
RELEASE = 2**25  # bytes read from mapped files before their pages are given back

# -----------------------------------------------------------------------------
# folders


def find_dataset(dataset):
    """The folder of a data set: a name is a folder of data/, anything with a slash is a path."""
    dataset = os.path.expanduser(dataset)
    return dataset if os.sep in dataset or dataset in ('.', '..') else os.path.join(ROOT, 'data', dataset)


def how_to_prepare(folder):
    """The command that writes a data set, for an error."""
    script = os.path.join(folder, 'prepare.py')
    if os.path.isfile(script):
        return f'python {os.path.relpath(script)}'
    like = 'openwebtext' if glob.glob(os.path.join(glob.escape(folder), '*_*_*.bin')) else 'shakespeare_char'
    script = os.path.relpath(os.path.join(ROOT, 'data', like, 'prepare.py'))
    return f'python {script} --source=FILE --out_dir={folder}'


def read_meta(folder):
    """The meta.json of a prepared folder as a dict with `tokenizer` and `vocab_size`."""
    path = os.path.join(folder, 'meta.json')
    how = f'run: {how_to_prepare(folder)}'
    if not os.path.isdir(folder):
        known = sorted(d.name for d in os.scandir(os.path.join(ROOT, 'data')) if os.path.isfile(f'{d.path}/prepare.py'))
        raise UserError(f'dataset: there is no folder {folder}; data/ has {", ".join(known)}, and any path works too')
    if not os.path.isfile(path):
        if os.path.isfile(os.path.join(folder, 'progress.json')):
            how = how if os.path.isfile(os.path.join(folder, 'prepare.py')) else 'run the command that began it again'
            raise UserError(f'{folder}: the preparation of the data set has not finished; to go on, {how}')
        if os.path.isfile(os.path.join(folder, 'meta.pkl')):
            raise UserError(f'{folder}: prepared by nanoGPT with a vocabulary of its own, in meta.pkl, which would run '
                            f'code when read; to prepare it here, {how}')
        if any(list_files(folder).values()):
            return GPT2
        raise UserError(f'{folder}: the data set is not prepared; {how}')
    try:
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        if type(meta['vocab_size']) is not int or meta['tokenizer']['name'] not in TOKENIZERS:
            raise ValueError('vocab_size is no integer, or the tokenizer is unknown')
        for key in ('shards', 'checked'):  # name of a file -> what is known about it
            if not all(isinstance(entry['largest'], int) for entry in meta.get(key, {}).values()):
                raise ValueError(f'{key} has an entry whose largest token is no integer')
        if meta.get('dtype', 'uint16') != 'uint16':
            raise ValueError(f'tokens of type {meta["dtype"]}, not uint16')
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f'{path}: not readable as the description of a data set ({e!r}); {how}') from None
    return meta


def open_dataset(folder, meta, block_size, scan=True):
    """
    {'train': [Tokens], 'val': [Tokens]}, checked for what would only show up as nonsense later.
    scan: also look for token ids past the vocabulary. That reads every file, so the answer is kept in meta.json until
    the file changes; with several processes one of them is enough.
    """
    how = f'prepare the data set again: {how_to_prepare(folder)}'
    files = {split: [Tokens(path) for path in paths] for split, paths in list_files(folder).items()}
    there = {file.name for split in files.values() for file in split}
    for name in meta.get('shards', {}):
        if name not in there:
            raise UserError(f'{os.path.join(folder, name)}: missing, though meta.json has it; {how}')
    for split, opened in files.items():
        if not opened:
            name = f'{split}.bin' if there <= {'train.bin', 'val.bin'} else f'*_{split}_*.bin'
            raise UserError(f'{os.path.join(folder, name)}: missing; {how}')
        longest = max(opened, key=len)
        if len(longest) < block_size + 1:
            raise UserError(f'{longest.path}: {len(longest):,} tokens are too few for block_size = {block_size}: at '
                            f'least {block_size + 1:,} are needed, take a smaller block_size or more text')
    if scan:
        checked, seen = meta.get('checked', {}), {}
        for file in files['train'] + files['val']:
            stamp = {'bytes': file.bytes, 'mtime_ns': os.stat(file.path).st_mtime_ns}
            written, entry = meta.get('shards', {}).get(file.name, {}), checked.get(file.name, {})
            if entry and entry == {**stamp, 'largest': entry['largest']}:
                largest = entry['largest']
            elif not entry and written.get('tokens') == len(file):  # the prepare script looked while writing
                largest = written['largest']
            else:
                largest = file.largest()
            seen[file.name] = {**stamp, 'largest': largest}
            if largest >= meta['vocab_size']:
                raise UserError(f'{file.path}: token id {largest} is past the vocabulary of '
                                f'{meta["vocab_size"]}; {how}')
        path, text = Path(folder) / 'meta.json', json.dumps({**meta, 'checked': seen}, indent=2) + '\n'
        if seen != checked and (meta is GPT2 or path.is_file()):  # or a preparation has begun again meanwhile
            with contextlib.suppress(OSError):  # a folder that cannot be written to is looked through each time
                replace_file(path, lambda aside: Path(aside).write_text(text, encoding='utf-8'),
                             aside=f'{path}.{os.getpid()}')
    return files


# -----------------------------------------------------------------------------
# windows: block_size tokens and what follows each of them


class Windows:
    """
    The windows that follow each other in some files, without overlap but for the last target, which is the first token
    of the next one. Windows are numbered through all files; what is left over at the end of a file is in none.
    """

    def __init__(self, files, block_size):
        self.files, self.block_size = files, block_size
        self.counts = np.array([max(len(file) - 1, 0) // block_size for file in files])
        self.total = int(self.counts.sum())
        self.unreleased, self.touched = 0, set()

    def locate(self, windows, files=None):
        """(file, start) of window numbers (n,). files: their order, if it is not that of the numbering."""
        files = np.arange(len(self.files)) if files is None else files
        ends = np.cumsum(self.counts[files])
        place = np.searchsorted(ends, windows, side='right')
        return files[place], (windows - (ends - self.counts[files])[place]) * self.block_size

    def read(self, files, starts):
        """x, y (n, T) int64: n windows and what follows each of their tokens."""
        n, T = len(starts), self.block_size
        x, y = np.empty((n, T), dtype=np.int64), np.empty((n, T), dtype=np.int64)
        for i, (file, start) in enumerate(zip(files.tolist(), starts.tolist())):
            row = self.files[file].tokens[start : start + T + 1]
            x[i], y[i] = row[:-1], row[1:]
            self.touched.add(file)
            self.unreleased += 2 * T + 2**17  # the system maps the neighbourhood too
            if self.unreleased > RELEASE:
                for file in self.touched:
                    self.files[file].release()
                self.unreleased, self.touched = 0, set()
        return torch.from_numpy(x), torch.from_numpy(y)


def pin(x, y, device):
    """Into memory from which a copy to a GPU runs beside the computation."""
    return (x.pin_memory(), y.pin_memory()) if device.type == 'cuda' else (x, y)


def to_device(x, y, device):
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def val_batches(files, batch_size, block_size, max_tokens, device, rank=0, world=1):
    """
    Yields x, y (batch_size, block_size) and how many targets count: the windows that follow each other from the start
    of the split, up to max_tokens (0 = the whole split). Every rank takes each world-th batch; the last is filled up
    with targets of -1, so that the shape, hence a compiled model, stays.
    """
    windows = Windows(files, block_size)
    n = min(windows.total, max(1, max_tokens // block_size)) if max_tokens else windows.total
    for start in range(rank * batch_size, n, world * batch_size):
        count = min(batch_size, n - start)
        x, y = torch.zeros(batch_size, block_size, dtype=torch.long), torch.full((batch_size, block_size), -1)
        x[:count], y[:count] = windows.read(*windows.locate(np.arange(start, start + count)))
        yield *to_device(*pin(x, y, device), device), count * block_size


# -----------------------------------------------------------------------------
# training


class TrainLoader:
    """
    The batches of a training run. next() returns those of a step for this rank, x, y (B, T) a micro-step; the next
    step's are read while the caller computes.

    files: [Tokens]; shape: (micro-steps, processes, B); order:
        random      windows anywhere, drawn with replacement (nanoGPT's): a function of (seed, number of the step)
        sequential  every window of an epoch in the order of the files
        shuffled    every window of an epoch once: the files in an order of that epoch, the windows of each in another
        None        random for train.bin, sequential for shards
    A window of the global batch is the same one whatever the shape; a step may run over the ends of files and epochs.
    """

    def __init__(self, files, block_size, shape, rank, seed, order, device):
        self.windows, self.shape, self.rank = Windows(files, block_size), shape, rank
        self.seed, self.device = seed, device
        self.order = order or ('random' if files[0].name == 'train.bin' else 'sequential')
        self.epoch, self.window, self.step = 0, 0, 0  # of the next batch that next() returns
        self.permutation = {}
        thread = dict(initializer=torch.cuda.set_device, initargs=(device,)) if device.type == 'cuda' else {}
        self.reader, self.ahead = ThreadPoolExecutor(1, **thread), None

    @property
    def epochs(self):
        """How often the data has been seen."""
        per_step = int(np.prod(self.shape)) / self.windows.total
        return self.step * per_step if self.order == 'random' else self.epoch + self.window / self.windows.total

    def state_dict(self):
        """Plain numbers for the checkpoint: where the next batch begins."""
        return {'step': self.step, 'epoch': self.epoch, 'window': self.window, 'block_size': self.windows.block_size}

    def load_state_dict(self, state):
        """Goes on where state_dict() was taken, also with another batch size, block size or number of processes."""
        self.step, self.epoch = state['step'], state['epoch']
        self.window = state['window'] * state['block_size'] // self.windows.block_size
        self.ahead = None

    def next(self):
        batches = (self.ahead or self.reader.submit(self.read, self.step, self.epoch, self.window)).result()
        n = int(np.prod(self.shape))
        turns, self.window = divmod(self.window + n, self.windows.total)
        self.step, self.epoch = self.step + 1, self.epoch + turns
        self.ahead = self.reader.submit(self.read, self.step, self.epoch, self.window)
        return (to_device(x, y, self.device) for x, y in batches)

    def read(self, step, epoch, window):
        """[(x, y)] of this rank's micro-steps."""
        files, starts = self.locate(step, epoch, window)
        files, starts = (a.reshape(self.shape)[:, self.rank] for a in (files, starts))  # (micro-steps, B)
        return [pin(*self.windows.read(*micro_step), self.device) for micro_step in zip(files, starts)]

    def locate(self, step, epoch, window):
        """(file, start) of all windows of a step, (micro-steps * processes * B,) each."""
        n = int(np.prod(self.shape))
        if self.order == 'random':
            T = self.windows.block_size
            room = np.array([max(len(file) - T, 0) for file in self.windows.files])  # possible starts
            start = np.random.default_rng((self.seed, step)).integers(room.sum(), size=n)
            file = np.searchsorted(np.cumsum(room), start, side='right')
            return file, start - (np.cumsum(room) - room)[file]
        turns, windows = np.divmod(np.arange(window, window + n), self.windows.total)
        parts = [self.locate_in_epoch(epoch + int(turn), windows[turns == turn]) for turn in np.unique(turns)]
        return tuple(np.concatenate(part) for part in zip(*parts))

    def locate_in_epoch(self, epoch, windows):
        if self.order == 'sequential':
            return self.windows.locate(windows)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.windows.files))
        files, starts = self.windows.locate(windows, order)
        T = self.windows.block_size
        for file in np.unique(files):
            mine = files == file
            starts[mine] = self.permute(epoch, int(file))[starts[mine] // T] * T
        return files, starts

    def permute(self, epoch, file):
        """The windows of a file in the order of an epoch."""
        if (epoch, file) not in self.permutation:
            order = np.random.default_rng((self.seed, epoch, file + 1)).permutation(self.windows.counts[file])
            self.permutation = dict([*self.permutation.items()][-1:] + [((epoch, file), order)])  # the last two
        return self.permutation[epoch, file]
