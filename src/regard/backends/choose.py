"""Which backend answers: the first in this table that takes the question."""

from collections.abc import Sequence

from regard.backends.backend import Backend
from regard.backends.blocks import Blocks
from regard.backends.dense import Dense
from regard.backends.fused import Fused
from regard.masks import Mask
from regard.reductions import Reduction
from regard.scores import Scores

__all__ = ["choose"]

BACKENDS: dict[str, Backend] = {"fused": Fused(), "blocks": Blocks(), "dense": Dense()}


def choose(
    source: Scores, mask: Mask | None, reductions: Sequence[Reduction], name: str | None
) -> Backend:
    """The backend asked for by name, or the first that takes all the reductions.

    Raises:
        ValueError: there is none of that name, or it cannot answer this.
    """
    if name is None:
        return next(b for b in BACKENDS.values() if b.takes(source, mask, reductions))
    if name not in BACKENDS:
        raise ValueError(
            f"backend is {name!r}; it must be one of {', '.join(map(repr, BACKENDS))}.\n"
            "    Leave it out to have the fastest chosen."
        )
    backend = BACKENDS[name]
    if name == "fused" and not backend.takes(source, mask, reductions):
        asked = ", ".join(type(reduction).__name__ for reduction in reductions)
        raise ValueError(
            f"backend is 'fused'; no fused attention call answers {asked} of this matrix.\n"
            "    Leave it out to have the fastest chosen."
        )
    return backend
