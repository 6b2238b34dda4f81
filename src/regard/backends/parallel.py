"""Blocks on several threads at once, their answers added one at a time and in order.

One thread for each block, with each operation on that thread alone, instead of all threads for each
small operation: between the operations nobody waits for anybody, so a second program on the machine
costs its share and not a multiple of it. In order, so that sums round the same way every time.

These threads take numbers below about 1e-38 for 0, which a thread of the user's would not: weights
of that size, in sharp attention most of them, would cost twice the time of others.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

__all__ = ["in_turns"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_turns(
    items: Iterable[Item],
    worker: Callable[[], Callable[[Item], Answer]],
    take: Callable[[Answer], None],
    device: torch.device,
) -> None:
    """Hand each item's answer to `take`, in the order of the items.

    Args:
        items: what to work on.
        worker: called once on each thread; gives the function that answers one item.
        take: called for one answer at a time. An answer may live in memory that the next item of
            the same worker uses again.
        device: where the tensors are; other devices than the CPU have their own queue.
    """
    waiting = list(items)
    if device.type != "cpu" or len(waiting) <= 1:
        answer = worker()
        for item in waiting:
            take(answer(item))
        return
    turns = _Turns(waiting, worker, take)
    threads = min(torch.get_num_threads(), len(waiting))
    with ThreadPoolExecutor(threads, "regard") as pool:
        running = [pool.submit(turns.work) for _ in range(threads)]
        try:
            for each in running:
                each.result()
        finally:  # an interrupt too lets the threads end
            turns.stop()


class _Turns(Generic[Item, Answer]):
    def __init__(
        self,
        items: list[Item],
        worker: Callable[[], Callable[[Item], Answer]],
        take: Callable[[Answer], None],
    ) -> None:
        self._items = enumerate(items)
        self._worker = worker
        self._take = take
        self._turn = threading.Condition()
        self._done = 0
        self._stopped = False
        # These belong to a thread, not to the process.
        self._inference = torch.is_inference_mode_enabled()
        self._threads = torch.get_num_threads()

    def stop(self) -> None:
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def work(self) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        try:
            with torch.inference_mode(self._inference):
                answer = self._worker()
                while (next_item := self._next()) is not None:
                    place, item = next_item
                    self._hand_over(place, answer(item))
        except BaseException:
            self.stop()
            raise
        finally:
            # For this thread it no longer matters; threads that start later take this number.
            torch.set_num_threads(self._threads)

    def _next(self) -> "tuple[int, Item] | None":
        with self._turn:
            return None if self._stopped else next(self._items, None)

    def _hand_over(self, place: int, answer: Answer) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._stopped or self._done == place)
            if not self._stopped:
                self._take(answer)
                self._done += 1
                self._turn.notify_all()
