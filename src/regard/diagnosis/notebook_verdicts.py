"""Whether the attention that a notebook's cells compute is right, from its own numbers.

Each step is judged by itself: the axis of the softmax, the scale, the mask, what became of the
weights, and what they met. Right is only what gives the numbers of attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.diagnosis.counterexamples import Proof, compared
from regard.diagnosis.interpretation import Told
from regard.diagnosis.notebook_chains import Chain, Mixing, between, near, origin
from regard.diagnosis.notebook_heads import of_heads, turned_batch
from regard.diagnosis.reference_attention import shape_of_mask
from regard.diagnosis.traced_run import Event

__all__ = ["Verdict", "judged"]

# Of scores: a weight that is this much smaller than the largest is none.
_FORBIDS = 60.0


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one softmax of the cells is.

    Attributes:
        told: its mistakes.
        missing: why nothing can be told; empty where all is.
        is_attention: whether its weights met values: else it may be of a classifier.
    """

    told: tuple[Told, ...]
    missing: str
    is_attention: bool


@dataclass(eq=False)
class _Judge:
    """One softmax, laid with a row for each query, and what was seen of it so far."""

    events: Sequence[Event]
    chain: Chain
    scores: Tensor
    weights: Tensor
    axis: str
    query: Tensor | None
    key: Tensor | None
    allowed: Tensor
    told: list[Told] = field(default_factory=list[Told])
    missing: list[str] = field(default_factory=list[str])

    @property
    def softmax(self) -> Event:
        return self.chain.softmax.events[0]

    def say(
        self, name: str, event: Event | None, detail: str = "", proof: Proof | None = None
    ) -> None:
        self.told.append(Told(name, None, None, event or self.softmax, detail=detail, proof=proof))

    @property
    def is_right_scale(self) -> bool:
        product = self.chain.product
        if product is None:
            return True
        root = product.left.shape[-1] ** 0.5
        return any(abs(number * root - 1) < 1e-3 for number in (product.scale, product.folded))


def judged(events: Sequence[Event], chain: Chain) -> Verdict:
    """The verdict on one softmax.

    Args:
        events: of all cells, in order.
        chain: the softmax with what stands before and behind it.
    """
    mixing = chain.mixing
    is_turned = False
    if mixing is not None and mixing.over_rows:
        is_square = chain.scores.shape[-1] == chain.scores.shape[-2]
        is_turned = chain.axis == "rows" or not is_square
    judge = _laid(events, chain, is_turned)
    if chain.doubt is not None:
        judge.missing.append(f"{_line(chain.doubt)} {_UNKNOWN_STEP}")
    elif mixing is None:
        _weights_alone(judge)
    else:
        _all_steps(judge, mixing, is_turned)
    told = () if judge.missing else tuple(_shown(judge, each) for each in judge.told)
    return Verdict(told, " ".join(judge.missing), mixing is not None)


_UNKNOWN_STEP = (
    "this is none of the steps that are known between query times key and weights times value."
)


def _laid(events: Sequence[Event], chain: Chain, is_turned: bool) -> _Judge:
    product = chain.product
    query = None if product is None else product.left
    key = None if product is None else product.right
    every = torch.ones_like(chain.scores, dtype=torch.bool)
    if not is_turned:
        axis = {"columns": "keys", "rows": "queries"}.get(chain.axis, "other")
        return _Judge(events, chain, chain.scores, chain.weights, axis, query, key, every)
    axis = {"rows": "keys", "columns": "queries"}.get(chain.axis, "other")
    return _Judge(events, chain, chain.scores.mT, chain.weights.mT, axis, key, query, every.mT)


def _line(event: Event) -> str:
    caller = event.caller
    return "" if caller is None else f"{caller.file}, line {caller.line}:"


def _weights_alone(judge: _Judge) -> None:
    """Weights that met no values: right where they are those of attention, else nobody knows."""
    allowed = _allowed(judge)
    product = judge.chain.product
    masked = _shape(allowed) == "same" or (product is not None and product.is_turned)
    could_be = judge.axis == "keys" and masked and judge.is_right_scale
    is_clear = not (judge.told or judge.missing or judge.chain.is_used)
    if could_be and is_clear and _same(judge.weights, _right_weights(judge, allowed)):
        return
    judge.told.clear()
    if not judge.missing:
        judge.missing.append(
            f"{_line(judge.softmax)} these weights are in no product with values that was "
            "recognised; weights @ value would tell whether they are those of attention."
        )


def _all_steps(judge: _Judge, mixing: Mixing, is_turned: bool) -> None:
    if mixing.over_rows and not is_turned:
        judge.say("values-mixed-along-wrong-axis", mixing.event, _OVER_QUERIES)
    if judge.axis != "keys":
        axis = "queries" if judge.axis == "queries" else "wrong axis"
        judge.say(
            "softmax-wrong-axis",
            None,
            f"It runs over the {axis}, and should run over the "
            "keys: those that the product with the values sums over.",
        )
    _scale(judge)
    allowed = _allowed(judge)
    allowed = judge.allowed = _after(judge, mixing, is_turned, allowed)
    _values(judge, mixing)
    is_inverted = any(told.name == "mask-inverted" for told in judge.told)  # one row has nothing
    if bool(judge.weights.isnan().any()) and not is_inverted:
        judge.say("nan-rows", None)
    for name, event, proof in of_heads(judge.events, judge.chain):
        judge.say(name, event, proof=proof)
    if (event := turned_batch(judge.events, judge.chain)) is not None:
        judge.missing.append(
            f"{_line(event)} this turns all the axes of a batch round, which mixes its samples. "
            "Write key.transpose(-2, -1)."
        )
    if judge.told or judge.missing:
        return
    right = _right_weights(judge, allowed) @ mixing.value
    if not _same(mixing.output, right):
        judge.missing.append(f"{_line(mixing.event)} its numbers are not those of attention.")


_OVER_QUERIES = "The sum runs over the queries, whose weights do not sum to 1 that way."


def _scale(judge: _Judge) -> None:
    product = judge.chain.product
    if product is None or judge.is_right_scale:
        return
    if not product.is_turned:
        judge.missing.append(
            f"{_line(product.event)} nothing tells whether this is queries times keys, which would "
            "need a scale, or tokens times a matrix. Write query @ key.T where it is the first."
        )
        return
    width = product.left.shape[-1]
    made = [origin(judge.events, a, product.event.place) for a in product.event.reads[:2]]
    if any(is_bent for _, _, is_bent in made):
        judge.missing.append(
            f"{_line(product.event)} queries or keys were normed before they met: which scale is "
            "right does not follow from their width."
        )
        return
    is_plain = abs(product.scale - 1) < 1e-3 and abs(product.folded - 1) < 1e-3
    embedding = {m.args[0].shape[-1] for m, _, _ in made if m is not None and m.operator == "mm"}
    name = "no-scale" if is_plain else "wrong-scale"
    if not is_plain and any(abs(product.scale * wide**0.5 - 1) < 1e-3 for wide in embedding):
        name = "scale-by-embed-dim"
    event = None if is_plain else between(judge.events, product.event, judge.softmax, masking=False)
    detail = (
        f"Query times key is multiplied with {product.scale:.4g}; for head_dim {width} it should "
        f"be {width**-0.5:.4g} = 1/sqrt({width})."
    )
    judge.say(name, event or product.event, detail)


def _allowed(judge: _Judge) -> Tensor:
    """Which keys each query may attend to, (batch, queries, keys), and what is wrong with that."""
    scores, product = judge.scores, judge.chain.product
    forbidden = scores < scores.masked_fill(scores == torch.inf, 0).amax() - 10 * _FORBIDS
    forbidden |= scores == -torch.inf
    allowed = ~forbidden
    event = None
    if product is not None:
        event = between(judge.events, product.event, judge.softmax, masking=True)
        plain = _raw(judge) * product.scale
        kept = near(scores, plain)
        largest = scores.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
        changed = ~kept & ~forbidden & ~(scores < largest - _FORBIDS)
        allowed = kept
        if bool(changed.any()):
            return _changed(judge, (scores - plain)[changed], scores[changed], changed, event)
    shape = _shape(allowed)
    if shape in ("with_next", "without_self", "without_self_but_first"):
        judge.say("causal-off-by-one", event)
    elif shape in ("future", "future_and_self"):
        judge.say("mask-inverted", event)
    return allowed


def _changed(
    judge: _Judge, added: Tensor, filled: Tensor, changed: Tensor, event: Event | None
) -> Tensor:
    """What a mask made of scores, where it does not forbid."""
    if bool(((added - 1).abs() < 1e-3).all()):
        judge.say("mask-added-as-numbers", event)
        return changed if _shape(changed) == "same" else ~changed
    if bool((filled == filled[0]).all()) and filled.numel() > 1:
        most = float(judge.weights.masked_fill(~changed, 0).nan_to_num().max())
        judge.say("mask-fill-value", event, f"What is forbidden gets weights of up to {most:.2g}.")
    else:
        judge.missing.append(
            f"{_line(event or judge.softmax)} the scores are more than query times key, a scale "
            "and a mask."
        )
    return ~changed


def _shape(allowed: Tensor) -> str:
    """The name of a mask's shape; empty for one that has none."""
    first = allowed[0]
    if (
        not bool((allowed == first).all())
        or min(first.shape) < 2
        or bool((first == first[0]).all())
    ):
        return ""
    names = ("same", "bottom_right", "with_next", "without_self", "without_self_but_first")
    for name in (*names, "future", "future_and_self"):
        if torch.equal(shape_of_mask(name, first), first):
            return name
    return ""


def _after(judge: _Judge, mixing: Mixing, is_turned: bool, allowed: Tensor) -> Tensor:
    """What became of the weights before they met the values."""
    held = mixing.weights.mT if is_turned else mixing.weights
    kept = (held != 0) & (judge.weights != 0) & ~held.isnan()
    dropped = (held == 0) & (judge.weights != 0)
    ratio = held[kept] / judge.weights[kept]
    factor = float(ratio.median())
    if not bool(((ratio / factor - 1).abs() < 1e-3).all()):
        return allowed & ~dropped  # and divided by what was left: a mask like any other
    event = between(judge.events, judge.softmax, mixing.event, masking=True)
    product = judge.chain.product
    if abs(factor - 1) > 1e-3:
        width = 0 if product is None else product.left.shape[-1]
        is_scale = width and abs(factor * width**0.5 - 1) < 1e-3 and not bool(dropped.any())
        names = [each.name for each in judge.told]
        event = between(judge.events, judge.softmax, mixing.event, masking=False) or event
        if is_scale and "no-scale" in names:
            judge.told = [each for each in judge.told if each.name != "no-scale"]
            judge.say("wrong-scale", event, "The scale stands behind the softmax.")
        else:
            judge.missing.append(
                f"{_line(event or judge.softmax)} the weights are multiplied with {factor:.4g} "
                "behind the softmax; dropout does so where it is active."
            )
    elif bool(dropped.any()):
        judge.say("mask-after-softmax", event)
        return allowed & ~dropped
    return allowed


def _values(judge: _Judge, mixing: Mixing) -> None:
    """Whether the weights met the values, and those lay as they should."""
    product = judge.chain.product
    is_square = mixing.value.shape[-1] == mixing.value.shape[-2]
    if product is None or product.event is mixing.event:
        if mixing.is_value_turned and is_square:
            judge.missing.append(f"{_line(mixing.event)} {_ROWS_OR_COLUMNS}")
        return
    events, place = judge.events, product.event.place
    makers = [origin(events, address, place)[0] for address in product.event.reads[:2]]
    value = origin(events, mixing.address, mixing.event.place)[0]
    rows = {maker.reads[0] for maker in makers if maker is not None and maker.operator == "mm"}
    if mixing.is_value_turned and is_square:
        if value is not None and value.operator == "mm" and value.reads[0] in rows:
            judge.say("values-mixed-along-wrong-axis", mixing.event)
        else:
            judge.missing.append(f"{_line(mixing.event)} {_ROWS_OR_COLUMNS}")
    addresses = [*product.event.reads[:2], mixing.address]
    three = (product.left, product.right, mixing.value)
    pairs = [_equal(three[i], three[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    if len(set(addresses)) == 1 and any(pairs) and not all(pairs):
        judge.missing.append(
            f"{_line(mixing.event)} one part of a projection is used as two of query, key and "
            "value."
        )
    elif len(set(addresses)) == 2:
        is_score = addresses[0] == addresses[1]
        _used_twice(judge, mixing, makers[0] if is_score else value, is_score=is_score)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _used_twice(judge: _Judge, mixing: Mixing, twice: Event | None, *, is_score: bool) -> None:
    """One tensor as two of query, key and value: wrong where another lies idle beside it."""
    product = judge.chain.product
    assert product is not None
    tokens = judge.scores.shape[-2] if is_score else mixing.value.shape[-2]
    idle = [event for event in judge.events if _is_idle(event, judge, mixing, tokens)]
    if twice is not None and twice.operator == "mm":
        idle = [e for e in idle if e.operator == "mm" and e.reads[0] == twice.reads[0]]
        if len(idle) == 1:
            unused = idle[0].caller
            where = "" if unused is None else f"{unused.file}, line {unused.line}"
            judge.say(
                "wrong-projection" if is_score else "wrong-values",
                product.event if is_score else mixing.event,
                f"What {where} gives is never used.",
                _with(judge, mixing, idle[0], is_score=is_score),
            )
            return
    if idle:
        judge.missing.append(
            f"{_line(mixing.event)} one tensor is used as two of query, key and value, and what "
            f"{_line(idle[0]).rstrip(':')} gives is never used."
        )


def _with(judge: _Judge, mixing: Mixing, idle: Event, *, is_score: bool) -> Proof | None:
    """What was multiplied, beside the same with the tensor that is never used."""
    assert idle.output is not None
    unused = idle.output.detach().double()
    unused = unused.reshape(-1, *unused.shape[-2:])
    if is_score:
        assert judge.query is not None
        if unused.shape != judge.query.shape:
            return None
        right = judge.query @ unused.mT
        return _compared(_raw(judge), right, "query times key", "queries", "keys")
    held = mixing.weights if mixing.weights.shape == judge.weights.shape else mixing.weights.mT
    return _compared(mixing.output, held @ unused, "output", "tokens", "columns")


_ROWS_OR_COLUMNS = (
    "nothing tells whether the values lie in the rows or in the columns of this matrix. Write "
    "weights @ value."
)


def _is_idle(event: Event, judge: _Judge, mixing: Mixing, tokens: int) -> bool:
    """Whether what an operation gave could be a query, key or value, and met nothing."""
    output = event.output
    made = event.operator == "mm" or not event.reads or event.operator == "lift_fresh"
    if not made or output is None or not output.is_floating_point() or output.ndim < 2:
        return False
    if output.shape[-2] != tokens or event.place > mixing.event.place:
        return False
    written = set(event.writes)
    later = (e for e in judge.events if e.place > event.place)
    return not any(written.intersection(e.reads) and len(e.operands) > 1 for e in later)


def _raw(judge: _Judge) -> Tensor:
    assert judge.query is not None
    assert judge.key is not None
    return judge.query.double() @ judge.key.double().mT


def _right_weights(judge: _Judge, allowed: Tensor) -> Tensor:
    """What attention's weights are, under the mask that was meant."""
    product = judge.chain.product
    if product is None:
        scores = judge.scores
    elif judge.is_right_scale:
        scores = _raw(judge) * product.scale
    else:
        scores = _raw(judge) * product.left.shape[-1] ** -0.5
    shape = _shape(allowed)
    if shape.startswith(("with", "future")):
        allowed = shape_of_mask("same", scores).expand_as(scores)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=1e-4, atol=2e-5 * max(1.0, float(other.abs().max())))


def _shown(judge: _Judge, told: Told) -> Told:
    """A mistake with two matrices that prove it: the weights where they differ, else the output."""
    if told.proof is not None or judge.chain.mixing is None:
        return told
    mixing = judge.chain.mixing
    held = mixing.weights if mixing.weights.shape == judge.weights.shape else mixing.weights.mT
    right = _right_weights(judge, judge.allowed)
    proof = None
    if told.name != "values-mixed-along-wrong-axis":
        proof = _compared(held, right, "weights", "queries", "keys")
    output = right @ mixing.value if right.shape[-1] == mixing.value.shape[-2] else None
    if proof is None and output is not None:
        proof = _compared(mixing.output, output, "output", "tokens", "columns")
    if proof is not None and len(judge.told) > 1:
        proof = proof[0], proof[1], f"{proof[2]}; with all of these mistakes"
    return replace(told, proof=proof)


def _compared(did: Tensor, right: Tensor, what: str, rows: str, columns: str) -> Proof | None:
    if did.shape[0] == 1 and did.shape == right.shape:
        return compared(did[0], right[0], what, ((), rows, columns))
    return compared(did, right, what, (("sample",), rows, columns))
