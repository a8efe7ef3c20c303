# The stability map: the largest learning rate that trains, for each mode and depth; one seed of tiny models, about 10
# minutes on two CPU cores:
# python ablate.py config/ablate_lr.py

from config.ablate_small import *

modes = 'pre_ln,peri_ln,keel,geonorm,p_spheret,proj_spheret,hc,s2hc'
seeds = '1'
grid = 'n_layer=2,8,24 learning_rate=2e-3,8e-3,3.2e-2,1.28e-1'
jobs = 2
out_dir = 'out-ablate-lr'
n_head = 2
n_embd = 32
max_iters = 200
lr_decay_iters = 200
warmup_iters = 20
eval_interval = 200
eval_tokens = 8192
