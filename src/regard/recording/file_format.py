"""Conversion of layers to plain data, JSON with named tensors, and back, without pickle or code.

Plain data from a file pass the same checks as arguments of the public functions. Damaged data
therefore raise the errors of wrong arguments, which the reader converts to one error of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import (
    RegardError,
    bytes_text,
    check_index_bounds,
    check_query_key,
    check_scale,
    check_scores,
    check_softcap,
    check_whole,
    dtype_text,
    kind_text,
    shape_text,
)
from regard.images.patch_grid import Grid
from regard.images.picture import Picture
from regard.masks import (
    And,
    Causal,
    Documents,
    Keep,
    Mask,
    Not,
    Or,
    Padding,
    PrefixLM,
    RowSlice,
    SlidingWindow,
)
from regard.masks.mask import fits
from regard.masks.recognise import allowed_rows, recognised_rows
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import Entropy, LogSumExp, MaxScore, NormalizedEntropy
from regard.reductions.sums import Diagonal, Pool, Segments, Sum
from regard.reductions.top_k import Top, TopK, fitting, padded
from regard.scores.autocast import without_autocast
from regard.scores.given_scores import GivenScores
from regard.scores.position_bias import ALiBi, Bias, T5Bias
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

__all__ = [
    "Plain",
    "Put",
    "Take",
    "answer_of",
    "grids_of",
    "matrix_of",
    "pictures_of",
    "plain_answers",
    "plain_matrix",
    "plain_pictures",
    "plain_reduction",
    "reduction_of",
    "wrong_numbers",
]

Plain = dict[str, Any]
"""Values that JSON can represent."""

Take = Callable[[Any], Tensor]
"""A function that returns the tensor with a name or a number."""

Put = Callable[[str, Tensor], str | int]
"""A function that stores a tensor by its role in a layer, and returns its name or number."""

_LARGEST_CALLABLE = 2**26
_MOST_TOKENS = 2**24  # of one grid
_FAR = 2**48  # larger whole numbers are damage; up to here positions are exact
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_REDUCTIONS: dict[str, tuple[type[Reduction], tuple[str, ...]]] = {
    "Diagonal": (Diagonal, ("offset",)),
    "Entropy": (Entropy, ()),
    "LogSumExp": (LogSumExp, ()),
    "MaxScore": (MaxScore, ()),
    "NormalizedEntropy": (NormalizedEntropy, ()),
    "Pool": (Pool, ("rows_wanted", "columns_wanted")),
    "Sum": (Sum, ("dim",)),
    "TopK": (TopK, ("k",)),
}


# To plain data


def wrong_numbers(role: str, tensor: Tensor) -> str | None:
    """Return "NaN" or "an infinity" if a recording may not contain the tensor; None if it may.

    Only a query and a key must be finite.
    """
    if not (tensor.is_floating_point() and tensor.numel()):
        return None
    most = tensor.detach().amax()
    if bool(most.isnan()):
        return "NaN"
    infinite = role in ("query", "key") and bool(most.isinf() | tensor.detach().amin().isinf())
    return "an infinity" if infinite else None


def plain_matrix(matrix: AttentionMatrix, put: Put) -> Plain:
    """Convert a matrix to plain data.

    Raises:
        RegardError: the matrix has code: a score_mod, a mask_mod whose mask is too large to store,
            or a user's own Bias or Scores.
    """
    mask = matrix.mask
    if mask is not None:
        mask = mask.bind(matrix.shape, matrix.device)
    return {
        "scores": _plain_scores(matrix.source, put),
        "mask": None if mask is None else _plain_mask(mask, matrix.shape, matrix.device, put),
    }


def _plain_scores(source: Scores, put: Put) -> Plain:
    if isinstance(source, GivenScores):
        return {
            "kind": "Given",
            "values": put("values", source.values),
            "are_weights": source.are_weights,
        }
    if not isinstance(source, QueryKeyScores):
        raise _code(f"scores of the kind {type(source).__name__}")
    if source.score_mod is not None:
        raise _code(f"the score_mod {source.score_mod!r}")
    plain: Plain = {
        "kind": "QueryKey",
        "query": put("query", source.query),
        "key": put("key", source.key),
        "scale": source.scale,
        "softcap": source.softcap,
    }
    for role in ("bias", "sink_bias"):
        tensor = cast("Tensor | None", getattr(source, role))
        plain[role] = None if tensor is None else put(role, tensor)
    plain["position_bias"] = _plain_bias(source.position_bias, put)
    return plain


def _plain_bias(bias: Bias | None, put: Put) -> Plain | None:
    match bias:
        case None:
            return None
        case ALiBi():
            return {"kind": "ALiBi", "slopes": put("slopes", bias.slopes)}
        case T5Bias():
            return {
                "kind": "T5Bias",
                "table": put("table", bias.table),
                "bidirectional": bias.bidirectional,
                "max_distance": bias.max_distance,
            }
        case _:
            raise _code(f"the bias {bias!r}")


def _plain_mask(
    mask: Mask, shape: torch.Size, device: torch.device, put: Put, role: str = "mask"
) -> Plain:
    kind = {"kind": type(mask).__name__}

    def inside(mask: Mask, name: str, shape: torch.Size = shape) -> Plain:
        return _plain_mask(mask, shape, device, put, f"{role}.{name}")

    match mask:
        case Causal():
            return {**kind, "align": mask.align}
        case SlidingWindow():
            return {**kind, "left": mask.left, "right": mask.right}
        case Padding():
            return {**kind, "lengths": put(f"{role}.lengths", mask.lengths)}
        case Documents():
            return {**kind, "ids": put(f"{role}.ids", mask.ids)}
        case Keep():
            return {**kind, "mask": put(role, mask.mask)}
        case Not():
            return {**kind, "mask": inside(mask.mask, "not")}
        case And() | Or():
            first, second = inside(mask.first, "first"), inside(mask.second, "second")
            return {**kind, "first": first, "second": second}
        case RowSlice():
            whole = torch.Size((*shape[:-2], mask.q_len, shape[-1]))
            places = {"start": mask.start, "q_len": mask.q_len}
            return {**kind, **places, "mask": inside(mask.mask, "whole", whole)}
        case _:
            return _plain_mask(_written_out(mask, shape, device), shape, device, put, role)


def _written_out(mask: Mask, shape: torch.Size, device: torch.device) -> Mask:
    """Evaluate a mask that is code, and return a mask of a named kind or a bool tensor."""

    def allowed(rows: slice) -> Tensor:
        return allowed_rows(mask, rows, shape, device)

    size = torch.Size((*allowed(slice(0, 1)).shape[:-2], *shape[-2:]))
    if size.numel() > _LARGEST_CALLABLE:
        limit = bytes_text(_LARGEST_CALLABLE)
        raise _code(
            f"the mask {mask.text}; written out it is {bytes_text(size.numel())}, more than {limit}"
        )
    known = recognised_rows(allowed, size, shape)
    if known is None:
        return Keep(torch.ones((1,) * len(shape), dtype=torch.bool, device=device))
    return known


def plain_answers(answers: Iterable[tuple[Reduction, Any]], put: Put) -> list[Plain]:
    """Convert pairs of a reduction and its answer, or None, to plain data.

    Raises:
        RegardError: a reduction is not one of regard's, or a name of its spans is not a string.
    """
    return [
        {
            "reduction": plain_reduction(reduction),
            "answer": None if answer is None else _plain_answer(f"answers.{index}", answer, put),
        }
        for index, (reduction, answer) in enumerate(answers)
    ]


def plain_reduction(reduction: Reduction) -> Plain:
    """Convert a reduction to plain data.

    Raises:
        RegardError: the reduction is not one of regard's, or a name of its spans is not a string.
    """
    if isinstance(reduction, Segments):
        keys = reduction.key_spans
        spans = (_plain_spans(reduction.query_spans), None if keys is None else _plain_spans(keys))
        return {"kind": "Segments", "query_spans": spans[0], "key_spans": spans[1]}
    kind = type(reduction).__name__
    known, fields = _REDUCTIONS.get(kind, (None, ()))
    if type(reduction) is not known:
        raise _code(f"the answer to {reduction!r}")
    return {"kind": kind, **{field: getattr(reduction, field) for field in fields}}


def _plain_spans(spans: "Mapping[str, tuple[int, int]] | Sequence[tuple[int, int]]") -> Plain:
    if isinstance(spans, Mapping):
        for name in cast("Mapping[object, Any]", spans):
            if not isinstance(name, str):
                raise RegardError(
                    f"it has the span name {name!r}, {kind_text(name)}; in a file names are "
                    "strings.\n    Observe again with strings for the names of the spans."
                )
        return {"named": {name: [int(at) for at in span] for name, span in spans.items()}}
    pairs = [[int(at) for at in span] for span in spans]
    return {"tuple" if isinstance(spans, tuple) else "list": pairs}


def _plain_answer(role: str, answer: Any, put: Put) -> Plain:
    if isinstance(answer, Top):
        values, indices = put(f"{role}.values", answer.values), put(f"{role}.keys", answer.indices)
        return {"values": values, "indices": indices}
    return {"tensor": put(role, answer)}


def plain_pictures(
    pictures: Sequence[Picture], grids: Mapping[str, Sequence[Grid]], keep: Put
) -> Plain:
    """Convert pictures, and the grids of layers by name, to plain data; none without pictures."""
    if not pictures:
        return {}
    plain: list[Plain] = []
    for index, each in enumerate(pictures):
        data = each.data
        stored = None if data is None else torch.frombuffer(bytearray(data), dtype=torch.uint8)
        name = None if stored is None else keep(f"pictures/{index}", stored)
        plain.append({"name": each.name, "size": [each.width, each.height], "data": name})
    several = list(dict.fromkeys(tuple(some) for some in grids.values()))
    return {
        "pictures": plain,
        "grids": [[_plain_grid(grid) for grid in some] for some in several],
        "layer_grids": {name: several.index(tuple(some)) for name, some in grids.items()},
    }


def _plain_grid(grid: Grid) -> Plain:
    tokens = grid.tokens
    is_run = isinstance(tokens, range)
    return {
        "tokens": {"run": [tokens.start, tokens.stop]} if is_run else {"list": list(tokens)},
        "rows": grid.rows,
        "columns": grid.columns,
        "picture": grid.picture,
        "box": grid.box,
        "entry": grid.entry,
        "overlapping": grid.overlapping,
    }


def _code(what: str) -> RegardError:
    return RegardError(
        f"it has {what}; a recording in a file is numbers and runs no code.\n"
        "    Pass what it does as a bias or a mask of regard, or keep answers instead, "
        "observe(model, keep=[...])."
    )


# From plain data


def matrix_of(plain: Plain, take: Take) -> AttentionMatrix:
    """Convert plain data to a matrix, with the tensors of a file.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError, MemoryError: the plain data are invalid.
    """
    scores, mask = plain["scores"], plain["mask"]
    source = _scores_of(scores, take)
    known = None if mask is None else _mask_of(mask, take)
    bound = None if known is None else known.bind(source.shape, source.device)
    return AttentionMatrix(source, bound)


def _scores_of(plain: Plain, take: Take) -> Scores:
    if _kind(plain) == "Given":
        values = check_scores(take(plain["values"]))
        _check_dtype("values", values)
        return GivenScores(values, _flag(plain["are_weights"]))
    if plain["kind"] != "QueryKey":
        raise ValueError(f"scores of the kind {plain['kind']!r}")
    query, key = check_query_key(take(plain["query"]), take(plain["key"]))
    _check_dtype("query", query)
    bias, sink = plain["bias"], plain["sink_bias"]
    with without_autocast(query.device):
        source = attend(
            query,
            key,
            scale=check_scale(float(plain["scale"]), query.shape[-1]),
            bias=None if bias is None else take(bias),
            softcap=check_softcap(plain["softcap"]),
        ).source
    if sink is not None:
        sink = take(sink)
        if not sink.is_floating_point() or not fits(sink, (*source.shape[:-2], 1, 1)):
            raise ValueError(f"sink_bias of shape {shape_text(sink.shape)}")
    position = plain["position_bias"]
    return replace(
        cast(QueryKeyScores, source),
        sink_bias=sink,
        position_bias=None if position is None else _bias_of(position, source.shape, take),
    )


def _bias_of(plain: Plain, shape: torch.Size, take: Take) -> Bias:
    match _kind(plain):
        case "ALiBi":
            slopes = take(plain["slopes"])
            if not fits(slopes, (*shape[:-2], 1, 1)):
                raise ValueError(f"slopes of shape {shape_text(slopes.shape)}")
            return ALiBi(slopes)
        case "T5Bias":
            table = take(plain["table"])
            if not fits(table, (*shape[:-2], 1, table.shape[-1])):
                raise ValueError(f"a table of shape {shape_text(table.shape)}")
            bias = T5Bias(table, _flag(plain["bidirectional"]), _number(plain["max_distance"]))
            by_head = table.flatten(0, -2)  # the table is bound; binding again checks its buckets
            one_text = torch.Size((by_head.shape[0], 1, 1))
            T5Bias(by_head.mT, bias.bidirectional, bias.max_distance).bind(one_text, table.device)
            return bias
        case kind:
            raise ValueError(f"a bias of the kind {kind!r}")


def _mask_of(plain: Plain, take: Take) -> Mask:
    match _kind(plain):
        case "Causal":
            return Causal(plain["align"])
        case "SlidingWindow":
            return SlidingWindow(_number(plain["left"]), _number(plain["right"]))
        case "Padding":
            return Padding(take(plain["lengths"]))
        case "PrefixLM":
            return PrefixLM(take(plain["lengths"]))
        case "Documents":
            return Documents(take(plain["ids"]))
        case "Keep":
            return Keep(take(plain["mask"]))
        case "RowSlice":
            start, q_len = _number(plain["start"]), _number(plain["q_len"])
            return RowSlice(_mask_of(plain["mask"], take), start, q_len)
        case "Not":
            return Not(_mask_of(plain["mask"], take))
        case "And":
            return And(_mask_of(plain["first"], take), _mask_of(plain["second"], take))
        case "Or":
            return Or(_mask_of(plain["first"], take), _mask_of(plain["second"], take))
        case kind:
            raise ValueError(f"a mask of the kind {kind!r}")


def reduction_of(plain: Plain) -> Reduction:
    """Convert the plain data of a recorded answer to its reduction.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    asked = plain["reduction"]
    kind = _kind(asked)
    if kind == "Segments":
        keys = asked["key_spans"]
        return Segments(_spans_of(asked["query_spans"]), None if keys is None else _spans_of(keys))
    known, fields = _REDUCTIONS[kind]
    return known(*(_number(asked[field]) for field in fields))


def answer_of(plain: Plain, shape: torch.Size, take: Take) -> Any:
    """Convert the plain data of a recorded answer to the answer, and check its shape and dtype.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError, MemoryError: the plain data are invalid.
    """
    reduction, answer = reduction_of(plain), plain["answer"]
    # On the meta device, computing the shape of an answer needs no memory, even for a huge shape.
    asked = fitting(reduction, shape[-1])
    buffers = asked.start(shape, torch.float32, torch.device("meta"))
    expected = padded(reduction, asked.finish(buffers, shape))
    if not isinstance(expected, Top):
        return _alike(take(answer["tensor"]), expected)
    values, indices = take(answer["values"]), take(answer["indices"])
    return Top(_alike(values, expected.values), _alike(indices, expected.indices))


def _spans_of(plain: Plain) -> Any:
    if "named" in plain:
        return {name: _span_of(span) for name, span in plain["named"].items()}
    spans = [_span_of(span) for span in plain["list" if "list" in plain else "tuple"]]
    return spans if "list" in plain else tuple(spans)


def _span_of(plain: Any) -> tuple[int, int]:
    start, stop = plain
    return _number(start), _number(stop)


def _alike(answer: Tensor, expected: Tensor) -> Tensor:
    dtypes = _FLOATING if expected.is_floating_point() else (expected.dtype,)
    if answer.shape != expected.shape or answer.dtype not in dtypes:
        raise ValueError(
            f"an answer of shape {shape_text(answer.shape)} and {dtype_text(answer.dtype)}; "
            f"{shape_text(expected.shape)} and {dtype_text(expected.dtype)} is asked"
        )
    return answer


def pictures_of(plain: Plain, take: Take) -> tuple[Picture, ...]:
    """Convert plain data to pictures, with the bytes of a file.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    pictures: list[Picture] = []
    for each in plain.get("pictures", ()):
        width, height = map(_number, each["size"])
        data = None if each["data"] is None else take(each["data"])
        if data is not None and (data.dtype != torch.uint8 or data.ndim != 1):
            raise ValueError("a picture that is no bytes")
        content = None if data is None else data.numpy().tobytes()
        pictures.append(Picture(width, height, content, each["name"]))
    return tuple(pictures)


def grids_of(plain: Plain) -> dict[str, tuple[Grid, ...]]:
    """Convert plain data to the grids of layers by name.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    several = [tuple(map(_grid_of, some)) for some in plain.get("grids", ())]
    return {
        name: several[check_index_bounds(_number(index), len(several), 0)]
        for name, index in plain.get("layer_grids", {}).items()
    }


def _grid_of(plain: Plain) -> Grid:
    rows, columns, tokens = _number(plain["rows"]), _number(plain["columns"]), plain["tokens"]
    if "run" in tokens:
        run = range(*_span_of(tokens["run"]))
        # A run that is only claimed must not take memory.
        positions = run if len(run) == rows * columns <= _MOST_TOKENS else ()
    else:
        positions = tuple(map(_number, tokens["list"]))
    box, flag = plain["box"], _flag(plain["overlapping"])
    sides = None if box is None else cast(Any, tuple(box))
    return Grid(positions, rows, columns, plain["picture"], sides, plain["entry"], flag)


def _kind(plain: Plain) -> str:
    return str(plain["kind"])


def _number(value: object) -> int:
    number = check_whole("a number", value)
    if abs(number) > _FAR:
        raise ValueError(f"the number {number:.3g}")
    return number


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} where true or false must stand")
    return value


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATING:
        raise TypeError(f"{name} is {dtype_text(tensor.dtype)}")
