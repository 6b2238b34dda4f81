"""Conversion of fused attention calls to an AttentionMatrix.

A fused operation computes the output from query, key and value without forming the weights. Its
arguments still determine the weights. Only this module knows the fused operations, their arguments
and the meaning of each argument.

A Tracer observes ``flex_attention`` as an operation if it runs uncompiled. Compiled, it is one
kernel that no PyTorch mode observes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from regard.masks import Causal, Documents, Keep, Mask, Padding, SlidingWindow, as_mask
from regard.masks.recognise import allowed_rows, recognised, split
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.scores.position_bias import ALiBi
from regard.tracing.tracer import Operation, apart

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
_FLEX_NAMES = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
# A mask with more elements stays a callable: recognising it would need all of its elements.
_LARGEST = 2**26

NESTED = "query is a nested tensor; it must be an ordinary one.\n    Pad it and pass a mask."

Arguments = Mapping[str, Any]
"""The arguments of a call by name, including the defaults of omitted ones."""


Read = tuple[AttentionMatrix, Callable[[], Tensor]]
"""The attention matrix of a call, made of the model's own tensors, and a function for its value.

The value is (..., num_kv_heads, kv_len, head_dim).
"""


@dataclass(frozen=True)
class FusedCall:
    """A reader of the arguments of one fused operation.

    ``inside`` is the name of the attention module inside the module that runs the call; "" if they
    are the same module.
    """

    names: tuple[str, ...]
    defaults: Arguments
    reader: Callable[[Arguments], Read]
    inside: str = ""

    def read(
        self,
        args: tuple[Any, ...],
        kwargs: Arguments,
        *,
        one_query: bool = False,
        padded_to: Mapping[tuple[int, ...], int] | None = None,
    ) -> Read:
        """Return the attention matrix of a call, and a function that returns its value.

        With ``one_query``, the call has one query token, and its token axis holds the heads that
        share a key (``pack_gqa`` of transformers). ``padded_to`` has the padded length of each
        nested tensor before its padding was removed, by the lengths of its sequences.

        Raises:
            TypeError: a tensor has a dtype that attention does not support.
            ValueError: a matrix cannot represent an argument.
        """
        arguments = {**self.defaults, **dict(zip(self.names, args, strict=False))}
        arguments |= {_OUR_NAMES.get(name, name): value for name, value in kwargs.items()}
        arguments["padded_to"] = padded_to or {}
        return self.reader(_unpacked(arguments) if one_query else arguments)


@cache
def fused_call(operation: Callable[..., Any]) -> FusedCall | None:
    """Return the reader of a fused attention operation; None for others.

    It is called for each operation that runs, because listing all operations is slower.
    """
    if not isinstance(operation, OpOverload):
        return None
    namespace, _, name = operation.name().partition("::")  # a default overload has no suffix
    kind = _TORCH.get(name) if namespace in ("aten", "torch_attn") else _PACKAGES.get(name)
    return None if kind is None else _fused_call(operation, *kind)


@cache
def batching() -> Callable[..., Any] | None:
    """Return the operation by which ``scaled_dot_product_attention`` adds a batch of 1.

    It does so for tensors without a batch since PyTorch 2.15. The result is None for versions that
    pass such tensors on as they are.
    """
    made: list[Callable[..., Any]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **kwargs or {})
            if isinstance(output, Tensor) and output.ndim == 4 and args[0].ndim == 3:
                made.append(func)
            return output

    with apart(), Probe():
        x = torch.zeros(1, 2, 4, device="cpu")
        F.scaled_dot_product_attention(x, x, x)
    return made[0] if made else None


@cache
def unread_attention(operation: Callable[..., Any]) -> str | None:
    """Return the name of an operation that computes attention and has no reader; None for others.

    Its name shows that it computes attention: other packages and later versions of PyTorch bring
    operations that no table can list. Backward passes and helpers of attention are None.
    """
    is_operation = isinstance(operation, OpOverload | HigherOrderOperator)
    full_name = str(cast(Any, operation).name()) if is_operation else ""
    if operation is FLEX_ATTENTION or fused_call(cast(Any, operation)) is not None:
        return None
    if _HELPERS.search(full_name):
        return None
    namespace, _, name = full_name.rpartition("::")
    is_attention = _ATTENTION.search(name) or (
        _ATTENTION.search(namespace) and _FORWARD.match(name)
    )
    return full_name if is_attention else None


def _fused_call(overload: Any, reader: Callable[[Arguments], Read], inside: str = "") -> FusedCall:
    arguments = overload._schema.arguments
    names = tuple(str(_OUR_NAMES.get(argument.name, argument.name)) for argument in arguments)
    defaults = {
        name: argument.default_value
        for name, argument in zip(names, arguments, strict=True)
        if argument.has_default_value()
    }
    return FusedCall(names, defaults, reader, inside)


def attention_of(
    query: Tensor,
    key: Tensor,
    *,
    numbers: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
) -> AttentionMatrix:
    """Return the matrix for a query, a key and the ``attn_mask`` of scaled_dot_product_attention.

    ``numbers``, the attn_mask, is bool (True = may attend) or is added to the scores. ``mask`` is
    combined with it.
    """
    scale = None if scale is None else float(scale)  # PyTorch also accepts tensors and NumPy floats
    plain = attend(query, key, mask=mask, scale=scale)
    if numbers is None:
        return plain
    if numbers.dtype == torch.bool:
        visible, bias = recognised(numbers, plain.shape), None
    else:
        visible, bias = split(numbers, plain.shape)
    if visible is not None:
        mask = visible if mask is None else mask & visible
    return attend(query, key, mask=mask, scale=scale, bias=bias)


def _causal(query: Tensor, key: Tensor) -> Mask:
    """Return the mask of PyTorch's ``is_causal``, which aligns the first query and first key."""
    return Causal() if query.shape[-2] == key.shape[-2] else Causal(align="top-left")


def _scaled_dot_product(args: Arguments) -> Read:
    query, key = args["query"], args["key"]
    if query.is_nested or key.is_nested:
        raise ValueError(NESTED)
    matrix = attention_of(
        query,
        key,
        numbers=args.get("attn_mask"),
        mask=_causal(query, key) if args["is_causal"] else None,
        scale=args["scale"],
    )
    return matrix, lambda: args["value"]


def _unpacked(args: Arguments) -> Arguments:
    """Return the arguments with query and mask unpacked to (batch, num_heads, 1, ...)."""
    query, mask = args["query"], args.get("attn_mask")
    packed = query.shape[1:3]
    if mask is not None and mask.shape[1:3] == packed:
        mask = mask.flatten(1, 2)[:, :, None]
    return {**args, "query": query.flatten(1, 2)[:, :, None], "attn_mask": mask}


def _multi_head(args: Arguments) -> Read:
    num_heads = args["num_head"]
    matrix = _projected(args["query"], args["key"], num_heads, args)
    return matrix, lambda: _projected_value(_padded(args["value"], args)[0], num_heads, args)


def _encoder_layer(args: Arguments) -> Read:
    source, lengths = _padded(args["src"], args)
    if args["norm_first"]:
        weight, bias = args["norm_weight_1"], args["norm_bias_1"]
        source = F.layer_norm(source, (args["embed_dim"],), weight, bias, args["eps"])
    num_heads = args["num_heads"]
    matrix = _projected(source, source, num_heads, args, lengths)
    return matrix, lambda: _projected_value(source, num_heads, args)


def _projected_value(value: Tensor, num_heads: int, args: Arguments) -> Tensor:
    of_values, bias = args["qkv_weight"].chunk(3)[2], args["qkv_bias"].chunk(3)[2]
    return _heads(F.linear(value, of_values, bias), num_heads)


def _projected(
    query: Tensor, key: Tensor, num_heads: int, args: Arguments, lengths: list[int] | None = None
) -> AttentionMatrix:
    """Return the matrix of a fused layer by repeating its projections of query and key."""
    query, of_query = _padded(query, args)
    key, of_key = _padded(key, args)
    lengths = lengths or of_query or of_key
    of_queries, of_keys, _ = args["qkv_weight"].chunk(3)
    query_bias, key_bias, _ = args["qkv_bias"].chunk(3)
    query = _heads(F.linear(query, of_queries, query_bias), num_heads)
    key = _heads(F.linear(key, of_keys, key_bias), num_heads)
    mask = None if lengths is None else _only_real(lengths, query)
    return attention_of(query, key, numbers=_as_allowed(args["mask"], args["mask_type"]), mask=mask)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Reshape (batch, tokens, num_heads · head_dim) to (batch, num_heads, tokens, head_dim)."""
    return x.reshape(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def _padded(tensor: Tensor, args: Arguments) -> tuple[Tensor, list[int] | None]:
    """Pad a nested tensor to (batch, tokens, dim), and return the length of each sequence.

    An ordinary tensor is returned unchanged, with None for the lengths.
    """
    if not tensor.is_nested:
        return tensor, None
    parts = list(tensor.unbind())
    lengths = [part.shape[0] for part in parts]
    padded = pad_sequence(parts, batch_first=True)
    tokens = args["padded_to"].get(tuple(lengths), padded.shape[1])
    return F.pad(padded, (0, 0, 0, tokens - padded.shape[1])), lengths


def _only_real(lengths: list[int], query: Tensor) -> Mask:
    """Return a mask that hides padding tokens, as keys and as queries."""
    padding = Padding(lengths)
    if min(lengths) == query.shape[-2]:
        return padding
    positions = torch.arange(query.shape[-2], device=query.device)
    real = positions < torch.tensor(lengths, device=query.device)[:, None]
    return padding & Keep(real[:, None, :, None])


def _as_allowed(mask: Tensor | None, kind: int | None) -> Tensor | None:
    """Convert a mask of the fast path, where 0 means *may attend*, to True = may attend.

    The kind is 0 for a mask (q_len, kv_len), 1 for padding (batch, kv_len), and 2 for a mask
    (batch, num_heads, q_len, kv_len).
    """
    if mask is None:
        return None
    mask = mask == 0
    return mask[:, None, None, :] if kind == 1 else mask


def _flash(args: Arguments) -> Read:
    """Return matrix and value of a flash-attn call, whose tensors have tokens before heads."""
    for name in _UNREAD:
        if isinstance(args.get(name), Tensor) or args.get(name):
            raise ValueError(
                f"the flash-attn call has {name}, which a matrix cannot represent.\n"
                "    Run the model without it, or with attn_implementation='sdpa'."
            )
    query, key = (args[name].transpose(-3, -2) for name in ("query", "key"))
    ends = [args.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    mask = _window_mask(query, key, args)
    if ends[0] is not None:
        mask = _packed_mask(ends[0], ends[0] if ends[1] is None else ends[1], mask)
    slopes, softcap = args.get("alibi_slopes"), args.get("softcap") or None
    if slopes is not None and softcap is not None:
        raise ValueError(
            "the flash-attn call has softcap and alibi_slopes, added after the cap.\n"
            "    Leave one of them out."
        )
    bias = None if slopes is None else ALiBi(slopes)
    matrix = attend(query, key, mask=mask, scale=args["scale"], bias=bias, softcap=softcap)
    return matrix, lambda: args["value"].transpose(-3, -2)


def _window_mask(query: Tensor, key: Tensor, args: Arguments) -> Mask | None:
    """Return the mask of flash-attn's window; -1 is unlimited, and causal means 0 to the right."""
    left, right = args.get("window_size") or (
        args.get("window_size_left", -1),
        args.get("window_size_right", -1),
    )
    right = 0 if args["is_causal"] else right
    everything = query.shape[-2] + key.shape[-2]
    if left < 0:
        return None if right < 0 else Causal() if right == 0 else SlidingWindow(everything, right)
    return SlidingWindow(left, everything if right < 0 else right)


def _packed_mask(ends: Tensor, key_ends: Tensor, band: Mask | None) -> Mask:
    """Return the mask of packed sequences, each of which attends only to itself."""
    of_queries, of_keys = _documents(ends), _documents(key_ends)
    if torch.equal(ends, key_ends):
        return Documents(of_keys) if band is None else Documents(of_keys) & band
    allowed = of_queries[:, None] == of_keys
    if band is not None:
        # The band of each sequence is aligned with the end of that sequence.
        spans = zip(pairwise(_whole(ends)), pairwise(_whole(key_ends)), strict=True)
        for (start, stop), (key_start, key_stop) in spans:
            part = allowed[start:stop, key_start:key_stop]
            if part.numel():
                part &= band.to_dense(*part.shape, device=part.device)
    return Keep(allowed)


def _documents(ends: Tensor) -> Tensor:
    """Return the index of each token's sequence, (tokens,)."""
    lengths = ends.diff()
    return torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths)


def _whole(ends: Tensor) -> list[int]:
    return cast(list[int], ends.tolist())


_UNREAD = (
    *("k_new", "qv", "page_table", "block_table", "kv_batch_idx", "leftpad_k", "seqused_q"),
    *("seqused_k", "rotary_cos", "q_descale", "k_descale", "attention_chunk"),
)
"""Arguments of flash-attn that a matrix cannot represent."""

_OUR_NAMES = {
    "attn_bias": "attn_mask",
    "q": "query",
    "k": "key",
    "v": "value",
    "softmax_scale": "scale",
    "causal": "is_causal",
    "cu_seq_q": "cu_seqlens_q",
    "cu_seq_k": "cu_seqlens_k",
}
"""Arguments that have another name in ``scaled_dot_product_attention``, with that name."""

_Reading = tuple[Callable[[Arguments], Read], str]
_TORCH: dict[str, _Reading] = {
    **dict.fromkeys(
        (
            "scaled_dot_product_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math",
            "_scaled_dot_product_attention_math_for_mps",
        ),
        (_scaled_dot_product, ""),
    ),
    "_native_multi_head_attention": (_multi_head, ""),
    "_transformer_encoder_layer_fwd": (_encoder_layer, "self_attn"),
    "_varlen_attn": (_flash, ""),
}
_PACKAGES: dict[str, _Reading] = {
    "_flash_attn_forward": (_flash, ""),
    "_flash_attn_varlen_forward": (_flash, ""),
}
"""Operations of packages, in any namespace.

flash-attn 2 and 3 have a namespace each; kernels from a hub have one for each build.
"""

_ATTENTION = re.compile(
    r"attn|attention|(?<!fl)atten(?![a-z])|flash|scaled_dot|sdpa|multi_?head"
    r"|transformer_encoder_layer|(?<![a-z])(mha|fmha|mla)(?![a-z])",
    re.IGNORECASE,
)
_HELPERS = re.compile(r"backward|bwd|mask|metadata|and_cache|rotary|norm", re.IGNORECASE)
"""Operations that compute no attention, although their names contain the word."""
_FORWARD = re.compile(r"_?(mha_|varlen_)?(fwd|forward)", re.IGNORECASE)
"""Operations such as ``flash_attn_3::fwd``, whose namespace alone names attention."""


def read_flex(operation: Operation) -> Read:
    """Return the attention matrix of a call of ``flex_attention``, and a function for its value."""
    arguments = dict(zip(_FLEX_NAMES, operation.args, strict=False)) | operation.kwargs
    query, key = arguments["query"], arguments["key"]
    score_mod = _with_buffers(arguments["score_mod"], arguments.get("score_mod_other_buffers", ()))
    block_mask = _block_mask(arguments["block_mask"], arguments.get("mask_mod_other_buffers", ()))
    matrix = attend(
        query,
        key,
        mask=None if block_mask is None else _recognised_mask(block_mask, query, key),
        scale=float(arguments["scale"]),
        score_mod=None if _is_identity(arguments["score_mod"]) else score_mod,
    )
    return matrix, lambda: arguments["value"]


def _recognised_mask(block_mask: "BlockMask", query: Tensor, key: Tensor) -> Mask | None:
    """Return a BlockMask as a regard mask, of a named kind if it is small enough to check."""
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    mask = as_mask(block_mask).bind(shape, query.device)
    if shape[0] * shape[-2] * shape[-1] > _LARGEST:
        return mask
    return recognised(allowed_rows(mask, slice(0, shape[-2]), shape, query.device), shape)


def _block_mask(parts: tuple[Any, ...], buffers: tuple[Any, ...]) -> "BlockMask | None":
    """Rebuild the BlockMask from the operation's arguments; None for no mask."""
    from torch.nn.attention.flex_attention import (  # slow to import, and rarely needed
        _LARGE_SPARSE_BLOCK_SIZE,  # pyright: ignore[reportPrivateUsage]
        BlockMask,
    )

    q_len, kv_len, *blocks, block_height, block_width, mask_mod = parts
    if block_height == block_width == _LARGE_SPARSE_BLOCK_SIZE:
        return None
    return BlockMask.from_kv_blocks(
        *blocks[:4],
        BLOCK_SIZE=(block_height, block_width),
        mask_mod=_with_buffers(mask_mod, buffers),
        seq_lengths=(q_len, kv_len),
    )


def _with_buffers(function: Any, buffers: tuple[Any, ...]) -> Callable[..., Tensor]:
    """Bind the captured tensors of a traced callable, which takes them as extra arguments."""
    kept = [each.clone() if isinstance(each, Tensor) else each for each in buffers]
    return lambda *arguments: function(*arguments, *kept)


def _is_identity(function: Any) -> bool:
    """Return True if a traced score_mod returns its score unchanged."""
    if not isinstance(function, torch.fx.GraphModule):
        return False
    nodes = list(function.graph.nodes)
    return nodes[-1].args[0] is nodes[0]
