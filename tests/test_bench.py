"""bench.py: the modes take turns, and the table has a line for each."""
import re

import pytest
from conftest import run_script

from configurator import UserError

TINY = dict(device='cpu', steps=3, n_layer=1, n_head=2, n_embd=16, block_size=8, batch_size=2, vocab_size=11)
PLAIN = """
import torch.nn as nn, torch.nn.functional as F
class PlainGPT(nn.Module):
    def __init__(self, vocab, block, n_layer, heads, d):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)
    def forward(self, idx, targets):
        return F.cross_entropy(self.table(idx).flatten(0, 1), targets.flatten())
"""


def rows(text):
    return re.findall(r'^(\w+) +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+) to ([\d.]+)$', text, re.MULTILINE)


def test_table(capsys):
    run_script('bench.py', modes='pre_ln,s2hc', **TINY)
    base, other = rows(capsys.readouterr().out)
    assert base[0] == 'pre_ln' and base[3:] == ('1.000',) * 3
    assert other[0] == 's2hc' and float(other[4]) <= float(other[3]) <= float(other[5])
    assert int(other[1].replace(',', '')) - int(base[1].replace(',', '')) == 2 * (4 * 16 * (8 + 9 + 1) + 17 + 7)


def test_yardstick(capsys, tmp_path):
    (tmp_path / 'plain.py').write_text(PLAIN)
    run_script('bench.py', modes='pre_ln', yardstick=tmp_path / 'plain.py', **TINY)
    assert [row[0] for row in rows(capsys.readouterr().out)] == ['yardstick', 'pre_ln']


def test_unknown_mode():
    with pytest.raises(UserError, match='modes: nonsense does not exist: choose from pre_ln'):
        run_script('bench.py', modes='pre_ln,nonsense', **TINY)
