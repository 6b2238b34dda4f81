"""From an example call to what the laws are tried on: the meaning of arguments and axes."""

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from regard.diagnosis.expectation import MEANINGS
from regard.diagnosis.inputs.lab import Lab, as_tensors
from regard.diagnosis.inputs.numpy_arrays import is_array
from regard.diagnosis.inputs.signature import (
    arguments_of,
    axis_letters,
    is_cache,
    signature_of,
)
from regard.diagnosis.inputs.specimen import Slot, Specimen
from regard.diagnosis.inputs.subject import quiet

_NOT_CONTENT = re.compile(
    r"mask|bias|cos|sin|freq|rope|rotary|pos|table|slope|alibi|cache|past|scale|temp|weight|w_|len"
    r"|seqlen|offset|index|_idx|idx_"
)


def example_specimens(
    thing: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    means: Mapping[str, str],
    axes: str | Mapping[str, str] | None,
    causal: bool | None,
) -> Iterator[Specimen]:
    """Yield code with the arguments of an example call, for each order of axes that they may have.

    The arguments are those of ``check``.

    Raises:
        TypeError: the example does not fit the signature.
        ValueError: no argument holds numbers of tokens.
    """
    name = getattr(thing, "__name__", type(thing).__name__)
    bound = _bound(name, thing, args, kwargs)
    roles = {a.name: a.role for a in arguments_of(thing, ())}
    contents = [n for n in _contents(bound, roles) if n not in means]
    if not contents:
        raise ValueError(
            f"no argument of the example holds numbers of tokens; {name} takes {', '.join(bound)}."
            "\n    Pass embeddings, query, key and value, or numbers of tokens as tensors."
        )
    if roles.get(contents[0]) == "scores":
        raise ValueError(
            f"{name} is a function of scores, for which check makes all arguments itself; leave "
            "args and kwargs out."
        )
    named = _declared_axes(axes, contents[0], bound)
    first = _tensor(bound[contents[0]])
    orders = [named[contents[0]]] if contents[0] in named else []
    is_query = roles.get(contents[0]) == "query"
    others = [n for n in contents[1:] if not is_query or roles.get(n) == "key"]
    keys = [_tensor(bound[n]) for n in others]
    for own in orders or _guessed(thing, first, contents, bound):
        # All tokens have a key; an example with a cache or a second text has fewer queries.
        likes = [first, *(t for t in keys if "t" in own and t.ndim == first.ndim)]
        longest = max(likes, key=lambda t: t.shape[own.index("t")] if "t" in own else 0)
        sizes = dict(zip(own, longest.shape, strict=True)) if len(own) == first.ndim else {}
        tokens = first.shape[own.index("t")] if "t" in own else 0
        alike = [n for n, t in zip(others, keys, strict=True) if tokens and t.ndim == first.ndim]
        apart = {n: bound[n].shape[own.index("t")] for n in alike}
        apart = {n: length for n, length in apart.items() if length != tokens}
        shorter = {length for length in apart.values() if length < tokens}
        slots: list[Slot] = []
        for key, value in bound.items():
            role = roles.get(key, "other")
            slot = _slot(key, value, key in contents, named.get(key), own, sizes, role)
            slot = _with_meaning(slot, role, means)
            slots.append(_with_all_keys(_with_all_rows(slot, tokens), shorter, tokens))
        specimen = _of_slots(name, thing, slots, sizes, _segments(bound, tokens), causal)
        is_shorter = is_query and first.shape != longest.shape
        yield _without_chance(replace(specimen, has_fewer_queries=is_shorter, apart=tuple(apart)))


def _bound(
    name: str, thing: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the example by their names."""
    try:
        bound = signature_of(thing).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            f"the example does not fit {name}: {error}.\n    Pass args=(...) and kwargs={{...}} "
            f"as a call of {name} has them."
        ) from error
    for parameter in signature_of(thing).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound


def _with_all_rows(slot: Slot, queries: int) -> Slot:
    """Return a mask with a row for each key: the given rows are the last, the others causal."""
    if slot.kind != "given" or slot.axes[-2:] != (queries, "t"):
        return slot
    value, tokens = slot.value, slot.value.shape[-1]
    rows = torch.ones(tokens - queries, tokens).triu(1) == (slot.meaning == "hides")
    if slot.meaning in ("", "added"):
        rows = torch.zeros(rows.shape).masked_fill(~rows, float(value.min()) if slot.meaning else 0)
    rows = rows.to(value.dtype).expand(*value.shape[:-2], *rows.shape)
    value = torch.cat([rows, value], -2)
    return replace(slot, value=value, axes=(*slot.axes[:-2], "t", "t"))


def _with_all_keys(slot: Slot, shorter: Collection[int], tokens: int) -> Slot:
    """Return a mask of a shorter text, whose last key stands for all further ones."""
    if slot.kind != "given" or not slot.meaning or slot.axes[-1:] not in [(n,) for n in shorter]:
        return slot
    further = tokens - slot.value.shape[-1]
    value = torch.cat([slot.value, *[slot.value[..., -1:]] * further], -1)
    return replace(slot, value=value, axes=(*slot.axes[:-1], "t"))


def _without_chance(specimen: Specimen) -> Specimen:
    """Return the code with tables that have as many rows as there are samples by chance.

    Other numbers of samples tell: with another row, or one row less, the code does not run.
    """
    slots = tuple(
        replace(slot, axes=(len(slot.value), *slot.axes[1:]))
        if slot.kind == "given" and slot.axes[:1] == ("b",) and slot.dtype.is_floating_point
        else slot
        for slot in specimen.slots
    )
    other = replace(specimen, slots=slots)
    if slots == specimen.slots or _runs_with_others(specimen) or not _runs_with_others(other):
        return specimen
    return other


def _runs_with_others(specimen: Specimen) -> bool:
    with suppress(Exception):  # somebody's code may raise anything
        for batch in (1, specimen.batch + 1):
            Lab(specimen).run(specimen.contents(batch, specimen.tokens), is_double=False)
        return True
    return False


def _of_slots(
    name: str,
    thing: Callable[..., Any],
    slots: Sequence[Slot],
    sizes: Mapping[str | int, int],
    segments: tuple[int, ...],
    causal: bool | None,
) -> Specimen:
    """Return the specimen, with the sizes that its slots allow."""
    grid = next((slot.grid for slot in slots if slot.grid), None)
    tokens = grid[0] * grid[1] if grid else int(sizes.get("t", 1))
    has_tables = any("t" in part.axes for slot in slots for part in slot.parts)
    opaque = [slot.value for slot in slots if slot.kind == "fixed"]
    return Specimen(
        name,
        thing,
        tuple(slots),
        max(2, int(sizes.get("b", 2))),
        tokens,
        causal,
        is_fixed=bool(grid or segments or as_tensors(opaque)),
        most_tokens=tokens if has_tables else None,
        segments=segments,
        is_example=True,
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or is_array(value)


def _tensor(value: Any) -> Tensor:
    return (torch.as_tensor(value) if is_array(value) else value).cpu()


def _contents(bound: Mapping[str, Any], roles: Mapping[str, str]) -> list[str]:
    """Return the names of arguments that hold numbers of tokens."""
    qkv = ("query", "key", "value")
    tensors = {n: _tensor(v) for n, v in bound.items() if _is_tensor(v)}
    own = [n for n in tensors if roles.get(n) != "weight"]
    plain = [n for n in own if not _NOT_CONTENT.search(n.lower())]
    named = [n for n in tensors if n in plain or roles.get(n) in (*qkv, "x", "memory")]
    floats = [n for n in named if tensors[n].is_floating_point() and tensors[n].ndim >= 2]
    # Numbers for each pair of tokens, such as the edges of a graph, are those of no token.
    for first in floats[:1]:
        shape = tensors[first].shape
        pairs = (*shape[:-1], shape[-2])
        shapes = {n: tensors[n].shape for n in floats}
        # As many columns as tokens look the same, so a twin of the first stays.
        floats = [n for n in floats if shapes[n] == shape or shapes[n][: len(pairs)] != pairs]
    found = {roles.get(n) for n in floats}
    if {*qkv} <= found:
        return [n for n in floats if roles.get(n) in qkv]
    if "query" not in found:  # keys in a cache belong to no token
        floats = [n for n in floats if not is_cache(n)] or floats
    whole = (torch.int32, torch.int64)
    ids = [n for n in plain if tensors[n].dtype in whole and tensors[n].ndim in (1, 2)]
    return floats or ids[:1]


def _declared_axes(
    axes: str | Mapping[str, str] | None, first: str, bound: Mapping[str, Any]
) -> dict[str, tuple[str | int, ...]]:
    """Return the axes that the caller declares, by argument.

    Raises:
        ValueError: an argument is missing, has another number of axes, or none of tokens.
    """
    if axes is None:
        return {}
    written = {first: axes} if isinstance(axes, str) else axes
    found: dict[str, tuple[str | int, ...]] = {}
    for name, words in written.items():
        letters = axis_letters(words)
        shape = tuple(getattr(bound.get(name), "shape", ()))
        if len(shape) != len(letters) or (name == first and "t" not in letters):
            raise ValueError(
                f"axes of {name} are {words!r}, and its shape is {shape}; name each axis, one of "
                "them 'tokens': axes='batch tokens dim'."
            )
        found[name] = letters
    return found


def _guessed(
    thing: Callable[..., Any], first: Tensor, contents: Sequence[str], bound: Mapping[str, Any]
) -> list[tuple[str | int, ...]]:
    """Return the axes that the first argument may have, the likeliest first."""
    if not first.is_floating_point():
        return [("b", "t")[2 - first.ndim :]]
    if first.ndim == 2:
        return [("t", -2)]
    if _segments(bound, first.shape[0]):
        return [("t", *range(-2, -1 - first.ndim, -1))]
    if first.ndim == 3:
        if isinstance(thing, nn.MultiheadAttention):
            return [("b", "t", -3) if thing.batch_first else ("t", "b", -3)]
        if _merges_heads(thing, first, bound):
            return [(-2, "t", -4)]
        # Queries and keys of other lengths, in batches of equal size.
        others = [tuple(_tensor(bound[name]).shape) for name in contents]
        is_second = any(n != first.shape[0] and m == first.shape[1] for n, m, *_ in others)
        return [("t", "b", -3) if is_second else ("b", "t", -3)]
    if first.ndim == 4 and len(contents) >= 3:
        return [("b", -2, "t", -4), ("b", "t", -3, -4)]
    if first.ndim == 4:  # an image: channels before the pixels, or behind them
        behind = first.shape[-1] > first.shape[1]
        return [("b", "t", "t", -4) if behind else ("b", -2, "t", "t")]
    return [("b", *range(-2, -1 - first.ndim, -1))]


def _merges_heads(thing: Callable[..., Any], first: Tensor, bound: Mapping[str, Any]) -> bool:
    """Return True if (heads, tokens, dim) give (tokens, heads · dim)."""
    with suppress(Exception), quiet():  # somebody's code may raise anything, and keep something
        call, arguments = copy.deepcopy((thing, dict(bound)))
        [output] = as_tensors(call(**arguments))
        heads, tokens, dim = first.shape
        return tuple(output.shape) == (tokens, heads * dim)
    return False


def _segments(bound: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
    """Return the lengths of packed sequences from an argument such as cu_seqlens."""
    for name, value in bound.items():
        if not re.search(r"cu_?(seq|len)|offsets", name.lower()) or not isinstance(value, Tensor):
            continue
        ends = [int(n) for n in value.flatten()]
        if len(ends) > 1 and ends[0] == 0 and ends[-1] == tokens:
            return tuple(b - a for a, b in pairwise(ends))
    return ()


def _slot(
    name: str,
    value: Any,
    is_content: bool,
    named: tuple[str | int, ...] | None,
    own: tuple[str | int, ...],
    sizes: Mapping[str | int, int],
    role: str,
) -> Slot:
    if not _is_tensor(value):
        parts = tree_map(partial(_nested, sizes=sizes), value)
        is_nested = any(isinstance(leaf, Slot) for leaf in tree_leaves(parts))
        return Slot(name, "nested" if is_nested else "fixed", value=parts)
    tensor = _tensor(value)
    if is_content:
        axes = named or (own if len(own) == tensor.ndim else _by_size(tensor, sizes))
        shape, grid = list(tensor.shape), None
        if axes.count("t") == 2:
            at = axes.index("t")
            grid = (shape[at], shape.pop(at + 1))
            axes = (*axes[:at], "t", *axes[at + 2 :])
        lengths = tuple(a if isinstance(a, str) else n for a, n in zip(axes, shape, strict=True))
        source = role if role in ("query", "key", "value") else name
        high = 0 if tensor.is_floating_point() else int(tensor.max()) + 1
        kind = "ids" if high else "content"
        return Slot(
            name,
            kind,
            lengths,
            source,
            tensor.dtype,
            high=high,
            is_array=is_array(value),
            grid=grid,
        )
    axes = named or _by_size(tensor, sizes)
    if axes.count("t") == 2 and "mask" in name.lower() and _is_of_windows(tensor, sizes):
        axes = ("b", *axes[1:])
    return Slot(name, "given", axes, dtype=tensor.dtype, value=tensor, is_array=is_array(value))


def _nested(leaf: Any, sizes: Mapping[str | int, int]) -> Any:
    """Return a tensor inside of an argument as a slot of its own."""
    if not isinstance(leaf, Tensor):
        return leaf
    return Slot("", "given", _by_size(leaf, sizes), dtype=leaf.dtype, value=leaf)


def _is_of_windows(mask: Tensor, sizes: Mapping[str | int, int]) -> bool:
    """Return True if a mask may have one part for each window of an image."""
    count, batch = mask.shape[0], sizes.get("b", 1)
    others = [size for axis, size in sizes.items() if isinstance(axis, int)]  # such as heads
    return 1 < count < batch and batch % count == 0 and count not in others


def _by_size(tensor: Tensor, sizes: Mapping[str | int, int]) -> tuple[str | int, ...]:
    """Return the axes of an argument by their lengths; only its first can be the batch.

    Whole numbers of (several, batch, tokens) are positions with several axes.
    """
    shape, found = list(tensor.shape), list[str | int]()
    if shape[1:] == [sizes.get("b"), sizes.get("t")] and not tensor.is_floating_point():
        return (shape[0], "b", "t")
    for place, n in enumerate(tensor.shape):
        if n == sizes.get("t") and (n != sizes.get("b") or place > 0):
            found.append("t")
        elif n == sizes.get("b") and "b" not in found and place == 0 and n > 1:
            found.append("b")
        else:
            found.append(n)
    return tuple(found)


def _with_meaning(slot: Slot, role: str, means: Mapping[str, str]) -> Slot:
    """Return a slot with what its mask is declared to mean; ``unknown`` where nothing does."""
    if slot.kind != "given":
        return slot
    name = slot.name.lower()
    said = MEANINGS.get(means.get(slot.name, ""), "")
    if slot.name not in means:
        if role == "lengths" or re.search(r"(^|_)(len|lens|length|lengths)$", name):
            return replace(slot, meaning="lengths") if slot.axes == ("b",) else slot
        if role != "mask" and "mask" not in name and slot.dtype is not torch.bool:
            return slot
        said = "added" if slot.dtype.is_floating_point else ""
    return replace(slot, meaning=said or "unknown")
