# Eight modes on Shakespeare, character by character, in about 20 minutes on two CPU cores:
# python ablate.py config/ablate_quick.py

from config.ablate_small import *

modes = 'pre_ln,peri_ln,keel,geonorm,p_spheret,hc,mhc,s2hc'
seeds = '1,2,3'
jobs = 2
out_dir = 'out-ablate-quick'
eval_tokens = 65536
batch_size = 32
learning_rate = 3e-3  # the sphere modes and Peri-LN want a smaller one than config/default.py's, see docs/log.md
max_iters = 600
lr_decay_iters = 600
warmup_iters = 50
