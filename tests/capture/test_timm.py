"""Models of timm: observe changes no bit, and sees the same fused as written by hand."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

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
    "cait_xxs24_224": 2,  # the others mix their heads before and after the softmax
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


def recorded(name: str, *, fused: bool) -> regard.Recording:
    timm.layers.set_fused_attn(fused)
    torch.manual_seed(0)
    model: Any = timm.create_model(name, pretrained=False, num_classes=10).eval()
    image = torch.randn(1, *model.default_cfg["input_size"])
    with torch.no_grad():
        expected = model(image)
        with regard.observe(model, strict=True) as seen:
            assert torch.equal(model(image), expected)
    return seen


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_is_seen_fused_and_written_by_hand(name: str) -> None:
    fused, by_hand = (recorded(name, fused=fused) for fused in (True, False))
    assert len(fused) == LAYERS[name]
    assert list(fused) == list(by_hand)
    for one, other in zip(fused.values(), by_hand.values(), strict=True):
        torch.testing.assert_close(one[..., :1, :], other[..., :1, :], atol=1e-5, rtol=0)
        torch.testing.assert_close(one.entropy(), other.entropy(), atol=1e-4, rtol=0)
