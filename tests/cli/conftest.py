"""A model to run, an empty working folder, and the command in this process."""

import io
import sys
from pathlib import Path

import pytest
import torch

import tiny_models
from commands import Run
from regard.cli import app as cli
from regard.cli import progress
from regard.models.pretrained import Pretrained


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "bert"
    return str(tiny_models.save(folder, tiny_models.bert()))


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test writes into an empty folder, with nobody at the keyboard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    # On a slow machine a line of progress would stand among the messages that tests compare.
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e6)
    return tmp_path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: exit code, standard output, standard error."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        return int(end.value.code or 0), *capfd.readouterr()

    return run_command


@pytest.fixture
def doubled(bert: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model, whose second layer is attention by hand that observe refuses."""
    load = Pretrained._loaded

    def with_refused_layer(pretrained: Pretrained, kind: str) -> torch.nn.Module:
        model = load(pretrained, kind)
        tiny_models.double_attention(model, 1)
        return model

    monkeypatch.setattr(Pretrained, "_loaded", with_refused_layer)
    return bert
