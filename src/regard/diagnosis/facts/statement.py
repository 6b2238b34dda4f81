"""The words for what code computes: the formula, the facts with their lines, and the domain."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from regard.diagnosis.expectation import ANY, Spec
from regard.diagnosis.facts.computed import Computed, Domain, Statement
from regard.diagnosis.facts.formula import Facts
from regard.diagnosis.facts.judging import deviations, norm_of, positions_of, spec_of
from regard.diagnosis.facts.rows import Unread


@dataclass(frozen=True, eq=False)
class Computes:
    """The formula and the facts of some code, as far as they could be read.

    Attributes:
        formula: the formula of the first attention, in a line; empty if it could not be read.
        facts: the facts in words, with their lines, of each attention that differs from those
            before it.
        domain: the inputs that the formula was verified on; empty if it could not be read.
        stage: the first stage that could not be read; empty if all could.
        reason: the reason for that, in a sentence; empty if all could be read.
        spec: the spec that pins it, where what differs among attentions is free; None if it could
            not be read, or has a fact that no spec names.
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


def computes_of(computed: Computed) -> Computes:
    """Return the words for what code computes."""
    if computed.unread is not None:
        return _unread(computed.unread)
    given = computed.specimen.given
    all_facts: dict[str, Facts] = {}
    for statement in computed.statements:
        facts = statement.facts
        all_facts.setdefault(f"{_formula(facts, given)}, {_details(facts, given)}", facts)
    (_, first), *others = all_facts.items()
    spec = common_spec(computed.statements)
    pins = not deviations([statement.facts for statement in computed.statements], spec)
    lines = [_details(first, given), *(f"and in {facts.module} {text}" for text, facts in others)]
    formula, domain = _formula(first, given), _domain(computed.domain)
    return Computes(formula, tuple(lines), domain, "", "", spec if pins else None)


def common_spec(statements: Sequence[Statement]) -> Spec:
    """Return the spec of all facts of some attentions: what differs among them is free."""
    first, *_ = specs = [spec_of(statement.facts) for statement in statements]
    names = [field.name for field in fields(Spec)]
    differing = [n for n in names if any(getattr(s, n) != getattr(first, n) for s in specs)]
    return replace(first, **dict.fromkeys(differing, ANY))


def _unread(unread: Unread) -> Computes:
    line = _line(unread.line)
    reason = re.sub(r"\(([^()]+:\d+)\)", lambda match: f"({_line(match[1])})", str(unread))
    where = f" ({line})" if line and f"({line})" not in reason else ""
    return Computes("", (), "", unread.stage, f"{reason}{where}", None)


def _domain(domain: Domain) -> str:
    others, inputs, difference = "", len(domain.lengths) - 1, domain.difference
    if domain.attended:
        others = f" that attend to {_range(domain.attended)} of another text"
    count = "one input" if inputs == 1 else f"{inputs} inputs"
    largest = f"largest difference {difference:.0e}" if difference else "without any difference"
    wide = f", with float64 in place of {' and '.join(domain.casts)}" if domain.casts else ""
    return f"verified on {count} of {_range(domain.lengths)} tokens{others}, {largest}{wide}"


def _range(numbers: Sequence[int]) -> str:
    smallest, largest = min(numbers), max(numbers)
    return f"{smallest} to {largest}" if smallest != largest else str(largest)


def _line(file_line: str) -> str:
    """Return ``line 14``; the name of a file that is an installed package's stands before it."""
    file, _, number = file_line.rpartition(":")
    if not number.isdigit():
        return ""
    is_installed = "site-packages" in file
    return f"{Path(file).name}, line {number}" if is_installed else f"line {number}"


def _formula(facts: Facts, given: Sequence[str]) -> str:
    """Return the formula of an attention.

    Args:
        facts: of the attention.
        given: the names of the scores, and of the values, that a function is given; empty for none.
    """
    if not facts.has_one_scale:
        scores = "c·q·kᵀ"
    elif given:
        scores = given[0] if facts.has_scale(1.0) else f"{facts.scale[0]:.4g}·{given[0]}"
    elif facts.has_scale(facts.head_dim**-0.5):
        scores = f"q·kᵀ/√{facts.head_dim}"
    elif facts.has_scale(1.0):
        scores = "q·kᵀ"
    else:
        scores = f"{facts.scale[0]:.4g}·q·kᵀ"
    if facts.softcap is not None:
        cap = f"{facts.softcap:.4g}"
        scores = f"{cap}·tanh({scores}/{cap})"
    if facts.bias is not None:
        scores += " + bias"
    if any(str(mask) != "every key" for mask in (facts.mask, *facts.masked.values())):
        scores += " + mask"
    value = f"·{given[1]}" if given[1:] else "" if given else "·v"
    return f"softmax({scores}{', sink' if facts.sink else ''}){value}"


def _details(facts: Facts, given: Sequence[str]) -> str:
    """Return the facts of an attention that its formula does not say."""
    heads = "one head" if facts.num_heads == 1 else f"{facts.num_heads} heads"
    parts = [] if given else [f"{heads} of {facts.head_dim}"]
    if count := facts.around.learned_queries:
        parts.append("one learned query" if count == 1 else f"{count} learned queries")
    num_kv_heads = facts.num_kv_heads
    if num_kv_heads != facts.num_heads:
        parts.append(f"{num_kv_heads} heads of keys" if num_kv_heads > 1 else "one head of keys")
    if not facts.has_one_scale:
        numbers = ", ".join(f"{scale:.4g}" for scale in facts.scale[:4])
        parts.append(f"c = {numbers} of its heads{_at(facts, 'scale')}")
    if (norm := norm_of(facts)) is not None:
        parts.append(f"{_NORMS[norm]} norm of q and k" if norm in _NORMS else f"norm: {norm}")
    positions = positions_of(facts)
    if positions is not None:
        parts.append(_positions(positions) + _at(facts, "bias", "product"))
    added = facts.added_positions
    if added is not None and added.kind == "mixed":
        parts.append("queries that follow from several tokens")
    if added is not None and added.equal is not None:
        parts.append(f"tokens {added.equal[0]} and {added.equal[1]} have the same position")
    parts.append(f"{facts.mask}{_at(facts, 'mask', 'softmax')}")
    if facts.fills_empty_rows:
        parts.append("or every key where it leaves none")
    if facts.bias is not None and facts.bias.kind == "finite":
        parts.append(f"{facts.bias.numbers[0]:.4g} added to some scores{_at(facts, 'mask')}")
    if facts.sink:
        parts.append("a sink of each head")
    return ", ".join([*parts, *_argument_masks(facts)])


_NORMS = {"rms": "RMS", "l2": "L2", "layer": "layer"}


def _argument_masks(facts: Facts) -> Iterator[str]:
    """Yield the masks of arguments, in words."""
    for argument, mask in facts.masked.items():
        hiding = next((str(h) for h in mask.hidings if h.argument == argument), None)
        words = hiding or f"{argument} hides nothing"
        if facts.mask is not None and mask.pattern != facts.mask.pattern:
            words = (
                f"{words}, and then {mask.pattern}" if hiding else f"{mask.pattern} with {argument}"
            )
        yield words


def _at(facts: Facts, *stages: str) -> str:
    """Return the line of the first of some stages that has one, in brackets."""
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
