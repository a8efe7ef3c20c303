# The order p of the sphere retraction, against the exponential map (p = inf):
# python ablate.py config/ablate_p.py

from config.ablate_small import *

modes = 'p_spheret'
seeds = '1,2,3'
grid = 'p=inf,0.25,0.5,1,2,4,8'
jobs = 2
out_dir = 'out-ablate-p'
