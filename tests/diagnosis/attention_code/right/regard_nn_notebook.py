# regard.check(SelfAttention(5, head_dim=3, bias=False, output_projection=False))
# regard.spec(causal=False, heads=1, positions=None, padding={"mask": "True keeps"})
from regard.nn import SelfAttention
