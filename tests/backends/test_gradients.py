"""Gradients: every question under every mask and kind of scores, and what reductions read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
import regard
from cases import MASKS, QUESTIONS, Case, Inputs, full_but, in_turn
from largest_tensor import one_after_another
from regard.backends import sweep as blocks
from regard.matrix.weighted_sums import WeightedSum
from regard.reductions.reduction import RowStatistic

SHAPE = {"query": (2, 4, 3, 2), "key": (2, 2, 5, 2), "value_dim": 2, "dtype": torch.float64}
KINDS = {
    "plain": Case("plain", "scale alone", **SHAPE),
    "bias": Case("bias", "a bias for each pair", **SHAPE, bias=(4, 3, 5)),
    "alibi": Case("alibi", "slopes", **SHAPE, positions="alibi"),
    "t5": Case("t5", "buckets", **SHAPE, positions="t5"),
    "score-mod": Case("score-mod", "a table", **SHAPE, score_mod="table"),
    "softcap": Case("softcap", "a cap within reach", **SHAPE, softcap=1.5),
    "sinks": Case("sinks", "rows below 1", **SHAPE, sinks=True),
    "all": Case("all", "every step", **SHAPE, positions="t5-decoder", score_mod="by-index",
                softcap=3.0, sinks=True),
}  # fmt: skip
# The key of a largest weight jumps where two change places; the weights of three rarely do.
ASKED = [name for name in QUESTIONS if name != "top-1"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of one sequence, so that blocks cut the batch and the rows."""
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 40)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    monkeypatch.setattr(blocks, "MAX_ROWS", 2)


def leaves_of(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors if tensor is not None]


def filled(inputs: Inputs, leaves: tuple[Tensor, ...]) -> Inputs:
    """The inputs with the leaves in the places of those that there are."""
    rest = iter(leaves)
    return Inputs(*(None if tensor is None else next(rest) for tensor in inputs))


def assert_derivative(answers: Callable[..., list[Tensor]], leaves: list[Tensor]) -> None:
    """That backward gives what finite differences do, along a random direction.

    All answers are added up with random factors, and all leaves move at once: no term that is
    missing or wrong can hide, and it takes three evaluations where gradcheck takes dozens.
    """
    generator = torch.Generator().manual_seed(7)
    steps = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in leaves]

    def total(given: list[Tensor]) -> Tensor:
        # The infinite answers of rows without keys have no differences.
        flat = torch.cat([oracle.finite(answer).flatten() for answer in answers(*given)])
        factors = torch.randn(flat.shape, generator=torch.Generator().manual_seed(8))
        return flat @ factors.double()

    found = torch.autograd.grad(total(leaves), leaves, allow_unused=True)
    pairs = zip(found, steps, strict=True)
    slope = sum(float((grad * step).sum()) for grad, step in pairs if grad is not None)
    with torch.no_grad():
        size = 1e-5  # its square is the error of a central difference, beside 1e-16 / size
        ahead, behind = (
            float(total([x + sign * size * step for x, step in zip(leaves, steps, strict=True)]))
            for sign in (1, -1)
        )
    assert slope == pytest.approx((ahead - behind) / (2 * size), rel=1e-6, abs=1e-6)


def test_a_wrong_derivative_is_noticed() -> None:
    def answers(x: Tensor) -> list[Tensor]:
        return [x.square() * x.detach()]

    with pytest.raises(AssertionError):
        assert_derivative(answers, [torch.ones(3, dtype=torch.float64, requires_grad=True)])


def numbers(answer: Tensor | regard.Top) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer.values


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("small_blocks")
@in_turn(mask=list(MASKS), kind=list(KINDS), backend=["sweep", "dense"])
def test_every_question_has_the_derivative_of_finite_differences(
    mask: str, kind: str, backend: str
) -> None:
    case = replace(KINDS[kind], mask=mask)
    inputs = case.inputs

    def answers(*leaves: Tensor) -> list[Tensor]:
        x = filled(inputs, leaves)
        asked = [QUESTIONS[name].ask(x) for name in ASKED]
        asked.append(WeightedSum(x.query @ x.query.mT[..., :1]))
        found = case.matrix(*x.of_scores).reduce(*asked, backend=backend)
        return [numbers(answer) for answer in found]

    assert_derivative(answers, leaves_of(inputs))


def far(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() * (1.0 + h)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        *zip(KINDS, MASKS, strict=False),
        *(pytest.param("all", mask, marks=pytest.mark.full) for mask in MASKS),
    ],
)
def test_every_divergence_has_the_derivative_of_finite_differences(kind: str, mask: str) -> None:
    case = replace(KINDS[kind], mask=mask)
    inputs = case.inputs

    def answers(*leaves: Tensor) -> list[Tensor]:
        x = filled(inputs, leaves)
        asked = case.matrix(*x.of_scores)
        other = regard.attend(x.operand @ x.operand.mT[..., :2], x.value, mask=regard.Causal())
        pairs = [(asked, other), (other, asked)]
        between = [f(*pair) for pair in pairs for f in (regard.kl, regard.cross_entropy, regard.js)]
        return [*between, regard.weighted_sum(asked, far)]

    assert_derivative(answers, leaves_of(inputs))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "mask",
    full_but(dict(zip(MASKS, MASKS, strict=True)), "none", "causal-and-padding", "mask-mod"),
)
def test_products_have_the_derivative_of_finite_differences(mask: str) -> None:
    case = Case("square", "rollout", (2, 2, 4, 2), (2, 1, 4, 2), mask=mask, dtype=torch.float64)

    def answers(query: Tensor, key: Tensor, x: Tensor) -> list[Tensor]:
        first, second = case.matrix(query, key), case.matrix(query.flip(-2), key)
        R = regard.rollout([first, second], residual=0.3)
        y = x[:, 0]
        products = [R @ y, R.T @ y, R[..., 1, :], first @ x, first.T @ x, x.mT @ first]
        return [*products, second @ (first @ x), first[..., 1:3, :2], first.scores[..., 1:3, :2]]

    assert_derivative(answers, leaves_of((*case.inputs[:2], torch.randn(2, 2, 4, 3).double())))


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("small_blocks")
@in_turn(mask=list(MASKS), kind=["scores", "weights"])
def test_given_numbers_have_the_derivative_of_finite_differences(mask: str, kind: str) -> None:
    case = Case("given", "scores or weights", (2, 2, 3, 2), (2, 2, 4, 2), dtype=torch.float64)
    shape = case.inputs.shape
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    allowed = MASKS[mask][1](shape)

    def answers(given: Tensor) -> list[Tensor]:
        if kind == "scores":
            matrix = regard.AttentionMatrix.from_scores(given, mask=MASKS[mask][0](shape))
        else:
            matrix = regard.AttentionMatrix.from_weights(oracle.softmax(given, allowed).weights)
        asked = [QUESTIONS[name].ask(case.inputs) for name in ASKED]
        return [numbers(answer) for answer in matrix.reduce(*asked)]

    assert_derivative(answers, leaves_of((scores,)))


# What a reduction of a user's reads of a block.


@dataclass(frozen=True)
class OfBlock(RowStatistic):
    """One number for each row, by any function of the block."""

    of: Callable[[regard.Block], Tensor]

    def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
        return (regard.Contribution(block.box.at_rows, self.of(block)),)


def largest(block: regard.Block) -> Tensor:
    """The largest score of each row, a number also in rows without keys."""
    return block.maximum.clamp(min=-9).squeeze(-1)


def known(block: regard.Block) -> Tensor:
    """The scores with 0 for masked keys."""
    return torch.where(block.allowed, block.scores, 0.0)


READ: dict[str, Callable[[regard.Block], Tensor]] = {
    "scores": lambda b: known(b).square().sum(-1),
    "weights": lambda b: b.weights.square().sum(-1),
    "weights-and-scores": lambda b: (b.weights * known(b)).sum(-1),
    "logsumexp": lambda b: b.logsumexp,
    "normalizer-and-maximum": lambda b: b.log_normalizer + b.maximum.squeeze(-1),
    "mean-and-maximum": lambda b: b.mean_shifted + largest(b) * b.row_sum,
    "shifted-and-normalizer": lambda b: (b.weights * (b.shifted - b.log_normalizer[..., None])).sum(
        -1
    ),
    "row-sum": lambda b: b.row_sum.square(),
    "everything": lambda b: (
        (b.weights * b.shifted).sum(-1)
        - b.mean_shifted
        + b.weights[..., 0] * b.logsumexp.exp()
        - b.row_sum
    ),
}


@pytest.mark.usefixtures("small_blocks")
@in_turn(read=READ, kind=["plain", "sinks", "all"], mask=["none", "causal", "keep-pairs"])
def test_what_a_reduction_reads_of_a_block_has_its_derivative(
    read: Callable[[regard.Block], Tensor], kind: str, mask: str
) -> None:
    case = replace(KINDS[kind], mask=mask)
    inputs = case.inputs

    def answers(*leaves: Tensor) -> list[Tensor]:
        return [case.matrix(*filled(inputs, leaves).of_scores).reduce(OfBlock(read))]

    assert_derivative(answers, leaves_of(inputs))


def test_gradients_take_the_maximum_of_a_row_for_a_constant() -> None:
    query, key = leaves_of(KINDS["plain"].inputs[:2])
    A = regard.attend(query, key)
    largest = A.reduce(OfBlock(lambda b: b.maximum.squeeze(-1)))
    entropy = A.entropy()
    (gradient,) = torch.autograd.grad(largest.sum() + entropy.sum(), query)
    (expected,) = torch.autograd.grad(A.entropy().sum(), query)
    torch.testing.assert_close(gradient, expected)


# Which tensors require a gradient, and which do not.

WANTED = ("query", "key", "bias", "value", "operand", "positions", "sink_bias")


def everything(x: Inputs) -> list[Tensor]:
    """An answer that depends on all inputs."""
    numbers_added = (
        {"bias": x.bias} if x.positions is None else {"bias": regard.T5Bias(x.positions)}
    )
    A = regard.attend(x.query, x.key, mask=regard.Causal(), sink_bias=x.sink_bias, **numbers_added)
    other = regard.attend(x.operand, x.operand @ x.operand.mT[..., :3])
    entropy, output = A.reduce(regard.Entropy(), regard.Output(x.value))
    return [entropy, output, regard.kl(A[..., :, :], other)]


@pytest.mark.parametrize("wanted", WANTED)
def test_a_gradient_of_one_tensor_alone_is_its_gradient_among_all(wanted: str) -> None:
    shape = {"query": (1, 2, 3, 2), "key": (1, 1, 3, 2), "dtype": torch.float64}
    added = {"positions": "t5"} if wanted == "positions" else {"bias": (2, 3, 3)}
    inputs = Case("one", "one leaf", **shape, **added, sinks=True).inputs
    leaves = leaves_of(inputs)
    place = [name for name, x in zip(Inputs._fields, inputs, strict=True) if x is not None]
    at = place.index(wanted)

    def gradients(given: list[Tensor], of: list[Tensor]) -> tuple[Tensor, ...]:
        total = sum(part.square().sum() for part in everything(filled(inputs, tuple(given))))
        return torch.autograd.grad(total, of)

    alone = [leaf.detach() for leaf in leaves]
    alone[at].requires_grad_()
    (found,) = gradients(alone, [alone[at]])
    expected = gradients(leaves, leaves)[at]
    assert bool((expected != 0).any())
    torch.testing.assert_close(found, expected)


# Sums in one order: on a GPU these operations add several numbers to one place in any order.

UNORDERED = {"index_add", "scatter_add", "scatter_reduce", "put"}


class Operations(TorchDispatchMode):
    """Records the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


def t5(table: Tensor) -> Tensor:
    x = torch.ones(2, 40, 1, dtype=torch.float64)
    return regard.attend(x, x, bias=regard.T5Bias(table, max_distance=20)).entropy()


def heads_of_two_groups(key: Tensor) -> Tensor:
    query = random(6, 5, 4).detach()
    return regard.attend(query, key)[2:5].logsumexp()


def every_other_head(key: Tensor) -> Tensor:
    query = random(6, 5, 4).detach()
    return regard.attend(query, key)[::2].logsumexp()


def values_of_parts_of_groups(value: Tensor) -> Tensor:
    A = regard.attend(random(6, 5, 4).detach(), random(6, 7, 4).detach())
    return A.reduce(regard.Output(value), backend="sweep")


def uneven_cells(key: Tensor) -> Tensor:
    return regard.attend(random(2, 5, 4).detach(), key).pool(3, 4)


def uneven_spans(key: Tensor) -> Tensor:
    return regard.attend(random(2, 7, 4).detach(), key).segments([(0, 3), (2, 7)])


IN_ORDER: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "t5": (t5, (8, 2)),
    "heads-of-two-groups": (heads_of_two_groups, (2, 7, 4)),
    "every-other-head": (every_other_head, (2, 7, 4)),
    "values-of-parts-of-groups": (values_of_parts_of_groups, (2, 7, 3)),
    "uneven-cells": (uneven_cells, (2, 7, 4)),
    "uneven-spans": (uneven_spans, (2, 7, 4)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("answer", "shape"), IN_ORDER.values(), ids=IN_ORDER)
def test_a_gradient_is_right_and_adds_in_one_order(
    answer: Callable[[Tensor], Tensor], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "map_in_order", one_after_another)
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 4 * 5 * 7)  # 4 of 6 heads
    given = random(*shape)
    with Operations() as mode:
        torch.autograd.grad(answer(given).square().sum(), given)
    assert not {name.strip("_") for name in mode.names} & UNORDERED
    assert torch.autograd.gradcheck(answer, given)
