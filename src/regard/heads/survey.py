"""What one text shows of a head: the mean of its weights over the queries that are text.

The scores are the ones the field uses to describe heads (Clark et al. 2019, "What Does BERT Look
At?", section 3; Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 5.1), with one
change of ours: all of them leave out special tokens and the first token as queries, and the
neighbour scores leave out those two as keys as well, so that a sink never counts as a neighbour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any

import torch
from torch import Tensor

from regard.block import Block
from regard.heads.kinds import FIRST, LOCAL, NEXT, PREVIOUS, SELF, SEPARATOR, UNIFORM
from regard.reductions import Diagonal, OfEachRow, Part, Reduction, Segments

__all__ = ["Spread", "Survey", "of_each_head"]

# Some models mask by adding the lowest number of their dtype, -65504 in float16.
_MASKED_BITS = -10_000 / log(2)
# Local: so many tokens to either side, for queries that could look at many more.
_NEAR = 4
_FROM = 5 * _NEAR


@dataclass(frozen=True)
class Spread(OfEachRow):
    """How evenly each query spreads its attention, from 0 (one key) to 1 (all keys alike).

    The entropy of its weights as a share of log(n), n the number of keys that it may attend to; 0
    where n is 1 or 0. The answer has shape (..., num_heads, q_len). Ours.

    Example:
        >>> import torch, regard
        >>> from regard.heads import Spread
        >>> x = torch.zeros(3, 1)
        >>> regard.attend(x, x, mask=regard.Causal()).reduce(Spread())
        tensor([0., 1., 1.])
    """

    def update(self, block: Block) -> tuple[Part, ...]:
        entropy = block.above * block.mass - block.expected
        keys = (block.bits > _MASKED_BITS).sum(-1, dtype=torch.int32)
        # One key has log 1 = 0 and entropy 0: any divisor but 0 gives 0.
        spread = entropy.clamp(min=0) / keys.clamp(min=2).log()
        return (Part(block.box.at_rows, spread),)


@dataclass(frozen=True)
class Survey:
    """What to ask of a layer that read a text, and the scores that follow from the answers.

    Its ``reductions`` in ``observe(model, keep=...)`` are all that ``seen.heads()`` needs.

    Attributes:
        queries: for each query, whether it is a special token.
        keys: the same for each key; None where every query of the text was kept.
        start: the position of the first query in the text of the keys, where only some of its
            queries were kept; None where the keys are another text.

    Example:
        >>> from regard.heads import Survey
        >>> Survey((False,) * 9).reductions[:2]
        (Spread(), Segments(query_spans=[(1, 9)], key_spans=[(0, 1)]))
    """

    queries: tuple[bool, ...]
    keys: tuple[bool, ...] | None = None
    start: int | None = None

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The questions; of a text that attends to another, positions mean nothing."""
        to_keys = Segments(_runs(self._asking), self._key_spans)
        near = range(self._first - _NEAR, self._first + _NEAR + 1) if self._one_text else ()
        return (Spread(), to_keys, *(Diagonal(offset) for offset in near))

    def scores(self, answers: Sequence[Any]) -> dict[str, Tensor]:
        """The scores of all heads, each (..., num_heads), by the names of the kinds they make.

        Args:
            answers: to ``reductions``, in their order.
        """
        spread, segments, *diagonals = answers
        queries = self._asking
        lengths = segments.new_tensor([stop - start for start, stop in _runs(queries)])
        shares = torch.einsum("q,...qk->...k", lengths, segments) / len(queries)
        named = {
            FIRST.name: shares[..., 0],
            SEPARATOR.name: shares[..., 1:].sum(-1),
            UNIFORM.name: _mean(spread, queries),
        }
        if not self._one_text:
            return named
        near, first, text = range(-_NEAR, _NEAR + 1), self._first, self._key_text
        at = {
            n: _at(first + n, diagonal, len(self.queries))
            for n, diagonal in zip(near, diagonals, strict=True)
        }
        named[PREVIOUS.name] = _mean(at[-1], [q for q in queries if first + q - 1 in text])
        named[NEXT.name] = _mean(at[1], [q for q in queries if first + q + 1 in text])
        named[SELF.name] = _mean(at[0], queries)
        far = [q for q in queries if first + q >= _FROM]
        if far:
            named[LOCAL.name] = _mean(torch.stack(list(at.values())).sum(0), far)
        return named

    @property
    def _one_text(self) -> bool:
        return self.keys is None or self.start is not None

    @property
    def _first(self) -> int:
        """The position of the first query."""
        return self.start or 0

    @property
    def _key_text(self) -> set[int]:
        """The positions of the keys that are text, without the first."""
        special = self.queries if self.keys is None else self.keys
        return {place for place, is_one in enumerate(special) if place and not is_one}

    @cached_property
    def _asking(self) -> list[int]:
        """The queries whose weights count: those that are text, or all where none is."""
        text = [
            query
            for query, is_special in enumerate(self.queries)
            if self._first + query > 0 and not is_special
        ]
        return text or list(range(len(self.queries)))

    @property
    def _key_spans(self) -> list[tuple[int, int]]:
        """The first key, and the special ones after it."""
        special = self.queries if self.keys is None else self.keys
        return [(0, 1), *_runs([place for place, is_one in enumerate(special) if place and is_one])]


def of_each_head(scores: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Scores (..., num_heads) as numbers: the mean over all leading axes; one without heads."""
    return {
        name: torch.atleast_2d(values).flatten(0, -2).double().mean(0).tolist()
        for name, values in scores.items()
    }


def _at(offset: int, diagonal: Tensor, q_len: int) -> Tensor:
    """The weights A[i, i + offset] at each query i, 0 where there is no such key."""
    before = min(max(0, -offset), q_len)
    after = q_len - before - diagonal.shape[-1]
    return torch.nn.functional.pad(diagonal, (before, after))


def _mean(values: Tensor, places: list[int]) -> Tensor:
    """The mean of the values at these places; 0 where there are none."""
    return values[..., places].mean(-1) if places else values.new_zeros(values.shape[:-1])


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Rising places as spans (start, stop)."""
    spans: list[tuple[int, int]] = []
    for place in places:
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return spans
