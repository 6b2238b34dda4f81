"""The report of a check: findings with their lines and proofs, and a verdict."""

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from regard.diagnosis.catalogue import Fault, Severity
from regard.diagnosis.facts.statement import Computes
from regard.diagnosis.inputs.tape import Place
from regard.diagnosis.laws.law import Pair, Result

Verdict = Literal["right", "different", "wrong", "cannot tell"]

_EXIT_CODES: dict[Verdict, int] = {"right": 0, "different": 1, "wrong": 1, "cannot tell": 3}


@dataclass(frozen=True, eq=False)
class Finding:
    """One mistake in somebody's attention, or a note about it.

    Attributes:
        fault: its entry in the catalogue.
        file: where it is; None where no line tells.
        line: the number of the line there.
        detail: what was measured, in a sentence.
        did: a small matrix of what the code did; None where no matrix shows it.
        attention: the same of what attention is.
        caption: what the two matrices hold.
    """

    fault: Fault
    file: str | None
    line: int | None
    detail: str
    did: Tensor | None = None
    attention: Tensor | None = None
    caption: str = ""

    @property
    def number(self) -> int:
        """Its place in the catalogue, from 1; 0 for a note that is no mistake of its own."""
        return self.fault.number

    @property
    def severity(self) -> Severity:
        """What it means for the verdict.

        ``fault``: wrong; ``difference``: another choice than the standard; ``note``: right.
        """
        return self.fault.severity

    @property
    def name(self) -> str:
        """Its name in the catalogue."""
        return self.fault.name

    @property
    def code(self) -> str:
        """The text of the line; empty where it cannot be read."""
        if self.file is None or self.line is None:
            return ""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """The file, or the cell of a running notebook, and the line; empty where none is known."""
        if self.file is None:
            return ""
        # IPython runs each cell as a file of its own, and knows which one.
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        cell = shell.compile.format_code_name(self.file) if shell is not None else None
        return f"{f'cell {cell[1]}' if cell else Path(self.file).name}, line {self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding in plain data, for JSON."""
        return {
            "number": self.number,
            "name": self.name,
            "severity": self.severity,
            "sentence": self.fault.sentence,
            "detail": self.detail,
            "mending": self.fault.mending,
            "sources": list(self.fault.sources),
            "file": self.file,
            "line": self.line,
            "code": self.code,
            "caption": self.caption,
            "did": _plain(self.did),
            "attention": _plain(self.attention),
        }

    def __str__(self) -> str:
        """Return the finding in lines of text."""
        label = f"mistake {self.number}" if self.number else "law" if self.fault.mending else "fact"
        label = label if self.severity == "fault" else self.severity
        lines = [f"{self.name} ({label})", f"  {self.fault.sentence}"]
        if self.detail:
            lines.append(f"  {self.detail}")
        if self.file is not None:
            lines.append(f"  {self.place}:  {self.code}")
        if self.did is not None and self.attention is not None:
            lines += _side_by_side(self.did, self.attention, self.caption)
        if said := self.fault.mending:
            is_law = not self.number and self.severity == "fault"
            lines.append(f"  {'Formula' if is_law else 'Write'}:  {said}")
        if self.fault.sources:
            lines.append(f"  Others did the same: {', '.join(self.fault.sources)}")
        return "\n".join(lines)

    __repr__ = __str__


def finding_of(entry: Fault, place: Place | None, detail: str, pair: Pair | None = None) -> Finding:
    """Return a finding with its line and its two matrices, as far as they are known."""
    file, line = (place.file, place.line) if place else (None, None)
    return Finding(entry, file, line, detail, *(pair or (None, None, "")))


@dataclass(frozen=True, eq=False)
class Report:
    """The findings and the verdict of a check.

    Attributes:
        name: of what was checked.
        findings: mistakes first, then notes.
        read_as: how it was called and read, in words.
        missing: what could not be told, and what would tell; empty where all is told.
        laws: the result of each law of attention.
        notes: what is worth knowing, in sentences.
        computes: what the code computes, and on which inputs that was verified.
        pin: the call that pins it; empty where there is none.
        no_pin: why there is none; empty where there is one, or the code is wrong.

    Example:
        >>> import regard
        >>> def attention(q, k, v):
        ...     return (q @ k.transpose(-2, -1)).softmax(-1) @ v
        >>> report = regard.check(attention)
        >>> report.ok, report.verdict, [finding.name for finding in report.findings]
        (False, 'wrong', ['no-scale'])
    """

    name: str
    findings: tuple[Finding, ...]
    read_as: str
    missing: str = ""
    laws: tuple[Result, ...] = ()
    notes: tuple[str, ...] = ()
    computes: Computes | None = None
    pin: str = ""
    no_pin: str = ""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that make it wrong."""
        return tuple(finding for finding in self.findings if finding.severity == "fault")

    @property
    def differences(self) -> tuple[Finding, ...]:
        """The findings of facts that are off their standard, as somebody may mean them."""
        return tuple(finding for finding in self.findings if finding.severity == "difference")

    @property
    def verdict(self) -> Verdict:
        """In words.

        ``wrong``: it breaks a law, or contradicts what was expected; ``cannot tell``: a part of it
        could not be read; ``different``: a fact is off its standard; ``right``: none of these.
        """
        if self.faults:
            return "wrong"
        if self.missing:
            return "cannot tell"
        return "different" if self.differences else "right"

    @property
    def ok(self) -> bool:
        """True if it is right."""
        return self.verdict == "right"

    @property
    def exit_code(self) -> int:
        """0 where it is right, 1 where it is wrong or different, 3 where that cannot be told."""
        return _EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the report in plain data, for JSON."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "ok": self.ok,
            "read_as": self.read_as,
            "missing": self.missing,
            "findings": [finding.to_dict() for finding in self.findings],
            "laws": [result.to_dict() for result in self.laws],
            "notes": list(self.notes),
            "computes": None if self.computes is None else self.computes.to_dict(),
            "pin": self.pin,
        }

    def __str__(self) -> str:
        """Return the report as text."""
        parts = [f"{self.name}: read as {self.read_as}"]
        if self.computes is not None and self.computes.is_known:
            lines = str(self.computes).splitlines()
            read = [f"read as {self.read_as}"] if self.read_as else []
            parts = ["\n  ".join([f"{self.name} computes {lines[0]}", *lines[1:], *read])]
        parts += map(str, self.findings)
        if self.missing:
            parts.append(self.missing)
        if self.notes and self.verdict != "wrong":
            parts.append("\n".join(f"Note: {note}" for note in self.notes))
        parts.append(f"{self.name} is {_sentence(self)}")
        if self.pin:
            parts.append(f"To pin it:  {self.pin}")
        elif self.no_pin and not self.faults:
            parts.append(f"To pin it:  nothing does, as {self.no_pin}.")
        return "\n\n".join(parts)

    __repr__ = __str__


def _sentence(report: Report) -> str:
    match report.verdict:
        case "right":
            held = sum(result.outcome == "held" for result in report.laws)
            others = [r.law.name for r in report.laws if r.outcome == "does not apply"]
            laws = f"; {held} laws of attention hold" if held else ""
            verb = "does" if len(others) == 1 else "do"
            laws += f"; {', '.join(others)} {verb} not apply" if others else ""
            return f"right{laws}."
        case "wrong":
            return f"wrong: {', '.join(finding.name for finding in report.faults)}."
        case "different":
            names = ", ".join(finding.name for finding in report.differences)
            return f"different from standard attention: {names}. Wrong unless it is meant so."
        case _:
            return "neither right nor wrong as far as check can tell."


def _plain(matrix: Tensor | None) -> list[list[float | None]] | None:
    if matrix is None:
        return None
    rows = cast("list[list[float]]", matrix.tolist())
    return [[value if abs(value) < float("inf") else None for value in row] for row in rows]


def _side_by_side(did: Tensor, attention: Tensor, caption: str) -> list[str]:
    left, right = (_rows(matrix) for matrix in (did, attention))
    width = max([len(row) for row in left] + [len("what it did")])
    lines = [f"  {caption}:", f"  {'what it did'.ljust(width)}    what attention is"]
    return [*lines, *(f"  {a.ljust(width)}    {b}" for a, b in zip(left, right, strict=False))]


def _rows(matrix: Tensor) -> list[str]:
    rows = cast("list[list[float]]", matrix.tolist())
    return ["  ".join(f"{value:6.3f}" for value in row) for row in rows]
