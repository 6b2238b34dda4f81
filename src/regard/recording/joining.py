"""Merging of the recordings of a distributed run into one recording."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from math import prod
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from regard.errors import RegardError, dtype_text, shape_text
from regard.masks import Mask
from regard.masks.recognise import allowed_rows, recognised_rows
from regard.masks.row_slice import RowSlice, row_slice_of
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Answers, InMemory, Layer, Origin, Refusal
from regard.recording.shard import Shard, place_text
from regard.reductions.reduction import Reduction, RowStatistic
from regard.reductions.sums import Sum
from regard.reductions.top_k import Top, TopK
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

__all__ = ["Piece", "joined"]

Content = TypeVar("Content")
_BATCH, _HEADS, _QUERIES = -4, -3, -2  # axes of a matrix, (batch, num_heads, q_len, kv_len)


@dataclass(frozen=True)
class Piece:
    """The layers that one process recorded; ``name`` names it in errors: ``"rank 1"``.

    ``shard`` is None for a recording of a whole model.
    """

    name: str
    shard: Shard | None
    layers: tuple[Layer, ...]
    refused: tuple[Refusal, ...] = ()


def joined(pieces: Sequence[Piece]) -> tuple[list[Layer], list[Refusal]]:
    """Merge the pieces of a distributed run, and return all layers and all refusals.

    Raises:
        RegardError: a piece is missing, belongs to another run, occurs twice, or does not fit the
            others.
    """
    by_place, counts = _by_place(pieces)
    stages, batches, heads, queries = map(range, counts)
    layers: list[Layer] = []
    owners: dict[str, int] = {}
    before = 0  # the number of modules with attention in earlier stages
    for stage in stages:
        entries = [
            _joined(
                _QUERIES,
                [_joined(_HEADS, [by_place[stage, b, h, q] for h in heads]) for q in queries],
            )
            for b in batches
        ]
        whole = _joined(_BATCH, entries)
        first = [_shard(by_place[stage, b, 0, 0]) for b in batches]
        whole = _of_batches(whole, max(shard.microbatches for shard in first))
        for layer in whole:
            if owners.setdefault(_module(layer.name), stage) != stage:
                raise RegardError(
                    f"stages {owners[_module(layer.name)]} and {stage} both have a layer "
                    f"{layer.name!r}.\n    Give the modules of each stage the names that they have "
                    "in the whole model."
                )
            origin = layer.origin and layer.origin._replace(place=layer.origin.place + before)
            layers.append(replace(layer, origin=origin))
        names = {_module(layer.name) for layer in whole}
        before += len(names | {each.module for each in by_place[stage, 0, 0, 0].refused})
    calls = Counter(_module(layer.name) for layer in layers)
    if counts[0] > 1 and len(set(calls.values())) == 1:
        # All modules ran equally often, so layers are sorted by call first, then by stage.
        layers.sort(key=lambda layer: _call(layer.name))
    refused = {each.module: each for piece in pieces for each in piece.refused}
    return layers, list(refused.values())


def _by_place(
    pieces: Sequence[Piece],
) -> tuple[dict[tuple[int, int, int, int], Piece], tuple[int, int, int, int]]:
    """Check that the pieces are one complete run; return them by place, and the part counts."""
    if not pieces:
        raise RegardError("there are no recordings to merge.\n    Pass one for each process.")
    found: dict[tuple[int, int, int, int], Piece] = {}
    first = pieces[0]
    for piece in pieces:
        if piece.shard is None:
            raise RegardError(
                f"{piece.name} is the recording of a whole model; it has nothing to be merged "
                "with.\n    Leave it out."
            )
        own, other = piece.shard, _shard(first)
        if (own.run, own.counts) != (other.run, other.counts):
            raise RegardError(
                f"{piece.name} and {first.name} are of different runs.\n"
                "    Merge the recordings of one run, each process with as many blocks of observe."
            )
        if own.place in found:
            raise RegardError(
                f"{piece.name} and {found[own.place].name} are the same part of the run, "
                f"{own.text}.\n    Leave one of them out."
            )
        found[own.place] = piece
    counts = _shard(first).counts
    places = product(*map(range, counts))
    missing = next((place for place in places if place not in found), None)
    if missing is not None:
        raise RegardError(
            f"{prod(counts) - len(found)} of {prod(counts)} parts of the run are missing, the "
            f"first is {place_text(missing, counts)}.\n    Merge the recordings of all processes."
        )
    return found, counts


def _joined(axis: int, pieces: Sequence[Piece]) -> Piece:
    """Merge pieces along one axis of their matrices."""
    if len(pieces) == 1:
        return pieces[0]
    refused = {each.module: each for piece in pieces for each in piece.refused}
    longest = max(pieces, key=lambda piece: len(piece.layers))
    order = dict.fromkeys(layer.name for piece in (longest, *pieces) for layer in piece.layers)
    layers: list[Layer] = []
    for name in order:
        if _module(name) in refused:
            continue
        having = [piece for piece in pieces if _layer(piece, name) is not None]
        for piece in pieces:
            if piece not in having and not _is_without(piece, name, axis):
                raise RegardError(
                    f"{piece.name} has no layer {name!r}, which {having[0].name} has.\n"
                    "    Run the model equally often on all processes."
                )
        layers.append(_layer_of(axis, having, name, is_all=len(having) == len(pieces)))
    places = [layer.origin.place for layer in layers if layer.origin is not None]
    if axis == _HEADS and set(places) == set(range(len(set(places)))):
        # All layers were recorded, so the origins only repeat the order.
        plain = all(layer.origin is None or layer.origin.heads is None for layer in layers)
        layers = [replace(layer, origin=None) if plain else layer for layer in layers]
    names = ", ".join(piece.name for piece in pieces)
    return Piece(names, pieces[0].shard, tuple(layers), tuple(refused.values()))


def _shard(piece: Piece) -> Shard:
    return cast(Shard, piece.shard)


def _module(name: str) -> str:
    """Return the module name of a layer, without the ``#2``, ``#3`` of later calls."""
    module, _, number = name.rpartition("#")
    return module if module and number.isdigit() else name


def _call(name: str) -> int:
    """Return the call number of a layer: 1 for the first call of its module."""
    module = _module(name)
    return 1 if name == module else int(name[len(module) + 1 :])


def _layer(piece: Piece, name: str) -> Layer | None:
    return next((layer for layer in piece.layers if layer.name == name), None)


def _is_without(piece: Piece, name: str, axis: int) -> bool:
    return axis == _HEADS and _module(name) in _shard(piece).without


def _of_batches(piece: Piece, microbatches: int) -> list[Layer]:
    """Return the layers of a stage, with the microbatches of each batch merged."""
    if microbatches == 1:
        return list(piece.layers)
    calls: dict[str, list[Layer]] = {}
    for layer in piece.layers:
        calls.setdefault(_module(layer.name), []).append(layer)
    layers: list[Layer] = []
    for module, found in calls.items():
        if len(found) % microbatches:
            raise RegardError(
                f"{piece.name} ran {module!r} {len(found)} times, and a batch is {microbatches} "
                "microbatches.\n    Run a module once in the forward of a stage."
            )
        for at in range(0, len(found), microbatches):
            name = module if at == 0 else f"{module}#{at // microbatches + 1}"
            parts = [
                Piece(f"microbatch {number} of {piece.name}", None, (replace(layer, name=name),))
                for number, layer in enumerate(found[at : at + microbatches])
            ]
            layers.append(_layer_of(_BATCH, parts, name, is_all=True))
    return layers


def _layer_of(axis: int, pieces: Sequence[Piece], name: str, *, is_all: bool) -> Layer:
    """Merge the layers of this name along one axis."""
    layers = [cast(Layer, _layer(piece, name)) for piece in pieces]
    first = layers[0]
    names = [piece.name for piece in pieces]
    origin = first.origin
    if axis == _HEADS:
        heads = [None if each.origin is None else each.origin.heads for each in layers]
        if is_all and heads.count(heads[0]) == len(heads):
            return first  # each process recorded the same heads
        origin = _origin(name, names, layers, is_all=is_all)
    for own, layer in zip(names, layers, strict=True):
        sizes = [list(each.shape) for each in (first, layer)]
        if len(layer.shape) < -axis:
            raise RegardError(f"{own} has no batch in layer {name!r}, {shape_text(layer.shape)}.")
        for size in sizes:
            size[axis] = 0
        if sizes[0] != sizes[1] or _contents(axis, first) != _contents(axis, layer):
            raise RegardError(
                f"layer {name!r} has shape {shape_text(first.shape)} on {names[0]} and "
                f"{shape_text(layer.shape)} on {own}, or other queries or answers; they cannot be "
                "joined.\n    Give all processes texts of one length, and observe alike."
            )
    if len(layers) == 1:
        return replace(first, origin=origin)
    if axis == _QUERIES:
        _check_neighbours(name, names, layers)
    join = _Join(name, tuple(names), axis)
    shape = list(first.shape)
    shape[axis] = sum(layer.shape[axis] for layer in layers)
    answers = [
        (
            asked,
            _merged([_part(layer, asked) for layer in layers], join.answers(asked, len(shape))),
        )
        for asked in first.answers
    ]
    matrices = [layer.matrix for layer in layers if layer.matrix is not None]
    values = [layer.value for layer in layers if layer.value is not None]
    return Layer(
        name,
        torch.Size(shape),
        _merged(matrices, join.matrices) if matrices else None,
        Answers.reading(answers),
        origin,
        None if axis == _QUERIES else first.queries,
        _merged(values, join.values(tuple(layer.shape for layer in layers))) if values else None,
    )


def _contents(axis: int, layer: Layer) -> tuple[object, ...]:
    """Return the contents that parts along an axis must share."""
    queries = None if axis == _QUERIES else layer.queries
    return queries, list(layer.answers), layer.matrix is None, layer.value is None


def _check_neighbours(name: str, names: Sequence[str], layers: Sequence[Layer]) -> None:
    """Raise an error unless the rows of the parts follow each other, from the first to the last."""
    stop = 0
    for own, layer in zip(names, layers, strict=True):
        rows, ran = layer.positions, None if layer.queries is None else layer.queries.ran
        if rows.start != stop or (layer is layers[-1] and rows.stop != ran):
            raise RegardError(
                f"layer {name!r} has queries {rows.start} to {rows.stop - 1} on {own}, after "
                f"{stop} queries of other parts; they are not the parts of one layer."
            )
        stop = rows.stop


def _origin(
    name: str, names: Sequence[str], layers: Sequence[Layer], *, is_all: bool
) -> Origin | None:
    """Return the origin of a layer with merged heads; its heads are None if it has all."""
    heads: list[int] = []
    for own, layer in zip(names, layers, strict=True):
        numbers = () if layer.origin is None else layer.origin.heads or ()
        if not numbers or set(numbers) & set(heads):
            raise RegardError(
                f"layer {name!r} has heads {list(numbers)} on {own}, and {heads} before it; they "
                "are not parts of one layer."
            )
        heads += numbers
    origin = cast(Origin, layers[0].origin)
    if is_all and heads == list(range(len(heads))):
        return origin._replace(heads=None)
    return origin._replace(heads=tuple(heads))


def _part(layer: Layer, asked: Any) -> Callable[[], Any]:
    return lambda: layer.answers[asked]


@dataclass(frozen=True, eq=False)
class _Merged(Generic[Content]):
    """A function that calls the functions of the parts and merges their results."""

    parts: tuple[Callable[[], Content], ...]
    join: Callable[[Sequence[Content]], Content]

    def __call__(self) -> Content:
        return self.join([part() for part in self.parts])

    def __repr__(self) -> str:
        return f"{self.parts[0]!r} and {len(self.parts) - 1} more parts"


def _merged(
    parts: Sequence[Callable[[], Content]], join: Callable[[Sequence[Content]], Content]
) -> Callable[[], Content]:
    """Return a function for the merged result; parts in memory are merged immediately."""
    both = _Merged(tuple(parts), join)
    return InMemory(both()) if all(isinstance(part, InMemory) for part in parts) else both


@dataclass(frozen=True)
class _Join:
    """The merging of the matrices, answers and values of one layer along a negative axis."""

    name: str
    names: tuple[str, ...]
    axis: int

    def matrices(self, parts: Sequence[AttentionMatrix]) -> AttentionMatrix:
        """Merge matrices."""
        sources = [part.source for part in parts]
        self._check("dtype", [dtype_text(part.dtype) for part in parts])
        self._check("device", [str(part.device) for part in parts])
        groups = {each.group for each in sources if isinstance(each, QueryKeyScores)}
        if len(groups) > 1:
            sources = [
                replace(each, key=each.key.repeat_interleave(each.group, -3))
                if isinstance(each, QueryKeyScores)
                else each
                for each in sources
            ]
        self._check("score_mod, scale or bias", [_structure(each) for each in sources])
        if self.axis == _QUERIES:
            return self._rows(parts, [each for each in sources if isinstance(each, QueryKeyScores)])
        sizes = [part.shape[self.axis] for part in parts]
        own = 2 if isinstance(sources[0], QueryKeyScores) else 1
        source: Scores = self._mapped(sources, sizes, own)
        mask = self._mask(parts, sizes, source.shape)
        bound = None if mask is None else mask.bind(source.shape, source.device)
        return AttentionMatrix(source, bound)

    def _rows(
        self, parts: Sequence[AttentionMatrix], sources: Sequence[QueryKeyScores]
    ) -> AttentionMatrix:
        """Merge the rows of one matrix, whose parts all have its keys."""
        # A map without a change drops the shape of the part's matrix.
        masks = [None if part.mask is None else part.mask.map(lambda x: x) for part in parts]
        mask = masks[-1].mask if isinstance(masks[-1], RowSlice) else masks[-1]
        if (
            len(sources) < len(parts)
            or len(list(_tensors(sources[0]))) > 2
            or (mask is not None and mask.tensors)
        ):
            raise RegardError(
                f"layer {self.name!r} has given scores, a bias or a mask with a tensor, and its "
                "queries are on several processes; they cannot be joined.\n"
                "    Look at each part alone."
            )
        self._check("key", [torch.equal(each.key, sources[0].key) for each in sources])
        source = replace(sources[0], query=torch.cat([each.query for each in sources], _QUERIES))
        q_len, stop = source.shape[-2], 0
        for name, part, own in zip(self.names, parts, masks, strict=True):
            rows = range(stop, stop := stop + part.shape[-2])
            expected = None if mask is None else row_slice_of(mask, rows, q_len)
            if _structure(own) != _structure(expected):
                texts = ["None" if each is None else each.text for each in (own, mask)]
                raise RegardError(
                    f"layer {self.name!r} has the mask {texts[0]} on {name}, which is no part of "
                    f"{texts[1]} on {self.names[-1]}.\n    Run the same model on all processes."
                )
        bound = None if mask is None else mask.bind(source.shape, source.device)
        return AttentionMatrix(source, bound)

    def values(self, shapes: Sequence[torch.Size]) -> Callable[[Sequence[Tensor]], Tensor]:
        """Return a function that merges the values of matrices of these shapes."""

        def join(parts: Sequence[Tensor]) -> Tensor:
            groups = [
                shape[-3] // part.shape[-3] for shape, part in zip(shapes, parts, strict=True)
            ]
            if len(set(groups)) > 1:
                both = zip(parts, groups, strict=True)
                parts = [part.repeat_interleave(group, -3) for part, group in both]
            self._check("dtype", [dtype_text(part.dtype) for part in parts])
            if self.axis == _QUERIES:
                self._check("value", [torch.equal(part, parts[0]) for part in parts])
                return parts[0]
            return torch.cat(list(parts), self.axis)

        return join

    def answers(self, asked: Reduction, ndim: int) -> Callable[[Sequence[Any]], Any]:
        """Return a function that merges the answers of matrices with ``ndim`` axes."""
        axis = ndim + self.axis
        if self.axis == _QUERIES and not isinstance(asked, RowStatistic | TopK | Sum):
            raise RegardError(
                f"layer {self.name!r} has an answer that is not one for each query; it cannot be "
                'joined.\n    Observe with keep="qk", and ask the recording.'
            )

        def join(parts: Sequence[Any]) -> Any:
            if self.axis == _QUERIES and isinstance(asked, Sum) and asked.dim == -2:
                return torch.stack(list(parts)).sum(0)
            if all(isinstance(part, Top) for part in parts):
                return Top(*(torch.cat(each, axis) for each in zip(*parts, strict=True)))
            if not all(isinstance(part, Tensor) and part.ndim > axis for part in parts):
                raise RegardError(
                    f"layer {self.name!r} has an answer that is not one for each head and text; "
                    'it cannot be joined.\n    Observe with keep="qk", and ask the recording.'
                )
            return torch.cat(list(parts), axis)

        return join

    def _check(self, what: str, facts: Sequence[object]) -> None:
        """Raise an error if the parts differ in a property."""
        for name, fact in zip(self.names, facts, strict=True):
            if fact != facts[0]:
                values = f", {facts[0]} and {fact}" if isinstance(fact, str) else ""
                raise RegardError(
                    f"layer {self.name!r} has another {what} on {name} than on {self.names[0]}"
                    f"{values}.\n    Run the same model on all processes."
                )

    def _mask(
        self, parts: Sequence[AttentionMatrix], sizes: Sequence[int], shape: torch.Size
    ) -> Mask | None:
        bound = [
            None if part.mask is None else part.mask.bind(part.shape, part.device) for part in parts
        ]
        masks = [mask for mask in bound if mask is not None]
        if not masks:
            return None
        if len(masks) == len(parts) and len({_structure(mask) for mask in masks}) == 1:
            return self._mapped(masks, sizes, 0)

        # Parts may have different kinds of masks: a text without padding may have none.
        def allowed(rows: slice) -> Tensor:
            both = zip(bound, parts, strict=True)
            blocks = [allowed_rows(mask, rows, part.shape, part.device) for mask, part in both]
            return _widened_and_joined(blocks, sizes, self.axis)

        size = allowed(slice(0, 1)).shape
        return recognised_rows(allowed, torch.Size((*size[:-2], *shape[-2:])), shape)

    def _mapped(self, wholes: Sequence[Any], sizes: Sequence[int], own: int) -> Any:
        """Merge sources of scores, or masks, of the same structure by concatenating their tensors.

        The ``own`` first tensors have the full axis; that of others may broadcast. ``sizes`` has
        the size of the axis in each matrix.
        """
        columns = zip(*(_tensors(whole) for whole in wholes), strict=True)
        tensors = iter(
            [
                self._cat(column, None if place < own else sizes)
                for place, column in enumerate(columns)
            ]
        )

        def taken(_: Tensor) -> Tensor:
            return next(tensors)

        return wholes[0].map(taken)

    def _cat(self, parts: Sequence[Tensor], sizes: Sequence[int] | None) -> Tensor:
        axis = self.axis
        if sizes is None:
            return torch.cat(list(parts), axis)
        if all(part.shape[axis] == 1 and torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        return _widened_and_joined(parts, sizes, axis)


def _widened_and_joined(parts: Sequence[Tensor], sizes: Sequence[int], axis: int) -> Tensor:
    """Concatenate tensors whose axes have their full size or 1, along a negative axis.

    ``sizes`` has the size of that axis in each matrix.
    """
    wide = [max(each) for each in zip(*(part.shape for part in parts), strict=True)]
    widened: list[Tensor] = []
    for part, size in zip(parts, sizes, strict=True):
        wide[axis] = size
        widened.append(part.expand(wide))
    return torch.cat(widened, axis)


def _tensors(whole: Any) -> Iterator[Tensor]:
    """Return the tensors of a source or a mask, in the order of ``map``."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    whole.map(note)
    return iter(found)


def _structure(whole: object) -> object:
    """Return the types and fields of a source or a mask, without its tensors."""
    if isinstance(whole, Tensor):
        return Tensor
    if is_dataclass(whole) and not isinstance(whole, type):
        return type(whole), *(_structure(getattr(whole, each.name)) for each in fields(whole))
    return whole
