# Does the mixing matrix leave its start? The doubly stochastic kinds start near the identity (a logit of -8 off the
# diagonal); here all start alike, at -8, at -2 and uniform (0), so that the start is not what they differ in:
# python ablate.py config/ablate_init.py

from config.ablate_small import *

modes = 'mhc,mhc_lite,kromhc,s2hc'
seeds = '1,2,3'
grid = 'res_init=-8,-2,0'
jobs = 2
out_dir = 'out-ablate-init'
