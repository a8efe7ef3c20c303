# The step size of the sphere modes over depth:
# python ablate.py config/ablate_decay.py

from config.ablate_small import *

modes = 'p_spheret,proj_spheret,geonorm'
seeds = '1,2,3'
grid = 'decay=sqrt,harmonic,linear,none'
against = 'grid'
jobs = 2
out_dir = 'out-ablate-decay'
n_layer = 8
