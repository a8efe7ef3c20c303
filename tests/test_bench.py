"""bench.py: what is compared takes turns, the tables have a line for each, the numbers are in bench.json."""
import json
import math
import re

import numpy as np
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


@pytest.fixture
def bench(tmp_path, capsys):
    """(printed text, bench.json) of a run."""
    def run(**keys):
        run_script('bench.py', **{**TINY, 'out_dir': tmp_path / 'bench', **keys})
        return capsys.readouterr().out, json.loads((tmp_path / 'bench' / 'bench.json').read_text())
    return run


def test_modes(bench):
    text, results = bench(modes='pre_ln,s2hc', engines='eager')
    base, other = results['modes']
    assert (base['mode'], base['ratio'], base['low'], base['high'], base['extra']) == ('pre_ln', 1, 1, 1, 0)
    assert other['extra'] == 2 * (4 * 16 * (8 + 9 + 1) + 17 + 7) and other['flops_per_token'] > base['flops_per_token']
    ratios = np.array(other['seconds']) / np.array(base['seconds'])
    assert other['ratio'] == pytest.approx(np.median(ratios)) and len(ratios) == 3
    assert other['low'] <= other['ratio'] <= other['high']
    assert other['tokens_per_s'] == pytest.approx(16 / np.median(other['seconds']))
    assert other['memory'] - base['memory'] > 2 * 3 * 4 * 16 * 16  # 3 more streams of 16 tokens, 2 sub-layers, float32
    lines = [line.split() for line in text.splitlines() if line.startswith(('pre_ln', 's2hc'))]
    assert [line[3] for line in lines] == ['1.000', f'{other["ratio"]:.3f}']


def test_yardstick(bench, tmp_path):
    (tmp_path / 'plain.py').write_text(PLAIN)
    text, results = bench(modes='pre_ln', engines='eager', yardstick=tmp_path / 'plain.py')
    assert [row['mode'] for row in results['modes']] == ['yardstick', 'pre_ln']
    assert results['modes'][0]['parameters'] == 121 and 'ratios to yardstick' in text


def test_streams(bench):
    text, results = bench(streams='2,3,7', engines='eager', steps=1)
    rows = {(row['mode'], row['n']): row for row in results['streams']}
    assert len(rows) == 3 * 7 - 3  # kromhc at 3 and 7, mhc_lite at 7
    assert re.search(r'mhc_lite +7 +refused .* 1,132,320 and more', text)  # 2 x 7 x 16 x (5040 + 15)
    assert re.search(r'^n = 3: kromhc: .*power of two', text, re.MULTILINE)
    assert rows['s2hc', 7]['extra'] == 2 * (7 * 16 * (14 + 36 + 1) + 50 + 7)


def test_kernels(bench):
    text, results = bench(kernels=True, engines='eager', steps=1)
    assert len(results['kernels']) == 2 * 4 * 2
    for row in results['kernels']:
        assert row['bytes'] == row['rows'] * row['width'] * 4 * (3 if row['direction'] == 'forward' else 5)
        assert row['share'] == pytest.approx(row['bytes'] / row['seconds'] / row['copy']) and 0 < row['error'] < 1e-5
    assert {row['p'] for row in results['kernels']} == {0.5, 1, 2, math.inf}


def test_profile(bench):
    text, results = bench(profile=True, modes='proj_spheret')
    assert sum(results['profile']['proj_spheret'].values()) == pytest.approx(1, abs=0.05) and 'aten::addmm' in text


def test_a_time_limit(bench):
    text, results = bench(modes='pre_ln,keel', engines='eager', seconds=1e-9)
    assert results['modes'] == [] and 'keel, eager: left out' in text


@pytest.mark.parametrize('keys, message', [
    (dict(modes='pre_ln,nonsense'), 'modes: nonsense does not exist: choose from pre_ln'),
    (dict(engines='fast'), 'engines: fast does not exist: choose from eager, compile, triton'),
    (dict(engines='eager,triton'), "engines: kernels = 'triton': no CUDA device"),
    (dict(modes='pre_ln', engines='eager', yardstick='none.py'), 'yardstick = none.py: no PlainGPT .*FileNotFound'),
    (dict(modes='pre_ln', engines='eager', n_head=3), 'pre_ln: n_embd = 16 is not a multiple of n_head = 3'),
    (dict(modes='pre_ln,kromhc', engines='eager', n_streams=3), 'kromhc: .*power of two'),
    (dict(streams='4,x'), 'streams: x does not exist: choose from 1, 2'),
])
def test_wrong_keys(bench, keys, message):
    with pytest.raises(UserError, match=message):
        bench(**keys)


@pytest.mark.slow
def test_compiled_steps(bench):
    text, results = bench(modes='pre_ln,proj_spheret', engines='eager,compile')
    assert [(row['mode'], row['engine']) for row in results['modes']] == [
        ('pre_ln', 'eager'), ('proj_spheret', 'eager'), ('pre_ln', 'compile'), ('proj_spheret', 'compile')]
