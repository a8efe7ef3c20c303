"""
Writes text with a trained model.

    python sample.py --out_dir=out --start="O Romeo"
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt --num_samples=3
"""
import os

import torch

from checkpoint import DTYPES, autocast, open_model, open_tokenizer, pick_device
from configurator import UserError, configure

# -----------------------------------------------------------------------------
init_from = 'resume'   # resume = out_dir/ckpt.pt; or gpt2, gpt2-medium, gpt2-large, gpt2-xl, a checkpoint file, or a
                       # folder of transformers' save_pretrained
out_dir = 'out'        # folder of the run
start = '\n'           # the beginning: a text, FILE:path to read it from a file, or nothing
num_samples = 5        # texts
max_new_tokens = 500   # tokens a text
temperature = 0.8      # 1 = as the model thinks, below 1 bolder, 0 = always the likeliest token
top_k = 200            # draw only from the likeliest ones; 0 = from all
seed = 1337            # of the draws
device = 'auto'        # cpu, cuda, cuda:N, mps; auto = the best that there is
dtype = 'auto'         # auto = bfloat16 on CUDA (float16 where it has none), float32 elsewhere
compile = False        # torch.compile the model
# -----------------------------------------------------------------------------
configure(globals(), choices={'dtype': ('auto', *DTYPES)}, positive=('num_samples', 'max_new_tokens'))

out_dir, init_from = os.path.expanduser(out_dir), os.path.expanduser(init_from)
device, dtype = pick_device(device, dtype)
path = os.path.join(out_dir, 'ckpt.pt') if init_from == 'resume' else init_from
model, identity, _ = open_model(path)
tokenizer = open_tokenizer(identity, model, path)

if start.startswith('FILE:'):
    try:
        with open(os.path.expanduser(start[5:]), encoding='utf-8-sig') as f:
            start = f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'start={start}: cannot be read as UTF-8 text ({e})') from None
ids = tokenizer.encode(start)
if not ids:  # nothing to begin with: what stands between documents, or a new line
    ids = [identity['eot']] if 'eot' in identity else tokenizer.encode('\n') if '\n' in identity['chars'] else [0]

model.to(device).eval()
if dtype == 'float64':
    model.double()
if compile:
    model.compile()
torch.manual_seed(seed)
x = torch.tensor([ids], device=device)  # (1, T)
for _ in range(num_samples):
    with autocast(device, dtype):
        y = model.generate(x, max_new_tokens, temperature, top_k, n_vocab=tokenizer.n_vocab)
    print(tokenizer.decode(y[0].tolist()))
    print('---------------')
