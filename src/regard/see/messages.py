"""What the page in a notebook asks by messages, and what is sent back.

A question is ``{"id": 7, "kind": "row", "layer": 0, "head": 3, ...}`` with the arguments of the
method of ``Answers`` of that name. Its answer has the same id, numbers as JSON, and arrays as bytes
beside it, in the order in which ``arrays`` names them; or ``error``, one sentence.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.recording import Recording
from regard.see.answers import Answers, Gone, Which
from regard.see.manifest import first_sequence, told
from regard.see.packing import memory
from regard.see.pyramid import Place
from regard.see.query_steps import KeysAsked

__all__ = ["Reply", "reply"]

Reply = tuple[dict[str, Any], list[bytes]]


def reply(
    answers: Answers, question: Mapping[str, Any], wanted: Callable[[], bool]
) -> Reply | None:
    """The answer to one message; None when nobody waits for it any more.

    Args:
        answers: of the recording.
        question: as the page sent it, which may be anything.
        wanted: asked now and then.

    Example:
        >>> import torch, regard
        >>> from regard.see.answers import Answers
        >>> from regard.see.messages import reply
        >>> even = regard.attend(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
        >>> with Answers(regard.Recording({"layer": even})) as answers:
        ...     reply(answers, {"id": 1, "kind": "row", "layer": 0, "head": 5}, lambda: True)
        ({'id': 1, 'error': 'head is 5; it must be from 0 to 0.'}, [])
    """
    asked, kind = {"id": question.get("id")}, question.get("kind")
    if not isinstance(kind, str) or kind not in _ANSWERED:
        return {**asked, "error": f"kind is {kind!r}; nothing of that kind is known."}, []
    try:
        content, arrays = _ANSWERED[kind](answers, question, wanted)
    except Gone:
        return None
    except (ValueError, TypeError, IndexError, RegardError) as error:
        return {**asked, "error": str(error).partition("\n")[0]}, []
    packed = [memory(array) for array in arrays.values()]
    return {**asked, "arrays": list(arrays), **content}, packed


def _whole(question: Mapping[str, Any], name: str) -> int:
    value = question.get(name, 0)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from 0 on.")
    return value


def _which(question: Mapping[str, Any]) -> Which:
    return Which(
        _whole(question, "layer"), _whole(question, "head"), question.get("hidden") is True
    )


_Answered = tuple[dict[str, Any], dict[str, Tensor]]


def _row(answers: Answers, question: Mapping[str, Any], wanted: Callable[[], bool]) -> _Answered:
    row = answers.row(_which(question), _whole(question, "query"), wanted=wanted)
    return {}, {"values": row.values.float(), "mask": row.mask.to(torch.uint8)}


def _column(answers: Answers, question: Mapping[str, Any], wanted: Callable[[], bool]) -> _Answered:
    values = answers.column(_which(question), _whole(question, "key"), wanted=wanted)
    return {}, {"values": values.float()}


def _tile(answers: Answers, question: Mapping[str, Any], wanted: Callable[[], bool]) -> _Answered:
    level, row, column = (_whole(question, name) for name in ("level", "row", "column"))
    place = Place(level, row, column, question.get("byRow") is True)
    tile = answers.tile(_which(question), place, wanted=wanted)
    height, width = tile.values.shape
    told = {"height": height, "width": width, "exact": tile.exact, "sampled": tile.sampled}
    return told, {"values": tile.values.float()}


def _progress(answers: Answers, question: Mapping[str, Any], _: Callable[[], bool]) -> _Answered:
    return dataclasses.asdict(answers.progress(_which(question))), {}


def _steps(answers: Answers, question: Mapping[str, Any], _: Callable[[], bool]) -> _Answered:
    by = question.get("by")
    if by not in ("weight", "position"):
        raise ValueError(f"by is {by!r}; it must be 'weight' or 'position'.")
    asked = KeysAsked(by, _whole(question, "start"), _whole(question, "count"))
    steps = answers.steps(_which(question), _whole(question, "query"), asked)
    return {"steps": dataclasses.asdict(steps)}, {}


def _segments(answers: Answers, question: Mapping[str, Any], _: Callable[[], bool]) -> _Answered:
    which, seen = _which(question), answers.recording
    queries, keys = (_spans(question, name) for name in ("queries", "keys"))
    one = first_sequence(seen[which.layer])[which.head]
    alone = Recording({"head": one}, query_tokens=seen.query_tokens, key_tokens=seen.key_tokens)
    shares = alone.segments(keys, queries=queries, sinks=not which.hidden)
    return {}, {"values": shares.total().float()}


def _spans(question: Mapping[str, Any], name: str) -> dict[str, tuple[int, int]]:
    given = cast("list[list[Any]]", question.get(name))
    try:
        return {str(place): (start, stop) for place, (start, stop) in enumerate(given)}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is {given!r}; each must be [first token, one past the last]."
        ) from error


def _overview(answers: Answers, question: Mapping[str, Any], _: object) -> _Answered:
    return {"overview": answers.overview(_whole(question, "layer"))}, {}


def _heads(answers: Answers, *_: object) -> _Answered:
    return {"heads": told(answers.heads())}, {}


_ANSWERED = {
    "row": _row,
    "column": _column,
    "tile": _tile,
    "progress": _progress,
    "steps": _steps,
    "segments": _segments,
    "overview": _overview,
    "heads": _heads,
}
