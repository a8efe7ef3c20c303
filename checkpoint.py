"""
Models on disk and on devices: what train.py and sample.py share. Every error is a UserError that names the file.

A checkpoint is nanoGPT's dict (model, optimizer, model_args, iter_num, best_val_loss, config) and the tokenizer's
identity. It holds only tensors and plain types, so torch.load(weights_only=True) opens it: reading one runs no code.
"""
import contextlib
import os
import re

import torch

from configurator import UserError, require
from data.common import replace_file
from model import GPT, GPTConfig

DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def pick_device(device, dtype):
    """torch.device and name of the dtype for the keys of these names; 'auto' takes the best that the machine has."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        if not re.fullmatch(r'cpu|cuda(:\d+)?|mps', device):
            raise RuntimeError('not one of cpu, cuda, cuda:N, mps')
        device = torch.device(device)
        if device.type == 'cuda' and not torch.cuda.is_available():
            raise RuntimeError('this machine, or this build of torch, has no CUDA')
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        why = str(e).splitlines()[0]
        raise UserError(f'device = {device}: cannot be used ({why}); --device=auto takes what there is') from None
    if dtype == 'auto':
        bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported()
        dtype = 'bfloat16' if bf16 else 'float16' if device.type == 'cuda' else 'float32'
    if device.type == 'mps' and dtype == 'float64':
        raise UserError('dtype = float64: mps has none; take --device=cpu')
    return device, dtype


def autocast(device, dtype):
    """The mixed precision context of a dtype; float32 and float64 have none."""
    half = dtype in ('bfloat16', 'float16')
    return torch.autocast(device.type, DTYPES[dtype]) if half else contextlib.nullcontext()


def build_model(model_args, what='the model'):
    """GPT from the fields of GPTConfig."""
    try:
        return GPT(GPTConfig(**model_args))
    except (ValueError, TypeError, RuntimeError) as e:  # RuntimeError: more memory than there is
        raise UserError(f'{what}: {str(e).splitlines()[0][:300]}') from None


def save_checkpoint(checkpoint, path):
    try:
        replace_file(path, lambda aside: torch.save(checkpoint, aside))
    except (OSError, RuntimeError) as e:
        why = str(e).splitlines()[0]
        raise UserError(f'{path}: could not be written ({why}); what was there before is untouched') from None


def load_checkpoint(path):
    """The dict of a checkpoint of this repository or of nanoGPT, on the CPU, the model's parameter names cleaned up."""
    if not os.path.isfile(path):
        raise UserError(f'{path}: there is no such checkpoint; train first, or set --out_dir or --init_from')
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # a damaged file makes torch.load raise anything, or advise to read it unsafely
        raise UserError(f'{path}: not a checkpoint, a damaged one, or one that would run code when read '
                        f'({type(e).__name__}); take another with --init_from=FILE, or train again') from None
    if not (isinstance(checkpoint, dict) and all(isinstance(checkpoint.get(k), dict) for k in ('model', 'model_args'))):
        raise UserError(f'{path}: a foreign checkpoint: no model and model_args, as this repository and nanoGPT write')
    # torch.compile and DDP prefix the names; old nanoGPTs saved the causal mask, which is no parameter
    state = {key.removeprefix('_orig_mod.').removeprefix('module.'): v for key, v in checkpoint['model'].items()}
    checkpoint['model'] = {key: v for key, v in state.items() if not key.endswith(('.attn.bias', '.attn.masked_bias'))}
    return checkpoint


def model_from_checkpoint(checkpoint, path, **overrides):
    """The GPT of a loaded checkpoint; overrides (such as dropout) change fields that its weights do not depend on."""
    unknown = set(checkpoint['model_args']) - set(GPTConfig.__dataclass_fields__)
    if unknown:
        names = ', '.join(sorted(map(str, unknown)))
        raise UserError(f'{path}: a foreign checkpoint: model_args has {names}, unknown here')
    state = checkpoint['model']
    embedding, head = state.get('transformer.wte.weight'), state.get('lm_head.weight')
    if embedding is not None and head is not None and not torch.equal(embedding, head):
        raise UserError(f'{path}: a foreign checkpoint: its head and token embedding differ, here they are one matrix')
    model = build_model({**checkpoint['model_args'], **overrides}, path)
    try:
        model.load_state_dict(state)
    except RuntimeError as e:
        raise UserError(f'{path}: the weights do not fit its model_args ({str(e).splitlines()[1].strip()})') from None
    return model


def pretrained(name, **overrides):
    """GPT.from_pretrained with one-line errors."""
    require('transformers', f'init_from={name}')
    try:
        return GPT.from_pretrained(name, overrides)
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise UserError(f'init_from={name}: could not be loaded ({str(e).splitlines()[0]})') from None
