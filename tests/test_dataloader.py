"""dataloader.py: the position is global, a step is the same batch however it is divided, validation never changes."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configurator import UserError
from data.shards import HEADER_BYTES, MAGIC, Tokens, header
from dataloader import GPT2, ROOT, TrainLoader, find_dataset, open_dataset, read_meta, val_batches

CPU = torch.device('cpu')


class Memory:
    """Tokens in memory, for tests of the order."""

    def __init__(self, tokens, name='x_train_000001.bin'):
        self.tokens, self.name = np.asarray(tokens, dtype='<u2'), name

    def __len__(self):
        return len(self.tokens)

    def release(self):
        pass


def count(n, first=0):
    return Memory(np.arange(first, first + n))


def write_shard(path, tokens):
    path.write_bytes(header(len(tokens)) + np.asarray(tokens, dtype='<u2').tobytes())
    return path


def steps(files, T, shape, n, seed=0, order='sequential', state=None):
    """The windows of n steps, (n, micro-steps * processes * B, T + 1), as all processes together see them."""
    micro_steps, world, B = shape
    loaders = [TrainLoader(files, T, shape, rank, seed, order, CPU) for rank in range(world)]
    result = np.empty((n, micro_steps, world, B, T + 1), dtype=int)
    for rank, loader in enumerate(loaders):
        if state:
            loader.load_state_dict(state)
        for step in range(n):
            for micro_step, (x, y) in enumerate(loader.next()):
                assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64
                assert x.is_contiguous() and y.is_contiguous() and torch.equal(x[:, 1:], y[:, :-1])
                result[step, micro_step, rank] = torch.cat([x, y[:, -1:]], 1)
    assert len({str(loader.state_dict()) for loader in loaders}) == 1
    return result.reshape(n, -1, T + 1), loaders[0]


# -----------------------------------------------------------------------------
# sequential and shuffled windows

def reference(files, T, per_step, n):
    """n steps of the windows of all files, epoch after epoch, in ten lines."""
    epoch = []
    for tokens in files:
        i = 0
        while i + T + 1 <= len(tokens):
            epoch.append([int(t) for t in tokens[i : i + T + 1]])
            i += T
    stream = epoch * (n * per_step // len(epoch) + 1)
    return [stream[step * per_step : (step + 1) * per_step] for step in range(n)]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 90), min_size=1, max_size=5), T=st.integers(1, 12), B=st.integers(1, 4),
       micro_steps=st.sampled_from([4, 8]), n=st.integers(1, 6))
def test_the_tokens_are_those_of_the_reference_for_any_number_of_processes(sizes, T, B, micro_steps, n):
    sizes[0] = max(sizes[0], T + 1)
    files = [count(size, 100 * i) for i, size in enumerate(sizes)]
    expected = reference([file.tokens for file in files], T, micro_steps * B, n)
    for world in (1, 2, 4):
        windows, loader = steps(files, T, (micro_steps // world, world, B), n)
        assert windows.tolist() == expected
    total = sum(max(size - 1, 0) // T for size in sizes)
    assert (loader.epoch, loader.window) == divmod(n * micro_steps * B, total)


def test_a_step_runs_over_the_end_of_a_shard_a_tail_and_an_epoch():
    files = [count(13), count(4, 100), count(9, 200)]  # 3 windows of 4; none (its 4 tokens have 3 targets); 2 windows
    windows, loader = steps(files, 4, (1, 2, 1), 4)
    starts = [[0, 4], [8, 200], [204, 0], [4, 8]]
    assert windows[:, :, 0].tolist() == starts
    assert loader.state_dict() == {'step': 4, 'epoch': 1, 'window': 3, 'block_size': 4}
    assert loader.epochs == 1.6


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4), T=st.integers(1, 8), seed=st.integers(0, 5),
       micro_steps=st.sampled_from([4, 8]))
def test_a_shuffled_epoch_is_every_window_once(sizes, T, seed, micro_steps):
    sizes[0] = max(sizes[0], T + 1)
    files = [count(size, 100 * i) for i, size in enumerate(sizes)]
    [epoch] = reference([file.tokens for file in files], T, sum((size - 1) // T for size in sizes), 1)
    n = 3 * len(epoch) // micro_steps + 1
    results = [steps(files, T, (micro_steps // world, world, 1), n, seed, 'shuffled')[0] for world in (1, 2, 4)]
    assert all(np.array_equal(results[0], other) for other in results)
    windows = results[0].reshape(-1, T + 1).tolist()
    for i in range(n * micro_steps // len(epoch)):
        assert sorted(windows[i * len(epoch) : (i + 1) * len(epoch)]) == sorted(epoch)


def test_shuffled_keeps_a_file_together_and_changes_with_seed_and_epoch():
    files = [count(161, 1000 * i) for i in range(5)]  # 10 windows of 16 each
    first = steps(files, 16, (1, 1, 10), 10, 0, 'shuffled')[0][:, :, 0]
    other = steps(files, 16, (1, 1, 10), 10, 1, 'shuffled')[0][:, :, 0]
    assert all(len(set(step // 1000)) == 1 for step in first)  # each file is read through before the next
    orders = {tuple(part[:, 0] // 1000) for part in (first[:5], first[5:], other[:5])}
    inside = {tuple(step % 1000) for step in [*first, *other]}
    assert len(orders) == 3 and len(inside) == 20


@pytest.mark.parametrize('order', ['random', 'sequential', 'shuffled'])
@pytest.mark.parametrize('cut', [1, 4, 6])
def test_a_loader_goes_on_where_it_stopped(order, cut):
    files = [count(161), count(100, 1000)]
    whole, _ = steps(files, 16, (2, 1, 2), 12, 3, order)
    first, loader = steps(files, 16, (2, 1, 2), cut, 3, order)
    state = json.loads(json.dumps(loader.state_dict()))
    rest, _ = steps(files, 16, (1, 2, 2), 12 - cut, 3, order, state)  # and with two processes
    assert np.array_equal(np.concatenate([first, rest]), whole)


def test_a_loader_goes_on_with_another_batch_or_block_size():
    files = [count(641)]
    _, loader = steps(files, 16, (2, 1, 2), 3)
    assert steps(files, 16, (1, 1, 3), 1, state=loader.state_dict())[0][0, :, 0].tolist() == [192, 208, 224]
    assert steps(files, 8, (1, 1, 2), 1, state=loader.state_dict())[0][0, :, 0].tolist() == [192, 200]


def test_the_next_batch_is_read_ahead(monkeypatch):
    loader = TrainLoader([count(161)], 16, (1, 1, 2), 0, 0, 'sequential', CPU)
    list(loader.next())
    loader.ahead.result(timeout=10)
    assert loader.state_dict()['window'] == 2  # the state is that of what was handed out
    monkeypatch.setattr(loader, 'read', None)  # nothing more is needed for the next batch
    [(x, _)] = loader.next()
    assert x[:, 0].tolist() == [32, 48]


# -----------------------------------------------------------------------------
# random windows

def random_starts(sizes, T, shape, seed, step):
    loader = TrainLoader([count(size) for size in sizes], T, shape, 0, seed, 'random', CPU)
    return [a.tolist() for a in loader.locate(step, 0, 0)]


def test_a_random_step_is_the_same_batch_however_it_is_divided():
    results = [steps([count(1000), count(99)], 16, shape, 3, 7, 'random')[0]
               for shape in ((1, 1, 24), (6, 1, 4), (3, 2, 4), (1, 8, 3))]
    assert all(np.array_equal(results[0], other) for other in results)


def test_random_windows_depend_on_seed_and_step():
    draws = [random_starts([10**5], 16, (2, 1, 8), seed, step)[1] for seed, step in ((1, 0), (1, 1), (2, 0), (0, 1))]
    assert len({tuple(draw) for draw in draws}) == 4
    assert draws[1] == random_starts([10**5], 16, (2, 1, 8), 1, 1)[1]


@pytest.mark.parametrize('sizes, T', [([17], 16), ([18], 16), ([40], 16), ([20, 3, 16, 17, 19], 16)])
def test_every_random_window_is_drawn_and_none_runs_past_the_end(sizes, T):
    drawn = set(zip(*random_starts(sizes, T, (1, 1, 2000), 0, 0)))
    assert drawn == {(i, start) for i, size in enumerate(sizes) for start in range(size - T)}


def test_random_windows_are_uniform():
    files, starts = random_starts([76, 56], 16, (1, 1, 100_000), 3, 4)
    counts = np.bincount(np.array(files) * 60 + starts, minlength=100)
    assert len(counts) == 100 and ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square, 99 degrees: mean 99, sigma 14


def test_the_order_that_a_data_set_has_by_itself():
    for name, order in (('train.bin', 'random'), ('x_train_000001.bin', 'sequential')):
        assert TrainLoader([Memory(range(99), name)], 16, (1, 1, 1), 0, 0, None, CPU).order == order


# -----------------------------------------------------------------------------
# validation windows

def val(files, batch_size, block_size, max_tokens=0, rank=0, world=1):
    """The windows (n, block_size + 1) that count, in the order in which they come, and the batches' shapes."""
    windows, shapes = [], set()
    for x, y, n in val_batches(files, batch_size, block_size, max_tokens, CPU, rank, world):
        rows = n // block_size
        assert (y[rows:] == -1).all() and n == rows * block_size == (y != -1).sum()
        windows += torch.cat([x[:rows], y[:rows, -1:]], 1).tolist()
        assert torch.equal(x[:rows, 1:], y[:rows, :-1])
        shapes.add((tuple(x.shape), tuple(y.shape)))
    return windows, shapes


@pytest.mark.parametrize('n, expected', [(17, 1), (32, 1), (33, 2), (100, 6), (16 * 7 + 1, 7), (16 * 8, 7)])
def test_validation_is_every_window_in_order(n, expected):
    for batch_size in (1, 2, 3, 64):
        windows, shapes = val([count(n)], batch_size, 16)
        assert windows == [list(range(16 * i, 16 * i + 17)) for i in range(expected)]
        assert shapes == {((batch_size, 16),) * 2}  # the last batch too: a compiled model sees one shape


def test_validation_over_two_files():
    assert [w[0] for w in val([count(40), count(5, 100), count(33, 200)], 3, 16)[0]] == [0, 16, 200, 216]


@pytest.mark.parametrize('max_tokens, expected', [(0, 6), (1, 1), (16, 1), (31, 1), (32, 2), (95, 5), (96, 6), (99, 6)])
def test_eval_tokens_counts_from_the_start(max_tokens, expected):
    windows, _ = val([count(100)], 4, 16, max_tokens)
    assert windows == val([count(100)], 4, 16)[0][:expected]


@pytest.mark.parametrize('world', [2, 3, 9])
def test_ranks_share_the_validation_windows(world):
    parts = [val([count(100)], 2, 16, rank=rank, world=world)[0] for rank in range(world)]
    assert sorted(sum(parts, [])) == val([count(100)], 2, 16)[0]  # each once; with 9 ranks some have none


# -----------------------------------------------------------------------------
# folders

META = {'tokenizer': {'name': 'gpt2', 'n_vocab': 50257, 'eot': 50256}, 'vocab_size': 50257}


def names(files):
    return {split: [file.name for file in files[split]] for split in files}


@pytest.fixture
def shards(tmp_path):
    """A folder of three shards; the tokens of a shard begin at 1000 times its number."""
    for split, i, n in (('val', 0, 40), ('train', 1, 100), ('train', 2, 60)):
        write_shard(tmp_path / f'web_{split}_{i:06}.bin', 1000 * i + np.arange(n))
    return tmp_path


def test_shards_and_headerless_bins_hold_the_same_tokens(shards, tmp_path):
    files = open_dataset(shards, read_meta(shards), 16)
    assert names(files) == {'train': ['web_train_000001.bin', 'web_train_000002.bin'], 'val': ['web_val_000000.bin']}
    assert files['train'][1][:].tolist() == list(range(2000, 2060))
    (tmp_path / 'plain').mkdir()
    for split in files:
        np.concatenate([file[:] for file in files[split]]).tofile(tmp_path / 'plain' / f'{split}.bin')
    plain = open_dataset(tmp_path / 'plain', read_meta(tmp_path / 'plain'), 16)
    assert plain['train'][0][:].tolist() == [*range(1000, 1100), *range(2000, 2060)]
    shutil.copy(shards / 'web_val_000000.bin', tmp_path / 'plain' / 'val.bin')  # a header tells itself
    assert open_dataset(tmp_path / 'plain', GPT2, 16)['val'][0][:].tolist() == list(range(40))


def test_another_training_shard_changes_no_validation(shards):
    before = val(open_dataset(shards, GPT2, 16)['val'], 2, 16)
    write_shard(shards / 'web_train_000003.bin', np.arange(90))
    write_shard(shards / 'aaa_train_000000.bin', np.arange(90))
    files = open_dataset(shards, GPT2, 16)
    assert val(files['val'], 2, 16) == before and len(files['train']) == 4


def test_the_look_through_is_done_once(shards, monkeypatch):
    open_dataset(shards, read_meta(shards), 16)
    meta = read_meta(shards)
    assert {name: entry['largest'] for name, entry in meta['checked'].items()} == {
        'web_val_000000.bin': 39, 'web_train_000001.bin': 1099, 'web_train_000002.bin': 2059}
    assert {key: meta[key] for key in GPT2} == GPT2
    looked = []
    monkeypatch.setattr(Tokens, 'largest', lambda file: looked.append(file.name) or 0)
    open_dataset(shards, meta, 16)
    open_dataset(shards, {**GPT2}, 16, scan=False)
    assert looked == []
    write_shard(shards / 'web_train_000002.bin', np.arange(61))  # it changed
    write_shard(shards / 'web_train_000003.bin', np.arange(60))  # it is new
    open_dataset(shards, meta, 16)
    assert looked == ['web_train_000002.bin', 'web_train_000003.bin']
    looked.clear()
    os.utime(shards / 'web_val_000000.bin', ns=(0, 5))
    open_dataset(shards, read_meta(shards), 16)
    assert looked == ['web_val_000000.bin']


def test_a_bad_id_that_was_found_once_is_found_again(shards):
    for meta in ({**META, 'vocab_size': 2000}, read_meta(shards)):
        with pytest.raises(UserError, match=r'web_train_000002\.bin: token id 2059 is past the vocabulary of 2000'):
            open_dataset(shards, {**meta, 'vocab_size': 2000}, 16)
    open_dataset(shards, read_meta(shards), 16)  # what is good is kept
    with pytest.raises(UserError, match='token id 2059'):
        open_dataset(shards, {**read_meta(shards), 'vocab_size': 2000}, 16)


def test_a_folder_that_cannot_be_written_to(shards, monkeypatch):
    def refuse(path, write, aside):
        raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr('dataloader.replace_file', refuse)
    assert len(open_dataset(shards, read_meta(shards), 16)['train']) == 2
    assert not (shards / 'meta.json').exists()


def patch_header(**fields):
    """A damage: int32 number i of the header becomes value."""
    def damage(folder):
        path = folder / 'web_train_000002.bin'
        data = bytearray(path.read_bytes())
        for i, value in fields.items():
            data[4 * int(i[1:]) : 4 * int(i[1:]) + 4] = int(value).to_bytes(4, 'little')
        path.write_bytes(data)
    return damage


def put(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(n):
    def damage(folder):
        path = folder / 'web_train_000002.bin'
        path.write_bytes(path.read_bytes()[:n])
    return damage


def a_folder(folder):
    (folder / 'web_train_000003.bin').mkdir()


FAULTS = [
    ('magic', patch_header(i0=1234), r'web_train_000002\.bin: begins with 1234, not with the magic number 20240520'),
    ('llama-3', patch_header(i0=20240801), r'web_train_000002\.bin: a shard of Llama-3 tokens \(uint32\); GPT-2'),
    ('version', patch_header(i1=2), r'web_train_000002\.bin: version 2 of the shard format, 1 is'),
    ('count', patch_header(i2=61), r'web_train_000002\.bin: the header says 61 tokens.* 1,146 bytes.* 1,144'),
    ('cut', cut(-2), r'web_train_000002\.bin: the header says 60 .*cut off'),
    ('odd', cut(-1), r'web_train_000002\.bin: the header says 60 .*cut off'),
    ('header cut', cut(500), r'web_train_000002\.bin: the header says 60 .*cut off'),
    ('magic cut', cut(3), r'web_train_000002\.bin: begins with .*not with the magic'),
    ('empty', cut(0), r'web_train_000002\.bin: empty'),
    ('folder', a_folder, r'web_train_000003\.bin: a folder where a file'),
    ('no val', lambda folder: os.remove(folder / 'web_val_000000.bin'), r'\*_val_\*\.bin: missing; prepare'),
    ('both kinds', put('val.bin', bytes(99)), r'has both val\.bin and shards like web_.*keep one'),
    ('unfinished', put('progress.json', b'{}'), r'has not finished; to go on, run the command that began'),
    ('meta.pkl', put('meta.pkl', b''), r'meta\.pkl, which would run code'),
    ('listed', put('meta.json', json.dumps({**META, 'shards': {'web_train_000009.bin': {'largest': 1}}}).encode()),
     r'web_train_000009\.bin: missing, though meta\.json has it'),
    ('uint32', put('meta.json', json.dumps({**META, 'dtype': 'uint32'}).encode()), r'meta\.json: .*uint32, not uint16'),
    ('short', lambda folder: [write_shard(folder / f'web_train_00000{i}.bin', range(16)) for i in (1, 2)],
     r'web_train_000001\.bin: 16 tokens are too few for block_size = 16'),
]


@pytest.mark.parametrize('damage, message', [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_bad_shards_are_named(shards, damage, message):
    damage(shards)
    with pytest.raises(UserError, match=message):
        open_dataset(shards, read_meta(shards), 16)


def test_a_short_shard_among_longer_ones_is_no_fault(shards):
    write_shard(shards / 'web_train_000003.bin', range(5))
    assert len(open_dataset(shards, GPT2, 16)['train']) == 3


@pytest.mark.parametrize('content, block_size, n_vocab, message', [
    (None, 4, 10, r'train\.bin: missing; prepare .*prepare\.py'),
    (b'', 4, 10, r'train\.bin: empty; prepare'),
    (bytes(11), 4, 10, r'train\.bin: 11 bytes .*cut off; prepare'),
    (bytes(8), 4, 10, r'train\.bin: 4 tokens .*block_size = 4.* 5 .*smaller block_size'),
    (np.arange(11, dtype='<u2').tobytes(), 4, 10, r'train\.bin: token id 10 .*vocabulary of 10; prepare'),
    (np.arange(11, dtype='<u4').tobytes(), 4, 10, r'train\.bin: looks like 4-byte tokens'),
])
def test_bad_bins_are_named(tmp_path, content, block_size, n_vocab, message):
    (tmp_path / 'val.bin').write_bytes(bytes(20))
    if content is not None:
        (tmp_path / 'train.bin').write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_dataset(tmp_path, {**META, 'vocab_size': n_vocab}, block_size)


def test_a_wrong_token_is_found_anywhere(tmp_path):
    data = np.zeros(2**24 + 5, dtype='<u2')
    data[-1] = 7
    data.tofile(tmp_path / 'val.bin')
    assert Tokens(tmp_path / 'val.bin').largest() == 7


def test_tokens_are_little_endian_and_read_only(tmp_path):
    np.array([0, 1, 256, 65534], dtype='<u2').tofile(tmp_path / 'train.bin')
    assert (tmp_path / 'train.bin').read_bytes()[2:6] == b'\1\0\0\1'
    tokens = Tokens(tmp_path / 'train.bin')
    assert tokens[:].tolist() == [0, 1, 256, 65534] and not tokens[:].flags.writeable
    assert np.frombuffer(header(5), '<i4')[:3].tolist() == [MAGIC, 1, 5] and len(header(5)) == HEADER_BYTES


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
    b'{"vocab_size": 3, "tokenizer": "char"}', b'{"vocab_size": 3, "tokenizer": {"name": "char"}, "shards": [1]}',
    b'{"vocab_size": 3, "tokenizer": {"name": "char"}, "checked": {"train.bin": 3}}'])
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


# -----------------------------------------------------------------------------
# speed and memory, over sparse files: they take no room on the disk, but are read as 2 GB of zeros

READ = """
import sys, time
from dataloader import TrainLoader, open_dataset, read_meta
import torch
order, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
files = open_dataset(folder, read_meta(folder), 1024)
loader = TrainLoader(files['train'], 1024, (4, 1, 12), 0, 0, order, torch.device('cpu'))
for _ in range(10):
    list(loader.next())
def resident():
    return int(next(line for line in open('/proc/self/status') if line.startswith('VmRSS')).split()[1]) / 1024
before, most, start = resident(), 0, time.perf_counter()
for i in range(steps):
    list(loader.next())
    if i % 50 == 0:
        most = max(most, resident())
seconds = time.perf_counter() - start
print(steps * 4 * 12 * 1024 / seconds / 1e6, most - before, loader.epochs)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
@pytest.mark.parametrize('order', ['sequential', 'shuffled', 'random'])
def test_speed_and_memory_over_2_gb(tmp_path, order):
    for split, i, n in (('val', 0, 10**6), *(('train', i, 10**8) for i in range(1, 11))):
        path = write_shard(tmp_path / f'web_{split}_{i:06}.bin', [])
        with open(path, 'r+b') as f:
            f.write(header(n))
            f.truncate(HEADER_BYTES + 2 * n)
    done = subprocess.run([sys.executable, '-c', READ, order, tmp_path, '20400'], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'},
                          preexec_fn=lambda: os.sched_setaffinity(0, {0}))
    assert done.returncode == 0, done.stderr
    million_a_second, growth, epochs = map(float, done.stdout.split())
    print(f'{order}: {million_a_second:.0f}M tokens/s on one core, {growth:.1f} MB more resident, {epochs:.2f} epochs')
    assert epochs > 1 and growth < 100 and million_a_second > 50
