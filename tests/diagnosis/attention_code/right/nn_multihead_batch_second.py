# regard.check(nn.MultiheadAttention, 16, 4)
# regard.spec(causal=False, heads=4, positions=None, padding={"key_padding_mask": "True hides"})
from torch import nn
