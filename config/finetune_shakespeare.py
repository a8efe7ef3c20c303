# Finetunes GPT-2 XL on Shakespeare (needs transformers: pip install transformers, and one GPU with 24 GB or more;
# --init_from=gpt2 is the small one). A step is 32,768 tokens, so the 1.35M of train.bin are 41 steps.

out_dir = 'out-shakespeare-finetuned'
eval_interval = 5
log_interval = 1
always_save_checkpoint = False  # only the best is kept

init_from = 'gpt2-xl'
dataset = 'shakespeare'
eval_tokens = 65536
gradient_accumulation_steps = 32
batch_size = 1
max_iters = 20

# a small constant learning rate
learning_rate = 3e-5
decay_lr = False
warmup_iters = 0
