"""regard.transformers.lazy: lazy matrices where eager attention returns its weights."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput

import regard
from architectures import ARCHITECTURES, text
from models import ids
from regard.transformers import lazy

KERNELS = AttentionInterface._global_mapping
HAS_EAGER = hasattr(AttentionInterface, "get_interface")
NEEDS_EAGER = pytest.mark.skipif(
    not HAS_EAGER, reason="this version of transformers looks no eager kernel up"
)
KINDS = ["sdpa", pytest.param("eager", marks=NEEDS_EAGER)]
# Attention past transformers' interface. T5 has it in newer versions alone.
OWN = {"BLOOM", *(["T5"] if "sdpa" not in ARCHITECTURES["T5"].kinds else [])}


def outputs(model: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def fields(output: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: output[name] for name in output if "attentions" in name and output[name]}


def dense(weights: regard.AttentionMatrix | Tensor) -> Tensor:
    return weights if isinstance(weights, Tensor) else weights.to_dense()


def kinds(names: set[str]) -> list[Any]:
    return [
        pytest.param(name, kind, marks=NEEDS_EAGER if kind == "eager" else ())
        for name, each in ARCHITECTURES.items()
        for kind in ("sdpa", "eager")
        if (kind == "eager" or "sdpa" in each.kinds) and name not in names
    ]


def attentions_of(model: torch.nn.Module) -> Any:
    """The attentions that a model returns; older versions of transformers leave out none."""
    return outputs(model, text()).get("attentions") or ()


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("name", "kind"), kinds({*OWN, "Falcon"}))
def test_the_matrices_are_the_weights_of_eager_attention(name: str, kind: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(kind)
    with torch.no_grad():
        own = model(**architecture.inputs)
    with lazy(model):
        found = outputs(model, architecture.inputs)
    expected = outputs(architecture.build("eager"), architecture.inputs)
    assert torch.equal(found[0], own[0])
    assert fields(found).keys() == fields(expected).keys()
    for field, weights in fields(expected).items():
        for matrix, each in zip(found[field], weights, strict=True):
            assert isinstance(matrix, regard.AttentionMatrix)
            torch.testing.assert_close(dense(matrix), each, atol=1e-5, rtol=0)
    assert fields(found) or "CLIP" in type(model).__name__ or "Siglip" in type(model).__name__


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_model_without_the_interface_keeps_its_dense_weights_and_says_so(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build("eager")
    expected = outputs(model, architecture.inputs)
    with lazy(model), pytest.warns(UserWarning, match="keeps dense attentions of its own") as said:
        found = [outputs(model, architecture.inputs) for _ in range(2)]
    assert len(said) == 1
    assert all(torch.equal(*pair) for pair in zip(found[1][-1], expected[-1], strict=True))


def test_a_model_that_passes_by_the_interface_is_refused() -> None:
    architecture = ARCHITECTURES["Falcon"]
    model = architecture.build("sdpa")
    with (
        lazy(model),
        pytest.raises(regard.RegardError, match="ran no attention of the kernel 'sdpa'"),
    ):
        outputs(model, architecture.inputs)
    with lazy(model), torch.no_grad():
        model(**architecture.inputs)


def llama(kind: str = "sdpa", **options: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}
    config = LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=37, **options)
    config._attn_implementation = kind
    return LlamaForCausalLM(config).eval()


def mistral(kind: str) -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}
    config = MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=37, sliding_window=3)
    config._attn_implementation = kind
    return MistralForCausalLM(config).eval()


def is_lazy(model: torch.nn.Module) -> bool:
    found = attentions_of(model)
    return bool(found) and all(isinstance(each, regard.AttentionMatrix) for each in found)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_eager_attention(kind: str) -> None:
    gradients: list[Tensor] = []
    for is_ours in (True, False):
        model = llama(kind if is_ours else "eager")
        with lazy(model) if is_ours else nullcontext():
            *_, last = model(**text(), output_attentions=True).attentions
        entropy = (
            last.entropy()
            if isinstance(last, regard.AttentionMatrix)
            else -(last.clamp_min(1e-30).log() * last).sum(-1)
        )
        entropy.mean().backward()
        weight = model.model.layers[0].self_attn.k_proj.weight.grad
        assert weight is not None
        gradients.append(weight)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


# Generation

GENERATE = {
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_attentions": True,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def same_steps(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    for step, weights in zip(found.attentions, expected.attentions, strict=True):
        for matrix, each in zip(step, weights, strict=True):
            assert isinstance(matrix, regard.AttentionMatrix)
            torch.testing.assert_close(matrix.to_dense(), each, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["dynamic", "beams", "static"],
)
def test_generated_tokens_have_their_rows(kind: str, options: dict[str, Any]) -> None:
    model = llama(kind)
    with lazy(model):
        found = model.generate(ids(), max_new_tokens=4, **GENERATE, **options)
    same_steps(found, llama("eager").generate(ids(), max_new_tokens=4, **GENERATE, **options))


@NEEDS_EAGER
def test_a_generation_with_sinks_has_its_rows() -> None:
    architecture = ARCHITECTURES["gpt-oss"]
    model = architecture.build("eager")
    tokens = architecture.inputs["input_ids"]
    expected = model.generate(tokens, max_new_tokens=3, **GENERATE)
    with lazy(model):
        same_steps(model.generate(tokens, max_new_tokens=3, **GENERATE), expected)


def held(attentions: Any) -> int:
    """The bytes that all steps of a generation hold."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for step in attentions
        for matrix in step
        for tensor in ([matrix] if isinstance(matrix, Tensor) else matrix.source.tensors)
    }
    return sum(storages.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_holds_one_growing_key(kind: str) -> None:
    model, tokens = llama(kind), torch.randint(53, (1, 120))
    with lazy(model):
        found = model.generate(tokens, max_new_tokens=40, **GENERATE)
    expected = llama("eager").generate(tokens, max_new_tokens=40, **GENERATE)
    same_steps(found, expected)
    queries = sum(held([[matrix.source.query]]) for step in found.attentions for matrix in step)
    cache = sum(held([[layer.keys]]) for layer in found.past_key_values.layers)
    assert held(found.attentions) <= queries + 1.5 * cache < held(expected.attentions) / 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_with_a_static_cache_holds_its_rows(kind: str) -> None:
    model, tokens = llama(kind), torch.randint(53, (1, 120))
    options = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 20}
    with lazy(model):
        found = model.generate(tokens, **GENERATE, **options)
    expected = llama("eager").generate(tokens, **GENERATE, **options)
    assert held(found.attentions[1:]) <= held(expected.attentions[1:])


def steps_of(model: LlamaForCausalLM, cache: Any, tokens: Tensor, mode: Any) -> list[Any]:
    with mode():
        return list(model(tokens, past_key_values=cache, output_attentions=True).attentions)


def test_steps_that_share_a_key_keep_their_own_weights() -> None:
    """Texts that go on in two ways, in other modes, and after the matrices of a step are gone."""

    def run(model: LlamaForCausalLM) -> list[Any]:
        cache = DynamicCache(config=model.config)
        found = steps_of(model, cache, ids()[:1], torch.inference_mode)
        twin = copy.deepcopy(cache)
        gone = steps_of(model, cache, ids()[1:, :1], torch.no_grad)
        rows = [each[0, :2] for each in gone]
        gone.clear()
        found += steps_of(model, twin, ids()[1:, 1:2], torch.inference_mode)
        found += steps_of(model, cache, ids()[1:, 2:4], torch.no_grad)
        found += steps_of(model, twin, ids()[1:, 4:5], torch.no_grad)
        for token in ids()[0, :5]:
            found += steps_of(model, twin, token[None, None], torch.no_grad)
        return [*rows, *found]

    model = llama()
    with lazy(model):
        found = run(model)
    torch.testing.assert_close(
        [dense(each) for each in found], run(llama("eager")), atol=1e-6, rtol=0
    )


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="it has no cache of float8"
)
def test_a_quantised_cache_gives_the_keys_that_the_kernel_got() -> None:
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    model = llama()
    with lazy(model):
        found = model.generate(ids(), max_new_tokens=4, **GENERATE, **options)
    same_steps(found, llama("eager").generate(ids(), max_new_tokens=4, **GENERATE, **options))


@NEEDS_EAGER
@pytest.mark.parametrize("layers", [None, [0]])
def test_one_square_of_eager_attention_is_alive(layers: list[int] | None) -> None:
    from transformers.models.gemma2 import modeling_gemma2

    model, own = ARCHITECTURES["Gemma 2"].build("eager"), modeling_gemma2.eager_attention_forward
    squares: list[ref[Tensor]] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        assert not [each for each in squares if each() is not None]
        output, weights = own(*args, **kwargs)
        squares.append(ref(weights))
        return output, weights

    modeling_gemma2.eager_attention_forward = counting
    try:
        with lazy(model, layers=layers):
            outputs(model, ARCHITECTURES["Gemma 2"].inputs)
    finally:
        modeling_gemma2.eager_attention_forward = own
    assert len(squares) == model.config.num_hidden_layers > 1
    assert not [each for each in squares if each() is not None]


class Handwritten(PreTrainedModel):
    """A model whose attention is code of its own, as that from a hub may be."""

    config_class = BertConfig
    _supports_sdpa = True

    def forward(self, input_ids: Tensor, output_attentions: bool = False) -> dict[str, Any]:
        x = F.one_hot(input_ids, 53).float()
        weights = (x @ x.mT).softmax(-1)
        return BaseModelOutput(weights @ x, attentions=(weights[:, None],))


def test_attention_of_code_of_its_own_is_refused_before_an_answer() -> None:
    model = Handwritten(BertConfig(attn_implementation="sdpa"))
    with lazy(model), pytest.raises(regard.RegardError, match="ran no attention of the kernel"):
        model(ids(), output_attentions=True)


def test_a_model_that_is_refused_generates_no_token() -> None:
    model = ARCHITECTURES["Falcon"].build("sdpa")
    forwards: list[object] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    with lazy(model), pytest.raises(regard.RegardError, match="ran no attention of the kernel"):
        model.generate(ARCHITECTURES["Falcon"].inputs["input_ids"], max_new_tokens=3, **GENERATE)
    assert len(forwards) == 1


def test_packed_texts_do_not_see_each_other() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    inputs = {"input_ids": ids()[:1], "position_ids": positions, "use_cache": False}
    model = llama()
    with lazy(model):
        [first, _] = outputs(model, inputs)["attentions"]
    [weights, _] = outputs(llama("eager"), inputs)["attentions"]
    assert weights[0, 0, 5, 0] == 0
    torch.testing.assert_close(first.to_dense(), weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_static_cache_that_is_overwritten_changes_no_matrix(
    mode: Callable[[], Any], kind: str
) -> None:
    def attentions(model: MistralForCausalLM) -> list[Tensor]:
        found = []
        with mode():
            cache = StaticCache(model.config, max_cache_len=9)
            for tokens in (ids(), ids()[:, :1], ids()[:, 1:2]):  # the window of 3 keys moves on
                found += model(tokens, past_key_values=cache, output_attentions=True).attentions
            cache.reset()
            return [dense(each) for each in found]

    model = mistral(kind)
    with lazy(model):
        found = attentions(model)
    torch.testing.assert_close(found, attentions(mistral("eager")), atol=1e-6, rtol=0)


@pytest.mark.full
def test_long_texts_need_no_matrix() -> None:
    model, tokens = llama(max_position_embeddings=32768), torch.zeros(1, 17000, dtype=torch.int64)
    with torch.no_grad(), lazy(model):
        [first, _] = model.model(tokens, output_attentions=True).attentions
        assert first.shape == (1, 4, 17000, 17000)
        assert first[..., -1, :].shape == (1, 4, 17000)
        with pytest.raises(MemoryError, match="GiB"):
            first.to_dense()


# The model and the process stay as they were


def test_the_model_and_the_kernels_are_as_before_afterwards() -> None:
    def state() -> list[dict[str, int]]:
        return [
            {
                name: len(value) if isinstance(value, dict) else 0
                for name, value in vars(each).items()
            }
            for each in model.modules()
        ]

    model = llama()
    plain = outputs(model, text())[0]  # transformers leaves hooks of its own
    kernels, modules = dict(KERNELS), state()
    with lazy(model):
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(model(**text())[0], plain)
        assert is_lazy(model)
        assert state() != modules
    assert kernels == KERNELS
    assert state() == modules
    assert not attentions_of(model)


def test_other_models_are_not_changed() -> None:
    model, other = llama(), llama("eager")
    expected = attentions_of(other)
    with lazy(model), lazy(llama("eager")):
        found = attentions_of(other)
        assert attentions_of(llama()) == ()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_copies_are_lazy_as_long_as_the_model_is() -> None:
    model = llama()
    block = lazy(model)
    twin = copy.deepcopy(model)
    assert is_lazy(twin)
    file = BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert attentions_of(loaded) == ()
    assert pickle.loads(pickle.dumps(block)) is None
    block.undo()
    block.undo()
    assert attentions_of(twin) == ()


def test_blocks_nest_and_end_in_any_order() -> None:
    model = llama()
    first, second = lazy(model), lazy(model, layers=[1])
    assert attentions_of(model)[0] is None
    first.undo()
    assert attentions_of(model)[0] is None
    third = lazy(model)
    second.undo()
    assert is_lazy(model)
    third.undo()
    assert KERNELS["sdpa"].__module__.startswith("transformers")


def test_threads_have_their_own_models() -> None:
    found: dict[int, list[bool]] = {}

    def run(place: int) -> None:
        model, found[place] = llama(), []
        for _ in range(5):
            with lazy(model):
                found[place].append(is_lazy(model))
            found[place].append(attentions_of(model) == ())

    threads = [threading.Thread(target=run, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(all(each) for each in found.values())
    assert KERNELS["sdpa"].__module__.startswith("transformers")


def wrapped(calls: list[str]) -> Callable[..., Any]:
    """The kernel of another library around what is registered."""
    inner = KERNELS["sdpa"]

    def other(*args: Any, **kwargs: Any) -> Any:
        calls.append("other")
        return inner(*args, **kwargs)

    return other


def test_a_kernel_that_another_library_registered_before_is_called() -> None:
    own, calls = KERNELS["sdpa"], []
    other = wrapped(calls)
    AttentionInterface.register("sdpa", other)
    try:
        model = llama()
        with lazy(model):
            assert is_lazy(model)
        assert len(calls) == 2
        assert KERNELS["sdpa"] is other
    finally:
        KERNELS["sdpa"] = own


def test_a_kernel_that_another_library_registers_after_stays() -> None:
    own, calls, model = KERNELS["sdpa"], [], llama()
    try:
        block = lazy(model)
        other = wrapped(calls)
        AttentionInterface.register("sdpa", other)
        assert is_lazy(model)
        block.undo()
        assert KERNELS["sdpa"] is other
        assert attentions_of(model) == ()
        with lazy(model):
            assert is_lazy(model)
        assert KERNELS["sdpa"] is other
    finally:
        KERNELS["sdpa"] = own


def test_a_kernel_that_another_library_puts_in_place_of_ours_is_said() -> None:
    own, model = KERNELS["sdpa"], llama()
    try:
        with lazy(model):
            KERNELS["sdpa"] = sdpa_attention_forward
            with pytest.raises(regard.RegardError, match="ran no attention of the kernel 'sdpa'"):
                outputs(model, text())
    finally:
        KERNELS["sdpa"] = own


def test_an_exception_in_a_forward_leaves_no_trace() -> None:
    model = llama()
    with lazy(model):
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 3), 99), output_attentions=True)
        assert outputs(model.model, text())["attentions"][0].shape
        with torch.no_grad():
            assert model(**text()).attentions is None or model(**text()).attentions == ()
        assert is_lazy(model)


def test_an_interrupt_in_a_forward_leaves_no_trace() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = llama()
    hook = model.model.layers[1].register_forward_hook(interrupt)
    block = lazy(model)
    with pytest.raises(KeyboardInterrupt):
        model(**text(), output_attentions=True)
    hook.remove()
    assert is_lazy(model)
    other = llama()
    with lazy(other, layers=[1]):
        assert attentions_of(other)[0] is None
    block.undo()
    assert attentions_of(model) == ()


def test_wrappers_of_two_models_around_another_library_are_undone_in_any_order() -> None:
    own, first_model, second_model = KERNELS["sdpa"], llama(), llama()
    try:
        first = lazy(first_model)
        other = wrapped([])
        AttentionInterface.register("sdpa", other)
        second = lazy(second_model)
        first.undo()
        assert is_lazy(second_model)
        second.undo()
        assert KERNELS["sdpa"] is other
    finally:
        KERNELS["sdpa"] = own


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_later_changes_no_matrix(mode: Callable[[], Any], kind: str) -> None:
    model, expected = llama(kind), attentions_of(llama("eager"))
    with lazy(model), mode():
        output = model(**text(), output_attentions=True, use_cache=True)
        for layer in output.past_key_values.layers:
            layer.keys.zero_()
    for matrix, weights in zip(output.attentions, expected, strict=True):
        if mode is torch.no_grad:
            with pytest.raises(RuntimeError, match="a query or key of the matrix was changed"):
                matrix.entropy()
        else:  # PyTorch counts no changes here, so that the matrix has copies
            torch.testing.assert_close(matrix.to_dense(), weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("part", [lambda a: a[0, 1], lambda a: a[None], lambda a: a.detach()])
def test_a_part_knows_what_changed_after_it(part: Callable[[Any], Any]) -> None:
    model = llama()
    with lazy(model), torch.no_grad():
        output = model(**text(), output_attentions=True, use_cache=True)
        matrix = part(output.attentions[0])
        assert matrix.entropy().isfinite().all()
        output.past_key_values.layers[0].keys.zero_()
    with pytest.raises(RuntimeError, match="a query or key of the matrix was changed"):
        matrix.entropy()


def test_a_mask_that_changes_between_layers_is_that_of_each_layer() -> None:
    def change(_: Any, __: Any, output: Any) -> None:
        mask[..., 1:, 0] = False

    def run(model: LlamaForCausalLM) -> list[Tensor]:
        hook = model.model.layers[0].register_forward_hook(change)
        with torch.inference_mode():
            found = model(ids()[:1], attention_mask=mask, output_attentions=True).attentions
        hook.remove()
        return list(found)

    with torch.inference_mode():
        mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    model = llama()
    with lazy(model):
        first, second = run(model)
    assert first.to_dense()[0, 0, 3, 0] > 0
    assert second.to_dense()[0, 0, 3, 0] == 0


def copied(value: Any) -> Any:
    return copy.deepcopy(value)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("again", [copied, pickled])
@pytest.mark.parametrize("mask", [[[1] * 7, [0] * 3 + [1] * 4], [[1] * 7] * 2])
def test_attentions_can_be_copied(again: Callable[[Any], Any], mask: list[list[int]]) -> None:
    model = llama()
    with lazy(model):
        inputs = {"input_ids": ids(), "attention_mask": torch.tensor(mask)}
        found = outputs(model, inputs)["attentions"]
    for matrix, each in zip(again(found), found, strict=True):
        assert torch.equal(matrix.to_dense(), each.to_dense())


# Options


def test_chosen_layers_alone_have_matrices() -> None:
    model = llama()
    for layers in ([1], ["model.layers.1.self_attn"]):
        with lazy(model, layers=layers):
            for _ in range(2):
                first, second = attentions_of(model)
                assert first is None
                assert isinstance(second, regard.AttentionMatrix)
    with pytest.raises(ValueError, match="layers has 'nothing'"):
        lazy(model, layers=["nothing"])


def test_layers_around_an_attention_choose_it() -> None:
    model = llama()
    with lazy(model, layers=["model.layers.1"]):
        first, second = attentions_of(model)
    assert first is None
    assert isinstance(second, regard.AttentionMatrix)


@pytest.mark.parametrize("layers", [[7], ["model.layers.0.mlp"]])
def test_layers_that_choose_nothing_are_an_error(layers: list[Any]) -> None:
    model = llama()
    message = r"chooses none of the 2 layers[\s\S]*They are 0 to 1, 'model.layers.0.self_attn'"
    with lazy(model, layers=layers), pytest.raises(regard.RegardError, match=message):
        attentions_of(model)


@pytest.mark.parametrize("layers", [[1], ["model.layers.1.self_attn"]])
def test_copies_have_the_chosen_layers_of_their_model(layers: list[Any]) -> None:
    model = llama()
    with lazy(model, layers=layers):
        twin = copy.deepcopy(model)
        for each in (twin, model, twin):
            first, second = attentions_of(each)
            assert first is None
            assert isinstance(second, regard.AttentionMatrix)


def test_attentions_can_be_the_default_of_generate() -> None:
    model = llama()
    with lazy(model, output_attentions=True):
        found = model.generate(
            ids(), max_new_tokens=2, return_dict_in_generate=True, pad_token_id=0
        )
        assert isinstance(found.attentions[0][0], regard.AttentionMatrix)
    assert not model.generation_config.output_attentions


def test_attentions_can_be_the_default() -> None:
    model = llama()
    with lazy(model, output_attentions=True), torch.no_grad():
        assert isinstance(model(**text()).attentions[0], regard.AttentionMatrix)
        assert not model(**text(), output_attentions=False).attentions
    assert not model(**text()).attentions


# Bad input


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(TypeError, match="lazy needs a model of transformers"):
        lazy("model")
    with pytest.raises(TypeError, match=r"contains no model of transformers[\s\S]*regard.observe"):
        lazy(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["flex_attention", "flash_attention_2"])
def test_other_kernels_are_refused_when_they_are_asked_for(kind: str) -> None:
    model = llama()
    model.config._attn_implementation = kind
    with pytest.raises(regard.RegardError, match=r"set_attn_implementation\(\"sdpa\"\) first"):
        lazy(model)


def test_compiled_models_are_refused() -> None:
    model = llama()
    model.compile(backend="eager")
    with pytest.raises(regard.RegardError, match="model is compiled"):
        lazy(model)
    model = llama()
    with pytest.raises(regard.RegardError, match="model is compiled"):
        lazy(torch.compile(model, backend="eager"))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_compiled_later_is_refused_where_it_is_asked() -> None:
    model = llama()
    with lazy(model):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(regard.RegardError, match="model is compiled"):
            outputs(compiled, text())
        with torch.no_grad():
            assert torch.equal(compiled(**text())[0], model(**text())[0])


def test_a_paged_cache_is_refused() -> None:
    model = llama()
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "write_index": []}), with_kwargs=True
    )
    with lazy(model), pytest.raises(regard.RegardError, match="keeps its keys in pages"):
        outputs(model, text())


def test_a_kernel_that_calls_no_fused_attention_is_refused() -> None:
    own = KERNELS["sdpa"]

    def by_hand(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("sdpa", by_hand)
    try:
        model = llama()
        with lazy(model), pytest.raises(regard.RegardError, match="0 times in one attention"):
            outputs(model, text())
    finally:
        KERNELS["sdpa"] = own


@NEEDS_EAGER
def test_eager_weights_that_the_arguments_do_not_give_stay_dense() -> None:
    from transformers.models.bert import modeling_bert

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}
    config = BertConfig(**sizes, intermediate_size=37, attn_implementation="eager")
    model, own = BertModel(config).eval(), modeling_bert.eager_attention_forward

    def sharper(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(module, query * 1.01, *args, **kwargs)

    modeling_bert.eager_attention_forward = sharper
    try:
        expected = attentions_of(model)
        with lazy(model), pytest.warns(UserWarning, match="keeps dense attentions"):
            found = attentions_of(model)
    finally:
        modeling_bert.eager_attention_forward = own
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_kernel_of_another_library_is_compared_with_its_output() -> None:
    own = KERNELS["sdpa"]

    def first_keys(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = (each[:, :, :3].repeat_interleave(group, 1) for each in (key, value))
        output = F.scaled_dot_product_attention(query, key, value)
        return output.transpose(1, 2).contiguous(), None

    def reversed_heads(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        parts = (each.flip(1) for each in (query, key, value))
        return F.scaled_dot_product_attention(*parts).flip(1).transpose(1, 2).contiguous(), None

    model = llama()
    try:
        AttentionInterface.register("sdpa", first_keys)
        with lazy(model):
            assert attentions_of(model)[0].shape == (2, 4, 7, 3)
        AttentionInterface.register("sdpa", reversed_heads)
        with lazy(model), pytest.raises(regard.RegardError, match="whose output is not that of"):
            attentions_of(model)
    finally:
        KERNELS["sdpa"] = own


def test_a_kernel_that_changes_its_arguments_is_refused() -> None:
    own = KERNELS["sdpa"]

    def forgetful(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = own(module, query, *args, **kwargs)
        query.zero_()
        return output

    model = llama()
    try:
        AttentionInterface.register("sdpa", forgetful)
        with (
            lazy(model),
            pytest.raises(regard.RegardError, match="changed a query, a key or a mask"),
        ):
            attentions_of(model)
    finally:
        KERNELS["sdpa"] = own


@pytest.mark.sampled(4)
@NEEDS_EAGER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fault", ["scale", "window", "bias", "first row"])
def test_eager_weights_of_long_texts_are_compared_closely(
    dtype: torch.dtype, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.bert import modeling_bert

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 53}
    config = BertConfig(**sizes, intermediate_size=37, max_position_embeddings=700)
    config._attn_implementation = "eager"
    model, own = BertModel(config).eval().to(dtype), modeling_bert.eager_attention_forward
    places = torch.arange(600)

    def other(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        distance = (places[:, None] - places).abs()
        if fault == "scale":
            query = query * 3
        elif fault == "window":
            mask = torch.where(distance < 200, 0.0, torch.finfo(dtype).min)[None, None].to(dtype)
        elif fault == "bias":
            mask = (-0.05 * distance)[None, None].to(dtype)
        else:
            query = query * torch.where(places == 0, 5.0, 1.0)[:, None].to(dtype)
        return own(module, query, key, value, mask, **kwargs)

    inputs = {"input_ids": torch.randint(53, (1, 600))}
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.mul_(40)
    with lazy(model):
        assert isinstance(outputs(model, inputs)["attentions"][0], regard.AttentionMatrix)
    monkeypatch.setattr(modeling_bert, "eager_attention_forward", other)
    with lazy(model), pytest.warns(UserWarning, match="keeps dense attentions"):
        outputs(model, inputs)


@NEEDS_EAGER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_eager_models_in_16_bits_are_lazy_with_padding(dtype: torch.dtype) -> None:
    model = llama("eager").to(dtype)
    inputs = {"input_ids": ids(), "attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4])}
    expected = outputs(model, inputs)["attentions"]
    with lazy(model):
        found = outputs(model, inputs)["attentions"]
    for matrix, weights in zip(found, expected, strict=True):
        difference = (matrix.to_dense() - weights).abs()[:, :, 3:]
        assert float(difference.max()) < 0.02


def test_dropout_keeps_the_dense_weights_of_eager_attention() -> None:
    model = ARCHITECTURES["gpt-oss"].build("eager").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with warnings.catch_warnings(record=True), lazy(model):
        warnings.simplefilter("always")
        found = outputs(model, ARCHITECTURES["gpt-oss"].inputs)["attentions"]
    assert all(isinstance(each, Tensor) for each in found)
