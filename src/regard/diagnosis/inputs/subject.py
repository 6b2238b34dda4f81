"""Somebody's module or function: built, copied, and run so that nothing else changes."""

import ast
import copy
import inspect
import io
import random
import sys
import textwrap
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from typing import Any, cast

import torch
from torch import nn

from regard.diagnosis.inputs.signature import Argument, definition_of
from regard.errors import check_numbers

FEW_BITS = (torch.float16, torch.bfloat16)


@contextmanager
def quiet(seed: int = 0, *, runs_compiled: bool = False) -> Generator[None]:
    """Run somebody's code: what it prints is dropped, random states are put back.

    Compiled code runs as Python unless ``runs_compiled``.
    """
    state = random.getstate()
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=[]),
        redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),  # without it nn.MultiheadAttention is one operation, all in one
        nullcontext() if runs_compiled else _uncompiled(),
    ):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)  # that of CUDA stays as it is
        try:
            yield
        finally:
            random.setstate(state)
            torch.set_default_dtype(dtype)


@contextmanager
def kept_defaults(call: Callable[..., Any]) -> Generator[set[str]]:
    """Give lists, dicts and sets that are defaults of arguments back what they held.

    Yields:
        The names of the arguments whose default the code has changed, after the run.
    """
    parts = cast("Iterable[nn.Module]", call.modules()) if isinstance(call, nn.Module) else ()
    functions = {type(part).forward for part in parts if not is_installed(part)} or {call}
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    held: list[tuple[str, Any, Any]] = [
        (p.name, p.default, p.default.copy())
        for p in parameters
        if isinstance(p.default, list | dict | set)
    ]
    changed: set[str] = set()
    try:
        yield changed
    finally:
        for name, default, before in held:
            if len(default) != len(before):
                changed.add(name)
                default.clear()
                default.extend(before) if isinstance(default, list) else default.update(before)


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled code as Python, whose operations can be seen.

    A function that PyTorch's compiler meets under a ``TorchDispatchMode`` is never compiled again,
    which would break every later ``flex_attention`` of the process.
    """
    # To ask the compiler for it imports it, which takes a second, so it is asked where it may run.
    if {"torch._dynamo", "torch.nn.attention.flex_attention"}.isdisjoint(sys.modules):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def is_installed(thing: object) -> bool:
    """Return True if code belongs to an installed package, whose masks mean what it documents."""
    module = (getattr(definition_of(thing), "__module__", None) or "").partition(".")[0]
    return module in ("torch", "transformers", "timm", "regard")


def built_from(
    thing: object, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the module that a class builds; a module or a function as it is.

    Raises:
        TypeError: it cannot be called, or the class's arguments do not fit.
    """
    made = thing
    if inspect.isclass(thing):
        try:
            inspect.signature(thing).bind(*args, **options)
        except TypeError as error:
            parameters = inspect.signature(thing).parameters.values()
            takes = ", ".join(parameter.name for parameter in parameters) or "none"
            raise TypeError(
                f"the arguments do not fit {thing.__name__} ({error}); it takes {takes}.\n"
                f"    Give them after it: regard.check({thing.__name__}, ...)."
            ) from error
        with suppress(Exception):  # what cannot be copied is passed as it is
            args, options = copy.deepcopy((args, options))
        with quiet():
            made = thing(*args, **options)
    if not callable(made):
        raise TypeError(
            f"thing is {type(made).__name__}; it must be a module, a function or a class.\n"
            "    Give the attention itself: regard.check(SelfAttention, 16, 4)."
        )
    return made


def call_to_copy(name: str, arguments: Iterable[Argument], width: int) -> str:
    """Return a call of check with an example, filled in as far as the names tell."""
    known = ("x", "query", "key", "value")
    needed = [a for a in arguments if a.required]
    values = "".join(f"torch.randn(2, 7, {width}), " for a in needed if a.role in known).strip()
    own = {"memory": f"torch.randn(2, 7, {width})"}
    rest = ", ".join(f"{a.name!r}: {own.get(a.role, '...')}" for a in needed if a.role not in known)
    return f"regard.check({name}, args=({values})" + (f", kwargs={{{rest}}})" if rest else ")")


def copied(module: nn.Module) -> nn.Module:
    """Return a copy in eval mode and float32, so that nothing happens to the module itself.

    Raises:
        ValueError: it cannot be copied.
    """
    for parameter in module.parameters():
        check_numbers(type(module).__name__, parameter.device)
    own = independent(module)
    kept = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    if any(id(part) in kept for part in (*own.modules(), *own.parameters(), *own.buffers())):
        raise _uncopied(module, "its copy shares modules or tensors with it")
    floats = {p.dtype for p in own.parameters() if p.is_floating_point()}
    return (own if floats <= {torch.float32} else own.float()).eval()


def uses_flex_attention(module: nn.Module) -> bool:
    """Return True if the code of a module, or of a part of it, has imported flex_attention."""
    flex = getattr(sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", None)
    around = (getattr(type(part).forward, "__globals__", {}) for part in module.modules())
    return flex is not None and any(v is flex for names in around for v in names.values())


def independent(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares no tensor with it.

    Raises:
        ValueError: it cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise _uncopied(module, f"{type(error).__name__}: {error}") from error


def _uncopied(module: nn.Module, reason: str) -> ValueError:
    name = type(module).__name__
    return ValueError(
        f"{name} cannot be copied ({reason}); check runs copies only, so that nothing happens to "
        f"yours.\n    Give the class: regard.check({name}, ...)."
    )


def source_of(target: object) -> str:
    """Return the text of a class or function without comments; empty where there is none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cast(Any, target))))
    except (OSError, TypeError, SyntaxError):
        return ""
    return ast.unparse(tree)  # without comments, which decide nothing
