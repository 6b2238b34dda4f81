"""`observe`: record the attention of a model without changing the model."""

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import getattr_static
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from regard.capture.distribution import (
    GATHERED,
    Distribution,
    is_waiting,
    local_tensor,
    microbatch,
    stage_of,
)
from regard.capture.fused_calls import (
    FLEX_ATTENTION,
    NESTED,
    FusedCall,
    Read,
    fused_call,
    read_flex,
)
from regard.capture.handwritten import Handwritten
from regard.capture.merging import TakeValue
from regard.capture.provenance import storage_key
from regard.capture.recorder import Recorder
from regard.capture.refusals import Absence, compiled_error, is_compiled
from regard.capture.selection import Selection
from regard.capture.weight_operations import tensors_in
from regard.errors import RegardError, is_sharded
from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.linear_map import LinearMap, watched_products
from regard.recording.recording import Recording
from regard.reductions.reduction import Reduction, RowStatistic
from regard.reductions.sums import Sum
from regard.reductions.top_k import TopK
from regard.tracing.operations import PRODUCTS, SOFTMAXES
from regard.tracing.tracer import (
    Listener,
    Operation,
    Tracer,
    apart,
    class_name,
    in_backward,
    module_names,
    unwrapped,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage

__all__ = ["observe"]


@contextmanager
def observe(
    model: "nn.Module | PipelineStage",
    *,
    layers: Iterable[str | int] | None = None,
    heads: Iterable[int] | slice | None = None,
    queries: slice | None = None,
    keep: Literal["qk", "qkv"] | Sequence[Reduction] = "qk",
    device: torch.device | str | None = None,
    path: str | PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
    strict: bool = False,
    mesh: "DeviceMesh | None" = None,
) -> Generator[Recording, None, None]:
    """Record the attention that a model runs inside the block.

    Each attention that a module of the model runs on this thread is recorded as an AttentionMatrix:
    copies of its query and key (after rotary embeddings) with its mask, bias, scale, softcap and
    sinks. No output bit of the model changes, and the model is unchanged after the block. Dropout
    on the weights is not recorded.

    With gradients enabled, gradients flow through the recording to the model: a loss of
    ``seen[3].entropy()`` trains it. The recording then keeps the model's own tensors and its graph
    alive. Gradients do not flow with ``path``, ``device`` or reductions, or if several calls are
    merged.

    It records ``scaled_dot_product_attention``, ``flex_attention``, flash-attn,
    ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` with and without their fast path,
    attention written by hand as products and a softmax, and regard's own ``A @ value``. It does not
    record attention inside compiled functions.

    Args:
        model: any module: Hugging Face with any ``attn_implementation``, timm, your own. Or the
            stage of a pipeline.
        layers: the layers to record: names of modules, or positions in the order they run. The
            default is all layers.
        heads: the heads to record: indices or a slice. The default is all heads.
        queries: the queries to record, a slice of positions such as ``slice(-64, None)``. The
            default is all queries.
        keep: "qk" records query and key; "qkv" also records the value, for ``seen.value(name)``.
            A list of reductions, ``[TopK(8), Entropy()]``, records only their answers, computed
            while the model runs, in ``seen.kept``. Answers that cannot be merged over the calls of
            a generation, such as ``Pool``'s, are omitted with a warning.
        device: the device of the recording. The default is the model's device.
        path: a file for the recording, instead of memory. While the model runs, each call is
            appended to ``<path>.part``, which ``regard.load`` reads after a crash. To save tokens,
            set ``seen.query_tokens`` and ``seen.key_tokens`` before the block ends.
        progress: called after each attention with the number of attentions so far.
        strict: if True, raise an error if anything was refused, even if other layers were recorded.
        mesh: the mesh of ``context_parallel``, in which the processes share each text. Process i of
            n records part i of the queries, in the order of the text. The processes gather the
            query and key of each attention, so all of them must observe.

    Yields:
        The Recording, which is filled while the model runs. If the model generates text with a KV
        cache, the calls of each layer are merged to one matrix when the block ends. Then the file
        is written.

    Raises:
        TypeError: model is not an ``nn.Module``, or an argument has the wrong type.
        ValueError: an argument selects nothing, names something that does not exist, or does not
            fit ``mesh``.
        RegardError: the model is compiled; or nothing was recorded, or less than an argument
            selects. The latter errors are raised when the block ends, so they never stop the model.

    Warns:
        UserWarning: some layers were recorded and others refused; ``seen.refused`` has their
            module, line and reason. Or a module multiplied scores by a value without a softmax.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), regard.nn.SelfAttention(8))
        >>> with regard.observe(model) as seen:
        ...     output = model(torch.randn(3, 4))
        >>> list(seen)
        ['1']
    """
    model, modules, distribution = _parts_of(model, layers, mesh)
    seen = Recording({}, model=class_name(model))
    seen.shard = None if distribution is None else distribution.shard
    selection = Selection.of(
        layers=layers, heads=heads, queries=queries, keep=keep, device=device, modules=modules
    )
    if mesh is not None:
        _check_mergeable(selection)
    recorder = Recorder(seen, selection, path, progress, distribution)
    compiled = _compiled_parts(modules)
    watch = _Watch(model, recorder, distribution, has_compiled_parts=bool(compiled))
    # Casts that autocast cached before the block would not be recognised as parameters.
    torch.clear_autocast_cache()
    try:
        with watch.tracer, watched_products(watch.product):
            yield seen
    except BaseException as exception:
        watch.finish()
        recorder.abandon(exception)
        raise
    watch.finish()
    if watch.absence.is_compiled:
        recorder.problems.add_text(str(compiled_error("model is compiled")))
    for name, what in compiled.items():
        recorder.refuse_compiled(name, str(compiled_error(what)))
    if _runs_flex_attention(model) and not watch.saw_flex_attention:
        recorder.refuse_compiled(seen.model, _COMPILED_FLEX)
    recorder.close()
    problem = recorder.problems.error()
    if problem is not None and (strict or recorder.problems.are_fatal or not seen.layers):
        raise problem
    if not (seen.layers or recorder.without):
        raise watch.absence.error()
    if problem is not None:
        warnings.warn(f"{problem}\n    seen.refused has every reason.", stacklevel=3)
    recorder.warn(stacklevel=3)
    watch.absence.warn()


def _parts_of(
    given: object, layers: object, mesh: "DeviceMesh | None"
) -> tuple[nn.Module, dict[str, nn.Module], Distribution | None]:
    """Return a model without wrappers, its modules by name, and its distribution."""
    stage = stage_of(given)
    if stage is not None and layers is not None:
        raise ValueError(
            "layers is given for the stage of a pipeline; a stage does not know which layers run "
            "before its own.\n    Leave it out, and choose from the merged recording."
        )
    wrapped = given if stage is None else stage.submod
    modules = _modules_of(wrapped)
    model = cast(nn.Module, wrapped)
    return unwrapped(model), modules, Distribution.of(model, modules, stage, mesh)


def _check_mergeable(selection: Selection) -> None:
    """Raise an error if the parts of the queries could not be merged."""
    if selection.queries != slice(None):
        raise ValueError(
            "queries is given with mesh; each process records its part of the queries.\n"
            "    Leave it out, and choose from the merged recording."
        )
    for reduction in selection.reductions:
        if not isinstance(reduction, RowStatistic | TopK | Sum):
            raise ValueError(
                f"keep has {type(reduction).__name__}, with mesh; the answers of the processes "
                'cannot be merged.\n    Observe with keep="qk", and ask the merged recording.'
            )


def _modules_of(model: object) -> dict[str, nn.Module]:
    """Return the modules of a model by name; raise an error if the model is compiled."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; observe needs a torch.nn.Module.\n"
            "    Pass the module whose forward runs the attention."
        )
    if _is_compiled_module(model):
        raise compiled_error("model is compiled")
    if is_compiled(_forward_of(model)):
        name = type(model).__name__
        raise compiled_error(f"model has a compiled function at '{name}.forward'")
    return module_names(model)


def _compiled_parts(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the names of compiled modules and functions of a model, each with a description."""
    found: dict[str, str] = {}
    for name, module in modules.items():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if _is_compiled_module(module):
            found[name] = f"model has a compiled module at {name!r}"
        own = {"forward": _forward_of(module), **vars(module)}
        for attribute, value in own.items():
            if callable(value) and is_compiled(value):
                found.setdefault(name, f"model has a compiled function at '{name}.{attribute}'")
    return found


def _forward_of(module: nn.Module) -> object:
    """Return the ``forward`` of a module; None for a scripted module, whose class has none."""
    return vars(module).get("forward", getattr_static(type(module), "forward", None))


def _is_compiled_module(module: nn.Module) -> bool:
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or type(module).__module__.startswith("torch._dynamo")


class _Watch:
    """A set of listeners that pass each attention of the model's modules to a Recorder.

    ``finish`` must be called when the block has ended. ``absence`` collects operations that might
    have been attention.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        distribution: Distribution | None,
        *,
        has_compiled_parts: bool,
    ) -> None:
        self._distribution = distribution
        self._has_compiled_parts = has_compiled_parts
        self._root = class_name(model)
        self._recorder = recorder
        self.saw_flex_attention = False
        self._padded_to: dict[tuple[int, ...], int] = {}
        self._has_processes = dist.is_available() and dist.is_initialized()
        self._dtensor_products: set[str] = set()  # modules with a product of two activations
        self._multiplying = False
        self.absence = Absence(model)
        handwritten = Handwritten(model, self._take_handwritten, self._refuse, self.absence)
        self.finish = handwritten.finish
        self._handwritten = handwritten
        self._safe = cache(self._reporting)
        self.tracer = Tracer(model, self._listeners(), self._listener_of)

    def _listeners(self) -> Mapping[Callable[..., Any], Listener]:
        """Return the listeners of the operations that always have one."""
        listeners: dict[Callable[..., Any], Listener] = {
            **self._handwritten.listeners,
            FLEX_ATTENTION: self._flexible,
            _SOFTMAX_OF_NESTED: self._nested,
            _NESTED_FROM_MASK: self._without_padding,
        }
        return {operation: self._safe(listener) for operation, listener in listeners.items()}

    def _listener_of(self, func: Callable[..., Any]) -> Listener | None:
        """Return the current listener of any other operation; None if it is ignored."""
        if fused_call(func) is not None:
            return self._safe(self._fused)
        listener = self._handwritten.listener_of(func)
        if listener is None and (self._has_processes or torch.is_grad_enabled()):
            listener = self._handwritten.pass_on
        return None if listener is None else self._safe(listener)

    def _reporting(self, listener: Listener) -> Listener:
        """Return a listener whose exceptions are reported when the block ends."""

        def listen(operation: Operation) -> None:
            self._recorder.gradients = torch.is_grad_enabled()
            self._recorder.is_gathered = False
            try:
                if self._has_processes:
                    here = self._of_this_process(operation)
                    if here is None:
                        return
                    operation = here
                if self._recorder.gradients:
                    self._recorder.graph.note(operation)
                if not (self._has_compiled_parts and operation.is_in_compiled_part()):
                    listener(operation)
            except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
                self._fail(operation.module() or self._root, cause, operation)

        return listen

    def _of_this_process(self, operation: Operation) -> Operation | None:
        """Return an operation with ordinary tensors as arguments; None if it is ignored."""
        number = microbatch()
        if number is None:
            return None
        self._recorder.microbatches = max(self._recorder.microbatches, number + 1)
        tensors = list(tensors_in(operation.args))
        if any(map(is_sharded, tensors)):
            whole = None if self._distribution is None else self._distribution.whole(operation)
            if whole is None:
                self._of_dtensors(operation)
            else:
                # No gradient flows through the gathered tensors.
                self._recorder.is_gathered, self._recorder.gradients = True, False
            return whole
        if any(map(is_waiting, tensors)):
            return operation._replace(args=tree_map(_waited, operation.args))
        return operation

    def _of_dtensors(self, operation: Operation) -> None:
        """Refuse attention whose query and key are DTensors; parameters may be DTensors."""
        self.absence.note_product(operation)
        name = operation.module()
        if name is None:
            return
        if operation.func in SOFTMAXES and name in self._dtensor_products:
            self._refuse(name, GATHERED, operation.place())
        elif operation.func in PRODUCTS:
            module = cast(nn.Module, operation.innermost())
            own = {storage_key(local_tensor(weight)) for weight in module.parameters(recurse=False)}
            factors = {storage_key(local_tensor(each)) for each in tensors_in(operation.args)}
            if not own & factors:
                self._dtensor_products.add(name)
        elif fused_call(operation.func) is not None or operation.func is FLEX_ATTENTION:
            self._refuse(name, GATHERED, operation.place())

    def _fused(self, operation: Operation) -> None:
        call = cast(FusedCall, fused_call(operation.func))

        def read() -> Read:
            one_query = _has_packed_heads(operation.innermost(), operation.args)
            padded_to, kwargs = self._padded_to, operation.kwargs
            return call.read(operation.args, kwargs, one_query=one_query, padded_to=padded_to)

        if self._recorder.gradients:
            self._recorder.graph.note(operation, is_attention=True)
        self._keep(operation, read, call.inside)

    def _flexible(self, operation: Operation) -> None:
        self.saw_flex_attention = True
        self._keep(operation, lambda: read_flex(operation))

    def _without_padding(self, operation: Operation) -> None:
        """Store the padded length of a batch whose padding nn.TransformerEncoder removes.

        No later operation has it.
        """
        self._handwritten.pass_on(operation)
        mask = operation.args[1]
        with apart():
            self._padded_to[tuple(mask.sum(-1).tolist())] = mask.shape[-1]

    def _nested(self, operation: Operation) -> None:
        self._handwritten.on_softmax(operation)
        if operation.args[0].is_nested and (name := operation.module()) is not None:
            self._refuse(name, NESTED, operation.place())

    def product(self, matrix: LinearMap, value: Tensor, multiply: Callable[[], Tensor]) -> Tensor:
        """Record regard's own ``A @ value``, and return its output."""
        outer, self._multiplying = self._multiplying, True
        try:
            output = multiply()
        finally:
            self._multiplying = outer
        self._recorder.gradients, self._recorder.is_gathered = torch.is_grad_enabled(), False
        if isinstance(matrix, AttentionMatrix) and not in_backward():
            operation = Operation(torch.matmul, (), {}, output, self.tracer.name_of)
            self._keep(operation, lambda: (matrix, lambda: value))
        return output

    def _keep(self, operation: Operation, read: Callable[[], Read], inside: str = "") -> None:
        """Record an attention; a failure is reported when the block ends."""
        self.absence.is_compiled |= operation.is_compiled()
        name = None if self._multiplying or self.absence.is_compiled else operation.module()
        if name is None:
            return
        if _is_empty(operation.output):
            self.absence.note_product(operation)
            return
        if inside:
            name = inside if name == self._root else f"{name}.{inside}"
        self.absence.note_attention(name)
        try:
            with apart(), torch.set_grad_enabled(self._recorder.gradients):
                matrix, value = read()
                take_value = self._recorder.take(name, matrix)
                if take_value is not None:
                    take_value(value())
        except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
            self._fail(name, cause, operation)

    def _take_handwritten(self, name: str, matrix: AttentionMatrix) -> TakeValue | None:
        if self._multiplying or self.absence.is_compiled:
            return None
        self.absence.note_attention(name)
        try:
            return self._recorder.take(name, matrix)
        except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
            self._fail(name, cause)
            return None

    def _fail(self, name: str, cause: Exception, operation: Operation | None = None) -> None:
        kinds = RegardError | TypeError | ValueError | RuntimeError | MemoryError
        said = isinstance(cause, kinds)
        reason = str(cause) if said else f"{type(cause).__name__}: {cause}"
        self._refuse(name, reason, None if operation is None else operation.place(), cause)

    def _refuse(
        self, name: str, reason: str, line: str | None, cause: Exception | None = None
    ) -> None:
        if not self._multiplying:
            self._recorder.refuse(name, reason, line, cause)


def _runs_flex_attention(model: nn.Module) -> bool:
    """Return True if a transformers model uses ``flex_attention``, which transformers compiles."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "flex_attention"


def _has_packed_heads(module: nn.Module | None, args: tuple[Any, ...]) -> bool:
    """Return True if the token axis of the query holds the heads that share a key.

    transformers packs heads in this way for a single query token (``pack_gqa``).
    """
    group = getattr(module, "num_key_value_groups", 1)
    query, key = args[:2]
    if group == 1 or query.ndim != 4 or query.shape[1:3] != (key.shape[1], group):
        return False
    num_heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if num_heads is None:
        raise ValueError(
            f"query has {group} tokens or heads in one axis, and its module has no "
            "config.num_attention_heads that says which.\n"
            "    Observe it with attn_implementation='eager'."
        )
    return query.shape[1] * group == num_heads


_COMPILED_FLEX = (
    "transformers compiles its flex_attention; observe cannot look into compiled code.\n"
    "    Load the model with attn_implementation='sdpa' or 'eager'."
)


def _is_empty(output: object) -> bool:
    """Return True if the first output tensor is empty, because there were no tokens or texts."""
    first = next(tensors_in((output,)), None)
    return first is not None and not first.is_nested and not first.numel()


def _waited(value: object) -> object:
    """Wait for a pending collective operation and return its tensor; return others unchanged."""
    return cast(Any, value).trigger_wait() if is_waiting(value) else value


_NESTED_FROM_MASK = torch.ops.aten._nested_tensor_from_mask.default
_SOFTMAX_OF_NESTED = torch.ops.aten._safe_softmax.default
