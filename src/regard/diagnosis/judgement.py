"""The verdict: laws judge, the catalogue explains."""

from dataclasses import replace

from regard.diagnosis.catalogue import Fault
from regard.diagnosis.laws.judge import judged
from regard.diagnosis.laws.law import Result
from regard.diagnosis.laws.specimen import Specimen
from regard.diagnosis.report import Finding, Report

__all__ = ["by_laws"]

_NO_NAME = "No known mistake gives these numbers."


def by_laws(report: Report, specimen: Specimen, *, is_read: bool, is_open: str = "") -> Report:
    """Return the report with the results of all laws.

    A law that is broken makes the code wrong. A law that applies and could not be tried leaves the
    verdict open.

    Args:
        report: by the catalogue.
        specimen: the code.
        is_read: the catalogue has a reading of the code, so that it is attention.
        is_open: what the caller must declare before the code can be called right.
    """
    results, notes = judged(specimen)
    report = replace(report, laws=tuple(results), notes=(*report.notes, *notes))
    if report.faults:
        return report
    broken = [r for r in results if r.breach is not None and not r.breach.is_note]
    certain = [r for r in broken if is_read or (r.breach is not None and r.breach.is_definite)]
    if certain:
        # Later laws are often broken by what breaks an earlier one.
        cause = _NO_NAME if is_read else report.missing or _NO_NAME
        findings = (finding_of(certain[0], cause), *report.findings)
        return replace(report, findings=findings, missing="")
    if report.missing:
        return report
    missing = [is_open] if is_open else []
    missing += [f"The law {r.law.name!r} is broken: {r.breach.says}" for r in broken if r.breach]
    untried = [r for r in results if r.outcome == "not tried"]
    missing += [f"The law {r.law.name!r} was not tried: {r.reason}" for r in untried]
    return replace(report, missing="\n".join(missing))


def finding_of(result: Result, cause: str) -> Finding:
    """Return a broken law as a finding.

    Args:
        result: of the law.
        cause: what is known of it, in a sentence.
    """
    breach, law = result.breach, result.law
    assert breach is not None
    entry = Fault(0, law.name, f"The law {law.name!r} is broken. {law.statement}", law.formula)
    pair = breach.pair or (None, None, "")
    return Finding(
        entry,
        "fault",
        breach.place.file if breach.place else None,
        breach.place.line if breach.place else None,
        f"{breach.says} {cause}",
        *pair,
    )
