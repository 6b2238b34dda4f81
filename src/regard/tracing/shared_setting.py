"""A setting of the whole process that blocks of several threads share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import Lock
from typing import Any


class SharedSetting(AbstractContextManager[None]):
    """A setting that the first of several blocks makes and the last one ends, in all threads.

    Blocks of two threads may end in the order in which they began.

    Args:
        setting: returns a context manager that makes the setting.
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._lock, self._count = Lock(), 0
        self._made = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._made.enter_context(self._setting())
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._made.close()
