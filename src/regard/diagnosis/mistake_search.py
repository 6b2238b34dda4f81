"""Which mistakes are tried, and how many at once, to find what does the same as the code."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

import torch

from regard.diagnosis.reference_attention import (
    WRONG_AXES,
    WRONG_MIXES,
    Guess,
    Material,
    reproduces,
    swapped_parts,
)

__all__ = ["explanations"]


def explanations(
    material: Material,
    rights: Iterable[Guess],
    bases: Iterable[Guess],
    counts: tuple[int, ...] = (1, 2, 3),
    switches: frozenset[str] | None = None,
) -> tuple[list[Guess], Guess | None]:
    """The guesses that do what the code does, with as few mistakes as it takes.

    Args:
        material: what to make guesses of.
        rights: what is right, however it is written.
        bases: what mistakes are added to.
        counts: how many mistakes at once.
        switches: the fields of a guess that may differ; None: all.

    Returns:
        The guesses, and the right one that they differ from; the right one itself where it fits.
        None where nothing fits.
    """
    for guess in rights:
        if reproduces(material, guess):
            return [guess], guess
    changes = [(n, value) for n, value in _changes(material) if switches is None or n in switches]
    for count in counts:
        for base in bases:
            found = list(_fitting(material, base, changes, count))
            if found:
                return found, base
    return [], None


def _fitting(
    material: Material, base: Guess, changes: list[tuple[str, object]], count: int
) -> Iterator[Guess]:
    for chosen in combinations(changes, count):
        names = [name for name, _ in chosen]
        if len(set(names)) < count or (count == 3 and not _may_be_three(names)):
            continue
        if "factor" in names and "scale" not in names:
            continue  # the scale is there, so that it is not one that stands too late
        guess = replace(base, **dict(chosen))  # pyright: ignore[reportArgumentType]
        if len(guess.differs(base)) == count and reproduces(material, guess):
            yield guess


def _may_be_three(names: list[str]) -> bool:
    """Three at once only of those that are made in one go: heads, scale, axis, mask."""
    return {"split", "merge", "scale", "axis", "mask"}.issuperset(names)


def _changes(material: Material) -> Iterator[tuple[str, object]]:
    """Every switch that is not as it should be."""
    if material.weights is not None:
        yield from _changes_behind_weights(material)
        return
    for scale in _scales(material):
        yield "scale", scale
    yield "factor", material.head_dim**-0.5
    for axis in WRONG_AXES:
        yield "axis", axis
    yield "merge", "view"
    yield "split", "view"
    yield "split", "exchanged"
    for mix in WRONG_MIXES:
        yield "mix", mix
    yield "product", "untransposed"
    yield "product", "viewed"
    yield "repeat", "all"
    for parts in swapped_parts(material):
        yield "parts", parts
    for mask in _masks(material):
        yield "mask", mask


def _changes_behind_weights(material: Material) -> Iterator[tuple[str, object]]:
    yield "merge", "view"
    yield "split", "view"
    yield "repeat", "all"
    yield "mix", "transposed"
    yield "mask", "after:same"
    for parts in swapped_parts(material):
        if parts[:2] == ("q", "k"):
            yield "parts", parts


def _scales(material: Material) -> list[float]:
    """Scales other than 1/sqrt(head_dim), each once."""
    width = material.tensors["q"].shape[-1]
    dim, heads, tokens = material.head_dim, material.num_heads, material.output.shape[1]
    embedding = material.tensors["x"].shape[-1] if "x" in material.tensors else width
    numbers = [1.0, embedding**-0.5, width**-0.5, 1 / dim, dim**0.5, heads**-0.5, tokens**-0.5]
    numbers += [1 / embedding, embedding**0.5, float(dim), dim**-0.25]
    if material.scale is not None:
        numbers = [material.scale]
    right = dim**-0.5
    return [n for n in dict.fromkeys(numbers) if abs(n / right - 1) > 1e-3]


def _masks(material: Material) -> Iterator[str]:
    # Numbers that were seen come first: they may be too small to differ from no mask at all.
    for fill in dict.fromkeys(material.fills):
        if abs(fill) < torch.inf:
            yield f"{fill!r}:same"
    for fill in dict.fromkeys(material.lowered):
        yield f"lowered{fill!r}:same"
    yield "-1000000000.0:same"  # forbids as -inf does, unless the softmax runs over another axis
    yield from ("none", "causal:same")
    for which in ("without_self_but_first", "without_self", "with_next", "future"):
        yield f"causal:{which}"
    yield "causal:future_and_self"
    yield from ("added:same", "added:future", "added:future_and_self", "added:with_next")
    yield from ("after:same", "after:future", "after:with_next", "after:without_self")
    yield from (f"{fill!r}:same" for fill in (0.0, -1.0) if fill not in material.fills)
    for fill in (-1e9, -1e4):
        yield f"{fill!r}:future"
        yield f"{fill!r}:without_self"
