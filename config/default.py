# What `make train` runs: a small GPT on Shakespeare, character by character, in about a minute on 2 CPU cores.
# The shape and the learning rate are the best of our search for a laptop (docs/log.md); any --residual= works,
# spheres and peri_ln best with --learning_rate=3e-3.

out_dir = 'out'
eval_interval = 250
eval_tokens = 65536
log_interval = 10

dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 32
block_size = 32

n_layer = 3
n_head = 4
n_embd = 128
residual = 'keel'  # the lowest validation loss of our search at equal CPU time

learning_rate = 6e-3
max_iters = 1000
lr_decay_iters = 1000
warmup_iters = 50
min_lr = 0.0
beta2 = 0.99
