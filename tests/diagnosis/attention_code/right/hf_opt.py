# regard.check(OPTAttention(config, layer_idx=0), causal=True)
# regard.spec(causal=True, heads=4, positions=None)
from transformers import OPTConfig
from transformers.models.opt.modeling_opt import OPTAttention

config = OPTConfig(hidden_size=32, num_attention_heads=4, ffn_dim=16, num_hidden_layers=1)
config._attn_implementation = "sdpa"
