"""What every backend is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from regard.backends.plan import Plan
from regard.errors import check_bases
from regard.masks import Mask
from regard.reductions.reduction import Reduction
from regard.scores.score_source import Scores

__all__ = ["Backend"]


class Backend(ABC):
    """A way to compute reductions of any attention matrix."""

    def __init_subclass__(cls) -> None:
        """Refuse to subclass a final class."""
        super().__init_subclass__()
        check_bases(cls, "Backend")

    @abstractmethod
    def refusal(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> str | None:
        """Why this backend does not answer all of them, as a clause; None: it does.

        It answers what it can answer exactly and in O(length) memory.
        """

    @abstractmethod
    def plan(self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]) -> Plan:
        """What ``reduce`` would do with a question that is not refused."""

    @abstractmethod
    def reduce(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[Any, ...]:
        """One answer for each reduction."""
