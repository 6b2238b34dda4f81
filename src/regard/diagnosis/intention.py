"""The intention of the author of some code, from ``expect=``, ``causal=`` and ``means=``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from regard.diagnosis.expectation import ANY, MEANINGS, Spec
from regard.diagnosis.inputs.signature import signature_of


@dataclass(frozen=True)
class Intention:
    """The intention of the author of some code.

    Attributes:
        expected: the spec that each fact is compared with; None: the standard.
        causal: True: no token attends to later ones; False: tokens do; None: either.
        means: the meaning of each mask, by its argument.
    """

    expected: Spec | None = None
    causal: bool | None = None
    means: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def declared(self) -> Spec | None:
        """The spec of ``causal`` and ``means`` alone, with all else free; None without them."""
        if self.expected is not None or (self.causal is None and not self.means):
            return None
        facts: dict[str, Any] = dict.fromkeys((fact.name for fact in fields(Spec)), ANY)
        facts["causal"] = ANY if self.causal is None else self.causal
        facts["padding"] = dict(self.means) or ANY
        return Spec(**facts)

    @property
    def spec(self) -> Spec | None:
        """The spec with ``causal`` in it; None without both."""
        if self.expected is None and self.causal is None:
            return None
        causal = ANY if self.causal is None else self.causal
        return replace(self.expected or Spec(), causal=causal)

    def check_arguments(self, call: Callable[..., Any]) -> None:
        """Check that code has the arguments that the intention names.

        Raises:
            ValueError: it does not.
        """
        names = [*signature_of(call).parameters]
        for name in _padding(self.expected):
            if name not in names:
                raise ValueError(
                    f"expect says what {name!r} hides; the arguments are {', '.join(names)}."
                )
        for name in self.means:
            if name not in names:
                raise ValueError(f"means has {name!r}; the arguments are {', '.join(names)}.")


def intention_of(
    expect: Spec | None, causal: bool | None, means: Mapping[str, str] | None
) -> Intention:
    """Return an intention from the arguments of ``check``.

    Raises:
        TypeError: one of them has another type.
        ValueError: they contradict each other, or ``means`` has other words.
    """
    if causal not in (None, True, False):
        raise TypeError(f"causal is {causal!r}; it must be True, False or None.")
    means = {} if means is None else means
    if not isinstance(means, Mapping) or not all(isinstance(t, str) for t in means.values()):
        raise TypeError(f"means is {means!r}; pass words by argument: {{'mask': 'True hides'}}.")
    for name, text in means.items():
        if text == "lengths" or text not in MEANINGS:
            raise ValueError(
                f"means[{name!r}] is {text!r}; say 'True keeps', 'True hides' or "
                "'added to the scores'."
            )
    if expect is None:
        return Intention(None, causal, means)
    if not isinstance(expect, Spec):
        raise TypeError(
            f"expect is {type(expect).__name__}; it must be a spec.\n"
            "    Write for example: expect=regard.spec(causal=True, heads=4)"
        )
    if expect.causal is not ANY and causal not in (None, expect.causal):
        raise ValueError(
            f"causal={causal} contradicts expect, which says causal={expect.causal}; leave one out."
        )
    padding = _padding(expect)
    for name, meaning in means.items():
        if padding.get(name, meaning) != meaning:
            raise ValueError(
                f"means says {meaning!r} of {name}, and expect says {padding[name]!r}."
            )
    masks = {name: meaning for name, meaning in padding.items() if meaning != "lengths"}
    is_free = expect.causal is ANY
    return Intention(expect, causal if is_free else expect.causal, {**masks, **means})


def _padding(expected: Spec | None) -> Mapping[str, str]:
    if expected is None or expected.padding is ANY:
        return {}
    return cast("Mapping[str, str]", expected.padding)
