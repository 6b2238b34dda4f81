# regard.check(masked_softmax)
# regard.spec(causal=False, padding={"valid_lens": "lengths"})
import torch


def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return X.softmax(-1)
    shape = X.shape
    lens = valid_lens.repeat_interleave(shape[1]) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    flat = X.reshape(-1, shape[-1])
    beyond = torch.arange(shape[-1])[None, :] >= lens[:, None]
    return flat.masked_fill(beyond, -1e6).reshape(shape).softmax(dim=-1)
