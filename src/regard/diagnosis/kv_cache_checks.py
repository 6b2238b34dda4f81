"""A cache of keys and values that code goes on from: what of it the new tokens see."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from regard.diagnosis.interpretation import Reading
from regard.diagnosis.reference_attention import same_numbers
from regard.diagnosis.subject import Subject
from regard.diagnosis.tensor_layout import Layout, Order

__all__ = ["begins_at_top_left", "cache_reach"]

_NEW = 3
_ENTRIES = ("k", "v", "key", "value", "keys", "values")
_PLACE = re.compile(r"start|offset|pos|len|idx|index|step")


@dataclass(frozen=True, eq=False)
class _Cache:
    """A cache in one form in which code may take it.

    Attributes:
        names: of one argument for keys and values, or of two.
        order: of the axes of either.
        how: one argument holds both.
        keys: canonical, (batch, tokens, columns).
        values: likewise.
        num_heads: of either.
    """

    names: tuple[str, ...]
    order: Order
    how: Literal["pair", "stacked", "by name"]
    keys: Tensor
    values: Tensor
    num_heads: int

    def arguments(self, changed: int | None = None) -> Mapping[str, object]:
        """What is handed over, by name; with another token at one place."""
        pair = tuple(self._laid(each, changed) for each in (self.keys, self.values))
        if len(self.names) == 2:
            return dict(zip(self.names, pair, strict=True))
        match self.how:
            case "pair":
                return {self.names[0]: pair}
            case "stacked":
                return {self.names[0]: torch.stack(pair)}
            case "by name":
                return {self.names[0]: {name: pair[name[0] == "v"] for name in _ENTRIES}}

    def _laid(self, canonical: Tensor, changed: int | None) -> Tensor:
        batch, tokens, columns = canonical.shape
        canonical = canonical.clone()
        if changed is not None:
            canonical[:, changed] = canonical[:, changed].flip(-1) + 1
        layout = Layout(self.order, batch, tokens, columns, self.num_heads, self.num_heads)
        return layout.encode(canonical, self.num_heads)


def cache_reach(reading: Reading) -> Tensor | None:
    """Which token of a cache (across) moves which new token (down): 1 where it does.

    Args:
        reading: of code without its cache.

    Returns:
        None where it takes none, or none of the forms that are tried, or wants to be told besides
        how long it is.
    """
    if any(_PLACE.search(argument.name) for argument in reading.subject.given.arguments):
        return None
    for cache in _forms(reading):
        try:
            reach = _reach(reading.subject, cache)
        except Exception:  # noqa: BLE001  # somebody's code may raise anything
            continue
        if bool(reach.any()):
            return reach
    return None


def begins_at_top_left(reach: Tensor) -> bool:
    """Whether new token 0 sees the oldest token of the cache only, the next one two, and so on.

    Args:
        reach: of ``cache_reach``.
    """
    return torch.equal(reach, torch.ones_like(reach).tril())


def _reach(subject: Subject, cache: _Cache) -> Tensor:
    inputs = {role: tensor[:, :_NEW] for role, tensor in subject.inputs().items()}
    past = cache.keys.shape[1]
    before = subject.run(inputs, cache.arguments()).output
    moved = torch.zeros(_NEW, past, device="cpu")
    for token in range(past):
        after = subject.run(inputs, cache.arguments(token)).output
        for new in range(_NEW):
            same = same_numbers(after[:, new, None], before[:, new, None].double(), 1e-5)
            moved[new, token] = float(not same)
    return moved


def _forms(reading: Reading) -> Iterator[_Cache]:
    """The forms of a cache that are tried, the likeliest first."""
    subject, material = reading.subject, reading.material
    names = [argument.name for argument in subject.given.arguments if argument.role == "cache"]
    if not names or "v" not in material.tensors:
        return
    width = material.tensors["q"].shape[-1] // material.num_heads
    heads = material.kv_heads or material.tensors["k"].shape[-1] // width
    # A length that no other axis has, so that it only runs where it stands for the tokens.
    taken = (heads, width, material.num_heads, subject.layout.batch)
    past = next(length for length in (5, 7, 11, 13, 17) if length not in taken)
    generator = torch.Generator().manual_seed(3)
    columns = (heads * width, material.tensors["v"].shape[-1])
    shapes = [(subject.layout.batch, past, each) for each in columns]
    keys, values = (torch.randn(shape, generator=generator, device="cpu") for shape in shapes)
    orders: list[Order] = [subject.layout.order]
    if subject.given.kind == "embeddings":
        orders = ["bhtd", "btd", "bthd"]
    for order in orders:
        for pair in pairwise(names):
            yield _Cache(pair, order, "pair", keys, values, heads)
        for name in names:
            for how in ("pair", "stacked", "by name"):
                yield _Cache((name,), order, how, keys, values, heads)
