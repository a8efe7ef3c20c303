# Does the mixing matrix leave its start, and is the start what the kinds differ in? Here all start alike: near the
# identity (a logit of -8 off the diagonal), less near (-2) and uniform (0), about 10 minutes on two CPU cores:
# python ablate.py config/ablate_init.py

from config.ablate_small import *

modes = 'mhc,mhc_lite,kromhc,s2hc'
seeds = '1,2,3'
grid = 'res_init=-8,-2,0'
jobs = 2
out_dir = 'out-ablate-init'
n_layer = 4
