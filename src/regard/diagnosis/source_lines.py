"""On which line of somebody's code a mistake stands."""

import linecache
import re
from collections.abc import Callable

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import Stages
from regard.diagnosis.softmax_detection import exponentials
from regard.diagnosis.traced_run import Event

__all__ = ["behind_softmax", "event_of", "random_event", "score_product", "turned_round"]

_PRODUCTS = {"mm", "bmm", "baddbmm", "matmul", "addmm"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "clone", "unflatten"}
_MASKING = {"masked_fill", "masked_fill_", "where", "add", "add_", "sub", "mul", "tril", "triu"}
_FILLING = {"masked_fill", "masked_fill_", "where", "index_put", "index_put_", "fill_"}
_REPEATS = {"repeat", "cat", "expand", "_unsafe_view", "clone", "repeat_interleave", "index_select"}


def event_of(name: str, stages: Stages) -> Event | None:
    """The operation whose line holds a mistake; None where no operation tells.

    Args:
        name: of the mistake, in the catalogue.
        stages: of a run in which it happened.
    """
    finder = _FINDERS.get(name, _weights)
    return finder(stages) or _weights(stages)


def turned_round(stages: Stages) -> Event | None:
    """A transpose that holds for two axes only; None where there is none."""
    for event in _before(stages):
        if event.operator in ("t", "permute", "numpy_T") and event.caller is not None:
            text = linecache.getline(event.caller.file, event.caller.line)
            if re.search(r"\.T\b|\.t\(|torch\.t\(", text):
                return event
    return None


_DROPOUTS = {"bernoulli_", "native_dropout", "dropout", "rand_like", "rand", "bernoulli"}
_OTHER_NOISE = {"exponential_", "multinomial", "normal_", "randn", "randn_like", "normal"}


def random_event(stages: Stages, *, dropping: bool) -> Event | None:
    """The first operation that draws random numbers: as dropout does, or otherwise.

    Args:
        stages: of a run.
        dropping: which of the two.
    """
    names = _DROPOUTS if dropping else _OTHER_NOISE
    return next((e for e in stages.trace if e.operator in names), None)


def _weights(stages: Stages) -> Event | None:
    return stages.softmax.events[0] if stages.softmax else None


def _normalising(stages: Stages) -> Event | None:
    if stages.softmax is None:  # of exp over a sum that is no row's
        source = next(iter(exponentials(stages.trace)), None)
        reached = stages.trace.reached(() if source is None else source.writes)
        divided = (e for e in stages.trace if e.operator in ("div", "div_"))
        both = (e for e in divided if len(e.reads) > 1 and reached.issuperset(e.reads))
        return next(both, source)
    return stages.softmax.total or _weights(stages)


def _before(stages: Stages) -> list[Event]:
    """The operations up to the softmax, the last first."""
    last = _weights(stages)
    events = [e for e in stages.trace if last is None or e.place < last.place]
    return events[::-1]


def behind_softmax(stages: Stages) -> list[Event]:
    """The operations that depend on the weights, in order."""
    if stages.softmax is None:
        return []
    reached = stages.trace.reached(a for e in stages.softmax.events for a in e.writes)
    first = stages.softmax.events[0].place
    return [e for e in stages.trace if e.place > first and reached.intersection(e.reads)]


def score_product(stages: Stages) -> Event | None:
    """Query times key, or the kernel that does it all; None where no product was seen."""
    if stages.softmax is not None and stages.softmax.fused:
        return _weights(stages)
    moved = stages.trace.moved
    for event in _before(stages):
        if event.operator in _PRODUCTS and sum(a in moved for a in event.reads) >= 2:
            return event
    for event in _before(stages):
        both = event.operator == "mul" and sum(address in moved for address in event.reads) >= 2
        if both or event.operator == "sum":
            return event
    return None


def _scaling(stages: Stages) -> Event | None:
    """The last multiplication with one number before the softmax."""
    if stages.softmax is not None and stages.softmax.fused:
        return _weights(stages)
    moved = stages.trace.moved
    for event in _before(stages):
        if event.operator in ("mul", "div", "mul_", "div_") and event.reads:
            other = event.args[1]
            single = not isinstance(other, Tensor) or other.numel() == 1
            if single and event.reads[0] in moved:
                return event
    return score_product(stages)


def _mixing(stages: Stages) -> Event | None:
    """Weights times values: the last operation on that line."""
    if stages.softmax is not None and stages.softmax.fused:
        return _weights(stages)
    moved = stages.trace.moved
    for event in behind_softmax(stages):
        both = sum(a in moved for a in event.reads) >= 2
        if both and event.operator in _PRODUCTS:
            return event
        if both and event.operator in ("mul", "mul_"):
            later = [
                e for e in behind_softmax(stages) if e.operator == "sum" and e.place > event.place
            ]
            return later[0] if later else event
    return None


def _merging(stages: Stages) -> Event | None:
    """The first view behind the weights that has a token's heads in one axis."""
    columns = stages.outputs[0].shape[-1]
    limit = stages.joining.place if stages.joining is not None else None
    found = [
        event
        for event in behind_softmax(stages)
        if event.operator in _VIEWS
        and event.output is not None
        and event.output.shape[-1:] == (columns,)
        and (limit is None or event.place < limit)
    ]
    return found[0] if found else None


def _splitting(stages: Stages) -> Event | None:
    """The first view of a projection that has several heads."""
    start = [a for p in stages.projections for a in p.event.writes] or list(stages.trace.entries)
    reached = stages.trace.reached(start)
    columns = stages.outputs[0].shape[-1]
    tokens = stages.trace.outcome.output.shape[1]
    for event in stages.trace:
        shape = event.output.shape if event.output is not None else torch.Size([])
        viewed = event.operator in _VIEWS and reached.intersection(event.reads)
        if viewed and len(shape) >= 3 and shape[-1] < columns and shape[-2] == tokens:
            return event
    return None


def _masking(stages: Stages) -> Event | None:
    """The last masking of scores before the softmax."""
    if stages.softmax is not None and stages.softmax.fused:
        return _weights(stages)
    moved = stages.trace.moved
    for event in _before(stages):
        filling = event.operator in _FILLING
        wide = [operand for operand in event.operands if operand.ndim >= 2 and operand.numel() > 1]
        adding = event.operator in _MASKING and len(wide) == 2 and len(event.operands) == 2
        cutting = event.operator.removesuffix("_") in ("tril", "triu")
        if (filling or adding or cutting) and moved.intersection(event.reads):
            return event
    return _weights(stages)


def _thrown_away(stages: Stages) -> Event | None:
    """A masking of scores that nothing reads."""
    moved = stages.trace.moved
    for event in _before(stages):
        filling = event.operator in ("masked_fill", "where") and moved.intersection(event.reads)
        later = (e for e in stages.trace if e.place > event.place)
        if filling and not any(set(event.writes).intersection(e.reads) for e in later):
            return event
    return None


def _masking_after(stages: Stages) -> Event | None:
    moved = _mixing(stages)
    for event in behind_softmax(stages):
        if moved is not None and event.place >= moved.place:
            return None
        if event.operator in (
            "mul",
            "mul_",
            "masked_fill",
            "masked_fill_",
            "tril",
            "where",
            "triu",
        ):
            return event
    return None


def _repeating(stages: Stages) -> Event | None:
    for event in stages.trace:
        if event.operator in ("repeat", "cat", "expand") and event.output is not None:
            grows = event.operands and event.output.numel() > event.operands[0].numel()
            listed = event.operator == "cat"
            if (grows or listed) and event.output.ndim >= 4:
                return event
    return None


def _projecting(stages: Stages) -> Event | None:
    return stages.projections[0].event if stages.projections else None


def _dropping(stages: Stages) -> Event | None:
    return random_event(stages, dropping=True) or _weights(stages)


_FINDERS: dict[str, Callable[[Stages], Event | None]] = {
    "heads-merged-without-transpose": _merging,
    "heads-split-without-transpose": _splitting,
    "softmax-wrong-axis": _normalising,
    "scale-by-embed-dim": _scaling,
    "no-scale": score_product,
    "wrong-scale": _scaling,
    "mask-inverted": _masking,
    "mask-added-as-numbers": _masking,
    "mask-after-softmax": _masking_after,
    "mask-fill-value": _masking,
    "causal-off-by-one": _masking,
    "not-causal": _thrown_away,
    "causal-top-left": _masking,
    "nan-rows": _weights,
    "padding-on-queries": _masking,
    "mask-unused": _thrown_away,
    "mask-of-another-sample": _masking,
    "attends-across-batch": score_product,
    "dropout-in-eval": _dropping,
    "heads-share-projection": _projecting,
    "wrong-projection": score_product,
    "wrong-values": _mixing,
    "kv-heads-repeated-in-wrong-order": _repeating,
    "heads-and-tokens-exchanged": score_product,
    "keys-not-transposed": score_product,
    "transpose-of-batch": score_product,
    "values-mixed-along-wrong-axis": _mixing,
}
