"""Mistakes in the projections themselves, which the numbers behind them do not show."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Projection, Stages
from regard.diagnosis.reference_attention import Material
from regard.diagnosis.signature import projection_role
from regard.diagnosis.subject import Subject
from regard.diagnosis.traced_run import Edit, traced

__all__ = ["heads_are_tied", "idle_parts", "projected_twice", "shared_by_heads"]

_LETTERS = {"query": "q", "key": "k", "value": "v"}


def shared_by_heads(subject: Subject, stages: Stages) -> Projection | None:
    """The first projection whose matrix is that of one part of a token, and used for each part."""
    for projection in stages.projections:
        if projection.weight.ndim < 2:
            continue
        taken, given = projection.weight.shape[-2:]
        parts, rest = divmod(subject.layout.dim, taken)
        width = projection.columns.shape[-1]
        if parts > 1 and not rest and given * parts == width:
            return projection
    return None


def heads_are_tied(material: Material) -> bool:
    """Whether every head has the same queries, keys and values, so that all give the same."""
    heads = material.num_heads
    width = material.tensors["q"].shape[-1] // heads
    if heads == 1 or material.weights is not None:  # a bias may tell the heads apart
        return False
    for letter in _LETTERS.values():
        columns = material.tensors.get(letter)
        if columns is None:
            return False
        own = columns.shape[-1] // width
        if letter == "v" and material.kv_heads is not None:
            own = material.kv_heads
        if not own or columns.shape[-1] % own:
            return False
        each = columns.reshape(*columns.shape[:-1], own, -1)
        # Where all columns are one, the weights may only begin so.
        is_flat = torch.allclose(each, each[..., :1])
        if is_flat or not torch.allclose(each, each[..., :1, :], rtol=1e-4, atol=1e-6):
            return False
    return True


def projected_twice(subject: Subject, stages: Stages) -> tuple[Projection, str, Tensor] | None:
    """The second of two projections by one matrix, and the matrix that is never used instead.

    With its name; None where there is no such matrix.
    """
    addresses = [projection.address for projection in stages.projections]
    repeated = [p for i, p in enumerate(stages.projections) if p.address in addresses[:i]]
    if not repeated:
        return None
    used = {address for event in stages.trace for address in event.reads}
    for name, parameter in subject.given.model.named_parameters():
        address = parameter.untyped_storage().data_ptr()
        if parameter.ndim == 2 and address not in used and projection_role(name) != "other":
            return repeated[0], name, parameter.detach()
    return None


def idle_parts(subject: Subject, stages: Stages, material: Material) -> list[str]:
    """The letters of those projections that move nothing in the output."""
    idle: list[str] = []
    before = stages.trace.outcome.output
    for letter, projection, columns in _parts(stages, material):
        places = projection.places[..., columns].flatten()
        edits = {projection.event.place: _raised(places)}
        run = traced(subject, subject.inputs(), edits=edits, wanted=set())
        if torch.equal(run.outcome.output.nan_to_num(), before.nan_to_num()):
            idle.append(letter)
    return idle


def _raised(places: Tensor) -> Edit:
    def edit(output: Tensor, _: tuple[Any, ...]) -> Tensor:
        flat = output.flatten()
        flat[places] += torch.linspace(1, 2, len(places), device="cpu")
        return flat.reshape(output.shape)

    return edit


def _parts(stages: Stages, material: Material) -> Iterator[tuple[str, Projection, slice]]:
    """Which columns of which projection are query, key and value."""
    if len(stages.projections) == 1:
        own, total = material.tensors["q"].shape[-1], stages.projections[0].columns.shape[-1]
        middle = own + (total - own) // 2
        places = {"q": slice(0, own), "k": slice(own, middle), "v": slice(middle, total)}
        for letter, columns in places.items():
            yield letter, stages.projections[0], columns
    elif len(stages.projections) == 3:
        for place, projection in enumerate(stages.projections):
            letter = _LETTERS.get(projection.role, "qkv"[place])
            yield letter, projection, slice(None)
