"""Models of timm: observe changes no bit, and sees the same fused as written by hand."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from PIL import Image

import regard

pytestmark = pytest.mark.full

if find_spec("timm") is None:
    pytest.skip("timm is installed by `make test-timm`", allow_module_level=True)

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # The package index has torchvision for CUDA builds of PyTorch. Next to a CPU build its compiled
    # part cannot be loaded. No model here needs that part, but the rest wants two of its names.
    operators = torch.library.Library("torchvision", "FRAGMENT")
    operators.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    operators.define("qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor")

timm: Any = pytest.importorskip("timm")

LAYERS = {
    "beit_base_patch16_224": 12,
    "cait_xxs24_224": 2,
    "crossvit_tiny_240": 21,
    "davit_tiny": 12,
    "deit_tiny_distilled_patch16_224": 12,
    "edgenext_xx_small": 3,
    "efficientformer_l1": 1,
    "eva02_tiny_patch14_224": 12,
    "fastvit_sa12": 2,
    "hiera_tiny_224": 12,
    "levit_128s": 11,
    "maxvit_pico_rw_256": 22,
    "mobilevit_xxs": 9,
    "mvitv2_tiny": 10,
    "nest_tiny": 12,
    "pit_ti_224": 12,
    "pvt_v2_b0": 8,
    "swinv2_tiny_window8_256": 12,
    "visformer_tiny": 8,
    "vit_small_patch14_reg4_dinov2": 12,
    "vit_srelpos_small_patch16_224": 12,
    "vit_tiny_patch16_224": 12,
    "volo_d1_224": 16,
    "xcit_nano_12_p16_224": 14,
}
REFUSED = {"cait_xxs24_224": 24}
"""The layers that mix their heads after the softmax, so that their rows do not sum to 1."""


def recorded(name: str, *, fused: bool) -> regard.Recording:
    timm.layers.set_fused_attn(fused)
    torch.manual_seed(0)
    model: Any = timm.create_model(name, pretrained=False, num_classes=10).eval()
    image = torch.randn(1, *model.default_cfg["input_size"])
    with torch.no_grad():
        expected = model(image)
        with regard.observe(model, strict=name not in REFUSED) as seen:
            assert torch.equal(model(image), expected)
    assert len(seen.refused) == REFUSED.get(name, 0)
    return seen


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_is_seen_fused_and_written_by_hand(name: str) -> None:
    fused, by_hand = (recorded(name, fused=fused) for fused in (True, False))
    assert len(fused) == LAYERS[name]
    assert list(fused) == list(by_hand)
    for one, other in zip(fused.values(), by_hand.values(), strict=True):
        torch.testing.assert_close(one[..., :1, :], other[..., :1, :], atol=1e-5, rtol=0)
        torch.testing.assert_close(one.entropy(), other.entropy(), atol=1e-4, rtol=0)


GRIDS = {
    "vit_tiny_patch16_224": (1, 14, 14),
    "deit_tiny_distilled_patch16_224": (2, 14, 14),
    "eva02_tiny_patch14_224": (1, 16, 16),
    "vit_srelpos_small_patch16_224": (0, 14, 14),
    "vit_small_patch16_dinov3": (5, 16, 16),
    "beit_base_patch16_224": (1, 14, 14),
}
"""Models without overlap, with the number of class and register tokens, rows and columns."""


@pytest.mark.parametrize("name", GRIDS)
def test_the_places_of_a_picture_are_measured(name: str) -> None:
    timm.layers.set_fused_attn(False)
    torch.manual_seed(0)
    model: Any = timm.create_model(name, pretrained=False, num_classes=10).eval()
    config = timm.data.resolve_data_config({}, model=model)
    transform = timm.data.create_transform(**config)
    picture = Image.effect_noise((300, 200), 50).convert("RGB").resize((600, 400))

    def prepare(pictures: list[Any]) -> torch.Tensor:
        return torch.stack([transform(each) for each in pictures])

    weights: list[torch.Tensor] = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_hook(lambda _, args, __: weights.append(args[0]))
    with torch.no_grad(), regard.observe(model) as seen:
        model(prepare([picture]))
    for block in model.blocks:
        block.attn.attn_drop._forward_hooks.clear()
    seen = seen.with_pictures([picture], regard.locate(model, prepare, [picture]))
    first, rows, columns = GRIDS[name]
    [grid] = seen.grids
    assert (grid.rows, grid.columns) == (rows, columns)
    assert grid.tokens == range(first, first + rows * columns)
    # timm resizes the shorter side to size / crop, rounded, and cuts a square out of the middle.
    size = config["input_size"][-1]
    short = int(size / config["crop_pct"])
    scale = 400 / short
    left = round((int(short * 1.5) - size) / 2.0) * 600 / int(short * 1.5)
    top = round((short - size) / 2.0) * scale
    expected = (left, top, left + size * scale, top + size * scale)
    assert grid.box or expected == (0, 0, 600, 400)
    # 1 pixel of 600: timm rounds sizes to whole pixels of 224, each 1.6 wide.
    assert grid.box is None or all(abs(a - b) < 1 for a, b in zip(grid.box, expected, strict=True))
    for layer, dense in zip(seen.layers, weights, strict=True):
        share = seen.image(layer.name, 1, query=3).flatten()
        torch.testing.assert_close(share, dense[0, 1, 3, first:], atol=1e-5, rtol=0)
