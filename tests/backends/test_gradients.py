"""Gradients: every question under every mask and kind of scores, and what reductions read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import MASKS, QUESTIONS, Case, Inputs, full_but, in_turn
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
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)
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
