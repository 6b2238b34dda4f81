"""Facts compared with a standard, or with what was expected: each difference is a deviation."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from regard.diagnosis.expectation import ANY, KINDS, MEANINGS, NORMS, Spec, position_words, spec
from regard.diagnosis.facts.arguments import Hiding
from regard.diagnosis.facts.formula import Facts, mistake_of_scale
from regard.diagnosis.facts.paths import Norm, Operation, Part, Rotation
from regard.diagnosis.facts.surroundings import Surroundings
from regard.diagnosis.facts.visible import Band, Prefix, Table

_DOCUMENTS = ("documents", "starts", "resets")
_NOTHING = "it hides nothing"
_OFF_BY_ONE = "causal-off-by-one"
_SAME_START = 0.01
_Kind = TypeVar("_Kind", Norm, Rotation)


@dataclass(frozen=True)
class Deviation:
    """One fact that is not what it should be.

    Attributes:
        fact: its name, as ``regard.spec`` calls it, or "heads merged", "projections", "keys".
        actual: its value, in words.
        expected: the value that it should have, in words.
        stage: the stage whose line has it: "product", "scale", "mask", "softmax", "value", "merge".
        mistake: the name of the known mistake that it is; "" for none.
        is_wrong: no published attention has it; else it is a choice that somebody may make.
        number: the expected scale; None for other facts.
        is_of_projection: it is wrong if a projection of its own is there, and idle.
    """

    fact: str
    actual: str
    expected: str
    stage: str
    mistake: str = ""
    is_wrong: bool = False
    number: float | None = None
    is_of_projection: bool = False


def spec_of(facts: Facts) -> Spec:
    """Return the spec that names all facts that a spec leaves free or that are off its standard."""
    pattern = None if facts.mask is None else facts.mask.pattern
    has_heads = facts.num_heads > 1 or facts.around.is_module
    named: dict[str, Any] = {"heads": facts.num_heads} if has_heads else {}
    if isinstance(pattern, Band):
        named["causal"] = pattern.right == 0
        if pattern.left is not None and pattern.left >= 0:
            lacks_own_key = pattern.right is not None and pattern.right < 0
            named["window"] = ANY if lacks_own_key else _band_window(pattern)
    elif isinstance(pattern, Prefix):
        named["prefix"] = pattern.length
    elif pattern is not None:
        named["causal"] = pattern.is_causal
        named["window"] = ANY
    if facts.num_kv_heads != facts.num_heads:
        named["kv_heads"] = facts.num_kv_heads
    if not facts.has_scale(facts.standard_scale):
        is_number = facts.has_one_scale and facts.scale[0] > 0
        named["scale"] = round(facts.scale[0], 6) if is_number else ANY
    positions = positions_of(facts)
    if positions is not None:
        named["positions"] = positions if positions["kind"] in KINDS else ANY
    if facts.softcap is not None:
        named["softcap"] = round(facts.softcap, 4)
    if facts.sink:
        named["sinks"] = True
    meanings = {reading: meaning for meaning, reading in MEANINGS.items()}
    padding = {
        hiding.argument: meanings[hiding.reading]
        for hiding in facts.hidings
        if hiding.reading in meanings
    }
    if padding:
        named["padding"] = padding
    documents = tuple(h.argument for h in facts.hidings if h.reading in _DOCUMENTS)
    if documents:
        named["documents"] = documents
    if (norm := norm_of(facts)) is not None:
        named["qk_norm"] = norm if norm in NORMS else ANY
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
        Each deviation with the index of its attention.
    """
    used = {hiding.argument for facts in all_facts for hiding in facts.hidings}
    has_self_attention = any(not facts.around.crosses for facts in all_facts)
    indexed: list[tuple[int, Deviation]] = []
    for index, facts in enumerate(all_facts):
        wanted = expected
        if wanted is not None and facts.around.crosses and has_self_attention:
            wanted = replace(wanted, causal=ANY, window=ANY, positions=ANY, documents=ANY)
        indexed += [
            (index, deviation)
            for deviation in _deviations(facts, wanted, used)
            if not is_partial or deviation.expected != _NOTHING
        ]
    return indexed


def _deviations(facts: Facts, expected: Spec | None, used: Collection[str]) -> Iterator[Deviation]:
    yield from _scale_deviations(facts, expected)
    yield from _pattern_deviations(facts, expected)
    yield from _argument_deviations(facts, expected, used)
    yield from _hiding_deviations(facts, expected)
    yield from _bias_deviations(facts, expected)
    yield from _head_deviations(facts, expected)
    yield from _surrounding_deviations(facts.around, facts.lines)
    yield from _position_deviations(facts, expected)
    if expected is not None:
        yield from _other_deviations(facts, expected)


def _scale_deviations(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    wanted = None if expected is None else expected.scale
    if wanted is ANY or (expected is None and norm_of(facts) is not None):
        return  # normed queries and keys need another scale
    standard = facts.standard_scale
    number = standard if wanted is None else float(wanted)
    if facts.has_scale(number):
        return
    words = f"{facts.scale[0]:.4g}"
    if not facts.has_one_scale:
        words = f"of each head its own, {', '.join(f'{scale:.4g}' for scale in facts.scale[:4])}"
    embed_dims = facts.num_heads * facts.head_dim, facts.around.input_dim
    mistake = mistake_of_scale(facts.scale, embed_dims)
    text = f"{number:.4g}"
    if wanted is None and not facts.has_given_scores:
        text = f"1/√{facts.head_dim} = {standard:.4g}"
    is_wrong = min(facts.scale) <= 0
    yield Deviation("scale", words, text, "scale", mistake, is_wrong, number)


def _pattern_deviations(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    assert facts.mask is not None
    pattern = facts.mask.pattern
    left, right = (pattern.left, pattern.right) if isinstance(pattern, Band) else (None, None)
    causal = ANY if expected is None else expected.causal
    turned = isinstance(pattern, Band) and left == 0 and right is None
    if left is not None and left < 0:
        expected_keys = "keys up to the query's own"
        stage = "mask inverted"
        yield Deviation("mask", str(pattern), expected_keys, stage, "mask-inverted", True)
    elif right in (1, -1) and left is None:
        words = "causal without the query's own key" if right == -1 else str(pattern)
        expected_keys = "causal with the query's own key"
        yield Deviation("mask", words, expected_keys, "mask right", _OFF_BY_ONE)
    elif right is not None and right < 0:
        yield Deviation("mask", str(pattern), "keys up to the query's own", "mask right")
    elif causal is True and not pattern.is_causal:
        mistake = "mask-inverted" if turned else "not-causal"
        mistake = _OFF_BY_ONE if right in (1, -1) else mistake
        stage = "mask inverted" if turned else "mask right"
        yield Deviation("causal", str(pattern), "causal", stage, mistake)
    elif causal is False and pattern.is_causal:
        yield Deviation("causal", str(pattern), "not causal", "mask")
    elif expected is None and isinstance(pattern, Table):
        yield Deviation("mask", str(pattern), "a rule of positions, such as a window", "mask")
    elif turned and (expected is None or expected.window is not ANY):
        text, stage = "keys up to the query's own", "mask inverted"
        yield Deviation("mask", str(pattern), text, stage, "mask-inverted")
    if expected is None:
        return
    prefix = pattern.length if isinstance(pattern, Prefix) else None
    if expected.prefix not in (ANY, prefix):
        text = "no prefix" if expected.prefix is None else f"a prefix of {expected.prefix} tokens"
        yield Deviation("prefix", str(pattern), text, "mask")
    if expected.window is ANY or prefix is not None or turned:
        return
    lacks_own_key = (left is not None and left < 0) or (right is not None and right < 0)
    window = _band_window(pattern) if isinstance(pattern, Band) else str(pattern)
    if window != expected.window and not lacks_own_key:
        text = "no window" if expected.window is None else f"a window of {expected.window}"
        window = cast("int | tuple[int, int] | None", expected.window)
        has_same_left = isinstance(window, tuple) and window[0] == left
        stage = "mask right" if has_same_left else "mask left"
        yield Deviation("window", str(pattern), text, stage)


def _band_window(band: Band) -> int | tuple[int, int] | None:
    """Return the window of a band as a spec has it."""
    if band.left is None:
        return None
    return band.left + 1 if band.right == 0 else (band.left, band.right or 0)


def _argument_deviations(
    facts: Facts, expected: Spec | None, used: Collection[str]
) -> Iterator[Deviation]:
    """Yield the arguments that hide nothing where they should, or keys that they should not."""
    hidings = {hiding.argument: hiding for hiding in facts.hidings}
    padding = _padding_of(expected)
    documents: tuple[str, ...] = ()
    if expected is not None and expected.documents is not ANY:
        documents = expected.documents
    if expected is not None and expected.padding is not ANY:
        pair_masks = facts.masked.keys() - facts.key_masks
        for argument in hidings.keys() - padding.keys() - {*documents} - pair_masks:
            yield Deviation(argument, str(hidings[argument]), _NOTHING, f"mask {argument}")
    for argument, mask in facts.masked.items():
        if argument not in used and facts.mask is not None and mask.pattern == facts.mask.pattern:
            meaning = padding.get(argument, "it hides keys")
            stage = f"mask {argument}"
            yield Deviation(argument, "without effect", meaning, stage, "mask-unused")
    for argument, meaning in padding.items():
        consistent = facts.consistent_readings.get(argument)
        is_unused = argument not in (*used, *facts.masked)
        if is_unused and consistent is not None and MEANINGS[meaning] not in consistent:
            words = "it lets keys through that it should hide"
            yield Deviation(argument, words, meaning, "mask", "mask-unused")
    for argument, mask in facts.masked.items():
        is_kept = facts.mask is not None and mask.pattern == facts.mask.pattern
        if not is_kept and argument in facts.key_masks:
            words = f"{mask.pattern} where {argument} is passed"
            yield Deviation("mask", words, str(facts.mask), "mask", "not-causal")
    if documents and not any(hiding.reading in _DOCUMENTS for hiding in hidings.values()):
        names = " and ".join(documents)
        yield Deviation("documents", "not told apart", f"told apart by {names}", "mask")


def _hiding_deviations(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    """Yield the arguments that hide other keys than they should."""
    padding = _padding_of(expected)
    for hiding in {hiding.argument: hiding for hiding in facts.hidings}.values():
        argument, stage = hiding.argument, f"mask {hiding.argument}"
        meaning = padding.get(argument)
        if not hiding.is_right:
            mistake = _mistake_of(hiding)
            yield Deviation(argument, str(hiding), "it hides keys", stage, mistake, is_wrong=True)
        elif meaning is not None and MEANINGS[meaning] != hiding.reading:
            is_inverted = {MEANINGS[meaning], hiding.reading} == {"keeps", "hides"}
            mistake = "mask-inverted" if is_inverted else ""
            stage = f"{stage} inverted" if is_inverted else stage
            yield Deviation(argument, str(hiding), meaning, stage, mistake)


def _padding_of(expected: Spec | None) -> Mapping[str, str]:
    return {} if expected is None or expected.padding is ANY else expected.padding


def _mistake_of(hiding: Hiding) -> str:
    if "queries" in hiding.reading:
        return "padding-on-queries"
    if "sample" in hiding.reading:
        return "mask-of-another-sample"
    return ""


def _bias_deviations(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    if facts.bias is not None and facts.bias.kind == "finite":
        number = facts.bias.numbers[0]
        mistake = "mask-added-as-numbers" if abs(number) <= 1.01 else "mask-fill-value"
        words = f"{number:.4g} added to some scores of each row, which hides nothing"
        yield Deviation("mask", words, "-inf where a key is hidden", "added mask", mistake)
    if expected is not None and expected.bias not in (None, ANY) and facts.bias is None:
        yield Deviation("bias", "none", f"a {expected.bias} one", "scale")


def _head_deviations(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    num_heads, num_kv_heads = facts.num_heads, facts.num_kv_heads
    if expected is not None and expected.heads not in (ANY, num_heads):
        yield Deviation("heads", str(num_heads), str(expected.heads), "product")
    if expected is not None and expected.kv_heads is not ANY:
        wanted = num_heads if expected.kv_heads is None else expected.kv_heads
        if num_kv_heads != wanted and not facts.around.has_equal_heads:
            yield Deviation("kv_heads", str(num_kv_heads), str(wanted), "product")
    group = num_heads // num_kv_heads
    in_order = tuple(head // group for head in range(num_heads))
    if 1 < num_kv_heads < num_heads and facts.key_heads != in_order:
        words = f"heads meet key heads {' '.join(map(str, facts.key_heads))}"
        text = " ".join(map(str, in_order))
        yield Deviation("kv_heads", words, text, "keys", "kv-heads-repeated-in-wrong-order")
    if any(isinstance(operation, Rotation) for operation in facts.value):
        yield Deviation(
            "values", "rotated by position", "the same at each position", "value rotation"
        )
    value_heads = facts.around.value_heads
    if len(set(value_heads)) == num_kv_heads and value_heads != facts.key_heads:
        words = f"heads weigh value heads {' '.join(map(str, value_heads))}"
        text = " ".join(map(str, facts.key_heads))
        is_repeated = 1 < num_kv_heads < num_heads and value_heads != in_order
        mistake = "kv-heads-repeated-in-wrong-order" if is_repeated else "wrong-values"
        yield Deviation("values", words, text, "values", mistake, is_wrong=True)


def _surrounding_deviations(around: Surroundings, lines: Mapping[str, str]) -> Iterator[Deviation]:
    if around.is_merged is False:
        words, text = "parts of several tokens side by side", "the heads of one token side by side"
        mistake = "heads-merged-without-transpose"
        yield Deviation("heads merged", words, text, "merge", mistake, is_wrong=True)
    if around.keeps_order is False:
        text = "what each token attends to, in its own row"
        yield Deviation("output", "in another order", text, "value", is_wrong=True)
    if around.returns_other_weights:
        text = "those that met the values"
        yield Deviation("returned weights", "other weights", text, "softmax", is_wrong=True)
    if around.value_is_input:
        words, text = "the input itself, not projected", "a projection of its own"
        yield Deviation("value", words, text, "value", "wrong-values", is_of_projection=True)
    if around.has_equal_heads or around.projects_pieces:
        words, text = "the same for all heads", "of each head its own"
        yield Deviation("projections", words, text, "query layer", "heads-share-projection")
    for role, argument in around.exchanged.items():
        stage, mistake = f"{role} layer", "wrong-projection"
        if role == "value":
            mistake = "wrong-values"
        yield Deviation(role, f"the {argument}", "itself", stage, mistake, is_wrong=True)
    text = "a projection of its own"
    for first, second in sorted(around.same_tensors):
        stage, mistake = "product", "wrong-projection"
        if second == "value":
            stage, mistake = "value", "wrong-values"
        if lines.get(f"{first} layer") != lines.get(f"{second} layer"):  # it is called again
            stage, mistake = f"{second} layer", "wrong-projection"
        yield Deviation(second, f"the {first}", text, stage, mistake, is_of_projection=True)


def _position_deviations(facts: Facts, expected: Spec | None) -> Iterator[Deviation]:
    positions, added = positions_of(facts), facts.added_positions
    is_learned = positions is not None and positions["kind"] == "learned"
    is_free = expected is not None and expected.positions in (None, ANY)
    if is_learned and added is not None and added.equal is not None and not is_free:
        first, second = added.equal
        words = f"added to the input, the same for tokens {first} and {second}"
        yield Deviation("positions", words, "another one for each token", "product")
    if expected is None or expected.positions is ANY:
        if positions is not None and positions["kind"] not in KINDS:
            is_bias = positions["kind"].startswith("a bias")
            text = "one that falls" if is_bias else "the same for queries and keys"
            is_wrong = facts.around.is_module and not is_bias
            words = position_words(positions)
            yield Deviation("positions", words, text, "positions", is_wrong=is_wrong)
        return
    wanted = expected.positions
    if isinstance(wanted, str):
        wanted = {"kind": wanted}
    kind = None if positions is None else positions["kind"]
    wanted_kind = None if wanted is None else wanted["kind"]
    # Positions that are added to the input are no part of the attention.
    is_free = wanted is None and is_learned
    is_unknown = kind is None and (added is None or added.kind == "mixed")
    is_unknown &= wanted_kind == "learned"
    is_same = wanted is positions is None or (
        wanted is not None
        and positions is not None
        and all(_is_near(positions.get(name), value) for name, value in wanted.items())
    )
    if not (is_free or is_unknown or is_same):
        words, text = position_words(positions), position_words(wanted)
        mistake = "no-positions" if has_no_positions(facts) else ""
        yield Deviation("positions", words, text, "positions", mistake)


def _other_deviations(facts: Facts, expected: Spec) -> Iterator[Deviation]:
    if expected.softcap is not ANY and not _is_near(facts.softcap, expected.softcap):
        words = "none" if facts.softcap is None else f"{facts.softcap:.4g}"
        text = "none" if expected.softcap is None else f"{expected.softcap:g}"
        yield Deviation("softcap", words, text, "softcap")
    if expected.sinks is not ANY and bool(facts.sink) != expected.sinks:
        words, text = "a number beside the scores", "none"
        if not facts.sink:
            words, text = text, words
        yield Deviation("sinks", words, text, "softmax")
    norm = norm_of(facts)
    if expected.qk_norm not in (ANY, norm):
        yield Deviation("qk_norm", str(norm), str(expected.qk_norm), "norm")


def _is_near(first: Any, second: Any) -> bool:
    """Return True for equal values, or numbers that differ by less than 0.1 percent."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        firsts, seconds = cast("list[Any]", first), cast("list[Any]", second)
        return len(firsts) == len(seconds) and all(map(_is_near, firsts, seconds))
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-3)
    return first == second


def _flat(operations: tuple[Operation, ...]) -> Iterator[Operation]:
    """Yield operations, and those of the parts of the columns that have operations of their own."""
    for operation in operations:
        yield operation
        if isinstance(operation, Part):
            for path in operation.paths:
                yield from _flat(path.operations or ())


def first_of(kind: type[_Kind], facts: Facts) -> dict[str, _Kind]:
    """Return the first operation of a kind on query, key and value, as far as they have one."""
    roles = {"query": facts.query, "key": facts.key, "value": facts.value}
    firsts = {
        role: next((each for each in _flat(operations) if isinstance(each, kind)), None)
        for role, operations in roles.items()
    }
    return {role: first for role, first in firsts.items() if first is not None}


def norm_of(facts: Facts) -> str | None:
    """Return the norm of queries and keys, as a spec has it; None for none."""
    norms = first_of(Norm, facts)
    query, key = (norms[role].kind if role in norms else None for role in ("query", "key"))
    if query == key:
        return query
    return " and ".join(
        f"{norm} of {role}" for norm, role in ((query, "queries"), (key, "keys")) if norm
    ) + (" alone" if None in (query, key) else "")


def _turn_the_same_columns(query: Rotation, key: Rotation) -> bool:
    """Return False if a pair of columns is turned otherwise in keys than in queries."""
    if query.columns is None or key.columns is None:
        return True
    first, second = (
        dict(zip(turn.columns or (), turn.angles, strict=True)) for turn in (query, key)
    )
    return first.keys() == second.keys() and _is_near(
        tuple(first.values()), tuple(second[pair] for pair in first)
    )


def positions_of(facts: Facts) -> dict[str, Any] | None:
    """Return the positions that an attention computes, as a spec has them; None for none."""
    turns = first_of(Rotation, facts)
    query, key = turns.get("query"), turns.get("key")
    if query is not None and key is not None:
        if not _is_near(query.angles, key.angles):
            return {"kind": "rotary with other angles for queries than for keys"}
        if not _turn_the_same_columns(query, key):
            return {"kind": "rotary in other columns of queries than of keys"}
        if not facts.around.crosses and abs(query.start - key.start) > _SAME_START:
            starts = f"queries from {query.start:g} on and keys from {key.start:g} on"
            return {"kind": f"rotary, which counts {starts}"}
        base = {} if query.base is None else {"base": float(f"{query.base:.5g}")}
        part = query.part / facts.head_dim
        return {"kind": "rotary", **base, "pairing": query.pairing, "part": part}
    if query is not None or key is not None:
        return {"kind": f"rotary of {'queries' if key is None else 'keys'} alone"}
    kind = None if facts.bias is None else facts.bias.kind
    if facts.bias is not None and kind == "alibi":
        if min(facts.bias.numbers) < 0:
            return {"kind": "a bias that grows with distance"}
        return {"kind": "alibi", "slopes": [float(f"{n:.6g}") for n in facts.bias.numbers]}
    if kind == "table":
        return {"kind": "table"}
    added = facts.added_positions
    return {"kind": "learned"} if added is not None and added.kind == "added" else None


def has_no_positions(facts: Facts) -> bool:
    """Return True if tokens in another order give the same outputs in that order."""
    added = facts.added_positions
    is_level = added is not None and added.kind == "none" and positions_of(facts) is None
    return is_level and str(facts.mask) == "every key"
