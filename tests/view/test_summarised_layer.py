"""What a page holds of layers too large for it: block means, and which layer gets what."""

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from pages import Blocks, blocks_of, layers_of, numbers_of, unpacked
from regard.recording.layers import InMemory
from regard.view.export import complete_layer as whole
from regard.view.export.complete_layer import CompleteLayer
from regard.view.export.page_file import write_page
from regard.view.export.summarised_layer import (
    SummarisedLayer,
    block_means,
    block_of,
    block_sums,
    levels_of,
    most_bytes,
)
from regard.view.tiles.manifest import PageLayer

MASKS = {
    "no mask": None,
    "causal": regard.Causal(),
    "window": regard.SlidingWindow(3, 1),
    "documents": regard.Documents([0] * 4 + [1] * 3 + [2] * 6),
    "gaps": regard.Keep(torch.arange(13 * 13).reshape(13, 13) % 3 != 1),
}


def matrix_of(
    mask: regard.Mask | None = None, tokens: int = 13, **more: Any
) -> regard.AttentionMatrix:
    torch.manual_seed(5)
    query, key = torch.randn(2, 2, tokens, 4) * 2
    return regard.attend(query, key, mask=mask, **more)


def aligned_means(weights: Tensor, size: int) -> Tensor:
    """(num_heads, rows, columns) of a dense matrix, in float64."""
    down, across = (range(0, length, size) for length in weights.shape[-2:])
    means = [
        weights[:, i : i + size, j : j + size].double().mean((1, 2)) for i in down for j in across
    ]
    return torch.stack(means, -1).reshape(-1, len(down), len(across))


def summarised(matrix: regard.AttentionMatrix) -> tuple[PageLayer, dict[str, str]]:
    summarised = SummarisedLayer(PageLayer("layer", *matrix.shape), matrix)
    block = summarised.finished([matrix.reduce(*summarised.questions)], 0)
    return summarised.layer, block


def means_of(matrix: regard.AttentionMatrix, size: int) -> Tensor:
    question = block_sums(matrix.shape, size)
    return block_means(question, matrix.reduce(question))


def read(levels: Tensor, maximum: float, octaves: float) -> Tensor:
    """Means as the page reads them."""
    means = maximum * 2 ** (-octaves * (254 - levels.double()) / 253)
    return means.masked_fill(levels == 0, 0).masked_fill(levels == 255, torch.nan)


def means_in(layer: PageLayer, block: dict[str, str]) -> Tensor:
    packed = base64.b64decode(block["levels"])
    levels = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)
    return read(levels, layer.maximum, layer.octaves)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in MASKS.items()])
def test_block_means_are_aligned_to_the_first_token(mask: regard.Mask | None, size: int) -> None:
    matrix = matrix_of(mask)
    found = means_of(matrix, size)
    expected = aligned_means(matrix.to_dense(), size)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_block_means_of_fewer_queries_than_keys_stop_at_both_edges() -> None:
    torch.manual_seed(1)
    matrix = regard.attend(torch.randn(3, 5, 4), torch.randn(3, 13, 4), mask=regard.Causal())
    found = means_of(matrix, 4)
    expected = aligned_means(matrix.to_dense(), 4)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([0.0, 1e-6, 3e-4, 0.02, 0.5], id="far apart"),
        pytest.param([0.25, 0.25], id="all the same"),
        pytest.param([0.0, 0.0], id="nothing"),
        pytest.param([0.0, 0.3], id="one"),
    ],
)
def test_a_byte_is_within_its_error_of_the_mean(values: list[float]) -> None:
    means = torch.tensor(values, dtype=torch.float64)
    levels, maximum, octaves = levels_of(means)
    error = (read(levels, maximum, octaves) - means).abs()
    assert torch.equal(levels == 0, means == 0)
    assert bool((error <= means * (2 ** (octaves / 506) - 1 + 1e-12)).all())


@pytest.mark.parametrize("others", [[1e-30, 0.5], [0.0, 0.0]], ids=["beside numbers", "beside 0"])
def test_a_mean_that_is_not_a_number_stays_none_and_tiny_ones_are_the_lowest(
    others: list[float],
) -> None:
    levels, _, octaves = levels_of(torch.tensor([torch.nan, *others]))
    expected = ([255, 1, 254], 32.0) if others[1] else ([255, 0, 0], 0.0)
    assert (levels.tolist(), octaves) == expected


def test_the_pyramid_of_a_long_layer_is_within_its_error_of_the_pooled_matrix() -> None:
    matrix = matrix_of(regard.Causal(), tokens=1024)
    layer, block = summarised(matrix)
    assert layer.block == block_of(matrix.shape) == 2
    means = means_in(layer, block)
    expected = matrix.pool(512, 512).double().flatten()
    error = 2 ** (layer.octaves / 506) - 1
    lowest = layer.maximum * 2**-32
    assert bool(((means - expected).abs() <= expected * (error + 1e-5) + lowest).all())
    assert len(block["levels"]) <= most_bytes(matrix.shape, 2)


def test_where_a_row_is_not_numbers_its_means_say_so() -> None:
    query, key = torch.randn(2, 1, 13, 4)
    query[0, 5, 2] = torch.nan
    means = means_in(*summarised(regard.attend(query, key)))
    assert means.reshape(13, 13).isnan().all(1).nonzero().tolist() == [[5]]


@pytest.mark.parametrize(
    ("mask", "heads"),
    [
        pytest.param(None, 1, id="no mask"),
        pytest.param(regard.Causal(), 1, id="causal"),
        pytest.param(MASKS["gaps"], 0, id="gaps"),
    ],
)
def test_which_keys_are_allowed_is_stored_where_they_are_one_interval(
    mask: regard.Mask | None, heads: int
) -> None:
    layer, block = summarised(matrix_of(mask))
    assert layer.span_heads == heads
    if heads:
        stored = unpacked(block["spans"], torch.int32).reshape(13, 2)
        assert stored.tolist() == [[0, 13 if mask is None else row + 1] for row in range(13)]


# Which layer gets what


def recording(layers: int = 3, **options: Any) -> regard.Recording:
    """Of each layer query and key take 700 kB in 16 bits, block means up to 31 kB."""
    torch.manual_seed(2)
    return regard.Recording(
        {
            f"layer.{layer}": regard.attend(
                torch.randn(1, 150, 1024), torch.randn(1, 150, 1024), scale=0.05, **options
            )
            for layer in range(layers)
        }
    )


def layers_in(folder: Path, seen: regard.Recording, **options: Any) -> list[dict[str, Any]]:
    path = write_page(seen, folder / "page.html", **options)
    return json.loads(Blocks(path.read_text()).scripts["recording"])["layers"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        pytest.param({}, [0, 0, 0], id="all fit"),
        pytest.param({"limit": 10}, [8, 8, 8], id="nothing fits"),
        pytest.param({"limit": 95_000}, [1, 1, 1], id="the means of small blocks fit"),
        pytest.param({"limit": 65_000, "opened": (0, 0)}, [1, 1, 4], id="some of them fit"),
        pytest.param({"limit": 65_000, "opened": (2, 0)}, [1, 4, 1], id="of the opened one"),
        pytest.param({"limit": 2_200_000}, [0, 0, 0], id="all fit in 16 bits"),
        pytest.param({"limit": 1_150_000, "opened": (0, 0)}, [0, 1, 1], id="one fits in full"),
        pytest.param({"limit": 1_150_000, "opened": (1, 0)}, [1, 0, 1], id="the opened one first"),
        pytest.param({"limit": 1_150_000, "layers": [2]}, [8, 8, 0], id="one is wanted"),
    ],
)
def test_what_fits_is_stored(options: dict[str, Any], blocks: list[int], tmp_path: Path) -> None:
    """The tokens of a block of each layer; 0: every weight is there."""
    layers = layers_in(tmp_path, recording(), **options)
    kinds = ["pyramid" if block else "query-key" for block in blocks]
    assert [layer["kind"] for layer in layers] == kinds
    assert [layer["block"] for layer in layers if layer["kind"] == "pyramid"] == list(
        filter(None, blocks)
    )


def test_layers_of_heads_that_stand_out_are_exact_before_the_others(tmp_path: Path) -> None:
    """Layer 0 has heads of no kind; layer 1 looks at the token before, layer 2 at itself."""
    seen = recording()
    x = torch.eye(150, 1024)[None] * 100
    before = regard.attend(x, x.roll(-1, 1), scale=1.0)
    assert regard.heads(regard.Recording({"layer": before}))["kind"] == ("previous token",)
    noise = seen[0].source.key
    layers = {"mixed": seen[0], "before": before, "other": regard.attend(noise, noise * 0.1)}
    told = layers_in(tmp_path, regard.Recording(layers), limit=1_500_000, opened=(2, 0))
    assert [layer["kind"] for layer in told] == ["pyramid", "query-key", "query-key"]
    told = layers_in(tmp_path, regard.Recording(layers), limit=850_000, opened=(0, 0))
    assert told[0]["kind"] == "query-key"


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        pytest.param({}, [32, 32, 32], id="all fit"),
        pytest.param(
            {"limit": 4_000_000, "opened": (1, 0)}, [32, 32, 16], id="some in their order"
        ),
        pytest.param(
            {"limit": 3_100_000, "opened": (1, 0)}, [16, 32, 16], id="the opened one first"
        ),
        pytest.param({"limit": 2_200_000}, [16, 16, 16], id="none"),
    ],
)
def test_exact_layers_have_32_bits_where_the_limit_leaves_room(
    options: dict[str, Any], bits: list[int], tmp_path: Path
) -> None:
    layers = layers_in(tmp_path, recording(), **options)
    assert {layer["kind"] for layer in layers} == {"query-key"}
    assert [layer["dtype"] for layer in layers] == [f"float{count}" for count in bits]
    for layer in layers:
        assert (layer["deviation"] > 0) is (layer["dtype"] == "float16")


def test_the_limit_alone_decides_how_many_bits_are_stored(tmp_path: Path) -> None:
    """16 MiB once took half of the bits, though a file may have 64 MiB."""
    x = torch.randn(1, 1500, 1024)
    (layer,) = layers_in(tmp_path, regard.Recording({"layer": regard.attend(x, x.flip(1))}))
    assert (layer["dtype"], layer["deviation"]) == ("float32", 0)


def test_more_bits_take_the_room_of_no_value(tmp_path: Path) -> None:
    """Query and key take 1.5 MB in 32 bits and 0.7 MB in 16; the value half of that."""
    seen = recording(layers=1)
    value = InMemory(torch.randn(1, 150, 1024))
    seen.put(replace(seen.layers[0], value=value))
    for limit, bits in ((1_800_000, 16), (2_400_000, 32)):
        (layer,) = layers_in(tmp_path, seen, limit=limit)
        assert (layer["dtype"], layer["value_dim"]) == (f"float{bits}", 1024)


def test_the_deviation_is_the_largest_of_all_rows(tmp_path: Path) -> None:
    """One row of 200 is rounded the most, and no sample of rows would hit it."""
    torch.manual_seed(3)
    query, key = torch.randn(1, 200, 64) * 0.01, torch.randn(1, 200, 64)
    query[0, 101] *= 3000
    matrix = regard.attend(query, key)
    stored = CompleteLayer(PageLayer("layer", *matrix.shape), matrix, "float16", ())
    stored.finished([stored.shown.reduce(*stored.questions)], 10**9)
    worst = (matrix.to_dense() - stored.shown.to_dense()).abs().max()
    assert stored.layer.deviation == pytest.approx(float(worst), rel=1e-3)


def test_a_deviation_of_some_rows_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "MOST_COMPARED", 50 * 50 // 2)
    matrix = regard.attend(torch.randn(1, 50, 16), torch.randn(1, 50, 16))
    stored = CompleteLayer(PageLayer("layer", *matrix.shape), matrix, "float16", ())
    stored.finished([stored.shown.reduce(*stored.questions)], 10**9)
    assert stored.layer.spacing == 2


def test_numbers_that_16_bits_hold_exactly_deviate_by_nothing(tmp_path: Path) -> None:
    x = torch.randn(1, 50, 16).bfloat16()
    matrix = regard.attend(x, x)
    stored = CompleteLayer(PageLayer("layer", *matrix.shape), matrix, "float16", ())
    stored.finished([stored.shown.reduce(*stored.questions)], 10**9)
    assert stored.layer.deviation < 1e-6


def test_layers_that_never_fit_in_full_take_no_precision_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "MOST_WEIGHTS", 100)
    capped = matrix_of(softcap=2.0)
    seen = regard.Recording({"plain": matrix_of(), "capped": capped})
    plain, other = layers_in(tmp_path, seen)
    assert (plain["kind"], plain["dtype"], other["kind"]) == ("query-key", "float32", "pyramid")


def test_a_file_is_about_as_large_as_its_limit_at_most(tmp_path: Path) -> None:
    seen = recording(layers=1)
    bare = write_page(seen, tmp_path / "bare.html", limit=1).stat().st_size
    for limit in (40_000, 100_000, 800_000):
        size = write_page(seen, tmp_path / "page.html", limit=limit).stat().st_size
        assert size - bare <= limit + 200


def test_the_means_of_a_long_text_are_left_out_where_there_is_no_room(tmp_path: Path) -> None:
    matrix = regard.attend(torch.randn(1, 3, 2), torch.randn(1, 8300, 2))
    recording = regard.Recording({"layer": matrix})
    blocks = blocks_of(recording, tmp_path)
    block = numbers_of(blocks)
    assert ("means" in block, layers_of(blocks)[0]["block"]) == (True, 64)
    least = CompleteLayer(PageLayer("layer", *matrix.shape), matrix, "float16", ())
    blocks = blocks_of(recording, tmp_path, limit=least.size)
    assert layers_of(blocks)[0]["kind"] == "query-key"
    assert layers_of(blocks)[0]["block"] == 1
    assert "means" not in numbers_of(blocks)
