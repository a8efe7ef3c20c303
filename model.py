"""
A GPT whose residual connection is a config key: nanoGPT's model, and three questions that it answers only one way.

    norm         which normalisation            NORMS
    place        where a branch is normalised   in F(N(x)), out N(F(x)), both N(F(N(x))), none F(x)
    connection   how a branch joins the stream  Add, Highway, Sphere, Hyper: a class with three verbs

A residual mode is a row of RESIDUALS: an answer to the three. With 'pre_ln' this is nanoGPT, parameter by parameter.

References: GPT-2 and nanoGPT for the backbone; spheretnorm.py and hyperconn.py for the mathematics of the connections.
Dimensions: B batch, T time, C = n_embd channels, H heads, n streams, l = 0 .. L-1 sub-layers, L = 2 * n_layer.
"""
import math
import zlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hyperconn
from spheretnorm import DECAYS, MAX_ANGLE, P_MIN, Bounded, ScaleNorm, retract

# -----------------------------------------------------------------------------
# norms: a class takes the config


class LayerNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.bias = nn.Parameter(torch.empty(config.n_embd)) if config.bias else None

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.radius = ()  # of the sphere, where x lies on one: a module of the model, in a tuple to be no child of this

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        if self.radius:  # nothing to reduce
            return x * (math.sqrt(x.shape[-1]) / self.radius[0]() * self.weight)
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class DyT(LayerNorm):
    """g tanh(a0 x) + b, no statistics at all. Dynamic Tanh, arXiv 2503.10622."""

    squash = staticmethod(torch.tanh)

    def __init__(self, config):
        super().__init__(config)
        self.a0, self.a0_init = nn.Parameter(torch.empty(())), config.dyt_alpha

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.constant_(self.a0, self.a0_init)

    def forward(self, x):
        y = self.squash(self.a0 * x)
        return self.weight * y if self.bias is None else torch.addcmul(self.bias, self.weight, y)


class Derf(DyT):
    """g erf(a0 x) + b"""

    squash = staticmethod(torch.erf)


NORMS = {'layernorm': LayerNorm, 'rmsnorm': RMSNorm, 'dyt': DyT, 'derf': Derf}
PLACES = ('in', 'out', 'both', 'none')

# -----------------------------------------------------------------------------
# connections: how the output of a branch joins the stream


class Connection(nn.Module):
    """
    One per sub-layer: `connection(x, branch)` returns the new stream, where `branch` maps (B, T, C) to (B, T, C).
    The stream is (B, T, C) unless `open` makes it something else; `close` turns it back before the final norm.
    A connection with parameters of its own fills them in `reset_parameters`, as in torch.nn.
    """

    macs = 0  # multiply-adds a token beyond one a parameter, for flops_per_token

    def __init__(self, config, sublayer):
        super().__init__()

    @staticmethod
    def open(config):
        """The module that makes the stream from the embedding (B, T, C)."""
        return nn.Identity()

    @staticmethod
    def close(config):
        """The module that turns the stream back into (B, T, C)."""
        return nn.Identity()

    def forward(self, x, branch):
        raise NotImplementedError


class Add(Connection):
    """x + F(x)"""

    def forward(self, x, branch):
        return x + branch(x)


class Highway(Connection):
    """N(a x + F(x)), with an outer norm of its own; a = 1 is Post-LN."""

    def __init__(self, config, sublayer, a=1):
        super().__init__(config, sublayer)
        self.a, self.norm = a, NORMS[config.norm](config)

    def forward(self, x, branch):
        return self.norm(self.a * x + branch(x) if self.a != 1 else x + branch(x))


class Keel(Highway):
    """A highway with a = L fixed; the first block stays plain, x + Attn then N(x + MLP). Keel, arXiv 2601.19895."""

    def __init__(self, config, sublayer):
        super().__init__(config, sublayer, a=1 if sublayer < 2 else 2 * config.n_layer)
        if sublayer == 0:
            self.norm = nn.Identity()


class Sphere(Connection):
    """
    h' = R_h(alpha F(h)): the stream stays on a sphere. alpha_l = lambda_l softplus(a_l), softplus(a_l) in (0, 1].
    p: order of the retraction, None = config.p. decay: name of lambda_l, config.decay overrides it.
    """

    open = staticmethod(lambda config: ScaleNorm(config.n_embd, config.bound))

    def __init__(self, config, sublayer, p=None, decay='sqrt'):
        super().__init__(config, sublayer)
        self.p = config.p if p is None else p
        self.decay = DECAYS[config.decay or decay](sublayer + 1, 2 * config.n_layer)  # [SR] counts from l = 1
        self.step = Bounded(0.0, 1.0, config.bound)

    def forward(self, h, branch):
        return retract(h, branch(h), self.decay * self.step(), self.p, MAX_ANGLE)


class Streams(nn.Module):
    """Opens n identical copies: (B, T, C) -> (B, T, n, C)"""

    def __init__(self, config):
        super().__init__()
        self.n = config.n_streams

    def forward(self, x):
        return x.unsqueeze(2).repeat(1, 1, self.n, 1)  # (B, T, n, C)


class Readout(nn.Module):
    """Closes n streams by their mean, or by a learned convex combination ([PE]): (B, T, n, C) -> (B, T, C)"""

    def __init__(self, config):
        super().__init__()
        self.logits = nn.Parameter(torch.empty(config.n_streams)) if config.readout == 'softmax' else None

    def reset_parameters(self):
        if self.logits is not None:
            nn.init.zeros_(self.logits)

    def forward(self, x):
        if self.logits is None:
            return x.mean(2)
        return hyperconn.read(self.logits.softmax(-1).expand(*x.shape[:2], -1), x)


class Hyper(Connection):
    """X' = H_res X + H_post^T F(H_pre X) on n streams; `kind` is a row of hyperconn.KINDS."""

    open, close = Streams, Readout

    def __init__(self, config, sublayer, kind):
        super().__init__(config, sublayer)
        n, C = config.n_streams, config.n_embd
        start = dict(res_init=config.res_init) if kind in hyperconn.STOCHASTIC else {}
        self.mapping = hyperconn.KINDS[kind](n, C, sublayer, config.static, **start)
        self.macs = 2 * n * C + (0 if kind == 'hc_identity' else n * n * C) + self.mapping.macs  # read and write, mix

    def forward(self, x, branch):
        H_pre, H_post, H_res = self.mapping(x)          # (B, T, n), (B, T, n), (B, T, n, n)
        f = branch(hyperconn.read(H_pre, x))            # (B, T, C)
        return hyperconn.write(x, f, H_post, H_res)     # (B, T, n, C)


# -----------------------------------------------------------------------------
# residual modes


class Residual(NamedTuple):
    norm: str             # key of NORMS; also the kind of the final norm
    place: str            # one of PLACES
    connection: type      # a Connection
    options: dict = {}    # keyword arguments of the connection


RESIDUALS = {
    'pre_ln': Residual('layernorm', 'in', Add),
    'post_ln': Residual('layernorm', 'none', Highway),
    'pre_dyt': Residual('dyt', 'in', Add),
    'peri_ln': Residual('layernorm', 'both', Add),
    'keel': Residual('layernorm', 'in', Keel),
    'geonorm': Residual('layernorm', 'none', Sphere, dict(p=math.inf, decay='harmonic')),
    'p_spheret': Residual('layernorm', 'none', Sphere),
    'proj_spheret': Residual('layernorm', 'none', Sphere, dict(p=1.0)),
    'cay_spheret': Residual('layernorm', 'none', Sphere, dict(p=2.0)),
    **{kind: Residual('layernorm', 'in', Hyper, dict(kind=kind)) for kind in hyperconn.KINDS},  # hc, mhc, s2hc ...
}


# every field of GPTConfig that is one of a few names; None where it may be left to the mode
CHOICES = {
    'residual': RESIDUALS,
    'norm': NORMS,
    'place': PLACES,
    'decay': DECAYS,
    'bound': ('project', 'clamp'),
    'readout': ('mean', 'softmax'),
}


@dataclass
class GPTConfig:
    # nanoGPT's fields
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # biases in Linears and norms, as in GPT-2
    # the residual mode and its knobs
    residual: str = 'pre_ln'
    norm: str | None = None   # None = the mode's
    place: str | None = None  # None = the mode's
    n_streams: int = 4           # hyper: number of streams; 1 is the plain residual
    p: float = 0.5               # p_spheret: order of the retraction, inf for the exponential map
    decay: str | None = None  # sphere: step size over depth, a key of DECAYS; None = the mode's
    bound: str = 'project'       # sphere: how alpha and the radius are held, see Bounded
    static: bool = False         # hyper: matrices that do not depend on the token
    readout: str = 'mean'        # hyper: how the streams close, mean or softmax
    res_init: float | None = None  # mhc, mhc_lite, kromhc, s2hc: see Mapping.res_bias; None = the mode's
    dyt_alpha: float = 0.5       # dyt, derf: initial a0
    embed_norm: bool = False     # a norm of the embedding (Peri-LN's option)
    embed_scale: bool = False    # a learned scale of the embedding, first sqrt(n_embd) (DyT's option)
    gelu_tanh: bool = False      # GPT-2's tanh form of the GELU, where nanoGPT has the exact one

    def __post_init__(self):
        """Raises ValueError, in one line, for a model that cannot be."""
        for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_streams'):
            if not isinstance(getattr(self, key), int) or getattr(self, key) < 1:
                raise ValueError(f'{key} = {getattr(self, key)!r}: must be an integer, at least 1')
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            if value not in choices and not (value is None and GPTConfig.__dataclass_fields__[key].default is None):
                raise ValueError(f'{key} = {value!r} does not exist: choose from {", ".join(choices)}')
        if self.n_embd % self.n_head:
            raise ValueError(f'n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout = {self.dropout}: must be in [0, 1)')
        if self.res_init is not None and not -100 <= self.res_init <= 0:
            raise ValueError(f'res_init = {self.res_init}: must be in [-100, 0]; 0 is uniform, -8 about the identity')
        if not self.p >= P_MIN:
            raise ValueError(f'p = {self.p}: the order of a retraction is a number from {P_MIN} on, or inf')


class ConfigView:
    """A config with the mode's own norm and place filled in, that remembers which fields the model has read."""

    def __init__(self, config, **filled):
        self.config, self.filled, self.used = config, filled, set(filled)

    def __getattr__(self, key):
        self.used.add(key)
        return self.filled.get(key, getattr(self.config, key))


# -----------------------------------------------------------------------------
# the transformer


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.approximate = 'tanh' if config.gelu_tanh else 'none'

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate)))


class Block(nn.Module):
    """Two sub-layers, each a branch, normalised where `place` says, and the connection that joins it to the stream."""

    def __init__(self, config, connection, options, layer):
        super().__init__()

        def norm(*places):
            return NORMS[config.norm](config) if config.place in places else nn.Identity()

        self.ln_1 = norm('in', 'both')
        self.attn = CausalSelfAttention(config)
        self.ln_1_out = norm('out', 'both')
        self.res_1 = connection(config, 2 * layer, **options)
        self.ln_2 = norm('in', 'both')
        self.mlp = MLP(config)
        self.ln_2_out = norm('out', 'both')
        self.res_2 = connection(config, 2 * layer + 1, **options)

    def branch_1(self, x):
        return self.ln_1_out(self.attn(self.ln_1(x)))

    def branch_2(self, x):
        return self.ln_2_out(self.mlp(self.ln_2(x)))

    def forward(self, x):
        x = self.res_1(x, self.branch_1)
        x = self.res_2(x, self.branch_2)
        return x


class Embedding(nn.Module):
    """What stands between the sum of the embeddings and the stream: learned scale and norm, both off by default."""

    def __init__(self, config):
        super().__init__()
        self.scale_init = math.sqrt(config.n_embd)
        self.scale = nn.Parameter(torch.empty(())) if config.embed_scale else None
        self.norm = NORMS[config.norm](config) if config.embed_norm else nn.Identity()

    def reset_parameters(self):
        if self.scale is not None:
            nn.init.constant_(self.scale, self.scale_init)

    def forward(self, x):
        return self.norm(x if self.scale is None else self.scale * x)


class GPT(nn.Module):
    def __init__(self, config):
        """config: GPTConfig. Weights come from torch's global seed; what two modes share starts equal."""
        super().__init__()
        self.config = replace(config)  # a copy: crop_block_size changes it
        self.recompute = False  # keep only the streams between blocks for the backward, compute the rest again
        seed = torch.randint(2**31, (), device='cpu').item()  # before any module is built: their constructors draw too
        row = RESIDUALS[config.residual]
        c = ConfigView(config, norm=config.norm or row.norm, place=config.place or row.place)
        connection, options = row.connection, row.options
        if connection is Hyper and c.n_streams == 1:
            connection, options = Add, {}  # one stream is the plain residual, exactly
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd),
            wpe=nn.Embedding(c.block_size, c.n_embd),
            emb=Embedding(c),
            drop=nn.Dropout(c.dropout),
            open=connection.open(c),
            h=nn.ModuleList(Block(c, connection, options, layer) for layer in range(c.n_layer)),
            close=connection.close(c),
            ln_f=NORMS[c.norm](c),
        ))
        for block in self.transformer.h if connection is Sphere else ():
            for norm in (block.ln_1, block.ln_2):
                if isinstance(norm, RMSNorm):
                    norm.radius = (self.transformer.open.radius,)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying
        self.used = c.used | {'residual'}  # the fields that have an effect in this mode
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """
        Each weight draws from a generator of its own, seeded by its name: whatever else a mode has, the parts that
        two modes share start equal. Raises on a parameter that nothing has initialised. On torch's meta device there is
        nothing to do.
        """
        if self.lm_head.weight.is_meta:
            return
        for p in self.parameters():
            p.fill_(math.nan)
        generator = torch.Generator('cpu')  # the same weights whatever device they are for
        for name, module in reversed(list(self.named_modules())):  # parents last: what they set on a child stays
            if isinstance(module, (nn.Linear, nn.Embedding)):
                generator.manual_seed(seed + zlib.crc32(name.encode()))
                # GPT-2: the projections back into the stream are smaller, by the root of their number
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith('c_proj') else 0.02
                module.weight.copy_(std * torch.randn(module.weight.shape, generator=generator, device='cpu'))
                if getattr(module, 'bias', None) is not None:
                    nn.init.zeros_(module.bias)
            elif hasattr(module, 'reset_parameters'):
                module.reset_parameters()
        for name, p in self.named_parameters():
            if p.isnan().any():
                raise RuntimeError(f'nothing initialises {name}: fill it in reset_parameters of its module')

    def forward(self, idx, targets=None):
        """
        idx, targets (B, T) token ids, T <= block_size; targets of -1 do not count.
        Returns logits (B, T, vocab_size) and the mean loss in nats; without targets (B, 1, vocab_size), None.
        """
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f'a sequence of {T} tokens, but block_size is {self.config.block_size}')
        t = self.transformer
        x = t.wte(idx) + t.wpe.weight[:T]    # (B, T, C)
        x = t.open(t.drop(t.emb(x)))         # the stream: (B, T, C), or (B, T, n, C) for hyper-connections
        for block in t.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        x = t.ln_f(t.close(x))               # (B, T, C)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def residual_matrices(self, idx):
        """One (H_pre (B,T,n), H_post (B,T,n), H_res (B,T,n,n)) per sub-layer for idx (B, T); [] for modes without."""
        found = []

        def keep(module, args, out):
            H_pre, H_post, H_res = out
            eye = torch.eye(H_pre.shape[-1], dtype=H_pre.dtype, device=H_pre.device)
            found.append((H_pre, H_post, eye.expand(*H_pre.shape, -1) if H_res is None else H_res))

        hooks = [m.mapping.register_forward_hook(keep) for m in self.modules() if isinstance(m, Hyper)]
        try:
            self(idx)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    @torch.no_grad()
    def health(self, idx):
        """
        Numbers to watch, from a forward pass over idx (B, T): the mean norm of the stream after the last block; where
        the mode has them, how many step sizes and radii (`on_bound` of `bounded`) sit on their upper bound, and how
        far the worst row and the worst column of an H_res is from a sum of 1.
        """
        norms = []
        last = self.transformer.h[-1]
        hook = last.register_forward_hook(lambda module, args, x: norms.append(x.float().norm(dim=-1)))
        try:
            matrices = [H_res for _, _, H_res in self.residual_matrices(idx)]
        finally:
            hook.remove()
        found = {'stream_norm': norms[0].mean().item()}
        if bounded := [m.on_bound() for m in self.modules() if isinstance(m, Bounded)]:
            found |= {'on_bound': int(torch.stack(bounded).sum()), 'bounded': len(bounded)}
        for name, dim in (('row_sums_off', -1), ('column_sums_off', -2)) if matrices else ():
            found[name] = max((H.sum(dim) - 1).abs().max().item() for H in matrices)
        return found

    # -------------------------------------------------------------------------
    # training

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW; what has two dimensions decays, and nothing else: biases, norms, scales and gates never do."""
        params = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decay = [p for p in params.values() if p.dim() >= 2]
        no_decay = [p for p in params.values() if p.dim() < 2]
        groups = [{'params': decay, 'weight_decay': weight_decay}, {'params': no_decay, 'weight_decay': 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ('cuda', 'cpu'))
        bounded = [m for m in self.modules() if isinstance(m, Bounded) and m.raw.requires_grad]
        optimizer.register_step_post_hook(lambda *_: [m.project_() for m in bounded])
        return optimizer

    def get_num_params(self, non_embedding=True):
        """Parameters, without the position embeddings; the token embeddings count, for they are the head too."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def flops_per_token(self):
        """Of a training step: 6 a parameter, and attention's 12 n_layer C T (PaLM, arXiv 2204.02311, appendix B)."""
        c = self.config
        macs = sum(m.macs for m in self.modules() if isinstance(m, Connection))
        return 6 * (self.get_num_params() + macs) + 12 * c.n_layer * c.n_embd * c.block_size

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=312e12):
        """Share of `peak_flops` (A100 bf16 by default) in `fwdbwd_per_iter` sequences of block_size in dt seconds."""
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    def crop_block_size(self, block_size):
        """Shortens the context of a trained model in place."""
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f'block_size = {block_size}: the model has positions for 1 to {self.config.block_size}')
        self.config.block_size = block_size
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight[:block_size], requires_grad=wpe.weight.requires_grad)

    # -------------------------------------------------------------------------
    # using

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, n_vocab=None):
        """
        Continues idx (B, T), one token at a time. temperature 0 takes the likeliest; top_k None or 0 draws from all.
        n_vocab: ids from there on are padding of the vocabulary and never come out.
        """
        if not temperature >= 0 or (top_k or 0) < 0:
            raise ValueError(f'temperature = {temperature}, top_k = {top_k}: neither can be negative')
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :n_vocab].float()  # (B, V)
            if temperature == 0:
                idx_next = logits.argmax(-1, keepdim=True)
            else:
                if top_k:
                    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, [-1]]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # 0 at most: a tiny one cannot overflow
                idx_next = torch.multinomial(logits.softmax(-1), num_samples=1)
            idx = torch.cat((idx, idx_next), 1)
        return idx

    @classmethod
    def from_pretrained(cls, name, override_args=None):
        """
        GPT-2 from transformers: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder that save_pretrained made.
        override_args may set the dropout, nothing else. Raises ValueError for a GPT-2 that this model cannot be.
        """
        from transformers import GPT2LMHeadModel

        override_args = override_args or {}
        if set(override_args) - {'dropout'}:
            raise ValueError(f'only dropout can be overridden in a pretrained GPT-2, not {sorted(override_args)}')
        hf = GPT2LMHeadModel.from_pretrained(name)
        c = hf.config
        plain = (c.activation_function in ('gelu_new', 'gelu_pytorch_tanh', 'gelu') and c.layer_norm_epsilon == 1e-5
                 and c.n_inner in (None, 4 * c.n_embd) and c.scale_attn_weights
                 and not c.scale_attn_by_inverse_layer_idx and c.tie_word_embeddings)
        if not plain:
            raise ValueError(f'{name} is no plain GPT-2: see tie_word_embeddings, activation_function, n_inner')
        model = cls(GPTConfig(block_size=c.n_positions, vocab_size=c.vocab_size, n_layer=c.n_layer, n_head=c.n_head,
                              n_embd=c.n_embd, bias=True, gelu_tanh=c.activation_function != 'gelu', **override_args))
        theirs = hf.state_dict()
        ours = {}
        for key in model.state_dict():
            # OpenAI's Conv1D keeps its weights (in, out)
            conv1d = key.endswith(('attn.c_attn.weight', 'attn.c_proj.weight', 'c_fc.weight', 'mlp.c_proj.weight'))
            ours[key] = theirs[key].t() if conv1d else theirs[key]
        model.load_state_dict(ours)
        return model
