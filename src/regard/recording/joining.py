"""Joining of the parts of a distributed run to one recording, along the heads and the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from regard.errors import RegardError, dtype_text, shape_text
from regard.masks import Mask
from regard.masks.recognise import allowed_rows, recognised_rows
from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.tensor_methods import mapped_tensors
from regard.recording.layers import InMemory, Layer, Origin, Refusal
from regard.recording.shard import Shard, part_text
from regard.reductions.top_k import Top
from regard.scores.query_key import QueryKeyScores

Content = TypeVar("Content")
_BATCH, _HEADS = -4, -3  # axes of a matrix, (batch, num_heads, q_len, kv_len)


class Piece(NamedTuple):
    """The layers that one process recorded; ``name`` names it in errors: ``"rank 1"``.

    ``shard`` is None for a recording of a whole model.
    """

    name: str
    shard: Shard | None
    layers: tuple[Layer, ...]
    refused: tuple[Refusal, ...] = ()


def joined(pieces: Sequence[Piece]) -> tuple[list[Layer], list[Refusal]]:
    """Join the pieces of a distributed run, and return all layers and all refusals.

    Raises:
        RegardError: a piece is missing, belongs to another run, occurs twice, or does not fit the
            others.
    """
    by_part = _by_part(pieces)
    batch, heads = map(range, _shard(pieces[0]).counts)
    rows = [_joined(_HEADS, [by_part[b, h] for h in heads]) for b in batch]
    whole = _joined(_BATCH, rows)
    return list(whole.layers), list(whole.refused)


def _by_part(pieces: Sequence[Piece]) -> dict[tuple[int, ...], Piece]:
    """Check that the pieces are one complete run; return each by its part of the run."""
    if not pieces:
        raise RegardError("there are no recordings to merge.\n    Pass one for each process.")
    by_part: dict[tuple[int, ...], Piece] = {}
    for piece in pieces:
        if piece.shard is None:
            raise RegardError(
                f"{piece.name} is the recording of a whole model; it has nothing to be merged "
                "with.\n    Leave it out."
            )
        shard, first = piece.shard, _shard(pieces[0])
        if (shard.run, shard.counts) != (first.run, first.counts):
            raise RegardError(
                f"{piece.name} and {pieces[0].name} are of different runs.\n"
                "    Merge the recordings of one run, each process with as many blocks of observe."
            )
        if shard.part in by_part:
            raise RegardError(
                f"{piece.name} and {by_part[shard.part].name} are the same part of the run, "
                f"{shard.text}.\n    Leave one of them out."
            )
        by_part[shard.part] = piece
    counts = _shard(pieces[0]).counts
    missing = next((part for part in product(*map(range, counts)) if part not in by_part), None)
    if missing is not None:
        raise RegardError(
            f"{prod(counts) - len(by_part)} of {prod(counts)} parts of the run are missing, the "
            f"first is {part_text(missing, counts)}.\n    Merge the recordings of all processes."
        )
    return by_part


def _shard(piece: Piece) -> Shard:
    return cast(Shard, piece.shard)


def _joined(axis: int, pieces: Sequence[Piece]) -> Piece:
    """Join pieces along one axis of their matrices."""
    if len(pieces) == 1:
        return pieces[0]
    refused = {each.module: each for piece in pieces for each in piece.refused}
    by_name = [{layer.name: layer for layer in piece.layers} for piece in pieces]
    longest = max(by_name, key=len)
    layers: list[Layer] = []
    for name in dict.fromkeys(name for names in (longest, *by_name) for name in names):
        if _module(name) in refused:
            continue
        both = list(zip(pieces, by_name, strict=True))
        having = [(piece.name, names[name]) for piece, names in both if name in names]
        for piece, names in both:
            is_without = axis == _HEADS and _module(name) in _shard(piece).without
            if name not in names and not is_without:
                raise RegardError(
                    f"{piece.name} has no layer {name!r}, which {having[0][0]} has.\n"
                    "    Run the model equally often on all processes."
                )
        join = _Join(name, tuple(piece for piece, _ in having), axis)
        layers.append(join.layer([layer for _, layer in having], len(pieces)))
    indices = [layer.origin.layer for layer in layers if layer.origin is not None]
    if axis == _HEADS and set(indices) == set(range(len(set(indices)))):
        # All layers were recorded, so the origins only repeat the order.
        plain = all(layer.origin is None or layer.origin.heads is None for layer in layers)
        layers = [replace(layer, origin=None) if plain else layer for layer in layers]
    names = ", ".join(piece.name for piece in pieces)
    return Piece(names, pieces[0].shard, tuple(layers), tuple(refused.values()))


def _module(name: str) -> str:
    """Return the module name of a layer, without the ``#2``, ``#3`` of later calls."""
    module, _, number = name.rpartition("#")
    return module if module and number.isdigit() else name


@dataclass(frozen=True)
class _Join:
    """The joining of the parts of one layer along a negative axis; ``names`` name the parts."""

    name: str
    names: tuple[str, ...]
    axis: int

    def layer(self, layers: Sequence[Layer], num_pieces: int) -> Layer:
        """Join layers; fewer than the pieces if some of those have none of the selected heads."""
        first, origin = layers[0], layers[0].origin
        if self.axis == _HEADS:
            heads = [None if each.origin is None else each.origin.heads for each in layers]
            if len(layers) == num_pieces and heads.count(heads[0]) == num_pieces:
                return first  # each process recorded the same heads
            origin = self._origin(layers, is_all=len(layers) == num_pieces)
        for name, layer in zip(self.names, layers, strict=True):
            if len(layer.shape) < -self.axis:
                shape = shape_text(layer.shape)
                raise RegardError(f"{name} has no batch in layer {self.name!r}, {shape}.")
            if _shared(self.axis, layer) != _shared(self.axis, first):
                raise RegardError(
                    f"layer {self.name!r} has shape {shape_text(first.shape)} on {self.names[0]} "
                    f"and {shape_text(layer.shape)} on {name}, or other queries, answers or grids; "
                    "they cannot be joined.\n"
                    "    Give all processes texts of one length, and observe alike."
                )
        if len(layers) == 1:
            return replace(first, origin=origin)
        shape = list(first.shape)
        shape[self.axis] = sum(layer.shape[self.axis] for layer in layers)
        axis = len(shape) + self.axis  # an answer may have other axes after the heads
        answers = first.answers.map(
            lambda asked, _: self._answer([layer.answers[asked] for layer in layers], axis)
        )
        matrices = [layer.matrix for layer in layers if layer.matrix is not None]
        values = [layer.value for layer in layers if layer.value is not None]
        num_heads = [layer.shape[_HEADS] for layer in layers]
        return replace(
            first,
            shape=torch.Size(shape),
            matrix=_lazily(self._matrix, matrices) if matrices else None,
            answers=answers,
            origin=origin,
            value=_lazily(lambda parts: self._value(parts, num_heads), values) if values else None,
        )

    def _origin(self, layers: Sequence[Layer], *, is_all: bool) -> Origin:
        """Return the origin of a layer with joined heads; its heads are None if it has all."""
        heads: list[int] = []
        for name, layer in zip(self.names, layers, strict=True):
            numbers = () if layer.origin is None else layer.origin.heads or ()
            if not numbers or set(numbers) & set(heads):
                raise RegardError(
                    f"layer {self.name!r} has heads {list(numbers)} on {name}, and {heads} before "
                    "it; they are not parts of one layer."
                )
            heads += numbers
        has_all = is_all and heads == list(range(len(heads)))
        return Origin(cast(Origin, layers[0].origin).layer, None if has_all else tuple(heads))

    def _matrix(self, parts: Sequence[AttentionMatrix]) -> AttentionMatrix:
        self._check("dtype", [dtype_text(part.dtype) for part in parts])
        self._check("device", [str(part.device) for part in parts])
        sources: list[Any] = [part.source for part in parts]
        are_queries = all(isinstance(source, QueryKeyScores) for source in sources)
        if are_queries and len({source.group for source in sources}) > 1:
            sources = [replace(each, key=_repeated(each.key, each.group)) for each in sources]
        self._check("score_mod, scale or bias", [_structure(source) for source in sources])
        lengths = [part.shape[self.axis] for part in parts]
        source = self._mapped(sources, lengths, 2 if are_queries else 1)
        mask = self._mask(parts, lengths, source.shape)
        bound = None if mask is None else mask.bind(source.shape, source.device)
        return AttentionMatrix(source, bound)

    def _mask(
        self, parts: Sequence[AttentionMatrix], lengths: Sequence[int], shape: torch.Size
    ) -> Mask | None:
        masks = [
            None if part.mask is None else part.mask.bind(part.shape, part.device) for part in parts
        ]
        if len({_structure(mask) for mask in masks}) == 1:
            return None if masks[0] is None else self._mapped(masks, lengths, 0)

        # Parts may have different kinds of masks: a text without padding may have none.
        def allowed(rows: slice) -> Tensor:
            both = zip(masks, parts, strict=True)
            blocks = [allowed_rows(mask, rows, part.shape, part.device) for mask, part in both]
            return self._cat(blocks, lengths)

        leading = allowed(slice(0, 1)).shape[:-2]
        return recognised_rows(allowed, torch.Size((*leading, *shape[-2:])), shape)

    def _mapped(self, wholes: Sequence[Any], lengths: Sequence[int], num_full: int) -> Any:
        """Join sources of scores, or masks, of one structure by concatenating their tensors.

        The first ``num_full`` tensors have the full axis; that of others may broadcast.
        ``lengths`` has the length of the axis in each matrix.
        """
        tensors: list[Tensor] = []
        for index, parts in enumerate(zip(*map(mapped_tensors, wholes), strict=True)):
            if index < num_full:
                tensors.append(torch.cat(parts, self.axis))
            elif all(x.shape[self.axis] == 1 and torch.equal(x, parts[0]) for x in parts):
                tensors.append(parts[0])
            else:
                tensors.append(self._cat(parts, lengths))
        following = iter(tensors)

        def replaced(_: Tensor) -> Tensor:
            return next(following)

        return wholes[0].map(replaced)

    def _cat(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """Concatenate tensors whose axes have their full length or 1."""
        wide = [max(axis) for axis in zip(*(part.shape for part in parts), strict=True)]
        before, after = wide[: self.axis], wide[self.axis + 1 :]
        both = zip(parts, lengths, strict=True)
        expanded = [part.expand(*before, length, *after) for part, length in both]
        return torch.cat(expanded, self.axis)

    def _value(self, parts: Sequence[Tensor], num_heads: Sequence[int]) -> Tensor:
        self._check("dtype", [dtype_text(part.dtype) for part in parts])
        groups = [n // part.shape[_HEADS] for n, part in zip(num_heads, parts, strict=True)]
        if len(set(groups)) > 1:
            parts = [_repeated(*each) for each in zip(parts, groups, strict=True)]
        return torch.cat(list(parts), self.axis)

    def _answer(self, parts: Sequence[Any], axis: int) -> Any:
        if all(isinstance(part, Top) for part in parts):
            return Top(*(torch.cat(each, axis) for each in zip(*parts, strict=True)))
        if not all(isinstance(part, Tensor) and part.ndim > axis for part in parts):
            raise RegardError(
                f"layer {self.name!r} has an answer that is not one for each head and text; "
                'it cannot be joined.\n    Observe with keep="qk", and ask the recording.'
            )
        return torch.cat(list(parts), axis)

    def _check(self, what: str, facts: Sequence[object]) -> None:
        """Raise an error if the parts differ in a property."""
        for name, fact in zip(self.names, facts, strict=True):
            if fact != facts[0]:
                values = f", {facts[0]} and {fact}" if isinstance(fact, str) else ""
                raise RegardError(
                    f"layer {self.name!r} has another {what} on {name} than on {self.names[0]}"
                    f"{values}.\n    Run the same model on all processes."
                )


def _shared(axis: int, layer: Layer) -> tuple[object, ...]:
    """Return the facts of a layer that all parts along an axis must share."""
    shape = list(layer.shape)
    shape[axis] = 0
    kept = layer.matrix is None, layer.value is None
    return shape, layer.queries, list(layer.answers), kept, layer.grids


def _lazily(
    join: Callable[[Sequence[Content]], Content], reads: Sequence[Callable[[], Content]]
) -> Callable[[], Content]:
    """Return a function for the joined result; parts in memory are joined immediately."""
    if all(isinstance(read, InMemory) for read in reads):
        return InMemory(join([read() for read in reads]))
    return lambda: join([read() for read in reads])


def _repeated(tensor: Tensor, group: int) -> Tensor:
    """Return keys or values with one head for each query head."""
    return tensor.repeat_interleave(group, _HEADS)


def _structure(whole: object) -> object:
    """Return the types and fields of a source or a mask, without its tensors."""
    if isinstance(whole, Tensor):
        return Tensor
    if is_dataclass(whole) and not isinstance(whole, type):
        return type(whole), *(_structure(getattr(whole, each.name)) for each in fields(whole))
    return whole
