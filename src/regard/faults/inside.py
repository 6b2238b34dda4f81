"""The attentions inside of a model: which of its modules hold them, one of each class."""

from collections.abc import Iterator

from torch import nn

from regard.faults.stages import softmaxes
from regard.faults.subject import Subject
from regard.faults.traced import Event, Trace, traced

__all__ = ["attentions_inside"]


def attentions_inside(subject: Subject) -> dict[str, nn.Module]:
    """The modules in which a softmax ran, by name: the first of each class, in order.

    The module itself has the name "". One that has no matrix of its own belongs to the module
    around it, and heads that run side by side belong to the module that joins them.

    Args:
        subject: which runs.
    """
    model = subject.given.model
    trace = traced(subject, subject.inputs())
    events = softmaxes(trace)
    owners = [_owner(model, event) for event in events]
    found: dict[tuple[type, tuple[str, int] | None], str] = {}
    for event, name in zip(events, owners, strict=True):
        whole = _joining(model, trace, (event, name), zip(events, owners, strict=True))
        module = model.get_submodule(whole)
        line = (event.caller.file, event.caller.line) if event.caller and not whole else None
        found.setdefault((type(module), line), whole)
    return {name: model.get_submodule(name) for name in dict.fromkeys(found.values())}


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
