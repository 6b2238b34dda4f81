"""Numbers that are not finite, and the operation that they begin at."""

from collections.abc import Mapping
from typing import Any

import torch

from regard.diagnosis.inputs.lab import Run
from regard.diagnosis.inputs.tape import Step, tensors_in
from regard.diagnosis.laws.law import Breach

__all__ = ["breach_of_nan"]


def breach_of_nan(run: Run, says: str, extra: Mapping[str, Any] | None = None) -> Breach:
    """Return the breach of a run whose numbers are not finite, at the operation that begins it.

    A softmax of -inf alone has no key to attend to; one of inf has masked keys that are inf.

    Args:
        run: with its steps.
        says: what is not finite, in a sentence.
        extra: arguments by name of the call.
    """
    step = next(filter(_begins, run.steps), None)
    scores = next(iter(tensors_in(step.args)), None) if step is not None else None
    kind = "nan"
    if step is not None and scores is not None and "softmax" in step.name:
        if bool((scores == torch.inf).any()):
            kind = "mask-fill-value"
        elif bool((scores == -torch.inf).all(int(step.args[1])).any()):
            kind = "nan-rows"
    place = None if step is None else step.place
    return Breach(says, place, kind=kind, extra=extra or {})


def _begins(step: Step) -> bool:
    """Return True for an operation that gives NaN and reads none."""
    given, read = (
        any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors)
        for tensors in (step.outputs, tensors_in(step.args))
    )
    return given and not read
