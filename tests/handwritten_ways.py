"""Ways to write attention by hand, and what observe makes of each.

A way takes query, key and value, (batch, num_heads, tokens, head_dim) = (2, 3, 5, 7). It returns
the weights that met the value, in its own axes, and the output; both are lists where it computes
several attentions. ``WAYS`` has all ways by name. A way is recorded as query and key, unless
``AS_WEIGHTS`` or ``REFUSED`` names it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tensors = Tensor | list[Tensor]
Answer = tuple[Tensors, Tensors]
Way = Callable[[Tensor, Tensor, Tensor], Answer]
Step = Callable[[Tensor], Tensor]

T, D = 5, 7
INF = float("inf")
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
STRICT = CAUSAL.tril(-1)
FUTURE = torch.zeros(T, T).masked_fill(~CAUSAL, -INF)
LOW_FUTURE = torch.triu(torch.full((T, T), torch.finfo(torch.float32).min), 1)
NEAR = CAUSAL & torch.ones(T, T, dtype=torch.bool).triu(-1)
LATER = (torch.arange(T) > 1)[:, None]
HEADS = torch.tensor([1.0, 0.0, 1.0])[:, None, None]
SOME_KEYS = torch.tensor([True, True, False, False, True])
LAST, FEW = torch.tensor([3, 4]), torch.tensor([0, 2, 4])
ALL = slice(None)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed))


BIAS = numbers(T, T)
MIXTURE = nn.Parameter(numbers(3, 3))
MEANS = torch.full((3, 3), 1 / 3)
TEMPERATURE = nn.Parameter(torch.tensor([0.2, 0.3, 0.5]).view(3, 1, 1))


class Layer(nn.Module):
    """Runs a way; its parameters are no activations."""

    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.own = way, nn.ParameterList([MIXTURE, TEMPERATURE])
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> object:
        return self.way(self.query(x), self.key(x + 1), self.value(x))


class Both(nn.Module):
    """A plain layer beside another one, so that a missing layer is no error by itself."""

    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.plain, self.layer = Layer(lambda q, k, v: (q @ k.mT).softmax(-1) @ v), Layer(way)

    def forward(self, x: Tensor) -> object:
        self.plain(x)
        return self.layer(x)


def meet(weights: Tensor, v: Tensor, used: Tensor | None = None) -> Answer:
    """Multiply weights, or what is used of them, by a value of as many axes and keys."""
    used = weights if used is None else used
    v = torch.cat((v, v.flip(2)), 2)[..., : weights.shape[-1], :].to(used.dtype)
    if weights.ndim < 4:
        v = v[0, 0] if weights.ndim == 2 else v.flatten(0, 1) if len(weights) == 6 else v[:, 0]
    return weights, used @ v


def merged(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.reshape(6, T, D) for tensor in tensors)


# Scores: softmax(-1) of them meets the value


def bloom(q: Tensor, k: Tensor) -> Tensor:
    q, k = merged(q, k)
    scores = numbers(6, 1, T).baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=0.4)
    return (scores.view(2, 3, T, T) + LOW_FUTURE).view(6, T, T)


def t5(q: Tensor, k: Tensor) -> Tensor:
    mask = torch.zeros(2, 1, 1, T)
    mask[1, ..., 3:] = torch.finfo(torch.float32).min
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += numbers(1, 3, T, T) + mask
    return scores


def swin_v2(q: Tensor, k: Tensor) -> Tensor:
    """Cosines, a temperature for each head, windows of two images."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * (10 * TEMPERATURE).exp()
    scores = scores + 16 * torch.sigmoid(numbers(3, T, T))
    shifted = torch.zeros(2, T, T)
    shifted[1, :2, 2:] = -100.0
    return (scores.view(1, 2, 3, T, T) + shifted[:, None].unsqueeze(0)).view(-1, 3, T, T)


def clamped_at_the_lowest(q: Tensor, k: Tensor) -> Tensor:
    """OPT's: the mask's lowest number, and never below it."""
    lowest = torch.finfo(q.dtype).min
    return torch.max(q @ k.mT + LOW_FUTURE, torch.tensor(lowest)).clamp(min=lowest)


def open_ai_gpt(q: Tensor, k: Tensor) -> Tensor:
    b = CAUSAL.float().view(1, 1, T, T)
    return torch.matmul(q, k.mT) / math.sqrt(D) * b + -1e4 * (1 - b)


def bias_of_a_part(q: Tensor, k: Tensor) -> Tensor:
    """As MViT adds relative positions to all tokens but the first."""
    scores = q @ k.mT
    part = scores[:, :, 1:, 1:].view(2, 3, 2, 2, 2, 2) + numbers(2, 3, 2, 2, 2, 1)
    scores[:, :, 1:, 1:] = part.view(2, 3, 4, 4)
    return scores


def a_query_that_changes(q: Tensor, k: Tensor) -> Tensor:
    q = q.clone()
    scores = q.detach() @ k.detach().mT
    q *= 2
    return scores


def heads_in_a_buffer(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.empty(2, 3, T, T)
    for h in range(3):
        scores[:, h] = torch.bmm(q[:, h], k[:, h].mT)
    return scores


def blocks(q: Tensor, k: Tensor) -> Tensor:
    """Of rows and of columns, put side by side."""
    above, below = (
        torch.cat([q[:, :, rows] @ k[:, :, keys].mT for keys in (slice(2), slice(2, T))], -1)
        for rows in (slice(3), slice(3, T))
    )
    return torch.cat([above, below], 2)


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda q, k: q @ k.transpose(-2, -1),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) * 0.4,
    "einsum with dots": lambda q, k: torch.einsum("... q d, ... k d -> ... q k", q, k),
    "no batch": lambda q, k: q[0, 0] @ k[0, 0].T / k.shape[-1] ** 0.5,
    "no heads": lambda q, k: (q[:, 0] @ k[:, 0].mT).masked_fill(CAUSAL == 0, -INF),
    "linear function": lambda q, k: F.linear(q[0, 0], k[0, 0]),
    "merged batch and heads": lambda q, k: torch.bmm(q.view(6, T, D), k.view(6, T, D).mT),
    "scaled query": lambda q, k: q * D**-0.5 @ k.mT,
    "repeated key": lambda q, k: q @ k[:, :1, None].expand(2, 1, 3, T, D).reshape(2, 3, T, D).mT,
    "one query": lambda q, k: q[:, :, -1:] @ k.mT * 0.4,
    "one query and key": lambda q, k: torch.matmul(q[:, :, :1], k[:, :, :1].mT),
    "bloom": bloom,
    "baddbmm of zeros": lambda q, k: torch.baddbmm(
        torch.zeros(6, T, T), q.view(6, T, D), k.view(6, T, D).mT, beta=1.0, alpha=0.4
    ),
    "baddbmm of nothing": lambda q, k: torch.baddbmm(
        torch.empty(6, T, T), q.view(6, T, D), k.view(6, T, D).mT, beta=0, alpha=0.4
    ),
    "t5": t5,
    "swin v2": swin_v2,
    "temperatures": lambda q, k: q @ k.mT * TEMPERATURE,
    "temperatures and a mask": lambda q, k: q @ k.mT * TEMPERATURE + FUTURE,
    "scores as floats": lambda q, k: torch.matmul(q.half().float(), k.half().float().mT) / 2,
    "clamped at the lowest": clamped_at_the_lowest,
    "OpenAI's GPT": open_ai_gpt,
    "numbers for each query and key": lambda q, k: (
        q @ k.mT * q.mean(-1, keepdim=True).exp() * k.mean(-1)[:, :, None].sigmoid()
    ),
    "squared distances": lambda q, k: -(k.square().sum(-1)[:, :, None] - 2 * (q @ k.mT)) / 7,
    "into a buffer": lambda q, k: assigned(ALL, q @ k.mT)(torch.empty(2, 3, T, T)),
    "larger buffer": lambda q, k: torch.empty(4, 3, 2 * T, 2 * T)[:2, :, :T, :T].copy_(q @ k.mT),
    "bias of a part": bias_of_a_part,
    "a query that changes": a_query_that_changes,
    "talking heads": lambda q, k: torch.einsum("bhqk,hg->bgqk", q @ k.mT, MIXTURE),
    "talking heads, constant": lambda q, k: torch.einsum("bhqk,hg->bgqk", q @ k.mT, MEANS),
    "talking heads, convolution": lambda q, k: F.conv2d(q @ k.mT, MIXTURE[:, :, None, None]),
    "two sources": lambda q, k: torch.cat((q @ k.mT, k @ q.mT), -1),
    "two texts of keys": lambda q, k: torch.cat((q @ k.mT, q @ k[:, :, :3].flip(3).mT), -1),
    "a row written over": lambda q, k: assigned((ALL, ALL, 2), (s := q @ k.mT)[:, :, 1] * 2)(s),
    "heads swapped in place": lambda q, k: (s := q @ k.mT).copy_(s.detach().flip(1)),
    "heads in a buffer": heads_in_a_buffer,
    "heads stacked": lambda q, k: torch.stack([q[:, h] @ k[:, h].mT for h in range(3)], 1),
    "texts stacked": lambda q, k: torch.stack([a @ b.mT for a, b in zip(q, k, strict=True)]),
    "one key for all heads": lambda q, k: torch.stack([q[:, h] @ k[:, 0].mT for h in range(3)], 1),
    "blocks": blocks,
}


# Scores of one head that are put together, row by row or cell by cell


def rows(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.empty(T, T)
    for i in range(T):
        scores[i] = q[i] @ k.T
        scores[i] /= 2
        scores[i, i + 1 :] = -INF
    return scores


def columns(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.zeros(T, T)
    for j in range(T):
        scores[:, j] = q @ k[j]
    return scores / math.sqrt(D)


def cells(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.full((T, T), -INF)
    for i in range(T):
        for j in range(i + 1):
            scores[i, j] = torch.dot(q[i], k[j]) / math.sqrt(D)
    return scores


def rows_of_the_past(fill: float) -> Callable[[Tensor, Tensor], Tensor]:
    def scores_of(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.full((T, T), fill)
        for i in range(T):
            scores[i, : i + 1] = k[: i + 1] @ q[i]
        return scores

    return scores_of


def the_future_in_the_loop(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.empty(T, T)
    for i in range(T):
        scores[i, : i + 1] = q[i] @ k[: i + 1].T
        scores[i, i + 1 :] = -INF
    return scores


def looked_at_on_the_way(q: Tensor, k: Tensor) -> Tensor:
    scores, largest = torch.zeros(T, T), torch.zeros(())
    for i in range(T):
        scores[i] = q[i] @ k.T
        largest = torch.maximum(largest, scores.max())
    assert scores.sum().item() < 1e9
    return scores


SCORES_OF_A_HEAD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": rows,
    "columns": columns,
    "cells": cells,
    "rows of the past": rows_of_the_past(-INF),
    "numbers between": rows_of_the_past(1.0),
    "masked later": lambda q, k: rows_of_the_past(0.0)(q, k).masked_fill(~CAUSAL, -1e9),
    "the future in the loop": the_future_in_the_loop,
    "rows with a bias": lambda q, k: torch.stack(
        [(q[i] @ k.T + BIAS[i]).masked_fill(~CAUSAL[i], -1e9) for i in range(T)]
    ),
    "comprehension": lambda q, k: (
        torch.tanh(torch.stack([torch.stack([a @ b for b in k]) for a in q]) / 4) * 4
    ),
    "padded rows": lambda q, k: torch.stack(
        [F.pad(q[i] @ k[: i + 1].T, (0, T - 1 - i), value=-INF) for i in range(T)]
    ),
    "vertical": lambda q, k: torch.vstack([a @ k.T for a in q]),
    "looked at on the way": looked_at_on_the_way,
    "a scale for each row": lambda q, k: torch.stack([q[i] @ k.T / (i + 1) for i in range(T)]),
}


# Steps: softmax(-1) of changed scores meets the value


def assigned(index: object, number: float | Tensor) -> Step:
    def step(tensor: Tensor) -> Tensor:
        tensor[index] = number
        return tensor

    return step


def edited(edit: Callable[[Tensor], object]) -> Step:
    def step(tensor: Tensor) -> Tensor:
        edit(tensor)
        return tensor

    return step


STEPS: dict[str, Step] = {
    "scale and fill": lambda s: (s / D**0.5).masked_fill(~CAUSAL, -1e9),
    "in place": lambda s: s.div_(D**0.5).mul_(0.5).sub_(1.0).add_(2.0).masked_fill_(~CAUSAL, -INF),
    "numbers before and after": lambda s: torch.add(1.0 - s, 0.5, alpha=3) - 0.5,
    "added mask": lambda s: s * 0.4 + FUTURE,
    "added low mask": lambda s: s + (1.0 - CAUSAL.float()) * -10000.0,
    "where": lambda s: torch.where(CAUSAL, s, -1e9),
    "where full": lambda s: torch.where(~CAUSAL, torch.full_like(s, -INF), s * 0.3),
    "softcap and a mask": lambda s: torch.tanh(s * 0.6 / 2.0) * 2.0 + LOW_FUTURE,
    "softcap of a bias": lambda s: 1.5 * torch.tanh((s + numbers(3, T, T)) / 3.0),
    "bias after a softcap": lambda s: torch.tanh(s) + numbers(T, T),
    "rows without a key": lambda s: s.masked_fill(~(CAUSAL & LATER.mT), -1e9),
    "two masks": lambda s: s.masked_fill(~CAUSAL, -INF) + torch.tensor([-1e9, -1e9, 0.0, 0.0, 0.0]),
    "two fills": lambda s: s.masked_fill(~CAUSAL, -INF).masked_fill(SOME_KEYS, -1e9),
    "the lowest number and infinity": lambda s: (s + LOW_FUTURE).masked_fill(
        CAUSAL.flip(0) & (torch.arange(T) < 4), -INF
    ),
    "mask by a boolean index": assigned((~CAUSAL).expand(2, 3, T, T), -1e10),
    "one key": assigned((..., 3), -INF),
    "last keys": assigned((..., slice(3, None)), torch.tensor(-INF)),
    "keys by index": assigned((..., LAST), -INF),
    "mask after colons": assigned((ALL, ALL, ~CAUSAL), -INF),
    "pairs by index": assigned((..., *torch.triu_indices(T, T, offset=1)), -INF),
    "index_fill": lambda s: s.index_fill(-1, LAST, -INF),
    "index_fill_": lambda s: s.index_fill_(3, LAST, torch.tensor(-INF)),
    "some heads": edited(lambda s: s[:, 1:].masked_fill_(~CAUSAL, -INF)),
    "each sequence": edited(
        lambda s: [s[i, :, :, length:].fill_(-INF) for i, length in enumerate((5, 2))]
    ),
    "each query": edited(lambda s: [s[:, :, i, i + 1 :].fill_(-INF) for i in range(T)]),
    "diagonal": edited(lambda s: s.diagonal(dim1=-2, dim2=-1).fill_(-INF)),
    "another view": edited(lambda s: s.view(6, T, T)[3:, :, 2:].fill_(-INF)),
    "scatter": lambda s: s.scatter(-1, LAST.expand(2, 3, T, 2), -INF),
    "tril of the scores": lambda s: (t := torch.tril(s)).masked_fill(t == 0, -INF),
    "best": lambda s: s + torch.full_like(s, -INF).scatter(-1, s.topk(2).indices, 0.0),
    "best, where": lambda s: torch.where(
        torch.zeros_like(s).scatter_(-1, s.topk(2).indices, 1.0) > 0, s, torch.full_like(s, -INF)
    ),
    "best, scattered": lambda s: torch.full_like(s, -INF).scatter(
        -1, (found := s.topk(2)).indices, found.values
    ),
    "best, gathered": lambda s: s.new_full(s.shape, -INF).scatter_(
        -1, (best := s.argsort(-1, descending=True)[..., :2]), s.gather(-1, best)
    ),
    "best, sorted": lambda s: s.masked_fill(s < s.sort(-1).values[..., 3:4], -INF),
    "bounded below": lambda s: s.masked_fill(~STRICT, -INF).clamp(min=-1e4),
    "bounded sum": lambda s: (s + FUTURE).clamp_(min=torch.finfo(torch.float32).min),
    "no infinities": lambda s: torch.nan_to_num(s.masked_fill(~STRICT, -INF), nan=0.0),
    "no infinities in place": lambda s: s.masked_fill(~STRICT, -INF).nan_to_num_(neginf=-1e9),
    "clamped mask": lambda s: (s + LOW_FUTURE).clamp(-5e4, 5e4),
    "bounds that change nothing": lambda s: s.clamp(-80, 80).masked_fill(~CAUSAL, -INF),
    "less the largest of a row": lambda s: s - s.amax(-1, keepdim=True),
    "less the mean of a row": lambda s: s - s.mean(-1)[..., None],
    "over the deviation of a row": lambda s: s / s.std(-1, keepdim=True),
    "less the mean of a key": lambda s: s - s.mean(-2, keepdim=True),
    "less the mean of all": lambda s: s - s.mean(),
    "less the mean of the heads": lambda s: s - s.mean(1, keepdim=True),
    "less the largest of some keys": lambda s: s - s[..., FEW].amax(-1, keepdim=True),
    "a large number added": lambda s: s + 1e7,
    "scores times one": lambda s: s * torch.ones(T),
    "scores rounded": lambda s: s.bfloat16().float(),
    "relu": torch.relu,
    "relu_": lambda s: s.relu_(),
    "mild fill": lambda s: s.masked_fill(~CAUSAL, -5.0),
    "zeros for a mask": lambda s: s * CAUSAL,
    "infinity times 0": lambda s: s.masked_fill(~CAUSAL, -INF) * CAUSAL,
    "layer norm": lambda s: F.layer_norm(s, (T,)),
    "sinh": torch.sinh,
    "sorted": lambda s: s.sort(-1).values,
    "largest first": lambda s: s.topk(T).values,
    "scores flipped": lambda s: s.flip(-1),
    "numbers put in": assigned((..., 0), torch.arange(5.0)),
    "added by index": lambda s: s.index_put(
        (torch.tensor(1),), torch.tensor(-1e9), accumulate=True
    ),
    "narrow bounds": lambda s: s.clamp(-0.01, 0.01),
    "mean of the heads": lambda s: s.mean(1, keepdim=True),
    "sum of the heads": lambda s: s.sum(1)[:, None],
    "largest of the heads": lambda s: s.amax(1, keepdim=True),
    "mean of the texts": lambda s: s.mean((0, 1), keepdim=True),
    "some keys": lambda s: s[..., FEW],
    "some keys by name": lambda s: s.index_select(-1, FEW),
    "some queries": lambda s: s[:, :, FEW],
    "last rows and keys": lambda s: s[:, :, -2:, 1:],
    "keys in groups": lambda s: F.avg_pool2d(s, (1, 2)),
    "repeated queries": lambda s: s.repeat(1, 1, 2, 1),
}


# Softmaxes that are written as something else


def over_sums(powers: Tensor, beside: float | Tensor = 0.0) -> Tensor:
    return powers / (beside + powers.sum(-1, keepdim=True))


def over_sums_(powers: Tensor, beside: float = 0.0) -> Tensor:
    total = powers.sum(-1, keepdim=True)
    total += beside
    powers /= total
    return powers


def logsumexp_by_hand(s: Tensor) -> Tensor:
    most = s.amax(-1, keepdim=True)
    return (s - (most + (s - most).exp().sum(-1, keepdim=True).log())).exp()


def stable_softmax_one(s: Tensor) -> Tensor:
    most = s.amax(-1, keepdim=True).clamp(min=0)
    return over_sums(torch.exp(s - most), torch.exp(-most))


def bounded_sums(s: Tensor) -> Tensor:
    powers = (s - s.amax(-1, keepdim=True)).exp() * CAUSAL.float()
    return powers * (1 / powers.sum(-1, keepdim=True).clamp(min=1e-9))


def gpt_oss(s: Tensor) -> Tensor:
    sinks = torch.tensor([0.5, -1.0, 2.0]).reshape(1, -1, 1, 1).expand(2, -1, T, -1)
    combined = torch.cat([s * 0.4 + LOW_FUTURE, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]


def rows_of_softmaxes(order: list[int]) -> Step:
    def softmaxes(s: Tensor) -> Tensor:
        weights = torch.zeros(2, 3, T, T)
        for i, row in enumerate(order):
            weights[:, :, row] = s[:, :, i].softmax(-1)
        return weights

    return softmaxes


SOFTMAXES: dict[str, Step] = {
    "module": nn.Softmax(dim=-1),
    "in float32": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).type_as(s),
    "safe softmax": lambda s: torch.ops.aten._safe_softmax(s.masked_fill(CAUSAL.flip(0), -INF), -1),
    "of a view": lambda s: s.view(6, T, T).softmax(-1).view(2, 3, T, T),
    "gpt-oss": gpt_oss,
    "sink first": lambda s: torch.cat((torch.zeros(2, 3, T, 1), s), -1).softmax(-1)[..., 1:],
    "NaN rows": lambda s: s.masked_fill(~(CAUSAL & LATER), -INF).softmax(-1),
    "NaN rows made 0": lambda s: s.masked_fill(~(CAUSAL & LATER), -INF).softmax(-1).nan_to_num(),
    "hidden rows made 0": lambda s: s.masked_fill(~LATER, -INF).softmax(-1).nan_to_num() * LATER,
    "exponentials": lambda s: over_sums(torch.exp(s)),
    "exponentials less the largest": lambda s: over_sums((s / 2 - s.amax(-1, True) / 2).exp()),
    "masked exponentials": lambda s: over_sums(s.masked_fill(~CAUSAL, -INF).exp()),
    "exponentials in place": lambda s: over_sums_(s.sub_(s.amax(-1, keepdim=True)).exp_()),
    "log_softmax": lambda s: F.log_softmax(s, dim=-1).exp(),
    "log_softmax in place": lambda s: torch.log_softmax(s.masked_fill_(~CAUSAL, -INF), -1).exp_(),
    "log_softmax and a mask": lambda s: (s.log_softmax(-1) + FUTURE).softmax(-1),
    "logsumexp": lambda s: torch.exp(s - s.logsumexp(-1, keepdim=True)),
    "logsumexp in place": lambda s: (
        (m := s.masked_fill(~CAUSAL, -INF)).sub_(m.logsumexp(-1, keepdim=True)).exp_()
    ),
    "logsumexp by hand": logsumexp_by_hand,
    "powers of two": lambda s: over_sums(torch.exp2(s - s.amax(-1, keepdim=True))),
    "softmax one": lambda s: over_sums(torch.exp(s), 1),
    "softmax one of what is left": lambda s: over_sums((s - s.amax(-1, keepdim=True)).exp(), 1),
    "softmax one, stable": stable_softmax_one,
    "softmax one, made whole": lambda s: over_sums(over_sums(torch.exp(s), 1)),
    "two beside": lambda s: over_sums_(s.masked_fill(~CAUSAL, -INF).exp_(), 2.0),
    "hardly anything beside": lambda s: over_sums((s - s.amax(-1, True)).exp(), 1e-9),
    "mask times powers": lambda s: over_sums(torch.exp(s) * CAUSAL),
    "bounded sums": bounded_sums,
    "filled powers": lambda s: over_sums(torch.exp(s).masked_fill(~CAUSAL, 0)),
    "chosen powers": lambda s: over_sums(torch.where(CAUSAL, torch.exp(s), 0.0)),
    "triangle of powers": lambda s: over_sums(torch.exp(s).tril()),
    "part set to zero": lambda s: over_sums_(assigned((..., slice(3, None)), 0)(torch.exp(s))),
    "renormalised": lambda s: over_sums(s.softmax(-1) * CAUSAL),
    "renormalised twice": lambda s: over_sums(over_sums(s.softmax(-1) * CAUSAL) * NEAR, 1e-12),
    "renormalised in place": lambda s: over_sums_(s.softmax(-1).mul_(CAUSAL)),
    "normalised": lambda s: F.normalize(s.softmax(-1).masked_fill(~CAUSAL, 0.0), p=1, dim=-1),
    "renormalised with numbers": lambda s: over_sums(
        s.softmax(-1) * torch.tensor([0.1, 1.0, 2.0, 0.5, 0.0])
    ),
    "over the queries": lambda s: s.softmax(-2),
    "over the heads": lambda s: s.softmax(1),
    "over the texts": lambda s: s.softmax(0),
    "row by row": rows_of_softmaxes([0, 1, 2, 3, 4]),
    "rows backwards": rows_of_softmaxes([4, 3, 2, 1, 0]),
}


# Changes of the softmax's weights, which meet the value then


def made_whole_again(w: Tensor) -> Tensor:
    w = w * LATER * CAUSAL
    return w / w.sum(-1, keepdim=True).clamp_min(1e-9)


def largest(w: Tensor) -> Tensor:
    values, index = w.topk(3, -1)
    return torch.zeros_like(w).scatter_(-1, index, values)


def beside_zeros(change: Callable[[Tensor, Tensor], object]) -> Step:
    """Fill a larger buffer from the weights."""

    def step(w: Tensor) -> Tensor:
        room = torch.zeros(2, 3, T, T + 2)
        change(room, w)
        return room

    return step


def two_softmaxes_in_a_row(room: Tensor, w: Tensor) -> None:
    room[..., :2] = w[..., :2]
    room[..., 2 : T + 2] = w.clone()


def one_head_in_two_places(room: Tensor, w: Tensor) -> None:
    for head in (0, 1, 2, 0):
        room[:, head, :, :T] = w[:, (head + 1) % 3]


def exchanged(first: tuple[object, ...], second: tuple[object, ...]) -> Step:
    def step(w: Tensor) -> Tensor:
        w = F.pad(w, (0, 2))
        w[first], w[second] = w[second].clone(), w[first].clone()
        return w

    return step


def bernoulli(w: Tensor) -> Tensor:
    return torch.bernoulli(torch.full_like(w, 0.7))


def drawn(w: Tensor) -> Tensor:
    return torch.rand(w.shape) < 0.7


CHANGES: dict[str, Step] = {
    # Nothing
    "views": lambda w: w.flatten(0, 1).view(2, 3, T, T),
    "casts": lambda w: w.double().float(),
    "casts that round": lambda w: w.bfloat16().float(),
    "contiguous": lambda w: w.mT.contiguous().mT,
    "expanded": lambda w: w[:, :, None].expand(2, 3, 5, T, T)[:, :, 1],
    "times 1": lambda w: w * torch.ones(T, T),
    "times 1 in place": lambda w: w.mul_(torch.ones(T, T)),
    "no NaN": lambda w: w.nan_to_num(),
    "no NaN in place": lambda w: w.nan_to_num_(),
    "zeros where zeros are": lambda w: w.masked_fill_(w == 0, 0.0),
    "bounds below any weight": lambda w: w.clamp(1e-12),
    "no dropout": lambda w: F.dropout(w, 0.1, training=False),
    "cat as it was": lambda w: torch.cat((w[:, :, :4], w[:, :, 4:]), 2),
    **{f"stacked axis {axis}": lambda w, a=axis: torch.stack(w.unbind(a), a) for axis in (1, 2, 3)},
    # Rows that are set to 0
    "rows by a product": lambda w: w * LATER,
    "heads by a product": lambda w: w * HEADS,
    "a text by a product": lambda w: w * torch.tensor([0.0, 1.0]).view(2, 1, 1, 1),
    "rows transposed": lambda w: (w.mT * LATER.mT).mT,
    "rows by a fill": lambda w: w.masked_fill(~LATER, 0.0),
    "rows by where": lambda w: torch.where(LATER, w, 0.0),
    "rows by a product in place": lambda w: w.mul_(LATER),
    "rows by a fill in place": lambda w: w.masked_fill_(~LATER, 0.0),
    "rows by index_fill": lambda w: w.index_fill(2, torch.tensor([0, 4]), 0.0),
    "a row in place": assigned((ALL, ALL, 0), 0),
    "heads and a row": lambda w: assigned((ALL, ALL, 0), 0)(w * HEADS),
    "zeros before the rows": lambda w: torch.cat([torch.zeros_like(w[:, :, :2]), w[:, :, 2:]], 2),
    "rows by chance": lambda w: w * (torch.rand(2, 3, T, 1) < 0.5),
    # Another order
    **{
        f"reversed axis {axis}": lambda w, a=axis: torch.stack(w.unbind(a)[::-1], a)
        for axis in (1, 2, 3)
    },
    "flip": lambda w: w.flip(-1),
    "roll": lambda w: w.roll(1, -1),
    "heads by index": lambda w: w[:, torch.tensor([2, 0, 1])],
    "one head twice": lambda w: torch.stack([w[:, 1]] * 3, 1),
    "one head for all": lambda w: w[:, :1].expand(-1, 3, -1, -1),
    "heads taken for texts": lambda w: w.reshape(3, 2, T, T).transpose(0, 1),
    "one row for all": lambda w: w[:, :, -1:].expand_as(w),
    # Other weights
    "a row made even": assigned((ALL, ALL, 2), 1 / T),
    "largest, made whole": lambda w: over_sums(largest(w)),
    "softmax again": lambda w: w.softmax(-1),
    "mean of the weights": lambda w: w.mean(1, keepdim=True),
    "made whole again": made_whole_again,
    "product with themselves": lambda w: w @ w,
    # Beside zeros
    "padded": lambda w: F.pad(w, (0, 2)),
    "padded before": lambda w: F.pad(w, (1, 0)),
    "padded by cat": lambda w: torch.cat((w, torch.zeros(2, 3, T, 2)), -1),
    "in a larger buffer": beside_zeros(lambda room, w: room[..., :T].copy_(w)),
    "more queries": lambda w: F.pad(w, (0, 0, 0, 2)),
    "sorted beside zeros": lambda w: F.pad(w, (0, 2)).sort(-1).values,
    "one head in two places": beside_zeros(one_head_in_two_places),
    "numbers exchanged": exchanged((ALL, ALL, 0, 0), (ALL, ALL, 0, 1)),
    "rows exchanged": exchanged((ALL, ALL, 0), (ALL, ALL, 1)),
    # No weights
    "masked by a product": lambda w: w * CAUSAL,
    "masked by a fill": lambda w: w.masked_fill(~CAUSAL, 0.0),
    "masked in place": lambda w: w.masked_fill_(~CAUSAL, 0.0),
    "masked by a product in place": lambda w: w.mul_(CAUSAL),
    "masked in half precision": lambda w: w.half() * CAUSAL.half(),
    "masked in half precision, and back": lambda w: (w.half() * CAUSAL).float(),
    "halved": lambda w: w * 0.5,
    "halved in place": lambda w: w.mul_(0.5),
    "divided in place": lambda w: w.div_(3),
    "doubled": lambda w: w * 2,
    "doubled copy": lambda w: w.detach().clone().mul_(2),
    "twice a mask": lambda w: w * (CAUSAL * 2),
    "a key set to 0": assigned((..., 3), 0),
    "overwritten": assigned((ALL, ALL, slice(2, None)), torch.arange(5.0)),
    "the largest alone": largest,
    "small ones set to 0": lambda w: torch.where(w < 0.2, 0.0, w),
    "all set to 0": lambda w: w * 0,
    "heads by einsum": lambda w: torch.einsum("bhij,hg->bgij", w, MIXTURE),
    "heads by einsum, constant": lambda w: torch.einsum("bhij,hg->bgij", w, MEANS),
    "heads by linear": lambda w: F.linear(w.permute(0, 2, 3, 1), MIXTURE).permute(0, 3, 1, 2),
    "sum of the weights": lambda w: w.sum(1, keepdim=True),
    "largest of the weights": lambda w: w.amax(1, keepdim=True),
    "pooled": lambda w: F.avg_pool1d(w.flatten(0, 1), 3, 1, 1).view_as(w),
    "sums so far": lambda w: w.cumsum(-1),
    "squares": lambda w: w.pow(2),
    "complex numbers": lambda w: torch.complex(w, w).imag,
    "where transposed": lambda w: torch.where(CAUSAL, w, w.mT),
    "added": lambda w: w + w.mT,
    "filled beside": beside_zeros(lambda room, w: room.fill_(0.5)[..., :T].copy_(w)),
    "two softmaxes in a row": beside_zeros(two_softmaxes_in_a_row),
    "padded with others": lambda w: F.pad(w, (0, 2), value=0.5),
    "padded and halved": lambda w: F.pad(w, (0, 2)) * 0.5,
    "scaled before": lambda w: bernoulli(w) / 0.7 * w,
    "by bools": lambda w: w * (drawn(w).float() / 0.7),
    "filled by chance": lambda w: w.masked_fill(torch.rand_like(w) > 0.7, 0),
    "chosen by chance": lambda w: torch.where(drawn(w), w, 0.0),
    "times uniform bools": lambda w: w * torch.empty_like(w).uniform_().lt_(0.7),
    "dropped, not scaled": lambda w: w * bernoulli(w),
    "dropped in half precision": lambda w: (w.half() * bernoulli(w).half()).float(),
    "dropped and masked": lambda w: w * bernoulli(w) * CAUSAL,
    "dropped and made smaller": lambda w: w * bernoulli(w) * 0.3,
    "dropped, scaled after": lambda w: w * bernoulli(w) / 0.7,
    "dropped, scaled in place": lambda w: w.mul_(bernoulli(w)).div_(0.7),
    "filled, scaled in place": lambda w: w.masked_fill_(~drawn(w), 0.0).mul_(1 / 0.7),
    "times numbers by chance": lambda w: w * torch.rand_like(w),
    "times a number by chance": lambda w: w * torch.rand_like(w).sum(),
}

DROPOUTS: dict[str, Step] = {
    "dropout": lambda w: F.dropout(w, 0.5),
    "dropout, copied": lambda w: torch.dropout(w, 0.3, True).clone(),
    "dropout in place": lambda w: F.dropout(w, 0.3, inplace=True),
    "dropout, drawn in place": lambda w: w * torch.empty_like(w).bernoulli_(0.7).div_(0.7),
}
"""Dropout is looked through: the weights before it are recorded."""


# Whole ways


def einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k]).masked_fill(CAUSAL == 0, float("-1e20"))
    weights = torch.softmax(energy / (21 ** (1 / 2)), dim=3)
    return weights, torch.einsum("nhql,nlhd->nqhd", [weights, v])


def einsum_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """XLNet's order of axes, (query, key, batch, head): the softmax is over axis 1."""
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    weights = F.softmax(torch.einsum("ibnd,jbnd->ijbn", q, k) * 0.5, dim=1)
    return weights.permute(2, 3, 0, 1), torch.einsum("ijbn,jbnd->ibnd", weights, v)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """timm's: one tensor (3, batch, heads, tokens, dim), unbound."""
    q, k, v = torch.stack((q, k, v)).unbind(0)
    weights = (q * 0.3 @ k.mT).softmax(dim=-1)
    return weights, (weights @ v).transpose(1, 2).reshape(2, T, -1)


def mask_on_four_axes(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """fairseq's: (batch * heads, tokens, dim), bmm, and a mask on four axes in between."""
    q, k, v = merged(q, k, v)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    scores = torch.bmm(q, k.mT).view(2, 3, T, T).masked_fill(padding[:, None, None], -INF)
    weights = F.softmax(scores.view(6, T, T), dim=-1, dtype=torch.float32)
    return weights.view(2, 3, T, T), torch.bmm(weights.to(v.dtype), v)


def of_a_vector(product: Callable[[Tensor, Tensor], Tensor]) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        weights = F.softmax(product(q[0, 0, 1], k[0, 0]), dim=0)
        return weights[None], weights @ v[0, 0]

    return way


def two_groups(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q = torch.cat((q, q.flip(1)), 1)[:, :4]
    k, v = (x[:, :2].repeat_interleave(2, dim=1) for x in (k, v))
    weights = F.softmax(q @ k.mT, dim=-1)
    return weights, weights @ v


def grouped_axes(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """Heads in two axes, (batch, kv_heads, heads of a group): mesh-tensorflow's way."""
    q = torch.stack((q[:, :2], q[:, 1:]), 2)
    weights = (torch.einsum("bkgqd,bksd->bkgqs", q, k[:, :2]) + FUTURE).softmax(-1)
    return weights.flatten(1, 2), torch.einsum("bkgqs,bksd->bkgqd", weights, v[:, :2])


def multi_query(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """GPT-BigCode's: one key for all heads, heads and tokens of the query in one axis."""
    empty = torch.empty(2, 3 * T, T)
    scores = torch.baddbmm(empty, q.reshape(2, 3 * T, D), k[:, 0].mT, beta=0, alpha=0.4)
    weights = scores.view(2, 3, T, T).softmax(-1)
    return weights, torch.bmm(weights.view(2, 3 * T, T), v[:, 0])


def exponentials_of_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    powers = torch.exp(k @ q.mT)
    return meet((powers / powers.sum(-2, keepdim=True)).mT, v)


def half_precision(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.half() for x in (q, k, v))
    scores = torch.matmul(q * 0.378, k.mT) + torch.triu(torch.full((T, T), -6e4).half(), 1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    return weights, weights.half() @ v


def half_with_a_float_softmax(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (x.bfloat16() for x in (q, k, v))
    weights = F.softmax(torch.matmul(q, k.mT) * 0.378, dim=-1, dtype=torch.float32)
    return weights, torch.matmul(weights.to(q.dtype), v)


def equal_tokens(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    q, k, v = (torch.stack([t[0, 0, 0], t[0, 0, 0], t[0, 0, 1]]) for t in (q, k, v))
    weights = torch.stack([torch.stack([a @ b for b in k]) for a in q]).softmax(-1)
    return weights, weights @ v


def both_softmaxes(*, in_turn: bool) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        scores = q @ k.mT
        ahead = scores.softmax(-1)
        output = ahead @ v if in_turn else None
        back = scores.softmax(-2).mT
        if output is None:
            return [back, ahead], [back @ v, ahead @ v]
        return [ahead, back], [output, back @ v]

    return way


def several(parts: Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]) -> Way:
    """Multiply parts of weights with parts of the value."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        pairs = parts((q @ k.mT / 2).softmax(-1), v)
        return [weights for weights, _ in pairs], [weights @ value for weights, value in pairs]

    return way


def each_softmax(parts: Callable[[Tensor], list[Tensor]]) -> Way:
    """Take one softmax of each part of the scores of one product."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        weights: list[Tensor] = []
        outputs: list[Tensor] = []
        for part in parts(q @ k.mT):
            weights.append(part.softmax(-1))
            outputs.append(weights[-1] @ v[: len(part)])
        return weights, outputs

    return way


def divided_at_the_end(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    """As flash attention does: the sum divides what the exponentials have drawn from the value."""
    scores = (q @ k.mT).masked_fill(~CAUSAL, -INF)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return powers, powers @ v / powers.sum(-1, keepdim=True)


def written_out(change: Step) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        weights = change((q @ k.mT).softmax(-1))
        return weights, (weights[..., None] * v[:, :, None]).sum(-2)

    return way


def cell_by_cell(change: Step) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        weights, output = change((q @ k.mT).softmax(-1)), torch.zeros_like(v)
        for j in range(T):
            output = output + weights[..., j, None] * v[:, :, j : j + 1]
        return weights, output

    return way


def with_entropy(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).softmax(-1)
    (weights * (weights + 1e-9).log()).sum()
    return weights, weights @ v


def dropout_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).softmax(-1) * HEADS
    return meet(weights, v, F.dropout(weights, 0.5))


def noise_drawn_before(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    keep = torch.bernoulli(torch.full((2, 3, T, T), 0.7))
    return meet((q @ k.mT).softmax(-1) * keep / 0.7, v)


def two_values(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    weights = (q @ k.mT).softmax(-1)
    pair = [weights, weights * LATER]
    return pair, [pair[0] @ v, pair[1] @ (2 * v)]


def beside(pool: Step) -> Way:
    """Take features from a softmax of pooled scores, which meets no value."""

    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        scores = q @ k.mT
        _ = pool(scores[:, :2].mean(1).softmax(-1))
        return meet(scores.softmax(-1), v)

    return way


def pooled_beside(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    scores = q @ k.mT
    pair = [scores[:, :2].amax(1).softmax(-1), scores.softmax(-1).flip(-1)]
    return pair, [pair[0] @ torch.eye(T), pair[1] @ v]


def pooled_keys(pool: Callable[[Tensor, int], Tensor]) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        weights = pool((q @ k[:, :, :4].mT).softmax(-1).unflatten(-1, (2, 2)), -1)
        return weights, weights @ v[:, :, :2]

    return way


def way_of_scores(scores: Callable[[Tensor, Tensor], Tensor]) -> Way:
    return lambda q, k, v: meet(scores(q, k).softmax(-1), v)


def way_of_softmax(softmax: Step) -> Way:
    return lambda q, k, v: meet(softmax(q @ k.mT), v)


def way_of_dropout(drop: Step) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Answer:
        weights = (q @ k.mT).softmax(-1)
        return meet(weights.clone(), v, drop(weights))

    return way


WHOLE: dict[str, Way] = {
    "einsum, tokens first": einsum_tokens_first,
    "einsum, heads last": einsum_heads_last,
    "packed": packed,
    "mask on four axes": mask_on_four_axes,
    "a vector times keys": of_a_vector(lambda q, k: q @ k.t()),
    "keys times a vector": of_a_vector(lambda q, k: k @ q),
    "two groups": two_groups,
    "grouped axes": grouped_axes,
    "multi query": multi_query,
    "keys first": lambda q, k, v: meet((k @ q.mT).softmax(dim=-2).mT, v),
    "exponentials of keys first": exponentials_of_keys_first,
    "half precision": half_precision,
    "half precision, float softmax": half_with_a_float_softmax,
    "equal tokens": equal_tokens,
    "both softmaxes": both_softmaxes(in_turn=False),
    "both softmaxes in turn": both_softmaxes(in_turn=True),
    "by heads": several(lambda w, v: [(w[:, h], v[:, h]) for h in range(3)]),
    "by texts": several(lambda w, v: [*zip(w.split(1), v.split(1), strict=True)]),
    "by rows": several(lambda w, v: [(w[:, :, i : i + 1], v) for i in range(T)]),
    "by keys": several(lambda w, v: [*zip(w.split(2, -1), v.split(2, 2), strict=True)]),
    "keys left out": several(lambda w, v: [(w[..., 1:], v[:, :, 1:])]),
    "a head left out": several(lambda w, v: [(w[:, 1:], v[:, 1:])]),
    "merged, in two parts": several(
        lambda w, v: [*zip(w.flatten(0, 1).split(4), v.flatten(0, 1).split(4), strict=True)]
    ),
    "a softmax for each row": each_softmax(lambda s: [s[:, :, i : i + 1] for i in range(T)]),
    "a softmax for each text": each_softmax(lambda s: [s[i : i + 1] for i in range(2)]),
    "divided at the end": divided_at_the_end,
    **{
        f"{how}, {name}": write(change)
        for how, write in (("written out", written_out), ("cell by cell", cell_by_cell))
        for name, change in {
            "unchanged": lambda w: w,
            "flipped": lambda w: w.flip(-1),
            "rolled": lambda w: w.roll(1, -1),
            "squared": lambda w: w**2,
            "mean of the heads": lambda w: w.mean(1, keepdim=True),
        }.items()
    },
    "with entropy": with_entropy,
    "dropout of rows set to 0": dropout_of_rows,
    "noise drawn before": noise_drawn_before,
    "two values": two_values,
    "softmax one, stacked": way_of_softmax(
        lambda s: torch.stack(SOFTMAXES["softmax one"](s).unbind(1), 1)
    ),
    "exponentials, heads by einsum": way_of_softmax(
        lambda s: CHANGES["heads by einsum"](SOFTMAXES["exponentials"](s))
    ),
    "exponentials in place, product": way_of_softmax(
        lambda s: (w := SOFTMAXES["exponentials in place"](s)) @ w
    ),
    "gpt-oss, product": way_of_softmax(lambda s: (w := gpt_oss(s)) @ w),
    "diagonal beside": beside(lambda w: w.diagonal(dim1=-2, dim2=-1)),
    "mean of the queries beside": beside(lambda w: w.mean(-2)),
    "pooled beside": pooled_beside,
    "pooled keys, sum": pooled_keys(Tensor.sum),
    "pooled keys, mean": pooled_keys(Tensor.mean),
    "pooled keys, largest": pooled_keys(Tensor.amax),
}


# The table

WAYS: dict[str, Way] = {
    **{name: way_of_scores(scores) for name, scores in SCORES.items()},
    **{
        name: way_of_scores(lambda q, k, scores=scores: scores(q[0, 0], k[0, 0]))
        for name, scores in SCORES_OF_A_HEAD.items()
    },
    **{name: way_of_softmax(lambda s, f=step: f(s).softmax(-1)) for name, step in STEPS.items()},
    **{name: way_of_softmax(softmax) for name, softmax in SOFTMAXES.items()},
    **{name: way_of_softmax(lambda s, f=f: f(s.softmax(-1))) for name, f in CHANGES.items()},
    **{name: way_of_dropout(drop) for name, drop in DROPOUTS.items()},
    **WHOLE,
}

AS_WEIGHTS = {
    *("keys in groups", "cells"),
    # A bias or temperature for each head or query beside other steps, and steps without a guess
    *("numbers for each query and key", "softcap of a bias", "bias of a part"),
    # Scores of another product, or in another order
    *("two sources", "two texts of keys", "a row written over", "heads swapped in place"),
    *("heads in a buffer", "heads stacked", "texts stacked", "one key for all heads", "blocks"),
    *("rows", "columns", "rows of the past", "numbers between", "masked later", "comprehension"),
    *("the future in the loop", "rows with a bias", "padded rows", "vertical", "equal tokens"),
    *("looked at on the way", "a scale for each row", "sorted", "largest first", "scores flipped"),
    *("some keys", "some keys by name", "some queries", "repeated queries"),
    *("talking heads, constant", "talking heads, convolution"),
    # Other scores
    *("best, where", "best, scattered", "best, gathered", "bounded below", "relu", "relu_", "sinh"),
    *("mild fill", "zeros for a mask", "infinity times 0", "numbers put in", "narrow bounds"),
    # Another softmax
    *("exponentials in place", "log_softmax in place", "logsumexp", "logsumexp in place"),
    *("powers of two", "mask times powers", "bounded sums", "filled powers", "chosen powers"),
    *("triangle of powers", "part set to zero", "renormalised", "renormalised twice"),
    *("renormalised in place", "normalised", "renormalised with numbers"),
    # Weights that were changed
    *("stacked axis 1", "stacked axis 2", "stacked axis 3", "zeros before the rows"),
    *("reversed axis 1", "reversed axis 2", "reversed axis 3", "flip", "roll", "heads by index"),
    *("one head twice", "one row for all", "a row made even", "largest, made whole"),
    *("softmax again", "mean of the weights", "made whole again", "product with themselves"),
    *("padded", "padded before", "padded by cat", "in a larger buffer", "more queries"),
    *("sorted beside zeros", "one head in two places", "numbers exchanged", "rows exchanged"),
    *("pooled keys, sum", "pooled beside", "exponentials in place, product"),
    *("talking heads", "heads by einsum, constant", "row by row", "rows backwards"),
    *("mean of the heads", "sum of the heads", "largest of the heads", "mean of the texts"),
    *("written out, flipped", "written out, rolled", "written out, mean of the heads"),
    *("bias after a softcap", "a large number added", "logsumexp by hand"),
}
AS_WEIGHTS_WITH_GRADIENTS = AS_WEIGHTS | {
    *("temperatures", "temperatures and a mask", "swin v2", "squared distances"),
    *("over the deviation of a row", "less the mean of a key", "less the mean of the heads"),
    *("layer norm", "added by index", "no infinities in place", "no infinities", "two fills"),
    *("rows without a key", "the lowest number and infinity", "two masks"),
}
"""Gradients would not reach a learned temperature or statistics of the scores, or get lost in rows
whose scores were all filled.
"""

SUMS = r"(cannot be kept|without a softmax|multiply a value).*: a row sums to (?P<sum>\d+(\.\d+)?)"
UNMET = r"cannot be kept: the weights of the softmax \(.*\) met no value in a product that observe"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("over the heads", "over the texts", "keys left out", "by keys"), SUMS),
    "over the queries": SUMS + ", and each column to 1: it runs over the queries",
    **dict.fromkeys(("softmax one", "softmax one of what is left", "softmax one, stable"), SUMS),
    **dict.fromkeys(("two beside", "divided at the end"), SUMS),
    **{name: SUMS for name in CHANGES if name.startswith(("masked", "halved", "divided", "doub"))},
    **{
        name: SUMS
        for name in CHANGES
        if name.startswith(("dropped", "times n", "times a", "times u", "filled"))
    },
    **dict.fromkeys(("twice a mask", "a key set to 0", "overwritten", "the largest alone"), SUMS),
    **dict.fromkeys(("small ones set to 0", "sum of the weights", "largest of the weights"), SUMS),
    **dict.fromkeys(("pooled", "sums so far", "squares", "where transposed", "added"), SUMS),
    **dict.fromkeys(("two softmaxes in a row", "padded with others", "padded and halved"), SUMS),
    **dict.fromkeys(("scaled before", "by bools", "chosen by chance", "noise drawn before"), SUMS),
    **dict.fromkeys(("pooled keys, mean", "pooled keys, largest", "gpt-oss, product"), SUMS),
    **dict.fromkeys(("softmax one, stacked", "exponentials, heads by einsum"), SUMS),
    "complex numbers": r"the weights of the softmax \(.*\) became sparse or complex numbers",
    "written out, squared": SUMS,
    **{name: UNMET for name in WHOLE if name.startswith("cell by cell")},
    **dict.fromkeys(("heads by einsum", "heads by linear"), "(a row sums|the least of them is)"),
}

ROUNDED = {
    **dict.fromkeys(("casts that round", "half precision, float softmax"), 4e-3),
    "half precision": 1e-3,
    "scores rounded": 2e-2,
}
"""The largest error of a weight where a dtype of less precision rounds."""
