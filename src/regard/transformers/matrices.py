"""Lazy matrices of what an attention kernel of transformers got."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.errors import RegardError
from regard.masks import Causal, Mask
from regard.masks.recognise import FAR, recognised, split
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.scores.given_scores import GivenScores
from regard.transformers.growing_keys import GrowingKeys

__all__ = ["Masks", "Weights", "eager_matrix", "fused_matrix"]

Weights = AttentionMatrix | Tensor
"""The weights of an attention: lazy, or dense where no query and key give them."""

_ROWS = 8
"""The number of rows that are compared with a model's own weights."""

_NOTHING = -1e4
"""A score whose weight is 0."""


class _Fused(NamedTuple):
    """The arguments of a call of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class _FusedCalls(TorchFunctionMode):
    """The calls of scaled_dot_product_attention inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Fused] = []
        self._versions: list[tuple[Tensor, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            call = _Fused(*args, **kwargs or {})
            self.calls.append(call)
            self._versions = [(each, each._version) for each in _counted(call)]
        return func(*args, **kwargs or {})

    def check_unchanged(self, module: nn.Module) -> None:
        """Raise an error if a kernel has changed its arguments since the call."""
        if any(each._version > version for each, version in self._versions):
            raise RegardError(
                f"{type(module).__name__} changed a query, a key or a mask in place in its kernel; "
                "the matrix would be another one.\n"
                "    End regard.transformers.lazy, and watch the model with regard.observe(model)."
            )


def _counted(call: _Fused) -> list[Tensor]:
    """Return the tensors of a call whose changes PyTorch counts; not those of inference mode."""
    tensors = (each for each in (call.query, call.key, call.attn_mask) if each is not None)
    return [each for each in tensors if not each.is_inference()]


def _query_key_mask(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return query, key and mask of a kernel's arguments, some of which have names."""
    given = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False)) | kwargs
    return given["query"], given["key"], given.get("attention_mask")


class Masks:
    """The masks and biases of one forward, which its layers share."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, int, torch.Size, tuple[Mask | None, Tensor | None]]] = []

    def of(self, numbers: Tensor | None, shape: torch.Size) -> tuple[Mask | None, Tensor | None]:
        """Return the mask and the bias of an ``attn_mask``, for a matrix of a shape."""
        if numbers is None:
            return None, None
        version = 0 if numbers.is_inference() else numbers._version
        for known, its_version, its_shape, parts in self._known:
            is_same = its_version == version and _is_view(known, numbers)
            if its_shape == shape and (is_same or _are_equal(known, numbers)):
                return parts
        if numbers.is_inference():
            numbers = numbers.clone()  # PyTorch counts no changes of it
        low = None if numbers.dtype == torch.bool else numbers <= FAR
        if low is None:
            parts = recognised(numbers, shape), None
        elif bool((low | (numbers == 0)).all()):  # a mask; a row that is all low has no keys
            parts = recognised(~low, shape), None
        else:
            parts = split(numbers, shape)
        self._known.append((numbers, version, shape, parts))
        return parts


def _is_view(known: Tensor, numbers: Tensor) -> bool:
    """Return True if two tensors have the same elements in memory."""
    return (known.data_ptr(), known.dtype, known.shape, known.stride()) == (
        numbers.data_ptr(),
        numbers.dtype,
        numbers.shape,
        numbers.stride(),
    )


def _are_equal(known: Tensor, numbers: Tensor) -> bool:
    """Return True if two masks are equal whose identity tells nothing.

    T5's layers make equal biases of one table, and PyTorch counts no changes in inference mode.
    """
    if known.dtype != numbers.dtype or known.shape != numbers.shape or numbers.requires_grad:
        return False
    is_bias = numbers.is_floating_point() and numbers.ndim > 3 and numbers.shape[1] > 1
    return (is_bias or numbers.is_inference()) and torch.equal(known, numbers)


def fused_matrix(
    kernel: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    masks: Masks,
    keys: GrowingKeys,
) -> tuple[Tensor, Weights]:
    """Run a kernel that calls scaled_dot_product_attention once, and return its matrix as well.

    The matrix is made of what scaled_dot_product_attention got.

    Raises:
        RegardError: the kernel made no such call, or several, or one of another query.
    """
    query, key, _ = _query_key_mask(args, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "output_attentions"}
    with _FusedCalls() as fused:
        output = kernel(module, *args, **kwargs)[0]
    fused.check_unchanged(module)
    if len(fused.calls) != 1:
        raise RegardError(
            f"{type(module).__name__} called scaled_dot_product_attention {len(fused.calls)} times "
            "in one attention; its matrix is that of one call.\n"
            "    End regard.transformers.lazy, and watch the model with regard.observe(model)."
        )
    call = fused.calls[0]
    grown = keys.continued(module, key) if _is_step(call, query, key) else None
    if grown is None and _is_small_step(call, query, key):
        return output, AttentionMatrix(GivenScores(_weights_of(call, query), are_weights=True))
    call = _unpacked(call, query)
    if call.query.shape != query.shape:
        raise RegardError(
            f"{type(module).__name__} changed its query in the kernel, from "
            f"{tuple(query.shape)} to {tuple(call.query.shape)}.\n"
            "    End regard.transformers.lazy, and watch the model with regard.observe(model)."
        )
    matrix = _matrix(call, key, masks, grown)
    is_known = kernel.__module__.startswith("transformers.")
    if not is_known and not _gives(matrix, call, output):
        raise RegardError(
            f"{type(module).__name__} runs a kernel of {kernel.__module__}, whose output is not "
            "that of its matrix.\n"
            "    End regard.transformers.lazy, and watch the model with regard.observe(model)."
        )
    if grown is None:
        keys.begin(module, matrix)
    else:
        keys.add(module, matrix)
    return output, matrix


def _gives(matrix: AttentionMatrix, call: _Fused, output: Tensor) -> bool:
    """Return True if some rows of a matrix times the value are a kernel's output."""
    if call.dropout_p or output.ndim != 4 or output.shape[:2] != (matrix.shape[0], matrix.shape[2]):
        return False
    with torch.no_grad():
        value = call.value
        value = value.repeat_interleave(matrix.shape[1] // value.shape[1], 1).float()
        for rows in _some_rows(matrix.shape[-2]):
            ours, own = matrix[..., rows, :].float() @ value, output[:, rows].transpose(1, 2)
            near = 1e-4 if _is_precise(output.dtype) else 0.03
            if not bool(((ours - own).abs() <= near * (1 + value.abs().max())).all()):
                return False
    return True


def _some_rows(q_len: int) -> tuple[slice, slice]:
    """Return the first row, and some others of which the last row is one."""
    step = max(1, q_len // _ROWS)
    return slice(0, 1), slice((q_len - 1) % step, None, step)


def _is_step(call: _Fused, query: Tensor, key: Tensor) -> bool:
    """Return True for new queries of a generation, after others."""
    q_len, kv_len = query.shape[-2], call.key.shape[-2]
    return q_len < kv_len and not call.is_causal and kv_len == key.shape[-2]


def _is_small_step(call: _Fused, query: Tensor, key: Tensor) -> bool:
    """Return True for a step whose weights are smaller than its key.

    A generation would otherwise keep one copy of the key for each token.
    """
    size = query[..., 0].numel() * key.shape[-2]
    return _is_step(call, query, key) and size < key.numel() and not key.requires_grad


def _weights_of(call: _Fused, query: Tensor) -> Tensor:
    """Return the weights of a call, (batch, num_heads, q_len, kv_len), as eager computes them."""
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    used, key = call.query, call.key
    if used.shape[1] != key.shape[1]:
        grouped = cast(Tensor, used.unflatten(1, (key.shape[1], -1)))
        scores = (grouped @ key[:, :, None].mT).flatten(1, 2)
    else:
        scores = used @ key.mT
    scores = scores * scale
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(query.dtype)
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0)
    return weights.reshape(*query.shape[:-1], key.shape[-2])


def _unpacked(call: _Fused, query: Tensor) -> _Fused:
    """Return a call whose query has the heads of a group in place of tokens as it was before.

    transformers packs the query of a single token so, (batch, num_kv_heads, group, head_dim).
    """
    packed = call.query.shape[1:3]
    if call.query.shape == query.shape or query.shape[2] != 1 or packed.numel() != query.shape[1]:
        return call
    mask = call.attn_mask
    if mask is not None and mask.shape[1:3] == packed:
        mask = mask.flatten(1, 2)[:, :, None]
    return call._replace(query=call.query.flatten(1, 2)[:, :, None], attn_mask=mask)


def _matrix(call: _Fused, key: Tensor, masks: Masks, grown: Tensor | None) -> AttentionMatrix:
    kv_len, causal = call.key.shape[-2], None
    if call.is_causal:
        causal = Causal() if call.query.shape[-2] == kv_len else Causal(align="top-left")
    own = call.key
    if (call.is_causal or kv_len == key.shape[-2]) and _is_prefix_of_repeated(own, key):
        own = key
        if kv_len < key.shape[-2]:  # an empty static cache, of which the rest is left out
            causal = Causal(align="top-left")
    own = _unshared_key(own) if grown is None else grown
    shape = torch.Size((*call.query.shape[:-1], own.shape[-2]))
    mask, bias = masks.of(call.attn_mask, shape)
    if causal is not None:
        mask = causal if mask is None else causal & mask
    query = _counted_query(call.query)
    matrix = attend(query, own, mask=mask, scale=call.scale, bias=bias)
    _watch(matrix, query, grown)
    return matrix


def _counted_query(query: Tensor) -> Tensor:
    """Return a query whose changes are seen: PyTorch counts none of a tensor of inference mode."""
    return query.clone() if query.is_inference() else query


def _unshared_key(key: Tensor) -> Tensor:
    """Return a key that no later step overwrites, as those of a static cache do."""
    return key.clone() if key.is_inference() or key._version > 0 else key


def _watch(matrix: AttentionMatrix, query: Tensor, grown: Tensor | None) -> None:
    """Let a matrix raise an error if a model changes its own tensors later."""
    matrix.watch(query)
    if grown is None:
        matrix.watch(cast(Any, matrix.source).key)


def _is_prefix_of_repeated(used: Tensor, key: Tensor) -> bool:
    """Return True if a kernel used the first tokens of a key, with each head repeated."""
    if used is key:
        return True
    if used.ndim != key.ndim or used.shape[-2] > key.shape[-2] or used.shape[1] % key.shape[1]:
        return False
    groups = cast(Tensor, used.unflatten(1, (key.shape[1], -1)))
    return torch.equal(groups, key[:, :, None, : used.shape[-2]].expand_as(groups))


def eager_matrix(
    kernel: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    masks: Masks,
    keys: GrowingKeys,
) -> tuple[Tensor, Weights]:
    """Run a model's own eager function, and return its lazy matrix in place of its dense weights.

    The weights stay dense if some of their rows are not those of the matrix.
    """
    output, weights, *_ = kernel(module, *args, **kwargs)
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        return output, weights
    query, key, mask = _query_key_mask(args, kwargs)
    is_step = weights.shape[-2] < weights.shape[-1]
    grown = keys.continued(module, key) if is_step else None
    if grown is None and is_step and weights.numel() < key.numel():
        rows = _of_rows(weights) if kwargs.get("s_aux") is None else _beside_sink(weights)
        if rows is not None:
            return output, rows
    own, query = _unshared_key(key) if grown is None else grown, _counted_query(query)
    matrix = _agreeing(query, own, mask, kwargs, masks, weights)
    if matrix is None:
        return output, weights
    _watch(matrix, query, grown)
    if grown is None:
        keys.begin(module, matrix)
    else:
        keys.add(module, matrix)
    return output, matrix


def _agreeing(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    masks: Masks,
    weights: Tensor,
) -> AttentionMatrix | None:
    """Return the matrix of some arguments if it has a model's own weights; None otherwise."""
    try:
        matrix = _of_arguments(query, key, mask, kwargs, masks)
    except (TypeError, ValueError):  # the function reads its arguments in its own way
        return None
    if _agree(matrix, weights):
        return matrix
    if kwargs.get("s_aux") is None:
        return None
    # Some functions return weights as they were before sinks.
    matrix = AttentionMatrix(replace(cast(Any, matrix.source), sink_bias=None), matrix.mask)
    return matrix if _agree(matrix, weights) else None


def _of_arguments(
    query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any], masks: Masks
) -> AttentionMatrix:
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    if mask is not None:
        mask = mask[..., : shape[-1]]
    allowed, bias = masks.of(mask, shape)
    added = kwargs.get("position_bias")
    if added is not None:
        bias = added if bias is None else bias + added
    return attend(
        query,
        key,
        mask=allowed,
        scale=kwargs.get("scaling"),
        bias=bias,
        softcap=kwargs.get("softcap"),
        sink_bias=kwargs.get("s_aux"),
    )


def _agree(matrix: AttentionMatrix, weights: Tensor) -> bool:
    """Return True if some rows of a matrix are a model's own weights, within their rounding.

    A weight whose score has the error e is off by the factor exp(e). Rows without keys are 0 in
    the matrix; a model may have any numbers there.
    """
    if matrix.shape != weights.shape:
        return False
    with torch.no_grad():
        return all(_rows_agree(matrix, weights, rows) for rows in _some_rows(weights.shape[-2]))


def _rows_agree(matrix: AttentionMatrix, weights: Tensor, rows: slice) -> bool:
    ours, own = matrix[..., rows, :].float(), weights[..., rows, :].float()
    scores = matrix.scores[..., rows, :].float().nan_to_num(0, 0, 0)
    has_keys = ours.sum(-1, keepdim=True) > 0
    is_fast = torch.is_autocast_enabled(weights.device.type)  # it computes scores in 16 bits
    rounding = torch.finfo(matrix.dtype).eps
    least, most = (1e-9, 1e-5) if _is_precise(matrix.dtype) and not is_fast else (1e-6, 1.0)
    relative = 1e-3 if most < 1 else 0.02 + 4 * rounding * scores.abs().amax(-1, keepdim=True)
    bound = (relative * torch.maximum(ours, own) + least).clamp(max=most)
    return bool((((ours - own).abs() <= bound) | ~has_keys).all())


def _is_precise(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).eps < 1e-4


def _of_rows(weights: Tensor) -> AttentionMatrix | None:
    """Return the matrix of given weights; None if rows sum to neither 1 nor 0."""
    sums = weights.float().sum(-1)
    near = (sums - 1).abs() < (1e-4 if _is_precise(weights.dtype) else 0.02)
    if not bool((near | (sums == 0)).all()):
        return None
    return AttentionMatrix(GivenScores(weights, are_weights=True))


def _beside_sink(weights: Tensor) -> AttentionMatrix | None:
    """Return the matrix of one row of given weights beside a sink, in float32; None for more rows.

    The row is that of a query of one number, and of keys of one number each: the score of key j is
    log(w_j / (1 - the sum of w)), and that of the sink is 0.
    """
    if weights.shape[-2] != 1:
        return None
    wide = weights.float()
    rest = (1 - wide.sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
    scores = (wide / rest).log().clamp(min=_NOTHING)
    one, sink = scores.new_ones(*scores.shape[:-1], 1), scores.new_zeros(scores.shape[1])
    return attend(one, scores.mT, scale=1.0, sink_bias=sink)
