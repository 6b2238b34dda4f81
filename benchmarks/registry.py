"""Every benchmark there is, in the order in which they run."""

from typing import NamedTuple

from benchmarks import (
    blocks,
    growth,
    memory,
    observe,
    outputs,
    page,
    parts,
    passes,
    screen,
    speed,
    start,
)
from benchmarks.case import QUICK, Case, Effort, full

__all__ = ["CASES", "GROUPS", "Job", "case_named", "jobs"]

# Passes come first: floors are made of them.
CASES = (
    *passes.CASES,
    *parts.CASES,
    *speed.CASES,
    *growth.CASES,
    *memory.CASES,
    *observe.CASES,
    *blocks.CASES,
    *outputs.CASES,
    *page.CASES,
    *screen.CASES,
    *start.CASES,
)
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))


class Job(NamedTuple):
    """A case at one of its lengths; tokens is None where it has none."""

    case: Case
    tokens: int | None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What tells it from all others."""
        return self.case.group, self.case.name, self.tokens

    @property
    def effort(self) -> Effort:
        """How much to measure when it counts."""
        return full(self.tokens or 0)


def jobs(group: str, text: str = "", length: int | None = None, quick: bool = False) -> list[Job]:
    """What to measure.

    Args:
        group: one, or "all".
        text: only cases with it in their name.
        length: at this number of tokens instead of the cases' own.
        quick: each case once, at the smallest size.
    """
    chosen = [case for case in CASES if group in ("all", case.group) and text in case.name]
    if quick:
        length = QUICK.tokens
    return [
        Job(case, tokens)
        for case in chosen
        for tokens in ((None,) if not case.lengths else (length,) if length else case.lengths)
    ]


def case_named(group: str, name: str) -> Case:
    """The one case of that name."""
    (only,) = [case for case in CASES if (case.group, case.name) == (group, name)]
    return only
