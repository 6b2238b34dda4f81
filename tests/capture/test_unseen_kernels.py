"""Kernels that observe does not read are refused by name, and no layer is missing in silence."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
import torch.onnx.ops
import transformers.integrations.msa_attention  # noqa: F401  registers an operation
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import regard
from models import LLAMA, Heads, ImportedByName, noise
from regard.capture.fused_calls import fused_call, unread_attention

UNREAD = (
    " computes attention, and observe does not read this operation.\n"
    "    Let the layer call scaled_dot_product_attention. For transformers, call "
    'model.set_attn_implementation("sdpa").'
)
UNSEEN = (
    "it ran, and observe saw no attention in it; its kernel may be no operation of PyTorch.\n"
    "    Let it call scaled_dot_product_attention. For transformers, call "
    'model.set_attn_implementation("sdpa").'
)


# Operations


def operations() -> Iterator[tuple[str, Any]]:
    """Every operation that this process knows, with its name."""
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name)
        yield full_name, getattr(packet, overload or "default")


READ = {
    "aten::_native_multi_head_attention",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_transformer_encoder_layer_fwd",
    "aten::scaled_dot_product_attention",
    "torch_attn::_varlen_attn",
}
REFUSED = {
    "aten::_cudnn_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_forward.quantized",
    "aten::_flash_attention_forward_no_dropout_inplace",
    "aten::_native_multi_head_attention.out",
    "aten::_scaled_dot_product_flash_attention.quantized",
    "aten::_transformer_encoder_layer_fwd.out",
    "aten::_triton_multi_head_attention",
    "aten::_triton_multi_head_attention.out",
    "aten::_triton_scaled_dot_attention",
    "aten::_triton_scaled_dot_attention.out",
    "onnx::Attention.opset23",
    "torch_attn::_varlen_attn_out",
    "transformers_msa::sparse_atten",
}
SINCE_2_15 = {"aten::_cudnn_attention_forward_no_dropout_inplace"}
PYTORCH = ("aten", "onnx", "torch_attn", "transformers_msa", "prims", "quantized", "mkldnn")


def test_every_attention_operation_of_pytorch_and_transformers_is_read_or_refused() -> None:
    known = [(name, each) for name, each in operations() if name.startswith(PYTORCH)]
    assert len(known) > 3000
    assert {name for name, each in known if fused_call(each) is not None} == READ
    refused = {name for name, each in known if unread_attention(each) is not None}
    assert refused - SINCE_2_15 == REFUSED
    ignored = {name for name, _ in known} - READ - refused
    # What else has the word in its name computes gradients.
    attention = {name for name in ignored if "attention" in name or "attn" in name}
    assert all("backward" in name for name in attention)


def defined(full_name: str) -> Any:
    """An operation of some package, which computes attention out of PyTorch's sight."""
    namespace, _, name = full_name.partition("::")
    if not hasattr(getattr(torch.ops, namespace), name):

        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value)

        torch.library.custom_op(full_name, kernel, mutates_args=())
    return getattr(getattr(torch.ops, namespace), name)


class Calls(Heads):
    """Calls a function on query, key and value."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(*self.project(x))


class CallsAttention(Calls):
    """The same in a class that is named attention."""


class Pair(nn.Module):
    """A layer of another kind beside attention that is seen."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.seen, self.other = ImportedByName(), other

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(x) + self.other(x).sum()


def x() -> Tensor:
    return noise(3, 7, 22)


def refused(model: nn.Module, **options: Any) -> list[tuple[str, str]]:
    """Return module and reason of each attention refused beside the recorded layer."""
    plain = model(x())
    with (
        pytest.warns(UserWarning, match="cannot be kept"),
        regard.observe(model, **options) as seen,
    ):
        output = model(x())
    assert torch.equal(plain, output)
    assert list(seen) == ["seen"]
    return [(each.module, each.reason) for each in seen.refused]


@pytest.mark.parametrize(
    "name",
    [
        "sage_of_tests::sageattn",
        "tests_flash_attn_3::fwd",
        "tests_flash_attn_2::varlen_fwd",
        "of_tests::paged_attention_v1",
        "of_tests::sparse_atten",
        "of_tests::flash_mla_decode",
        "of_tests::mha_fwd",
        "of_tests::sdpa",
        "of_tests::multi_head",
    ],
)
@pytest.mark.parametrize("surroundings", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_operation_that_is_named_attention_is_refused_by_its_name(
    name: str, surroundings: Callable[[], Any]
) -> None:
    with surroundings():
        assert refused(Pair(Calls(defined(name)))) == [("other", name + UNREAD)]


@pytest.mark.parametrize(
    "name",
    [
        "tests_flash_attn_3::get_scheduler_metadata",
        "tests_flash_attn_3::layer_norm_fwd",
        "tests_flash_attn_3::bwd",
        "of_tests::attention_mask",
        "of_tests::reshape_and_cache_flash",
        "of_tests::unflatten",
        "of_tests::flattened",
        "of_tests::formula",
    ],
)
def test_an_operation_that_only_sounds_like_attention_is_ignored(name: str) -> None:
    model = Pair(Calls(defined(name)))
    with torch.no_grad(), regard.observe(model, strict=True) as seen:
        model(x())
    assert list(seen) == ["seen"]


# Kernels that are no operations of PyTorch


class Foreign(torch.autograd.Function):
    """Writes its output without PyTorch, as FlashAttention 4 and SageAttention do."""

    @staticmethod
    def forward(_: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        weights = query.detach().numpy() @ key.detach().mT.numpy()
        output.detach().numpy()[...] = weights @ value.detach().numpy()
        return output

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


@pytest.mark.parametrize("surroundings", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_module_that_is_named_attention_and_in_which_nothing_is_seen_is_refused(
    surroundings: Callable[[], Any],
) -> None:
    with surroundings():
        assert refused(Pair(CallsAttention(Foreign.apply))) == [("other", UNSEEN)]


def test_a_module_that_did_not_run_is_not_refused() -> None:
    model = Pair(nn.Identity())
    model.unused = CallsAttention(Foreign.apply)
    with torch.no_grad(), regard.observe(model, strict=True) as seen:
        model(x())
    assert list(seen) == ["seen"]


def test_a_layer_that_is_not_selected_is_not_refused() -> None:
    model = Pair(CallsAttention(Foreign.apply))
    with torch.no_grad(), regard.observe(model, layers=["seen"], strict=True) as seen:
        model(x())
    assert list(seen) == ["seen"]


class OuterAttention(nn.Module):
    """The module around the one that computes, which is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(22, 22), ImportedByName()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


def test_a_module_around_attention_that_is_seen_is_not_refused() -> None:
    model = nn.Sequential(OuterAttention())
    with torch.no_grad(), regard.observe(model, strict=True) as seen:
        model(x())
    assert list(seen) == ["0.inner"]


def test_where_all_attention_is_unseen_the_error_names_its_module() -> None:
    model = nn.Sequential(CallsAttention(Foreign.apply))
    with pytest.raises(regard.RegardError) as caught, torch.no_grad(), regard.observe(model):
        model(x())
    assert str(caught.value) == f"the attention of '0' cannot be kept: {UNSEEN}"


# Attention implementations of transformers


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()


@pytest.mark.parametrize(
    "implementation",
    [
        "flash_attention_4",
        "paged|flash_attention_4",
        "kernels-community/sage-attention",
        "kernels-staging/msa@v0",
        "kernels-community/metal-flash-sdpa:forward",
    ],
)
def test_a_model_whose_kernels_are_not_seen_is_refused_before_the_block(
    implementation: str,
) -> None:
    model = llama()
    model.config._attn_implementation_internal = implementation
    with pytest.raises(regard.RegardError) as caught, regard.observe(model):
        pytest.fail("the block must not run")
    assert str(caught.value) == (
        f"'LlamaForCausalLM' runs the attention implementation {implementation!r}; its kernels are "
        "no operations of PyTorch, so observe cannot see them.\n"
        '    Call model.set_attn_implementation("sdpa") first.'
    )
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), regard.observe(model) as seen:
        model(torch.arange(5)[None])
    assert len(seen) == model.config.num_hidden_layers


@pytest.mark.parametrize(
    "implementation", ["kernels-community/flash-attn2@v1", "flash_attention_3"]
)
def test_a_model_whose_kernels_are_read_is_not_refused(implementation: str) -> None:
    model = llama()
    model.config._attn_implementation_internal = implementation
    with pytest.raises(regard.RegardError, match="no attention was seen"), regard.observe(model):
        pass  # flash-attn runs on no machine without its GPU


def test_a_part_of_a_model_whose_kernels_are_not_seen_is_refused() -> None:
    parts = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**parts, "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 8}
    vision = {**parts, "intermediate_size": 8, "image_size": 4, "patch_size": 2}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    model.vision_model.config._attn_implementation_internal = "flash_attention_4"
    caught = pytest.raises(regard.RegardError, match=r"^'vision_model[^']*' runs")
    with caught, regard.observe(model):
        pytest.fail("the block must not run")


def with_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2), None


def with_foreign(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    times = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    return Foreign.apply(query, key, value).transpose(1, 2), None


def test_a_function_that_a_user_registered_is_recorded_if_it_calls_what_is_seen() -> None:
    AttentionInterface.register("of_tests_sdpa", with_sdpa)
    model = llama()
    model.set_attn_implementation("of_tests_sdpa")
    with torch.no_grad(), regard.observe(model, strict=True) as seen:
        model(torch.arange(5)[None])
    assert len(seen) == model.config.num_hidden_layers


def test_a_function_that_a_user_registered_is_refused_if_nothing_is_seen() -> None:
    AttentionInterface.register("of_tests_foreign", with_foreign)
    model = llama()
    model.set_attn_implementation("of_tests_foreign")
    with (
        pytest.raises(regard.RegardError) as caught,
        torch.no_grad(),
        regard.observe(model) as seen,
    ):
        model(torch.arange(5)[None])
    assert str(caught.value).endswith(f"cannot be kept: {UNSEEN}")
    names = [f"model.layers.{i}.self_attn" for i in range(model.config.num_hidden_layers)]
    assert [each.module for each in seen.refused] == names
