"""The kinds of heads that the field tells apart, and which one a head is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Head", "Kind", "kind_of", "stand_out"]


@dataclass(frozen=True)
class Kind:
    """A kind of head.

    Attributes:
        name: what it is called.
        letter: for one cell of a grid; upper case when the score is strong.
        least: the score that makes a head one of this kind; ours.
        strong: the score from which on it is one clearly; ours.
        reason: why, with a place for the score.
        rank: a head that reaches several kinds is one of those with the lowest rank.

    Example:
        >>> from regard.analysis.head_kinds import KINDS
        >>> KINDS[0].name, KINDS[0].reason.format("90 %")
        ('induction', 'puts 90 % on what came after the same token before')
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
"""Every kind, in the order in which they are shown; ``docs/heads.md`` defines each score.

The first three need a run made for them, a trial, and go before what a head does in a text: where
there is nothing to copy, an induction head rests on the first token (Olsson et al. 2022,
"In-context Learning and Induction Heads"). A local head is one that no nearer kind describes.
"""

# Of these the score is no share of attention, or the sum of others' shares.
_NO_SHARES = {UNIFORM.name, LOCAL.name}


@dataclass(frozen=True)
class Head:
    """One head: what kind it is, and why.

    Attributes:
        layer: its layer's place in the model, from 0.
        head: its place in the model's layer, from 0.
        kind: the name of its kind.
        score: the score that makes it one; for a mixed head its largest mean weight.
        scores: the score of every kind that was measured, by name, from 0 to 1.

    Example:
        >>> from regard.analysis.head_kinds import Head
        >>> Head(5, 3, "mixed", 0.4, {}).name
        'L5H3'
    """

    layer: int
    head: int
    kind: str
    score: float
    scores: Mapping[str, float]

    @property
    def name(self) -> str:
        """Layer and head as the field writes them, both from 0."""
        return f"L{self.layer}H{self.head}"


def kind_of(scores: Mapping[str, float]) -> tuple[Kind, float]:
    """Return the kind of a head with these scores, and the score that decides it.

    Of the kinds whose score reaches ``least``, the one of the lowest rank; of one rank, the one
    with the largest score.

    Args:
        scores: by the names of kinds; those that were not measured are not there.

    Example:
        >>> from regard.analysis.head_kinds import kind_of
        >>> kind_of({"first-token sink": 0.9, "induction": 0.6})[0].name
        'induction'
    """
    reached = [kind for kind in KINDS if scores.get(kind.name, -1.0) >= kind.least]
    if not reached:
        shares = [score for name, score in scores.items() if name not in _NO_SHARES]
        return MIXED, max(shares, default=0.0)
    kind = min(reached, key=lambda kind: (kind.rank, -scores[kind.name]))
    return kind, scores[kind.name]


def stand_out(heads: Sequence[Head]) -> tuple[tuple[Head, str], ...]:
    """For each kind the head that is it most, and why in words; mixed heads do not stand out.

    Args:
        heads: from ``classify``.

    Example:
        >>> from regard.analysis.head_kinds import Head, stand_out
        >>> stand_out([Head(0, 2, "previous token", 0.96, {})])[0][1]
        'puts 96 % of its attention on the token before'
    """
    found: list[tuple[Head, str]] = []
    for kind in KINDS:
        alike = [head for head in heads if head.kind == kind.name]
        if alike and kind is not MIXED:
            best = max(alike, key=lambda head: head.score)
            found.append((best, kind.reason.format(f"{100 * best.score:.0f} %")))
    return tuple(found)
