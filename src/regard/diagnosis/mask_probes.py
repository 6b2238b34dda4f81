"""What somebody's attention makes of a mask that it is given."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Stages, found_stages
from regard.diagnosis.counterexamples import weights_without_nan
from regard.diagnosis.interpretation import Reading, Told, without_dropout
from regard.diagnosis.mask_arguments import Form, forms_of, pattern, takes_masks
from regard.diagnosis.reference_attention import Material, reproduces
from regard.diagnosis.run_tensors import outputs_of
from regard.diagnosis.signature import Argument

__all__ = ["Trial", "mask_trials"]

_WRONG = (
    "inverted",
    "queries",
    "after",
    "added",
    "added_inverted",
    "filled_with_0",
    "first_sample",
    "repeated",
    "over_heads",
)


@dataclass(frozen=True, eq=False)
class Trial:
    """What came of one argument that takes a mask.

    Attributes:
        told: the mistake; None where there is none.
        words: how its mask was read, or that none could be; empty where that follows from the
            argument, or a mistake says it.
        open: what the caller must say before the mask can be judged; empty where nothing is open.
    """

    told: Told | None
    words: str = ""
    open: str = ""


def mask_trials(reading: Reading) -> list[Trial]:
    """What a mask shows, for each argument that takes one.

    Args:
        reading: what the code does without a mask.
    """
    return [_trial(reading, a) for a in takes_masks(reading.subject.given.arguments)]


def _trial(reading: Reading, argument: Argument) -> Trial:
    """What is wrong in every form of the mask that the code takes; nothing where one is right."""
    wrong = Trial(None, f"{argument.name} not judged", _unjudged(argument.name))
    for form in forms_of(argument, reading.subject.given.source):
        # After the tokens, padding is later than any token: a causal mask hides it by itself.
        causal = reading.right.mask != "none" and form.axes != "lengths"
        keep = pattern(form, reading.subject.layout, at_start=causal)
        stages = _run(reading, form, keep)
        if stages is None:
            continue
        shown = _shown(reading, stages, form, keep)
        if shown is None:
            continue
        if reproduces(shown, replace(reading.guess, given="right")):
            nan = _not_a_number(stages, reading.subject.layout.batch)
            return Trial(nan, _polarity(form), "" if form.is_sure else _undeclared(form))
        with_mask, without = (s.trace.outcome.output.nan_to_num() for s in (stages, reading.stages))
        moves = not torch.allclose(with_mask, without, rtol=1e-4, atol=1e-6)
        # Where the name does not tell, what is inverted is right in the next form.
        hows = _WRONG[0 if form.is_sure else 1 :] if moves else ("unused",)
        how = next((h for h in hows if reproduces(shown, replace(reading.guess, given=h))), None)
        if how is not None and wrong.told is None:
            guess = replace(reading.guess, given=how)
            seen = replace(reading, stages=stages, material=shown, guess=guess, right=reading.guess)
            wrong = Trial(Told(seen.names[0], stages, seen))
        if form.is_sure and form.axes in ("keys", "lengths"):
            break  # the name says that this form is meant
    return wrong


def _undeclared(form: Form) -> str:
    """Return the argument that would declare the meaning that the code gives a mask."""
    if form.kind == "added":
        return ""
    verb = "keeps" if form.keeps else "hides"
    value = "True" if form.kind == "bool" else "1"
    return (
        f"The code reads {form.argument} so that {value} {verb} a key. Nothing says if its callers "
        f"mean that.\n    Pass means={{{form.argument!r}: '{value} {verb}'}}, or what they mean."
    )


def _unjudged(name: str) -> str:
    return (
        f"No mask that check made shows what {name} does.\n"
        f"    Pass one, as callers do: args=(...), kwargs={{{name!r}: ...}}."
    )


def _polarity(form: Form) -> str:
    """What a mask that was applied well was taken to mean, where its numbers may mean either."""
    if form.axes == "lengths":
        return ""
    if form.kind == "added":
        return f"{form.argument}: added to the scores"
    value = "True" if form.kind == "bool" else "1"
    return f"{form.argument}: {value} {'allows' if form.keeps else 'hides'} a key"


def _run(reading: Reading, form: Form, keep: Tensor) -> Stages | None:
    """The stages of a run with a mask; None where the code does not take it in this form."""
    subject = reading.subject
    extra = {form.argument: form.encode(keep)}
    try:
        edits = without_dropout(subject, extra)
        return found_stages(subject, subject.inputs(), extra, edits, projected=False)
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return None


def _shown(reading: Reading, stages: Stages, form: Form, keep: Tensor) -> Material | None:
    """What guesses about the mask are compared with."""
    outputs = outputs_of(reading.subject.inputs(), stages)
    if reading.material.place >= len(outputs):
        return None
    output = outputs[reading.material.place]
    read = keep[:, 0] if form.is_of_keys else None
    return replace(reading.material, output=output, keep=keep, read=read)


def _not_a_number(stages: Stages, batch: int) -> Told | None:
    """NaN where a mask leaves a row nothing."""
    if bool(stages.trace.outcome.output.isnan().any()):
        proof = weights_without_nan(stages, batch)
        return Told("nan-rows", stages, None, proof=proof)
    return None
