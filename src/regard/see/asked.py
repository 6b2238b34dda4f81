"""What a request asks for, out of the text of its address; what is wrong is told in a sentence."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

__all__ = ["Asked", "spans_asked"]

_WHOLE = re.compile(r"\d{1,9}", re.ASCII)
_MOST_SPANS = 200
_LONGEST_NAME = 200

Word = TypeVar("Word", bound=str)


class Asked:
    """The parameters of a request.

    Args:
        parameters: their text by name.

    Example:
        >>> from regard.see.asked import Asked
        >>> asked = Asked({"layer": "3", "hidden": "1"})
        >>> asked.whole("layer"), asked.flag("hidden"), asked.flag("by_row")
        (3, True, False)
        >>> asked.whole("head")
        Traceback (most recent call last):
        ValueError: head is missing; it must be a whole number.
    """

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """The same for the same question."""
        return tuple(sorted(self._parameters.items()))

    def has(self, name: str) -> bool:
        """Whether there is a parameter of that name."""
        return name in self._parameters

    def text(self, name: str) -> str:
        """As it is.

        Raises:
            ValueError: it is missing.
        """
        if name not in self._parameters:
            raise ValueError(f"{name} is missing.")
        return self._parameters[name]

    def whole(self, name: str, *, most: int | None = None) -> int:
        """A whole number from 0 on.

        Raises:
            ValueError: it is missing, something else, or more than the most that is allowed.
        """
        text = self._parameters.get(name)
        if text is None or not _WHOLE.fullmatch(text):
            came = "missing" if text is None else _told(text)
            raise ValueError(f"{name} is {came}; it must be a whole number.")
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
        came = "missing" if text is None else _told(text)
        raise ValueError(f"{name} is {came}; it must be {' or '.join(words)}.")


def spans_asked(text: str) -> list[tuple[str, int, int]]:
    """Parts of a text, ``[["question", 0, 12], ...]``: name, first token, the one past the last.

    Raises:
        ValueError: it is something else, or has too many parts.

    Example:
        >>> from regard.see.asked import spans_asked
        >>> spans_asked('[["question", 0, 12]]')
        [('question', 0, 12)]
    """
    try:
        spans = cast("list[list[Any]]", json.loads(text))
        found = [(name, start, stop) for name, start, stop in spans]
    except (ValueError, TypeError, RecursionError):
        found = []
    right = all(
        isinstance(name, str) and len(name) <= _LONGEST_NAME and type(start) is type(stop) is int
        for name, start, stop in found
    )
    if not found or not right or len(found) > _MOST_SPANS:
        raise ValueError(
            f"spans must be 1 to {_MOST_SPANS} parts, each [name, first token, one past the last]."
        )
    return found


def _told(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:40]} ...")
