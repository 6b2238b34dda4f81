"""kl, cross_entropy and js between two attention matrices: the dense definition, and its laws."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard
from cases import MASKS, full_but, in_turn
from largest_tensor import MOST, inputs, largest
from regard.backends import sweep as blocks
from regard.backends.cpu import cpu_backend
from regard.reductions.divergences import JensenShannon, KullbackLeibler

SHAPE = torch.Size((2, 6, 7, 11))
LOG_2 = math.log(2)

# The definitions, of whole matrices.


def log_weights(dense: oracle.Dense) -> Tensor:
    """log of the weights from the scores: no weight underflows; 0 where a key is masked."""
    lse = oracle.logsumexp(dense)[..., None]
    return torch.where(dense.scores == -torch.inf, 0.0, dense.scores - oracle.finite(lse))


def dense_cross_entropy(a: oracle.Dense, b: oracle.Dense) -> Tensor:
    hidden = (a.scores > -torch.inf) & (b.scores == -torch.inf)
    sums = -(a.weights * log_weights(b)).sum(-1)
    return torch.where(hidden.any(-1), torch.inf, sums)


def dense_kl(a: oracle.Dense, b: oracle.Dense) -> Tensor:
    return dense_cross_entropy(a, b) + (a.weights * log_weights(a)).sum(-1)


def dense_js(a: oracle.Dense, b: oracle.Dense) -> Tensor:
    mean = (a.weights + b.weights) / 2
    mean = torch.where(mean > 0, mean, 1.0)  # a key of no weight in both adds nothing

    def from_mean(weights: Tensor) -> Tensor:
        ratio = torch.where(weights > 0, weights / mean, 1.0)
        return (weights * ratio.log()).sum(-1)

    return (from_mean(a.weights) + from_mean(b.weights)) / 2


Between = Callable[[regard.AttentionMatrix, regard.AttentionMatrix], Tensor]
DIVERGENCES: dict[str, tuple[Between, Callable[[oracle.Dense, oracle.Dense], Tensor]]] = {
    "kl": (regard.kl, dense_kl),
    "cross_entropy": (regard.cross_entropy, dense_cross_entropy),
    "js": (regard.js, dense_js),
}
REDUCTIONS = {"kl": KullbackLeibler, "js": JensenShannon}
divergences = pytest.mark.parametrize("name", DIVERGENCES)


# Pairs of matrices.


@dataclass(frozen=True)
class Side:
    """One of the two matrices, as its query and key, or as given scores."""

    kv_heads: int = 6
    head_dim: int = 5
    mask: str = "none"
    sharp: float = 1.0
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    given: bool = False
    sinks: bool = False
    shape: torch.Size = SHAPE

    def inputs(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        *batch, num_heads, q_len, kv_len = self.shape
        if self.given:
            return [(normal(*self.shape) * self.sharp).to(self.dtype)]
        made = [
            normal(*batch, num_heads, q_len, self.head_dim) * self.sharp,
            normal(*batch, self.kv_heads, kv_len, self.head_dim),
        ]
        return [tensor.to(self.dtype) for tensor in made + [normal(num_heads)] * self.sinks]

    def matrix(self, *inputs: Tensor) -> regard.AttentionMatrix:
        mask = MASKS[self.mask][0](self.shape)
        if self.given:
            return regard.AttentionMatrix.from_scores(*inputs, mask=mask)
        query, key, *sinks = inputs
        sink_bias = sinks[0] if sinks else None
        return regard.attend(query, key, mask=mask, scale=self.scale, sink_bias=sink_bias)

    def dense(self, *inputs: Tensor) -> oracle.Dense:
        allowed = MASKS[self.mask][1](self.shape)
        if self.given:
            return oracle.softmax(*inputs, allowed)
        query, key, *sinks = inputs
        sink_bias = sinks[0] if sinks else None
        return oracle.attend(query, key, allowed=allowed, scale=self.scale, sink_bias=sink_bias)


@dataclass(frozen=True)
class Pair:
    """Two matrices of one shape, and why they are compared."""

    name: str
    why: str
    a: Side = field(default_factory=Side)
    b: Side = field(default_factory=Side)

    @property
    def inputs(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.a.inputs(1), self.b.inputs(2)

    def of(self, function: Callable, dense: bool) -> Callable[..., Tensor]:
        """The divergence as a function of all inputs."""
        count = len(self.inputs[0])

        def answer(*inputs: Tensor) -> Tensor:
            if dense:
                return function(self.a.dense(*inputs[:count]), self.b.dense(*inputs[count:]))
            return function(self.a.matrix(*inputs[:count]), self.b.matrix(*inputs[count:]))

        return answer

    @property
    def largest_score(self) -> float:
        sides = zip((self.a, self.b), self.inputs, strict=True)
        scores = [side.dense(*map(oracle.double, inputs)).scores for side, inputs in sides]
        return max(float(oracle.finite(each).abs().max()) for each in scores)


PAIRS = [
    Pair("plain", "nothing special"),
    Pair("head-dims", "a student narrower than its teacher", b=Side(head_dim=3, scale=0.7)),
    Pair("grouped", "the same groups of heads", Side(2), Side(2)),
    Pair("groups-differ", "blocks cut no group of either", Side(3), Side(2)),
    Pair("one-kv-head", "groups in one of them only", b=Side(1)),
    Pair("causal", "the same mask", Side(mask="causal"), Side(mask="causal")),
    Pair("causal-first", "B attends to more", a=Side(mask="causal")),
    Pair("causal-second", "B lacks keys that A has", b=Side(mask="causal")),
    Pair("window", "columns of both differ", Side(mask="window-left"), Side(mask="window-both")),
    Pair("apart", "bands that hardly meet", Side(mask="window-left"), Side(mask="window-right")),
    Pair("padding", "rows without keys in both", Side(mask="padding"), Side(mask="padding")),
    Pair("padding-first", "rows without keys in A", a=Side(mask="padding")),
    Pair("padding-second", "rows without keys in B", b=Side(mask="padding")),
    Pair("bool", "any keys", Side(mask="keep-pairs"), Side(mask="bool-keys")),
    Pair("given", "scores that are given", Side(given=True), Side(mask="causal")),
    Pair("given-both", "no query and key at all", Side(given=True), Side(given=True)),
    Pair("sharp", "weights that underflow", Side(sharp=30.0), Side(sharp=30.0)),
    Pair("sharp-second", "finite where weights of B underflow", b=Side(sharp=100.0)),
    Pair("sinks", "rows that sum to less than 1", Side(sinks=True), Side(sinks=True)),
    Pair("bfloat16", "both rounded", Side(dtype=torch.bfloat16), Side(dtype=torch.bfloat16)),
    Pair("dtypes", "a half and a float matrix", Side(dtype=torch.float16), Side()),
    Pair("float64", "all digits", Side(dtype=torch.float64), Side(dtype=torch.float64)),
    Pair("one-float64", "the wider dtype wins", b=Side(dtype=torch.float64)),
    Pair("no-batch", "heads alone", Side(shape=SHAPE[1:]), Side(shape=SHAPE[1:])),
]
pairs = pytest.mark.parametrize("pair", [pytest.param(pair, id=pair.name) for pair in PAIRS])


def double_pair(pair: Pair) -> Pair:
    wide = [replace(side, dtype=torch.float64) for side in (pair.a, pair.b)]
    return replace(pair, a=wide[0], b=wide[1])


def assert_exact(pair: Pair, subtests: pytest.Subtests) -> None:
    inputs = [tensor for side in pair.inputs for tensor in side]
    dtype = torch.promote_types(
        torch.promote_types(pair.a.dtype, pair.b.dtype),
        torch.float32,  # statistics have at least that
    )
    for name, (of_regard, definition) in DIVERGENCES.items():
        with subtests.test(name):
            exact = pair.of(definition, dense=True)(*map(oracle.double, inputs))
            plain = pair.of(definition, dense=True)(*(tensor.to(dtype) for tensor in inputs))
            found = pair.of(of_regard, dense=False)(*inputs)
            assert found.dtype == dtype
            # An error of a score is one of its logarithm, and a relative one of its weight.
            unit = 1 + oracle.largest(exact)
            within = oracle.allowed_error(
                exact, plain, dtype=dtype, scores=pair.largest_score, unit=unit
            )
            oracle.assert_close(found, exact, within)


@pytest.mark.sampled(8)
@pairs
def test_a_divergence_equals_its_definition(pair: Pair, subtests: pytest.Subtests) -> None:
    assert_exact(pair, subtests)


SIZES = {
    "one-row": (1, 1, 1),
    "uneven-rows": (1, 3, 3),
    "four-heads": (4 * 7 * 11, 2, 7),
    "three-heads": (3 * 7 * 11, 2, 7),
}


@pytest.mark.sampled(6)
@in_turn(pair={pair.name: pair for pair in PAIRS}, size=SIZES)
def test_a_divergence_from_small_blocks_equals_its_definition(
    pair: Pair,
    size: tuple[int, int, int],
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for constant, value in zip(("BLOCK_SIZE", "MIN_ROWS", "MAX_ROWS"), size, strict=True):
        monkeypatch.setattr(blocks, constant, value)
    assert_exact(pair, subtests)


TILES = {"one-tile": (256, 2048), "uneven-tiles": (3, 4), "one-by-one": (1, 1)}


@pytest.mark.sampled(5)
@in_turn(pair={pair.name: pair for pair in PAIRS}, tiles=TILES)
def test_a_divergence_by_the_compiled_kernels_equals_its_definition(
    pair: Pair,
    tiles: tuple[int, int],
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for constant, value in zip(("_LEAST", "ROWS", "TILE"), (0, *tiles), strict=True):
        monkeypatch.setattr(cpu_backend, constant, value)
    assert_exact(pair, subtests)


@pytest.mark.sampled(6)
@pairs
def test_the_gradients_to_both_matrices_equal_those_of_the_definition(
    pair: Pair, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 4 * 7 * 11)
    pair = double_pair(pair)
    inputs = [tensor for side in pair.inputs for tensor in side]
    for name, (of_regard, definition) in DIVERGENCES.items():
        with subtests.test(name):
            found = oracle.gradients(pair.of(of_regard, dense=False), inputs)
            right = oracle.gradients(pair.of(definition, dense=True), inputs)
            for actual, exact in zip(found, right, strict=True):
                size = 1 + float(exact.abs().max())
                roundings = 1e-13 * (1 + pair.largest_score) * size
                oracle.assert_close(actual, exact, roundings)


@pytest.mark.sampled(8)
@pairs
def test_the_gradients_by_the_compiled_kernels_equal_those_of_the_definition(
    pair: Pair, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "_LEAST", 0)
    monkeypatch.setattr(cpu_backend, "ROWS", 4)  # several blocks
    wide = double_pair(pair)
    inputs = [tensor for side in pair.inputs for tensor in side]
    doubles = [tensor.double() for tensor in inputs]
    for name, (of_regard, definition) in DIVERGENCES.items():
        with subtests.test(name):
            found = oracle.gradients(pair.of(of_regard, dense=False), inputs)
            right = oracle.gradients(wide.of(definition, dense=True), doubles)
            for actual, exact in zip(found, right, strict=True):
                size = 1 + float(exact.abs().max())
                unit = torch.finfo(actual.dtype).eps + 1e-6 * (1 + pair.largest_score)
                oracle.assert_close(actual, exact, unit * size)


SMALL = torch.Size((2, 2, 3))
CHECKED = [
    Pair("plain", "no mask", Side(2, 2), Side(1, 3)),
    Pair("causal", "masks that differ", Side(2, 2, mask="causal"), Side(2, 2)),
    Pair("empty-rows", "rows without keys", Side(2, 2, mask="keep-pairs"), Side(2, 2)),
    Pair("given", "given scores, and a sink", Side(given=True), Side(2, 2, sinks=True)),
]


@in_turn(pair={pair.name: pair for pair in CHECKED}, name=list(DIVERGENCES))
def test_a_gradient_equals_finite_differences(pair: Pair, name: str) -> None:
    sides = [replace(s, shape=SMALL, dtype=torch.float64) for s in (pair.a, pair.b)]
    pair = replace(pair, a=sides[0], b=sides[1])
    inputs = [tensor.requires_grad_() for side in pair.inputs for tensor in side]
    function = pair.of(DIVERGENCES[name][0], dense=False)
    assert torch.autograd.gradcheck(lambda *x: oracle.finite(function(*x)), inputs)


def test_a_detached_teacher_gets_no_gradient() -> None:
    query, key = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    teacher, student = regard.attend(key, query), regard.attend(query, query)
    regard.kl(teacher.detach(), student).sum().backward()
    assert query.grad is not None
    assert key.grad is None


CLOSE = {  # mask of A, mask of B, how far apart the scores are, with sinks
    "plain": ("none", "none", 1e-3, False),
    "causal": ("causal", "causal", 1e-3, False),
    "closer": ("none", "none", 1e-5, False),
    "masks-differ": ("causal", "none", 1e-3, False),
    "sinks": ("causal", "causal", 1e-2, True),
}


@pytest.mark.parametrize("backend", ["sweep", "cpu", "dense"])
@pytest.mark.parametrize("name", ["kl", "js"])
@in_turn(case=CLOSE)
def test_close_matrices_have_the_relative_error_of_the_difference_of_their_scores(
    name: str, case: tuple[str, str, float, bool], backend: str
) -> None:
    *masks, apart, has_sinks = case
    shape = torch.Size((2, 3, 33, 70))
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    query, key, moved = normal(2, 3, 33, 5), normal(2, 3, 70, 5), normal(2, 3, 70, 5)
    inputs = [query, key, query, key + apart * moved]
    sink = normal(3) if has_sinks else None
    sinks = [sink, None if sink is None else sink + apart]

    def of_regard(*inputs: Tensor) -> Tensor:
        a, b = (
            regard.attend(*both, mask=MASKS[mask][0](shape), sink_bias=sink)
            for both, mask, sink in zip((inputs[:2], inputs[2:]), masks, sinks, strict=True)
        )
        return a.reduce(REDUCTIONS[name](b.source, b.mask), backend=backend)

    def definition(*inputs: Tensor) -> Tensor:
        a, b = (
            oracle.attend(*both, allowed=MASKS[mask][1](shape), sink_bias=oracle.double(sink))
            for both, mask, sink in zip((inputs[:2], inputs[2:]), masks, sinks, strict=True)
        )
        return DIVERGENCES[name][1](a, b)

    doubles = [tensor.double() for tensor in inputs]
    found, exact = of_regard(*inputs), definition(*doubles)
    # Scores below 10 have an error of about 1e-6, and so have their differences.
    relative = 1e-6 / apart * (1 + exact.abs().mean() / exact.abs())
    of_masses = 4 * torch.finfo(torch.float32).eps if has_sinks else 0  # both sums of weights
    assert bool(((found - exact).abs() <= relative * exact.abs() + of_masses).all())
    assert has_sinks or bool((found >= 0).all())
    pairs = zip(
        oracle.gradients(of_regard, inputs), oracle.gradients(definition, doubles), strict=True
    )
    for actual, right in pairs:
        oracle.assert_close(actual, right, 1e-6 / apart * oracle.largest(right))


# Conventions.


def given_weights(*rows: list[float]) -> regard.AttentionMatrix:
    return regard.AttentionMatrix.from_weights(torch.tensor(rows))


NO_KEYS = [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "a", "b", "value"),
    [
        pytest.param("kl", [1.0, 0.0], [0.5, 0.5], LOG_2, id="kl-no-weight-adds-0"),
        pytest.param("kl", [0.5, 0.5], [1.0, 0.0], math.inf, id="kl-hidden-key"),
        pytest.param("kl", NO_KEYS, NO_KEYS, 0.0, id="kl-no-keys"),
        pytest.param("kl", NO_KEYS, [0.5, 0.5], 0.0, id="kl-no-keys-in-a"),
        pytest.param("kl", [0.5, 0.5], NO_KEYS, math.inf, id="kl-no-keys-in-b"),
        pytest.param("cross_entropy", [1.0, 0.0], [0.5, 0.5], LOG_2, id="ce-no-weight-adds-0"),
        pytest.param("cross_entropy", [0.5, 0.5], [1.0, 0.0], math.inf, id="ce-hidden-key"),
        pytest.param("cross_entropy", NO_KEYS, [0.5, 0.5], 0.0, id="ce-no-keys-in-a"),
        pytest.param("js", [1.0, 0.0], [0.0, 1.0], LOG_2, id="js-apart"),
        pytest.param("js", NO_KEYS, NO_KEYS, 0.0, id="js-no-keys"),
        pytest.param("js", NO_KEYS, [0.5, 0.5], LOG_2 / 2, id="js-no-keys-in-a"),
        pytest.param("js", [0.5, 0.5], NO_KEYS, LOG_2 / 2, id="js-no-keys-in-b"),
    ],
)
def test_what_zeros_mean(name: str, a: list[float], b: list[float], value: float) -> None:
    found = DIVERGENCES[name][0](given_weights(a), given_weights(b))
    torch.testing.assert_close(found, torch.tensor([value]), atol=1e-7, rtol=1e-6)


def test_kl_is_finite_where_a_weight_underflows() -> None:
    even = regard.AttentionMatrix.from_scores(torch.tensor([[0.0, 0.0]]))
    sharp = regard.AttentionMatrix.from_scores(torch.tensor([[0.0, -1000.0]]))
    torch.testing.assert_close(regard.kl(even, sharp), torch.tensor([500 - LOG_2]))


def test_a_hidden_key_of_tiny_weight_still_makes_kl_infinite() -> None:
    sharp = regard.AttentionMatrix.from_scores(torch.tensor([[0.0, -1000.0]]))
    hidden = regard.AttentionMatrix.from_scores(torch.tensor([[0.0, -torch.inf]]))
    assert regard.kl(sharp, hidden).item() == torch.inf


@divergences
def test_a_nan_of_a_row_stays_in_its_row(name: str) -> None:
    scores = torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    even = regard.AttentionMatrix.from_scores(torch.zeros(2, 2))
    found = DIVERGENCES[name][0](even, regard.AttentionMatrix.from_scores(scores))
    assert found.isnan().tolist() == [False, True]


# As reductions.


def test_both_divergences_and_the_entropy_in_one_pass_are_those_of_each() -> None:
    pair = PAIRS[5]
    a, b = (side.matrix(*each) for side, each in zip((pair.a, pair.b), pair.inputs, strict=True))
    divergence, entropy, apart = a.reduce(
        KullbackLeibler(b.source, b.mask),
        regard.Entropy(),
        JensenShannon(b.source, b.mask),
    )
    torch.testing.assert_close(divergence, regard.kl(a, b))
    torch.testing.assert_close(divergence + entropy, regard.cross_entropy(a, b))
    torch.testing.assert_close(entropy, a.entropy())
    torch.testing.assert_close(apart, regard.js(a, b))


def test_gradients_of_several_divergences_in_one_pass_add_up() -> None:
    query, key = (torch.randn(5, 3, dtype=torch.float64) for _ in range(2))

    def all_of(query: Tensor, key: Tensor) -> Tensor:
        a, b = regard.attend(query, key), regard.attend(key, key, mask=regard.Causal())
        answers = a.reduce(
            JensenShannon(b.source, b.mask), regard.Entropy(), JensenShannon(a.source, a.mask)
        )
        return torch.stack(answers)

    leaves = [tensor.requires_grad_() for tensor in (query, key)]
    assert torch.autograd.gradcheck(all_of, leaves)


# Laws.


@st.composite
def drawn_pairs(draw: st.DrawFn) -> tuple[regard.AttentionMatrix, regard.AttentionMatrix]:
    batch, q_len, kv_len = (draw(st.integers(1, n)) for n in (2, 9, 9))
    masks = st.sampled_from(sorted(MASKS))

    def side(seed: int) -> regard.AttentionMatrix:
        made = Side(
            kv_heads=draw(st.sampled_from([1, 2, 3, 6])),
            head_dim=draw(st.integers(1, 5)),
            mask=draw(masks),
            sharp=draw(st.sampled_from([0.0, 1.0, 30.0])),
            shape=torch.Size((batch, 6, q_len, kv_len)),
        )
        return made.matrix(*made.inputs(seed))

    seed = draw(st.integers(0, 2**31))
    return side(seed), side(seed + 1)


@given(drawn=drawn_pairs())
def test_kl_is_never_below_0(
    drawn: tuple[regard.AttentionMatrix, regard.AttentionMatrix],
) -> None:
    assert bool((regard.kl(*drawn) >= 0).all())


@given(drawn=drawn_pairs())
def test_a_matrix_is_at_no_distance_from_itself(
    drawn: tuple[regard.AttentionMatrix, regard.AttentionMatrix],
) -> None:
    assert float(regard.kl(drawn[0], drawn[0]).abs().max()) <= 1e-5
    assert float(regard.js(drawn[0], drawn[0]).abs().max()) <= 1e-6


@given(drawn=drawn_pairs())
def test_js_is_symmetric_and_between_0_and_log_2(
    drawn: tuple[regard.AttentionMatrix, regard.AttentionMatrix],
) -> None:
    one, other = regard.js(*drawn), regard.js(*reversed(drawn))
    assert bool(((one >= 0) & (one <= torch.tensor(LOG_2))).all())
    oracle.assert_close(one, other, 1e-5)


@given(drawn=drawn_pairs())
def test_cross_entropy_is_kl_and_entropy(
    drawn: tuple[regard.AttentionMatrix, regard.AttentionMatrix],
) -> None:
    crossed = regard.cross_entropy(*drawn)
    size = 1 + float(oracle.finite(crossed).max())
    oracle.assert_close(regard.kl(*drawn) + drawn[0].entropy(), crossed, 1e-5 * size)


# Memory.


@pytest.mark.parametrize("name", full_but({name: name for name in DIVERGENCES}, "kl"))
def test_neither_matrix_is_ever_made(name: str) -> None:
    query, key, _ = inputs(gradients=True)

    def work() -> None:
        a = regard.attend(query, key, mask=regard.Causal())
        DIVERGENCES[name][0](a, regard.attend(key, query)).sum().backward()

    assert largest(work) < MOST


@pytest.mark.full
def test_kl_of_8192_tokens_takes_a_small_part_of_the_matrix() -> None:
    query = torch.randn(1, 8192, 2, requires_grad=True)
    a, b = regard.attend(query, query, mask=regard.Causal()), regard.attend(query, query)
    assert largest(lambda: regard.kl(a, b).sum().backward()) <= 256 * 8192  # 256 rows of B


# Errors.

X = torch.zeros(2, 4, 5, 3)
A = regard.attend(X, X)


@divergences
@pytest.mark.parametrize(
    ("a", "b", "kind", "text"),
    [
        pytest.param(
            A,
            regard.attend(X[:, :2], X[:, :2]),
            ValueError,
            "B has shape (2, 2, 5, 5) and A has (2, 4, 5, 5); both must have one shape, "
            "(..., num_heads, q_len, kv_len).\n"
            "    Take the same part of both, such as A[:, :4].",
            id="shapes",
        ),
        pytest.param(
            A,
            A.to("meta"),
            ValueError,
            "B is on meta and A is on cpu; both must be on one device.\n    Use B.to('cpu').",
            id="devices",
        ),
        pytest.param(
            A,
            X,
            TypeError,
            "B is a Tensor; it must be an AttentionMatrix.\n"
            "    If you have the weights, use AttentionMatrix.from_weights(weights).",
            id="b-is-a-tensor",
        ),
        pytest.param(
            [A],
            A,
            TypeError,
            "A is a list; it must be an AttentionMatrix.\n"
            "    If you have the weights, use AttentionMatrix.from_weights(weights).",
            id="a-is-a-list",
        ),
    ],
)
def test_a_wrong_pair_says_what_came_and_what_to_do(
    name: str, a: object, b: object, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        DIVERGENCES[name][0](a, b)
    assert str(caught.value) == text


@pytest.mark.parametrize("reduction", [KullbackLeibler, JensenShannon])
def test_a_question_between_matrices_of_two_dtypes_has_an_answer(reduction: Any) -> None:
    A, B = (regard.attend(torch.eye(3), scale * torch.eye(3)) for scale in (1.0, 2.0))
    exact = A.to(torch.float64).reduce(reduction(B.to(torch.float64).source, B.mask))
    for answer in (
        A.reduce(reduction(B.source, B.mask), backend="dense"),
        A.to(torch.float64).reduce(reduction(B.source, B.mask)),
        A.reduce(reduction(B.to(torch.float64).source, B.mask)),
    ):
        oracle.assert_close(answer, exact, 1e-6)  # a few roundings of float32 below 2


@pytest.mark.parametrize(
    ("reduction", "definition"),
    [(KullbackLeibler, dense_kl), (JensenShannon, dense_js)],
)
def test_the_dense_backend_computes_both_matrices_in_float64(
    reduction: type[regard.Reduction], definition: Callable[[oracle.Dense, oracle.Dense], Tensor]
) -> None:
    tensors = [torch.randn(2, 7, 5) for _ in range(4)]
    a, b = regard.attend(*tensors[:2]), regard.attend(*tensors[2:])
    found = a.reduce(reduction(b.source, b.mask), backend="dense")  # type: ignore[call-arg]
    doubled = [tensor.double() for tensor in tensors]
    exact = definition(oracle.attend(*doubled[:2]), oracle.attend(*doubled[2:]))
    oracle.assert_close(found, exact, 1e-13)
