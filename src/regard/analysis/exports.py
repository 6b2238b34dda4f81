"""Exports of a recording to other tools, with a limit on the size of dense weights.

The formats are those of BertViz 1.4, TransformerLens 2 and CircuitsVis 1.43. None of these packages
is imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.analysis.eviction import to_kvpress
from regard.errors import DENSE_LIMIT, check_memory
from regard.recording.layers import Layer, layer_at, shape_of_all
from regard.recording.recording import Recording

__all__ = ["Patterns", "patterns", "to_bertviz", "to_circuitsvis", "to_kvpress", "to_numpy"]

_SMALLER = (
    "Ask for a part, seen[3][..., rows, cols], or for a summary, seen.pool(512, 512), or pass "
    "limit=None."
)


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
        self._layers: dict[str, Layer] = {}
        self._limit = limit
        for index, layer in enumerate(layers):
            hook = _hook(layer.model_index(index))
            if hook in self._layers:
                raise ValueError(
                    f"layers {self._layers[hook].name!r} and {layer.name!r} are both {hook}; "
                    "TransformerLens has one name for each.\n"
                    "    Ask for them apart, regard.exports.patterns(seen.part(names))."
                )
            self._layers[hook] = layer

    def __getitem__(self, key: str | tuple[str, int] | tuple[str, int, str]) -> Tensor:
        """Return the weights of a layer, (batch, num_heads, q_len, kv_len).

        Raises:
            KeyError: the key does not name one of the layers.
            MemoryError: the layer exceeds the limit.
            RegardError: query and key were not recorded.
        """
        layer = self._layer(key)
        if layer is None:
            raise KeyError(
                f"key is {key!r}; there are the patterns {', '.join(self)}, "
                'and the short form cache["pattern", layer]'
            )
        check_memory("patterns()", layer.shape, layer.whole().dtype, self._limit, _SMALLER)
        return _dense(layer)

    def __contains__(self, key: object) -> bool:
        """Return True if the key names one of the layers; nothing is computed."""
        return self._layer(key) is not None

    def __iter__(self) -> Iterator[str]:
        """Return the names of the hooks, in the order the layers ran."""
        return iter(self._layers)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._layers)

    def __repr__(self) -> str:
        """Return the number of layers and an example of a key."""
        return f'Patterns(of {len(self)} layers: cache["pattern", layer])'

    def _layer(self, key: object) -> Layer | None:
        """Return the layer that a key names; None if it names none."""
        hooks = list(self._layers)
        match key:
            case ("pattern", int(index)) | ("pattern", int(index), "attn"):
                hook = hooks[index] if -len(hooks) <= index < 0 else _hook(index)
                return self._layers.get(hook)
            case str():
                return self._layers.get(key)
            case _:
                return None


def _hook(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_pattern"


def patterns(seen: Recording, *, limit: int | None = DENSE_LIMIT) -> Patterns:
    """Return the weights under the names of TransformerLens: ``cache["pattern", layer]``.

    Each access makes one layer dense, (batch, num_heads, q_len, kv_len).

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
    size = (len(layers), num_heads, q_len, kv_len)
    check_memory("to_bertviz()", size, layers[0].whole().dtype, limit, _SMALLER)
    attention = tuple(map(_dense, layers))
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
    chosen = layer_at(seen.layers, layer)
    shape_of_all("exports.to_circuitsvis", [chosen])
    queries, keys = _texts("to_circuitsvis()", seen)
    if queries != keys:
        raise ValueError(
            "query_tokens and key_tokens differ; CircuitsVis shows a text that attends to itself.\n"
            "    Use to_bertviz()."
        )
    check_memory("to_circuitsvis()", chosen.shape, chosen.whole().dtype, limit, _SMALLER)
    return {"attention": _dense(chosen)[0], "tokens": queries}


def to_numpy(seen: Recording, *, limit: int | None = DENSE_LIMIT) -> dict[str, Any]:
    """Return the weights of each layer as a NumPy array, (..., num_heads, q_len, kv_len).

    Args:
        seen: the recording.
        limit: the maximum size of all layers in bytes, 4 GiB by default; None is no limit.

    Raises:
        MemoryError: the layers exceed the limit.
        RegardError: query and key were not recorded.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(1, 2, 4, 8)
        >>> seen = regard.Recording({"layer": regard.attend(x, x)})
        >>> regard.exports.to_numpy(seen)["layer"].shape
        (1, 2, 4, 4)
    """
    matrices = {layer.name: layer.whole() for layer in seen.layers}
    # NumPy has no bfloat16.
    dtypes = {
        name: torch.float32 if matrix.dtype == torch.bfloat16 else matrix.dtype
        for name, matrix in matrices.items()
    }
    size = sum(matrices[name].shape.numel() * dtype.itemsize for name, dtype in dtypes.items())
    check_memory("to_numpy()", (size,), torch.uint8, limit, _SMALLER)
    return {
        name: matrix.to_dense(limit=None).detach().cpu().to(dtypes[name]).numpy()
        for name, matrix in matrices.items()
    }


def _dense(layer: Layer) -> Tensor:
    """Return the weights, (batch, num_heads, q_len, kv_len), with one batch axis."""
    weights = layer.whole().to_dense(limit=None)
    num_heads = layer.shape[-3] if weights.ndim > 2 else 1
    return weights.reshape(-1, num_heads, *layer.shape[-2:])


def _texts(call: str, seen: Recording) -> tuple[list[str], list[str]]:
    query_tokens, key_tokens = seen.query_tokens, seen.key_tokens
    if query_tokens is None or key_tokens is None:
        raise ValueError(
            f"this recording has no tokens; {call} needs one for each position.\n"
            "    Use seen.with_tokens([regard.Token(text) for text in texts])."
        )
    return [token.text for token in query_tokens], [token.text for token in key_tokens]
