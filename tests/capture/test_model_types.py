"""Many model types of transformers: observe changes no bit and sees the weights that they return.

small_transformers builds them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from small_transformers import build, inputs_of

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

TYPES = Path(__file__).with_name("model_types.txt").read_text().split()


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(items, list | tuple):
        return []
    return [each for item in items for each in tensors(item)]


def ran(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        return tensors(model(**inputs_of(model)))


def are_weights(tensor: Tensor) -> bool:
    """Whether it has the weights of each head: not scores, and not the mean, repeated."""
    sums = tensor.float().sum(-1)
    repeated = tensor.shape[1] > 1 and bool((tensor[:, :1] == tensor).all())
    return bool((tensor >= 0).all() and (sums - 1).abs().max() < 1e-4) and not repeated


@pytest.mark.parametrize("model_type", TYPES)
def test_observe_changes_no_bit(model_type: str) -> None:
    model = build(model_type)
    plain = ran(model)
    with regard.observe(model) as seen:
        observed = ran(model)
    assert plain
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert seen.layers


@pytest.mark.parametrize("model_type", TYPES)
def test_observe_sees_the_weights_that_eager_attention_returns(model_type: str) -> None:
    try:
        model = build(model_type, "eager")
        inputs = inputs_of(model)
        with torch.no_grad(), regard.observe(model) as seen:
            output = model(**inputs, output_attentions=True)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        pytest.skip(f"transformers cannot run it so: {error}"[:200])
    fields = ("encoder_attentions", "attentions", "decoder_attentions")
    wanted = [each for name in fields for each in tensors(list(output.get(name) or []))]
    shapes = [tuple(each.shape) for each in wanted]
    if shapes != [tuple(shape) for shape in seen.shapes.values()]:
        pytest.skip("its outputs are of other layers, or in another order")
    if not all(are_weights(each) for each in wanted):
        pytest.skip("it returns something else than the weights of each head")
    for matrix, weights in zip(seen.values(), wanted, strict=True):
        torch.testing.assert_close(matrix.to_dense().float(), weights.float(), atol=1e-5, rtol=0)


def test_there_are_many() -> None:
    assert len(set(TYPES)) >= 200
