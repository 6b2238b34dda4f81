"""`regard.locate` on models of transformers: their own processors, random weights, real grids.

A box is verified on the picture itself: with attention that mixes nothing, pixels inside a box
change the key of its token and of no other.
"""

from functools import cache
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import regard
from vision_models import ENCODERS, LANGUAGE_MODELS, Case, case_of, without_mixing

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = {"vit", "swin", "qwen2_vl"}
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
    for name in (*ENCODERS, *LANGUAGE_MODELS)
]


def photo(name: str = "") -> Image.Image:
    """A picture of smooth colours, large enough that interpolation stays within a patch.

    Idefics 3 interpolates a picture that is no square twice, over several of its small patches.
    """
    torch.manual_seed(3)
    colours = torch.randint(60, 200, (5, 7, 3), dtype=torch.uint8)
    size = (640, 640) if name in ("idefics3", "smolvlm") else (720, 480)
    return Image.fromarray(colours.numpy()).resize(size)


@cache
def located(name: str) -> tuple[Case, regard.Recording]:
    """A case, and its recording with the picture."""
    case = case_of(name)
    with torch.no_grad(), regard.observe(case.model) as seen:
        case.model(**case.prepare([photo(name)]))
    grids = regard.locate(case.model, case.prepare, [photo(name)])
    return case, seen.with_pictures([photo(name)], grids)


def keys_of(case: Case, picture: Image.Image) -> dict[str, Tensor]:
    """The value of each key, (entries, kv_len, numbers), by the name of the layer."""
    with torch.no_grad(), regard.observe(case.model, keep="qkv") as seen:
        case.model(**case.prepare([picture]))
    values = {layer.name: layer.whole_value() for layer in seen.layers}
    return {
        name: value.reshape(-1, *value.shape[-3:]).transpose(1, 2).flatten(2)
        for name, value in values.items()
    }


def painted(picture: Image.Image, box: list[float]) -> Image.Image:
    """The picture with other pixels inside a box."""
    other = picture.copy()
    x0, y0, x1, y1 = map(round, box)
    other.paste((255, 0, 255), (x0, y0, x1, y1))
    return other


def inner(box: list[float], part: float = 0.2) -> list[float]:
    """The middle of a box, or with a negative part more than the box."""
    x0, y0, x1, y1 = box
    across, down = (1 - part) / 2 * (x1 - x0), (1 - part) / 2 * (y1 - y0)
    return [x0 + across, y0 + down, x1 - across, y1 - down]


def meet(box: list[float], other: list[float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_pixels_inside_a_box_change_its_token_and_no_other(
    name: str, subtests: pytest.Subtests
) -> None:
    case, seen = located(name)
    picture = photo(name)
    twin = Case(case_of(name).model, case.prepare)
    without_mixing(twin.model)
    before = keys_of(twin, picture)
    # One layer of each shape; the last, whose places come through all others.
    layers = {seen.shapes[name]: name for name in seen.shapes if seen.layer_grids(name)}
    assert layers
    for layer in layers.values():
        boxes = {
            (grid.entry, token): box
            for grid in seen.layer_grids(layer)
            for token, box in zip(grid.tokens, grid.boxes(*picture.size).tolist(), strict=True)
        }
        inside = [spot for spot, box in boxes.items() if is_inside(box, picture)]
        for spot in (inside[0], inside[len(inside) // 3], inside[-1]):
            # Far enough from its sides that the processor's interpolation stays inside.
            area = inner(boxes[spot])
            after = keys_of(twin, painted(picture, area))[layer]
            changed = {tuple(each) for each in (after != before[layer]).any(-1).nonzero().tolist()}
            # A thumbnail shows the same pixels again. Its patches are larger.
            may = {each for each, box in boxes.items() if meet(inner(box, 1.6), area)}
            alone = {each for each in may if boxes[each] == boxes[spot]}
            with subtests.test(layer=layer, spot=spot):
                assert spot in changed
                assert changed <= may
                if len({round(box[2] - box[0]) for box in boxes.values()}) == 1:
                    assert changed == alone


def is_inside(box: list[float], picture: Image.Image) -> bool:
    """Whether all of a box lies in the picture."""
    x0, y0, x1, y1 = box
    return min(x0, y0) > -0.1 and x1 < picture.width + 0.1 and y1 < picture.height + 0.1


WITHOUT_WEIGHTS = {"data2vec-vision", "vitdet"}
"""Types that return no weights, or those of a batch that is folded into the heads."""


def eager_weights(name: str) -> list[Tensor]:
    """The weights that eager attention returns, of the language model if there is one."""
    case = case_of(name)
    case.model.set_attn_implementation("eager")
    with torch.no_grad():
        output: Any = case.model(**case.prepare([photo(name)]), output_attentions=True)
    return [each for each in output.attentions if each is not None]


@pytest.mark.parametrize(
    "name", [each for each in NAMES if getattr(each, "values", [each])[0] not in WITHOUT_WEIGHTS]
)
def test_shares_equal_those_of_eager_attention(name: str, subtests: pytest.Subtests) -> None:
    _, seen = located(name)
    weights = eager_weights(name)
    assert weights
    # In one shape, layers run in the order of the weights. "head" pools after all of them.
    for shape in dict.fromkeys(each.shape for each in weights):
        dense = [each for each in weights if each.shape == shape]
        names = [
            layer.name
            for layer in seen.layers
            if layer.shape == shape and not layer.name.startswith("head")
        ]
        assert len(names) == len(dense)
        for layer, whole in zip(names, dense, strict=True):
            grids = seen.layer_grids(layer)
            for entry in {grid.entry for grid in grids}:
                one = seen.part([layer]).entry(entry)
                places = [token for grid in one.grids for token in grid.tokens]
                with subtests.test(layer=layer, entry=entry):
                    head, query = shape[1] - 1, shape[2] // 2
                    expected = whole[entry, head, query, places]
                    answer = one.image(layer, head, query=query).flatten()
                    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=0)
                    mean = whole[entry].mean((0, 1))[places]
                    torch.testing.assert_close(one.image(layer).flatten(), mean, atol=1e-5, rtol=0)


def test_there_are_many() -> None:
    assert len({*ENCODERS, *LANGUAGE_MODELS} - WITHOUT_WEIGHTS) >= 25
