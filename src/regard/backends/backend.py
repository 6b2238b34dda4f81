"""What every backend is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from regard.masks import Mask
from regard.reductions import Reduction
from regard.scores import Scores

__all__ = ["Backend"]


class Backend(ABC):
    """A way to compute reductions of any attention matrix."""

    @abstractmethod
    def takes(self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]) -> bool:
        """Whether this backend can answer all of them, exactly and in O(length) memory."""

    @abstractmethod
    def reduce(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[Any, ...]:
        """One answer for each reduction."""
