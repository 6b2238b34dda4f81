"""The choice of a backend: the first one in the table that does not refuse."""

from collections.abc import Sequence
from typing import NamedTuple

from regard.backends.backend import Backend
from regard.backends.cpu.cpu_backend import Cpu
from regard.backends.dense import Dense
from regard.backends.distributed.distributed_backend import Distributed
from regard.backends.distributed.sharded_scores import ShardedScores
from regard.backends.sdpa import Sdpa
from regard.backends.sweep import Sweep
from regard.backends.triton.triton_backend import Triton, unavailable_reason, warn_once
from regard.masks import Mask
from regard.reductions.reduction import Reduction
from regard.scores.score_source import Scores

BACKENDS: dict[str, Backend] = {
    "sdpa": Sdpa(),
    "triton": Triton(),
    "cpu": Cpu(),
    "sweep": Sweep(),
    "dense": Dense(),
}


_LARGE = 2**30  # scores: of these the sweep takes a tenth of a second on an H200


class Choice(NamedTuple):
    """The name of a backend, and why those before it in the table were not chosen."""

    name: str
    refusals: dict[str, str]


def choice(source: Scores, mask: Mask | None, reductions: Sequence[Reduction]) -> Choice:
    """Return the first backend in the table that answers all reductions.

    Raises:
        ValueError: the matrix is of DTensors, and a reduction cannot be asked of those.
    """
    if isinstance(source, ShardedScores):
        reason = BACKENDS["distributed"].refusal(source, mask, reductions)
        if reason is not None:
            raise ValueError(
                f"the matrix is of DTensors, and {reason}.\n    Gather query and key first: "
                "query.full_tensor(), or redistribute(placements=...)."
            )
        return Choice("distributed", {})
    refusals: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        if not backend.applies(source):
            continue
        refusal = backend.refusal(source, mask, reductions)
        if refusal is None:
            return Choice(name, refusals)
        refusals[name] = refusal
    raise AssertionError("the sweep takes every reduction")


def _scores_read(source: Scores, reductions: Sequence[Reduction]) -> int:
    """Return the number of scores in the rows that the answers depend on."""
    q_len = source.shape[-2]
    rows = max((len(reduction.rows(q_len)) for reduction in reductions), default=0)
    return source.shape.numel() // max(q_len, 1) * rows


def choose(
    source: Scores, mask: Mask | None, reductions: Sequence[Reduction], name: str | None
) -> Backend:
    """Return the backend of this name, or the first one that answers all reductions.

    Raises:
        ValueError: no backend has this name, or it refuses.
    """
    if name is None or (isinstance(source, ShardedScores) and name == "distributed"):
        found = choice(source, mask, reductions)
        if found.name == "triton":
            return Triton(instead=BACKENDS["sweep"])
        reason = found.refusals.get("triton")
        if reason is not None:
            is_slow = found.name == "sweep" and _scores_read(source, reductions) >= _LARGE
            if is_slow or reason == unavailable_reason(source):
                warn_once(reason)
        return BACKENDS[found.name]
    if name not in BACKENDS:
        raise ValueError(
            f"backend is {name!r}; it must be one of {', '.join(map(repr, BACKENDS))}.\n"
            "    Leave it out to have the fastest chosen."
        )
    if isinstance(source, ShardedScores):
        raise ValueError(
            f"backend is {name!r}; a matrix of DTensors has the backend 'distributed' alone.\n"
            "    Leave it out."
        )
    refusal = BACKENDS[name].refusal(source, mask, reductions)
    if refusal is not None:
        raise ValueError(
            f"backend is {name!r}; {refusal}.\n    Leave it out to have the fastest chosen."
        )
    return BACKENDS[name]


BACKENDS["distributed"] = Distributed(choose)
