"""What the GPU's benchmark times is found right or wrong before it is timed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from gpu_benchmark import BEHIND, Modules, side, size, taking


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return Modules()


def checked(gpu: Any, *, causal: bool = True) -> list[Any]:
    asked = size(gpu, 61, causal=causal, head_dim=16)
    questions = gpu.correctness.TIMED | gpu.correctness.ALONE
    return list(gpu.correctness.checked(asked, questions, "cpu", "sweep"))


def test_right_answers_are_found_right(gpu: Any) -> None:
    found = checked(gpu)
    assert [each.name for each in found if not each.right] == []
    assert max(each.error for each in found) <= 1e-4


def test_all_that_is_timed_of_the_kernels_is_checked_as_it_is_timed(gpu: Any) -> None:
    of_kernels = [each for each in gpu.sides.SIDES if each.asked is not None]
    assert [each.name for each in of_kernels] == [
        *("logsumexp", "row statistics"),
        *(f"logsumexp, {pass_}" for pass_ in BEHIND),
        *("topk(8)", "output and five statistics"),
    ]
    names = [each.name for each in checked(gpu)]
    assert names == [each.name for each in of_kernels] + list(gpu.correctness.ALONE)


def test_each_side_is_checked_with_all_heads_that_it_is_timed_with(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    correctness = gpu.correctness
    monkeypatch.setattr(
        correctness, "_checked", lambda name, size, *_: correctness.Checked(name, size, 0.0, True)
    )
    found = list(correctness.check("cpu"))
    assert {(each.name, each.size.of_heads) for each in found} >= {
        (name, size.of_heads) for name in correctness.TIMED for size in gpu.size.sizes()
    }
    assert max(each.size.tokens for each in found) == gpu.size.LENGTHS[-1]


def test_what_is_rounded_to_bfloat16_twice_may_be_off_by_two_steps_of_it(gpu: Any) -> None:
    exact = torch.ones(5, dtype=torch.float64)
    near = (exact + 0.004).float()
    assert not gpu.correctness._compared(near, exact)[1]
    assert gpu.correctness._compared(near.bfloat16(), exact)[1]
    assert not gpu.correctness._compared((exact + 0.02).bfloat16(), exact)[1]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_long_texts_are_compared_with_flash_attention_and_with_rows_of_mass_1(
    causal: bool, gpu: Any
) -> None:
    asked = size(gpu, 61, causal=causal, head_dim=16)
    found = list(gpu.correctness.at_length(asked, "cpu", "sweep"))
    assert [(each.name, each.right) for each in found] == [
        ("logsumexp", True),
        ("logsumexp, column sums", True),
    ]
    assert max(each.error for each in found) <= 1e-4


def test_a_wrong_answer_to_a_long_text_is_noticed(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_sink(given: Any, size: Any) -> regard.AttentionMatrix:
        sinks = torch.zeros(size.num_heads)
        return regard.attend(given.query, given.key, mask=regard.Causal(), sink_bias=sinks)

    monkeypatch.setattr(gpu.correctness, "matrix", with_a_sink)
    found = gpu.correctness.at_length(size(gpu, 61, head_dim=16), "cpu", "sweep")
    assert [each.right for each in found] == [False, False]


def test_a_kernel_that_fails_is_wrong_and_the_rest_is_checked(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setitem(gpu.correctness.ALONE, "top-1", broken)
    found = checked(gpu)
    (failed,) = [each for each in found if not each.right]
    assert failed[2:] == (None, False, "failed: RuntimeError: no kernel")
    assert found[-1].name == "transposed product, float32"
    assert gpu.report.checked_line(failed).endswith(
        "top-1                          WRONG  failed: RuntimeError: no kernel"
    )


def test_what_is_wrong_is_not_timed_at_any_length_of_its_heads(gpu: Any) -> None:
    at = [gpu.size.Size(64, width, 2, True, num_heads=8) for width in (128, 64)]
    wrong = [gpu.correctness.Checked("x", at[0].longer(1040), 0.5, False)]
    sides = [side(gpu, "x"), side(gpu, "y")]
    budget, take = gpu.clock.Budget(900), taking(gpu, lambda _: 0.1)
    rows = gpu.rows.measured(sides, at, "cpu", budget, take, wrong)
    assert [row.get("left_out") for row in rows] == ["its answers are wrong", None, None, None]


@pytest.mark.parametrize("wrong", [1.02, torch.nan], ids=["a little", "nan"])
def test_a_wrong_answer_is_noticed(wrong: float, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = gpu.correctness._compared

    def spoilt(found: Any, exact: Any) -> Any:
        return compared(found * wrong, exact) if isinstance(found, torch.Tensor) else (0.0, True)

    monkeypatch.setattr(gpu.correctness, "_compared", spoilt)
    assert [each.name for each in checked(gpu) if each.right] == ["topk(8)", "top-1"]


def test_another_key_is_noticed(gpu: Any) -> None:
    top = torch.tensor([0.5, 0.25]), torch.tensor([3, 1])
    assert gpu.correctness._compared(top, top) == (0.0, True)
    other = top[0], torch.tensor([3, 2])
    assert gpu.correctness._compared(other, top) == (0.0, False)
