"""Kept answers are found by what was asked, and are those that the whole would give."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard

PARTS = {"first": (0, 3), "second": (3, 7)}
TURNED = {"second": (3, 7), "first": (0, 3)}


def matrix(kv_len: int = 7, seed: int = 0) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 2, n, 5, generator=generator) for n in (7, kv_len))
    return regard.attend(query, key)


def kept(*reductions: regard.Reduction) -> regard.Recording:
    """Of one layer only the answers."""
    seen = regard.Recording({})
    answers = [(reduction, matrix().reduce(reduction)) for reduction in reductions]
    seen.add("layer", None, answers=answers, shape=matrix().shape)
    return seen


# Which spans were asked


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(lambda: regard.Segments([(0, 3), (3, 7)]), id="another list"),
        pytest.param(lambda: regard.Segments([[0, 3], [3, 7]]), id="lists of lists"),
        pytest.param(lambda: regard.Segments(((0, 3), (3, 7))), id="tuples"),
        pytest.param(lambda: regard.Segments([(0, 3), (3, 7)], [(0, 3), (3, 7)]), id="keys too"),
    ],
)
def test_the_same_spans_are_the_same_question(same: Any) -> None:
    asked = regard.Segments([(0, 3), (3, 7)])
    assert same() == asked
    assert hash(same()) == hash(asked)
    assert same() in kept(asked).kept["layer"]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(regard.Segments(TURNED), id="another order"),
        pytest.param(regard.Segments(TURNED, PARTS), id="another order of the queries"),
        pytest.param(regard.Segments(PARTS, TURNED), id="another order of the keys"),
        pytest.param(regard.Segments({"a": (0, 3), "b": (3, 7)}), id="other names"),
        pytest.param(regard.Segments([(0, 3), (3, 7)]), id="no names"),
        pytest.param(regard.Segments({"first": (0, 3), "second": (3, 6)}), id="other spans"),
    ],
)
def test_other_spans_are_another_question(other: regard.Segments) -> None:
    assert other != regard.Segments(PARTS)
    assert other not in kept(regard.Segments(PARTS)).kept["layer"]


def test_parts_in_two_orders_are_answered_each_in_its_own() -> None:
    seen = regard.Recording({"layer": matrix()})
    for recording in (seen, kept(regard.Segments(PARTS), regard.Segments(TURNED))):
        one, other = recording.reduce(regard.Segments(PARTS), regard.Segments(TURNED))["layer"]
        torch.testing.assert_close(one, other.flip(-1, -2))


def test_spans_of_lists_are_found_in_a_file(tmp_path: Path) -> None:
    seen, asked = kept(regard.Segments({"a": [0, 3]})), {"a": [0, 3]}  # type: ignore[dict-item]
    seen.save(tmp_path / "run.safetensors")
    loaded = regard.load(tmp_path / "run.safetensors").segments(asked)  # type: ignore[arg-type]
    assert torch.equal(loaded.weights, seen.segments(asked).weights)  # type: ignore[arg-type]


# Questions of one's own


@dataclass(frozen=True)
class Towards(regard.Reduction):
    """How much each query attends to keys of some weight."""

    weight: Tensor

    def start(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block: Any) -> Any:
        return (regard.Part(block.box.at_rows, block.weights @ self.weight[block.box.columns]),)

    def finish(self, buffers: Any, shape: torch.Size) -> Any:
        return buffers[0]


def test_questions_that_cannot_be_compared_are_not_the_same() -> None:
    one, other = Towards(torch.arange(7.0)), Towards(torch.ones(7))
    recordings = regard.Recording({"layer": matrix()}), kept(one, other)
    for recording in recordings:
        answers = recording.reduce(one, other)["layer"]
        for answer, asked in zip(answers, (one, other), strict=True):
            torch.testing.assert_close(answer, matrix().to_dense() @ asked.weight)
    assert Towards(torch.ones(7)) not in kept(other).kept["layer"]
