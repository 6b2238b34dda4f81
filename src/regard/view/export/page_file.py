"""One offline HTML file with the page and everything it needs, written atomically.

The file holds the page's own code, the tokens, a small map of every head, and for each layer the
query, the key and two numbers of every row, from which the browser computes any weight by itself.
Of layers that are too large for that it holds block means.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.analysis.head_kinds import Head
from regard.errors import RegardError
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import layer_at
from regard.recording.recording import Recording
from regard.reductions.sums import Pool
from regard.view.export.complete_layer import (
    Block,
    CompleteLayer,
    Stored,
    fits_never,
    least_size,
    size_of,
)
from regard.view.export.page_template import filled_template, json_block, number_block
from regard.view.export.summarised_layer import SummarisedLayer, most_bytes
from regard.view.tiles.layer_survey import Sweeps
from regard.view.tiles.manifest import (
    SMALL,
    PageLayer,
    add_other,
    first_sequence,
    first_value,
    head_records,
    live_layers,
    manifest,
    sink_keys,
    small_numbers,
)

__all__ = ["page_text", "write_page"]

MIB = 2**20
FULL_PRECISION = MIB // 2
NEARLY_FULL_PRECISION = 8 * MIB


@torch.no_grad()
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
    other: Recording | None = None,
    other_title: str = "Other",
) -> Path:
    """Write a recording as a page: one HTML file that needs no network and no server.

    Query and key are stored in float32 while all layers take less than 512 KiB, without its last
    byte up to 8 MiB, else in float16; the page then says how far weights may be off. Each row also
    has its largest score and the log of the sum of exp(score - largest), with and without sinks, in
    float32. With them any weight is one score away. They are those of query and key as stored:
    in float32 every weight is within 1e-6 of itself, and all views show the same one.
    Of more than 8,192 tokens the means of blocks of 64 x 64 tokens follow where there is room, so
    that the whole is exact at once too. Of several sequences in a batch the page shows the first.

    One pass over each layer finds all of it, the kinds of heads too: of one sequence the kinds are
    those of query and key as they are stored.

    Where query and key of all layers do not fit ``limit``, every layer first gets the mean weights
    of at most 512 x 512 blocks of each head, one byte each. Then the opened layer, and the others
    in their order, get query and key instead while that fits. A layer whose block means do not fit
    keeps its small map of 32 x 32 blocks. The page says at every number what it is. Last come the
    values of layers with query and key, where the recording has
    them. For fewer heads record fewer: ``regard.observe(model, heads=...)``.

    Args:
        recording: what was seen.
        path: the file to write; one that exists is replaced only once the new one is complete.
        title: what stands at the top.
        opened: indices in the recording of the layer and the head to show first; None for the
            first ones.
        layers: names or places of the layers to hold, all of them when left out. The others keep
            their small map.
        heads: the kinds of heads, from ``classify``; computed when left out.
        limit: about how many bytes the file may have.
        progress: called with the rows done and the rows in all, those of every head.
        other: a second recording. The page then shows the same head of both side by side, or their
            difference if they have as many tokens. Each may have half of ``limit``.
        other_title: what its maps are called.

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
    for name, each in (("recording", recording), ("other", other)):
        if each is not None and not each.layers:
            raise RegardError(f"{name} has no layers; a page needs at least one.")
    wanted = _places(recording, layers, *opened)
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name[:100]}.part")
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        if target.exists() and not target.is_file():
            raise OSError(22, "it is a device, a pipe or the like")
        with temporary.open("w", encoding="ascii", newline="\n") as file:
            share = limit if other is None else limit // 2
            layers_known, blocks = _blocks(recording, wanted, heads, share, progress)
            first = manifest(recording, layers_known, title=title, opened=opened)
            if other is not None:
                _add_other(other, other_title, first, blocks, share, progress)
            file.writelines(_page(first, blocks))
        temporary.replace(target)
    except OSError as error:
        raise OSError(
            f"path has {str(path)!r}, which cannot be written ({error.strerror}); nothing was "
            "changed.\n    Name a file in a folder that exists and that you may write to."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return Path(path)


@torch.no_grad()
def page_text(recording: Recording, *, title: str, is_small: bool = False) -> str:
    """Return a recording as the text of a page."""
    layers, blocks = _blocks(recording, range(len(recording)), None, 64 * MIB, None)
    return "".join(_page(manifest(recording, layers, title=title), blocks, is_small=is_small))


def _places(
    recording: Recording,
    layers: Iterable[str | int] | None,
    opened: int | None,
    head: int | None,
) -> list[int]:
    """Return the positions of the layers to store, the opened layer first."""
    names = list(recording)
    places = set(range(len(names)))
    if opened is not None and opened not in places:
        raise ValueError(
            f"layer is {opened}; this recording has {len(names)} layers, 0 to {len(names) - 1}."
        )
    shape = recording.layers[opened or 0].shape
    num_heads = shape[-3] if len(shape) > 2 else 1
    if head is not None and head >= num_heads:
        raise ValueError(f"head is {head}; the layer has {num_heads} heads, 0 to {num_heads - 1}.")
    if layers is not None:
        places = {names.index(layer_at(recording.layers, layer).name) for layer in layers}
    return sorted(places, key=lambda place: (place != opened, place))


def _add_other(
    other: Recording,
    title: str,
    first: dict[str, Any],
    blocks: dict[int, Block],
    limit: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Add the layers of a second recording after those of the first one."""
    layers, more = _blocks(other, range(len(other)), None, limit, progress)
    count = len(first["layers"])
    add_other(first, manifest(other, layers, title=title))
    blocks |= {place + count: block for place, block in more.items()}


def _page(first: dict[str, Any], blocks: dict[int, Block], *, is_small: bool = False) -> list[str]:
    data = [json_block("recording", first)]
    for place in sorted(blocks):
        data += [
            number_block(f"layer-{place}-{name}", text) for name, text in blocks[place].items()
        ]
    return filled_template(data, is_small=is_small)


def _blocks(
    recording: Recording,
    wanted: Sequence[int],
    heads: Sequence[Head] | None,
    limit: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[PageLayer], dict[int, Block]]:
    """Return the layers, and the numbers that the page holds of each."""
    matrices = [first_sequence(recording[name]) for name in recording]
    layers = [replace(layer, kind="map") for layer in live_layers(recording)]
    sinks = [sink_keys(recording, layer.kv_len) for layer in layers]
    choice = _Choice(layers, matrices, sinks)
    complete = choice.complete_layers(wanted, limit)
    room = limit - sum(layer.size for layer in complete.values())
    rest = [place for place in wanted if place not in complete]
    stored: dict[int, CompleteLayer | SummarisedLayer] = {**complete}
    stored |= {
        place: SummarisedLayer(layers[place], matrices[place])
        for place in choice.that_fit(rest, room)
    }
    room -= sum(stored[place].size for place in rest if place in stored)
    sweeps = Sweeps(recording, ask_kinds=heads is None, progress=progress)
    blocks: dict[int, Block] = {}
    for place in [*wanted, *(set(range(len(layers))) - set(wanted))]:
        each = stored.get(place)
        shown, asked = (matrices[place], []) if each is None else (each.shown, each.questions)
        small, *answers = sweeps.over(place, shown, [Pool(SMALL, SMALL), *asked])
        if each is not None:
            room += each.size
            blocks[place] = each.finished(answers, room)
            room -= size_of(blocks[place])
            layers[place] = each.layer
        layers[place].overview = small_numbers(small)
    for place, layer in complete.items():
        seen = recording.layers[place]
        if seen.value is not None:
            value = layer.value_block(first_value(seen.whole_value()), room)
            blocks[place] |= value
            room -= size_of(value)
    kinds = head_records(heads or ())
    for place, layer in enumerate(layers):
        if heads is None:
            layer.heads = sweeps.kinds[place]
        elif kinds:
            layer.heads, kinds = kinds[: layer.num_heads], kinds[layer.num_heads :]
    return layers, blocks


class _Choice(NamedTuple):
    """The layers of a recording, among which those are chosen that the page holds completely.

    Attributes:
        layers: what the page is told of each.
        matrices: of each, (num_heads, q_len, kv_len).
        sinks: of each, the keys that are set aside where sinks are hidden.
    """

    layers: list[PageLayer]
    matrices: list[AttentionMatrix]
    sinks: list[tuple[int, ...]]

    def complete_layers(self, wanted: Sequence[int], limit: int) -> dict[int, CompleteLayer]:
        """Return all layers in the most bits that fit, or some in 16 bits."""
        able = [place for place in wanted if not fits_never(self.matrices[place])]
        most: dict[Stored, float] = {
            "float32": FULL_PRECISION,
            "float24": NEARLY_FULL_PRECISION,
            "float16": math.inf,
        }
        for stored, bytes_ in most.items():
            complete = self._embedded(able, min(limit, bytes_), stored, {})
            if len(complete) == len(able):
                return complete
        return self._embedded(able, limit, "float16", self.that_fit(wanted, limit))

    def that_fit(self, places: Sequence[int], room: int) -> dict[int, int]:
        """Return the layers whose block means fit, and the most bytes that they take."""
        fitting: dict[int, int] = {}
        for place in places:
            most = most_bytes(self.matrices[place].shape)
            if most <= room:
                fitting[place] = most
                room -= most
        return fitting

    def _embedded(
        self, places: Sequence[int], limit: float, stored: Stored, reserved: dict[int, int]
    ) -> dict[int, CompleteLayer]:
        """Return complete layers, while they fit beside what is reserved for the others."""
        complete: dict[int, CompleteLayer] = {}
        room = limit - sum(reserved.values())
        for place in places:
            most = room + reserved.get(place, 0)
            if least_size(self.matrices[place], stored) > most:
                continue
            layer = CompleteLayer(
                self.layers[place], self.matrices[place], stored, self.sinks[place]
            )
            if layer.size <= most:
                room = most - layer.size
                complete[place] = layer
        return complete
