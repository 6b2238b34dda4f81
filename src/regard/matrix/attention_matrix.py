"""The attention matrix: its parts, its products, and its reductions."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from regard.backends.backend import Between, nothing
from regard.backends.choose import choose
from regard.backends.distributed.sharded_scores import RowOrder, ShardedScores
from regard.errors import (
    DENSE_LIMIT,
    check_bias,
    check_cancelled,
    check_memory,
    check_product,
    check_progress,
    check_query_key,
    check_scale,
    check_scores,
    check_sink_bias,
    check_softcap,
    check_weights,
    check_whole,
    dtype_text,
    is_sharded,
    kind_text,
    shape_text,
)
from regard.masks import Mask, as_mask
from regard.masks.mask import MaskLike, selected
from regard.matrix.changes import Changes
from regard.matrix.indexing import LeadingIndex, ParsedIndex, parse_index, read_tile
from regard.matrix.linear_map import LinearMap, times_batches
from regard.matrix.notebook_hook import notebook_bundle
from regard.matrix.tensor_methods import Axes, check_keys, squeeze, sum_over
from regard.reductions.products import Output, TransposedOutput, WeightTile, scores_at
from regard.reductions.reduction import Reduction, check_reductions
from regard.reductions.row_statistics import Entropy, LogSumExp, MaxScore
from regard.reductions.sums import Diagonal, Pool, Segments, Sum
from regard.reductions.top_k import Top, TopK
from regard.scores.autocast import as_autocast
from regard.scores.given_scores import GivenScores
from regard.scores.grouped_heads import repeat_heads
from regard.scores.position_bias import Bias
from regard.scores.query_key import QueryKeyScores, ScoreMod, as_score_mod
from regard.scores.score_source import Scores


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
    rows: RowOrder = "contiguous",
) -> "AttentionMatrix":
    """Return the lazy attention matrix softmax(scale · query·keyᵀ + bias, masked).

    Nothing is computed yet. The scores are computed in this order: scale · query·key, plus bias,
    score_mod, softcap, mask.

    Inside ``torch.autocast`` query, key and a bias tensor are cast to its dtype, as
    ``scaled_dot_product_attention`` does; float64 is not. Statistics still have float32. Products
    inside it, ``A @ value``, take a value of another dtype and return autocast's.

    Args:
        query: (..., num_heads, q_len, head_dim), or (q_len, head_dim) for one head. float16,
            bfloat16, float32 or float64. Query and key may be DTensors, as
            ``docs/beyond-one-process.md`` shows.
        key: (..., num_kv_heads, kv_len, head_dim). num_heads must be a multiple of num_kv_heads
            (grouped-query attention); batch axes are equal or 1.
        mask: one of ``regard.masks``; a bool tensor that broadcasts to
            (..., num_heads, q_len, kv_len) in which True means *may attend*; or FlexAttention's
            mask_mod(b, h, q_idx, kv_idx) -> bool, or its BlockMask.
        scale: multiplies query·key; 1/sqrt(head_dim) by default.
        bias: numbers added to the scaled scores: a tensor that broadcasts to
            (..., num_heads, q_len, kv_len), or a position bias, ``regard.ALiBi`` or
            ``regard.T5Bias``. With a query that is a DTensor, it may be one, with the same rows.
        score_mod: a callable of FlexAttention, score_mod(score, b, h, q_idx, kv_idx) -> score,
            written for one score: every argument is a scalar tensor, and ``torch.vmap`` applies it
            to blocks. b counts through all batch axes. Gradients flow to the score, not to other
            tensors that the callable uses; such a tensor must not require a gradient.
        softcap: replaces each score by softcap · tanh(score / softcap), as Gemma 2 does.
        sink_bias: (num_heads,), or one number for all heads: an additional logit in the
            denominator of the softmax, as in gpt-oss, so that a row sums to less than 1.
        rows: of DTensors: "contiguous", each rank has neighbouring tokens; "zigzag", rank r of n
            has ranges r and 2n - 1 - r of 2n, which balances the work of a causal mask.

    Returns:
        The matrix, (..., num_heads, q_len, kv_len): a query attends *to* keys, rows are queries.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not match.

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
    query, key, bias = as_autocast(query, key, bias)
    query, key = check_query_key(query, key)
    sharded = is_sharded(query) or is_sharded(key)
    if not sharded:
        if rows != "contiguous":
            raise ValueError(
                f"rows is {rows!r}, which says where the rows of DTensors lie; query is an "
                "ordinary tensor.\n    Leave it out."
            )
        # torch.broadcast_shapes would import sympy; the sizes are equal or 1 here.
        sizes = zip(query.shape[:-3], key.shape[:-3], strict=True)
        batch = [of_key if of_query == 1 else of_query for of_query, of_key in sizes]
        query = query.expand(*batch, *query.shape[-3:])
        key = key.expand(*batch, *key.shape[-3:])
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    factor = check_scale(scale, query.shape[-1])
    position_bias = bias.bind(shape, query.device) if isinstance(bias, Bias) else None
    scores = QueryKeyScores(
        query,
        key,
        factor,
        check_bias(bias, shape, query) if position_bias is None else None,
        position_bias,
        as_score_mod(score_mod, shape, query),
        check_softcap(softcap),
        check_sink_bias(sink_bias, shape, query),
    )
    source = ShardedScores(scores, rows) if sharded else scores
    return AttentionMatrix(source, _bound(mask, source))


class AttentionMatrix(LinearMap):
    """A lazy attention matrix: it computes answers, never the whole matrix.

    It behaves like a tensor of shape (..., num_heads, q_len, kv_len): index it, multiply it, reduce
    it. Leading indices give a smaller attention matrix; row or column indices give an ordinary
    tensor of weights. Every answer is exact and differentiable, in memory linear in the length.

    Create one with ``regard.attend``, ``AttentionMatrix.from_scores`` or
    ``AttentionMatrix.from_weights``.

    Attributes:
        source: the source of the scores.
        changes: the tensors of the scores after whose change in place each answer is an error;
            none by default.

    Example:
        >>> import torch, regard
        >>> A = regard.attend(torch.randn(2, 8, 100, 64), torch.randn(2, 8, 100, 64))
        >>> A[0, 3].shape, A[0, 3, 99].shape, A.entropy().shape
        (torch.Size([100, 100]), torch.Size([100]), torch.Size([2, 8, 100]))
    """

    instead = "A.topk(8), A.entropy(), A.sum(-2), A.mean(1)"
    _smaller = (
        "Ask for a part, A[..., rows, cols], or for a summary, A.pool(512, 512), "
        "or pass limit=None to to_dense()."
    )

    def __init__(self, source: Scores, mask: Mask | None = None) -> None:
        self.source = source
        self._mask = None if mask is None else mask.of_matrix(source.shape, source.device)
        self._mask_changes = Changes(() if mask is None else mask.tensors)
        self.changes = Changes()

    @classmethod
    def from_scores(cls, scores: Tensor, *, mask: "MaskLike | None" = None) -> "AttentionMatrix":
        """Return the attention matrix softmax(scores, masked) of given scores.

        Args:
            scores: (..., num_heads, q_len, kv_len) or (q_len, kv_len); -inf is a masked key.
            mask: as in ``regard.attend``.

        Raises:
            TypeError: scores are not a floating tensor.
            ValueError: scores have fewer than two axes, or an axis of length 0.

        Example:
            >>> import torch, regard
            >>> regard.AttentionMatrix.from_scores(torch.tensor([[13.0, 9.0, 9.0]]))[0]
            tensor([0.9647, 0.0177, 0.0177])
        """
        source = GivenScores(check_scores(scores))
        return cls(source, _bound(mask, source))

    @classmethod
    def from_weights(cls, weights: Tensor) -> "AttentionMatrix":
        """Return the attention matrix of given weights.

        Its scores are log(weights), whose softmax gives the weights back. For a second softmax with
        a mask use ``from_scores(weights.log(), mask=mask)``.

        Args:
            weights: (..., num_heads, q_len, kv_len) or (q_len, kv_len); not negative, and each
                row sums to 1 or is all 0. The sum may differ from 1 by what rounding to the dtype
                explains: 0.012 for bfloat16, 0.0015 for float16, 1e-6 for float32, and a little
                more for long rows. A row may hold NaN, as the softmax of a row without keys does;
                its answers are NaN.

        Raises:
            TypeError: weights are not a floating tensor.
            ValueError: a weight is negative, or a row sums to neither 1 nor 0; the message names
                the row with the largest error.

        Example:
            >>> import torch, regard
            >>> A = regard.AttentionMatrix.from_weights(torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
            >>> A.max().values
            tensor([0.7500, 1.0000])
        """
        return cls(GivenScores(check_weights(weights), are_weights=True))

    @property
    def mask(self) -> Mask | None:
        """The mask, bound to the shape of the matrix; prints as a drawing if it is small.

        None if every query may attend to every key.

        Raises:
            RuntimeError: a tensor of the mask, or one of ``changes``, was changed in place after
                the matrix was made.
        """
        if self.changes:
            raise RuntimeError(
                "a query or key of the matrix was changed in place after the matrix was made; the "
                "answer would be that of another one.\n"
                "    Ask the matrix before, or change a clone()."
            )
        # A copy of each mask would take as much memory as a part of the matrix.
        if self._mask_changes:
            raise RuntimeError(
                f"a tensor of the mask {cast(Mask, self._mask).text} was changed in place after "
                "the matrix was made; the answer would be that of another mask.\n"
                "    Pass mask.clone(), or make the matrix again."
            )
        return self._mask

    @property
    def shape(self) -> torch.Size:
        """(..., num_heads, q_len, kv_len)."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs, of products and of parts; statistics are at least float32."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """The device of the inputs and of the answers."""
        return self.source.device

    @property
    def scores(self) -> "ScoreMatrix":
        """The scores before the softmax; index them to get numbers."""
        return ScoreMatrix(self)

    def reduce(
        self,
        *reductions: Reduction,
        backend: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        """Compute several reductions in one pass over the matrix.

        ``progress`` and ``cancelled`` are called on the calling thread, between the blocks of the
        forward pass. A fused kernel is one block, and so is a reduction on a GPU, whose kernels
        may still run. While several threads work, one call may stand for several blocks. If the
        pass starts again on another backend, so do the numbers. Ranks of DTensors must all pass
        them, or none; one rank ends the pass of all.

        Args:
            reductions: for example ``regard.TopK(8)``, ``regard.Entropy()``, or your own.
            backend: "sdpa", "triton", "cpu" (compiled), "sweep" (plain PyTorch) or "dense"
                (float64, forms the matrix); by default the fastest that is exact.
            progress: called with the number of finished blocks and of all blocks. An error that it
                raises ends the pass.
            cancelled: returns True to end the pass, such as ``threading.Event().is_set``.

        Returns:
            The answer of one reduction, or a tuple of the answers of several.

        Raises:
            TypeError: an argument is not a reduction, or progress or cancelled is no function.
            ValueError: no reductions, or one that does not fit the matrix.
            concurrent.futures.CancelledError: ``cancelled`` returned True before the last block
                was finished.

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
        between = _between(progress, cancelled)
        chosen = choose(self.source, self.mask, reductions, backend)
        answers = chosen.reduce(self.source, self.mask, reductions, between)
        return answers[0] if len(answers) == 1 else answers

    def logsumexp(self) -> Tensor:
        """Compute the logsumexp of each row, (..., num_heads, q_len); see ``LogSumExp``."""
        return cast(Tensor, self.reduce(LogSumExp()))

    def entropy(self) -> Tensor:
        """Compute the entropy of each row in nats, (..., num_heads, q_len); see ``Entropy``."""
        return cast(Tensor, self.reduce(Entropy()))

    def topk(self, k: int, dim: int = -1) -> Top:
        """Find the k largest weights of each row and their keys; see ``TopK``.

        Raises:
            ValueError: dim is not the axis of the keys.
        """
        check_keys(self, "topk", dim)
        return cast(Top, self.reduce(TopK(k)))

    def max(self, dim: int = -1, keepdim: bool = False, *, axis: int | None = None) -> Top:
        """Find the largest weight of each row and its key, both (..., num_heads, q_len).

        A row without keys has weight 0 and index -1; see ``TopK``.

        Args:
            dim: -1, the axis of the keys. Without it, ``Tensor.max`` would be over the whole
                matrix.
            keepdim: True if the axis of the keys stays, with length 1.
            axis: another name of dim.

        Raises:
            ValueError: dim is another axis.
        """
        check_keys(self, "max", dim if axis is None else axis)
        top = self.topk(1)
        return top if keepdim else Top(top.values.squeeze(-1), top.indices.squeeze(-1))

    @overload
    def sum(self, dim: Literal[-1, -2], keepdim: bool = False) -> Tensor: ...

    @overload
    def sum(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None) -> Any: ...

    def sum(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None) -> Any:
        """Sum the weights over the keys (dim=-1), the queries (dim=-2), or other axes.

        The sum over heads or texts is a lazy matrix. Over keys or queries it is a tensor, computed
        in one pass; see ``Sum``.

        Args:
            dim: an axis, or several; all by default.
            keepdim: True if the axes stay, with length 1.
            axis: another name of dim.

        Raises:
            ValueError: there is no such axis.

        Example:
            >>> import torch, regard
            >>> A = regard.attend(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
            >>> A.sum(-2)[0], A.sum(0)[0], A.sum()
            (tensor([1., 1., 1.]), tensor([0.6667, 0.6667, 0.6667]), tensor(6.))
        """
        return sum_over(self, self._sums, dim if axis is None else axis, keepdim)

    def pool(self, rows: int, columns: int) -> Tensor:
        """Compute the mean weight of each cell of a grid; see ``Pool``."""
        return cast(Tensor, self.reduce(Pool(rows, columns)))

    def segments(self, query_spans: Any, key_spans: Any = None) -> Tensor:
        """Compute how much spans of queries attend to spans of keys; see ``Segments``."""
        return cast(Tensor, self.reduce(Segments(query_spans, key_spans)))

    def diagonal(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """Return the weights A[i, i + offset]; see ``Diagonal``.

        Args:
            offset: kv_idx - q_idx; q_idx - kv_idx if the axes are exchanged.
            dim1: the axis of the queries, or of the keys.
            dim2: the other one.

        Raises:
            ValueError: the axes are others.
        """
        axes = [axis - self.ndim if axis >= 0 else axis for axis in (dim1, dim2)]
        if sorted(axes) != [-2, -1]:
            raise ValueError(
                f"dim1 is {dim1} and dim2 is {dim2}, and the matrix has shape "
                f"{shape_text(self.shape)}; they must be the axes of queries and keys.\n"
                "    Leave them out."
            )
        return cast(Tensor, self.reduce(Diagonal(offset if axes[0] == -2 else -offset)))

    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return the whole matrix as a tensor of q_len x kv_len numbers per head.

        Args:
            limit: the maximum size in bytes, 4 GiB by default; None is no limit.

        Raises:
            MemoryError: the tensor exceeds the limit; the message states its size.

        Example:
            >>> import torch, regard
            >>> regard.attend(torch.zeros(1, 2), torch.zeros(4, 2)).to_dense()
            tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
        """
        return self._dense(limit)

    def to(self, *args: Any, **kwargs: Any) -> "AttentionMatrix":
        """Return the matrix with its inputs converted by ``Tensor.to``, to a device or a dtype.

        Raises:
            TypeError: the dtype is not floating.
        """
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def detach(self) -> "AttentionMatrix":
        """Return the matrix of the detached inputs, without gradients."""
        return self._sharing(self.map(Tensor.detach))

    def cpu(self) -> "AttentionMatrix":
        """Return the matrix with its inputs on the CPU."""
        return self.to("cpu")

    def map(self, function: Callable[[Tensor], Tensor]) -> "AttentionMatrix":
        """Return the matrix with a function applied to its inputs, query and key among them."""
        source = self.source.map(function)
        if not source.dtype.is_floating_point or source.dtype.itemsize < 2:
            raise TypeError(
                f"to() has {dtype_text(source.dtype)}; attention needs a floating dtype of at "
                "least 16 bits.\n"
                "    Use to_dense().to(...) for a tensor of another kind."
            )
        mask = self.mask
        if mask is not None:
            mask = mask.map(lambda tensor: tensor.to(source.device))
        return AttentionMatrix(source, mask)

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the matrix without axes of length 1; other axes stay, as in PyTorch.

        Without the axis of one query, or of one key, it is a tensor.

        Args:
            dim: the axis; all by default.

        Raises:
            ValueError: dim is the axis of several queries or keys.
        """
        return squeeze(self, dim)

    def mean(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None) -> Any:
        """Return the mean over the heads as a lazy matrix, or the mean over other axes.

        The mean over heads or texts is lazy: index it and multiply it. Over keys or queries it is
        a tensor, computed in one pass.

        Args:
            dim: an axis, or several; all by default. The axis of the heads is -3, or 1 if there is
                a batch.
            keepdim: True if the axes stay, with length 1.
            axis: another name of dim.

        Raises:
            ValueError: there is no such axis.

        Example:
            >>> import torch, regard
            >>> A = regard.attend(torch.randn(2, 8, 100, 64), torch.randn(2, 8, 100, 64))
            >>> A.mean(1)[0, 99].shape, A.mean((0, 1)).shape, A.mean(-2).shape
            (torch.Size([100]), torch.Size([100, 100]), torch.Size([2, 8, 100]))
        """
        return sum_over(self, self._sums, dim if axis is None else axis, keepdim, is_mean=True)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
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

    def _sums(self, axis: int) -> Tensor:
        return cast(Tensor, self.reduce(Sum(axis)))

    def _select(self, index: LeadingIndex) -> "AttentionMatrix":
        lengths = self.shape[:-2]
        if len(index) == len(lengths) and all(
            isinstance(item, slice) and item == slice(0, n, 1)
            for item, n in zip(index, lengths, strict=True)
        ):
            return self
        items = [item for item in index if item is not None]
        pairs = zip(items, lengths, strict=True)
        simple = tuple(slice(0, n, 1) if isinstance(item, list) else item for item, n in pairs)
        matrix = AttentionMatrix(self.source.select(simple), selected(self.mask, simple))
        part, axis = self._sharing(matrix), 0
        for item in index:
            if item is None:
                part = part._unsqueezed(axis)
            elif isinstance(item, list):
                part = part._chosen(axis, item)
            axis += not isinstance(item, int)
        return part

    def _unsqueezed(self, axis: int) -> "AttentionMatrix":
        """Return the matrix with a new leading axis of length 1 before an axis."""
        matrix, source = self, self.source
        if axis == self.ndim - 2 and isinstance(source, QueryKeyScores) and source.group > 1:
            # The heads become an axis of the batch, where every query has a key of its own.
            heads = [head // source.group for head in range(self.shape[-3])]
            matrix = AttentionMatrix(
                replace(source, key=repeat_heads(source.key, heads)), self.mask
            )
        return matrix._on_all_tensors(lambda tensor: tensor.unsqueeze(axis))

    def _chosen(self, axis: int, positions: list[int]) -> "AttentionMatrix":
        """Return the matrix of the chosen positions of a leading axis."""
        length = self.shape[axis]

        def chosen(tensor: Tensor) -> Tensor:
            n = tensor.shape[axis]  # fewer in a key with grouped heads
            if n == 1 and length > 1:
                return tensor
            # Unlike that of indexing, its gradient is reproducible on a GPU.
            each = tensor.unbind(axis)
            return torch.stack([each[position * n // length] for position in positions], axis)

        return self._on_all_tensors(chosen)

    def _on_all_tensors(self, function: Callable[[Tensor], Tensor]) -> "AttentionMatrix":
        """Return the matrix with a function applied to the tensors of its scores and its mask."""
        source = self.source.map(function)
        if isinstance(source, QueryKeyScores) and source.score_mod is not None:
            source = replace(source, score_mod=source.score_mod.map(function))
        mask = self.mask
        mapped = AttentionMatrix(source, None if mask is None else mask.map(function))
        return self._sharing(mapped)

    def _sharing(self, part: "AttentionMatrix") -> "AttentionMatrix":
        """Return a matrix whose tensors are views of this one's, with the same changes."""
        part.changes = self.changes.copy()
        return part

    def _part(self, rows: range, columns: range) -> Tensor:
        return cast(Tensor, self.reduce(WeightTile(rows, columns))).to(self.dtype)


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
        """Return a part of the scores as a tensor."""
        return self._part(parse_index(key, self.shape), "these scores", DENSE_LIMIT)

    def amax(self, dim: int | Sequence[int]) -> Tensor:
        """Compute the largest score of each query or of each head, as ``Tensor.amax`` does.

        Only keys that a query may attend to count; see ``MaxScore``. Scores that share the maximum
        share its gradient evenly: first the queries of a head, then the keys of a query. The Triton
        kernels give the share of a query to its first such key.

        Args:
            dim: -1 for each query, (..., num_heads, q_len), or (-2, -1) for each head,
                (..., num_heads).

        Raises:
            TypeError: dim is not a whole number or a tuple of whole numbers.
            ValueError: dim names other axes.

        Example:
            >>> import torch, regard
            >>> x = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])  # two heads of two tokens
            >>> A = regard.attend(x, x, mask=regard.Causal())
            >>> A.scores.amax((-2, -1))
            tensor([ 4., 16.])
        """
        per_head = self._is_per_head(dim)
        rows = cast(Tensor, self._matrix.reduce(MaxScore()))
        return rows.amax(-1) if per_head else rows

    def max(self) -> Tensor:
        """Compute the largest score of the whole matrix, a tensor without axes; see ``amax``."""
        rows = self.amax(-1)
        return rows.amax(tuple(range(rows.ndim)))  # without dims, DTensors give NaN gradients

    def to_dense(self, *, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return all scores as a tensor.

        Args:
            limit: the maximum size in bytes, 4 GiB by default; None is no limit.

        Raises:
            MemoryError: the tensor exceeds the limit.
        """
        return self._part(parse_index(..., self.shape), "scores.to_dense()", limit)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        return f"ScoreMatrix(of {self._matrix!r})"

    def _is_per_head(self, dim: int | Sequence[int]) -> bool:
        """Return True for the last two axes, False for the last one."""
        ndim = self._matrix.ndim
        dims = dim if isinstance(dim, tuple | list) else (dim,)
        axes = [check_whole("dim", each) for each in dims]
        last = [axis - ndim if axis >= 0 else axis for axis in axes]
        if sorted(last) not in ([-1], [-2, -1]):
            raise ValueError(
                f"dim is {dim}; the scores have shape {shape_text(self.shape)}, and amax() is over "
                "the keys, dim=-1, or over queries and keys, dim=(-2, -1).\n"
                "    Use max() for all axes, or amax((-2, -1)) and then amax over the other axes."
            )
        return len(last) == 2

    def _part(self, asked: ParsedIndex, what: str, limit: int | None) -> Tensor:
        part = self._matrix[(*asked.leading, ...)]
        _check_size(what, part, asked, limit)
        scores = read_tile(
            *asked.tile, lambda rows, columns: scores_at(part.source, part.mask, rows, columns)
        )
        return asked.drop_axes(scores)


def check_attention_matrix(name: str, matrix: object) -> AttentionMatrix:
    """Return the argument if it is an attention matrix.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(matrix, AttentionMatrix):
        raise TypeError(
            f"{name} is {kind_text(matrix)}; it must be an AttentionMatrix.\n"
            "    If you have the weights, use AttentionMatrix.from_weights(weights)."
        )
    return matrix


def _between(
    progress: Callable[[int, int], None] | None, cancelled: Callable[[], bool] | None
) -> Between:
    """Return the function that a backend calls between its blocks."""
    if progress is None and cancelled is None:
        return nothing
    check_progress(progress)
    check_cancelled(cancelled)

    def between(done: int, total: int) -> None:
        if progress is not None and done:
            progress(done, total)
        if cancelled is not None and done < total and cancelled():
            raise CancelledError(f"reduce() was cancelled after {done} of {total} blocks")

    return between


def _bound(mask: "MaskLike | None", source: Scores) -> Mask | None:
    return None if mask is None else as_mask(mask).bind(source.shape, source.device)


def _check_size(what: str, part: AttentionMatrix, asked: ParsedIndex, limit: int | None) -> None:
    check_memory(what, (*part.shape[:-2], *map(len, asked.tile)), part.dtype, limit)
