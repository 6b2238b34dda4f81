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
        return [matrix for each in self.matrices if (matrix := each()) is not None]


class GrowingKeys(local):
    """The keys of each module of a model that generates; each thread has its own."""

    def __init__(self) -> None:
        self._chains: WeakKeyDictionary[nn.Module, _Chain] = WeakKeyDictionary()

    def add(self, module: nn.Module, matrix: AttentionMatrix, *, continues: bool) -> None:
        """Let later steps of a module continue the key of a matrix.

        With ``continues``, its own key is the one that ``continued`` has just returned.
        """
        if not continues:
            self._chains[module] = _Chain()
        self._chains[module].matrices.append(ref(matrix))

    def continued(self, module: nn.Module, key: Tensor) -> Tensor | None:
        """Return a key as a part of the buffer that earlier steps of the module share.

        The result is None if the key does not begin with theirs.
        """
        chain = self._chains.get(module)
        matrices = [] if chain is None else chain.alive()
        if chain is None or not matrices:
            return None
        earlier, length = _key_of(matrices[-1]), key.shape[-2]
        start = earlier.shape[-2]
        if key.requires_grad or start > length or earlier.dtype != key.dtype:
            return None
        if earlier.shape != key[..., :start, :].shape or earlier.device != key.device:
            return None
        if not torch.equal(earlier, key[..., :start, :]):
            return None
        with torch.no_grad():
            return self._grown(chain, matrices, earlier, key)

    def _grown(
        self, chain: _Chain, matrices: list[AttentionMatrix], earlier: Tensor, key: Tensor
    ) -> Tensor:
        """Return a key in the buffer of a chain, of which the last matrix has the earlier key."""
        start, length = earlier.shape[-2], key.shape[-2]
        # Parts of a matrix that is gone may still show the columns after those of the last one.
        is_last = earlier.data_ptr() == chain.address and chain.filled == start
        has_room = length * key.shape[-1] <= earlier.stride(-3)
        # A tensor of inference mode is not written outside of it.
        is_writable = torch.is_inference_mode_enabled() or not earlier.is_inference()
        if not (is_last and has_room and is_writable):
            room = length + max(_ROOM, length // 8)
            buffer = key.new_empty(*key.shape[:-2], room, key.shape[-1])
            buffer[..., :start, :] = earlier
            chain.address = buffer.data_ptr()
            earlier = buffer[..., :start, :]
            for matrix in matrices:
                source = cast(QueryKeyScores, matrix.source)
                matrix.changes.forget(source.key)
                matrix.source = replace(source, key=earlier[..., : source.key.shape[-2], :])
        grown = earlier.as_strided(key.shape, earlier.stride())
        grown[..., start:, :] = key[..., start:, :]
        chain.filled = length
        return grown


def _key_of(matrix: AttentionMatrix) -> Tensor:
    return cast(Any, matrix.source).key
