"""`regard.plot.training` draws the numbers of the table."""

from pathlib import Path

import numpy
import pytest
import torch
from matplotlib import pyplot
from torch import nn

import regard
from regard.training.run_table import read_history


def test_a_picture_has_heads_down_and_steps_across(tmp_path: Path) -> None:
    model = nn.Sequential(regard.nn.SelfAttention(8, 3, head_dim=2), regard.nn.SelfAttention(8, 2))
    with regard.Monitor(model, tmp_path, every=100, rows=4) as monitor:
        for step in range(0, 500, 50):
            with monitor(step):
                model(torch.randn(1, 6, 8))
    axes = regard.plot.training(tmp_path, "max_score")
    [image] = axes.get_images()
    assert image.colorbar.ax.get_ylabel() == "max: max score\nlast 4 rows"
    numpy.testing.assert_array_equal(image.get_array(), read_history(tmp_path, "max_score").values)
    assert image.get_array().shape == (5, 5)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["L0H0", "L1H0"]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["0", "100", "200", "300", "400"]
    with pytest.raises(ValueError, match="statistic is 'sinks'; the run has 'max_score', "):
        regard.plot.training(tmp_path, "sinks")
    pyplot.close("all")
