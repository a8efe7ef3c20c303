"""dataloader.py: what a step trains on depends on (seed, step) alone, the validation windows are always the same."""
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from configurator import UserError
from dataloader import GPT2, ROOT, find_dataset, open_split, read_meta, train_batch, train_windows, val_batches

CPU = torch.device('cpu')


def tokens(n):
    return np.arange(n, dtype='<u2')


def val(data, batch_size, block_size, max_tokens=0, rank=0, world=1):
    """The windows (n, block_size + 1) that count, in the order in which they come, and the batches' shapes."""
    windows, shapes = [], set()
    for x, y, n in val_batches(data, batch_size, block_size, max_tokens, CPU, rank, world):
        rows = n // block_size
        assert (y[rows:] == -1).all() and n == rows * block_size == (y != -1).sum()
        windows += torch.cat([x[:rows], y[:rows, -1:]], 1).tolist()
        assert torch.equal(x[:rows, 1:], y[:rows, :-1])
        shapes.add((tuple(x.shape), tuple(y.shape)))
    return windows, shapes


# -----------------------------------------------------------------------------
# training windows

def test_a_step_is_the_same_batch_however_it_is_divided():
    shapes = [(1, 1, 24), (6, 1, 4), (3, 2, 4), (1, 8, 3)]
    first, *others = (train_windows(1000, 16, shape, seed=7, step=5).ravel().tolist() for shape in shapes)
    assert all(other == first for other in others)


def test_windows_depend_on_seed_and_step():
    draws = [train_windows(10**6, 16, (2, 1, 8), seed, step).ravel().tolist()
             for seed, step in ((1, 0), (1, 1), (2, 0), (0, 1))]
    assert len({tuple(draw) for draw in draws}) == 4
    assert draws[1] == train_windows(10**6, 16, (2, 1, 8), 1, 1).ravel().tolist()


@pytest.mark.parametrize('n_tokens, block_size', [(17, 16), (18, 16), (40, 16)])
def test_every_window_is_drawn_and_none_runs_past_the_end(n_tokens, block_size):
    starts = train_windows(n_tokens, block_size, (1, 1, 2000), 0, 0)
    assert set(starts.ravel().tolist()) == set(range(n_tokens - block_size))  # the last target is the last token


def test_windows_are_uniform():
    counts = np.bincount(train_windows(116, 16, (1, 1, 100_000), 3, 4).ravel(), minlength=100)
    assert len(counts) == 100 and ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square, 99 degrees: mean 99, sigma 14


def test_batch_is_the_windows_and_what_follows():
    x, y = train_batch(tokens(100) + 500, np.array([0, 83, 7]), 16, CPU)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (3, 16)
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x, torch.tensor([500, 583, 507])[:, None] + torch.arange(16)) and torch.equal(y, x + 1)


# -----------------------------------------------------------------------------
# validation windows

@pytest.mark.parametrize('n, expected', [(17, 1), (32, 1), (33, 2), (100, 6), (16 * 7 + 1, 7), (16 * 8, 7)])
def test_validation_is_every_window_in_order(n, expected):
    for batch_size in (1, 2, 3, 64):
        windows, shapes = val(tokens(n), batch_size, 16)
        assert windows == [list(range(16 * i, 16 * i + 17)) for i in range(expected)]
        assert shapes == {((batch_size, 16),) * 2}  # the last batch too: a compiled model sees one shape


@pytest.mark.parametrize('max_tokens, expected', [(0, 6), (1, 1), (16, 1), (31, 1), (32, 2), (95, 5), (96, 6), (99, 6)])
def test_eval_tokens_counts_from_the_start(max_tokens, expected):
    windows, _ = val(tokens(100), 4, 16, max_tokens)
    assert windows == val(tokens(100), 4, 16)[0][:expected]


@pytest.mark.parametrize('world', [2, 3, 9])
def test_ranks_share_the_validation_windows(world):
    parts = [val(tokens(100), 2, 16, rank=rank, world=world)[0] for rank in range(world)]
    assert sorted(sum(parts, [])) == val(tokens(100), 2, 16)[0]  # each once; with 9 ranks some have none


def test_a_memory_map_is_not_written_to(tmp_path):
    tokens(100).tofile(tmp_path / 'val.bin')
    data = open_split(tmp_path, 'val', 16, 100)
    for x, y, _ in val_batches(data, 2, 16, 0, CPU):
        x.add_(1), y.add_(1)
    x, _ = train_batch(data, np.array([0, 5]), 16, CPU)
    x.add_(1)
    assert (tmp_path / 'val.bin').read_bytes() == tokens(100).tobytes()


# -----------------------------------------------------------------------------
# files

def test_open_split(tmp_path):
    np.array([0, 1, 256, 65534], dtype='<u2').tofile(tmp_path / 'train.bin')
    assert (tmp_path / 'train.bin').read_bytes()[2:6] == b'\1\0\0\1'  # little-endian
    data = open_split(tmp_path, 'train', 3, 65535)
    assert data.tolist() == [0, 1, 256, 65534] and isinstance(data, np.memmap)


@pytest.mark.parametrize('content, block_size, n_vocab, message', [
    (None, 4, 10, r'train\.bin: missing; prepare .*prepare\.py'),
    (b'', 4, 10, r'train\.bin: empty; prepare'),
    (bytes(11), 4, 10, r'train\.bin: 11 bytes .*cut off; prepare'),
    (bytes(8), 4, 10, r'train\.bin: 4 tokens .*block_size = 4.* 5 .*smaller block_size'),
    (tokens(11).tobytes(), 4, 10, r'train\.bin: token id 10 .*vocabulary of 10; prepare'),
])
def test_open_split_refuses(tmp_path, content, block_size, n_vocab, message):
    if content is not None:
        (tmp_path / 'train.bin').write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_split(tmp_path, 'train', block_size, n_vocab)


def test_a_wrong_token_is_found_anywhere(tmp_path):
    data = np.zeros(2**24 + 5, dtype='<u2')
    data[-1] = 7
    data.tofile(tmp_path / 'val.bin')
    open_split(tmp_path, 'val', 16, 8)
    with pytest.raises(UserError, match='token id 7'):
        open_split(tmp_path, 'val', 16, 7)


def test_find_dataset():
    assert find_dataset('words') == os.path.join(ROOT, 'data', 'words')
    assert [find_dataset(path) for path in ('a/b', './a', '/a', '.', '..')] == ['a/b', './a', '/a', '.', '..']


def test_read_meta(tmp_path):
    with pytest.raises(UserError, match='not prepared; run: python .*prepare.py'):
        read_meta(tmp_path)
    (tmp_path / 'train.bin').write_bytes(b'ab')
    assert read_meta(tmp_path) == GPT2  # nanoGPT's openwebtext
    meta = {'tokenizer': {'name': 'char', 'chars': 'ab—'}, 'vocab_size': 3}
    (tmp_path / 'meta.json').write_text(json.dumps(meta, ensure_ascii=False), encoding='utf-8')
    assert read_meta(tmp_path) == meta


def test_a_missing_folder_names_the_known_ones(tmp_path):
    with pytest.raises(UserError, match='no folder .*nowhere; data/ has .*shakespeare, shakespeare_char'):
        read_meta(tmp_path / 'nowhere')


@pytest.mark.parametrize('content', [
    b'', b'{', b'\xff\xfe', b'[]', b'3', b'null', b'{}', b'{"vocab_size": 3}', b'{"vocab_size": "3", "tokenizer": {}}',
    b'{"vocab_size": 3, "tokenizer": "char"}'])
def test_a_corrupt_meta_is_named(tmp_path, content):
    Path(tmp_path / 'meta.json').write_bytes(content)
    with pytest.raises(UserError, match=r'meta\.json: not readable .*; run: python .*prepare\.py'):
        read_meta(tmp_path)


def test_the_command_that_prepares_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r'prepare\.py --source=FILE --out_dir=.*$'):
        read_meta(tmp_path)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'prepare.py').write_text('')
    with pytest.raises(UserError, match='run: python mine.prepare.py$'):
        read_meta('./mine')
