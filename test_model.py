"""
The GPT as a whole against its specification. `reference` below is a second, slow GPT: the published formulas written
out with explicit matrices (solves for Cayley, a plain Sinkhorn loop, lists of permutations) on a state dict.
tests/ holds the mathematics of the connections by themselves.
"""
import ast
import itertools
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import hyperconn
import model as M
from model import GPT, RESIDUALS, Connection, GPTConfig, Residual

ROOT = Path(__file__).resolve().parent
HYPER = ['hc', 'mhc', 'mhc_lite', 'kromhc', 's2hc', 'hc_identity', 'hc_orthogonal']
SPHERE = ['geonorm', 'p_spheret', 'proj_spheret', 'cay_spheret']
PLAIN = ['pre_ln', 'post_ln', 'pre_dyt', 'peri_ln', 'keel']
MODES = PLAIN + SPHERE + HYPER
UNIT_ROWS = ['mhc', 'mhc_lite', 'kromhc', 's2hc']   # of H_res
UNIT_COLUMNS = ['mhc_lite', 'kromhc', 's2hc']
TINY = dict(block_size=8, vocab_size=13, n_layer=2, n_head=2, n_embd=16)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def build(seed=None, **kw):
    """A tiny GPT; seed 1, 2, ... puts random numbers into every parameter, in float64."""
    model = GPT(GPTConfig(**{**TINY, **kw})).eval()
    if seed is None:
        return model
    model.double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            r = torch.randn(p.shape, generator=g, dtype=torch.float64)
            if name.endswith('radius.raw'):
                p.fill_(2.5)             # softplus is 2.6, between 1 and sqrt(16)
            elif name.endswith('.raw'):
                p.copy_(r)               # softplus is above 1 for some: the clamp counts
            elif name.endswith(('a0', '.scale')):
                p.copy_(0.7 + 0.2 * r)
            elif 'ln_' in name or '.norm.' in name or name.endswith('.gain'):
                p.copy_(('bias' not in name) + 0.3 * r)
            elif '.mapping.bias' in name or name.endswith('.logits'):
                p.copy_(r)
            else:
                p.copy_(0.25 * r)
    return model


def tokens(B=2, T=8, V=13, seed=5):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def all_logits(model, idx):
    return model(idx, targets=idx)[0]  # with targets the logits of every position come out


# -----------------------------------------------------------------------------
# the second GPT

PRESETS = {  # norm, place, connection
    'pre_ln': ('layernorm', 'in', 'add'), 'post_ln': ('layernorm', 'none', 'highway'), 'pre_dyt': ('dyt', 'in', 'add'),
    'peri_ln': ('layernorm', 'both', 'add'), 'keel': ('layernorm', 'in', 'highway'),
    **{mode: ('layernorm', 'none', 'sphere') for mode in SPHERE},
    **{mode: ('layernorm', 'in', 'hyper') for mode in HYPER},
}


def reference(c, state, idx):
    """c GPTConfig, state dict in float64, idx (B, T) -> logits (B, T, V), [(H_pre, H_post, H_res)] by sub-layer."""
    norm, place, connection = PRESETS[c.residual]
    norm, place = c.norm or norm, c.place or place
    B, T = idx.shape
    L, C, n = 2 * c.n_layer, c.n_embd, c.n_streams
    matrices = []

    def get(name):
        return state.get('transformer.' + name)

    def linear(name, x):
        y = x @ get(name + '.weight').T
        return y if get(name + '.bias') is None else y + get(name + '.bias')

    def N(name, x):
        w, b = get(name + '.weight'), get(name + '.bias')
        b = 0 if b is None else b
        if norm == 'layernorm':
            x = x - x.sum(-1, keepdim=True) / C
            return w * x / ((x**2).sum(-1, keepdim=True) / C + 1e-5) ** 0.5 + b
        if norm == 'rmsnorm':
            return w * x / ((x**2).sum(-1, keepdim=True) / C + 1e-6) ** 0.5
        return w * {'dyt': torch.tanh, 'derf': torch.erf}[norm](get(name + '.a0') * x) + b

    def attention(name, x):
        q, k, v = linear(name + '.c_attn', x).split(C, -1)
        out, hs = torch.zeros_like(x), C // c.n_head
        for h in range(c.n_head):
            s = slice(h * hs, (h + 1) * hs)
            for b, t in itertools.product(range(B), range(T)):
                w = k[b, : t + 1, s] @ q[b, t, s] / math.sqrt(hs)
                w = torch.exp(w - w.max())
                out[b, t, s] = w / w.sum() @ v[b, : t + 1, s]
        return linear(name + '.c_proj', out)

    def mlp(name, x):
        u = linear(name + '.c_fc', x)
        if c.gelu_tanh:
            u = u / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        else:
            u = u / 2 * (1 + torch.erf(u / math.sqrt(2)))
        return linear(name + '.c_proj', u)

    def softplus(name, low, high):
        return torch.log1p(torch.exp(get(name))).clamp(low, high)

    x = get('wte.weight')[idx] + get('wpe.weight')[:T]
    x = get('emb.scale') * x if c.embed_scale else x
    x = N('emb.norm', x) if c.embed_norm else x
    if connection == 'sphere':
        x = softplus('open.radius.raw', 1, math.sqrt(C)) * x / (x**2).sum(-1, keepdim=True).sqrt()
    if connection == 'hyper':
        x = torch.stack([x] * n, 2)
    for l in range(L):  # noqa: E741
        block, k = f'h.{l // 2}.', l % 2 + 1

        def branch(y, block=block, k=k):
            y = N(f'{block}ln_{k}', y) if place in ('in', 'both') else y
            y = attention(block + 'attn', y) if k == 1 else mlp(block + 'mlp', y)
            return N(f'{block}ln_{k}_out', y) if place in ('out', 'both') else y

        if connection == 'add' or c.residual == 'keel' and l == 0:
            x = x + branch(x)
        elif connection == 'highway':
            a = 2 * c.n_layer if c.residual == 'keel' and l > 1 else 1
            x = N(f'{block}res_{k}.norm', a * x + branch(x))
        elif connection == 'sphere':
            p = {'geonorm': math.inf, 'proj_spheret': 1, 'cay_spheret': 2, 'p_spheret': c.p}[c.residual]
            decay = c.decay or ('harmonic' if c.residual == 'geonorm' else 'sqrt')
            decay = {'sqrt': 1 / math.sqrt(l + 1), 'harmonic': 1 / (l + 1), 'linear': (L - l - 1) / L, 'none': 1}[decay]
            x = retract_matrix(x, branch(x), decay * softplus(f'{block}res_{k}.step.raw', 0, 1), p)
        else:
            H_pre, H_post, H_res = mapping(c, {name: get(f'{block}res_{k}.mapping.{name}')
                                                for name in ('gain', 'weight', 'bias', 'scale')}, x)
            matrices.append((H_pre, H_post, H_res))
            f = branch(torch.einsum('bti,btic->btc', H_pre, x))
            x = torch.einsum('btij,btjc->btic', H_res, x) + torch.einsum('bti,btc->btic', H_post, f)
    if connection == 'hyper':
        w = torch.exp(get('close.logits')) if c.readout == 'softmax' else torch.ones(n, dtype=x.dtype)
        x = torch.einsum('i,btic->btc', w / w.sum(), x)
    return N('ln_f', x) @ state['lm_head.weight'].T, matrices


def retract_matrix(h, f, alpha, p):
    """The retraction as a d x d rotation per token: W = alpha (z h^T - h z^T) / r^2 turns h towards f."""
    r2 = (h**2).sum(-1, keepdim=True)
    z = f - (h * f).sum(-1, keepdim=True) / r2 * h
    slope = (z**2).sum(-1, keepdim=True).sqrt() / r2.sqrt()
    if p > 1:  # no angle above 45 degrees: the largest step that stays below
        beta_max = p * math.tan(math.pi / 4 / p) if p < math.inf else math.pi / 4
        alpha = torch.minimum(alpha.expand_as(slope), beta_max / slope)
    if p == 1:
        y = h + alpha * z
        return y * (r2 / (y**2).sum(-1, keepdim=True)).sqrt()
    W = (z.unsqueeze(-1) * h.unsqueeze(-2) - h.unsqueeze(-1) * z.unsqueeze(-2)) / r2.unsqueeze(-1)  # W h = z
    eye = torch.eye(h.shape[-1], dtype=h.dtype)
    if p == 2:
        W = alpha.unsqueeze(-1) * W
        return torch.linalg.solve(eye - W / 2, (eye + W / 2) @ h.unsqueeze(-1)).squeeze(-1)
    theta = alpha * slope if p == math.inf else p * torch.atan(alpha * slope / p)
    return (torch.linalg.matrix_exp((theta / slope).unsqueeze(-1) * W) @ h.unsqueeze(-1)).squeeze(-1)


def logit_sizes(kind, n):
    """The groups of logits with a scalar each: H_pre, H_post, then those of H_res."""
    k = (n - 1) * (n - 2) // 2
    return [n, n, *{'mhc': [n * n], 'mhc_lite': [math.factorial(n)], 'kromhc': [2 * round(math.log2(n))],
                    's2hc': [k, k, n - 1], 'hc_identity': [], 'hc_orthogonal': [n * (n - 1) // 2]}[kind]]


def mapping(c, param, X):
    """The three matrices of X (B, T, n, C), from the formulas."""
    B, T, n, C = X.shape
    bias = param['bias']
    eye = torch.eye(n, dtype=X.dtype)
    if c.residual == 'hc':
        A_r, A_m, A_b = bias[: n * n].view(n, n), bias[n * n : -n, None], bias[-n:, None]
        A_r, A_m, A_b = (y.expand(B, T, n, -1) for y in (A_r, A_m, A_b))
        if not c.static:
            xb = X / ((X**2).mean(-1, keepdim=True) + 1e-6) ** 0.5
            W, (s_a, s_b) = param['weight'], param['scale']
            A_r = A_r + s_a * torch.tanh(xb @ W[:n].T)
            A_m = A_m + s_a * torch.tanh(xb @ W[n : n + 1].T)
            A_b = A_b + s_b * torch.tanh(xb @ W[n + 1 :].T)
        return A_m.mT[..., 0, :], A_b.mT[..., 0, :], A_r.mT
    sizes = logit_sizes(c.residual, n)
    parts = [b.expand(B, T, -1) for b in bias.split(sizes)]
    gates = [1, 1]
    if not c.static:
        x = X.reshape(B, T, n * C)
        x = param['gain'] * x / ((x**2).mean(-1, keepdim=True) + 1e-6) ** 0.5
        a, gates = param['scale'].split([len(sizes), len(param['scale']) - len(sizes)])
        parts = [a_i * (x @ W.T) + b for a_i, W, b in zip(a, param['weight'].split(sizes), parts)]
    pre, post, *res = parts
    H = torch.zeros(B, T, n, n, dtype=X.dtype)

    def skew(v, m):
        A = torch.zeros(B, T, m, m, dtype=X.dtype)
        for i, (row, column) in enumerate(itertools.combinations(range(m), 2)):
            A[..., row, column], A[..., column, row] = v[..., i], -v[..., i]
        return A

    def cayley(v, m):
        A, one = skew(v, m), torch.eye(m, dtype=X.dtype)
        return torch.linalg.solve(one + A, one - A)

    if c.residual == 'hc_identity':
        H = H + eye
    elif c.residual == 'hc_orthogonal':
        H = cayley(gates[0] * torch.tanh(res[0]), n)
    elif c.residual == 'mhc':
        H = torch.exp(res[0].reshape(B, T, n, n))
        for _ in range(20):
            H = H / H.sum(-2, keepdim=True)
            H = H / H.sum(-1, keepdim=True)
    elif c.residual == 'mhc_lite':
        w = torch.exp(res[0]) / torch.exp(res[0]).sum(-1, keepdim=True)
        for i, q in enumerate(itertools.permutations(range(n))):
            P = torch.zeros(n, n, dtype=X.dtype)
            for row in range(n):
                P[row, q[row]] = 1
            H = H + w[..., i, None, None] * P
    elif c.residual == 'kromhc':
        for b, t in itertools.product(range(B), range(T)):
            K = np.ones((1, 1))
            for z in np.split(res[0][b, t].detach().numpy(), round(math.log2(n))):
                p = math.exp(z[0]) / (math.exp(z[0]) + math.exp(z[1]))
                K = np.kron(K, [[p, 1 - p], [1 - p, p]])
            H[b, t] = torch.from_numpy(K)
    else:
        Uz = torch.zeros(n, n - 1, dtype=X.dtype)
        for i in range(1, n):
            Uz[:i, i - 1], Uz[i, i - 1] = 1 / math.sqrt(i * (i + 1)), -i / math.sqrt(i * (i + 1))
        u, v, s = (torch.tanh(y) for y in res)
        U, V = cayley(gates[0] * u, n - 1), cayley(gates[1] * v, n - 1)
        H = torch.ones(n, n, dtype=X.dtype) / n + Uz @ U @ torch.diag_embed(s) @ (Uz @ V).mT
    return 1 / (1 + torch.exp(-pre)), 2 / (1 + torch.exp(-post)), H


CASES = [dict(residual=mode) for mode in MODES]
CASES += [dict(residual=mode, bias=False) for mode in MODES]
CASES += [dict(residual=mode, norm=norm) for norm in ('layernorm', 'rmsnorm', 'dyt', 'derf')
          for mode in ('pre_ln', 'post_ln', 'pre_dyt', 'peri_ln', 'keel', 'proj_spheret', 'hc', 's2hc')]
CASES += [dict(residual=mode, place=place) for place in ('in', 'out', 'both', 'none')
          for mode in ('pre_ln', 'post_ln', 'keel', 'p_spheret', 'geonorm', 'hc', 'mhc')]
CASES += [dict(residual='s2hc', place='both', norm='rmsnorm'), dict(residual='cay_spheret', place='out', norm='dyt')]
CASES += [dict(residual='p_spheret', p=p) for p in (0.1, 1, 1.7, 2, 5, math.inf)]
CASES += [dict(residual=mode, decay=decay) for decay in ('sqrt', 'harmonic', 'linear', 'none')
          for mode in ('geonorm', 'proj_spheret')]
CASES += [dict(residual='proj_spheret', bound='clamp')]
CASES += [dict(residual=kind, **kw) for kind in HYPER for kw in (dict(static=True), dict(readout='softmax'),
                                                                 dict(static=True, readout='softmax', n_streams=2))]
CASES += [dict(residual=kind, n_streams=n) for kind in HYPER for n in (2, 3, 5, 8)
          if not (kind == 'kromhc' and n in (3, 5) or kind == 'mhc_lite' and n > 6)]
CASES += [dict(residual=mode, **{option: True}) for option in ('embed_norm', 'embed_scale')
          for mode in ('pre_ln', 'peri_ln', 'pre_dyt', 'proj_spheret', 'mhc')]
CASES += [dict(residual='pre_ln', gelu_tanh=True), dict(residual='keel', n_layer=3)]
CASES += [dict(residual='mhc_lite', n_layer=3), dict(residual='p_spheret', n_layer=3)]


@pytest.mark.parametrize('case', CASES, ids=lambda case: '-'.join(map(str, case.values())))
def test_logits_and_matrices_are_the_formulas(case):
    model, idx = build(seed=1, **case), tokens()
    with torch.no_grad():
        logits, ours = all_logits(model, idx), model.residual_matrices(idx)
        expected, matrices = reference(model.config, model.state_dict(), idx)
    assert expected.std() > 0.1  # the comparison says something
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert len(ours) == len(matrices) == (2 * model.config.n_layer if case['residual'] in HYPER else 0)
    n = model.config.n_streams
    for got, wanted in zip(ours, matrices):
        assert [m.shape for m in got] == [(2, 8, n), (2, 8, n), (2, 8, n, n)]
        for a, b in zip(got, wanted):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_rmsnorm_on_a_sphere_stream():
    # there it may be done without a reduction, as sqrt(d)/r; then eps = 1e-6 has no part in it
    model, idx = build(seed=1, residual='p_spheret', norm='rmsnorm', place='in'), tokens()
    with torch.no_grad():
        expected, _ = reference(model.config, model.state_dict(), idx)
        torch.testing.assert_close(all_logits(model, idx), expected, rtol=0, atol=1e-4)


# -----------------------------------------------------------------------------
# parameter counts


COUNTS = [  # n_layer, C, n, kind, options, parameters beyond pre_ln
    (12, 768, 4, 'mhc', {}, 1_843_848),
    (12, 768, 4, 'mhc_lite', {}, 2_433_864),
    (12, 768, 4, 'kromhc', {}, 958_824),
    (12, 768, 4, 's2hc', {}, 1_327_680),
    (12, 768, 4, 'hc_orthogonal', {}, 1_106_352),
    (16, 2048, 4, 'mhc', {}, 6_554_464),
    (16, 2048, 4, 'mhc_lite', {}, 8_651_872),
    (16, 2048, 4, 'kromhc', {}, 3_408_352),
    (16, 2048, 2, 'hc_identity', {}, 655_552),
    (16, 2048, 4, 'hc_identity', {}, 2_359_616),
    (16, 2048, 8, 'hc_identity', {}, 8_913_472),
    (16, 2048, 16, 'hc_identity', {}, 34_604_096),
    (16, 2048, 4, 'mhc', dict(static=True, readout='softmax'), 772),
    (16, 2048, 4, 'mhc_lite', dict(static=True), 1024),
    (16, 2048, 4, 'kromhc', dict(static=True), 384),
    (16, 2048, 4, 'hc', {}, 394_048),
    (16, 2048, 4, 'hc', dict(static=True), 768),
    (28, 1024, 7, 'mhc', {}, 25_693_808),
    (28, 1024, 7, 's2hc', {}, 20_475_000),
    (16, 2048, 2, 'kromhc', {}, 917_792),
    (16, 2048, 8, 'kromhc', {}, 12_059_424),
    (16, 2048, 16, 'kromhc', {}, 42_992_992),
    (32, 4096, 2, 'hc_identity', {}, 2_621_824),
    (32, 4096, 4, 'hc_identity', {}, 9_437_824),
]


@pytest.mark.parametrize('n_layer, C, n, kind, options, expected', COUNTS)
def test_parameter_counts_of_the_papers(monkeypatch, n_layer, C, n, kind, options, expected):
    # the branches are the same in every mode: without them the models are small enough to build
    monkeypatch.setattr(M, 'CausalSelfAttention', lambda config: nn.Identity())
    monkeypatch.setattr(M, 'MLP', lambda config: nn.Identity())
    size = dict(block_size=1, vocab_size=1, n_layer=n_layer, n_head=1, n_embd=C)
    plain, hyper = (GPT(GPTConfig(**size, **kw)) for kw in ({}, dict(residual=kind, n_streams=n, **options)))
    assert hyper.get_num_params() - plain.get_num_params() == expected
    if kind != 'hc' and not options:
        res = {'mhc': n * n, 'mhc_lite': math.factorial(n), 'kromhc': 2 * math.log2(n), 's2hc': (n - 1) ** 2,
               'hc_identity': 0, 'hc_orthogonal': n * (n - 1) / 2}[kind]
        scalars = {'hc_identity': 2, 'hc_orthogonal': 4, 's2hc': 7}.get(kind, 3)
        assert expected == 2 * n_layer * (n * C * (2 * n + res + 1) + 2 * n + res + scalars)


def test_parameter_counts_of_the_rest():
    plain = build().get_num_params()
    logits = 14 + math.factorial(7)  # mhc_lite of 28 layers, C 1024, n 7: refused
    assert 56 * (7 * 1024 * (logits + 1) + logits + 3) == pytest.approx(2.03e9, rel=1e-3)
    assert build(residual='s2hc').get_num_params() - plain == 4 * (4 * 16 * (8 + 9 + 1) + 8 + 9 + 7)  # branches and all
    assert build(residual='post_ln').get_num_params() == plain                     # 4 norms inside, 4 outside
    assert build(residual='pre_dyt').get_num_params() - plain == 5                 # a0 of 4 norms and ln_f
    assert build(residual='peri_ln').get_num_params() - plain == 4 * 2 * 16        # another norm per sub-layer
    assert build(residual='keel').get_num_params() - plain == 3 * 2 * 16           # no outer norm after the first
    for mode in SPHERE:
        assert build(residual=mode).get_num_params() - plain == -4 * 2 * 16 + 4 + 1  # no norms, 4 steps, a radius
    assert build(embed_norm=True, embed_scale=True).get_num_params() - plain == 2 * 16 + 1
    model = build()
    assert model.get_num_params(non_embedding=False) == plain + 8 * 16 == sum(p.numel() for p in model.parameters())


# -----------------------------------------------------------------------------
# what the modes have in common


def take_shared(model, other):
    """Load what `other` has under the same name into `model`."""
    names = other.state_dict().keys() & model.state_dict().keys()
    assert 'transformer.h.1.mlp.c_proj.weight' in names and 'transformer.wte.weight' in names
    model.load_state_dict({name: other.state_dict()[name] for name in names}, strict=False)


@pytest.mark.parametrize('kind', ['hc_identity', *UNIT_ROWS])
@pytest.mark.parametrize('n', [2, 4])
def test_unit_rows_with_a_mean_of_the_streams_are_pre_ln(kind, n):
    """H_pre = 1/n, H_post = 1 keep the streams identical, whatever matrix with unit rows mixes them."""
    plain, model = build(seed=1), build(seed=2, residual=kind, n_streams=n)
    take_shared(model, plain)
    for name, p in model.named_parameters():
        with torch.no_grad():
            if name.endswith('mapping.bias'):
                p[:n], p[n : 2 * n] = math.log(1 / (n - 1)), 0  # sigmoid -> 1/n, 2 sigmoid -> 1
            if name.endswith('mapping.weight'):
                p[: 2 * n] = 0
    torch.testing.assert_close(all_logits(model, tokens()), all_logits(plain, tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize('kind', HYPER)
def test_one_stream_is_pre_ln(kind):
    for options in ({}, dict(static=True), dict(readout='softmax')):
        torch.manual_seed(3)
        plain = build()
        torch.manual_seed(3)
        model = build(residual=kind, n_streams=1, **options)
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert torch.equal(all_logits(model, tokens()), all_logits(plain, tokens()))
        assert model.residual_matrices(tokens()) == []


@pytest.mark.parametrize('mode', MODES)
def test_a_seed_gives_the_shared_parts_the_same_weights(mode):
    torch.manual_seed(7)
    plain = build().state_dict()
    torch.manual_seed(7)
    model = build(residual=mode)
    state = model.state_dict()
    shared = plain.keys() & state.keys()
    assert {name for name in plain if not name.startswith(('transformer.h.0.ln', 'transformer.h.1.ln'))} <= shared
    assert all(torch.equal(plain[name], state[name]) for name in shared)
    torch.manual_seed(7)
    again = build(residual=mode).state_dict()
    assert all(torch.equal(again[name], state[name]) for name in state)
    following = build(residual=mode).state_dict()
    matrices = [name for name in plain if plain[name].dim() == 2]
    assert len(matrices) == 3 + 8 and all(not torch.equal(following[name], state[name]) for name in matrices)
    a, b = (state[f'transformer.h.{i}.mlp.c_fc.weight'] for i in (0, 1))
    assert not torch.equal(a, b)


@pytest.mark.parametrize('mode', MODES)
def test_causal(mode):
    model, idx = build(seed=1, residual=mode), tokens()
    logits = all_logits(model, idx)
    for t in range(1, 8):
        other = idx.clone()
        other[:, t:] = (idx[:, t:] + 1 + torch.arange(8 - t)) % 13
        changed = all_logits(model, other)
        torch.testing.assert_close(changed[:, :t], logits[:, :t], rtol=0, atol=1e-12)
        assert (changed[:, t] - logits[:, t]).abs().max() > 1e-6
    torch.testing.assert_close(model(idx[:, :5])[0], logits[:, 4:5], rtol=0, atol=1e-12)


@pytest.mark.parametrize('kind', HYPER)
def test_H_res_has_an_effect(kind):
    model, idx = build(seed=1, residual=kind), tokens()
    logits, matrices = all_logits(model, idx), model.residual_matrices(idx)
    for layer, block in enumerate(model.transformer.h):
        for i, connection in enumerate((block.res_1, block.res_2)):
            H_pre, H_post, H_res = matrices[2 * layer + i]
            H_res = H_res + 0.1 * torch.randn(4, 4, dtype=torch.float64)  # row sums not 1: it shows in sub-layer 0 too
            changed = H_pre, H_post, H_res
            hook = connection.mapping.register_forward_hook(lambda *_, changed=changed: changed)
            assert (all_logits(model, idx) - logits).abs().max() > 1e-4
            hook.remove()
    if kind != 'hc_identity':
        with torch.no_grad():  # and by its own parameters
            bias = model.transformer.h[1].res_1.mapping.bias
            (bias[:16] if kind == 'hc' else bias[8:]).add_(torch.randn(bias.numel() - 8, dtype=torch.float64))
        assert (all_logits(model, idx) - logits).abs().max() > 1e-4


@pytest.mark.parametrize('mode', MODES)
def test_bf16_leaves_the_stream_in_float32(mode):
    model, idx = build(residual=mode).train(), tokens()
    streams, matrices = [], []
    for block in model.transformer.h:
        block.register_forward_hook(lambda module, args, out: streams.extend((args[0], out)))
        for connection in (block.res_1, block.res_2):
            if mode in HYPER:
                connection.mapping.register_forward_hook(lambda module, args, out: matrices.append(out))
    dtypes = []
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = model(idx, targets=idx)[1]
    loss.backward()
    assert dtypes == [torch.bfloat16]  # the branches are in bf16
    assert len(streams) == 4 and {x.dtype for x in streams} == {torch.float32}
    assert {m.dtype for row in matrices for m in row if m is not None} <= {torch.float32}
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if mode in UNIT_ROWS:
        assert all((H.sum(-1) - 1).abs().max() < 1e-6 for _, _, H in matrices)
    if mode in SPHERE:
        assert all((x.norm(dim=-1) - 4).abs().max() < 4 * 3e-6 for x in streams)


# -----------------------------------------------------------------------------
# gradients


def gradients(model, idx=None):
    model.zero_grad()
    model(tokens() if idx is None else idx, targets=tokens(seed=6))[1].backward()
    return {name: p.grad for name, p in model.named_parameters()}


def pieces(kind, n):
    """name -> index of the parts of a mapping's `bias`, and of `weight` and `scale`, that have a job of their own."""
    if kind == 'hc':
        return {}
    ends = np.cumsum([0, *logit_sizes(kind, n)]).tolist()
    return {f'{"H_pre H_post".split()[i] if i < 2 else "H_res"} {i}': slice(a, b)
            for i, (a, b) in enumerate(zip(ends, ends[1:]))}


GRADIENT_CASES = [dict(residual=mode) for mode in MODES]
GRADIENT_CASES += [dict(residual=kind, **kw) for kind in HYPER for kw in (dict(static=True), dict(readout='softmax'))]
GRADIENT_CASES += [dict(residual=mode, embed_norm=True, embed_scale=True) for mode in ('pre_dyt', 'peri_ln')]
GRADIENT_CASES += [dict(residual='keel', norm='rmsnorm', place='both'), dict(residual='proj_spheret', place='both')]


@pytest.mark.parametrize('case', GRADIENT_CASES, ids=lambda case: '-'.join(map(str, case.values())))
def test_a_gradient_reaches_every_parameter(case):
    kind, model = case['residual'], build(seed=1, **case, n_layer=3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('c_proj.weight') and kind in SPHERE:
                p.mul_(0.2)  # smaller angles: where each token's is capped, the step size has no gradient
            if name.endswith('mapping.bias') and kind == 'mhc':
                p[8:].mul_(4)  # Sinkhorn's 20 iterations stop short of unit columns, so that the last H_res counts
    grads = gradients(model)
    unit_columns = UNIT_COLUMNS if case.get('readout') != 'softmax' else []
    for name, g in grads.items():
        assert g is not None, name
        parts = {'': g}
        if '.mapping.' in name and not name.endswith('.gain') and kind != 'hc':
            parts = {key: g[int(key[-1])] if name.endswith('scale') else g[index]
                     for key, index in pieces(kind, 4).items()}
            if name.endswith('scale'):
                parts |= {f'H_res gate {i}': x for i, x in enumerate(g[len(parts) :])}
        for part, x in parts.items():
            forbidden = part.startswith('H_res') and (
                '.h.0.res_1' in name and kind in UNIT_ROWS or '.h.2.res_2' in name and kind in unit_columns)
            # With identical streams H_pre is a scale, which a LayerNorm behind it takes away again but for its eps
            floor = 1e-11 if part.startswith('H_pre') and '.h.0.res_1' in name else 1e-7
            size = x.abs().max().item()
            assert size < 1e-8 if forbidden else size > floor, f'{name} {part}: {size}'


@pytest.mark.parametrize('case', GRADIENT_CASES, ids=lambda case: '-'.join(map(str, case.values())))
def test_gradients_are_the_slope_of_the_loss(case):
    """In a random direction, by a difference of fourth order."""
    model = build(seed=1, **case)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('step.raw'):
                p.clamp_(max=0.4)  # inside the bounds: beyond, the gradient goes straight through instead
    params, losses = list(model.parameters()), {}
    directions = [torch.randn_like(p) for p in params]
    grads = gradients(model)
    slope = sum((g * d).sum() for g, d in zip(grads.values(), directions)).item()
    start = [p.detach().clone() for p in params]
    step = 1e-4
    for i in (-2, -1, 1, 2):
        with torch.no_grad():
            for p, x, d in zip(params, start, directions):
                p.copy_(x + i * step * d)
            losses[i] = model(tokens(), targets=tokens(seed=6))[1].item()
    expected = (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * step)
    assert slope == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_linear_decay_never_moves_the_last_branch():
    for mode in SPHERE:
        grads = gradients(build(seed=1, residual=mode, decay='linear'))
        last = {name for name in grads if name.startswith(('transformer.h.1.mlp', 'transformer.h.1.res_2'))}
        assert len(last) == 5
        for name, g in grads.items():
            assert (g.abs().max() < 1e-8) == (name in last), name


@pytest.mark.parametrize('kind', HYPER)
def test_at_init_only_scale_and_gain_wait(kind):
    model = build(residual=kind).double()
    grads = {name: g for name, g in gradients(model).items() if '.mapping.' in name}
    for name, g in grads.items():
        if name.endswith(('.scale', '.gain')):
            assert (g == 0).all(), name                      # W = 0 stands before them
        elif kind != 'hc':
            assert g[:4].abs().max() > 0 and g[4:8].abs().max() > 0, name
        else:
            assert g.abs().max() > 0, name
    assert len(grads) == 4 * (3 if kind == 'hc' else 4)


# -----------------------------------------------------------------------------
# optimizer


@pytest.mark.parametrize('mode', MODES)
def test_what_decays(mode):
    model = build(residual=mode, embed_norm=True, embed_scale=True, readout='softmax')
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [(names[id(p)], group['weight_decay']) for group in optimizer.param_groups for p in group['params']]
    assert sorted(name for name, _ in groups) == sorted(names.values())  # each once
    linears = {f'transformer.h.{i}.{x}.weight' for i in (0, 1)
               for x in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')}
    mappings = {f'transformer.h.{i}.res_{k}.mapping.weight' for i in (0, 1) for k in (1, 2) if mode in HYPER}
    decayed = {name for name, decay in groups if decay}
    assert decayed == linears | mappings | {'transformer.wte.weight', 'transformer.wpe.weight'}
    assert {decay for _, decay in groups} == {0.1, 0.0}
    assert all(g['lr'] == 1e-3 and g['betas'] == (0.9, 0.95) for g in optimizer.param_groups)


def test_frozen_parameters_are_left_out():
    model = build()
    model.transformer.wpe.weight.requires_grad_(False)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    held = [p for group in optimizer.param_groups for p in group['params']]
    assert len(held) == len(list(model.parameters())) - 1 and all(p.requires_grad for p in held)


@pytest.mark.parametrize('bound', ['project', 'clamp'])
def test_bounds_after_an_optimizer_step(bound):
    model = build(residual='proj_spheret', bound=bound)
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
    raws = {name: p for name, p in model.named_parameters() if name.endswith('.raw')}
    high = {name: 4.0 if 'radius' in name else 1.0 for name in raws}  # sqrt(16), and 1
    assert len(raws) == 4 + 1
    for name, p in raws.items():  # all start on the bound
        assert p.item() == pytest.approx(math.log(math.expm1(high[name])), rel=1e-6)
    with torch.no_grad():
        for p in raws.values():
            p += 0.5
    gradients(model)
    frozen = {name: p.grad.item() == 0 for name, p in raws.items()}
    optimizer.step()
    for name, p in raws.items():
        y = math.log1p(math.exp(p.item()))
        if bound == 'project':
            assert not frozen[name] and y <= high[name] * (1 + 1e-6)
        else:
            assert frozen[name] and p.item() == pytest.approx(math.log(math.expm1(high[name])) + 0.5, rel=1e-6)


def test_projected_scalars_learn():
    """Down from the bound when that lowers the loss, although a step upwards came before."""
    model = build(residual='proj_spheret')
    optimizer = model.configure_optimizers(0.0, 1e-2, (0.0, 0.0), 'cpu')
    raw = model.transformer.h[0].res_1.step.raw
    start = raw.item()
    raw.grad = torch.tensor(-1.0)
    optimizer.step()
    assert raw.item() == pytest.approx(start, abs=1e-7)
    raw.grad = torch.tensor(1.0)
    optimizer.step()
    assert raw.item() < start - 5e-3


# -----------------------------------------------------------------------------
# initialisation


class Bare(Connection):
    def __init__(self, config, sublayer):
        super().__init__(config, sublayer)
        self.forgotten = nn.Parameter(torch.ones(3))

    def forward(self, x, branch):
        return x + branch(x)


class Gated(Connection):
    def __init__(self, config, sublayer):
        super().__init__(config, sublayer)
        self.gate = nn.Linear(config.n_embd, config.n_embd)

    def reset_parameters(self):
        nn.init.zeros_(self.gate.weight)

    def forward(self, x, branch):
        return x + branch(x) + self.gate(x)


def test_a_parameter_that_nothing_initialises(monkeypatch):
    monkeypatch.setitem(RESIDUALS, 'bare', Residual('layernorm', 'in', Bare))
    with pytest.raises(RuntimeError, match=r'transformer\.h\.0\.res_1\.forgotten'):
        build(residual='bare')


def test_a_new_mode_is_one_row_and_keeps_its_own_zeros(monkeypatch):
    monkeypatch.setitem(RESIDUALS, 'gated', Residual('layernorm', 'in', Gated))
    torch.manual_seed(4)
    plain = build()
    torch.manual_seed(4)
    model = build(residual='gated')
    assert (model.transformer.h[1].res_2.gate.weight == 0).all() and (model.transformer.h[1].res_2.gate.bias == 0).all()
    assert torch.equal(all_logits(model, tokens()), all_logits(plain, tokens()))


def test_gpt2_init():
    for mode in MODES:
        model = build(residual=mode, n_layer=4, n_embd=64, vocab_size=400, block_size=64)
        state, wide, narrow = model.state_dict(), [], []
        for name, p in state.items():
            if '.mapping.' in name:
                continue
            if p.dim() == 2:
                (narrow if name.endswith('c_proj.weight') else wide).append(p)
                assert p.mean().abs() < 0.001
            elif name.endswith('.bias'):
                assert (p == 0).all(), name
            elif name.endswith('.weight'):
                assert (p == 1).all(), name
            elif name.endswith('a0'):
                assert p == 0.5
        assert len(narrow) == 8 and len(wide) == 2 + 1 + 8
        for ps, std in (wide, 0.02), (narrow, 0.02 / math.sqrt(2 * 4)):
            assert all(p.std().item() == pytest.approx(std, rel=0.05) for p in ps)
    assert build(norm='dyt', dyt_alpha=0.8).transformer.ln_f.a0.item() == pytest.approx(0.8)
    assert build(embed_scale=True).transformer.emb.scale.item() == 4


@pytest.mark.parametrize('kind', HYPER)
def test_hyper_connections_at_init(kind):
    model = build(residual=kind, n_layer=3).double()
    for name, p in model.named_parameters():
        if name.endswith('mapping.weight'):
            assert (p == 0).all()
        if name.endswith('mapping.gain'):
            assert (p == 1).all()
        if name.endswith('mapping.scale'):
            gates = {'s2hc': 2, 'hc_orthogonal': 1}.get(kind, 0)
            assert p.tolist() == pytest.approx([0.01] * (len(p) - gates) + [1.0] * gates)
    diagonal = {'mhc_lite': 0.994, 'mhc': 0.9990, 'kromhc': 0.9993, 's2hc': 0.9995}
    for l, (H_pre, H_post, H_res) in enumerate(model.residual_matrices(tokens())):  # noqa: E741
        if kind == 'hc':
            pre, post = F.one_hot(torch.tensor(l % 4), 4).double(), torch.ones(4, dtype=torch.float64)
        else:
            b = 2.0 * F.one_hot(torch.tensor(l % 4), 4) - 1
            pre, post = b.double().sigmoid(), 2 * b.double().sigmoid()
            assert post.mean() == pytest.approx(0.77, abs=0.005)
        torch.testing.assert_close(H_pre, pre.expand(2, 8, 4))
        torch.testing.assert_close(H_post, post.expand(2, 8, 4))
        d = H_res.diagonal(dim1=-2, dim2=-1)
        if kind in diagonal:
            digits = 5e-4 if kind == 'mhc_lite' else 5e-5
            assert (d - diagonal[kind]).abs().max() < 1.2 * digits, d
        else:
            assert torch.equal(H_res, torch.eye(4, dtype=torch.float64).expand(2, 8, 4, 4))


# -----------------------------------------------------------------------------
# nanoGPT and GPT-2


def nanogpt_keys(n_layer, bias):
    modules = [f'transformer.h.{i}.{x}' for i in range(n_layer)
               for x in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')] + ['transformer.ln_f']
    keys = {'transformer.wte.weight', 'transformer.wpe.weight', 'lm_head.weight'} | {m + '.weight' for m in modules}
    return keys | {m + '.bias' for m in modules if bias}


@pytest.mark.parametrize('bias', [True, False])
def test_nanogpt_names(bias):
    model = build(bias=bias)
    assert set(model.state_dict()) == nanogpt_keys(2, bias)
    assert model.transformer.wte.weight is model.lm_head.weight
    assert model.get_num_params() == 13 * 16 + 2 * (12 * 16 * 16 + 2 * 16) + 16 + bias * (2 * (9 + 2) * 16 + 16)
    for mode in MODES:
        keys = set(build(residual=mode, bias=False).state_dict())
        assert not any(k.endswith('.bias') and '.mapping.' not in k for k in keys)


def test_gpt2_from_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    transformers = pytest.importorskip('transformers')

    def save(name, **kw):
        config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, **kw)
        hf = transformers.GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for p in hf.parameters():
                p.normal_(std=0.2)
        hf.save_pretrained(tmp_path / name)
        return hf, str(tmp_path / name)

    idx = tokens(T=16, V=50)
    for activation in 'gelu_new', 'gelu':
        hf, path = save(activation, activation_function=activation)
        model = GPT.from_pretrained(path).eval()
        with torch.no_grad():
            torch.testing.assert_close(all_logits(model, idx), hf(idx).logits, rtol=0, atol=1e-5)
        c = model.config
        assert (c.vocab_size, c.block_size, c.n_embd, c.n_layer, c.n_head, c.bias) == (50, 16, 32, 2, 4, True)
    assert GPT.from_pretrained(path, dict(dropout=0.3)).config.dropout == 0.3
    with pytest.raises(ValueError, match='n_layer'):
        GPT.from_pretrained(path, dict(n_layer=3))
    for kw in (dict(activation_function='relu'), dict(n_inner=64), dict(layer_norm_epsilon=1e-6),
               dict(scale_attn_by_inverse_layer_idx=True), dict(scale_attn_weights=False)):
        with pytest.raises(ValueError, match='activation_function') as e:
            GPT.from_pretrained(save('other', **kw)[1])
        assert '\n' not in str(e.value)


# -----------------------------------------------------------------------------
# using the model


def test_forward_returns_nanogpts_pairs():
    model, idx = build(seed=1), tokens()
    last, none = model(idx)
    logits, loss = model(idx, targets=idx)
    assert none is None and last.shape == (2, 1, 13) and logits.shape == (2, 8, 13)
    torch.testing.assert_close(last, logits[:, -1:], rtol=0, atol=1e-12)
    targets = tokens(seed=9)
    targets[0, 3:] = targets[1, 0] = -1
    logp = logits - torch.logsumexp(logits, -1, keepdim=True)
    counted = [logp[b, t, targets[b, t]] for b in range(2) for t in range(8) if targets[b, t] >= 0]
    assert len(counted) == 3 + 7
    torch.testing.assert_close(model(idx, targets=targets)[1], -sum(counted) / 10, rtol=0, atol=1e-12)


def test_a_sequence_that_is_too_long():
    model = build()
    for targets in None, tokens(T=9):
        with pytest.raises(ValueError, match='9.*8') as e:
            model(tokens(T=9), targets)
        assert '\n' not in str(e.value)


def greedy(model, idx, steps, n_vocab=None):
    for _ in range(steps):
        logits = all_logits(model, idx[:, -model.config.block_size :])[:, -1, :n_vocab]
        idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), 1)
    return idx


@pytest.mark.parametrize('mode', ['pre_ln', 'proj_spheret', 's2hc'])
def test_greedy_generation(mode):
    model, prompt = build(seed=3, residual=mode), tokens(T=3)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(6)  # else the tied head says the same token for ever
    expected = greedy(model, prompt, 10)  # 13 tokens: the context slides over the block of 8
    assert len(set(expected[0, 3:].tolist())) > 1
    assert torch.equal(model.generate(prompt, 10, temperature=0), expected)
    assert torch.equal(model.generate(prompt, 10, temperature=0, top_k=5), expected)
    assert torch.equal(model.generate(prompt, 10, top_k=1), expected)
    long = tokens(T=20)
    assert torch.equal(model.generate(long, 3, temperature=0), greedy(model, long, 3))
    assert torch.equal(model.generate(long, 3, temperature=0)[:, 20:], model.generate(long[:, -8:], 3, top_k=1)[:, 8:])
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_sampling():
    model = build(seed=1)
    prompt = tokens(B=1, T=3)
    logits = model(prompt)[0][0, 0]
    many = prompt.expand(6000, -1)
    for temperature, top_k in (1.0, None), (2.5, 0), (0.5, None), (2.5, 4), (2.5, 100):
        keep = logits >= logits.sort().values[-top_k] if top_k and top_k < 13 else logits > -math.inf
        p = torch.where(keep, torch.exp(logits / temperature), 0)
        counts = torch.bincount(model.generate(many, 1, temperature, top_k)[:, -1], minlength=13)
        torch.testing.assert_close(counts / 6000.0, (p / p.sum()).float(), rtol=0, atol=0.03)
        assert (counts[~keep] == 0).all()
    sampled = []
    for top_k in None, 0, 13:
        torch.manual_seed(1)
        sampled.append(model.generate(many[:9], 5, top_k=top_k))
    assert all(torch.equal(s, sampled[0]) for s in sampled)


def test_padded_ids_never_come_out():
    model, prompt = build(seed=1), tokens(T=3, V=10)
    with torch.no_grad():  # ids 10, 11 and 12 are padding, with logits near 2500
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0, 50
        model.lm_head.weight[:10, 0], model.lm_head.weight[10:, 0] = 0, 50
    assert (model.generate(prompt, 5)[:, 3:] >= 10).all()
    for kw in (dict(), dict(temperature=0), dict(top_k=3), dict(top_k=12), dict(temperature=5.0, top_k=0)):
        assert (model.generate(prompt, 20, n_vocab=10, **kw)[:, 3:] < 10).all(), kw
    assert torch.equal(model.generate(prompt, 6, temperature=0, n_vocab=10), greedy(model, prompt, 6, n_vocab=10))


def test_crop_block_size():
    model, idx = build(seed=1), tokens(T=5)
    expected = all_logits(model, idx)
    with pytest.raises(ValueError, match='9.*8'):
        model.crop_block_size(9)
    model.crop_block_size(5)
    assert torch.equal(all_logits(model, idx), expected)
    assert model.config.block_size == 5 and model.state_dict()['transformer.wpe.weight'].shape == (5, 16)
    with pytest.raises(ValueError, match='6.*5'):
        model(tokens(T=6))
    assert model.generate(tokens(T=12), 2).shape == (2, 14)
    model(idx, targets=idx)[1].backward()
    assert model.transformer.wpe.weight.grad.abs().max() > 0


@pytest.mark.parametrize('mode', MODES)
def test_residual_matrices_leave_the_model_alone(mode):
    model, idx = build(seed=1, residual=mode, n_streams=2), tokens(B=3, T=5)
    for _ in range(2):
        found = model.residual_matrices(idx)
        assert [[m.shape for m in row] for row in found] == \
            [[(3, 5, 2), (3, 5, 2), (3, 5, 2, 2)]] * 4 * (mode in HYPER)
        assert not any(m.requires_grad for row in found for m in row)
    assert not any(m._forward_hooks for m in model.modules())


# -----------------------------------------------------------------------------
# config


BAD = [
    (dict(residual='pre_nl'), MODES), (dict(norm='batchnorm'), ['layernorm', 'rmsnorm', 'dyt', 'derf']),
    (dict(place='before'), ['in', 'out', 'both', 'none']),
    (dict(decay='cosine'), ['sqrt', 'harmonic', 'linear', 'none']),
    (dict(bound='none'), ['project', 'clamp']), (dict(readout='sum'), ['mean', 'softmax']),
    (dict(residual=None), MODES), (dict(bound=None), ['project', 'clamp']), (dict(readout=None), ['mean', 'softmax']),
    (dict(n_embd=18, n_head=4), ['18', '4']),
    *(({key: value}, [str(value)]) for value in (0, -1)
      for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_streams')),
    *((dict(dropout=x), [str(x)]) for x in (-0.1, 1.0)), *((dict(p=x), [str(x)]) for x in (0, -1.0, math.nan)),
    (dict(residual='kromhc', n_streams=3), ['3', 's2hc']), (dict(residual='kromhc', n_streams=6), ['6', 's2hc']),
    (dict(residual='mhc_lite', n_streams=7), ['7', 's2hc']),
    (dict(residual='mhc_lite', n_streams=7, static=True), ['7', 's2hc']),
    *((dict(res_init=x), [str(x), '-100']) for x in (0.5, -101.0, -math.inf, math.nan)),
]


@pytest.mark.parametrize('kw, words', BAD, ids=str)
def test_models_that_cannot_be(kw, words):
    with pytest.raises(ValueError) as e:
        build(**kw)
    text = str(e.value)
    assert '\n' not in text and all(word in text for word in words), text
    assert any(key in text for key in kw), text


def test_defaults_are_nanogpts():
    c = GPTConfig()
    assert list(vars(c).items())[:16] == [
        ('block_size', 1024), ('vocab_size', 50304), ('n_layer', 12), ('n_head', 12), ('n_embd', 768), ('dropout', 0.0),
        ('bias', True), ('residual', 'pre_ln'), ('norm', None), ('place', None), ('n_streams', 4), ('p', 0.5),
        ('decay', None), ('bound', 'project'), ('static', False), ('readout', 'mean')]
    assert list(RESIDUALS) == MODES


BASE = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias', 'residual', 'norm', 'place',
        'embed_norm', 'embed_scale', 'gelu_tanh'}


@pytest.mark.parametrize('mode', MODES)
def test_the_keys_that_matter(mode):
    own = {'decay', 'bound'} if mode in SPHERE else {'n_streams', 'static', 'readout'} if mode in HYPER else set()
    own |= {'res_init'} if mode in ('mhc', 'mhc_lite', 'kromhc', 's2hc') else set()
    own |= {'p'} if mode == 'p_spheret' else {'dyt_alpha'} if mode == 'pre_dyt' else set()
    assert build(residual=mode).used == BASE | own
    assert build(residual=mode, norm='derf').used == BASE | own | {'dyt_alpha'}
    assert build(residual=mode, norm='rmsnorm').used == BASE | own - {'dyt_alpha'}
    if mode in HYPER:  # nothing is left of the connection
        assert build(residual=mode, n_streams=1).used == BASE | {'n_streams'}


# -----------------------------------------------------------------------------
# cost


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('static', [False, True])
def test_flops(mode, static):
    """6 a multiply-add: one for each parameter but the positions, and the stream's matrices. 12 n_layer C T more."""
    model, C, n = build(residual=mode, n_layer=3, static=static), 16, 4
    macs = sum(p.numel() for p in model.parameters()) - 8 * 16
    if mode in HYPER:
        macs += 2 * 3 * (n * C + n * C + (n * n * C if mode != 'hc_identity' else 0))  # read, write, mix
    if mode == 'hc' and not static:
        macs += 2 * 3 * (n - 1) * (n + 2) * C  # one projection for all streams: each weight works n times a token
    flops = 6 * macs + 12 * 3 * C * 8
    assert model.flops_per_token() == flops
    assert model.estimate_mfu(5, 0.25) == pytest.approx(flops * 8 * 5 / 0.25 / 312e12)
    assert model.estimate_mfu(5, 0.25, peak_flops=1e9) == pytest.approx(flops * 8 * 5 / 0.25 / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['pre_ln', 'proj_spheret', 's2hc', 'mhc'])
def test_compiled_equals_eager(mode):
    torch._dynamo.reset()
    model = build(seed=1, residual=mode).float().train()
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for f in model, compiled:
        model.zero_grad()
        loss = f(tokens(), targets=tokens(seed=6))[1]
        loss.backward()
        results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    (loss, grads), (loss_c, grads_c) = results
    torch.testing.assert_close(loss_c, loss, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads_c, grads):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -----------------------------------------------------------------------------
# budgets


def repository_files():
    git = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard'], cwd=ROOT, text=True,
                         capture_output=True)
    if git.returncode:
        pytest.skip('not a git checkout')
    return [Path(name) for name in git.stdout.splitlines() if (ROOT / name).exists()]


def test_files_stay_few_and_flat():
    files = repository_files()
    assert Path('model.py') in files
    top = [f for f in files if f.parent == Path('.') and f.suffix == '.py']
    assert len(top) <= 16, top
    deep = [str(f) for f in files if len(f.parts) > (3 if f.parts[0] == 'data' else 2)]
    assert not deep


@pytest.mark.parametrize('name, lines', [('model.py', 600), ('train.py', 450)])
def test_scripts_stay_short(name, lines):
    assert len((ROOT / name).read_text(encoding='utf-8').splitlines()) <= lines


def test_train_keys_stay_few():
    keys = set()
    for node in ast.parse((ROOT / 'train.py').read_text(encoding='utf-8')).body:
        if any(isinstance(n, ast.Call) and 'configure' in ast.unparse(n.func) for n in ast.walk(node)):
            break
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            keys.add(node.targets[0].id)
    else:
        pytest.fail('train.py never calls configure()')
    assert {'residual', 'learning_rate', 'n_layer'} <= keys and len(keys) <= 70


# -----------------------------------------------------------------------------
# faults that were found from outside


@pytest.mark.parametrize('mode', RESIDUALS)
def test_meta_device_builds_without_values(mode):
    with torch.device('meta'):
        model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=16, residual=mode))
    assert all(p.is_meta for p in model.parameters())


def test_cropping_one_model_leaves_the_other():
    config = GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)
    one, other = GPT(config), GPT(config)
    one.transformer.wpe.weight.requires_grad_(False)
    one.crop_block_size(4)
    assert (one.config.block_size, other.config.block_size, config.block_size) == (4, 8, 8)
    assert not one.transformer.wpe.weight.requires_grad
    for size in (0, -1, 5):
        with pytest.raises(ValueError, match='block_size'):
            one.crop_block_size(size)


def test_frozen_scalars_of_a_sphere_stay():
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16, residual='proj_spheret'))
    raw = model.transformer.h[0].res_1.step.raw
    raw.requires_grad_(False).fill_(5.0)
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
    x = torch.zeros(1, 8, dtype=torch.long)
    model(x, x)[1].backward()
    optimizer.step()
    assert raw.item() == 5.0


def test_generate_refuses_what_has_no_meaning():
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)).eval()
    x = torch.zeros(1, 1, dtype=torch.long)
    for keys in (dict(temperature=-1), dict(top_k=-1), dict(temperature=math.nan)):
        with pytest.raises(ValueError, match='temperature|top_k'):
            model.generate(x, 1, **keys)
    assert torch.equal(model.generate(x, 5, temperature=1e-45), model.generate(x, 5, temperature=0))


def test_an_untied_gpt2_is_refused(tmp_path):
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=16, n_layer=1, n_head=2,
                                     tie_word_embeddings=False)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='tie_word_embeddings'):
        GPT.from_pretrained(str(tmp_path))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('kind', hyperconn.KINDS)
def test_mapping_of_a_half_model_is_float32(kind, dtype):
    torch.manual_seed(0)
    mapping = hyperconn.KINDS[kind](4, 64, 1)
    mapping.reset_parameters()
    with torch.no_grad():
        mapping.weight.normal_(std=0.3)
        mapping.scale.fill_(0.5)
    mapping.to(dtype)
    x = (20 * torch.randn(1, 3, 4, 64)).to(dtype)  # |vec x|^2 is past the largest float16
    half, full = mapping(x), mapping.float()(x.float())
    for a, b in zip(half, full):
        if a is not None:
            assert a.dtype == torch.float32 and torch.allclose(a, b, atol=1e-5)
