"""Comparison of the tokens of queries and keys, to detect self-attention."""

from collections.abc import Sequence

from regard.text.tokens import Token

__all__ = ["one_text"]


def one_text(
    query_tokens: Sequence[Token] | None, key_tokens: Sequence[Token] | None, rows: range
) -> bool:
    """Return True if queries and keys can be the same text: their tokens are equal or unknown.

    ``rows`` are the positions of the queries among the keys.
    """
    if query_tokens is None or key_tokens is None:
        return True
    return tuple(query_tokens) == tuple(key_tokens[rows.start : rows.stop])
