"""Masks as one sees them: drawings, dense tensors; and what is wrong with a mask, word for word."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard

X = torch.zeros(2, 3, 4, 1)


def drawn(mask: regard.Mask, *shape: int) -> str:
    """What a prompt shows for ``A.mask``."""
    return repr(regard.AttentionMatrix.from_scores(torch.zeros(shape), mask=mask).mask)


def test_the_mask_of_a_small_matrix_is_drawn() -> None:
    assert drawn(regard.Causal() & regard.Documents([0, 0, 0, 1]), 3, 4) == (
        "Causal() & Documents([0, 0, 0, 1])\n"
        "3 x 4: queries down, keys across, ■ may attend\n"
        "■ ■ □ □\n"
        "■ ■ ■ □\n"
        "□ □ □ ■"
    )


def test_of_several_matrices_the_first_is_drawn() -> None:
    assert drawn(regard.Padding([1, 2]), 2, 3, 1, 2) == (
        "Padding([1, 2])\n1 x 2 of [0, 0]: queries down, keys across, ■ may attend\n■ □"
    )


def test_a_part_of_a_matrix_draws_that_part() -> None:
    matrix = regard.AttentionMatrix.from_scores(
        torch.zeros(2, 3, 1, 2), mask=regard.Padding([1, 2])
    )
    assert repr(matrix[1, 2].mask).splitlines()[1:] == [
        "1 x 2: queries down, keys across, ■ may attend",
        "■ ■",
    ]


@pytest.mark.parametrize("shape", [(33, 4), (4, 65)], ids=str)
def test_the_mask_of_a_larger_matrix_is_not_drawn(shape: tuple[int, int]) -> None:
    assert drawn(regard.Causal(), *shape) == "Causal()"


def test_a_matrix_names_its_mask_in_its_one_line() -> None:
    matrix = regard.attend(X, X, mask=regard.Causal())
    assert repr(matrix).endswith("mask=Causal())")


def test_the_mask_of_a_matrix_has_its_shape() -> None:
    mask = regard.attend(X, X, mask=regard.Padding([4, 2])).mask
    assert mask is not None
    assert mask.to_dense().shape == (2, 3, 4, 4)


def test_a_mask_by_itself_is_made_dense_for_a_shape() -> None:
    assert regard.Padding(1).to_dense(1, 2).tolist() == [[True, False]]


def test_a_long_dense_mask_is_made_a_few_rows_at_a_time() -> None:
    assert int(regard.Causal().to_dense(2100, 2100).sum()) == 2100 * 2101 // 2


def returning(answer: object) -> Callable[..., Tensor]:
    return lambda _b, _h, _q_idx, _kv_idx: answer  # type: ignore[return-value]


def branching(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx if q_idx > 1 else kv_idx == 0


def with_mask(mask: object, x: Tensor = X) -> Callable[[], object]:
    return lambda: regard.attend(x, x, mask=mask)  # type: ignore[arg-type]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def block_mask(
    batch: int | None, heads: int | None, q_len: int, kv_len: int | None = None
) -> object:
    return create_block_mask(causal, batch, heads, q_len, kv_len or q_len, device="cpu")


IT_IS_CALLED = (
    "    It is called as mask_mod(b, h, q_idx, kv_idx) with scalar tensors and must return "
    "True (may attend) or False, one bool. Choose with torch.where, not with if."
)
EXPECTED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "mask-mod-raises": (
        with_mask(lambda _b, _h, q_idx, kv_idx: torch.tensor([0, 1])[q_idx] == kv_idx),
        ValueError,
        "mask_mod raised IndexError: index 3 is out of bounds for dimension 0 with size 2\n"
        + IT_IS_CALLED,
    ),
    "mask-mod-of-numbers": (
        with_mask(returning(torch.tensor(1.0))),
        TypeError,
        "mask_mod returns float32; it must return True (may attend) or False, one bool.\n"
        "    A score_mod(score, b, h, q_idx, kv_idx) goes to score_mod=.",
    ),
    "mask-mod-of-a-row": (
        with_mask(returning(torch.ones(4, dtype=torch.bool))),
        ValueError,
        "mask_mod returns a tensor of shape (4,); it must return True (may attend) or False, "
        "one bool, as a tensor.\n"
        "    It is called as mask_mod(b, h, q_idx, kv_idx) with scalar tensors.",
    ),
    "mask-mod-of-a-bool": (
        with_mask(returning(True)),
        ValueError,
        "mask_mod returns a bool; it must return True (may attend) or False, one bool, as a "
        "tensor.\n    It is called as mask_mod(b, h, q_idx, kv_idx) with scalar tensors.",
    ),
    "score-mod": (
        with_mask(lambda score, _b, _h, _q_idx, _kv_idx: score),
        TypeError,
        "mask_mod takes (score, _b, _h, _q_idx, _kv_idx); it must take 4 scalar tensors, "
        "mask_mod(b, h, q_idx, kv_idx).\n"
        "    A score_mod(score, b, h, q_idx, kv_idx) goes to score_mod=.",
    ),
    "mask-mod-inside": (
        with_mask(regard.Causal() & ~regard.MaskMod(returning(None))),
        ValueError,
        "mask_mod returns None; it must return True (may attend) or False, one bool, as a "
        "tensor.\n    It is called as mask_mod(b, h, q_idx, kv_idx) with scalar tensors.",
    ),
    "mask-mod-of-another-matrix": (
        lambda: regard.attend(X, X, mask=regard.attend(X[:, 0], X[:, 0], mask=causal).mask),
        ValueError,
        "mask has causal bound to another matrix; it does not fit the shape (2, 3, 4, 4).\n"
        "    Pass the original mask_mod.",
    ),
    "block-mask-of-another-length": (
        with_mask(block_mask(None, None, 8, 6)),
        ValueError,
        "mask is a BlockMask of q_len 8 and kv_len 6; the matrix has q_len 4 and kv_len 4.\n"
        "    Use create_block_mask with these lengths, or pass the mask_mod as mask=.",
    ),
    "block-mask-of-another-batch": (
        with_mask(block_mask(5, 3, 4)),
        ValueError,
        "mask is a BlockMask of shape (5, 3, 4, 4); it must broadcast to (batch, num_heads, "
        "q_len, kv_len), (2, 3, 4, 4).\n    Its batch and num_heads may be 1.",
    ),
    "block-mask-of-heads-for-none": (
        with_mask(block_mask(1, 3, 4), X[0, 0]),
        ValueError,
        "mask is a BlockMask of shape (1, 3, 4, 4); it must broadcast to (batch, num_heads, "
        "q_len, kv_len), (1, 1, 4, 4).\n    Its batch and num_heads may be 1.",
    ),
    "documents-of-numbers": (
        lambda: regard.Documents([0.5, 1.0]),
        TypeError,
        "ids is float32; it must be whole numbers, the document of each key.\n"
        "    For example Documents([0, 0, 0, 1, 1]).",
    ),
    "documents-of-text": (
        lambda: regard.Documents("aab"),  # type: ignore[arg-type]
        TypeError,
        "ids is a str; it must be whole numbers, the document of each key.\n"
        "    For example Documents([0, 0, 0, 1, 1]).",
    ),
    "documents-of-another-length": (
        with_mask(regard.Documents([0, 0, 1])),
        ValueError,
        "ids has shape (3,); a matrix of shape (2, 3, 4, 4) needs (4,) or (2, 4), the document of "
        "each key.\n    Each query has the document of its aligned key.",
    ),
    "documents-without-a-batch": (
        with_mask(regard.Documents([[0, 0, 1, 1], [0, 1, 1, 1]]), X[0, 0]),
        ValueError,
        "ids has shape (2, 4); a matrix of shape (4, 4) needs (4,), the document of each key.\n"
        "    Each query has the document of its aligned key.",
    ),
    "prefix-too-long": (
        with_mask(regard.PrefixLM([1, 6])),
        ValueError,
        "lengths has 6; each must be between 0 and kv_len = 4.\n"
        "    A length counts the first keys of one sequence.",
    ),
    "keep-of-a-mask": (
        lambda: regard.Keep(regard.Causal()),  # type: ignore[arg-type]
        TypeError,
        "mask is a Causal; a mask is a bool tensor (True = may attend), one of regard.masks, or a "
        "mask_mod or BlockMask of FlexAttention.\n    To add numbers to the scores, pass bias=. "
        "For nn.MultiheadAttention's convention (True = may not), use Drop(mask).",
    ),
    "dense-without-a-shape": (
        lambda: regard.Causal().to_dense(),
        ValueError,
        "to_dense() has shape (); it must have q_len and kv_len, at least 1.\n"
        "    Use to_dense(q_len, kv_len), or the mask of a matrix, A.mask.to_dense().",
    ),
    "dense-of-nothing": (
        lambda: regard.Causal().to_dense(0, 3),
        ValueError,
        "to_dense() has shape (0, 3); it must have q_len and kv_len, at least 1.\n"
        "    Use to_dense(q_len, kv_len), or the mask of a matrix, A.mask.to_dense().",
    ),
    "dense-too-large": (
        lambda: regard.Causal().to_dense(2**17, 2**17),
        MemoryError,
        "to_dense() would make (131072, 131072) bool = 16.0 GiB; the limit is 4.0 GiB.\n"
        "    Use to_block_mask(), or pass limit=None to to_dense().",
    ),
    "block-mask-of-five-axes": (
        lambda: regard.Causal().to_block_mask(2, 2, 2, 4, 4),
        ValueError,
        "to_block_mask() has shape (2, 2, 2, 4, 4); FlexAttention needs (batch, num_heads, q_len, "
        "kv_len).\n    Take the mask of a part of the matrix, A[0].mask.",
    ),
    "block-mask-of-no-size": (
        lambda: regard.Causal().to_block_mask(4, 4, block_size=0),
        ValueError,
        "block_size is 0; it must be at least 1.\n    Pass for example block_size=1.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), EXPECTED.values(), ids=EXPECTED)
def test_a_wrong_mask_says_what_is_wrong(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text


def test_a_mask_mod_with_an_if_says_how_to_write_it() -> None:
    with pytest.raises(ValueError, match=r"mask_mod raised RuntimeError: vmap: ") as caught:
        regard.attend(X, X, mask=branching)
    assert str(caught.value).endswith(IT_IS_CALLED)
