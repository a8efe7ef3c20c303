# Norm x place x connection, most of it untried, against pre_ln, pre_dyt ... at the same norm and place:
# python ablate.py config/ablate_knobs.py

from config.ablate_small import *

modes = 'pre_ln,keel,proj_spheret,s2hc'
seeds = '1,2,3'
grid = 'norm=layernorm,rmsnorm,dyt,derf place=in,out,both,none'
jobs = 2
out_dir = 'out-ablate-knobs'
