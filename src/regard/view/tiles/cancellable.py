"""Questions to a matrix that end soon after nobody waits for their answers any more."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from regard.recording.layers import Answers, Layer
from regard.reductions.reduction import Reduction
from regard.view.tiles.each_block import EachBlock

__all__ = ["answered"]


def answered(layer: Layer, reductions: Sequence[Reduction], pause: Callable[[], None]) -> Layer:
    """Return a layer that holds the answers to some reductions.

    Args:
        layer: with its matrix.
        reductions: the questions.
        pause: called before each block of rows; what it raises ends the pass.
    """
    missing = [reduction for reduction in reductions if reduction not in layer.answers]
    if not missing:
        return layer
    found = layer.whole().reduce(*missing, EachBlock(lambda _: pause()))
    pairs = zip(missing, found[:-1], strict=True)
    return replace(layer, answers=Answers(pairs).before(layer.answers))
