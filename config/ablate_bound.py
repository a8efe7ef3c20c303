# The bounds of the step size and the radius of the sphere modes: the straight-through projection against the plain
# clamp of arXiv 2608.02668, which freezes a scalar that starts on its bound:
# python ablate.py config/ablate_bound.py

modes = 'p_spheret,proj_spheret,cay_spheret,geonorm'
seeds = '1,2,3'
grid = 'bound=clamp,project'
against = 'grid'
jobs = 2
out_dir = 'out-ablate-bound'

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
