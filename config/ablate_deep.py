# 28 narrow sub-layers, for analyze.py to look into: what H_res does through depth, and which blocks can be skipped,
# about 15 minutes on two CPU cores:
# python ablate.py config/ablate_deep.py
# python analyze.py out-ablate-deep/mhc-1 out-ablate-deep/s2hc-1

from config.ablate_small import *

modes = 'pre_ln,proj_spheret,mhc,mhc_lite,kromhc,s2hc'
seeds = '1,2,3'
jobs = 2
out_dir = 'out-ablate-deep'
n_layer = 14
n_head = 2
n_embd = 64
learning_rate = 1e-3  # proj_spheret does not train at 2e-3
