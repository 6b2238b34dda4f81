"""The verdict on one attention: laws judge, the catalogue explains."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from regard.diagnosis.catalogue import Fault, fault
from regard.diagnosis.explaining import explained
from regard.diagnosis.inputs.lab import Lab, NotTried, as_tensors, normal
from regard.diagnosis.inputs.specimen import Specimen
from regard.diagnosis.laws.judge import LAWS, judged
from regard.diagnosis.laws.law import Result
from regard.diagnosis.laws.lines import Lines
from regard.diagnosis.laws.visibility import ignores_order, pattern_of
from regard.diagnosis.report import Finding, Report, finding_of

__all__ = ["notes_of", "of_law", "report_of"]

_NO_ROWS = (
    "Its output has no row for each token, as where the queries are learned or the tokens are "
    "pooled: pass the function of query, key and value inside it."
)
_ASKED = "Nothing says what {0} means: pass means={{{0!r}: 'True keeps'}}, or 'True hides'."
_NO_NAME = "No known mistake gives these numbers."


def report_of(readings: Sequence[Specimen]) -> Report:
    """Return the report on the first reading that obeys all laws; else on the first one."""
    tried: list[tuple[Lab, list[Result]]] = []
    for specimen in readings:
        lab = Lab(specimen)
        tried.append((lab, judged(lab)))
        if _held(tried[-1][1]) == len(LAWS):
            break
    lab, results = tried[-1]
    if _held(results) < len(LAWS):  # then other axes count for nothing
        own = [slot.axes for slot in tried[0][0].specimen.sources.values()]
        axes = [[slot.axes for slot in each.specimen.sources.values()] for each, _ in tried]
        alike = [each for each, its in zip(tried, axes, strict=True) if its == own]
        lab, results = max(alike, key=lambda each: _held(each[1]))
    s = lab.specimen
    notes = tuple(lab.notes)
    plain = Report(s.name, (), _read_as(lab, results), "", tuple(results), notes)
    broken = [r for r in results if r.breach]
    findings = explained(lab, results) if broken else []
    if any(finding.severity == "fault" for finding in findings):
        return replace(plain, findings=tuple(findings))
    certain = [r for r in broken if r.breach is not None and r.breach.is_definite]
    asked = [r.breach for r in broken if r.breach and r.breach.kind == "undeclared"]
    certain = [r for r in certain if r.breach not in asked]
    if certain:
        # Later laws are often broken by what breaks an earlier one.
        return replace(plain, findings=(of_law(certain[0]), *findings))
    missing = [f"The law {r.law.name!r} is broken: {r.breach.says}" for r in broken if r.breach]
    missing += [_ASKED.format(*breach.extra) for breach in asked]
    untried = [r for r in results if r.outcome == "not tried"]
    if results[0] in untried:  # where it does not run, the others say the same
        untried = untried[:1]
    missing += [f"The law {r.law.name!r} was not tried: {r.reason}" for r in untried]
    is_bare = all(r.breach is not None and r.breach.kind == "missing" for r in broken)
    if missing and is_bare and results[0].outcome == "held" and not lab.sees_rows:
        missing = [_NO_ROWS]
    if not missing:
        findings = [*findings, *notes_of(lab)]
    return replace(plain, findings=tuple(findings), missing="\n".join(missing))


def _held(results: Sequence[Result]) -> int:
    """Return how many laws hold, or do not apply, before the first one that does neither."""
    bad = [n for n, r in enumerate(results) if r.breach or r.outcome == "not tried"]
    return bad[0] if bad else len(LAWS)


def _takes_batch(lab: Lab) -> bool:
    """Return True if a function of scores gives each matrix of a batch what it gives it alone."""
    s = lab.specimen
    if not s.has_own_size or s.is_example:
        return False
    widths = [int(slot.axes[-1]) for slot in s.sources.values()]
    batch = [normal(11 + n, 2, 3, 5, width) for n, width in enumerate(widths)]
    alone = zip(*(tensor.flatten(0, 1) for tensor in batch), strict=True)
    try:
        together, *outputs = [as_tensors(s.call(*given))[0] for given in (batch, *alone)]
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return False
    return torch.allclose(together.flatten(0, 1), torch.stack(outputs), atol=1e-9)


def of_law(result: Result) -> Finding:
    """Return a broken law as a finding."""
    breach, law = result.breach, result.law
    assert breach is not None
    entry = Fault(law.name, f"The law {law.name!r} is broken. {law.statement}", law.formula)
    return finding_of(entry, breach.place, f"{breach.says} {_NO_NAME}", breach.pair)


def _read_as(lab: Lab, results: Sequence[Result]) -> str:
    """Return how the arguments were read, how many heads there are, and what a token sees."""
    s = lab.specimen
    words = [s.words if s.is_example else _axes(s)]
    if any(r.law.name == "influence" and not r.reason for r in results):
        with suppress(NotTried):
            words.append(pattern_of(lab.influence))
    return ", ".join(word for word in (*words, *lab.readings) if word)


def _axes(specimen: Specimen) -> str:
    """Return the axes of the first argument in words."""
    slot = next(iter(specimen.sources.values()))
    numbers = ["heads", "dim"] if sum(isinstance(axis, int) for axis in slot.axes) == 2 else ["dim"]
    names = {"b": "batch", "t": "tokens"}
    parts = [names[axis] if isinstance(axis, str) else numbers.pop(0) for axis in slot.axes]
    what = "a function of scores, " if specimen.has_own_size else ""
    return f"{what}({', '.join(parts)})" + (" of token ids" if slot.high else "")


def notes_of(lab: Lab, *, is_open: bool | None = None) -> list[Finding]:
    """Return what is right, but worth knowing.

    Args:
        lab: of the code.
        is_open: each token attends to all; None: that is not known.
    """
    s = lab.specimen
    found: list[Finding] = []
    if not s.has_batch and not s.is_example and not _takes_batch(lab):
        run = lab.run(s.contents(s.batch, s.tokens), keeps=True)
        lines = Lines(run.steps, run.inputs)
        place = lines.of("transpose-of-batch") if lines.turning() is not None else None
        entry = fault("unbatched-only" if place is None else "transpose-of-batch")
        found.append(finding_of(entry, place or lines.of("softmax-wrong-axis"), ""))
    is_free = s.has_batch and not (s.causal or s.masks or s.is_fixed)
    is_free &= lab.model is not None and is_open is not False
    if is_free and ignores_order(lab) and (is_open or bool(lab.influence.all())):
        found.append(finding_of(fault("no-positions"), None, ""))
    return found
