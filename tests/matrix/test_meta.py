"""The meta device: inputs without numbers give shapes, and a default device changes nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import regard
from regard.nn import LearnedPositions, RotaryPositions, SinusoidalPositions, TransformerBlock

LENGTH = 12
# Callables of FlexAttention.
DISTANCE = lambda _b, _h, q_idx, kv_idx: (q_idx - kv_idx).abs().float()  # noqa: E731
PAST = lambda _b, _h, q_idx, kv_idx: q_idx >= kv_idx  # noqa: E731
SLOPED = lambda score, _b, _h, q_idx, kv_idx: score + (q_idx - kv_idx)  # noqa: E731


def noise(*shape: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device)


def matrix(device: str, **options: Any) -> regard.AttentionMatrix:
    """4 heads on 2 key heads."""
    query = noise(1, 4, LENGTH, 8, device=device)
    key = noise(1, 2, LENGTH, 8, device=device, seed=1)
    return regard.attend(query, key, **options)


def product(device: str, **options: Any) -> Tensor:
    return matrix(device, **options) @ noise(1, 2, LENGTH, 8, device=device)


def gradients(device: str, answer: Callable[[regard.AttentionMatrix], Tensor]) -> Any:
    leaves = [noise(1, 4, LENGTH, 8, device=device).requires_grad_() for _ in range(2)]
    total = answer(regard.attend(*leaves, mask=regard.SlidingWindow(3, 0))).sum()
    return torch.autograd.grad(total, leaves)


def layer(device: str, made: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        module = made()
    return module(noise(2, 5, 16, device=device))


ASKED: dict[str, Callable[[regard.AttentionMatrix], Any]] = {
    "logsumexp": lambda A: A.logsumexp(),
    "max score": lambda A: A.scores.amax((-2, -1)),
    "entropy": lambda A: A.entropy(),
    "topk": lambda A: A.topk(3),
    "max": lambda A: A.max(),
    "sum of rows": lambda A: A.sum(-1),
    "sum of columns": lambda A: A.sum(-2),
    "pool": lambda A: A.pool(3, 5),
    "segments": lambda A: A.segments([(0, 3), (5, 12)], [(0, 7)]),
    "diagonal": lambda A: A.diagonal(-1),
    "window": lambda A: A[..., 2:5, 1:3],
    "column": lambda A: A[0, 0, :, 3],
    "dense": lambda A: A.to_dense(),
    "scores": lambda A: A.scores[..., :3, :3],
    "transposed product": lambda A: A.T @ noise(LENGTH, 3, device=A.device.type),
    "rollout": lambda A: regard.rollout([A, A])[0, 3],
    "kl": lambda A: regard.kl(A, A),
    "weighted sum": lambda A: regard.weighted_sum(A, DISTANCE),
    "explain": lambda A: str(regard.explain(A, regard.Entropy())),
}
MATRICES: dict[str, Callable[[str], Any]] = {
    "product": product,
    "causal": lambda device: product(device, mask=regard.Causal()),
    "window": lambda device: product(device, mask=regard.SlidingWindow(3, 0)),
    "mask tensor": lambda device: product(
        device, mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).tril()
    ),
    "mask_mod": lambda device: product(device, mask=PAST),
    "alibi": lambda device: matrix(device, bias=regard.ALiBi(4)).entropy(),
    "t5": lambda device: matrix(
        device, bias=regard.T5Bias(noise(32, 4, device=device), bidirectional=False)
    ).entropy(),
    "score_mod": lambda device: matrix(device, score_mod=SLOPED).entropy(),
    "sink": lambda device: matrix(device, sink_bias=noise(4, device=device)).entropy(),
    "softcap": lambda device: matrix(device, softcap=5.0).topk(3),
    "given scores": lambda device: regard.AttentionMatrix.from_scores(
        noise(7, 7, device=device)
    ).entropy(),
    "given weights": lambda device: regard.AttentionMatrix.from_weights(
        noise(7, 7, device=device).softmax(-1)
    ).sum(-2),
    "gradients": lambda device: gradients(device, lambda A: A.entropy()),
    "gradients of a product": lambda device: gradients(
        device, lambda A: A @ noise(1, 4, LENGTH, 8, device=device)
    ),
    "block": lambda device: layer(
        device,
        lambda: TransformerBlock(16, 2, mask=regard.Causal(), positions=RotaryPositions(8)),
    ),
    "sinusoidal positions": lambda device: layer(device, lambda: SinusoidalPositions(16)),
    "learned positions": lambda device: layer(device, lambda: LearnedPositions(16, 9)),
}
QUESTIONS: dict[str, Callable[[str], Any]] = {
    **{
        name: lambda device, ask=ask: ask(matrix(device, mask=regard.Causal()))
        for name, ask in ASKED.items()
    },
    **MATRICES,
}


def tensors(answer: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "explain"])
def test_inputs_without_numbers_give_an_answer_without_numbers(name: str) -> None:
    found, expected = (tensors(QUESTIONS[name](device)) for device in ("meta", "cpu"))
    assert expected
    pairs = list(zip(found, expected, strict=True))
    assert all(one.is_meta for one, _ in pairs)
    assert [one.shape for one, _ in pairs] == [other.shape for _, other in pairs]
    assert [one.dtype for one, _ in pairs] == [other.dtype for _, other in pairs]


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


MORE: dict[str, Callable[[], Any]] = {
    "steps": lambda: str(regard.steps(matrix("cpu")[0, 0], query=3)),
    "table": lambda: str(regard.table(matrix("cpu")[0, 0])),
    "heads": lambda: str(regard.heads(recording())),
    "shares": lambda: str(regard.segment_shares(recording(), {"a": (0, 2), "b": (2, 5)})),
    "eviction": lambda: regard.exports.to_kvpress(recording())["0"],
    "check": lambda: str(regard.check(Unscaled, 16)),
}


class Unscaled(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x)


def recording() -> regard.Recording:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(regard.nn.SelfAttention(16, 2, mask=regard.Causal()))
    with regard.observe(model) as seen:
        model(noise(1, 5, 16, device="cpu"))
    return seen


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", [*QUESTIONS, *MORE])
def test_a_default_device_changes_no_answer(name: str, request: pytest.FixtureRequest) -> None:
    ask = MORE.get(name) or (lambda: QUESTIONS[name]("cpu"))
    expected = ask()
    request.getfixturevalue("meta_by_default")
    found = ask()
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    assert all(one.device == other.device for one, other in pairs)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert pairs or found == expected


ON_META = (
    "{} has tensors on the meta device; it needs their numbers, and there they have none.\n"
    "    Create them on another device."
)
READ: dict[str, Callable[[], Any]] = {
    "steps()": lambda: regard.steps(matrix("meta")[0, 0]),
    "table()": lambda: regard.table(matrix("meta")[0, 0]),
    "x": lambda: regard.show(matrix("meta")),
    "Unscaled": lambda: regard.check(Unscaled(16).to("meta")),
}


@pytest.mark.parametrize("name", READ)
def test_what_needs_numbers_refuses_the_meta_device(name: str) -> None:
    with pytest.raises(ValueError, match="meta device") as error:
        READ[name]()
    assert str(error.value) == ON_META.format(name)


def test_a_model_on_the_meta_device_is_refused_when_it_has_run() -> None:
    model = nn.Sequential(regard.nn.SelfAttention(16, 2, mask=regard.Causal())).to("meta")
    with (
        pytest.raises(regard.RegardError) as error,
        regard.observe(model),
    ):
        model(noise(1, 5, 16, device="meta"))
    assert str(error.value) == (
        "the attention of '0' cannot be kept: it ran on the meta device or in FakeTensorMode, "
        "whose tensors have no numbers.\n    Run the model on another device."
    )
