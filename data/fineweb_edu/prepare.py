"""A sample of FineWeb-Edu, or any corpus of documents, in GPT-2's BPE: writes shards of 100M tokens and meta.json.

    python data/fineweb_edu/prepare.py [--name=sample-100BT] [--source=FOLDER] [--max_tokens=N] [--out_dir=FOLDER]

Killed or interrupted, the same command goes on after the last finished shard.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, from whatever folder this runs

from configurator import configure  # noqa: E402
from data.corpus import prepare  # noqa: E402

# what to read
name = 'sample-10BT'  # which sample of the hub's HuggingFaceFW/fineweb-edu
source = ''           # a file, a folder or a glob of .parquet, .jsonl, .jsonl.gz, .jsonl.zst or .txt; '' = from the hub
max_tokens = 0        # stop after so many, validation included; 0 = all

# where and how to write
out_dir = ''          # the folder to write into; '' = this script's own
shard_tokens = 0      # tokens a shard; shard 0 is the validation set; 0 = 100M, or a tenth of the corpus if less
workers = 0           # processes that encode; the shards do not depend on it; 0 = one a core, at most 8

SAMPLES = {'sample-10BT': ('sample/10BT/', 10e9), 'sample-100BT': ('sample/100BT/', 100e9)}

if __name__ == '__main__':  # the workers import this file
    configure(globals(), choices=dict(name=SAMPLES))
    folder, tokens = SAMPLES[name]
    hub = dict(repo='HuggingFaceFW/fineweb-edu', tokens=tokens, places=[('main', folder)])
    prepare('fineweb_edu', hub, source, out_dir or Path(__file__).resolve().parent, max_tokens, shard_tokens, workers)
