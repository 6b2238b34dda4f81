"""What nobody waits for any more ends soon, in the middle of a layer too."""

from collections.abc import Sequence

import pytest
import torch

import regard
from regard.view.tiles import head_tiles
from regard.view.tiles.page_answers import Answers, Gone
from regard.view.tiles.protocol import OfHead


def seen(names: str) -> regard.Recording:
    """A layer of 300 tokens of each name."""
    query, key = torch.randn(2, 1, 300, 8, generator=torch.Generator().manual_seed(1))
    return regard.Recording({name: regard.attend(query, key) for name in names})


PARTS = [(0, 100), (100, 300)]
ASKED: dict[str, Sequence[object]] = {
    "row": (OfHead(0, 0), 0),
    "column": (OfHead(0, 0), 0),
    "overview": (0,),
    "heads": (),
}


@pytest.fixture(params=["short", "long"])
def head_is(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Heads that are answered at once, and heads with a pass in the background."""
    if request.param == "long":
        monkeypatch.setattr(head_tiles, "AT_ONCE", 0)
    return request.param


@pytest.mark.usefixtures("head_is")
@pytest.mark.parametrize("question", ASKED)
def test_what_is_not_wanted_any_more_ends(question: str) -> None:
    with Answers(seen("a")) as answers, pytest.raises(Gone):
        getattr(answers, question)(*ASKED[question], wanted=lambda: False)


class Leaves:
    """Somebody who waits until he has been asked so often."""

    def __init__(self, times: int) -> None:
        self.asked, self.times = 0, times

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked <= self.times


def in_blocks_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass over a layer has blocks of so few rows, and asks after each of them."""
    monkeypatch.setattr("regard.backends.sweep.BLOCK_SIZE", 1)
    monkeypatch.setattr("regard.backends.sweep.MIN_ROWS", rows)
    monkeypatch.setattr("regard.backends.cpu.cpu_backend.ROWS", rows)
    monkeypatch.setattr("regard.backends.cpu.cpu_backend._MOST_PARTS", 1)
    # While other threads work, one call may stand for several blocks.
    monkeypatch.setattr("regard.backends.sweep.SweepTask.threaded", False)


@pytest.mark.parametrize("question", ["overview", "heads"])
def test_a_pass_over_a_layer_ends_between_blocks_of_rows(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks_of(10, monkeypatch)
    leaves = Leaves(5)
    with Answers(seen("a")) as answers, pytest.raises(Gone):
        getattr(answers, question)(*ASKED[question], wanted=leaves)
    assert leaves.asked == 6


def test_a_sample_of_a_long_layer_ends_between_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.view.tiles.page_answers._MOST_CELLS", 10)
    leaves = Leaves(2)
    with Answers(seen("a")) as answers, pytest.raises(Gone):
        answers.overview(0, wanted=leaves)
    assert leaves.asked == 3


def test_segments_end_between_blocks_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_blocks_of(10, monkeypatch)
    with Answers(seen("a")) as answers:
        counts = Leaves(10**6)
        answers.segments(OfHead(0, 0), PARTS, PARTS, wanted=counts)
        with pytest.raises(Gone):
            answers.segments(OfHead(0, 0), PARTS, PARTS, wanted=Leaves(counts.asked - 20))
    assert counts.asked == 30


def test_the_layers_whose_heads_are_known_are_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_blocks_of(10, monkeypatch)
    whole, again, leaves = Leaves(10**6), Leaves(10**6), Leaves(60)
    with Answers(seen("abc")) as answers:
        kinds = answers.heads(wanted=whole)
    with Answers(seen("abc")) as answers:
        with pytest.raises(Gone):
            answers.heads(wanted=leaves)
        assert answers.heads(wanted=again) == kinds
    assert again.asked < whole.asked / 2  # two of three layers are known
