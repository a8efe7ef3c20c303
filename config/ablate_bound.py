# The bounds of the step size and the radius of the sphere modes: the straight-through projection against the plain
# clamp of arXiv 2608.02668, which freezes a scalar that starts on its bound:
# python ablate.py config/ablate_bound.py

from config.ablate_small import *

modes = 'p_spheret,proj_spheret,cay_spheret,geonorm'
seeds = '1,2,3'
grid = 'bound=clamp,project'
against = 'grid'
jobs = 2
out_dir = 'out-ablate-bound'
