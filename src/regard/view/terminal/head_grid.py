"""The kinds of the heads in the terminal: a cell for each, and the heads that stand out."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from regard.analysis.head_kinds import KINDS, Head, stand_out
from regard.errors import count_text
from regard.view.terminal.terminal_lines import QUIET, WIDEST, hanging

# Of middle lightness, so that they are seen on light and on dark ground; blue, green and orange
# are told apart with any kind of colour sight, and the letters do not need it.
_COLOURS = {
    "previous token": "#4c8dd6",
    "next token": "#2fa37c",
    "self": "#c77cb0",
    "first-token sink": "#b8872b",
    "separator sink": "#cc6a3a",
    "local": "#6f9f3a",
    "uniform": "#8a8f98",
    "induction": "#d0527a",
    "duplicate token": "#9a7bd0",
    "retrieval": "#3a9fb0",
    "mixed": QUIET,
}
_MOST_NAMED = 6
_HEIGHTS = " ▁▂▃▄▅▆▇█"


def heads_lines(
    model: str, num_tokens: int | None, heads: Sequence[Head], width: int
) -> Iterator[Text]:
    """Yield the lines of ``regard heads``, for rich.

    Args:
        model: its name.
        num_tokens: how many it read; None where that is not known.
        heads: all of them.
        width: of the terminal.
    """
    width = min(width, WIDEST)
    title = Text().append(model, "bold").append("   ")
    size = count_text(len(heads), "head")
    if num_tokens is not None:
        size += f", seen on {count_text(num_tokens, 'token')}"
    sections = hanging(title, size, width), overview(heads, width), _kinds(heads, width)
    for number, section in enumerate(sections):
        for line in [Text("")] * (number > 0) + section:
            line.rstrip()
            yield line


def _kinds(heads: Sequence[Head], width: int) -> list[Text]:
    """For each kind the heads that are it most."""
    lines: list[Text] = []
    present = [kind for kind in KINDS if any(head.kind == kind.name for head in heads)]
    longest = max(len(kind.name) for kind in present)
    for kind in present:
        of_kind = [head for head in heads if head.kind == kind.name]
        best = sorted(of_kind, key=lambda head: -head.score)[:_MOST_NAMED]
        named = [f"{head.name}\xa0{100 * head.score:.0f}\xa0%" for head in best]
        named += [f"and {len(of_kind) - _MOST_NAMED} more"] * (len(of_kind) > _MOST_NAMED)
        start = Text().append(kind.name.ljust(longest + 2), _COLOURS[kind.name])
        share = f"{len(of_kind)} of {count_text(len(heads), 'head')}   "
        lines += hanging(start, share + ", ".join(named), width)
    return lines


def overview(heads: Sequence[Head], width: int) -> list[Text]:
    """Return a cell for each head, a line for each layer, and an explanation of the letters."""
    layers, columns = _layer_rows(heads), sorted({head.head for head in heads})
    margin = len(f"layer {layers[-1][0]}") + 2
    cell = next((n for n in (4, 3, 2) if len(columns) * n <= width - margin), 1)
    fitting = (width - margin) // cell
    scale = "" if cell == 1 else "the bar: ▁ attention spread evenly, █ all on one token"
    lines = hanging(Text().append("What the heads do", "bold").append("   "), scale, width)
    lines.append(Text(""))
    for start in range(0, len(columns), fitting):
        part = columns[start : start + fitting]
        lines.append(Text(" " * margin + _numbers(part, set(columns), cell), QUIET))
        for layer, row in layers:
            line = Text(f"layer {layer}".ljust(margin), QUIET)
            for number in part:
                _cell(line, row.get(number), cell)
            lines.append(line)
    lines.append(Text(""))
    return lines + _legend(heads, width)


def _layer_rows(heads: Sequence[Head]) -> list[tuple[int, dict[int, Head]]]:
    """Return the number of each layer with its heads, by their numbers.

    A module that ran twice has two rows.
    """
    rows: list[tuple[int, dict[int, Head]]] = []
    for head in heads:
        alike = (row for layer, row in rows if layer == head.layer and head.head not in row)
        row = next(alike, None)
        if row is None:
            row = dict[int, Head]()
            rows.append((head.layer, row))
        row[head.head] = head
    return sorted(rows, key=lambda each: each[0])


def _numbers(part: Sequence[int], columns: set[int], cell: int) -> str:
    """Return the numbers of heads over their cells; in narrow cells only where they fit.

    Narrow cells have the multiples of 5, and the first number after a gap.
    """
    step, line = (1 if cell > 2 else 5), ""
    for place, number in enumerate(part):
        is_marked = number % step == 0 or number - 1 not in columns
        if is_marked and (not line or len(line) < cell * place):
            line = line.ljust(cell * place) + str(number)
    return line


def _cell(line: Text, head: Head | None, cell: int) -> None:
    """Append the cell of a head; an empty one if the recording lacks it."""
    if head is None:
        line.append(" " * cell)
        return
    colour = _COLOURS[head.kind]
    line.append(head.letter, f"bold {colour}" if head.letter.isupper() else colour)
    if cell > 1:
        focus = 1 - head.scores["uniform"]
        line.append(_HEIGHTS[max(1, min(8, round(8 * focus)))], colour)
        line.append(" " * (cell - 2))


def _legend(heads: Sequence[Head], width: int) -> list[Text]:
    counts = Counter(head.kind for head in heads)
    lines, used = [Text()], 0
    for kind in KINDS:
        if not counts[kind.name]:
            continue
        entry = f"{kind.letter} {kind.name} {counts[kind.name]}"
        if used and used + len(entry) > width:
            lines.append(Text())
            used = 0
        lines[-1].append(kind.letter, _COLOURS[kind.name]).append(entry[1:] + "   ")
        used += len(entry) + 3
    meaning = ["Small: over half of its attention goes there; capital: over three quarters."]
    if not set(counts) - {"mixed", "uniform"}:
        meaning = []
    if counts["uniform"]:
        meaning.append("Uniform: over 90 and over 97 % of the entropy of even attention.")
    for sentence in meaning:
        lines += hanging(Text(), sentence, width)
    return lines


def standing_out(heads: Sequence[Head], width: int) -> list[Text]:
    """For each kind the head that is it most, and why."""
    found = stand_out(heads)
    if not found:
        return [Text("No head stands out: all are mixed.", "bold")]
    names = max(len(head.name) for head, _ in found)
    kinds = max(len(head.kind) for head, _ in found)
    lines = [Text("Heads that stand out", "bold")]
    for head, reason in found:
        start = Text(head.name.ljust(names + 2)).append(
            head.kind.ljust(kinds + 2), _COLOURS[head.kind]
        )
        lines += hanging(start, reason, width)
    return lines
