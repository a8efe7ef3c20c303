# The step size of the sphere modes over depth:
# python ablate.py config/ablate_decay.py

modes = 'p_spheret,proj_spheret,geonorm'
seeds = '1,2,3'
grid = 'decay=sqrt,harmonic,linear,none'
against = 'grid'
jobs = 2
out_dir = 'out-ablate-decay'

dataset = 'shakespeare_char'
eval_interval = 100
eval_tokens = 32768
log_interval = 10
gradient_accumulation_steps = 1
batch_size = 16
block_size = 32

n_layer = 8
n_head = 4
n_embd = 128

learning_rate = 3e-3
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
min_lr = 0.0
beta2 = 0.99
device = 'cpu'
