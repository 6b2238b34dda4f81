"""The attentions inside of a model: which of its modules hold them, one of each kind."""

import re
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.inputs.lab import Lab

__all__ = ["attentions_inside", "running_attentions"]

# How it is counted among the others makes no layer another kind.
_COUNTED = re.compile(r"layer_?(idx|id|index|num|number)$|^(idx|index|name|depth)$")


def attentions_inside(lab: Lab) -> dict[str, nn.Module]:
    """Return the modules in which a softmax ran, by name: the first of each kind, in order.

    Two of one class are of one kind if they are set up alike: a layer that is causal, or scaled
    otherwise, is another. The module itself has the name "". One that has no matrix of its own
    belongs to the module around it, and heads side by side to the module that joins them.
    """
    found: dict[Any, str] = {}
    original = cast(nn.Module, lab.specimen.call)
    owners = running_attentions(lab)
    for name in owners:
        whole = _joining(original, name, owners)
        found.setdefault(_kind(original.get_submodule(whole)), whole)
    return {name: original.get_submodule(name) for name in dict.fromkeys(found.values())}


def running_attentions(lab: Lab) -> list[str]:
    """Return the names of all modules with matrices in which a softmax ran, in order."""
    s = lab.specimen
    model = cast(nn.Module, lab.fresh(is_double=False))
    running: list[str] = [""]
    runs_softmax: list[str] = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        is_exp = name == "exp" and args[0].requires_grad
        if "softmax" in name or "scaled_dot_product" in name or is_exp:
            runs_softmax.append(running[-1])

    def enter(name: str, *_: object) -> None:
        running.append(name)

    def leave(*_: object) -> None:
        running.pop()

    for name, module in _named(model).items():
        module.register_forward_pre_hook(partial(enter, name))
        module.register_forward_hook(leave, always_call=True)
    lab.called(model, s.contents(s.batch, s.tokens), {}, torch.float32, note=note)
    original = cast(nn.Module, s.call)
    return list(dict.fromkeys(_owner(original, name) for name in runs_softmax))


def _named(module: nn.Module) -> "dict[str, nn.Module]":
    return dict(cast(Any, module.named_modules()))


def _owner(model: nn.Module, name: str) -> str:
    """Return the innermost module around another that has matrices."""
    while name and not any(p.ndim > 1 for p in model.get_submodule(name).parameters()):
        name = name.rpartition(".")[0]
    return name


def _joining(model: nn.Module, name: str, owners: list[str]) -> str:
    """Return the module that joins heads side by side; else the module itself."""
    folder, _, _ = name.rpartition(".")
    if not name or not isinstance(model.get_submodule(folder), nn.ModuleList):
        return name
    beside = [other for other in owners if other.rpartition(".")[0] == folder]
    widths = {p.shape[0] for p in model.get_submodule(name).parameters() if p.ndim > 1}
    inputs = {p.shape[-1] for p in model.get_submodule(name).parameters() if p.ndim > 1}
    # A layer gives as many columns as it takes; heads side by side give fewer.
    is_head = len(beside) > 1 and not widths & inputs
    return folder.rpartition(".")[0] if is_head else name


def _kind(module: nn.Module) -> Any:
    """Return what two modules have in common that compute the same, but for their weights."""
    parts: list[Any] = []
    for name, part in _named(module).items():
        own = cast("dict[str, object]", vars(part))
        kept = {key: value for key, value in own.items() if not _COUNTED.search(key)}
        simple = int | float | str | torch.Size | None
        plain = [f"{key} {v}" for key, v in sorted(kept.items()) if isinstance(v, simple)]
        shapes = [tuple(parameter.shape) for parameter in part.parameters(recurse=False)]
        buffers = [_content(buffer) for buffer in part.buffers(recurse=False)]
        parts.append((name, type(part), *plain, *shapes, *buffers))
    return tuple(parts)


def _content(buffer: Tensor) -> tuple[Any, ...]:
    wide = buffer.float() if buffer.is_floating_point() else buffer
    return tuple(buffer.shape), hash(wide.numpy().tobytes())
