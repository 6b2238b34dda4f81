"""The line where a fact of an attention is written: that of the first tensor which has it.

A stage of an attention reads an operand, such as a mask, a factor or a table of angles. The fact
lies in the numbers of the operand, so its line is that of the first tensor behind the operand that
has these numbers: the keys on both sides of the border of a mask, the angles of a rotation. A
number, a buffer or a layer, which no operation of the run gives, leads on to the statement that
assigned its name. Where attentions, or query and key, share a line, it is that of its caller.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from regard.capture.storages import storage_key
from regard.diagnosis.facts.trace import Attention, Trace
from regard.diagnosis.facts.visible import Band, Pattern
from regard.diagnosis.inputs.source import assigned, names_at, number_line
from regard.diagnosis.inputs.tape import Step

_LOW = -500.0
_NO_WEIGHT = 1e-300
_SAME = 1e-6
_INVERTING = ("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not", "rsub")
_COMPUTING = ("mul", "rsub", "sub", "add", "where", "div", "masked_fill", "masked_fill_", "log")
_SHAPES_ALONE = ("_like", "new_")


@dataclass(frozen=True, eq=False)
class Change:
    """A step between the product of query and key and the softmax.

    Attributes:
        stage: "scale", "mask" or "bias".
        at: the number of the step.
        scores: the scores that it gives.
        factor: of the scale; 1 for other stages.
    """

    stage: str
    at: int
    scores: Tensor
    factor: float = 1.0


class Written:
    """The lines where the facts of one attention are written.

    Args:
        trace: of the run.
        attention: the first piece of the attention.
    """

    def __init__(self, trace: Trace, attention: Attention) -> None:
        self._trace, self._attention = trace, attention
        self._steps = trace.steps

    def stages(self) -> dict[str, str]:
        """Return the line that runs each stage that changes the scores.

        They are "product", "scale", "bias", "mask", "softmax" and "value"; those that the code does
        not have are missing, and all stages of one fused call are one line.
        """
        lines = dict(self._attention.lines)
        if "product" not in lines:
            line = lines.get("softmax", "")
            return dict.fromkeys(("product", "scale", "mask", "softmax", "value"), line)
        for change in self._changes:
            lines.setdefault(change.stage, self._steps[change.at].line)
        return lines

    def of_mask(self, pattern: Pattern, *, is_argument: bool = False) -> dict[str, str]:
        """Return the lines of a mask: "mask", "mask left", "mask right" and "mask inverted".

        They are those of its keys, of its borders, and of what True in it means.

        Args:
            pattern: the rule of the visible keys, without the arguments of the call.
            is_argument: the mask of an argument is asked for, and not the pattern.
        """
        hidden = self._hidden
        if hidden is None:
            return {}
        seen = pattern.dense(*hidden.shape[-2:]).expand(hidden.shape)
        if is_argument:
            border = self._of_border(~hidden, hidden & seen)
            by_keys = self._of_border(~hidden, hidden & seen, is_of_keys=True)
            lines = {"mask": border, "mask of keys": by_keys}
            if border is not None:
                lines["mask inverted"] = self._of_meaning(border, is_argument=True)
        else:
            lines = {"mask": self._of_border(~hidden, hidden)}
            if isinstance(pattern, Band):
                away = torch.arange(hidden.shape[-1]) - torch.arange(hidden.shape[-2])[:, None]
                for side, last, step in (("right", pattern.right, 1), ("left", pattern.left, -1)):
                    if last is not None:
                        diagonals = (away == step * last, away == step * (last + 1))
                        inside, outside = (each.expand(hidden.shape) for each in diagonals)
                        lines[f"mask {side}"] = self._of_border(inside, outside)
                border = lines.get("mask left")
                # A causal mask ends right of the query; if what it hides is seen, nothing else.
                if border is not None and pattern.left == 0:
                    lines["mask inverted"] = border
                elif border is not None:
                    lines["mask inverted"] = self._of_meaning(border, is_argument=False)
        return {name: line for name, line in lines.items() if line}

    def of_any_mask(self) -> str:
        """Return the line of the first tensor that tells hidden scores from the others."""
        return self.of_mask(Band()).get("mask", "")

    def of_bias(self) -> str:
        """Return the line that gives the numbers which are added to the scores."""
        change = next((c for c in self._changes if c.stage == "bias"), None)
        return "" if change is None else self._of_last(self._behind(change), change.at)

    def of_cap(self) -> str:
        """Return the line of the tanh that caps the scores; "" without one."""
        steps = self._steps[max(self._start, 0) : self._attention.at]
        return next((step.line for step in steps if step.name in ("tanh", "tanh_")), "")

    def of_added_mask(self) -> str:
        """Return the line that gave the numbers of a mask that is added and hides nothing."""
        change = next((c for c in reversed(self._changes) if c.stage in ("bias", "mask")), None)
        if change is None:
            return ""
        step = self._steps[change.at]
        numbers = [t for t in step.inputs if t.numel() == 1 and t.is_floating_point()]
        if numbers and not self._slice(numbers, change.at):  # a buffer, or a variable of the file
            return self._of_root(numbers[0], step)
        return self._of_last(self._behind(change), change.at)

    def of_scale(self, factors: Sequence[tuple[float, int]], standard: float) -> str:
        """Return the line of a factor of the scores.

        Args:
            factors: of queries and keys before they meet, each with the number of its step.
            standard: the factor that all of them together should be.
        """
        all_factors = [*factors]
        all_factors += [(c.factor, c.at) for c in self._changes if c.stage == "scale"]
        odd = [pair for pair in all_factors if not math.isclose(pair[0], standard, rel_tol=_SAME)]
        if not all_factors:  # the number of a fused call, or none at all
            is_fused = "product" not in self._attention.lines
            return number_line(self._steps[self._attention.at], [1.0]) if is_fused else ""
        factor, at = (odd or all_factors)[-1]
        step = self._steps[at]
        operands = [t for t in step.inputs if t.numel() == 1]
        for tensor in operands:
            behind = [n for n in self._slice([tensor], at) if self._steps[n].line]
            if behind:
                return self._steps[behind[-1]].line
        given = [v for v in step.args if isinstance(v, float)]
        given = [1 / v for v in given if v] if step.name.startswith("div") else given
        is_standard = any(math.isclose(v, standard, rel_tol=_SAME) for v in given)
        may_be = [factor, 1 / factor] if factor else [factor]
        return step.line if is_standard else number_line(step, may_be)

    def of_role(self, at: int, others: Sequence[int]) -> str:
        """Return the line of a step that steps of other roles may share: then that of its caller.

        Args:
            at: the number of the step.
            others: those of the other roles.
        """
        step = self._steps[at]
        shared = {
            line
            for number in others
            for line in (self._steps[number].place, *self._steps[number].callers)
        }
        lines = (line for line in (step.place, *step.callers) if line not in shared)
        is_shared = step.place in shared and bool(step.callers)
        return str(next(lines, step.callers[0] if is_shared else step.line))

    def of_divisor(self, at: int) -> str:
        """Return the line of the sum that a step divides by; its own for any other step."""
        step = self._steps[at]
        if step.name not in ("div", "div_", "mul", "mul_") or len(step.inputs) < 2:
            return of_layer(self._trace.model, step)
        behind = [n for n in self._slice(step.inputs[1:2], at) if self._steps[n].name in _SUMS]
        return self._steps[behind[-1]].line if behind else step.line

    def of_projection(self, role: str) -> str:
        """Return the line of the layer whose output is the query, the key or the value itself."""
        step, at = self._steps[self._attention.at], self._attention.at
        if role != "value" and "product" in self._attention.lines:
            at = self._start
            step = self._steps[at]
        operands = [t for t in step.inputs if t.ndim > 1]
        number = 0 if role == "query" else 2 if role == "value" and len(operands) > 2 else 1
        keys = {*map(storage_key, operands[number : number + 1])}
        for earlier in reversed(self._steps[:at]):
            if not keys.isdisjoint(map(storage_key, earlier.alive)):
                if earlier.projects and "norm" not in earlier.name:
                    return earlier.line
                keys |= {storage_key(tensor) for tensor in earlier.inputs}
        return ""

    @cached_property
    def _start(self) -> int:
        """The number of the step of the product of query and key; -1 if it is unknown."""
        count = self._attention.weights.numel()
        products = (
            at
            for at in range(self._attention.at - 1, -1, -1)
            if self._steps[at].name in ("mm", "bmm", "baddbmm")
            and self._steps[at].depends
            and self._steps[at].outputs[0].numel() == count
        )
        return next(products, -1)

    @cached_property
    def _changes(self) -> list[Change]:
        return [] if self._start < 0 else [*self._changed()]

    def _changed(self) -> Iterator[Change]:
        """Yield the steps that change the scores, in order."""
        count, before = self._attention.weights.numel(), self._steps[self._start].outputs[0]
        for at in range(self._start + 1, self._attention.at):
            step = self._steps[at]
            if "softmax" in step.name or step.name == "exp":
                return
            after = next((t for t in step.outputs if _may_follow(t, step, count)), None)
            if after is None or before.numel() != after.numel():
                continue
            scores_before, scores_after = (t.double().flatten() for t in (before, after))
            if torch.equal(scores_before.sort().values, scores_after.sort().values):
                before = after  # it is only laid out in another way
                continue
            if before.shape != after.shape:
                before = before.reshape(after.shape)
            yield _change(before.double(), after.double(), at)
            before = after

    @cached_property
    def _hidden(self) -> Tensor | None:
        """The scores that are hidden, in the axes of the code; None if none is."""
        if "product" not in self._attention.lines:
            hidden = self._attention.weights <= _NO_WEIGHT
        else:
            masks = [change for change in self._changes if change.stage == "mask"]
            hidden = masks[-1].scores < _LOW if masks else torch.zeros(1, dtype=torch.bool)
        return hidden if hidden.ndim > 1 and bool(hidden.any()) else None

    @cached_property
    def _masks(self) -> list[tuple[int, list[int]]]:
        """The steps that hide scores, each with the steps behind its mask."""
        if "product" not in self._attention.lines:
            at = self._attention.at
            step = self._steps[at]
            operands = [t for t in step.inputs[3:] if t.ndim > 1]
            return [(at, self._slice(operands, at))]
        return [(c.at, self._behind(c)) for c in self._changes if c.stage == "mask"]

    def _of_border(
        self, inside: Tensor, outside: Tensor, *, is_of_keys: bool = False
    ) -> str | None:
        """Return the line of the first tensor that tells keys inside and outside apart.

        Args:
            inside: which scores are on the one side, in the axes of the scores.
            outside: those on the other side.
            is_of_keys: a tensor (batch, kv_len) counts as well, before it has the scores' axes.
        """

        def separates(tensor: Tensor) -> bool:
            if is_of_keys and tensor.shape == (inside.shape[0], inside.shape[-1]):
                tensor = tensor.reshape(len(tensor), *[1] * (inside.ndim - 2), -1)
            return _separates(tensor, inside, outside)

        if not bool(inside.any()) or not bool(outside.any()):
            return None
        for at, behind in self._masks:
            for number in [*behind, at]:
                step = self._steps[number]
                made = {storage_key(t) for n in behind if n < number for t in self._steps[n].alive}
                for tensor in step.inputs:
                    is_root = storage_key(tensor) not in made and not _is_scores(tensor, step)
                    if is_root and separates(tensor):
                        return self._of_root(tensor, step)
                if number != at and any(map(separates, step.outputs)):
                    return step.line
        return None

    def _of_meaning(self, border: str, *, is_argument: bool) -> str:
        """Return the line that says what True in a mask means."""
        for at, behind in self._masks:
            lines = [self._steps[n].line for n in behind]
            first = lines.index(border) if border in lines and not is_argument else 0
            for number in [*behind[first:], at]:
                step = self._steps[number]
                if step.name in _INVERTING and step.line:
                    return step.line
            is_filled = self._steps[at].name not in ("add", "add_", "sub", "sub_")
            if is_filled and "product" in self._attention.lines:
                return self._steps[at].line
            if is_argument and "product" in self._attention.lines:
                return self._of_last(behind, at)
        return border

    def _of_root(self, tensor: Tensor, step: Step) -> str:
        """Return the line of a tensor that no operation of the run gave, as a step reads it."""
        if step.place is None:
            return ""
        for module in self._trace.model.modules():
            kept = {**vars(module), **dict(module.named_buffers(recurse=False))}
            for name, value in kept.items():
                if isinstance(value, Tensor) and storage_key(value) == storage_key(tensor):
                    return str(assigned(f"self.{name}", step.place) or step.line)
        # An array of NumPy, or a variable of the file.
        names = [name for name in names_at(step.place) if not name.startswith("self.")]
        places = [assigned(name, step.place) for name in names] if not step.depends else []
        is_near = [p for p in places if p is not None and p.line < step.place.line]
        return str(is_near[-1]) if len(is_near) == 1 else step.line

    def _of_last(self, behind: Sequence[int], at: int) -> str:
        """Return the line of the last step that computes an operand; else that of its reader."""
        lines = [s.line for s in (self._steps[n] for n in behind) if s.name in _COMPUTING]
        return next((line for line in reversed(lines) if line), self._steps[at].line)

    def _behind(self, change: Change) -> list[int]:
        """Return the steps that gave what a step reads beside the scores."""
        step = self._steps[change.at]
        tensors = [t for t in step.inputs if not _is_scores(t, step)]
        return self._slice(tensors, change.at)

    def _slice(self, tensors: Sequence[Tensor], before: int) -> list[int]:
        """Return the numbers of the steps that gave tensors, in order."""
        keys = {storage_key(tensor) for tensor in tensors}
        numbers: list[int] = []
        for number in range(before - 1, -1, -1):
            step = self._steps[number]
            if keys.isdisjoint(map(storage_key, step.alive)) or step.projects:
                continue
            numbers.append(number)
            if not any(part in step.name for part in _SHAPES_ALONE):
                keys |= {storage_key(tensor) for tensor in step.inputs}
        return numbers[::-1]


_SUMS = ("sum", "reciprocal", "logsumexp", "cumsum", "mean")


def of_layer(model: nn.Module, step: Step) -> str:
    """Return the line of a step; if a layer of PyTorch's runs it, the one that makes the layer."""
    if step.place is None:
        return ""
    for name in names_at(step.place):
        layers = [
            getattr(module, name[5:], None) for module in model.modules() if name[:5] == "self."
        ]
        is_layer = any(type(each).__module__ in _LAYERS for each in layers)
        if is_layer and (line := assigned(name, step.place)) is not None:
            return str(line)
    return step.line


_LAYERS = ("torch.nn.modules.activation",)


def _is_scores(tensor: Tensor, step: Step) -> bool:
    """Return True for what a step changes: its first tensor with as many numbers as its output."""
    sizes = [t for t in step.inputs if t.numel() == step.outputs[0].numel()]
    floats = [t for t in sizes if t.is_floating_point()]
    return bool(floats) and tensor is floats[0]


def _separates(tensor: Tensor, inside: Tensor, outside: Tensor) -> bool:
    """Return True if a tensor of two numbers has one inside, and the other one outside."""
    if tensor.ndim < 2 or tensor.is_complex():
        return False
    q_len, kv_len = inside.shape[-2:]
    try:
        laid = tensor.detach()[..., :q_len, :kv_len].expand(inside.shape).double().nan_to_num(-1.5)
    except RuntimeError:
        return False
    first, second = laid[inside], laid[outside]
    is_one = bool((first == first[0]).all()) and bool((second == second[0]).all())
    return (
        is_one
        and bool(first[0] != second[0])
        and bool(((laid == first[0]) | (laid == second[0])).all())
    )


def _may_follow(tensor: Tensor, step: Step, count: int) -> bool:
    is_float = tensor.is_floating_point() and not tensor.is_nested
    return step.depends and is_float and tensor.numel() == count


def _change(before: Tensor, after: Tensor, at: int) -> Change:
    """Return what a step does to scores."""
    low = (after < _LOW) & (before >= _LOW)
    kept = ~low & before.isfinite() & after.isfinite() & (before != 0)
    if bool(low.any()):
        return Change("mask", at, after)
    ratio = (after / before)[kept]
    if len(ratio) and float(ratio.max() - ratio.min()) <= 1e-9 * float(ratio.abs().max()):
        return Change("scale", at, after, float(ratio[0]))
    return Change("bias", at, after)
