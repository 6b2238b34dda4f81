"""Exports of a recording to other tools, with a limit on the size of dense weights.

The formats are those of BertViz 1.4, TransformerLens 2, CircuitsVis 1.43 and attnview 0.5. None of
these packages is imported.
"""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from regard.analysis.eviction import to_kvpress
from regard.errors import DENSE_LIMIT, RegardError, check_memory
from regard.recording.layers import Layer, layer_at, shape_of_all
from regard.recording.recording import Recording

__all__ = [
    "Patterns",
    "patterns",
    "to_attnview",
    "to_bertviz",
    "to_circuitsvis",
    "to_kvpress",
    "to_numpy",
]

_HOOK = re.compile(r"blocks\.(\d+)\.attn\.hook_pattern")


class Patterns(Mapping[str, Tensor]):
    """A read-only mapping from TransformerLens's names to dense weights, computed on access.

    ``cache["pattern", 3]`` and ``cache["blocks.3.attn.hook_pattern"]`` are the weights of the
    fourth layer that the model ran, (batch, num_heads, q_len, kv_len), even if only some layers
    were observed. ``regard.exports.patterns(seen)`` returns one.

    Args:
        layers: the layers in the order they ran.
        limit: the maximum size of one layer in bytes; None is no limit.

    Raises:
        ValueError: two layers have the same place in the model.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))
        >>> cache = regard.exports.patterns(regard.Recording({"layer": even}))
        >>> cache["pattern", 0].shape, list(cache)
        (torch.Size([1, 2, 4, 4]), ['blocks.0.attn.hook_pattern'])
    """

    def __init__(self, layers: Sequence[Layer], limit: int | None) -> None:
        self._layers: dict[int, Layer] = {}
        for index, layer in enumerate(layers):
            place = layer.place(index)
            if place in self._layers:
                raise ValueError(
                    f"layers {self._layers[place].name!r} and {layer.name!r} are both the layer "
                    f"{place} of the model; TransformerLens has one name for each.\n"
                    "    Ask for them apart, regard.exports.patterns(seen.part(names))."
                )
            self._layers[place] = layer
        self._limit = limit

    def __getitem__(self, key: str | tuple[str, int] | tuple[str, int, str]) -> Tensor:
        """Return the weights of a layer, (batch, num_heads, q_len, kv_len).

        Raises:
            KeyError: the key does not name one of the layers.
            MemoryError: the layer exceeds the limit.
            RegardError: query and key were not recorded.
        """
        return _dense(self._layers[self._place(key)], 'cache["pattern", layer]', self._limit)

    def __contains__(self, key: object) -> bool:
        """Return True if the key names one of the layers; nothing is computed."""
        try:
            self._place(key)
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        """Return the names of the hooks, in the order the layers ran."""
        return (f"blocks.{place}.attn.hook_pattern" for place in self._layers)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._layers)

    def __repr__(self) -> str:
        """Return the number of layers and an example of a key."""
        return f'Patterns(of {len(self)} layers: cache["pattern", layer])'

    def _place(self, key: object) -> int:
        place: object = None
        if isinstance(key, str) and (hook := _HOOK.fullmatch(key)):
            place = int(hook[1])
        elif isinstance(key, tuple):
            name, *rest = cast(tuple[object, ...], key)
            if name == "pattern" and rest and rest[1:] in ([], ["attn"]):
                place = rest[0]
        places = list(self._layers)
        if isinstance(place, int) and -len(places) <= place < 0:
            return places[place]
        if not isinstance(place, int) or place not in places:
            known = ", ".join(map(str, places)) or "none yet"
            raise KeyError(
                f"key is {key!r}; there are patterns of the layers {known}, "
                'as cache["pattern", layer] and cache["blocks.0.attn.hook_pattern"]'
            )
        return place


def patterns(seen: Recording, *, limit: int | None = DENSE_LIMIT) -> Patterns:
    """Return the weights under the names of TransformerLens: ``cache["pattern", layer]``.

    Each access makes one layer dense, (batch, num_heads, q_len, kv_len).
    ``attnview.display_cache`` also accepts the result.

    Args:
        seen: the recording.
        limit: the maximum size of one layer in bytes, 4 GiB by default; None is no limit.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))
        >>> regard.exports.patterns(regard.Recording({"layer": even}))["pattern", 0].shape
        torch.Size([1, 2, 4, 4])
    """
    return Patterns(seen.layers, limit)


def to_bertviz(seen: Recording, *, limit: int | None = DENSE_LIMIT) -> dict[str, Any]:
    """Return the arguments of BertViz's views: ``head_view(**to_bertviz(seen))``.

    Args:
        seen: the recording.
        limit: the maximum size of all layers in bytes, 4 GiB by default; None is no limit.

    Returns:
        ``attention``, for each layer (1, num_heads, q_len, kv_len), and ``tokens``; if the keys are
        another text, ``cross_attention``, ``encoder_tokens`` and ``decoder_tokens``.

    Raises:
        MemoryError: the layers exceed the limit.
        ValueError: tokens are unknown, layers differ in shape, or hold several texts.
        RegardError: query and key were not recorded.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> seen = regard.Recording({"layer": regard.attend(x, x)}, query_tokens=["Life", " is"])
        >>> sorted(regard.exports.to_bertviz(seen))
        ['attention', 'tokens']
    """
    layers = seen.layers
    num_heads, q_len, kv_len = shape_of_all("exports.to_bertviz", layers)
    queries, keys = _texts("to_bertviz()", seen)
    dtype = layers[0].whole().dtype
    _check_size("to_bertviz()", (len(layers), num_heads, q_len, kv_len), dtype, limit)
    attention = tuple(_dense(layer, "to_bertviz()", None) for layer in layers)
    if q_len == kv_len and queries == keys:
        return {"attention": attention, "tokens": queries}
    return {"cross_attention": attention, "encoder_tokens": keys, "decoder_tokens": queries}


def to_circuitsvis(
    seen: Recording, layer: str | int, *, limit: int | None = DENSE_LIMIT
) -> dict[str, Any]:
    """Return a layer as the arguments ``attention`` and ``tokens`` of CircuitsVis's views.

    Args:
        seen: the recording.
        layer: its name, or its index in the order of execution.
        limit: the maximum size in bytes, 4 GiB by default; None is no limit.

    Raises:
        ValueError: the keys are another text; and the errors of ``to_bertviz``.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> seen = regard.Recording({"layer": regard.attend(x, x)}, query_tokens=["Life", " is"])
        >>> sorted(regard.exports.to_circuitsvis(seen, 0))
        ['attention', 'tokens']
    """
    form = _one_layer("to_circuitsvis()", seen, layer, limit)
    if form["query_tokens"] != form["key_tokens"]:
        raise ValueError(
            "query_tokens and key_tokens differ; CircuitsVis shows a text that attends to itself.\n"
            "    Use to_attnview(layer), or to_bertviz()."
        )
    return {"attention": form["attention"], "tokens": form["query_tokens"]}


def to_attnview(
    seen: Recording, layer: str | int, *, limit: int | None = DENSE_LIMIT
) -> dict[str, Any]:
    """Return a layer as the arguments of attnview.

    Args:
        seen: the recording.
        layer: its name, or its index in the order of execution.
        limit: the maximum size in bytes, 4 GiB by default; None is no limit.

    Returns:
        ``attention``, ``query_tokens`` and ``key_tokens``.

    Raises:
        ValueError: the errors of ``to_bertviz``.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> seen = regard.Recording({"layer": regard.attend(x, x)}, query_tokens=["Life", " is"])
        >>> sorted(regard.exports.to_attnview(seen, 0))
        ['attention', 'key_tokens', 'query_tokens']
    """
    return _one_layer("to_attnview()", seen, layer, limit)


def _one_layer(call: str, seen: Recording, name: str | int, limit: int | None) -> dict[str, Any]:
    layer = layer_at(seen.layers, name)
    shape_of_all(call.removesuffix("()"), [layer])
    queries, keys = _texts(call, seen)
    attention = _dense(layer, call, limit)[0]
    return {"attention": attention, "query_tokens": queries, "key_tokens": keys}


def to_numpy(seen: Recording, *, limit: int | None = DENSE_LIMIT) -> dict[str, Any]:
    """Return the weights of each layer as a NumPy array, (..., num_heads, q_len, kv_len).

    Args:
        seen: the recording.
        limit: the maximum size of all layers in bytes, 4 GiB by default; None is no limit.

    Raises:
        MemoryError: the layers exceed the limit.
        RegardError: query and key were not recorded, or NumPy is not installed.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 2, 4, 8)
        >>> seen = regard.Recording({"layer": regard.attend(x, x)})
        >>> regard.exports.to_numpy(seen)["layer"].shape
        (1, 2, 4, 4)
    """
    layers = seen.layers
    try:
        importlib.import_module("numpy")
    except ModuleNotFoundError as error:
        raise RegardError(
            "to_numpy() needs numpy, which is not installed.\n    Run: pip install numpy"
        ) from error
    # NumPy has no bfloat16.
    dtypes = [
        torch.float32 if layer.whole().dtype == torch.bfloat16 else layer.whole().dtype
        for layer in layers
    ]
    sizes = [
        layer.shape.numel() * dtype.itemsize for layer, dtype in zip(layers, dtypes, strict=True)
    ]
    _check_size("to_numpy()", (sum(sizes),), torch.uint8, limit)
    arrays: dict[str, Any] = {}
    for layer, dtype in zip(layers, dtypes, strict=True):
        weights = layer.whole().to_dense(limit=None).detach().cpu()
        arrays[layer.name] = weights.to(dtype).numpy()
    return arrays


def _dense(layer: Layer, call: str, limit: int | None) -> Tensor:
    """Return the weights, (batch, num_heads, q_len, kv_len), with one batch axis."""
    matrix = layer.whole()
    _check_size(call, layer.shape, matrix.dtype, limit)
    weights = matrix.to_dense(limit=None)
    num_heads = layer.shape[-3] if weights.ndim > 2 else 1
    return weights.reshape(-1, num_heads, *layer.shape[-2:])


def _check_size(call: str, shape: Sequence[int], dtype: torch.dtype, limit: int | None) -> None:
    door = "patterns()" if call.startswith("cache") else call
    check_memory(
        call,
        shape,
        dtype,
        limit,
        "Ask for a part, seen[3][..., rows, cols], or for a summary, seen.pool(512, 512), "
        f"or pass limit=None to {door}.",
    )


def _texts(call: str, seen: Recording) -> tuple[list[str], list[str]]:
    query_tokens, key_tokens = seen.query_tokens, seen.key_tokens
    if query_tokens is None or key_tokens is None:
        raise ValueError(
            f"this recording has no tokens; {call} needs one for each position.\n"
            "    Use seen.with_tokens([regard.Token(text) for text in texts])."
        )
    return [token.text for token in query_tokens], [token.text for token in key_tokens]
