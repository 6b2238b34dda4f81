"""Variants of x-transformers: observe changes no bit, and sees the weights that they return."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

x_transformers = pytest.importorskip("x_transformers")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rotary": {"rotary_pos_emb": True},
    "rotary flash": {"rotary_pos_emb": True, "attn_flash": True},
    "xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "alibi flash": {"alibi_pos_bias": True, "alibi_num_heads": 2, "attn_flash": True},
    "alibi of the data": {"attn_data_dependent_alibi": True},
    "t5": {"rel_pos_bias": True},
    "dynamic position bias": {"dynamic_pos_bias": True},
    "projected position bias": {"attn_use_rel_proj_pos_bias": True},
    "cope": {"attn_use_cope": True, "attn_cope_max_pos": 9},
    "normalised query and key": {"attn_qk_norm": True},
    "rms norm of query and key": {"attn_qk_rmsnorm": True},
    "one key head": {"attn_one_kv_head": True},
    "two key heads": {"attn_kv_heads": 2},
    "talking heads": {"attn_pre_talking_heads": True},
    "head scale": {"attn_head_scale": True},
    "gated values": {"attn_gate_values": True},
    "gated value heads": {"attn_gate_value_heads": True},
    "swiglu values": {"attn_swiglu_values": True},
    "sparse": {"attn_sparse_topk": 3},
    "memory": {"attn_num_mem_kv": 2},
    "a key of zeros": {"attn_add_zero_kv": True},
    "learned sinks": {"attn_head_learned_sink": True},
    "softclamp": {"attn_softclamp_logits": True},
    "window": {"attn_max_attend_past": 2},
    "selective": {"attn_selective": True},
    "laser": {"attn_laser": True},
    "latent query": {"attn_use_latent_q": True, "attn_dim_latent_q": 16},
    "latent key and value": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 16},
    "attention on attention": {"attn_on_attn": True},
    "inverted": {"attn_inverted_attention": True},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_norm": True},
    "residual scores": {"residual_attn": True},
    "shifted tokens": {"shift_tokens": 1},
    "scale norm": {"use_scalenorm": True},
    "rms norm": {"use_rmsnorm": True},
    "glu": {"ff_glu": True},
    "orthogonal values": {"attn_orthog_projected_values": True},
    "residual streams": {"num_residual_streams": 2},
}
MIXED = "heads mixed after the softmax"
"""x_transformers returns these weights before they are mixed."""
VARIANTS |= {
    MIXED: {"attn_post_talking_heads": True},
    "hard": {"attn_hard": True},
    "gumbel": {"attn_gumbel_softmax": True},
    "distances": {"attn_l2_distance": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    "sigmoid": {"attn_sigmoid": True},
    "signed": {"attn_cog_signed": True},
}
CAUSAL_ALONE = ("xpos", "cope", "selective")


def built(kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    layers = getattr(x_transformers, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    wrapper = x_transformers.TransformerWrapper
    return wrapper(num_tokens=50, max_seq_len=32, attn_layers=layers).eval()


def ran(model: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        return model(torch.randint(50, (2, 9)), **options)


@pytest.mark.parametrize("kind", ["Decoder", "Encoder"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_seen(variant: str, kind: str) -> None:
    if kind == "Encoder" and variant in CAUSAL_ALONE:
        pytest.skip("causal alone")
    model = built(kind, VARIANTS[variant])
    expected: Tensor = ran(model)
    with regard.observe(model) as seen:
        assert torch.equal(ran(model), expected)
    assert len(seen) == 2
    weights = [
        each.post_softmax_attn
        for each in ran(model, return_intermediates=True)[1].attn_intermediates
    ]
    for matrix, each in zip(seen.values(), weights, strict=True):
        if each is not None and each.shape == matrix.shape and variant != MIXED:
            torch.testing.assert_close(matrix.to_dense(), each, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", REFUSED)
def test_what_is_no_softmax_of_query_and_key_is_refused(variant: str) -> None:
    model = built("Decoder", REFUSED[variant])
    refused = r"cannot be kept|no attention was seen"
    with pytest.raises(regard.RegardError, match=refused), regard.observe(model):
        ran(model)
