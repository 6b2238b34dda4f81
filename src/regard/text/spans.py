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
from typing import NamedTuple

from regard.text.tokens import Token, as_tokens

__all__ = ["by_pattern", "by_sentence", "by_word"]

_Named = tuple[str, tuple[int, int]]  # a name and its span

_WORD = re.compile(r"\w+(?:['\u2019\-]\w+)*")
# A mark of Latin scripts ends a sentence only before white space; Chinese and Japanese marks do so
# always.
_SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019\xbb)\]]*\s+|[\u3002\uff01\uff1f]+\s*|\n\s*\n\s*"
)


def by_word(tokens: Sequence[Token | str] | None) -> dict[str, tuple[int, int]]:
    """Return the words of a text: letters and digits, with hyphens and apostrophes between them.

    The names of repeated words end with ``#2``, ``#3``. If one token contains two words, the second
    word has no token and is omitted.

    Args:
        tokens: the tokens of the text, such as ``seen.key_tokens``. Special tokens are not words.

    Returns:
        The span (start, stop) of tokens of each word.

    Raises:
        TypeError: an element of ``tokens`` is neither a Token nor a string.
        ValueError: tokens is None, or contains no word.

    Example:
        >>> import regard
        >>> regard.spans.by_word(["to", " be", ",", " or", " not", " to"])
        {'to': (0, 1), 'be': (1, 2), 'or': (3, 4), 'not': (4, 5), 'to#2': (5, 6)}
    """
    words: list[_Named] = []
    for stretch in _stretches(tokens):
        words += stretch.named([(match[0], match.span()) for match in _WORD.finditer(stretch.text)])
    return _numbered(words, "word")


def by_sentence(tokens: Sequence[Token | str] | None) -> dict[str, tuple[int, int]]:
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
    sentences: list[_Named] = []
    for stretch in _stretches(tokens):
        text = stretch.text
        first = len(text) - len(text.lstrip())  # the first sentence includes empty lines before it
        ends = (match.end() for match in _SENTENCE_END.finditer(text) if match.end() > first)
        named = [(text[slice(*part)].strip(), part) for part in pairwise((0, *ends, len(text)))]
        sentences += stretch.named([(name, part) for name, part in named if name])
    return _numbered(sentences, "sentence")


def by_pattern(
    tokens: Sequence[Token | str] | None,
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
        TypeError: an element of ``tokens`` is neither a Token nor a string, or the pattern has the
            wrong type.
        ValueError: tokens is None, or a pattern is not a valid regular expression or has no match.

    Example:
        >>> import regard
        >>> tokens = ["Q", ":", " who", "?", " A", ":", " the", " cat", "."]
        >>> regard.spans.by_pattern(tokens, {"question": "Q: ([^?]*)", "answer": "A: (.*)"})
        {'question': (2, 3), 'answer': (6, 9)}
    """
    text = _Stretch.of(enumerate(_checked(tokens)))
    patterns = pattern if isinstance(pattern, Mapping) else {"": pattern}
    matches = {name: _matches(name, _compiled(one), text.text) for name, one in patterns.items()}
    every = [match for matches_of_one in matches.values() for match in matches_of_one]
    parts: list[_Named] = []
    for name, one in patterns.items():
        named = text.named(matches[name], beside=every)
        if not named:
            of_name = f" for {name!r}" if name else ""
            raise ValueError(
                f"pattern has {_compiled(one).pattern!r}{of_name}; the text has no token that it "
                'matches.\n    Patterns see "".join(token.text for token in tokens), without '
                "special tokens."
            )
        parts += named
    return _numbered(parts, "match")


def _checked(tokens: Sequence[Token | str] | None) -> tuple[Token, ...]:
    checked = as_tokens("tokens", tokens)
    if checked is None:
        raise ValueError(
            "tokens is None; parts of a text are found by its tokens.\n"
            "    Give the recording its tokens with seen.with_tokens(tokens)."
        )
    return checked


def _numbered(parts: Sequence[_Named], kind: str) -> dict[str, tuple[int, int]]:
    """Return the spans by unique names; ``#2``, ``#3``, ... is added to repeated names."""
    if not parts:
        raise ValueError(
            f"tokens has no {kind}; there must be at least one.\n"
            "    Special tokens are no part of the text."
        )
    spans: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    for name, span in parts:
        unique = name
        while unique in spans:
            counts[name] = counts.get(name, 1) + 1
            unique = f"{name}#{counts[name]}"
        spans[unique] = span
    return spans


def _stretches(tokens: Sequence[Token | str] | None) -> Iterator["_Stretch"]:
    """Yield the runs of tokens between special tokens."""
    for special, run in groupby(enumerate(_checked(tokens)), lambda item: item[1].special):
        if not special:
            yield _Stretch.of(run)


def _compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"pattern has {pattern!r}; it is no regular expression ({error}).\n"
            "    Use re.escape(text) to find a text as it stands."
        ) from error


def _matches(name: str, compiled: re.Pattern[str], text: str) -> list[_Named]:
    """Return the name and the span of each match of a pattern, or of its first group.

    Empty matches are omitted.
    """
    group = min(1, compiled.groups)
    return [
        (name or match[group].strip(), match.span(group))
        for match in compiled.finditer(text)
        if match[group]
    ]


class _Stretch(NamedTuple):
    """A piece of text with the positions of its tokens.

    Attributes:
        text: the joined text of the tokens that are not special.
        indices: the indices of these tokens, in increasing order.
        starts: for each token, the position of its first character that is not white space. For
            a token of white space only, it is the position of its first character.
        stops: for each token, the end of its last such character. Both lists never decrease.
    """

    text: str
    indices: list[int]
    starts: list[int]
    stops: list[int]

    @classmethod
    def of(cls, tokens: Iterable[tuple[int, Token]]) -> "_Stretch":
        run = [(index, token.text) for index, token in tokens if not token.special]
        starts, stops, done = [0], [0], 0
        for _, text in run:
            bare = text.strip() or text
            start = done + text.index(bare)
            starts.append(start if text else starts[-1])
            stops.append(start + len(bare) if text else stops[-1])
            done += len(text)
        text = "".join(text for _, text in run)
        return cls(text, [index for index, _ in run], starts[1:], stops[1:])

    def named(self, parts: Sequence[_Named], beside: Sequence[_Named] = ()) -> list[_Named]:
        """Return the token spans of parts of the text, without parts that have no token.

        Args:
            parts: the name and the span of characters of each part.
            beside: other parts; a token shared with a later part belongs to them.
        """
        spans: list[_Named] = []
        ends = sorted(stop for _, (_, stop) in (*parts, *beside))
        for name, (start, stop) in parts:
            before = bisect_right(ends, start)
            shared = bisect_left(self.starts, ends[before - 1]) if before else 0
            first = max(shared, bisect_right(self.stops, start))
            past = bisect_left(self.starts, stop)
            if first < past:
                spans.append((name, (self.indices[first], self.indices[past - 1] + 1)))
        return spans
