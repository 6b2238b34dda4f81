"""A map over several threads that hands out its answers in the order of the items.

Each thread works on an item of its own and runs its operations without other threads. By default
PyTorch splits each small operation among all threads, and after each operation all of them wait for
the slowest thread. That takes several times as long as soon as another program runs.

``torch.set_num_threads`` would limit not only the calling thread, but also every thread that starts
later. OpenMP and MKL keep a limit for each calling thread, so these limits are set instead.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from threading import Condition
from typing import Generic, TypeAlias, TypeVar

import torch

from regard.backends.backend import Between, nothing

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Setter: TypeAlias = Callable[[int], int]

_AHEAD = 8  # items of each thread that may wait to be taken
_PATIENCE = 0.1  # seconds after which a waiting thread checks if an interrupt has set the end


def map_in_order(
    items: Iterable[Item],
    worker: Callable[[], Callable[[Item], Answer]],
    take: Callable[[Answer], None],
    *,
    threaded: bool,
    between: Between = nothing,
) -> None:
    """Call `take` with the answer to each item, in the order of the items, one call at a time.

    Args:
        items: what to work on.
        worker: makes a function that answers one item; it is called once for each thread.
        take: called on one of the threads. The worker may already compute its next answer, so an
            answer must not share memory with the next one.
        threaded: whether several threads may work at once. Pass False for tensors on a device other
            than the CPU; such a device has a queue of its own.
        between: called on the calling thread as answers are taken, while other threads work on.
    """
    waiting = list(items)
    between(0, len(waiting))
    if not threaded or len(waiting) <= 1 or _number_setters()[0] is _ignore:
        answer = worker()
        for done, item in enumerate(waiting, 1):
            take(answer(item))
            between(done, len(waiting))
        return
    threads = min(torch.get_num_threads(), len(waiting))
    workers = [worker() for _ in range(threads)]
    inference = torch.is_inference_mode_enabled()  # belongs to a thread
    order = _Order(waiting, take, threads)

    def work(answer: Callable[[Item], Answer]) -> None:
        _start_thread()
        with torch.inference_mode(inference):
            order.work(answer)

    with one_thread(), ThreadPoolExecutor(threads, "regard") as pool:
        try:
            running = [pool.submit(work, each) for each in workers]
            if between is not nothing:
                order.watch(running, between)
            wait(running)
        finally:  # an interrupt reaches the calling thread alone
            order.end = 0
    if order.error is not None:
        raise order.error
    for each in running:
        each.result()  # raises an error outside of the items


class _Order(Generic[Item, Answer]):
    """Items handed out to several threads, and their answers taken in the order of the items.

    No thread waits for another one, unless it is far ahead: whichever thread finds the next answer
    ready takes it, and those that follow.

    Attributes:
        end: from this position on, no item is handed out and no answer is taken.
        error: the error of the item at ``end``.
    """

    def __init__(self, items: Sequence[Item], take: Callable[[Answer], None], threads: int) -> None:
        self.end = len(items)
        self.error: BaseException | None = None
        self._items, self._take = items, take
        self._ahead = _AHEAD * threads
        self._given = self._taken = 0
        self._ready: dict[int, Answer] = {}
        self._taking = False
        self._changed = Condition()

    def work(self, answer: Callable[[Item], Answer]) -> None:
        """Take one item after another and compute its answer, until no item is left."""
        while (place := self._next()) is not None:
            with self._ending(place):
                found = answer(self._items[place])
            self._take_all(place, found)

    def watch(self, running: Sequence[Future[None]], between: Between) -> None:
        """Call ``between`` as answers are taken, until all are, or no thread runs any more."""
        told, total = 0, len(self._items)
        while told < self.end and not all(thread.done() for thread in running):
            with self._changed:
                if self._taken == told < self.end:
                    self._changed.wait(_PATIENCE)
                taken = self._taken
            if taken > told:
                told = taken
                between(told, total)
        if told < self._taken == total:
            between(total, total)

    def _next(self) -> int | None:
        with self._changed:
            while self._given < self.end and self._given - self._taken >= self._ahead:
                self._changed.wait(_PATIENCE)
            if self._given >= self.end:
                return None
            self._given += 1
            return self._given - 1

    def _take_all(self, place: int, found: Answer) -> None:
        """Add an answer to the ready ones, and take every ready answer whose turn has come."""
        with self._changed:
            self._ready[place] = found
            if self._taking:
                return
            self._taking = True
        while True:
            with self._changed:
                if self._taken not in self._ready or self._taken >= self.end:
                    self._taking = False
                    return
                found = self._ready.pop(self._taken)
            with self._ending(self._taken):
                self._take(found)
            with self._changed:
                self._taken += 1
                self._changed.notify_all()

    @contextmanager
    def _ending(self, place: int) -> Generator[None]:
        """On an error, set ``end`` to this item and raise the error, which ends the thread."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                if place < self.end:
                    self.end, self.error = place, error
                self._changed.notify_all()
            raise


@contextmanager
def one_thread() -> Generator[None]:
    """Keep the operations of the calling thread on that thread; other threads are not affected."""
    restore = _limit_thread()
    try:
        yield
    finally:
        restore()


def _start_thread() -> None:
    _limit_thread()
    # Weights below about 1e-38, the majority in sharp attention, would take twice the time.
    torch.set_flush_denormal(True)


def _limit_thread() -> Callable[[], None]:
    """Limit the calling thread to one thread; return a function that restores the old limits."""
    set_openmp, set_mkl = _number_setters()
    threads = torch.get_num_threads()  # first, because a thread's first call sets both limits
    before = set_mkl(1)
    set_openmp(1)

    def restore() -> None:
        set_openmp(threads)
        set_mkl(before)

    return restore


@cache
def _number_setters() -> tuple[Setter, Setter]:
    """Return the functions of OpenMP and MKL that set the calling thread's number of threads.

    On Linux and macOS a lookup in a library also searches the libraries that it needs, so this
    finds the OpenMP that PyTorch runs on. A function that is not found is replaced by ``_ignore``.
    """
    library = ctypes.CDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage]
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    openmp, mkl = (getattr(library, name, _ignore) for name in names)
    return openmp, mkl


def _ignore(number: int) -> int:
    return number
