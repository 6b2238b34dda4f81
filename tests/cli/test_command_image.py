"""`regard see`, `record` and `page` with a picture: what a vision model looks at."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

import regard
from commands import Run, left_behind
from regard.view.server import http_server as server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision model and a vision-language model in folders, with their processors."""
    import transformers

    from vision_models import case_of

    folder = tmp_path_factory.mktemp("models")
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case_of("vit").model.save_pretrained(folder / "vit")
        transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(
            folder / "vit"
        )
        case, processor = case_of("llava"), None
        for cell in case.prepare.__closure__ or ():
            if isinstance(cell.cell_contents, transformers.ProcessorMixin):
                processor = cell.cell_contents
        assert processor is not None
        case.model.save_pretrained(folder / "llava")
        processor.save_pretrained(folder / "llava")
    transformers.utils.logging.enable_progress_bar()
    return folder


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.effect_noise((90, 60), 60).convert("RGB").save(tmp_path / "photo.jpg")
    return Path("photo.jpg")


def test_see_shows_a_picture(run: Run, models: Path, photo: Path) -> None:
    code, out, err = run("see", "--image", str(photo), "--model", str(models / "vit"), "--json")
    assert (code, err) == (0, "")
    seen = json.loads(out)
    assert [token["text"] for token in seen["tokens"][:3]] == ["[CLS]", " 0,0", " 0,1"]
    assert list(seen["layers"]) == ["layers.0.attention", "layers.1.attention"]


@pytest.mark.full
def test_record_keeps_the_picture_and_page_reads_it(
    run: Run, models: Path, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(
        "record",
        "w6 w8",
        "--image",
        str(photo),
        "--model",
        str(models / "llava"),
        "-o",
        "run.safetensors",
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == (
        "llava   18 tokens · 2 layers, query and key of each, with the picture"
    )
    seen = regard.load("run.safetensors")
    [grid] = seen.grids
    assert (grid.rows, grid.columns, list(grid.tokens)) == (4, 4, list(range(16)))
    assert [token.text for token in seen.query_tokens[-2:]] == ["w6", " w8"]
    assert (seen.pictures[0].width, seen.pictures[0].height) == (90, 60)
    for command in ("page", "see"):
        sizes: list[int] = []
        for option in ((), ("--no-picture",)):
            assert run(command, "run.safetensors", "-o", "attention.html", *option)[0] == 0
            sizes.append(Path("attention.html").stat().st_size)
        assert sizes[1] < sizes[0]
    served_there = ("record", "--server", "http://localhost:9", "--image", str(photo), "a")
    code, _, err = run(*served_there)
    assert code != 0
    assert "--image cannot be combined with --server" in err
    served: list[regard.Recording] = []
    monkeypatch.setattr(server, "application", lambda seen, *_, **__: served.append(seen))
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda *_, **__: None)
    for option in ((), ("--no-picture",)):
        assert run("serve", "run.safetensors", "--no-browser", *option)[0] == 0
    assert [each.pictures[0].data is None for each in served] == [False, True]
    assert served[1].grids == served[0].grids
    assert left_behind(Path()) == ["attention.html", "photo.jpg", "run.safetensors"]


@pytest.mark.full
def test_a_generated_answer_looks_at_the_picture(run: Run, models: Path, photo: Path) -> None:
    model = ("--model", str(models / "llava"))
    code, _, err = run("record", "w6 w8", "--image", str(photo), *model, "--generate", "3")
    assert (code, err) == (0, "")
    seen = regard.load("run.safetensors")
    length = seen[0].shape[-1]
    assert length in (19, 20)  # 18 of the question, and the answer but for its last; it may end
    share = seen.image(0, query=length - 1)
    expected = seen[0][0, :, length - 1, :16].mean(0).view(4, 4)
    torch.testing.assert_close(share, expected, atol=1e-6, rtol=0)


def test_no_picture_keeps_the_size_only(run: Run, models: Path, photo: Path) -> None:
    model = str(models / "vit")
    code, out, _ = run("record", "--image", str(photo), "--no-picture", "-m", model)
    assert code == 0
    assert "query and key of each, without the picture" in out
    seen = regard.load("run.safetensors")
    assert seen.pictures == (regard.images.Picture(90, 60),)
    assert len(seen.grids) == 1


REFUSED = {
    "no model": (
        ["words", "--image", "photo.jpg"],
        "--image needs a model that reads pictures and texts.",
    ),
    "no picture": (["--image", "none.jpg", "-m", "VIT"], "there is no file none.jpg."),
    "a text": (["--image", "note.txt", "-m", "VIT"], "note.txt is no picture that Pillow reads."),
    "layers": (
        ["--image", "photo.jpg", "-m", "VIT", "--layers", "0"],
        "--image excludes --layers, --max-tokens and --chat.",
    ),
    "generate": (
        ["--image", "photo.jpg", "-m", "VIT", "--generate", "3"],
        "--generate needs a text beside --image.",
    ),
    "a text for a model of pictures": (
        ["words", "--image", "photo.jpg", "-m", "VIT"],
        "(vit) reads no text with a picture.",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_calls_are_refused(
    arguments: list[str], message: str, run: Run, models: Path, photo: Path
) -> None:
    Path("note.txt").write_text("hello")
    given = [str(models / "vit") if each == "VIT" else each for each in arguments]
    code, out, err = run("see", *given)
    assert (code, out) == (2, "")
    assert message in err
    assert left_behind(Path()) == ["note.txt", "photo.jpg"]
