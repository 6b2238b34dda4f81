"""Functions of given scores: weights, or weights times values.

Scores are read as queries that meet unit vectors: queries times keys are then the scores, and
values of unit vectors make the output the weights. What holds for queries, keys and values is asked
of them as it stands.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import found_stages
from regard.diagnosis.counterexamples import weights_without_nan
from regard.diagnosis.input_probes import overflows_in_half
from regard.diagnosis.interpretation import Reading, Told, finding_of, without_dropout
from regard.diagnosis.mask_arguments import takes_masks
from regard.diagnosis.mask_probes import mask_trials
from regard.diagnosis.mistake_search import explanations
from regard.diagnosis.reference_attention import Guess, Material
from regard.diagnosis.report import Report
from regard.diagnosis.run_tensors import seen_fills
from regard.diagnosis.single_attention import IN_HALF, in_float32, infinite, laid, unsteady
from regard.diagnosis.softmax_detection import exponentials
from regard.diagnosis.subject import Given, Subject
from regard.diagnosis.tensor_layout import Layout

__all__ = ["UNKNOWN", "as_scores", "scores_report", "speaks_of_scores"]

_TOKENS, _WIDTH = 7, 5
_SOFTMAX = re.compile("softmax|weights")
# Scores are multiplied with nothing.
_PLAIN = Guess(scale=1.0)
_SWITCHES = frozenset(("mask", "axis", "mix"))
UNKNOWN = (
    "No softmax of the scores gives what it gives. It can be told where the weights are "
    "scores.softmax(-1), under a causal mask or one that is an argument."
)
_ONE_ROW = (
    "It is right for the scores of one query alone; of several queries it divides by one sum of "
    "them all, where each of their rows should sum to 1. It can be told where it takes one of the "
    "two only; exp(scores) / exp(scores).sum(-1, keepdim=True) is right for both."
)
_TURNED = (
    "It is right for scores (keys, queries), and wrong for scores (queries, keys), as everything "
    "else here has them. It can be told of a function that makes its scores of queries and keys."
)


def as_scores(given: Given) -> Given | None:
    """The same as a function of scores, where what it takes may be scores: one tensor, no matrix.

    Args:
        given: a function whose argument bears no name that tells.
    """
    plain = [a for a in given.arguments if a.role == "x"]
    rest = [a for a in given.arguments if a.required and a.role not in ("x", "mask", "lengths")]
    if len(plain) != 1 or rest or next(given.model.parameters(), None) is not None:
        return None
    scores = replace(plain[0], role="scores", required=True)
    return replace(given, arguments=tuple(scores if a is plain[0] else a for a in given.arguments))


def speaks_of_scores(given: Given) -> bool:
    """Whether a function is surely one of scores: a softmax by its name, or with a mask."""
    return bool(_SOFTMAX.search(given.name.lower()) or takes_masks(given.arguments))


def scores_report(given: Given, causal: bool | None) -> Report:
    """The report on a function of scores.

    Args:
        given: the function.
        causal: as in ``check``.

    Raises:
        ValueError: it fails on all shapes, or gives none that fits.
    """
    subject = _running(given)
    read_as = f"a function of scores, {_shapes(subject)}"
    told = [*infinite(subject), *_overflowing(subject), *unsteady(subject)]
    reading = _understood(subject, causal)
    if reading is None:
        found = tuple(finding_of(one) for one in told)
        return Report(given.name, found, read_as, "" if found else UNKNOWN)
    if not causal and reading.guess.axis.endswith("as one") and _is_right_for_one(given):
        return Report(given.name, (), read_as, _ONE_ROW)
    if {"axis", "mix"} == set(reading.guess.differs(reading.right)) and _is_turned(reading.guess):
        return Report(given.name, (), read_as, _TURNED)
    told += [Told(name, reading.stages, reading) for name in reading.names]
    has_nan = bool(reading.stages.trace.outcome.output.isnan().any())
    if has_nan and "mask-inverted" not in reading.names:  # its last row has nothing either way
        proof = weights_without_nan(reading.stages, subject.layout.batch)
        told.append(Told("nan-rows", reading.stages, None, proof=proof))
    trials = mask_trials(reading)
    told += [trial.told for trial in trials if trial.told is not None]
    findings = sorted((finding_of(one) for one in told), key=lambda finding: finding.number)
    words = [read_as, *(trial.words for trial in trials if trial.words), *in_float32(subject)]
    return Report(given.name, tuple(findings), ", ".join(words))


def _is_turned(guess: Guess) -> bool:
    """Whether it is attention of scores that are transposed."""
    return (guess.axis, guess.mix) == ("queries", "transposed")


# How it runs


def _running(given: Given) -> Subject:
    """The subject in the first layout in which it gives weights, or weights times values."""
    first: Exception | None = None
    for kind, layout in _layouts(given):
        try:
            return _fitting(kind, layout)
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            first = first or error
    raise ValueError(
        f"{given.name} fails on all scores that were tried, or gives another shape; it must give "
        f"weights, or weights times values.\n    The first error was: {first}"
    ) from first


def _layouts(given: Given) -> Iterator[tuple[Given, Layout]]:
    """Matrices, one row of scores alone, batches, heads; then values as wide as long."""
    row = _by_rows(given)
    yield given, Layout("td", 1, _TOKENS, _WIDTH)
    yield row, Layout("td", 1, _TOKENS, _WIDTH)
    yield given, Layout("btd", 2, _TOKENS, _WIDTH)
    yield given, Layout("bhtd", 2, _TOKENS, 4 * _WIDTH, 4, 4)
    yield given, Layout("td", 1, _TOKENS, _TOKENS)
    yield row, Layout("td", 1, _TOKENS, _TOKENS)


def _fitting(given: Given, layout: Layout) -> Subject:
    """The subject in a layout, where what it gives is as wide as the values, or as the scores."""
    subject = laid(given, layout)
    inputs = subject.inputs()
    width = inputs.get("value", inputs["scores"]).shape[-1]
    if (seen := subject.run(inputs).output.shape[-1]) != width:
        raise ValueError(f"it gives {seen} numbers for each query, where {width} are expected.")
    return subject


@dataclass(frozen=True, eq=False)
class _Rows:
    """A function of the scores of one query as one of several, each of which it is given alone.

    Attributes:
        call: the function.
        names: of its arguments.
        scores: the name of the scores among them.
    """

    call: Callable[..., Any]
    names: tuple[str, ...]
    scores: str

    def __call__(self, *values: Any, **options: Any) -> Tensor:
        """What it gives for each row, one below the other."""
        named = {**dict(zip(self.names, values, strict=False)), **options}
        rows = named.pop(self.scores)
        return torch.stack([self.call(**named, **{self.scores: row}) for row in rows])


def _by_rows(given: Given) -> Given:
    """The same function, given one row of scores at a time."""
    taken = tuple(a for a in given.arguments if a.role in ("scores", "value"))
    name = next(a.name for a in taken if a.role == "scores")
    call = _Rows(given.call, tuple(a.name for a in taken), name)
    return replace(given, call=call, arguments=taken)


def _is_right_for_one(given: Given) -> bool:
    """Whether it is right where it is given the scores of one query alone."""
    try:
        subject = _fitting(_by_rows(given), Layout("td", 1, _TOKENS, _WIDTH))
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return False
    reading = _understood(subject, causal=None)
    return reading is not None and not reading.names


def _shapes(subject: Subject) -> str:
    """Of the scores, and of the values, as the function itself takes them."""
    layout, inputs = subject.layout, subject.inputs()
    own = {role: layout.encode(tensor, layout.num_heads) for role, tensor in inputs.items()}
    if isinstance(subject.given.call, _Rows):
        own["scores"] = own["scores"][0]
    return " and ".join(str(tuple(tensor.shape)) for tensor in own.values())


def _overflowing(subject: Subject) -> list[Told]:
    line = overflows_in_half(subject)
    told = Told("mask-fill-value", None, None, caller=line, detail=IN_HALF)
    return [] if line is None else [told]


# What it is


def _understood(subject: Subject, causal: bool | None) -> Reading | None:
    """The reading with the fewest mistakes, two at most; None where none fits."""
    inputs = subject.inputs()
    stages = found_stages(subject, inputs, edits=without_dropout(subject))
    layout = subject.layout
    units = torch.eye(layout.tokens, dtype=torch.float64, device="cpu")
    units = units.repeat(layout.batch, 1, layout.num_heads)
    scores, value = inputs["scores"].double(), inputs.get("value", units).double()
    fills, lowered = seen_fills(stages)
    material = Material(
        {"q": scores, "k": units, "v": value},
        layout.num_heads,
        stages.trace.outcome.output,
        fills,
        lowered,
        scale=_PLAIN.scale,
    )
    masks = {None: ("causal:same", "none"), True: ("causal:same",), False: ("none",)}[causal]
    if isinstance(subject.given.call, _Rows):  # which query a row belongs to it does not say
        masks = ("none",)
    rights = [replace(_PLAIN, mask=mask) for mask in masks]
    guesses, right = explanations(material, rights, rights, (1, 2), _SWITCHES)
    seen_none = stages.softmax is None and not exponentials(stages.trace)
    if right is None or (seen_none and guesses[0] != right):
        return None  # a mistake that happens to give the same, as 0 everywhere does
    reading = Reading(subject, stages, material, guesses[0], right, tuple(guesses[1:]))
    return reading if reading.names or guesses[0] == right else None  # causal, and should not be
