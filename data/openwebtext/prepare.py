"""OpenWebText, or any corpus of documents, in GPT-2's BPE: writes shards of 100M tokens and meta.json.

    python data/openwebtext/prepare.py [--source=FOLDER] [--max_tokens=N] [--out_dir=FOLDER]

Killed or interrupted, the same command goes on after the last finished shard.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, from whatever folder this runs

from configurator import configure  # noqa: E402
from data.corpus import prepare  # noqa: E402

# what to read
source = ''       # a file, a folder or a glob of .parquet, .jsonl, .jsonl.gz, .jsonl.zst or .txt; '' = from the hub
max_tokens = 0    # stop after so many, validation included; 0 = all

# where and how to write
out_dir = ''      # the folder to write into; '' = this script's own
shard_tokens = 0  # tokens a shard; shard 0 is the validation set; 0 = 100M, or a tenth of the corpus if less
workers = 0       # processes that encode; the shards do not depend on it; 0 = one a core, at most 8

# first where the data set itself is parquet by now, wherever it has it, else the hub's conversion of the script that it
# was (not plain_text/partial-train/: the hub converts large ones in part)
HUB = dict(repo='Skylion007/openwebtext', tokens=9.04e9,  # nanoGPT counted them
           places=[('main', ''), ('refs/convert/parquet', 'plain_text/train/')])

if __name__ == '__main__':  # the workers import this file
    configure(globals())
    prepare('openwebtext', HUB, source, out_dir or Path(__file__).resolve().parent, max_tokens, shard_tokens, workers)
