"""Choice of what is checked in somebody's file, with the arguments that it needs."""

import difflib
import inspect
import re
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from regard.diagnosis.checker import check
from regard.diagnosis.inputs.class_arguments import guessed_arguments, guessed_value
from regard.diagnosis.inputs.signature import definition_of
from regard.diagnosis.inputs.subject import source_of
from regard.errors import RegardError

# What an attention cannot do without, or is called, finished or not.
_ATTENTION = re.compile(r"softmax|attention|\.exp\(", re.IGNORECASE)
_WIDTH = re.compile(r"dim|width|size|embd?|hidden|channels|d_model|d_in|d_out")
_COUNT = re.compile(r"heads?$|^h$|nhead")
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_OBJECT = re.compile(r"config|cfg|args|params|settings")


def attentions(module: ModuleType) -> dict[str, Any]:
    """Return what in a module may be an attention, by its name and in its order.

    Its own classes and functions with a softmax in their text, or attention in their name, and
    modules built from such a class: then not the class as well.
    """
    found = {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and _may_be_one(thing, module)
    }
    built = {type(thing) for thing in found.values() if isinstance(thing, nn.Module)}
    return {name: thing for name, thing in found.items() if thing not in built}


def _may_be_one(thing: object, module: ModuleType) -> bool:
    if isinstance(thing, nn.MultiheadAttention):
        return True
    own = definition_of(thing)
    is_code = isinstance(own, FunctionType) or (inspect.isclass(own) and issubclass(own, nn.Module))
    is_own = is_code and own.__module__ == module.__name__
    return is_own and _ATTENTION.search(source_of(own)) is not None


def named(module: ModuleType, name: str, shown: str) -> Any:
    """Return what a module has under a name; ``Outer.Inner`` is a part of a part.

    Raises:
        RegardError: there is none, or it is nothing that can be checked.
    """
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            raise RegardError(
                f"{shown} has no {name}; check takes a name that the file has.\n"
                f"    {_there(module, name)}"
            )
        thing = getattr(thing, part)
    if not callable(thing):
        raise RegardError(
            f"{name} is of type {type(thing).__name__}; check takes a module, a function or "
            "a class.\n"
            f"    In {shown}: {', '.join(attentions(module)) or 'none with a softmax'}."
        )
    return thing


def _there(module: ModuleType, name: str) -> str:
    """Return the names that a module has, in a sentence."""
    names = [own for own in vars(module) if not own.startswith("__")]
    if near := difflib.get_close_matches(name, names, n=3):
        return f"Did you mean {' or '.join(near)}?"
    return f"It has {', '.join(attentions(module)) or 'no class or function with a softmax'}."


def check_options(thing: Any, name: str, shown: str, options: Mapping[str, Any]) -> None:
    """Refuse options that do not fit what is checked.

    Raises:
        RegardError: one is missing, or one too many.
    """
    takes = {} if isinstance(thing, nn.Module) else _parameters(thing)
    unknown = [key for key in options if key not in fitting_options(thing, options)]
    if unknown:
        own = ", ".join(sorted(_settings()))
        raise RegardError(
            f"{name} has no argument {unknown[0]}; options are arguments of what is checked.\n"
            f"    It takes {', '.join(takes) or 'none'}, and check {own}."
        )
    for key in options:
        if options[key] is True and key in takes and _takes_a_value(takes[key]):
            raise RegardError(
                f"--{key.replace('_', '-')} has no value; {name} takes one there.\n"
                f"    Write for example: --{key.replace('_', '-')} {_example(key)}"
            )
    if inspect.isclass(thing):
        missing = [
            key
            for key, p in takes.items()
            if p.default is p.empty and key not in options and p.kind not in _ANY_NUMBER
        ]
        if missing and not guessed_arguments(
            thing, (), {k: v for k, v in options.items() if k in takes}
        ):
            raise RegardError(_missing(name, missing, shown, options))


def _takes_a_value(parameter: inspect.Parameter) -> bool:
    """Return True if a parameter is surely no flag: by its default, its annotation, or its name."""
    default, annotation = parameter.default, parameter.annotation
    if default is not parameter.empty and default is not None:
        return not isinstance(default, bool)
    if annotation is not parameter.empty:
        return annotation in (int, float, str, "int", "float", "str")
    lower = parameter.name.lower()
    return (_WIDTH.search(lower) or _COUNT.search(lower)) is not None


def fitting_options(thing: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that what is checked takes, or ``check`` itself."""
    takes = {} if isinstance(thing, nn.Module) else _parameters(thing)
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    own = _settings()
    return {k: value for k, value in options.items() if anything or k in own or k in takes}


def _settings() -> set[str]:
    settings = inspect.signature(check).parameters
    return {key for key, p in settings.items() if p.kind is p.KEYWORD_ONLY} | {"example"}


def _parameters(thing: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return {}


def _missing(name: str, missing: list[str], shown: str, options: Mapping[str, Any]) -> str:
    what = f"{name} has no value for {', '.join(missing)}; check builds a class before all else.\n"
    if any(_OBJECT.search(key.lower()) for key in missing):
        return (
            f"{what}    Build one in the file, layer = {name}(...), and check that: {shown}:layer"
        )
    words = {**options, **{key: _example(key) for key in missing}}
    given = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in words.items())
    return f"{what}    Give them: regard check {shown}:{name} {given}"


def _example(key: str) -> str:
    guessed, lower = guessed_value(key), key.lower()
    if guessed is not None:
        return str(guessed)
    if _COUNT.search(lower):
        return "4"
    return "16" if _WIDTH.search(lower) else "N"
