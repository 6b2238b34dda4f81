"""Attention rollout: the product of the attention of all layers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import (
    check_number,
    dtype_text,
    kind_text,
    shape_text,
)
from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.indexing import LeadingIndex
from regard.matrix.linear_map import DerivedMatrix, LinearMap, times_batches
from regard.scores.score_source import accumulation_dtype


def rollout(
    layers: Iterable[AttentionMatrix] | Mapping[str, AttentionMatrix], *, residual: float = 0.5
) -> "Rollout":
    """Return the attention rollout of several layers as a lazy matrix.

    Each layer is ``residual * I + (1 - residual) * mean over the heads``. The rollout is the
    product of the layers, the last one on the left: entry [i, j] is the share of token i after the
    last layer that comes from token j before the first layer.

    Args:
        layers: the attention matrices, the lowest layer first, each (..., num_heads, tokens,
            tokens); the number of heads may differ. A mapping, such as a recording, stands for its
            values.
        residual: the weight of the residual connection, from 0 to 1.

    Returns:
        The rollout, (..., tokens, tokens). Its rows sum to 1; a query with no key to attend to
        keeps its residual share only.

    Raises:
        TypeError: layers are not attention matrices, or differ in dtype; residual is not a number.
        ValueError: no layers, or layers that are not square or differ in shape; residual is not
            between 0 and 1.

    Example:
        >>> import torch, regard
        >>> first = regard.AttentionMatrix.from_weights(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        >>> second = regard.AttentionMatrix.from_weights(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        >>> R = regard.rollout([first, second])
        >>> R
        Rollout(layers=2, residual=0.5, tokens=2, dtype=float32, device=cpu)
        >>> R[1], R.T @ torch.ones(2)
        (tensor([0.6250, 0.3750]), tensor([1.6250, 0.3750]))

    Source:
        Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", section 3.
    """
    return Rollout(_checked_layers(layers), _checked_residual(residual))


class Rollout(DerivedMatrix):
    """The lazy product of attention layers, with products, rows, columns and tiles.

    Create one with ``regard.rollout``. Each answer costs one sweep over every layer, in memory
    linear in the length, and is differentiable.

    Attributes:
        layers: the attention matrices, the lowest first.
        residual: the weight of the residual connection.

    Example:
        >>> import torch, regard
        >>> x = torch.randn(1, 4, 100, 8)
        >>> R = regard.rollout([regard.attend(x, x, mask=regard.Causal())] * 3)
        >>> R.shape, R[0, 99].shape, R[0, :, 0].shape, (R @ torch.randn(100, 5)).shape
        (torch.Size([1, 100, 100]), torch.Size([100]), torch.Size([100]), torch.Size([1, 100, 5]))
    """

    def __init__(self, layers: tuple[AttentionMatrix, ...], residual: float) -> None:
        self.layers = layers
        self.like = layers[0]
        self.residual = residual

    @property
    def shape(self) -> torch.Size:
        """(..., tokens, tokens): without the axis of the heads."""
        shape = self.layers[0].shape
        return torch.Size((*shape[:-3], *shape[-2:]))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Rollout":
        """Return the rollout of layers with a function applied to their inputs."""
        return Rollout(tuple(layer.map(function) for layer in self.layers), self.residual)

    def __repr__(self) -> str:
        """Return a description; nothing is computed."""
        batch = tuple(self.shape[:-2])
        facts = [f"layers={len(self.layers)}", f"residual={self.residual:g}"]
        facts += [f"batch={batch[0] if len(batch) == 1 else batch}"] if batch else []
        facts += [f"tokens={self.shape[-1]}", f"dtype={dtype_text(self.dtype)}"]
        return f"Rollout({', '.join(facts)}, device={self.device})"

    def _select(self, index: LeadingIndex) -> "Rollout":
        return Rollout(tuple(layer[(*index, ...)] for layer in self.layers), self.residual)

    def _part(self, rows: range, columns: range) -> Tensor:
        """Compute a tile from its rows or from its columns, whichever are fewer."""
        tokens = self.shape[-1]
        if len(rows) < len(columns):
            taken = self._through(self._unit_columns(rows, tokens), transposed=True).mT
            return taken[..., list(columns)]
        taken = self._through(self._unit_columns(columns, tokens), transposed=False)
        return taken[..., list(rows), :]

    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        return times_batches(x, self.shape[:-1], lambda x: self._multiplied(x, transposed))

    def _multiplied(self, x: Tensor, transposed: bool) -> Tensor:
        """Multiply x by all layers, the lowest first, or by their transposes, the highest first."""
        operand = x.to(accumulation_dtype(self.dtype))
        while operand.ndim < self.ndim:
            operand = operand[None]
        for layer in reversed(self.layers) if transposed else self.layers:
            layer = layer.to(operand.dtype)
            mean: LinearMap = layer.mean(-3) if layer.ndim > 2 else layer
            mixed = mean._either_times(operand, transposed=transposed)
            operand = self.residual * operand + (1 - self.residual) * mixed
        return operand.to(self.dtype)


def _checked_layers(layers: object) -> tuple[AttentionMatrix, ...]:
    remedy = "    Pass a list of them, the lowest layer first, or what regard.observe saw."
    if isinstance(layers, Mapping):
        layers = cast(Mapping[Any, Any], layers).values()
    if isinstance(layers, AttentionMatrix) or not isinstance(layers, Iterable):
        raise TypeError(
            f"layers is {kind_text(layers)}; it must be several attention matrices.\n{remedy}"
        )
    items = tuple(cast(Iterable[Any], layers))
    if not items:
        raise ValueError(f"layers is empty; it must have at least one matrix.\n{remedy}")
    for place, layer in enumerate(items):
        _check_layer(place, layer, items[0], remedy)
    return cast(tuple[AttentionMatrix, ...], items)


def _check_layer(place: int, layer: object, first: AttentionMatrix, remedy: str) -> None:
    """Raise an error unless a layer is a square attention matrix of the first layer's shape."""
    if not isinstance(layer, AttentionMatrix):
        raise TypeError(
            f"layers has {kind_text(layer)} at {place}; each must be an AttentionMatrix.\n{remedy}"
        )
    shape = layer.shape
    if shape[-2] != shape[-1]:
        raise ValueError(
            f"layers has shape {shape_text(shape)} at {place}; q_len and kv_len must be equal.\n"
            "    Only self-attention over whole sequences can be rolled out."
        )
    if (shape[:-3], shape[-1]) != (first.shape[:-3], first.shape[-1]):
        raise ValueError(
            f"layers has shape {shape_text(shape)} at {place} and {shape_text(first.shape)} at 0; "
            "batch and tokens must be equal.\n    Only the number of heads may differ."
        )
    if layer.dtype != first.dtype:
        raise TypeError(
            f"layers has {dtype_text(layer.dtype)} at {place} and {dtype_text(first.dtype)} at 0; "
            f"all must have one dtype.\n    Use layer.to({first.dtype})."
        )
    if layer.device != first.device:
        raise ValueError(
            f"layers is on {layer.device} at {place} and on {first.device} at 0; "
            f"all must be on one device.\n    Use layer.to({str(first.device)!r})."
        )


def _checked_residual(residual: object) -> float:
    remedy = "It is the share of a token that passes by the attention; 0.5 is usual."
    number = check_number("residual", residual, remedy, "a number from 0 to 1")
    if not 0 <= number <= 1:
        raise ValueError(f"residual is {residual}; it must be a number from 0 to 1.\n    {remedy}")
    return number
