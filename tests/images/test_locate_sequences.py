"""`regard.locate` on frames of a video and shifted windows, and `image` on a generated answer."""

from itertools import product
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

import regard
from small_transformers import build
from vision_models import Case, case_of, qwen_processor, without_mixing

pytestmark = pytest.mark.filterwarnings("ignore")

VIDEO_MODELS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def video_case(model_type: str) -> Case:
    """A model that reads frames as its video processor gives them.

    The processor itself needs torchvision. It lays out each pair of frames as that of images lays
    out one, which it repeats in place of the second frame.
    """
    model = build(model_type)
    config = model.config
    vision = config.vision_config
    processor = qwen_processor(vision)
    patch = vision.patch_size

    def prepare(frames: list[Any]) -> Any:
        images = processor(images=frames, return_tensors="pt")
        count, sizes = len(frames), images["image_grid_thw"][0]
        each = images["pixel_values"].view(count // 2, 2, -1, 3, 2, patch * patch)
        pairs = torch.stack([each[:, 0, :, :, 0], each[:, 1, :, :, 0]], -2)
        steps = sizes.new_tensor([count // 2, *sizes[1:]])
        tokens = [config.video_token_id] * (int(sizes[1:].prod()) // vision.spatial_merge_size**2)
        ids = [5]
        if model_type == "qwen3_vl":  # each step is a part of the text, after its time
            for _ in range(count // 2):
                ids += [4, config.vision_start_token_id, *tokens, config.vision_end_token_id]
        else:
            frames_ids = tokens * (count // 2)
            ids += [config.vision_start_token_id, *frames_ids, config.vision_end_token_id]
        text = torch.tensor([[*ids, 6, 7]])
        return {
            "pixel_values_videos": pairs.flatten(0, 1).flatten(1),
            "video_grid_thw": steps[None],
            "input_ids": text,
            "attention_mask": torch.ones_like(text),
            "mm_token_type_ids": 2 * (text == config.video_token_id).long(),
        }

    return Case(model, prepare)


def values(case: Case, pictures: list[Any]) -> dict[str, Tensor]:
    """The value of each key, (kv_len, numbers), by the name of the layer."""
    with torch.no_grad(), regard.observe(case.model, keep="qkv") as seen:
        case.model(**case.prepare(pictures))
    return {
        layer.name: layer.whole_value().flatten(0, -3).transpose(0, 1).flatten(1)
        for layer in seen.layers
    }


@pytest.mark.full
@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_a_frame_of_a_video_is_a_picture(name: str) -> None:
    case, twin = video_case(name), video_case(name)
    without_mixing(twin.model)
    frames = [Image.new("RGB", (96, 64), level) for level in ("grey", "navy", "olive", "teal")]
    grids = regard.locate(case.model, case.prepare, frames)
    last = "model.language_model.layers.1.self_attn"
    # Two frames are one step: its tokens have the place of the first.
    for layer in (last, "model.language_model.layers.0.self_attn"):
        assert [grid.picture for grid in grids[layer]] == [0, 2]
    vision = [each for each in grids if ".visual." in each]
    assert [[grid.picture for grid in grids[each]] for each in vision] == [[0], [2], [0], [2]]
    before = values(twin, frames)
    for frame, grid in product(range(4), grids[last]):
        x0, y0, x1, y1 = grid.boxes(96, 64)[grid.columns + 1].tolist()
        other = list(frames)
        other[frame] = frames[frame].copy()
        inner = [x0 + 0.4 * (x1 - x0), y0 + 0.4 * (y1 - y0)]
        other[frame].paste("white", (*map(round, inner), round(inner[0]) + 1, round(inner[1]) + 1))
        changed = (values(twin, other)[last] != before[last]).any(-1).nonzero().flatten().tolist()
        is_shown = grid.picture == frame - frame % 2
        assert (changed == [grid.tokens[grid.columns + 1]]) == is_shown


@pytest.mark.full
def test_each_picture_of_a_vision_encoder_has_its_own_layer() -> None:
    case = case_of("qwen2_vl")
    pictures = [Image.new("RGB", (96, 64), level) for level in ("grey", "navy", "olive")]
    grids = regard.locate(case.model, case.prepare, pictures)
    vision = [each for each in grids if ".visual." in each]
    assert len(vision) == 6
    assert [[grid.picture for grid in grids[each]] for each in vision] == [[0], [1], [2]] * 2
    language = grids["model.language_model.layers.1.self_attn"]
    assert [grid.picture for grid in language] == [0, 1, 2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_a_shifted_window_stands_for_the_patches_that_it_reads(name: str) -> None:
    torch.manual_seed(0)
    kind = {"swin": transformers.SwinConfig, "swinv2": transformers.Swinv2Config}[name]
    sizes = {"image_size": 64, "patch_size": 4, "window_size": 4, "embed_dim": 16}
    config = kind(**sizes, depths=[2, 2], num_heads=[2, 2])
    model = transformers.AutoModel.from_config(config).eval()
    processor = transformers.ViTImageProcessorPil(size={"height": 64, "width": 64})
    blocks: list[Any] = [
        (path, block)
        for path, block in model.named_modules()
        if hasattr(block, "shift_size") and hasattr(block, "window_size")
    ]
    picture = Image.new("RGB", (64, 64), "grey")
    grids = regard.locate(
        model, lambda each: processor(images=each, return_tensors="pt"), [picture]
    )
    assert [block.shift_size for _, block in blocks] == [0, 2, 0, 2]
    for path, block in blocks:
        rows, columns = block.input_resolution
        window, shift = block.window_size, block.shift_size
        patches = torch.arange(rows * columns).view(rows, columns).roll((-shift, -shift), (0, 1))
        windows = patches.unfold(0, window, window).unfold(1, window, window).reshape(-1, window**2)
        [layer] = [each for each in grids if each.startswith(f"{path}.")]
        side = 64 / columns
        places = {
            (grid.entry, token): box
            for grid in grids[layer]
            for token, box in zip(grid.tokens, grid.boxes(64, 64).tolist(), strict=True)
        }
        assert len(places) == rows * columns
        for (entry, token), box in places.items():
            row, column = divmod(int(windows[entry, token]), columns)
            expected = (side * column, side * row, side * (column + 1), side * (row + 1))
            assert box == pytest.approx(expected, abs=0.1 * side)


def test_each_step_of_an_answer_looks_at_the_picture(subtests: pytest.Subtests) -> None:
    case = case_of("llava")
    photo = Image.effect_noise((64, 48), 60).convert("RGB")
    inputs, options = case.prepare([photo]), {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), regard.observe(case.model) as seen:
        ids = case.model.generate(**inputs, **options)
    seen = seen.with_pictures([photo], regard.locate(case.model, case.prepare, [photo]))
    case.model.set_attn_implementation("eager")
    dense = case.model.generate(
        **inputs, **options, output_attentions=True, return_dict_in_generate=True
    )
    assert torch.equal(dense.sequences, ids)
    length = inputs["input_ids"].shape[1]
    name = "model.language_model.layers.1.self_attn"
    [grid] = seen.layer_grids(name)
    for step, weights in enumerate(dense.attentions[1:]):
        row = weights[1][0, :, 0, list(grid.tokens)].mean(0)
        with subtests.test(step=step):
            answer = seen.image(name, query=length + step)
            assert answer.shape == (grid.rows, grid.columns)
            torch.testing.assert_close(answer.flatten(), row, atol=1e-5, rtol=0)
