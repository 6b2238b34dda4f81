"""The intention of an author as facts, to be compared with those of the code."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from regard.errors import check_whole


class Any_:
    """Any value of a fact; ``regard.ANY`` is the only one.

    Example:
        >>> import regard
        >>> regard.spec(scale=regard.ANY)
        regard.spec(scale=regard.ANY)
    """

    def __repr__(self) -> str:
        """Return it as it is written."""
        return "regard.ANY"


ANY: Final = Any_()
"""In a spec: a fact may have any value."""

MEANINGS: Final = {
    "True keeps": "keeps",
    "True hides": "hides",
    "added to the scores": "added",
    "lengths": "lengths",
}
"""The meanings of an argument that hides keys, with the short word for each."""
KINDS = ("learned", "rotary", "alibi", "table")
NORMS = ("rms", "layer", "l2")
_PAIRINGS = ("halves", "neighbours")


@dataclass(frozen=True)
class Spec:
    """The facts that an attention should have; made by ``regard.spec``, which describes them.

    Attributes:
        causal: True, False or ANY.
        window: None, keys with the query's own, (left, right), or ANY.
        prefix: None, a number or ANY.
        heads: a number or ANY.
        kv_heads: a number, ANY, or None for as many as heads.
        scale: a number, ANY, or None for 1/√head_dim.
        positions: None, ANY, a kind, or a dict with "kind".
        bias: None, "given", "learned" or ANY.
        softcap: None, a number or ANY.
        sinks: True, False or ANY.
        padding: meanings by argument, or ANY.
        documents: names of arguments, or ANY.
        qk_norm: None, "rms", "layer", "l2" or ANY.
    """

    causal: Any = ANY
    window: Any = None
    prefix: Any = None
    heads: Any = ANY
    kv_heads: Any = None
    scale: Any = None
    positions: Any = ANY
    bias: Any = None
    softcap: Any = None
    sinks: Any = False
    padding: Any = ANY
    documents: Any = ANY
    qk_norm: Any = ANY

    def named(self) -> dict[str, Any]:
        """Return the facts that are not left out, by name."""
        named: dict[str, Any] = {}
        for fact in fields(self):
            value = getattr(self, fact.name)
            if not (value is fact.default or value == fact.default):
                named[fact.name] = value
        return named

    def to_json(self) -> str:
        """Return it as a line of JSON, which ``regard check --expect`` takes."""
        return json.dumps(
            {name: "any" if value is ANY else value for name, value in self.named().items()}
        )

    def __repr__(self) -> str:
        """Return it as it is written."""
        inside = ", ".join(f"{name}={value!r}" for name, value in self.named().items())
        return f"regard.spec({inside})"

    def __str__(self) -> str:
        """Return it as a sentence, and as a line of JSON."""
        return f"{self.sentence}\n{self.to_json()}"

    @property
    def sentence(self) -> str:
        """It in words."""
        parts = [words for name, value in self.named().items() if (words := _said(name, value))]
        return f"Attention, {', '.join(parts)}." if parts else "Attention of any kind of mask."


def _said(name: str, value: Any) -> str:
    if value is ANY:
        return f"any {name.replace('_', ' ')}"
    match name:
        case "causal":
            return "causal" if value else "not causal"
        case "window":
            if isinstance(value, tuple):
                left, right = cast("tuple[int, int]", value)
                return f"a window of {left} keys before and {right} after the query's own"
            return f"a window of {value} keys"
        case "prefix":
            return f"a prefix of {value} tokens that see each other"
        case "heads":
            return "one head" if value == 1 else f"{value} heads"
        case "kv_heads":
            heads = "one head" if value == 1 else f"{value} heads"
            return f"{heads} of keys and values"
        case "scale":
            return f"scale {value:g}"
        case "positions":
            return "no positions" if value is None else f"positions: {position_words(value)}"
        case "bias":
            return f"a {value} bias"
        case "softcap":
            return f"scores capped at {value:g}"
        case "sinks":
            return "a sink beside the scores"
        case "padding":
            meanings = cast("dict[str, str]", value).items()
            return ", ".join(f"{argument}: {meaning}" for argument, meaning in meanings)
        case "documents":
            return f"documents by {' and '.join(cast('tuple[str, ...]', value))}"
        case _:
            return f"{value} norm of queries and keys"


def position_words(positions: Any) -> str:
    """Return positions, as a spec has them, in words."""
    if not isinstance(positions, Mapping):
        return str(positions or "none")
    details = dict(cast("Mapping[str, Any]", positions))
    kind = details.pop("kind")
    return " ".join([str(kind), *(f"{name} {number}" for name, number in details.items())])


def spec(
    *,
    causal: Any = ANY,
    window: Any = None,
    prefix: Any = None,
    heads: Any = ANY,
    kv_heads: Any = None,
    scale: Any = None,
    positions: Any = ANY,
    bias: Any = None,
    softcap: Any = None,
    sinks: Any = False,
    padding: Any = ANY,
    documents: Any = ANY,
    qk_norm: Any = ANY,
) -> Spec:
    """Say what an attention is meant to compute; ``check(..., expect=spec)`` compares it.

    What is left out is expected at its standard, or is free: causal, heads, positions, what
    arguments hide, and norms of queries and keys. ``regard.ANY`` frees any other one, too.

    Args:
        causal: True: no query sees a later key. False: queries see later keys.
        window: the largest number of keys that a query sees, its own included, the last one its
            own; or (left, right), the keys before and after its own. Standard: no window.
        prefix: the number of tokens at the start that see each other, while all later tokens see
            the keys up to their own. Standard: no prefix.
        heads: the number of heads of queries.
        kv_heads: that of keys and values. Standard: as many as heads.
        scale: what multiplies query · key. Standard: 1/√head_dim.
        positions: None: none are computed; "learned": added to the input; "rotary", "alibi",
            "table": a bias by distance or by pair; or a dict such as {"kind": "rotary", "base":
            10000.0, "pairing": "halves", "part": 0.5} (the share of the head's columns) and
            {"kind": "alibi", "slopes": [0.5, 0.25]}.
        bias: "given" or "learned" numbers that are added to the scores. Standard: none.
        softcap: the c of c · tanh(scores / c). Standard: none.
        sinks: True: a number beside the scores takes part in the softmax. Standard: none.
        padding: what each argument that hides keys means: {"mask": "True keeps"}, "True hides",
            "added to the scores" or "lengths".
        documents: the names of arguments that tell documents of one row apart.
        qk_norm: None, "rms", "layer" or "l2", of queries and keys.

    Returns:
        A Spec: printed, it is a sentence and a line of JSON.

    Raises:
        TypeError: a value is of another kind.
        ValueError: values contradict each other, or nothing that is known has this name.

    Example:
        >>> import regard
        >>> print(regard.spec(causal=True, window=4, heads=4))
        Attention, causal, a window of 4 keys, 4 heads.
        {"causal": true, "window": 4, "heads": 4}
    """
    expected = Spec(
        _checked_flag("causal", causal),
        _checked_window(window),
        _checked_count("prefix", prefix),
        _checked_count("heads", heads),
        _checked_count("kv_heads", kv_heads),
        _checked_number("scale", scale),
        _checked_positions(positions),
        _checked_choice("bias", bias, (None, "given", "learned")),
        _checked_number("softcap", softcap),
        _checked_flag("sinks", sinks),
        _checked_padding(padding),
        _checked_documents(documents),
        _checked_choice("qk_norm", qk_norm, (None, *NORMS)),
    )
    _check_together(expected)
    return expected


def spec_of_json(text: str) -> Spec:
    """Return a spec from a line of JSON.

    Raises:
        ValueError: it is no JSON, or no spec.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--expect {text!r} is no JSON ({error}).\n    {_EXAMPLE}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--expect is {text}; it must be an object.\n    {_EXAMPLE}")
    facts = {fact.name for fact in fields(Spec)}
    values = {str(n): ANY if v == "any" else v for n, v in cast("dict[Any, Any]", given).items()}
    if unknown := sorted(values.keys() - facts):
        raise ValueError(f"--expect names {unknown[0]}; it knows {', '.join(sorted(facts))}.")
    return spec(**values)


_EXAMPLE = """Write for example: --expect '{"causal": true, "heads": 4}'"""


def _checked_flag(name: str, value: Any) -> Any:
    if value is ANY or isinstance(value, bool):
        return value
    raise TypeError(f"{name} is {value!r}; it must be True, False or regard.ANY.")


def _checked_count(name: str, value: Any) -> Any:
    if value is ANY or (value is None and name != "heads"):
        return value
    if check_whole(name, value) < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1.")
    return check_whole(name, value)


def _checked_number(name: str, value: Any) -> Any:
    if value is ANY or value is None:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a number, None or regard.ANY.")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}; it must be a positive number.")
    return float(value)


def _checked_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value is ANY or value in allowed:
        return value
    words = ", ".join(map(repr, allowed))
    raise ValueError(f"{name} is {value!r}; it must be one of {words} or regard.ANY.")


def _checked_window(value: Any) -> Any:
    if value is None or value is ANY:
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        pair = cast("Sequence[Any]", value)
        if len(pair) != 2:
            raise ValueError(f"window is {value!r}; a pair is (left, right), keys on both sides.")
        if any(check_whole("window", side) < 0 for side in pair):
            raise ValueError(f"window is {value!r}; left and right must be at least 0.")
        return (int(pair[0]), int(pair[1]))
    if check_whole("window", value) < 1:
        raise ValueError(f"window is {value}; it counts keys, its own included: at least 1.")
    return int(value)


def _checked_positions(value: Any) -> Any:
    if value is None or value is ANY:
        return value
    if isinstance(value, str):
        return _checked_choice("positions", value, (None, *KINDS))
    if not isinstance(value, Mapping):
        raise TypeError(
            f"positions is {value!r}; it must be None, a kind or a dict.\n"
            '    Write for example: {"kind": "rotary", "base": 10000.0}'
        )
    own = {str(name): number for name, number in cast("Mapping[Any, Any]", value).items()}
    kind = own.get("kind")
    allowed = {"rotary": {"base", "pairing", "part"}, "alibi": {"slopes"}}.get(str(kind), set())
    if kind not in KINDS:
        raise ValueError(f'positions["kind"] is {kind!r}; it must be one of {", ".join(KINDS)}.')
    if unknown := sorted(own.keys() - allowed - {"kind"}):
        words = ", ".join(sorted(allowed)) or "nothing beside its kind"
        raise ValueError(f"positions has {unknown[0]!r}; {kind} positions take {words}.")
    if "pairing" in own and own["pairing"] not in _PAIRINGS:
        raise ValueError(
            f'positions["pairing"] is {own["pairing"]!r}; it must be "halves" or "neighbours".'
        )
    return own


def _checked_padding(value: Any) -> Any:
    if value is ANY:
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"padding is {value!r}; it must be a dict of meanings by argument.\n"
            '    Write for example: {"mask": "True hides"}'
        )
    own = {str(name): str(said) for name, said in cast("Mapping[Any, Any]", value).items()}
    for name, said in own.items():
        if said not in MEANINGS:
            words = ", ".join(map(repr, MEANINGS))
            raise ValueError(f"padding[{name!r}] is {said!r}; it must be one of {words}.")
    return own


def _checked_documents(value: Any) -> Any:
    if value is ANY:
        return value
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence):
        raise TypeError(f"documents is {value!r}; it must be names of arguments.")
    return tuple(str(name) for name in cast("Sequence[Any]", value))


def _check_together(expected: Spec) -> None:
    """Raise an error if facts contradict each other."""
    if expected.causal is False and isinstance(expected.window, int):
        left = expected.window - 1
        raise ValueError(
            f"causal=False and window={expected.window} contradict each other: such a window ends "
            "with the query's own key.\n"
            f"    Pass window=({left}, {left}) for keys on both sides."
        )
    if expected.causal is True and isinstance(expected.window, tuple) and expected.window[1]:
        raise ValueError(
            f"causal=True and window={expected.window} contradict each other: it has "
            f"{expected.window[1]} keys after the query's own."
        )
    if expected.causal is True and isinstance(expected.prefix, int):
        raise ValueError(
            f"causal=True and prefix={expected.prefix} contradict each other: tokens of a prefix "
            "see later ones.\n    Leave causal out."
        )
    if isinstance(expected.prefix, int) and expected.window not in (None, ANY):
        raise ValueError(f"prefix={expected.prefix} and a window are not read together.")
    both = isinstance(expected.heads, int) and isinstance(expected.kv_heads, int)
    if both and expected.heads % expected.kv_heads:
        raise ValueError(
            f"heads={expected.heads} and kv_heads={expected.kv_heads} contradict each other: each "
            "head of keys serves as many heads of queries."
        )
