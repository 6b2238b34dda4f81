"""The verdict on what code computes: facts compared with what was expected, and universal laws."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from regard.diagnosis.catalogue import Fault, fault, is_mistake
from regard.diagnosis.expectation import ANY, Spec
from regard.diagnosis.explaining import explained
from regard.diagnosis.facts.arguments import Mask
from regard.diagnosis.facts.computed import Computed, Statement, computed
from regard.diagnosis.facts.formula import is_same_scale
from regard.diagnosis.facts.judging import Deviation, deviations
from regard.diagnosis.facts.rows import Unread
from regard.diagnosis.facts.statement import computes_of
from regard.diagnosis.facts.visible import Band
from regard.diagnosis.inputs.lab import Lab
from regard.diagnosis.inputs.specimen import Specimen
from regard.diagnosis.inputs.tape import Place
from regard.diagnosis.intention import Intention
from regard.diagnosis.laws.judge import LAWS, judged
from regard.diagnosis.laws.law import Pair, Result
from regard.diagnosis.report import Finding, Report, finding_of
from regard.diagnosis.verdicts import notes_of, of_law, report_of

__all__ = ["fact_findings", "report_on", "stated", "with_computes"]

_UNIVERSAL = ("runs", "pure", "samples", "padding", "gradient", "large", "training", "cache")
"""The laws that no intention changes. All others are facts that are read."""


def report_on(readings: Sequence[Specimen], intention: Intention) -> Report:
    """Return the report on code: its facts, or what its numbers show; else what the laws say."""
    formulas = computed(readings)
    if formulas.is_told:
        return stated(formulas, intention)
    return with_computes(report_of(readings), formulas)


def stated(formulas: Computed, intention: Intention, *, is_model: bool = False) -> Report:
    """Return the report on code of which all could be read, or whose numbers show mistakes.

    Args:
        formulas: what it computes.
        intention: of its author.
        is_model: it has several attentions, of which some may be frozen.
    """
    if formulas.unread is not None:
        return _with_mistakes(formulas, formulas.unread, intention)
    lab = Lab(formulas.specimen)
    of_facts = fact_findings(formulas, intention)
    # A fact that is wrong already says more than the law of padding, which looks at the same.
    has_fault = any(finding.severity == "fault" for finding in of_facts)
    left_out = {"padding"} if has_fault else set[str]()
    left_out |= {"gradient"} if is_model else set()
    names = {*_UNIVERSAL} - left_out
    results = judged(lab, [law for law in LAWS if law.name in names])
    findings = _law_findings(lab, results)
    named = {finding.name for finding in findings}
    findings += [finding for finding in of_facts if finding.name not in named]
    if any(finding.name == "mask-inverted" for finding in findings):
        # Under a mask that is inverted one row has nothing to attend to either way.
        findings = [finding for finding in findings if finding.name != "nan-rows"]
    if not findings:
        masks = [statement.facts.mask for statement in formulas.statements]
        findings = notes_of(lab, is_open=all(str(mask) == "every key" for mask in masks))
    findings.sort(key=lambda finding: (_ORDER.index(finding.severity), finding.number))
    untried = [
        f"The law {result.law.name!r} was not tried: {result.reason}"
        for result in results
        if result.outcome == "not tried" and not result.reason.startswith("The law ")
    ]
    if results[0].breach is not None:
        untried = []  # code that does not run gives other laws the same reason
    return Report(
        name=formulas.specimen.name,
        findings=tuple(findings),
        read_as=formulas.specimen.words,
        missing=_joined([_untried_argument(formulas, intention.expected), *untried]),
        laws=tuple(results),
        notes=tuple(lab.notes),
        computes=computes_of(formulas),
    )


_ORDER = ("fault", "difference", "note")


def _law_findings(lab: Lab, results: Sequence[Result]) -> list[Finding]:
    """Return the findings of the laws that are broken for sure, by the names of mistakes."""
    certain = [r for r in results if r.breach is not None and r.breach.kind != "undeclared"]
    if not certain:
        return []
    named = [finding for finding in explained(lab, results) if finding.severity == "fault"]
    return named or [of_law(certain[0])]


def fact_findings(formulas: Computed, intention: Intention) -> list[Finding]:
    """Return a finding for each fact that is not what was expected, or is off its standard."""
    facts = [statement.facts for statement in formulas.statements]
    expected, declared = intention.expected, intention.declared
    indexed = [(*pair, expected is not None) for pair in deviations(facts, expected)]
    if declared is not None:
        facts_off = {deviation.fact for _, deviation, _ in indexed}
        indexed += [
            (index, deviation, True)
            for index, deviation in deviations(facts, declared, is_partial=True)
            if deviation.fact not in facts_off or deviation.mistake
        ]
    findings: dict[tuple[str, str | None, int | None], Finding] = {}
    for index, deviation, is_meant in indexed:
        is_fault = is_meant or deviation.is_wrong
        statement = formulas.statements[index]
        finding = _finding(deviation, statement, is_fault=is_fault)
        if len(formulas.statements) > 1:
            detail = f"In {statement.facts.module}. {finding.detail}".strip()
            finding = replace(finding, detail=detail)
        key = (finding.name, finding.file, finding.line)
        if key not in findings or findings[key].severity == "difference":
            findings[key] = finding
    return list(findings.values())


def _finding(deviation: Deviation, statement: Statement, *, is_fault: bool) -> Finding:
    severity = "fault" if is_fault else "difference"
    standard = "expected" if is_fault else "the standard"
    detail = f"{deviation.fact}: {deviation.actual}; {standard}: {deviation.expected}."
    if deviation.mistake:
        entry = replace(fault(deviation.mistake), severity=severity)
    else:
        entry, detail = Fault(deviation.fact, str(deviation), "", severity=severity), ""
    lines, stage = statement.facts.lines, deviation.stage
    stages = (stage, stage.partition(" ")[0], *_NEXT.get(stage, ()), "softmax", "product")
    file_line = next((lines[stage] for stage in stages if lines.get(stage)), "")
    return finding_of(entry, _place(file_line), detail, _pair(deviation, statement))


def _place(file_line: str) -> Place | None:
    file, _, number = file_line.rpartition(":")
    return Place(file, int(number)) if number.isdigit() else None


def _with_mistakes(formulas: Computed, unread: Unread, intention: Intention) -> Report:
    """Return the report on code whose numbers show mistakes."""
    findings: list[Finding] = []
    for mistake in unread.mistakes:
        if mistake.scale is not None and _is_meant(mistake.scale, intention.expected):
            continue
        pair = None if mistake.weights is None else _shown_pair(*mistake.weights)
        is_known = is_mistake(mistake.name)
        entry = fault(mistake.name) if is_known else Fault(mistake.name, mistake.says, "")
        says = mistake.says if is_known else ""
        findings.append(finding_of(entry, _place(mistake.line), says, pair))
    seen = next((each.weights[0] for each in unread.mistakes if each.weights is not None), None)
    is_of_mask = any(finding.name in _WEAK_MASKS for finding in findings)
    is_causal = bool(intention.causal) and not is_of_mask
    if is_causal and seen is not None and bool(seen.triu(1).any()):
        findings.append(finding_of(fault("not-causal"), _place(unread.line), ""))
    findings.sort(key=lambda finding: finding.number)
    specimen = formulas.specimen
    return Report(specimen.name, tuple(findings), specimen.words, computes=computes_of(formulas))


_WEAK_MASKS = ("mask-added-as-numbers", "mask-fill-value")


def _is_meant(scale: float, expected: Spec | None) -> bool:
    """Return True if a spec has this scale, or any."""
    if expected is None or expected.scale is None:
        return False
    return expected.scale is ANY or is_same_scale(scale, float(expected.scale))


_NEXT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("scale", "keys", "query layer", "key layer", "value layer"), ("product",)
)
"""The stages whose line tells where code lacks a stage."""


def _pair(deviation: Deviation, statement: Statement) -> Pair | None:
    """Return the first weights of the code, and those that were expected."""
    facts, rows = statement.facts, statement.rows
    if deviation.number is not None and all(facts.scale):
        factor = deviation.number / facts.scale[0]
        inner_scale = tuple(scale * factor for scale in facts.inner_scale)
        corrected = replace(facts, inner_scale=inner_scale)
    elif deviation.fact in ("causal", "mask") and deviation.expected.startswith("causal"):
        corrected = replace(facts, mask=Mask(Band(None, 0)))
    else:
        return None
    expected = corrected.weights(rows.query, rows.key, corrected.mask, {})
    if expected is None:
        return None
    return _shown_pair(rows.weights, expected)


def _shown_pair(weights: Tensor, expected: Tensor) -> Pair:
    """Return the first of both, (samples, heads, queries, keys)."""
    did, attention = (t[0, 0, :_SHOWN, :_SHOWN] for t in (weights, expected))
    count = weights.shape[-1]
    caption = f"weights of tokens 1 to {len(did)} (down) for tokens 1 to {len(did)} of {count}"
    return did, attention, caption


_SHOWN = 4


def _untried_argument(formulas: Computed, expected: Spec | None) -> str:
    """Return which argument of a spec no run of check could vary; empty for none."""
    if expected is None or expected.padding is ANY:
        return ""
    tried: set[str] = set()
    for statement in formulas.statements:
        facts = statement.facts
        tried |= {*facts.masked, *facts.consistent_readings}
        tried |= {hiding.argument for hiding in facts.hidings}
    untried = [name for name in expected.padding if name not in tried]
    if not untried:
        return ""
    return (
        f"What {untried[0]} hides was not tried: it shows in no run. Pass an example in which it "
        "hides some keys: args= and kwargs=."
    )


def with_computes(report: Report, formulas: Computed) -> Report:
    """Return a report that the laws alone gave, with what could be read of the code."""
    computes = computes_of(formulas)
    # Which token moves which is a fact, and no law: without a mask that is read it is unknown.
    influences = [finding for finding in report.findings if finding.name == "influence"]
    if influences and not computes.is_known:
        findings = tuple(finding for finding in report.findings if finding not in influences)
        details = [finding.detail for finding in influences]
        report = replace(report, findings=findings, missing=_joined([*details, report.missing]))
    missing = report.missing
    if not report.faults and not computes.is_known:
        stage = f"It could be read up to the {computes.stage}: {computes.reason}."
        missing = _joined([stage, missing])
    return replace(report, computes=computes, missing=missing)


def _joined(sentences: Sequence[str]) -> str:
    return "\n".join(filter(None, sentences))
