"""Alarms of a monitor: large scores, collapsed entropy, numbers that are not finite, dead heads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.errors import check_count, check_number
from regard.training.summaries import Key, Summary, layer_indices

__all__ = ["dead_heads", "entropy_collapse", "max_score", "not_finite"]

_UNIFORM, _ONE_KEY = 0.99, 0.01


class Alert(NamedTuple):
    """One head that fired an alarm.

    Attributes:
        step: the step of the training.
        layer: the position of the layer among the observed ones.
        name: the name of the layer.
        head: the position of the head in the model.
        statistic: the name of the statistic.
        number: the number that fired the alarm.
        limit: the condition that the number fulfils.
    """

    step: int
    layer: int
    name: str
    head: int
    statistic: str
    number: float
    limit: str

    def __str__(self) -> str:
        """Return a phrase with step, layer, head, number and condition."""
        return (
            f"step {self.step}, layer {self.layer} ({self.name}), head {self.head}: "
            f"{self.statistic} is {self.number:.6g}, {self.limit}"
        )


@dataclass(frozen=True)
class Alarm:
    """A condition on one number of each head, from the step ``after`` on.

    Without a statistic it is a condition on all of them, and a head fires it once.
    """

    statistic: str
    number: str
    limit: str
    fires: Callable[[Summary], Tensor]
    after: int = 0

    def alerts(self, step: int, summaries: Mapping[Key, Summary]) -> list[Alert]:
        """Return an alert for each head that fulfils the condition."""
        layers, alerts = layer_indices(summaries), dict[tuple[str, int], Alert]()
        for (name, statistic), summary in summaries.items():
            if self.statistic not in ("", statistic) or step < self.after:
                continue
            numbers = getattr(summary, self.number)
            for at in cast("list[int]", self.fires(summary).nonzero().flatten().tolist()):
                head = summary.heads[at]
                number = float(numbers[at])
                alert = Alert(step, layers[name], name, head, statistic, number, self.limit)
                alerts.setdefault((name, head), alert)
        return [*alerts.values()]


def max_score(limit: float) -> Alarm:
    """Return an alarm for heads with a score above a limit, before the softmax.

    Raises:
        TypeError: limit is not a number.
        ValueError: it is NaN.

    Example:
        >>> import regard
        >>> regard.alarms.max_score(100).limit
        'above 100'
    """
    remedy = "Pass a score, such as 100."
    if isnan(limit := check_number("limit", limit, remedy)):
        raise ValueError(f"limit is NaN, which no score is above.\n    {remedy}")
    return Alarm("max_score", "max", f"above {limit:g}", lambda summary: summary.max > limit)


def entropy_collapse(limit: float) -> Alarm:
    """Return an alarm for heads whose mean normalised entropy is below a limit.

    The normalised entropy is 0 for attention to one key, and 1 for equal attention to all visible
    keys.

    Raises:
        TypeError: limit is not a number.
        ValueError: it is not between 0 and 1.

    Example:
        >>> import regard
        >>> regard.alarms.entropy_collapse(0.05).limit
        'below 0.05'
    """
    remedy = "Pass a number between 0 and 1, such as 0.05."
    if not 0 < (limit := check_number("limit", limit, remedy)) < 1:
        raise ValueError(f"limit is {limit:g}; a normalised entropy lies between.\n    {remedy}")
    name = "normalized_entropy"
    return Alarm(name, "mean", f"below {limit:g}", lambda summary: summary.mean < limit)


def not_finite() -> Alarm:
    """Return an alarm for heads with a number that is NaN or infinite.

    Of weights that dropout or the model made NaN there are no scores, but an entropy of NaN.

    Example:
        >>> import regard
        >>> regard.alarms.not_finite().limit
        'not finite'
    """
    return Alarm("", "max", "not finite", are_not_finite)


def dead_heads(after: int = 1) -> Alarm:
    """Return an alarm for heads that attend equally to all keys, or to one key, in 9 of 10 rows.

    Equal attention is a normalised entropy of at least 0.99; attention to one key is at most 0.01.
    Many heads are uniform when training begins, so only steps from ``after`` on count.

    Raises:
        TypeError: after is not a whole number.
        ValueError: after is below 1.

    Example:
        >>> import regard
        >>> regard.alarms.dead_heads(after=1000).after
        1000
    """
    limit = f"in 9 of 10 rows at least {_UNIFORM:g} or at most {_ONE_KEY:g}"
    return Alarm(
        "normalized_entropy",
        "p50",
        limit,
        lambda summary: is_dead(summary.p10, summary.p90),
        check_count("after", after),
    )


def is_dead(p10: Any, p90: Any) -> Any:
    """Return True for heads that are dead by two quantiles of their normalised entropy."""
    return (p10 >= _UNIFORM) | (p90 <= _ONE_KEY)


def are_not_finite(summary: Summary) -> Tensor:
    """Return True for heads with a number that is NaN or infinite, (num_heads,)."""
    return (summary.rows > 0) & ~torch.isfinite(summary.max)
