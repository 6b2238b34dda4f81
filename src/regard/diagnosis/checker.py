"""``check``: run somebody's attention, and say which mistakes it makes."""

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.catalogue import fault
from regard.diagnosis.input_probes import ignores_order, looks_ahead
from regard.diagnosis.isolation import undisturbed
from regard.diagnosis.mask_arguments import takes_masks
from regard.diagnosis.nested_attention import attentions_inside
from regard.diagnosis.report import Finding, Report
from regard.diagnosis.score_functions import UNKNOWN, as_scores, scores_report, speaks_of_scores
from regard.diagnosis.single_attention import examined, running
from regard.diagnosis.subject import Given, Subject, as_given

__all__ = ["check"]


@undisturbed
def check(thing: object, *args: Any, causal: bool | None = None, **options: Any) -> Report:
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
        *args: for the class.
        causal: whether a token may attend to later ones: True where it must not, False where it
            may. None: both are right.
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
    # The samples are on the CPU, so the code under check creates its tensors there, too.
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if elsewhere else nullcontext():
        return _report(thing, args, _with_intention(thing, options, causal), causal)


def _report(
    thing: object, args: tuple[Any, ...], options: dict[str, Any], causal: bool | None
) -> Report:
    given = as_given(thing, args, options)
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
