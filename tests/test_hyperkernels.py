"""
The kernels of the hyper-connections against float64, and what they cost: test_kernels.py for hyperconn.py.

As there, `TestKernels` and `TestBytes` run in Triton's interpreter, in a process of their own, or by hand with

    TRITON_INTERPRET=1 python -m pytest tests/test_hyperkernels.py

The yardstick is the definition of hyperconn.py in float64, which has no kernel, and for read and write an einsum.
"""
import itertools
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from test_kernels import BF16, DEVICE, DTYPES, F32, ROOT, ROUNDING, pairwise

import hyperconn
import kernels

STREAMS = [2, 3, 4, 8]
WIDTHS = [1, 7, 24, 129, 768, 1000]
ROWS = [1, 3, 257]
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


class TestKernels:
    __test__ = kernels.INTERPRET or torch.cuda.is_available()

    @pytest.fixture(autouse=True)
    def on(self):
        kernels.select('triton')
        yield
        kernels.select('auto')

    @pytest.mark.parametrize('case', pairwise([STREAMS, WIDTHS, ROWS, DTYPES, LAYOUTS, [True, False]]),
                             ids=lambda case: '-'.join(str(x) for x in case).replace('torch.', ''))
    def test_read_and_write(self, case):
        check_streams(*case)

    @pytest.mark.slow
    @pytest.mark.parametrize('d', WIDTHS)
    @pytest.mark.parametrize('S', STREAMS)
    def test_read_and_write_grid(self, S, d):
        for seed, case in enumerate(itertools.product(ROWS, DTYPES, LAYOUTS, [True, False])):
            check_streams(S, d, *case, seed)

    @pytest.mark.parametrize('S', [4, 8])
    def test_the_tiles_of_a_gpu(self, S, monkeypatch):
        # a program a row, and a walk over the columns
        monkeypatch.setattr(kernels, 'ELEMENTS', 512)
        check_streams(S, 300, 3, (F32, BF16), 'contiguous', True)
        check_streams(S, 12, 11, (F32, BF16), 'contiguous', False)

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
        kernels.select('eager')
        assert not kernels.takes_streams(X)

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


class TestBytes:
    __test__ = kernels.INTERPRET

    @pytest.fixture
    def moved(self, monkeypatch):
        """Counts the bytes that the interpreter loads and stores, with the tiles that a GPU gets."""
        from triton.runtime.interpreter import InterpreterBuilder as Builder

        count = Counter()
        load, store = Builder.create_masked_load, Builder.create_masked_store

        def counting(function, way):
            def wrapped(self, pointers, *args):
                mask = args[0] if way == 'read' else args[1]
                count[way] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
                return function(self, pointers, *args)
            return wrapped

        monkeypatch.setattr(Builder, 'create_masked_load', counting(load, 'read'))
        monkeypatch.setattr(Builder, 'create_masked_store', counting(store, 'written'))
        monkeypatch.setattr(kernels, 'ELEMENTS', 512)
        kernels.select('triton')
        yield count
        kernels.select('auto')

    @pytest.mark.parametrize('S,mix,dtypes', [
        (2, True, (F32, BF16)), (3, True, (F32, F32)), (4, True, (F32, BF16)), (4, True, (BF16, BF16)),
        (4, False, (F32, BF16)), (8, True, (F32, BF16)), (8, False, (BF16, BF16))], ids=str)
    def test_every_element_is_moved_once(self, S, mix, dtypes, moved):
        n, d = 2, 768
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


class TestCompiled:
    __test__ = not kernels.INTERPRET and kernels.triton is not None

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))

    def check(self, *args, **keys):
        found = kernels.aot(*args, **keys)
        ptx = found.pop('ptx')
        assert found['spills'] == 0 and found['stack'] == 0, (args, keys, found)
        assert not re.search(r'\b(atom|red)\.', ptx), (args, keys)  # no atomics
        return found, ptx

    @pytest.mark.parametrize('name', ['read', 'read_backward', 'write', 'write_backward'])
    def test_streams_need_no_shared_memory(self, name):
        found, ptx = self.check(90, 768, name)
        assert found['shared'] == 0 and 'bar.sync' not in ptx
        assert 'ld.global.v4.b32' in ptx and 'st.global.v4.b32' in ptx
        assert 'cvt.rn.bf16' in self.check(90, 768, name, stream='bf16')[1]  # to nearest

    @pytest.mark.slow
    @pytest.mark.parametrize('S,width', [(4, 768), (4, 1024), (4, 2048), (4, 4096), (2, 768), (3, 768), (8, 768)])
    @pytest.mark.parametrize('capability', [80, 90])
    def test_no_spills(self, capability, S, width):
        for name, (stream, branch) in itertools.product(
                ('read', 'read_backward', 'write', 'write_backward'), (('fp32', 'bf16'), ('bf16', 'bf16'))):
            for mix in (True, False) if 'write' in name else (True,):
                self.check(capability, width, name, stream=stream, branch=branch, streams=S, mix=mix)


# ---------------------------------------------------------------------------------------------------------------------
# without the interpreter


def in_the_interpreter(marks):
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', marks, '-k',
               'TestKernels or TestBytes', __file__]
    env = {**os.environ, 'TRITON_INTERPRET': '1'}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r'\b[1-9]\d* passed', done.stdout) and 'skipped' not in done.stdout


if not kernels.INTERPRET and kernels.triton is not None:

    def test_in_the_interpreter():
        in_the_interpreter('not slow')

    @pytest.mark.slow
    def test_grid_in_the_interpreter():
        in_the_interpreter('slow')
