"""The other process: imports somebody's file or runs their cells, checks, and writes the answer.

``sandbox`` starts it, and writes the request to its input as JSON. The answer goes to its output,
behind the request's nonce. What their code prints goes nowhere; what it raises becomes a sentence
with their own line.
"""

import faulthandler
import io
import json
import os
import signal
import sys
import time
import tokenize
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from regard.diagnosis.checker import check
from regard.diagnosis.expectation import spec_of_json
from regard.diagnosis.inputs.notebook_cells import (
    Cell,
    namespace,
    read_cells,
    refuse_null_bytes,
    run_cell,
)
from regard.diagnosis.inputs.tape import place_of
from regard.diagnosis.inputs.user_errors import sentence
from regard.diagnosis.notebook_function import report_of_cells
from regard.diagnosis.report import Report
from regard.diagnosis.sandbox.target_selection import (
    attentions,
    check_options,
    fitting_options,
    named,
)
from regard.errors import RegardError

_IN_A_SHELL = (
    "    In a shell: --example example.py:call, where call() returns those args and kwargs."
)


def main() -> None:
    """Answer one request, and end the process."""
    request = json.load(sys.stdin)
    nonce = request.pop("nonce")  # nothing but this function knows it: no answer can be forged
    output = os.dup(sys.stdout.fileno())
    with open(request["traces"], "w", encoding="utf-8") as traces:  # noqa: PTH123
        faulthandler.enable(traces)  # a crash leaves the line behind
        with open(os.devnull, "r+b") as nowhere:  # noqa: PTH123  # a device, no path
            for own in range(3):
                os.dup2(nowhere.fileno(), own)
        sys.dont_write_bytecode = True  # nothing appears beside their file
        _limit_memory(request["gib"])
        faulthandler.dump_traceback_later(request["seconds"], exit=True, file=traces)
        answer = json.dumps(_answer(request))
        faulthandler.cancel_dump_traceback_later()
        with open(output, "w", encoding="utf-8") as written:  # noqa: PTH123  # a descriptor
            written.write(f"{nonce}\n{answer}\n{nonce}")
        os._exit(0)  # no thread or exit handler of theirs holds us


def _limit_memory(gib: float) -> None:
    """Hold all that can be written to: reserved addresses, as CUDA makes them, do not count."""
    if sys.platform != "linux":
        return
    import resource

    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    limit = held * 1024 + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


class _OutOfTime(BaseException):
    """A part of their code took its share of time; no ``except Exception`` of theirs holds it."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of their code that run one after another: what one of them raises stops no other.

    Attributes:
        path: of their file.
        shown: what they call it.
        end: when all must be over, in seconds of ``time.monotonic``.
        troubles: a sentence for each part that raised, or did not end.
    """

    path: Path
    shown: str
    end: float
    troubles: list[str]

    @contextmanager
    def one(self) -> Generator[None]:
        """Run one part in half of the time that is left, so that it leaves some for the others."""
        seconds = max(0.1, (self.end - time.monotonic()) / 2)

        def over(*_: object) -> None:
            raise _OutOfTime(f"still running after {seconds:.3g} s")

        try:
            if sys.platform == "win32":  # it has no timer: one part may take all of the time
                yield
                return
            before = signal.signal(signal.SIGALRM, over)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
        except BaseException as error:  # noqa: BLE001  # the others run all the same
            self.troubles.append(self._trouble(error))

    def _trouble(self, error: BaseException) -> str:
        """Return what their code raised, or that it did not end, in a sentence."""
        if not isinstance(error, _OutOfTime):
            return sentence(error, self.path, self.shown)
        place = place_of(error)
        if place is None:
            return f"{self.shown} is {error}; it must come to an end."
        cell = place.file.removeprefix(f"{self.path.name}, ")
        inside = f"in {cell}, line" if cell != place.file else "on line"
        return (
            f"{self.shown} is {error}, {inside} {place.line}; it must come to an end.\n"
            "    What trains or waits belongs elsewhere, or give it more: --timeout 600"
        )


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    path, shown, name = Path(request["path"]), request["shown"], request["name"]
    options = dict(request["options"])
    parts = _Parts(path, shown, time.monotonic() + request["seconds"], [])
    try:
        cells = read_cells(path) if path.suffix == ".ipynb" else None
        module, found = _imported(path) if cells is None else _ran(cells, parts)
        if name is not None or (len(found) == 1 and cells is None):
            chosen, thing = found[0] if name is None else (name, named(module, name, shown))
            return {"reports": [_report(thing, chosen, shown, options)], "troubles": []}
        reports = _each(found, options, parts)
        with parts.one():
            own = report_of_cells(path.name, cells, module) if cells else None
            if own is not None and (own.faults or own.ok or not reports):
                reports.insert(0, _data(own))
        if not reports and not parts.troubles:
            raise RegardError(_nothing(shown, is_notebook=cells is not None))
        return {"reports": reports, "troubles": parts.troubles}
    except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt too
        said = sentence(error, path, shown)
        return {"error": f"{said}\n{_IN_A_SHELL}" if "Pass an example call: " in said else said}


def _nothing(shown: str, *, is_notebook: bool) -> str:
    if is_notebook:
        return (
            f"{shown} holds no attention; check looks at classes, functions and cells with a "
            "softmax.\n    Define one, or make one: layer = SelfAttention(16, 4)"
        )
    return (
        f"{shown} holds no class or function with a softmax; check takes attention.\n"
        f"    Say what to check: regard check {shown}:NAME"
    )


def _imported(path: Path) -> tuple[Any, list[tuple[str, Any]]]:
    module = imported(path)
    return module, list(attentions(module).items())


def _ran(cells: list[Cell], parts: _Parts) -> tuple[Any, list[tuple[str, Any]]]:
    """Run the cells, and return their namespace and all attentions that stood in it."""
    path = parts.path
    module = namespace(f"{path.stem} (checked)", cells)  # torch.ipynb is no torch
    sys.path.append(str(path.parent))  # a file called types.py hides no module of Python's
    replaced: list[tuple[str, Any]] = []  # a class that a later cell writes anew is checked too
    for cell in cells:
        before = attentions(module)
        with parts.one():
            run_cell(cell, module)
        after = vars(module)
        replaced += [item for item in before.items() if after.get(item[0]) is not item[1]]
    return module, [*replaced, *attentions(module).items()]


def _each(
    found: list[tuple[str, Any]], options: dict[str, Any], parts: _Parts
) -> list[dict[str, Any]]:
    """Return a report on each; what gives none is a trouble."""
    fitting = [fitting_options(thing, options) for _, thing in found]
    used = {key for each in fitting for key in each}
    reports: list[dict[str, Any]] = []
    for (name, thing), own in zip(found, fitting, strict=True):
        own |= {key: value for key, value in options.items() if key not in used}  # to be refused
        with parts.one():
            reports.append(_report(thing, name, parts.shown, own))
    return reports


def _report(thing: Any, name: str, shown: str, options: dict[str, Any]) -> dict[str, Any]:
    example = options.pop("example", None)
    expected = options.pop("expect", None)
    check_options(thing, name, shown, options)
    expect = None if expected is None else spec_of_json(str(expected))
    if "run_dtype" in options:
        options["run_dtype"] = getattr(torch, str(options["run_dtype"]), options["run_dtype"])
    if example is None:
        return _data(check(thing, expect=expect, **options))
    args, kwargs = _example(str(example))
    return _data(check(thing, args=args, kwargs=kwargs, expect=expect, **options))


def _example(written: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a function of an example file returns.

    Raises:
        ValueError: it names no function, or returns no arguments.
    """
    file, _, name = written.rpartition(":")
    if file and not Path(file).is_file():
        raise ValueError(f"--example {written}: there is no file {file}.")
    call = getattr(imported(Path(file).resolve()), name, None) if file else None
    if not callable(call):
        raise ValueError(
            f"--example {written} names no function; it must be FILE:NAME.\n"
            "    Write for example: --example example.py:call"
        )
    found: object = call()
    if isinstance(found, dict):
        return (), cast("dict[str, Any]", found)
    if isinstance(found, tuple):
        parts = cast("tuple[Any, ...]", found)
        if len(parts) == 2 and isinstance(parts[0], tuple) and isinstance(parts[1], dict):
            return cast("tuple[Any, ...]", parts[0]), cast("dict[str, Any]", parts[1])
        return parts, {}
    return (found,), {}


def _data(report: Report) -> dict[str, Any]:
    return {**report.to_dict(), "exit_code": report.exit_code, "text": str(report)}


def imported(path: Path) -> Any:
    """Import a file as the module that it is, in its package where it belongs to one.

    Raises:
        BaseException: whatever it raises.
    """
    import importlib
    import importlib.util

    refuse_null_bytes(_text(path), str(path))
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists():  # `from .layers import Linear` works as it does there
        parts.insert(0, root.name)
        root = root.parent
    sys.path.append(str(root))  # a file called types.py hides no module of Python's
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    name = f"{path.stem} (checked)"  # torch.py is no torch
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # for the checker of types: the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _text(path: Path) -> str:
    """Return the text of a file as Python reads it when it runs the file.

    Raises:
        SyntaxError: it is not in the encoding that it names, UTF-8 if it names none. Importing
            alone would accept that in a comment.
    """
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError:
        encoding = "utf-8"  # an encoding that nobody knows is refused by the import
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SyntaxError("Non-UTF-8", (str(path), line, None, None)) from error


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are small, and there are many
    main()
