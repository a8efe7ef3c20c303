# Does a mode gain or lose with depth? 4 to 64 narrow layers, against pre_ln at the same depth, about 40 minutes on two
# CPU cores:
# python ablate.py config/ablate_depth.py

modes = 'pre_ln,keel,peri_ln,geonorm,p_spheret,proj_spheret,hc,s2hc'
seeds = '1,2,3'
grid = 'n_layer=4,8,16,32,64'
jobs = 2
out_dir = 'out-ablate-depth'

dataset = 'shakespeare_char'
eval_interval = 100
eval_tokens = 32768
log_interval = 10
gradient_accumulation_steps = 1
batch_size = 16
block_size = 32

n_head = 2
n_embd = 32

learning_rate = 2e-3
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
min_lr = 0.0
beta2 = 0.99
device = 'cpu'
