"""Errors of what is asked of a matrix, word for word: products, parts, reductions, backends."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import regard

SMALL = torch.zeros(3, 2)
A = regard.attend(torch.zeros(2, 6, 7, 4), torch.zeros(2, 2, 5, 4))
LONG = regard.attend(torch.zeros(1, 1).expand(65536, 1), torch.zeros(1, 1).expand(65536, 1))
REMEDY_OF_MEMORY = (
    "    Ask for a part, A[..., rows, cols], or for a summary, A.pool(512, 512), "
    "or pass limit=None to to_dense()."
)
REMEDY_OF_REDUCE = "    Pass for example regard.Entropy(), regard.TopK(8)."
REMEDY_OF_AMAX = "    Use max() for all axes, or amax((-2, -1)) and then amax over the other axes."
SPANS = "    Give (start, stop) pairs with 0 <= start < stop <= q_len = 7."


class Updated(regard.Reduction):
    """A reduction with one buffer and any update."""

    def __init__(self, update: Callable[[regard.Block], Any]) -> None:
        self._update = update

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
        return self._update(block)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


# id: (what is called, kind of error, its whole text)
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "value-is-a-number": (
        lambda: A @ 3,
        TypeError,
        "value is an int; an attention matrix multiplies tensors.\n"
        "    Use torch.as_tensor(value); for a second matrix B use A @ (B @ x).",
    ),
    "value-is-a-matrix": (
        lambda: A @ A,
        ValueError,
        "A has shape (2, 6, 7, 5) and B has (2, 6, 7, 5); for A @ B the columns of A must be as "
        "many as the rows of B, and leading axes must broadcast.\n"
        "    Take the mean over the heads first, A.mean(1) @ B.mean(1).",
    ),
    "value-dtype": (
        lambda: A @ torch.zeros(5, 3).half(),
        TypeError,
        "value is float16 and the matrix is float32; both must have one dtype.\n"
        "    Use value.to(torch.float32).",
    ),
    "value-device": (
        lambda: A @ torch.zeros(5, 3, device="meta"),
        ValueError,
        "value is on meta and the matrix is on cpu; both must be on one device.\n"
        "    Use value.to(A.device).",
    ),
    "value-tokens": (
        lambda: A @ torch.zeros(7, 3),
        ValueError,
        "value has shape (7, 3); its tokens axis must have kv_len = 5.\n"
        "    It must broadcast to (2, 6, 5, value_dim).",
    ),
    "value-without-axes": (
        lambda: A @ torch.tensor(1.0),
        ValueError,
        "value has shape (); its tokens axis must have kv_len = 5.\n"
        "    It must broadcast to (2, 6, 5, value_dim).",
    ),
    "value-of-no-width": (
        lambda: A @ torch.zeros(5, 0),
        ValueError,
        "value has shape (5, 0); every axis must be at least 1.\n"
        "    It must broadcast to (2, 6, 5, value_dim).",
    ),
    "value-heads": (
        lambda: A @ torch.zeros(2, 4, 5, 3),
        ValueError,
        "value has shape (2, 4, 5, 3); its leading axes must fit those of the matrix, (2, 6).\n"
        "    It must broadcast to (2, 6, 5, value_dim), where heads may be grouped.",
    ),
    "operand-tokens": (
        lambda: A.T @ torch.zeros(5, 3),
        ValueError,
        "operand has shape (5, 3); its tokens axis must have q_len = 7.\n"
        "    It must broadcast to (2, 6, 7, value_dim).",
    ),
    "operand-is-a-list": (
        lambda: A.T @ [1.0],
        TypeError,
        "operand is a list; an attention matrix multiplies tensors.\n"
        "    Use torch.as_tensor(operand); for a second matrix B use A @ (B @ x).",
    ),
    "output-of-a-list": (
        lambda: regard.Output([1.0]),
        TypeError,
        "value is a list; it must be a tensor of shape (..., num_kv_heads, kv_len, value_dim).\n"
        "    Use torch.as_tensor(value).",
    ),
    "output-of-integers": (
        lambda: regard.Output(torch.zeros(5, 1, dtype=torch.int64)),
        TypeError,
        "value is int64; attention needs a floating dtype.\n    Use value.float().",
    ),
    "to-dense": (
        lambda: regard.attend(
            torch.zeros(1, 1).expand(1, 32, 23170, 1), torch.zeros(1, 1).expand(1, 32, 23170, 1)
        ).to_dense(),
        MemoryError,
        "to_dense() would make (1, 32, 23170, 23170) float32 = 64.0 GiB; the limit is 4.0 GiB.\n"
        + REMEDY_OF_MEMORY,
    ),
    "to-dense-own-limit": (
        lambda: A.to_dense(limit=1000),
        MemoryError,
        "to_dense() would make (2, 6, 7, 5) float32 = 1.64 KiB; the limit is 0.977 KiB.\n"
        + REMEDY_OF_MEMORY,
    ),
    "transposed-to-dense": (
        LONG.T.to_dense,
        MemoryError,
        "to_dense() would make (65536, 65536) float32 = 16.0 GiB; the limit is 4.0 GiB.\n"
        + REMEDY_OF_MEMORY,
    ),
    "scores-to-dense": (
        LONG.scores.to_dense,
        MemoryError,
        "scores.to_dense() would make (65536, 65536) float32 = 16.0 GiB; the limit is 4.0 GiB.\n"
        + REMEDY_OF_MEMORY,
    ),
    "a-part-too-large": (
        lambda: LONG[:32768],
        MemoryError,
        "this part would make (32768, 65536) float32 = 8.0 GiB; the limit is 4.0 GiB.\n"
        + REMEDY_OF_MEMORY,
    ),
    "scores-too-large": (
        lambda: LONG.scores[:32768],
        MemoryError,
        "these scores would make (32768, 65536) float32 = 8.0 GiB; the limit is 4.0 GiB.\n"
        + REMEDY_OF_MEMORY,
    ),
    "dense-backend-too-large": (
        lambda: LONG.reduce(regard.Entropy(), backend="dense"),
        MemoryError,
        "backend='dense' would make (65536, 65536) float64 = 32.0 GiB; the limit is 4.0 GiB.\n"
        + REMEDY_OF_MEMORY,
    ),
    "scores-over-the-queries": (
        lambda: A.scores.amax(-2),
        ValueError,
        "dim is -2; the scores have shape (2, 6, 7, 5), and amax() is over the keys, dim=-1, or "
        "over queries and keys, dim=(-2, -1).\n" + REMEDY_OF_AMAX,
    ),
    "scores-over-all-axes": (
        lambda: A.scores.amax((0, 1, 2, 3)),
        ValueError,
        "dim is (0, 1, 2, 3); the scores have shape (2, 6, 7, 5), and amax() is over the keys, "
        "dim=-1, or over queries and keys, dim=(-2, -1).\n" + REMEDY_OF_AMAX,
    ),
    "scores-over-an-axis-that-is-no-number": (
        lambda: A.scores.amax("keys"),
        TypeError,
        "dim is a str; it must be a whole number.\n    Pass an int, for example dim=1.",
    ),
    "no-reductions": (
        A.reduce,
        ValueError,
        "reduce() has no reductions; it needs at least one.\n" + REMEDY_OF_REDUCE,
    ),
    "a-reduction-that-is-none": (
        lambda: A.reduce("entropy"),
        TypeError,
        "reduce() got str; each argument must be an instance of a reduction.\n" + REMEDY_OF_REDUCE,
    ),
    "a-reduction-class": (
        lambda: A.reduce(regard.Entropy),
        TypeError,
        "reduce() got Entropy; each argument must be an instance of a reduction.\n"
        + REMEDY_OF_REDUCE,
    ),
    "backend": (
        lambda: A.reduce(regard.TopK(1), backend="fast"),
        ValueError,
        "backend is 'fast'; it must be one of 'sdpa', 'triton', 'cpu', 'sweep', 'dense', "
        "'distributed'.\n"
        "    Leave it out to have the fastest chosen.",
    ),
    "k-beyond-the-keys": (
        lambda: A.topk(6),
        ValueError,
        "k is 6; it must be at most kv_len = 5.\n    Use topk(min(k, 5)).",
    ),
    "k-below-1": (
        lambda: A.topk(0),
        ValueError,
        "k is 0; it must be at least 1.\n    Pass for example k=1.",
    ),
    "k-is-true": (
        lambda: A.topk(True),
        TypeError,
        "k is a bool; it must be a whole number.\n    Pass an int, for example k=1.",
    ),
    "k-is-a-fraction": (
        lambda: A.topk(2.0),
        TypeError,
        "k is a float; it must be a whole number.\n    Pass an int, for example k=1.",
    ),
    "dim": (
        lambda: regard.Sum(0),
        ValueError,
        "dim is 0; it must be -1 (over the keys) or -2 (over the queries).\n"
        "    Sum the answer over other axes.",
    ),
    "pool-of-no-rows": (
        lambda: A.pool(0, 4),
        ValueError,
        "rows is 0; it must be at least 1.\n    Pass for example rows=1.",
    ),
    "pool-of-text": (
        lambda: A.pool(4, "4"),
        TypeError,
        "columns is a str; it must be a whole number.\n    Pass an int, for example columns=1.",
    ),
    "offset": (
        lambda: A.diagonal(0.5),
        TypeError,
        "offset is a float; it must be a whole number.\n    Pass an int, for example offset=1.",
    ),
    "spans-is-a-number": (
        lambda: A.segments(5),
        TypeError,
        f"query_spans is an int; it must be (start, stop) pairs.\n{SPANS}",
    ),
    "spans-is-text": (
        lambda: A.segments("ab"),
        TypeError,
        f"query_spans is a str; it must be (start, stop) pairs.\n{SPANS}",
    ),
    "no-spans": (
        lambda: A.segments([]),
        ValueError,
        f"query_spans is empty; it must have at least one span.\n{SPANS}",
    ),
    "span-of-one-number": (
        lambda: A.segments([(0, 3), (4,)]),
        TypeError,
        f"query_spans has (4,); each span must be two whole numbers.\n{SPANS}",
    ),
    "span-beyond-the-text": (
        lambda: A.segments([(0, 8)]),
        ValueError,
        f"query_spans has (0, 8); each span must be non-empty and inside the text.\n{SPANS}",
    ),
    "empty-span": (
        lambda: A.segments({"title": (3, 3)}),
        ValueError,
        f"query_spans has (3, 3); each span must be non-empty and inside the text.\n{SPANS}",
    ),
    "span-beyond-the-keys": (
        lambda: A.segments([(0, 7)]),
        ValueError,
        "key_spans has (0, 7); each span must be non-empty and inside the text.\n"
        "    Give (start, stop) pairs with 0 <= start < stop <= kv_len = 5.",
    ),
    "index-of-another-kind": (
        lambda: A[1.0],
        TypeError,
        "an attention matrix has no index of type float; it takes integers, slices, one list of "
        "integers or bools, None and one '...'.\n"
        "    For a mask of single weights multiply rows and columns, (A * rows[:, None]) * "
        "columns, or use to_dense().",
    ),
    "index-is-a-list-of-floats": (
        lambda: A[0, 0, [1.0, 2]],
        TypeError,
        "an attention matrix has no index of type list; it takes integers, slices, one list of "
        "integers or bools, None and one '...'.\n"
        "    For a mask of single weights multiply rows and columns, (A * rows[:, None]) * "
        "columns, or use to_dense().",
    ),
    "index-is-true": (
        lambda: A[True],
        TypeError,
        "an attention matrix has no index of type bool; it takes integers, slices, one list of "
        "integers or bools, None and one '...'.\n"
        "    For a mask of single weights multiply rows and columns, (A * rows[:, None]) * "
        "columns, or use to_dense().",
    ),
    "index-out-of-range": (
        lambda: A[2],
        IndexError,
        "index 2 is out of range for axis 0 of length 2.\n    Use -2 to 1.",
    ),
    "row-out-of-range": (
        lambda: A[0, 0, -8],
        IndexError,
        "index -8 is out of range for axis 2 of length 7.\n    Use -7 to 6.",
    ),
    "too-many-indices": (
        lambda: A[0, 0, 0, 0, 0],
        IndexError,
        "the index has 5 entries and 0 '...'; a matrix of shape (2, 6, 7, 5) takes at most 4 and "
        "one '...'.",
    ),
    "two-ellipses": (
        lambda: A[..., ...],
        IndexError,
        "the index has 0 entries and 2 '...'; a matrix of shape (2, 6, 7, 5) takes at most 4 and "
        "one '...'.",
    ),
    "negative-step": (
        lambda: A[..., ::-1, :],
        ValueError,
        "the slice on axis 2 has step -1; steps must be at least 1, as in PyTorch.\n"
        "    Take the part and use .flip() on it.",
    ),
    "no-heads": (
        lambda: A[:, 3:3],
        ValueError,
        "the slice on axis 1 is empty; it must keep at least one matrix.\n"
        "    Only the slices of rows and columns, the last two axes, may be empty.",
    ),
    "to-integers": (
        lambda: A.to(torch.int64),
        TypeError,
        "to() has int64; attention needs a floating dtype of at least 16 bits.\n"
        "    Use to_dense().to(...) for a tensor of another kind.",
    ),
    "an-array-of-it": (
        lambda: numpy.asarray(A),
        TypeError,
        "NumPy does not take an AttentionMatrix; it holds no numbers.\n"
        "    Use to_dense().numpy(), or tensors in products: A @ torch.as_tensor(x).",
    ),
    "an-array-on-the-left": (
        lambda: numpy.ones((2, 3)) @ A,
        TypeError,
        "NumPy does not take an AttentionMatrix; it holds no numbers.\n"
        "    Use to_dense().numpy(), or tensors in products: A @ torch.as_tensor(x).",
    ),
    "an-update-without-a-tuple": (
        lambda: A.reduce(Updated(lambda block: block.row_sum)),
        TypeError,
        "update() of Updated returned a Tensor; it must return a tuple of 1 Contribution, one for "
        "each buffer of start().\n"
        "    For example return (regard.Contribution(block.box.at_rows, numbers),).",
    ),
    "an-update-with-too-little": (
        lambda: A.reduce(Updated(lambda _: ()), backend="dense"),
        TypeError,
        "update() of Updated returned a tuple of 0; it must return a tuple of 1 Contribution, one "
        "for each buffer of start().\n"
        "    For example return (regard.Contribution(block.box.at_rows, numbers),).",
    ),
    "another-function-of-torch": (
        lambda: torch.softmax(A, -1),
        TypeError,
        "torch.softmax does not take an AttentionMatrix; it holds no numbers.\n"
        "    Rows of attention sum to 1 already; use A[0, 3, :10] for some of them.",
    ),
    "a-transpose-in-another-function": (
        lambda: torch.exp(A.T),
        TypeError,
        "torch.exp does not take a TransposedMatrix; it holds no numbers.\n"
        "    Use a product, A @ x, a part such as A[0, 3, :10], or to_dense().",
    ),
    "matrix-on-the-right": (
        lambda: SMALL @ A,
        ValueError,
        "x has shape (3, 2); for x @ A its last axis must have the 7 rows of A, (2, 6, 7, 5).\n"
        "    For a product from the right use A @ x.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_call_says_what_came_and_what_to_do(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("reduction", "message"),
    [
        pytest.param(
            regard.Pool(10**5, 10**5),
            "Pool would make (100000, 100000) float64 = 74.5 GiB; the limit is 4.0 GiB.\n"
            "    Ask for fewer cells, A.pool(512, 512).",
            id="pool",
        ),
        pytest.param(
            regard.TopK(10**5),
            "TopK would make (100000, 100000) int64 = 74.5 GiB; the limit is 4.0 GiB.\n"
            "    Ask for a smaller k, or for one head at a time, A[0, 3].",
            id="topk",
        ),
        pytest.param(
            regard.Segments([(i, i + 1) for i in range(50_000)]),
            "Segments would make (50000, 50000) float64 = 18.6 GiB; the limit is 4.0 GiB.\n"
            "    Ask for fewer spans.",
            id="segments",
        ),
    ],
)
def test_an_answer_as_large_as_the_matrix_is_refused(
    reduction: regard.Reduction, message: str
) -> None:
    x = torch.zeros(10**5, 1)
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}$"):
        regard.attend(x, x).reduce(reduction)
