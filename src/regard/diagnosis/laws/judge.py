"""All laws, tried one after another on one piece of code."""

from collections.abc import Sequence

from regard.diagnosis.inputs.lab import Lab, NotTried
from regard.diagnosis.inputs.tape import OpaqueOperator, in_words
from regard.diagnosis.laws.arithmetic import Gradient, Large, Training
from regard.diagnosis.laws.cached import Cache
from regard.diagnosis.laws.calls import Pure, Runs, Samples
from regard.diagnosis.laws.law import Law, Result
from regard.diagnosis.laws.padding import Padding

LAWS: tuple[Law, ...] = (
    Runs(),
    Pure(),
    Samples(),
    Padding(),
    Gradient(),
    Large(),
    Training(),
    Cache(),
)

# A law whose trials need another one is not tried where that one is broken.
_NEEDS = {
    "samples": ("pure",),
    "padding": ("runs", "pure", "samples"),
    "cache": ("runs", "pure"),
    "gradient": ("pure",),
    "large": ("runs",),
    "training": ("pure", "samples"),
}


def judged(lab: Lab, laws: Sequence[Law]) -> list[Result]:
    """Return the result of each law."""
    results: list[Result] = []
    broken: set[str] = set()
    for law in laws:
        needed = [name for name in _NEEDS.get(law.name, ()) if name in broken]
        if needed:
            results.append(Result(law, reason=f"The law {needed[0]!r} is broken."))
            continue
        result = _tried(law, lab)
        if result.breach is not None:
            broken.add(law.name)
        results.append(result)
    return results


def _tried(law: Law, lab: Lab) -> Result:
    try:
        return Result(law, law.breach(lab))
    except NotTried as error:
        return Result(law, reason=str(error), is_applicable=error.applies)
    except OpaqueOperator as error:
        return Result(law, reason=str(error))
    except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
        return Result(law, reason=f"While it was tried, {in_words(error)}.")
