"""The pages do what they say: links lead somewhere, quotes are the source, code runs, commands are understood."""
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoint
import dataloader
import model
from docs import papers

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8')
         for path in [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]}
SCRIPTS = 'train|sample|ablate|analyze|evaluate|bench'
FENCE = re.compile(r'^ *```(\w*)\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)


def blocks(text, *languages):
    """The fenced blocks of a page."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def read_file_block(block):
    """(file name, the lines below) of a block whose first line is a comment with a file's name, else (None, block)."""
    name, _, body = block.partition('\n')
    named = re.fullmatch(r'# ([\w/]+\.py)', name)
    return (named[1], body) if named else (None, block)


def commands(text):
    """(script, words) of each command of a page; a shell loop gives all of its values."""
    found = []
    inline = re.findall(r'`([^`]+)`', FENCE.sub('', text))
    for block in [*blocks(text, 'sh'), *(' '.join(span.split()) for span in inline)]:
        block = re.sub(r'\\\n\s*', ' ', block)
        loops = {name: values.split() if '$' not in values else list(model.RESIDUALS)
                 for name, values in re.findall(r'for (\w+) in (.*?); do', block)}
        loops |= {name: [value] for name, value in re.findall(r'^(\w+)=(\S+)$', block, re.MULTILINE)}
        for script, words in re.findall(rf'(?:python|torchrun\b.*?) ({SCRIPTS})\.py\b([^#;&|>\n]*)', block):
            names = [name for name in loops if f'${name}' in words]
            for values in itertools.product(*(loops[name] for name in names)):
                line = words
                for name, value in zip(names, values):
                    line = line.replace(f'${name}', value)
                line = re.sub(r'=(SEED|S)\b', '=1', line.replace('=MODE', '=keel'))
                found.append((f'{script}.py', shlex.split(line)))
    return found


COMMANDS = {' '.join([script, *words]): (page, script, words)
            for page, text in PAGES.items() for script, words in commands(text)}


@pytest.fixture
def own_modes(monkeypatch):
    """What a page adds to the table of modes goes away with the test."""
    monkeypatch.setattr(model, 'RESIDUALS', dict(model.RESIDUALS))
    monkeypatch.setitem(model.CHOICES, 'residual', model.RESIDUALS)


def write_files(page, folder):
    """The files that a page tells the reader to write."""
    for name, body in map(read_file_block, blocks(PAGES[page], 'python')):
        if name and not (ROOT / name).exists():
            (folder / name).write_text(body, encoding='utf-8')


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r'\]\(([^)#\s]*)#?([\w-]*)\)', FENCE.sub('', PAGES[page])):
        if '://' in link:
            continue
        target = (ROOT / page).parent / link if link else ROOT / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r'^#+ (.*)', target.read_text(encoding='utf-8'), re.MULTILINE)
            assert anchor in [re.sub(r'[^\w -]', '', line.lower()).replace(' ', '-') for line in headings], anchor


def test_every_page_is_linked():
    linked = {Path(link).name for text in PAGES.values() for link in re.findall(r'\]\(([^)#]+)', text)}
    assert {Path(page).name for page in PAGES} - {'README.md'} <= linked


def test_quoted_source_is_verbatim():
    quotes = [(page, name, body) for page, text in PAGES.items()
              for name, body in map(read_file_block, blocks(text, 'python')) if name and (ROOT / name).exists()]
    assert {page for page, _, _ in quotes} >= {f'docs/{name}.md' for name in 'norms spheres hyper finetuning'.split()}
    assert [(page, body) for page, name, body in quotes
            if not body.strip() or body not in (ROOT / name).read_text(encoding='utf-8')] == []


@pytest.mark.parametrize('page', [page for page, text in PAGES.items() if page != 'README.md' and '```python' in text])
def test_code_runs(page, own_modes, tmp_path, monkeypatch):
    """The blocks of a page one after the other, as in a notebook. (README.md's is in test_readme.py.)"""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {'__name__': 'page'}
    for name, body in map(read_file_block, blocks(PAGES[page], 'python')):
        if not name or not (ROOT / name).exists():
            above = PAGES[page][:PAGES[page].index(body)].count('\n')
            exec(compile('\n' * above + body, ROOT / page, 'exec'), namespace)  # a traceback shows the page's own lines


class Parsed(Exception):
    """A script has read its command line and would begin."""


def begin(*args, **keys):
    raise Parsed


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_commands_are_understood(command, own_modes, tmp_path, monkeypatch):
    """Each by the script itself, up to the first thing that it does."""
    page, script, words = COMMANDS[command]
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for module, name in ((checkpoint, 'pick_device'), (dataloader, 'find_dataset'), (papers, 'compare')):
        monkeypatch.setattr(module, name, begin)
    monkeypatch.setattr(sys, 'argv', [str(ROOT / script), *words])
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)  # configure() replaces it
    with pytest.raises((Parsed, SystemExit)) as end:
        runpy.run_path(str(ROOT / script), run_name='__main__')
    assert end.type is Parsed or end.value.code == 0 and '--help' in words


def test_tables_of_reproduce_are_those_of_the_papers():
    """Every row of a benchmark in docs/papers.json stands in the page, with its numbers in the order of the columns."""
    text = PAGES['docs/reproduce.md']
    lines = [[cell.strip() for cell in row.split('|')] for row in re.findall(r'^\|(.*)\|$', text, re.MULTILINE)]
    with open(ROOT / 'docs/papers.json', encoding='utf-8') as f:
        tables = json.load(f)['tables']
    for name, table in tables.items():
        assert any(line[1:] == table['columns'] for line in lines), name
        for label, values in table['rows'].items():
            rows = [line[1:] for line in lines if line[0] == label]
            assert any(row == [f'{v:g}' for v in values] for row in rows), (name, label)


SMALL = ('--device=cpu', '--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
         '--gradient_accumulation_steps=1', '--eval_interval=10')
APPENDED = {'train.py': SMALL, 'ablate.py': (*SMALL, '--max_iters=20', '--seeds=1'), 'analyze.py': ('--samples=8',)}


@pytest.mark.slow
@pytest.mark.parametrize('page', ['docs/hyper.md', 'docs/your_own_mode.md'])
def test_commands_run(page, data, tmp_path):
    """The commands of a page in their order, on small models."""
    write_files(page, tmp_path)
    for script, words in commands(PAGES[page]):
        small = [*APPENDED[script], *([f'--dataset={data}'] if script != 'analyze.py' else [])]
        run = subprocess.run([sys.executable, ROOT / script, *words, *small], cwd=tmp_path, text=True,
                             capture_output=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        assert run.returncode == 0, run.stderr
    if page == 'docs/your_own_mode.md':
        whole, resumed = (torch.load(tmp_path / out / 'last.pt')['model'] for out in ('out-whole', 'out-resumed'))
        assert all(whole[key].equal(resumed[key]) for key in whole)
    else:
        assert (tmp_path / 'out-hyper/s2hc/analysis/mixing.png').stat().st_size > 10_000
