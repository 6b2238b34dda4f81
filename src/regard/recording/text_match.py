"""Comparison of the tokens of queries and keys, to detect self-attention."""

from collections.abc import Mapping, Sequence

from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.rollouts import Rollout, rollout
from regard.text.tokens import Token

__all__ = ["one_text", "rollout_of_text"]


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


def rollout_of_text(
    layers: Mapping[str, AttentionMatrix],
    query_tokens: Sequence[Token] | None,
    key_tokens: Sequence[Token] | None,
    residual: float,
) -> Rollout:
    """Compute ``Recording.rollout`` after a check of the tokens.

    Raises:
        ValueError: queries and keys have different tokens; and the errors of ``rollout``.

    Example:
        >>> import torch, regard
        >>> from regard.recording.text_match import rollout_of_text
        >>> even = regard.attend(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> rollout_of_text({"layer": even}, None, None, 0.5)[0]
        tensor([0.7500, 0.2500])
    """
    rolled = rollout(layers, residual=residual)
    if not one_text(query_tokens, key_tokens, range(rolled.shape[-1])):
        raise ValueError(
            "query_tokens and key_tokens differ; only self-attention can be rolled out.\n"
            "    Take its layers and their tokens, seen.part(names).with_tokens(tokens).rollout()."
        )
    return rolled
