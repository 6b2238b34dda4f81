# regard.check(nn.MultiheadAttention(16, 4, batch_first=True))
from torch import nn
