"""The questions of the page and their answers: one table for Python and for TypeScript.

``python tests/questions_in_typescript.py`` writes ``view/web/protocol/questions.ts`` from it, and a
test compares the two. The server decodes its questions by the same types.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from torch import Tensor

from regard.view.tiles.manifest import Opening

Whole = Annotated[int, Meta(ge=0, le=999_999_999)]
Spans = Annotated[list[tuple[Whole, Whole]], Meta(min_length=1, max_length=200)]


# An answer of the library has tensors; they are sent as bytes, all else as JSON.
Floats = Annotated[Tensor, "Float32Array"]
Bytes = Annotated[Tensor, "Uint8Array"]
Vector = Annotated[list[float], "ArrayLike<number>"]


class OfHead(Struct, frozen=True, forbid_unknown_fields=True):
    """A question about one head.

    Attributes:
        layer: its place in the order the layers ran.
        head: its place in the layer.
        hidden: whether sinks, the first key and special tokens, are set aside and what is left of
            each row is made to sum to 1.
    """

    layer: Whole
    head: Whole
    hidden: bool = False


class Row(OfHead, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights of one query, and which keys it may attend to."""

    query: Whole


class RowAnswer(Struct, frozen=True, kw_only=True):
    """A number for each key; of the mask, 1 where the query may attend to the key."""

    values: Floats
    mask: Bytes


class Column(OfHead, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights that all queries give to one key."""

    key: Whole


class Values(Struct, frozen=True, kw_only=True):
    """Numbers whose shape the question says: a column, or shares (query parts, key parts)."""

    values: Floats


class Tile(OfHead, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the matrix: 256 x 256 cells, each the mean of 2^level x 2^level weights."""

    level: Whole
    row: Whole
    column: Whole


class TileAnswer(Struct, frozen=True, kw_only=True):
    """The cells (height, width); sampled: one query in so many was asked, if they are not exact."""

    values: Floats
    height: int
    width: int
    exact: bool
    sampled: int | None = None


class Progress(OfHead, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of the pass over a long head, which its exact tiles wait for."""


class ProgressAnswer(Struct, frozen=True, kw_only=True):
    """The part of the pass that is done, from 0 to 1, and the seconds that are left, if known."""

    done: float
    seconds: float | None


class Steps(OfHead, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps of one query to its weights, for some of its keys: strongest first, or in order."""

    query: Whole
    by: Literal["weight", "position"]
    start: Whole
    count: Annotated[int, Meta(ge=0, le=1000)]


class Step(Struct, frozen=True, kw_only=True):
    """One key of a query; a step that does nothing is null for every key."""

    key: int
    vector: Vector | None
    dot: float | None
    scaled: float | None
    biased: float | None
    modified: float | None
    capped: float | None
    allowed: bool
    score: float | None
    weight: float
    value: Vector | None


class StepsAnswer(Struct, frozen=True, kw_only=True):
    """A query step by step, as ``A.steps(query)`` has it.

    Of a query of which only the weights are known, the vector, maximum and log_normalizer are null.
    The sink is a logit in the denominator that belongs to no key.
    """

    vector: Vector | None
    scale: float
    masked: bool
    maximum: float | None
    log_normalizer: float | None
    sink: float | None
    keys: int
    allowed: int
    total: float
    rows: list[Step]
    output: Vector | None


class Segments(OfHead, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shares of key parts in query parts; a part is its first token, and one past its last."""

    queries: Spans
    keys: Spans


class Overview(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The small maps of a layer, of a live host."""

    layer: Whole


class SmallNumbers(Struct, frozen=True, kw_only=True):
    """The small maps of a layer: a byte for each block, in base64; sampled as in a tile."""

    rows: int
    columns: int
    maximum: float
    levels: str
    sampled: int | None = None


class Heads(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kinds of all heads, of a live host."""


class KindHere(Struct, frozen=True, kw_only=True):
    """The kind of a head in this text, where a trial gave its name."""

    kind: str
    score: float


class HeadKind(Struct, frozen=True, kw_only=True):
    """The kind of one head, as docs/heads.md has it; its entropy as a share of the largest."""

    kind: str
    score: float
    entropy: float
    sink: float
    here: KindHere | None = None


class HeadsAnswer(Struct, frozen=True, kw_only=True):
    """The kind of each head, layer by layer, or null for NaN; a head of each kind, and the first.

    The page opens on the first; notable heads stand out, the most telling kind first.
    """

    heads: list[HeadKind | None]
    notable: list[Opening]
    opened: Opening


QUESTIONS: dict[str, tuple[type, type]] = {
    "row": (Row, RowAnswer),
    "column": (Column, Values),
    "tile": (Tile, TileAnswer),
    "progress": (Progress, ProgressAnswer),
    "steps": (Steps, StepsAnswer),
    "segments": (Segments, Values),
    "overview": (Overview, SmallNumbers),
    "heads": (Heads, HeadsAnswer),
}
"""Every question by its name, with its answer."""
