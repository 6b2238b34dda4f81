# regard.check(nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, batch_first=True))
from torch import nn
