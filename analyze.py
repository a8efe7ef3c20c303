"""
What a residual stream does: the papers' figures, from any checkpoint.

    python analyze.py OUT_DIR                    pictures and analysis.json in OUT_DIR/analysis
    python analyze.py OUT_DIR OUT_DIR ...        several runs in the same pictures, in the first one's folder
    python analyze.py gpt2 --dataset=openwebtext --samples=64 --device=cuda

OUT_DIR is the folder of a run (its ckpt.pt), a checkpoint file, gpt2 (-medium, -large, -xl) or a folder of
transformers' save_pretrained. A sub-layer is an attention or an MLP with its connection; they count from 1 to L.

    stream.png     norm of the stream, cosine of its states before and after a sub-layer, kurtosis, largest activation
    blocks.png     loss when a block is skipped; attention on the first token
    jacobian.png   singular values of d(stream after) / d(stream before), for a token, sub-layer by sub-layer and through
                   depth; on spheres with the bounds of [SR], Prop. 6
    sphere.png     angle, step size alpha, angular budget                                         sphere modes
    mixing.png     what H_res does: [S2], Figs. 2, 3, 5, 7                                        hyper-connections
    matrices.png   H_res at some depths and its product, with row and column sums: [S2], Figs. 9, 12
    entries.png    histogram of the entries of H_res: [S2], Fig. 10

[SR] is "Sphere Retraction Normalizations", arXiv 2608.02668, and [S2] "Spectral-Sphere-Constrained Hyper-Connections",
arXiv 2603.20896.
"""
import contextlib
import json
import math
import os
import sys
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
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
smallest = True     # the smallest singular values too, from whole Jacobians: slow for a stream past 1000 numbers
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
def look(model, batches, seed):
    """
    Passes windows through the model, of each of which one token of the second half is looked at. batches: of (x, y).
    Returns name -> (N, ...) float64 of the N tokens: per sub-layer (N, L, ...), per block (N, n_layer).
    """
    subs, draw = connections(model), torch.Generator().manual_seed(seed)
    hyper = [res.mapping for res, _ in subs if isinstance(res, Hyper)]
    attns = [block.attn for block in model.transformer.h]
    found = {}

    def keep(name, value):
        found.setdefault(name, []).append(value.double().cpu())

    for x, _ in batches:
        B, T = x.shape
        at = torch.randint(T // 2, T, (B,), generator=draw).to(x.device)
        rows = {}

        def see_stream(i, args, out):
            before, after = (token(state, at).flatten(1) for state in (args[0], out))    # (B, n C)
            for name, value in stream_statistics(after).items():
                rows.setdefault(name, []).append(value)
            rows.setdefault('cosine', []).append(cosine(before, after))
            if isinstance(subs[i][0], Sphere):
                rows.setdefault('angle', []).append(2 * ((unit(before) - unit(after)).norm(dim=-1) / 2).asin())

        def see_matrices(i, args, out):
            X = token(args[0], at)                                                      # (B, n, C)
            H = torch.eye(X.shape[1]).to(X).expand(B, -1, -1) if out[2] is None else token(out[2], at)
            for name, value in (('H_res', H), ('streams', pairwise_cosine(X)), ('mixed', pairwise_cosine(H.to(X) @ X))):
                rows.setdefault(name, []).append(value)

        def see_attention(i, args, out):
            rows.setdefault('first_token', []).append(first_token_attention(attns[i], out, at))

        with (hooks([res for res, _ in subs], see_stream), hooks(hyper, see_matrices),
              hooks([attn.c_attn for attn in attns], see_attention)):
            model(x)
        for name, values in rows.items():
            keep(name, torch.stack(values, 1))
        keep('uniform', 1 / (at + 1.0))
    return {name: torch.cat(values) for name, values in found.items()}


@torch.no_grad()
def skipping(model, batches):
    """Mean loss in nats with all blocks, and the list of what it is without the first, the second ... block."""
    def loss():
        total = count = 0
        for x, y in batches:
            total, count = total + model(x, y)[1].item() * len(x), count + len(x)
        return total / count

    without = []
    for block in model.transformer.h:
        block.forward = lambda x: x
        without.append(loss())
        del block.forward
    return loss(), without


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
        size = len(alphas)
        bidiagonal = np.diag(alphas) + (np.diag(betas, 1) if betas else 0)
        found = np.linalg.svd(bidiagonal, compute_uv=False)[0]
        if size == min(x.numel(), out.numel()) or alphas[-1] == 0 or size > 2 and found - best <= tolerance * found:
            return float(found)
        best = found
        left.append(u / alphas[-1])
        w = orthogonal(vjp(left[-1]), right)
        betas.append(w.norm().item())
        if betas[-1] <= 1e-14 * found:
            return float(found)
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
        alpha = float(res.decay * res.step())
        cos = cosine(h, out).item()
    D = alpha * (2 * largest_singular_value(lambda x: branch(x) - c * x, h) + eta)
    return 1 + D, max(0.0, abs(cos) - D)


def jacobians_of(model, windows, smallest):
    """
    For each of windows (W, T), at its last token: name -> (W, L). `largest`, `smallest` of each sub-layer's Jacobian and
    `largest_through`, `smallest_through` of the product up to it; on spheres `upper`, `lower` of [SR], Prop. 6.
    """
    found = {}
    with sdpa_kernel(SDPBackend.MATH):  # the others cannot be differentiated twice
        for window in tqdm(windows, desc='Jacobians', disable=None):
            rows = {}
            with last_token(model, window) as (functions, states):
                product = None
                for l, (f, x) in enumerate(zip(functions, states)):
                    rows.setdefault('largest', []).append(largest_singular_value(f, x))
                    rows.setdefault('largest_through', []).append(
                        largest_singular_value(through(functions[:l + 1]), states[0]))
                    if smallest:
                        J = jacobian(f, x)
                        product = J if product is None else J @ product
                        rows.setdefault('smallest', []).append(torch.linalg.svdvals(J)[-1].item())
                        rows.setdefault('smallest_through', []).append(torch.linalg.svdvals(product)[-1].item())
                    if isinstance(f.func, Sphere):
                        for name, value in zip(('upper', 'lower'), sphere_bounds(f.func, f.keywords['branch'], x)):
                            rows.setdefault(name, []).append(value)
            for name, values in rows.items():
                found.setdefault(name, []).append(values)
    return {name: np.array(values) for name, values in found.items()}


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


def summary(values):
    """(N, L) -> median and quartiles over the tokens, by sub-layer."""
    return dict(zip(('low', 'median', 'high'), torch.tensor([0.25, 0.5, 0.75]).double().pipe(values)))


def analyze(path):
    """Everything about a run: (label, numbers for analysis.json, entries of its matrices or None)."""
