"""`observe`: record the attention of a model without changing the model."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from inspect import getattr_static, getclosurevars
from os import PathLike
from types import FunctionType
from typing import Any, Literal, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_map

from regard.capture.distribution import (
    GATHERED,
    PIPELINE,
    Distribution,
    is_stage,
    is_waiting,
    local_tensor,
)
from regard.capture.fused_calls import (
    FLEX_ATTENTION,
    FusedCall,
    Read,
    batching,
    fused_call,
    read_flex,
    unread_attention,
)
from regard.capture.met_value import Met, MetValue
from regard.capture.recorder import WITHOUT_NUMBERS, Recorder, has_no_numbers
from regard.capture.refusals import UNSEEN, Absence, compiled_error, is_compiled
from regard.capture.selection import Selection
from regard.capture.storages import storage_key, tensors_in
from regard.capture.uncompiled import UNCOMPILED, check_compiled
from regard.capture.weight_tracks import has_packed_heads
from regard.errors import RegardError, is_sharded, shape_text
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
    attention_implementation,
    class_name,
    in_backward,
    is_compiled_module,
    is_compiling_wrapper,
    module_names,
    unwrapped,
)


@contextmanager
def observe(
    model: nn.Module,
    *,
    layers: Iterable[str | int] | None = None,
    heads: Iterable[int] | slice | None = None,
    queries: slice | None = None,
    keep: Literal["qk", "qkv"] | Sequence[Reduction] = "qk",
    device: torch.device | str | None = None,
    path: str | PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
    strict: bool = False,
    compiled: Literal["eager"] | None = None,
    max_weights: float = 4.0,
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
    attention written by hand as products and a softmax, and regard's own ``A @ value``. Attention
    of another kernel is refused: by the name of its operation, or because a module ran whose class
    is named attention, and nothing was seen in it. Compiled code is recorded with
    ``compiled="eager"`` only.

    Args:
        model: any module: Hugging Face with any ``attn_implementation``, timm, your own.
        layers: the layers to record: names of modules, or positions in the order they run. The
            default is all layers.
        heads: the heads to record: indices or a slice, on the axis before the queries. The default
            is all heads. A layer that is written by hand with three axes, which may merge texts
            and heads, is refused.
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
        progress: called after each attention with the number of attentions so far. If it raises an
            exception, it is not called again; recording continues, and the exception is raised when
            the block ends.
        strict: if True, raise an error if anything was refused, even if other layers were recorded.
        compiled: "eager" runs a model that ``torch.compile`` made, and its compiled parts, without
            their compiled code, with ``torch.compiler.set_stance("force_eager")``. Then the last
            bits of the output may differ from those of the compiled model. The setting holds for
            all threads until the block ends. By default, a model with a compiled part is an error.
        max_weights: the GiB of weights that are kept in memory, of layers whose weights do not
            follow from a query and a key. A layer that would pass it is refused.

    Yields:
        The Recording, which is filled while the model runs. If the model generates text with a KV
        cache, the calls of each layer are merged to one matrix when the block ends. Then the file
        is written.

    Raises:
        TypeError: model is not an ``nn.Module``, or an argument has the wrong type.
        ValueError: an argument selects nothing, or names something that does not exist.
        RegardError: the model or a part of it is compiled, or runs an attention implementation of
            transformers that observe does not see; or nothing was recorded, or less than an
            argument selects. The latter errors are raised when the block ends, so they never stop
            the model.

    Warns:
        RefusedWarning: some layers were recorded and others refused; ``seen.refused`` has their
            module, line and reason.
        UserWarning: a module multiplied scores by a value without a softmax.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), regard.nn.SelfAttention(8))
        >>> with regard.observe(model) as seen:
        ...     output = model(torch.randn(3, 4))
        >>> list(seen)
        ['1']
    """
    is_eager = check_compiled(compiled) == "eager"
    modules = _modules_of(model, is_eager=is_eager)
    _check_implementations(modules, is_eager=is_eager)
    called = {} if is_eager else _compiled_beside(modules)
    distribution = Distribution.of(model, modules)
    model = unwrapped(model)
    seen = Recording({}, model=class_name(model))
    seen.shard = None if distribution is None else distribution.shard
    selection = Selection.of(
        layers=layers, heads=heads, queries=queries, keep=keep, device=device, modules=modules
    )
    recorder = Recorder(seen, selection, path, progress, distribution, max_weights)
    watch = _Watch(model, recorder, is_eager=is_eager)
    # Casts that autocast cached before the block would not be recognised as parameters.
    torch.clear_autocast_cache()
    try:
        uncompiled = UNCOMPILED if is_eager else nullcontext()
        with uncompiled, watch.tracer, watched_products(watch.product):
            yield seen
    except BaseException as exception:
        watch.finish()
        recorder.abandon(exception)
        raise
    watch.finish()
    _refuse_unseen(watch.absence, recorder, seen, called)
    recorder.close()
    problem = recorder.problems.error()
    if problem is not None and (strict or recorder.problems.are_fatal or not seen.layers):
        raise problem
    if not (seen.layers or recorder.without):
        raise watch.absence.error()
    recorder.warn(stacklevel=3)
    watch.absence.warn({each.module for each in seen.refused})
    if recorder.progress_error is not None:
        raise recorder.progress_error


def _refuse_unseen(
    absence: Absence, recorder: Recorder, seen: Recording, called: Mapping[str, str]
) -> None:
    """Refuse code that ran compiled, and attention modules in which nothing was seen.

    ``called`` has the compiled function that a module calls, which is noted.
    """
    if absence.is_compiled:
        recorder.problems.add_text(str(compiled_error("model is compiled")))
    for name in absence.unseen({each.module for each in seen.refused}):
        recorder.refuse(name, UNSEEN)
    for name, function in called.items():
        how = f"it may be in the compiled function {function!r}; look with {_EAGER}"
        absence.note_missing(name, how, is_certain=False)


def _modules_of(model: object, *, is_eager: bool) -> dict[str, nn.Module]:
    """Return the modules of a model by name; raise an error if the model runs compiled."""
    if is_stage(model):
        raise TypeError(PIPELINE)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; observe needs a torch.nn.Module.\n"
            "    Pass the module whose forward runs the attention."
        )
    if not is_eager and is_compiled_module(model):
        raise compiled_error("model is compiled")
    modules = module_names(model)
    if not is_eager:
        _check_uncompiled(model, modules)
    return modules


def _check_implementations(modules: Mapping[str, nn.Module], *, is_eager: bool) -> None:
    """Raise an error if a model of transformers runs kernels that are no operations of PyTorch.

    A function that a user registered is accepted, because it may run operations that observe sees.
    """
    for name, module in modules.items():
        implementation = attention_implementation(module)
        if implementation == "flex_attention" and not is_eager:
            raise RegardError(
                f"{name!r} runs flex_attention, which transformers compiles; observe cannot look "
                'into compiled code.\n    Observe it with compiled="eager", or call '
                'model.set_attn_implementation("sdpa") first.'
            )
        if implementation is not None and _UNSEEN_IMPLEMENTATION.match(implementation):
            raise RegardError(
                f"{name!r} runs the attention implementation {implementation!r}; its kernels are "
                "no operations of PyTorch, so observe cannot see them.\n"
                '    Call model.set_attn_implementation("sdpa") first.'
            )


def _check_uncompiled(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raise an error for a module or a function of a model that torch.compile made."""
    # The wrapper of a compiled module has the name of the module inside.
    wrapped = {
        id(cast(Any, each)._orig_mod) for each in model.modules() if is_compiling_wrapper(each)
    }
    for name, module in modules.items():
        if id(module) in wrapped or is_compiled_module(module):
            raise compiled_error(f"model has a compiled module at {name!r}")
        for attribute, value in {"forward": _forward_of(module), **vars(module)}.items():
            if callable(value) and is_compiled(value):
                raise compiled_error(f"model has a compiled function at '{name}.{attribute}'")


def _compiled_beside(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the compiled function that each module calls by a global name or keeps in a list."""
    by_class = {kind: _compiled_outside(kind) for kind in {type(each) for each in modules.values()}}
    names: dict[str, str] = {}
    for name, module in modules.items():
        called = [*by_class[type(module)]]
        for attribute, value in vars(module).items():
            items = cast("list[object]", value) if isinstance(value, list | tuple) else []
            called += [f"{attribute}[{at}]" for at, item in enumerate(items) if is_compiled(item)]
        if called:
            names[name] = called[-1]
    return names


def _compiled_outside(kind: type[nn.Module]) -> list[str]:
    """Return the compiled functions that a class calls by a global name or from a closure."""
    names: list[str] = []
    for function in vars(kind).values():
        if isinstance(function, FunctionType):
            variables = getclosurevars(function)
            outside = {**variables.globals, **variables.nonlocals}
            names += [name for name, value in outside.items() if is_compiled(value)]
    return names


def _forward_of(module: nn.Module) -> object:
    """Return the ``forward`` of a module; None for a scripted module, whose class has none."""
    return vars(module).get("forward", getattr_static(type(module), "forward", None))


class _Watch:
    """A set of listeners that pass each attention of the model's modules to a Recorder.

    ``finish`` must be called when the block has ended. ``absence`` collects operations that might
    have been attention.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, *, is_eager: bool) -> None:
        self._root = class_name(model)
        self._recorder = recorder
        self._padded_to: dict[tuple[int, ...], int] = {}
        self._unbatched: dict[int | None, int] = {}  # the axes of tensors before a batch was added
        self._batching_call: tuple[int, int] | None = None  # the call that added it
        self._has_processes = dist.is_available() and dist.is_initialized()
        self._dtensor_products: set[str] = set()  # modules with a product of two activations
        self._multiplying = False
        self._unmet: dict[str, tuple[str, str]] = {}  # the reason and the line by module
        self.absence = Absence(model, uncompiled=is_eager)
        handwritten = MetValue(model, self._record_met, self._refuse, self._leave, self.absence)
        self._handwritten = handwritten
        self._safe = cache(self._reporting)
        self.tracer = Tracer(model, self._listeners(), self._listener_of)

    def _listeners(self) -> Mapping[Callable[..., Any], Listener]:
        """Return the listeners of the operations that always have one."""
        listeners: dict[Callable[..., Any], Listener] = {
            **self._handwritten.listeners,
            FLEX_ATTENTION: self._flexible,
            _NESTED_FROM_MASK: self._without_padding,
        }
        if (operation := batching()) is not None:
            listeners[operation] = self._batch
        return {operation: self._safe(listener) for operation, listener in listeners.items()}

    def _listener_of(self, func: Callable[..., Any]) -> Listener | None:
        """Return the current listener of any other operation; None if it is ignored."""
        if fused_call(func) is not None:
            return self._safe(self._fused)
        if unread_attention(func) is not None:
            return self._safe(self._unread)
        if isinstance(func, HigherOrderOperator):
            return self._safe(self._note_function)
        listener = self._handwritten.listener_of(func)
        if listener is None and (self._has_processes or torch.is_grad_enabled()):
            listener = self._handwritten.follow
        if listener is None and _is_projection(func):
            listener = _noted
        return None if listener is None else self._safe(listener)

    def _reporting(self, listener: Listener) -> Listener:
        """Return a listener whose exceptions are reported when the block ends."""

        def listen(operation: Operation) -> None:
            try:
                if self._has_processes:
                    here = self._of_this_process(operation)
                    if here is None:
                        return
                    operation = here
                if torch.is_grad_enabled():
                    self._recorder.graph.note(operation)
                if _is_projection(operation.func) and not _is_empty(operation.output):
                    self.absence.note_running(operation)
                listener(operation)
            except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
                self._fail(operation.module() or self._root, cause, operation)

        return listen

    def _of_this_process(self, operation: Operation) -> Operation | None:
        """Return an operation with ordinary tensors as arguments; None if it is ignored."""
        tensors = list(tensors_in(operation.args))
        if any(map(is_sharded, tensors)):
            self._of_dtensors(operation)
            return None
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
            self._refuse(name, GATHERED, operation.line())
        elif operation.func in PRODUCTS:
            module = cast(nn.Module, operation.innermost())
            own = {storage_key(local_tensor(weight)) for weight in module.parameters(recurse=False)}
            factors = {storage_key(local_tensor(each)) for each in tensors_in(operation.args)}
            if not own & factors:
                self._dtensor_products.add(name)
        elif fused_call(operation.func) is not None or operation.func is FLEX_ATTENTION:
            self._refuse(name, GATHERED, operation.line())

    def _batch(self, operation: Operation) -> None:
        """Note the axes of a tensor, to which a fused call may be adding a batch of 1."""
        self._handwritten.follow(operation)
        call, source = operation.instruction(), operation.args[0]
        if call != self._batching_call:
            self._batching_call, self._unbatched = call, {}
        self._unbatched.setdefault(storage_key(source), source.ndim)

    def _fused(self, operation: Operation) -> None:
        call = cast(FusedCall, fused_call(operation.func))
        added = 0
        if self._unbatched and operation.instruction() == self._batching_call:
            query = operation.args[0]
            added = query.ndim - self._unbatched.get(storage_key(query), query.ndim)

        def read() -> Read:
            query, key = operation.args[:2]
            module = operation.innermost()
            is_shared = getattr(module, "num_key_value_groups", 1) > 1 and query.ndim == 4
            one_query = (
                is_shared
                and query.shape[1] == key.shape[1]
                and has_packed_heads(cast(nn.Module, module), query.shape[1:3])
            )
            padded_to, kwargs = self._padded_to, operation.kwargs
            matrix, value = call.read(
                operation.args, kwargs, one_query=one_query, padded_to=padded_to
            )
            if not added:
                return matrix, value
            return matrix[(0,) * added], lambda: value()[(0,) * added]

        self._keep(operation, read, call.inside)

    def _unread(self, operation: Operation) -> None:
        self.absence.note_compiled(operation)
        name = None if self.absence.is_compiled else operation.module()
        if name is not None and not _is_empty(operation.output):
            self.absence.note_attention(name)
            reason = _UNREAD.format(unread_attention(operation.func))
            self._refuse(name, reason, operation.line())

    def _note_function(self, operation: Operation) -> None:
        if (name := operation.module()) is not None:
            how = f"it may be in a function that {operation.func} runs ({operation.line()})"
            self.absence.note_missing(name, how, is_certain=False)

    def _flexible(self, operation: Operation) -> None:
        self._keep(operation, lambda: read_flex(operation))

    def _without_padding(self, operation: Operation) -> None:
        """Store the padded length of a batch whose padding nn.TransformerEncoder removes.

        No later operation has it.
        """
        self._handwritten.follow(operation)
        mask = operation.args[1]
        with apart():
            self._padded_to[tuple(mask.sum(-1).tolist())] = mask.shape[-1]

    def product(self, matrix: LinearMap, value: Tensor, multiply: Callable[[], Tensor]) -> Tensor:
        """Record regard's own ``A @ value``, and return its output."""
        outer, self._multiplying = self._multiplying, True
        try:
            output = multiply()
        finally:
            self._multiplying = outer
        if isinstance(matrix, AttentionMatrix) and not in_backward():
            operation = Operation(torch.matmul, (), {}, output, self.tracer.name_of)
            self._keep(operation, lambda: (matrix, lambda: value))
        return output

    def _keep(self, operation: Operation, read: Callable[[], Read], inside: str = "") -> None:
        """Record an attention; a failure is reported when the block ends."""
        self.absence.note_compiled(operation)
        name = None if self._multiplying or self.absence.is_compiled else operation.module()
        if name is None:
            return
        if _is_empty(operation.output):
            self.absence.note_product(operation)
            self.absence.note_missing(name, "it ran without tokens", is_certain=False)
            return
        if inside:
            name = inside if name == self._root else f"{name}.{inside}"
        self.absence.note_attention(name)
        if any(map(has_no_numbers, tensors_in(operation.args))):
            self._refuse(name, WITHOUT_NUMBERS, operation.line())
            return
        gradients = torch.is_grad_enabled()
        try:
            with apart(), torch.set_grad_enabled(gradients):
                self._recorder.record(name, *read(), gradients=gradients)
        except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
            self._fail(name, cause, operation)

    def _record_met(self, met: Met) -> None:
        """Record an attention that is written by hand."""
        is_in_vain = met.is_again and not self._recorder.selection.values
        if self._multiplying or self.absence.is_compiled or is_in_vain:
            return
        self.absence.note_attention(met.name)
        if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
            self._refuse(met.name, _TANGENTS, met.lines["value"])
            return
        gradients = torch.is_grad_enabled() and met.has_gradient
        try:
            with apart(), torch.set_grad_enabled(gradients):
                if self._recorder.skips(met.name):
                    return
                is_merged = met.weights.ndim == 3 and not met.is_one_call
                if is_merged and self._recorder.selection.heads is not None:
                    raise ValueError(_NO_HEADS.format(shape_text(met.weights.shape)))
                matrix = met.matrix(gradients=gradients)
                if matrix.mask is not None and bool(met.weights.isnan().any()):
                    self.absence.note_nan(met.name)
                value = met.value
                if value is not None and matrix.ndim < value.ndim:
                    value = value.flatten(-4, -3)  # heads in two axes, which the matrix has in one
                read_value = None if value is None else lambda: value
                self._recorder.record(met.name, matrix, read_value, gradients=gradients)
        except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
            self._fail(met.name, cause)

    def _leave(self, name: str, reason: str, line: str) -> None:
        """Note weights that met no value; their module may still record another attention."""
        if not self._multiplying:
            self._recorder.reserve(name)
            self._unmet.setdefault(name, (reason, line))

    def finish(self) -> None:
        """Refuse the modules whose weights met no value; call this when the block has ended."""
        self._handwritten.finish()
        for name, (reason, line) in self._unmet.items():
            if self._recorder.has(name):
                self.absence.note_missing(name, reason.partition(".\n")[0])
            else:
                self._refuse(name, reason, line)

    def _fail(self, name: str, cause: Exception, operation: Operation | None = None) -> None:
        kinds = RegardError | TypeError | ValueError | RuntimeError | MemoryError
        said = isinstance(cause, kinds)
        reason = str(cause) if said else f"{type(cause).__name__}: {cause}"
        self._refuse(name, reason, None if operation is None else operation.line(), cause)

    def _refuse(
        self, name: str, reason: str, line: str | None, cause: Exception | None = None
    ) -> None:
        if not self._multiplying:
            reason = _TANGENTS if forward_ad._current_level >= 0 else reason  # pyright: ignore[reportPrivateUsage]
            self._recorder.refuse(name, reason, line, cause)


_TANGENTS = (
    "it ran in forward-mode differentiation (jvp, jacfwd, linearize), in which weights also meet "
    "tangents of the value.\n    Observe a run of the model beside it."
)
_NO_HEADS = (
    "its weights have the shape {}, whose first axis may be heads, texts or both, so heads= cannot "
    "choose among them.\n    Observe it without heads=, and choose with seen[layer][index]."
)
_EAGER = 'observe(..., compiled="eager")'
_UNREAD = (
    "{} computes attention, and observe does not read this operation.\n"
    "    Let the layer call scaled_dot_product_attention. For transformers, call "
    'model.set_attn_implementation("sdpa").'
)
# FlashAttention 4, and kernels of a hub except those of FlashAttention 2 and 3, whose operations
# observe reads.
_UNSEEN_IMPLEMENTATION = re.compile(
    r"(paged\|)?(flash_attention_4$|[^/]+/(?!(vllm-)?flash-attn[23]?([@:]|$)))"
)
_PROJECTION = re.compile(r"mm|linear|gemm|gemv|matmul")


def _noted(_: Operation) -> None:
    """Ignore a product whose modules are noted."""


@cache
def _is_projection(func: Callable[..., Any]) -> bool:
    """Return True for a product of matrices, also a quantised one; almost every module runs one."""
    return isinstance(func, OpOverload) and _PROJECTION.search(func.name()) is not None


def _is_empty(output: object) -> bool:
    """Return True if the first output tensor is empty, because there were no tokens or texts."""
    first = next(tensors_in((output,)), None)
    return first is not None and not first.is_nested and not first.numel()


def _waited(value: object) -> object:
    """Wait for a pending collective operation and return its tensor; return others unchanged."""
    return cast(Any, value).trigger_wait() if is_waiting(value) else value


_NESTED_FROM_MASK = torch.ops.aten._nested_tensor_from_mask.default
