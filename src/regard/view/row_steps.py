"""One query step by step, and a small matrix whole, as tables to read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from math import isfinite, prod
from typing import cast

import torch
from torch import Tensor

from regard.errors import (
    check_count,
    check_floating,
    check_index_bounds,
    check_numbers,
    check_operand,
    check_whole,
    shape_text,
)
from regard.masks import Mask
from regard.matrix.attention_matrix import AttentionMatrix, ScoreMatrix, check_attention_matrix
from regard.scores.autocast import without_autocast
from regard.scores.box import Box, cut_whole
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores
from regard.text.escaping import visible
from regard.text.tables import Cell, Table
from regard.text.tokens import Token, as_tokens

# What fits beside each other in a terminal, and what a person reads.
_WIDEST_VALUE = 6
_LARGEST_TABLE = 32
# exp of a larger score is no number that anybody reads.
_READABLE_SCORE = 16.0


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps from one query to its weights and its output, with a row for each key.

    The columns are the steps in their order, those that do nothing left out: ``query·key``,
    ``scaled``, ``biased``, ``modified`` (by a score_mod), ``capped``, ``mask`` (True = may attend),
    ``score``, ``weight``, and the weight times each number of the key's value. The last row, all,
    has their sums: of the weights times the values it is the output. Printed it is text, in a
    notebook HTML.

    Attributes:
        query: which row of the matrix it is.
        table: the numbers.
        output: weights @ value, (value_dim,); None where no value was given.
        title: what the table is of.
        note: how a score becomes a weight.

    Example:
        >>> import torch, regard
        >>> query = torch.tensor([[1.0, 0.0, 2.0]])
        >>> key = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
        >>> regard.steps(regard.attend(query, key, scale=1.0), query=0)
        Query 0 and its 3 keys; scale 1
        key  query·key  score  weight
        0            2      2  0.0634
        1            4      4  0.4683
        2            4      4  0.4683
        all          -      -  1.0000
        weight = exp(score) / 116.6, the sum of exp(score)
    """

    query: int
    table: Table
    output: Tensor | None
    title: str
    note: str

    def __repr__(self) -> str:
        """Return the steps as text in aligned columns."""
        return f"{self.title}\n{self.table.text()}\n{self.note}"

    def _repr_html_(self) -> str:
        """Return the steps as HTML for a notebook."""
        head, foot = (f"<p>{escape(text)}</p>" for text in (self.title, self.note))
        return f"<div>{head}\n{self.table._repr_html_()}\n{foot}</div>"  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, eq=False)
class QueryRow:
    """One row of the matrix, step by step.

    Attributes:
        columns: the scores before the mask after each step, (kv_len,) each.
        allowed: True where the query may attend, (kv_len,); None without a mask.
        score: of every key, (kv_len,); -inf where it is masked.
        sink: the logit in the denominator that belongs to no key, (); None without one.
    """

    columns: dict[str, Tensor]
    allowed: Tensor | None
    score: Tensor
    sink: Tensor | None

    @cached_property
    def maximum(self) -> Tensor:
        """The largest score, (); -inf without keys."""
        return self.score.amax(-1)

    @cached_property
    def log_normalizer(self) -> Tensor:
        """log of the sum of exp(score - maximum), (); 0 where nothing is summed."""
        parts = self.score if self.sink is None else torch.cat([self.score, self.sink[None]])
        total = (parts - self._reference).logsumexp(-1)
        return total.masked_fill(total == -torch.inf, 0)

    @property
    def is_empty(self) -> Tensor:
        """True where the query may attend to no key, ()."""
        return self.maximum == -torch.inf

    def weight(self, score: Tensor) -> Tensor:
        """Return the weights of some scores of the row, or of its sink."""
        # Large scores would round the log_normalizer away in their sum, the logsumexp.
        weights = ((score - self._reference) - self.log_normalizer).exp()
        return weights.masked_fill(score == -torch.inf, 0)  # also in a row of NaN

    @property
    def _reference(self) -> Tensor:
        """The maximum, or 0 without keys: a score of -inf less -inf would be NaN."""
        return self.maximum.masked_fill(self.is_empty, 0)


@torch.no_grad()
def steps(
    A: AttentionMatrix,
    query: int = 0,
    *,
    value: Tensor | None = None,
    tokens: Sequence[str | Token] | None = None,
    most: int = 16,
) -> Steps:
    """Return how one query of one head gets its weights, with a row for each key.

    Args:
        A: a matrix of one head.
        query: the row.
        value: (kv_len, value_dim) or (kv_len,); adds the weights times the values.
        tokens: the text of each key.
        most: the maximum number of keys to list. Of more keys the strongest are listed, and the
            others are summed up.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: A has several heads, or a length does not fit.
        IndexError: the query is out of range.

    Example:
        >>> import torch, regard
        >>> A = regard.AttentionMatrix.from_scores(torch.tensor([[1.0, 2.0]]))
        >>> torch.tensor(regard.steps(A).table["weight"])  # the last is the sum of the others
        tensor([0.2689, 0.7311, 1.0000])
    """
    matrix = one_head("steps()", A)
    check_numbers("steps()", A.device)
    source, mask = matrix.source, matrix.mask
    q_len, kv_len = source.shape
    place = check_index_bounds(check_whole("query", query), q_len, 0)
    most = check_count("most", most)
    names = _names(checked_tokens("tokens", tokens, "kv_len", kv_len))
    value = None if value is None else _checked_value(value, source)
    row = query_row(source, mask, place)
    if mask is None and len(row.columns) > 1:
        row.columns.popitem()  # the last step gives the score
    weight = row.weight(row.score)
    strongest = weight.sort(descending=True, stable=True).indices[:most]
    shown = strongest.sort().values
    terms = None
    if value is not None:
        masked = row.score[:, None] == -torch.inf  # where a weight of 0 times NaN would be NaN
        terms = (weight[:, None] * value.to(weight.dtype)).masked_fill(masked, 0)
    columns = _columns(row, weight, terms, shown, names)
    output = None if terms is None else terms.sum(0)
    title = _title(source, place, names if q_len == kv_len else None, len(shown))
    note = _note(row)
    if output is not None and output.shape[0] > _WIDEST_VALUE:
        note += f"\nof each value the first {_WIDEST_VALUE} of {output.shape[0]} numbers are shown"
    return Steps(place, Table(columns), output, title, note)


def table(
    matrix: AttentionMatrix | ScoreMatrix,
    tokens: Sequence[str | Token] | None = None,
    key_tokens: Sequence[str | Token] | None = None,
) -> Table:
    """Return the weights or the scores of one small head as a table.

    Args:
        matrix: A for the weights, ``A.scores`` for the scores; one head of at most 32 x 32.
        tokens: the text of each query, and of each key if ``key_tokens`` is not given.
        key_tokens: the text of each key.

    Returns:
        A row for each query, a column for each key.

    Raises:
        ValueError: the matrix has several heads or is too large, or a length does not fit.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(2, 1)
        >>> regard.table(regard.attend(x, x, mask=regard.Causal()), ["Life", "is"])
        query    Life      is
        Life   1.0000  0.0000
        is     0.5000  0.5000
    """
    if not isinstance(matrix, ScoreMatrix):
        check_attention_matrix("matrix", matrix)
    what = "table()"
    if prod(matrix.shape[:-2]) != 1 or max(matrix.shape[-2:]) > _LARGEST_TABLE:
        raise ValueError(
            f"{what} has a matrix of shape {shape_text(matrix.shape)}; it shows one head of at "
            f"most {_LARGEST_TABLE} queries and keys.\n"
            "    Take one head, A[0, 3]; for a long one use regard.steps(A) or A.pool(32, 32)."
        )
    q_len, kv_len = matrix.shape[-2:]
    numbers = matrix.to_dense().detach().reshape(q_len, kv_len)
    check_numbers(what, numbers.device)
    if key_tokens is None and q_len == kv_len:
        key_tokens = tokens
    queries = checked_tokens("tokens", tokens, "q_len", q_len)
    keys = _names(checked_tokens("key_tokens", key_tokens, "kv_len", kv_len))
    rows = _names(queries) or [str(i) for i in range(q_len)]
    keys = keys or [str(i) for i in range(kv_len)]
    # A name of a column is one of its kind; two equal tokens are told apart by their places.
    heads = [f"{key} ({i})" if keys.count(key) > 1 else key for i, key in enumerate(keys)]
    first = "query" if "query" not in heads else "query →"
    # Whole numbers in every column, or in none.
    whole = _plain(_numbers(numbers.mT.flatten()))
    columns = (whole[i * q_len : (i + 1) * q_len] for i in range(kv_len))
    return Table({first: rows, **dict(zip(heads, columns, strict=True))})


def one_head(call: str, matrix: AttentionMatrix) -> AttentionMatrix:
    """Return a matrix of one head without its leading axes, (q_len, kv_len)."""
    check_attention_matrix("matrix", matrix)
    if prod(matrix.shape[:-2]) != 1:
        raise ValueError(
            f"matrix has shape {shape_text(matrix.shape)}; {call} shows one head.\n"
            "    Take one of them by its leading axes, for example A[0, 3]."
        )
    return matrix[(0,) * (matrix.ndim - 2)]


def checked_tokens(
    name: str, given: Iterable[Token | str] | None, length_name: str, length: int
) -> tuple[Token, ...] | None:
    """Return one token for each position; None stays None."""
    tokens = as_tokens(name, given)
    if tokens is not None and len(tokens) != length:
        raise ValueError(
            f"{name} has {len(tokens)} tokens; the matrix has {length_name} = {length}.\n"
            "    Give a list with one token for each."
        )
    return tokens


def _names(tokens: Sequence[Token] | None) -> list[str] | None:
    """Return the text of each token, or None if there are no tokens."""
    return None if tokens is None else [token.text.strip() or token.text for token in tokens]


def _checked_value(value: object, source: Scores) -> Tensor:
    """Return the value as (kv_len, value_dim)."""
    tensor = check_floating("value", value, "(kv_len, value_dim)")
    check_operand("value", tensor, "kv_len", (source.shape[-1],), source.device)
    return tensor[:, None] if tensor.ndim == 1 else tensor


def query_row(source: Scores, mask: Mask | None, place: int) -> QueryRow:
    """Return one row, step by step: the same source with the later steps left out."""
    box = Box((), slice(place, place + 1), slice(0, source.shape[-1]))

    def scores(of: Scores) -> Tensor:
        with without_autocast(source.device):
            return of.block(box, cut_whole)[0]

    columns = {name: scores(part) for name, part in _parts_of(source)}
    allowed = None
    score = scores(source)
    if mask is not None:
        allowed = mask.block(box, source.shape, source.device).expand(1, source.shape[-1])[0]
        score = score.masked_fill(~allowed, -torch.inf)
    sink = source.sink(box, cut_whole)
    return QueryRow(columns, allowed, score, None if sink is None else sink.reshape(()))


def _parts_of(source: Scores) -> list[tuple[str, Scores]]:
    """Return the source up to each of its steps by name, without steps that do nothing."""
    if not isinstance(source, QueryKeyScores):
        return []
    bare = replace(source, scale=1.0, bias=None, position_bias=None, score_mod=None, softcap=None)
    parts = [("query·key", bare)]
    scaled = replace(bare, scale=source.scale)
    if source.scale != 1:
        parts.append(("scaled", scaled))
    biased = replace(scaled, bias=source.bias, position_bias=source.position_bias)
    if source.bias is not None or source.position_bias is not None:
        parts.append(("biased", biased))
    if source.score_mod is not None:
        parts.append(("modified", replace(biased, score_mod=source.score_mod)))
    if source.softcap is not None:
        parts.append(("capped", source))
    return cast("list[tuple[str, Scores]]", parts)


def _columns(
    row: QueryRow, weight: Tensor, terms: Tensor | None, shown: Tensor, names: list[str] | None
) -> dict[str, list[Cell]]:
    """Return the columns: the shown keys, the sink and the other keys if any, then the sums."""
    places = [int(place) for place in shown]
    rest = weight.shape[0] - len(places)
    ends = [
        *(["sink"] if row.sink is not None else []),
        *([f"{rest} others"] if rest else []),
    ]
    ends.append("all")
    none: list[Cell] = [None] * len(ends)
    columns: dict[str, list[Cell]] = {"key": [*map(str, places), *ends]}
    if names is not None:
        columns["token"] = [*(names[place] for place in places), *[""] * len(ends)]
    for name, numbers in row.columns.items():
        columns[name] = [*_plain(_numbers(numbers[shown])), *none]
    if row.allowed is not None:
        columns["mask"] = [*cast("list[bool]", row.allowed[shown].tolist()), *none]
    score, logit = _numbers(row.score[shown]), row.sink
    sink = torch.zeros((), device="cpu")
    if logit is None:
        columns["score"] = [*_plain(score), *none]
    else:
        columns["score"] = [*score, float(logit), *none[1:]]
        sink = row.weight(logit)
    columns["weight"] = _with_ends(weight, shown, sink, ends)
    width = 0 if terms is None else min(terms.shape[1], _WIDEST_VALUE)
    for i in range(width):
        numbers = cast(Tensor, terms)[:, i]
        columns[f"× value {i}"] = _with_ends(numbers, shown, torch.zeros((), device="cpu"), ends)
    return columns


def _with_ends(numbers: Tensor, shown: Tensor, sink: Tensor, ends: Sequence[str]) -> list[Cell]:
    """Return a column that adds up: the shown keys, the sink, the other keys, and the sum."""
    total = numbers.sum() + sink.to(numbers.device)
    others = total - sink.to(numbers.device) - numbers[shown].sum()
    by_name = {"sink": sink, "all": total}
    return [*_numbers(numbers[shown]), *(float(by_name.get(end, others)) for end in ends)]


def _numbers(tensor: Tensor) -> list[float]:
    return cast("list[float]", tensor.tolist())


def _plain(numbers: list[float]) -> list[Cell]:
    """Whole numbers without a point where all of them are whole."""
    whole = all(isfinite(number) and number == int(number) for number in numbers)
    return [int(number) for number in numbers] if whole else list(numbers)


def _title(source: Scores, place: int, names: list[str] | None, shown: int) -> str:
    name = "" if names is None else f", {visible(names[place])},"
    kv_len = source.shape[-1]
    keys = (
        f"its {kv_len:,} keys" if shown == kv_len else f"the {shown} strongest of {kv_len:,} keys"
    )
    scale = f"; scale {source.scale:.4g}" if isinstance(source, QueryKeyScores) else ""
    return f"Query {place}{name} and {keys}{scale}"


def _note(row: QueryRow) -> str:
    if row.is_empty:
        return "there is no key that it may attend to: every weight is 0"
    sink = "" if row.sink is None else ", the sink's included"
    maximum = float(row.maximum)
    if abs(maximum) < _READABLE_SCORE:
        exponential, total = "exp(score)", (row.maximum + row.log_normalizer).exp()
    else:
        sign = "-" if maximum > 0 else "+"
        exponential, total = f"exp(score {sign} {abs(maximum):.6g})", row.log_normalizer.exp()
    return f"weight = {exponential} / {total:.4g}, the sum of {exponential}{sink}"
