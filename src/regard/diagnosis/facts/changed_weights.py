"""A softmax that meets the value as no weights of its rows: over which axis it runs, what was done.

Its rows do not sum to 1. The numbers tell why: they sum to 1 over other axes, or they are those of
a softmax over the keys, times 0 at some of them, or times one number.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import combinations

import torch
from torch import Tensor

from regard.diagnosis.facts.formula import factor_of, is_same_scale, mistake_of_scale
from regard.diagnosis.facts.origins import Numbers, Sizes
from regard.diagnosis.facts.rows import Mistake, Rows, Unread, is_single, rows_of
from regard.diagnosis.facts.trace import Trace
from regard.diagnosis.facts.written import Written

_AXES = ("samples", "heads", "queries", "keys")
_CLOSE = 1e-6
_MOST_PIECES = 32
"""The most products of one attention in loops over samples and heads; flash loops have more."""


def raise_for_changed(trace: Trace, numbers: Numbers, sizes: Sizes) -> None:
    """Raise ``Unread`` with the mistakes of a softmax that met the value as no weights."""
    if len(trace.changed) > _MOST_PIECES:
        return
    for rows in rows_of(trace.changed, numbers, sizes):
        if not isinstance(rows, Unread):
            written = Written(trace, rows.attentions[0])
            _raise_for(_mistakes(rows, numbers, written))


def raise_for_outputs(rows: Rows) -> None:
    """Raise ``Unread`` with the mistakes of weights that the outputs of a function gave."""
    sums = rows.weights.sum(-1)
    if not bool((((sums - 1).abs() < _CLOSE) | (sums == 0)).all()):
        _raise_for(_mistakes(rows, Numbers({}, []), None))


def _raise_for(mistakes: Iterable[Mistake]) -> None:
    found = tuple(mistakes)
    if found:
        first = found[0]
        raise Unread("softmax", first.says.rstrip("."), first.line, found)


def _mistakes(rows: Rows, numbers: Numbers, written: Written | None) -> Iterator[Mistake]:
    """Yield what was done to the weights, and what is wrong with the scale of their scores."""
    line = "" if written is None else _line_of(rows, numbers, written)
    scores = rows.query @ rows.key.mT
    axes = _normalised_axes(rows.weights)
    if axes is not None:
        scale = _scale(rows.weights, scores, axes)
        right = _softmax(scores * (scale or 1.0), (3,), rows.weights == 0)
        yield _of_axes(rows, numbers, axes, right, line)
        if scale is not None:
            yield from _of_scale(rows, scale, axes)
        return
    scale = _scale(rows.weights, scores, (3,)) or _scale(rows.weights, scores, (2,), (3,))
    if scale is None:
        return
    right = _softmax(scores * scale, (3,))
    mistake = _of_factors(rows, line, scale, right)
    if mistake is not None:
        yield mistake
        if mistake.name != "wrong-scale":
            yield from _of_scale(rows, scale, (3,))


def _of_axes(
    rows: Rows, numbers: Numbers, axes: tuple[int, ...], right: Tensor, line: str
) -> Mistake:
    """Return the mistake of a softmax over other axes than that of the keys."""
    if axes == (2,) and (_is_over_last_axis(rows, numbers) or _is_of_transpose(rows)):
        says = "The values are mixed along the axis of the queries: the weights of a key sum to 1."
        line = rows.lines.get("value") or rows.lines.get("softmax", "")
        return Mistake("values-mixed-along-wrong-axis", says, line, (rows.weights, right))
    words = " and ".join(_AXES[axis] for axis in axes)
    says = f"The softmax runs over the {words}, and not over the keys of each query."
    return Mistake("softmax-wrong-axis", says, line, (rows.weights, right))


def _of_factors(rows: Rows, line: str, scale: float, right: Tensor) -> Mistake | None:
    """Return the mistake by which the weights are those of a softmax times other numbers."""
    weights = rows.weights
    if _is_turned(weights / right):
        says = "Weights are divided by the sums of other rows: sum(-1, keepdim=True) keeps them."
        return Mistake("softmax-wrong-axis", says, line, (weights, right))
    hidden = weights == 0
    factors = (weights / right)[~hidden]
    factor = float(factors[0])
    if not bool(((factors - factor).abs() < _CLOSE * abs(factor)).all()):
        return None
    if bool(hidden.any()):
        says = (
            "Weights are set to 0 after the softmax, so that those of a query sum to less than 1."
        )
        masked = _softmax(rows.query @ rows.key.mT * scale, (3,), hidden)
        is_masked = is_same_scale(factor, 1.0)
        return Mistake("mask-after-softmax", says, line, (weights, masked)) if is_masked else None
    standard = rows.query.shape[-1] ** -0.5
    if is_same_scale(scale * factor_of(rows), 1.0) and is_same_scale(factor, standard):
        says = f"The weights are multiplied by {factor:.4g}, the scores are not."
        return Mistake("wrong-scale", says, line, (weights, right))
    if not isinstance(rows.paths[2].source, str):
        return None  # the projection of the values may have the factor as well
    says = f"The weights of each query sum to {factor:.4g}; they should sum to 1."
    return Mistake("weights", says, line, (weights, right))


def _is_turned(ratios: Tensor) -> bool:
    """Return True if each weight was divided by the sum of the row of its key."""
    if ratios.shape[-1] != ratios.shape[-2] or bool((ratios == 0).any()):
        return False
    is_turned = (ratios * ratios.mT - 1).abs() < _CLOSE
    return bool(is_turned.all()) and float((ratios - 1).abs().max()) > _CLOSE


def _normalised_axes(weights: Tensor) -> tuple[int, ...] | None:
    """Return the axes that the weights sum to 1 over; None if there are none."""
    for count in range(1, 5):
        for axes in combinations(range(4), count):
            sums = weights.sum(axes)
            is_one = (sums - 1).abs() < _CLOSE
            if bool((is_one | (sums == 0)).all()) and bool(is_one.any()):
                return axes
    return None


def _softmax(scores: Tensor, axes: tuple[int, ...], hidden: Tensor | None = None) -> Tensor:
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores - scores.logsumexp(axes, keepdim=True)).exp().nan_to_num(0.0)


def _scale(weights: Tensor, scores: Tensor, *several: tuple[int, ...]) -> float | None:
    """Return the scale of a softmax over these axes; None if the weights follow from none.

    Of several groups of axes, each has a number of its own for each of its other axes.
    """
    # Equal weights may be those of masked scores.
    seen = (weights > 0) & is_single(weights)

    def centred(numbers: Tensor) -> Tensor:
        numbers = torch.where(seen, numbers, 0.0)
        for axes in several:
            count = seen.sum(axes, keepdim=True).clamp(min=1)
            numbers = torch.where(seen, numbers - numbers.sum(axes, keepdim=True) / count, 0.0)
        return numbers

    logarithms, products = centred(weights.clamp(min=1e-300).log()), centred(scores)
    size = float(products.square().sum())
    if not size:
        return None
    scale = float((logarithms * products).sum()) / size
    difference = float((logarithms - scale * products).abs().max())
    return scale if difference < 1e-5 else None


def _is_of_transpose(rows: Rows) -> bool:
    """Return True if weights are those of the transposed scores, so that they are transposed."""
    scores = (rows.query @ rows.key.mT).mT
    return scores.shape == rows.weights.shape and _scale(rows.weights, scores, (2,)) is not None


def _is_over_last_axis(rows: Rows, numbers: Numbers) -> bool:
    """Return True for a softmax over the last axis of a tensor that multiplies from the left."""
    if not rows.attentions:
        return False
    attention = rows.attentions[0]
    softmax = numbers.origin(attention.weights, before=attention.at + 1)
    if softmax is None:
        return False
    sums = softmax.tensor.sum(-1)
    left = numbers.steps[attention.at].inputs[0].flatten().double()
    is_left = torch.equal(left.sort().values, attention.weights.flatten().double().sort().values)
    return is_left and bool(((sums - 1).abs() < _CLOSE).all())


def _line_of(rows: Rows, numbers: Numbers, written: Written) -> str:
    """Return the line that gave the weights the numbers with which they met the value."""
    attention = rows.attentions[0]
    origin = numbers.origin(attention.weights, before=attention.at)
    line = "" if origin is None or origin.at < 0 else written.of_divisor(origin.at)
    return line or rows.lines.get("softmax", "")


def _of_scale(rows: Rows, scale: float, axes: tuple[int, ...]) -> Iterator[Mistake]:
    """Yield the mistake of a scale that is not 1/√head_dim, of a softmax over these axes.

    Args:
        rows: the attention.
        scale: of the product of query and key as they meet.
        axes: those of the softmax.
    """
    head_dim, num_heads = rows.query.shape[-1], rows.query.shape[1]
    standard, factor = head_dim**-0.5, factor_of(rows)
    total = scale * factor
    if is_same_scale(total, standard):
        return
    says = f"The scores are multiplied by {total:.4g}, and not by 1/√{head_dim} = {standard:.4g}."
    scores, hidden = rows.query @ rows.key.mT, rows.weights == 0
    pair = rows.weights, _softmax(scores * (standard / factor), axes, hidden)
    name = mistake_of_scale([total], [num_heads * head_dim])
    yield Mistake(name, says, rows.lines.get("product", ""), pair, total)
