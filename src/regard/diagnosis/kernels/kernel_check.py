"""Judge a fused function of query, key and value, in the dtype and on the device that it needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.diagnosis.expectation import ANY, Spec, spec
from regard.diagnosis.facts.statement import Computes
from regard.diagnosis.inputs.subject import quiet
from regard.diagnosis.inputs.tape import in_words
from regard.diagnosis.kernels.cases import FIRST, cases_of
from regard.diagnosis.kernels.error_budget import output_error
from regard.diagnosis.kernels.running import LAYOUTS, Kernel
from regard.diagnosis.kernels.standard import Standard, standard_of
from regard.diagnosis.kernels.trial import Trial
from regard.diagnosis.report import Report
from regard.masks import SlidingWindow

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 32)
_HEADS = 4


def kernel_report(
    call: Callable[..., Any],
    name: str,
    options: Mapping[str, Any],
    expected: Spec | None,
    axes: object,
    run_dtype: torch.dtype | None,
    run_device: torch.device | str | None,
) -> Report:
    """Return the report on a function of query, key and value.

    Raises:
        TypeError: ``run_dtype`` is no dtype, or ``axes`` no text.
        ValueError: it fails on all inputs; the device is missing; the dtype or the axes are none
            that kernels have; the spec names what query, key and value do not tell.
    """
    dtype, device = _dtype(run_dtype), _device(run_device)
    meant = spec() if expected is None else expected
    layouts = list(LAYOUTS) if axes is None else [_layout(axes)]
    if isinstance(meant.heads, int) and meant.heads > 1:
        layouts = [layout for layout in layouts if "heads" in layout]
    tried = (False, True) if meant.causal is ANY else (bool(meant.causal),)
    standards = [standard_of(meant, causal=causal) for causal in tried]
    kernels = [
        Kernel(call, options, layout, dtype, device, head_dim)
        for head_dim in _HEAD_DIMS
        for layout in layouts
    ]
    heads, kv_heads = counts = _counts(meant)
    with quiet(runs_compiled=True):
        kernel, standard, fits = _fitting(kernels, standards, counts, name)
        words, where = _axes(kernel), f"{str(dtype).removeprefix('torch.')} on {device}"
        if not fits and kernel.layout != layouts[0]:
            return Report(
                name, (), f"{words}, in {where}", _OTHER_AXES.format(_axes(kernels[0]), words)
            )
        trial = Trial(kernel, standard, heads, kv_heads)
        for case in cases_of(standard, _groups(meant) if kernel.has_heads else None):
            trial.run(case)
    findings = tuple(sorted(trial.findings.values(), key=lambda finding: finding.number))
    if findings:
        return Report(name, findings, f"{words}, in {where}", notes=trial.notes)
    computes, pin = _computes(trial, meant), ""
    if expected is None:
        run = f"run_dtype={dtype}, run_device={str(device)!r}"
        pin = f"regard.check({name}, expect={computes.spec!r}, {run})"
    return Report(
        name,
        (),
        f"{words}, in {where}",
        missing=_untried(trial),
        notes=trial.notes,
        computes=computes,
        pin=pin,
    )


def _dtype(run_dtype: object) -> torch.dtype:
    if run_dtype is None:
        return torch.float32
    if not isinstance(run_dtype, torch.dtype):
        raise TypeError(f"run_dtype is {run_dtype!r}; it must be a dtype, such as torch.bfloat16.")
    if run_dtype not in _DTYPES:
        words = ", ".join(map(str, _DTYPES))
        raise ValueError(f"run_dtype is {run_dtype}; it must be one of {words}.")
    return run_dtype


def _device(run_device: torch.device | str | None) -> torch.device:
    try:
        device = torch.device("cpu" if run_device is None else run_device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"run_device is {run_device!r}, where nothing runs: {reason}.") from None
    if device.type == "meta":
        raise ValueError("run_device is 'meta', whose tensors have no numbers.")
    return device


def _layout(axes: object) -> str:
    if not isinstance(axes, str):
        raise TypeError(f"axes is {axes!r}; with run_dtype or run_device it must be a text.")
    if axes not in LAYOUTS:
        words = ", ".join(map(repr, LAYOUTS))
        raise ValueError(f"axes is {axes!r}; those of a kernel must be one of {words}.")
    return axes


def _counts(meant: Spec) -> tuple[int, int]:
    """Return the numbers of heads of queries and of keys to try."""
    kv_heads = meant.kv_heads if isinstance(meant.kv_heads, int) else None
    if isinstance(meant.heads, int):
        return meant.heads, kv_heads or meant.heads
    return (_HEADS, _HEADS) if kv_heads is None else (2 * kv_heads, kv_heads)


def _groups(meant: Spec) -> tuple[int, int] | None:
    """Return heads of queries and fewer ones of keys to try, where the spec names neither."""
    is_free = meant.heads is ANY and meant.kv_heads is None
    return (2 * _HEADS, _HEADS // 2) if is_free else None


def _fitting(
    kernels: Sequence[Kernel], standards: Sequence[Standard], counts: tuple[int, int], name: str
) -> tuple[Kernel, Standard, bool]:
    """Return the axes and the attention that the first output has; else the first that ran.

    The third one is True if the output has them.

    Raises:
        ValueError: it runs with no axes.
    """
    ran: list[tuple[Kernel, Standard]] = []
    first: Exception | None = None
    for kernel in kernels:
        inputs = kernel.inputs(FIRST, *counts)
        try:
            run = kernel.run(inputs)
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            first = first or error
            continue
        output = kernel.unlaid(run.output)
        for standard in standards:
            if output_error(standard, inputs, output, kernel.device).is_allowed:
                return kernel, standard, True
            ran.append((kernel, standard))
    if ran:
        return (*ran[0], False)
    assert first is not None
    shape = tuple(kernels[0].laid(kernels[0].inputs(FIRST, *counts).query).shape)
    raise ValueError(
        f"{name} fails on every input that was tried; the first error was {in_words(first)}.\n"
        f"    It was called with query, key and value alone, of {shape} and other axes; "
        "expect=regard.spec(heads=...) sets the number of heads, and lambda q, k, v: ... what else "
        "it needs."
    ) from first


def _axes(kernel: Kernel) -> str:
    return f"({kernel.layout.replace(' ', ', ')})"


_OTHER_AXES = (
    "It refuses {}, and as {} its output is not that of attention, so that its axes are unknown.\n"
    "Pass axes, or put a function around it that takes (batch, heads, tokens, dim)."
)


def _computes(trial: Trial, meant: Spec) -> Computes:
    """Return the formula that all cases confirm."""
    standard, head_dim = trial.standard, trial.kernel.head_dim
    scores = f"q·kᵀ/√{head_dim}" if standard.scale is None else f"{standard.scale:.4g}·q·kᵀ"
    if standard.softcap is not None:
        scores = f"{standard.softcap:.4g}·tanh({scores}/{standard.softcap:.4g})"
    mask = "" if standard.mask is None else " + mask"
    heads = f"{trial.heads} heads of {head_dim}" if trial.kernel.has_heads else "one head"
    if trial.kv_heads != trial.heads:
        heads += f", {trial.kv_heads} of keys"
    lengths = [length for case in trial.judged for length in (case.q_len, case.kv_len)]
    inputs = "one input" if len(trial.judged) == 1 else f"{len(trial.judged)} inputs"
    domain = (
        f"verified on {inputs} of {min(lengths)} to {max(lengths)} tokens, {trial.num_gradients} "
        f"with gradients; the largest error is {trial.largest_share:.2f} of what is allowed"
    )
    sees_later_keys = bool(standard.visible(2, 2, torch.device("cpu"))[0, 1])
    pinned = replace(meant, causal=not sees_later_keys)
    formula, facts = f"softmax({scores}{mask})·v", f"{heads}, {standard.mask_words}"
    return Computes(formula, (facts,), domain, "", "", pinned)


def _untried(trial: Trial) -> str:
    """Return what no case could show: a window that is longer than all of them."""
    mask = trial.standard.mask
    if not isinstance(mask, SlidingWindow):
        return ""
    longest = max((case.kv_len for case in trial.judged), default=0)
    if max(mask.left, mask.right) < longest - 1:
        return ""
    return f"{trial.standard.mask_words} does not show in {longest} tokens, the most that ran."
