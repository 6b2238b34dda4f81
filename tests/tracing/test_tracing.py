"""The operations that a model runs, with module and line; and the model untouched."""

import inspect
import linecache
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.bert.modeling_bert import eager_attention_forward

from regard.tracing.tracer import Operation, Tracer, apart

aten = torch.ops.aten
SOFTMAX = aten._softmax.default
MODES = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x) if x.ndim > 1 else torch.softmax(x, -1)

    def twice(self, x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1)  # the user's own line


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


def told(model: nn.Module, *functions: Any) -> tuple[Tracer, list[Operation]]:
    operations: list[Operation] = []
    return Tracer(model, dict.fromkeys(functions, operations.append)), operations


def modules_of(model: nn.Module, run: Callable[[], object]) -> list[str | None]:
    modules: list[str | None] = []
    with torch.no_grad(), Tracer(model, {SOFTMAX: lambda op: modules.append(op.module())}):
        run()
    return modules


def test_an_operation_comes_with_its_arguments_and_its_output() -> None:
    x, (tracer, operations) = torch.randn(2, 3), told(Outer(), SOFTMAX)
    with tracer:
        output = torch.softmax(x, -1)
    (operation,) = operations
    assert operation.func is SOFTMAX
    assert operation.args[0] is x
    assert operation.args[1:] == (-1, False)
    assert operation.kwargs == {}
    assert operation.output is output


def test_a_listener_is_told_of_its_operations_alone() -> None:
    model = Outer()
    tracer, operations = told(model, aten.addmm.default, aten.mul.Tensor)
    with tracer:
        model(torch.randn(2, 3))
    assert [operation.func for operation in operations] == [aten.addmm.default, aten.mul.Tensor]


def test_a_listener_for_all_the_others_is_told_of_the_rest() -> None:
    model, rest = Outer(), []
    with Tracer(model, {SOFTMAX: lambda _: None}, lambda _: lambda op: rest.append(op.func)):
        model(torch.randn(2, 3))
    assert SOFTMAX not in rest
    assert {aten.addmm.default, aten.mul.Tensor} <= {*rest}


def test_the_caller_is_the_innermost_module_and_the_users_own_line() -> None:
    model = Outer()
    assert modules_of(model, lambda: model(torch.zeros(2, 3))) == ["inner"]
    lines, start = inspect.getsourcelines(Inner)
    own = next(start + i for i, line in enumerate(lines) if "the user's own line" in line)
    assert places_of(model, lambda: model(torch.zeros(2, 3))) == [f"{__file__}:{own}"]


def test_the_model_itself_has_its_classs_name() -> None:
    model = Inner()
    assert modules_of(model, lambda: model(torch.zeros(3))) == ["Inner"]


class Unusual(nn.Module):
    def encode(this, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


def encode(model: nn.Module, x: Tensor) -> Tensor:
    """A function is no method, whatever its first argument is."""
    return torch.softmax(x, -1)


def test_a_method_names_its_module_whatever_it_calls_it() -> None:
    model, x = Unusual(), torch.zeros(3)
    assert modules_of(model, lambda: model.encode(x)) == ["Unusual"]
    assert modules_of(model, lambda: encode(model, x)) == [None]


def test_what_no_module_of_the_model_runs_has_no_name() -> None:
    other = Inner()
    assert modules_of(Outer(), lambda: other(torch.zeros(3))) == [None]


def test_the_module_of_transformers_is_named() -> None:
    config = transformers.BertConfig(
        vocab_size=5, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=3
    )
    model = transformers.BertModel(config).eval()
    model.set_attn_implementation("eager")
    found = modules_of(model, lambda: model(torch.tensor([[1, 2]])))
    assert found == ["encoder.layer.0.attention.self"]


def places_of(model: nn.Module, run: Callable[[], object]) -> list[str]:
    places: list[str] = []
    with torch.no_grad(), Tracer(model, {SOFTMAX: lambda op: places.append(op.line())}):
        run()
    return places


def test_the_place_in_a_librarys_model_is_the_librarys_line() -> None:
    config = transformers.BertConfig(
        vocab_size=5, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=3
    )
    model = transformers.BertModel(config).eval()
    model.set_attn_implementation("eager")
    (place,) = places_of(model, lambda: model(torch.tensor([[1, 2]])))
    file, _, number = place.rpartition(":")
    assert Path(file).name == "modeling_bert.py"
    assert "softmax" in linecache.getline(file, int(number))


def eager_scores(module: nn.Module, x: Tensor) -> Tensor:
    return eager_attention_forward(module, x, x, x, None, scaling=1.0)[1]  # of transformers


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(eager_scores(self, x))  # of PyTorch


def test_the_place_in_the_users_own_model_is_the_users_own_line() -> None:
    model, x = Own(), torch.zeros(1, 1, 2, 4)
    source = Path(__file__).read_text().splitlines()
    expected = [
        f"{__file__}:{1 + next(i for i, line in enumerate(source) if line.endswith(comment))}"
        for comment in ("  # of transformers", "  # of PyTorch")
    ]
    assert places_of(model, lambda: model(x)) == expected


class Encoder(nn.TransformerEncoder):
    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.softmax(self.second(self.first(x).relu()), -1)

        return checkpoint(run, x, use_reentrant=self.reentrant)


def nearer(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + kv_idx - q_idx


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = self.linear(x)[:, None].expand(-1, 2, -1, -1)
        return flex_attention(query, query, query, score_mod=nearer)


class Noisy(nn.Module):
    """Draws random numbers, writes in place, calls vmap and takes gradients inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x.clone().mul_(2), 0.3, training=True)
        slope = torch.func.grad(lambda x: x.pow(3).sum())(x)
        return torch.vmap(lambda row: row.cumsum(-1))(x) + slope + torch.randn_like(x)


MODELS = {
    "encoder": Encoder,
    "plain": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)),
    "checkpoint": partial(Recomputed, reentrant=False),
    "reentrant checkpoint": partial(Recomputed, reentrant=True),
    "noisy": Noisy,
}


def run(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8)
    output = model(x.requires_grad_(torch.is_grad_enabled()))
    if torch.is_grad_enabled():
        output.float().square().sum().backward()
    parameters = [p.grad for p in model.parameters() if p.grad is not None]
    grads = [grad.clone() for grad in parameters]
    model.zero_grad()
    return [output.detach(), *grads]


def busy(operation: Operation) -> None:
    """A listener that works with tensors and asks for everything."""
    operation.module(), operation.line()
    with apart():
        torch.ones(3, requires_grad=True).softmax(-1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_no_bit_of_outputs_and_gradients_changes(
    build: Callable[[], nn.Module],
    mode: Callable[[], AbstractContextManager[object]],
    training: bool,
) -> None:
    torch.manual_seed(0)
    model = build().train(training)
    with mode():
        expected = run(model)
        with Tracer(model, {}, lambda _: busy), Tracer(model, {SOFTMAX: busy}):
            found = run(model)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_the_fast_path_of_an_encoder_stays() -> None:
    model = Encoder().eval()
    tracer, operations = told(model, aten._transformer_encoder_layer_fwd.default)
    with torch.no_grad(), tracer:
        model(torch.randn(2, 5, 8))
    assert len(operations) == 2


def test_composite_operations_come_as_their_parts_in_inference_mode() -> None:
    tracer, operations = told(Outer(), aten.matmul.default, aten.mm.default, SOFTMAX)
    with torch.inference_mode(), tracer:
        torch.softmax(torch.ones(2, 3) @ torch.ones(3, 2), -1)
    assert [operation.func for operation in operations] == [aten.mm.default, SOFTMAX]


COMPOSITES = {
    "matmul": lambda x: x @ x.mT,
    "linear": lambda x: torch.nn.functional.linear(x, x[0, 0], x[0, 0, :, 0]),
    "einsum": lambda x: torch.einsum("bhid,bhjd->bhij", x, x),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "in place": lambda x: x.clone().multiply_(2).subtract_(x),
    "view": lambda x: x.transpose(1, 2).reshape(2, 5, 21).unflatten(-1, (3, 7)),
}


@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "plain"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_the_parts_of_a_composite_operation_give_its_bits(name: str, mixed: bool) -> None:
    x = torch.randn(2, 3, 5, 7, generator=torch.manual_seed(0))
    with torch.inference_mode(), torch.autocast("cpu", enabled=mixed):
        expected = COMPOSITES[name](x)
        with Tracer(Outer(), {}):
            found = COMPOSITES[name](x)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize("length", [1, 2, 6])
@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "plain"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("is_encoder", [True, False])
def test_the_fast_paths_of_torch_nn_keep_their_bits(
    is_encoder: bool, mode: Callable[[], Any], mixed: bool, length: int
) -> None:
    """They call ``linear`` with their first tokens, which are no contiguous tensor."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 6, 32)[:, :length]
    with mode(), torch.autocast("cpu", enabled=mixed):
        run = (lambda: encoder(x)) if is_encoder else (lambda: attention(x, x, x)[0])
        expected = run()
        with Tracer(attention, {}):
            observed = run()
    assert torch.equal(observed, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_composite_operations_on_nested_tensors_stay_whole() -> None:
    tracer, operations = told(Outer(), aten.linear.default)
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.strided)
    with torch.inference_mode(), tracer:
        output = torch.nn.functional.linear(x, torch.ones(5, 3))
    assert output.is_nested
    assert len(operations) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_told_as_one_operation() -> None:
    model = Flexible()
    with torch.no_grad():
        expected = run(model)
        tracer, operations = told(model, torch.ops.higher_order.flex_attention)
        with tracer:
            found = run(model)
    assert all(map(torch.equal, found, expected))
    assert len(operations) == 1


def test_compiled_parts_stay_compiled() -> None:
    compiled: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: torch.softmax(x * 2, -1), backend=backend)
    expected = function(torch.ones(3))
    with Tracer(Outer(), {}):
        found = function(torch.ones(3))
        function(torch.ones(4, dtype=torch.float64))
    assert torch.equal(found, expected)
    assert len(compiled) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_runs_is_not_told(reentrant: bool) -> None:
    model, rest = Recomputed(reentrant=reentrant), []
    with Tracer(model, {}, lambda _: lambda op: rest.append(op.func)):
        loss = model(torch.randn(5, 8, requires_grad=True)).sum()
        forward = [*rest]
        loss.backward()
    assert forward.count(SOFTMAX) == 1
    assert rest[len(forward) :].count(SOFTMAX) == 0
    assert not any("backward" in str(func) for func in rest)


class Calls(TorchDispatchMode):
    """A mode of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Calls, Functions])
def test_a_listeners_own_work_is_seen_by_nobody(kind: type[Calls] | type[Functions]) -> None:
    model, x = Outer(), torch.ones(2, 3)
    with kind() as expected:
        model(x)
    with kind() as found, Tracer(model, {}, lambda _: busy):
        model(x)
    assert found.seen == expected.seen


def test_tracers_nest_and_each_names_its_own_modules() -> None:
    model, names = Outer(), []
    outer = Tracer(model, {SOFTMAX: lambda op: names.append(("outer", op.module()))})
    inner = Tracer(model.inner, {SOFTMAX: lambda op: names.append(("inner", op.module()))})
    with outer, inner:
        model(torch.ones(2, 3))
    assert names == [("outer", "inner"), ("inner", "Inner")]


def test_work_apart_has_no_mode_of_the_models() -> None:
    states: list[object] = []

    def ask(_: Operation) -> None:
        with apart():
            product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
            states.extend((product.dtype, product.requires_grad, product.is_inference()))

    with torch.inference_mode(), torch.autocast("cpu"), Tracer(Outer(), {SOFTMAX: ask}):
        torch.softmax(torch.ones(3), -1)
    assert states == [torch.float32, False, False]


def test_an_exception_of_the_model_leaves_nothing_behind() -> None:
    tracer, operations = told(Outer(), SOFTMAX)
    with pytest.raises(RuntimeError, match="must match"), tracer:
        torch.ones(2) + torch.ones(3)
    torch.softmax(torch.ones(3), -1)
    assert operations == []
    assert torch._C._len_torch_dispatch_stack() == 0


def test_another_thread_is_not_told_of() -> None:
    tracer, operations = told(Outer(), SOFTMAX)
    with tracer:
        thread = threading.Thread(target=lambda: torch.softmax(torch.ones(3), -1))
        thread.start()
        thread.join()
    assert operations == []


def test_a_tracer_in_each_thread_sees_its_own() -> None:
    seen: dict[int, list[Operation]] = {}

    def run(index: int) -> None:
        tracer, seen[index] = told(Outer(), SOFTMAX)
        barrier.wait()
        with tracer:
            for _ in range(index):
                torch.softmax(torch.ones(3), -1)

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=run, args=(index,)) for index in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {index: len(operations) for index, operations in seen.items()} == {1: 1, 2: 2, 3: 3}
