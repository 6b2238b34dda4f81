"""The memory of tensors that is still allocated after a computation."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Remembers the memory of every result of an operation, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[tuple[StorageWeakRef, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._storages.append((StorageWeakRef(storage), storage.nbytes(), str(func)))
        return result

    def operations(self, least: int) -> list[str]:
        """Return the operations with a result of at least this many bytes that is still alive."""
        return [name for ref, size, name in self._storages if size >= least and not ref.expired()]
