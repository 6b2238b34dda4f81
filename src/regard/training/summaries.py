"""Summaries over rows: mean, extremes and exact quantiles, of one process or of several."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from regard.training.row_numbers import Samples

Key = tuple[str, str]
"""The names of a layer and of a statistic."""

_SHARES = (0.1, 0.5, 0.9)
_LARGEST = 0x7F800000  # the bits of infinity


class Summary(NamedTuple):
    """A summary of one statistic over the rows of each head of a layer, tensors of (num_heads,).

    All numbers are NaN if one row is NaN or if no row counts. A quantile is the smallest number
    that a share of the rows does not exceed.

    Attributes:
        heads: the positions of the heads in the model.
        mean: the mean over the rows.
        min: the smallest number.
        p10: the quantile of 10 % of the rows.
        p50: the quantile of 50 % of the rows.
        p90: the quantile of 90 % of the rows.
        max: the largest number.
        rows: the number of rows.
    """

    heads: tuple[int, ...]
    mean: Tensor
    min: Tensor
    p10: Tensor
    p50: Tensor
    p90: Tensor
    max: Tensor
    rows: Tensor


def are_several() -> bool:
    """Return True if torch.distributed runs several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def layer_indices(summaries: Mapping[Key, Summary]) -> dict[str, int]:
    """Return the position of each layer, in the order in which the layers ran."""
    return {name: index for index, name in enumerate(dict.fromkeys(name for name, _ in summaries))}


def summarize(samples: Mapping[str, tuple[Sequence[int], Samples]]) -> dict[Key, Summary]:
    """Return the summaries of each layer's samples, given with the positions of its heads.

    The rows of all processes are put together. Every process of the default group must call it.
    """
    layers = _all_layers({name: (tuple(heads), of.names) for name, (heads, of) in samples.items()})
    parts, total = dict[Key, slice](), 0
    for layer, (heads, names) in layers.items():
        for name in names:
            parts[layer, name] = slice(total, total + len(heads))
            total += len(heads)
    device = next((of.total.device for _, of in samples.values()), _device())
    places = {
        layer: torch.tensor(
            [
                [parts[layer, name].start + layers[layer].heads.index(head) for head in heads]
                for name in of.names
            ],
            device=device,
        )
        for layer, (heads, of) in samples.items()
    }
    sums = torch.zeros(2, total, dtype=torch.float64, device=device)
    ends = torch.full((2, total), -torch.inf, device=device)
    for layer, (_, of) in samples.items():
        sums[:, places[layer]] = torch.stack([of.total, of.rows.double()]).to(device)
        ends[:, places[layer]] = torch.stack([-of.values[..., 0], of.highest]).to(device)
    if are_several():
        dist.all_reduce(sums)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
    count = sums[1].long()
    wanted = torch.stack([(share * sums[1]).ceil().long().clamp(min=1) for share in _SHARES], -1)
    values = [(places[layer], of.values.to(device)) for layer, (_, of) in samples.items()]
    quantiles = (_searched if are_several() else _picked)(values, wanted)
    numbers = torch.stack([sums[0] / sums[1], -ends[0].double(), *quantiles.T.double(), ends[1]])
    numbers = numbers.masked_fill(~(count > 0) | sums[0].isnan(), torch.nan).cpu()
    count = count.cpu()
    return {
        (layer, name): Summary(layers[layer].heads, *numbers[:, part].unbind(), rows=count[part])
        for (layer, name), part in parts.items()
    }


class _LayerCells(NamedTuple):
    """The heads and the statistics of a layer, in all processes."""

    heads: tuple[int, ...]
    names: tuple[str, ...]


def _all_layers(here: dict[str, tuple[Sequence[int], Sequence[str]]]) -> dict[str, _LayerCells]:
    """Return the heads and statistics that all processes together have of each layer."""
    every: list[Any] = [here]
    if are_several():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, here)
    heads, names = dict[str, set[int]](), dict[str, dict[str, None]]()
    for each in every:
        for layer, (its_heads, its_names) in each.items():
            heads.setdefault(layer, set()).update(its_heads)
            names.setdefault(layer, {}).update(dict.fromkeys(its_names))
    return {layer: _LayerCells(tuple(sorted(heads[layer])), tuple(names[layer])) for layer in heads}


def _device() -> torch.device:
    """Return a device whose tensors the default group can reduce."""
    on_gpu = are_several() and "nccl" in dist.get_backend()
    return torch.device("cuda" if on_gpu else "cpu")


def _picked(values: Sequence[tuple[Tensor, Tensor]], wanted: Tensor) -> Tensor:
    """Return the numbers at some positions of each head, counted from 1, (cells, quantiles)."""
    quantiles = torch.zeros(wanted.shape, device=wanted.device)
    for cells, of in values:
        quantiles[cells] = of.gather(-1, wanted[cells] - 1)
    return quantiles


def _searched(values: Sequence[tuple[Tensor, Tensor]], wanted: Tensor) -> Tensor:
    """Return the numbers at some positions in the order of the rows of all processes.

    The bits of floating-point numbers, read as integers, have the order of the numbers. Each round
    halves the range of integers that contains the result, so 32 sums of counts find it exactly.
    """
    ordered = [(cells, _flipped(of.contiguous().view(torch.int32))) for cells, of in values]
    low = torch.full_like(wanted, -(2**31))
    high = torch.full_like(wanted, _LARGEST)
    for _ in range(32):
        middle = (low + high) >> 1
        below = torch.zeros_like(wanted)
        for cells, of in ordered:
            below[cells] = torch.searchsorted(of, middle[cells].int(), right=True)
        dist.all_reduce(below)
        enough = below >= wanted
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return _flipped(high.int()).view(torch.float32)


def _flipped(bits: Tensor) -> Tensor:
    """Exchange the order of negative numbers: from the bits of floats to integers, and back."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
