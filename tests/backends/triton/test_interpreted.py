"""Every kernel equals its readable twin in float64: on the CPU in Triton's interpreter, or a GPU.

Tiles are 16 queries x 32 keys in the interpreter, so the small odd shapes here have several.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import regard

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

import kernel_definitions as definitions
from regard.backends.triton.launch import NARROW, Launch, cut_spans
from regard.backends.triton.operands import CellNumbers, Derivative, Operands, operands
from regard.backends.triton.tile import Norms
from regard.scores.score_source import MASKED_SCORE

# Kernels compute with infinities where nothing is stored; NumPy warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered")

Q_LEN, KV_LEN, HEAD_DIM = 19, 37, 5
HEADS = {"alone": (2, 2), "grouped": (2, 1)}
TWO_SEQUENCES = ("padding", "causal-and-padding", "documents")
MASKS: dict[str, Callable[[], regard.Mask | None]] = {
    "none": lambda: None,
    "causal": regard.Causal,
    "top-left": lambda: regard.Causal(align="top-left"),
    "window": lambda: regard.SlidingWindow(7, 2),
    "padding": lambda: regard.Padding([KV_LEN - 3, 0]),
    "causal-and-padding": lambda: regard.Causal() & regard.Padding([33, 20]),
    "documents": lambda: regard.Documents(_documents()) & regard.Causal(),
    "scattered-documents": lambda: regard.Documents([(key * key) % 5 for key in range(KV_LEN)]),
    "keep": lambda: regard.Keep(_random(2, Q_LEN, KV_LEN) & (torch.arange(Q_LEN) > 2)[:, None]),
    "mask-mod": lambda: regard.MaskMod(
        lambda _, h, q_idx, kv_idx: (q_idx * 7 + kv_idx * 3 + h) % 5 < 3
    ),
    "either": lambda: regard.SlidingWindow(5, 0) | regard.Padding([9]),
    "keep-and-window": lambda: regard.SlidingWindow(20, 0) & regard.Keep(_random(KV_LEN)),
    "rows": lambda: regard.masks.RowSlice(
        regard.Causal() & regard.Documents([key // 6 for key in range(KV_LEN)]), 3, Q_LEN + 4
    ),
    "more-queries": lambda: regard.masks.RowSlice(regard.SlidingWindow(9, 0), 0, Q_LEN + 31),
}
STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "bias": lambda: {"bias": torch.randn(2, Q_LEN, KV_LEN)},
    "bias-of-keys": lambda: {"bias": torch.randn(KV_LEN)},
    "bias-that-hides": lambda: {"bias": torch.zeros(KV_LEN).index_fill(0, torch.tensor(5), -1e38)},
    "alibi": lambda: {"bias": regard.ALiBi(torch.tensor([0.5, 0.03]))},
    "t5": lambda: {"bias": regard.T5Bias(torch.randn(8, 2))},
    "softcap": lambda: {"softcap": 1.5, "scale": 2.0},
    "sinks": lambda: {"sink_bias": torch.tensor([0.3, -2.0])},
    "scale-negative": lambda: {"scale": -0.7},
    "scale-zero": lambda: {"scale": 0.0},
    "sharp": lambda: {"scale": 40.0},
    "all": lambda: {
        "bias": regard.ALiBi(torch.tensor([0.5, 0.03])),
        "softcap": 2.0,
        "sink_bias": torch.tensor([0.3, -2.0]),
        "scale": -1.3,
    },
}


def _random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6


def _documents() -> list[list[int]]:
    return [[key // 11 for key in range(KV_LEN)], [key // 35 for key in range(KV_LEN)]]


def matrix(
    device: torch.device,
    mask: str = "none",
    heads: str = "alone",
    dtype: torch.dtype = torch.float32,
    head_dim: int = HEAD_DIM,
    steps: str | None = None,
) -> regard.AttentionMatrix:
    """A small matrix of normal random numbers, the same every time."""
    torch.manual_seed(7)
    num_heads, num_kv_heads = HEADS[heads]
    batch = 2 if mask in TWO_SEQUENCES else 1
    query = torch.randn(batch, num_heads, Q_LEN, head_dim).to(device, dtype)
    key = torch.randn(batch, num_kv_heads, KV_LEN, head_dim).to(device, dtype)
    options = STEPS[steps]() if steps else {}
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    found = MASKS[mask]()
    there = None if found is None else found.map(lambda tensor: tensor.to(device))
    return regard.attend(query, key, mask=there, **options)


def given(A: regard.AttentionMatrix) -> Operands:
    """What the kernels compute with."""
    return operands(A.source, A.mask)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Kernel:
    """A kernel, and its twin: each gives floating answers by name, or int64 indices.

    Attributes:
        run: the kernel's answers.
        twin: those of the twin in a dtype.
    """

    run: Callable[[Operands], dict[str, Tensor]]
    twin: Callable[[Operands, torch.dtype], dict[str, Tensor]]


SPANS = [(0, 0 + 1), (1, 12), (5, 6), (0, 19)]
KEY_SPANS = [(0, 37), (36, 37), (3, 20)]


def _run_rows(x: Operands) -> dict[str, Tensor]:
    statistics = Launch(x).rows(mean_shifted=True)._asdict()
    return {name: x for name, x in statistics.items() if isinstance(x, Tensor)}


def _twin_rows(x: Operands, dtype: torch.dtype) -> dict[str, Tensor]:
    found = definitions.rows(x, dtype)._asdict()
    return {name: found[name] for name in ("logsumexp", "maximum", "mean_shifted", "mass")}


def _norms(x: Operands) -> Norms:
    return Launch(x).rows().norms


def _top(k: int) -> Kernel:
    def run(x: Operands) -> dict[str, Tensor]:
        values, indices = Launch(x).top(Launch(x).rows(k=k), k)
        return {"values": values, "indices": indices}

    def twin(x: Operands, dtype: torch.dtype) -> dict[str, Tensor]:
        values, indices = definitions.top(x, k, dtype)
        return {"values": values, "indices": indices}

    return Kernel(run, twin)


def _cells(rows: int, columns: int) -> Kernel:
    """The cells of a pooled map of a grid."""
    down = [(i * Q_LEN // rows, (i + 1) * Q_LEN // rows) for i in range(rows)]
    across = [(i * KV_LEN // columns, (i + 1) * KV_LEN // columns) for i in range(columns)]
    return _spans(down, across)


def _spans(down: list[tuple[int, int]], across: list[tuple[int, int]]) -> Kernel:
    return Kernel(
        lambda x: {"mass": Launch(x).spans(_norms(x), torch.tensor(down), torch.tensor(across))},
        lambda x, dtype: {"mass": definitions.spans(x, down, across, dtype)},
    )


def operand(x: Operands) -> Tensor:
    """What the transposed matrix is multiplied with: one head for all."""
    wide = torch.randn(1, 1, Q_LEN, 3, generator=torch.Generator().manual_seed(1))
    return wide.to(x.query.device, x.query.dtype).expand(x.shape[0], 1, Q_LEN, 3)


def derivative(x: Operands) -> Derivative:
    """A derivative by everything that a loss may depend on."""
    drawn = torch.Generator().manual_seed(2)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*x.shape[:2], *size, generator=drawn).to(x.query.device)

    # A row before the first and between two, and columns that touch each other.
    spans = torch.tensor([(2, 9), (11, 19)]), torch.tensor([(0, 5), (5, 33), (33, 37)])
    places = (
        torch.tensor([-1] * 2 + [0] * 7 + [-2] * 2 + [1] * 8 + [-3] * (Q_LEN - 19)),
        torch.tensor([0] * 5 + [1] * 28 + [2] * 4 + [-4] * (KV_LEN - 37)),
    )
    return Derivative(
        offset=numbers(Q_LEN),
        slope=numbers(Q_LEN),
        columns=numbers(KV_LEN),
        grid=CellNumbers(
            numbers(2, 3),
            spans,
            (places[0].int().to(x.query.device), places[1].int().to(x.query.device)),
        ),
        left=operand(x),
        right=numbers(KV_LEN, 3).to(x.query.dtype),
        keys=torch.stack([torch.randperm(KV_LEN, generator=drawn)[:2] for _ in range(Q_LEN)])
        .expand(*x.shape[:2], Q_LEN, 2)
        .to(x.query.device),
        numbers=numbers(Q_LEN, 2),
    )


def _run_gradients(x: Operands) -> dict[str, Tensor]:
    norms, of = _norms(x), derivative(x)
    return {
        "query": Launch(x).query_gradient(norms, of),
        "key": Launch(x).key_gradient(norms, of),
    }


def _twin_gradients(x: Operands, dtype: torch.dtype) -> dict[str, Tensor]:
    return dict(zip(("query", "key"), definitions.gradients(x, derivative(x), dtype), strict=True))


def _run_row_products(x: Operands) -> dict[str, Tensor]:
    norms, of = _norms(x), derivative(x)
    sums, _ = Launch(x).row_products(norms, of, sums=True, products=False)
    _, product = Launch(x).row_products(norms, of, sums=False, products=True)
    assert sums is not None
    assert product is not None
    return {"sums": sums, "product": product}


def _twin_row_products(x: Operands, dtype: torch.dtype) -> dict[str, Tensor]:
    return dict(
        zip(("sums", "product"), definitions.row_products(x, derivative(x), dtype), strict=True)
    )


OFFSETS = [-40, -7, -1, 0, 1, 18, 36, 50]
COLUMNS = [*range(0, 37, 2)]


def _twin_diagonals(x: Operands, dtype: torch.dtype) -> Tensor:
    """The weights at each offset, 0 where a query has no such key."""
    rows = torch.arange(Q_LEN, device=x.query.device)
    keys = rows[:, None] + torch.tensor(OFFSETS, device=rows.device)
    there = (keys >= 0) & (keys < KV_LEN)
    weights = definitions.weights(x, dtype)[..., rows[:, None], keys.clamp(0, KV_LEN - 1)]
    return weights.masked_fill(~there, 0)


def _twin_visible_keys(x: Operands) -> Tensor:
    scores = definitions.scores(x)
    return (scores - scores.amax(-1, keepdim=True) > MASKED_SCORE).sum(-1)


KERNELS = {
    "rows": Kernel(_run_rows, _twin_rows),
    "columns": Kernel(
        lambda x: {"sums": Launch(x).column_sums(_norms(x))},
        lambda x, dtype: {"sums": definitions.column_sums(x, dtype)},
    ),
    "products": Kernel(
        lambda x: {"product": Launch(x).transposed_product(_norms(x), operand(x))},
        lambda x, dtype: {"product": definitions.transposed_product(x, operand(x), dtype)},
    ),
    "pooled": _cells(3, 5),
    "top": _top(5),
    "top-1": _top(1),
    "diagonals": Kernel(
        lambda x: {"weights": Launch(x).entries(_norms(x), OFFSETS, diagonal=True)},
        lambda x, dtype: {"weights": _twin_diagonals(x, dtype)},
    ),
    "some-columns": Kernel(
        lambda x: {"weights": Launch(x).entries(_norms(x), COLUMNS, diagonal=False)},
        lambda x, dtype: {"weights": definitions.weights(x, dtype)[..., COLUMNS]},
    ),
    "visible-keys": Kernel(
        lambda x: {"counts": Launch(x).visible_keys(_norms(x)).float()},
        lambda x, dtype: {"counts": _twin_visible_keys(x).to(dtype)},
    ),
    "row-products": Kernel(_run_row_products, _twin_row_products),
    "gradients": Kernel(_run_gradients, _twin_gradients),
}
GRIDS = {
    "one-cell": _cells(1, 1),
    "rows-of-one": _cells(Q_LEN, 2),
    "columns-of-one": _cells(1, KV_LEN),
    "every-weight": _cells(Q_LEN, KV_LEN),
    "spans-that-overlap": _spans(SPANS, KEY_SPANS),
    "spans-of-one": _spans([(4, 5)], [(30, 31), (2, 3)]),
    "spans-of-many-widths": _spans(
        [(3, 5), (0, 19), (7, 7 + 8), (5, 6), (1, 18)], [(0, 2), (4, 37), (36, 37), (0, 37)]
    ),
}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def assert_as_good(x: Operands, found: Tensor, exact: Tensor, near: float) -> None:
    """That each row names different keys, of scores as high, and of equal scores the same."""
    found, exact = (keys.reshape(*x.shape[:-1], -1) for keys in (found, exact))
    of_all = definitions.scores(x)
    of_found, of_exact = (
        of_all.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, -torch.inf)
        for keys in (found, exact)
    )
    torch.testing.assert_close(of_found, of_exact, rtol=0, atol=near)
    assert bool(((found == exact) | (of_found != of_exact)).all())
    in_order = found.sort(-1).values
    assert bool(((in_order.diff() > 0) | (in_order[..., 1:] < 0)).all())


def assert_equal(kernel: Kernel, x: Operands) -> None:
    """That a kernel is within the budget of its twin, and names keys of the same scores."""
    exact, plain = kernel.twin(x, torch.float64), kernel.twin(x, torch.float32)
    size = float(oracle.finite(definitions.scores(x)).abs().max())
    for name, found in kernel.run(x).items():
        if not found.is_floating_point():
            # Scores may change places that float32 does not tell apart, whatever order it adds in.
            near = 16 * torch.finfo(torch.float32).eps * max(size, 1.0)
            assert_as_good(x, found, exact[name], near)
            continue
        assert found.dtype == torch.float32
        # A product rounds the weights, or their derivative, to the dtype of its operand.
        rounded = name in ("product", "query", "key") and x.query.dtype != torch.float32
        budget = oracle.allowed_error(
            exact[name].cpu(),
            plain[name].cpu(),
            dtype=x.query.dtype if rounded else torch.float32,
            scores=size,
            unit=1.0 if name in ("logsumexp", "maximum", "mean_shifted") else None,
            roundings=1 if rounded else oracle.SUM_ROUNDINGS,
        )
        oracle.assert_close(found.cpu(), exact[name].cpu(), budget)


@pytest.mark.sampled(8)
@kernels
def test_a_kernel_of_grouped_heads_equals_its_twin(kernel: Kernel, device: torch.device) -> None:
    assert_equal(kernel, given(matrix(device, "causal-and-padding", "grouped", steps="softcap")))


@pytest.mark.full
@kernels
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_kernel_equals_its_twin(
    kernel: Kernel, mask: str, heads: str, device: torch.device
) -> None:
    assert_equal(kernel, given(matrix(device, mask, heads)))


@pytest.mark.full
@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_kernel_takes_half_precision(
    kernel: Kernel, dtype: torch.dtype, device: torch.device
) -> None:
    assert_equal(kernel, given(matrix(device, "causal", "grouped", dtype, 24)))


@pytest.mark.full
@pytest.mark.parametrize("of_operand", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_operand_is_of_any_dtype(
    dtype: torch.dtype, of_operand: torch.dtype, device: torch.device
) -> None:
    x = given(matrix(device, dtype=dtype))
    wide = operand(x).to(of_operand)
    product = Launch(x).transposed_product(_norms(x), wide)
    torch.testing.assert_close(
        product.double(),
        definitions.transposed_product(x, wide),
        rtol=0,
        # A weight is at most 1, and is rounded to the dtype of the operand.
        atol=Q_LEN * float(wide.abs().max()) * max(torch.finfo(of_operand).eps, 1e-6),
    )


@pytest.mark.full
@kernels
@pytest.mark.parametrize("steps", STEPS)
def test_a_kernel_takes_every_step_of_a_score(
    kernel: Kernel, steps: str, device: torch.device
) -> None:
    assert_equal(kernel, given(matrix(device, "causal", steps=steps)))


@pytest.mark.full
@pytest.mark.parametrize("kernel", GRIDS.values(), ids=GRIDS)
def test_the_mass_of_spans_of_every_size(kernel: Kernel, device: torch.device) -> None:
    assert_equal(kernel, given(matrix(device, "causal")))


def test_one_long_span_leaves_the_slots_of_short_ones_narrow() -> None:
    words = [(start, start + 3) for start in range(200, 500, 3)]
    parts = cut_spans(torch.tensor([(0, 200), *words]), 128)
    assert [tuple(group) for group in parts.groups] == [(8, 0, 100), (128, 100, 102)]


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_span_fills_more_than_a_quarter_of_its_slots(block: int) -> None:
    parts = cut_spans(torch.tensor([(7, 7 + length) for length in range(1, 300)]), block)
    lengths = parts.table[:, 1]
    for slot, begin, end in parts.groups:
        assert slot in (*NARROW, block)
        assert slot // 4 < int(lengths[begin:end].min()) <= int(lengths[begin:end].max()) <= slot


SPANS_OF_FORTY = regard.Segments([(0, 40), (1, 40), (20, 40)], [(0, 7), (0, 40)])


@pytest.mark.full
@pytest.mark.parametrize("asked", [regard.Pool(2, 2), SPANS_OF_FORTY], ids=["pool", "segments"])
def test_a_query_of_nan_is_felt_in_its_own_spans_alone(
    asked: regard.Reduction, device: torch.device
) -> None:
    query = torch.randn(40, 4)
    query[0, 0] = torch.nan
    A = regard.attend(query.to(device), torch.randn(40, 4).to(device))
    found, exact = (A.reduce(asked, backend=name) for name in ("triton", "sweep"))
    assert found[0].isnan().all()
    torch.testing.assert_close(found, exact, equal_nan=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "asked",
    [regard.Sum(-2), regard.Segments([(0, 17)], [(0, 10), (10, 20)]), regard.Pool(1, 2)],
    ids=["columns", "segments", "pool"],
)
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
def test_a_hidden_key_that_is_no_number_is_not_felt_by_places_without_a_query(
    asked: regard.Reduction, number: float, device: torch.device
) -> None:
    key = torch.randn(20, 4)
    key[19] = number
    query = torch.rand(18, 4).to(device)
    A = regard.attend(query, key.to(device), mask=regard.Causal(align="top-left"))
    found, exact = (A.reduce(asked, backend=name) for name in ("triton", "sweep"))
    assert found.isfinite().all()
    torch.testing.assert_close(found, exact)


def test_an_infinite_key_is_not_felt_by_places_without_a_query(device: torch.device) -> None:
    key = torch.randn(10, 1).index_fill(0, torch.tensor(4), torch.inf)
    A = regard.attend(torch.rand(2, 1).to(device) + 0.5, key.to(device), softcap=5.0)
    found, exact = (A.reduce(regard.Sum(-2), backend=name) for name in ("triton", "sweep"))
    torch.testing.assert_close(found, exact)


@pytest.mark.full
@kernels
@pytest.mark.parametrize("head_dim", [1, 16, 17, 64])
def test_a_kernel_takes_every_head_dim(kernel: Kernel, head_dim: int, device: torch.device) -> None:
    assert_equal(kernel, given(matrix(device, head_dim=head_dim)))


@pytest.mark.full
@kernels
def test_two_runs_give_the_same_bits(kernel: Kernel, device: torch.device) -> None:
    x = given(matrix(device, "window", "grouped"))
    first, second = kernel.run(x), kernel.run(x)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_kernel_equals_its_twin_where_a_gpu_has_several_tiles(
    name: str, mask: str, heads: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Q_LEN", 301)
    monkeypatch.setattr(sys.modules[__name__], "KV_LEN", 517)
    kernel = _cells(2, 3) if name == "pooled" else KERNELS[name]
    assert_equal(kernel, given(matrix(torch.device("cuda"), mask, heads, dtype, 128)))
