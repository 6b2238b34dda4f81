"""What is seen from outside: which inputs move which outputs, and whether two runs are equal."""

import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.float32_rerun import FEW_BITS
from regard.diagnosis.mask_arguments import all_kept, forms_of, takes_masks
from regard.diagnosis.reference_attention import Guess, Material, reproduces, same_numbers
from regard.diagnosis.subject import Subject
from regard.diagnosis.tensor_layout import Layout
from regard.diagnosis.traced_run import Event, traced
from regard.tracing.tracer import Caller

__all__ = [
    "batch_stands_second",
    "continues_a_cache",
    "difference_between_runs",
    "dtype_as_it_came",
    "first_mixed",
    "grouped_layout",
    "ignores_order",
    "looks_ahead",
    "mixes_samples",
    "moved_samples",
    "overflows_in_half",
    "repeats_groups_wrongly",
    "starts_at_top_left",
]


def difference_between_runs(subject: Subject) -> float:
    """By how much two runs in eval mode, on the same input, differ at most."""
    inputs = subject.inputs()
    first, second = (subject.run(inputs, seed=seed).output.nan_to_num() for seed in (0, 1))
    return float((first - second).abs().max())


def mixes_samples(subject: Subject) -> bool:
    """Whether one sample of a batch moves another one."""
    return subject.layout.batch > 1 and bool(moved_samples(subject).fill_diagonal_(0).any())


def moved_samples(subject: Subject) -> Tensor:
    """Which of the first two samples moves which: 1 where the one across moves the one down."""
    inputs = subject.inputs()
    before = subject.run(inputs).output
    moved = torch.zeros(2, 2, device="cpu")
    for sample in range(2):
        changed = {role: tensor.clone() for role, tensor in inputs.items()}
        for tensor in changed.values():
            tensor[sample] = tensor[sample].flip(-1) + 1
        after = subject.run(changed).output
        for seen in range(2):
            same = same_numbers(after[seen, None], before[seen, None].double(), 1e-5)
            moved[seen, sample] = float(not same)
    return moved


def first_mixed(subject: Subject) -> Event | None:
    """The first operation in which one sample moves more than its own share of the numbers.

    Args:
        subject: with several samples.

    Returns:
        None where no operation tells.
    """
    inputs = subject.inputs()
    changed = {role: tensor.clone() for role, tensor in inputs.items()}
    for tensor in changed.values():
        tensor[0] = tensor[0].flip(-1) + 1
    before, after = traced(subject, inputs), traced(subject, changed)
    for first, second in zip(before, after, strict=False):
        one, other = first.output, second.output
        if one is None or other is None or not before.moved.intersection(first.reads):
            continue
        if one.shape == other.shape:
            share = float((one != other).double().mean())
            if share > 1.01 / subject.layout.batch:
                return first
    return None


def looks_ahead(subject: Subject) -> bool:
    """Whether the last token moves what stands before it."""
    x = subject.inputs()["x"]
    other = x.clone()
    other[:, -1] = other[:, -1].flip(-1) + 1
    before, after = subject.run({"x": x}).output, subject.run({"x": other}).output
    return not same_numbers(after[:, :-1], before[:, :-1].double(), 1e-5)


def ignores_order(subject: Subject) -> bool:
    """Whether tokens in another order give the same outputs in that order."""
    x = subject.inputs()["x"]
    order = torch.arange(x.shape[1], device="cpu").roll(2)
    straight, turned = subject.run({"x": x}).output, subject.run({"x": x[:, order]}).output
    return same_numbers(turned, straight[:, order].double(), 1e-4)


def dtype_as_it_came(subject: Subject) -> torch.dtype | None:
    """The dtype of few bits in which a module has parameters, if it runs as it came.

    Args:
        subject: that does not run with all of its parameters in float32.
    """
    for other in _as_it_came(subject):
        try:
            other.run(other.inputs())
        except Exception:  # noqa: BLE001  # somebody's code may raise anything
            continue
        return next(p.dtype for p in other.given.model.parameters() if p.dtype in FEW_BITS)
    return None


def _as_it_came(subject: Subject) -> Iterator[Subject]:
    """The subject with its own bits, for inputs of float32 and of as many bits."""
    half = subject.given.half
    if half is not None:
        own = next(p.dtype for p in half.parameters() if p.dtype in FEW_BITS)
        for dtype in (own, torch.float32):
            given = replace(subject.given, call=half, model=half, dtype=dtype, lifted=None)
            yield replace(subject, given=given)
    elif subject.given.lifted is not None:
        yield replace(subject, given=replace(subject.given, lifted=None))


def overflows_in_half(subject: Subject) -> Caller | None:
    """The line that code in half precision fails on with a number too large for it.

    Without a mask, and with each mask that it may be given.
    """
    extras: list[dict[str, Any]] = [{}]
    for argument in takes_masks(subject.given.arguments):
        forms = forms_of(argument, subject.given.source)
        extras += [{argument.name: all_kept(form, subject.layout)} for form in forms]
    for other, extra in product(_as_it_came(subject), extras):
        if (line := _overflowing(other, extra)) is not None:
            return line
    return None


def _overflowing(subject: Subject, extra: Mapping[str, Any]) -> Caller | None:
    """The line that raises for a number that is too large; None where none does."""
    try:
        subject.run(subject.inputs(), extra)
    except RuntimeError as error:
        if "overflow" not in str(error):
            return None
        frames = list(traceback.walk_tb(error.__traceback__))
        folders = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
        own = [each for each in frames if not each[0].f_code.co_filename.startswith(folders)]
        if own:
            frame, line = own[-1]
            return Caller(None, frame.f_code.co_filename, line)
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return None
    return None


_SECOND = re.compile(
    r"^[ \t]*\w+[ \t]*,[ \t]*(b|bs|bsz|batch|batch_size|nbatch)[ \t]*[,=].*(shape|size)"
    r"|\((t|l|s|n|time|tokens|seq\w*|length|len)[ \t]*,[ \t]*(b|n|bs|bsz|batch\w*)[ \t]*,",
    re.IGNORECASE | re.MULTILINE,
)


def batch_stands_second(subject: Subject) -> bool:
    """Whether the code says itself that the batch is the second axis."""
    model = subject.given.model
    if isinstance(model, nn.MultiheadAttention):
        return not model.batch_first
    text = subject.given.source
    return _SECOND.search(text) is not None


_CACHE = re.compile(r"cache|past|incremental|newest|new_tokens|decode\b", re.IGNORECASE)


def continues_a_cache(subject: Subject) -> bool:
    """Whether the code says itself that the keys it takes are earlier ones, too."""
    return _CACHE.search(subject.given.source) is not None


def starts_at_top_left(subject: Subject, material: Material) -> Material | None:
    """With fewer queries than keys: what shows that a causal mask begins at the top left."""
    few = 3
    inputs = subject.inputs(q_len=few)
    try:
        output = subject.run(inputs).output
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return None
    tensors = {role[0]: tensor.double() for role, tensor in inputs.items()}
    shown = replace(material, tensors=tensors, output=output, weights=None)
    return shown if reproduces(shown, Guess(mask="causal:same")) else None


def grouped_layout(layout: Layout) -> Layout:
    """Four query heads and two of keys and values."""
    order = "bthd" if layout.order == "bthd" else "bhtd"
    return replace(layout, order=order, batch=2, num_heads=4, num_kv_heads=2)


def repeats_groups_wrongly(subject: Subject) -> Material | None:
    """With fewer key heads than query heads: what shows that they are repeated in a wrong order."""
    grouped = replace(subject, layout=grouped_layout(subject.layout))
    inputs = grouped.inputs()
    try:
        output = grouped.run(inputs).output
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return None
    tensors = {role[0]: tensor.double() for role, tensor in inputs.items()}
    shown = Material(tensors, 4, output)
    guesses = [
        Guess(repeat=how, mask=m) for m in ("none", "causal:same") for how in ("each", "all")
    ]
    fitting = [guess for guess in guesses if reproduces(shown, guess)]
    return shown if fitting and fitting[0].repeat == "all" else None
