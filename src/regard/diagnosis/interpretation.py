"""How a subject can be understood: as attention, right or with certain mistakes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Stages, found_stages
from regard.diagnosis.catalogue import Severity, fault
from regard.diagnosis.counterexamples import Proof, Shown, detail_of, proof_of
from regard.diagnosis.mistake_names import names_of
from regard.diagnosis.mistake_search import explanations
from regard.diagnosis.pre_score_steps import bending, learned_scale, manner_of
from regard.diagnosis.reference_attention import Guess, Material
from regard.diagnosis.report import Finding
from regard.diagnosis.rotated_inputs import turned
from regard.diagnosis.run_tensors import are_named, materials, right_guesses, weighed
from regard.diagnosis.score_explanation import slope_of, weighings
from regard.diagnosis.softmax_detection import exponentials
from regard.diagnosis.source_lines import event_of
from regard.diagnosis.subject import Subject
from regard.diagnosis.traced_run import Edit, Event, traced
from regard.tracing.tracer import Caller

__all__ = ["Reading", "Told", "finding_of", "understood", "without_dropout"]


@dataclass(frozen=True, eq=False)
class Reading:
    """A subject as attention with certain mistakes, or none.

    Attributes:
        subject: with its layout.
        stages: of a run.
        material: what the guesses are made of.
        guess: what does the same as the code.
        right: what it should do.
        others: guesses that do the same as well.
    """

    subject: Subject
    stages: Stages
    material: Material
    guess: Guess
    right: Guess
    others: tuple[Guess, ...] = ()

    @property
    def shown(self) -> Shown:
        """What the code does, beside what is right."""
        return Shown(self.guess, self.right, self.others)

    @property
    def names(self) -> list[str]:
        """The mistakes."""
        return names_of(self.material, self.guess, self.right)


@dataclass(frozen=True, eq=False)
class Told:
    """A mistake that was seen, before it is written down.

    Attributes:
        name: in the catalogue.
        stages: of a run in which it happened; None where no line tells.
        reading: whose guess shows it in numbers; None where none does.
        event: the operation that makes it, where that is known.
        caller: its line, where that is known without an operation.
        detail: what was measured.
        severity: where it is another than the catalogue's.
        proof: where the reading shows none.
    """

    name: str
    stages: Stages | None
    reading: Reading | None
    event: Event | None = None
    caller: Caller | None = None
    detail: str = ""
    severity: Severity | None = None
    proof: Proof | None = None


def finding_of(told: Told) -> Finding:
    """The finding, with its line and its proof."""
    entry = fault(told.name)
    event = told.event
    if event is None and told.stages is not None:
        event = event_of(told.name, told.stages)
    caller = told.caller or (event.caller if event is not None else None)
    proof = told.proof
    if proof is None and told.reading is not None:
        proof = proof_of(told.name, told.reading.material, told.reading.shown)
    detail = told.detail
    if told.reading is not None:
        detail = detail or detail_of(told.name, told.reading.material, told.reading.shown)
    return Finding(
        entry,
        told.severity or entry.severity,
        caller.file if caller else None,
        caller.line if caller else None,
        detail,
        *((None, None, "") if proof is None else proof),
    )


def without_dropout(subject: Subject, extra: Mapping[str, Any] | None = None) -> dict[int, Edit]:
    """Edits that take out what is random in a run."""
    edits: dict[int, Edit] = {}
    for event in traced(subject, subject.inputs(), extra=extra):
        if event.operator == "bernoulli_":
            edits[event.place] = _kept
        if event.operator == "native_dropout":
            edits[event.place] = lambda _, args: args[0]
    return edits


def _kept(output: Tensor, args: tuple[Any, ...]) -> Tensor:
    """What dropout that drops nothing would draw; a probability of 0.5 is not passed on."""
    return torch.full_like(output, args[1] if len(args) > 1 else 0.5)


def understood(subject: Subject, causal: bool | None, *, pairs: bool = True) -> Reading | None:
    """The reading with the fewest mistakes; None where none fits.

    Args:
        subject: what runs.
        causal: what it is meant to be; None: either.
        pairs: whether to look for several mistakes at once.
    """
    inputs = subject.inputs()
    stages = found_stages(subject, inputs, edits=without_dropout(subject))
    rights = list(right_guesses(subject, stages, causal))
    found = materials(subject, inputs, stages)
    is_learned = learned_scale(subject, stages) is not None
    for material in found:
        free = material.scale if is_learned else None
        every = rights if free is None else [*rights, *(replace(r, scale=free) for r in rights)]
        guesses, right = explanations(material, every, [])
        if right is not None:
            return Reading(subject, stages, material, guesses[0], right)
    if stages.softmax is None and not exponentials(stages.trace):
        return None  # a mistake that happens to give the same, as a large scale gives the values
    bases = [
        right for right in rights if right.split == right.merge == "columns" and right.scale is None
    ]
    plain = [base for base in bases if base.parts == ("q", "k", "v")]
    named = are_named(stages) or len(stages.projections) == 1 or subject.given.kind == "qkv"
    singles = plain if named else bases
    alone = _explained(subject, stages, found, singles, (1,))
    if alone is not None or not pairs:
        return alone
    # Scores that are no multiple of query times key hold a turn, a bias or a cap: no pair will fit.
    if stages.softmax is None or any(material.scale is not None for material in found):
        seen = _explained(subject, stages, found[:1], plain, (2, 3))
        return seen or _by_weights(subject, found, stages, causal)
    if bending(stages) is not None and manner_of(subject, stages) == "other":
        return _by_weights(subject, found, stages, causal)
    seen = _as_they_met(subject, found, stages, causal)
    seen = seen or _by_weights(subject, found, stages, causal)
    return seen or _explained(subject, stages, found[:1], plain, (2, 3))


def _as_they_met(
    subject: Subject, found: list[Material], stages: Stages, causal: bool | None
) -> Reading | None:
    """A reading from the queries and keys that were multiplied."""
    for material in found:
        met = turned(stages, material) if material.is_likely else None
        if met is None or met.scale is None:
            continue
        if manner_of(subject, stages) not in ("linear", "normed"):
            return None
        every = right_guesses(subject, stages, causal)
        rights = [g for g in every if g.parts[:2] == ("q", "k") and g.split == "columns"]
        if met.is_scaled_freely or learned_scale(subject, stages) is not None:
            rights = [replace(right, scale=met.scale) for right in rights]
        guesses, right = explanations(met, rights, rights[:2], (1, 2))
        if right is not None:
            return Reading(subject, stages, met, guesses[0], right)
    return None


def _explained(
    subject: Subject,
    stages: Stages,
    found: list[Material],
    bases: list[Guess],
    counts: tuple[int, ...],
) -> Reading | None:
    for material in found:
        if not material.is_likely:
            continue
        guesses, right = explanations(material, [], bases, counts)
        if right is not None:
            others = tuple(guesses[1:])
            return Reading(subject, stages, material, guesses[0], right, others)
    return None


def _by_weights(
    subject: Subject, found: list[Material], stages: Stages, causal: bool | None
) -> Reading | None:
    """A reading of what follows the weights, where the scores are more than query times key."""
    fitting = list(weighings(subject, found, stages))
    for weighing, plain in fitting:
        seen = _weighed_reading(subject, stages, weighing, plain, causal)
        if seen is not None:
            return seen
    if fitting:
        return None
    for material in found[:1]:
        for weighing in weighed(subject, material, stages):
            guesses, right = explanations(weighing, [], [Guess()], (1, 2))
            if right is not None:
                return _weighed_reading(subject, stages, weighing, guesses[0], causal)
    return None


def _weighed_reading(
    subject: Subject,
    stages: Stages,
    material: Material,
    guess: Guess,
    causal: bool | None,
) -> Reading | None:
    """A reading with what the weights and scores themselves say of mask and scale.

    None where it shows no mistake, and the scores are not query times key, a scale and a bias.
    """
    assert material.weights is not None
    right = replace(Guess(guess.parts), mask="causal:same" if causal else "none")
    if causal and guess.mask == "none":
        guess = replace(guess, mask=_mask_of(material.weights))
    slope = slope_of(subject, stages, material, guess)
    known = dict.fromkeys([None, *(g.scale for g in right_guesses(subject, stages, causal))])
    is_told = slope is not None and slope.number > 0
    is_learned = learned_scale(subject, stages) is not None
    if slope is not None and is_told and not slope.is_free and not is_learned:
        own = material.head_dim**-0.5
        near = [n for n in known if abs(slope.number / (n or own) - 1) <= 2e-3]
        guess = replace(guess, scale=near[0] if near else slope.number)
        right = replace(right, scale=near[0]) if near else right
    seen = Reading(subject, stages, material, guess, right)
    return seen if is_told or seen.names else None


def _mask_of(weights: Tensor) -> str:
    """How far weights reach past the diagonal."""
    reached = (weights > 1e-7).any(0).any(0)
    if not bool(reached.triu(1).any()):
        without = not bool(reached.diagonal()[1:].any())
        return "causal:without_self_but_first" if without else "causal:same"
    return "none" if bool(reached.triu(2).any()) else "causal:with_next"
