"""A monitor on two processes has the statistics of one process."""

from pathlib import Path

import pytest
import torch

import regard
from ranks import run_ranks
from regard.training.row_numbers import STATISTICS
from regard.training.run_table import read_history

RANKS = Path(__file__).with_name("monitored_ranks.py")


@pytest.mark.full  # Two processes that import PyTorch take ten seconds.
def test_two_processes_have_the_statistics_of_one(
    tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RANKS.parent)
    from monitored_ranks import plain, train

    one = plain(train(tmp_path, "one", lambda model: model, slice(None)))
    run_ranks(RANKS, 2, tmp_path, limit=300)
    for way in ("ddp", "fsdp", "tensor"):
        with subtests.test(way=way):
            # A module inside a wrapper keeps its name.
            first, second = (torch.load(tmp_path / f"{way}.{rank}") for rank in (0, 1))
            for mine, theirs, expected in zip(first, second, one, strict=True):
                assert list(mine) == list(expected)
                for key, (heads, *numbers, rows) in mine.items():
                    assert heads == expected[key][0]
                    torch.testing.assert_close(
                        torch.stack(numbers), torch.stack(expected[key][1:-1]), rtol=1e-5, atol=1e-5
                    )
                    assert torch.equal(rows, expected[key][-1])
                    assert torch.equal(torch.stack(numbers), torch.stack([*theirs[key][1:-1]]))
            for statistic in STATISTICS:
                mine, expected = (
                    read_history(tmp_path / run, statistic).values for run in (way, "one")
                )
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
            saved = regard.load(tmp_path / f"{way}.saved" / "step-000000000")
            assert saved[0].shape == (6, 8, 7, 7)
