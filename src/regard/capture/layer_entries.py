"""The layers that a recording gets as a model runs, each known by the module that it is of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Layer, Origin, Queries
from regard.recording.recording import Recording
from regard.reductions.reduction import Reduction

__all__ = ["Entries"]


class Entries:
    """Adds layers to a recording, and takes out those of one module.

    Args:
        seen: the recording.
    """

    def __init__(self, seen: Recording) -> None:
        self._seen = seen
        self._origins: dict[str, Origin] = {}
        self._names: dict[str, list[str]] = {}  # of the layers of each module

    def are_of(self, module: str, origin: Origin) -> None:
        """Note where the layers of a module stand in their model."""
        self._origins[module] = origin

    def add(
        self,
        module: str,
        matrix: AttentionMatrix | None,
        *,
        shape: torch.Size,
        answers: Sequence[tuple[Reduction, Any]] = (),
        queries: Queries | None = None,
        name: str | None = None,
    ) -> str:
        """Keep one more layer, under the module's name unless it has its own; gives its name."""
        added = self._seen.add(
            name or module,
            matrix,
            answers=answers,
            shape=shape,
            origin=self._origins.get(module),
            queries=queries,
        )
        self._names.setdefault(module, []).append(added)
        return added

    def complete(self, module: str, layer: Layer) -> None:
        """Keep a layer as all its calls made it, in place of what was known of the first one."""
        self._seen.put(replace(layer, origin=self._origins.get(module)))

    def remove_one(self, module: str, name: str) -> None:
        """Take out one layer of a module."""
        self._names[module].remove(name)
        self._seen.remove(name)

    def remove(self, module: str) -> None:
        """Take out every layer of a module."""
        for name in self._names.pop(module, ()):
            self._seen.remove(name)
