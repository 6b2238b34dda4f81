"""Reductions of a matrix of DTensors: each rank sweeps its rows, and the sums are reduced.

The sums of a reduction begin at zero and take parts in any order, as DTensor's ``Partial("sum")``
does. Answers with one entry per query stay where the queries are. All others are sums over the
ranks and are equal on all of them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from regard.backends.backend import Backend
from regard.backends.distributed.sharded_scores import RowsOfWhole, ShardedScores, rows_of_mask
from regard.backends.sweep import PlainBlocks, SweepOf, filled
from regard.errors import RegardError, bytes_text, dtype_text, is_sharded, shape_text
from regard.masks import Mask
from regard.reductions.products import Output, TransposedOutput, Window
from regard.reductions.reduction import Reduction, rounded
from regard.reductions.row_statistics import Entropy, LogSumExp, NormalizedEntropy
from regard.reductions.sums import Diagonal, Pool, Segments, Sum
from regard.reductions.top_k import Top, TopK
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores, accumulation_dtype

__all__ = ["Distributed"]

# Their answers have one entry per query, (..., num_heads, q_len, ...).
_ROWS = (LogSumExp, Entropy, NormalizedEntropy, TopK, Output)
# Their answers begin with batch axes and heads.
_LEADING = (Sum, Pool, Segments, Diagonal, Window, TransposedOutput)

# All ranks must ask the same question within this time.
LIMIT = timedelta(minutes=5)
_DESCRIPTION_BYTES = 1024

_Choose = Callable[[Scores, Mask | None, Sequence[Reduction], None], Backend]


@final
class Distributed(Backend):
    """Matrices of DTensors.

    Args:
        choose: chooses the backend for the rows of one rank.
    """

    def __init__(self, choose: _Choose) -> None:
        self._choose = choose

    def applies(self, source: Scores) -> bool:
        return isinstance(source, ShardedScores)

    def refusal(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> str | None:
        if not isinstance(source, ShardedScores):
            return "it answers for DTensors alone"
        for asked in reductions:
            name = type(asked).__name__
            if not isinstance(asked, (*_ROWS, *_LEADING)):
                if source.splits_leading:
                    return f"{name} is none of regard's, and heads or batch lie on several ranks"
                if asked.tensors:
                    return f"{name} has tensors of its own, whose gradients would stay on one rank"
            operand = _operand(asked)
            if operand is not None and not (
                is_sharded(operand)
                and operand.placements == source.query.placements
                and operand.device_mesh == source.query.device_mesh
                and operand.ndim == source.query.ndim
            ):
                return f"the operand of {name} does not lie like the query, as a DTensor"
        return None

    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        sharded = cast(ShardedScores, source)
        dtype = accumulation_dtype(sharded.dtype)
        moved = [sharded.key, *(x for x in map(_operand, reductions) if x is not None)]
        gathered = sum(x.to_local().nbytes * sharded.ranks for x in moved)
        sums = sum(
            buffer.nbytes
            for asked in reductions
            if not isinstance(asked, _ROWS) and _operand(asked) is None
            for buffer in asked.start(_local_shape(sharded), dtype, torch.device("meta"))
        )
        text = f"rows on {sharded.ranks} ranks; each gathers {bytes_text(gathered)} of keys"
        if sums:
            text += f" and reduces {bytes_text(sums)} of sums"
        return text, gathered + sums

    def reduce(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[Any, ...]:
        """Return one answer for each reduction, as DTensors.

        Raises:
            RegardError: a rank asks another question, or does not ask in time.
        """
        sharded = cast(ShardedScores, source)
        _check_agreement(sharded, mask, reductions)
        parts, mask = sharded.local(), sharded.local_mask(mask)
        local = [_of_ordinary_tensors(sharded, asked) for asked in reductions]
        by_rows = [asked for asked in local if isinstance(asked, _ROWS)]
        summed = [asked for asked in local if not isinstance(asked, _ROWS)]
        rows = iter(self._by_rows(sharded, parts, mask, by_rows) if by_rows else ())
        sums = iter(_summed(sharded, parts, mask, summed) if summed else ())
        return tuple(next(rows if isinstance(asked, _ROWS) else sums) for asked in local)

    def _by_rows(
        self,
        sharded: ShardedScores,
        parts: Sequence[tuple[range, QueryKeyScores]],
        mask: Mask | None,
        reductions: Sequence[Reduction],
    ) -> list[Any]:
        """Return the answers that stay where their queries are."""
        q_len, found = sharded.shape[-2], list[tuple[Any, ...]]()
        for rows, part in parts:
            own = rows_of_mask(mask, rows, q_len)
            found.append(self._choose(part, own, reductions, None).reduce(part, own, reductions))
        return [_joined(sharded, pieces) for pieces in zip(*found, strict=True)]


def _joined(sharded: ShardedScores, pieces: Sequence[Any]) -> Any:
    """Return the answers of all rows of a rank, one after another, as its part of a DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    if isinstance(pieces[0], Top):
        return Top(*(_joined(sharded, part) for part in zip(*pieces, strict=True)))
    axis = len(sharded.shape) - 2
    places = sharded.placed(Shard(axis))
    return DTensor.from_local(
        torch.cat(list(pieces), axis), sharded.query.device_mesh, places, run_check=False
    )


def _summed(
    sharded: ShardedScores,
    parts: Sequence[tuple[range, QueryKeyScores]],
    mask: Mask | None,
    reductions: Sequence[Reduction],
) -> list[Any]:
    """Return the answers that are sums over all ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    found: list[list[tuple[Tensor, ...]]] = []
    for rows, part in parts:
        of = RowsOfWhole(part, rows, sharded.shape[-2])
        found.append(filled(SweepOf(of, mask, tuple(reductions), PlainBlocks(), rows)))
    mesh, shape = sharded.query.device_mesh, _local_shape(sharded)
    whole = sharded.placed(Replicate())
    answers: list[Any] = []
    for asked, *of_parts in zip(reductions, *found, strict=True):
        # A rank has one run of rows, or two.
        sums = [torch.stack(same).sum(0) for same in zip(*of_parts, strict=True)]
        reduced = [
            DTensor.from_local(each, mesh, sharded.placed(Partial()), run_check=False)
            .redistribute(placements=whole)
            .to_local()
            for each in sums
        ]
        answer = asked.finish(rounded(reduced, accumulation_dtype(sharded.dtype)), shape)
        if isinstance(answer, Tensor):
            answer = DTensor.from_local(answer, mesh, whole, run_check=False)
        answers.append(answer)
    return answers


def _local_shape(sharded: ShardedScores) -> torch.Size:
    """Return the shape of the batch entries and heads of this rank, with all rows and columns."""
    leading: torch.Size = sharded.query.to_local().shape[:-2]
    return torch.Size((*leading, *sharded.shape[-2:]))


def _operand(asked: Reduction) -> Any:
    match asked:
        case Output(value):
            return value
        case TransposedOutput(operand):
            return operand
        case _:
            return None


def _of_ordinary_tensors(sharded: ShardedScores, asked: Reduction) -> Reduction:
    """Return the reduction with its operand gathered."""
    operand = _operand(asked)
    return asked if operand is None else cast(Any, type(asked))(sharded.gathered(operand))


def _described(asked: Reduction) -> str:
    """Return the name and the settings of a reduction, without operands that are DTensors."""
    names = [each.name for each in fields(asked)] if is_dataclass(asked) else []
    values = {name: getattr(asked, name) for name in names}
    said = [f"{name}={value!r}" for name, value in values.items() if not is_sharded(value)]
    return f"{type(asked).__name__}({', '.join(said)})"


def _fingerprint(tensor: Tensor) -> int:
    """Return a number that almost always differs for masks with other contents."""
    number = 0
    for axis in range(tensor.ndim):
        others = [each for each in range(tensor.ndim) if each != axis]
        sums = tensor.sum(others, dtype=torch.int64) if others else tensor.long()
        number += (axis + 1) * int(
            (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
        )
    return number


def _check_agreement(
    sharded: ShardedScores, mask: Mask | None, reductions: Sequence[Reduction]
) -> None:
    """Check that all ranks ask the same, before a rank waits for another one for ever."""
    query, key, mesh = sharded.query, sharded.key, sharded.query.device_mesh
    own = {
        "query": f"{shape_text(query.shape)} {dtype_text(query.dtype)}",
        "key": f"{shape_text(key.shape)} {dtype_text(key.dtype)}",
        "scale": sharded.scale,
        "softcap": sharded.softcap,
        "rows": sharded.rows,
        "mask": None if mask is None else (mask.text, [*map(_fingerprint, mask.tensors)]),
        "reductions": list(map(_described, reductions)),
        "gradients": torch.is_grad_enabled(),
    }
    text = json.dumps(own).encode()
    digest = sha256(text).hexdigest().encode()  # of what the next line cuts off, too
    text = text[: _DESCRIPTION_BYTES - len(digest)].ljust(_DESCRIPTION_BYTES - len(digest))
    mine = torch.tensor(list(text + digest), dtype=torch.uint8, device=mesh.device_type)
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        ranks = dist.get_process_group_ranks(group)
        found = [torch.zeros_like(mine) for _ in ranks]
        try:
            cast(Any, dist.all_gather(found, mine, group=group, async_op=True)).wait(LIMIT)
        except RuntimeError as error:
            raise RegardError(
                f"not all of the ranks {ranks} asked this question within {LIMIT.seconds} s "
                f"({str(error).splitlines()[0]}).\n"
                "    Look for a rank that died, or that asks another question."
            ) from error
        for rank, theirs in zip(ranks, found, strict=True):
            if not torch.equal(theirs, mine):
                numbers = cast(list[int], theirs.tolist())
                said = bytes(numbers[: len(text)]).decode(errors="replace").strip()
                raise RegardError(
                    f"rank {rank} asks another question than rank {dist.get_rank()}: {said} and "
                    f"{text.decode(errors='replace').strip()}.\n"
                    "    All ranks must give the same shapes, dtypes and arguments."
                )
