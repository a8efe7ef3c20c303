"""configurator.py: keys from the source of a script, config files, the command line, and one line for every mistake."""
import functools
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import configurator
from configurator import UserError, configure, explain, require

SCRIPT = """\
# a comment above the imports is no heading
'''A script.'''
import math
from configurator import configure, UserError
_private = 1
# -----------------------------------------------------------------------------
# I/O
out_dir = 'out'        # where the log goes
eval_interval = 250    # steps between evaluations
norm = None            # normalisation; None = the preset's
place = None           # a choice that is itself called None
compile = False        # torch.compile the model
# model
residual = 'pre_ln'    # which residual connection: the text of this comment is long,
                       # and runs over
n_layer = 12
lr = 6e-4              # learning rate
  # an indented comment of its own belongs to no key
shift = -1             # may be negative: ü
tokens = 1_000         # at least 0
start = '\\n'           # prompt; 'a # in a string' is no comment
betas = (0.9, 0.95)    # a tuple is no key
root = math.sqrt(4.0)  # nor is a call
a = b = 1
# -----------------------------------------------------------------------------
config, given = configure(globals(), choices=dict(norm=['layernorm', 'rmsnorm'], place=['in', 'None'],
                                                  residual={'pre_ln': 0, 'post_ln': 0, 'keel': 0}),
                          positive=['n_layer'], renamed={'eval_iters': 'set tokens', 'n_layers': 'set n_layer'})
below = 3              # below the call: no key
"""
DEFAULTS = dict(out_dir='out', eval_interval=250, norm=None, place=None, compile=False, residual='pre_ln', n_layer=12,
                lr=6e-4, shift=-1, tokens=1000, start='\n')


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*argv, **files): run the script in this process, from another folder; files: text of config/NAME.py."""
    def run(*argv, **files):
        for name, text in files.items():
            data = text if isinstance(text, bytes) else text.encode()
            (tmp_path / 'config' / f'{name}.py').write_bytes(data)
        monkeypatch.setattr(sys, 'argv', [str(script), *argv])
        return runpy.run_path(str(script))
    script = tmp_path / 'script.py'
    script.write_bytes(SCRIPT.encode())
    (tmp_path / 'config').mkdir()
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    monkeypatch.setattr(sys, 'excepthook', sys.__excepthook__)
    return run


def changed(result):
    return {k: v for k, v in result['config'].items() if v != DEFAULTS[k]}


def test_defaults(run):
    result = run()
    assert list(result['config'].items()) == list(DEFAULTS.items())  # in the order of the script
    assert result['given'] == set()


@pytest.mark.parametrize('word, value', [
    ('--n_layer=6', 6), ('--n_layer=1e2', 100), ('--n_layer=1_000', 1000), ('--n_layer=2.0', 2),
    ('--n_layer=9007199254740993', 2**53 + 1), ('--tokens=0', 0), ('--shift=-3', -3),
    ('--lr=1', 1.0), ('--lr=1e-3', 1e-3), ('--lr=0', 0.0),
    ('--compile=True', True), ('--compile=true', True), ('--compile=FALSE', False),
    ('--start=123', '123'), ('--start=None', 'None'), ('--start=a=b --c', 'a=b --c'), ('--start=', ''),
    ("--start='x'", "'x'"), ('--residual=keel', 'keel'),
    ('--norm=rmsnorm', 'rmsnorm'), ('--norm=None', None), ('--place=None', 'None'),
])
def test_line(run, word, value):
    key = word[2:].split('=')[0]
    result = run(word)
    assert result['config'] == {**DEFAULTS, key: value}
    assert type(result['config'][key]) is type(value)
    assert result[key] == value  # written back
    assert result['given'] == {key}


@pytest.mark.parametrize('text, values', [
    ('lr = lr / 10\nn_layer += 1', dict(lr=6e-4 / 10, n_layer=13)),
    ('n_layer = 1e2; lr = 1', dict(n_layer=100, lr=1.0)),
    ("norm = 'rmsnorm'\nnorm = None\ntokens = 5", dict(norm=None, tokens=5)),
    ("start = 'ü → 日本'", dict(start='ü → 日本')),
    (b'\xef\xbb\xbfn_layer = 3\r\nlr = 2.\r\n', dict(n_layer=3, lr=2.0)),  # from Windows: BOM, CRLF
    ('import math\nfrom math import sqrt\n_two = 2\nclass A: pass\ndef f(): return n_layer * _two\n'
     'tokens = int(sqrt(4)) + f() + sum(n_layer for _ in range(2))', dict(tokens=2 + 24 + 24)),
    ('for n_layer in range(3): pass\ni = 1\ndel i', dict(n_layer=2)),
    ("globals().update(shift=-5)\nexec('n_layer = 4')", dict(shift=-5, n_layer=4)),
    ('import os; assert os.path.isfile(__file__)\ncompile = True', dict(compile=True)),
])
def test_file(run, text, values):
    result = run('config/x.py', x=text)
    assert result['config'] == {**DEFAULTS, **values}
    assert {k: type(v) for k, v in values.items()} == {k: type(result['config'][k]) for k in values}
    assert result['given'] == set(values)


def test_order(run):
    """Files in their order, each on the values of the one before; the line wins wherever it stands."""
    files = dict(x='lr = 1; n_layer = 2; tokens = 3', y='lr = lr / 2; n_layer = 4')
    result = run('--n_layer=7', 'config/x.py', '--n_layer=8', 'config/y.py', **files)
    assert changed(result) == dict(lr=0.5, n_layer=8, tokens=3)
    assert changed(run('config/y.py', 'config/x.py')) == dict(lr=1.0, n_layer=2, tokens=3)


def test_given_counts_a_default_written_again(run):
    assert run('config/x.py', '--lr=6e-4', x='n_layer = 12; tokens = tokens')['given'] == {'n_layer', 'tokens', 'lr'}


def test_file_of_the_current_folder_comes_first(run):
    Path('config').mkdir()
    Path('config/x.py').write_text('n_layer = 1')
    assert changed(run('config/x.py', x='n_layer = 2')) == dict(n_layer=1)
    assert changed(run('../config/x.py')) == dict(n_layer=2)
    assert changed(run(os.path.abspath('../config/x.py'))) == dict(n_layer=2)


RESIDUAL = 'residual must be one of pre_ln, post_ln, keel'


@pytest.mark.parametrize('words, message', [
    # how to write a word
    ('--n_layer 6', '--n_layer: a key is set by --key=value: write --n_layer=6'),
    ('--shift -2', '--shift: a key is set by --key=value: write --shift=-2'),
    ('--n_layer', '--n_layer: a key is set by --key=value: write --n_layer=VALUE'),
    ('--n_layer --lr=1', '--n_layer: a key is set by --key=value: write --n_layer=VALUE'),
    ('--n_layer config/x.py', '--n_layer: a key is set by --key=value: write --n_layer=VALUE'),
    ('--compile', '--compile: a key is set by --key=value: write --compile=True'),
    ('--compile false', '--compile: a key is set by --key=value: write --compile=false'),
    ('--compile config/x.py', '--compile: a key is set by --key=value: write --compile=True'),
    ('-n_layer=6', '-n_layer=6: a key is set by --key=value: write --n_layer=6'),
    ('---n_layer=6', '---n_layer=6: a key is set by --key=value: write --n_layer=6'),
    ('n_layer=6', 'n_layer=6: a key is set by --key=value: write --n_layer=6'),
    ('n_layer 6', 'n_layer: a key is set by --key=value: write --n_layer=6'),
    ('6', '6: neither a config file (FILE.py) that exists nor --key=value'),
    ('--', '--: neither a config file (FILE.py) that exists nor --key=value'),
    ('config', 'config: neither a config file (FILE.py) that exists nor --key=value; did you mean config/x.py?'),
    ('config/shakespear.py', 'config/shakespear.py: neither a config file (FILE.py) that exists nor --key=value; '
                             'did you mean config/shakespeare.py?'),
    # names
    ('--n_layr=6', '--n_layr=6: there is no key n_layr; did you mean n_layer?'),
    ('--N-Layer=6', '--N-Layer=6: there is no key N-Layer; did you mean n_layer?'),
    ('--zzz=6', '--zzz=6: there is no key zzz; --help lists the keys'),
    ('--zzz', '--zzz: there is no key zzz; --help lists the keys'),
    ('--eval_iters=6', '--eval_iters=6: there is no key eval_iters, set tokens'),  # difflib says eval_interval
    ('--_private=6', '--_private=6: there is no key _private; --help lists the keys'),
    ('--betas=6', '--betas=6: there is no key betas; --help lists the keys'),
    ('--root=6', '--root=6: there is no key root; --help lists the keys'),
    ('--a=6', '--a=6: there is no key a; --help lists the keys'),
    ('--math=6', '--math=6: there is no key math; --help lists the keys'),
    ('--below=6', '--below=6: there is no key below; --help lists the keys'),
    # values
    ('--n_layer=x', '--n_layer=x: n_layer must be an integer > 0'),
    ('--n_layer=1.5', '--n_layer=1.5: n_layer must be an integer > 0'),
    ('--n_layer=0', '--n_layer=0: n_layer must be an integer > 0'),
    ('--n_layer=True', '--n_layer=True: n_layer must be an integer > 0'),
    ('--n_layer=None', '--n_layer=None: n_layer must be an integer > 0'),
    ('--n_layer=1e999', '--n_layer=1e999: n_layer must be an integer > 0'),
    ('--n_layer=', '--n_layer=: n_layer must be an integer > 0'),
    ('--tokens=-1', '--tokens=-1: tokens must be an integer >= 0'),
    ('--shift=x', '--shift=x: shift must be an integer'),
    ('--lr=nan', '--lr=nan: lr must be a number >= 0'),
    ('--lr=-inf', '--lr=-inf: lr must be a number >= 0'),
    ('--n_layer=inf', '--n_layer=inf: n_layer must be an integer > 0'),
    ('--lr=-1e-3', '--lr=-1e-3: lr must be a number >= 0'),
    ('--lr=1/3', '--lr=1/3: lr must be a number >= 0'),
    ('--compile=1', '--compile=1: compile must be True or False'),
    ('--residual=Post-LN', f'--residual=Post-LN: {RESIDUAL}; did you mean post_ln?'),
    ('--residual=KEEL', f'--residual=KEEL: {RESIDUAL}; did you mean keel?'),
    ('--residual=zzz', f'--residual=zzz: {RESIDUAL}'),
    ('--residual=None', f'--residual=None: {RESIDUAL}'),
    ('--place=NONE', '--place=NONE: place must be one of in, None or None; did you mean None?'),
    ('--norm=none', '--norm=none: norm must be one of layernorm, rmsnorm or None'),
])
def test_wrong_word(run, words, message):
    with pytest.raises(UserError) as e:
        run(*words.split(), x='', shakespeare='')
    assert str(e.value) == message


@pytest.mark.parametrize('text, message', [
    ('n_layr = 6', ': n_layr = 6: there is no key n_layr; did you mean n_layer?'),
    ("zzz = 'a'", ": zzz = 'a': there is no key zzz; --help lists the keys"),
    ('zzz = None', ': zzz = None: there is no key zzz; --help lists the keys'),
    ('n_layers = 6', ': n_layers = 6: there is no key n_layers, set n_layer'),
    ("n_layer = '6'", ": n_layer = '6': n_layer must be an integer > 0"),
    ('n_layer = True', ': n_layer = True: n_layer must be an integer > 0'),
    ('n_layer = None', ': n_layer = None: n_layer must be an integer > 0'),
    ('n_layer = 1.5', ': n_layer = 1.5: n_layer must be an integer > 0'),
    ('n_layer = -2', ': n_layer = -2: n_layer must be an integer > 0'),
    ("lr = float('nan')", ': lr = nan: lr must be a number >= 0'),
    ('lr = 10 ** 320', f': lr = 1{"0" * 59}: lr must be a number >= 0'),  # too large for a float
    ('lr = 1j', ': lr = 1j: lr must be a number >= 0'),
    ("compile = 'true'", ": compile = 'true': compile must be True or False"),
    ('compile = 1', ': compile = 1: compile must be True or False'),
    ('start = 123', ': start = 123: start must be a string'),
    ("residual = 'kel'", f": residual = 'kel': {RESIDUAL}; did you mean keel?"),
    ('residual = 3', f': residual = 3: {RESIDUAL}'),
    ("norm = 'None'", ": norm = 'None': norm must be one of layernorm, rmsnorm or None"),
    ('class A:\n    def __repr__(self): return "a\\n b"\ntokens = A()',
     ': tokens = a b: tokens must be an integer >= 0'),
    # what a file raises
    ('n_layer = 6\nresidual = keel', ", line 2: NameError: name 'keel' is not defined"),
    ('\ndef f():\n    return 1 / 0\nlr = f()', ', line 3: ZeroDivisionError: division by zero'),
    ("import json\njson.loads('')", ', line 2: JSONDecodeError: Expecting value: line 1 column 1 (char 0)'),
    ('import no_such_module', ", line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ('lr = 1\nlr = = 2', ', line 2: SyntaxError: invalid syntax'),
    ('raise SystemExit("a\\nb")', ', line 1: SystemExit: a b'),
])
def test_wrong_file(run, text, message):
    with pytest.raises(UserError) as e:
        run('config/x.py', x=text)
    assert str(e.value) == 'config/x.py' + message


def test_file_in_another_encoding(run):
    with pytest.raises(UserError, match='^config/x.py.*SyntaxError: .*utf-8'):
        run('config/x.py', x=b"start = '\xfc'")
    assert run('config/x.py', x=b"# coding: latin-1\nstart = '\xfc'")['start'] == 'ü'


def test_help(run, monkeypatch, capsys):
    def help_text(columns, word):
        monkeypatch.setenv('COLUMNS', str(columns))
        with pytest.raises(SystemExit) as e:
            run('--lr=x', word)
        assert e.value.code == 0
        return capsys.readouterr().out
    wide = help_text(200, '--help').splitlines()
    assert wide[0] == 'usage: python script.py [config/FILE.py ...] [--key=value ...]'
    assert [line for line in wide if line[:1].isalpha()][1:] == ['I/O', 'model']  # the sections
    assert [line.split('=')[0] for line in wide if line.startswith('  --')] == [f'  --{k}' for k in DEFAULTS]
    rows = {line.split('=')[0][4:]: line.split() for line in wide if line.startswith('  --')}
    assert ' '.join(rows['residual']) == ("--residual='pre_ln' str which residual connection: the text of this comment "
                                          "is long, and runs over (one of pre_ln, post_ln, keel)")
    assert rows['lr'] == ['--lr=0.0006', 'float', 'learning', 'rate']
    assert ' '.join(rows['norm']) == ("--norm=None str normalisation; None = the preset's "
                                      "(one of layernorm, rmsnorm or None)")
    assert rows['n_layer'] == ['--n_layer=12', 'int']
    assert rows['start'][:2] == [r"--start='\n'", 'str'] and rows['start'][-1] == 'comment'
    narrow = help_text(70, '-h')
    assert max(map(len, narrow.splitlines())) <= 70
    assert narrow.split() == '\n'.join(wide).split()


def test_help_without_headings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'excepthook', sys.__excepthook__)
    (tmp_path / 's.py').write_text('# licence\nimport os\nx = 1\n# -- model --\ny = True\n# ----\nz = 2.0  # c\n')
    with pytest.raises(SystemExit):
        configure({'__file__': str(tmp_path / 's.py')}, argv=['-h'])
    assert capsys.readouterr().out.splitlines()[1:] == [
        '', '  --x=1    int', '', 'model', '  --y=True bool', '  --z=2.0  float c']


@pytest.mark.parametrize('source, arguments, message', [
    ('x = None', {}, 'x = None needs choices'),
    ('x = 1', dict(positive=['x', 'y']), 'no key: y'),
    ('x = 1', dict(choices=dict(y=[1])), 'no key: y'),
])
def test_mistake_of_the_script(tmp_path, monkeypatch, source, arguments, message):
    monkeypatch.setattr(sys, 'excepthook', sys.__excepthook__)
    (tmp_path / 's.py').write_text(source)
    with pytest.raises(ValueError, match=message):
        configure({'__file__': str(tmp_path / 's.py')}, argv=[], **arguments)


@pytest.mark.parametrize('kind, text, value', [
    (float, '-2', -2.0), (float, '0', 0.0), (float, 'None', None), (float, '1e400', None), (int, '-3', -3),
    (int, '0.5', 'must be an integer or None'), (float, 'x', 'must be a number or None'), (float, 'nan', 'a number')])
def test_a_key_that_may_be_left_open(tmp_path, monkeypatch, kind, text, value):
    monkeypatch.setattr(sys, 'excepthook', sys.__excepthook__)
    (tmp_path / 's.py').write_text('x = None\n')
    script = {'__file__': str(tmp_path / 's.py')}
    call = functools.partial(configure, script, choices=dict(x=kind), argv=[f'--x={text}'])
    if isinstance(value, str):
        with pytest.raises(UserError, match=value):
            call()
    else:
        assert call()[0] == {'x': math.inf if text == '1e400' else value}


def test_hook_passes_other_errors_on(run, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(sys, 'excepthook', lambda *e: seen.append(e))
    run()
    sys.excepthook(ValueError, ValueError('x'), None)
    sys.excepthook(UserError, UserError('a\nb'), None)
    assert [e[0] for e in seen] == [ValueError]
    assert capsys.readouterr().err == 'error: a b\n'


def test_require(tmp_path, monkeypatch):
    assert require('os.path', 'x') is os.path
    with pytest.raises(UserError, match='^the plot needs the package no_such: pip install no_such$'):
        require('no_such.module', 'the plot')
    (tmp_path / 'half_installed.py').write_text('import no_such')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match='no_such'):
        require('half_installed', 'the plot')


def test_as_a_process(run, tmp_path):
    """Exit code, stderr of one line, no traceback; from another folder, in the C locale without Python's UTF-8 mode."""
    run(x="start = 'ü'  # → ü", y='n_layer = 6  # ü\nlr = nope')
    env = {**os.environ, 'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0',
           'PYTHONPATH': os.path.dirname(configurator.__file__)}

    def process(*argv):
        with open(tmp_path / 'script.py', 'a') as f:
            f.write('print(ascii(start), n_layer)\n')
        return subprocess.run([sys.executable, '../script.py', *argv], env=env, capture_output=True, text=True)
    good = process('config/x.py', '--n_layer=3')
    assert (good.returncode, good.stdout, good.stderr) == (0, "'\\xfc' 3\n", '')
    bad = process('config/x.py', 'config/y.py')
    assert (bad.returncode, bad.stdout) == (1, '')
    assert bad.stderr == "error: config/y.py, line 2: NameError: name 'nope' is not defined\n"


class OutOfMemoryError(RuntimeError):
    __module__ = 'torch.cuda'


class BackendCompilerFailed(RuntimeError):
    __module__ = 'torch._dynamo.exc'


@pytest.mark.parametrize('error, text', [
    (OutOfMemoryError('CUDA out of memory. Tried\nto'), r'out of memory \(CUDA out of memory. Tried\): a smaller'),
    (RuntimeError("[] DefaultCPUAllocator: can't allocate memory: you tried"), r'out of memory .*recompute'),
    (BackendCompilerFailed('no g++'), r'torch\.compile failed here \(no g\+\+\): --compile=False'),
    (RuntimeError('[gloo/pair.cc] Connection closed by peer [127.0.0.1]:1'), 'another process of the job has ended'),
    (KeyboardInterrupt(), 'stopped by Ctrl-C'),
    (MemoryError(), None), (RuntimeError('shape'), None),
])
def test_what_a_machine_lacks_is_one_line(run, monkeypatch, capsys, error, text):
    seen = []
    monkeypatch.setattr(sys, 'excepthook', lambda *e: seen.append(e))
    run()
    sys.excepthook(type(error), error, None)
    err = capsys.readouterr().err
    assert len(seen) == (text is None) and err.count('\n') == (text is not None)
    assert text is None or re.match(f'error: {text}', err)


def test_torch_says_what_explain_looks_for():
    torch = pytest.importorskip('torch')
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert explain(error.value).startswith('out of memory')
    assert issubclass(torch.OutOfMemoryError, RuntimeError) and torch.OutOfMemoryError.__name__ == 'OutOfMemoryError'
