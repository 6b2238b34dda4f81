"""The verdict on what code computes: facts compared with what was expected, and universal laws."""

from collections.abc import Sequence
from dataclasses import replace

from regard.diagnosis.catalogue import Fault, fault
from regard.diagnosis.expectation import ANY, Spec
from regard.diagnosis.explaining import explained
from regard.diagnosis.facts.arguments import Mask
from regard.diagnosis.facts.computed import Computed, Statement
from regard.diagnosis.facts.judging import Deviation, deviations
from regard.diagnosis.facts.statement import computes_of
from regard.diagnosis.facts.visible import Band
from regard.diagnosis.laws.judge import LAWS, judged
from regard.diagnosis.laws.lab import Lab
from regard.diagnosis.laws.law import Pair, Result
from regard.diagnosis.laws.tape import Place
from regard.diagnosis.report import Finding, Report, finding_of
from regard.diagnosis.verdicts import notes_of, of_law

__all__ = ["declared", "of_facts", "stated", "with_computes"]

_UNIVERSAL = ("runs", "pure", "samples", "padding", "gradient", "large", "training", "cache")
"""The laws that no intention changes. All others are facts that are read."""


def declared(causal: bool | None, means: dict[str, str]) -> Spec | None:
    """Return what ``causal=`` and ``means=`` declare, with all else free; None for nothing."""
    if causal is None and not means:
        return None
    return Spec(
        causal=ANY if causal is None else causal,
        window=ANY,
        kv_heads=ANY,
        scale=ANY,
        bias=ANY,
        softcap=ANY,
        sinks=ANY,
        padding=means or ANY,
    )


def stated(found: Computed, expected: Spec | None, said: Spec | None) -> Report:
    """Return the report on code of which all could be read.

    Args:
        found: what it computes.
        expected: each fact is judged against it; None: against its standard.
        said: what was declared beside it.
    """
    lab = Lab(found.specimen)
    facts = of_facts(found, expected, said)
    # What a mask hides is wrong already, or else the law of padding tells what no fact does.
    told = {"padding"} if any(own.severity == "fault" for own in facts) else set[str]()
    laws = [law for law in LAWS if law.name in _UNIVERSAL and law.name not in told]
    results = judged(lab, laws)
    findings = _of_laws(lab, results)
    names = {finding.name for finding in findings}
    findings += [own for own in facts if own.name not in names]
    if not findings:
        findings = notes_of(lab)
    findings.sort(key=lambda own: (_ORDER.index(own.severity), own.number))
    notes = tuple(lab.notes)
    words = found.specimen.words
    untried = [
        f"The law {result.law.name!r} was not tried: {result.reason}"
        for result in results
        if result.outcome == "not tried" and not result.reason.startswith("The law ")
    ]
    missing = "\n".join(filter(None, [_unmeasured(found, expected), *untried]))
    return Report(
        found.specimen.name,
        tuple(findings),
        words,
        missing,
        tuple(results),
        notes,
        computes_of(found),
    )


_ORDER = ("fault", "difference", "note")


def _of_laws(lab: Lab, results: Sequence[Result]) -> list[Finding]:
    """Return the findings of the laws that are broken for sure, by the names of mistakes."""
    broken = [result for result in results if result.breach is not None]
    certain = [result for result in broken if result.breach and result.breach.kind != "undeclared"]
    if not certain:
        return []
    named = [own for own in explained(lab, results) if own.severity == "fault"]
    return named or [of_law(certain[0])]


def of_facts(found: Computed, expected: Spec | None, said: Spec | None) -> list[Finding]:
    """Return a finding for each fact that is not what was expected, or is off its standard."""
    facts = [statement.facts for statement in found.statements]
    pairs = [(at, own, expected is not None) for at, own in deviations(facts, expected)]
    if said is not None and expected is None:
        known = {own.fact for _, own, _ in pairs}
        more = deviations(facts, said, is_partial=True)
        pairs = [(at, own, False) for at, own, _ in pairs]
        pairs += [(at, own, True) for at, own in more if own.fact not in known or own.mistake]
    findings: dict[tuple[str, str | None, int | None], Finding] = {}
    for at, deviation, is_meant in pairs:
        own = _finding(deviation, found.statements[at], is_meant=is_meant or deviation.is_wrong)
        key = (own.name, own.file, own.line)
        before = findings.get(key)
        if before is None or before.severity == "difference":
            findings[key] = own
    return list(findings.values())


def _finding(deviation: Deviation, statement: Statement, *, is_meant: bool) -> Finding:
    facts = statement.facts
    severity = "fault" if is_meant else "difference"
    if deviation.mistake:
        entry = replace(fault(deviation.mistake), severity=severity)
    else:
        entry = Fault(deviation.fact, str(deviation), "", severity=severity)
    words = "expected" if is_meant else "the standard"
    detail = f"{deviation.fact}: {deviation.found}; {words}: {deviation.expected}."
    lines = facts.lines
    stage = deviation.stage
    stages = (stage, stage.partition(" ")[0], *_NEXT.get(stage, ()), "softmax", "product")
    place = next((lines[stage] for stage in stages if lines.get(stage)), "")
    file, _, number = place.rpartition(":")
    at = Place(file, int(number)) if number.isdigit() else None
    pair = _pair(deviation, statement)
    return finding_of(entry, at, detail if deviation.mistake else "", pair)


_SHOWN = 4


def _pair(deviation: Deviation, statement: Statement) -> Pair | None:
    """Return the first weights of the code, and those that were expected."""
    facts, rows = statement.facts, statement.rows
    if deviation.number is not None:
        factor = deviation.number / facts.scale[0]
        other = replace(facts, inner_scale=tuple(own * factor for own in facts.inner_scale))
    elif deviation.fact in ("causal", "mask") and deviation.expected.startswith("causal"):
        other = replace(facts, mask=Mask(Band(None, 0)))
    else:
        return None
    expected = other.weights(rows.query, rows.key, other.mask, {})
    if expected is None:
        return None
    did, attention = (t[0, 0, :_SHOWN, :_SHOWN] for t in (rows.weights, expected))
    count = rows.weights.shape[-1]
    caption = f"weights of token 1 to {len(did)} (down) for tokens 1 to {len(did)} of {count}"
    return did, attention, caption


_NEXT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("scale", "keys", "query layer", "key layer", "value layer"), ("product",)
)
"""The stages whose line tells where code lacks a stage."""


def _unmeasured(found: Computed, expected: Spec | None) -> str:
    """Return which arguments a spec names that no run of check could vary; empty for none."""
    if expected is None or expected.padding is ANY:
        return ""
    known = {
        name
        for statement in found.statements
        for name in (
            *statement.facts.masked,
            *statement.facts.consistent,
            *(own.argument for own in getattr(statement.facts.mask, "hidings", ())),
        )
    }
    unknown = [name for name in expected.padding if name not in known]
    if not unknown:
        return ""
    return (
        f"What {unknown[0]} hides was not tried: it shows in no run. Pass an example in which it "
        "hides some keys: args= and kwargs=."
    )


def with_computes(report: Report, found: Computed) -> Report:
    """Return a report that the laws alone gave, with what could be read of the code."""
    computes = computes_of(found)
    # Which token moves which is a fact, and no law: without a mask that is read it is unknown.
    unread = [own for own in report.findings if own.name == "influence"]
    if unread and not computes.is_known:
        others = tuple(own for own in report.findings if own not in unread)
        said = "\n".join(own.detail for own in unread)
        report = replace(report, findings=others, missing=f"{said}\n{report.missing}".strip())
    whole = replace(report, computes=computes)
    if report.faults or computes.is_known:
        return whole
    stage = f"It could be read up to the {computes.stage}: {computes.reason}."
    return replace(whole, missing="\n".join(part for part in (stage, report.missing) if part))
