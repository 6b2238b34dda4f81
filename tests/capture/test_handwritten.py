"""Attention written by hand: what met the value is recorded, or refused with a reason."""

import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import handwritten_ways
import regard
from cases import in_turn
from handwritten_ways import (
    AS_WEIGHTS,
    AS_WEIGHTS_WITH_GRADIENTS,
    DROPOUTS,
    REFUSED,
    ROUNDED,
    WAYS,
    Answer,
    Both,
    Layer,
    T,
    Tensors,
    numbers,
)
from models import noise
from regard.scores.given_scores import GivenScores

MODES = {mode.__name__: mode for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad)}


def x() -> Tensor:
    return numbers(2, 3, T, 7, seed=1) * 2


def listed(tensors: Tensors) -> list[Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]


def run(model: nn.Module) -> Any:
    torch.manual_seed(3)
    return model(x())


def observed(model: nn.Module, **options: Any) -> tuple[regard.Recording, Any, list[str]]:
    """Return what is recorded, the output, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with regard.observe(model, **options) as seen:
            output = run(model)
    return seen, output, [str(each.message) for each in caught]


def check_recorded(name: str, seen: regard.Recording, answer: Answer, *, as_weights: bool) -> None:
    layers = [each for each in seen if each.startswith("layer")]
    weights, outputs = (listed(each) for each in answer)
    assert len(layers) == len(weights)
    atol = ROUNDED.get(name, 1e-5)
    for layer, expected, output in zip(layers, weights, outputs, strict=True):
        assert isinstance(seen[layer].source, GivenScores) == as_weights
        recorded = seen[layer].to_dense().detach().double()
        assert recorded.shape[-2:] == expected.shape[-2:]
        wanted = expected.detach().double().expand_as(recorded)
        wanted = wanted if as_weights else wanted.nan_to_num()
        torch.testing.assert_close(recorded, wanted, atol=atol, rtol=0, equal_nan=True)
        if name not in (*DROPOUTS, "dropout of rows set to 0", "NaN rows"):
            # The ways order the axes of their outputs differently.
            product = seen[layer] @ seen.value(layer).to(seen[layer].dtype)
            one, other = (each.detach().double().flatten().sort()[0] for each in (product, output))
            torch.testing.assert_close(one, other, atol=20 * atol, rtol=0, equal_nan=True)


def check_refused(name: str, messages: list[str], answer: Answer) -> None:
    (message,) = messages
    match = re.search(rf"'layer'.*{REFUSED[name]}", message)
    assert match, message
    file = re.escape(inspect.getsourcefile(handwritten_ways))
    assert re.search(rf"\({file}:\d+\)", message)
    if "sum" in match.groupdict():
        sums = torch.cat([each.detach().sum(-1).flatten() for each in listed(answer[0])]).float()
        assert bool(torch.isclose(sums, sums.new_tensor(float(match["sum"])), rtol=1e-3).any())


BESIDE = ("diagonal beside", "mean of the queries beside")
"""Ways with a second softmax, which meets no value and is named in a warning."""


@in_turn(name=[*WAYS], mode=[*MODES])
def test_what_met_the_value_is_recorded_or_refused(name: str, mode: str) -> None:
    model = Both(WAYS[name])
    with MODES[mode]():
        plain = run(model)
        seen, answer, messages = observed(model, keep="qkv")
    for before, after in zip(plain, answer, strict=True):
        for one, other in zip(listed(before), listed(after), strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
    assert "plain" in seen
    if name in REFUSED:
        assert not any(layer.startswith("layer") for layer in seen)
        check_refused(name, messages, answer)
    else:
        as_weights = AS_WEIGHTS_WITH_GRADIENTS if mode == "enable_grad" else AS_WEIGHTS
        check_recorded(name, seen, answer, as_weights=name in as_weights)
        messages = [each for each in messages if name not in BESIDE or "met no value" not in each]
        nan = "rows without a key are NaN in the model"
        assert [nan in each for each in messages] == [True] * (name == "NaN rows")


def test_the_table_names_ways() -> None:
    named = {*AS_WEIGHTS_WITH_GRADIENTS, *REFUSED, *ROUNDED}
    assert named <= WAYS.keys()
    assert not AS_WEIGHTS & REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("each query", "q_len=5, kv_len=5, scale=1, mask=Causal()"),
        ("softcap and a mask", "q_len=5, kv_len=5, scale=0.6, softcap=2, mask=Causal()"),
        ("gpt-oss", "q_len=5, kv_len=5, scale=0.4, sink_bias=(1, 3, 1, 1), mask=Causal()"),
        ("exponentials less the largest", "q_len=5, kv_len=5, scale=0.5"),
        ("repeated key", "q_len=5, kv_len=5, scale=1, num_kv_heads=1"),
        ("last keys", "q_len=5, kv_len=5, scale=1, mask=Padding([3])"),
        ("bloom", "q_len=5, kv_len=5, scale=0.4, bias=(6, 1, 5), mask=Causal()"),
        ("no batch", "q_len=5, kv_len=5, scale=0.378"),
        ("two groups", "q_len=5, kv_len=5, scale=1, num_kv_heads=2"),
        ("grouped axes", "q_len=5, kv_len=5, scale=1, num_kv_heads=2, mask=Causal()"),
        ("flip", "q_len=5, kv_len=5, from given weights"),
    ],
)
def test_the_matrix_shows_what_the_layer_did(name: str, text: str) -> None:
    seen, _, _ = observed(Layer(WAYS[name]))
    shown = re.sub(r"batch=\d, |num_heads=\d, |dtype=float32, device=cpu, ", "", repr(seen[0]))
    assert shown == f"AttentionMatrix({text})"


# The model's own axes


class Merged(nn.Module):
    """Four heads in the axis of the batch, and something before the tokens."""

    def forward(self, *given: Tensor) -> Tensor:
        heads = given[-1].unflatten(-1, (4, 2)).transpose(1, 2).flatten(0, 1)
        return torch.bmm(torch.bmm(heads, heads.mT).softmax(-1), heads)


@pytest.mark.parametrize(
    "others",
    [
        (),
        (torch.arange(2.0),),
        (noise(2, 6),),
        (noise(5, 5),),
        (noise(8, 5, 5),),
        (noise(1, 5, 8),),
    ],
    ids=lambda others: str([tuple(each.shape) for each in others]),
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_merged_axis_of_batch_and_heads_stays_one(others: tuple[Tensor, ...], batch: int) -> None:
    model = Merged()
    with regard.observe(model) as seen:
        model(*others, noise(batch, 5, 8))
    assert [matrix.shape for matrix in seen.values()] == [(4 * batch, 5, 5)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 5, 7), (4, 5, 5)),
        ((5, 7), (5, 5)),
        ((4, 1, 7), (4, 1, 1)),
        ((2, 3, 5, 7), (2, 3, 5, 5)),
    ],
)
def test_axes_are_those_of_the_model(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    model = Layer(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    with regard.observe(model) as seen:
        model(noise(*shape))
    assert seen[0].shape == expected


def test_a_mask_for_each_head_is_no_batch() -> None:
    model, given = nn.MultiheadAttention(12, 3).eval(), noise(5, 12)
    with regard.observe(model) as seen:
        model(given, given, given, attn_mask=noise(3, 5, 5))
    assert seen[0].shape == (3, 5, 5)


# What is no attention


LINEAR: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("linear attention", lambda k: k.softmax(-2).mT, "product of several softmaxes"),
    (
        "linear attention of exponentials",
        lambda k: k.exp().mT,
        "of no matrix product of query and key",
    ),
    ("linear attention of features", lambda k: k.mT, "of no matrix product of query and key"),
]


def rotations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angles = torch.arange(7.0)[None, :, None] @ torch.arange(5.0)[None, None]
    return (angles.cos() + angles.softmax(-1)) @ v[0, 0]


NONE: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "elsewhere": lambda q, _, v: q.softmax(-1) * v.relu().softmax(-2),
    "a loss": lambda q, k, _: F.cross_entropy(q[0, 0] @ k[0, 0].T, torch.arange(5)),
    "rotations": rotations,
}


@in_turn(way=NONE, mode=MODES, cast={"float32": False, "autocast": True})
def test_what_is_no_attention_is_passed_over_in_silence(
    way: Callable[..., object], mode: Callable[[], AbstractContextManager[object]], cast: bool
) -> None:
    with mode(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        seen, _, messages = observed(Both(way))
    assert (list(seen), messages) == (["plain"], [])


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        *(
            pytest.param(lambda q, k, v, of=of: q.softmax(-1) @ (of(k) @ v), reason, id=name)
            for name, of, reason in LINEAR
        ),
        pytest.param(
            lambda q, k, _: (q @ k.mT).relu().softmax(-1).sum(), "met no value", id="a gate"
        ),
    ],
)
def test_a_softmax_that_is_no_attention_is_named(way: Callable[..., object], reason: str) -> None:
    seen, _, (message,) = observed(Both(way))
    assert list(seen) == ["plain"]
    assert "'layer'" in message
    assert reason in message


def test_attention_of_no_module_of_the_model_is_passed_over() -> None:
    model = Layer(WAYS["plain"])
    with regard.observe(model) as seen:
        WAYS["plain"](*noise(3, 2, 3, T, 7))
        WAYS["halved"](*noise(3, 2, 3, T, 7))
        run(model)
    assert list(seen) == ["Layer"]
    assert seen.refused == []


# Lines, memory, gradients


def test_a_refusal_has_the_lines_of_the_softmax_and_of_the_value() -> None:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        return weights * 0.5 @ v

    _, start = inspect.getsourcelines(way)
    _, _, (message,) = observed(Both(way))
    assert re.findall(rf"\({re.escape(__file__)}:(\d+)\)", message) == [
        f"{start + 1}",
        f"{start + 2}",
    ]


def test_query_and_key_share_the_memory_of_the_models_own_tensors() -> None:
    kept: list[Tensor] = []

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.extend((q, k))
        return (q @ k.mT).softmax(-1) @ v

    seen, _, _ = observed(Layer(way), keep="qk")
    source = seen[0].source
    assert [torch.equal(*pair) for pair in zip((source.query, source.key), kept, strict=True)]


Note = Callable[[Tensor], Tensor]


def alive(way: Callable[[Tensor, Tensor, Tensor, Note], object]) -> list[bool]:
    """Return which noted tensors are alive after a way, in the open block, which keeps answers."""
    noted: list[StorageWeakRef] = []

    def note(tensor: Tensor) -> Tensor:
        noted.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    model = Both(lambda q, k, v: way(q, k, v, note) is None)
    with torch.no_grad(), regard.observe(model, keep=[regard.Entropy()]):
        run(model)
        return [not reference.expired() for reference in noted]


def test_nothing_is_held_at_the_next_product_after_the_value() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
        scores = note(note(q) @ note(k).mT)
        weights = note((scores + note(torch.zeros(T, T))).softmax(-1))
        return note(weights @ v)

    def way(q: Tensor, k: Tensor, v: Tensor, note: Note) -> None:
        attend(q + 0, k + 0, v, note)
        q @ v.mT

    assert alive(way) == [False] * 6


def test_query_and_key_are_held_while_a_softmax_of_their_scores_may_follow() -> None:
    held: list[Tensor] = []

    def way(q: Tensor, k: Tensor, v: Tensor, note: Note) -> None:
        held.append(note(q + 1) @ note(k + 1).mT)
        note(held[0].softmax(-1) @ v)

    assert alive(way) == [True, True, False]


def test_factors_of_a_product_without_a_softmax_are_freed_at_the_next_product() -> None:
    def way(q: Tensor, k: Tensor, v: Tensor, note: Note) -> None:
        (note(q + 1) @ note(k + 1).mT).sum()
        q @ v.mT

    assert alive(way) == [False] * 2


def test_gradients_are_the_same_bits() -> None:
    def gradients(*, is_observed: bool) -> list[Tensor]:
        model = Layer(lambda *qkv: WAYS["scale and fill"](*qkv)[1].square().sum())
        with regard.observe(model) if is_observed else nullcontext():
            run(model).backward()
        return [each.grad for each in (model.query.weight, model.key.weight, model.value.weight)]

    pairs = zip(gradients(is_observed=True), gradients(is_observed=False), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


RECORDED = [name for name in WAYS if name not in {*REFUSED, *ROUNDED, *DROPOUTS}]


@pytest.mark.parametrize("name", RECORDED)
def test_gradients_of_a_recording_are_those_of_the_weights(name: str) -> None:
    model = Both(WAYS[name])
    seen, (weights, _), _ = observed(model)
    parameters = [*model.layer.query.parameters(), model.layer.key.weight, *model.layer.own]
    layers = [each for each in seen if each.startswith("layer")]
    for layer, used in zip(layers, listed(weights), strict=True):
        recorded = seen[layer].to_dense()
        each = numbers(*recorded.shape, seed=5).masked_fill(used.isnan().any(-1, keepdim=True), 0.0)
        try:
            wanted = torch.autograd.grad(
                (used.nan_to_num() * each).sum(), parameters, retain_graph=True, allow_unused=True
            )
        except RuntimeError:
            return  # The model changed its weights in place, so it has no gradients itself.
        got = torch.autograd.grad(
            (recorded.nan_to_num() * each).sum(), parameters, retain_graph=True, allow_unused=True
        )
        for one, other in zip(got, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("fused", [False, True], ids=["by hand", "fused"])
def test_an_attention_in_a_checkpoint_is_recorded_once(fused: bool) -> None:
    def attend(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv) if fused else WAYS["scale and fill"](*qkv)[1]

    gradients: list[Tensor] = []
    for is_observed in (False, True):
        model = Layer(lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False))
        with regard.observe(model) if is_observed else nullcontext() as seen:
            run(model).square().sum().backward()
        gradients.append(model.query.weight.grad)
    assert list(seen) == ["Layer"]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_autocast_is_recorded_as_it_was_computed(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    model = Layer(WAYS["scale and fill"])
    with mode(), torch.autocast("cpu", torch.bfloat16):
        expected = run(model)
        seen, (weights, output), _ = observed(model)
    assert torch.equal(output, expected[1])
    assert seen[0].dtype == torch.bfloat16
    recorded = seen[0].to_dense().float()
    torch.testing.assert_close(recorded.detach(), weights.detach().float(), atol=2e-2, rtol=0)


def test_a_model_that_fails_at_the_value_leaves_nothing_behind() -> None:
    model = Layer(lambda q, k, v: (q @ k.mT).softmax(-1) @ v[:, :, :2])
    with pytest.raises(RuntimeError, match="size"), regard.observe(model) as seen:
        run(model)
    assert len(seen) == 0
    assert torch._C._len_torch_dispatch_stack() == 0


# TorchScript, whose arithmetic has overloads of its own for numbers


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1)


def moved(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(torch.add(q @ k.transpose(-1, -2) / 2.0, 0.5, alpha=3) + 1.0 - 0.5, -1)


def taken_from_a_number(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(1.0 - q @ k.transpose(-1, -2), -1)


def in_place(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores *= 0.5
    scores /= 1.5
    scores += 2.0
    scores -= 1.0
    return torch.softmax(scores, -1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TorchScript")
@pytest.mark.parametrize("scripted", [False, True], ids=["Python", "TorchScript"])
@pytest.mark.parametrize("weigh", [scaled, moved, taken_from_a_number, in_place])
def test_arithmetic_with_numbers_is_seen(
    weigh: Callable[[Tensor, Tensor], Tensor], scripted: bool
) -> None:
    with warnings.catch_warnings(action="ignore"):
        weigh = torch.jit.script(weigh) if scripted else weigh
    with torch.no_grad():
        seen, weights, _ = observed(Layer(lambda q, k, v: (w := weigh(q, k), w @ v)[0]))
    assert not isinstance(seen[0].source, GivenScores)
    torch.testing.assert_close(seen[0].to_dense(), weights)
