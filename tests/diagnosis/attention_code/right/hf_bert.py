# regard.check(BertSelfAttention(config))
# regard.spec(causal=False,heads=4,positions=None,padding={"attention_mask":"added to the scores"})
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8)
config._attn_implementation = "eager"
