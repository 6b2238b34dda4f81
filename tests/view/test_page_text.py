"""The page's text: where words look and who looks at them."""

import pytest
import torch
from playwright.sync_api import Page, expect

import pages
import regard
from pages import Open, address, recorded, sentence, step, three_digits, visit

pytestmark = pytest.mark.browser


def read(page: Page, which: str) -> None:
    """Waits until layer, head, query, key, hidden are read and drawn."""
    page.wait_for_selector(f'body[data-read="{which}"]')


def side(page: Page, place: int) -> str:
    return f"#view-text .side:nth-child({place + 1})"


def over(page: Page, place: int, at: int) -> None:
    """The mouse on a word itself, not on the number above it."""
    rectangle = "span => { const { x, y, width, height } = span.getBoundingClientRect();"
    x, y = page.eval_on_selector(
        f'{side(page, place)} [data-at="{at}"]',
        f"{rectangle} return [x + width / 2, y + height / 2]; }}",
    )
    page.mouse.move(x, y)


def press(page: Page, place: int, at: int) -> None:
    over(page, place, at)
    page.mouse.down()
    page.mouse.up()


def tinted(page: Page, place: int) -> set[int]:
    spans = page.locator(f'{side(page, place)} [data-at][style*="background"]')
    return {int(span.get_attribute("data-at") or "") for span in spans.all()}


def chosen(page: Page, place: int) -> list[str]:
    return page.locator(f"{side(page, place)} .flow .chosen").all_inner_texts()


def names(texts: str, special: str = "") -> list[regard.Token]:
    return [regard.Token(text, special=text == special) for text in texts.split("|")]


def test_one_text_shows_both_ways_of_a_token_and_a_line_for_each_weight(show: Open) -> None:
    recording = recorded()
    page = show(recording, "#view=text&layer=1&head=1&query=5")
    read(page, "1,1,5,5,0")
    with step("both ways of a token"):
        row, column = recording[1][0, 1, 5], recording[1][0, 1][:, 5]
        words = ["[CLS]", *pages.WORDS]
        to, by = int(row.argmax()), int(column.argmax())
        page.locator("#sentence", has_text="is looked at").wait_for()  # a column comes later
        assert sentence(page) == (
            f"“eat” looks most at “{words[to]}”: {three_digits(float(row.max()))}; "
            f"“eat” is looked at most by “{words[by]}”: {three_digits(float(column.max()))}, "
            "layer 1 head 1."
        )
        assert page.inner_text(f"{side(page, 0)} h2") == "Where “eat” looks"
        assert page.inner_text(f"{side(page, 1)} h2") == "Who looks at “eat”"
        label = page.get_attribute(f'{side(page, 0)} [data-at="{to}"]', "data-share") or ""
        assert label.replace("\u202f", " ") == three_digits(float(row.max()))
    with step("a line for each weight"):
        page.wait_for_selector("#view-text line", state="attached")
        weights = recording[1][0, 1].to_dense()
        count = int((weights >= 0.01).sum())
        assert page.locator("#view-text line").count() == count
        said = page.inner_text("#view-text .lines .caption").replace("\u202f", " ")
        assert said.startswith(f"Lines: {count} weights of 1.00 % and more, of 81 weights above 0")
    with step("pointing at a name shows its own lines"):
        page.hover('#view-text [data-line="key"][data-place="4"]')
        page.wait_for_selector("#view-text line.aside", state="attached")
        keys = page.locator("#view-text line:not(.aside)")
        assert {line.get_attribute("data-key") for line in keys.all()} == {"4"}
        assert keys.count() == int((weights[:, 4] >= 0.01).sum())
    with step("pointing at a word reads it, a click or an arrow keeps one"):
        page.mouse.move(2, 2)
        visit(page, "#view=text&query=2")
        read(page, "0,0,2,2,0")
        over(page, 1, 6)
        read(page, "0,0,6,6,0")
        page.mouse.move(2, 2)
        read(page, "0,0,2,2,0")
        press(page, 0, 3)
        page.mouse.move(2, 2)
        read(page, "0,0,3,3,0")
        assert chosen(page, 0) == chosen(page, 1) == ["short"]
        page.keyboard.press("ArrowRight")
        read(page, "0,0,4,4,0")
        assert address(page, lambda said: said.get("query") == "4")["query"] == "4"


@pytest.mark.full
def test_two_texts_face_each_other(show: Open) -> None:
    with step("the two texts of a pair"):
        tokens = names("[CLS]| Life| is| short|[SEP]| eat| dessert|[SEP]")
        tokens = [token._replace(special=token.text.startswith("[")) for token in tokens]
        recording = regard.Recording({"layer": recorded(tokens=8)[0]}, query_tokens=tokens)
        page = show(recording, "#view=text&head=1&query=6")
        read(page, "0,1,6,6,0")
        texts = page.locator("#view-text .flow").all_inner_texts()
        assert texts == ["[CLS] Life is short [SEP]", "eat dessert [SEP]"]
        assert page.inner_text("#view-text .direction") == "Where “dessert” looks"
        row = recording[0][0, 1, 6]
        for place, part in enumerate((row[:5], row[5:])):
            caption = page.inner_text(f"{side(page, place)} .caption").replace("\u202f", " ")
            assert caption.startswith(f"Together {three_digits(float(part.sum()))}. ")
        page.keyboard.press("d")
        page.wait_for_selector('#view-text .direction:text("Who looks at “dessert”")')
    with step("queries and keys of cross-attention"):
        recording = regard.Recording(
            {"layer": recorded(tokens=3, keys=4)[0]},
            query_tokens=names("Das| Leben| ist"),
            key_tokens=names("Life| is| so| short"),
        )
        page = show(recording, "#view=text&head=1&query=1&key=0")
        read(page, "0,1,1,0,0")
        assert "3 × 4 tokens" in page.inner_text("#about")
        assert page.locator("#view-text .flow").all_inner_texts() == [
            "Das Leben ist",
            "Life is so short",
        ]
        assert (chosen(page, 0), tinted(page, 0)) == (["Leben"], set())
        assert 0 < len(tinted(page, 1)) <= 4
        press(page, 1, 2)
        page.mouse.move(2, 2)
        page.wait_for_selector('#view-text .direction:text("Who looks at “so”")')
        assert chosen(page, 1) == ["so"]
        assert len(tinted(page, 0)) > 0


def then_tints_and_very_long_texts(show: Open) -> None:
    with step("61 causal tokens are tinted where the weights are"):
        page = show(recorded(tokens=61, mask=regard.Causal()), "#view=text&layer=0&head=0&query=4")
        read(page, "0,0,4,4,0")
        assert tinted(page, 0) <= {0, 1, 2, 3, 4}
        assert tinted(page, 1) <= set(range(4, 61))
        assert 4 in tinted(page, 1)
        assert page.locator("#view-text line").count() == 0
        assert page.inner_text("#view-text .lines .caption") == ""
    with step("131,072 tokens"):
        length = 131_072
        torch.manual_seed(3)
        matrix = regard.attend(
            torch.randn(1, length, 8), torch.randn(1, length, 8), mask=regard.SlidingWindow(16, 0)
        )
        tokens = [("\n" if i % 50 == 0 else " ") + str(i) for i in range(length)]
        page = show(
            regard.Recording({"layer": matrix}, query_tokens=tokens), "#view=text&query=100000"
        )
        read(page, "0,0,100000,100000,0")
        assert page.is_visible(f'{side(page, 0)} [data-at="100000"]')
        assert page.locator("#view-text [data-at]").count() < 8_000
        best = int(matrix[0, 100_000].argmax())
        assert sentence(page).startswith(f"“100000” looks most at “{best}”: ")
        page.evaluate("document.querySelector('#view-text .reading').scrollTop = 0")
        page.wait_for_selector(f'{side(page, 0)} [data-at="0"]')
        assert page.locator("#view-text [data-at]").count() < 8_000


@pytest.mark.full
def test_long_texts_are_tinted_and_built_near_the_screen_without_lines(show: Open) -> None:
    tokens = [f" word{at}" for at in range(600)]
    recording = regard.Recording({"layer": recorded(tokens=600)[0]}, query_tokens=tokens)
    for width in (700, 760, 1099):
        with step(f"above the line at {width} pixels"):
            size = {"width": width, "height": 780}
            page = show(recording, "#view=text&query=599", viewport=size)
            page.wait_for_selector("body[data-read]")
            line = page.locator("footer").bounding_box()
            assert line
            # Each is at its strongest, and the chosen one is a press away.
            weights = recording[0][0, 0]
            strongest = [int(weights[599].argmax()), int(weights[:, 599].argmax())]
            for side_at, best in enumerate(strongest):
                word = page.locator(f'{side(page, side_at)} [data-at="{best}"]')
                expect(word).to_be_in_viewport()
                box = word.bounding_box()
                assert box
                assert box["y"] + box["height"] <= line["y"]
                jump = page.locator(f"{side(page, side_at)} .jump")
                expect(jump).to_have_text(["Go to the strongest", "Go to the chosen token"])
                jump.last.click()
                expect(page.locator(f"{side(page, side_at)} .chosen")).to_be_in_viewport()
    # Lines of many lengths: no block is as high as was thought before it is built.
    tokens = [f" {'word' * (at % 3)}{at}" + "\n" * (at % 37 == 0) for at in range(1998)]
    zeros = torch.zeros(1, 1998, 2)
    seen = regard.Recording({"layer": regard.attend(zeros, zeros)}, query_tokens=tokens)
    for query in (500, 1400, 1997):
        with step(f"both texts are at word {query}"):
            page = show(seen, f"#view=text&query={query}")
            page.wait_for_selector("body[data-read]")
            page.wait_for_timeout(500)  # blocks near the screen are built in the next frames
            view = page.locator("#view-text .reading").first.bounding_box()
            chosen = page.locator("#view-text .chosen")
            # Nothing stands out of even weights: both texts stay at the chosen word.
            for box in (chosen.nth(at).bounding_box() for at in (0, 1)):
                assert view
                assert box
                assert view["y"] <= box["y"] <= view["y"] + view["height"] - box["height"]
    then_tints_and_very_long_texts(show)
