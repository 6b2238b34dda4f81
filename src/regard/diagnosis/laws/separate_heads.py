"""The law of heads: each has queries, keys and values of its own, and its place."""

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.laws.lab import Lab, NotTried, differs, normal
from regard.diagnosis.laws.law import Breach, Law
from regard.diagnosis.laws.tape import addresses
from regard.diagnosis.laws.weighing import (
    Weighing,
    core_of,
    has_no_projections,
    is_before_weights,
    joined,
    rank_of,
    tables_of,
    with_other_numbers,
)

__all__ = ["Heads"]


class Heads(Law):
    """Each head has queries, keys and values of its own, and stays in its place."""

    name = "heads"
    formula = "output[head h] depends on query[head h] alone"
    example = "k = k.repeat(1, groups, 1, 1)  # heads 0 1 0 1 where queries are 0 0 1 1"

    def breach(self, lab: Lab) -> Breach | None:
        """Compare which value channels and which query channels belong to which column."""
        if has_no_projections(lab):
            return None
        w = core_of(lab)
        if w.missing:
            raise NotTried("Queries, keys or values are missing.")
        found = self._slices(lab, w) or self._tied(w) or self._same_projections(w) or self._raw(w)
        if found is not None:
            return found
        kept = w.constant[:, w.open_rows][:, 0]
        rank = rank_of(kept)
        if rank < min(kept.shape):
            return Breach(
                f"{len(w.value)} value channels reach the output in {rank} directions only."
            )
        heads = w.heads
        if w.core.is_direct and (found := self._out_of_place(w)) is not None:
            return found
        return self._order(lab, w, heads) or self._scrambled(w, len(heads)) or self._moved_rows(w)

    @staticmethod
    def _moved_rows(w: Weighing) -> Breach | None:
        """Find outputs that stand at the place of another token than their query."""
        core = w.core
        if core.plan.exit is None or not core.lab.sees_rows or len(core.contents) > 1:
            return None
        start = core.at_the_end(core.bases(1))[0]
        if len(start) != core.tokens:
            return None
        noise = torch.full((1, len(w.query)), 0.5, dtype=torch.float64)
        probes = [core.placed(core.bases(1), w.query, noise, at) for at in range(core.tokens)]
        rows = differs(core.at_the_end(joined(probes)), start, 1e-10).any(-1)  # (tokens, rows)
        # A later operation may join several rows, as a convolution does.
        wrong = rows.int().argmax(1) != torch.arange(core.tokens)
        if bool((rows.sum(1) != 1).any()) or not bool(wrong.any()):
            return None
        token = int(wrong.nonzero()[0])
        return Breach(
            f"The query of token {token + 1} moves output {int(rows[token].int().argmax()) + 1} "
            "and no other: outputs stand in another order than their tokens.",
        )

    @staticmethod
    def _scrambled(w: Weighing, heads: int) -> Breach | None:
        """Find a table with an axis for the heads whose numbers reach other heads.

        A table whose numbers move several heads each is one that heads share.
        """
        start, sums = w.outputs(w.core.bases(1))[0], w.weights(w.core.bases(1)).sum(-1)

        def moved(parameter: Tensor, part: Any) -> Tensor:
            own = with_other_numbers(parameter, part, lambda: w.outputs(w.core.bases(1))[0])
            return differs(own, start, 1e-9).any(0)  # (heads,)

        for parameter in tables_of(w, 4096) if heads > 1 else ():
            axes = [axis for axis, size in enumerate(parameter.shape) if size == heads]
            if not axes or not is_before_weights(w, parameter, sums):
                continue
            slices = [
                torch.stack([moved(parameter, (*[slice(None)] * axis, i)) for i in range(heads)])
                for axis in axes
            ]
            if any(bool((own.sum(1) <= 1).all()) for own in slices):
                continue
            few = torch.arange(0, parameter.numel(), max(1, parameter.numel() // 24))
            ones = [moved(parameter, torch.unravel_index(n, parameter.shape)) for n in few]
            counts = {int(own.sum()) for own in ones} - {0}
            if min(counts, default=heads) == 1:
                at = addresses(parameter)[0]
                places = (s.place for s in w.core.run.steps if s.place and at in s.reads)
                return Breach(
                    f"A table of shape {tuple(parameter.shape)} has an axis for the {heads} heads, "
                    "and each of its parts reaches several heads; it should reach its own.",
                    next(places, None),
                )
        return None

    @staticmethod
    def _same_projections(w: Weighing) -> Breach | None:
        cuts = [cut for cut in w.core.plan.cuts if isinstance(cut, int)]
        roles = {cut: {r for (c, _), r in w.core.roles.items() if c == cut} for cut in cuts}
        for one, other in combinations(cuts, 2):
            steps = [w.core.run.steps[cut] for cut in (one, other)]
            # Several heads of queries may share one head of keys and values.
            is_shared = roles[one] == roles[other] and "query" not in roles[one]
            if not is_shared and torch.equal(steps[0].outputs[0], steps[1].outputs[0]):
                says = "Two projections give the same numbers."
                if roles[one] == roles[other]:
                    return Breach(says, steps[0].place, kind="heads-share-projection")
                return Breach(says, steps[1].place, kind="wrong-projection")
        return None

    @staticmethod
    def _slices(lab: Lab, w: Weighing) -> Breach | None:
        """Each projection reads the whole token."""
        slots = lab.specimen.sources.values()
        if w.core.is_direct or any(slot.high or len(slot.axes) > 3 for slot in slots):
            return None
        moved = {name: t.clone() for name, t in w.core.contents.items()}
        for t in moved.values():
            t[..., 0] += 1.0
        for cut, share in w.core.shares_moved(moved).items():
            if 0 < share < 0.9:
                return Breach(
                    f"One number of a token reaches {share:.0%} of a projection: heads read "
                    "slices of the token where each should read all of it.",
                    w.core.run.steps[cut].place,
                    kind="heads-share-projection",
                )
        return None

    @staticmethod
    def _raw(w: Weighing) -> Breach | None:
        """Values are projected where queries and keys are."""
        plain, projected = ({type(cut) for cut, _ in c} for c in (w.value, [*w.query, *w.key]))
        if plain != {str} or projected != {int}:
            return None
        return Breach(
            "The values are the input itself, and queries and keys are projections of it.",
            is_definite=False,
            kind="wrong-values",
        )

    @staticmethod
    def _tied(w: Weighing) -> Breach | None:
        """No two numbers of the output are the same whatever the queries are."""
        if not w.core.columns_are_channels:
            return None
        values = w.core.bases(1)
        for n, channels in enumerate((w.query, w.key)):
            for token in range(len(w.core.places[channels[0][0]])):
                noise = normal(23 + 100 * n + token, 1, len(channels))
                values = w.core.placed(values, channels, noise, token)
        out = w.core(values)[0]  # (rows, columns)
        for column in range(1, out.shape[1]):
            same = ~differs(out[:, :column], out[:, column : column + 1].expand(-1, column), 1e-9)
            if bool(same.all(0).any()):
                other = int(same.all(0).nonzero()[0])
                return Breach(
                    f"Numbers {other + 1} and {column + 1} of the output are always the same: "
                    "heads share their queries, keys and values.",
                    kind="heads-share-projection",
                )
        return None

    @staticmethod
    def _out_of_place(w: Weighing) -> Breach | None:
        constant = w.constant[:, w.open_rows][:, 0]
        if constant.shape[0] != constant.shape[1]:
            return None
        for channel in range(constant.shape[0]):
            column = int(constant[channel].abs().argmax())
            if column != channel:
                return Breach(
                    f"Number {channel + 1} of a token's values comes out as number {column + 1}."
                )
        return None

    @staticmethod
    def _order(lab: Lab, w: Weighing, heads: list[tuple[int, Tensor]]) -> Breach | None:
        """Each query channel moves one head; heads and their values are in the same order."""
        moved, by_key = _heads_moved(w)
        counts = moved.sum(-1)
        if bool((counts > 1).any()):
            channel = int((counts > 1).nonzero()[0])
            lab.notes.append(
                f"Number {channel + 1} of a token's queries moves {int(counts[channel])} of "
                f"{len(heads)} heads: heads share their queries, or their scores are mixed."
            )
            return None
        values = [channel for channel, _ in heads]
        order = [values[int(row.nonzero()[0])] for row in moved if bool(row.any())]
        if (met := list(dict.fromkeys(order))) != sorted(met):
            return Breach(
                "The heads of the queries are in another order than those of the values they weigh."
            )
        if len(set(values)) < len(values) and order != sorted(order):
            return Breach(
                "Neighbouring query heads should share a head of keys and values, 0 0 1 1; here "
                f"they take turns, in the order {_turns(order)}.",
                kind="kv-heads-repeated-in-wrong-order",
            )
        key_heads = (by_key.T.float() @ by_key.float()) > 0  # which heads share keys
        value_heads = torch.tensor([[one == other for one in values] for other in values])
        keys = {tuple(int(n) for n in row.nonzero().flatten()) for row in key_heads}
        if 1 < len(keys) == len(set(values)) and not key_heads.equal(value_heads):
            return Breach(
                "Query heads that share a head of keys do not share one of values: keys and values "
                "are repeated in different orders.",
                kind="kv-heads-repeated-in-wrong-order",
            )
        return None


def _heads_moved(w: Weighing) -> tuple[Tensor, Tensor]:
    """Return which heads each number of a token's queries, and of its keys, moves.

    Returns:
        Of each, bool, (channels, heads).
    """
    weights = w.weights(w.core.bases(1))[0]
    # One token tells, if its weights can grow and shrink.
    is_free = ((weights > 1e-6) & (weights < 1 - 1e-6)).any(1).all(0)  # (tokens,)
    tokens = [int(j) for j in is_free.nonzero()[:1]] or list(range(len(is_free)))
    found: list[Tensor] = []
    for channels, at in ((w.query, slice(None)), (w.key, slice(tokens[0], tokens[0] + 1))):
        many = w.core.bases(len(channels))
        for k, (cut, c) in enumerate(channels):
            many[cut][k, w.core.places[cut][at, c]] += 0.8
        read = w.weights(many, tokens) - weights[:, :, tokens]
        found.append(read.abs().amax((2, 3)) > 1e-9)
    return found[0], found[1]


def _turns(order: list[int]) -> str:
    """Return the order of value heads that query channels meet, without repetitions."""
    names = {channel: str(i) for i, channel in enumerate(sorted(set(order)))}
    found: list[str] = []
    for channel in order:
        if not found or found[-1] != names[channel]:
            found.append(names[channel])
    return " ".join(found[:8])
