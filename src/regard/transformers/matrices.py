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
from regard.matrix.changes import Changes
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.transformers.growing_keys import GrowingKeys

_Parts = tuple[Mask | None, Tensor | None]
"""A mask and a bias, each None without one."""

Weights = AttentionMatrix | Tensor
"""The weights of an attention: lazy, or dense where no query and key give them."""

_ROWS = 8
"""The number of rows that are compared with a model's own weights."""

_NOTHING = -1e4
"""A score whose weight is 0."""


class Call(NamedTuple):
    """A call of a kernel of transformers, and what it gets."""

    kernel: Callable[..., Any]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> tuple[Any, ...]:
        """Run the kernel, and return its output and its weights."""
        return self.kernel(self.module, *self.args, **self.kwargs)

    def query_key_mask(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the arguments, some of which have names."""
        names = ("query", "key", "value", "attention_mask")
        arguments = dict(zip(names, self.args, strict=False)) | self.kwargs
        return arguments["query"], arguments["key"], arguments.get("attention_mask")

    def refusal(self, what: str) -> RegardError:
        """Return the error for a kernel whose matrix is not known."""
        return RegardError(f"{type(self.module).__name__} {what}.\n    {_REMEDY}")


_REMEDY = "End regard.transformers.lazy, and watch the model with regard.observe(model)."


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
    """The calls of scaled_dot_product_attention inside the block, and changes after them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Fused] = []
        self.changes = Changes()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            fused = _Fused(*args, **kwargs or {})
            self.calls.append(fused)
            tensors = (
                each for each in (fused.query, fused.key, fused.attn_mask) if each is not None
            )
            self.changes.watch(*tensors)
        return func(*args, **kwargs or {})


class Masks:
    """The masks and biases of one forward, which its layers share."""

    def __init__(self) -> None:
        self._earlier: list[tuple[Tensor, int, torch.Size, _Parts]] = []

    def of(self, numbers: Tensor | None, shape: torch.Size) -> _Parts:
        """Return the mask and the bias of an ``attn_mask``, for a matrix of a shape."""
        if numbers is None:
            return None, None
        version = 0 if numbers.is_inference() else numbers._version
        for earlier, its_version, its_shape, parts in self._earlier:
            is_same = its_version == version and _is_view(earlier, numbers)
            if its_shape == shape and (is_same or _are_equal(earlier, numbers)):
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
        self._earlier.append((numbers, version, shape, parts))
        return parts


def _is_view(earlier: Tensor, numbers: Tensor) -> bool:
    """Return True if two tensors have the same elements in memory."""
    facts = ((each.data_ptr(), each.dtype, each.stride()) for each in (earlier, numbers))
    return earlier.shape == numbers.shape and len(set(facts)) == 1


def _are_equal(earlier: Tensor, numbers: Tensor) -> bool:
    """Return True if two masks are equal whose identity tells nothing.

    T5's layers make equal biases of one table, and PyTorch counts no changes in inference mode.
    """
    if earlier.dtype != numbers.dtype or earlier.shape != numbers.shape or numbers.requires_grad:
        return False
    is_bias = numbers.is_floating_point() and numbers.ndim > 3 and numbers.shape[1] > 1
    return (is_bias or numbers.is_inference()) and torch.equal(earlier, numbers)


def fused_matrix(call: Call, masks: Masks, keys: GrowingKeys) -> tuple[Tensor, AttentionMatrix]:
    """Run a kernel that calls scaled_dot_product_attention once, and return its matrix as well.

    The matrix is made of what scaled_dot_product_attention got.

    Raises:
        RegardError: the kernel made no such call, or several, or one of another query; it changed
            its arguments; or it is no kernel of transformers, and its output is not the matrix's.
    """
    query, key, _ = call.query_key_mask()
    call.kwargs.pop("output_attentions", None)  # the kernel would warn that it has none
    with _FusedCalls() as inside:
        output = call.run()[0]
    if len(inside.calls) != 1:
        raise call.refusal(
            f"called scaled_dot_product_attention {len(inside.calls)} times in one attention; its "
            "matrix is that of one call"
        )
    if inside.changes:
        raise call.refusal(
            "changed a query, a key or a mask in place in its kernel; the matrix would be another "
            "one"
        )
    fused = _unpacked(inside.calls[0], query)
    if fused.query.shape != query.shape:
        raise call.refusal(
            f"changed its query in the kernel, from {tuple(query.shape)} to "
            f"{tuple(fused.query.shape)}"
        )
    is_step = _is_step(fused, key)
    grown = keys.continued(call.module, key) if is_step else None
    is_small = query[..., 0].numel() * key.shape[-2] < key.numel() and not key.requires_grad
    if is_step and is_small and grown is None:
        matrix = AttentionMatrix(GivenScores(_weights_of(fused), are_weights=True))
    else:
        matrix = _matrix(fused, key, masks, grown)
        _keep(keys, call.module, matrix, continues=grown is not None)
    is_theirs = call.kernel.__module__.startswith("transformers.")
    if not is_theirs and not _gives(matrix, fused, output):
        raise call.refusal(
            f"runs a kernel of {call.kernel.__module__}, whose output is not that of its matrix"
        )
    return output, matrix


def _keep(
    keys: GrowingKeys, module: nn.Module, matrix: AttentionMatrix, *, continues: bool
) -> None:
    """Let later steps continue the key of a matrix, which sees changes of the model's tensors."""
    source = cast(QueryKeyScores, matrix.source)
    matrix.changes.watch(source.query)
    if not continues:
        matrix.changes.watch(source.key)
    keys.add(module, matrix, continues=continues)


def _gives(matrix: AttentionMatrix, fused: _Fused, output: Tensor) -> bool:
    """Return True if some rows of a matrix times the value are a kernel's output."""
    sizes = matrix.shape[0], matrix.shape[2]
    if fused.dropout_p or output.ndim != 4 or output.shape[:2] != sizes:
        return False
    with torch.no_grad():
        group = matrix.shape[1] // fused.value.shape[1]
        value = fused.value.repeat_interleave(group, 1).float()
        tolerance = (1e-4 if _is_precise(output.dtype) else 0.03) * (1 + value.abs().max())
        for rows in _some_rows(matrix.shape[-2]):
            product = matrix[..., rows, :].float() @ value
            if not bool(((product - output[:, rows].transpose(1, 2)).abs() <= tolerance).all()):
                return False
    return True


def _some_rows(q_len: int) -> tuple[slice, slice]:
    """Return the first row, and some others of which the last row is one."""
    step = max(1, q_len // _ROWS)
    return slice(0, 1), slice((q_len - 1) % step, None, step)


def _is_step(fused: _Fused, key: Tensor) -> bool:
    """Return True for new queries of a generation, after others."""
    kv_len = fused.key.shape[-2]
    is_whole = kv_len == key.shape[-2]
    return is_whole and fused.query.shape[-2] < kv_len and not fused.is_causal


def _weights_of(fused: _Fused) -> Tensor:
    """Return the weights of a call, (batch, num_heads, q_len, kv_len), as eager computes them.

    For a single query this takes a third of the time of ``to_dense``.
    """
    query, key, mask = fused.query, fused.key, fused.attn_mask
    scale = query.shape[-1] ** -0.5 if fused.scale is None else fused.scale
    grouped = cast(Tensor, query.unflatten(1, (key.shape[1], -1)))
    scores = (grouped @ key[:, :, None].mT).flatten(1, 2) * scale
    is_bool = mask is not None and mask.dtype == torch.bool
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(query.dtype)
    if mask is not None and is_bool:
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0)
    return weights


def _unpacked(fused: _Fused, query: Tensor) -> _Fused:
    """Return a call whose query has the heads of a group in place of tokens as it was before.

    transformers packs the query of a single token so, (batch, num_kv_heads, group, head_dim).
    """
    packed = fused.query.shape[1:3]
    is_packed = query.shape[2] == 1 and packed.numel() == query.shape[1]
    if fused.query.shape == query.shape or not is_packed:
        return fused
    mask = fused.attn_mask
    if mask is not None and mask.shape[1:3] == packed:
        mask = mask.flatten(1, 2)[:, :, None]
    return fused._replace(query=fused.query.flatten(1, 2)[:, :, None], attn_mask=mask)


def _matrix(fused: _Fused, key: Tensor, masks: Masks, grown: Tensor | None) -> AttentionMatrix:
    """Return the matrix of a call of the kernel that got a key, or of the key that has grown."""
    used, causal = fused.key, None
    if fused.is_causal:
        is_square = fused.query.shape[-2] == used.shape[-2]
        causal = Causal() if is_square else Causal(align="top-left")
    if grown is not None:
        used = grown
    elif _is_repeated(used, key, may_be_cut=fused.is_causal):
        if used.shape[-2] < key.shape[-2]:  # an empty static cache, of which the rest is left out
            causal = Causal(align="top-left")
        used = _unshared(key)
    else:
        used = _unshared(used)
    shape = torch.Size((*fused.query.shape[:-1], used.shape[-2]))
    mask, bias = masks.of(fused.attn_mask, shape)
    if causal is not None:
        mask = causal if mask is None else causal & mask
    return attend(_counted(fused.query), used, mask=mask, scale=fused.scale, bias=bias)


def _counted(query: Tensor) -> Tensor:
    """Return a query whose changes are seen: PyTorch counts none of a tensor of inference mode."""
    return query.clone() if query.is_inference() else query


def _unshared(key: Tensor) -> Tensor:
    """Return a key that no later step overwrites, as those of a static cache do."""
    return key.clone() if key.is_inference() or key._version > 0 else key


def _is_repeated(used: Tensor, key: Tensor, *, may_be_cut: bool) -> bool:
    """Return True if a kernel used a key with each head repeated, or its first tokens."""
    if used is key:
        return True
    kv_len = used.shape[-2]
    fits = kv_len == key.shape[-2] or (may_be_cut and kv_len < key.shape[-2])
    if used.ndim != key.ndim or not fits or used.shape[1] % key.shape[1]:
        return False
    groups = cast(Tensor, used.unflatten(1, (key.shape[1], -1)))
    return torch.equal(groups, key[:, :, None, :kv_len].expand_as(groups))


def eager_matrix(call: Call, masks: Masks, keys: GrowingKeys) -> tuple[Tensor, Weights]:
    """Run a model's own eager function, and return its lazy matrix in place of its dense weights.

    The weights stay dense if some of their rows are not those of the matrix.
    """
    output, weights, *_ = call.run()
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        return output, weights
    _, key, _ = call.query_key_mask()
    is_step = weights.shape[-2] < weights.shape[-1]
    grown = keys.continued(call.module, key) if is_step else None
    if grown is None and is_step and weights.numel() < key.numel():
        has_sink = call.kwargs.get("s_aux") is not None
        rows = _beside_sink(weights) if has_sink else _of_rows(weights)
        if rows is not None:
            return output, rows
    matrix = _agreeing(call, _unshared(key) if grown is None else grown, masks, weights)
    if matrix is None:
        return output, weights
    _keep(keys, call.module, matrix, continues=grown is not None)
    return output, matrix


def _agreeing(call: Call, key: Tensor, masks: Masks, weights: Tensor) -> AttentionMatrix | None:
    """Return the matrix of a call and a key if it has a model's own weights; None otherwise."""
    try:
        matrix = _of_arguments(call, key, masks)
    except (TypeError, ValueError):  # the function reads its arguments in its own way
        return None
    if _agree(matrix, weights):
        return matrix
    if call.kwargs.get("s_aux") is None:
        return None
    # Some functions return weights as they were before sinks.
    source = cast(QueryKeyScores, matrix.source)
    matrix = AttentionMatrix(replace(source, sink_bias=None), matrix.mask)
    return matrix if _agree(matrix, weights) else None


def _of_arguments(call: Call, key: Tensor, masks: Masks) -> AttentionMatrix:
    query, _, mask = call.query_key_mask()
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    allowed, bias = masks.of(None if mask is None else mask[..., : shape[-1]], shape)
    position_bias = call.kwargs.get("position_bias")
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    return attend(
        _counted(query),
        key,
        mask=allowed,
        scale=call.kwargs.get("scaling"),
        bias=bias,
        softcap=call.kwargs.get("softcap"),
        sink_bias=call.kwargs.get("s_aux"),
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
    lazy, dense = matrix[..., rows, :].float(), weights[..., rows, :].float()
    scores = matrix.scores[..., rows, :].float().nan_to_num(0, 0, 0)
    has_keys = lazy.sum(-1, keepdim=True) > 0
    is_fast = torch.is_autocast_enabled(weights.device.type)  # it computes scores in 16 bits
    rounding = torch.finfo(matrix.dtype).eps
    least, most = (1e-9, 1e-5) if _is_precise(matrix.dtype) and not is_fast else (1e-6, 1.0)
    relative = 1e-3 if most < 1 else 0.02 + 4 * rounding * scores.abs().amax(-1, keepdim=True)
    bound = (relative * torch.maximum(lazy, dense) + least).clamp(max=most)
    return bool((((lazy - dense).abs() <= bound) | ~has_keys).all())


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
