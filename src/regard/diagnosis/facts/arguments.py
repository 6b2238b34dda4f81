"""The meaning of an argument that hides keys: a mask, lengths, or the numbers of documents.

The name is found by numbers alone: of all readings of an argument, the one that gives the keys that
are visible. So neither its name nor a docstring decides what it means.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.diagnosis.facts.visible import Band, Pattern, named

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
_MORE_WORDS = {
    "of queries": ", but along the queries: it hides their rows",
    "of the first sample": ", but that of the first sample is laid over all",
    "of another sample": ", but samples get that of another one",
    "turned": ", but with queries and keys exchanged",
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
        base = next(reading for reading in RIGHT if self.reading.startswith(reading))
        rest = self.reading.removeprefix(base).strip()
        if rest in ("+ 1", "- 1"):
            return _WORDS[base].format(f"{self.argument} {rest}")
        return _WORDS[base].format(self.argument) + _MORE_WORDS.get(rest, "")


@dataclass(frozen=True)
class Mask:
    """The keys that a query may see: a rule, and what arguments hide."""

    pattern: Pattern
    hidings: tuple[Hiding, ...] = ()

    def dense(self, arguments: Mapping[str, Tensor], shape: torch.Size) -> Tensor | None:
        """Return which keys are visible, broadcastable to (samples, heads, q_len, kv_len)."""
        seen = self.pattern.dense(*shape[-2:])
        for hiding in self.hidings:
            argument = arguments.get(hiding.argument)
            if argument is None:
                continue  # it was left out
            readings = readings_of(argument, shape)
            kept = next((k for reading, k in readings if reading == hiding.reading), None)
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
        for name, argument in arguments.items()
        for reading, kept in readings_of(argument, shape)
        if not bool((visible & ~kept).any()) and not bool(kept.expand(shape).all())
    ]
    combinations = [((hiding,), kept) for hiding, kept in single]
    combinations += [
        ((first, second), kept_by_first & kept_by_second)
        for index, (first, kept_by_first) in enumerate(single)
        for second, kept_by_second in single[index + 1 :]
        if first.argument != second.argument
    ]
    for hidings, kept in combinations:
        for rule in _rules(visible):
            mask = (rule.dense(*shape[-2:]) & kept).expand(shape)
            if bool((mask == visible)[~empty.expand(shape)].all()):
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
    # An end that shows nowhere is none: the argument may hide the keys at the end of the text.
    for left, right in ((None, None), (-near, None), (None, far), (-near, far)):
        yield Band(left, right)
    if (rule := named(seen)) is not None and not isinstance(rule, Band):
        yield rule


def readings_of(argument: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yield the readings of an argument with the keys that it keeps, right ones first."""
    samples, heads, q_len, kv_len = shape
    numbers = argument.detach()
    if numbers.is_complex() or not numbers.numel():
        return
    if numbers.is_floating_point() and bool((numbers <= 0).all()) and bool((numbers < -1e3).any()):
        for text, kept in _masks(numbers > -1e3, shape):
            yield f"added{text}", kept
        return
    if numbers.dtype == torch.bool or bool(((numbers == 0) | (numbers == 1)).all()):
        forms = [*_masks(numbers.bool(), shape)]
        for name, is_turned in (("keeps", False), ("hides", True)):
            for text, kept in forms:
                if not text:
                    yield name, ~kept if is_turned else kept
        for name, is_turned in (("keeps", False), ("hides", True)):
            for text, kept in forms:
                if text:
                    yield f"{name}{text}", ~kept if is_turned else kept
    if numbers.is_floating_point():
        return
    places = torch.arange(kv_len)
    if numbers.shape == (samples,):
        for text, more in (("", 0), (" + 1", 1), (" - 1", -1)):
            yield f"lengths{text}", (places < numbers[:, None] + more)[:, None, None, :]
        yield "lengths of the first sample", (places < numbers[0])[None, None, None, :]
        rows = torch.arange(q_len) < numbers[:, None]
        yield "lengths of queries", rows[:, None, :, None]
        # Lengths that are repeated for heads or rows, where each of them should be repeated.
        laid = (samples, heads, 1, 1) if heads > 1 else (samples, 1, q_len, 1)
        repeated = numbers.repeat(laid[1] * laid[2]).view(laid)
        yield "lengths of another sample", places < repeated
    starts_at_0 = (
        numbers.ndim == 1
        and len(numbers) > 1
        and int(numbers[0]) == 0
        and int(numbers[-1]) == kv_len
    )
    if starts_at_0 and q_len == kv_len and bool((numbers.diff() > 0).all()):
        document = torch.bucketize(places, numbers, right=True)
        yield "starts", (document[:, None] == document)[None, None]
    if numbers.shape[-1:] == (kv_len,) and numbers.ndim <= 2 and q_len == kv_len:
        texts = numbers.reshape(-1, kv_len)
        if len(texts) in (1, samples):
            yield "documents", (texts[:, :, None] == texts[:, None, :])[:, None]
            document = (texts == 0).long().cumsum(-1)
            yield "resets", (document[:, :, None] == document[:, None, :])[:, None]


def _masks(mask: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yield the ways to lay a mask over (samples, heads, q_len, kv_len), the right one first."""
    samples, heads, q_len, kv_len = shape
    if mask.ndim == 4 and _fits(mask, shape):
        yield "", mask
    elif mask.shape == (samples, q_len, kv_len):
        yield "", mask[:, None]
        yield " turned", mask.mT[:, None]
        yield " of the first sample", mask[:1, None]
    elif mask.shape == (q_len, kv_len) and (samples, kv_len) != (q_len, kv_len):
        yield "", mask[None, None]
        if q_len == kv_len:
            yield " turned", mask.mT[None, None]
    elif mask.ndim == 3 and mask.shape[1] == 1 and _fits(mask[:, None], shape):
        yield "", mask[:, None]
    elif mask.shape == (kv_len,):
        yield "", mask[None, None, None]
    if mask.numel() == samples * kv_len and mask.shape[-1] == kv_len and mask.shape[0] == samples:
        keys = mask.reshape(samples, kv_len)
        yield "", keys[:, None, None, :]
        yield " of the first sample", keys[:1, None, None, :]
        # A mask that is repeated for the heads, where each row should be repeated.
        yield " of another sample", keys.repeat(heads, 1).view(samples, heads, 1, kv_len)
        if q_len == kv_len:
            yield " of queries", keys[:, None, :, None]


def _fits(mask: Tensor, shape: torch.Size) -> bool:
    return all(n in (1, full) for n, full in zip(mask.shape, shape, strict=True))
