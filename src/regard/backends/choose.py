"""Which backend answers: the first in this table that does not refuse the question."""

from collections.abc import Sequence
from typing import NamedTuple

from regard.backends.backend import Backend
from regard.backends.dense import Dense
from regard.backends.sdpa import Sdpa
from regard.backends.sweep import Sweep
from regard.backends.triton.triton_backend import Triton, unavailable_reason, warn_once
from regard.masks import Mask
from regard.reductions.reduction import Reduction
from regard.scores.score_source import Scores

__all__ = ["Choice", "choice", "choose"]

BACKENDS: dict[str, Backend] = {
    "sdpa": Sdpa(),
    "triton": Triton(),
    "sweep": Sweep(),
    "dense": Dense(),
}


class Choice(NamedTuple):
    """The name of the backend that answers, and why those before it in the table do not."""

    name: str
    refusals: tuple[str, ...]


def choice(source: Scores, mask: Mask | None, reductions: Sequence[Reduction]) -> Choice:
    """Which backend answers where nobody asks for one."""
    refusals: list[str] = []
    for name, backend in BACKENDS.items():
        if name == "triton" and source.device.type != "cuda":
            continue  # nobody expects it there
        refusal = backend.refusal(source, mask, reductions)
        if refusal is None:
            return Choice(name, tuple(refusals))
        refusals.append(refusal)
    raise AssertionError("the sweep over blocks refuses nothing")


def choose(
    source: Scores, mask: Mask | None, reductions: Sequence[Reduction], name: str | None
) -> Backend:
    """The backend asked for by name, or the first that takes all the reductions.

    Raises:
        ValueError: there is none of that name, or it cannot answer this.
    """
    if name is None:
        found = choice(source, mask, reductions)
        if found.name == "triton":
            return Triton(instead=BACKENDS["sweep"])
        if found.name == "sweep" and (lack := _lack(source, found)) is not None:
            warn_once(lack)
        return BACKENDS[found.name]
    if name not in BACKENDS:
        raise ValueError(
            f"backend is {name!r}; it must be one of {', '.join(map(repr, BACKENDS))}.\n"
            "    Leave it out to have the fastest chosen."
        )
    refusal = None if name == "dense" else BACKENDS[name].refusal(source, mask, reductions)
    if refusal is not None:
        raise ValueError(
            f"backend is {name!r}; {refusal}.\n    Leave it out to have the fastest chosen."
        )
    return BACKENDS[name]


def _lack(source: Scores, found: Choice) -> str | None:
    """What a GPU lacks for kernels that would answer otherwise; None: that is not the reason."""
    if source.device.type != "cuda":
        return None
    lack = unavailable_reason(source)
    return lack if lack in found.refusals else None
