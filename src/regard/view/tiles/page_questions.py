"""The questions of the page, for a server or a notebook: msgspec checks what each must have."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from regard.view.tiles.head_tiles import Place, WrongQuestionError
from regard.view.tiles.manifest import head_records
from regard.view.tiles.page_answers import Answers, Wanted, Which
from regard.view.tiles.protocol import (
    Column,
    Heads,
    OfHead,
    Overview,
    Progress,
    Row,
    Segments,
    Steps,
    Tile,
)

__all__ = ["QUESTIONS", "Answer", "Question", "Threads"]

# Threads of each kind: a long answer never holds up a quick one, and some only wait for a pass.
_THREADS = {"quick": 2, "long": 2, "waiting": 32}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        content: what has a structure, as JSON can hold it; beside arrays, what they are.
        arrays: numbers, float32 or uint8.
    """

    content: dict[str, Any] = field(default_factory=dict[str, Any])
    arrays: tuple[Tensor, ...] = ()


def _which(asked: OfHead) -> Which:
    return Which(asked.layer, asked.head, asked.hidden)


def _row(asked: Row, answers: Answers, wanted: Wanted) -> Answer:
    row = answers.row(_which(asked), asked.query, wanted=wanted)
    return Answer(arrays=(row.values.float(), row.mask.to(torch.uint8)))


def _column(asked: Column, answers: Answers, wanted: Wanted) -> Answer:
    return Answer(arrays=(answers.column(_which(asked), asked.key, wanted=wanted).float(),))


def _tile(asked: Tile, answers: Answers, wanted: Wanted) -> Answer:
    place = Place(asked.level, asked.row, asked.column)
    tile = answers.tile(_which(asked), place, wanted=wanted)
    height, width = tile.values.shape
    content = {"height": height, "width": width, "exact": tile.exact, "sampled": tile.sampled}
    return Answer(content, (tile.values.float(),))


def _progress(asked: Progress, answers: Answers, _: Wanted) -> Answer:
    return Answer(answers.progress(_which(asked))._asdict())


def _steps(asked: Steps, answers: Answers, _: Wanted) -> Answer:
    which = _which(asked)
    return Answer(answers.steps(which, asked.query, asked.by, asked.start, asked.count))


def _segments(asked: Segments, answers: Answers, wanted: Wanted) -> Answer:
    shares = answers.segments(_which(asked), asked.queries, asked.keys, wanted=wanted)
    return Answer(arrays=(shares.float(),))


def _overview(asked: Overview, answers: Answers, wanted: Wanted) -> Answer:
    return Answer({"overview": answers.overview(asked.layer, wanted=wanted)})


def _heads(_: Heads, answers: Answers, wanted: Wanted) -> Answer:
    found = answers.heads(wanted=wanted)
    content = {"heads": head_records(chain.from_iterable(found.kinds))}
    return Answer(content | msgspec.to_builtins({"notable": found.notable, "opened": found.opened}))


@dataclass(frozen=True)
class Question:
    """A kind of question.

    Attributes:
        asked: the type of its requests, as the protocol has it.
        answers: computes the answer to one.
        threads: which threads compute it.
    """

    asked: Any
    answers: Callable[[Any, Answers, Wanted], Answer]
    threads: Literal["quick", "long", "waiting"] = "quick"

    def answer(self, answers: Answers, parameters: Mapping[str, Any], wanted: Wanted) -> Answer:
        """Return the answer to one request.

        Raises:
            RegardError: it asks for what is not there, which its first line says.
            Gone: it is not wanted any more.
        """
        given = {name: _value(name, each) for name, each in parameters.items()}
        try:
            request = msgspec.convert(given, self.asked, strict=False)
        except msgspec.ValidationError as error:
            raise WrongQuestionError(_said(error)) from error
        return self.answers(request, answers, wanted)


def _value(name: str, given: Any) -> Any:
    """Return a parameter of an address as what it says; lists are JSON there."""
    if name not in ("queries", "keys") or not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given


def _said(error: msgspec.ValidationError) -> str:
    """Return what is wrong with a request, in ASCII."""
    text = str(error).replace("`", "'")
    return f"the question cannot be read: {ascii(text)[1:-1][:200]}."


QUESTIONS = {
    "row": Question(Row, _row),
    "column": Question(Column, _column, "waiting"),
    "tile": Question(Tile, _tile),
    "progress": Question(Progress, _progress),
    "steps": Question(Steps, _steps),
    "segments": Question(Segments, _segments, "waiting"),
    "overview": Question(Overview, _overview, "long"),
    "heads": Question(Heads, _heads, "long"),
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
