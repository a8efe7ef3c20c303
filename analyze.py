"""
What a residual stream does: the papers' figures, from any checkpoint.

    python analyze.py OUT_DIR                    pictures and analysis.json in OUT_DIR/analysis
    python analyze.py OUT_DIR OUT_DIR ...        several runs in the same pictures, in the first one's folder
    python analyze.py gpt2 --dataset=openwebtext --samples=64 --device=cuda

OUT_DIR is the folder of a run (its ckpt.pt), a checkpoint file, gpt2 (-medium, -large, -xl) or a folder of
transformers' save_pretrained. A sub-layer is an attention or an MLP with its connection; they count from 1 to L.

    stream.png     norm of the stream, cosine of its states before and after a sub-layer, kurtosis, largest activation
    blocks.png     loss when a block is skipped; attention on the first token
    jacobian.png   singular values of d(stream after)/d(stream before) for a token, of each sub-layer and through depth;
                   on spheres with the bounds of [SR], Prop. 6
    sphere.png     angle, step size alpha, angular budget                                         sphere modes
    mixing.png     what H_res does: [S2], Figs. 2, 3, 5, 7                                        hyper-connections
    matrices.png   H_res at some depths and its product, with row and column sums: [S2], Figs. 9, 12
    entries.png    histogram of the entries of H_res: [S2], Fig. 10

The table that is printed: the loss, what skipping the cheapest block adds to it, the largest singular value of a
sub-layer's Jacobian and of the Jacobian through depth, and the largest attention on the first token, of a block.

[SR] is "Sphere Retraction Normalizations", arXiv 2608.02668, and [S2] "Spectral-Sphere-Constrained Hyper-Connections",
arXiv 2603.20896.
"""
import contextlib
import itertools
import json
import math
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import kernels
from checkpoint import DTYPES, open_model, pick_device
from configurator import UserError, configure, require
from data.common import replace_file
from dataloader import Windows, find_dataset, open_dataset, read_meta
from hyperconn import helmert
from model import Hyper, Sphere

# -----------------------------------------------------------------------------
# what to look at
runs = 'out'        # folders, files or gpt2, with commas between them; the words without dashes are this key
out_dir = ''        # of the pictures and analysis.json; empty = the folder `analysis` of the first run
dataset = ''        # whose validation split is read; empty = that of each run
samples = 1024      # windows of block_size tokens, spread over the split; a token of each is looked at
jacobians = 4       # windows whose last token's Jacobian is taken; 0 = none
smallest = True     # the smallest singular values too, from whole Jacobians; False = the largest alone, by a power
                    # iteration, for a stream of more than 1000 numbers
# how
seed = 1337         # of the tokens that are looked at
device = 'auto'     # cpu, cuda, cuda:N, mps; auto = the best that there is
dtype = 'float64'   # float32 is faster, and enough but for Jacobians through many sub-layers
# -----------------------------------------------------------------------------

# -----------------------------------------------------------------------------
# looking into a model


def connections(model):
    """[(connection, the branch that it joins)], one a sub-layer."""
    return [sub for block in model.transformer.h
            for sub in ((block.res_1, block.branch_1), (block.res_2, block.branch_2))]


@contextlib.contextmanager
def hooks(modules, see):
    """Calls see(i, arguments, result) after each forward pass of modules[i]."""
    handles = [module.register_forward_hook(lambda module, args, out, i=i: see(i, args, out))
               for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def token(x, at):
    """x (B, T, ...), at (B,) -> (B, ...), a token of each row."""
    return x[torch.arange(len(x), device=x.device), at]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def cosine(x, y):
    """Along the last axis; from the distance of the unit vectors, which keeps the digits that 1 - cos has."""
    return 1 - (unit(x) - unit(y)).square().sum(-1) / 2


def stream_statistics(x):
    """Of tokens (N, D): norm, kurtosis (3 for a Gaussian) and largest over median absolute entry; each (N,)."""
    centred = x - x.mean(-1, keepdim=True)
    kurtosis = centred.pow(4).mean(-1) / centred.square().mean(-1).square()
    return {'norm': x.norm(dim=-1), 'kurtosis': kurtosis, 'peak': x.abs().amax(-1) / x.abs().median(-1).values}


def pairwise_cosine(X):
    """Mean cosine of the n(n-1)/2 pairs of streams: (N, n, C) -> (N,)"""
    n = X.shape[-2]
    gram = unit(X) @ unit(X).mT                                             # (N, n, n)
    return (gram.sum((-2, -1)) - n) / (n * (n - 1))


def first_token_attention(attn, qkv, at):
    """
    Share of its attention that the token at[b] of each row pays to the first one, mean over the heads: (B,).
    qkv (B, T, 3 C), what attn.c_attn gives.
    """
    B, T, _ = qkv.shape
    q, k, _ = qkv.view(B, T, 3, attn.n_head, -1).permute(2, 0, 3, 1, 4)     # (B, H, T, C/H)
    scores = (token(q.transpose(1, 2), at)[:, :, None] @ k.mT)[:, :, 0] / math.sqrt(q.shape[-1])  # (B, H, T)
    later = torch.arange(T, device=qkv.device) > at[:, None]
    return scores.masked_fill(later[:, None], -math.inf).softmax(-1)[..., 0].mean(-1)


@torch.no_grad()
def look(model, idx, at):
    """
    What the token at[b] of each row of idx (B, T) meets: name -> (B, L, ...), by sub-layer, or (B, n_layer) for
    first_token. H_res (B, L, n, n) and the mean cosine of the streams before and after it with hyper-connections only,
    angle with spheres only.
    """
    subs, rows = connections(model), {}
    attns = [block.attn for block in model.transformer.h]

    def keep(name, value):
        rows.setdefault(name, []).append(value.double().cpu())

    def see_stream(i, args, out):
        before, after = (token(state, at).flatten(1) for state in (args[0], out))       # (B, n C)
        for name, value in stream_statistics(after).items():
            keep(name, value)
        keep('cosine', cosine(before, after))
        if isinstance(subs[i][0], Sphere):
            keep('angle', 2 * ((unit(before) - unit(after)).norm(dim=-1) / 2).asin())

    def see_matrices(i, args, out):
        X = token(args[0], at)                                                          # (B, n, C)
        H = torch.eye(X.shape[1]).to(X).expand(len(X), -1, -1) if out[2] is None else token(out[2], at)
        keep('H_res', H)
        keep('streams', pairwise_cosine(X))
        keep('mixed', pairwise_cosine(H.to(X) @ X))

    def see_attention(i, args, out):
        keep('first_token', first_token_attention(attns[i], out, at))

    with (hooks([res for res, _ in subs], see_stream),
          hooks([res.mapping for res, _ in subs if isinstance(res, Hyper)], see_matrices),
          hooks([attn.c_attn for attn in attns], see_attention)):
        model(idx)
    return {name: torch.stack(values, 1) for name, values in rows.items()}


@torch.no_grad()
def skipping(model, batches):
    """Mean loss in nats with all blocks, and the list of what it is without the first, the second ... block."""
    blocks, total, count = model.transformer.h, np.zeros(len(model.transformer.h) + 1), 0
    for x, y in batches:
        states = []
        with hooks(blocks, lambda i, args, out, states=states: states.append(args[0])):
            losses = [model(x, y)[1].item()]
        for block, state in zip(blocks, states):
            block.forward = lambda x, state=state: state  # what came before it is known, and it adds nothing
            losses.append(model(x, y)[1].item())
        for block in blocks:
            del block.forward
        total, count = total + np.array(losses) * len(x), count + len(x)
    loss, *without = (total / count).tolist()
    return loss, without


# -----------------------------------------------------------------------------
# Jacobians. In a causal model the tokens before one do not depend on it, and those after it do not matter to it: with
# their keys and values kept, a sub-layer is a function of the one token, and through depth these functions follow each
# other. Many copies of the token, as a batch, then cost no more than so many tokens.


def attend_last(attn, k, v):
    """The forward of attn for tokens (N, 1, C) that all come after the same ones, whose k, v (H, T, C/H) are kept."""
    def forward(x):
        q, own_k, own_v = attn.c_attn(x).view(len(x), 3, attn.n_head, -1).unbind(1)     # (N, H, C/H)
        scores = torch.cat((torch.einsum('nhd,htd->nht', q, k), (q * own_k).sum(-1, keepdim=True)), -1)
        share = (scores / math.sqrt(q.shape[-1])).softmax(-1)                           # (N, H, T+1)
        y = torch.einsum('nht,htd->nhd', share[..., :-1], v) + share[..., -1:] * own_v
        return attn.c_proj(y.flatten(1)[:, None])                                       # (N, 1, C)
    return forward


@contextlib.contextmanager
def last_token(model, window):
    """
    Within it model's attentions see the tokens of window (T,) but the last, and take any number of last ones. Gives
    (functions, states): what the sub-layers do to the stream (N, 1, ...) of a last token, and its own L+1 states.
    """
    subs, attns, kept, states = connections(model), [block.attn for block in model.transformer.h], [], []

    def keep(i, args, out):
        _, k, v = out[0, :-1].view(-1, 3, attns[i].n_head, out.shape[-1] // 3 // attns[i].n_head).permute(1, 2, 0, 3)
        kept.append((k, v))                                                             # (H, T-1, C/H)

    with (torch.no_grad(), hooks([attn.c_attn for attn in attns], keep),
          hooks([res for res, _ in subs], lambda i, args, out: states.extend((args[0], out)[0 if i == 0 else 1:]))):
        model(window[None])
    for attn, (k, v) in zip(attns, kept):
        attn.forward = attend_last(attn, k, v)
    try:
        yield [partial(res, branch=branch) for res, branch in subs], [x[:, -1:] for x in states]
    finally:
        for attn in attns:
            del attn.forward


def jacobian(f, x):
    """The whole Jacobian (D', D) of f at x (1, 1, ...), of D numbers: row j is the gradient of the j-th of f(x)."""
    D = f(x).numel()
    copies = x.detach().expand(D, *x.shape[1:]).clone().requires_grad_()
    out = f(copies)
    eye = torch.eye(D, dtype=out.dtype, device=out.device).view_as(out)
    return torch.autograd.grad(out, copies, eye)[0].reshape(D, -1)


def largest_singular_value(f, x, tolerance=1e-7, seed=0):
    """
    Of the Jacobian of f at x, from products with it (jvp) and its transpose (vjp) alone. Golub and Kahan's form of the
    power iteration, which keeps every vector: a bidiagonal matrix whose largest singular value converges far sooner.
    jvp is the gradient of vjp, which is linear in its vector.
    """
    x = x.detach().requires_grad_()
    out = f(x)
    probe = torch.zeros_like(out, requires_grad=True)
    pulled, = torch.autograd.grad(out, x, probe, create_graph=True)

    def vjp(u):
        return torch.autograd.grad(out, x, u.view_as(out), retain_graph=True)[0].flatten()

    def jvp(v):
        return torch.autograd.grad(pulled, probe, v.view_as(x), retain_graph=True)[0].flatten()

    def orthogonal(w, to):
        for _ in range(2):
            for q in to:
                w = w - (q @ w) * q
        return w

    v = torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x)
    right, left, alphas, betas, best = [v / v.norm()], [], [], [], 0.0
    while True:
        u = orthogonal(jvp(right[-1]), left)
        alphas.append(u.norm().item())
        if alphas[-1] <= 1e-14 * best or alphas[-1] == 0:  # nothing is left that the vectors do not span
            return best
        left.append(u / alphas[-1])
        w = orthogonal(vjp(left[-1]), right)
        betas.append(w.norm().item())
        size, before = len(alphas), best
        bidiagonal = np.eye(size, size + 1) * np.array(alphas)[:, None] + np.diag(betas, 1)[:size]
        best = float(np.linalg.svd(bidiagonal, compute_uv=False)[0])
        if betas[-1] <= 1e-14 * best or size > 2 and best - before <= tolerance * best:
            return best
        right.append(w / betas[-1])


def through(functions):
    """x -> the last of functions of ... of the first of them of x."""
    def f(x):
        for function in functions:
            x = function(x)
        return x
    return f


def sphere_bounds(res, branch, h):
    """
    (upper, lower) of the singular values of a sphere's update of a token h (1, 1, C), [SR], Prop. 6: 1 + D and
    max(0, |cos theta| - D) with D = alpha (2 ||B|| + eta), B = dF/dh - c I, c = h.F/r^2, eta = s/r.
    """
    with torch.no_grad():
        f, out = branch(h), res(h, branch)
        c = (h * f).sum() / h.square().sum()
        eta = ((f - c * h).norm() / h.norm()).item()
        alpha = float(res.decay * res.step().detach())
        cos = cosine(h, out).item()
    D = alpha * (2 * largest_singular_value(lambda x: branch(x) - c * x, h) + eta)
    return 1 + D, max(0.0, abs(cos) - D)


def singular_values(functions, states, smallest):
    """What jacobians_of gives, at one token: a dict a sub-layer."""
    rows, product = [], None
    for l, (f, x) in enumerate(zip(functions, states)):
        if smallest:
            J = jacobian(f, x)
            product = J if product is None else J @ product
            own, all_of = torch.linalg.svdvals(J), torch.linalg.svdvals(product)
            row = {'largest': own[0].item(), 'smallest': own[-1].item(),
                   'largest_through': all_of[0].item(), 'smallest_through': all_of[-1].item()}
        else:
            row = {'largest': largest_singular_value(f, x),
                   'largest_through': largest_singular_value(through(functions[:l + 1]), states[0])}
        if isinstance(f.func, Sphere):
            row['upper'], row['lower'] = sphere_bounds(f.func, f.keywords['branch'], x)
        rows.append(row)
    return rows


def jacobians_of(model, windows, smallest):
    """
    At the last token of each of windows (W, T): name -> (W, L). `largest` and `smallest` singular value of each
    sub-layer's Jacobian, `largest_through` and `smallest_through` of that of all up to it; on spheres `upper`, `lower`,
    `upper_through` and `lower_through`, the bounds of [SR], Prop. 6: exp(sum of D) and the product of the lower ones.
    """
    tokens = []
    with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
        for window in tqdm(windows, desc='Jacobians', disable=None):
            with last_token(model, window) as (functions, states):
                tokens.append(singular_values(functions, states, smallest))
    found = {name: np.array([[row[name] for row in rows] for rows in tokens]) for name in tokens[0][0]}
    if 'upper' in found:
        found |= {'upper_through': np.exp(np.cumsum(found['upper'] - 1, 1)), 'lower_through': found['lower'].cumprod(1)}
    return found


# -----------------------------------------------------------------------------
# numbers


def matrix_statistics(H):
    """
    Of H_res (N, L, n, n), float64, by sub-layer; `through` is of the product H_l ... H_1 up to a sub-layer. Row maxima
    and singular values are medians over tokens (and rows), the other numbers means.
    """
    N, L, n, _ = H.shape
    products = [H[:, 0]]
    for l in range(1, L):
        products.append(H[:, l] @ products[-1])                             # X' = H X: the later one on the left
    P, Z, eye = torch.stack(products, 1), helmert(n), torch.eye(n, dtype=H.dtype)

    def off(M, dim):
        return (M.sum(dim) - 1).abs().amax(-1).mean(0).tolist()

    return {
        'row_maximum': H.amax(-1).transpose(0, 1).flatten(1).median(-1).values.tolist(),
        'on_diagonal': (H.argmax(-1) == torch.arange(n)).double().mean((0, 2)).tolist(),
        'from_identity': torch.linalg.matrix_norm(H - eye).mean(0).tolist(),
        'off_mean': torch.linalg.svdvals(Z.T @ H @ Z).median(0).values.tolist(),          # (L, n-1)
        'row_sums_off': off(H, -1), 'row_sums_off_through': off(P, -1),
        'column_sums_off': off(H, -2), 'column_sums_off_through': off(P, -2),
        'norm_through': torch.linalg.matrix_norm(P, 2).mean(0).tolist(),
        'mean': H.mean(0).tolist(), 'product': P[:, -1].mean(0).tolist(),
    }


def dyadic(angles):
    """{'m-2m-1': sum of theta^2 over these sub-layers} for m = 1, 2, 4 ...; the last interval may be cut short. [SR]"""
    budget, m = {}, 1
    while m <= len(angles):
        budget[f'{m}-{min(2 * m - 1, len(angles))}'] = sum(theta * theta for theta in angles[m - 1:2 * m - 1])
        m *= 2
    return budget


def by_sublayer(values):
    """(N, L) -> the quartiles over the tokens, by sub-layer; what the pictures draw is the median and the band."""
    low, median, high = np.quantile(np.asarray(values), (0.25, 0.5, 0.75), axis=0).tolist()
    return {'low': low, 'median': median, 'high': high}


def analyze(path):
    """What analysis.json has about a run, and the entries of its H_res (N, L, n, n), or None."""
    model, identity, checkpoint = open_model(path, dataset)
    folder = find_dataset(dataset or (checkpoint.get('config') or {}).get('dataset') or 'openwebtext')
    meta, T = read_meta(folder), model.config.block_size
    if meta['tokenizer'] != identity:
        raise UserError(f'dataset = {folder}: has another tokenizer or vocabulary than {path}: take the data of its '
                        'training')
    windows = Windows(open_dataset(folder, meta, T)['val'], T)
    model.to(place, DTYPES[dtype]).eval()
    chosen = np.linspace(0, windows.total - 1, min(samples, windows.total)).astype(int)
    size = max(1, min(2**14, 2**27 // model.config.vocab_size) // T)  # windows at once: their logits are 1 GB at most
    batches = [tuple(t.to(place) for t in windows.read(*windows.locate(part))) for part in
               np.split(chosen, range(size, len(chosen), size))]

    at = np.random.default_rng(seed).integers(T // 2, T, len(chosen))  # of the second half: with something before them
    places = torch.as_tensor(at).to(place).split(size)
    parts = [look(model, x, at) for (x, _), at in zip(batches, places)]
    seen = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    H = seen.pop('H_res', None)
    loss, without = skipping(model, batches)
    if not math.isfinite(loss):
        raise UserError(f'{path}: its loss is {loss}: the weights are ruined, take an earlier checkpoint')
    result = {'path': path, 'residual': model.config.residual, 'step': checkpoint.get('iter_num'), 'data': folder,
              'tokens': len(chosen), 'sublayers': 2 * model.config.n_layer, 'loss': loss, 'loss_without_block': without,
              'uniform_attention': (1 / (at + 1)).mean(),
              **{name: by_sublayer(values) for name, values in seen.items()}}
    if 'angle' in seen:
        steps = [res for res, _ in connections(model)]
        result |= {'alpha': [float(res.decay * res.step().detach()) for res in steps],
                   'on_bound': [bool(res.step.on_bound()) for res in steps],
                   'radius': float(model.transformer.open.radius().detach()),
                   'angular_budget': dyadic(seen['angle'].mean(0).tolist())}
    if H is not None:
        result['H_res'] = matrix_statistics(H)
    if jacobians:
        last = torch.cat([x for x, _ in batches])[:: max(1, len(chosen) // jacobians)][:jacobians]
        result |= {name: by_sublayer(values) for name, values in jacobians_of(model, last, smallest).items()}
    return result, H


# -----------------------------------------------------------------------------
# pictures: made to be read at half their size, by colour-blind readers too

STYLES = [dict(color=color, linestyle=line) for line in ('-', '--', ':')
          for color in ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000')]  # Okabe and Ito


def panels(name, titles):
    """A figure of two columns, its axes, and a function that saves it."""
    rows = -(-len(titles) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(13, 4.6 * rows), layout='constrained', squeeze=False)
    for axis, title in zip(axes.flat, titles):
        axis.set_title(title)
        axis.set_xlabel('sub-layer')
        axis.xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
    for axis in axes.flat[len(titles):]:
        axis.set_visible(False)

    def save():
        handles, labels = axes[0, 0].get_legend_handles_labels()
        if len(labels) > 1:
            columns = max(1, min(len(labels), 100 // max(map(len, labels))))
            figure.legend(handles, labels, loc='outside lower center', ncols=columns)
        replace_file(os.path.join(out_dir, name), lambda aside: figure.savefig(aside, dpi=100, format='png'))
        pyplot.close(figure)
    return list(axes.flat), save


def draw(axis, found, key, dashed=None, **more):
    """A line a run: its by_sublayer() entry, or a plain list; `dashed` is a second entry, of the same colour."""
    for label, result in found.items():
        style = styles[label]
        for entry, thin in ((result.get(key), False), (dashed and result.get(dashed), True)):
            if entry is None:
                continue
            middle = entry['median'] if isinstance(entry, dict) else entry
            x = range(1, len(middle) + 1)
            axis.plot(x, middle, **{**style, **(dict(linestyle='--', linewidth=1) if thin else dict(label=label))})
            if isinstance(entry, dict) and not thin:
                axis.fill_between(x, entry['low'], entry['high'], color=style['color'], alpha=0.15, linewidth=0)
    axis.set(**more)


def draw_stream(found):
    axes, save = panels('stream.png', ['norm of the stream after each sub-layer', 'cosine of it before and after',
                                       'kurtosis of it (Gaussian: 3)', 'its largest over its median entry'])
    for axis, key, scale in zip(axes, ('norm', 'cosine', 'kurtosis', 'peak'), ('log', 'linear', 'log', 'log')):
        draw(axis, found, key, yscale=scale)
    save()


def draw_blocks(found):
    axes, save = panels('blocks.png', ['loss when a block is skipped, minus the loss', 'attention on the first token'])
    rows = {label: {**r, 'cost': [max(loss - r['loss'], 1e-5) for loss in r['loss_without_block']],
                    'even': [r['uniform_attention']] * len(r['loss_without_block'])} for label, r in found.items()}
    draw(axes[0], rows, 'cost', xlabel='block', ylabel='nats per token, 1e-5 and less at the bottom', yscale='log')
    draw(axes[1], rows, 'first_token', dashed='even', xlabel='block', ylabel='share; dashed: if it were even')
    save()


def draw_jacobian(found):
    which = [('largest', 'upper'), ('smallest', 'lower'), ('largest_through', 'upper_through'),
             ('smallest_through', 'lower_through')]
    which = [pair for pair in which if any(pair[0] in result for result in found.values())]
    titles = {'largest': 'largest singular value, each sub-layer', 'smallest': 'smallest, each sub-layer',
              'largest_through': 'largest, from the first on', 'smallest_through': 'smallest, from the first on'}
    axes, save = panels('jacobian.png', [titles[key] for key, _ in which])
    for axis, (key, bound) in zip(axes, which):
        bounds = any(bound in result for result in found.values())
        draw(axis, found, key, dashed=bound, yscale='log', ylabel='dashed: bound of [SR], Prop. 6' if bounds else '')
    save()


def draw_sphere(found):
    axes, save = panels('sphere.png', ['angle of each sub-layer', 'step size alpha; dots: on its upper bound',
                                       'angular budget'])
    draw(axes[0], found, 'angle', ylabel='radians')
    draw(axes[1], found, 'alpha', yscale='log')
    for n, (label, result) in enumerate(found.items()):
        color, budget = styles[label]['color'], result['angular_budget']
        held = [(l + 1, alpha) for l, alpha in enumerate(result['alpha']) if result['on_bound'][l]]
        axes[1].scatter(*zip(*held or [((), ())]), color=color, s=25)
        axes[2].bar(np.arange(len(budget)) + 0.8 * n / len(found), budget.values(), 0.8 / len(found), align='edge',
                    color=color)
    longest = max((result['angular_budget'] for result in found.values()), key=len)
    axes[2].set(xticks=np.arange(len(longest)) + 0.4, xticklabels=[*longest], xlabel='sub-layers',
                ylabel='sum of squared angles')
    save()


def draw_mixing(found):
    axes, save = panels('mixing.png', [
        'median of the largest entry of a row', 'share of rows with it on the diagonal',
        'mean cosine of the streams after H_res', 'singular values of H_res off the mean',
        'furthest column sum from 1', 'spectral norm of the product so far'])
    rows = {label: {**result, **result['H_res']} for label, result in found.items()}
    draw(axes[0], rows, 'row_maximum')
    draw(axes[1], rows, 'on_diagonal')
    draw(axes[2], rows, 'mixed', dashed='streams', ylabel='dashed: before it')
    for i in range(max(len(row['off_mean'][0]) for row in rows.values())):
        draw(axes[3], {label: {'value': [sigma[i] for sigma in row['off_mean']]} for label, row in rows.items()
                       if i < len(row['off_mean'][0])}, 'value')
    clamped = {label: {key: [max(x, 1e-9) for x in row[key]] for key in
                       ('column_sums_off_through', 'column_sums_off')} for label, row in rows.items()}
    draw(axes[4], clamped, 'column_sums_off_through', dashed='column_sums_off', yscale='log',
         ylabel='of the product so far; dashed: of each H_res')
    draw(axes[5], rows, 'norm_through')
    save()


def draw_matrices(found):
    depths = 4
    figure, axes = pyplot.subplots(len(found), depths + 1, figsize=(3.1 * (depths + 1), 3.3 * len(found)),
                                   layout='constrained', squeeze=False)
    for row, (label, result) in zip(axes, found.items()):
        matrices = result['H_res']['mean']
        chosen = sorted(set(np.linspace(0, len(matrices) - 1, depths).astype(int).tolist()))
        for axis in row[len(chosen) + 1:]:
            axis.set_visible(False)
        shown = [(f'sub-layer {l + 1}', matrices[l]) for l in chosen] + [('product of all', result['H_res']['product'])]
        for axis, (title, H) in zip(row, shown):
            H = np.array(H)
            axis.imshow(H, cmap='RdBu', vmin=-1, vmax=1)
            for (i, j), entry in np.ndenumerate(H if len(H) < 7 else np.empty((0, 0))):
                color = 'white' if abs(entry) > 0.6 else 'black'
                axis.text(j, i, f'{entry:.2f}', ha='center', va='center', color=color)
            axis.set(title=f'{label}\n{title}' if title == 'sub-layer 1' else title, xticks=range(len(H)),
                     yticks=range(len(H)), xticklabels=[f'{x:.3g}' for x in H.sum(0).round(4)],
                     yticklabels=[f'{x:.3g}' for x in H.sum(1).round(4)])
            axis.tick_params(labelsize=10, length=0)
            axis.grid(False)
    figure.supxlabel('mean over the tokens; along the axes: column and row sums', fontsize=12)
    replace_file(os.path.join(out_dir, 'matrices.png'), lambda aside: figure.savefig(aside, dpi=100, format='png'))
    pyplot.close(figure)


def draw_entries(entries):
    axes, save = panels('entries.png', ['entries of H_res on the diagonal', 'off the diagonal'])
    for label, H in entries.items():
        diagonal = torch.eye(H.shape[-1], dtype=torch.bool).expand_as(H)
        for axis, values in zip(axes, (H[diagonal], H[~diagonal])):
            axis.hist(values.clamp(-1, 1).numpy(), bins=np.linspace(-1, 1, 81), histtype='step', label=label, log=True,
                      density=True, **styles[label])
            axis.set(xlabel='entry', ylabel='density')
    save()


PICTURES = {'stream': draw_stream, 'blocks': draw_blocks, 'jacobian': draw_jacobian, 'sphere': draw_sphere,
            'mixing': draw_mixing, 'matrices': draw_matrices, 'entries': draw_entries}  # .png

# -----------------------------------------------------------------------------
# the script


def print_table(found):
    """A line a run: the numbers that tell most."""
    print(f'{"":24} {"loss":>8} {"cheapest block":>15} {"largest J":>10} {"through":>10} {"first token":>12}')
    for label, r in found.items():
        costs = [loss - r['loss'] for loss in r['loss_without_block']]
        jacobian = [f'{max(r[key]["median"]):.3g}' if key in r else '' for key in ('largest', 'largest_through')]
        cheapest = f'{min(costs):.4f} (no. {costs.index(min(costs)) + 1})'
        print(f'{label[:24]:24} {r["loss"]:8.4f} {cheapest:>15} {jacobian[0]:>10} {jacobian[1]:>10} '
              f'{max(r["first_token"]["median"]):12.3f}')


def main():
    """Sets the keys, looks at the runs, draws."""
    global out_dir, place, pyplot, styles
    argv, words = sys.argv[1:], [word for word in sys.argv[1:] if not word.startswith('-') and not word.endswith('.py')]
    if words and any(word.startswith('--runs=') for word in argv):
        raise UserError(f'{words[0]}: either words or --runs= name the runs, not both')
    if words:
        argv = [word for word in argv if word not in words] + [f'--runs={",".join(words)}']
    configure(globals(), argv=argv, choices={'dtype': ('float64', 'float32')}, positive=('samples',))
    require('matplotlib', 'the pictures').use('agg')
    pyplot = require('matplotlib.pyplot', 'the pictures')
    pyplot.rcParams.update({'font.size': 14, 'axes.grid': True, 'grid.alpha': 0.3, 'lines.linewidth': 2})
    place, _ = pick_device(device, dtype)
    kernels.select('eager')  # only plain torch is differentiated twice
    paths = [os.path.normpath(os.path.expanduser(path)) for path in runs.split(',') if path]
    if not paths or len(set(paths)) < len(paths):
        raise UserError(f'runs = {runs}: name one folder of a run or more, each once')
    modes = [open_model(path, dataset)[0].config.residual for path in paths]  # an error in the last one, at once
    labels = [mode if modes.count(mode) == 1 else f'{mode} ({path})' for mode, path in zip(modes, paths)]
    styles = dict(zip(labels, itertools.cycle(STYLES)))
    first = paths[0] if os.path.isdir(paths[0]) else os.path.dirname(paths[0])
    out_dir = os.path.expanduser(out_dir) or os.path.join(first, 'analysis')
    try:
        os.makedirs(out_dir, exist_ok=True)
        found, entries = {}, {}
        for label, path in zip(labels, paths):
            found[label], entries[label] = analyze(path)
            text = json.dumps({'torch': torch.__version__, 'dtype': dtype, 'runs': found}, indent=1) + '\n'
            replace_file(os.path.join(out_dir, 'analysis.json'),
                         lambda aside, text=text: Path(aside).write_text(text, encoding='utf-8'))
        spheres = {label: result for label, result in found.items() if 'alpha' in result}
        hyper = {label: result for label, result in found.items() if 'H_res' in result}
        shown = {'stream': found, 'blocks': found, 'jacobian': found if jacobians else {}, 'sphere': spheres,
                 'mixing': hyper, 'matrices': hyper, 'entries': {label: entries[label] for label in hyper}}
        for name, those in shown.items():
            if those:
                PICTURES[name](those)
            else:  # one of an earlier call would be of other runs
                Path(out_dir, f'{name}.png').unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f'out_dir = {out_dir}: cannot be written to ({e.strerror}); take another') from None
    print_table(found)
    names = ', '.join(f'{name}.png' for name, those in shown.items() if those)
    print(f'written to {out_dir}: analysis.json, {names}')


if __name__ == '__main__':
    main()
