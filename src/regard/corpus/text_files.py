"""Reading a corpus: one text per line, per JSON line or per Parquet row."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from regard.errors import RegardError, optional_module
from regard.models.pretrained import check_text

# How many Parquet rows are in memory at once.
_ROWS_AT_ONCE = 1024


class Text(NamedTuple):
    """One text of a corpus.

    Attributes:
        number: its position among the texts of the corpus, from 0; blank ones do not count.
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
    return optional_module(module, f"{what} needs pyarrow", "'regard[survey]'")


class Corpus:
    r"""A file of texts, read from its beginning as often as needed.

    Blank texts are skipped: a line or a row without any character but white space.

    Args:
        path: a Parquet file (.parquet), JSON lines (.jsonl, .ndjson), or plain text with one text
            per line.
        column: the name of the texts in JSON lines and Parquet.

    Attributes:
        blank: the number of blank texts that the last reading skipped.

    Example:
        >>> from pathlib import Path
        >>> from regard.corpus.text_files import Corpus
        >>> _ = Path("corpus.txt").write_text("one\n\ntwo\nthree\n")
        >>> corpus = Corpus(Path("corpus.txt"), "text")
        >>> [[text.text for text in block] for block in corpus.blocks(2)], corpus.blank
        ([['one', 'two'], ['three']], 1)
    """

    def __init__(self, path: Path, column: str) -> None:
        self.blank = 0
        self._path, self._column = path, column

    def blocks(self, size: int) -> Iterator[tuple[Text, ...]]:
        """Yield the texts, ``size`` at a time; the last block may have fewer.

        Raises:
            RegardError: the file cannot be read, or a line is broken; the message names the line.
        """
        if not self._path.is_file():
            raise RegardError(
                f"corpus is {str(self._path)!r}, which is no file; it must be a file of texts.\n"
                "    Give plain text with one text per line, JSON lines or Parquet."
            )
        texts = self._texts()
        while block := tuple(islice(texts, size)):
            yield block

    def _texts(self) -> Iterator[Text]:
        path, number, self.blank = self._path, 0, 0
        read = _READERS.get(path.suffix.lower(), _lines)
        try:
            for place, text in read(path, self._column):
                if not isinstance(text, str):
                    raise RegardError(
                        f"{place}: {self._column!r} is missing or no string; each text must be a "
                        "string.\n    Correct it, or name another column."
                    )
                if not text.strip():
                    self.blank += 1
                    continue
                try:
                    check_text(text)
                except ValueError as error:
                    raise RegardError(f"{place}: {error}") from error
                yield Text(number, place, text)
                number += 1
        except OSError as error:
            raise RegardError(f"{path} cannot be read: {error.strerror or error}.") from error
        if number == 0:
            raise RegardError(
                f"corpus is {str(path)!r}, which has no text.\n    Give at least one."
            )


_Reader = Callable[[Path, str], Iterator[tuple[str, object]]]


def _lines(corpus: Path, _column: str) -> Iterator[tuple[str, str]]:
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
    for place, line in _lines(corpus, column):
        if not line.strip():
            yield place, ""
            continue
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
