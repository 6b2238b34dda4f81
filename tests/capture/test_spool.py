"""observe(path=...) writes as the model runs: what was finished can be loaded, whatever happens."""

import gc
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
import regard.recording.merged_calls
from full_disk import disk_of
from regard.recording.spool import MAGIC
from regard.recording.tensor_file import checksum

PROMPT, LAYERS = 5, 3
ASKED = [regard.TopK(2), regard.Entropy(), regard.Sum(-2)]


class Layer(nn.Module):
    """A layer of attention with a cache of its own, 4 heads on 2 key heads."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query, key = x.unflatten(-1, (4, -1)).transpose(-3, -2), x[:, None].expand(-1, 2, -1, -1)
        self.cache.append(key[..., : query.shape[-1]] + len(self.cache))
        key = torch.cat(self.cache, -2)
        value = key.sin()
        attention = nn.functional.scaled_dot_product_attention
        causal = query.shape[-2] > 1
        output = attention(query, key, value, is_causal=causal, enable_gqa=True)
        return output.transpose(-3, -2).flatten(-2)


class Decoder(nn.Module):
    """Layers that read a prompt, and then one token at a time."""

    def __init__(self, layers: int = LAYERS, dim: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def run(self, steps: int, prompt: int = PROMPT, after: Callable[[int], object] = id) -> Tensor:
        """Return the outputs of the prompt and of some steps; call ``after`` each of them."""
        for layer in self.layers:
            layer.cache = []
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(prompt + steps, 2, self.dim, generator=generator).transpose(0, 1)
        outputs = list[Tensor]()
        for at, stop in enumerate(range(prompt, prompt + steps + 1)):
            outputs.append(self(numbers[:, (stop - 1 if at else 0) : stop]))
            after(at)
        return torch.cat(outputs, -2)


def recorded(steps: int, **options: Any) -> regard.Recording:
    model = Decoder()
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model.run(steps)
    return seen


def same(found: regard.Recording, expected: regard.Recording) -> None:
    """Check that two recordings have the same layers, matrices, values and answers."""
    assert found.shapes == expected.shapes
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert (one.queries, one.origin) == (other.queries, other.origin)
        assert list(one.answers) == list(other.answers)
        for reduction in one.answers:
            torch.testing.assert_close(one.answers[reduction], other.answers[reduction])
        if one.matrix is not None:
            assert repr(one.whole()) == repr(other.whole())
            assert torch.equal(one.whole().to_dense(), other.whole().to_dense())
        assert (one.value is None) == (other.value is None)
        if one.value is not None:
            assert torch.equal(one.whole_value(), other.whole_value())


OPTIONS: dict[str, dict[str, Any]] = {
    "query and key": {},
    "values": {"keep": "qkv"},
    "answers of rows": {"keep": ASKED[:2]},
    "some layers and heads": {"layers": [1], "heads": [3, 1]},
    "the last queries": {"queries": slice(-4, None)},
    "the first queries": {"queries": slice(2, 6)},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_spool_of_a_running_model_has_every_call_that_was_finished(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path, model, parts = tmp_path / "run.safetensors", Decoder(), list[regard.Recording]()

    def load(_: int) -> None:
        parts.append(regard.load(f"{path}.part"))

    with torch.no_grad(), regard.observe(model, path=path, **options) as seen:
        model.run(6, after=load)
    for steps in (0, 1, 6):
        same(parts[steps], recorded(steps, **options))
    same(seen, recorded(6, **options))
    same(regard.load(path), recorded(6, **options))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
def test_totals_are_those_of_a_call_that_is_not_long_ago(tmp_path: Path) -> None:
    path, model, parts = tmp_path / "run.safetensors", Decoder(), list[regard.Recording]()
    with torch.no_grad(), regard.observe(model, path=path, keep=ASKED) as seen:
        model.run(40, after=lambda _: parts.append(regard.load(f"{path}.part")))
    for steps in (0, 9, 40):
        part = parts[steps]
        q_len = part.layers[0].shape[-2]
        assert 8 * (PROMPT + steps) < 9 * (q_len + 1) <= 9 * (PROMPT + steps + 1)
        same(part, recorded(q_len - PROMPT, keep=ASKED))
    same(seen, recorded(40, keep=ASKED))


# Crashes


@pytest.mark.full
def test_what_was_finished_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    code = """
import os, signal, sys, torch, regard
from test_spool import Decoder
model = Decoder()
with torch.no_grad(), regard.observe(model, path=sys.argv[1], keep="qkv"):
    model.run(9, after=lambda at: at == 6 and os.kill(os.getpid(), signal.SIGKILL))
"""
    folders = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": folders}
    killed = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=False, timeout=300, env=environment
    )
    assert killed.returncode == -9
    part = tmp_path / "run.safetensors.part"
    assert list(tmp_path.iterdir()) == [part]
    with pytest.raises(FileNotFoundError, match=rf"^there is no file {path}; {part} has what was "):
        regard.load(path)
    seen = regard.load(part)
    same(seen, recorded(6, keep="qkv"))
    seen.save(path)
    same(regard.load(path), recorded(6, keep="qkv"))


def test_after_an_exception_the_spool_stays_and_the_older_file_is_whole(tmp_path: Path) -> None:
    path, model = tmp_path / "run.safetensors", Decoder()
    recorded(1, path=path)
    with (
        pytest.raises(ZeroDivisionError) as error,
        torch.no_grad(),
        regard.observe(model, path=path) as seen,
    ):
        model.run(4, after=lambda at: 1 / (3 - at))
    assert error.value.__notes__ == [f"{path}.part has what regard recorded before."]
    same(regard.load(path), recorded(1))
    same(regard.load(f"{path}.part"), recorded(3))
    same(seen, recorded(3))
    recorded(2, path=path)  # the next recording replaces both
    same(regard.load(path), recorded(2))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("layers", [1, 3])
def test_a_block_that_records_nothing_leaves_nothing(layers: int, tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        regard.observe(Decoder(layers), path=tmp_path / "run.safetensors"),
    ):
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())


def test_what_is_cut_off_anywhere_is_loaded_up_to_there(tmp_path: Path) -> None:
    path, part, content = tmp_path / "run.safetensors", tmp_path / "cut.part", b""

    def read(at: int) -> None:
        nonlocal content
        content = Path(f"{path}.part").read_bytes()

    model = Decoder()
    with torch.no_grad(), regard.observe(model, path=path):
        model.run(3, after=read)
    expected = {recorded(steps).shapes["layers.0"]: recorded(steps) for steps in range(4)}
    rows = list[int]()
    for end in range(len(MAGIC) + 500, len(content), 997):
        part.write_bytes(content[:end])
        seen = regard.load(part)
        for layer in seen.layers:
            whole = expected[layer.shape][layer.name]
            assert torch.equal(layer.whole().to_dense(), whole.to_dense())
        rows.append(sum(layer.shape[-2] for layer in seen.layers))
    assert rows == sorted(rows)
    assert rows[-1] > rows[0]


# A disk that is full


def test_a_full_disk_stops_no_model_and_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    path, model, sizes = tmp_path / "run.safetensors", Decoder(), list[int]()
    recorded(1, path=path)
    with torch.no_grad(), regard.observe(model, path=tmp_path / "other"):
        expected = model.run(
            6, after=lambda _: sizes.append((tmp_path / "other.part").stat().st_size)
        )
    (tmp_path / "other").unlink()
    with (
        pytest.raises(regard.RegardError) as error,
        disk_of(sizes[3] + 1000),
        torch.no_grad(),
        regard.observe(model, path=path) as seen,
    ):
        output = model.run(6)
    assert torch.equal(output, expected)
    assert str(error.value) == (
        f"{path} cannot be written: File too large; {path}.part has what was finished until then.\n"
        "    Observe again with a path where there is room, or keep less."
    )
    same(regard.load(path), recorded(1))
    part = regard.load(f"{path}.part")
    same(seen, part)
    same(part.part([2]), recorded(3).part([2]))  # the others may have one call more


def test_a_disk_that_is_full_at_once_leaves_nothing(tmp_path: Path) -> None:
    path, model = tmp_path / "run.safetensors", Decoder()
    message = (
        f"{path} cannot be written: File too large; nothing of it is left, and a file that was "
        "there is as it was.\n    Observe again with a path where there is room, or keep less."
    )
    with (
        pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"),
        disk_of(900),
        regard.observe(model, path=path) as seen,
    ):
        model.run(2)
    assert not seen.layers
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_end_keeps_the_spool(tmp_path: Path) -> None:
    path, model, sizes = tmp_path / "run.safetensors", Decoder(), list[int]()

    def fill(at: int) -> None:
        sizes.append(Path(f"{path}.part").stat().st_size)
        if at == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1], resource.RLIM_INFINITY))

    with (
        pytest.raises(regard.RegardError) as error,
        disk_of(2**30),
        torch.no_grad(),
        regard.observe(model, path=path) as seen,
    ):
        model.run(2, after=fill)
    assert str(error.value).endswith(
        f"\n    {path}.part has what was recorded; load it with regard.load."
    )
    for recording in (seen, regard.load(f"{path}.part")):
        same(recording, recorded(2))


# Limits


@pytest.mark.full
def test_one_descriptor_suffices(tmp_path: Path) -> None:
    model, counts = Decoder(8), list[int]()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with torch.no_grad(), regard.observe(model, path=tmp_path / "run.safetensors", keep="qkv"):
        model.run(20, after=lambda _: counts.append(len(list(Path("/proc/self/fd").iterdir()))))
    assert max(counts) == before + 1


def alive() -> int:
    """Return the bytes of all tensors that are alive."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    return sum({id(each.untyped_storage()): each.nbytes for each in tensors}.values())


def kept(steps: int, model: Decoder, prompt: int = PROMPT, **options: Any) -> tuple[int, int]:
    """Return the bytes in memory and in the spool that a recording takes before its block ends."""
    with torch.no_grad(), regard.observe(model, **options):
        before = alive()
        model.run(steps, prompt)
        for layer in model.layers:
            layer.cache = []
        part = Path(f"{options.get('path')}.part")
        return alive() - before, part.stat().st_size if part.exists() else 0


@pytest.mark.full
@pytest.mark.parametrize("keep", ["qk", [regard.Sum(-2)]], ids=["qk", "totals"])
def test_the_spool_grows_with_the_text_and_not_with_its_square(keep: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    short, long = (kept(steps, Decoder(1), path=path, keep=keep)[1] for steps in (100, 400))
    assert long < 5 * short


@pytest.mark.full
def test_totals_take_memory_that_grows_with_the_text_and_not_with_its_square() -> None:
    short, long = (kept(steps, Decoder(1), keep=[regard.Sum(-2)])[0] for steps in (100, 400))
    assert 0 < long < 5 * short


CHECKSUMS = 2 * 1000 * 16
"""The bytes of the checksums of 1,000 keys and values of a layer, in a batch of two."""


@pytest.mark.full
def test_a_spool_keeps_checksums_alone_in_memory(tmp_path: Path) -> None:
    keys = 2 * 2 * 1000 * 4 * 4  # bytes
    assert kept(0, Decoder(2), 1000)[0] > 2 * keys
    held = kept(0, Decoder(2), 1000, path=tmp_path / "run.safetensors")[0]
    assert held < 2 * CHECKSUMS + keys // 10


@pytest.mark.full
def test_of_layers_that_are_not_selected_checksums_alone_are_kept() -> None:
    one, of_six = (kept(0, Decoder(layers), 1000, layers=[0])[0] for layers in (1, 6))
    assert 0 < of_six - 5 * CHECKSUMS < 1.1 * one


# What is no spool that observe wrote


def spool(folder: Path, keep: Any = "qkv") -> bytes:
    path, model, contents = folder / "run.safetensors", Decoder(1), list[bytes]()
    with torch.no_grad(), regard.observe(model, path=path, keep=keep):
        model.run(2, after=lambda _: contents.append(Path(f"{path}.part").read_bytes()))
    return contents[-1]


def everything_in(path: Path) -> None:
    for layer in regard.load(path).layers:
        if layer.matrix is not None:
            layer.whole().to_dense()
        if layer.value is not None:
            layer.whole_value()


@contextmanager
def one_error(part: Path) -> Iterator[None]:
    """Check that an exception, if there is one, is the error for a damaged or other file."""
    try:
        yield
    except regard.RegardError as error:
        if not re.match(rf"{part} is (damaged: |a recording of format )", str(error)):
            raise AssertionError(str(error)) from error


def test_a_byte_that_flips_gives_an_error_or_what_was_before_it(tmp_path: Path) -> None:
    content, part = bytearray(spool(tmp_path)), tmp_path / "run.part"
    expected = {recorded(steps).shapes["layers.0"]: recorded(steps) for steps in range(3)}
    for place in range(len(MAGIC), len(content), 61):
        content[place] ^= 4
        part.write_bytes(content)
        with one_error(part):
            for layer in regard.load(part).layers:
                whole = expected[layer.shape]["layers.0"]
                assert torch.equal(layer.whole().to_dense(), whole.to_dense())
        content[place] ^= 4


def records(content: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """Return the JSON of each record, and the bytes after it."""
    found, at = list[tuple[dict[str, Any], bytes]](), len(MAGIC)
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        plain = json.loads(content[at + 8 : at + 8 + length])
        at += 8 + length + 32
        size = torch.Size(plain["shape"]).numel() * 4 + 32 if "dtype" in plain else 0
        found.append((plain, content[at : at + size]))
        at += size
    return found


def packed(every: list[tuple[dict[str, Any], bytes]]) -> bytes:
    texts = [(json.dumps(plain).encode(), content) for plain, content in every]
    return MAGIC + b"".join(
        len(text).to_bytes(8, "little") + text + checksum(text).encode() + content
        for text, content in texts
    )


HOSTILE: dict[str, dict[str, Any]] = {
    "another format": {"format": 99},
    "queries that are none": {"queries": [None, "3"]},
    "a run that is a list": {"run": [1]},
    "a module that is none": {"module": 3},
    "a kind that is none": {"kind": "os.system"},
    "a query beyond": {"first": 2**60},
    "more keys than there are": {"columns": 2**30},
    "more keys at the end": {"kv_len": 2**39},
    "more rows at the end": {"ran": 2**39},
    "answers that are none": {"answers": [None]},
    "keys at a gap": {"keys": [100, 0]},
    "keys of no tensor": {"keys": [0, 10**9]},
    "keys before the first": {"keys": [0, -1]},
    "no place": {"base": -1},
    "a matrix that is none": {"matrix": {"scores": {"kind": "Pickle"}, "mask": None}},
    "an origin that is none": {"origin": {"layer": 0, "heads": [1, 2, 3]}},
    "a shape that is absurd": {"shape": [2**40, 2**40]},
    "a dtype of nothing": {"dtype": "F99"},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "keep", ["qkv", [regard.Sum(-2), regard.Entropy()]], ids=["qkv", "answers"]
)
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_notes_are_one_error_or_nothing(
    change: dict[str, Any], keep: Any, tmp_path: Path
) -> None:
    every, part = records(spool(tmp_path, keep)), tmp_path / "hostile.part"
    assert packed(every) == spool(tmp_path, keep)
    changed = [({**p, **change} if change.keys() <= p.keys() else p, c) for p, c in every]
    part.write_bytes(packed(changed))
    with one_error(part):
        everything_in(part)


def test_a_spool_without_notes_is_no_recording(tmp_path: Path) -> None:
    part = tmp_path / "run.part"
    part.write_bytes(MAGIC)
    with pytest.raises(regard.RegardError, match=r"is damaged: no layer in it was finished"):
        regard.load(part)


# Who writes


def test_two_blocks_do_not_write_one_file(tmp_path: Path) -> None:
    path, model = tmp_path / "run.safetensors", Decoder()
    message = (
        f"{path} is being written already; the later of two would replace the other.\n"
        "    Give each its own path, or end the block of the observe that writes it before."
    )
    with torch.no_grad(), regard.observe(model, path=path) as seen:
        for use in (lambda: seen.save(path), lambda: recorded(1, path=path)):
            with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
                use()
        model.run(2)
    same(regard.load(path), recorded(2))


def test_a_part_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    part = tmp_path / "run.safetensors.part"
    part.write_bytes(b"half of a download")
    message = f"{part} exists and is not a recording; saving would lose it.\n"
    with (
        pytest.raises(regard.RegardError, match=f"^{re.escape(message)}"),
        regard.observe(Decoder(), path=tmp_path / "run.safetensors"),
    ):
        pytest.fail("the block must not run")
    assert part.read_bytes() == b"half of a download"


def test_what_a_file_cannot_have_is_said_before_the_model_runs(tmp_path: Path) -> None:
    class Mine(regard.Entropy):
        pass

    with (
        pytest.raises(regard.RegardError, match=r"^it has the answer to "),
        regard.observe(Decoder(), path=tmp_path / "run.safetensors", keep=[Mine()]),
    ):
        pytest.fail("the block must not run")
    assert not list(tmp_path.iterdir())


def test_a_layer_with_nan_is_refused_and_the_others_are_written(tmp_path: Path) -> None:
    class Broken(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.full_like(x, torch.nan)).zero_()

    path, model = tmp_path / "run.safetensors", Decoder()
    model.layers[1] = Broken()
    with (
        pytest.warns(UserWarning, match="it has NaN in its key; a recording in a file holds"),
        torch.no_grad(),
        regard.observe(model, path=path) as seen,
    ):
        model.run(2)
    for recording in (seen, regard.load(path)):
        assert list(recording) == ["layers.0", "layers.2"]
        assert [refusal.module for refusal in recording.refused] == ["layers.1"]


def test_a_recording_is_read_by_other_threads_while_it_is_written(tmp_path: Path) -> None:
    path, model, found = tmp_path / "run.safetensors", Decoder(1), list[torch.Size]()
    with torch.no_grad(), regard.observe(model, path=path) as seen:
        model.run(3)
        thread = threading.Thread(target=lambda: found.append(seen[0].to_dense().shape))
        thread.start()
        thread.join()
    assert found == [(2, 4, PROMPT, PROMPT)]
