"""Escaping of untrusted text, so that no character is invisible or controls a terminal."""

import unicodedata

_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32)}
_SYMBOLS = {**_PICTURES, "\n": "↵", "\t": "⇥", "\x7f": "␡"}
# These invisible characters are part of the spelling in Persian, Indian and Mongolian scripts and
# in emoji. They are escaped only if a text has nothing else. tokens.js has the same list.
_VARIANTS = {chr(code) for code in range(0xFE00, 0xFE10)}
_SPELLING = {*"\u200c\u200d\u034f\u2800\u180b\u180c\u180d", *_VARIANTS}
_FILLERS = {*"\u115f\u1160\u3164\uffa0"}
_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def visible(text: str) -> str:
    r"""Replace each character that is invisible or controls a terminal by a symbol.

    Control characters become Unicode's control pictures. Other invisible characters, such as marks
    for the direction of writing, become their code points.

    Args:
        text: any text.
    """
    if _SPELLING.issuperset(text):
        return "".join(map(_number, text))
    return "".join(map(_symbol, text))


def _symbol(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    is_hidden = character in _FILLERS or unicodedata.category(character) in _HIDDEN
    return _number(character) if is_hidden and character not in _SPELLING else character


def _number(character: str) -> str:
    return f"‹U+{ord(character):04X}›"
