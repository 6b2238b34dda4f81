"""A recording is written whole or not at all, and what a file cannot hold is refused."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from full_disk import disk_of
from regard.matrix.weighted_sums import WeightedSum
from regard.recording.file_reader import read
from regard.scores.given_scores import GivenScores


def write(path: Path, **matrices: regard.AttentionMatrix) -> None:
    regard.Recording(matrices).save(path)


def saved(path: Path, *, of: regard.Recording) -> regard.Recording:
    of.save(path)
    return read(path)


def small(seed: int = 0, q_len: int = 3, kv_len: int = 3) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, q_len, 4, generator=generator)
    return regard.attend(query, torch.randn(2, kv_len, 4, generator=generator))


def recording(model: str = "Tiny", **tokens: Any) -> regard.Recording:
    return regard.Recording({"a": small(), "b.attn": small(1)}, model=model, **tokens)


# Written whole, or not at all


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_says_how_many_layers_it_has_written(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    recording().save(tmp_path / "run.safetensors", progress=lambda *count: told.append(count))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("names", [("a", "b" * 300), ("b" * 300, "a"), ("\N{PARROT}" * 40, "/")])
def test_layers_that_share_their_tensors_may_have_any_names(
    names: tuple[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "run.safetensors", **dict.fromkeys(names, small()))
    seen = read(tmp_path / "run.safetensors")
    assert list(seen) == list(names)
    assert torch.equal(seen[1].to_dense(), small().to_dense())


@pytest.mark.parametrize("name", ["x" * 255, "\N{PARROT}" * 63], ids=["letters", "parrots"])
def test_any_name_that_a_file_may_have_is_taken(name: str, tmp_path: Path) -> None:
    recording().save(tmp_path / name)
    assert left_in(tmp_path) == [name]
    assert regard.load(tmp_path / name).model == "Tiny"


def test_until_it_is_finished_a_recording_of_that_name_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    saved(path, of=recording("old"))
    models: list[str] = []
    recording("new").save(path, progress=lambda *_: models.append(read(path).model))
    assert models == ["old", "old"]
    assert read(path).model == "new"
    assert left_in(tmp_path) == ["run.safetensors"]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fails(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recording().save(tmp_path / "run.safetensors", progress=fails)
    assert left_in(tmp_path) == []


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    real, link = tmp_path / "runs" / "one.safetensors", tmp_path / "run.safetensors"
    saved(real, of=recording("old"))
    link.symlink_to(real)
    assert saved(link, of=recording("new")).model == "new"
    assert link.is_symlink()
    assert read(real).model == "new"
    assert left_in(tmp_path / "runs") == ["one.safetensors"]


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
def test_a_pipe_is_no_file_to_replace(linked: bool, tmp_path: Path) -> None:
    pipe = path = tmp_path / "pipe"
    os.mkfifo(pipe)
    if linked:
        path = tmp_path / "run.safetensors"
        path.symlink_to(pipe)
    message = (
        f"{path} is a device, a pipe or the like; a recording replaces files alone.\n"
        "    Save it under a name of its own."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        recording().save(path)
    assert pipe.is_fifo()
    assert left_in(tmp_path) == sorted({"pipe", path.name})


FULL = (
    r"^{path} cannot be written: File too large; nothing of it is left, "
    r"and a file that was there is as it was\."
    r"\n    Save it where there is room and you may write\.$"
)


@pytest.mark.parametrize("size", [0, 2**16 + 100, 2**20], ids=str)
def test_a_disk_that_fills_leaves_the_earlier_recording_and_nothing_else(
    size: int, tmp_path: Path
) -> None:
    path = tmp_path / "run.safetensors"
    saved(path, of=recording("old"))
    query = torch.randn(2**18, 4)
    with disk_of(size), pytest.raises(regard.RegardError, match=FULL.format(path=path)):
        write(path, a=small(), b=regard.attend(query, query[:1]))
    assert left_in(tmp_path) == ["run.safetensors"]
    assert read(path).model == "old"


def test_a_disk_that_fills_with_the_header_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    seen = recording(query_tokens=[regard.Token("x" * 2**17)] * 3)
    with disk_of(2**17), pytest.raises(regard.RegardError, match=FULL.format(path=path)):
        seen.save(path)
    assert left_in(tmp_path) == []


def test_a_folder_that_is_not_there_is_said_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "run.safetensors"
    message = rf"^{path} cannot be written: No such file or directory; nothing of it is left"
    with pytest.raises(regard.RegardError, match=message):
        write(path, a=small())


def test_a_folder_is_no_file_to_write_to(tmp_path: Path) -> None:
    message = (
        rf"^{tmp_path} is a folder; a recording is one file\."
        rf"\n    Save it in the folder, {tmp_path}/run.safetensors\.$"
    )
    with pytest.raises(regard.RegardError, match=message):
        write(tmp_path, a=small())


EXAMPLE = '\n    Pass for example path="run.safetensors".'
NO_PATHS: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": ("", ValueError, "path is empty; it must be the path of a file."),
    "a null character": (
        "run\0",
        ValueError,
        "path is 'run\\x00', with a null character; no file has one in its name.",
    ),
    "bytes": (b"run", TypeError, "path is a bytes; it must be the path of a file."),
    "a number": (3, TypeError, "path is an int; it must be the path of a file."),
}


@pytest.mark.parametrize(("path", "kind", "message"), NO_PATHS.values(), ids=NO_PATHS)
@pytest.mark.parametrize("use", [regard.Recording({}).save, regard.load], ids=["save", "load"])
def test_what_is_no_path_of_a_file_is_said_at_the_door(
    use: Callable[[Any], object], path: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message + EXAMPLE)}$"):
        use(path)


class MyBias(regard.Bias):
    """A bias of somebody's own."""

    def bind(self, shape: torch.Size, device: torch.device) -> regard.Bias:
        return self

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def map(self, function: Any) -> regard.Bias:
        return self

    def along(self, distance: Tensor, part: Any) -> Tensor:
        return -distance.abs().float()

    def __repr__(self) -> str:
        return "MyBias()"


X = torch.randn(2, 9000, 2)


def bump(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + 1


def by_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx + h


@pytest.mark.parametrize(
    ("matrix", "what"),
    [
        pytest.param(regard.attend(X, X, score_mod=bump), "the score_mod bump", id="score_mod"),
        pytest.param(regard.attend(X, X, bias=MyBias()), "the bias MyBias()", id="bias"),
        pytest.param(
            regard.attend(X, X, mask=by_head),
            "the mask MaskMod(by_head); written out it is 154 MiB, more than 64 MiB",
            id="mask_mod",
        ),
    ],
)
def test_what_is_code_is_refused_before_anything_is_written(
    matrix: regard.AttentionMatrix, what: str, tmp_path: Path
) -> None:
    message = (
        f"layer 'b' cannot be saved: it has {what}; a recording in a file is numbers and runs no "
        "code.\n    Pass what it does as a bias or a mask of regard, or keep answers instead, "
        "observe(model, keep=[...])."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        write(tmp_path / "run.safetensors", a=small(), b=matrix)
    assert left_in(tmp_path) == []


def test_an_answer_to_somebodys_own_question_is_refused(tmp_path: Path) -> None:
    seen = regard.Recording({})
    question = WeightedSum(torch.ones(3, 3))
    answers = [(question, small().reduce(question))]
    seen.add("a", None, answers=answers, shape=small().shape)
    with pytest.raises(regard.RegardError, match=r"^layer 'a' cannot be saved: it has the answer "):
        seen.save(tmp_path / "run.safetensors")


@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize(
    ("number", "name"),
    [(torch.nan, "NaN"), (torch.inf, "an infinity"), (-torch.inf, "an infinity")],
)
def test_numbers_that_are_none_are_refused_before_anything_is_written(
    role: str, number: float, name: str, tmp_path: Path
) -> None:
    inputs = {"query": torch.randn(3, 4), "key": torch.randn(3, 4)}
    inputs[role][1, 2] = number
    message = (
        f"layer 'b' cannot be saved: it has {name} in its {role}; a recording in a file holds "
        "numbers.\n    Look at the recording as it is: the first layer with NaN says where it "
        "began."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        write(tmp_path / "run.safetensors", a=small(), b=regard.attend(**inputs))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn], ids=str)
def test_numbers_that_a_file_does_not_have_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    scores = torch.zeros(3, 3).to(dtype)
    message = (
        "layer 'a' cannot be saved: its values is float8_e4m3fn; a recording in a file has no such "
        "numbers.\n    Use A.to(torch.float32), and int64 for whole numbers."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        write(tmp_path / "run.safetensors", a=regard.AttentionMatrix(GivenScores(scores)))


def test_names_of_spans_that_are_no_strings_are_refused(tmp_path: Path) -> None:
    whole, asked = small(), regard.Segments({1: (0, 2)})  # type: ignore[dict-item]
    seen = regard.Recording({})
    seen.add("a", None, shape=whole.shape, answers=[(asked, whole.reduce(asked))])
    message = (
        "layer 'a' cannot be saved: it has the span name 1, an int; in a file names are strings.\n"
        "    Observe again with strings for the names of the spans."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        seen.save(tmp_path / "run.safetensors")
    assert left_in(tmp_path) == []
