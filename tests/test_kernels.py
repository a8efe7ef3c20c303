"""
The kernels against float64, and what they cost.

Without a GPU the kernels run in Triton's interpreter, which must be asked for before triton is imported: `TestKernels`
is skipped here and run by `test_in_the_interpreter` in a process of its own. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels.py

With a GPU `TestKernels` runs right here, compiled. The yardstick is spheretnorm.retract_reference in float64 under
autograd, which test_spheretnorm.py holds against longdouble.
"""
import itertools
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import compile_ahead, in_the_interpreter

import kernels
from model import GPT, GPTConfig
from spheretnorm import R2_MIN, retract, retract_norm, retract_reference

ROOT = Path(__file__).resolve().parents[1]
DEVICE = 'cpu' if kernels.INTERPRET else 'cuda'
INF, CAP = math.inf, math.pi / 4
SPHERES = ['geonorm', 'p_spheret', 'proj_spheret', 'cay_spheret']
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# stream and branch, and how far one rounding to the first can be off; the interpreter cuts bfloat16 off instead
DTYPES = [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16)]
ROUNDING = {F32: 0, BF16: 2**-7 if kernels.INTERPRET else 2**-8, F16: 2**-11}
WIDTHS = [1, 7, 64, 768, 1000, 1280, 4096]
ROWS = [1, 3, 257]
ORDERS = [(0.5, None), (1.0, None), (2.0, CAP), (INF, CAP), (0.3, None), (1.7, CAP), (INF, None)]
MORE_ORDERS = [(2.0, None), (3.0, None), (8.0, 1.2), (1e6, 0.5), (1e-6, None)]
LAYOUTS = ['contiguous', 'strided', 'transposed']
KINDS = ['plain', 'zero tangent', 'near parallel', 'past the cap', 'small step', 'huge', 'tiny',
         'huge branch', 'tiny branch', 'zero stream']
NORMS = [None, 'layernorm', 'rmsnorm']


def pairwise(choices, seed=0):
    """Few, and small, cases in which every two values of every two columns meet: greedy, the best of random ones."""
    draw = random.Random(seed)
    columns = list(itertools.combinations(range(len(choices)), 2))
    missing = {(i, a, j, b) for i, j in columns for a in range(len(choices[i])) for b in range(len(choices[j]))}
    rows = []
    while missing:
        i, a, j, b = draw.choice(sorted(missing))
        found = []
        for _ in range(30):
            row = [draw.randrange(len(c)) for c in choices]
            row[i], row[j] = a, b
            gain = len(missing & {(i, row[i], j, row[j]) for i, j in columns})
            found.append((gain - choices[0][row[0]] * choices[1][row[1]] / 1e5, row))
        row = max(found)[1]
        rows.append(tuple(c[k] for c, k in zip(choices, row)))
        missing -= {(i, row[i], j, row[j]) for i, j in columns}
    return rows


def inputs(d, n, kind, seed=0):
    """h, f, g, gy (n, d) in float64, about sqrt(d) long but for what `kind` says."""
    gen = torch.Generator().manual_seed(seed)
    h, f, g, gy = torch.randn(4, n, d, generator=gen, dtype=torch.float64)
    h = h + h.sign() if d == 1 else h  # some would be near 0
    if kind == 'zero tangent':
        h = torch.zeros_like(h)
        h[:, 0] = 2
        f = -1.5 * h  # without any rounding
        f[::2] = 0
    elif kind == 'near parallel':
        f = 0.5 * h + 1e-4 * f
    elif kind == 'past the cap':
        f = 20 * f
    elif kind == 'small step':
        f = 1e-2 * f
    elif kind in ('huge', 'tiny'):
        size = 1e15 if kind == 'huge' else 1e-3 / math.sqrt(d)
        h, f, g, gy = size * h, size * f, size * g, gy
    elif kind in ('huge branch', 'tiny branch'):
        f = f * (1e18 if kind == 'huge branch' else 1e-18) / math.sqrt(d)
    elif kind == 'zero stream':
        h = 0 * h
    return h, f, g, gy


def laid_out(x, layout):
    """x with rows that are not neighbours, or with elements that are not."""
    if layout == 'strided':
        wide = torch.full((x.shape[0], 2, x.shape[1] + 3), math.nan, dtype=x.dtype, device=x.device)
        wide[:, 1, :-3] = x
        return wide[:, 1, :-3]
    return x.T.contiguous().T if layout == 'transposed' else x


def norm_reference(h, weight, bias, norm):
    if norm == 'layernorm':
        return F.layer_norm(h, h.shape[-1:], weight, bias, 1e-5)
    return h * math.sqrt(h.shape[-1]) / (h * h).sum(-1, keepdim=True).clamp_min(R2_MIN).sqrt() * weight + bias


def check(d, n, dtypes, order, kind, layout, norm, seed=0):
    """Values and gradients of retract, or retract_norm, row by row, to 1e-5 of the longest of h, f and g."""
    stream, branch = dtypes
    if branch == F16 and kind in ('huge', 'huge branch', 'tiny') or kind == 'tiny branch' and branch != F32:
        branch = BF16  # the range of float16
    if d == 1 and norm == 'layernorm':
        norm = 'rmsnorm'  # of a single element it is 0, and what is left is rounding
    if d == 1 and order[0] < 1e-3:
        order = (0.5, None)  # without a tangent space z is rounding, and p = 1e-6 makes an angle of it
    p, cap = order
    h, f, g, gy = (laid_out(x.to(DEVICE, t), layout) for x, t in
                   zip(inputs(d, n, kind, seed), (stream, branch, stream, branch)))
    gen = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(2, d, generator=gen) + torch.tensor([[1.0], [0.0]])).to(DEVICE)
    args = [x.requires_grad_() for x in (h, f, torch.tensor(0.7, device=DEVICE), weight, bias)][:5 if norm else 3]
    exact = [x.detach().double().requires_grad_() for x in args]
    assert kernels.takes(*args[:3])
    out = retract_reference(*exact[:3], p, cap)
    if norm:
        results, wanted, gs = retract_norm(*args, p, cap, norm), (out, norm_reference(out, *exact[3:], norm)), (g, gy)
    else:
        results, wanted, gs = (retract(*args, p, cap),), (out,), (g,)
    got = torch.autograd.grad(results, args, gs)
    want = torch.autograd.grad(wanted, exact, [x.double() for x in gs])

    def length(x):
        return x.detach().double().norm(dim=-1)

    longest = torch.stack([length(x) for x in (h, f, *gs)]).amax(0)                       # (n,)
    if norm:  # the norm has a slope of its own, 1/deviation
        hd = out.detach()
        deviation = hd.std(-1, correction=0) if norm == 'layernorm' else length(hd).clamp_min(1e-6) / math.sqrt(d)
        steep = (weight.abs().max() / (deviation + (1e-5**0.5 if norm == 'layernorm' else 0))).double()
        y_size = length(wanted[1]) + steep * length(h)
        longest = torch.maximum(longest, y_size) * torch.clamp(steep, min=1)
    names = ('out', 'y')[:len(results)] + ('dh', 'df', 'dalpha', 'dweight', 'dbias')
    for name, a, b in zip(names, (*results, *got), (*wanted, *want)):
        a = a.detach()
        assert torch.isfinite(a).all(), f'{name} is not finite'
        if kind == 'zero stream' and (norm or name != 'out') or kind == 'huge branch' and order == (INF, None):
            continue  # the clamp of |h| has no gradient worth the name; an angle of 1e18 has no cosine in float32
        error = (a.double() - b).detach()
        if b.dim() == 2:
            bound = 1e-5 * longest + ROUNDING[a.dtype] * length(b) + 6e-8 * math.sqrt(d) * (a.dtype == F16)
            worst = (length(error) / bound).max()
        else:  # a sum over the rows
            bound = 1e-5 * (longest * torch.maximum(longest, length(f))).sum() + 1e-5 * b.abs().max()
            worst = error.abs().max() / bound
        assert worst <= 1, f'{name}: {worst:.2g} times what it may be off'
    assert results[0].dtype == h.dtype and got[0].dtype == h.dtype and got[1].dtype == f.dtype


@pytest.mark.usefixtures('triton_on')
class TestKernels:
    __test__ = kernels.INTERPRET or torch.cuda.is_available()

    @pytest.mark.parametrize('case', pairwise([WIDTHS, ROWS, DTYPES, ORDERS, KINDS, LAYOUTS, NORMS]),
                             ids=lambda case: '-'.join(str(x) for x in case).replace('torch.', ''))
    def test_against_float64(self, case):
        check(*case)

    @pytest.mark.slow
    @pytest.mark.parametrize('d', WIDTHS)
    @pytest.mark.parametrize('kind', KINDS)
    def test_grid(self, d, kind):
        draw = random.Random(f'{d} {kind}')
        for seed, (n, dtypes) in enumerate(itertools.product(ROWS if d < 1000 else (1, 37), DTYPES)):
            check(d, n, dtypes, draw.choice(ORDERS + MORE_ORDERS), kind, draw.choice(LAYOUTS), draw.choice(NORMS), seed)

    @pytest.mark.parametrize('order', MORE_ORDERS)
    def test_other_orders(self, order):
        for kind in ('plain', 'past the cap', 'small step'):
            check(48, 9, (F32, F32), order, kind, 'contiguous', 'layernorm')

    @pytest.mark.parametrize('p,cap', ORDERS + MORE_ORDERS)
    def test_every_angle(self, p, cap):
        # from 1e-6 to 1e4 radians, where p lets it: no jump between series, closed form, cap and quarter turns
        beta = torch.logspace(-6, 4, 4001, dtype=torch.float64)[:, None]
        for h, f in (((4, 0, 0), (0, 4, 0)), ((0, 0, 0.1), (0, 0.1, 0))):
            h, f = torch.tensor(h) * torch.ones_like(beta), torch.tensor(f) * beta
            h, f = (x.float().to(DEVICE).requires_grad_() for x in (h, f))
            hd, fd = h.detach().double().requires_grad_(), f.detach().double().requires_grad_()
            out, want = retract(h, f, 1.0, p, cap), retract_reference(hd, fd, 1.0, p, cap)
            turns = 1 + (torch.atan(beta / p) * p if p < INF else beta).to(DEVICE)  # an angle has a relative error
            turns = turns.clamp(max=1 + (cap or INF))
            size = hd.detach().norm(dim=-1, keepdim=True)
            assert ((out - want).abs() / (size * turns)).max() < 5e-7
            assert ((out.double().norm(dim=-1, keepdim=True) / size - 1).abs() / turns**0.5).max() < 1e-6
            kink = (turns - 1 - (cap if cap and p > 1 else -1)).abs() < 1e-5  # there the slope jumps
            for g in torch.eye(3, device=DEVICE):
                got = torch.autograd.grad(out, (h, f), g.expand_as(out), retain_graph=True)
                exact = torch.autograd.grad(want, (hd, fd), g.double().expand_as(want), retain_graph=True)
                for a, b in zip(got, exact):
                    error = (a - b).abs() / (turns * torch.maximum(b.norm(dim=-1, keepdim=True), turns))
                    assert torch.where(kink, 0, error).max() < 2e-6

    def test_norm_drift_over_72_updates(self, monkeypatch):
        monkeypatch.setattr(kernels, 'ELEMENTS', 2**14)  # 16 rows
        gen = torch.Generator().manual_seed(0)
        for p, cap in ((0.5, None), (INF, CAP)):
            h = torch.randn(16, 768, generator=gen).to(DEVICE)
            start = h.double().norm(dim=-1)
            for _ in range(72):
                h = retract(h, torch.randn(16, 768, generator=gen).to(DEVICE), 1.0, p, cap)
            assert (h.double().norm(dim=-1) / start - 1).abs().max() < 3e-6

    @pytest.mark.parametrize('norm', NORMS)
    def test_many_programs(self, norm, monkeypatch):
        # the narrow tiles of a GPU, and more turns than one
        monkeypatch.setattr(kernels, 'ELEMENTS', 512)
        monkeypatch.setattr(kernels, 'PROGRAMS', 3)
        check(200, 23, (F32, BF16), (0.5, None), 'plain', 'contiguous', norm)

    def test_shapes_and_step_sizes(self):
        h, f, g = torch.randn(3, 2, 3, 5, 8, device=DEVICE)
        for alpha in (0.5, 1, torch.tensor(0.5), torch.tensor([[0.5]], device=DEVICE), torch.tensor(0.5).double()):
            results = []
            for choice in ('triton', 'eager'):
                kernels.select(choice)
                a = alpha.clone().requires_grad_() if torch.is_tensor(alpha) else alpha
                inputs = [h.clone().requires_grad_(), f.clone().requires_grad_(), a]
                out = retract(*inputs, 1.7, CAP)
                results.append((out, *torch.autograd.grad(out, [x for x in inputs if torch.is_tensor(x)], g)))
            for a, b in zip(*results):
                assert a.shape == b.shape and a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    def test_nothing_to_do(self):
        h = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
        for norm in (False, True):
            weight = torch.ones(8, device=DEVICE, requires_grad=True)
            out = retract_norm(h, h, 0.5, weight)[1] if norm else retract(h, h, 0.5)
            out.sum().backward()
            assert out.shape == h.grad.shape == (0, 8)

    def test_only_some_results_are_used(self):
        h, f, g = torch.randn(3, 4, 8, device=DEVICE)
        weight = torch.randn(8, device=DEVICE)
        for part in (0, 1):
            results = []
            for choice in ('triton', 'eager'):
                kernels.select(choice)
                a, b = h.clone().requires_grad_(), f.clone().requires_grad_()
                out = retract_norm(a, b, 0.5, weight, None, 0.5, None, 'rmsnorm')[part]
                results.append(torch.autograd.grad(out, (a, b), g))
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)

    def test_what_has_no_kernel_stays_in_torch(self):
        h = torch.randn(4, 8, device=DEVICE)
        assert kernels.takes(h, h, 0.5) and kernels.takes(h, h.half(), torch.ones(1))
        assert not kernels.takes(h.double(), h.double(), 0.5)
        assert not kernels.takes(h, h, torch.ones(4, 1))
        inputs = [x.double().requires_grad_() for x in (h, h.flip(0), torch.tensor(0.7, device=DEVICE))]
        assert torch.autograd.gradcheck(lambda *args: retract(*args, 0.5), inputs)
        kernels.select('eager')
        assert not kernels.takes(h, h, 0.5)

    def test_opcheck(self):
        h, f, g, gy = torch.randn(4, 3, 5, 8, device=DEVICE)
        f, gy, alpha = f.bfloat16(), gy.bfloat16(), torch.tensor(0.7, device=DEVICE)
        weight, bias = torch.randn(2, 8, device=DEVICE)
        live = [x.clone().requires_grad_() for x in (h, f, alpha, weight, bias)]
        ops = torch.ops.sphere
        torch.library.opcheck(ops.retract, (*live[:3], 0.5, None))
        torch.library.opcheck(ops.retract_backward, (g, h, f, alpha, 2.0, CAP))
        torch.library.opcheck(ops.retract_norm, (*live, 1.0, None, 'layernorm'))
        torch.library.opcheck(ops.retract_norm, (*live[:4], None, 1.0, None, 'rmsnorm'))
        torch.library.opcheck(ops.retract_norm_backward, (g, gy, h, f, alpha, weight, bias, 1.0, None, 'layernorm'))

    @pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
    def test_compiles_in_one_graph(self, backend, tmp_path, monkeypatch):
        monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
        torch._dynamo.reset()
        h, f, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)

        def fn(h, f, alpha, weight):
            h = retract(h + f, f.tanh(), 2 * alpha, 0.5)
            h, y = retract_norm(h, f, alpha, weight, None, 2.0, CAP, 'layernorm')
            return (h * y).sum()

        grads = []
        for run in (fn, torch.compile(fn, fullgraph=True, backend=backend)):
            live = [x.to(DEVICE).clone().requires_grad_() for x in (h, f, torch.tensor(0.3), weight)]
            grads.append(torch.autograd.grad(run(*live), live))
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize('mode', SPHERES)
    def test_a_trained_step_is_the_eager_one(self, mode):
        idx, targets = torch.randint(0, 31, (2, 2, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        found = []
        for choice in ('triton', 'eager'):
            kernels.select(choice)
            torch.manual_seed(0)
            model = GPT(GPTConfig(block_size=16, vocab_size=31, n_layer=2, n_head=2, n_embd=32, residual=mode))
            model = model.to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(idx, targets)[1]
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            found.append((torch.stack(losses), {k: p.grad for k, p in model.named_parameters()}, model.state_dict()))
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        (_, grads, _), (_, wanted, _) = found
        for name, want in wanted.items():
            assert (grads[name] - want).norm() <= 1e-5 * want.norm() + 1e-7, name


class TestBytes:
    __test__ = kernels.INTERPRET

    @pytest.mark.parametrize('norm', NORMS)
    @pytest.mark.parametrize('dtypes', DTYPES, ids=str)
    def test_every_element_is_moved_once(self, dtypes, norm, moved):
        for n, d in ((5, 768), (3, 1280), (16, 64)):
            h, f, g, gy = (x.to(t) for x, t in zip(torch.randn(4, n, d), (*dtypes, *dtypes)))
            weight = torch.ones(d)
            args = [x.requires_grad_() for x in (h, f, torch.tensor(0.7), *([weight] if norm else []))]
            rows = kernels.tile(d)[0]['ROWS']
            programs = -(-n // rows)
            stream, branch = (t.itemsize for t in dtypes)
            for direction in ('forward', 'backward'):
                moved.clear()
                if direction == 'forward':
                    out = retract_norm(*args, p=0.5, norm=norm) if norm else (retract(*args, 0.5),)
                    weights = programs * d * 4 if norm else 0  # once a program
                else:
                    torch.autograd.grad(out, args, (g, gy)[:len(out)])
                    moved['read'] += 4 * programs  # by the sum of d alpha
                    weights = 2 * programs * d * 4 if norm else 0  # and their gradients, here with a row a program
                least = kernels.least_bytes(n, d, direction, stream, branch, norm)
                extra = sum(moved.values()) - weights - least
                assert 0 < extra <= 32 * n, (direction, n, d, moved, least)
                written = {'forward': stream + (branch if norm else 0), 'backward': stream + branch}[direction]
                assert moved['written'] - n * d * written <= 4 * programs + weights // 2


@pytest.mark.usefixtures('empty_cache')
class TestCompiled:
    __test__ = not kernels.INTERPRET and kernels.triton is not None

    def check(self, *args, **keys):
        found, ptx = compile_ahead(*args, **keys)
        assert not re.search(r'\b(sin|cos)\.', ptx), (args, keys)  # nothing slow
        assert 'ld.global.v4.b32' in ptx and 'st.global.v4.b32' in ptx, (args, keys)
        if keys.get('branch') == 'bf16' and args[2] == 'backward':
            assert 'cvt.rn.bf16' in ptx  # to nearest
        return found

    @pytest.mark.parametrize('direction', ['forward', 'backward'])
    @pytest.mark.parametrize('capability', [80, 90])
    def test_no_spills(self, capability, direction):
        for width, norm in ((768, None), (1280, 'layernorm'), (4096, None), (4096, 'layernorm')):
            self.check(capability, width, direction, norm=norm, p=1.7, max_angle=CAP, branch='bf16')

    @pytest.mark.slow
    @pytest.mark.parametrize('width', [768, 1024, 1280, 1600, 4096])
    @pytest.mark.parametrize('capability', [80, 90])
    def test_no_spills_grid(self, capability, width):
        orders = itertools.cycle(ORDERS)
        for direction, norm, (stream, branch) in itertools.product(
                ('forward', 'backward'), NORMS, (('fp32', 'bf16'), ('fp32', 'fp32'), ('bf16', 'bf16'))):
            p, cap = next(orders)
            self.check(capability, width, direction, norm=norm, p=p, max_angle=cap, stream=stream, branch=branch)


# ---------------------------------------------------------------------------------------------------------------------
# without the interpreter


if not kernels.INTERPRET and kernels.triton is not None:

    def test_in_the_interpreter():
        in_the_interpreter(__file__, 'not slow')

    @pytest.mark.slow
    def test_grid_in_the_interpreter():
        in_the_interpreter(__file__, 'slow')


def test_select():
    with pytest.raises(ValueError, match='choose from auto, triton, eager'):
        kernels.select('cuda')
    h = torch.ones(2, 4)
    assert kernels._choice == 'auto' and not kernels.takes(h, h, 0.5)  # a CPU takes plain torch
    if not torch.cuda.is_available() and not kernels.INTERPRET:
        with pytest.raises(ValueError, match="^kernels = 'triton': .*'auto'"):
            kernels.select('triton')
        assert kernels._choice == 'auto'


def test_a_tensor_that_no_kernel_can_take(monkeypatch):
    monkeypatch.setattr(kernels, 'INTERPRET', False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(kernels, '_choice', 'auto')
    monkeypatch.setattr(kernels, 'triton', kernels.triton or True)
    kernels.select('triton')
    with pytest.raises(ValueError, match='the stream is on cpu'):
        retract(torch.ones(2, 4), torch.ones(2, 4), 0.5)


def test_without_the_package():
    code = ("import sys; sys.modules['triton'] = None\n"
            "import torch, kernels, spheretnorm as s\n"
            "h = torch.randn(3, 8, requires_grad=True)\n"
            "s.retract(h, h.flip(0), 0.5).sum().backward()\n"
            "try:\n    kernels.select('triton')\n"
            "except ValueError as error:\n    print(error)\n")
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("kernels = 'triton': the package triton is not installed; use kernels = 'auto'")


def test_constants():
    assert getattr(kernels.R2_MIN, 'value', kernels.R2_MIN) == R2_MIN
    assert kernels.least_bytes(1, 1, 'forward', 4, 2) == 10 and kernels.least_bytes(1, 1, 'backward', 4, 2) == 16
    assert kernels.least_bytes(2, 8, 'backward', 2, 2, 'layernorm') == 16 * 12
