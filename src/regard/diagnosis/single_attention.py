"""One attention: which mistakes it makes."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.attention_stages import found_stages
from regard.diagnosis.catalogue import fault
from regard.diagnosis.counterexamples import compared, weights_without_nan
from regard.diagnosis.float32_rerun import FEW_BITS
from regard.diagnosis.input_probes import (
    batch_stands_second,
    continues_a_cache,
    difference_between_runs,
    dtype_as_it_came,
    first_mixed,
    grouped_layout,
    ignores_order,
    mixes_samples,
    moved_samples,
    overflows_in_half,
    repeats_groups_wrongly,
    starts_at_top_left,
)
from regard.diagnosis.interpretation import Reading, Told, finding_of, understood, without_dropout
from regard.diagnosis.judgement import by_laws
from regard.diagnosis.kv_cache_checks import begins_at_top_left, cache_reach
from regard.diagnosis.mask_arguments import all_kept, forms_of, takes_masks
from regard.diagnosis.mask_probes import Trial, mask_trials
from regard.diagnosis.pre_score_steps import (
    bending,
    learned_distances,
    learned_scale,
    limit,
    manner_of,
)
from regard.diagnosis.projection_mistakes import (
    heads_are_tied,
    idle_parts,
    projected_twice,
    shared_by_heads,
)
from regard.diagnosis.reference_attention import Guess
from regard.diagnosis.refusal_reasons import reason
from regard.diagnosis.report import Report
from regard.diagnosis.rotated_inputs import largest_score, met, turned
from regard.diagnosis.source_lines import event_of, random_event, turned_round
from regard.diagnosis.specimens import specimen_of
from regard.diagnosis.subject import Given, Subject, is_installed, layouts
from regard.diagnosis.tensor_layout import Layout
from regard.diagnosis.traced_run import traced

__all__ = ["IN_HALF", "examined", "in_float32", "infinite", "laid", "running", "unsteady"]


def examined(subject: Subject, causal: bool | None, *, pairs: bool = True) -> Report:
    """The report on one attention.

    Args:
        subject: which runs.
        causal: as in ``check``.
        pairs: whether to look for several mistakes at once, which takes long.
    """
    original = subject
    found = infinite(subject)
    reading = None if found else understood(subject, causal, pairs=False)
    if not found and (reading is None or reading.names):
        reading, across = _across_batch(subject, causal, reading)
        found += across
    if not found and (reading is None or reading.names):
        reading = _with_masks_turned(subject, causal) or reading
    if not found and (reading is None or reading.names):
        reading = _with_other_axes(subject, causal, reading, pairs=False)
    if pairs and not found and reading is None and not _by_chance(subject):
        reading = understood(subject, causal)
        if reading is None or _EXCHANGED in reading.names:
            reading = _with_other_axes(subject, causal, reading, pairs=True)
    if (line := overflows_in_half(subject)) is not None:
        found.append(Told("mask-fill-value", None, None, caller=line, detail=IN_HALF))
    if reading is not None:
        subject = reading.subject
        found += [Told(name, reading.stages, reading) for name in reading.names]
        found += _more(reading, causal)
    trials = [] if reading is None else mask_trials(reading)
    found += [trial.told for trial in trials if trial.told is not None]
    found += unsteady(subject)
    faulty = any(fault(told.name).severity == "fault" for told in found)
    if reading is not None and not faulty:
        found += _notes(reading, causal)
    findings = sorted(
        (finding_of(told) for told in found),
        key=lambda finding: (finding.severity == "note", finding.number),
    )
    missing = "" if reading is not None or findings else reason(subject)
    known = is_installed(subject.given.call)
    is_open = "" if known else "\n".join(trial.open for trial in trials if trial.open)
    words = _read_as(subject, reading, trials)
    report = Report(subject.given.name, tuple(findings), words, missing)
    # Samples that a batch mixes are found in the layout that was meant.
    is_mixed = any(told.name == "attends-across-batch" for told in found)
    specimen = specimen_of(original if is_mixed else subject, causal)
    return by_laws(report, specimen, is_read=reading is not None, is_open=is_open)


_EXCHANGED = "heads-and-tokens-exchanged"
IN_HALF = "The largest number of float16 is 65504: there this line raises."


def running(given: Given) -> Subject:
    """The subject in the first layout in which it runs.

    Args:
        given: what people handed over.

    Raises:
        ValueError: it fails in all of them.
    """
    first: Exception | None = None
    for layout in layouts(given):
        try:
            return laid(given, layout)
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            first = first or error
    masks = [a for a in takes_masks(given.arguments) if not a.required]
    if masks and "NoneType" in str(first):  # it needs the mask that its signature leaves out
        needed = (replace(a, required=a.required or a in masks) for a in given.arguments)
        return running(replace(given, arguments=tuple(needed)))
    raise ValueError(
        f"{given.name} fails on every input that was tried; it must run on one of them.\n"
        f"    The first error was {type(first).__name__}: {first}"
    ) from first


def laid(given: Given, layout: Layout) -> Subject:
    """The subject in a layout, with the first form of the masks it needs in which it runs.

    Args:
        given: what people handed over.
        layout: to be tried.

    Raises:
        Exception: what the code itself raises, or nothing that it gives is an output.
    """
    first: Exception | None = None
    needed = [a for a in takes_masks(given.arguments) if a.required]
    for forms in product(*(forms_of(argument, given.source) for argument in needed)):
        constants = {form.argument: all_kept(form, layout) for form in forms}
        constants |= _positions(given, layout)
        subject = Subject(given, layout, constants)
        try:
            subject.run(subject.inputs())
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            first = first or error
            dtype = torch.float16 if "overflow" in str(error) else dtype_as_it_came(subject)
            wide = None if dtype is None else _lifted(subject, dtype)
            if wide is not None:
                return wide
        else:
            return _in_float32(subject)
    assert first is not None
    raise first


def _in_float32(subject: Subject) -> Subject:
    """The subject with float32 wherever it asks for fewer bits, if it runs so."""
    few = next((e.dtype for e in traced(subject, subject.inputs()) if e.dtype in FEW_BITS), None)
    return subject if few is None else _lifted(subject, few) or subject


def _lifted(subject: Subject, dtype: torch.dtype) -> Subject | None:
    lifted = replace(subject, given=replace(subject.given, lifted=dtype))
    try:
        lifted.run(lifted.inputs())
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return None
    return lifted


def _positions(given: Given, layout: Layout) -> dict[str, Any]:
    """Rotary angles for a module of transformers that wants them: cosines and sines."""
    width = getattr(given.model, "head_dim", None)
    if given.argument_named("position_embeddings") is None or not isinstance(width, int):
        return {}
    slopes = 10000.0 ** (-torch.arange(0, width, 2, device="cpu") / width)
    angles = torch.arange(layout.tokens, device="cpu")[:, None] * torch.cat([slopes, slopes])
    return {"position_embeddings": (angles.cos()[None], angles.sin()[None])}


def _with_masks_turned(subject: Subject, causal: bool | None) -> Reading | None:
    """A right reading where True, in a mask that the code needs, means what may not be seen."""
    turned = {name: _turned(value) for name, value in subject.constants.items()}
    if not any(turned[name] is not value for name, value in subject.constants.items()):
        return None
    other = replace(subject, constants={**subject.constants, **turned})
    reading = _alone(other, causal)
    return None if reading is None or reading.names else reading


def _with_other_axes(
    subject: Subject, causal: bool | None, reading: Reading | None, *, pairs: bool
) -> Reading | None:
    """The reading with the fewest mistakes where queries have an axis for their heads.

    Before the tokens or behind them: four axes do not tell, unless the code names them.
    """
    layout, best = subject.layout, reading
    if layout.batch == 1 or layout.dim % 4:
        return best
    for order in subject.given.orders_with_heads:
        if order == layout.order:
            continue
        other = replace(layout, order=order, num_heads=4, num_kv_heads=4)
        try:
            turned = laid(subject.given, other)
        except Exception:  # noqa: BLE001  # somebody's code may raise anything
            continue
        better = _alone(turned, causal, pairs=pairs)
        if better is not None and (best is None or len(better.names) < len(best.names)):
            best = better
    return best


def _alone(subject: Subject, causal: bool | None, *, pairs: bool = False) -> Reading | None:
    """A reading; without pairs one with one mistake at most.

    None where none fits, or the code refuses its inputs.
    """
    try:
        return understood(subject, causal, pairs=pairs)
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return None


def _turned(value: Any) -> Any:
    """A mask of 0 and 1 with both exchanged, lengths of 0; anything else as it is."""
    if isinstance(value, Tensor) and value.ndim == 1:
        return torch.zeros_like(value)
    if isinstance(value, Tensor) and value.ndim >= 2 and not value.is_floating_point():
        return 1 - value if value.dtype == torch.int64 else ~value
    return value


def _across_batch(
    subject: Subject, causal: bool | None, reading: Reading | None
) -> tuple[Reading | None, list[Told]]:
    """A reading with the batch second, or flattened into the tokens, where samples mix."""
    if subject.layout.order != "btd" or not mixes_samples(subject):
        return reading, []
    layout = subject.layout
    for other in (replace(layout, order="tbd"), replace(layout, batch=1)):
        turned = replace(subject, layout=other)
        better = _alone(turned, causal)
        if better is None or (reading is not None and len(reading.names) <= len(better.names)):
            continue
        if other.order == "tbd" and batch_stands_second(subject):
            return better, []
        # An axis of length 1 fits a mistake too many: two in the layout as it is say as much.
        plain = (reading or understood(subject, causal)) if better.names else None
        if plain is not None and len(plain.names) <= len(better.names) + 1:
            return plain, []
        stages = found_stages(subject, subject.inputs())
        detail = "Another first sample in the batch gives another output for the second one."
        if other.order == "tbd" and not better.names:
            detail += " On (tokens, batch, dim) it would be right."
        proof = moved_samples(subject), torch.eye(2, device="cpu"), _SAMPLES
        return better, [Told("attends-across-batch", stages, None, detail=detail, proof=proof)]
    return reading, []


_SAMPLES = "which sample (across) moves which (down): 1 where it does"
_MOVES = "One sample of the batch moves the output of another."
_ALIKE = "which head (across) has the queries, keys and values of which (down): 1 where it has"
_TIED = "Every head projects the whole token with the same matrices, so that all give the same."
_REACH = "which token of the cache (across) moves which new one (down): 1 where it does"
_HIDDEN = "With a cache the first new token sees the oldest key only, and not its own."
_PARTS = "which part of a token (across) enters which head (down): 1 where it does"


def _more(reading: Reading, causal: bool | None) -> list[Told]:
    """The mistakes that the numbers of one run do not show."""
    subject, stages = reading.subject, reading.stages
    found = _of_shared_projections(reading)
    if (twice := projected_twice(subject, stages)) is not None:
        second, name, matrix = twice
        proof = second.weight[:4, :4], matrix[:4, :4], f"the matrix it uses, and {name}"
        detail = f"{name} is never used: this line should project with it."
        told = Told("wrong-projection", stages, None, second.event, detail=detail)
        found.append(replace(told, proof=proof))
    hidden = reading.material.is_turned or reading.material.weights is not None
    idle = idle_parts(subject, stages, reading.material) if hidden else []
    for letter in idle:
        name = "wrong-values" if letter == "v" else "wrong-projection"
        if name not in reading.names:
            found.append(Told(name, stages, None))
    inverted = "mask-inverted" in reading.names  # its last row has nothing either way
    if not inverted and bool(stages.trace.outcome.output.isnan().any()):
        proof = weights_without_nan(stages, subject.layout.batch)
        found.append(Told("nan-rows", stages, None, proof=proof))
    if not reading.names and mixes_samples(subject):
        proof = moved_samples(subject), torch.eye(2, device="cpu"), _SAMPLES
        event = first_mixed(subject)
        found.append(Told("attends-across-batch", stages, None, event, detail=_MOVES, proof=proof))
    reach = cache_reach(reading)
    if reach is not None and begins_at_top_left(reach):
        did = reach[:4, :4]
        proof = did, torch.ones_like(did), _REACH
        found.append(Told("causal-top-left", stages, None, detail=_HIDDEN, proof=proof))
    if subject.given.kind == "qkv" and not reading.names:
        shown = _starting_at_top_left(reading, causal) if continues_a_cache(subject) else None
        if shown is not None:
            found.append(Told("causal-top-left", stages, shown))
        repeating = repeats_groups_wrongly(subject)
        if repeating is not None:
            grouped = replace(subject, layout=grouped_layout(subject.layout))
            stages = found_stages(grouped, grouped.inputs())
            shown = Reading(grouped, stages, repeating, Guess(repeat="all"), Guess())
            found.append(Told("kv-heads-repeated-in-wrong-order", stages, shown))
    return found


def _of_shared_projections(reading: Reading) -> list[Told]:
    """One small matrix for each part of a token, or for the whole of it in every head."""
    subject, stages, name = reading.subject, reading.stages, "heads-share-projection"
    if (shared := shared_by_heads(subject, stages)) is not None:
        parts = min(4, subject.layout.dim // shared.weight.shape[-2])
        proof = torch.eye(parts, device="cpu"), torch.ones(parts, parts, device="cpu"), _PARTS
        return [Told(name, stages, None, shared.event, proof=proof)]
    if stages.projections and heads_are_tied(reading.material):
        heads = min(4, reading.material.num_heads)
        proof = torch.ones(heads, heads, device="cpu"), torch.eye(heads, device="cpu"), _ALIKE
        event = stages.projections[0].event
        return [Told(name, stages, None, event, detail=_TIED, proof=proof)]
    return []


def unsteady(subject: Subject) -> list[Told]:
    """What differs from run to run.

    Args:
        subject: which runs.
    """
    if (most := difference_between_runs(subject)) == 0:
        return []
    if _by_chance(subject):
        return []
    inputs = subject.inputs()
    stages = found_stages(subject, inputs, projected=False)
    calm = found_stages(subject, inputs, edits=without_dropout(subject), projected=False)
    outputs = stages.trace.outcome.output, calm.trace.outcome.output
    proof = compared(*outputs, "output", (("sample",), "tokens", "columns"))
    detail = f"Two runs on the same input differ by up to {most:.3g}."
    return [Told("dropout-in-eval", stages, None, detail=detail, proof=proof)]


def _by_chance(subject: Subject) -> bool:
    """Whether it chooses by chance, as gumbel_softmax does: no attention that this check knows."""
    stages = found_stages(subject, subject.inputs(), projected=False)
    dropped = random_event(stages, dropping=True)
    return random_event(stages, dropping=False) is not None and dropped is None


def _starting_at_top_left(reading: Reading, causal: bool | None) -> Reading | None:
    """With fewer queries than keys: its causal mask begins at the top left, if it has one.

    None where it takes a cache, which alone tells where the mask should begin.
    """
    has_cache = reading.subject.given.argument("cache") is not None
    if has_cache or (not causal and reading.right.mask == "none"):
        return None
    shown = starts_at_top_left(reading.subject, reading.material)
    if shown is None:
        return None
    top_left, bottom_right = Guess(mask="causal:same"), Guess(mask="causal:bottom_right")
    return replace(reading, material=shown, guess=top_left, right=bottom_right)


def infinite(subject: Subject) -> list[Told]:
    """+inf where -inf is meant, which leaves nothing to compare.

    Args:
        subject: which runs.
    """
    stages = found_stages(subject, subject.inputs())
    if stages.softmax is not None and bool((stages.softmax.scores > 1e30).any()):
        proof = weights_without_nan(stages, subject.layout.batch)
        return [Told("mask-fill-value", stages, None, proof=proof)]
    return []


_TOP_LEFT = (
    "Nothing here says that queries go on from a cache of keys: right where query and key are as "
    "many, wrong where the queries are the last tokens."
)


def _notes(reading: Reading, causal: bool | None) -> list[Told]:
    """What is right, but worth knowing."""
    subject, stages = reading.subject, reading.stages
    found: list[Told] = []
    if subject.layout.order == "td":
        turning = turned_round(stages)
        name = "unbatched-only" if turning is None else "transpose-of-batch"
        found.append(Told(name, stages, None, turning or event_of("transpose-of-batch", stages)))
    shown = _starting_at_top_left(reading, causal) if subject.given.kind == "qkv" else None
    if shown is not None:
        found.append(Told("causal-top-left", stages, shown, detail=_TOP_LEFT, severity="note"))
    found += _scale_notes(reading)
    ordered = reading.right.mask != "none" or causal
    if subject.given.kind == "embeddings" and not ordered and ignores_order(subject):
        found.append(Told("no-positions", None, None))
    return found


_LIKE_T5 = (
    "It is as in T5, which adds a learned bias by distance and has no scale: its queries' weights "
    "begin smaller by sqrt(head_dim) instead."
)


def _scale_notes(reading: Reading) -> list[Told]:
    """What leaves open by how much query times key should be multiplied, and what limits it."""
    subject, stages = reading.subject, reading.stages
    found: list[Told] = []
    if (event := learned_scale(subject, stages)) is not None:
        found.append(Told("learned-scale", stages, None, event))
    if reading.right.scale == 1 and learned_distances(subject, stages) is not None:
        found.append(Told("no-scale", stages, None, detail=_LIKE_T5, severity="note"))
    is_plain = not reading.material.is_turned and reading.material.weights is None
    if not is_plain and met(stages) and manner_of(subject, stages) == "normed":
        seen = turned(stages, replace(reading.material, weights=None))
        detail = "" if seen is None else largest_score(seen)
        found.append(Told("normed-queries-and-keys", stages, None, bending(stages), detail=detail))
    if (event := limit(stages)) is not None:
        found.append(Told("limited-scores", stages, None, event))
    return found


def _read_as(subject: Subject, reading: Reading | None, trials: list[Trial]) -> str:
    words = [subject.layout.axes]
    if reading is not None:
        heads = reading.material.num_heads
        words.append(f"{heads} heads" if heads > 1 else "one head")
        words.append("causal" if reading.right.mask != "none" else "every token to every token")
    words += [trial.words for trial in trials if trial.words]
    words += in_float32(subject)
    return ", ".join(words)


def in_float32(subject: Subject) -> list[str]:
    """What its report says where it is not run in the dtype that it takes.

    Args:
        subject: that runs.
    """
    lifted = subject.given.lifted
    name = str(lifted).removeprefix("torch.")
    return [] if lifted is None else [f"in float32 where it takes {name}"]
