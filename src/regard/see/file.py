"""One offline HTML file with the page and everything it needs, written atomically.

The file holds the page's own code, the tokens, a small map of every head, and for each layer the
query and the key, from which the browser computes exact rows of weights by itself.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.heads import Head
from regard.matrix import AttentionMatrix
from regard.recording import Recording
from regard.scores import QueryKey
from regard.see.intervals import IRREGULAR, intervals
from regard.see.manifest import PageLayer, first_sequence, manifest, page_layers
from regard.see.packing import packed
from regard.see.template import filled_template, json_block

__all__ = ["write_page"]

MIB = 2**20
FULL_PRECISION = MIB // 2
NEARLY_FULL_PRECISION = 8 * MIB
MOST_WEIGHTS = 2**25  # a layer that can only be held as weights is held in memory on the way
SAMPLED_ROWS = 32

Stored: TypeAlias = Literal["float32", "float24", "float16"]
BYTES: dict[Stored, int] = {"float32": 4, "float24": 3, "float16": 2}


def write_page(
    recording: Recording,
    path: str | Path,
    *,
    title: str = "Attention",
    opened: tuple[int | None, int | None] = (None, None),
    layers: Iterable[str | int] | None = None,
    heads: Sequence[Head] | None = None,
    limit: int = 64 * MIB,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The recording as a page: one HTML file that needs no network and no server.

    Query and key are stored in float32 while they take less than 512 KiB, without its last byte up
    to 8 MiB, else in float16; the page then says how far weights may be off. Of several sequences
    in a batch it shows the first.

    Args:
        recording: what was seen.
        path: the file to write; one that exists is replaced only once the new one is complete.
        title: what stands at the top.
        opened: places of the layer and the head that it shows first; the first ones for None.
        layers: names or places of the layers to hold in full; all that fit when left out. The
            others keep their small map.
        heads: what ``regard.heads.classify`` said of the recording; it is asked when left out.
        limit: about how many bytes the file may have.
        progress: called with the steps done and the steps in all.

    Returns:
        The path.

    Raises:
        RegardError: the recording is empty.
        KeyError: no layer of a name in ``layers``.
        IndexError: no layer at a place in ``layers``.
        OSError: the file cannot be written; nothing was changed.

    Example:
        >>> import torch, regard
        >>> A = regard.attend(torch.randn(2, 5, 4), torch.randn(2, 5, 4))
        >>> page = regard.page(regard.Recording({"layer": A}), "attention.html")
        >>> page.name, page.read_text().startswith("<!doctype html>")
        ('attention.html', True)
    """
    if not recording:
        raise RegardError("recording has no layers; a page needs at least one.")
    wanted = _places(recording, layers)
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name[:100]}.part")
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        with temporary.open("w", encoding="ascii", newline="\n") as file:
            file.writelines(_page(recording, title, opened, wanted, heads, limit, progress))
        temporary.replace(target)
    except OSError as error:
        raise OSError(
            f"path has {str(path)!r}, which cannot be written ({error.strerror}); nothing was "
            "changed.\n    Name a file in a folder that exists and that you may write to."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return Path(path)


def _places(recording: Recording, layers: Iterable[str | int] | None) -> set[int]:
    names = list(recording)
    if layers is None:
        return set(range(len(names)))
    places: set[int] = set()
    for layer in layers:
        matrix = recording[layer]
        places.add(next(i for i, name in enumerate(names) if recording[name] is matrix))
    return places


def _page(
    recording: Recording,
    title: str,
    opened: tuple[int | None, int | None],
    wanted: set[int],
    heads: Sequence[Head] | None,
    limit: int,
    progress: Callable[[int, int], None] | None,
) -> list[str]:
    matrices = [first_sequence(recording[name]) for name in recording]
    layers = page_layers(recording, heads, progress)
    blocks: dict[int, dict[str, str]] = {}
    for stored, most in _stored_as().items():
        blocks = _blocks(layers, matrices, wanted, min(limit, most), stored)
        if len(blocks) == len(wanted):
            break
    data = [json_block("recording", manifest(recording, layers, title=title, opened=opened))]
    data += [json_block(f"layer-{place}", block) for place, block in blocks.items()]
    return filled_template(data)


def _stored_as() -> dict[Stored, float]:
    """How numbers are stored, the best way first, up to how many bytes in all."""
    return {"float32": FULL_PRECISION, "float24": NEARLY_FULL_PRECISION, "float16": math.inf}


def _blocks(
    layers: list[PageLayer],
    matrices: list[AttentionMatrix],
    wanted: set[int],
    limit: float,
    stored: Stored,
) -> dict[int, dict[str, str]]:
    """What each layer holds besides its small map, while it fits; sets the layers' fields."""
    blocks: dict[int, dict[str, str]] = {}
    size = 0
    for place in sorted(wanted):
        layer, matrix = layers[place], matrices[place]
        if _least_size(matrix, stored) > limit - size:
            continue
        block = _embed(layer, matrix, stored)
        if layer.kind == "map":
            continue
        cost = sum(map(len, block.values()))
        if size + cost > limit:
            layer.kind = "map"
            continue
        size += cost
        blocks[place] = block
    return blocks


def _least_size(matrix: AttentionMatrix, stored: Stored) -> int:
    """Never more than what the layer will take: a sign, a mantissa and a little exponent."""
    if not isinstance(matrix.source, QueryKey) or matrix.source.bias is not None:
        # Weights may be nearly all zero, and then hundreds of them fit into a byte.
        return math.prod(matrix.shape) // 512
    numbers = matrix.source.query.numel() + matrix.source.key.numel()
    return numbers * BYTES[stored] // 4


def _embed(layer: PageLayer, matrix: AttentionMatrix, stored: Stored) -> dict[str, str]:
    spans = intervals(matrix)
    source = matrix.source
    layer.dtype = stored
    block: dict[str, str] = {}
    if isinstance(spans, Tensor):
        layer.span_heads = spans.shape[0]
        block["spans"] = packed(spans, zlib.Z_DEFAULT_STRATEGY)
    more = isinstance(source, QueryKey) and (source.bias is not None or not source.plain)
    if not isinstance(source, QueryKey) or more or spans is IRREGULAR:
        if math.prod(matrix.shape) > MOST_WEIGHTS:
            return {}  # its small map only
        layer.kind = "weights"
        weights = _rounded(_all_weights(matrix), stored)
        layer.deviation = {"float32": 0.0, "float24": 2**-17, "float16": 2**-12}[stored]
        return block | {"weights": packed(weights, zlib.Z_DEFAULT_STRATEGY, BYTES[stored])}
    layer.kind = "query-key"
    query, query_unit = _in_units(source.query, stored)
    key, key_unit = _in_units(source.key, stored)
    layer.num_kv_heads, layer.head_dim = key.shape[-3], key.shape[-1]
    layer.scale = source.scale * query_unit * key_unit
    layer.query_unit, layer.key_unit = query_unit, key_unit
    if stored != "float32":
        rounded = AttentionMatrix(QueryKey(query.float(), key.float(), layer.scale), matrix.mask)
        layer.deviation = _deviation(matrix, rounded)
    # Query and key look like noise: searching them for repetitions finds none and takes long.
    return block | {
        "query": packed(query, zlib.Z_HUFFMAN_ONLY, BYTES[stored]),
        "key": packed(key, zlib.Z_HUFFMAN_ONLY, BYTES[stored]),
    }


def _in_units(tensor: Tensor, stored: Stored) -> tuple[Tensor, float]:
    """The tensor over a power of two, so that float16 neither overflows nor loses small ones."""
    if stored != "float16":
        return _rounded(tensor, stored), 1.0
    largest = float(tensor.abs().max())
    unit = 2.0 ** math.floor(math.log2(largest)) if 0 < largest < math.inf else 1.0
    return _rounded(tensor.double() / unit, stored), unit


def _rounded(tensor: Tensor, stored: Stored) -> Tensor:
    if stored == "float16":
        return tensor.half()
    single = tensor.float()
    if stored == "float32":
        return single
    # Half of the byte that is left out, so that what stays is the nearest.
    nearest = (single.view(torch.int32) + 0x80) & ~0xFF
    return torch.where(single.isfinite(), nearest.view(torch.float32), single)


def _deviation(matrix: AttentionMatrix, rounded: AttentionMatrix) -> float:
    """The largest difference of a weight, on evenly spaced rows."""
    step = max(1, matrix.shape[-2] // SAMPLED_ROWS)
    rows = slice(None, None, step)
    difference = _weights(matrix, rows).float() - _weights(rounded, rows).float()
    return float(difference.abs().nan_to_num(0.0).max())


def _all_weights(matrix: AttentionMatrix) -> Tensor:
    length = matrix.shape[-2]
    step = max(1, 2**22 // matrix.shape[-1])
    parts = [slice(start, start + step) for start in range(0, length, step)]
    return torch.cat([_weights(matrix, rows) for rows in parts], dim=-2)


def _weights(matrix: AttentionMatrix, rows: slice) -> Tensor:
    part = matrix[..., rows, :]
    return part.to_dense() if isinstance(part, AttentionMatrix) else part
