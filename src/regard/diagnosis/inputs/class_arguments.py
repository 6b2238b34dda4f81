"""Arguments of a class that nobody gave, guessed from the names that everybody uses."""

import inspect
from collections.abc import Mapping
from typing import Any

_WIDTH, _HEADS, _HEAD_DIM = 32, 4, 8
_VALUES: dict[str, Any] = {
    **dict.fromkeys(("dim", "d_model", "model_dim", "hidden_dim", "hidden_size", "width"), _WIDTH),
    **dict.fromkeys(("embed_dim", "emb_dim", "embedding_dim", "embed_size", "n_embd"), _WIDTH),
    **dict.fromkeys(("d_in", "d_out", "in_dim", "out_dim", "input_dim", "channels"), _WIDTH),
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "nhead", "heads", "h"), _HEADS),
    **dict.fromkeys(("num_attention_heads", "n_q_heads", "num_q_heads"), _HEADS),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_key_value_heads", "kv_heads"), 2),
    **dict.fromkeys(("head_dim", "head_size", "d_head", "d_k", "d_v"), _HEAD_DIM),
    **dict.fromkeys(("block_size", "context_length", "context_size", "n_ctx", "seq_len"), 16),
    **dict.fromkeys(("max_len", "max_length", "max_seq_len", "max_seq_length"), 16),
    **dict.fromkeys(("dropout", "dropout_rate", "attn_dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("window", "window_size", "sliding_window"), 4),
}


def guessed_value(name: str) -> Any:
    """Return the value for an argument of this name; None if the name does not tell."""
    return _VALUES.get(name.lower())


def guessed_arguments(
    thing: object, args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the missing arguments of a class; empty for anything else, or if one is unknown."""
    if not inspect.isclass(thing):
        return {}
    try:
        signature = inspect.signature(thing)
        given = signature.bind_partial(*args, **options).arguments
    except (TypeError, ValueError):  # it has no signature, or other arguments
        return {}
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and name not in given
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    guessed = {name: guessed_value(name) for name in missing}
    return {} if None in guessed.values() else guessed
