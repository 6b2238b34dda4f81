"""Reductions of a matrix of DTensors: each rank sweeps its rows, and the sums are reduced.

The sums of a reduction begin at zero and take parts in any order, as DTensor's ``Partial("sum")``
does. Answers with one entry per query stay where the queries are. All others are sums over the
ranks and are equal on all of them.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import starmap
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from regard.backends.backend import Backend, Between, nothing
from regard.backends.distributed.sharded_scores import Run, ShardedScores, parts_by_head
from regard.backends.sweep import PlainBlocks, SweepTask, fill_buffers
from regard.errors import (
    RegardError,
    bytes_text,
    check_memory,
    dtype_text,
    is_sharded,
    shape_text,
)
from regard.masks import Mask
from regard.masks.mask import selected
from regard.reductions.reduction import Reduction, rounded
from regard.reductions.template import map_tensors
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores, accumulation_dtype

# All ranks must ask the same question within this time.
LIMIT = timedelta(minutes=5)
# After an error, a rank waits this long to learn whether the others still run.
_PROBE = timedelta(seconds=5)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

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
            if not asked.by_heads:
                if source.splits_leading:
                    return f"{name} has no by_heads, and heads or batch lie on several ranks"
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
        gathered = _gathered_bytes(sharded, reductions)
        heads = _head_count(sharded, reductions)
        sums = sum(
            buffer.nbytes
            for asked in reductions
            if not asked.by_rows and _operand(asked) is None
            for buffer in asked.start(_local_shape(sharded), dtype, torch.device("meta"))
        )
        text = f"rows on {sharded.ranks} ranks; each gathers {bytes_text(gathered)} of keys"
        if heads > 1:
            text += f", {bytes_text(gathered // heads)} at a time"
        if sums:
            text += f" and reduces {bytes_text(sums)} of sums"
        return text, gathered // heads + sums

    def reduce(
        self,
        source: Scores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between = nothing,
    ) -> tuple[Any, ...]:
        """Return one answer for each reduction, as DTensors.

        Raises:
            MemoryError: the keys that a rank gathers at once exceed the memory of its device.
            RegardError: a rank makes another call, makes none in time, or dies.
        """
        sharded = cast(ShardedScores, source)
        _check_gathered(sharded, reductions)
        _check_presence(sharded.query.device_mesh, LIMIT)
        _check_agreement(sharded, mask, reductions, between)
        try:
            return self._reduce(sharded, mask, reductions, _agreed(sharded, between))
        except RuntimeError:
            _check_presence(sharded.query.device_mesh, _PROBE)
            raise

    def _reduce(
        self,
        sharded: ShardedScores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between,
    ) -> tuple[Any, ...]:
        local, mask = sharded.local(), selected(mask, sharded.leading)
        count = _head_count(sharded, reductions)
        asked_of = [_by_head(asked, count) for asked in reductions]
        found: list[tuple[Any, ...]] = []
        for head, key in enumerate(parts_by_head(sharded.key, count)):
            between(head, count)
            part, of_head = local, mask
            if count > 1:
                heads = slice(head * local.group, (head + 1) * local.group)
                index = (*[slice(None)] * (len(local.shape) - 3), heads)
                part, of_head = local.select(index), selected(mask, index)
            part = replace(part, key=key)
            asked = [each[head] for each in asked_of]
            found.append(self._local(sharded, part, of_head, asked))
        between(count, count)
        same = zip(*found, strict=True)
        return tuple(starmap(partial(_joined, sharded), zip(reductions, same, strict=True)))

    def _local(
        self,
        sharded: ShardedScores,
        part: QueryKeyScores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
    ) -> tuple[Any, ...]:
        """Return the part of each answer that this rank's rows give."""
        runs = sharded.runs(replace(part, key=sharded.gathered(part.key)), mask)
        local = [map_tensors(asked, sharded.gathered) for asked in reductions]
        by_rows = [asked for asked in local if asked.by_rows]
        summed = [asked for asked in local if not asked.by_rows]
        rows = iter(self._by_rows(sharded, runs, by_rows) if by_rows else ())
        sums = iter(_summed(sharded, runs, summed) if summed else ())
        return tuple(next(rows if asked.by_rows else sums) for asked in local)

    def _by_rows(
        self,
        sharded: ShardedScores,
        runs: Sequence[Run],
        reductions: Sequence[Reduction],
    ) -> list[Any]:
        """Return the answers that stay where their queries are."""
        answers = [
            self._choose(source, mask, reductions, None).reduce(source, mask, reductions)
            for _, source, mask in runs
        ]
        axis = sharded.query.ndim - 2
        return [_side_by_side(of_runs, axis) for of_runs in zip(*answers, strict=True)]


def _head_count(sharded: ShardedScores, reductions: Sequence[Reduction]) -> int:
    """Return the number of key heads; 1 if an answer is not ``by_heads``."""
    return sharded.local_kv_heads if all(asked.by_heads for asked in reductions) else 1


def _gathered_bytes(sharded: ShardedScores, reductions: Sequence[Reduction]) -> int:
    """Return the bytes that a rank gathers for all of its heads."""
    moved = [sharded.key, *_operands(reductions)]
    return sum(int(tensor.to_local().nbytes) * sharded.ranks for tensor in moved)


def _check_gathered(sharded: ShardedScores, reductions: Sequence[Reduction]) -> None:
    """Raise an error if one key head does not fit on a device, before a rank gathers it."""
    count, limit = _head_count(sharded, reductions), _device_memory(sharded.device)
    for tensor in (sharded.key, *_operands(reductions)):
        *leading, tokens, dim = tensor.to_local().shape
        if count > 1 and leading[-1] % count == 0:
            leading[-1] //= count
        shape = (*leading, tokens * sharded.ranks, dim)
        remedy = (
            "The limit is the memory of one device. Use a smaller dtype, or take parts of the key."
        )
        check_memory("gathering one key head", shape, sharded.dtype, limit, remedy)


def _device_memory(device: torch.device) -> int | None:
    """Return the bytes that a device has in all; None if unknown."""
    if device.type == "cuda":
        return int(cast(Any, torch.cuda.get_device_properties(device)).total_memory)
    if device.type == "cpu" and sys.platform != "win32":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _by_head(asked: Reduction, count: int) -> list[Reduction]:
    """Return a reduction for each key head, with this rank's part of the operand."""
    operand = _operand(asked)
    if operand is None:
        return [asked] * count
    parts = parts_by_head(operand, count)
    return [map_tensors(asked, lambda _, part=part: part) for part in parts]


def _side_by_side(answers: Sequence[Any], axis: int) -> Any:
    if len(answers) == 1:
        return answers[0]
    return tree_map(lambda *parts: torch.cat(parts, axis), *answers)


def _joined(sharded: ShardedScores, asked: Reduction, answers: Sequence[Any]) -> Any:
    """Return the answers of all heads of a rank as its part of a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rows = Shard(len(sharded.shape) - 2) if asked.by_rows else Replicate()

    def placed(local: Any) -> Any:
        if not isinstance(local, Tensor):
            return local
        mesh = sharded.query.device_mesh
        return DTensor.from_local(local, mesh, sharded.placed(rows), run_check=False)

    return tree_map(placed, _side_by_side(answers, len(sharded.shape) - 3))


def _summed(
    sharded: ShardedScores, runs: Sequence[Run], reductions: Sequence[Reduction]
) -> list[Any]:
    """Return the answers that are sums over all ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    tasks = [
        SweepTask(source, mask, tuple(reductions), PlainBlocks(), (rows, sharded.shape[-2]))
        for rows, source, mask in runs
    ]
    filled, shape = list(map(fill_buffers, tasks)), tasks[0].shape
    mesh = sharded.query.device_mesh
    answers: list[Any] = []
    for asked, *of_parts in zip(reductions, *filled, strict=True):
        # A rank has one run of rows, or two.
        sums = [torch.stack(same).sum(0) for same in zip(*of_parts, strict=True)]
        reduced = [
            DTensor.from_local(each, mesh, sharded.placed(Partial()), run_check=False)
            .redistribute(placements=sharded.placed(Replicate()))
            .to_local()
            for each in sums
        ]
        answers.append(asked.finish(rounded(reduced, accumulation_dtype(sharded.dtype)), shape))
    return answers


def _local_shape(sharded: ShardedScores) -> torch.Size:
    """Return the shape of the batch entries and heads of this rank, with all rows and columns."""
    leading: torch.Size = sharded.query.to_local().shape[:-2]
    return torch.Size((*leading, *sharded.shape[-2:]))


def _operand(asked: Reduction) -> Any:
    return next(iter((*asked.needs.values, *asked.needs.operands)), None)


def _operands(reductions: Sequence[Reduction]) -> list[Any]:
    return [x for x in map(_operand, reductions) if x is not None]


def _described(asked: Reduction) -> str:
    """Return the name and the settings of a reduction, without operands that are DTensors."""
    names = [each.name for each in fields(asked)] if is_dataclass(asked) else []
    values = {name: getattr(asked, name) for name in names}
    said = [f"{name}={value!r}" for name, value in values.items() if not is_sharded(value)]
    return f"{type(asked).__name__}({', '.join(said)})"


def _content(tensor: Tensor) -> str | int:
    """Return a description that almost always differs for tensors with other contents.

    Of a DTensor, whose contents differ from rank to rank, it has only the form.
    """
    if is_sharded(tensor):
        return f"{shape_text(tensor.shape)} {dtype_text(tensor.dtype)}"
    bits = tensor.detach()
    if bits.is_floating_point():
        bits = bits.contiguous().view(_BITS[bits.element_size()])
    number = 0
    for axis in range(bits.ndim):
        others = [each for each in range(bits.ndim) if each != axis]
        sums = bits.sum(others, dtype=torch.int64) if others else bits.long()
        number += (axis + 1) * int(
            (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
        )
    return number


def _check_presence(mesh: Any, limit: timedelta) -> None:
    """Check that all ranks get here within a time; gloo alone names a rank that does not."""
    for group in map(mesh.get_group, range(mesh.ndim)):
        if dist.get_backend(group) == "gloo":
            try:
                dist.monitored_barrier(group, limit, wait_all_ranks=True)
            except RuntimeError as error:
                raise _absent(dist.get_process_group_ranks(group), limit, error) from error


def _absent(ranks: Sequence[int], limit: timedelta, error: RuntimeError) -> RegardError:
    """Return the error for ranks that did not ask; ``ranks`` are those of a process group."""
    reason = str(error).splitlines()[0]
    named = re.search(r"Ranks ([\d, ]+) failed", reason)
    if named is None:
        who = f"some of the ranks {list(ranks)} did not ask"
        after = f" ({reason})"
    else:
        missing = [str(ranks[int(number)]) for number in re.findall(r"\d+", named[1])]
        who, after = f"rank {', '.join(missing)} did not ask", ""
    return RegardError(
        f"{who} this question within {limit.total_seconds():.0f} s{after}.\n"
        "    Look for a rank that died, or that makes another call."
    )


def _agreed(sharded: ShardedScores, between: Between) -> Between:
    """Return a ``Between`` that ends the pass of all ranks where that of one rank raises."""
    if between is nothing:
        return nothing
    mesh = sharded.query.device_mesh

    def agreed(done: int, total: int) -> None:
        error: BaseException | None = None
        try:
            between(done, total)
        except BaseException as found:  # noqa: BLE001 - raised below, when the other ranks know
            error = found
        ended = torch.tensor(error is not None, dtype=torch.int32, device=mesh.device_type)
        for group in map(mesh.get_group, range(mesh.ndim)):
            dist.all_reduce(ended, dist.ReduceOp.MAX, group)
        if error is not None:
            raise error
        if ended.item():
            raise CancelledError("another rank ended this call of reduce()")

    return agreed


def _check_agreement(
    sharded: ShardedScores, mask: Mask | None, reductions: Sequence[Reduction], between: Between
) -> None:
    """Check that all ranks ask the same, so that no rank waits for another one for ever."""
    query, key, mesh = sharded.query, sharded.key, sharded.query.device_mesh
    operands = _operands(reductions)
    tensors = (*sharded.tensors, *operands)
    call = {
        "query": f"{shape_text(query.shape)} {dtype_text(query.dtype)}",
        "key": f"{shape_text(key.shape)} {dtype_text(key.dtype)}",
        "scores": sharded.facts,
        "bias": [*map(_content, sharded.tensors[2:])],
        "mask": None if mask is None else (mask.text, [*map(_content, mask.tensors)]),
        "reductions": list(map(_described, reductions)),
        "progress or cancelled": between is not nothing,
        "operands": [*map(_content, operands)],
        "gradients": torch.is_grad_enabled() and [t.requires_grad for t in tensors],
    }
    for group in map(mesh.get_group, range(mesh.ndim)):
        ranks = dist.get_process_group_ranks(group)
        calls: list[Any] = [None] * len(ranks)
        dist.all_gather_object(calls, call, group)
        for rank, theirs in zip(ranks, calls, strict=True):
            if theirs != call:
                name = next(name for name, mine in call.items() if theirs[name] != mine)
                raise RegardError(
                    f"rank {rank} made another call than rank {dist.get_rank()}: its {name} is "
                    f"{theirs[name]} and not {call[name]}.\n"
                    "    All ranks must give the same shapes, dtypes and arguments."
                )
