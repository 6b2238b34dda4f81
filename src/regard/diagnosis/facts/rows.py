"""One attention of a run by sample, head and token, whatever axes the code has."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.diagnosis.facts.origins import Numbers, Sizes
from regard.diagnosis.facts.paths import Path, path_to
from regard.diagnosis.facts.trace import Attention, Trace

__all__ = ["Rows", "Unread", "rows_of"]


class Unread(Exception):
    """A stage of an attention that could not be read.

    Args:
        stage: "projection", "scores", "mask", "softmax", "product", "merge" or "output".
        reason: in one sentence.
        line: the ``file:line``; "" if it is unknown.
    """

    def __init__(self, stage: str, reason: str, line: str = "") -> None:
        super().__init__(reason)
        self.stage, self.line = stage, line


@dataclass(frozen=True, eq=False)
class Rows:
    """The numbers of one attention, in float64.

    Attributes:
        module: the name of its module.
        lines: the ``file:line`` of its stages.
        query: (samples, heads, q_len, head_dim).
        key: (samples, heads, kv_len, head_dim), that of each head of queries.
        value: (samples, heads, kv_len, columns).
        weights: (samples, heads, q_len, kv_len).
        head_map: the number of the key head of each head.
        value_map: the number of the value head of each head.
        crosses: queries and keys are projected from other tensors.
        inputs: the names of what query, key and value are projected from; "" for no input.
        paths: the ways to query, key and value.
        attentions: of the run, that it consists of.
    """

    module: str
    lines: dict[str, str]
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    head_map: tuple[int, ...]
    paths: tuple[Path, Path, Path]
    value_map: tuple[int, ...] = ()
    crosses: bool = False
    inputs: tuple[str, str, str] = ("", "", "")
    attentions: tuple[Attention, ...] = ()


@dataclass(frozen=True, eq=False)
class _Side:
    """Queries, keys or values.

    Attributes:
        path: the way to them.
        sample: of each row, (leading, rows).
        token: likewise.
        columns: the source and the columns of each row's numbers there, hashable, by [lead][row].
        numbers: (leading, rows, columns).
    """

    path: Path
    sample: Tensor
    token: Tensor
    columns: list[list[tuple[object, ...]]]
    numbers: Tensor


@dataclass(frozen=True, eq=False)
class _Record:
    """One attention of a run, with what is known of its rows and keys."""

    attention: Attention
    query: _Side
    key: _Side
    value: _Side
    weights: Tensor  # (leading, rows, keys)


def rows_of(trace: Trace, numbers: Numbers, sizes: Sizes) -> list[Rows | Unread]:
    """Return the attentions of a run; pieces of one attention are put together."""
    found: list[Rows | Unread] = []
    groups: dict[tuple[object, ...], list[_Record]] = {}
    around: dict[tuple[object, ...], dict[str, Any]] = {}
    for attention in trace.attentions:
        try:
            record = _record(attention, numbers, sizes)
        except Unread as error:
            error.line = error.line or attention.lines.get("softmax", "")
            found.append(error)
            continue
        inputs = _inputs(record.query.path, numbers)
        lines = attention.lines
        at = (lines.get("value") or lines.get("softmax") or attention.at, inputs)
        groups.setdefault(at, []).append(record)
        paths = (record.query.path, record.key.path, record.value.path)
        query, key, value = (_inputs(path, numbers) for path in paths)
        names = (_name_of(query), _name_of(key), _name_of(value))
        around[at] = {"crosses": query != key, "inputs": names}
    for at, records in groups.items():
        try:
            found.append(replace(_together(records, sizes), **around[at]))
        except Unread as error:
            error.line = error.line or records[0].attention.lines.get("softmax", "")
            found.append(error)
    return found


def _inputs(path: Path, numbers: Numbers) -> object:
    """Return what the projections of pieces of one attention have in common: what they project."""
    if isinstance(path.source, str):
        return path.source
    given = [t for t in numbers.steps[path.source].inputs if t.is_floating_point() and t.numel()]
    origins = [numbers.origin(t, before=path.source) for t in given]
    own = [o for o in origins if o is not None and (o.at < 0 or numbers.steps[o.at].depends)]
    return tuple((o.at, o.name) for o in own) or path.source


def _name_of(inputs: object) -> str:
    """Return the name of the one input that is projected; "" for several or none."""
    if isinstance(inputs, str):
        return inputs
    own = cast("tuple[tuple[int, str], ...]", inputs) if isinstance(inputs, tuple) else ()
    return own[0][1] if len(own) == 1 else ""


def _record(attention: Attention, numbers: Numbers, sizes: Sizes) -> _Record:
    if attention.value is None:
        raise Unread("product", "each query has a value of its own")
    weights = attention.weights
    lead = tuple(weights.shape[:-2])
    known = attention.query is not None and attention.key is not None
    query, key = attention.query, attention.key
    if not known:
        query, key = _factors(attention, numbers)
    assert query is not None
    assert key is not None
    value = attention.value
    q = _side(_over(query, lead), "query", numbers, sizes, attention.at)
    try:
        k, v = (
            _side(_over(t, lead), name, numbers, sizes, attention.at)
            for name, t in (("key", key), ("value", value))
        )
    except Unread:
        # Places of a cache that nothing was written to are no tokens.
        seen = (weights != 0).flatten(0, -2).any(0)
        if bool(seen.all()):
            raise
        weights = weights[..., seen]
        k, v = (
            _side(_over(t[..., seen, :], lead), name, numbers, sizes, attention.at)
            for name, t in (("key", key), ("value", value))
        )
    if not torch.equal(k.token, v.token) or not torch.equal(k.sample, v.sample):
        raise Unread("product", "keys and values stand in another order")
    if bool((q.sample[:, :, None] != k.sample[:, None, :]).any()):
        raise Unread("product", "queries of one sample meet keys of another one")
    return _Record(attention, q, k, v, weights.reshape(-1, *weights.shape[-2:]).double())


def _over(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Return a tensor with the leading axes of the weights."""
    if tensor.ndim > 2 and lead and tensor.shape[-3] not in (1, lead[-1]):
        tensor = tensor.repeat_interleave(lead[-1] // tensor.shape[-3], -3)
    return tensor.expand(*lead, *tensor.shape[-2:])


def _factors(attention: Attention, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Return query and key, with the weights' leading axes, of weights in axes of their own.

    The softmax, and all between it and the product of query and key, work on each element alone,
    so a tensor of the softmax's shape that holds the product's numbers tells which row and which
    column each weight belongs to.
    """
    unknown = Unread("scores", "the weights follow from no product of a query and a key")
    softmax = numbers.origin(attention.weights, before=attention.at + 1)
    if softmax is None:
        raise unknown
    for at in range(softmax.at - 1, -1, -1):
        step = numbers.steps[at]
        if step.name not in ("mm", "bmm") or step.projects or not step.depends:
            continue
        product = step.outputs[0]
        if product.numel() != softmax.tensor.numel():
            continue
        laid = [
            origin
            for _, _, held in numbers.like(product, before=softmax.at)
            if held.shape == softmax.tensor.shape
            and (origin := numbers.origin(held, before=softmax.at)) is not None
            and origin.at == at
        ]
        if not laid:
            continue
        place = laid[0].index.flatten()[softmax.index.flatten()].reshape(attention.weights.shape)
        left, right = (t.detach().double() for t in step.inputs[:2])
        left, right = (t[None] if t.ndim == 2 else t for t in (left, right.mT))
        size, width = left.shape[1], right.shape[1]
        lead, row, column = place // (size * width), place // width % size, place % width
        # Weights of 0 and 1 are all alike, so their places are unknown.
        known = (attention.weights > 0) & (attention.weights < 1)
        for of_rows, of_keys, own in (
            ((lead, row), (lead, column), (left, right)),
            ((lead, column), (lead, row), (right, left)),
        ):
            rows = _alike(*of_rows, known, own[0].shape[1])
            keys = _alike(of_keys[0].mT, of_keys[1].mT, known.mT, own[1].shape[1])
            if rows is not None and keys is not None:
                return own[0][rows], own[1][keys]
    raise unknown


def _alike(lead: Tensor, row: Tensor, known: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the place of each row, (..., rows), that all its known numbers have in common.

    Rows without a known number, such as the first ones of causal weights, take the places of a
    leading index that no other row has; as they are all alike, their order changes nothing.
    """
    some = known.any(-1)
    first = known.long().argmax(-1, keepdim=True)
    found = [place.gather(-1, first)[..., 0] for place in (lead, row)]
    for place, own in zip((lead, row), found, strict=True):
        if not bool(((place == own[..., None]) | ~known).all()):
            return None
    leads, rows = (t.reshape(-1, t.shape[-1]).clone() for t in found)
    for own_lead, own_rows, told in zip(leads, rows, some.reshape(leads.shape), strict=True):
        if bool(told.all()):
            continue
        if len(cast(Tensor, own_lead[told].unique())) != 1:
            return None
        free = sorted({*range(count)} - {*cast(list[int], own_rows[told].tolist())})
        if len(free) != int((~told).sum()):
            return None
        own_lead[~told] = own_lead[told][0]
        own_rows[~told] = torch.tensor(free)
    return leads.reshape(some.shape), rows.reshape(some.shape)


def _side(tensor: Tensor, what: str, numbers: Numbers, sizes: Sizes, before: int) -> _Side:
    path = path_to(tensor, numbers, sizes, before=before)
    if path.operations is None:
        raise Unread("projection", f"the way from the input to the {what} is unknown", path.line)
    place = path.coordinates
    if place is None:
        raise Unread("projection", f"no axes of the {what} are those of samples and tokens")
    own = place.reshape(-1, *tensor.shape[-2:])
    sample, token = own.sample[..., 0], own.token[..., 0]
    if not bool((own.token == token[..., None]).all()):
        raise Unread("merge", f"each row of the {what} holds numbers of several tokens", path.line)
    if not bool((own.sample == sample[..., None]).all()):
        raise Unread("merge", f"each row of the {what} holds numbers of several samples")
    numbers_of = cast(list[list[list[int]]], own.column.tolist())
    columns: list[list[tuple[object, ...]]] = [
        [(path.source, *row) for row in rows] for rows in numbers_of
    ]
    return _Side(path, sample, token, columns, tensor.reshape(-1, *tensor.shape[-2:]))


def _numbered(columns: Iterable[tuple[object, ...]]) -> dict[tuple[object, ...], int]:
    """Return numbers of heads in the order of their columns in the projections."""
    return {own: number for number, own in enumerate(sorted(set(columns), key=_order_of))}


def _order_of(columns: tuple[object, ...]) -> tuple[str, tuple[object, ...]]:
    """Return what sorts columns: the source, a name or a number, and then the numbers."""
    source, *rest = columns
    return (f"{source:09}" if isinstance(source, int) else str(source), tuple(rest))


def _together(records: Sequence[_Record], sizes: Sizes) -> Rows:
    """Put the pieces of one attention together: loops over samples, heads, rows or windows."""
    heads = _heads_of(records)
    count = len(heads.of_keys)
    q_len = 1 + max(int(r.query.token.max()) for r in records)
    kv_len = 1 + max(int(r.key.token.max()) for r in records)
    if min(q_len, kv_len) < sizes.tokens:
        reason = f"of {sizes.tokens} tokens only {min(q_len, kv_len)} are seen in products"
        raise Unread("product", reason)
    lead = (sizes.batch or 1, count)
    first = records[0]
    query, key, value = (
        torch.full((*lead, length, side.numbers.shape[-1]), math.nan, dtype=torch.float64)
        for length, side in ((q_len, first.query), (kv_len, first.key), (kv_len, first.value))
    )
    weights = torch.zeros(*lead, q_len, kv_len, dtype=torch.float64)
    for record, head in zip(records, heads.of_rows, strict=True):
        q, k = record.query, record.key
        at = (q.sample, head, q.token)
        query[at] = q.numbers.double()
        weights[(*(t[:, :, None] for t in at), k.token[:, None, :])] = record.weights
        for own in range(head.shape[1]):
            of_keys = (k.sample, head[:, own : own + 1].expand_as(k.token), k.token)
            key[of_keys] = k.numbers.double()
            value[of_keys] = record.value.numbers.double()
    if bool(query.isnan().any()):
        raise Unread("merge", "some heads have no query of some tokens")
    return Rows(
        first.attention.module,
        dict(first.attention.lines),
        query,
        key.nan_to_num(0.0),  # keys that no row of a head meets have weight 0 and no numbers
        value.nan_to_num(0.0),
        weights,
        heads.of_keys,
        (first.query.path, first.key.path, first.value.path),
        heads.of_values,
        attentions=tuple(record.attention for record in records),
    )


@dataclass(frozen=True, eq=False)
class _Heads:
    """The number of the head of each row, (leading, rows), and what each head meets."""

    of_rows: list[Tensor]
    of_keys: tuple[int, ...]
    of_values: tuple[int, ...]


def _heads_of(records: Sequence[_Record]) -> _Heads:
    """Return the numbers of the heads.

    Heads with equal columns are told apart by how often a token has them.
    """
    heads: dict[tuple[object, ...], int] = {}
    keys = _numbered(columns for r in records for rows in r.key.columns for columns in rows)
    values = _numbered(columns for r in records for rows in r.value.columns for columns in rows)
    places: list[Tensor] = []
    met: dict[tuple[object, ...], int] = {}
    mapped: dict[int, set[int]] = {}
    valued: dict[int, set[int]] = {}
    for record in records:
        q = record.query
        own = torch.zeros_like(q.token)
        for lead, rows in enumerate(q.columns):
            of_keys = {keys[columns] for columns in record.key.columns[lead]}
            of_values = {values[columns] for columns in record.value.columns[lead]}
            for row, columns in enumerate(rows):
                at = (int(q.sample[lead, row]), int(q.token[lead, row]), columns)
                again = met[at] = met.get(at, -1) + 1
                head = heads.setdefault((again, *columns), len(heads))
                own[lead, row] = head
                mapped.setdefault(head, set()).update(of_keys)
                valued.setdefault(head, set()).update(of_values)
        places.append(own)
    if any(len(kinds) != 1 for kinds in (*mapped.values(), *valued.values())):
        raise Unread("merge", "one head of queries meets several heads of keys")
    numbers = range(len(heads))
    return _Heads(
        places,
        tuple(next(iter(mapped[head])) for head in numbers),
        tuple(next(iter(valued[head])) for head in numbers),
    )
