# regard.check(CLIPAttention(config))
# regard.spec(causal=False,heads=4,positions=None,padding={"attention_mask":"added to the scores"})
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPAttention

config = CLIPVisionConfig(hidden_size=32, num_attention_heads=4, intermediate_size=16)
config._attn_implementation = "eager"
