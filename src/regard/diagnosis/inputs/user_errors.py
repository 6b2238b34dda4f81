"""Errors of somebody's code in a sentence with their own line."""

import linecache
import traceback
from contextlib import suppress
from pathlib import Path

from regard.diagnosis.inputs.tape import is_theirs, place_of
from regard.errors import RegardError

_LONGEST = 300
_NO_CUDA = ("torch not compiled with cuda", "no nvidia driver", "no cuda gpus", "cuda-capable")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")


def sentence(error: BaseException, path: Path, shown: str) -> str:
    """Return one sentence for people, and in the next line their own line or what to do."""
    if isinstance(error, SyntaxError) and error.filename and is_theirs(error.filename):
        return _uncompiled(error, error.filename, path, shown)
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
    where, on = _named(place.file, path, shown), f"on line {place.line}"
    lower, advice = str(error).lower(), ""
    if lacks_cuda(error):
        says = f"needs CUDA {on}, and there is none here; check runs on the CPU."
        advice = '\n    Write device = "cuda" if torch.cuda.is_available() else "cpu".'
    elif isinstance(error, MemoryError) or any(words in lower for words in _NO_MEMORY):
        says = f"runs out of memory {on}; check needs small sizes only."
    elif isinstance(error, SystemExit):
        says = f"ends Python {on}; check needs it to go on."
    elif isinstance(error, ModuleNotFoundError):
        says = (
            f"imports {error.name} {on}, which is not installed here; check runs what it imports."
        )
    elif "argument #1 'indices'" in lower:
        says = f"takes the numbers of tokens {on}; check takes attention from embeddings on."
        advice = "\n    Name the attention inside of it."
    else:
        fact = _first_line(str(error)).rstrip(".")
        says = f"raises {type(error).__name__} {on}: {fact}; {needed}."
    return f"{where} {says}{_quoted(place.file, place.line)}{advice}"


def lacks_cuda(error: BaseException) -> bool:
    """Return True if an error says that there is no CUDA here."""
    return any(words in str(error).lower() for words in _NO_CUDA)


def _uncompiled(error: SyntaxError, file: str, path: Path, shown: str) -> str:
    line, where = error.lineno or 0, _named(file, path, shown)
    if "codec can't decode" in str(error.msg) or str(error.msg).startswith("Non-UTF-8"):
        return (
            f"{where} is not UTF-8, line {line}; Python reads source files as UTF-8.\n"
            "    Save it as UTF-8, or write its encoding first: # -*- coding: latin-1 -*-"
        )
    said = f"{where} does not compile, line {line}: {_first_line(error.msg)}; it must be Python."
    return said + _quoted(file, line, error.text)


def _without_line(error: BaseException, shown: str) -> str:
    """Return a sentence for what their own lines had no part in."""
    if "fails on every input" in str(error) and isinstance(error.__cause__, ValueError):
        return str(error.__cause__)  # it ran, and what came back was no output
    if isinstance(error, RegardError | ValueError | TypeError | OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"{shown} runs out of memory; check needs small sizes only."
    lines = "".join(traceback.format_exception(error))
    return f"regard itself failed while it checked {shown}; please report this.\n{lines}"


def _named(file: str, path: Path, shown: str) -> str:
    """Return their file as they call it: ``my_file.py``, ``lesson.ipynb, cell 3``."""
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
