# A small GPT from scratch on Shakespeare in GPT-2's BPE. One GPU, minutes. 1.3M tokens are few for a vocabulary of
# 50257, so it overfits early: for good text, see finetune_shakespeare.py.

out_dir = 'out-shakespeare'
eval_interval = 250
log_interval = 10
always_save_checkpoint = False

dataset = 'shakespeare'
gradient_accumulation_steps = 1
batch_size = 32
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3
max_iters = 2000
lr_decay_iters = 2000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
