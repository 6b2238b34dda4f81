"""Detection of the part of a distributed model that this process runs.

Detection needs no communication between processes. Tensor parallelism is detected by parameters
that are DTensors, and data parallelism by wrappers.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from secrets import token_hex
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor, nn

from regard.errors import RegardError, is_sharded
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.shard import Shard
from regard.scores.query_key import QueryKeyScores
from regard.tracing.tracer import unwrapped

_BLOCKS = count()  # the blocks of observe with a distributed model

_SAVE = "save the query and key of each process, and pass them to regard.attend as DTensors."
PIPELINE = (
    "model is a stage of a pipeline; observe joins heads and batch entries, not stages and "
    "microbatches.\n"
    f"    Observe the model without a pipeline, or {_SAVE}"
)
GATHERED = (
    "its query and key are split over processes as DTensors.\n"
    "    For tensor parallel, give the attention ordinary tensors: use_local_output=True. For "
    f"context parallel, {_SAVE}"
)


class HeadRange(NamedTuple):
    """The ``size`` heads from ``first`` on, of a layer that has ``total`` heads."""

    first: int
    size: int
    total: int


@dataclass(frozen=True)
class Distribution:
    """The heads and batch entries that this process runs.

    Attributes:
        shard: the part of the distributed run that this process records.
        modules: the modules of the model without wrappers, by name.
        data: the ranks that share the batch.
        ranks: the ranks that share the heads.
    """

    shard: Shard
    modules: Mapping[str, nn.Module]
    data: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, modules: Mapping[str, nn.Module]) -> "Distribution | None":
        """Return the distribution of a model; None if this process runs the whole model.

        Raises:
            RegardError: the parts of the model cannot be determined.
        """
        for module in model.modules():
            _check_known(module)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        inner = unwrapped(model)
        if [name for name, _ in inner.named_children()] == ["module"]:
            raise _refusal(f"{type(inner).__name__} is a wrapper that regard does not know")
        data = _data_ranks(model)
        weights = (weight for each in modules.values() for weight in each.parameters(recurse=False))
        groups = {ranks for weight in weights for ranks in _splits(weight, data)}
        if len(groups) > 1:
            raise _refusal("parameters are split over several groups of processes")
        heads, rank = next(iter(groups), ()), dist.get_rank()
        if not data and not heads:
            return None
        batch, part = ((each.index(rank), len(each)) if each else (0, 1) for each in (data, heads))
        return cls(Shard(f"{_job()}.{next(_BLOCKS)}", rank, batch, part), modules, data, heads)

    def heads(self, name: str, matrix: AttentionMatrix) -> HeadRange:
        """Return the heads of the model that an attention has.

        Heads are split if the query projection is: a DTensor parameter with the rows of the heads
        of all processes. It is searched in the module first, and then in the modules around it.

        Raises:
            ValueError: the heads cannot be determined.
        """
        rank, ranks = self.shard.heads
        num_heads = matrix.shape[-3] if matrix.ndim > 2 else 1
        if ranks == 1:
            return HeadRange(0, num_heads, num_heads)
        source = matrix.source
        if not isinstance(source, QueryKeyScores):
            raise ValueError(_WITHOUT_QUERY)
        dim = source.query.shape[-1]
        rows, packed = num_heads * dim, (num_heads + 2 * num_heads // source.group) * dim
        around = [".".join(name.split(".")[:stop]) for stop in range(name.count(".") + 1, 0, -1)]
        for module in (self.modules[each] for each in around if each in self.modules):
            weights = [weight for weight in module.parameters() if weight.ndim == 2]
            split = {weight.shape[0] for weight in weights if self._is_split(weight)}
            whole = {n for weight in weights if not is_sharded(weight) for n in weight.shape}
            if packed * ranks in split:
                raise ValueError(_PACKED)
            if rows * ranks in split:
                return HeadRange(rank * num_heads, num_heads, num_heads * ranks)
            if whole & {rows, packed}:
                return HeadRange(0, num_heads, num_heads)
        raise ValueError(_UNKNOWN.format(ranks))

    def _is_split(self, weight: Tensor) -> bool:
        """Return True if the rows of a parameter are split in the same way as the heads."""
        placement = _splits(weight, self.data).get(self.ranks)
        return placement is not None and placement.is_shard(0)


def _splits(weight: Tensor, data: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    """Return the ranks of each axis of a parameter's mesh, with the parameter's placement.

    Axes of one rank and those of data parallelism are left out.
    """
    if not is_sharded(weight):
        return {}
    mesh, placements = cast(Any, weight).device_mesh, cast(Any, weight).placements
    ranks = [tuple(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in range(mesh.ndim)]
    axes = zip(ranks, placements, strict=True)
    return {each: how for each, how in axes if len(each) > 1 and not {*data}.issuperset(each)}


def is_stage(model: object) -> bool:
    """Return True if the model is a stage of a pipeline."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    return pipelining is not None and isinstance(model, pipelining._PipelineStageBase)


def is_waiting(value: object) -> bool:
    """Return True for the pending result of an asynchronous collective operation."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(value, collectives.AsyncCollectiveTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor; return an ordinary tensor unchanged."""
    return cast(Any, tensor)._local_tensor if is_sharded(tensor) else tensor


def _check_known(module: nn.Module) -> None:
    """Raise an error for a module that distributes the model in an unsupported way."""
    name = type(module).__name__
    if isinstance(module, nn.DataParallel):
        raise _refusal("it has a DataParallel, which runs copies on other threads")
    if getattr(module, "_fsdp_extension", None) is not None:
        raise _refusal(f"its {name} is around parameters that are split already")
    if getattr(module, "_inter_node_pg", None) is not None:
        raise _refusal(f"its {name} has a hybrid sharding strategy")
    hooks: Mapping[int, Any] = vars(module)["_forward_pre_hooks"]
    for hook in hooks.values():
        name_of_hook = str(getattr(getattr(hook, "func", hook), "__qualname__", ""))
        if name_of_hook.startswith("_ContextParallel."):
            raise _refusal(f"its {name} runs under context parallel", f"S{_SAVE[1:]}")
    is_parallel = getattr(module, "_tp_size", None) not in (None, 1)
    if is_parallel and not any(map(is_sharded, module.parameters())):
        raise _refusal(f"its {name} is tensor parallel without DTensors")


def _data_ranks(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that share the batch; an empty tuple without data parallelism."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    groups: set[tuple[int, ...]] = set()
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | FullyShardedDataParallel):
            group = cast(Any, module).process_group
            groups.add(tuple(dist.get_process_group_ranks(group)))
        elif isinstance(module, FSDPModule):
            for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
                groups.add(tuple(group.mesh_info.mesh.mesh.flatten().tolist()))
    groups = {ranks for ranks in groups if len(ranks) > 1}
    if len(groups) > 1:
        raise _refusal("modules share the batch over several groups of processes")
    return next(iter(groups), ())


def _job() -> str:
    """Return a random name that all processes of this job share.

    The first process that writes it to the job's store sets it; no process waits for another.
    """
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    try:
        return cast(bytes, store.compare_set("regard/run", "", token_hex(8))).decode()
    except dist.DistError as error:
        raise RegardError(
            "model cannot be recorded in parts: the process that holds the store of the job does "
            "not answer.\n    Start the job again."
        ) from error


def _refusal(
    what: str, remedy: str = "regard knows DDP, FSDP and tensor parallel with DTensors."
) -> RegardError:
    return RegardError(f"model cannot be recorded in parts: {what}.\n    {remedy}")


_PACKED = (
    "its query, key and value come from one parameter that is split over processes, so the heads "
    "of this process are unknown.\n"
    "    Give query, key and value a projection each."
)
_WITHOUT_QUERY = (
    "its weights do not follow from a query and a key, so the heads of this process are unknown.\n"
    "    Let the layer call scaled_dot_product_attention, or observe the model in one process."
)
_UNKNOWN = (
    "the heads of this process are unknown: no parameter of its module, or of one around it, has "
    "the heads of all {} processes.\n"
    "    Split the projection of the query with ColwiseParallel."
)
