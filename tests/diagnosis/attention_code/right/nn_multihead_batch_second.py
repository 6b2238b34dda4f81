# regard.check(nn.MultiheadAttention, 16, 4)
from torch import nn
