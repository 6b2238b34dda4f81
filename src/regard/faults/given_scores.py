"""Functions of given scores: weights, or weights times values."""

from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from regard.faults.fit import same_numbers
from regard.faults.layouts import Layout
from regard.faults.proofs import compared
from regard.faults.reading import Told, finding_of
from regard.faults.report import Report
from regard.faults.stages import found_stages
from regard.faults.subject import Given, Subject

__all__ = ["scores_report"]

_QUERIES, _KEYS, _WIDTH = 7, 7, 5
# Scores and values: matrices, one query alone, batches, heads; then values as wide as long.
_SHAPES = (
    ((_QUERIES, _KEYS), (_KEYS, _WIDTH)),
    ((_KEYS,), (_KEYS, _WIDTH)),
    ((2, _QUERIES, _KEYS), (2, _KEYS, _WIDTH)),
    ((2, 4, _QUERIES, _KEYS), (2, 4, _KEYS, _WIDTH)),
    ((_KEYS, _KEYS), (_KEYS, _KEYS)),
    ((_KEYS,), (_KEYS, _KEYS)),
)
_MASKS = ("none", "causal")


def scores_report(given: Given, causal: bool | None) -> Report:
    """The report on a function of scores.

    Args:
        given: the function.
        causal: as in ``check``.

    Raises:
        ValueError: it fails on all shapes, or gives none that fits.
    """
    first: Exception | None = None
    for inputs in _inputs(given):
        subject = Subject(given, Layout("td", 1, _KEYS, _KEYS), {})
        try:
            output = subject.run(inputs).output
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            first = first or error
            continue
        expected = {mask: _attention(inputs, mask, -1) for mask in _MASKS}
        if output.shape not in {tensor.shape for tensor in expected.values()}:
            continue
        return _report(subject, inputs, output, causal)
    raise ValueError(
        f"{given.name} fails on all scores that were tried, or gives another shape; it must give "
        f"weights, or weights times values.\n    The first error was: {first}"
    ) from first


def _inputs(given: Given) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    valued = given.argument("value") is not None
    for scores, values in _SHAPES:
        inputs = {"scores": torch.randn(scores, generator=generator)}
        if valued:
            inputs["value"] = torch.randn(values, generator=generator)
        yield inputs


def _report(
    subject: Subject, inputs: Mapping[str, Tensor], output: Tensor, causal: bool | None
) -> Report:
    shapes = " and ".join(str(tuple(tensor.shape)) for tensor in inputs.values())
    read_as = f"a function of scores, {shapes}"
    rights = {None: _MASKS, True: ("causal",), False: ("none",)}[causal]
    if any(_same(output, _attention(inputs, mask, -1)) for mask in rights):
        return Report(subject.given.name, (), read_as)
    for names, wrong in _mistakes(inputs, rights):
        if _same(output, wrong):
            stages = found_stages(subject, inputs)
            did, right = (
                tensor if tensor.ndim > 1 else tensor[None]
                for tensor in (output, _attention(inputs, rights[0], -1).float())
            )
            axes = (("sample", "head")[: did.ndim - 2], "rows", "columns")
            proof = compared(did, right, "what it gives", axes)
            told = tuple(finding_of(Told(name, stages, None, proof=proof)) for name in names)
            return Report(subject.given.name, told, read_as)
    return Report(subject.given.name, (), read_as, "No softmax of the scores gives what it gives.")


def _mistakes(
    inputs: Mapping[str, Tensor], rights: tuple[str, ...]
) -> Iterator[tuple[list[str], Tensor]]:
    """Each mistake and what it would give; then two at once."""
    scores, value = inputs["scores"], inputs.get("value")
    axes = range(-scores.ndim, -1)
    mixed = "values-mixed-along-wrong-axis"
    for mask in _MASKS:
        if mask not in rights:
            yield ["not-causal"], _attention(inputs, mask, -1)
    for axis, mask in product(axes, rights):
        yield ["softmax-wrong-axis"], _attention(inputs, mask, axis)
    for mask in rights:
        yield from (([mixed], wrong) for wrong in _mixed_wrongly(inputs, mask, -1))
    for axis, mask in product(axes if value is not None else (), rights):
        for wrong in _mixed_wrongly(inputs, mask, axis):
            yield ["softmax-wrong-axis", mixed], wrong


def _weights(scores: Tensor, mask: str, axis: int) -> Tensor:
    if mask == "causal" and scores.ndim > 1:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, -torch.inf)
    return scores.softmax(axis)


def _attention(inputs: Mapping[str, Tensor], mask: str, axis: int) -> Tensor:
    weights = _weights(inputs["scores"].double(), mask, axis)
    return weights @ inputs["value"].double() if "value" in inputs else weights


def _mixed_wrongly(inputs: Mapping[str, Tensor], mask: str, axis: int) -> Iterator[Tensor]:
    """Weights and values multiplied in the ways that are none."""
    if "value" not in inputs:
        return
    weights, value = _weights(inputs["scores"].double(), mask, axis), inputs["value"].double()
    if weights.ndim == 1:
        yield weights * value.sum(0) if value.shape[-1] == weights.shape[0] else weights
        yield value @ weights if value.shape[-1] == weights.shape[0] else weights
    elif weights.shape[-1] == weights.shape[-2]:
        yield weights.mT @ value
        if value.shape == weights.shape:
            yield weights * value
            yield value @ weights


def _same(output: Tensor, expected: Tensor) -> bool:
    return same_numbers(output, expected, 2e-5)
