"""Runs of somebody's code for its facts, with lengths that no other axis has."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.facts.black_box import rows_of_function
from regard.diagnosis.facts.changed_weights import raise_for_changed, raise_for_outputs
from regard.diagnosis.facts.formula import AddedPositions
from regard.diagnosis.facts.origins import Numbers, Sizes, located
from regard.diagnosis.facts.rows import Rows, Unread, rows_of
from regard.diagnosis.facts.trace import Trace, traced
from regard.diagnosis.facts.written import Written
from regard.diagnosis.inputs.lab import Lab, as_tensors
from regard.diagnosis.inputs.mask_forms import Form
from regard.diagnosis.inputs.specimen import Contents, Specimen

_LARGEST_INTEGER = 64
"""Texts are longer than all integers of the code up to this one."""
_BATCHES = (3, 2, 5, 7, 11)
_LENGTHS = (7, 11, 13, 17, 19, 23)
_LONG_LENGTHS = (11, 17, 23, 29, 37, 41, 47, 53, 61, 67)
_SAME_NUMBER = 1e-6


@dataclass(frozen=True, eq=False)
class Run:
    """One run.

    Attributes:
        rows: of its attentions.
        arguments: its tensor arguments that hold no numbers of tokens, by name.
        sizes: its batch and tokens.
        form: of the mask that was passed; None without one.
        trace: of the run; None if its outputs gave the rows.
    """

    rows: list[Rows]
    arguments: dict[str, Tensor]
    sizes: Sizes
    form: Form | None
    trace: Trace | None

    @property
    def mask_argument(self) -> str:
        """The argument that is the mask; "" without one."""
        return "" if self.form is None else self.form.argument


class Runs:
    """Runs of one specimen.

    Attributes:
        specimen: the code with its arguments.
        short: numbers of tokens that no other axis has.
    """

    def __init__(self, specimen: Specimen) -> None:
        self.specimen = specimen
        self._lab = Lab(specimen)
        # True for a function whose operations could not be read, as where it uses NumPy or loops
        # over tiles: its outputs give its weights, and its operations the lines of the stages.
        self._is_black_box = False
        self._lines: Mapping[str, str] = {}
        taken = self._integers()
        batches = [batch for batch in _BATCHES if batch not in taken]
        if self.has_ids:
            batches.sort()  # so that fewer ids are equal
        self._batch = specimen.batch if specimen.segments else (batches or [specimen.batch])[0]
        if not specimen.has_batch:
            self._batch = 1
        self.short = [n for n in _LENGTHS if n not in taken and n != self._batch]
        longest = max([n for n in taken if n <= _LARGEST_INTEGER], default=0)
        free = (n for n in _LONG_LENGTHS if n > longest and n not in taken)
        self._long = next(n for n in free if n != self._batch)

    @property
    def has_ids(self) -> bool:
        """True if the code takes ids of tokens."""
        return any(slot.high for slot in self.specimen.slots)

    def repeats_ids(self, tokens: int) -> bool:
        """Return True if the code takes too few ids to give each token another one."""
        return any(0 < slot.high < self._batch * tokens for slot in self.specimen.slots)

    @property
    def input_names(self) -> list[str]:
        """The names of the arguments that hold numbers of tokens."""
        return [slot.name for slot in self.specimen.slots if slot.source]

    @property
    def has_one_length(self) -> bool:
        """True if the code takes one number of tokens alone, as that of an example."""
        s = self.specimen
        return bool(s.is_fixed or s.segments or s.is_example)

    def lengths(self) -> Iterator[int]:
        """Yield the numbers of tokens to find facts with, the longest first."""
        s = self.specimen
        if self.has_one_length:
            yield s.tokens
        elif s.most_tokens is not None:
            yield from (n for n in reversed(self.short) if n <= s.most_tokens)
        else:
            yield self._long
            yield from reversed(self.short)
            yield s.tokens

    def run(
        self,
        tokens: int,
        *,
        seed: int,
        size: float = 1.0,
        form: Form | None = None,
        has_other_memory: bool = False,
    ) -> Run:
        """Run the code once.

        Args:
            tokens: of each sample.
            seed: of the inputs.
            size: of the inputs, a factor.
            form: of a mask that hides some keys; None for no mask.
            has_other_memory: if tokens attend to those of another text, it has another length.

        Raises:
            Unread: a stage of an attention could not be read.
            Exception: whatever the code raises.
        """
        s = self.specimen
        contents = s.contents(self._batch, tokens, seed, size)
        memory = None
        if has_other_memory and s.memory:
            memory = next(length for length in self.short if length != tokens)
            contents = s.with_memory_of(memory, contents, seed, size)
        contents = {
            source: _distinct_ids(numbers, s.sources[source].high, seed)
            for source, numbers in contents.items()
        }
        masks = {} if form is None else {form.argument: self._mask(form, tokens)}
        args, kwargs = s.arguments(contents, torch.float64, masks)
        by_name = {**s.by_name((args, kwargs)), **masks}
        names = self.input_names
        given = {name: as_tensors(value) for name, value in by_name.items()}
        arguments = {
            name: tensors[0].clone()
            for name, tensors in given.items()
            if len(tensors) == 1 and (name in masks or name not in names)
        }
        sizes = replace(self._sizes(tokens), memory=memory)
        inputs = {slot.source: by_name[slot.name] for slot in s.slots if slot.source}
        unread: Unread | None = None
        if not self._is_black_box:
            try:
                rows, trace = self._from_steps(args, kwargs, inputs, sizes)
            except Unread as error:
                if self.repeats_ids(tokens):
                    error.mistakes = ()  # equal ids are numbers of each other's tokens
                if not self._is_function or error.mistakes:
                    raise
                unread = error
                self._lines = self._lines or {"softmax": error.line}
            else:
                return Run(rows, arguments, sizes, form, trace)
        try:
            rows = [self._from_outputs(contents, masks)]
        except Unread as error:
            raise (error if unread is None or error.mistakes else unread) from None
        self._is_black_box = True
        return Run(rows, arguments, sizes, form, None)

    def _from_steps(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Mapping[str, Any],
        sizes: Sizes,
    ) -> tuple[list[Rows], Trace]:
        """Return the rows of the attentions of a run, and its trace.

        Raises:
            Unread: a stage of an attention could not be read.
        """
        if not all(isinstance(tensor, Tensor) for tensor in inputs.values()):
            reason = (
                "NumPy's projections cannot be looked into; the function of query, key and value "
                "inside can be checked"
            )
            raise Unread("projection", reason)
        copies = {source: tensor.clone() for source, tensor in inputs.items()}
        trace = traced(self._lab.fresh(), args, kwargs, [*inputs.values()])
        if trace.attentions:
            self._lines = Written(trace, trace.attentions[0]).stages()
        numbers = Numbers(copies, trace.steps)
        raise_for_changed(trace, numbers, sizes)
        refused = [*trace.refused]
        if not trace.attentions:
            refused += [*trace.left, ("no softmax of scores meets a value", "")]
        if refused:
            reason, line = refused[0]
            raise Unread("product", reason.partition("\n")[0].rstrip("."), line)
        attentions = rows_of(trace.attentions, numbers, sizes)
        for attention in attentions:
            if isinstance(attention, Unread):
                raise attention
        return [attention for attention in attentions if isinstance(attention, Rows)], trace

    def _from_outputs(self, contents: Contents, masks: Mapping[str, Any]) -> Rows:
        """Return the rows of a function of query, key and value by its outputs alone.

        Raises:
            Unread: they show a mistake, or are no weights times values.
        """

        def output(changed: Contents) -> Tensor:
            return self._lab.run(changed, extra=masks).rows

        rows = rows_of_function(output, contents, self.specimen.name)
        raise_for_outputs(rows)
        return replace(rows, lines={**self._lines})

    def added_positions(self, run: Run) -> AddedPositions | None:
        """Return what tells equal tokens apart before they are projected; None if it is unknown.

        Positions that are added move the query of a token by its own position alone. A convolution
        moves it by other tokens as well: one of them is changed to tell.

        Args:
            run: with as many tokens.
        """
        s, tokens = self.specimen, run.sizes.tokens
        contents = s.contents(self._batch, tokens)
        equal = {name: t[:1, :1].expand_as(t).clone() for name, t in contents.items()}
        queries = self._projected_queries(run, equal)
        if queries is None:
            return None
        if not _move(queries, queries[:1]).any():
            return AddedPositions("none")
        middle = tokens // 2
        moved = self._projected_queries(run, s.changed(equal, token=middle))
        if moved is None:
            return None
        is_moved = _move(moved, queries)
        is_moved[middle] = False
        if is_moved.any():
            return AddedPositions("mixed")
        if run.arguments or s.segments:  # they may tell where positions start again
            return AddedPositions("added")
        same = [
            (_move(queries[token + 1 :], queries[token]) == 0).nonzero() for token in range(tokens)
        ]
        pairs = [
            (token + 1, token + 2 + int(later[0])) for token, later in enumerate(same) if len(later)
        ]
        return AddedPositions("added", pairs[0] if pairs else None)

    def _projected_queries(self, run: Run, contents: Contents) -> Tensor | None:
        """Return the projected query of each token of the first sample, (tokens, columns)."""
        s, source = self.specimen, run.rows[0].paths[0].source
        if self._lab.model is None or isinstance(source, str):
            return None
        args, kwargs = s.arguments(contents, torch.float64, {})
        by_name = s.by_name((args, kwargs))
        with suppress(Exception):  # it may not take one token many times
            inputs = [by_name[name] for name in self.input_names]
            trace = traced(self._lab.fresh(), args, kwargs, inputs)
            output = trace.steps[source].outputs[0].double()
            layout = located(output.shape, run.sizes)
            if layout is not None:
                is_first = layout.sample == 0
                at = layout.token[is_first], layout.column[is_first]
                queries = torch.zeros(*(int(index.max()) + 1 for index in at), dtype=torch.float64)
                queries[at] = output[is_first]
                return queries
        return None

    def _integers(self) -> set[int]:
        """Return the sizes of axes, and the integers among attributes and defaults of the code."""
        integers = {n for slot in self.specimen.slots for n in slot.axes if isinstance(n, int)}
        model = self._lab.model
        modules = [self.specimen.call] if model is None else [*model.modules()]
        for parameter in model.parameters() if model is not None else ():
            integers |= {*parameter.shape}
        for module in modules:
            integers |= {value for value in vars(module).values() if type(value) is int}
            with suppress(TypeError, ValueError):
                signature = inspect.signature(getattr(module, "forward", module))
                defaults = [parameter.default for parameter in signature.parameters.values()]
                integers |= {value for value in defaults if type(value) is int}
        return integers

    def _sizes(self, tokens: int) -> Sizes:
        s = self.specimen
        axes = next(iter(s.sources.values())).axes
        is_token_first = "b" in axes and "t" in axes and axes.index("t") < axes.index("b")
        tables = (slot.constant(self._batch, tokens) for slot in s.slots if slot.kind == "given")
        positions = tuple(
            table
            for table in tables
            if table.dtype in (torch.int32, torch.int64)
            and table.shape in ((tokens,), (1, tokens), (self._batch, tokens))
        )
        # Cells of a notebook write the length of their batch down.
        written = axes[0] if s.is_example and s.has_own_size else None
        batch = self._batch if s.has_batch else written if isinstance(written, int) else None
        return Sizes(batch, tokens, is_token_first, positions)

    @property
    def _is_function(self) -> bool:
        """True for a function of query, key and value."""
        return {*self.specimen.sources} == {"query", "key", "value"} and self._lab.model is None

    def _mask(self, form: Form, tokens: int) -> Tensor:
        """Return a mask of a form that hides some keys, different ones in each sample."""
        generator = torch.Generator().manual_seed(11)
        shape = (self._batch, 1, tokens) if form.is_of_keys else (self._batch, tokens, tokens)
        keep = torch.rand(shape, generator=generator) < 0.6
        if form.axes == "lengths":
            lengths = torch.arange(self._batch) % max(tokens - 2, 1) + 2
            keep = (torch.arange(tokens) < lengths[:, None])[:, None, :]
        keep[..., 0] = True  # no row is empty, also under a causal mask
        if not form.is_of_keys:
            keep |= torch.eye(tokens, dtype=torch.bool)
        return form.encode(keep.expand(self._batch, tokens, tokens))


def _move(queries: Tensor, others: Tensor) -> Tensor:
    """Return which queries, (tokens, columns), differ from others by more than rounding."""
    return (queries - others).abs().amax(-1) > _SAME_NUMBER


def _distinct_ids(numbers: Tensor, high: int, seed: int) -> Tensor:
    """Return ids that are all different, as far as there are enough; other numbers unchanged."""
    if not high:
        return numbers
    count = numbers.numel()
    generator = torch.Generator().manual_seed(seed)
    permutations = [torch.randperm(high, generator=generator) for _ in range(count // high + 1)]
    return torch.cat(permutations)[:count].reshape(numbers.shape)
