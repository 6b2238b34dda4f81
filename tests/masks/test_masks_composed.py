"""Masks joined at random: the laws of logic, and what they say of rows against what they allow."""

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard
from cases import MASKS
from regard.masks import as_mask
from regard.scores.box import Box

CPU = torch.device("cpu")
KINDS = sorted(MASKS.keys() - {"none"})


@st.composite
def shapes(draw: st.DrawFn) -> torch.Size:
    """Of a matrix with up to three leading axes."""
    leading = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 3)))]
    return torch.Size((*leading, draw(st.integers(1, 11)), draw(st.integers(1, 11))))


@st.composite
def masks(draw: st.DrawFn, shape: torch.Size, depth: int = 3) -> tuple[regard.Mask, Tensor]:
    """A mask with up to eight parts, and what it allows by the oracle."""
    step = draw(st.sampled_from(["kind", "and", "or", "not"])) if depth else "kind"
    if step == "kind":
        mask, allowed = MASKS[draw(st.sampled_from(KINDS))]
        right = allowed(shape)
        assert right is not None
        return as_mask(mask(shape)), right.expand(shape)
    first, of_first = draw(masks(shape, depth - 1))
    if step == "not":
        return ~first, ~of_first
    second, of_second = draw(masks(shape, depth - 1))
    if step == "and":
        return first & second, of_first & of_second
    return first | second, of_first | of_second


@st.composite
def boxes(draw: st.DrawFn, shape: torch.Size) -> Box:
    """Any part of the matrix that is not empty."""
    ends = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1)))) for n in shape]
    *leading, rows, columns = (slice(first, last + 1) for first, last in ends)
    return Box(tuple(leading), rows, columns)


@st.composite
def bound_masks(draw: st.DrawFn) -> tuple[regard.Mask, Tensor]:
    """A mask that is fitted to a matrix, and what it allows; their shape is that of the tensor."""
    shape = draw(shapes())
    mask, right = draw(masks(shape))
    return mask.bind(shape, CPU), right


@given(drawn=bound_masks(), data=st.data())
def test_a_block_of_a_mask_is_that_part_of_it(
    drawn: tuple[regard.Mask, Tensor], data: st.DataObject
) -> None:
    mask, right = drawn
    box = data.draw(boxes(right.shape))
    part = right[box.at_both]
    assert torch.equal(mask.block(box, right.shape, CPU).expand(part.shape), part)


@given(drawn=bound_masks(), data=st.data())
def test_what_a_mask_says_of_rows_is_true(
    drawn: tuple[regard.Mask, Tensor], data: st.DataObject
) -> None:
    mask, right = drawn
    box = data.draw(boxes(right.shape))
    some, every = mask.key_bounds(box.leading, box.rows, right.shape)
    part = right[(*box.leading, box.rows)]
    assert 0 <= some.start <= some.stop <= right.shape[-1]
    assert not every.stop > every.start or some.start <= every.start <= every.stop <= some.stop
    assert bool(part[..., every].all())
    assert int(part[..., some].sum()) == int(part.sum())


@given(data=st.data())
def test_masks_obey_de_morgan(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    first, _ = data.draw(masks(shape, 1))
    second, _ = data.draw(masks(shape, 1))
    assert torch.equal((~(first & second)).to_dense(*shape), (~first | ~second).to_dense(*shape))
    assert torch.equal((~(first | second)).to_dense(*shape), (~first & ~second).to_dense(*shape))


WRITTEN = [regard.Causal(), regard.SlidingWindow(1, 0), regard.PrefixLM(2)]
sentences = st.recursive(
    st.sampled_from(WRITTEN),
    lambda parts: (
        parts.map(operator.invert)
        | st.builds(operator.and_, parts, parts)
        | st.builds(operator.or_, parts, parts)
    ),
    max_leaves=5,
)


@given(mask=sentences)
def test_what_a_mask_prints_can_be_read_again(mask: regard.Mask) -> None:
    read = eval(repr(mask), vars(regard).copy())
    assert torch.equal(read.to_dense(4, 5), mask.to_dense(4, 5))


@given(data=st.data())
def test_a_part_of_a_matrix_has_that_part_of_the_mask(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    mask, right = data.draw(masks(shape))
    matrix = regard.AttentionMatrix.from_scores(torch.zeros(shape), mask=mask)
    parts = [st.integers(0, n - 1) for n in shape[:-2]]
    index = tuple(data.draw(at | at.map(lambda start: slice(start, None))) for at in parts)
    part = matrix[(*index, ...)]
    assert part.mask is not None
    assert torch.equal(part.mask.to_dense(), right[index])


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda: regard.Causal() and regard.Padding(3), id="and"),
        pytest.param(lambda: regard.Causal() or regard.Padding(3), id="or"),
        pytest.param(lambda: not regard.Causal(), id="not"),
    ],
)
def test_masks_are_not_joined_with_words(wrong: Callable[[], object]) -> None:
    with pytest.raises(TypeError) as caught:
        wrong()
    assert str(caught.value) == (
        "Causal() is a mask, neither true nor false.\n"
        "    Join masks with & (both allow), | (one allows) and ~, not with and, or, not."
    )


@given(drawn=bound_masks())
def test_a_dense_mask_is_what_the_mask_allows(drawn: tuple[regard.Mask, Tensor]) -> None:
    mask, right = drawn
    assert torch.equal(mask.to_dense(*right.shape), right)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_to_what_a_mask_allows_and_nowhere_else(kind: str) -> None:
    shape = torch.Size((2, 2, 5, 6))
    mask, allowed = MASKS[kind]
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    by_oracle = scores.detach().requires_grad_()
    weigh: Callable[[Tensor], Tensor] = torch.cos  # so that no gradient is 0 by symmetry
    matrix = regard.AttentionMatrix.from_scores(scores, mask=mask(shape))
    (weigh(matrix.entropy())).sum().backward()
    dense = oracle.softmax(by_oracle, allowed(shape))
    weigh(oracle.entropy_from_scores(dense)).sum().backward()
    assert scores.grad is not None
    assert by_oracle.grad is not None
    oracle.assert_close(scores.grad, by_oracle.grad, 1e-12)  # two orders of a few float64 sums
