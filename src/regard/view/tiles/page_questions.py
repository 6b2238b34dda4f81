"""The questions of the page, for a server or a notebook."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.view.tiles.manifest import head_records
from regard.view.tiles.page_answers import Answers, Wanted, Which
from regard.view.tiles.pyramid import Place

__all__ = ["QUESTIONS", "WRONG", "Answer", "Question", "Threads"]

_WHOLE = re.compile(r"\d+", re.ASCII)
_MOST_DIGITS = 9
_MOST_SPANS = 200
_MOST_KEYS = 1000
# Threads of each kind: a long answer never holds up a quick one, and some only wait for a pass.
_THREADS = {"quick": 2, "long": 2, "waiting": 32}

Result = TypeVar("Result")
Word = TypeVar("Word", bound=str)

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


class _Request:
    """The parameters of a request; each method raises a ValueError for what it cannot read."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters

    @property
    def which(self) -> Which:
        """The head that is asked for."""
        return Which(self.whole("layer"), self.whole("head"), self.flag("hidden"))

    def whole(self, name: str, *, most: int | None = None) -> int:
        """Return a whole number of at least 0."""
        text = self._parameters.get(name)
        if text is None or not _WHOLE.fullmatch(text):
            raise ValueError(f"{name} is {_shown(text)}; it must be a whole number.")
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"{name} is {_shown(text)}; that is too large.")
        if most is not None and int(text) > most:
            raise ValueError(f"{name} is {text}; it must be at most {most}.")
        return int(text)

    def flag(self, name: str) -> bool:
        """Return True for 1, and False for 0 or nothing."""
        return self.one_of(name, ("0", "1"), "0") == "1"

    def one_of(self, name: str, words: Sequence[Word], default: Word | None = None) -> Word:
        """Return one of some words."""
        text = self._parameters.get(name, default)
        for word in words:
            if word == text:
                return word
        raise ValueError(f"{name} is {_shown(text)}; it must be {' or '.join(words)}.")

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Return parts of a text, ``[[0, 12], [12, 40]]``: first token, and one past the last."""
        try:
            given = cast("list[list[Any]]", json.loads(self._parameters.get(name, "")))
            spans = [(start, stop) for start, stop in given]
        except (ValueError, TypeError, RecursionError):
            spans = []
        are_whole = all(type(start) is type(stop) is int for start, stop in spans)
        if not (are_whole and 0 < len(spans) <= _MOST_SPANS):
            raise ValueError(
                f"{name} must be 1 to {_MOST_SPANS} parts, each [first token, one past the last]."
            )
        return spans


def _shown(text: str | None) -> str:
    if text is None:
        return "missing"
    return ascii(text if len(text) <= 40 else f"{text[:40]} ...")


@dataclass(frozen=True)
class Question:
    """A kind of question.

    Attributes:
        parameters: the names of what it must or may have.
        work: computes the answer from the answers, the request, and as for ``Answers.row``, wanted.
        threads: which threads compute it.
    """

    parameters: tuple[str, ...]
    work: Callable[[Answers, _Request, Wanted], Answer]
    threads: Literal["quick", "long", "waiting"] = "quick"

    def answer(self, answers: Answers, parameters: Mapping[str, str], wanted: Wanted) -> Answer:
        """Return the answer to one request.

        Raises:
            ValueError, IndexError, RegardError: it asks for what is not there; see ``WRONG``.
            Gone: it is not wanted any more.
        """
        for name in parameters:
            if name not in self.parameters:
                asks = ", ".join(self.parameters) or "nothing"
                raise ValueError(f"{_shown(name)} is no parameter of this question; it has {asks}.")
        return self.work(answers, _Request(parameters), wanted)


def _row(answers: Answers, request: _Request, wanted: Wanted) -> Answer:
    row = answers.row(request.which, request.whole("query"), wanted=wanted)
    return Answer(arrays=(row.values.float(), row.mask.to(torch.uint8)))


def _column(answers: Answers, request: _Request, wanted: Wanted) -> Answer:
    values = answers.column(request.which, request.whole("key"), wanted=wanted)
    return Answer(arrays=(values.float(),))


def _tile(answers: Answers, request: _Request, wanted: Wanted) -> Answer:
    level, row, column = (request.whole(name) for name in ("level", "row", "column"))
    place = Place(level, row, column, request.flag("by_row"))
    tile = answers.tile(request.which, place, wanted=wanted)
    height, width = tile.values.shape
    content = {"height": height, "width": width, "exact": tile.exact, "sampled": tile.sampled}
    return Answer(content, (tile.values.float(),))


def _progress(answers: Answers, request: _Request, _: Wanted) -> Answer:
    request.flag("by_row")  # one pass serves both
    return Answer(answers.progress(request.which)._asdict())


def _steps(answers: Answers, request: _Request, _: Wanted) -> Answer:
    by = request.one_of("by", ("weight", "position"))
    start, count = request.whole("start"), request.whole("count", most=_MOST_KEYS)
    return Answer(answers.steps(request.which, request.whole("query"), by, start, count))


def _segments(answers: Answers, request: _Request, wanted: Wanted) -> Answer:
    which, queries, keys = request.which, request.spans("queries"), request.spans("keys")
    return Answer(arrays=(answers.segments(which, queries, keys, wanted=wanted).float(),))


def _overview(answers: Answers, request: _Request, wanted: Wanted) -> Answer:
    return Answer({"overview": answers.overview(request.whole("layer"), wanted=wanted)})


def _heads(answers: Answers, _: _Request, wanted: Wanted) -> Answer:
    return Answer({"heads": head_records(answers.heads(wanted=wanted))})


_HEAD = ("layer", "head", "hidden")
QUESTIONS = {
    "row": Question((*_HEAD, "query"), _row),
    "column": Question((*_HEAD, "key"), _column, "waiting"),
    "tile": Question((*_HEAD, "level", "row", "column", "by_row"), _tile),
    "progress": Question((*_HEAD, "by_row"), _progress),
    "steps": Question((*_HEAD, "query", "by", "start", "count"), _steps),
    "segments": Question((*_HEAD, "queries", "keys"), _segments, "waiting"),
    "overview": Question(("layer",), _overview, "long"),
    "heads": Question((), _heads, "long"),
}
"""Every question by its name."""


class Threads:
    """Threads that answer questions, so that a long answer never holds up a quick one."""

    def __init__(self) -> None:
        self._pools = {
            name: ThreadPoolExecutor(count, "regard") for name, count in _THREADS.items()
        }

    def submit(self, question: Question, work: Callable[[], Result]) -> "Future[Result]":
        """Run the work that answers a question."""
        return self._pools[question.threads].submit(work)

    def close(self) -> None:
        """Drop the work that has not begun; the rest ends by itself."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
