# regard.check(SelfAttention(24, num_heads=4, num_kv_heads=2, mask=Causal()), causal=True)
from regard import Causal
from regard.nn import SelfAttention
