"""The axes of the value that hand-written weights are multiplied with."""

from dataclasses import dataclass

from torch import Tensor

from regard.capture.contractions import Written
from regard.capture.element_axes import Axes, contiguous, translated

__all__ = ["Meeting"]


@dataclass(eq=False, slots=True)
class Meeting:
    """The axes of weights that have yet to meet their value.

    Attributes:
        axes: of the matrix, in the weights as their softmax gave them.
        are_joined: whether its last two axes of heads are one in the matrix.
    """

    axes: Axes
    are_joined: bool = False

    @classmethod
    def of(cls, weights: Tensor, seen: Axes, matrix: Axes, ndim: int) -> "Meeting | None":
        """Return the meeting of weights that a softmax has given; None where it cannot be told.

        Args:
            weights: what the softmax gave.
            seen: their axes in the product of query and key.
            matrix: the axes of the matrix there.
            ndim: how many axes the matrix has.
        """
        basis = zip(seen.sizes, seen.places, contiguous(weights.shape), strict=True)
        found = translated(basis, matrix.sizes, matrix.places, matrix.start - seen.start)
        if found is None:
            return None
        axes = Axes(matrix.sizes, matrix.strides, matrix.offset, *found)
        return cls(axes, are_joined=ndim < len(matrix.sizes))

    def rows(self, rows: Tensor, seen: Axes) -> Tensor | None:
        """Return numbers of some rows of the weights, as the matrix has its rows.

        Args:
            rows: a number each, of size 1 along the keys.
            seen: the axes of the weights, in what the softmax gave.

        Returns:
            (..., num_heads, q_len, 1), a copy; None where these are not all rows of the matrix.
        """
        view = seen.arranged(rows, self.axes)
        if view is None or view.shape[-1] > 1:
            return None
        if self.are_joined:
            heads = self.axes.sizes[-4:-2]
            view = view.expand(*view.shape[:-4], *heads, *view.shape[-2:]).flatten(-4, -3)
        return view.clone()

    def value(self, weights: Axes, product: Written, tensor: Tensor) -> Tensor | None:
        """Return the value that weights are multiplied with, as the matrix meets it.

        Args:
            weights: the axes of the factor that holds them, in what the softmax gave.
            product: of the two.
            tensor: that factor.

        Returns:
            (..., num_kv_heads, kv_len, head_dim), where an axis along which it stays the same has
            size 1; None where no view is that.
        """
        letters, value, of_value = product.seen_from(tensor)
        shared = [axis for axis in letters if axis in of_value]
        own = [axis for axis in of_value if axis not in letters]
        if product.alpha != 1 or len(product.labels.summed) != 1 or len({*of_value}) < value.ndim:
            return None
        operand = value.detach().permute([of_value.index(axis) for axis in (*shared, *own)])
        operand = operand.flatten(len(shared)) if own else operand[..., None]
        places = (slice(None) if axis in shared else None for axis in letters)
        operand = operand[(*places, slice(None))]
        sizes = zip(operand.shape[:-1], weights.sizes, strict=True)
        if any(n not in (1, whole) for n, whole in sizes):
            return None
        view = weights.arranged(operand[..., 0], self.axes)
        if view is None or view.shape[-2] > 1:
            return None
        laid = operand.as_strided(
            (*view.shape[:-2], view.shape[-1], operand.shape[-1]),
            (*view.stride()[:-2], view.stride(-1), operand.stride(-1)),
            view.storage_offset(),
        )
        laid = laid.expand(*laid.shape[:-2], self.axes.sizes[-1], laid.shape[-1])
        if not self.are_joined:
            return laid
        if laid.shape[-3] == 1:
            return laid.squeeze(-3)
        return laid.expand(*laid.shape[:-4], *self.axes.sizes[-4:-2], *laid.shape[-2:]).flatten(
            -4, -3
        )
