"""What a check says and leaves behind: the report, the errors word for word, the user's process."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.diagnosis.report import Report


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def averaging(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.cumsum(-2) + q * k


class Fused(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        return standard(q, k, v).transpose(1, 2).flatten(2)


class Noisy(Fused):
    """Changes all that it can reach, and prints."""

    def __init__(self) -> None:
        super().__init__(16, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        print("here I am")
        self.calls += 1
        torch.manual_seed(0)
        random.seed(0)
        torch.set_default_dtype(torch.float64)
        return super().forward(x)


# The report


def test_what_is_right_is_said_to_be_right() -> None:
    report = regard.check(standard)
    assert (report.verdict, report.ok, report.exit_code, report.findings) == ("right", True, 0, ())


def test_what_is_wrong_is_said_with_its_proof() -> None:
    report = regard.check(unscaled)
    assert (report.verdict, report.ok, report.exit_code) == ("different", False, 1)
    [finding] = report.findings
    assert finding.did is not None
    assert finding.attention is not None
    assert not torch.allclose(finding.did, finding.attention)
    assert finding.code.startswith("return (q @ k.transpose(-2, -1)).softmax(-1) @ v")


def twice_wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def test_of_two_mistakes_each_is_shown_alone() -> None:
    axis, scale = regard.check(twice_wrong).findings
    assert (axis.name, scale.name) == ("softmax-wrong-axis", "no-scale")
    for finding in (axis, scale):
        assert finding.did is not None
        assert finding.attention is not None
        assert finding.caption == "weights of tokens 1 to 4 (down) for tokens 1 to 4 of 29"


def test_what_nobody_can_tell_is_not_called_wrong() -> None:
    report = regard.check(averaging)
    assert (report.verdict, report.ok, report.exit_code) == ("cannot tell", False, 3)
    assert report.findings == ()
    assert report.missing != ""


def test_a_note_leaves_it_right() -> None:
    report = regard.check(Fused, 16, 2)
    assert (report.verdict, report.ok) == ("right", True)
    assert [finding.name for finding in report.findings] == ["no-positions"]


def test_the_text_holds_both_matrices_and_the_mending() -> None:
    text = str(regard.check(unscaled))
    assert "what it did" in text
    assert "what attention is" in text
    assert "query.shape[-1] ** 0.5" in text
    assert "weights of tokens 1 to 4 (down) for tokens 1 to 4 of 29:" in text
    assert "unscaled is different from standard attention: no-scale." in text
    assert text.endswith("expect=regard.spec(causal=False, scale=1.0))")


def test_the_text_says_what_is_computed_and_where_that_was_verified() -> None:
    first, second, *_ = str(regard.check(standard)).splitlines()
    assert first.startswith("standard computes softmax(q·kᵀ/√24)·v, one head of 24, every key")
    assert second.startswith("  verified on 3 inputs of 7 to 29 tokens, largest difference ")


def test_a_report_is_plain_data() -> None:
    data = json.loads(json.dumps(regard.check(unscaled).to_dict(), allow_nan=False))
    assert data["verdict"] == "different"
    assert data["computes"]["formula"] == "softmax(q·kᵀ)·v"
    assert json.loads(data["computes"]["spec"]) == {"causal": False, "scale": 1.0}
    assert data["findings"][0]["name"] == "no-scale"
    assert len(data["findings"][0]["did"]) == 4


def test_two_checks_say_the_same() -> None:
    assert str(regard.check(unscaled)) == str(regard.check(unscaled))


@pytest.mark.parametrize("causal", [None, True, False])
def test_what_it_is_meant_to_be_decides(causal: bool | None) -> None:
    names = [finding.name for finding in regard.check(standard, causal=causal).findings]
    assert names == (["not-causal"] if causal else [])


# The user's process


@pytest.mark.full
def test_a_module_and_the_random_states_stay_as_they_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Noisy().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    states = random.getstate(), torch.get_rng_state().tolist()
    regard.check(module)
    assert (random.getstate(), torch.get_rng_state().tolist()) == states
    assert torch.get_default_dtype() == torch.float32
    assert (module.calls, module.training) == (0, True)
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_mode_of_autograd_does_not_matter(context: Callable[[], Any]) -> None:
    with context():
        report: Report = regard.check(unscaled)
    assert [finding.name for finding in report.findings] == ["no-scale"]


# Errors


def test_something_that_cannot_be_called_is_an_error() -> None:
    message = (
        "thing is int; it must be a module, a function or a class.\n"
        "    Give the attention itself: regard.check(SelfAttention, 16, 4)."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        regard.check(3)


@pytest.mark.full
def test_arguments_of_a_class_are_guessed_from_common_names_and_said() -> None:
    report = regard.check(Fused, 16)
    assert report.read_as.endswith(", built with heads=4")
    assert report.pin.startswith("regard.check(Fused, 16, heads=4, expect=")


def test_a_class_without_its_arguments_is_an_error_that_names_them() -> None:
    class Unusual(Fused):
        def __init__(self, dim: int, parts: int) -> None:
            super().__init__(dim, parts)

    message = (
        "the arguments do not fit Unusual (missing a required argument: 'parts'); it takes dim, "
        "parts.\n    Give them after it: regard.check(Unusual, ...)."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        regard.check(Unusual, 16)


def test_a_mask_that_is_given_is_an_error() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        raise AssertionError  # before any work

    message = (
        "mask has shape (3, 3); check makes masks itself, for the inputs that it tries.\n"
        "    Leave it out: regard.check(attention)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.check(attention, mask=torch.ones(3, 3))


def test_code_that_always_fails_is_an_error_with_its_own_words() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no such thing")

    message = (
        "broken fails on every input that was tried; it must run on one of them.\n"
        "    The first error was RuntimeError: no such thing\n"
        "    Pass an example call: regard.check(broken, args=(torch.randn(2, 7, 24), "
        "torch.randn(2, 7, 24), torch.randn(2, 7, 24),))."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.check(broken)


def test_a_finding_in_a_running_notebook_is_in_its_cell() -> None:
    shell_class = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = shell_class.instance()
    try:
        shell.run_cell("first = 1", store_history=True)
        cell = "import regard\n\ndef attention(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
        shell.run_cell(f"{cell}report = regard.check(attention)", store_history=True)
        report = shell.user_ns["report"]
        assert report.findings[0].place == "cell In[2], line 4"
        assert "  cell In[2], line 4:  return (q @ k.mT)" in str(report)
    finally:
        shell_class.clear_instance()
    assert report.findings[0].place.endswith(", line 4")
