"""No damage to a file goes unnoticed, and a file that changes while it is read ends no process."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.recording.file_reader import read, verify
from regard.recording.spool import lock

FLIPS = 600


def recording(length: int = 40) -> regard.Recording:
    """A mask, tokens, a value-sized tensor that is read late, and answers."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, length, 8, generator=generator) for _ in range(2))
    matrix = regard.attend(query, key, mask=regard.Causal(), scale=0.25)
    seen = regard.Recording({"first": matrix}, model="Tiny")
    seen.add("second", None, answers=[(regard.Entropy(), matrix.entropy())], shape=matrix.shape)
    return seen.with_tokens([regard.Token(f"token {place}") for place in range(length)])


def saved(path: Path, length: int = 40) -> Path:
    recording(length).save(path)
    return path


def header_of(path: Path) -> int:
    """The number of bytes before the first tensor."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def everything_in(path: Path) -> list[Any]:
    """Whatever a recording can be asked for."""
    seen = regard.load(path)
    return [repr(seen), seen["first"].to_dense(), seen.kept["second"][regard.Entropy()]]


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(40, id="small tensors"),
        pytest.param(3000, id="large tensors", marks=pytest.mark.full),
    ],
)
def test_no_flipped_bit_goes_unnoticed(length: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "run.safetensors", length)
    content, chance = bytearray(path.read_bytes()), random.Random(0)
    some = random.Random(1).choices(range(header_of(path)), k=FLIPS // 2)
    some += [chance.randrange(len(content)) for _ in range(FLIPS // 2)]
    for place in some:
        bit = 1 << chance.randrange(8)
        content[place] ^= bit
        path.write_bytes(content)
        with pytest.raises(regard.RegardError):
            everything_in(path)
        content[place] ^= bit
    path.write_bytes(content)
    everything_in(path)


def test_verify_reads_all_and_says_what_it_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "run.safetensors", 3000)
    told: list[tuple[int, int]] = []
    text = verify(path, progress=lambda *count: told.append(count))
    assert text == "2 layers, 491 KiB: every number has its checksum"
    assert told == [(1, 2), (2, 2)]
    content = bytearray(path.read_bytes())
    content[300_000] ^= 1
    path.write_bytes(content)
    regard.load(path)  # its large tensors are not read yet
    message = f"{path} is damaged: layer 'first': the tensor 'first/key' differs from its checksum"
    with pytest.raises(regard.RegardError) as caught:
        verify(path)
    assert str(caught.value).startswith(message)


def test_a_file_that_becomes_shorter_gives_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "run.safetensors", 3000)
    seen = regard.load(path)
    with path.open("r+b") as file:
        file.truncate(100_000)
    message = f"{path} is damaged: layer 'first': it became shorter after it was opened"
    with pytest.raises(regard.RegardError) as caught:
        seen["first"]
    assert str(caught.value).startswith(message)


def test_a_file_that_is_overwritten_in_place_is_not_mixed_with_the_new_one(tmp_path: Path) -> None:
    path, other = saved(tmp_path / "run.safetensors", 3000), tmp_path / "other.safetensors"
    x = torch.ones(2, 3000, 8)
    regard.Recording({"first": regard.attend(x, x)}, model="Tiny").save(other)
    seen = regard.load(path)
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    with pytest.raises(regard.RegardError, match="is damaged: layer 'first': the tensor"):
        seen["first"]


def test_a_recording_that_is_replaced_stays_what_it_was(tmp_path: Path) -> None:
    path = saved(tmp_path / "run.safetensors", 3000)
    seen = regard.load(path)
    expected = recording(3000)["first"].entropy()
    x = torch.ones(2, 5, 8)
    regard.Recording({"first": regard.attend(x, x)}).save(path)
    assert torch.equal(seen["first"].entropy(), expected)
    assert regard.load(path)["first"].shape == (2, 5, 5)


@pytest.mark.full
def test_threads_and_forked_processes_read_the_same_numbers(tmp_path: Path) -> None:
    path = saved(tmp_path / "run.safetensors", 3000)
    code = """
import os, sys, threading
import regard
seen = regard.load(sys.argv[1])
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        seen["first"]
        os._exit(0)
    children.append(child)
threads = [threading.Thread(target=lambda: seen["first"]) for _ in range(4)]
[each.start() for each in threads], [each.join() for each in threads]
seen["first"]
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)


# The file's place


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_the_permissions_of_a_file_that_is_replaced_stay(mode: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "run.safetensors")
    path.chmod(mode)
    saved(path)
    assert path.stat().st_mode & 0o777 == mode


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = saved(tmp_path / "run.safetensors")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_partial_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    path = saved(tmp_path / "run.safetensors")
    stale = tmp_path / "run.safetensors.0123abcd.partial"
    stale.touch()
    saved(path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_partial_file_of_a_living_process_stays(tmp_path: Path) -> None:
    busy = tmp_path / "run.safetensors.0123abcd.partial"
    with busy.open("wb") as file:
        lock(file)
        saved(tmp_path / "run.safetensors")
    assert busy.exists()


@pytest.mark.parametrize("content", [b"<!doctype html>", b"\x80\x04\x95", b"{}"])
def test_nothing_but_a_recording_is_replaced(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(content)
    message = (
        f"{path} exists and is not a recording; saving would lose it.\n"
        "    Save under another name, or remove that file first."
    )
    with pytest.raises(regard.RegardError) as caught:
        recording().save(path)
    assert str(caught.value) == message
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_and_a_damaged_recording_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    path.touch()
    saved(path)
    path.write_bytes(path.read_bytes()[:1000])
    saved(path)
    assert read(path).model == "Tiny"
