# regard.check(T5Attention(config, has_relative_attention_bias=True))
# regard.spec(causal=False,heads=4,positions="table",scale=1,padding={"mask":"added to the scores"})
"""T5 has no scale on purpose: it is folded into how the weights begin."""
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

config = T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=8)
config._attn_implementation = "eager"
