"""Reading a corpus: one text per line, per JSON line or per Parquet row."""

import importlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from regard.errors import RegardError
from regard.models.pretrained import check_text

__all__ = ["Text", "arrow", "blocks_of"]

# How many Parquet rows are in memory at once.
_ROWS_AT_ONCE = 1024


class Text(NamedTuple):
    """One text of a corpus.

    Attributes:
        number: its position in the corpus, from 0.
        place: its file and line, for errors.
        text: what the model reads.
    """

    number: int
    place: str
    text: str


def arrow(module: str, what: str = "a survey") -> Any:
    """Return a module of pyarrow, which ``what`` needs.

    Raises:
        RegardError: pyarrow is not installed.

    Example:
        >>> from regard.corpus.text_files import arrow
        >>> arrow("pyarrow").int16()
        DataType(int16)
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RegardError(
            f"{what} needs pyarrow, which is not installed.\n    Run: pip install 'regard[survey]'"
        ) from error


def blocks_of(corpus: Path, column: str, size: int) -> Iterator[tuple[Text, ...]]:
    r"""Yield the texts of a corpus, ``size`` at a time; the last block may have fewer.

    Args:
        corpus: a Parquet file (.parquet), JSON lines (.jsonl, .ndjson), or plain text with one text
            per line, where blank lines are skipped.
        column: the name of the texts in JSON lines and Parquet.
        size: the number of texts in a block.

    Raises:
        RegardError: the file cannot be read, or a line of it is broken; the message names the line.

    Example:
        >>> from pathlib import Path
        >>> from regard.corpus.text_files import blocks_of
        >>> _ = Path("corpus.txt").write_text("one\ntwo\nthree\n")
        >>> [[text.text for text in block] for block in blocks_of(Path("corpus.txt"), "text", 2)]
        [['one', 'two'], ['three']]
    """
    if not corpus.is_file():
        raise RegardError(
            f"corpus is {str(corpus)!r}, which is no file; it must be a file of texts.\n"
            "    Give plain text with one text per line, JSON lines or Parquet."
        )
    texts = _checked(corpus, _READERS.get(corpus.suffix.lower(), _plain), column)
    while block := tuple(islice(texts, size)):
        yield block


def _checked(corpus: Path, read: "_Reader", column: str) -> Iterator[Text]:
    number = -1
    try:
        for number, (place, text) in enumerate(read(corpus, column)):
            if not isinstance(text, str):
                raise RegardError(
                    f"{place}: {column!r} is missing or no string; each text must be a string.\n"
                    "    Correct it, or name another column."
                )
            try:
                check_text(text)
            except ValueError as error:
                raise RegardError(f"{place}: {error}") from error
            yield Text(number, place, text)
    except OSError as error:
        raise RegardError(f"{corpus} cannot be read: {error.strerror or error}.") from error
    if number < 0:
        raise RegardError(f"corpus is {str(corpus)!r}, which has no text.\n    Give at least one.")


_Reader = Callable[[Path, str], Iterator[tuple[str, object]]]


def _plain(corpus: Path, _column: str) -> Iterator[tuple[str, object]]:
    return ((place, line) for place, line in _lines(corpus) if line.strip())


def _lines(corpus: Path) -> Iterator[tuple[str, str]]:
    with corpus.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{corpus}, line {number:,}"
            try:
                yield place, line.decode().removeprefix("\ufeff").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise RegardError(
                    f"{place}: byte {error.start} is no UTF-8.\n    Save the file as UTF-8."
                ) from error


def _json_lines(corpus: Path, column: str) -> Iterator[tuple[str, object]]:
    for place, line in _lines(corpus):
        try:
            record: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RegardError(
                f"{place} is no JSON ({error}); each line must be an object such as "
                f'{{"{column}": "..."}}.\n    Correct or remove the line.'
            ) from error
        yield (
            place,
            cast(dict[str, object], record).get(column) if isinstance(record, dict) else None,
        )


def _parquet(corpus: Path, column: str) -> Iterator[tuple[str, object]]:
    parquet = arrow("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(corpus)
        if column not in file.schema_arrow.names:
            raise RegardError(
                f"{corpus} has no column {column!r}; it has "
                f"{', '.join(map(repr, file.schema_arrow.names))}.\n    Name one of these."
            )
        row = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield f"{corpus}, row {row:,}", text
    except arrow("pyarrow").ArrowInvalid as error:
        raise RegardError(f"{corpus} is no Parquet file, or a damaged one ({error}).") from error


_READERS: dict[str, _Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}
