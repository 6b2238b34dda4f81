"""Generation: the calls of a layer with a KV cache, prompt and answer, found to be one attention.

Nothing is asked of the model or its cache. A call goes on from earlier ones of the same module when
the keys that it attends to begin with theirs: it then brings its queries as rows and its new keys
as columns. So all caches look alike: those that grow, that lie ready at their full length, that
drop their oldest keys, and whose batch entries change places (beams). A call whose keys do not
agree is the beginning of another attention. So the calls of assisted decoding stay apart wherever
the cache was cut back.

Calls that share all their keys are one attention only where the model wrote in between, as a
decoder does between two looks at its other text; else they are heads in a loop, or other queries.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from regard.masks import Mask
from regard.masks.recognise import FAR
from regard.scores.box import Box
from regard.scores.query_key import QueryKeyScores

__all__ = ["Order", "Place", "Run", "Steps", "extended", "order_since", "visible_stop"]

Order = tuple[int, ...]
"""For each entry of the batch the one that it was before."""


class Place(NamedTuple):
    """The place at which a call goes on from earlier ones.

    Attributes:
        grows: whether it brings keys, as in self-attention; in cross-attention all stay.
        base: the column of its first key.
        known: how many of its keys are known already, the first ones.
        stop: how many of its keys count; a cache may lie ready for more.
        order: how the entries of the batch have changed places; None: not at all.
    """

    grows: bool
    base: int
    known: int
    stop: int
    order: Order | None = None


@dataclass(eq=False)
class Run:
    """Calls of one layer that are one attention, so far.

    Attributes:
        traits: what all its calls have alike; None: another call cannot go on from it.
        sink_bias: of all its calls.
        last_query: of the first call, (..., num_heads, 1, head_dim).
        keys: (..., num_kv_heads, room, head_dim), of which the first kv_len are filled.
        kv_len: how many keys there are.
        q_len: how many queries ran.
        before: how many keys the first call had before its queries, if its queries have keys.
        parts: how many calls there are.
        grows: whether calls bring keys; None: not known from one call.
        orders: how the entries of the batch changed places, and how many queries had run by then.
        time: of the last call, on the clock of all layers.
    """

    traits: Hashable
    sink_bias: Tensor | None
    last_query: Tensor
    keys: Tensor
    kv_len: int
    q_len: int
    before: int
    time: int
    parts: int = 1
    grows: bool | None = None
    orders: list[tuple[int, Order]] = field(default_factory=list[tuple[int, Order]])

    @property
    def start(self) -> int:
        """Return the place of its first query among its keys; 0 if they are other tokens."""
        return self.before if self.grows else 0

    def extend(
        self,
        place: Place,
        key: Tensor,
        q_len: int,
        empty: Callable[[Sequence[int], Tensor], Tensor],
    ) -> None:
        """Take in the queries and the new keys of a call that goes on from here.

        Args:
            place: of the call.
            key: its keys.
            q_len: how many queries it has.
            empty: gives room of a shape for what is like a tensor.
        """
        if place.order is not None:
            self.orders.append((self.q_len, place.order))
            at = torch.tensor(place.order, device=self.keys.device)
            self.keys = self.keys[..., : self.kv_len, :].index_select(0, at)
        self.grows = place.grows
        self.parts += 1
        self.q_len += q_len
        if not place.grows:
            self.kv_len = place.stop
            return
        first, self.kv_len = place.base + place.known, place.base + place.stop
        self.keys = extended(self.keys, first, key[..., place.known : place.stop, :], empty)


class Steps:
    """Finds which calls belong together.

    Attributes:
        fell_apart: the modules of which a call went on from keys before the last ones, or from one
            of several beams of which nobody can tell which.
    """

    def __init__(self) -> None:
        self.fell_apart: dict[str, None] = {}
        self._runs: dict[str, list[Run]] = {}
        self._clock = count(1)
        self._began_again = 0  # when last a layer did not go on from its earlier calls
        self._grew = 0  # when last a layer went on with new keys
        self._last_keys: dict[str, Tensor] = {}  # of one head of layers that nobody wants
        # Of the last call that brought keys: what each entry of the batch had written before it,
        # and which of these entries each one goes on from.
        self._written: tuple[Tensor, list[int]] | None = None

    def begin(self, name: str, source: QueryKeyScores, mask: Mask | None, keys: Tensor) -> Run:
        """Return the first call of what may become several.

        Args:
            name: of the module.
            source: of the call.
            mask: bound to the shape of the call's matrix.
            keys: a copy of its keys.
        """
        q_len, stop = source.query.shape[-2], visible_stop(source, mask)
        sink_bias = None if source.sink_bias is None else source.sink_bias.clone()
        last_query, before = source.query[..., -1:, :].clone(), stop - q_len
        runs = self._runs.setdefault(name, [])
        went_back = _goes_on_from_a_copy(runs, source, before)
        if went_back:
            self.fell_apart[name] = None
        run = Run(
            *(_traits(source), sink_bias, last_query, keys, stop, q_len, before),
            time=next(self._clock),
            grows=True if went_back else None,
        )
        self._written = None
        if runs and runs[-1].time >= self._began_again:
            self._began_again = run.time
        runs.append(run)
        return run

    def follow(
        self, name: str, source: QueryKeyScores, mask: Mask | None
    ) -> tuple[Run, Place] | None:
        """Return the calls of a layer that a call goes on from, and where; None: there are none.

        Args:
            name: of the module.
            source: of the call.
            mask: bound to the shape of the call's matrix.
        """
        traits = _traits(source)
        if traits is None:
            return None
        found: tuple[Run, Place] | None = None
        for run in reversed(self._runs.get(name, [])):
            if run.traits != traits or not _same(run.sink_bias, source.sink_bias):
                continue
            if found is not None and not _in_turn(run, found[0]):
                break
            place = self._staying(run, source) or self._growing(name, run, source, mask)
            if place is not None:
                found = run, place
            elif found is not None:
                break
        if found is not None:
            run, place = found
            run.time = next(self._clock)
            self._grew = run.time if place.grows else self._grew
        return found

    def pass_by(self, name: str, source: QueryKeyScores, mask: Mask | None) -> None:
        """Note whether a layer of which nothing is kept went on with new keys, and how beams moved.

        Args:
            name: of the module.
            source: of the call.
            mask: bound to the shape of the call's matrix.
        """
        stop = visible_stop(source, mask)
        key, known = _entries(source.key)[..., :1, :stop, :], stop - source.query.shape[-2]
        before = self._last_keys.get(name)
        if before is not None and known > 0:
            both = min(known, before.shape[-2])
            there, now = before[..., -both:, :], key[..., known - both : known, :]
            origins = _origins(there, now) if there.shape == now.shape else None
            if origins is not None:
                self._grew = next(self._clock)
                self._written = there, origins
        self._last_keys[name] = key.clone()

    def _staying(self, run: Run, source: QueryKeyScores) -> Place | None:
        """Return the place of a call with the keys of the last one, as in cross-attention."""
        kv_len, q_len = source.key.shape[-2], source.query.shape[-2]
        if run.grows or kv_len != run.keys.shape[-2]:
            return None
        if run.time < self._began_again or run.time > self._grew:
            return None
        if q_len == kv_len and torch.equal(run.last_query, source.query[..., -1:, :]):
            return None  # one text, read twice
        before, now = _entries(run.keys), _entries(_at(source.key, run))
        if self._written is None or len(self._written[1]) != len(now):
            alone = not any(torch.equal(one, other) for one, other in pairwise(before))
            return Place(False, 0, kv_len, kv_len) if alone and torch.equal(before, now) else None
        order = [self._origin(entry, before, now) for entry in range(len(now))]
        return None if None in order else Place(False, 0, kv_len, kv_len, order=_changed(order))

    def _origin(self, entry: int, before: Tensor, now: Tensor) -> int | None:
        """Return which entry of the batch one was, by what it wrote and what it reads.

        Beams move among those of their text; two that wrote the same can read two texts.
        """
        assert self._written is not None
        written, origins = self._written
        own = origins[entry]
        for place in (own, *range(len(now))):
            wrote_it = place == own or torch.equal(written[place], written[own])
            if wrote_it and torch.equal(before[place], now[entry]):
                return place
        return None

    def _growing(
        self, name: str, run: Run, source: QueryKeyScores, mask: Mask | None
    ) -> Place | None:
        """Return the place of a call whose keys begin with those of the calls before."""
        q_len, stop = source.query.shape[-2], visible_stop(source, mask)
        known = stop - q_len
        if known < 1 or run.grows is False:
            return None
        key, base = _at(source.key[..., :known, :], run), run.kv_len - known
        there = run.keys[..., max(base, 0) : run.kv_len, :]
        origins = _origins(_entries(there), _entries(key)) if base >= 0 else None
        if origins is not None and _look_alike(_entries(run.keys[..., : run.kv_len, :]), base):
            self.fell_apart[name] = None
            return None  # the keys cannot tell which beam went on
        if origins is not None:
            self._written = _entries(there), origins
            return Place(True, base, known, stop, order=_changed(origins))
        return None


def extended(
    kept: Tensor, first: int, more: Tensor, empty: Callable[[Sequence[int], Tensor], Tensor]
) -> Tensor:
    """Return what is kept of each key, with more from a column on; there may be room behind it.

    Args:
        kept: (..., num_kv_heads, room, dim).
        first: the column.
        more: (..., num_kv_heads, columns, dim).
        empty: gives room of a shape for what is like a tensor.
    """
    stop = first + more.shape[-2]
    if kept.shape[-2] < stop:
        # Half as much again each time, so that all copies together cost what the keys do.
        room = stop + max(64, stop // 2)
        larger = empty((*more.shape[:-2], room, more.shape[-1]), kept)
        larger[..., :first, :] = kept[..., :first, :]
        kept = larger
    kept[..., first:stop, :] = more
    return kept


def order_since(place: int, orders: Sequence[tuple[int, Order]]) -> Order | None:
    """Return which entry each one at the end was when a query ran; None: the same."""
    found: Order | None = None
    for ran, order in reversed(orders):
        if ran <= place:
            break
        found = order if found is None else tuple(order[entry] for entry in found)
    return found


def visible_stop(source: QueryKeyScores, mask: Mask | None) -> int:
    """Return one past the last key that the last query may attend to: after it a cache is empty.

    A query that may attend to nothing tells nothing: then all keys count.

    Args:
        source: of the scores.
        mask: bound to their shape; None: all keys.
    """
    shape = source.shape
    q_len, kv_len = shape[-2:]
    hides = mask is not None or source.bias is not None
    if not hides or q_len == kv_len:
        return kv_len
    last = q_len - 1
    leading, some = tuple(slice(0, n) for n in shape[:-2]), slice(0, kv_len)
    row = slice(last, last + 1)
    if mask is not None:
        some = mask.key_bounds(leading, row, shape).any
    end = slice(max(some.stop - 1, some.start), some.stop)
    for columns in (end, some):
        seen = _seen(source, mask, Box(leading, row, columns)).nonzero()
        if len(seen):
            return columns.start + int(seen[-1]) + 1
    return kv_len


def _seen(source: QueryKeyScores, mask: Mask | None, box: Box) -> Tensor:
    """Return which keys some entry or head sees, (columns,); a bias may hide keys."""
    tensors = () if mask is None else mask.tensors
    tensors = tensors if source.bias is None else (source.bias, *tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    if mask is None:
        seen = torch.ones(1, box.columns.stop - box.columns.start, dtype=torch.bool, device=device)
    else:
        seen = mask.block(box, source.shape, device)
    if source.bias is not None:
        bias = source.bias.expand(*source.bias.shape[:-2], *source.shape[-2:])
        seen = seen & (bias[..., box.rows, box.columns] > FAR)
    return seen.flatten(0, -2).any(0)


def _traits(source: QueryKeyScores) -> Hashable:
    """Return what two calls of one attention share; None: none can go on from this."""
    if source.position_bias is not None or source.score_mod is not None:
        return None  # what they add depends on where the call begins
    query, key = source.query, source.key
    outer = (query.shape[:-2], query.shape[-1], key.shape[:-2], key.shape[-1])
    return (outer, query.dtype, query.device, source.scale, source.softcap)


def _in_turn(first: Run, second: Run) -> bool:
    """Return True if two runs are heads in a loop on one key: then the first goes on first."""
    return first.time == second.time - 1 and not torch.equal(first.last_query, second.last_query)


def _goes_on_from_a_copy(runs: Sequence[Run], source: QueryKeyScores, before: int) -> bool:
    """Return True if the first keys are an earlier text's: the cache was copied or cut back.

    Of one call it is not known whether it was self-attention. It can have been where its queries
    stood at all its keys. Another look at the very same keys is cross-attention then, but where it
    ends with the same query: that is the end of the text, read again.
    """
    if before < 1:
        return False
    traits, stop = _traits(source), before + source.query.shape[-2]
    for run in runs:
        if run.traits != traits or not (run.grows or (run.grows is None and not run.before)):
            continue
        key, known = _at(source.key[..., :stop, :], run), run.keys[..., : run.kv_len, :]
        if not torch.equal(known[..., :before, :], key[..., :before, :]):
            continue
        reads_again = torch.equal(run.last_query, source.query[..., -1:, :])
        if run.grows or reads_again or not torch.equal(known, key):
            return True
    return False


def _at(tensor: Tensor, run: Run) -> Tensor:
    """Return where the keys of the run are kept."""
    return tensor.to(run.keys.device)


def _entries(tensor: Tensor) -> Tensor:
    """Return a tensor with the entries of the batch along the first axis."""
    return tensor if tensor.ndim > 3 else tensor[None]


def _changed(order: Sequence[int | None]) -> Order | None:
    """Return the order, where it is not as it was."""
    return None if list(order) == list(range(len(order))) else cast(Order, tuple(order))


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _look_alike(keys: Tensor, base: int) -> bool:
    """Return True if two entries of the batch differ only in keys that a cache has dropped.

    Which of the two a beam goes on from the keys cannot tell then.
    """
    if base == 0:
        return False
    return any(
        torch.equal(one[..., base:, :], other[..., base:, :]) and not torch.equal(one, other)
        for one, other in combinations(keys, 2)
    )


def _origins(before: Tensor, now: Tensor) -> list[int] | None:
    """Return for each entry of the batch the one that had its keys before; None: one is new."""
    everyone = range(len(now))
    if torch.equal(before, now):
        return list(everyone)
    origins: list[int] = []
    for entry in everyone if len(now) > 1 else ():
        found = [place for place in everyone if torch.equal(before[place], now[entry])][:1]
        if not found:
            return None
        origins += found
    return origins or None
