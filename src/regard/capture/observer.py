"""observe(model): what a model really attended to, and the model untouched."""

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
    is_dtensor,
    is_waiting,
    local_tensor,
    microbatch,
    stage_of,
)
from regard.capture.flex_calls import FLEX_ATTENTION, FlexCalls
from regard.capture.fused_calls import NESTED, FusedCall, fused_call
from regard.capture.handwritten import Handwritten
from regard.capture.provenance import storage_key
from regard.capture.recorded_values import TakeValue
from regard.capture.recorder import Recorder
from regard.capture.selection import Selection
from regard.capture.unseen_attention import Absence, compiled_error, is_compiled
from regard.capture.weight_operations import tensors_in
from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.linear_map import LinearMap, watched_products
from regard.recording.recording import Recording
from regard.reductions.reduction import Reduction
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
) -> Generator[Recording, None, None]:
    """Watch what the attention of a model does while the block runs.

    Each attention that a module of the model runs on this thread is kept as an AttentionMatrix:
    copies of its query and key (after rotary positions) with its mask, bias, scale, softcap and
    sinks. No output bit changes and nothing is left behind. Dropout on the weights is not part of
    what is kept.

    With gradients enabled, gradients flow through the recording to the model: a loss of
    ``seen[3].entropy()`` trains it. The recording then holds the model's own tensors and graph, as
    a loss does. There are none with ``path``, ``device`` or reductions, and where several calls are
    put together.

    It is seen however it is written: ``scaled_dot_product_attention``, ``flex_attention``,
    flash-attn, ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` on their fast path and off
    it, products and a softmax by hand, and regard's own ``A @ value``. What a compiled function
    runs is not seen.

    Args:
        model: any module: Hugging Face with any ``attn_implementation``, timm, your own. Or the
            stage of a pipeline.
        layers: which to keep: names of modules, or places in the order they run; all when left out.
        heads: which to keep: indices or a slice; all when left out.
        queries: which to keep, a slice of positions, ``slice(-64, None)``; all when left out.
        keep: "qk", all of query and key; "qkv", the value too, for ``seen.value(name)``; or
            reductions, ``[TopK(8), Entropy()]``, which are asked as the model runs, and nothing but
            their answers is kept, in ``seen.kept``. Answers that do not merge over the calls of a
            generation, ``Pool``'s, are left out with a warning.
        device: where to keep it; where the model has it when left out.
        path: of a file to keep it in, layer by layer, instead of memory. For tokens in it, set
            ``seen.query_tokens`` and ``seen.key_tokens`` before the block ends.
        progress: called with how many attentions have run, after each of them.
        strict: raise an error if anything was refused, also if other layers were recorded.

    Yields:
        The Recording; it fills as the model runs. When the block ends, the calls of a layer in
        which a model generates text with a KV cache become one matrix, and the file is written.

    Raises:
        TypeError: model is no ``nn.Module``, or an argument of the wrong kind.
        ValueError: an argument that chooses nothing, or what is not there.
        RegardError: the model is compiled; or, when the block has ended, nothing was recorded, or
            less than an argument asks for. The model's own run is never stopped.

    Warns:
        UserWarning: beside layers that were recorded, others were refused; ``seen.refused`` has
            module, line and reason. Or a module multiplied scores with a value and took no softmax.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), regard.nn.SelfAttention(8))
        >>> with regard.observe(model) as seen:
        ...     output = model(torch.randn(3, 4))
        >>> list(seen)
        ['1']
    """
    model, modules, distribution = _parts_of(model, layers)
    seen = Recording({}, model=class_name(model))
    seen.shard = None if distribution is None else distribution.shard
    wanted = Selection.of(
        layers=layers, heads=heads, queries=queries, keep=keep, device=device, modules=modules
    )
    keeper = Recorder(seen, wanted, path, progress, distribution)
    compiled = _compiled_parts(modules)
    watch = _Watch(model, keeper, has_compiled_parts=bool(compiled))
    # Parameters that autocast rounded before the block would not be known as parameters.
    torch.clear_autocast_cache()
    try:
        with watch.tracer, watched_products(watch.product):
            yield seen
    except BaseException:
        watch.finish()
        keeper.abandon()
        raise
    watch.finish()
    if watch.absence.is_compiled:
        keeper.problems.add_text(str(compiled_error("model is compiled")))
    for name, what in compiled.items():
        keeper.refuse_compiled(name, str(compiled_error(what)))
    if _runs_flex_attention(model) and not watch.saw_flex_attention:
        keeper.refuse_compiled(seen.model, _COMPILED_FLEX)
    keeper.close()
    problem = keeper.problems.error()
    if problem is not None and (strict or keeper.problems.are_fatal or not seen.layers):
        raise problem
    if not (seen.layers or keeper.without):
        raise watch.absence.error()
    if problem is not None:
        warnings.warn(f"{problem}\n    seen.refused has every reason.", stacklevel=3)
    keeper.warn(stacklevel=3)
    watch.absence.warn()


def _parts_of(
    given: object, layers: object
) -> tuple[nn.Module, dict[str, nn.Module], Distribution | None]:
    """Return a model without wrappers, its modules by name, and how it is distributed."""
    stage = stage_of(given)
    if stage is not None and layers is not None:
        raise ValueError(
            "layers is given for the stage of a pipeline; a stage does not know which layers run "
            "before its own.\n    Leave it out, and choose from the merged recording."
        )
    wrapped = given if stage is None else stage.submod
    modules = _modules_of(wrapped)
    model = cast(nn.Module, wrapped)
    return unwrapped(model), modules, Distribution.of(model, modules, stage)


def _modules_of(model: object) -> dict[str, nn.Module]:
    """Return the modules of a model by their names; the model itself may not be compiled."""
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
    """Return each module that is compiled or holds a compiled function, and what it is."""
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
    """Return the forward of a module; None of a scripted one, whose class has none."""
    return vars(module).get("forward", getattr_static(type(module), "forward", None))


def _is_compiled_module(module: nn.Module) -> bool:
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or type(module).__module__.startswith("torch._dynamo")


class _Watch:
    """Keeps each attention that comes from a module of the model.

    Attributes:
        tracer: tells it what the model runs.
        finish: to be called when the block has ended.
        absence: what might have been attention.
        saw_flex_attention: whether it ran uncompiled.
    """

    def __init__(self, model: nn.Module, keeper: Recorder, *, has_compiled_parts: bool) -> None:
        self._has_compiled_parts = has_compiled_parts
        self._root = class_name(model)
        self._keeper = keeper
        self._flex = FlexCalls()
        self.saw_flex_attention = False
        self._padded_to: dict[tuple[int, ...], int] = {}
        self._has_processes = dist.is_available() and dist.is_initialized()
        self._dtensor_products: set[str] = set()  # modules with a product of two activations
        self._multiplying = False
        self.absence = Absence(model)
        handwritten = Handwritten(model, self._take_handwritten, self._refuse, self.absence)
        self.finish = handwritten.finish
        self._pass_on = handwritten.pass_on
        self.tracer = Tracer(model, self._listeners(handwritten), self._safe(self._other))

    def _listeners(self, handwritten: Handwritten) -> Mapping[Callable[..., Any], Listener]:
        listeners: dict[Callable[..., Any], Listener] = {**handwritten.listeners}
        listeners[FLEX_ATTENTION] = self._flexible
        more = {_SOFTMAX_OF_NESTED: self._nested, _NESTED_FROM_MASK: self._without_padding}
        for operation, listener in more.items():
            first = listeners.get(operation, self._pass_on)
            listeners[operation] = _in_turn(first, listener)
        safe = cache(self._safe)
        return {operation: safe(listener) for operation, listener in listeners.items()}

    def _safe(self, listener: Listener) -> Listener:
        """Return a listener whose own fault is said when the block ends."""

        def tell(operation: Operation) -> None:
            self._keeper.gradients = torch.is_grad_enabled()
            try:
                if self._has_processes:
                    here = self._of_this_process(operation)
                    if here is None:
                        return
                    operation = here
                if self._keeper.gradients:
                    self._keeper.graph.note(operation)
                if not (self._has_compiled_parts and operation.is_in_compiled_part()):
                    listener(operation)
            except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
                self._fail(operation.module() or self._root, cause, operation)

        return tell

    def _of_this_process(self, operation: Operation) -> Operation | None:
        """Return an operation on ordinary tensors; None if there is nothing to record."""
        number = microbatch()
        if number is None:
            return None
        self._keeper.microbatches = max(self._keeper.microbatches, number + 1)
        tensors = list(tensors_in(operation.args))
        if any(map(is_dtensor, tensors)):
            self._of_dtensors(operation)
            return None
        if any(map(is_waiting, tensors)):
            return operation._replace(args=tree_map(_waited, operation.args))
        return operation

    def _of_dtensors(self, operation: Operation) -> None:
        """Refuse attention whose query and key are DTensors; their projections may be."""
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

    def _other(self, operation: Operation) -> None:
        call = fused_call(operation.func)
        if call is None:
            self._pass_on(operation)
        else:
            self._fused(operation, call)

    def _fused(self, operation: Operation, call: FusedCall) -> None:
        args, kwargs = operation.args, operation.kwargs

        def read() -> AttentionMatrix:
            one_query = _has_packed_heads(operation.innermost(), args)
            return call.matrix(args, kwargs, one_query=one_query, padded_to=self._padded_to)

        def value() -> Tensor:
            return call.value(args, kwargs, padded_to=self._padded_to)

        if self._keeper.gradients:
            self._keeper.graph.note(operation, is_attention=True)
        self._keep(operation, read, value, call.inside)

    def _flexible(self, operation: Operation) -> None:
        self.saw_flex_attention, flex = True, self._flex
        self._keep(operation, lambda: flex.matrix(operation), lambda: flex.value(operation))

    def _without_padding(self, operation: Operation) -> None:
        """Note how much padding nn.TransformerEncoder leaves out; only this operation knows."""
        mask = operation.args[1]
        with apart():
            self._padded_to[tuple(mask.sum(-1).tolist())] = mask.shape[-1]

    def _nested(self, operation: Operation) -> None:
        if operation.args[0].is_nested and (name := operation.module()) is not None:
            self._refuse(name, NESTED, operation.place())

    def product(self, matrix: LinearMap, value: Tensor, multiply: Callable[[], Tensor]) -> Tensor:
        """Record regard's own ``A @ value``, and return its output."""
        outer, self._multiplying = self._multiplying, True
        try:
            output = multiply()
        finally:
            self._multiplying = outer
        self._keeper.gradients = torch.is_grad_enabled()
        if isinstance(matrix, AttentionMatrix) and not in_backward():
            operation = Operation(torch.matmul, (), {}, output, self.tracer.name_of)
            self._keep(operation, lambda: matrix, lambda: value)
        return output

    def _keep(
        self,
        operation: Operation,
        read: Callable[[], AttentionMatrix],
        value: Callable[[], Tensor],
        inside: str = "",
    ) -> None:
        """Keep what was attended to; what cannot be kept is said when the block ends."""
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
            with apart(), torch.set_grad_enabled(self._keeper.gradients):
                take_value = self._keeper.take(name, read())
                if take_value is not None:
                    take_value(value())
        except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
            self._fail(name, cause, operation)

    def _take_handwritten(self, name: str, matrix: AttentionMatrix) -> TakeValue | None:
        if self._multiplying or self.absence.is_compiled:
            return None
        self.absence.note_attention(name)
        try:
            return self._keeper.take(name, matrix)
        except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
            self._fail(name, cause)
            return None

    def _fail(self, name: str, cause: Exception, operation: Operation | None = None) -> None:
        said = isinstance(cause, TypeError | ValueError | RuntimeError | MemoryError)
        reason = str(cause) if said else f"{type(cause).__name__}: {cause}"
        self._refuse(name, reason, None if operation is None else operation.place(), cause)

    def _refuse(
        self, name: str, reason: str, line: str | None, cause: Exception | None = None
    ) -> None:
        if not self._multiplying:
            self._keeper.refuse(name, reason, line, cause)


def _runs_flex_attention(model: nn.Module) -> bool:
    """Return True if a model of transformers runs its flex_attention, which is compiled."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "flex_attention"


def _has_packed_heads(module: nn.Module | None, args: tuple[Any, ...]) -> bool:
    """Return True if the axis of the tokens holds the heads that share a key.

    transformers packs them so for a single query token (``pack_gqa``).
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
    """Return True if an operation gave nothing: there were no tokens, or no texts."""
    first = next(tensors_in((output,)), None)
    return first is not None and not first.is_nested and not first.numel()


def _waited(value: object) -> object:
    """Return the tensor that the result of a collective operation stands for."""
    return cast(Any, value).trigger_wait() if is_waiting(value) else value


def _in_turn(first: Listener, second: Listener) -> Listener:
    def tell(operation: Operation) -> None:
        first(operation)
        second(operation)

    return tell


_NESTED_FROM_MASK = torch.ops.aten._nested_tensor_from_mask.default
_SOFTMAX_OF_NESTED = torch.ops.aten._safe_softmax.default
