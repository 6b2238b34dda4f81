"""The surroundings that conftest.py promises are really there."""

import os

import pytest
import torch
from hypothesis import settings


def test_unwritten_memory_is_nan() -> None:
    assert torch.empty(7).isnan().all()


def test_random_examples_are_the_same_on_every_run() -> None:
    assert settings().derandomize
    assert settings().deadline is None


def test_nothing_may_be_fetched() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_worker_of_several_uses_one_thread() -> None:
    assert "PYTEST_XDIST_WORKER" not in os.environ or torch.get_num_threads() == 1


@pytest.mark.browser
def test_the_chromium_fixture_names_an_executable(chromium: str) -> None:
    assert os.access(chromium, os.X_OK)
