"""What code computes, in words: the formula, the facts with their lines, and the domain."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.diagnosis.expectation import Spec
from regard.diagnosis.facts.computed import Computed, Statement
from regard.diagnosis.facts.formula import Facts
from regard.diagnosis.facts.judging import positions_of, spec_of
from regard.diagnosis.facts.rows import Unread

__all__ = ["Computes", "computes_of"]


@dataclass(frozen=True, eq=False)
class Computes:
    """What code computes, as far as it could be read.

    Attributes:
        formula: of the first attention, in a line; empty where it could not be read.
        facts: in words, each with its line, of each attention that differs from those before.
        domain: the inputs that the formula was verified on; empty where it could not be read.
        stage: the first stage that could not be read; empty where all was read.
        reason: why, in a sentence; empty likewise.
        spec: what ``expect=`` would pin; None where it could not be read.
    """

    formula: str
    facts: tuple[str, ...]
    domain: str
    stage: str
    reason: str
    spec: Spec | None

    @property
    def is_known(self) -> bool:
        """True if all of it could be read."""
        return not self.stage

    def to_dict(self) -> dict[str, Any]:
        """Return it in plain data, for JSON."""
        return {
            "formula": self.formula,
            "facts": list(self.facts),
            "domain": self.domain,
            "stage": self.stage,
            "reason": self.reason,
            "spec": None if self.spec is None else self.spec.to_json(),
        }

    def __str__(self) -> str:
        """Return it as lines of text."""
        if self.stage:
            return f"{self.reason} ({self.stage})"
        return "\n".join([f"{self.formula}, {self.facts[0]}", *self.facts[1:], self.domain])


def computes_of(found: Computed) -> Computes:
    """Return what was found, in words."""
    if found.unread is not None:
        return _unread(found.unread)
    different: list[Statement] = []
    texts: list[str] = []
    for statement in found.statements:
        text = f"{_formula(statement.facts)}, {_facts(statement.facts)}"
        if text not in texts:
            texts.append(text)
            different.append(statement)
    first = different[0].facts
    facts = [_facts(first)]
    for statement in different[1:]:
        own = statement.facts
        facts.append(f"and in {own.module} {_formula(own)}, {_facts(own)}")
    return Computes(
        _formula(first), tuple(facts), _domain(found.statements), "", "", spec_of(first)
    )


def _unread(unread: Unread) -> Computes:
    line = _line(unread.line)
    where = f" ({line})" if line else ""
    return Computes("", (), "", unread.stage, f"{unread}{where}", None)


def _domain(statements: Sequence[Statement]) -> str:
    inputs = max(s.domain.inputs for s in statements)
    shortest = min(s.domain.shortest for s in statements)
    longest = max(s.domain.longest for s in statements)
    difference = max(s.domain.difference for s in statements)
    lengths = f"{shortest} to {longest}" if shortest != longest else str(longest)
    count = "one input" if inputs == 1 else f"{inputs} inputs"
    return f"verified on {count} of {lengths} tokens, largest difference {difference:.0e}"


def _line(place: str) -> str:
    """Return ``line 14``; the name of a file that is an installed package's stands before it."""
    file, _, number = place.rpartition(":")
    if not number.isdigit():
        return ""
    is_installed = "site-packages" in file
    return f"{Path(file).name}, line {number}" if is_installed else f"line {number}"


def _formula(facts: Facts) -> str:
    """Return the formula of an attention."""
    standard = facts.head_dim**-0.5
    scale = facts.scale[0]
    if max(facts.scale) - min(facts.scale) > 1e-4 * abs(scale):
        scores = "c·q·kᵀ"
    elif abs(scale - standard) <= 1e-4 * standard:
        scores = f"q·kᵀ/√{facts.head_dim}"
    elif abs(scale - 1) <= 1e-4:
        scores = "q·kᵀ"
    else:
        scores = f"{scale:.4g}·q·kᵀ"
    if facts.softcap is not None:
        cap = f"{facts.softcap:.4g}"
        scores = f"{cap}·tanh({scores}/{cap})"
    if facts.bias is not None:
        scores += " + bias"
    if facts.mask is not None and (str(facts.mask) != "every key" or facts.masked):
        scores += " + mask"
    return f"softmax({scores}{', sink' if facts.sink else ''})·v"


def _facts(facts: Facts) -> str:
    """Return the facts of an attention that its formula does not say."""
    heads = "one head" if facts.heads == 1 else f"{facts.heads} heads"
    parts = [f"{heads} of {facts.head_dim}"]
    kinds = len(set(facts.key_heads))
    if kinds != facts.heads:
        parts.append(f"{kinds} heads of keys" if kinds > 1 else "one head of keys")
    if max(facts.scale) - min(facts.scale) > 1e-4 * abs(facts.scale[0]):
        numbers = ", ".join(f"{scale:.4g}" for scale in facts.scale[:4])
        parts.append(f"c = {numbers} of its heads{_at(facts, 'scale')}")
    spec = spec_of(facts)
    named = spec.named()
    if (norm := named.get("qk_norm")) is not None:
        parts.append({"rms": "RMS", "l2": "L2", "layer": "layer"}[norm] + " norm of q and k")
    positions = positions_of(facts)
    if positions is not None:
        parts.append(_positions(positions) + _at(facts, "bias", "product"))
    mask = str(facts.mask)
    parts.append(f"{mask}{_at(facts, 'mask', 'softmax')}")
    if facts.bias is not None and facts.bias.kind == "finite":
        parts.append(f"{facts.bias.numbers[0]:.4g} added to some scores{_at(facts, 'mask')}")
    if facts.sink:
        parts.append("a sink of each head")
    for argument, own in facts.masked.items():
        hidings = [str(each) for each in own.hidings if each.argument == argument]
        said = hidings[0] if hidings else f"{argument} hides nothing"
        is_other = facts.mask is not None and own.pattern != facts.mask.pattern
        parts.append(f"{said}, and then {own.pattern}" if is_other else said)
    return ", ".join(parts)


def _at(facts: Facts, *stages: str) -> str:
    line = next((_line(facts.lines[s]) for s in stages if facts.lines.get(s)), "")
    return f" ({line})" if line else ""


def _positions(positions: dict[str, Any]) -> str:
    kind = positions["kind"]
    if kind == "rotary":
        base = f", base {positions['base']:g}" if "base" in positions else ""
        part = positions.get("part", 1)
        share = f", {part:.3g} of the columns" if part != 1 else ""
        return f"rotary positions of {positions.get('pairing')}{base}{share}"
    if kind == "alibi":
        slopes = ", ".join(f"{slope:.4g}" for slope in positions["slopes"][:4])
        return f"ALiBi of slopes {slopes}"
    if kind == "table":
        return "a bias by position"
    if kind == "learned":
        return "positions added to the input"
    return str(kind)
