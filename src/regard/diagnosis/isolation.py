"""Somebody's code in this process: what it changes is put back, and what ends it is an error."""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from regard.diagnosis.laws.tape import place_of
from regard.diagnosis.user_errors import lacks_cuda, sentence

__all__ = ["undisturbed"]

# Each check sets the default dtype, standard output and filters of warnings of the whole process.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def undisturbed() -> Generator[None]:
    """Run somebody's code, after which this process is as it was.

    Environment, current folder, ``sys.path``, the modules that were there, recursion limit,
    handlers of signals and deterministic algorithms are put back. New tensors are on the CPU.
    Blocks on several threads run one after another.

    Raises:
        ValueError: the code ends Python, or needs CUDA where there is none; with its line.

    Example:
        >>> import os
        >>> from regard.diagnosis.isolation import undisturbed
        >>> with undisturbed():
        ...     os.environ.update(REGARD_EXAMPLE="1")
        >>> "REGARD_EXAMPLE" in os.environ
        False
    """
    elsewhere = torch.get_default_device().type != "cpu"
    with _ONE_AT_A_TIME, _put_back(), torch.device("cpu") if elsewhere else nullcontext():
        try:
            yield
        except SystemExit as error:
            raise ValueError(_sentence(error)) from error
        except Exception as error:
            cause = error.__cause__ or error
            if not lacks_cuda(cause):
                raise
            raise ValueError(_sentence(cause)) from cause


def _sentence(error: BaseException) -> str:
    """Return what happened, on which of their lines."""
    place = place_of(error)
    path = Path("the code" if place is None else place.file)
    return sentence(error, path, path.name)


@contextmanager
def _put_back() -> Generator[None]:
    environment, path, limit = dict(os.environ), list(sys.path), sys.getrecursionlimit()
    handlers, modules = _handlers(), dict(sys.modules)
    folder: str | None = None
    with suppress(OSError):  # it may have been deleted
        folder = os.getcwd()  # noqa: PTH109  # as it is written
    determinism = _determinism()
    try:
        yield
    finally:
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        sys.path[:] = path
        # Modules that were imported for the first time stay: others refer to them already.
        sys.modules.update(modules)
        sys.setrecursionlimit(limit)
        for number, handler in _handlers().items():
            if handler is not handlers[number] and handlers[number] is not None:
                signal.signal(number, handlers[number])
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)
        if _determinism() != determinism:  # setting it imports Inductor, for a second
            strict, warns = determinism
            torch.use_deterministic_algorithms(strict, warn_only=warns)


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _handlers() -> dict[signal.Signals, Any]:
    """Return the handler of each signal; none outside of the main thread, which sets them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in signal.Signals}
