"""backend="triton": divergences and their gradients equal those of dense matrices in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from cases import in_turn
from regard.reductions.divergences import (
    Divergence,
    JensenShannon,
    KullbackLeibler,
)

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")

Q_LEN, KV_LEN = 20, 40
KINDS: dict[str, type[Divergence]] = {
    "kl": KullbackLeibler,
    "js": JensenShannon,
}
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": regard.Causal,
    "window": lambda: regard.SlidingWindow(9, 0),
    "bits": lambda: lambda _, h, q_idx, kv_idx: (q_idx * 7 + kv_idx * 3 + h) % 5 < 3,
    "documents": lambda: regard.Documents([key // 15 for key in range(KV_LEN)]),
    "no-keys": lambda: regard.Keep(torch.arange(Q_LEN)[:, None] % 3 > 0),
}
# The masks of both: equal ones, and either inside the other.
PAIRS = [
    ("none", "none"),
    ("causal", "causal"),
    ("window", "causal"),
    ("causal", "window"),
    ("bits", "none"),
    ("none", "bits"),
    ("bits", "bits"),
    ("documents", "causal"),
    ("no-keys", "none"),
    ("none", "no-keys"),
]
QUICK = {
    ("kl", ("bits", "none")),
    ("kl", ("window", "causal")),
    ("js", ("none", "bits")),
    ("js", ("no-keys", "none")),
}
STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "softcap": lambda: {"softcap": 1.5, "scale": -2.0},
    "sinks": lambda: {"sink_bias": torch.tensor([0.3, -1.0])},
    "alibi": lambda: {"bias": regard.ALiBi(torch.tensor([0.5, 0.03]))},
}


def numbers(
    kind: str,
    name: str,
    device: torch.device,
    masks: tuple[str, str] = ("causal", "causal"),
    steps: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    sharp: float = 1.0,
) -> tuple[Tensor, list[Tensor]]:
    """The divergence, and the gradients of query, key, bias and sink of both matrices."""
    drawn = torch.Generator().manual_seed(4)
    leaves: list[Tensor] = []

    def matrix(width: int, place: int) -> regard.AttentionMatrix:
        dtype = torch.float64 if name == "dense" else dtypes[place]
        options = dict(steps[place])
        query = torch.randn(1, 2, Q_LEN, width, generator=drawn) * sharp
        key = torch.randn(1, 1, KV_LEN, width, generator=drawn)
        made = [x.to(dtypes[place]).to(device, dtype).requires_grad_() for x in (query, key)]
        leaves.extend(made)
        if "sink_bias" in options:
            sink = options["sink_bias"].to(device, dtype).requires_grad_()
            leaves.append(sink)
            options["sink_bias"] = sink
        if "bias" in options:
            bias = options["bias"].map(lambda x: x.to(device, dtype).requires_grad_())
            leaves.extend(bias.tensors)
            options["bias"] = bias
        mask = MASKS[masks[place]]()
        mask = mask.map(lambda x: x.to(device)) if isinstance(mask, regard.Mask) else mask
        return regard.attend(*made, mask=mask, **options)

    A, B = matrix(8, 0), matrix(12, 1)
    answer = A.reduce(KINDS[kind](B.source, B.mask), backend=name)
    shares = torch.randn(answer.shape, generator=drawn).to(device)
    loss = (answer.masked_fill(answer == torch.inf, 0).double() * shares).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
    ]
    return answer.detach().double(), [each.double() for each in gradients]


def assert_exact(*given: Any, tolerance: float = 2e-6, **options: Any) -> None:
    kind, *rest = given
    rounded = 8 if rest[0].type == "cuda" else 1  # a GPU's exp2 and log2 are a few roundings off
    answer, gradients = numbers(kind, "triton", *rest, **options)
    exact, exact_gradients = numbers(kind, "dense", *rest, **options)
    torch.testing.assert_close(answer, exact, rtol=rounded * 2e-6, atol=rounded * 2e-7)
    for one, other in zip(gradients, exact_gradients, strict=True):
        size = max(float(other.abs().max()), 1e-2)
        torch.testing.assert_close(one, other, rtol=0, atol=rounded * tolerance * size)


# Interpreting takes a second; the quick pairs have bits on either side, limits, rows without keys.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "masks"),
    [
        pytest.param(
            kind,
            masks,
            id=f"{kind}-{'-'.join(masks)}",
            marks=() if (kind, masks) in QUICK else pytest.mark.full,
        )
        for kind in KINDS
        for masks in PAIRS
    ],
)
def test_a_divergence_and_its_gradients_equal_the_dense_ones(
    masks: tuple[str, str], kind: str, device: torch.device
) -> None:
    assert_exact(kind, device, masks)


@pytest.mark.sampled(1)
@in_turn(
    steps=[("softcap", "sinks"), ("sinks", "alibi"), ("alibi", "softcap")],
    kind=[*KINDS],
)
def test_a_gradient_goes_through_every_step_of_both_scores(
    steps: tuple[str, str], kind: str, device: torch.device
) -> None:
    first, second = (STEPS[each]() for each in steps)
    assert_exact(kind, device, ("causal", "causal"), (first, second), tolerance=5e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_underflow_have_finite_logarithms(kind: str, device: torch.device) -> None:
    assert_exact(kind, device, sharp=100.0, tolerance=1e-3)


@pytest.mark.sampled(2)
@in_turn(
    dtypes={
        "bfloat16-float32": (torch.bfloat16, torch.float32),
        "float32-float16": (torch.float32, torch.float16),
    },
    kind=[*KINDS],
)
def test_two_matrices_have_two_dtypes(
    dtypes: tuple[torch.dtype, torch.dtype], kind: str, device: torch.device
) -> None:
    assert_exact(kind, device, dtypes=dtypes, tolerance=8e-3)


@in_turn(apart=[1e-3, 1e-2, 0.1], kind=["kl", "js"])
def test_close_rows_do_not_cancel(apart: float, kind: str, device: torch.device) -> None:
    """The error of a small divergence is that of the scores, not that of sums near 1."""
    query = torch.randn(1, 2, Q_LEN, 8, generator=torch.Generator().manual_seed(3)).to(device)
    key = torch.randn(1, 2, KV_LEN, 8, generator=torch.Generator().manual_seed(5)).to(device)
    other = regard.attend(query * (1 + apart), key)
    asked = KINDS[kind](other.source, other.mask)
    found, exact = (regard.attend(query, key).reduce(asked, backend=n) for n in ("triton", "dense"))
    assert float(found.min()) >= 0
    assert float(((found - exact) / exact).abs().median()) <= 1e-6 / apart


@pytest.mark.full
def test_a_divergence_of_equal_matrices_is_zero(device: torch.device) -> None:
    query = torch.randn(1, 2, Q_LEN, 8, device=device, requires_grad=True)
    A = regard.attend(query, query, mask=regard.Causal())
    for kind in KINDS.values():
        found = A.reduce(kind(A.source, A.mask), backend="triton")
        assert not found.any()
        (gradient,) = torch.autograd.grad(found.sum(), query)
        assert float(gradient.abs().max()) < 1e-6


def test_a_row_of_nan_stays_alone(device: torch.device) -> None:
    query, other = torch.randn(2, 1, 2, Q_LEN, 8, device=device)
    key = torch.randn(1, 2, KV_LEN, 8, device=device)
    other[0, 0, 3, 0] = torch.nan
    query[0, 1, 5, 0] = torch.inf
    A, B = (regard.attend(x, key, mask=regard.Causal()) for x in (query, other))
    for kind in KINDS.values():
        found = A.reduce(kind(B.source, B.mask), backend="triton").isnan()
        assert found.sum() == 2
        assert bool(found[0, 0, 3])
        assert bool(found[0, 1, 5])


@pytest.mark.full
def test_divergences_beside_other_questions_have_all_gradients(device: torch.device) -> None:
    drawn = torch.Generator().manual_seed(2)
    query, key, other = (torch.randn(1, 2, 20, 8, generator=drawn) for _ in range(3))
    by_backend: list[tuple[Tensor, ...]] = []
    for name, dtype in (("triton", torch.float32), ("dense", torch.float64)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (query, key, other)]
        A, B, C = (regard.attend(x, leaves[1]) for x in (leaves[0], leaves[2], leaves[0] * 2))
        answers = A.reduce(
            KullbackLeibler(B.source, B.mask),
            regard.Entropy(),
            JensenShannon(C.source, C.mask),
            regard.Sum(-2),
            backend=name,
        )
        loss = torch.stack([each.double().square().sum() for each in answers]).sum()
        by_backend.append(torch.autograd.grad(loss, leaves))
    for one, other in zip(*by_backend, strict=True):
        size = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=3e-6 * size)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        pytest.param(
            lambda x: regard.attend(x, x, score_mod=lambda score, *_: score),
            "no Triton kernel has a score_mod, in the other matrix",
            id="score_mod",
        ),
        pytest.param(
            regard.AttentionMatrix.from_scores,
            "Triton kernels start from query and key, not from scores, in the other matrix",
            id="scores",
        ),
    ],
)
def test_a_matrix_that_no_kernel_reads_is_refused(
    other: Callable[[Tensor], regard.AttentionMatrix], reason: str, interpreted: None
) -> None:
    x = torch.randn(1, 2, 9, 9)
    B = other(x)
    with pytest.raises(ValueError, match=reason):
        regard.attend(x, x).reduce(KullbackLeibler(B.source, B.mask), backend="triton")
