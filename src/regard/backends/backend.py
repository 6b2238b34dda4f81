"""The abstract base of the backends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from regard.masks import Mask
from regard.reductions.reduction import Reduction
from regard.scores.score_source import Scores

Between: TypeAlias = Callable[[int, int], None]
"""Called on the caller's thread between blocks, with the finished blocks and all blocks.

It is called with 0 before the first block, and with all blocks after the last one. An error that it
raises ends the pass. A fused kernel is one block.
"""


def nothing(done: int, total: int) -> None:
    """Do nothing between blocks: the default ``Between``."""


class Backend(ABC):
    """A way to compute reductions of any attention matrix."""

    def applies(self, source: Scores) -> bool:
        """Return True if this backend is made for matrices of this device and this size."""
        return True

    def refusal(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> str | None:
        """Return why this backend does not answer all reductions, as a clause; None if it does.

        A backend that refuses nothing inherits this method.
        """
        return None

    @abstractmethod
    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        """Return how ``reduce`` would compute this, in a phrase, and the bytes that it needs.

        The bytes are an estimate of the memory needed in addition to the inputs, including the
        answers.
        """

    @abstractmethod
    def reduce(
        self,
        source: Scores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between = nothing,
    ) -> tuple[Any, ...]:
        """Return one answer for each reduction."""
