"""Which backend answers: the first in this table that does not refuse the question."""

from collections.abc import Sequence
from typing import NamedTuple

from regard.backends.backend import Backend
from regard.backends.blocks import Blocks
from regard.backends.dense import Dense
from regard.backends.fused import Fused
from regard.masks import Mask
from regard.reductions import Reduction
from regard.scores import Scores

__all__ = ["Choice", "choice", "choose"]

BACKENDS: dict[str, Backend] = {"fused": Fused(), "blocks": Blocks(), "dense": Dense()}


class Choice(NamedTuple):
    """The name of the backend that answers, and why those before it in the table do not."""

    name: str
    refusals: tuple[str, ...]


def choice(source: Scores, mask: Mask | None, reductions: Sequence[Reduction]) -> Choice:
    """Which backend answers where nobody asks for one."""
    refusals: list[str] = []
    for name, backend in BACKENDS.items():
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
        return BACKENDS[choice(source, mask, reductions).name]
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
