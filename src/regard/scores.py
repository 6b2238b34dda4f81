"""Where scores come from: query·key, biased, modified and capped; or given numbers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.biases import Bias
from regard.errors import shape_text
from regard.flex_callables import SCORE_MOD, FlexCallable
from regard.grouped import group_size, grouped_matmul, kv_leading, select_kv
from regard.indexing import Box, Cut, Index, narrow
from regard.scratch import Scratch

__all__ = ["Given", "QueryKey", "ScoreMod", "Scores", "accumulation_dtype", "as_score_mod"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores and statistics are computed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""score_mod(score, b, h, q_idx, kv_idx) -> score, as FlexAttention means it."""


def as_score_mod(function: object, shape: torch.Size, query: Tensor) -> FlexCallable | None:
    """A score_mod fitted to a matrix of this shape; None: there is none."""
    if function is None:
        return None
    dtype = accumulation_dtype(query.dtype)
    return FlexCallable.fitted(function, SCORE_MOD, shape, query.device, dtype)


def _room(scratch: Scratch | None, box: Box, scores: "Scores") -> Tensor | None:
    """Where the scores of a box go; None: to a new tensor."""
    if scratch is None:
        return None
    size = tuple(part.stop - part.start for part in box.at_both)
    return scratch.take("scores", size, accumulation_dtype(scores.dtype), scores.device)


class Scores(ABC):
    """The numbers before mask and softmax, (..., num_heads, q_len, kv_len), block by block."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(..., num_heads, q_len, kv_len)."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that gradients flow to."""

    @abstractmethod
    def select(self, index: Index) -> "Scores":
        """The scores of a part of the leading axes; a view where PyTorch has one."""

    @abstractmethod
    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> Tensor:
        """The scores of one box, in the accumulation dtype: a new tensor, or in the scratch.

        What lies in the scratch has no gradients; it is ``scores`` there.
        """

    @abstractmethod
    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        """A logit that stands in the denominator of the softmax beside the keys' scores.

        Of shape (..., rows, 1) of the box, in the accumulation dtype; None: there is none.
        """

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Scores":
        """The same scores with the function applied to every tensor."""

    @property
    @abstractmethod
    def facts(self) -> list[str]:
        """What the repr of the matrix says of them beside their shape: ``scale=0.5``."""

    @property
    def group(self) -> int:
        """How many neighbouring heads are cheapest when computed together."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.tensors[0].device


@dataclass(frozen=True, eq=False)
class QueryKey(Scores):
    """softcap(score_mod(scale · query·key + bias)): each step only where it was asked for.

    Attributes:
        query: (..., num_heads, q_len, head_dim).
        key: (..., num_kv_heads, kv_len, head_dim); the batch axes equal the query's.
        scale: multiplies query·key.
        bias: numbers added to the scaled scores; every axis of the matrix, each full or 1.
        position_bias: numbers added that depend on the distance alone.
        score_mod: changes each score, given where it stands.
        softcap: scores stay between -softcap and softcap.
        sink_bias: a logit in the denominator; every axis of the matrix, rows and columns 1.
    """

    query: Tensor
    key: Tensor
    scale: float
    bias: Tensor | None = None
    position_bias: Bias | None = None
    score_mod: FlexCallable | None = None
    softcap: float | None = None
    sink_bias: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.query.shape[:-1], self.key.shape[-2]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        given = tuple(tensor for tensor in (self.bias, self.sink_bias) if tensor is not None)
        positions = () if self.position_bias is None else self.position_bias.tensors
        return (self.query, self.key, *given, *positions)

    @property
    def group(self) -> int:
        return group_size(self.query.shape[:-2], self.key)

    @property
    def facts(self) -> list[str]:
        facts = [f"scale={self.scale:.4g}"]
        if self.group > 1:
            facts.append(f"num_kv_heads={self.key.shape[-3]}")
        if self.bias is not None:
            facts.append(f"bias={shape_text(self.bias.shape)}")
        if self.position_bias is not None:
            facts.append(f"bias={self.position_bias!r}")
        if self.score_mod is not None:
            facts.append(f"score_mod={self.score_mod!r}")
        if self.softcap is not None:
            facts.append(f"softcap={self.softcap:.4g}")
        if self.sink_bias is not None:
            facts.append(f"sink_bias={shape_text(self.sink_bias.shape)}")
        return facts

    @property
    def plain(self) -> bool:
        """Whether the weights are softmax(scale · query·key + bias) with a tensor for a bias."""
        more = (self.position_bias, self.score_mod, self.softcap, self.sink_bias)
        return all(each is None for each in more)

    def select(self, index: Index) -> "QueryKey":
        num_heads = self.query.shape[-3] if self.query.ndim > 2 else 1
        key = select_kv(self.key, index, num_heads)

        def chosen(tensor: Tensor) -> Tensor:
            return narrow(tensor, index)

        return self._with(self.query[index], key, chosen, chosen)

    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> Tensor:
        dtype = accumulation_dtype(self.query.dtype)
        leading = kv_leading(box.leading, self.group)
        query = cut(self.query, box.at_rows).to(dtype) * self.scale
        key = cut(self.key, (*leading, box.columns)).to(dtype)
        out = _room(scratch, box, self)
        scores = grouped_matmul(query, key.mT, out)
        if self.bias is not None:
            scores = scores.add_(cut(self.bias, box.at_both).to(dtype))
        if self.position_bias is not None:
            scores = scores.add_(
                self.position_bias.block(
                    box,
                    self.shape,
                    scores.device,
                    lambda tensor: cut(tensor, box.leading).to(dtype),
                )
            )
        if self.score_mod is not None:
            changed = self.score_mod(box, scores)  # often a view, of any dtype
            scores = changed.to(dtype, copy=True) if out is None else out.copy_(changed)
        if self.softcap is not None:
            # The last step is not in place: autograd needs the tanh.
            scores = torch.mul(scores.div_(self.softcap).tanh_(), self.softcap, out=out)
        return scores

    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        if self.sink_bias is None:
            return None
        sink = cut(self.sink_bias, box.leading).to(accumulation_dtype(self.query.dtype))
        return sink.expand(*(part.stop - part.start for part in box.at_rows), 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "QueryKey":
        query = function(self.query)
        return self._with(query, function(self.key), function, lambda ids: ids.to(query.device))

    def _with(
        self,
        query: Tensor,
        key: Tensor,
        of_numbers: Callable[[Tensor], Tensor],
        of_indices: Callable[[Tensor], Tensor],
    ) -> "QueryKey":
        """The same steps on another query and key, with their tensors changed too."""
        return QueryKey(
            query,
            key,
            self.scale,
            None if self.bias is None else of_numbers(self.bias),
            None if self.position_bias is None else self.position_bias.map(of_numbers),
            None if self.score_mod is None else self.score_mod.map(of_indices),
            self.softcap,
            None if self.sink_bias is None else of_numbers(self.sink_bias),
        )


@dataclass(frozen=True, eq=False)
class Given(Scores):
    """Scores that somebody computed already, or the logarithms of weights.

    Attributes:
        values: (..., num_heads, q_len, kv_len).
        are_weights: whether the values are weights, so that the scores are their logarithms.
    """

    values: Tensor
    are_weights: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    @property
    def facts(self) -> list[str]:
        return [f"from given {'weights' if self.are_weights else 'scores'}"]

    def select(self, index: Index) -> "Given":
        return Given(self.values[index], self.are_weights)

    def block(self, box: Box, cut: Cut, scratch: Scratch | None = None) -> Tensor:
        out = _room(scratch, box, self)
        values = cut(self.values, box.at_both)
        if self.are_weights:
            values = values.to(accumulation_dtype(values.dtype))
            zero = values == 0  # its gradient is 0, not 0 times infinity
            values = values.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)
        if out is not None:
            return out.copy_(values)
        return values.to(accumulation_dtype(self.values.dtype), copy=True)

    def sink(self, box: Box, cut: Cut) -> Tensor | None:
        return None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Given":
        return Given(function(self.values), self.are_weights)
