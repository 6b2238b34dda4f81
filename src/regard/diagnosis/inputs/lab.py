"""Runs of code under check: in float64, as copies, with the numbers of each token known."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from regard.diagnosis.inputs.mask_forms import given_forms, open_masks
from regard.diagnosis.inputs.specimen import Contents, Specimen
from regard.diagnosis.inputs.subject import independent, kept_defaults, quiet, uses_flex_attention
from regard.diagnosis.inputs.tape import Place, Step, Tape, place_of, tensors_in

_TOLERANCE = 1e-8

Arguments = tuple[list[Any], dict[str, Any]]
"""The arguments of a call, by position and by name."""


class NotTried(Exception):
    """A law cannot be tried on this code; the message is the reason, in one sentence.

    Args:
        reason: in one sentence.
        applies: False if the code has nothing that the law speaks of.
    """

    def __init__(self, reason: str, *, applies: bool = True) -> None:
        super().__init__(reason)
        self.applies = applies


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Return where two results differ by more than rounding; NaN equals NaN."""
    one, other = one.detach().double(), other.detach().double().expand(one.shape)
    finite = other[other.isfinite()].abs()
    size = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return ~torch.isclose(one, other, rtol=0, atol=_TOLERANCE * size, equal_nan=True)


def normal(seed: int, *shape: int) -> Tensor:
    """Return normal random numbers in float64, the same for the same seed and shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Run:
    """One run.

    Attributes:
        rows: the output in float64, (batch, rows, columns).
        result: everything that the code gave back.
        steps: its operations, where they were kept.
        call: the copy that ran.
        arguments: as they are after the run.
    """

    rows: Tensor
    result: Any
    steps: list[Step]
    call: Callable[..., Any]
    arguments: Arguments

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the copy that ran."""
        return list(self.call.parameters()) if isinstance(self.call, nn.Module) else []


@dataclass(eq=False)
class Lab:
    """Runs one specimen.

    Attributes:
        specimen: the code with its arguments.
        notes: what was noticed that is no fault, in sentences.
        changed_defaults: names of arguments whose default a call has changed.
    """

    specimen: Specimen
    notes: list[str] = field(default_factory=list[str])
    changed_defaults: set[str] = field(default_factory=set[str])

    @cached_property
    def _exact(self) -> Callable[..., Any]:
        call = self.specimen.call
        if not isinstance(call, nn.Module):
            return call
        exact = independent(call).double()
        for number, (name, parameter) in enumerate(exact.named_parameters()):
            # At the start of training a layer or a gate may be zero, and hides what is before it;
            # numbers that are all alike make heads alike.
            is_layer = name.endswith("weight") and parameter.ndim > 1
            is_even = is_layer and bool((parameter == parameter.flatten()[0]).all())
            if is_even or (parameter.numel() == 1 and not parameter.any()):
                parameter.data = 0.1 * normal(7 + number, *parameter.shape)
        for part in exact.modules():  # a cache may be a tensor that is neither parameter nor buffer
            for name, value in vars(part).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    setattr(part, name, value.double())
        return exact

    @cached_property
    def _takes_gradients(self) -> bool:
        # On a CPU flex_attention refuses parameters that take gradients.
        call = self.specimen.call
        is_flex = isinstance(call, nn.Module) and uses_flex_attention(call)
        return self.specimen.takes_gradients and not is_flex

    @property
    def model(self) -> nn.Module | None:
        """The module in float64; None for a function."""
        return self._exact if isinstance(self._exact, nn.Module) else None

    def fresh(self, *, is_double: bool = True, grads: bool = False) -> Callable[..., Any]:
        """Return a copy of the code that nothing else uses; ``grads``: its gradients are wanted."""
        original = self._exact if is_double else self.specimen.call
        if not isinstance(original, nn.Module):
            return original
        own = independent(original)
        return own if grads or self._takes_gradients else own.requires_grad_(False)

    def run(
        self,
        contents: Contents,
        *,
        call: Callable[..., Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        is_double: bool = True,
        keeps: bool = False,
        seed: int = 0,
        grads: bool = False,
    ) -> Run:
        """Run the code once.

        Args:
            contents: numbers of the tokens by source.
            call: a copy to run; None: a fresh one.
            extra: more arguments by name, or other values for slots.
            is_double: in float64, else in float32.
            keeps: keep its operations.
            seed: of PyTorch's random numbers.
            grads: keep the graph of the output, and the arguments as leaves of it.

        Raises:
            Exception: whatever the code raises.
        """
        call = self.fresh(is_double=is_double) if call is None else call
        dtype = torch.float64 if is_double else torch.float32
        result, arguments, tape = self.called(
            call, contents, extra or {}, dtype, seed=seed, grads=grads, keeps=keeps
        )
        output = self._outputs(result)[self._output[0]]
        rows = self._rows((output if grads else output.detach()).double())
        return Run(rows, result, tape.steps, call, arguments)

    def called(
        self,
        call: Callable[..., Any],
        contents: Contents,
        extra: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        seed: int = 0,
        grads: bool = False,
        **options: Any,
    ) -> tuple[Any, Arguments, Tape]:
        """Return what a call gives back, its arguments, and the tape of it.

        Args:
            call: a copy to run.
            contents: as ``run`` takes them.
            extra: likewise.
            dtype: of all numbers.
            seed: as ``run`` takes it.
            grads: likewise.
            **options: as ``Tape`` takes them.
        """
        arguments = self.specimen.arguments(contents, dtype, extra or {})
        if grads:
            arguments = tree_map(_leaf, arguments)
        tape = Tape(dtype=dtype, **options)
        with quiet(seed):
            torch.set_default_dtype(dtype)
            with tape:
                sent = tree_map(_graphed, arguments) if grads else arguments
                with kept_defaults(call) as changed:
                    result = call(*sent[0], **sent[1])
        self.changed_defaults |= changed
        return result, arguments, tape

    def overflow(
        self, contents: Contents, extra: Mapping[str, Any]
    ) -> tuple[str, Place | None, str] | None:
        """Return what half precision inside the code makes of a number that is too large.

        Returns:
            A sentence, the line and the name of the mistake; None if all numbers fit.
        """
        original = self.specimen.original
        own = [p.dtype for p in original.parameters() if p.is_floating_point()] if original else []
        for dtype in dict.fromkeys([*own, torch.float32]):
            call = independent(original) if original is not None else self.fresh(is_double=False)
            values, named = self.specimen.arguments(contents, dtype, extra)
            try:
                with quiet(), kept_defaults(call):
                    output = self._outputs(call(*values, **named))[self._output[0]]
            except RuntimeError as error:
                if "overflow" in str(error):
                    says = "The largest number of float16 is 65504: here it raises."
                    return says, place_of(error), "mask-fill-value"
                continue
            except Exception:  # noqa: BLE001  # somebody's code may raise anything
                continue
            if output.isfinite().all():
                continue
            exact = self.run(contents, extra=extra, is_double=False)
            if exact.rows.isfinite().all():
                says = (
                    "Half precision inside it makes numbers that are not finite; float32 does not."
                )
                return says, None, "overflow"
        return None

    def _without_grid(self, tensor: Tensor) -> Tensor:
        """Return a tensor with two axes of pixels as one of tokens."""
        grid = next(iter(self.specimen.sources.values())).grid
        for axis in range(tensor.ndim - 1):
            if grid is not None and tuple(tensor.shape[axis : axis + 2]) == grid:
                return tensor.flatten(axis, axis + 1)
        return tensor

    def _outputs(self, result: Any) -> list[Tensor]:
        found = [t for t in as_tensors(result) if t.is_floating_point()]
        return [self._without_grid(t) for t in found]

    def _rows(self, output: Tensor) -> Tensor:
        """Return an output as (batch, rows, columns)."""
        _, batch, tokens = self._output
        if tokens is not None and tokens < output.ndim:
            output = output.movedim(tokens, 0)
            batch = None if batch is None else batch + (batch < tokens)
        else:
            output, batch = output[None], None if batch is None else batch + 1
        output = output[:, None] if batch is None else output.movedim(batch, 1)
        return output.transpose(0, 1).flatten(2) if output.ndim > 2 else output.T[..., None]

    @cached_property
    def _output(self) -> tuple[int, int | None, int | None]:
        """The output's number among the tensors, its batch axis and its token axis."""
        s = self.specimen
        shapes = self.shapes
        if not shapes:
            raise ValueError(
                f"{s.name} gave back no tensor of floating-point numbers; one output must have the "
                "same batch and tokens."
            )
        tokens = s.tokens - 1 if s.tokens > 3 else 5
        tokens = tokens if s.most_tokens is None else min(tokens, s.most_tokens)
        batch = s.batch if s.has_batch else None
        batch_axes = self._axes(shapes, "b", batch, (s.batch + 1, s.tokens))
        token_axes = self._axes(
            shapes,
            "t",
            s.tokens if s.has_tokens or s.is_fixed else None,
            None if s.is_fixed else (s.batch, tokens),
        )

        # Weights have two axes as long as there are keys; an output has one.
        def weightlike(i: int) -> bool:
            return shapes[i][-1:] == (s.tokens,) and len(shapes[i]) > 2

        order = sorted(range(len(shapes)), key=lambda i: (token_axes[i] is None, weightlike(i)))
        best = order[0]
        return best, batch_axes[best], token_axes[best]

    def _axes(
        self,
        shapes: list[tuple[int, ...]],
        letter: str,
        size: int | None,
        other: tuple[int, int] | None,
    ) -> list[int | None]:
        """Return, of each output, the first axis that follows another size of batch and tokens.

        Where the code cannot be run with that, it is the axis of the size that it has: that of the
        input, or else the first one.
        """
        if size is None:
            return [None] * len(shapes)
        try:
            moved = None if other is None else self._shapes(*other)
        except Exception:  # noqa: BLE001  # somebody's code may raise anything
            moved = None
        if moved is None:
            axes = next(iter(self.specimen.sources.values())).axes
            own = axes.index(letter) if letter in axes else 0
            return [
                own
                if shape[own : own + 1] == (size,)
                else shape.index(size)
                if size in shape
                else None
                for shape in shapes
            ]
        found: list[int | None] = []
        for shape, own in zip(shapes, moved, strict=False):
            pairs = enumerate(zip(shape, own, strict=False))
            found.append(next((axis for axis, (a, b) in pairs if a != b), None))
        return found + [None] * (len(shapes) - len(found))

    def _shapes(self, batch: int, tokens: int) -> list[tuple[int, ...]]:
        contents = self.specimen.contents(batch, tokens)
        result, *_ = self.called(self.fresh(is_double=False), contents, {}, torch.float32)
        return [tuple(t.shape) for t in self._outputs(result)]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all tensors of floating-point numbers that the code gives back."""
        return self._shapes(self.specimen.batch, self.specimen.tokens)

    @property
    def sees_rows(self) -> bool:
        """Return True if the output has an axis as long as there are tokens."""
        return self._output[2] is not None

    @property
    def output_axes(self) -> tuple[int | None, int | None]:
        """The axes of the output that stand for batch and tokens."""
        return self._output[1], self._output[2]

    @property
    def output_ndim(self) -> int:
        """The number of the output's axes."""
        return len(self.shapes[self._output[0]])

    @property
    def has_batch(self) -> bool:
        """Return True if arguments and output have an axis for the batch."""
        return self.specimen.has_batch and self._output[1] is not None

    @cached_property
    def influence(self) -> Tensor:
        """The influence of tokens on rows of the output, bool, (rows, tokens).

        Where tokens attend to each other and to a memory, the memory stays as it is.

        Raises:
            NotTried: tokens or rows cannot be told apart.
        """
        s = self.specimen
        if not s.has_tokens or not self.sees_rows:
            raise NotTried("No axis of its arguments and its output stands for the tokens.")
        contents = s.contents(1, s.tokens, seed=3, size=0.1)  # no score hides a token by its size
        call = self.fresh()

        def rows_of(samples: list[Contents]) -> Tensor:
            """Return the rows of samples, which one run takes as its batch where it can."""
            if self.has_batch and not s.has_given_samples:
                batch = {name: torch.cat([each[name] for each in samples]) for name in contents}
                return self.run(batch, call=call, extra=self._shown_keys(batch)).rows
            extra = self._shown_keys(contents)
            return torch.cat([self.run(each, call=call, extra=extra).rows for each in samples])

        def moved(only: Collection[str]) -> Tensor:
            samples = [contents]
            for token in range(s.tokens):
                changed = s.changed(contents, token=token, only=only)
                floats = [name for name, t in changed.items() if t.is_floating_point()]
                nearer = {name: torch.lerp(contents[name], changed[name], 0.2) for name in floats}
                samples.append({**changed, **nearer})
            base, *others = rows_of(samples)
            return torch.stack([differs(rows, base).any(-1) for rows in others], -1)

        seen = moved([name for name in s.sources if name not in s.memory])
        if not s.memory or bool((seen.triu(1) | seen.tril(-1)).any()):
            return seen
        return moved(s.sources)

    def _shown_keys(self, contents: Contents) -> dict[str, Tensor]:
        """Return the caller's masks of keys with no key hidden.

        A query that sees no key may read all of them.
        """
        forms = [form for form in given_forms(self.specimen) if form.is_of_keys]
        return open_masks(self.specimen, contents, forms)


def as_tensors(result: Any) -> list[Tensor]:
    """Return the tensors that code gave back; NumPy arrays become tensors."""
    return tensors_in(tree_map(_as_tensor, result)) if not isinstance(result, Tensor) else [result]


def _as_tensor(value: Any) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return torch.as_tensor(value)
    if hasattr(value, "to_tuple"):
        return value.to_tuple()
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(vars(value).values())
    return value


def _leaf(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().requires_grad_() if is_float else value


def _graphed(value: Any) -> Any:
    """Return a tensor that the code may write into, on a leaf of the graph."""
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value
