"""The first ten seconds with the page, what users stumbled over, and fingers instead of a mouse."""

import pytest
import torch
from playwright.sync_api import Page, expect

import regard
from pages import Open, Serve, address, ready, recorded, step, visit

pytestmark = pytest.mark.browser

TEXT = ["[CLS]", "The", " baker", " sold", " bread", " to", " the", " sailor", ".", "[SEP]"]
LINES = """item => {
    const range = document.createRange();
    range.selectNodeContents(item.firstChild.lastChild);
    const [first, second] = [...range.getClientRects()].filter(({ width }) => width > 5);
    return Math.abs(first.left - second.left);
}"""
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def tokens(words: list[str]) -> list[regard.Token]:
    return [regard.Token(word, special=word.startswith("[")) for word in words]


def story() -> regard.Recording:
    """A head without a kind, and one that attends to the token before."""
    count = len(TEXT)
    mixed = torch.full((count, count), 0.0689)  # too even to say something about words
    mixed[torch.arange(count), (3 * torch.arange(count) + 2) % count] = 0.3799
    previous = 0.9 * torch.eye(count).roll(-1, 1) + 0.01
    previous[0] = 1 / count
    weights = torch.stack((mixed, previous / previous.sum(-1, keepdim=True)))
    return regard.Recording(
        {"layer": regard.AttentionMatrix.from_weights(weights)}, query_tokens=tokens(TEXT)
    )


INTRODUCTION = "Layer 0, head 1 is a previous-token head"


def then_served_and_longer_texts(serve: Serve, show: Open) -> None:
    with step("a short recording that is served opens there too"):
        page, _ = serve(story())
        assert page.inner_text("#introduction").startswith(INTRODUCTION)
    with step("a longer text opens at its clearest word, once its weights are known"):
        count = 60
        previous = torch.full((count, count), 0.3 / count)
        previous[torch.arange(1, count), torch.arange(count - 1)] += 0.6
        previous[0], previous[40] = 1 / count, torch.eye(count)[39]
        heads = torch.stack([previous, torch.ones(count, count)])
        recording = regard.Recording(
            {"a": regard.AttentionMatrix.from_weights(heads / heads.sum(-1, keepdim=True))},
            query_tokens=[regard.Token(f" word{at:c}") for at in range(97, 97 + count)],
        )
        page = show(recording, "#")
        page.wait_for_selector('body[data-read^="0,0,40,39,"]')
        page = show(recording, "#query=9&key=8")
        page.wait_for_selector('body[data-read^="0,0,9,8,"]')
        page.click("#notable button[data-head='0.0']")
        page.wait_for_selector('body[data-read^="0,0,40,39,"]')
    with step("what a head does in a trial only is not said of this text"):
        recording = story()
        recording.trials = [{"layer": {"induction": [0.9, 0.1]}}]
        listed = show(recording, "#", viewport={"width": 850, "height": 800}).locator("#notable li")
        assert listed.first.inner_text().replace("\u202f", " ") == "L0H0 induction 90 % in a trial"
        assert not listed.nth(1).inner_text().endswith("in a trial")
        assert listed.first.evaluate(LINES) < 5  # the second line stands under the kind
    with step("the scale fits the weights and says its darkest value"):
        count = 40
        faint = torch.full((count, count), 0.5 / count)
        faint[:, 0] += 0.45  # the sink, which does not count
        faint[torch.arange(count), (7 * torch.arange(count) + 3) % count] += 0.05
        recording = regard.Recording({"a": regard.AttentionMatrix.from_weights(faint)})
        page = show(recording, "#scale=fit")
        ready(page)
        assert "darkest = 8\u202f% or more" in page.inner_text("#legend .unit")
        darkest = page.evaluate(
            """() => {
              const canvas = document.querySelector(".map canvas");
              const { width, height } = canvas;
              const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
              let least = 765;
              for (let i = 0; i < data.length; i += 4)
                if (data[i + 3]) least = Math.min(least, data[i] + data[i + 1] + data[i + 2]);
              return least;
            }"""
        )
        assert darkest < 250  # on the scale from 0 to 100 % the sink alone is so dark
        page.click("[data-set='scale=linear']")
        expect(page.locator("#legend .unit")).to_contain_text("linear")


@pytest.mark.full
def test_a_fresh_page_opens_on_the_head_that_stands_out_and_says_what_it_is(
    show: Open, serve: Serve
) -> None:
    page = show(story(), "#")
    with step("it opens at a content word, with one sentence"):
        at = address(page, lambda said: "query" in said)
        assert (at["layer"], at["head"]) == ("0", "1")
        query, key = int(at["query"]), int(at["key"])
        assert key == query - 1
        assert len(TEXT[query].strip()) >= 4
        assert len(TEXT[key].strip()) >= 4
        assert page.inner_text("#introduction").replace("\u202f", " ") == (
            f"{INTRODUCTION}: each token attends to the one before it "
            f"({100 * regard.heads(story())['score'][1]:.0f} % of its attention on average)."
        )
    with step("special tokens have one spelling"):
        assert page.inner_text("#sinks") == "Hide [CLS], [SEP]"
        assert page.locator("#prose .special").all_inner_texts() == ["[CLS]", "[SEP]"]
    with step("heads that stand out are listed and open"):
        visit(page, "#layer=0&head=0&query=2")
        page.wait_for_selector('body[data-read^="0,0,2,"]')
        button = page.locator("#notable button")
        assert button.all_inner_texts()[0].startswith("L0H1 previous token ")
        button.first.click()
        at = address(page, lambda said: said["head"] == "1")
        assert int(at["key"]) == int(at["query"]) - 1
        assert button.first.get_attribute("aria-pressed") == "true"
    with step("the overview names heads and gives mixed ones no number"):
        visit(page, "#view=overview")
        page.wait_for_selector("#view-overview .kind:not(:empty)")
        tile = page.locator("#view-overview button")
        assert tile.locator(".name").all_inner_texts() == ["H0", "H1"]
        assert tile.locator(".score").all_inner_texts()[0] == ""
        tile.nth(1).hover()
        details = page.inner_text("#view-overview .details")
        assert details.startswith("layer 0 head 1, previous token")
    with step("the line that explains rows and columns goes when it is understood"):
        visit(page, "#view=map")
        assert page.inner_text("#hint span") == (
            "Rows look, columns are looked at. Point at a cell; click to keep it."
        )
        page.click("#understood")
        assert page.is_hidden("#hint")
        page.reload()
        page.wait_for_selector("body.ready")
        assert page.is_hidden("#hint")
    then_served_and_longer_texts(serve, show)


def then_a_phone_on_its_side(page: Page, show: Open) -> None:
    with step("on its side, no cell is hidden by the line under the map"):
        page.set_viewport_size({"width": 844, "height": 390})
        visit(page, "#query=3&key=2")
        page.locator(".map").first.scroll_into_view_if_needed()
        page.locator("footer").scroll_into_view_if_needed()
        box = page.locator("footer").bounding_box()
        assert box is not None
        assert box["y"] >= page.locator("#stage").evaluate(
            "(one) => one.getBoundingClientRect().bottom"
        )
    with step("numbers above words are not cut"):
        page = show(recorded(), "#view=text&query=5", viewport=PHONE["viewport"])
        page.wait_for_selector("#view-text [data-share]")
        ends = page.eval_on_selector_all(
            "#view-text [data-share]",
            """all => all.map((one) => {
              const scroller = one.closest(".reading").getBoundingClientRect();
              const box = one.getBoundingClientRect();
              const width = parseFloat(getComputedStyle(one, "::before").width);
              const left = one.classList.contains("at-end") ? box.right - width : box.left;
              return [left - scroller.left, scroller.right - left - width];
            })""",
        )
        assert all(before >= -1 and after >= -1 for before, after in ends)


@pytest.mark.full
def test_on_a_phone_the_map_is_first_fingers_zoom_and_thumbs_have_room(show: Open) -> None:
    page = show(recorded(tokens=128), **PHONE)
    ready(page)
    with step("the map is on the first screen"):
        box = page.locator(".map").first.bounding_box()
        assert box is not None
        assert box["y"] + 250 < 844
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    with step("two fingers zoom"):
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        touch = page.context.new_cdp_session(page)

        def fingers(kind: str, apart: float) -> None:
            both = [{"x": x - apart, "y": y}, {"x": x + apart, "y": y}]
            points = [] if kind == "touchEnd" else both
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        fingers("touchStart", 30)
        for apart in (40, 60, 90):
            fingers("touchMove", apart)
        fingers("touchEnd", 0)
        zoom = float(address(page, lambda said: "zoom" in said)["zoom"])
        assert zoom == pytest.approx(3, rel=0.1)
    with step("no empty band stands between the map and its legend"):
        visit(page, "#query=3&key=2")
        ready(page)
        frame = (page.get_attribute(".map", "data-frame") or "").split(",")
        top, height = float(frame[1]), float(frame[3])
        end = page.locator(".map").first.bounding_box()
        legend = page.locator("#legend").bounding_box()
        assert end
        assert legend
        assert legend["y"] - (end["y"] + top + 128 * height) < 24
    for view in ("overview", "map", "text", "steps", "segments"):
        with step(f"what a thumb presses in {view} has 44 pixels and nothing sticks out"):
            visit(page, f"#view={view}&query=3&key=2")
            page.wait_for_selector(f'body[data-view="{view}"][data-read]')
            small = page.eval_on_selector_all(
                "#tabs button, .choices button, .tools button, .filters select, #understood, "
                "#theme, #find, .open select, .explained summary",
                """all => all.filter((one) => one.offsetParent).filter((one) => {
                  const { width, height } = one.getBoundingClientRect();
                  return width < 44 || height < 44;
                }).map((one) => one.outerHTML)""",
            )
            assert small == []
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            if view == "steps":
                expect(page.locator("#view-steps .overflow")).to_be_visible()
    then_a_phone_on_its_side(page, show)
