"""Matrices with NaN, infinity and rows without keys, and what each question must answer.

``docs/numerics.md`` states the rule, and the oracle follows it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, inf, nan

import oracle
import regard
from regard.matrix.weighted_sums import WeightedSum
from regard.reductions.divergences import JensenShannon, KullbackLeibler
from regard.reductions.products import TransposedOutput, WeightTile

LENGTH, WIDTH, HEADS, KV_HEADS = 37, 5, 2, 1  # more than one tile of the Triton kernels
BAD = 9  # the row or the key that something is wrong with
# Of a value or an operand: token, column, number. The last column stays finite.
BAD_NUMBERS = ((7, 0, nan), (8, 1, inf), (12, 2, -inf), (13, 2, inf), (30, 0, nan))
SPANS = [(0, 6), (6, 9), (9, 30), (30, 37)]


# The matrices: one for each mask, with one batch entry for each kind of bad number.


class Kind(NamedTuple):
    """One kind of bad number in the scores."""

    why: str
    spoil: Callable[[Tensor, Tensor, Tensor, Tensor], None]  # query, key, bias, allowed


def _at(*numbers: float) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Numbers at the first keys that the bad row may attend to."""

    def spoil(_query: Tensor, _key: Tensor, bias: Tensor, allowed: Tensor) -> None:
        places = allowed[BAD].nonzero().flatten()
        for place, number in zip(places.tolist(), numbers, strict=False):
            bias[BAD, place] = number

    return spoil


def _in_row(number: float) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    def spoil(_query: Tensor, _key: Tensor, bias: Tensor, _allowed: Tensor) -> None:
        bias[BAD] = number

    return spoil


def _where_masked(number: float) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    def spoil(_query: Tensor, _key: Tensor, bias: Tensor, allowed: Tensor) -> None:
        bias.masked_fill_(~allowed, number)

    return spoil


def _query(query: Tensor, _key: Tensor, _bias: Tensor, _allowed: Tensor) -> None:
    query[..., BAD, :] = nan


def _key(_query: Tensor, key: Tensor, _bias: Tensor, _allowed: Tensor) -> None:
    key[..., BAD, :] = nan


def _alone(query: Tensor, key: Tensor, bias: Tensor, allowed: Tensor) -> None:
    _in_row(-inf)(query, key, bias, allowed)
    _at(nan)(query, key, bias, allowed)


def _nothing(_query: Tensor, _key: Tensor, _bias: Tensor, _allowed: Tensor) -> None:
    pass


KINDS = {
    "finite": Kind("the other entries are not touched by bad ones", _nothing),
    "nan-query": Kind("a whole row of NaN", _query),
    "nan-key": Kind("one NaN in each row that may attend to the key", _key),
    "nan-score": Kind("one NaN among numbers", _at(nan)),
    "inf-score": Kind("one +inf among numbers", _at(inf)),
    "inf-and-nan": Kind("the logsumexp is NaN and not +inf", _at(inf, nan)),
    "inf-and-minus-inf": Kind("a key of -inf stays masked in a row of NaN", _at(inf, -inf)),
    "minus-inf-score": Kind("a masked key", _at(-inf)),
    "row-of-minus-inf": Kind("a row without keys", _in_row(-inf)),
    "nan-alone": Kind("NaN where every other key is masked", _alone),
    "nan-where-masked": Kind("scores under a mask are not read", _where_masked(nan)),
    "inf-where-masked": Kind("scores under a mask are not read", _where_masked(inf)),
}


def _pattern() -> Tensor:
    """Half of the keys at random; a row and a column without any."""
    allowed = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed[12], allowed[:, 20] = False, False
    allowed[BAD, :4] = True
    return allowed


DOCUMENTS = torch.arange(LENGTH) // 13
MASKS: dict[str, tuple[regard.Mask | None, Tensor]] = {
    "none": (None, torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
    "causal": (regard.Causal(), oracle.causal(LENGTH, LENGTH)),
    "window": (regard.SlidingWindow(4, 2), oracle.window(LENGTH, LENGTH, 4, 2)),
    "padding": (regard.Padding(11), torch.arange(LENGTH).expand(LENGTH, -1) < 11),
    "documents": (regard.Documents(DOCUMENTS), DOCUMENTS[:, None] == DOCUMENTS),
    "keep": (regard.Keep(_pattern()), _pattern()),
    "causal-padding": (
        regard.Causal() & regard.Padding(11),
        oracle.causal(LENGTH, LENGTH) & (torch.arange(LENGTH) < 11),
    ),
}


@dataclass(frozen=True, eq=False)
class Given:
    """What a matrix is made of, and what it is asked with.

    Attributes:
        query, key: (batch, heads, LENGTH, WIDTH), the heads of the key grouped.
        bias: (batch, 1, LENGTH, LENGTH); None: no bad scores.
        mask, allowed: one of MASKS.
        sink_bias: (HEADS,), or None.
        value: (batch, kv_heads, LENGTH, 4); NaN, inf and -inf in its columns, the last is finite.
        operand: (batch, heads, LENGTH, 4), the same.
        numbers: (LENGTH, LENGTH), the weights of a weighted sum.
    """

    query: Tensor
    key: Tensor
    bias: Tensor | None
    mask: regard.Mask | None
    allowed: Tensor
    sink_bias: Tensor | None
    value: Tensor
    operand: Tensor
    numbers: Tensor

    @property
    def matrix(self) -> regard.AttentionMatrix:
        return regard.attend(
            self.query, self.key, mask=self.mask, bias=self.bias, sink_bias=self.sink_bias
        )

    def finite(self) -> "Given":
        """The same with finite values and operands."""
        value, operand = self.value.nan_to_num(0, 0, 0), self.operand.nan_to_num(0, 0, 0)
        return replace(self, value=value, operand=operand)

    def to(self, device: torch.device) -> "Given":
        """The same on a device."""
        names = ("query", "key", "bias", "sink_bias", "value", "operand", "numbers")
        mask = None if self.mask is None else self.mask.map(lambda tensor: tensor.to(device))
        there = {name: _on(getattr(self, name), device) for name in names}
        return replace(self, mask=mask, **there)

    @property
    def plain(self) -> regard.AttentionMatrix:
        """The finite entry of the batch, as often."""
        query, key = (tensor[:1].expand_as(tensor) for tensor in (self.query, self.key))
        return regard.attend(query, key, mask=self.mask, sink_bias=self.sink_bias)


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


@cache
def given(mask: str, sinks: bool = False, spoilt: bool = True) -> Given:
    """What a matrix is made of, with bad scores if `spoilt`."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch = len(KINDS)
    query = numbers(1, HEADS, LENGTH, WIDTH).repeat(batch, 1, 1, 1)
    key = numbers(1, KV_HEADS, LENGTH, WIDTH).repeat(batch, 1, 1, 1)
    bias = torch.zeros(batch, 1, LENGTH, LENGTH)
    allowed = MASKS[mask][1]
    for entry, kind in enumerate(KINDS.values()):
        if spoilt:
            kind.spoil(query[entry], key[entry], bias[entry, 0], allowed)
    value, operand = numbers(batch, KV_HEADS, LENGTH, 4), numbers(batch, HEADS, LENGTH, 4)
    for tensor in (value, operand):
        for at, column, bad in (
            (7, 0, nan),
            (8, 1, inf),
            (12, 2, -inf),
            (13, 2, inf),
            (30, 0, nan),
        ):
            tensor[..., at, column] = bad
    of_pairs = numbers(LENGTH, LENGTH).masked_fill(~allowed, nan)
    of_pairs[3, allowed[3].nonzero()[0]] = nan
    sink_bias = numbers(HEADS) if sinks else None
    return Given(
        query, key, bias if spoilt else None, MASKS[mask][0], allowed, sink_bias, value, operand,
        of_pairs,
    )  # fmt: skip


# The definition: the oracle in float64.


@cache
def defined(mask: str, sinks: bool = False, plain: bool = False) -> oracle.Dense:
    """The matrix of `given`, or as often its finite entry."""
    x = given(mask, sinks)
    assert x.bias is not None
    parts = (x.query.double(), x.key.double(), x.bias.double())
    if plain:
        parts = tuple(tensor[:1].expand_as(tensor) for tensor in parts)
    query, key, bias = parts
    sink_bias = oracle.double(x.sink_bias)
    return oracle.attend(query, key, allowed=x.allowed, bias=bias, sink_bias=sink_bias)


def log_weights(d: oracle.Dense) -> Tensor:
    shifted = d.scores - oracle.logsumexp(d)[..., None]
    shifted = torch.where(d.masked, -inf, shifted)
    return torch.where(d.undefined[..., None], nan, shifted)


def cross_entropy(d: oracle.Dense, other: oracle.Dense) -> Tensor:
    terms = torch.where(d.masked, 0.0, -d.weights * log_weights(other))
    return torch.where(d.undefined | other.undefined, nan, terms.sum(-1))


def kl(d: oracle.Dense, other: oracle.Dense) -> Tensor:
    own = torch.where(d.masked, 0.0, d.weights * log_weights(d)).sum(-1)
    return own + cross_entropy(d, other)


def js(d: oracle.Dense, other: oracle.Dense) -> Tensor:
    mean = (d.weights + other.weights) / 2
    both = [torch.special.entr(x).sum(-1) for x in (mean, d.weights, other.weights)]
    found = both[0] - (both[1] + both[2]) / 2
    return torch.where(d.undefined | other.undefined, nan, found)


def rolled(d: oracle.Dense, x: Tensor, *, transposed: bool) -> Tensor:
    """Two equal layers with a residual of one half."""
    scores = torch.where(d.masked.all(1), -inf, 0.0)  # only to tell what is masked for every head
    layer = oracle.Dense(scores, d.weights.mean(1))
    times = oracle.transposed_product if transposed else oracle.product
    for _ in range(2):
        x = (x + times(layer, x)) / 2
    return x


# The questions.


Exact: TypeAlias = "Callable[[oracle.Dense, Given, oracle.Dense], Tensor | oracle.Top]"
"""The answer in float64, from the matrix, what is asked with, and the finite matrix."""


class OfReduction(NamedTuple):
    """A question that is a reduction, which any backend may answer."""

    make: Callable[[Given], regard.Reduction]
    exact: Exact


class OfMatrix(NamedTuple):
    """A question that is no reduction of the matrix."""

    ask: Callable[[Given, regard.AttentionMatrix], object]
    exact: Exact


def layers(A: regard.AttentionMatrix) -> regard.Rollout:
    return regard.rollout([A, A])


ASKED: dict[str, OfReduction | OfMatrix] = {
    "logsumexp": OfReduction(lambda _: regard.LogSumExp(), lambda d, *_: oracle.logsumexp(d)),
    "max-score": OfReduction(lambda _: regard.MaxScore(), lambda d, *_: oracle.max_score(d)),
    "entropy": OfReduction(lambda _: regard.Entropy(), lambda d, *_: oracle.entropy(d)),
    "topk": OfReduction(lambda _: regard.TopK(3), lambda d, *_: oracle.topk(d, 3)),
    "topk-all": OfReduction(lambda _: regard.TopK(LENGTH), lambda d, *_: oracle.topk(d, LENGTH)),
    "topk-1": OfReduction(lambda _: regard.TopK(1), lambda d, *_: oracle.topk(d, 1)),
    "max": OfMatrix(
        lambda _, A: A.max(),
        lambda d, *_: oracle.Top(*(part[..., 0] for part in oracle.topk(d, 1))),
    ),
    "sum-keys": OfReduction(lambda _: regard.Sum(-1), lambda d, *_: d.weights.sum(-1)),
    "sum-queries": OfReduction(lambda _: regard.Sum(-2), lambda d, *_: d.weights.sum(-2)),
    "pool": OfReduction(lambda _: regard.Pool(5, 8), lambda d, *_: oracle.pool(d, 5, 8)),
    "pool-even": OfReduction(lambda _: regard.Pool(37, 1), lambda d, *_: oracle.pool(d, 37, 1)),
    "segments": OfReduction(
        lambda _: regard.Segments(SPANS), lambda d, *_: oracle.segments(d, SPANS, SPANS)
    ),
    "diagonal": OfReduction(lambda _: regard.Diagonal(-1), lambda d, *_: oracle.diagonal(d, -1)),
    "window": OfReduction(
        lambda _: WeightTile(range(2, 20), range(5, 30)), lambda d, *_: d.weights[..., 2:20, 5:30]
    ),
    "output": OfReduction(
        lambda x: regard.Output(x.value), lambda d, x, _: oracle.product(d, x.value.double())
    ),
    "transposed-output": OfReduction(
        lambda x: TransposedOutput(x.operand),
        lambda d, x, _: oracle.transposed_product(d, x.operand.double()),
    ),
    "weighted-sum": OfReduction(
        lambda x: WeightedSum(x.numbers),
        lambda d, x, _: torch.where(d.masked, 0.0, d.weights * x.numbers).sum(-1),
    ),
    "kl": OfReduction(
        lambda x: KullbackLeibler(x.plain.source, x.plain.mask), lambda d, _, p: kl(d, p)
    ),
    "cross-entropy": OfMatrix(
        lambda x, A: regard.cross_entropy(A, x.plain), lambda d, _, p: cross_entropy(d, p)
    ),
    "js": OfReduction(
        lambda x: JensenShannon(x.plain.source, x.plain.mask), lambda d, _, p: js(d, p)
    ),
    "kl-from": OfMatrix(lambda x, A: regard.kl(x.plain, A), lambda d, _, p: kl(p, d)),
    "js-from": OfMatrix(lambda x, A: regard.js(x.plain, A), lambda d, _, p: js(p, d)),
    "row": OfMatrix(lambda _, A: A[..., BAD, :], lambda d, *_: d.weights[..., BAD, :]),
    "column": OfMatrix(lambda _, A: A[..., 5], lambda d, *_: d.weights[..., 5]),
    "rows-and-columns": OfMatrix(
        lambda _, A: A[..., ::3, 1::2], lambda d, *_: d.weights[..., ::3, 1::2]
    ),
    "scores": OfMatrix(lambda _, A: A.scores[..., :], lambda d, *_: d.scores),
    "to-dense": OfMatrix(lambda _, A: A.to_dense(), lambda d, *_: d.weights),
    "matmul": OfMatrix(
        lambda x, A: A @ x.value, lambda d, x, _: oracle.product(d, x.value.double())
    ),
    "transposed": OfMatrix(
        lambda x, A: A.T @ x.operand,
        lambda d, x, _: oracle.transposed_product(d, x.operand.double()),
    ),
    "rollout": OfMatrix(
        lambda x, A: layers(A) @ x.value[:, 0],
        lambda d, x, _: rolled(d, x.value[:, 0].double(), transposed=False),
    ),
    "rollout-transposed": OfMatrix(
        lambda x, A: layers(A).T @ x.operand[:, 0],
        lambda d, x, _: rolled(d, x.operand[:, 0].double(), transposed=True),
    ),
}
REDUCTIONS = [name for name, question in ASKED.items() if isinstance(question, OfReduction)]


def differing(
    names: Iterable[str],
    mask: str,
    backend: str | None,
    *,
    sinks: bool = False,
    spoilt: bool = True,
) -> list[str]:
    """Return the questions, with the kinds, whose answers differ from the definition.

    Args:
        names: of questions, each of which is asked by itself.
        mask: one of MASKS.
        backend: that answers the reductions; None: the default.
        sinks: whether each head has a sink_bias.
        spoilt: whether the scores have bad numbers.
    """
    x = given(mask, sinks, spoilt)
    d, plain = defined(mask, sinks, not spoilt), defined(mask, sinks, plain=True)
    wrong: list[str] = []
    for name in names:
        asked = ASKED[name]
        if isinstance(asked, OfMatrix):
            found = asked.ask(x, x.matrix)
        else:
            found = x.matrix.reduce(asked.make(x), backend=backend)
        wrong += _wrong(name, found, asked.exact(d, x, plain))
    return wrong


def differing_on(
    device: torch.device, names: Sequence[str], mask: str, backend: str, *, sinks: bool = False
) -> list[str]:
    """The same on a device, where one pass answers all questions and operands are finite."""
    x = given(mask, sinks).finite()
    d, plain = defined(mask, sinks), defined(mask, sinks, plain=True)
    asked = [ASKED[name] for name in names]
    assert all(isinstance(each, OfReduction) for each in asked)
    there = x.to(device)
    answers = there.matrix.reduce(*(each.make(there) for each in asked), backend=backend)
    found = zip(names, answers, (each.exact(d, x, plain) for each in asked), strict=True)
    return [text for each in found for text in _wrong(*each)]


def _wrong(name: str, found: object, exact: Tensor | oracle.Top) -> list[str]:
    if isinstance(exact, Tensor):
        kinds = _differing(found, exact)
    else:
        assert isinstance(found, regard.Top)
        kinds = _differing(found.values, exact.values)
        kinds += _differing((found.indices == -1).float(), (exact.indices == -1).float())
    return [f"{name}: {', '.join(kinds)}"] if kinds else []


def _differing(found: object, exact: Tensor) -> list[str]:
    """The kinds of bad number for which an answer differs; NaN equals NaN."""
    assert isinstance(found, Tensor)
    assert found.shape == exact.shape
    pairs = zip(KINDS, found.cpu().double(), exact.double(), strict=True)
    return [
        kind
        for kind, mine, right in pairs
        if not torch.allclose(mine, right, rtol=1e-5, atol=1e-5, equal_nan=True)
    ]
