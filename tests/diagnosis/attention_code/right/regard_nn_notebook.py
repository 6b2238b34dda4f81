# regard.check(SelfAttention(5, head_dim=3, bias=False, output_projection=False))
from regard.nn import SelfAttention
