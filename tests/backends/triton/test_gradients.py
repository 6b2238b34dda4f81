"""backend="triton": gradients of every answer equal those of the dense matrix in float64."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from regard.backends import choose
from regard.backends.sweep import Sweep

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

import kernel_definitions as definitions
from cases import full_but
from regard.backends.triton import operands, packed_mask
from regard.backends.triton import triton_backend as backend
from regard.backends.triton.configs import Config
from regard.backends.triton.launch import Launch
from regard.backends.triton.packed_mask import pack
from regard.reductions.products import TransposedOutput, WeightTile
from regard.reductions.row_statistics import NormalizedEntropy

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered")

Q_LEN, KV_LEN = 37, 70
Asked = Callable[[Tensor], tuple[regard.Reduction, ...]]
SPANS = [(0, 10), (5, 30), (31, 37)]


@pytest.fixture(autouse=True)
def two_tiles_on_each_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting costs a step for each tile, and two show all that more of them would."""
    monkeypatch.setattr("regard.backends.triton.launch.INTERPRETED", Config(32, 64, 1, 1))


# Of an operand for each query: what a loss is made of.
LOSSES: dict[str, Asked] = {
    "logsumexp": lambda _: (regard.LogSumExp(),),
    "largest-score": lambda _: (regard.MaxScore(),),
    "entropy": lambda _: (regard.Entropy(),),
    "column-sums": lambda _: (regard.Sum(-2),),
    "pool": lambda _: (regard.Pool(2, 3),),
    "cells-of-one": lambda _: (regard.Pool(Q_LEN, KV_LEN),),
    "segments": lambda _: (regard.Segments(SPANS, [(0, 9), (3, 40), (69, 70)]),),
    "top-1": lambda _: (regard.TopK(1),),
    "top-3": lambda _: (regard.TopK(3),),
    "transposed": lambda x: (TransposedOutput(x),),
    "normalized-entropy": lambda _: (NormalizedEntropy(),),
    "diagonals": lambda _: (regard.Diagonal(-2), regard.Diagonal(), regard.Diagonal(KV_LEN - 4)),
    "columns": lambda _: (WeightTile(range(Q_LEN), range(3, 60, 7)),),
    "two-grids": lambda _: (regard.Pool(2, 2), regard.Pool(3, 5), regard.Sum(-2)),
    "two-products": lambda x: (TransposedOutput(x), TransposedOutput(x * 2)),
    "all": lambda x: (
        regard.LogSumExp(),
        regard.MaxScore(),
        regard.Entropy(),
        regard.Sum(-1),
        regard.Sum(-2),
        regard.TopK(2),
        regard.Pool(2, 3),
        regard.Diagonal(-1),
        TransposedOutput(x),
    ),
}
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": regard.Causal,
    "mask-mod": lambda: lambda _, h, q_idx, kv_idx: (q_idx * 7 + kv_idx * 3 + h) % 5 < 3,
    "either": lambda: regard.SlidingWindow(5, 0) | regard.Padding([9, 0]),
    "not": lambda: ~regard.Causal(),
    "lengths-by-head": lambda: regard.Padding(
        torch.tensor([[1, 20, 70, 0], [3, 5, 30, 70]])[..., None, None]
    ),
    "documents-twice": lambda: (
        regard.Documents([key // 30 for key in range(KV_LEN)])
        & regard.Documents([key // 20 for key in range(KV_LEN)])
    ),
    "documents": lambda: regard.Documents(
        torch.stack([torch.arange(KV_LEN) // n for n in (7, 70)])
    ),
}
BIASES = [
    (2, 4, Q_LEN, KV_LEN),
    (4, Q_LEN, KV_LEN),
    (Q_LEN, KV_LEN),
    (2, 1, Q_LEN, KV_LEN),
    (4, Q_LEN, 1),
    (2, 1, 1, KV_LEN),
    (4, 1, 1),
    (1, 1),
]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "softcap": lambda: {"softcap": 1.5, "scale": -2.0},
    "sinks": lambda: {"sink_bias": torch.tensor([0.3, -2.0, 1.0, 0.0])},
    "alibi": lambda: {"bias": regard.ALiBi(torch.tensor([0.5, 0.03, 0.1, 0.2]))},
    "t5": lambda: {"bias": regard.T5Bias(torch.randn(32, 4, generator=seeded()), max_distance=40)},
    **{
        f"bias-{'x'.join(map(str, size))}": lambda size=size: {
            "bias": torch.randn(size, generator=seeded())
        }
        for size in BIASES
    },
    "bias-and-softcap": lambda: {
        "bias": torch.randn(4, 1, KV_LEN, generator=seeded()),
        "softcap": 2.0,
        "scale": -1.0,
    },
    "bias-softcap-and-sinks": lambda: {
        **STEPS["bias-and-softcap"](),
        **STEPS["sinks"](),
    },
    "scale-0": lambda: {"scale": 0.0},
    "scale-tiny": lambda: {"scale": 2.0**-70},
}


def gradients(
    asked: Asked, mask: Any, steps: dict[str, Any], name: str, device: torch.device
) -> list[Tensor]:
    """Those of query, key, the operand, a bias and a sink, of a loss of random numbers."""
    drawn = torch.Generator().manual_seed(4)
    dtype = torch.float64 if name == "dense" else torch.float32

    def leaf(*size: int) -> Tensor:
        numbers = torch.randn(size, generator=drawn)
        return numbers.to(device, dtype).requires_grad_()

    query, key, operand = leaf(2, 4, Q_LEN, 8), leaf(2, 2, KV_LEN, 8), leaf(2, 4, Q_LEN, 3)
    leaves = [query, key, operand]
    bias = steps.get("bias")
    if isinstance(bias, regard.ALiBi | regard.T5Bias):
        bias = bias.map(lambda x: x.to(device, dtype).requires_grad_())
        leaves.extend(bias.tensors)
    elif bias is not None:
        bias = bias.to(device, dtype).requires_grad_()
        leaves.append(bias)
    steps = {**steps, "bias": bias}
    if "sink_bias" in steps:
        steps = {**steps, "sink_bias": steps["sink_bias"].to(device, dtype).requires_grad_()}
        leaves.append(steps["sink_bias"])
    questions = asked(operand)
    answers = regard.attend(query, key, mask=mask, **steps).reduce(*questions, backend=name)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for answer in answers if len(questions) > 1 else (answers,):
        numbers = answer.values if isinstance(answer, regard.Top) else answer
        shares = torch.randn(numbers.shape, generator=drawn).to(device)
        loss = loss + (numbers.masked_fill(numbers == -torch.inf, 0).double() * shares).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def assert_exact(asked: Asked, mask: Any, steps: dict[str, Any], device: torch.device) -> None:
    found = gradients(asked, mask, steps, "triton", device)
    exact = gradients(asked, mask, steps, "dense", device)
    for one, other in zip(found, exact, strict=True):
        size = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=8e-6 * max(size, 1e-30))


# Interpreting a gradient takes one to six seconds; "all" has every term of the derivative. Without
# the tests marked full, three of it have every kind of mask and of step between them.
losses = pytest.mark.parametrize("asked", full_but(LOSSES, "segments"))


@losses
def test_the_gradient_of_an_answer_equals_the_dense_one(asked: Asked, device: torch.device) -> None:
    assert_exact(asked, regard.Causal(), {}, device)


@pytest.mark.full
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_gradient_stays_inside_any_mask(mask: Callable[[], Any], device: torch.device) -> None:
    made = mask()
    made = made.map(lambda x: x.to(device)) if isinstance(made, regard.Mask) else made
    assert_exact(LOSSES["all"], made, {}, device)


BIASED = {
    f"{steps}-{mask}": (steps, mask)
    for mask in ("mask-mod", "documents", "lengths-by-head")
    for steps in ("t5", "bias-37x70")
}


@pytest.mark.full
@pytest.mark.parametrize("biased", BIASED.values(), ids=BIASED)
def test_the_gradient_of_a_bias_stays_inside_a_mask(
    biased: tuple[str, str], device: torch.device
) -> None:
    steps, mask = biased
    made = MASKS[mask]()
    made = made.map(lambda x: x.to(device)) if isinstance(made, regard.Mask) else made
    assert_exact(LOSSES["all"], made, STEPS[steps](), device)


@pytest.mark.full
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_gradient_goes_through_every_step_of_a_score(
    steps: Callable[[], dict[str, Any]], device: torch.device
) -> None:
    assert_exact(LOSSES["all"], regard.Causal(), steps(), device)


@pytest.mark.full
def test_one_number_for_all_is_read_for_each(device: torch.device) -> None:
    """A sum over an answer sends one number that is repeated without memory of its own."""
    query = torch.randn(1, 2, 40, 8, device=device, requires_grad=True)
    key = torch.randn(1, 2, 70, 8, device=device, requires_grad=True)
    A = regard.attend(query, key)
    for reduction in (regard.Pool(1, 2), regard.Segments([(0, 9)]), regard.TopK(2)):
        by_backend: list[tuple[Tensor, ...]] = []
        for name in ("triton", "sweep"):
            answer = A.reduce(reduction, backend=name)
            answer = answer.values if isinstance(answer, regard.Top) else answer[..., :1]
            by_backend.append(torch.autograd.grad(answer.sum(), (query, key)))
        for found, exact in zip(*by_backend, strict=True):
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_cells_of_whole_tiles_have_the_gradient_of_others(device: torch.device) -> None:
    """Where a tile meets one cell, that has one number; tiles have 16 to 128 tokens."""
    drawn = torch.Generator().manual_seed(4)
    query = torch.randn(1, 2, 256, 8, generator=drawn).to(device).requires_grad_()
    key = torch.randn(1, 1, 256, 8, generator=drawn).to(device).requires_grad_()
    shares = torch.randn(1, 2, 2, 2, generator=drawn).to(device)
    A = regard.attend(query, key, mask=regard.Causal())
    found, exact = (
        torch.autograd.grad(
            (A.reduce(regard.Pool(2, 2), backend=name) * shares).sum(), (query, key)
        )
        for name in ("triton", "dense")
    )
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.full
@pytest.mark.parametrize("blocks", [(32, 16), (16, 64), (64, 128)], ids=str)
def test_tiles_of_any_size_give_the_same_gradient(
    blocks: tuple[int, int], interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.backends.triton.launch.INTERPRETED", Config(*blocks, 1, 1))
    assert_exact(LOSSES["all"], MASKS["mask-mod"](), STEPS["t5"](), torch.device("cpu"))


def test_a_tensor_that_is_query_and_key_gets_both_gradients(device: torch.device) -> None:
    x = torch.randn(1, 2, 20, 8, device=device, requires_grad=True)
    found, exact = (
        torch.autograd.grad(
            regard.attend(x, x, mask=regard.Causal()).reduce(regard.Entropy(), backend=name).sum(),
            x,
        )
        for name in ("triton", "sweep")
    )
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-4)


@pytest.mark.full
def test_two_runs_give_the_same_gradient(device: torch.device) -> None:
    runs = [gradients(LOSSES["pool"], regard.Causal(), {}, "triton", device) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_a_tensor_that_changes_before_backward_is_an_error(interpreted: None) -> None:
    query = torch.randn(5, 4, requires_grad=True)
    key = torch.randn(5, 4)
    entropy = regard.attend(query, key).reduce(regard.Entropy(), backend="triton")
    key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entropy.sum().backward()


def test_a_gradient_is_differentiated_once(interpreted: None) -> None:
    query = torch.randn(5, 4, requires_grad=True)
    entropy = regard.attend(query, query).reduce(regard.Entropy(), backend="triton")
    (gradient,) = torch.autograd.grad(entropy.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        gradient.sum().backward()


@pytest.mark.full
@pytest.mark.parametrize("share", [1e-5, pytest.param(1e2, marks=pytest.mark.full)], ids=str)
def test_a_small_loss_has_a_gradient_in_float16(share: float, device: torch.device) -> None:
    """The derivatives by scores are a thousandth of what arrives, too small for float16."""
    drawn = torch.Generator().manual_seed(4)
    query, key = (
        torch.randn(1, 2, 200, 8, generator=drawn).to(device, torch.float16) for _ in range(2)
    )
    by_backend: list[Tensor] = []
    for name, dtype in (("triton", torch.float16), ("dense", torch.float64)):
        leaf = query.to(dtype).requires_grad_()
        answers = regard.attend(leaf, key.to(dtype)).reduce(
            regard.Entropy(), regard.LogSumExp(), backend=name
        )
        loss = sum((each.double().square() * share).sum() for each in answers)
        (gradient,) = torch.autograd.grad(torch.as_tensor(loss), leaf)
        by_backend.append(gradient.double())
    size = float(by_backend[1].abs().max())
    torch.testing.assert_close(*by_backend, rtol=0, atol=3e-3 * size)


ONE_KEY: dict[str, Asked] = {
    "product": lambda x: (TransposedOutput(x),),
    "products": lambda x: (TransposedOutput(x), TransposedOutput(x.flip(-1))),
    "cells": lambda _: (regard.Pool(40, 40), regard.Pool(20, 40)),
    "columns": lambda _: (WeightTile(range(40), range(3)),),
}


@pytest.mark.parametrize("head_dim", [16, 144])
@pytest.mark.parametrize("asked", ONE_KEY.values(), ids=ONE_KEY)
def test_a_row_that_looks_at_one_key_has_its_small_gradient(
    asked: Asked, head_dim: int, device: torch.device
) -> None:
    """Of a weight of 0.99 the gradient is made of 0.01, which rounding to bfloat16 would change."""
    drawn = torch.Generator().manual_seed(4)
    query, key, x = torch.randn(3, 1, 1, 40, head_dim, generator=drawn).to(device, torch.bfloat16)
    query = query.abs() + 1
    key[..., 0, :], key[..., 1:, :] = 1.5, -key[..., 1:, :].abs()
    by_backend: list[Tensor] = []
    for name, dtype in (("triton", torch.bfloat16), ("dense", torch.float64)):
        leaf = query.to(dtype).requires_grad_()
        A = regard.attend(leaf, key.to(dtype), scale=2 / head_dim)
        questions, drawn = asked(x.to(dtype)), seeded()
        answers = A.reduce(*questions, backend=name)
        loss = torch.zeros((), device=device)
        for answer in answers if len(questions) > 1 else (answers,):
            shares = torch.randn(answer.shape, generator=drawn).to(device, torch.bfloat16)
            loss = loss + (answer * shares).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        by_backend.append(gradient.double())
    size = float(by_backend[1].abs().max())
    torch.testing.assert_close(*by_backend, rtol=0, atol=1e-2 * size)


def test_an_answer_that_changes_in_place_keeps_its_gradient(interpreted: None) -> None:
    query = torch.randn(1, 2, 20, 8, requires_grad=True)
    A = regard.attend(query, query)
    asked = (regard.LogSumExp(), regard.Entropy(), regard.Sum(-2), regard.TopK(2))
    by_backend: list[tuple[Tensor, ...]] = []
    for name in ("triton", "sweep"):
        lse, entropy, columns, top = A.reduce(*asked, backend=name)
        loss = lse.sum() + entropy.mul_(2).sum() + columns.square().sum() + top.values.sum()
        with torch.no_grad():
            lse.zero_()
        by_backend.append(torch.autograd.grad(loss, query))
    torch.testing.assert_close(*by_backend, rtol=1e-4, atol=1e-5)


def test_an_output_beside_a_statistic_has_its_own_gradient(interpreted: None) -> None:
    query, key, value = (torch.randn(2, 9, 4, requires_grad=True) for _ in range(3))
    A = regard.attend(query, key, mask=regard.Causal())
    by_backend: list[tuple[Tensor, ...]] = []
    for name in ("triton", "sweep"):
        output, entropy = A.reduce(regard.Output(value), regard.Entropy(), backend=name)
        loss = output.square().sum() + entropy.sum()
        by_backend.append(torch.autograd.grad(loss, (query, key, value)))
    torch.testing.assert_close(*by_backend, atol=1e-5, rtol=1e-4)


# Masks as bits


def test_a_mask_is_evaluated_once_for_a_matrix(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[object] = []

    def counted(*args: Any) -> Any:
        packed.append(args)
        return pack(*args)

    monkeypatch.setattr("regard.backends.triton.operands.pack", counted)
    x = torch.randn(1, 2, 20, 8)
    allowed = torch.rand(20, 20) < 0.5
    A = regard.attend(x, x, mask=allowed)
    for reduction in (regard.Entropy(), regard.Sum(-2)):
        A.reduce(reduction, backend="triton")
    assert len(packed) == 1
    before = A.reduce(regard.LogSumExp(), backend="triton")
    # Another matrix evaluates what is true then, whatever object or memory it stands in.
    allowed.fill_(True)
    other = regard.attend(x, x, mask=allowed)
    after = other.reduce(regard.LogSumExp(), backend="triton")
    assert len(packed) == 2
    torch.testing.assert_close(after, regard.attend(x, x).logsumexp())
    assert not torch.equal(before, after)


def test_the_bits_of_a_matrix_are_freed_with_it(interpreted: None) -> None:
    x = torch.randn(1, 2, 20, 8)
    A = regard.attend(x, x, mask=torch.rand(20, 20) < 0.5)
    A.reduce(regard.Entropy(), backend="triton")
    held = len(operands._PACKED)
    del A
    assert len(operands._PACKED) == held - 1


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        pytest.param(regard.Causal(), "1000 2100 2210", id="causal"),
        pytest.param(~regard.Causal(), "1222 0122 0012", id="future"),
        pytest.param(regard.SlidingWindow(63, 0), "1000 1100 0110", id="window"),
        pytest.param(regard.Keep(torch.ones(256).bool()), "2222 2222 2222", id="all"),
        pytest.param(regard.Keep(torch.zeros(256).bool()), "0000 0000 0000", id="none"),
    ],
)
def test_a_cell_without_bits_is_whole_or_hidden(
    mask: regard.Mask, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_mask, "_WORDS_AT_ONCE", 0)  # no mask is small
    shape = torch.Size((192, 256))
    aligned = regard.masks.RowSlice(mask, 0, 256)  # so that cells lie on the diagonal
    packed = pack(aligned.bind(shape, torch.device("cpu")), shape, torch.device("cpu"))
    found = packed.slots.clamp(min=-2).where(packed.slots < 0, 1).where(packed.slots != -1, 2)
    found = found.where(packed.slots != -2, 0)
    assert " ".join("".join(map(str, row)) for row in found[0, 0].tolist()) == kinds
    assert len(packed.words) == kinds.count("1")


@pytest.mark.parametrize("words", [0, 2**24], ids=["partial-cells", "all-cells"])
def test_bits_are_the_mask(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_mask, "_WORDS_AT_ONCE", words)
    monkeypatch.setattr(packed_mask, "_BYTES_AT_ONCE", 2 * 64 * 200)  # one row of squares
    drawn = torch.rand(2, 3, 150, 200) < 0.5
    for allowed in (drawn, drawn[:1], drawn[:, :1], drawn[0, 0], drawn[0, 0, :1]):
        shape, device = torch.Size((2, 3, 150, 200)), torch.device("cpu")
        packed = pack(regard.Keep(allowed).bind(shape, device), shape, device)
        assert torch.equal(definitions.unpacked(packed).expand(shape), allowed.expand(shape))


@pytest.mark.full
@losses
def test_a_backward_pass_that_fills_the_memory_is_done_in_blocks(
    asked: Asked, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Launch, "query_gradient", full)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(asked, regard.Causal(), {}, "triton", torch.device("cpu"))
    exact = gradients(asked, regard.Causal(), {}, "dense", torch.device("cpu"))
    monkeypatch.setitem(choose.BACKENDS, "triton", backend.Triton(instead=Sweep()))
    backend.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="the memory of the GPU is full"):
        found = gradients(asked, regard.Causal(), {}, "triton", torch.device("cpu"))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_frees_the_inputs_of_an_answer(interpreted: None) -> None:
    query = torch.randn(1, 2, 20, 8, requires_grad=True)
    alive: list[weakref.ref[Tensor]] = []

    def loss(query: Tensor) -> Tensor:
        doubled = query * 2
        alive.append(weakref.ref(doubled))
        return regard.attend(doubled, doubled).reduce(regard.Entropy(), backend="triton").sum()

    found = checkpoint(loss, query, use_reentrant=False)
    assert alive[0]() is None
    (gradient,) = torch.autograd.grad(found, query)
    (exact,) = torch.autograd.grad(loss(query), query)
    torch.testing.assert_close(gradient, exact)
