"""Wrappers of the attention kernels that transformers has by name.

A wrapper is registered under the kernel's own name, so that no code of a model ever reads another
name. It is the original for every module but those that ask for lazy matrices.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from types import FrameType
from typing import Any, TypeAlias, cast

from torch import nn

from regard.errors import RegardError

Kernel: TypeAlias = Callable[..., Any]
"""An attention function of transformers, called with a module, query, key, value and a mask."""

Run: TypeAlias = Callable[[Kernel, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the original of a kernel, the module and the arguments; returns what it returns."""

_LOCK = Lock()
_WRAPPED: dict[str, "Wrapped"] = {}


@dataclass(eq=False)
class Wrapped:
    """A wrapper that is registered, what it replaced, and the number of those who need it."""

    name: str
    wrapper: Kernel
    earlier: Kernel | None
    count: int = 0


def interface() -> Any:
    """Return the class ``AttentionInterface`` of transformers.

    Raises:
        RegardError: transformers is not installed, or too old.
    """
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise RegardError(
            "regard.transformers needs transformers 5 or newer.\n"
            "    Run: pip install 'transformers>=5'"
        ) from error
    return AttentionInterface


def wrap(name: str, run: Run) -> Wrapped:
    """Register a wrapper under the name of a kernel, unless it is there, and return it."""
    kernels: dict[str, Kernel] = interface()._global_mapping
    with _LOCK:
        wrapped = _WRAPPED.get(name)
        # Another library may have registered its own since.
        if wrapped is None or kernels.get(name) is not wrapped.wrapper:
            wrapped = Wrapped(name, _wrapper(kernels.get(name), run), kernels.get(name))
            _WRAPPED[name] = wrapped
            kernels[name] = wrapped.wrapper
        wrapped.count += 1
        return wrapped


def unwrap(wrapped: Wrapped) -> None:
    """Restore the earlier kernel once nobody needs a wrapper, if the wrapper still stands."""
    kernels: dict[str, Kernel] = interface()._global_mapping
    with _LOCK:
        wrapped.count -= 1
        if wrapped.count:
            return
        if _WRAPPED.get(wrapped.name) is wrapped:
            del _WRAPPED[wrapped.name]
        if kernels.get(wrapped.name) is wrapped.wrapper:
            if wrapped.earlier is None:
                del kernels[wrapped.name]
            else:
                kernels[wrapped.name] = wrapped.earlier


def _wrapper(original: Kernel | None, run: Run) -> Kernel:
    if original is None:  # "eager", which is a function of each model's own file

        def eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            return run(_own_eager(module, caller), module, args, kwargs)

        return eager

    @wraps(original)
    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(original, module, args, kwargs)

    return wrapper


def _own_eager(module: nn.Module, caller: FrameType) -> Kernel:
    """Return the eager function of a model's file: the one that the calling code names.

    Raises:
        RegardError: the code names none, or several.
    """
    names = [name for name in caller.f_code.co_names if name.endswith("eager_attention_forward")]
    functions = {name: caller.f_globals[name] for name in names if name in caller.f_globals}
    if len(functions) != 1:
        raise RegardError(
            f"{type(module).__name__} names {len(functions)} eager functions; it is unknown which "
            "of them it runs.\n"
            "    End regard.transformers.lazy, and watch the model with regard.observe(model)."
        )
    return cast(Kernel, next(iter(functions.values())))
