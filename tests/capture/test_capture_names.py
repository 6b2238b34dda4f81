"""Attention written by hand has the name of the module that ran both of its products."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from models import noise


class Layer(nn.Module):
    """Attention whose product and softmax are modules, or not."""

    def __init__(
        self,
        softmax: Callable[[Tensor], Tensor] | None = None,
        product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    ) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.softmax, self.product = softmax or nn.Softmax(-1), product

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.product(self.query(x), self.key(x).mT)) @ x


class MatMul(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


class Inside(nn.Module):
    """A layer whose core takes product and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)


def shared() -> nn.Module:
    softmax = nn.Softmax(-1)
    return nn.Sequential(Layer(softmax), Layer(softmax))


def both_shared() -> nn.Module:
    softmax, product = nn.Softmax(-1), MatMul()
    return nn.Sequential(Layer(softmax, product), Layer(softmax, product))


def one_after_another() -> nn.Module:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT

    class Draw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.Sequential(Scores(), nn.Softmax(-1))

        def forward(self, x: Tensor) -> Tensor:
            return self.steps(x) @ x

    return nn.Sequential(Draw(), Draw())


MODELS = {
    "a softmax of its own": (lambda: nn.Sequential(Layer(), Layer()), ["0", "1"]),
    "a shared softmax": (shared, ["0", "1"]),
    "a shared softmax and a shared product": (both_shared, ["0", "1"]),
    "a function": (lambda: nn.Sequential(Layer(partial(torch.softmax, dim=-1))), ["0"]),
    "a core": (lambda: nn.Sequential(Inside(), Inside()), ["0.core", "1.core"]),
    "one after another": (one_after_another, ["0", "1"]),
}


@pytest.mark.parametrize(("model", "names"), MODELS.values(), ids=MODELS)
def test_an_attention_has_the_name_of_what_ran_its_products(
    model: Callable[[], nn.Module], names: list[str]
) -> None:
    with regard.observe(run := model()) as seen:
        run(noise(2, 5, 6))
    assert list(seen) == names


def test_a_layer_with_a_shared_softmax_is_selected_by_its_own_name() -> None:
    with regard.observe(model := shared(), layers=["1"]) as seen:
        model(noise(2, 5, 6))
    assert list(seen) == ["1"]


LONGFORMER = transformers.LongformerConfig(
    vocab_size=5,
    hidden_size=4,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=3,
    attention_window=4,
    max_position_embeddings=20,
)


def test_a_refusal_in_a_librarys_model_has_the_librarys_lines() -> None:
    model = transformers.LongformerModel(LONGFORMER).eval()
    ids = torch.tensor([[2, 3, 4, 2, 3, 4, 2, 3]])
    with pytest.raises(regard.RegardError, match="a row sums to") as caught, regard.observe(model):
        model(ids, global_attention_mask=(ids == 2).long())
    lines = re.findall(r"\(([^()]+):(\d+)\)", str(caught.value))
    assert {Path(file).name for file, _ in lines} == {"modeling_longformer.py"}
    assert len({number for _, number in lines}) == len(lines) == 2


def test_the_blocks_of_longformer_have_their_own_axes() -> None:
    model = transformers.LongformerModel(LONGFORMER).eval()
    with torch.no_grad(), regard.observe(model) as seen:
        model(torch.tensor([[2, 3, 4, 2, 3, 4, 2, 3]]))
    assert seen[0].shape[-3:] == (4, 2, 6)  # blocks, queries of a block, keys of three blocks


def test_a_refusal_has_the_name_of_its_own_layer() -> None:
    model = nn.Sequential(Layer(), Layer(nn.Softmax(-2)))
    reason = "^the attention of '1' cannot be kept"
    with pytest.raises(regard.RegardError, match=reason), regard.observe(model, strict=True):
        model(noise(2, 5, 6))
