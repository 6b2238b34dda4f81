"""Where observe looks, what it leaves behind (nothing), and what it costs."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import regard
from models import MODELS, Heads, ImportedByName, Stack, bert, llama, noise


def x() -> Tensor:
    return noise(3, 7, 22)


# Nothing is left behind


def hooks(model: nn.Module) -> list[object]:
    """Every hook on every module: their dictionaries, whatever PyTorch calls them."""
    return [
        hook
        for module in model.modules()
        for name, value in vars(module).items()
        if "hook" in name and isinstance(value, dict)
        for hook in value.values()
    ]


def test_a_hook_would_be_seen() -> None:
    model = Stack()
    model.first.register_forward_hook(lambda *_: None)
    assert len(hooks(model)) == 1


def test_nothing_is_patched_or_hooked_inside_the_block() -> None:
    model, function = Stack(), F.scaled_dot_product_attention
    before = [dict(vars(module)) for module in model.modules()]
    with regard.observe(model):
        model(x())
        assert F.scaled_dot_product_attention is function
        assert hooks(model) == []
        assert [dict(vars(module)) for module in model.modules()] == before


def modes() -> int:
    """How many modes of any kind see the operations of this thread."""
    return len(_get_current_function_mode_stack()) + len(_get_current_dispatch_mode_stack())


def test_no_mode_is_left_after_the_block() -> None:
    model = Stack()
    with regard.observe(model):
        assert modes() == 1
        model(x())
    assert modes() == 0


@pytest.mark.parametrize(
    ("error", "run"),
    [(ZeroDivisionError, lambda: 1 / 0), (regard.RegardError, lambda: None)],
    ids=["an exception", "no attention"],
)
def test_no_mode_is_left_after_an_error(error: type[Exception], run: Callable[[], object]) -> None:
    with pytest.raises(error), regard.observe(Stack()):
        run()
    assert modes() == 0


def test_after_the_block_nothing_more_is_kept() -> None:
    model = Stack()
    with regard.observe(model) as seen:
        model(x())
    model(x())
    assert list(seen) == ["first", "second"]


# Where it looks


def test_layers_have_the_names_of_their_modules_in_the_order_they_ran() -> None:
    case = MODELS["bart, cross-attention"]
    model = case.model()
    with regard.observe(model) as seen:
        model(**case.inputs)
    assert list(seen) == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
    ]


def test_a_module_that_runs_twice_has_a_number_after_its_name() -> None:
    model = Stack(times=3)
    with regard.observe(model) as seen:
        model(x())
        model(x())
    assert list(seen) == [
        *("first", "first#2", "first#3", "second"),
        *("first#4", "first#5", "first#6", "second#2"),
    ]


def test_the_model_itself_has_the_name_of_its_class() -> None:
    model = ImportedByName()
    with regard.observe(model) as seen:
        model(x())
    assert list(seen) == ["ImportedByName"]


def test_calls_outside_the_model_are_not_kept() -> None:
    model, other = Stack(), ImportedByName()
    with regard.observe(model) as seen:
        F.scaled_dot_product_attention(x(), x(), x())
        other(x())
        model(x())
        regard.attend(x(), x()) @ x()
        seen[0] @ noise(3, 2, 7, 11)
    assert list(seen) == ["first", "second"]


def test_a_part_of_a_model_can_be_observed() -> None:
    model = Stack()
    with regard.observe(model.second) as seen:
        model(x())
    assert list(seen) == ["ImportedByName"]


def test_two_models_at_once_each_have_their_own() -> None:
    # Since PyTorch 2.15 tensors without a batch have one of 1 where dropout is on.
    one, two = Stack(), ImportedByName().eval()
    with regard.observe(one) as seen_one, regard.observe(two) as seen_two:
        one(x())
        two(noise(5, 22))
    assert [tuple(m.shape) for m in seen_one.values()] == [(3, 2, 7, 7)] * 2
    assert [tuple(m.shape) for m in seen_two.values()] == [(2, 5, 5)]


def test_nested_blocks_each_keep_what_ran_inside_them() -> None:
    model = Stack()
    with regard.observe(model) as outer:
        model(x())
        with regard.observe(model) as inner:
            model(x())
    assert list(inner) == ["first", "second"]
    assert list(outer) == ["first", "second", "first#2", "second#2"]
    assert torch.equal(outer[-1].to_dense(), inner[-1].to_dense())


@pytest.mark.parametrize("layer", [Stack, lambda: regard.nn.SelfAttention(22)])
def test_blocks_may_end_in_any_order(layer: Callable[[], nn.Module]) -> None:
    model = layer()
    first, second = regard.observe(model), regard.observe(model)
    seen_first, seen_second = first.__enter__(), second.__enter__()
    model(x())
    first.__exit__(None, None, None)
    model(x())
    second.__exit__(None, None, None)
    model(x())
    assert len(seen_second) == 2 * len(seen_first) > 0
    assert modes() == 0


def test_other_threads_are_not_seen() -> None:
    model = Stack()
    with regard.observe(model) as seen:
        thread = threading.Thread(target=model, args=(x(),))
        thread.start()
        thread.join()
        assert len(seen) == 0
        model(x())
    assert len(seen) == 2


def test_a_part_and_the_whole_can_be_observed_at_once() -> None:
    model = Stack()
    with regard.observe(model) as whole, regard.observe(model.second) as part:
        model(x())
    assert list(whole) == ["first", "second"]
    assert list(part) == ["ImportedByName"]
    assert torch.equal(whole["second"].to_dense(), part[0].to_dense())


def test_an_exception_in_an_inner_block_leaves_the_outer_one_whole() -> None:
    model = Stack()
    with regard.observe(model) as outer:
        with pytest.raises(ZeroDivisionError), regard.observe(model) as inner:
            model(x()), 1 / 0
        model(x())
    assert list(inner) == ["first", "second"]
    assert list(outer) == ["first", "second", "first#2", "second#2"]
    assert modes() == 0


def test_two_threads_each_see_their_own() -> None:
    models, seen = [Stack(), Stack()], {}
    together = threading.Barrier(2)

    def work(model: Stack) -> None:
        with regard.observe(model) as mine:
            together.wait()
            for _ in range(5):
                model(x())
            together.wait()
        seen[id(model)] = mine

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(seen[id(model)]) for model in models] == [10, 10]


class Count(TorchFunctionMode):
    """A mode of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [True, False], ids=["inside the block", "around it"])
def test_a_mode_of_the_users_own_sees_the_same(inside: bool) -> None:
    model, plain, mode = Stack(), Count(), Count()
    with plain:
        model(x())
    with nullcontext() if inside else mode, regard.observe(model) as seen:
        mode.calls = 0
        with mode if inside else nullcontext():
            model(x())
        calls = mode.calls
    assert calls == plain.calls
    assert list(seen) == ["first", "second"]


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(None, id="fused"),
        pytest.param(regard.SlidingWindow(1, 0), id="blocks"),
        pytest.param(regard.Causal() & regard.Padding(4), id="two masks"),
    ],
)
def test_our_own_layers_are_seen_whichever_backend_runs_them(mask: regard.Mask | None) -> None:
    layer = regard.nn.SelfAttention(8, num_heads=2, mask=mask)
    x = torch.randn(1, 4, 8)
    expected = layer(x)
    with regard.observe(layer) as seen:
        output = layer(x)
    assert torch.equal(output, expected)
    assert list(seen) == ["SelfAttention"]
    assert torch.equal(seen[0].to_dense(), layer.weights(x).to_dense())


# What it costs


def kept_tensors(seen: regard.Recording) -> dict[int, Tensor]:
    """Every tensor of a recording once, by the address of its numbers."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    for matrix in seen.values():
        matrix.source.map(note)
        if matrix.mask is not None:
            matrix.mask.map(note)
    return found


def kept_bytes(build: Callable[[str], nn.Module], tokens: int) -> int:
    torch.manual_seed(0)
    model = build("sdpa").eval()
    with torch.no_grad(), regard.observe(model) as seen:
        model(input_ids=torch.ones(1, tokens, dtype=torch.int64))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept_tensors(seen).values())


@pytest.mark.parametrize("build", [bert, llama], ids=["bert", "llama"])
def test_the_memory_of_a_recording_grows_with_the_length(
    build: Callable[[str], nn.Module],
) -> None:
    assert kept_bytes(build, 14) == 2 * kept_bytes(build, 7)
    assert kept_bytes(build, 56) == 8 * kept_bytes(build, 7)


def test_llama_is_kept_with_its_few_key_heads() -> None:
    # 2 layers of 7 tokens of 8 numbers of 4 bytes, 4 query heads and 2 key heads
    assert kept_bytes(llama, 7) == 2 * 7 * 8 * 4 * (4 + 2)


def test_layers_that_share_a_bias_keep_it_once() -> None:
    case = MODELS["t5 padded"]
    model = case.model()
    with regard.observe(model) as seen:
        model(**case.inputs)
        model(**case.inputs)
    masks = {
        address for address, tensor in kept_tensors(seen).items() if tensor.shape[-2:] == (7, 7)
    }
    assert len(masks) == 1


class Padded(Heads):
    """A mask that stands for every head and every query, expanded before the call."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.arange(7) != 5).expand(3, 2, 7, 7)
        return F.scaled_dot_product_attention(*self.project(x), attn_mask=keep)


def test_an_expanded_mask_is_kept_narrow() -> None:
    model = Padded()
    with regard.observe(model) as seen:
        model(x())
    masks = [tensor for tensor in kept_tensors(seen).values() if tensor.dtype == torch.bool]
    assert [mask.untyped_storage().nbytes() for mask in masks] == [7]
