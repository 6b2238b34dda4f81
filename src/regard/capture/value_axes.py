"""The axes of the value tensor that hand-written attention weights are multiplied by."""

from dataclasses import dataclass

from torch import Tensor

from regard.capture.element_axes import Axes, contiguous, translated

__all__ = ["Meeting"]


@dataclass(eq=False, slots=True)
class Meeting:
    """The axes of weights that have not been multiplied by a value yet.

    Attributes:
        axes: the axes of the attention matrix, with their strides in the output of the softmax.
        are_joined: True if the last two axes of heads are one axis in the attention matrix.
    """

    axes: Axes
    are_joined: bool = False

    @classmethod
    def of(cls, weights: Tensor, seen: Axes, matrix: Axes, ndim: int) -> "Meeting | None":
        """Return the axes of the weights from a softmax; None if they cannot be determined.

        ``seen`` are the axes of the weights and ``matrix`` those of the attention matrix, which has
        ``ndim`` axes. Both have strides in the product of query and key.
        """
        basis = zip(seen.sizes, seen.places, contiguous(weights.shape), strict=True)
        found = translated(basis, matrix.sizes, matrix.places, matrix.start - seen.start)
        if found is None:
            return None
        axes = Axes(matrix.sizes, matrix.strides, matrix.offset, *found)
        return cls(axes, are_joined=ndim < len(matrix.sizes))

    def rows(self, rows: Tensor, seen: Axes) -> Tensor | None:
        """Return a copy with one element for each row of the matrix, (..., num_heads, q_len, 1).

        ``rows`` has one element for each row of the weights, whose axes are ``seen``. The result is
        None if ``rows`` does not cover all rows of the matrix.
        """
        view = seen.arranged(rows, self.axes)
        if view is None or view.shape[-1] > 1:
            return None
        if self.are_joined:
            heads = self.axes.sizes[-4:-2]
            view = view.expand(*view.shape[:-4], *heads, *view.shape[-2:]).flatten(-4, -3)
        return view.clone()

    def value(self, weights: Axes, factor: Tensor) -> Tensor | None:
        """Return a view of the value, (..., num_kv_heads, kv_len, head_dim), on the matrix's axes.

        An axis along which the value is constant has size 1. ``weights`` are the axes (batch, rows,
        keys) of the weights, ``factor`` is the other factor, (batch, keys, head_dim). The result is
        None if no view has these axes.
        """
        operand = factor.detach()[:, None]
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
