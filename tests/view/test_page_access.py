"""People with screen readers, keyboards and weak eyes: what axe-core finds in every view."""

from pathlib import Path

import pytest

import pictured
import regard
from pages import Open, recorded, step, visit
from regard.view.export.page_file import write_page

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = ["overview", "map", "text", "steps", "segments"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not AXE.exists(), reason="axe-core comes with `make lint`"),
]

FINDINGS = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.map(({ id, nodes }) => [id, ...nodes.map((node) => node.html)].join(" "));
}"""


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_axe_finds_nothing_in_any_view(theme: str, show: Open) -> None:
    more = "compare=beside"
    page = show(recorded(mask=regard.Causal()), f"#view=map&theme={theme}&{more}")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for view in VIEWS:
        with step(view):
            visit(page, f"#view={view}&theme={theme}&{more}")
            page.wait_for_selector(f'body[data-view="{view}"][data-read]')
            page.wait_for_timeout(200)  # a view is drawn in the frames that follow
            assert page.evaluate(FINDINGS) == []
    with step("a finding would be seen"):
        page.evaluate("document.getElementById('find').removeAttribute('aria-label')")
        page.evaluate("document.getElementById('find').removeAttribute('placeholder')")
        assert any("label" in finding for finding in page.evaluate(FINDINGS))


@pytest.mark.full
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_pictures_and_two_recordings(
    theme: str, show: Open, tmp_path: Path
) -> None:
    for compare in ("alone", "beside"):
        with step(f"a picture, {compare}"):
            page = show(pictured.language(), f"#theme={theme}&compare={compare}&query=28")
            page.wait_for_selector("#view-image[data-ready]:not([data-ready=''])")
            page.wait_for_selector(".small-pictures button")
            page.evaluate(AXE.read_text(encoding="utf-8"))
            assert page.evaluate(FINDINGS) == []
    with step("two recordings, and where a text is edited"):
        both = write_page(recorded(), tmp_path / "both.html", other=recorded(tokens=7))
        page = show(both, f"#view=map&theme={theme}")
        page.wait_for_selector('body[data-compare="beside"][data-read]')
        page.evaluate("document.getElementById('edit').showModal()")
        page.evaluate(AXE.read_text(encoding="utf-8"))
        assert page.evaluate(FINDINGS) == []
