"""Gradients: every question under every mask and kind of scores, and in every mode of autograd."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import oracle
import regard
from cases import MASKS, QUESTIONS, Case, Inputs
from regard.backends import blocks
from regard.reductions import OfEachRow

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
ASKED = [name for name in QUESTIONS if not name.startswith(("top-1", "max"))]
masks = pytest.mark.parametrize("mask", MASKS)


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
@masks
@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "blocks") for kind in KINDS), ("all", "dense")]
)
def test_every_question_has_the_derivative_of_finite_differences(
    kind: str, backend: str, mask: str
) -> None:
    case = replace(KINDS[kind], mask=mask)
    inputs = case.inputs

    def answers(*leaves: Tensor) -> list[Tensor]:
        x = filled(inputs, leaves)
        asked = [QUESTIONS[name].ask(x) for name in ASKED]
        asked.append(regard.Bilinear(x.query @ x.query.mT[..., :1]))
        found = case.matrix(*x.of_scores).reduce(*asked, backend=backend)
        return [numbers(answer) for answer in found]

    assert_derivative(answers, leaves_of(inputs))


def far(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() * (1.0 + h)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("kind", "mask"),
    [*zip(itertools.cycle(KINDS), MASKS, strict=False), *(("all", mask) for mask in MASKS)],
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
        return [*between, regard.bilinear(asked, far)]

    assert_derivative(answers, leaves_of(inputs))


@pytest.mark.usefixtures("small_blocks")
@masks
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
@masks
@pytest.mark.parametrize("kind", ["scores", "weights"])
def test_given_numbers_have_the_derivative_of_finite_differences(kind: str, mask: str) -> None:
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
class OfBlock(OfEachRow):
    """One number for each row, by any function of the block."""

    of: Callable[[regard.Block], Tensor]

    def update(self, block: regard.Block) -> tuple[regard.Part, ...]:
        return (regard.Part(block.box.at_rows, self.of(block)),)


def known(block: regard.Block) -> Tensor:
    """The scores with 0 for masked keys."""
    return torch.where(block.allowed, block.scores, 0.0)


READ: dict[str, Callable[[regard.Block], Tensor]] = {
    "scores": lambda b: known(b).square().sum(-1),
    "weights": lambda b: b.weights.square().sum(-1),
    "weights-and-scores": lambda b: (b.weights * known(b)).sum(-1),
    "logsumexp": lambda b: b.logsumexp,
    "above-and-maximum": lambda b: b.above + b.maximum.squeeze(-1),
    "expected-and-maximum": lambda b: b.expected + b.maximum.clamp(min=-9).squeeze(-1) * b.mass,
    "below-and-above": lambda b: (b.weights * (b.below - b.above[..., None])).sum(-1),
    "mass": lambda b: b.mass.square(),
    "everything": lambda b: (
        (b.weights * b.below).sum(-1) - b.expected + b.weights[..., 0] * b.logsumexp.exp() - b.mass
    ),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mask", ["none", "causal", "keep-pairs"])
@pytest.mark.parametrize("kind", ["plain", "sinks", "all"])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
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


# Which tensors require a gradient, which answers one comes from, and what autograd is told.

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


def made(*, length: int = 7) -> list[Tensor]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(length)
    tensors = [torch.randn(2, length, 3, generator=generator).double() for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def several(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One number that depends on all leaves, by the sweep and by the fused product."""
    A = regard.attend(query, key, mask=regard.Causal())
    entropy, received, top = A.reduce(regard.Entropy(), regard.Sum(-2), regard.TopK(2))
    pieces = (entropy, received.square(), top.values, A @ value, A[..., 1:3, :2], A.T @ value)
    return sum((piece.sin().sum() for piece in pieces), torch.zeros(()))


def test_one_tensor_in_every_place_gets_the_sum_of_its_gradients() -> None:
    x, *_ = made()
    (together,) = torch.autograd.grad(several(x, x, x), x)
    apart = leaves_of((x, x, x))
    expected = torch.autograd.grad(several(*apart), apart)
    torch.testing.assert_close(together, torch.stack(expected).sum(0))


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    leaves = made()
    total = several(*leaves)
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(total, leaves)))


def test_an_input_that_the_answer_does_not_depend_on_has_no_gradient() -> None:
    query, key, value = made()
    entropy = regard.attend(query, key).entropy().sum()
    gradients = torch.autograd.grad(entropy, (query, value), allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1] is None


def test_answers_that_nobody_differentiates_change_no_gradient() -> None:
    query, key, value = made()
    A = regard.attend(query, key)
    _, entropy, _ = A.reduce(regard.Output(value), regard.Entropy(), regard.TopK(2))
    gradients = torch.autograd.grad(entropy.sum(), (query, key, value))
    expected = torch.autograd.grad(A.entropy().sum(), (query, key))
    assert all(map(torch.equal, gradients[:2], expected))
    assert not gradients[2].any()


@pytest.mark.parametrize(
    "arriving",
    [
        pytest.param(lambda g: g.expand(2, 7), id="expanded"),
        pytest.param(lambda g: g.expand(7, 2).contiguous().mT, id="transposed"),
        pytest.param(lambda g: g.expand(2, 7).repeat_interleave(2, -1)[:, ::2], id="strided"),
    ],
)
def test_a_gradient_may_arrive_in_any_layout(arriving: Callable[[Tensor], Tensor]) -> None:
    query, key, _ = made()
    entropy = regard.attend(query, key).entropy()
    given = arriving(torch.tensor(2.0).double())
    (found,) = torch.autograd.grad(entropy, query, given, retain_graph=True)
    (expected,) = torch.autograd.grad(entropy, query, given.contiguous())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changed", ["query", "key", "value", "mask", "lengths"])
def test_what_was_changed_in_place_since_is_an_error(changed: str) -> None:
    leaves = made()
    tensors = {name: x.clone() for name, x in zip(("query", "key", "value"), leaves, strict=True)}
    tensors["mask"], tensors["lengths"] = torch.ones(7, dtype=torch.bool), torch.tensor([7, 5])
    mask = regard.Keep(tensors["mask"]) & regard.Padding(tensors["lengths"])
    A = regard.attend(tensors["query"], tensors["key"], mask=mask)
    entropy, output = A.reduce(regard.Entropy(), regard.Output(tensors["value"]))
    with torch.no_grad():
        tensors[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (entropy.sum() + output.sum()).backward()


def test_a_second_derivative_is_an_error() -> None:
    query, key, _ = made()
    (gradient,) = torch.autograd.grad(
        regard.attend(query, key).entropy().sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError) as caught:
        gradient.square().sum().backward()
    assert str(caught.value) == (
        "an answer of regard was differentiated twice; it has first derivatives only.\n"
        "    Ask with backend='dense', or leave out create_graph=True."
    )


def test_the_dense_backend_has_second_derivatives() -> None:
    query, key, _ = made(length=3)

    def entropy(query: Tensor, key: Tensor) -> Tensor:
        return regard.attend(query, key).reduce(regard.Entropy(), backend="dense")

    assert torch.autograd.gradgradcheck(entropy, (query, key))


ONLY_BACKWARD = (
    "an answer of regard is under torch.func or forward-mode AD; it has a backward pass only.\n"
    "    Use torch.autograd.grad; instead of vmap give query and key a batch axis."
)


def entropies(query: Tensor) -> Tensor:
    return regard.attend(query, query).entropy()


def forward_mode(query: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return entropies(torch.autograd.forward_ad.make_dual(query, query))


@pytest.mark.parametrize(
    "transformed",
    [
        pytest.param(torch.func.grad(lambda q: entropies(q).sum()), id="grad"),
        pytest.param(torch.func.vmap(entropies), id="vmap"),
        pytest.param(torch.func.jacrev(entropies), id="jacrev"),
        pytest.param(forward_mode, id="forward-mode"),
    ],
)
# PyTorch scripts the derivatives of its own operations, and warns itself of it.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_transform_that_cannot_pass_is_an_error(transformed: Callable) -> None:
    with pytest.raises(RuntimeError) as caught:
        transformed(torch.randn(2, 5, 3))
    assert str(caught.value) == ONLY_BACKWARD


def test_a_gradient_by_torch_func_passes_the_fused_product() -> None:
    query, key, value = (x.detach() for x in made())

    def total(query: Tensor) -> Tensor:
        return (regard.attend(query, key) @ value).square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(query), expected)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_a_checkpoint_gives_the_same_gradients(use_reentrant: bool) -> None:
    leaves = made()
    expected = torch.autograd.grad(several(*leaves), leaves)
    total = checkpoint(several, *leaves, use_reentrant=use_reentrant)
    total.backward()
    assert all(torch.equal(x.grad, other) for x, other in zip(leaves, expected, strict=True))


def test_a_checkpoint_within_a_graph_gives_the_same_gradients() -> None:
    leaves = made()

    def layers(*given: Tensor) -> Tensor:
        doubled = [2 * x for x in given]
        return several(*doubled)

    expected = torch.autograd.grad(layers(*leaves), leaves)
    found = torch.autograd.grad(checkpoint(layers, *leaves, use_reentrant=False), leaves)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients_the_answers_are_the_same(mode: Callable) -> None:
    leaves = made()
    expected = several(*leaves)
    with mode():
        found = several(*leaves)
    assert not found.requires_grad
    assert torch.equal(found, expected.detach())


def test_tensors_made_in_inference_mode_give_the_same_answers_outside() -> None:
    with torch.inference_mode():
        inner = [x.detach() for x in made()]
        within = several(*inner)
    assert torch.equal(several(*inner), within)


AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_answer(dtype: torch.dtype) -> None:
    query, key, value = (x.detach().to(dtype) for x in made())

    def answers() -> list[Tensor]:
        A = regard.attend(query, key, mask=regard.SlidingWindow(2, 0))
        R = regard.rollout([A, A])
        statistics = A.reduce(regard.Entropy(), regard.Sum(-2), regard.Pool(2, 2))
        parts = (A @ value, A.T @ value, A[..., 1:3, :2], A.scores[..., 1:3, :2], R @ value[0])
        return [*statistics, regard.kl(A, regard.attend(key, query)), *parts]

    expected = answers()
    with torch.autocast(**AUTOCAST):
        found = answers()
    assert [answer.dtype for answer in expected] == 4 * [torch.float32] + 5 * [dtype]
    pairs = zip(found, expected, strict=True)
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("whole", [True, False], ids=["backward-within", "backward-outside"])
def test_autocast_changes_no_gradient(whole: bool) -> None:
    leaves = [x.detach().float().requires_grad_() for x in made()]
    expected = torch.autograd.grad(several(*leaves), leaves)
    with torch.autocast(**AUTOCAST):
        total = several(*leaves)
        if whole:
            found = torch.autograd.grad(total, leaves)
    if not whole:
        found = torch.autograd.grad(total, leaves)
    assert all(map(torch.equal, found, expected))


# Rows that are no numbers.


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_row_of_nan_gives_nan_to_the_sink_and_to_its_own_query_alone(bad: float) -> None:
    query, key, _ = made()
    query = query.detach().clone()
    query[0, 2] = bad
    leaves = [query.requires_grad_(), torch.zeros(2).double().requires_grad_()]
    A = regard.attend(leaves[0], key, sink_bias=leaves[1])
    of_query, of_sink = torch.autograd.grad(A.logsumexp().sum(), leaves)
    expected = torch.zeros(2, 7, dtype=torch.bool)
    expected[0, 2] = True
    assert torch.equal(of_query.isnan().any(-1), expected)
    assert of_sink.isnan().tolist() == [True, False]


def test_a_sink_far_above_the_scores_has_finite_gradients() -> None:
    query, key, value = made()
    sink = torch.tensor([1e4, -1e4]).double().requires_grad_()
    A = regard.attend(query, key, sink_bias=sink, mask=torch.arange(7)[:, None] > 2)
    output, entropy, lse = A.reduce(regard.Output(value), regard.Entropy(), regard.LogSumExp())
    total = output.sum() + entropy.sum() + oracle.finite(lse).sum()
    gradients = torch.autograd.grad(total, (query, key, value, sink))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    # All weight on the sink of the first head, in the four rows that have keys; none of the second.
    torch.testing.assert_close(gradients[3], torch.tensor([4.0, 0.0]).double())


def test_an_infinite_gradient_of_a_row_without_keys_reaches_no_input() -> None:
    query, key, _ = made()
    sink = torch.zeros(2).double().requires_grad_()
    lse = regard.attend(query, key, sink_bias=sink, mask=torch.arange(7)[:, None] > 2).logsumexp()
    arriving = torch.where(lse.isfinite(), 1.0, -torch.inf)
    gradients = torch.autograd.grad(lse, (query, key, sink), arriving)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
