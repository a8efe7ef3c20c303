"""
Sphere retractions against the formulas of DESIGN.md section 2.

The yardstick is `exact` below: the formula and its forward-mode derivative in numpy longdouble, row by row. It shares
nothing with the code under test (reverse mode, in coefficients of h, f and g), so no error can hide in both.
"""
import math
from functools import partial

import numpy as np
import pytest
import torch

from model import GPT, RESIDUALS, GPTConfig, Sphere
from spheretnorm import DECAYS, Bounded, ScaleNorm, retract, retract_norm, retract_reference

INF = float('inf')
CAP = math.pi / 4
PS = [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 8.0, INF]
# max_angle is ignored for p <= 1, so the pairs below are the cases that differ
P_CAPS = [(p, None) for p in PS] + [(p, CAP) for p in PS if p > 1]


# ---------------------------------------------------------------------------------------------------------------------
# yardsticks

def plain(h, f, alpha, p, cap):
    """DESIGN section 2 line by line in torch; differentiable where s > 0. h, f (..., d) -> (..., d)."""
    r = torch.sqrt((h * h).sum(-1, keepdim=True).clamp(min=1e-12))
    z = f - (h * f).sum(-1, keepdim=True) / r**2 * h
    s = torch.sqrt((z * z).sum(-1, keepdim=True))
    beta = alpha * s / r
    theta = beta if p == INF else p * torch.atan(beta / p)
    if p > 1 and cap is not None:
        theta = torch.where(theta < cap, theta, torch.full_like(theta, cap))
    return torch.cos(theta) * h + r * torch.sin(theta) / s * z


def exact(h, f, alpha, p, cap, g):
    """
    h, f, g (N, d), alpha (N, 1) -> longdouble out, (g J_h, g J_f, g J_alpha), and the sizes of their terms (N, 1): a
    sum of terms of size S computed in precision eps is known to about eps*S, whatever it adds up to.
    """
    h, f, g = (np.asarray(x, dtype=np.longdouble) for x in (h, f, g))
    alpha = np.broadcast_to(np.asarray(alpha, dtype=np.longdouble), (len(h), 1))

    def dot(a, b):
        return (a * b).sum(-1, keepdims=True)

    r = np.sqrt(np.maximum(dot(h, h), np.longdouble('1e-12')))
    c = dot(h, f) / r**2
    z = f - c * h
    s = np.sqrt(dot(z, z))
    zero = s == 0
    s_ = np.where(zero, 1, s)                                       # safe divisor; those rows take the limit s -> 0
    beta = alpha * s / r
    theta = beta if p == INF else p * np.arctan(beta / p)
    slope = np.ones_like(beta) if p == INF else 1 / (1 + (beta / p)**2)
    if p > 1 and cap is not None:
        slope = np.where(theta >= cap, 0, slope)
        theta = np.minimum(theta, np.longdouble(cap))
    cos, sin = np.cos(theta), np.sin(theta)
    q = np.where(zero, alpha, r * sin / s_)
    out = cos * h + q * z

    def jvp(vh, vf, va):
        r1 = dot(h, vh) / r
        c1 = (dot(vh, f) + dot(h, vf)) / r**2 - 2 * c * r1 / r
        z1 = vf - c1 * h - c * vh
        s1 = dot(z, z1) / s_
        theta1 = slope * (va * s + alpha * s1 - beta * r1) / r
        q1 = np.where(zero, 0, r1 * sin / s_ + r * cos * theta1 / s_ - r * sin * s1 / s_**2)
        return -sin * theta1 * h + cos * vh + q1 * z + q * z1

    d = h.shape[-1]
    eye, none = np.eye(d, dtype=np.longdouble), np.zeros((1, d), dtype=np.longdouble)
    gh = np.concatenate([dot(g, jvp(eye[k:k + 1], none, 0)) for k in range(d)], -1)
    gf = np.concatenate([dot(g, jvp(none, eye[k:k + 1], 0)) for k in range(d)], -1)
    ga = dot(g, jvp(none, none, 1))

    def norm(x):
        return np.sqrt(dot(x, x))

    turn = 1 + theta                                                # the conditioning of cos and sin of a large angle
    tiny = np.longdouble('1e-300')                                  # capped: d alpha is exactly 0
    k = (np.minimum(alpha, r / s_) + alpha * slope) * turn          # h' moves by about k per unit of f
    sizes = (turn * r + k * norm(f), norm(g) * (turn + k * norm(f) / r), norm(g) * k + tiny,
             norm(g) * norm(f) * slope * turn + tiny)
    return out, (gh, gf, ga), sizes


def check(h, f, alpha, p, cap, eps, g=None, fn=retract):
    """Values and all three gradients of fn at h, f (N, d), alpha (N, 1), to eps times the size of their terms."""
    if g is None:
        g = torch.randn(h.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(h.dtype)
    h, f, alpha = (x.clone().requires_grad_() for x in (h, f, alpha))
    out = fn(h, f, alpha, p=p, max_angle=cap)
    assert out.dtype == h.dtype and out.shape == h.shape
    got = (out.detach(), *torch.autograd.grad(out, (h, f, alpha), g))
    want_out, want_grads, sizes = exact(h.detach().double().numpy(), f.detach().double().numpy(),
                                        alpha.detach().double().numpy(), p, cap, g.double().numpy())
    for name, a, b, size in zip(('value', 'grad h', 'grad f', 'grad alpha'), got, (want_out, *want_grads), sizes):
        assert torch.isfinite(a).all(), f'{name}: not finite, p={p} cap={cap}'
        error = np.abs(a.double().numpy() - b) / size
        row = int(np.argmax(error.max(-1)))
        assert error.max() <= eps, f'{name}: error {float(error.max()):.1e} > {eps:.0e} in row {row}, p={p} cap={cap}'


def tokens(n, d, r=1.0, size=1.0, dtype=torch.float64, seed=0):
    """h of norm r, f of norm about size*r, alpha in (0.2, 1): (n, d), (n, d), (n, 1)."""
    gen = torch.Generator().manual_seed(seed)
    h = torch.randn(n, d, generator=gen, dtype=torch.float64)
    h = r * h / h.norm(dim=-1, keepdim=True)
    f = r * size * torch.randn(n, d, generator=gen, dtype=torch.float64) / math.sqrt(d)
    alpha = 0.2 + 0.8 * torch.rand(n, 1, generator=gen, dtype=torch.float64)
    return h.to(dtype), f.to(dtype), alpha.to(dtype)


EPS = {torch.float64: 2e-14, torch.float32: 4e-6}


# ---------------------------------------------------------------------------------------------------------------------
# values and gradients

@pytest.mark.parametrize('p,cap', P_CAPS)
def test_yardsticks_agree(p, cap):
    # the longdouble formula and autograd through the plain one are two derivations; both must hold
    h, f, alpha = tokens(8, 5)
    check(h, f, alpha, p, cap, 2e-14, fn=lambda h, f, alpha, p, max_angle: plain(h, f, alpha, p, max_angle))


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('p,cap', P_CAPS)
def test_values_and_gradients(p, cap, dtype):
    for d in (2, 3, 16):
        for size in (1e-6, 0.3, 1.0, 4.0):
            check(*tokens(6, d, size=size, dtype=dtype), p, cap, EPS[dtype])


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('p,cap', P_CAPS)
def test_extreme_sizes(p, cap, dtype):
    for r in (1e-3, 1e3):
        for size in (1e-30 / r, 1e-12, 1e-3, 1e3) + ((1e8,) if p != INF or cap else ()):
            check(*tokens(4, 8, r=r, size=size, dtype=dtype), p, cap, EPS[dtype])


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('p,cap', P_CAPS)
def test_branch_parallel_to_stream(p, cap, dtype):
    h, _, alpha = tokens(4, 8, dtype=dtype)
    other = tokens(4, 8, seed=9, dtype=dtype)[0]
    for r in (1e-3, 1.0, 1e3):
        for c in (0.0, 1.0, -0.5, 30.0):                            # exactly parallel: s is 0 up to rounding, or 0
            check(r * h, c * r * h, alpha, p, cap, EPS[dtype])
            check(r * h, c * r * h + 1e-9 * r * other, alpha, p, cap, EPS[dtype])


@pytest.mark.parametrize('p,cap', P_CAPS)
def test_exactly_zero_tangent(p, cap):
    # axis vectors, f = c h: z is 0 without any rounding. There h' = h and dh'/da = 0, and with P = I - hh^T/r^2
    # dh'/df = a P, dh'/dh = I - a c P
    for dtype in (torch.float32, torch.float64):
        for r in (1e-3, 1.0, 1e3):
            for c in (0.0, 2.0, -4.0):
                h = torch.zeros(1, 4, dtype=dtype)
                h[0, 1] = r
                f, alpha = c * h, torch.full((1, 1), 0.5, dtype=dtype)
                h.requires_grad_(), f.requires_grad_(), alpha.requires_grad_()
                out = retract(h, f, alpha, p=p, max_angle=cap)
                torch.testing.assert_close(out, h, rtol=1e-7, atol=0)
                g = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=dtype)
                gh, gf, ga = torch.autograd.grad(out, (h, f, alpha), g)
                tangent = torch.tensor([[1.0, 0.0, 3.0, 0.5]], dtype=dtype)
                torch.testing.assert_close(gf, 0.5 * tangent, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(gh, g - 0.5 * c * tangent, rtol=1e-6, atol=1e-6)
                assert ga.abs().max() <= 1e-6 * r


@pytest.mark.parametrize('p,cap', P_CAPS)
def test_alpha_zero_is_the_identity_with_a_live_alpha(p, cap):
    h, f, alpha = tokens(5, 6)
    torch.testing.assert_close(retract(h, f, 0.0, p=p, max_angle=cap), h, rtol=1e-15, atol=1e-15)
    check(h, f, 0 * alpha, p, cap, EPS[torch.float64])
    a = torch.zeros((), dtype=torch.float64, requires_grad=True)
    out = retract(h, f, a, p=p, max_angle=cap)
    (ga,) = torch.autograd.grad(out, a, torch.ones_like(out))       # d h'/d alpha = z at alpha = 0
    z = f - (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    torch.testing.assert_close(ga, z.sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('p,cap', P_CAPS)
def test_no_jump_between_series_and_closed_form(p, cap, dtype):
    # beta from 1e-12 to 10 with f orthogonal to h, so that z keeps its relative accuracy; g along z shows the third
    # coefficient, (beta cos theta theta' - sin theta)/beta^3, at full size, g along h the first-order ones
    beta = np.geomspace(1e-12, 10, 400)
    beta = torch.from_numpy(np.sort(np.append(beta, np.linspace(0.01, 1.2, 200)))).unsqueeze(-1)
    if cap is not None:                                             # not on the kink: the derivative does jump there
        theta = p * torch.atan(beta / p) if p < INF else beta
        beta = beta[(theta - CAP).abs() > 1e-3].unsqueeze(-1)
    gen = torch.Generator().manual_seed(3)
    e, u = torch.linalg.qr(torch.randn(6, 2, generator=gen, dtype=torch.float64))[0].T
    h, f = (2 * e).expand(len(beta), 6), 2 * beta / 0.8 * u
    alpha = torch.full((len(beta), 1), 0.8, dtype=torch.float64)
    for g in (u, e, u + e):
        check(h.to(dtype), f.to(dtype), alpha.to(dtype), p, cap, EPS[dtype], g=g.expand(len(beta), 6).to(dtype))


@pytest.mark.parametrize('p', PS)
def test_gradcheck(p):
    gen = torch.Generator().manual_seed(0)
    h = torch.randn(3, 4, generator=gen, dtype=torch.float64)
    z = torch.randn(3, 4, generator=gen, dtype=torch.float64)
    z = z - (z * h).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    z = z / z.norm(dim=-1, keepdim=True) * h.norm(dim=-1, keepdim=True)
    alpha = torch.tensor(0.7, dtype=torch.float64)
    for f in (0 * h, -0.6 * h, 0.3 * h + 0.4 * z, 0.3 * h + 4 * z):                # s = 0, s = 0, below the cap, above
        for cap in (None, CAP):
            inputs = [x.clone().requires_grad_() for x in (h, f, alpha)]
            assert torch.autograd.gradcheck(partial(retract, p=p, max_angle=cap), inputs)


@pytest.mark.parametrize('p', PS)
def test_differentiating_twice(p):
    # not needed for training, but a backward written by hand must not be silently wrong there
    h, f, _ = tokens(3, 4)
    f = torch.stack([f[0], 4 * f[1], -0.6 * h[2]])                  # below the cap, above it, parallel
    inputs = [x.clone().requires_grad_() for x in (h, f, torch.tensor(0.7, dtype=torch.float64))]
    for cap in (None, CAP):
        assert torch.autograd.gradgradcheck(partial(retract, p=p, max_angle=cap), inputs)


@pytest.mark.parametrize('p,cap', P_CAPS)
def test_d_2(p, cap):
    # in the plane h' is h turned by theta towards f
    h, f, alpha = tokens(40, 2, r=3.0)
    out = retract(h, f, alpha, p=p, max_angle=cap)
    cross = h[:, 0] * f[:, 1] - h[:, 1] * f[:, 0]
    beta = alpha[:, 0] * cross.abs() / 9
    theta = beta if p == INF else p * torch.atan(beta / p)
    theta = torch.sign(cross) * (theta.clamp(max=CAP) if cap else theta)
    turned = torch.stack([theta.cos() * h[:, 0] - theta.sin() * h[:, 1],
                          theta.sin() * h[:, 0] + theta.cos() * h[:, 1]], -1)
    torch.testing.assert_close(out, turned, rtol=0, atol=1e-13)


@pytest.mark.parametrize('p', PS)
def test_agrees_with_the_reference(p):
    for cap in (None, CAP, 0.3):
        for dtype, tol in ((torch.float64, 1e-13), (torch.float32, 3e-6)):
            h, f, alpha = tokens(12, 16, r=2.0, dtype=dtype)
            f[0], f[1] = 0, 0.5 * h[1]
            results = []
            for fn in (retract, retract_reference):
                inputs = [x.clone().requires_grad_() for x in (h, f, alpha)]
                out = fn(*inputs, p=p, max_angle=cap)
                results.append((out, *torch.autograd.grad((out * torch.cos(torch.arange(16.0))).sum(), inputs)))
            for a, b in zip(*results):
                assert a.dtype == b.dtype and torch.isfinite(b).all()
                torch.testing.assert_close(a, b, rtol=tol, atol=5 * tol)


def test_reference_against_the_formula():
    for p, cap in P_CAPS:
        check(*tokens(6, 5), p, cap, EPS[torch.float64], fn=retract_reference)


# ---------------------------------------------------------------------------------------------------------------------
# geometry

@pytest.mark.parametrize('p,cap', P_CAPS)
def test_norm_is_kept(p, cap):
    for r in (1e-3, 1.0, 1e3):
        for size in (1e-9, 1e-3, 1.0, 10.0, 1e3):
            h, f, alpha = tokens(32, 64, r=r, size=size)
            out = retract(h, f, alpha, p=p, max_angle=cap)
            assert (out.norm(dim=-1) / h.norm(dim=-1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize('p,cap', P_CAPS)
def test_norm_drift_in_float32(p, cap):
    d = 768
    h = torch.randn(16, d, generator=torch.Generator().manual_seed(1))
    start = h.double().norm(dim=-1)
    gen = torch.Generator().manual_seed(2)
    for _ in range(72):                                             # 36 layers
        h = retract(h, torch.randn(16, d, generator=gen), 1.0, p=p, max_angle=cap)
    assert h.dtype == torch.float32
    assert (h.double().norm(dim=-1) / start - 1).abs().max() < 3e-6


def test_p_1_is_the_metric_projection():
    h, f, alpha = tokens(20, 7, r=3.0)                              # [SR] Eq. 6
    z = f - (h * f).sum(-1, keepdim=True) / 9 * h
    moved = h + alpha * z
    want = 3 * moved / moved.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(retract(h, f, alpha, p=1.0), want, rtol=0, atol=1e-13)
    torch.testing.assert_close(retract(h, f, alpha), want, rtol=0, atol=1e-13)             # p = 1 is the default


def test_p_2_is_the_cayley_retraction():
    from hyperconn import cayley
    d = 6
    h, f, alpha = tokens(20, d, r=3.0)                              # [SR] Eq. 7-8: h' = (I - W/2)^-1 (I + W/2) h
    z = f - (h * f).sum(-1, keepdim=True) / 9 * h
    w = alpha.unsqueeze(-1) * (z.unsqueeze(-1) * h.unsqueeze(-2) - h.unsqueeze(-1) * z.unsqueeze(-2)) / 9
    eye = torch.eye(d, dtype=torch.float64)
    want = torch.linalg.solve(eye - w / 2, (eye + w / 2) @ h.unsqueeze(-1)).squeeze(-1)
    out = retract(h, f, alpha, p=2.0)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(out, (cayley(-w / 2) @ h.unsqueeze(-1)).squeeze(-1), rtol=0, atol=1e-12)


def test_limits_in_p():
    h, f, alpha = tokens(30, 6)
    z = f - (h * f).sum(-1, keepdim=True) * h
    beta = torch.linspace(0.1, 5, 30, dtype=torch.float64).unsqueeze(-1)
    f = f * beta / (alpha * z.norm(dim=-1, keepdim=True))           # alpha s / r = beta, |h| = 1
    u = z / z.norm(dim=-1, keepdim=True)
    exp = torch.cos(beta) * h + torch.sin(beta) * u
    torch.testing.assert_close(retract(h, f, alpha, p=INF), exp, rtol=0, atol=1e-12)
    torch.testing.assert_close(retract(h, f, alpha, p=1e6), exp, rtol=0, atol=1e-9)
    assert (retract(h, f, alpha, p=1e-6) - h).norm(dim=-1).max() < 1.6e-6                  # theta <= p pi/2


def test_p_may_be_an_int():
    h, f, alpha = tokens(4, 6)
    for p in (1, 2):
        assert torch.equal(retract(h, f, alpha, p=p), retract(h, f, alpha, p=float(p)))


@pytest.mark.parametrize('p', PS)
def test_second_order(p):
    # h' - (h + a z - a^2 s^2 / (2 r^2) h) is O(a^3): halving a divides it by 8
    h, f, _ = tokens(10, 8, r=2.0)
    z = f - (h * f).sum(-1, keepdim=True) / 4 * h
    s2 = (z * z).sum(-1, keepdim=True)
    rest = [(retract(h, f, a, p=p) - (h + a * z - a**2 * s2 / 8 * h)).norm(dim=-1) for a in (1e-2, 5e-3, 2.5e-3)]
    scale = min(p, 1.0)                                             # the expansion is in a/p
    for big, small in zip(rest, rest[1:]):
        assert (big < 1e-6 * 20 / scale**2).all()
        assert ((big / small - 8).abs() < 0.3).all()


def test_cap():
    h, f, alpha = tokens(50, 8, size=20.0)

    def angle(out):
        return torch.acos(((out * h).sum(-1) / h.norm(dim=-1)**2).clamp(-1, 1))

    for p in (1.5, 2.0, 3.0, 8.0, INF):
        for cap in (CAP, 0.3):
            torch.testing.assert_close(angle(retract(h, f, alpha, p=p, max_angle=cap)),
                                       torch.full((50,), cap, dtype=torch.float64), rtol=0, atol=1e-12)
    for p in (0.25, 0.5, 1.0):                                      # ignored: these cannot pass p pi/2 anyway
        out = retract(h, f, alpha, p=p, max_angle=0.1)
        assert torch.equal(out, retract(h, f, alpha, p=p))
        assert (angle(out) > 0.1).all() and (angle(out) <= p * math.pi / 2 + 1e-9).all()
    assert angle(retract(h, f, alpha, p=2.0)).max() > CAP           # None: uncapped


def test_capped_alpha_has_no_gradient():
    h, f, _ = tokens(6, 8, size=50.0)
    alpha = torch.ones(6, 1, dtype=torch.float64, requires_grad=True)
    out = retract(h, f, alpha, p=2.0, max_angle=CAP)
    (ga,) = torch.autograd.grad(out, alpha, torch.randn_like(out))
    assert (ga == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# interface: shapes, dtypes, which inputs need a gradient

def test_alpha_shapes():
    h, f, _ = tokens(24, 8)
    h, f = h.view(2, 3, 4, 8), f.view(2, 3, 4, 8)
    want = plain(h, f, 0.6, 2.0, None)
    g = torch.randn(h.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    full = torch.full((2, 3, 4, 1), 0.6, dtype=torch.float64, requires_grad=True)
    (g_full,) = torch.autograd.grad(plain(h, f, full, 2.0, None), full, g)
    torch.testing.assert_close(retract(h, f, 0.6, p=2.0), want, rtol=0, atol=1e-14)
    for shape in ((), (1,), (4, 1), (3, 1, 1), (2, 1, 4, 1), (2, 3, 4, 1)):
        alpha = torch.full(shape, 0.6, dtype=torch.float64, requires_grad=True)
        out = retract(h, f, alpha, p=2.0)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
        (ga,) = torch.autograd.grad(out, alpha, g)
        assert ga.shape == shape
        torch.testing.assert_close(ga, g_full.sum_to_size(shape) if shape else g_full.sum(), rtol=1e-12, atol=1e-12)


def test_only_some_inputs_need_a_gradient():
    h, f, alpha = tokens(5, 6)
    g = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    full = [x.clone().requires_grad_() for x in (h, f, alpha)]
    want = torch.autograd.grad(plain(*full, 0.5, None), full, g)
    for i in range(3):
        inputs = [x.clone().requires_grad_(k == i) for k, x in enumerate((h, f, alpha))]
        (got,) = torch.autograd.grad(retract(*inputs, p=0.5), inputs[i], g)
        torch.testing.assert_close(got, want[i], rtol=1e-12, atol=1e-12)
    assert not retract(h, f, alpha).requires_grad


def test_strided_input():
    h, f, alpha = tokens(12, 8)
    out = retract(h, f, alpha, p=2.0)
    wide = torch.zeros(8, 24, dtype=torch.float64)
    wide[:, ::2], wide[:, 1::2] = h.T, f.T
    wide.requires_grad_()
    strided = retract(wide.T[::2], wide.T[1::2], alpha, p=2.0)
    torch.testing.assert_close(strided, out, rtol=0, atol=1e-14)
    g = torch.randn(8, 12, dtype=torch.float64).T                   # and a strided incoming gradient
    (gw,) = torch.autograd.grad(strided, wide, g)
    a, b = h.clone().requires_grad_(), f.clone().requires_grad_()
    ga, gb = torch.autograd.grad(plain(a, b, alpha, 2.0, None), (a, b), g)
    torch.testing.assert_close(gw.T[::2], ga, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gw.T[1::2], gb, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('autocast', [False, True])
def test_low_precision_branch_keeps_a_float32_stream(half, autocast):
    h, f, _ = tokens(16, 64, r=8.0, size=0.5, dtype=torch.float32)
    f = f.to(half)
    if half == torch.float16:
        f[0] = 3e4 * torch.sign(f[0])                               # f.f does not fit into float16
    h.requires_grad_(), f.requires_grad_()
    alpha = torch.tensor(0.9, requires_grad=True)
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=autocast):
        out = retract(h, f, alpha, p=0.5)
    assert out.dtype == torch.float32
    g = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))
    gh, gf, ga = torch.autograd.grad(out, (h, f, alpha), g)
    assert (gh.dtype, gf.dtype, ga.dtype) == (torch.float32, half, torch.float32)
    H, F, A = (x.detach().double().requires_grad_() for x in (h, f, alpha))
    want = plain(H, F, A, 0.5, None)
    wh, wf, wa = torch.autograd.grad(want, (H, F, A), g.double())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=8 * 1e-6)
    torch.testing.assert_close(gh.double(), wh, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gf.double(), wf, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(ga.double(), wa, rtol=1e-4, atol=1e-3)


def test_low_precision_stream():
    # arithmetic in float32 even then; one rounding at the end, to nearest
    h, f, _ = tokens(16, 64, r=8.0, size=0.5, dtype=torch.bfloat16)
    out = retract(h, f, 0.9, p=2.0)
    assert out.dtype == torch.bfloat16
    want = plain(h.double(), f.double(), 0.9, 2.0, None)
    assert ((out.double() - want).abs() <= 2**-8 * want.abs() + 1e-6).all()


@pytest.mark.parametrize('p,cap', [(0.5, None), (1.0, None), (2.0, CAP), (INF, CAP), (INF, None)])
def test_zero_stream(p, cap):
    # h = 0 has no tangent space; r^2 is clamped at 1e-12, so everything stays finite
    h = torch.zeros(2, 4, requires_grad=True)
    f = torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    alpha = torch.tensor(0.5, requires_grad=True)
    out = retract(h, f, alpha, p=p, max_angle=cap)
    assert torch.isfinite(out).all() and (out[0].norm() <= 1.01e-6) and (out[1] == 0).all()
    if not (p == INF and cap is None):
        want = plain(h.double(), f.double(), 0.5, p, cap)[0]
        torch.testing.assert_close(out[0].double(), want, rtol=1e-4, atol=1e-12)
    for x in torch.autograd.grad(out.sum(), (h, f, alpha)):
        assert torch.isfinite(x).all()


# ---------------------------------------------------------------------------------------------------------------------
# the scalars

def inverse_softplus(y):
    return y + math.log(-math.expm1(-y))


def bounded(low, high, bound):
    m = Bounded(low, high, bound)
    with torch.no_grad():
        m.raw.fill_(float('nan'))                                   # created uninitialised: nothing may survive
    m.reset_parameters()
    return m


@pytest.mark.parametrize('bound', ['project', 'clamp'])
@pytest.mark.parametrize('low,high', [(0.0, 1.0), (1.0, math.sqrt(768)), (1.0, math.sqrt(2))])
def test_bounded_starts_on_the_upper_bound(low, high, bound):
    m = bounded(low, high, bound)
    assert [n for n, _ in m.named_parameters()] == ['raw'] and m.raw.numel() == 1
    assert abs(m.raw.item() - inverse_softplus(high)) < 1e-6 * high
    assert abs(m().item() - high) < 1e-6 * high and m().item() <= high * (1 + 1e-7)
    on = m.on_bound()
    assert on.dtype == torch.bool and on.all()
    if high == 1.0:
        assert abs(m.raw.item() - math.log(math.e - 1)) < 1e-6


@pytest.mark.parametrize('bound', ['project', 'clamp'])
def test_bounded_values(bound):
    m = bounded(1.0, 3.0, bound)
    for raw in (-5.0, 0.0, 0.6, 1.5, 2.5, 3.5, 40.0):
        with torch.no_grad():
            m.raw.fill_(raw)
        softplus = math.log1p(math.exp(raw))
        assert abs(m().item() - min(max(softplus, 1.0), 3.0)) < 1e-6
        assert bool(m.on_bound()) == (softplus >= 3.0)
        (grad,) = torch.autograd.grad(m(), m.raw)
        inside = 1.0 < softplus < 3.0
        sigmoid = 1 / (1 + math.exp(-raw))
        assert abs(grad.item() - (sigmoid if inside or bound == 'project' else 0.0)) < 1e-6


def test_bounded_project_clamps_what_is_stored():
    m = bounded(1.0, 3.0, 'project')
    for raw, want in ((-5.0, inverse_softplus(1.0)), (1.5, 1.5), (40.0, inverse_softplus(3.0))):
        with torch.no_grad():
            m.raw.fill_(raw)
        m.project_()
        assert abs(m.raw.item() - want) < 1e-6
        assert bool(m.on_bound()) == (raw == 40.0)
        assert m.raw.requires_grad and m.raw.is_leaf
    m = bounded(0.0, 1.0, 'project')                                # softplus^-1(0) is -inf: there is no lower clamp
    with torch.no_grad():
        m.raw.fill_(-30.0)
    m.project_()
    assert m.raw.item() == -30.0 and 0 < m().item() < 1e-12


def push(m, bound, pushes, lr=0.1):
    """SGD on loss = sign * m(): sign -1 pushes up, +1 down. Returns values and gradients after each step."""
    opt = torch.optim.SGD(m.parameters(), lr=lr)
    values, grads = [], []
    for sign in pushes:
        opt.zero_grad()
        (sign * m()).sum().backward()
        grads.append(m.raw.grad.item())
        opt.step()
        if bound == 'project':                                    # what the post-step hook does
            m.project_()
        values.append(m().item())
    return values, grads


@pytest.mark.parametrize('high', [1.0, math.sqrt(768), math.sqrt(1024)])
def test_the_clamp_trap(high):
    low = 0.0 if high == 1.0 else 1.0
    up_then_down = [-1] * 3 + [1] * 5

    m = bounded(low, high, 'clamp')
    _, grads = push(m, 'clamp', [-1])
    frozen = m.raw.item()
    assert grads[0] != 0 and frozen > inverse_softplus(high)        # at the bound itself the clamp still lets it leave
    values, grads = push(m, 'clamp', up_then_down)
    assert grads == [0.0] * 8, 'a plain clamp gives exactly no gradient above its bound'
    assert m.raw.item() == frozen and values == [values[0]] * 8 and abs(values[0] - high) < 1e-6 * high
    assert bool(m.on_bound())

    m = bounded(low, high, 'project')
    start = m.raw.item()
    values, grads = push(m, 'project', up_then_down)
    assert all(g != 0 for g in grads)
    assert all(abs(v - high) < 1e-6 * high for v in values[:3])     # three steps up leave no debt ...
    assert values[3] < high - 0.03 and all(b < a for a, b in zip(values[3:], values[4:]))   # ... the first down moves
    assert not bool(m.on_bound())
    push(m, 'project', [-1] * 20)
    assert abs(m.raw.item() - start) < 1e-6 * high and bool(m.on_bound())                  # and back


@pytest.mark.parametrize('bound', ['project', 'clamp'])
def test_bounded_can_leave_the_bound_at_first(bound):
    for low, high in ((0.0, 1.0), (1.0, math.sqrt(768)), (1.0, math.sqrt(128)), (1.0, math.sqrt(1280))):
        m = bounded(low, high, bound)
        values, grads = push(m, bound, [1])
        assert grads[0] > 0.5 and values[0] < high - 0.03


def test_scale_norm():
    d = 48
    m = ScaleNorm(d)
    assert isinstance(m.radius, Bounded)
    with torch.no_grad():
        for x in m.parameters():
            x.fill_(float('nan'))
    m.radius.reset_parameters()
    sizes = torch.tensor([1e-3, 1e-1, 1.0, 10.0, 1e3])
    h = sizes[:, None] * torch.randn(2, 5, d, generator=torch.Generator().manual_seed(0))
    out = m(h)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double().norm(dim=-1), torch.full((2, 5), math.sqrt(d), dtype=torch.float64),
                               rtol=1e-6, atol=0)
    m = m.double()
    with torch.no_grad():
        m.radius.raw.fill_(2.5)
    h = h.double().requires_grad_()
    g = torch.randn(h.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(m(h), (h, m.radius.raw), g)
    raw = m.radius.raw.detach().clone().requires_grad_()
    want = torch.log1p(raw.exp()) * h / torch.sqrt((h * h).sum(-1, keepdim=True))
    torch.testing.assert_close(m(h), want, rtol=1e-12, atol=1e-12)
    for a, b in zip(got, torch.autograd.grad(want, (h, raw), g)):
        torch.testing.assert_close(a, b.reshape(a.shape), rtol=1e-11, atol=1e-11)
    for raw, radius in ((-3.0, 1.0), (100.0, math.sqrt(d))):
        with torch.no_grad():
            m.radius.raw.fill_(raw)
        assert (m(h).norm(dim=-1) / radius - 1).abs().max() < 1e-6


def test_scale_norm_bound_reaches_the_radius():
    for bound, want in (('clamp', 0.0), ('project', 1.0)):
        m = ScaleNorm(16, bound=bound)
        with torch.no_grad():
            m.radius.raw.fill_(10.0)                                # above sqrt(16)
        h = torch.ones(1, 16)
        (grad,) = torch.autograd.grad(m(h)[0, 0], m.radius.raw)
        assert abs(grad.item() - want / 4) < 1e-4


def test_scale_norm_in_autocast_and_at_zero():
    m = ScaleNorm(16)
    m.radius.reset_parameters()
    h = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    h[0] = 0
    h.requires_grad_()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = m(h)
    assert out.dtype == torch.float32 and (out[0] == 0).all()
    assert (out[1:].norm(dim=-1) - 4).abs().max() < 4e-6
    out.sum().backward()
    assert torch.isfinite(h.grad).all() and torch.isfinite(m.radius.raw.grad).all()


def test_decays():
    assert {'sqrt', 'harmonic', 'linear', 'none'} <= set(DECAYS)
    for L in (2, 24, 72):
        for i in range(1, L + 1):
            for name, want in (('sqrt', i**-0.5), ('harmonic', 1 / i), ('linear', (L - i) / L), ('none', 1.0)):
                assert DECAYS[name](i, L) == pytest.approx(want, rel=1e-15, abs=0)
    assert DECAYS['linear'](24, 24) == 0                            # the last branch never learns


# ---------------------------------------------------------------------------------------------------------------------
# longer grids (make check)

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('p', [0.05, 0.25, 0.5, 0.75, 1.0, 1.01, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0, 64.0, 1e6, INF])
def test_grid(p, dtype):
    for cap in (None, CAP, 0.1, 1.2):
        for seed in range(2):
            for d in (2, 17):
                for r in (1e-3, 1.0, 30.0, 1e3):
                    for size in (0.0, 1e-20, 1e-8, 1e-4, 1e-2, 0.1, 1.0, 3.0, 30.0, 1e5):
                        if size == 1e5 and p == INF and cap is None:
                            continue                                # an angle of 1e5 has no accurate cosine
                        h, f, alpha = tokens(8, d, r=r, size=size, dtype=dtype, seed=seed)
                        if cap is not None and p > 1:               # keep off the kink
                            z = f - (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
                            beta = alpha * z.norm(dim=-1, keepdim=True) / h.norm(dim=-1, keepdim=True)
                            theta = beta if p == INF else p * torch.atan(beta / p)
                            alpha = torch.where((theta - cap).abs() < 1e-3, alpha * 0.98, alpha)
                        check(h, f, alpha, p, cap, EPS[dtype])


@pytest.mark.slow
@pytest.mark.parametrize('p', [0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 8.0, 100.0, INF])
def test_dense_sweep_of_beta(p):
    beta = torch.from_numpy(np.geomspace(1e-12, 10, 20000)).unsqueeze(-1)
    e, u = torch.linalg.qr(torch.randn(6, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0].T
    alpha = torch.ones(len(beta), 1, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        for g in (u, e):
            check(e.expand(len(beta), 6).to(dtype), (beta * u).to(dtype), alpha.to(dtype), p, None, EPS[dtype],
                  g=g.expand(len(beta), 6).to(dtype))


# -----------------------------------------------------------------------------
# wrong or extreme arguments


@pytest.mark.parametrize('p, max_angle', [(2.0, 4.0), (1.2, 2.0), (2.0, math.pi), (8.0, 20.0)])
def test_a_cap_that_p_cannot_reach_is_none(p, max_angle):
    torch.manual_seed(0)
    h, f = torch.randn(2, 5, 6, dtype=torch.float64)
    capped = retract(h, 100 * f, 0.3, p, max_angle)
    assert torch.allclose(capped, retract_reference(h, 100 * f, 0.3, p, max_angle), atol=1e-12)


def test_a_cap_of_zero_keeps_the_stream():
    h = torch.randn(3, 4)
    assert torch.equal(retract(h, 0 * h, 0.3, 2.0, 0.0), h)
    assert torch.allclose(retract(h, torch.randn(3, 4), 0.3, 2.0, 0.0), h)


@pytest.mark.parametrize('keys', [
    dict(alpha=torch.ones(4)), dict(alpha=torch.ones(5, 1, 1)), dict(f=torch.ones(3, 1)), dict(f=torch.ones(4)),
    dict(p=0.0), dict(p=-1.0), dict(p=1e-7), dict(p=math.nan), dict(max_angle=-1.0), dict(max_angle=math.nan)], ids=str)
def test_wrong_arguments_are_refused(keys):
    with pytest.raises(ValueError):
        retract(**{'h': torch.ones(3, 4), 'f': torch.ones(3, 4), 'alpha': 0.5, 'p': 2.0, **keys})


# -----------------------------------------------------------------------------
# the retraction and the norm after it; what torch.compile and the model make of them


@pytest.mark.parametrize('norm', ['layernorm', 'rmsnorm'])
def test_retract_norm(norm):
    h, f, alpha = tokens(12, 16, r=4.0)
    gen = torch.Generator().manual_seed(1)
    weight, bias, *g = torch.randn(26, 16, generator=gen, dtype=torch.float64).split((1, 1, 12, 12))
    for b in (bias[0], None):
        found = []
        for ours in (True, False):
            live = [x.clone().requires_grad_() for x in (h, f, alpha, weight[0])] + [b]
            if ours:
                out, y = retract_norm(*live, p=0.5, norm=norm)
            else:
                out = plain(*live[:3], 0.5, None)
                x = out - out.mean(-1, keepdim=True) if norm == 'layernorm' else out
                eps = 1e-5 if norm == 'layernorm' else 0
                y = x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * live[3] + (0 if b is None else b)
            found.append((out, y, *torch.autograd.grad((out, y), live[:4], g)))
        for a, b_ in zip(*found):
            torch.testing.assert_close(a, b_, rtol=1e-10, atol=1e-10)
    out, y = retract_norm(h.float(), f.bfloat16(), 0.5, weight[0].float(), norm=norm)
    assert out.dtype == torch.float32 and y.dtype == torch.bfloat16
    with pytest.raises(ValueError, match='choose layernorm or rmsnorm'):
        retract_norm(h, f, alpha, weight[0], norm='dyt')


class Retraction(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p, self.step = p, Bounded(0.0, 1.0)
        self.step.reset_parameters()

    def forward(self, h, f):
        return retract(h, f, 0.5 * self.step(), self.p, CAP)


def test_compiles_in_one_graph():
    # several orders in one process: then p is a variable to Dynamo, which may not break the graph
    torch._dynamo.reset()
    h, f, _ = tokens(4, 8, dtype=torch.float32)
    for p in (0.5, 1.0, 2.0, INF, 0.7, 1.7):
        module = Retraction(p)
        grads = []
        for run in (module, torch.compile(module, fullgraph=True, backend='aot_eager')):
            live = [h.clone().requires_grad_(), f.clone().requires_grad_(), *module.parameters()]
            grads.append(torch.autograd.grad(run(*live[:2]).cos().sum(), live))
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_step_is_one_graph(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
    torch._dynamo.reset()
    idx, targets = torch.randint(0, 11, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    cases = [dict(residual=mode) for mode, row in RESIDUALS.items() if row.connection is Sphere]
    for keys in cases + [dict(residual='cay_spheret', place='in', norm='rmsnorm')]:
        model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16, **keys))
        grads = []
        for run in (model, torch.compile(model, fullgraph=True)):
            model.zero_grad()
            run(idx, targets)[1].backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_an_rmsnorm_on_the_sphere_divides_by_the_radius():
    # place='in': no reduction, no parameter of its own, and the gradient that the reduction would have
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=16, residual='p_spheret',
                          norm='rmsnorm', place='in')).double()
    assert [name for name in model.state_dict() if 'radius' in name] == ['transformer.open.radius.raw']
    with torch.no_grad():
        model.transformer.open.radius.raw.sub_(1)
    idx, targets = torch.randint(0, 11, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for reduce in (False, True):
        for block in model.transformer.h:
            for norm in (block.ln_1, block.ln_2):
                assert norm.radius[0] is model.transformer.open.radius
                if reduce:
                    norm.forward = partial(torch.nn.functional.rms_norm, normalized_shape=(16,), weight=norm.weight)
        model.zero_grad()
        loss = model(idx, targets)[1]
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert not model.transformer.ln_f.radius
