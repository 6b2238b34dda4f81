"""Detection of the part of a distributed model that this process runs.

Detection needs no communication between processes. Tensor parallelism is detected by parameters
that are DTensors, data parallelism by wrappers, and a pipeline by its stage. Context parallelism
needs the mesh from the caller. There the processes communicate: each gathers all queries and keys.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from secrets import token_hex
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from regard.capture.storages import tensors_in
from regard.errors import RegardError, is_sharded, kind_text
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.shard import Shard
from regard.scores.query_key import QueryKeyScores
from regard.tracing.tracer import Operation, apart, unwrapped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "GATHERED",
    "ON_ONE_PROCESS",
    "Distribution",
    "is_waiting",
    "local_tensor",
    "microbatch",
    "stage_of",
]

_BLOCKS: Counter[int | None] = Counter()  # blocks of observe so far, by pipeline stage

GATHERED = (
    "its query and key are split over processes as DTensors.\n"
    "    Give the attention ordinary tensors: use_local_output=True for tensor parallel. For "
    "context parallel, pass its mesh: observe(model, mesh=mesh)."
)
ON_ONE_PROCESS = (
    "its queries are not split over the processes of mesh.\n"
    "    Run it inside context_parallel(mesh, ...), or observe without mesh=."
)


class Distribution:
    """The heads, batch entries and layers that this process runs.

    ``shard`` is the place of its recording in the distributed run. ``modules`` are without
    wrappers, by name; ``wrappers`` are all modules. ``stage`` and ``mesh`` may be None.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        wrappers: Iterator[nn.Module],
        stage: Any,
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        self._modules = modules
        self._mesh = mesh
        queries = () if mesh is None else tuple(dist.get_process_group_ranks(mesh.get_group()))
        data = _data_ranks(list(wrappers))
        self._data = set(data)
        if data == queries:
            data = ()  # FSDP may split parameters over the processes that share a text
        split = {ranks for weight in self._weights() if (ranks := self._head_ranks(weight))}
        if len(split) > 1:
            raise _refusal("parameters are split over several groups of processes")
        self._heads = next(iter(split), ())
        rank = dist.get_rank()
        if any(len({*ranks} & {*queries}) > 1 for ranks in (data, self._heads)):
            raise _refusal("processes of mesh also share the batch or the heads with each other")
        number: int | None = None
        stage_place = 0, 1
        if stage is not None:
            stage_place = number, _ = int(stage.stage_index), int(stage.num_stages)
        self.shard = Shard(
            "",
            rank,
            dist.get_world_size(),
            stage_place,
            (data.index(rank), len(data)) if data else (0, 1),
            (self._heads.index(rank), len(self._heads)) if self._heads else (0, 1),
            queries=(queries.index(rank), len(queries)) if queries else (0, 1),
        )
        if set(self.shard.counts) != {1}:
            kind = "model" if number is None else "pipeline"
            self.shard = self.shard._replace(run=f"{_job()}.{kind}.{_BLOCKS[number]}")
            _BLOCKS[number] += 1

    @classmethod
    def of(
        cls,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        stage: Any,
        mesh: "DeviceMesh | None" = None,
    ) -> "Distribution | None":
        """Return the distribution of a model; None if this process runs the whole model.

        Raises:
            TypeError: mesh is not a DeviceMesh.
            ValueError: mesh does not have one axis with this process, or there is a stage.
            RegardError: the parts of the model cannot be determined.
        """
        if mesh is not None:
            _check_mesh(mesh, stage)
        for module in model.modules():
            _check_known(module)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        inner = unwrapped(model)
        if [name for name, _ in inner.named_children()] == ["module"]:
            raise _refusal(f"{type(inner).__name__} is a wrapper that regard does not know")
        found = cls(modules, model.modules(), stage, mesh)
        return None if set(found.shard.counts) == {1} else found

    def whole(self, operation: Operation) -> Operation | None:
        """Return a fused attention of context parallelism with the whole query, key and value.

        All processes of the mesh must call it for the same operation. They gather the tensors, in
        the order of the tokens. The result is None for any other operation.
        """
        import torch.nn.functional as F
        from torch.distributed.tensor import Shard as Split

        # context_parallel replaces the function inside its block.
        is_inside = str(F.scaled_dot_product_attention.__module__).startswith(_CONTEXT_PARALLEL)
        tensors = operation.args[:3]
        others = [*tensors_in(operation.args[3:]), *tensors_in(tuple(operation.kwargs.values()))]
        if self._mesh is None or not is_inside or others or not all(map(is_sharded, tensors)):
            return None
        if any((x.device_mesh, x.placements) != (self._mesh, (Split(2),)) for x in tensors):
            return None
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        with apart():
            local = [tensor.to_local() for tensor in tensors]
            gathered = context_parallel_unshard(self._mesh, local, [2, 2, 2])
        return operation._replace(args=(*gathered, *operation.args[3:]))

    def heads(self, name: str, matrix: AttentionMatrix) -> range | None:
        """Return the range of the model's heads in an attention; None if it has all of them.

        Heads are split if the query projection is: a DTensor parameter with the rows of the heads
        of all processes. It is searched in the module first, and then in the modules around it.

        Raises:
            ValueError: the heads cannot be determined.
        """
        rank, ranks = self.shard.heads
        if ranks == 1:
            return None
        source = cast(QueryKeyScores, matrix.source)
        num_heads, dim = matrix.shape[-3] if matrix.ndim > 2 else 1, source.query.shape[-1]
        own, packed = num_heads * dim, (num_heads + 2 * num_heads // source.group) * dim
        for module in self._around(name):
            weights = [weight for weight in module.parameters() if weight.ndim == 2]
            split = {weight.shape[0] for weight in weights if self._is_split(weight)}
            whole = {n for weight in weights if not is_sharded(weight) for n in weight.shape}
            if packed * ranks in split:
                raise ValueError(_PACKED)
            if own * ranks in split:
                return range(rank * num_heads, (rank + 1) * num_heads)
            if whole & {own, packed}:
                return None
        raise ValueError(_UNKNOWN.format(ranks))

    def _around(self, name: str) -> Iterator[nn.Module]:
        """Yield the module of an attention and the modules around it, the innermost first."""
        while name:
            if name in self._modules:
                yield self._modules[name]
            name = name.rpartition(".")[0]

    def _weights(self) -> Iterator[Tensor]:
        for module in self._modules.values():
            yield from module.parameters(recurse=False)

    def _head_ranks(self, weight: Tensor) -> tuple[int, ...] | None:
        """Return the ranks that split a parameter, apart from data parallelism; None if whole."""
        if not is_sharded(weight):
            return None
        groups = [ranks for ranks, _ in self._mesh_axes(weight)]
        if len(groups) > 1:
            raise _refusal("parameters are split along several axes of a mesh")
        return groups[0] if groups else None

    def _is_split(self, weight: Tensor) -> bool:
        """Return True if the rows of a parameter are split in the same way as the heads."""
        return is_sharded(weight) and any(
            ranks == self._heads and placement.is_shard(0)
            for ranks, placement in self._mesh_axes(weight)
        )

    def _mesh_axes(self, weight: Tensor) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield the ranks and the placement for each axis of a parameter's mesh."""
        mesh = cast(Any, weight).device_mesh
        for axis, placement in enumerate(cast(Any, weight).placements):
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
            if len(ranks) > 1 and not self._data.issuperset(ranks):
                yield ranks, placement


def stage_of(model: object) -> Any:
    """Return the model if it is the stage of a pipeline; None otherwise."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    known = pipelining is not None and isinstance(model, pipelining._PipelineStageBase)
    return model if known else None


def microbatch() -> int | None:
    """Return the index of the microbatch that this thread runs; 0 outside a pipeline.

    The result is None while a pipeline runs its stage on dummy tensors to infer shapes.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return 0
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    is_in_stage = False
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/distributed/pipelining/stage.py"):
            is_in_stage = True
            if frame.f_code.co_name == "forward_one_chunk":
                return int(frame.f_locals["fwd_chunk_id"])
        frame = frame.f_back
    return None if is_in_stage else 0


def is_waiting(value: object) -> bool:
    """Return True for the pending result of an asynchronous collective operation."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(value, collectives.AsyncCollectiveTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor; return an ordinary tensor unchanged."""
    return cast(Any, tensor)._local_tensor if is_sharded(tensor) else tensor


def _check_mesh(mesh: object, stage: Any) -> None:
    """Raise an error unless ``mesh`` fits context parallelism."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is {kind_text(mesh)}; it must be the DeviceMesh of context_parallel.\n"
            "    Leave it out for a model that does not split its texts."
        )
    if mesh.ndim != 1 or mesh.size() == 1 or mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh has shape {tuple(mesh.shape)}; it must have one axis of several processes, this "
            "one among them.\n"
            '    Pass the part for context parallelism: mesh["cp"].'
        )
    if stage is not None:
        raise ValueError(
            "mesh is given for the stage of a pipeline; a stage with context parallelism cannot be "
            "recorded.\n    Observe the model without a pipeline."
        )


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
            raise _refusal(f"its {name} runs under context parallel")
    is_parallel = getattr(module, "_tp_size", None) not in (None, 1)
    if is_parallel and not any(map(is_sharded, module.parameters())):
        raise _refusal(f"its {name} is tensor parallel without DTensors")


def _data_ranks(modules: list[nn.Module]) -> tuple[int, ...]:
    """Return the ranks that share the batch; an empty tuple without data parallelism."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found: set[tuple[int, ...]] = set()
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel | FullyShardedDataParallel):
            group = cast(Any, module).process_group
            found.add(tuple(dist.get_process_group_ranks(group)))
        elif isinstance(module, FSDPModule):
            for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
                found.add(tuple(group.mesh_info.mesh.mesh.flatten().tolist()))
    found = {ranks for ranks in found if len(ranks) > 1}
    if len(found) > 1:
        raise _refusal("modules share the batch over several groups of processes")
    return next(iter(found), ())


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


def _refusal(what: str) -> RegardError:
    return RegardError(
        f"model cannot be recorded in parts: {what}.\n"
        "    regard knows DDP, FSDP, tensor parallel with DTensors and pipeline stages."
    )


_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"
_PACKED = (
    "its query, key and value come from one parameter that is split over processes, so the heads "
    "of this process are unknown.\n"
    "    Give query, key and value a projection each."
)
_UNKNOWN = (
    "the heads of this process are unknown: no parameter of its module, or of one around it, has "
    "the heads of all {} processes.\n"
    "    Split the projection of the query with ColwiseParallel."
)
