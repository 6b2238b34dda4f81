"""A file that is damaged, or no recording, gives one clear error; nothing in it is ever run."""

import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

import regard
from recording_files import Change, changed, tensor_changed
from regard.recording.file_reader import read
from regard.recording.layers import Layer


def seen(*, tokens: bool = True) -> regard.Recording:
    """A little of everything that a file can hold."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    full = regard.attend(
        normal(2, 4, 3, 5),
        normal(2, 2, 3, 5),
        mask=(regard.Causal() & regard.Padding([3, 2])) | regard.Keep(normal(3, 3) > 0),
        bias=regard.T5Bias(normal(8, 4)),
        softcap=3.0,
        sink_bias=normal(4),
    )
    weights = normal(2, 3, 3).softmax(-1)
    recording = regard.Recording({}, model="Tiny")
    recording.add("full", full, answers=[(regard.TopK(2), full.topk(2))])
    recording.add("biased", regard.attend(normal(4, 3, 5), normal(4, 3, 5), bias=normal(3, 3)))
    recording.add("weights", regard.AttentionMatrix.from_weights(weights))
    entropy = [(regard.Entropy(), full.entropy())]
    recording.add("answers", None, answers=entropy, shape=full.shape)
    if tokens:
        recording = recording.with_tokens([regard.Token(text) for text in "abc"])
    grids = [
        regard.grid(range(2), 1, 2, entry=1),
        regard.grid([2, 0], 2, 1, picture=1, box=(0, 0, 4.5, 8)),
    ]
    pictures = [regard.images.keep(Image.new("RGB", (16, 8)), "a"), regard.images.Picture(9, 8)]
    return recording.with_pictures(pictures, {"full": grids, "answers": grids[:1]})


def saved(path: Path, recording: regard.Recording | None = None) -> Path:
    (seen() if recording is None else recording).save(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file."""
    return saved(tmp_path / "run.safetensors")


def everything_in(path: Path) -> list[Layer]:
    """Every layer, with all of its numbers read and all of its answers asked."""
    layers = list(read(path).layers)
    for layer in layers:
        if layer.matrix is not None:
            layer.whole().to_dense()
        for reduction in layer.answers:
            layer.reduce(reduction)
    return layers


def test_the_good_file_is_good(path: Path) -> None:
    assert [layer.name for layer in everything_in(path)] == list(seen().shapes)


# No recording


NO_RECORDING = (
    "\n    regard record and seen.save() write recordings. If it is a copy of one, copy it again: "
    "it may be cut short."
)


def no_recording(path: Path, what: str) -> str:
    return f"^{re.escape(f'{path} is no recording of regard: {what}.{NO_RECORDING}')}$"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00" * 4, id="four bytes"),
        pytest.param(b"\x00" * 100, id="zeros"),
        pytest.param(b"\x80\x04\x95" + b"c" * 200, id="a pickle"),
        pytest.param(b"PK\x03\x04" + b"c" * 200, id="a zip"),
        pytest.param(struct.pack("<Q", 2**63) + b"{}", id="a header longer than any file"),
        pytest.param(struct.pack("<Q", 2**33) + b"{}", id="a header longer than this file"),
        pytest.param(struct.pack("<Q", 2) + b"[]", id="a list"),
        pytest.param(struct.pack("<Q", 90000) + b"[" * 90000, id="nested lists"),
        pytest.param(b'{"layers": []}', id="JSON"),
    ],
)
def test_a_file_of_another_kind_is_no_recording(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    path.write_bytes(content)
    message = rf"^{path} is no recording of regard: [^\n]+\.{re.escape(NO_RECORDING)}$"
    with pytest.raises(regard.RegardError, match=message):
        read(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["bare", "with metadata"])
def test_the_weights_of_a_model_are_no_recording(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, path, metadata=metadata)
    what = "it is a safetensors file of something else"
    with pytest.raises(regard.RegardError, match=no_recording(path, what)):
        read(path)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 90000, id="nested lists"),
        pytest.param("9" * 90000, id="a number of 90,000 digits"),
        pytest.param("{", id="cut off"),
        pytest.param("[]", id="a list"),
        pytest.param("{}", id="nothing in it"),
    ],
)
def test_metadata_that_are_none_are_refused(text: str, path: Path) -> None:
    changed(path, text=text)
    with pytest.raises(regard.RegardError, match=rf"^{path} is no recording of regard: "):
        read(path)


@pytest.mark.parametrize("version", [0, 3, 4, 6, "5", None, True], ids=str)
def test_another_format_is_refused_by_its_number(version: object, path: Path) -> None:
    changed(path, lambda about: about.update(format=version, regard="9.9"))
    message = (
        f"{path} is a recording of format {version!r}; this version of regard reads "
        "format 5.\n"
        "    Open it with the regard that made it, '9.9'."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        read(path)


# Truncated


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("gone", FileNotFoundError, "there is no file {}; a recording is made with seen.save()."),
        ("", regard.RegardError, "{} is no recording of regard: it is a folder." + NO_RECORDING),
    ],
    ids=["no file", "a folder"],
)
def test_what_is_no_file_is_said(
    name: str, kind: type[Exception], what: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(what.format(tmp_path / name))}$"):
        read(tmp_path / name)


def test_a_file_with_something_after_its_end_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(regard.RegardError, match=rf"^{path} is no recording of regard: "):
        read(path)


# Damaged


def damaged(path: Path, what: str) -> str:
    copy = "\n    Take a copy of it, or record and save again."
    return f"^{re.escape(f'{path} is damaged: {what}.{copy}')}$"


@pytest.mark.parametrize("byte", [b"\x00", b"\xff", b"{", b'"'], ids=repr)
@pytest.mark.parametrize("place", [200, 1000, 3000], ids=str)
def test_a_damaged_header_is_said_before_its_json_is_read(
    place: int, byte: bytes, path: Path
) -> None:
    content = path.read_bytes()
    place += content[place : place + 1] == byte  # the next one differs
    path.write_bytes(content[:place] + byte + content[place + 1 :])
    with pytest.raises(
        regard.RegardError, match=damaged(path, "its header differs from its checksum")
    ):
        read(path)


FLOATS = {"NaN": float("nan"), "an infinity": float("inf"), "an infinity ": -float("inf")}
NUMBERS = {
    **{
        f"{name} in {role}": (
            f"full/{role}",
            struct.pack("<f", number),
            f"{name.strip()} in its {role}",
        )
        for role in ("query", "key", "sink_bias", "position_bias.table")
        for name, number in FLOATS.items()
        if name == "NaN" or role in ("query", "key")
    },
    "NaN in an answer": (
        "answers/answers.0",
        struct.pack("<f", float("nan")),
        "NaN in its answers.0",
    ),
    "a bool": (
        "full/mask.second.mask",
        b"\x02",
        "something neither true nor false in its mask.second.mask",
    ),
    "a key beyond the last": (
        "full/answers.0.keys",
        struct.pack("<q", 3),
        "a key 3 among its largest weights",
    ),
    "a key before none": (
        "full/answers.0.keys",
        struct.pack("<q", -2),
        "a key -2 among its largest weights",
    ),
    "weights": ("weights/values", struct.pack("<f", 7.0), "row (0, 0) with the sum "),
}


@pytest.mark.parametrize(("tensor", "content", "what"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_cannot_be_are_said_when_their_layer_is_asked(
    tensor: str, content: bytes, what: str, path: Path
) -> None:
    tensor_changed(path, tensor, 0, content)
    read(path)
    name = tensor.partition("/")[0]
    message = f"{path} is damaged: layer {name!r} has {what}"
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}"):
        everything_in(path)


def test_what_a_file_says_cannot_steer_the_terminal(path: Path) -> None:
    changed(path, lambda about: about.update(layers=[{"name": "\x1b[31m" * 1000}]))
    with pytest.raises(regard.RegardError) as caught:
        read(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


def layer_of(about: dict[str, Any], place: int = 0) -> dict[str, Any]:
    return about["layers"][place]


def scores_of(about: dict[str, Any], place: int = 0) -> dict[str, Any]:
    return layer_of(about, place)["matrix"]["scores"]


def picture_of(about: dict[str, Any]) -> dict[str, Any]:
    return about["pictures"][0]


def grid_of(about: dict[str, Any]) -> dict[str, Any]:
    return about["grids"][0][0]


HUGE = [2**40, 2**40, 2**40, 2**40]
CHANGES: dict[str, Change] = {
    "tokens of another count": lambda about: about["query_tokens"]["text"].append("d"),
    "a tensor that is missing": lambda about: scores_of(about).update(key="full/keys"),
    "a kind of another module": lambda about: scores_of(about).update(kind="os.system"),
    "no positions": lambda about: layer_of(about).pop("queries"),
    "no value": lambda about: layer_of(about).pop("value"),
    "a shape that is absurd": lambda about: layer_of(about, 3).update(shape=HUGE),
    "a shape beyond all numbers": lambda about: layer_of(about, 3).update(shape=[10**40, 3]),
    "a shape of zero": lambda about: layer_of(about, 3).update(shape=[2, 4, 0, 3]),
    "a shape of another matrix": lambda about: layer_of(about).update(shape=[2, 4, 3, 4]),
    "a shape of one axis": lambda about: layer_of(about).update(shape=[3]),
    "a shape of text": lambda about: layer_of(about).update(shape="2, 4, 3, 3"),
    "no shape": lambda about: layer_of(about).pop("shape"),
    "layers that are none": lambda about: about.update(layers=[None]),
    "layers that are a number": lambda about: about.update(layers=3),
    "no layers": lambda about: about.pop("layers"),
    "a name twice": lambda about: layer_of(about, 1).update(about["layers"][0]),
    "a name that is none": lambda about: layer_of(about).update(name=3),
    "tokens that are none": lambda about: about.update(query_tokens=3),
    "tokens of one text": lambda about: about["query_tokens"].update(text="abc"),
    "special tokens that are none": lambda about: about["key_tokens"].update(special=[3]),
    "tokens of numbers": lambda about: about["query_tokens"].update(text=[1, 2, 3]),
    "scores of an unknown kind": lambda about: scores_of(about).update(kind="Pickle"),
    "scores that are none": lambda about: layer_of(about)["matrix"].update(scores=None),
    "a scale that is none": lambda about: scores_of(about).update(scale=None),
    "an infinite scale": lambda about: scores_of(about).update(scale=float("inf")),
    "a scale of text": lambda about: scores_of(about).update(scale="much"),
    "a softcap below 0": lambda about: scores_of(about).update(softcap=-1.0),
    "a query of bools": lambda about: scores_of(about).update(query="full/mask.second.mask"),
    "a query of indices": lambda about: scores_of(about).update(query="full/answers.0.keys"),
    "a key of other heads": lambda about: scores_of(about).update(key="full/sink_bias"),
    "a query that is a list": lambda about: scores_of(about).update(query=["full/query"]),
    "sinks of another shape": lambda about: scores_of(about).update(sink_bias="full/query"),
    "a bias of an unknown kind": lambda about: scores_of(about)["position_bias"].update(kind="x"),
    "a distance of zero": lambda about: scores_of(about)["position_bias"].update(max_distance=0),
    "a distance beyond": lambda about: scores_of(about)["position_bias"].update(
        max_distance=10**30
    ),
    "a flag that is none": lambda about: scores_of(about)["position_bias"].update(bidirectional=3),
    "weights or not": lambda about: scores_of(about, 2).update(are_weights="yes"),
    "a picture of floats": lambda about: picture_of(about).update(data="full/query"),
    "a picture of other bytes": lambda about: picture_of(about).update(
        data="full/mask.second.mask"
    ),
    "a picture that is missing": lambda about: picture_of(about).update(data="pictures/3.data"),
    "a picture without pixels": lambda about: picture_of(about).update(width=0),
    "a picture without end": lambda about: picture_of(about).update(width=2**40),
    "a picture that is called 3": lambda about: picture_of(about).update(name=3),
    "pictures that are none": lambda about: about.update(pictures=3),
    "grids without pictures": lambda about: about.pop("pictures"),
    "a grid of a layer that is none": lambda about: about["layer_grids"].update(none=0),
    "grids that are none": lambda about: about["layer_grids"].update(full=7),
    "a grid of other tokens": lambda about: grid_of(about).update(tokens=[2, 3]),
    "a grid of fewer tokens": lambda about: grid_of(about).update(tokens=[0]),
    "a grid without end": lambda about: grid_of(about).update(tokens=[0, 2**47], rows=2, columns=1),
    "a grid of another entry": lambda about: grid_of(about).update(entry=2),
    "a grid of another picture": lambda about: grid_of(about).update(picture=2),
    "an empty box": lambda about: grid_of(about).update(box=[0, 0, 0, 1]),
    "a box without end": lambda about: grid_of(about).update(box=[0, 0, float("inf"), 1]),
    "a box of text": lambda about: grid_of(about).update(box="abcd"),
    "a mask of an unknown kind": lambda about: layer_of(about)["matrix"]["mask"].update(kind="x"),
    "a mask that is a number": lambda about: layer_of(about)["matrix"].update(mask=3),
    "a window beyond": lambda about: layer_of(about)["matrix"].update(
        mask={"kind": "SlidingWindow", "left": 10**30, "right": 0}
    ),
    "a window below 0": lambda about: layer_of(about)["matrix"].update(
        mask={"kind": "SlidingWindow", "left": -1, "right": 0}
    ),
    "an alignment of its own": lambda about: layer_of(about)["matrix"].update(
        mask={"kind": "Causal", "align": "diagonal"}
    ),
    "rows that are not there": lambda about: layer_of(about)["matrix"].update(
        mask={
            "kind": "RowSlice",
            "start": 2,
            "q_len": 3,
            "mask": {"kind": "Causal", "align": "top-left"},
        }
    ),
    "fewer than no rows after the query": lambda about: layer_of(about)["matrix"]["scores"].update(
        rows_after=-1
    ),
    "a fraction of rows after the query": lambda about: layer_of(about)["matrix"]["scores"].update(
        rows_after=0.5
    ),
    "lengths that are none": lambda about: layer_of(about)["matrix"].update(
        mask={"kind": "Padding", "lengths": "full/query"}
    ),
    "lengths beyond the keys": lambda about: layer_of(about)["matrix"].update(
        mask={"kind": "Padding", "lengths": "full/answers.0.keys"}
    ),
    "a mask within masks": lambda about: layer_of(about)["matrix"].update(mask=nested(200)),
    "an answer of another shape": lambda about: layer_of(about, 3)["answers"][0].update(
        reduction={"kind": "Sum", "dim": 1}
    ),
    "an answer that is too large": lambda about: layer_of(about, 3)["answers"][0].update(
        reduction={"kind": "TopK", "k": 2**40}
    ),
    "an answer of an unknown kind": lambda about: layer_of(about, 3)["answers"][0].update(
        reduction={"kind": "Output"}
    ),
    "an answer of another dtype": lambda about: layer_of(about)["answers"][0]["answer"].update(
        indices="full/answers.0.values"
    ),
}


def nested(depth: int) -> dict[str, Any]:
    """A mask of an unknown kind, deep inside others."""
    return {"kind": "Not", "mask": nested(depth - 1)} if depth else {"kind": "Nothing"}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_json_that_says_no_recording_is_one_error(change: Change, path: Path) -> None:
    changed(path, change)
    message = rf"^{path} is damaged: [^\n]+\.\n    Take a copy of it, or record and save again\.$"
    with pytest.raises(regard.RegardError, match=message):
        everything_in(path)


# Anything at all


GOOD: list[bytes] = []


def good(folder: Path) -> bytes:
    """The bytes of a good file, without the spaces after its header: there nothing can go wrong."""
    if not GOOD:
        file = changed(saved(folder / "good.safetensors"))
        GOOD.append(file.read_bytes())
    return GOOD[0]


@settings(max_examples=100)
@given(st.floats(0, 1))
@example(0.0)
def test_a_file_that_ends_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, part: float
) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = good(folder)
    path = folder / "cut.safetensors"
    path.write_bytes(content[: int(part * (len(content) - 1))])
    with pytest.raises(regard.RegardError):
        read(path)


KEYWORDS = st.sampled_from(
    [
        *("kind", "mask", "scores", "origin", "answers", "shape", "name", "first", "second"),
        *("run", "tokens", "pictures/0.data", "grids", "width"),
        *("Keep", "And", "Not", "Causal", "TopK", "full/query", "full/mask.second.mask", "list"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | KEYWORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=6,
)


@given(st.data())
def test_any_value_anywhere_in_the_json_gives_an_error_or_a_recording(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "json.safetensors"
    path.write_bytes(good(folder))

    def change(about: dict[str, Any]) -> None:
        place: Any = about
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            deeper = isinstance(place[key], dict | list) and len(place[key]) > 0
            if not deeper or data.draw(st.integers(0, 5)) == 0:
                break
            place = place[key]
        place[key] = data.draw(VALUES)

    changed(path, change)
    with suppress(regard.RegardError):
        everything_in(path)
