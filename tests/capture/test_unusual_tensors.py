"""Fused models with tensors that have no numbers or a class of their own, and models that fail."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from models import ImportedByName, Stack, noise

WITHOUT_NUMBERS = (
    "it ran on the meta device or in FakeTensorMode, whose tensors have no numbers.\n"
    "    Run the model on another device."
)


def x() -> Tensor:
    return noise(3, 7, 22)


class Marked(Tensor):
    """A class of tensors whose operations are PyTorch's."""


def test_tensors_of_another_class_are_recorded_as_their_numbers() -> None:
    model = ImportedByName().eval()
    with torch.no_grad():
        with regard.observe(model) as expected:
            plain = model(x())
        with regard.observe(model, strict=True) as seen:
            output = model(x().as_subclass(Marked))
    assert type(output) is Marked
    assert torch.equal(output.as_subclass(Tensor), plain)
    matrix = seen["ImportedByName"]
    assert type(matrix.source.query) is Tensor
    assert torch.equal(matrix.to_dense(), expected["ImportedByName"].to_dense())


def on_meta(model: nn.Module, x: Tensor) -> Tensor:
    return model.to("meta")(x.to("meta"))


def faked(model: nn.Module, x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(x))


def faked_mask(model: nn.Module, x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model.mask = mode.from_tensor(torch.ones(7, 7, dtype=torch.bool).tril())
        return model(mode.from_tensor(x))


class Masked(ImportedByName):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return nn.functional.scaled_dot_product_attention(query, key, value, self.mask)


@pytest.mark.parametrize("run", [on_meta, faked, faked_mask])
@pytest.mark.parametrize("surroundings", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("keep", ["qk", "qkv", [regard.Entropy()]], ids=str)
def test_tensors_without_numbers_are_refused_beside_others(
    run: Callable[[nn.Module, Tensor], Tensor], surroundings: Callable[[], Any], keep: Any
) -> None:
    model = nn.ModuleList([ImportedByName(), Masked()])
    aside = pytest.warns(UserWarning, match="'1' cannot be kept")
    with surroundings(), aside, regard.observe(model, keep=keep) as seen:
        model[0](x())
        run(model[1], x())
    names = list(seen.kept) if isinstance(keep, list) else list(seen)
    assert names == ["0"]
    assert [(each.module, each.reason) for each in seen.refused] == [("1", WITHOUT_NUMBERS)]


def fail(*_: object) -> None:
    raise KeyError("of the hook")


def test_a_hook_that_raises_ends_the_block_and_leaves_the_model_as_it_was() -> None:
    model = Stack()
    plain, hooks = model(x()), dict(model.first._forward_hooks)
    hook = model.second.register_forward_hook(fail)
    with pytest.raises(KeyError, match="of the hook"), regard.observe(model) as seen:
        model(x())
    hook.remove()
    assert model.first._forward_hooks == hooks
    assert list(seen) == ["first", "second"]  # both had run
    with regard.observe(model, strict=True) as seen:
        assert torch.equal(model(x()), plain)
    assert list(seen) == ["first", "second"]


def test_an_exception_that_is_caught_in_the_block_loses_no_layer() -> None:
    model = Stack()
    hook = model.second.register_forward_pre_hook(fail)
    with torch.no_grad(), regard.observe(model, strict=True) as seen:
        with pytest.raises(KeyError):
            model(x())
        hook.remove()
        model(x())
    assert next(iter(seen)) == "first"
    assert "second" in list(seen)


def test_each_thread_records_the_model_that_it_observes() -> None:
    found: dict[int, tuple[list[str], bool]] = {}

    def record(length: int) -> None:
        torch.set_num_threads(1)  # of this thread; a shared pool rounds in another order
        model, given = Stack().eval(), noise(3, length, 22)
        with torch.no_grad():
            plain = model(given)
            with regard.observe(model, strict=True) as seen:
                output = model(given)
        right = all(matrix.shape[-1] == length for matrix in seen.values())
        found[length] = list(seen), right and torch.equal(plain, output)

    before = torch.get_num_threads()
    threads = [Thread(target=record, args=(length,)) for length in (3, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.set_num_threads(before)
    assert found == dict.fromkeys((3, 5, 7, 11), (["first", "second"], True))
