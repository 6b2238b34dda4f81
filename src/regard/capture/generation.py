"""Detection of the calls of a layer with a KV cache that are one attention, prompt and answer.

Nothing is asked of the model or its cache. A call continues earlier calls of the same module if its
keys begin with theirs: it then adds its queries as rows and its new keys as columns. This covers
caches that grow, that have their full length from the start, and that drop their oldest keys. A
call whose keys differ begins another attention. So beams and assisted decoding stay in pieces.

Calls that share all their keys are one attention only if the model wrote a token in between, as a
decoder does between two looks at its other text. Otherwise they are heads in a loop or other
queries.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from regard.capture.tensor_copies import TensorCopies
from regard.masks import Mask
from regard.masks.recognise import FAR
from regard.scores.box import Box
from regard.scores.query_key import QueryKeyScores

__all__ = ["Place", "Run", "Runs", "extended"]


class Place(NamedTuple):
    """The place at which a call continues earlier calls.

    Attributes:
        base: the column of its first key.
        known: the number of its first keys that are known already.
        stop: the number of its keys that count; a cache may have room for more.
    """

    base: int
    known: int
    stop: int


@dataclass(eq=False)
class Run:
    """The calls of one layer that are one attention, so far.

    Attributes:
        traits: what all its calls have in common; None: no call can continue it.
        sink_bias: of all its calls.
        last_query: of the first call, (..., num_heads, 1, head_dim).
        keys: (..., num_kv_heads, room, head_dim), of which the first kv_len are filled.
        kv_len: the number of keys.
        q_len: the number of queries that ran.
        before: the number of keys before the queries of the first call.
        time: of the last call, on the clock of all layers.
        parts: the number of calls.
        grows: True if calls add keys; None: not known from one call.
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

    @property
    def start(self) -> int:
        """Return the place of its first query among its keys; 0 if they are other tokens."""
        return self.before if self.grows else 0


class Runs:
    """Finds the calls that are one attention.

    Attributes:
        fell_apart: the modules with a call that continued no run, although its first key is one
            of an earlier run.
    """

    def __init__(self) -> None:
        self.fell_apart: dict[str, None] = {}
        self._runs: dict[str, list[Run]] = {}
        self._clock = 0
        self._began_again = 0  # when a layer last did not continue its earlier calls
        self._grew = 0  # when a layer last continued with new keys

    def take(
        self, name: str, source: QueryKeyScores, mask: Mask | None, copies: TensorCopies
    ) -> tuple[Run, Place | None]:
        """Return the run that a call belongs to, and its place there; None: it is the first.

        Args:
            name: of the module.
            source: of the call.
            mask: bound to the shape of the call's matrix.
            copies: makes the copies of its keys.
        """
        self._clock += 1
        runs, stop = self._runs.setdefault(name, []), visible_stop(source, mask)
        found = self._found(name, runs, source, stop)
        if found is None:
            return self._begin(name, runs, source, stop, copies), None
        run, place = found
        run.time, run.grows = self._clock, place.known < place.stop
        run.parts += 1
        run.q_len += source.query.shape[-2]
        if run.grows:
            self._grew = self._clock
            first, run.kv_len = place.base + place.known, place.base + place.stop
            more = source.key[..., place.known : place.stop, :]
            run.keys = extended(run.keys, first, more, copies.empty)
        return run, place

    def _begin(
        self,
        name: str,
        runs: list[Run],
        source: QueryKeyScores,
        stop: int,
        copies: TensorCopies,
    ) -> Run:
        q_len = source.query.shape[-2]
        went_back = _has_first_key(runs, source, stop)
        if went_back:
            self.fell_apart[name] = None
        if runs and runs[-1].time >= self._began_again:
            self._began_again = self._clock
        run = Run(
            traits=_traits(source),
            sink_bias=None if source.sink_bias is None else source.sink_bias.clone(),
            last_query=source.query[..., -1:, :].clone(),
            keys=copies.copy(source.key),
            kv_len=stop,
            q_len=q_len,
            before=stop - q_len,
            time=self._clock,
            grows=True if went_back else None,
        )
        runs.append(run)
        return run

    def _found(
        self, name: str, runs: Sequence[Run], source: QueryKeyScores, stop: int
    ) -> tuple[Run, Place] | None:
        """Return the one run that a call continues; None: there is none, or there are several."""
        traits, found = _traits(source), list[tuple[Run, Place]]()
        for run in runs if traits is not None else ():
            if run.traits == traits and _same(run.sink_bias, source.sink_bias):
                place = self._staying(run, source) or _growing(run, source, stop)
                if place is not None:
                    found.append((run, place))
        if len(found) > 1 or any(_has_alike(run, place) for run, place in found):
            self.fell_apart[name] = None  # heads that share a key, or beams
            return None
        return found[0] if found else None

    def _staying(self, run: Run, source: QueryKeyScores) -> Place | None:
        """Return the place of a call with the keys of the last call, as in cross-attention."""
        kv_len, q_len = source.key.shape[-2], source.query.shape[-2]
        if run.grows or kv_len != run.keys.shape[-2]:
            return None
        if run.time < self._began_again or run.time > self._grew:
            return None
        if q_len == kv_len and torch.equal(run.last_query, source.query[..., -1:, :]):
            return None  # one text, read twice
        return Place(0, kv_len, kv_len) if torch.equal(run.keys, _at(source.key, run)) else None


def extended(
    kept: Tensor, first: int, more: Tensor, empty: Callable[[Sequence[int], Tensor], Tensor]
) -> Tensor:
    """Return what is kept of each key, with more from a column on; there may be room behind it.

    Args:
        kept: (..., num_kv_heads, room, dim).
        first: the column.
        more: (..., num_kv_heads, columns, dim).
        empty: returns room of a shape, of the dtype of a tensor.
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


def visible_stop(source: QueryKeyScores, mask: Mask | None) -> int:
    """Return one past the last key that the last query may attend to: after it a cache is empty.

    All keys count if the last query may attend to none.

    Args:
        source: of the scores.
        mask: bound to their shape; None: all keys.
    """
    shape = source.shape
    q_len, kv_len = shape[-2:]
    if (mask is None and source.bias is None) or q_len == kv_len:
        return kv_len
    leading, row = tuple(slice(0, n) for n in shape[:-2]), slice(q_len - 1, q_len)
    some = slice(0, kv_len) if mask is None else mask.key_bounds(leading, row, shape).any
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


def _growing(run: Run, source: QueryKeyScores, stop: int) -> Place | None:
    """Return the place of a call whose keys begin with those of the calls before."""
    known = stop - source.query.shape[-2]
    base = run.kv_len - known
    if known < 1 or base < 0 or run.grows is False:
        return None
    there, key = run.keys[..., base : run.kv_len, :], _at(source.key[..., :known, :], run)
    return Place(base, known, stop) if torch.equal(there, key) else None


def _traits(source: QueryKeyScores) -> Hashable:
    """Return what the calls of one attention have in common; None: no call can continue this."""
    if source.position_bias is not None or source.score_mod is not None:
        return None  # what they add depends on where the call begins
    query, key = source.query, source.key
    outer = (query.shape[:-2], query.shape[-1], key.shape[:-2], key.shape[-1])
    return (outer, query.dtype, query.device, source.scale, source.softcap)


def _has_first_key(runs: Sequence[Run], source: QueryKeyScores, stop: int) -> bool:
    """Return True if an earlier text has the first key: beams, or a cache that was cut back.

    Other queries that read the very same keys are cross-attention, unless the last query is the
    same: that is the end of the text, read again.
    """
    if stop <= source.query.shape[-2]:
        return False
    traits = _traits(source)
    for run in runs:
        if run.traits != traits or not (run.grows or (run.grows is None and not run.before)):
            continue
        key, known = _at(source.key[..., :stop, :], run), run.keys[..., : run.kv_len, :]
        first, there = _of_first_head(key[..., :1, :]), _of_first_head(known)
        if not bool((there == first[:, None]).all(-1).any()):
            continue
        reads_again = torch.equal(run.last_query, source.query[..., -1:, :])
        if run.grows or reads_again or not torch.equal(known, key):
            return True
    return False


def _has_alike(run: Run, place: Place) -> bool:
    """Return True if two texts of the batch cannot be told apart by the keys that a call has.

    Then nobody knows which of the two a beam continues.
    """
    keys = run.keys[..., : run.kv_len, :]
    if keys.ndim < 4:
        return False
    if place.known == place.stop:
        return any(torch.equal(one, other) for one, other in pairwise(keys))
    seen = keys[..., place.base :, :]
    return place.base > 0 and any(
        torch.equal(seen[one], seen[other]) and not torch.equal(keys[one], keys[other])
        for one, other in combinations(range(len(keys)), 2)
    )


def _of_first_head(keys: Tensor) -> Tensor:
    """Return the keys of one head, (batch, kv_len, head_dim)."""
    while keys.ndim < 4:
        keys = keys[None]
    return keys.flatten(0, -4)[:, 0]


def _at(tensor: Tensor, run: Run) -> Tensor:
    """Return where the keys of the run are kept."""
    return tensor.to(run.keys.device)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
