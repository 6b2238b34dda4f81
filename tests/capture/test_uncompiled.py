"""`compiled="eager"` records models that torch.compile made, by running them uncompiled."""

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame as frames
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from models import LLAMA, Heads, ImportedByName, Stack, noise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def x() -> Tensor:
    return noise(3, 7, 22)


def stance() -> str:
    return frames._stance.stance


class ByHand(Heads):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return (query @ key.mT * 0.3).softmax(-1) @ value


class Function(Heads):
    """Its function is compiled, where no attribute tells."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.ways = [
            torch.compile(torch.nn.functional.scaled_dot_product_attention, backend=backend)
        ]

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[0](*self.project(x))


class Blocks(nn.Module):
    """Two layers of attention, by hand and fused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ByHand(), ImportedByName()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x).sum()) * 2


def of_class(model: nn.Module, backend: str) -> nn.Module:
    kind = type(model)
    forward = torch.compile(kind.forward, backend=backend)
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def of_parts(model: nn.Module, backend: str) -> nn.Module:
    model.first = torch.compile(model.first, backend=backend)
    model.second.compile(backend=backend)
    return model


def of_function(model: nn.Module, backend: str) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


WAYS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "torch.compile": lambda model, backend: torch.compile(model, backend=backend),
    "in place": in_place,
    "its parts": of_parts,
    "its function": of_function,
    "its class": of_class,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", id="dynamo"),
        pytest.param("aot_eager", marks=pytest.mark.full),
        pytest.param("inductor", marks=pytest.mark.full),
    ],
)
def test_a_compiled_model_is_recorded_as_the_model_it_was_made_of(
    way: Callable[[nn.Module, str], nn.Module], backend: str
) -> None:
    model = Blocks()
    with torch.no_grad():
        with regard.observe(model) as expected:
            plain = model(x())
        compiled = way(model, backend)
        compiled(x())
        with regard.observe(compiled, compiled="eager", strict=True) as seen:
            output = compiled(x())
    assert torch.equal(output, plain)
    assert seen.model == "Blocks"
    assert list(seen) == list(expected) == ["first", "second"]
    for name, matrix in expected.items():
        assert torch.equal(seen[name].to_dense(), matrix.to_dense())
    assert stance() == "default"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_compiled_model_runs_compiled_after_the_block(
    way: Callable[[nn.Module, str], nn.Module],
) -> None:
    calls: list[int] = []
    torch.compiler.reset()  # the compiler gives up a function after several compilations

    def backend(graph: Any, _: Any) -> Any:
        calls.append(0)
        return graph.forward

    model = way(Blocks(), backend)
    with torch.no_grad(), regard.observe(model, compiled="eager"):
        model(x())
    assert not calls
    with torch.no_grad():
        model(x())
    assert calls


def test_a_function_that_is_compiled_is_recorded() -> None:
    model = Function("eager")
    with torch.no_grad(), regard.observe(model, compiled="eager") as seen:
        model(x())
    assert list(seen) == ["Function"]


@torch.compile(backend="eager")
def doubled(x: Tensor) -> Tensor:
    return x * 2


def calling(function: Any) -> nn.Module:
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Calls()


class CallsAGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


class CallsOneOfAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = [doubled]

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[0](x)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (CallsAGlobal(), "doubled"),
        (calling(doubled), "function"),
        (CallsOneOfAList(), r"ways\[0\]"),
    ],
)
def test_a_compiled_function_beside_a_recorded_layer_is_named(
    layer: nn.Module, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.Sequential(ByHand(), layer)
    named = pytest.warns(UserWarning, match=f"compiled function '{name}'")
    with torch.no_grad(), named, regard.observe(model) as seen:
        model(x())
    assert list(seen) == ["0"]
    with torch.no_grad(), regard.observe(model, compiled="eager"):
        model(x())
    assert not recwarn


def test_a_compiled_function_that_calls_the_model_is_recorded() -> None:
    model = Blocks()
    run = torch.compile(lambda x: model(x) + 1, backend="eager")
    with torch.no_grad(), regard.observe(model, compiled="eager") as seen:
        run(x())
    assert list(seen) == ["first", "second"]


def test_gradients_reach_a_compiled_model() -> None:
    model = torch.compile(Blocks(), backend="eager")
    with regard.observe(model, compiled="eager") as seen:
        model(x())
    seen["second"].entropy().sum().backward()
    assert any(each.grad is not None for each in model.parameters())


def test_a_model_that_is_not_compiled_is_recorded_as_without() -> None:
    model = Stack()
    with torch.no_grad(), regard.observe(model, compiled="eager") as seen:
        model(x())
    assert list(seen) == ["first", "second"]


# transformers compiles flex_attention


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_that_transformers_compiles_is_recorded() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    tokens = torch.arange(5)[None]
    with torch.no_grad(), regard.observe(model) as expected:
        model(tokens)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), regard.observe(model, compiled="eager", strict=True) as seen:
        model(tokens)
    assert list(seen) == list(expected)
    for name, matrix in expected.items():
        # 1e-5: weights in float32 of layers whose inputs were rounded differently
        torch.testing.assert_close(seen[name].to_dense(), matrix.to_dense(), atol=1e-5, rtol=0)


class CompiledFlex(Heads):
    """Compiles flex_attention as its documentation says."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = [torch.compile(flex_attention)]

    def forward(self, x: Tensor) -> Tensor:
        mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, 7, 7, device="cpu")
        return self.ways[0](*self.project(x), block_mask=mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_compiled_flex_attention_is_recorded() -> None:
    model = CompiledFlex()
    with torch.no_grad(), regard.observe(model, compiled="eager") as seen:
        model(x())
    assert "mask=Causal()" in repr(seen["CompiledFlex"])


# The setting of the process


def test_the_setting_ends_with_an_exception() -> None:
    with pytest.raises(RuntimeError), regard.observe(Stack(), compiled="eager"):
        Stack()(noise(3, 7, 5))  # of a wrong width
    assert stance() == "default"


def test_the_setting_of_the_user_returns() -> None:
    model = Stack()
    with torch.compiler.set_stance("eager_on_recompile"):
        with torch.no_grad(), regard.observe(model, compiled="eager"):
            model(x())
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def test_the_setting_lasts_until_the_outer_block_ends() -> None:
    outer, inner = Stack(), torch.compile(Stack(), backend="eager")
    with torch.no_grad(), regard.observe(outer, compiled="eager"):
        with regard.observe(inner, compiled="eager") as seen:
            inner(x())
        assert stance() == "force_eager"
        outer(x())
    assert list(seen) == ["first", "second"]
    assert stance() == "default"


def test_blocks_of_two_threads_may_end_in_the_order_in_which_they_began() -> None:
    began, ended, found = Barrier(2), Barrier(2), list[list[str]]()

    def first() -> None:
        model = torch.compile(Stack(), backend="eager")
        with torch.no_grad(), regard.observe(model, compiled="eager") as seen:
            began.wait(60)
            model(x())
        found.append(list(seen))
        ended.wait(60)

    def second() -> None:
        model = torch.compile(Stack(), backend="eager")
        began.wait(60)
        with torch.no_grad(), regard.observe(model, compiled="eager") as seen:
            ended.wait(60)
            model(x())
        found.append(list(seen))

    threads = [Thread(target=first), Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [["first", "second"]] * 2
    assert stance() == "default"


@pytest.mark.parametrize(
    ("compiled", "error", "got"),
    [("inductor", ValueError, "'inductor'"), (True, TypeError, "a bool"), (3, TypeError, "an int")],
)
def test_another_argument_is_an_error(compiled: Any, error: type[Exception], got: str) -> None:
    with pytest.raises(error) as caught, regard.observe(Stack(), compiled=compiled):
        pytest.fail("the block must not run")
    assert str(caught.value) == (
        f'compiled is {got}; it must be "eager".\n'
        '    Pass compiled="eager" to run compiled parts uncompiled, or leave it out.'
    )
    assert stance() == "default"
