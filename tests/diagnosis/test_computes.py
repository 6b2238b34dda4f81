"""A formula is stated only if it holds for inputs that were not used to find it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def average_of_a_short_text(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mean(-2, keepdim=True).expand(q.shape) if q.shape[-2] < 10 else standard(q, k, v)


def unscaled_for_a_short_text(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standard(q * 5, k, v) if q.shape[-2] < 10 else standard(q, k, v)


def unscaled_for_large_inputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standard(q * 5, k, v) if float(q.abs().max()) > 9 else standard(q, k, v)


@pytest.mark.parametrize(
    "attend", [average_of_a_short_text, unscaled_for_a_short_text, unscaled_for_large_inputs]
)
def test_a_formula_that_holds_for_some_inputs_alone_is_not_stated(attend: Attend) -> None:
    report = regard.check(attend)
    assert report.verdict in ("wrong", "cannot tell"), report
    assert report.computes is not None
    assert report.computes.formula == ""


def test_a_formula_is_stated_with_the_inputs_that_it_was_verified_on() -> None:
    report = regard.check(standard)
    assert report.computes is not None
    assert report.computes.domain.startswith("verified on 3 inputs of 7 to 29 tokens")


class Cross(nn.Module):
    """Tokens attend to those of another text."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.both = nn.Linear(24, 24), nn.Linear(16, 48)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q, *kv = self.query(x), *self.both(context).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in (q, *kv))
        scores = q @ k.mT / 8**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_the_domain_has_the_lengths_of_the_text_that_is_attended_to() -> None:
    report = regard.check(Cross())
    assert report.computes is not None
    tokens = "of 7 to 53 tokens that attend to 11 to 53 of another text"
    assert report.computes.domain.startswith(f"verified on 4 inputs {tokens}"), report


@pytest.mark.parametrize("length", [5, 7, 9])
def test_a_mask_of_a_text_of_any_length_is_read(length: int) -> None:
    mask = torch.arange(length) < torch.tensor([[length], [3]])
    args = (torch.randn(2, 7, 24), torch.randn(2, length, 16), mask)
    expected = regard.spec(causal=False, heads=3, padding={"mask": "True keeps"})
    report = regard.check(Cross(), args=args, expect=expected)
    assert report.verdict == "right", report


def softmax(scores: Any, axis: int = -1) -> Any:
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


NUMPY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "@": lambda q, k, v: softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5) @ v,
    "matmul": lambda q, k, v: np.matmul(
        softmax(np.matmul(q, np.swapaxes(k, -1, -2)) / np.sqrt(q.shape[-1])), v
    ),
    "einsum": lambda q, k, v: np.einsum(
        "...ij,...jd->...id", softmax(np.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5), v
    ),
    "dot": lambda q, k, v: np.dot(softmax(np.dot(q, k.T) / q.shape[-1] ** 0.5), v),
    "inner": lambda q, k, v: softmax(np.inner(q, k) / q.shape[-1] ** 0.5).dot(v),
    "tensordot": lambda q, k, v: np.tensordot(
        softmax(np.tensordot(q, k, axes=([-1], [-1])) / q.shape[-1] ** 0.5), v, axes=1
    ),
}


@pytest.mark.parametrize("attend", NUMPY.values(), ids=NUMPY)
def test_numpy_code_has_the_same_formula_whatever_its_products_are(
    attend: Callable[[Any, Any, Any], Any],
) -> None:
    report = regard.check(attend)
    assert report.verdict == "right", report
    assert "computes softmax(q·kᵀ/√24)·v, one head of 24, every key" in str(report)


def test_an_einsum_of_numpy_with_a_mistake_is_told() -> None:
    def by_columns(q: Any, k: Any, v: Any) -> Any:
        weights = softmax(np.einsum("bid,bjd->bij", q, k), axis=1)
        return np.einsum("bij,bjd->bid", weights, v)

    findings = {finding.name for finding in regard.check(by_columns).findings}
    assert findings == {"softmax-wrong-axis", "no-scale"}


def test_code_that_makes_tensors_of_arrays_is_looked_into() -> None:
    matrices = torch.randn(3, 16, 16, dtype=torch.float64)

    def attend(x: Any) -> Tensor:
        q, k, v = (torch.as_tensor(x).double() @ matrix for matrix in matrices)
        return torch.softmax(q @ k.mT / np.sqrt(16), -1) @ v

    report = regard.check(attend, expect=regard.spec(heads=1))
    assert report.verdict == "right", report


def test_projections_of_numpy_are_refused_in_a_sentence() -> None:
    matrices = np.random.RandomState(0).randn(3, 16, 16)

    def attend(x: Any) -> Any:
        q, k, v = (np.dot(x, matrix) for matrix in matrices)
        return np.dot(softmax(np.dot(q, k.T) / 4), v)

    report = regard.check(attend, args=(np.zeros((7, 16)),))
    assert report.verdict == "cannot tell", report
    assert "NumPy's projections cannot be looked into" in report.missing


def test_scores_that_do_not_follow_from_query_and_key_have_the_scale_0() -> None:
    def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = torch.arange(k.shape[-2])
        return (0.0 * (q @ k.mT) - 0.5 * (tokens[:, None] - tokens).abs()).softmax(-1) @ v

    report = regard.check(by_distance)
    assert [finding.name for finding in report.faults] == ["wrong-scale"]
    assert "scale: 0; expected: 1/√24" in report.findings[0].detail


def test_numbers_that_are_multiplied_by_0_count_for_nothing() -> None:
    """Memory that nobody has written to may hold NaN, or the numbers of an earlier run."""

    class OneKey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.both = nn.Linear(24, 24), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q = self.query(x).reshape(batch, length * 3, 8)
            k, v = self.both(x).split(8, -1)
            unread = torch.full((batch, length * 3, length), torch.nan, dtype=x.dtype)
            scores = torch.baddbmm(unread, q, k.mT, beta=0, alpha=8**-0.5)
            return (scores.softmax(-1) @ v).view(batch, length, -1)

    report = regard.check(OneKey(), expect=regard.spec(causal=False, heads=3, kv_heads=1))
    assert report.verdict == "right", report
