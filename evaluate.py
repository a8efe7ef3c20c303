"""
The papers' benchmarks, by lm-evaluation-harness, on any checkpoint.

    python evaluate.py OUT_DIR --tasks=paper_sr              [SR]'s eleven tasks; also paper_s2, paper_pe
    python evaluate.py gpt2 --tasks=piqa,hellaswag --limit=100
    python evaluate.py OUT_DIR --tasks=mine --include_path=FOLDER    a task of your own, as the harness' YAML
    python evaluate.py OUT_DIR --perplexity=FILE             bits per byte and per token of any text
    python evaluate.py --compare OUT_DIR OUT_DIR ...         what has been measured, beside the papers' numbers
    torchrun --standalone --nproc_per_node=8 evaluate.py OUT_DIR --tasks=paper_sr

OUT_DIR is the folder of a run (its ckpt.pt), a checkpoint file, gpt2 (-medium, -large, -xl) or a folder of
transformers' save_pretrained. Tables are printed; eval.json has the last evaluation with everything that it depends on,
results.jsonl all of them, a line each. The harness is an optional package: pip install "lm_eval[hf]==0.4.13".

[SR], [S2] and [PE] are papers of CITATION.bib; their numbers are in docs/papers.json.
"""
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import platform
import random
import socket
import sys
import time
import urllib.parse
import urllib.request
import zlib
from functools import lru_cache, partial
from itertools import count

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from checkpoint import DTYPES, autocast, open_model, open_tokenizer, pick_device
from configurator import UserError, configure, did_you_mean, require
from data.tokenizer import get_tokenizer
from docs import papers
from docs.papers import PAPERS

try:
    from lm_eval.api.model import TemplateLM
except ModuleNotFoundError:
    TemplateLM = object  # --help, --perplexity and --compare do without; evaluate_tasks says what to install

# -----------------------------------------------------------------------------
# what to measure
out_dir = 'out'     # what to evaluate, see above; the word without dashes on the command line is this key
tasks = ''          # the harness' names, or YAML files, with commas between them; paper_sr, paper_s2, paper_pe
limit = 0           # only the first so many examples of each task; 0 = all
shots = -1          # examples in the prompt; -1 = the paper's, or the task's own
include_path = ''   # a folder of YAML tasks of your own
perplexity = ''     # a text file: bits per byte and per token
stride = 0          # --perplexity: tokens predicted in a window, the others are context; 0 = half of block_size
compare = ''        # folders with commas between them: print their results beside the papers'
table = None        # --compare: with this table only; None = all that have a column in common
# how
batch_size = 16     # windows of block_size tokens at once, or as many shorter ones as have so many tokens
seed = 1234         # of the examples in the prompts and of sampled texts; 1234 = the harness'
device = 'auto'     # cpu, cuda, cuda:N, mps; auto = the best that there is
dtype = 'auto'      # auto = bfloat16 on CUDA (float16 where it has none), float32 elsewhere
# -----------------------------------------------------------------------------
ROOT = os.path.dirname(os.path.abspath(__file__))

# -----------------------------------------------------------------------------
# the model, as the harness sees it


def strided(tokens, start, block_size, stride):
    """(window, n): its last n tokens are to be predicted. Together all of tokens[start:], each once, at most stride a
    window, with as much before them as the model can see. tokens: a list with 1 <= start."""
    for i in range(start, len(tokens), stride):
        end = min(i + stride, len(tokens))
        yield tokens[max(0, end - block_size - 1):end], end - i


def pack(inputs, longest):
    """
    Rows that share what their members begin with: [(P, members)], members being indices of `inputs` (lists of tokens)
    that have their first P tokens in common. A row is these P tokens once and the rest of each member, together at most
    `longest` tokens if it has two members or more. Who shares little stays alone: a mask has its price too.
    """
    rows = []
    for i in sorted(range(len(inputs)), key=inputs.__getitem__):  # neighbours are those with the longest common prefix
        new = inputs[i]
        if rows:
            P, members, size = rows[-1]
            shared = len(os.path.commonprefix([inputs[members[0]][:P], new]))
            saved = len(members) * shared - (len(members) - 1) * P
            if saved >= len(new) / 4 and size + len(new) - saved <= longest:
                rows[-1] = shared, [*members, i], size + len(new) - saved
                continue
        rows.append((len(new), [i], len(new)))
    return [(P, members) for P, members, _ in rows]


def attend(attn, mask, cache, x):
    """CausalSelfAttention.forward in evaluation, with a mask (B, 1, T, S), None = causal, and a cache: None, or a list
    of the keys and values (B, H, S - T, C/H) before x (B, T, C), which then holds those of x too."""
    B, T, C = x.shape
    q, k, v = attn.c_attn(x).view(B, T, 3, attn.n_head, C // attn.n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, C/H)
    if cache is not None:
        if cache:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        cache[:] = k, v
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return attn.c_proj(y.transpose(1, 2).reshape(B, T, C))


class ResidualLM(TemplateLM):
    """
    A GPT for lm-evaluation-harness. It gives the numbers of the harness' own `hf` model, and also takes what that
    refuses: empty continuations (log-likelihood 0), continuations and generations longer than the block. Faster, since
    requests that begin alike (the choices of a question, questions after the same examples) go through the model as one
    row, and only what is to be predicted through the head. With torch.distributed every process must get the same
    requests; each does its share and all have the results, which therefore do not depend on the number of processes.
    """

    def __init__(self, model, tokenizer, device, dtype='float32', batch_size=16, seed=1234, quiet=False):
        """model: a GPT in eval mode on `device`. tokenizer: of data/tokenizer.py. quiet: no progress bar."""
        super().__init__()
        self.model, self.n_vocab, self.decode = model, tokenizer.n_vocab, tokenizer.decode
        self.encode = lru_cache(64)(tokenizer.encode)  # the harness encodes a context once for each of its choices
        self._device, self.dtype, self.seed, self.quiet = torch.device(device), dtype, seed, quiet
        self.max_length = model.config.block_size
        self.tokens = batch_size * self.max_length  # of a batch
        self.rank_, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        identity = tokenizer.identity
        self.eot = identity.get('eot')  # a text may end with it; characters have none
        begin = [self.eot] if 'eot' in identity else tokenizer.encode('\n') if '\n' in identity['chars'] else [0]
        self.begin, = begin  # what stands before an empty context

    @property
    def eot_token_id(self):
        return self.begin

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.encode(string)

    # how much at once, and who does it

    def batches(self, lengths):
        """Lists of indices with at most self.tokens tokens, padding counted, the longest first; this process' share."""
        found = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= self.tokens:
                found[-1].append(i)
            else:
                found.append([i])
        return found[self.rank_::self.world]

    def gather(self, mine):
        """The union of a dict over the processes."""
        if self.world == 1:
            return mine
        dist.all_gather_object(parts := [None] * self.world, mine)
        return {key: value for part in parts for key, value in part.items()}

    def bar(self, total, what):
        return tqdm(total=total, desc=what, disable=self.quiet or self.rank_ > 0)

    def hidden(self, idx, positions, mask=None, caches=None):
        """What the head reads, (B, T, C). idx, positions (B, T) or, the same for all, (T,); mask and caches as in
        attend, a cache a block."""
        t, own = self.model.transformer, mask is not None or caches is not None
        for block, cache in zip(t.h, caches or [None] * len(t.h)) if own else ():
            block.attn.forward = partial(attend, block.attn, mask, cache)
        try:
            with autocast(self._device, self.dtype):
                x = t.open(t.drop(t.emb(t.wte(idx) + t.wpe(positions))))
                for block in t.h:
                    x = block(x)
                return t.ln_f(t.close(x))
        finally:
            for block in t.h if own else ():
                del block.attn.forward

    def logits(self, x):
        """(..., V) from (..., C), without the padding of the vocabulary, float32 or better."""
        with autocast(self._device, self.dtype):
            logits = self.model.lm_head(x)[..., :self.n_vocab]
        return logits if logits.dtype == torch.float64 else logits.float()

    # log-likelihoods

    @torch.no_grad()
    def score(self, windows, what='scoring'):
        """[(log-likelihood in nats, whether it is the greedy choice)] of the last n tokens of (tokens, n) windows."""
        inputs = [tokens[:-1] for tokens, _ in windows]
        rows = pack(inputs, 2 * self.max_length)
        sizes = [P + sum(len(inputs[i]) - P for i in members) for P, members in rows]
        found, batches = {}, self.batches(sizes)
        bar = self.bar(sum(len(rows[r][1]) for batch in batches for r in batch), what)
        for batch in batches:
            T = max(sizes[r] for r in batch)
            idx, positions, segments = np.zeros((3, len(batch), T), dtype=np.int64)
            where, targets = [], []  # of all that is predicted: place in the flat batch, and the token
            for b, r in enumerate(batch):
                P, members = rows[r]
                idx[b, :P], positions[b, :P] = inputs[members[0]][:P], range(P)
                end = P
                for segment, i in enumerate(members, 1):
                    tokens, n = windows[i]
                    branch, first = inputs[i][P:], len(inputs[i]) - n
                    own = slice(end, end + len(branch))
                    idx[b, own], positions[b, own], segments[b, own] = branch, range(P, len(inputs[i])), segment
                    where += [b * T + (t if t < P else t - P + end) for t in range(first, len(inputs[i]))]
                    targets += tokens[len(tokens) - n:]
                    end = own.stop
            idx, positions, segments, where, targets = (
                torch.as_tensor(a).to(self._device) for a in (idx, positions, segments, where, targets))
            mask = None
            if any(len(rows[r][1]) > 1 for r in batch):  # see what is before: the common part and the own branch
                mask = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])  # (B, T, T)
                mask = mask.tril_()[:, None]
            x = self.hidden(idx, positions, mask).flatten(0, 1)[where]  # (N, C)
            scores, greedy = [], []
            for part, target in zip(x.split(1024), targets.split(1024)):  # (N, V) in one piece may be gigabytes
                logits = self.logits(part)
                scores += (logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1)).tolist()
                greedy += (logits.argmax(1) == target).tolist()
            end = 0
            for i in (i for r in batch for i in rows[r][1]):
                own = slice(end, end := end + windows[i][1])
                found[i] = math.fsum(scores[own]), all(greedy[own])
            bar.update(sum(len(rows[r][1]) for r in batch))
        bar.close()
        found = self.gather(found)
        return [found[i] for i in range(len(windows))]

    def totals(self, texts, what):
        """`score` for texts that are lists of windows each."""
        scores = iter(self.score([window for text in texts for window in text], what))
        found = [[next(scores) for _ in text] for text in texts]
        return [(math.fsum(ll for ll, _ in text), all(greedy for _, greedy in text)) for text in found]

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = []
        for context, continuation in (request.args for request in requests):
            before, after = self._encode_pair(context, continuation) if context else ([], self.encode(continuation))
            if not before:  # as the harness has it: a text that already begins with the token does not get another
                before, after = (after[:1], after[1:]) if after[:1] == [self.begin] else ([self.begin], after)
            pairs.append(((context, continuation), before, after))
        return self._loglikelihood_tokens(pairs)

    def _loglikelihood_tokens(self, requests, **kwargs):
        # a continuation longer than the block is predicted block by block
        block = self.max_length
        texts = [list(strided(before + after, len(before), block, block)) for _, before, after in requests]
        return self.totals(texts, 'log-likelihoods')

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        block = self.max_length
        texts = [list(strided([self.begin, *self.encode(text)], 1, block, block)) for text, in
                 (request.args for request in requests)]
        return [ll for ll, _ in self.totals(texts, 'rolling log-likelihoods')]

    # generation

    def generate_until(self, requests, disable_tqdm=False):
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
        jobs, repeats = {}, {}  # settings -> [(index of the request, context, seed)]
        for i, request in enumerate(requests):
            context, kwargs = request.args
            key = json.dumps(kwargs, sort_keys=True)
            draw = f'{self.seed} {request.task_name} {request.doc_id} {request.idx} {context}'
            repeats[draw] = repeats.get(draw, -1) + 1  # not its place in the batch: the text must not depend on that
            jobs.setdefault(key, []).append(
                (i, self.encode(context) or [self.begin], zlib.crc32(f'{draw} {repeats[draw]}'.encode())))
        found = {}
        for key, job in jobs.items():
            kwargs = normalize_gen_kwargs(json.loads(key), 256)
            until = handle_stop_sequences(kwargs.pop('until'), None if self.eot is None else '<|endoftext|>')
            until = [text for text in until if text]
            settings = {name: kwargs.pop(name) for name in ('temperature', 'top_k', 'top_p') if name in kwargs}
            if not kwargs.pop('do_sample'):
                settings = {}
            new = kwargs.pop('max_gen_toks')
            if kwargs:
                raise UserError(f'generation_kwargs of a task has {", ".join(kwargs)}: known are until, do_sample, '
                                'temperature, top_k, top_p and max_gen_toks')
            batches = self.batches([min(len(ids) + new, self.max_length) for _, ids, _ in job])
            bar = self.bar(sum(map(len, batches)), 'generating')
            for batch in batches:
                index, contexts, seeds = zip(*(job[j] for j in batch))
                texts = self.generate(contexts, until, new, seeds, **settings)
                found |= {i: postprocess_generated_text(text, until, None) for i, text in zip(index, texts)}
                bar.update(len(batch))
            bar.close()
        found = self.gather(found)
        return [found[i] for i in range(len(requests))]

    @torch.no_grad()
    def generate(self, contexts, until, max_new_tokens, seeds, temperature=0.0, top_k=0, top_p=1.0):
        """
        Texts that continue `contexts` (lists of tokens), each until it has one of the strings `until`, ends by itself,
        or has max_new_tokens tokens. Long contexts lose their beginning, so that all fits into the block. What does
        not, goes on from the last half block.
        """
        block = self.max_length
        keep = block - max_new_tokens if max_new_tokens < block else max(block // 2, 1)
        look_back = max((len(text.encode()) for text in until), default=0)  # a token has a byte at least
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        new, running = [[] for _ in contexts], [True] * len(contexts)
        rows = [context[-keep:] for context in contexts]
        while any(running):
            lengths = torch.tensor([len(row) for row in rows], device=self._device)
            P = max(map(len, rows))
            idx = torch.tensor([row + [0] * (P - len(row)) for row in rows], device=self._device)
            caches = [[] for _ in self.model.transformer.h]
            x = self.hidden(idx, torch.arange(P, device=self._device), caches=caches)
            x = x[torch.arange(len(rows)), lengths - 1]  # (B, C)
            for g in count():
                logits = self.logits(x)
                tokens = logits.argmax(-1).tolist() if not temperature else [
                    draw(row, temperature, top_k, top_p, generator) for row, generator in zip(logits.cpu(), draws)]
                for i, token in enumerate(tokens):
                    if running[i] and token == self.eot:
                        running[i] = False
                    elif running[i]:
                        new[i].append(token)
                        tail = self.decode(new[i][-look_back:]) if look_back else ''
                        running[i] = len(new[i]) < max_new_tokens and not any(text in tail for text in until)
                if not any(running) or P + g >= block:
                    break
                column = torch.arange(P + g + 1, device=self._device)
                mask = (column < lengths[:, None]) | (column >= P)  # (B, S): what is generated begins at P, for all
                x = self.hidden(torch.tensor(tokens, device=self._device)[:, None], (lengths + g)[:, None],
                                mask[:, None, None], caches)[:, 0]
            rows = [(context + more)[-(block // 2 or 1):] for context, more in zip(contexts, new)]
        return [self.decode(ids) for ids in new]


def draw(logits, temperature, top_k, top_p, generator):
    """A token from logits (V,) on the CPU; top_p: only the likeliest ones that together have this probability."""
    p = (logits.double() / temperature).softmax(-1)
    if top_k or top_p < 1:
        likeliest = p.sort(descending=True).values[:top_k or None]
        before = likeliest.cumsum(0) - likeliest
        p = p * (p >= likeliest[before < top_p * likeliest.sum()][-1])
    return torch.multinomial(p, 1, generator=generator).item()


# -----------------------------------------------------------------------------
# tasks


def fetching(load, path, name=None, **kwargs):
    """datasets.load_dataset with one-line errors; without a network it says so at once, not after a minute."""
    from datasets import config as offline_too
    from huggingface_hub import constants
    local = path in ('json', 'csv', 'parquet', 'arrow', 'text') or os.path.exists(path)
    if not local and not constants.HF_HUB_OFFLINE and not urllib.request.getproxies():
        hub = urllib.parse.urlparse(constants.ENDPOINT)
        try:
            socket.create_connection((hub.hostname, hub.port or 443), timeout=3).close()
        except OSError:
            constants.HF_HUB_OFFLINE = offline_too.HF_HUB_OFFLINE = True  # what is in its cache still loads
    try:
        return load(path, name, **kwargs)
    except Exception as e:  # of a hub, a proxy, a parser
        words = ', '.join(repr(word) for word in (path, name) if word)
        files = kwargs.get('data_files', '')
        how = f'see its dataset_kwargs {files}' if local else (
            f'where there is a network, run: python -c "import datasets; datasets.load_dataset({words})" and copy '
            '~/.cache/huggingface here')
        raise UserError(f'the data of a task, {words}: {type(e).__name__}: {str(e).splitlines()[0][:200]}; {how}'
                        ) from None


@contextlib.contextmanager
def keeping_random_states(device='cpu'):
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if torch.device(device).type == 'cuda' else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def loading():
    """While the harness loads tasks: fetching(), and some tasks import a package by the name of this file."""
    import datasets
    load, path, ours = datasets.load_dataset, list(sys.path), sys.modules.pop('evaluate', None)
    datasets.load_dataset = partial(fetching, load)
    sys.path[:] = [folder for folder in path if os.path.abspath(folder) != ROOT]
    try:
        yield
    finally:
        datasets.load_dataset, sys.path[:] = load, path
        if ours:
            sys.modules['evaluate'] = ours


def load_tasks(names, include_path='', key='tasks'):
    """TaskManager.load of names, YAML files or dicts. The harness' own index, which takes it 14 s, only if needed.
    key: what an error names."""
    require('lm_eval', key)
    names = [name for name in names if name]
    if lost := [name for name in names if str(name).endswith('.yaml') and not os.path.isfile(name)]:
        raise UserError(f'{key}: there is no file {lost[0]}')
    logging.getLogger('lm_eval').setLevel(logging.ERROR)
    if presets := set(names) & set(PAPERS['presets']):
        raise UserError(f'{key}: {min(presets)} is a preset of evaluate.py: name the tasks themselves')
    from lm_eval.tasks import TaskManager
    folder = os.path.expanduser(include_path)
    if folder and not os.path.isdir(folder):
        raise UserError(f'include_path = {include_path}: there is no such folder')
    for own_only in (True, False):
        manager = TaskManager(include_path=folder or None, include_defaults=not own_only)
        unknown = [name for name in names if isinstance(name, str)
                   and not (name in manager.task_index or name.endswith('.yaml') and os.path.isfile(name))]
        if not unknown:
            break
    else:
        near = did_you_mean(unknown[0], [*manager.task_index, *PAPERS['presets']])
        raise UserError(f'{key}: the harness has no {unknown[0]}{near or ", nor has include_path"}')
    try:
        with loading(), keeping_random_states():
            return manager.load(names)
    except UserError:
        raise
    except ImportError as e:
        raise UserError(f'{key}: one needs a package that is missing ({str(e).splitlines()[0]})') from None
    except Exception as e:  # whatever a YAML file may hold
        raise task_error(key, names, e) from None


def task_error(key, names, e):
    said = (str(e) or type(e).__name__).splitlines()[0][:200]
    return UserError(f'{key}: {", ".join(map(str, names))}: {type(e).__name__}: {said}; see the YAML of the task')


def evaluate_tasks(lm, loaded, shots={}, limit=None, seed=1234, bootstrap=1000):
    """
    {task or group: {shots, n, of, version, metrics: {metric: [value, standard error or None]}}} of load_tasks' result.
    shots: task, group or None (= all) -> examples in the prompt. bootstrap: draws for a standard error that has no
    formula; 0 = no standard errors. n of the task's `of` examples were evaluated.
    """
    from lm_eval.evaluator import evaluate
    for key, n in shots.items():
        group = loaded.get('groups', {}).get(key)
        for name, task in loaded['tasks'].items():
            if key in (None, name) or group and name in [task.task_name for task in group.get_all_tasks()]:
                task.set_config('num_fewshot', n)
    for task in loaded['tasks'].values():
        task.set_config('num_fewshot', task.config.num_fewshot or 0)
        task.set_fewshot_seed(seed)
    os.environ.setdefault('DISABLE_MULTIPROC', '1')  # the bootstrap would fork this process, threads, GPU and all
    with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(
            open(os.devnull, 'w') if lm.quiet or lm.rank_ else sys.stderr):
        try:
            raw = evaluate(lm=lm, task_dict=loaded, limit=limit or None, bootstrap_iters=bootstrap, log_samples=False)
        except Exception as e:  # of a template, a metric, a text that the vocabulary cannot write
            raise task_error('tasks', loaded['tasks'], e) from None

    def size(name, which):
        if name in raw['n-samples']:
            return raw['n-samples'][name][which]
        return sum(size(child, which) for child in raw['group_subtasks'].get(name, ()))
    found = {}
    for name, values in raw['results'].items():
        metrics = {}
        for key, value in values.items():
            metric, _, kind = key.partition(',')
            if kind and not metric.endswith('_stderr') and isinstance(value, (int, float)):
                error = values.get(f'{metric}_stderr,{kind}')
                metrics[metric if kind == 'none' else key] = [float(value), error if isinstance(error, float) else None]
        if metrics:
            found[name] = {'shots': raw['n-shot'].get(name), 'n': size(name, 'effective'), 'of': size(name, 'original'),
                           'version': raw['versions'].get(name), 'metrics': metrics}
    return found


def run_tasks(model, tokenizer, loaded, limit, device, dtype):
    """
    {'task/metric': value} of load_tasks' result for a model in training, which stays as it is, and so do all random
    states. limit: examples of each task, 0 = all. Under torch.distributed all processes call this and all get the
    result.
    """
    was_training = model.training
    try:
        with keeping_random_states(device):
            lm = ResidualLM(model.eval(), tokenizer, device, dtype, quiet=True)
            found = evaluate_tasks(lm, loaded, limit=limit, bootstrap=0)
    finally:
        model.train(was_training)
    return {f'{name}/{metric}': v for name, entry in found.items() for metric, (v, _) in entry['metrics'].items()}


class Benchmarks:
    """train.py's eval_tasks, a text with commas, and eval_examples of each. identity: of the tokenizer."""

    def __init__(self, eval_tasks, eval_examples, identity, device, dtype):
        self.loaded = load_tasks(eval_tasks.split(','), key='eval_tasks')
        self.tokenizer, self.limit, self.how = get_tokenizer(identity), eval_examples, (device, dtype)

    def run(self, model, limit):
        return run_tasks(model, self.tokenizer, self.loaded, limit, *self.how)

    def score(self, model, step, say):
        """{'task/metric': value}, printed. What cannot be scored is a note, for no run may end by it."""
        try:
            scores = self.run(model, self.limit)
        except UserError as e:
            say(f'note: {e}')
            return {}
        say(f'step {step}: ' + ', '.join(f'{name} {value:.4f}' for name, value in scores.items()))
        return scores


# -----------------------------------------------------------------------------
# the script


def load(path):
    """(model, tokenizer, facts) of what out_dir names: see the top of this file."""
    model, identity, checkpoint = open_model(path)
    tokenizer = open_tokenizer(identity, model, path)
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(name.encode() + weight.numpy().tobytes())
    return model, tokenizer, {'checkpoint': os.path.abspath(os.path.expanduser(path)) if checkpoint else path,
                              'weights_sha256': digest.hexdigest(), 'step': checkpoint.get('iter_num'),
                              'residual': model.config.residual, 'parameters': model.get_num_params()}


def measure_text(lm, path, stride):
    """An entry of eval.json for a text file, its first token predicted from what stands between documents."""
    try:
        with open(os.path.expanduser(path), encoding='utf-8', newline='') as f:
            text = f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'perplexity={path}: cannot be read as UTF-8 text ({e})') from None
    ids, stride = lm.encode(text), stride or max(lm.max_length // 2, 1)
    if not ids or stride > lm.max_length:
        raise UserError(f'perplexity={path}: an empty text' if not ids else
                        f'stride = {stride}: must be at most block_size, {lm.max_length}')
    windows = list(strided([lm.begin, *ids], 1, lm.max_length, stride))
    nats = -math.fsum(ll for ll, _ in lm.score(windows, os.path.basename(path)))
    bits, size = nats / math.log(2), len(text.encode())
    metrics = {'bits_per_byte': bits / size, 'bits_per_token': bits / len(ids), 'perplexity': math.exp(nats / len(ids))}
    return {'task': path, 'shots': 0, 'n': len(ids), 'of': len(ids), 'version': f'stride {stride}',
            'metrics': {name: [value, None] for name, value in metrics.items()}}


def main():
    words, argv = [word for word in sys.argv[1:] if not word.startswith('-') and not word.endswith('.py')], sys.argv[1:]
    if words:
        key = 'compare' if '--compare' in argv else 'out_dir'
        argv = [word for word in argv if word not in words and word != '--compare'] + [f'--{key}={",".join(words)}']
    config, _ = configure(globals(), argv=argv, positive=('batch_size',),
                          choices={'dtype': ('auto', *DTYPES), 'table': PAPERS['tables']})
    if compare:
        print(papers.compare(compare.split(','), table))
        return
    if not tasks and not perplexity:
        raise UserError('nothing to do: --tasks=paper_sr, paper_s2, paper_pe or any of the harness, --perplexity=FILE, '
                        'or --compare DIR ...')
    started, place, kind = time.time(), *pick_device(
        f'cuda:{os.environ["LOCAL_RANK"]}' if 'LOCAL_RANK' in os.environ and device == 'auto'
        and torch.cuda.is_available() else device, dtype)
    if 'RANK' in os.environ:  # torchrun's; only results travel between the processes
        dist.init_process_group('gloo')
    model, tokenizer, facts = load(out_dir)
    model.to(place).eval()
    if kind == 'float64':
        model.double()
    if tasks:
        require('lm_eval', f'tasks={tasks}')
    lm = ResidualLM(model, tokenizer, place, kind, batch_size, seed)
    found, presets = [], PAPERS['presets']
    for names in [[name] for name in tasks.split(',') if name in presets] + [
            [name for name in tasks.split(',') if name and name not in presets]]:
        few = {task: n for name in names if name in presets for task, n, _ in presets[name]['columns'].values()}
        if names:
            entries = evaluate_tasks(lm, load_tasks(list(few) or names, include_path),
                                     few if shots < 0 else {None: shots}, limit, seed)
            found += [{'task': name, **entry} for name, entry in entries.items()]
    if perplexity:
        found.append(measure_text(lm, perplexity, stride))
    if lm.rank_ == 0:
        versions = {name: importlib.metadata.version(name) for name in ('torch', 'numpy', 'lm_eval', 'transformers',
                    'datasets') if importlib.util.find_spec(name)} | {'python': platform.python_version()}
        results = {'time': time.strftime('%Y-%m-%dT%H:%M:%S'), **facts, 'config': config, 'device': str(place),
                   'dtype': kind, 'processes': lm.world, 'seconds': round(time.time() - started, 1),
                   'versions': versions, 'tasks': found}
        print(papers.format_table([['task', 'shots', 'n', 'metric', 'value', 'standard error']] + [
            [e['task'], str(e['shots']), str(e['n']), metric, f'{value:.4f}', '' if error is None else f'{error:.4f}']
            for e in found for metric, (value, error) in e['metrics'].items()]))
        path = os.path.expanduser(out_dir)
        folder = path if os.path.isdir(path) else os.path.dirname(path) if os.path.isfile(path) else f'out/{path}'
        try:
            os.makedirs(folder or '.', exist_ok=True)
            with open(os.path.join(folder, 'eval.json'), 'w', encoding='utf-8') as f:
                json.dump(results, f, indent=1)
            with open(os.path.join(folder, 'results.jsonl'), 'a', encoding='utf-8') as f:
                f.write(json.dumps(results) + '\n')
        except OSError as e:
            raise UserError(f'{folder}: the results could not be written ({e.strerror})') from None
        print(f'written to {os.path.join(folder, "eval.json")}, added to results.jsonl beside it')
    if lm.world > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    main()
