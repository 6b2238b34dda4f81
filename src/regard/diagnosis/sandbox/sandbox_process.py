"""A file or a notebook of somebody's, checked in a process of its own.

Their code may print, hang, raise, allocate without end, change global state or end Python: it does
so in another process, with a limit of time and one of memory, and this one stays as it was. What
comes back is JSON behind a nonce that their code is not told; nothing is unpickled. Processes that
their code starts are ended with it, on Linux those in sessions of their own as well.

It guards against accidents, not against attacks: the code runs with the rights of who runs it. It
can read and write their files, and use the network.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from regard.errors import RegardError


class CannotRun(RegardError):
    """The code was ended before check had an answer: it cannot be told what it is."""


# What Python and PyTorch need to start on a busy machine, before the code's own time begins.
_START_SECONDS = 120.0
# All that the guest starts inherits this variable, whatever session it moves to.
_MARK = "REGARD_CHECK"
_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Checked:
    """The reports as plain data.

    Attributes:
        reports: of every attention that was checked: ``Report.to_dict()``, with its ``exit_code``
            and its ``text``.
        troubles: what could not be checked, a sentence each; cells that raise among them.
    """

    reports: tuple[dict[str, Any], ...]
    troubles: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 where an attention is wrong, else 3 where that cannot be told of one, else 0."""
        codes = {report["exit_code"] for report in self.reports}
        if 1 in codes:
            return 1
        return 3 if 3 in codes or self.troubles else 0


def check_apart(
    target: str,
    options: Mapping[str, Any] | None = None,
    *,
    seconds: float = 60.0,
    gib: float = 4.0,
) -> Checked:
    """Check attention in a file or a notebook, in a process of its own.

    Args:
        target: ``my_file.py:SelfAttention``, ``my_file.py`` or
            ``notebook.ipynb``, of which all are checked; ``notebook.ipynb:SelfAttention`` for one.
        options: what the class or function takes by name, and what ``regard.check`` takes.
        seconds: for all of it: to import it, or to run the cells, and to check it. Of several
            cells or attentions each has half of what is left, so that none takes it all.
        gib: of memory, besides what PyTorch needs to start; where the system can hold it to that.

    Raises:
        CannotRun: the code was ended before there was an answer.
        RegardError: it cannot be checked, in a sentence that says what to do.
        OSError: the file cannot be read.

    Source: ours.
    """
    path, name = _split(target)
    with tempfile.TemporaryDirectory(prefix="regard-check-") as folder:
        request = {
            "path": str(path.resolve()),
            "shown": str(path),
            "name": name,
            "options": dict(options or {}),
            "seconds": seconds,
            "gib": gib,
            "traces": str(Path(folder, "traces.txt")),
        }
        code, answer = _run(request, Path(folder), seconds)
        if answer is None:
            raise CannotRun(_ended(path, Path(folder), code, seconds))
        given = cast("dict[str, Any]", json.loads(answer))
    if "error" in given:
        raise RegardError(given["error"])
    return Checked(tuple(given["reports"]), tuple(given["troubles"]))


def _split(target: str) -> tuple[Path, str | None]:
    """Return the file and the name in it; a colon may be part of the path."""
    path, name = Path(target), None
    head, colon, tail = target.rpartition(":")
    if colon and not path.exists() and Path(head).suffix in (".py", ".ipynb"):
        path, name = Path(head), tail or None
    if path.suffix not in (".py", ".ipynb"):
        raise RegardError(
            f"{path} is neither .py nor .ipynb; check reads Python files and notebooks.\n"
            "    Name one, and what is in it: regard check my_file.py:SelfAttention"
        )
    if not path.exists():
        raise RegardError(
            f"{path} does not exist; check looked in {path.resolve().parent}.\n"
            "    Give the path from where you are."
        )
    if not path.is_file():
        raise RegardError(f"{path} is a folder; check reads a file.\n    Name a file in it.")
    path.open("rb").close()  # what may not be read is said here
    return path, name


def _run(request: Mapping[str, Any], folder: Path, seconds: float) -> tuple[int | None, str | None]:
    """Run the guest; return its exit code, None where it had to be ended, and its answer."""
    # -P: no file of the current folder is taken for a module of Python's while we start.
    command = [sys.executable, "-P", "-m", "regard.diagnosis.sandbox.guest_process"]
    nonce, mark = secrets.token_hex(16), secrets.token_hex(16)
    with (folder / "start.txt").open("wb") as start, (folder / "answer.txt").open("wb") as output:
        guest = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,  # no pipe, which a process that the guest leaves behind would hold open
            stderr=start,  # until the guest has started: what theirs prints goes nowhere
            env={**os.environ, "MPLBACKEND": "Agg", _MARK: mark},  # a plot opens no window
            start_new_session=True,
        )
    assert guest.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), guest.stdin as given:
            given.write(json.dumps({**request, "nonce": nonce}).encode())
        code = guest.wait(seconds + _START_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(guest, mark)
    text = (folder / "answer.txt").read_text(encoding="utf-8", errors="replace")
    first, _, rest = text.partition("\n")
    answer, _, last = rest.rpartition("\n")
    return code, answer if first == last == nonce else None


def _end(guest: subprocess.Popen[bytes], mark: str) -> None:
    """End a guest and whatever it started: its group, and on Linux all that carry its mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            guest.kill()
        else:
            os.killpg(guest.pid, signal.SIGKILL)
    guest.wait()
    if sys.platform != "linux":  # it has no /proc
        return
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _ended(path: Path, folder: Path, code: int | None, seconds: float) -> str:
    """Return why there is no answer, with the line where the code stood."""
    traces = folder / "traces.txt"
    if not traces.exists():
        start = (folder / "start.txt").read_text(encoding="utf-8", errors="replace").strip()
        last = start.splitlines()[-1] if start else "no message"
        return f"regard could not start the process that checks {path}: {last}"
    text = traces.read_text(encoding="utf-8", errors="replace")
    where, function = _where(path, text)
    if code is None or "Timeout (" in text:
        return (
            f"{path} is still running after {seconds:g} s{where}; it must come to an end.\n"
            f"    {_advice(path, function)}"
        )
    if code < 0 and sys.platform != "win32":
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " Often there was no memory left." if name == "SIGKILL" else ""
            return (
                f"{path} ended its process with {name}{where}; it must run to its end.\n"
                f"    Run it alone to see why.{hint}"
            )
    return (
        f"{path} ended Python with exit code {code}{where}; it must run to its end.\n"
        "    Take the call that exits out of it."
    )


def _advice(path: Path, function: str) -> str:
    if function != "<module>":
        return "Look for a loop without end; check runs it often, on small inputs."
    if path.suffix == ".py":
        return 'What trains or waits belongs under if __name__ == "__main__":'
    return "What trains or waits belongs into another notebook."


def _where(path: Path, traces: str) -> tuple[str, str]:
    """Return the innermost line of their own in a dump, and its function; empty for none."""
    own = str(path.resolve()).encode("ascii", "backslashreplace").decode()  # as it is dumped
    for frame in _FRAME.finditer(traces):
        file = frame["file"]
        if file == own:
            return f", on line {frame['line']}", frame["function"]
        if file.startswith(f"{path.name}, cell "):
            cell = file.removeprefix(f"{path.name}, ")
            return f", in {cell}, line {frame['line']}", frame["function"]
    return "", ""
