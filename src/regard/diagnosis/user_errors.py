"""Errors of somebody's code in a sentence with their own line."""

import linecache
import traceback
from contextlib import suppress
from pathlib import Path

from regard.diagnosis.laws.tape import is_theirs, place_of
from regard.errors import RegardError

__all__ = ["lacks_cuda", "sentence"]

_LONGEST = 300
_NO_CUDA = ("torch not compiled with cuda", "no nvidia driver", "no cuda gpus", "cuda-capable")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")


def sentence(error: BaseException, path: Path, shown: str) -> str:
    """One sentence for people, and in the next line their own line or what to do."""
    if isinstance(error, SyntaxError) and error.filename and is_theirs(error.filename):
        line = error.lineno or 0
        where = _named(error.filename, path, shown)
        if "codec can't decode" in str(error.msg) or str(error.msg).startswith("Non-UTF-8"):
            return (
                f"{where} is not UTF-8, line {line}; Python reads source files as UTF-8.\n"
                "    Save it as UTF-8, or write its encoding first: # -*- coding: latin-1 -*-"
            )
        return (
            f"{where} does not compile, line {line}: {_first_line(error.msg)}; it must be Python."
            f"{_quoted(error.filename, line, error.text)}"
        )
    needed = "it must run before it can be checked"
    place = place_of(error)
    if place is None and error.__cause__ is not None:
        # Our own words, from what theirs raised on all that was tried.
        place = place_of(error.__cause__)
        error = error if place is None else error.__cause__
        if not isinstance(error, NameError):
            needed = "it must run on one of the inputs that check tries"
    if place is None:
        return _without_line(error, shown)
    file, line = place.file, place.line
    where = _named(file, path, shown)
    kind, fact = type(error).__name__, _first_line(str(error))
    quoted = _quoted(file, line)
    lower = str(error).lower()
    if lacks_cuda(error):
        return (
            f"{where} needs CUDA on line {line}, and there is none here; check runs on the CPU."
            f'{quoted}\n    Write device = "cuda" if torch.cuda.is_available() else "cpu".'
        )
    if isinstance(error, MemoryError) or any(words in lower for words in _NO_MEMORY):
        return f"{where} runs out of memory on line {line}; check needs small sizes only.{quoted}"
    if isinstance(error, SystemExit):
        return f"{where} ends Python on line {line}; check needs it to go on.{quoted}"
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{where} imports {error.name} on line {line}, which is not installed here; check "
            f"runs what it imports.{quoted}"
        )
    if "argument #1 'indices'" in lower:
        return (
            f"{where} takes the numbers of tokens on line {line}; check takes attention from "
            f"embeddings on.{quoted}\n    Name the attention inside of it."
        )
    return f"{where} raises {kind} on line {line}: {fact.rstrip('.')}; {needed}.{quoted}"


def lacks_cuda(error: BaseException) -> bool:
    """Return True if an error says that there is no CUDA here."""
    return any(words in str(error).lower() for words in _NO_CUDA)


def _without_line(error: BaseException, shown: str) -> str:
    """For what their own lines had no part in."""
    if "fails on every input" in str(error) and isinstance(error.__cause__, ValueError):
        return str(error.__cause__)  # it ran, and what came back was no output
    if isinstance(error, RegardError | ValueError | TypeError | OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"{shown} runs out of memory; check needs small sizes only."
    lines = "".join(traceback.format_exception(error))
    return f"regard itself failed while it checked {shown}; please report this.\n{lines}"


def _named(file: str, path: Path, shown: str) -> str:
    """Their file as they call it: ``my_file.py``, ``lesson.ipynb, cell 3``."""
    if file.startswith(f"{path.name}, cell "):
        return f"{shown}{file.removeprefix(path.name)}"
    with suppress(ValueError):  # it lies elsewhere
        return str(Path(shown).parent / Path(file).relative_to(path.parent))
    return file


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    first = lines[0].strip() if lines else "no message"
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}…"


def _quoted(file: str, line: int, text: str | None = None) -> str:
    text = (text or linecache.getline(file, line)).strip()
    return f"\n    {line} | {text[:_LONGEST]}" if text else ""
