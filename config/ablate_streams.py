# The number of streams of the hyper-connections, against n = 1, the plain residual. kromhc takes powers of two and
# mhc_lite at most 6; what they refuse is in the report:
# python ablate.py config/ablate_streams.py

from config.ablate_small import *

modes = 'hc_identity,hc,mhc,mhc_lite,kromhc,s2hc'
seeds = '1,2,3'
grid = 'n_streams=1,2,3,4,5,6,7,8'
against = 'grid'
jobs = 2
out_dir = 'out-ablate-streams'
