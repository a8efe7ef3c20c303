"""Large corpora: sources, shards, kills and restarts, faults; data/verify.py."""
import concurrent.futures
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from configurator import UserError
from data import common, corpus, verify
from data.shards import Tokens, list_files
from data.tokenizer import get_tokenizer

pa = pytest.importorskip('pyarrow')
parquet = pytest.importorskip('pyarrow.parquet')
ROOT = Path(__file__).resolve().parents[1]
EOT = 50256
linux = pytest.mark.skipif(not Path('/proc/self/task').exists(), reason='looks into /proc')


@pytest.fixture(scope='module', autouse=True)  # a script that had to download it would say so
def gpt2():
    return get_tokenizer({'name': 'gpt2'})


@pytest.fixture(scope='module')
def plays():
    return common.load_plays()[0]


@pytest.fixture(scope='module')
def documents(plays):
    """About 100,000 tokens in 60 documents, one of them longer than the pieces of the tests."""
    scenes = re.split(r'(?=\nSCENE )', plays)[:50]
    return scenes + ['naïve — 漢字 🙂 <|endoftext|> ' * 9, 'x', ' ', '\n\n', '  two\n\n\nspaces  '] * 2


@pytest.fixture
def inline(monkeypatch, gpt2):
    """Batches are encoded in this process: starting one takes longer than all else."""
    class Pool:
        def __init__(self, workers, mp_context, initializer):
            corpus.tokenizer = gpt2

        def submit(self, function, *args):
            future = concurrent.futures.Future()
            future.set_result(function(*args))
            return future

        def shutdown(self, wait, cancel_futures):
            pass
    monkeypatch.setattr(corpus, 'ProcessPoolExecutor', Pool)
    monkeypatch.setattr(corpus, 'PIECE', 20_000)  # a few documents a batch


def write_source(folder, documents, kind='parquet', files=1):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        part = documents[i * len(documents) // files : (i + 1) * len(documents) // files]
        path = folder / f'part{i}.{kind}'
        if kind == 'parquet':
            parquet.write_table(pa.table({'id': range(len(part)), 'text': pa.array(part, pa.string())}), path,
                                row_group_size=7)
        elif kind == 'txt':
            path.write_bytes('\n'.join(part).encode())
        else:
            lines = ''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in part)
            path.write_bytes(gzip.compress(lines.encode()) if kind.endswith('gz') else lines.encode())
    return folder


def prepare(source, out, hub=None, name='words', **keys):
    corpus.prepare(name, hub, str(source), str(out), **{'shard_tokens': 9_000, **keys})


def script(*args, name='openwebtext', **env):
    command = [sys.executable, str(ROOT / 'data' / name / 'prepare.py'), *map(str, args)]
    return subprocess.run(command, encoding='utf-8', capture_output=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1', **env})


def contents(folder):
    """Every file of a folder that is more than a lock."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.stat().st_size}


def stream(folder):
    """All tokens in the order of the shards."""
    files = list_files(folder)
    return np.concatenate([Tokens(path)[:] for path in files['val'] + files['train']])


def expected(gpt2, documents):
    return [token for text in documents if text for token in [EOT, *gpt2.encode(text)]]


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, documents):
    """(source, folder prepared from it by the script, with one worker)"""
    folder = tmp_path_factory.mktemp('corpus')
    write_source(folder / 'source', documents, files=3)
    done = script(f'--source={folder / "source"}', f'--out_dir={folder / "out"}', '--shard_tokens=9000', '--workers=1')
    assert (done.returncode, done.stderr) == (0, '')
    return folder / 'source', folder / 'out'


# -----------------------------------------------------------------------------
# the shards


def test_shards(undisturbed, gpt2, documents, capsys):
    source, out = undisturbed
    assert stream(out).tolist() == expected(gpt2, documents)
    files = list_files(out)
    assert [len(files[split]) for split in ('val', 'train')] == [1, len(contents(out)) - 3]
    assert [os.path.basename(path) for path in files['val'] + files['train']][:2] == [
        'openwebtext_val_000000.bin', 'openwebtext_train_000001.bin']
    sizes = [len(Tokens(path)) for path in files['val'] + files['train']]
    assert set(sizes[:-1]) == {9000} and 0 < sizes[-1] <= 9000
    meta = json.loads((out / 'meta.json').read_text(encoding='utf-8'))
    assert meta['tokens'] == {'val': 9000, 'train': sum(sizes[1:])}
    assert sum(meta['documents'].values()) == len(documents)
    assert meta['documents']['val'] == (stream(out)[:9000] == EOT).sum()
    assert (meta['vocab_size'], meta['dtype'], meta['eot'], meta['tokenizer']) == (50257, 'uint16', EOT, gpt2.identity)
    assert verify.verify(out) == []
    assert meta['shards'] == {os.path.basename(path): {'tokens': len(Tokens(path)), 'largest': Tokens(path).largest(),
                                                       'sha256': common.sha256(Path(path).read_bytes())}
                              for path in files['val'] + files['train']}


@pytest.mark.parametrize('kind', ['jsonl', 'jsonl.gz', 'txt'])
def test_kinds(tmp_path, inline, gpt2, documents, kind):
    source = write_source(tmp_path / 'source', documents, kind, files=2)
    (source / 'README.md').write_text('not part of it')
    prepare(source, tmp_path / 'out')
    half = len(documents) // 2
    texts = ['\n'.join(documents[:half]), '\n'.join(documents[half:])] if kind == 'txt' else documents
    assert stream(tmp_path / 'out').tolist() == expected(gpt2, texts)


@pytest.mark.parametrize('size', [2, 7, 60])
def test_pieces_have_the_tokens_of_the_whole(gpt2, size):
    draw = random.Random(size)
    chars = 'ab1 \n\t\r\'.,_-\u00a0\u3000\x1c\x85éе漢。🙂\u0301'
    for _ in range(500):
        text = ''.join(draw.choices(chars, k=40)) + draw.choice(["it's we'll", ' \n \r\n x', '  \n', ''])
        ids, start, exact = [], 0, True
        while start < len(text):
            end = corpus.cut(text, start, size)
            window = text[start : end + 1]
            exact &= end == len(text) or bool(corpus.BEFORE_SPACE.match(window) or corpus.BEFORE_MARK.match(window))
            assert 0 < end - start <= size
            ids += gpt2.encode(text[start:end])
            start = end
        assert gpt2.decode(ids) == text
        if exact:
            assert ids == gpt2.encode(text)


@pytest.mark.parametrize('text', [
    'word ' * 5000, 'a' * 3000, ' ' * 3000, '漢字。' * 2000, 'line\r\n' * 1000, '\r\n' * 2001, 'x.y,' * 1000,
    '🙂' * 999])
def test_a_text_in_pieces(tmp_path, monkeypatch, gpt2, text):
    """Read and encoded a piece at a time, it is the whole, byte order mark and line ends apart."""
    monkeypatch.setattr(corpus, 'PIECE', 1000)
    (tmp_path / 'a.txt').write_bytes(b'\xef\xbb\xbf' + text.encode())
    batches = list(corpus.read_text(str(tmp_path / 'a.txt'), 0))
    assert all(len(batch) == 1 and len(batch[0][1].encode()) <= 1000 for batch, _ in batches)
    assert [batch[0][0] for batch, _ in batches] == [True] + [False] * (len(batches) - 1)
    text = text.replace('\r\n', '\n')
    assert ''.join(batch[0][1] for batch, _ in batches) == text
    for batch, at in batches[::3]:  # and from any place on
        assert next(corpus.read_text(str(tmp_path / 'a.txt'), at))[0] == batch
    if len({*text}) > 1:  # cut nowhere but where it may be
        assert [i for batch, _ in batches for i in gpt2.encode(batch[0][1])] == gpt2.encode(text)


def test_a_million_spaces(monkeypatch, gpt2):
    monkeypatch.setattr(corpus, 'tokenizer', gpt2, raising=False)
    text = 'a' + ' ' * 1_100_000 + 'b'
    assert gpt2.decode(np.frombuffer(corpus.encode([(True, text)]), '<u2')[1:]) == text


@pytest.mark.parametrize('kind', ['parquet', 'jsonl.gz'])
def test_rows_from_any_row_on(tmp_path, monkeypatch, kind):
    """Over row groups of 7 rows and batches of 64, with rows that have no text."""
    monkeypatch.setattr(corpus, 'PIECE', 1)
    texts = [None if i % 5 == 0 else '' if i % 7 == 0 else f'text {i}' for i in range(150)]
    write_source(tmp_path, texts, kind)
    parquet.write_table(pa.table({'text': texts}), tmp_path / 'big.parquet')
    for path in map(str, tmp_path.iterdir()):
        for row in (0, 1, 6, 7, 8, 63, 64, 65, 149, 150):
            assert [text for batch, _ in corpus.read_rows(path, row) for _, text in batch] == [
                text for text in texts[row:] if text]


def test_reading_does_not_run_ahead(inline):
    """Whatever the corpus, few batches are in memory."""
    taken = []
    batches = (([(True, 'text')], taken.append(i)) for i in range(1000))
    encoded = corpus.encode_all(batches, workers=2)
    for i in range(3):
        assert next(encoded)[0].tolist() == [EOT, 5239]
        assert len(taken) <= 5 + i
    encoded.close()


def test_max_tokens(tmp_path, inline, gpt2, documents):
    source = write_source(tmp_path / 'source', documents)
    out = tmp_path / 'out'
    prepare(source, out, max_tokens=20_000, shard_tokens=0)  # a tenth of it
    assert stream(out).tolist() == expected(gpt2, documents)[:20_000]
    assert len(Tokens(list_files(out)['val'][0])) == 2000
    first = contents(out)
    prepare(source, out, max_tokens=33_333, shard_tokens=0)  # goes on
    assert stream(out).tolist() == expected(gpt2, documents)[:33_333]
    assert {name: data for name, data in contents(out).items() if name in first and name.endswith('.bin')} == {
        name: data for name, data in first.items() if name.endswith('.bin')}
    with pytest.raises(UserError, match='--max_tokens=20000: .* has 33333 tokens already'):
        prepare(source, out, max_tokens=20_000, shard_tokens=0)
    prepare(source, out, shard_tokens=0)  # all
    prepare(source, tmp_path / 'all', shard_tokens=2000)
    assert contents(out) == contents(tmp_path / 'all')


def test_already_prepared(undisturbed, capsys, monkeypatch):
    source, out = undisturbed
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != '.prepare.lock'}
    monkeypatch.setattr(corpus, 'encode_all', None)
    for keys in ({}, {'max_tokens': 10**9}, {'shard_tokens': 0}):
        prepare(source, out, name='openwebtext', **keys)
        assert 'already prepared' in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != '.prepare.lock'} == before


def test_going_on_is_unfinished(tmp_path, inline, monkeypatch, documents):
    """Where more is asked for, neither meta.json nor the short last shard may stay while it is made."""
    source = write_source(tmp_path / 'source', documents)
    prepare(source, tmp_path / 'out', max_tokens=20_000)
    monkeypatch.setattr(corpus, 'encode_all', lambda *args: (pytest.fail(repr(i)) for i in 'x'))
    with pytest.raises(pytest.fail.Exception):
        prepare(source, tmp_path / 'out', max_tokens=30_000)
    assert sorted(contents(tmp_path / 'out')) == ['progress.json', 'words_train_000001.bin', 'words_val_000000.bin']
    assert verify.verify(tmp_path / 'out') == ['the preparation has not finished; the same prepare command goes on '
                                               'with it']


# -----------------------------------------------------------------------------
# kills, and what else may come between


def children(pid):
    return [int(p) for task in Path(f'/proc/{pid}/task').iterdir() for p in (task / 'children').read_text().split()]


def is_running(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def kill_and_compare(folder, source, whole, kills, workers, shard_tokens, seed=0):
    """Starts the script and SIGKILLs it, again and again; returns the number of kills that left shards behind."""
    draw, wanted, out = random.Random(seed), contents(whole), folder / 'killed'
    command = [sys.executable, str(ROOT / 'data' / 'openwebtext' / 'prepare.py'), f'--source={source}',
               f'--out_dir={out}', f'--shard_tokens={shard_tokens}', f'--workers={workers}']
    killed = midway = 0
    while killed < kills:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding='utf-8')
        have, more = len(list(out.glob('*.bin'))), draw.choice([0, 0, 1, 1, 2, 3, 4])
        end = time.monotonic() + (draw.uniform(0, 1) if not more else 60)
        while time.monotonic() < end and len(list(out.glob('*.bin'))) < have + more + (not more) * 10**6 \
                and process.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.03))
        workers_left = children(process.pid) if process.poll() is None else []
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL), process.stdout.read()
        end = time.monotonic() + 20
        while any(map(is_running, workers_left)):
            assert time.monotonic() < end, 'a worker outlives its parent'
            time.sleep(0.01)
        if process.returncode == 0:  # it got through: once more from the start
            assert contents(out) == wanted
            for path in out.iterdir():
                path.unlink()
            continue
        killed += 1
        shards = [path.name for paths in list_files(out).values() for path in map(Path, paths)] if out.exists() else []
        midway += bool(shards)
        for name in shards:
            assert (out / name).read_bytes() == wanted[name]
        assert not (out / 'meta.json').exists() or contents(out) == wanted
    done = subprocess.run(command, capture_output=True, encoding='utf-8')
    assert (done.returncode, done.stderr) == (0, '')
    assert contents(out) == wanted
    return midway


@pytest.fixture(scope='module')
def killing_ground(tmp_path_factory, plays):
    """(source, prepared folder) of a million tokens in 50 shards."""
    folder = tmp_path_factory.mktemp('kills')
    write_source(folder / 'source', re.split(r'(?=\nSCENE )', plays)[:500], files=3)
    done = script(f'--source={folder / "source"}', f'--out_dir={folder / "out"}', '--shard_tokens=20000', '--workers=2')
    assert (done.returncode, done.stderr) == (0, '')
    return folder / 'source', folder / 'out'


@linux
@pytest.mark.parametrize('workers', [1, 2])
def test_ten_kills(killing_ground, tmp_path, workers):
    assert kill_and_compare(tmp_path, *killing_ground, 10, workers, 20_000, seed=workers) >= 5


@linux
@pytest.mark.slow
@pytest.mark.parametrize('workers', [1, 2, 3])
def test_a_hundred_kills(killing_ground, tmp_path, workers):
    assert kill_and_compare(tmp_path, *killing_ground, 100, workers, 20_000, seed=10 + workers) >= 50


@pytest.mark.parametrize('kind', ['parquet', 'txt'])
def test_restart_after_each_shard(tmp_path, inline, monkeypatch, documents, kind):
    """Stopped whenever something has been given its name; before, and after."""
    source = write_source(tmp_path / 'source', documents, kind, files=3)
    prepare(source, tmp_path / 'whole', shard_tokens=20_000)
    real, out, left = os.replace, tmp_path / 'out', [0]

    class Killed(BaseException):
        pass

    def replace(aside, path):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        real(aside, path)
    monkeypatch.setattr(os, 'replace', replace)
    stops, finished = 0, False
    while not finished:
        left[0] = 2 + stops % 2  # how many renames go well: one at the start, one a shard, one for progress.json
        try:
            prepare(source, out, shard_tokens=20_000)
            finished = True
        except Killed:
            stops += 1
            assert not (out / 'meta.json').exists()
            assert stops < 100
    assert stops > 4
    assert contents(out) == contents(tmp_path / 'whole')


def test_lost_files_are_written_again(tmp_path, inline, documents, capsys):
    source = write_source(tmp_path / 'source', documents)
    prepare(source, tmp_path / 'out')
    whole = contents(tmp_path / 'out')
    (tmp_path / 'out' / 'words_train_000003.bin').unlink()
    prepare(source, tmp_path / 'out')
    assert 'going on after 3 finished shards, 27,000 tokens' in capsys.readouterr().out
    assert contents(tmp_path / 'out') == whole
    os.truncate(tmp_path / 'out' / 'words_val_000000.bin', 5000)
    prepare(source, tmp_path / 'out')
    assert contents(tmp_path / 'out') == whole


def test_interrupt(tmp_path, killing_ground):
    """Ctrl-C goes to the workers too: one line, and the next run goes on."""
    source, whole = killing_ground
    command = [sys.executable, str(ROOT / 'data' / 'openwebtext' / 'prepare.py'), f'--source={source}',
               f'--out_dir={tmp_path / "out"}', '--shard_tokens=20000', '--workers=2']
    # a shell starts what it runs in the background with SIGINT ignored, and that is inherited: not what a terminal does
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8',
                               start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    process.stdout.readline()  # a shard is finished
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, 'interrupted; finished shards are kept: run it again to go on\n')
    done = subprocess.run(command, capture_output=True, encoding='utf-8')
    assert done.stdout.startswith('going on after ')
    assert contents(tmp_path / 'out') == contents(whole)


@linux
def test_a_worker_dies(tmp_path, killing_ground):
    source, whole = killing_ground
    command = [sys.executable, str(ROOT / 'data' / 'openwebtext' / 'prepare.py'), f'--source={source}',
               f'--out_dir={tmp_path / "out"}', '--shard_tokens=20000', '--workers=1']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding='utf-8')
    process.stdout.readline()
    for pid in children(process.pid):
        if b'spawn_main' in Path(f'/proc/{pid}/cmdline').read_bytes():
            os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == ('error: a worker process died (out of memory, or killed); finished shards are kept: run it again '
                      'to go on, with fewer --workers if memory was short\n')
    assert contents(tmp_path / 'out')['openwebtext_val_000000.bin'] == contents(whole)['openwebtext_val_000000.bin']


# -----------------------------------------------------------------------------
# faults: (what is in the source folder, the message)


def parquet_bytes(**columns):
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize('files, message', [
    ({}, 'holds no file that can be read; known kinds: .parquet, .jsonl, '),
    ({'a.md': b'text'}, 'holds no file that can be read'),
    ({'a.txt': b'', 'b.txt': b'\xef\xbb\xbf'}, 'holds no text'),
    ({'a.jsonl': b'{"text": ""}\n\n'}, 'holds no text'),
    ({'a.txt': b'text', 'b.parquet': b''}, r'several kinds \(.parquet, .txt\); give those of one kind, .*\*.parquet'),
    ({'a.txt': b'text ' * 9000 + b'caf\xe9 au lait'}, r'a.txt: not UTF-8: byte 0xe9 at offset 45003'),
    ({'a.txt': b'text', 'b.txt': 'é'.encode()[:1]}, r'b.txt: not UTF-8: byte 0xc3 at offset 0'),
    ({'a.jsonl': b'{"text": "a"}\n{"text": "\xe9"}\n'}, r'a.jsonl, line 2: not UTF-8'),
    ({'a.jsonl': b'{"text": "a"}\n{"text": \n'}, r'a.jsonl, line 2: no JSON'),
    ({'a.jsonl': b'{"content": "a", "id": 1}\n'}, r'a.jsonl, line 1: has no field text \(its fields: content, id\)'),
    ({'a.jsonl': b'["text"]\n'}, r'a.jsonl, line 1: has no field text \(its fields: none\)'),
    ({'a.jsonl': b'{"text": 5}\n'}, r'a.jsonl, row 1: the field text is no text but of type int'),
    ({'a.jsonl.gz': b'{"text": "a"}\n'}, r'a.jsonl.gz: cannot be read after row 0 \(BadGzipFile'),
    ({'a.parquet': parquet_bytes(content=['a'], id=[1])}, r'a.parquet: has no field text \(its fields: content, id\)'),
    ({'a.parquet': parquet_bytes(text=[1])}, r'a.parquet, row 1: the field text is no text but of type int'),
    ({'a.parquet': parquet_bytes(text=['a' * 9999])[:-300]}, r'a.parquet: cannot be read after row 0 \(ArrowInvalid'),
    ({'a.txt': b'a short text'}, r'the corpus has 4 tokens: with 9000 a shard, .* take --shard_tokens=1$'),
    ({'a.txt': b' a' * 8999}, r'the corpus has 9000 tokens: with 9000 a shard, .* take --shard_tokens=900$'),
])
def test_bad_source(tmp_path, inline, files, message):
    (tmp_path / 'source').mkdir()
    for name, data in files.items():
        (tmp_path / 'source' / name).write_bytes(data)
    with pytest.raises(UserError, match=message) as e:
        prepare(tmp_path / 'source', tmp_path / 'out')
    assert '\n' not in str(e.value)
    assert not any(map(corpus.suffix, files)) or {*contents(tmp_path / 'out')} <= {'progress.json'}
    # and the folder can be used for a better source
    write_source(tmp_path / 'better', ['some text\n' * 5000])
    prepare(tmp_path / 'better', tmp_path / 'out')
    assert verify.verify(tmp_path / 'out') == []


def test_no_such_source(tmp_path):
    with pytest.raises(UserError, match='--source=.*/nowhere/x.parquet: there is no such file or folder'):
        prepare(tmp_path / 'nowhere' / 'x.parquet', tmp_path / 'out')


def test_a_glob_and_a_file(tmp_path, inline, gpt2):
    write_source(tmp_path / 'sub [1]', ['one ' * 9999, 'two ' * 9999], 'txt', files=2)
    prepare(tmp_path / 's*' / 'part*', tmp_path / 'glob')
    assert stream(tmp_path / 'glob').tolist() == expected(gpt2, ['one ' * 9999, 'two ' * 9999])
    prepare(tmp_path / 'sub [1]' / 'part1.txt', tmp_path / 'file')
    assert stream(tmp_path / 'file').tolist() == expected(gpt2, ['two ' * 9999])


def test_another_source_in_the_same_folder(undisturbed, tmp_path, documents):
    source, out = undisturbed
    before = contents(out)
    other = write_source(tmp_path / 'other', documents[1:])
    with pytest.raises(UserError, match='has shards from another source; take another folder, or delete'):
        prepare(other, out, name='openwebtext')
    with pytest.raises(UserError, match='has shards from another shard_tokens; take'):
        prepare(source, out, name='openwebtext', shard_tokens=100)
    assert contents(out) == before
    copy = write_source(tmp_path / 'copy', [])
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    prepare(copy, out, name='openwebtext')  # a copy is no other source


@pytest.mark.parametrize('name', ['train.bin', 'meta.json', 'other_train_000001.bin', 'words_train_000001.bin'])
def test_a_folder_with_other_data(tmp_path, name):
    source = write_source(tmp_path / 'source', ['text ' * 9999], 'txt')
    (tmp_path / name).write_bytes(b'{}')
    with pytest.raises(UserError, match='has a data set that this script did not write; take another folder'):
        prepare(source, tmp_path)
    assert (tmp_path / name).read_bytes() == b'{}'


def test_damaged_progress(tmp_path, inline, documents):
    source = write_source(tmp_path / 'source', documents)
    prepare(source, tmp_path / 'out')
    (tmp_path / 'out' / 'progress.json').write_text('{"source"')
    with pytest.raises(UserError, match=r'progress.json: damaged .*; delete it and the shards beside it'):
        prepare(source, tmp_path / 'out')


@pytest.mark.parametrize('call', [5, 12])
def test_full_disk(tmp_path, inline, monkeypatch, documents, call):
    source = write_source(tmp_path / 'source', documents)
    prepare(source, tmp_path / 'whole')
    whole, calls = contents(tmp_path / 'whole'), [0]

    def sync(path):
        calls[0] += 1
        if calls[0] == call:
            raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(common, 'sync', sync)
        with pytest.raises(UserError, match='cannot write to it .No space left on device.; finished shards are kept'):
            prepare(source, tmp_path / 'out')
    left = contents(tmp_path / 'out')
    assert not [name for name in left if name.endswith('.tmp')] and 'meta.json' not in left
    assert 'words_val_000000.bin' in left
    assert {name: whole[name] for name in left if name.endswith('.bin')} == {
        name: data for name, data in left.items() if name.endswith('.bin')}
    prepare(source, tmp_path / 'out')
    assert contents(tmp_path / 'out') == whole


@linux
def test_a_full_disk_in_the_middle_of_a_shard(tmp_path, inline, monkeypatch, documents):
    source = write_source(tmp_path / 'source', documents)

    class Full(corpus.Writer):
        def open(self):
            super().open()
            if len(self.shards) == 2:
                self.file.close()
                self.file = open('/dev/full', 'wb', buffering=0)
    monkeypatch.setattr(corpus, 'Writer', Full)
    with pytest.raises(UserError, match='No space left on device'):
        prepare(source, tmp_path / 'out')
    assert sorted(contents(tmp_path / 'out')) == ['progress.json', 'words_train_000001.bin', 'words_val_000000.bin']


def test_a_folder_that_cannot_be_written(tmp_path):
    source = write_source(tmp_path / 'source', ['text'], 'txt')
    (tmp_path / 'file').write_text('')
    for out in (tmp_path / 'file', tmp_path / 'file' / 'out', '/proc/out'):
        with pytest.raises(UserError, match='cannot write to it'):
            prepare(source, out)


def test_two_at_once(tmp_path):
    source = write_source(tmp_path / 'source', ['text ' * 9999], 'txt')
    (tmp_path / 'out').mkdir()
    code = 'import sys; from data.common import lock; file = lock(sys.argv[1]); print(file, flush=True); input()'
    holder = subprocess.Popen([sys.executable, '-c', code, str(tmp_path / 'out' / '.prepare.lock')], cwd=ROOT,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding='utf-8')
    assert '.prepare.lock' in holder.stdout.readline()
    with pytest.raises(UserError, match='another process is preparing a data set there'):
        prepare(source, tmp_path / 'out')
    holder.communicate('\n')


@pytest.mark.parametrize('keys, message', [
    (dict(max_tokens=100, shard_tokens=100), '--shard_tokens=100: must be less than --max_tokens=100'),
    (dict(shard_tokens=2**31), '--shard_tokens=2147483648: the header'),
])
def test_bad_sizes(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, tmp_path / 'out', **keys)


# -----------------------------------------------------------------------------
# the hub


class Hub(BaseHTTPRequestHandler):
    """What the hub's client asks for, out of `files`: {(repository, revision): {path: bytes}}."""
    protocol_version = 'HTTP/1.1'
    commits = {'main': 'a' * 40, 'refs/convert/parquet': 'b' * 40}

    def do_GET(self):
        path = urllib.parse.unquote(self.path.partition('?')[0])
        match = re.fullmatch(r'(/api)?/datasets/(\w+/[\w-]+)/(revision|tree|resolve)/'
                             r'(main|refs/convert/parquet|\w{40})/?(.*)', path)
        if not match:
            return self.answer(404, b'{}')
        _, repo, what, revision, path = match.groups()
        revision = {commit: name for name, commit in self.commits.items()}.get(revision, revision)
        files, commit = self.server.files.get((repo, revision), {}), self.commits[revision]
        if what == 'revision':
            names = [{'rfilename': name} for name in files]
            return self.answer(200, json.dumps({'id': repo, 'sha': commit, 'siblings': names}).encode())
        if what == 'tree':
            return self.answer(200, json.dumps([{'type': 'file', 'path': name, 'size': len(data), 'oid': 'c' * 40}
                                                for name, data in files.items() if name.startswith(path)]).encode())
        data, bounds = files[path], re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers['Range'])
        start, end = int(bounds[1]), min(int(bounds[2]) + 1, len(data))
        self.answer(206, data[start:end], {'Content-Range': f'bytes {start}-{end - 1}/{len(data)}'})

    def answer(self, code, body, headers={}):
        self.server.requests.append(self.path)
        self.send_response(code)
        for key, value in {'Content-Length': len(body), 'Content-Type': 'application/json', **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    server.requests = []
    server.env = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HUB_OFFLINE': '0',
                  'HF_HOME': str(tmp_path / 'hf'), 'HF_HUB_DISABLE_TELEMETRY': '1', 'NO_PROXY': '*'}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize('name, files, keys', [
    ('openwebtext', {('Skylion007/openwebtext', 'main'): {'openwebtext.py': None},
                     ('Skylion007/openwebtext', 'refs/convert/parquet'): {
                         'plain_text/train/0000.parquet': 0, 'plain_text/train/0001.parquet': 1}}, []),
    ('openwebtext', {('Skylion007/openwebtext', 'main'): {
        'README.md': None, 'data/train-00001.parquet': 1, 'data/train-00000.parquet': 0}}, []),
    ('fineweb_edu', {('HuggingFaceFW/fineweb-edu', 'main'): {
        'README.md': None, 'sample/10BT/000.parquet': None, 'sample/100BT/001_00000.parquet': 1,
        'sample/100BT/000_00000.parquet': 0}}, ['--name=sample-100BT']),
])
def test_hub(tmp_path, hub, undisturbed, gpt2, documents, name, files, keys):
    """The client of the hub against a small one of our own: the right files, in order, by their commit."""
    parts = [path.read_bytes() for path in sorted(undisturbed[0].iterdir())]
    hub.files = {at: {path: b'' if i is None else parts[i] for path, i in listing.items()}
                 for at, listing in files.items()}
    args = [f'--out_dir={tmp_path / "out"}', '--shard_tokens=9000', '--workers=1', *keys]
    done = script(*args, name=name, **hub.env)
    assert (done.returncode, done.stderr) == (0, '')
    two_of_three = documents[: 2 * len(documents) // 3]
    assert stream(tmp_path / 'out').tolist() == expected(gpt2, two_of_three)
    assert verify.verify(tmp_path / 'out') == []
    assert not [path for path in hub.requests if 'resolve/main' in path or 'resolve/refs' in path]
    again = script(*args, name=name, HF_HUB_OFFLINE='1')  # asks nobody
    assert 'is already prepared' in again.stdout


def test_offline(tmp_path):
    for name in ('openwebtext', 'fineweb_edu'):
        done = script(f'--out_dir={tmp_path}', name=name, HF_HUB_OFFLINE='1')
        assert done.returncode == 1 and done.stdout == '' and done.stderr.count('\n') == 1
        assert 'fetch the parquet files elsewhere and give --source=FOLDER' in done.stderr


# -----------------------------------------------------------------------------
# verify.py


def change_byte(path):
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize('damage, faults', [
    (lambda out: change_byte(out / 'words_train_000001.bin'), ['words_train_000001.bin: its SHA-256']),
    (lambda out: os.truncate(out / 'words_train_000002.bin', 3000), ['words_train_000002.bin: the header says 9,000',
                                                                     'train: .* tokens in all, meta.json says']),
    (lambda out: (out / 'words_train_000003.bin').unlink(), ['words_train_000003.bin: missing', 'train: ']),
    (lambda out: (out / 'words_train_000099.bin').write_bytes((out / 'words_val_000000.bin').read_bytes()),
     ['words_train_000099.bin: not among the shards of meta.json', 'train: ']),
    (lambda out: (out / 'meta.json').unlink(), ['the preparation has not finished']),
    (lambda out: (out / '.words_train_000009.bin.tmp').write_bytes(b''), [r'\.words_train_000009.bin.tmp: left by']),
    (lambda out: (out / 'meta.json').write_text('{'), ['meta.json: cannot be read']),
    (lambda out: (out / 'words_val_000000.bin').unlink(), ['no file of the validation set',
                                                          'words_val_000000.bin: missing', 'val: 0 tokens']),
])
def test_verify(tmp_path, inline, documents, damage, faults):
    prepare(write_source(tmp_path / 'source', documents), tmp_path / 'out')
    os.remove(tmp_path / 'out' / '.prepare.lock')
    damage(tmp_path / 'out')
    found = verify.verify(tmp_path / 'out')
    assert len(found) == len(faults) and all(re.match(fault, line) for fault, line in zip(faults, found)), found


def run_verify(*args):
    return subprocess.run([sys.executable, ROOT / 'data' / 'verify.py', *args], capture_output=True, encoding='utf-8')


def test_verify_script(tmp_path, data):
    done = run_verify(data)  # a char data set
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[0].startswith('train.bin: 4,500 tokens, largest id ')
    for split, ids in (('train', [1, 2, 50256]), ('val', [3, 50257])):  # nanoGPT's
        np.array(ids, '<u2').tofile(tmp_path / f'{split}.bin')
    done = run_verify(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:3] == ['no meta.json: checking the format, and the ids against the 50257 of GPT-2',
                                            'train.bin: 3 tokens, largest id 50256',
                                            'FAULT val.bin: token id 50257 is past the vocabulary of 50257']
    usage = 'usage: python data/verify.py DIR\n'
    for args, message in (([], usage), (['--dir=x'], usage), ([str(tmp_path / 'no')],
                           f'error: {tmp_path / "no"}: there is no such folder\n')):
        done = run_verify(*args)
        assert (done.returncode, done.stdout, done.stderr) == (1, '', message)
