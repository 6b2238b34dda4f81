"""Comparison of the tokens of queries and keys, to detect self-attention."""

from collections.abc import Sequence

from regard.text.tokens import Token

__all__ = ["one_text"]


def one_text(
    query_tokens: Sequence[Token] | None, key_tokens: Sequence[Token] | None, rows: range
) -> bool:
    """Return True if queries and keys can be the same text: their tokens are equal or unknown.

    Args:
        query_tokens: one token for each row; None if unknown.
        key_tokens: one token for each key; None if unknown.
        rows: the positions of the rows among the keys.

    Example:
        >>> from regard.recording.text_match import one_text
        >>> from regard.text.tokens import as_tokens
        >>> tokens = as_tokens("tokens", ["Life", " is"])
        >>> one_text(tokens[1:], tokens, range(1, 2)), one_text(tokens[1:], tokens, range(1))
        (True, False)
    """
    if query_tokens is None or key_tokens is None:
        return True
    return tuple(query_tokens) == tuple(key_tokens[rows.start : rows.stop])
