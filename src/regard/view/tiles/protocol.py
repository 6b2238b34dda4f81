"""The questions of the page and their answers: one table for Python and for TypeScript.

``python -m regard.view.tiles.protocol`` writes its TypeScript, ``view/web/protocol/questions.ts``.
A test compares that file with this table, and the parameters that the server reads with it.
"""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["QUESTIONS", "parameters", "typescript"]


class Floats:
    """Many numbers in single precision, sent as bytes."""


class Bytes:
    """Many small whole numbers, sent as bytes."""


class Vector:
    """A few numbers, sent as JSON."""


@dataclass(frozen=True, kw_only=True)
class OfHead:
    """A question about one head; hidden: sinks are set aside, and the rows renormalised."""

    layer: int
    head: int
    hidden: bool


@dataclass(frozen=True, kw_only=True)
class Row(OfHead):
    """The weights of one query, and which keys it may attend to."""

    query: int


@dataclass(frozen=True, kw_only=True)
class RowAnswer:
    """A number for each key; of the mask, 1 where the query may attend to the key."""

    values: Floats
    mask: Bytes


@dataclass(frozen=True, kw_only=True)
class Column(OfHead):
    """What every query gives to one key."""

    key: int


@dataclass(frozen=True, kw_only=True)
class Values:
    """Numbers whose shape the question says: a column, or shares (query parts, key parts)."""

    values: Floats


@dataclass(frozen=True, kw_only=True)
class Tile(OfHead):
    """A part of the matrix: 256 x 256 cells, each the mean of 2^level x 2^level weights."""

    level: int
    row: int
    column: int


@dataclass(frozen=True, kw_only=True)
class TileAnswer:
    """The cells (height, width); sampled: one query in so many was asked, if they are not exact."""

    values: Floats
    height: int
    width: int
    exact: bool
    sampled: int | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(OfHead):
    """The state of the pass over a long head, which its exact tiles wait for."""


@dataclass(frozen=True, kw_only=True)
class ProgressAnswer:
    """The part of the pass that is done, from 0 to 1, and the seconds that are left, if known."""

    done: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Steps(OfHead):
    """How one query comes to its weights, for some of its keys: strongest first, or in order."""

    query: int
    by: Literal["weight", "position"]
    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Step:
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


@dataclass(frozen=True, kw_only=True)
class StepsAnswer:
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


@dataclass(frozen=True, kw_only=True)
class Segments(OfHead):
    """What parts of a text give to each other; a part is its first token, and one past its last."""

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The small maps of a layer, of a live host."""

    layer: int


@dataclass(frozen=True, kw_only=True)
class SmallNumbers:
    """The small maps of a layer: a byte for each block, in base64; sampled as in a tile."""

    rows: int
    columns: int
    maximum: float
    levels: str
    sampled: int | None = None


@dataclass(frozen=True, kw_only=True)
class OverviewAnswer:
    """The small maps of a layer."""

    overview: SmallNumbers


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The kinds of all heads, of a live host."""


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """What docs/heads.md defines of one head; the entropy as a share of that of even attention."""

    kind: str
    score: float
    entropy: float
    sink: float


@dataclass(frozen=True, kw_only=True)
class HeadsAnswer:
    """The kind of each head, layer by layer; null where its weights are not numbers."""

    heads: list[HeadKind | None]


QUESTIONS: dict[str, tuple[type, type]] = {
    "row": (Row, RowAnswer),
    "column": (Column, Values),
    "tile": (Tile, TileAnswer),
    "progress": (Progress, ProgressAnswer),
    "steps": (Steps, StepsAnswer),
    "segments": (Segments, Values),
    "overview": (Overview, OverviewAnswer),
    "heads": (Heads, HeadsAnswer),
}
"""Every question by its name, with its answer."""

_FILE = Path(__file__).parents[1] / "web" / "protocol" / "questions.ts"
_WIDTH = 120
_WORDS = {
    int: "number",
    float: "number",
    str: "string",
    bool: "boolean",
    NoneType: "null",
    Floats: "Float32Array",
    Bytes: "Uint8Array",
    Vector: "ArrayLike<number>",
}


def parameters(kind: str) -> tuple[str, ...]:
    """Return the names of what a question has.

    Example:
        >>> from regard.view.tiles.protocol import parameters
        >>> parameters("row")
        ('layer', 'head', 'hidden', 'query')
    """
    return tuple(field.name for field in fields(QUESTIONS[kind][0]))


def typescript() -> str:
    """Return the table as TypeScript.

    Example:
        >>> from regard.view.tiles.protocol import typescript
        >>> "export type RowAnswer = {" in typescript()
        True
    """
    structures: dict[type, str] = {}
    for kind, (question, answer) in QUESTIONS.items():
        _declare(answer, [], structures)
        _declare(question, [f'kind: "{kind}"'], structures)
    answers = [f"{kind}: {answer.__name__}" for kind, (_, answer) in QUESTIONS.items()]
    kinds = [f"  | {_name(question)}" for question, _ in QUESTIONS.values()]
    return (
        "\n".join(
            [
                "/** The questions of the page and their answers, as protocol.py writes them. */",
                "",
                *structures.values(),
                "/** The answer to a question of each kind. */",
                *(_alias("Answers", answers), "", "export type Question =", *kinds),
            ]
        )
        + ";\n"
    )


def _name(structure: type) -> str:
    is_question = any(question is structure for question, _ in QUESTIONS.values())
    return f"{structure.__name__}Question" if is_question else structure.__name__


def _declare(structure: type, members: list[str], structures: dict[type, str]) -> None:
    """Add a type, after those that it uses."""
    if structure in structures:
        return
    hints = get_type_hints(structure)
    for hint in hints.values():
        for used in _structures_in(hint):
            _declare(used, [], structures)
    optional = {field.name for field in fields(structure) if field.default is not MISSING}
    members += [f"{name}{'?' * (name in optional)}: {_word(hint)}" for name, hint in hints.items()]
    first = (structure.__doc__ or "").partition("\n")[0]
    structures[structure] = f"/** {first} */\n{_alias(_name(structure), members)}"


def _alias(name: str, members: list[str]) -> str:
    """Return a type on one line, if it fits as prettier counts."""
    line = f"export type {name} = {{ {'; '.join(members)} }};"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"export type {name} = {{", *(f"  {member};" for member in members), "};"])


def _structures_in(hint: Any) -> list[type]:
    if hasattr(hint, "__dataclass_fields__"):
        return [hint]
    return [used for part in get_args(hint) for used in _structures_in(part)]


def _word(hint: Any) -> str:
    """Return a type in TypeScript."""
    parts = get_args(hint)
    if get_origin(hint) in (UnionType, Union):
        return " | ".join(_word(part) for part in parts)
    if get_origin(hint) is Literal:
        return " | ".join(f'"{word}"' for word in parts)
    if get_origin(hint) is tuple:
        return f"[{', '.join(_word(part) for part in parts)}]"
    if get_origin(hint) is list:
        word = _word(parts[0])
        return f"({word})[]" if " " in word and not word.startswith("[") else f"{word}[]"
    return _WORDS.get(hint) or hint.__name__


if __name__ == "__main__":
    _FILE.write_text(typescript(), encoding="utf-8")
