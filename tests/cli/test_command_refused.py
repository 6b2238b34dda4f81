"""A refused layer is named on standard error by every command, and --strict makes it an error."""

import json
import re
from pathlib import Path

import pytest
import torch

import regard
import tiny_models
from commands import Run
from regard.models.pretrained import Pretrained
from regard.recording.layers import Refusal
from regard.view.server import http_server

TEXT = "Anna has a red boat. Ben has a blue house."
RECORDED, REFUSED = (f"encoder.layer.{place}.attention.self" for place in range(2))
LINE = rf"regard: 1 layer was refused and is missing: '{REFUSED}'; reason: the weights [^\n]+\n"


@pytest.fixture
def incomplete(run: Run, doubled: str) -> str:
    """A recording of a model of which a layer was refused."""
    run("record", TEXT, "-m", doubled)
    return "run.safetensors"


@pytest.mark.parametrize(
    "arguments",
    [
        ("see", TEXT),
        ("record", TEXT),
        ("heads", TEXT),
        ("compare", TEXT, TEXT.lower()),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_runs_a_model_names_its_refused_layer(
    arguments: tuple[str, ...], run: Run, doubled: str
) -> None:
    code, out, err = run(*arguments, "-m", doubled)
    assert code == 0
    assert out
    assert re.fullmatch(LINE, err)


READ = [
    pytest.param(("page",), id="page"),
    pytest.param(("heads",), id="heads"),
    pytest.param(("segments", "--by", "sentence"), id="segments"),
    pytest.param(("compare", "run.safetensors"), id="compare"),
]


@pytest.mark.parametrize("arguments", READ)
def test_a_command_that_reads_a_recording_names_its_refused_layer(
    arguments: tuple[str, ...], run: Run, incomplete: str
) -> None:
    code, out, err = run(*arguments, incomplete)
    assert code == 0
    assert out
    assert re.fullmatch(LINE * (1 + (arguments[0] == "compare")), err)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments",
    [("see", TEXT, "--json"), ("record", TEXT, "--json"), ("heads", TEXT, "--json")],
    ids=lambda arguments: arguments[0],
)
def test_json_has_every_refused_layer(arguments: tuple[str, ...], run: Run, doubled: str) -> None:
    _, out, _ = run(*arguments, "-m", doubled)
    (refusal,) = json.loads(out)["refused"]
    assert refusal["module"] == REFUSED
    assert refusal["line"].rpartition(":")[0].endswith("tiny_models.py")
    assert "a row sums to 2.\n    Mask, scale" in refusal["reason"]


def test_json_of_segments_has_every_refused_layer(run: Run, incomplete: str) -> None:
    _, out, _ = run("segments", incomplete, "--by", "sentence", "--json")
    seen = regard.load(incomplete)
    assert json.loads(out)["refused"] == [refusal._asdict() for refusal in seen.refused]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments",
    [("see", TEXT), ("record", TEXT), ("heads", TEXT)],
    ids=lambda arguments: arguments[0],
)
def test_a_refused_layer_ends_a_strict_command(
    arguments: tuple[str, ...], run: Run, doubled: str
) -> None:
    code, out, err = run(*arguments, "-m", doubled, "--strict")
    assert (code, out) == (2, "")
    assert err.startswith(f"regard: the attention of '{REFUSED}' cannot be kept: ")
    assert not Path("attention.html").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", READ[:3])
def test_a_refused_layer_of_a_recording_ends_a_strict_command(
    arguments: tuple[str, ...], run: Run, incomplete: str
) -> None:
    code, out, err = run(*arguments, incomplete, "--strict")
    assert (code, out) == (2, "")
    assert re.fullmatch(f"{LINE}    Leave out --strict to see the other layers\\.\n", err)
    assert not Path("attention.html").exists()


def test_a_served_recording_names_its_refused_layer(
    run: Run, incomplete: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server.uvicorn.Server, "run", lambda *_, **__: None)
    code, _, err = run("serve", incomplete, "--no-browser")
    assert code == 0
    assert re.fullmatch(LINE, err)
    code, _, err = run("serve", incomplete, "--strict")
    assert code == 2
    assert err.endswith("    Leave out --strict to see the other layers.\n")


@pytest.mark.parametrize("strict", [(), ("--strict",)], ids=["", "strict"])
def test_nothing_is_said_of_a_model_without_refused_layers(
    strict: tuple[str, ...], run: Run, bert: str
) -> None:
    code, _, err = run("record", TEXT, "-m", bert, *strict)
    assert (code, err) == (0, "")
    code, _, err = run("page", "run.safetensors", *strict)
    assert (code, err) == (0, "")


@pytest.mark.filterwarnings("default")
def test_another_warning_is_written_without_its_code(
    run: Run, bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Pretrained._loaded

    def linear(pretrained: Pretrained, kind: str) -> torch.nn.Module:
        model = load(pretrained, kind)
        attention = model.encoder.layer[1].attention
        attention.self = tiny_models.Linear(attention.self)
        return model

    monkeypatch.setattr(Pretrained, "_loaded", linear)
    code, _, err = run("record", TEXT, "-m", bert)
    assert code == 0
    assert err.startswith(f"regard: '{REFUSED}' has attention that is not recorded: ")
    assert "UserWarning" not in err
    assert err.count("\n") == 1


def test_of_many_refused_layers_three_are_named_with_the_first_reason(run: Run) -> None:
    x = torch.zeros(1, 2, 5, 4)
    seen = regard.Recording({"0": regard.attend(x, x)})
    reasons = [f"reason {place}.\n    Remedy." for place in range(5)]
    refusals = [
        Refusal(f"\x1b[31m{place}", "model.py:7", reason) for place, reason in enumerate(reasons, 1)
    ]
    seen.refused = [*refusals, refusals[0]]  # a module is counted once
    seen.save("run.safetensors")
    _, _, err = run("page", "run.safetensors")
    assert err == (
        "regard: 5 layers were refused and are missing: '\\x1b[31m1', '\\x1b[31m2', '\\x1b[31m3' "
        "and 2 more; first reason: model.py:7: reason 0.\n"
    )
