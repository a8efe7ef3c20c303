"""analyze.py: its Jacobians against whole ones in float64, its statistics against loops of numpy, its pictures."""
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import analyze
import checkpoint
from analyze import connections, jacobians_of, largest_singular_value, look, matrix_statistics, pairwise_cosine
from configurator import UserError
from data.common import write_dataset
from data.tokenizer import get_tokenizer
from hyperconn import KINDS
from model import GPT, RESIDUALS, GPTConfig

SPHERES = [mode for mode, row in RESIDUALS.items() if 'spheret' in mode or mode == 'geonorm']


def build(residual, seed=0, size=0.3, **kw):
    """A tiny float64 model with all parameters random, so that no matrix is special."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**dict(block_size=6, vocab_size=11, n_layer=2, n_head=2, n_embd=8), **kw},
                          residual=residual)).double().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith('raw'):
                p.add_(size * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    return model


def window(T=6, seed=1):
    return torch.randint(11, (T,), generator=torch.Generator().manual_seed(seed))


def states_of(model, idx):
    """The L + 1 states (1, T, ...) of the stream, by the modules themselves."""
    t = model.transformer
    x = t.open(t.emb(t.wte(idx[None]) + t.wpe.weight[:len(idx)]))
    states = [x]
    for res, branch in connections(model):
        states.append(res(states[-1], branch))
    return states


def whole_jacobian(functions, state):
    """d(last token after) / d(last token before), the other tokens fixed, by torch.autograd.functional.jacobian of the
    whole sub-layers."""
    def f(last):
        x = torch.cat((state[:, :-1], last), 1)
        for res, branch in functions:
            x = res(x, branch)
        return x[:, -1:].flatten()
    last = state[:, -1:].detach()
    return torch.autograd.functional.jacobian(f, last).reshape(-1, last.numel())


# -----------------------------------------------------------------------------
# Jacobians


@pytest.mark.parametrize('mode', RESIDUALS)
def test_jacobians_are_the_whole_ones(mode):
    model, idx = build(mode), window()
    found = jacobians_of(model, idx[None], smallest=True)
    iterated = jacobians_of(model, idx[None], smallest=False)
    states, subs = states_of(model, idx), connections(model)
    assert 'smallest' not in iterated
    for l in range(len(subs)):
        own = torch.linalg.svdvals(whole_jacobian(subs[l:l + 1], states[l]))
        through = torch.linalg.svdvals(whole_jacobian(subs[:l + 1], states[0]))
        for name, value in (('largest', own[0]), ('smallest', own[-1]), ('largest_through', through[0]),
                            ('smallest_through', through[-1])):
            assert found[name][0, l] == pytest.approx(value.item(), rel=1e-6, abs=1e-9), (name, l)
            if name in iterated:
                assert iterated[name][0, l] == pytest.approx(value.item(), rel=1e-6), (name, l)
    assert all('forward' not in vars(block.attn) for block in model.transformer.h)  # all is as it was
    assert torch.equal(states_of(model, idx)[-1], states[-1])


@pytest.mark.parametrize('T', (1, 2))
def test_jacobians_of_a_short_context(T):
    model = build('pre_ln')
    f, x = connections(model)[0], states_of(model, window(T))[0]
    own = torch.linalg.svdvals(whole_jacobian([f], x))
    assert jacobians_of(model, window(T)[None], True)['largest'][0, 0] == pytest.approx(own[0].item(), rel=1e-6)


@pytest.mark.parametrize('shape', ((7, 7), (3, 9), (9, 3)))
@pytest.mark.parametrize('spectrum', ('spread', 'equal', 'rank one', 'zero'))
def test_largest_singular_value(shape, spectrum):
    draw = torch.Generator().manual_seed(3)
    A = torch.randn(shape, generator=draw, dtype=torch.float64)
    U, S, V = torch.linalg.svd(A, full_matrices=False)
    S = {'spread': S, 'equal': torch.ones_like(S), 'rank one': torch.eye(len(S))[0].double(), 'zero': 0 * S}[spectrum]
    A = U @ torch.diag(S) @ V
    found = largest_singular_value(lambda x: x.flatten(1) @ A.T, torch.zeros(1, 1, shape[1], dtype=torch.float64))
    assert found == pytest.approx(S.max().item(), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize('mode', SPHERES)
def test_bounds_of_proposition_6(mode):
    """The bounds from their definition, with the whole Jacobian of the branch; and that they hold."""
    model, idx = build(mode, size=0.1), window()
    found = jacobians_of(model, idx[None], smallest=True)
    with analyze.last_token(model, idx) as (functions, states):
        for l, (res, branch) in enumerate(connections(model)):
            h, f = states[l].flatten(), branch(states[l]).detach().flatten()
            c = h @ f / (h @ h)
            B = analyze.jacobian(branch, states[l]) - c * torch.eye(len(h), dtype=torch.float64)
            eta = (f - c * h).norm() / h.norm()
            alpha = float(res.decay * torch.nn.functional.softplus(res.step.raw.detach()).clamp(0, 1))
            D = alpha * (2 * torch.linalg.matrix_norm(B, 2) + eta).item()
            cos = (h @ functions[l](states[l]).detach().flatten() / (h @ h)).item()
            upper, lower = analyze.sphere_bounds(res, branch, states[l])
            assert upper == pytest.approx(1 + D, rel=1e-6)
            assert lower == pytest.approx(max(0, abs(cos) - D), rel=1e-6, abs=1e-9)
            assert found['largest'][0, l] <= upper and found['smallest'][0, l] >= lower
            assert found['upper_through'][0, l] == pytest.approx(math.exp(sum(found['upper'][0, :l + 1] - 1)))
            assert found['largest_through'][0, l] <= found['upper_through'][0, l]
            assert found['smallest_through'][0, l] >= found['lower_through'][0, l]
            assert found['lower_through'][0, l] == pytest.approx(np.prod(found['lower'][0, :l + 1]))


# -----------------------------------------------------------------------------
# statistics


@pytest.mark.parametrize('n', (2, 4))
def test_matrix_statistics(n):
    """Each number by a loop over tokens, sub-layers and rows."""
    H = np.random.default_rng(0).normal(size=(5, 3, n, n))
    found = matrix_statistics(torch.from_numpy(H))
    Z = np.linalg.qr(np.c_[np.ones(n), np.random.default_rng(1).normal(size=(n, n - 1))])[0][:, 1:]  # off the mean
    products = np.stack([[H[k, 0], H[k, 1] @ H[k, 0], H[k, 2] @ H[k, 1] @ H[k, 0]] for k in range(5)])
    for l in range(3):
        maxima = sorted(H[k, l, i].max() for k in range(5) for i in range(n))
        assert found['row_maximum'][l] == pytest.approx(maxima[(5 * n - 1) // 2])  # torch's median: the lower one
        assert found['on_diagonal'][l] == pytest.approx(np.mean([H[k, l, i].argmax() == i for k in range(5)
                                                                 for i in range(n)]))
        assert found['from_identity'][l] == pytest.approx(np.mean([np.linalg.norm(H[k, l] - np.eye(n))
                                                                   for k in range(5)]))
        sigma = np.median([np.linalg.svd(Z.T @ H[k, l] @ Z, compute_uv=False) for k in range(5)], 0)
        np.testing.assert_allclose(found['off_mean'][l], sigma, rtol=1e-12)
        for name, M in (('', H), ('_through', products)):
            for which, axis in (('row', 1), ('column', 0)):
                far = np.mean([np.abs(M[k, l].sum(axis) - 1).max() for k in range(5)])
                assert found[f'{which}_sums_off{name}'][l] == pytest.approx(far)
        assert found['norm_through'][l] == pytest.approx(np.mean([np.linalg.norm(products[k, l], 2) for k in range(5)]))
        np.testing.assert_allclose(found['mean'][l], H[:, l].mean(0))
    np.testing.assert_allclose(found['product'], products[:, 2].mean(0))


def test_stream_statistics():
    x = np.random.default_rng(0).normal(size=(4, 9)) ** 3
    found = analyze.stream_statistics(torch.from_numpy(x))
    for k, row in enumerate(x):
        assert found['norm'][k] == pytest.approx(math.sqrt(sum(row * row)))
        assert found['kurtosis'][k] == pytest.approx(np.mean((row - row.mean()) ** 4) / row.var() ** 2)
        assert found['peak'][k] == pytest.approx(max(abs(row)) / np.median(abs(row)))
    X = np.random.default_rng(1).normal(size=(2, 3, 5))
    for k, found in enumerate(pairwise_cosine(torch.from_numpy(X))):
        x = X[k] / np.linalg.norm(X[k], axis=1, keepdims=True)
        pairs = [x[i] @ x[j] for i in range(3) for j in range(i)]
        assert found == pytest.approx(np.mean(pairs))
    assert analyze.dyadic([1, 2, 3, 4, 5]) == {'1-1': 1, '2-3': 4 + 9, '4-5': 16 + 25}


def test_first_token_attention():
    model = build('pre_ln')
    attn, T = model.transformer.h[0].attn, 6
    x = torch.randn(2, T, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    at = torch.tensor([3, 5])
    found = analyze.first_token_attention(attn, attn.c_attn(x), at)
    q, k, _ = attn.c_attn(x).detach().numpy().reshape(2, T, 3, 2, 4).transpose(2, 0, 3, 1, 4)
    for b in range(2):
        shares = []
        for head in range(2):
            w = np.exp([q[b, head, at[b]] @ k[b, head, s] / 2 for s in range(at[b] + 1)])  # sqrt(C/H) = 2
            shares.append(w[0] / w.sum())
        assert found[b].item() == pytest.approx(np.mean(shares))


@pytest.mark.parametrize('mode', ('keel', 'proj_spheret', 'hc_identity', 's2hc', 'hc'))
def test_look_sees_the_states(mode):
    model = build(mode)
    idx, at = torch.stack([window(), window(seed=2)]), torch.tensor([3, 5])
    found = look(model, idx, at)
    assert set(found) == {'norm', 'kurtosis', 'peak', 'cosine', 'first_token'} | (
        {'angle'} if mode in SPHERES else {'H_res', 'streams', 'mixed'} if mode in KINDS else set())
    matrices = model.residual_matrices(idx)
    for b in range(2):
        states = [state[0, at[b]].detach().numpy() for state in states_of(model, idx[b])]
        for l, (x, y) in enumerate(zip(states, states[1:])):
            cos = (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)
            assert found['norm'][b, l].item() == pytest.approx(np.linalg.norm(y))
            assert found['cosine'][b, l].item() == pytest.approx(cos)
            if mode in SPHERES:
                assert found['angle'][b, l].item() == pytest.approx(math.acos(cos), rel=1e-6)
            if mode in KINDS:
                H = matrices[l][2][b, at[b]].numpy()
                np.testing.assert_allclose(found['H_res'][b, l], H, atol=1e-12)
                for name, X in (('streams', x), ('mixed', H @ x)):
                    assert found[name][b, l].item() == pytest.approx(pairwise_cosine(torch.from_numpy(X)[None]).item())


def test_skipping_leaves_a_block_out():
    model = build('keel', n_layer=3)
    batches = [(torch.stack([window(seed=s) for s in seeds]), torch.stack([window(seed=s + 9) for s in seeds]))
               for seeds in ((1, 2, 3), (4,))]
    loss, without = analyze.skipping(model, batches)
    x, y = (torch.cat([batch[i] for batch in batches]) for i in range(2))
    assert loss == pytest.approx(model(x, y)[1].item())
    blocks = list(model.transformer.h)
    for i in range(3):
        model.transformer.h = torch.nn.ModuleList(blocks[:i] + blocks[i + 1:])
        assert without[i] == pytest.approx(model(x, y)[1].item())


# -----------------------------------------------------------------------------
# the script


@pytest.fixture(scope='module')
def some_runs(data, tmp_path_factory):
    """Folders of short runs of four kinds of modes, a checkpoint with nan in it, and data of another vocabulary."""
    from conftest import run_train
    folder = tmp_path_factory.mktemp('runs')
    for mode in ('pre_ln', 'proj_spheret', 's2hc', 'mhc'):
        run_train(dataset=data, out_dir=folder / mode, residual=mode, dropout=0.2)
    ruined = torch.load(folder / 'pre_ln' / 'ckpt.pt')
    ruined['model']['transformer.ln_f.weight'][0] = math.nan
    torch.save(ruined, folder / 'ruined.pt')
    write_dataset(folder / 'other', get_tokenizer({'name': 'char', 'chars': 'abc'}), 'abcabc' * 200, 'other', '0')
    return folder


def test_pictures_and_numbers(some_runs, script, capsys):
    paths = [some_runs / mode for mode in ('pre_ln', 'proj_spheret', 's2hc', 'mhc')]
    script('analyze.py', plot=True, runs=','.join(map(str, paths)), samples=20, jacobians=2, device='cpu')
    out = some_runs / 'pre_ln' / 'analysis'
    pictures = {'stream', 'blocks', 'jacobian', 'sphere', 'mixing', 'matrices', 'entries'}
    assert {path.name for path in out.iterdir()} == {f'{name}.png' for name in pictures} | {'analysis.json'}
    for name in pictures:
        image = np.asarray(Image.open(out / f'{name}.png').convert('L'))
        assert min(image.shape) > 300 and len(np.unique(image)) > 20  # something is drawn
    found = json.loads((out / 'analysis.json').read_text(), parse_constant=lambda name: pytest.fail(name))['runs']
    assert list(found) == ['pre_ln', 'proj_spheret', 's2hc', 'mhc'] and found['mhc']['tokens'] == 20
    for mode, r in found.items():
        assert r['sublayers'] == 4 and r['step'] == 6 and len(r['loss_without_block']) == 2
        for name in ('norm', 'kurtosis', 'cosine', 'largest', 'smallest', 'largest_through'):
            assert len(r[name]['median']) == 4 and all(
                a <= b <= c for a, b, c in zip(r[name]['low'], r[name]['median'], r[name]['high'])), (mode, name)
    sphere = found['proj_spheret']
    assert sphere['norm']['median'] == pytest.approx([sphere['radius']] * 4, rel=1e-6)
    assert sphere['angular_budget'].keys() == {'1-1', '2-3', '4-4'} and len(sphere['alpha']) == 4
    assert found['s2hc']['H_res']['column_sums_off_through'][-1] < 1e-6
    text = capsys.readouterr().out
    assert f'{found["mhc"]["loss"]:.4f}' in text and 'jacobian.png' in text


def test_the_numbers_of_a_run(some_runs, script, data, tmp_path):
    """analysis.json of a sphere, again from its windows: spread over the split, without dropout."""
    script('analyze.py', plot=True, runs=some_runs / 'proj_spheret', samples=5, jacobians=0, out_dir=tmp_path)
    found = json.loads((tmp_path / 'analysis.json').read_text())['runs']['proj_spheret']
    model = checkpoint.open_model(some_runs / 'proj_spheret')[0].double().eval()
    tokens = np.fromfile(data / 'val.bin', dtype=np.uint16).astype(np.int64)
    starts = [int(k) * 16 for k in np.linspace(0, (len(tokens) - 1) // 16 - 1, 5)]
    x, y = (torch.from_numpy(np.stack([tokens[s + shift:s + shift + 16] for s in starts])) for shift in (0, 1))
    assert found['loss'] == pytest.approx(model(x, y)[1].item(), rel=1e-12) and found['tokens'] == 5
    at = np.random.default_rng(1337).integers(8, 16, 5)
    assert found['uniform_attention'] == pytest.approx(np.mean([1 / (t + 1) for t in at]))
    angles, norms = np.empty((5, 4)), np.empty((5, 4))
    for b in range(5):
        states = [state[0, at[b]].detach().numpy() for state in states_of(model, x[b])]
        for l, (before, after) in enumerate(zip(states, states[1:])):
            sine = np.linalg.norm(after - before * (before @ after) / (before @ before))
            angles[b, l] = math.atan2(sine, before @ after / np.linalg.norm(before))
            norms[b, l] = np.linalg.norm(after)
    for name, values in (('angle', angles), ('norm', norms)):
        for which, share in (('low', 0.25), ('median', 0.5), ('high', 0.75)):
            wanted = np.quantile(values, share, axis=0)
            np.testing.assert_allclose(found[name][which], wanted, rtol=1e-6, atol=1e-12)
    one, two, three, four = angles.mean(0)**2
    assert found['angular_budget'] == pytest.approx({'1-1': one, '2-3': two + three, '4-4': four})
    raw = [res.step.raw.item() for res, _ in connections(model)]
    wanted = [min(1.0, math.log1p(math.exp(r))) / math.sqrt(l) for l, r in enumerate(raw, 1)]
    assert found['alpha'] == pytest.approx(wanted)


def test_one_run_and_two_of_a_mode(some_runs, script, tmp_path):
    script('analyze.py', plot=True, runs=some_runs / 'pre_ln', samples=3, jacobians=0, out_dir=tmp_path / 'a',
           dtype='float32')
    assert {path.name for path in (tmp_path / 'a').iterdir()} == {'stream.png', 'blocks.png', 'analysis.json'}
    pair = f'{some_runs / "s2hc"},{some_runs / "s2hc" / "last.pt"}'
    script('analyze.py', plot=True, runs=pair, samples=3, jacobians=1, smallest=False, out_dir=tmp_path / 'b')
    found = json.loads((tmp_path / 'b' / 'analysis.json').read_text())['runs']
    assert list(found) == [f's2hc ({some_runs / "s2hc"})', f's2hc ({some_runs / "s2hc" / "last.pt"})']
    assert all('smallest' not in run and 'largest' in run for run in found.values())
    script('analyze.py', plot=True, runs=some_runs / 'pre_ln', samples=3, jacobians=0, out_dir=tmp_path / 'b')
    assert {path.name for path in (tmp_path / 'b').iterdir()} == {'stream.png', 'blocks.png', 'analysis.json'}


@pytest.mark.parametrize('keys, match', [
    (dict(runs='nowhere'), r'nowhere: there is no such checkpoint'), (dict(runs=''), 'runs = : name one'),
    (dict(runs='{pre_ln},{pre_ln}'), 'each once'), (dict(samples=0), '--samples=0: samples must be'),
    (dict(dtype='float16'), 'dtype must be one of float64, float32'),
    (dict(dataset='nowhere'), r'dataset: there is no folder .*nowhere'),
    (dict(runs='{pre_ln},{pre_ln}/'), 'each once'), (dict(runs='{pre_ln},nowhere'), 'nowhere: there is no such'),
    (dict(dataset='{pre_ln}/../other'), r'dataset = .*other: has another tokenizer or vocabulary than .*pre_ln'),
    (dict(runs='{pre_ln}/../ruined.pt'), r'ruined\.pt: its loss is nan: the weights are ruined'),
    (dict(out_dir='{pre_ln}/ckpt.pt'), r'out_dir = .*ckpt\.pt: cannot be written to'),
])
def test_mistakes_are_one_line(some_runs, script, keys, match):
    keys = {key: str(value).format(pre_ln=some_runs / 'pre_ln') for key, value in keys.items()}
    with pytest.raises(UserError, match=match) as e:
        script('analyze.py', plot=True, **{'runs': some_runs / 'pre_ln', 'samples': 2, 'jacobians': 0, **keys})
    assert '\n' not in str(e.value)


def test_words_without_dashes_are_runs(monkeypatch):
    seen = {}
    monkeypatch.setattr(analyze.sys, 'argv', ['analyze.py', 'a', '--runs=b'])
    with pytest.raises(UserError, match='not both'):
        analyze.main()
    monkeypatch.setattr(analyze.sys, 'argv', ['analyze.py', 'a', 'b', '--samples=3'])
    monkeypatch.setattr(analyze, 'configure', lambda *args, **more: seen.update(more) or exit())
    with pytest.raises(SystemExit):
        analyze.main()
    assert seen['argv'] == ['--samples=3', '--runs=a,b']


def test_what_stands_under_a_title(monkeypatch, tmp_path):
    from matplotlib import pyplot
    figures, keys = [], ('norm', 'cosine', 'kurtosis', 'peak')
    for name, value in dict(pyplot=pyplot, out_dir=str(tmp_path), styles={'a': analyze.STYLES[0]}).items():
        monkeypatch.setattr(analyze, name, value, raising=False)
    monkeypatch.setattr(pyplot, 'close', figures.append)
    analyze.draw_stream({'a': {key: [i + 1.0, i + 2.0] for i, key in enumerate(keys)}})
    for i, (axis, word) in enumerate(zip(figures[0].axes, ('norm', 'cosine', 'kurtosis', 'largest over'))):
        assert word in axis.get_title() and list(axis.lines[0].get_ydata()) == [i + 1.0, i + 2.0]


def test_every_run_is_in_both_histograms(monkeypatch, tmp_path):
    from matplotlib import pyplot
    figures, draw = [], torch.Generator().manual_seed(0)
    for name, value in dict(pyplot=pyplot, out_dir=str(tmp_path), styles=dict(zip('ab', analyze.STYLES))).items():
        monkeypatch.setattr(analyze, name, value, raising=False)
    monkeypatch.setattr(pyplot, 'close', figures.append)
    analyze.draw_entries({name: torch.rand(5, 3, 4, 4, generator=draw) for name in 'ab'})
    assert [len(axis.patches) for axis in figures[0].axes] == [2, 2]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ['a', 'b']
