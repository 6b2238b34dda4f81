"""The page of mistakes is complete, its pictures show a difference, and ``check`` finds them."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.diagnosis.catalogue import FAULTS

PAGES = Path(__file__).parents[2] / "docs" / "mistake_pages.py"
spec = importlib.util.spec_from_file_location("mistake_pages", PAGES)
assert spec is not None
assert spec.loader is not None
pages: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)
FILES = sorted(pages.FOLDER.glob("[0-9]*.py"))
# Those that check finds from the arguments alone, without being told about a mask or axes.
FOUND = [2, 3, 4, 5, 6, 11, 12, 18, 19, 21, 22, 23, 25, 27]


def test_every_mistake_has_its_code() -> None:
    assert [path.stem for path in FILES] == [f"{f.number:02}_{f.name}" for f in FAULTS]


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_pictures_of_wrong_and_right_differ(path: Path) -> None:
    module = pages.load(path)
    right = pages.influence(module, "right")
    assert right.isfinite().all()
    if path.stem == "26_transpose-of-batch":  # has no picture: it runs on no batch
        with pytest.raises(RuntimeError, match="must match"):
            pages.influence(module, "wrong")
        return
    assert not torch.allclose(pages.influence(module, "wrong"), right, atol=1e-3)


@pytest.mark.parametrize("number", FOUND)
def test_check_names_the_mistake_and_finds_the_right_code_right(number: int) -> None:
    path = FILES[number - 1]
    module = pages.load(path)
    causal = True if "# causal" in path.read_text() else None

    def checked(kind: str) -> Any:
        made = pages.code_of(module, kind)
        subject = made() if isinstance(made, type) else made
        return regard.check(subject, args=tuple(module.example()), causal=causal)

    wrong, right = checked("wrong"), checked("right")
    assert wrong.verdict in ("wrong", "different")
    assert [f.name for f in wrong.findings] == [FAULTS[number - 1].name]
    assert (right.verdict, right.findings) == ("right", ())
