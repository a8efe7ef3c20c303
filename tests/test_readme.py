"""The README does what it says: its example mode runs as written, its files and keys exist."""
import re
from pathlib import Path

import pytest
import torch

import configurator
import model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_example_mode_runs_as_written(monkeypatch):
    (example,) = re.findall(r'```python\n(class ReZero.*?)```', README, re.DOTALL)
    assert len(example.strip().splitlines()) - example.count('\n\n') <= 12 + 2  # docstring and table row aside
    monkeypatch.setattr(model, 'RESIDUALS', dict(model.RESIDUALS))
    monkeypatch.setitem(model.CHOICES, 'residual', model.RESIDUALS)
    namespace = dict(vars(model))  # as if it stood at the end of model.py
    exec(compile(example, 'README.md', 'exec'), namespace)

    torch.manual_seed(0)
    gpt = model.GPT(model.GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=16, residual='rezero'))
    optimizer = gpt.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
    x, y = torch.randint(11, (2, 4, 8))
    losses = []
    for _ in range(20):
        loss = gpt(x, y)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(b.res_1.g != 0 and b.res_2.g != 0 for b in gpt.transformer.h)  # it started at 0 and learned


def test_every_mode_is_in_the_table():
    assert re.findall(r'^\| `(\w+)` \|', README, re.MULTILINE) == list(model.RESIDUALS)


def test_the_messages_of_the_troubleshooting_table_exist():
    table = README[README.index('| it says | what to do |'):].split('\n\n')[0]
    sources = [path.read_text(encoding='utf-8') for path in [*ROOT.glob('*.py'), *(ROOT / 'data').glob('**/*.py')]]
    text = '\n'.join(re.sub(r"'\s*\n\s*f?'", '', source) for source in sources)  # f-strings that run over lines
    said = [fragment for row in table.splitlines()[2:] for fragment in re.findall('`([^`]+)`', row.split('|')[1])]
    assert len(said) > 20 and [fragment for fragment in said if fragment not in text] == []


@pytest.mark.parametrize('path', sorted(set(re.findall(r'\]\(([^)#:]+)\)', README))))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize('command', sorted(set(re.findall(r'python ((?:train|sample|bench)\.py [^`\n]*)', README))))
def test_commands_name_keys_and_files_that_exist(command):
    script, *words = command.split()
    nones = {'train.py': ('norm', 'place', 'decay', 'data_order'), 'bench.py': ('preset',)}.get(script, ())
    keys = configurator.read_keys(ROOT / script, {key: (None,) for key in nones}, ())
    for word in words:
        if word.endswith('.py'):
            assert (ROOT / word).is_file()
        elif word.startswith('--') and word != '--help':
            assert word[2:].partition('=')[0] in keys
