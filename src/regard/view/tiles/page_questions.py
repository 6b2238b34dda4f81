"""The questions of the page, for a server or a notebook."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.view.tiles.manifest import head_records
from regard.view.tiles.page_answers import Answers, Which
from regard.view.tiles.pyramid import Place
from regard.view.tiles.query_steps import KeysAsked
from regard.view.tiles.request_parsing import Parameters

__all__ = ["QUESTIONS", "WRONG", "Answer", "Question", "Threads", "Wanted"]

_MOST_KEYS = 1000
_AT_ONCE = 2  # answers of a kind that are computed side by side
_WAITING = 32  # threads that only wait for the pass over a head

Result = TypeVar("Result")

WRONG = (ValueError, IndexError, RegardError)
"""What a question raises that asks for what is not there; its first line is the sentence."""


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        content: what has a structure, as JSON can hold it; beside arrays, what they are.
        arrays: numbers, float32 or uint8.
    """

    content: dict[str, Any] = field(default_factory=dict[str, Any])
    arrays: tuple[Tensor, ...] = ()


Wanted = Callable[[], bool]
Work = Callable[[Answers, Parameters, Wanted], Answer]


@dataclass(frozen=True)
class Question:
    """A kind of question.

    Attributes:
        parameters: the names of what it must or may have.
        answer: gives it; raises ``WRONG`` where it asks for what is not there.
        waits: whether it needs a pass over a long head to be through.
        long: whether it takes more than a moment then.
    """

    parameters: tuple[str, ...]
    answer: Work
    waits: bool = False
    long: bool = False

    def parse(self, parameters: Mapping[str, str]) -> Parameters:
        """Parse one request.

        Raises:
            ValueError: it has a parameter that is not known.
        """
        return Parameters(parameters, self.parameters)


def _which_head(request: Parameters) -> Which:
    return Which(request.whole("layer"), request.whole("head"), request.flag("hidden"))


def _row(answers: Answers, request: Parameters, wanted: Wanted) -> Answer:
    row = answers.row(_which_head(request), request.whole("query"), wanted=wanted)
    return Answer(arrays=(row.values.float(), row.mask.to(torch.uint8)))


def _column(answers: Answers, request: Parameters, wanted: Wanted) -> Answer:
    values = answers.column(_which_head(request), request.whole("key"), wanted=wanted)
    return Answer(arrays=(values.float(),))


def _tile(answers: Answers, request: Parameters, wanted: Wanted) -> Answer:
    level, row, column = (request.whole(name) for name in ("level", "row", "column"))
    place = Place(level, row, column, request.flag("by_row"))
    tile = answers.tile(_which_head(request), place, wanted=wanted)
    height, width = tile.values.shape
    content = {"height": height, "width": width, "exact": tile.exact, "sampled": tile.sampled}
    return Answer(content, (tile.values.float(),))


def _progress(answers: Answers, request: Parameters, _: Wanted) -> Answer:
    request.flag("by_row")  # one pass serves both
    return Answer(asdict(answers.progress(_which_head(request))))


def _steps(answers: Answers, request: Parameters, _: Wanted) -> Answer:
    by = request.one_of("by", ("weight", "position"))
    keys = KeysAsked(by, request.whole("start"), request.whole("count", most=_MOST_KEYS))
    steps = answers.steps(_which_head(request), request.whole("query"), keys)
    if isnan(steps.total):
        query = request.whole("query")
        raise ValueError(
            f"query is {query}, whose weights are not numbers (NaN); it has no steps to show."
        )
    return Answer(asdict(steps))


def _segments(answers: Answers, request: Parameters, wanted: Wanted) -> Answer:
    which, queries, keys = _which_head(request), request.spans("queries"), request.spans("keys")
    shares = answers.segments(which, queries, keys, wanted=wanted)
    return Answer(arrays=(shares.float(),))


def _overview(answers: Answers, request: Parameters, wanted: Wanted) -> Answer:
    return Answer({"overview": answers.overview(request.whole("layer"), wanted=wanted)})


def _heads(answers: Answers, _: Parameters, wanted: Wanted) -> Answer:
    return Answer({"heads": head_records(answers.heads(wanted=wanted))})


_HEAD = ("layer", "head", "hidden")
QUESTIONS = {
    "row": Question((*_HEAD, "query"), _row),
    "column": Question((*_HEAD, "key"), _column, waits=True),
    "tile": Question((*_HEAD, "level", "row", "column", "by_row"), _tile),
    "progress": Question((*_HEAD, "by_row"), _progress),
    "steps": Question((*_HEAD, "query", "by", "start", "count"), _steps),
    "segments": Question((*_HEAD, "queries", "keys"), _segments, waits=True, long=True),
    "overview": Question(("layer",), _overview, long=True),
    "heads": Question((), _heads, long=True),
}
"""Every question by its name."""


class Threads:
    """Threads that answer questions, so that a long answer never holds up a quick one."""

    def __init__(self) -> None:
        self._quick, self._long = (ThreadPoolExecutor(_AT_ONCE, "regard") for _ in range(2))
        self._waits = ThreadPoolExecutor(_WAITING, "regard")

    def submit(self, question: Question, work: Callable[[], Result]) -> "Future[Result]":
        """Run the work that answers a question."""
        if question.waits:
            return self._waits.submit(work)
        return (self._long if question.long else self._quick).submit(work)

    def close(self) -> None:
        """Drop the work that has not begun; the rest ends by itself."""
        for threads in (self._quick, self._waits, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
