"""Messages between the page in a notebook and the kernel.

A question is ``{"id": 7, "kind": "row", "layer": 0, "head": 3, ...}`` with what ``questions`` asks
for. Its answer has the same id, what has a structure as JSON, and numbers as bytes beside it; or
``error``, one sentence.
"""

import json
from collections.abc import Mapping
from typing import Any

from regard.view.tiles.packing import memory
from regard.view.tiles.page_answers import Answers, Gone
from regard.view.tiles.page_questions import QUESTIONS, WRONG, Wanted

__all__ = ["Reply", "reply"]

Reply = tuple[dict[str, Any], list[bytes]]


def reply(answers: Answers, question: Mapping[str, Any], wanted: Wanted) -> Reply | None:
    """Return the answer to one message, or None if it was cancelled.

    Args:
        answers: of the recording.
        question: as the page sent it, which may be anything.
        wanted: asked now and then.
    """
    name, kind = {"id": question.get("id")}, question.get("kind")
    if not isinstance(kind, str) or kind not in QUESTIONS:
        return {**name, "error": f"kind is {kind!r}; nothing of that kind is known."}, []
    parameters = {
        str(key): _text(value) for key, value in question.items() if key not in ("id", "kind")
    }
    try:
        answer = QUESTIONS[kind].answer(answers, QUESTIONS[kind].parse(parameters), wanted)
    except Gone:
        return None
    except WRONG as error:
        return {**name, "error": str(error).partition("\n")[0]}, []
    return {**name, **answer.content}, [memory(array) for array in answer.arrays]


def _text(value: object) -> str:
    """Return a value of a message as text in an address."""
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)
