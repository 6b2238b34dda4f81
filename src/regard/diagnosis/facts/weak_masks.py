"""Masks that hide nothing: a number in the place of -inf.

Of the keys that a mask leaves visible, the weights give the scale and the logsumexp of each row.
With these the weights of the masked keys give their scores: one number that was filled in, or
query times key plus one number that was added.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from regard.diagnosis.facts.arguments import readings_of
from regard.diagnosis.facts.formula import fitted_scores
from regard.diagnosis.facts.rows import Mistake, Rows, Unread

_CLOSE = 1e-6
_LARGEST_OF_BOOL = 1.01
_FEWEST = 4
"""Fewer masked keys may have the same score by chance."""


def raise_for_weak_mask(rows: Rows, arguments: Mapping[str, Tensor], line: str) -> None:
    """Raise ``Unread`` with the mistake of a mask whose number hides nothing.

    Args:
        rows: the numbers of an attention that no formula gives.
        arguments: tensors of the call that may be masks, by name.
        line: the ``file:line`` of the mask.
    """
    found = [_mistake(rows, visible, line) for visible in _patterns(rows, arguments)]
    mistakes = [pair for pair in found if pair is not None]
    if mistakes:
        # A number added to some keys is its opposite added to the others: a mask lowers scores.
        _, mistake = min(mistakes, key=lambda pair: pair[0])
        raise Unread("scores", mistake.says.rstrip("."), line, [mistake])


def _patterns(rows: Rows, arguments: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield which keys masks may let a query see: causal ones, and those of arguments."""
    shape = rows.weights.shape
    yield torch.ones(shape, dtype=torch.bool).tril(shape[-1] - shape[-2])
    for argument in arguments.values():
        for _, visible in readings_of(argument, shape):
            yield visible.expand(shape)


def _mistake(rows: Rows, visible: Tensor, line: str) -> tuple[float, Mistake] | None:
    """Return the number added to masked keys, or 0, and the mistake; None where they are hidden."""
    seen = (rows.weights > 0) & ~rows.is_empty
    fit, hidden = seen & visible, seen & ~visible
    hidden &= (fit.sum(-1, keepdim=True) > 0).expand_as(hidden)
    if int(hidden.sum()) < _FEWEST:
        return None
    product, logs = rows.query @ rows.key.mT, rows.weights.clamp(min=1e-300).log()
    fitted = fitted_scores(product, logs, fit)
    if fitted is None:
        return None
    scores = fitted[2]
    right = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    count = fit.sum(-1, keepdim=True).clamp(min=1)
    logsumexp = torch.where(fit, scores - logs, 0.0).sum(-1, keepdim=True) / count
    if not _is_one(torch.where(fit, scores - logs - logsumexp, 0.0)):
        return None  # more is added to the scores
    filled, added = (logs + logsumexp)[hidden], (logs + logsumexp - scores)[hidden]
    if _is_one(filled):
        says = f"Scores of masked keys are {_number(filled)}; only -inf hides them."
        return 0.0, Mistake("mask-fill-value", says, line, (rows.weights, right))
    if _is_one(added) and abs(float(added[0])) > _CLOSE:
        says = f"{_number(added)} is added to the scores of masked keys; only -inf hides them."
        is_of_bool = abs(float(added[0])) <= _LARGEST_OF_BOOL
        name = "mask-added-as-numbers" if is_of_bool else "mask-fill-value"
        return float(added[0]), Mistake(name, says, line, (rows.weights, right))
    return None


def _is_one(numbers: Tensor) -> bool:
    """Return True if all numbers are one."""
    size = max(1.0, float(numbers.abs().max()))
    return bool(numbers.max() - numbers.min() <= _CLOSE * size)


def _number(numbers: Tensor) -> str:
    number = float(numbers.median())
    return f"{0.0 if abs(number) < _CLOSE else number:.4g}"
