"""Products from either side, and columns without sweeps."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard
from cases import CASES, Case, Inputs, parametrised

TIGHT = 1e-6  # a few roundings of float32 sums of numbers below 1


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# Products.

A = regard.attend(normal(1, 6, 4, 5), normal(1, 2, 7, 5, seed=1), mask=regard.Causal())
DENSE = A.to(torch.float64).to_dense()


def times(weights: Tensor, value: Tensor) -> Tensor:
    """weights @ value as torch.matmul has it, the value's heads repeated where they are grouped."""
    grouped = value.ndim > 2 and value.shape[-3] < weights.shape[-3]
    return weights @ (oracle.repeated(value, weights.shape[-3]) if grouped else value)


BATCHES = [(3, 6), (3, 1), (5, 3, 6), (5, 1, 2), (1, 1, 1, 6), (2, 2), (1, 6), (6,), ()]
batches = pytest.mark.parametrize("leading", BATCHES, ids=str)


@batches
def test_a_value_may_have_more_batches_than_the_matrix(leading: tuple[int, ...]) -> None:
    value = normal(*leading, 7, 3)
    oracle.assert_close(A @ value, times(DENSE, value.double()), 10 * TIGHT)


@batches
def test_so_may_the_operand_of_a_transposed_product(leading: tuple[int, ...]) -> None:
    operand = normal(*leading, 4, 3)
    oracle.assert_close(A.T @ operand, times(DENSE.mT, operand.double()), 10 * TIGHT)


@batches
def test_a_product_from_the_left_equals_that_of_the_dense_matrix(leading: tuple[int, ...]) -> None:
    x = normal(*leading, 3, 4)
    oracle.assert_close(x @ A, times(DENSE.mT, x.mT.double()).mT, 10 * TIGHT)


@pytest.mark.parametrize("heads", [4, 1, 3], ids=str)
def test_a_matrix_without_leading_axes_broadcasts(heads: int) -> None:
    matrix, value = regard.attend(normal(4, 2), normal(5, 2)), normal(2, heads, 5, 3)
    right = matrix.to(torch.float64).to_dense() @ value.double()
    oracle.assert_close(matrix @ value, right, 10 * TIGHT)


def test_one_head_broadcasts_against_several() -> None:
    matrix, value = regard.attend(normal(2, 1, 4, 2), normal(2, 1, 5, 2)), normal(2, 3, 5, 3)
    right = matrix.to(torch.float64).to_dense() @ value.double()
    oracle.assert_close(matrix @ value, right, 10 * TIGHT)


def test_heads_of_a_value_may_be_grouped_where_those_of_the_key_are_not() -> None:
    matrix = regard.attend(normal(6, 512, 4), normal(6, 512, 4, seed=1))  # 4 heads in each block
    value, weights = normal(2, 512, 3, seed=2), matrix.to(torch.float64).to_dense()
    oracle.assert_close(matrix @ value, times(weights, value.double()), 10 * TIGHT)
    oracle.assert_close(matrix.T @ value, times(weights.mT, value.double()), 10 * TIGHT)


VECTORS: dict[str, Callable] = {
    "value": lambda m, x, _: m @ x,
    "transposed": lambda m, _, y: m.mT @ y,
    "from-the-left": lambda m, _, y: y @ m,
    "from-the-left-transposed": lambda m, x, _: x @ m.mT,
    "torch-matmul": lambda m, x, _: torch.matmul(m, x),
    "torch-matmul-transposed": lambda m, _, y: torch.matmul(m.mT, y),
    "torch-matmul-from-the-left": lambda m, _, y: torch.matmul(y, m),
    "method-from-the-left": lambda m, _, y: y.matmul(m),
    "composed": lambda m, x, _: m.mT @ (m @ x),
}


@pytest.mark.parametrize("product", VECTORS.values(), ids=VECTORS)
def test_a_vector_is_multiplied_as_by_the_dense_matrix(product: Callable) -> None:
    matrix = A[0, 2]
    x, y = normal(7), normal(4, seed=1)
    oracle.assert_close(product(matrix, x, y), product(DENSE[0, 2], x.double(), y.double()), TIGHT)


def test_mt_is_the_transpose() -> None:
    assert A.mT.shape == DENSE.mT.shape
    assert A.mT.mT is A


@pytest.mark.parametrize("leading", [(3, 2), (3, 1, 2)], ids=str)
def test_gradients_flow_through_batches_that_the_matrix_has_once(leading: tuple[int, ...]) -> None:
    leaves = [normal(1, 2, 3, 2), normal(1, 1, 3, 2), normal(*leading, 3, 2)]

    def product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attend(query, key) @ value

    doubles = [leaf.double().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(product, doubles)


@given(
    leading=st.lists(st.sampled_from([1, 2, 3]), max_size=3),
    operand=st.lists(st.sampled_from([1, 2, 3]), max_size=4),
    width=st.integers(1, 3),
)
def test_leading_axes_broadcast_as_those_of_two_tensors(
    leading: list[int], operand: list[int], width: int
) -> None:
    matrix = regard.attend(normal(*leading, 3, 2), normal(*leading, 4, 2))
    value = normal(*operand, 4, width)
    try:
        right = matrix.to(torch.float64).to_dense() @ value.double()
    except RuntimeError:
        with pytest.raises(ValueError, match="its leading axes must fit those of the matrix"):
            _ = matrix @ value
        return
    oracle.assert_close(matrix @ value, right, 10 * TIGHT)


def test_batches_that_do_not_fit_are_named_as_they_came() -> None:
    with pytest.raises(ValueError, match="value has shape") as caught:
        _ = A @ normal(5, 4, 7, 3)
    assert str(caught.value) == (
        "value has shape (5, 4, 7, 3); its leading axes must fit those of the matrix, (1, 6).\n"
        "    It must broadcast to (1, 6, 7, value_dim), where heads may be grouped."
    )


# Which part.


@pytest.mark.parametrize(
    "three",
    [np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)],
    ids=["int64", "uint8", "tensor", "int32-tensor"],
)
def test_any_whole_number_is_an_index(three: object) -> None:
    assert torch.equal(A[0, three, three], A[0, 3, 3])
    assert torch.equal(A[0, 1, :three, three], A[0, 1, :3, 3])


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        pytest.param(np.bool_(True), "bool", id="bool-of-numpy"),
        pytest.param(torch.tensor(True), "Tensor", id="bool-tensor"),
        pytest.param(torch.tensor([[3]]), "Tensor of 2 axes", id="tensor-of-two-axes"),
        pytest.param(np.array([3.0]), "ndarray", id="array-of-floats"),
        pytest.param("3", "str", id="text"),
    ],
)
def test_an_index_of_another_kind_is_an_error(index: object, kind: str) -> None:
    with pytest.raises(TypeError, match=r"^an attention matrix has no index of type") as caught:
        A[0, index]
    assert str(caught.value).startswith(f"an attention matrix has no index of type {kind};")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda m: m[..., 0:4, :], id="rows"),
        pytest.param(lambda m: m[..., 0:7], id="columns"),
        pytest.param(lambda m: m[0, 0, ::1, :], id="steps"),
        pytest.param(lambda m: m[..., :99, :99], id="beyond-the-end"),
    ],
)
def test_a_range_gives_a_tensor_also_where_it_holds_everything(part: Callable) -> None:
    assert isinstance(part(A), Tensor)
    oracle.assert_close(part(A), part(DENSE), TIGHT)


# Columns without sweeps.

WINDOWS: dict[str, Callable] = {
    "column": lambda m: m[..., m.shape[-1] // 2],
    "first-column": lambda m: m[..., :, 0],
    "last-columns": lambda m: m[..., -2:],
    "steps": lambda m: m[..., 1::5],
    "lower-rows": lambda m: m[..., m.shape[-2] // 2 :, :2],
    "row-steps": lambda m: m[..., ::2, :1],
}


@pytest.mark.sampled(32)
@parametrised(CASES)
def test_a_window_of_few_columns_equals_that_of_the_dense_matrix(
    case: Case, subtests: pytest.Subtests
) -> None:
    doubled = Inputs(*map(oracle.double, case.inputs))
    whole = case.dense(*doubled.of_scores).weights
    plain = case.dense(*(None if x is None else x.float() for x in case.inputs.of_scores)).weights
    for name, part in WINDOWS.items():
        with subtests.test(name):
            exact = part(whole)
            found = part(case.matrix(*case.inputs.of_scores))
            within = oracle.allowed_error(
                exact, part(plain), dtype=case.dtype, scores=case.largest_score
            )
            oracle.assert_close(found, exact, within)
            assert torch.equal(found == 0, exact.to(case.dtype) == 0) or case.sharp > 1


@pytest.mark.parametrize(
    ("at_rows", "at_columns"),
    [
        pytest.param(slice(None), slice(None, None, 64), id="columns-far-apart"),
        pytest.param(slice(None, None, 64), slice(3, 9), id="rows-far-apart"),
        pytest.param(slice(None, None, 64), slice(None, None, 200), id="both"),
        pytest.param(slice(None), slice(5, 6), id="one-column"),
    ],
)
def test_steps_over_many_rows_and_columns_equal_the_dense_ones(
    at_rows: slice, at_columns: slice
) -> None:
    matrix = regard.attend(normal(2, 300, 3), normal(1, 400, 3, seed=1), mask=regard.Causal())
    right = matrix.to(torch.float64).to_dense()[..., at_rows, at_columns]
    oracle.assert_close(matrix[..., at_rows, at_columns], right, TIGHT)


@pytest.mark.parametrize("step", [2, 3, 50])
def test_rows_with_a_step_are_computed_together_and_no_others(step: int) -> None:
    rows: list[list[int]] = []

    class Noting(regard.Mask):
        """Allows everything, and notes the queries that are computed together."""

        text = "Noting()"

        def bind(self, shape: torch.Size, device: torch.device) -> regard.Mask:
            return self

        def allows(self, points: regard.masks.mask.Points) -> Tensor:
            rows.append(points.q_idx.flatten().tolist())
            return torch.ones(len(rows[-1]), 1, dtype=torch.bool)

        def key_bounds(
            self, leading: tuple[slice, ...], rows: slice, shape: torch.Size
        ) -> regard.masks.KeyBounds:
            return regard.masks.KeyBounds(slice(0, shape[-1]), slice(0, 0))

    matrix = regard.attend(normal(100, 3), normal(2000, 3, seed=1), mask=Noting())
    assert matrix[1::step].shape == (*matrix.scores[1::step, 5:900].shape[:1], 2000)
    assert rows == [list(range(1, 100, step))] * 2


def test_a_part_too_large_is_refused_before_any_work() -> None:
    x = torch.zeros(1, 1).expand(2**17, 1)
    with pytest.raises(MemoryError, match=r"^this part would make \(131072, 60000\) float32"):
        regard.attend(x, x)[:, :60000]


# Every question reads the inputs as they are now.

QUERY, KEY = normal(2, 9, 3), normal(2, 9, 3, seed=1)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda tensor: tensor.mul_(2).add_(1), id="in-place"),
        pytest.param(lambda tensor: tensor.data.mul_(2).add_(1), id="data"),
        pytest.param(lambda tensor: tensor.numpy().__imul__(2), id="numpy"),
    ],
)
@pytest.mark.parametrize("part", [lambda m: m, lambda m: m[:1]], ids=["whole", "part"])
@pytest.mark.parametrize("name", ["query", "key", "bias", "sink_bias"])
def test_a_column_follows_a_change_of_its_inputs(
    name: str, part: Callable, change: Callable
) -> None:
    given = {
        "query": QUERY.clone(),
        "key": KEY.clone(),
        "bias": normal(9, 9),
        "sink_bias": normal(2),
    }
    asked = part(regard.attend(**given))
    before = asked[..., 3]
    change(given[name])
    after = asked[..., 3]
    assert name == "key" or not torch.equal(before, after)
    oracle.assert_close(after, part(regard.attend(**given)).to(torch.float64)[..., 3], TIGHT)


def test_columns_of_a_detached_matrix_have_no_gradient() -> None:
    matrix = regard.attend(QUERY.clone().requires_grad_(), KEY)
    assert matrix[..., 3].requires_grad
    assert not matrix.detach()[..., 3].requires_grad


# Rows and columns are one matrix, also where scores are large and close together.


@pytest.mark.parametrize("masked", [-1e9, torch.finfo(torch.float32).min, -3e4])
def test_columns_of_rows_that_an_additive_mask_hides_equal_their_rows(masked: float) -> None:
    x = torch.zeros(3, 1)
    A = regard.attend(x, x, bias=torch.full((3, 3), masked))
    third = torch.full((3, 3), 1 / 3)
    columns = torch.stack([A[:, j] for j in range(3)], -1)
    torch.testing.assert_close(columns, third, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.stack([A[i] for i in range(3)]), third, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [4e4, 2**24, 1e30, 2e38], ids="{:.0e}".format)
def test_columns_of_large_scores_equal_the_dense_softmax(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    step = torch.tensor(size).nextafter(torch.tensor(torch.inf)) - size
    scores = size - step * torch.randint(0, 3, (64, 96), generator=generator)
    A = regard.AttentionMatrix.from_scores(scores)
    exact = scores.double().softmax(-1)
    for part in ((..., 5), (..., slice(3, 9)), (slice(None), slice(None, None, 40)), (7,)):
        oracle.assert_close(
            A[part],
            exact[part],
            oracle.allowed_error(
                exact[part], scores.softmax(-1)[part], dtype=torch.float32, scores=0
            ),
        )


def test_a_sink_beside_large_scores_keeps_its_gradient() -> None:
    scores = torch.tensor([[4e6, 4e6 - 1.0]], dtype=torch.float32)
    query, key = torch.ones(1, 1, 1), scores.mT[None]
    sink = torch.tensor([4e6 + 0.5], requires_grad=True)
    A = regard.attend(query, key, scale=1.0, sink_bias=sink)
    A.sum(-1).sum().backward()
    exact = sink.detach().double().requires_grad_()
    weights = torch.cat([scores[0].double(), exact]).softmax(-1)
    weights[:2].sum().backward()
    torch.testing.assert_close(sink.grad.double(), exact.grad, atol=1e-6, rtol=1e-5)
