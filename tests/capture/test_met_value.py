"""Hand-written attention: a recording holds the operand that met the value, or it is refused.

Each layer keeps a copy of its own last weights. The copy is compared with the recording, up to the
order of batch and heads. An ordinary layer runs beside it, so that nothing is missing in silence.
"""

import ctypes
import gc
import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import regard
from regard.tracing.tracer import apart

B, H, T, D = 2, 3, 6, 12
INF = torch.inf
CAUSAL = torch.ones(T, T).tril().bool()
THIRD = (torch.arange(T) == 2)[:, None]
STEPS = torch.linspace(0.1, 1, T)
LOWEST = torch.finfo(torch.float32).min
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

Change: TypeAlias = Callable[[Tensor], Any]
Weigh: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Change], Tensor]


class Layer(nn.Module):
    """Attention with heads; ``attend`` calls its last argument with the weights that it uses."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.attend = attend
        self.weights: list[Tensor] = []
        self.storages: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        project = (self.query, self.key, self.value)
        query, key, value = (each(x).unflatten(-1, (H, 4)).transpose(1, 2) for each in project)
        return self.attend(query * 3, key * 3, value, self.keep)

    def keep(self, weights: Tensor) -> Tensor:
        with apart():
            self.weights.append(weights.detach().double().clone())
        self.storages.append(StorageWeakRef(weights.untyped_storage()))
        return weights


def observed(
    layer: nn.Module,
    *,
    mode: Callable[[], AbstractContextManager[None]] = torch.no_grad,
    dtype: torch.dtype = torch.float32,
    calls: int = 1,
) -> tuple[regard.Recording, list[str]]:
    """Return the recording of a layer and the warnings."""
    plain = nn.MultiheadAttention(D, 1, batch_first=True)
    model = nn.ModuleDict({"layer": layer, "plain": plain}).to(dtype)
    x = torch.randn(B, T, D, generator=torch.manual_seed(1)).to(dtype)
    with warnings.catch_warnings(record=True) as caught, mode():
        warnings.simplefilter("always")
        with regard.observe(model) as seen:
            for _ in range(calls):
                layer(x)
            plain(x, x, x)
    assert "plain" in list(seen)
    return seen, [str(each.message) for each in caught if "layer" in str(each.message)]


def error(recorded: Tensor, weights: Tensor) -> float:
    """Return the largest difference, in the best order of the leading axes."""
    if weights.numel() != recorded.numel():
        weights = weights.expand(recorded.shape)
    assert weights.shape[-2:] == recorded.shape[-2:]
    turned = (
        weights.permute(*order, -2, -1).reshape(recorded.shape)
        for order in itertools.permutations(range(weights.ndim - 2))
    )
    # A row without keys may be 0 instead of NaN.
    recorded = recorded.detach().double().nan_to_num()
    return min(float((each.nan_to_num() - recorded).abs().max()) for each in turned)


def check(layer: Layer, *, limit: float = 2e-5, **how: Any) -> regard.Recording:
    """Assert that exactly the layer's own weights are recorded."""
    seen, messages = observed(layer, **how)
    recorded = [seen[name].to_dense() for name in seen if name.startswith("layer")]
    assert all("NaN in the model" in message for message in messages)
    assert len(recorded) == len(layer.weights)
    assert max(map(error, recorded, layer.weights)) <= limit
    return seen


def weighing(weigh: Weigh) -> Layer:
    return Layer(lambda q, k, v, keep: keep(weigh(q, k)) @ v)


def softmax(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1)


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def best(weights: Tensor) -> Tensor:
    values, indices = weights.topk(3)
    return torch.zeros_like(weights).scatter(-1, indices, values)


def capped(scores: Tensor) -> Tensor:
    return 5 * torch.tanh(scores / 5)


def with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


# What is done to weights and scores

EDITS: dict[str, Change] = {
    "flip": lambda w: w.flip(-1),
    "heads by index": lambda w: w[:, [2, 0, 1]],
    "sort": lambda w: w.sort(-1).values,
    "tril, normalised": lambda w: normalised(w.tril()),
    "top-k, normalised": lambda w: normalised(best(w)),
    "mean of heads": lambda w: w.mean(1, keepdim=True),
    "copy_": lambda w: w.copy_(w.flip(1)),
    "heads repeated": lambda w: w[:, :1].repeat_interleave(H, 1),
    "head set to 0": lambda w: w * torch.tensor([1.0, 0, 1])[:, None, None],
}
SCORES: dict[str, Change] = {
    "softcap, then a bias": lambda s: capped(s) + STEPS * 3,
    "negated softcap": lambda s: -capped(s),
    "softcap with masks": lambda s: capped(s.masked_fill(~CAUSAL, -1e9)).masked_fill(~CAUSAL, -INF),
    "causal": lambda s: s.masked_fill(~CAUSAL, -INF),
    "sum of lowest": lambda s: s + torch.full((T, T), LOWEST).triu(1) + LOWEST * (STEPS < 0.2),
    "row without keys": lambda s: s.masked_fill(THIRD, -INF),
    "row of 1e8": lambda s: s + 1e8 * THIRD,
    "NaN row": lambda s: s.masked_fill(THIRD, torch.nan),
    "bias of -480 to -520": lambda s: s - torch.linspace(480, 520, T) * ~CAUSAL,
    "mean of heads": lambda s: s.mean(1, keepdim=True),
    "other layout": lambda s: functional.pad(s, (1, 0)).view(B, H, 7, T)[:, :, 1:].reshape(s.shape),
}
SOFTMAXES: dict[str, Change] = {
    "exp and sum": lambda s: normalised(s.exp()),
    "exp_ and sum": lambda s: (e := s.exp_()).div_(e.sum(-1, keepdim=True)),
    "logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "sinks": lambda s: with_sink(s, torch.tensor([1.0, 0.5, -1])[:, None, None]),
    # As in gpt-oss without a batch, where the first axis is that of the heads of keys.
    "sinks of groups": lambda s: with_sink(s, torch.linspace(-1, 2, B * H).view(B, H, 1, 1)),
}
WEIGHS: dict[str, Weigh] = {
    **{f"edit {name}": lambda q, k, of=of: of(softmax(q, k)) for name, of in EDITS.items()},
    **{
        f"score {name}": lambda q, k, of=of: of(q @ k.mT).softmax(-1) for name, of in SCORES.items()
    },
    **{f"softmax {name}": lambda q, k, of=of: of(q @ k.mT) for name, of in SOFTMAXES.items()},
    "rows repeated": lambda q, k: softmax(q, k).repeat_interleave(2, -2),
    "rows expanded": lambda q, k: (
        softmax(q, k)[..., None, :].expand(-1, -1, -1, 2, -1).flatten(2, 3)
    ),
    "rows tiled": lambda q, k: softmax(q, k).repeat(1, 1, 2, 1),
}
NO_WEIGHTS: dict[str, tuple[Change, str]] = {
    "8 bits": (lambda w: w.to(torch.float8_e4m3fn).to(w.dtype), "a row sums to "),
    "8 bits, wide": (lambda w: w.to(torch.float8_e5m2).to(w.dtype), "a row sums to "),
    "tril": (lambda w: w.tril(), "a row sums to 0.0"),
    "half": (lambda w: w * 0.5, "a row sums to 0.5"),
    "an epsilon": (lambda w: w / (1 + 1e-5), "a row sums to 0.99999"),
    "difference": (lambda w: w - w.roll(1, 1) * 0.5, "the least of them is -"),
}


@pytest.mark.parametrize(
    "weigh",
    WEIGHS.values(),
    ids=WEIGHS,
)
def test_what_met_the_value_is_recorded(weigh: Weigh) -> None:
    check(weighing(weigh))


@pytest.mark.parametrize(("edit", "reason"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_numbers_that_are_no_weights_are_refused(edit: Change, reason: str) -> None:
    seen, _ = observed(weighing(lambda q, k: edit(softmax(q, k))))
    assert reason in seen.refused[0].reason


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_weights_that_are_used_twice_are_both_recorded(edit: Change) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        edited = edit((weights := softmax(q, k)).clone())
        return keep(weights) @ v + keep(edited) @ v

    check(Layer(attend))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", ["edit flip", "score causal"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    check(weighing(WEIGHS[name]), dtype=dtype, limit=LIMITS[dtype])


def test_low_precision_hides_no_edit() -> None:
    def weigh(query: Tensor, key: Tensor) -> Tensor:
        scores = (query * 0.1 + 5) @ (key * 0.1 + 5).mT
        scores.data[..., :3] += 1.5
        return scores.softmax(-1)

    check(weighing(weigh), dtype=torch.bfloat16, limit=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_hides_no_factor_of_two_roundings(dtype: torch.dtype) -> None:
    factor = 1 - 2 * torch.finfo(dtype).eps
    seen, _ = observed(weighing(lambda q, k: softmax(q, k) * factor), dtype=dtype)
    assert "a row sums to 0.9" in seen.refused[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exponentials_of_rounded_logarithms_are_weights(dtype: torch.dtype) -> None:
    check(weighing(lambda q, k: (q @ k.mT).log_softmax(-1).exp()), dtype=dtype, limit=LIMITS[dtype])


# Dropout

DROPOUTS: tuple[Change, ...] = (
    lambda w: functional.dropout(w, 0.3, training=True),
    lambda w: functional.dropout(w, 0.3, training=True).flatten(0, 1).unflatten(0, (B, H)),
    lambda w: w * torch.empty_like(w).bernoulli_(0.7).div_(0.7),
)
AFTER_DROPOUT: dict[str, Change] = {
    **{name: EDITS[name] for name in ("flip", "heads by index", "copy_")},
    **{name: NO_WEIGHTS[name][0] for name in ("tril", "half")},
    "NumPy": lambda w: w.numpy().__imul__(0.5) is None or w,
    ".data": lambda w: w.data.copy_(w.data.roll(1, -1)) is None or w,
}


@pytest.mark.parametrize("drop", DROPOUTS)
def test_dropout_is_looked_through(drop: Change) -> None:
    check(Layer(lambda q, k, v, keep: drop(keep(softmax(q, k))) @ v))


@pytest.mark.parametrize("drop", [*DROPOUTS, lambda w: functional.dropout(w, 0.3, True, True)])
def test_dropout_is_looked_through_where_a_row_has_no_keys(drop: Change) -> None:
    def weigh(query: Tensor, key: Tensor) -> Tensor:
        hidden = (torch.arange(T) == 2)[:, None]
        return (query @ key.mT).masked_fill(hidden, -torch.inf).softmax(-1)

    check(Layer(lambda q, k, v, keep: drop(keep(weigh(q, k))) @ v))


@pytest.mark.parametrize("edit", AFTER_DROPOUT.values(), ids=AFTER_DROPOUT)
def test_edits_after_dropout_are_no_dropout(edit: Change) -> None:
    layer = Layer(lambda q, k, v, keep: edit(DROPOUTS[0](keep(softmax(q, k)))) @ v)
    seen, _ = observed(layer)
    recorded = [seen[name].to_dense() for name in seen if name.startswith("layer")]
    assert seen.refused or all(error(each, layer.weights[0]) > 0.01 for each in recorded)


def test_weights_that_are_normalised_after_dropout_are_recorded() -> None:
    def normalised(weights: Tensor) -> Tensor:
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)

    drop = DROPOUTS[0]
    check(Layer(lambda q, k, v, keep: keep(normalised(drop(softmax(q, k)))) @ v))


# Memory that others write


def flip_with_numpy(tensor: Tensor) -> None:
    array = tensor.detach().numpy()
    array[...] = array[..., ::-1].copy()


def flip_with_ctypes(tensor: Tensor) -> None:
    flipped = tensor.detach().flip(-1).contiguous()
    ctypes.memmove(tensor.data_ptr(), flipped.data_ptr(), 4 * tensor.numel())


def flip_data(tensor: Tensor) -> None:
    tensor.data = tensor.data.flip(-1).contiguous()


WRITERS = (flip_with_numpy, flip_with_ctypes, flip_data)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("moment", range(3))
@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "scores", "weights"])
@pytest.mark.parametrize("write", WRITERS)
def test_memory_that_others_write(write: Change, name: str, moment: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        parts = {"query": q.contiguous(), "key": k.contiguous(), "value": v.contiguous()}
        parts["mask"] = torch.zeros(T, T).masked_fill(~CAUSAL, -3.0)

        def touch(now: int) -> None:
            if now == moment and name in parts:
                write(parts[name])

        parts["scores"] = parts["query"] @ parts["key"].mT * 0.5 + parts["mask"]
        touch(0)
        parts["weights"] = parts["scores"].softmax(-1)
        touch(1)
        output = keep(parts["weights"]) @ parts["value"]
        touch(2)
        return output

    check(Layer(attend))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("write", WRITERS[:-1])
def test_a_mask_that_changes_between_two_forwards(write: Change, is_fused: bool) -> None:
    mask = torch.from_numpy(np.triu(np.full((T, T), -1e9, np.float32), 1))

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        if layer.weights:
            write(mask)
        with apart():
            keep((q @ k.mT * 0.5 + mask).softmax(-1))
        if is_fused:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (q @ k.mT * 0.5 + mask).softmax(-1) @ v

    layer = Layer(attend)
    check(layer, calls=2)


# Axes


@pytest.mark.parametrize("axes", ["".join(each) for each in itertools.permutations("bhqk")])
def test_every_order_of_axes(axes: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        weights = torch.einsum(f"bhqd,bhkd->{axes}", q, k).softmax(axes.index("k"))
        keep(torch.einsum(f"{axes}->bhqk", weights))
        return torch.einsum(f"{axes},bhkd->bhqd", weights, v)

    assert check(Layer(attend))["layer"].ndim == 4


def query_by_query(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
    """Each query attends to the keys up to its own; the first has one key."""
    rows, outputs = list[Tensor](), list[Tensor]()
    for stop in range(1, T + 1):
        weights = torch.einsum("bhd,bhkd->bhk", q[:, :, stop - 1], k[:, :, :stop]).softmax(-1)
        with apart():
            rows.append(functional.pad(weights, (0, T - stop)))
        outputs.append(torch.einsum("bhk,bhkd->bhd", weights, v[:, :, :stop]))
    with apart():
        keep(torch.stack(rows, 2))
    return torch.stack(outputs, 2)


def shared_key(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
    """Heads that share key and value, in an order in which einsum has the queries first."""
    weights = keep(torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]).softmax(-1))
    return torch.einsum("bhqk,bkd->bqhd", weights, v[:, 0])


def window(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
    """Each query has three keys and values of its own."""
    k, v = (functional.pad(each, (0, 0, 1, 1)).unfold(2, 3, 1) for each in (k, v))
    weights = (q[..., None, :] @ k).squeeze(-2).softmax(-1)
    with apart():
        keep(weights[..., None, :])
    return (v @ weights[..., None]).squeeze(-1)


@pytest.mark.parametrize(
    ("attend", "shape"),
    [(query_by_query, (B, H, T, T)), (shared_key, (B, H, T, T)), (window, (B, H, T, 1, 3))],
)
def test_axes_are_those_of_the_model(attend: Attend, shape: tuple[int, ...]) -> None:
    seen = check(Layer(attend))
    assert seen["layer"].shape == shape
    assert "given weights" not in repr(seen["layer"])


NORMALISED: dict[str, Change] = {
    "softmax": lambda s: s.softmax(-1),
    "exp over sum": lambda s: normalised((s - s.amax(-1, keepdim=True)).exp()),
    "exp over sum without keepdim": lambda s: (e := s.exp()) / e.sum(-1)[..., None],
    "squared relu": lambda s: normalised(s.relu().square() + 1e-3),
    "sigmoid": lambda s: normalised(s.sigmoid()),
    "size": lambda s: normalised(s.abs()),
    "in place": lambda s: (e := s.relu_().add_(0.1)).div_(e.sum(-1, keepdim=True)),
    "einsum of sums": lambda s: torch.einsum("...qk,...q->...qk", s.abs(), 1 / s.abs().sum(-1)),
}
MULTIPLIED: dict[str, Callable[[Tensor, Tensor, Tensor, Change], Tensor]] = {
    "matmul": lambda q, k, v, weigh: weigh(q @ k.mT) @ v,
    "einsum": lambda q, k, v, weigh: torch.einsum(
        "bhqk,bhkd->bhqd", weigh(torch.einsum("bhqd,bhkd->bhqk", q, k)), v
    ),
    "einsum of tokens first": lambda q, k, v, weigh: torch.einsum(
        "bhqk,bkhd->bqhd",
        weigh(torch.einsum("bqhd,bhkd->bhqk", q.transpose(1, 2), k)),
        v.transpose(1, 2),
    ),
}


class Stepwise(nn.Module):
    """Heads that attend to a growing cache; the first call has ``first`` tokens."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], first: int) -> None:
        super().__init__()
        self.attend, self.first = attend, first

    def forward(self, *qkv: Tensor) -> None:
        stops = range(self.first, T + 1)
        for start, stop in zip((0, *stops), stops, strict=False):
            query, key, value = qkv
            self.attend(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop])


@pytest.mark.sampled(24)
@pytest.mark.parametrize("first", [1, 3, T])
@pytest.mark.parametrize("multiply", MULTIPLIED.values(), ids=MULTIPLIED)
@pytest.mark.parametrize("weigh", NORMALISED.values(), ids=NORMALISED)
def test_an_axis_of_size_1_stays(
    weigh: Change, multiply: Callable[[Tensor, Tensor, Tensor, Change], Tensor], first: int
) -> None:
    for batch, heads in itertools.product((1, 2), (1, 2)):
        q, k, v = torch.randn(3, batch, heads, T, 4, generator=torch.manual_seed(0))
        model = Stepwise(lambda q, k, v: multiply(q, k, v, weigh), first)
        with torch.no_grad(), regard.observe(model) as seen:
            model(q, k, v)
        assert [*seen.shapes.values()] == [(batch, heads, T, T)]
        visible = CAUSAL | (torch.arange(T) < first)
        rows = [weigh((q @ k.mT)[:, :, row : row + 1, visible[row]]) for row in range(T)]
        for row, weights in enumerate(rows):
            given = seen[0][:, :, row : row + 1].to_dense()[..., visible[row]]
            torch.testing.assert_close(given, weights, rtol=0, atol=2e-6)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("weigh", NORMALISED.values(), ids=NORMALISED)
def test_an_axis_that_vmap_maps_comes_first(weigh: Change, axis: int, heads: int) -> None:
    q, k, v = torch.randn(3, B, heads, T, 4, generator=torch.manual_seed(0))

    class Mapped(nn.Module):
        def forward(self, *qkv: Tensor) -> Tensor:
            return torch.vmap(lambda q, k, v: weigh(q @ k.mT) @ v, axis, axis)(*qkv)

    with torch.no_grad(), regard.observe(model := Mapped()) as seen:
        model(q, k, v)
    torch.testing.assert_close(seen[0].to_dense(), weigh((q @ k.mT).movedim(axis, 0)))


OF_SHARED_KEYS: dict[str, Callable[[Tensor, Tensor, Tensor, Change], Tensor]] = {
    "groups": lambda q, k, v, weigh: torch.einsum(
        "bgrnm,bgmd->bgrnd",
        weigh(torch.einsum("bgrnd,bgmd->bgrnm", q.unflatten(1, (-1, 2)), k)),
        v,
    ),
    "one group": lambda q, k, v, weigh: torch.einsum(
        "bhij,bjd->bhid", weigh(torch.einsum("bhid,bjd->bhij", q, k[:, 0])), v[:, 0]
    ),
    "tokens first": lambda q, k, v, weigh: torch.einsum(
        "bhqk,bkd->bqhd", weigh(torch.einsum("bqhd,bkd->bhqk", q.transpose(1, 2), k[:, 0])), v[:, 0]
    ),
    "groups, tokens first": lambda q, k, v, weigh: torch.einsum(
        "bgrqk,bkgd->bqgrd",
        weigh(
            torch.einsum(
                "bqgrd,bkgd->bgrqk",
                q.unflatten(1, (-1, 2)).permute(0, 3, 1, 2, 4),
                k.transpose(1, 2),
            )
        ),
        v.transpose(1, 2),
    ),
    "merged": lambda q, k, v, weigh: (
        weigh((q.flatten(1, 2) @ k[:, 0].mT).view(*q.shape[:3], -1)).flatten(1, 2) @ v[:, 0]
    ),
}


@pytest.mark.parametrize("first", [1, 3, T])
@pytest.mark.parametrize("multiply", OF_SHARED_KEYS.values(), ids=OF_SHARED_KEYS)
def test_heads_that_share_a_key_stay_heads_with_one_query(
    multiply: Callable[[Tensor, Tensor, Tensor, Change], Tensor], first: int
) -> None:
    q, k, v = torch.randn(3, B, 4, T, 4, generator=torch.manual_seed(0))
    k, v = k[:, :2], v[:, :2]
    model = Stepwise(lambda q, k, v: multiply(q, k, v, lambda s: s.softmax(-1)), first)
    with torch.no_grad(), regard.observe(model) as seen:
        model(q, k, v)
    assert [*seen.shapes.values()] == [(B, 4, T, T)]


HEADS_SUMMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda w, v: torch.einsum("bhij,bhjc->bic", w, v),
    "einsum of keys, then heads": lambda w, v: torch.einsum("bzia,bzac->bic", w, v),
    "last query": lambda w, v: torch.einsum("bhij,bhjc->bic", w[:, :, -1:], v),
    "tensordot of one text": lambda w, v: torch.tensordot(w[0], v[0], ([0, 2], [0, 1])),
    "matmul": lambda w, v: w.transpose(1, 2).flatten(2) @ v.flatten(1, 2),
    "dropout": lambda w, v: torch.einsum("bhij,bhjc->bic", DROPOUTS[0](w), v),
}


@pytest.mark.parametrize("weigh", [softmax, WEIGHS["softmax sinks"], WEIGHS["edit flip"]])
@pytest.mark.parametrize("multiply", HEADS_SUMMED.values(), ids=HEADS_SUMMED)
def test_a_product_that_sums_over_the_heads_too(
    multiply: Callable[[Tensor, Tensor], Tensor], weigh: Weigh
) -> None:
    """As where the output projection is part of the value."""
    projection, outputs = torch.randn(H, 4, D), list[Tensor]()

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        outputs.append(multiply(keep(weigh(q, k)), v @ projection))
        return outputs[-1]

    layer, x = Layer(attend), torch.randn(B, T, D, generator=torch.manual_seed(1))
    with torch.no_grad(), regard.observe(layer, keep="qkv") as seen:
        layer(x)
    weights = layer.weights[0][: seen[0].shape[0], :, -seen[0].shape[2] :]
    assert seen[0].shape == weights.shape
    assert error(seen[0].to_dense(), weights) <= 2e-6
    if multiply is not HEADS_SUMMED["dropout"]:
        output = (seen[0] @ seen.value(0)).sum(1)
        torch.testing.assert_close(output.reshape(outputs[-1].shape), outputs[-1])


JOINT: dict[str, Attend] = {
    "a softmax over heads and keys": lambda q, k, v, keep: (
        keep(torch.einsum("bhqd,bhkd->bqhk", q, k).flatten(2).softmax(-1)) @ v.flatten(1, 2)
    ),
    "with dropout": lambda q, k, v, keep: (
        DROPOUTS[0](keep(torch.einsum("bhqd,bhkd->bqhk", q, k).flatten(2).softmax(-1)))
        @ v.flatten(1, 2)
    ),
    "keys that a parameter mixes, as in Linformer": lambda q, k, v, keep: (
        keep((q @ torch.einsum("bhtd,tc->bhcd", k, MIXING).mT).softmax(-1))
        @ torch.einsum("bhtd,tc->bhcd", v, MIXING)
    ),
}
MIXING = nn.Parameter(torch.linspace(-1, 1, T * 3).view(T, 3))


@pytest.mark.parametrize("attend", JOINT.values(), ids=JOINT)
def test_keys_of_several_axes_stay_one_axis(attend: Attend) -> None:
    layer = Layer(attend)
    layer.mixing = MIXING
    assert check(layer)["layer"].shape == layer.weights[0].shape


def test_heads_that_share_a_value_give_the_output() -> None:
    layer, x = Layer(shared_key), torch.randn(B, T, D, generator=torch.manual_seed(1))
    with torch.no_grad(), regard.observe(layer, keep="qkv") as seen:
        output = layer(x)
    torch.testing.assert_close((seen[0] @ seen.value(0)).transpose(1, 2), output)


# Parameters that hooks exchange


@pytest.mark.parametrize(
    "load", [lambda p, kept: setattr(p, "data", kept), lambda p, kept: p.data.set_(kept)]
)
def test_parameters_that_hooks_exchange(load: Callable[[Tensor, Tensor], Any]) -> None:
    def before(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            load(parameter, kept[parameter].clone())

    def after(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = torch.empty(0)

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        return (keep(softmax(q, k)) @ v).transpose(1, 2).flatten(2)

    layers = [Layer(attend) for _ in range(6)]
    model = nn.Sequential(*layers)
    kept = {each: each.detach().clone() for each in model.parameters()}
    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            linear.register_forward_pre_hook(before)
            linear.register_forward_hook(after)
    seen, _ = observed(model)
    assert list(seen) == [*(f"layer.{index}" for index in range(6)), "plain"]
    for index, layer in enumerate(layers):
        assert error(seen[f"layer.{index}"].to_dense(), layer.weights[0]) <= 2e-5


# Other attention, and none


class Tokens(nn.Module):
    """A layer without heads; ``run`` receives the module and the tokens."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.query, self.score, self.router = nn.Linear(D, D), nn.Linear(D, 1), nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.memory = nn.Parameter(torch.randn(8, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def mix(self, scores: Tensor, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bte,bted->btd", scores.softmax(-1), outputs)


def halves(m: Tokens, x: Tensor, heads: int = 1) -> Tensor:
    """Blocks of keys that are merged by their logsumexp, as in ring attention."""
    outputs, norms = list[Tensor](), list[Tensor]()
    query, key = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in (m.query(x), x))
    for block in key.split(3, -2):
        scores = query @ block.mT
        outputs.append(scores.softmax(-1) @ block)
        norms.append(scores.logsumexp(-1))
    return (torch.stack(norms, -1).softmax(-1)[..., None, :] * torch.stack(outputs, -1)).sum(-1)


def learned_edges(m: Tokens, x: Tensor, least: float = 0.0) -> Tensor:
    """Graph attention: a learned score of each edge, normalised over the edges of each node."""
    to, of = torch.ones(T, T).tril().nonzero().T
    scores = m.score(x[0])[:, 0]
    powers = torch.nn.functional.leaky_relu(scores[to] + scores[of]).exp()
    weights = powers / (torch.zeros(T).index_add(0, to, powers)[to] + least)
    return torch.zeros(1, T, D).index_add(1, to, (weights[:, None] * x[0][of])[None])


def edges(m: Tokens, x: Tensor) -> Tensor:
    """The past of each token as a list of pairs, as in a graph."""
    to, of = torch.ones(T, T).tril().nonzero().T
    powers = (m.query(x[0])[to] * x[0][of]).sum(-1).exp()
    weights = powers / torch.zeros(T).index_add(0, to, powers)[to]
    return torch.zeros(T, D).index_add(0, to, weights[:, None] * x[0][of])[None]


def capsules(m: Tokens, x: Tensor) -> Tensor:
    """Routing by agreement, whose rows run over the capsules above."""
    heard = torch.einsum("btd,cde->btce", x, m.memory.view(2, 4, D).mT)
    scores = torch.zeros(B, T, 2)
    for _ in range(3):
        weights = scores.softmax(-1)
        told = (weights[..., None] * heard).sum(1)
        scores = scores + (heard * told[:, None]).sum(-1)
    return torch.nn.functional.pad(told, (0, D - told.shape[-1]))


def deformable(m: Tokens, x: Tensor, weights: Tensor) -> Tensor:
    points = m.query(x).unflatten(-1, (6, 2))[:, :, :4].tanh()
    sampled = functional.grid_sample(x.mT[..., None], points, align_corners=False)
    return (sampled * weights[:, None]).sum(-1).mT


def delays(m: Tokens, x: Tensor) -> Tensor:
    """Autocorrelation, as in Autoformer; docs/observe.md names it among the limits."""
    spectra = (torch.fft.rfft(each, dim=1) for each in (m.query(x), x))
    likeness = torch.fft.irfft(next(spectra) * next(spectra).conj(), dim=1).mean((0, 2))
    best = likeness.topk(3)
    shifts = zip(best.values.softmax(-1), best.indices.tolist(), strict=True)
    return torch.stack([weight * x.roll(-shift, 1) for weight, shift in shifts]).sum(0)


def chosen(m: Tokens, x: Tensor) -> Tensor:
    best = m.router(x).softmax(-1).topk(2, -1)
    outputs = torch.stack([expert(x) for expert in m.experts], -2)
    outputs = outputs.gather(-2, best.indices[..., None].expand(-1, -1, -1, D))
    return (best.values[..., None] * outputs).sum(-2)


SILENT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "autocorrelation": delays,
    "chosen experts": chosen,
    "experts, summed": lambda m, x: (
        m.router(x).softmax(-1)[..., None] * torch.stack([f(x) for f in m.experts], -2)
    ).sum(-2),
    "powers": lambda m, x: (p := m.query(x).exp()) / (1 + p) * x,
    "a state": lambda m, x: ((m.query(x).exp()[..., None] * x[:, :, None]) * x[..., None]).sum(-1),
    "a norm": lambda m, x: m.query(x / (x * x).sum(-1, keepdim=True).sqrt()),
    "likeness": lambda m, x: x * (m.query(x) * x).sum(-1, keepdim=True),
    "positions": lambda m, x: (
        x + m.query(x[:, :1]) + x[:, :, None].add(x[:, None]).mean((1, 2))[:, None]
    ),
    "router": lambda m, x: m.mix(m.router(x), x),
    "cosine router": lambda m, x: m.mix(x @ functional.normalize(m.router.weight, dim=-1).T, x),
    "router of its own": lambda m, x: m.mix(x @ m.memory[:4].T, x),
    "router of a fused layer": lambda m, x: m.mix(m.query(x)[..., :4], x),
    "experts' weights": lambda m, x: torch.einsum(
        "bte,ed,btd->btd", m.router(x).softmax(-1), m.memory[:4], x
    ),
    "code book": lambda m, x: m.router(x).softmax(-1) @ m.memory[:4],
    "codes, summed": lambda m, x: (m.router(x).softmax(-1)[..., None] * m.memory[:4]).sum(-2),
    "label embeddings": lambda m, x: (
        functional.linear(x, m.router.weight).softmax(-1) @ m.router.weight
    ),
    "a softmax between layers": lambda m, x: functional.linear(
        m.router(x).softmax(-1), m.router.weight.T
    ),
}
NAMED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "edges of a learned score": learned_edges,
    "edges of a learned score, bounded": partial(learned_edges, least=1e-16),
    "in a function of another operation": lambda m, x: torch_map(
        lambda y: (m.query(y) @ y.mT).softmax(-1) @ y, x
    ),
    "one query of one feature": lambda m, x: torch.einsum(
        "bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", m.score(x[:, :1]), m.score(x)).softmax(-1), x
    ),
    "sigmoid": lambda m, x: (m.query(x) @ x.mT).sigmoid() @ x,
    "linear": lambda m, x: m.query(x).exp() @ (x.exp().mT @ x),
    "hard": lambda m, x: x.gather(1, (m.query(x) @ x.mT).argmax(-1)[..., None].expand(-1, -1, D)),
    "edges": edges,
    "capsules": capsules,
    "sparse scores": lambda m, x: torch.sparse.mm(
        torch.sparse.softmax((m.query(x[0]) @ x[0].T).tril().to_sparse(), 1), x[0]
    )[None],
    "deformable": lambda m, x: deformable(m, x, m.router(x).softmax(-1)),
    "deformable, heads": lambda m, x: deformable(
        m, x, m.query(x).unflatten(-1, (3, 4)).softmax(-1)[..., 0, :]
    ),
    "blocks of keys": halves,
    "blocks of keys, in heads": partial(halves, heads=3),
    "scores of a layer": lambda m, x: m.query(x)[..., :T].softmax(-1) @ x,  # as in Synthesizer
    "streams that are mixed": lambda m, x: (  # as in hyper-connections
        m.query(x)[..., :9].unflatten(-1, (3, 3)).softmax(-1) @ x.unflatten(-1, (3, 4))
    ),
    "clusters": lambda m, x: m.router(x).softmax(-1) @ x[:, :4],
    "slots, combined": lambda m, x: (
        torch.einsum("btd,sd->bts", x, m.memory).softmax(-1) @ x.repeat(1, 2, 1)[:, :8]
    ),
    "learned keys": lambda m, x: (x @ m.memory.T).softmax(-1) @ m.memory,
    "learned keys of heads": lambda m, x: (
        m.query(x).unflatten(-1, (3, 4)).softmax(-1) @ m.memory[:4]
    ),
    "learned keys, over the tokens": lambda m, x: (
        normalised(m.router(x).softmax(1)) @ m.memory[:4]  # as in external attention
    ),
    "learned keys, summed": lambda m, x: (
        (x[:, :, None] * m.memory).sum(-1).softmax(-1)[..., None] * m.memory
    ).sum(-2),
}


@pytest.mark.parametrize("run", SILENT.values(), ids=SILENT)
def test_no_attention_is_ignored(run: Callable[[Any, Tensor], Tensor]) -> None:
    seen, messages = observed(Tokens(run))
    assert (list(seen), messages) == (["plain"], [])


@pytest.mark.parametrize(
    "run",
    NAMED.values(),
    ids=NAMED,
)
def test_other_attention_is_named(run: Callable[[Any, Tensor], Tensor]) -> None:
    assert observed(Tokens(run))[1]


FATES: dict[str, tuple[Change, str]] = {
    "csr": (lambda w: w.to_sparse_csr() @ w, "became sparse or complex numbers"),
    "bsr": (lambda w: w.to_sparse_bsr((2, 2)) @ w, "became sparse or complex numbers"),
    "coo": (lambda w: torch.sparse.mm(w.to_sparse(), w), "became sparse or complex numbers"),
    "sparse value": (lambda w: w @ torch.eye(T).to_sparse_csr(), "meet sparse or complex numbers"),
    "complex": (
        lambda w: (w.to(torch.complex64) @ (torch.eye(T) * 1j)).imag,
        "became sparse or complex numbers",
    ),
    "covariance": (
        lambda w: torch.cov(torch.eye(T).cos(), aweights=w[0]),
        "a value has multiplied them element by element before, and the least of them is",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("meet", "fate"), FATES.values(), ids=FATES)
def test_a_refusal_says_what_was_done_to_the_weights(meet: Change, fate: str) -> None:
    _, messages = observed(Tokens(lambda m, x: meet((m.query(x[0]) @ x[0].mT).softmax(-1))))
    assert fate in messages[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("learns", [False, True])
def test_attention_in_a_branch_of_torch_cond_is_recorded(learns: bool) -> None:
    def attend(x: Tensor) -> Tensor:
        return (model.query(x) @ model.query(x).mT).softmax(-1) @ x

    model = Tokens(lambda _, x: torch.cond(x.sum() > x.sum() - 1, attend, torch.sin, (x,)))
    x = torch.randn(2, T, D)
    with torch.set_grad_enabled(learns):
        expected, weights = model(x), (model.query(x) @ model.query(x).mT).softmax(-1)
        with regard.observe(model, strict=True) as seen:
            output = model(x)
    assert torch.equal(output, expected)
    assert error(seen[0].to_dense().detach(), weights.detach()) <= 1e-6


def test_parameters_that_pytorch_computes_are_no_scores() -> None:
    model = Tokens(lambda m, x: (m.query(x) @ x.mT).softmax(-1) @ x)
    model.query = nn.utils.parametrizations.orthogonal(model.query)
    seen, messages = observed(model)
    assert (list(seen), messages) == (["layer", "plain"], [])


def chosen_queries(m: Tokens, x: Tensor) -> Tensor:
    """ProbSparse attention, as in Informer."""
    largest = m.query(x).norm(dim=-1).topk(3).indices
    query = m.query(x).gather(1, largest[..., None].expand(-1, -1, D))
    return (
        x.mean(1, keepdim=True)
        .expand_as(x)
        .scatter(1, largest[..., None].expand(-1, -1, D), (query @ x.mT).softmax(-1) @ x)
    )


def sorted_keys(m: Tokens, x: Tensor) -> Tensor:
    order = m.query(x)[..., :1].argsort(1).expand_as(x)
    return (m.query(x) @ x.gather(1, order).mT).softmax(-1) @ x.gather(1, order)


def blocks_beside(m: Tokens, x: Tensor) -> Tensor:
    """Blocks of queries that attend to two blocks of keys, as in BigBird."""
    queries, blocks = (y.unflatten(1, (3, 2)) for y in (m.query(x), x))
    beside = torch.tensor([[1, 0], [2, 1], [0, 2]])
    keys = blocks[:, beside].flatten(2, 3)
    return ((queries @ keys.mT).softmax(-1) @ keys).flatten(1, 2)


def blocks_beside_in_heads(m: Tokens, x: Tensor) -> Tensor:
    queries, blocks = (
        y.unflatten(-1, (2, -1)).mT.reshape(B, -1, 3, 2, 2).contiguous() for y in (m.query(x), x)
    )
    beside = torch.tensor([[1, 0], [2, 1], [0, 2]])
    keys = blocks[:, :, beside].flatten(3, 4)
    return (queries @ keys.mT).softmax(-1) @ keys


def chosen_columns(m: Tokens, x: Tensor) -> Tensor:
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    return (m.query(x) @ x.mT)[..., order].softmax(-1) @ x[:, order]


def keys_without_batch(m: Tokens, x: Tensor) -> Tensor:
    order, key = torch.tensor([3, 1, 5, 0, 2, 4]), m.query(x)[0].tanh()
    return (m.query(x)[0] @ key[order].mT).softmax(-1) @ key.index_select(0, order)


def evicted(m: Tokens, x: Tensor) -> Tensor:
    """A cache from which tokens are left out that got little attention, as in H2O."""
    weights = (m.query(x) @ x.mT).softmax(-1)
    best = weights.sum(1).topk(4).indices.sort(-1).values[..., None].expand(-1, -1, D)
    kept = x.gather(1, best)
    return weights @ x + (m.query(x[:, -1:]) @ kept.mT).softmax(-1) @ kept


def by_landmarks(m: Tokens, x: Tensor) -> Tensor:
    """Tokens attend to landmarks that attend to tokens, as in agent and Nyström attention."""
    query, key = m.query(x), m.query(x).tanh()
    landmarks = query.unflatten(1, (2, 3)).mean(2)
    return (query @ landmarks.mT).softmax(-1) @ ((landmarks @ key.mT).softmax(-1) @ x)


@pytest.mark.parametrize("batch", [1, 2])
def test_weights_that_meet_relative_values_too_are_one_attention(batch: int) -> None:
    relative = torch.randn(T, T, D)

    def run(m: Tokens, x: Tensor) -> Tensor:
        weights = (m.query(x) @ x.mT).softmax(-1)
        return weights @ x + torch.einsum("bqk,qkd->bqd", weights, relative)

    model = Tokens(run)
    with torch.no_grad(), regard.observe(model) as seen:
        model(torch.randn(batch, T, D))
    assert len(seen) == 1


def test_weights_of_an_earlier_layer_are_those_of_a_later_one_too() -> None:
    weights: list[Tensor] = []

    def attend(m: Tokens, x: Tensor) -> Tensor:
        weights.append((m.query(x) @ x.mT).softmax(-1))
        return weights[-1] @ x

    def attend_again(m: Tokens, x: Tensor) -> Tensor:
        return weights[-1] @ m.query(x)

    seen, messages = observed(nn.Sequential(Tokens(attend), Tokens(attend_again)))
    assert (list(seen), messages) == (["layer.0", "layer.1", "plain"], [])
    assert error(seen["layer.1"].to_dense(), weights[0]) <= 2e-6


@pytest.mark.parametrize("change", [torch.relu, torch.sigmoid], ids=["relu", "sigmoid"])
def test_a_value_may_be_positive_and_projected_by_an_own_parameter(change: Change) -> None:
    projection = nn.Parameter(torch.randn(4, 4))
    layer = Layer(lambda q, k, v, keep: keep(softmax(q, k)) @ change(v @ projection))
    layer.projection = projection
    check(layer)


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a copy": lambda weight: weight * 1,
    "rows of several": lambda weight: torch.cat([weight, weight.flip(0)])[:D],
    "low rank": lambda weight: weight + weight[:, :2] @ weight[:2],
    "norm": lambda weight: weight / weight.norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("activate", [torch.clone, torch.relu, torch.sigmoid])
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_projections_may_be_computed_from_parameters(compute: Change, activate: Change) -> None:
    """Then a value is a product of two activations, with heads in the axis of the batch."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        x = v.transpose(1, 2).flatten(2).transpose(0, 1)
        project = [compute(each.weight) for each in (layer.query, layer.key, layer.value)]
        q, k, v = (
            functional.linear(x, weight).view(T, B * H, 4).transpose(0, 1) for weight in project
        )
        return torch.bmm(keep(torch.bmm(q, k.mT).softmax(-1)), activate(v))

    layer = Layer(attend)
    check(layer)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_frozen_layer_of_pytorch_is_recorded(heads: int) -> None:
    layer = nn.MultiheadAttention(D, heads, batch_first=True).eval().requires_grad_(False)
    query, memory = torch.randn(B, T, D), torch.randn(B, 7, D)
    with regard.observe(layer) as seen:
        _, weights = layer(query, memory + 1, memory, average_attn_weights=False)
    torch.testing.assert_close(seen[0].to_dense(), weights)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (chosen_queries, "an index chose the rows of its query, key or value"),
        (sorted_keys, "an index chose the rows of its query, key or value"),
        (blocks_beside, "an index chose the rows of its query, key or value"),
        (blocks_beside_in_heads, "an index chose the rows of its query, key or value"),
        (chosen_columns, "an index chose the rows of its query, key or value"),
        (keys_without_batch, "an index chose the rows of its query, key or value"),
        (evicted, "an index chose the rows of its query, key or value"),
        (by_landmarks, "its output is a product of several softmaxes"),
    ],
)
def test_what_is_not_attention_of_all_tokens_is_refused(
    run: Callable[[Any, Tensor], Tensor], reason: str
) -> None:
    seen, (message,) = observed(Tokens(run))
    assert (list(seen), seen.refused[0].module) == (["plain"], "layer")
    assert reason in message


@pytest.mark.parametrize(
    "spread",
    [
        lambda q: q,
        lambda q: q.expand(B, -1, -1),
        lambda q: q[None].repeat(B, 1, 1),
        lambda q: q * torch.ones(B, 1, 1),
    ],
    ids=["itself", "expanded", "repeated", "broadcast"],
)
def test_learned_queries_are_recorded(spread: Callable[[Tensor], Tensor]) -> None:
    last: list[Tensor] = []

    def latents(m: Tokens, x: Tensor) -> Tensor:
        weights = (spread(m.memory) @ m.query(x).mT).softmax(-1)
        last[:] = [weights.detach().clone()]
        return weights @ x

    seen, messages = observed(Tokens(latents))
    assert (list(seen), messages) == (["layer", "plain"], [])
    assert error(seen["layer"].to_dense(), last[0]) <= 2e-6


def all_pairs(m: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.query(x)[:, :, None], x[:, None]


def windows(x: Tensor) -> Tensor:
    """The token, and the two before it: (batch, tokens, features, 3)."""
    return functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)


def local(m: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = (m.query(x)[..., None] * windows(x)).sum(-2).softmax(-1)
    return weights, (weights[:, :, None] * windows(x)).sum(-1)


def over_sums(powers: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = powers / powers.sum(-1, keepdim=True)
    return weights, weights @ x


def with_product(weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return weights, weights @ x


def late(m: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weights are written to before the sum over the keys."""
    weights = (m.query(x) @ x.mT).softmax(-1)
    products = weights[..., None] * x[:, None]
    given = weights.clone()
    weights.zero_()
    return given, products.sum(-2)


def turned(m: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = (m.query(x) @ x.mT).softmax(-1)
    return weights, (weights[..., None] * x[:, None]).transpose(1, 2).sum(1)


OF_ALL_PAIRS: dict[str, Callable[[Tokens, Tensor], tuple[Tensor, Tensor]]] = {
    "additive, layer": lambda m, x: with_product(
        m.score(sum(all_pairs(m, x)).tanh())[..., 0].softmax(-1),  # pyright: ignore
        x,
    ),
    "additive, parameter": lambda m, x: with_product(
        (torch.add(*all_pairs(m, x)).tanh() * m.memory[0]).sum(-1).softmax(-1), x
    ),
    "distance": lambda m, x: with_product(
        torch.sub(*all_pairs(m, x)).norm(dim=-1).neg().softmax(-1), x
    ),
    "Gaussian kernel": lambda m, x: over_sums(
        torch.sub(*all_pairs(m, x)).square().sum(-1).neg().exp(), x
    ),
    "Cauchy's kernel": lambda m, x: over_sums(
        1 / (1 + torch.sub(*all_pairs(m, x)).pow(2).mean(-1)), x
    ),
    "windows": local,
    "scores and output summed": lambda m, x: (
        weights := torch.mul(*all_pairs(m, x)).sum(-1).softmax(-1),
        (weights[..., None] * x[:, None]).sum(2),
    ),
    "keys first": lambda m, x: (
        weights := (m.query(x) @ x.mT).softmax(-1),
        (weights.mT[..., None] * x[:, :, None]).sum(1, keepdim=True)[:, 0],
    ),
}


def bilinear(m: Tokens, query: Tensor, key: Tensor) -> Tensor:
    query, key = (each.expand(-1, T, T, -1).contiguous() for each in (query, key))
    return functional.bilinear(query, key, m.query.weight[None])[..., 0]


def trilinear(m: Tokens, x: Tensor) -> Tensor:
    context, question = (each.expand(-1, T, 4, -1) for each in (x[:, :, None], x[:, None, :4]))
    return m.score(
        torch.cat([context, question, context * question], -1).unflatten(-1, (3, D))
    ).sum((-1, -2))


def one_query(m: Tokens, x: Tensor) -> Tensor:
    """Bahdanau's scores of the last state, (batch, tokens, 1)."""
    return m.score((m.query(x[:, -1]).unsqueeze(1) + x).tanh())


OF_ANY_SCORES: dict[str, Callable[[Tokens, Tensor], tuple[Tensor, Tensor]]] = {
    "graph of all pairs": lambda m, x: with_product(
        functional.leaky_relu(m.score(m.query(x)) + m.score(x).mT, 0.2).softmax(-1), x
    ),
    "graph with edges": lambda m, x: with_product(
        (m.score(x) + m.score(m.query(x)).mT).masked_fill(~CAUSAL, -9e15).softmax(-1), x
    ),
    "graph without a batch": lambda m, x: with_product(
        (m.score(x[0]) + m.score(m.query(x[0])).T).softmax(1), x[0]
    ),
    "graph, powers": lambda m, x: with_product(
        functional.log_softmax(m.score(x) + x[:, None, :, 0], -1).exp(), x
    ),
    "graph, divided": lambda m, x: over_sums((m.score(x) + x[:, None, :, 0]).exp(), x),
    "bilinear": lambda m, x: with_product(bilinear(m, *all_pairs(m, x)).softmax(-1), x),
    "trilinear, as in BiDAF": lambda m, x: with_product(trilinear(m, x).softmax(-1), x[:, :4]),
    "one query, bmm": lambda m, x: with_product(one_query(m, x).mT.softmax(-1), x),
    "one query, squeezed": lambda m, x: (
        weights := one_query(m, x)[..., 0].softmax(-1),
        torch.bmm(weights[:, None], x),
    ),
    "one query, summed": lambda m, x: (
        weights := one_query(m, x).softmax(1),
        (weights * x).sum(1),
    ),
    "NumPy": lambda m, x: with_product(
        torch.from_numpy((m.query(x) @ x.mT).detach().numpy() * 2).softmax(-1), x
    ),
    "blocks on a diagonal": lambda m, x: with_product(
        torch.block_diag(*(m.query(x) @ x.mT).softmax(-1)), x.flatten(0, 1)
    ),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "run", (OF_ALL_PAIRS | OF_ANY_SCORES).values(), ids=OF_ALL_PAIRS | OF_ANY_SCORES
)
def test_attention_of_other_scores_is_recorded(
    run: Callable[[Tokens, Tensor], tuple[Tensor, Tensor]], mode: Callable[[], Any]
) -> None:
    last: list[Tensor] = []

    def kept(m: Tokens, x: Tensor) -> Tensor:
        weights, output = run(m, x)
        last[:] = [weights.detach().clone()]
        return output

    seen, messages = observed(Tokens(kept), mode=mode)
    assert (list(seen), messages) == (["layer", "plain"], [])
    assert error(seen["layer"].to_dense().reshape(last[0].shape), last[0]) <= 2e-6


@pytest.mark.parametrize("run", [late, turned], ids=["written to", "turned"])
def test_a_sum_that_is_no_product_of_the_weights_is_refused(
    run: Callable[[Tokens, Tensor], tuple[Tensor, Tensor]],
) -> None:
    seen, (message,) = observed(Tokens(lambda m, x: run(m, x)[1]))
    assert list(seen) == ["plain"]
    assert "met no value in a product" in message


def test_likeness_of_two_inputs_is_said_to_have_no_value() -> None:
    """As the logits of CLIP, which are a softmax of two products and the output of the model."""
    seen, (message,) = observed(Tokens(lambda m, x: (m.query(x)[:, 0] @ x[:, 1].T).softmax(-1)))
    assert list(seen) == ["plain"]
    assert "If they are the likeness of two inputs, as in CLIP, there is no value" in message


# Gradients

LEARNED: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "bias of 0": (torch.zeros(H, T, T), lambda s, p: (s + p).softmax(-1)),
    "temperature": (torch.tensor(0.7), lambda s, p: (s * p).softmax(-1)),
    "temperatures of 1": (torch.ones(H, 1, 1), lambda s, p: (s * p).softmax(-1)),
    "sinks": (STEPS[:H, None, None], with_sink),
    "sinks of groups": (torch.linspace(-1, 2, B * H).view(B, H, 1, 1), with_sink),
    "talking heads": (torch.eye(H), lambda s, p: torch.einsum("bhqk,hg->bgqk", s, p).softmax(-1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("start", "weigh"), LEARNED.values(), ids=LEARNED)
def test_gradients_are_those_of_the_model(start: Tensor, weigh: Weigh) -> None:
    last: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Change) -> Tensor:
        last.append(keep(weigh(q @ k.mT, layer.learned)))
        return last[0] @ v

    layer = Layer(attend)
    layer.learned = nn.Parameter(start.clone())
    seen, _ = observed(layer, mode=torch.enable_grad)
    (weights,) = last
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
    parts = [layer.learned, layer.query.weight, layer.key.weight]
    given = torch.autograd.grad((seen["layer"].entropy() * STEPS).sum(), parts, retain_graph=True)
    expected = torch.autograd.grad((entropy * STEPS).sum(), parts)
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-4)
    del seen, weights, entropy
    last.clear()
    gc.collect()
    assert all(each.expired() for each in layer.storages)


class Shifted(nn.Module):
    """Two steps of mean shift: scores of distances, and an attention to its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.weights.append((-torch.cdist(x, x)).softmax(-1))
            x = self.weights[-1] @ x
        return x


class Hierarchical(Shifted):
    """Words make sentences, and sentences a text, each by a learned score."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.linspace(-1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        words = x.unflatten(1, (2, -1))
        for _ in range(2):
            self.weights.append((words.tanh() @ self.score).softmax(-1)[..., None, :])
            words = (self.weights[-1] @ words).squeeze(-2)
        return words


@pytest.mark.parametrize("layer", [Shifted, Hierarchical])
def test_an_attention_to_the_output_of_another_is_recorded(layer: type[Shifted]) -> None:
    with torch.no_grad(), regard.observe(model := layer(), strict=True) as seen:
        model(torch.randn(B, T, D))
    for matrix, weights in zip(map(seen.__getitem__, seen), model.weights, strict=True):
        torch.testing.assert_close(matrix.to_dense(), weights)
