"""The attention that a kernel should compute, as plain PyTorch in any dtype."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.expectation import ANY, Spec
from regard.diagnosis.facts.visible import Band
from regard.masks import Causal, Mask, SlidingWindow


@dataclass(frozen=True)
class Standard:
    """Attention of query, key and value.

    Attributes:
        mask: of queries and keys; None: every query sees every key.
        scale: the factor of query · key; None: 1/√head_dim.
        softcap: the c of c · tanh(scores / c); None without one.
        tiles_heads: heads 0 1 0 1 of queries share the key heads 0 1, and not 0 0 1 1.
    """

    mask: Mask | None
    scale: float | None = None
    softcap: float | None = None
    tiles_heads: bool = False

    @property
    def mask_words(self) -> str:
        """The mask in words."""
        match self.mask:
            case Causal():
                return str(Band(None, 0))
            case SlidingWindow(left, right):
                return str(Band(left, right))
            case _:
                return str(Band())

    def visible(self, q_len: int, kv_len: int, device: torch.device) -> Tensor:
        """Return which keys each query sees, bool, (q_len, kv_len)."""
        if self.mask is None:
            return torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
        return self.mask.to_dense(q_len, kv_len, device=device)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores without a mask, (batch, heads, q_len, kv_len)."""
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = query @ self._spread(key, query).mT * scale
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the weights, (batch, heads, q_len, kv_len), 0 in rows that see no key."""
        visible = self.visible(query.shape[-2], key.shape[-2], query.device)
        has_keys = visible.any(-1, keepdim=True)
        scores = self.scores(query, key).masked_fill(~visible & has_keys, -math.inf)
        return scores.softmax(-1).masked_fill(~has_keys, 0.0)

    def output(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output, (batch, heads, q_len, head_dim), in the dtype of the inputs."""
        return self.weights(query, key) @ self._spread(value, query)

    def size(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the largest number that each row of the output can be, (..., q_len, 1)."""
        weighted = self.weights(query, key) @ self._spread(value, query).abs()
        return weighted.amax(-1, keepdim=True)

    def _spread(self, tensor: Tensor, query: Tensor) -> Tensor:
        """Return heads of keys or values, one for each head of queries."""
        count = query.shape[1] // tensor.shape[1]
        if count == 1:
            return tensor
        return (
            tensor.repeat(1, count, 1, 1)
            if self.tiles_heads
            else tensor.repeat_interleave(count, 1)
        )


def standard_of(expected: Spec, *, causal: bool) -> Standard:
    """Return the attention that a spec describes.

    Args:
        expected: the spec.
        causal: that of the spec, or the one to try where the spec leaves it free.

    Raises:
        ValueError: the spec names what query, key and value do not tell.
    """
    _refuse_others(expected)
    mask: Mask | None = Causal() if causal else None
    if isinstance(expected.window, int):
        mask = SlidingWindow(expected.window - 1, 0)
    elif expected.window is not None:
        mask = SlidingWindow(*expected.window)
    return Standard(mask, expected.scale, expected.softcap)


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "prefix": (None,),
    "positions": (ANY, None),
    "bias": (None,),
    "sinks": (False,),
    "padding": (ANY, {}),
    "documents": (ANY, ()),
    "qk_norm": (ANY, None),
}
_FAR = 10**6
_NEEDED = ("window", "scale", "softcap")


def _refuse_others(expected: Spec) -> None:
    for name, allowed in _ALLOWED.items():
        value = getattr(expected, name)
        if not any(value is one or value == one for one in allowed):
            raise ValueError(
                f"expect says {name}={value!r}; with run_dtype or run_device a function of query, "
                "key and value is compared with a mask, a scale and a softcap only.\n"
                f"    Leave {name} out, or check it in float64, without run_dtype and run_device."
            )
    for name in _NEEDED:
        if getattr(expected, name) is ANY:
            raise ValueError(
                f"expect says {name}=regard.ANY; with run_dtype or run_device the output is "
                f"compared with one formula.\n    Say which {name} it has."
            )


def mistaken(standard: Standard, head_dim: int, heads: int) -> Iterator[tuple[str, str, Standard]]:
    """Yield what a kernel may compute instead: the mistake, its words, and the attention.

    The mistake is a name of the catalogue; empty where it has none.
    """

    def masked(mask: Mask | None) -> Standard:
        return replace(standard, mask=mask)

    top_left = "a causal mask that starts at the top left", masked(Causal(align="top-left"))
    off_by_one = "causal-off-by-one"
    match standard.mask:
        case Causal():
            yield "causal-top-left", *top_left
            yield "not-causal", "no causal mask", masked(None)
            one_more = SlidingWindow(_FAR, 1)
            yield off_by_one, "a causal mask that shows the next key", masked(one_more)
            one_less = Causal() & ~SlidingWindow(0, 0)
            yield off_by_one, "a causal mask that hides the own key", masked(one_less)
        case SlidingWindow(left, right):
            if not right:
                yield "", "no window", masked(Causal())
            yield "", "no mask", masked(None)
            for before in (left + 1, left - 1):
                if before >= 0:
                    words = f"a window of {before} keys before the query's own"
                    yield "", words, masked(SlidingWindow(before, right))
        case _:
            yield "", "a causal mask", masked(Causal())
            yield "", *top_left
    if standard.softcap is not None:
        yield "", "no softcap", replace(standard, softcap=None)
    yield "no-scale", "the scale 1", replace(standard, scale=1.0)
    wide = (head_dim * heads) ** -0.5
    yield "scale-by-embed-dim", "1/√ of all heads' columns", replace(standard, scale=wide)
    yield "wrong-scale", "the scale 1/head_dim", replace(standard, scale=1 / head_dim)
    yield "wrong-scale", "the scale 1/√head_dim", replace(standard, scale=None)
    words = "key heads in the order 0 1 0 1"
    yield "kv-heads-repeated-in-wrong-order", words, replace(standard, tiles_heads=True)
