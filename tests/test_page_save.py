"""What the page shows can be taken along: a picture as PNG and SVG, its numbers as CSV."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from playwright.sync_api import Page

from pages import Open, ready, recorded
from regard.see.file import write_page

pytestmark = pytest.mark.browser

SVG = "{http://www.w3.org/2000/svg}"


def saved(page: Page, kind: str, folder: Path) -> Path:
    page.click("#save summary")
    with page.expect_download() as download:
        page.click(f"[data-save={kind}]")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_the_map_is_saved_as_a_png_twice_as_sharp(show: Open, tmp_path: Path) -> None:
    page = show(recorded())
    ready(page)
    path = saved(page, "png", tmp_path)
    header = path.read_bytes()[:24]
    box = page.locator("#view-map").bounding_box()
    assert box is not None
    assert header[1:4] == b"PNG"
    assert int.from_bytes(header[16:20], "big") == pytest.approx(2 * box["width"], abs=2)


def test_the_map_is_saved_as_an_svg(show: Open, tmp_path: Path) -> None:
    page = show(recorded())
    ready(page)
    root = ET.parse(saved(page, "svg", tmp_path)).getroot()
    assert root.tag == f"{SVG}svg"
    assert root.find(f".//{SVG}image") is not None


def test_the_name_of_the_file_says_what_it_shows_and_is_harmless(
    show: Open, tmp_path: Path
) -> None:
    path = tmp_path / "x.html"
    write_page(recorded(), path, title="../ a <b>title</b>\u202e: “é”")
    page = show(path, "#layer=1&head=1")
    ready(page)
    assert saved(page, "svg", tmp_path).name == "a-b-title-b-e-map-layer-1-head-1.svg"
