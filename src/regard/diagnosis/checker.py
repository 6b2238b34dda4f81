"""``check``: run somebody's attention, and say which mistakes it makes."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.catalogue import fault
from regard.diagnosis.examples import example_specimen
from regard.diagnosis.input_probes import ignores_order, looks_ahead
from regard.diagnosis.isolation import undisturbed
from regard.diagnosis.judgement import by_laws
from regard.diagnosis.laws.specimen import Specimen
from regard.diagnosis.mask_arguments import takes_masks
from regard.diagnosis.nested_attention import attentions_inside
from regard.diagnosis.report import Finding, Report
from regard.diagnosis.score_functions import UNKNOWN, as_scores, scores_report, speaks_of_scores
from regard.diagnosis.signature import arguments_of
from regard.diagnosis.single_attention import examined, laid, running
from regard.diagnosis.subject import Given, Subject, as_given, built_from, independent
from regard.diagnosis.tensor_layout import Layout, Order

__all__ = ["check"]


@undisturbed
def check(
    thing: object,
    *class_args: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    means: Mapping[str, str] | None = None,
    axes: str | Mapping[str, str] | None = None,
    causal: bool | None = None,
    **options: Any,
) -> Report:
    """Whether an attention is right; if not, which mistake it makes, and on which line.

    It is run on small random inputs, as a copy in eval mode, and compared with attention and with
    the mistakes that people make: each alone, and together. A mistake is told where it does
    the same as the code, to rounding. What cannot be told is said.

    The code runs in this process, with no limit of time: a loop without end does not come back.
    ``regard check FILE:NAME --seconds 10`` in a shell runs it in a process of its own and ends it.

    Args:
        thing: a module from embeddings (batch, tokens, dim), or (tokens, dim), to embeddings; a
            function of query, key and value; a function of given scores; or a class of modules.
            Of a model with attentions of several classes, or one that takes the numbers of tokens,
            one attention of each kind is judged alone.
        *class_args: for the class.
        args: of an example call, by position: it fixes dtypes, shapes and all that check cannot
            guess, such as images, cached keys, tables of positions or ``cu_seqlens``.
        kwargs: of the example call, by name.
        means: what a mask means, by the name of its argument: ``{"mask": "True hides"}``.
        axes: of the example's first argument, or of arguments by name: ``"batch tokens dim"``.
        causal: whether a token may attend to later ones: True where it must not, False where it
            may. None: both are right, unless the name of the code says ``Causal``.
        **options: for the class by name, or what the function takes besides its tensors.

    Returns:
        A report: its ``findings``, ``ok``, ``verdict``; printed it shows all.

    Raises:
        TypeError: the thing cannot be called, or arguments of the class are missing.
        ValueError: it fails on every input that was tried, or gives nothing that is an output; a
            mask is given, which check makes itself; the code ends Python, or needs CUDA where there
            is none.

    Example:
        >>> import torch, regard
        >>> class SelfAttention(torch.nn.Module):
        ...     def __init__(self, dim):
        ...         super().__init__()
        ...         self.qkv = torch.nn.Linear(dim, 3 * dim)
        ...     def forward(self, x):
        ...         q, k, v = self.qkv(x).chunk(3, dim=-1)
        ...         scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        ...         return scores.softmax(dim=1) @ v
        >>> report = regard.check(SelfAttention, 16)
        >>> report.verdict, report.findings[0].name
        ('wrong', 'softmax-wrong-axis')

    Source:
        The catalogue of mistakes is ours, from public issues: ``report.findings[0].fault.sources``.
    """
    if causal is None and _is_named_causal(thing, options):
        causal = True
    # The samples are on the CPU, so the code under check creates its tensors there, too.
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if elsewhere else nullcontext():
        passed = _with_intention(thing, options, causal)
        if args is not None or kwargs is not None:
            built = built_from(thing, class_args, passed)
            rest = {} if inspect.isclass(thing) else passed
            sent = {**rest, **(kwargs or {})}
            return _by_example(built, args or (), sent, means or {}, axes, causal)
        try:
            return _report(thing, class_args, passed, means or {}, causal)
        except ValueError as error:
            arrays = _arrays(thing)
            if arrays is None or not isinstance(error.__cause__, TypeError | AttributeError):
                raise
            call = cast("Callable[..., Any]", thing)
            report = _by_example(call, arrays, passed, means or {}, axes, causal)
            if report.laws[0].outcome != "held":
                raise
            return report


def _arrays(thing: object) -> tuple[Any, ...] | None:
    """Return NumPy arrays for a function of query, key and value alone; None for anything else."""
    if not inspect.isfunction(thing):
        return None
    needed = [a for a in arguments_of(thing, ()) if a.required]
    if [a.role for a in needed] != ["query", "key", "value"]:
        return None
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 7, 16, generator=generator, device="cpu").numpy() for _ in needed)


def _is_named_causal(thing: object, options: Mapping[str, Any]) -> bool:
    """Return True if the name of the code declares that it is causal."""
    target = type(thing) if isinstance(thing, nn.Module) else thing
    name = getattr(target, "__name__", "")
    said = re.search(r"(?<![a-z])[Cc]ausal", name) and not re.search(r"[Nn]on_?[Cc]ausal", name)
    return bool(said) and not any(options.get(name) is False for name in ("causal", "is_causal"))


def _by_example(
    thing: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    means: Mapping[str, str],
    axes: str | Mapping[str, str] | None,
    causal: bool | None,
) -> Report:
    """The report on code with the arguments of an example call."""
    name = getattr(thing, "__name__", type(thing).__name__)
    thing = independent(thing).float().eval() if isinstance(thing, nn.Module) else thing
    specimen = example_specimen(thing, args, kwargs, means=means, axes=axes, causal=causal)
    plain = Report(name, (), specimen.words)
    report = by_laws(plain, specimen, is_read=False)
    if report.verdict != "wrong":
        return report
    try:
        named = _explained(specimen, means, causal)
    except Exception:  # noqa: BLE001  # somebody's code may raise anything
        return report
    # The catalogue explains what a law has found; it judges nothing itself.
    known = tuple(finding for finding in named.faults if finding.number)
    return replace(report, findings=known) if known else report


def _explained(specimen: Specimen, means: Mapping[str, str], causal: bool | None) -> Report:
    """The report by the catalogue on the sizes of an example.

    Raises:
        ValueError: the example has axes that the catalogue does not know.
    """
    sources = specimen.sources
    rest = {slot.name: slot.value for slot in specimen.slots if not slot.source}
    given = as_given(specimen.call, (), rest, means)
    first = next(iter(sources.values()))
    orders: dict[tuple[str, ...], Order] = {
        ("b", "t", ""): "btd",
        ("t", ""): "td",
        ("t", "b", ""): "tbd",
        ("b", "", "t", ""): "bhtd",
        ("b", "t", "", ""): "bthd",
    }
    pattern = tuple(axis if isinstance(axis, str) else "" for axis in first.axes)
    if pattern not in orders or first.high:
        raise ValueError("the example has other axes")
    numbers = [axis for axis in first.axes if isinstance(axis, int)]
    heads = numbers[0] if len(numbers) == 2 else 1
    key = sources.get("key", first)
    kv_heads = next(n for n in key.axes if isinstance(n, int)) if heads > 1 else 1
    batch = specimen.batch if "b" in first.axes else 1
    width = heads * numbers[-1]
    layout = Layout(orders[pattern], batch, specimen.tokens, width, heads, kv_heads)
    return examined(laid(given, layout), causal, pairs=False)


def _report(
    thing: object,
    args: tuple[Any, ...],
    options: dict[str, Any],
    means: Mapping[str, str],
    causal: bool | None,
) -> Report:
    given = as_given(thing, args, options, means)
    _no_masks(given)
    if given.kind == "scores":
        return scores_report(given, causal)
    scores = _of_scores(given, causal)
    if scores is not None:
        return scores
    subject = _running(given)
    inside = (
        attentions_inside(subject) if isinstance(thing, nn.Module) or inspect.isclass(thing) else {}
    )
    if len(inside) > 1 or subject.given.vocabulary:
        return _by_parts(subject, inside, causal)
    report = examined(subject, causal)
    if report.missing and inside and "" not in inside:
        alone = _by_parts(subject, inside, causal)
        return alone if alone.faults else replace(report, missing=_around(report, inside))
    return report


def _of_scores(given: Given, causal: bool | None) -> Report | None:
    """The report on a function of one tensor, of which no name says that it is scores.

    None where that explains nothing, or finds mistakes where it may be something else.
    """
    scores = as_scores(given)
    if scores is None:
        return None
    try:
        report = scores_report(scores, causal)
    except ValueError:
        return None
    is_sure = not report.faults or speaks_of_scores(given)
    return report if is_sure and report.missing != UNKNOWN else None


def _with_intention(
    thing: object, options: Mapping[str, Any], causal: bool | None
) -> dict[str, Any]:
    """The options, with ``causal`` where the thing itself has such an argument."""
    passed = dict(options)
    if causal is not None and callable(thing) and not isinstance(thing, nn.Module):
        names = inspect.signature(thing).parameters
        passed |= {name: causal for name in ("causal", "is_causal") if name in names}
    return passed


def _no_masks(given: Given) -> None:
    for name, value in given.options.items():
        if isinstance(value, Tensor) and "mask" in name:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; check makes masks itself, for the inputs "
                f"that it tries.\n    Leave it out: regard.check({given.name})."
            )


def _around(report: Report, inside: Mapping[str, nn.Module]) -> str:
    names = ", ".join(inside)
    return f"{report.missing}\nAlone, {names} has no mistake; what is around it is unclear."


def _running(given: Given) -> Subject:
    """The subject as it runs: on embeddings, or on numbers of tokens where it takes those."""
    try:
        return running(given)
    except ValueError:
        tables = [m for m in given.model.modules() if isinstance(m, nn.Embedding)]
        if not tables or given.kind != "embeddings":
            raise
        try:
            return running(replace(given, vocabulary=min(t.num_embeddings for t in tables)))
        except ValueError:
            pass
        raise


_MIXED = (
    "It holds a softmax of its own beside other attentions or a table of tokens; what is a module "
    "or a function of embeddings alone can be judged."
)


def _by_parts(subject: Subject, inside: Mapping[str, nn.Module], causal: bool | None) -> Report:
    """The report on a model with several attentions: each is judged alone, one of each kind.

    Whether a token may attend to later ones may be decided outside of one that takes a mask, so
    that the whole model is asked.
    """
    given = subject.given
    findings: list[Finding] = []
    missing = [] if inside else ["No softmax was seen in it."]
    for name, module in inside.items():
        if not name:
            missing.append(_MIXED)
            continue
        shown = f"{name} ({type(module).__name__})"
        try:
            part = as_given(module, (), {})
            told = takes_masks(part.arguments) or part.argument("memory") is not None
            report = examined(running(part), None if told else causal)
        except ValueError as error:
            reason = str(error).partition("The first error was ")[2] or str(error)
            missing.append(f"{shown} does not run alone: {reason}")
            continue
        if report.missing:
            missing.append(f"{shown}: {report.missing}")
        findings += [
            replace(finding, detail=f"In {shown}. {finding.detail}".strip())
            for finding in report.findings
            if finding.name != "no-positions"
        ]
    whole = None
    faulty = any(finding.severity == "fault" for finding in findings)
    if causal and not faulty and looks_ahead(subject):
        whole = "not-causal"
    elif not causal and ignores_order(subject):
        whole = "no-positions"
    if whole is not None:
        entry = fault(whole)
        findings.append(Finding(entry, entry.severity, None, None, "In the whole model."))
    findings.sort(key=lambda finding: (finding.severity == "note", finding.number))
    read_as = f"{_taken(subject)}, judged by its attentions, one of each kind: {', '.join(inside)}"
    return Report(given.name, tuple(findings), read_as, "\n".join(missing))


def _taken(subject: Subject) -> str:
    return "numbers of tokens" if subject.given.vocabulary else subject.layout.axes
