"""The attention implementation ``regard`` of Hugging Face transformers."""

import sys
from typing import Any, cast

from torch import Tensor, nn

from regard.capture.fused_calls import attention_of
from regard.errors import RegardError
from regard.masks import Causal, Mask
from regard.matrix.attention_matrix import AttentionMatrix, attend

__all__ = ["attention_forward", "mask", "register"]

NAME = "regard"


def register() -> None:
    """Register the implementation, so that ``model.set_attn_implementation("regard")`` knows it.

    Raises:
        RegardError: transformers is not installed, or too old.

    Example:
        >>> import regard.transformers
        >>> from transformers import AttentionInterface
        >>> "regard" in AttentionInterface()
        True
    """
    interface, masks = _interfaces()
    interface.register(NAME, attention_forward)
    masks.register(NAME, mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, AttentionMatrix]:
    """Run attention as transformers' ``sdpa`` does, and return the lazy matrix as well.

    A softcap and sinks, which ``sdpa`` does not have, are computed by ``A @ value``, in memory
    linear in the length. Dropout changes the output and not the matrix.

    Args:
        module: the attention module of the model.
        query: (batch, num_heads, q_len, head_dim).
        key: (batch, num_kv_heads, kv_len, head_dim).
        value: (batch, num_kv_heads, kv_len, head_dim).
        attention_mask: bool, True = may attend, or numbers added to the scores; broadcastable to
            (batch, num_heads, q_len, kv_len). None: causal if the module is.
        scaling: multiplies query·key; 1/sqrt(head_dim) by default.
        dropout: the part of the weights that is left out.
        kwargs: ``is_causal``, ``position_bias``, ``softcap`` and ``s_aux`` (sinks) of transformers.

    Returns:
        The output, (batch, q_len, num_heads, head_dim), and the matrix, (batch, num_heads, q_len,
        kv_len).

    Raises:
        RegardError: a paged cache, or dropout together with a softcap or sinks.
    """
    if kwargs.get("cache") is not None:
        raise RegardError(
            "continuous batching keeps its keys in pages; they are no matrix.\n"
            '    Generate with model.generate(), or set_attn_implementation("sdpa").'
        )
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    known = _causal(module, query, key, kwargs) if attention_mask is None else None
    own = key.clone() if _is_written_in_place(key) else key
    plain = attention_of(query, own, numbers=attention_mask, mask=known, scale=scaling)
    matrix = _with(plain, kwargs.get("position_bias"), softcap, sinks)
    if softcap is None and sinks is None:
        run = _interfaces()[0]()["sdpa"]
        output = run(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )[0]
        return cast(Tensor, output), matrix
    if dropout and module.training:
        raise RegardError(
            f"{type(module).__name__} has dropout on weights with a softcap or sinks; "
            "no fused kernel computes that.\n"
            '    Set attention_dropout=0, or set_attn_implementation("eager").'
        )
    return (matrix @ value).transpose(1, 2).contiguous(), matrix


def mask(*, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Return the mask that transformers makes for ``sdpa``; see ``AttentionMaskInterface``.

    Raises:
        RegardError: the model has an attention of its own, which would take the mask for numbers.
    """
    of_config = type(config).__module__
    modeling = sys.modules.get(of_config.replace(".configuration_", ".modeling_"))
    # A model that asks for a registered implementation has this name in its module.
    if modeling is not None and not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        raise RegardError(
            f"{config.model_type} has an attention of its own, not transformers' interface; "
            'it cannot run with attn_implementation="regard".\n'
            "    Watch it with regard.observe(model)."
        )
    return cast("Tensor | None", _interfaces()[1]()["sdpa"](config=config, **kwargs))


def _causal(module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> Mask | None:
    """Return the mask of a causal module, whose first query is lined up with the first key."""
    is_causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or query.shape[-2] == 1:
        return None
    return Causal() if query.shape[-2] == key.shape[-2] else Causal(align="top-left")


def _is_written_in_place(key: Tensor) -> bool:
    """Return True if a key may be the buffer of a static cache, which later steps overwrite."""
    # PyTorch counts no writes into tensors of inference mode.
    return key.is_inference() or key._version > 0  # pyright: ignore[reportPrivateUsage]


def _with(
    plain: AttentionMatrix, bias: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> AttentionMatrix:
    """Return the matrix with what the module adds to the scores beside its mask."""
    if bias is None and softcap is None and sinks is None:
        return plain
    source = cast(Any, plain.source)
    total = source.bias if bias is None else bias if source.bias is None else source.bias + bias
    return attend(
        source.query,
        source.key,
        mask=plain.mask,
        scale=source.scale,
        bias=total,
        softcap=softcap,
        sink_bias=sinks,
    )


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise RegardError(
            "regard.transformers needs transformers 5 or newer.\n"
            "    Run: pip install 'transformers>=5'"
        ) from error
    return AttentionInterface, AttentionMaskInterface
