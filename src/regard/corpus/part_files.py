"""The files of a survey: one Parquet file for each block of texts, written whole or not at all."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from regard.corpus.text_files import Text, arrow
from regard.corpus.text_scores import SCORES
from regard.errors import RegardError

_KEY = b"regard.survey"
_NUMBERS = {"text": "int64", "tokens": "int32", "layer": "int16", "head": "int16"}


@dataclass(frozen=True)
class PartFiles:
    """The folder that a survey writes to.

    Attributes:
        folder: of the files.
        run: model and settings, as JSON has them; a file of another run is refused.
        parts: the names of the chosen parts of texts, each one a column.
    """

    folder: Path
    run: Mapping[str, Any]
    parts: tuple[str, ...] = ()

    def check(self) -> None:
        """Make the folder, and check that all files in it are of this run.

        Raises:
            RegardError: a file is of another run or damaged, or the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise RegardError(
                f"out is {str(self.folder)!r}, which cannot be written: {error.strerror}.\n"
                "    Name a folder that you may write to."
            ) from error
        for path in self._paths():
            written = self._written(path)
            for name in dict.fromkeys([*written["run"], *self.run]):
                theirs, ours = written["run"].get(name), self.run.get(name)
                if theirs != ours:
                    raise RegardError(
                        f"{path} is of another run: its {name} is {theirs!r}, and this run's is "
                        f"{ours!r}.\n    Give this run a folder of its own, or remove that one."
                    )

    def check_end(self, num_blocks: int) -> None:
        """Raise a RegardError for a file behind the last block of the corpus."""
        last = self.path(num_blocks - 1).name
        for path in self._paths():
            if path.name > last:
                raise RegardError(
                    f"{path} lies beyond the corpus, whose last part is {last}.\n"
                    "    Remove it if the corpus has become shorter."
                )

    def path(self, block: int) -> Path:
        """Return the path of the file of a block."""
        return self.folder / f"part-{block:08}.parquet"

    def is_finished(self, block: int, texts: Sequence[Text]) -> bool:
        """Return True if the file of a block is there.

        Raises:
            RegardError: it was made of other texts.
        """
        path = self.path(block)
        if not path.exists():
            return False
        if self._written(path)["texts"] != _checksum(texts):
            raise RegardError(
                f"{path} is of other texts: {texts[0].place} or one of the {len(texts) - 1} after "
                "it has changed.\n    Remove that file to have its texts read again."
            )
        return True

    def write(
        self, block: int, texts: Sequence[Text], columns: Mapping[str, Sequence[Any]]
    ) -> None:
        """Write the rows of a block as one file.

        Raises:
            RegardError: it cannot be written, as when the disk is full.
        """
        pa = arrow("pyarrow")
        names = {**_NUMBERS, **dict.fromkeys((*SCORES, *self.parts), "float32")}
        names["received_at"] = "int32"
        about = {"run": self.run, "texts": _checksum(texts)}
        # Each column has its type: one without any number would be of none, which nothing can read.
        schema = pa.schema(
            [(name, getattr(pa, kind)()) for name, kind in names.items()],
            metadata={_KEY: json.dumps(about)},
        )
        table = pa.Table.from_pydict(dict(columns), schema=schema)
        write_whole(self.path(block), table)

    def dataset(self) -> Any:
        """Return the finished files as a ``pyarrow.dataset.Dataset``."""
        return arrow("pyarrow.dataset").dataset(
            [str(path) for path in self._paths()], format="parquet"
        )

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.parquet"))

    def _written(self, path: Path) -> dict[str, Any]:
        """Return the run and the checksum of the texts that a file was made of."""
        try:
            metadata: Any = arrow("pyarrow.parquet").read_schema(path).metadata or {}
            return json.loads(metadata[_KEY])
        except (KeyError, ValueError, OSError, arrow("pyarrow").ArrowException) as error:
            raise RegardError(
                f"{path} is no part of a survey, or a damaged one.\n"
                "    Remove it, or give the survey a folder of its own."
            ) from error


def write_whole(path: Path, table: Any) -> None:
    """Write a table as one Parquet file, whole or not at all.

    Raises:
        RegardError: it cannot be written, as when the disk is full.
    """
    buffer = arrow("pyarrow").BufferOutputStream()
    arrow("pyarrow.parquet").write_table(table, buffer)
    partial = path.with_suffix(".partial")  # one that an interrupted run left is replaced
    try:
        with partial.open("wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RegardError(
            f"{path} cannot be written: {error.strerror or error}.\n"
            "    The files before it are whole; make room for the next ones."
        ) from error


def _checksum(texts: Sequence[Text]) -> str:
    return sha256("\0".join(text.text for text in texts).encode()).hexdigest()
