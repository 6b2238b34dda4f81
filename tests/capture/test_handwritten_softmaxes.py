"""Exponentials over their sums and masks by assignment are seen; other softmaxes are refused."""

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import regard
from handwritten_masks import MASKS
from handwritten_masks import REFUSED as OTHERS
from handwritten_softmaxes import REFUSED, SOFTMAXES, Case
from models import noise

MODES = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Layer(nn.Module):
    """Runs a function of query, key and value."""

    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.query, self.key, self.value = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> object:
        return self.way(self.query(x), self.key(x + 1), self.value(x))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("case", [*SOFTMAXES, *MASKS], ids=lambda case: case.name)
def test_attention_in_other_words_is_seen_as_what_it_means(
    case: Case, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    model, x = Layer(case.way), noise(2, 3, 5, 7)
    with mode():
        plain = model(x)
        with regard.observe(model) as seen:
            output = model(x)
    assert all(torch.equal(*pair) for pair in zip(plain, output, strict=True))
    assert list(seen) == ["Layer"]
    with torch.no_grad():
        scores = model.query(x).double() @ model.key(x + 1).double().mT
    expected = case.meaning(scores)
    found = seen[0].to_dense().double().reshape(expected.shape)
    # float32 rounds scores of 5 to 5e-7, their exponentials and sums likewise
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(output[0].detach().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("way", [*REFUSED, *OTHERS], ids=lambda way: way.__name__)
def test_other_ways_to_take_a_softmax_are_refused_with_the_line(
    way: Callable[[Tensor, Tensor, Tensor], object],
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    model, x = Layer(way), noise(2, 3, 5, 7)
    with mode():
        plain = model(x)
        with pytest.raises(regard.RegardError) as refusal, regard.observe(model) as seen:
            output = model(x)
    assert all(torch.equal(*pair) for pair in zip(plain, output, strict=True))
    assert list(seen) == []
    lines, start = inspect.getsourcelines(way)
    file = inspect.getsourcefile(way)
    said = re.findall(rf"{file}:(\d+)", str(refusal.value))
    assert said
    assert all(start <= int(line) < start + len(lines) for line in said)
    assert "'Layer'" in str(refusal.value)
