"""The questions of the page, for a server or a notebook: msgspec checks what each must have."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from regard.view.tiles.head_tiles import Place, WrongQuestionError
from regard.view.tiles.manifest import head_records
from regard.view.tiles.page_answers import Answers, Wanted, Which

__all__ = ["QUESTIONS", "Answer", "Question", "Threads"]

# Threads of each kind: a long answer never holds up a quick one, and some only wait for a pass.
_THREADS = {"quick": 2, "long": 2, "waiting": 32}

Result = TypeVar("Result")
Whole = Annotated[int, Meta(ge=0, le=999_999_999)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Spans = Annotated[list[tuple[Whole, Whole]], Meta(min_length=1, max_length=200)]


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        content: what has a structure, as JSON can hold it; beside arrays, what they are.
        arrays: numbers, float32 or uint8.
    """

    content: dict[str, Any] = field(default_factory=dict[str, Any])
    arrays: tuple[Tensor, ...] = ()


class _Head(Struct, forbid_unknown_fields=True):
    """A question about one head."""

    layer: Whole
    head: Whole
    hidden: Flag = 0

    @property
    def which(self) -> Which:
        return Which(self.layer, self.head, bool(self.hidden))


class _Row(_Head, kw_only=True):
    query: Whole

    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        row = answers.row(self.which, self.query, wanted=wanted)
        return Answer(arrays=(row.values.float(), row.mask.to(torch.uint8)))


class _Column(_Head, kw_only=True):
    key: Whole

    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        return Answer(arrays=(answers.column(self.which, self.key, wanted=wanted).float(),))


class _Tile(_Head, kw_only=True):
    level: Whole
    row: Whole
    column: Whole
    by_row: Annotated[int, Meta(ge=0, le=0)] = 0  # pages have no scale by row any more

    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        tile = answers.tile(self.which, Place(self.level, self.row, self.column), wanted=wanted)
        height, width = tile.values.shape
        content = {"height": height, "width": width, "exact": tile.exact, "sampled": tile.sampled}
        return Answer(content, (tile.values.float(),))


class _Progress(_Head, kw_only=True):
    by_row: Annotated[int, Meta(ge=0, le=0)] = 0

    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        return Answer(answers.progress(self.which)._asdict())


class _Steps(_Head, kw_only=True):
    query: Whole
    by: Literal["weight", "position"]
    start: Whole
    count: Annotated[int, Meta(ge=0, le=1000)]

    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        return Answer(answers.steps(self.which, self.query, self.by, self.start, self.count))


class _Segments(_Head, kw_only=True):
    queries: Spans
    keys: Spans

    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        shares = answers.segments(self.which, self.queries, self.keys, wanted=wanted)
        return Answer(arrays=(shares.float(),))


class _Overview(Struct, forbid_unknown_fields=True):
    layer: Whole

    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        return Answer({"overview": answers.overview(self.layer, wanted=wanted)})


class _Heads(Struct, forbid_unknown_fields=True):
    def answer(self, answers: Answers, wanted: Wanted) -> Answer:
        return Answer({"heads": head_records(answers.heads(wanted=wanted))})


@dataclass(frozen=True)
class Question:
    """A kind of question.

    Attributes:
        asked: the type of its requests; it has a field for each parameter, and computes the answer.
        threads: which threads compute it.
    """

    asked: Any
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
        return cast(Answer, request.answer(answers, wanted))


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
    "row": Question(_Row),
    "column": Question(_Column, "waiting"),
    "tile": Question(_Tile),
    "progress": Question(_Progress),
    "steps": Question(_Steps),
    "segments": Question(_Segments, "waiting"),
    "overview": Question(_Overview, "long"),
    "heads": Question(_Heads, "long"),
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
