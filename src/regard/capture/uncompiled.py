"""Running compiled models without their compiled code."""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal, cast

import torch

from regard.errors import kind_text

_REMEDY = 'Pass compiled="eager" to run compiled parts uncompiled, or leave it out.'


class _Blocks:
    """The blocks of all threads that run uncompiled; PyTorch's stance belongs to the process.

    The first block sets the stance and the last one restores it, because blocks of two threads may
    end in the order in which they began.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._stance: Any = None

    def enter(self) -> None:
        with self._lock:
            if not self._count:
                self._stance = cast(Any, torch.compiler).set_stance("force_eager")
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._stance.__exit__(None, None, None)


_BLOCKS = _Blocks()


@contextmanager
def uncompiled_if(is_eager: bool) -> Generator[None, None, None]:
    """Run everything that torch.compile made, on every thread, as the Python that it was made of.

    What was compiled stays compiled, and runs again after the block. It does nothing if not
    ``is_eager``.
    """
    if not is_eager:
        yield
        return
    _BLOCKS.enter()
    try:
        yield
    finally:
        _BLOCKS.leave()


def check_compiled(compiled: object) -> Literal["eager"] | None:
    """Return the argument ``compiled`` of `observe`; raise an error unless it is "eager" or None.

    Raises:
        TypeError: it is no text.
        ValueError: it is another text.
    """
    if compiled is None or compiled == "eager":
        return cast("Literal['eager'] | None", compiled)
    if isinstance(compiled, str):
        raise ValueError(f'compiled is {compiled!r}; it must be "eager".\n    {_REMEDY}')
    raise TypeError(f'compiled is {kind_text(compiled)}; it must be "eager".\n    {_REMEDY}')
