"""Laws that hold for every attention matrix, on generated ones."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard
from cases import MASKS, QUESTIONS, Inputs
from regard.backends import sweep as blocks
from regard.reductions.largest import largest

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# A rounding of a float32 weight (at most 1) and of a sum of them; float64 is looser than it needs.
TIGHT = 1e-5


@dataclass(frozen=True)
class Drawn:
    """A generated matrix, the inputs it came from, and the keys it allows."""

    inputs: Inputs
    mask: str
    scale: float | None
    softcap: float | None
    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def matrix(self) -> regard.AttentionMatrix:
        return self.of(*self.inputs[:3])

    def of(self, query: Tensor, key: Tensor, bias: Tensor | None) -> regard.AttentionMatrix:
        mask = MASKS[self.mask][0](self.inputs.shape)
        return regard.attend(
            query, key, mask=mask, scale=self.scale, bias=bias, softcap=self.softcap
        )

    def dense(self, inputs: Inputs) -> oracle.Dense:
        allowed = MASKS[self.mask][1](self.inputs.shape)
        query, key, bias, *_ = inputs
        return oracle.attend(
            query, key, allowed=allowed, scale=self.scale, bias=bias, softcap=self.softcap
        )

    @property
    def exact(self) -> oracle.Dense:
        return self.dense(Inputs(*map(oracle.double, self.inputs)))

    @property
    def largest_score(self) -> float:
        query, key, bias, *_ = Inputs(*map(oracle.double, self.inputs))
        product = query.norm(dim=-1).max() * key.norm(dim=-1).max()
        scale = query.shape[-1] ** -0.5 if self.scale is None else abs(self.scale)
        return float(product * scale) + (0 if bias is None else float(bias.abs().max()))


@st.composite
def matrices(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Drawn:
    """Any number of axes, grouped heads, any mask, all dtypes, from flat to sharp scores."""
    axes = draw(st.integers(0, 3))  # leading axes, the last one is the heads
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = tuple(draw(st.integers(1, 3)) for _ in range(axes - 1))
    q_len, kv_len = draw(st.integers(1, 17)), draw(st.integers(1, 17))
    head_dim, value_dim = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    dtype = draw(st.sampled_from(dtypes))
    sharp = draw(st.sampled_from([1.0, 30.0, 1e-3, 0.0]))
    mask = draw(st.sampled_from(sorted(MASKS)))
    scale = draw(st.sampled_from([None, None, 1.0, -0.7]))
    softcap = draw(st.sampled_from([None, None, 3.0]))
    biased, seed = draw(st.booleans()), draw(st.integers(0, 2**32 - 1))
    heads, few = ((kv_heads * group,), (kv_heads,)) if axes else ((), ())
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = Inputs(
        (normal(*batch, *heads, q_len, head_dim) * sharp).to(dtype),
        normal(*batch, *few, kv_len, head_dim),
        normal(*heads, q_len, kv_len) if biased else None,
        normal(*batch, *few, kv_len, value_dim),
        normal(*batch, *heads, q_len, 2),
    )
    text = (
        f"Drawn(query={tuple(inputs.query.shape)}, key={tuple(inputs.key.shape)}, {dtype=}, "
        f"{mask=}, {scale=}, {softcap=}, {sharp=}, {biased=}, {seed=})"
    )
    return Drawn(inputs, mask, scale, softcap, text)


exactly_kept = matrices(dtypes=(torch.float32, torch.float64))


@given(drawn=matrices())
def test_every_answer_is_within_the_budget(drawn: Drawn) -> None:
    dtype = drawn.inputs.query.dtype
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    doubled = Inputs(*map(oracle.double, drawn.inputs))
    dense = drawn.dense(doubled)
    answers = drawn.matrix.reduce(*(each.ask(drawn.inputs) for each in QUESTIONS.values()))
    for (name, question), actual in zip(QUESTIONS.items(), answers, strict=True):
        note(f"asked: {name}")
        answer_dtype = dtype if question.kind == "product" else accumulated
        exact = question.exact(dense, doubled)
        cast = Inputs(*(None if x is None else x.to(answer_dtype) for x in drawn.inputs))
        plain = question.exact(drawn.dense(cast), cast)
        if isinstance(exact, oracle.Top):
            assert torch.equal(actual.indices == -1, exact.indices == -1)
            actual, exact, plain = actual.values, exact.values, plain.values
        scores = drawn.largest_score
        within = question.allowed_error(exact, plain, dtype=answer_dtype, scores=scores)
        oracle.assert_close(actual, exact, within)


@given(drawn=matrices())
def test_each_row_sums_to_1_or_to_0_where_it_may_attend_to_nothing(drawn: Drawn) -> None:
    sums = drawn.matrix.sum(-1)
    empty = drawn.exact.weights.sum(-1) == 0
    oracle.assert_close(sums, torch.where(empty, 0.0, 1.0), TIGHT)


@given(drawn=matrices(), sink=st.floats(-30, 30))
def test_each_row_and_its_sink_sum_to_1(drawn: Drawn, sink: float) -> None:
    query, key, *_ = drawn.inputs
    sink_bias = torch.tensor(sink, dtype=query.dtype)
    A = regard.attend(query, key, scale=drawn.scale, softcap=drawn.softcap, sink_bias=sink_bias)
    mass, lse = A.reduce(regard.Sum(-1), regard.LogSumExp())
    of_sink = (sink_bias.to(lse.dtype) - lse).exp()
    # The logsumexp has a rounding of its own size.
    within = TIGHT * (1 + drawn.largest_score)
    oracle.assert_close(mass + of_sink, torch.ones_like(mass), within)


@given(drawn=exactly_kept)
def test_a_product_and_a_product_with_the_transpose_are_adjoint(drawn: Drawn) -> None:
    query, key, bias, _, x, *_ = drawn.inputs
    value = torch.randn(*x.shape[:-2], key.shape[-2], x.shape[-1]).to(x.dtype)
    matrix = drawn.of(query, key, bias)
    left = ((matrix @ value) * x).double().sum()
    right = (value * (matrix.T @ x)).double().sum()
    size = float(value.abs().double().sum() * x.abs().max())  # of the terms that cancel
    assert float((left - right).abs()) <= TIGHT * size


@given(drawn=exactly_kept, data=st.data())
def test_permuting_the_keys_permutes_the_columns(drawn: Drawn, data: st.DataObject) -> None:
    query, key, *_ = drawn.inputs
    order = torch.tensor(data.draw(st.permutations(range(key.shape[-2]))))
    matrix = regard.attend(query, key, scale=drawn.scale)
    permuted = regard.attend(query, key[..., order, :], scale=drawn.scale)
    within = 4 * torch.finfo(torch.float32).eps * (1 + drawn.largest_score)  # order of the sums
    oracle.assert_close(permuted.sum(-2), matrix.sum(-2)[..., order], within * query.shape[-2])


@given(drawn=matrices(), size=st.integers(1, 200), rows=st.integers(1, 20))
def test_the_size_of_blocks_changes_nothing(drawn: Drawn, size: int, rows: int) -> None:
    asked = [question.ask(drawn.inputs) for question in QUESTIONS.values()]
    in_one = drawn.matrix.reduce(*asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_SIZE", size)
        patch.setattr(blocks, "MIN_ROWS", 2)
        patch.setattr(blocks, "MAX_ROWS", rows)
        in_many = drawn.matrix.reduce(*asked)
    errors = [difference(one, many) for one, many in zip(in_one, in_many, strict=True)]
    roundings = 2e-2 if drawn.inputs.query.dtype == torch.bfloat16 else 3e-3  # of products, half
    limit = roundings if drawn.inputs.query.dtype.itemsize == 2 else TIGHT
    assert max(errors) <= limit * (1 + drawn.largest_score) * 4


def difference(one: Tensor | regard.Top, other: Tensor | regard.Top) -> float:
    if isinstance(one, tuple):
        return difference(one.values, other.values)
    assert torch.equal(one.isinf(), other.isinf())
    gap = oracle.finite(one).double() - oracle.finite(other).double()
    return float(gap.abs().max()) if gap.numel() else 0.0


@given(drawn=matrices())
def test_a_grouped_matrix_equals_its_repeated_twin(drawn: Drawn) -> None:
    query, key, bias, *_ = drawn.inputs
    twin = drawn.of(query, oracle.repeated(key, query.shape[-3]) if key.ndim > 2 else key, bias)
    grouped = drawn.matrix
    within = 8 * torch.finfo(torch.float32).eps * (1 + drawn.largest_score)  # matmul's own order
    oracle.assert_close(grouped.entropy(), twin.entropy(), within * math.log(2 + key.shape[-2]))


@st.composite
def indices(draw: st.DrawFn, length: int) -> int | slice:
    """What may stand between brackets for an axis: integers, slices, steps, negative ones."""
    ends = st.none() | st.integers(-length - 2, length + 2)
    steps = st.none() | st.integers(1, 4)
    parts = st.builds(slice, ends, ends, steps)
    return draw(st.integers(-length, length - 1) | parts)


@given(drawn=matrices(), data=st.data())
def test_a_window_equals_the_part_of_the_dense_matrix(drawn: Drawn, data: st.DataObject) -> None:
    shape = drawn.inputs.shape
    at = tuple(data.draw(indices(n)) for n in shape[-2:])
    right = drawn.exact.weights[(..., *at)]
    actual = drawn.matrix[(..., *at)]
    dense = actual if isinstance(actual, Tensor) else actual.to_dense()
    dtype = drawn.inputs.query.dtype
    within = torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * (1 + drawn.largest_score)
    oracle.assert_close(dense, right, within)


@given(drawn=matrices(), data=st.data())
def test_a_part_of_the_scores_equals_the_part_of_the_dense_scores(
    drawn: Drawn, data: st.DataObject
) -> None:
    at = tuple(data.draw(indices(n)) for n in drawn.inputs.shape[-2:])
    right = drawn.exact.scores[(..., *at)]
    dtype = drawn.inputs.query.dtype
    roundings = torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    oracle.assert_close(drawn.matrix.scores[(..., *at)], right, roundings * drawn.largest_score)


@given(drawn=matrices())
def test_an_entropy_lies_between_0_and_log_n(drawn: Drawn) -> None:
    entropy = drawn.matrix.entropy()
    most = math.log(drawn.inputs.shape[-1])
    rounding = 4 * torch.finfo(torch.float32).eps * (1 + most)  # log n itself has one
    assert bool(((entropy >= 0) & (entropy <= most + rounding)).all())


@given(drawn=matrices())
def test_the_same_question_has_the_same_answer_to_the_bit(drawn: Drawn) -> None:
    asked = [question.ask(drawn.inputs) for question in QUESTIONS.values()]
    first, second = drawn.matrix.reduce(*asked), drawn.matrix.reduce(*asked)
    pairs = zip(flat(first), flat(second), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@given(drawn=matrices())
def test_the_same_product_is_the_same_to_the_bit(drawn: Drawn) -> None:
    value = drawn.inputs.value
    assert torch.equal(drawn.matrix @ value, drawn.matrix @ value)


def flat(answers: tuple[Tensor | regard.Top, ...]) -> list[Tensor]:
    return [
        part for answer in answers for part in ((answer,) if isinstance(answer, Tensor) else answer)
    ]


@given(drawn=matrices(), k=st.integers(1, 17))
def test_the_k_largest_weights_fall_and_their_keys_are_distinct(drawn: Drawn, k: int) -> None:
    top = drawn.matrix.topk(min(k, drawn.inputs.shape[-1]))
    in_order = top.indices.sort(-1).values
    repeated = (in_order.diff(dim=-1) == 0) & (in_order[..., 1:] >= 0)
    assert bool((top.values.diff(dim=-1) <= 0).all())
    assert not bool(repeated.any())


@settings(max_examples=200)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_ties_go_to_the_lowest_index(data: st.DataObject, seed: int) -> None:
    rows, keys = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 700))
    k, kinds = data.draw(st.integers(1, min(keys, 6))), data.draw(st.integers(1, 40))
    share = data.draw(st.floats(0, 1))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, kinds, (rows, keys), generator=generator).float()
    masked = torch.rand(scores.shape, generator=generator) < share
    scores = scores.masked_fill(masked, -torch.inf)
    top = regard.AttentionMatrix.from_scores(scores).topk(k)
    assert torch.equal(top.indices, oracle.topk(oracle.softmax(scores), k).indices)


# Neighbours among the floats, both zeros, and what rounding lifts above 0.
CLOSE = [-0.0, 0.0, -1.0, -1.0000001, -1.0000002, -1e-45, 1e-7, 2e-7, -3e4, -1e18, -1e19]


@settings(max_examples=200)
@given(
    kinds=st.lists(st.sampled_from(CLOSE), min_size=1, max_size=40),
    k=st.integers(1, 80),
    more=st.integers(0, 5000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_scores_that_hardly_differ_are_told_apart(
    kinds: list[float], k: int, more: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(kinds), (3, k + more), generator=generator)
    scores = torch.tensor(kinds, dtype=dtype)[drawn]
    stable = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(largest(scores, k), stable)


@pytest.mark.parametrize("tokens", [7, 700])
def test_a_row_with_nan_names_no_keys_and_leaves_others_alone(tokens: int) -> None:
    scores = torch.randn(3, tokens, generator=torch.Generator().manual_seed(2))
    expected = regard.AttentionMatrix.from_scores(scores).topk(5)
    spoilt = scores.index_fill(0, torch.tensor(1), torch.nan)
    top = regard.AttentionMatrix.from_scores(spoilt).topk(5)
    assert top.values[1].isnan().all()
    assert top.indices[1].tolist() == [-1] * 5
    assert torch.equal(top.indices[::2], expected.indices[::2])


@given(drawn=matrices())
def test_every_query_of_a_matrix_adds_its_weight_to_the_keys_once(drawn: Drawn) -> None:
    received = drawn.matrix.sum(-2).double().sum(-1)
    queries = (drawn.exact.weights.sum(-1) > 0).sum(-1)
    oracle.assert_close(received, queries.double(), TIGHT * drawn.inputs.shape[-2])


@given(drawn=matrices(), rows=st.integers(1, 20), columns=st.integers(1, 20))
def test_a_picture_keeps_the_mean_of_the_matrix_where_cells_are_equal(
    drawn: Drawn, rows: int, columns: int
) -> None:
    shape = drawn.inputs.shape
    rows, columns = math.gcd(rows, shape[-2]), math.gcd(columns, shape[-1])
    picture = drawn.matrix.pool(rows, columns)
    oracle.assert_close(picture.mean((-2, -1)), drawn.exact.weights.mean((-2, -1)), TIGHT)
