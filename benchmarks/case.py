"""What one benchmark is: a question, at which lengths, what may come out, how to measure it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median, quantiles

__all__ = [
    "QUICK",
    "Case",
    "Effort",
    "Floor",
    "LeftOut",
    "Measured",
    "full",
    "half",
    "middle",
    "need",
    "passes",
    "quartiles",
]

# What no program could do better, in parts: of the number of tokens and the measured passes.
Floor = Callable[[int, Mapping[str, float]], dict[str, float]]


class LeftOut(Exception):
    """There is nothing to measure here, for the reason that the message gives."""


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        tokens: the length; 0 where the case has none.
        repetitions: at most so many.
    """

    tokens: int
    repetitions: int


QUICK = Effort(64, 1)


def full(tokens: int) -> Effort:
    """What counts."""
    return Effort(tokens, 7)


@dataclass(frozen=True)
class Measured:
    """What came out.

    Attributes:
        value: the number that the goal is about.
        repetitions: of how many it is the middle.
        low, high: the quartiles of the repetitions; the value itself where there is one only.
        forwards: how many fused forwards it took, where the value is in another unit.
        beside: what the number is to be seen beside, in words.
    """

    value: float
    repetitions: int
    low: float
    high: float
    forwards: float | None = None
    beside: str = ""


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        group: "passes", "parts", "speed", "time", "memory", "observe", "blocks", "outputs",
            "page" or "start".
        name: what is asked; with its group and a length it is unique.
        unit: of the number.
        measure: gives the number, or raises LeftOut.
        lengths: numbers of tokens to measure at; none where the case has no length.
        goal: at most this, at any length or by length; None for what is measured for comparison.
        floor: what no program could do better, by the reasons in README.md; None: not known.
        dense: how many matrices of length x length of 4 bytes it holds at once.
    """

    group: str
    name: str
    unit: str
    measure: Callable[[Effort], Measured]
    lengths: tuple[int, ...] = ()
    goal: float | Mapping[int, float] | None = None
    floor: Floor | None = None
    dense: int = 0

    def goal_at(self, tokens: int | None) -> float | None:
        """The goal at a length; None where there is none."""
        return self.goal.get(tokens or 0) if isinstance(self.goal, Mapping) else self.goal


def passes(*names: str) -> Floor:
    """The floor of what cannot do without these passes over the matrix, each once a name."""

    def parts(_: int, shares: Mapping[str, float]) -> dict[str, float]:
        shares = {"forward": 1.0, **shares}
        return {name: shares[name] * names.count(name) for name in dict.fromkeys(names)}

    return parts


def half(tokens: int, _: Mapping[str, float]) -> dict[str, float]:
    """The floor of a causal question against the one of all pairs of tokens."""
    return {"pairs that the mask allows": (tokens + 1) / (2 * tokens)}


def quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    """The ends of the middle half."""
    if len(numbers) == 1:
        return numbers[0], numbers[0]
    low, _, high = quantiles(numbers, n=4, method="inclusive")
    return low, high


def middle(numbers: Sequence[float]) -> Measured:
    """The median of repetitions."""
    return Measured(median(numbers), len(numbers), *quartiles(numbers))


def need(package: str) -> None:
    """Leave out what needs a package that is not there."""
    if find_spec(package) is None:
        raise LeftOut(f"not installed: {package}")
