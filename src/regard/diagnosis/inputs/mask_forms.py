"""Forms in which code may want its mask."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor

from regard.diagnosis.inputs.signature import Argument
from regard.diagnosis.inputs.specimen import Contents, Slot, Specimen

_SKIPPED = re.compile(r"head_mask|cross|encoder_|output|return|use_")
_PADDING = re.compile(r"pad|attention_mask|^lengths?$|src_mask|keep|valid|real")
_AXES: dict[str, tuple[str | int, ...]] = {
    "lengths": ("b",),
    "keys": ("b", "t"),
    "keys4": ("b", 1, 1, "t"),
    "pairs": ("t", "t"),
    "batch_pairs": ("b", "t", "t"),
    "pairs4": ("b", 1, "t", "t"),
}


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write down which keys a query may attend to.

    Attributes:
        argument: the name of the argument.
        axes: the axes of the mask.
        kind: bool, whole numbers, or numbers to add to the scores.
        keeps: True, or 1, means that a key may be attended to.
        is_sure: the caller declares that, or runs have shown it.
    """

    argument: str
    axes: Literal["lengths", "keys", "keys4", "pairs", "batch_pairs", "pairs4"]
    kind: Literal["bool", "long", "added"]
    keeps: bool = True
    is_sure: bool = False

    @property
    def is_of_keys(self) -> bool:
        """Return True if the mask says something of each token, and not of each pair."""
        return self.axes in ("lengths", "keys", "keys4")

    def slot(self) -> Slot:
        """Return an argument that hides nothing."""
        axes = _AXES[self.axes]
        if self.axes == "lengths":
            # Lengths of 0 hide every token.
            kind = "lengths" if self.keeps else "filled"
            return Slot(self.argument, kind, axes, dtype=torch.int64, value=0)
        dtype = {"bool": torch.bool, "long": torch.int64, "added": torch.float32}[self.kind]
        value = 0.0 if self.kind == "added" else int(self.keeps)
        return Slot(self.argument, "filled", axes, dtype=dtype, value=value)

    def encode(self, keep: Tensor) -> Tensor:
        """Return the argument for a pattern, (batch, queries, keys), True = may attend."""
        if self.axes == "lengths":
            return keep[:, 0].sum(-1)
        axes = _AXES[self.axes]
        shaped = keep[:, 0] if self.is_of_keys else keep
        shaped = shaped if "b" in axes else shaped[0]
        shaped = shaped[tuple(None if axis == 1 else slice(None) for axis in axes)]
        if self.kind == "added":
            lowest = torch.finfo(torch.float32).min
            return torch.zeros(shaped.shape).masked_fill(~shaped, lowest)
        shaped = shaped if self.keeps else ~shaped
        return shaped.long() if self.kind == "long" else shaped.clone()


def form_of_given(slot: Slot) -> Form | None:
    """Return the form of a mask that the caller passed; None if it has another one."""
    axes = next((name for name, axes in _AXES.items() if axes == slot.axes), None)
    if slot.meaning not in ("keeps", "hides", "lengths") or axes is None:
        return None
    if (axes == "lengths") != (slot.meaning == "lengths"):
        return None
    kind = "bool" if slot.dtype == torch.bool else "long"
    return Form(slot.name, cast(Any, axes), kind, slot.meaning != "hides", is_sure=True)


def given_forms(s: Specimen) -> list[Form]:
    """Return the forms of the masks that the caller passed, without those of another form."""
    return [form for slot in s.masks if (form := form_of_given(slot)) is not None]


def open_masks(s: Specimen, contents: Contents, forms: Iterable[Form]) -> dict[str, Tensor]:
    """Return masks that hide nothing, by name, for these numbers of tokens."""
    masks: dict[str, Tensor] = {}
    for form in forms:
        batch, tokens = contents[s.masked_by(form.argument)[0]].shape[:2]
        masks[form.argument] = form.encode(torch.ones(batch, tokens, tokens, dtype=torch.bool))
    return masks


def takes_masks(arguments: tuple[Argument, ...]) -> list[Argument]:
    """Return the arguments that are masks or lengths."""
    # Beside another text, which the arguments name, its mask is no option.
    has_memory = any(argument.role == "memory" for argument in arguments)
    return [
        argument
        for argument in arguments
        if argument.role in ("mask", "lengths")
        and (
            not _SKIPPED.search(argument.name.lower())
            or (has_memory and argument.name.startswith("encoder_"))
        )
    ]


def forms_of(argument: Argument) -> Iterator[Form]:
    """Yield the forms in which an argument, a mask or lengths, may want its mask."""
    if argument.role == "lengths":
        yield Form(argument.name, "lengths", "long", is_sure=True)
        return
    if argument.meaning == "added":
        yield from _added(argument)
        return
    is_sure = argument.meaning != ""
    meanings = (argument.meaning == "keeps",) if is_sure else (True, False)
    kinds = ("long", "bool") if argument.meaning == "keeps" else ("bool", "long")
    keys = product(("keys", "keys4"), meanings, kinds)
    pairs = product(("pairs", "batch_pairs", "pairs4"), meanings, ("bool", "long"))
    is_of_keys = _PADDING.search(argument.name.lower()) is not None
    for axes, keeps, kind in (*keys, *pairs) if is_of_keys else (*pairs, *keys):
        yield Form(argument.name, axes, kind, keeps, is_sure)
    if not is_sure:
        yield from _added(argument)


def _added(argument: Argument) -> Iterator[Form]:
    for axes in ("pairs4", "pairs", "batch_pairs", "keys4"):
        yield Form(argument.name, axes, "added", is_sure=argument.meaning == "added")
