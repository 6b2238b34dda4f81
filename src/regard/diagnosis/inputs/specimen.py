"""Code under check as something that can be called with any batch and any number of tokens."""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from regard.diagnosis.inputs.signature import MEMORY, signature_of

if TYPE_CHECKING:
    from regard.diagnosis.inputs.mask_forms import Form

Contents = dict[str, Tensor]
"""Numbers of the tokens by source, (batch, tokens, ...), or (batch, ...) without a token axis."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One argument of a call, and how its value follows from the sizes.

    Attributes:
        name: of the argument.
        kind: ``content``: numbers of tokens; ``ids``: whole numbers of tokens; ``filled``: one
            value everywhere, such as a mask that hides nothing; ``lengths``: the number of tokens;
            ``given``: a tensor of the caller's, cut to the sizes; ``nested``: such tensors in
            tuples, lists or dicts; ``fixed``: the value as it is.
        axes: of the tensor: "b" is the batch, "t" the tokens, a number is a length.
        source: arguments with the same source get the same numbers.
        dtype: of the tensor.
        value: of ``fixed`` and ``filled``.
        high: of ``ids``, the number of different ones.
        is_array: a NumPy array is passed.
        meaning: of a mask that the caller passed: ``keeps`` or ``hides``; empty: unknown.
        grid: of tokens in two axes, such as the pixels of an image, their lengths.
    """

    name: str
    kind: Literal["content", "ids", "filled", "lengths", "given", "nested", "fixed"]
    axes: tuple[str | int, ...] = ()
    source: str = ""
    dtype: torch.dtype = torch.float32
    value: Any = None
    high: int = 0
    is_array: bool = False
    meaning: str = ""
    grid: tuple[int, int] | None = None

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of the tensor for these sizes."""
        sizes = {"b": batch, "t": tokens}
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)

    def draw(self, batch: int, tokens: int, generator: torch.Generator) -> Tensor:
        """Return random numbers of the tokens, (batch, tokens, ...)."""
        rest = tuple(axis for axis in self.axes if not isinstance(axis, str))
        lead = (batch, tokens) if "t" in self.axes else (batch,)
        if self.kind == "ids":
            return torch.randint(self.high, (*lead, *rest), generator=generator)
        return torch.randn((*lead, *rest), generator=generator, dtype=torch.float64)

    def lay_out(self, canonical: Tensor) -> Tensor:
        """Return the tensor of a call from numbers of the tokens, (batch, tokens, ...)."""
        if "b" not in self.axes:
            canonical = canonical[0]
        places = [self.axes.index(axis) for axis in "bt" if axis in self.axes]
        laid = canonical.movedim(tuple(range(len(places))), tuple(places))
        if self.grid is None:
            return laid
        at = self.axes.index("t")
        return laid.reshape(*laid.shape[:at], *self.grid, *laid.shape[at + 1 :])

    @property
    def parts(self) -> list["Slot"]:
        """The tensors of the caller's that it holds."""
        leaves = tree_leaves(self.value) if self.kind == "nested" else [self]
        return [leaf for leaf in leaves if isinstance(leaf, Slot) and leaf.kind == "given"]

    def constant(self, batch: int, tokens: int, start: int = 0) -> Any:
        """Return the value of an argument that holds no numbers of tokens.

        Args:
            batch: how many samples.
            tokens: how many tokens.
            start: the first of the tokens, in a table of the caller's.
        """
        shape = self.shape(batch, tokens)
        match self.kind:
            case "filled":
                return torch.full(shape, self.value, dtype=self.dtype)
            case "lengths":
                return torch.full(shape, tokens, dtype=self.dtype)
            case "given":
                value = self.value
                for axis, letter in enumerate(self.axes):
                    if letter == "b":
                        value = value.index_select(axis, torch.arange(batch) % value.shape[axis])
                    elif letter == "t":
                        value = value.narrow(axis, start, tokens)
                return value
            case "nested":

                def cut(leaf: Any) -> Any:
                    return leaf.constant(batch, tokens, start) if isinstance(leaf, Slot) else leaf

                return tree_map(cut, self.value)
            case _:
                return self.value


_OF_QUERIES = re.compile("tgt|target|quer|q_|self|dec")


@dataclass(frozen=True, eq=False)
class Specimen:
    """Code that is judged, with the arguments that it is called with.

    Attributes:
        name: as people call it.
        call: a function, or a module in eval mode that nothing else uses.
        slots: its arguments.
        batch: how many samples the code is known to run with.
        tokens: how many tokens the code is known to run with.
        causal: what the caller declared; None: nothing.
        is_fixed: the number of tokens cannot be changed.
        most_tokens: with how many it can be called; None: any number.
        segments: lengths of sequences that stand one after another in the tokens; empty: one.
        forms: of each mask that the code takes and the caller left to check, the forms to try.
        original: the module as it came, if some of its numbers have fewer bits than float32.
        has_own_size: the size of the numbers is given, as that of scores, so that none is larger.
        is_example: the caller gave an example of a call.
        has_fewer_queries: the example has fewer queries than keys.
        apart: the sources that have another number of tokens than the first one in the example.
        takes_gradients: it runs with parameters that take gradients.
        given: of a function of given scores the names of its scores, and of its values if it takes
            any; empty for all other code.
    """

    name: str
    call: Callable[..., Any]
    slots: tuple[Slot, ...]
    batch: int = 2
    tokens: int = 7
    causal: bool | None = None
    is_fixed: bool = False
    most_tokens: int | None = None
    segments: tuple[int, ...] = ()
    forms: tuple[tuple["Form", ...], ...] = ()
    original: nn.Module | None = None
    has_own_size: bool = False
    is_example: bool = False
    has_fewer_queries: bool = False
    apart: tuple[str, ...] = ()
    takes_gradients: bool = True
    given: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The axes of the arguments in words."""
        names = {"b": "batch", "t": "tokens"}
        parts: list[str] = []
        shown = [slot for slot in self.slots if slot.source or slot.kind == "given"]
        if self.given:  # it takes scores where check makes queries, keys and values
            source = next(iter(self.sources.values()))
            square = replace(source, axes=(*source.axes[:-1], "t"))
            pairs = zip(self.given, (square, source), strict=False)
            shown = [replace(slot, name=name) for name, slot in pairs]
        for slot in shown:
            axes = ", ".join(names.get(str(axis), str(axis)) for axis in slot.axes)
            meaning = {"keeps": ", True allows", "hides": ", True hides"}.get(slot.meaning, "")
            parts.append(f"{slot.name} ({axes}){meaning}")
        return ", ".join(parts)

    @property
    def masks(self) -> tuple[Slot, ...]:
        """The masks that the caller passed."""
        return tuple(slot for slot in self.slots if slot.kind == "given" and slot.meaning != "")

    @property
    def has_given_samples(self) -> bool:
        """Return True if arguments of the caller differ from sample to sample."""
        return any("b" in part.axes for slot in self.slots for part in slot.parts)

    def turned(self) -> "Specimen | None":
        """Return the same with the opposite meaning of masks that are always passed, or None."""
        passed = {slot.name for slot in self.slots if slot.kind in ("filled", "lengths")}
        turned = {
            form.argument: replace(form, keeps=not form.keeps)
            for form, *_ in self.forms
            if form.argument in passed and form.kind != "added"
        }
        slots = (turned[s.name].slot() if s.name in turned else s for s in self.slots)
        forms = ((turned.get(own[0].argument, own[0]), *own[1:]) for own in self.forms)
        return replace(self, slots=tuple(slots), forms=tuple(forms)) if turned else None

    @property
    def sources(self) -> dict[str, Slot]:
        """The first slot of each source of numbers."""
        found: dict[str, Slot] = {}
        for slot in self.slots:
            if slot.kind in ("content", "ids"):
                found.setdefault(slot.source, slot)
        return found

    @property
    def has_batch(self) -> bool:
        """Return True if all numbers of tokens have an axis for the batch."""
        return all("b" in slot.axes for slot in self.sources.values())

    @property
    def has_tokens(self) -> bool:
        """Return True if all numbers of tokens have an axis for the tokens."""
        return all("t" in slot.axes for slot in self.sources.values())

    def contents(self, batch: int, tokens: int, seed: int = 0, size: float = 1.0) -> Contents:
        """Return random numbers for the tokens, the same for the same seed and sizes."""
        generator = torch.Generator().manual_seed(7919 * seed + 31 * batch + tokens)
        drawn = {name: slot.draw(batch, tokens, generator) for name, slot in self.sources.items()}
        return {name: t * size if t.is_floating_point() else t for name, t in drawn.items()}

    def with_memory_of(
        self, tokens: int, contents: Contents, seed: int = 0, size: float = 1.0
    ) -> Contents:
        """Return contents with another number of tokens that are attended to."""
        attended = self.contents(next(iter(contents.values())).shape[0], tokens, seed, size)
        return {**contents, **{source: attended[source] for source in self.memory}}

    @property
    def memory(self) -> list[str]:
        """The sources of tokens that other tokens attend to, as in cross-attention."""
        first, *others = self.sources
        if MEMORY.search(first.lower()) or {"query", "key"} <= {first, *others}:
            return []
        return [name for name in others if MEMORY.search(name.lower()) or name in self.apart]

    def masked_by(self, mask: str) -> list[str]:
        """Return the sources whose tokens a mask hides, by its name."""
        if self.memory and MEMORY.search(mask.lower()):
            return self.memory
        if self.memory and _OF_QUERIES.search(mask.lower()):
            return [name for name in self.sources if name not in self.memory]
        return [*self.sources]

    def changed(
        self,
        contents: Contents,
        *,
        sample: int | None = None,
        token: int | None = None,
        only: Collection[str] | None = None,
    ) -> Contents:
        """Return the contents with other numbers in a sample, at a token, or in both.

        Args:
            contents: numbers of the tokens by source.
            sample: None: all of them.
            token: likewise.
            only: the sources that change; None: all of them.
        """
        found: Contents = {}
        for name, old in contents.items():
            new = old.clone()
            found[name] = new
            if only is not None and name not in only:
                continue
            part = new if sample is None else new[sample : sample + 1]
            part = part if token is None else part[:, token]
            high = self.sources[name].high
            part.copy_((part + 1) % high if high else part.flip(-1) * 0.7 + 1)
        return found

    def arguments(
        self, contents: Contents, dtype: torch.dtype, extra: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call, none of which shares memory with another.

        Args:
            contents: numbers of the tokens by source.
            dtype: of all floating tensors.
            extra: values that take the place of slots, by name.
        """
        first = next(iter(contents.values()))
        batch = first.shape[0]
        tokens = first.shape[1] if self.has_tokens else self.tokens
        laid: dict[str, Any] = {}
        named: dict[str, Any] = {n: _in_dtype(value, dtype) for n, value in extra.items()}
        if any(slot.is_array for slot in self.slots):
            masks = {n: mask for n, mask in named.items() if isinstance(mask, Tensor)}
            named |= {n: mask.numpy() for n, mask in masks.items()}
        for slot in self.slots:
            if slot.name in extra:
                value = named[slot.name]
            elif slot.source:
                # In one block of memory, as callers pass them: other strides run other operations.
                own = slot.lay_out(contents[slot.source])
                own = own.clone(memory_format=torch.contiguous_format)
                value = _in_dtype(laid.setdefault(f"{slot.source} {slot.axes}", own), dtype)
            else:
                is_of_keys = slot.kind in ("filled", "lengths") and slot.axes.count("t") <= 1
                hides = contents[self.masked_by(slot.name)[0]] if is_of_keys else first
                count = hides.shape[1] if is_of_keys and self.has_tokens else tokens
                value = _in_dtype(slot.constant(batch, count), dtype)
            is_array = slot.is_array and isinstance(value, Tensor)
            named[slot.name] = value.numpy() if is_array else value
        return [named.pop(name) for name in self._positional], named

    @cached_property
    def _positional(self) -> list[str]:
        """The names of the first arguments, which are passed by position."""
        names = {slot.name for slot in self.slots}
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = signature_of(self.call).parameters.values()
        return [
            p.name for p in takewhile(lambda p: p.name in names and p.kind in kinds, parameters)
        ]

    def by_name(self, arguments: tuple[list[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the arguments of a call by the names of their slots."""
        return {**dict(zip(self._positional, arguments[0], strict=True)), **arguments[1]}


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a value with all floating tensors in one dtype."""

    def own(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(dtype, copy=True) if part.is_floating_point() else part.clone()
        with suppress(Exception):  # what cannot be copied is passed as it is
            return copy.deepcopy(part)
        return part

    return tree_map(own, value)
