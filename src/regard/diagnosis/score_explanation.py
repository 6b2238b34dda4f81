"""Whether scores are query times key, times one number, plus what no input changes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Stages, found_stages
from regard.diagnosis.pre_score_steps import manner_of
from regard.diagnosis.reference_attention import Guess, Material, as_laid, attention_of, reproduces
from regard.diagnosis.rotated_inputs import turned
from regard.diagnosis.run_tensors import materials, weighed
from regard.diagnosis.subject import Subject
from regard.diagnosis.traced_run import Event

__all__ = ["Slope", "slope_of", "weighings"]

# No score of random inputs is as low, so that this is a mask.
_MASKED = -100.0
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Slope:
    """By what query times key is multiplied in the scores.

    Attributes:
        number: below 0 too.
        is_free: whether a norm lies between, which hides what is right, or each head has another;
            then it is the least.
    """

    number: float
    is_free: bool = False


def weighings(
    subject: Subject, found: list[Material], stages: Stages
) -> Iterator[tuple[Material, Guess]]:
    """Every way in which the weights that were seen, times a value, are the output."""
    for material in found:
        for weighing in weighed(subject, material, stages):
            for parts in permutations(("q", "k", "v")):
                plain = Guess(parts)  # pyright: ignore[reportArgumentType]
                if reproduces(weighing, plain):
                    yield weighing, plain


def slope_of(subject: Subject, stages: Stages, material: Material, guess: Guess) -> Slope | None:
    """What query times key is multiplied with, where nothing else that an input moves is added.

    Between two samples a bias and a mask are the same: what differs is query times key alone. A
    softcap is taken as such: before and behind its tanh the same holds.

    Returns:
        None where the scores are something else.
    """
    runs = [(stages, material)]
    if material.output.shape[0] == 1:
        inputs = subject.inputs(seed=1)
        again = found_stages(subject, inputs)
        runs += [(again, m) for m in materials(subject, inputs, again) if _alike(m, material)][:1]
    for is_met in (False, True):
        for laid in range(2):
            sights = [_sight(*run, guess, is_met=is_met, laid=laid) for run in runs]
            told = [sight for sight in sights if sight is not None]
            if len(told) < len(runs) or len({len(sight.steps) for sight in told}) > 1:
                continue
            steps = [torch.cat(parts) for parts in zip(*(s.steps for s in told), strict=True)]
            slopes = _product_of_slopes(steps)
            if slopes is not None:
                if is_met and manner_of(subject, stages) not in ("linear", "normed"):
                    return None
                least, most = float(slopes.min()), float(slopes.max())
                is_free = abs(most - least) > 1e-3 * abs(most) or any(s.is_free for s in told)
                return Slope(least, is_free)
    return None


@dataclass(frozen=True, eq=False)
class _Sight:
    """Tensors in pairs, (batch, heads, queries, keys): each second one is made of the first."""

    steps: list[Tensor]
    is_free: bool


def _alike(first: Material, second: Material) -> bool:
    same = (first.num_heads, first.place) == (second.num_heads, second.place)
    shapes = [{k: t.shape for k, t in m.tensors.items()} for m in (first, second)]
    return same and first.is_likely == second.is_likely and shapes[0] == shapes[1]


def _sight(
    stages: Stages, material: Material, guess: Guess, *, is_met: bool, laid: int
) -> _Sight | None:
    """Query times key and the scores, and the two sides of a softcap between them."""
    seen = turned(stages, material) if is_met else material
    if seen is None or stages.softmax is None:
        return None
    base = replace(guess, scale=1.0, mask="none")
    if is_met:
        base = replace(base, parts=("q", "k", base.parts[2]))
    result = attention_of(replace(seen, weights=None), base)
    if result is None:
        return None
    raw, between = result[2], _cap(stages, result[2].numel())
    tensors = [stages.softmax.scores]
    if between is not None and between.output is not None:
        tensors = [between.args[0], between.output, *tensors]
    lays = [list(as_laid(tensor.double(), raw.shape)) for tensor in tensors]
    if any(len(ways) <= laid for ways in lays):
        return None
    return _Sight([raw, *(ways[laid] for ways in lays)], seen.is_scaled_freely)


def _cap(stages: Stages, count: int) -> Event | None:
    """The tanh of a softcap; None where there is none."""
    assert stages.softmax is not None
    last = stages.softmax.events[0].place
    caps = [e for e in stages.trace if e.operator in ("tanh", "tanh_") and e.place < last]
    told = [e for e in caps if e.output is not None and e.output.numel() == count]
    return told[-1] if told else None


def _product_of_slopes(steps: list[Tensor]) -> Tensor | None:
    """By what the first becomes the last, for each head."""
    pairs = list(zip(steps[::2], steps[1::2], strict=True))
    product = torch.ones(steps[0].shape[1], dtype=torch.float64, device="cpu")
    for before, after in pairs:
        slopes = _slopes(before, after, is_last=after is steps[-1])
        if slopes is None:
            return None
        product *= slopes
    return product


def _slopes(before: Tensor, after: Tensor, *, is_last: bool) -> Tensor | None:
    """For each head the number by which ``after`` follows what changes in ``before``.

    Between samples. What goes into the softmax may be shifted, each row by a number of its own.
    """
    is_open = after > _MASKED
    if len(after) < 2 or not bool((is_open == is_open[:1]).all()):
        return None
    sides = before, after.clamp(min=_MASKED)
    if is_last:
        sides = tuple(side - _mean(side, is_open) for side in sides)
    moves = [(side[1:] - side[:1]).masked_fill(~is_open[1:], 0) for side in sides]
    mine, theirs = (move.transpose(0, 1).flatten(1) for move in moves)  # (heads, changes)
    if mine.shape[1] < 2 or not bool(mine.any(-1).all()):
        return None
    slopes = (mine * theirs).sum(-1) / mine.square().sum(-1)
    largest = float(theirs.abs().max())
    fits = float((theirs - slopes[:, None] * mine).abs().max()) <= _TOLERANCE * largest
    return slopes if fits and bool((slopes != 0).all()) else None


def _mean(scores: Tensor, is_open: Tensor) -> Tensor:
    """Of what is open in each row."""
    total = scores.masked_fill(~is_open, 0).sum(-1, keepdim=True)
    return total / is_open.sum(-1, keepdim=True).clamp(min=1)
