"""Detection of a merged axis (num_heads * batch) in which heads come before the batch."""

from typing import cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.capture.contractions import Product
from regard.capture.provenance import storage_key
from regard.tracing.tracer import Operation

__all__ = ["MergeOrder"]


class MergeOrder:
    """The storages that a copy or a concatenation filled with heads before the batch.

    The shape (batch * num_heads, tokens, head_dim) does not show whether batch or heads come first.
    Heads come first in two cases. The heads were concatenated along the first axis. Or the model
    copied a transposed tensor, whose second axis has the larger stride.
    """

    def __init__(self) -> None:
        # The storage, the size of its merged axis, and head_dim.
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._room = 64

    def note_join(self, operation: Operation) -> None:
        """Record the output if several tensors were concatenated along the first axis."""
        if operation.func not in _ALONG:
            return
        tensors = cast("list[Tensor]", operation.args[0])
        dim = operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else 0)
        output = operation.output
        if dim == 0 and len(tensors) > 1 and output.ndim in (3, 4):
            self._note(output, output.shape[:-2].numel(), output.shape[-1])

    def note_copy(self, operation: Operation) -> None:
        """Record the output if the copied tensor has its first two axes transposed."""
        source = operation.args[0]
        if source.layout != torch.strided or source.ndim != 4 or source.is_nested:
            return
        (batch, heads), (further, near) = source.shape[:2], source.stride()[:2]
        if min(batch, heads) > 1 and 0 < further < near:
            self._note(operation.output, batch * heads, source.shape[-1])

    def is_heads_first(self, product: Product) -> bool:
        """Return True if the query or key of a product may have heads before the batch."""
        for factor in (product.left, product.right):
            known = self._storages.get(storage_key(factor) or 0)
            if known is not None and known[1:] == (factor.shape[0], factor.shape[-1]):
                return True
        return False

    def _note(self, tensor: object, merged: int, width: int) -> None:
        if not isinstance(tensor, Tensor) or storage_key(tensor) is None:
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        self._storages[reference.cdata] = (reference, merged, width)
        if len(self._storages) > self._room:
            alive = self._storages.items()
            self._storages = {key: each for key, each in alive if not each[0].expired()}
            self._room = 2 * len(self._storages) + 64


_ALONG = (torch.ops.aten.stack.default, torch.ops.aten.cat.default)
