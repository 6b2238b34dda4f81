"""Roles of the arguments of somebody's attention, as far as their names tell."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

Role = Literal[
    "x", "memory", "query", "key", "value", "scores", "mask", "lengths", "weight", "cache", "other"
]


Meaning = Literal["", "keeps", "hides", "added"]

_MASK = re.compile(
    r"mask|^(is_|src_|tgt_|key_|memory_)?(pads?|padding|kpm|valid|keep|ignore|allowed|visible)$"
)
_SCORES = re.compile(r"scores?|logits?|sims?|energy|energies|omega")
_LENGTHS = re.compile(r"len$|lens$|length$|lengths$")
_WEIGHT = re.compile(r"w_?(q|k|v|o|kv|qkv|query|queries|keys?|values?|out|output)$")
_CACHE = re.compile(r"cache|past")
_ABOUT_CACHE = re.compile(
    r"^(use|return|output|update|with|is|has|no)_|position|len|size|idx|index"
)
MEMORY = re.compile(
    r"context|memory|encoder|enc(_|$)|source|src|cross|other|kv|image|audio|visual|vision"
)
_LETTERS = {
    "query": re.compile(r"(^|_)x?(q|query|queries|qs)(_|$)"),
    "key": re.compile(r"(^|_)x?(k|key|keys|ks)(_|$)"),
    "value": re.compile(r"(^|_)x?(v|val|value|values|vs)(_|$)"),
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call.

    Attributes:
        name: as it is written there.
        role: what it is for.
        required: whether a call fails without it.
        meaning: of a mask, what True or 1 in it does; empty where nothing declares it.
    """

    name: str
    role: Role
    required: bool
    meaning: Meaning = ""


def is_cache(name: str) -> bool:
    """Return True if the name of an argument says that it holds cached keys or values."""
    lower = name.lower()
    return _CACHE.search(lower) is not None and not _ABOUT_CACHE.search(lower)


def definition_of(thing: object) -> Any:
    """Return the class of a module; anything else as it is."""
    return type(thing) if isinstance(thing, nn.Module) else thing


def signature_of(call: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of a module's ``forward``."""
    return inspect.signature(call.forward if isinstance(call, nn.Module) else call)


def arguments_of(
    call: Callable[..., Any], given: Iterable[str], masks: Collection[str] = ()
) -> list[Argument]:
    """Return the arguments that a call of somebody's attention takes, in their order.

    Args:
        call: the attention.
        given: names of arguments to leave out.
        masks: names of masks that the caller declares.
    """
    found: list[Argument] = []
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in signature_of(call).parameters.items():
        if name not in given and parameter.kind not in any_number:
            required = parameter.default is inspect.Parameter.empty
            is_number = isinstance(parameter.default, bool | int | float | str)
            role = "other" if is_number else _role(name, required)
            if name in masks:
                role = "lengths" if role == "lengths" else "mask"
            found.append(Argument(name, role, required))
    return _settled(found)


def _role(name: str, required: bool) -> Role:
    lower = name.lower()
    if _MASK.search(lower):
        return "mask"
    if not required and is_cache(name):
        return "cache"
    if required and _WEIGHT.match(lower):
        return "weight"
    if _LENGTHS.search(lower):
        return "lengths"
    if _SCORES.search(lower):
        return "scores"
    for role, pattern in _LETTERS.items():
        if pattern.search(lower):
            return role  # pyright: ignore[reportReturnType]
    return "other"


def _settled(found: list[Argument]) -> list[Argument]:
    """With the roles that only the others tell: the first unknown one is the embeddings."""
    roles = {argument.role for argument in found if argument.required}
    if {"query", "key"} <= roles or {"query", "value"} <= roles:
        return found
    rename: dict[str, Role] = {}
    if "scores" in roles:
        known = ("scores", "mask", "lengths")
        unknown = [a.name for a in found if a.required and a.role not in known]
        rename = dict.fromkeys(unknown[:1], "value")
    else:
        unknown = [a for a in found if a.role not in ("mask", "lengths", "weight")]
        required = [a for a in unknown if a.required] or unknown
        plain = sum(argument.required for argument in unknown)
        if plain == 3 and all(len(a.name) == 1 for a in required[:3]):
            rename = dict(zip((a.name for a in required), ("query", "key", "value"), strict=True))  # pyright: ignore[reportAssignmentType]
        elif required:
            rename = {required[0].name: "x"}
            others = [a for a in required[1:] if a.required and MEMORY.search(a.name.lower())]
            rename |= {a.name: "memory" for a in others}
    return [replace(a, role=rename.get(a.name, a.role)) for a in found]


_AXES = {
    "b": re.compile(r"^(b|n|bs|bsz|batch|batch_size|samples?)$"),
    "t": re.compile(r"^(t|l|s|q|k|tokens?|seq|seq_len|length|len|time|steps?|q_len|kv_len)$"),
}


def axis_letters(words: str) -> tuple[str | int, ...]:
    """Return declared axes: "b" for samples, "t" for tokens, a number below 0 for any other.

    Example:
        >>> axis_letters("tokens batch dim")
        ('t', 'b', -3)
    """
    letters: list[str | int] = []
    for place, word in enumerate(re.findall(r"\w+", words)):
        letter = next((k for k, pattern in _AXES.items() if pattern.match(word.lower())), None)
        letters.append(letter or -1 - place)
    return tuple(letters)
