"""The kinds of attention heads in the literature, and the rule that selects one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of head.

    Attributes:
        name: the name of the kind.
        letter: the letter in a grid of heads; upper case for a strong score.
        least: the minimum score of a head of this kind; our choice.
        strong: the minimum score of a clear head of this kind; our choice.
        reason: a description of the head's attention, with {} for the score.
        rank: the priority. If a head reaches several kinds, those with the lowest rank count.
    """

    name: str
    letter: str
    least: float
    strong: float
    reason: str
    rank: int = 1


INDUCTION = Kind("induction", "i", 0.4, 0.75, "puts {} on what came after the same token before", 0)
DUPLICATE = Kind("duplicate token", "d", 0.4, 0.75, "puts {} on the same token earlier", 0)
RETRIEVAL = Kind("retrieval", "r", 0.4, 0.75, "puts {} on what it copies next, far away", 0)
PREVIOUS = Kind("previous token", "p", 0.5, 0.75, "puts {} of its attention on the token before")
NEXT = Kind("next token", "n", 0.5, 0.75, "puts {} of its attention on the token after")
SELF = Kind("self", "o", 0.5, 0.75, "puts {} of its attention on the token itself")
FIRST = Kind("first-token sink", "f", 0.5, 0.75, "puts {} of its attention on the first token")
SEPARATOR = Kind("separator sink", "s", 0.5, 0.75, "puts {} of its attention on separators")
UNIFORM = Kind("uniform", "u", 0.9, 0.97, "has {} of the entropy of even attention")
LOCAL = Kind("local", "l", 0.5, 0.75, "puts {} of its attention on the 4 tokens around", 2)
MIXED = Kind("mixed", "·", 0.0, 1.1, "puts no more than {} on any of these", 3)

KINDS = (
    *(INDUCTION, DUPLICATE, RETRIEVAL),
    *(PREVIOUS, NEXT, SELF, FIRST, SEPARATOR, UNIFORM, LOCAL, MIXED),
)
"""Every kind, in display order; ``docs/heads.md`` defines each score.

The first three need a special run, a trial, and have priority over the kinds of an ordinary text.
If there is nothing to copy, an induction head attends to the first token (Olsson et al. 2022,
"In-context Learning and Induction Heads"). A head is local if no more specific kind fits.
"""

TRIAL_KINDS = (INDUCTION.name, DUPLICATE.name, RETRIEVAL.name)
"""Kinds that a special run measures, and not the text of the recording."""

# The score of these kinds is not a share of attention, or a sum of the shares of other kinds.
_NO_SHARES = {UNIFORM.name, LOCAL.name}


@dataclass(frozen=True)
class Head:
    """One head with its kind and scores.

    Attributes:
        layer: the index of its layer in the model, from 0.
        head: its index in that layer of the model, from 0.
        kind: the name of its kind.
        score: the score for that kind; for a mixed head, the largest mean weight.
        scores: the score of every measured kind, by name, from 0 to 1.
    """

    layer: int
    head: int
    kind: str
    score: float
    scores: Mapping[str, float]

    @property
    def name(self) -> str:
        """The usual name, such as ``L5H3``, with layer and head counted from 0."""
        return f"L{self.layer}H{self.head}"

    @property
    def here(self) -> tuple[Kind, float] | None:
        """The kind and score on the text itself, if a special run gave the kind."""
        if self.kind not in TRIAL_KINDS:
            return None
        shown = {name: score for name, score in self.scores.items() if name not in TRIAL_KINDS}
        return kind_of(shown)

    @property
    def letter(self) -> str:
        """The letter of its kind; upper case if it is clearly of this kind."""
        kind = next(kind for kind in KINDS if kind.name == self.kind)
        return kind.letter.upper() if self.score >= kind.strong else kind.letter


def kind_of(scores: Mapping[str, float]) -> tuple[Kind, float]:
    """Return the kind of a head with these scores, and the score that decides it.

    Among the kinds whose score reaches ``least``, the lowest rank wins; among those with the same
    rank, the largest score wins. Kinds that were not measured have no score.
    """
    reached = [kind for kind in KINDS if scores.get(kind.name, -1.0) >= kind.least]
    if not reached:
        shares = [score for name, score in scores.items() if name not in _NO_SHARES]
        return MIXED, max(shares, default=0.0)
    kind = min(reached, key=lambda kind: (kind.rank, -scores[kind.name]))
    return kind, scores[kind.name]


_POSITIONAL = (PREVIOUS.name, NEXT.name, SELF.name, FIRST.name, SEPARATOR.name)


def meaning(head: Head) -> float:
    """Return how sharply a head attends to tokens that are neither sinks nor neighbours.

    Our measure, from 0 to 1, of how much its attention says about the words of the text.
    """
    elsewhere = 1 - sum(head.scores.get(name, 0.0) for name in _POSITIONAL)
    return (1 - head.scores.get(UNIFORM.name, 1.0)) * max(0.0, elsewhere)


def stand_out(heads: Sequence[Head]) -> tuple[tuple[Head, str], ...]:
    """Return the head with the largest score of each kind but mixed, with a description.

    The description of a kind that a special run measured also says what the head does here.
    """
    best_of_kind: list[tuple[Head, str]] = []
    for kind in KINDS:
        alike = [head for head in heads if head.kind == kind.name]
        if alike and kind is not MIXED:
            best = max(alike, key=lambda head: head.score)
            reason = kind.reason.format(f"{100 * best.score:.0f} %")
            if best.here is not None:
                here, score = best.here
                reason += f" in a trial; here it {here.reason.format(f'{100 * score:.0f} %')}"
            best_of_kind.append((best, reason))
    return tuple(best_of_kind)
