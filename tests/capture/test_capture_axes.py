"""Axes are told by strides exactly as indices would tell them."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.capture.element_axes import Axes, contiguous, translated

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def viewed(tensor: Tensor, draw: st.DrawFn) -> Tensor:
    """Some views of a tensor, one after another."""
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
def test_places_of_a_view_are_the_indices_that_it_shows(
    sizes: list[int], data: st.DataObject
) -> None:
    """A tensor whose elements are their own places, in a storage of another order."""
    order = data.draw(st.permutations(range(len(sizes))))
    places = torch.arange(torch.Size(sizes).numel()).view(sizes)
    stored = places.permute(order).contiguous()
    axes = Axes.of(stored, tuple(places.stride(axis) for axis in order))
    view = viewed(stored, data.draw)
    seen = axes.of_view(view)
    if seen is not None:
        steps = [torch.arange(n) * place for n, place in zip(view.shape, seen.places, strict=True)]
        shown = torch.full((), seen.start)
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


def test_axes_that_do_not_run_on_into_each_other_have_no_places_as_one() -> None:
    stored = torch.zeros(2, 3, 4)
    axes = Axes.of(stored, (4, 8, 1))
    assert axes.of_view(stored.flatten(0, 1)) is None
    assert axes.of_view(stored.flatten(1, 2)) is None


def test_a_view_beyond_the_tensor_is_not_known() -> None:
    assert translated([(2, 3, 1)], [3], [3], 0) is None
    assert translated([(2, 3, 1)], [2], [3], 3) is None
    assert translated([(2, 3, 1)], [2], [2], 0) is None


def test_an_operand_is_arranged_as_the_scores_that_it_met() -> None:
    bias = torch.randn(3, 1, 5)
    met = Axes.of(torch.zeros(2, 3, 4, 5), (60, 20, 5, 1))
    final = Axes((3, 2, 5, 4), (0,) * 4, 0, (20, 60, 1, 5))
    arranged = met.arranged(bias, final)
    assert torch.equal(arranged, bias.permute(0, 2, 1)[:, None])
    assert arranged.data_ptr() == bias.data_ptr()
