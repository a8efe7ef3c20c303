"""
Files of tokens: what the prepare scripts write and the loader reads.

A shard is llm.c's: NAME_train_000001.bin or NAME_val_000000.bin, 256 little-endian int32 (magic, version, number of
tokens, zeros), then the tokens as little-endian uint16. modded-nanogpt's and the prebuilt hub shards are the same.
nanoGPT's train.bin and val.bin are the tokens alone. GPT-2 has no token 55432, so none of them can begin with the
magic.
"""
import mmap
import os
import re

import numpy as np

from configurator import UserError

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
LLAMA3_MAGIC = 20240801  # llm.c's shards of uint32 tokens
SHARD = re.compile(r'.+_(train|val)_\d+\.bin')


def header(n_tokens):
    """The first HEADER_BYTES bytes of a shard."""
    return np.array([MAGIC, VERSION, n_tokens] + [0] * 253, dtype='<i4').tobytes()


class Tokens:
    """
    The tokens of a file, memory-mapped. `tokens[i:j]` is a uint16 array over the file itself.

    Raises UserError, in one line that names the file, for everything that the file's first bytes and size betray.
    """

    def __init__(self, path):
        self.path = path = str(path)
        self.name = os.path.basename(path)
        if os.path.isdir(path):
            raise UserError(f'{path}: a folder where a file of tokens should be; move it elsewhere')
        try:
            with open(path, 'rb') as f:
                self.bytes = os.fstat(f.fileno()).st_size
                if self.bytes == 0:
                    raise UserError(f'{path}: empty; prepare or download it again')
                first = f.read(HEADER_BYTES)
                self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise UserError(f'{path}: cannot be read ({e.strerror})') from None
        magic, version, n = np.frombuffer(first[:12].ljust(12, b'\0'), '<i4').tolist()
        if magic == LLAMA3_MAGIC:
            raise UserError(f'{path}: a shard of Llama-3 tokens (uint32); GPT-2 shards (uint16) are what is read here')
        if magic == MAGIC:
            if version != VERSION:
                raise UserError(f'{path}: version {version} of the shard format, {VERSION} is what is read here')
            if self.bytes != HEADER_BYTES + 2 * n:
                raise UserError(f'{path}: the header says {n:,} tokens, hence {HEADER_BYTES + 2 * n:,} bytes, but the '
                                f'file has {self.bytes:,}: it is cut off or damaged, prepare or download it again')
        elif SHARD.fullmatch(self.name):
            raise UserError(f'{path}: begins with {magic}, not with the magic number {MAGIC} of a shard; prepare or '
                            'download it again, or name a file without a header train.bin or val.bin')
        elif self.bytes % 2:
            raise UserError(f'{path}: {self.bytes:,} bytes are no whole number of 2-byte tokens, the file is cut off; '
                            'prepare it again')
        elif len(high := np.frombuffer(first, '<u2')[1::2]) > 8 and not high.any() and any(first):
            raise UserError(f'{path}: looks like 4-byte tokens (every other 2-byte one is 0), uint16 is what is read '
                            'here; prepare it again')
        self.tokens = np.frombuffer(self.map, '<u2', offset=HEADER_BYTES if magic == MAGIC else 0)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]

    def release(self):
        """Gives the pages that were read back to the system; they stay in its cache, and are mapped again when read."""
        if hasattr(mmap, 'MADV_DONTNEED'):  # not on Windows
            self.map.madvise(mmap.MADV_DONTNEED)

    def largest(self):
        """The largest token id. Reads the whole file, in bounded memory."""
        largest = 0
        for i in range(0, len(self), 2**24):
            largest = max(largest, int(self.tokens[i : i + 2**24].max()))
            self.release()
        return largest


def list_files(folder):
    """
    {'train': [paths], 'val': [paths]} of the token files in a folder: train.bin and val.bin, or shards in the order
    of their names; a split that has none is empty. Raises UserError if both kinds are there.
    """
    names = sorted(entry.name for entry in os.scandir(folder))
    whole = {split: [f'{split}.bin'] for split in ('train', 'val') if f'{split}.bin' in names}
    shards = {}
    for name in filter(SHARD.fullmatch, names):
        shards.setdefault(SHARD.fullmatch(name)[1], []).append(name)
    if whole and shards:
        raise UserError(f'{folder}: has both {", ".join(whole[s][0] for s in whole)} and shards like '
                        f'{next(iter(shards.values()))[0]}; keep one of the two')
    return {split: [os.path.join(folder, name) for name in (whole or shards).get(split, [])]
            for split in ('train', 'val')}
