"""Products of a batch with one matrix have the bits that they have without a mode."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

import regard

HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key
MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda a, b: a @ b,
    "matmul": torch.matmul,
    "out": lambda a, b: torch.matmul(a, b, out=torch.empty(0)),
    "grad": lambda a, b: torch.func.grad(lambda x: (x @ b).sin().sum())(a),
}


class Product(nn.Module):
    """A product beside an attention, without which observe would say that it saw none."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.multiply = multiply
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        tokens = self.one * torch.arange(6.0).view(3, 2)
        _ = (tokens @ tokens.mT).softmax(-1) @ tokens
        return self.multiply(first, second)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_times_one_matrix_has_the_same_bits(
    way: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model = Product(WAYS[way])
    for batch, n, m, k in product((2, 8), (1, 5, 64), (5, 64), (1, 12)):
        many, one = torch.randn(batch, n, m), torch.randn(1, m, k)
        for factors in ((many, one), (one.mT, many.mT)):
            with mode():
                plain = model(*factors)
                with regard.observe(model):
                    observed = model(*factors)
            assert torch.equal(plain, observed)


@pytest.mark.parametrize("of_one", [False, True], ids=["the batch", "both"])
def test_its_gradients_have_the_same_bits(of_one: bool) -> None:
    model = Product(torch.matmul)
    for batch, n, m, k in ((2, 5, 5, 12), (8, 5, 64, 12), (2, 1, 64, 64)):
        many = torch.randn(batch, n, m, requires_grad=True)
        one = torch.randn(1, m, k, requires_grad=of_one)
        leaves = [each for each in (many, one) if each.requires_grad]
        plain = torch.autograd.grad(model(many, one).sin().sum(), leaves)
        with regard.observe(model):
            observed = torch.autograd.grad(model(many, one).sin().sum(), leaves)
        assert all(map(torch.equal, plain, observed))


def test_no_kernel_stays_behind() -> None:
    def stands() -> bool:
        return HAS_KERNEL("aten::matmul", "AutogradCPU")

    model, seen = Product(torch.matmul), list[bool]()
    factors = torch.randn(2, 3, 4), torch.randn(1, 4, 5)

    def other() -> None:
        with regard.observe(model):
            model(*factors)
        seen.append(stands())

    with pytest.raises(KeyError), regard.observe(model):  # noqa: PT012 - the block is the test
        thread = Thread(target=other)
        thread.start()
        thread.join()
        raise KeyError
    assert seen == [True]
    assert not stands()
