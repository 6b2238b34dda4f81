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

from regard.view.tiles import protocol
from regard.view.tiles.head_tiles import Place, WrongQuestionError
from regard.view.tiles.manifest import head_records
from regard.view.tiles.page_answers import Answers, Wanted, Which

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


@dataclass(frozen=True)
class Question:
    """A kind of question.

    Attributes:
        asked: the type of its requests, as the protocol has it.
        threads: which threads compute its answers.
    """

    asked: Any
    threads: Literal["quick", "long", "waiting"]

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
        return _answered(request, answers, wanted)


def _answered(asked: Any, answers: Answers, wanted: Wanted) -> Answer:
    match asked:
        case protocol.Overview():
            return Answer({"overview": answers.overview(asked.layer, wanted=wanted)})
        case protocol.Heads():
            heads = answers.heads(wanted=wanted)
            opening = msgspec.to_builtins({"notable": heads.notable, "opened": heads.opened})
            return Answer({"heads": head_records(chain.from_iterable(heads.kinds))} | opening)
        case _:
            return _of_head(asked, Which(asked.layer, asked.head, asked.hidden), answers, wanted)


def _of_head(asked: Any, which: Which, answers: Answers, wanted: Wanted) -> Answer:
    match asked:
        case protocol.Row():
            row = answers.row(which, asked.query, wanted=wanted)
            return Answer(arrays=(row.values.float(), row.mask.to(torch.uint8)))
        case protocol.Column():
            return Answer(arrays=(answers.column(which, asked.key, wanted=wanted).float(),))
        case protocol.Tile():
            place = Place(asked.level, asked.row, asked.column)
            tile = answers.tile(which, place, wanted=wanted)
            size = dict(zip(("height", "width"), tile.values.shape, strict=True))
            content = size | {"exact": tile.exact, "sampled": tile.sampled}
            return Answer(content, (tile.values.float(),))
        case protocol.Progress():
            return Answer(msgspec.to_builtins(answers.progress(which)))
        case protocol.Steps():
            part = asked.by, asked.start, asked.count
            return Answer(answers.steps(which, asked.query, *part))
        case _:
            shares = answers.segments(which, asked.queries, asked.keys, wanted=wanted)
            return Answer(arrays=(shares.float(),))


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


_SLOW: dict[str, Literal["long", "waiting"]] = {
    "column": "waiting",
    "segments": "waiting",
    "overview": "long",
    "heads": "long",
}
QUESTIONS = {
    kind: Question(asked, _SLOW.get(kind, "quick"))
    for kind, (asked, _) in protocol.QUESTIONS.items()
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
