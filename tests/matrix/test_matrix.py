"""AttentionMatrix as an object: parts, views, products, doors, text; nothing computed unasked."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import regard
from matrix_parts import LEADING
from regard.matrix.attention_matrix import ScoreMatrix
from regard.matrix.linear_map import TransposedMatrix
from regard.scores.score_source import Scores

QUERY = torch.randn(2, 6, 7, 4, generator=torch.Generator().manual_seed(0))
KEY = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(1))
VALUE = torch.randn(2, 2, 5, 3, generator=torch.Generator().manual_seed(2))
MASK = regard.Causal() & regard.Padding([5, 3])
A = regard.attend(QUERY, KEY, mask=MASK)
DENSE = A.to_dense()
# Two orders of float32 sums over numbers below 1: a few roundings.
TIGHT = {"atol": 1e-6, "rtol": 1e-5}


class CountingScores(Scores):
    """Scores that must never be asked for."""

    shape = torch.Size((3, 4))
    tensors = (torch.zeros(3, 4),)
    facts = ("shown",)

    def select(self, index: object) -> "CountingScores":
        return self

    def block(self, *_: object) -> Tensor:
        raise AssertionError("something was computed")

    def sink(self, *_: object) -> None:
        return None

    def map(self, function: object) -> "CountingScores":
        return self


# Parts.

INNER = {
    "row": lambda m: m[0, 1, 3],
    "last-row": lambda m: m[0, 1, -1],
    "number": lambda m: m[0, 1, 3, 2],
    "column": lambda m: m[0, 1, :, 2],
    "rows": lambda m: m[0, 1, 2:5],
    "rows-and-columns": lambda m: m[..., 2:5, 1:4],
    "steps": lambda m: m[..., ::3, 1::2],
    "step-in-all-heads": lambda m: m[:, :, 1, ::2],
    "no-rows": lambda m: m[..., 3:3, :],
    "no-columns": lambda m: m[..., 9:],
    "beyond-the-end": lambda m: m[..., -99:99, 3:99],
    "head-slice-and-row": lambda m: m[1, 2:5, 4],
}


@pytest.mark.parametrize("part", LEADING.values(), ids=LEADING)
def test_leading_indices_give_the_matrix_of_that_part(part: Callable) -> None:
    chosen = part(A)
    assert isinstance(chosen, regard.AttentionMatrix)
    torch.testing.assert_close(chosen.to_dense(), part(DENSE), **TIGHT)


@pytest.mark.parametrize("part", LEADING.values(), ids=LEADING)
def test_a_part_answers_as_the_whole_does(part: Callable) -> None:
    received = part(DENSE.sum(-2)[..., None, :]).squeeze(-2)
    torch.testing.assert_close(part(A).sum(-2), received, **TIGHT)


@pytest.mark.parametrize("part", INNER.values(), ids=INNER)
def test_indices_of_rows_and_columns_give_a_tensor(part: Callable) -> None:
    chosen = part(A)
    assert isinstance(chosen, Tensor)
    torch.testing.assert_close(chosen, part(DENSE), **TIGHT)


@pytest.mark.parametrize("part", [*LEADING.values(), *INNER.values()], ids=[*LEADING, *INNER])
def test_indices_of_the_scores_give_a_tensor(part: Callable) -> None:
    right = oracle.attend(
        QUERY, KEY, allowed=oracle.causal(7, 5) & oracle.padding([5, 3], (2, 6, 7, 5))
    ).scores
    torch.testing.assert_close(part(A.scores), part(right), **TIGHT)


def test_indices_work_without_batch_and_heads() -> None:
    x = torch.randn(4, 2)
    matrix = regard.attend(x, x)
    torch.testing.assert_close(matrix[1:, 2], matrix.to_dense()[1:, 2], **TIGHT)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda m: m[1], id="batch"),
        pytest.param(lambda m: m[1, 4], id="batch-and-head"),
        pytest.param(lambda m: m[:, 3:6], id="whole-group"),
        pytest.param(lambda m: m[...], id="whole"),
    ],
)
def test_a_part_shares_the_memory_of_the_whole(part: Callable) -> None:
    source = part(A).source
    storages = {tensor.untyped_storage().data_ptr() for tensor in source.tensors}
    assert storages == {QUERY.untyped_storage().data_ptr(), KEY.untyped_storage().data_ptr()}


def test_the_whole_is_the_matrix_itself() -> None:
    assert A[...] is A


def test_a_matrix_of_a_part_keeps_the_mask_of_that_part() -> None:
    assert A[1, 0].mask.text == "Causal() & Padding([3])"


def test_a_matrix_without_leading_axes_is_a_sequence_of_its_rows() -> None:
    x = torch.randn(3, 2)
    matrix = regard.attend(x, x)
    torch.testing.assert_close(torch.stack(list(matrix)), matrix.to_dense(), **TIGHT)


def test_gradients_flow_through_a_part() -> None:
    query = QUERY.clone().requires_grad_()
    regard.attend(query, KEY)[0, 1, 2:4, 1].sum().backward()
    assert query.grad is not None
    reached = query.grad.abs().sum(-1) > 0
    expected = torch.zeros_like(reached)
    expected[0, 1, 2:4] = True
    assert torch.equal(reached, expected)


def test_the_largest_weight_has_one_number_for_each_row() -> None:
    top, largest = A.topk(1), A.max()
    assert largest.values.shape == largest.indices.shape == A.shape[:-1]
    assert torch.equal(largest.values, top.values[..., 0])
    assert torch.equal(largest.indices, top.indices[..., 0])


# Products.


def test_matmul_of_torch_is_the_product() -> None:
    assert torch.equal(torch.matmul(A, VALUE), A @ VALUE)


def test_a_product_equals_that_of_the_dense_matrix() -> None:
    repeated = VALUE.repeat_interleave(3, 1)
    torch.testing.assert_close(A @ VALUE, DENSE @ repeated, **TIGHT)


@pytest.mark.parametrize(
    "shape",
    [(5,), (5, 3), (1, 5, 3), (2, 5, 3), (6, 5, 3), (2, 1, 5, 3), (1, 6, 5, 3), (2, 3, 5, 3)],
    ids=str,
)
def test_a_value_broadcasts_as_for_a_tensor(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    right = oracle.product(oracle.Dense(DENSE, DENSE), value)
    torch.testing.assert_close(A @ value, right, **TIGHT)


@pytest.mark.parametrize("shape", [(7,), (7, 3), (2, 7, 3), (1, 6, 7, 3)], ids=str)
def test_an_operand_of_the_transpose_broadcasts_as_for_a_tensor(shape: tuple[int, ...]) -> None:
    operand = torch.randn(shape)
    right = oracle.transposed_product(oracle.Dense(DENSE, DENSE), operand)
    torch.testing.assert_close(A.T @ operand, right, **TIGHT)


def test_products_compose_without_forming_a_matrix() -> None:
    x = torch.randn(5, 2)
    square = regard.attend(x, x)
    dense = square.to_dense()
    torch.testing.assert_close(square @ (square.T @ x), dense @ (dense.mT @ x), **TIGHT)


def test_a_product_has_the_dtype_of_its_value() -> None:
    assert (A.to(torch.bfloat16) @ VALUE.bfloat16()).dtype == torch.bfloat16


def test_the_transpose_of_the_transpose_is_the_matrix() -> None:
    assert A.T.T is A


def test_the_transpose_has_the_shape_of_a_transpose() -> None:
    assert A.T.shape == (2, 6, 5, 7)


def test_the_dense_transpose_is_the_transpose_of_the_dense_matrix() -> None:
    assert torch.equal(A.T.to_dense(), DENSE.mT)


# What a matrix is.


def test_a_matrix_has_the_attributes_of_a_tensor() -> None:
    found = (A.shape, A.ndim, A.dtype, A.device)
    assert found == (DENSE.shape, DENSE.ndim, DENSE.dtype, DENSE.device)


def test_scores_have_the_shape_of_the_matrix() -> None:
    assert A.scores.shape == A.shape


DENSE_SCORES = oracle.attend(
    QUERY, KEY, allowed=oracle.causal(7, 5) & oracle.padding([5, 3], (2, 6, 7, 5))
).scores
LARGEST: dict[str, Callable[[Any], Tensor]] = {
    "query": lambda scores: scores.amax(-1),
    "query-counted-from-the-first-axis": lambda scores: scores.amax(3),
    "query-in-a-list": lambda scores: scores.amax([-1]),
    "head": lambda scores: scores.amax((-2, -1)),
    "head-counted-from-the-first-axis": lambda scores: scores.amax((3, 2)),
    "matrix": lambda scores: scores.max(),
}


@pytest.mark.parametrize("ask", LARGEST.values(), ids=LARGEST)
def test_the_largest_scores_are_those_of_the_dense_scores(ask: Callable[[Any], Tensor]) -> None:
    torch.testing.assert_close(ask(A.scores), ask(DENSE_SCORES), **TIGHT)


@pytest.mark.parametrize("backend", ["dense", "sweep", "cpu"])
def test_keys_that_share_the_largest_score_share_its_gradient(backend: str) -> None:
    scores = torch.tensor([[2.0, 2.0, 1.0], [2.0, 2.0, 9.0], [3.0, 1.0, 1.0]], requires_grad=True)
    matrix = regard.AttentionMatrix.from_scores(scores, mask=regard.Causal())
    (slope,) = torch.autograd.grad(matrix.reduce(regard.MaxScore(), backend=backend).sum(), scores)
    assert slope.tolist() == [[1, 0, 0], [0.5, 0.5, 0], [1, 0, 0]]


def test_the_gradient_of_the_largest_score_of_a_head_reaches_its_query_and_its_key() -> None:
    query, key = (torch.tensor([[[1.0], [2.0]], [[4.0], [3.0]]]).requires_grad_() for _ in "qk")
    largest = regard.attend(query, key, scale=1.0).scores.amax((-2, -1))
    largest.sum().backward()
    assert largest.tolist() == [4, 16]
    for tensor in (query, key):
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [[[0], [2]], [[4], [0]]]


def test_to_another_dtype_rounds_the_inputs() -> None:
    half = A.to(torch.float16)
    right = regard.attend(QUERY.half(), KEY.half(), mask=MASK)
    assert torch.equal(half.to_dense(), right.to_dense())


def test_to_another_device_takes_inputs_and_mask_along() -> None:
    moved = A.to("meta")
    devices = {tensor.device.type for tensor in moved.source.tensors}
    moved.mask.map(lambda tensor: devices.add(tensor.device.type) or tensor)
    assert devices == {"meta"}


def test_detach_stops_gradients() -> None:
    query = QUERY.clone().requires_grad_()
    matrix = regard.attend(query, KEY)
    assert matrix.entropy().requires_grad
    assert not matrix.detach().entropy().requires_grad


def test_no_gradients_are_kept_under_no_grad() -> None:
    matrix = regard.attend(QUERY.clone().requires_grad_(), KEY)
    with torch.no_grad():
        assert not matrix.entropy().requires_grad


def test_inputs_changed_in_place_before_the_backward_pass_are_noticed() -> None:
    query = QUERY.clone().requires_grad_()
    changed = query * 1
    entropy = regard.attend(changed, KEY).entropy()
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entropy.sum().backward()


MASKS_OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "keep": regard.Keep,
    "tensor": lambda tensor: tensor,
    "rows": lambda tensor: regard.masks.RowSlice(regard.Keep(tensor), 0, 3),
    "joined": lambda tensor: regard.Causal() & ~regard.Keep(tensor),
}
ANSWERS: dict[str, Callable[[regard.AttentionMatrix], object]] = {
    "entropy": lambda A: A.entropy(),
    "product": lambda A: A @ torch.ones(3, 1),
    "row": lambda A: A[0],
    "dense": lambda A: A.to_dense(),
    "scores": lambda A: A.scores[:, :],
    "kl": lambda A: regard.kl(regard.attend(torch.zeros(3, 1), torch.zeros(3, 1)), A),
    "part": lambda A: A[:].entropy(),
    "detached": lambda A: A.detach().entropy(),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("mask", MASKS_OF_TENSORS)
def test_a_mask_tensor_that_changed_in_place_is_an_error_for_every_answer(
    mask: str, name: str
) -> None:
    x, allowed = torch.zeros(3, 1), torch.tensor([[True, False, True]] * 3)
    A = regard.attend(x, x, mask=MASKS_OF_TENSORS[mask](allowed))
    ANSWERS[name](A)
    allowed[:, 0] = False
    with pytest.raises(RuntimeError, match="was changed in place after the matrix was made"):
        ANSWERS[name](A)
    ANSWERS[name](regard.attend(x, x, mask=MASKS_OF_TENSORS[mask](allowed)))


@pytest.mark.parametrize(
    ("mask", "tensor"),
    [
        pytest.param(regard.Padding, torch.tensor(2), id="padding"),
        pytest.param(regard.PrefixLM, torch.tensor(2), id="prefix"),
        pytest.param(regard.Documents, torch.tensor([0, 0, 1]), id="documents"),
        pytest.param(regard.Drop, torch.tensor([False, False, True]), id="drop"),
    ],
)
def test_a_mask_that_copies_its_tensor_keeps_its_answer(
    mask: Callable[[Tensor], regard.Mask], tensor: Tensor
) -> None:
    x, given = torch.zeros(3, 1), tensor.clone()
    A = regard.attend(x, x, mask=mask(given))
    expected = A.to_dense()
    given.fill_(1)
    assert torch.equal(A.to_dense(), expected)
    assert not torch.equal(regard.attend(x, x, mask=mask(given)).to_dense(), expected)


def test_a_copy_of_a_matrix_has_a_mask_of_its_own() -> None:
    x, allowed = torch.zeros(3, 1), torch.ones(3, dtype=torch.bool)
    allowed[1] = False
    A = regard.attend(x, x, mask=allowed)
    copied, expected = copy.deepcopy(A), A.to_dense()
    allowed.zero_()
    assert torch.equal(copied.to_dense(), expected)


# Other doors.


def test_from_scores_is_the_softmax_of_the_scores() -> None:
    scores = torch.randn(2, 3, 4)
    matrix = regard.AttentionMatrix.from_scores(scores)
    torch.testing.assert_close(matrix.to_dense(), scores.softmax(-1), **TIGHT)


def test_from_scores_takes_a_mask() -> None:
    scores = torch.randn(3, 3)
    matrix = regard.AttentionMatrix.from_scores(scores, mask=regard.Causal())
    expected = oracle.softmax(scores, oracle.causal(3, 3)).weights
    torch.testing.assert_close(matrix.to_dense(), expected, **TIGHT)


def test_scores_that_are_minus_infinity_are_masked_keys() -> None:
    scores = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]])
    top = regard.AttentionMatrix.from_scores(scores).topk(2)
    assert top.indices.tolist() == [[0, -1], [-1, -1]]


def test_from_scores_gives_the_scores_back() -> None:
    scores = torch.randn(2, 3, 4)
    assert torch.equal(regard.AttentionMatrix.from_scores(scores).scores[...], scores)


def test_from_scores_is_differentiable() -> None:
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s: regard.AttentionMatrix.from_scores(s).entropy(), (scores,)
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_from_weights_gives_the_weights_back(dtype: torch.dtype) -> None:
    weights = torch.randn(3, 50, dtype=torch.float64).mul(3).softmax(-1).to(dtype)
    found = regard.AttentionMatrix.from_weights(weights).to_dense()
    # The sum of rounded weights is not quite 1, and log w is rounded relative to its size, 20.
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    torch.testing.assert_close(found, weights, atol=0, rtol=torch.finfo(dtype).eps + 20 * eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("keys", [1, 7, 300, 20_000])
@pytest.mark.parametrize("sharp", [0.0, 1.0, 10.0])
def test_from_weights_takes_every_softmax_in_its_dtype(
    sharp: float, keys: int, dtype: torch.dtype
) -> None:
    scores = torch.randn(2, 4, 9, keys, generator=torch.Generator().manual_seed(0)) * sharp
    powers = (scores - scores.amax(-1, keepdim=True)).to(dtype).exp()
    by_hand = powers / powers.sum(-1, keepdim=True)  # rounds three times
    for weights in (scores.softmax(-1).to(dtype), by_hand, by_hand.mean(1, keepdim=True)):
        regard.AttentionMatrix.from_weights(weights)


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [(torch.bfloat16, 1.02), (torch.float16, 1.003), (torch.float32, 1.00001)],
    ids=str,
)
def test_from_weights_refuses_a_sum_that_rounding_does_not_explain(
    dtype: torch.dtype, wrong: float
) -> None:
    weights = (torch.full((1, 64), 1 / 64) * wrong).to(dtype)
    with pytest.raises(ValueError, match="each row must sum to 1"):
        regard.AttentionMatrix.from_weights(weights)


def test_from_weights_keeps_the_dtype_of_the_weights() -> None:
    assert regard.AttentionMatrix.from_weights(torch.eye(2).half()).dtype == torch.float16


def test_from_weights_keeps_rows_of_zeros() -> None:
    weights = torch.tensor([[0.0, 0.0], [0.25, 0.75]])
    found = regard.AttentionMatrix.from_weights(weights).to_dense()
    torch.testing.assert_close(found, weights, **TIGHT)


def test_gradients_of_from_weights_are_finite_where_a_weight_is_zero() -> None:
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], requires_grad=True)
    regard.AttentionMatrix.from_weights(weights).entropy().sum().backward()
    assert weights.grad is not None
    assert bool(weights.grad.isfinite().all())


# Nothing is computed unasked.


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(repr, id="repr"),
        pytest.param(lambda m: repr(m.T), id="repr-of-transpose"),
        pytest.param(lambda m: repr(m.scores), id="repr-of-scores"),
        pytest.param(lambda m: (m.shape, m.T.shape, m.scores.shape), id="shapes"),
        pytest.param(lambda m: (m.dtype, m.device, m.ndim), id="attributes"),
        pytest.param(lambda m: m.detach().to(torch.float64), id="to"),
    ],
)
def test_asking_what_a_matrix_is_computes_nothing(ask: Callable) -> None:
    ask(regard.AttentionMatrix(CountingScores()))


def test_the_check_that_nothing_is_computed_can_fail() -> None:
    with pytest.raises(AssertionError, match="something was computed"):
        regard.AttentionMatrix(CountingScores()).entropy()


X = torch.zeros(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (
            regard.attend(X, X),
            "AttentionMatrix(batch=1, num_heads=2, q_len=3, kv_len=3, dtype=float32, device=cpu, "
            "scale=0.5)",
        ),
        (
            regard.attend(X, X[:, :1], mask=regard.Causal(), bias=torch.zeros(3), scale=1),
            "AttentionMatrix(batch=1, num_heads=2, q_len=3, kv_len=3, dtype=float32, device=cpu, "
            "scale=1, num_kv_heads=1, bias=(1, 1, 1, 3), mask=Causal())",
        ),
        (
            regard.attend(X[0, 0].half(), X[0, 0].half()),
            "AttentionMatrix(q_len=3, kv_len=3, dtype=float16, device=cpu, scale=0.5)",
        ),
        (
            regard.AttentionMatrix.from_scores(X[0]),
            "AttentionMatrix(num_heads=2, q_len=3, kv_len=4, dtype=float32, device=cpu, "
            "from given scores)",
        ),
        (
            regard.AttentionMatrix.from_weights(torch.eye(2)),
            "AttentionMatrix(q_len=2, kv_len=2, dtype=float32, device=cpu, from given weights)",
        ),
        (
            regard.attend(X[None], X[None]),
            "AttentionMatrix(batch=(1, 1), num_heads=2, q_len=3, kv_len=3, dtype=float32, "
            "device=cpu, scale=0.5)",
        ),
        (
            TransposedMatrix(regard.attend(X[0, 0], X[0, 0])),
            "TransposedMatrix(of AttentionMatrix(q_len=3, kv_len=3, dtype=float32, device=cpu, "
            "scale=0.5))",
        ),
        (
            ScoreMatrix(regard.attend(X[0, 0], X[0, 0])),
            "ScoreMatrix(of AttentionMatrix(q_len=3, kv_len=3, dtype=float32, device=cpu, "
            "scale=0.5))",
        ),
    ],
    ids=["plain", "all-facts", "no-batch", "given", "weights", "batches", "transpose", "scores"],
)
def test_a_matrix_prints_what_it_is(matrix: object, text: str) -> None:
    assert repr(matrix) == text


# A reduction of one's own.


class MeanDistance(regard.Reduction):
    """How far back each query looks in the mean: a user's own reduction, in ten lines."""

    def start(self, shape, dtype, device):
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block):
        rows, columns = block.box.rows, block.box.columns
        kv_idx = torch.arange(columns.start, columns.stop)
        mean = block.weights @ kv_idx.to(block.weights.dtype)
        here = torch.arange(rows.start, rows.stop)
        return (
            regard.Contribution(block.box.at_rows, (here - mean) * (block.weights.sum(-1) > 0)),
        )

    def finish(self, buffers, shape):
        return buffers[0]


def expected_distance(dense: Tensor) -> Tensor:
    mean = dense @ torch.arange(dense.shape[-1], dtype=dense.dtype)
    return (torch.arange(dense.shape[-2]) - mean) * (dense.sum(-1) > 0)


@pytest.mark.parametrize("backend", ["sweep", "dense", None], ids=str)
def test_a_users_own_reduction_works_on_every_backend(backend: str | None) -> None:
    found = A.reduce(MeanDistance(), backend=backend)
    torch.testing.assert_close(found.float(), expected_distance(DENSE), **TIGHT)


def test_a_users_own_reduction_is_differentiable() -> None:
    query = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    key = torch.randn(4, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda q: regard.attend(q, key).reduce(MeanDistance()), (query,)
    )


@pytest.mark.parametrize("backend", ["sdpa", "sweep"])
def test_autocast_changes_no_answer(backend: str) -> None:
    query, key, value = (torch.randn(1, 2, 7, 4) for _ in range(3))
    A = regard.attend(query, key)
    expected = A.reduce(regard.Output(value), backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = A.reduce(regard.Output(value), backend=backend)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("mask", [None, regard.Causal(), regard.SlidingWindow(5, 0)])
def test_rows_far_apart_are_those_of_the_whole_matrix(mask: regard.Mask | None) -> None:
    A = regard.attend(torch.randn(2, 3, 300, 8), torch.randn(2, 3, 300, 8), mask=mask)
    far = A[..., 7::64, 3:200:5]
    torch.testing.assert_close(far, A.to_dense()[..., 7::64, 3:200:5])
