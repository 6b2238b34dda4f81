"""What proves a mistake: two small matrices, and what was measured, in a sentence."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Stages
from regard.diagnosis.mistake_names import names_of
from regard.diagnosis.reference_attention import Guess, Material, attention_of

__all__ = ["Proof", "Shown", "compared", "detail_of", "proof_of", "weights_without_nan"]

Proof = tuple[Tensor, Tensor, str]
"""What the code did, what attention is, and what the two matrices hold."""

_SHOWN = 4
# Numbers are printed with three digits: less is not seen.
_LEAST = 1e-3
_VISIBLE = 0.05
_FORBIDDEN = 1000.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What some code does, beside what is right.

    Attributes:
        guess: what does the same as the code.
        right: what it should do.
        others: more guesses that do the same.
    """

    guess: Guess
    right: Guess
    others: tuple[Guess, ...] = ()


def proof_of(name: str, material: Material, shown: Shown) -> Proof | None:
    """What the code did, what attention is, and what the two matrices hold.

    The weights where they differ, and else the output. Of several mistakes each is shown alone.

    Args:
        name: of the mistake.
        material: what was seen.
        shown: what the code does, beside what is right.
    """
    if attention_of(material, shown.right) is None:
        if name == "wrong-values":
            return None  # what it never computes cannot be shown
        shown = replace(shown, right=replace(shown.right, parts=shown.guess.parts))
    alone = _alone(name, material, shown)
    several = alone != shown.guess
    did = attention_of(material, alone)
    right = attention_of(material, shown.right)
    if did is None or right is None:
        return None
    weights = compared(did[1] * alone.factor, right[1], "weights", _HEADS)
    proof = weights or compared(did[0], right[0], "output", _COLUMNS)
    if proof is None or not several:
        return proof
    return proof[0], proof[1], f"{proof[2]}; were this the only mistake"


def _alone(name: str, material: Material, shown: Shown) -> Guess:
    """The guess with none but the mistake of that name."""
    guess, right = shown.guess, shown.right
    fields = guess.differs(right)
    alone = {
        field: getattr(guess, field)
        for field in fields
        if name in names_of(material, replace(right, **{field: getattr(guess, field)}), right)
    }
    if "factor" in alone and "scale" in fields:  # one mistake: a scale behind the softmax
        alone["scale"] = guess.scale
    found = replace(right, **alone) if alone else guess
    return found if attention_of(material, found) is not None else guess


# The axes before the last two and what the last two are called: queries, keys; tokens, columns.
_HEADS = (("sample", "head"), "queries", "keys")
_COLUMNS = (("sample",), "tokens", "columns")


def compared(
    did: Tensor, right: Tensor, what: str, axes: tuple[tuple[str, ...], str, str]
) -> Proof | None:
    """The first small part of two tensors where they differ visibly; None where they do nowhere.

    One in which something is 0 that should not be, or the other way round, shows most.

    Args:
        did: (..., rows, columns).
        right: likewise.
        what: they hold.
        axes: the names of the leading axes, of the rows and of the columns.
    """
    if did.shape != right.shape:
        return None
    gap = (did - right).abs().nan_to_num(1.0, posinf=1.0)
    gap = gap.masked_fill(did.isnan() & right.isnan(), 0.0)
    gap = gap.clamp(max=_FORBIDDEN / 2).masked_fill((did == 0) != (right == 0), _FORBIDDEN)
    rows, columns = (min(_SHOWN, length) for length in gap.shape[-2:])
    parts = gap.unfold(-2, rows, 1).unfold(-2, columns, 1).flatten(-2).amax(-1)
    most = float(parts.max())
    if float((did - right).abs().nan_to_num(1.0).max()) < _LEAST:
        return None
    enough = parts >= (most if most == _FORBIDDEN else min(most / 2, _VISIBLE))
    *leading, row, column = (int(i) for i in enough.nonzero()[0])
    place = (*leading, slice(row, row + rows), slice(column, column + columns))
    return did[place], right[place], _caption(what, leading, (row, column), axes)


def weights_without_nan(stages: Stages, batch: int) -> Proof | None:
    """The weights that were not a number, beside what the same scores give without them.

    A row with nothing to attend to has weights of 0.

    Args:
        stages: of a run.
        batch: how many samples it had.
    """
    softmax = stages.softmax
    if softmax is None or softmax.weights.ndim > 4 or softmax.axis != -1:
        return None
    scores = softmax.scores.masked_fill(softmax.scores == torch.inf, -torch.inf)
    right = scores.softmax(-1).nan_to_num(0.0)
    first = "sample" if softmax.weights.shape[0] == batch else "matrix"
    names = (first, "head")[: softmax.weights.ndim - 2]
    return compared(softmax.weights, right, "weights", (names, "queries", "keys"))


def _caption(
    what: str,
    leading: list[int],
    corner: tuple[int, int],
    axes: tuple[tuple[str, ...], str, str],
) -> str:
    names, down, across = axes
    whose = ", ".join(f"{name} {i}" for name, i in zip(names, leading, strict=True))
    starts = [
        f"{name} from {start}" if start else name
        for name, start in zip((down, across), corner, strict=True)
    ]
    place = f" of {whose}" if whose else ""
    return f"{what}{place}: {starts[0]} down, {starts[1]} across"


def detail_of(name: str, material: Material, shown: Shown) -> str:
    """What was measured, in a sentence or two; empty where the matrices say it all."""
    parts: list[str] = []
    dim = material.head_dim
    if name in ("no-scale", "wrong-scale", "scale-by-embed-dim") and shown.guess.scale is not None:
        parts.append(
            f"Query times key is multiplied with {shown.guess.scale:.4g}; for head_dim {dim} it "
            f"should be {dim**-0.5:.4g} = 1/sqrt({dim})."
        )
    if name == "mask-fill-value" and (most := _most_forbidden(material, shown)) > 0:
        parts.append(f"What is forbidden gets weights of up to {most:.2g}.")
    if name == "softmax-wrong-axis":
        parts.append(f"It runs over the {shown.guess.axis}, and should run over the keys.")
    if name in ("wrong-projection", "wrong-values"):
        query, key, value = (_WORDS[letter] for letter in shown.guess.parts)
        parts.append(f"It computes softmax({query} · {key}) · {value}.")
    doubts = {tuple(names_of(material, other, shown.right)) for other in shown.others}
    doubts -= {tuple(names_of(material, shown.guess, shown.right))}
    if doubts:
        told = "; ".join(sorted(", ".join(names) for names in doubts if names))
        parts.append(f"The same numbers would follow from: {told}." if told else "")
    return " ".join(part for part in parts if part)


def _most_forbidden(material: Material, shown: Shown) -> float:
    """The largest weight that should be 0."""
    did, right = attention_of(material, shown.guess), attention_of(material, shown.right)
    if did is None or right is None or did[1].shape != right[1].shape:
        return 0.0
    return float(did[1].masked_fill(right[1] > 0, 0.0).nan_to_num().max())


_WORDS = {"q": "queries", "k": "keys", "v": "values", "x": "the input itself"}
