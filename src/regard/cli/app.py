"""The command ``regard``; each of its commands calls the library and shows what comes back.

Results go to standard output, progress and warnings to standard error. A mistake that a user can
correct ends in one sentence and exit code 2, and leaves no half-written file. Any other exception
is a bug of ours: exit code 70, and its trace with ``--debug``.

The modules of the commands import the library where they use it, so that help is quick.
"""

import dis
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer

    from regard.cli.check_command import check
    from regard.cli.compare_command import compare
    from regard.cli.file_commands import page, verify
    from regard.cli.heads_command import heads
    from regard.cli.learn_command import learn
    from regard.cli.monitor_command import monitor
    from regard.cli.record_command import record
    from regard.cli.see_command import see
    from regard.cli.segments_command import segments
    from regard.cli.serve_command import serve
    from regard.cli.survey_command import survey
    from regard.text.escaping import visible

    import_module("rich")  # the terminal needs it later, and here one sentence says so
except ModuleNotFoundError as missing:
    name = str(missing.name).partition(".")[0]
    sys.stderr.write(
        f"regard: the command needs {name}, which is not installed.\n"
        "    Run: pip install 'regard[cli]'\n"
    )
    raise SystemExit(2) from None

_PACKAGE = str(Path(__file__).parents[1])
_BUG = 70  # EX_SOFTWARE of sysexits.h

app = typer.Typer(
    name="regard",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code.

    Args:
        arguments: of the command line; ``sys.argv`` when left out.

    Example:
        >>> from regard.cli.app import main
        >>> main(["--version"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    # Output that cannot show a character shows another one instead of a traceback.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    warnings.showwarning = _show_warning
    words = sys.argv[1:] if arguments is None else arguments
    try:
        # Typer returns an exit code where it did not run a command to its end: 130 for Ctrl-C.
        code = app(arguments, prog_name="regard", standalone_mode=False) or 0
    except typer.TyperException as error:
        code = _refuse(_usage(error))
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # noqa: BLE001 - a bug ends in one sentence and its own code
        said = _correctable(error)
        if said is not None:
            code = _refuse(said)
        else:
            if "--debug" in takewhile(lambda word: word.startswith("-"), words):
                traceback.print_exception(error)
            _write(
                f"internal error: {type(error).__name__}: {error}\n"
                "    This is a bug of regard. regard --debug COMMAND ... shows its trace."
            )
            code = _BUG
    sys.exit(code)


def _correctable(error: Exception) -> str | None:
    """Return the sentence for a mistake that a user can correct; None for a bug of ours.

    A ValueError is a mistake of the user only if a raise statement of regard made it: what Python
    or a library raises about a value of ours is a bug.
    """
    from regard.errors import RegardError

    if isinstance(error, MemoryError):
        return str(error) or "there is not enough memory for this."
    if isinstance(error, OSError):
        said = f"{error.strerror}." if error.strerror else str(error)
        has_name = error.strerror is not None and error.filename is not None
        return f"{error.filename}: {said}" if has_name else said
    if isinstance(error, RegardError):
        return str(error)
    if isinstance(error, ValueError) and _is_raised_here(error):
        return str(error)
    return None


def _is_raised_here(error: Exception) -> bool:
    """Return True if the exception comes from a raise statement in this package."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    is_raise = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and code.co_filename.startswith(_PACKAGE)


# Validators speak of inputs; a person gave an option.
_PLAIN = {
    r"Value error, ": "",
    r"Input should be less than or equal to": "must be at most",
    r"Input should be greater than or equal to": "must be at least",
    r"Input should be a valid integer.*": "must be a whole number",
    r"Input should be a valid (\w+).*": r"must be \1",
}


def _usage(error: typer.TyperException) -> str:
    """Return the message of a wrong call, with the command whose help has the answer."""
    message = error.format_message()
    for pattern, words in _PLAIN.items():
        message = re.sub(pattern, words, message)
    context = getattr(error, "ctx", None)
    if message.startswith("Got unexpected extra argument") and _takes_text(context):
        message += ". A text is one argument: put it in quotes."
    command = "regard" if context is None else context.command_path
    return f"{message}\n    {command} --help says what there is."


def _takes_text(context: typer.Context | None) -> bool:
    return context is not None and context.info_name in ("see", "record", "serve", "heads")


def _refuse(message: str) -> int:
    _write(message)
    return 2


def _show_warning(message: Warning | str, *_: object) -> None:
    """Write a warning without the line of code that raised it, which no user of a command knows."""
    _write(str(message))


def _write(message: str) -> None:
    lines = [visible(line) for line in message.splitlines()]
    sys.stderr.write("regard: " + "\n".join(lines) + "\n")


@app.callback(invoke_without_command=True)
def regard(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.")
    ] = False,
    _: Annotated[
        bool, typer.Option("--debug", help="Show the trace of an internal error.")
    ] = False,
) -> None:
    """Look at the self-attention of real models."""
    if show_version:
        try:
            number = installed_version("regard")
        except PackageNotFoundError:
            number = "unknown"
        typer.echo(f"regard {number}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (see, record, page, serve, heads, segments, compare, survey, monitor, learn, verify):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(check)
