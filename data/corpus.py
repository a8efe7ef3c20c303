"""
A corpus of documents -> shards of GPT-2 tokens (data/shards.py): what the prepare scripts of the large data sets share.

One process reads batches of documents, worker processes encode them, and the first one writes the tokens in the order
of the documents. progress.json says for each finished shard where in the source it ended: killed at any moment, the
same command goes on from the last one, and the bytes are those of an undisturbed run with any number of workers.
meta.json comes last; a folder with progress.json and without meta.json is not prepared.
"""
import codecs
import contextlib
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path

import numpy as np

from configurator import UserError, require
from data import common
from data.shards import HEADER_BYTES, header, list_files
from data.tokenizer import get_tokenizer

SHARD_TOKENS = 10**8  # llm.c's
PIECE = 2**20         # bytes or characters that are read, or encoded, at once
KINDS = {'.parquet': 'parquet', '.jsonl': 'json', '.jsonl.gz': 'json', '.jsonl.zst': 'json', '.txt': 'txt'}
# tokens a byte of a file, for the progress bar alone: English has 4.4 bytes a token, compression makes half to a third
DENSITY = {'.parquet': 0.4, '.jsonl': 0.22, '.jsonl.gz': 0.6, '.jsonl.zst': 0.6, '.txt': 0.23}

# -----------------------------------------------------------------------------
# sources: {'files': paths or hf:// addresses, 'identity': what the bytes of the shards depend on, 'tokens': about how
# many, 'description': for meta.json}


def suffix(path):
    """The suffix that KINDS knows, '' if none."""
    return next((s for s in KINDS if str(path).lower().endswith(s)), '')


def fingerprint(path):
    """[bytes, hash of both ends] of a file: tells another file from the same one copied elsewhere, at once."""
    with open(path, 'rb') as f:
        ends = f.read(2**16)
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - 2**16))
        return [size, common.sha256(ends + f.read())]


def find_local(source):
    """The source that a file, a folder or a glob describes; the order of the files is that of their paths."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        root = path
        def refuse(error):
            raise UserError(f'{error.filename}: cannot be read ({error.strerror})')
        files = [os.path.join(folder, name) for folder, _, names in os.walk(path, onerror=refuse) for name in names]
        files = [f for f in files if not any(p.startswith('.') for p in Path(f).relative_to(path).parts)]  # .cache
    else:
        root = os.path.dirname(path)
        files = [path] if os.path.isfile(path) else [f for f in glob.glob(path, recursive=True) if os.path.isfile(f)]
        if not files:
            raise UserError(f'--source={source}: there is no such file or folder, and no file fits it as a pattern')
    files = sorted((f for f in files if suffix(f)), key=lambda f: Path(f).parts)
    kinds = sorted({suffix(f) for f in files})
    if not files:
        raise UserError(f'--source={source}: holds no file that can be read; known kinds: {", ".join(KINDS)}')
    if len({KINDS[s] for s in kinds}) > 1:
        raise UserError(f'--source={source}: files of several kinds ({", ".join(kinds)}); give those of one kind, '
                        f'for instance --source={os.path.join(root, "*" + kinds[0])}')
    try:
        prints = [[os.path.basename(f), *fingerprint(f)] for f in files]
    except OSError as e:
        raise UserError(f'{e.filename}: cannot be read ({e.strerror})') from None
    return {'files': files, 'identity': {'files': prints},
            'tokens': int(sum(size * DENSITY[suffix(name)] for name, size, _ in prints)),
            'description': f'{prints[0][0]}' + (f' and {len(files) - 1} more files' if len(files) > 1 else '')}


def find_on_hub(repo, places, tokens, known):
    """
    The parquet files of a data set on the Hugging Face hub, addressed by their commit: a restart reads the same bytes.
    places: [(revision, prefix of the paths)], the first that has any counts; known: the identity of the source of a
    preparation that was begun. (Data sets that were a script, which `datasets` 4 no longer runs and nobody should,
    have their parquet files in a revision that the hub made, refs/convert/parquet.)
    """
    identity = {'hub': repo, 'prefixes': [prefix for _, prefix in places]}
    if known and {**known, **identity} == known:
        identity = known  # asks nobody: what is prepared is found to be so without a connection
    else:
        hub = require('huggingface_hub', 'reading from the hub')
        try:
            for revision, prefix in places:
                info = hub.HfApi().dataset_info(repo, revision=revision)
                names = sorted(f.rfilename for f in info.siblings if f.rfilename.startswith(prefix))
                names = [name for name in names if name.endswith('.parquet')]
                if names:
                    break
        except Exception as e:  # no network, a proxy, HF_HUB_OFFLINE=1: each version has other classes for them
            why = (str(e).strip().splitlines() or [''])[0][:200]
            raise UserError(f'{repo}: the Hugging Face hub gives no list of its files ({type(e).__name__}: {why}); '
                            'without a connection, fetch the parquet files elsewhere and give --source=FOLDER, see '
                            'readme.md') from None
        if not names:
            wanted = ' or '.join(f'{prefix}*.parquet of {revision}' for revision, prefix in places)
            raise UserError(f'{repo}: the hub has no {wanted}; fetch the data set in another way and give '
                            '--source=FOLDER')
        identity |= {'revision': info.sha, 'files': names}
    return {'files': [f'hf://datasets/{repo}@{identity["revision"]}/{name}' for name in identity['files']],
            'identity': identity, 'tokens': tokens, 'description': f'{repo} {identity["revision"]}'}


def read(source, position):
    """
    Yields ([(starts, text)], position): a batch of documents, or a piece of a long one (then starts is False but for
    its first piece), and where the batch begins: {'file': index, 'at': row, or offset in a text}.
    """
    for i in range(position['file'], len(source['files'])):
        path, start = source['files'][i], position['at'] if i == position['file'] else 0
        for batch, at in read_text(path, start) if suffix(path) == '.txt' else read_rows(path, start):
            yield batch, {'file': i, 'at': at}


def read_rows(path, row):
    """The `text` of the rows of a parquet or jsonl file; rows without any are left out."""
    batch, size, start = [], 0, row
    try:
        for text in read_parquet(path, row) if suffix(path) == '.parquet' else read_jsonl(path, row):
            row += 1
            if not isinstance(text, str | None):
                raise UserError(f'{path}, row {row}: the field text is no text but of type {type(text).__name__}')
            if text:
                batch.append((True, text))
                size += len(text)
            if size >= PIECE:
                yield batch, start
                batch, size, start = [], 0, row
    except UserError:
        raise
    except Exception as e:  # of pyarrow, gzip, zstandard, the hub's client
        hint = 'run it again to go on' if path.startswith('hf://') else 'copy or download it again'
        why = f'{type(e).__name__}: {str(e)[:200]}'
        raise UserError(f'{path}: cannot be read after row {row} ({why}); {hint}') from None
    if batch:
        yield batch, start


def read_parquet(path, row):
    # `datasets`, though streaming, decodes a row group at once (pyarrow.dataset does): 1.9 GB for one of 0.8 GB, and
    # pandas writes a million rows in one. Its files are opened here as it opens them, and read 64 rows at a time.
    parquet = require('pyarrow.parquet', f'reading {path}')
    with open_hub(path) if path.startswith('hf://') else open(path, 'rb') as f:
        file = parquet.ParquetFile(f, pre_buffer=False, buffer_size=PIECE)
        if 'text' not in file.schema_arrow.names:
            raise no_text(path, file.schema_arrow.names)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = np.cumsum(sizes)
        group = int(np.searchsorted(ends, row, side='right'))
        skip = row - int(ends[group - 1] if group else 0)
        for rows in file.iter_batches(64, row_groups=range(group, len(sizes)), columns=['text'], use_threads=False):
            yield from rows.column('text')[skip:].to_pylist()
            skip = max(0, skip - len(rows))


def open_hub(path):
    return require('huggingface_hub', 'reading from the hub').HfFileSystem().open(path, 'rb')


def read_jsonl(path, row):
    match suffix(path):
        case '.jsonl.gz':
            f = gzip.open(path, 'rb')
        case '.jsonl.zst':
            f = require('zstandard', f'reading {path}').open(path, 'rb')
        case _:
            f = open(path, 'rb')
    with f:
        for number, line in enumerate(f):
            if number < row:
                continue
            if not line.strip():
                yield None
                continue
            try:
                value = json.loads(line)  # bytes: UTF-8 whatever the locale
            except UnicodeDecodeError as e:
                raise UserError(f'{path}, line {number + 1}: not UTF-8 ({e.reason}); convert the file first') from None
            except ValueError as e:
                raise UserError(f'{path}, line {number + 1}: no JSON ({e})') from None
            if not isinstance(value, dict) or 'text' not in value:
                raise no_text(f'{path}, line {number + 1}', value if isinstance(value, dict) else [])
            yield value['text']


def no_text(path, fields):
    return UserError(f'{path}: has no field text (its fields: {", ".join(fields) or "none"}); rename the one that '
                     'holds the documents')


def read_text(path, offset):
    """A UTF-8 text as one document, in pieces; lines end in a single newline, a byte order mark is dropped."""
    data = b''
    try:
        with open(path, 'rb') as f:
            first = 3 if f.read(3) == codecs.BOM_UTF8 else 0
            offset = max(offset, first)
            f.seek(offset)
            while True:
                data += f.read(PIECE - len(data))
                last = len(data) < PIECE
                text = codecs.utf_8_decode(data, 'strict', last)[0]  # a character that the piece cuts comes next time
                text = text if last else text[:cut(text, 0, len(text) - 1)]
                used = len(text.encode('utf-8'))
                if text:
                    yield [(offset == first, text.replace('\r\n', '\n').replace('\r', '\n'))], offset
                if last:
                    return
                offset, data = offset + used, data[used:]
    except UnicodeDecodeError as e:
        raise UserError(f'{path}: not UTF-8: byte 0x{data[e.start]:02x} at offset {offset + e.start}; convert the file '
                        'to UTF-8 first') from None
    except OSError as e:
        raise UserError(f'{path}: cannot be read ({e.strerror or e})') from None


# No token of GPT-2 holds a space, of whatever sort, behind something else, nor punctuation behind a letter or a number:
# its pattern matches neither, and does not look behind. What stands before and behind such a place has, encoded apart,
# the tokens of the whole.
BEFORE_SPACE = re.compile(r'.*\S(?=\s)', re.DOTALL)
BEFORE_MARK = re.compile(r'.*[^\W_](?=[!-/:-@[-`{-~、。！，：；？])', re.DOTALL)


def cut(text, start, size):
    """
    The end of a piece text[start:end] of at most `size` characters. The tokens of the pieces are those of the text,
    unless `size` characters hold no space and no punctuation: such a run is cut anywhere, so that memory and time are
    bounded.
    """
    end = start + size
    if end >= len(text):
        return len(text)
    window = text[start : end + 1]
    if match := BEFORE_SPACE.match(window) or BEFORE_MARK.match(window):
        return start + match.end()
    return end - (size > 1 and text[end - 1 : end + 1] == '\r\n')  # one newline, not two


# -----------------------------------------------------------------------------
# workers


def start_worker():
    global tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them; the first process sees to the rest
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = get_tokenizer({'name': 'gpt2'})


def end_with_parent():
    """A parent that was killed cannot end its workers, and they would wait for their next batch for ever."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def encode(batch):
    """The tokens, as bytes of little-endian uint16, of [(starts, text)]."""
    ids = []
    for starts, text in batch:
        if starts:
            ids.append(np.array([tokenizer.identity['eot']], dtype='<u2'))
        start = 0
        while start < len(text):
            end = cut(text, start, PIECE // 2)  # tiktoken's regex overflows on a run of a million spaces
            ids.append(np.array(tokenizer.encode(text[start:end]), dtype='<u2'))
            start = end
    return np.concatenate(ids).tobytes()


def encode_all(batches, workers):
    """Yields (tokens, position) for the (batch, position) of batches, in their order, with that many processes."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context('spawn'), initializer=start_worker)
    waiting = deque()
    try:
        for batch, position in batches:
            with without_interrupts():
                future = pool.submit(encode, batch)
            waiting.append((future, position))
            if len(waiting) > 2 * workers:  # each has one to do when it has done one, and memory stays bounded
                future, position = waiting.popleft()
                yield np.frombuffer(future.result(), '<u2'), position
        while waiting:
            future, position = waiting.popleft()
            yield np.frombuffer(future.result(), '<u2'), position
    except BrokenProcessPool:
        raise UserError('a worker process died (out of memory, or killed); finished shards are kept: run it again to '
                        'go on, with fewer --workers if memory was short') from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def without_interrupts():
    """A process that is started in here never sees Ctrl-C; this one sees it afterwards. (Not so on Windows.)"""
    if not hasattr(signal, 'pthread_sigmask'):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -----------------------------------------------------------------------------
# shards


class Writer:
    """
    Cuts a stream of tokens into shards, which get their names when they are whole and on the disk.

    progress: what progress.json holds, a dict; its `shards` are those that are finished and full, in their order, each
    with where it ends: {'file', 'at'} of a batch and up to how many of its tokens the shard has (`skip`).
    """

    def __init__(self, folder, prefix, progress, max_tokens, report):
        self.folder, self.prefix, self.progress, self.report = folder, prefix, progress, report
        self.shards = dict(progress['shards'])
        self.tokens = sum(shard['tokens'] for shard in self.shards.values())
        self.max_tokens = max_tokens or sys.maxsize
        start = [*self.shards.values()][-1]['end'] if self.shards else {'file': 0, 'at': 0, 'skip': 0}
        self.start = {'file': start['file'], 'at': start['at']}
        self.skip = start['skip']
        self.file = None

    def write(self, tokens, position):
        """Takes the tokens of the batch that begins at `position`; returns how many, up to max_tokens in all."""
        used = min(self.skip, len(tokens))
        self.skip -= used
        before = self.tokens
        while used < len(tokens) and self.tokens < self.max_tokens:
            room = self.progress['shard_tokens'] - self.count if self.file else 0
            if not room:  # a full shard ends only when there is more: shard 0 must not be all
                self.close()
                self.open()
                continue
            part = tokens[used : used + min(room, self.max_tokens - self.tokens)]
            self.file.write(part.tobytes())
            self.hash.update(part.tobytes())
            self.count += len(part)
            self.tokens += len(part)
            self.largest = max(self.largest, int(part.max()))
            self.documents += int((part == self.progress['tokenizer']['eot']).sum())  # a text has no other ones
            used += len(part)
            self.end = {**position, 'skip': used}
        return self.tokens - before

    def open(self):
        self.name = f'{self.prefix}_{"train" if self.shards else "val"}_{len(self.shards):06d}.bin'
        self.aside = os.path.join(self.folder, f'.{self.name}.tmp')
        self.file = open(self.aside, 'wb')
        self.count = self.largest = self.documents = 0
        self.hash = hashlib.sha256(header(self.progress['shard_tokens']))
        self.file.write(header(self.progress['shard_tokens']))

    def close(self):
        if self.file:
            common.replace_file(os.path.join(self.folder, self.name), self.complete, aside=self.aside)
            self.file = None
            self.shards[self.name] = {'tokens': self.count, 'sha256': self.hash.hexdigest(), 'largest': self.largest,
                                      'documents': self.documents, 'end': self.end}
            if self.count == self.progress['shard_tokens']:
                self.progress['shards'][self.name] = self.shards[self.name]
                write_json(self.folder, 'progress.json', self.progress)
            self.report(self)

    def complete(self, aside):
        if self.count < self.progress['shard_tokens']:  # the last one
            self.file.seek(0)
            self.file.write(header(self.count))
        self.file.close()
        if self.count < self.progress['shard_tokens']:
            self.hash = hashlib.sha256()
            with open(aside, 'rb') as f:
                while data := f.read(2**20):
                    self.hash.update(data)

    def abandon(self):
        """Leaves finished shards only."""
        if self.file:
            with contextlib.suppress(OSError):  # what it still holds may not fit on the disk
                self.file.close()
            with contextlib.suppress(OSError):
                os.remove(self.aside)


def write_json(folder, name, value):
    text = json.dumps(value, indent=1) + '\n'
    common.replace_file(os.path.join(folder, name), lambda aside: Path(aside).write_text(text, encoding='utf-8'))


def read_json(folder, name, keys):
    """What a file of ours holds, None if it is not there."""
    path = os.path.join(folder, name)
    try:
        value = json.loads(Path(path).read_text(encoding='utf-8'))
        if not {*keys} <= {*value}:
            raise ValueError(f'it lacks {", ".join({*keys} - {*value})}')
        if not all(isinstance(shard['tokens'], int) for shard in value['shards'].values()):
            raise ValueError('a shard without its number of tokens')
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise UserError(f'{path}: damaged ({e}); delete it and the shards beside it to begin again') from None
    return value


def is_whole(folder, name, tokens):
    path = os.path.join(folder, name)
    return os.path.isfile(path) and os.path.getsize(path) == HEADER_BYTES + 2 * tokens


# -----------------------------------------------------------------------------
# all of it


def prepare(prefix, hub, source, out_dir, max_tokens=0, shard_tokens=0, workers=0):
    """
    Writes prefix_val_000000.bin, prefix_train_000001.bin, ..., progress.json and meta.json into out_dir, or goes on
    with it. hub: arguments of find_on_hub, for source = ''; the others are the keys of the scripts. Raises UserError.
    """
    out_dir = os.path.expanduser(out_dir)
    if max_tokens and shard_tokens >= max_tokens:
        raise UserError(f'--shard_tokens={shard_tokens}: must be less than --max_tokens={max_tokens}: shard 0 is the '
                        'validation set, the others are for training')
    if 0 < max_tokens < 10:
        raise UserError(f'--max_tokens={max_tokens}: too few for shards of a tenth of it')
    if shard_tokens >= 2**31:
        raise UserError(f'--shard_tokens={shard_tokens}: the header of a shard holds at most {2**31 - 1}')
    try:
        os.makedirs(out_dir, exist_ok=True)
        held = common.lock(os.path.join(out_dir, '.prepare.lock'))
        if held is None:
            raise UserError(f'--out_dir={out_dir}: another process is preparing a data set there')
        with held:
            prepare_locked(prefix, hub, source, out_dir, max_tokens, shard_tokens, workers)
    except OSError as e:
        raise UserError(f'--out_dir={out_dir}: cannot write to it ({e.strerror or e}); finished shards are kept: run '
                        'it again to go on') from None
    except KeyboardInterrupt:
        sys.exit('interrupted; finished shards are kept: run it again to go on')


def prepare_locked(prefix, hub, source, out_dir, max_tokens, shard_tokens, workers):
    progress = read_json(out_dir, 'progress.json', ['source', 'shard_tokens', 'tokenizer', 'shards'])
    meta = read_json(out_dir, 'meta.json', ['tokens', 'shards', 'whole']) if progress else None
    if not progress and (os.path.exists(os.path.join(out_dir, 'meta.json')) or any(list_files(out_dir).values())):
        raise UserError(f'--out_dir={out_dir}: has a data set that this script did not write; take another folder')

    known = progress['source'] if progress else {}
    found = find_local(source) if source else find_on_hub(**hub, known=known)
    tokenizer = get_tokenizer({'name': 'gpt2'})  # what is wrong with it is told here, in one line, not by the workers
    wanted = {'source': found['identity'], 'shard_tokens': shard_tokens, 'tokenizer': tokenizer.identity}
    begun = bool(progress and progress['shards'])
    if begun:
        wanted['shard_tokens'] = shard_tokens or progress['shard_tokens']
        differ = [key for key in wanted if wanted[key] != progress[key]]
        if differ:
            raise UserError(f'--out_dir={out_dir}: has shards from another {" and ".join(differ)}; take another '
                            'folder, or delete what is in it')
    else:
        about = min(max_tokens or sys.maxsize, int(found['tokens']))  # ten shards at least, also of a small corpus
        wanted['shard_tokens'] = shard_tokens or min(SHARD_TOKENS, max(1, about // 10))
        progress = {**wanted, 'shards': {}}

    # what is there: the finished shards up to the first that is missing, whatever they were before
    total = sum(meta['tokens'].values()) if meta else 0
    if meta and all(is_whole(out_dir, name, shard['tokens']) for name, shard in meta['shards'].items()):
        if total == max_tokens or meta['whole'] and (not max_tokens or max_tokens > total):
            print(f'{out_dir} is already prepared: {total:,} tokens')
            return
    lost = False
    for name, shard in [*progress['shards'].items()]:
        lost = lost or not is_whole(out_dir, name, shard['tokens'])
        if lost:
            del progress['shards'][name]
    have = max(total, sum(shard['tokens'] for shard in progress['shards'].values()))
    if max_tokens and max_tokens < have:
        raise UserError(f'--max_tokens={max_tokens}: {out_dir} has {have} tokens already; take another folder for '
                        'fewer, or delete what is in it')
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(out_dir, 'meta.json'))  # first: from now on the folder is unfinished
    write_json(out_dir, 'progress.json', progress)
    for name in os.listdir(out_dir):
        if re.fullmatch(rf'{prefix}_(train|val)_\d{{6}}\.bin|\.{prefix}_\w+\.bin\.tmp', name) \
                and name not in progress['shards']:
            os.remove(os.path.join(out_dir, name))

    tqdm = require('tqdm', 'the progress bar').tqdm
    workers = workers or min(8, cores())
    with tqdm(total=max_tokens or max(found['tokens'], 1), unit=' tokens', unit_scale=True, disable=None) as bar:
        start = time.monotonic()

        def report(writer):
            if bar.disable:
                seconds = time.monotonic() - start
                print(f'{writer.name}: {writer.count:,} tokens; {writer.tokens:,} in all, '
                      f'{(writer.tokens - first) / seconds:,.0f} a second', flush=True)
        writer = Writer(out_dir, prefix, progress, max_tokens, report)
        first = writer.tokens
        if first:
            print(f'going on after {len(writer.shards)} finished shards, {first:,} tokens', flush=True)
            bar.update(first)
        stream = encode_all(read(found, writer.start), workers)
        try:
            for tokens, position in stream:
                bar.update(writer.write(tokens, position))
                if writer.tokens == writer.max_tokens:
                    break
            if not writer.tokens:
                raise UserError(f'--source={source}: holds no text')
            if not writer.shards:
                raise UserError(f'the corpus has {writer.tokens} tokens: with {progress["shard_tokens"]} a shard, none '
                                'are left for training when shard 0, the validation set, is full; take '
                                f'--shard_tokens={max(1, writer.tokens // 10)}')
            writer.close()
        finally:
            stream.close()
            writer.abandon()

    splits = {'train': [shard for name, shard in writer.shards.items() if '_train_' in name],
              'val': [shard for name, shard in writer.shards.items() if '_val_' in name]}
    meta = {
        'tokenizer': tokenizer.identity,
        'vocab_size': tokenizer.n_vocab,
        'dtype': 'uint16',
        'eot': tokenizer.identity['eot'],
        'documents': {split: sum(shard['documents'] for shard in splits[split]) for split in splits},  # begun there
        'tokens': {split: sum(shard['tokens'] for shard in splits[split]) for split in splits},
        'source': found['description'],
        'whole': writer.tokens < writer.max_tokens,  # the source had no more
        'shards': {name: {key: shard[key] for key in ('tokens', 'sha256', 'largest')}
                   for name, shard in writer.shards.items()},
    }
    write_json(out_dir, 'meta.json', meta)
    for split in splits:
        print(f'{split} has {meta["tokens"][split]:,} tokens of {meta["documents"][split]:,} documents '
              f'in {len(splits[split])} shard{"s" if len(splits[split]) > 1 else ""}')


def cores():
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
