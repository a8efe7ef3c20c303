# The hyper-connections of "Spectral-Sphere-Constrained Hyper-Connections", arXiv 2603.20896, on 8 GPUs: its optimizer,
# schedule, data and context, on a GPT of about its smallest size (0.6B; the paper has Qwen3's layers):
# python ablate.py config/ablate_s2.py

modes = 'pre_ln,hc,mhc,mhc_lite,kromhc,s2hc'
seeds = '1337'
nproc = 8
out_dir = 'out-ablate-s2'

# 8 windows x 2048 tokens x 64 = 1,048,576 tokens a step, 15B in all
dataset = 'fineweb_edu'
eval_interval = 500
eval_tokens = 10 * 1024 * 1024
log_interval = 10
gradient_accumulation_steps = 64
batch_size = 8
block_size = 2048

n_layer = 28
n_head = 16
n_embd = 1024
n_streams = 4
vocab_size = 50304

learning_rate = 6e-4
max_iters = 14305
lr_decay_iters = 14305
warmup_iters = 1000
min_lr = 6e-5
weight_decay = 0.1
