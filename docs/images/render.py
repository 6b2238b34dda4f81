"""Make the README's pictures anew: terminal.svg and page.png, from the real model.

    .venv/bin/python docs/images/render.py

Needs regard[dev] and chromium; the pictures are of the dessert sentence, 80 columns and 1280 pixels
wide.
"""

import io
import re
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from regard.pretrained import Pretrained
from regard.see.file import write_page
from regard.see.summary import summarise
from regard.see.terminal import TerminalView

HERE = Path(__file__).parent
SENTENCE = "Life is short, eat dessert first"
COLUMNS = 80
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


def terminal(recording, path: Path) -> None:
    """What ``regard see`` prints."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble("$ ", ("regard see ", "bold"), f'"{SENTENCE}"'))
    console.print()
    console.print(TerminalView(summarise(recording)))
    svg = console.export_svg(theme=THEME, code_format=SVG, unique_id="regard")
    path.write_text(re.sub(r"\n+", "\n", svg))


def page(recording, path: Path) -> None:
    """The page that it writes, as Chromium shows it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = write_page(recording, Path(folder) / "attention.html", title=SENTENCE)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(file.as_uri())
        tab.wait_for_timeout(2000)  # it paints in slices
        tab.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    seen = Pretrained.load().observe(SENTENCE)
    for render, name in ((terminal, "terminal.svg"), (page, "page.png")):
        render(seen, HERE / name)
        sys.stdout.write(f"{HERE / name}  {(HERE / name).stat().st_size / 1000:.0f} kB\n")
