"""Many model types of transformers: observe changes no bit and sees the weights that they return.

Their configurations are the default ones with small sizes; what transformers cannot build so small
is not here.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

import regard

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

TYPES = Path(__file__).with_name("model_types.txt").read_text().split()
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "projection_dim"), 32),
    **dict.fromkeys(("embed_dim", "embedding_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("d_ff", "hidden_dim", "n_positions", "max_position_embeddings"), 64),
    "vocab_size": 99,
    "image_size": 32,
    "patch_size": 8,
    "head_dim": 8,
    "d_kv": 8,
}
IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def small(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with small sizes, and those inside it."""
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            small(inner)
    for name, size in SIZES.items():
        if type(getattr(config, name, None)) is int:
            with suppress(AttributeError, NotImplementedError):  # what follows from other sizes
                setattr(config, name, size)
    for name in IDS:
        if isinstance(getattr(config, name, None), int) and getattr(config, name) >= 99:
            setattr(config, name, 1)
    if isinstance(getattr(config, "layer_types", None), list):
        with suppress(AttributeError):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def built(model_type: str, kind: str | None = None) -> Any:
    config = small(transformers.CONFIG_MAPPING[model_type]())
    options = {} if kind is None else {"attn_implementation": kind}
    torch.manual_seed(0)
    return AutoModel.from_config(config, **options).eval()


def inputs_of(model: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids, name = torch.randint(3, 90, (2, 9)), model.main_input_name
    special = {
        "pixel_values": torch.randn(2, 3, 32, 32),
        "input_values": torch.randn(2, 1600),
        "input_features": torch.randn(2, 80, 3000),
    }
    inputs = {name: special.get(name, ids)}
    return inputs | ({"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {})


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(items, list | tuple):
        return []
    return [each for item in items for each in tensors(item)]


def ran(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        return tensors(model(**inputs_of(model)))


def are_weights(tensor: Tensor) -> bool:
    """Whether it has the weights of each head: not scores, and not the mean, repeated."""
    sums = tensor.float().sum(-1)
    repeated = tensor.shape[1] > 1 and bool((tensor[:, :1] == tensor).all())
    return bool((tensor >= 0).all() and (sums - 1).abs().max() < 1e-4) and not repeated


@pytest.mark.parametrize("model_type", TYPES)
def test_observe_changes_no_bit(model_type: str) -> None:
    model = built(model_type)
    plain = ran(model)
    with regard.observe(model) as seen:
        observed = ran(model)
    assert plain
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert seen.layers


@pytest.mark.parametrize("model_type", TYPES)
def test_observe_sees_the_weights_that_eager_attention_returns(model_type: str) -> None:
    try:
        model = built(model_type, "eager")
        inputs = inputs_of(model)
        with torch.no_grad(), regard.observe(model) as seen:
            output = model(**inputs, output_attentions=True)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        pytest.skip(f"transformers cannot run it so: {error}"[:200])
    fields = ("encoder_attentions", "attentions", "decoder_attentions")
    wanted = [each for name in fields for each in tensors(list(output.get(name) or []))]
    shapes = [tuple(each.shape) for each in wanted]
    if shapes != [tuple(shape) for shape in seen.shapes.values()]:
        pytest.skip("its outputs are of other layers, or in another order")
    if not all(are_weights(each) for each in wanted):
        pytest.skip("it returns something else than the weights of each head")
    for matrix, weights in zip(seen.values(), wanted, strict=True):
        torch.testing.assert_close(matrix.to_dense().float(), weights.float(), atol=1e-5, rtol=0)


def test_there_are_many() -> None:
    assert len(set(TYPES)) >= 200
