"""Autocast: ``attend`` and products take what PyTorch's fused attention takes there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard

BF16 = torch.bfloat16


def autocast() -> torch.autocast:
    return torch.autocast("cpu", BF16)


def made(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 7, 4, generator=generator).to(dtype) for _ in range(3)]


DTYPES = {
    "float32": (torch.float32,) * 3,
    "bfloat16": (BF16,) * 3,
    "float16": (torch.float16,) * 3,
    "bfloat16 query": (BF16, torch.float32, torch.float32),
    "bfloat16 key": (torch.float32, BF16, torch.float32),
    "bfloat16 value": (torch.float32, torch.float32, BF16),
    "float64": (torch.float64,) * 3,
}
MASKS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "no mask": dict,
    "bools": lambda: {"mask": torch.ones(7, 7, dtype=torch.bool).tril()},
    "float32 bias": lambda: {"bias": torch.linspace(-1, 1, 49).reshape(7, 7)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_product_is_that_of_fused_attention(dtypes: str, mask: str) -> None:
    pairs = zip(made(), DTYPES[dtypes], strict=True)
    query, key, value = (tensor.to(dtype) for tensor, dtype in pairs)
    given = MASKS[mask]()
    if dtypes == "float64":
        given = {name: given[name].double() if name == "bias" else given[name] for name in given}
    with autocast():
        (extra,) = given.values() or (None,)
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=extra)
        A = regard.attend(query, key, **given)
        found, by_name = A @ value, torch.matmul(A, value)
    assert found.dtype == expected.dtype == (torch.float64 if dtypes == "float64" else BF16)
    torch.testing.assert_close(found, expected)
    assert torch.equal(by_name, found)


def test_a_matrix_from_before_keeps_its_numbers_and_takes_any_value() -> None:
    query, key, value = made()
    A, G = regard.attend(query, key), regard.AttentionMatrix.from_scores(query @ key.mT)
    R = regard.rollout([A, A])
    products: list[Callable[[Tensor], Tensor]] = [
        lambda x: A @ x,
        lambda x: A.T @ x,
        lambda x: x.mT @ A,
        lambda x: x[0, 0, :, 0] @ A,
        lambda x: G @ x,
        lambda x: R @ x[:, 0],
    ]
    for multiply in products:
        expected = multiply(value)
        with autocast():
            found = [multiply(value), multiply(value.to(BF16))]
        assert [product.dtype for product in found] == [BF16, BF16]
        assert torch.equal(found[0], expected.to(BF16))
        torch.testing.assert_close(found[1].float(), expected, atol=2e-2, rtol=2e-2)


def statistics(A: regard.AttentionMatrix) -> list[Tensor]:
    R = regard.rollout([A, A])
    three = A.reduce(regard.Entropy(), regard.Sum(-2), regard.Pool(2, 2))
    parts = (A[..., 1:3, :2], A.scores[..., 1:3, :2], R[..., 1:3, :2], A.to_dense())
    return [*three, regard.kl(A, A), A.reduce(regard.Output(made(A.dtype)[2])), *parts]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_statistics_do_not_change(dtype: torch.dtype) -> None:
    query, key, _ = made(dtype)
    A = regard.attend(query, key, mask=regard.SlidingWindow(2, 0))
    expected = statistics(A)
    with autocast():
        found = statistics(A)
    assert [answer.dtype for answer in expected] == 4 * [torch.float32] + 5 * [dtype]
    pairs = zip(found, expected, strict=True)
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("whole", [True, False], ids=["backward-within", "backward-outside"])
def test_gradients_flow_through_the_cast(whole: bool) -> None:
    def total(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        A = regard.attend(query, key, mask=regard.Causal())
        pieces = (A.entropy(), A @ value, A[..., 1:3, :2])
        return sum((piece.float().sin().sum() for piece in pieces), torch.zeros(()))

    leaves = [tensor.requires_grad_() for tensor in made()]
    expected = torch.autograd.grad(total(*(leaf.to(BF16) for leaf in leaves)), leaves)
    with autocast():
        loss = total(*leaves)
        found = torch.autograd.grad(loss, leaves) if whole else []
    found = found or torch.autograd.grad(loss, leaves)
    assert [gradient.dtype for gradient in found] == [torch.float32] * 3
    assert all(map(torch.equal, found, expected))


def test_rotary_positions_in_float32_meet_a_projection_in_bfloat16() -> None:
    x, project = torch.randn(7, 4), torch.nn.Linear(4, 4)
    with autocast():
        query, key = regard.nn.RotaryPositions(4)(x), project(x)
        assert (query.dtype, key.dtype) == (torch.float32, BF16)
        assert regard.attend(query, key).dtype == BF16


def test_without_it_dtypes_must_agree() -> None:
    query, key, value = made()
    with pytest.raises(TypeError) as error:
        regard.attend(query, key.to(BF16))
    assert str(error.value) == (
        "key is bfloat16 and query is float32; both must have one dtype.\n"
        "    Use key.to(query.dtype)."
    )
    with pytest.raises(TypeError) as error:
        regard.attend(query, key) @ value.to(BF16)
    assert str(error.value) == (
        "value is bfloat16 and the matrix is float32; both must have one dtype.\n"
        "    Use value.to(torch.float32)."
    )


@pytest.mark.parametrize("kind", [torch.int64, torch.float64], ids=str)
def test_values_that_autocast_leaves_alone_are_refused(kind: torch.dtype) -> None:
    query, key, value = made()
    with autocast(), pytest.raises(TypeError, match="both must have one dtype"):
        regard.attend(query, key) @ value.to(kind)


def test_a_recording_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    query, key, value = made()
    bias = torch.linspace(-1, 1, 49).reshape(7, 7)
    layer = torch.nn.Module()
    layer.forward = lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=bias)  # pyright: ignore[reportAttributeAccessIssue]
    with regard.observe(layer) as seen:
        layer()
    seen.save(tmp_path / "run.safetensors")
    with autocast():
        loaded = regard.load(tmp_path / "run.safetensors")[0]
    assert {tensor.dtype for tensor in loaded.source.tensors} == {torch.float32}
