"""One table of cases, and one of questions, that the tests of the core run over.

A new reduction is one line in QUESTIONS; a new kind of input is one line in CASES.
"""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

import oracle
import regard
from mask_kinds import MASKS, SQUARE_TOO
from regard.reductions.products import TransposedOutput, WeightTile
from score_steps import POSITION_SHAPES, POSITIONS, SCORE_MODS


class Inputs(NamedTuple):
    """What a case gives: the operands of attention, and of products with the matrix."""

    query: Tensor
    key: Tensor
    bias: Tensor | None
    value: Tensor
    operand: Tensor
    positions: Tensor | None = None
    sink_bias: Tensor | None = None

    @property
    def of_scores(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What the matrix is made of."""
        return self.query, self.key, self.bias, self.positions, self.sink_bias

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        leading = torch.broadcast_shapes(self.query.shape[:-3], self.key.shape[:-3])
        return torch.Size((*leading, *self.query.shape[-3:-1], self.key.shape[-2]))


@dataclass(frozen=True)
class Case:
    """One kind of attention matrix.

    Attributes:
        name: its id.
        why: what would be missed without it.
        query: shape of the query.
        key: shape of the key; the value has its tokens and heads.
        value: leading axes of the value where they are not the key's.
        value_dim: width of the value.
        mask: one of MASKS.
        bias: shape of a bias.
        positions: one of POSITIONS.
        score_mod: one of SCORE_MODS.
        sinks: whether each head has a sink_bias.
        sharp: what the query is multiplied with: 30 puts nearly all weight on one key.
    """

    name: str
    why: str
    query: tuple[int, ...] = (2, 4, 13, 5)
    key: tuple[int, ...] = (2, 4, 13, 5)
    value: tuple[int, ...] | None = None
    value_dim: int = 5
    mask: str = "none"
    bias: tuple[int, ...] | None = None
    positions: str | None = None
    score_mod: str | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    sharp: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def inputs(self) -> Inputs:
        """Normal random numbers in the case's dtype, the same every time."""
        return _inputs(self)

    @property
    def allowed(self) -> Tensor | None:
        """Which keys may be attended to, by the oracle."""
        return MASKS[self.mask][1](self.inputs.shape)

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        sink_bias: Tensor | None = None,
    ) -> regard.AttentionMatrix:
        """The attention matrix of these inputs, with the case's mask and options."""
        shape = self.inputs.shape
        return regard.attend(
            query,
            key,
            mask=MASKS[self.mask][0](shape),
            scale=self.scale,
            bias=POSITIONS[self.positions][0](positions) if self.positions else bias,
            score_mod=SCORE_MODS[self.score_mod][0](shape) if self.score_mod else None,
            softcap=self.softcap,
            sink_bias=sink_bias,
        )

    def dense(
        self,
        query: Tensor,
        key: Tensor,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        sink_bias: Tensor | None = None,
    ) -> oracle.Dense:
        """The same by the oracle's definition, in the dtype of the inputs."""
        return oracle.attend(
            query,
            key,
            allowed=self.allowed,
            scale=self.scale,
            bias=self._numbers_added(bias, positions),
            score_mod=SCORE_MODS[self.score_mod][1] if self.score_mod else None,
            softcap=self.softcap,
            sink_bias=sink_bias,
        )

    @property
    def largest_score(self) -> float:
        """A bound on the scores: the longest query times the longest key, and what is added."""
        query, key, bias, positions, _ = self.inputs.of_scores
        bias = self._numbers_added(bias, positions)
        scale = self.query[-1] ** -0.5 if self.scale is None else abs(self.scale)
        product = query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max() * scale
        return float(product + (0 if bias is None else oracle.largest(bias)))

    def _numbers_added(self, bias: Tensor | None, positions: Tensor | None) -> Tensor | None:
        """The bias of this case as a tensor, by the oracle."""
        if self.positions is None:
            return bias
        numbers = POSITIONS[self.positions][1](positions, self.inputs.shape)
        return numbers if len(self.query) > 2 else numbers[0]


@cache
def _inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    value = case.key[:-2] if case.value is None else case.value
    num_heads = case.query[-3] if len(case.query) > 2 else 1
    return Inputs(
        (normal(*case.query) * case.sharp).to(case.dtype),
        normal(*case.key),
        None if case.bias is None else normal(*case.bias),
        normal(*value, case.key[-2], case.value_dim),
        normal(*case.query[:-1], 3),
        None if case.positions is None else normal(*POSITION_SHAPES[case.positions], num_heads),
        normal(num_heads) if case.sinks else None,
    )


GROUPED = {"query": (2, 6, 7, 4), "key": (2, 2, 7, 4)}
SHAPES = [
    Case("tokens-dim", "the notebooks' case: no batch, no heads", (7, 3), (7, 3)),
    Case("one-number", "every axis is 1", (1, 1, 1, 1), (1, 1, 1, 1), value_dim=1),
    Case("one-query", "decoding: one query, many keys", (2, 3, 1, 5), (2, 3, 17, 5)),
    Case("one-key", "every weight is 1", (2, 3, 7, 5), (2, 3, 1, 5)),
    Case("no-batch", "heads without a batch", (3, 11, 5), (3, 11, 5)),
    Case("primes", "no axis divides another", (3, 5, 13, 7), (3, 5, 11, 7), value_dim=2),
    Case("more-keys", "a KV cache", (2, 3, 5, 4), (2, 3, 19, 4), mask="causal"),
    Case("more-queries", "some queries see nothing", (2, 3, 19, 4), (2, 3, 5, 4), mask="causal"),
    Case("two-batch-axes", "leading axes of any number", (2, 3, 2, 5, 4), (2, 3, 2, 5, 4)),
    Case(
        "broadcast-batch",
        "batch axes of 1",
        (1, 3, 2, 5, 4),
        (2, 1, 2, 5, 4),
    ),
    Case("wide-value", "value_dim larger than head_dim", value_dim=17),
    Case("narrow-value", "value_dim smaller than head_dim", value_dim=1),
    Case("plain-value", "one value matrix for every batch and head", value=()),
    Case("grouped", "three query heads share a key head", **GROUPED),
    Case("large-groups", "blocks of heads cut groups", (1, 10, 3, 2), (1, 2, 3, 2)),
    Case("one-kv-head", "multi-query attention", (2, 5, 7, 4), (2, 1, 7, 4)),
    Case("grouped-no-batch", "groups without a batch", (6, 7, 4), (3, 7, 4), mask="causal"),
    Case(
        "value-grouped",
        "value heads in larger groups",
        (2, 6, 7, 4),
        (2, 6, 7, 4),
        value=(2, 2),
    ),
    Case("key-grouped", "a value for each query head, keys in groups", **GROUPED, value=(2, 6)),
]
MASKED = [
    replace(case, name=f"{name}-{mask}", why=f"{mask} on {why}", mask=mask)
    for mask in MASKS
    if mask != "none"
    for name, why, case in [
        ("square", "as many keys as queries", Case("", "")),
        ("grouped", "grouped heads and more keys", Case("", "", (3, 4, 6, 3), (3, 2, 11, 3))),
    ]
    if mask in SQUARE_TOO or name == "grouped"
]
NUMBERS = [
    replace(case, name=f"{case.name}-{str(dtype).removeprefix('torch.')}", dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for case in [
        Case("plain", "this dtype"),
        Case("sharp", "nearly all weight on one key", sharp=30.0, mask="causal"),
        Case("flat", "all scores nearly equal", sharp=1e-4, **GROUPED),
        Case("empty-rows", "rows with nothing to attend to", mask="keep-pairs"),
        Case("bias", "numbers added to the scores", bias=(2, 4, 13, 13)),
    ]
]
SCORES = [
    Case("scale-one", "no scaling", scale=1.0),
    Case("scale-zero", "every score is the same", scale=0.0, mask="causal"),
    Case("scale-negative", "the order of the keys turned round", scale=-0.5, mask="causal"),
    Case("bias-keys", "a bias for each key", bias=(13,), mask="causal"),
    Case("bias-heads", "a bias for each head and distance", bias=(4, 13, 13)),
    Case("bias-batch", "a bias for each sequence", bias=(2, 1, 1, 13), mask="padding"),
    Case("bias-queries", "a bias that changes no weight", bias=(13, 1)),
    Case("alibi", "slopes of any sign", positions="alibi", mask="causal"),
    Case(
        "alibi-grouped",
        "grouped heads, more queries than keys",
        (2, 6, 17, 4),
        (2, 2, 7, 4),
        positions="alibi",
    ),
    Case("t5", "buckets on both sides", (2, 3, 13, 4), (2, 3, 19, 4), positions="t5"),
    Case("t5-decoder", "one head without an axis", (17, 3), (23, 3), positions="t5-decoder"),
    Case("score-mod", "each score by where it stands", score_mod="by-index", mask="causal"),
    Case("score-mod-table", "numbers looked up, grouped heads", **GROUPED, score_mod="table"),
    Case("softcap", "scores well beyond the cap", sharp=9.0, softcap=3.0, mask="causal"),
    Case("sinks", "rows sum to less than 1", sinks=True, mask="causal"),
    Case("sinks-empty-rows", "rows with nothing but the sink", sinks=True, mask="keep-pairs"),
    Case(
        "sinks-window",
        "gpt-oss: grouped heads, a window",
        (2, 6, 13, 4),
        (2, 2, 17, 4),
        sinks=True,
        mask="window-left",
    ),
    Case(
        "all-steps",
        "the order of the steps",
        **GROUPED,
        positions="t5",
        score_mod="table",
        softcap=2.0,
        sinks=True,
        mask="padding",
        scale=2.0,
    ),
    Case(
        "all-steps-bfloat16",
        "the steps in float32",
        (2, 4, 13, 5),
        (2, 2, 17, 5),
        positions="alibi",
        score_mod="by-index",
        softcap=5.0,
        sinks=True,
        mask="causal",
        dtype=torch.bfloat16,
    ),
    Case(
        "long",
        "many blocks of rows",
        (1, 2, 67, 3),
        (1, 1, 71, 3),
        mask="causal",
    ),
]
MANY = [
    Case("many-keys", "enough keys for the search in groups", (1, 2, 5, 3), (1, 2, 421, 3)),
    Case(
        "many-masked-keys",
        "groups of keys that are all masked",
        (1, 2, 150, 3),
        (1, 2, 311, 3),
        mask="causal-and-padding",
    ),
    Case("many-ties", "every key ties", (3, 2), (300, 2), scale=0.0, mask="bool-keys"),
]
CASES = [*SHAPES, *MASKED, *NUMBERS, *SCORES, *MANY]


# Each question is also asked alone on these: they differ in what a block of rows computes.
CHOSEN = [
    case
    for case in CASES
    if case.name
    in {
        "tokens-dim",
        "more-queries",
        "broadcast-batch",
        "value-grouped",
        "grouped-causal-and-padding",
        "sharp-float16",
        "plain-bfloat16",
        "empty-rows-float64",
        "all-steps",
        "sinks-empty-rows",
        "many-masked-keys",
    }
]


def parametrised(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def by_name(cases: Sequence[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}


def full_but(options: Mapping[str, Any], *quick: str) -> list[ParameterSet]:
    """The options as parameters; only the named ones run in `make test`."""
    assert options.keys() >= set(quick), set(quick) - options.keys()
    return [
        pytest.param(option, id=name, marks=() if name in quick else pytest.mark.full)
        for name, option in options.items()
    ]


def in_turn(**axes: Mapping[str, Any] | Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise by the product of the axes; mark as full what is not needed to meet every value.

    The first axis should be the longest: each of its values meets one value of every other axis,
    the next one in turn. All other combinations run in `make test-all` alone.
    """
    pairs = [
        list(axis.items()) if isinstance(axis, Mapping) else [(str(value), value) for value in axis]
        for axis in axes.values()
    ]
    first, *others = (range(len(axis)) for axis in pairs)
    parameters: list[ParameterSet] = []
    for start, *places in itertools.product(first, *others):
        # Each further axis turns one step more for every round of the axis before it.
        turn, wanted = start, []
        for axis in others:
            wanted.append(turn % len(axis))
            turn += turn // len(axis)
        chosen = [axis[place] for axis, place in zip(pairs, (start, *places), strict=True)]
        parameters.append(
            pytest.param(
                *(value for _, value in chosen),
                id="-".join(name for name, _ in chosen),
                marks=() if places == wanted else pytest.mark.full,
            )
        )
    return pytest.mark.parametrize(tuple(axes), parameters)


@dataclass(frozen=True)
class Question:
    """One thing to ask of a matrix, and the oracle's way to answer it.

    Attributes:
        ask: the reduction.
        exact: the answer from the dense matrix.
        differentiable: the same for gradients, where that is another expression.
        kind: "statistic" (float32 at least), "sum" (the same, of many numbers), "nats" (the same,
            with the error of a score in it) or "product" (in the dtype of the inputs).
    """

    ask: Callable[[Inputs], regard.Reduction]
    exact: Callable[[oracle.Dense, Inputs], Tensor | oracle.Top]
    differentiable: Callable[[oracle.Dense, Inputs], Tensor] | None = None
    kind: str = "statistic"

    def allowed_error(
        self, exact: Tensor, plain: Tensor, *, dtype: torch.dtype, scores: float
    ) -> float:
        """The budget of an answer: see oracle.allowed_error."""
        return oracle.allowed_error(
            exact,
            plain,
            dtype=dtype,
            scores=scores,
            unit=1.0 if self.kind == "nats" else None,
            roundings=oracle.SUM_ROUNDINGS if self.kind == "sum" else 1,
        )

    def promised_error(self, exact: Tensor) -> float:
        """The error that design.md promises in float32 for scores of ordinary size."""
        sizes = {"nats": 1.0, "sum": oracle.largest(exact)}
        return 1e-5 * sizes.get(self.kind, torch.inf)


def _spans(length: int) -> list[tuple[int, int]]:
    """The whole, one token, and two that overlap."""
    return [
        (0, length),
        (length // 2, length // 2 + 1),
        (0, (length + 1) // 2),
        (length // 3, length),
    ]


def _k(inputs: Inputs, wanted: int) -> int:
    return min(wanted, inputs.shape[-1])


def _every_third(length: int) -> range:
    return range(length)[length // 5 :: 3]


QUESTIONS: dict[str, Question] = {
    "logsumexp": Question(
        lambda _: regard.LogSumExp(), lambda d, _: oracle.logsumexp(d), kind="nats"
    ),
    "max-score": Question(
        lambda _: regard.MaxScore(),
        lambda d, _: oracle.max_score(d),
        kind="nats",
    ),
    "entropy": Question(
        lambda _: regard.Entropy(),
        lambda d, _: oracle.entropy(d),
        lambda d, _: oracle.entropy_from_scores(d),
        kind="nats",
    ),
    "top-1": Question(lambda _: regard.TopK(1), lambda d, _: oracle.topk(d, 1)),
    "top-3": Question(lambda x: regard.TopK(_k(x, 3)), lambda d, x: oracle.topk(d, _k(x, 3))),
    "top-all": Question(
        lambda x: regard.TopK(x.shape[-1]), lambda d, x: oracle.topk(d, x.shape[-1])
    ),
    "sum-keys": Question(lambda _: regard.Sum(-1), lambda d, _: d.weights.sum(-1), kind="sum"),
    "sum-queries": Question(lambda _: regard.Sum(-2), lambda d, _: d.weights.sum(-2), kind="sum"),
    "pool-3x4": Question(
        lambda _: regard.Pool(3, 4), lambda d, _: oracle.pool(d, 3, 4), kind="sum"
    ),
    "pool-one-cell": Question(
        lambda _: regard.Pool(1, 1), lambda d, _: oracle.pool(d, 1, 1), kind="sum"
    ),
    "pool-beyond": Question(lambda _: regard.Pool(999, 999), lambda d, _: d.weights),
    "segments": Question(
        lambda x: regard.Segments(_spans(x.shape[-2]), _spans(x.shape[-1])),
        lambda d, x: oracle.segments(d, _spans(x.shape[-2]), _spans(x.shape[-1])),
        kind="sum",
    ),
    "diagonal": Question(lambda _: regard.Diagonal(), lambda d, _: oracle.diagonal(d, 0)),
    "diagonal-previous": Question(
        lambda _: regard.Diagonal(-1), lambda d, _: oracle.diagonal(d, -1)
    ),
    "diagonal-above": Question(lambda _: regard.Diagonal(3), lambda d, _: oracle.diagonal(d, 3)),
    "window": Question(
        lambda x: WeightTile(_every_third(x.shape[-2]), _every_third(x.shape[-1])),
        lambda d, x: d.weights[..., x.shape[-2] // 5 :: 3, x.shape[-1] // 5 :: 3],
    ),
    "output": Question(
        lambda x: regard.Output(x.value), lambda d, x: oracle.product(d, x.value), kind="product"
    ),
    "transposed-output": Question(
        lambda x: TransposedOutput(x.operand),
        lambda d, x: oracle.transposed_product(d, x.operand),
        kind="product",
    ),
}
