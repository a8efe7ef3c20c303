# Eight modes on Shakespeare, character by character, in about 20 minutes on two CPU cores:
# python ablate.py config/ablate_quick.py

modes = 'pre_ln,peri_ln,keel,geonorm,p_spheret,hc,mhc,s2hc'
seeds = '1,2,3'
jobs = 2
out_dir = 'out-ablate-quick'

dataset = 'shakespeare_char'
eval_interval = 100
eval_tokens = 65536
log_interval = 10
gradient_accumulation_steps = 1
batch_size = 32
block_size = 32

n_layer = 3
n_head = 4
n_embd = 128

learning_rate = 3e-3  # the sphere modes and Peri-LN want a smaller one than config/default.py's, see docs/log.md
max_iters = 600
lr_decay_iters = 600
warmup_iters = 50
min_lr = 0.0
beta2 = 0.99
device = 'cpu'
