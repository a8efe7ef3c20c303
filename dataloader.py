"""
Tokens on disk -> batches. A data set is a folder with train.bin, val.bin (headerless little-endian uint16 tokens, as in
nanoGPT) and meta.json (tokenizer and vocabulary, written by the folder's prepare.py).

Nothing here has a state: the batch is a pure function of (seed, step), the validation set is always the same windows.
Evaluating more often, another number of processes or a restart cannot change what a step trains on.
"""
import json
import os

import numpy as np
import torch

from configurator import UserError
from data.tokenizer import TOKENIZERS

ROOT = os.path.dirname(os.path.abspath(__file__))
# what a folder without meta.json holds: nanoGPT's openwebtext has none
GPT2 = {'tokenizer': {'name': 'gpt2', 'n_vocab': 50257, 'eot': 50256}, 'vocab_size': 50257}


def find_dataset(dataset):
    """The folder of a data set: a name is a folder of data/, anything with a slash is a path."""
    dataset = os.path.expanduser(dataset)
    return dataset if os.sep in dataset or dataset in ('.', '..') else os.path.join(ROOT, 'data', dataset)


def how_to_prepare(folder):
    """The command that writes a data set, for an error."""
    script = os.path.join(folder, 'prepare.py')
    if os.path.isfile(script):
        return f'python {os.path.relpath(script)}'
    script = os.path.relpath(os.path.join(ROOT, 'data', 'shakespeare_char', 'prepare.py'))
    return f'python {script} --source=FILE --out_dir={folder}'


def read_meta(folder):
    """The meta.json of a prepared folder as a dict with `tokenizer` and `vocab_size`."""
    path = os.path.join(folder, 'meta.json')
    how = f'run: {how_to_prepare(folder)}'
    if not os.path.isdir(folder):
        known = sorted(d.name for d in os.scandir(os.path.join(ROOT, 'data')) if os.path.isfile(f'{d.path}/prepare.py'))
        raise UserError(f'dataset: there is no folder {folder}; data/ has {", ".join(known)}, and any path works too')
    if not os.path.isfile(path):
        if os.path.isfile(os.path.join(folder, 'train.bin')):
            return GPT2  # prepared by nanoGPT
        raise UserError(f'{folder}: the data set is not prepared; {how}')
    try:
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        if type(meta['vocab_size']) is not int or meta['tokenizer']['name'] not in TOKENIZERS:
            raise ValueError('vocab_size is no integer, or the tokenizer is unknown')
        if meta.get('dtype', 'uint16') != 'uint16':
            raise ValueError(f'tokens of type {meta["dtype"]}, not uint16')
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f'{path}: not readable as the description of a data set ({e!r}); {how}') from None
    return meta


def open_split(folder, split, block_size, vocab_size):
    """The tokens of a split, memory-mapped uint16. Checked for what would only show up as nonsense later."""
    path = os.path.join(folder, f'{split}.bin')
    how = f'prepare the data set again: {how_to_prepare(folder)}'
    if not os.path.isfile(path):
        raise UserError(f'{path}: missing; {how}')
    size = os.path.getsize(path)
    if size == 0:
        raise UserError(f'{path}: empty; {how}')
    if size % 2:
        raise UserError(f'{path}: {size:,} bytes are no whole number of 2-byte tokens, the file is cut off; {how}')
    try:
        data = np.memmap(path, dtype='<u2', mode='r')
    except OSError as e:
        raise UserError(f'{path}: cannot be read ({e.strerror})') from None
    if len(data) < block_size + 1:
        raise UserError(f'{path}: {len(data):,} tokens are too few for block_size = {block_size}: '
                        f'at least {block_size + 1:,} are needed, take a smaller block_size or more text')
    largest = max(int(data[i : i + 2**24].max()) for i in range(0, len(data), 2**24))
    if largest >= vocab_size:
        raise UserError(f'{path}: token id {largest} is past the vocabulary of {vocab_size}; {how}')
    return data


def to_device(x, y, device):
    if device.type == 'cuda':  # pinned, so that the copy runs beside the computation
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


def train_windows(n_tokens, block_size, shape, seed, step):
    """Starts of the random windows of a step, int64 of `shape` = (micro-steps, ranks, batch_size). They depend on
    (seed, step) and their number alone: however a batch is divided over micro-steps and ranks, it is the same batch."""
    return np.random.default_rng((seed, step)).integers(n_tokens - block_size, size=shape)


def train_batch(data, starts, block_size, device):
    """x, y (B, T) int64, the windows at `starts` (B,) and what follows each of their tokens."""
    rows = np.stack([data[i : i + block_size + 1] for i in starts])  # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return to_device(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), device)


def val_batches(data, batch_size, block_size, max_tokens, device, rank=0, world=1):
    """
    Yields x, y (batch_size, block_size) and how many targets count: the windows that follow each other from the start
    of the split, up to max_tokens (0 = the whole split; less than one window is left over at its end). Every rank takes
    each world-th batch; the last is filled up with targets of -1, so that the shape, hence a compiled model, stays.
    """
    n = (len(data) - 1) // block_size  # windows
    if max_tokens:
        n = min(n, max(1, max_tokens // block_size))
    for start in range(rank * batch_size, n, world * batch_size):
        count = min(batch_size, n - start)
        i = start * block_size
        tokens = torch.from_numpy(data[i : i + count * block_size + 1].astype(np.int64))
        x, y = torch.zeros(batch_size, block_size, dtype=torch.long), torch.full((batch_size, block_size), -1)
        x[:count] = tokens[:-1].view(count, block_size)
        y[:count] = tokens[1:].view(count, block_size)
        yield *to_device(x, y, device), count * block_size
