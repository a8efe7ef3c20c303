# Does a mode gain or lose with depth? 4 to 64 narrow layers, against pre_ln at the same depth, about 40 minutes on two
# CPU cores:
# python ablate.py config/ablate_depth.py

from config.ablate_small import *

modes = 'pre_ln,keel,p_spheret,proj_spheret,s2hc'
seeds = '1,2,3'
grid = 'n_layer=4,8,16,32,64'
jobs = 2
out_dir = 'out-ablate-depth'
n_head = 2
n_embd = 32
learning_rate = 1e-3
max_iters = 300
lr_decay_iters = 300
