"""One attention of a run by sample, head and token, whatever axes the code has."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.diagnosis.facts.origins import Numbers, Origin, Sizes
from regard.diagnosis.facts.paths import Part, Path, path_to
from regard.diagnosis.facts.trace import Attention

_LOW = 1e-300
"""A weight below it is that of a masked key."""


class Unread(Exception):
    """A stage of an attention that could not be read.

    Args:
        stage: "projection", "scores", "mask", "softmax", "product", "merge" or "output".
        reason: in one sentence.
        line: the ``file:line``; "" if it is unknown.
        mistakes: that this is for sure.
    """

    def __init__(
        self, stage: str, reason: str, line: str = "", mistakes: Sequence["Mistake"] = ()
    ) -> None:
        super().__init__(reason)
        self.stage, self.line, self.mistakes = stage, line, tuple(mistakes)


class Mistake(NamedTuple):
    """A mistake of the catalogue that the numbers of a run show.

    Attributes:
        name: in the catalogue.
        says: what the code does, in a sentence.
        line: the ``file:line``; "" for that of the product of query and key.
        weights: the weights as they are and as they would be, (samples, heads, q_len, kv_len);
            None where they say nothing.
        scale: of the scores, which somebody may mean; None for other mistakes.
        is_choice: it is a mistake only where an intention says what is meant.
    """

    name: str
    says: str
    line: str = ""
    weights: tuple[Tensor, Tensor] | None = None
    scale: float | None = None
    is_choice: bool = False

    @classmethod
    def of_reason(cls, name: str, reason: str, line: str = "") -> "Mistake":
        """Return a mistake that the reason of ``Unread`` is."""
        return cls(name, f"{reason[0].upper()}{reason[1:]}.", line)


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
        head_map: the index of the key head of each head.
        value_map: the index of the value head of each head; empty: as ``head_map``.
        crosses: queries and keys are projected from different tensors.
        inputs: the names of the inputs that query, key and value are projected from; "" for none.
        paths: those to query, key and value.
        attentions: the attentions of the run that it consists of.
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

    @cached_property
    def visible(self) -> Tensor:
        """The keys that have a weight, bool, (samples, heads, q_len, kv_len)."""
        # A row that is masked as a whole with a finite number has equal weights, whatever its
        # scores.
        scores, weights = self.query @ self.key.mT, self.weights
        spread = weights.amax(-1, keepdim=True) - weights.amin(-1, keepdim=True)
        has_scores = scores.amax(-1, keepdim=True) != scores.amin(-1, keepdim=True)
        return (weights > _LOW) & ~((spread < 1e-12) & has_scores)

    @property
    def is_empty(self) -> Tensor:
        """The rows that see no key, (samples, heads, q_len, 1): of weights 0, or all alike."""
        return ~self.visible.any(-1, keepdim=True)

    def with_samples_of(self, other: "Rows") -> "Rows":
        """Return the rows with the samples of another run of the same attention added."""
        names = ("query", "key", "value", "weights")
        pairs = {name: [getattr(self, name), getattr(other, name)] for name in names}
        return replace(self, **{name: torch.cat(tensors) for name, tensors in pairs.items()})


@dataclass(frozen=True, eq=False)
class _Side:
    """Queries, keys or values.

    Attributes:
        path: that to them.
        sample: the sample of each row, (leading, rows).
        token: the token of each row.
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
    """One attention of a run, with the samples, tokens and heads of its rows and keys."""

    attention: Attention
    query: _Side
    key: _Side
    value: _Side
    weights: Tensor  # (leading, rows, keys)


def rows_of(attentions: Iterable[Attention], numbers: Numbers, sizes: Sizes) -> list[Rows | Unread]:
    """Return the attentions of a run; pieces of one attention are put together."""
    read: list[Rows | Unread] = []
    groups: dict[tuple[object, ...], list[_Record]] = {}
    for attention in attentions:
        try:
            record = _record(attention, numbers, sizes)
        except Unread as error:
            read.append(_with_line(error, attention))
            continue
        lines = attention.lines
        line = lines.get("value") or lines.get("softmax") or attention.at
        groups.setdefault((line, _inputs(record.query.path, numbers)), []).append(record)
    for records in groups.values():
        try:
            rows = _together(records, numbers, sizes)
        except Unread as error:
            read.append(_with_line(error, records[0].attention))
            continue
        query, key, value = (_inputs(path, numbers) for path in rows.paths)
        names = (_name_of(query), _name_of(key), _name_of(value))
        read.append(replace(rows, crosses=query != key, inputs=names))
    return read


def _with_line(error: Unread, attention: Attention) -> Unread:
    error.line = error.line or attention.lines.get("softmax", "")
    line = attention.lines.get("product") or error.line
    error.mistakes = tuple(each._replace(line=each.line or line) for each in error.mistakes)
    return error


def _inputs(path: Path, numbers: Numbers) -> object:
    """Return the tensors that a path projects, which all pieces of one attention have in common."""
    if isinstance(path.source, str):
        return path.source
    step = numbers.steps[path.source]
    tensors = [t for t in step.inputs if t.is_floating_point() and t.numel()]
    origins = [numbers.origin(tensor, before=path.source) for tensor in tensors]
    projected = [o for o in origins if o is not None and (o.at < 0 or numbers.steps[o.at].depends)]
    return tuple((origin.at, origin.name) for origin in projected) or path.source


def _name_of(inputs: object) -> str:
    """Return the name of the one input that is projected; "" for several or none."""
    if isinstance(inputs, str):
        return inputs
    if not isinstance(inputs, tuple) or len(cast("tuple[object, ...]", inputs)) != 1:
        return ""
    [(_, name)] = cast("tuple[tuple[int, str]]", inputs)
    return name


def _record(attention: Attention, numbers: Numbers, sizes: Sizes) -> _Record:
    if attention.value is None:
        raise Unread("product", "each query has a value of its own")
    weights = without_nan_rows(attention.weights)
    lead = tuple(weights.shape[:-2])

    def side(tensor: Tensor, role: str, used: Tensor | None = None) -> _Side:
        tensor = _over(tensor, lead)
        tensor = tensor if used is None else tensor[..., used, :]
        return _side(tensor, role, numbers, sizes, attention.at)

    queries, keys = zip(*_factors(attention, numbers), strict=True)
    q = _joined([side(query, "query") for query in queries])
    try:
        k, v = _joined([side(key, "key") for key in keys]), side(attention.value, "value")
    except Unread:
        # Slots of a cache that nothing was written to are no tokens.
        used = (weights != 0).flatten(0, -2).any(0)
        if bool(used.all()):
            raise
        weights = weights[..., used]
        k = _joined([side(key, "key", used) for key in keys])
        v = side(attention.value, "value", used)
    if k.path.is_learned or v.path.is_learned:
        raise Unread("projection", "keys or values follow from no token")
    if not torch.equal(k.token, v.token) or not torch.equal(k.sample, v.sample):
        reason = "keys and values stand in another order"
        mixed = next((s for s in (k, v) if any(len({*rows}) > 1 for rows in s.columns)), None)
        mistakes = [] if mixed is None else [_mistake_of_split(mixed, attention, numbers)]
        raise Unread("product", reason, "", mistakes)
    if q.path.is_learned:  # each sample has the same queries
        q = replace(q, sample=k.sample[:, :1].expand_as(q.sample))
    if bool((q.sample[:, :, None] != k.sample[:, None, :]).any()):
        reason = "queries of one sample meet keys of another one"
        raise Unread("product", reason, "", [Mistake.of_reason("attends-across-batch", reason)])
    return _Record(attention, q, k, v, weights.reshape(-1, *weights.shape[-2:]).double())


def _joined(sides: Sequence[_Side]) -> _Side:
    """Return parts of queries or keys, whose products are added, as the columns of one."""
    first, *others = sides
    if not others:
        return first
    if not all(torch.equal(each.token, first.token) for each in others):
        raise Unread("product", "products of other tokens are added")
    if not all(torch.equal(each.sample, first.sample) for each in others):
        raise Unread("product", "products of other samples are added")
    columns = [
        [tuple(number for part in row for number in part) for row in zip(*rows, strict=True)]
        for rows in zip(*(each.columns for each in sides), strict=True)
    ]
    parts = Part(tuple(each.path for each in sides))
    path = Path(first.path.source, (parts,), "", None)
    return _Side(
        path, first.sample, first.token, columns, torch.cat([s.numbers for s in sides], -1)
    )


def without_nan_rows(weights: Tensor) -> Tensor:
    """Return weights with 0 in rows of NaN alone, which see no key; the law of runs tells NaN."""
    return weights.masked_fill(weights.isnan().all(-1, keepdim=True), 0.0)


def _over(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Return a tensor with the leading axes of the weights."""
    if tensor.ndim > 2 and lead and tensor.shape[-3] not in (1, lead[-1]):
        tensor = tensor.repeat_interleave(lead[-1] // tensor.shape[-3], -3)
    return tensor.expand(*lead, *tensor.shape[-2:])


def _factors(attention: Attention, numbers: Numbers) -> list[tuple[Tensor, Tensor]]:
    """Return the query and the key of each product that the scores are the sum of."""
    softmax = numbers.origin(attention.weights, before=attention.at + 1)
    query, key = attention.query, attention.key
    for at in range(softmax.at - 1, -1, -1) if softmax is not None else ():
        assert softmax is not None
        pairs = [
            _of_product(product, attention.weights, softmax, numbers)
            for product in _products_in(at, softmax, numbers)
        ]
        if len(pairs) == 1 and query is not None and key is not None:
            break
        if pairs and None not in pairs:
            return [pair for pair in pairs if pair is not None]
    if query is None or key is None:
        raise Unread("scores", "the weights follow from no product of a query and a key")
    return [(query, key)]


def _products_in(at: int, softmax: Origin, numbers: Numbers) -> list[int]:
    """Return the steps of the products that a step gives, or adds; empty for any other step."""
    step = numbers.steps[at]
    if step.outputs and step.outputs[0].numel() != softmax.tensor.numel():
        return []
    if _is_product(at, numbers):
        return [at]
    if step.name != "add":
        return []
    origins = [numbers.origin(term, before=at) for term in step.inputs[:2]]
    terms = {origin.at for origin in origins if origin is not None}
    return sorted(terms) if len(terms) == 2 and all(_is_product(t, numbers) for t in terms) else []


def _is_product(at: int, numbers: Numbers) -> bool:
    """Return True if a step is a product of two tensors that follow from the inputs."""
    step = numbers.steps[at]
    return at >= 0 and step.name in ("mm", "bmm") and step.depends and not step.projects


def _of_product(
    at: int, weights: Tensor, softmax: Origin, numbers: Numbers
) -> tuple[Tensor, Tensor] | None:
    """Return the factors of a product, with the weights' leading axes; None if they fit none.

    The softmax, and all between it and the product, work on each element alone, so a tensor of the
    softmax's shape that holds the product's numbers tells which row and which column of the product
    each weight belongs to.

    Args:
        at: the number of its step.
        weights: in axes of their own.
        softmax: the tensor that they are a part of.
        numbers: of the run.
    """
    step = numbers.steps[at]
    product = step.outputs[0]
    origins = [
        origin
        for _, _, tensor in numbers.of_size(product.numel(), before=softmax.at)
        if _is_split(tensor.shape, softmax.tensor.shape)
        and (origin := numbers.origin(tensor, before=softmax.at)) is not None
        and origin.at == at
    ]
    if not origins:
        return None
    index = origins[0].index.flatten()[softmax.index.flatten()].reshape(weights.shape)
    left, right = (t.detach().double() for t in step.inputs[:2])
    left, right = (t[None] if t.ndim == 2 else t for t in (left, right.mT))
    size, width = left.shape[1], right.shape[1]
    lead, row, column = index // (size * width), index // width % size, index % width
    # Weights that are equal to others, such as 0 and 1, have no known index.
    known = is_single(weights)
    for q_axis, k_axis, query, key in ((row, column, left, right), (column, row, right, left)):
        rows = _common_index(lead, q_axis, known, query.shape[1])
        keys = _common_index(lead.mT, k_axis.mT, known.mT, key.shape[1])
        if rows is not None and keys is not None:
            return query[rows], key[keys]
    return None


def is_single(numbers: Tensor) -> Tensor:
    """Return True where a tensor has a number that it has nowhere else."""
    unique = cast(Any, torch).unique  # PyTorch leaves its type open
    _, which, counts = unique(numbers, return_inverse=True, return_counts=True)
    return counts[which] == 1


def _is_split(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if one shape has the axes of the other, some of them split into several."""
    ends = [{*accumulate(reversed(each), mul)} - {1} for each in (shape, other)]
    return ends[0] <= ends[1] or ends[1] <= ends[0]


def _common_index(
    lead: Tensor, row: Tensor, known: Tensor, count: int
) -> tuple[Tensor, Tensor] | None:
    """Return the leading index and the row of each row of weights, (..., rows), in a factor.

    Rows without a known number, such as the first ones of causal weights, take the rows of a
    leading index that no other row has; as they are all equal, their order changes nothing.

    Args:
        lead: of each weight, (..., rows, columns).
        row: of each weight.
        known: the weights whose index is known; the others count for nothing.
        count: the number of rows of the factor.
    """
    is_known = known.any(-1)
    first = known.long().argmax(-1, keepdim=True)
    common = [index.gather(-1, first)[..., 0] for index in (lead, row)]
    for index, of_row in zip((lead, row), common, strict=True):
        if not bool(((index == of_row[..., None]) | ~known).all()):
            return None
    leads, rows = (t.reshape(-1, t.shape[-1]).clone() for t in common)
    for lead_index, row_index, mask in zip(leads, rows, is_known.reshape(leads.shape), strict=True):
        if bool(mask.all()):
            continue
        if len(cast(Tensor, lead_index[mask].unique())) != 1:
            return None
        free = sorted({*range(count)} - {*cast(list[int], row_index[mask].tolist())})
        if len(free) != int((~mask).sum()):
            return None
        lead_index[~mask] = lead_index[mask][0]
        row_index[~mask] = torch.tensor(free)
    return leads.reshape(is_known.shape), rows.reshape(is_known.shape)


def _side(tensor: Tensor, role: str, numbers: Numbers, sizes: Sizes, before: int) -> _Side:
    path = path_to(tensor, numbers, sizes, before=before)
    if path.operations is None:
        raise Unread("projection", f"the way from the input to the {role} is unknown", path.line)
    if path.coordinates is None:
        raise Unread("projection", f"no axes of the {role} are those of samples and tokens")
    coordinates = path.coordinates.reshape(-1, *tensor.shape[-2:])
    sample, token = coordinates.sample[..., 0], coordinates.token[..., 0]
    if not bool((coordinates.token == token[..., None]).all()):
        reason = f"each row of the {role} holds numbers of several tokens"
        line = _line_of_view(tensor.double(), numbers, before)
        mistake = Mistake.of_reason("keys-not-transposed", reason, line)
        raise Unread("merge", reason, path.line, [mistake] if role == "key" else [])
    if not bool((coordinates.sample == sample[..., None]).all()):
        raise Unread("merge", f"each row of the {role} holds numbers of several samples")
    columns: list[list[tuple[object, ...]]] = [
        [(path.source, *row) for row in rows]
        for rows in cast(list[list[list[int]]], coordinates.column.tolist())
    ]
    return _Side(path, sample, token, columns, tensor.reshape(-1, *tensor.shape[-2:]))


def _line_of_view(key: Tensor, numbers: Numbers, before: int) -> str:
    """Return the line of a view that gave keys the shape of their transpose; "" for none."""
    turned = key.mT
    for step in numbers.steps[:before]:
        if step.name not in _VIEWS or step.outputs[0].ndim < 2:
            continue
        output = step.outputs[0].double()
        if not step.inputs[0].shape[-1] == output.shape[-2] != output.shape[-1]:
            continue
        if output.numel() == key.numel() and torch.equal(output.reshape(turned.shape), turned):
            return step.line
    return ""


def _numbered(columns: Iterable[tuple[object, ...]]) -> dict[tuple[object, ...], int]:
    """Return numbers of heads in the order of their columns in the projections."""
    return {head: number for number, head in enumerate(sorted(set(columns), key=_sort_key))}


def _sort_key(columns: tuple[object, ...]) -> tuple[str, tuple[object, ...]]:
    """Return the key that sorts columns by their source, a name or a number, and then by number."""
    source, *rest = columns
    return (f"{source:09}" if isinstance(source, int) else str(source), tuple(rest))


def _together(records: Sequence[_Record], numbers: Numbers, sizes: Sizes) -> Rows:
    """Put the pieces of one attention together: loops over samples, heads, rows or windows."""
    of_rows, of_keys, of_values = _heads_of(records, numbers)
    count = len(of_keys)
    q_len = 1 + max(int(r.query.token.max()) for r in records)
    kv_len = 1 + max(int(r.key.token.max()) for r in records)
    first = records[0]
    seen = kv_len if first.query.path.is_learned else min(q_len, kv_len)
    if seen < min(sizes.tokens, sizes.memory or sizes.tokens):
        reason = f"of {sizes.tokens} tokens only {seen} are seen in products"
        raise Unread("product", reason)
    lead = (sizes.batch or 1, count)
    query, key, value = (
        torch.full((*lead, length, side.numbers.shape[-1]), math.nan, dtype=torch.float64)
        for length, side in ((q_len, first.query), (kv_len, first.key), (kv_len, first.value))
    )
    weights = torch.zeros(*lead, q_len, kv_len, dtype=torch.float64)
    for record, head in zip(records, of_rows, strict=True):
        q, k = record.query, record.key
        at = (q.sample, head, q.token)
        query[at] = q.numbers.double()
        weights[(*(t[:, :, None] for t in at), k.token[:, None, :])] = record.weights
        for row in range(head.shape[1]):
            to = (k.sample, head[:, row : row + 1].expand_as(k.token), k.token)
            key[to] = k.numbers.double()
            value[to] = record.value.numbers.double()
    if bool(query.isnan().any()):
        raise Unread("merge", "some heads have no query of some tokens")
    return Rows(
        first.attention.module,
        dict(first.attention.lines),
        query,
        key.nan_to_num(0.0),  # keys that no row of a head meets have weight 0 and no numbers
        value.nan_to_num(0.0),
        weights,
        of_keys,
        (first.query.path, first.key.path, first.value.path),
        of_values,
        attentions=tuple(record.attention for record in records),
    )


def _mistakes_of_heads(records: Sequence[_Record], numbers: Numbers) -> list[Mistake]:
    """Return the mistake of queries that meet several heads of keys; none if it may be meant.

    A query that meets all tokens in two ways is no mistake of the catalogue.
    """
    tokens = torch.cat([record.key.token.flatten() for record in records])
    in_all = len({*cast(list[int], tokens.tolist())})
    of_leads = [
        lead for record in records for lead in cast(list[list[int]], record.key.token.tolist())
    ]
    queries = Counter(
        (int(sample), int(token), columns)
        for record in records
        for samples, tokens, rows in zip(
            record.query.sample, record.query.token, record.query.columns, strict=True
        )
        for sample, token, columns in zip(samples, tokens, rows, strict=True)
    )
    if any(len({*lead}) == in_all for lead in of_leads) and max(queries.values()) > 1:
        return []
    is_one_token = all(
        bool((record.query.token[:, :, None] == record.key.token[:, None, :]).all())
        for record in records
    )
    if is_one_token:
        says = "Each head of a token attends to the heads of the same token, and to no other token."
        return [Mistake("heads-and-tokens-exchanged", says)]
    sides = [side for record in records for side in (record.key, record.query, record.value)]
    mixed = next((s for s in sides if any(len({*rows}) > 1 for rows in s.columns)), sides[0])
    return [_mistake_of_split(mixed, records[0].attention, numbers)]


def _mistake_of_split(side: _Side, attention: Attention, numbers: Numbers) -> Mistake:
    """Return the mistake of rows that hold numbers of several heads, with the line of their view.

    That is the first one with as many rows and columns as they have.
    """
    says = "Rows of keys hold numbers of several heads: one head of queries meets several of keys."
    source, shape = side.path.source, side.numbers.shape[-2:]
    if isinstance(source, str):
        source = -1
    line = ""
    for step in numbers.steps[source + 1 : attention.at]:
        if step.name in _VIEWS and step.outputs[0].shape[-1] == shape[-1]:
            origin = numbers.origin(step.outputs[0])
            if origin is not None and origin.at == source:
                line = line or step.line
                if step.outputs[0].shape[-2:] == shape:
                    return Mistake("heads-split-without-transpose", says, step.line)
    return Mistake("heads-split-without-transpose", says, line)


_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "clone")


def _heads_of(
    records: Sequence[_Record], numbers: Numbers
) -> tuple[list[Tensor], tuple[int, ...], tuple[int, ...]]:
    """Return the heads; those with equal columns are told apart by how often a token has them.

    Returns:
        The head of each row, (leading, rows), of each record; the key head of each head; and the
        value head of each head.
    """
    heads: dict[tuple[object, ...], int] = {}
    keys = _numbered(columns for r in records for rows in r.key.columns for columns in rows)
    values = _numbered(columns for r in records for rows in r.value.columns for columns in rows)
    of_rows: list[Tensor] = []
    count: Counter[tuple[object, ...]] = Counter()
    key_heads: dict[int, set[int]] = {}
    value_heads: dict[int, set[int]] = {}
    for record in records:
        q = record.query
        of_record = torch.zeros_like(q.token)
        for lead, rows in enumerate(q.columns):
            lead_keys = {keys[columns] for columns in record.key.columns[lead]}
            lead_values = {values[columns] for columns in record.value.columns[lead]}
            for row, columns in enumerate(rows):
                token = (int(q.sample[lead, row]), int(q.token[lead, row]), columns)
                head = heads.setdefault((count[token], *columns), len(heads))
                count[token] += 1
                of_record[lead, row] = head
                key_heads.setdefault(head, set()).update(lead_keys)
                value_heads.setdefault(head, set()).update(lead_values)
        of_rows.append(of_record)
    if any(len(met) != 1 for met in (*key_heads.values(), *value_heads.values())):
        reason = "one head of queries meets several heads of keys"
        raise Unread("merge", reason, "", _mistakes_of_heads(records, numbers))
    of_keys, of_values = (
        tuple(next(iter(met[head])) for head in range(len(heads)))
        for met in (key_heads, value_heads)
    )
    return of_rows, of_keys, of_values
