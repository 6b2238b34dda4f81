"""Detection of the calls that form one attention when a layer generates text with a KV cache.

Detection compares keys and values and needs no knowledge of the model or its cache. A call
continues earlier calls of the same module if its keys begin with their keys and its values with
their values. It then adds its queries as rows and its new keys as columns. This covers caches that
grow, caches that have their full length from the start, and caches that drop their oldest keys. A
call with other keys or values starts another attention. So the calls of beam search and assisted
decoding are not merged, nor those of two texts whose keys are positions alone.

A value is compared by a digest of each of its columns in the first head.

Calls with exactly the same keys are one attention only if the model generated a token in between,
as in the cross-attention of a decoder. Otherwise they are heads in a loop or unrelated queries.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from regard.masks import Mask
from regard.masks.recognise import FAR, allowed_rows
from regard.recording.merged_calls import Columns
from regard.scores.query_key import QueryKeyScores


@dataclass(frozen=True, eq=False)
class WeightCall:
    """A call of which the weights are kept: its rows are the weights, its columns the value.

    Attributes:
        query: the weights, (..., num_heads, q_len, kv_len).
        key: the value, (..., num_kv_heads, kv_len, head_dim).
    """

    query: Tensor
    key: Tensor
    bias: None = None
    sink_bias: None = None

    @property
    def shape(self) -> torch.Size:
        return self.query.shape

    @property
    def device(self) -> torch.device:
        return self.query.device


Call: TypeAlias = QueryKeyScores | WeightCall
"""A call, as it is compared with earlier calls of its layer."""


class Join(NamedTuple):
    """The columns at which a call continues earlier calls.

    Attributes:
        base: the column of its first key.
        shared: the number of its first keys that earlier calls had already.
        stop: the number of its keys that are filled; a cache may have room for more.
    """

    base: int
    shared: int
    stop: int


@dataclass(eq=False)
class Run:
    """The calls of one layer so far that form one attention.

    Attributes:
        traits: the properties that all calls share; None if no call can continue the run.
        digests: those of the values of the keys, (..., columns, 1).
        last_queries: the last two queries of the first call, (..., num_heads, 2, head_dim), or
            its only one.
        keys: the keys, (..., num_kv_heads, columns, head_dim); the first kv_len are filled.
        before: the number of keys before the queries of the first call.
        time: the time of the last call, counted in calls of all layers.
        parts: the number of calls.
        grows: True if calls add keys; None if unknown, because there is only one call.
        reach: the number of keys that rows attend to, with those that no call has filled yet.
        size: the number of queries of the first call.
        last: the number of queries of the last call.
        is_even: True if the calls are parts of one text of the same size, and a rest.
    """

    traits: Hashable
    sink_bias: Tensor | None
    last_queries: Tensor
    keys: Columns
    digests: Columns
    kv_len: int
    q_len: int
    before: int
    time: int
    parts: int = 1
    grows: bool | None = None
    reach: int = 0
    size: int = 0
    last: int = 0
    is_even: bool = True

    @property
    def start(self) -> int:
        """Return the position of the first query among the keys.

        It is 0 if queries and keys are different tokens.
        """
        return self.before if self.grows else 0


class LastColumn:
    """The last key of the calls of a layer that is not recorded.

    It shows whether a call continues the others, in memory that does not grow with the text.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.length = tensor.shape[-2]
        self._last = tensor[..., -1:, :].clone()

    def append(self, first: int, more: Tensor) -> None:
        self.length = first + more.shape[-2]
        self._last = more[..., -1:, :].clone()

    def equal(self, start: int, other: Tensor) -> bool:
        ends_here = start + other.shape[-2] == self.length
        return ends_here and torch.equal(self._last, other[..., -1:, :])

    def read(self, start: int, stop: int) -> Tensor:
        """Return no columns, because none but the last is known."""
        return self._last[..., :0, :]


class Runs:
    """The calls of each module, grouped into runs.

    ``broken`` has the modules with a call that continued no run although an earlier run
    contains its first key.
    """

    def __init__(self) -> None:
        self.broken: dict[str, None] = {}
        self._runs: dict[str, list[Run]] = {}
        self._clock = 0
        self._last_restart = 0  # the time of the last call that did not continue its module's run
        self._grew = 0  # the time of the last call that added keys to a run

    @property
    def guessed(self) -> list[str]:
        """The modules whose last call added several keys, as assisted decoding does.

        It reads guessed tokens, of which it takes back those that the model does not write. The
        parts of a prompt have one size, except the last one.
        """

        def may_be_guesses(run: Run) -> bool:
            return bool(run.grows) and run.last > 1 and not run.is_even

        return [name for name, runs in self._runs.items() if any(map(may_be_guesses, runs))]

    def follow(self, name: str, source: Call, mask: Mask | None, value: Tensor | None) -> None:
        """Add a call of a layer that is not recorded, which tells what other layers continue."""
        key = source.key[..., : visible_stop(source, mask), :]
        value = None if value is None else value[..., : key.shape[-2], :]
        key = key[..., :1, :, :] if key.ndim > 2 else key
        self.add(name, replace(source, key=key, bias=None), None, value, LastColumn)

    def add(
        self,
        name: str,
        source: Call,
        mask: Mask | None,
        value: Tensor | None,
        columns: Callable[[Tensor], Columns],
    ) -> tuple[Run, Join | None]:
        """Add a call, and return its run and its join there; the join of a first call is None.

        ``value`` is None if no value belongs to a key; no call can continue such a call.
        ``columns`` keeps the keys of a first call and the digests of its value.
        """
        self._clock += 1
        runs, stop = self._runs.setdefault(name, []), visible_stop(source, mask)
        for run in runs:
            if _is_one_key(run, source, stop) and run.digests.equal(0, _digests(value, 0, 1)):
                run.traits, run.keys = _traits(source), columns(source.key[..., :1, :])
        continued = self._continued(name, runs, source, value, stop)
        if continued is None:
            kept = columns(source.key), columns(_digests(value))
            run = self._begin(name, runs, source, value, stop, *kept)
            run.reach = _reach(source, mask, stop)
            return run, None
        run, join = continued
        run.reach = max(run.reach, join.base + _reach(source, mask, stop))
        run.time, run.grows = self._clock, join.shared < join.stop
        run.parts += 1
        run.is_even = run.is_even and run.last == run.size >= source.query.shape[-2]
        run.last = source.query.shape[-2]
        run.q_len += source.query.shape[-2]
        if run.grows:
            self._grew = self._clock
            first, run.kv_len = join.base + join.shared, join.base + join.stop
            run.keys.append(first, source.key[..., join.shared : join.stop, :])
            run.digests.append(first, _digests(value, join.shared, join.stop))
        return run, join

    def _begin(
        self,
        name: str,
        runs: list[Run],
        source: Call,
        value: Tensor | None,
        stop: int,
        keys: Columns,
        digests: Columns,
    ) -> Run:
        q_len = source.query.shape[-2]
        went_back = _shares_an_end(runs, source, value, stop)
        if went_back:
            self.broken[name] = None
        if runs and runs[-1].time >= self._last_restart:
            self._last_restart = self._clock
        run = Run(
            traits=None if value is None else _traits(source),
            sink_bias=None if source.sink_bias is None else source.sink_bias.clone(),
            last_queries=source.query[..., -2:, :].clone(),
            keys=keys,
            digests=digests,
            kv_len=stop,
            q_len=q_len,
            before=stop - q_len,
            size=q_len,
            last=q_len,
            time=self._clock,
            grows=True if went_back else None,
        )
        runs.append(run)
        return run

    def _continued(
        self, name: str, runs: Sequence[Run], source: Call, value: Tensor | None, stop: int
    ) -> tuple[Run, Join] | None:
        """Return the only run that a call continues; None if there is none or several."""
        traits, joins = _traits(source), list[tuple[Run, Join]]()
        for run in runs if traits is not None else ():
            if run.traits == traits and _same(run.sink_bias, source.sink_bias):
                join = self._with_same_keys(run, source) or _with_more_keys(run, source, stop)
                if join is not None and run.digests.equal(
                    join.base, _digests(value, 0, join.shared)
                ):
                    joins.append((run, join))
        if len(joins) > 1 or any(_has_equal_entries(*each, source) for each in joins):
            self.broken[name] = None  # heads with a shared key, or beams
            return None
        return joins[0] if joins else None

    def _with_same_keys(self, run: Run, source: Call) -> Join | None:
        """Return the join of a call with the same keys as the run, as in cross-attention.

        The result is None for any other call.
        """
        kv_len, q_len = source.key.shape[-2], source.query.shape[-2]
        if run.grows or kv_len != run.keys.length:
            return None
        if run.time < self._last_restart or run.time > self._grew:
            return None
        if q_len == kv_len and _asks_again(run, source):
            return None  # the same text ran twice
        return Join(0, kv_len, kv_len) if run.keys.equal(0, source.key) else None


def _is_one_key(run: Run, source: Call, stop: int) -> bool:
    """Return True if a run had one key, and a call with weights may continue it.

    Any scores give one key the weight 1, so query and key explain such a call of every layer.
    """
    is_one = run.parts == run.kv_len == run.keys.length == 1 and run.sink_bias is None
    follows = isinstance(source, WeightCall) and stop - source.query.shape[-2] == 1
    traits = cast("tuple[object, ...] | None", run.traits)
    return is_one and follows and traits is not None and traits[0] == source.query.shape[:-2]


def visible_stop(source: Call, mask: Mask | None) -> int:
    """Return the number of keys up to the last one that the last query may attend to.

    A cache is empty after that key. If the last query may attend to no key, all keys count.
    """
    shape = source.shape
    q_len, kv_len = shape[-2:]
    if (mask is None and source.bias is None) or q_len == kv_len:
        return kv_len
    tensors = () if mask is None else mask.tensors
    tensors = tensors if source.bias is None else (source.bias, *tensors)
    # A mask without tensors is computed on the CPU, which needs no synchronisation.
    device = tensors[0].device if tensors else torch.device("cpu")
    visible = allowed_rows(mask, slice(q_len - 1, q_len), shape, device)
    if source.bias is not None:
        visible = visible & (source.bias[..., -1:, :] > FAR)  # a very low bias hides a key
    keys = visible.flatten(0, -2).any(0).nonzero()
    return int(keys[-1]) + 1 if len(keys) else kv_len


def _reach(source: Call, mask: Mask | None, stop: int) -> int:
    """Return the number of keys that rows attend to, of which ``stop`` are filled.

    A row of padding whose bias is equally low everywhere attends to all keys equally.
    """
    shape, bias = source.shape, source.bias
    if stop == shape[-1]:
        return stop
    spills = allowed_rows(mask, slice(0, shape[-2]), shape, source.device)[..., stop:]
    if bias is not None:
        beyond = bias if bias.shape[-1] == 1 else bias[..., stop:]
        equally_low = (beyond > -torch.inf) & (beyond >= bias.amax(-1, keepdim=True))
        spills = spills & ((beyond > FAR) | equally_low)
    return shape[-1] if bool(spills.any()) else stop


def _with_more_keys(run: Run, source: Call, stop: int) -> Join | None:
    """Return the join of a call whose keys begin with the keys of the run; None otherwise."""
    shared = stop - source.query.shape[-2]
    base = run.kv_len - shared
    if shared < 1 or base < 0 or run.grows is False:
        return None
    if _asks_more_keys(run, source, stop):
        return None
    return Join(base, shared, stop) if run.keys.equal(base, source.key[..., :shared, :]) else None


def _asks_again(run: Run, source: Call) -> bool:
    """Return True if a call ends with the same queries as the first call of a run."""
    return torch.equal(run.last_queries, source.query[..., -2:, :])


def _asks_more_keys(run: Run, source: Call, stop: int) -> bool:
    """Return True for learned queries that attend to more and more tokens."""
    return stop > run.kv_len and source.query.shape[-2] > 1 and _asks_again(run, source)


def _traits(source: Call) -> Hashable:
    """Return the properties that all calls of a run share; None if no call can continue this."""
    query, key = source.query, source.key
    outer = (query.shape[:-2], key.shape[:-2], key.shape[-1], query.dtype, query.device)
    if isinstance(source, WeightCall):
        return outer
    if source.position_bias is not None or source.score_mod is not None:
        return None  # both depend on positions, which count from the start of each call
    return (*outer, query.shape[-1], source.scale, source.softcap)


def _digests(value: Tensor | None, start: int = 0, stop: int | None = None) -> Tensor:
    """Return a whole number for each column of a value, (..., columns, 1), from all its bits.

    It is of the first head, because some models repeat shared heads in some calls alone.
    """
    if value is None:
        return torch.zeros(0, 1, dtype=torch.int32, device="cpu")
    some = value[..., :1, :, :] if value.ndim > 3 else value
    columns = some.detach()[..., start:stop, :]
    bits = columns.view(_BITS[value.element_size()]).long()
    factors = torch.arange(1, 2 * bits.shape[-1], 2, device=bits.device)  # odd ones lose no bit
    digests = (bits * factors).sum(-1, keepdim=True)
    return (digests ^ digests >> 32).int()


def _shares_an_end(runs: Sequence[Run], source: Call, value: Tensor | None, stop: int) -> bool:
    """Return True if an earlier run contains the first or the last key, with its value.

    So it is with beams, a shortened cache, and a ring whose slots are used again.

    The result is False for other queries with exactly the same keys, as in cross-attention. It is
    True if their last query is the same as well: the model ran the end of the text again.
    """
    if stop <= source.query.shape[-2]:
        return False
    traits = _traits(source)
    for run in runs:
        if run.traits != traits or not (run.grows or (run.grows is None and not run.before)):
            continue
        if _asks_more_keys(run, source, stop):
            continue
        earlier = run.keys.read(0, run.kv_len)
        key = source.key[..., :stop, :].to(earlier.device)
        ends, there = _of_first_head(key[..., [0, -1], :]), _of_first_head(earlier)
        same = (there[:, :, None] == ends[:, None]).all(-1)
        digests = _of_first_head(run.digests.read(0, run.kv_len))
        ends = _of_first_head(_digests(value, 0, stop)[..., [0, -1], :]).to(digests.device)
        if not bool((same & (digests[:, :, None] == ends[:, None]).all(-1).to(same.device)).any()):
            continue
        if run.grows or _asks_again(run, source) or not torch.equal(earlier, key):
            return True
    return False


def _has_equal_entries(run: Run, join: Join, source: Call) -> bool:
    """Return True if two batch entries have equal keys in a call.

    A beam could then continue either of them.
    """
    compares = join.base > 0 or join.shared == join.stop
    if source.key.ndim < 4 or source.key.shape[0] == 1 or not compares:
        return False
    keys = run.keys.read(0, run.kv_len)
    if not keys.shape[-2]:
        return False  # a LastColumn
    if join.shared == join.stop:
        return any(torch.equal(one, other) for one, other in pairwise(keys))
    visible = keys[..., join.base :, :]
    return any(
        torch.equal(visible[a], visible[b]) and not torch.equal(keys[a], keys[b])
        for a, b in combinations(range(len(keys)), 2)
    )


def _of_first_head(keys: Tensor) -> Tensor:
    """Return the keys of the first head, (batch, kv_len, head_dim)."""
    while keys.ndim < 4:
        keys = keys[None]
    return keys.flatten(0, -4)[:, 0]


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes of whole numbers, by their size in bytes."""
