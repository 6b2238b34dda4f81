"""The validated arguments of `observe` that select what to record."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, SupportsIndex, cast

import torch

from regard.errors import check_whole, count_text, kind_text
from regard.reductions.reduction import Reduction, check_reductions


@dataclass(frozen=True)
class Selection:
    """The layers, heads, queries and answers to record; everything by default.

    Attributes:
        names: the names of the selected modules; None selects all layers.
        indices: the indices of the selected layers in the order they run; None selects all layers.
        reductions: the reductions to compute while the model runs, instead of recording query and
            key.
        device: the device of the recording; None keeps tensors on the model's device.
        values: True to record the value of each attention with its query and key.
    """

    names: frozenset[str] | None = None
    indices: frozenset[int] | None = None
    heads: tuple[int, ...] | slice | None = None
    queries: slice = field(default_factory=lambda: slice(None))
    reductions: tuple[Reduction, ...] = ()
    device: torch.device | None = None
    values: bool = False

    @classmethod
    def of(
        cls,
        *,
        layers: Iterable[str | int] | None = None,
        heads: Iterable[int] | slice | None = None,
        queries: slice | None = None,
        keep: Literal["qk", "qkv"] | Sequence[Reduction] = "qk",
        device: torch.device | str | None = None,
        modules: Collection[str] = (),
    ) -> "Selection":
        """Validate the arguments of `observe`, and return them as a Selection.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a name is unknown, or an argument selects nothing.
        """
        names, indices = (None, None) if layers is None else _layers(layers, modules)
        return cls(
            names,
            indices,
            None if heads is None else _heads(heads),
            slice(None) if queries is None else _queries(queries),
            () if keep in ("qk", "qkv") else _reductions(keep),
            None if device is None else _device(device),
            keep == "qkv",
        )

    def has_layer(self, name: str, index: int) -> bool:
        """Return True if a layer is selected, by its name or its index in the order they run."""
        if self.names is None or self.indices is None:
            return True
        return name in self.names or index in self.indices

    def head_indices(self, num_heads: int) -> list[int]:
        """Return the indices of the selected heads.

        Raises:
            ValueError: the attention lacks a selected head.
        """
        indices = list(range(num_heads))
        if self.heads is None:
            return indices
        if isinstance(self.heads, slice):
            chosen = indices[self.heads]
            if not chosen:
                raise ValueError(
                    f"heads is {self.heads}; it chooses none of {count_text(num_heads, 'head')}.\n"
                    f"    {_choose(num_heads)}"
                )
        else:
            for head in self.heads:
                if not -num_heads <= head < num_heads:
                    raise ValueError(
                        f"heads has {head}; the layer has {count_text(num_heads, 'head')}.\n"
                        f"    {_choose(num_heads)}"
                    )
            chosen = [indices[head] for head in self.heads]
        return chosen

    def rows(self, first: int, q_len: int, *, all_there: bool) -> range:
        """Return the selected queries of a call, counted from its first, which is at ``first``.

        With ``all_there``, no more queries will follow. Otherwise a negative stop may mean any
        position, so it excludes no query yet.
        """
        queries, total = self.queries, first + q_len
        if not all_there and queries.stop is not None and queries.stop < 0:
            queries = slice(queries.start, None)
        selected = range(total)[queries]
        start = max(selected.start - first, 0)
        return range(start, max(start, selected.stop - first))

    def missing(self, ran: Sequence[str], *, any_kept: bool) -> str | None:
        """Return a message about selected layers or queries that did not run; None if all ran.

        ``ran`` are the modules that ran attention, in their order. With ``any_kept``, a layer was
        recorded or has a known problem.
        """
        if not ran:
            return None
        names, indices = self.names or frozenset(), self.indices or frozenset()
        first = ", ".join(map(repr, ran[:3])) + (", ..." * (len(ran) > 3))
        if unseen := sorted(names.difference(ran)):
            return (
                f"layers has {', '.join(map(repr, unseen))}; no attention was seen in "
                f"{'it' if len(unseen) == 1 else 'them'}.\n"
                f"    Attention was seen in {first}."
            )
        if indices and max(indices) >= len(ran):
            return (
                f"layers has {max(indices)}; attention was seen in {len(ran)} modules, "
                f"0 to {len(ran) - 1}.\n    They are {first}."
                if len(ran) > 1
                else f"layers has {max(indices)}; attention was seen in 1 module, {first}.\n"
                "    Choose 0."
            )
        if not any_kept:
            return (
                f"queries is {self.queries}; no layer ran so many queries.\n"
                "    Choose among those that the model runs, the tokens of its input."
            )
        return None


def _layers(layers: object, modules: Collection[str]) -> tuple[frozenset[str], frozenset[int]]:
    remedy = 'Pass for example layers=["model.layers.3.self_attn"] or layers=range(4).'
    items = _items(
        "layers", layers, "it takes names of modules and indices in the order they run", remedy
    )
    names = frozenset(item for item in items if isinstance(item, str))
    indices = frozenset(check_whole("layers", item) for item in items if not isinstance(item, str))
    for index in indices:
        if index < 0:
            raise ValueError(
                f"layers has {index}; indices count from 0 in the order in which layers run, and "
                "how many will run is not known before.\n"
                "    Count from the first layer, or give the name of the module."
            )
    for name in sorted(names.difference(modules)):
        close = get_close_matches(name, modules, 1)
        remedy = f"Did you mean {close[0]!r}?" if close else "See model.named_modules()."
        raise ValueError(
            f"layers has {name!r}; it must be the name of a module of the model.\n    {remedy}"
        )
    return names, indices


def _heads(heads: object) -> tuple[int, ...] | slice:
    if isinstance(heads, slice):
        return cast(slice, heads)
    remedy = "Pass for example heads=[0, 3] or heads=slice(0, 4)."
    items = _items("heads", heads, "it takes indices or a slice", remedy)
    return tuple(check_whole("heads", item) for item in items)


def _queries(queries: object) -> slice:
    if not isinstance(queries, slice):
        raise TypeError(
            f"queries is {kind_text(queries)}; it takes a slice of positions.\n"
            "    Pass for example queries=slice(-64, None) for the last 64."
        )
    start, stop, step = cast(tuple[SupportsIndex | None, ...], _ends(cast(slice, queries)))
    checked = slice(
        None if start is None else check_whole("queries", start),
        None if stop is None else check_whole("queries", stop),
    )
    if step is not None and check_whole("queries", step) != 1:
        raise ValueError(
            f"queries has the step {step}; the queries must be neighbours.\n"
            "    Leave out the step, and choose among their answers."
        )
    first, last = checked.start or 0, checked.stop
    if last is not None and (first < 0) == (last < 0) and first >= last:
        raise ValueError(
            f"queries is {checked}; it chooses no query of any text.\n"
            "    Pass for example queries=slice(-64, None) for the last 64."
        )
    return checked


def _ends(queries: slice) -> tuple[object, object, object]:
    return queries.start, queries.stop, queries.step


def _reductions(keep: object) -> tuple[Reduction, ...]:
    remedy = 'Pass keep="qk" or "qkv", or for example keep=[TopK(8), Entropy()].'
    items = _items("keep", keep, 'it takes "qk", "qkv" or a list of reductions', remedy)
    check_reductions("keep=", items)
    return cast(tuple[Reduction, ...], tuple(items))


def _choose(count: int) -> str:
    return "Choose 0." if count == 1 else f"Choose among 0 to {count - 1}."


def _items(name: str, given: object, takes: str, remedy: str) -> list[object]:
    """Return the items of an iterable as a list; raise an error for text, mappings and no items."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        came = repr(given) if isinstance(given, str) else kind_text(cast(object, given))
        raise TypeError(f"{name} is {came}; {takes}.\n    {remedy}")
    items = list(cast(Iterable[object], given))
    if not items:
        raise ValueError(f"{name} is empty; {takes}.\n    {remedy}")
    return items


def _device(device: object) -> torch.device:
    try:
        usable = torch.device(cast(str, device))
        torch.empty(0, device=usable)
    except (TypeError, RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device is {device!r}, which cannot be used here: {reason}\n"
            '    Pass device="cpu", or leave it out to keep all where the model has it.'
        ) from error
    return usable
