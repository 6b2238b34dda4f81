"""The attentions inside of a model: which of its modules hold them, one of each kind."""

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.softmax_detection import softmaxes
from regard.diagnosis.subject import Subject
from regard.diagnosis.traced_run import Event, Trace, traced

__all__ = ["attentions_inside"]


def attentions_inside(subject: Subject) -> dict[str, nn.Module]:
    """The modules in which a softmax ran, by name: the first of each kind, in order.

    Two of one class are of one kind where they are set up alike: a layer that is causal, or scaled
    otherwise, is another.

    The module itself has the name "". One that has no matrix of its own belongs to the module
    around it, and heads that run side by side belong to the module that joins them.

    Args:
        subject: which runs.
    """
    model = subject.given.model
    trace = traced(subject, subject.inputs())
    events = softmaxes(trace)
    owners = [_owner(model, event) for event in events]
    found: dict[Any, str] = {}
    for event, name in zip(events, owners, strict=True):
        whole = _joining(model, trace, (event, name), zip(events, owners, strict=True))
        module = model.get_submodule(whole)
        line = (event.caller.file, event.caller.line) if event.caller and not whole else None
        found.setdefault((_kind(module), line), whole)
    return {name: model.get_submodule(name) for name in dict.fromkeys(found.values())}


# How it is counted among the others makes no layer another kind.
_COUNTED = re.compile(r"layer_?(idx|id|index|num|number)$|^(idx|index|name|depth)$")


def _kind(module: nn.Module) -> Any:
    """What two modules have in common that compute the same, but for their weights."""
    parts: list[Any] = []
    named = cast("dict[str, nn.Module]", dict(cast(Any, module.named_modules())))
    for name, part in named.items():
        own = cast("dict[str, object]", vars(part))
        kept = {key: value for key, value in own.items() if not _COUNTED.search(key)}
        plain = [f"{key} {value}" for key, value in sorted(kept.items()) if _is_plain(value)]
        shapes = [tuple(parameter.shape) for parameter in part.parameters(recurse=False)]
        buffers = [_content(buffer) for buffer in part.buffers(recurse=False)]
        parts.append((name, type(part), *plain, *shapes, *buffers))
    return tuple(parts)


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | torch.Size | None)


def _content(buffer: Tensor) -> tuple[Any, ...]:
    wide = buffer.float() if buffer.is_floating_point() else buffer
    return tuple(buffer.shape), hash(wide.numpy().tobytes())


def _owner(model: nn.Module, event: Event) -> str:
    """The name of the innermost module around an operation that has matrices."""
    name = event.caller.module if event.caller is not None else None
    if name is None or name == type(model).__name__:
        return ""
    while name and not any(p.ndim > 1 for p in model.get_submodule(name).parameters()):
        name = name.rpartition(".")[0]
    return name


def _joining(
    model: nn.Module, trace: Trace, one: tuple[Event, str], every: Iterator[tuple[Event, str]]
) -> str:
    """The module that joins heads side by side; where there are none, the owner itself."""
    event, name = one
    folder, _, _ = name.rpartition(".")
    if not name or not isinstance(model.get_submodule(folder), nn.ModuleList):
        return name
    for other, sibling in every:
        if sibling == name or sibling.rpartition(".")[0] != folder:
            continue
        first, second = sorted((event, other), key=lambda each: each.place)
        if not trace.reached(first.writes).intersection(second.reads):
            return folder.rpartition(".")[0]
    return name
