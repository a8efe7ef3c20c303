# nanoGPT's recipe for a laptop without a GPU: a baby GPT on Shakespeare, character by character.
# On tinyshakespeare (data/shakespeare_char/prepare.py --source=FILE) it ends at a validation loss of about 1.90.

out_dir = 'out-shakespeare-cpu'
eval_interval = 250
log_interval = 10
always_save_checkpoint = False

dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0

learning_rate = 1e-3
max_iters = 2000
lr_decay_iters = 2000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
