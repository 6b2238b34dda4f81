"""Why a check cannot tell: what was seen in code that no reading fits, and what it would need."""

import linecache
from dataclasses import replace

import torch

from regard.diagnosis.attention_stages import Stages, found_stages
from regard.diagnosis.float32_rerun import FEW_BITS
from regard.diagnosis.pre_score_steps import bending, manner_of, strange
from regard.diagnosis.rotated_inputs import met
from regard.diagnosis.run_tensors import materials
from regard.diagnosis.score_explanation import slope_of, weighings
from regard.diagnosis.softmax_detection import Softmax, exponentials
from regard.diagnosis.source_lines import behind_softmax, random_event
from regard.diagnosis.subject import Subject
from regard.diagnosis.traced_run import Event

__all__ = ["reason"]

_UNKNOWN = (
    "What it does is no attention that this check knows, right or wrong: neither the standard one "
    "nor any mistake of the catalogue, alone or with others, gives what it gives."
)
_NEEDED = (
    "It can be told where the scores are q·k times a positive scale, under a softcap or not, plus "
    "a bias or a mask that is the same for every input."
)
_PROJECTED = (
    "It can be told where they meet as they were projected, turned by their positions, or normed."
)
_SUMMED = (
    "It can be told where the weights of a query sum to 1: weights = scores.softmax(-1) of scores "
    "(..., queries, keys), and weights @ value."
)
_STEADY = "It can be told where two runs in eval mode give the same."
_ONE_SIDE = (
    "Positions turn the queries and not the keys, or the keys and not the queries, so that the "
    "scores do not depend on how far a key is away. It can be told where both are turned alike."
)
_UNEVENLY = (
    "Positions turn queries and keys, and what two of them give does not depend on their distance "
    "alone: a sign, or which numbers make a pair, may differ from that of the angles. It can be "
    "told where it does; positions with two axes are not judged."
)


def reason(subject: Subject) -> str:
    """Why nothing fits, and what would have to be so that something does.

    Args:
        subject: that no reading fits.
    """
    stages = found_stages(subject, subject.inputs())
    if (drawn := random_event(stages, dropping=False)) is not None:
        return f"It draws random numbers: {_place(drawn, f'takes {drawn.operator}')}. {_STEADY}"
    if stages.softmax is None:
        return _unnormalised(stages) or _UNKNOWN
    fitting = list(weighings(subject, materials(subject, subject.inputs(), stages), stages))
    if not fitting:
        scaled = _scaled(subject, stages)
        across = _across(stages.softmax, subject.layout.tokens)
        return _rounded(stages) or across or scaled or _UNKNOWN
    if (curved := _curved(subject, stages)) != "":
        return curved
    slopes = [slope_of(subject, stages, *weighing) for weighing in fitting]
    told = [slope.number for slope in slopes if slope is not None]
    seen = f"q·k is multiplied with {told[0]:.4g}, which is below 0" if told else _changed(stages)
    return f"The scores are not q·k times a scale plus a bias: {seen}. {_NEEDED}"


def _curved(subject: Subject, stages: Stages) -> str:
    """For queries or keys that are a function of what was projected."""
    if met(stages) is None:
        return ""
    event = bending(stages)
    match manner_of(subject, stages):
        case "turned on one side":
            return _ONE_SIDE
        case "turned unevenly":
            return _UNEVENLY
        case "other" if event is not None:
            what = _place(event, f"takes {event.operator.strip('_')} of them")
            return f"Queries or keys are a function of what was projected: {what}. {_PROJECTED}"
        case _:
            return ""


def _unnormalised(stages: Stages) -> str:
    """For an exp whose sum over an axis divides nothing, as in linear attention."""
    event = next(iter(exponentials(stages.trace)), None)
    if event is None:
        return ""
    return (
        f"No softmax was seen: {_place(event, 'takes exp')}, and no row of what it gives is "
        "divided by its own sum. It can be told where weights = exp(scores) / exp(scores).sum(-1, "
        "keepdim=True), or where a module that goes from one block of keys to the next keeps the "
        "number of its heads as num_heads."
    )


def _rounded(stages: Stages) -> str:
    """For what computes in fewer digits than its inputs have."""
    event = next((e for e in stages.trace if e.dtype in FEW_BITS), None)
    if event is None:
        return ""
    dtype = str(event.dtype).removeprefix("torch.")
    return (
        f"It does not compute in float32 throughout: {_place(event, f'gives {dtype}')}, whose "
        "rounding hides what check compares. It can be told where it stays in float32: take the "
        "conversion out, or make its dtype an argument."
    )


def _scaled(subject: Subject, stages: Stages) -> str:
    """For weights that are multiplied with one number, so that they no longer sum to 1."""
    found = materials(subject, subject.inputs(), stages)
    for event in behind_softmax(stages):
        factor = _factor(event)
        if factor is None:
            continue
        unscaled = [replace(material, output=material.output / factor) for material in found]
        if any(weighings(subject, unscaled, stages)):
            line = _place(event, f"multiplies with {factor:.4g}")
            return f"The weights, or what comes of them, are scaled: {line}. {_SUMMED}"
    return ""


def _factor(event: Event) -> float | None:
    """The one number that an operation multiplies with; None where it does something else."""
    if event.operator.removesuffix("_") not in ("mul", "div") or event.output is None:
        return None
    before, after = event.operands[0].double(), event.output.double()
    if before.shape != after.shape or not bool(before.any()):
        return None
    factor = float((after * before).sum() / before.square().sum())
    return factor if factor and torch.allclose(after, before * factor, rtol=1e-4) else None


def _across(softmax: Softmax, tokens: int) -> str:
    """For a softmax over another axis than the last, under a bias: no guess goes so far."""
    if softmax.axis == -1 and (several := softmax.weights.shape[-1]) > tokens:
        does = f"runs its softmax over {several} numbers, where a query has {tokens} keys"
        line = _place(softmax.events[0], does)
        return f"The weights of a query are no softmax of its scores: {line}. {_SUMMED}"
    if softmax.axis == -1:
        return ""
    line = _place(softmax.events[0], f"runs its softmax over axis {softmax.axis}")
    return f"{_UNKNOWN} Look at its softmax first: {line}, where keys mostly stand in the last."


def _place(event: Event, does: str) -> str:
    """Which line does something, and its text."""
    if event.caller is None:
        return f"one operation {does}"
    line = linecache.getline(event.caller.file, event.caller.line).strip()
    return f"line {event.caller.line} {does}" + (f" ({line})" if line else "")


def _changed(stages: Stages) -> str:
    """What was done to query times key, in words, with the line of it."""
    if (event := strange(stages)) is not None:
        return _place(event, f"takes {event.operator.strip('_')} of them")
    return "what is added to them, or which of them are masked, changes with the input"
