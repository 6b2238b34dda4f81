"""``check``: judge somebody's attention by the laws of attention, and explain what is wrong."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.expectation import Spec
from regard.diagnosis.facts.computed import computed
from regard.diagnosis.inputs.class_arguments import guessed_arguments
from regard.diagnosis.inputs.examples import example_specimens
from regard.diagnosis.inputs.isolation import undisturbed
from regard.diagnosis.inputs.mask_forms import takes_masks
from regard.diagnosis.inputs.one_query import of_queries, things_of_queries
from regard.diagnosis.inputs.reading import (
    Thing,
    as_scores,
    declared_order,
    grouped,
    specimens,
    thing_of,
)
from regard.diagnosis.inputs.signature import signature_of
from regard.diagnosis.inputs.specimen import Specimen
from regard.diagnosis.inputs.subject import built_from, copied, is_installed, quiet
from regard.diagnosis.intention import Intention, intention_of
from regard.diagnosis.kernels.kernel_check import kernel_report
from regard.diagnosis.laws.cached import FILLED, has_filled_cache
from regard.diagnosis.report import Finding, Report
from regard.diagnosis.stating import fact_findings, report_on, stated


@undisturbed()
def check(
    thing: object,
    *class_args: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    means: Mapping[str, str] | None = None,
    axes: str | Mapping[str, str] | None = None,
    causal: bool | None = None,
    expect: Spec | None = None,
    run_dtype: torch.dtype | None = None,
    run_device: torch.device | str | None = None,
    **options: Any,
) -> Report:
    """Say what an attention computes, and judge it: right, different, wrong, or cannot tell.

    It runs on small random inputs, as a copy in eval mode. What it computes is read from the
    numbers of one run, as a formula with facts, and verified on inputs that were not used to find
    it. Then the facts are compared with ``expect``, or with the standard: a scale of 1/√head_dim,
    and a mask that is one. ``different`` is what somebody may mean so; ``wrong`` breaks a law that
    every attention obeys, or contradicts what was expected.

    The code runs in this process, with no limit of time: a loop without end does not come back.
    ``regard check FILE:NAME --timeout 10`` in a shell runs it in a process of its own and ends it.

    Args:
        thing: a module from embeddings (batch, tokens, dim), or (tokens, dim), to embeddings; a
            function of query, key and value; a function of given scores; or a class of modules. Of
            a model each attention is judged, in its place.
        *class_args: for the class; what is missing is guessed from common names, such as
            ``d_model`` and ``num_heads``, and the report says what.
        args: of an example call, by position: it fixes dtypes, shapes and all that check cannot
            guess, such as images, cached keys, tables of positions or ``cu_seqlens``.
        kwargs: of the example call, by name.
        means: what a mask means, by the name of its argument: ``{"mask": "True hides"}``.
        axes: of the example's first argument, or of arguments by name: ``"batch tokens dim"``;
            without an example, of all inputs. Not declared, several orders are tried.
        causal: True: no token may attend to later ones; False: tokens attend to later ones. None:
            both are right.
        expect: what it is meant to compute, from ``regard.spec``; each fact is compared with it.
        run_dtype: of a fused function of query, key and value: its outputs and gradients in this
            dtype may be off by twice the error of plain PyTorch, plus one rounding. float32 where
            only ``run_device`` is given.
        run_device: where such a function runs, such as "cuda"; the CPU where only ``run_dtype`` is
            given.
        **options: for the class by name, or what the function takes besides its tensors.

    Returns:
        A report: what it ``computes``, its ``findings``, ``ok``, ``verdict``; printed it shows
        all, and ends with the call, or the ``expect=`` alone, that pins what the code computes.

    Raises:
        TypeError: the thing cannot be called, or arguments of the class are missing.
        ValueError: ``causal`` or ``means`` contradicts ``expect``; it fails on every input that was
            tried, or gives nothing that is an output; a mask is given, which check makes itself;
            the code ends Python, or needs CUDA where there is none.

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
    intention = intention_of(expect, causal, means)
    guessed = guessed_arguments(thing, class_args, options)
    options = {**guessed, **options}
    if run_dtype is not None or run_device is not None:
        _refuse_with_kernels(args, kwargs, means)
        name = getattr(thing, "__name__", type(thing).__name__)
        passed = _with_causal(thing, options, intention.causal)
        built = built_from(thing, class_args, passed)
        rest = {} if inspect.isclass(thing) else passed
        report = kernel_report(built, name, rest, intention.spec, axes, run_dtype, run_device)
    else:
        report = _checked(thing, class_args, options, args, kwargs, axes, intention)
    if not guessed:
        return report
    words = ", ".join(f"{name}={value}" for name, value in guessed.items())
    return replace(report, read_as=f"{report.read_as}, built with {words}")


def _checked(
    thing: object,
    class_args: tuple[Any, ...],
    options: Mapping[str, Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    axes: str | Mapping[str, str] | None,
    intention: Intention,
) -> Report:
    """Return the report on anything that runs in float64 on the CPU."""
    name = getattr(thing, "__name__", type(thing).__name__)
    passed = _with_causal(thing, options, intention.causal)
    built = built_from(thing, class_args, passed)
    if inspect.isbuiltin(built):
        raise ValueError(f"{name} is a builtin; check a function of yours that calls it.")
    intention.check_arguments(built)
    rest = {} if inspect.isclass(thing) else passed
    if intention.causal is not None and isinstance(built, nn.Module) and not is_installed(built):
        rest = {**dict.fromkeys(_causal_flags(built), intention.causal), **rest}
    if isinstance(args, Tensor) or not isinstance(kwargs or {}, Mapping):
        raise TypeError("args and kwargs are those of a call: pass args=(x,) and kwargs={'m': m}.")
    if inspect.iscoroutinefunction(getattr(built, "forward", built)):
        raise ValueError(f"{name} is async; check calls functions that return their result.")
    unfilled = [key for key, value in {**rest, **(kwargs or {})}.items() if value is ...]
    if unfilled:
        raise ValueError(f"{unfilled[0]} is `...`; pass what the call passes there.")
    if args is None and kwargs is None:
        _refuse_masks(name, rest)
        counted = (*class_args, *passed.values()) if inspect.isclass(thing) else ()
        numbers = tuple(number for number in counted if type(number) is int)
        code = thing_of(built, name, rest, intention.means, numbers)
        report = _report(replace(code, order=declared_order(axes)), intention)
    else:
        report = _by_example(built, args or (), {**rest, **(kwargs or {})}, axes, intention)
    spec = None if report.computes is None else report.computes.spec
    if spec is None or intention.expected is not None or report.faults:
        return report
    pin = f"expect={spec!r}"
    if args is None and kwargs is None:
        call = _call_text(thing, class_args, passed if inspect.isclass(thing) else rest)
        if any(finding.name == _ACROSS for finding in report.findings):
            axes = _TOKENS_FIRST
        pin = pin if axes is None else f"axes={axes!r}, {pin}"
        pin = f"regard.check({call}, {pin})" if call else pin
    return replace(report, pin=pin)


def _refuse_with_kernels(*given: object) -> None:
    for name, value in zip(("args", "kwargs", "means"), given, strict=True):
        if value is not None:
            raise ValueError(
                f"{name} is given; with run_dtype or run_device check makes query, key and value "
                f"itself, of many lengths.\n    Leave {name} out."
            )


def _of_one_query(code: Thing, intention: Intention) -> Report | None:
    """Return the report on code of one query, or of one for each sample; None if it is none."""
    for thing in things_of_queries(code):
        with suppress(ValueError):  # it fails on every input
            readings = specimens(thing, intention.causal)
            shorter = (replace(each, tokens=_QUERIES, most_tokens=_MOST) for each in readings)
            formulas = computed(shorter)
            if formulas.unread is None or formulas.unread.mistakes:
                report = stated(formulas, intention)
                return replace(report, notes=(*report.notes, _ONE_QUERY))
    return None


def _call_text(thing: object, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the arguments of ``check`` as they are written; "" if they have no name or repr."""
    plain = (int, float, str, bool, type(None))
    if not all(isinstance(value, plain) for value in (*args, *options.values())):
        return ""
    name = thing.__name__ if isinstance(thing, type | FunctionType) else ""
    texts = [*map(repr, args), *(f"{option}={value!r}" for option, value in options.items())]
    return ", ".join([name, *texts]) if name.isidentifier() else ""


def _by_example(
    built: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axes: str | Mapping[str, str] | None,
    intention: Intention,
) -> Report:
    """Return the report on code with the arguments of an example call."""
    call = copied(built) if isinstance(built, nn.Module) else built
    means, causal = intention.means, intention.causal
    each = None if axes is not None else of_queries(call, args, kwargs)
    if each is not None:
        report = _by_example(each[0], (), each[1], "batch tokens dim", intention)
        return replace(report, notes=(*report.notes, _ONE_QUERY))
    orders = list(example_specimens(call, args, kwargs, means=means, axes=axes, causal=causal))
    if has_filled_cache(orders[0]):
        return Report(orders[0].name, (), orders[0].words, FILLED)
    if orders[0].has_tokens and orders[0].tokens == 1:
        return Report(orders[0].name, (), orders[0].words, _ONE_TOKEN)
    return report_on(orders, intention)


_QUERIES, _MOST = 5, 11  # each of them is a call
_ONE_QUERY = "It takes one query at a time."
_ONE_TOKEN = "The example has one token, whose only weight is 1: pass one with several tokens."


def _with_causal(thing: object, options: Mapping[str, Any], causal: bool | None) -> dict[str, Any]:
    """Return the options, with ``causal`` where the thing itself has such an argument."""
    if causal is None or not callable(thing) or isinstance(thing, nn.Module):
        return dict(options)
    return {**options, **dict.fromkeys(_causal_flags(thing), causal)}


def _causal_flags(thing: Callable[..., Any]) -> list[str]:
    try:
        names = signature_of(thing).parameters
    except ValueError:  # functions written in C may have none
        return []
    return [name for name in ("causal", "is_causal") if name in names]


def _refuse_masks(name: str, options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if isinstance(value, Tensor) and "mask" in key:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}; check makes masks itself, for the inputs "
                f"that it tries.\n    Leave it out: regard.check({name})."
            )


def _report(code: Thing, intention: Intention) -> Report:
    if (scores := as_scores(code)) is not None:
        with suppress(ValueError):
            report = _of_scores(scores, intention)
            is_named = _SCORES.search(code.name.lower()) or takes_masks(code.arguments)
            if report.ok or report.missing == _ONE_ROW or (report.faults and is_named):
                return report
    if code.kind == "scores":
        return _of_scores(code, intention)
    try:
        formulas = computed(specimens(code, intention.causal))
    except ValueError:
        report = _of_one_query(code, intention)
        if report is not None:
            return report
        formulas = computed(specimens(code, intention.causal, is_square=True))
    report = stated(formulas, intention)
    if report.faults or formulas.unread is not None:
        return _with_tokens_first(report, code, intention)
    return _with_groups(report, code, formulas.specimen, intention)


_ACROSS, _TOKENS_FIRST = "attends-across-batch", "tokens batch dim"


def _with_tokens_first(report: Report, code: Thing, intention: Intention) -> Report:
    """Return a report on code that is right if its first axis is that of the tokens.

    That is a choice that somebody may make, and no number tells. Where an intention leaves it out,
    the code stays wrong, and the finding says how to declare it.
    """
    across = next((finding for finding in report.faults if finding.name == _ACROSS), None)
    if across is None or code.order is not None:
        return report
    with suppress(ValueError):  # it fails on every input
        turned = replace(code, order=declared_order(_TOKENS_FIRST))
        formulas = computed(specimens(turned, intention.causal))
        other = stated(formulas, intention) if formulas.unread is None else report
        if not other.faults:
            detail = (
                "axes: tokens, batch; the standard: batch, tokens. If it is meant so, pass "
                f"axes={_TOKENS_FIRST!r}."
            )
            is_free = intention.expected is None
            entry = replace(across.fault, severity="difference") if is_free else across.fault
            finding = Finding(entry, across.file, across.line, detail)
            if not is_free:
                rest = (each for each in report.findings if each is not across)
                return replace(report, findings=(finding, *rest))
            return replace(other, findings=(finding, *other.findings))
    return report


def _with_groups(report: Report, code: Thing, read: Specimen, intention: Intention) -> Report:
    """Return a report with what only fewer heads of keys show: that they are in another order."""
    specimen = grouped(code, read)
    formulas = None if specimen is None else computed([specimen])
    if formulas is None or formulas.unread is not None:
        return report
    findings = [
        finding
        for finding in fact_findings(formulas, intention)
        if finding.name == "kv-heads-repeated-in-wrong-order"
    ]
    return replace(report, findings=(*report.findings, *findings))


_SCORES = re.compile("softmax|weights")
_ONE_ROW = (
    "It is right for the scores of one query alone; of several queries it divides by one sum of "
    "them all, where each of their rows should sum to 1. It can be told where it takes one of the "
    "two only; exp(scores) / exp(scores).sum(-1, keepdim=True) is right for both."
)


def _of_scores(code: Thing, intention: Intention) -> Report:
    """Return the report on a function of scores."""
    report = report_on(specimens(code, intention.causal), intention)
    is_read = report.computes is not None and report.computes.is_known
    is_free = not (is_read or intention.causal) and code.of("value") is None
    if report.faults and is_free and _divides_by_one_sum(code.call):
        return replace(report, findings=(), missing=_ONE_ROW)
    return report


def _divides_by_one_sum(call: Callable[..., Any]) -> bool:
    """Return True if a function of scores is a softmax over all scores together."""
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    with suppress(Exception), quiet():  # somebody's code may raise anything
        return torch.allclose(call(scores), scores.flatten().softmax(0).view(5, 5), atol=1e-5)
    return False
