"""What one benchmark is: a question, what may come out, and how to measure it."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Case", "Measured"]


@dataclass(frozen=True)
class Measured:
    """What came out.

    Attributes:
        value: the number that the goal is about.
        low, high: the quartiles of the single repetitions; None where there is one only.
        beside: what the number is to be seen beside, in words.
    """

    value: float
    low: float | None = None
    high: float | None = None
    beside: str = ""


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        group: "speed", "memory" or "imports".
        name: what is asked, unique in its group.
        unit: of the number.
        measure: gives the number; True asks for tiny sizes, which say nothing about speed.
        floor: what no program could do better, by the reasons in README.md; None: not known.
        goal: at most this; None for the alternatives, which are measured for comparison.
    """

    group: str
    name: str
    unit: str
    measure: Callable[[bool], Measured]
    floor: float | None = None
    goal: float | None = None
