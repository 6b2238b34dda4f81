"""Tokens as people can tell them apart."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from regard.text.escaping import visible
from regard.text.tokens import Token

__all__ = ["SUBSCRIPTS", "bare", "labels"]

SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"


def labels(tokens: Sequence[Token]) -> list[str]:
    r"""Return a short name for each token; a word that occurs again has its place added.

    Args:
        tokens: of one text.

    Example:
        >>> from regard import Token
        >>> from regard.text.token_labels import labels
        >>> labels([Token("to"), Token(" be"), Token(" to"), Token("\n\n")])
        ['to₀', 'be', 'to₂', '↵↵']
    """
    words = [bare(token.text) for token in tokens]
    counts = Counter(words)
    return [
        label
        if counts[label] == 1
        else label + "".join(SUBSCRIPTS[int(digit)] for digit in str(place))
        for place, label in enumerate(words)
    ]


def bare(text: str) -> str:
    r"""Return a token without the white space around it; invisible characters become symbols.

    Args:
        text: of the token.

    Example:
        >>> from regard.text.token_labels import bare
        >>> bare(" be"), bare(" "), bare("\x1b[0m")
        ('be', '␣', '␛[0m')
    """
    word = text.strip(" \t\r\n")
    if not word:
        # White space alone; or nothing: a further byte of the character before.
        return visible(text).replace(" ", "␣") or "⋯"
    shown = visible(word)
    return "◌" + shown if unicodedata.category(shown[0]).startswith("M") else shown
