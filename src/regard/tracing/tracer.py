"""A tracer of the operations that a model runs, with the module and the user's line of each.

``Tracer`` is a ``TorchDispatchMode``. It is called below autograd and autocast, after PyTorch has
chosen its kernels. So every fast path stays, and no output bit changes; the one choice of PyTorch
that depends on modes is undone in ``whole_batches``. It observes one thread, while its block runs.
It patches no module and sets no hook. It observes:

- The operations below autograd, such as ``aten.mm``, ``aten._softmax`` and
  ``aten._scaled_dot_product_flash_attention_for_cpu``. In ``inference_mode``, composite operations
  such as ``aten.matmul`` arrive whole, and the Tracer runs them as the operations that they consist
  of. Only those that return a view, such as ``aten.reshape``, stay whole.
- Under autocast: the arguments after the cast.
- Higher-order operations, such as ``flex_attention``.

It ignores the operations of a backward pass, also the forward that a checkpoint runs again there.

The listener of an operation is looked up when it has run; an operation without a listener costs
nothing more. The listener is called while the model's frames are still on the stack, so it must ask
for the module and the line before it returns. A listener must catch its own errors, which would
stop the model, and must run tensor operations inside ``apart()``.
"""

import sys
import sysconfig
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.tracing.whole_batches import KERNEL, PRODUCTS, WHOLE_BATCHES, whole


class Operation(NamedTuple):
    """An operation that has just run.

    Attributes:
        func: an ``OpOverload`` such as ``torch.ops.aten.bmm.default``, or a higher-order operation.
        args: the positional arguments, with the model's own tensors. The model may change them as
            soon as the listener returns.
        kwargs: the keyword arguments.
        output: the result, with the model's own tensors.
        name_of: returns the name of a module of the traced model, and None for any other object.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    name_of: Callable[[object], str | None]

    def line(self) -> str:
        """Return the ``file:line`` that ran it, in the innermost module; libraries count as well.

        Call this only while the listener runs.
        """
        inner: FrameType | None = None
        for frame in _frames():
            if _is_in(frame.f_code.co_filename, _ENGINE):
                continue
            own = not _is_in(frame.f_code.co_filename, _LIBRARIES)
            inner = frame if own else inner or frame
            if own or self._module_of(frame) is not None:
                break
        return f"{inner.f_code.co_filename}:{inner.f_lineno}" if inner else "<unknown>:0"

    def running(self) -> tuple[str, ...]:
        """Return the names of the running modules, from the innermost to the model.

        Call this only while the listener runs. The result is empty if ``module`` is None.
        """
        if self.module() is None:
            return ()
        return tuple(dict.fromkeys(name for _, name in self._module_frames()))

    def module(self) -> str | None:
        """Return the name of the innermost module whose method is running; None outside the model.

        The name of the model itself is that of its class. Call this only while the listener runs.
        """
        frame, name = next(self._module_frames(), (None, None))
        # Operations of generate() itself or its assistant belong to no forward.
        beside = frame is not None and frame.f_code.co_filename.startswith(_GENERATION)
        return None if beside else name

    def instruction(self) -> tuple[int, int]:
        """Return the identity of the Python instruction that runs it, as long as that runs.

        The parts of one call of a function that is written in C++ share it. Call this only while
        the listener runs.
        """
        for frame in _frames():  # a generator expression would keep the frames alive
            if frame.f_code is not _HANDLER:
                return id(frame), frame.f_lasti
        return 0, 0

    def is_compiled(self) -> bool:
        """Return True if a compiled function runs it in place of the model's modules.

        Call this only while the listener runs. The result is False if a module calls the compiled
        function, because the module is then known.
        """
        has_module = compiled = entered = False
        for frame in _frames():
            if self._module_of(frame) is not None:
                if entered or not compiled:
                    return False
                has_module = True
            elif frame.f_code.co_filename == _COMPILER:
                compiled = True
                entered |= frame.f_code.co_name == "compile_wrapper"
                if entered and has_module:
                    return True
        return entered

    def innermost(self) -> nn.Module | None:
        """Return the innermost running module; call this only while the listener runs."""
        frame = next(self._module_frames(), (None,))[0]
        return None if frame is None else cast(nn.Module, _receiver(frame))

    def local(self, name: str) -> Any:
        """Return a local variable of the innermost running module's method.

        Call this only while the listener runs. The result is None without such a variable.
        """
        frame = next(self._module_frames(), (None,))[0]
        return None if frame is None else frame.f_locals.get(name)

    def _module_frames(self) -> Iterator[tuple[FrameType, str]]:
        """Yield the frames that run methods of modules, with the modules' names."""
        for frame in _frames():
            name = self._module_of(frame)
            if name is not None:
                yield frame, name

    def _module_of(self, frame: FrameType) -> str | None:
        """Return the name of the module whose method a frame runs."""
        return self.name_of(_receiver(frame))


def _receiver(frame: FrameType) -> object:
    """Return the object whose method a frame runs, whatever the method calls it; else None."""
    code = frame.f_code
    owner = code.co_qualname.rpartition(".")[0]
    is_method = bool(owner) and not owner.endswith("<locals>")
    # Reading f_locals keeps all locals of a frame alive, so functions are skipped. One that stands
    # in a module's place has the first name.
    if not code.co_argcount or not (is_method or code.co_varnames[0] == "self"):
        return None
    return frame.f_locals.get(code.co_varnames[0])


class _Modules:
    """The modules of a model, including those that are added while it is traced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The modules are kept alive, so that no other object gets their id.
        self._names: dict[int, tuple[str, nn.Module]] = {}
        self._strangers: dict[int, ref[nn.Module]] = {}
        self._learn()

    def name_of(self, module: object) -> str | None:
        """Return the name that a module had when it first ran; None for any other object."""
        entry = self._names.get(id(module))
        if entry is None and isinstance(module, nn.Module) and not self._is_stranger(module):
            self._learn()
            entry = self._names.get(id(module))
            if entry is None:
                self._strangers[id(module)] = ref(module)
        return None if entry is None else entry[0]

    def _is_stranger(self, module: nn.Module) -> bool:
        stranger = self._strangers.get(id(module))
        return stranger is not None and stranger() is module

    def _learn(self) -> None:
        for name, module in module_names(self._model).items():
            self._names.setdefault(id(module), (name, module))


Listener: TypeAlias = Callable[[Operation], None]


class Tracer(TorchDispatchMode):
    """A context manager that calls a listener for each operation that this thread runs.

    Args:
        model: the model, whose modules name the operations.
        listeners: the listener of each operation.
        otherwise: returns the current listener of an operation that ``listeners`` lacks; None if
            the operation is ignored. It is called for each of these operations.

    Attributes:
        name_of: returns the name of a module of the model, also of one that is added while the
            block runs, and None for any other object.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, PyTorch wraps the handler, and the first operation imports the compiler.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # With False, PyTorch runs compiled parts uncompiled, which changes the last bits.
        return True

    def __init__(
        self,
        model: nn.Module,
        listeners: Mapping[Callable[..., Any], Listener],
        otherwise: Callable[[Callable[..., Any]], Listener | None] | None = None,
    ) -> None:
        super().__init__()
        _leave_uncompiled()
        _ordinary()
        self.name_of = _Modules(model).name_of
        self._listeners = listeners
        self._otherwise = otherwise

    def __enter__(self) -> "Tracer":
        WHOLE_BATCHES.__enter__()
        return cast(Tracer, super().__enter__())

    def __exit__(self, *exception: Any) -> None:
        """Stop tracing, also if a block that began later is still running."""
        from torch.utils._python_dispatch import (
            _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage]
            _pop_mode,  # pyright: ignore[reportPrivateUsage]
            _push_mode,  # pyright: ignore[reportPrivateUsage]
        )

        later: list[TorchDispatchMode] = []
        while (mode := _get_current_dispatch_mode()) not in (self, None):
            later.append(cast(TorchDispatchMode, _pop_mode()))
        super().__exit__(*exception)
        WHOLE_BATCHES.__exit__()
        for mode in reversed(later):
            _push_mode(mode)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        is_composite = _is_composite(func)
        if is_composite or func in _FAST_PATHS:
            with _state_of_the_call():
                if is_composite and not _has_own_kernel(func, args):
                    if func in PRODUCTS:
                        args = whole(*args)
                    with self:
                        return cast(Any, func)._op_dk(_COMPOSITE, *args, **kwargs or {})
                output = func(*args, **kwargs or {})
        elif func is torch.ops.higher_order.cond:
            is_true, then, otherwise, operands = args
            with self:
                output = (then if is_true else otherwise)(*operands)
        else:
            output = func(*args, **kwargs) if kwargs else func(*args)
        listener = self._listeners.get(func)
        if listener is None and self._otherwise is not None:
            listener = self._otherwise(func)
        if listener is not None and not in_backward():
            listener(Operation(func, args, kwargs or {}, output, self.name_of))
        return output


@cache
def _leave_uncompiled() -> None:
    """Exclude the handler and the functions it calls from PyTorch's compiler.

    Otherwise the compiler traces the handler when a compiled ``flex_attention`` reaches the Tracer.
    This does not import the compiler.
    """
    try:
        frames = cast(Any, torch)._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(_HANDLER, skip)
    except AttributeError as cause:
        raise RuntimeError(
            f"torch {torch.__version__} has another compiler than observe and check know; they "
            f"know {_KNOWN}.\n    Install that version."
        ) from cause


@cache
def _is_composite(func: Any) -> bool:
    """Return True for an operation that inference mode and torch.cond do not decompose.

    The result is False for an operation that returns a view, because PyTorch must still connect
    the view with its base.
    """
    if not isinstance(func, OpOverload):
        return False
    returns = func._schema.returns  # pyright: ignore[reportPrivateUsage]
    views = [each.alias_info for each in returns if each.alias_info is not None]
    are_tensors = bool(returns) and all("Tensor" in str(each.type) for each in returns)
    return are_tensors and all(alias.is_write for alias in views) and _has_kernel(func, _COMPOSITE)


def _has_own_kernel(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if the tensors' kind or device has one kernel for the whole operation."""
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    keys = {_DEVICE_KEYS.get(each.device.type) for each in tensors}
    return any(t.is_nested for t in tensors) or any(k is None or _has_kernel(func, k) for k in keys)


def _has_kernel(func: Any, key: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
    return bool(has_kernel(func.name(), key))


def _state_of_the_call() -> AbstractContextManager[None]:
    """Return a context with the dispatch state of the model's call, for composite operations.

    A handler runs below autocast and below view tracking. The parts of a composite operation need
    both: for a view that is not connected with its parameter, ``linear`` chooses another kernel.
    """
    with cast(Any, torch)._C._RestorePythonTLSSnapshot():
        hidden = torch._C._dispatch_tls_local_exclude_set()  # pyright: ignore[reportPrivateUsage]
    included = torch._C._dispatch_tls_local_include_set()  # pyright: ignore[reportPrivateUsage]
    return torch._C._ForceDispatchKeyGuard(included, hidden)  # pyright: ignore[reportPrivateUsage]


@cache
def _ordinary() -> tuple[Any, Any]:
    """Return the dispatch keys that a new thread includes and excludes."""
    sets: list[Any] = []

    def look() -> None:
        sets.append(torch._C._dispatch_tls_local_include_set())  # pyright: ignore[reportPrivateUsage]
        sets.append(torch._C._dispatch_tls_local_exclude_set())  # pyright: ignore[reportPrivateUsage]

    thread = Thread(target=look)
    thread.start()
    thread.join()
    return sets[0], sets[1]


@contextmanager
def apart() -> Generator[None, None, None]:
    """Run tensor operations outside every mode, without autocast and gradients.

    No Tracer observes them. New tensors are ordinary ones even if the model runs in inference mode.
    """
    from torch.utils._python_dispatch import (
        _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
    )

    with (
        # A handler runs with vmap and other transforms disabled.
        torch._C._ForceDispatchKeyGuard(*_ordinary()),  # pyright: ignore[reportPrivateUsage]
        # Modes are popped, not disabled: the code inside may use its own modes.
        _without_function_modes(),
        torch._C.DisableTorchFunctionSubclass(),  # pyright: ignore[reportPrivateUsage]
        torch._C._DisableAutocast(),  # pyright: ignore[reportPrivateUsage]
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),
    ):
        yield


@contextmanager
def _without_function_modes() -> Generator[None, None, None]:
    from torch.overrides import _pop_mode_temporarily  # pyright: ignore[reportPrivateUsage]

    with ExitStack() as popped:
        for _ in range(torch._C._len_torch_function_stack()):  # pyright: ignore[reportPrivateUsage]
            popped.enter_context(_pop_mode_temporarily())
        yield


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module once, by its name; the name of the model itself is that of its class.

    Wrappers are not part of the names: a module inside DistributedDataParallel, FSDP,
    checkpoint_wrapper or torch.compile has the name of its wrapper.
    """
    named = cast("dict[str, nn.Module]", dict(cast(Any, model.named_modules())))
    names: dict[str, str] = {}
    for path, module in named.items():
        outer, _, own = path.rpartition(".")
        wrapped = bool(path) and _wrapped(named[outer]) is module
        names[path] = names[outer] if wrapped else f"{names.get(outer, '')}.{own}".strip(".")
    root = class_name(unwrapped(model))
    return {names[path] or root: module for path, module in named.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model itself, without the wrappers of DDP, FSDP, checkpoints and compilers."""
    inner = _wrapped(model)
    return model if inner is None else unwrapped(inner)


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class, without the class that fully_shard adds."""
    kind = type(model)
    first = kind.__bases__[0]
    is_sharded = first.__name__ == "FSDPModule" and first.__module__.startswith("torch.")
    return kind.__bases__[-1].__name__ if is_sharded else kind.__name__


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of PyTorch; None if the module is not a wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return cast(nn.Module, module.module)
    inside = dict(module.named_children())
    return next((inside[name] for name in _WRAPPED if name in inside), None)


def attention_implementation(module: nn.Module) -> str | None:
    """Return the attention implementation of a module of transformers; None for any other."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return implementation if isinstance(implementation, str) else None


def is_compiled_module(module: nn.Module) -> bool:
    """Return True for a module that torch.compile made, in place or around another one."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or is_compiling_wrapper(module)


def is_compiling_wrapper(module: nn.Module) -> bool:
    """Return True for the module that torch.compile returns for a module."""
    return type(module).__module__.startswith("torch._dynamo")


def in_compiled() -> bool:
    """Return True if a function that torch.compile made is running on this thread."""
    return any(
        frame.f_code.co_filename == _COMPILER and frame.f_code.co_name == "compile_wrapper"
        for frame in _frames()
    )


def in_backward() -> bool:
    """Return True if this thread runs a backward pass, which includes recomputed checkpoints."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _folder(module: object) -> str:
    return str(Path(cast(Any, module).__file__).parent)


_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # pyright: ignore[reportPrivateUsage]
_FAST_PATHS = (
    torch.ops.aten._native_multi_head_attention.default,
    torch.ops.aten._transformer_encoder_layer_fwd.default,
)
"""Kernels that call composite operations, such as ``linear``, with the state of the call."""
_DEVICE_KEYS = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta", "mps": "MPS", "xpu": "XPU"}
_HANDLER = Tracer.__torch_dispatch__.__code__
_KNOWN = "torch 2.13"
# The folder of installed packages is inside the folder of Python's own library.
_PACKAGES = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
_COMPILER = str(Path(_folder(torch), "_dynamo", "eval_frame.py"))
_STANDARD = sysconfig.get_paths()["stdlib"]
_ENGINE = (_folder(torch), str(Path(__file__).parents[1]))  # PyTorch and regard
_LIBRARIES = tuple(f"{folder}/transformers" for folder in _PACKAGES)
_GENERATION = tuple(f"{folder}/generation/" for folder in _LIBRARIES)


@cache
def _is_in(file: str, folders: tuple[str, ...]) -> bool:
    """Return True if a file is in one of the folders, or in Python's own library."""
    if any(file.startswith(f"{folder}/") for folder in folders):
        return True
    return file.startswith((_STANDARD, "<frozen ")) and not file.startswith(_PACKAGES)


def _frames() -> Iterator[FrameType]:
    """Yield the model's frames from the innermost, without the listener's own."""
    inner: FrameType = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    frame: FrameType | None = inner
    while frame is not None and frame.f_code is not _HANDLER:
        frame = frame.f_back
    frame = frame or inner  # regard's own products do not pass through a Tracer
    while frame is not None:
        if frame.f_code is not KERNEL:
            yield frame
        frame = frame.f_back
