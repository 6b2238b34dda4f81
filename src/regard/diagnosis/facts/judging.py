"""Facts compared with a standard, or with what was expected: each difference is a deviation."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from regard.diagnosis.expectation import ANY, KINDS, Spec, spec
from regard.diagnosis.facts.arguments import Hiding
from regard.diagnosis.facts.formula import Facts
from regard.diagnosis.facts.paths import Norm, Operation, Part, Rotation
from regard.diagnosis.facts.visible import Band

__all__ = ["Deviation", "deviations", "positions_of", "spec_of"]

_MEANINGS = {
    "True keeps": "keeps",
    "True hides": "hides",
    "added to the scores": "added",
    "lengths": "lengths",
}
_DOCUMENTS = ("documents", "starts", "resets")
_NEAR = 1e-4


@dataclass(frozen=True)
class Deviation:
    """One fact that is not what it should be.

    Attributes:
        fact: its name, as ``regard.spec`` calls it, or "heads merged", "projections", "keys".
        found: its value, in words.
        expected: what it should be.
        stage: whose line has it: "product", "scale", "mask", "softmax", "value" or "merge".
        mistake: the name of the known mistake that it is; "" for none.
        is_wrong: no published attention has it; else it is a choice that somebody may make.
        number: that is expected, of a scale.
    """

    fact: str
    found: str
    expected: str
    stage: str
    mistake: str = ""
    is_wrong: bool = False
    number: float | None = None

    def __str__(self) -> str:
        """Return it as a sentence."""
        return f"{self.fact} is {self.found}; expected is {self.expected}."


def spec_of(facts: Facts) -> Spec:
    """Return the spec that names what is free in a spec or off its standard."""
    mask = facts.mask
    pattern = None if mask is None else mask.pattern
    named: dict[str, Any] = {"heads": facts.heads} if facts.heads > 1 or facts.is_module else {}
    if isinstance(pattern, Band):
        named["causal"] = pattern.right == 0
        if pattern.left is not None and pattern.left >= 0:
            right = pattern.right
            named["window"] = pattern.left + 1 if right == 0 else (pattern.left, right or 0)
    elif pattern is not None:
        named["causal"] = pattern.is_causal
        named["window"] = ANY
    if len(set(facts.key_heads)) != facts.heads:
        named["kv_heads"] = len(set(facts.key_heads))
    if not _is_standard_scale(facts):
        one = max(facts.scale) - min(facts.scale) <= _NEAR * abs(facts.scale[0])
        named["scale"] = round(facts.scale[0], 6) if one and facts.scale[0] > 0 else ANY
    positions = positions_of(facts)
    if positions is not None:
        named["positions"] = positions if positions["kind"] in KINDS else ANY
    if facts.softcap is not None:
        named["softcap"] = round(facts.softcap, 4)
    if facts.sink:
        named["sinks"] = True
    told = {meaning: said for said, meaning in _MEANINGS.items()}
    padding = {
        hiding.argument: told[hiding.reading]
        for hiding in _hidings(facts)
        if hiding.reading in told
    }
    if padding:
        named["padding"] = padding
    documents = tuple(own.argument for own in _hidings(facts) if own.reading in _DOCUMENTS)
    if documents:
        named["documents"] = documents
    if (norm := _norm(facts.query)) is not None:
        named["qk_norm"] = norm
    return spec(**named)


def deviations(
    all_facts: Sequence[Facts], expected: Spec | None, *, is_partial: bool = False
) -> list[tuple[int, Deviation]]:
    """Return the facts that are off their standard, or not what was expected.

    Args:
        all_facts: of each attention of the code.
        expected: of each of them; where some attend to their own tokens, what is expected of masks
            and positions is expected of these alone.
        is_partial: arguments that it does not name may hide keys, too.

    Returns:
        Each deviation with the number of its attention.
    """
    used = {hiding.argument for facts in all_facts for hiding in _hidings(facts)}
    has_own = any(not facts.crosses for facts in all_facts)
    found: list[tuple[int, Deviation]] = []
    for at, facts in enumerate(all_facts):
        wanted = expected
        if expected is not None and facts.crosses and has_own and len(all_facts) > 1:
            wanted = replace(expected, causal=ANY, window=ANY, positions=ANY, documents=ANY)
        own = [*_of_scale(facts, wanted), *_of_mask(facts, wanted, used), *_of_rest(facts, wanted)]
        if is_partial:
            own = [deviation for deviation in own if deviation.expected != _NOTHING]
        found += [(at, deviation) for deviation in own]
    return found


_NOTHING = "it hides nothing"


def _is_standard_scale(facts: Facts) -> bool:
    standard = facts.head_dim**-0.5
    return all(math.isclose(scale, standard, rel_tol=_NEAR) for scale in facts.scale)


def _of_scale(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    wanted = None if expected is None else expected.scale
    if wanted is ANY or (expected is None and _norm(facts.query) is not None):
        return  # normed queries and keys need another scale
    standard = facts.head_dim**-0.5
    number = standard if wanted is None else float(wanted)
    if all(math.isclose(scale, number, rel_tol=_NEAR) for scale in facts.scale):
        return
    scale = facts.scale[0]
    words = f"{scale:.4g}"
    if max(facts.scale) - min(facts.scale) > _NEAR * abs(scale):
        words = f"of each head its own, {', '.join(f'{own:.4g}' for own in facts.scale[:4])}"
    mistake = "wrong-scale"
    if math.isclose(scale, 1.0, rel_tol=_NEAR):
        mistake = "no-scale"
    elif math.isclose(scale, (facts.heads * facts.head_dim) ** -0.5, rel_tol=_NEAR):
        mistake = "scale-by-embed-dim"
    text = f"{number:.4g}" if wanted is not None else f"1/√{facts.head_dim} = {standard:.4g}"
    is_wrong = min(facts.scale) <= 0
    yield Deviation("scale", words, text, "scale", mistake, is_wrong, number)


def _of_mask(facts: Facts, expected: Spec | None, used: Collection[str]) -> Iterator[Deviation]:
    mask = facts.mask
    assert mask is not None
    pattern = mask.pattern
    yield from _of_pattern(facts, expected)
    wanted = None if expected is None else expected.window
    if expected is not None and wanted is not ANY:
        found = _window(facts)
        if found != (None if wanted is None else wanted) and not _is_odd(pattern):
            text = "no window" if wanted is None else f"a window of {wanted}"
            yield Deviation("window", str(pattern), text, "mask")
    yield from _of_arguments(facts, expected, used)
    if facts.bias is not None and facts.bias.kind == "finite":
        number = facts.bias.numbers[0]
        mistake = "mask-added-as-numbers" if abs(number) <= 1.01 else "mask-fill-value"
        found = f"{number:.4g} added to some scores of each row, which hides nothing"
        yield Deviation("mask", found, "-inf where a key is hidden", "mask", mistake)


def _is_odd(pattern: object) -> bool:
    """Return True for a band that leaves the query's own key out, or has one key too many."""
    if not isinstance(pattern, Band):
        return False
    left, right = pattern.left, pattern.right
    return (left is not None and left < 0) or (right is not None and right < 0)


def _window(facts: Facts) -> object:
    pattern = None if facts.mask is None else facts.mask.pattern
    if isinstance(pattern, Band):
        if pattern.left is None:
            return None
        right = pattern.right
        return pattern.left + 1 if right == 0 else (pattern.left, right or 0)
    return str(pattern)


def _of_pattern(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    mask = facts.mask
    assert mask is not None
    pattern = mask.pattern
    left, right = (pattern.left, pattern.right) if isinstance(pattern, Band) else (None, None)
    wanted = ANY if expected is None else expected.causal
    strict = right == -1 and left is None
    if isinstance(pattern, Band) and left is not None and left < 0:
        yield Deviation(
            "mask", str(pattern), "keys up to the query's own", "mask", "mask-inverted", True
        )
    elif strict or (right == 1 and left is None):
        found = str(pattern)
        if strict:
            found = "causal without the query's own key"
        yield Deviation("mask", found, "causal with the query's own key", "mask", _OFF)
    elif wanted is True and not pattern.is_causal:
        name = "mask-inverted" if left == 0 and right is None else "not-causal"
        name = _OFF if right in (1, -1) else name
        yield Deviation("causal", str(pattern), "causal", "mask", name)
    elif wanted is False and pattern.is_causal:
        yield Deviation("causal", str(pattern), "not causal", "mask")
    elif expected is None and isinstance(pattern, Band) and left == 0 and right is None:
        yield Deviation("mask", str(pattern), "keys up to the query's own", "mask", "mask-inverted")


_OFF = "causal-off-by-one"


def _hidings(facts: Facts) -> list[Hiding]:
    own = [] if facts.mask is None else [*facts.mask.hidings]
    for mask in facts.masked.values():
        own += [hiding for hiding in mask.hidings if hiding not in own]
    return own


def _of_arguments(
    facts: Facts, expected: Spec | None, used: Collection[str]
) -> Iterator[Deviation]:
    """Yield what arguments hide and should not, and the other way round."""
    found: dict[str, Hiding] = {hiding.argument: hiding for hiding in _hidings(facts)}
    meant: Mapping[str, str] = {}
    documents: tuple[str, ...] = ()
    if expected is not None and expected.documents is not ANY:
        documents = expected.documents
    if expected is not None and expected.padding is not ANY:
        meant = expected.padding
        for argument in found.keys() - meant.keys() - {*documents} - facts.of_pairs:
            yield Deviation(argument, str(found[argument]), _NOTHING, f"mask {argument}")
    for argument in facts.masked:
        if argument not in used:
            wanted = meant.get(argument, "it hides keys")
            stage = f"mask {argument}"
            yield Deviation(argument, "without effect", wanted, stage, "mask-unused")
    for argument, wanted in meant.items():
        fits = facts.consistent.get(argument)
        is_known = argument not in (*used, *facts.masked) and fits is not None
        if is_known and fits is not None and _MEANINGS[wanted] not in fits:
            words = "it lets keys through that it should hide"
            yield Deviation(argument, words, wanted, "mask", "mask-unused")
    for argument, mask in facts.masked.items():
        same = facts.mask is not None and mask.pattern == facts.mask.pattern
        if not same and argument in facts.of_keys:
            text = f"{mask.pattern} where {argument} is passed"
            yield Deviation("mask", text, str(facts.mask), "mask", "not-causal")
    for argument, hiding in found.items():
        if not hiding.is_right:
            yield Deviation(
                argument,
                str(hiding),
                "it hides keys",
                f"mask {argument}",
                _mistake_of(hiding),
                is_wrong=True,
            )
            continue
        wanted = meant.get(argument)
        if wanted is not None and _MEANINGS[wanted] != hiding.reading:
            turned = {_MEANINGS[wanted], hiding.reading} == {"keeps", "hides"}
            mistake = "mask-inverted" if turned else ""
            yield Deviation(argument, str(hiding), wanted, f"mask {argument}", mistake)
    if documents and not any(own.reading in _DOCUMENTS for own in found.values()):
        names = " and ".join(documents)
        yield Deviation("documents", "not told apart", f"told apart by {names}", "mask")


def _mistake_of(hiding: Hiding) -> str:
    if "queries" in hiding.reading:
        return "padding-on-queries"
    if "first sample" in hiding.reading:
        return "mask-of-another-sample"
    return ""


def _of_rest(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    if facts.is_merged is False:
        yield Deviation(
            "heads merged",
            "parts of several tokens side by side",
            "the heads of one token side by side",
            "merge",
            "heads-merged-without-transpose",
            is_wrong=True,
        )
    yield from _of_heads(facts, expected)
    own = positions_of(facts)
    if (
        own is not None
        and own["kind"] not in KINDS
        and (expected is None or expected.positions is ANY)
    ):
        is_bias = own["kind"].startswith("a bias")
        text = "one that falls" if is_bias else "the same for queries and keys"
        is_wrong = facts.is_module and not is_bias
        yield Deviation("positions", _told(own), text, "product", is_wrong=is_wrong)
    if expected is None:
        return
    if expected.softcap is not ANY and not _near(facts.softcap, expected.softcap):
        found = "none" if facts.softcap is None else f"{facts.softcap:.4g}"
        text = "none" if expected.softcap is None else f"{expected.softcap:g}"
        yield Deviation("softcap", found, text, "scale")
    if expected.bias not in (None, ANY) and facts.bias is None:
        yield Deviation("bias", "none", f"a {expected.bias} one", "scale")
    if expected.sinks is not ANY and bool(facts.sink) != expected.sinks:
        words = ("a number beside the scores", "none")
        found, text = words if facts.sink else words[::-1]
        yield Deviation("sinks", found, text, "softmax")
    if expected.qk_norm is not ANY and _norm(facts.query) != expected.qk_norm:
        yield Deviation("qk_norm", str(_norm(facts.query)), str(expected.qk_norm), "product")
    yield from _of_positions(facts, expected)


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-3)


def _of_heads(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    kinds = len(set(facts.key_heads))
    if expected is not None and expected.heads is not ANY and expected.heads != facts.heads:
        yield Deviation("heads", str(facts.heads), str(expected.heads), "product")
    if expected is not None and expected.kv_heads is not ANY:
        wanted = facts.heads if expected.kv_heads is None else expected.kv_heads
        if kinds != wanted and "heads" not in facts.shares:
            yield Deviation("kv_heads", str(kinds), str(wanted), "product")
    if 1 < kinds < facts.heads:
        group = facts.heads // kinds
        if facts.key_heads != tuple(head // group for head in range(facts.heads)):
            found = f"heads meet key heads {' '.join(map(str, facts.key_heads))}"
            text = " ".join(str(head // group) for head in range(facts.heads))
            name = "kv-heads-repeated-in-wrong-order"
            yield Deviation("kv_heads", found, text, "keys", name)
    if len(set(facts.value_heads)) == kinds and facts.value_heads != facts.key_heads:
        found = f"heads weigh value heads {' '.join(map(str, facts.value_heads))}"
        text = " ".join(map(str, facts.key_heads))
        yield Deviation("values", found, text, "value", "wrong-values", is_wrong=True)
    if "order" in facts.shares:
        text = "what each token attends to, in its own row"
        yield Deviation("output", "in another order", text, "value", is_wrong=True)
    if "returned" in facts.shares:
        text = "those that met the values"
        yield Deviation("returned weights", "other weights", text, "softmax", is_wrong=True)
    if "value input" in facts.shares:
        found = "the input itself, not projected"
        yield Deviation("value", found, "a projection of its own", "value", "wrong-values")
    if "heads" in facts.shares or "pieces" in facts.shares:
        found, text = "the same for all heads", "of each head its own"
        yield Deviation("projections", found, text, "query layer", "heads-share-projection")
    for name in ("query", "key", "value"):
        for other in ("query", "key", "value"):
            if f"{name} is {other}" in facts.shares:
                mistake = "wrong-values" if name == "value" else "wrong-projection"
                stage = "value" if name == "value" else "product"
                yield Deviation(name, f"the {other}", "itself", stage, mistake, is_wrong=True)
    for pair, mistake in (
        ("query key", "wrong-projection"),
        ("query value", "wrong-values"),
        ("key value", "wrong-values"),
        ("query key layer", "wrong-projection"),
        ("query value layer", "wrong-projection"),
        ("key value layer", "wrong-projection"),
    ):
        if pair in facts.shares:
            one, other, *_ = pair.split()
            stage = f"{other} layer" if other == "key" or pair.endswith("layer") else other
            yield Deviation(other, f"the {one}", "a projection of its own", stage, mistake)


def _of_positions(facts: Facts, expected: Spec) -> Iterator[Deviation]:
    wanted = expected.positions
    if wanted is ANY:
        return
    found = positions_of(facts)
    if isinstance(wanted, str):
        wanted = {"kind": wanted}
    own = None if found is None else dict(found)
    if wanted is None and own is not None and own["kind"] == "learned":
        return  # what is added to the input is not part of the attention
    if wanted is None or own is None:
        unknown = wanted is not None and wanted["kind"] == "learned" and _unknown_added(facts)
        if wanted is not own and not unknown:
            words = ["none" if own is None else _told(own), "none"]
            words[1] = "none" if wanted is None else _told(wanted)
            yield Deviation("positions", words[0], words[1], "product")
        return
    for name, value in wanted.items():
        if not _alike(own.get(name), value):
            yield Deviation("positions", _told(own), _told(wanted), "product")
            return


def _unknown_added(facts: Facts) -> bool:
    return facts.adds_positions is None


def _told(value: Mapping[str, Any]) -> str:
    rest = " ".join(f"{name} {own}" for name, own in value.items() if name != "kind")
    return f"{value['kind']} {rest}".strip()


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        some, others = cast("list[Any]", one), cast("list[Any]", other)
        return len(some) == len(others) and all(map(_alike, some, others))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-3)
    return one == other


def _norm(operations: tuple[Operation, ...]) -> str | None:
    for own in operations:
        if isinstance(own, Norm):
            return own.kind
        if isinstance(own, Part):
            for path in own.paths:
                if (kind := _norm(path.operations or ())) is not None:
                    return kind
    return None


def _rotation(operations: tuple[Operation, ...], width: int) -> tuple[Rotation, float] | None:
    """Return a rotation and the share of the columns that it turns."""
    for own in operations:
        if isinstance(own, Rotation):
            return own, own.part / width
        if isinstance(own, Part):
            for path in own.paths:
                if (found := _rotation(path.operations or (), width)) is not None:
                    return found
    return None


def positions_of(facts: Facts) -> dict[str, Any] | None:
    """Return the positions that the attention computes, as a spec has them."""
    query, key = (_rotation(own, facts.head_dim) for own in (facts.query, facts.key))
    if query is not None or key is not None:
        if query is None or key is None:
            alone = "queries" if key is None else "keys"
            return {"kind": f"rotary of {alone} alone"}
        rotation, part = query
        if rotation.angles != key[0].angles and not _alike(rotation.angles, key[0].angles):
            return {"kind": "rotary with other angles for queries than for keys"}
        base = rotation.base
        found: dict[str, Any] = {"kind": "rotary"}
        if base is not None:
            found["base"] = float(f"{base:.5g}")
        return {**found, "pairing": rotation.pairing, "part": part}
    if facts.bias is not None and facts.bias.kind == "alibi" and min(facts.bias.numbers) < 0:
        return {"kind": "a bias that grows with distance"}
    if facts.bias is not None and facts.bias.kind == "alibi":
        return {"kind": "alibi", "slopes": [float(f"{n:.6g}") for n in facts.bias.numbers]}
    if facts.bias is not None and facts.bias.kind in ("distance", "table"):
        return {"kind": "table"}
    return {"kind": "learned"} if facts.adds_positions else None
