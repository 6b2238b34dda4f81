"""Rows of weights that a model has made 0 as a whole, after the softmax: they have no key."""

import torch
from torch import Tensor

from regard.masks import Keep
from regard.matrix.attention_matrix import AttentionMatrix

__all__ = ["without_rows"]


def without_rows(matrix: AttentionMatrix, emptied: Tensor | None) -> AttentionMatrix:
    """The same attention, with rows hidden from all keys.

    Args:
        matrix: (..., num_heads, q_len, kv_len).
        emptied: True for the rows to hide, (..., num_heads, q_len, 1); None: none.

    Returns:
        The matrix itself where its own mask hides these rows already.

    Example:
        >>> import torch, regard
        >>> from regard.capture.empty_rows import without_rows
        >>> A = regard.attend(torch.zeros(3, 1), torch.zeros(2, 1))
        >>> without_rows(A, torch.tensor([[False], [True], [False]])).sum(-1)
        tensor([1., 0., 1.])
    """
    if emptied is None or not bool((emptied & (matrix.logsumexp() > -torch.inf)[..., None]).any()):
        return matrix
    keep = Keep(_narrowed(~emptied))
    mask = keep if matrix.mask is None else matrix.mask & keep
    return AttentionMatrix(matrix.source, mask.bind(matrix.shape, matrix.device))


def _narrowed(rows: Tensor) -> Tensor:
    """A copy with size 1 along each axis along which they are alike: a head's, for its queries."""
    for axis in range(rows.ndim):
        first = rows.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(rows), rows):
            rows = first
    return rows.clone(memory_format=torch.contiguous_format)
