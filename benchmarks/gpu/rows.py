"""What was measured, as rows: each side at each size, or why not; goals and ratios."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.case import LeftOut
from benchmarks.gpu import correctness
from benchmarks.gpu.clock import Budget, Timed, sets_needed
from benchmarks.gpu.failures import Failed, told
from benchmarks.gpu.sides import FORWARD, Side
from benchmarks.gpu.size import GOALS_AT, Size, inputs
from benchmarks.turns import Work

__all__ = ["Row", "Take", "measured", "row_of"]

Row = dict[str, Any]
Take = Callable[[Sequence[Work]], Timed]

# A call of this many seconds is not worth what it would keep from being measured.
LONGEST_CALL_S = 4.0
CALLS = 6  # how many calls a measurement takes of what is slow


def measured(
    sides: Sequence[Side],
    sizes: Sequence[Size],
    device: str,
    budget: Budget,
    take: Take,
    checks: Sequence[correctness.Checked] = (),
) -> Iterator[Row]:
    """A row for each side at each size; peers first, so that ratios are known at once.

    What the checks found wrong is not timed.
    """
    known: dict[tuple[str, Size], float] = {}
    for size in sizes:
        for side in sides:
            try:
                expected = _expected_s(side, size, known)
                if correctness.wrong(checks, side.name, size):
                    raise LeftOut("its answers are wrong")
                _check_time(side, expected, budget)
                found = _take(side, size, device, take)
            except LeftOut as reason:
                failed = isinstance(reason, Failed)
                yield {**_head(side, size), "left_out": str(reason), "failed": failed}
                continue
            known[side.name, size] = found.seconds
            peers = (known.get((name, size)) for name in (FORWARD, side.peer))
            yield row_of(side, size, found, *peers)


def _take(side: Side, size: Size, device: str, take: Take) -> Timed:
    reason = side.leaves_out(size)
    if reason is not None:
        raise LeftOut(reason)
    one = 2 * size.tokens * size.head_dim * (size.num_heads + 2 * size.num_kv_heads)
    with told():
        given = inputs(size, device, sets_needed(one))
        return take([side.prepare(each, size) for each in given])


def _expected_s(side: Side, size: Size, known: dict[tuple[str, Size], float]) -> float:
    """Seconds of one call, by the square of the length, from the longest that is known."""
    shorter = [
        (each.tokens, seconds)
        for (name, each), seconds in known.items()
        if name == side.name and each.longer(size.tokens) == size
    ]
    if not shorter:
        return 0.0
    tokens, seconds = max(shorter)
    return seconds * (size.tokens / tokens) ** 2


def _check_time(side: Side, expected_s: float, budget: Budget) -> None:
    if expected_s > LONGEST_CALL_S:
        raise LeftOut(f"about {expected_s:.0f} s a call; the limit is {LONGEST_CALL_S:.0f} s")
    needed = CALLS * expected_s if expected_s else side.first_s
    if needed > budget.left:
        raise LeftOut("the time is up")


def _head(side: Side, size: Size) -> Row:
    return {
        "side": side.name,
        "tokens": size.tokens,
        "head_dim": size.head_dim,
        "num_kv_heads": size.num_kv_heads,
        "causal": size.causal,
    }


def row_of(
    side: Side, size: Size, found: Timed, forward_s: float | None, peer_s: float | None
) -> Row:
    """One line of the results."""
    forwards = None if forward_s is None else found.seconds / forward_s
    of_peer = None if peer_s is None else found.seconds / peer_s
    goal = side.goal if (size.tokens, size.head_dim) == GOALS_AT else None
    return {
        **_head(side, size),
        "milliseconds": _three(found.seconds * 1e3),
        "quartiles": [_three(found.low * 1e3), _three(found.high * 1e3)],
        "repetitions": found.repetitions,
        "queued_ms": _three(found.queued * 1e3),
        "forwards": None if forwards is None else _three(forwards),
        "tflops": _three(side.products * size.score_flops / found.seconds / 1e12),
        "memory_mib": _three(found.memory / 2**20),
        "goal": goal,
        "reached": None if goal is None or of_peer is None else of_peer <= goal,
        "peer": side.peer,
        "of_peer": None if of_peer is None else _three(of_peer),
    }


def _three(number: float) -> float:
    """Three digits: more would be noise."""
    return float(f"{number:.3g}")
