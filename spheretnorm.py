"""
Sphere retractions: residual connections whose stream keeps its norm.

A residual stream h is a point on a sphere of radius r = |h|. A branch output f says where to go; only its tangent
part z = f - (h.f / r^2) h can move h along the sphere, and a retraction turns that tangent step into a rotation by
an angle theta in the plane of h and f:

    s = |z|,   beta = alpha s / r,   theta = p atan(beta / p)       (p = inf: theta = beta)
    h' = cos(theta) h + (r sin(theta) / s) z

p = 1 is the metric projection (Proj-SpheretNorm), p = 2 the Cayley retraction (Cay-SpheretNorm), p = inf the
exponential map (GeoNorm, arXiv 2601.22095). Source: "Sphere Retraction Normalizations", arXiv 2608.02668, called
[SR] below; the numbers of its equations stand beside the code.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels

MAX_ANGLE = math.pi / 4  # the cap on theta that the modes use where p > 1
R2_MIN = 1e-12           # r^2 is clamped here, so that a zero stream divides by something
P_MIN = 1e-6             # the smallest order: p -> 0 is the identity, and 1/p^6 must stay a float32

# lambda_l, the decay of the step size with depth; l = 1 .. L counts sub-layers, L = 2 * n_layer
DECAYS = {
    'sqrt': lambda l, L: 1 / math.sqrt(l),  # SpheretNorm
    'harmonic': lambda l, L: 1 / l,         # GeoNorm
    'linear': lambda l, L: (L - l) / L,     # 0 at l = L: the last branch never learns
    'none': lambda l, L: 1.0,
}


# -----------------------------------------------------------------------------
# the retraction


def retract_reference(h, f, alpha, p=1.0, max_angle=None):
    """`retract` in plain torch operations, written as the definition reads. The reference for `retract` and kernels."""
    dtype = torch.promote_types(h.dtype, torch.float32)
    x, f = h.to(dtype), f.to(dtype)
    r2 = (x * x).sum(-1, keepdim=True).clamp_min(R2_MIN)
    z = f - (x * f).sum(-1, keepdim=True) / r2 * x
    s2 = (z * z).sum(-1, keepdim=True)
    moves = s2 > 0
    s, r = torch.where(moves, s2, 1).sqrt(), r2.sqrt()  # a root at 0 would have no gradient, even if unused
    beta = alpha * s / r
    theta = beta if math.isinf(p) else p * torch.atan(beta / p)
    if p > 1 and max_angle is not None:
        theta = theta.clamp(max=max_angle)
    moved = torch.cos(theta) * x + r * torch.sin(theta) / s * z
    return torch.where(moves, moved, x + alpha * z).to(h.dtype)  # s = 0: h' = h, with the derivative of h + alpha z


def _rotation(x, p, max_angle):
    """
    The four functions of the angle that forward and backward need. All are even in beta, so they are written in
    x = beta^2: no root, hence no trouble at beta = 0.

        cos     = cos(theta)
        sinc    = sin(theta) / beta
        slope   = theta' = d theta / d beta
        curve   = (beta cos(theta) theta' - sin(theta)) / beta^3 = sinc' / beta  ->  -(1/3 + 2/(3 p^2)) at beta = 0
    """
    if p == 1:    # theta = atan(beta)
        cos = torch.rsqrt(1 + x)
        sinc, slope, curve = cos, cos * cos, -cos * cos * cos
    elif p == 2:  # theta = 2 atan(beta / 2): half angles, nothing but a division
        sinc = 1 / (1 + x / 4)
        cos, slope, curve = (1 - x / 4) * sinc, sinc, -sinc * sinc / 2
    elif p == 0.5:  # theta = atan(2 beta) / 2: half-angle formulas from k = cos(2 theta)
        k = torch.rsqrt(1 + 4 * x)
        cos = ((1 + k) / 2).sqrt()
        sinc, slope = k / cos, k * k
        curve = -2 * k * k * k * (k + 2) / ((1 + k) * cos)
    else:
        # q = 1/p^2; the series below eps^(1/4) or so, where the closed form of `curve` has cancelled as much
        q = 0.0 if p == math.inf else 1 / p**2
        small = x * (1 + q) < (1e-4 if x.dtype == torch.float64 else 2e-2)
        s1, s2, s3 = -(1 + 2 * q) / 6, (1 + 20 * q + 24 * q**2) / 120, -(1 + 70 * q + 784 * q**2 + 720 * q**3) / 5040
        c2, c3 = (1 + 8 * q) / 24, -(1 + 40 * q + 184 * q**2) / 720
        t = torch.where(small, x, 0)
        x = torch.where(small, 1, x)
        beta = x.sqrt()
        theta = beta if p == math.inf else p * torch.atan(beta / p)
        sin, cos = torch.sin(theta), torch.cos(theta)
        slope = 1 / (1 + q * torch.where(small, t, x))
        curve = torch.where(small, 2 * s1 + t * (4 * s2 + t * 6 * s3), (cos * slope - sin / beta) / x)
        sinc = torch.where(small, 1 + t * (s1 + t * (s2 + t * s3)), sin / beta)
        cos = torch.where(small, 1 + t * (-0.5 + t * (c2 + t * c3)), cos)
        x = torch.where(small, t, x)
    if p > 1 and max_angle is not None and max_angle < p * math.pi / 2:  # theta stays below p pi/2 by itself
        beta_max = max_angle if p == math.inf else p * math.tan(max_angle / p)
        capped = x > beta_max**2
        x = torch.where(capped, x, 1)
        sinc = torch.where(capped, math.sin(max_angle) * torch.rsqrt(x), sinc)
        curve = torch.where(capped, -math.sin(max_angle) * torch.rsqrt(x) / x, curve)
        cos = torch.where(capped, math.cos(max_angle), cos)
        slope = torch.where(capped, 0, slope)
    return cos, sinc, slope, curve


def _reuse(buffer):
    """For `out=`: a buffer that has done its work, unless autograd watches (create_graph), which needs fresh tensors.
    On a CPU the page faults of a fresh tensor cost more than the arithmetic that fills it."""
    return None if torch.is_grad_enabled() else buffer


def _square(a):  # one pass, where (a * a).sum() writes the product first
    return torch.linalg.vector_norm(a, dim=-1, keepdim=True).square()


class _Retract(torch.autograd.Function):
    """
    Forward and backward in closed form: three reductions and two scalars a token each way. The backward starts from
    the inputs alone: nothing per token is stored, and differentiating it once more is right too.
    """

    @staticmethod
    def _frame(h, f, alpha):
        dtype = torch.promote_types(h.dtype, torch.float32)
        h, f, alpha = h.to(dtype), f.to(dtype), alpha.to(dtype)
        hh = _square(h).clamp_min(R2_MIN)  # r^2
        hf = h * f
        c = hf.sum(-1, keepdim=True) / hh
        # the tangent part, and s^2 = z.z from z itself: f.f - (h.f)^2/r^2 cancels
        z = torch.addcmul(f, c, h, value=-1, out=_reuse(hf))
        zz = _square(z)
        return h, alpha, hh, c, z, zz, alpha * alpha * zz / hh

    @staticmethod
    def forward(ctx, h, f, alpha, p, max_angle):
        ctx.save_for_backward(h, f, alpha)
        ctx.p, ctx.max_angle = p, max_angle
        x, alpha, _, _, z, _, beta2 = _Retract._frame(h, f, alpha)
        cos, sinc, _, _ = _rotation(beta2, p, max_angle)
        return z.mul_(alpha * sinc).addcmul_(cos, x).to(h.dtype)  # r sin(theta) / s = alpha sin(theta) / beta

    @staticmethod
    def backward(ctx, g):
        # With b = alpha sinc: h' = cos h + b z, z = f - c h, c = h.f / r^2. Collecting dL = g.dh' over df, dh, dalpha:
        h, f, alpha = ctx.saved_tensors
        x, al, hh, c, z, zz, beta2 = _Retract._frame(h, f, alpha)
        cos, sinc, slope, curve = _rotation(beta2, ctx.p, ctx.max_angle)
        g = g.to(x.dtype)
        product = g * x
        gh = product.sum(-1, keepdim=True)
        product = torch.mul(g, z, out=_reuse(product))
        gz = product.sum(-1, keepdim=True)
        b = al * sinc
        m = al * curve * gz - slope * sinc * gh  # (dL / d beta) / beta
        u, w = m * al * al / hh, b * gh / hh
        df = torch.mul(b, g, out=_reuse(product)).addcmul_(u, z).addcmul_(w, x, value=-1)
        dh = torch.mul(-w - u * c, z, out=_reuse(z)).addcmul_(cos - b * c, g).addcmul_(w * c - m * beta2 / hh, x)
        dalpha = None
        if ctx.needs_input_grad[2]:
            # exactly 0 where capped, for slope is
            dalpha = (slope * (cos * gz - sinc * gh * al * zz / hh)).sum_to_size(alpha.shape).to(alpha.dtype)
        return dh.to(h.dtype), df.to(f.dtype), dalpha, None, None


def _checked(h, f, alpha, p, max_angle):
    """p as a float, when the arguments of a retraction are fit; ValueError otherwise."""
    if not p >= P_MIN:
        raise ValueError(f'p = {p}: the order of a retraction is a number from {P_MIN} on, or inf')
    if max_angle is not None and not max_angle >= 0:
        raise ValueError(f'max_angle = {max_angle}: must be a number >= 0, or None for no cap')
    if f.shape != h.shape:
        raise ValueError(f'the branch output has shape {tuple(f.shape)}, the stream {tuple(h.shape)}')
    if torch.is_tensor(alpha) and torch.broadcast_shapes(alpha.shape, (*h.shape[:-1], 1)) != (*h.shape[:-1], 1):
        raise ValueError(f'alpha has shape {tuple(alpha.shape)}, which does not broadcast to {(*h.shape[:-1], 1)}')
    p = float(p)
    for constant in (1.0, 2.0, 0.5, math.inf):
        if p == constant:  # torch.compile makes a variable of a number that it has seen change; these are cases
            return constant
    return p


def retract(h, f, alpha, p=1.0, max_angle=None):
    """
    Move h along its sphere by the tangent part of the branch output f.

    h: (..., d) stream; its norm along the last axis is kept. f: (..., d) branch output, any float type.
    alpha: step size, a number or a tensor that broadcasts to (..., 1). p: order of the retraction, in [P_MIN, inf].
    max_angle: cap on the angle in radians, None for no cap; without effect for p <= 1, whose angle stays below pi/2.
    Returns h' (..., d) in h's type; the arithmetic is at least float32. Differentiable in h, f and alpha (inside the
    clamp |h| < 1e-6, which no stream of a model reaches, the gradient takes |h| as it is). Raises ValueError.
    Source: [SR] Eq. 6 (p = 1), Eq. 7-8 (p = 2) and their common form in p; the gradients are ours.
    """
    p = _checked(h, f, alpha, p, max_angle)
    if kernels.takes(h, f, alpha):
        return kernels.retract(h, f, alpha, p, max_angle)
    # as_tensor leaves a number on the CPU: zero-dimensional tensors mix with any device, without a copy
    return _Retract.apply(h, f, torch.as_tensor(alpha, dtype=None if torch.is_tensor(alpha) else torch.float64), p,
                          max_angle)


def retract_norm(h, f, alpha, weight, bias=None, p=1.0, max_angle=None, norm='layernorm'):
    """
    `retract`, and what the next branch reads: (h', N(h')), the second in f's type. norm: 'layernorm' (eps 1e-5) or
    'rmsnorm' (no eps: the norm of a stream is far from 0), with weight and bias (d,), bias None for none. One kernel
    writes both, without reading h' again: the norm of h' is that of h, so an RMSNorm needs no reduction and a LayerNorm
    the mean alone. Raises ValueError. Source: ours.
    """
    p = _checked(h, f, alpha, p, max_angle)
    if norm not in ('layernorm', 'rmsnorm'):
        raise ValueError(f'norm = {norm!r} cannot follow a retraction in one pass: choose layernorm or rmsnorm')
    if kernels.takes(h, f, alpha):
        return kernels.retract_norm(h, f, alpha, weight, bias, p, max_angle, norm)
    out = retract(h, f, alpha, p, max_angle)
    x = out.to(torch.promote_types(h.dtype, torch.float32))
    if norm == 'layernorm':
        return out, F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5).to(f.dtype)
    y = F.rms_norm(x, x.shape[-1:], weight, R2_MIN / x.shape[-1])
    return out, (y if bias is None else y + bias).to(f.dtype)


# -----------------------------------------------------------------------------
# the two learned scalars: step size and radius


def inverse_softplus(y):
    return y + math.log(-math.expm1(-y)) if y > 0 else -math.inf


class Bounded(nn.Module):
    """
    A learned scalar softplus(raw), held in [low, high] and starting ON the upper bound.

    bound='clamp' is [SR]'s plain clamp. It is a trap: above the bound its gradient is exactly 0, so one upward step
    of the optimizer freezes the scalar for good. bound='project' clamps the value, lets the gradient through, and
    `project_` moves the stored parameter back into its range after each optimizer step.
    """

    def __init__(self, low, high, bound='project'):
        super().__init__()
        self.low, self.high, self.bound = low, high, bound
        self.raw = nn.Parameter(torch.empty(()))

    def reset_parameters(self):
        nn.init.constant_(self.raw, inverse_softplus(self.high))

    def forward(self):
        y = F.softplus(self.raw)
        clamped = y.clamp(self.low, self.high)
        return clamped if self.bound == 'clamp' else clamped.detach() + (y - y.detach())  # y - y is 0, with a gradient

    @torch.no_grad()
    def project_(self):
        if self.bound == 'project':
            self.raw.clamp_(inverse_softplus(self.low), inverse_softplus(self.high))

    @torch.no_grad()
    def on_bound(self):
        """Whether the scalar sits on its upper bound, as a tensor (no host sync); to the rounding of softplus."""
        return F.softplus(self.raw) >= self.high * (1 - 1e-6)


class ScaleNorm(nn.Module):
    """
    Opens a sphere stream: h (..., d) -> softplus(gamma) h / |h|, with softplus(gamma) in [1, sqrt(d)], first sqrt(d).
    The norm of h is clamped at 1e-6. Source: [SR]; gamma is `radius.raw` here.
    """

    def __init__(self, d, bound='project'):
        super().__init__()
        self.radius = Bounded(1.0, math.sqrt(d), bound)

    def forward(self, h):
        return self.radius() * F.normalize(h, dim=-1, eps=math.sqrt(R2_MIN))
