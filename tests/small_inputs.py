"""Inputs for the small models of small_transformers: text, pictures, sounds and others."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

WIDTH = 64
"""The number of features of a token in small models."""

WITH_PICTURES = frozenset(
    {
        "aimv2",
        "altclip",
        "blip",
        "bridgetower",
        "chinese_clip",
        "clip",
        "clipseg",
        "groupvit",
        "idefics",
        "metaclip_2",
        "owlv2",
        "owlvit",
        "siglip",
        "vilt",
        "vision-text-dual-encoder",
        "xclip",
    }
)
"""Types that read text and a picture together."""


ONE_CHANNEL = frozenset(
    {
        "dac",
        "encodec",
        "mimi",
        "mimi_encoder",
        "pe_audio",
        "pe_audio_encoder",
        "pocket_tts_audio_tokenizer",
        "pocket_tts_audio_tokenizer_encoder",
    }
)
"""Types that read sounds as (batch, channels, time)."""

PAIRS = {"lightglue", "superglue", "efficientloftr"}
"""Types that read two pictures together."""

VIDEOS = {"timesformer", "videomae", "vivit", "xclip"}
"""Types whose pixel_values are videos."""

NAMES = {
    "layoutlmv3": "input_ids bbox",
    "lilt": "input_ids bbox",
    "bros": "input_ids bbox",
    "udop": "input_ids bbox decoder_input_ids",
    "audio-spectrogram-transformer": "spectra",
    "siglip2": "input_ids flat_pictures",
    "siglip2_vision_model": "flat_pictures",
    "pp_formulanet": "pixel_values decoder_input_ids",
    "sam3": "input_ids pixel_values",
    "sam3_lite_text": "input_ids pixel_values",
    "speech-encoder-decoder": "input_values decoder_input_ids",
    "qwen3_omni_moe_talker_code_predictor": "inputs_embeds",
    "lxmert": "input_ids visual_feats",
    "informer": "series",
    "time_series_transformer": "series",
    "blip_2_qformer": "query_embeds",
    "bridgetower_vision_model": "image",
    "dia": "input_ids codes",
    "dia_decoder": "codes encoder_hidden_states",
    "musicgen_decoder": "codebooks",
    "musicgen_melody_decoder": "codebooks",
    "kyutai_speech_to_text": "text_and_codes",
    "florence_vision": "pictures_as_hidden_states",
    "qwen3_omni_moe_talker_text": "inputs_embeds",
    "t5gemma2_decoder": "input_ids encoder_hidden_states",
    "timesfm2_5": "flat_series",
    "rag": "input_ids context_input_ids",
    "clap": "input_ids flat_sounds",
    "clap_audio_model": "flat_sounds",
    "idefics": "input_ids image_sequences",
    "musicgen": "input_ids decoder_codebooks",
    "musicgen_melody": "input_ids decoder_codebooks",
    "timesfm": "flat_series freq",
    "minicpm_ocr_vision": "target_sizes",
    "minicpmv4_6_vision": "target_sizes",
    "minicpmv4_7_vision": "target_sizes",
    "qwen2_5_omni_audio_encoder": "feature_lens",
    "audioflamingo3_encoder": "input_features whole_features_mask",
}
"""The inputs of types whose signature does not tell them."""

TIME_FIRST = {"speech_to_text", "wav2vec2-bert"}
"""Types that read sounds as (batch, time, features) though they have positions for sounds."""


def inputs_of(model: Any, padding: str | None = None) -> dict[str, Any]:
    """Return inputs of a model: a batch of two, and nine tokens if it reads text.

    Args:
        model: a model that ``build`` returned.
        padding: "left" or "right" masks four tokens of the second text; None passes no mask.
    """
    return _Inputs(model, padding).of()


class _Inputs:
    """The inputs of a model, by the names in the signature of its forward."""

    def __init__(self, model: Any, padding: str | None) -> None:
        self.model, self.padding = model, padding
        self.type = model.config.model_type
        self.parameters = dict(inspect.signature(model.forward).parameters)
        self.random = torch.Generator().manual_seed(1)

    def of(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        for name in self.names():
            if not hasattr(self, f"_{name}"):
                raise NotImplementedError(f"no input is known for {name}")
            inputs |= getattr(self, f"_{name}")()
        return inputs

    def names(self) -> list[str]:
        if self.type in NAMES:
            return NAMES[self.type].split()
        main = self.model.main_input_name
        main = [main] if isinstance(main, str) else main
        needed = [
            name
            for name, each in self.parameters.items()
            if each.default is inspect.Parameter.empty and each.kind is not each.VAR_KEYWORD
        ]
        if "input_ids" in self.parameters and (not needed or needed == ["input_ids"]):
            names = ["input_ids"] if main[0] in ("input_ids", "pixel_values") else main
        else:
            names = needed or [name for name in main if name in self.parameters]
            names = names or [next(iter(self.parameters))]
        if self.type in WITH_PICTURES:
            names = ["input_ids", "pixel_values", *(set(names) - {"input_ids", "pixel_values"})]
        if "decoder_input_ids" in self.parameters:
            names = [*names, "decoder_input_ids"]
        return sorted(dict.fromkeys(names))

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def _ids(self, *shape: int, low: int = 10, high: int = 60) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def _size(self, *names: str, default: int) -> int:
        """Return the first size that a configuration, or one inside it, has."""
        for name in names:
            for value in _values(self.model.config, name):
                if isinstance(value, int):
                    return value
                if isinstance(value, list | tuple) and isinstance(value[0], int):
                    return value[0]
        return default

    def _padded(self, mask: str, length: int) -> dict[str, Tensor]:
        if self.padding is None or mask not in self.parameters:
            return {}
        ones = torch.ones(2, length, dtype=torch.int64)
        ones[1, slice(-4, None) if self.padding == "right" else slice(4)] = 0
        return {mask: ones}

    def _input_ids(self) -> dict[str, Any]:
        return {"input_ids": self._ids(2, 9)} | self._padded("attention_mask", 9)

    def _decoder_input_ids(self) -> dict[str, Any]:
        return {"decoder_input_ids": self._ids(2, 5)} | self._padded("decoder_attention_mask", 5)

    def _inputs_embeds(self) -> dict[str, Any]:
        return {"inputs_embeds": self._noise(2, 9, WIDTH)} | self._padded("attention_mask", 9)

    def _bbox(self) -> dict[str, Any]:
        corners = torch.tensor([1, 2, 11, 12]).expand(2, 9, 4) + torch.arange(9)[:, None]
        return {"bbox": corners / 50 if self.type == "udop" else corners}

    def _picture(self) -> Tensor:
        side = self._size("image_size", default=32)
        return self._noise(2, self._size("num_channels", "in_channels", default=3), side, side)

    def _pixel_values(self) -> dict[str, Any]:
        if self.type in PAIRS:
            return {"pixel_values": self._noise(2, 2, 3, 64, 64)}
        if self.type in VIDEOS:
            return {"pixel_values": self._video()}
        if "grid_thw" in self.parameters or "image_grid_thw" in self.parameters:
            return {"pixel_values": self._patches()}
        return {"pixel_values": self._picture()}

    def _video(self) -> Tensor:
        side = self._size("image_size", default=32)
        frames = self._size("num_frames", "frames_per_clip", default=4)
        return self._noise(2, frames, self._size("num_channels", default=3), side, side)

    def _pixel_values_videos(self) -> dict[str, Any]:
        return {"pixel_values_videos": self._video()}

    def _patches(self) -> Tensor:
        side = self._size("patch_size", default=8)
        channels = self._size("num_channels", "in_channels", "in_chans", default=3)
        times = self._size("temporal_patch_size", default=1)
        return self._noise(32, channels * times * side * side)

    def _hidden_states(self) -> dict[str, Any]:
        if "grid_thw" in self.parameters:
            return {"hidden_states": self._patches()}
        return {"hidden_states": self._noise(2, 9, WIDTH)} | self._padded("attention_mask", 9)

    def _grid_thw(self) -> dict[str, Any]:
        return {"grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}

    def _input_values(self) -> dict[str, Any]:
        if self.type in ONE_CHANNEL:
            return {"input_values": self._noise(2, 1, 3840)}
        return {"input_values": self._noise(2, 1600)} | self._padded_sound("attention_mask", 1600)

    def _padded_sound(self, mask: str, length: int) -> dict[str, Tensor]:
        if self.padding != "right" or mask not in self.parameters:
            return {}
        ones = torch.ones(2, length, dtype=torch.int64)
        ones[1, length // 2 :] = 0
        return {mask: ones}

    def _input_features(self) -> dict[str, Any]:
        bins = self._size(
            "num_mel_bins",
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "input_dim",
            "input_feat_size",
            "feature_size",
            default=80,
        )
        if (
            next(_values(self.model.config, "max_source_positions"), None)
            and self.type not in TIME_FIRST
        ):
            length = 2 * self._size("max_source_positions", default=64)
            return {"input_features": self._noise(2, bins, length)}
        return {"input_features": self._noise(2, 64, bins)} | self._padded_sound(
            "attention_mask", 64
        )

    def _spectra(self) -> dict[str, Any]:
        length, bins = self._size("max_length", default=64), self._size("num_mel_bins", default=128)
        return {"input_values": self._noise(2, length, bins)}

    def _flat_pictures(self) -> dict[str, Any]:
        side = self._size("patch_size", default=8)
        mask = torch.ones(2, 16, dtype=torch.int64)
        return {
            "pixel_values": self._noise(2, 16, 3 * side * side),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        }

    def _codes(self) -> dict[str, Any]:
        name = "decoder_input_ids" if "decoder_input_ids" in self.parameters else "input_ids"
        return {name: self._ids(2, 5, self._size("num_channels", default=9))}

    def _codebooks(self) -> dict[str, Any]:
        return {"input_ids": self._ids(2 * self._size("num_codebooks", default=4), 9)}

    def _decoder_codebooks(self) -> dict[str, Any]:
        return {"decoder_input_ids": self._ids(2 * self._size("num_codebooks", default=4), 5)}

    def _freq(self) -> dict[str, Any]:
        zeros = torch.zeros(2, 64, dtype=torch.int64)
        return {"past_values_padding": zeros, "freq": zeros[:, :1]}

    def _text_and_codes(self) -> dict[str, Any]:
        return {"input_ids": self._ids(2, 9, 1 + self._size("num_codebooks", default=8))}

    def _pictures_as_hidden_states(self) -> dict[str, Any]:
        return {"hidden_states": self._picture()}

    def _encoder_hidden_states(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self._noise(2, 7, WIDTH)}

    def _flat_series(self) -> dict[str, Any]:
        return {"past_values": self._noise(2, 64)}

    def _flat_sounds(self) -> dict[str, Any]:
        side = self._size("spec_size", default=64)
        bins = self._size("num_mel_bins", default=64)
        is_longer = torch.zeros(2, 1, dtype=torch.bool)
        return {"input_features": self._noise(2, 1, side, bins), "is_longer": is_longer}

    def _image_sequences(self) -> dict[str, Any]:
        return {
            "pixel_values": self._picture()[:, None],
            "image_attention_mask": torch.ones(2, 9, 1, dtype=torch.int64),
        }

    def _audio_mel(self) -> dict[str, Any]:
        bins = self._size("input_feat_size", default=64)
        return {"audio_mel": self._noise(2, 64, bins)}

    def _audio_mel_mask(self) -> dict[str, Any]:
        return {"audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool)}

    def _spectrogram(self) -> dict[str, Any]:
        return {"spectrogram": self._noise(2, 20, self._size("model_in_dim", default=64))}

    def _latents(self) -> dict[str, Any]:
        return {"latents": self._noise(2, self._size("hidden_size", default=WIDTH), 9)}

    def _states(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "states": self._noise(2, 5, config.state_dim),
            "actions": self._noise(2, 5, config.act_dim),
            "rewards": self._noise(2, 5, 1),
            "returns_to_go": self._noise(2, 5, 1),
            "timesteps": torch.arange(5).expand(2, 5),
        } | self._padded("attention_mask", 5)

    def _task_inputs(self) -> dict[str, Any]:
        return {"task_inputs": self._ids(2, self._size("task_seq_len", default=8))}

    def _inputs(self) -> dict[str, Any]:
        return {"inputs": self._noise(2, 7, self._size("d_model", default=WIDTH))}

    def _mask(self) -> dict[str, Any]:
        return {"mask": None}

    def _audio_input_ids(self) -> dict[str, Any]:
        return {"audio_input_ids": self._ids(2, 5, self._size("n_mel_bins", default=80))}

    def _target_sizes(self) -> dict[str, Any]:
        side = self._size("patch_size", default=8)
        return {
            "pixel_values": self._noise(1, 3, side, 2 * 16 * side),
            "target_sizes": torch.tensor([[4, 4], [4, 4]]),
        }

    def _feature_lens(self) -> dict[str, Any]:
        bins = self._size("num_mel_bins", default=80)
        return {
            "input_features": self._noise(bins, 80),
            "feature_lens": torch.tensor([40, 40]),
        }

    def _context_input_ids(self) -> dict[str, Any]:
        documents = self._size("n_docs", default=5)
        return {
            "context_input_ids": self._ids(2 * documents, 7),
            "context_attention_mask": torch.ones(2 * documents, 7, dtype=torch.int64),
            "doc_scores": self._noise(2, documents),
        }

    def _visual_feats(self) -> dict[str, Any]:
        width = self._size("visual_feat_dim", default=WIDTH)
        return {"visual_feats": self._noise(2, 5, width), "visual_pos": self._noise(2, 5, 4)}

    def _query_embeds(self) -> dict[str, Any]:
        width = self._size("encoder_hidden_size", default=WIDTH)
        return {
            "query_embeds": self._noise(2, 5, WIDTH),
            "encoder_hidden_states": self._noise(2, 7, width),
        }

    def _image(self) -> dict[str, Any]:
        return {"image": self._picture()}

    def _merge_sizes(self) -> dict[str, Any]:
        return {"merge_sizes": torch.tensor([1, 1])}

    def _flattened_patches(self) -> dict[str, Any]:
        side = self._size("patch_size", default=8)
        places = torch.arange(1.0, 9.0).expand(2, 2, 8).mT
        return {"flattened_patches": torch.cat((places, self._noise(2, 8, 3 * side * side)), -1)}

    def _series(self) -> dict[str, Any]:
        config = self.model.config
        past, future = config.context_length + max(config.lags_sequence), config.prediction_length
        features = config.num_time_features
        return {
            "past_values": self._noise(2, past),
            "past_time_features": self._noise(2, past, features),
            "past_observed_mask": torch.ones(2, past),
            "future_values": self._noise(2, future),
            "future_time_features": self._noise(2, future, features),
        }

    def _whole_features_mask(self) -> dict[str, Any]:
        length = 2 * self._size("max_source_positions", default=64)
        return {"input_features_mask": torch.ones(2, length, dtype=torch.int64)}

    def _past_values(self) -> dict[str, Any]:
        length = self._size("context_length", default=32)
        return {"past_values": self._noise(2, length, self._size("num_input_channels", default=1))}


def _values(config: PreTrainedConfig, name: str) -> Iterator[Any]:
    if getattr(config, name, None) is not None:
        yield getattr(config, name)
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            yield from _values(inner, name)
