"""From what people hand over to code that the laws can be tried on."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.diagnosis.expectation import MEANINGS
from regard.diagnosis.inputs.lab import Lab
from regard.diagnosis.inputs.mask_forms import Form, forms_of, takes_masks
from regard.diagnosis.inputs.numpy_arrays import is_array, loaded_numpy
from regard.diagnosis.inputs.signature import (
    Argument,
    arguments_of,
    axis_letters,
    signature_of,
)
from regard.diagnosis.inputs.specimen import Slot, Specimen
from regard.diagnosis.inputs.subject import (
    FEW_BITS,
    call_to_copy,
    copied,
    independent,
    is_installed,
)
from regard.diagnosis.inputs.tape import OpaqueOperator, tensors_in

Kind = Literal["embeddings", "qkv", "scores"]
Order = Literal["btd", "td", "tbd", "bhtd", "bthd"]

# Other than each other and than the widths that people choose, so that an axis is known by its
# length.
_BATCH, _TOKENS, _HEADS = 2, 7, 4
CONTENTS = ("x", "memory", "query", "key", "value")

_ORDERS: dict[tuple[str, ...], Order] = {
    ("b", "t", ""): "btd",
    ("t", ""): "td",
    ("t", "b", ""): "tbd",
    ("b", "", "t", ""): "bhtd",
    ("b", "t", "", ""): "bthd",
}


@dataclass(frozen=True, eq=False)
class Thing:
    """Code that people handed over, ready to be called.

    Attributes:
        name: as reports call it.
        call: the function, or a copy of the module in eval mode.
        arguments: of a call, without those that the caller has given.
        options: that the caller has given, by name.
        original: the module as it came, if some of it has fewer bits than float32.
        numbers: whole numbers that the class was given.
        order: of the axes, as the caller declares it; None: not declared.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[Argument, ...]
    options: Mapping[str, Any]
    original: nn.Module | None = None
    numbers: tuple[int, ...] = ()
    order: Order | None = None

    @property
    def model(self) -> nn.Module:
        """The module; an empty one for a function."""
        return self.call if isinstance(self.call, nn.Module) else nn.Identity()

    @property
    def kind(self) -> Kind:
        """The kind of its arguments: embeddings, queries with keys and values, or scores."""
        roles = {argument.role for argument in self.arguments if argument.required}
        if "scores" in roles:
            return "scores"
        own = any(parameter.ndim > 1 for parameter in self.model.parameters())
        return "embeddings" if own or "query" not in roles else "qkv"

    @property
    def uses_numpy(self) -> bool:
        """Return True for a function, or an object that is called, in a file that imports NumPy."""
        numpy = loaded_numpy()
        call = self.call if hasattr(self.call, "__globals__") else type(self.call).__call__
        names = getattr(call, "__globals__", {})
        return numpy is not None and any(value is numpy for value in names.values())

    def of(self, role: str) -> Argument | None:
        """Return the first argument with a role."""
        return next((a for a in self.arguments if a.role == role), None)

    @property
    def orders(self) -> list[Order]:
        """The orders of axes worth trying, the likeliest first."""
        if self.order is not None:
            return [self.order]
        if self.kind == "scores":
            if any(a.role == "lengths" for a in self.arguments):
                return ["btd", "td", "bhtd"]
            return ["td", "btd", "bhtd"]
        parts = self.model.modules() if is_installed(self.call) else ()
        if any(isinstance(part, nn.MultiheadAttention) and not part.batch_first for part in parts):
            return ["tbd", "td"]
        return ["btd", "bhtd", "td", "bthd"] if self.kind == "qkv" else ["btd", "td"]

    @property
    def widths(self) -> list[int]:
        """The widths that a token may have, the likeliest first."""
        found: list[int] = []
        for name in ("embed_dim", "d_model", "hidden_size", "n_embd", "dim", "embed_size"):
            for holder in (self.model, getattr(self.model, "config", None)):
                value = getattr(holder, name, None)
                found += [value] if isinstance(value, int) else []
        for module in self.model.modules():
            found += [module.in_features] if isinstance(module, nn.Linear) else []
        for matrix in self._matrices():
            found += [matrix.shape[0], matrix.shape[-1], matrix.shape[1]]
            found += [matrix.shape[-1] * n for n in self._counts() if n > 1]
        found += [number for number in self.numbers if number > 1]
        return list(dict.fromkeys(found or [24, 40, 16, 32, 64]))

    def _counts(self) -> list[int]:
        """Return whole numbers that the module keeps, one of which may be that of its heads."""
        values = cast("dict[str, object]", vars(self.model)).items()
        return [v for name, v in values if isinstance(v, int) and "head" in name and v < 64]

    def _matrices(self) -> list[Tensor]:
        """Return matrices that the code knows: parameters, or what a function finds around it."""
        around = getattr(self.call, "__globals__", {})
        named = cast("list[str]", getattr(getattr(self.call, "__code__", None), "co_names", ()))
        found = [around[name] for name in named if isinstance(around.get(name), Tensor)]
        return [m for m in (*self.model.parameters(), *found) if m.ndim in (2, 3)]


def thing_of(
    built: Callable[..., Any],
    name: str,
    options: Mapping[str, Any],
    means: Mapping[str, str],
    numbers: tuple[int, ...] = (),
) -> Thing:
    """Return code ready to be called, with the roles of its arguments.

    Raises:
        ValueError: a call needs something else than the tensors that are known by their names.
    """
    original = None
    call = built
    if isinstance(built, nn.Module):
        for own, parameter in built.named_parameters():
            is_number = parameter.is_floating_point() and not parameter.is_meta
            if is_number and not bool(parameter.isfinite().all()):
                raise ValueError(
                    f"{own} of {name} holds NaN or infinity, so that nothing can be told; check a "
                    "layer before its training."
                )
        call = copied(built)
        if any(p.dtype in FEW_BITS for p in built.parameters()):
            original = independent(built).eval()
    arguments = tuple(
        replace(a, meaning=MEANINGS.get(means.get(a.name, ""), ""))
        if a.role in ("mask", "lengths")
        else a
        for a in arguments_of(built, options, means)
    )
    if not arguments:
        raise ValueError(
            f"{name} takes no argument by name; check needs forward(self, x), or a function of "
            "query, key and value."
        )
    thing = Thing(name, call, arguments, dict(options), original, numbers)
    unknown = [a.name for a in arguments if a.required and a.role in ("other", "weight")]
    if unknown:
        raise ValueError(
            f"{name} needs {', '.join(unknown)}; check knows embeddings, query, key, value, "
            "scores, masks and lengths by their names.\n"
            f"    Pass an example call: {call_to_copy(name, arguments, thing.widths[0])}."
        )
    return thing


def declared_order(axes: str | Mapping[str, str] | None) -> Order | None:
    """Return the order of axes that a caller declares without an example; None for none.

    Raises:
        ValueError: check makes no inputs with these axes.
    """
    if axes is None:
        return None
    texts = {axes} if isinstance(axes, str) else {*axes.values()}
    letters = [axis_letters(text) for text in texts]
    orders: set[Order | None] = {
        _ORDERS.get(tuple(n if isinstance(n, str) else "" for n in own)) for own in letters
    }
    if len(orders) == 1 and (order := orders.pop()) is not None:
        return order
    raise ValueError(
        f"axes is {axes!r}; without an example it is one order of all inputs, such as "
        "'batch tokens dim', 'tokens batch dim' or 'batch tokens heads dim'."
    )


def as_scores(thing: Thing) -> Thing | None:
    """Return code as a function of scores if what it takes may be scores: one tensor, no matrix."""
    plain = [a for a in thing.arguments if a.role == "x"]
    rest = [a for a in thing.arguments if a.required and a.role not in ("x", "mask", "lengths")]
    if len(plain) != 1 or rest or next(thing.model.parameters(), None) is not None:
        return None
    scores = replace(plain[0], role="scores", required=True)
    arguments = tuple(scores if a is plain[0] else a for a in thing.arguments)
    return replace(thing, arguments=arguments)


def specimens(thing: Thing, causal: bool | None, *, is_square: bool = False) -> Iterator[Specimen]:
    """Yield the code with each reading of its arguments with which it runs, the likeliest first.

    Args:
        thing: the code.
        causal: what the caller declared.
        is_square: try as many tokens as columns as well, as only ``keys @ query`` needs it.

    Raises:
        ValueError: it fails in all of them.
    """
    failures: list[Exception] = []
    is_empty = True
    for sizes in _sizes(thing, is_square=is_square):
        if sizes[0][0] == "td" and thing.kind != "scores":
            if not is_empty:
                continue  # without a batch only if it takes none
            if any(isinstance(error, _OtherRows) for error in failures):
                # It runs with a batch, so what runs by chance without one says nothing.
                sizes = sizes[: len(thing.widths)]
        for read in _readings(thing, sizes, causal):
            error = _failure(read)
            if error is not None and _WRITES.search(str(error)):
                read = replace(read, takes_gradients=False)
                error = _failure(read)
            if error is not None:
                if not any(slot.is_array for slot in read.slots):  # else what follows says more
                    failures.append(error)
                continue
            is_empty = False
            yield read
            if (turned := read.turned()) is not None:
                yield turned
            break
    if not is_empty:
        return
    first = failures[0]
    said = f"{first}" if isinstance(first, _OtherRows) else f"{type(first).__name__}: {first}"
    opaque = next((error for error in failures if isinstance(error, OpaqueOperator)), None)
    if opaque is not None:
        raise ValueError(f"{thing.name} cannot be judged. {opaque}") from opaque
    masks = [a for a in takes_masks(thing.arguments) if not a.required]
    if masks and "NoneType" in str(first):  # it needs the mask that its signature leaves out
        needed = (replace(a, required=a.required or a in masks) for a in thing.arguments)
        read = replace(thing, arguments=tuple(needed))
        yield from specimens(read, causal, is_square=is_square)
        return
    advice = f"an example call: {call_to_copy(thing.name, thing.arguments, thing.widths[0])}"
    if thing.kind == "scores":
        advice = "the function of query, key and value that calls it"
    raise ValueError(
        f"{thing.name} fails on every input that was tried; it must run on one of them.\n"
        f"    The first error was {said}\n    Pass {advice}."
    ) from first


def grouped(thing: Thing, specimen: Specimen) -> Specimen | None:
    """Return a reading with fewer heads of keys than of queries, if the code takes it.

    Args:
        thing: the code.
        specimen: the reading with as many.
    """
    if thing.kind != "qkv":
        return None
    axes, causal = next(iter(specimen.sources.values())).axes, specimen.causal
    order: Order = "bthd" if len(axes) == 4 and axes[1] == "t" else "bhtd"
    for read in _readings(thing, [(order, _TOKENS, 24)], causal):
        slots = [
            replace(slot, axes=tuple(_HEADS // 2 if n == _HEADS else n for n in slot.axes))
            if slot.source in ("key", "value")
            else slot
            for slot in read.slots
        ]
        own = replace(read, slots=tuple(slots))
        if _failure(own) is None:
            return own
    return None


# Errors of code that writes into tensors, as inference does where no gradients are taken.
_WRITES = re.compile("modified inplace|used in an in-place")


class _OtherRows(ValueError):
    """The code runs, and gives no output with a row for each token."""


def _failure(specimen: Specimen) -> Exception | None:
    """Return what the code raises, or that it gives no output with a row for each token."""
    lab = Lab(specimen)
    try:
        contents = specimen.contents(specimen.batch, specimen.tokens)
        run = lab.run(contents, is_double=False)
        is_there = lab.sees_rows and (lab.has_batch or not specimen.has_batch)
        slot = next(iter(specimen.sources.values()))
        # As where a mask has other axes than the scores, or a product keeps both batches.
        is_wider = not slot.high and lab.output_ndim > len(slot.axes)
        # Code that makes tensors of arrays at once is PyTorch's, whose operations can be seen.
        is_numpy = slot.is_array and any(map(is_array, tree_leaves(run.result)))
    except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
        return error
    sizes = (specimen.batch if specimen.has_batch else 1, specimen.tokens)
    is_of_kind = is_numpy == slot.is_array
    if is_there and is_of_kind and not is_wider and run.rows.shape[:2] == sizes:
        return None
    shapes = ", ".join(str(shape) for shape in lab.shapes) or "no tensor"
    names = {"b": "batch", "t": "tokens"}
    axes = ", ".join(names.get(str(a), "dim") for a in slot.axes)
    return _OtherRows(
        f"{specimen.name} gave {shapes} for ({axes}); one output must have the same batch and "
        "tokens.\n    Where it pools them or learns its queries, pass the function of query, "
        "key and value inside it."
    )


def _sizes(thing: Thing, *, is_square: bool) -> Iterator[list[tuple[Order, int, int]]]:
    """Yield orders of axes with tokens and widths: of each list the first that runs is read."""
    orders, widths = thing.orders, thing.widths
    for order in orders:
        # With as many heads as columns of a head, as with as many tokens, wrong axes fit by chance.
        chance = _HEADS**2 if order == "bthd" and not is_square else 0
        sizes: list[tuple[Order, int, int]]
        sizes = [(order, _TOKENS, width) for width in widths if width != chance]
        if is_square and order == "td" and thing.kind != "scores":
            for width in widths[:3]:  # code that only works with as many tokens as columns
                lengths = [width // heads for heads in range(1, width) if width % heads == 0]
                lengths += [w for w in widths if w not in lengths and w < 100]
                tried = dict.fromkeys((*orders[: orders.index("td")], "td"))
                sizes += [(o, n, width) for n in lengths for o in tried]  # pyright: ignore
        if thing.kind == "scores":  # code that takes the columns of the values for its keys
            sizes.append((order, _TOKENS, _TOKENS))
        if sizes:
            yield sizes


def _readings(
    thing: Thing, sizes: Sequence[tuple[Order, int, int]], causal: bool | None
) -> Iterator[Specimen]:
    """Yield readings of the arguments, the likeliest first."""
    vocabularies = [0]
    if thing.kind == "embeddings":
        tables = [m for m in thing.model.modules() if isinstance(m, nn.Embedding)]
        vocabularies += [min(t.num_embeddings for t in tables)] if tables else []
    for vocabulary in vocabularies:
        for order, tokens, width in sizes if not vocabulary else sizes[:1]:
            needed = [a for a in takes_masks(thing.arguments) if a.required]
            for forms in product(*(forms_of(a) for a in needed)):
                read = replace(_read(thing, order, tokens, width, forms, vocabulary), causal=causal)
                if thing.uses_numpy:  # NumPy takes tensors, too, but not all that it is asked for
                    arrays = (replace(slot, is_array=True) for slot in read.slots)
                    yield replace(read, slots=tuple(arrays))
                yield read
                yield from _with_other_memory(read, thing, width)


def _with_other_memory(read: Specimen, thing: Thing, width: int) -> Iterator[Specimen]:
    """Yield a reading in which the tokens that are attended to have another width."""
    memory = next((slot for slot in read.slots if slot.source == "memory"), None)
    for other in thing.widths if memory is not None and width in memory.axes else ():
        if memory is not None and other != width:
            own = replace(memory, axes=(*memory.axes[:-1], other))
            slots = tuple(own if slot is memory else slot for slot in read.slots)
            yield replace(read, slots=slots)


def _read(
    thing: Thing, order: Order, tokens: int, width: int, forms: Sequence[Form], vocabulary: int
) -> Specimen:
    """Return one reading."""
    kind = thing.kind
    heads = _HEADS if order in ("bhtd", "bthd") else 1
    axes = _axes(order, heads, width // heads)
    slots: list[Slot] = []
    call: Callable[..., Any] = thing.call
    given: tuple[str, ...] = ()
    chosen = {form.argument: form for form in forms}
    for argument in thing.arguments:
        if argument.name in chosen:
            slots.append(chosen[argument.name].slot())
        elif (slot := _content(thing, argument, axes, vocabulary)) is not None:
            slots.append(slot)
    if kind == "scores":
        call, contents = _of_scores(thing, order, heads, width // heads)
        slots = [*contents, *slots]
        given = tuple(a.name for role in ("scores", "value") if (a := thing.of(role)) is not None)
    slots += [Slot(name, "fixed", value=value) for name, value in thing.options.items()]
    values = [slot.value for slot in slots if slot.kind == "fixed"]
    return Specimen(
        thing.name,
        call,
        tuple(slots),
        _BATCH if order != "td" else 1,
        tokens,
        is_fixed=any(isinstance(value, tuple | list | Tensor) for value in values),
        forms=_forms(thing.arguments, chosen),
        original=thing.original,
        has_own_size=kind == "scores",
        given=given,
    )


def _content(
    thing: Thing, argument: Argument, axes: tuple[str | int, ...], vocabulary: int
) -> Slot | None:
    """Return an argument that holds numbers of tokens; None for any other."""
    name, role = argument.name, argument.role
    if role == "x" and vocabulary:
        ids = tuple(axis for axis in axes if isinstance(axis, str))
        return Slot(name, "ids", ids, "x", torch.int64, high=vocabulary)
    if thing.kind == "embeddings":
        is_own = role == "x" or (argument.required and role in CONTENTS)
    else:
        is_own = thing.kind == "qkv" and role in ("query", "key", "value")
    # Arguments apart, so that one that is never read, or read for another, shows.
    return Slot(name, "content", axes, role) if is_own else None


def _forms(
    arguments: tuple[Argument, ...], chosen: Mapping[str, Form]
) -> tuple[tuple[Form, ...], ...]:
    """Return the forms to try of each mask, the one that a reading has chosen first."""
    found: list[tuple[Form, ...]] = []
    for argument in takes_masks(arguments):
        forms = tuple(forms_of(argument))
        first = chosen.get(argument.name)
        rest = tuple(form for form in forms if form != first)
        found.append(rest if first is None else (first, *rest))
    return tuple(found)


def _axes(order: Order, heads: int, each: int) -> tuple[str | int, ...]:
    return {
        "btd": ("b", "t", each),
        "td": ("t", each),
        "tbd": ("t", "b", each),
        "bhtd": ("b", heads, "t", each),
        "bthd": ("b", "t", heads, each),
    }[order]


def _of_scores(
    thing: Thing, order: Order, heads: int, width: int
) -> tuple[Callable[..., Any], list[Slot]]:
    """Return a function of scores as one of query, key and value."""
    scores = thing.of("scores")
    value = thing.of("value")
    assert scores is not None
    call = partial(_weighed, thing.call, value)
    axes = _axes(order, heads, width)
    return call, [Slot(name, "content", axes, name) for name in ("query", "key", "value")]


def _weighed(
    call: Callable[..., Any],
    values: Argument | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **rest: Any,
) -> Tensor:
    """Return what a function of scores makes of the scores of queries and keys."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if values is not None:
        parameter = signature_of(call).parameters[values.name]
        if parameter.kind is parameter.POSITIONAL_ONLY:
            return call(scores, value, **rest)
        return call(scores, **{values.name: value}, **rest)
    found = tensors_in(call(scores, **rest))[:1]
    if [weights.shape for weights in found] != [scores.shape]:
        shapes = ", ".join(str(tuple(weights.shape)) for weights in found) or "no tensor"
        raise ValueError(f"it gave {shapes} for scores {tuple(scores.shape)}")
    return found[0] @ value
