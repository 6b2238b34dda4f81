# regard.check(nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, batch_first=True))
# regard.spec(causal=False, heads=4, positions=None, padding={"src_key_padding_mask": "True hides"})
from torch import nn
