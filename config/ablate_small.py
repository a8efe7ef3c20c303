# What the small grids, config/ablate_*.py, have in common: a GPT for two CPU cores, Shakespeare character by character.
# It holds no grid of its own; from config.ablate_small import * is the first line of theirs.

dataset = 'shakespeare_char'
eval_interval = 100
eval_tokens = 32768
log_interval = 10
gradient_accumulation_steps = 1
batch_size = 16
block_size = 32

n_layer = 3
n_head = 4
n_embd = 128

learning_rate = 3e-3
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
min_lr = 0.0
beta2 = 0.99
device = 'cpu'
