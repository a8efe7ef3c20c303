"""The README and the first pages of docs/ do what they say; links and commands are in test_docs.py."""
import re
from pathlib import Path

import torch

import model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
OWN_MODE, TROUBLES = ((ROOT / 'docs' / f'{name}.md').read_text(encoding='utf-8')
                      for name in ('your_own_mode', 'troubleshooting'))


def test_example_mode_runs_as_written(monkeypatch):
    (example,) = re.findall(r'```python\n(class ReZero.*?)```', OWN_MODE, re.DOTALL)
    assert len(example.strip().splitlines()) - example.count('\n\n') <= 12 + 2  # docstring and table row aside
    monkeypatch.setattr(model, 'RESIDUALS', dict(model.RESIDUALS))
    monkeypatch.setitem(model.CHOICES, 'residual', model.RESIDUALS)
    namespace = dict(vars(model))  # as if it stood at the end of model.py
    exec(compile(example, 'your_own_mode.md', 'exec'), namespace)

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
    table = TROUBLES[TROUBLES.index('| it says | what to do |'):].split('\n\n')[0]
    sources = [path.read_text(encoding='utf-8') for path in [*ROOT.glob('*.py'), *(ROOT / 'data').glob('**/*.py')]]
    text = '\n'.join(re.sub(r"'\s*\n\s*f?'", '', source) for source in sources)  # f-strings that run over lines
    said = [fragment for row in table.splitlines()[2:] for fragment in re.findall('`([^`]+)`', row.split('|')[1])]
    assert len(said) > 20 and [fragment for fragment in said if fragment not in text] == []
