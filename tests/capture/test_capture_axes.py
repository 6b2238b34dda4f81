"""The axes of a view follow from its strides, exactly as from its indices."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.capture.element_axes import Axes, contiguous, translated

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def viewed(tensor: Tensor, draw: st.DrawFn) -> Tensor:
    """Return a view of a view of a tensor, and so on."""
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, tensor.ndim - 1))
        size = tensor.shape[axis]
        kind = draw(st.sampled_from(["permute", "split", "slice", "select", "unsqueeze", "merge"]))
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        elif kind == "split" and size % 2 == 0:
            tensor = tensor.unflatten(axis, (size // 2, 2))
        elif kind == "slice":
            first = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(axis, first, draw(st.integers(1, size - first)))
        elif kind == "select" and tensor.ndim > 1:
            tensor = tensor.select(axis, size - 1)
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(axis)
        elif kind == "merge" and axis and tensor.stride(axis - 1) == size * tensor.stride(axis):
            tensor = tensor.flatten(axis - 1, axis)
    return tensor


@given(SIZES, st.data())
def test_steps_of_a_view_lead_to_the_indices_of_its_elements(
    sizes: list[int], data: st.DataObject
) -> None:
    """The elements are their own indices, in a storage of another order."""
    order = data.draw(st.permutations(range(len(sizes))))
    indices = torch.arange(torch.Size(sizes).numel()).view(sizes)
    stored = indices.permute(order).contiguous()
    axes = Axes.of(stored, tuple(indices.stride(axis) for axis in order))
    view = viewed(stored, data.draw)
    seen = axes.of_view(view)
    if seen is not None:
        steps = [torch.arange(n) * step for n, step in zip(view.shape, seen.steps, strict=True)]
        shown = torch.full((), seen.first)
        for axis, step in enumerate(steps):
            shown = shown + step.view(-1, *(1,) * (view.ndim - 1 - axis))
        assert torch.equal(shown, view)


@given(SIZES, st.data())
def test_views_that_keep_each_axis_whole_are_always_known(
    sizes: list[int], data: st.DataObject
) -> None:
    stored = torch.zeros(sizes)
    axes = Axes.of(stored, contiguous(sizes))
    assert axes.of_view(stored.permute(data.draw(st.permutations(range(len(sizes)))))) is not None


def test_axes_that_are_not_contiguous_cannot_be_merged() -> None:
    stored = torch.zeros(2, 3, 4)
    axes = Axes.of(stored, (4, 8, 1))
    assert axes.of_view(stored.flatten(0, 1)) is None
    assert axes.of_view(stored.flatten(1, 2)) is None


def test_a_view_beyond_the_tensor_is_not_known() -> None:
    assert translated([(2, 3, 1)], [3], [3], 0) is None
    assert translated([(2, 3, 1)], [2], [3], 3) is None
    assert translated([(2, 3, 1)], [2], [2], 0) is None


def test_an_operand_is_arranged_as_the_scores_to_which_it_was_added() -> None:
    bias = torch.randn(3, 1, 5)
    met = Axes.of(torch.zeros(2, 3, 4, 5), (60, 20, 5, 1))
    final = Axes((3, 2, 5, 4), (0,) * 4, 0, (20, 60, 1, 5))
    arranged = met.arranged(bias, final)
    assert torch.equal(arranged, bias.permute(0, 2, 1)[:, None])
    assert arranged.data_ptr() == bias.data_ptr()
