"""The picture in the page: what a patch or a word looks at, and who looks at it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from playwright.sync_api import Page, expect

import pages
import pictured
import regard
from pages import Open, Serve, address, sentence, step, table, three_digits, visit
from regard.view.export.page_file import write_page
from regard.view.notebook.page_frame import framed

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
FIRST = 1  # token of the first patch

# The mean colour inside a patch of a picture on the stage, away from the lines between patches.
COLOUR = """([side, frame, left, top, width, height]) => {
  const canvas = document.querySelectorAll(".sides .side")[side].querySelectorAll("canvas")[frame];
  const at = (part, whole) => Math.round(part * whole);
  const box = [at(left, canvas.width) + 3, at(top, canvas.height) + 3];
  const size = [at(width, canvas.width) - 6, at(height, canvas.height) - 6];
  const { data } = canvas.getContext("2d").getImageData(...box, ...size);
  const sum = [0, 0, 0];
  data.forEach((value, i) => { if (i % 4 < 3) sum[i % 4] += value; });
  return sum.map((each) => (4 * each) / data.length);
}"""
EDGE = """() => {
  const canvas = document.querySelector(".sides canvas");
  const { data } = canvas.getContext("2d").getImageData(0, canvas.height >> 3, canvas.width, 1);
  const row = Array.from({ length: canvas.width }, (_, x) => data.slice(4 * x, 4 * x + 3).join());
  return new Set(row).size;
}"""


def ready(page: Page, layer: int, head: int, query: int, key: int) -> None:
    page.wait_for_selector(f'#view-image[data-ready="{layer},{head},{query},{key}"]')


def words(page: Page, side: int) -> str:
    return page.locator(".sides .words").nth(side).inner_text().replace("\u202f", " ")


def over(page: Page, side: int, row: int, column: int, frame: int = 0) -> dict[str, float]:
    """The middle of a patch of the usual grid on the screen."""
    stage = page.locator(".sides .side").nth(side)
    box = stage.locator("figure canvas").nth(frame).bounding_box()
    assert box
    across, down = (column + 0.5) / pictured.COLUMNS, (row + 0.5) / pictured.ROWS
    return {"x": box["x"] + across * box["width"], "y": box["y"] + down * box["height"]}


def colours(page: Page, side: int) -> torch.Tensor:
    """The mean colour of each patch of the usual grid, (rows, columns, 3)."""
    rows, columns = pictured.ROWS, pictured.COLUMNS
    return torch.tensor(
        [
            [
                page.evaluate(COLOUR, [side, 0, x / columns, y / rows, 1 / columns, 1 / rows])
                for x in range(columns)
            ]
            for y in range(rows)
        ]
    )


def quarters_of(image: torch.Tensor) -> dict[str, float]:
    """The share of each quarter of a picture, by its name."""
    return {
        f"the {up} {left} quarter": float(part.sum())
        for up, half in zip(("upper", "lower"), image.split(2), strict=True)
        for left, part in zip(("left", "right"), half.split(3, dim=1), strict=True)
    }


def largest(difference: torch.Tensor) -> str:
    """The largest difference in points, as the page writes it."""
    value = float(difference.flatten()[difference.abs().argmax()])
    size = three_digits(abs(value)).removesuffix(" %")
    return f"{'−' if value < 0 else '+'}{size}"


def test_a_patch_shows_what_it_looks_at_and_who_looks_at_it(show: Open, tmp_path: Path) -> None:
    seen = pictured.vision()
    weights = seen[1][0, 2].to_dense()
    page = show(seen, "#layer=1&head=2&query=0")
    with step("a page of a picture opens there, at the class token"):
        page.wait_for_selector('body[data-view="image"]')
        ready(page, 1, 2, 0, 0)
        headings = page.locator(".sides h2")
        assert headings.all_inner_texts() == ["Where “token 0” looks", "Who looks at “token 0”"]
        assert "This page holds 1 picture that the model saw." in page.inner_text("#notes")
    with step("the words say the share of the picture, of a quarter and of a patch"):
        image = seen.image(1, 2, query=0)
        quarters = quarters_of(image)
        quarter = max(quarters, key=lambda name: quarters[name])
        row, column = divmod(int(image.argmax()), pictured.COLUMNS)
        assert words(page, 0) == (
            f"“token 0” gives {three_digits(float(image.sum()))} of its attention to the picture: "
            f"{three_digits(quarters[quarter])} to {quarter}, "
            f"{three_digits(float(image.max()))} to patch {row},{column}."
        )
        label = page.locator(".sides .frames").first.get_attribute("aria-label") or ""
        assert label.replace("\u202f", " ") == (
            f"Where “token 0” looks. {words(page, 0)} Arrow keys move."
        )
    with step("pointing at a patch reads it and leaves the chosen token"):
        page.mouse.move(**over(page, 0, 2, 3))
        token = FIRST + 2 * pictured.COLUMNS + 3
        ready(page, 1, 2, token, token)
        assert page.locator(".sides h2").first.inner_text() == "Where “patch 2,3” looks"
        to = int(weights[token].argmax())
        share = three_digits(float(weights[token].max()))
        name = "token 0" if to == 0 else "patch " + ",".join(map(str, divmod(to - 1, 6)))
        assert sentence(page).startswith(f"“patch 2,3” looks most at “{name}”: {share}; ")
        page.mouse.move(2, 2)
        ready(page, 1, 2, 0, 0)
    with step("a click on the right keeps it, and the text goes on with who looks at it"):
        page.mouse.click(**over(page, 1, 3, 5))
        page.mouse.move(2, 2)
        ready(page, 1, 2, pictured.PATCHES, pictured.PATCHES)
        said = address(page, lambda said: said.get("side") == "looked")
        assert said["query"] == str(pictured.PATCHES)
    with step("the numbers can be saved, patch by patch"):
        first, *rows = table(page, tmp_path)
        assert first[:5] == ["token", "picture", "grid", "row", "column"]
        assert rows[7][:9] == ["8", "0", "0", "1", "1", "16", "16", "32", "32"]
        saved = torch.tensor([[float(cell) for cell in row[9:]] for row in rows])
        torch.testing.assert_close(saved[:, 0], weights[24, FIRST:], rtol=0, atol=1e-6)
        torch.testing.assert_close(saved[:, 1], weights[FIRST:, 24], rtol=0, atol=1e-6)


@pytest.mark.full
def test_the_tint_of_a_patch_is_its_weight(show: Open) -> None:
    blue = Image.new("RGB", (96, 64), (90, 140, 200))
    seen = pictured.vision()
    weights = seen[1][0, 2].to_dense()
    address = "#layer=1&head=2&query=0&scale=fit"
    page = show(seen.with_pictures([blue], seen.grids), address)
    ready(page, 1, 2, 0, 0)
    with step("the darker a patch, the larger its weight, on both sides"):
        for side, numbers in enumerate((weights[0, FIRST:], weights[FIRST:, 0])):
            shade = colours(page, side).sum(-1).flatten()
            order = numbers.argsort()
            assert (shade[order].diff() < 2).all()
            assert shade[order[-1]] + 100 < shade[order[0]]
    with step("the picture can be seen without its tint"):
        alone = page.locator(".small-pictures button").first
        for pressed in ("true", "false"):
            alone.click()
            expect(page.locator(".small-pictures button").first).to_have_attribute(
                "aria-pressed", pressed
            )
            difference = colours(page, 0) - torch.tensor([90.0, 140.0, 200.0])
            assert (difference.abs().max() < 8) == (pressed == "true")


@pytest.mark.full
def test_arrows_go_over_the_patches_and_the_words_around_them(show: Open) -> None:
    page = show(pictured.language(), "#layer=0&head=1&query=28")
    columns, patches = pictured.COLUMNS, pictured.PATCHES
    at = 28
    for key, by in [
        *[("ArrowLeft", -1)] * 5,  # from "dog" into the last row of patches
        ("ArrowUp", -columns),
        ("ArrowRight", 1),
        ("ArrowDown", columns),
        ("ArrowDown", 0),
        ("ArrowRight", 1),
    ]:
        with step(f"{key} at {at}"):
            page.keyboard.press(key)
            at += by
            ready(page, 0, 1, at, at)
    assert at == patches + 1 - 1 + 1
    with step("the other keys go on working"):
        page.keyboard.press("]")
        ready(page, 0, 2, at, at)
        page.keyboard.press("m")
        page.wait_for_selector("button[data-set='heads=mean'][aria-pressed=true]")
        page.keyboard.press("2")
        page.wait_for_selector('body[data-view="map"]')
        page.keyboard.press("6")
        page.wait_for_selector('body[data-view="image"]')


@pytest.mark.full
def test_words_light_up_the_picture_and_the_picture_lights_up_words(show: Open) -> None:
    seen = pictured.language()
    page = show(seen, "#layer=0&head=1&query=28&view=image")
    ready(page, 0, 1, 28, 28)
    dog = seen.image(0, 1, query=28)
    assert words(page, 0).startswith(
        f"“dog” gives {three_digits(float(dog.sum()))} of its attention to the picture: "
    )
    assert words(page, 1) == "No patch of the picture looks at “dog”."
    with step("pointing at a word of the text"):
        page.hover('#prose [data-at="29"]')
        ready(page, 0, 1, 29, 29)
        assert page.locator(".sides h2").first.inner_text() == "Where “doing” looks"
    with step("pointing at a patch tints the words that look at it"):
        page.evaluate("location.hash = 'layer=0&head=1&query=28&side=looked'")
        page.mouse.move(**over(page, 0, 1, 1))
        token = FIRST + pictured.COLUMNS + 1
        ready(page, 0, 1, token, token)
        column = seen[0][0, 1][:, token]
        full = three_digits(float(column.max()))
        expect(page.locator("#tint")).to_have_text(
            f"Full tint: {full}, the strongest".replace(" %", "\u202f%")
        )
        tinted = page.locator("#prose span[data-at='28'][style*='background']")
        expect(tinted).to_have_count(int(column[28] > 0))
    with step("patches stand in the text as squares without words"):
        squares = page.locator("#prose span.cell")
        assert squares.count() == pictured.PATCHES
        assert set(squares.all_inner_texts()) == {""}
    with step("sinks set aside leave the patches there"):
        page.mouse.move(2, 2)
        visit(page, "#layer=0&head=1&query=28&hidden=1")
        rest = seen[0][0, 1, 28].clone()
        rest[0] = 0
        rest /= rest.sum()
        share = three_digits(float(rest[FIRST : FIRST + pictured.PATCHES].sum()))
        expect(page.locator(".sides .words").first).to_contain_text(
            f"“dog” gives {share} of its attention".replace(" %", "\u202f%")
        )


@pytest.mark.full
def test_heads_of_the_layer_are_small_pictures_to_open(show: Open) -> None:
    seen = pictured.vision()
    page = show(seen, "#layer=0&head=0&query=0&scale=fit")
    ready(page, 0, 0, 0, 0)
    small = page.locator(".small-pictures button")
    with step("one for each head, on one scale that is said"):
        expect(small).to_have_count(4)
        assert [text.strip() for text in small.all_inner_texts()] == ["Picture", "H0", "H1", "H2"]
        caption = page.inner_text("#view-image > .caption")
        assert caption.startswith("Heads of layer 0: where “token 0” looks; darkest = ")
    with step("a press opens one"):
        small.nth(3).click()
        ready(page, 0, 2, 0, 0)
    with step("the mean of the layer"):
        visit(page, "#layer=0&head=0&query=0&heads=mean")
        mean = seen.image(0, query=0)
        expect(page.locator(".sides .words").first).to_contain_text(
            three_digits(float(mean.max())).replace(" %", "\u202f%")
        )


@pytest.mark.full
def test_two_heads_stand_side_by_side_and_their_difference_is_drawn(show: Open) -> None:
    seen = pictured.vision()
    page = show(seen, "#layer=0&head=0&query=0&compare=beside&with=1.2")
    ready(page, 0, 0, 0, 0)
    with step("side by side, on one scale"):
        expect(page.locator(".sides h2").nth(1)).to_have_text(
            "Where “token 0” looks: layer 1 head 2"
        )
        for side, image in enumerate((seen.image(0, 0, query=0), seen.image(1, 2, query=0))):
            assert three_digits(float(image.max())) in words(page, side)
        scales = page.locator(".sides .unit").all_inner_texts()
        assert scales[0] == scales[1]
    with step("the other way"):
        page.click("#view-image button[data-set='side=looked']")
        expect(page.locator(".sides h2").nth(1)).to_have_text(
            "Who looks at “token 0”: layer 1 head 2"
        )
    with step("their difference"):
        visit(page, "#layer=0&head=0&query=0&compare=difference&with=1.2")
        less = seen.image(0, 0, query=0) - seen.image(1, 2, query=0)
        expect(page.locator(".sides .words").first).to_contain_text(f", {largest(less)} to patch ")
        expect(page.locator("#sentence")).to_have_text(words(page, 0))
        assert "points per patch" in page.locator(".sides .unit").first.inner_text()


@pytest.mark.full
def test_two_recordings_of_a_picture_are_compared(show: Open, tmp_path: Path) -> None:
    one, other = pictured.vision(), pictured.vision()
    x = torch.randn(1, 3, 1 + pictured.PATCHES, 8, generator=torch.Generator().manual_seed(9))
    other = regard.Recording({name: regard.attend(x, x) for name in one}).with_pictures(
        other.pictures, other.grids
    )
    path = write_page(one, tmp_path / "both.html", title="one", other=other, other_title="two")
    page = show(path, "#layer=1&head=1&query=5")
    ready(page, 1, 1, 5, 5)
    expect(page.locator(".sides h2").nth(1)).to_have_text(
        "Where “patch 0,4” looks: layer 1 head 1 (two)"
    )
    assert three_digits(float(other.image(1, 1, query=5).max())) in words(page, 1)
    visit(page, "#layer=1&head=1&query=5&compare=difference")
    less = one.image(1, 1, query=5) - other.image(1, 1, query=5)
    expect(page.locator(".sides .words").first).to_contain_text(f", {largest(less)} to patch ")


@pytest.mark.full
def test_tiles_a_thumbnail_and_several_pictures_have_frames_of_their_own(show: Open) -> None:
    seen = pictured.several()
    page = show(seen, "#layer=0&head=0&query=25")
    ready(page, 0, 0, 25, 25)
    side = page.locator(".sides .side").first
    assert side.locator("figcaption").all_inner_texts() == [
        "picture 0, 2 × 3 patches",
        "picture 0, 2 grids of 2 × 3 patches",
        "picture 1, 2 × 2 patches",
    ]
    with step("the second picture has padding, and is drawn with it"):
        boxes = [canvas.bounding_box() for canvas in side.locator("figure canvas").all()]
        aspects = [box["width"] / box["height"] for box in boxes if box]
        assert aspects == pytest.approx([1.5, 1.5, 1], abs=0.02)
    with step("a tile is pointed at in its own frame"):
        box = boxes[1]
        assert box
        page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.9 * box["height"])
        ready(page, 0, 0, 17, 17)
        assert page.locator(".sides h2").first.inner_text() == "Where “patch 1,2 of grid 2” looks"


@pytest.mark.full
def test_a_text_that_looks_at_a_picture_has_one_side(show: Open) -> None:
    seen = pictured.crossing()
    page = show(seen, "#layer=0&head=1&query=3")
    page.wait_for_selector("#view-image[data-ready^='0,1,3']")
    expect(page.locator(".sides h2")).to_have_text(["Where “dog” looks"])
    assert three_digits(float(seen[0][0, 1, 3].max())) in page.inner_text("#sentence").replace(
        "\u202f", " "
    )
    page.mouse.click(**over(page, 0, 2, 2))
    page.mouse.move(2, 2)
    token = FIRST + 2 * pictured.COLUMNS + 2
    by = int(seen[0][0, 1][:, token].argmax())
    ready(page, 0, 1, by, token)
    said = address(page, lambda said: said.get("key") == str(token))
    assert said["side"] == "looked"
    expect(page.locator("#looked-caption")).to_contain_text("patch 2,2")


@pytest.mark.full
def test_edges_of_patches_stay_sharp(show: Open) -> None:
    blank = regard.images.keep(pictured.photo(), data=False)
    seen = pictured.vision().with_pictures([blank], pictured.vision().grids)
    page = show(seen, "#layer=0&head=0&query=0")
    ready(page, 0, 0, 0, 0)
    # On an empty ground a row of pixels has one colour for each patch, and those of the lines.
    assert page.evaluate(EDGE) <= 2 * pictured.COLUMNS
    assert "without pixels" in page.inner_text("#notes")
    expect(page.locator(".small-pictures button")).to_have_count(3)


@pytest.mark.full
def test_a_damaged_picture_leaves_its_patches(show: Open, tmp_path: Path) -> None:
    path = write_page(pictured.vision(), tmp_path / "page.html")
    text = path.read_text()
    start = text.index('"data":"') + len('"data":"')
    path.write_text(text[: start + 40] + "A" * 40 + text[start + 80 :].replace('="', '="', 1))
    text = path.read_text()
    end = text.index('"', start)
    path.write_text(text[: start + 40] + text[end:])
    page = show(path, "#layer=0&head=0&query=0")
    ready(page, 0, 0, 0, 0)
    expect(page.locator("#view-image .line")).to_contain_text("A picture of this page is damaged")


@pytest.mark.full
def test_a_finger_chooses_a_patch_on_a_phone(show: Open) -> None:
    page = show(pictured.vision(), "#layer=0&head=0&query=0", **PHONE)
    ready(page, 0, 0, 0, 0)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    box = page.locator(".sides figure canvas").first.bounding_box()
    assert box
    assert box["width"] > 340
    page.touchscreen.tap(**over(page, 0, 1, 2))
    token = FIRST + pictured.COLUMNS + 2
    ready(page, 0, 0, token, token)
    address(page, lambda said: said.get("query") == str(token))


@pytest.mark.full
@pytest.mark.parametrize("width", [390, 700, 850, 1100, 1440, 2560])
@pytest.mark.parametrize("recording", [pictured.vision, pictured.several], ids=["one", "several"])
def test_the_pictures_fit_the_screen(width: int, recording: Any, show: Open) -> None:
    viewport = {"width": width, "height": 900}
    page = show(recording(), "#layer=0&head=0&query=0", viewport=viewport)
    ready(page, 0, 0, 0, 0)
    for compare in ("alone", "beside", "difference"):
        with step(compare):
            visit(page, f"#layer=0&head=0&query=0&compare={compare}&with=0.1")
            page.wait_for_selector(f"button[data-set='compare={compare}'][aria-pressed=true]")
            page.wait_for_timeout(300)  # a view is drawn in the frames that follow
            assert page.evaluate("document.documentElement.scrollWidth") == width
            units = page.locator(".sides .unit")
            heights = units.evaluate_all("all => all.map((one) => one.offsetHeight)")
            assert max(heights) < 25  # a legend is one line
            if width >= 1100:
                sides = page.locator(".sides")
                assert sides.evaluate("one => one.scrollHeight - one.clientHeight") <= 1
                assert sides.evaluate("one => one.scrollWidth - one.clientWidth") <= 1


@pytest.mark.full
def test_a_server_and_a_notebook_show_the_picture(
    serve: Serve, browser: Any, tmp_path: Path
) -> None:
    seen = pictured.vision()
    image = seen.image(1, 1, query=0)
    with step("a server"):
        page, _ = serve(seen, "#layer=1&head=1&query=0")
        ready(page, 1, 1, 0, 0)
        assert three_digits(float(image.max())) in words(page, 0)
        expect(page.locator(".small-pictures button")).to_have_count(4)
    with step("a cell of a notebook"):
        cell = tmp_path / "cell.html"
        text = write_page(seen, tmp_path / "page.html", opened=(1, 1)).read_text()
        cell.write_text(framed(text, "a title"))
        page = browser.new_page()
        page.goto(f"file://{cell}")
        inside = page.frame_locator("iframe")
        inside.locator("#view-image[data-ready]:not([data-ready=''])").wait_for()
        said = inside.locator(".sides .words").first.inner_text().replace("\u202f", " ")
        assert three_digits(float(image.max())) in said
        page.close()


@pytest.mark.full
def test_a_recording_without_pictures_has_no_such_view(show: Open) -> None:
    page = show(pages.recorded(), "#view=image")
    page.wait_for_selector('body[data-view="map"][data-read]')
    assert not page.is_visible("button[data-set='view=image']")
    assert "image" not in page.locator("#keys").inner_text()


@pytest.mark.full
def test_block_means_are_drawn_and_called_so(show: Open, tmp_path: Path) -> None:
    weights = pictured.matrices(577)["layer.0"].to_dense()
    seen = regard.Recording({"layer": regard.AttentionMatrix.from_weights(weights)})
    grid = regard.grid(tokens=range(1, 577), rows=24, columns=24)
    pictured_weights = seen.with_pictures([pictured.photo()], grid)
    few = write_page(pictured_weights, tmp_path / "page.html", limit=600_000)
    page = show(few, "#layer=0&head=1&query=300")
    page.wait_for_selector("#view-image[data-ready]:not([data-ready=''])")
    rows = weights[0, 1, 300:302].mean(0)
    means = rows[:576].unflatten(0, (288, 2)).mean(1)
    assert " These are means of blocks of 2 × 2 tokens." in words(page, 0)
    said = words(page, 0).split(" to patch ")[0].rsplit(" ", 2)[-2]
    assert float(said) == pytest.approx(100 * float(means.max()), rel=0.03)


@pytest.mark.full
def test_a_click_opens_the_window_that_lies_there(show: Open) -> None:
    page = show(pictured.windows(), "#view=image&layer=1&head=1&query=0")
    ready(page, 1, 1, 0, 0)
    with step("the open layer is the first window of the second layer"):
        assert page.locator("#layer option:checked").inner_text() == "1.0"
        assert "1.0 is one window or tile of the picture" in page.inner_text("#notes")
        assert "2 layers" in page.inner_text("#about")
    with step("the lower right of the picture lies in the last window"):
        canvas = page.locator(".frames canvas").first
        box = canvas.bounding_box()
        assert box is not None
        canvas.click(position={"x": 0.9 * box["width"], "y": 0.9 * box["height"]})
        page.wait_for_selector('body[data-read^="7,1,3,"]')
        assert page.locator("#layer option:checked").inner_text() == "1.3"
