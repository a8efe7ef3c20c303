"""ablate.py: the grid, its results and verdicts, what is left after kills and signals, wrong words, the reports."""
import base64
import json
import math
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # noqa: F401  loaded once for all forks, as AdamW wants it
from conftest import ROOT, TINY, read_log
from killing import become
from tqdm import tqdm

from configurator import UserError

POPEN = subprocess.Popen
GRID = 'learning_rate=1e-2,1e12 n_layer=2'
# enough steps for a run to learn something
KEYS = {**TINY, 'max_iters': 24, 'eval_interval': 8, 'eval_tokens': 256, 'log_interval': 2, 'lr_decay_iters': 24,
        'batch_size': 2}


class Forked:
    """Popen of train.py by a fork of this process, which has imported torch already: starting is what takes long."""

    started = []

    def __init__(self, words, stdout=None, **rest):
        self.started.append(words)
        sys.stdout.flush()
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            become([str(word) for word in words[1:]], stdout.name)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)


def popen(words, **keys):
    return (Forked if 'train.py' in str(words[1]) else POPEN)(words, **keys)


def run_ablate(*words, **keys):
    """The globals of ablate.py run in this process, its runs forked; started: their command lines."""
    Forked.started = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [str(ROOT / 'ablate.py'), *words, *(f'--{key}={keys[key]}' for key in keys)])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        patch.setattr(subprocess, 'Popen', popen)
        run = SimpleNamespace(**runpy.run_path(sys.argv[0], run_name='__main__'))
    run.started, run.report = Forked.started, json.loads(Path(run.out_dir, 'report.json').read_text(encoding='utf-8'))
    return run


@pytest.fixture
def ablate(data, tmp_path):
    return lambda *words, **keys: run_ablate(*words, **{**KEYS, 'dataset': data, 'out_dir': tmp_path / 'grid', **keys})


@pytest.fixture(scope='module')
def grid(data, tmp_path_factory):
    """A grid with a learning rate that diverges; not to be written to."""
    out = tmp_path_factory.mktemp('ablate') / 'grid'
    return run_ablate('-j', '2', **KEYS, dataset=data, out_dir=out, modes='pre_ln,s2hc', seeds='1,2',
                      grid=GRID)


def losses(report):
    return {run['name']: run['result'].get('val_loss', run['result']['status']) for run in report['runs']}


def verdicts(report):
    return [(row['mode'], row['settings'], row['val_loss'].get('verdict')) for row in report['groups']]


# -----------------------------------------------------------------------------
# a grid from end to end

def test_numbers_are_those_of_the_runs(grid):
    assert len(grid.report['runs']) == 8
    for row in grid.report['groups']:
        rate = row['settings']['learning_rate']
        name = f'{row["mode"]}-learning_rate={rate:g}-n_layer=2'
        logs = {seed: read_log(Path(grid.out_dir, f'{name}-{seed}')) for seed in (1, 2)}
        final = {seed: [x['val_loss'] for x in log if 'val_loss' in x][-1] for seed, log in logs.items()}
        loss = row['val_loss']
        if rate > 1:
            assert loss['values'] == {} and loss['mean'] is None and not row['trains']
            assert loss.get('verdict') == ('none: diverged' if row['mode'] == 's2hc' else None)
            continue
        assert loss['values'] == {str(seed): value for seed, value in final.items()}
        assert loss['mean'] == pytest.approx(sum(final.values()) / 2)
        assert loss['sd'] == pytest.approx(abs(final[1] - final[2]) / math.sqrt(2))
        assert loss['se'] == pytest.approx(abs(final[1] - final[2]) / 2)
        norms = [statistics.median(x['grad_norm'] for x in log if 'grad_norm' in x) for log in logs.values()]
        assert row['grad_norm']['mean'] == pytest.approx(sum(norms) / 2)
        assert row['memory_mb']['mean'] > 100 and row['tokens_per_s']['mean'] > 0
        if row['mode'] == 's2hc':
            base = grid.report['groups'][0]['val_loss']['values']
            d = [final[seed] - base[str(seed)] for seed in (1, 2)]
            assert loss['difference'] == pytest.approx(sum(d) / 2)
            assert loss['against'] == 'pre_ln learning_rate=0.01 n_layer=2'
            assert loss['difference_se'] == pytest.approx(abs(d[0] - d[1]) / 2)
            expected = 'undecided' if abs(sum(d)) <= 2 * abs(d[0] - d[1]) else 'lower' if sum(d) < 0 else 'higher'
            assert loss['verdict'] == expected


def test_divergence_is_a_result(grid):
    failed = [run for run in grid.report['runs'] if '1e+12' in run['name']]
    assert len(failed) == 4
    for run in failed:
        assert run['result']['status'] == 'diverged' and 0 < run['result']['step'] < 5
        assert f'loss of step {run["result"]["step"]} is' in run['result']['error']
        assert run['result']['error'] in Path(grid.out_dir, 'report.md').read_text(encoding='utf-8')


def test_what_the_runs_have_in_common_is_checked(grid, monkeypatch):
    (weights, text), (data, _) = grid.report['checks'].values()
    assert weights and data and 's2hc 15 of 31' in text
    group = grid.at['s2hc', 0]
    shape, _ = group.weights['transformer.wte.weight']
    monkeypatch.setitem(group.weights, 'transformer.wte.weight', (shape, 'another'))
    monkeypatch.setitem(group.runs[1].keys, 'batch_size', 3)
    weights, text = grid.check_weights()
    assert not weights and 's2hc transformer.wte.weight' in text
    data, text = grid.check_data()
    assert not data and 'NOT the same' in text


def test_report_says_how_it_was_made(grid):
    assert {'command', 'date', 'revision', 'python', 'torch', 'numpy', 'machine'} <= grid.report.keys()
    text = Path(grid.out_dir, 'report.md').read_text(encoding='utf-8')
    assert torch.__version__ in text and 'train.py' in text and '-j 2' in text
    for name in re.findall(r'!\[.*?\]\((.*?)\)', text):
        assert Path(grid.out_dir, name).is_file()
    for run in grid.report['runs']:
        assert f'--seed={run["name"][-1]}' in run['command']


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag == 'img':
            self.images.append(dict(attrs)['src'])
        if tag not in ('img', 'meta'):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_one_whole_file(grid):
    text = Path(grid.out_dir, 'report.html').read_text(encoding='utf-8')
    page = Page(text)
    assert page.open == [] and '<script' not in text and '://' not in text
    assert all(name not in ('src', 'href') or value.startswith('data:') for name, value in page.attributes)
    assert len(page.images) == 5
    for source in page.images:
        assert base64.b64decode(source.removeprefix('data:image/png;base64,')).startswith(b'\x89PNG')
    assert '1e+12' in text and 'name="viewport"' in text


def test_text_is_escaped_in_html(grid):
    assert grid.as_html('p', '<b>&') == '<p>&lt;b&gt;&amp;</p>'
    assert '&lt;b&gt;' in grid.as_html('table', (('a',), [('<b>',)]))


# -----------------------------------------------------------------------------
# statistics

@pytest.mark.parametrize('a, b, verdict', [
    ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], 'lower'), ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], 'higher'),
    ([1.0, 5.0, 9.0], [1.1, 5.1, 9.2], 'lower'),            # pairs: the seeds differ more than the modes
    ([1.0, 2.0, 3.0], [2.0, 1.0, 3.1], 'undecided'), ([1.0, 2.0], [1.0, 2.0], 'undecided'),
    ([0.0, 0.0], [1.0, 3.0], 'undecided'), ([0.0, 0.0], [1.01, 2.99], 'lower'),  # exactly two standard errors, and more
    ([1.0], [2.0], 'none: one seed')])
def test_verdict(grid, a, b, verdict):
    difference, error, found = grid.compare(dict(enumerate(a)), dict(enumerate(b)))
    assert found == verdict
    d = [x - y for x, y in zip(a, b)]
    assert difference == pytest.approx(statistics.mean(d))
    assert error == (pytest.approx(statistics.stdev(d) / math.sqrt(len(d))) if len(d) > 1 else None)


def test_stability_is_the_largest_rate_at_which_all_seeds_train(grid, tmp_path):
    values = grid.report['groups'][0]['val_loss']['values'].values()
    assert max(values) < grid.report['token_entropy'] - 0.1  # or the test shows nothing
    assert grid.report['stability'] == {'pre_ln': {'2': 0.01}, 's2hc': {'2': 0.01}}
    assert Path(grid.out_dir, 'stability.png').is_file()


def test_token_entropy(grid, data):
    from data.shards import Tokens
    train, val = (list(Tokens(data / f'{split}.bin').tokens) for split in ('train', 'val'))
    expected = -sum(math.log((train.count(t) + 1) / (len(train) + grid.vocabulary)) for t in val) / len(val)
    assert grid.report['token_entropy'] == pytest.approx(expected)


# -----------------------------------------------------------------------------
# going on

def test_finished_and_diverged_runs_stay(grid, data):
    again = run_ablate('-j', '2', **KEYS, dataset=data, out_dir=grid.out_dir, modes='pre_ln,s2hc', seeds='1,2',
                       grid=GRID)
    assert again.started == [] and losses(again.report) == losses(grid.report)
    assert verdicts(again.report) == verdicts(grid.report)


@pytest.mark.parametrize('orphan', [False, True])  # whether the runs outlive ablate.py
def test_killed_grid_goes_on_to_the_same(grid, data, tmp_path, orphan):
    keys = {**KEYS, 'dataset': data, 'out_dir': tmp_path / 'grid', 'modes': 'pre_ln,s2hc', 'seeds': '1,2',
            'learning_rate': 1e-2}
    for moment in (0.4, 0.8) if not orphan else (0.6,):
        pid = os.fork()
        if not pid:
            os.setsid()
            tqdm.set_lock(threading.RLock())
            os.dup2(os.open(tmp_path / 'log', os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            try:
                run_ablate('-j2', **keys)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 20  # until something is trained, then at some moment
        while not list((tmp_path / 'grid').glob('*/metrics.jsonl')) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(moment)
        (os.kill if orphan else os.killpg)(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert not (tmp_path / 'grid' / 'report.json').exists()
    done = run_ablate(**keys)
    expected = {name.replace('-learning_rate=0.01-n_layer=2', ''): loss for name, loss in losses(grid.report).items()
                if 'rate=0.01' in name}
    assert losses(done.report) == expected
    assert [v for _, _, v in verdicts(done.report)] == [v for _, at, v in verdicts(grid.report)
                                                        if at['learning_rate'] < 1]


def test_signal_saves_and_goes_on(ablate, grid, monkeypatch, capsys, tmp_path):
    keys, start = dict(modes='pre_ln', seeds='1,2', learning_rate=1e-2), Forked.__init__

    def signal_when_training(process, folder):
        while not os.path.exists(f'{folder}/metrics.jsonl'):
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGSTOP)  # it does not run to its end meanwhile
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)

    def start_and_signal(process, words, **rest):
        start(process, words, **rest)
        folder = next(word for word in words if word.startswith('--out_dir=')).partition('=')[2]
        threading.Thread(target=signal_when_training, args=(process, folder)).start()

    with monkeypatch.context() as patch:
        patch.setattr(Forked, '__init__', start_and_signal)
        with pytest.raises(SystemExit) as stop:
            ablate(**keys)
    assert stop.value.code == 1 and 'the same command goes on' in capsys.readouterr().out
    report = json.loads((tmp_path / 'grid' / 'report.json').read_text())
    assert losses(report) == {'pre_ln-1': 'unfinished', 'pre_ln-2': 'unfinished'}
    assert 'stopped by SIGINT' in (tmp_path / 'grid' / 'pre_ln-1' / 'train.log').read_text()
    whole = losses(grid.report)
    assert losses(ablate(**keys).report) == {f'pre_ln-{seed}': whole[f'pre_ln-learning_rate=0.01-n_layer=2-{seed}']
                                             for seed in (1, 2)}


def test_other_failures_are_recorded_and_tried_again(ablate, monkeypatch, tmp_path):
    (tmp_path / 'grid' / 'pre_ln-1').mkdir(parents=True)
    (tmp_path / 'grid' / 'pre_ln-1' / 'metrics.jsonl').mkdir()  # the run cannot write it
    with pytest.raises(UserError, match='run.json: not readable'):
        ablate(seeds='1')
    shutil.rmtree(tmp_path / 'grid')
    start = Forked.__init__

    def start_and_kill(process, words, stdout, **rest):
        start(process, words, stdout=stdout, **rest)
        if '--seed=1' in words:
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            stdout.write(b'error: out of memory (no more): a smaller batch_size\n')
            os.kill(process.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Forked, '__init__', start_and_kill)
        results = {run['name']: run['result'] for run in ablate(seeds='1,2').report['runs']}
    assert results == {'pre_ln-1': {'status': 'failed', 'error': 'killed by SIGKILL'},
                       'pre_ln-2': {'status': 'out of memory',
                                    'error': 'out of memory (no more): a smaller batch_size'}}
    assert set(losses(ablate(seeds='1,2').report).values()).isdisjoint({'failed', 'out of memory'})


def test_other_settings_are_refused(ablate, grid):
    for change in (dict(batch_size=8), dict(max_iters=12), dict(nproc=1), dict(dropout=0.1)):
        key, value = next(iter(change.items()))
        with pytest.raises(UserError, match=rf'was trained with other settings \({key} .* -> {value}\): remove it'):
            ablate(**{'modes': 'pre_ln,s2hc', 'seeds': '1,2', 'grid': GRID, 'out_dir': grid.out_dir,
                      **change})


# -----------------------------------------------------------------------------
# words

class Stop(Exception):
    pass


@pytest.fixture
def plan(ablate, monkeypatch):
    """The globals of ablate.py where it would begin to train."""
    def stop(out_dir):
        frame = sys._getframe(1)
        raise Stop(SimpleNamespace(**frame.f_globals))

    def call(*words, **keys):
        with monkeypatch.context() as patch:
            patch.setattr('checkpoint.lock_out_dir', stop)
            with pytest.raises(Stop) as stopped:
                ablate(*words, **keys)
        return stopped.value.args[0]
    return call


@pytest.mark.parametrize('words, error', [
    (['--learning_rat=1'], 'learning_rat in ablate.py or train.py; did you mean learning_rate'),
    (['--modes=pre_ln,s2h'], 'modes.*did you mean s2hc'), (['--modes=pre_ln,pre_ln'], 'pre_ln stands there twice'),
    (['--seeds=1,1'], '1 stands there twice'), (['--seeds=x'], 'seeds=x: seed must be an integer'),
    (['--grid=learning_rat=1'], 'grid: learning_rat=1.*did you mean learning_rate'),
    (['--grid=p'], 'grid: p: write key=v1,v2'), (['--grid=p=1 p=2'], 'grid: p=2'),
    (['--grid=seed=1'], 'grid: seed=1'), (['--grid=p=0'], 'p must be a number > 0'),
    (['--grid=decay=sqr'], 'did you mean sqrt'), (['--learning_rate=x'], 'learning_rate must be a number'),
    (['--residual=keel'], 'see --modes'), (['--seed=1'], 'see --modes and'), (['--eval_only=True'], 'see --modes'),
    (['--modes', 'pre_ln'], 'write --modes=pre_ln'), (['config/ablate_quik.py'], 'neither a config file'),
    (['--n_embd=15'], 'n_embd = 15 is not a multiple'), (['--modes=kromhc', '--n_streams=3'], 'kromhc'),
    (['--dataset=nowhere'], 'no folder'), (['--jobs=0'], 'jobs must be an integer > 0'),
    (['-j', '--modes=keel'], 'jobs must be')])
def test_wrong_words_are_one_line(data, tmp_path, words, error):
    keys = {key: value for key, value in {**KEYS, 'dataset': data, 'out_dir': tmp_path / 'grid'}.items()
            if not any(word.startswith(f'--{key}=') for word in words)}
    with pytest.raises(UserError, match=error) as raised:
        run_ablate(*words, **keys)
    assert '\n' not in str(raised.value) and not (tmp_path / 'grid').exists()


def test_settings_without_effect_make_no_runs(plan):
    runs = plan(modes='pre_ln,p_spheret,geonorm', seeds='1', grid='p=0.5,inf decay=sqrt,linear').runs
    assert [run.name for run in runs] == [
        'pre_ln-1', 'p_spheret-p=0.5-decay=sqrt-1', 'geonorm-decay=sqrt-1', 'p_spheret-p=0.5-decay=linear-1',
        'geonorm-decay=linear-1', 'p_spheret-p=inf-decay=sqrt-1', 'p_spheret-p=inf-decay=linear-1']


def test_what_is_compared_with_what(plan):
    def pairs(**keys):
        run = plan(seeds='1', **keys)
        others = {name: run.baseline(group) for name, group in run.groups.items()}
        return {name: run.label(other.mode, other.point) for name, other in others.items() if other}
    two = dict(modes='keel,s2hc', grid='n_streams=2,4')
    assert pairs(**two) == {'s2hc n_streams=2': 'keel', 's2hc n_streams=4': 'keel'}
    assert pairs(**two, against='grid') == {'s2hc n_streams=4': 's2hc n_streams=2'}
    assert pairs(modes='keel,s2hc', grid='n_layer=1,2') == {f's2hc n_layer={n}': f'keel n_layer={n}' for n in (1, 2)}
    assert pairs(modes='keel', grid='n_layer=1,2') == {'keel n_layer=2': 'keel n_layer=1'}


def test_what_a_mode_refuses_is_a_result(plan):
    runs = plan(modes='s2hc,kromhc', seeds='1', grid='n_streams=2,3').runs
    assert [run.name for run in runs if run.result['status'] == 'refused'] == ['kromhc-n_streams=3-1']


def test_config_files(plan, tmp_path):
    (tmp_path / 'mine.py').write_text("out_dir = 'of-a-run'\nresidual = 'keel'\nweight_decay = 0.3\n")
    run = plan(str(tmp_path / 'mine.py'), seeds='1')
    assert run.runs[0].keys['residual'] == 'pre_ln' and run.runs[0].keys['weight_decay'] == 0.3
    assert run.runs[0].command[1] == str(tmp_path / 'mine.py') and run.out_dir == str(tmp_path / 'grid')
    (tmp_path / 'both.py').write_text("modes = 'keel'\nseeds = '4,5'\njobs = 3\nweight_decay = weight_decay / 2\n")
    run = plan(str(tmp_path / 'mine.py'), str(tmp_path / 'both.py'))
    assert [r.name for r in run.runs] == ['keel-4', 'keel-5'] and run.runs[0].keys['weight_decay'] == 0.15
    assert run.jobs == 3 and not any('both.py' in word for word in run.runs[0].command)
    run = plan(str(tmp_path / 'both.py'), modes='s2hc')  # the line wins
    assert [r.name for r in run.runs] == ['s2hc-4', 's2hc-5']
    for wrong, error in (("modes = 'keel'\nlearning_rat = 1\n", 'learning_rat = 1: there is no key learning_rat'),
                         ("init_from = 'gpt2'\n", 'init_from'), ("modes = 'keel'\nseed = 2\n", 'seed = 2.*--seeds')):
        (tmp_path / 'wrong.py').write_text(wrong)
        with pytest.raises(UserError, match=f'wrong.py: {error}'):
            run_ablate(str(tmp_path / 'wrong.py'))


def test_a_gpu_for_each_of_the_runs_at_once(grid, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(subprocess, 'Popen', lambda words, env, **rest: seen.append(env['CUDA_VISIBLE_DEVICES']))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,5,6,7')
    monkeypatch.setitem(grid.start.__globals__, 'write', lambda path, content: None)
    run = SimpleNamespace(folder=str(tmp_path / 'run'), command=[], record=dict)
    for nproc in (0, 2):
        monkeypatch.setitem(grid.start.__globals__, 'nproc', nproc)
        for slot in (0, 1):
            grid.start(run, slot)
    assert seen == ['4', '5', '4,5', '6,7']


@pytest.mark.parametrize('preset', sorted(path.name for path in (ROOT / 'config').glob('ablate_*.py')
                                            if path.name != 'ablate_small.py'))  # no grid, but what grids share
def test_presets(plan, preset):
    text = (ROOT / 'config' / preset).read_text(encoding='utf-8')
    small = dict(n_layer=1, n_embd=32, n_head=4, vocab_size=20, max_iters=5)
    if 'n_layer=' in text:
        small['grid'] = re.sub(r'n_layer=[\d,]*', 'n_layer=1,2', re.search(r"grid = '(.*)'", text)[1])
    run = plan(f'config/{preset}', **small)
    out_dir = f'out-{Path(preset).stem}'.replace('_', '-')
    assert f"out_dir = '{out_dir}'" in text and f'# python ablate.py config/{preset}\n' in text
    assert len(run.groups) > 1 and sum(r.result['status'] == 'refused' for r in run.runs) < len(run.runs) / 4
    if preset == 'ablate_quick.py':
        assert len(run.groups) == 8 and len(run.runs) == 24 and 'max_iters = 600' in text


def test_from_the_command_line(data, tmp_path):
    """As a user calls it, once."""
    words = [f'--{key}={value}' for key, value in {**KEYS, 'dataset': data, 'out_dir': tmp_path / 'grid'}.items()]
    done = subprocess.run([sys.executable, 'ablate.py', 'config/default.py', '--seeds=1', *words], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, 'OMP_NUM_THREADS': '1'}, timeout=120)
    assert done.returncode == 0 and 'pre_ln-1: validation loss' in done.stdout, done.stdout + done.stderr
    assert (tmp_path / 'grid' / 'pre_ln-1' / 'loss.png').is_file()


@pytest.mark.slow
def test_through_torchrun(ablate):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(popen.__globals__, 'Forked', POPEN)
        patch.setitem(os.environ, 'OMP_NUM_THREADS', '1')
        run = ablate(seeds='1', nproc=2)
    assert losses(run.report).keys() == {'pre_ln-1'} and isinstance(losses(run.report)['pre_ln-1'], float)
