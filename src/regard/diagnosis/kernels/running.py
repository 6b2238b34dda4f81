"""A kernel with the axes, the dtype and the device of its inputs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.diagnosis.kernels.cases import Case, Inputs, inputs_of

__all__ = ["LAYOUTS", "Kernel", "Run"]

LAYOUTS = ("batch heads tokens dim", "batch tokens heads dim", "batch tokens dim", "tokens dim")


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a kernel.

    Attributes:
        output: as the kernel gave it, a part of its graph.
        passed: query, key and value as they were passed.
        has_changed_inputs: the kernel wrote into them.
    """

    output: Tensor
    passed: tuple[Tensor, Tensor, Tensor]
    has_changed_inputs: bool


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function of query, key and value.

    Attributes:
        call: the function.
        options: its further arguments.
        layout: the axes of query, key, value and output: one of ``LAYOUTS``.
        dtype: that of query, key and value.
        device: where they are.
    """

    call: Callable[..., Any]
    options: Mapping[str, Any]
    layout: str
    dtype: torch.dtype
    device: torch.device

    @property
    def has_heads(self) -> bool:
        """True if it takes an axis of heads."""
        return "heads" in self.layout

    def inputs(self, case: Case, heads: int, kv_heads: int) -> Inputs:
        """Return the tensors of a case, with as many heads and samples as the axes allow."""
        if not self.has_heads:
            heads = kv_heads = 1
        batch = 2 if "batch" in self.layout else 1
        kv_heads = case.kv_heads or kv_heads
        return inputs_of(case, self.dtype, batch=batch, heads=heads, kv_heads=kv_heads)

    def run(self, inputs: Inputs, *, is_view: bool = False, has_gradient: bool = False) -> Run:
        """Run the kernel once, on inputs that need a gradient or none.

        Raises:
            ValueError: its output has another shape than the query.
            Exception: whatever it raises.
        """
        tensors = (inputs.query, inputs.key, inputs.value)
        query, key, value = (self.laid(t, is_view=is_view) for t in tensors)
        passed = (query, key, value)
        for tensor in passed:
            tensor.requires_grad_(has_gradient)
        result = self.call(*passed, **self.options)
        output = next(_tensors(result), None)
        if output is None:
            raise ValueError(f"it returns {type(result).__name__}, and no tensor")
        if output.shape != query.shape:
            raise ValueError(
                f"its output is {tuple(output.shape)} for queries {tuple(query.shape)}"
            )
        pairs = zip(passed, tensors, strict=True)
        is_changed = any(
            not torch.allclose(self.unlaid(now), before.double(), 0, 0, equal_nan=True)
            for now, before in pairs
        )
        return Run(output, passed, is_changed)

    def laid(self, tensor: Tensor, *, is_view: bool) -> Tensor:
        """Return a copy of (batch, heads, tokens, dim) in the axes of the kernel.

        With ``is_view`` it is not contiguous: tokens and heads are exchanged in memory, as after a
        transpose, or columns and tokens where there are no heads.
        """
        tensor = tensor.detach().to(self.device, self.dtype, copy=True)
        match self.layout:
            case "batch heads tokens dim":
                laid, axes = tensor, (1, 2)
            case "batch tokens heads dim":
                laid, axes = tensor.transpose(1, 2), (1, 2)
            case "batch tokens dim":
                laid, axes = tensor[:, 0], (-1, -2)
            case _:
                laid, axes = tensor[0, 0], (-1, -2)
        if is_view:
            return laid.transpose(*axes).contiguous().transpose(*axes)
        return laid.contiguous()

    def unlaid(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the axes of the kernel as (batch, heads, tokens, dim) in float64."""
        wide = tensor.detach().cpu().double()
        match self.layout:
            case "batch heads tokens dim":
                return wide
            case "batch tokens heads dim":
                return wide.transpose(1, 2)
            case "batch tokens dim":
                return wide[:, None]
            case _:
                return wide[None, None]


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in cast("tuple[object, ...]", result):
            yield from _tensors(part)
