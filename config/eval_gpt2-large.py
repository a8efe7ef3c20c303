# The validation loss of OpenAI's GPT-2 (774M) on the chosen data set (needs transformers: pip install transformers).

init_from = 'gpt2-large'
eval_only = True
dataset = 'openwebtext'
eval_tokens = 4 * 1024 * 1024
batch_size = 8
