"""The exact numbers that the page asks for, from a server or a notebook.

Nothing here knows of a browser. A long head is summed up in the background, the one that was asked
for last first; tiles go before it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.analysis.head_kinds import Head
from regard.analysis.span_shares import checked_parts
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Layer
from regard.recording.recording import Recording
from regard.reductions.sums import Pool
from regard.view.tiles.head_tiles import (
    HeadTiles,
    Pause,
    Place,
    Spans,
    Tile,
    WrongQuestionError,
    check_place,
    checked,
    weights_of_rows,
)
from regard.view.tiles.layer_survey import layer_kinds, reduced
from regard.view.tiles.manifest import (
    SMALL,
    Opening,
    first_sequence,
    first_value,
    sink_keys,
    small_numbers,
)
from regard.view.tiles.page_opening import openings
from regard.view.tiles.protocol import ProgressAnswer
from regard.view.tiles.query_steps import query_steps

MIB = 2**20
_LOOK_AGAIN = 0.25  # seconds
_MOST_CELLS = 2**24  # of a head whose small map is exact: some 50 ms each
_SAMPLED_ROWS = 256

Wanted = Callable[[], bool]
"""Returns False once nobody waits for the answer any more."""


class Gone(Exception):
    """Nobody waits for the answer any more."""


class Which(NamedTuple):
    """One head.

    Attributes:
        layer: its place in the order the layers ran.
        head: its place in the layer.
        hidden: whether sinks, the first key and special tokens, are set aside and what is left of
            each row is made to sum to 1.
    """

    layer: int
    head: int
    hidden: bool = False


class RowOfWeights(NamedTuple):
    """The weights of one query.

    Attributes:
        values: the weight of each key, (kv_len,), float32.
        mask: True where it may attend, (kv_len,); a key that is set aside is none of these.
    """

    values: Tensor
    mask: Tensor


class KindsOfHeads(NamedTuple):
    """The kinds of all heads, and the head on which the page opens.

    Attributes:
        kinds: the heads of each layer; None for each of a layer whose weights are not all numbers.
        opened: the head that the page opens, and its cell.
        notable: the heads that stand out.
    """

    kinds: Sequence[Sequence[Head | None]]
    opened: Opening
    notable: Sequence[Opening]


def is_wanted() -> bool:
    """Return True: the answer is never cancelled."""
    return True


class Answers:
    """The numbers of a recording, as the page asks for them. Of a batch the first sequence.

    Every method may be called on any thread. ``close`` ends what runs in the background; as a
    context manager it closes itself. A method raises a WrongQuestionError for a layer, head or
    token that there is not, a RegardError for a layer that has answers only, and ``Gone`` once
    ``wanted``, which is called now and then, returns False.

    Args:
        recording: what was seen.
        limit: about how many bytes may be held for heads that were looked at.
    """

    def __init__(self, recording: Recording, *, limit: int = 512 * MIB) -> None:
        self._recording = recording
        self._limit = limit
        self._tiles: OrderedDict[Which, HeadTiles] = OrderedDict()
        self._unfinished: OrderedDict[Which, HeadTiles] = OrderedDict()
        self._changed = threading.Condition()
        self._working: threading.Thread | None = None
        self._failures: dict[Which, Exception] = {}
        self._in_front = 0
        self._closed = False
        self._heads: dict[int, list[Head | None]] = {}

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are cached, or will be, for heads."""
        return sum(tiles.nbytes for tiles in self._tiles.values())

    def close(self) -> None:
        """Stop the background work."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._working is not None:
            self._working.join()

    def row(self, which: Which, query: int, *, wanted: Wanted = is_wanted) -> RowOfWeights:
        """Return the weights of one query."""
        tiles = self._head(which)
        place = checked("query", query, tiles.shape[0])
        with self._first(wanted) as pause:
            return RowOfWeights(tiles.row(place, pause), tiles.allowed(place))

    def column(self, which: Which, key: int, *, wanted: Wanted = is_wanted) -> Tensor:
        """Return the weights on one key, (q_len,); for a long head, wait for its pass."""
        tiles = self._head(which)
        place = checked("key", key, tiles.shape[1])
        self._wait_for(which, tiles, wanted)
        with self._first(wanted) as pause:
            return tiles.column(place, pause)

    def tile(self, which: Which, place: Place, *, wanted: Wanted = is_wanted) -> Tile:
        """Return a part of the head as a picture, from a sample if exact numbers take longer."""
        tiles = self._head(which)
        check_place(place, tiles.shape)
        with self._first(wanted) as pause:
            tile = tiles.tile(place, pause)
        if not tile.exact:
            self._ask_for(which, tiles)
        return tile

    def progress(self, which: Which) -> ProgressAnswer:
        """Return the progress of the exact picture of a head, and start it if necessary.

        Raises:
            Exception: what ended the work on it. The next call tries again.
        """
        tiles = self._head(which)
        failure = self._failures.pop(which, None)
        if failure is not None:
            raise failure
        if tiles.is_small or tiles.is_done:
            return ProgressAnswer(done=1.0, seconds=0.0)
        self._ask_for(which, tiles)
        done = tiles.done
        seconds = tiles.seconds * (1 - done) / done if done else None
        return ProgressAnswer(done=done, seconds=seconds)

    def steps(
        self, which: Which, query: int, by: Literal["weight", "position"], start: int, count: int
    ) -> dict[str, Any]:
        """Return the steps of one query, for some of its keys; see ``query_steps``.

        Raises:
            WrongQuestionError: the weights are not numbers.
        """
        head = self._head(which)
        place = checked("query", query, head.shape[0])
        steps = query_steps(head.matrix, place, by, start, count, self._value(which))
        if isnan(steps["total"]):
            raise WrongQuestionError(
                f"query is {query}, whose weights are not numbers (NaN); it has no steps to show."
            )
        return steps

    def segments(
        self, which: Which, queries: Spans, keys: Spans, *, wanted: Wanted = is_wanted
    ) -> Tensor:
        """Return the share of each key part in each query part, (query parts, key parts).

        Args:
            which: the head.
            queries: of each part its first token, and the one past the last.
            keys: the same.
            wanted: as everywhere.

        Raises:
            WrongQuestionError: a part is empty, reaches beyond the text or overlaps another.
        """
        tiles = self._head(which)
        q_len, kv_len = tiles.shape
        try:
            query_parts = checked_parts("queries", _named(queries), "q_len", q_len)
            key_parts = checked_parts("keys", _named(keys), "kv_len", kv_len)
        except ValueError as error:
            raise WrongQuestionError(str(error)) from error
        pause = self._polite(wanted)
        return tiles.shares([*query_parts.values()], [*key_parts.values()], pause)

    def overview(self, layer: int, *, wanted: Wanted = is_wanted) -> dict[str, Any]:
        """Return a small map of each head of a layer, as ``manifest.small_numbers`` gives it.

        Of a long text it is a sample: some queries, evenly spread, stand for all; ``sampled`` says
        for how many each.
        """
        matrix = self._matrix(layer)
        heads, q_len, kv_len = matrix.shape
        pause = self._until_gone(wanted)
        if q_len * kv_len <= _MOST_CELLS:
            return small_numbers(reduced(matrix, [Pool(SMALL, SMALL)], lambda _: pause())[0])
        step = max(1, q_len // _SAMPLED_ROWS)
        rows = range(step // 2, q_len, step)
        maps = [
            torch.cat([_means(few, -1) for few in weights_of_rows(matrix[head], rows, pause)])
            for head in range(heads)
        ]
        return small_numbers(_means(torch.stack(maps), -2)) | {"sampled": step}

    def heads(self, *, wanted: Wanted = is_wanted) -> KindsOfHeads:
        """Return every head with its kind, layer by layer; see ``regard.heads``.

        It takes as long as a pass over each layer, and lets those that somebody waits for go first.
        What is known of a layer is kept, also when the answer is not wanted any more.
        """
        gone, pause = self._until_gone(wanted), self._polite(wanted)
        with self._changed:
            while self._unfinished:
                gone()
                self._changed.wait(_LOOK_AGAIN)
        places = range(len(self._recording.layers))
        for place in places:
            if place not in self._heads:
                self._heads[place] = layer_kinds(self._recording, place, lambda _: pause())
        kinds = [self._heads[place] for place in places]
        return KindsOfHeads(kinds, *openings(self._recording, kinds))

    def _layer(self, layer: int) -> Layer:
        layers = self._recording.layers
        return layers[checked("layer", layer, len(layers))]

    def _matrix(self, layer: int) -> AttentionMatrix:
        """Return the matrix of a layer, (num_heads, q_len, kv_len), with its sinks."""
        return first_sequence(self._layer(layer).whole())

    def _value(self, which: Which) -> Tensor | None:
        """Return the value of a head, (kv_len, value_dim), or None if it was not recorded."""
        layer = self._layer(which.layer)
        if layer.value is None:
            return None
        heads = first_value(layer.whole_value())
        return heads[which.head * len(heads) // self._matrix(which.layer).shape[0]]

    def _head(self, which: Which) -> HeadTiles:
        with self._changed:
            tiles = self._tiles.get(which)
            if tiles is not None:
                self._tiles.move_to_end(which)
                return tiles
        matrix = self._matrix(which.layer)
        one = matrix[checked("head", which.head, matrix.shape[0])]
        aside = sink_keys(self._recording, which.layer) if which.hidden else ()
        made = HeadTiles(one, aside)
        with self._changed:
            tiles = self._tiles.setdefault(which, made)
            while self.nbytes > self._limit and len(self._tiles) > 1:
                oldest, _ = self._tiles.popitem(last=False)
                self._unfinished.pop(oldest, None)
            return tiles

    # Who works when

    def _until_gone(self, wanted: Wanted) -> Pause:
        """Return a pause that raises once the request was cancelled."""

        def pause() -> None:
            if self._closed or not wanted():
                raise Gone

        return pause

    def _polite(self, wanted: Wanted) -> Pause:
        """Return a pause that also lets quicker requests go first."""
        gone = self._until_gone(wanted)

        def pause() -> None:
            gone()
            self._give_way()

        return pause

    @contextmanager
    def _first(self, wanted: Wanted) -> Generator[Pause]:
        """Run the body before the work in the background, and yield its pause."""
        with self._changed:
            self._in_front += 1
        try:
            yield self._until_gone(wanted)
        finally:
            with self._changed:
                self._in_front -= 1
                self._changed.notify_all()

    def _ask_for(self, which: Which, tiles: HeadTiles) -> None:
        with self._changed:
            if self._closed or tiles.is_done:
                return
            self._unfinished[which] = tiles
            self._unfinished.move_to_end(which)
            if self._working is None:
                self._working = threading.Thread(target=self._work, name="regard", daemon=True)
                self._working.start()
            self._changed.notify_all()

    def _wait_for(self, which: Which, tiles: HeadTiles, wanted: Wanted) -> None:
        """Wait until the pass over a long head is finished."""
        if tiles.is_small:
            return
        with self._changed:
            self._failures.pop(which, None)  # what failed before is tried again
            while not tiles.is_done:
                if self._closed or not wanted():
                    raise Gone
                if which in self._failures:
                    raise self._failures[which]
                if which not in self._unfinished:  # not yet, or dropped for others
                    self._ask_for(which, tiles)
                self._changed.wait(_LOOK_AGAIN)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._unfinished)
                if self._closed:
                    return
                which, tiles = next(reversed(self._unfinished.items()))
            try:
                tiles.advance(self._give_way)
            except Gone:
                return
            except Exception as error:  # noqa: BLE001 - it is told to whoever waits
                self._failures[which] = error
            with self._changed:
                if tiles.is_done or which in self._failures:
                    self._unfinished.pop(which, None)
                self._changed.notify_all()

    def _give_way(self) -> None:
        if self._in_front or self._closed:
            with self._changed:
                self._changed.wait_for(lambda: not self._in_front or self._closed, _LOOK_AGAIN)
        if self._closed:
            raise Gone


def _means(numbers: Tensor, axis: int) -> Tensor:
    """Return the means over at most ``SMALL`` parts of an axis, as ``Pool`` cuts it."""
    length = numbers.shape[axis]
    cells = min(SMALL, length)
    parts = numbers.tensor_split([i * length // cells for i in range(1, cells)], axis)
    return torch.stack([part.mean(axis) for part in parts], axis)


def _named(spans: Spans) -> dict[str, tuple[int, int]]:
    return {str(place): span for place, span in enumerate(spans)}
