# Does the mixing matrix leave its start, and is the start what the kinds differ in? Here all start alike: near the
# identity (a logit of -8 off the diagonal), less near (-2) and uniform (0). 32 sub-layers, as analyze.py wants them,
# about 25 minutes on two CPU cores:
# python ablate.py config/ablate_init.py

from config.ablate_small import *

modes = 'pre_ln,proj_spheret,mhc,mhc_lite,kromhc,s2hc'
seeds = '1,2,3'
grid = 'res_init=-8,-2,0'
jobs = 2
out_dir = 'out-ablate-init'
n_layer = 16
n_head = 2
n_embd = 64
learning_rate = 2e-3
max_iters = 600
lr_decay_iters = 600
