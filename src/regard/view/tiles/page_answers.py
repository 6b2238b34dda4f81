"""The exact numbers that the page asks for, from a server or a notebook.

Nothing here knows of a browser. A long head is summed up as long as somebody asks for its progress
or waits for one of its columns. What is quick goes first.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import chain, count
from math import isnan
from typing import Any, Literal

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
    WrongQuestionError,
    check_place,
    checked,
    weights_of_rows,
)
from regard.view.tiles.layer_survey import layer_kinds, reduced
from regard.view.tiles.manifest import (
    SMALL,
    first_sequence,
    first_value,
    head_records,
    sink_keys,
    small_numbers,
)
from regard.view.tiles.page_opening import openings
from regard.view.tiles.protocol import OfHead, ProgressAnswer, RowAnswer, TileAnswer
from regard.view.tiles.query_steps import query_steps

MIB = 2**20
_LOOK_AGAIN = 0.25  # seconds
# A question waits, at each of its pauses, while one of a lower rank is answered. Quick ones go one
# after the other, whatever memory each takes; long ones of one rank share the time.
_QUICK, _LONG, _KINDS = range(3)
_MOST_CELLS = 2**24  # of a head whose small map is exact: some 50 ms each
_SAMPLED_ROWS = 256

Wanted = Callable[[], bool]
"""Returns False once nobody waits for the answer any more."""


class Gone(Exception):
    """Nobody waits for the answer any more."""


def is_wanted() -> bool:
    """Return True: the answer is never cancelled."""
    return True


class Answers:
    """The numbers of a recording, as the page asks for them. Of a batch the first sequence.

    Every method may be called on any thread. ``close`` ends what others wait for; as a context
    manager it closes itself. A method raises a WrongQuestionError for a layer, head or
    token that there is not, a RegardError for a layer that has answers only, and ``Gone`` once
    ``wanted``, which is called now and then, returns False.

    Args:
        recording: what was seen.
        limit: about how many bytes may be held for heads that were looked at.
    """

    def __init__(self, recording: Recording, *, limit: int = 512 * MIB) -> None:
        self._recording = recording
        self._limit = limit
        self._tiles: OrderedDict[OfHead, HeadTiles] = OrderedDict()
        self._changed = threading.Condition()
        self._turns: list[tuple[int, int]] = []  # of what is asked, its rank and its number
        self._numbers = count()
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
        """End every answer at its next pause."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def row(self, which: OfHead, query: int, *, wanted: Wanted = is_wanted) -> RowAnswer:
        """Return the weights of one query."""
        tiles = self._head(which)
        place = checked("query", query, tiles.shape[0])
        with self._turn(_QUICK, wanted) as pause:
            return RowAnswer(values=tiles.row(place, pause), mask=tiles.allowed(place))

    def column(self, which: OfHead, key: int, *, wanted: Wanted = is_wanted) -> Tensor:
        """Return the weights on one key, (q_len,); of a long head, after its pass."""
        tiles = self._head(which)
        place = checked("key", key, tiles.shape[1])
        if not tiles.is_small:
            with self._turn(_LONG, wanted) as pause:
                tiles.finish(pause)
        with self._turn(_QUICK, wanted) as pause:
            return tiles.column(place, pause)

    def tile(self, which: OfHead, place: Place, *, wanted: Wanted = is_wanted) -> TileAnswer:
        """Return a part of the head as a picture, from a sample if exact numbers take longer."""
        tiles = self._head(which)
        check_place(place, tiles.shape)
        with self._turn(_QUICK, wanted) as pause:
            return tiles.tile(place, pause)

    def progress(self, which: OfHead, *, wanted: Wanted = is_wanted) -> ProgressAnswer:
        """Go on with the pass over a long head for a moment, and return its progress."""
        tiles = self._head(which)
        if tiles.is_small or tiles.is_done:
            return ProgressAnswer(done=1.0, seconds=0.0)
        with self._turn(_LONG, wanted) as pause:
            tiles.advance(pause)
        done = tiles.done
        # Rows that may attend to nothing are no part of it.
        return ProgressAnswer(
            done=done, seconds=tiles.seconds * (1 - done) / done if done else None
        )

    def steps(
        self,
        which: OfHead,
        query: int,
        by: Literal["weight", "position"],
        start: int,
        count: int,
        *,
        wanted: Wanted = is_wanted,
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
        self, which: OfHead, queries: Spans, keys: Spans, *, wanted: Wanted = is_wanted
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
        with self._turn(_LONG, wanted) as pause:
            return tiles.shares([*query_parts.values()], [*key_parts.values()], pause)

    def overview(self, layer: int, *, wanted: Wanted = is_wanted) -> dict[str, Any]:
        """Return a small map of each head of a layer, as ``manifest.small_numbers`` gives it.

        Of a long text it is a sample: some queries, evenly spread, stand for all; ``sampled`` says
        for how many each.
        """
        matrix = self._matrix(layer)
        heads, q_len, kv_len = matrix.shape
        with self._turn(_LONG, wanted) as pause:
            if q_len * kv_len <= _MOST_CELLS:
                return small_numbers(reduced(matrix, [Pool(SMALL, SMALL)], lambda _: pause())[0])
            step = max(1, q_len // _SAMPLED_ROWS)
            rows = range(step // 2, q_len, step)
            maps = [
                torch.cat([_means(few, -1) for few in weights_of_rows(matrix[head], rows, pause)])
                for head in range(heads)
            ]
        return small_numbers(_means(torch.stack(maps), -2)) | {"sampled": step}

    def heads(self, *, wanted: Wanted = is_wanted) -> dict[str, Any]:
        """Return the kind of every head, layer by layer, and where the page opens.

        It takes as long as a pass over each layer.
        """
        kinds = self.kinds(wanted=wanted)
        opened, notable = openings(self._recording, kinds)
        records = head_records(chain.from_iterable(kinds))
        return {"heads": records, "notable": notable, "opened": opened}

    def kinds(self, *, wanted: Wanted = is_wanted) -> list[list[Head | None]]:
        """Return the heads of each layer with their kinds.

        What is known of a layer is kept, also when the answer is not wanted any more.
        """
        places = range(len(self._recording.layers))
        with self._turn(_KINDS, wanted) as pause:
            for place in places:
                if place not in self._heads:
                    self._heads[place] = layer_kinds(self._recording, place, lambda _: pause())
        return [self._heads[place] for place in places]

    def _layer(self, layer: int) -> Layer:
        layers = self._recording.layers
        return layers[checked("layer", layer, len(layers))]

    def _matrix(self, layer: int) -> AttentionMatrix:
        """Return the matrix of a layer, (num_heads, q_len, kv_len), with its sinks."""
        return first_sequence(self._layer(layer).whole())

    def _value(self, which: OfHead) -> Tensor | None:
        """Return the value of a head, (kv_len, value_dim), or None if it was not recorded."""
        layer = self._layer(which.layer)
        if layer.value is None:
            return None
        heads = first_value(layer.whole_value())
        return heads[which.head * len(heads) // self._matrix(which.layer).shape[0]]

    def _head(self, which: OfHead) -> HeadTiles:
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
                self._tiles.popitem(last=False)
            return tiles

    @contextmanager
    def _turn(self, rank: int, wanted: Wanted) -> Generator[Pause]:
        """Yield the pause of an answer: it lets those before it go first, and raises ``Gone``."""
        turn = rank, next(self._numbers) if rank == _QUICK else 0

        def pause() -> None:
            with self._changed:
                while not self._closed and wanted():
                    if min(self._turns) >= turn:
                        return
                    self._changed.wait(_LOOK_AGAIN)
            raise Gone

        with self._changed:
            self._turns.append(turn)
        try:
            yield pause
        finally:
            with self._changed:
                self._turns.remove(turn)
                self._changed.notify_all()


def _means(numbers: Tensor, axis: int) -> Tensor:
    """Return the means over at most ``SMALL`` parts of an axis, as ``Pool`` cuts it."""
    length = numbers.shape[axis]
    cells = min(SMALL, length)
    parts = numbers.tensor_split([i * length // cells for i in range(1, cells)], axis)
    return torch.stack([part.mean(axis) for part in parts], axis)


def _named(spans: Spans) -> dict[str, tuple[int, int]]:
    return {str(place): span for place, span in enumerate(spans)}
