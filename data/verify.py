"""Checks a folder of token files to the last byte: python data/verify.py DIR

Headers, sizes, largest ids, and against meta.json the numbers of tokens, the SHA-256 of the shards and which of them
there are. A line a file; exit code 1 if anything is wrong. Prebuilt shards and nanoGPT's .bin have no meta.json: then
the format and the ids are checked.
"""
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, from whatever folder this runs

from configurator import UserError  # noqa: E402
from data.shards import Tokens, list_files  # noqa: E402

GPT2_VOCABULARY = 50257


def read_description(folder, name, faults):
    """What meta.json or progress.json holds; {} if it is not there, or damaged."""
    try:
        value = json.loads((Path(folder) / name).read_text(encoding='utf-8'))
        if type(value.get('vocab_size', 0)) is not int or not all(type(value.get(key, {})) is dict
                                                                  for key in ('shards', 'tokens')):
            raise ValueError('vocab_size is no integer, or shards or tokens are no dict')
        return value
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as e:
        faults.append(f'{name}: cannot be read ({e})')
        return {}


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while data := f.read(2**20):
            digest.update(data)
    return digest.hexdigest()


def verify(folder):
    """Prints a line a file; returns the faults, a line each."""
    faults, tokens = [], {'train': 0, 'val': 0}
    meta, progress = (read_description(folder, name, faults) for name in ('meta.json', 'progress.json'))
    names = sorted(os.listdir(folder))
    if 'progress.json' in names and 'meta.json' not in names:
        faults.append('the preparation has not finished; the same prepare command goes on with it')
    elif 'meta.json' not in names:
        print(f'no meta.json: checking the format, and the ids against the {GPT2_VOCABULARY} of GPT-2')
    faults += [f'{name}: left by a preparation that did not finish; prepare again, or delete it'
               for name in names if name.endswith('.tmp') or name.startswith('.prepare-')]
    vocabulary = meta.get('vocab_size', GPT2_VOCABULARY)
    written = meta.get('shards') or progress.get('shards', {})

    try:
        files = list_files(folder)
    except UserError as e:
        return [*faults, str(e)]
    for split, paths in files.items():
        if not paths:
            faults.append(f'no file of the {"training" if split == "train" else "validation"} set')
        for path in paths:
            name, bad = os.path.basename(path), []
            try:
                file = Tokens(path)
                largest = file.largest()
            except UserError as e:
                faults.append(str(e).replace(path, name))
                continue
            tokens[split] += len(file)
            if largest >= vocabulary:
                bad.append(f'token id {largest} is past the vocabulary of {vocabulary}')
            entry = written.get(name)
            if meta.get('shards') and not entry:
                bad.append('not among the shards of meta.json')
            if entry and entry['tokens'] != len(file):
                bad.append(f'{len(file):,} tokens, {entry["tokens"]:,} were written')
            if entry and sha256(path) != entry['sha256']:
                bad.append('its SHA-256 is not that of what was written')
            faults += [f'{name}: {fault}' for fault in bad]
            if not bad:
                hashed = ', SHA-256 as written' if entry else ''
                print(f'{name}: {len(file):,} tokens, largest id {largest}{hashed}')
    there = {os.path.basename(path) for paths in files.values() for path in paths}
    faults += [f'{name}: missing' for name in written if name not in there]
    faults += [f'{split}: {tokens[split]:,} tokens in all, meta.json says {n:,}'
               for split, n in meta.get('tokens', {}).items() if tokens.get(split) != n]
    return faults


if __name__ == '__main__':
    if len(sys.argv) != 2 or sys.argv[1].startswith('-'):
        sys.exit('usage: python data/verify.py DIR')
    if not os.path.isdir(sys.argv[1]):
        sys.exit(f'error: {sys.argv[1]}: there is no such folder')
    found = verify(sys.argv[1])
    for fault in found:
        print(f'FAULT {fault}')
    print(f'{sys.argv[1]}: {len(found)} faults' if found else f'{sys.argv[1]}: all is well')
    sys.exit(bool(found))
