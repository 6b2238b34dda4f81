"""Hand-written attention with operations that have no place in it, and with heads in the batch."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from models import Heads, noise



class Layer(nn.Module):
    """Attention of some scores, whatever is done to them."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return self.way(scores).softmax(-1) @ x


def normed(scores: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(scores, (5,))  # here


def sorted_scores(scores: Tensor) -> Tensor:
    return scores.sort(-1).values  # here


def numbers_put_in(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., 0] = torch.arange(5.0)  # here
    return scores


def added_by_index(scores: Tensor) -> Tensor:
    return scores.index_put((torch.tensor(1),), torch.tensor(-1e9), accumulate=True)  # here


def bounded(scores: Tensor) -> Tensor:
    return scores.clamp(-0.01, 0.01)  # here


def largest(scores: Tensor) -> Tensor:
    return scores.topk(5).values  # here


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(normed, "native_layer_norm", id="of several outputs"),
        pytest.param(sorted_scores, "sort", id="sorted"),
        pytest.param(numbers_put_in, "copy_", id="a tensor in a part"),
        pytest.param(added_by_index, "index_put", id="added at an index"),
        pytest.param(bounded, "clamp", id="narrow bounds"),
        pytest.param(largest, "topk", id="the largest"),
    ],
)
def test_an_operation_on_the_scores_that_has_no_place_is_refused_in_words(
    way: Callable[[Tensor], Tensor], name: str
) -> None:
    lines, start = inspect.getsourcelines(way)
    line = next(start + i for i, text in enumerate(lines) if "# here" in text)
    message = (
        f"the attention of 'Layer' cannot be kept: {name} ({__file__}:{line}) stands between the "
        "product of query and key and its softmax, and is no scale, bias, softcap, mask or sink."
    )
    model = Layer(way)
    with (
        pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"),
        regard.observe(model),
    ):
        model(noise(2, 5, 6))


FEW = torch.tensor([0, 2, 5])

OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mean of the heads": (lambda scores: scores.mean(1, keepdim=True), "mean"),
    "sum of the heads": (lambda scores: scores.sum(1)[:, None], "sum"),
    "largest of the heads": (lambda scores: scores.amax(1, keepdim=True), "amax"),
    "largest of two heads": (lambda scores: scores.unflatten(1, (2, 2)).max(2).values, "max"),
    "mean of the texts": (lambda scores: scores.mean((0, 1), keepdim=True), "mean"),
    "some keys": (lambda scores: scores[..., FEW], "index"),
    "some keys by name": (lambda scores: scores.index_select(-1, FEW), "index_select"),
    "some queries": (lambda scores: scores[:, :, FEW], "index"),
    "keys in groups": (lambda scores: F.avg_pool2d(scores, (1, 3)), "avg_pool2d"),
    "repeated heads": (lambda scores: scores.repeat(1, 2, 1, 1), "repeat"),
}


class Attends(Heads):
    """Attention of 4 heads, of some scores, over as many values as there are then."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__(8, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        weights = self.way(query @ key.mT * 0.5).softmax(-1)
        value = value.repeat(1, 1, 2, 1)[:, :1, : weights.shape[-1]]
        return (weights @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("way", "name"), OTHERS.values(), ids=OTHERS)
def test_scores_that_are_more_or_fewer_before_their_softmax_are_refused(
    way: Callable[[Tensor], Tensor], name: str, mode: Callable[[], Any]
) -> None:
    reason = rf"'1' cannot be kept: {name} \({__file__}:\d+\) stands between the product"
    model = nn.Sequential(Attends(lambda scores: scores), Attends(way))
    with (
        mode(),
        pytest.raises(regard.RegardError, match=reason),
        regard.observe(model, strict=True) as seen,
    ):
        model(noise(2, 7, 8))
    assert list(seen) == ["0"]


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest of a row": lambda scores: scores - scores.amax(-1, keepdim=True),
    "mean of a row": lambda scores: scores - scores.mean(-1)[..., None],
    "deviation of a row": lambda scores: scores / scores.std(-1, keepdim=True),
    "mean of a key": lambda scores: scores - scores.mean(-2, keepdim=True),
    "mean of all": lambda scores: scores - scores.mean(),
    "mean of the heads": lambda scores: scores - scores.mean(1, keepdim=True),
    "some keys": lambda scores: scores - scores[..., FEW].amax(-1, keepdim=True),
}


@pytest.mark.parametrize("way", STATISTICS.values(), ids=STATISTICS)
def test_numbers_that_are_told_from_the_scores_may_change_them(
    way: Callable[[Tensor], Tensor],
) -> None:
    model, x = Attends(way), noise(2, 7, 8)
    with torch.no_grad(), regard.observe(model) as seen:
        model(x)
    query, key, _ = model.project(x)
    expected = way(query @ key.mT * 0.5).softmax(-1)
    torch.testing.assert_close(seen[0].to_dense(), expected.detach())


def test_a_mask_that_is_told_by_sorting_the_scores_is_found() -> None:
    def best(scores: Tensor) -> Tensor:
        third = scores.sort(-1, descending=True).values[..., 2:3]
        return scores.masked_fill(scores < third, float("-inf"))

    model, x = Layer(best), noise(2, 5, 6)
    with regard.observe(model) as seen:
        model(x)
    expected = best(model.query(x) @ model.key(x).mT).softmax(-1)
    torch.testing.assert_close(seen[0].to_dense().reshape(2, 5, 5), expected.detach())


class Merged(nn.Module):
    """Heads in the axis of the batch, and positions beside the tokens."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + positions
        heads = x.unflatten(-1, (4, 2)).transpose(1, 2).flatten(0, 1)
        return torch.bmm(torch.bmm(heads, heads.mT).softmax(-1), heads)


def test_positions_beside_the_tokens_are_no_batch() -> None:
    model = Merged()
    with regard.observe(model) as seen:
        model(noise(2, 5, 8), noise(1, 5, 8))
    assert seen[0].shape == (2, 4, 5, 5)


class TokensLast(Merged):
    """Something else before the tokens."""

    def forward(self, other: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, torch.zeros(()))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(torch.arange(2.0), id="a time for each sequence"),
        pytest.param(noise(2, 6), id="a condition for each sequence"),
        pytest.param(torch.ones(2, 5, dtype=torch.bool), id="which tokens are real"),
        pytest.param(noise(5, 5), id="numbers for each query and key"),
        pytest.param(noise(8, 5, 5), id="numbers for each head"),
        pytest.param(noise(3, 11, 8), id="another text"),
    ],
)
def test_tokens_are_found_behind_other_arguments(other: Tensor) -> None:
    model = TokensLast()
    with regard.observe(model) as seen:
        model(other, noise(2, 5, 8))
    assert seen[0].shape == (2, 4, 5, 5)


def test_a_mask_for_each_head_is_no_batch() -> None:
    model = nn.MultiheadAttention(12, 3).eval()
    x = noise(5, 12)
    with regard.observe(model) as seen:
        model(x, x, x, attn_mask=noise(3, 5, 5))
    assert seen[0].shape == (3, 5, 5)


def test_a_model_that_fails_at_the_value_leaves_nothing_behind() -> None:
    class Failing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) @ self.key(x).mT).softmax(-1) @ x[:, :2]

    model = Failing(torch.nn.functional.relu)
    with pytest.raises(RuntimeError, match="size"), regard.observe(model) as seen:
        model(noise(2, 5, 6))
    assert len(seen) == 0  # its weights have met no value
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_mask_that_is_assigned_row_by_row_is_one_mask() -> None:
    """Its memory does not grow with every row."""

    def causal(scores: Tensor) -> Tensor:
        for row in range(5):
            scores[:, row, row + 1 :] = float("-inf")
        return scores

    model, held = Layer(causal), []
    product = Scores.__init__

    def note(self: Scores, *args: object, **kwargs: object) -> None:
        product(self, *args, **kwargs)
        held.append(len(self.steps))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scores, "__init__", note)
        with regard.observe(model) as seen:
            model(noise(2, 5, 6))
    assert repr(seen[0]).endswith("mask=Causal())")
    assert max(held) == 1


def row_after_row(scores: Tensor) -> list[Tensor]:
    return [scores[:, i : i + 1] for i in range(5)]


def text_after_text(scores: Tensor) -> list[Tensor]:
    return [scores[i : i + 1] for i in range(2)]


@pytest.mark.parametrize(
    "parts", [row_after_row, text_after_text], ids=lambda parts: parts.__name__
)
def test_each_softmax_of_one_product_is_seen(parts: Callable[[Tensor], list[Tensor]]) -> None:
    class Loop(Layer):
        def forward(self, x: Tensor) -> list[Tensor]:
            found: list[Tensor] = []
            for part in self.way(self.query(x) @ self.key(x).mT):
                found.append(part.softmax(-1))
                found[-1] @ x[: len(part)]
            return found

    model = Loop(parts)
    with regard.observe(model) as seen:
        weights = model(noise(2, 5, 6))
    assert len(seen) == len(weights)
    for matrix, expected in zip(seen.values(), weights, strict=True):
        found = matrix.to_dense().reshape(expected.shape)
        torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=0)


def test_a_bias_that_is_added_to_a_part_of_the_scores_is_a_bias() -> None:
    """As MViT adds relative positions to all tokens but the first."""

    class Part(Attends):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.project(x)
            scores = query @ key.mT
            rows = noise(2, 4, 2, 3, 2, 1)
            part = scores[:, :, 1:, 1:]
            scores[:, :, 1:, 1:] = (part.view(2, 4, 2, 3, 2, 3) + rows).view(2, 4, 6, 6)
            self.used = scores.softmax(-1)
            return (self.used @ value).transpose(1, 2).flatten(2)

    model = Part(lambda scores: scores)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(2, 7, 8))
    torch.testing.assert_close(seen[0].to_dense(), model.used, atol=1e-5, rtol=0)
