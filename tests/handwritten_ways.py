"""Attention as people write it by hand: each function gives the softmax's weights and the output.

query, key and value are (batch, num_heads, tokens, head_dim) = (2, 3, 5, 7); the weights are given
as the AttentionMatrix is expected to have them.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Answer = tuple[Tensor, Tensor]
Way = Callable[[Tensor, Tensor, Tensor], Answer]

T = 5
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
    return weights, weights @ v


def annotated_transformer(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(CAUSAL[None, None] == 0, -1e9)
    weights = scores.softmax(dim=-1)
    weights = F.dropout(weights, 0.1, training=False)
    return weights, torch.matmul(weights, v)


def nano_gpt(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(CAUSAL.float().view(1, 1, T, T)[:, :, :T, :T] == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    return att, att @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores /= q.shape[-1] ** 0.5
    scores.masked_fill_(~CAUSAL, float("-inf"))
    weights = scores.softmax(-1)
    return weights, weights @ v


def lesson(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """A lecture's single head: (batch, tokens, dim), a tril from a buffer."""
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
    wei = wei.masked_fill(torch.tril(torch.ones(T, T))[:T, :T] == 0, float("-inf"))
    wei = F.softmax(wei, dim=-1)
    return wei, wei @ v


def notebook(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Without a batch: (tokens, dim)."""
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    weights = torch.softmax((q @ k.T) / k.shape[-1] ** 0.5, dim=-1)
    return weights, weights @ v


def one_query_of_a_notebook(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = q[0, 0, 1], k[0, 0], v[0, 0]
    weights = F.softmax(q @ k.t(), dim=0)
    return weights[None], weights @ v


def keys_times_a_query(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = q[0, 0, 1], k[0, 0], v[0, 0]
    weights = F.softmax(k @ q, dim=0)
    return weights[None], weights @ v


def additive_causal(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    mask = torch.triu(torch.full((T, T), float("-inf")), diagonal=1)
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
    weights = F.softmax(scores + mask, dim=-1)
    return weights, torch.matmul(weights, v)


def additive_padding(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """BERT's of old: -10000 where a key is padding."""
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    extended = (1.0 - keep[:, None, None, :].to(q.dtype)) * -10000.0
    weights = nn_softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + extended)
    return weights, weights @ v


def nn_softmax(scores: Tensor) -> Tensor:
    return torch.nn.Softmax(dim=-1)(scores)


def prescaled_query(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q = q * q.shape[-1] ** -0.5
    weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    return weights, weights @ v


def packed_projection(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """timm's: one tensor (3, batch, heads, tokens, dim), unbound."""
    q, k, v = torch.stack((q, k, v)).unbind(0)
    attn = (q * 0.3) @ k.transpose(-2, -1)
    attn = attn.softmax(dim=-1)
    return attn, (attn @ v).transpose(1, 2).reshape(2, T, -1)


def einsum_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    dots = torch.einsum("bhid,bhjd->bhij", q, k) * 0.4
    attn = dots.softmax(dim=-1)
    return attn, torch.einsum("bhij,bhjd->bhid", attn, v)


def einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    energy = energy.masked_fill(CAUSAL == 0, float("-1e20"))
    attention = torch.softmax(energy / (21 ** (1 / 2)), dim=3)
    return attention, torch.einsum("nhql,nlhd->nqhd", [attention, v])


def einsum_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """XLNet's order of axes, (query, key, batch, head): the softmax is over axis 1."""
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    scores = torch.einsum("ibnd,jbnd->ijbn", q, k) * 0.5
    weights = F.softmax(scores, dim=1)
    return weights.permute(2, 3, 0, 1), torch.einsum("ijbn,jbnd->ibnd", weights, v)


def einsum_with_dots(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = torch.einsum("... q d, ... k d -> ... q k", q, k).softmax(-1)
    return weights, torch.einsum("... q k, ... k d -> ... q d", weights, v)


def merged_batch_and_heads(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """fairseq's: (batch * heads, tokens, dim), bmm, and a mask on four axes in between."""
    q, k, v = (x.reshape(6, T, 7) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    scores = scores.view(2, 3, T, T).masked_fill(padding[:, None, None], float("-inf"))
    weights = F.softmax(scores.view(6, T, T), dim=-1, dtype=torch.float32)
    return weights.view(2, 3, T, T), torch.bmm(weights.to(v.dtype), v)


def merged_without_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.reshape(6, T, 7) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
    return weights, torch.bmm(weights, v)


def bloom(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    alibi = torch.randn(6, 1, T, generator=torch.manual_seed(0))
    q, k, v = (x.reshape(6, T, 7) for x in (q, k, v))
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.4)
    scores = scores.view(2, 3, T, T) + torch.triu(torch.full((T, T), -3.4e38), 1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights, torch.bmm(weights.view(6, T, T), v)


def neo_x(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k = q.reshape(6, T, 7), k.reshape(6, T, 7)
    scores = torch.zeros(6, T, T, dtype=q.dtype)
    scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=1.0, alpha=0.378)
    scores = scores.view(2, 3, T, T)
    lowest = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(CAUSAL, scores, lowest)
    weights = F.softmax(scores, dim=-1)
    return weights, weights @ v


def stable_diffusion(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.reshape(6, T, 7) for x in (q, k, v))
    empty = torch.empty(6, T, T, dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.378)
    weights = scores.softmax(dim=-1)
    return weights, torch.bmm(weights, v)


def t5(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    position_bias = torch.randn(1, 3, T, T, generator=torch.manual_seed(0))
    mask = torch.zeros(2, 1, 1, T)
    mask[1, ..., 3:] = torch.finfo(torch.float32).min
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += position_bias + mask
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return weights, torch.matmul(weights, v)


def gemma_2(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.6
    weights = weights / 2.0
    weights = torch.tanh(weights)
    weights = weights * 2.0
    weights = weights + torch.triu(torch.full((T, T), torch.finfo(q.dtype).min), 1)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights, torch.matmul(weights, v)


def biased_softcap(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    bias = torch.randn(3, T, T, generator=torch.manual_seed(0))
    weights = (1.5 * torch.tanh((q @ k.mT + bias) / 3.0)).softmax(-1)
    return weights, weights @ v


def gpt_oss(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    sinks = torch.tensor([0.5, -1.0, 2.0], dtype=q.dtype)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.4
    scores = scores + torch.triu(torch.full((T, T), torch.finfo(q.dtype).min), 1)
    combined = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(2, -1, T, -1)], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    probs = F.softmax(combined, dim=-1, dtype=combined.dtype)
    weights = probs[..., :-1]
    return weights, torch.matmul(weights, v)


def sink_first(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """A column of zeros before the keys: softmax-off-by-one."""
    scores = q @ k.mT
    probs = torch.cat((torch.zeros(2, 3, T, 1, dtype=q.dtype), scores), -1).softmax(-1)
    return probs[..., 1:], probs[..., 1:] @ v


def exponentials(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.transpose(-1, -2) / 2.5
    scores = scores - scores.max(dim=-1, keepdim=True).values
    powers = torch.exp(scores)
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return weights, weights @ v


def exponentials_in_place(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores -= scores.amax(-1, keepdim=True)
    scores.exp_()
    scores /= scores.sum(-1, keepdim=True)
    return scores, scores @ v


def boolean_index(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q[0, 0] @ k[0, 0].T
    scores[~CAUSAL] = float("-inf")
    weights = scores.softmax(-1)
    return weights, weights @ v[0, 0]


def boolean_index_of_all_axes(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    scores[(~CAUSAL).expand(2, 3, T, T)] = -1e10
    weights = scores.softmax(-1)
    return weights, weights @ v


def open_ai_gpt(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    b = torch.tril(torch.ones(T, T, dtype=q.dtype)).view(1, 1, T, T)
    w = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(7)
    w = w * b + -1e4 * (1 - b)
    w = torch.softmax(w, dim=-1)
    return w, torch.matmul(w, v)


def where_full(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT * 0.3
    scores = torch.where(~CAUSAL, torch.full_like(scores, float("-inf")), scores)
    weights = scores.softmax(-1)
    return weights, weights @ v


def where_number(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = torch.where(CAUSAL, q @ k.mT, -1e9).softmax(-1)
    return weights, weights @ v


def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """One key and value for three heads, as transformers repeats them."""
    k, v = (x[:, :1, None].expand(2, 1, 3, T, 7).reshape(2, 3, T, 7) for x in (k, v))
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.4, dim=-1)
    return weights, torch.matmul(weights, v)


def two_groups(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q = torch.cat((q, q.flip(1)), 1)[:, :4]
    k, v = (x[:, :2].repeat_interleave(2, dim=1) for x in (k, v))
    weights = F.softmax(q @ k.mT, dim=-1)
    return weights, weights @ v


def grouped_axes(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Heads in two axes, (batch, kv_heads, heads of a group): mesh-tensorflow's way."""
    q = torch.stack((q[:, :2], q[:, 1:]), 2)
    k, v = k[:, :2], v[:, :2]
    mask = torch.triu(torch.full((T, T), float("-inf")), 1)
    weights = (torch.einsum("bkgqd,bksd->bkgqs", q, k) + mask).softmax(-1)
    return weights.flatten(1, 2), torch.einsum("bkgqs,bksd->bkgqd", weights, v)


def multi_query(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """GPT-BigCode's: one key for all heads, heads and tokens of the query in one axis."""
    merged = q.reshape(2, 3 * T, 7)
    scores = torch.baddbmm(
        torch.empty(2, 3 * T, T, dtype=q.dtype), merged, k[:, 0].mT, beta=0, alpha=0.4
    )
    weights = scores.view(2, 3, T, T).softmax(-1)
    return weights, torch.bmm(weights.view(2, 3 * T, T), v[:, 0])


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Keys times queries; the softmax is over axis -2."""
    weights = (k @ q.transpose(-1, -2)).softmax(dim=-2)
    return weights.transpose(-1, -2), weights.transpose(-1, -2) @ v


def swin_v2(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Cosines, a temperature for each head, windows of two images."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.tensor([2.0, 3.0, 5.0], dtype=q.dtype).view(3, 1, 1).exp()
    scores = scores + 16 * torch.sigmoid(torch.randn(3, T, T, generator=torch.manual_seed(1)))
    shifted = torch.zeros(2, T, T, dtype=q.dtype)
    shifted[1, :2, 2:] = -100.0
    scores = scores.view(1, 2, 3, T, T) + shifted[:, None].unsqueeze(0)
    weights = scores.view(-1, 3, T, T).softmax(-1)
    return weights[None], weights @ v


def half_with_a_float_softmax(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.bfloat16() for x in (q, k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.378
    weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    return weights, torch.matmul(weights.to(q.dtype), v)


def scores_as_floats(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.half() for x in (q, k, v))
    scores = torch.matmul(q.float(), k.float().mT) / math.sqrt(7)
    scores = scores.masked_fill(~CAUSAL, torch.finfo(torch.float16).min)
    weights = scores.softmax(-1)
    return weights, weights.half() @ v


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """OPT's: the mask's lowest number, and never below it."""
    lowest = torch.finfo(q.dtype).min
    scores = q @ k.mT + torch.triu(torch.full((T, T), lowest), 1)
    scores = torch.max(scores, torch.tensor(lowest, dtype=q.dtype)).clamp(min=lowest)
    weights = scores.softmax(-1)
    return weights, weights @ v


def dead_rows(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Padding on the left, with a causal mask: rows without a key are uniform, by a finite fill."""
    scores = q @ k.mT
    keep = CAUSAL & torch.tensor([False, False, True, True, True])
    weights = scores.masked_fill(~keep, -1e9).softmax(-1)
    return weights, weights @ v


def dead_rows_of_two_masks(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = (q @ k.mT).masked_fill(~CAUSAL, float("-inf"))
    padding = torch.tensor([-1e9, -1e9, 0.0, 0.0, 0.0], dtype=q.dtype)
    weights = (scores + padding).softmax(-1)
    return weights, weights @ v


def two_fills(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """A second fill puts a finite number where the first had put -inf."""
    scores = (q @ k.mT).masked_fill(~CAUSAL, float("-inf"))
    padding = torch.tensor([True, True, False, False, True])
    weights = scores.masked_fill(padding, -1e9).softmax(-1)
    return weights, weights @ v


def half_precision(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.half() for x in (q, k, v))
    scores = torch.matmul(q * 0.378, k.mT) + torch.triu(torch.full((T, T), -6e4).half(), 1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    return weights, weights.half() @ v


def dropout_in_training(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    torch.manual_seed(3)
    weights = (q @ k.mT).softmax(-1)
    return weights, F.dropout(weights, 0.5, training=True) @ v


def numbers_for_each_query_and_key(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """A temperature that depends on the query, and a gate that depends on the key."""
    scores = q @ k.mT * q.mean(-1, keepdim=True).exp() * k.mean(-1)[:, :, None].sigmoid()
    weights = scores.softmax(-1)
    return weights, weights @ v


def number_minus_scores(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Distances: |q - k|² without what a row is given alike."""
    distance = k.square().sum(-1)[:, :, None] - 2 * (q @ k.mT)
    weights = (-distance / 7).softmax(-1)
    return weights, weights @ v


def into_a_buffer(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = torch.empty(2, 3, T, T, dtype=q.dtype)
    scores[:] = q @ k.mT
    weights = scores.softmax(-1)
    return weights, weights @ v


def one_decoding_step(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = F.softmax(torch.matmul(q[:, :, -1:], k.transpose(2, 3)) * 0.4, dim=-1)
    return weights, torch.matmul(weights, v)


def first_step(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """One query, one key."""
    q, k, v = (x[:, :, :1] for x in (q, k, v))
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)), dim=-1)
    return weights, torch.matmul(weights, v)


def last_rows_alone(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT)[:, :, -2:, 1:].softmax(-1)
    return weights, weights @ v[:, :, 1:]


def linear_function(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = F.linear(q[0, 0], k[0, 0]).softmax(-1)
    return weights, weights @ v[0, 0]


def safe_softmax(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = (q @ k.mT).masked_fill(CAUSAL.flip(0), float("-inf"))
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return weights, weights @ v


WAYS: tuple[Way, ...] = (
    plain,
    annotated_transformer,
    nano_gpt,
    in_place,
    lesson,
    notebook,
    one_query_of_a_notebook,
    keys_times_a_query,
    additive_causal,
    additive_padding,
    prescaled_query,
    packed_projection,
    einsum_heads_first,
    einsum_tokens_first,
    einsum_heads_last,
    einsum_with_dots,
    merged_batch_and_heads,
    merged_without_a_mask,
    bloom,
    neo_x,
    stable_diffusion,
    t5,
    gemma_2,
    biased_softcap,
    gpt_oss,
    sink_first,
    exponentials,
    exponentials_in_place,
    boolean_index,
    boolean_index_of_all_axes,
    open_ai_gpt,
    where_full,
    where_number,
    repeated_heads,
    two_groups,
    grouped_axes,
    multi_query,
    keys_first,
    swin_v2,
    half_with_a_float_softmax,
    scores_as_floats,
    clamped,
    dead_rows,
    dead_rows_of_two_masks,
    two_fills,
    half_precision,
    dropout_in_training,
    numbers_for_each_query_and_key,
    number_minus_scores,
    into_a_buffer,
    one_decoding_step,
    first_step,
    last_rows_alone,
    linear_function,
    safe_softmax,
)
