"""A map over several threads that hands out its answers in the order of the items.

Each thread works on an item of its own and keeps every operation to itself. PyTorch would share
out each small operation among all threads instead, and each would wait for the slowest after each
operation, which costs a multiple of the time as soon as another program runs.

``torch.set_num_threads`` would limit a thread, but also every thread that starts later. The numbers
of OpenMP and MKL belong to one thread, so those are set.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias, TypeVar

import torch

__all__ = ["map_in_order", "one_thread"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Setter: TypeAlias = Callable[[int], int]


def map_in_order(
    items: Iterable[Item],
    worker: Callable[[], Callable[[Item], Answer]],
    take: Callable[[Answer], None],
    *,
    threaded: bool,
) -> None:
    """Call `take` with the answer to each item, in the order of the items.

    Args:
        items: what to work on.
        worker: makes a function that answers one item; it is called once for each thread.
        take: called on the calling thread. An answer may live in memory that its worker uses
            again for a later item.
        threaded: whether several threads may work at once. Pass False for tensors on another device
            than the CPU, which has a queue of its own.
    """
    waiting = list(items)
    if not threaded or len(waiting) <= 1 or _number_setters()[0] is _ignore:
        answer = worker()
        for item in waiting:
            take(answer(item))
        return
    threads = min(torch.get_num_threads(), len(waiting))
    workers = [worker() for _ in range(threads)]
    inference = torch.is_inference_mode_enabled()  # belongs to a thread

    def work(place: int) -> Answer:
        with torch.inference_mode(inference):
            return workers[place % threads](waiting[place])

    with one_thread(), ThreadPoolExecutor(threads, "regard", _start_thread) as pool:
        running: deque[Future[Answer]] = deque()
        for place in range(len(waiting)):
            if len(running) == threads:  # take the last answer of this item's worker first
                take(running.popleft().result())
            running.append(pool.submit(work, place))
        for future in running:
            take(future.result())


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
    # Weights below about 1e-38, most of them in sharp attention, would take twice the time.
    torch.set_flush_denormal(True)


def _limit_thread() -> Callable[[], None]:
    """Set the numbers of the calling thread to 1, and return a function that sets them back."""
    set_openmp, set_mkl = _number_setters()
    threads = torch.get_num_threads()  # first: PyTorch sets both numbers when a thread first asks
    before = set_mkl(1)
    set_openmp(1)

    def restore() -> None:
        set_openmp(threads)
        set_mkl(before)

    return restore


@cache
def _number_setters() -> tuple[Setter, Setter]:
    """Return what sets the number of threads of the calling thread in OpenMP and in MKL.

    On Linux and macOS a lookup in a library also searches the libraries that it needs, so this
    finds the OpenMP that PyTorch runs on. What is not found is replaced by ``_ignore``.
    """
    library = ctypes.CDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage]
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    openmp, mkl = (getattr(library, name, _ignore) for name in names)
    return openmp, mkl


def _ignore(number: int) -> int:
    return number
