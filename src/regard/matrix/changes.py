"""Changes of tensors in place, as far as PyTorch counts them."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Changes:
    """Tensors with the number of times that each was changed in place.

    PyTorch counts no changes of tensors of inference mode, and none while it compiles.

    Args:
        tensors: the first tensors.

    Example:
        >>> import torch
        >>> from regard.matrix.changes import Changes
        >>> x = torch.zeros(2)
        >>> changes = Changes([x])
        >>> x += 1
        >>> bool(changes)
        True
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._counts: list[tuple[Tensor, int]] = []
        self.watch(*tensors)

    def __bool__(self) -> bool:
        """Return True if a tensor was changed since it was added."""
        return any(tensor._version > count for tensor, count in self._counts)

    def __getstate__(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._counts]

    def __setstate__(self, tensors: list[Tensor]) -> None:
        """Count anew: PyTorch counts the changes of a copy from its own beginning."""
        self.__init__(tensors)

    def watch(self, *tensors: Tensor) -> None:
        """Add tensors."""
        if not torch.compiler.is_compiling():
            self._counts += [(each, each._version) for each in tensors if not each.is_inference()]

    def copy(self) -> "Changes":
        """Return the same tensors with the same counts; ``forget`` changes one of both alone."""
        changes = Changes()
        changes._counts = list(self._counts)
        return changes

    def forget(self, tensor: Tensor) -> None:
        """Remove a tensor."""
        self._counts = [each for each in self._counts if each[0] is not tensor]
