"""Make the pictures of README and docs: the terminal, every view of the page, the plots.

    .venv/bin/python docs/images/render.py              all of them, in about ten minutes
    .venv/bin/python docs/images/render.py minilm-map   those whose names begin like this

Needs regard[dev], Chromium, and Inter, the font, which `make lint` installs. The page shows MiniLM
with one sentence, SmolLM2 with two real texts, a picture under heads made by hand, and 131,072
made-up tokens. SmolLM2 is left out if `python -m benchmarks.smollm2` did not fetch it and SMOLLM2
does not name its folder. REGARD_IMAGES names another folder to write to.
"""

import base64
import io
import os
import queue
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib
import torch
from matplotlib import pyplot
from PIL import Image, ImageDraw, ImageOps
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from torch.nn import functional
from transformers import AutoImageProcessor, ViTForImageClassification

import regard
from regard.models.pretrained import Pretrained
from regard.view.server.http_server import serve
from regard.view.terminal.summary import summarise
from regard.view.terminal.terminal_view import TerminalView

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("REGARD_IMAGES", HERE))
ROOT = HERE.parent.parent
SENTENCE = "Life is short, eat dessert first"
# The quickstart's: one head finds the subject of the verb.
SUBJECT = "The keys to the old cabinet are on the table."
COLUMNS = 80
LONG = 131_072
TOKENS = 2_048
NEEDLE_TOKENS = 8_192
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

Recorded = Callable[[], regard.Recording]


# What is shown


def minilm(text: str = SENTENCE) -> regard.Recording:
    return Pretrained.load().observe(text)


def smollm2_folder() -> Path | None:
    named = os.environ.get("SMOLLM2")
    folder = Path(named) if named else ROOT / ".smollm2"
    return folder if (folder / "config.json").is_file() else None


def smollm2() -> regard.Recording:
    """A real text that comes with every Python, as far as it goes."""
    model = Pretrained.load(str(smollm2_folder()))
    seen = model.observe(longest(model, topics["compound"], TOKENS))
    seen.model = "SmolLM2-135M-Instruct"
    return seen


def needle() -> regard.Recording:
    """One sentence about a gate in 8,192 tokens about Python, and a question at the end."""
    model = Pretrained.load(str(smollm2_folder()))
    secret = "The code of the garden gate is seven blue lanterns."
    question = f"\n\nQuestion: What is the code of the garden gate?\nAnswer: {secret}"
    names = ("compound", "typesseq", "specialnames", "objects", "execmodel", "formatstrings")
    hay = "\n\n".join(topics[name] for name in names)
    # The tokens at the seams may be others than those of the parts.
    room = NEEDLE_TOKENS - len(model.encode(f"{secret}\n\n{question}")[0]) - 4
    hay = longest(model, hay, room)
    place = hay.index("\n\n", len(hay) * 2 // 5)
    text = f"{hay[:place]}\n\n{secret}{hay[place:]}{question}"
    seen = model.observe(text, layers=[RETRIEVAL[0]])
    seen.model = "SmolLM2-135M-Instruct"
    return seen


def longest(model: Pretrained, text: str, tokens: int) -> str:
    """Return the beginning of a text that has so many tokens."""
    places = model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return text[: places[:tokens][-1][1]]


def long() -> regard.Recording:
    """One head that looks at its document's topic, at what is near, and at the first token."""
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(LONG)
    topics = torch.randn(24, 24, generator=generator)[places * 17 // LONG * 7 % 24]
    angles = places[:, None] / torch.tensor([30.0, 900.0, 20_000.0, 300_000.0])
    near = torch.cat([angles.cos(), angles.sin()], -1)
    noise = 0.6 * torch.randn(LONG, 32, generator=generator)
    features = torch.cat([0.9 * topics, 1.8 * near], -1)
    key = features + noise
    key[0] = 6 * features.mean(0)
    matrix = regard.attend(features[None], key[None], mask=regard.Causal(), scale=0.5)
    return regard.Recording({"a layer": matrix}, model="131,072 made-up tokens")


def scene() -> Image.Image:
    """Draw a brown dog, a tree and the sun on a meadow."""
    image = Image.linear_gradient("L").resize((640, 480))
    sky = ImageOps.colorize(image, "#5f93d8", "#d9e8f5")
    meadow = ImageOps.colorize(image, "#8ec65a", "#2f6a2c")
    sky.paste(meadow.crop((0, 260, 640, 480)), (0, 260))
    pen = ImageDraw.Draw(sky)
    pen.ellipse((470, 40, 560, 130), fill="#f7dc6f")
    pen.rectangle((478, 330, 502, 410), fill="#5d4129")
    pen.polygon([(490, 150), (420, 335), (560, 335)], fill="#1f5a3a")
    pen.ellipse((120, 285, 280, 375), fill="#7a4a2a")
    pen.ellipse((245, 235, 325, 310), fill="#8a5632")
    for left in (140, 175, 220, 250):
        pen.rectangle((left, 350, left + 16, 425), fill="#6c4024")
    return sky


def picture() -> regard.Recording:
    """Four heads made by hand, whose patches look at patches of their colour or at near ones."""
    image, side = scene(), 16
    small = image.resize((side, side), Image.Resampling.BOX)
    colours = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    colours = colours.reshape(side * side, 3).float() / 255
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)) / side
    light = colours.mean(1, keepdim=True)
    features = [30 * colours, 14 * places, 40 * light, 12 * torch.cat([colours, places], 1)]
    heads = torch.stack([functional.pad(each, (0, 5 - each.shape[1])) for each in features])
    # -|a - b|² / 2 = a·b - |b|² / 2, less a number that all keys share.
    query = functional.pad(functional.pad(heads, (0, 1), value=1.0), (0, 0, 1, 0))
    key = torch.cat([heads, -heads.square().sum(-1, keepdim=True) / 2], -1)
    key = functional.pad(key, (0, 0, 1, 0))
    key[:, 0, -1] = key[..., -1].mean(1)
    layer = regard.attend(query[None], key[None], scale=1.0)
    tokens = [regard.Token("[CLS]", special=True), *[regard.Token("")] * side**2]
    seen = regard.Recording({"a layer": layer}, model="heads made by hand", query_tokens=tokens)
    return seen.with_pictures([image], regard.grid(range(1, side**2 + 1), side, side))


def finder() -> regard.Recording:
    """The small model of docs/vision.md looks for the red digit."""
    sys.path.insert(0, str(HERE.parent))
    from vision_model import draw

    model = ViTForImageClassification.from_pretrained(
        HERE.parent / "digit-finder", dtype=torch.float32
    ).eval()
    processor = AutoImageProcessor.from_pretrained(HERE.parent / "digit-finder")
    image = draw(seed=1_000_003).image

    def prepare(pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
        return dict(processor(images=pictures, return_tensors="pt"))

    with torch.no_grad(), regard.observe(model) as seen:
        model(**prepare([image]))
    tokens = [regard.Token("[CLS]", special=True), *[regard.Token("")] * 64]
    seen = seen.with_tokens(tokens)
    return seen.with_pictures([image], regard.locate(model, prepare, [image]))


RECORDINGS: dict[str, Recorded] = {
    "minilm": lambda: minilm(SUBJECT),
    "smollm2": smollm2,
    "needle": needle,
    "long": long,
    "picture": picture,
    "finder": finder,
}
VIEWS = ("overview", "map", "text", "steps", "segments")
SUBJECT_HEAD = "layer=3&head=1&query=7&key=2"
# Width and height of the window in pixels, if a view does not fit 1280 x 800.
WINDOWS = {"minilm-segments.webp": (1560, 780)}
PAGES: dict[str, tuple[str, str]] = {
    **{f"minilm-{view}.webp": ("minilm", f"view={view}&{SUBJECT_HEAD}") for view in VIEWS},
    "minilm-segments.webp": ("minilm", "view=segments&parts=words&heads=mean"),
    "smollm2-overview.webp": ("smollm2", "view=overview"),
    "smollm2-map.webp": ("smollm2", "view=map&layer=18&head=6&query=1418&key=99"),
    "needle.webp": ("needle", "view=map&scale=log&layer=0&head=2&{needle}"),
    "long-map.webp": ("long", "view=map&scale=log"),
    "finder-image.webp": ("finder", "view=image&layer=0&head=0&query=0"),
    "picture-image.webp": ("picture", "view=image&head=0&query=165"),
    "long-map-closer.webp": ("long", "view=map&scale=log&zoom=512&row=60000&column=59900"),
}
"""Each picture of the page: of which recording, and the address of what is seen."""


# The terminal


def terminal(seen: regard.Recording, path: Path) -> None:
    """What ``regard see`` prints."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble("$ ", ("regard see ", "bold"), f'"{SENTENCE}"'))
    console.print()
    console.print(TerminalView(summarise(seen)))
    svg = console.export_svg(theme=THEME, code_format=SVG, unique_id="regard")
    path.write_text(re.sub(r"\n+", "\n", svg))


# The page


def pages(browser: Browser, name: str, wanted: list[str]) -> Iterator[Path]:
    """The pictures of one recording, as Chromium shows it; views that it lacks are left out."""
    with tempfile.TemporaryDirectory() as folder:
        seen = RECORDINGS[name]()
        first = (written if name in ("minilm", "picture", "finder") else served)(seen, Path(folder), name)
        tab = opened(browser, first, width=1280, height=800, device_scale_factor=2)
        for picture in wanted:
            address = PAGES[picture][1]
            if name == "needle":
                query, key = copied(seen)
                address = address.format(needle=f"query={query}&key={key}")
            width, height = WINDOWS.get(picture, (1280, 800))
            tab.set_viewport_size({"width": width, "height": height})
            go(tab, address, len(seen) if picture == "smollm2-overview.webp" else 0)
            view = re.search(r"view=(\w+)", address)
            assert view and tab.is_visible(f'#tabs button[data-set="view={view[1]}"]')
            if view[1] == "map":
                tab.wait_for_selector('.map[data-exact="true"]:not([data-ready=""])')
            # A server tells the kinds of the heads after the page is there.
            tab.wait_for_function(
                "() => !document.getElementById('introduction').textContent.startsWith('Looking')"
            )
            settle(tab)
            yield small(tab.screenshot(), FOLDER / picture)
        tab.close()


def opened(browser: Browser, address: str, *, width: int, height: int, **options: float):
    """Open a page in the bundled font, and close its hint."""
    size = {"width": width, "height": height}
    tab = browser.new_page(viewport=size, bypass_csp=True, **options)
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


SMALL_MAPS = "layer => fetch(`/api/overview?layer=${layer}`).then(answer => answer.arrayBuffer())"


def go(tab, address: str, layers: int = 0) -> None:
    """Change the view without a new request: the address of a server works once.

    Until a server has computed the small maps of its layers, an overview is empty.
    """
    tab.evaluate("where => { location.hash = where }", address)
    for layer in range(layers):
        tab.evaluate(SMALL_MAPS, layer)
    tab.wait_for_timeout(500)


# The moving picture: from all heads to one head, and down to one cell.

STEPS = 10  # of the way down
SHOWN = 40  # tokens across, in the end
MOVING = (1280, 860)
HOLD, STEP, LAST = 2000, 130, 3500  # milliseconds
INDUCTION = (18, 6)  # layer and head
RETRIEVAL = (23, 2)
FAR = 500  # tokens


def moving(browser: Browser) -> Path:
    """Show how an induction head of SmolLM2 finds what came after the same word, far above."""
    with tempfile.TemporaryDirectory() as folder:
        seen = smollm2()
        query, key = repeated(seen)
        head = f"layer={INDUCTION[0]}&head={INDUCTION[1]}&query={query}&key={key}"
        address = served(seen, Path(folder), "smollm2")
        tab = opened(browser, address, width=MOVING[0], height=MOVING[1])
        addresses = [f"view=overview&{head}", f"view=map&{head}"]
        for step in range(1, STEPS + 1):
            zoom = (TOKENS / SHOWN) ** (step / STEPS)
            row, column = (max(0, place - TOKENS / zoom / 2) for place in (query, key))
            addresses.append(f"view=map&{head}&zoom={zoom:.4g}&row={row:.0f}&column={column:.0f}")
        frames: list[Image.Image] = []
        for place, each in enumerate(addresses):
            go(tab, each, 0 if place else len(seen))
            if place in (0, 1, len(addresses) - 1):
                settle(tab)
            else:
                tab.wait_for_timeout(1500)
            picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
            size = [side * 3 // 4 for side in MOVING]
            frames.append(picture.resize(size, Image.Resampling.LANCZOS))
        tab.close()
    path = FOLDER / "moving.webp"
    times = [HOLD, HOLD, *[STEP] * (STEPS - 1), LAST]
    first, *others = frames
    first.save(path, save_all=True, append_images=others, duration=times, loop=0, quality=80)
    return path


def copied(seen: regard.Recording) -> tuple[int, int]:
    """Return the query that predicts the needle's last word, and the key of that word."""
    words = [token.text for token in seen.key_tokens]
    return len(words) - 1 - words[::-1].index(" blue"), words.index(" lanterns")


def repeated(seen: regard.Recording) -> tuple[int, int]:
    """Return a query and the key after the same word, far above, with the largest weight."""
    layer, head = INDUCTION
    words = [token.text for token in seen.query_tokens]
    top = seen[layer][0, head].topk(2)  # the largest is often the sink, the first token
    found = [
        (weight, query, key)
        for query, row in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True))
        for weight, key in zip(*row, strict=True)
        if key > 0
        and query - key > FAR
        and words[key - 1] == words[query]
        and words[query].strip().isalpha()
        and words[key].strip().isalpha()
    ]
    _, query, key = max(found)
    return query, key


def written(seen: regard.Recording, folder: Path, name: str) -> str:
    return regard.page(seen, folder / "page.html", title=title(name)).as_uri()


def served(seen: regard.Recording, folder: Path, _: str) -> str:
    """A file of so long a text takes minutes to write; a server shows it at once."""
    addresses: queue.Queue[str] = queue.Queue()
    seen.save(folder / "run.safetensors")
    options = {"open_browser": False, "tell": addresses.put}
    threading.Thread(
        target=serve, args=[[folder / "run.safetensors"]], kwargs=options, daemon=True
    ).start()
    launch, _, _ = addresses.get(timeout=60).partition("   ")
    return Path(launch).as_uri()


def settle(tab) -> None:
    """Until nothing changes any more, or a minute: it paints in slices, from coarse to fine."""
    before = None
    for _ in range(60):
        tab.wait_for_timeout(1000)
        now = tab.screenshot()
        if now == before:
            return
        before = now


def small(png: bytes, path: Path) -> Path:
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").save(path, quality=88, method=6)
    return path


def title(name: str) -> str:
    names = {"minilm": SUBJECT, "smollm2": "Compound statements", "picture": "A dog under the sun"}
    names["finder"] = "The red digit"
    return names.get(name, "A long text")


# The plots


def plots(wanted: Callable[[str], bool]) -> Iterator[Path]:
    """What docs/pictures.md shows of regard.plot."""
    matplotlib.use("agg")
    seen = minilm()
    drawn: dict[str, Callable[[], matplotlib.axes.Axes]] = {
        "plot-map.svg": lambda: regard.plot.map(seen[2][0, 3], seen.query_tokens),
        "plot-heads.svg": lambda: regard.plot.heads(seen, score="kind"),
        "plot-entropy.svg": lambda: regard.plot.entropy(seen),
        "plot-vision.svg": lambda: regard.plot.image(finder(), layer=0, query=0),
        "plot-vision-smooth.svg": lambda: regard.plot.image(
            finder(), layer=0, head=2, query=0, smooth=True
        ),
        "plot-segments.svg": lambda: regard.plot.segments(
            regard.segment_shares(seen, regard.spans.by_word(seen.query_tokens), sinks=False)
        ),
    }
    if wanted("plot-sinks.svg") and smollm2_folder() is not None:
        read = smollm2()
        drawn["plot-sinks.svg"] = lambda: regard.plot.heads(read, score="first-token sink")
    # The same bytes from the same numbers.
    with matplotlib.rc_context({"svg.hashsalt": "regard"}):
        for name, draw in drawn.items():
            if wanted(name):
                figure = draw().figure
                figure.savefig(FOLDER / name, metadata={"Date": None})
                pyplot.close(figure)
                yield FOLDER / name


def pictures(prefixes: list[str]) -> Iterator[Path]:
    def wanted(name: str) -> bool:
        return not prefixes or name.startswith(tuple(prefixes))

    if wanted("terminal.svg"):
        terminal(minilm(), FOLDER / "terminal.svg")
        yield FOLDER / "terminal.svg"
    yield from plots(wanted)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in RECORDINGS:
            of_it = [picture for picture, (of, _) in PAGES.items() if of == name]
            some = [picture for picture in of_it if wanted(picture)]
            if not some or (name in ("smollm2", "needle") and smollm2_folder() is None):
                continue
            yield from pages(browser, name, some)
        if wanted("moving.webp") and smollm2_folder() is not None:
            yield moving(browser)
        browser.close()


if __name__ == "__main__":
    for path in pictures(sys.argv[1:]):
        sys.stdout.write(f"{path}  {path.stat().st_size / 1000:.0f} kB\n")
        sys.stdout.flush()
