"""Explain a broken law by a known mistake: its name, its line, and what to write instead."""

from collections.abc import Sequence

from torch import Tensor

from regard.diagnosis.catalogue import fault, is_mistake
from regard.diagnosis.facts.computed import computed
from regard.diagnosis.inputs.lab import Lab
from regard.diagnosis.inputs.signature import projection_role
from regard.diagnosis.inputs.tape import Place
from regard.diagnosis.laws.law import UNUSED, Breach, Result
from regard.diagnosis.laws.lines import Lines
from regard.diagnosis.report import Finding, finding_of

__all__ = ["explained"]

# The code is no attention any more, so that other laws say nothing.
_LAST = (
    "values-mixed-along-wrong-axis",
    "heads-and-tokens-exchanged",
    "wrong-values",
    "attends-across-batch",
    "mask-unused",
)


def explained(lab: Lab, results: Sequence[Result]) -> list[Finding]:
    """Return the known mistakes that break the laws; empty if none is known to."""
    broken = [(result.law.name, result.breach) for result in results if result.breach]
    if any(law != "padding" for law, _ in broken) and (turned := _turned_mask(lab)) is not None:
        return [turned]
    idle = [breach.kind for law, breach in broken if law == "gradient"]
    findings: dict[str, Finding] = {}
    for law, breach in broken:
        if law == "gradient" and "wrong-projection" in findings:
            continue
        name, place = _mistake(lab, law, breach, idle)
        if name:
            finding = finding_of(fault(name), place, breach.says, breach.pair)
            findings.setdefault(name, finding)
        if law in ("runs", "samples") or name in _LAST:
            break  # what follows says little
    return sorted(findings.values(), key=lambda finding: finding.number)


def _turned_mask(lab: Lab) -> Finding | None:
    """Return ``mask-inverted`` if all can be read with a needed mask turned round."""
    turned = lab.specimen.turned(is_sure=True)
    if turned is None or computed([turned]).unread is not None:
        return None
    pairs = zip(turned.slots, lab.specimen.slots, strict=True)
    names = ", ".join(own.name for slot, own in pairs if slot is not own)
    place = _lines(Lab(turned), Breach("")).of("mask-inverted")
    return finding_of(
        fault("mask-inverted"), place, f"With {names} turned round it is attention.", None
    )


def _mistake(lab: Lab, law: str, breach: Breach, idle: Sequence[str]) -> tuple[str, Place | None]:
    """Return the mistake that breaks a law, and its line; "" for none that is known.

    Args:
        lab: whose law is broken.
        law: its name.
        breach: the counterexample.
        idle: the kinds of breaches of the law of gradients.
    """
    lines = _lines(lab, breach)
    name = breach.kind if is_mistake(breach.kind) else ""
    if (law == "gradient" and breach.kind != "cut") or (
        breach.kind == "missing" and " or as " not in breach.says
    ):
        roles = [projection_role(kind.removeprefix("idle ")) for kind in idle]
        # Under a mask that hides all keys no query and no key has any influence.
        if not any(slot.kind in ("filled", "lengths") for slot in lab.specimen.slots):
            name = next((UNUSED[role] for role in roles if role in UNUSED), "")
    if lab.specimen.has_own_size and (number := lines.columnwise()) is not None:
        return "values-mixed-along-wrong-axis", lines.place(number)
    if breach.kind == "alone":
        shape = lines.score_shape
        if shape is not None and shape[-1] != lab.specimen.tokens:
            name = "heads-and-tokens-exchanged"
    if law == "samples" and breach.is_definite and not breach.kind:
        return "attends-across-batch", breach.place
    # The line that runs a projection says more than the place at which a gradient ends.
    is_of_gradient = name == "wrong-projection" and breach.kind != name
    place = None if is_of_gradient else breach.place
    return name, place or (lines.of(name) if name else None)


def _lines(lab: Lab, breach: Breach) -> Lines:
    """Return the lines of the call that broke a law; none where it raises."""
    s = lab.specimen
    try:
        run = lab.run(s.contents(s.batch, s.tokens), keeps=True, extra=breach.extra)
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return Lines([], [])
    given = s.by_name(run.arguments)
    names = breach.extra or [slot.name for slot in s.slots if slot.kind == "filled"]
    masks = [given[name] for name in names if isinstance(given[name], Tensor)]
    return Lines(run.steps, run.inputs, masks)
