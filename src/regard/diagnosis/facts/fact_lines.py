"""The line where each fact of an attention is written, by the stage that a deviation names."""

from collections.abc import Mapping, Sequence

from regard.diagnosis.facts.formula import Facts
from regard.diagnosis.facts.judging import first_of
from regard.diagnosis.facts.paths import Factor, Norm, Rotation
from regard.diagnosis.facts.visible import Band
from regard.diagnosis.facts.written import Written


def written_line(stage: str, facts: Facts, written: Mapping[str, Written]) -> str:
    """Return the ``file:line`` where a fact is written; "" where that is unknown.

    Args:
        stage: of the fact, such as "mask left", "mask lengths inverted" or "positions".
        facts: of the attention.
        written: the lines of the run without a mask, by "", and of that with one, by its argument.
    """
    name, _, rest = stage.partition(" ")
    base = written.get("")
    if base is None or facts.mask is None:
        return ""
    if name == "mask":
        argument = rest.removesuffix(" inverted") if rest != "inverted" else ""
        hides = {hiding.argument for hiding in facts.hidings}
        if argument in facts.masked and argument not in hides:
            return ""  # it is without effect
        if argument in facts.masked and argument in written:
            lines = written[argument].of_mask(facts.masked[argument].pattern, is_argument=True)
            return _of_argument(stage, lines, facts, argument)
        is_of_base = argument in {hiding.argument for hiding in facts.mask.hidings}
        lines = base.of_mask(facts.mask.pattern, is_argument=is_of_base)
        if is_of_base:
            return _of_argument(stage, lines, facts, argument)
        hides_none = facts.mask.pattern == Band()  # the code makes a mask, and does not use it
        return "" if hides_none else lines.get(stage) or lines.get("mask", "")
    match stage:
        case "scale":
            operations = (*facts.query, *facts.key)
            factors = [(each.factor, each.at) for each in operations if isinstance(each, Factor)]
            return base.of_scale(factors, facts.standard_scale)
        case "softcap":
            return base.of_cap()
        case "added mask":
            return base.of_added_mask()
        case "positions":
            turns = first_of(Rotation, facts)
            if not turns and facts.bias is not None:
                return base.of_bias()
            return _of_one_role(turns, base, ("key", "value", "query"))
        case "norm":
            return _of_one_role(first_of(Norm, facts), base, ("value", "key", "query"))
        case "value rotation":
            return _of_one_role(first_of(Rotation, facts), base, ("value",))
        case _:
            return ""


def _of_argument(stage: str, lines: Mapping[str, str], facts: Facts, argument: str) -> str:
    """Return the line of what an argument hides, or of what True in it means."""
    if stage.endswith(" inverted"):
        return lines.get("mask inverted", "")
    readings = [hiding.reading for hiding in facts.hidings if hiding.argument == argument]
    is_of_keys = any(reading.endswith(("+ 1", "- 1")) for reading in readings)
    return lines.get("mask of keys" if is_of_keys else "mask", "")


def _of_one_role(
    steps: Mapping[str, Norm] | Mapping[str, Rotation], base: Written, roles: Sequence[str]
) -> str:
    """Return the line of what the first of some roles has that has it."""
    role = next((role for role in roles if role in steps), None)
    if role is None:
        return ""
    return base.of_role(steps[role].at, [each.at for name, each in steps.items() if name != role])
