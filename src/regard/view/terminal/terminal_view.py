"""A recording in the terminal: the text, where each token looks, and what the heads do.

Everything is readable without colour, from 60 columns on. What a token says is never taken as
markup, and nothing in it reaches the terminal but what can be seen.
"""

from collections import Counter
from collections.abc import Iterator

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from regard.errors import count_text
from regard.text.escaping import visible
from regard.text.token_labels import SUBSCRIPTS, labels
from regard.view.terminal.head_grid import overview, standing_out
from regard.view.terminal.summary import Row, Summary
from regard.view.terminal.terminal_lines import QUIET, WIDEST, fitted, hanging, table_lines

_BAR = "#5b8def"
# From this mean share on, special tokens are called sinks.
_SINK = 0.3
_PROSE_LINES = 8
# So many tokens get a row when the text has over half as many again.
_MOST_ROWS = 16


def summary_lines(summary: Summary, width: int) -> Iterator[Text]:
    """Yield the lines of ``regard see``, for rich.

    Args:
        summary: what to show.
        width: of the terminal.
    """
    width = min(width, WIDEST)
    sections = [
        _header(summary, width),
        _prose(summary, width),
        _rows(summary, width),
        overview(summary.heads, width),
        standing_out(summary.heads, width),
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


def _prose(summary: Summary, width: int) -> list[Text]:
    """Return the text as it was written, with special tokens in grey."""
    prose = Text()
    for token in summary.tokens:
        if token.special:
            prose.append(" " if prose and not prose.plain.endswith(("\n", " ")) else "")
            prose.append(visible(token.text), QUIET).append(" ", QUIET)
        else:
            text = token.text.lstrip(" ") if prose.plain.endswith(" ") else token.text
            prose.append("\n".join(visible(line) for line in text.expandtabs(4).split("\n")))
    lines = list(prose.wrap(Console(), width))
    if len(lines) <= _PROSE_LINES:
        return lines
    rest = f"… and {len(lines) - _PROSE_LINES + 1:,} more lines"
    return [*lines[: _PROSE_LINES - 1], Text(rest, QUIET)]


# Where each token looks


def _rows(summary: Summary, width: int) -> list[Text]:
    names = labels(summary.tokens)
    shown = _interesting(summary)
    title = Text().append("Where each token looks", "bold").append("   ")
    lines = hanging(title, _whose(summary), width)
    for sentence in _remarks(summary, shown, names):
        lines += hanging(Text(), sentence, width)
    return [*lines, Text(""), *table_lines(_table(summary, shown, names, width), width)]


def _whose(summary: Summary) -> str:
    layer, head = summary.layer, summary.head
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


def _interesting(summary: Summary) -> list[Row]:
    """All rows, or those with the largest share for one other token, in the text's order."""
    if 2 * len(summary.rows) <= 3 * _MOST_ROWS:
        return list(summary.rows)
    text = [row for row in summary.rows if row.token not in summary.sinks] or list(summary.rows)
    best = sorted(text, key=lambda row: -row.strongest)[:_MOST_ROWS]
    return sorted(best, key=lambda row: row.token)


def _table(summary: Summary, shown: list[Row], names: list[str], width: int) -> Table:
    """Return the rows of the tokens; the tokens that one looks at wrap under each other."""
    shares = [share for row in shown for share in row.top_text]
    longest = max((share.share for share in shares), default=1.0)
    word = min(max((cell_len(names[share.token]) for share in shares), default=1), 14)
    label = min(max(cell_len(names[row.token]) for row in shown), max(10, width // 6))
    across = max(len(row.top_text) for row in shown) or 1
    percent = 5 if longest >= 0.995 else 4
    # Words and numbers first: bars have what is left of a line.
    left = width - label - 2 - (14 if summary.sinks else 0)
    bar = left // across - word - percent - 4
    bar = min(10, bar) if bar > 1 else 0
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=label, no_wrap=True, overflow="ellipsis")
    head = [Text()]
    if summary.sinks:
        table.add_column(max_width=12, no_wrap=True, overflow="ellipsis")
        head.append(Text(" ".join(names[place] for place in summary.sinks), QUIET))
    table.add_column()
    about = f"   the longest bar is {_percent(longest).strip()}" if bar else ""
    table.add_row(*head, Text(f"looks most at{about}", QUIET))
    for row in shown:
        cells: list[RenderableType] = [
            Text(names[row.token], QUIET if row.token in summary.sinks else "")
        ]
        if summary.sinks:
            cells.append(
                Text(_percent(row.on_sinks)).append(f" {_bar(row.on_sinks, min(bar, 6))}", QUIET)
            )
        entries = [
            Text(f"{fitted(names[share.token], word)} {_percent(share.share)[-percent:]} ").append(
                _bar(share.share / longest, bar), _BAR
            )
            for share in row.top_text
        ]
        cells.append(Columns(entries, padding=(0, 2)) if entries else Text("nothing else", QUIET))
        table.add_row(*cells)
    return table


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
    halves = max(1, round(2 * share * cells)) if share > 0 and cells else 0
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(cells)
