"""
Hyper-connections against the formulas of DESIGN.md section 3, written again here with plain loops in float64.
Gradients are compared with autograd through those loops.
"""
import itertools
import math
import re
from functools import partial, reduce

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperconn import KINDS, birkhoff, cayley, helmert, kronecker, read, sinkhorn, skew, spectral_sphere, write

F64 = torch.float64
ALL = ['hc', 'mhc', 'mhc_lite', 'kromhc', 's2hc', 'hc_identity', 'hc_orthogonal']
STOCHASTIC = ['mhc', 'mhc_lite', 'kromhc', 's2hc']                  # unit row sums
DOUBLY = ['mhc_lite', 'kromhc', 's2hc']                             # unit column sums and spectral norm too


def shapes(kinds=ALL, ns=(2, 3, 4, 5)):
    """(kind, n) pairs that exist; s2hc up to n = 7, where cayley needs a solve."""
    return [(k, n) for k in kinds for n in ns + ((7,) if k == 's2hc' else ()) if k != 'kromhc' or n in (2, 4, 8)]


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# yardsticks, from the text of the specification

def helmert_ref(n):
    z = torch.zeros(n, n - 1, dtype=F64)
    for i in range(1, n):                                           # column i, 1-based
        for row in range(i):
            z[row, i - 1] = 1 / math.sqrt(i * (i + 1))
        z[i, i - 1] = -i / math.sqrt(i * (i + 1))
    return z


def skew_ref(v, m):
    basis = torch.zeros(m * (m - 1) // 2, m, m, dtype=v.dtype)
    for k, (i, j) in enumerate(zip(*torch.triu_indices(m, m, 1))):  # row-major
        basis[k, i, j], basis[k, j, i] = 1, -1
    return torch.einsum('...k,kij->...ij', v, basis)


def cayley_ref(a):
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    return torch.linalg.solve(eye + a, eye - a)


def sinkhorn_ref(logits, iters=20):
    m = torch.exp(logits - logits.amax((-2, -1), keepdim=True).detach())
    for _ in range(iters):
        m = m / m.sum(-2, keepdim=True)                             # columns to 1
        m = m / m.sum(-1, keepdim=True)                             # then rows
    return m


def birkhoff_ref(logits, n):
    weights = torch.softmax(logits, -1)
    out = 0
    for k, q in enumerate(sorted(itertools.permutations(range(n)))):
        p = torch.zeros(n, n, dtype=logits.dtype)
        for i in range(n):
            p[i, q[i]] = 1                                          # row i reads stream q(i)
        out = out + weights[..., k, None, None] * p
    return out


def kronecker_ref(logits, n):
    def one(x):                                                     # (log2 n, 2) -> (n, n)
        factors = []
        for pair in x:
            p = pair[0].exp() / pair.exp().sum()
            factors.append(torch.stack([torch.stack([p, 1 - p]), torch.stack([1 - p, p])]))
        return reduce(torch.kron, factors)
    flat = logits.reshape(-1, *logits.shape[-2:])
    return torch.stack([one(x) for x in flat]).reshape(*logits.shape[:-2], n, n)


def spectral_sphere_ref(u, v, s):
    m = s.shape[-1]
    uz = helmert_ref(m + 1)
    left, right = uz @ cayley_ref(skew_ref(u, m)), uz @ cayley_ref(skew_ref(v, m))
    return torch.full((m + 1, m + 1), 1 / (m + 1), dtype=F64) + left @ torch.diag_embed(s) @ right.mT


def n_logits(kind, n):
    return {'mhc': n * n, 'mhc_lite': math.factorial(n), 'kromhc': 2 * round(math.log2(n)), 's2hc': (n - 1)**2,
            'hc_identity': 0, 'hc_orthogonal': n * (n - 1) // 2}[kind]


def mapping_ref(kind, q, X, n):
    """q: dict of a module's parameters (only 'bias' where static) -> H_pre, H_post, H_res (I for hc_identity)."""
    B, T, _, C = X.shape
    static = 'weight' not in q
    if kind == 'hc':
        a_r, a_m, b = q['bias'][:n * n].reshape(n, n), q['bias'][n * n:n * n + n], q['bias'][n * n + n:]
        a_r, a_m, b = a_r.expand(B, T, n, n), a_m.expand(B, T, n), b.expand(B, T, n)
        if not static:
            xb = X / torch.sqrt((X * X).mean(-1, keepdim=True) + 1e-6)
            s_a, s_b = q['scale']
            w_r, w_m, w_b = q['weight'][:n], q['weight'][n], q['weight'][n + 1]
            a_r = a_r + s_a * torch.tanh(xb @ w_r.T)                # row = stream i, column = r_k
            a_m = a_m + s_a * torch.tanh(xb @ w_m)
            b = b + s_b * torch.tanh(xb @ w_b)
        return a_m, b, a_r.mT
    if not static:
        x = torch.cat([X[:, :, i] for i in range(n)], -1)           # stream-major
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * q['gain']
        t = x @ q['weight'].T
    else:
        t = torch.zeros(B, T, len(q['bias']), dtype=F64)
    a = q.get('scale', torch.zeros(7, dtype=F64))
    bias = q['bias']
    H_pre = torch.sigmoid(a[0] * t[..., :n] + bias[:n])
    H_post = 2 * torch.sigmoid(a[1] * t[..., n:2 * n] + bias[n:2 * n])
    t, b = t[..., 2 * n:], bias[2 * n:]
    if kind == 'hc_identity':
        H_res = torch.eye(n, dtype=F64).expand(B, T, n, n)
    elif kind == 'mhc':
        H_res = sinkhorn_ref((a[2] * t + b).reshape(B, T, n, n))
    elif kind == 'mhc_lite':
        H_res = birkhoff_ref(a[2] * t + b, n)
    elif kind == 'kromhc':
        H_res = kronecker_ref((a[2] * t + b).reshape(B, T, -1, 2), n)
    elif kind == 'hc_orthogonal':
        g = 1 if static else a[3]
        H_res = cayley_ref(skew_ref(g * torch.tanh(a[2] * t + b), n))
    elif kind == 's2hc':
        k = (n - 1) * (n - 2) // 2
        g_u, g_v = (1, 1) if static else (a[5], a[6])
        u = g_u * torch.tanh(a[2] * t[..., :k] + b[:k])
        v = g_v * torch.tanh(a[3] * t[..., k:2 * k] + b[k:2 * k])
        H_res = spectral_sphere_ref(u, v, torch.tanh(a[4] * t[..., 2 * k:] + b[2 * k:]))
    return H_pre, H_post, H_res


# ---------------------------------------------------------------------------------------------------------------------
# helpers

def same_with_gradients(fn, ref, *inputs, tol=1e-11):
    """Values, and the gradients of a random projection, of fn and ref."""
    a = [x.clone().requires_grad_() for x in inputs]
    b = [x.clone().requires_grad_() for x in inputs]
    got, want = fn(*a), ref(*b)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)
    g = randn(*want.shape, seed=77)
    for x, y in zip(torch.autograd.grad((got * g).sum(), a), torch.autograd.grad((want * g).sum(), b)):
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)


def sums_and_norm(H):
    """Largest distance of the row sums, column sums and spectral norms of H (..., n, n) from 1, in float64."""
    H = H.detach().double()
    return ((H.sum(-1) - 1).abs().max().item(), (H.sum(-2) - 1).abs().max().item(),
            (torch.linalg.matrix_norm(H, 2) - 1).abs().max().item())


def fresh(kind, n, C, sublayer=1, static=False, dtype=F64):
    m = KINDS[kind](n, C, sublayer, static=static).to(dtype)
    with torch.no_grad():
        for p in m.parameters():
            p.fill_(float('nan'))                                   # created uninitialised: a reset must reach it all
    m.reset_parameters()
    return m


def randomised(kind, n, C=6, sublayer=1, static=False, dtype=F64, size=1.0, seed=0):
    m = fresh(kind, n, C, sublayer, static, dtype)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in m.parameters():
            x = size * torch.randn(p.shape, generator=gen, dtype=F64)
            p.copy_(x / math.sqrt(p.shape[-1]) if p.ndim == 2 else x)
    return m


# ---------------------------------------------------------------------------------------------------------------------
# the matrices as functions

@pytest.mark.parametrize('n', range(2, 10))
def test_helmert(n):
    z = helmert(n)
    assert z.shape == (n, n - 1) and z.dtype == F64
    torch.testing.assert_close(z, helmert_ref(n), rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(z.T @ z, torch.eye(n - 1, dtype=F64), rtol=0, atol=1e-15)
    assert z.sum(0).abs().max() < 1e-15


@pytest.mark.parametrize('m', range(1, 8))
def test_skew(m):
    v = randn(2, 3, m * (m - 1) // 2)
    a = skew(v, m)
    assert a.shape == (2, 3, m, m)
    if m == 1:
        assert (a == 0).all()
        return
    assert torch.equal(a, -a.mT)
    same_with_gradients(lambda v: skew(v, m), lambda v: skew_ref(v, m), v)
    if m == 4:
        want = [[0, 1, 2, 3], [-1, 0, 4, 5], [-2, -4, 0, 6], [-3, -5, -6, 0]]
        assert skew(torch.arange(1.0, 7.0), 4).tolist() == want


@pytest.mark.parametrize('m', range(1, 8))
def test_cayley(m):
    eye = torch.eye(m, dtype=F64)
    for size in (1e-6, 1e-2, 1.0, 30.0):
        v = size * randn(5, 2, m * (m - 1) // 2, seed=m)
        q = cayley(skew_ref(v, m))
        assert q.shape == (5, 2, m, m)
        torch.testing.assert_close(q.mT @ q, eye.expand_as(q), rtol=0, atol=1e-12)
        if m == 1:
            assert (q == 1).all()
            continue
        tol = 1e-11 * max(size, 1)
        same_with_gradients(lambda v: cayley(skew(v, m)), lambda v: cayley_ref(skew_ref(v, m)), v, tol=tol)
    torch.testing.assert_close(cayley(torch.zeros(m, m, dtype=F64)), eye, rtol=0, atol=0)


def test_cayley_by_hand():
    # (I + A)^-1 (I - A), without 1/2: at v = 1 a turn by -90 degrees in the plane of streams 0 and 1
    torch.testing.assert_close(cayley(torch.tensor([[0.0, 1.0], [-1.0, 0.0]])), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    a = 1e-4 * skew_ref(randn(6), 4)                                # I - 2A to first order
    torch.testing.assert_close(cayley(a), torch.eye(4, dtype=F64) - 2 * a, rtol=0, atol=1e-6)


@pytest.mark.parametrize('m', [2, 3, 4, 5])
def test_cayley_gradcheck(m):
    v = randn(3, m * (m - 1) // 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: cayley(skew(v, m)), v)
    a = skew_ref(randn(2, m * (m - 1) // 2, seed=1), m)             # as a function of A itself, along skew directions
    same_with_gradients(lambda a: cayley(a - a.mT), lambda a: cayley_ref(a - a.mT), a + randn(2, m, m, seed=2))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def lapack(fn, *args):
    """Names of the dense linear algebra operators in fn(*args), forward and backward."""
    with Operators() as ops:
        fn(*args).sum().backward()
    return [name for name in ops.seen if re.search(r'solve|inv|geqrf|linalg_(?!.*norm)', name)]


def test_no_solve_per_token_up_to_n_4(monkeypatch):
    assert lapack(cayley, skew(randn(3, 10).requires_grad_(), 5))   # the detector detects

    def refuse(*args, **kwargs):
        raise AssertionError('a LAPACK call')

    for name in ('solve', 'solve_ex', 'inv', 'inv_ex', 'lu', 'lu_factor', 'svd', 'qr', 'matrix_exp'):
        monkeypatch.setattr(torch.linalg, name, refuse)
    monkeypatch.setattr(torch, 'inverse', refuse)
    for m in (2, 3, 4):
        assert not lapack(cayley, skew(randn(3, m * (m - 1) // 2).requires_grad_(), m))
    for kind in ('s2hc', 'hc_orthogonal'):
        for n in (2, 3, 4):
            assert not lapack(lambda m, x: m(x)[2], randomised(kind, n), randn(2, 3, n, 6))


@pytest.mark.parametrize('n', [2, 3, 4, 5])
def test_sinkhorn(n):
    for size in (0.1, 2.0, 8.0):
        logits = size * randn(3, 2, n, n, seed=n)
        same_with_gradients(sinkhorn, sinkhorn_ref, logits)
    for iters in (1, 2, 7):
        same_with_gradients(partial(sinkhorn, iters=iters), partial(sinkhorn_ref, iters=iters), logits)
        assert torch.equal(sinkhorn(logits, iters), sinkhorn(logits, iters=iters))
    assert torch.equal(sinkhorn(logits), sinkhorn(logits, iters=20))                       # 20 is the default
    rows, columns, _ = sums_and_norm(sinkhorn(logits))
    assert rows < 1e-14 and columns > 1e-9                          # rows last, hence exact; columns only nearly
    rows, columns, _ = sums_and_norm(sinkhorn(0.1 * logits))
    assert rows < 1e-14 and columns < 1e-6
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 5), randn(2, n, n, seed=3).requires_grad_())


def test_sinkhorn_is_not_transposed():
    logits = torch.zeros(3, 3, dtype=F64)
    logits[0, 2] = logits[1, 0] = logits[2, 1] = 30.0
    want = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 0]], dtype=F64)
    torch.testing.assert_close(sinkhorn(logits), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize('n', [2, 3, 4, 5])
def test_birkhoff(n):
    k = math.factorial(n)
    same_with_gradients(lambda x: birkhoff(x, n), lambda x: birkhoff_ref(x, n), 2 * randn(3, 2, k, seed=n))
    one_hot = 1e4 * torch.eye(k, dtype=F64)
    out = birkhoff(one_hot, n)
    for i, q in enumerate(itertools.permutations(range(n))):        # lexicographic; row r of P_q reads stream q(r)
        assert out[i].argmax(-1).tolist() == list(q) and (out[i].max(-1).values == 1).all()
    assert torch.equal(out[0], torch.eye(n, dtype=F64))
    rows, columns, norm = sums_and_norm(birkhoff(3 * randn(50, k, seed=1), n))
    assert max(rows, columns, norm) < 1e-12


def test_birkhoff_cycle():
    # the fourth of the permutations of 3 is (1, 2, 0): output 0 reads stream 1. Its inverse (2, 0, 1) is the fifth
    logits = torch.full((6,), -1e4, dtype=F64)
    logits[3] = 0
    assert birkhoff(logits, 3).tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize('n', [2, 4, 8, 16])
def test_kronecker(n):
    k = round(math.log2(n))
    same_with_gradients(lambda x: kronecker(x, n), lambda x: kronecker_ref(x, n), 2 * randn(3, 2, k, 2, seed=n))
    rows, columns, norm = sums_and_norm(kronecker(3 * randn(20, k, 2, seed=1), n))
    assert max(rows, columns, norm) < 1e-12


def test_kronecker_order_of_factors():
    swap, keep = [-1e4, 0.0], [0.0, -1e4]                           # p = 0 and p = 1
    outer = kronecker(torch.tensor([swap, keep], dtype=F64), 4)     # the first factor acts on the high bit of the index
    assert outer.argmax(-1).tolist() == [2, 3, 0, 1]
    inner = kronecker(torch.tensor([keep, swap], dtype=F64), 4)
    assert inner.argmax(-1).tolist() == [1, 0, 3, 2]
    first_of_three = kronecker(torch.tensor([swap, keep, keep], dtype=F64), 8)
    assert first_of_three.argmax(-1).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize('n', [2, 3, 4, 5, 7])
def test_spectral_sphere(n):
    k = (n - 1) * (n - 2) // 2
    u, v, s = randn(3, 2, k), randn(3, 2, k, seed=1), torch.tanh(randn(3, 2, n - 1, seed=2))
    if k:
        same_with_gradients(spectral_sphere, spectral_sphere_ref, u, v, s)
    else:                                                           # n = 2: no core, u and v are empty
        same_with_gradients(lambda s: spectral_sphere(u, v, s), lambda s: spectral_sphere_ref(u, v, s), s)
        want = torch.stack([1 + s, 1 - s, 1 - s, 1 + s], -1).view(3, 2, 2, 2) / 2
        torch.testing.assert_close(spectral_sphere(u, v, s), want, rtol=0, atol=1e-15)
    rows, columns, norm = sums_and_norm(spectral_sphere(u, v, s))
    assert max(rows, columns, norm) < 1e-12
    if n > 2:
        assert (spectral_sphere(u, v, s) < -1e-3).any()             # signed, unlike a doubly stochastic matrix


def cayley_coordinates(q):
    """
    An orthogonal q (m, m) -> (v, signs) with q = cayley(skew(v)) diag(signs) and |v| <= 1. That such signs exist for
    every q is O'Dorney's theorem (2014); here they are found by trying all 2^m.
    """
    m = len(q)
    eye = torch.eye(m, dtype=F64)
    best = None
    for signs in itertools.product((1.0, -1.0), repeat=m):
        d = torch.tensor(signs, dtype=F64)
        if torch.linalg.det(eye + q * d).abs() < 1e-9:              # -1 is an eigenvalue: no Cayley transform
            continue
        a = torch.linalg.solve(eye + q * d, eye - q * d)            # the transform is its own inverse
        v = a[torch.triu_indices(m, m, 1).unbind()]
        size = v.abs().max().item() if len(v) else 0.0
        if best is None or size < best[0]:
            best = size, v, d
    assert best[0] <= 1 + 1e-9
    return best[1], best[2]


@pytest.mark.parametrize('n', [2, 3, 4, 5])
def test_spectral_sphere_reaches_the_whole_set(n):
    # every H with H 1 = 1, H^T 1 = 1, ||H||_2 <= 1 is J + Uz W Uz^T with ||W||_2 <= 1; W = P diag(sigma) Q^T, and the
    # signs of P's and Q's columns go into s
    z = helmert_ref(n)
    eye = torch.eye(n, dtype=F64)
    cores = [c / torch.linalg.matrix_norm(c, 2) for c in randn(8, n - 1, n - 1, seed=n)]                   # ||W|| = 1
    cores += [0.3 * cores[0], 0 * cores[0], eye[1:, 1:], -eye[1:, 1:]]
    cores += [z.T @ eye[list(q)] @ z for q in itertools.islice(itertools.permutations(range(n)), 30)]
    for w in cores:
        p, sigma, qt = torch.linalg.svd(w)
        (u, d_u), (v, d_v) = cayley_coordinates(p), cayley_coordinates(qt.T)
        s = d_u * sigma * d_v
        assert s.abs().max() <= 1 + 1e-12
        want = torch.full((n, n), 1 / n, dtype=F64) + z @ w @ z.T
        torch.testing.assert_close(spectral_sphere(u, v, s), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize('dtype', [torch.float32, F64])
def test_huge_logits(dtype):
    # +-1e4 everywhere: no NaN, no inf, in values and gradients
    for n in (2, 4):
        for fn, shape in ((sinkhorn, (n, n)), (partial(birkhoff, n=n), (math.factorial(n),)),
                          (partial(kronecker, n=n), (round(math.log2(n)), 2))):
            signs = torch.sign(randn(40, *shape, seed=n, dtype=dtype))
            dominant = torch.zeros(1, *shape, dtype=dtype)
            dominant[(0,) * (len(shape) + 1)] = 1
            ones, spread = torch.ones_like(signs), randn(9, *shape, dtype=dtype)
            for x in (signs, ones, -ones, dominant, -dominant, spread):
                x = (1e4 * x).requires_grad_()
                out = fn(x)
                assert torch.isfinite(out).all() and (out >= 0).all()
                # float32 keeps logits of 1e4 to 1e-3 only
                assert sums_and_norm(out)[0] < (1e-10 if dtype == F64 else 2e-3)
                (grad,) = torch.autograd.grad((out * randn(*out.shape, dtype=dtype)).sum(), x)
                assert torch.isfinite(grad).all()


@pytest.mark.parametrize('n', [2, 3, 4])
def test_sinkhorn_does_not_clip_its_logits(n):
    def log_space(x):
        for _ in range(20):
            x = x - torch.logsumexp(x, -2, keepdim=True)
            x = x - torch.logsumexp(x, -1, keepdim=True)
        return x.exp()

    for size in (60.0, 1e3, 1e4):
        same_with_gradients(sinkhorn, log_space, size * randn(20, n, n, seed=n), tol=1e-8)


@pytest.mark.parametrize('n', [2, 4])
def test_batch_shapes_and_types(n):
    k, m = round(math.log2(n)), n - 1
    c = m * (m - 1) // 2
    cases = [(sinkhorn, [(n, n)]), (lambda x: birkhoff(x, n), [(math.factorial(n),)]),
             (lambda x: kronecker(x, n), [(k, 2)]), (spectral_sphere, [(c,), (c,), (m,)])]
    if c:
        cases.append((lambda v: cayley(skew(v, m)), [(c,)]))
    for fn, tails in cases:
        full = fn(*(0.5 * randn(2, 3, *t, seed=i) for i, t in enumerate(tails)))
        for dtype, tol in ((F64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 6e-2)):
            inputs = [(0.5 * randn(2, 3, *t, seed=i)).to(dtype) for i, t in enumerate(tails)]
            out = fn(*inputs)
            if dtype != torch.bfloat16:
                assert out.dtype == dtype
            torch.testing.assert_close(out.double(), full, rtol=0, atol=tol)
            one = fn(*(x[1, 2] for x in inputs))                    # no batch shape at all
            torch.testing.assert_close(one.double(), full[1, 2], rtol=0, atol=tol)
        strided = fn(*(randn(3, 2, *t, seed=5 + i).transpose(0, 1) for i, t in enumerate(tails)))
        straight = fn(*(randn(3, 2, *t, seed=5 + i).transpose(0, 1).contiguous() for i, t in enumerate(tails)))
        torch.testing.assert_close(strided, straight, rtol=0, atol=1e-14)


# ---------------------------------------------------------------------------------------------------------------------
# read and write

@pytest.mark.parametrize('n', [1, 2, 4, 7])
def test_read_and_write(n):
    X, f = randn(2, 3, n, 5), randn(2, 3, 5, seed=1)
    H_pre, H_post, H_res = randn(2, 3, n, seed=2), randn(2, 3, n, seed=3), randn(2, 3, n, n, seed=4)
    same_with_gradients(read, lambda h, x: sum(h[:, :, i, None] * x[:, :, i] for i in range(n)), H_pre, X)

    def write_ref(x, f, post, res):
        rows = [sum(res[:, :, i, j, None] * x[:, :, j] for j in range(n)) + post[:, :, i, None] * f for i in range(n)]
        return torch.stack(rows, 2)

    same_with_gradients(write, write_ref, X, f, H_post, H_res)
    eye = torch.eye(n, dtype=F64).expand(2, 3, n, n)
    same_with_gradients(lambda x, f, post: write(x, f, post, None), lambda x, f, post: write_ref(x, f, post, eye),
                        X, f, H_post)


def test_read_and_write_with_only_some_gradients():
    X, f, H_post, H_res = randn(2, 3, 4, 5), randn(2, 3, 5, seed=1), randn(2, 3, 4, seed=3), randn(2, 3, 4, 4, seed=4)
    g = randn(2, 3, 4, 5, seed=5)
    full = [x.clone().requires_grad_() for x in (X, f, H_post, H_res)]
    out = torch.einsum('btij,btjc->btic', full[3], full[0]) + torch.einsum('bti,btc->btic', full[2], full[1])
    want = torch.autograd.grad(out, full, g)
    for i in range(4):
        inputs = [x.clone().requires_grad_(k == i) for k, x in enumerate((X, f, H_post, H_res))]
        (got,) = torch.autograd.grad(write(*inputs), inputs[i], g)
        torch.testing.assert_close(got, want[i], rtol=1e-12, atol=1e-12)
    assert not write(X, f, H_post, H_res).requires_grad and not read(H_post, X).requires_grad
    before = X.clone()
    write(X, f, H_post, None)
    assert torch.equal(X, before)                                   # H_res = I must not write into the streams


@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('kind', ALL)
def test_a_whole_sub_layer(kind, static):
    # mapping, read, branch, write: expanded (static) and computed matrices, and every path of the gradient to X
    n, C = 4, 6
    m = randomised(kind, n, C, static=static)
    w = randn(C, C, seed=4)
    q = {name: p.detach().clone().requires_grad_() for name, p in m.named_parameters()}
    X1, X2 = (randn(2, 3, n, C, seed=9).requires_grad_() for _ in range(2))
    H_pre, H_post, H_res = m(X1)
    out = write(X1, torch.tanh(read(H_pre, X1) @ w), H_post, H_res)
    H_pre, H_post, H_res = mapping_ref(kind, q, X2, n)
    f = torch.tanh(torch.einsum('bti,btic->btc', H_pre, X2) @ w)
    want = torch.einsum('btij,btjc->btic', H_res, X2) + torch.einsum('bti,btc->btic', H_post, f)
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-11)
    g = randn(2, 3, n, C, seed=5)
    grads = torch.autograd.grad(out, [X1, *m.parameters()], g)
    for a, b in zip(grads, torch.autograd.grad(want, [X2, *q.values()], g)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('kind', ALL)
def test_differentiating_twice(kind):
    # not needed for training, but a backward written by hand must not be silently wrong there
    n, C = 4, 3
    m = randomised(kind, n, C)
    names = [name for name, _ in m.named_parameters()]

    def fn(X, f, *params):
        H_pre, H_post, H_res = torch.func.functional_call(m, dict(zip(names, params)), (X,))
        return write(X, f * read(H_pre, X), H_post, H_res)

    inputs = [randn(1, 2, n, C), randn(1, 2, C, seed=1), *m.parameters()]
    assert torch.autograd.gradgradcheck(fn, [x.detach().requires_grad_() for x in inputs], fast_mode=True)


def test_row_i_of_H_res_makes_output_stream_i():
    X, f, H_post = randn(1, 1, 4, 5), randn(1, 1, 5, seed=1), randn(1, 1, 4, seed=2)
    H_res = randn(1, 1, 4, 4, seed=3)
    base = write(X, f, H_post, H_res)
    for j in range(4):                                              # push input stream j, look at every output stream
        moved = X.clone()
        moved[0, 0, j] += 1.0
        delta = (write(moved, f, H_post, H_res) - base)[0, 0]
        torch.testing.assert_close(delta, H_res[0, 0, :, j, None].expand(4, 5), rtol=0, atol=1e-12)
    for i, j in itertools.product(range(4), repeat=2):              # and H_res does have an effect, on its row alone
        bent = H_res.clone()
        bent[0, 0, i, j] += 1.0
        delta = (write(X, f, H_post, bent) - base)[0, 0]
        torch.testing.assert_close(delta[i], X[0, 0, j], rtol=0, atol=1e-12)
        assert (delta[[r for r in range(4) if r != i]].abs() < 1e-12).all()


# ---------------------------------------------------------------------------------------------------------------------
# mappings

@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('kind,n', shapes())
def test_mapping_against_the_formula(kind, n, static):
    C = 6
    m = randomised(kind, n, C, static=static)
    X = randn(2, 3, n, C, seed=9).requires_grad_(not static)
    H = m(X)
    assert (H[2] is None) == (kind == 'hc_identity')
    q = {name: p.detach().clone().requires_grad_() for name, p in m.named_parameters()}
    X2 = X.detach().clone().requires_grad_(not static)
    want = mapping_ref(kind, q, X2, n)
    shape = [(2, 3, n), (2, 3, n), (2, 3, n, n)]
    loss = ref = 0
    for i, (a, b) in enumerate(zip(H, want)):
        if a is None:
            continue
        assert a.shape == shape[i] and a.dtype == F64
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        g = randn(*b.shape, seed=20 + i)
        loss, ref = loss + (a * g).sum(), ref + (b * g).sum()
    inputs = dict(m.named_parameters()) | ({} if static else {'X': X})
    grads = torch.autograd.grad(loss, list(inputs.values()))
    refs = torch.autograd.grad(ref, [*q.values()] + ([] if static else [X2]))
    assert list(q) + ([] if static else ['X']) == list(inputs)
    for name, a, b in zip(inputs, grads, refs):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=f'gradient of {name}')
        # every single number learns, apart from the two gates and taus of an empty core (s2hc, n = 2)
        if not (kind == 's2hc' and n == 2 and name == 'scale'):
            assert (a.abs() > 1e-12).all(), name


@pytest.mark.parametrize('kind,n', shapes(DOUBLY))
def test_sums_and_norm_are_exact(kind, n):
    X = 3 * randn(4, 16, n, 6, seed=2)
    for size in (0.3, 1.0, 3.0):
        H = randomised(kind, n, size=size)(X)[2]
        assert max(sums_and_norm(H)) < 1e-12
        H = randomised(kind, n, static=True, size=size)(X)[2]
        assert max(sums_and_norm(H)) < 1e-12


@pytest.mark.parametrize('kind,n', shapes(DOUBLY + ['mhc', 'hc_orthogonal']))
def test_products_over_64_layers(kind, n):
    X = randn(2, 3, n, 6, seed=2)
    product = torch.eye(n, dtype=F64)
    for layer in range(64):
        product = randomised(kind, n, sublayer=layer, seed=layer)(X)[2] @ product
    if kind == 'hc_orthogonal':
        torch.testing.assert_close(product.mT @ product, torch.eye(n, dtype=F64).expand_as(product), rtol=0, atol=1e-12)
    else:
        rows, columns, norm = sums_and_norm(product)
        assert rows < 1e-12
        if kind != 'mhc':
            assert columns < 1e-12 and norm < 1e-12


def test_mhc_rows_are_exact_and_columns_are_not():
    X = randn(4, 16, 4, 6, seed=2)
    rows, columns, norm = sums_and_norm(randomised('mhc', 4, size=4.0)(X)[2])
    assert rows < 1e-14 and columns > 1e-3 and norm > 1e-6


@pytest.mark.parametrize('n', [2, 3, 4, 5])
def test_hc_orthogonal_keeps_norms_and_not_the_mean(n):
    X = randn(4, 16, n, 6, seed=2)
    for static in (False, True):
        H = randomised('hc_orthogonal', n, static=static)(X)[2]
        torch.testing.assert_close(H.mT @ H, torch.eye(n, dtype=F64).expand_as(H), rtol=0, atol=1e-12)
        assert sums_and_norm(H)[0] > 1e-2


@pytest.mark.parametrize('kind,n', shapes(STOCHASTIC + ['hc_orthogonal']))
def test_float32(kind, n):
    X = randn(4, 16, n, 32, seed=2, dtype=torch.float32)
    H = randomised(kind, n, C=32, dtype=torch.float32)(X)
    assert all(h.dtype == torch.float32 for h in H)
    exact = randomised(kind, n, C=32)(X.double())
    for a, b in zip(H, exact):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)
    rows, columns, norm = sums_and_norm(H[2])
    if kind == 'hc_orthogonal':
        assert norm < 2e-6
    else:
        assert rows < 1e-6
        if kind != 'mhc':
            assert columns < 1e-6 and norm < 2e-6


@pytest.mark.parametrize('stream', [torch.bfloat16, torch.float32])
@pytest.mark.parametrize('kind', ALL)
def test_mapping_stays_in_float32_under_autocast(kind, stream):
    # in bf16 row sums would be off by 4e-3 and the spectral norm would reach 1.006
    m = randomised(kind, 4, C=32, dtype=torch.float32)
    X = randn(4, 16, 4, 32, seed=2, dtype=torch.float32).to(stream).requires_grad_()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        H = m(X)
    outside = m(X.float())
    for a, b in zip(H, outside):
        if a is not None:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    if kind in DOUBLY:
        rows, columns, norm = sums_and_norm(H[2])
        assert max(rows, columns) < 1e-6 and norm < 2e-6
    sum(h.sum() for h in H if h is not None).backward()
    assert X.grad.dtype == stream and torch.isfinite(X.grad).all()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in m.parameters())


def test_float32_streams_are_mixed_in_float32_under_autocast():
    X, f = randn(2, 3, 4, 64, dtype=torch.float32), randn(2, 3, 64, seed=1, dtype=torch.float32)
    H_pre, H_post, H_res = (h.detach() for h in randomised('s2hc', 4, C=64, dtype=torch.float32)(X))
    f = f.bfloat16()                                                # what a branch under autocast returns
    inputs = [x.clone().requires_grad_() for x in (X, f, H_pre, H_post, H_res)]
    double = [x.double().requires_grad_() for x in (X, f, H_pre, H_post, H_res)]
    with torch.autocast('cpu', dtype=torch.bfloat16):
        y, h = write(inputs[0], inputs[1], inputs[3], inputs[4]), read(inputs[2], inputs[0])
    grads = torch.autograd.grad(y.square().sum() + h.square().sum(), inputs)
    assert y.dtype == h.dtype == torch.float32
    y2 = torch.einsum('btij,btjc->btic', double[4], double[0]) + torch.einsum('bti,btc->btic', double[3], double[1])
    h2 = torch.einsum('bti,btic->btc', double[2], double[0])
    torch.testing.assert_close(y.double(), y2, rtol=0, atol=1e-5)
    torch.testing.assert_close(h.double(), h2, rtol=0, atol=1e-5)
    for x, a, b in zip(inputs, grads, torch.autograd.grad(y2.square().sum() + h2.square().sum(), double)):
        assert a.dtype == x.dtype
        tol = 2**-7 if x.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a.double(), b, rtol=tol, atol=10 * tol)


@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('kind', ALL)
def test_huge_parameters_and_streams(kind, static):
    for n in (2, 4):
        for sign in (1, -1):
            m = randomised(kind, n, static=static, dtype=torch.float32)
            with torch.no_grad():
                m.bias.copy_(sign * 1e4 * torch.sign(randn(*m.bias.shape)))
            for size in (0.0, 1e-12, 1e12):
                X = (size * randn(2, 3, n, 6, dtype=torch.float32)).requires_grad_()
                H = [h for h in m(X) if h is not None]
                assert all(torch.isfinite(h).all() for h in H)
                sum((h * randn(*h.shape, dtype=torch.float32)).sum() for h in H).backward()
                assert static or torch.isfinite(X.grad).all()
                assert all(torch.isfinite(p.grad).all() for p in m.parameters())


def test_mhc_logits_are_row_major_out_in():
    m = fresh('mhc', 4, 6, static=True)
    X = randn(1, 1, 4, 6)
    with torch.no_grad():
        m.bias[8:] = 0
        for i, j in enumerate((2, 3, 1, 0)):                        # output stream i reads input stream j
            m.bias[8 + i * 4 + j] = 50.0
    out = write(X, torch.zeros(1, 1, 6, dtype=F64), m(X)[1], m(X)[2])
    torch.testing.assert_close(out, X[:, :, [2, 3, 1, 0]], rtol=0, atol=1e-12)


def test_streams_are_flattened_stream_major():
    # a weight on entry i*C + c alone reacts to stream i, feature c alone
    m = fresh('hc_identity', 3, 5)
    i, c = 2, 1
    with torch.no_grad():
        m.weight[0, i * 5 + c] = 1.0
        m.scale.fill_(1.0)
    X = torch.ones(1, 1, 3, 5, dtype=F64)
    flipped = X.clone()
    flipped[0, 0, i, c] = -1.0
    assert m(X)[0][0, 0, 0] - m(flipped)[0][0, 0, 0] > 0.3
    flipped = X.clone()
    flipped[0, 0, 1, 2] = -1.0
    assert m(X)[0][0, 0, 0] == m(flipped)[0][0, 0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# initial values, sizes, refusals

def n_scalars(kind):
    return {'hc_identity': 2, 'hc_orthogonal': 4, 's2hc': 7, 'hc': 2}.get(kind, 3)


@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('kind,n', shapes())
def test_initial_parameters(kind, n, static):
    C = 6
    for sublayer in (0, 1, n - 1, n, 2 * n + 1):
        m = fresh(kind, n, C, sublayer=sublayer, static=static)
        q = {name: p.detach() for name, p in m.named_parameters()}
        main = torch.eye(n, dtype=F64)[sublayer % n]
        if kind == 'hc':
            want = torch.cat([torch.eye(n, dtype=F64).flatten(), main, torch.ones(n, dtype=F64)])
            rows, width = n + 2, C
        else:
            res = {
                'hc_identity': [],
                'mhc': [0.0 if i == j else -8.0 for i in range(n) for j in range(n)],
                'mhc_lite': [0.0] + [-8.0] * (math.factorial(n) - 1),
                'kromhc': [0.0, -8.0] * round(math.log2(n)),
                's2hc': [0.0] * ((n - 1) * (n - 2)) + [4.0] * (n - 1),
                'hc_orthogonal': [0.0] * (n * (n - 1) // 2),
            }[kind]
            want = torch.cat([2 * main - 1, 2 * main - 1, torch.tensor(res, dtype=F64)])
            rows, width = len(want), n * C
        assert torch.equal(q['bias'], want)
        if static:
            assert list(q) == ['bias']
            continue
        assert q['weight'].shape == (rows, width) and (q['weight'] == 0).all()
        scale = [0.01] * n_scalars(kind)
        if kind == 's2hc':
            scale[-2:] = [1.0, 1.0]
        if kind == 'hc_orthogonal':
            scale[-1] = 1.0
        torch.testing.assert_close(q['scale'], torch.tensor(scale, dtype=F64), rtol=1e-7, atol=0)
        if kind == 'hc':
            assert set(q) == {'weight', 'bias', 'scale'}
        else:
            assert set(q) == {'weight', 'bias', 'scale', 'gain'}
            assert q['gain'].shape == (n * C,) and (q['gain'] == 1).all()
        assert all(p.ndim == 1 for name, p in q.items() if name != 'weight')               # weight decay goes by ndim


@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('kind,diagonal', [('mhc_lite', .994), ('mhc', .9990), ('kromhc', .9993), ('s2hc', .9995),
                                           ('hc', 1.0), ('hc_identity', 1.0), ('hc_orthogonal', 1.0)])
def test_matrices_at_init(kind, diagonal, static):
    n, main = 4, 2                                                  # stream 6 % 4 of sub-layer 6
    X = randn(2, 3, n, 6)
    H_pre, H_post, H_res = fresh(kind, n, 6, sublayer=6, static=static)(X)
    if diagonal == 1.0:
        if kind == 'hc_identity':
            assert H_res is None
        else:
            assert torch.equal(H_res, torch.eye(n, dtype=F64).expand(2, 3, n, n))          # exactly I
    else:
        assert (H_res.diagonal(dim1=-2, dim2=-1) - diagonal).abs().max() < (5e-4 if kind == 'mhc_lite' else 5e-5)
    hot, cold = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    pre = torch.tensor([hot if i == main else cold for i in range(n)], dtype=F64)
    post = 2 * pre
    if kind == 'hc':
        pre, post = torch.eye(n, dtype=F64)[main], torch.ones(n, dtype=F64)
    torch.testing.assert_close(H_pre, pre.expand(2, 3, n), rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(H_post, post.expand(2, 3, n), rtol=1e-15, atol=1e-15)
    streams = randn(2, 3, 1, 6).expand(2, 3, n, 6)                  # n identical copies, as at the start
    f = randn(2, 3, 6, seed=1)
    moved = write(streams, f, H_post, H_res).mean(2) - streams[:, :, 0]
    torch.testing.assert_close(moved, (1.0 if kind == 'hc' else 0.769) * f, rtol=1e-3, atol=1e-12)


def test_reset_draws_no_random_numbers():
    # the same seed must give the same shared weights whatever the residual mode
    state = torch.get_rng_state()
    for kind in ALL:
        fresh(kind, 4, 6)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize('kind', ALL)
def test_gradients_at_init(kind):
    # W = 0: the scalars and the gain have no gradient yet, W has
    m = fresh(kind, 4, 6)
    loss = sum((h * randn(*h.shape, seed=i)).sum() for i, h in enumerate(m(randn(2, 3, 4, 6))) if h is not None)
    loss.backward()
    assert (m.scale.grad == 0).all()                                # of the gates too: they multiply tanh(0)
    assert kind == 'hc' or (m.gain.grad == 0).all()
    assert (m.weight.grad.abs() > 0).all() and (m.bias.grad.abs() > 0).all()


def count(kind, n, C, layers, static=False):
    return 2 * layers * sum(p.numel() for p in KINDS[kind](n, C, 0, static=static).parameters())


@pytest.mark.parametrize('kind,n,C,layers,want', [
    ('mhc', 4, 768, 12, 1_843_848), ('mhc_lite', 4, 768, 12, 2_433_864), ('kromhc', 4, 768, 12, 958_824),
    ('mhc', 4, 2048, 16, 6_554_464), ('mhc_lite', 4, 2048, 16, 8_651_872), ('kromhc', 4, 2048, 16, 3_408_352),
    ('hc_identity', 2, 2048, 16, 655_552), ('hc_identity', 4, 2048, 16, 2_359_616),
    ('hc_identity', 8, 2048, 16, 8_913_472), ('hc_identity', 16, 2048, 16, 34_604_096),
    ('mhc', 7, 1024, 28, 25_693_808), ('s2hc', 7, 1024, 28, 20_475_000),
    ('s2hc', 4, 768, 12, 1_327_680), ('hc_orthogonal', 4, 768, 12, 1_106_352), ('kromhc', 2, 2048, 16, 917_792),
    ('kromhc', 8, 2048, 16, 12_059_424), ('kromhc', 16, 2048, 16, 42_992_992), ('hc_identity', 2, 4096, 32, 2_621_824),
    ('hc_identity', 4, 4096, 32, 9_437_824), ('hc', 4, 2048, 16, 394_048),
])
def test_parameter_counts(kind, n, C, layers, want):
    assert count(kind, n, C, layers) == want
    if kind != 'hc':
        logits = 2 * n + n_logits(kind, n)
        assert want == 2 * layers * (n * C * (logits + 1) + logits + n_scalars(kind))


def test_static_parameter_counts():
    for kind, want in (('mhc', 768), ('mhc_lite', 1024), ('kromhc', 384), ('hc', 768)):     # mhc: 772 with its readout
        assert count(kind, 4, 2048, 16, static=True) == want


@pytest.mark.parametrize('kind', STOCHASTIC)
@pytest.mark.parametrize('n', (2, 3, 4, 8))
@pytest.mark.parametrize('res_init', (0, -0.3, -2, -8, -100))
def test_res_init_is_one_start_for_all_kinds(kind, n, res_init):
    if n > 6 and kind == 'mhc_lite' or n == 3 and kind == 'kromhc':
        pytest.skip('refused')
    m = KINDS[kind](n, 5, 1, res_init=res_init).to(F64)
    m.reset_parameters()
    H = m(randn(1, 2, n, 5))[2].detach()
    e = math.exp(res_init)
    wanted = ((1 - e) * torch.eye(n, dtype=F64) + e) / (1 + (n - 1) * e)
    tol = 3e-7                                                       # the bias is a float32
    torch.testing.assert_close(H.diagonal(dim1=-2, dim2=-1), wanted.diagonal().expand(1, 2, n), rtol=0, atol=tol)
    assert max(sums_and_norm(H)) < tol
    if kind != 'kromhc' or n == 2 or res_init == 0:
        torch.testing.assert_close(H, wanted.expand(1, 2, n, n), rtol=0, atol=tol)


@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('kind,n', [('kromhc', 3), ('kromhc', 6), ('kromhc', 12), ('mhc_lite', 7), ('mhc_lite', 16)])
def test_impossible_shapes_are_refused(kind, n, static):
    with pytest.raises(ValueError) as error:
        KINDS[kind](n, 8, 0, static=static)
    message = str(error.value)
    others = set(ALL) - {kind, 'hc'}
    assert kind in message and str(n) in message and '\n' not in message
    assert any(re.search(rf'\b{other}\b', message) for other in others), 'names no alternative'


def test_the_largest_possible_shapes_are_not_refused():
    assert KINDS['mhc_lite'](6, 8, 0, static=True).bias.numel() == 12 + 720
    assert KINDS['kromhc'](8, 8, 0, static=True).bias.numel() == 16 + 6
    assert set(ALL) <= set(KINDS)


# ---------------------------------------------------------------------------------------------------------------------
# longer grids (make check)

@pytest.mark.slow
@pytest.mark.parametrize('kind,n', shapes(ns=(2, 3, 4, 5, 6)) + [('kromhc', 8)])
def test_mapping_gradcheck(kind, n):
    m = randomised(kind, n, C=3)
    names = [name for name, _ in m.named_parameters()]
    X = randn(1, 2, n, 3).requires_grad_()

    def fn(X, *params):
        H = torch.func.functional_call(m, dict(zip(names, params)), (X,))
        return tuple(h for h in H if h is not None)

    assert torch.autograd.gradcheck(fn, (X, *(p.detach().requires_grad_() for p in m.parameters())), fast_mode=n > 3)


@pytest.mark.slow
@pytest.mark.parametrize('kind,n', shapes(STOCHASTIC + ['hc_orthogonal'], ns=(2, 3, 4, 5, 6))
                         + [('kromhc', 8), ('kromhc', 16)])
def test_grid(kind, n):
    for seed in range(20):
        for size in (0.1, 1.0, 5.0, 50.0):
            X = randn(2, 64, n, 8, seed=seed)
            exact = randomised(kind, n, C=8, size=size, seed=seed)(X)[2]
            single = randomised(kind, n, C=8, size=size, seed=seed, dtype=torch.float32)(X.float())[2]
            # cond(I + A) is about the size of the gate, and the solve of n >= 5 pays for it
            for H, tol in ((exact, 1e-12), (single, 4e-6 if size < 50 else 4e-5)):
                rows, columns, norm = sums_and_norm(H)
                if kind == 'hc_orthogonal':
                    assert norm < tol
                else:
                    assert rows < tol
                    if kind != 'mhc':
                        assert columns < tol and norm < tol
