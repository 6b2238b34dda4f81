"""From code that check has run to what the laws are tried on."""

from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.laws.specimen import Slot, Specimen
from regard.diagnosis.signature import Argument
from regard.diagnosis.subject import Subject
from regard.diagnosis.tensor_layout import Layout

__all__ = ["specimen_of"]


def specimen_of(subject: Subject, causal: bool | None) -> Specimen:
    """Return the code with its arguments in the layout in which it runs.

    Args:
        subject: which runs.
        causal: what the caller declared.
    """
    given, layout = subject.given, subject.layout
    leading = {a.name for a in subject.leading()}
    slots: list[Slot] = []
    for argument in given.arguments:
        slot = _slot(subject, argument, argument.name not in leading)
        if slot is not None:
            slots.append(slot)
    slots += [Slot(name, "fixed", value=v, by_name=True) for name, v in given.options.items()]
    # Positional arguments come first, in the order of the signature.
    slots.sort(key=lambda slot: slot.by_name)
    is_fixed = any(
        slot.kind == "fixed" and isinstance(slot.value, tuple | list | Tensor) for slot in slots
    )
    return Specimen(
        given.name, given.call, tuple(slots), layout.batch, layout.tokens, causal, is_fixed
    )


def _slot(subject: Subject, argument: Argument, by_name: bool) -> Slot | None:
    given, layout = subject.given, subject.layout
    role = argument.role
    if argument.name in subject.constants:
        return _constant(argument.name, subject.constants[argument.name], layout, by_name)
    own = given.kind == "embeddings"
    if role == "x" and given.vocabulary:
        axes = _axes(layout, 1, 1)[:2]
        return Slot(
            argument.name, "ids", axes, "x", torch.int64, high=given.vocabulary, by_name=by_name
        )
    if own and role in ("x", "memory", "query", "key", "value"):
        if role != "x" and not argument.required:
            return None
        axes = _axes(layout, layout.num_heads, layout.dim)
        # Arguments apart, so that one that is never read, or read for another, shows.
        source = role if role in ("query", "key", "value", "memory") else "x"
        return Slot(argument.name, "content", axes, source, by_name=by_name)
    if not own and role in ("query", "key", "value"):
        heads = layout.num_heads if role == "query" else layout.num_kv_heads
        width = layout.dim // layout.num_heads * heads
        return Slot(argument.name, "content", _axes(layout, heads, width), role, by_name=by_name)
    return None


def _axes(layout: Layout, heads: int, dim: int) -> tuple[str | int, ...]:
    each = dim // heads
    return {
        "btd": ("b", "t", dim),
        "td": ("t", dim),
        "tbd": ("t", "b", dim),
        "bhtd": ("b", heads, "t", each),
        "bthd": ("b", "t", heads, each),
    }[layout.order]


def _constant(name: str, value: Any, layout: Layout, by_name: bool) -> Slot:
    if not isinstance(value, Tensor) or not value.numel():
        return Slot(name, "fixed", value=value, by_name=by_name)
    letters: dict[int, str] = {layout.tokens: "t"}
    if layout.batch > 1:
        letters[layout.batch] = "b"
    axes = tuple(letters.get(n, n) for n in value.shape)
    if value.ndim == 1 and not value.is_floating_point() and int(value[0]) == layout.tokens:
        return Slot(name, "lengths", ("b",), dtype=value.dtype, by_name=by_name)
    fill = value.flatten()[0].item()
    if not bool((value == fill).all()):
        return Slot(name, "fixed", value=value, by_name=by_name)
    return Slot(name, "filled", axes, dtype=value.dtype, value=fill, by_name=by_name)
