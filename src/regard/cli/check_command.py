"""``regard check``: find mistakes in attention code, in a process of its own."""

import ast
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from regard.cli.options import AsJson, option
from regard.cli.output_files import write_json
from regard.text.escaping import visible

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE[:NAME]",
        help="my_file.py:SelfAttention; my_file.py or notebook.ipynb for all attention in it.",
    ),
]
Explain = Annotated[str, option("--explain NAME", "Explain a law or a mistake.")]
Timeout = Annotated[float, option("--timeout SECONDS", "Time limit of the code.", min=1)]
Memory = Annotated[float, option("--memory GIB", "Memory limit of the code.", min=0.1)]
Expect = Annotated[
    str, option("--expect JSON", """What it is meant to compute: '{"causal": true}'.""")
]


def check(
    context: typer.Context,
    target: Target = "",
    explain: Explain = "",
    timeout: Timeout = 60.0,
    memory: Memory = 4.0,
    expect: Expect = "",
    as_json: AsJson = False,
) -> None:
    """Say what attention code computes, and find mistakes in it, with their lines.

    All other options are arguments of the class or function: --embed-dim 16 --num-heads 4 --causal.
    --example example.py:call passes what the function call() returns: args, or args and kwargs.
    --means "{'mask': 'True hides'}" and --axes "batch tokens dim" say what arguments are.
    --expect '{"causal": true, "heads": 4}' compares what it computes with what it is meant to.
    Exit codes: 0 right, 1 wrong or different from the standard, 3 cannot tell.
    """
    from regard.cli.progress import progress
    from regard.diagnosis.expectation import spec_of_json
    from regard.diagnosis.sandbox.sandbox_process import CannotRun, check_apart

    if explain:
        sys.stdout.write(f"{explanation(explain)}\n")
        raise typer.Exit(0)
    if not target:
        raise ValueError(
            "FILE is missing; check needs a Python file or a notebook.\n"
            "    Write for example: regard check my_file.py"
        )
    options = named_options(context.args)
    if expect:
        options["expect"] = spec_of_json(expect).to_json()  # what is no spec is refused at once
    if target.partition(":")[0].endswith(".ipynb"):
        sys.stderr.write(
            f"runs the cells of {visible(target)} in a process of their own, "
            f"{timeout:g} s at most\n"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, with its clean-up
    with progress() as report:
        report(f"checking {target}")
        try:
            found = check_apart(target, options, seconds=timeout, gib=memory)
        except CannotRun as error:
            said = "\n".join(map(visible, str(error).splitlines()))
            sys.stderr.write(f"regard: {said}\n")
            raise typer.Exit(3) from error
    if as_json:
        reports = [
            {name: value for name, value in report.items() if name not in ("text", "exit_code")}
            for report in found.reports
        ]
        code = found.exit_code
        write_json({"reports": reports, "troubles": found.troubles, "exit_code": code})
    else:
        texts = [*(str(report["text"]) for report in found.reports), *found.troubles]
        sys.stdout.writelines(f"{visible(line)}\n" for line in "\n\n".join(texts).splitlines())
    raise typer.Exit(found.exit_code)


def explanation(name: str) -> str:
    """Return what a law or a mistake is, in lines of text.

    Raises:
        ValueError: neither a law nor a mistake has this name.

    Example:
        >>> from regard.cli.check_command import explanation
        >>> print(explanation("samples"))
        samples (law)
          Each sample of a batch gives what it gives alone.
          Formula:  f([a, b])[0] = f([a])[0]
          Broken by:  weights = scores.softmax(dim=0)  # over the batch
    """
    from regard.diagnosis.catalogue import FAULTS, NOTES
    from regard.diagnosis.laws.judge import LAWS

    for law in LAWS:
        if law.name == name:
            return (
                f"{law.name} (law)\n  {law.__doc__}\n  Formula:  {law.formula}\n"
                f"  Broken by:  {law.example}"
            )
    for fault in (*FAULTS, *NOTES):
        if fault.name == name:
            label = f"mistake {fault.number}" if fault.severity == "fault" else "note"
            seen = f"\n  Others did the same: {', '.join(fault.sources)}" if fault.sources else ""
            return f"{name} ({label})\n  {fault.sentence}\n  Write:  {fault.mending}{seen}"
    names = ", ".join([*(law.name for law in LAWS), *(fault.name for fault in FAULTS)])
    raise ValueError(f"{name!r} is no law and no mistake; it must be one of {names}.")


def named_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse options of the shell into arguments by name.

    Args:
        words: ``--num-heads 4``, ``--num-heads=4``; ``--causal`` alone is True. A value is what
            JSON or Python takes it for, else text.

    Raises:
        ValueError: a word that belongs to no option, or an option that is given twice.

    Example:
        >>> from regard.cli.check_command import named_options
        >>> named_options(["--embed-dim", "16", "--causal", "--kind=full"])
        {'embed_dim': 16, 'causal': True, 'kind': 'full'}
    """
    options: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            written, equals, value = word[2:].partition("=")
            name = written.replace("-", "_")
            if name in options:
                raise ValueError(f"option --{written} is given twice; it must be given once.")
            options[name] = _value(value) if equals else True
            name = None if equals else name
        elif name is None:
            raise ValueError(
                f"argument {word!r} has no option name before it.\n"
                "    Write for example: --num-heads 4"
            )
        else:
            options[name], name = _value(word), None
    return options


def _value(written: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(written)
    return written
