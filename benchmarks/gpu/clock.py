"""Seconds on the GPU by its own events, from memory that its cache does not hold; and a budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.case import quartiles
from benchmarks.turns import Work

__all__ = ["Budget", "Calls", "Timed", "seconds_of", "sets_needed", "timed"]

WARM = 2  # the first call compiles
FEWEST, MOST = 3, 20
LONG_ENOUGH_S = 0.1
CACHE = 60 * 2**20  # bytes: the second level of an H200


@dataclass(frozen=True)
class Timed:
    """What was measured of one side at one size.

    Attributes:
        seconds: of one call, the median.
        low, high: the quartiles.
        repetitions: of how many.
        memory: the most bytes that a call added to those of its inputs, its answers included.
        queued: seconds that the CPU takes to queue one call, the median.
    """

    seconds: float
    low: float
    high: float
    repetitions: int
    memory: int
    queued: float


class Calls(NamedTuple):
    """Seconds of each call: on the GPU, and of the CPU to queue it."""

    on_gpu: list[float]
    queueing: list[float]


class Budget:
    """Seconds that may be spent, by the clock on the wall."""

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; less than 0 when too many were spent."""
        return self._end - self._clock()


def sets_needed(bytes_of_one: int) -> int:
    """How many input sets, taken in turns, are at least twice what the cache holds."""
    return min(8, max(2, -(-2 * CACHE // bytes_of_one)))


def timed(works: Sequence[Work]) -> Timed:
    """The same work on one input set after another, warm, by CUDA's events."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first_s = [seconds_of(works[place % len(works)], 1).on_gpu[0] for place in range(WARM)][-1]
    memory = torch.cuda.max_memory_allocated() - held
    repetitions = max(FEWEST, min(MOST, int(LONG_ENOUGH_S / first_s)))
    found = seconds_of(_in_turns(works), repetitions)
    middle = median(found.on_gpu)
    return Timed(
        middle, *quartiles(found.on_gpu), repetitions, memory, queued=median(found.queueing)
    )


def seconds_of(work: Work, repetitions: int) -> Calls:
    """What each call takes; the calls are queued without a wait between them."""
    event: Any = torch.cuda.Event
    marks = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repetitions)]
    queueing: list[float] = []
    for start, end in marks:
        begun = perf_counter()
        start.record()
        work()
        end.record()
        queueing.append(perf_counter() - begun)
    torch.cuda.synchronize()
    return Calls([start.elapsed_time(end) / 1000 for start, end in marks], queueing)


def _in_turns(works: Sequence[Work]) -> Work:
    calls = 0

    def work() -> object:
        nonlocal calls
        calls += 1
        return works[calls % len(works)]()

    return work
