"""Every benchmark there is."""

from benchmarks import imports, memory, speed
from benchmarks.case import Case

__all__ = ["CASES", "GROUPS", "chosen"]

CASES = (*speed.CASES, *memory.CASES, *imports.CASES)
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))


def chosen(group: str, name: str = "") -> list[Case]:
    """The cases of a group, or of "all", whose name contains some text."""
    return [case for case in CASES if group in ("all", case.group) and name in case.name]
