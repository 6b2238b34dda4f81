"""All cases of one kernel, and what they show."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from regard.diagnosis.catalogue import Fault, fault
from regard.diagnosis.inputs.tape import in_words
from regard.diagnosis.kernels.cases import Case, Inputs
from regard.diagnosis.kernels.error_budget import Error, gradient_errors, judged_rows, output_error
from regard.diagnosis.kernels.running import Kernel, Run
from regard.diagnosis.kernels.standard import Standard, mistaken
from regard.diagnosis.report import Finding, finding_of

_NAMES = ("query", "key", "value")
_NO_GRADIENT = "Its output has no gradient, so that no backward pass was tried."
_ADVICE = {
    "causal-top-left": (
        " If it is meant for as many queries as keys, let it raise an error for others."
    )
}


@dataclass(eq=False)
class Trial:
    """All cases of one kernel, and what they show.

    Attributes:
        kernel: the kernel.
        standard: what it should compute; once a mistake is known, what it computes, so that other
            cases show what else is wrong.
        heads: the number of heads of queries.
        kv_heads: that of keys.
        findings: by sentence.
        judged: the cases that ran.
        num_gradients: how many of them had gradients.
        largest_share: the largest error, as a share of what is allowed.
    """

    kernel: Kernel
    standard: Standard
    heads: int
    kv_heads: int
    findings: dict[str, Finding] = field(default_factory=dict[str, Finding])
    judged: list[Case] = field(default_factory=list[Case])
    num_gradients: int = 0
    largest_share: float = 0.0
    _refused: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _remarks: dict[str, None] = field(default_factory=dict[str, None])

    def run(self, case: Case) -> None:
        """Run one case, and note what is wrong with it.

        A kernel may refuse lengths that are no multiple of a tile: then it gets some that are.
        """
        refusal: Exception | None = None
        for tried in dict.fromkeys((case, case.in_tiles)):
            inputs = self.kernel.inputs(tried, self.heads, self.kv_heads)
            try:
                run = self._run_of(tried, inputs)
            except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
                refusal = refusal or error
                continue
            self._judge(tried, inputs, run)
            break
        if refusal is not None:
            self._refuse(case.words, refusal)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the output, and the inputs that the kernel refuses."""
        refusals: list[str] = []
        for reason, cases in self._refused.items():
            words = "; ".join(cases[:_SHOWN])
            more = f"; and {len(cases) - _SHOWN} more" if len(cases) > _SHOWN else ""
            refusals.append(f"It refuses {words}{more} ({reason}).")
        return (*self._remarks, *refusals)

    def _run_of(self, case: Case, inputs: Inputs) -> Run:
        """Return the run of one case, without gradients if it runs without alone.

        Raises:
            Exception: whatever the kernel raises.
        """
        if case.has_gradient:
            try:
                return self.kernel.run(inputs, case.strides, has_gradient=True)
            except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
                run = self.kernel.run(inputs, case.strides)
                self._refuse("inputs that need a gradient", error)
                return run
        return self.kernel.run(inputs, case.strides)

    def _refuse(self, words: str, error: Exception) -> None:
        """Note what a kernel refuses; a crash of the device is no refusal."""
        if "CUDA error" in str(error):
            entry = Fault("runs", "It ends the work of the device.", "")
            self._add(entry, f"With {words}: {in_words(error)}.")
            return
        refused = self._refused.setdefault(in_words(error), [])
        if words not in refused:
            refused.append(words)

    def _judge(self, case: Case, inputs: Inputs, run: Run) -> None:
        self.judged.append(case)
        if run.has_changed_inputs:
            self._add(Fault("pure", "It writes into its inputs.", ""), f"With {case.words}.")
        if run.output.dtype != self.kernel.dtype:
            self._remarks[f"Its output is {run.output.dtype}."] = None
        output = self.kernel.unlaid(run.output).clone()
        error = output_error(self.standard, inputs, output, self.kernel.device)
        self.largest_share = max(self.largest_share, error.share)
        if not error.is_allowed:
            self._explain(case, inputs, output, error)
            return
        if not case.has_gradient:
            return
        others = self.kernel.inputs(case, self.heads, self.kv_heads, seed=1)
        with suppress(Exception):  # a backward pass may follow another forward pass
            self._run_of(case, others)
        if not torch.equal(self.kernel.unlaid(run.output).nan_to_num(), output.nan_to_num()):
            entry = Fault("pure", "A later call changes the output of an earlier one.", "")
            self._add(entry, f"With {case.words}.")
        elif not run.output.requires_grad:
            if run.passed[0].requires_grad:
                self._remarks[_NO_GRADIENT] = None
        else:
            self._judge_gradients(case, inputs, run)

    def _judge_gradients(self, case: Case, inputs: Inputs, run: Run) -> None:
        visible = self._visible(case)
        inputs = replace(inputs, upstream=inputs.upstream * visible.any(-1, keepdim=True))
        upstream = self.kernel.laid(inputs.upstream).to(run.output.dtype)
        before = upstream.clone()
        try:
            found = torch.autograd.grad(run.output, run.passed, upstream, allow_unused=True)
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            self._refuse(f"a backward pass with {case.words}", error)
            return
        gradients = cast("tuple[Tensor | None, ...]", found)
        self.num_gradients += 1
        if not torch.equal(before, upstream):
            sentence = "Its backward pass writes into the gradient of the output."
            self._add(Fault("pure", sentence, ""), f"With {case.words}.")
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
                self._add(Fault("gradient", sentence, ""), _detail(case, error))

    def _visible(self, case: Case) -> Tensor:
        return self.standard.visible(case.q_len, case.kv_len, torch.device("cpu"))

    def _explain(self, case: Case, inputs: Inputs, output: Tensor, error: Error) -> None:
        """Add the mistake that gives an output."""
        output = torch.where(judged_rows(self.standard, inputs), output, 0.0)
        if not bool(output.isfinite().all()):
            self._add(self._of_nan(case, output), f"With {case.words}.")
            return
        if not bool(output.any()):
            self._add(Fault("output", "The output is 0 everywhere.", ""), _detail(case, error))
            return
        for name, words, other in self._mistakes(case, inputs):
            if output_error(other, inputs, output, self.kernel.device).is_allowed:
                says = f"attention with {words}"
                entry = fault(name) if name else Fault("output", f"It is {says}.", "")
                detail = f"With {case.words} the output is that of {says}.{_ADVICE.get(name, '')}"
                self._add(replace(entry, severity="fault"), detail)
                self.standard = other
                return
        entry = Fault("output", self._unexplained(case, inputs, output), "")
        self._add(entry, _detail(case, error))

    def _mistakes(self, case: Case, inputs: Inputs) -> Sequence[tuple[str, str, Standard]]:
        """Return what may give the output of a case; scores that are alike tell nothing."""
        if case.kind not in ("random", "sharp"):
            return ()
        return [*mistaken(self.standard, inputs.query.shape[-1], inputs.query.shape[1])]

    def _unexplained(self, case: Case, inputs: Inputs, output: Tensor) -> str:
        """Return a sentence on an output of which no mistake is known."""
        if case.kind == "NaN":
            return "A key of NaN changes the output of a query that does not see it."
        with_keys = torch.where(self._visible(case).any(-1, keepdim=True), output, 0.0)
        if output_error(self.standard, inputs, with_keys, self.kernel.device).is_allowed:
            return "A query that sees no key gives neither 0 nor the mean of the values."
        return "The output is not that of the attention that is expected."

    def _of_nan(self, case: Case, output: Tensor) -> Fault:
        bad = ~output.isfinite().all(-1)
        if not bool((bad & self._visible(case).any(-1)).any()):
            return fault("nan-rows")
        if case.kind == "NaN":
            sentence = "A key of NaN that a query does not see makes its output NaN."
            write = "scores = scores.masked_fill(~visible, -torch.inf)  # NaN - inf is NaN"
            return Fault("output", sentence, write)
        return Fault("output", "The output is not finite.", "")

    def _add(self, entry: Fault, detail: str) -> None:
        """Add a finding, unless one of its sentence is known from a case before."""
        if entry.sentence not in self.findings:
            self.findings[entry.sentence] = finding_of(entry, None, detail)


_SHOWN = 3


def _detail(case: Case, error: Error) -> str:
    if math.isnan(error.actual):
        return f"With {case.words} it is not finite."
    return (
        f"With {case.words} it is off by {error.actual:.2g} of its size; allowed is "
        f"{error.allowed:.2g}: twice the {error.plain:.2g} of plain PyTorch in this dtype, and one "
        "rounding."
    )
