"""Whatever is done to attention, what is recorded is what met the value, or it is refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from attention_variants import B, H, T, Variant, variants
from cases import in_turn

VARIANTS = variants()
LIMITS = {torch.float32: 5e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""What rounding can do to a weight of at most 1, from scores of at most 20."""


class Layer(nn.Module):
    """Attention over the identity, so that its output is what met the value."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.variant = variant
        self.query, self.key = nn.Linear(12, 12), nn.Linear(12, 12)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (
            project(x).unflatten(-1, (H, 4)).transpose(1, 2).contiguous()
            for project in (self.query, self.key)
        )
        return self.variant(query, key, torch.eye(T, dtype=x.dtype).expand(B, H, T, T).clone())


def verdict(
    variant: Variant,
    dtype: torch.dtype,
    keep: str,
    mode: Callable[[], AbstractContextManager[None]] = torch.no_grad,
    limit: float | None = None,
) -> str:
    """Return "right", "refused" or what is wrong."""
    limit = LIMITS[dtype] if limit is None else limit
    model = Layer(variant).to(dtype)
    x = torch.randn(B, T, 12, generator=torch.manual_seed(1)).to(dtype)
    try:
        with mode(), regard.observe(model, keep=keep) as seen:
            output = model(x)
    except regard.RegardError as refusal:
        first, *_ = str(refusal).splitlines()
        return "refused" if "Layer" in first else f"refused without a name: {first}"
    # The recording has the model's own axes, perhaps in parts; the output always has (B, H).
    recorded = torch.cat([seen[name].to_dense().flatten(0, -3) for name in seen]).float()
    returned = output.flatten(0, 1).float()
    if recorded.shape[1:] != returned.shape[1:]:
        return f"{seen} for {tuple(output.shape)}"
    both_nan = recorded[:, None].isnan() & returned.isnan()
    errors = (
        (recorded[:, None] - returned).abs().masked_fill(both_nan, 0.0).nan_to_num(9.0).amax((2, 3))
    )
    error = errors.diagonal().max() if len(recorded) == len(returned) else errors.amin(1).max()
    if recorded.shape[0] == returned.shape[0] and error > limit:
        error = torch.stack([errors.amin(0).max(), errors.amin(1).max()]).max()
        if seen[0].shape == output.shape:
            return f"wrong by {error:.3g}"
    return "right" if error <= limit else f"wrong by {error:.3g}"


def test_there_are_enough_variants() -> None:
    assert len(VARIANTS) >= 300


@pytest.mark.full
@in_turn(
    dtype={str(dtype): dtype for dtype in LIMITS},
    keep=["qk", "qkv"],
    mode={mode.__name__: mode for mode in (torch.no_grad, torch.inference_mode)},
)
def test_no_variant_is_recorded_as_what_it_is_not(
    dtype: torch.dtype, keep: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    verdicts = {name: verdict(variant, dtype, keep, mode) for name, variant in VARIANTS.items()}
    wrong = {name: each for name, each in verdicts.items() if each not in ("right", "refused")}
    assert wrong == {}
    # The checker sees right ones, too.
    assert sum(each == "right" for each in verdicts.values()) >= 320


class Masked(nn.Module):
    """Attention with a mask that its owner writes to between calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT + self.mask
        return scores.softmax(-1) @ torch.eye(5)


@pytest.mark.parametrize("write", [Tensor.fill_, lambda mask, _: mask.numpy().fill(0)])
def test_a_mask_that_is_filled_between_calls_is_read_again(
    write: Callable[[Tensor, float], object],
) -> None:
    model, x = Masked(), torch.randn(5, 6, generator=torch.manual_seed(1))
    with torch.no_grad(), regard.observe(model) as seen:
        first = model(x)
        write(model.mask.data, 0.0)
        second = model(x)
    torch.testing.assert_close(seen[0].to_dense(), first, atol=1e-5, rtol=0)
    torch.testing.assert_close(seen[1].to_dense(), second, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("size", [10, 40])
@pytest.mark.parametrize("flipped", [False, True])
def test_large_scores_are_recorded_as_they_were(
    flipped: bool, size: float, dtype: torch.dtype
) -> None:
    def variant(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query * size @ key.mT
        if flipped:
            scores.data.copy_(scores.data.flip(-1))
        return scores.softmax(-1) @ value

    # Query and key give the scores without the rounding of the model's own scores.
    limit = 0.2 if dtype != torch.float32 and not flipped else LIMITS[dtype]
    assert verdict(variant, dtype, "qk", limit=limit) == "right"


def with_temperature(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A temperature for each head that is still 1, as in XCiT."""
    return (query @ key.mT * torch.ones(H, 1, 1, dtype=query.dtype)).softmax(-1) @ value


def einsum_over_one_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", query, key[:, :, :1]).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, value[:, :, :1])


def einsum_of_one_number(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", query[..., :1], key[..., :1]).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, value)


UNCHANGED = [with_temperature, einsum_over_one_key, einsum_of_one_number]


@pytest.mark.parametrize("keep", ["qk", "qkv"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("variant", UNCHANGED, ids=lambda variant: variant.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_a_review_found_refused_is_recorded(
    variant: Variant, dtype: torch.dtype, keep: str, mode: Callable[[], torch.no_grad]
) -> None:
    model = Layer(variant).to(dtype)
    x = torch.randn(B, T, 12, generator=torch.manual_seed(1)).to(dtype)
    with mode(), regard.observe(model, keep=keep) as seen:
        output = model(x)
    found = seen[0].to_dense()
    expected = output.detach()[..., : found.shape[-1]]
    torch.testing.assert_close(found, expected, atol=LIMITS[dtype], rtol=0)


def test_sparse_weights_are_refused_in_words() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) @ x.mT).softmax(-1).to_sparse() @ x

    model = Sparse()
    reason = r"'Sparse' cannot be kept: the weights of the softmax \(.*\) became sparse or complex"
    with torch.no_grad(), pytest.raises(regard.RegardError, match=reason), regard.observe(model):
        model(torch.randn(5, 6))


class Long(nn.Module):
    """Attention of 601 tokens over the identity, so that its output is what met the value."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.variant = variant
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.query, self.key)]
        return self.variant(*heads, torch.eye(601, dtype=x.dtype).expand(1, 2, 601, 601).clone())


def long_text() -> Tensor:
    return torch.randn(1, 601, 8, generator=torch.manual_seed(1))


def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def shared(tensor: Tensor) -> Any:
    """Return the bits of a tensor as a NumPy array, whose writes no operation shows."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()


def key_written_to(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key = key.clone()
    weights = (query @ key.mT).softmax(-1)
    shared(key)[:, :, 300] = 0
    return weights @ value


def rows_written_to(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    shared(weights)[:, :, 99:198] = shared(weights)[:, :, :99].copy()
    return weights @ value


def heads_exchanged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    return torch.stack([weights[:, 1 - head] @ value[:, head] for head in range(2)], 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("variant", [whole, key_written_to, rows_written_to, heads_exchanged])
def test_many_weights_are_recorded_as_they_met_the_value(
    variant: Variant, dtype: torch.dtype
) -> None:
    model = Long(variant).to(dtype)
    with torch.no_grad(), regard.observe(model) as seen:
        output = model(long_text().to(dtype)).float()
    found = torch.cat([matrix.to_dense().float() for matrix in seen.values()]).view_as(output)
    torch.testing.assert_close(found, output, atol=LIMITS[dtype], rtol=0.02)


def test_many_weights_that_were_halved_are_refused() -> None:
    def weights_written_to(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT).softmax(-1)
        weights.numpy()[...] *= 0.5
        return weights @ value

    model = Long(weights_written_to)
    reason = "'Long' cannot be kept: .* a row sums to 0.5"
    with pytest.raises(regard.RegardError, match=reason), torch.no_grad(), regard.observe(model):
        model(long_text())
