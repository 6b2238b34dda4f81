"""What observe refuses before any work, and what it says when the block ends."""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from models import LLAMA, Heads, ImportedByName, Stack, noise
from regard.capture.recorder import Recorder


def x() -> Tensor:
    return noise(3, 7, 22)


# What it refuses before any work


def refusal(model: Any) -> BaseException:
    with pytest.raises((TypeError, regard.RegardError)) as caught, regard.observe(model):
        pytest.fail("the block must not run")
    return caught.value


COMPILED = """; observe cannot look into compiled code.
    Observe it with compiled="eager", which runs compiled parts uncompiled."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(
            lambda: print,
            "model is a builtin_function_or_method; observe needs a torch.nn.Module.\n"
            "    Pass the module whose forward runs the attention.",
            id="no module",
        ),
        pytest.param(
            lambda: torch.compile(Stack(), backend="eager"),
            "model is compiled" + COMPILED,
            id="compiled",
        ),
    ],
)
def test_a_model_that_cannot_be_observed_is_refused(
    model: Callable[[], object], message: str
) -> None:
    assert str(refusal(model())) == message


def compiled_around(model: Stack) -> nn.Module:
    return nn.Sequential(torch.compile(model, backend="eager"))


def compiled_in_place(model: Stack) -> nn.Module:
    model.second.compile(backend="eager")
    return model


def with_a_compiled_forward(model: Stack) -> nn.Module:
    model.second.forward = torch.compile(model.second.forward, backend="eager")
    return model


def with_a_compiled_function(model: Stack) -> nn.Module:
    model.second.act = torch.compile(torch.relu, backend="eager")
    return model


@pytest.mark.parametrize(
    ("compile_part", "what"),
    [
        (compiled_around, "module at '0'"),
        (compiled_in_place, "module at 'second'"),
        (with_a_compiled_forward, "function at 'second.forward'"),
        (with_a_compiled_function, "function at 'second.act'"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_with_a_compiled_part_is_an_error_that_names_what_records_it(
    compile_part: Callable[[Stack], nn.Module], what: str
) -> None:
    model = Stack()
    with torch.no_grad(), regard.observe(model) as whole:
        expected = model(x())
    model = compile_part(model)
    assert str(refusal(model)) == f"model has a compiled {what}{COMPILED}"
    with torch.no_grad(), regard.observe(model, compiled="eager") as seen:
        assert torch.equal(model(x()), expected)
    for one, other in zip(seen.values(), whole.values(), strict=True):
        assert torch.equal(one.to_dense(), other.to_dense())


class ByHand(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return by_hand(*self.project(x))


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query.sin() @ key.mT * 0.3).tanh()).softmax(-1) @ value


class Compiled(Heads):
    """Its function is compiled, where no attribute tells; the module itself is not."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = [torch.compile(by_hand)]

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[0](*self.project(x))


def test_a_class_whose_forward_is_compiled_is_refused() -> None:
    class Decorated(Stack):
        forward = torch.compile(Stack.forward, backend="eager")

    message = f"model has a compiled function at 'Decorated.forward'{COMPILED}"
    assert str(refusal(Decorated())) == message


class Blocks(nn.Module):
    """Two layers of attention."""

    def __init__(self, way: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = way(), way()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x).sum()) * 2


CALLS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "the model": lambda model: model,
    "a function that calls it": lambda model: lambda x: model(x) + 1,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("way", [ImportedByName, ByHand])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_runs_compiled_is_refused_when_the_block_ends(
    way: type[nn.Module], call: Callable[[nn.Module], Callable[[Tensor], Tensor]], backend: str
) -> None:
    model = Blocks(way)
    run: Any = torch.compile(call(model), backend=backend)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(regard.RegardError) as caught, regard.observe(model) as seen:
                run(x())
            assert str(caught.value) == "model is compiled" + COMPILED
            assert list(seen) == []


def test_what_a_compiled_function_leaves_to_its_modules_is_observed() -> None:
    model = Blocks(ByHand)
    model.forward = torch.compiler.disable(model.forward)
    run: Any = torch.compile(lambda x: model(x) + 1, backend="eager")
    with torch.no_grad(), regard.observe(model) as seen:
        run(x())
    assert list(seen) == ["first", "second"]


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_with_a_scripted_module_is_observed() -> None:
    model = nn.Sequential(torch.jit.script(Scripted()), ByHand())
    with torch.no_grad(), regard.observe(model) as seen:
        model(x())
    assert list(seen) == ["1"]


def test_a_function_that_is_kept_from_the_compiler_is_observed() -> None:
    model = ImportedByName()
    model.forward = torch.compiler.disable(model.forward)
    with regard.observe(model) as seen:
        model(x())
    assert len(seen) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_function_stays_compiled_and_is_not_seen() -> None:
    model, given = Compiled(), noise(3, 67, 22)
    with torch.no_grad():
        plain, uncompiled = model(given), by_hand(*model.project(given))
        with pytest.raises(regard.RegardError, match="no attention"), regard.observe(model):
            output = model(given)
    assert not torch.equal(plain, uncompiled)  # or the test would show nothing
    assert torch.equal(plain, output)


# What it says when the block ends


def test_a_fault_of_our_own_stops_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object, **__: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(Recorder, "record", fault)
    model, output = ImportedByName(), None
    message = "the attention of 'ImportedByName' cannot be kept: KeyError: 'a fault'"
    with (
        pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"),
        regard.observe(model),
    ):
        output = model(x())
    assert torch.equal(output, model(x()))


class Scaled(Heads):
    """Passes on a scale of any kind."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.project(x), scale=self.scale)


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(1, id="int"),
        pytest.param(torch.tensor(0.25), id="tensor"),
        pytest.param(numpy.float32(0.25), id="numpy"),
    ],
)
def test_every_scale_that_pytorch_takes_is_kept(scale: Any) -> None:
    model = Scaled(scale)
    with regard.observe(model) as seen:
        model(x())
    assert seen[0].source.scale == float(scale)


# PyTorch says of nested tensors that they are a prototype: not what is tested here.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("surroundings", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_nested_tensor_is_refused_when_the_block_ends(surroundings: Callable[[], Any]) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = Same()
    sentences = [noise(3, 2, 11), noise(5, 2, 11)]
    message = (
        "the attention of 'Same' cannot be kept: query is a nested tensor; it must be an "
        "ordinary one.\n    Pad it and pass a mask."
    )
    with (
        surroundings(),
        pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"),
        regard.observe(model),
    ):
        model(torch.nested.nested_tensor(sentences, layout=torch.jagged).transpose(1, 2))


def test_of_several_attentions_that_cannot_be_kept_the_first_is_named() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Scaled(float("inf")), Scaled(float("nan"))

        def forward(self, x: Tensor) -> None:
            self.one(x), self.two(x)

    model = Both()
    with pytest.raises(regard.RegardError, match=r"'one' cannot be kept"), regard.observe(model):
        model(x())


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        pytest.param(
            lambda: Scaled(float("inf")),
            (3, 7, 22),
            "the attention of 'Scaled' cannot be kept: scale is inf; it must be finite.\n"
            "    Leave it out for 1/sqrt(head_dim).",
            id="infinite scale",
        ),
    ],
)
def test_what_cannot_be_kept_stops_no_model_and_is_said_when_the_block_ends(
    model: Callable[[], nn.Module], given: tuple[int, ...], message: str
) -> None:
    built, inputs = model(), noise(*given)
    plain = built(inputs)
    output = None
    with (
        pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"),
        regard.observe(built),
    ):
        output = built(inputs)
    torch.testing.assert_close(output, plain, atol=0, rtol=0, equal_nan=True)


def test_flex_attention_that_transformers_compiles_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="flex_attention"))
    assert str(refusal(model)) == (
        "'LlamaForCausalLM' runs flex_attention, which transformers compiles; observe cannot look "
        'into compiled code.\n    Observe it with compiled="eager", or call '
        'model.set_attn_implementation("sdpa") first.'
    )


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_heads_in_the_axis_of_the_tokens_are_told_from_tokens(tokens: int) -> None:
    """transformers packs two heads that share a key into the axis of a single token."""
    sizes = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).eval()
    given = torch.arange(1, 4)[None]
    with torch.no_grad(), regard.observe(model) as seen:
        cache = model(given, use_cache=True).past_key_values
        model(given[:, :tokens], past_key_values=cache)
    assert {tuple(matrix.shape) for matrix in seen.values()} == {(1, 4, 3 + tokens, 3 + tokens)}
