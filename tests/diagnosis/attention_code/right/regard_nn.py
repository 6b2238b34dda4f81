# regard.check(SelfAttention(24, num_heads=4, num_kv_heads=2, mask=Causal()), causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, positions=None, padding={"mask": "True keeps"})
from regard import Causal
from regard.nn import SelfAttention
