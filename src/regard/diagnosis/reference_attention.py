"""Standard attention with the mistakes of the catalogue as switches: which does the same?

What an attention gave is compared with what each mistake, alone or with others, would have given
for the same queries, keys and values: a mistake is told only where it reproduces the output.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

__all__ = [
    "WRONG_AXES",
    "WRONG_MIXES",
    "Guess",
    "Material",
    "as_laid",
    "attention_of",
    "reproduces",
    "same_numbers",
    "seen_scale",
    "shape_of_mask",
    "swapped_parts",
]

# Float32 sums in another order differ by less; two different mistakes by far more.
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class Guess:
    """One way to compute attention; as it stands, the right one, but for scale and mask.

    Attributes:
        parts: which tensors are query, key and value.
        split: how columns become heads.
        repeat: the order in which grouped heads are repeated.
        product: whether the keys are transposed, or only viewed so.
        scale: what the scores are multiplied with; None: 1/sqrt(head_dim).
        mask: the mask that the code makes itself, and how it is applied.
        given: how the mask that the code is given is applied.
        axis: over which the softmax runs: one, or several as one.
        factor: what the weights are multiplied with.
        mix: how weights and values are multiplied.
        merge: how the heads become columns.
    """

    parts: tuple[str, str, str] = ("q", "k", "v")
    split: str = "columns"
    repeat: str = "each"
    product: str = "transposed"
    scale: float | None = None
    mask: str = "none"
    given: str = "right"
    axis: str = "keys"
    factor: float = 1.0
    mix: str = "rows"
    merge: str = "columns"

    def differs(self, other: "Guess") -> list[str]:
        """The names of the fields in which two guesses differ."""
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True, eq=False)
class Material:
    """What the guesses are made of and compared with.

    Attributes:
        tensors: canonical, (batch, tokens, columns), by letter: q, k, v, and x, the input; float64.
        num_heads: of the queries.
        output: canonical: what the code gave for them.
        fills: numbers with which the code fills what it masks, where they were seen.
        lowered: numbers that the code adds to what it masks, where they were seen.
        scale: what the scores were multiplied with, where it was seen.
        keep: what the mask that the code was given allows, (batch, queries, keys); None where it
            was given none.
        read: the queries that anybody reads, (batch, queries): those of padding nobody does.
        weights: those that were seen, (batch, heads, queries, keys), where scores are no plain
            product of queries and keys; None: they are computed.
        kv_heads: of the values, where those of the keys do not tell.
        is_turned: whether q and k are what was multiplied, and not what was projected.
        is_scaled_freely: whether what lies between hides a scale.
        place: of the output among all that it may be.
        is_likely: whether this is the first way to read the projections, or gives the scores.
        tolerance: how much may differ, relative to the largest number.
    """

    tensors: Mapping[str, Tensor]
    num_heads: int
    output: Tensor
    fills: tuple[float, ...] = ()
    lowered: tuple[float, ...] = ()
    scale: float | None = None
    keep: Tensor | None = None
    read: Tensor | None = None
    weights: Tensor | None = None
    kv_heads: int | None = None
    is_turned: bool = False
    is_scaled_freely: bool = False
    place: int = 0
    is_likely: bool = True
    tolerance: float = _TOLERANCE

    @property
    def head_dim(self) -> int:
        """The width of a query of one head."""
        return self.tensors["q"].shape[-1] // self.num_heads


def attention_of(material: Material, guess: Guess) -> tuple[Tensor, Tensor, Tensor] | None:
    """What a guess gives: output (canonical), weights and scores (batch, heads, queries, keys).

    None where the shapes do not allow it. A row that has nothing to attend to is NaN.
    """
    letters = guess.parts
    if not set(letters) <= set(material.tensors):
        return None
    heads = material.num_heads
    query, key, value = (material.tensors[letter] for letter in letters)
    width = query.shape[-1] // heads
    if query.shape[-1] % heads or key.shape[-1] % width:
        return None
    key_heads = key.shape[-1] // width
    kv_heads = material.kv_heads or material.tensors["k"].shape[-1] // width
    if letters[2] != "v":  # as many as it is wide; values may be wider than queries
        kv_heads = value.shape[-1] // width
    if not (key_heads and kv_heads) or heads % key_heads or heads % kv_heads:
        return None
    split = "columns" if material.is_turned else guess.split
    query, key = _split(query, heads, split), _split(key, key_heads, split)
    value = _split(value, kv_heads, guess.split)
    if query is None or key is None or value is None:
        return None
    if guess.split == "exchanged" and (material.is_turned or {key_heads, kv_heads} != {heads}):
        return None
    if guess.split != "exchanged":
        key = _repeated(key, heads // key_heads, guess.repeat)
        value = _repeated(value, heads // kv_heads, guess.repeat)
    scores = _scores(query, key, guess)
    if scores is None:
        return None
    masked = _masked(scores, guess.mask)
    if material.keep is not None:
        masked = _masked_by(masked, material.keep, guess.given)
    weights = _softmax(masked, guess.axis)
    if material.weights is not None:
        if material.weights.shape != weights.shape:
            return None
        weights = material.weights.double()
    weights = _masked_after(weights, guess.mask)
    if material.keep is not None and guess.given == "after":
        weights = weights * material.keep[:, None]
    output = _mixed(weights * guess.factor, value, guess.mix)
    merged = None if output is None else _merged(output, guess)
    return None if merged is None else (merged, weights, masked)


_AXES = {"keys": -1, "queries": -2, "heads": -3, "batch": -4}
# Flattened from there to the last.
_FLATTENED = {
    "queries and keys as one": -2,
    "heads, queries and keys as one": -3,
    "whole batch as one": -4,
}
# Divided by a sum without keepdim, which is laid along the keys.
_OF_ANOTHER = "keys of another query"
WRONG_AXES = tuple(axis for axis in (*_AXES, *_FLATTENED, _OF_ANOTHER) if axis != "keys")
"""Every other than the keys, by the name that ``Guess.axis`` has."""


def _softmax(scores: Tensor, axis: str) -> Tensor:
    if axis in _AXES:
        return scores.softmax(_AXES[axis])
    if axis == _OF_ANOTHER:
        return _over_rows_of_others(scores)
    return scores.flatten(_FLATTENED[axis]).softmax(-1).view_as(scores)


def _over_rows_of_others(scores: Tensor) -> Tensor:
    """exp over its sums, which stand along the keys: PyTorch lays them so for one matrix alone."""
    matrix = scores.numel() == scores.shape[-1] ** 2 == scores.shape[-2] ** 2
    total = scores.exp().sum(-1).unsqueeze(-2)
    if not matrix or bool((total == 0).any()):
        return torch.zeros_like(scores)
    return scores.exp() / total


def _split(tensor: Tensor, heads: int, how: str) -> Tensor | None:
    """(batch, tokens, columns) as (batch, heads, tokens, head_dim)."""
    batch, tokens, columns = tensor.shape
    if columns % heads:
        return None
    match how:
        case "columns":
            return tensor.reshape(batch, tokens, heads, -1).transpose(1, 2)
        case "strided":  # heads are the inner axis of the columns: as good as the outer one
            return tensor.reshape(batch, tokens, -1, heads).permute(0, 3, 1, 2)
        case "view":
            return tensor.reshape(batch, heads, tokens, -1)
        case _:  # exchanged: the heads of a token stand where the tokens of a head should
            return tensor.reshape(batch, tokens, heads, -1)


def _repeated(tensor: Tensor, groups: int, how: str) -> Tensor:
    if groups == 1:
        return tensor
    if how == "each":
        return tensor.repeat_interleave(groups, 1)
    return tensor.repeat(1, groups, 1, 1)


def _scores(query: Tensor, key: Tensor, guess: Guess) -> Tensor | None:
    scale = query.shape[-1] ** -0.5 if guess.scale is None else guess.scale
    if guess.product == "transposed":
        return query @ key.mT * scale if query.shape[-1] == key.shape[-1] else None
    if guess.product == "viewed":  # the shape of a transpose, and every number where it was
        return query @ key.reshape(key.mT.shape) * scale
    return query @ key * scale if query.shape[-1] == key.shape[-2] else None


def _masked(scores: Tensor, mask: str) -> Tensor:
    """The scores under one of the masks, before the softmax."""
    how, _, which = mask.partition(":")
    if how in ("none", "after"):
        return scores
    if how == "added":
        return scores + shape_of_mask(which, scores).to(scores.dtype)
    allowed = shape_of_mask(which, scores)
    if how.startswith("lowered"):
        return scores + (~allowed) * float(how.removeprefix("lowered"))
    fill = float(how) if how != "causal" else -torch.inf
    return scores.masked_fill(~allowed, fill)


def _masked_by(scores: Tensor, keep: Tensor, how: str) -> Tensor:
    """The scores under the mask that the code was given, (batch, queries, keys)."""
    batch, heads = scores.shape[:2]
    if how in ("unused", "after"):
        return scores
    if how in ("added", "added_inverted"):
        return scores + (keep if how == "added" else ~keep)[:, None].to(scores.dtype)
    if how == "filled_with_0":
        return scores.masked_fill(~keep[:, None], 0.0)
    match how:
        case "inverted":
            allowed = ~keep[:, None]
        case "queries":
            allowed = keep.mT[:, None]
        case "first_sample":
            allowed = keep[:1, None]
        case "repeated":  # batch and heads in one axis, the wrong one inside
            order = torch.arange(batch * heads, device="cpu") % batch
            allowed = keep[order].reshape(batch, heads, *keep.shape[1:])
        case "over_heads":
            allowed = keep[None] if batch == heads else keep[:, None]
        case _:
            allowed = keep[:, None]
    return scores.masked_fill(~allowed, -torch.inf)


def _masked_after(weights: Tensor, mask: str) -> Tensor:
    how, _, which = mask.partition(":")
    return weights * shape_of_mask(which, weights) if how == "after" else weights


def shape_of_mask(which: str, scores: Tensor) -> Tensor:
    """True where a query may attend, (queries, keys); ``same`` is the usual causal mask."""
    return _shape_of_mask(which, *scores.shape[-2:])


@cache
def _shape_of_mask(which: str, queries: int, keys: int) -> Tensor:
    ones = torch.ones(queries, keys, dtype=torch.bool, device="cpu")
    match which:
        case "without_self":  # the first row keeps itself, or has nothing
            return ones.tril(-1)
        case "without_self_but_first":
            allowed = ones.tril(-1)
            allowed[0, 0] = True
            return allowed
        case "with_next":
            return ones.tril(1)
        case "future":
            return ones.triu(1)
        case "future_and_self":
            return ones.triu()
        case "bottom_right":
            return ones.tril(keys - queries)
        case _:
            return ones.tril()


WRONG_MIXES = (
    "transposed",
    "summed",
    "columns_summed",
    "value_first",
    "columns",
    "value_transposed",
)
"""How weights and values are multiplied, where it is no average of the values' rows."""


def _mixed(weights: Tensor, value: Tensor, how: str) -> Tensor | None:
    square = weights.shape[-1] == weights.shape[-2]
    wide = weights.shape[-1] == value.shape[-1]
    if how == "rows":
        return weights @ value
    if how == "transposed":
        return weights.mT @ value if square else None
    if how == "summed":  # over the queries
        return weights.sum(-2).unsqueeze(-1) * value if square else None
    if how == "columns_summed":  # weights times columns, and the sum of each row
        same = weights.shape[-1] == value.shape[-1] and weights.shape[-2] == value.shape[-2]
        return weights * value if same else None
    if how == "columns":  # each column times one weight, and the sum over the rows
        return weights * value.sum(-2, keepdim=True) if wide else None
    if how == "value_transposed":
        return weights @ value.mT if wide else None
    if how == "value_first":
        return value @ weights if value.shape[-1] == weights.shape[-2] else None
    return None


def _merged(output: Tensor, guess: Guess) -> Tensor | None:
    """(batch, heads, tokens, dim) as (batch, tokens, columns)."""
    batch, heads, tokens, _ = output.shape
    if guess.split == "exchanged":  # (batch, tokens, heads, dim)
        if guess.merge == "columns":
            return output.flatten(-2)
        return output.transpose(1, 2).reshape(batch, heads, -1)
    if guess.merge == "view":
        return output.reshape(batch, tokens, -1)
    if guess.split == "strided" or guess.merge == "strided":
        return output.permute(0, 2, 3, 1).flatten(-2)
    return output.transpose(1, 2).flatten(-2)


def seen_scale(material: Material, scores: Tensor) -> float | None:
    """What query times key was multiplied with to become the scores that were seen.

    Args:
        material: what guesses are made of.
        scores: as they lay where the softmax ran, after a mask.

    Returns:
        The number that most scores have in common; None where there is none.
    """
    base = Guess(scale=1.0)
    if "v" not in material.tensors:  # scores do not need them
        base = replace(base, parts=("q", "k", "k"))
    for change in ({}, *({name: value} for name, value in _before_scores(material))):
        result = attention_of(material, replace(base, **change))
        if result is None:
            continue
        raw = result[2]
        for laid in as_laid(scores.double(), raw.shape):
            ratio = (laid / raw)[raw.abs() > 1e-3 * raw.abs().max()]
            middle = float(ratio.median())
            near = (ratio / middle - 1).abs() < 1e-3
            if middle > 0 and float(near.double().mean()) > 0.4:
                return middle
    return None


def _before_scores(material: Material) -> Iterator[tuple[str, object]]:
    yield "split", "view"
    yield "split", "exchanged"
    yield "split", "strided"
    yield "product", "untransposed"
    yield "product", "viewed"
    yield "repeat", "all"
    yield from (("parts", parts) for parts in swapped_parts(material))


def as_laid(scores: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Scores or weights that lay somehow, as (batch, heads, queries, keys), the likeliest first."""
    if scores.numel() != shape.numel():
        return
    batch, heads, rows, columns = shape
    yield scores.reshape(shape)
    yield scores.reshape(heads, batch, rows, columns).transpose(0, 1)
    yield scores.reshape(batch, heads, columns, rows).mT


def reproduces(material: Material, guess: Guess) -> bool:
    """Whether a guess gives what the code gave, up to rounding."""
    result = attention_of(material, guess)
    if result is None:
        return False
    expected = result[0]
    if material.read is not None and expected.shape == material.output.shape:
        expected = expected.masked_fill(~material.read[..., None], torch.nan)
    return same_numbers(material.output, expected, material.tolerance)


def same_numbers(output: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether two outputs agree wherever the expected one says something."""
    if output.shape != expected.shape:
        return False
    output = output.double()
    middle = (0,) * (output.ndim - 1) if output.ndim < 2 else (0, output.shape[1] // 2)
    first = float((output[middle] - expected[middle]).abs().max())
    if first > 10 * tolerance * float(output.abs().max()):  # most guesses: one row is enough
        return False
    told = ~expected.isnan()
    if told.float().mean() < 0.25:
        return False
    largest = max(float(expected[told].abs().max()), 1e-6)
    difference = (output[told] - expected[told]).abs()
    return not bool(difference.isnan().any()) and float(difference.max()) <= tolerance * largest


def swapped_parts(material: Material) -> Iterator[tuple[str, str, str]]:
    """One tensor in another's place, or query and key exchanged.

    Args:
        material: whose tensors they are.
    """
    letters = [letter for letter in ("q", "k", "v", "x") if letter in material.tensors]
    right = ("q", "k", "v")
    for place in range(3):
        for letter in letters:
            if letter != right[place]:
                parts = [*right]
                parts[place] = letter
                yield parts[0], parts[1], parts[2]
    yield "k", "q", "v"
