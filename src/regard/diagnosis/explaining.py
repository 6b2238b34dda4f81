"""Explain a broken law by a known mistake: its name, its line, and what to write instead."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.diagnosis.catalogue import fault, is_mistake
from regard.diagnosis.facts.computed import computed
from regard.diagnosis.laws.judge import LAWS, judged
from regard.diagnosis.laws.lab import Lab
from regard.diagnosis.laws.law import UNUSED, Breach, Law, Pair, Result
from regard.diagnosis.laws.tape import Change, Place
from regard.diagnosis.lines import Lines
from regard.diagnosis.repairs import REPAIRS
from regard.diagnosis.report import Finding, finding_of
from regard.diagnosis.signature import projection_role

__all__ = ["explained"]

_TRIED = LAWS[:5]
"""The laws that are tried again after a repair: from ``runs`` to ``padding``."""
_ORDER = [law.name for law in _TRIED]

# The code is no attention any more, so that other laws say nothing.
_LAST = (
    "values-mixed-along-wrong-axis",
    "heads-and-tokens-exchanged",
    "wrong-values",
    "attends-across-batch",
    "mask-unused",
)


@dataclass(frozen=True, eq=False)
class _Mistake:
    """A mistake that explains a broken law.

    Attributes:
        name: in the catalogue.
        place: its line.
        fix: repairs it; None if nothing does.
        breach: the counterexample that it explains.
        repaired: the lab in which it is repaired, where one is at hand.
    """

    name: str
    place: Place | None
    fix: Change | None
    breach: Breach
    repaired: Lab | None = None


def explained(lab: Lab, results: Sequence[Result]) -> list[Finding]:
    """Return the known mistakes that break the laws; empty if none is known to."""
    found: list[_Mistake] = []
    before = _ORDER[: _ORDER.index("padding")]
    early = [r for r in results if r.breach and r.law.name in before]
    if early and (turned := _turned_mask(lab)) is not None:
        return [_finding(lab, turned)]
    own = lab
    for _ in range(4):
        mistake = next(_mistakes(own, results, [t.name for t in found]), None)
        if mistake is None:
            break
        found.append(mistake)
        if mistake.fix is not None:
            own = mistake.repaired or own.repaired(mistake.fix)
            results = judged(own, _TRIED)
        elif mistake.name in _LAST:
            break
    names = {mistake.name for mistake in found}
    # Under a mask that is inverted one row has nothing to attend to either way.
    doubtful = {"nan-rows"} if "mask-inverted" in names else set[str]()
    findings = [_finding(lab, mistake) for mistake in found if mistake.name not in doubtful]
    return sorted(findings, key=lambda finding: finding.number)


def _turned_mask(lab: Lab) -> _Mistake | None:
    """Return ``mask-inverted`` if all can be read with a needed mask turned round."""
    turned = lab.specimen.turned(is_sure=True)
    if turned is None:
        return None
    other = Lab(turned)
    pairs = zip(turned.slots, lab.specimen.slots, strict=True)
    before = [own for slot, own in pairs if slot is not own]
    if computed([turned]).unread is not None:
        return None
    place = _lines(other, Breach("")).of("mask-inverted")
    names = ", ".join(slot.name for slot in before)
    says = f"With {names} turned round it is attention."
    return _Mistake("mask-inverted", place, None, Breach(says))


def _mistakes(lab: Lab, results: Sequence[Result], known: Sequence[str]) -> Iterator[_Mistake]:
    """Yield mistakes that explain the first broken law that any mistake explains."""
    broken = [(r.law.name, r.breach) for r in results if r.breach]
    idle = [breach.kind for law, breach in broken if law == "gradient"]
    for law, breach in broken:
        if law == "gradient" and "wrong-projection" in known:
            continue
        if breach.kind == "shifted":  # no mistake of the catalogue
            break
        for mistake in _of_law(lab, law, breach, idle):
            if mistake.name not in known:
                yield mistake
        if law in ("runs", "samples"):
            break  # what follows says little


def _of_law(lab: Lab, law: str, breach: Breach, idle: Sequence[str]) -> Iterator[_Mistake]:
    lines = _lines(lab, breach)
    name = breach.kind if is_mistake(breach.kind) else None
    if (law == "gradient" and breach.kind != "cut") or (
        breach.kind == "missing" and " or as " not in breach.says
    ):
        roles = [projection_role(kind.removeprefix("idle ")) for kind in idle]
        # Under a mask that hides all keys no query and no key has any influence.
        if not any(slot.kind in ("filled", "lengths") for slot in lab.specimen.slots):
            name = next((UNUSED[role] for role in roles if role in UNUSED), None)
    if lab.specimen.has_own_size and (number := lines.columnwise()) is not None:
        yield _Mistake("values-mixed-along-wrong-axis", lines.place(number), None, breach)
        return
    if breach.kind == "alone":
        shape = lines.score_shape
        if shape is not None and shape[-1] != lab.specimen.tokens:
            name = "heads-and-tokens-exchanged"
    if name is not None:
        place = lines.of(name)
        # The line that runs a projection says more than the place at which a gradient ends.
        if name != "wrong-projection" or breach.kind == name:
            place = breach.place or place
        yield _Mistake(name, place, None, breach)
        return
    yield from _repaired(lab, law, breach)
    if law == "samples" and breach.is_definite and not breach.kind:
        yield _Mistake("attends-across-batch", breach.place, None, breach)


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


def _repaired(lab: Lab, law: str, breach: Breach) -> Iterator[_Mistake]:
    """Yield the mistake whose repair mends a law."""
    if law not in _ORDER:
        return
    laws = _TRIED[: _ORDER.index(law) + 1]
    if breach.kind == "raises":  # it runs with some sizes only: there it should be attention
        lab = Lab(replace(lab.specimen, is_fixed=True), changes=lab.changes)
        laws = _TRIED[: _ORDER.index("influence") + 1]
        if all(_outcome(lab, law) != "broken" for law in laws):
            return
    s = lab.specimen
    contents = s.contents(s.batch, s.tokens)
    tried = [(repair, laws) for repair in REPAIRS]
    if law == "runs" and breach.kind == "nan" and s.masks:  # other repairs end a NaN, too
        [first] = [repair for repair in REPAIRS if repair.name == "nan-rows"]
        tried.insert(0, (first, (*_TRIED[1:5], *laws)))
    for repair, needed in tried:
        if law not in repair.laws or (repair.name == "not-causal" and breach.place is not None):
            continue
        own = lab.repaired(repair.fix)
        try:
            *_, tape = own.called(own.fresh(), contents, breach.extra, torch.float64)
        except Exception:  # noqa: BLE001  # somebody's code may raise anything
            continue
        if repair.fix not in tape.changed:
            continue
        kept = None if breach.kind == "raises" else own
        mistake = _Mistake(repair.name, tape.changed[repair.fix], repair.fix, breach, kept)
        if _mends(own, needed):
            if repair.name in ("not-causal", "keys-not-transposed"):
                line = _lines(lab, breach).of(repair.name)
                mistake = replace(mistake, place=line or mistake.place)
            yield mistake
            return


def _mends(lab: Lab, laws: Sequence[Law]) -> bool:
    """Return True if the last law holds and no other is broken; most repairs fail the last."""
    *others, last = laws
    [result] = judged(lab, [last])
    # The meaning of a mask may be open, whatever the code does with it.
    if result.outcome != "held" and not result.reason.startswith("The code reads"):
        return False
    return all(_outcome(lab, law) != "broken" for law in others)


def _outcome(lab: Lab, law: Law) -> str:
    """Return the outcome of one law, whatever others give: the first broken one is enough."""
    return judged(lab, [law])[0].outcome


def _finding(lab: Lab, mistake: _Mistake) -> Finding:
    pair = _proof(lab, mistake) or mistake.breach.pair
    return finding_of(fault(mistake.name), mistake.place, mistake.breach.says, pair)


# Two small matrices


def _proof(lab: Lab, mistake: _Mistake) -> Pair | None:
    """Return the weights, or the output, as they are and as they are after the repair."""
    if mistake.fix is None:
        return None
    s = lab.specimen
    contents = s.contents(s.batch, s.tokens)
    try:
        runs = [
            own.run(contents, keeps=True, extra=mistake.breach.extra)
            for own in (lab, lab.repaired(mistake.fix))
        ]
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return None
    sides = [Lines(run.steps, run.inputs).weights_before for run in runs]
    for did, right in zip(*sides, strict=False):
        pair = compared(did, right, "weights: queries down, keys across")
        if pair is not None:
            return pair
    return compared(runs[0].rows, runs[1].rows, "output: tokens down, columns across")


_SHOWN = 4
_LEAST = 1e-3


def compared(did: Tensor, right: Tensor, caption: str) -> Pair | None:
    """Return the first small part of two tensors where they differ visibly; None if nowhere.

    Args:
        did: (..., rows, columns).
        right: likewise.
        caption: what they hold.
    """
    if did.shape != right.shape or did.ndim < 2:
        return None
    gap = (did - right).abs().nan_to_num(1.0, posinf=1.0)
    gap = gap.masked_fill(did.isnan() & right.isnan(), 0.0)
    if float(gap.max()) < _LEAST:
        return None
    rows, columns = (min(_SHOWN, length) for length in gap.shape[-2:])
    parts = gap.unfold(-2, rows, 1).unfold(-2, columns, 1).flatten(-2).amax(-1)
    enough = parts >= float(parts.max()) / 2
    *leading, row, column = (int(i) for i in enough.nonzero()[0])
    place = (*leading, slice(row, row + rows), slice(column, column + columns))
    return did[place].detach(), right[place].detach(), caption
