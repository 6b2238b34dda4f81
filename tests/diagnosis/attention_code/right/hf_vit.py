# regard.check(ViTAttention(config))
# regard.spec(causal=False,heads=4,positions=None,padding={"attention_mask":"added to the scores"})
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTAttention

config = ViTConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8)
config._attn_implementation = "eager"
