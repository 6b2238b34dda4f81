# regard.check(GPT2Attention(config, layer_idx=0), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

config = GPT2Config(n_embd=32, n_head=4, n_layer=1, n_positions=64)
config._attn_implementation = "sdpa"
