"""The way from the outputs of the heads to the result, and the weights that are returned."""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from regard.diagnosis.facts.origins import Coordinates, Sizes, located
from regard.diagnosis.facts.rows import Rows
from regard.diagnosis.facts.trace import Trace
from regard.diagnosis.inputs.tape import Step

_CLOSE = 1e-9


class HeadOutputs:
    """The outputs of all heads of an attention, and the tensors of the run that hold them.

    Args:
        rows: the attention.
        trace: its run.
        sizes: of the run.
    """

    def __init__(self, rows: Rows, trace: Trace, sizes: Sizes) -> None:
        self._rows, self._trace, self._sizes = rows, trace, sizes
        self._output = rows.weights @ rows.value  # (samples, heads, q_len, columns)
        self._values, self._order = self._output.flatten().sort()
        largest = float(self._values.abs().max()) if self._values.numel() else 0.0
        self._tolerance = _CLOSE * max(largest, 1e-300)

    def are_merged(self) -> tuple[bool | None, str]:
        """Return whether the heads of a token lie side by side, and the line that merges them.

        The first is None if their use is unknown, as where each head has a layer of its own.
        """
        heads, tokens, columns = self._output.shape[1:]
        for tensor, line in self._merged_tensors():
            index = self._index(tensor)
            if index is None or tensor.numel() != self._output.numel():
                continue
            sample, token = index // (heads * tokens * columns), index // columns % tokens
            row = sample * tokens + token
            if tensor.shape[-1] == heads * columns and bool((row == row[..., :1]).all()):
                return True, line  # in whatever order the rows are
            layouts = [*_layouts(tensor.shape, self._sizes)]
            if any(self._agrees(tensor, sample, token, layout) for layout in layouts):
                return True, line
            if layouts:
                return False, line
        return None, ""

    def keep_order(self) -> bool | None:
        """Return True if row t of the result follows from row t of the attention's output alone.

        False: it follows from another row alone. None: it follows from several, or is unknown.
        """
        outputs = [attention.live for attention in self._rows.attentions]
        results = [t for t in _floats(tree_leaves(self._trace.result)) if t.requires_grad]
        if not results or not all(output.requires_grad for output in outputs):
            return None
        result = results[0]
        indices = [self._index(output) for output in outputs]
        layout = next(_layouts(result.shape, self._sizes), None)
        if layout is None or any(index is None for index in indices):
            return None
        tokens, columns = self._output.shape[2:]
        last = tokens - 1
        for token in sorted({0, last // 3, max(last - 1, 0), last}):
            row = result[(layout.token == token) & (layout.sample == 0)]
            if not len(row):
                return None
            factors = torch.linspace(1.0, 2.0, len(row), dtype=row.dtype)
            grads = torch.autograd.grad(
                (row * factors).sum(), outputs, retain_graph=True, allow_unused=True
            )
            sources: set[int] = set()
            for grad, index in zip(grads, indices, strict=True):
                gradient = cast(Tensor | None, grad)  # None: the output is not in the graph
                if gradient is not None and index is not None:
                    reached = (index // columns % tokens)[gradient.detach() != 0]
                    sources |= {*cast(list[int], reached.tolist())}
            if sources != {token}:
                return False if len(sources) == 1 else None
        return True

    def return_other_weights(self) -> bool:
        """Return True if the result has weights that differ from those that met the values."""
        weights = self._rows.weights
        q_len, kv_len = weights.shape[-2:]
        expected = (weights, weights.mean(1))
        for tensor in _floats(tree_leaves(self._trace.result)):
            matrix = tensor.detach().double()
            if tuple(matrix.shape[-2:]) != (q_len, kv_len) or q_len != kv_len:
                continue
            same_size = [each for each in expected if each.numel() == matrix.numel()]
            if not same_size or bool((matrix < 0).any()):
                continue
            if any(torch.allclose(matrix.reshape(e.shape), e, atol=_CLOSE) for e in same_size):
                continue
            if any(bool(((matrix.sum(axis) - 1).abs() < _CLOSE).all()) for axis in (-1, -2)):
                return True
        return False

    def _index(self, tensor: Tensor) -> Tensor | None:
        """Return the flat index in the output of each number; None if a number is not in it."""
        if not bool(self._values.isfinite().all()):
            return None
        numbers = tensor.detach().double().flatten()
        right = torch.searchsorted(self._values, numbers).clamp(max=len(self._values) - 1)
        left = (right - 1).clamp(min=0)
        is_left = (self._values[left] - numbers).abs() < (self._values[right] - numbers).abs()
        nearest = torch.where(is_left, left, right)
        if not bool(((self._values[nearest] - numbers).abs() <= self._tolerance).all()):
            return None
        return self._order[nearest].reshape(tensor.shape)

    def _agrees(self, tensor: Tensor, sample: Tensor, token: Tensor, layout: Coordinates) -> bool:
        """Return True if each number of a tensor belongs to the token where it lies."""
        apart = (layout.sample != sample) | (layout.token != token)
        # Equal numbers of several tokens, as of rows without a key, belong to each of them.
        outputs = self._output[layout.sample[apart], :, layout.token[apart]].flatten(1)
        gap = (outputs - tensor.detach().double()[apart][:, None]).abs()
        return not len(gap) or bool((gap.amin(-1) <= self._tolerance).all())

    def _merged_tensors(self) -> Iterator[tuple[Tensor, str]]:
        """Yield tensors that may be merged heads, with a line: inputs of layers, and results."""
        first = min(attention.at for attention in self._rows.attentions)
        steps = self._trace.steps[first:]
        for step in steps:
            if step.projects:
                for tensor in _floats(step.inputs):
                    yield tensor, _line_of(tensor, steps, step)
        for tensor in _floats(tree_leaves(self._trace.result)):
            yield tensor, _line_of(tensor, steps)


def _line_of(tensor: Tensor, steps: Iterable[Step], reader: Step | None = None) -> str:
    """Return the line of the first step with an output as large and as wide as a tensor.

    It is that of the reader of the tensor, if no step before it has such an output.
    """
    lines = (
        step.line
        for step in takewhile(lambda step: step is not reader, steps)
        for output in step.outputs
        if output.numel() == tensor.numel() and output.shape[-1:] == tensor.shape[-1:]
    )
    return next(lines, "" if reader is None else reader.line)


def _floats(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and not value.is_nested:
            yield value


def _layouts(shape: torch.Size, sizes: Sizes) -> Iterator[Coordinates]:
    """Yield the coordinates of a tensor; an axis of samples and tokens may have either first."""
    for is_token_first in (False, True):
        layout = located(shape, Sizes(sizes.batch, sizes.tokens, is_token_first))
        if layout is not None:
            yield layout
