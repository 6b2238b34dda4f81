"""One growing copy of the key for the steps of a generation.

Each step of a generation has the keys of the step before and some more. The matrices of all steps
share one buffer that grows. They alone keep it alive.
"""

from dataclasses import dataclass, field, replace
from threading import local
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.query_key import QueryKeyScores

__all__ = ["GrowingKeys"]

_ROOM = 64  # columns


@dataclass(eq=False)
class _Chain:
    """The matrices of one module whose keys are the first columns of one buffer.

    Attributes:
        matrices: the matrices, which own the buffer.
        address: the address of the buffer; 0 for the key of a first step.
        filled: the number of columns that are written.
    """

    matrices: list[ref[AttentionMatrix]] = field(default_factory=list[ref[AttentionMatrix]])
    address: int = 0
    filled: int = 0

    def alive(self) -> list[AttentionMatrix]:
        found = (each() for each in self.matrices)
        return [each for each in found if each is not None]


class GrowingKeys(local):
    """The keys of each module of a model that generates; each thread has its own."""

    def __init__(self) -> None:
        self._chains: WeakKeyDictionary[nn.Module, _Chain] = WeakKeyDictionary()

    def begin(self, module: nn.Module, matrix: AttentionMatrix) -> None:
        """Let later steps of a module continue the key of a matrix."""
        self._chains[module] = _Chain([ref(matrix)])

    def add(self, module: nn.Module, matrix: AttentionMatrix) -> None:
        """Add the matrix of a step, whose key is the one that ``continued`` returned."""
        self._chains[module].matrices.append(ref(matrix))

    def continued(self, module: nn.Module, key: Tensor) -> Tensor | None:
        """Return a key as a part of the buffer that earlier steps of the module share.

        The result is None if the key does not begin with theirs.
        """
        chain = self._chains.get(module)
        matrices = [] if chain is None else chain.alive()
        if chain is None or not matrices:
            return None
        known, length = _key_of(matrices[-1]), key.shape[-2]
        start = known.shape[-2]
        if (known.shape[:-2], known.shape[-1]) != (key.shape[:-2], key.shape[-1]) or start > length:
            return None
        if known.dtype != key.dtype or known.device != key.device or key.requires_grad:
            return None
        if not torch.equal(known, key[..., :start, :]):
            return None
        with torch.no_grad():
            return self._grown(chain, matrices, known, key)

    def _grown(
        self, chain: _Chain, matrices: list[AttentionMatrix], known: Tensor, key: Tensor
    ) -> Tensor:
        start, length = known.shape[-2], key.shape[-2]
        # Parts of a matrix that is gone may still show the columns after those of the last one.
        is_last = known.data_ptr() == chain.address and chain.filled == start
        has_room = length * key.shape[-1] <= known.stride(-3)
        # A tensor of inference mode is not written outside of it.
        is_writable = torch.is_inference_mode_enabled() or not known.is_inference()
        if not (is_last and has_room and is_writable):
            room = length + max(_ROOM, length // 8)
            buffer = key.new_empty(*key.shape[:-2], room, key.shape[-1])
            buffer[..., :start, :] = known
            chain.address = buffer.data_ptr()
            known = buffer[..., :start, :]
            for matrix in matrices:
                source = cast(QueryKeyScores, matrix.source)
                matrix.unwatch(source.key)
                matrix.source = replace(source, key=known[..., : source.key.shape[-2], :])
        grown = known.as_strided(key.shape, known.stride())
        grown[..., start:, :] = key[..., start:, :]
        chain.filled = length
        return grown


def _key_of(matrix: AttentionMatrix) -> Tensor:
    return cast(Any, matrix.source).key
