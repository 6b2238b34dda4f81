"""Generation: the calls of a layer with a KV cache, prompt and answer, found to be one attention.

Nothing is asked of the model or its cache. A call goes on from earlier ones of the same module when
the keys that it attends to begin with theirs: it then brings its queries as rows and its new keys
as columns. So all caches look alike: those that grow, that lie ready at their full length, that
drop their oldest keys, whose batch entries change places (beams), and whose last keys are taken
back (assisted decoding). A call whose keys do not agree is the beginning of another attention.

Calls that share all their keys are one attention only where the model wrote in between, as a
decoder does between two looks at its other text; else they are heads in a loop, or other queries.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count, pairwise
from types import FrameType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from regard.indexing import Box
from regard.masks import Mask
from regard.scores import QueryKey

__all__ = ["Order", "Place", "Run", "Steps", "extended", "order_since", "visible_stop"]

Order = tuple[int, ...]
"""For each entry of the batch the one that it was before."""


class Place(NamedTuple):
    """Where a call goes on from earlier ones.

    Attributes:
        grows: whether it brings keys, as in self-attention; in cross-attention all stay.
        base: the column of its first key.
        known: how many of its keys are known already, the first ones.
        stop: how many of its keys count; a cache may lie ready for more.
        taken_back: how many queries and keys before it were taken back.
        order: how the entries of the batch have changed places; None: not at all.
    """

    grows: bool
    base: int
    known: int
    stop: int
    taken_back: int = 0
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
        last: how many queries the last call had.
        calls: how many there were.
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
    last: int
    time: int
    calls: int = 1
    grows: bool | None = None
    orders: list[tuple[int, Order]] = field(default_factory=list[tuple[int, Order]])

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
        if not place.grows:
            self.kv_len = place.stop
        if place.order is not None:
            self.orders.append((self.q_len - place.taken_back, place.order))
            at = torch.tensor(place.order, device=self.keys.device)
            self.keys = self.keys[..., : self.kv_len, :].index_select(0, at)
        self.calls += 1
        self.q_len += q_len - place.taken_back
        self.grows, self.last = place.grows, q_len
        if not place.grows:
            return
        first, self.kv_len = place.base + place.known, place.base + place.stop
        self.keys = extended(self.keys, first, key[..., place.known : place.stop, :], empty)


class Steps:
    """Finds which calls belong together.

    Args:
        take_back: whether queries can be left out again when a model takes them back.
    """

    def __init__(self, *, take_back: bool) -> None:
        self._take_back = take_back
        self._runs: dict[str, list[Run]] = {}
        self._clock = count(1)
        self._began_again = 0  # when last a layer did not go on from its earlier calls
        self._grew = 0  # when last a layer went on with new keys
        self._last_keys: dict[str, Tensor] = {}  # of one head of layers that nobody wants
        # Of the last call that brought keys: what each entry of the batch had written before it,
        # and which of these entries each one goes on from.
        self._written: tuple[Tensor, list[int]] | None = None

    def begin(self, name: str, source: QueryKey, keys: Tensor, kv_len: int) -> Run:
        """The first call of what may become several.

        Args:
            name: of the module.
            source: of the call.
            keys: a copy of its keys.
            kv_len: how many of them count, where a later call brings keys.
        """
        q_len = source.query.shape[-2]
        sink_bias = None if source.sink_bias is None else source.sink_bias.clone()
        last_query = source.query[..., -1:, :].clone()
        run = Run(
            *(_traits(source), sink_bias, last_query, keys, kv_len, q_len, q_len),
            time=next(self._clock),
        )
        self._written = None
        runs = self._runs.setdefault(name, [])
        if runs and runs[-1].time >= self._began_again:
            self._began_again = run.time
        runs.append(run)
        return run

    def follow(self, name: str, source: QueryKey, mask: Mask | None) -> tuple[Run, Place] | None:
        """The earlier calls of a layer that a call goes on from, and where; None: there are none.

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
            place = self._staying(run, source) or self._growing(run, source, mask)
            if place is not None:
                found = run, place
            elif found is not None:
                break
        if found is not None:
            run, place = found
            run.time = next(self._clock)
            self._grew = run.time if place.grows else self._grew
        return found

    def pass_by(self, name: str, source: QueryKey, mask: Mask | None) -> None:
        """Note whether a layer of which nothing is kept went on with new keys, and how beams moved.

        Args:
            name: of the module.
            source: of the call.
            mask: bound to the shape of the call's matrix.
        """
        stop = visible_stop(mask, source.shape)
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

    def _staying(self, run: Run, source: QueryKey) -> Place | None:
        """The place of a call with the keys of the last one, as in cross-attention."""
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
        """Which entry of the batch one was, by what it had written and by the text that it reads.

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

    def _growing(self, run: Run, source: QueryKey, mask: Mask | None) -> Place | None:
        """The place of a call that begins with keys of the calls before and brings its own."""
        q_len, stop = source.query.shape[-2], visible_stop(mask, source.shape)
        known = stop - q_len
        if known < 1 or run.grows is False:
            return None
        key, base = _at(source.key[..., :known, :], run), run.kv_len - known
        there = run.keys[..., max(base, 0) : run.kv_len, :]
        origins = _origins(_entries(there), _entries(key)) if base >= 0 else None
        if origins is not None and _look_alike(_entries(run.keys[..., : run.kv_len, :]), base):
            origins = _told_by_search(_entries(there), _entries(key))
        if origins is not None:
            self._written = _entries(there), origins
            return Place(True, base, known, stop, order=_changed(origins))
        for taken_back in self._ends_like(run, key):
            base = run.kv_len - known - taken_back
            there = run.keys[..., max(base, 0) : base + known, :]
            if torch.equal(there, key):
                self._written = _entries(there), list(range(len(_entries(key))))
                return Place(True, base, known, stop, taken_back)
        return None

    def _ends_like(self, run: Run, key: Tensor) -> list[int]:
        """How many keys may have been taken back, such that the last one left is the last known.

        Only queries of the last call are taken back, and not all of them: another text that begins
        like an earlier one is another attention.
        """
        if run.last < 2 or not self._take_back or not _in_generate():
            return []
        recent = run.keys[..., max(run.kv_len - run.last, 0) : run.kv_len - 1, :]
        alike = (recent == key[..., -1:, :]).all(-1)
        places = alike.reshape(-1, alike.shape[-1]).all(0).flip(0).nonzero().flatten()
        return [1 + place for place in cast(list[int], places.tolist())]


def extended(
    kept: Tensor, first: int, more: Tensor, empty: Callable[[Sequence[int], Tensor], Tensor]
) -> Tensor:
    """What is kept of each key, with more from a column on; there may be room behind it.

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
    """For each entry of the batch, at the end, which it was when a query ran; None: the same."""
    found: Order | None = None
    for ran, order in reversed(orders):
        if ran <= place:
            break
        found = order if found is None else tuple(order[entry] for entry in found)
    return found


def visible_stop(mask: Mask | None, shape: torch.Size) -> int:
    """One past the last key that the last query may attend to: after it a cache is empty.

    Args:
        mask: bound to the shape; None: all keys.
        shape: of the matrix.
    """
    q_len, kv_len = shape[-2:]
    if mask is None or q_len == kv_len:
        return kv_len
    leading, row = tuple(slice(0, n) for n in shape[:-2]), slice(q_len - 1, q_len)
    some = mask.columns(leading, row, shape).some
    device = mask.tensors[0].device if mask.tensors else torch.device("cpu")
    last = Box(leading, row, slice(max(some.stop - 1, some.start), some.stop))
    if bool(mask.block(last, shape, device).any()):
        return some.stop
    allowed = mask.block(last._replace(columns=some), shape, device)
    seen = allowed.reshape(-1, allowed.shape[-1]).any(0).nonzero()
    return some.start + int(seen[-1]) + 1 if len(seen) else some.start


def _traits(source: QueryKey) -> Hashable:
    """What two calls that are one attention have alike; None: no call can go on from this one."""
    if source.position_bias is not None or source.score_mod is not None:
        return None  # what they add depends on where the call begins
    query, key = source.query, source.key
    outer = (query.shape[:-2], query.shape[-1], key.shape[:-2], key.shape[-1])
    return (outer, query.dtype, query.device, source.scale, source.softcap)


def _in_turn(first: Run, second: Run) -> bool:
    """Whether two runs are heads in a loop on one key: then the first goes on first."""
    return first.time == second.time - 1 and not torch.equal(first.last_query, second.last_query)


def _in_generate() -> bool:
    """Whether transformers' generate runs this: it guesses, and takes back for good.

    Anybody else who takes keys back may have read what he took back, as one who weighs two answers.
    """
    return _frame_of("generate") is not None


def _told_by_search(before: Tensor, now: Tensor) -> list[int] | None:
    """The entries that beams were, as transformers' search moved them; None where nobody knows.

    Asked only where the keys that a cache still has are those of several beams.
    """
    frame = _frame_of("_beam_search")
    order = None if frame is None else frame.f_locals.get("beam_idx")
    if not isinstance(order, Tensor) or order.shape != now.shape[:1]:
        return None
    origins = cast(list[int], order.tolist())
    within = all(0 <= place < len(before) for place in origins)
    at = torch.tensor(origins if within else [], dtype=torch.int64, device=before.device)
    return origins if torch.equal(before.index_select(0, at), now) else None


def _frame_of(function: str) -> FrameType | None:
    """The frame of a function of transformers that runs this; None without one."""
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == function and module.partition(".")[0] == "transformers":
            return frame
        frame = frame.f_back
    return None


def _at(tensor: Tensor, run: Run) -> Tensor:
    """Where the keys of the run are kept."""
    return tensor.to(run.keys.device)


def _entries(tensor: Tensor) -> Tensor:
    """The entries of the batch along the first axis; the only one of a tensor without a batch."""
    return tensor if tensor.ndim > 3 else tensor[None]


def _changed(order: Sequence[int | None]) -> Order | None:
    """The order, where it is not as it was."""
    return None if list(order) == list(range(len(order))) else cast(Order, tuple(order))


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _look_alike(keys: Tensor, base: int) -> bool:
    """Whether two entries of the batch differ only in keys that a cache has dropped.

    Which of the two a beam goes on from the keys cannot tell then.
    """
    if base == 0:
        return False
    return any(
        torch.equal(one[..., base:, :], other[..., base:, :]) and not torch.equal(one, other)
        for one, other in combinations(keys, 2)
    )


def _origins(before: Tensor, now: Tensor) -> list[int] | None:
    """For each entry of the batch the one that had its keys before; None: one is new."""
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
