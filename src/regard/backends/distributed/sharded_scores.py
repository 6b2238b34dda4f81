"""Scores of a query and a key that are DTensors: where each process has which rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor

from regard.errors import is_sharded, shape_text
from regard.masks import Mask
from regard.masks.row_slice import row_slice_of
from regard.scores.box import Box, Cut, Index, broadcast_index
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores
from regard.scores.scratch import Scratch

__all__ = ["RowOrder", "RowsOfWhole", "ShardedScores", "parts_by_head", "rows_of_mask"]

RowOrder = Literal["contiguous", "zigzag"]
"""Which rows a process has: neighbours, or chunks r and 2n - 1 - r of 2n, as process r of n."""


@final
@dataclass(frozen=True, eq=False)
class ShardedScores(Scores):
    """Scores of DTensors: softcap(scale · query·key), with the rows of a matrix on several ranks.

    Attributes:
        query: DTensor (..., num_heads, q_len, head_dim).
        key: DTensor (..., num_kv_heads, kv_len, head_dim), with the query's placements.
        scale: multiplies query·key.
        softcap: as in ``attend``.
        rows: the order of the rows.
    """

    query: Any
    key: Any
    scale: float
    softcap: float | None
    rows: RowOrder

    def __post_init__(self) -> None:
        self._check_placements()
        if self.rows not in ("contiguous", "zigzag"):
            raise ValueError(
                f"rows is {self.rows!r}; it must be 'contiguous' or 'zigzag'.\n"
                "    A process has neighbouring rows, or chunks r and 2n - 1 - r of 2n."
            )
        for name, axis, tensor in (("query", "q_len", self.query), ("key", "kv_len", self.key)):
            length, chunks = tensor.shape[-2], self.ranks * (2 if self.rows == "zigzag" else 1)
            if length % chunks:
                raise ValueError(
                    f"{name} has {axis} {length}; with rows={self.rows!r} on {self.ranks} ranks it "
                    f"must be a multiple of {chunks}.\n    Pad the text, and hide the padding by "
                    "mask=Padding(lengths)."
                )

    def _check_placements(self) -> None:
        query, key = self.query, self.key
        if not (is_sharded(query) and is_sharded(key)):
            name = "key" if is_sharded(query) else "query"
            raise TypeError(
                f"{name} is an ordinary tensor, the other a DTensor; both must be DTensors.\n"
                f"    Use torch.distributed.tensor.distribute_tensor({name}, mesh, placements)."
            )
        if query.device_mesh != key.device_mesh or query.placements != key.placements:
            raise ValueError(
                f"key lies on {key.device_mesh} as {key.placements} and query on "
                f"{query.device_mesh} as {query.placements}; both must lie alike.\n"
                "    Use key.redistribute(query.device_mesh, query.placements)."
            )
        row_axis, axes = query.ndim - 2, [_axis(place) for place in query.placements]
        known = all(
            (axis is not None and axis < query.ndim - 1) or place.is_replicate()
            for axis, place in zip(axes, query.placements, strict=True)
        )
        split = [axis for axis in axes if axis is not None]
        if not known or len(set(split)) < len(split) or row_axis not in split:
            raise ValueError(
                f"query has placements {query.placements}; one mesh axis must be "
                f"Shard({row_axis}), its rows, and each other one Replicate() or Shard of a batch "
                "axis or of the heads.\n    Use query.redistribute(placements=...)."
            )
        for size, axis in zip(query.device_mesh.shape, axes, strict=True):
            for name, tensor in (("query", query), ("key", key)):
                if axis is not None and axis < row_axis and tensor.shape[axis] % size:
                    raise ValueError(
                        f"{name} has {tensor.shape[axis]} on axis {axis}, such as heads; a mesh "
                        f"axis of {size} ranks must divide it.\n    Use a smaller mesh axis."
                    )

    @property
    def row_dim(self) -> int:
        """The mesh axis of the rows."""
        return [_axis(place) for place in self.query.placements].index(self.query.ndim - 2)

    @property
    def ranks(self) -> int:
        """The number of ranks that the rows lie on."""
        return int(self.query.device_mesh.shape[self.row_dim])

    @property
    def splits_leading(self) -> bool:
        """True if batch entries or heads lie on several ranks, too."""
        return any(_axis(place) is not None for place in self.placed(None))

    def placed(self, rows: Any) -> list[Any]:
        """Return the query's placements with another one for the rows; None leaves it out."""
        places = list(self.query.placements)
        if rows is None:
            del places[self.row_dim]
        else:
            places[self.row_dim] = rows
        return places

    def chunks(self, length: int, rank: int) -> list[range]:
        """Return the rows, or keys, of a rank, in the order in which they lie there."""
        if self.rows == "contiguous":
            n = length // self.ranks
            return [range(rank * n, (rank + 1) * n)]
        n = length // (2 * self.ranks)
        return [range(i * n, (i + 1) * n) for i in (rank, 2 * self.ranks - 1 - rank)]

    def gathered(self, tensor: Any) -> Tensor:
        """Return all tokens of a DTensor in their natural order; its gradient is scattered."""
        from torch.distributed.tensor import Partial, Replicate  # PyTorch imports them late

        whole = tensor.redistribute(placements=self.placed(Replicate()))
        local: Tensor = whole.to_local(grad_placements=self.placed(Partial()))
        if self.rows == "contiguous":
            return local
        lies = [part for rank in range(self.ranks) for part in self.chunks(local.shape[-2], rank)]
        split = local.split_with_sizes([len(part) for part in lies], -2)
        pieces = dict(zip(lies, split, strict=True))
        return torch.cat([pieces[part] for part in sorted(lies, key=lambda part: part.start)], -2)

    def kv_heads(self) -> list["ShardedScores"]:
        """Return the scores of each key head of this rank, with the query heads of its group."""
        count = self.local_kv_heads
        if count < 2:
            return [self]
        pairs = zip(parts_by_head(self.query, count), parts_by_head(self.key, count), strict=True)
        return [replace(self, query=query, key=key) for query, key in pairs]

    @property
    def local_kv_heads(self) -> int:
        """The number of key heads of this rank; 1 without an axis of heads."""
        return int(self.key.to_local().shape[-3]) if self.key.ndim > 2 else 1

    def local(self) -> list[tuple[range, QueryKeyScores]]:
        """Return the rows of this rank, each run of neighbours with its scores."""
        key = self.gathered(self.key)
        query: Tensor = self.query.to_local()
        rank = self.query.device_mesh.get_local_rank(self.row_dim)
        ranges = self.chunks(self.query.shape[-2], rank)
        pieces = query.split_with_sizes([len(rows) for rows in ranges], -2)
        return [
            (rows, QueryKeyScores(piece, key, self.scale, softcap=self.softcap))
            for rows, piece in zip(ranges, pieces, strict=True)
        ]

    def local_mask(self, mask: Mask | None) -> Mask | None:
        """Return the mask for the batch entries and heads of this rank, and all rows."""
        if mask is None:
            return None
        index = [slice(None)] * (self.query.ndim - 2)
        mesh = self.query.device_mesh
        for dim, place in enumerate(self.query.placements):
            axis = _axis(place)
            if axis is not None and axis < self.query.ndim - 2:
                n = self.query.shape[axis] // mesh.shape[dim]
                rank = mesh.get_local_rank(dim)
                index[axis] = slice(rank * n, (rank + 1) * n)
        return mask.map(lambda tensor: broadcast_index(tensor, index))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.query.shape[:-1], self.key.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.query, self.key)

    @property
    def facts(self) -> list[str]:
        return [f"scale={self.scale:.4g}", f"rows={self.rows} on {self.ranks} ranks"]

    def map(self, function: Callable[[Tensor], Tensor]) -> "ShardedScores":
        query, key = function(self.query), function(self.key)
        return ShardedScores(query, key, self.scale, self.softcap, self.rows)

    def select(self, index: Index) -> NoReturn:
        raise ValueError(
            f"the index takes a part of the batch or of the heads; a matrix of DTensors, "
            f"{shape_text(self.shape)}, is asked whole.\n"
            "    Take the part of query and key first, or the part of the answer."
        )

    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> NoReturn:
        raise ValueError(
            "the scores of a matrix of DTensors lie on several ranks.\n"
            "    Ask for weights instead, A[..., rows, columns]."
        )

    def sink(self, box: Box, cut: Cut) -> None:
        return None


@final
@dataclass(frozen=True, eq=False)
class RowsOfWhole(Scores):
    """The scores of some rows, at their positions in the whole matrix.

    Attributes:
        part: the scores of the rows.
        rows: their positions.
        q_len: the number of rows of the whole matrix.
    """

    part: QueryKeyScores
    rows: range
    q_len: int

    @property
    def shape(self) -> torch.Size:
        *leading, _, columns = self.part.shape
        return torch.Size((*leading, self.q_len, columns))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.part.tensors

    @property
    def group(self) -> int:
        return self.part.group

    @property
    def facts(self) -> list[str]:
        return self.part.facts

    def select(self, index: Index) -> "RowsOfWhole":
        return RowsOfWhole(self.part.select(index), self.rows, self.q_len)

    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> Tensor:
        return self.part.block(self._moved(box), cut, scratch)

    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        return self.part.sink(self._moved(box), cut)

    def map(self, function: Callable[[Tensor], Tensor]) -> "RowsOfWhole":
        return RowsOfWhole(self.part.map(function), self.rows, self.q_len)

    def _moved(self, box: Box) -> Box:
        start = self.rows.start
        return box._replace(rows=slice(box.rows.start - start, box.rows.stop - start))


def parts_by_head(tensor: Any, count: int) -> list[Any]:
    """Return the parts of a DTensor's heads that belong to each of ``count`` key heads."""
    from torch.distributed.tensor import DTensor

    local: Tensor = tensor.to_local()
    if local.shape[-3] % count:  # one head for all
        return [tensor] * count
    parts: Sequence[Tensor] = local.split_with_sizes([local.shape[-3] // count] * count, -3)
    return [
        DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False)
        for part in parts
    ]


def rows_of_mask(mask: Mask | None, rows: range, q_len: int) -> Mask | None:
    """Return the mask of some rows; None for None."""
    return None if mask is None else row_slice_of(mask, rows, q_len)


def _axis(place: Any) -> int | None:
    """Return the axis that a placement splits, None for another placement."""
    return int(place.dim) if place.is_shard() else None
