"""The table of a run: a folder with one Parquet file for each observed step."""

import json
import os
import warnings
import weakref
from collections.abc import Mapping
from errno import EACCES
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.corpus.part_files import write_whole
from regard.corpus.text_files import arrow
from regard.errors import RegardError
from regard.recording.spool import lock
from regard.recording.version import version
from regard.training.row_numbers import STATISTICS
from regard.training.summaries import Key, Summary, layer_indices

SHOWN = {name: "max" if name == "max_score" else "mean" for name in STATISTICS}
"""The one number of each statistic that writers and pictures show."""

_KEY, _NEEDED_BY = b"regard.monitor", "the table of a run"
_NUMBERS = ("mean", "min", "p10", "p50", "p90", "max")


class RunTable:
    """The folder that a monitor writes to. It is locked until ``close``.

    Raises:
        RegardError: the folder cannot be written, another monitor writes to it, or pyarrow is
            missing.
    """

    def __init__(self, folder: Path, rows: int | None) -> None:
        arrow("pyarrow", _NEEDED_BY)
        self.folder, self._rows, self._layers = folder, rows, dict[str, int]()
        self._lock = (made_folder(folder) / ".lock").open("ab")
        try:
            lock(self._lock)
        except BlockingIOError as error:
            self._lock.close()
            raise RegardError(
                f"another monitor writes to {folder}.\n"
                "    Call its close(), or give this one a folder of its own."
            ) from error

        weakref.finalize(self, self._lock.close)

    def close(self) -> None:
        """Let another monitor write to the folder."""
        self._lock.close()

    def check(self, step: int, summaries: Mapping[Key, Summary]) -> None:
        """Check before the first step that the folder has the layers and heads of this model.

        Steps that a run observed before it went back stay there; a warning says so.

        Raises:
            RegardError: the last file is of another model or other rows, or damaged.
        """
        if self._layers:
            return
        self._layers = {name: len(summary.heads) for (name, _), summary in summaries.items()}
        paths = _paths(self.folder)
        if not paths:
            return
        if paths[-1].name > _name_of(step):
            warnings.warn(
                f"{self.folder} has steps after {step}, up to {paths[-1].stem}; each stays there "
                "until this run observes it again.\n"
                "    Give the run a folder of its own, or remove them.",
                stacklevel=2,
            )
        about = _about(paths[-1])
        if about["rows"] != self._rows:
            raise RegardError(
                f"{paths[-1]} has statistics of {rows_text(about['rows'])}, and this monitor asks "
                f"for {rows_text(self._rows)}.\n    Give this run a folder of its own."
            )
        theirs: dict[str, int] = about["layers"]
        for name in dict.fromkeys([*theirs, *self._layers]):
            there, here = theirs.get(name, 0), self._layers.get(name, 0)
            if there != here:
                raise RegardError(
                    f"{paths[-1]} is of another model: layer {name!r} has {there} heads there and "
                    f"{here} heads here.\n    Give this run a folder of its own."
                )

    def write(self, step: int, summaries: Mapping[Key, Summary]) -> None:
        """Write the file of a step, in place of one that a resumed run wrote before.

        Raises:
            RegardError: it cannot be written, as when the disk is full.
        """
        pa = arrow("pyarrow", _NEEDED_BY)
        layers = layer_indices(summaries)
        lengths = [len(each.heads) for each in summaries.values()]

        def repeated(values: Any, kind: Any) -> Any:
            pairs = zip(values, lengths, strict=True)
            return pa.array([value for value, n in pairs for _ in range(n)], kind)

        def joined(name: str) -> Any:
            return torch.cat([getattr(each, name) for each in summaries.values()]).numpy()

        words = pa.dictionary(pa.int16(), pa.string())
        columns = {
            "step": pa.array([step] * sum(lengths), pa.int64()),
            "layer": repeated((layers[name] for name, _ in summaries), pa.int16()),
            "name": repeated((name for name, _ in summaries), words),
            "head": pa.array(chain(*(each.heads for each in summaries.values())), pa.int16()),
            "statistic": repeated((statistic for _, statistic in summaries), words),
            **{name: pa.array(joined(name), pa.float32()) for name in _NUMBERS},
            "rows": pa.array(joined("rows"), pa.int64()),
        }
        about = {"layers": self._layers, "rows": self._rows, "regard": version()}
        table = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(about)})
        write_whole(self.folder / _name_of(step), table)


def rows_text(rows: int | None) -> str:
    """Return which queries of each sequence were observed, in words."""
    return "all rows" if rows is None else f"the last {rows:,} rows of each sequence"


def made_folder(folder: Path, argument: str = "path") -> Path:
    """Make a folder unless it exists, and return it.

    Raises:
        RegardError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        is_file = isinstance(error, FileExistsError)
        reason = "is a file" if is_file else f"cannot be written: {error.strerror}"
        raise RegardError(
            f"{argument} is {str(folder)!r}, which {reason}.\n"
            "    Name a folder that you may write to."
        ) from error
    return folder


def _name_of(step: int) -> str:
    return f"step-{step:09}.parquet"


class History(NamedTuple):
    """One statistic of all heads over the steps of a run.

    Attributes:
        steps: the observed steps, in rising order.
        heads: the layer and the head of each row.
        values: the number of ``SHOWN``, (rows, steps); NaN where there is none.
        rows: the number of rows of each sequence that were observed; None for all.
    """

    steps: list[int]
    heads: list[tuple[int, int]]
    values: Tensor
    rows: int | None


def read_table(run: Path) -> Any:
    """Return the table of a run as a ``pyarrow.dataset.Dataset``.

    Raises:
        RegardError: the folder is not the table of a run.
    """
    paths = _paths(run)
    if not run.is_dir():
        raise RegardError(
            f"there is no folder {run}.\n    Pass the path of regard.Monitor(model, path)."
        )
    if not paths:
        raise RegardError(
            f"{run} has no observed step; it must be the folder of a monitor.\n"
            "    Pass the path of regard.Monitor(model, path)."
        )
    _about(paths[-1])
    return arrow("pyarrow.dataset", _NEEDED_BY).dataset([str(path) for path in paths])


def read_last(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the last observed step of a run.

    Raises:
        RegardError: the folder is not the table of a run.
    """
    last = read_table(run).files[-1]
    return arrow("pyarrow.dataset", _NEEDED_BY).dataset(last).to_table().to_pylist()


def observed_rows(run: Path) -> int | None:
    """Return how many queries of each sequence a run observed; None for all.

    Raises:
        RegardError: the folder is not the table of a run.
    """
    return _about(Path(read_table(run).files[-1]))["rows"]


def read_history(run: Path, statistic: str) -> History:
    """Return one statistic over the steps of a run.

    Raises:
        ValueError: the run does not have this statistic.
        RegardError: the folder is not the table of a run.
    """
    table = read_table(run)
    asked = arrow("pyarrow.compute", _NEEDED_BY).field("statistic") == statistic
    columns = ["step", "layer", "head", SHOWN.get(statistic, "mean")]
    read = table.to_table(columns, filter=asked)
    steps, layers, heads, values = (each.to_numpy() for each in read.columns)
    if not len(steps):
        present = dict.fromkeys(table.head(2**20, ["statistic"])["statistic"].to_pylist())
        raise ValueError(
            f"statistic is {statistic!r}; the run has {', '.join(map(repr, present))}.\n"
            "    Name one of these."
        )
    pairs = list(zip(layers.tolist(), heads.tolist(), strict=True))
    of_rows, of_columns = sorted(set(pairs)), sorted({*steps.tolist()})
    row, column = ({each: at for at, each in enumerate(of)} for of in (of_rows, of_columns))
    cells = torch.full((len(of_rows), len(of_columns)), torch.nan, device="cpu")
    places = [row[pair] for pair in pairs], [column[step] for step in steps.tolist()]
    cells[places] = torch.tensor(values, device="cpu")
    return History(of_columns, of_rows, cells, observed_rows(run))


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.parquet"))


def _about(path: Path) -> dict[str, Any]:
    """Return the layers of the model that a file is of, and the observed rows."""
    try:
        schema: Any = arrow("pyarrow.parquet", _NEEDED_BY).read_schema(path)
        metadata: Any = schema.metadata or {}
        return json.loads(metadata[_KEY])
    except (KeyError, ValueError, OSError, arrow("pyarrow").ArrowException) as error:
        raise RegardError(
            f"{path} is not of a monitor, or damaged.\n    Remove it, or name another folder."
        ) from error
