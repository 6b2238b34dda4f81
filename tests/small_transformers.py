"""Every model type of transformers, with small sizes and random weights.

``build(model_type)`` returns a model of about 64 numbers a token and as many layers as it has kinds
of layers. What the general rules cannot make small is in ``OVERRIDES``.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from small_inputs import WIDTH, inputs_of

__all__ = ["TYPES", "build", "inputs_of", "model_class", "small_config"]

TYPES = sorted(transformers.CONFIG_MAPPING)
VOCABULARY = 99
LARGEST = 60_000_000
"""The number of parameters above which a model is not small."""

_Rule = Callable[[int], int]


def _at_most(limit: int) -> _Rule:
    return lambda number: min(number, limit)


def _power_of_two(number: int) -> int:
    return 4 if number >= 4 else min(2, number)


def _same(number: int) -> int:
    return number


RULES: tuple[tuple[str, _Rule], ...] = (
    (r"chunk_size_feed_forward|.*layerdrop|.*_loss.*|.*_cost|.*sampl(e|ing)_rate|seed", _same),
    (r"(.*_)?vocab_size|n_vocab|vocab_size_.*|unpadded_vocab_size", lambda _: VOCABULARY),
    (r"num_pos_feats", lambda _: WIDTH // 2),
    (r"num_queries|num_object_queries", _at_most(5)),
    (r".*(key_value|kv)_heads|multi_query_group_num", _at_most(2)),
    (r"(n_)?mamba_(n_|num_)?heads|mamba_num_heads|n_mamba_heads", _at_most(8)),
    (
        r".*(attention|attn|encoder|decoder|layer|index)_(n_)?heads|(num|n)_heads?|.*_heads",
        _power_of_two,
    ),
    (r"num_attention_heads_per.*", _power_of_two),
    (r"qk_rope_head_dim|qk_nope_head_dim|rope_head_dim|nope_head_dim|rotary_dim", _at_most(8)),
    (
        r".*head_dim|d_kv|d_head|kv_channels|head_size|attention_head_size|mamba_d_head",
        _at_most(16),
    ),
    (
        r"(.*_)?layers?|.*_hidden_layers|depth|num_blocks|.*_depth|n_layer|.*_num_layers",
        _at_most(2),
    ),
    (
        r"num_experts_per_tok(en)?|top_k|moe_topk|n_groups?|topk_group|moe_k|.*_topk|ssm_groups",
        _at_most(2),
    ),
    (r"(num|n)_.*experts|num_experts|moe_num_experts|n_experts", _at_most(4)),
    (r"first_k_dense_replace", _at_most(1)),
    (r"sliding_window|window|attention_window|local_window_size", _at_most(4)),
    (r".*max_position.*|n_positions|max_.*_positions|n_ctx|max_seq_len", _at_most(128)),
    (r"(vision_|pretrain_)?image_size|input_resolution|img_size", lambda _: 32),
    (r"(vision_)?patch_size|encoder_stride", _at_most(8)),
    (r"num_position_embeddings", lambda _: 16),
    (r"num_mel_bins|n_mels|.*kernel.*|.*stride.*", _same),
    (r".*", _at_most(WIDTH)),
)
"""The size of an attribute of a configuration, by its name; the first pattern that fits counts."""

UNSET = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "top_k_experts": 2,
    "num_local_experts": 4,
    "prediction_length": 4,
    "sliding_window": 4,
}
"""Sizes that some configurations leave None, and their models read."""

SAME_HEADS = (
    "num_key_value_heads",
    *(f"{each}_num_key_value_heads" for each in ("encoder", "decoder")),
)
"""Numbers of key heads that stay those of query heads, if they are by default."""

INDICES = re.compile(
    r".*ind(ex|ice|exe)s|.*_idxs|.*_ids|out_indices|vision_feature_layer|.*_layers|.*_blocks"
)
"""Names of lists of the positions of layers."""

KEPT = frozenset(
    {
        "bit",
        "d_fine",
        "deimv2",
        "dinov3_convnext",
        "efficientloftr",
        "hgnet_v2",
        "levit",
        "lightglue",
        "mobilevitv2",
        "pp_doclayout_v3",
        "pp_doclayout_v4",
        "pp_lcnet_v4",
        "pp_ocrv5_mobile_det",
        "rt_detr",
        "rt_detr_resnet",
        "rt_detr_v2",
        "slanet",
        "superglue",
        "superpoint",
    }
)
"""Convolutional models that are small enough, and whose many sizes depend on each other."""

TOKEN = re.compile(r".*token_(id|index|ids)|.*_token|.*_idx|.*_token_id_.*")
"""Names of special tokens."""

PER_LAYER = {"layer_types", "layers_block_type", "mlp_layer_types", "block_types"}
"""Names of lists with the kind of each layer."""

_TWO = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
_WINDOWS = {"image_size": 64, "patch_size": 4, "window_size": 2}
_ERNIE_ROPE = {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gemma3n_text": {
        "intermediate_size": 64,
        "activation_sparsity_pattern": None,
        "num_kv_shared_layers": 0,
    },
    "glm5_next_text": {"index_kpool": 2, "index_topk": 4},
    "deepseek_ocr2_text": _TWO,
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "gemma3": {"mm_tokens_per_image": 4},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 8)},
    "cvt": {"depth": (1, 2, 3)},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ernie4_5_vl_moe_text": {"rope_parameters": _ERNIE_ROPE},
    "nemotron3_5_asr": {"num_prompts": 128},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "swin": _WINDOWS,
    "donut-swin": _WINDOWS,
    "maskformer-swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "clap_audio_model": {
        "spec_size": 64,
        "window_size": 2,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "num_mel_bins": 32,
        "hidden_size": 512,
    },
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "markuplm": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024},
    "muse_spark_vision": {"in_channels": 6},
    "hrm_text": {"num_hidden_layers": 8, "num_layers_per_stack": 1, "layer_types": None},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "upernet": {"use_auxiliary_head": False},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},
    "lilt": {"hidden_size": 48, "intermediate_size": 48},
    "longcat_flash": {"head_dim": 8},
    "glmasr_encoder": {"num_mel_bins": 64},
    "voxtral_realtime_encoder": {"num_mel_bins": 64},
    "xmod": {"default_language": "en_XX"},
    "clvp_encoder": {"hidden_size": 128},
    "timesfm": {"patch_length": 32, "context_length": 64, "horizon_length": 32},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "fastspeech2_conformer": {"num_mel_bins": 64},
    "kyutai_speech_to_text": {"num_codebooks": 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "d_fine": {"num_queries": 5},
    "deimv2": {"num_queries": 5},
    "pp_doclayout_v3": {"num_queries": 5},
    "pp_doclayout_v4": {"num_queries": 5},
    "rt_detr": {"num_queries": 5},
    "rt_detr_v2": {"num_queries": 5},
}
"""Attributes of a configuration that replace those of the rules."""


def _small_int(name: str, number: int, ids: Iterator[int]) -> int:
    """Return a small size, or a token of the small vocabulary."""
    if TOKEN.fullmatch(name):
        return number if number < 10 else next(ids)
    return next(rule for pattern, rule in RULES if re.fullmatch(pattern, name))(number)


def _small_list(name: str, numbers: Any, ids: Iterator[int]) -> Any:
    """Return a list of small sizes, or of the first layers."""
    kind = type(numbers)
    if not all(type(each) is int for each in numbers):
        return numbers
    if name == "depths":
        return kind(1 for _ in numbers)
    if INDICES.fullmatch(name) and not TOKEN.fullmatch(name):
        return kind(dict.fromkeys(min(each, place) for place, each in enumerate(numbers[:2])))
    return kind(_small_int(name, each, ids) for each in numbers)


def small_config(model_type: str) -> PreTrainedConfig:
    """Return the configuration of a model type with small sizes."""
    default = transformers.CONFIG_MAPPING[model_type]()
    return _small(default, iter(range(VOCABULARY - 1, 60, -1)), {})


def _small(
    default: PreTrainedConfig, ids: Iterator[int], given: dict[str, Any]
) -> PreTrainedConfig:
    """Return a configuration with small sizes, made of the arguments that the default one had.

    Args:
        default: the configuration with its own sizes.
        ids: the tokens of the vocabulary that nothing uses yet.
        given: attributes that replace those of the rules.
    """
    kind = type(default)
    overrides = OVERRIDES.get(kind.model_type, {}) | given
    if kind.model_type in KEPT:
        return kind(**overrides) if overrides else default
    names = {field.name: field for field in fields(kind)}
    options: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name not in names or name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            options[name] = _small(value, ids, overrides.pop(name, {}))
        elif type(value) is int:
            options[name] = _small_int(name, value, ids)
        elif type(value) in (bool, str, float) and value != names[name].default:
            options[name] = value
        elif value is None and name in UNSET:
            options[name] = UNSET[name]
        elif name in PER_LAYER and isinstance(value, list | tuple):
            options[name] = _kinds(value)
        elif isinstance(value, list | tuple) and names[name].default is not None:
            options[name] = _small_list(name, value, ids)
    _make_consistent(default, options)
    return kind(**{**options, **overrides})


def _kinds(per_layer: Any) -> list[Any]:
    """Return one layer of each kind, in the order of a model, and two at least."""
    kinds = list(dict.fromkeys(per_layer))
    return kinds if len(kinds) > 1 else kinds * min(2, len(per_layer))


def _make_consistent(default: PreTrainedConfig, options: dict[str, Any]) -> None:
    """Change sizes that depend on each other."""
    count = max((len(options[name]) for name in PER_LAYER & set(options)), default=0)
    if count:
        for name in PER_LAYER & set(options):
            options[name] = [options[name][i % len(options[name])] for i in range(count)]
        for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer"):
            if name in options:
                options[name] = count
    _keep_stages(default, options)
    for name in SAME_HEADS:
        heads = name.replace("key_value", "attention").replace("kv_heads", "heads")
        if name in options and vars(default).get(name) in (None, vars(default).get(heads)):
            options[name] = options.get(heads, options[name])
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and rope:
        rope = dict(rope)
        if "mrope_section" in _modeling_text(type(default)):
            rope.setdefault("mrope_section", [16, 24, 24])
        options["rope_parameters"] = _small_rope(rope, options.get("head_dim") or 16)


def _keep_stages(default: PreTrainedConfig, options: dict[str, Any]) -> None:
    """Keep the number of stages that a backbone returns."""
    stages = list(vars(default).get("_out_features") or [])
    if "depths" in options:
        options["out_features"] = stages
    elif len(stages) > 1 and "num_hidden_layers" in options:
        options["num_hidden_layers"] = len(stages)
        options["out_indices"] = list(range(1, len(stages) + 1))
        options.pop("out_features", None)


@cache
def _modeling_text(kind: type[PreTrainedConfig]) -> str:
    """Return the source of the model beside a configuration."""
    path = Path(inspect.getfile(kind))
    path = path.with_name(path.name.replace("configuration_", "modeling_"))
    return path.read_text() if path.exists() else ""


def _small_rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return rope parameters for small heads, for each kind of layers if they are nested."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            name: _small_rope(value, head_dim) if isinstance(value, dict) else value
            for name, value in rope.items()
        }
    rope = dict(rope)
    section = rope.get("mrope_section")
    if section:
        half = max(int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2, 1)
        small = [max(1, each * half // sum(section)) for each in section]
        small[0] += half - sum(small)
        rope["mrope_section"] = small
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = min(
            rope["original_max_position_embeddings"] or 32, 32
        )
    return rope


_GENERATIVE = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "CAUSAL_LM",
)


def _names(task: str) -> dict[str, Any]:
    """Return the names of the classes for a task by model type; "" is the plain model."""
    name = "MODEL_MAPPING_NAMES" if not task else f"MODEL_FOR_{task}_MAPPING_NAMES"
    return getattr(modeling_auto, name)


CLASSES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}
"""Classes of types whose plain order of classes gives a part of the model."""


def model_class(model_type: str) -> type[nn.Module]:
    """Return the class of a model type: one that generates, if it has one, or the plain model."""
    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])
    masked = model_type in _names("MASKED_LM")
    tasks = [task for task in _GENERATIVE if not (masked and task == "CAUSAL_LM")]
    rest = [
        name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
        for name in dir(modeling_auto)
        if re.fullmatch("MODEL_FOR_.*_MAPPING_NAMES", name)
    ]
    for task in (*tasks, "", *rest):
        name = _names(task).get(model_type)
        if name is not None:
            name = name if isinstance(name, str) else name[0]
            if hasattr(transformers, name):
                return getattr(transformers, name)
    return _class_of_config(transformers.CONFIG_MAPPING[model_type])


def _class_of_config(config: type[PreTrainedConfig]) -> type[nn.Module]:
    """Return the model in the module beside a configuration that has it."""
    package = importlib.import_module(config.__module__.rpartition(".")[0])
    files = Path(inspect.getfile(config)).parent.glob("modeling_*.py")
    modelings = [
        importlib.import_module(f"{package.__name__}.{each.stem}") for each in sorted(files)
    ]
    models = [
        each
        for modeling in modelings
        for each in vars(modeling).values()
        if inspect.isclass(each)
        and issubclass(each, transformers.PreTrainedModel)
        and each.__module__ == modeling.__name__
        and getattr(each, "config_class", None) is config
        and not each.__name__.endswith("PreTrainedModel")
    ]
    if not models:
        raise ValueError(f"no model has {config.__name__}")
    return models[0]


def build(model_type: str, implementation: str | None = None) -> Any:
    """Return a small model of a type, with random weights that do not depend on anything else."""
    config = small_config(model_type)
    kind = model_class(model_type)
    options = {} if implementation is None else {"attn_implementation": implementation}
    _check_small(kind, config)
    with _unwritten_is_nan():
        torch.manual_seed(0)
        model = kind._from_config(config, **options).eval()
    _fill(model)
    return model


def _check_small(kind: Any, config: PreTrainedConfig) -> None:
    """Raise an error if a model would be large, before its memory is taken."""
    try:
        with torch.device("meta"):
            model = kind._from_config(config)
    except (NotImplementedError, RuntimeError):  # it computes with its weights
        return
    size = sum(each.numel() for each in model.parameters())
    if size > LARGEST:
        largest = max(model.named_parameters(), key=lambda pair: pair[1].numel())
        raise ValueError(
            f"{size / 1e6:.0f} million parameters, {largest[0]} has {tuple(largest[1].shape)}"
        )


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    """Fill memory that nobody writes with NaN, such as that of a gpt-oss sink."""
    earlier = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(earlier)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Give a model weights that are large enough for attention that is far from uniform."""
    random = torch.Generator().manual_seed(0)
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        noise = torch.randn(parameter.shape, generator=random)
        if id(parameter) in tables:
            parameter.copy_(noise)
        elif parameter.ndim > 1:
            parameter.copy_(noise * (parameter[0].numel()) ** -0.5)
        elif name.endswith("bias"):
            parameter.copy_(noise * 0.1)
        elif not parameter.isfinite().all():
            parameter.copy_(noise)
