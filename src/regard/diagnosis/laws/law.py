"""A law of attention, and the results of trying one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard.diagnosis.inputs.lab import Lab
from regard.diagnosis.inputs.tape import Place

Pair = tuple[Tensor, Tensor, str]
"""Two small matrices that should agree, (rows, columns), and a caption."""


@dataclass(frozen=True, eq=False)
class Breach:
    """A counterexample to a law.

    Attributes:
        says: the two numbers that should agree, in a sentence.
        place: the line of the first operation that breaks the law; None where none can be told.
        pair: two small matrices that should agree; None where the sentence says all.
        is_definite: no other kind of attention gives these numbers, either.
        kind: the name in the catalogue of the mistake that breaks the law; another word for none.
    """

    says: str
    place: Place | None = None
    pair: Pair | None = None
    is_definite: bool = True
    kind: str = ""


class Law(ABC):
    """Something that every right attention obeys; the docstring of a subclass states it.

    Attributes:
        name: as the report calls it.
        formula: the law in one formula, plain text.
        example: code that breaks the law, in one line.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    example: ClassVar[str]

    @abstractmethod
    def breach(self, lab: Lab) -> Breach | None:
        """Return a counterexample, or None if the law holds.

        Raises:
            NotTried: the law cannot be tried on this code.
        """


@dataclass(frozen=True, eq=False)
class Result:
    """The result of one law.

    Attributes:
        law: that was tried.
        breach: the counterexample; None if the law holds, or was not tried.
        reason: why the law was not tried; empty if it was.
        is_applicable: False if the code has nothing that the law speaks of.
    """

    law: Law
    breach: Breach | None = None
    reason: str = ""
    is_applicable: bool = True

    @property
    def outcome(self) -> str:
        """Return ``held``, ``broken``, ``not tried`` or ``does not apply``."""
        if self.breach is not None:
            return "broken"
        if not self.reason:
            return "held"
        return "not tried" if self.is_applicable else "does not apply"

    def to_dict(self) -> dict[str, str]:
        """Return the result in plain data, for JSON."""
        said = self.breach.says if self.breach is not None else self.reason
        return {"name": self.law.name, "outcome": self.outcome, "detail": said}
