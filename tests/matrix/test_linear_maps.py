"""Lazy sums, means, products and multiples of matrices, and what matrices answer to probes."""

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from torch import Tensor

import oracle
import regard
from cases import full_but
from largest_tensor import largest
from live_memory import LiveMemory
from regard.matrix.linear_map import LinearMap
from regard.matrix.tensor_methods import AT_ONCE

TOKENS = 7
EYE = torch.eye(TOKENS, dtype=torch.float64)


def inputs(heads: Sequence[int] = (2, 3), tokens: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (*heads, tokens, 4)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(4)]


def matrices(tensors: Sequence[Tensor]) -> list[regard.AttentionMatrix]:
    first, second, third, fourth = tensors
    return [
        regard.attend(first, second, mask=regard.Causal()),
        regard.attend(third, fourth, mask=regard.Padding([7, 5])),
    ]


def by_hand(layers: Sequence[Any], eye: Tensor) -> Any:
    """Attention rollout as its authors' notebooks write it."""
    rolled = eye
    for layer in layers:
        mean = layer.mean(dim=1) + eye
        rolled = (mean / mean.sum(-1, keepdim=True)) @ rolled
    return rolled


def lazily_by_hand(layers: Sequence[Any], eye: Tensor) -> Any:
    """The same without the product with eye, which is a tensor."""
    rolled = None
    for layer in layers:
        mean = layer.mean(dim=1) + eye
        mean = mean / mean.sum(-1, keepdim=True)
        rolled = mean if rolled is None else mean @ rolled
    return rolled


MAPS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda a, _: a.mean(1),
    "sum of the texts": lambda a, _: a.sum(0),
    "mean of both": lambda a, _: a.mean((0, 1), keepdim=True),
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - 0.5 * b,
    "negative": lambda a, _: -a,
    "mean of the layers": lambda a, b: sum([a, b]) / 2,
    "residual": lambda a, _: a.mean(1) + EYE,
    "residual on the left": lambda a, _: EYE + a.mean(1),
    "minus": lambda a, _: EYE - a.mean(1),
    "product": lambda a, b: a @ b,
    "product of means": lambda a, b: a.mean(1) @ b.mean(1),
    "product of three": lambda a, b: a.mean(1) @ (b.mean(1) @ a.mean(1)),
    "product with a wider one": lambda a, b: a.mean((0, 1)) @ b,
    "transposed product": lambda a, b: a.mT @ b,
    "rows to 1": lambda a, b: (a + b) / (a + b).sum(-1, keepdim=True),
    "rows": lambda a, _: a * torch.linspace(0, 1, 7, dtype=torch.float64)[:, None],
    "columns": lambda a, _: a * torch.linspace(0, 1, 7, dtype=torch.float64),
    "columns of the mean": lambda a, _: a.mean(1) * torch.linspace(0, 1, 14).view(2, 1, 7),
    "bools": lambda a, _: a * (torch.arange(7) > 2),
    "heads": lambda a, _: (a * torch.tensor([[1.0], [2.0], [-1.0]])[..., None]).sum(1),
    "heads of the mean": lambda a, _: a.mean(1, keepdim=True) * torch.arange(3.0).view(3, 1, 1),
    "a number in a tensor": lambda a, b: a * torch.tensor(3.0) + b / torch.tensor(2.0),
    "gated": lambda a, b: torch.mul(a, 2) + torch.sub(b, a),
    "transposed": lambda a, _: a.mean(1).mT,
    "rollout": lambda a, b: lazily_by_hand([a, b], EYE),
}

ANSWERS: dict[str, Callable[[Any], Tensor]] = {
    "to_dense": lambda m: m if isinstance(m, Tensor) else m.to_dense(),
    "row": lambda m: m[..., 3, :],
    "column": lambda m: m[..., 2],
    "window": lambda m: m[..., 1:6, 2:5],
    "tall window": lambda m: m[..., 1:3],
    "steps": lambda m: m[..., ::3, 1::2],
    "no rows": lambda m: m[..., 3:3, :],
    "rows of a list": lambda m: m[..., [5, 0], :],
    "columns of a list": lambda m: m[..., [5, 0]],
    "product": lambda m: m @ torch.linspace(0.5, 1, 14, dtype=torch.float64).view(7, 2),
    "vector": lambda m: m @ torch.linspace(0.5, 1, 7, dtype=torch.float64),
    "from the left": lambda m: torch.linspace(0.5, 1, 7, dtype=torch.float64) @ m,
    "more texts": lambda m: (
        m
        @ torch.linspace(0.5, 1, 28 * m.shape[:-2].numel(), dtype=torch.float64).view(
            2, *m.shape[:-2], 7, 2
        )
    ),
    "transposed": lambda m: m.mT @ torch.linspace(0.5, 1, 14, dtype=torch.float64).view(7, 2),
    "first part": lambda m: part(m, 0),
    "list of parts": lambda m: part(m, [0, 0]),
    "range of parts": lambda m: part(m, slice(0, 1)),
    "new axis": lambda m: part(m, None),
    "keys": lambda m: m.sum(-1),
    "received": lambda m: m.sum(-2),
    "mean": lambda m: m.mean(-1),
    "all": lambda m: m.sum(),
    "largest": lambda m: m.max(-1).values,
    "smallest": lambda m: m.min(-1, keepdim=True).values,
    "largest of all": lambda m: m.max(),
    "top": lambda m: m.topk(2).values,
    "in float32": lambda m: m.float().sum(-1),
}


def part(m: Any, index: Any) -> Tensor:
    m = m if m.ndim > 2 else m[None]
    chosen = m[index]
    return chosen if isinstance(chosen, Tensor) else chosen.to_dense()


def dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    first, second, third, fourth = tensors
    allowed = oracle.padding([7, 5], (2, 3, 7, 7))
    return [
        oracle.attend(first, second, allowed=oracle.causal(7, 7)).weights,
        oracle.attend(third, fourth, allowed=allowed).weights,
    ]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", MAPS)
def test_a_map_is_lazy_and_answers_as_the_tensor_does(name: str, subtests: pytest.Subtests) -> None:
    lazy, exact = MAPS[name](*matrices(inputs())), MAPS[name](*dense(inputs()))
    assert isinstance(lazy, LinearMap)
    assert (lazy.shape, lazy.dtype) == (exact.shape, exact.dtype)
    for asked, answer in ANSWERS.items():
        with subtests.test(asked):
            tolerance = 1e-6 if asked == "in float32" else 1e-12
            found, expected = answer(lazy), answer(exact)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.sampled(52)
@pytest.mark.parametrize("answer", ["to_dense", "row", "product", "transposed", "largest", "all"])
@pytest.mark.parametrize("name", MAPS)
def test_a_map_has_the_gradients_of_the_tensor(name: str, answer: str) -> None:
    found = oracle.gradients(lambda *t: ANSWERS[answer](MAPS[name](*matrices(t))), inputs())
    right = oracle.gradients(lambda *t: ANSWERS[answer](MAPS[name](*dense(t))), inputs())
    for actual, exact in zip(found, right, strict=True):
        torch.testing.assert_close(actual, exact, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", MAPS)
def test_a_map_prints_what_it_is_made_of(name: str) -> None:
    assert "AttentionMatrix(" in repr(MAPS[name](*matrices(inputs())))


def test_gradients_reach_factors() -> None:
    a, b = matrices(inputs())
    gate = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    by_head = torch.ones(3, 1, 1, dtype=torch.float64, requires_grad=True)
    found = ((gate * a + (1 - gate) * b) * by_head).sum(1)[..., 2, :].square().sum()
    dense_a, dense_b = a.to_dense(), b.to_dense()
    right = ((gate * dense_a + (1 - gate) * dense_b) * by_head).sum(1)[..., 2, :].square().sum()
    for actual, exact in zip(
        torch.autograd.grad(found, (gate, by_head)),
        torch.autograd.grad(right, (gate, by_head)),
        strict=True,
    ):
        torch.testing.assert_close(actual, exact)


def test_a_rollout_by_hand_is_the_rollout() -> None:
    layers = matrices(inputs())
    found = lazily_by_hand(layers, EYE)
    torch.testing.assert_close(found.to_dense(), regard.rollout(layers).to_dense())
    torch.testing.assert_close(found[0, 5], by_hand(dense(inputs()), EYE)[0, 5])
    torch.testing.assert_close(by_hand(layers, EYE), found.to_dense())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_map_keeps_the_dtype_of_its_matrices(dtype: torch.dtype) -> None:
    a, b = (matrix.to(dtype) for matrix in matrices(inputs()))
    lazy = lazily_by_hand([a, b], EYE.to(dtype))
    exact = by_hand(dense([each.to(dtype).double() for each in inputs()]), EYE)
    assert lazy.dtype == lazy[0].dtype == lazy[0, 3].dtype == lazy.to_dense().dtype == dtype
    tolerance = {"atol": 8 * torch.finfo(dtype).eps, "rtol": 0}
    torch.testing.assert_close(lazy.to_dense().double(), exact, **tolerance)


def test_a_map_multiplies_under_autocast() -> None:
    a, b = (matrix.to(torch.float32) for matrix in matrices(inputs()))
    lazy = lazily_by_hand([a, b], EYE.float())
    expected = lazy @ torch.ones(7, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, sums = lazy @ torch.ones(7, 2), lazy.sum(-1)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())
    assert torch.equal(sums, lazy.sum(-1))


# Never the matrix.

LONG = 4096
LAZY: dict[str, Callable[[Any, Any], Tensor]] = {
    "mean": lambda a, _: a.mean(0)[17],
    "mean of all": lambda a, _: a.mean(),
    "sum": lambda a, b: ((a + b) / 2)[0, :, 3],
    "product": lambda a, b: (a.mean(0) @ b.mean(0))[17],
    "rows to 1": lambda a, b: ((a + b) / (a + b).sum(-1, keepdim=True)) @ torch.ones(LONG),
    "columns": lambda a, _: (a * (torch.arange(LONG) > 4)).mean(0)[..., [5, 3000]],
    "list": lambda a, _: a[[1, 0]][..., [3, 17, 4000], :],
    "new axis": lambda a, _: a[:, None].sum(-2),
    "largest": lambda a, _: a.mean(0).max(-1).values,
    "top": lambda a, b: (a + b).topk(2).values,
    "argmax": lambda a, _: a.argmax(-1).float(),
    "scaled rows": lambda a, _: (a / a.sum(-1, keepdim=True)).min(-1).values,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize(
    "name", full_but({name: name for name in LAZY}, "product", "scaled rows", "largest")
)
def test_an_answer_of_a_map_needs_no_matrix(name: str, gradients: bool) -> None:
    tensors = [each.float().requires_grad_(gradients) for each in inputs((2,), LONG)]
    first, second, third, fourth = tensors

    def work() -> None:
        answer = LAZY[name](regard.attend(first, second), regard.attend(third, fourth))
        if gradients and answer.requires_grad:
            answer.sum().backward()

    assert largest(work) < LONG * LONG // 6


def test_the_mean_of_many_heads_adds_a_few_at_once() -> None:
    heads, tokens = 64, 512
    query, key, *_ = (each.float() for each in inputs((heads,), tokens))
    mean = regard.attend(query, key).mean(0)
    assert largest(mean.to_dense) < heads * tokens * tokens // 8


@pytest.mark.full
def test_the_blocks_of_the_largest_weights_are_not_kept_for_gradients() -> None:
    query, key, *_ = (each.float().requires_grad_() for each in inputs((2,), LONG))
    a = regard.attend(query, key)
    with LiveMemory() as memory:
        answer = (a / a.sum(-1, keepdim=True)).max(-1).values
        assert answer.requires_grad
        assert memory.operations(AT_ONCE) == []  # bytes, a quarter of a block


@pytest.mark.full
def test_a_matrix_of_40_000_tokens_answers() -> None:
    tokens = 40_000
    x = torch.randn(2, tokens, 2, generator=torch.Generator().manual_seed(0))
    a = regard.attend(x, x, mask=regard.SlidingWindow(20, 0))
    mean = a.mean(0) / 2 + a[0] / 2
    rolled = mean @ mean
    assert mean.shape == rolled.shape == (tokens, tokens)
    torch.testing.assert_close(mean[-1].sum(), torch.tensor(1.0))
    torch.testing.assert_close(rolled @ torch.ones(tokens), torch.ones(tokens))
    assert rolled[-3:, -3:].shape == (3, 3)
    for refused in (mean.to_dense, rolled.to_dense, a.unsqueeze(0).to_dense):
        with pytest.raises(MemoryError, match="GiB"):
            refused()


# Probes.

A = matrices(inputs())[0]
TENSOR_NAMES = [name for name in dir(Tensor) if not name.startswith("_")]
PLAIN = ["_ipython_display_", "__array_interface__", "__cuda_array_interface__", "foo", "_repr_x_"]


@pytest.mark.parametrize("matrix", [A, A.T, A.mean(1), A + A, A @ A, regard.rollout([A])])
class TestProbes:
    @pytest.mark.parametrize("name", PLAIN)
    def test_other_names_have_pythons_error(self, matrix: LinearMap, name: str) -> None:
        with pytest.raises(AttributeError) as caught:
            getattr(matrix, name)
        kind = type(matrix).__name__
        assert str(caught.value) == f"{kind!r} object has no attribute {name!r}"

    def test_hasattr_tells_what_a_matrix_has(self, matrix: LinearMap) -> None:
        assert all(hasattr(matrix, name) for name in ("float", "dim", "requires_grad", "to"))
        assert not any(hasattr(matrix, name) for name in ("numpy", "masked_fill", "grad", *PLAIN))

    def test_copies_are_equal(self, matrix: LinearMap) -> None:
        for copied in (copy.copy(matrix), copy.deepcopy(matrix), matrix.clone()):
            assert torch.equal(copied.to_dense(), matrix.to_dense())

    def test_pickle_and_torch_save_work(self, matrix: LinearMap) -> None:
        again = pickle.loads(pickle.dumps(matrix))
        assert torch.equal(again.to_dense(), matrix.to_dense())
        buffer = io.BytesIO()
        torch.save(matrix, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False).to_dense(), matrix.to_dense())

    def test_numpy_and_torch_make_no_array_of_it(self, matrix: LinearMap) -> None:
        for function in (np.array, np.asarray, torch.tensor, torch.as_tensor):
            with pytest.raises(TypeError, match=r"\n    Use to_dense\(\)"):
                function(matrix)

    def test_notebooks_show_its_text(self, matrix: LinearMap) -> None:
        data, _ = DisplayFormatter().format(matrix)
        assert data["text/plain"] == repr(matrix)

    def test_a_change_in_place_is_refused(self, matrix: LinearMap) -> None:
        with pytest.raises(TypeError, match=r"cannot be changed in place; .*\n    Use a part"):
            matrix[..., 0, 0] = 1

    def test_every_name_of_tensors_is_there_or_says_what_to_write(self, matrix: LinearMap) -> None:
        missing = [name for name in TENSOR_NAMES if not hasattr(matrix, name)]
        for name in missing:
            with pytest.raises(AttributeError, match=rf"has no {name}; it holds no .*\n    [A-Z]"):
                getattr(matrix, name)
        assert len(missing) > 400

    def test_a_conversion_reaches_every_part(self, matrix: LinearMap) -> None:
        assert matrix.to(torch.float32).dtype == matrix.float().dtype == torch.float32
        assert matrix.to("meta").device.type == "meta"
        assert matrix.detach().requires_grad is matrix.requires_grad is False


def test_a_matrix_requires_a_gradient_if_its_query_does() -> None:
    query, key, *_ = inputs()
    a = regard.attend(query.requires_grad_(), key)
    lazy = (a.mean(1) + EYE) @ a.mean(1)
    assert a.requires_grad is lazy.requires_grad is True
    assert a.detach().requires_grad is lazy.detach().requires_grad is False


# Errors.

WIDE = regard.attend(torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 5, 4))
ROW = regard.attend(torch.zeros(1, 4), torch.zeros(4, 4))
FACTORS = (
    "a lazy matrix takes one factor for each row, (..., q_len, 1), or for each column, "
    "(..., 1, kv_len).\n    For weights of single entries use regard.weighted_sum(A, weight), "
    "or multiply a part."
)
KEYS = (
    "it is over the keys, dim=-1.\n    Over other axes use it on a part, such as "
    "A[..., :10, :].max(dim), or use the mean, A.mean(1), or a picture, A.pool(64, 64)."
)
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a-number-is-added": (
        lambda: WIDE + 1,
        TypeError,
        "an int is added to an AttentionMatrix of shape (2, 3, 7, 5); a lazy matrix takes matrices "
        "and tensors with all its queries and keys.\n"
        "    For a residual connection add torch.eye(tokens), or use regard.rollout(layers); for "
        "an entropy use A.entropy().",
    ),
    "a-row-is-added": (
        lambda: torch.zeros(5) + WIDE,
        TypeError,
        "a tensor of shape (5,) is added to an AttentionMatrix of shape (2, 3, 7, 5); a lazy "
        "matrix takes matrices and tensors with all its queries and keys.\n"
        "    For a residual connection add torch.eye(tokens), or use regard.rollout(layers); for "
        "an entropy use A.entropy().",
    ),
    "sum-of-other-heads": (
        lambda: WIDE + WIDE[:, :2],
        ValueError,
        "the matrix has shape (2, 3, 7, 5), and what is added has (2, 2, 7, 5); queries and keys "
        "must be as many, and leading axes must broadcast.\n"
        "    Take the mean over the heads first, A.mean(1).",
    ),
    "sum-of-another-dtype": (
        lambda: WIDE + WIDE.double(),
        TypeError,
        "the second matrix is float64 and the first is float32; both must have one dtype.\n"
        "    Use to(torch.float32).",
    ),
    "product-of-other-lengths": (
        lambda: WIDE @ WIDE,
        ValueError,
        "A has shape (2, 3, 7, 5) and B has (2, 3, 7, 5); for A @ B the columns of A must be as "
        "many as the rows of B, and leading axes must broadcast.\n"
        "    Take the mean over the heads first, A.mean(1) @ B.mean(1).",
    ),
    "entries-are-multiplied": (
        lambda: WIDE * torch.ones(7, 5),
        ValueError,
        f"the factors have shape (7, 5), and the matrix has (2, 3, 7, 5); {FACTORS}",
    ),
    "factors-of-other-rows": (
        lambda: torch.ones(6, 1) * WIDE,
        ValueError,
        f"the factors have shape (6, 1), and the matrix has (2, 3, 7, 5); {FACTORS}",
    ),
    "factors-of-more-rows": (
        lambda: ROW * torch.ones(3, 1),
        ValueError,
        f"the factors have shape (3, 1), and the matrix has (1, 4); {FACTORS}",
    ),
    "matrices-are-multiplied-by-entries": (
        lambda: WIDE * WIDE,
        TypeError,
        "a lazy matrix is multiplied by an AttentionMatrix; it takes numbers and tensors.\n"
        "    For the product of two matrices use A @ B, for weights of their entries "
        "regard.weighted_sum(A, weight).",
    ),
    "largest-of-the-queries": (
        lambda: WIDE.mean(1).max(-2),
        ValueError,
        f"max() has dim=-2, and the matrix has shape (2, 7, 5); {KEYS}",
    ),
    "no-such-axis": (
        lambda: WIDE.mean(4),
        ValueError,
        "dim is 4; the matrix has shape (2, 3, 7, 5).\n    Use axes from -4 to 3.",
    ),
    "an-axis-of-text": (
        lambda: WIDE.sum("heads"),
        TypeError,
        "dim is a str; it must be a whole number.\n    Pass an int, for example dim=1.",
    ),
    "too-many-keys": (
        lambda: WIDE.mean(1).topk(6),
        ValueError,
        "k is 6; it must be at most kv_len = 5.\n    Use topk(min(k, 5)).",
    ),
    "diagonal-of-heads": (
        lambda: WIDE.diagonal(0, 0, 1),
        ValueError,
        "dim1 is 0 and dim2 is 1, and the matrix has shape (2, 3, 7, 5); they must be the axes of "
        "queries and keys.\n    Leave them out.",
    ),
    "axes-are-joined": (
        lambda: WIDE.view(6, 7, 5),
        ValueError,
        "the new shape is (6, 7, 5); a matrix of shape (2, 3, 7, 5) gains and loses leading axes "
        "of length 1 alone.\n    Take one text, A[0], or the mean over the heads, A.mean(1), or "
        "reshape a part.",
    ),
    "heads-are-moved": (
        lambda: WIDE.transpose(0, 1),
        ValueError,
        "the axes are (1, 0, 2, 3) of a matrix of shape (2, 3, 7, 5); leading axes stay, and only "
        "queries and keys may be exchanged.\n"
        "    Use A.mT, or permute a part, such as A[..., :10, :10], or to_dense().",
    ),
    "a-new-last-axis": (
        lambda: WIDE.unsqueeze(-1),
        ValueError,
        "dim is -1; the matrix has shape (2, 3, 7, 5), and its last two axes stay queries and "
        "keys.\n    Take a part first, such as A[..., 0, :], and use unsqueeze on it.",
    ),
    "a-new-axis-after-the-rows": (
        lambda: WIDE[..., None],
        ValueError,
        "the index has None after the rows; queries and keys stay the last two axes.\n"
        "    Take the part first, A[..., 0, :], and use .unsqueeze(-1) on it.",
    ),
    "two-lists": (
        lambda: WIDE[[0], [1]],
        ValueError,
        "the index has several lists; it takes one.\n"
        "    Index one axis at a time, A[:, [0, 2]][..., [1, 3], :], or take a range and index "
        "that tensor.",
    ),
    "bools-of-another-length": (
        lambda: WIDE[:, [True, False]],
        IndexError,
        "the bools on axis 1 are 2; the axis has length 3.\n    Pass 3 bools, or the positions.",
    ),
    "a-mask-of-entries": (
        lambda: WIDE[0, 0][torch.ones(7, 5, dtype=torch.bool)],
        TypeError,
        "an attention matrix has no index of type Tensor of 2 axes; it takes integers, slices, one "
        "list of integers or bools, None and one '...'.\n"
        "    For a mask of single weights multiply rows and columns, (A * rows[:, None]) * "
        "columns, or use to_dense().",
    ),
    "an-operator": (
        lambda: WIDE**2,
        TypeError,
        "this operator does not take an AttentionMatrix; it holds no numbers.\n"
        "    Use a part, such as A[0, 3, :10] > 0.1, or multiply rows or columns by 0 or 1, "
        "A * keep[:, None].",
    ),
    "the-largest-of-torch": (
        lambda: torch.max(WIDE),
        TypeError,
        "torch.max does not take an AttentionMatrix; it holds no numbers.\n"
        "    Use A.max(-1) for each row, and A.max(-1).values.max() for the whole matrix.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_call_says_what_came_and_what_to_do(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize("other", [0, 0.5, torch.zeros(2, 2)])
def test_a_comparison_says_what_to_write(other: object) -> None:
    matrix = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
    for compare in (lambda: matrix == other, lambda: matrix != other):
        with pytest.raises(TypeError, match=r"holds no numbers\.\n    Use a part"):
            compare()
    assert [matrix].index(matrix) == 0
    assert matrix != regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
