"""Pictures in a page: their grids, their clean bytes, and nothing where there are none."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, PngImagePlugin

import pages
import pictured
import regard
from regard.view.export.page_file import write_page
from regard.view.tiles.manifest import live_layers, manifest, sink_keys, title_of
from regard.view.tiles.page_opening import blind_opening


def told(seen: regard.Recording) -> dict[str, Any]:
    return manifest(seen, live_layers(seen), title="a title", opened=blind_opening(seen))


def test_a_recording_without_pictures_says_nothing_of_them() -> None:
    first = told(pages.recorded())
    assert {"pictures", "grids"} & set(first) == set()


def test_a_grid_is_told_as_runs_of_tokens_in_the_box_of_its_picture() -> None:
    first = told(pictured.several())
    assert [grid["tokens"] for grid in first["grids"]] == [
        [[0, 6]],
        [[6, 12]],
        [[12, 18]],
        [[18, 22]],
    ]
    assert [tuple(grid["box"]) for grid in first["grids"]] == [
        (0, 0, 96, 64),
        (0, 0, 48, 64),
        (48, 0, 96, 64),
        (0, -12, 64, 52),
    ]
    sizes = [(picture["width"], picture["height"]) for picture in first["pictures"]]
    assert sizes == [(96, 64), (64, 40)]


def test_tokens_between_the_rows_part_the_runs() -> None:
    seen = regard.Recording(pictured.matrices(9))
    grid = regard.grid(tokens=[0, 1, 2, 4, 5, 6], rows=2, columns=3)
    (told_grid,) = told(seen.with_pictures([pictured.photo()], grid))["grids"]
    assert told_grid["tokens"] == [[0, 3], [4, 7]]


def test_layers_with_other_tokens_have_their_own_grids() -> None:
    layers = {"vision": pictured.matrices(7)["layer.0"], "text": pictured.matrices(9)["layer.0"]}
    seen = regard.Recording(layers)
    first, second = (regard.grid(tokens=range(at, at + 6), rows=2, columns=3) for at in (1, 3))
    seen = seen.with_pictures([pictured.photo()], {"vision": [first], "text": [second]})
    grids = told(seen)["grids"]
    assert [(grid["layers"], grid["tokens"]) for grid in grids] == [
        ([0], [[1, 7]]),
        ([1], [[3, 9]]),
    ]


def test_only_the_first_entry_of_a_batch_and_its_picture_are_told() -> None:
    x = torch.randn(2, 1, 7, 4)
    grids = [
        regard.grid(tokens=range(1, 7), rows=2, columns=3, picture=1 - entry, entry=entry)
        for entry in range(2)
    ]
    seen = regard.Recording({"a": regard.attend(x, x)})
    first = told(seen.with_pictures([pictured.photo(8, 8), pictured.photo()], grids))
    assert [(picture["width"], picture["height"]) for picture in first["pictures"]] == [(96, 64)]
    assert [grid["picture"] for grid in first["grids"]] == [0]


def test_pictures_are_encoded_anew_without_metadata() -> None:
    file = io.BytesIO()
    secret = PngImagePlugin.PngInfo()
    secret.add_text("place", "at home")
    pictured.photo(32, 32).save(file, "PNG", pnginfo=secret)
    picture = regard.images.Picture(32, 32, file.getvalue(), "home.png")
    grid = regard.grid(tokens=range(1, 7), rows=2, columns=3)
    seen = regard.Recording(pictured.matrices(7)).with_pictures([picture], grid)
    (found,) = told(seen)["pictures"]
    data = base64.b64decode(found["data"])
    assert b"at home" in file.getvalue()
    assert b"at home" not in data
    assert found["type"] == "image/png"
    assert Image.open(io.BytesIO(data)).tobytes() == pictured.photo(32, 32).tobytes()


def test_windows_of_a_picture_are_layers_of_their_own(tmp_path: Path) -> None:
    seen = pictured.windows()
    page = write_page(seen, tmp_path / "page.html", opened=(1, 1), layers=["stage.1"])
    first = json.loads(pages.Blocks(page.read_text()).scripts["recording"])
    layers = [(layer["place"], layer["part"], layer["kind"]) for layer in first["layers"]]
    kinds = {0: "pyramid", 1: "query-key"}
    places = [(0, 0), (1, 0), *((place, part) for place in (0, 1) for part in (1, 2, 3))]
    assert layers == [(place, part, kinds[place]) for place, part in places]
    assert [len(grid["layers"]) for grid in first["grids"]] == [2] * 4
    assert (first["opened"]["layer"], first["opened"]["head"], first["batch"]) == (1, 1, 1)
    apart = seen.apart()
    for place, part in ((0, 2), (1, 3)):
        whole = seen.entry(part)[place].to_dense()
        assert torch.equal(apart[f"stage.{place} part {part}"].to_dense(), whole)


def test_without_windows_a_recording_is_not_taken_apart() -> None:
    for seen in (pages.recorded(), pictured.several(), pictured.crossing()):
        assert list(seen.apart()) == list(seen)
        assert seen.apart().grids == seen.grids


def test_a_picture_that_was_left_out_leaves_its_size() -> None:
    picture = regard.images.keep(pictured.photo(), "photo.jpg", data=False)
    grid = regard.grid(tokens=range(1, 7), rows=2, columns=3)
    seen = regard.Recording(pictured.matrices(7)).with_pictures([picture], grid)
    (found,) = told(seen)["pictures"]
    assert found == {"name": "photo.jpg", "width": 96, "height": 64, "type": None, "data": None}


def test_patches_are_no_sinks_and_no_title() -> None:
    seen = pictured.language()
    assert sink_keys(seen, 0) == (0,)
    assert title_of(seen) == "What is the dog doing?"
    opened = blind_opening(seen)
    untitled = manifest(seen, live_layers(seen), opened=opened)
    assert untitled["title"] == "What is the dog doing?"
    assert told(seen)["title"] == "a title"
    nameless = regard.Recording({"a": seen[0]}, model="a model")
    assert title_of(nameless) == "Attention"  # the name of the model stands beside it
    plain = regard.Recording({"a": seen[0]}, query_tokens=seen.query_tokens)
    assert sink_keys(plain, 0) == tuple(range(1 + pictured.PATCHES))


def test_a_picture_that_two_recordings_share_is_in_the_page_once(tmp_path: Path) -> None:
    one, other = pictured.language(), pictured.language()
    page = write_page(one, tmp_path / "both.html", other=other)
    text = page.read_text()
    first = json.loads(pages.Blocks(text).scripts["recording"])
    (picture,) = first["pictures"]
    assert text.count(picture["data"]) == 1
    assert [grid["picture"] for grid in first["other"]["grids"]] == [0]
    without = regard.Recording({name: one[name] for name in one}, query_tokens=one.query_tokens)
    page = write_page(without, tmp_path / "second.html", other=other)
    first = json.loads(pages.Blocks(page.read_text()).scripts["recording"])
    assert (len(first["pictures"]), first["grids"], len(first["other"]["grids"])) == (1, [], 1)


def test_pictures_take_their_share_of_the_limit(tmp_path: Path) -> None:
    noise = Image.effect_noise((512, 512), 90)
    grid = regard.grid(tokens=range(1, 7), rows=2, columns=3)
    plain = regard.Recording(pictured.matrices(7))
    seen = plain.with_pictures([noise], grid)
    size = len(seen.pictures[0].data or b"")
    kinds = [
        {layer["kind"] for layer in json.loads(blocks.scripts["recording"])["layers"]}
        for blocks in (pages.blocks_of(each, tmp_path, limit=size) for each in (plain, seen))
    ]
    assert kinds == [{"query-key"}, {"pyramid"}]
