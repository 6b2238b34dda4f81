"""What an argument hides, named: a mask of keys or of pairs, lengths, or the numbers of documents.

The name is found by numbers alone: of all readings of an argument, the one that gives the keys that
are visible. So neither its name nor a docstring decides what it means.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.diagnosis.facts.visible import Band, Chunks, Pattern, Prefix, named

__all__ = ["Hiding", "Mask", "mask_of", "readings_of"]

RIGHT = ("keeps", "hides", "added", "lengths", "documents", "starts", "resets")
"""Readings of an argument that attention has; all others are mistakes."""

_WORDS = {
    "keeps": "True or 1 of {} keeps a key",
    "hides": "True or 1 of {} hides a key",
    "added": "{} is added to the scores",
    "lengths": "{} is the number of tokens of each sample",
    "documents": "equal numbers of {} attend to each other",
    "starts": "{} is where documents begin and end",
    "resets": "documents begin where {} is 0",
}


@dataclass(frozen=True)
class Hiding:
    """One argument that hides keys.

    Attributes:
        argument: its name.
        reading: what it means: one of ``RIGHT``, or a mistake: with " of queries" it hides rows,
            with " of the first sample" all samples have one mask, with " turned" a mask of pairs
            is transposed, with " + 1" and " - 1" a length is off by one.
    """

    argument: str
    reading: str

    @property
    def is_right(self) -> bool:
        """True if attention has such an argument."""
        return self.reading in RIGHT

    def __str__(self) -> str:
        """Return it as words of a formula."""
        base = next(own for own in RIGHT if self.reading.startswith(own))
        rest = self.reading.removeprefix(base)
        return _WORDS[base].format(self.argument) + (f", {rest.strip()}" if rest else "")


@dataclass(frozen=True)
class Mask:
    """The keys that a query may see: a rule, and what arguments hide."""

    pattern: Pattern
    hidings: tuple[Hiding, ...] = ()

    def dense(self, arguments: Mapping[str, Tensor], shape: torch.Size) -> Tensor | None:
        """Return which keys are visible, broadcastable to (samples, heads, q_len, kv_len)."""
        seen = self.pattern.dense(*shape[-2:])
        for hiding in self.hidings:
            given = arguments.get(hiding.argument)
            if given is None:
                continue  # it was left out
            kept = next((k for own, k in readings_of(given, shape) if own == hiding.reading), None)
            if kept is None:
                return None
            seen = seen & kept
        return seen

    def __str__(self) -> str:
        """Return it as words of a formula."""
        return "; ".join([str(self.pattern), *map(str, self.hidings)])


def mask_of(visible: Tensor, arguments: Mapping[str, Tensor], empty: Tensor) -> Mask | None:
    """Return the mask that gives the visible keys; None if no rule does.

    Args:
        visible: bool, (samples, heads, q_len, kv_len).
        arguments: tensors of the call that may be masks, by name.
        empty: the rows without a visible key, (samples, heads, q_len, 1), which say nothing.
    """
    shape = visible.shape
    first = visible[0, 0]
    plain = named(first) if bool((visible == first).all()) else None
    if plain is not None and (isinstance(plain, Band) or not arguments):
        return Mask(plain)
    single = [
        (Hiding(name, reading), kept)
        for name, given in arguments.items()
        for reading, kept in readings_of(given, shape)
        if not bool((visible & ~kept).any()) and not bool(kept.expand(shape).all())
    ]
    pairs = [((one,), kept) for one, kept in single]
    pairs += [
        ((one, other), kept & also)
        for at, (one, kept) in enumerate(single)
        for other, also in single[at + 1 :]
        if one.argument != other.argument
    ]
    for hidings, kept in pairs:
        for rule in _rules(visible):
            whole = rule.dense(*shape[-2:]) & kept
            whole = whole.expand(shape)
            if bool((whole == visible)[~empty.expand(shape)].all()):
                return Mask(rule, hidings)
    return None if plain is None else Mask(plain)


def _rules(visible: Tensor) -> Iterator[Pattern]:
    """Yield the rules that allow all that is visible, the strictest first."""
    q_len, kv_len = visible.shape[-2:]
    seen = visible.flatten(0, 1).any(0)
    away = torch.arange(kv_len) - torch.arange(q_len)[:, None]
    if not bool(seen.any()):
        return
    near, far = int(away[seen].min()), int(away[seen].max())
    if far <= 0:
        yield Band(None, 0)
        yield Band(-near, 0)
    yield Band()
    yield Band(-near, far)
    if (rule := named(seen)) is not None and isinstance(rule, Chunks | Prefix):
        yield rule


def readings_of(given: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yield the readings of an argument with the keys that it keeps, right ones first."""
    samples, _, q_len, kv_len = shape
    own = given.detach()
    if own.is_complex() or not own.numel():
        return
    if own.is_floating_point() and bool((own <= 0).all()) and bool((own < -1e3).any()):
        for text, kept in _masks(own > -1e3, shape):
            yield f"added{text}", kept
        return
    if own.dtype == torch.bool or bool(((own == 0) | (own == 1)).all()):
        forms = [*_masks(own.bool(), shape)]
        for name, is_turned in (("keeps", False), ("hides", True)):
            for text, kept in forms:
                if not text:
                    yield name, ~kept if is_turned else kept
        for name, is_turned in (("keeps", False), ("hides", True)):
            for text, kept in forms:
                if text:
                    yield f"{name}{text}", ~kept if is_turned else kept
    if own.is_floating_point():
        return
    places = torch.arange(kv_len)
    if own.shape == (samples,):
        for text, more in (("", 0), (" + 1", 1), (" - 1", -1)):
            yield f"lengths{text}", (places < own[:, None] + more)[:, None, None, :]
        yield "lengths of the first sample", (places < own[0])[None, None, None, :]
        rows = torch.arange(q_len) < own[:, None]
        yield "lengths of queries", rows[:, None, :, None]
    is_from_0 = own.ndim == 1 and len(own) > 1 and int(own[0]) == 0 and int(own[-1]) == kv_len
    if is_from_0 and q_len == kv_len and bool((own.diff() > 0).all()):
        document = torch.bucketize(places, own, right=True)
        yield "starts", (document[:, None] == document)[None, None]
    if own.shape[-1:] == (kv_len,) and own.ndim <= 2 and q_len == kv_len:
        numbers = own.reshape(-1, kv_len)
        if len(numbers) in (1, samples):
            yield "documents", (numbers[:, :, None] == numbers[:, None, :])[:, None]
            document = (numbers == 0).long().cumsum(-1)
            yield "resets", (document[:, :, None] == document[:, None, :])[:, None]


def _masks(own: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yield the ways to lay a mask over (samples, heads, q_len, kv_len), the right one first."""
    samples, _, q_len, kv_len = shape
    if own.ndim == 4 and _fits(own, shape):
        yield "", own
    elif own.shape == (samples, q_len, kv_len):
        yield "", own[:, None]
        yield " turned", own.mT[:, None]
        yield " of the first sample", own[:1, None]
    elif own.shape == (q_len, kv_len) and (samples, kv_len) != (q_len, kv_len):
        yield "", own[None, None]
        if q_len == kv_len:
            yield " turned", own.mT[None, None]
    elif own.ndim == 3 and own.shape[1] == 1 and _fits(own[:, None], shape):
        yield "", own[:, None]
    elif own.shape == (kv_len,):
        yield "", own[None, None, None]
    if own.numel() == samples * kv_len and own.shape[-1] == kv_len and own.shape[0] == samples:
        keys = own.reshape(samples, kv_len)
        yield "", keys[:, None, None, :]
        yield " of the first sample", keys[:1, None, None, :]
        if q_len == kv_len:
            yield " of queries", keys[:, None, :, None]


def _fits(own: Tensor, shape: torch.Size) -> bool:
    return all(n in (1, full) for n, full in zip(own.shape, shape, strict=True))
