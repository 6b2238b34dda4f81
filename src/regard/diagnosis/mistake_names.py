"""Which mistakes a guess stands for, by where it differs from what is right."""

from regard.diagnosis.reference_attention import Guess, Material

__all__ = ["names_of"]

_PLAIN = {
    "merge": "heads-merged-without-transpose",
    "axis": "softmax-wrong-axis",
    "product": "keys-not-transposed",
    "mix": "values-mixed-along-wrong-axis",
    "repeat": "kv-heads-repeated-in-wrong-order",
}
_SPLITS = {"view": "heads-split-without-transpose", "exchanged": "heads-and-tokens-exchanged"}
_GIVEN = {
    "inverted": "mask-inverted",
    "queries": "padding-on-queries",
    "unused": "mask-unused",
    "after": "mask-after-softmax",
    "added": "mask-added-as-numbers",
    "added_inverted": "mask-added-as-numbers",
    "filled_with_0": "mask-fill-value",
    "first_sample": "mask-of-another-sample",
    "repeated": "mask-of-another-sample",
    "over_heads": "mask-of-another-sample",
}


def names_of(material: Material, guess: Guess, right: Guess) -> list[str]:
    """The mistakes, by their names in the catalogue.

    Args:
        material: what the guess was made of.
        guess: what does the same as the code.
        right: what the code should do.
    """
    names: list[str] = []
    for field in guess.differs(right):
        match field:
            case "scale":
                names.append(_scale_name(material, guess.scale))
            case "split":
                names.append(_SPLITS[guess.split])
            case "parts":
                names += _part_names(guess, right)
            case "mask":
                names += _mask_names(guess.mask)
            case "factor":
                names.append("wrong-scale")
            case "given":
                names.append(_GIVEN[guess.given])
            case _:
                names.append(_PLAIN[field])
    if guess.factor != right.factor and "no-scale" in names:
        names.remove("no-scale")  # the scale is there, behind the softmax
    return list(dict.fromkeys(names))


def _scale_name(material: Material, scale: float | None) -> str:
    tensors = material.tensors
    widths = {tensors["q"].shape[-1], tensors.get("x", tensors["q"]).shape[-1]}
    if scale is None or abs(scale - 1) < 1e-3:
        return "no-scale"
    near = any(abs(scale * width**0.5 - 1) < 1e-3 for width in widths)
    return "scale-by-embed-dim" if near else "wrong-scale"


def _part_names(guess: Guess, right: Guess) -> list[str]:
    names: list[str] = []
    if guess.parts[:2] != right.parts[:2]:
        names.append("wrong-projection")
    if guess.parts[2] != right.parts[2]:
        names.append("wrong-values")
    return names


def _mask_names(mask: str) -> list[str]:
    how, _, which = mask.partition(":")
    # -1e9 forbids as well as -inf, except where the softmax runs over another axis than the keys.
    forbids = which == "same" and how.startswith("-") and float(how) <= -60
    return [] if forbids else [_mask_name(mask)]


def _mask_name(mask: str) -> str:
    how, _, which = mask.partition(":")
    if mask == "none":
        return "not-causal"
    if how == "added":
        return "mask-added-as-numbers"
    if how == "after":
        return "mask-after-softmax"
    if which in ("future", "future_and_self"):
        return "mask-inverted"
    if which in ("without_self", "without_self_but_first", "with_next"):
        return "causal-off-by-one"
    if which == "top_left":
        return "causal-top-left"
    return "mask-fill-value"
