"""Small vision and vision-language models with random weights, and the processors of their kinds.

Each case is a function that returns a model and a function from pictures to its inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from small_transformers import build

__all__ = ["ENCODERS", "LANGUAGE_MODELS", "Case", "case_of", "without_mixing"]

WORDS = 99
BEFORE, AFTER = [5], [6, 7]
"""The ids of the words around a picture."""


class Case(NamedTuple):
    """A model and its processor.

    Attributes:
        model: the model.
        prepare: the function from pictures to inputs.
    """

    model: Any
    prepare: Callable[[list[Any]], Any]


ENCODERS = (
    *("vit", "deit", "beit", "data2vec-vision", "dinov2", "dinov2_with_registers", "ijepa"),
    *("clip_vision_model", "chinese_clip_vision_model", "siglip_vision_model", "vit_msn", "yolos"),
    *("dpt", "aimv2_vision_model", "mlcd_vision_model", "pixio", "vitdet", "swin", "swinv2"),
)
"""Model types that read a picture only."""


def _encoder(model_type: str) -> Case:
    model = build(model_type)
    size = model.config.image_size
    size = size if isinstance(size, int) else size[0]
    name = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {}).get("pil")
    kind = getattr(transformers, name or "CLIPImageProcessorPil")
    options = {"do_center_crop": False} if "crop_size" in kind.valid_kwargs.__annotations__ else {}
    processor = kind(size={"height": size, "width": size}, **options)

    def prepare(pictures: list[Any]) -> Any:
        return {"pixel_values": processor(images=pictures, return_tensors="pt")["pixel_values"]}

    return Case(model, prepare)


def tokenizer(named: dict[str, int]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0 to w98, some of which are special tokens instead."""
    names = {number: name for name, number in named.items()}
    vocabulary = {names.get(number, f"w{number}"): number for number in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "w0", "pad_token": "w1", "bos_token": "w2", "eos_token": "w3"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=list(named), **special
    )


def _with_text(inputs: Any, ids: list[int]) -> dict[str, Any]:
    """Return the inputs of a language model: those of a picture with the ids of one text."""
    text = torch.tensor([ids])
    return {**inputs, "input_ids": text, "attention_mask": torch.ones_like(text)}


def _llava() -> Case:
    model = build("llava")
    config = model.config
    vision = config.vision_config
    side = vision.image_size
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer({"<image>": config.image_token_id}),
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = "w5 <image> w6 w7"
    return Case(model, lambda each: processor(images=each, text=text, return_tensors="pt"))


def _llava_next() -> Case:
    model = build("llava_next")
    config = model.config
    vision = config.vision_config
    side = vision.image_size
    config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=config.image_grid_pinpoints,
    )
    processor = transformers.LlavaNextProcessor(
        images,
        tokenizer({"<image>": config.image_token_id}),
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = "w5 <image> w6 w7"
    return Case(model, lambda each: processor(images=each, text=text, return_tensors="pt"))


def qwen_processor(vision: Any) -> Any:
    """The image processor for the config of a Qwen vision model, with small pictures."""
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    )


def _qwen(model_type: str) -> Case:
    model = build(model_type)
    config = model.config
    vision = config.vision_config
    processor = qwen_processor(vision)

    def prepare(pictures: list[Any]) -> Any:
        inputs = processor(images=pictures, return_tensors="pt")
        ids = list(BEFORE)
        for sizes in inputs["image_grid_thw"]:
            count = int(sizes.prod()) // vision.spatial_merge_size**2
            picture = [config.image_token_id] * count
            ids += [config.vision_start_token_id, *picture, config.vision_end_token_id]
        kinds = [[int(each == config.image_token_id) for each in [*ids, *AFTER]]]
        return _with_text(inputs, ids + AFTER) | {"mm_token_type_ids": torch.tensor(kinds)}

    return Case(model, prepare)


def _idefics(model_type: str, processor_kind: Any) -> Case:
    model = build(model_type)
    config = model.config
    vision = config.vision_config
    processor = processor_kind(
        size={"longest_edge": 2 * vision.image_size},
        max_image_size={"longest_edge": vision.image_size},
    )
    tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2

    def prepare(pictures: list[Any]) -> Any:
        inputs = processor(images=pictures, return_tensors="pt")
        tiles = inputs["pixel_values"].shape[1]
        names = ("pixel_values", "pixel_attention_mask")
        image = [config.image_token_id] * (tiles * tokens)
        return _with_text({name: inputs[name] for name in names}, BEFORE + image + AFTER)

    return Case(model, prepare)


def _internvl() -> Case:
    model = build("internvl")
    config = model.config
    side, patch = config.vision_config.image_size[0], config.vision_config.patch_size[0]
    size = {"height": side, "width": side}
    processor = transformers.GotOcr2ImageProcessorPil(
        size=size, crop_to_patches=True, min_patches=1, max_patches=6
    )
    tokens = int((side // patch) ** 2 * config.downsample_ratio**2)

    def prepare(pictures: list[Any]) -> Any:
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        image = [config.image_token_id] * (tokens * len(pixels))
        return _with_text({"pixel_values": pixels}, BEFORE + image + AFTER)

    return Case(model, prepare)


def _blip() -> Case:
    model = build("blip")
    side = model.config.vision_config.image_size
    processor = transformers.BlipImageProcessorPil(size={"height": side, "width": side})

    def prepare(pictures: list[Any]) -> Any:
        return _with_text(processor(images=pictures, return_tensors="pt"), [2, *BEFORE, *AFTER])

    return Case(model, prepare)


def _paligemma() -> Case:
    model = build("paligemma")
    config = model.config
    vision = config.vision_config
    side = vision.image_size
    processor = transformers.SiglipImageProcessorPil(size={"height": side, "width": side})
    image = [config.image_token_id] * (side // vision.patch_size) ** 2

    def prepare(pictures: list[Any]) -> Any:
        inputs = _with_text(processor(images=pictures, return_tensors="pt"), [*image, 2, *AFTER])
        return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}

    return Case(model, prepare)


def _gemma3() -> Case:
    model = build("gemma3")
    config = model.config
    vision = config.vision_config
    side = vision.image_size
    processor = transformers.Gemma3ImageProcessorPil(size={"height": side, "width": side})
    image = [config.image_token_id] * model.config.mm_tokens_per_image

    def prepare(pictures: list[Any]) -> Any:
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        ids = BEFORE + image + AFTER
        kinds = torch.tensor([[int(each == config.image_token_id) for each in ids]])
        return _with_text({"pixel_values": pixels}, ids) | {"token_type_ids": kinds}

    return Case(model, prepare)


def _mistral3() -> Case:
    model = build("mistral3")
    config = model.config
    patch = config.vision_config.patch_size
    merged = patch * config.spatial_merge_size
    processor = transformers.PixtralImageProcessorPil(
        size={"longest_edge": 64}, patch_size={"height": merged, "width": merged}
    )

    def prepare(pictures: list[Any]) -> Any:
        inputs = processor(images=pictures, return_tensors="pt")
        count = sum(int(h // merged) * int(w // merged) for h, w in inputs["image_sizes"])
        return _with_text(inputs, BEFORE + [config.image_token_id] * count + AFTER)

    return Case(model, prepare)


LANGUAGE_MODELS: dict[str, Callable[[], Case]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "idefics3": lambda: _idefics("idefics3", transformers.Idefics3ImageProcessorPil),
    "smolvlm": lambda: _idefics("smolvlm", transformers.SmolVLMImageProcessorPil),
    "internvl": _internvl,
    "blip": _blip,
    "paligemma": _paligemma,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
}
"""Model types that read a picture and a text."""


def case_of(name: str) -> Case:
    """Return the case of a model type."""
    return LANGUAGE_MODELS[name]() if name in LANGUAGE_MODELS else _encoder(name)


OUTPUTS = {"o_proj", "out_proj", "proj", "projection", "projection_layer", "dense"}
"""The last names of the modules that attention ends with."""


@torch.no_grad()
def without_mixing(model: torch.nn.Module) -> None:
    """Let no attention of a model mix tokens: set the weights and biases of its outputs to zero."""
    for name, parameter in model.named_parameters():
        *path, _ = name.split(".")
        if path and path[-1] in OUTPUTS and any("att" in each for each in path[:-1]):
            parameter.zero_()
