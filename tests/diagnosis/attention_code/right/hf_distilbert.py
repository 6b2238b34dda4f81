# regard.check(TransformerBlock(config))
# regard.spec(causal=False,heads=4,positions=None,padding={"attention_mask":"added to the scores"})
from transformers import DistilBertConfig
from transformers.models.distilbert.modeling_distilbert import TransformerBlock

config = DistilBertConfig(dim=32, n_heads=4, hidden_dim=16, n_layers=1)
config._attn_implementation = "sdpa"
