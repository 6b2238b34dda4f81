"""The JSON of a recording's file, written and read by one table, without pickle or code.

``_FIELDS`` has a line for each class that a file can hold. To write an object, its fields are
written; to read one, each field is checked and the class is called. So plain data from a file pass
the same checks as arguments of the public functions. Damaged data raise the errors of wrong
arguments, which the reader converts to one error of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

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
    RowSlice,
    SlidingWindow,
)
from regard.masks.mask import fits
from regard.masks.recognise import allowed_rows, recognised_rows
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.recording.layers import Layer, Origin, Queries, Refusal
from regard.recording.shard import Shard
from regard.recording.version import version
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import Entropy, LogSumExp, MaxScore, NormalizedEntropy
from regard.reductions.sums import Diagonal, Pool, Segments, Sum
from regard.reductions.top_k import Top, TopK, fitting, padded
from regard.scores.autocast import without_autocast
from regard.scores.given_scores import GivenScores
from regard.scores.position_bias import ALiBi, Bias, T5Bias
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores
from regard.text.tokens import Token, as_tokens

FORMAT = 5
"""The version of the file format."""

Plain = dict[str, Any]
"""Values that JSON can represent."""

ReadTensor = Callable[[Any], Tensor]
"""A function that returns the tensor with a name or a number."""

Put = Callable[[str, Tensor], str | int]
"""A function that stores a tensor by its role in a layer, and returns its name or number."""

_Made = TypeVar("_Made")

_LARGEST_CALLABLE = 2**26
_FAR = 2**48  # larger whole numbers are damage; up to here positions are exact
_LONGEST = 2**40
_MOST_AXES = 16
_MOST_PARTS = 2**16
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# Fields


@dataclass(frozen=True)
class _Field:
    """The JSON of a field.

    Attributes:
        write: returns the JSON of a value, given what stores its tensors, and its role.
        read: returns the value, given what returns its tensors.
    """

    write: Callable[[Any, Any, str], Any]
    read: Callable[[Any, Any], Any]


def _checked(check: Callable[[Any], Any]) -> _Field:
    """Return a field that JSON represents as it is, and that is checked when it is read."""
    return _Field(lambda value, _put, _role: value, lambda plain, _read_tensor: check(plain))


def _optional(field: _Field) -> _Field:
    return _Field(
        lambda value, put, role: None if value is None else field.write(value, put, role),
        lambda plain, read_tensor: None if plain is None else field.read(plain, read_tensor),
    )


def _several(field: _Field) -> _Field:
    return _Field(
        lambda values, put, role: [field.write(value, put, role) for value in values],
        lambda plain, read_tensor: tuple(field.read(each, read_tensor) for each in _list(plain)),
    )


def _of(base: type[Any]) -> _Field:
    """Return a field of one of the classes of a kind, with the name of its class as "kind"."""

    def write(value: Any, put: Put, role: str) -> Plain:
        if type(value) not in _FIELDS:
            raise _code(f"the {base.__name__.lower()} {value!r}")
        return {"kind": type(value).__name__, **_written(value, put, role)}

    return _Field(
        write, lambda plain, read_tensor: _class(plain, base)(*_read(plain, base, read_tensor))
    )


def _class(plain: Plain, base: type[_Made]) -> type[_Made]:
    """Return the class of an object in a file."""
    kind = next((each for each in _FIELDS if each.__name__ == plain["kind"]), None)
    if kind is None or not issubclass(kind, base):
        raise ValueError(f"{base.__name__} of the kind {plain['kind']!r}")
    return kind


def _written(value: object, put: Put, role: str = "") -> Plain:
    """Return the JSON of an object's fields."""
    fields = _FIELDS[type(value)].items()
    return {
        name: field.write(getattr(value, name), put, f"{role}.{name}".removeprefix("."))
        for name, field in fields
    }


def _read(plain: Plain, kind: type[Any], read_tensor: ReadTensor) -> list[Any]:
    """Return the fields of an object of a class, or of a class of this kind, in their order."""
    kind = kind if kind in _FIELDS else _class(plain, kind)
    fields = _FIELDS[kind]
    if unknown := sorted(plain.keys() - fields.keys() - {"kind"}):
        raise ValueError(f"{kind.__name__} with {unknown[0]!r}, which it cannot have")
    return [field.read(plain[name], read_tensor) for name, field in fields.items()]


def _number(value: object) -> int:
    number = check_whole("a number", value)
    if abs(number) > _FAR:
        raise ValueError(f"the number {number:.3g}")
    return number


def count_of(value: object) -> int:
    """Return a number of queries, keys or the like; raise a ValueError for anything else."""
    if type(value) is not int or not 0 <= value < _LONGEST:
        raise ValueError(f"{value!r} where a count must stand")
    return value


def _part(value: Any) -> tuple[int, int]:
    at, count = map(count_of, value)
    if at >= count or count > _MOST_PARTS:
        raise ValueError(f"part {at} of {count} of a distributed run")
    return at, count


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} where true or false must stand")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} where a text must stand")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.60} where a list must stand")
    return cast(list[Any], value)


def _plain_bytes(data: bytes, put: Put, role: str) -> str | int:
    return put(role, torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _bytes_of(plain: Any, read_tensor: ReadTensor) -> bytes:
    data = read_tensor(plain)
    if data.dtype != torch.uint8 or data.ndim != 1:
        raise ValueError("a picture that is no bytes")
    return data.numpy().tobytes()


def _plain_spans(spans: Any, _put: Put, _role: str) -> Plain:
    if isinstance(spans, Mapping):
        named = cast("Mapping[object, Any]", spans)
        for name in named:
            if not isinstance(name, str):
                raise RegardError(
                    f"it has the span name {name!r}, {kind_text(name)}; in a file names are "
                    "strings.\n    Observe again with strings for the names of the spans."
                )
        return {"named": {name: [int(at) for at in span] for name, span in named.items()}}
    return {"list": [[int(at) for at in span] for span in spans]}


def _spans_of(plain: Plain, _read_tensor: ReadTensor) -> Any:
    if "named" in plain:
        return {name: _span(span) for name, span in plain["named"].items()}
    return list(map(_span, plain["list"]))


def _span(plain: Any) -> tuple[int, int]:
    start, stop = plain
    return _number(start), _number(stop)


def _plain_tokens(given: Iterable[Token | str], _put: Put, role: str) -> Plain:
    tokens = as_tokens(role, given) or ()
    special = [index for index, token in enumerate(tokens) if token.special]
    return {"text": [token.text for token in tokens], "special": special}


def _tokens_of(plain: Any, _read_tensor: ReadTensor) -> tuple[Token, ...]:
    texts, special = list(map(_text, _list(plain["text"]))), set(plain["special"])
    if not special <= set(range(len(texts))):
        raise ValueError(f"special tokens that are none of its {len(texts)}")
    return tuple(Token(text, index in special) for index, text in enumerate(texts))


def _trial(plain: Any) -> dict[str, dict[str, list[float]]]:
    trial = {
        str(layer): {str(kind): list(map(float, scores)) for kind, scores in kinds.items()}
        for layer, kinds in plain.items()
    }
    scores = [score for kinds in trial.values() for each in kinds.values() for score in each]
    if not all(kinds and all(kinds.values()) for kinds in trial.values()):
        raise ValueError("a trial without scores")
    if not all(0 <= score <= 1.001 for score in scores):
        raise ValueError("a score of a trial that is not from 0 to 1")
    return trial


_AS_IT_IS = _checked(lambda plain: plain)  # the class checks it
_NUMBER, _COUNT, _FLAG, _TEXT = map(_checked, (_number, count_of, _flag, _text))
_TENSOR = _Field(
    lambda value, put, role: put(role, value), lambda plain, read_tensor: read_tensor(plain)
)
_BYTES = _Field(_plain_bytes, _bytes_of)
_SPANS = _Field(_plain_spans, _spans_of)
_MASK, _BIAS = _of(Mask), _of(Bias)

_FIELDS: dict[type[Any], dict[str, _Field]] = {
    QueryKeyScores: {
        **dict.fromkeys(("query", "key"), _TENSOR),
        **dict.fromkeys(("scale", "softcap"), _AS_IT_IS),
        **dict.fromkeys(("bias", "sink_bias"), _optional(_TENSOR)),
        "position_bias": _optional(_BIAS),
        "rows_after": _COUNT,
    },
    GivenScores: {"values": _TENSOR, "are_weights": _FLAG},
    ALiBi: {"slopes": _TENSOR},
    T5Bias: {"table": _TENSOR, "bidirectional": _FLAG, "max_distance": _NUMBER},
    Causal: {"align": _AS_IT_IS},
    SlidingWindow: {"left": _NUMBER, "right": _NUMBER},
    Padding: {"lengths": _TENSOR},
    Documents: {"ids": _TENSOR},
    Keep: {"mask": _TENSOR},
    RowSlice: {"mask": _MASK, "start": _NUMBER, "q_len": _NUMBER},
    Not: {"mask": _MASK},
    And: {"first": _MASK, "second": _MASK},
    Or: {"first": _MASK, "second": _MASK},
    Diagonal: {"offset": _NUMBER},
    Entropy: {},
    LogSumExp: {},
    MaxScore: {},
    NormalizedEntropy: {},
    Pool: {"rows_wanted": _NUMBER, "columns_wanted": _NUMBER},
    Segments: {"query_spans": _SPANS, "key_spans": _optional(_SPANS)},
    Sum: {"dim": _NUMBER},
    TopK: {"k": _NUMBER},
    Origin: {"layer": _COUNT, "heads": _optional(_several(_COUNT))},
    Queries: {"start": _COUNT, "ran": _COUNT},
    Refusal: {"module": _TEXT, "line": _optional(_TEXT), "reason": _TEXT},
    Shard: {
        "run": _TEXT,
        "rank": _COUNT,
        **dict.fromkeys(("batch", "heads"), _checked(_part)),
        "without": _several(_TEXT),
    },
    Picture: {"width": _NUMBER, "height": _NUMBER, "data": _optional(_BYTES), "name": _AS_IT_IS},
    Grid: {
        "tokens": _several(_NUMBER),
        **dict.fromkeys(("rows", "columns"), _NUMBER),
        "picture": _AS_IT_IS,
        "box": _optional(_checked(tuple)),
        "entry": _AS_IT_IS,
        "overlapping": _FLAG,
    },
}
"""Each class that a file can hold, with its fields in the order of the class."""


def _one(kind: type[Any]) -> _Field:
    """Return a field of one class."""
    return _Field(_written, lambda plain, read_tensor: kind(*_read(plain, kind, read_tensor)))


REFUSAL, ORIGIN = _one(Refusal), _optional(_one(Origin))
"""The fields of a refusal, and of the position of a layer in its model."""

_HEADING: dict[str, _Field] = {
    "model": _TEXT,
    "query_tokens": _optional(_Field(_plain_tokens, _tokens_of)),
    "key_tokens": _optional(_Field(_plain_tokens, _tokens_of)),
    "refused": _several(REFUSAL),
    "shard": _optional(_one(Shard)),
    "trials": _several(_checked(_trial)),
}
"""The fields of a recording beside its layers and pictures."""

_LAYER: dict[str, _Field] = {
    "name": _TEXT,
    "shape": _Field(
        lambda shape, _put, _role: list(shape), lambda plain, _read_tensor: shape_of(plain)
    ),
    "origin": ORIGIN,
    "queries": _optional(_one(Queries)),
}
"""The fields of a layer beside its matrix, answers and value."""


def shape_of(plain: object) -> torch.Size:
    """Return the shape of a matrix; raise a ValueError if it is none."""
    sizes = cast(list[object], plain)
    right = isinstance(plain, list) and 2 <= len(sizes) <= _MOST_AXES
    if not right or not all(type(n) is int and 1 <= n <= _LONGEST for n in sizes):
        raise ValueError(f"the shape {plain!r:.60}")
    return torch.Size(cast(list[int], sizes))


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


def about(seen: Any) -> Plain:
    """Convert a recording to plain data, without its layers and pictures."""
    fields = _HEADING.items()
    heading = {name: field.write(getattr(seen, name), None, name) for name, field in fields}
    return {"format": FORMAT, "regard": version(), "torch": torch.__version__, **heading}


def plain_layer(layer: Layer, put: Put) -> Plain:
    """Convert a layer to plain data.

    Raises:
        RegardError: it has code, or a name of the spans of an answer is not a string.
    """
    return {
        **{name: field.write(getattr(layer, name), put, name) for name, field in _LAYER.items()},
        "matrix": None if layer.matrix is None else plain_matrix(layer.whole(), put),
        "answers": plain_answers(layer.answers.items(), put),
        "value": None if layer.value is None else put("value", layer.whole_value()),
    }


def plain_matrix(matrix: AttentionMatrix, put: Put) -> Plain:
    """Convert a matrix to plain data.

    Raises:
        RegardError: the matrix has code: a score_mod, a mask_mod whose mask is too large to store,
            or a user's own Bias or Scores.
    """
    source, mask = matrix.source, matrix.mask
    if isinstance(source, QueryKeyScores) and source.score_mod is not None:
        raise _code(f"the score_mod {source.score_mod!r}")
    if type(source) not in _FIELDS:
        raise _code(f"scores of the kind {type(source).__name__}")
    if mask is not None:
        bound = mask.bind(matrix.shape, matrix.device)
        mask = _storable(bound, matrix.shape, matrix.device)
    return {
        "scores": _of(Scores).write(source, put, ""),
        "mask": _optional(_MASK).write(mask, put, "mask"),
    }


def _storable(mask: Mask, shape: torch.Size, device: torch.device) -> Mask:
    """Return a mask without code: parts that are code are evaluated."""
    match mask:
        case And() | Or():
            first, second = (_storable(each, shape, device) for each in (mask.first, mask.second))
            return type(mask)(first, second)
        case Not():
            return Not(_storable(mask.mask, shape, device))
        case RowSlice():
            whole = torch.Size((*shape[:-2], mask.q_len, shape[-1]))
            return RowSlice(_storable(mask.mask, whole, device), mask.start, mask.q_len)
        case _:
            return mask if type(mask) in _FIELDS else _written_out(mask, shape, device)


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
    kept = recognised_rows(allowed, size, shape)
    if kept is None:
        return Keep(torch.ones((1,) * len(shape), dtype=torch.bool, device=device))
    return kept


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
    if type(reduction) not in _FIELDS:
        raise _code(f"the answer to {reduction!r}")
    return _of(Reduction).write(reduction, None, "")


def _plain_answer(role: str, answer: Any, put: Put) -> Plain:
    if isinstance(answer, Top):
        values, indices = put(f"{role}.values", answer.values), put(f"{role}.keys", answer.indices)
        return {"values": values, "indices": indices}
    return {"tensor": put(role, answer)}


def plain_pictures(pictures: Sequence[Picture], layers: Sequence[Layer], put: Put) -> Plain:
    """Convert pictures, and the grids of layers by name, to plain data."""
    grids = {layer.name: layer.grids for layer in layers if layer.grids}
    several = list(dict.fromkeys(grids.values()))
    return {
        "pictures": [_written(each, put, str(at)) for at, each in enumerate(pictures)],
        "grids": [[_written(grid, put) for grid in some] for some in several],
        "layer_grids": {name: several.index(some) for name, some in grids.items()},
    }


def _code(what: str) -> RegardError:
    return RegardError(
        f"it has {what}; a recording in a file is numbers and runs no code.\n"
        "    Pass what it does as a bias or a mask of regard, or keep answers instead, "
        "observe(model, keep=[...])."
    )


# From plain data


def heading_of(plain: Plain) -> Plain:
    """Return the attributes of a recording beside its layers and pictures.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    return {name: field.read(plain[name], None) for name, field in _HEADING.items()}


def layer_of(plain: Plain) -> Plain:
    """Return the attributes of a layer beside its matrix, answers and value.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    read = {name: field.read(plain[name], None) for name, field in _LAYER.items()}
    check_rows(read["shape"], read["origin"], read["queries"])
    return read


def check_rows(shape: torch.Size, origin: Origin | None, queries: Queries | None) -> None:
    """Raise a ValueError if a matrix of this shape cannot have these heads or queries."""
    heads = None if origin is None else origin.heads
    if heads is not None and len(heads) != shape[-3]:
        raise ValueError(f"an origin of {len(heads)} heads, not {shape[-3]}")
    if queries is not None and queries.start + shape[-2] > queries.ran:
        first, last = queries.start, queries.start + shape[-2]
        raise ValueError(f"queries {first} to {last} of {queries.ran}")


def matrix_of(plain: Plain, read_tensor: ReadTensor) -> AttentionMatrix:
    """Convert plain data to a matrix, with the tensors of a file.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError, MemoryError: the plain data are invalid.
    """
    scores, mask = plain["scores"], _optional(_MASK).read(plain["mask"], read_tensor)
    fields = dict(
        zip(_FIELDS[_class(scores, Scores)], _read(scores, Scores, read_tensor), strict=True)
    )
    source = _given(**fields) if scores["kind"] == "GivenScores" else _query_key(**fields)
    bound = None if mask is None else mask.bind(source.shape, source.device)
    return AttentionMatrix(source, bound)


def _given(values: Tensor, are_weights: bool) -> GivenScores:
    _check_dtype("values", check_scores(values))
    return GivenScores(values, are_weights)


def _query_key(
    query: Tensor,
    key: Tensor,
    scale: Any,
    softcap: Any,
    bias: Tensor | None,
    sink_bias: Tensor | None,
    position_bias: Bias | None,
    rows_after: int,
) -> QueryKeyScores:
    query, key = check_query_key(query, key)
    _check_dtype("query", query)
    scale, softcap = check_scale(float(scale), query.shape[-1]), check_softcap(softcap)
    with without_autocast(query.device):
        source = attend(query, key, scale=scale, bias=bias, softcap=softcap).source
    one = (*source.shape[:-2], 1, 1)
    if sink_bias is not None and not (sink_bias.is_floating_point() and fits(sink_bias, one)):
        raise ValueError(f"sink_bias of shape {shape_text(sink_bias.shape)}")
    _check_positions(position_bias, one)
    return replace(
        cast(QueryKeyScores, source),
        sink_bias=sink_bias,
        position_bias=position_bias,
        rows_after=rows_after,
    )


def _check_positions(bias: Bias | None, one: tuple[int, ...]) -> None:
    """Check the tensors of a position bias against a matrix with one row and one column."""
    match bias:
        case ALiBi(slopes=numbers) if not fits(numbers, one):
            raise ValueError(f"slopes of shape {shape_text(numbers.shape)}")
        case T5Bias(table=numbers):
            if not fits(numbers, (*one[:-1], numbers.shape[-1])):
                raise ValueError(f"a table of shape {shape_text(numbers.shape)}")
            by_head = numbers.flatten(0, -2)  # the table is bound; binding again checks its buckets
            unbound = T5Bias(by_head.mT, bias.bidirectional, bias.max_distance)
            unbound.bind(torch.Size((by_head.shape[0], 1, 1)), numbers.device)
        case _:
            pass


def reduction_of(plain: Plain) -> Reduction:
    """Convert the plain data of a recorded answer to its reduction.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    return cast(Reduction, _of(Reduction).read(plain["reduction"], None))


def answer_of(plain: Plain, shape: torch.Size, read_tensor: ReadTensor) -> Any:
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
        return _alike(read_tensor(answer["tensor"]), expected)
    values, indices = read_tensor(answer["values"]), read_tensor(answer["indices"])
    return Top(_alike(values, expected.values), _alike(indices, expected.indices))


def _alike(answer: Tensor, expected: Tensor) -> Tensor:
    dtypes = _FLOATING if expected.is_floating_point() else (expected.dtype,)
    if answer.shape != expected.shape or answer.dtype not in dtypes:
        raise ValueError(
            f"an answer of shape {shape_text(answer.shape)} and {dtype_text(answer.dtype)}; "
            f"{shape_text(expected.shape)} and {dtype_text(expected.dtype)} is asked"
        )
    return answer


def pictures_of(plain: Plain, read_tensor: ReadTensor) -> tuple[Picture, ...]:
    """Convert plain data to pictures, with the bytes of a file.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    return _several(_one(Picture)).read(plain["pictures"], read_tensor)


def grids_of(plain: Plain) -> dict[str, tuple[Grid, ...]]:
    """Convert plain data to the grids of layers by name.

    Raises:
        LookupError, TypeError, ValueError: the plain data are invalid.
    """
    several = _several(_several(_one(Grid))).read(plain["grids"], None)
    return {
        name: several[check_index_bounds(_number(index), len(several), 0)]
        for name, index in plain["layer_grids"].items()
    }


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATING:
        raise TypeError(f"{name} is {dtype_text(tensor.dtype)}")
