"""``regard monitor``: the last state of a training, and its page."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import AsJson, option
from regard.cli.output_files import check_output, page_line, write_json
from regard.text.escaping import visible

if TYPE_CHECKING:
    from regard.text.tables import Table

# The terminal has no room for all statistics; --json and --csv have them.
_SHORT = ("max_score", "normalized_entropy", "first_token", "previous_token", "local_window")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a regard.Monitor.")]
Output = Annotated[
    Path | None, option("--output -o FILE", "Also draw all heads over the steps, as a page.")
]
AsCsv = Annotated[bool, option("--csv", "Print the whole table as CSV.")]


def monitor(
    run: Run, output: Output = None, as_csv: AsCsv = False, as_json: AsJson = False
) -> None:
    """Show the attention of a model that trains: the last observed step of every layer.

    max_score is the largest of all heads, the other numbers are means over the heads.
    """
    import csv

    from regard.training.run_table import observed_rows, read_last, read_table, rows_text
    from regard.view.figures.training_page import write_training_page

    if output is not None:
        check_output(output)
    if as_csv:
        table = read_table(run)
        writer = csv.writer(sys.stdout)
        writer.writerow(table.schema.names)
        for batch in table.to_batches():
            writer.writerows(zip(*batch.to_pydict().values(), strict=True))
    elif as_json:
        write_json({"run": str(run), "rows": read_last(run)})
    else:
        rows = read_last(run)
        of_rows = rows_text(observed_rows(run))
        sys.stdout.write(f"step {rows[0]['step']:,}, {of_rows}\n{_by_layer(rows).text()}\n")
    if output is not None:
        write_training_page(run, output)
        if not (as_csv or as_json):
            sys.stdout.write(page_line(output) + "\n")


def _by_layer(rows: list[dict[str, Any]]) -> "Table":
    """Return a table with one row for each layer."""
    from math import isnan
    from statistics import fmean

    from regard.text.tables import Table
    from regard.training.alarms import is_dead
    from regard.training.run_table import SHOWN

    layers = {row["layer"]: visible(row["name"]) for row in rows}
    columns: dict[str, list[Any]] = {"layer": list(layers), "name": list(layers.values())}
    present = list(dict.fromkeys(row["statistic"] for row in rows))
    for statistic in [name for name in _SHORT if name in present] or present:
        rows_of: dict[int, list[dict[str, Any]]] = {layer: [] for layer in layers}
        for row in rows:
            if row["statistic"] == statistic:
                rows_of[row["layer"]].append(row)
        merge = max if statistic == "max_score" else fmean
        columns[statistic] = [
            merge(row[SHOWN[statistic]] for row in of) if of else None for of in rows_of.values()
        ]
        if statistic == "normalized_entropy":
            dead = {
                layer: [is_dead(row["p10"], row["p90"]) for row in of if not isnan(row["mean"])]
                for layer, of in rows_of.items()
            }
            columns["dead_heads"] = [sum(heads) if heads else None for heads in dead.values()]
    return Table(columns)
