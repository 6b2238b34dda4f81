"""Spans of tokens for the parts of a text: words, sentences and matches of a pattern.

The tokens joined are the text, so each token has a position in it. A part contains all tokens with
which it shares a character, apart from white space around a token. If two parts share a token, it
belongs to the first. A token without text is a further byte of a character, and belongs to the
same part as the token before it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, cast

from regard.errors import kind_text
from regard.text.tokens import Token

__all__ = ["by_pattern", "by_sentence", "by_word"]

_WORD = re.compile(r"\w+(?:['\u2019\-]\w+)*")
# A mark of Latin scripts ends a sentence only before white space; Chinese and Japanese marks do so
# always.
_SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019\xbb)\]]*\s+|[\u3002\uff01\uff1f]+\s*|\n\s*\n\s*"
)


def by_word(tokens: Sequence[Token] | None) -> dict[str, tuple[int, int]]:
    """Return the words of a text: letters and digits, with hyphens and apostrophes between them.

    The names of repeated words end with ``#2``, ``#3``. If one token contains two words, the second
    word has no token and is omitted.

    Args:
        tokens: the tokens of the text, such as ``seen.key_tokens``. Special tokens are not words.

    Returns:
        The span (start, stop) of tokens of each word.

    Raises:
        TypeError: an element of ``tokens`` is not a Token.
        ValueError: tokens is None, or contains no word.

    Example:
        >>> import regard
        >>> tokens = [regard.Token(text) for text in ("to", " be", ",", " or", " not", " to")]
        >>> regard.spans.by_word(tokens)
        {'to': (0, 1), 'be': (1, 2), 'or': (3, 4), 'not': (4, 5), 'to#2': (5, 6)}
    """
    checked = _checked(tokens)
    found: list[tuple[str, tuple[int, int]]] = []
    for stretch in _stretches(checked):
        found += stretch.named((match[0], match.span()) for match in _WORD.finditer(stretch.text))
    return _named(found, "word")


def by_sentence(tokens: Sequence[Token] | None) -> dict[str, tuple[int, int]]:
    """Return the sentences of a text; a sentence ends with a mark (.?!) or an empty line.

    Every token of the text is in a sentence; special tokens end a sentence. The errors are those of
    ``by_word``.

    Args:
        tokens: the tokens of the text, as in ``by_word``.

    Returns:
        The span (start, stop) of tokens of each sentence, by its stripped text.

    Example:
        >>> import regard
        >>> texts = ("[CLS]", "It", " rains", ".", " We", " stay", ".", "[SEP]")
        >>> tokens = [regard.Token(text, special=text[0] == "[") for text in texts]
        >>> regard.spans.by_sentence(tokens)
        {'It rains.': (1, 4), 'We stay.': (4, 7)}
    """
    checked = _checked(tokens)
    found: list[tuple[str, tuple[int, int]]] = []
    for stretch in _stretches(checked):
        text = stretch.text
        first = len(text) - len(text.lstrip())  # the first sentence includes empty lines before it
        ends = (match.end() for match in _SENTENCE_END.finditer(text) if match.end() > first)
        parts = pairwise((0, *ends, len(text)))
        named = ((text[slice(*part)].strip(), part) for part in parts)
        found += stretch.named((name, part) for name, part in named if name)
    return _named(found, "sentence")


def by_pattern(
    tokens: Sequence[Token] | None,
    pattern: str | re.Pattern[str] | Mapping[str, str | re.Pattern[str]],
) -> dict[str, tuple[int, int]]:
    """Return the spans of a text that regular expressions match.

    If a pattern has a group, the part is the first group, as in ``re.findall``. A span goes from
    its first token to its last, including special tokens between them.

    Args:
        tokens: the tokens of the text, such as ``seen.key_tokens``. Patterns match the text without
            special tokens.
        pattern: one pattern, whose matches are named by their text; or a mapping from names to
            patterns. The names of further matches end with ``#2``, ``#3``.

    Returns:
        The span (start, stop) of tokens of each match, in the order of the patterns.

    Raises:
        TypeError: an element of ``tokens`` is not a Token, or the pattern has the wrong type.
        ValueError: tokens is None, or a pattern is not a valid regular expression or has no match.

    Example:
        >>> import regard
        >>> texts = ("Q", ":", " who", "?", " A", ":", " the", " cat", ".")
        >>> tokens = [regard.Token(text) for text in texts]
        >>> regard.spans.by_pattern(tokens, {"question": "Q: ([^?]*)", "answer": "A: (.*)"})
        {'question': (2, 3), 'answer': (6, 9)}
    """
    checked = _checked(tokens)
    whole = _Stretch.of(enumerate(checked))
    found: list[tuple[str, tuple[int, int]]] = []
    patterns = _patterns(pattern)
    matches = {
        name: list(_matches(name, compiled, whole.text)) for name, compiled in patterns.items()
    }
    everything = [part for parts in matches.values() for part in parts]
    for name, compiled in patterns.items():
        here = whole.named(matches[name], beside=everything)
        if not here:
            of_name = f" for {name!r}" if name else ""
            raise ValueError(
                f"pattern has {compiled.pattern!r}{of_name}; the text has no token that it "
                'matches.\n    Patterns see "".join(token.text for token in tokens), without '
                "special tokens."
            )
        found += here
    return _numbered(found)


def _checked(tokens: Sequence[Token] | None) -> tuple[Token, ...]:
    if tokens is None:
        raise ValueError(
            "tokens is None; parts of a text are found by its tokens.\n"
            "    Give the recording its tokens with seen.with_tokens(tokens)."
        )
    if isinstance(tokens, str) or not all(isinstance(token, Token) for token in tokens):
        first = next(token for token in tokens if not isinstance(token, Token))
        raise TypeError(
            f"tokens has {kind_text(first)}; each must be a regard.Token.\n"
            "    Use [regard.Token(text) for text in texts]; joined they give the text."
        )
    return tuple(tokens)


def _named(found: list[tuple[str, tuple[int, int]]], what: str) -> dict[str, tuple[int, int]]:
    if not found:
        raise ValueError(
            f"tokens has no {what}; there must be at least one.\n"
            "    Special tokens are no part of the text."
        )
    return _numbered(found)


def _numbered(named: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return the spans by unique names; ``#2``, ``#3``, ... is added to repeated names."""
    spans: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    for name, span in named:
        unique = name
        while unique in spans:
            counts[name] = counts.get(name, 1) + 1
            unique = f"{name}#{counts[name]}"
        spans[unique] = span
    return spans


def _stretches(tokens: Sequence[Token]) -> Iterator["_Stretch"]:
    """Yield the runs of tokens between special tokens."""
    for special, run in groupby(enumerate(tokens), lambda item: item[1].special):
        if not special:
            yield _Stretch.of(run)


def _matches(
    name: str, compiled: re.Pattern[str], text: str
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and the span of each match of a pattern, or of its first group.

    Empty matches are omitted.
    """
    group = min(1, compiled.groups)
    for match in compiled.finditer(text):
        if match[group]:
            yield name or match[group].strip(), match.span(group)


class _Stretch(NamedTuple):
    """A piece of text with the positions of its tokens.

    Attributes:
        text: the joined text of the tokens that are not special.
        places: the indices of these tokens, in increasing order.
        starts: for each token, the position of its first character that is not white space. For
            a token of white space only, it is the position of its first character.
        stops: for each token, the end of its last such character. Both lists never decrease.
    """

    text: str
    places: list[int]
    starts: list[int]
    stops: list[int]

    @classmethod
    def of(cls, tokens: Iterable[tuple[int, Token]]) -> "_Stretch":
        known = [(place, token.text) for place, token in tokens if not token.special]
        starts, stops, done = [0], [0], 0
        for _, text in known:
            bare = text.strip() or text
            before = len(text) - len(text.lstrip()) if bare is not text else 0
            starts.append(done + before if text else starts[-1])
            stops.append(done + before + len(bare) if text else stops[-1])
            done += len(text)
        text = "".join(text for _, text in known)
        return cls(text, [place for place, _ in known], starts[1:], stops[1:])

    def named(
        self,
        parts: Iterable[tuple[str, tuple[int, int]]],
        beside: Sequence[tuple[str, tuple[int, int]]] = (),
    ) -> list[tuple[str, tuple[int, int]]]:
        """Return the token spans of parts of the text, without parts that have no token.

        Args:
            parts: the name and the span of characters of each part.
            beside: other parts; a token shared with a later part belongs to them.
        """
        found: list[tuple[str, tuple[int, int]]] = []
        named = list(parts)
        ends = sorted(stop for _, (_, stop) in (*named, *beside))
        for name, (start, stop) in named:
            before = bisect_right(ends, start)
            taken = bisect_left(self.starts, ends[before - 1]) if before else 0
            first = max(taken, bisect_right(self.stops, start))
            past = bisect_left(self.starts, stop)
            if first < past:
                found.append((name, (self.places[first], self.places[past - 1] + 1)))
        return found


def _patterns(pattern: object) -> dict[str, re.Pattern[str]]:
    """Return the compiled patterns by name; a single pattern has an empty name."""
    named: dict[Any, Any] = {"": pattern}
    if isinstance(pattern, Mapping):
        named = dict(cast(Mapping[Any, Any], pattern))
    if not named:
        raise ValueError(
            "pattern is empty; it must have at least one regular expression.\n"
            '    Give {"question": r"Question: .*"}.'
        )
    for name in named:
        if not isinstance(name, str):
            raise TypeError(
                f"pattern has the name {name!r}, {kind_text(name)}; each must be a string.\n"
                '    Give {"question": r"Question: .*"}.'
            )
    return {name: _compiled(one) for name, one in named.items()}


def _compiled(pattern: object) -> re.Pattern[str]:
    if isinstance(pattern, re.Pattern) and isinstance(cast(Any, pattern).pattern, str):
        return cast(re.Pattern[str], pattern)
    if not isinstance(pattern, str):
        raise TypeError(
            f"pattern is {kind_text(cast(object, pattern))}; it must be a regular expression, or a "
            "mapping from names to them.\n"
            '    Give r"Question: .*", or {"question": r"Question: .*"}.'
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"pattern has {pattern!r}; it is no regular expression ({error}).\n"
            "    Use re.escape(text) to find a text as it stands."
        ) from error
