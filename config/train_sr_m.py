# The M model (354M parameters) of "Sphere Retraction Normalizations", arXiv 2608.02668, whatever the residual mode:
# torchrun --standalone --nproc_per_node=8 train.py config/train_sr_m.py --residual=proj_spheret --out_dir=out-sr-m-proj
# The paper also trains on OpenWebText: --dataset=openwebtext. It ran on 8 GPUs with 16 windows each, compile off.

out_dir = 'out-sr-m'
eval_interval = 1000
eval_tokens = 10 * 1024 * 1024
log_interval = 10

# 16 windows x 1024 tokens x 8 = 131,072 tokens a step
dataset = 'fineweb_edu'
gradient_accumulation_steps = 8
batch_size = 16
block_size = 1024

n_layer = 24
n_head = 16
n_embd = 1024
bias = True
vocab_size = 50304

learning_rate = 3e-4
max_iters = 50000
lr_decay_iters = 50000
warmup_iters = 2000
min_lr = 3e-5
weight_decay = 0.1
