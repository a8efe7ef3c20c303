"""
nanoGPT's configuration made safe: the keys of a script are its own module-level assignments,

    # model
    n_layer = 12               # number of blocks
    norm = None                # normalisation; None = the preset's
    config, given = configure(globals(), choices=dict(norm=NORMS), positive=['n_layer'])

which config files (Python) and then the command line override: python train.py config/FILE.py --n_layer=6
A wrong key, type or choice stops the run with one line that says where it was written.
"""
import ast
import builtins
import difflib
import glob
import importlib
import io
import math
import os
import shutil
import sys
import textwrap
import tokenize
import traceback
from dataclasses import dataclass
from types import ModuleType


class UserError(Exception):
    """A mistake of the user, told in one line: a script that called configure() prints it without a traceback."""

    def __init__(self, text):
        super().__init__(' '.join(text.split()))  # a quoted value may hold newlines


def require(package, why):
    """Import and return an optional package; UserError if it is not installed."""
    root = package.split('.')[0]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as e:
        if e.name != root:
            raise  # it is there, but something that it needs is not: the traceback tells more than we could
        raise UserError(f'{why} needs the package {root}: pip install {root}') from None


def explain(error):
    """One line for what a machine lacks and torch finds out deep inside, None for any other error. By name: torch may
    not be imported, and its classes have moved."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    names = {f'{c.__module__}.{c.__name__}' for c in type(error).__mro__}
    if any(name.endswith('.OutOfMemoryError') for name in names) or "can't allocate memory" in str(error):
        return (f'out of memory ({first}): a smaller batch_size with more gradient_accumulation_steps computes the '
                'same in less, and so does recompute=True')
    if any(name.startswith(('torch._dynamo.exc.', 'torch._inductor.exc.')) for name in names):
        return f'torch.compile failed here ({first}): --compile=False does without'
    if 'Connection closed by peer' in str(error) or 'Connection reset by peer' in str(error):
        return f'another process of the job has ended; its own last line says why ({first})'
    if isinstance(error, KeyboardInterrupt):
        return 'stopped by Ctrl-C'
    return None


@dataclass
class Key:
    """One key of a script: its default, what --help says about it, and which values it takes."""
    name: str
    default: object
    section: str
    comment: str
    choices: object  # a container that may still grow: a config file may add a residual mode of its own
    positive: bool
    free: type | None = None  # of the values where the default is None and any value will do

    @property
    def kind(self):
        return self.free or type(next(iter(self.choices)) if self.default is None else self.default)

    @property
    def signed(self):
        return not self.positive and (self.default is None or self.default < 0)

    @property
    def rule(self):
        """The values that check() accepts, in words."""
        none = ' or None' if self.default is None else ''
        if self.choices:
            return 'one of ' + ', '.join(map(str, self.choices)) + none
        if self.kind in (int, float):
            sign = ' > 0' if self.positive else '' if self.signed else ' >= 0'
            return ('an integer' if self.kind is int else 'a number') + sign + none
        return 'True or False' if self.kind is bool else 'a string'

    def parse(self, text):
        """The value that a text of the command line stands for; the text itself, which check() refuses, if for none."""
        if text == 'None' and self.default is None and 'None' not in self.choices:
            return None
        if self.kind is bool:
            return {'true': True, 'false': False}.get(text.lower(), text)
        for number in (int, float) if self.kind in (int, float) else ():  # int first: 2**53 + 1 is no float
            try:
                return number(text)
            except ValueError:
                pass
        return text

    def check(self, value, where):
        """The value as a plain bool, int, float, str or None; UserError, beginning with `where`, if it does not fit."""
        if value is None and self.default is None:
            return None
        if self.kind in (int, float):
            fits = (isinstance(value, (int, float)) and not isinstance(value, bool)
                    and (abs(value) <= sys.float_info.max or abs(value) == math.inf and self.kind is float)  # not nan
                    and (self.kind is float or value == int(value) and abs(value) < 2**63)
                    and (self.signed or value > 0 or value == 0 and not self.positive))
        else:
            fits = isinstance(value, self.kind)
        if fits and (not self.choices or value in self.choices):
            return self.kind(value)
        raise UserError(f'{where}: {self.name} must be {self.rule}{did_you_mean(value, self.choices)}')


def did_you_mean(word, words):
    """'; did you mean X?' with the nearest of words, '' if none is near."""
    words = {str(w).lower(): w for w in words}
    near = difflib.get_close_matches(str(word).lower(), words, 1)
    return f'; did you mean {words[near[0]]}?' if near else ''


def read_keys(path, choices, positive):
    """name -> Key for the assignments `name = literal  # comment` of a script that stand above its configure() call.
    The section of a key is the last comment line at column 0 above it."""
    with tokenize.open(path) as f:
        source = f.read()
    trailing, alone = {}, {}  # line number -> (column, text) of the comments behind code, and without
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            comments = trailing if token.line[:column].strip() else alone
            comments[line] = column, token.string.lstrip('#').strip()

    keys, section, end = {}, '', 0
    for node in ast.parse(source).body:
        calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        if any('configure' in (getattr(f, 'id', ''), getattr(f, 'attr', '')) for f in calls):
            break
        for line in range(end + 1, node.lineno):
            column, text = alone.get(line, (0, ''))
            if column == 0 and text.strip('-= '):  # not a ruler
                section = text.strip('-= ')
        end = node.end_lineno
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(bool() | int() | float() | str() | None)
                            | ast.UnaryOp(ast.USub(), ast.Constant(int() | float()))) if not name.startswith('_'):
                default = ast.literal_eval(node.value)
            case _:
                section = section if keys else ''  # a comment above the imports is no heading
                continue
        if default is None and name not in choices:
            raise ValueError(f'{path}, line {node.lineno}: {name} = None needs choices, or a type')
        column, comment = trailing.get(end, (0, ''))
        line = end + 1
        while comment and line in alone and alone[line][0] == column:  # the comment runs over
            comment += ' ' + alone[line][1]
            line += 1
        values = choices.get(name, ())
        free = values if isinstance(values, type) else None
        keys[name] = Key(name, default, section, comment, () if free else values, name in positive, free)
    if strays := {*choices, *positive} - {*keys}:
        raise ValueError(f'{path}: choices or positive hold what is no key: {", ".join(sorted(strays))}')
    return keys


def print_help(script, keys):
    """The keys by section, with default, type, comment and choices, wrapped to the width of the terminal."""
    print(f'usage: python {os.path.basename(script)} [config/FILE.py ...] [--key=value ...]')
    left = {k.name: f'  --{k.name}={k.default!r} ' for k in keys.values()}
    column = min(max(map(len, left.values()), default=0), 32)
    width = max(shutil.get_terminal_size().columns, column + 30)
    section = None
    for k in keys.values():
        if k.section != section:
            section = k.section
            print(f'\n{section}' if section else '')
        text = f'{k.kind.__name__:5} {k.comment}' + (f' ({k.rule})' if k.choices else '')
        print(textwrap.fill(text.rstrip(), width, initial_indent=left[k.name].ljust(column),
                            subsequent_indent=' ' * (column + 6), break_long_words=False, break_on_hyphens=False))


def run_file(word, path, values):
    """Execute the config file `path`, which the user wrote as `word`; returns the names that it assigns -> values."""
    # The current values stand among the builtins: the file reads them anywhere (learning_rate = learning_rate / 10),
    # while what it assigns, be it the old value once more, ends up in `scope`.
    scope = {'__builtins__': {**vars(builtins), **values}, '__file__': path}
    try:
        with open(path, 'rb') as f:
            exec(compile(f.read(), path, 'exec'), scope)  # bytes: Python's own rule, UTF-8 whatever the locale
    except (Exception, SystemExit) as e:  # whatever it is, it is the file's
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        line = lines[-1] if lines else getattr(e, 'lineno', None)
        text = e.msg if isinstance(e, SyntaxError) else e
        raise UserError(f'{word}{f", line {line}" if line else ""}: {type(e).__name__}: {text}') from None
    return {name: value for name, value in scope.items() if name in values
            or not (name.startswith('_') or name.isupper() or isinstance(value, ModuleType) or callable(value))}


def configure(namespace, choices={}, positive=(), renamed={}, argv=None):
    """
    Set the keys of a script from config files and the command line. A script calls it once, below its keys.
        namespace: globals() of the script; the values are written back into it
        choices:   key -> the values it may take, or their type; a key may have the default None only if it stands here
        positive:  keys that must be > 0; other numbers must be >= 0 unless their default is negative
        renamed:   a name that users may know from elsewhere -> what to do instead, a clause
        argv:      words of the command line: config files, applied in order, then every --key=value, which win
    Returns (config, given): key -> value in the order of the script, and the set of keys that a file or the line set.
    Raises UserError; also makes every UserError of the script end it with one line on stderr and exit code 1.
    """
    previous_hook = sys.excepthook

    def hook(kind, error, trace):
        text = error if isinstance(error, UserError) else explain(error)
        if text:
            print(f'error: {text}', file=sys.stderr)
        elif isinstance(error, BrokenPipeError):  # `train.py --help | head`: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            previous_hook(kind, error, trace)
    sys.excepthook = hook

    script = namespace['__file__']
    keys = read_keys(script, choices, positive)
    argv = sys.argv[1:] if argv is None else argv
    if '--help' in argv or '-h' in argv:
        print_help(script, keys)
        sys.exit(0)

    def find(name, where):
        if name in keys:
            return keys[name]
        if name in renamed:
            raise UserError(f'{where}: there is no key {name}, {renamed[name]}')
        raise UserError(f'{where}: there is no key {name}{did_you_mean(name, keys) or "; --help lists the keys"}')

    folder = os.path.dirname(script)
    files, settings = [], []
    for word, following in zip(argv, [*argv[1:], '--']):
        dashes = len(word) - len(word.lstrip('-'))
        name, equals, text = word[dashes:].partition('=')
        paths = [p for p in (word, os.path.join(folder, word)) if p.endswith('.py') and os.path.isfile(p)]
        if dashes == 2 and equals:
            settings.append((find(name, word), text, word))
        elif paths:
            files.append((word, paths[0]))
        elif dashes and name or name in keys:  # --key value, --key, -key=value, key=value
            key = find(name, word)
            if not equals:
                text = 'VALUE' if following.startswith('--') or following.endswith('.py') else following
                if key.kind is bool and not isinstance(key.parse(text), bool):
                    text = 'True'
            raise UserError(f'{word}: a key is set by --key=value: write --{name}={text}')
        else:
            near = did_you_mean(word, glob.glob('config/*.py', root_dir=folder))
            raise UserError(f'{word}: neither a config file (FILE.py) that exists nor --key=value{near}')

    config, given = {name: key.default for name, key in keys.items()}, set()
    for word, path in files:
        for name, value in run_file(word, path, config).items():
            where = f'{word}: {name} = {repr(value)[:60]}'
            config[name] = find(name, where).check(value, where)
            given.add(name)
    for key, text, word in settings:
        config[key.name] = key.check(key.parse(text), word)
        given.add(key.name)
    namespace.update(config)
    return config, given
