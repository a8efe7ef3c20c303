# GPT-2 (124M) on OpenWebText: about 4 days on 8 A100 to a validation loss of about 2.85, as in nanoGPT.
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

out_dir = 'out-gpt2'
eval_interval = 1000
eval_tokens = 10 * 1024 * 1024
log_interval = 10

# 12 windows x 1024 tokens x 40 micro-steps (5 on each of 8 GPUs) = 491,520 tokens a step
dataset = 'openwebtext'
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024

max_iters = 600000
lr_decay_iters = 600000
weight_decay = 1e-1

compile = True
