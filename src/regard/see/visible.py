"""Tokens as people can read them: nothing in a text is hidden, and nothing in it is obeyed."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from regard.recording import Token

__all__ = ["SUBSCRIPTS", "labels", "visible"]

_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32)}
_SYMBOLS = {**_PICTURES, "\n": "↵", "\t": "⇥", "\x7f": "␡"}
# Between letters of Persian and Indian scripts and inside emoji these two are spelling.
_SPELLING = {"\u200c", "\u200d"}
_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"


def visible(text: str) -> str:
    r"""The text with a symbol for every character that shows nothing or steers the terminal.

    Control characters have the pictures that Unicode has for them; what else is invisible, such as
    the marks that turn the direction of writing, is shown by its number.

    Args:
        text: any text.

    Example:
        >>> from regard.see.visible import visible
        >>> visible("a\x1b[31m\u202eb\n")
        'a␛[31m‹U+202E›b↵'
    """
    return "".join(_symbol(character) for character in text)


def _symbol(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if unicodedata.category(character) in _HIDDEN and character not in _SPELLING:
        return f"‹U+{ord(character):04X}›"
    return character


def labels(tokens: Sequence[Token]) -> list[str]:
    r"""A short name for each token, different for each: with its place where a word comes again.

    Args:
        tokens: of one text.

    Example:
        >>> from regard import Token
        >>> from regard.see.visible import labels
        >>> labels([Token("to"), Token(" be"), Token(" to"), Token("\n\n")])
        ['to₀', 'be', 'to₂', '↵↵']
    """
    bare = [_bare(token.text) for token in tokens]
    counts = Counter(bare)
    return [
        label
        if counts[label] == 1
        else label + "".join(SUBSCRIPTS[int(digit)] for digit in str(place))
        for place, label in enumerate(bare)
    ]


def _bare(text: str) -> str:
    word = text.strip(" \t\r\n")
    if not word:
        # White space alone; or nothing: a further byte of the character before.
        return visible(text).replace(" ", "␣") or "⋯"
    mark = "◌" if unicodedata.category(word[0]).startswith("M") else ""
    return mark + visible(word)
