"""Masks that somebody's attention takes: in which form, and what it makes of one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from regard.diagnosis.signature import Argument
from regard.diagnosis.tensor_layout import Layout

__all__ = ["Form", "all_kept", "forms_of", "pattern", "takes_masks"]

_SKIPPED = re.compile(r"head_mask|cross|encoder_|output|return|use_")
_PADDING = re.compile(r"pad|attention_mask|^lengths?$|^mask$|src_mask|keep|valid|real")
# Names that say which of the two is True.
_KEEPS = re.compile(r"^attention_mask$|keep|valid|real|allowed")
_DROPS = re.compile(r"padding")


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write down which keys a query may attend to.

    Attributes:
        argument: the name of the argument.
        axes: what it has an axis for.
        kind: bool, whole numbers, or numbers to add to the scores.
        keeps: whether True, or 1, means that a key may be attended to.
        is_sure: whether the name tells that.
    """

    argument: str
    axes: Literal["lengths", "keys", "pairs", "batch_pairs", "keys4", "pairs4"]
    kind: Literal["bool", "long", "added"]
    keeps: bool = True
    is_sure: bool = False

    @property
    def is_of_keys(self) -> bool:
        """Whether it tells of each token, and not of each pair."""
        return self.axes in ("lengths", "keys", "keys4")

    def encode(self, keep: Tensor) -> Tensor:
        """The argument for a pattern, (batch, queries, keys), True = may attend."""
        if self.axes == "lengths":
            return keep[:, 0].sum(-1)
        match self.axes:
            case "keys":
                shaped = keep[:, 0]
            case "keys4":
                shaped = keep[:, None, :1]
            case "pairs":
                shaped = keep[0]
            case "batch_pairs":
                shaped = keep
            case _:
                shaped = keep[:, None]
        if self.kind == "added":
            lowest = torch.finfo(torch.float32).min
            return torch.zeros(shaped.shape, device="cpu").masked_fill(~shaped, lowest)
        shaped = shaped if self.keeps else ~shaped
        return shaped.long() if self.kind == "long" else shaped.clone()


def takes_masks(arguments: tuple[Argument, ...]) -> list[Argument]:
    """The arguments that are masks or lengths."""
    roles = ("mask", "lengths")
    return [a for a in arguments if a.role in roles and not _SKIPPED.search(a.name.lower())]


def forms_of(argument: Argument, source: str) -> Iterator[Form]:
    """The forms in which an argument may want its mask, the likeliest first.

    Args:
        argument: a mask or lengths.
        source: of the code, which may turn a mask round itself.
    """
    name = argument.name.lower()
    if argument.role == "lengths":
        yield Form(argument.name, "lengths", "long", is_sure=True)
        return
    turned = re.search(rf"{argument.name}\s*==\s*0|1(\.0)?\s*-\s*{argument.name}\b", source)
    drops = _DROPS.search(name) is not None and turned is None
    sure = drops or _KEEPS.search(name) is not None
    if argument.meaning == "added":
        yield from _added(argument)
        return
    if argument.meaning:
        sure, drops = True, argument.meaning == "hides"
    meanings = (not drops,) if sure else (True, False)
    keys: list[Form] = []
    for axes, keeps in product(("keys", "keys4"), meanings):
        kinds = ("long", "bool") if sure and not drops else ("bool", "long")
        keys += [Form(argument.name, axes, kind, keeps, sure) for kind in kinds]
    pairs: list[Form] = []
    for axes, keeps in product(("pairs", "batch_pairs", "pairs4"), meanings):
        pairs += [Form(argument.name, axes, kind, keeps, sure) for kind in ("bool", "long")]
    first, second = (keys, pairs) if _PADDING.search(name) and name != "mask" else (pairs, keys)
    yield from first
    yield from second
    if not argument.meaning:
        yield from _added(argument)


def _added(argument: Argument) -> Iterator[Form]:
    for axes in ("pairs4", "pairs", "batch_pairs"):
        yield Form(argument.name, axes, "added", is_sure=argument.meaning == "added")


def pattern(form: Form, layout: Layout, *, at_start: bool = False) -> Tensor:
    """A pattern to try, (batch, queries, keys): padding of each sample, or any pairs.

    Args:
        form: in which it will be given.
        layout: of the subject.
        at_start: whether padding stands before the tokens.
    """
    batch, tokens = layout.batch, layout.tokens
    if form.is_of_keys:
        lengths = tokens - 1 - batch + torch.arange(batch, device="cpu")
        keep = torch.arange(tokens, device="cpu") < lengths[:, None]
        keep = keep.flip(-1) if at_start else keep
        return keep[:, None].expand(batch, tokens, tokens)
    generator = torch.Generator().manual_seed(5)
    samples = 1 if form.axes == "pairs" else batch
    keep = torch.rand(samples, tokens, tokens, generator=generator, device="cpu") < 0.6
    keep |= torch.eye(tokens, dtype=torch.bool, device="cpu")
    return keep.expand(batch, tokens, tokens)


def all_kept(form: Form, layout: Layout) -> Any:
    """The argument that forbids nothing."""
    shape = (layout.batch, layout.tokens, layout.tokens)
    return form.encode(torch.ones(shape, dtype=torch.bool, device="cpu"))
