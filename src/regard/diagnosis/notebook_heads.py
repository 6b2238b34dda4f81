"""Whether a notebook's cells split a token into heads and merge them again as they should."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from regard.diagnosis.counterexamples import Proof, compared
from regard.diagnosis.notebook_chains import SAME, Chain, maker
from regard.diagnosis.traced_run import Event

__all__ = ["of_heads", "turned_batch"]

_HEADS = (("sample", "head"), "tokens", "columns")
_MERGED = (("sample",), "tokens", "columns")


def of_heads(events: Sequence[Event], chain: Chain) -> Iterator[tuple[str, Event, Proof | None]]:
    """The mistakes of splitting and merging, each with its operation and what proves it.

    Args:
        events: of all cells, in order.
        chain: with weights that met values.
    """
    scores, product, mixing = chain.softmax.scores, chain.product, chain.mixing
    if scores.ndim != 4 or product is None or mixing is None or product.event is mixing.event:
        return
    for address, whole in zip(product.event.reads[:2], (product.left, product.right), strict=True):
        if whole.shape[0] != scores.shape[0] * scores.shape[1]:
            return
        heads = whole.reshape(*scores.shape[:2], *whole.shape[1:])
        before = _before_split(events, address, product.event.place)
        name = None if before is None else _split_name(before[0].double(), heads)
        if before is not None and name is not None:
            batch, length, _ = before[0].shape
            right = before[0].double().reshape(batch, length, -1, heads.shape[-1]).transpose(1, 2)
            yield name, before[1], compared(heads, right, "heads", _HEADS)
            break
    output = mixing.output.reshape(*scores.shape[:2], *mixing.output.shape[1:])
    merged = output.transpose(1, 2).flatten(-2)
    reached = set(mixing.event.writes)
    for event in events:
        if event.place > mixing.event.place and reached.intersection(event.reads):
            if event.operator not in SAME or event.output is None:
                return
            reached.update(event.writes)
            if event.output.shape == merged.shape:
                glued = event.output.double()
                is_glued = bool((glued == output.reshape(merged.shape)).all())
                if is_glued and not bool((glued == merged).all()):
                    proof = compared(glued, merged, "output", _MERGED)
                    yield "heads-merged-without-transpose", event, proof
                return


def _before_split(events: Sequence[Event], address: int, place: int) -> tuple[Tensor, Event] | None:
    """A tensor with three axes that became heads by views alone, and the first of those views."""
    view: Event | None = None
    while (made := maker(events, address, place)) is not None:
        output = made.output
        if output is not None and output.ndim == 3 and view is not None:
            return output, view
        if made.operator not in SAME or not made.reads:
            return None
        if output is not None and output.ndim == 4:
            view = made
        address, place = made.reads[0], made.place
    return None


def _split_name(tokens: Tensor, heads: Tensor) -> str | None:
    batch, length, columns = tokens.shape
    if tokens.numel() != heads.numel() or batch != heads.shape[0] or columns % heads.shape[-1]:
        return None
    right = tokens.reshape(batch, length, -1, heads.shape[-1])
    if right.transpose(1, 2).shape == heads.shape and bool((right.transpose(1, 2) == heads).all()):
        return None
    if right.shape == heads.shape and bool((right == heads).all()):
        return "heads-and-tokens-exchanged"
    if bool((tokens.reshape(heads.shape) == heads).all()):
        return "heads-split-without-transpose"
    return None


def turned_batch(events: Sequence[Event], chain: Chain) -> Event | None:
    """What turned all the axes of a batch round before queries met keys; None where nothing did.

    Args:
        events: of all cells, in order.
        chain: of one softmax.
    """
    product = chain.product
    if product is None or product.left.shape[0] == 1:
        return None
    for address in product.event.reads[:2]:
        place = product.event.place
        while (made := maker(events, address, place)) is not None:
            if made.operator == "numpy_T" or made.args[1:2] == ((2, 1, 0),):
                return made
            if made.operator not in SAME or not made.reads:
                break
            address, place = made.reads[0], made.place
    return None
