"""The compiled kernels: when they answer, and what they leave to the sweep."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import regard
from regard.backends.choose import choice
from regard.backends.cpu import cpu_backend, fused_block
from regard.matrix.weighted_sums import WeightedSum
from regard.reductions.reduction import RowStatistic
from regard.reductions.row_statistics import NormalizedEntropy

LONG = 700  # so that one matrix has more scores than the kernels' least number


def matrix(*, heads: int = 1, length: int = LONG, **options: Any) -> regard.AttentionMatrix:
    torch.manual_seed(0)
    query, key = (torch.randn(heads, length, 8) for _ in range(2))
    return regard.attend(query, key, **options)


def backend(A: regard.AttentionMatrix, *reductions: regard.Reduction) -> str:
    return choice(A.source, A.mask, reductions).name


@pytest.fixture
def only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error that a block is left to plain PyTorch."""

    def plain(*_: object) -> None:
        raise AssertionError("a block was computed in plain PyTorch")

    monkeypatch.setattr(cpu_backend, "Block", plain)


def test_the_kernels_answer_the_usual_statistics_of_a_large_matrix() -> None:
    value = torch.randn(1, LONG, 3)
    asked = (regard.Entropy(), regard.TopK(8), regard.Sum(-2), regard.Pool(4, 4))
    assert backend(matrix(), *asked, regard.Output(value)) == "cpu"


@pytest.mark.parametrize(
    "make",
    [
        lambda: matrix(bias=regard.ALiBi(1)),
        lambda: matrix(softcap=2.0, sink_bias=torch.ones(1)),
        lambda: matrix(score_mod=lambda score, *_: score * 2),
        lambda: regard.AttentionMatrix.from_scores(torch.randn(LONG, LONG)),
    ],
    ids=["bias", "softcap", "score_mod", "scores"],
)
@pytest.mark.usefixtures("only_compiled")
def test_the_kernels_take_every_kind_of_score(make: Callable[[], regard.AttentionMatrix]) -> None:
    A = make()
    asked = (regard.Entropy(), regard.TopK(8), regard.Sum(-2))
    assert backend(A, *asked) == "cpu"
    found, expected = A.reduce(*asked), A.reduce(*asked, backend="dense")
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1].indices, expected[1].indices)
    torch.testing.assert_close(found[2].double(), expected[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("A", "reduction", "refusal"),
    [
        (matrix(), WeightedSum(torch.ones(LONG)), "no compiled kernel gives WeightedSum"),
        (matrix(), regard.TopK(200), "the compiled kernels give at most 128 largest weights"),
        (matrix().to(torch.float64), regard.Entropy(), "the compiled kernels compute in float32"),
    ],
    ids=["reduction", "k", "float64"],
)
def test_what_the_kernels_leave_to_the_sweep(
    A: regard.AttentionMatrix, reduction: regard.Reduction, refusal: str
) -> None:
    found = regard.explain(A, reduction)
    assert (found.backend, found.refusals["cpu"]) == ("sweep", refusal)


class Visible(RowStatistic):
    """The number of keys that a query may attend to, a reduction of one's own."""

    def update(self, block: Any) -> tuple[regard.Contribution, ...]:
        return (regard.Contribution(block.box.at_rows, block.visible_keys.float()),)


@pytest.mark.usefixtures("only_compiled")
def test_a_reduction_of_ones_own_reads_every_statistic_of_a_row() -> None:
    A = matrix(mask=regard.Causal())
    assert backend(A, Visible()) == "cpu"
    assert torch.equal(A.reduce(Visible())[0], torch.arange(1.0, LONG + 1))


@pytest.mark.full
def test_a_small_matrix_does_not_start_numba() -> None:
    code = (
        "import sys, torch, regard\n"
        "x = torch.zeros(8, 4)\n"
        "regard.attend(x, x).entropy()\n"
        "assert 'numba' not in sys.modules\n"
        "y = torch.zeros(700, 4)\n"
        "regard.attend(y, y).entropy()\n"
        "assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_without_numba_the_sweep_answers_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    A = matrix(mask=regard.Causal())
    compiled = A.entropy()
    monkeypatch.setattr(cpu_backend, "_HAS_NUMBA", False)
    found = regard.explain(A, regard.Entropy())
    assert found.backend == "sweep"
    assert "pip install 'regard[cpu]'" in found.refusals["cpu"]
    torch.testing.assert_close(A.entropy(), compiled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("tile", [64, 2048])
def test_a_block_with_nan_follows_the_rules_of_the_sweep(
    bad: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "TILE", tile)
    scores = torch.randn(LONG, LONG)
    scores[3, 400] = bad
    A = regard.AttentionMatrix.from_scores(scores, mask=regard.Causal(align="top-left"))
    B = regard.AttentionMatrix.from_scores(scores)
    for each in (A, B):
        asked = (regard.LogSumExp(), regard.Entropy(), regard.TopK(3), regard.Sum(-2))
        found, expected = each.reduce(*asked, backend="cpu"), each.reduce(*asked, backend="sweep")
        options = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
        torch.testing.assert_close(found[0], expected[0], **options)
        torch.testing.assert_close(found[1], expected[1], **options)
        torch.testing.assert_close(found[2].values, expected[2].values, **options)
        assert torch.equal(found[2].indices, expected[2].indices)
        torch.testing.assert_close(found[3], expected[3], **options)


@pytest.mark.usefixtures("only_compiled")
def test_the_largest_score_needs_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    A, add_tile = matrix(heads=2, mask=regard.Causal()), fused_block.kernels.add_tile
    tiles: list[Any] = []

    def counted(*numbers: Any) -> None:
        tiles.append(numbers)
        add_tile(*numbers)

    monkeypatch.setattr(fused_block.kernels, "add_tile", counted)
    A.reduce(regard.LogSumExp(), backend="cpu")
    alone = len(tiles)
    _, largest = A.reduce(regard.LogSumExp(), regard.MaxScore(), backend="cpu")
    assert len(tiles) == 2 * alone
    torch.testing.assert_close(largest, A.scores.to_dense().amax(-1))


@pytest.mark.parametrize("rise", [0.0, 1_000.0, 3_000.0, 6_000.0, 1e9, 3e38])
@pytest.mark.parametrize("low", [-2_000.0, -4_000.0, -1e4, -1e9, -3e38])
def test_keys_are_counted_as_the_maximum_rises(
    low: float, rise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "TILE", 64)
    scores = torch.randn(300, 300)
    scores[:, 20:100] += low
    scores[:, 200] += rise
    A = regard.AttentionMatrix.from_scores(scores, mask=regard.Causal())
    found = A.reduce(NormalizedEntropy(), backend="cpu")
    expected = A.reduce(NormalizedEntropy(), backend="dense").float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 64, 128])
@pytest.mark.parametrize("tile", [64, 2048])
@pytest.mark.usefixtures("only_compiled")
def test_ties_go_to_the_lowest_key(k: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "TILE", tile)
    torch.manual_seed(0)
    scores = torch.randint(-2, 3, (300, 300)).float()  # also 0.0, which equals -0.0
    scores[0] = -scores[0]
    mask = regard.Causal()
    top = regard.AttentionMatrix.from_scores(scores, mask=mask).reduce(
        regard.TopK(k), backend="cpu"
    )
    masked = scores.masked_fill(~mask.to_dense(300, 300), -torch.inf)
    order = masked.sort(dim=-1, descending=True, stable=True)
    expected = order.indices[:, :k].masked_fill(order.values[:, :k] == -torch.inf, -1)
    assert torch.equal(top.indices, expected)


@pytest.mark.usefixtures("only_compiled")
def test_segments_may_leave_out_the_first_rows_and_overlap() -> None:
    A = matrix(heads=2)
    asked = regard.Segments([(100, 200), (300, 400), (350, 690)], [(0, 50), (600, 700)])
    found, expected = A.reduce(asked, backend="cpu"), A.reduce(asked, backend="dense")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("only_compiled")
def test_several_heads_with_few_queries_and_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("KEPT", 300), ("TILE", 200), ("ROWS", 64)):
        monkeypatch.setattr(cpu_backend, name, number)
    torch.manual_seed(0)
    query, key, value = torch.randn(12, 33, 8), torch.randn(12, 500, 8), torch.randn(12, 500, 3)
    A = regard.attend(query, key)
    asked = (regard.Entropy(), regard.Sum(-2), regard.Pool(4, 4), regard.Output(value))
    found, expected = A.reduce(*asked, backend="cpu"), A.reduce(*asked, backend="dense")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("only_compiled")
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    A, value = matrix(heads=2), torch.randn(2, LONG, 3)
    asked = (regard.Output(value), regard.Sum(-2))
    expected = A.reduce(*asked, backend="cpu")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = A.reduce(*asked, backend="cpu")
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("bias", [None, regard.ALiBi(1)], ids=["plain", "alibi"])
@pytest.mark.usefixtures("only_compiled")
def test_the_gradient_of_a_bfloat16_query_is_rounded_once(bias: regard.ALiBi | None) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 64, 16).bfloat16().requires_grad_()
    key = (torch.randn(1, 5000, 16) + 3).bfloat16()
    gradients: list[Tensor] = []
    for name in ("cpu", "dense"):
        A = regard.attend(query, key, bias=bias)
        total = A.reduce(regard.Sum(-2), backend=name) * torch.linspace(-1, 1, 5000)
        gradients += torch.autograd.grad(total.sum(), query)
    torch.testing.assert_close(*gradients, rtol=2**-7, atol=1e-6)


def _gradients(
    query: Tensor, key: Tensor, mask: regard.Mask | None, name: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of query and key of a sum of squares of all statistics."""
    query, key = (each.detach().requires_grad_() for each in (query, key))
    asked = (
        regard.Entropy(),
        regard.LogSumExp(),
        regard.TopK(5),
        regard.Sum(-2),
        regard.Diagonal(-1),
    )
    answers = regard.attend(query, key, mask=mask).reduce(*asked, backend=name)
    numbers = [each.values if isinstance(each, regard.Top) else each for each in answers]
    total = sum((each.double() ** 2).sum() for each in numbers)
    return torch.autograd.grad(cast(Tensor, total), (query, key))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mask", [None, regard.Causal(), regard.SlidingWindow(20, 3)], ids=["all", "causal", "window"]
)
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (4, 2)], ids=str)
@pytest.mark.usefixtures("only_compiled")
def test_gradients_over_many_rows_and_tiles(
    heads: tuple[int, int], mask: regard.Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (("TILE", 64), ("ROWS", 32)):
        monkeypatch.setattr(cpu_backend, name, number)
    torch.manual_seed(0)
    query, key = torch.randn(2, heads[0], 150, 8), torch.randn(2, heads[1], 150, 8)
    found, expected = (_gradients(query, key, mask, name) for name in ("cpu", "dense"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_beside_a_row_with_nan_are_those_of_the_sweep() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, LONG, 8), torch.randn(1, LONG, 8)
    query[0, 600] = torch.nan
    found, expected = (_gradients(query, key, regard.Causal(), name) for name in ("cpu", "sweep"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.usefixtures("only_compiled")
def test_scores_that_overflow_their_difference_are_exact() -> None:
    scores = torch.full((300, 300), -3e38)
    scores[:, 7], scores[:, 9] = 3e38, 3e38
    A = regard.AttentionMatrix.from_scores(scores)
    entropy, total = A.reduce(regard.Entropy(), regard.Sum(-2), backend="cpu")
    torch.testing.assert_close(entropy, torch.full((300,), 2.0).log())
    assert total[[7, 8, 9]].tolist() == [150, 0, 150]


def answers(query: Tensor, key: Tensor) -> list[Tensor]:
    A = regard.attend(query, key, mask=regard.Causal())
    reductions = (regard.Entropy(), regard.Sum(-2), regard.Pool(5, 5), regard.Diagonal(-1))
    found = [*A.reduce(*reductions, backend="cpu"), *A.reduce(regard.TopK(3), backend="cpu")]
    loss = sum(answer.square().sum() for answer in found[:4])
    return [*found, *torch.autograd.grad(loss, (query, key))]


def test_any_number_of_threads_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(2, 3, 613, 16, requires_grad=True) for _ in range(2))
    before = torch.get_num_threads()
    found: list[list[Tensor]] = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        found.append(answers(query, key))
    torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_can_use_the_kernels_again() -> None:
    code = (
        "import os, torch, regard\n"
        "x = torch.randn(700, 4)\n"
        "expected = regard.attend(x, x).entropy()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    same = torch.allclose(regard.attend(x, x).entropy(), expected)\n"
        "    os._exit(0 if same else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(("width", "k"), [(1, 0), (31, 0), (2048, 0), (2048, 64), (40, 128)])
def test_groups_fit_the_columns(width: int, k: int) -> None:
    assert 1 <= fused_block._groups(width, k) <= width  # pyright: ignore[reportPrivateUsage]
