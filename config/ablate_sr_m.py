# The modes of "Sphere Retraction Normalizations", arXiv 2608.02668, at its size M, one run after the other on 8 GPUs:
# python ablate.py config/ablate_sr_m.py
# The paper's single seed gives no verdict: --seeds=1337,1338,1339. Its other data set: --dataset=openwebtext.

from config.train_sr_m import *

modes = 'pre_ln,pre_dyt,peri_ln,keel,geonorm,p_spheret,proj_spheret,cay_spheret'
seeds = '1337'
nproc = 8
out_dir = 'out-ablate-sr-m'
