"""Detection of the calls that form one attention when a layer generates text with a KV cache.

Detection compares keys and values and needs no knowledge of the model or its cache. Of each column
it keeps a digest, a checksum of all bits of a key or of a value. A call continues earlier calls of
the same module if its keys begin with their keys and its values with their values. It then adds its
queries as rows and its new keys as columns. This covers caches that grow, caches that have their
full length from the start, and caches that drop their oldest keys. A call with other keys or values
starts another attention. So the calls of beam search and assisted decoding are not merged, nor
those of two texts whose keys are positions alone.

Calls with exactly the same keys are one attention only if the model generated a token in between,
as in the cross-attention of a decoder. Otherwise they are heads in a loop or unrelated queries.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from regard.masks.checksums import row_checksums
from regard.masks.recognise import FAR, allowed_rows
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.merged_calls import MemoryColumns
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores


@dataclass(frozen=True, eq=False)
class Call:
    """A call, as it is compared with earlier calls of its layer.

    Attributes:
        matrix: its matrix.
        value: (..., num_kv_heads, kv_len, head_dim); None if no value belongs to a key. No call
            can continue such a call.
        query: (..., num_heads, q_len, head_dim), or the weights where they are kept.
        key: (..., num_kv_heads, kv_len, head_dim); of weights the value.
        bias: what is added to scores; None without.
        sink_bias: the logits of a sink; None without.
    """

    matrix: AttentionMatrix
    value: Tensor | None
    query: Tensor
    key: Tensor
    bias: Tensor | None = None
    sink_bias: Tensor | None = None

    @classmethod
    def of(cls, matrix: AttentionMatrix, value: Tensor | None) -> "Call":
        """Return the call that has a matrix and a value."""
        source = matrix.source
        if isinstance(source, QueryKeyScores):
            return cls(matrix, value, source.query, source.key, source.bias, source.sink_bias)
        [weights] = source.tensors
        columns = weights.new_zeros(()).expand(matrix.shape[-1], 1)
        return cls(matrix, value, weights, columns if value is None else value)

    @property
    def q_len(self) -> int:
        return self.matrix.shape[-2]

    @cached_property
    def stop(self) -> int:
        """The number of its keys that are filled; a cache may have room for more."""
        return _visible_stop(self)

    @cached_property
    def all_keys(self) -> Tensor:
        """The digests of all keys, (..., columns, 1)."""
        return self.keys if self.stop == self.key.shape[-2] else _digests(self.key)

    @cached_property
    def keys(self) -> Tensor:
        """The digests of the filled keys, (..., columns, 1)."""
        return _digests(self.key[..., : self.stop, :])

    @cached_property
    def values(self) -> Tensor:
        """The digests of their values, (..., columns, 1).

        They are of the first head, because some models repeat shared heads in some calls alone.
        """
        if self.value is None:
            return torch.zeros(0, 1, dtype=torch.int64, device="cpu")
        some = self.value[..., :1, :, :] if self.value.ndim > 3 else self.value
        return _digests(some[..., : self.stop, :])

    @cached_property
    def traits(self) -> Hashable:
        """The properties that all calls of a run share; None if no call can continue this."""
        query, key, source = self.query, self.key, self.matrix.source
        outer = (query.shape[:-2], key.shape[:-2], key.shape[-1], query.dtype, query.device)
        if not isinstance(source, QueryKeyScores):
            return outer
        if source.position_bias is not None or source.score_mod is not None:
            return None  # both depend on positions, which count from the start of each call
        return (*outer, query.shape[-1], source.scale, source.softcap)


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
        last_queries: the last two queries of the first call, (..., num_heads, 2, head_dim), or
            its only one.
        keys: the digests of the keys, (..., columns, 1); the first kv_len are filled.
        values: the digests of the values, (..., columns, 1).
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
    keys: MemoryColumns
    values: MemoryColumns
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

    def add(self, name: str, call: Call) -> tuple[Run, Join | None]:
        """Add a call, and return its run and its join there; the join of a first call is None."""
        self._clock += 1
        runs = self._runs.setdefault(name, [])
        for run in runs:
            if _is_one_key(run, call) and run.values.equal(0, call.values[..., :1, :]):
                run.traits, run.keys = call.traits, MemoryColumns(call.keys[..., :1, :])
        continued = self._continued(name, runs, call)
        if continued is None:
            run = self._begin(name, runs, call)
            run.reach = _reach(call)
            return run, None
        run, join = continued
        run.reach = max(run.reach, join.base + _reach(call))
        run.time, run.grows = self._clock, join.shared < join.stop
        run.parts += 1
        run.is_even = run.is_even and run.last == run.size >= call.q_len
        run.last = call.q_len
        run.q_len += call.q_len
        if run.grows:
            self._grew = self._clock
            first, run.kv_len = join.base + join.shared, join.base + join.stop
            run.keys.append(first, call.keys[..., join.shared :, :])
            run.values.append(first, call.values[..., join.shared :, :])
        return run, join

    def _begin(self, name: str, runs: list[Run], call: Call) -> Run:
        went_back = _shares_an_end(runs, call)
        if went_back:
            self.broken[name] = None
        if runs and runs[-1].time >= self._last_restart:
            self._last_restart = self._clock
        run = Run(
            traits=None if call.value is None else call.traits,
            sink_bias=None if call.sink_bias is None else call.sink_bias.clone(),
            last_queries=call.query[..., -2:, :].clone(),
            keys=MemoryColumns(call.all_keys),
            values=MemoryColumns(call.values),
            kv_len=call.stop,
            q_len=call.q_len,
            before=call.stop - call.q_len,
            size=call.q_len,
            last=call.q_len,
            time=self._clock,
            grows=True if went_back else None,
        )
        runs.append(run)
        return run

    def _continued(self, name: str, runs: Sequence[Run], call: Call) -> tuple[Run, Join] | None:
        """Return the only run that a call continues; None if there is none or several."""
        joins = list[tuple[Run, Join]]()
        for run in runs if call.traits is not None else ():
            if run.traits == call.traits and _same(run.sink_bias, call.sink_bias):
                join = self._with_same_keys(run, call) or _with_more_keys(run, call)
                if join is not None and run.values.equal(
                    join.base, call.values[..., : join.shared, :]
                ):
                    joins.append((run, join))
        if len(joins) > 1 or any(_has_equal_entries(*each, call) for each in joins):
            self.broken[name] = None  # heads with a shared key, or beams
            return None
        return joins[0] if joins else None

    def _with_same_keys(self, run: Run, call: Call) -> Join | None:
        """Return the join of a call with the same keys as the run, as in cross-attention.

        The result is None for any other call.
        """
        kv_len = call.key.shape[-2]
        if run.grows or kv_len != run.keys.length:
            return None
        if run.time < self._last_restart or run.time > self._grew:
            return None
        if call.q_len == kv_len and _asks_again(run, call):
            return None  # the same text ran twice
        return Join(0, kv_len, kv_len) if run.keys.equal(0, call.all_keys) else None


def _is_one_key(run: Run, call: Call) -> bool:
    """Return True if a run had one key, and a call with weights may continue it.

    Any scores give one key the weight 1, so query and key explain such a call of every layer.
    """
    is_one = run.parts == run.kv_len == run.keys.length == 1 and run.sink_bias is None
    has_weights = isinstance(call.matrix.source, GivenScores)
    follows = has_weights and call.stop - call.q_len == 1
    traits = cast("tuple[object, ...] | None", run.traits)
    return is_one and follows and traits is not None and traits[0] == call.query.shape[:-2]


def _visible_stop(call: Call) -> int:
    """Return the number of keys up to the last one that the last query may attend to.

    A cache is empty after that key. If the last query may attend to no key, all keys count.
    """
    shape, mask, bias = call.matrix.shape, call.matrix.mask, call.bias
    q_len, kv_len = shape[-2:]
    if (mask is None and bias is None) or q_len == kv_len:
        return kv_len
    tensors = () if mask is None else mask.tensors
    tensors = tensors if bias is None else (bias, *tensors)
    # A mask without tensors is computed on the CPU, which needs no synchronisation.
    device = tensors[0].device if tensors else torch.device("cpu")
    visible = allowed_rows(mask, slice(q_len - 1, q_len), shape, device)
    if bias is not None:
        visible = visible & (bias[..., -1:, :] > FAR)  # a very low bias hides a key
    keys = visible.flatten(0, -2).any(0).nonzero()
    return int(keys[-1]) + 1 if len(keys) else kv_len


def _reach(call: Call) -> int:
    """Return the number of keys that rows attend to, of which ``call.stop`` are filled.

    A row of padding whose bias is equally low everywhere attends to all keys equally.
    """
    shape, bias, stop = call.matrix.shape, call.bias, call.stop
    if stop == shape[-1]:
        return stop
    device = call.query.device
    spills = allowed_rows(call.matrix.mask, slice(0, shape[-2]), shape, device)[..., stop:]
    if bias is not None:
        beyond = bias if bias.shape[-1] == 1 else bias[..., stop:]
        equally_low = (beyond > -torch.inf) & (beyond >= bias.amax(-1, keepdim=True))
        spills = spills & ((beyond > FAR) | equally_low)
    return shape[-1] if bool(spills.any()) else stop


def _with_more_keys(run: Run, call: Call) -> Join | None:
    """Return the join of a call whose keys begin with the keys of the run; None otherwise."""
    shared = call.stop - call.q_len
    base = run.kv_len - shared
    if shared < 1 or base < 0 or run.grows is False or _asks_more_keys(run, call):
        return None
    is_equal = run.keys.equal(base, call.keys[..., :shared, :])
    return Join(base, shared, call.stop) if is_equal else None


def _asks_again(run: Run, call: Call) -> bool:
    """Return True if a call ends with the same queries as the first call of a run."""
    return torch.equal(run.last_queries, call.query[..., -2:, :])


def _asks_more_keys(run: Run, call: Call) -> bool:
    """Return True for learned queries that attend to more and more tokens."""
    return call.stop > run.kv_len and call.q_len > 1 and _asks_again(run, call)


def _digests(columns: Tensor) -> Tensor:
    """Return the digest of each column, (..., columns, 1), of keys (..., heads, columns, dim)."""
    heads = columns.movedim(-3, -2).flatten(-2) if columns.ndim > 2 else columns
    return row_checksums(heads)[..., None]


def _shares_an_end(runs: Sequence[Run], call: Call) -> bool:
    """Return True if an earlier run contains the first or the last key, with its value.

    So it is with beams, a shortened cache, and a ring whose slots are used again.

    The result is False for other queries with exactly the same keys, as in cross-attention. It is
    True if their last query is the same as well: the model ran the end of the text again.
    """
    if call.stop <= call.q_len:
        return False
    for run in runs:
        if run.traits != call.traits or not (run.grows or (run.grows is None and not run.before)):
            continue
        if _asks_more_keys(run, call):
            continue
        earlier, values = (each.read(0, run.kv_len) for each in (run.keys, run.values))
        same = earlier == call.keys[..., [0, -1], :].mT
        if not bool((same & (values == call.values[..., [0, -1], :].mT)).any()):
            continue
        if run.grows or _asks_again(run, call) or not torch.equal(earlier, call.keys):
            return True
    return False


def _has_equal_entries(run: Run, join: Join, call: Call) -> bool:
    """Return True if two batch entries have equal keys in a call.

    A beam could then continue either of them.
    """
    compares = join.base > 0 or join.shared == join.stop
    if call.key.ndim < 4 or call.key.shape[0] == 1 or not compares:
        return False
    keys = run.keys.read(0, run.kv_len)
    if join.shared == join.stop:
        return any(torch.equal(one, other) for one, other in pairwise(keys))
    visible = keys[..., join.base :, :]
    return any(
        torch.equal(visible[a], visible[b]) and not torch.equal(keys[a], keys[b])
        for a, b in combinations(range(len(keys)), 2)
    )


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
