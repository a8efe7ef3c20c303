"""Results of evaluate.py beside the papers' own numbers (papers.json): what `evaluate.py --compare DIR DIR` prints."""
import json
import math
import os

from configurator import UserError

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'papers.json'), encoding='utf-8') as f:
    # presets: column of a table -> task, shots, metric (and the filter of the answer, where the harness has several)
    # tables: columns, our mode -> the paper's row, and the rows; everything in percent but perplexities
    PAPERS = json.load(f)


def format_table(rows):
    """Lines of a table whose first row is the heading; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in
                               enumerate(zip(row, widths))).rstrip() for row in rows)


def read_results(folder):
    """The last line of a folder's results.jsonl, but with the tasks of all lines: of several evaluations of a task with
    the same shots the one with the most examples, of equals the newest. `tasks` is (task, shots) -> entry."""
    path = os.path.join(os.path.expanduser(folder), 'results.jsonl')
    try:
        with open(path, encoding='utf-8') as f:
            lines = [json.loads(line) for line in f]
        last = lines[-1]
        lines = [line for line in lines if line['weights_sha256'] == last['weights_sha256']]  # of this model
        tasks = {}
        for line in lines:
            for entry in line['tasks']:
                key = entry['task'], entry['shots']
                if key not in tasks or entry['n'] >= tasks[key]['n']:
                    tasks[key] = entry
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise UserError(f'{path}: no results to compare ({type(e).__name__}: {e}); '
                        f'python evaluate.py {folder} --tasks=paper_sr makes some') from None
    return {**last, 'tasks': tasks}


def columns_of(preset, results):
    """column -> (value, standard error or None, n, of), percent or perplexity, for what has been measured."""
    found = {}
    for column, (task, shots, metric) in PAPERS['presets'][preset]['columns'].items():
        entry = results['tasks'].get((task, shots), {'metrics': {}})
        if metric in entry['metrics']:
            scale = 1 if 'perplexity' in metric else 100
            value, error = entry['metrics'][metric]
            found[column] = scale * value, error and scale * error, entry['n'], entry['of']
    return found


def compare(folders, table=None):
    """
    The text of --compare. A difference is in standard errors of a difference: ours, and for the paper the one that a
    model with our score has on all the examples of the task, since papers print none.
    """
    runs = [(folder, read_results(folder)) for folder in folders]
    parts, partial = [], set()
    for name in [table] if table else PAPERS['tables']:
        paper = PAPERS['tables'][name]
        ours = [(folder, results, columns_of(paper['preset'], results)) for folder, results in runs]
        columns = [c for c in paper['columns'] if any(c in found for _, _, found in ours)]
        if not columns:
            continue
        rows = [['', *columns]]
        for folder, results, found in ours:
            cells, differences = [], []
            row = paper['rows'].get(paper['modes'].get(results['residual']))
            for column in columns:
                value, error, n, of = found.get(column, (None, None, 0, 0))
                mark = '*' if n < of else ''
                partial |= {(folder, column, n, of)} if mark else set()
                cells.append('' if value is None else f'{value:.2f}' + (f' ± {error:.2f}' if error else '') + mark)
                theirs = row and row[paper['columns'].index(column)]
                differences.append(f'{(value - theirs) / (error * math.sqrt(1 + n / of)):+.1f} se' if row and error else
                                   f'{value - theirs:+.2f}' if row and value is not None else '')
            rows.append([f'{folder} ({results["residual"]}, {results["parameters"] / 1e6:.1f}M)', *cells])
            if row:
                rows.append([f'  against {paper["modes"][results["residual"]]}', *differences])
        rows += [[label, *(f'{values[paper["columns"].index(c)]:.2f}' for c in columns)]
                 for label, values in paper['rows'].items()]
        parts.append(f'{name}: {paper["title"]}\n{format_table(rows)}')
    if not parts:
        have = ', '.join(sorted({f'{task} ({shots} shots)' for _, results in runs for task, shots in results['tasks']}))
        raise UserError(f'compare: {", ".join(folders)} have nothing that {table or "a paper"} has too, only {have}; '
                        'run --tasks=paper_sr, paper_s2 or paper_pe first')
    notes = [f'* {folder}: {column} on the first {n} of {of} examples' for folder, column, n, of in sorted(partial)]
    return '\n\n'.join([*parts, *(['\n'.join(notes)] if notes else [])])
