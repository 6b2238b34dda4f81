"""Errors of what makes a matrix, word for word: attend, masks, given scores and weights."""

import math
from collections.abc import Callable

import pytest
import torch

import regard

SMALL = torch.zeros(3, 2)
WHAT_A_MASK_IS = (
    "a mask is a bool tensor (True = may attend), one of regard.masks, or a mask_mod or BlockMask "
    "of FlexAttention.\n"
    "    To add numbers to the scores, pass bias=. For nn.MultiheadAttention's convention "
    "(True = may not), use Drop(mask)."
)
READ_AS = "were read as (..., num_heads, tokens, head_dim)."


def attending(*query: int, key: tuple[int, ...], **options: object) -> Callable[[], object]:
    return lambda: regard.attend(torch.zeros(query), torch.zeros(key), **options)


# id: (what is called, kind of error, its whole text)
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "query-is-a-list": (
        lambda: regard.attend([[1.0]], SMALL),
        TypeError,
        "query is a list; it must be a tensor of shape (..., num_heads, tokens, head_dim).\n"
        "    Use torch.as_tensor(query).",
    ),
    "key-is-a-number": (
        lambda: regard.attend(SMALL, 3),
        TypeError,
        "key is an int; it must be a tensor of shape (..., num_heads, tokens, head_dim).\n"
        "    Use torch.as_tensor(key).",
    ),
    "query-of-integers": (
        lambda: regard.attend(SMALL.long(), SMALL),
        TypeError,
        "query is int64; attention needs a floating dtype.\n    Use query.float().",
    ),
    "query-of-complex-numbers": (
        lambda: regard.attend(SMALL.cfloat(), SMALL),
        TypeError,
        "query is complex64; attention needs a floating dtype.\n    Use query.float().",
    ),
    "query-of-8-bits": (
        lambda: regard.attend(SMALL.to(torch.float8_e4m3fn), SMALL),
        TypeError,
        "query is float8_e4m3fn; attention needs at least 16 bits.\n    Use query.bfloat16().",
    ),
    "sparse-query": (
        lambda: regard.attend(SMALL.to_sparse(), SMALL),
        TypeError,
        "query is a tensor of layout torch.sparse_coo; attention needs a dense tensor.\n"
        "    Use query.to_dense(), or pad nested sequences and pass mask=Padding(lengths).",
    ),
    "ids-without-numbers": (
        lambda: regard.attend(
            SMALL, SMALL, mask=regard.Documents(torch.zeros(len(SMALL), device="meta").long())
        ),
        ValueError,
        "ids has tensors on the meta device; it needs their numbers, and there they have none.\n"
        "    Create them on another device.",
    ),
    "query-of-one-axis": (
        lambda: regard.attend(torch.zeros(4), SMALL),
        ValueError,
        "query has shape (4,); it must have at least two axes, "
        "(..., num_heads, tokens, head_dim).\n    For one token use query[None, :].",
    ),
    "key-of-no-tokens": (
        attending(3, 2, key=(0, 2)),
        ValueError,
        "key has shape (0, 2); every axis of (..., num_heads, tokens, head_dim) must be at least "
        "1.\n    Leave out empty sequences; PyTorch's attention gives an empty tensor, or zeros "
        "without keys.",
    ),
    "two-dtypes": (
        lambda: regard.attend(SMALL, SMALL.half()),
        TypeError,
        "key is float16 and query is float32; both must have one dtype.\n"
        "    Use key.to(query.dtype).",
    ),
    "two-devices": (
        lambda: regard.attend(SMALL, SMALL.to("meta")),
        ValueError,
        "key is on meta and query is on cpu; both must be on one device.\n"
        "    Use key.to(query.device).",
    ),
    "numbers-of-axes": (
        attending(2, 3, 4, key=(3, 4)),
        ValueError,
        "key has 2 axes and query has 3; the numbers must be equal.\n"
        f"    query (2, 3, 4) and key (3, 4) {READ_AS}",
    ),
    "head-dims": (
        attending(3, 4, key=(3, 5)),
        ValueError,
        "key has head_dim 5 and query has 4; they must be equal.\n"
        f"    query (3, 4) and key (3, 5) {READ_AS}",
    ),
    "key-transposed": (
        attending(3, 4, key=(4, 5)),
        ValueError,
        "key has head_dim 5 and query has 4; they must be equal.\n"
        "    query (3, 4) and key (4, 5): the key looks transposed; pass key.mT.",
    ),
    "batches": (
        attending(2, 8, 3, 4, key=(3, 8, 3, 4)),
        ValueError,
        "key has length 3 on axis 0 and query has 2; batch axes must be equal or 1.\n"
        f"    query (2, 8, 3, 4) and key (3, 8, 3, 4) {READ_AS}",
    ),
    "heads": (
        attending(2, 8, 128, 64, key=(2, 5, 128, 64)),
        ValueError,
        "key has 5 heads and query has 8; num_heads must be a multiple of num_kv_heads "
        "(grouped-query attention).\n"
        f"    query (2, 8, 128, 64) and key (2, 5, 128, 64) {READ_AS}",
    ),
    "layout": (
        attending(2, 128, 8, 64, key=(2, 100, 4, 64)),
        ValueError,
        "key has 100 heads and query has 128; num_heads must be a multiple of num_kv_heads "
        "(grouped-query attention).\n"
        "    query (2, 128, 8, 64) and key (2, 100, 4, 64) fit as (..., tokens, num_heads, "
        "head_dim): pass query.transpose(-3, -2) and key.transpose(-3, -2).",
    ),
    "scale-is-text": (
        attending(3, 2, key=(3, 2), scale="1"),
        TypeError,
        "scale is a str; it must be a number.\n"
        "    Leave it out for 1/sqrt(head_dim); pass 1.0 for no scaling.",
    ),
    "scale-is-true": (
        attending(3, 2, key=(3, 2), scale=True),
        TypeError,
        "scale is a bool; it must be a number.\n"
        "    Leave it out for 1/sqrt(head_dim); pass 1.0 for no scaling.",
    ),
    "scale-is-infinite": (
        attending(3, 2, key=(3, 2), scale=math.inf),
        ValueError,
        "scale is inf; it must be finite.\n    Leave it out for 1/sqrt(head_dim).",
    ),
    "bias-is-bool": (
        attending(3, 2, key=(3, 2), bias=torch.ones(3, dtype=torch.bool)),
        TypeError,
        "bias is bool; it must be a floating tensor, numbers added to the scores, or a position "
        "bias such as ALiBi(num_heads).\n"
        "    A bool tensor (True = may attend) goes to mask=, a callable to score_mod=.",
    ),
    "bias-is-a-number": (
        attending(3, 2, key=(3, 2), bias=1.0),
        TypeError,
        "bias is a float; it must be a floating tensor, numbers added to the scores, or a position "
        "bias such as ALiBi(num_heads).\n"
        "    A bool tensor (True = may attend) goes to mask=, a callable to score_mod=.",
    ),
    "bias-shape": (
        attending(3, 2, key=(3, 2), bias=torch.zeros(4)),
        ValueError,
        "bias has shape (4,); it must broadcast to (3, 3).\n    Its axes are aligned with the "
        "last axes of the matrix, (..., num_heads, q_len, kv_len).",
    ),
    "bias-device": (
        attending(3, 2, key=(3, 2), bias=torch.zeros(3, device="meta")),
        ValueError,
        "bias is on meta and the query is on cpu; both must be on one device.\n"
        "    Use bias.to(query.device).",
    ),
    "mask-of-numbers": (
        attending(3, 2, key=(3, 2), mask=torch.zeros(3)),
        TypeError,
        "mask is a float32 tensor; " + WHAT_A_MASK_IS,
    ),
    "mask-of-integers": (
        attending(3, 2, key=(3, 2), mask=torch.ones(3, dtype=torch.int64)),
        TypeError,
        "mask is an int64 tensor; " + WHAT_A_MASK_IS,
    ),
    "mask-is-text": (
        attending(3, 2, key=(3, 2), mask="causal"),
        TypeError,
        "mask is a str; " + WHAT_A_MASK_IS,
    ),
    "mask-is-a-class": (
        attending(3, 2, key=(3, 2), mask=regard.Causal),
        TypeError,
        "mask is the class Causal; it must be an instance.\n    Use Causal(...).",
    ),
    "keep-of-numbers": (
        lambda: regard.Keep(torch.zeros(3)),
        TypeError,
        "mask is a float32 tensor; " + WHAT_A_MASK_IS,
    ),
    "drop-of-a-list": (
        lambda: regard.Drop([True]),
        TypeError,
        "mask is a list; " + WHAT_A_MASK_IS,
    ),
    "and-with-a-number": (
        lambda: regard.Causal() & 3,
        TypeError,
        "mask is an int; " + WHAT_A_MASK_IS,
    ),
    "mask-of-padding": (
        attending(2, 8, 3, 4, key=(2, 8, 5, 4), mask=torch.ones(2, 5, dtype=torch.bool)),
        ValueError,
        "mask has shape (2, 5); it must broadcast to (2, 8, 3, 5).\n"
        "    For padding of shape (batch, kv_len) pass mask[:, None, None, :].",
    ),
    "mask-without-heads": (
        attending(2, 8, 3, 4, key=(2, 8, 5, 4), mask=torch.ones(2, 3, 5, dtype=torch.bool)),
        ValueError,
        "mask has shape (2, 3, 5); it must broadcast to (2, 8, 3, 5).\n"
        "    For one of shape (batch, q_len, kv_len) pass mask[:, None].",
    ),
    "mask-with-too-many-axes": (
        attending(3, 2, key=(3, 2), mask=torch.ones(1, 3, 3, dtype=torch.bool)),
        ValueError,
        "mask has shape (1, 3, 3); it must broadcast to (3, 3).\n    Its axes are aligned with "
        "the last axes of the matrix, (..., num_heads, q_len, kv_len).",
    ),
    "mask-device": (
        attending(3, 2, key=(3, 2), mask=torch.ones(3, dtype=torch.bool, device="meta")),
        ValueError,
        "mask is on meta and the query is on cpu; both must be on one device.\n"
        "    Use mask.to(query.device).",
    ),
    "align": (
        lambda: regard.Causal(align="left"),
        ValueError,
        "align is 'left'; it must be 'bottom-right' or 'top-left'.\n"
        "    PyTorch's is_causal=True is 'top-left'; a KV cache needs 'bottom-right'.",
    ),
    "rows-of-fewer-queries": (
        lambda: regard.attend(
            torch.zeros(2, 3, 1),
            torch.zeros(2, 5, 1),
            mask=regard.masks.RowSlice(regard.Causal(), 2, 4),
        ),
        ValueError,
        "mask has rows 2 to 3; a matrix of shape (2, 3, 5) has 3 queries.\n"
        "    Give as many queries as rows, or fewer.",
    ),
    "window-below-0": (
        lambda: regard.SlidingWindow(3, -1),
        ValueError,
        "SlidingWindow has left=3 and right=-1; both count keys and must be at least 0.\n"
        "    The query's own key is always included.",
    ),
    "window-of-a-fraction": (
        lambda: regard.SlidingWindow(1.5, 0),
        TypeError,
        "left is a float; it must be a whole number.\n    Pass an int, for example left=1.",
    ),
    "lengths-of-fractions": (
        lambda: regard.Padding([1.0]),
        TypeError,
        "lengths is float32; it must be whole numbers, one for each sequence.\n"
        "    For a bool mask of the keys use attention_mask[:, None, None, :].bool().",
    ),
    "lengths-of-bools": (
        lambda: regard.Padding(torch.tensor([True])),
        TypeError,
        "lengths is bool; it must be whole numbers, one for each sequence.\n"
        "    For a bool mask of the keys use attention_mask[:, None, None, :].bool().",
    ),
    "lengths-is-text": (
        lambda: regard.Padding("ab"),
        TypeError,
        "lengths is a str; it must be whole numbers, one for each sequence.\n"
        "    For a bool mask of the keys use attention_mask[:, None, None, :].bool().",
    ),
    "lengths-is-none": (
        lambda: regard.Padding(None),
        TypeError,
        "lengths is None; it must be whole numbers, one for each sequence.\n"
        "    For a bool mask of the keys use attention_mask[:, None, None, :].bool().",
    ),
    "too-many-lengths": (
        attending(2, 8, 3, 4, key=(2, 8, 5, 4), mask=regard.Padding([1, 2, 3])),
        ValueError,
        "lengths has shape (3,); a matrix of shape (2, 8, 3, 5) needs one number or (2,), one "
        "length for each sequence.\n    A single number applies to all sequences.",
    ),
    "no-lengths": (
        attending(2, 8, 3, 4, key=(2, 8, 5, 4), mask=regard.Padding([])),
        ValueError,
        "lengths has shape (0,); a matrix of shape (2, 8, 3, 5) needs one number or (2,), one "
        "length for each sequence.\n    A single number applies to all sequences.",
    ),
    "lengths-without-a-batch": (
        attending(3, 2, key=(3, 2), mask=regard.Padding([3])),
        ValueError,
        "lengths has shape (1,); a matrix of shape (3, 3) needs one number, one length for each "
        "sequence.\n    A single number applies to all sequences.",
    ),
    "length-beyond-the-keys": (
        attending(2, 8, 3, 4, key=(2, 8, 5, 4), mask=regard.Padding([1, 6])),
        ValueError,
        "lengths has 6; each must be between 0 and kv_len = 5.\n"
        "    A length counts the first keys of one sequence.",
    ),
    "scores-is-a-list": (
        lambda: regard.AttentionMatrix.from_scores([[1.0]]),
        TypeError,
        "scores is a list; it must be a tensor of shape (..., num_heads, q_len, kv_len).\n"
        "    Use torch.as_tensor(scores).",
    ),
    "weights-that-sum-to-2": (
        lambda: regard.AttentionMatrix.from_weights(torch.tensor([[0.5, 0.5], [1.0, 1.0]])),
        ValueError,
        "weights (2, 2) has row (1,) with the sum 2; weights must be at least 0 and each row must "
        "sum to 1 within 1.3e-06, for float32, or be all 0.\n"
        "    Divide each row by its sum, or pass what went into the softmax to from_scores.",
    ),
    "weights-with-the-largest-error-last": (
        lambda: regard.AttentionMatrix.from_weights(
            torch.tensor([[[0.5, 0.515], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.546875]]]).bfloat16()
        ),
        ValueError,
        "weights (2, 2, 2) has row (1, 1) with the sum 1.04688; weights must be at least 0 and "
        "each row must sum to 1 within 0.012, for bfloat16, or be all 0.\n"
        "    Divide each row by its sum, or pass what went into the softmax to from_scores.",
    ),
    "weights-below-0": (
        lambda: regard.AttentionMatrix.from_weights(torch.tensor([[1.5, -0.5]])),
        ValueError,
        "weights (1, 2) has row (0,) with the number -0.5; weights must be at least 0 and each row "
        "must sum to 1 within 1.3e-06, for float32, or be all 0.\n"
        "    Divide each row by its sum, or pass what went into the softmax to from_scores.",
    ),
    "softmax-over-the-queries": (
        lambda: regard.AttentionMatrix.from_weights(
            torch.tensor([[0.9, 0.8, 0.9], [0.1, 0.2, 0.1]])
        ),
        ValueError,
        "weights (2, 3) has row (0,) with the sum 2.6; weights must be at least 0 and each row "
        "must sum to 1 within 1.4e-06, for float32, or be all 0.\n"
        "    Its columns sum to 1: the softmax ran over the queries. Pass weights.mT.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_call_says_what_came_and_what_to_do(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text
