"""The law of influence: a token sees the tokens that it is meant to see, and no others."""

import re
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from regard.diagnosis.inputs.lab import Lab, NotTried, differs
from regard.diagnosis.inputs.specimen import Slot
from regard.diagnosis.inputs.tape import Place, addresses
from regard.diagnosis.laws.arithmetic import SOFTMAXES
from regard.diagnosis.laws.law import UNUSED, Breach, Law, Pair

__all__ = ["Influence", "ignores_order", "pair_of", "pattern_of"]

_CAPTION = "which token (across) moves which output (down): 1 if it does"


def ignores_order(lab: Lab) -> bool:
    """Return True if two tokens can change places, and the last row, which sees both, stays."""
    lab = lab.for_first_sample()
    s = lab.specimen
    if not s.has_tokens or not lab.sees_rows or len(s.sources) > 1 or s.tokens < 3:
        return False
    contents = s.contents(1, s.tokens, seed=5)
    order = list(range(s.tokens))
    order[0], order[-2] = order[-2], order[0]
    turned = {name: t[:, order] for name, t in contents.items()}
    rows, other = lab.run(contents).rows, lab.run(turned).rows
    return not bool(differs(other[0, -1], rows[0, -1]).any())


def pattern_of(seen: Tensor) -> str:
    """Return the pattern of an influence in words; empty where it is none of the usual ones."""
    rows, tokens = seen.shape
    if rows != tokens:
        return ""
    i, j = torch.arange(rows)[:, None], torch.arange(tokens)
    if bool(seen.all()):
        return "every token to every token"
    for width in range(1, tokens + 1):
        if seen.equal((j <= i) & (i - j < width)) and width > 1:
            return "causal" if width == tokens else f"causal, a window of {width}"
        if seen.equal((i - j).abs() < width) and width > 1:
            return f"a window of {width - 1} to both sides"
        if seen.equal((j <= i) & (i // width == j // width)) and 1 < width < tokens:
            return f"causal, in chunks of {width}"
    is_causal = not bool((seen & (j > i)).any()) and bool(seen.diagonal().all())
    return "causal, with gaps" if is_causal and bool(seen[1:].diagonal().all()) else ""


class Influence(Law):
    """A token sees the tokens that it is meant to see and no others, and each argument counts."""

    name = "influence"
    formula = "d output[i] / d input[j] = 0 exactly where j is hidden from i"
    example = "mask = torch.ones(t, t).tril(1)  # each token sees the next one"

    def breach(self, lab: Lab) -> Breach | None:
        """Change one token after another, and compare with what was declared."""
        seen = lab.influence
        rows, tokens = seen.shape
        if (found := self._idle(lab) or self._exchanged(lab)) is not None:
            return found
        if rows != tokens:
            raise NotTried("It gives more or fewer tokens than it takes.", applies=False)
        if lab.specimen.masks or lab.specimen.segments:
            return self._masked(lab, seen)
        seen = self._joined(lab, seen)
        if lab.specimen.causal:
            return self._causal(lab, seen)
        if not seen.any():
            return Breach("No token moves any output.", is_definite=False)
        if not (seen & ~torch.eye(rows, dtype=torch.bool)).any():
            says = "No token moves the output of another."
            pair = pair_of(seen, torch.ones_like(seen))
            return Breach(says, None, pair, is_definite=False, kind="alone")
        return _off_by_one(seen) if not pattern_of(seen) and _kind(seen) else None

    @staticmethod
    def _causal(lab: Lab, seen: Tensor) -> Breach | None:
        """Compare with a causal mask, which shows a token itself and the one before."""
        i, j = torch.arange(len(seen))[:, None], torch.arange(len(seen))
        near = (j <= i) & (i - j < (1 if "in chunks" in pattern_of(seen) else 2))
        says, later = "", seen & (j > i)
        leaks = bool(later.any())
        if leaks:
            says = f"{_where(later)}, an earlier one."
        elif bool((bad := ~seen & near).any()):
            says = f"{_where(bad, moves=False)}."
        place = _lifted(lab) if leaks else None
        others = [*lab.specimen.sources][1:]
        if leaks and others and "key" not in others:
            apart = Lab(replace(lab.specimen, apart=(*others,)))
            if not apart.influence.triu(1).any():
                says = f"{others[0]} may be another sequence: pass an example in which it has"
                raise NotTried(f"{says} another number of tokens.")
        if says:
            kind = _kind(seen, len(seen) - 2) or ("not-causal" if leaks else "")
            return Breach(says, place, pair_of(seen, j <= i), kind=kind)
        return None

    @staticmethod
    def _idle(lab: Lab) -> Breach | None:
        """Each argument that holds tokens moves the output."""
        s = lab.specimen
        contents = s.contents(s.batch, s.tokens, seed=4)
        other = s.changed(contents)
        start = lab.run(contents).rows
        for name in contents if len(contents) > 1 else ():
            moved = lab.run({**contents, name: other[name]}).rows
            if not differs(moved, start).any():
                says = f"The argument for {name} has no influence on the output."
                # Under a mask that is filled with a large number no query has any influence.
                return Breach(says, kind="" if s.masks else UNUSED.get(name, ""))
        lasts = [slot.axes[-1] for slot in s.sources.values()]
        widths = {prod(n for n in slot.axes if isinstance(n, int)) for slot in s.sources.values()}
        widths |= {n for n in lasts if isinstance(n, int)}
        for slot in s.slots:
            other = _with_other_numbers(slot, s.batch, s.tokens)
            if other is None:
                continue
            try:
                rows = lab.run(contents, extra={slot.name: other}).rows
            except Exception:  # noqa: BLE001  # other numbers may be none that the code takes
                continue
            # A bias of the keys moves the rounding alone; it is as wide as a token or a head.
            is_bias = isinstance(other, Tensor) and other.shape[-1:].numel() in widths
            if rows.equal(start) or not (is_bias or differs(rows, start).any()):
                return _without_influence(slot)
        return None

    @staticmethod
    def _exchanged(lab: Lab) -> Breach | None:
        """Find queries that come from what the tokens attend to."""
        s = lab.specimen
        if not s.memory:
            return None
        first, memory = next(iter(s.sources)), s.memory[0]
        contents = s.contents(1, s.tokens, seed=3)
        base, other = lab.run(contents).rows[0], s.changed(contents, token=0)
        moved = [
            differs(lab.run({**contents, name: other[name]}).rows[0], base).any(-1)
            for name in (first, memory)
        ]
        if not moved[0].all() or not moved[1][0] or moved[1][1:].any():
            return None
        return Breach(
            f"Token 1 of {memory} moves output 1 alone, and token 1 of {first} moves all outputs: "
            f"the queries are those of {memory}.",
            kind="wrong-projection",
        )

    @staticmethod
    def _joined(lab: Lab, seen: Tensor) -> Tensor:
        """Return an influence as if all tokens were of one document.

        An argument holds the numbers of documents if no token sees one with another number.
        """
        rows, tokens = seen.shape
        ones = torch.ones_like(seen)
        for slot in lab.specimen.slots:
            if slot.kind != "given" or slot.dtype not in (torch.int32, torch.int64):
                continue
            number = slot.constant(1, tokens).flatten()
            if slot.axes not in (("b", "t"), ("t",)) or rows != tokens:
                continue
            apart = number[:, None] != number
            if apart.any() and not (seen & apart).any():
                lab.readings.append(f"{slot.name}: documents")
                return seen | (apart & (ones if seen.triu(1).any() else ones.tril()))
        return seen

    @staticmethod
    def _masked(lab: Lab, seen: Tensor) -> Breach | None:
        """Compare with the masks that the caller passed; rows that are hidden do not count."""
        s = lab.specimen
        allowed = s.visible(len(seen))
        many = [slot.name for slot in s.masks if slot.meaning == "unknown" and slot.has_many]
        if many:
            raise NotTried(f"{many[0]} holds more than two numbers: check knows masks of two.")
        if allowed is None:
            names = ", ".join(slot.name for slot in s.masks)
            raise NotTried(
                f"Nothing says what {names} means: pass means={{{s.masks[0].name!r}: "
                "'True keeps'} or 'True hides'."
            )
        # Rows of hidden tokens do not count.
        kept = (allowed.any(0) & allowed.any(1))[:, None]
        if s.causal or (s.causal is None and not bool((seen & allowed & kept).triu(1).any())):
            allowed = allowed & torch.ones_like(allowed).tril()
            kept = kept & allowed.any(1)[:, None]
        # A residual connection lets a token see itself.
        eye = torch.eye(len(seen), dtype=torch.bool)
        says = ""
        if bool((bad := seen & ~allowed & kept & ~eye).any()):
            says = f"{_where(bad)}, which is hidden from it."
        elif bool((bad := ~seen & allowed & kept).any()):
            says = f"{_where(bad, moves=False)}, which may see it."
        return Breach(says, None, pair_of(seen, allowed)) if says else None


def _with_other_numbers(slot: Slot, batch: int, tokens: int) -> Tensor | float | None:
    """Return other numbers for what the caller passed; None for masks, caches and lengths."""
    if type(slot.value) is float and _SCALES.search(slot.name.lower()):
        return 1.5 * slot.value
    if slot.kind != "given" or slot.meaning or _KEEPS_TOKENS.search(slot.name.lower()):
        return None
    table = slot.constant(batch, tokens)
    is_binary = bool(((table == 0) | (table == 1)).all())  # such as the edges of a graph
    if table.is_floating_point() and not is_binary:
        return 1.5 * table if table.numel() > 1 and bool(table.any()) else None
    # Documents of equal lengths are the same in the opposite order.
    other = table.roll(1, slot.axes.index("t")) if "t" in slot.axes else table
    return None if other.equal(table) or table.dtype == torch.bool else other


_SCALES = re.compile("scal|temp|cap|slope|theta|base")
_KEEPS_TOKENS = re.compile("cache|past|len|mask")


def _without_influence(slot: Slot) -> Breach:
    """Return the breach of a table that moves nothing.

    Raises:
        NotTried: it holds positions, which layers of one interface may leave to others.
    """
    says = f"The argument {slot.name} has no influence on the output."
    if "pos" in slot.name.lower() and not slot.dtype.is_floating_point:
        raise NotTried(f"{says} If that is meant, leave it out of the example.")
    return Breach(says)


def _off_by_one(seen: Tensor) -> Breach:
    """Return the breach of a mask that is causal but for one diagonal."""
    says = "A token sees the tokens before it, and not itself."
    if bool(seen.triu(1).any()):
        says = f"{_where(seen.triu(1))}, as in a causal mask that is off by one."
    return Breach(
        says, None, pair_of(seen, seen.new_ones(seen.shape).tril()), kind=_kind(seen, len(seen) - 2)
    )


def _lifted(lab: Lab) -> Place | None:
    """Return the line of the first operation behind a mask that makes hidden scores finite."""
    s = lab.specimen
    hidden: dict[int, Tensor] = {}
    for step in lab.run(s.contents(s.batch, s.tokens), keeps=True).steps:
        floats = [t for t in step.outputs if t.is_floating_point()]
        is_weights = step.name.startswith("exp") or step.name in SOFTMAXES
        for low in [hidden[at] for at in step.reads if at in hidden and not is_weights]:
            if any(t.shape == low.shape and bool((t[low] > _HIDDEN).all()) for t in floats):
                return step.place
        for t, alive in zip(step.outputs, step.alive, strict=True):
            if t.is_floating_point():
                low = t < _HIDDEN
                if bool(low.any()) and not bool(low.all()):
                    hidden[addresses(alive)[0]] = low
    return None


_HIDDEN = -1e4


def _kind(seen: Tensor, most: int = 1) -> str:
    """Return which wrong causal mask an influence shows; empty where it is none of the usual.

    Args:
        seen: bool, (rows, tokens).
        most: how many later tokens may be seen.
    """
    ones = torch.ones_like(seen)
    eye = torch.eye(len(seen), dtype=torch.bool)
    # A residual connection shows a token itself; the first row may keep itself.
    # Through several layers a token sees one more with each of them.
    later = next((n for n in range(1, most + 1) if seen.equal(ones.tril(n))), 1)
    for kind, pattern in (
        ("next", ones.tril(later)),
        ("self", ones.tril(-1)),
        ("mask-inverted", ones.triu(1)),
    ):
        rest = seen ^ pattern if kind == "next" else (seen ^ pattern) & ~eye
        if kind == "self" and len(seen) > 1 and bool(seen[1, 1]):
            continue  # with a single key a row does not depend on its query
        # A row without any key may see all of them.
        rest[0 if kind == "self" else -1 if kind == "mask-inverted" else slice(0, 0)] = False
        if not bool(rest.any()):
            return kind if kind == "mask-inverted" else "causal-off-by-one"
    return "" if bool((seen & ~eye).any()) else "alone"


def _where(bad: Tensor, *, moves: bool = True) -> str:
    row, token = (int(n) + 1 for n in bad.nonzero()[0])
    verb = "moves" if moves else "does not move"
    return f"Token {token} {verb} output {row} of {bad.shape[0]}"


def pair_of(seen: Tensor, right: Tensor) -> Pair:
    """Return a small part of an influence, and of what it should be."""
    n = min(4, *seen.shape)
    right = right.expand(seen.shape)
    bad = (seen != right)[:n, :n]
    at = 0 if bad.any() or not seen.shape[0] else max(0, seen.shape[0] - n)
    part = slice(at, at + n)
    return seen[part, part].float(), right[part, part].float(), _CAPTION
