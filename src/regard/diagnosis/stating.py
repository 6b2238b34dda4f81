"""The verdict on what code computes: facts compared with what was expected, and universal laws."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.diagnosis.catalogue import Fault, fault, is_mistake
from regard.diagnosis.expectation import ANY, Spec
from regard.diagnosis.facts.arguments import Mask
from regard.diagnosis.facts.computed import Computed, Statement, computed
from regard.diagnosis.facts.fact_lines import written_line
from regard.diagnosis.facts.formula import is_same_scale
from regard.diagnosis.facts.judging import Deviation, deviations, has_no_positions
from regard.diagnosis.facts.rows import Mistake, Unread
from regard.diagnosis.facts.statement import common_spec, computes_of
from regard.diagnosis.facts.visible import Band
from regard.diagnosis.inputs.lab import Lab, as_tensors, normal
from regard.diagnosis.inputs.specimen import Specimen
from regard.diagnosis.inputs.tape import Place, addresses, first_place, place_in, turns_all_axes
from regard.diagnosis.intention import Intention, intention_of
from regard.diagnosis.laws.judge import LAWS, judged
from regard.diagnosis.laws.law import Breach, Law, Pair, Result
from regard.diagnosis.report import Finding, Report, finding_of


def report_on(readings: Iterable[Specimen], intention: Intention) -> Report:
    """Return the report on code: what it computes, compared with an intention, and its laws."""
    return stated(computed(readings), intention)


def stated(formulas: Computed, intention: Intention) -> Report:
    """Return the report on code, as far as it could be read."""
    unread = formulas.unread
    if unread is not None and any(_counts(mistake, intention) for mistake in unread.mistakes):
        return _with_mistakes(formulas, unread, intention)
    lab = Lab(formulas.specimen)
    # A fact that is wrong already says more than the law of padding, which looks at the same.
    has_fault = any(f.severity == "fault" for f in fact_findings(formulas, intention))
    left_out = {"padding"} if has_fault else set[str]()
    left_out |= {"gradient"} if len(formulas.statements) > 1 else set()  # a layer may be frozen
    results = judged(lab, [law for law in LAWS if law.name not in left_out])
    findings = _findings(lab, formulas, intention, results)
    if not findings and unread is None:
        findings = _notes(lab, formulas)
    findings.sort(key=lambda finding: (_ORDER.index(finding.severity), finding.number))
    has_fault = any(finding.severity == "fault" for finding in findings)
    missing = [_untried_argument(formulas, intention.expected), *_untried_laws(results)]
    computes, no_pin = computes_of(formulas), ""
    if unread is None and intention.expected is None and not has_fault:
        spec, no_pin = _pinning(common_spec(formulas.statements), lab, formulas, results)
        computes = replace(computes, spec=spec)
    if unread is not None:
        missing = [
            f"It could be read up to the {computes.stage}: {computes.reason}.",
            *(result.breach.says for result in results if result.breach is not None),
            *(_ASKED.format(form.argument) for form, *_ in lab.specimen.forms if not form.is_sure),
            *missing,
        ]
        missing = [] if has_fault else missing
    return Report(
        name=formulas.specimen.name,
        findings=tuple(findings),
        read_as=formulas.specimen.words,
        missing="\n".join(filter(None, missing)),
        laws=tuple(results),
        notes=tuple(lab.notes),
        computes=computes,
        no_pin=no_pin,
    )


def _findings(
    lab: Lab, formulas: Computed, intention: Intention, results: Sequence[Result]
) -> list[Finding]:
    """Return the findings of laws, facts and influence, compared with an intention."""
    of_facts = fact_findings(formulas, intention)
    if any(finding.name in _UNUSED for finding in of_facts):
        gradient = next((result for result in results if result.law.name == "gradient"), None)
        of_facts = [*_of_projections(of_facts, intention, gradient)]
        # A projection that is not used gets no gradient, so that the law says the same.
        results = [r for r in results if r is not gradient or r.outcome != "broken"]
    findings = _law_findings(results, formulas)
    if not (findings or of_facts):
        findings = _of_influence(lab, intention, formulas)
    named = {finding.name for finding in findings}
    findings += [finding for finding in of_facts if finding.name not in named]
    if any(finding.name == "mask-inverted" for finding in findings):
        # Under a mask that is inverted one row has nothing to attend to either way.
        findings = [finding for finding in findings if finding.name != "nan-rows"]
    return findings


def _pinning(
    spec: Spec, lab: Lab, formulas: Computed, results: Sequence[Result]
) -> tuple[Spec | None, str]:
    """Return the spec with which this very code is right; None, and the reason, if there is none.

    Args:
        spec: all facts that were read.
        lab: runs the code.
        formulas: what the code computes.
        results: those of the laws.
    """
    reasons: list[str] = []
    # A layer that lets later tokens through beside a causal attention is not causal, nor the rest.
    for candidate in (spec, replace(spec, causal=ANY)):
        pinned = intention_of(candidate, None, None)
        faults = [f for f in _findings(lab, formulas, pinned, results) if f.severity == "fault"]
        untried = _untried_argument(formulas, candidate)
        if not (faults or untried):
            return candidate, ""
        names = " and ".join(dict.fromkeys(finding.name for finding in faults))
        reasons.append(f"no spec has {names}" if faults else untried)
    return None, reasons[0]


_ASKED = "Nothing says what {0} means: pass means={{{0!r}: 'True keeps'}}, or 'True hides'."
_ORDER = ("fault", "difference", "note")
_UNUSED = ("wrong-projection", "wrong-values")
"""The mistakes that leave a projection unused."""


def _of_projections(
    findings: Sequence[Finding], intention: Intention, gradient: Result | None
) -> Iterator[Finding]:
    """Yield findings, of which those of shared projections are faults if another one is idle.

    If all parameters get a gradient, the code has no other projection, as somebody may mean it:
    values that are not projected, or queries that are keys. So an intention leaves them free.

    Args:
        findings: of the facts.
        intention: of the author.
        gradient: the law of gradients, which shows a projection that is idle; None: not tried.
    """
    outcome = "not tried" if gradient is None else gradient.outcome
    is_expected = intention.expected is not None
    for finding in findings:
        if finding.name not in _UNUSED or finding.severity == "fault":
            yield finding
        elif outcome == "broken" or (is_expected and outcome != "held"):
            yield replace(finding, fault=replace(finding.fault, severity="fault"))
        elif not is_expected:
            yield finding


def _untried_laws(results: Sequence[Result]) -> list[str]:
    """Return which laws could not be tried, in sentences."""
    if results[0].breach is not None:
        return []  # code that does not run gives other laws the same reason
    return [
        f"The law {result.law.name!r} was not tried: {result.reason}"
        for result in results
        if result.outcome == "not tried" and not result.reason.startswith("The law ")
    ]


def _law_findings(results: Sequence[Result], formulas: Computed) -> list[Finding]:
    """Return the findings of the laws that are broken for sure, by the names of mistakes."""
    is_read = formulas.unread is None
    certain = [
        (result.law, result.breach)
        for result in results
        if result.breach is not None and (is_read or result.breach.is_definite)
    ]
    findings: dict[str, Finding] = {}
    for law, breach in certain:
        if is_mistake(breach.kind):
            line = breach.place or _line_of(breach.kind, formulas)
            finding = finding_of(fault(breach.kind), line, breach.says, breach.pair)
            findings.setdefault(breach.kind, finding)
        if breach.kind == "raises" or (findings and law.name in ("runs", "samples")):
            break  # what follows says little
    unread = formulas.unread
    mask = place_in(unread.line) if unread is not None and unread.stage == "mask" else None
    return [*findings.values()] or [
        _of_law(
            law, replace(breach, place=breach.place or (mask if law.name == "padding" else None))
        )
        for law, breach in certain[:1]
    ]


def _of_influence(lab: Lab, intention: Intention, formulas: Computed) -> list[Finding]:
    """Return the finding on tokens that move other rows than those of a causal mask.

    Later tokens may move a row by another way than an attention that was read. Where nobody says
    what is meant, an attention that is causal shows that later tokens are to have no influence.
    """
    s, expected, unread = lab.specimen, intention.expected, formulas.unread
    masks = [statement.facts.mask for statement in formulas.statements]
    is_meant = intention.causal is None and expected is None and unread is None and bool(masks)
    is_meant = is_meant and all(mask is not None and mask.pattern.is_causal for mask in masks)
    if not (intention.causal or is_meant) or s.memory:
        return []
    try:
        seen = lab.influence
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return []
    if seen.shape[0] == seen.shape[1] and bool(seen.triu(1).any()):
        row, token = (int(n) + 1 for n in seen.triu(1).nonzero()[0])
        moved = f"output {row} moves with token {token}"
        if unread is not None:
            detail = f"{moved.capitalize()}."
            return [finding_of(fault("not-causal"), place_in(unread.line), detail)]
        if is_meant:
            says = f"The attention is causal, but {moved}, by another way."
            return [finding_of(Fault("causal", says, "", severity="difference"), None, "")]
        says = (
            f"causal: {moved}, by a way that is not the attention; expected: no output moves with "
            "a later token."
        )
        return [finding_of(Fault("causal", says, ""), None, "")]
    if unread is None:
        return []
    has_masks = any(not slot.source and slot.kind != "fixed" for slot in s.slots)
    hidden = (~seen).tril()
    if expected is None or expected.window is not None or has_masks or not bool(hidden.any()):
        return []
    row, token = (int(n) + 1 for n in hidden.nonzero()[0])
    says = f"mask: token {token} does not move output {row}; expected: causal, without a window."
    return [finding_of(Fault("mask", says, ""), place_in(unread.line), "")]


def _line_of(mistake: str, formulas: Computed) -> Place | None:
    """Return the line of the stage that a mistake is about; None if it is not known."""
    stage = {"wrong-values": "value", "causal-top-left": "mask"}.get(mistake, "product")
    lines = [
        written_line(stage, each.facts, each.written) or each.facts.lines.get(stage)
        for each in formulas.statements
    ]
    return place_in(next(filter(None, lines), ""))


def _of_law(law: Law, breach: Breach) -> Finding:
    """Return a broken law as a finding."""
    entry = Fault(law.name, f"The law {law.name!r} is broken. {law.__doc__}", law.formula)
    says = f"{breach.says} No known mistake gives these numbers."
    return finding_of(entry, breach.place, says, breach.pair)


def _notes(lab: Lab, formulas: Computed) -> list[Finding]:
    """Return what is right, but worth knowing."""
    s = lab.specimen
    notes: list[Finding] = []
    if not s.has_batch and not s.is_example and not _takes_batch(s):
        run = lab.run(s.contents(s.batch, s.tokens), keeps=True)
        parameters = {*addresses(run.parameters)}
        transposed_at = first_place(
            run.steps, lambda x: turns_all_axes(x) and parameters.isdisjoint(x.reads)
        )
        name = "unbatched-only" if transposed_at is None else "transpose-of-batch"
        notes.append(finding_of(fault(name), transposed_at or _line_of(name, formulas), ""))
    facts = [statement.facts for statement in formulas.statements]
    is_free = s.has_batch and not (s.masks or s.is_fixed) and lab.model is not None
    if is_free and len(s.sources) == 1 and all(map(has_no_positions, facts)):
        notes.append(finding_of(fault("no-positions"), None, ""))
    return notes


def _takes_batch(s: Specimen) -> bool:
    """Return True if a function of scores gives each matrix of a batch what it gives it alone."""
    if not s.has_own_size:
        return False
    widths = [int(slot.axes[-1]) for slot in s.sources.values()]
    batch = [normal(11 + n, 2, 3, 5, width) for n, width in enumerate(widths)]
    alone = zip(*(tensor.flatten(0, 1) for tensor in batch), strict=True)
    try:
        together, *outputs = [as_tensors(s.call(*given))[0] for given in (batch, *alone)]
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return False
    return torch.allclose(together.flatten(0, 1), torch.stack(outputs), atol=1e-9)


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
        is_fault = deviation.is_wrong or (is_meant and not deviation.is_of_projection)
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
        entry, detail = Fault(deviation.fact, detail, "", severity=severity), ""
    lines, stage = statement.facts.lines, deviation.stage
    stages = (stage, stage.partition(" ")[0], *_NEXT.get(stage, ()), "softmax", "product")
    file_line = written_line(stage, statement.facts, statement.written)
    file_line = file_line or next((lines[stage] for stage in stages if lines.get(stage)), "")
    return finding_of(entry, place_in(file_line), detail, _pair(deviation, statement))


def _with_mistakes(formulas: Computed, unread: Unread, intention: Intention) -> Report:
    """Return the report on code whose numbers show mistakes."""
    findings: list[Finding] = []
    for mistake in unread.mistakes:
        if not _counts(mistake, intention):
            continue
        pair = None if mistake.weights is None else _shown_pair(*mistake.weights)
        is_known = is_mistake(mistake.name)
        entry = fault(mistake.name) if is_known else Fault(mistake.name, mistake.says, "")
        says = mistake.says if is_known else ""
        findings.append(finding_of(entry, place_in(mistake.line), says, pair))
    seen = next((each.weights[0] for each in unread.mistakes if each.weights is not None), None)
    is_of_mask = any(finding.name in _WEAK_MASKS for finding in findings)
    is_causal = bool(intention.causal) and not is_of_mask
    if is_causal and seen is not None and bool(seen.triu(1).any()):
        findings.append(finding_of(fault("not-causal"), place_in(unread.line), ""))
    findings.sort(key=lambda finding: finding.number)
    specimen = formulas.specimen
    return Report(specimen.name, tuple(findings), specimen.words, computes=computes_of(formulas))


def _counts(mistake: Mistake, intention: Intention) -> bool:
    """Return False for a mistake that somebody may mean, or that no intention makes one."""
    expected = intention.expected
    is_open = expected is None or expected.scale is ANY
    if mistake.is_choice and is_open:
        return False
    return mistake.scale is None or not _is_meant(mistake.scale, expected)


_WEAK_MASKS = ("mask-added-as-numbers", "mask-fill-value")


def _is_meant(scale: float, expected: Spec | None) -> bool:
    """Return True if a spec has this scale, or any."""
    if expected is None or expected.scale is None:
        return False
    return expected.scale is ANY or is_same_scale(scale, float(expected.scale))


_NEXT: dict[str, tuple[str, ...]] = dict.fromkeys(
    (*("scale", "keys", "query layer", "key layer", "positions", "norm"), "softcap"),
    ("product",),
) | {"values": ("value",)}
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
