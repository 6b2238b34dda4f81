"""The attention matrix: what it is, a part of it, products; no method computes."""

from typing import Any, cast

import torch
from torch import Tensor

from regard.backends.choose import choose
from regard.errors import (
    DENSE_LIMIT,
    check_bias,
    check_memory,
    check_nothing_added,
    check_product,
    check_query_key,
    check_scale,
    check_scores,
    check_sink_bias,
    check_softcap,
    check_weights,
    dtype_text,
    kind_text,
)
from regard.masks import Mask, as_mask
from regard.masks.mask import MaskLike
from regard.matrix.indexing import ParsedIndex, parse_index
from regard.matrix.linear_map import LinearMap, times_batches
from regard.matrix.notebook_hook import notebook_bundle
from regard.reductions.products import (
    Output,
    TransposedOutput,
    Window,
    scores_at,
)
from regard.reductions.reduction import Reduction, check_reductions
from regard.reductions.row_statistics import Entropy, LogSumExp
from regard.reductions.sums import Diagonal, Pool, Segments, Sum
from regard.reductions.top_k import Max, Top, TopK
from regard.scores.box import Index, broadcast_index
from regard.scores.given_scores import GivenScores
from regard.scores.position_bias import Bias
from regard.scores.query_key import QueryKeyScores, ScoreMod, as_score_mod
from regard.scores.score_source import Scores

__all__ = ["AttentionMatrix", "ScoreMatrix", "attend", "check_attention_matrix"]


def attend(
    query: Tensor,
    key: Tensor,
    *,
    mask: "MaskLike | None" = None,
    scale: float | None = None,
    bias: Tensor | Bias | None = None,
    score_mod: ScoreMod | None = None,
    softcap: float | None = None,
    sink_bias: Tensor | None = None,
) -> "AttentionMatrix":
    """The attention matrix softmax(scale · query·keyᵀ + bias, masked); nothing is computed yet.

    The scores are made in this order: scale · query·key, plus bias, then score_mod, then softcap,
    then mask.

    Args:
        query: (..., num_heads, q_len, head_dim), or (q_len, head_dim) for one head. float16,
            bfloat16, float32 or float64.
        key: (..., num_kv_heads, kv_len, head_dim). num_heads must be a multiple of num_kv_heads
            (grouped-query attention); batch axes are equal or 1.
        mask: one of ``regard.masks``; a bool tensor that broadcasts to
            (..., num_heads, q_len, kv_len) in which True means *may attend*; or FlexAttention's
            mask_mod(b, h, q_idx, kv_idx) -> bool, or its BlockMask.
        scale: multiplies query·key; 1/sqrt(head_dim) when left out.
        bias: numbers added to the scaled scores: a tensor that broadcasts to
            (..., num_heads, q_len, kv_len), or a position bias, ``regard.ALiBi`` or
            ``regard.T5Bias``.
        score_mod: a callable of FlexAttention, score_mod(score, b, h, q_idx, kv_idx) -> score,
            written for one score: every argument is a scalar tensor, which ``torch.vmap`` runs over
            blocks. b counts through all batch axes. Gradients flow to the score, not to tensors
            that the callable uses; one that requires a gradient is an error.
        softcap: replaces each score by softcap · tanh(score / softcap), as Gemma 2 does.
        sink_bias: (num_heads,), or one number for all heads: a logit in the denominator of the
            softmax beside the keys' scores, as in gpt-oss, so that a row sums to less than 1.

    Returns:
        The matrix, (..., num_heads, q_len, kv_len): a query attends *to* keys, rows are queries.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: shapes or devices that do not fit.

    Example:
        >>> import torch, regard
        >>> query = key = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> A = regard.attend(query, key, scale=1.0)
        >>> A[0]
        tensor([0.7311, 0.2689])
        >>> A @ torch.tensor([[10.0], [20.0]])
        tensor([[12.6894],
                [17.3106]])

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", equation 1.
    """
    query, key = check_query_key(query, key)
    # The sizes are equal or 1 by now; torch.broadcast_shapes would import half a computer algebra.
    sizes = zip(query.shape[:-3], key.shape[:-3], strict=True)
    batch = [of_key if of_query == 1 else of_query for of_query, of_key in sizes]
    query = query.expand(*batch, *query.shape[-3:])
    key = key.expand(*batch, *key.shape[-3:])
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    factor = check_scale(scale, query.shape[-1])
    position_bias = bias.bind(shape, query.device) if isinstance(bias, Bias) else None
    source = QueryKeyScores(
        query,
        key,
        factor,
        check_bias(bias, shape, query) if position_bias is None else None,
        position_bias,
        as_score_mod(score_mod, shape, query),
        check_softcap(softcap),
        check_sink_bias(sink_bias, shape, query),
    )
    return AttentionMatrix(source, _bound(mask, source))


class AttentionMatrix(LinearMap):
    """An attention matrix that is never formed: it knows what it is and answers when asked.

    It behaves as a tensor of shape (..., num_heads, q_len, kv_len) would: index it, multiply it,
    reduce it. Leading indices give a smaller attention matrix; indices of rows or columns give an
    ordinary tensor of weights. Every answer is exact and differentiable and takes memory that
    grows with the length, not with its square.

    Make one with ``regard.attend``, ``AttentionMatrix.from_scores`` or
    ``AttentionMatrix.from_weights``.

    Attributes:
        source: where its scores come from.
        mask: which keys a query may attend to, fitted to its shape, drawn when it is small;
            None: all.

    Example:
        >>> import torch, regard
        >>> A = regard.attend(torch.randn(2, 8, 100, 64), torch.randn(2, 8, 100, 64))
        >>> A[0, 3].shape, A[0, 3, 99].shape, A.entropy().shape
        (torch.Size([100, 100]), torch.Size([100]), torch.Size([2, 8, 100]))
    """

    def __init__(self, source: Scores, mask: Mask | None = None) -> None:
        self.source = source
        self.mask = None if mask is None else mask.of_matrix(source.shape, source.device)

    @classmethod
    def from_scores(cls, scores: Tensor, *, mask: "MaskLike | None" = None) -> "AttentionMatrix":
        """The attention matrix softmax(scores, masked) of scores that are given.

        Args:
            scores: (..., num_heads, q_len, kv_len) or (q_len, kv_len); -inf is a masked key.
            mask: as in ``regard.attend``.

        Raises:
            TypeError: scores are no floating tensor.
            ValueError: fewer than two axes, or an empty one.

        Example:
            >>> import torch, regard
            >>> regard.AttentionMatrix.from_scores(torch.tensor([[13.0, 9.0, 9.0]]))[0]
            tensor([0.9647, 0.0177, 0.0177])
        """
        source = GivenScores(check_scores(scores))
        return cls(source, _bound(mask, source))

    @classmethod
    def from_weights(
        cls, weights: Tensor, *, mask: None = None, bias: None = None
    ) -> "AttentionMatrix":
        """The attention matrix of weights that some tool computed already.

        Its scores are log(weights), so that the softmax gives the weights back.

        Args:
            weights: (..., num_heads, q_len, kv_len) or (q_len, kv_len); nothing below 0, each row
                sums to 1 or is all 0.
            mask: weights are masked already: take ``from_scores(weights.log(), mask=...)``.
            bias: weights are biased already: take ``from_scores(weights.log() + bias)``.

        Raises:
            TypeError: weights are no floating tensor, or come with a mask or bias.
            ValueError: a row sums to something else; the first one is named.

        Example:
            >>> import torch, regard
            >>> A = regard.AttentionMatrix.from_weights(torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
            >>> A.max().values
            tensor([0.7500, 1.0000])
        """
        check_nothing_added(mask, bias)
        return cls(GivenScores(check_weights(weights), are_weights=True))

    @property
    def shape(self) -> torch.Size:
        """(..., num_heads, q_len, kv_len)."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its inputs, and of products and parts; statistics have at least float32."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """Where its inputs are and answers will be."""
        return self.source.device

    @property
    def scores(self) -> "ScoreMatrix":
        """The numbers before the softmax; index it to see them."""
        return ScoreMatrix(self)

    def __getitem__(self, key: Any) -> Any:
        """A part: an AttentionMatrix where all rows and columns are kept, else a tensor.

        Rows and columns are kept where nothing or ``:`` is written for them. A range gives a tensor
        of weights also where it happens to hold every row.
        """
        asked = parse_index(key, self.shape)
        part = self._select(asked.leading)
        if asked.whole:
            return part
        _check_size("this part", part, asked, DENSE_LIMIT)
        return part._window(asked)

    def reduce(self, *reductions: Reduction, backend: str | None = None) -> Any:
        """The answers to several questions in one pass over the matrix.

        Args:
            reductions: what to ask: ``regard.TopK(8)``, ``regard.Entropy()``, your own.
            backend: "fused", "triton", "blocks" or "dense" (float64, forms the matrix); the fastest
                exact one is chosen when left out.

        Returns:
            One answer for one reduction, a tuple of them for several.

        Raises:
            TypeError: an argument that is no reduction.
            ValueError: no reductions, or one that does not fit the matrix.

        Example:
            >>> import torch, regard
            >>> A = regard.attend(torch.zeros(4, 2), torch.zeros(4, 2))
            >>> top, entropy = A.reduce(regard.TopK(2), regard.Entropy())
            >>> top.indices[0].tolist(), entropy[0].item()
            ([0, 1], 1.3862943649291992)
        """
        if not reductions:
            raise ValueError(
                "reduce() has no reductions; it needs at least one.\n"
                "    Pass for example regard.Entropy(), regard.TopK(8)."
            )
        check_reductions("reduce()", reductions)
        chosen = choose(self.source, self.mask, reductions, backend)
        answers = chosen.reduce(self.source, self.mask, reductions)
        return answers[0] if len(answers) == 1 else answers

    def logsumexp(self) -> Tensor:
        """The logsumexp of each row of scores, (..., num_heads, q_len); see ``LogSumExp``."""
        return cast(Tensor, self.reduce(LogSumExp()))

    def entropy(self) -> Tensor:
        """The entropy of each row in nats, (..., num_heads, q_len); see ``Entropy``."""
        return cast(Tensor, self.reduce(Entropy()))

    def topk(self, k: int) -> Top:
        """The k largest weights of each row and their keys; see ``TopK``."""
        return cast(Top, self.reduce(TopK(k)))

    def max(self) -> Top:
        """The largest weight of each row and its key; see ``Max``."""
        return cast(Top, self.reduce(Max()))

    def sum(self, dim: int) -> Tensor:
        """The sum over the keys (dim=-1) or over the queries (dim=-2); see ``Sum``."""
        return cast(Tensor, self.reduce(Sum(dim)))

    def pool(self, rows: int, columns: int) -> Tensor:
        """The mean weight in each cell of at most rows x columns; see ``Pool``."""
        return cast(Tensor, self.reduce(Pool(rows, columns)))

    def segments(self, query_spans: Any, key_spans: Any = None) -> Tensor:
        """How much spans of queries attend to spans of keys; see ``Segments``."""
        return cast(Tensor, self.reduce(Segments(query_spans, key_spans)))

    def diagonal(self, offset: int = 0) -> Tensor:
        """The weights A[i, i + offset]; see ``Diagonal``."""
        return cast(Tensor, self.reduce(Diagonal(offset)))

    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        """The whole matrix as a tensor, by name only: it takes q_len x kv_len numbers a head.

        Args:
            limit: the most bytes it may take, 4 GiB unless given; None is no limit.

        Raises:
            MemoryError: it would take more; the message says how much.

        Example:
            >>> import torch, regard
            >>> regard.attend(torch.zeros(1, 2), torch.zeros(4, 2)).to_dense()
            tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
        """
        whole = parse_index(..., self.shape)
        _check_size("to_dense()", self, whole, limit)
        return self._window(whole)

    def to(self, *args: Any, **kwargs: Any) -> "AttentionMatrix":
        """The matrix of its inputs on another device or of another dtype, as ``Tensor.to``.

        Raises:
            TypeError: a dtype that is not floating.
        """
        source = self.source.map(lambda tensor: tensor.to(*args, **kwargs))
        if not source.dtype.is_floating_point:
            raise TypeError(
                f"to() has {dtype_text(source.dtype)}; attention needs a floating dtype.\n"
                "    Use to_dense().to(...) for a tensor of another kind."
            )
        mask = self.mask
        if mask is not None:
            mask = mask.map(lambda tensor: tensor.to(source.device))
        return AttentionMatrix(source, mask)

    def detach(self) -> "AttentionMatrix":
        """The matrix of the detached inputs: no gradient flows back through it."""
        return AttentionMatrix(self.source.map(Tensor.detach), self.mask)

    def __repr__(self) -> str:
        """What it is, without computing it."""
        batch, inner = tuple(self.shape[:-3]), self.shape[-3:]
        names = ("num_heads", "q_len", "kv_len")[-len(inner) :]
        facts = [f"batch={batch[0] if len(batch) == 1 else batch}"] if batch else []
        facts += [f"{name}={n}" for name, n in zip(names, inner, strict=True)]
        facts += [f"dtype={dtype_text(self.dtype)}", f"device={self.device}"]
        facts += self.source.facts
        if self.mask is not None:
            facts.append(f"mask={self.mask.text}")
        return f"AttentionMatrix({', '.join(facts)})"

    _repr_mimebundle_ = notebook_bundle

    def _times(self, value: Tensor) -> Tensor:
        value = check_product("value", value, self.dtype)
        side = (*self.shape[:-2], self.shape[-1])
        return times_batches(value, side, lambda value: self.reduce(Output(value)))

    def _transposed_times(self, operand: Tensor) -> Tensor:
        operand = check_product("operand", operand, self.dtype)
        side = self.shape[:-1]
        return times_batches(operand, side, lambda operand: self.reduce(TransposedOutput(operand)))

    def _select(self, index: Index) -> "AttentionMatrix":
        if all(item == slice(0, n, 1) for item, n in zip(index, self.shape, strict=False)):
            return self
        mask = self.mask
        if mask is not None:
            mask = mask.map(lambda tensor: broadcast_index(tensor, index))
        return AttentionMatrix(self.source.select(index), mask)

    def _window(self, asked: ParsedIndex) -> Tensor:
        window = Window(_as_range(asked.rows), _as_range(asked.columns))
        weights = cast(Tensor, self.reduce(window)).to(self.dtype)
        return _drop_axes(weights, asked.rows, asked.columns)


class ScoreMatrix:
    """The scores of an attention matrix: scaled, biased and masked, before the softmax.

    Example:
        >>> import torch, regard
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> regard.attend(x, x, scale=1.0, mask=regard.Causal()).scores[:, :]
        tensor([[5., -inf],
                [11., 25.]])
    """

    def __init__(self, matrix: AttentionMatrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> torch.Size:
        """(..., num_heads, q_len, kv_len)."""
        return self._matrix.shape

    def __getitem__(self, key: Any) -> Tensor:
        """A part of the scores, as a tensor."""
        return self._part(parse_index(key, self.shape), "these scores", DENSE_LIMIT)

    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        """All scores as a tensor, by name only.

        Args:
            limit: the most bytes it may take, 4 GiB unless given; None is no limit.

        Raises:
            MemoryError: it would take more.
        """
        return self._part(parse_index(..., self.shape), "scores.to_dense()", limit)

    def __repr__(self) -> str:
        """What it is, without computing it."""
        return f"ScoreMatrix(of {self._matrix!r})"

    def _part(self, asked: ParsedIndex, what: str, limit: int | None) -> Tensor:
        part = self._matrix[(*asked.leading, ...)]
        _check_size(what, part, asked, limit)
        rows, columns = _as_range(asked.rows), _as_range(asked.columns)
        scores = scores_at(part.source, part.mask, rows, columns)
        return _drop_axes(scores, asked.rows, asked.columns)


def check_attention_matrix(name: str, matrix: object) -> AttentionMatrix:
    """Return the argument if it is an attention matrix.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(matrix, AttentionMatrix):
        raise TypeError(
            f"{name} is {kind_text(matrix)}; it must be an AttentionMatrix.\n"
            "    For weights that you have use AttentionMatrix.from_weights(weights)."
        )
    return matrix


def _bound(mask: "MaskLike | None", source: Scores) -> Mask | None:
    return None if mask is None else as_mask(mask).bind(source.shape, source.device)


def _as_range(index: int | range) -> range:
    return range(index, index + 1) if isinstance(index, int) else index


def _check_size(what: str, part: AttentionMatrix, asked: ParsedIndex, limit: int | None) -> None:
    rows, columns = _as_range(asked.rows), _as_range(asked.columns)
    check_memory(what, (*part.shape[:-2], len(rows), len(columns)), part.dtype, limit)


def _drop_axes(part: Tensor, rows: int | range, columns: int | range) -> Tensor:
    """Without the axes that an integer index took."""
    part = part.squeeze(-1) if isinstance(columns, int) else part
    at_rows = -1 if isinstance(columns, int) else -2
    return part.squeeze(at_rows) if isinstance(rows, int) else part
