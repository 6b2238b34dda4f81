"""Somebody's code in this process: what it changes is put back, and what ends it is an error."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regard.diagnosis.inputs.numpy_arrays import loaded_numpy
from regard.diagnosis.inputs.tape import place_of
from regard.diagnosis.inputs.user_errors import lacks_cuda, sentence

# Settings of the process, as pairs of what reads one and what writes it.
_CUDA: Any = torch.backends.cuda
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
)
# People replace functions of these with their own.
_PATCHED = (torch, F, nn, torch.Tensor, nn.Module)

# Each check sets the default dtype, standard output and filters of warnings of the whole process.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def undisturbed() -> Generator[None]:
    """Run somebody's code, after which this process is as it was.

    Environment, current folder, ``sys.path``, the modules that were there, handlers of signals,
    settings of Python, PyTorch and NumPy, and functions of theirs that the code replaced are put
    back. New tensors are on the CPU. Blocks on several threads run one after another.

    Raises:
        ValueError: the code ends Python, or needs CUDA where there is none; with its line.

    Example:
        >>> import os
        >>> from regard.diagnosis.inputs.isolation import undisturbed
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
    environment, path = dict(os.environ), list(sys.path)
    numpy = loaded_numpy()
    random = numpy and numpy.random.get_state()
    settings = [(read(), read, write) for read, write in (*_SETTINGS, *_numpy_settings())]
    functions = [(owner, dict(vars(owner))) for owner in (*_PATCHED, *filter(None, [numpy]))]
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
        if numpy:
            numpy.random.set_state(random)
        for value, read, write in settings:
            if read() != value:
                write(value)
        for owner, known in functions:
            _put_functions_back(owner, known)
        for number, handler in _handlers().items():
            if handler is not handlers[number] and handlers[number] is not None:
                signal.signal(number, handlers[number])
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)
        if _determinism() != determinism:  # setting it imports Inductor, for a second
            strict, warns = determinism
            torch.use_deterministic_algorithms(strict, warn_only=warns)


def _numpy_settings() -> tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...]:
    numpy = loaded_numpy()
    if numpy is None:
        return ()
    return (
        (numpy.geterr, lambda known: numpy.seterr(**known)),
        (numpy.get_printoptions, lambda known: numpy.set_printoptions(**known)),
    )


def _put_functions_back(owner: Any, known: dict[str, Any]) -> None:
    for name, value in known.items():
        if callable(value) and vars(owner).get(name) is not value:
            setattr(owner, name, value)
    if isinstance(owner, type):  # modules get new names when parts of them are imported
        for name in vars(owner).keys() - known.keys():
            delattr(owner, name)  # which hid what the class inherits


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
