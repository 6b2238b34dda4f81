"""One offline HTML file with the page and everything it needs, written atomically.

The file holds the page's own code, the tokens, a small map of every head, and for each layer the
query, the key and two numbers of every row, from which the browser computes any weight by itself.
Of layers that do not fit it holds block means.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.analysis.head_kinds import Head, stand_out
from regard.errors import RegardError
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import layer_at
from regard.recording.recording import Recording, check_recording
from regard.reductions.sums import Pool
from regard.view.export.complete_layer import (
    Block,
    CompleteLayer,
    Stored,
    is_storable,
    likely_size,
    size_of,
)
from regard.view.export.page_template import filled_template, number_block
from regard.view.export.summarised_layer import (
    FEWEST_BLOCKS,
    SummarisedLayer,
    block_of,
    most_bytes,
)
from regard.view.tiles.layer_survey import layer_kinds, reduced
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
from regard.view.tiles.page_opening import blind_opening, openings

MIB = 2**20
LIMIT = 63 * MIB  # with the page's own code a file is below 64 MiB


@torch.no_grad()
def write_page(
    recording: Recording,
    path: str | Path,
    *,
    title: str | None = None,
    opened: tuple[int | None, int | None] = (None, None),
    layers: Iterable[str | int] | None = None,
    heads: Sequence[Head] | None = None,
    limit: int = LIMIT,
    progress: Callable[[int, int], None] | None = None,
    other: Recording | None = None,
    other_title: str = "Other",
) -> Path:
    """Write a recording as a page: one HTML file that needs no network and no server.

    Each row has its largest score and the log of the sum of exp(score - largest), with and without
    sinks, in float32. With them any weight is one score away. They are those of query and key as
    stored, so all views show the same weight. Of more than 8,192 tokens the means of blocks of 64
    x 64 tokens follow where there is room, so that the whole is exact at once too. Of several
    sequences in a batch the page shows the first.

    A layer is exact if the page has its query and key. Exact are, in this order and while they fit
    ``limit``: the opened layer, the layers of the heads that stand out, and the other layers. Of
    the rest the page has the mean weights of blocks of each head, of 512 x 512 blocks while these
    fit, then of fewer and larger ones. It says at every number what it is. Last come the values
    of layers with query and key, where the recording has them. For fewer heads record fewer:
    ``regard.observe(model, heads=...)``.

    In the same order, exact layers are stored in float32 where all of this still fits beside them:
    every weight is then within 1e-6 of itself. Else they are stored in float16, and the page says
    how far their weights are off.

    Args:
        recording: what was seen.
        path: the file to write; one that exists is replaced only once the new one is complete.
        title: what stands at the top; the beginning of the text when left out.
        opened: indices in the recording of the layer and the head to show first. Those that are
            None are chosen: the head that says most about the words, or else one that stands out.
        layers: names or places of the layers to hold, all of them when left out. Of the others the
            page has means of large blocks.
        heads: the kinds of heads, from ``classify``; computed when left out.
        limit: about how many bytes the numbers may take in the file, beside its own code.
        progress: called with the rows done and the rows in all, those of every head.
        other: a second recording. The page then shows the same head of both side by side, or their
            difference if they have as many tokens. Each may have half of ``limit``.
        other_title: what its maps are called.

    Returns:
        The path.

    Raises:
        TypeError: no recording, such as a matrix.
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
        if each is not None and not check_recording(name, each).layers:
            raise RegardError(f"{name} has no layers; a page needs at least one.")
    wanted = _places(recording, layers, *opened)
    recording, wanted = _apart(recording, wanted)
    heads = heads if heads is None or len(heads) == sum(_head_counts(recording)) else None
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name[:100]}.part")
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        if target.exists() and not target.is_file():
            raise OSError(22, "it is a device, a pipe or the like")
        both = [each for each in (recording, other) if each is not None]
        with temporary.open("w", encoding="ascii", newline="\n") as file:
            share = _room(limit, both) // len(both)
            count = _counter(both, heads, progress)
            kinds = _kinds(recording, heads, count)
            opening, notable = openings(recording, kinds, opened, wanted)
            held, blocks = _blocks(recording, wanted, opening.layer, kinds, share, count)
            first = manifest(recording, held, title=title, opened=opening, notable=notable)
            if other is not None:
                kinds = _kinds(other, None, count)
                more, others = _blocks(other, range(len(other)), None, kinds, share, count)
                blocks |= {place + len(held): block for place, block in others.items()}
                add_other(first, manifest(other, more, title=other_title, opened=opening))
                held += more
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


def read_layers(path: Path) -> list[PageLayer]:
    """Return what a written page has of each layer."""
    with path.open(encoding="ascii") as file:
        block = next(line for line in file if 'type="application/json" id="recording"' in line)
    text = block[block.index('id="recording">') + 15 : block.index("</script>")]
    return [PageLayer(**layer) for layer in json.loads(text)["layers"]]


@torch.no_grad()
def means_page(recording: Recording, *, title: str) -> tuple[str, list[PageLayer]]:
    """Return the text of a page that holds block means alone, and what it has of each layer."""
    kinds = [()] * len(recording)
    layers, blocks = _blocks(recording, (), None, kinds, 0, lambda _: None)
    first = manifest(recording, layers, title=title, opened=blind_opening(recording))
    return "".join(_page(first, blocks)), layers


def _room(limit: int, recordings: Sequence[Recording]) -> int:
    """Return the bytes that are left for numbers beside the pictures, in base64."""
    pictures = [picture.data or b"" for each in recordings for picture in each.pictures]
    return max(0, limit - sum(len(data) for data in pictures) * 4 // 3)


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


def _apart(recording: Recording, wanted: Sequence[int]) -> tuple[Recording, list[int]]:
    """Return a recording whose windows and tiles are apart, and the indices of its layers."""
    apart = recording.apart()
    names = [recording.layers[place].name for place in wanted]
    parts = range(len(recording), len(apart))
    more = [at for at in parts if apart.layers[at].name.rpartition(" part ")[0] in names]
    return apart, [*wanted, *more]


def _page(first: dict[str, Any], blocks: dict[int, Block]) -> list[str]:
    numbers = (
        number_block(f"layer-{place}-{name}", text)
        for place in sorted(blocks)
        for name, text in blocks[place].items()
    )
    return filled_template(first, numbers)


def _kinds(
    recording: Recording, heads: Sequence[Head] | None, count: Callable[[int], None]
) -> list[Sequence[Head | None]]:
    """Return the heads of each layer with their kinds, which may be known."""
    if heads is None:
        return [layer_kinds(recording, place, count) for place in range(len(recording))]
    counts = _head_counts(recording)
    return [heads[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def _counter(
    recordings: Sequence[Recording],
    heads: Sequence[Head] | None,
    progress: Callable[[int, int], None] | None,
) -> Callable[[int], None]:
    """Return what counts the rows of all heads in the passes over some recordings."""
    layers, done = [layer for each in recordings for layer in each.layers], 0
    rows = sum(prod(layer.shape[-3:-1]) for layer in layers)
    rows += sum(prod(layer.shape[:-1]) for layer in layers) if heads is None else 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, rows)

    return count


def _head_counts(recording: Recording) -> list[int]:
    return [layer.shape[-3] if len(layer.shape) > 2 else 1 for layer in recording.layers]


def _blocks(
    recording: Recording,
    wanted: Sequence[int],
    opened: int | None,
    kinds: Sequence[Sequence[Head | None]],
    limit: int,
    count: Callable[[int], None],
) -> tuple[list[PageLayer], dict[int, Block]]:
    """Return the layers, and the numbers that the page holds of each."""
    matrices = [first_sequence(recording[name]) for name in recording]
    layers = live_layers(recording)
    order = _exact_first(wanted, opened, kinds)
    stored = _Choice(recording, layers, matrices).stored_layers(order, limit)
    room = limit - sum(each.size for each in stored.values())
    blocks: dict[int, Block] = {}
    for place in [*order, *(set(range(len(layers))) - set(order))]:
        each = stored[place]
        small, *answers = reduced(each.shown, [Pool(SMALL, SMALL), *each.questions], count)
        room += each.size
        blocks[place] = each.finished(answers, room)
        room -= size_of(blocks[place])
        layers[place] = each.layer
        layers[place].overview = small_numbers(small)
        layers[place].heads = head_records(kinds[place]) or None
    for place, layer in stored.items():
        if isinstance(layer, CompleteLayer):
            value = layer.value_block(room)
            blocks[place] |= value
            room -= size_of(value)
    return layers, blocks


def count_exact(recording: Recording, limit: int) -> int:
    """Return about how many layers of a recording a page holds exactly.

    Args:
        recording: what was seen.
        limit: about how many bytes the numbers may take.
    """
    sizes = sorted(likely_size(layer) for layer in recording.layers)
    return sum(1 for size in accumulate(sizes) if size <= limit)


def _exact_first(
    wanted: Sequence[int], opened: int | None, kinds: Sequence[Sequence[Head | None]]
) -> list[int]:
    """Return layers in the order in which the page holds them exactly.

    First comes the opened layer, then those of heads that stand out, then the others.
    """
    found = stand_out([head for row in kinds for head in row if head is not None])
    first = [] if opened is None else [opened]
    for head, _ in found:
        first += [place for place, row in enumerate(kinds) if any(one is head for one in row)]
    return [place for place in dict.fromkeys((*first, *wanted)) if place in wanted]


class _Choice(NamedTuple):
    """The layers of a recording, among which those are chosen that the page holds.

    Attributes:
        recording: what was seen.
        layers: what the page is told of each.
        matrices: of each, (num_heads, q_len, kv_len).
    """

    recording: Recording
    layers: list[PageLayer]
    matrices: list[AttentionMatrix]

    def stored_layers(
        self, order: Sequence[int], limit: int
    ) -> dict[int, CompleteLayer | SummarisedLayer]:
        """Return complete layers while they fit, and of the others the means of blocks.

        The blocks of a layer in ``order`` are as small as the room that is left allows. Complete
        layers are in 16 bits, and in 32 where nothing else has to leave the page for them.
        """
        shapes = [matrix.shape for matrix in self.matrices]
        large = [block_of(shape, FEWEST_BLOCKS) for shape in shapes]
        least = [most_bytes(shape, block) for shape, block in zip(shapes, large, strict=True)]
        # Beside a complete layer each other one has its means.
        most = max(0, limit - sum(least) + max(least))
        complete = self._fitting(order, "float16", most, lambda layer, _: layer.size)
        others = [index for index in order if index not in complete]
        others += sorted(set(range(len(shapes))) - set(order))
        room = limit - sum(layer.size for layer in complete.values())
        room -= sum(least[index] for index in others)
        summarised: dict[int, SummarisedLayer] = {}
        for index in others:
            block = block_of(shapes[index]) if index in order else large[index]
            room += least[index]
            while block < large[index] and most_bytes(shapes[index], block) > room:
                block *= 2
            room -= most_bytes(shapes[index], block)
            summarised[index] = SummarisedLayer(self.layers[index], self.matrices[index], block)
        room -= sum(layer.full_size - layer.size for layer in complete.values())
        sizes = {index: layer.full_size for index, layer in complete.items()}
        more = self._fitting(
            complete, "float32", room, lambda layer, index: layer.full_size - sizes[index]
        )
        return complete | more | summarised

    def _fitting(
        self,
        order: Iterable[int],
        stored: Stored,
        room: int,
        size: Callable[[CompleteLayer, int], int],
    ) -> dict[int, CompleteLayer]:
        """Return complete layers in order while their sizes fit into the room."""
        fitting: dict[int, CompleteLayer] = {}
        too_large: dict[torch.Size, float] = {}
        for index in order:
            matrix = self.matrices[index]
            if too_large.get(matrix.shape, 1) > room or not is_storable(matrix):
                continue
            layer = self._complete_layer(index, stored)
            if size(layer, index) <= room:
                room -= size(layer, index)
                fitting[index] = layer
            else:  # one of the same shape is hardly smaller, and takes a while
                too_large[matrix.shape] = 0.9 * size(layer, index)
        return fitting

    def _complete_layer(self, index: int, stored: Stored) -> CompleteLayer:
        layer = self.recording.layers[index]
        value = None if layer.value is None else first_value(layer.whole_value())
        sinks = sink_keys(self.recording, index)
        return CompleteLayer(self.layers[index], self.matrices[index], stored, sinks, value)
