"""``python docs/command_page.py``: write ``docs/command.md`` from the command's own help."""

import os
import sys
from pathlib import Path

from typer.testing import CliRunner

from regard.cli.app import app

__all__ = ["page"]

PLACE = Path(__file__).with_name("command.md")
_BEGINNING = """# The command

This page shows the help of `regard` and of each subcommand.

- A word without an option is the subject of the command: a text for `see` and `record`, a recording for `page`,
  `serve`, `heads`, `segments`, `compare` and `verify`.
- Results go to standard output, warnings and progress to standard error. `--json` prints one line of JSON and
  nothing else. A number that JSON cannot write, such as NaN, is `null`.
- If `regard.observe` [refused](observe.md) layers of a model, one line on standard error has their number, their
  names and the first reason; `--json` and the page have every reason. With `--strict` a refused layer is an error.
- Exit codes: 0: done. 1: `check` found a mistake. 2: a wrong call, a file or model that cannot be read, or a refused
  layer with `--strict`. 3: `check` cannot tell.
- `regard --install-completion` lets your shell complete commands and options.

"""


def page() -> str:
    """Return the page: the help of every subcommand, 80 columns wide."""
    os.environ["COLUMNS"] = "80"
    commands = [command.callback for command in app.registered_commands]
    names = ["", *(callback.__name__ for callback in commands if callback)]
    for group in app.registered_groups:
        inner = group.typer_instance.registered_commands if group.typer_instance else []
        names += [f"{group.name} {command.name}" for command in inner]
    return _BEGINNING + "\n".join(map(_section, names))


def _section(name: str) -> str:
    words = [*name.split(), "--help"]
    ran = CliRunner().invoke(app, words, prog_name="regard", terminal_width=80)
    title = f"regard {name}".strip()
    text = "\n".join(line.rstrip() for line in ran.output.strip().splitlines())
    return f"## {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PLACE}\n")
