"""Short labels of tokens, which differ for repeated words."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from regard.text.escaping import visible
from regard.text.tokens import Token

SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"


def labels(tokens: Sequence[Token]) -> list[str]:
    r"""Return a short label for each token; repeated words get their position as a subscript.

    Args:
        tokens: the tokens of one text.
    """
    words = [bare(token.text) for token in tokens]
    counts = Counter(words)
    return [
        label
        if counts[label] == 1
        else label + "".join(SUBSCRIPTS[int(digit)] for digit in str(index))
        for index, label in enumerate(words)
    ]


def bare(text: str) -> str:
    r"""Return the text of a token without white space around it, and with visible characters.

    Args:
        text: the text of the token.
    """
    word = text.strip(" \t\r\n")
    if not word:
        # The token is only white space, or empty: a further byte of the character before.
        return visible(text).replace(" ", "␣") or "⋯"
    shown = visible(word)
    return "◌" + shown if unicodedata.category(shown[0]).startswith("M") else shown
