"""
Triton kernels for the sphere retraction of spheretnorm.py and for the streams of hyperconn.py, at the speed of memory.

A retraction is a handful of flops an element, so its price is what it moves. h' = cos(theta) h + b z is a combination
of h and f with two numbers a token, and so are the gradients (of h, f and g): a program loads its rows once, keeps
them in registers through every reduction, and writes its results once.

    forward     reads h, f       writes h'        [NORM: and y = N(h'), the next branch's input, without reading h']
    backward    reads h, f, g    writes dh, df    [NORM: reads the gradient of y too; h' and y are computed again]

Nothing is kept for the backward but h, f and alpha. d alpha is one number a program, summed by a second kernel: no
atomics, so a step is reproducible to the bit. Arithmetic is float32 whatever is stored.

A hyper-connection has S streams of a width each (n in hyperconn; here n counts rows) and moves them three times, once
in and at most once out each time; its small matrices live in registers and are made again in the backward.

    project     reads X             writes x'W, the logits   [backward: reads X, writes dX]
    matrices    reads the logits    writes H_pre, H_post, H_res
    read        reads X             writes H_pre X           [backward: reads X, g, writes dX, dH_pre]
    write       reads X, f          writes X'                [backward: reads X, f, g, writes dX, df, dH_post, dH_res]

`select` says who runs; `spheretnorm.retract` and hyperconn ask `takes`, `takes_streams` or `takes_mapping` and fall
back to their plain torch form. The algebra is explained there: the kernels of the retraction, with the meaning of cos,
sinc, slope and curve, repeat spheretnorm._Retract line by line.
Without a GPU: TRITON_INTERPRET=1 runs them in Python, and `aot` compiles them for a chip that is not there.
"""
import math
import os
import re
import subprocess
import tempfile

import torch

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # no wheel for this platform: everything runs in plain torch
    triton = None
    jit = lambda fn: fn  # noqa: E731
    tl = type('tl', (), dict(constexpr=lambda value: value))

INTERPRET = os.environ.get('TRITON_INTERPRET', '0') not in ('', '0')  # what @triton.jit looks at, at import

# -----------------------------------------------------------------------------
# who runs

_choice = 'auto'
STREAMS = (2, 3, 4, 8)  # numbers of streams that have kernels
# the kinds of H_res that have kernels: at which numbers of streams n, and from how many logits a token
MAPPINGS = {
    'hc': (STREAMS, lambda n: n * n),
    'mhc': (STREAMS, lambda n: n * n),
    'mhc_lite': ((2, 3, 4), math.factorial),
    'kromhc': ((2, 4, 8), lambda n: 2 * (n.bit_length() - 1)),
    's2hc': (STREAMS, lambda n: (n - 1) ** 2),
    'hc_identity': (STREAMS, lambda n: 0),
    'hc_orthogonal': (STREAMS, lambda n: n * (n - 1) // 2),
}


def select(choice):
    """
    For the whole process: 'auto' takes the kernels for tensors on CUDA where triton is installed, 'eager' never,
    'triton' always. What has no kernel stays in plain torch: float64, an alpha per token, static mappings, and what
    STREAMS and MAPPINGS leave out. Raises ValueError.
    """
    global _choice
    if choice not in ('auto', 'triton', 'eager'):
        raise ValueError(f'kernels = {choice!r} does not exist: choose from auto, triton, eager')
    if choice == 'triton' and triton is None:
        raise ValueError("kernels = 'triton': the package triton is not installed; use kernels = 'auto'")
    if choice == 'triton' and not INTERPRET and not torch.cuda.is_available():
        raise ValueError("kernels = 'triton': no CUDA device; use kernels = 'auto', or set TRITON_INTERPRET=1 to run "
                         'the kernels in the (slow) interpreter')
    _choice = choice


def _runs(*tensors):
    """Whether kernels run on these tensors, the stream first. Raises ValueError."""
    stream = tensors[0]
    if _choice == 'eager' or (_choice == 'auto' and (triton is None or not stream.is_cuda)):
        return False
    if not stream.is_cuda and not INTERPRET:
        raise ValueError(f"kernels = 'triton', but the stream is on {stream.device}: use kernels = 'auto', or set "
                         'TRITON_INTERPRET=1')
    return all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in tensors)


def takes(h, f, alpha):
    """Whether the kernels run a retraction of h by f with step size alpha, a number or a tensor. Raises ValueError."""
    return _runs(h, f) and (not torch.is_tensor(alpha) or alpha.numel() == 1)


def takes_streams(X, *others):
    """Whether the kernels read and write X (..., n, C), with tensors of a dtype of their own. Raises ValueError."""
    return X.shape[-2] in STREAMS and _runs(X, *others)


def takes_mapping(kind, X, weight):
    """Whether the kernels make the matrices of a kind from X (..., n, C) and its weight. Raises ValueError."""
    return kind in MAPPINGS and X.shape[-2] in MAPPINGS[kind][0] and _runs(X, weight)


# -----------------------------------------------------------------------------
# scalar functions, one value a row: x, theta (ROWS,)

R2_MIN = tl.constexpr(1e-12)    # of spheretnorm
BETA_MAX = tl.constexpr(1e12)   # a bounded angle has saturated long before; beta^2 and its powers stay float32
LAYERNORM_EPS = tl.constexpr(1e-5)
SINKHORN = tl.constexpr(20)     # iterations, of hyperconn.sinkhorn


@jit
def _rsqrt(x):
    # to the last bit, where tl.rsqrt and / are approximate on a GPU: an error here would add up over the layers
    return tl.div_rn(1.0 + 0 * x, tl.sqrt_rn(x))


@jit
def _atan(x):
    # x >= 0. atan(x) = pi/2 - atan(1/x) and = pi/4 + atan((x-1)/(x+1)) bring it below tan(pi/8); Cephes' atanf there
    t = tl.where(x > 1, 1 / tl.maximum(x, 1.0), x)
    upper = t > 0.41421356237309503
    t = tl.where(upper, (t - 1) / (t + 1), t)
    z = t * t
    y = (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1) * z * t + t
    y = tl.where(upper, y + 0.7853981633974483, y)
    return tl.where(x > 1, 1.5707963267948966 - y, y)


@jit
def _sincos(theta):
    # theta >= 0. tl.sin and tl.cos carry a slow path for any float; here k quarter turns are taken off in three pieces
    # (Cody and Waite; exact below k = 2^15, and past theta = 1e5 a float32 hardly knows its angle), and Cephes'
    # polynomials do the rest, in [-pi/4, pi/4]
    k = tl.floor(theta * 0.6366197723675814 + 0.5)
    y = ((theta - k * 1.5703125) - k * 4.837512969970703125e-4) - k * 7.54978995489188216e-8
    y = tl.minimum(tl.maximum(y, -0.7853982), 0.7853982)
    z = y * y
    s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * y + y
    c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1
    quarter = k - 4 * tl.floor(k / 4)
    odd = (quarter == 1) | (quarter == 3)
    sin = tl.where(odd, c, s)
    cos = tl.where(odd, s, c)
    return tl.where(quarter >= 2, -sin, sin), tl.where((quarter == 1) | (quarter == 2), -cos, cos)


@jit
def _rotation(x, INV_P: tl.constexpr, X_CAP: tl.constexpr, SIN_CAP: tl.constexpr, COS_CAP: tl.constexpr):
    # cos(theta), sinc = sin(theta)/beta, slope = d theta/d beta and curve = sinc'/beta as functions of x = beta^2, for
    # the order p = 1/INV_P: spheretnorm._rotation. The first three orders need neither sine nor arctangent.
    if INV_P == 1:
        cos = _rsqrt(1 + x)
        sinc = cos
        slope = cos * cos
        curve = -cos * slope
    elif INV_P == 0.5:
        slope = tl.div_rn(1.0 + 0 * x, 1 + x / 4)
        sinc = slope
        cos = (1 - x / 4) * sinc
        curve = -sinc * sinc / 2
    elif INV_P == 2:
        k = _rsqrt(1 + 4 * x)
        cos = tl.sqrt_rn((1 + k) / 2)
        sinc = tl.div_rn(k, cos)
        slope = k * k
        curve = -2 * k * slope * (k + 2) / ((1 + k) * cos)
    else:
        Q: tl.constexpr = INV_P * INV_P  # 0 for p = inf
        # series where the closed form of curve cancels
        small = x * (1 + Q) < 2e-2
        t = tl.where(small, x, 0.0)
        S1: tl.constexpr = -(1 + 2 * Q) / 6
        S2: tl.constexpr = (1 + 20 * Q + 24 * Q * Q) / 120
        S3: tl.constexpr = -(1 + 70 * Q + 784 * Q * Q + 720 * Q * Q * Q) / 5040
        C2: tl.constexpr = (1 + 8 * Q) / 24
        C3: tl.constexpr = -(1 + 40 * Q + 184 * Q * Q) / 720
        x1 = tl.where(small, 1.0, x)
        beta = tl.sqrt_rn(x1)
        theta = beta
        if INV_P > 0:
            theta = _atan(beta * INV_P) / INV_P
        sin, cos = _sincos(theta)
        slope = 1 / (1 + Q * x)
        sinc = tl.where(small, 1 + t * (S1 + t * (S2 + t * S3)), sin / beta)
        curve = tl.where(small, 2 * S1 + t * (4 * S2 + t * 6 * S3), (cos * slope - sin / beta) / x1)
        cos = tl.where(small, 1 + t * (-0.5 + t * (C2 + t * C3)), cos)
    if X_CAP >= 0:  # past the cap the angle is constant
        capped = x > X_CAP
        inv = _rsqrt(tl.where(capped, x, 1.0))
        cos = tl.where(capped, COS_CAP, cos)
        sinc = tl.where(capped, SIN_CAP * inv, sinc)
        slope = tl.where(capped, 0.0, slope)
        curve = tl.where(capped, -SIN_CAP * inv * inv * inv, curve)
    return cos, sinc, slope, curve


def _constants(p, max_angle):
    """What `_rotation` takes besides x. X_CAP = -1: the angle has no cap, or one that it cannot reach."""
    inv_p = 0.0 if math.isinf(p) else 1 / p
    if p <= 1 or max_angle is None or max_angle >= p * math.pi / 2:
        return dict(INV_P=inv_p, X_CAP=-1.0, SIN_CAP=0.0, COS_CAP=1.0)
    beta = max_angle if math.isinf(p) else p * math.tan(max_angle / p)
    return dict(INV_P=inv_p, X_CAP=beta * beta, SIN_CAP=math.sin(max_angle), COS_CAP=math.cos(max_angle))


# -----------------------------------------------------------------------------
# the kernels


@jit
def _frame(h, f, alpha):
    # What both directions start from. h, f (ROWS, BLOCK) in float32 -> r^2, c = h.f/r^2, z = f - c h, s/r, alpha, beta.
    # z.z comes from z itself, for f.f - (h.f)^2/r^2 cancels
    hh = tl.maximum(tl.sum(h * h, axis=1), R2_MIN)
    c = tl.sum(h * f, axis=1) / hh
    z = f - c[:, None] * h
    ratio = tl.sqrt_rn(tl.sum(z * z, axis=1)) / tl.sqrt_rn(hh)
    beta = alpha * ratio
    shrink = BETA_MAX / tl.maximum(tl.abs(beta), BETA_MAX)  # 1 but for a huge f, which this keeps from overflowing
    return hh, c, z, ratio, alpha * shrink, beta * shrink


@jit
def _statistics(h, f, hh, a, b, D: tl.constexpr, NORM: tl.constexpr):
    # mean (subtracted) and 1/deviation of h' = a h + b f, without looking at h': its norm is that of h, and its mean
    # follows from theirs. variance = r^2/d - mean^2 loses digits where a row is nearly constant, which no stream is
    mean = tl.zeros_like(hh)
    if NORM == 'layernorm':
        mean = (a * tl.sum(h, axis=1) + b * tl.sum(f, axis=1)) / D
        rstd = _rsqrt(tl.maximum(hh / D - mean * mean, 0.0) + LAYERNORM_EPS)
    else:
        rstd = _rsqrt(hh / D)
    return mean, rstd


@jit
def _forward(h_ptr, f_ptr, alpha_ptr, weight_ptr, bias_ptr, out_ptr, y_ptr, n, h_stride, f_stride,
             D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
             INV_P: tl.constexpr, X_CAP: tl.constexpr, SIN_CAP: tl.constexpr, COS_CAP: tl.constexpr):
    """
    One program: ROWS of the n rows, each of D elements in BLOCK >= D, a power of two.
    h, f (n, D) with a stride between rows; out = h' and, with NORM, y = N(h') (n, D), contiguous.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: n D may pass 2^31
    col = tl.arange(0, BLOCK)
    mask = (row < n)[:, None] & (col < D)[None, :]
    h = tl.load(h_ptr + row[:, None] * h_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + row[:, None] * f_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)

    hh, c, z, ratio, alpha, beta = _frame(h, f, tl.load(alpha_ptr))
    cos, sinc, slope, curve = _rotation(beta * beta, INV_P, X_CAP, SIN_CAP, COS_CAP)
    b = alpha * sinc  # r sin(theta)/s
    out = cos[:, None] * h + b[:, None] * z
    at = row[:, None] * D + col[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)

    if NORM is not None:
        mean, rstd = _statistics(h, f, hh, cos - b * c, b, D, NORM)
        weight = tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)
        y = (out - mean[:, None]) * rstd[:, None] * weight[None, :]
        if BIAS:
            y += tl.load(bias_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _backward(g_ptr, gy_ptr, h_ptr, f_ptr, alpha_ptr, weight_ptr, dh_ptr, df_ptr, dalpha_ptr, dweight_ptr, dbias_ptr,
              n, turns, g_stride, gy_stride, h_stride, f_stride,
              D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
              INV_P: tl.constexpr, X_CAP: tl.constexpr, SIN_CAP: tl.constexpr, COS_CAP: tl.constexpr):
    """
    One program: ROWS rows, `turns` times; more than once only with NORM, whose gradients of weight and bias are as wide
    as a row and should be added up before they are written. g, gy, h, f (n, D) with a stride between rows, g the
    gradient of h' and gy that of y; dh, df (n, D) contiguous; dalpha (programs,), dweight, dbias (programs, D).
    """
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    alpha_in = tl.load(alpha_ptr)
    dalpha = tl.zeros([ROWS], tl.float32)
    if NORM is not None:
        weight = tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)
        dweight = tl.zeros([BLOCK], tl.float32)
        dbias = tl.zeros([BLOCK], tl.float32)
    for turn in range(turns):
        row = (program * turns + turn) * ROWS + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & (col < D)[None, :]
        h = tl.load(h_ptr + row[:, None] * h_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        f = tl.load(f_ptr + row[:, None] * f_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row[:, None] * g_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)

        hh, c, z, ratio, alpha, beta = _frame(h, f, alpha_in)
        cos, sinc, slope, curve = _rotation(beta * beta, INV_P, X_CAP, SIN_CAP, COS_CAP)
        b = alpha * sinc

        if NORM is not None:  # y = N(h') hands its gradient to h'
            gy = tl.load(gy_ptr + row[:, None] * gy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
            mean, rstd = _statistics(h, f, hh, cos - b * c, b, D, NORM)
            y = (cos[:, None] * h + b[:, None] * z - mean[:, None]) * rstd[:, None]  # before weight and bias
            dweight += tl.sum(gy * y, axis=0)
            if BIAS:
                dbias += tl.sum(gy, axis=0)
            gy = gy * weight[None, :]
            dy = gy - y * (tl.sum(gy * y, axis=1) / D)[:, None]
            if NORM == 'layernorm':
                dy -= (tl.sum(gy, axis=1) / D)[:, None]
            g += rstd[:, None] * dy

        gh = tl.sum(g * h, axis=1)
        gz = tl.sum(g * z, axis=1)
        m = alpha * curve * gz - slope * sinc * gh  # (dL / d beta) / beta
        u = m * alpha * alpha / hh
        w = b * gh / hh
        df = b[:, None] * g + u[:, None] * z - w[:, None] * h
        dh = (cos - b * c)[:, None] * g - (w + u * c)[:, None] * z + (w * c - m * beta * beta / hh)[:, None] * h
        at = row[:, None] * D + col[None, :]
        tl.store(df_ptr + at, df.to(df_ptr.dtype.element_ty), mask=mask)
        tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=mask)
        dalpha += slope * (cos * gz - sinc * beta * ratio * gh)
    tl.store(dalpha_ptr + program, tl.sum(dalpha, axis=0))
    if NORM is not None:
        tl.store(dweight_ptr + program * D + col, dweight, mask=col < D)
        if BIAS:
            tl.store(dbias_ptr + program * D + col, dbias, mask=col < D)


# -----------------------------------------------------------------------------
# streams: read H_pre X and write H_res X + H_post^T f. S streams of width D lie side by side in a row of X; the numbers
# of a row are vectors (ROWS,), the streams tiles (ROWS, BLOCK), and a matrix is a tuple of them, unrolled: nothing of
# a token lies in memory. A program is one warp, mostly with one row, and no reduction needs another warp: neither
# shared memory nor barriers. It walks over the columns, 128 at a time.


@jit
def _numbers(ptr, row, stride, live, COUNT: tl.constexpr):
    # COUNT of (ROWS,)
    numbers = ()
    for k in tl.static_range(COUNT):
        numbers += (tl.load(ptr + row * stride + k, mask=live, other=0.0),)
    return numbers


@jit
def _streams(ptr, row, stride, col, mask, D: tl.constexpr, S: tl.constexpr):
    # S of (ROWS, BLOCK), in float32
    at = row[:, None] * stride + col[None, :]
    streams = ()
    for i in tl.static_range(S):
        streams += (tl.load(ptr + i * D + at, mask=mask, other=0.0).to(tl.float32),)
    return streams


@jit
def _add_products(sums, a, b, I: tl.constexpr, J: tl.constexpr):
    # I x J partial sums of a_i b_j over the columns, (ROWS, BLOCK / 4): a thread adds up its 4 neighbours, and only
    # the last step, after the loop over the columns, looks at other threads
    added = ()
    for i in tl.static_range(I):
        for j in tl.static_range(J):
            product = a[i] * b[j]
            four = tl.reshape(product, (product.shape[0], product.shape[1] // 4, 4))
            added += (sums[i * J + j] + tl.sum(four, axis=2),)
    return added


@jit
def _read(pre_ptr, X_ptr, out_ptr, n, pre_stride, X_stride,
          D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pre = _numbers(pre_ptr, row, pre_stride, row < n, S)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = (row < n)[:, None] & (col < D)[None, :]
        X = _streams(X_ptr, row, X_stride, col, mask, D, S)
        out = pre[0][:, None] * X[0]
        for i in tl.static_range(1, S):
            out += pre[i][:, None] * X[i]
        tl.store(out_ptr + row[:, None] * D + col[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _read_backward(g_ptr, pre_ptr, X_ptr, dpre_ptr, dX_ptr, n, g_stride, pre_stride, X_stride,
                   D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pre = _numbers(pre_ptr, row, pre_stride, row < n, S)
    dpre = (tl.zeros([ROWS, BLOCK // 4], tl.float32),) * S
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = (row < n)[:, None] & (col < D)[None, :]
        g = _streams(g_ptr, row, g_stride, col, mask, D, 1)
        X = _streams(X_ptr, row, X_stride, col, mask, D, S)
        dpre = _add_products(dpre, X, g, S, 1)
        for i in tl.static_range(S):
            at = dX_ptr + (row * S + i)[:, None] * D + col[None, :]
            tl.store(at, (pre[i][:, None] * g[0]).to(dX_ptr.dtype.element_ty), mask=mask)
    for i in tl.static_range(S):
        tl.store(dpre_ptr + row * S + i, tl.sum(dpre[i], axis=1), mask=row < n)


@jit
def _write(X_ptr, f_ptr, post_ptr, res_ptr, out_ptr, n, X_stride, f_stride, post_stride, res_stride,
           D: tl.constexpr, S: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # without MIX H_res is the identity
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    post = _numbers(post_ptr, row, post_stride, row < n, S)
    if MIX:
        res = _numbers(res_ptr, row, res_stride, row < n, S * S)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = (row < n)[:, None] & (col < D)[None, :]
        X = _streams(X_ptr, row, X_stride, col, mask, D, S)
        f = _streams(f_ptr, row, f_stride, col, mask, D, 1)
        for i in tl.static_range(S):
            out = post[i][:, None] * f[0]
            if MIX:
                for j in tl.static_range(S):
                    out += res[i * S + j][:, None] * X[j]
            else:
                out += X[i]
            at = out_ptr + (row * S + i)[:, None] * D + col[None, :]
            tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _write_backward(g_ptr, X_ptr, f_ptr, post_ptr, res_ptr, dX_ptr, df_ptr, dpost_ptr, dres_ptr, n,
                    g_stride, X_stride, f_stride, post_stride, res_stride,
                    D: tl.constexpr, S: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # without MIX dX is g, and no X is read
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    post = _numbers(post_ptr, row, post_stride, row < n, S)
    dpost = (tl.zeros([ROWS, BLOCK // 4], tl.float32),) * S
    if MIX:
        res = _numbers(res_ptr, row, res_stride, row < n, S * S)
        dres = (tl.zeros([ROWS, BLOCK // 4], tl.float32),) * (S * S)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = (row < n)[:, None] & (col < D)[None, :]
        g = _streams(g_ptr, row, g_stride, col, mask, D, S)
        f = _streams(f_ptr, row, f_stride, col, mask, D, 1)
        dpost = _add_products(dpost, g, f, S, 1)
        df = post[0][:, None] * g[0]
        for i in tl.static_range(1, S):
            df += post[i][:, None] * g[i]
        tl.store(df_ptr + row[:, None] * D + col[None, :], df.to(df_ptr.dtype.element_ty), mask=mask)
        if MIX:
            X = _streams(X_ptr, row, X_stride, col, mask, D, S)
            dres = _add_products(dres, g, X, S, S)
            for j in tl.static_range(S):
                dX = res[j][:, None] * g[0]
                for i in tl.static_range(1, S):
                    dX += res[i * S + j][:, None] * g[i]
                at = dX_ptr + (row * S + j)[:, None] * D + col[None, :]
                tl.store(at, dX.to(dX_ptr.dtype.element_ty), mask=mask)
    for i in tl.static_range(S):
        tl.store(dpost_ptr + row * S + i, tl.sum(dpost[i], axis=1), mask=row < n)
    if MIX:
        for k in tl.static_range(S * S):
            tl.store(dres_ptr + row * (S * S) + k, tl.sum(dres[k], axis=1), mask=row < n)


# -----------------------------------------------------------------------------
# streams: the mapping X -> H_pre, H_post, H_res of hyperconn, in two kernels. The first multiplies rows of X, tile by
# tile, with the weights of all K logits. The second makes the matrices from the logits, as tiles (ROWS, P, P), P >= S a
# power of two, a few tokens in a warp. One kernel for both would have to spread the columns of a product over the
# threads; what the first hands to the second is a hundredth of X. Unrolled into scalars, a thread a token, s2hc of 8
# streams took 225 s to compile: Triton's pass over memory accesses is quadratic in the operations.


@jit
def _project(X_ptr, w_ptr, raw_ptr, inv_ptr, n, X_stride, EPS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
             D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # X (n, D), w (K, D) -> raw = X w^T / rms(X) (n, K) and inv = 1 / rms(X) (n,); COLUMNS >= K, a power of two
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    raw = tl.zeros([ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = (row < n)[:, None] & (col < D)[None, :]
        x = tl.load(X_ptr + row[:, None] * X_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + k[None, :] * D + col[:, None], mask=(k < K)[None, :] & (col < D)[:, None], other=0.0)
        raw = tl.dot(x, w, raw, input_precision='ieee')
        square += x * x
    inv = _rsqrt(tl.sum(square, axis=1) / D + EPS)
    tl.store(raw_ptr + row[:, None] * K + k[None, :], raw * inv[:, None], mask=(row < n)[:, None] & (k < K)[None, :])
    tl.store(inv_ptr + row, inv, mask=row < n)


@jit
def _project_backward(g_ptr, raw_ptr, inv_ptr, X_ptr, w_ptr, dX_ptr, n, g_stride, X_stride, K: tl.constexpr,
                      COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # g, the gradient of raw -> dX; d inv = -inv^3 x.dx / D
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    live = (row < n)[:, None] & (k < K)[None, :]
    inv = tl.load(inv_ptr + row, mask=row < n, other=0.0)
    g = tl.load(g_ptr + row[:, None] * g_stride + k[None, :], mask=live, other=0.0)
    raw = tl.load(raw_ptr + row[:, None] * K + k[None, :], mask=live, other=0.0)
    radial = -tl.sum(g * raw, axis=1) * inv * inv / D
    g = g * inv[:, None]
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = (row < n)[:, None] & (col < D)[None, :]
        x = tl.load(X_ptr + row[:, None] * X_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + k[:, None] * D + col[None, :], mask=(k < K)[:, None] & (col < D)[None, :], other=0.0)
        dX = tl.dot(g, w, input_precision='ieee') + radial[:, None] * x
        tl.store(dX_ptr + row[:, None] * D + col[None, :], dX.to(dX_ptr.dtype.element_ty), mask=mask)


@jit
def _tanh(x):
    # the closed form has no digits near 0
    y = x * x
    series = x * (1 - y * (0.3333333333333333 - y * (0.13333333333333333 - y * 0.05396825396825397)))
    return tl.where(y < 1e-2, series, 1 - 2 / (tl.exp(2 * x) + 1))


@jit
def _matmul(a, b, FORM: tl.constexpr):
    # a b, or with FORM 'tn' a^T b, or with 'nt' a b^T
    if FORM == 'tn':
        return tl.sum(a[:, :, :, None] * b[:, :, None, :], axis=1)
    elif FORM == 'nt':
        return tl.sum(a[:, :, None, :] * b[:, None, :, :], axis=3)
    else:
        return tl.sum(a[:, :, :, None] * b[:, None, :, :], axis=2)


@jit
def _pairs(P: tl.constexpr, M: tl.constexpr):
    # for every entry of a skew matrix M x M in a tile P x P: which of the logits, whether there is one, and its sign
    e = tl.arange(0, P * P)
    i = e // P
    j = e % P
    low = tl.minimum(i, j)
    high = tl.maximum(i, j)
    return low * M - low * (low + 1) // 2 + high - low - 1, (i != j) & (high < M), tl.where(i < j, 1.0, -1.0)


@jit
def _cayley(a, M: tl.constexpr, P: tl.constexpr):
    # a skew -> (I + a)^-1 (I - a) = 2 (I + a)^-1 - I by Gauss and Jordan's elimination, without a search for pivots:
    # none is below 1, because the leading minors of I + a grow
    i = tl.arange(0, P)[None, :]
    eye = tl.where(i[:, :, None] == i[:, None, :], 1.0, 0.0)
    a += eye
    for k in range(M):
        row = tl.sum(tl.where(i[:, :, None] == k, a, 0.0), axis=1)
        column = tl.sum(tl.where(i[:, None, :] == k, a, 0.0), axis=2)
        pivot = tl.sum(tl.where(i == k, row, 0.0), axis=1)[:, None]
        row = tl.div_rn(tl.where(i == k, 1.0, row), pivot)
        column = tl.where(i == k, -1.0, column)
        rest = tl.where((i[:, :, None] == k) | (i[:, None, :] == k), 0.0, a)
        a = rest - column[:, :, None] * row[:, None, :]
    q = 2 * a - eye
    return q + _matmul(q, eye - _matmul(q, q, 'tn'), 'nn') / 2  # what rounding took from q^T q = I


@jit
def _cayley_backward(q, dq, P: tl.constexpr):
    # the gradient of v, where it stands above the diagonal; with p = I + q = 2 (I + a)^-1 that of a is -p^T dq p^T / 2
    i = tl.arange(0, P)[None, :]
    p = q + tl.where(i[:, :, None] == i[:, None, :], 1.0, 0.0)
    da = _matmul(p, _matmul(dq, p, 'nt'), 'tn')
    return (tl.permute(da, (0, 2, 1)) - da) / 2


@jit
def _helmert(S: tl.constexpr, P: tl.constexpr):
    # hyperconn.helmert(S) and, as column S - 1, the constant one: an orthogonal matrix, in a tile (1, P, P)
    k = tl.arange(0, P)[None, None, :]
    i = tl.arange(0, P)[None, :, None]
    size = _rsqrt(tl.where(k < S - 1, (k + 1) * (k + 2), S).to(tl.float32))
    entry = tl.where((i <= k) | (k == S - 1), size, tl.where(i == k + 1, -(k + 1) * size, 0.0))
    return tl.where((i < S) & (k < S), entry, 0.0)


@jit
def _lse(x, AXIS: tl.constexpr):
    top = tl.max(x, axis=AXIS)
    return top + tl.log(tl.sum(tl.exp(x - tl.expand_dims(top, AXIS)), axis=AXIS))


@jit
def _logits(source, k, valid, GROUP: tl.constexpr, K: tl.constexpr):
    # a x'W + b (ROWS, len(k)) at the places k, 0 where not valid
    raw_ptr, bias_ptr, scale_ptr, row, live = source
    raw = tl.load(raw_ptr + row[:, None] * K + k[None, :], mask=live[:, None] & valid[None, :], other=0.0)
    return tl.load(scale_ptr + GROUP) * raw + tl.load(bias_ptr + k, mask=valid, other=0.0)[None, :]


@jit
def _store_sum(ptr, x):
    tl.store(ptr, tl.sum(tl.sum(x, axis=1), axis=0))


@jit
def _logits_backward(sink, d, k, valid, GROUP: tl.constexpr, K: tl.constexpr):
    # from the gradient of _logits: that of raw by token, of bias and scale by program, the scale's at K + GROUP
    raw_ptr, scale_ptr, draw_ptr, sums_ptr, row, live = sink
    mask = live[:, None] & valid[None, :]
    raw = tl.load(raw_ptr + row[:, None] * K + k[None, :], mask=mask, other=0.0)
    tl.store(draw_ptr + row[:, None] * K + k[None, :], tl.load(scale_ptr + GROUP) * d, mask=mask)
    tl.store(sums_ptr + k, tl.sum(d, axis=0), mask=valid)
    _store_sum(sums_ptr + K + GROUP, d * raw)


# H_res of a kind, (ROWS, P P), from source = (raw_ptr, bias_ptr, scale_ptr, row, live); and from its gradient d those
# of the logits, bias and scale, into sink = (raw_ptr, scale_ptr, draw_ptr, sums_ptr, row, live)


@jit
def _s2hc(source, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    # J is the part of Helmert's constant column, on which U, V and s act as the identity
    M: tl.constexpr = S - 1
    HALF: tl.constexpr = M * (M - 1) // 2
    k = tl.arange(0, P)
    pair, valid, sign = _pairs(P, M)
    u = tl.load(source[2] + 5) * sign[None, :] * _tanh(_logits(source, 2 * S + pair, valid, 2, K))
    v = tl.load(source[2] + 6) * sign[None, :] * _tanh(_logits(source, 2 * S + HALF + pair, valid, 3, K))
    s = _tanh(_logits(source, 2 * S + 2 * HALF + k, k < M, 4, K))
    U = _cayley(tl.reshape(u, (ROWS, P, P)), M, P)
    V = _cayley(tl.reshape(v, (ROWS, P, P)), M, P)
    W = _helmert(S, P)
    core = _matmul(U * tl.where(k < M, s, 1.0)[:, None, :], V, 'nt')
    return tl.reshape(_matmul(_matmul(W, core, 'nn'), W, 'nt'), (ROWS, P * P))


@jit
def _s2hc_backward(source, sink, d, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    M: tl.constexpr = S - 1
    HALF: tl.constexpr = M * (M - 1) // 2
    k = tl.arange(0, P)
    pair, valid, sign = _pairs(P, M)
    u = sign[None, :] * _tanh(_logits(source, 2 * S + pair, valid, 2, K))
    v = sign[None, :] * _tanh(_logits(source, 2 * S + HALF + pair, valid, 3, K))
    s = _tanh(_logits(source, 2 * S + 2 * HALF + k, k < M, 4, K))
    gate_u = tl.load(source[2] + 5)
    gate_v = tl.load(source[2] + 6)
    U = _cayley(tl.reshape(gate_u * u, (ROWS, P, P)), M, P)
    V = _cayley(tl.reshape(gate_v * v, (ROWS, P, P)), M, P)
    W = _helmert(S, P)
    d = _matmul(_matmul(W, tl.reshape(d, (ROWS, P, P)), 'tn'), W, 'nn')
    dU = _matmul(d, V, 'nn')  # before diag(s)
    _logits_backward(sink, tl.sum(U * dU, axis=1) * (1 - s * s), 2 * S + 2 * HALF + k, k < M, 4, K)
    s = tl.where(k < M, s, 1.0)[:, None, :]
    upper = valid & (sign > 0)
    du = tl.where(upper, tl.reshape(_cayley_backward(U, dU * s, P), (ROWS, P * P)), 0.0)
    dv = tl.where(upper, tl.reshape(_cayley_backward(V, _matmul(d, U, 'tn') * s, P), (ROWS, P * P)), 0.0)
    _logits_backward(sink, gate_u * du * (1 - u * u), 2 * S + pair, upper, 2, K)
    _logits_backward(sink, gate_v * dv * (1 - v * v), 2 * S + HALF + pair, upper, 3, K)
    _store_sum(sink[3] + K + 5, du * u)
    _store_sum(sink[3] + K + 6, dv * v)


@jit
def _orthogonal(source, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    pair, valid, sign = _pairs(P, S)
    v = tl.load(source[2] + 3) * sign[None, :] * _tanh(_logits(source, 2 * S + pair, valid, 2, K))
    return tl.reshape(_cayley(tl.reshape(v, (ROWS, P, P)), S, P), (ROWS, P * P))


@jit
def _orthogonal_backward(source, sink, d, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    pair, valid, sign = _pairs(P, S)
    v = sign[None, :] * _tanh(_logits(source, 2 * S + pair, valid, 2, K))
    gate = tl.load(source[2] + 3)
    Q = _cayley(tl.reshape(gate * v, (ROWS, P, P)), S, P)
    upper = valid & (sign > 0)
    dv = tl.where(upper, tl.reshape(_cayley_backward(Q, tl.reshape(d, (ROWS, P, P)), P), (ROWS, P * P)), 0.0)
    _logits_backward(sink, gate * dv * (1 - v * v), 2 * S + pair, upper, 2, K)
    _store_sum(sink[3] + K + 3, dv * v)


@jit
def _entries(P: tl.constexpr, S: tl.constexpr):
    # row and column of every entry of a matrix, and whether it is one of S x S
    e = tl.arange(0, P * P)
    return e // P, e % P, (e // P < S) & (e % P < S)


@jit
def _sinkhorn_logits(source, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    # to S x S the tile adds ones on the diagonal, which no scaling changes
    i, j, inside = _entries(P, S)
    logits = _logits(source, 2 * S + i * S + j, inside, 2, K)
    return tl.reshape(tl.where(inside, logits, tl.where(i == j, 0.0, -1e30)), (ROWS, P, P))


@jit
def _mhc(source, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    # exp(logits - u_i - v_j); the last rows by a division, so that they sum to 1 to the last bit
    logits = _sinkhorn_logits(source, S, P, K, ROWS)
    u = tl.zeros([ROWS, P], tl.float32)
    v = u
    for _ in range(SINKHORN):
        v = _lse(logits - u[:, :, None], 1)
        u = _lse(logits - v[:, None, :], 2)
    res = tl.exp(logits - v[:, None, :] - u[:, :, None])
    return tl.reshape(res / tl.sum(res, axis=2)[:, :, None], (ROWS, P * P))


@jit
def _mhc_backward(source, sink, d, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    # keeps the u of every step in registers, (ROWS, STEPS, P); the v are computed again
    STEPS: tl.constexpr = 32  # the power of two from SINKHORN on
    logits = _sinkhorn_logits(source, S, P, K, ROWS)
    step_of = tl.arange(0, STEPS)[None, :, None]
    u = tl.zeros([ROWS, P], tl.float32)
    v = u
    kept = tl.zeros([ROWS, STEPS, P], tl.float32)
    for step in range(SINKHORN):
        kept = tl.where(step_of == step, u[:, None, :], kept)
        v = _lse(logits - u[:, :, None], 1)
        u = _lse(logits - v[:, None, :], 2)
    dlogits = tl.reshape(d, (ROWS, P, P)) * tl.exp(logits - v[:, None, :] - u[:, :, None])
    du = -tl.sum(dlogits, axis=2)
    dv = -tl.sum(dlogits, axis=1)
    for back in range(SINKHORN):
        before = tl.sum(tl.where(step_of == SINKHORN - 1 - back, kept, 0.0), axis=1)
        v = _lse(logits - before[:, :, None], 1)
        part = du[:, :, None] * tl.exp(logits - v[:, None, :] - u[:, :, None])  # of u = lse(logits - v)
        dv -= tl.sum(part, axis=1)
        dlogits += part
        part = dv[:, None, :] * tl.exp(logits - v[:, None, :] - before[:, :, None])  # of v = lse(logits - before)
        du = -tl.sum(part, axis=2)
        dv = tl.zeros([ROWS, P], tl.float32)
        dlogits += part
        u = before
    i, j, inside = _entries(P, S)
    _logits_backward(sink, tl.reshape(dlogits, (ROWS, P * P)), 2 * S + i * S + j, inside, 2, K)


@jit
def _mixture(source, table_ptr, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    # softmax of the S! logits (ROWS, PERMUTATIONS), and the permutations (1, PERMUTATIONS, P P)
    PERMUTATIONS: tl.constexpr = 2 if S == 2 else 8 if S == 3 else 32
    k = tl.arange(0, PERMUTATIONS)
    valid = k < K - 2 * S
    logits = tl.where(valid, _logits(source, 2 * S + k, valid, 2, K), -float('inf'))
    p = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    i, j, inside = _entries(P, S)
    at = table_ptr + (k * (S * S))[:, None] + (i * S + j)[None, :]
    table = tl.load(at, mask=valid[:, None] & inside[None, :], other=0).to(tl.float32)
    return p / tl.sum(p, axis=1)[:, None], table[None, :, :], k, valid


@jit
def _mhc_lite(source, table_ptr, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    p, table, _, _ = _mixture(source, table_ptr, S, P, K)
    return tl.sum(p[:, :, None] * table, axis=1)


@jit
def _mhc_lite_backward(source, sink, table_ptr, d, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    p, table, k, valid = _mixture(source, table_ptr, S, P, K)
    dp = tl.sum(d[:, None, :] * table, axis=2)
    _logits_backward(sink, p * (dp - tl.sum(p * dp, axis=1)[:, None]), 2 * S + k, valid, 2, K)


@jit
def _factor(logits, f: tl.constexpr, P: tl.constexpr):
    # of factor f, from logits (ROWS, P): p, the softmax of its two; where it stands: at entries whose bit f, from the
    # highest on, is the same in row and column, with 1 - p elsewhere; and how p depends on the logits (1, P)
    k = tl.arange(0, P)
    e = tl.arange(0, P * P)
    slope = tl.where(k // 2 == f, 1.0 - 2.0 * (k % 2), 0.0)[None, :]
    same = ((e // P ^ e % P) // (P // 2**(f + 1))) % 2 == 0
    return tl.sigmoid(tl.sum(logits * slope, axis=1))[:, None], same[None, :], slope


@jit
def _kromhc(source, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    k = tl.arange(0, P)
    logits = _logits(source, 2 * S + k, k < K - 2 * S, 2, K)
    p, same, _ = _factor(logits, 0, P)
    res = tl.where(same, p, 1 - p)
    for f in tl.static_range(1, K // 2 - S):
        p, same, _ = _factor(logits, f, P)
        res *= tl.where(same, p, 1 - p)
    return res


@jit
def _kromhc_backward(source, sink, d, S: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    k = tl.arange(0, P)
    logits = _logits(source, 2 * S + k, k < K - 2 * S, 2, K)
    dlogits = tl.zeros_like(logits)
    for f in tl.static_range(K // 2 - S):
        p, same, slope = _factor(logits, f, P)
        dp = tl.where(same, d, -d)
        for other in tl.static_range(K // 2 - S):
            if other != f:
                q, agree, _ = _factor(logits, other, P)
                dp *= tl.where(agree, q, 1 - q)
        dlogits += tl.sum(dp, axis=1)[:, None] * p * (1 - p) * slope
    _logits_backward(sink, dlogits, 2 * S + k, k < K - 2 * S, 2, K)


@jit
def _hc_places(S: tl.constexpr, K: tl.constexpr):
    # of every logit: its stream, which of the S + 2 of a stream it is, whether it is one, and where its bias stands
    PLACES: tl.constexpr = 8 if S == 2 else 16 if S == 3 else 32 if S == 4 else 128
    k = tl.arange(0, PLACES)
    stream = k // (S + 2)
    which = k % (S + 2)
    return k, stream, which, k < K, tl.where(which < S, stream * S + which, which * S + stream)


@jit
def _hc(source, pre_ptr, post_ptr, res_ptr, S: tl.constexpr, K: tl.constexpr):
    raw_ptr, bias_ptr, scale_ptr, row, live = source
    k, stream, which, valid, at_bias = _hc_places(S, K)
    mask = live[:, None] & valid[None, :]
    raw = tl.load(raw_ptr + row[:, None] * K + k[None, :], mask=mask, other=0.0)
    scale = tl.load(scale_ptr + (which > S).to(tl.int32))[None, :]
    table = tl.load(bias_ptr + at_bias, mask=valid, other=0.0)[None, :] + scale * _tanh(raw)
    row = row[:, None]
    tl.store(res_ptr + row * (S * S) + (which * S + stream)[None, :], table, mask=mask & (which < S)[None, :])
    tl.store(pre_ptr + row * S + stream[None, :], table, mask=mask & (which == S)[None, :])
    tl.store(post_ptr + row * S + stream[None, :], table, mask=mask & (which > S)[None, :])


@jit
def _hc_backward(sink, dpre_ptr, dpost_ptr, dres_ptr, dpre_stride, dpost_stride, dres_stride, S: tl.constexpr,
                 K: tl.constexpr):
    raw_ptr, scale_ptr, draw_ptr, sums_ptr, row, live = sink
    k, stream, which, valid, at_bias = _hc_places(S, K)
    mask = live[:, None] & valid[None, :]
    at = row[:, None] * K + k[None, :]
    t = _tanh(tl.load(raw_ptr + at, mask=mask, other=0.0))
    row = row[:, None]
    at_res = row * dres_stride + (which * S + stream)[None, :]
    d = tl.load(dres_ptr + at_res, mask=mask & (which < S)[None, :], other=0.0)
    d += tl.load(dpre_ptr + row * dpre_stride + stream[None, :], mask=mask & (which == S)[None, :], other=0.0)
    d += tl.load(dpost_ptr + row * dpost_stride + stream[None, :], mask=mask & (which > S)[None, :], other=0.0)
    scale = tl.load(scale_ptr + (which > S).to(tl.int32))[None, :]
    tl.store(draw_ptr + at, d * scale * (1 - t * t), mask=mask)
    tl.store(sums_ptr + at_bias, tl.sum(d, axis=0), mask=valid)
    _store_sum(sums_ptr + K, tl.where(which > S, 0.0, d * t))
    _store_sum(sums_ptr + K + 1, tl.where(which > S, d * t, 0.0))


@jit
def _matrices(raw_ptr, bias_ptr, scale_ptr, table_ptr, pre_ptr, post_ptr, res_ptr, n, KIND: tl.constexpr,
              K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """
    raw (n, K), bias (K,), scale (groups and gates,) -> pre, post (n, S), res (n, S, S); P >= S, a power of two.
    table: the permutations of mhc_lite (S!, S, S).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n
    source = (raw_ptr, bias_ptr, scale_ptr, row, live)
    if KIND == 'hc':
        _hc(source, pre_ptr, post_ptr, res_ptr, S, K)
    else:
        k = tl.arange(0, P)
        at = row[:, None] * S + k[None, :]
        mask = live[:, None] & (k < S)[None, :]
        tl.store(pre_ptr + at, tl.sigmoid(_logits(source, k, k < S, 0, K)), mask=mask)
        tl.store(post_ptr + at, 2 * tl.sigmoid(_logits(source, S + k, k < S, 1, K)), mask=mask)
    if KIND != 'hc' and KIND != 'hc_identity':
        if KIND == 's2hc':
            res = _s2hc(source, S, P, K, ROWS)
        elif KIND == 'mhc':
            res = _mhc(source, S, P, K, ROWS)
        elif KIND == 'mhc_lite':
            res = _mhc_lite(source, table_ptr, S, P, K)
        elif KIND == 'kromhc':
            res = _kromhc(source, S, P, K)
        else:
            res = _orthogonal(source, S, P, K, ROWS)
        i, j, inside = _entries(P, S)
        tl.store(res_ptr + row[:, None] * (S * S) + (i * S + j)[None, :], res, mask=live[:, None] & inside[None, :])


@jit
def _matrices_backward(dpre_ptr, dpost_ptr, dres_ptr, raw_ptr, bias_ptr, scale_ptr, table_ptr, draw_ptr, sums_ptr, n,
                       dpre_stride, dpost_stride, dres_stride, KIND: tl.constexpr, SUMS: tl.constexpr,
                       K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """
    Gradients of pre, post, res with a stride between rows -> draw (n, K), and sums (programs, SUMS): of bias, then of
    scale. The matrices are made again.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    live = row < n
    sums_ptr += program * SUMS
    source = (raw_ptr, bias_ptr, scale_ptr, row, live)
    sink = (raw_ptr, scale_ptr, draw_ptr, sums_ptr, row, live)
    if KIND == 'hc':
        _hc_backward(sink, dpre_ptr, dpost_ptr, dres_ptr, dpre_stride, dpost_stride, dres_stride, S, K)
    else:
        k = tl.arange(0, P)
        mask = live[:, None] & (k < S)[None, :]
        dpre = tl.load(dpre_ptr + row[:, None] * dpre_stride + k[None, :], mask=mask, other=0.0)
        y = tl.sigmoid(_logits(source, k, k < S, 0, K))
        _logits_backward(sink, dpre * y * (1 - y), k, k < S, 0, K)
        dpost = tl.load(dpost_ptr + row[:, None] * dpost_stride + k[None, :], mask=mask, other=0.0)
        y = tl.sigmoid(_logits(source, S + k, k < S, 1, K))
        _logits_backward(sink, 2 * dpost * y * (1 - y), S + k, k < S, 1, K)
    if KIND != 'hc' and KIND != 'hc_identity':
        i, j, inside = _entries(P, S)
        at = row[:, None] * dres_stride + (i * S + j)[None, :]
        d = tl.load(dres_ptr + at, mask=live[:, None] & inside[None, :], other=0.0)
        if KIND == 's2hc':
            _s2hc_backward(source, sink, d, S, P, K, ROWS)
        elif KIND == 'mhc':
            _mhc_backward(source, sink, d, S, P, K, ROWS)
        elif KIND == 'mhc_lite':
            _mhc_lite_backward(source, sink, table_ptr, d, S, P, K)
        elif KIND == 'kromhc':
            _kromhc_backward(source, sink, d, S, P, K)
        else:
            _orthogonal_backward(source, sink, d, S, P, K, ROWS)


# -----------------------------------------------------------------------------
# launching

PROGRAMS = 528  # of the backward with NORM: 4 for each of the 132 multiprocessors of an H100
ELEMENTS = 2**17 if INTERPRET else 512  # of a program at least; to the interpreter a program costs the same at any size


def tile(width):
    """BLOCK and ROWS of a program, and its number of warps: 8 elements a thread, as far as 16 warps reach."""
    block = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // block)
    return dict(BLOCK=block, ROWS=rows), min(max(block * rows // 256, 1), 16)


def _rows(x):
    """(..., D) -> (n, D), a copy only where elements of a row are not neighbours or rows not evenly spaced."""
    x = x.reshape(-1, x.shape[-1])  # (n, D)
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_forward(h, f, alpha, weight, bias, p, max_angle, norm):
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    y = torch.empty_like(f, memory_format=torch.contiguous_format) if norm else None
    h, f = _rows(h), _rows(f)
    n, D = h.shape
    sizes, warps = tile(D)
    if n:
        with torch.cuda.device_of(h):  # Triton launches on the current device
            _forward[triton.cdiv(n, sizes['ROWS']),](
                h, f, alpha, weight, bias, out, y, n, h.stride(0), f.stride(0), D=D, NORM=norm, BIAS=bias is not None,
                **sizes, **_constants(p, max_angle), num_warps=warps)
    return out, y


def _launch_backward(g, gy, h, f, alpha, weight, bias, p, max_angle, norm):
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    df = torch.empty_like(f, memory_format=torch.contiguous_format)
    h, f, g, gy = _rows(h), _rows(f), _rows(g), None if gy is None else _rows(gy)
    n, D = h.shape
    sizes, warps = tile(D)
    turns = triton.cdiv(n, sizes['ROWS'] * PROGRAMS) if norm else 1
    programs = triton.cdiv(n, sizes['ROWS'] * max(turns, 1))
    dalpha = torch.empty(programs, device=h.device)
    dweight = torch.empty(programs, D, device=h.device) if norm else None
    dbias = torch.empty(programs, D, device=h.device) if bias is not None else None
    if n:
        with torch.cuda.device_of(h):
            _backward[programs,](
                g, gy, h, f, alpha, weight, dh, df, dalpha, dweight, dbias, n, turns, g.stride(0),
                0 if gy is None else gy.stride(0), h.stride(0), f.stride(0), D=D, NORM=norm, BIAS=bias is not None,
                **sizes, **_constants(p, max_angle), num_warps=warps)
    return (dh, df, dalpha.sum().to(alpha.dtype).reshape(alpha.shape),
            None if dweight is None else dweight.sum(0).to(weight.dtype),
            None if dbias is None else dbias.sum(0).to(bias.dtype))


def stream_tile(width, streams):
    """BLOCK and ROWS of a program for streams, and its warps: one, with 4 elements a thread, past 4 streams 2."""
    elements = ELEMENTS // (4 if streams <= 4 else 8)
    block = max(4, min(triton.next_power_of_2(width), elements))
    return dict(BLOCK=block, ROWS=max(1, elements // block)), 1


def project_tile(columns):
    """BLOCK, ROWS and COLUMNS of a program that computes logits, `columns` of them, and its number of warps."""
    padded = max(16, triton.next_power_of_2(columns))
    return dict(BLOCK=32, ROWS=ELEMENTS // 16, COLUMNS=padded), max(4, padded // 16)


def matrices_tile(streams):
    """P, which is `streams` or the next power of two, and ROWS of a program that makes matrices, and its warps: one."""
    p = triton.next_power_of_2(streams)
    return dict(P=p, ROWS=max(1, ELEMENTS // 2 // max(p, 4) ** 3)), 1


def _launch(kernel, tile, tensors, **constants):
    """Runs a kernel of streams with tensors by name, each (n, ...) or None; a stride is that of the tensor's rows."""
    first = next(iter(tensors.values()))
    n, (sizes, warps) = first.shape[0], tile
    if INTERPRET:  # which pays for rows that are not there
        sizes['ROWS'] = min(sizes['ROWS'], max(16, triton.next_power_of_2(n)))
    strides = {name: 0 if (x := tensors[name.replace('_stride', '_ptr')]) is None else x.stride(0)
               for name in kernel.arg_names if name.endswith('_stride')}
    if n:
        with torch.cuda.device_of(first):
            kernel[triton.cdiv(n, sizes['ROWS']),](**tensors, n=n, **strides, **constants, **sizes, num_warps=warps)


def _new(shape, like):
    return torch.empty(shape, dtype=like.dtype, device=like.device)


# -----------------------------------------------------------------------------
# the operators: what torch.compile and autograd see


@torch.library.custom_op('sphere::retract', mutates_args=())
def retract_op(h: torch.Tensor, f: torch.Tensor, alpha: torch.Tensor, p: float, max_angle: float | None
               ) -> torch.Tensor:
    return _launch_forward(h, f, alpha, None, None, p, max_angle, None)[0]


@torch.library.custom_op('sphere::retract_backward', mutates_args=())
def retract_backward_op(g: torch.Tensor, h: torch.Tensor, f: torch.Tensor, alpha: torch.Tensor, p: float,
                        max_angle: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _launch_backward(g, None, h, f, alpha, None, None, p, max_angle, None)[:3]


@torch.library.custom_op('sphere::retract_norm', mutates_args=())
def retract_norm_op(h: torch.Tensor, f: torch.Tensor, alpha: torch.Tensor, weight: torch.Tensor,
                    bias: torch.Tensor | None, p: float, max_angle: float | None, norm: str
                    ) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch_forward(h, f, alpha, weight, bias, p, max_angle, norm)


@torch.library.custom_op('sphere::retract_norm_backward', mutates_args=())
def retract_norm_backward_op(g: torch.Tensor, gy: torch.Tensor, h: torch.Tensor, f: torch.Tensor, alpha: torch.Tensor,
                             weight: torch.Tensor, bias: torch.Tensor | None, p: float, max_angle: float | None,
                             norm: str) -> list[torch.Tensor]:  # dh, df, dalpha, dweight and, with a bias, dbias
    return [d for d in _launch_backward(g, gy, h, f, alpha, weight, bias, p, max_angle, norm) if d is not None]


def _like(*tensors):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors if t is not None)


retract_op.register_fake(lambda h, f, alpha, p, max_angle: _like(h)[0])
retract_backward_op.register_fake(lambda g, h, f, alpha, p, max_angle: _like(h, f, alpha))
retract_norm_op.register_fake(lambda h, f, alpha, weight, bias, p, max_angle, norm: _like(h, f))
retract_norm_backward_op.register_fake(
    lambda g, gy, h, f, alpha, weight, bias, p, max_angle, norm: list(_like(h, f, alpha, weight, bias)))


def _save(ctx, inputs, output):
    h, f, alpha, ctx.p, ctx.max_angle = inputs
    ctx.save_for_backward(h, f, alpha)


def _save_norm(ctx, inputs, output):
    h, f, alpha, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(h, f, alpha, weight, bias)


def _norm_gradients(ctx, g, gy):
    grads = retract_norm_backward_op(g, gy, *ctx.saved_tensors, *ctx.options)
    return *grads, *[None] * (8 - len(grads))


retract_op.register_autograd(
    lambda ctx, g: (*retract_backward_op(g, *ctx.saved_tensors, ctx.p, ctx.max_angle), None, None),
    setup_context=_save)
retract_norm_op.register_autograd(_norm_gradients, setup_context=_save_norm)


def _step_size(alpha, h):
    return alpha.to(h.device, torch.float32) if torch.is_tensor(alpha) else torch.full((), alpha, device=h.device)


def retract(h, f, alpha, p, max_angle):
    """spheretnorm.retract where `takes(h, f, alpha)`: |h|, |f| < 1e18, error 1e-6 of the longest of h, f, g or so."""
    return retract_op(h, f, _step_size(alpha, h), p, max_angle)


def retract_norm(h, f, alpha, weight, bias, p, max_angle, norm):
    """spheretnorm.retract_norm where `takes(h, f, alpha)`: h' and N(h'), the second in the type of f."""
    return retract_norm_op(h, f, _step_size(alpha, h), weight, bias, p, max_angle, norm)


# -----------------------------------------------------------------------------
# the operators of the streams. X, g (..., S, D), f (..., D), H_pre, H_post (..., S), H_res (..., S, S) or None for I


def _flat(x, axes):
    """x with its last axes as one, and the others as rows: (n, row)."""
    return _rows(x.flatten(-axes))


@torch.library.custom_op('hyper::read', mutates_args=())
def read_op(H_pre: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
    S, D = X.shape[-2:]
    out = _new((*X.shape[:-2], D), X)
    _launch(_read, stream_tile(D, S), dict(pre_ptr=_flat(H_pre, 1), X_ptr=_flat(X, 2), out_ptr=out), D=D, S=S)
    return out


@torch.library.custom_op('hyper::read_backward', mutates_args=())
def read_backward_op(g: torch.Tensor, H_pre: torch.Tensor, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    S, D = X.shape[-2:]
    dpre, dX = _like(H_pre, X)
    _launch(_read_backward, stream_tile(D, S), dict(
        g_ptr=_flat(g, 1), pre_ptr=_flat(H_pre, 1), X_ptr=_flat(X, 2), dpre_ptr=dpre, dX_ptr=dX), D=D, S=S)
    return dpre, dX


@torch.library.custom_op('hyper::write', mutates_args=())
def write_op(X: torch.Tensor, f: torch.Tensor, H_post: torch.Tensor, H_res: torch.Tensor | None) -> torch.Tensor:
    S, D = X.shape[-2:]
    out, = _like(X)
    _launch(_write, stream_tile(D, S), dict(
        X_ptr=_flat(X, 2), f_ptr=_flat(f, 1), post_ptr=_flat(H_post, 1),
        res_ptr=None if H_res is None else _flat(H_res, 2), out_ptr=out), D=D, S=S, MIX=H_res is not None)
    return out


@torch.library.custom_op('hyper::write_backward', mutates_args=())
def write_backward_op(g: torch.Tensor, X: torch.Tensor | None, f: torch.Tensor, H_post: torch.Tensor,
                      H_res: torch.Tensor | None) -> list[torch.Tensor]:  # df, dH_post and, with an H_res, dX, dH_res
    S, D = g.shape[-2:]
    grads = _like(f, H_post, X, H_res)
    df, dpost, dX, dres = (*grads, None, None)[:4]
    _launch(_write_backward, stream_tile(D, S), dict(
        g_ptr=_flat(g, 2), X_ptr=None if X is None else _flat(X, 2), f_ptr=_flat(f, 1), post_ptr=_flat(H_post, 1),
        res_ptr=None if H_res is None else _flat(H_res, 2), dX_ptr=dX, df_ptr=df, dpost_ptr=dpost, dres_ptr=dres),
        D=D, S=S, MIX=H_res is not None)
    return list(grads)


read_op.register_fake(lambda H_pre, X: _new((*X.shape[:-2], X.shape[-1]), X))
read_backward_op.register_fake(lambda g, H_pre, X: _like(H_pre, X))
write_op.register_fake(lambda X, f, H_post, H_res: _like(X)[0])
write_backward_op.register_fake(lambda g, X, f, H_post, H_res: list(_like(f, H_post, X, H_res)))


def _save_write(ctx, inputs, output):
    X, f, H_post, H_res = inputs
    ctx.save_for_backward(None if H_res is None else X, f, H_post, H_res)


def _write_gradients(ctx, g):
    df, dpost, *rest = write_backward_op(g, *ctx.saved_tensors)
    dX, dres = rest or (g, None)
    return dX, df, dpost, dres


read_op.register_autograd(lambda ctx, g: read_backward_op(g, *ctx.saved_tensors),
                          setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
write_op.register_autograd(_write_gradients, setup_context=_save_write)


def read(H_pre, X):
    """hyperconn.read where `takes_streams(X)`: the matrix in float32 whatever X is."""
    return read_op(H_pre.float(), X)


def write(X, f, H_post, H_res):
    """hyperconn.write where `takes_streams(X, f)`: the matrices in float32 whatever X is."""
    return write_op(X, f, H_post.float(), None if H_res is None else H_res.float())


@torch.library.custom_op('hyper::project', mutates_args=())
def project_op(X: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    raw, inv = _new((*X.shape[:-1], len(w)), w), _new(X.shape[:-1], w)
    _launch(_project, project_tile(len(w)), dict(X_ptr=_flat(X, 1), w_ptr=w.contiguous(), raw_ptr=raw, inv_ptr=inv),
            EPS=eps, K=len(w), D=X.shape[-1])
    return raw, inv


@torch.library.custom_op('hyper::project_backward', mutates_args=())
def project_backward_op(g: torch.Tensor, raw: torch.Tensor, inv: torch.Tensor, X: torch.Tensor, w: torch.Tensor
                        ) -> tuple[torch.Tensor, torch.Tensor]:
    dX, = _like(X)
    X, g = _flat(X, 1), _flat(g, 1)
    _launch(_project_backward, project_tile(len(w)), dict(
        X_ptr=X, g_ptr=g, raw_ptr=raw, inv_ptr=inv, w_ptr=w.contiguous(), dX_ptr=dX), K=len(w), D=X.shape[-1])
    with torch.autocast(X.device.type, enabled=False):
        return dX, (g * inv.reshape(-1, 1)).t() @ X.to(w.dtype)


@torch.library.custom_op('hyper::matrices', mutates_args=())
def matrices_op(raw: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor, table: torch.Tensor | None, kind: str,
                S: int) -> list[torch.Tensor]:  # H_pre, H_post and, but for the identity, H_res
    outputs = _matrices_fake(raw, bias, scale, table, kind, S)
    pre, post, res = (*outputs, None)[:3]
    _launch(_matrices, matrices_tile(S), dict(
        raw_ptr=_flat(raw, 1).contiguous(), bias_ptr=bias, scale_ptr=scale, table_ptr=table, pre_ptr=pre,
        post_ptr=post, res_ptr=res), KIND=kind, K=raw.shape[-1], S=S)
    return outputs


@torch.library.custom_op('hyper::matrices_backward', mutates_args=())
def matrices_backward_op(dpre: torch.Tensor, dpost: torch.Tensor, dres: torch.Tensor | None, raw: torch.Tensor,
                         bias: torch.Tensor, scale: torch.Tensor, table: torch.Tensor | None, kind: str, S: int
                         ) -> tuple[torch.Tensor, torch.Tensor]:  # draw, and dbias and dscale in one
    draw, = _like(raw)
    raw, tile = _flat(raw, 1).contiguous(), matrices_tile(S)
    sums = _new((triton.cdiv(len(raw), tile[0]['ROWS']), len(bias) + len(scale)), bias)
    _launch(_matrices_backward, tile, dict(
        raw_ptr=raw, bias_ptr=bias, scale_ptr=scale, table_ptr=table, dpre_ptr=_flat(dpre, 1),
        dpost_ptr=_flat(dpost, 1), dres_ptr=None if dres is None else _flat(dres, 2), draw_ptr=draw, sums_ptr=sums),
        KIND=kind, SUMS=sums.shape[1], K=raw.shape[-1], S=S)
    return draw, sums.sum(0)


def _matrices_fake(raw, bias, scale, table, kind, S):
    shapes = ((S,), (S,), (S, S))[:2 if kind == 'hc_identity' else 3]
    return [_new((*raw.shape[:-1], *shape), raw) for shape in shapes]


project_op.register_fake(lambda X, w, eps: (_new((*X.shape[:-1], len(w)), w), _new(X.shape[:-1], w)))
project_backward_op.register_fake(lambda g, raw, inv, X, w: _like(X, w))
matrices_op.register_fake(_matrices_fake)
matrices_backward_op.register_fake(
    lambda dpre, dpost, dres, raw, bias, scale, table, kind, S: (*_like(raw), _new((len(bias) + len(scale),), bias)))


def _save_project(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:2])


def _save_matrices(ctx, inputs, output):
    *tensors, ctx.kind, ctx.S = inputs
    ctx.save_for_backward(*tensors)


def _matrices_gradients(ctx, grads):
    dpre, dpost, dres = (*grads, None)[:3]
    raw, bias, scale, table = ctx.saved_tensors
    draw, sums = matrices_backward_op(dpre, dpost, dres, raw, bias, scale, table, ctx.kind, ctx.S)
    return draw, *sums.split((len(bias), len(scale))), None, None, None


project_op.register_autograd(lambda ctx, g, _: (*project_backward_op(g, *ctx.saved_tensors), None),
                             setup_context=_save_project)
matrices_op.register_autograd(_matrices_gradients, setup_context=_save_matrices)


def coefficients(kind, X, weight, bias, scale, eps, table=None):
    """
    H_pre, H_post, H_res of a hyperconn mapping where `takes_mapping(kind, X, weight)`, in float32, H_res None for the
    identity. weight (logits, n C), for hc (n + 2, C), with the gain in it; table: the permutations of mhc_lite. Beside
    X and the parameters the backward needs x'W and 1/rms, which are kept, and makes the matrices again.
    """
    raw, _ = project_op(X if kind == 'hc' else X.flatten(-2), weight.float(), eps)
    raw = raw.flatten(-2) if kind == 'hc' else raw  # hc: from every stream by itself
    pre, post, *res = matrices_op(raw, bias.float(), scale.float(), table, kind, X.shape[-2])
    return pre, post, res[0] if res else None


# -----------------------------------------------------------------------------
# what a bench needs to know

# name -> the kernel, the tile of a program by width, number of streams S and of logits K, and how many tensors as wide
# as a branch it must move, in the type of the stream and in that of the branch; mix is False where H_res is I
KERNELS = {
    'forward': (_forward, lambda width, S, K: tile(width), lambda S, mix: (2, 1)),
    'backward': (_backward, lambda width, S, K: tile(width), lambda S, mix: (3, 2)),
    'read': (_read, lambda width, S, K: stream_tile(width, S), lambda S, mix: (S + 1, 0)),
    'read_backward': (_read_backward, lambda width, S, K: stream_tile(width, S), lambda S, mix: (2 * S + 1, 0)),
    'write': (_write, lambda width, S, K: stream_tile(width, S), lambda S, mix: (2 * S, 1)),
    'write_backward': (_write_backward, lambda width, S, K: stream_tile(width, S),
                       lambda S, mix: (3 * S if mix else S, 2)),
    'project': (_project, lambda width, S, K: project_tile(K), lambda S, mix: (S, 0)),
    'project_backward': (_project_backward, lambda width, S, K: project_tile(K), lambda S, mix: (2 * S, 0)),
    'matrices': (_matrices, lambda width, S, K: matrices_tile(S), lambda S, mix: (0, 0)),
    'matrices_backward': (_matrices_backward, lambda width, S, K: matrices_tile(S), lambda S, mix: (0, 0)),
}


def least_bytes(n, width, name, stream=4, branch=4, norm=None, streams=4, mix=True):
    """
    Bytes that a kernel of KERNELS must move for n rows: stream and branch in bytes an element, every tensor once; with
    norm, N(h') or its gradient on top. Left out is what is not as wide as a row (alpha, d alpha, the matrices), and
    with norm what belongs to no row (the weights, which stay in the cache, and PROGRAMS rows of their gradients).
    """
    in_stream, in_branch = KERNELS[name][2](streams, mix)
    return n * width * (in_stream * stream + (in_branch + bool(norm)) * branch)


def aot(capability, width, name, stream='fp32', branch='bf16', norm=None, p=0.5, max_angle=None, bias=True, streams=4,
        mix=True, kind='s2hc'):
    """
    Compiles a kernel of KERNELS for an NVIDIA chip that need not be there: capability 80 (A100), 90 (H100, H200), 100
    (B200). norm, p, max_angle and bias are of a retraction; streams, mix (an H_res other than I) and kind of streams.
    Returns registers a thread, spills and stack (bytes a thread), shared memory (bytes a program), warps, and the ptx.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert not INTERPRET, 'the interpreter compiles nothing: unset TRITON_INTERPRET'
    kernel, shape, _ = KERNELS[name]
    logits = 2 * streams + MAPPINGS[kind][1](streams)
    if name.startswith('project'):  # hc projects every stream by itself
        width, logits = (width, streams + 2) if kind == 'hc' else (width * streams, logits)
    sizes, warps = shape(width, streams, logits)
    constants = dict(D=width, NORM=norm, BIAS=bool(norm) and bias, S=streams, MIX=mix, K=logits, SUMS=logits + 8,
                     EPS=1e-6, KIND=kind, **sizes, **_constants(p, max_angle))
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = dict.fromkeys(('h_ptr', 'g_ptr', 'out_ptr', 'dh_ptr', 'X_ptr', 'dX_ptr'), '*' + stream)
    types |= dict.fromkeys(('f_ptr', 'df_ptr', 'y_ptr', 'gy_ptr'), '*' + branch)
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        pointer = name.endswith('_ptr')
        signature[name] = 'constexpr' if name in constants else types.get(name, '*fp32') if pointer else 'i32'
        if pointer or name.replace('_stride', '_ptr') in types and width % 16 == 0:
            aligned[i,] = [['tt.divisibility', 16]]  # as torch's allocator and a launch would have it
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget('cuda', capability, 32), options=dict(num_warps=warps))
    ptx = compiled.asm['ptx']
    folder = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin')
    chip = re.search(r'\.target\s+(sm_\w+)', ptx).group(1)
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, 'kernel.ptx')
        with open(path, 'w') as file:
            file.write(ptx)
        ptxas = os.path.join(folder, 'ptxas-blackwell' if capability >= 100 else 'ptxas')
        log = subprocess.run([ptxas, '-v', f'--gpu-name={chip}', path, '-o', os.devnull], capture_output=True,
                             text=True, check=True).stderr
    stack, stores, loads = re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads',
                                     log).groups()
    return dict(registers=int(re.search(r'Used (\d+) registers', log).group(1)), spills=int(stores) + int(loads),
                stack=int(stack), shared=compiled.metadata.shared, warps=warps, ptx=ptx)
