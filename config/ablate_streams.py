# The number of streams of the hyper-connections, against n = 1, the plain residual. kromhc takes powers of two and
# mhc_lite at most 6; what they refuse is in the report:
# python ablate.py config/ablate_streams.py

modes = 'hc_identity,hc,mhc,mhc_lite,kromhc,s2hc'
seeds = '1,2,3'
grid = 'n_streams=1,2,3,4,5,6,7,8'
against = 'grid'
jobs = 2
out_dir = 'out-ablate-streams'

dataset = 'shakespeare_char'
eval_interval = 100
eval_tokens = 32768
log_interval = 10
gradient_accumulation_steps = 1
batch_size = 16
block_size = 32

n_layer = 3
n_head = 4
n_embd = 128

learning_rate = 3e-3
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
min_lr = 0.0
beta2 = 0.99
device = 'cpu'
