"""Reading the fenced blocks of a Markdown document, and running them."""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[^\s`]*)")
MARK = re.compile(r"<!-- *not executed(?P<rest>.*?)-->")
# Other names of the two languages would escape execution unseen.
ALIASES = {"py": "python", "python3": "python", "pycon": "python", "shell-session": "console"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Attributes:
        language: as its fence names it.
        code: its lines.
        line: the document's line on which they begin.
        follows: whether only empty lines lie between it and the block before it.
        executed: whether no mark keeps it from running.
    """

    language: str
    code: str
    line: int
    follows: bool = False
    executed: bool = True


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text, in order; a wrong mark or language is a ValueError."""
    lines = text.splitlines()
    number = 0
    before: str | None = ""  # the last line of text; None after a block
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if opening is None:
            before = lines[number - 1].strip() or before
            continue
        start = number
        closing = re.compile(rf"^ *{opening['fence'][0]}{{{len(opening['fence'])},}} *$")
        while number < len(lines) and not closing.match(lines[number]):
            number += 1
        if number == len(lines):
            raise ValueError(f"line {start}: the block never ends")
        indent = len(opening["indent"])
        code = "".join(line[min(indent, leading(line)) :] + "\n" for line in lines[start:number])
        executed = is_executed(before or "", start)
        yield Block(language(opening, start), code, start + 1, before is None, executed)
        number += 1
        before = None


def leading(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def language(opening: re.Match[str], line: int) -> str:
    name = opening["language"].lower()
    if name in ALIASES:
        raise ValueError(f"line {line}: write {ALIASES[name]}, not {name}, so that the block runs")
    return name


def is_executed(before: str, line: int) -> bool:
    """Whether the line above a block lets it run; a mark without a reason is no mark."""
    mark = MARK.search(before)
    if mark is None:
        return True
    reason = mark["rest"].removeprefix(":").strip()
    if not mark["rest"].startswith(":") or len(reason.split()) < 2:
        raise ValueError(
            f"line {line}: 'not executed' needs a reason: <!-- not executed: reason -->"
        )
    return False


def run_python(block: Block, name: str, namespace: dict[str, object]) -> str:
    """Run a Python block; what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        # Empty lines in front: a traceback shows the document's own line numbers.
        exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    return printed.getvalue()


# What holds no sentences, and where one can end.
NO_PROSE = re.compile(
    r"^( *)(```+|~~~+).*?^\1\2 *$|<!--.*?-->|\$\$.*?\$\$", re.DOTALL | re.MULTILINE
)
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) )|\n(?=<)")
END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`“*\[(])")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown text, without its headings, tables, code and formulas."""
    for paragraph in PARAGRAPH.split(NO_PROSE.sub("", text)):
        words = " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).split())
        if words and words[0] not in "|#<":
            yield from END.split(re.sub(r"^([-*]|\d+\.) ", "", words))


FRACTION = re.compile(r"(-?\d+\.\d+)")


def agree(shown: str, printed: str) -> bool:
    """Return True if two texts are equal up to 1 in the last digit of their fractions.

    Processors add numbers up in different orders, so the last digit may be rounded differently.
    """
    parts, others = FRACTION.split(shown), FRACTION.split(printed)
    return len(parts) == len(others) and all(map(is_close, parts, others))


def is_close(part: str, other: str) -> bool:
    if not FRACTION.fullmatch(part) or not FRACTION.fullmatch(other):
        return part == other
    digits = len(part.partition(".")[2])
    same_form = len(other.partition(".")[2]) == digits
    return same_form and abs(float(part) - float(other)) < 1.5 * 10**-digits
