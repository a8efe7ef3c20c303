"""
A report of ablate.py as a page of docs/: python docs/publish.py out-ablate-quick

Writes docs/ablate_quick.md and its pictures beside it, docs/ablate_quick_losses.png and so on.
"""
import re
import sys
from pathlib import Path

from PIL import Image

source = Path(sys.argv[1])
name, docs = source.name.removeprefix('out-').replace('-', '_'), Path(__file__).parent
text = (source / 'report.md').read_text(encoding='utf-8')
for picture in re.findall(r'!\[.*?\]\((.*?)\)', text):
    Image.open(source / picture).convert('RGB').quantize(96).save(docs / f'{name}_{picture}', optimize=True)  # a third
    text = text.replace(f'[{picture}]({picture})', f'[{picture}]({name}_{picture})')
(docs / f'{name}.md').write_text(text, encoding='utf-8')
