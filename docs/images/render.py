"""Draw the pictures of README and docs: the terminal, the page, figures, and two sample pages.

    .venv/bin/python docs/images/render.py             all of them, in some minutes
    .venv/bin/python docs/images/render.py agreement   those whose names begin like this

``shown.py`` lists them, and ``shown.json`` records what each one shows. Needs regard[dev], the bundled
page (`make page`), Chromium, and Inter, the font, which `make lint` installs. Pictures of SmolLM2 are
left out if `python -m benchmarks.smollm2` did not fetch it and SMOLLM2 does not name its folder.
"""

import base64
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib
import matplotlib.cbook
import torch
from matplotlib import pyplot
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from shown import HERE, PICTURES, ROOT, record
from transformers import AutoImageProcessor, ViTForImageClassification

import regard
from regard.models.pretrained import Pretrained
from regard.models.pretrained_vision import PretrainedVision
from regard.models.trials import repetition
from regard.view.terminal.summary import summarise
from regard.view.terminal.terminal_view import summary_lines

sys.path += [str(ROOT / "docs"), str(ROOT / "tests")]
from documents import blocks, run_python  # noqa: E402: the folder of the tests is no package
from vision_model import draw  # noqa: E402: nor is that of the documents

SHORT = "Life is short, eat dessert first"
KEYS = "The keys to the cabinet are on the table"
KEY = "The key to the cabinets is on the table"
COLUMNS = 80
FONT = ROOT / "node_modules/@fontsource-variable/inter/files/inter-latin-wght-normal.woff2"
# Sixteen colours on a near-white ground: readable on GitHub's light and dark pages.
THEME = TerminalTheme(
    (250, 250, 248),
    (36, 41, 47),
    [(36, 41, 47)] * 8,
    [(110, 118, 129)] * 8,
)
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect fill="#fafaf8" width="{width}" height="{height}" rx="8" />
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

Recordings = tuple[regard.Recording, dict[str, Any]]
"""A recording, and options of its page."""


# What is shown


def short() -> Recordings:
    """A sentence without much structure, as the command's examples have it."""
    return Pretrained.load().observe(SHORT), {}


def keys() -> Recordings:
    """A verb and its subject, with another noun between them."""
    return Pretrained.load().observe(KEYS), {"title": KEYS, "opened": (3, 1)}


def agreement() -> Recordings:
    """The same, beside the sentence whose subject has the other number."""
    model = Pretrained.load()
    options = {"other": model.observe(KEY), "title": KEYS, "other_title": KEY, "opened": (3, 1)}
    return model.observe(KEYS), options


def copied_name() -> Recordings:
    """A name at the beginning and at the end of a chapter of Python's language reference."""
    model = Pretrained.load(str(smollm2_folder()))
    places = model.tokenizer(topics["compound"], return_offsets_mapping=True)["offset_mapping"]
    chapter = topics["compound"][: places[:1400][-1][1]]
    chapter = chapter[: chapter.rindex(".\n") + 1]
    name = "Maria Lindqvist"
    text = f"This chapter was edited by {name}.\n\n{chapter}\n\nQuestions about it go to {name}."
    seen = model.observe(text, trials=repetition(model.model, limit=model.limit))
    seen.model = "SmolLM2-135M-Instruct"
    return seen, {"title": "A copied name", "layers": [17], "opened": (17, 4)}


def finder() -> Recordings:
    """The small model of docs/vision.md looks for the red digit."""
    folder = HERE.parent / "digit-finder"
    model = ViTForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    image = draw(seed=1_000_003).image

    def prepare(pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
        return dict(processor(images=pictures, return_tensors="pt"))

    with torch.no_grad(), regard.observe(model) as seen:
        model(**prepare([image]))
    tokens = [regard.Token("[CLS]", special=True), *[regard.Token("")] * 64]
    seen = seen.with_tokens(tokens)
    seen = seen.with_pictures([image], regard.locate(model, prepare, [image]))
    return seen, {"title": "The red digit", "opened": (0, 0)}


def photograph() -> Recordings:
    """DINOv2 looks at the photograph of Grace Hopper that matplotlib contains."""
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = Image.open(file).convert("RGB")
    seen = PretrainedVision.load().observe(photo)
    return seen, {"title": "Grace Hopper, read by DINOv2", "opened": (10, 4)}


def smollm2_folder() -> Path | None:
    named = os.environ.get("SMOLLM2")
    folder = Path(named) if named else ROOT / ".smollm2"
    return folder if (folder / "config.json").is_file() else None


@cache
def recorded(source: str) -> Recordings:
    return globals()[source]()


# The terminal


def terminal(seen: regard.Recording, path: Path) -> None:
    """What ``regard see`` prints."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble("$ ", ("regard see ", "bold"), f'"{SHORT}"'))
    console.print()
    for line in summary_lines(summarise(seen), console.width):
        console.print(line)
    svg = console.export_svg(theme=THEME, code_format=SVG, unique_id="regard")
    path.write_text(re.sub(r"\n+", "\n", svg))


# The page


def write_page(name: str, path: Path) -> Path:
    """Write the page that a picture shows."""
    seen, options = recorded(PICTURES[name].source)
    return regard.page(seen, path, **options)


def screenshot(browser: Browser, name: str) -> None:
    """Draw the page as Chromium shows it."""
    with tempfile.TemporaryDirectory() as folder:
        tab = opened(browser, name, Path(folder), device_scale_factor=2)
        go(tab, PICTURES[name].address)
        png = tab.screenshot()
        tab.close()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(HERE / name, quality=88, method=6)


def opened(browser: Browser, name: str, folder: Path, **options: Any) -> Page:
    """Open a page in the bundled font, and close its hint."""
    address = write_page(name, folder / "page.html").as_uri()
    width, height = PICTURES[name].size
    tab = browser.new_page(
        viewport={"width": width, "height": height}, bypass_csp=True, **options
    )
    tab.set_default_timeout(300_000)
    tab.goto(address)
    tab.wait_for_selector("body.ready")
    font = base64.b64encode(FONT.read_bytes()).decode()
    tab.add_style_tag(
        content="@font-face { font-family: Inter; font-weight: 100 900;"
        f" src: url(data:font/woff2;base64,{font}) }} :root body {{ font-family: Inter }}"
    )
    if tab.is_visible("text=Got it"):
        tab.click("text=Got it")
        tab.mouse.move(0, 0)
    return tab


def go(tab: Page, address: str) -> None:
    """Show a view, and wait until nothing changes any more: it paints from coarse to fine."""
    tab.evaluate("where => { location.hash = where }", address)
    view = re.search(r"view=(\w+)", address)
    assert view and tab.is_visible(f'#tabs button[data-set="view={view[1]}"]')
    before = None
    for _ in range(60):
        tab.wait_for_timeout(1000)
        now = tab.screenshot()
        if now == before:
            return
        before = now


# The moving picture: from all heads to one head, and down to one cell.

STEPS = 10  # of the way down
SHOWN = 40  # tokens across, in the end
HOLD, STEP, LAST = 2000, 130, 3500  # milliseconds


def moving(browser: Browser, name: str) -> None:
    """Show how a head finds the rest of a name, far above."""
    seen, _ = recorded(PICTURES[name].source)
    words = [token.text for token in seen.key_tokens]
    query = len(words) - 1 - words[::-1].index(" Maria")
    key = words.index(" Maria") + 1
    head = f"layer=17&head=4&query={query}&key={key}"
    addresses = [f"view=overview&{head}", f"view=map&{head}"]
    for step in range(1, STEPS + 1):
        zoom = (len(words) / SHOWN) ** (step / STEPS)
        row, column = (max(0, place - len(words) / zoom / 2) for place in (query, key))
        addresses.append(f"view=map&{head}&zoom={zoom:.4g}&row={row:.0f}&column={column:.0f}")
    with tempfile.TemporaryDirectory() as folder:
        tab = opened(browser, name, Path(folder))
        frames: list[Image.Image] = []
        for address in addresses:
            go(tab, address)
            picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
            size = [side * 3 // 4 for side in PICTURES[name].size]
            frames.append(picture.resize(size, Image.Resampling.LANCZOS))
        tab.close()
    sys.stdout.write(f"{words[query]!r} at {query} attends to {words[key]!r} at {key}\n")
    times = [HOLD, HOLD, *[STEP] * (STEPS - 1), LAST]
    first, *others = frames
    options: dict[str, Any] = {"duration": times, "loop": 0, "quality": 80}
    first.save(HERE / name, save_all=True, append_images=others, **options)


# Figures


def figure(name: str, seen: regard.Recording) -> matplotlib.axes.Axes:
    match name:
        case "plot-map.svg":
            return regard.plot.map(seen[2][0, 3], seen.query_tokens)
        case "plot-heads.svg":
            return regard.plot.heads(seen, score="kind")
        case "plot-entropy.svg":
            return regard.plot.entropy(seen)
        case "plot-segments.svg":
            words = regard.spans.by_word(seen.query_tokens)
            return regard.plot.segments(regard.segment_shares(seen, words, sinks=False))
        case "plot-sinks.svg":
            return regard.plot.heads(seen, score="first-token sink")
        case "plot-vision.svg":
            return regard.plot.image(seen, layer=0, query=0)
    raise ValueError(name)


def drawn_by_document(name: str, document: str) -> None:
    """Run a document up to the block that saves a figure, and take the figure."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for block in blocks((HERE.parent / document).read_text()):
            if block.language == "python" and block.executed:
                run_python(block, document, names)
            if Path(name).exists():
                shutil.copy(name, HERE / name)
                return
    raise ValueError(f"{document} does not save {name}")


def draw_picture(browser: Browser, name: str) -> None:
    picture = PICTURES[name]
    if picture.source.endswith(".md"):
        drawn_by_document(name, picture.source)
    elif name.endswith(".html"):
        write_page(name, HERE / name)
    elif picture.drawn_by == "terminal":
        terminal(recorded(picture.source)[0], HERE / name)
    elif picture.drawn_by == "figures":
        axes = figure(name, recorded(picture.source)[0])
        axes.figure.savefig(HERE / name, metadata={"Date": None})
        pyplot.close(axes.figure)
    elif picture.source == "copied_name":
        moving(browser, name)
    else:
        screenshot(browser, name)


def main(prefixes: list[str]) -> None:
    begins = tuple(Path(prefix).name for prefix in prefixes)
    wanted: Callable[[str], bool] = lambda name: not begins or Path(name).name.startswith(begins)
    matplotlib.use("agg")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    # The same bytes from the same numbers.
    with sync_playwright() as playwright, matplotlib.rc_context({"svg.hashsalt": "regard"}):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in filter(wanted, PICTURES):
            if PICTURES[name].source == "copied_name" and smollm2_folder() is None:
                continue
            draw_picture(browser, name)
            record(name)
            sys.stdout.write(f"{name}  {(HERE / name).stat().st_size / 1000:.0f} kB\n")
            sys.stdout.flush()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
