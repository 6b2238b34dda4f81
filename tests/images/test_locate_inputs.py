"""What `regard.locate` does with several pictures, padding, overlap, and what it refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

import regard
import regard.nn
from vision_models import Case, case_of

GREY = Image.new("RGB", (48, 32), "grey")


def pixels(pictures: list[Any]) -> Tensor:
    """The pixels of pictures of one size, from 0 to 1: the simplest processor."""
    width, height = pictures[0].size
    numbers = [torch.frombuffer(bytearray(each.tobytes()), dtype=torch.uint8) for each in pictures]
    return torch.stack(numbers).view(-1, height, width, 3).permute(0, 3, 1, 2) / 255


class Patches(nn.Module):
    """A convolution and two layers of attention, with what `change` does between them."""

    def __init__(self, kernel: int = 16, stride: int = 16, padding: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, kernel, stride, padding)
        self.first = regard.nn.SelfAttention(8, num_heads=2)
        self.second = regard.nn.SelfAttention(8, num_heads=2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.convolution(images).flatten(2).mT
        x = x + self.first(x)
        return x + self.second(self.change(x))

    def change(self, x: Tensor) -> Tensor:
        return x


class Turned(Patches):
    """A model whose second layer has its tokens in another order, with a class token."""

    def change(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(len(x), 1, 8), x.flip(1)], 1)[:, :6]


class Pooled(Patches):
    """A model whose second layer sees the mean of all tokens in each token."""

    def change(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def test_layers_in_another_order_have_their_own_grids() -> None:
    grids = regard.locate(Turned().eval(), pixels, [GREY])
    assert list(grids["first"][0].tokens) == [0, 1, 2, 3, 4, 5]
    places = {
        token: tuple(box)
        for grid in grids["second"]
        for token, box in zip(grid.tokens, grid.boxes(48, 32).tolist(), strict=True)
    }
    assert 0 not in places
    assert places[1] == (32, 16, 48, 32)
    assert places[5] == (16, 0, 32, 16)


def test_tokens_that_depend_on_the_whole_picture_have_no_place() -> None:
    grids = regard.locate(Pooled().eval(), pixels, [GREY])
    assert list(grids) == ["first"]


def test_overlapping_fields_have_boxes_around_their_centres() -> None:
    model = Patches(kernel=8, stride=4, padding=2).eval()
    [grid] = regard.locate(model, pixels, [GREY])["first"]
    assert (grid.rows, grid.columns, grid.overlapping) == (8, 12, True)
    # The field of token 0 are pixels -2 to 6, whose centre is 2: its box is 0 to 4.
    torch.testing.assert_close(
        grid.boxes(48, 32)[[0, 13]],
        torch.tensor([[0.0, 0, 4, 4], [4, 4, 8, 8]]),
        atol=0.2,  # pixels: boxes are measured by levels of 8 bits
        rtol=0,
    )


def test_the_model_is_as_it_was_before() -> None:
    model = Patches().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = model(pixels([GREY]))
    regard.locate(model, pixels, [GREY])
    assert torch.equal(model(pixels([GREY])), before)
    assert all(torch.equal(state[name], each) for name, each in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def padded(pictures: list[Any]) -> Tensor:
    return pixels([ImageOps.pad(each, (48, 48), color="black") for each in pictures])


def test_boxes_follow_padding() -> None:
    picture = Image.new("RGB", (96, 64), "grey")
    [grid] = regard.locate(Patches().eval(), padded, [picture])["first"]
    # 96 x 64 becomes 48 x 32 between bars of 8 pixels, 16 of the original.
    torch.testing.assert_close(
        grid.boxes(96, 64)[0], torch.tensor([0.0, -16, 32, 16]), atol=0.2, rtol=0
    )
    assert (grid.rows, grid.columns) == (3, 3)


def test_boxes_follow_crops_flips_and_sizes() -> None:
    def cut(pictures: list[Any]) -> Tensor:
        return pixels([each.crop((8, 0, 40, 32)).resize((64, 64)) for each in pictures])

    [grid] = regard.locate(Patches().eval(), cut, [GREY])["first"]
    torch.testing.assert_close(
        grid.boxes(48, 32)[[0, -1]],
        torch.tensor([[8.0, 0, 16, 8], [32, 24, 40, 32]]),
        atol=0.1,
        rtol=0,
    )

    def mirrored(pictures: list[Any]) -> Tensor:
        return pixels([ImageOps.mirror(each) for each in pictures])

    [grid] = regard.locate(Patches().eval(), mirrored, [GREY])["first"]
    assert list(grid.tokens) == [2, 1, 0, 5, 4, 3]


def located(case: Case, pictures: list[Any]) -> regard.Recording:
    with torch.no_grad(), regard.observe(case.model) as seen:
        case.model(**case.prepare(pictures))
    return seen.with_pictures(pictures, regard.locate(case.model, case.prepare, pictures))


@pytest.mark.filterwarnings("ignore")
def test_two_pictures_of_different_sizes_have_a_grid_each() -> None:
    case = case_of("qwen2_vl")
    pictures = [Image.new("RGB", size, "grey") for size in ((120, 60), (48, 96))]
    seen = located(case, pictures)
    one, other = seen.layer_grids("model.language_model.layers.1.self_attn")
    sizes = (case.prepare(pictures)["image_grid_thw"][:, 1:] // 2).tolist()
    assert [(each.picture, each.box) for each in (one, other)] == [(0, None), (1, None)]
    assert [[each.rows, each.columns] for each in (one, other)] == sizes
    part = seen.part(["model.language_model.layers.1.self_attn"])
    x0, y0, x1, y1 = part.boxes[other.tokens[-1]].tolist()
    expected = (48 - 48 / other.columns, 96 - 96 / other.rows, 48, 96)
    assert (x0, y0, x1, y1) == pytest.approx(expected)
    assert part.image(0, query=-1).shape == (len(one.tokens) + len(other.tokens),)
    assert part.image(0, query=-1, grid=1).shape == (other.rows, other.columns)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["dinov2_with_registers", "qwen2_vl"])
def test_places_in_bfloat16_are_those_of_float32(name: str) -> None:
    case = case_of(name)
    picture = Image.new("RGB", (120, 60), "grey")
    exact = regard.locate(case.model, case.prepare, [picture])
    model = case.model.bfloat16()

    def prepare(pictures: list[Any]) -> Any:
        inputs = case.prepare(pictures)
        return {
            key: each.bfloat16() if each.is_floating_point() else each
            for key, each in inputs.items()
        }

    rounded = regard.locate(model, prepare, [picture])
    assert list(rounded) == list(exact)
    for layer, grids in exact.items():
        for one, other in zip(rounded[layer], grids, strict=True):
            assert (one.tokens, one.picture) == (other.tokens, other.picture)
            box, expected = one.boxes(120, 60), other.boxes(120, 60)
            torch.testing.assert_close(box, expected, atol=0.5, rtol=0)


def by_content(pictures: list[Any]) -> Tensor:
    box = pictures[0].convert("L").point(lambda level: 255 * (level > 9)).getbbox()
    return pixels([pictures[0].crop(box or (0, 0, 1, 1))])


def brightened(pictures: list[Any]) -> Tensor:
    return pixels(pictures) ** 2


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no pictures": (
        lambda: regard.locate(Patches().eval(), pixels, []),
        TypeError,
        "pictures is a list; it must be a list of images of Pillow.",
    ),
    "training": (
        lambda: regard.locate(Patches(), pixels, [GREY]),
        regard.RegardError,
        "model is in training mode, in which it answers differently each time.",
    ),
    "a text only": (
        lambda: regard.locate(Patches().eval(), lambda _: torch.zeros(1, 3, 32, 48), [GREY]),
        regard.RegardError,
        "prepare gives inputs that do not depend on the pictures.",
    ),
    "whole numbers": (
        lambda: regard.locate(
            Patches().eval(), lambda each: (pixels(each) * 255).to(torch.uint8), [GREY]
        ),
        regard.RegardError,
        "prepare gives pixels as whole numbers; places are measured by gradients, which those have "
        "not.",
    ),
    "a crop by content": (
        lambda: regard.locate(Patches().eval(), by_content, [GREY]),
        regard.RegardError,
        "prepare gives an input of shape (1, 3, 32, 48), and (1, 3, 1, 1) for another picture of "
        "this size; it depends on the content.",
    ),
    "another brightness": (
        lambda: regard.locate(Patches().eval(), brightened, [GREY]),
        regard.RegardError,
        "prepare mixes pictures, or changes the brightness of one by its content, so that no "
        "places can be measured.",
    ),
    "a picture of one pixel": (
        lambda: regard.locate(Patches().eval(), pixels, [Image.new("RGB", (1, 1))]),
        regard.RegardError,
        "pictures has one of 1 x 1 pixels; places are measured by pixels, of which 16 x 16 are "
        "needed.",
    ),
    "tokens of the whole picture": (
        lambda: regard.locate(
            nn.Sequential(
                nn.Flatten(),
                nn.Linear(4608, 40),
                nn.Unflatten(1, (5, 8)),
                regard.nn.SelfAttention(8),
            ).eval(),
            pixels,
            [GREY],
        ),
        regard.RegardError,
        "no layer of the model has keys that stand for parts of a picture",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        call()
