"""Scores and weights that a model puts together of parts are refused with the line."""

import inspect
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from models import noise

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
T, D = 5, 7
CAUSAL = torch.ones(T, T).tril()
Pair = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Runs a function of query, key and value, (2, 3, tokens, head_dim); gives weights, output."""

    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], Pair]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Pair:
        return self.way(self.query(x), self.key(x), self.value(x))


def weighed(scores: Tensor, value: Tensor) -> Pair:
    weights = scores.softmax(-1)
    return weights, weights @ value


def one(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The first head of the first text."""
    return tuple(tensor[0, 0] for tensor in tensors)


# Scores


def rows(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = torch.empty(2, 3, T, T)
    for i in range(T):
        scores[:, :, i] = (q[:, :, i : i + 1] @ k.mT)[:, :, 0] / math.sqrt(D)
    return weighed(scores, v)


def columns(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.zeros(T, T)
    for j in range(T):
        scores[:, j] = q @ k[j]
    return weighed(scores / math.sqrt(D), v)


def cells(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.zeros(T, T)
    for i in range(T):
        for j in range(T):
            scores[i, j] = torch.dot(q[i], k[j]) / math.sqrt(D)
    return weighed(scores, v)


def cells_of_the_past(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.full((T, T), -math.inf)
    for i in range(T):
        for j in range(i + 1):
            scores[i, j] = q[i] @ k[j]
    return weighed(scores, v)


def zeros_that_are_masked_later(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.zeros(T, T)
    for i in range(T):
        scores[i, : i + 1] = k[: i + 1] @ q[i]
    return weighed((scores * 0.3).masked_fill(CAUSAL == 0, -1e9), v)


def rows_masked_in_the_loop(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.empty(T, T)
    for i in range(T):
        scores[i] = q[i] @ k.T
        scores[i] /= 2
        scores[i, i + 1 :] = -math.inf
    return weighed(scores, v)


def the_future_named_in_the_loop(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.empty(T, T)
    for i in range(T):
        scores[i, : i + 1] = q[i] @ k[: i + 1].T
        scores[i, i + 1 :] = -math.inf
    return weighed(scores, v)


def rows_with_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    bias = noise(T, T)
    scores = torch.stack(
        [(q[i] @ k.T + bias[i]).masked_fill(CAUSAL[i] == 0, -1e9) for i in range(T)]
    )
    return weighed(scores, v)


def comprehension(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.stack([torch.stack([a @ b for b in k]) for a in q])
    return weighed(torch.tanh(scores / 4) * 4, v)


def heads_in_a_loop(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = torch.empty(2, 3, T, T)
    for h in range(3):
        scores[:, h] = torch.bmm(q[:, h], k[:, h].mT)
    return weighed(scores, v)


def heads_stacked(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = torch.stack([q[:, h] @ k[:, h].mT for h in range(3)], 1)
    return weighed(scores, v)


def texts_stacked(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = torch.stack([a @ b.mT for a, b in zip(q, k, strict=True)])
    return weighed(scores, v)


def one_key_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = torch.stack([q[:, h] @ k[:, 0].mT for h in range(3)], 1)
    return weighed(scores, v)


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Of rows and of columns, put side by side."""
    above, below = (
        torch.cat([q[:, :, rows] @ k[:, :, keys].mT for keys in (slice(2), slice(2, T))], -1)
        for rows in (slice(3), slice(3, T))
    )
    return weighed(torch.cat([above, below], 2), v)


def two_texts_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """A cross-attention whose keys are those of two texts."""
    scores = torch.cat((q @ k.mT, q @ v[:, :, :3].mT), -1)
    return weighed(scores, torch.cat((v, k[:, :, :3]), 2))


def padded_rows(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    ragged = [q[i] @ k[: i + 1].T for i in range(T)]
    scores = torch.stack([F.pad(row, (0, T - len(row)), value=-math.inf) for row in ragged])
    return weighed(scores, v)


def vertical(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    return weighed(torch.vstack([a @ k.T for a in q]), v)


def a_larger_buffer(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Room for more texts and tokens than there are, used again by the next layer."""
    room = torch.empty(4, 3, 2 * T, 2 * T)
    for _ in range(2):
        scores = room[:2, :, :T, :T]
        scores.copy_(q @ k.mT)
        weights, output = weighed(scores, v)
    return weights, output


def looked_at_on_the_way(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores, largest = torch.zeros(T, T), torch.zeros(())
    for i in range(T):
        scores[i] = q[i] @ k.T
        largest = torch.maximum(largest, scores.max())
    assert float(scores.sum()) < 1e9
    return weighed(scores, v)


def equal_tokens(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = (torch.stack([t[0, 0, 0], t[0, 0, 0], t[0, 0, 1]]) for t in (q, k, v))
    return weighed(torch.stack([torch.stack([a @ b for b in k]) for a in q]), v)


SCORES = [
    *(rows, columns, cells, cells_of_the_past, zeros_that_are_masked_later),
    *(rows_masked_in_the_loop, the_future_named_in_the_loop, rows_with_a_bias, comprehension),
    *(heads_in_a_loop, heads_stacked, texts_stacked, one_key_for_all_heads, blocks),
    *(two_texts_of_keys, padded_rows, vertical, looked_at_on_the_way, equal_tokens),
    a_larger_buffer,
]


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("way", SCORES, ids=lambda way: way.__name__)
def test_scores_in_parts_are_refused_with_the_line(
    way: Callable[[Tensor, Tensor, Tensor], Pair], mode: Callable[[], torch.no_grad]
) -> None:
    model, x = Layer(way), noise(2, 3, T, D)
    joined = r"(copy_|stack|cat|vstack|pad|constant_pad_nd)"
    reason = rf"'Layer' cannot be kept: {joined} \({__file__}:\d+\) stands between the product"
    with (
        mode(),
        pytest.raises(regard.RegardError, match=reason),
        regard.observe(model) as seen,
    ):
        model(x)
    assert list(seen) == []


# Scores that make no whole


def other_queries(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = torch.cat((q @ k.mT, v @ k.mT), -1)  # here
    return weighed(scores, torch.cat((v, v), 2))


def other_scales(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.stack([q[i] @ k.T / (i + 1) for i in range(T)])  # here
    return weighed(scores, v)


def a_row_written_over(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = q @ k.mT
    scores[:, :, 2] = scores[:, :, 1] * 2  # here
    return weighed(scores, v)


def numbers_between(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    q, k, v = one(q, k, v)
    scores = torch.ones(T, T)
    for i in range(T):
        scores[i, : i + 1] = q[i] @ k[: i + 1].T  # here
    return weighed(scores, v)


def reversed_scores(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    scores = (q @ k.mT).flip(-1)  # here
    return weighed(scores, v.flip(2))


REFUSED = [
    pytest.param(other_queries, "cat", id="other queries beside"),
    pytest.param(other_scales, "stack", id="a scale for each row"),
    pytest.param(a_row_written_over, "copy_", id="a row written over"),
    pytest.param(numbers_between, "copy_", id="other numbers between"),
    pytest.param(reversed_scores, "flip", id="flipped"),
]


def line(way: Callable[..., object]) -> str:
    lines, start = inspect.getsourcelines(way)
    return f"{__file__}:{next(start + i for i, text in enumerate(lines) if '# here' in text)}"


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(("way", "name"), REFUSED)
def test_scores_that_make_no_whole_are_refused_with_the_line(
    way: Callable[[Tensor, Tensor, Tensor], Pair], name: str, mode: Callable[[], torch.no_grad]
) -> None:
    message = (
        f"the attention of 'Layer' cannot be kept: {name} ({line(way)}) stands between the product "
        "of query and key and its softmax, and is no scale, bias, softcap, mask or sink."
    )
    model = Layer(way)
    with (
        mode(),
        pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"),
        regard.observe(model),
    ):
        model(noise(2, 3, T, D))


# Weights


def padded(weights: Tensor, value: Tensor) -> Tensor:
    return F.pad(weights, (0, 2)) @ F.pad(value, (0, 0, 0, 2), value=3.0)


def padded_before(weights: Tensor, value: Tensor) -> Tensor:
    return F.pad(weights, (1, 0)) @ F.pad(value, (0, 0, 1, 0), value=3.0)


def padded_by_cat(weights: Tensor, value: Tensor) -> Tensor:
    zeros = torch.zeros(*weights.shape[:-1], 2)
    return torch.cat((weights, zeros), -1) @ F.pad(value, (0, 0, 0, 2), value=3.0)


def in_a_buffer(weights: Tensor, value: Tensor) -> Tensor:
    room = torch.zeros(*weights.shape[:-1], T + 2)
    room[..., :T] = weights
    return room.clone() @ F.pad(value, (0, 0, 0, 2), value=3.0)


def rows_of_queries_added(weights: Tensor, value: Tensor) -> Tensor:
    return F.pad(weights, (0, 0, 0, 2)) @ value


WEIGHTS = [padded, padded_before, padded_by_cat, in_a_buffer, rows_of_queries_added]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("meet", WEIGHTS, ids=lambda meet: meet.__name__)
def test_weights_with_zeros_beside_them_are_refused(
    meet: Callable[[Tensor, Tensor], Tensor], mode: Callable[[], torch.no_grad]
) -> None:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Pair:
        weights = (q @ k.mT).softmax(-1)
        return weights, meet(weights, v)

    reason = rf"'Layer' cannot be kept: \w+ \({__file__}:\d+\) makes others of the weights"
    model = Layer(way)
    with mode(), pytest.raises(regard.RegardError, match=reason), regard.observe(model):
        model(noise(2, 3, T, D))


def test_rows_of_weights_in_a_buffer_are_refused() -> None:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Pair:
        q, k, v = one(q, k, v)
        scores, weights = q @ k.T, torch.zeros(T, T)
        for i in range(T):
            weights[i] = scores[i].softmax(0)
        return weights, weights @ v

    model = Layer(way)
    reason = r"copy_ \(.*\) makes others of the weights after their softmax"
    with torch.no_grad(), pytest.raises(regard.RegardError, match=reason), regard.observe(model):
        model(noise(2, 3, T, D))


def filled_beside(weights: Tensor) -> Tensor:
    room = torch.zeros(*weights.shape[:-1], T + 2)
    room[..., :T] = weights
    room[..., T:] = 0.5
    return room


def two_softmaxes_in_a_row(weights: Tensor) -> Tensor:
    room = torch.zeros(*weights.shape[:-1], T + 2)
    room[..., :2] = weights[..., :2]
    room[..., 2 : T + 2] = weights.clone()
    return room


def padded_with_others(weights: Tensor) -> Tensor:
    return F.pad(weights, (0, 2), value=0.5)


def padded_to_the_right_of_others(weights: Tensor) -> Tensor:
    return F.pad(weights, (0, 2)) * 0.5


def numbers_of_others_between(weights: Tensor) -> Tensor:
    weights = F.pad(weights, (0, 2))
    weights[:, :, 0, 0], weights[:, :, 0, 1] = weights[:, :, 0, 1].clone(), 0.0
    return weights


def sorted_beside_zeros(weights: Tensor) -> Tensor:
    return F.pad(weights, (0, 2)).sort(-1).values


def one_head_in_two_places(weights: Tensor) -> Tensor:
    room = torch.zeros(2, 3, T, T + 2)
    for head in (0, 1, 2, 0):
        room[:, head, :, :T] = weights[:, (head + 1) % 3]
    return room


def rows_exchanged(weights: Tensor) -> Tensor:
    room = F.pad(weights, (0, 2))
    room[:, :, 0], room[:, :, 1] = room[:, :, 1].clone(), room[:, :, 0].clone()
    return room


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    ("change", "did"),
    [
        pytest.param(filled_beside, "copy_ .* makes others of", id="beside"),
        pytest.param(two_softmaxes_in_a_row, "copy_ .* makes others of", id="in a row"),
        pytest.param(padded_with_others, ".*pad.* makes others of", id="padded"),
        pytest.param(padded_to_the_right_of_others, ".*pad.* makes others of", id="and halved"),
        pytest.param(sorted_beside_zeros, ".*pad.* makes others of", id="sorted"),
        pytest.param(one_head_in_two_places, "copy_ .* makes others of", id="heads"),
        pytest.param(rows_exchanged, ".*pad.* makes others of", id="rows exchanged"),
        pytest.param(numbers_of_others_between, ".*pad.* makes others of", id="exchanged"),
    ],
)
def test_weights_with_other_numbers_beside_them_are_refused(
    change: Callable[[Tensor], Tensor], did: str, mode: Callable[[], torch.no_grad]
) -> None:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Pair:
        weights = change((q @ k.mT).softmax(-1))
        return weights, weights @ F.pad(v, (0, 0, 0, 2), value=3.0)

    model = Layer(way)
    reason = rf"^the attention of 'Layer' cannot be kept: {did}.* after their softmax \({__file__}:"
    with mode(), pytest.raises(regard.RegardError, match=reason), regard.observe(model):
        model(noise(2, 3, T, D))
