"""A recording in the terminal: the text, where each token looks, and what the heads do.

Everything is readable without colour, from 60 columns on. What a token says is never taken as
markup, and nothing in it reaches the terminal but what can be seen.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from regard.errors import count_text
from regard.text.escaping import visible
from regard.text.token_labels import SUBSCRIPTS, labels
from regard.view.terminal.head_grid import overview, standing_out
from regard.view.terminal.summary import Row, Summary
from regard.view.terminal.terminal_lines import QUIET, fitted, hanging

__all__ = ["TerminalView"]

_BAR = "#5b8def"
_WIDEST = 120
# From this mean share on, special tokens are called sinks.
_SINK = 0.3
_PROSE_LINES = 8


@dataclass(frozen=True)
class TerminalView:
    """The output of ``regard see``, for rich.

    Attributes:
        summary: what to show.
        most_rows: so many tokens get a row when the text has over half as many again.
    """

    summary: Summary
    most_rows: int = 16

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines, fitted to the console's width."""
        width = min(options.max_width, _WIDEST)
        sections = [
            _header(self.summary, width),
            _prose(self.summary, console, width),
            _rows(self.summary, self.most_rows, width),
            overview(self.summary.heads, width),
            standing_out(self.summary.heads, width),
        ]
        for number, section in enumerate(sections):
            if number and section:
                yield Text("")
            for line in section:
                line.no_wrap, line.overflow = True, "ellipsis"
                line.rstrip()
                yield line


# The text


def _header(summary: Summary, width: int) -> list[Text]:
    counts = sorted(set(Counter(head.layer for head in summary.heads).values()))
    heads = count_text(counts[0], "head") if len(counts) == 1 else f"{counts[0]}–{counts[-1]} heads"
    size = (
        f"{count_text(len(summary.tokens), 'token')} · {count_text(len(summary.layers), 'layer')}"
    )
    return hanging(
        Text().append(visible(summary.model) or "a model", "bold").append("   "),
        f"{size} × {heads}",
        width,
    )


def _prose(summary: Summary, console: Console, width: int) -> list[Text]:
    """Return the text as it was written, with special tokens in grey."""
    prose = Text()
    for token in summary.tokens:
        if token.special:
            prose.append(" " if prose and not prose.plain.endswith(("\n", " ")) else "")
            prose.append(visible(token.text), QUIET).append(" ", QUIET)
        else:
            text = token.text.lstrip(" ") if prose.plain.endswith(" ") else token.text
            prose.append("\n".join(visible(line) for line in text.expandtabs(4).split("\n")))
    lines = list(prose.wrap(console, width))
    if len(lines) <= _PROSE_LINES:
        return lines
    rest = f"… and {len(lines) - _PROSE_LINES + 1:,} more lines"
    return [*lines[: _PROSE_LINES - 1], Text(rest, QUIET)]


# Where each token looks


def _rows(summary: Summary, most_rows: int, width: int) -> list[Text]:
    names = labels(summary.tokens)
    shown = _interesting(summary, most_rows)
    title = Text().append("Where each token looks", "bold").append("   ")
    lines = hanging(title, _whose(summary), width)
    for sentence in _remarks(summary, shown, names):
        lines += hanging(Text(), sentence, width)
    table = _Table(summary, shown, names, width)
    lines += [Text(""), table.head()]
    for row in shown:
        lines += table.row(row)
    return lines


def _whose(summary: Summary) -> str:
    layer, head = summary.selection.layer, summary.selection.head
    if head is not None:
        return f"head {head} of layer {layer}"
    place = "" if layer is None else f" of layer {layer}"
    if summary.num_selected == 1:
        return f"the one head{place}"
    return f"mean of the {summary.num_selected} heads{place or ' of all layers'}"


def _remarks(summary: Summary, shown: list[Row], names: list[str]) -> Iterator[str]:
    """Yield what was left out and what was renormalised."""
    if summary.sinks:
        text = [row.on_sinks for row in summary.rows if row.token not in summary.sinks]
        share = sum(text) / len(text) if text else 1.0
        who = _listed([names[place] for place in summary.sinks])
        one = len(summary.sinks) == 1
        if share < _SINK:
            start = f"{who} {'takes' if one else 'take'}"
        else:
            start = f"{who} is a sink: it takes" if one else f"{who} are sinks: they take"
        yield (
            f"{start} {_percent(share).strip()} of the attention. The other columns "
            f"exclude {'it' if one else 'them'} and are renormalised to 100 %."
        )
    if len(shown) < len(summary.rows):
        yield (
            f"{len(shown)} of the {len(summary.rows):,} tokens: those that look most at one other "
            "token. --json gives all."
        )
    if any(name[-1] in SUBSCRIPTS for name in names):
        yield "Small numbers are positions, from 0. They distinguish repeated words."


def _interesting(summary: Summary, most_rows: int) -> list[Row]:
    """All rows, or those with the largest share for one other token, in the text's order."""
    if 2 * len(summary.rows) <= 3 * most_rows:
        return list(summary.rows)
    text = [row for row in summary.rows if row.token not in summary.sinks] or list(summary.rows)
    best = sorted(text, key=lambda row: -row.strongest)[:most_rows]
    return sorted(best, key=lambda row: row.token)


class _Table:
    """The rows of the tokens, with the widths of their columns in cells.

    As many tokens stand side by side as were asked for, if their words stay readable.
    """

    def __init__(self, summary: Summary, shown: list[Row], names: list[str], width: int) -> None:
        self.sinks, self.names = summary.sinks, names
        self.label = min(max(cell_len(names[row.token]) for row in shown), max(10, width // 6))
        shares = [share for row in shown for share in row.top_text]
        longest = max((cell_len(names[share.token]) for share in shares), default=1)
        self.longest_bar = max((share.share for share in shares), default=1.0)
        self.across = max(len(row.top_text) for row in shown) or 1
        self.percent = 5 if self.longest_bar >= 0.995 else 4
        self.bar = left = 0
        for self.bar in (10, 8, 6, 4, 2, 0):
            left = width - self.label - self._sink_cells()  # with the gap of two after each entry
            gaps = 1 + self.percent + (self.bar + 1 if self.bar else 0) + 2
            self.word = min(longest, 14, left // self.across - gaps)
            if self.word >= min(longest, 9 if self.bar else 7):
                return
        self.word = min(longest, 10)
        self.across = max(1, left // (self.word + self.percent + 3))

    @property
    def sink_bar(self) -> int:
        return 6 if self.bar >= 6 else 4 if self.bar else 0

    def _sink_cells(self) -> int:
        return 0 if not self.sinks else 5 + (self.sink_bar + 1 if self.sink_bar else 0) + 3

    def head(self) -> Text:
        """Return the header of the columns."""
        line = Text(" " * (self.label + 2), QUIET)
        if self.sinks:
            cells = self._sink_cells()
            who = " ".join(self.names[place] for place in self.sinks)
            line.append(fitted(who if len(who) <= cells - 3 else "sinks", cells), QUIET)
        line.append("looks most at", QUIET)
        if self.bar:
            line.append(f"   the longest bar is {_percent(self.longest_bar).strip()}", QUIET)
        return line

    def row(self, row: Row) -> list[Text]:
        """One token; a second line where not all fit beside each other."""
        is_sink = row.token in self.sinks
        line = Text().append(fitted(self.names[row.token], self.label), QUIET if is_sink else "")
        line.append("  ")
        if self.sinks:
            line.append(_percent(row.on_sinks))
            if self.sink_bar:
                line.append(" ").append(_bar(row.on_sinks, self.sink_bar), QUIET)
            line.append("   ")
        margin = cell_len(line.plain)
        if not row.top_text:
            return [line.append("nothing else", QUIET)]
        lines = [line]
        for place, share in enumerate(row.top_text):
            if place and place % self.across == 0:
                lines.append(Text(" " * margin))
            lines[-1].append(fitted(self.names[share.token], self.word) + " ")
            lines[-1].append(_percent(share.share)[-self.percent :])
            if self.bar:
                lines[-1].append(" ").append(_bar(share.share / self.longest_bar, self.bar), _BAR)
            lines[-1].append("  ")
        return lines


# Words, numbers, bars


def _listed(names: list[str]) -> str:
    if len(names) > 3:
        return f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _percent(share: float) -> str:
    """Four or five cells: 100 %, 37 %, <1 %."""
    if 0 < share < 0.005:
        return " <1 %"
    return f"{100 * share:3.0f} %"


def _bar(share: float, cells: int) -> str:
    """Return a bar as long as the share, to half a cell; it is empty only for 0."""
    halves = max(1, round(2 * share * cells)) if share > 0 else 0
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(cells)
