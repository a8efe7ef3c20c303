"""
The README's table and picture from the runs in a folder of MODE-SEED folders: python docs/modes.py out-modes

Prints a line a mode: mean of the last validation loss over the seeds, its standard error, the range. Draws modes.png
beside this file.
"""
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use('agg')
import matplotlib.pyplot as plt  # noqa: E402

curves = defaultdict(list)  # mode -> one {step: validation loss} a seed
for path in sorted(Path(sys.argv[1]).glob('*/metrics.jsonl')):
    lines = map(json.loads, path.read_text(encoding='utf-8').splitlines())
    curves[path.parent.name.rpartition('-')[0]].append({x['step']: x['val_loss'] for x in lines if 'val_loss' in x})

final = {mode: [run[max(run)] for run in runs] for mode, runs in curves.items()}
order = sorted(final, key=lambda mode: statistics.mean(final[mode]))
figure, axes = plt.subplots(figsize=(9, 5), layout='constrained')
colors, dashes = plt.get_cmap('tab10'), ('-', '--', ':')
for i, mode in enumerate(order):
    losses, n = final[mode], len(final[mode])
    error = statistics.stdev(losses) / n**0.5 if n > 1 else float('nan')
    print(f'{mode:14} {statistics.mean(losses):.3f} ± {error:.3f}   {min(losses):.3f} to {max(losses):.3f}   {n} seeds')
    steps = sorted(curves[mode][0])
    mean = [statistics.mean(run[step] for run in curves[mode]) for step in steps]
    axes.plot(steps[1:], mean[1:], color=colors(i % 8), linestyle=dashes[i // 8], label=f'{mode} {mean[-1]:.3f}')
axes.set(xlabel='step', ylabel='validation loss (nats per character)',
         title='All modes at one learning rate, not a ranking')
axes.legend(fontsize='small', loc='center left', bbox_to_anchor=(1, 0.5), title='final, mean over seeds')
axes.grid(alpha=0.3)
figure.savefig(Path(__file__).with_name('modes.png'), dpi=110)
