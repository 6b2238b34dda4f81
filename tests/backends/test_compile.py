"""In a function that torch.compile compiles: the same answers and gradients, few graphs."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import regard
from cases import full_but
from regard.backends import sdpa_tiling

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def numbers(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.tanh(s) + 0.1 * (q_idx - kv_idx)


# Tensors before and after, so that there is a graph on both sides.
FUNCTIONS: dict[str, Function] = {
    "operator": lambda q, k, v: (regard.attend(q * 2, k) @ v).sin(),
    "matmul": lambda q, k, v: torch.matmul(regard.attend(q * 2, k), v).sin(),
    "matmul-causal": lambda q, k, v: torch.matmul(
        regard.attend(q * 2, k, mask=regard.Causal()), v
    ).sin(),
    "matmul-window": lambda q, k, v: torch.matmul(
        regard.attend(q * 2, k, mask=regard.SlidingWindow(3, 0)), v
    ).sin(),
    "from-the-left": lambda q, k, v: (v.mT @ regard.attend(q * 2, k)).sin(),
    "transposed": lambda q, k, v: (regard.attend(q * 2, k).T @ v).sin(),
    "entropy": lambda q, k, _: regard.attend(q * 2, k).entropy().sin(),
    "top-keys": lambda q, k, _: regard.attend(q * 2, k).topk(3).values.sin(),
    "several": lambda q, k, _: torch.cat(
        regard.attend(q * 2, k, mask=regard.Causal()).reduce(regard.Sum(-2), regard.LogSumExp()), -1
    ).sin(),
    "window": lambda q, k, _: regard.attend(q * 2, k)[..., 2:5, :3].sin(),
    "scores": lambda q, k, _: regard.attend(q * 2, k).scores[..., 2:5, :3].sin(),
    "score-mod": lambda q, k, _: regard.attend(q * 2, k, score_mod=numbers).entropy().sin(),
    "given": lambda q, k, _: regard.AttentionMatrix.from_scores(q @ k.mT).entropy().sin(),
    "kl": lambda q, k, _: regard.kl(regard.attend(q * 2, k), regard.attend(k, q)).sin(),
    "rollout": lambda q, k, v: (regard.rollout([regard.attend(q * 2, k)] * 2) @ v[:, 0]).sin(),
}
# Compiling one takes about a second.
functions = pytest.mark.parametrize("function", full_but(FUNCTIONS, "several"))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing that an earlier test compiled, and no warning that Dynamo gives about itself."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Dynamo reads .grad of what enters a graph after a break, whatever breaks it.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor", UserWarning)
        yield
    torch._dynamo.reset()


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    made = (torch.randn(1, 2, length, 4, generator=generator) for _ in range(3))
    return [tensor.requires_grad_() for tensor in made]


def with_gradients(function: Function, given: list[Tensor]) -> list[Tensor | None]:
    answer = function(*given)
    return [answer, *torch.autograd.grad(answer.sum(), given, allow_unused=True)]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        # Graphs may round a product with 2 in another place.
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@functions
def test_a_compiled_function_gives_the_same_answer_and_gradients(function: Function) -> None:
    compiled = torch.compile(function, backend="aot_eager")
    given = inputs(11)
    assert_same(with_gradients(compiled, given), with_gradients(function, given))


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param("matmul-window", None, id="window", marks=pytest.mark.full),
        pytest.param("entropy", None, id="entropy", marks=pytest.mark.full),
        pytest.param("entropy", True, id="entropy-dynamic", marks=pytest.mark.full),
    ],
)
def test_other_lengths_give_the_same_answer_and_gradients(name: str, dynamic: bool | None) -> None:
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", dynamic=dynamic)
    for length in (11, 13, 17):
        given = inputs(length)
        assert_same(with_gradients(compiled, given), with_gradients(FUNCTIONS[name], given))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["matmul", "matmul-causal", "matmul-window"])
def test_a_product_of_the_fused_backend_is_one_graph(name: str) -> None:
    compiled = torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)
    given = inputs(11)
    assert_same([compiled(*given)], [FUNCTIONS[name](*given)])


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["entropy", *(pytest.param(name, marks=pytest.mark.full) for name in ("several", "kl"))]
)
def test_a_long_sequence_compiles_no_more_than_the_graphs_on_both_sides(name: str) -> None:
    graphs: list[object] = []

    def counted(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch.compile(FUNCTIONS[name], backend=counted)(*inputs(601))
    # Before, after, and between checks: not one for each of the blocks.
    assert len(graphs) <= 4


def tiled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(regard.attend(query, key, mask=regard.SlidingWindow(3000, 2)), value)


def scores(query: Tensor, key: Tensor, _: Tensor) -> Tensor:
    return regard.attend(query, key).scores[..., 2:9:3, :4]


# A product in 20 tiles takes ten seconds to compile.
@pytest.mark.full
@pytest.mark.parametrize("function", [pytest.param(tiled, marks=pytest.mark.full), scores])
def test_other_tensors_of_the_same_shapes_compile_nothing_again(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_tiling, "SMALL", 0)
    monkeypatch.setattr(sdpa_tiling, "MIN_TILE", 4)
    monkeypatch.setattr(sdpa_tiling, "MAX_TILE", 4)
    graphs: list[object] = []

    def counted(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, backend=counted)
    counts: list[int] = []
    for _ in range(3):
        given = [x.detach().clone().requires_grad_() for x in inputs(11)]
        assert_same(with_gradients(compiled, given), with_gradients(function, given))
        counts.append(len(graphs))
    assert counts[0] == counts[-1]


@pytest.mark.full
def test_a_square_product_is_not_taken_for_one_from_the_left() -> None:
    given = [tensor[..., :4, :] for tensor in inputs(11)]  # A @ v and v @ A have one shape
    compiled = torch.compile(FUNCTIONS["operator"], backend="eager")
    assert_same([compiled(*given)], [FUNCTIONS["operator"](*given)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "place"),
    [("entropy", r"disable\(sweep"), ("operator", r"disable\(right\._times_from_left")],
)
def test_where_one_graph_was_demanded_the_error_shows_the_place(name: str, place: str) -> None:
    compiled = torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=place):
        compiled(*inputs(11))
