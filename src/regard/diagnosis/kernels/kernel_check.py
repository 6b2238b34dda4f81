"""Judge a fused function of query, key and value, in the dtype and on the device that it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.diagnosis.catalogue import Fault, fault
from regard.diagnosis.expectation import ANY, Spec, spec
from regard.diagnosis.explaining import compared
from regard.diagnosis.facts.statement import Computes
from regard.diagnosis.kernels.cases import HEAD_DIM, Case, Inputs, cases_of
from regard.diagnosis.kernels.error_budget import Error, gradient_errors, output_error
from regard.diagnosis.kernels.running import LAYOUTS, Kernel, Run
from regard.diagnosis.kernels.standard import Standard, mistaken, standard_of
from regard.diagnosis.report import Finding, Report, finding_of
from regard.diagnosis.subject import quiet

__all__ = ["kernel_report"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HEADS = 4
_FIRST = Case("128 tokens", 128, 128)


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
    kernels = [Kernel(call, options, layout, dtype, device) for layout in layouts]
    with quiet(runs_compiled=True):
        kernel, standard = _fitting(kernels, standards, meant, name)
        report = _Trial(kernel, standard, meant).report(name)
    if expected is not None or report.faults:
        return report
    pinned = replace(meant, causal=standard.mask is not None)
    pin = f"regard.check({name}, expect={pinned!r}, run_dtype={dtype}, run_device={str(device)!r})"
    return replace(report, pin=pin)


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


def _fitting(
    kernels: list[Kernel], standards: list[Standard], meant: Spec, name: str
) -> tuple[Kernel, Standard]:
    """Return the axes and the attention that the first output has; else the first that ran.

    Raises:
        ValueError: it runs with no axes.
    """
    ran: list[tuple[Kernel, Standard]] = []
    first: Exception | None = None
    for kernel in kernels:
        inputs = kernel.inputs(_FIRST, *_counts(meant))
        try:
            run = kernel.run(inputs)
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            first = first or error
            continue
        output = kernel.unlaid(run.output)
        for standard in standards:
            if output_error(standard, inputs, output, kernel.device).is_allowed:
                return kernel, standard
            ran.append((kernel, standard))
    if not ran:
        raise ValueError(
            f"{name} fails on every input that was tried; the first error was {_words(first)}.\n"
            "    It must take query, key and value alone: write lambda q, k, v: ... around it."
        ) from first
    return ran[0]


def _words(error: Exception | None) -> str:
    said = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {said[:_LONGEST]}"


_LONGEST = 120


@dataclass(eq=False)
class _Trial:
    """All cases of one kernel, and what they show."""

    kernel: Kernel
    standard: Standard
    meant: Spec
    findings: dict[str, Finding] = field(default_factory=dict[str, Finding])
    refused: list[str] = field(default_factory=list[str])
    judged: list[Case] = field(default_factory=list[Case])
    num_gradients: int = 0
    largest_share: float = 0.0

    def report(self, name: str) -> Report:
        """Return the report, after all cases were run."""
        given = self.meant.kv_heads if isinstance(self.meant.kv_heads, int) else None
        has_groups = self.kernel.has_heads and _counts(self.meant)[0] % 2 == 0
        for case in cases_of(self.standard, has_heads=has_groups, kv_heads=given):
            self._try(case)
        where = f"{str(self.kernel.dtype).removeprefix('torch.')} on {self.kernel.device}"
        findings = tuple(sorted(self.findings.values(), key=lambda finding: finding.number))
        computes = None if findings else self._computes()
        read_as = f"({self.kernel.layout.replace(' ', ', ')}), in {where}"
        return Report(name, findings, read_as, notes=tuple(self.refused), computes=computes)

    def _computes(self) -> Computes:
        standard, (heads, kv_heads) = self.standard, _counts(self.meant)
        scale = f"q·kᵀ/√{HEAD_DIM}" if standard.scale is None else f"{standard.scale:.4g}·q·kᵀ"
        if standard.softcap is not None:
            scale = f"{standard.softcap:.4g}·tanh({scale}/{standard.softcap:.4g})"
        mask = "" if standard.mask is None else " + mask"
        heads_text = f"{heads} heads of {HEAD_DIM}" if self.kernel.has_heads else "one head"
        if kv_heads != heads:
            heads_text += f", {kv_heads} of keys"
        facts = f"{heads_text}, {standard.mask_words}"
        longest = max(max(case.q_len, case.kv_len) for case in self.judged)
        domain = (
            f"verified on {len(self.judged)} inputs of 1 to {longest} tokens, "
            f"{self.num_gradients} with gradients; the largest error is {self.largest_share:.2f} "
            "of what is allowed"
        )
        pinned = replace(self.meant, causal=standard.mask is not None)
        return Computes(f"softmax({scale}{mask})·v", (facts,), domain, "", "", pinned)

    def _try(self, case: Case) -> None:
        """Run one case, and note what is wrong with it."""
        inputs = self.kernel.inputs(case, *_counts(self.meant))
        run = self._run(case, inputs)
        if run is None:
            return
        self.judged.append(case)
        if run.has_changed_inputs:
            self._add(Fault("pure", "It writes into its inputs.", ""), f"With {case.words}.")
        output = self.kernel.unlaid(run.output)
        error = output_error(self.standard, inputs, output, self.kernel.device)
        self.largest_share = max(self.largest_share, error.share)
        if not error.is_allowed:
            self._explain(case, inputs, output, error)
        elif case.has_gradient:
            self._try_gradients(case, inputs, run)

    def _run(self, case: Case, inputs: Inputs) -> Run | None:
        """Return the run of one case; None, with a note, if the kernel refuses it."""
        refusal: Exception | None = None
        for has_gradient in (True, False) if case.has_gradient else (False,):
            try:
                run = self.kernel.run(inputs, is_view=case.is_view, has_gradient=has_gradient)
            except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
                refusal = refusal or error
                continue
            if refusal is not None:
                self._refuse("inputs that need a gradient", refusal)
            return run
        assert refusal is not None
        self._refuse(case.words, refusal)
        return None

    def _refuse(self, words: str, error: Exception) -> None:
        """Note what a kernel refuses; a crash of the device is no refusal."""
        if "CUDA error" in str(error):
            entry = Fault("runs", "It ends the work of the device.", "")
            self._add(entry, f"With {words}: {_words(error)}.")
            return
        note = f"It refuses {words} ({_words(error)}); that was not tried."
        if note not in self.refused:
            self.refused.append(note)

    def _try_gradients(self, case: Case, inputs: Inputs, run: Run) -> None:
        if not run.passed[0].requires_grad:
            return
        if not run.output.requires_grad:
            note = "Its output has no gradient, so that no backward pass was tried."
            if note not in self.refused:
                self.refused.append(note)
            return
        q_len, kv_len = inputs.query.shape[-2], inputs.key.shape[-2]
        visible = self.standard.visible(q_len, kv_len, torch.device("cpu"))
        upstream = inputs.upstream * visible.any(-1, keepdim=True)
        inputs = replace(inputs, upstream=upstream)
        laid = self.kernel.laid(upstream, is_view=case.is_view).to(run.output.dtype)
        try:
            found = torch.autograd.grad(run.output, run.passed, laid, allow_unused=True)
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            self._refuse(f"a backward pass with {case.words}", error)
            return
        gradients = cast("tuple[Tensor | None, ...]", found)
        self.num_gradients += 1
        numbers = [self.kernel.unlaid(t) for t in gradients if t is not None]
        if len(numbers) < len(_NAMES):
            missing = next(n for n, t in zip(_NAMES, gradients, strict=True) if t is None)
            entry = Fault("gradient", f"No gradient reaches the {missing}.", "")
            self._add(entry, f"With {case.words}.")
            return
        errors = gradient_errors(self.standard, inputs, numbers, self.kernel.device)
        for name, error in zip(_NAMES, errors, strict=True):
            self.largest_share = max(self.largest_share, error.share)
            if not error.is_allowed:
                sentence = f"The gradient of the {name} is not that of this attention."
                self._add(Fault("gradient", sentence, ""), self._detail(case, error))

    def _explain(self, case: Case, inputs: Inputs, output: Tensor, error: Error) -> None:
        """Add the mistake that gives an output."""
        wide = inputs.to("cpu", torch.float64)
        exact = self.standard.output(wide.query, wide.key, wide.value)
        pair = compared(output, exact, "output: tokens down, columns across")
        if not bool(output.isfinite().all()):
            self._add(self._of_nan(case, output), f"With {case.words}.", pair)
            return
        if not bool(output.any()):
            self._add(Fault("output", "The output is 0 everywhere.", ""), self._detail(case, error))
            return
        for name, words, other in mistaken(self.standard, HEAD_DIM, inputs.query.shape[1]):
            if output_error(other, inputs, output, self.kernel.device).is_allowed:
                says = f"attention with {words}"
                entry = fault(name) if name else Fault("output", f"It is {says}.", "")
                detail = f"With {case.words} the output is that of {says}."
                self._add(
                    replace(entry, severity="fault"), f"{detail}{_ADVICE.get(name, '')}", pair
                )
                self.standard = other  # other cases show what else is wrong
                return
        self._add(
            Fault("output", self._unexplained(case, output), ""), self._detail(case, error), pair
        )

    def _unexplained(self, case: Case, output: Tensor) -> str:
        """Return a sentence on an output of which no mistake is known."""
        visible = self.standard.visible(case.q_len, case.kv_len, torch.device("cpu"))
        inputs = self.kernel.inputs(case, *_counts(self.meant))
        with_keys = torch.where(visible.any(-1, keepdim=True), output, 0.0)
        if output_error(self.standard, inputs, with_keys, self.kernel.device).is_allowed:
            return "A query that sees no key gives neither 0 nor the mean of the values."
        return "The output is not that of the attention that is expected."

    def _of_nan(self, case: Case, output: Tensor) -> Fault:
        visible = self.standard.visible(case.q_len, case.kv_len, torch.device("cpu"))
        bad = ~output.isfinite().all(-1)
        if not bool((bad & visible.any(-1)).any()):
            return fault("nan-rows")
        if case.kind == "nan keys":
            sentence = "A key of NaN that a query does not see makes its output NaN."
            write = "scores = scores.masked_fill(~visible, -torch.inf)  # NaN - inf is NaN"
            return Fault("output", sentence, write)
        return Fault("output", "The output is not finite.", "")

    def _detail(self, case: Case, error: Error) -> str:
        return (
            f"With {case.words} it is off by {error.actual:.2g} of its size; allowed is "
            f"{error.allowed:.2g}: twice the {error.plain:.2g} of plain PyTorch in this dtype, and "
            "one rounding."
        )

    def _add(
        self, entry: Fault, detail: str, pair: tuple[Tensor, Tensor, str] | None = None
    ) -> None:
        """Add a finding, unless one of its name and sentence is known from a case before."""
        key = entry.sentence
        if key not in self.findings:
            self.findings[key] = finding_of(entry, None, detail, pair)


_NAMES = ("query", "key", "value")
_ADVICE = {
    "causal-top-left": (
        " If it is meant for as many queries as keys, let it raise an error for others."
    )
}
