"""Attention written by hand is found from its operations, and told as it was."""

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from handwritten_ways import WAYS, Way, nano_gpt
from regard import AttentionMatrix
from regard.capture.met_value import Met, MetValue
from regard.capture.refusals import Absence
from regard.tracing.tracer import Tracer

MODES = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Layer(nn.Module):
    """Runs a function of query, key and value; its parameters are no activations."""

    def __init__(self, way: Callable[..., object]) -> None:
        super().__init__()
        self.way = way
        self.query, self.key, self.value = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> object:
        return self.way(self.query(x), self.key(x + 1), self.value(x))


@dataclass
class Seen:
    taken: list[tuple[str, AttentionMatrix]] = field(default_factory=list)
    dense: list[Tensor] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def record(self, met: Met) -> None:
        matrix = met.matrix()
        self.taken.append((met.name, matrix))
        self.dense.append(matrix.to_dense().clone())

    def refuse(self, name: str, reason: str, *_: object) -> None:
        self.refused.append((name, reason))


@contextmanager
def watch(model: nn.Module, seen: Seen) -> Generator[None, None, None]:
    handwritten = MetValue(model, seen.record, seen.refuse, Absence(model))
    try:
        with Tracer(model, handwritten.listeners, handwritten.listener_of):
            yield
    finally:
        handwritten.finish()


def layer(way: Callable[..., object]) -> Layer:
    torch.manual_seed(0)
    return Layer(way)


def noise() -> Tensor:
    return torch.randn(2, 3, 5, 7, generator=torch.manual_seed(1)) * 2


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_matrix_has_the_weights_that_the_layers_softmax_gave(
    way: Way, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    model, seen = layer(way), Seen()
    with mode():
        expected = model(noise())
        with watch(model, seen):
            weights, output = model(noise())
    assert torch.equal(output, expected[1])
    assert torch.equal(weights, expected[0])
    assert seen.refused == []
    assert [name for name, _ in seen.taken] == ["Layer"]
    half = {torch.bfloat16, torch.float16} & {weights.dtype, seen.taken[0][1].dtype}
    torch.testing.assert_close(
        seen.dense[0].float(), weights.detach().float(), atol=2e-2 if half else 1e-5, rtol=0
    )


class Lesson(nn.Module):
    """A single head as lectures write it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        return scores.softmax(-1) @ self.value(x)


class Merged(Lesson):
    """Three heads in the axis of the batch, (batch · num_heads, tokens, head_dim)."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (3, 2)).transpose(1, 2).flatten(0, 1)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)
        return torch.bmm(weights, value).unflatten(0, (-1, 3)).transpose(1, 2).flatten(2)


class TokensFirst(Merged):
    """fairseq's order, (tokens, batch, dim)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        pytest.param(Lesson, (4, 5, 6), (4, 1, 5, 5), id="a batch of one head"),
        pytest.param(Lesson, (5, 6), (5, 5), id="no batch"),
        pytest.param(Merged, (4, 5, 6), (4, 3, 5, 5), id="heads in the axis of the batch"),
        pytest.param(Merged, (1, 5, 6), (1, 3, 5, 5), id="one sequence"),
        pytest.param(Merged, (4, 1, 6), (4, 3, 1, 1), id="one token"),
        pytest.param(TokensFirst, (5, 4, 6), (4, 3, 5, 5), id="tokens before the batch"),
    ],
)
def test_heads_have_an_axis_of_their_own(
    model: type[Lesson], shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    seen, layer = Seen(), model()
    with watch(nn.Sequential(nn.ReLU(), layer), seen):
        layer(torch.randn(shape))
    assert seen.refused == []
    assert [tuple(matrix.shape) for _, matrix in seen.taken] == [expected]


def seen_by(way: Callable[..., object], x: Tensor | None = None) -> Seen:
    seen, model = Seen(), layer(way)
    with torch.no_grad(), watch(model, seen):
        model(noise() if x is None else x)
    return seen


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            "nano_gpt",
            "AttentionMatrix(batch=2, num_heads=3, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=0.378, mask=Causal())",
            id="a causal fill",
        ),
        pytest.param(
            "gemma_2",
            "AttentionMatrix(batch=2, num_heads=3, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=0.6, softcap=2, mask=Causal())",
            id="a softcap before an additive mask",
        ),
        pytest.param(
            "gpt_oss",
            "AttentionMatrix(batch=2, num_heads=3, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=0.4, sink_bias=(1, 3, 1, 1), mask=Causal())",
            id="sinks",
        ),
        pytest.param(
            "t5",
            "AttentionMatrix(batch=2, num_heads=3, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=1, bias=(2, 3, 5, 5), mask=Padding([5, 3]))",
            id="a bias and a mask that were added as one",
        ),
        pytest.param(
            "exponentials",
            "AttentionMatrix(batch=2, num_heads=3, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=0.4)",
            id="the row's maximum, subtracted, is no bias",
        ),
        pytest.param(
            "repeated_heads",
            "AttentionMatrix(batch=2, num_heads=3, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=0.4, num_kv_heads=1)",
            id="one key head for all",
        ),
        pytest.param(
            "two_groups",
            "AttentionMatrix(batch=2, num_heads=4, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=1, num_kv_heads=2)",
            id="a key head for each two",
        ),
        pytest.param(
            "grouped_axes",
            "AttentionMatrix(batch=2, num_heads=4, q_len=5, kv_len=5, dtype=float32, device=cpu, "
            "scale=1, num_kv_heads=2, mask=Causal())",
            id="heads in two axes",
        ),
        pytest.param(
            "notebook",
            "AttentionMatrix(q_len=5, kv_len=5, dtype=float32, device=cpu, scale=0.378)",
            id="no batch",
        ),
    ],
)
def test_the_matrix_says_what_the_layer_did(name: str, text: str) -> None:
    way = next(way for way in WAYS if way.__name__ == name)
    assert repr(seen_by(way).taken[0][1]) == text


def test_query_and_key_are_views_of_the_models_own_tensors() -> None:
    kept: list[Tensor] = []

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.extend((q, k))
        return (q @ k.mT).softmax(-1) @ v

    source = seen_by(way).taken[0][1].source
    assert [source.query.data_ptr(), source.key.data_ptr()] == [x.data_ptr() for x in kept]


def vocabulary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    embedding = torch.nn.functional.linear(q, PARAMETER[0])
    return embedding.softmax(-1) @ PARAMETER[0]


def router(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chosen = (q.flatten(0, 2) @ PARAMETER[0].T).softmax(-1)
    return torch.einsum("te,ed->td", chosen, PARAMETER[0])


def elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) * v.relu().softmax(-2)


def a_loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q[0, 0] @ k[0, 0].T
    return torch.nn.functional.cross_entropy(logits, torch.arange(5))


def rotations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angles = torch.arange(7.0)[None, :, None] @ torch.arange(5.0)[None, None]
    return (angles.cos() + angles.softmax(-1)) @ v[0, 0]


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def gate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A product of two activations, bounded, whose softmax meets no value."""
    return (q @ k.mT).relu().softmax(-1).sum()


NONE = (vocabulary, router, elsewhere, a_loss, rotations, linear_attention, gate)
PARAMETER: list[Tensor] = []


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("way", NONE, ids=lambda way: way.__name__)
def test_what_is_no_attention_is_passed_over_in_silence(
    way: Way, mode: Callable[[], AbstractContextManager[object]], cast: bool
) -> None:
    model, seen = layer(way), Seen()
    model.table = nn.Parameter(torch.randn(4, 7))
    PARAMETER[:] = [model.table]
    with mode(), torch.autocast("cpu", torch.bfloat16, enabled=cast), watch(model, seen):
        model(noise())
    assert (seen.taken, seen.refused) == ([], [])


def rectified(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.relu(q @ k.mT)  # here
    return scores.softmax(-1) @ v


def rectified_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.relu_()  # here
    return scores.softmax(-1) @ v


def talking_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqk,hg->bgqk", q @ k.mT, PARAMETER[0])  # here
    return scores.softmax(-1) @ v


def over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-2)  # here
    return weights @ v


def over_the_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT, dim=1)  # here
    return weights @ v


def over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax((q @ k.mT)[:, 0], 0)  # here
    return weights @ v[:, 0]


def a_mild_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -5.0)
    return scores.softmax(-1) @ v  # here


def zeros_instead_of_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * torch.ones(5, 5).tril()
    return scores.softmax(-1) @ v  # here


def a_bias_after_the_bound(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT) + torch.randn(5, 5)
    return scores.softmax(-1) @ v  # here


def two_sources(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat((q @ k.mT, k @ v.mT), -1)  # here
    return scores.softmax(-1) @ torch.cat((k, v), -2)


def a_query_that_changes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.clone()
    scores = q.detach() @ k.detach().mT
    q *= 2
    return scores.softmax(-1) @ v  # here


BETWEEN = (
    "{} ({}) stands between the product of query and key and its softmax, and is no scale, bias, "
    "softcap, mask or sink."
)
OTHER_AXIS = (
    "the softmax ({1}) runs over another axis than the one along which its weights meet the value; "
    "the weights of a query must sum to 1 over the keys.\n"
    "    Take the softmax over the axis of the keys, dim=-1."
)
TROUBLE = {
    rectified: ("relu", BETWEEN),
    rectified_in_place: ("relu_", BETWEEN),
    talking_heads: ("bmm", BETWEEN),
    two_sources: ("cat", BETWEEN),
    over_the_queries: ("", OTHER_AXIS),
    over_the_heads: (
        "",
        "the softmax ({1}) runs over axis 1, along which neither queries nor keys lie.\n"
        "    Take the softmax over the axis of the keys, dim=-1.",
    ),
    over_the_batch: (
        "",
        "the softmax ({1}) runs over axis 0, along which neither queries nor keys lie.\n"
        "    Take the softmax over the axis of the keys, dim=-1.",
    ),
    a_mild_fill: (
        "",
        "the softmax ({1}) is taken of scores set to -5, which does not mask them.\n"
        "    Set masked scores to -inf.",
    ),
    zeros_instead_of_a_mask: (
        "",
        "the softmax ({1}) is taken of scores that were set to 0 and not masked.\n"
        "    Set masked scores to -inf.",
    ),
    a_query_that_changes: (
        "",
        "the softmax ({1}) gave other weights than follow from its query and key.",
    ),
    a_bias_after_the_bound: (
        "",
        "the softmax ({1}) is taken of scores to which numbers were added after bounding them.",
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, nullcontext], ids=["no_grad", "grad"])
@pytest.mark.parametrize("way", TROUBLE, ids=lambda way: way.__name__)
def test_an_attention_that_cannot_be_told_is_refused_in_words(
    way: Way, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    model, seen = layer(way), Seen()
    model.table = nn.Parameter(torch.randn(3, 3))
    PARAMETER[:] = [model.table]
    with mode(), watch(model, seen):
        model(noise())
    lines, start = inspect.getsourcelines(way)
    line = next(start + i for i, text in enumerate(lines) if "# here" in text)
    name, text = TROUBLE[way]
    assert seen.refused == [("Layer", text.format(name, f"{__file__}:{line}"))]


def alive(
    way: Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], object],
) -> list[bool]:
    """Which of the tensors that a way notes are alive when it has run, the block still open."""
    noted: list[StorageWeakRef] = []

    def note(tensor: Tensor) -> Tensor:
        noted.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    model = layer(lambda q, k, v: way(q, k, v, note) is None)
    handwritten = MetValue(model, *[lambda *_: None] * 2, Absence(model))
    with torch.no_grad(), Tracer(model, handwritten.listeners, handwritten.listener_of):
        model(noise())
        return [not reference.expired() for reference in noted]


def test_nothing_is_held_at_the_next_product_after_the_value() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, note: Callable[[Tensor], Tensor]) -> Tensor:
        scores = note(note(q) @ note(k).mT)
        weights = note((scores + note(torch.zeros(5, 5))).softmax(-1))
        return note(weights @ v)

    def way(q: Tensor, k: Tensor, v: Tensor, note: Callable[[Tensor], Tensor]) -> None:
        attend(q + 0, k + 0, v, note)
        q @ v.mT

    assert alive(way) == [False] * 6


def test_query_and_key_are_held_as_long_as_the_scores_of_which_a_softmax_may_be_taken() -> None:
    held: list[Tensor] = []

    def way(q: Tensor, k: Tensor, v: Tensor, note: Callable[[Tensor], Tensor]) -> None:
        held.append(note(q + 1) @ note(k + 1).mT)
        note(held[0].softmax(-1) @ v)

    assert alive(way) == [True, True, False]


def test_factors_of_a_product_without_a_softmax_are_let_go_at_the_next_product() -> None:
    def way(q: Tensor, k: Tensor, v: Tensor, note: Callable[[Tensor], Tensor]) -> None:
        (note(q + 1) @ note(k + 1).mT).sum()
        q @ v.mT

    assert alive(way) == [False] * 2


def test_gradients_are_the_same_bits() -> None:
    def gradients(watched: bool) -> list[Tensor]:
        model, seen = layer(lambda *qkv: nano_gpt(*qkv)[1].square().sum()), Seen()
        with watch(model, seen) if watched else nullcontext():
            model(noise()).backward()
        return [parameter.grad for parameter in model.parameters()]

    pairs = zip(gradients(watched=True), gradients(watched=False), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_attention_in_a_checkpoint_is_taken_once(reentrant: bool) -> None:
    model = layer(
        lambda *qkv: checkpoint(lambda *qkv: nano_gpt(*qkv)[1], *qkv, use_reentrant=reentrant)
    )
    seen = Seen()
    with watch(model, seen):
        model(noise()).sum().backward()
    assert len(seen.taken) == 1


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_autocast_is_seen_as_it_was_computed(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    model, seen = layer(nano_gpt), Seen()
    with mode(), torch.autocast("cpu", torch.bfloat16):
        expected = model(noise())
        with watch(model, seen):
            weights, output = model(noise())
    assert torch.equal(output, expected[1])
    assert seen.taken[0][1].dtype == torch.bfloat16
    torch.testing.assert_close(seen.dense[0].float(), weights.detach().float(), atol=2e-2, rtol=0)


def test_attention_of_no_module_of_the_model_is_passed_over() -> None:
    seen = Seen()
    with watch(nn.Linear(1, 1), seen):
        nano_gpt(*torch.randn(3, 2, 3, 5, 7))
        over_the_queries(*torch.randn(3, 2, 3, 5, 7))
    assert (seen.taken, seen.refused) == ([], [])


@pytest.mark.parametrize("between", [False, True])
def test_both_softmaxes_of_one_product_are_taken(between: bool) -> None:
    def co_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        ahead = scores.softmax(-1)
        output = ahead @ v if between else 0
        back = scores.softmax(-2)
        return back.mT @ v + (output if between else ahead @ v)

    seen = seen_by(co_attention)
    assert seen.refused == []
    assert len(seen.taken) == 2
