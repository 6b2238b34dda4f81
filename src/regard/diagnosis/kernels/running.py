"""A kernel with the axes, the dtype and the device of its inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.diagnosis.kernels.cases import Case, Inputs

LAYOUTS = (
    "batch heads tokens dim",
    "batch tokens heads dim",
    "heads tokens dim",
    "tokens heads dim",
    "batch tokens dim",
    "tokens dim",
)
_HIDDEN_KEYS = 7
"""The number of last keys that are NaN."""
_SHARP = 5.0
_LARGE = 200.0
"""A score whose exponential is infinite in float32, and 0 below 0."""
_ENDS = {
    "large": (1.0, 1.0),
    "low": (-1.0, -1.0),
    "growing": (-1.0, 1.0),
    "falling": (1.0, -1.0),
}
"""The scores of the first key and of the last one, by the kind, as shares of the large one."""


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
        head_dim: the number of columns that it is tried with.
    """

    call: Callable[..., Any]
    options: Mapping[str, Any]
    layout: str
    dtype: torch.dtype
    device: torch.device
    head_dim: int = 64

    @property
    def has_heads(self) -> bool:
        """True if it takes an axis of heads."""
        return "heads" in self.layout

    def inputs(self, case: Case, heads: int, kv_heads: int, *, seed: int = 0) -> Inputs:
        """Return the tensors of a case on the CPU, with as many heads and samples as axes allow."""
        if not self.has_heads:
            heads = kv_heads = 1
        generator = torch.Generator().manual_seed(case.q_len * 1000 + case.kv_len + seed)
        heads, kv_heads = case.heads or heads, case.kv_heads or kv_heads
        head_dim, batch = case.head_dim or self.head_dim, 2 if "batch" in self.layout else 1

        def normal(heads: int, tokens: int) -> Tensor:
            return torch.randn(batch, heads, tokens, head_dim, generator=generator)

        query, upstream = normal(heads, case.q_len), normal(heads, case.q_len)
        key, value = normal(kv_heads, case.kv_len), normal(kv_heads, case.kv_len)
        if case.kind == "sharp":
            query = query * _SHARP
        elif case.kind == "NaN":
            key[..., -_HIDDEN_KEYS:, :] = torch.nan
        elif case.kind in _ENDS:
            # One direction for all tokens of a head; its columns are rounded independently.
            towards = torch.randn(head_dim, generator=generator)
            # The factor of both, so that query · key / √head_dim is _LARGE.
            towards *= (_LARGE / head_dim**0.5) ** 0.5 / towards.square().mean().sqrt()
            query, key = towards.expand_as(query), towards.expand_as(key)
            key = key * torch.linspace(*_ENDS[case.kind], case.kv_len)[:, None]
        return Inputs(*(t.to(self.dtype) for t in (query, key, value, upstream)))

    def run(self, inputs: Inputs, strides: str = "", *, has_gradient: bool = False) -> Run:
        """Run the kernel once, on inputs that need a gradient or none.

        Args:
            inputs: of a case.
            strides: those of the case.
            has_gradient: query, key and value need a gradient.

        Raises:
            ValueError: its output has another shape than the query.
            Exception: whatever it raises.
        """
        tensors = (inputs.query, inputs.key, inputs.value)
        ways = {"views": ("turned", "turned", "cut"), "columns": ("", "columns", "")}
        query, key, value = (
            self.laid(tensor, way)
            for tensor, way in zip(tensors, ways.get(strides, ("",) * 3), strict=True)
        )
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

    def laid(self, tensor: Tensor, way: str = "") -> Tensor:
        """Return a copy of (batch, heads, tokens, dim) in the axes of the kernel.

        Args:
            tensor: the numbers.
            way: how they lie in memory: "": contiguous; "turned": the last two axes before the
                columns are exchanged, as after a transpose; "cut": as a part of wider rows;
                "columns": those of a row do not lie side by side.
        """
        laid = self._in_axes(tensor.detach().to(self.device, self.dtype, copy=True))
        match way:
            case "turned" if laid.ndim > 2:
                return laid.transpose(-2, -3).contiguous().transpose(-2, -3)
            case "turned" | "cut":
                return torch.nn.functional.pad(laid, (0, 8))[..., : laid.shape[-1]]
            case "columns":
                return laid.mT.contiguous().mT
            case _:
                return laid.contiguous()

    def _in_axes(self, tensor: Tensor) -> Tensor:
        """Return (batch, heads, tokens, dim) in the axes of the kernel."""
        names = self.layout.split()
        if not self.has_heads:
            tensor = tensor.squeeze(1)
        if "batch" not in names:
            tensor = tensor.squeeze(0)
        return tensor.permute([_in_order(names).index(name) for name in names])

    def unlaid(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the axes of the kernel as (batch, heads, tokens, dim) in float64."""
        names = self.layout.split()
        wide = tensor.detach().cpu().double().permute([names.index(n) for n in _in_order(names)])
        if "batch" not in names:
            wide = wide.unsqueeze(0)
        return wide if self.has_heads else wide.unsqueeze(1)


def _in_order(names: Sequence[str]) -> list[str]:
    return [name for name in ("batch", "heads", "tokens", "dim") if name in names]


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in cast("tuple[object, ...]", result):
            yield from _tensors(part)
