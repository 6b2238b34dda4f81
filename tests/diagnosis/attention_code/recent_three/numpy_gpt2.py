# regard.check(mha, args=(np.random.default_rng(1).normal(size=(6, 16)), C_ATTN, C_PROJ, 4), axes="tokens dim", causal=True)
# regard.spec(causal=True, heads=4, positions=None)
"""GPT-2 attention in plain NumPy; a sequence without a batch, weights as dictionaries."""
import numpy as np


def softmax(x):
    exp_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return exp_x / np.sum(exp_x, axis=-1, keepdims=True)


def linear(x, w, b):  # [m, in], [in, out], [out] -> [m, out]
    return x @ w + b


def attention(q, k, v, mask):  # [n_q, d_k], [n_k, d_k], [n_k, d_v], [n_q, n_k] -> [n_q, d_v]
    return softmax(q @ k.T / np.sqrt(q.shape[-1]) + mask) @ v


def mha(x, c_attn, c_proj, n_head):  # [n_seq, n_embd] -> [n_seq, n_embd]
    # qkv projection
    x = linear(x, **c_attn)
    # split into qkv
    qkv = np.split(x, 3, axis=-1)
    # split into heads
    qkv_heads = list(map(lambda x: np.split(x, n_head, axis=-1), qkv))
    # causal mask to hide future inputs from being attended to
    causal_mask = (1 - np.tri(x.shape[0], dtype=x.dtype)) * -1e10
    out_heads = [attention(q, k, v, causal_mask) for q, k, v in zip(*qkv_heads)]
    x = np.hstack(out_heads)
    return linear(x, **c_proj)


_rng = np.random.default_rng(0)
C_ATTN = {"w": _rng.normal(size=(16, 48)) / 4, "b": _rng.normal(size=48)}
C_PROJ = {"w": _rng.normal(size=(16, 16)) / 4, "b": _rng.normal(size=16)}
