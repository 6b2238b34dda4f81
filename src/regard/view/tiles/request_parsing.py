"""Parsing of a request's address, with an error in one sentence."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

__all__ = ["Parameters"]

_WHOLE = re.compile(r"\d+", re.ASCII)
_MOST_DIGITS = 9
_MOST_SPANS = 200

Word = TypeVar("Word", bound=str)


class Parameters:
    """The parameters of a request.

    Args:
        parameters: their text by name.
        known: the names that there are.

    Raises:
        ValueError: another name.
    """

    def __init__(self, parameters: Mapping[str, str], known: Sequence[str]) -> None:
        for name in parameters:
            if name not in known:
                asks = ", ".join(known) or "nothing"
                raise ValueError(f"{_shown(name)} is no parameter of this question; it has {asks}.")
        self._parameters = parameters

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Parts of a text, ``[[0, 12], [12, 40]]``: of each the first token, and one past the last.

        Raises:
            ValueError: it is missing, something else, or has too many parts.
        """
        spans = _spans(self._parameters.get(name, ""))
        if spans is None:
            raise ValueError(
                f"{name} must be 1 to {_MOST_SPANS} parts, each [first token, one past the last]."
            )
        return spans

    def whole(self, name: str, *, most: int | None = None) -> int:
        """Return a whole number of at least 0.

        Raises:
            ValueError: it is missing, something else, or more than the most that is allowed.
        """
        text = self._parameters.get(name)
        if text is None or not _WHOLE.fullmatch(text):
            came = "missing" if text is None else _shown(text)
            raise ValueError(f"{name} is {came}; it must be a whole number.")
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"{name} is {_shown(text)}; that is too large.")
        if most is not None and int(text) > most:
            raise ValueError(f"{name} is {text}; it must be at most {most}.")
        return int(text)

    def flag(self, name: str) -> bool:
        """1 or 0; 0 when it is missing.

        Raises:
            ValueError: something else.
        """
        return self.one_of(name, ("0", "1"), "0") == "1"

    def one_of(self, name: str, words: Sequence[Word], default: Word | None = None) -> Word:
        """One of some words.

        Raises:
            ValueError: another one; or it is missing, and there is no default.
        """
        text = self._parameters.get(name, default)
        for word in words:
            if word == text:
                return word
        came = "missing" if text is None else _shown(text)
        raise ValueError(f"{name} is {came}; it must be {' or '.join(words)}.")


def _spans(text: str) -> list[tuple[int, int]] | None:
    """None: it is something else."""
    try:
        given = cast("list[list[Any]]", json.loads(text))
        spans = [(start, stop) for start, stop in given]
    except (ValueError, TypeError, RecursionError):
        return None
    right = all(type(start) is type(stop) is int for start, stop in spans)
    return spans if right and 0 < len(spans) <= _MOST_SPANS else None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:40]} ...")
