"""What the page asks of a recording, whoever carries the questions: a server, or a notebook."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.see.answers import Answers, Which
from regard.see.asked import Asked
from regard.see.manifest import told
from regard.see.pyramid import Place
from regard.see.query_steps import KeysAsked

__all__ = ["LONG", "QUICK", "WRONG", "Question", "Told", "Wanted", "which_head"]

_MOST_KEYS = 1000

WRONG = (ValueError, TypeError, IndexError, RegardError)
"""What a question raises that asks for what is not there; its first line is the sentence."""


@dataclass(frozen=True)
class Told:
    """An answer.

    Attributes:
        content: what has a structure, as JSON can hold it; beside arrays, what they are.
        arrays: numbers, float32 or uint8.
        final: whether the same question has this answer for ever.

    Example:
        >>> from regard.see.questions import Told
        >>> Told({"done": 1.0}).final
        True
    """

    content: dict[str, Any] = field(default_factory=dict[str, Any])
    arrays: tuple[Tensor, ...] = ()
    final: bool = True


Wanted = Callable[[], bool]
Question = Callable[[Answers, Asked, Wanted], Told]


def which_head(asked: Asked) -> Which:
    """The head that a question is about.

    Raises:
        ValueError: its layer or head is missing, or no whole number.

    Example:
        >>> from regard.see.asked import Asked
        >>> from regard.see.questions import which_head
        >>> which_head(Asked({"layer": "3", "head": "1"}))
        Which(layer=3, head=1, hidden=False)
    """
    return Which(asked.whole("layer"), asked.whole("head"), asked.flag("hidden"))


def _row(answers: Answers, asked: Asked, wanted: Wanted) -> Told:
    row = answers.row(which_head(asked), asked.whole("query"), wanted=wanted)
    return Told(arrays=(row.values.float(), row.mask.to(torch.uint8)))


def _column(answers: Answers, asked: Asked, wanted: Wanted) -> Told:
    values = answers.column(which_head(asked), asked.whole("key"), wanted=wanted)
    return Told(arrays=(values.float(),))


def _tile(answers: Answers, asked: Asked, wanted: Wanted) -> Told:
    level, row, column = (asked.whole(name) for name in ("level", "row", "column"))
    place = Place(level, row, column, asked.flag("by_row"))
    tile = answers.tile(which_head(asked), place, wanted=wanted)
    height, width = tile.values.shape
    content = {"height": height, "width": width, "exact": tile.exact, "sampled": tile.sampled}
    return Told(content, (tile.values.float(),), final=tile.exact)


def _progress(answers: Answers, asked: Asked, _: Wanted) -> Told:
    asked.flag("by_row")  # one pass serves both
    return Told(asdict(answers.progress(which_head(asked))), final=False)


def _steps(answers: Answers, asked: Asked, _: Wanted) -> Told:
    by = asked.one_of("by", ("weight", "position"))
    keys = KeysAsked(by, asked.whole("start"), asked.whole("count", most=_MOST_KEYS))
    steps = answers.steps(which_head(asked), asked.whole("query"), keys)
    if isnan(steps.total):
        query = asked.whole("query")
        raise ValueError(
            f"query is {query}, whose weights are not numbers (NaN); it has no steps to show."
        )
    return Told(asdict(steps))


def _segments(answers: Answers, asked: Asked, _: Wanted) -> Told:
    try:
        shares = answers.segments(which_head(asked), asked.spans("queries"), asked.spans("keys"))
    except ValueError as error:  # the library calls parts what is asked for as keys
        raise ValueError(re.sub("^parts has", "keys has", str(error))) from error
    return Told(arrays=(shares.float(),))


def _overview(answers: Answers, asked: Asked, _: Wanted) -> Told:
    return Told({"overview": answers.overview(asked.whole("layer"))})


def _heads(answers: Answers, _: Asked, __: Wanted) -> Told:
    return Told({"heads": told(answers.heads())})


QUICK: dict[str, Question] = {
    "row": _row,
    "column": _column,
    "tile": _tile,
    "progress": _progress,
    "steps": _steps,
}
"""What is answered in a moment, or taken up again until it is."""

LONG: dict[str, Question] = {"segments": _segments, "overview": _overview, "heads": _heads}
"""What goes over whole layers."""
