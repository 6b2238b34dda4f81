"""Seconds of several works, taken in turns: a busy machine then slows all of them alike."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from benchmarks.case import Measured, middle, quartiles

__all__ = ["Work", "beside_forward", "in_turns", "one_thread", "ratio", "seconds"]

Work = Callable[[], object]

# Rounds go on until there are as many as asked for, or until they have taken so long.
ENOUGH_S, FEWEST = 8, 3
# A first round that took longer than this is kept: what it warmed up does not show.
WARM_S = 4


def seconds(work: Work) -> float:
    """What it takes, once."""
    start = perf_counter()
    work()
    return perf_counter() - start


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """PyTorch computes on one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_turns(works: Sequence[Work], repetitions: int, fewest: int = FEWEST) -> list[list[float]]:
    """The seconds of each work in each round; the first round warms up."""
    first = [seconds(work) for work in works]
    rounds = [first] if sum(first) > WARM_S else []
    while len(rounds) < repetitions and (
        len(rounds) < fewest or sum(map(sum, rounds)) + sum(rounds[-1]) < ENOUGH_S
    ):
        rounds.append([seconds(work) for work in works])
    return [list(column) for column in zip(*rounds, strict=True)]


def ratio(ours: Work, peer: Work, repetitions: int, fewest: int = FEWEST) -> Measured:
    """How many peers ours takes: the medians divided, with the quartiles of the single ratios."""
    ours_s, peer_s = in_turns((ours, peer), repetitions, fewest)
    single = [a / b for a, b in zip(ours_s, peer_s, strict=True)]
    return Measured(
        median(ours_s) / median(peer_s),
        len(single),
        *quartiles(single),
        beside=f"the peer {median(peer_s):.3g} s",
    )


def beside_forward(ours: Work, forward: Work, repetitions: int) -> Measured:
    """Seconds, with the number of forwards that they are."""
    ours_s, forward_s = in_turns((ours, forward), repetitions)
    return replace(middle(ours_s), forwards=median(ours_s) / median(forward_s))
