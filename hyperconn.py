"""
Hyper-connections: n residual streams that are read, mixed and written by small matrices.

A token carries X in R^(n x C). Each sub-layer F (attention or MLP) has its own mapping and does

    X' = H_res X + H_post^T F(H_pre X)         H_pre, H_post (1 x n), H_res (n x n); row i of H_res makes stream i

The mapping computes the three matrices from the token itself, or keeps them constant (static=True). The kinds differ
in what H_res may be; KINDS at the end is their table.

    hc             any matrix                              "Hyper-Connections", arXiv 2409.19606
    mhc            doubly stochastic, by Sinkhorn-Knopp    "Manifold-Constrained Hyper-Connections", arXiv 2512.24880
    mhc_lite       mixture of the n! permutations          "mHC-lite", arXiv 2601.05732
    kromhc         Kronecker product of 2 x 2 factors      "KromHC", arXiv 2601.21579
    s2hc           rows and columns sum to 1, spectral     "Spectral-Sphere-Constrained Hyper-Connections",
                   norm 1                                  arXiv 2603.20896, [S2] below
    hc_identity    the identity                            "Manifold-Constrained Hyper-Connections for PEFT",
                                                           arXiv 2607.18130, [PE] below
    hc_orthogonal  orthogonal                              [S2], Table 3

The first half holds the matrices as functions of the last axes, for any leading batch shape and float type.
"""
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels

# -----------------------------------------------------------------------------
# matrices


def _contrasts(n):
    """Helmert's columns before scaling, (n, n-1) integers: i ones, then -i, then zeros (column i = 1 .. n-1)."""
    return (torch.ones(n, n, dtype=torch.long).triu() - torch.diag(torch.arange(1, n), -1))[:, : n - 1]


def helmert(n):
    """(n, n-1) float64: orthonormal columns, each orthogonal to the all-ones vector."""
    return F.normalize(_contrasts(n).double(), dim=0)


def skew(v, m):
    """v (..., m(m-1)/2), the strict upper triangle row by row -> (..., m, m) with skew^T = -skew."""
    zero = v.new_zeros(v.shape[:-1])
    above = dict(zip(itertools.combinations(range(m), 2), v.unbind(-1)))
    below = dict(zip(itertools.combinations(range(m), 2), (-v).unbind(-1)))
    entries = [above.get((i, j), below.get((j, i), zero)) for i in range(m) for j in range(m)]
    return torch.stack(entries, -1).unflatten(-1, (m, m))


def cayley(a):
    """
    a (..., m, m) skew -> (I + a)^-1 (I - a), orthogonal with determinant 1.

    Up to m = 4 in closed form, without a solve per token. The characteristic polynomial of a skew 4 x 4 matrix is
    t^4 + |v|^2 t^2 + q^2, with v its upper triangle and q its Pfaffian; a at = at a = -q I for the dual matrix at.
    Hence ((1 + |v|^2 - q^2) I + 2 a^2 - 2 a - 2 q at) / (1 + |v|^2 + q^2), and q = 0 covers m = 1, 2, 3.
    """
    m = a.shape[-1]
    eye = torch.eye(m, dtype=a.dtype, device=a.device)
    if m > 4:
        return torch.linalg.solve(eye + a, eye - a)
    vv = (a * a).sum((-2, -1), keepdim=True) / 2
    top, det = 2 * (a @ a - a), 1 + vv
    if m < 4:
        return eye + top / det
    (_, a01, a02, a03), (_, _, a12, a13), (_, _, _, a23), _ = (row.unbind(-1) for row in a.unbind(-2))
    q = (a01 * a23 - a02 * a13 + a03 * a12)[..., None, None]
    dual = skew(torch.stack((a23, -a13, a12, a03, -a02, a01), -1), 4)
    return ((det - q * q) * eye + top - 2 * q * dual) / (det + q * q)


def sinkhorn(logits, iters=20):
    """
    exp(logits) (..., n, n), scaled to unit columns and then unit rows, `iters` times, in log space. Rows (last axis)
    sum to 1 exactly, columns as far as the iteration has come. Differentiates through the iterations.
    """
    shape = logits.shape
    # (N, n, n) -> (n, n, N): with the tokens innermost log_softmax runs 9 times faster on a CPU
    logp = logits.reshape(-1, *shape[-2:]).permute(1, 2, 0).contiguous()
    for _ in range(iters):
        logp = F.log_softmax(logp, dim=0)
        logp = F.log_softmax(logp, dim=1)
    return logp.exp().permute(2, 0, 1).reshape(shape)


def _permutations(n):
    """(n!, n, n) integers: P = I[q] for each q in lexicographic order, so row i of P picks q(i); identity first."""
    return torch.eye(n, dtype=torch.long)[torch.tensor(list(itertools.permutations(range(n))))]


def birkhoff(logits, n, permutations=None):
    """
    logits (..., n!) -> (..., n, n), the mixture sum_k softmax(logits)_k P_k: every doubly stochastic matrix is one.
    `permutations` takes _permutations(n) from a caller that keeps it.
    """
    p = _permutations(n).to(logits.device) if permutations is None else permutations
    return (logits.softmax(-1) @ p.flatten(1).to(logits.dtype)).unflatten(-1, (n, n))


def kronecker(logits, n):
    """logits (..., log2 n, 2) -> (..., n, n), the Kronecker product of [[p, 1-p], [1-p, p]], first factor outermost."""
    p = logits.softmax(-1)                                                     # (..., k, 2): p and 1 - p
    factors = torch.stack((p, p.flip(-1)), -2).unbind(-3)                      # k of (..., 2, 2)
    out = factors[0]
    for b in factors[1:]:
        m = out.shape[-1]
        out = out[..., :, None, :, None] * b[..., None, :, None, :]            # (..., m, 2, m, 2)
        out = out.reshape(*out.shape[:-4], 2 * m, 2 * m)
    return out


def spectral_sphere(u, v, s, contrasts=None):
    """
    J + (Uz U) diag(s) (Uz V)^T with J = 11^T/n, Uz = helmert(n), U = cayley(skew(u)), V = cayley(skew(v)).
    u, v (..., (n-1)(n-2)/2), s (..., n-1) -> (..., n, n). Rows and columns sum to 1; the spectral norm is 1 where
    |s| <= 1. `contrasts` takes _contrasts(n) from a caller that keeps it. Source: [S2].
    """
    m = s.shape[-1]
    n = m + 1
    uz = _contrasts(n).to(s.device) if contrasts is None else contrasts
    uz = F.normalize(uz.to(s.dtype), dim=0)
    left, right = (uz @ cayley(skew(torch.stack((u, v)), m))).unbind(0)        # two of (..., n, n-1)
    return 1 / n + (left * s.unsqueeze(-2)) @ right.mT


# -----------------------------------------------------------------------------
# moving the streams. Autocast is off: in bf16 the row sums of H_res X would be off by 4e-3. The two autograd.Functions
# are there for the passes over X that they save; each backward is plain torch on saved inputs and outputs, so that
# differentiating twice is right too.


def _full_precision(x):
    return torch.autocast(x.device.type, enabled=False)


def _at_least_float32(*tensors):
    """The type that a mapping computes in: that of its widest tensor, and never a half one."""
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


class _Project(torch.autograd.Function):
    """x (..., d), w (K, d) -> x w^T / rms(x) (..., K) and 1 / rms(x) (..., 1): the normalised x is never written."""

    @staticmethod
    def forward(ctx, x, w, eps):
        inv = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        out = F.linear(x, w).mul_(inv)
        ctx.save_for_backward(x, w, out, inv)
        return out, inv

    @staticmethod
    def backward(ctx, g, g_inv):
        x, w, out, inv = ctx.saved_tensors
        with _full_precision(x):
            scaled = g * inv                                                       # (..., K)
            # d inv = -inv^3 x.dx / d, and out = inv x w^T
            radial = -((g * out).sum(-1, keepdim=True) * inv.square() + g_inv * inv**3) / x.shape[-1]
            dx = torch.addcmul(scaled @ w, radial, x)
            return dx, scaled.flatten(0, -2).t() @ x.flatten(0, -2), None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, f, H_post, H_res):
        ctx.save_for_backward(X, f, H_post, H_res)
        mixed = X.clone() if H_res is None else H_res @ X
        return mixed.addcmul_(H_post.unsqueeze(-1), f.unsqueeze(-2))

    @staticmethod
    def backward(ctx, g):
        X, f, H_post, H_res = ctx.saved_tensors
        with _full_precision(X):
            df = (H_post.unsqueeze(-2) @ g).squeeze(-2)
            dH_post = (g @ f.unsqueeze(-1)).squeeze(-1)
            return (g, df, dH_post, None) if H_res is None else (H_res.mT @ g, df, dH_post, g @ X.mT)


def read(H_pre, X):
    """H_pre X: (B, T, n), (B, T, n, C) -> (B, T, C)"""
    if kernels.takes_streams(X, H_pre):
        return kernels.read(H_pre, X)
    with _full_precision(X):
        return (H_pre.to(X.dtype).contiguous().unsqueeze(-2) @ X).squeeze(-2)


def write(X, f, H_post, H_res):
    """H_res X + H_post^T f: (B, T, n, C), (B, T, C), (B, T, n), (B, T, n, n) or None for I -> (B, T, n, C)"""
    if kernels.takes_streams(X, f, H_post):
        return kernels.write(X, f, H_post, H_res)
    with _full_precision(X):
        H_post = H_post.to(X.dtype).contiguous()
        H_res = None if H_res is None else H_res.to(X.dtype).contiguous()
        return _Write.apply(X, f.to(X.dtype), H_post, H_res)


# -----------------------------------------------------------------------------
# mappings


class Mapping(nn.Module):
    """
    X (B, T, n, C) -> H_pre (B, T, n), H_post (B, T, n), H_res (B, T, n, n) or None for the identity. [S2], [PE]

        x'     = RMSNorm(vec X) over n*C with a learned gain; vec is stream-major: i*C + c
        H_pre  =   sigmoid(a_pre  x' W_pre  + b_pre)
        H_post = 2 sigmoid(a_post x' W_post + b_post)
        H_res  = matrix(a_res x' W_res + b_res), a kind's own

    W_pre, W_post and W_res are one `weight`, the b one `bias`, the a one `scale`: vectors, so that nanoGPT's rule
    "decay what has two dimensions" decays W alone. static=True keeps only the bias. All of it runs in at least
    float32. At init W = 0, so every token has the same matrices, and each sub-layer prefers stream `sublayer % n`.
    """

    eps = 1e-6
    macs = 0     # multiply-adds a token beyond one a parameter
    n_gates = 0  # entries at the end of `scale` that a kind's `matrix` uses by itself, init 1

    def __init__(self, n, C, sublayer, static=False, res_init=None):
        super().__init__()
        self.n, self.main, self.static, self.res_init = n, sublayer % n, static, res_init
        self.groups = [n, n, *self.res_sizes(n)]  # logits, in the order of `weight`, `bias` and `scale`
        self.bias = nn.Parameter(torch.empty(sum(self.groups)))
        if not static:
            self.gain = nn.Parameter(torch.empty(n * C))
            self.weight = nn.Parameter(torch.empty(sum(self.groups), n * C))
            self.scale = nn.Parameter(torch.empty(len(self.groups) + self.n_gates))

    def res_sizes(self, n):
        """Number of logits of H_res, by groups with a scalar a_res each."""
        raise NotImplementedError

    def res_bias(self, n):
        """
        Initial value of b_res. With res_init = L, and e = exp(L), the kinds of STOCHASTIC start at one and the same
        matrix but for kromhc's off the diagonal: 1 on the diagonal and e off it, over their sum 1 + (n-1) e. L = 0 is
        J = 11^T/n.
        """
        raise NotImplementedError

    def matrix(self, logits, gates):
        """logits (..., K) -> H_res (..., n, n); gates: a tuple of n_gates scalars, all 1 where static."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self):
        self.bias[: 2 * self.n] = -1.0
        self.bias[self.main] = self.bias[self.n + self.main] = 1.0
        self.bias[2 * self.n :] = self.res_bias(self.n)
        if not self.static:
            self.gain.fill_(1.0)
            self.weight.zero_()
            self.scale[: len(self.groups)] = 0.01
            self.scale[len(self.groups) :] = 1.0

    def logits(self, X):
        """a x'W + b, (B, T, K) or (1, 1, K) where static, and the gates."""
        if self.static:
            return self.bias[None, None].to(_at_least_float32(self.bias)), (1.0,) * self.n_gates
        dtype = _at_least_float32(X, self.weight)
        bias, weight, gain, scale = (p.to(dtype) for p in (self.bias, self.weight, self.gain, self.scale))
        raw, _ = _Project.apply(X.flatten(2).to(dtype), weight * gain, self.eps)  # x'W, (B, T, K)
        a = torch.cat([s.expand(k) for s, k in zip(scale, self.groups)])          # (K,)
        return torch.addcmul(bias, raw, a), scale[len(self.groups) :].unbind()

    def forward(self, X):
        if not self.static and kernels.takes_mapping(self.kind, X, self.weight):
            weight = self.weight.float() * self.gain
            return kernels.coefficients(self.kind, X, weight, self.bias, self.scale, self.eps,
                                        getattr(self, 'permutations', None))
        with _full_precision(X):
            logits, gates = self.logits(X)
            pre, post, res = logits.split((self.n, self.n, logits.shape[-1] - 2 * self.n), -1)
            H_res = self.matrix(res, gates)
            if H_res is not None:
                H_res = H_res.expand(*X.shape[:2], -1, -1)
            return pre.sigmoid().expand(*X.shape[:2], -1), 2 * post.sigmoid().expand(*X.shape[:2], -1), H_res


class Identity(Mapping):
    def res_sizes(self, n):
        return []

    def res_bias(self, n):
        return torch.zeros(0)

    def matrix(self, logits, gates):
        return None


class MHC(Mapping):
    def res_sizes(self, n):
        return [n * n]  # row-major (out, in)

    def res_bias(self, n):
        off = -8.0 if self.res_init is None else self.res_init
        return (off - off * torch.eye(n)).flatten()

    def matrix(self, logits, gates):
        return sinkhorn(logits.unflatten(-1, (self.n, self.n)))


class MHCLite(Mapping):
    def __init__(self, n, C, sublayer, static=False, res_init=None):
        if n > 6:
            raise ValueError(f'mhc_lite mixes n! permutations, {math.factorial(n):,} at n_streams = {n}: '
                             'take n_streams <= 6, or residual s2hc or mhc')
        super().__init__(n, C, sublayer, static, res_init)
        # integers: exact after .double(), and .half() leaves them alone
        self.register_buffer('permutations', _permutations(n), persistent=False)

    def res_sizes(self, n):
        return [math.factorial(n)]

    def res_bias(self, n):
        others = -8.0
        if self.res_init is not None:
            # n! - (n-1)! of the permutations move a given stream; they share (n-1) e of 1 + (n-1) e
            away, e = math.factorial(n) - math.factorial(n - 1), math.exp(self.res_init)
            identity = 1 + (n - 1) * e * (1 - (math.factorial(n) - 1) / away)
            others = math.log((n - 1) / away) + self.res_init - math.log(identity)
        return torch.tensor([0.0] + [others] * (math.factorial(n) - 1))

    def matrix(self, logits, gates):
        return birkhoff(logits, self.n, self.permutations)


class KromHC(Mapping):
    def __init__(self, n, C, sublayer, static=False, res_init=None):
        if n < 2 or n & (n - 1):
            raise ValueError(f'kromhc multiplies 2 x 2 factors, so n_streams = {n} is not possible: '
                             'take a power of two, or residual s2hc or mhc')
        super().__init__(n, C, sublayer, static, res_init)

    def res_sizes(self, n):
        return [2 * (n.bit_length() - 1)]  # log2 n factors of 2 logits

    def res_bias(self, n):
        k, other = n.bit_length() - 1, -8.0
        if self.res_init is not None:  # p^k is the diagonal; the logit of 1 - p against p
            log_p = -math.log1p((n - 1) * math.exp(self.res_init)) / k
            other = math.log(-math.expm1(log_p)) - log_p
        return torch.tensor([0.0, other]).repeat(k)

    def matrix(self, logits, gates):
        return kronecker(logits.unflatten(-1, (-1, 2)), self.n)


class S2HC(Mapping):
    n_gates = 2  # g_U, g_V

    def __init__(self, n, C, sublayer, static=False, res_init=None):
        super().__init__(n, C, sublayer, static, res_init)
        self.register_buffer('contrasts', _contrasts(n), persistent=False)  # integers, as in MHCLite

    def res_sizes(self, n):
        k = (n - 1) * (n - 2) // 2
        return [k, k, n - 1]  # U, V, S; at n = 2 U and V are 1 x 1 and have no logits

    def res_bias(self, n):
        s = 4.0
        if self.res_init is not None:  # J + tanh(s) (I - J), tanh(s) = (1 - e) / (1 + (n-1) e)
            e = math.exp(self.res_init)
            s = (math.log((2 + (n - 2) * e) / n) - self.res_init) / 2
        return torch.tensor([0.0] * ((n - 1) * (n - 2)) + [s] * (n - 1))

    def matrix(self, logits, gates):
        u, v, s = logits.tanh().split(self.groups[2:], -1)
        return spectral_sphere(gates[0] * u, gates[1] * v, s, self.contrasts)


class Orthogonal(Mapping):
    n_gates = 1

    def res_sizes(self, n):
        return [n * (n - 1) // 2]

    def res_bias(self, n):
        return torch.zeros(n * (n - 1) // 2)

    def matrix(self, logits, gates):
        return cayley(skew(gates[0] * logits.tanh(), self.n))


class HC(nn.Module):
    """
    The first hyper-connection, arXiv 2409.19606: tanh updates of a learned static part, from each stream by itself.

        xb  = each stream of X over its root mean square (no gain)                  (n x C)
        A_r = I + s_a tanh(xb W_r),  A_m = e_(l % n) + s_a tanh(xb W_m),  B = 1 + s_b tanh(xb W_b)
        H_res = A_r^T,  H_pre = A_m^T,  H_post = B^T

    weight (n+2, C) holds W_r | W_m | W_b, bias (n(n+2),) the static parts A_r row-major | A_m | B, scale (2,) s_a, s_b.
    """

    eps = 1e-6

    def __init__(self, n, C, sublayer, static=False):
        super().__init__()
        self.n, self.main, self.static = n, sublayer % n, static
        self.macs = 0 if static else (n - 1) * (n + 2) * C  # the weight meets each stream by itself
        self.bias = nn.Parameter(torch.empty(n * (n + 2)))  # one dimension: never decayed
        if not static:
            self.weight = nn.Parameter(torch.empty(n + 2, C))
            self.scale = nn.Parameter(torch.empty(2))

    @torch.no_grad()
    def reset_parameters(self):
        n = self.n
        self.bias.copy_(torch.cat((torch.eye(n).flatten(), F.one_hot(torch.tensor(self.main), n), torch.ones(n))))
        if not self.static:
            self.weight.zero_()
            self.scale.fill_(0.01)

    def forward(self, X):
        if not self.static and kernels.takes_mapping(self.kind, X, self.weight):
            return kernels.coefficients(self.kind, X, self.weight, self.bias, self.scale, self.eps)
        n = self.n
        with _full_precision(X):
            dtype = _at_least_float32(X, self.bias)
            A_r, A_m, B = self.bias.to(dtype).split((n * n, n, n))
            table = torch.cat((A_r.view(n, n), A_m[:, None], B[:, None]), -1)     # (n, n+2), row = stream
            if self.static:
                table = table.expand(*X.shape[:2], -1, -1)
            else:
                # xb (W_r | W_m | W_b), (B, T, n, n+2)
                raw, _ = _Project.apply(X.to(dtype), self.weight.to(dtype), self.eps)
                s_a, s_b = self.scale.to(dtype).unbind()
                s = torch.cat((s_a.expand(n + 1), s_b.expand(1)))
                table = torch.addcmul(table, s, raw.tanh())
            A_r, A_m, B = table.split((n, 1, 1), -1)
            return A_m.squeeze(-1), B.squeeze(-1), A_r.mT


STOCHASTIC = ('mhc', 'mhc_lite', 'kromhc', 's2hc')  # rows and columns of H_res sum to 1, and it starts at res_init

KINDS = {
    'hc': HC,
    'mhc': MHC,
    'mhc_lite': MHCLite,
    'kromhc': KromHC,
    's2hc': S2HC,
    'hc_identity': Identity,
    'hc_orthogonal': Orthogonal,
}
for _kind, _mapping in KINDS.items():
    _mapping.kind = _kind  # by which kernels.py knows it
