"""Scores of a query and a key that are DTensors: where each process has which rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn, cast, final

import torch
from torch import Tensor

from regard.errors import is_sharded, refuse_sharded, shape_text
from regard.masks import Mask
from regard.scores.box import Box, Cut, Index, broadcast_index
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores
from regard.scores.scratch import Scratch

RowOrder = Literal["contiguous", "zigzag"]
"""The rows that a process has: neighbours, or ranges r and 2n - 1 - r of 2n, as process r of n."""


class Run(NamedTuple):
    """Neighbouring rows of a matrix that lie on one rank.

    Attributes:
        rows: their positions in the matrix.
        source: their scores.
        mask: their mask; None: all keys.
    """

    rows: range
    source: QueryKeyScores
    mask: Mask | None


@final
@dataclass(frozen=True, eq=False)
class ShardedScores(Scores):
    """Scores of DTensors: those of a query and a key, with the rows of a matrix on several ranks.

    Attributes:
        whole: the scores. The query is a DTensor, the key one with the query's placements. A bias
            may be one, with its rows in the order of the query. All other tensors are equal on all
            ranks.
        rows: the order of the rows.
    """

    whole: QueryKeyScores
    rows: RowOrder

    def __post_init__(self) -> None:
        self._check_placements()
        self._check_bias()
        if self.rows not in ("contiguous", "zigzag"):
            raise ValueError(
                f"rows is {self.rows!r}; it must be 'contiguous' or 'zigzag'.\n"
                "    A process has neighbouring rows, or ranges r and 2n - 1 - r of 2n."
            )
        for name, axis, tensor in (("query", "q_len", self.query), ("key", "kv_len", self.key)):
            length, ranges = tensor.shape[-2], self.ranks * (2 if self.rows == "zigzag" else 1)
            if length % ranges:
                raise ValueError(
                    f"{name} has {axis} {length}; with rows={self.rows!r} on {self.ranks} ranks it "
                    f"must be a multiple of {ranges}.\n    Pad the text, and hide the padding by "
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
                f"{query.device_mesh} as {query.placements}; both must have the same mesh and "
                "placements.\n"
                "    Use key.redistribute(query.device_mesh, query.placements)."
            )
        if query.shape[:-3] != key.shape[:-3]:
            raise ValueError(
                f"key has shape {shape_text(key.shape)} and query {shape_text(query.shape)}; "
                "batch axes of DTensors must be equal.\n    Use expand() on the shorter one."
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

    def _check_bias(self) -> None:
        query, bias, position_bias = (
            self.query,
            cast(Any, self.whole.bias),
            self.whole.position_bias,
        )
        for tensor in () if position_bias is None else position_bias.tensors:
            refuse_sharded("bias", tensor)
        if not is_sharded(bias):
            return
        fit = zip(bias.shape, self.shape, strict=False)
        if bias.ndim != query.ndim or any(n not in (1, full) for n, full in fit):
            raise ValueError(
                f"bias has shape {shape_text(bias.shape)}; a DTensor must have all axes of the "
                f"matrix, {shape_text(self.shape)}, each of full length or 1.\n"
                "    Use bias[None] for an axis of length 1."
            )
        places = zip(bias.placements, query.placements, strict=False)
        if bias.device_mesh != query.device_mesh or not all(
            place.is_replicate() or place == of_query for place, of_query in places
        ):
            raise ValueError(
                f"bias lies on {bias.device_mesh} as {bias.placements} and query on "
                f"{query.device_mesh} as {query.placements}; each mesh axis must hold the bias as "
                "it holds the query, or be Replicate().\n"
                "    Use bias.redistribute(query.device_mesh, query.placements)."
            )

    @property
    def query(self) -> Any:
        """The query, a DTensor (..., num_heads, q_len, head_dim)."""
        return self.whole.query

    @property
    def key(self) -> Any:
        """The key, a DTensor (..., num_kv_heads, kv_len, head_dim)."""
        return self.whole.key

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

    def ranges(self, length: int, rank: int) -> list[range]:
        """Return the rows, or keys, of a rank, in the order in which they lie there."""
        if self.rows == "contiguous":
            n = length // self.ranks
            return [range(rank * n, (rank + 1) * n)]
        n = length // (2 * self.ranks)
        return [range(i * n, (i + 1) * n) for i in (rank, 2 * self.ranks - 1 - rank)]

    def gathered(self, own: Tensor) -> Tensor:
        """Return all tokens, in their natural order, from this rank's; the gradient is scattered.

        Args:
            own: this rank's tokens, as they lie there, (..., tokens, dim).
        """
        from torch.distributed.tensor import (
            DTensor,
            Partial,
            Replicate,
        )  # PyTorch imports them late

        query = self.query
        sharded = DTensor.from_local(own, query.device_mesh, query.placements, run_check=False)
        whole = sharded.redistribute(placements=self.placed(Replicate()))
        local: Tensor = whole.to_local(grad_placements=self.placed(Partial()))
        if self.rows == "contiguous":
            return local
        lies = [part for rank in range(self.ranks) for part in self.ranges(local.shape[-2], rank)]
        split = local.split_with_sizes([len(part) for part in lies], -2)
        parts = dict(zip(lies, split, strict=True))
        return torch.cat([parts[part] for part in sorted(lies, key=lambda part: part.start)], -2)

    @property
    def local_kv_heads(self) -> int:
        """The number of key heads of this rank; 1 without an axis of heads."""
        return int(self.key.to_local().shape[-3]) if self.key.ndim > 2 else 1

    def local(self) -> QueryKeyScores:
        """Return the scores of this rank's batch entries, heads and rows; its keys are few, too.

        The gradient of a tensor that is equal on all ranks is summed over them.
        """
        whole, index = self.whole, self.leading
        position_bias, score_mod, sink = whole.position_bias, whole.score_mod, whole.sink_bias
        return replace(
            whole,
            query=self.query.to_local(),
            key=self.key.to_local(),
            bias=None if whole.bias is None else self._local_bias(whole.bias),
            position_bias=position_bias and position_bias.map(self._local_part),
            score_mod=score_mod and score_mod.map(lambda ids: broadcast_index(ids, index)),
            sink_bias=None if sink is None else self._local_part(sink),
        )

    def _local_bias(self, bias: Any) -> Tensor:
        """Return the bias of this rank's batch entries, heads and rows, in the query's order."""
        if not is_sharded(bias):
            part = self._local_part(bias)
            runs = [part[..., rows.start : rows.stop, :] for rows in self.local_rows]
            return (
                part if part.shape[-2] == 1 else runs[0] if len(runs) < 2 else torch.cat(runs, -2)
            )
        from torch.distributed.tensor import Replicate

        places = [
            place if axis is not None and bias.shape[axis] > 1 else Replicate()
            for place in self.query.placements
            for axis in [_axis(place)]
        ]
        arriving = [
            place if place.is_shard() else summed
            for place, summed in zip(places, self._summed, strict=True)
        ]
        found: Tensor = bias.redistribute(placements=places).to_local(grad_placements=arriving)
        return found

    def _local_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's batch entries and heads of a tensor that all ranks have."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        everywhere = [Replicate() for _ in self.query.placements]
        for dim, place in enumerate(self._summed):
            if tensor.requires_grad and isinstance(place, Partial):
                arriving = [*everywhere[:dim], place, *everywhere[dim + 1 :]]
                mesh = self.query.device_mesh
                same = DTensor.from_local(tensor, mesh, everywhere, run_check=False)
                tensor = same.to_local(grad_placements=arriving)  # one sum at a time
        return broadcast_index(tensor, self.leading)

    @property
    def _summed(self) -> list[Any]:
        """The placements of a gradient to which each rank adds that of its part of the matrix."""
        from torch.distributed.tensor import Partial

        places = self.query.placements
        return [place if place.is_replicate() else Partial() for place in places]

    @property
    def local_rows(self) -> list[range]:
        """The rows of this rank, in the order in which they lie there."""
        rank = self.query.device_mesh.get_local_rank(self.row_dim)
        return self.ranges(self.query.shape[-2], rank)

    def runs(self, part: QueryKeyScores, mask: Mask | None) -> list[Run]:
        """Return each run of neighbouring rows of this rank.

        Args:
            part: the scores of all rows of this rank.
            mask: the mask of all rows of all ranks.
        """
        runs: list[Run] = []
        q_len, start = self.shape[-2], 0
        for rows in self.local_rows:
            at, start = slice(start, start + len(rows)), start + len(rows)
            of_rows = None if mask is None else mask.rows(rows, q_len)
            runs.append(Run(rows, part.rows(at, rows, q_len), of_rows))
        return runs

    @property
    def leading(self) -> list[slice]:
        """The batch entries and heads of this rank."""
        index = [slice(None)] * (self.query.ndim - 2)
        mesh = self.query.device_mesh
        for dim, place in enumerate(self.query.placements):
            axis = _axis(place)
            if axis is not None and axis < self.query.ndim - 2:
                n = self.query.shape[axis] // mesh.shape[dim]
                rank = mesh.get_local_rank(dim)
                index[axis] = slice(rank * n, (rank + 1) * n)
        return index

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.whole.tensors

    @property
    def facts(self) -> list[str]:
        return [*self.whole.facts, f"rows={self.rows} on {self.ranks} ranks"]

    def map(self, function: Callable[[Tensor], Tensor]) -> "ShardedScores":
        return ShardedScores(self.whole.map(function), self.rows)

    def select(self, index: Index) -> NoReturn:
        raise ValueError(
            "the index takes a part of the batch or of the heads; a matrix of DTensors, "
            f"{shape_text(self.shape)}, has no such parts.\n"
            "    Index query and key first, or the answer."
        )

    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> NoReturn:
        raise ValueError(
            "the scores of a matrix of DTensors lie on several ranks.\n"
            "    Ask for weights instead, A[..., rows, columns]."
        )

    def sink(self, box: Box, cut: Cut) -> None:
        return None


def parts_by_head(tensor: Any, count: int) -> Sequence[Tensor]:
    """Return this rank's parts of a DTensor's heads that belong to each of ``count`` key heads."""
    local: Tensor = tensor.to_local()
    if count < 2 or local.shape[-3] % count:  # one head for all
        return [local] * count
    return local.split_with_sizes([local.shape[-3] // count] * count, -3)


def _axis(place: Any) -> int | None:
    """Return the axis that a placement splits, None for another placement."""
    return int(place.dim) if place.is_shard() else None
