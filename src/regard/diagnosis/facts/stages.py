"""The lines of the stages between the product of query and key and the softmax."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.diagnosis.facts.trace import Attention, Trace
from regard.diagnosis.inputs.tape import Step

_LOW = -500.0


def stage_lines(trace: Trace, attention: Attention) -> dict[str, str]:
    """Return the ``file:line`` of each stage of an attention that changes its scores.

    They are "product", "scale", "bias", "mask", "softmax" and "value"; those that the code does
    not have are missing, and all stages of one fused call are one line.
    """
    lines = dict(attention.lines)
    if "product" not in lines:
        line = lines.get("softmax", "")
        return dict.fromkeys(("product", "scale", "mask", "softmax", "value"), line)
    for stage, line in _changes(trace, attention):
        lines.setdefault(stage, line)
    return lines


def _changes(trace: Trace, attention: Attention) -> Iterator[tuple[str, str]]:
    """Yield the stages with their lines, in order."""
    count = attention.weights.numel()
    steps = trace.steps[: attention.at]
    starts = [
        at
        for at, step in enumerate(steps)
        if step.name in ("mm", "bmm", "baddbmm")
        and step.depends
        and step.outputs[0].numel() == count
    ]
    if not starts:
        return
    before = steps[starts[-1]].outputs[0]
    for step in steps[starts[-1] + 1 :]:
        if "softmax" in step.name or step.name == "exp":
            return
        after = next((t for t in step.outputs if _may_follow(t, step, count)), None)
        if after is None or before.numel() != after.numel():
            continue
        one, other = (t.double().flatten() for t in (before, after))
        if torch.equal(one.sort().values, other.sort().values):
            before = after  # it is only laid out in another way
            continue
        if before.shape != after.shape:
            before = before.reshape(after.shape)
        yield _stage(before.double(), after.double()), step.line
        before = after


def _may_follow(tensor: Tensor, step: Step, count: int) -> bool:
    is_float = tensor.is_floating_point() and not tensor.is_nested
    return step.depends and is_float and tensor.numel() == count


def _stage(before: Tensor, after: Tensor) -> str:
    """Return what a step does to scores."""
    low = (after < _LOW) & (before >= _LOW)
    kept = ~low & before.isfinite() & after.isfinite() & (before != 0)
    if bool(low.any()):
        return "mask"
    ratio = (after / before)[kept]
    if len(ratio) and float(ratio.max() - ratio.min()) <= 1e-9 * float(ratio.abs().max()):
        return "scale"
    return "bias"
