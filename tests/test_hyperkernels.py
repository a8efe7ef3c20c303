"""
The kernels of the hyper-connections against float64, and what they cost: test_kernels.py for hyperconn.py.

As there, `TestKernels` and `TestBytes` run in Triton's interpreter, in a process of their own, or by hand with

    TRITON_INTERPRET=1 python -m pytest tests/test_hyperkernels.py

The yardstick is the definition of hyperconn.py in float64, which has no kernel, and for read and write an einsum.
"""
import itertools

import pytest
import torch
from conftest import compile_ahead, in_the_interpreter
from test_kernels import BF16, DEVICE, DTYPES, F16, F32, ROUNDING, pairwise

import hyperconn
import kernels
from model import GPT, GPTConfig

STREAMS = [2, 3, 4, 8]
WIDTHS = [1, 7, 24, 129, 768, 1000]
ROWS = [1, 3, 257]
MAPPINGS = [(kind, S) for kind, (streams, _) in kernels.MAPPINGS.items() for S in streams]
MIXED = list(itertools.product([1, 3, 257], [F32, BF16], ['contiguous', 'strided', 'transposed']))
LAYOUTS = ['contiguous', 'strided', 'transposed', 'expanded']


def laid_out(x, layout):
    """x (n, ...) with rows apart, with elements apart, or with the first row in the place of all."""
    if layout == 'strided':
        wide = torch.full((x.shape[0], 2, *x.shape[1:-1], x.shape[-1] + 3), float('nan'), dtype=x.dtype,
                          device=x.device)
        wide[:, 1, ..., :-3] = x
        return wide[:, 1, ..., :-3]
    if layout == 'transposed':
        return x.transpose(-1, 0).contiguous().transpose(-1, 0)
    return x[:1].expand(x.shape) if layout == 'expanded' else x


def gradients(outputs, inputs, gs):
    """The gradients of `outputs` against `gs`, by input, None where there is none."""
    return torch.autograd.grad(outputs, inputs, gs, allow_unused=True)


def check_streams(S, d, n, dtypes, layout, mix, seed=0):
    """Values and gradients of read and write to 2e-6 of the sum of what is added up in absolute value."""
    gen = torch.Generator().manual_seed(seed)
    stream, branch = dtypes
    shapes = dict(X=(n, S, d), f=(n, d), pre=(n, S), post=(n, S), res=(n, S, S), g=(n, d), G=(n, S, d))
    types = dict(X=stream, f=branch, g=stream, G=stream)
    x = {name: laid_out(torch.randn(shape, generator=gen).to(DEVICE, types.get(name, F32)), layout)
         for name, shape in shapes.items()}
    eye = torch.eye(S, dtype=torch.float64, device=DEVICE).expand(n, S, S)
    live = {name: x[name].requires_grad_() for name in ('X', 'f', 'pre', 'post', *(['res'] if mix else []))}
    assert kernels.takes_streams(live['X'], live['f'])
    read = hyperconn.read(live['pre'], live['X'])
    write = hyperconn.write(live['X'], live['f'], live['post'], live.get('res'))
    found = {'read': read, 'write': write}
    found |= {f'd{name} of read': d for name, d in zip(live, gradients(read, live.values(), x['g']))}
    found |= {f'd{name} of write': d for name, d in zip(live, gradients(write, live.values(), x['G']))}

    def formulas(X, f, pre, post, res, g, G):
        yield 'read', torch.einsum('ns,nsd->nd', pre, X)
        yield 'write', torch.einsum('nij,njd->nid', res, X) + torch.einsum('ni,nd->nid', post, f)
        yield 'dX of read', torch.einsum('ns,nd->nsd', pre, g)
        yield 'dpre of read', torch.einsum('nsd,nd->ns', X, g)
        yield 'dX of write', torch.einsum('nij,nid->njd', res, G)
        yield 'df of write', torch.einsum('ni,nid->nd', post, G)
        yield 'dpost of write', torch.einsum('nid,nd->ni', G, f)
        if mix:
            yield 'dres of write', torch.einsum('nid,njd->nij', G, X)

    double = {name: t.detach().double() for name, t in x.items()} | ({} if mix else {'res': eye})
    size = dict(formulas(**{name: t.abs() for name, t in double.items()}))
    for name, want in formulas(**double):
        got = found[name]
        assert got.shape == want.shape, name
        bound = 2e-6 * size[name] + ROUNDING[got.dtype] * want.abs() + 6e-8 * (got.dtype == torch.float16)
        assert ((got - want).abs() <= bound).all(), name
        expected = {'X': stream, 'f': branch}.get(name[1:name.find(' ')], F32) if name[0] == 'd' else stream
        assert got.dtype == expected, name
    assert all(found[f'd{name} of read'] is None for name in live if name not in ('X', 'pre'))


def randomized(kind, S, C, size=1.0, seed=0):
    """A mapping with every parameter away from its start, and itself in float64."""
    gen = torch.Generator().manual_seed(seed)
    mapping = hyperconn.KINDS[kind](S, C, sublayer=1)
    mapping.reset_parameters()
    with torch.no_grad():
        for name, p in mapping.named_parameters():
            noise = torch.randn(p.shape, generator=gen) / (S * C) ** 0.5 if name == 'weight' else 0.3
            p.add_(noise * size if name == 'weight' else noise * torch.randn(p.shape, generator=gen))
        mapping.scale.add_(0.5)
    exact = hyperconn.KINDS[kind](S, C, sublayer=1).double()
    exact.load_state_dict(mapping.state_dict())
    return mapping.to(DEVICE), exact.to(DEVICE)


def check_mapping(kind, S, C, n, dtype, layout, seed=0):
    """The matrices to 2e-6, their gradients to 1e-5 of their norm."""
    mapping, exact = randomized(kind, S, C, seed=seed)
    gen = torch.Generator().manual_seed(seed + 1)
    X = laid_out(torch.randn(n, S, C, generator=gen).to(DEVICE, dtype), layout)[:, None].requires_grad_()
    Xd = X.detach().double().requires_grad_()
    assert kernels.takes_mapping(kind, X, mapping.weight) and not kernels.takes_mapping(kind, Xd, exact.weight)
    found, wanted = ([H for H in m(x) if H is not None] for m, x in ((mapping, X), (exact, Xd)))
    assert len(found) == len(wanted) == (2 if kind == 'hc_identity' else 3)
    gs = [torch.randn(H.shape, generator=gen).to(DEVICE) for H in found]
    for name, a, b in zip(('H_pre', 'H_post', 'H_res'), found, wanted):
        assert a.shape == b.shape and a.dtype == F32, name
        assert (a - b).abs().max() < 2e-6, name
    live = dict(X=X, **dict(mapping.named_parameters()))
    got = torch.autograd.grad(found, live.values(), gs)
    want = torch.autograd.grad(wanted, [Xd, *exact.parameters()], [g.double() for g in gs])
    for name, a, b in zip(live, got, want):
        assert a.shape == b.shape and a.dtype == live[name].dtype, name
        assert (a - b).norm() <= (1e-5 + ROUNDING[a.dtype]) * b.norm() + 1e-6 * n**0.5, name


def trained(kind, choice, recompute):
    """Loss, gradients and weights of a step of a tiny GPT whose every parameter is away from its start."""
    kernels.select(choice)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=31, n_layer=1, n_head=2, n_embd=32, residual=kind)).to(DEVICE)
    model.recompute = recompute
    idx, targets = torch.randint(0, 31, (2, 2, 16)).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape).to(DEVICE))
    loss = model(idx, targets)[1]
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.detach(), {k: p.grad for k, p in model.named_parameters()}, model.state_dict()


@pytest.mark.usefixtures('triton_on')
class TestKernels:
    __test__ = kernels.INTERPRET or torch.cuda.is_available()

    @pytest.mark.parametrize('case', pairwise([STREAMS, [7, 129], ROWS, DTYPES, LAYOUTS, [True, False]]),
                             ids=lambda case: '-'.join(str(x) for x in case).replace('torch.', ''))
    def test_read_and_write(self, case):
        check_streams(*case)

    @pytest.mark.slow
    @pytest.mark.parametrize('d', WIDTHS)
    @pytest.mark.parametrize('S', STREAMS)
    def test_read_and_write_grid(self, S, d):
        for seed, case in enumerate(itertools.product(DTYPES, LAYOUTS)):
            check_streams(S, d, ROWS[seed % 3], *case, seed % 5 < 3, seed)

    @pytest.mark.parametrize('S', [4, 8])
    def test_the_tiles_of_a_gpu(self, S, monkeypatch):
        # a program a row, and a walk over the columns
        monkeypatch.setattr(kernels, 'ELEMENTS', 512)
        check_streams(S, 300, 3, (F32, BF16), 'contiguous', True)
        check_streams(S, 12, 11, (F32, BF16), 'contiguous', False)

    @pytest.mark.parametrize('kind,S', MAPPINGS)
    def test_mapping(self, kind, S):
        seed = MAPPINGS.index((kind, S))
        check_mapping(kind, S, [7, 24, 129][seed % 3], *MIXED[5 * seed % len(MIXED)], seed)

    @pytest.mark.slow
    @pytest.mark.parametrize('kind,S', MAPPINGS)
    def test_mapping_grid(self, kind, S):
        for seed, case in enumerate(itertools.product(ROWS, [F32, BF16, F16])):
            width = WIDTHS[1 + seed % 5]  # of a single element xb is a sign
            check_mapping(kind, S, width, *case, LAYOUTS[seed % 4], seed)

    @pytest.mark.parametrize('kind', ['hc', 'mhc', 'mhc_lite', 's2hc'])
    def test_mapping_with_the_tiles_of_a_gpu(self, kind, monkeypatch):
        monkeypatch.setattr(kernels, 'ELEMENTS', 512)
        check_mapping(kind, 4, 12, 7, F32, 'contiguous')  # 4 rows a program

    @pytest.mark.filterwarnings('ignore:overflow')  # exp of the interpreter; 1 / inf is meant
    @pytest.mark.parametrize('kind,S', [case for case in MAPPINGS if case[0] not in ('hc', 'hc_identity')])
    def test_constraints_hold_in_float32(self, kind, S):
        # from bfloat16 streams, and logits from small to saturated
        for size in (0.1, 3, 100):
            mapping, _ = randomized(kind, S, 32, size)
            X = torch.randn(64, 1, S, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, BF16)
            H = mapping(X)[2].squeeze(1).detach()
            assert H.dtype == F32
            H = H.double()
            if kind == 'hc_orthogonal':
                assert (H.mT @ H - torch.eye(S, device=DEVICE)).abs().max() < 5e-7
                continue
            assert (H.sum(-1) - 1).abs().max() < 1e-6
            if kind != 'mhc':
                assert (H.sum(-2) - 1).abs().max() < 1e-6
                assert (torch.linalg.matrix_norm(H, 2) - 1).abs().max() < 1e-6
            if kind != 's2hc':
                assert H.min() >= 0

    def test_shapes(self):
        X, f, pre, post, res = (torch.randn(2, 3, *shape, device=DEVICE) for shape in
                                ((4, 8), (8,), (4,), (4,), (4, 4)))
        for choice in ('triton', 'eager'):
            kernels.select(choice)
            assert hyperconn.read(pre, X).shape == (2, 3, 8)
            assert hyperconn.write(X, f, post, res).shape == (2, 3, 4, 8)
            assert hyperconn.read(pre[:0], X[:0]).shape == (0, 3, 8)
            assert hyperconn.write(X[:0], f[:0], post[:0], None).shape == (0, 3, 4, 8)

    def test_what_has_no_kernel_stays_in_torch(self):
        X = torch.randn(2, 3, 4, 8, device=DEVICE)
        assert kernels.takes_streams(X) and kernels.takes_streams(X.half(), X.bfloat16())
        assert not kernels.takes_streams(X.double()) and not kernels.takes_streams(X, X.double())
        assert not kernels.takes_streams(X[:, :, :1]) and not kernels.takes_streams(X.repeat(1, 1, 4, 1))
        inputs = [x.double().requires_grad_() for x in (X, X[:, :, 0], X[..., 0], X[..., :4])]
        assert torch.autograd.gradcheck(hyperconn.write, inputs)
        mapping, exact = randomized('s2hc', 4, 8)
        for choice in ('triton', 'eager'):
            kernels.select(choice)
            assert kernels.takes_mapping('s2hc', X, mapping.weight) == (choice == 'triton')
            assert kernels.takes_streams(X) == (choice == 'triton')
            assert not kernels.takes_mapping('s2hc', X, exact.weight)
            assert not kernels.takes_mapping('kromhc', X[:, :, :3], mapping.weight)
            assert not kernels.takes_mapping('mhc_lite', X.repeat(1, 1, 2, 1), mapping.weight)
        kernels.select('triton')
        for kind in kernels.MAPPINGS:  # static mappings, and 5 streams
            for S, static in ((4, True), (5, False)):
                if kind == 'kromhc' and S == 5:
                    continue
                mapping = hyperconn.KINDS[kind](S, 8, sublayer=0, static=static)
                mapping.reset_parameters()
                mapping.to(DEVICE)
                x = torch.randn(2, 3, S, 8, device=DEVICE)
                H_pre, H_post, H_res = mapping(x)
                assert H_pre.shape == H_post.shape == (2, 3, S)
                assert hyperconn.write(x, hyperconn.read(H_pre, x), H_post, H_res).shape == x.shape

    def test_only_some_results_are_used(self):
        X = torch.randn(2, 3, 4, 8, device=DEVICE)
        for kind in ('hc', 's2hc', 'hc_identity'):
            mapping, exact = randomized(kind, 4, 8)
            for i in range(2 if kind == 'hc_identity' else 3):
                a = torch.autograd.grad(mapping(X)[i].cos().sum(), mapping.weight)[0]
                b = torch.autograd.grad(exact(X.double())[i].cos().sum(), exact.weight)[0]
                assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6, (kind, i)

    def test_nothing_to_do(self):
        for kind in kernels.MAPPINGS:
            mapping, _ = randomized(kind, 4, 8)
            X = torch.zeros(2, 0, 4, 8, device=DEVICE, requires_grad=True)
            sum(H.sum() for H in mapping(X) if H is not None).backward()
            assert X.grad.shape == X.shape and not mapping.bias.grad.any() and not mapping.weight.grad.any()

    def test_autocast_changes_nothing(self):
        mapping, _ = randomized('mhc', 4, 8)
        X = torch.randn(2, 3, 4, 8, device=DEVICE, requires_grad=True)
        results = []
        for enabled in (False, True):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
                H_pre, H_post, H_res = mapping(X)
                out = hyperconn.write(X, hyperconn.read(H_pre, X), H_post, H_res)
                results.append((out, *torch.autograd.grad(out.cos().sum(), (X, *mapping.parameters()))))
        for a, b in zip(*results):
            assert torch.equal(a, b)

    @pytest.mark.parametrize('kind', kernels.MAPPINGS)
    def test_a_trained_step_is_the_eager_one(self, kind):
        runs = (('triton', False), ('eager', False), ('triton', True))
        found = [trained(kind, *run) for run in runs[:3 if kind == 's2hc' else 2]]
        for a, b in zip(*found[:2]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        (_, grads, _), (_, wanted, _), *again = found
        for name, want in wanted.items():
            assert (grads[name] - want).norm() <= 1e-5 * want.norm() + 1e-7, name
            assert not again or torch.equal(grads[name], again[0][1][name]), name  # recompute=True

    @pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
    def test_compiles_in_one_graph(self, backend, tmp_path, monkeypatch):
        monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
        torch._dynamo.reset()
        mapping, _ = randomized('s2hc', 4, 8)
        plain, _ = randomized('hc_identity', 4, 8)
        X = torch.randn(2, 3, 4, 8, device=DEVICE, requires_grad=True)

        def fn(X):
            for m in (mapping, plain):
                H_pre, H_post, H_res = m(X)
                X = hyperconn.write(X, hyperconn.read(H_pre, X).tanh(), H_post, H_res)
            return X.cos().sum()

        live = [X, *mapping.parameters(), *plain.parameters()]
        grads = [torch.autograd.grad(run(X), live) for run in (fn, torch.compile(fn, fullgraph=True, backend=backend))]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)

    def test_opcheck(self):
        X, G = torch.randn(2, 2, 3, 4, 8, device=DEVICE)
        g, post, res = G[:, :, 0], X[..., 0].contiguous(), X[..., :4].contiguous()
        live = [x.clone().requires_grad_() for x in (X, g.bfloat16(), post, res)]
        ops = torch.ops.hyper
        torch.library.opcheck(ops.read, (live[2], live[0]))
        torch.library.opcheck(ops.read_backward, (g, post, X))
        torch.library.opcheck(ops.write, tuple(live))
        torch.library.opcheck(ops.write, (*live[:3], None))
        torch.library.opcheck(ops.write_backward, (G, X, g.bfloat16(), post, res))
        torch.library.opcheck(ops.write_backward, (G, None, g, post, None))

    def test_opcheck_of_mappings(self):
        ops = torch.ops.hyper
        X, w = torch.randn(2, 3, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
        raw, inv = ops.project(X, w, 1e-6)
        torch.library.opcheck(ops.project, (X.clone().requires_grad_(), w.clone().requires_grad_(), 1e-6))
        torch.library.opcheck(ops.project_backward, (raw.cos(), raw, inv, X, w))
        for kind in ('s2hc', 'mhc_lite', 'hc_identity'):
            mapping, _ = randomized(kind, 2, 8)
            raw = torch.randn(2, 3, mapping.bias.numel(), device=DEVICE)
            args = mapping.bias.detach(), mapping.scale.detach(), getattr(mapping, 'permutations', None), kind, 2
            gs = [torch.randn_like(H) for H in ops.matrices(raw, *args)]
            live = [x.clone().requires_grad_() for x in (raw, *args[:2])]
            torch.library.opcheck(ops.matrices, (*live, *args[2:]))
            torch.library.opcheck(ops.matrices_backward, (*(*gs, None)[:3], raw, *args))


class TestBytes:
    __test__ = kernels.INTERPRET

    @pytest.mark.parametrize('S,mix,dtypes', [
        (2, True, (F32, F32)), (3, True, (F32, BF16)), (4, True, (BF16, BF16)), (4, False, (F32, BF16)),
        (8, True, (F32, BF16))], ids=str)
    def test_every_element_is_moved_once(self, S, mix, dtypes, moved):
        n, d = 2, 320
        stream, branch = (t.itemsize for t in dtypes)
        X, G = (torch.randn(n, S, d).to(dtypes[0]).requires_grad_() for _ in range(2))
        f = torch.randn(n, d).to(dtypes[1]).requires_grad_()
        pre, post, res = (torch.randn(n, *shape).requires_grad_() for shape in ((S,), (S,), (S, S)))

        def found():
            total = sum(moved.values())
            moved.clear()
            return total

        read = kernels.read(pre, X)
        bytes_moved = {'read': found()}
        write = kernels.write(X, f, post, res if mix else None)
        bytes_moved['write'] = found()
        read.backward(G[:, 0])
        bytes_moved['read_backward'] = found()
        write.backward(G)
        bytes_moved['write_backward'] = found()
        for name, total in bytes_moved.items():
            least = kernels.least_bytes(n, d, name, stream, branch, streams=S, mix=mix)
            numbers = 4 * n * 2 * (S + S * S)  # the matrices and their gradients
            assert least < total <= least + numbers and total <= 1.25 * least, (name, total, least)

    @pytest.mark.parametrize('dtype', [F32, BF16], ids=str)
    def test_logits_read_the_streams_once(self, dtype, moved):
        n, S, d = 40, 4, 96
        mapping, _ = randomized('kromhc', S, d)
        X = torch.randn(n, 1, S, d).to(dtype).requires_grad_()
        K, D = mapping.weight.shape
        raw, inv = torch.ops.hyper.project(X.flatten(-2), mapping.weight, 1e-6)
        weights = 2 * K * D * 4  # once a program, of 32 rows
        least = kernels.least_bytes(n, d, 'project', dtype.itemsize, streams=S)
        assert sum(moved.values()) == least + weights + n * (K + 1) * 4
        moved.clear()
        torch.ops.hyper.project_backward(raw.cos(), raw, inv, X.flatten(-2), mapping.weight)
        least = kernels.least_bytes(n, d, 'project_backward', dtype.itemsize, streams=S)
        assert sum(moved.values()) == least + weights + n * (2 * K + 1) * 4


@pytest.mark.usefixtures('empty_cache')
class TestCompiled:
    __test__ = not kernels.INTERPRET and kernels.triton is not None

    @pytest.mark.parametrize('name', ['read', 'read_backward', 'write', 'write_backward'])
    def test_streams_need_no_shared_memory(self, name):
        found, ptx = compile_ahead(90, 768, name)
        assert found['shared'] == 0 and 'bar.sync' not in ptx
        assert 'ld.global.v4.b32' in ptx and 'st.global.v4.b32' in ptx
        assert 'cvt.rn.bf16' in compile_ahead(90, 768, name, stream='bf16')[1]  # to nearest

    def test_matrices_stay_in_a_warp(self):
        for name in ('matrices', 'matrices_backward'):
            found, ptx = compile_ahead(90, 768, name, kind='s2hc')
            assert found['registers'] <= 168 and found['warps'] == 1  # 12 programs a multiprocessor
        compile_ahead(90, 768, 'project', kind='s2hc')
        compile_ahead(90, 768, 'project_backward', kind='s2hc')

    @pytest.mark.slow
    @pytest.mark.parametrize('kind', kernels.MAPPINGS)
    @pytest.mark.parametrize('capability', [80, 90])
    def test_no_spills_in_mappings(self, capability, kind):
        for S in kernels.MAPPINGS[kind][0]:
            for name in ('matrices', 'matrices_backward'):
                compile_ahead(capability, 768, name, streams=S, kind=kind)
            for width, stream in (*((w, 'fp32') for w in (768, 1024, 2048, 4096)), (768, 'bf16')):
                for name in ('project', 'project_backward') if S == 4 or (width, stream) == (768, 'fp32') else ():
                    compile_ahead(capability, width, name, stream=stream, streams=S, kind=kind)

    @pytest.mark.slow
    @pytest.mark.parametrize('S,width', [(4, 768), (4, 1024), (4, 2048), (4, 4096), (2, 768), (3, 768), (8, 768)])
    @pytest.mark.parametrize('capability', [80, 90])
    def test_no_spills(self, capability, S, width):
        for name, (stream, branch) in itertools.product(
                ('read', 'read_backward', 'write', 'write_backward'), (('fp32', 'bf16'), ('bf16', 'bf16'))):
            for mix in (True, False) if 'write' in name else (True,):
                compile_ahead(capability, width, name, stream=stream, branch=branch, streams=S, mix=mix)


# ---------------------------------------------------------------------------------------------------------------------
# without the interpreter


if not kernels.INTERPRET and kernels.triton is not None:

    def test_in_the_interpreter():
        in_the_interpreter(__file__, 'not slow')

    @pytest.mark.slow
    def test_grid_in_the_interpreter():
        in_the_interpreter(__file__, 'slow')


def test_constants():
    assert getattr(kernels.SINKHORN, 'value', kernels.SINKHORN) == hyperconn.sinkhorn.__defaults__[0]
    assert set(kernels.MAPPINGS) == set(hyperconn.KINDS)
    for kind, S in MAPPINGS:
        assert hyperconn.KINDS[kind](S, 8, sublayer=0).bias.numel() == 2 * S + kernels.MAPPINGS[kind][1](S)
    assert kernels.least_bytes(3, 10, 'write_backward', 4, 2) == 30 * (12 * 4 + 2 * 2)
    assert kernels.least_bytes(3, 10, 'write_backward', 4, 2, mix=False) == 30 * (4 * 4 + 2 * 2)
    assert kernels.least_bytes(3, 10, 'read', 2, streams=8) == 30 * 9 * 2
