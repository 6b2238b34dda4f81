"""Facts about the storages of a running model, such as which of them are parameters.

A storage is known by a weak reference. The reference keeps the address from being used again, so
that a new tensor is never taken for one that was freed, as with parameters that a hook offloads.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from regard.tracing.tracer import Operation

_Fact = TypeVar("_Fact")


class Storages(Generic[_Fact]):
    """Facts about storages; a fact is forgotten after its storage was freed."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[StorageWeakRef, _Fact]] = {}
        self._room = 64

    def __bool__(self) -> bool:
        return bool(self._facts)

    def __iter__(self) -> Iterator[_Fact]:
        return (fact for _, fact in self._facts.values())

    def of(self, tensor: object) -> _Fact | None:
        """Return the fact about a tensor's storage; None without one."""
        if not self._facts or not isinstance(tensor, Tensor):
            return None
        entry = self._facts.get(cast(int, storage_key(tensor)))
        return None if entry is None else entry[1]

    def put(self, tensor: Tensor, fact: _Fact) -> None:
        """Set the fact about a tensor's storage; a tensor without a storage has none."""
        if storage_key(tensor) is not None:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._facts[reference.cdata] = (reference, fact)
            if len(self._facts) > self._room:
                self.forget()
                self._room = 2 * len(self._facts) + 64

    def drop(self, tensor: Tensor) -> None:
        """Remove the fact about a tensor's storage."""
        self._facts.pop(cast(int, storage_key(tensor)), None)

    def forget(self) -> None:
        """Remove the facts about storages that were freed; a fact may hold other storages."""
        while freed := [key for key, (ref, _) in self._facts.items() if ref.expired()]:
            for key in freed:
                del self._facts[key]


class Parameters:
    """The storages of a model's parameters and of their casts, also while hooks exchange them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kinds: Storages[str] = Storages()
        self._add_all()

    def has(self, tensor: Tensor) -> bool:
        """Return True for a parameter of the model, a view of one, or a noted copy of one."""
        return self._kind(tensor) in (_PROJECTION, _OWN)

    def projects(self, tensor: Tensor) -> bool:
        """Return True for the weight of a layer that projects features, such as nn.Linear."""
        return self._kind(tensor) == _PROJECTION

    def note_copy(self, parameter: Tensor, copy: Tensor) -> None:
        """Record a copy of a parameter, such as a cast by autocast."""
        self._kinds.put(copy, self._kind(parameter))

    def _kind(self, tensor: Tensor) -> str:
        kind = self._kinds.of(tensor)
        if kind is not None:
            return kind
        base = tensor._base  # pyright: ignore[reportPrivateUsage]
        if not any(isinstance(each, nn.Parameter) for each in (tensor, base)):
            return _NONE
        # The model may have registered it, or exchanged its storage, after the block began.
        self._add_all()
        if self._kinds.of(tensor) is None:
            self._kinds.put(tensor, _NONE)  # a parameter of something else
        return self._kinds.of(tensor) or _NONE

    def _add_all(self) -> None:
        for module in self._model.modules():
            kind = _PROJECTION if isinstance(module, _PROJECTIONS) else _OWN
            for parameter in module.parameters(recurse=False):
                self._kinds.put(parameter, kind)


_NONE, _OWN, _PROJECTION = "none", "own", "projection"
_PROJECTIONS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def storage_key(tensor: Tensor) -> int | None:
    """Return the key of a tensor's storage; None if the tensor has no storage."""
    try:
        return cast(int, cast(Any, tensor.untyped_storage())._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # ValueError: a lazy parameter
        return None


def written_by(operation: Operation) -> Iterator[Tensor]:
    """Yield the tensors whose elements an operation has changed in place, not only their views."""
    func = operation.func
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags:
        return
    for index, argument in enumerate(func._schema.arguments):  # pyright: ignore[reportPrivateUsage]
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = operation.args[index] if index < len(operation.args) else None
            yield from tensors_in((operation.kwargs.get(argument.name, given),))


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, including those in lists and tuples."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(cast(Iterable[Any], argument))
