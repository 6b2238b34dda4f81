"""All that could not be kept is told when the block ends, in one error that stays short."""

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import regard
import regard.recording.spool


class Asks(nn.Module):
    """Attends with so many heads."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        heads = x.expand(self.num_heads, *x.shape)
        return scaled_dot_product_attention(heads, heads, heads)[0]


def told(model: nn.Module, **options: object) -> str:
    with pytest.raises(regard.RegardError) as caught, regard.observe(model, strict=True, **options):
        model(torch.ones(5, 4))
    return str(caught.value)


def of(*counts: int) -> nn.Module:
    return nn.Sequential(*map(Asks, counts))


def test_the_problem_of_several_layers_is_told_once() -> None:
    assert told(of(2, 3, 2), heads=[2]) == (
        "the attention of '0', '2' cannot be kept: heads has 2; the layer has 2 heads.\n"
        "    Choose among 0 to 1."
    )


def test_of_one_layer_with_one_head_there_is_one_choice() -> None:
    assert told(of(1), heads=[2]) == (
        "the attention of '0' cannot be kept: heads has 2; the layer has 1 head.\n    Choose 0."
    )
    assert told(of(1), heads=slice(2, 4)) == (
        "the attention of '0' cannot be kept: heads is slice(2, 4, None); it chooses none of "
        "1 head.\n    Choose 0."
    )
    assert told(of(1), layers=[3]) == (
        "layers has 3; attention was seen in 1 module, '0'.\n    Choose 0."
    )


def test_of_many_layers_the_first_five_are_named() -> None:
    assert told(of(*[2] * 9), heads=[2]).startswith(
        "the attention of '0', '1', '2', '3', '4' and 4 more cannot be kept: heads has 2;"
    )


def test_different_problems_are_told_one_by_one() -> None:
    assert told(of(2, 3, 4, 2), heads=[3]) == (
        "the attention of '0', '3' cannot be kept: heads has 3; the layer has 2 heads.\n"
        "    Choose among 0 to 1.\n"
        "the attention of '1' cannot be kept: heads has 3; the layer has 3 heads.\n"
        "    Choose among 0 to 2."
    )


def test_of_many_problems_the_first_five_are_told() -> None:
    lines = told(of(*range(2, 10)), heads=[9]).splitlines()
    assert [line[:20] for line in lines[::2][:5]] == [f"the attention of '{n}'" for n in range(5)]
    assert lines[10:] == ["... and 3 more problems."]


def test_a_layer_that_fails_at_each_step_is_told_once() -> None:
    again = Asks(2)
    assert told(nn.Sequential(again, again, again), heads=[2]).count("cannot be kept") == 1


def test_what_was_kept_is_there_beside_what_was_not() -> None:
    model = of(2, 3, 2)
    with (
        pytest.warns(UserWarning, match="of '0', '2' cannot be kept"),
        regard.observe(model, heads=[2]) as seen,
    ):
        model(torch.ones(5, 4))
    assert list(seen) == ["1"]
    assert [refusal.module for refusal in seen.refused] == ["0", "2"]


def test_layers_that_did_not_run_are_all_named() -> None:
    model = nn.Sequential(of(2), of(2), nn.Linear(4, 4))
    assert told(model, layers=["1", "2", "0.0"]) == (
        "layers has '1', '2'; no attention was seen in them.\n"
        "    Attention was seen in '0.0', '1.0'."
    )


def test_a_full_disk_is_told_beside_a_layer_that_could_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(regard.recording.spool.Spool, "append", full)
    path = tmp_path / "run.safetensors"
    assert told(of(2, 3), heads=[2], path=path) == (
        "the attention of '0' cannot be kept: heads has 2; the layer has 2 heads.\n"
        "    Choose among 0 to 1.\n"
        f"{path} cannot be written: No space left on device; nothing of it is left, and a file "
        "that was there is as it was.\n"
        "    Observe again with a path where there is room, or keep less."
    )
    assert list(tmp_path.iterdir()) == []


def test_the_first_cause_is_behind_the_error() -> None:
    model = of(2)
    with pytest.raises(regard.RegardError) as caught, regard.observe(model, heads=[2]):
        model(torch.ones(5, 4))
    assert isinstance(caught.value.__cause__, ValueError)


def test_where_no_attention_was_seen_no_file_is_left(tmp_path: Path) -> None:
    said = told(nn.Linear(4, 4), path=tmp_path / "run.safetensors")
    assert said.startswith("no attention was seen in Linear")
    assert list(tmp_path.iterdir()) == []


class Impatient:
    """A function for ``progress`` that fails at one of its calls."""

    def __init__(self, fails_at: int) -> None:
        self.calls: list[int] = []
        self.fails_at = fails_at

    def __call__(self, done: int) -> None:
        self.calls.append(done)
        if done == self.fails_at:
            raise LookupError("no bar to draw on")


@pytest.mark.parametrize("keep", ["qk", [regard.Entropy()]], ids=["qk", "answers"])
def test_an_exception_of_progress_is_raised_at_the_end_and_refuses_nothing(
    tmp_path: Path, keep: object
) -> None:
    model, progress, x = of(2, 3, 2), Impatient(fails_at=2), torch.randn(5, 4)
    expected, path = model(x), tmp_path / "run.safetensors"
    with (
        pytest.raises(LookupError, match=r"^no bar to draw on$"),
        regard.observe(model, progress=progress, strict=True, keep=keep, path=path) as seen,
    ):
        output = model(x)
    assert torch.equal(output, expected)
    assert progress.calls == [1, 2]
    assert list(seen.shapes) == list(regard.load(path).shapes) == ["0", "1", "2"]
    assert seen.refused == []


def test_a_refused_layer_is_told_before_an_exception_of_progress() -> None:
    said = told(of(2, 3), heads=[2], progress=Impatient(fails_at=1))
    assert said.startswith("the attention of '0' cannot be kept")
