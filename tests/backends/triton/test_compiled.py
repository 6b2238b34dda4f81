"""Every kernel compiles for the GPUs it is meant for, on their matrix units, without spills.

The questions are asked as anybody would, of tensors on the meta device: what is compiled is what a
GPU would be given, with the config of its architecture.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import regard
import waiting
from regard.reductions.divergences import (
    Divergence,
    JensenShannon,
    KullbackLeibler,
)
from regard.reductions.products import TransposedOutput, WeightTile
from regard.reductions.row_statistics import NormalizedEntropy

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

import triton
import triton.language as tl

from compiling import CONSUMERS_SHARED, MAX_SHARED, Report, only_compiled
from regard.backends.triton.packed_mask import SIDE, PackedMask

LENGTH = 1000
ROWS = (regard.LogSumExp(), regard.Entropy(), regard.Sum(-1), regard.TopK(1))
SPANS = [(start, stop) for start, stop in pairwise(range(0, LENGTH, 60))]
# Bytes that a thread may spill: a few registers, which compilers of one year to the next differ in.
MAX_SPILLED = 32
# Each row has best keys of its own, which no unit multiplies for several rows; two kernels add.
WITHOUT_UNITS = ("top_kernel", "entries_kernel", "added_kernel", "joined_kernel")
UNITS_TAKE = (torch.bfloat16, torch.float16)  # float32 they would round to tf32


@dataclass(frozen=True)
class Case:
    """One question to one kind of matrix.

    Attributes:
        asked: the reductions.
        kernels: that it takes.
        dtype, head_dim: of query and key.
        group: how many query heads share a key head.
        options: of ``attend``, made on a device.
        graded: whether the backward pass is compiled, too.
    """

    asked: tuple[regard.Reduction, ...]
    kernels: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    group: int = 8
    options: Callable[[str], dict[str, Any]] = field(default=lambda _: {"mask": regard.Causal()})
    graded: bool = False


def _all_masks(device: str) -> dict[str, Any]:
    documents = regard.Documents(torch.zeros(2, LENGTH, dtype=torch.int64, device=device))
    padding = regard.Padding([LENGTH, 3])
    return {"mask": regard.SlidingWindow(500, 0) & padding & documents}


def _all_steps(device: str) -> dict[str, Any]:
    return {
        "bias": torch.empty(2, 16, LENGTH, LENGTH, dtype=torch.bfloat16, device=device),
        "softcap": 5.0,
        "sink_bias": torch.empty(16, device=device),
    }


def _graded(device: str) -> dict[str, Any]:
    """A bias for all heads, with a gradient of its own."""
    return {"bias": torch.empty(LENGTH, LENGTH, device=device, requires_grad=True)}


def _slopes(device: str) -> dict[str, Any]:
    """A position bias with a gradient of its own."""
    slopes = torch.empty(16, device=device, requires_grad=True)
    return {"softcap": 5.0, "bias": regard.ALiBi(slopes), "mask": regard.Causal()}


def _kept(device: str) -> dict[str, Any]:
    return {"mask": regard.Keep(torch.empty(LENGTH, LENGTH, dtype=torch.bool, device=device))}


def _by_position(device: str) -> dict[str, Any]:
    return {"bias": regard.ALiBi(torch.empty(16, device=device)), "mask": regard.Causal()}


def _at_once(device: str) -> dict[str, Any]:
    kept = torch.empty(LENGTH, LENGTH, dtype=torch.bool, device=device)
    mask = _all_masks(device)["mask"] & regard.Keep(kept)
    bias = torch.empty(2, 16, LENGTH, LENGTH, device=device)
    return {**_all_steps(device), "bias": bias, "mask": mask}


def _transposed(width: int, dtype: torch.dtype) -> Case:
    """A transposed product with an operand as wide as the query."""
    operand = torch.empty(2, 16, LENGTH, width, dtype=dtype, device="meta")
    asked, kernels = (TransposedOutput(operand),), ("rows_kernel", "products_kernel")
    return Case(asked, kernels, dtype=dtype, head_dim=width)


def _divergence(
    kind: type[Divergence], head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, **case: Any
) -> Case:
    """A divergence from a matrix with the same options; it counts the norms of both."""
    made = Case((), (), dtype=dtype, head_dim=head_dim, graded=True, **case)
    query = torch.empty(2, 16, LENGTH, head_dim, dtype=dtype, device="meta", requires_grad=True)
    other = regard.attend(query, query[:, ::8], **made.options("meta"))
    gradients = ("query_gradient_kernel", "key_gradient_kernel")
    if case.get("options") is _slopes:
        gradients += ("bias_gradient_kernel",)
    kernels = ("rows_kernel", "rows_kernel", "divergence_kernel", *gradients, *gradients)
    return replace(made, asked=(kind(other.source, other.mask),), kernels=kernels)


NORMALIZED = NormalizedEntropy()
COLUMNS, POOL, TOP = regard.Sum(-2), regard.Pool(64, 64), regard.TopK(8)
EVERY = (
    (*ROWS, TOP, COLUMNS, POOL),
    ("rows_kernel", "top_kernel", "columns_kernel", "pooled_kernel"),
)
# Cells of 15 keys: a tile meets more than two.
GRADIENTS = (*EVERY[1], "row_products_kernel", "query_gradient_kernel", "key_gradient_kernel")
# Heads wider than 128 have their sparse gradients in float32.
WIDE = (
    (regard.LogSumExp(), regard.Entropy(), COLUMNS, POOL),
    ("rows_kernel", "columns_kernel", "pooled_kernel", *GRADIENTS[-3:]),
)
CASES = {
    "logsumexp": Case((regard.LogSumExp(),), ("rows_kernel",)),
    "rows": Case(ROWS, ("rows_kernel", "top_kernel"), options=lambda _: {}),
    "entries": Case(
        (regard.Diagonal(-1), regard.Diagonal(3), WeightTile(range(LENGTH), range(2)), NORMALIZED),
        ("rows_kernel", "entries_kernel", "entries_kernel", "visible_keys_kernel"),
    ),
    "entries-d256": Case(
        (regard.Diagonal(-1), NORMALIZED),
        ("rows_kernel", "entries_kernel", "visible_keys_kernel"),
        head_dim=256,
        dtype=torch.float16,
    ),
    "entries-float32-kept": Case(
        (regard.Diagonal(-1), NORMALIZED),
        ("rows_kernel", "entries_kernel", "visible_keys_kernel"),
        dtype=torch.float32,
        options=_kept,
    ),
    "entries-at-once": Case(
        (regard.Diagonal(-1), NORMALIZED),
        ("rows_kernel", "entries_kernel", "visible_keys_kernel"),
        options=_at_once,
    ),
    "segments": Case((regard.Segments(SPANS),), ("rows_kernel", "pooled_kernel")),
    "transposed": _transposed(128, torch.bfloat16),
    "transposed-d256": _transposed(256, torch.float16),
    "transposed-steps": replace(_transposed(128, torch.bfloat16), options=_all_steps),
    "transposed-float32": _transposed(64, torch.float32),
    "transposed-float32-d256": _transposed(256, torch.float32),
    "transposed-float32-kept": replace(_transposed(128, torch.float32), options=_kept),
    "transposed-float32-kept-d256": replace(_transposed(256, torch.float32), options=_kept),
    "top-64": Case((regard.TopK(64),), ("rows_kernel", "top_kernel")),
    "all": Case(*EVERY),
    "all-d64": Case(*EVERY, head_dim=64, group=1),
    "all-d256": Case(*EVERY, head_dim=256, dtype=torch.float16),
    "all-float32": Case(*EVERY, dtype=torch.float32),
    "all-float32-d256": Case(*EVERY, dtype=torch.float32, head_dim=256),
    "all-masks": Case(*EVERY, options=_all_masks),
    "all-steps": Case(*EVERY, options=_all_steps),
    "all-kept": Case(*EVERY, options=_kept),
    "all-by-position-d64": Case(*EVERY, head_dim=64, options=_by_position),
    "all-by-position-float32": Case(*EVERY, dtype=torch.float32, options=_by_position),
    "all-at-once": Case(*EVERY, options=_at_once),
    "all-at-once-d256": Case(*EVERY, head_dim=256, dtype=torch.float16, options=_at_once),
    "gradient-of-entropy": Case((regard.Entropy(),), ("rows_kernel", *GRADIENTS[-2:]), graded=True),
    "gradient-of-columns": Case(
        (COLUMNS,), ("rows_kernel", "columns_kernel", *GRADIENTS[-3:]), graded=True
    ),
    "gradient-of-cells": Case(
        (regard.Pool(2, 2),),
        ("rows_kernel", "columns_kernel", "added_kernel", "joined_kernel", *GRADIENTS[-3:]),
        graded=True,
    ),
    "gradients": Case(EVERY[0], GRADIENTS, graded=True),
    "gradients-d64": Case(EVERY[0], GRADIENTS, head_dim=64, group=1, graded=True),
    "gradients-d256": Case(*WIDE, head_dim=256, dtype=torch.float16, graded=True),
    "gradients-float32": Case(EVERY[0], GRADIENTS, dtype=torch.float32, graded=True),
    "gradients-float32-d256": Case(
        EVERY[0], GRADIENTS, dtype=torch.float32, head_dim=256, graded=True
    ),
    "gradients-kept": Case(EVERY[0], GRADIENTS, options=_kept, graded=True),
    "gradients-steps": Case(
        EVERY[0],
        GRADIENTS,
        options=lambda device: {"softcap": 5.0, **_by_position(device)},
        graded=True,
    ),
    "gradients-of-a-bias-d256": Case(
        WIDE[0],
        (*WIDE[1], "bias_gradient_kernel"),
        options=_graded,
        head_dim=256,
        dtype=torch.float16,
        graded=True,
    ),
    **{
        f"gradients-of-{name}": Case(
            EVERY[0], (*GRADIENTS, "bias_gradient_kernel"), graded=True, **case
        )
        for name, case in {
            "a-bias": {"options": _graded},
            "a-bias-float32": {"options": _graded, "dtype": torch.float32},
            "slopes": {"options": _slopes},
            "slopes-d64": {"options": _slopes, "head_dim": 64},
        }.items()
    },
    "gradient-of-a-product": replace(
        _transposed(128, torch.bfloat16),
        kernels=("rows_kernel", "products_kernel", "row_products_kernel", *GRADIENTS[-2:]),
        graded=True,
    ),
    "gradient-of-a-narrow-product": replace(
        _transposed(3, torch.bfloat16),
        kernels=("rows_kernel", "products_kernel", "row_products_kernel", *GRADIENTS[-2:]),
        head_dim=24,
        graded=True,
    ),
    "divergences": _divergence(KullbackLeibler),
    "divergences-js": _divergence(JensenShannon),
    "divergences-d64": _divergence(KullbackLeibler, head_dim=64),
    "divergences-d256": _divergence(KullbackLeibler, head_dim=256, dtype=torch.float16),
    "divergences-float32": _divergence(JensenShannon, dtype=torch.float32),
    "divergences-steps": _divergence(
        KullbackLeibler,
        options=lambda device: {"softcap": 5.0, **_by_position(device)},
    ),
    "divergences-slopes": _divergence(JensenShannon, options=_slopes),
    "all-at-once-float32": Case(*EVERY, dtype=torch.float32, options=_at_once),
    "top-64-at-once-float32-d256": Case(
        (regard.TopK(64),),
        ("rows_kernel", "top_kernel"),
        dtype=torch.float32,
        head_dim=256,
        options=_at_once,
    ),
}


def _packed_on_meta(_mask: Any, shape: torch.Size, _device: Any) -> PackedMask:
    """Bits that nobody evaluated, since the meta device has no numbers."""
    cells = (-(-shape[-2] // SIDE), -(-shape[-1] // SIDE))
    slots = torch.empty(1, 1, *cells, dtype=torch.int32, device="meta")
    words = torch.empty(9, SIDE, SIDE // 32, dtype=torch.int32, device="meta")
    return PackedMask(slots, words, (shape[-2], shape[-1]))


def compiled(name: str, architecture: int) -> tuple[Report, ...]:
    """What the compiler says of the kernels of a case."""
    case = CASES[name]
    with (
        pytest.MonkeyPatch.context() as patch,
        only_compiled(architecture) as reports,
    ):
        capability = divmod(architecture, 10)
        patch.setattr("regard.backends.triton.triton_backend.unavailable_reason", lambda _: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        patch.setattr("regard.backends.triton.operands.pack", _packed_on_meta)
        query, key = (
            torch.empty(
                2, num_heads, LENGTH, case.head_dim, dtype=case.dtype, device="meta"
            ).requires_grad_(case.graded)
            for num_heads in (16, 16 // case.group)
        )
        matrix = regard.attend(query, key, **case.options("meta"))
        with waiting.refused():
            answers = matrix.reduce(*case.asked, backend="triton")
        if case.graded:
            answers = answers if len(case.asked) > 1 else (answers,)
            numbers = [x.values if isinstance(x, regard.Top) else x for x in answers]
            loss = torch.stack([x.float().sum() for x in numbers]).sum()
            torch.autograd.grad(loss, (query, key))
    return tuple(reports)


@pytest.fixture(scope="session", autouse=True)
def compiled_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Triton's cache beside pytest's, so that nothing outside this folder is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(request.config.cache.mkdir("triton")))
        yield


@pytest.fixture(params=[90, 80], ids=["sm_90", "sm_80"])
def architecture(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_compiler_has_nothing_against_a_kernel(name: str, architecture: int) -> None:
    reports = compiled(name, architecture)
    assert tuple(report.kernel for report in reports) == CASES[name].kernels
    assert [fault for report in reports for fault in faults(report, name, architecture)] == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["all", "all-d64"])
def test_two_programs_share_a_multiprocessor_of_hopper(name: str) -> None:
    for report in compiled(name, 90):
        of_program = report.registers * 32 * report.num_warps, report.shared + 1024
        assert 2 * of_program[0] <= 2**16, report.kernel
        assert 2 * of_program[1] <= 228 * 1024, report.kernel


@pytest.mark.full
def test_the_tiles_of_ampere_fit_on_the_consumers_blackwell() -> None:
    for report in compiled("top-64", 120):
        assert report.spilled <= MAX_SPILLED, report.kernel
        assert report.shared <= CONSUMERS_SHARED, report.kernel


@pytest.mark.full
def test_an_operand_of_float32_beside_bfloat16_keeps_to_its_registers(
    architecture: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(_transposed(128, torch.float32), dtype=torch.bfloat16)
    monkeypatch.setitem(CASES, "mixed", case)
    reports = compiled("mixed", architecture)
    assert [report for report in reports if report.spilled > MAX_SPILLED] == []


@pytest.mark.full
def test_spans_of_two_lengths_take_four_launches_and_one_that_adds(
    architecture: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = regard.Segments([(0, 200), (3, 9), (9, 15), (0, LENGTH)])
    kernels = ("rows_kernel", *["pooled_kernel"] * 4, "joined_kernel")
    monkeypatch.setitem(CASES, "two-lengths", Case((asked,), kernels))
    reports = compiled("two-lengths", architecture)
    assert tuple(report.kernel for report in reports) == kernels
    assert [report for report in reports if report.spilled > MAX_SPILLED] == []


def faults(report: Report, name: str, architecture: int) -> list[str]:
    """What would make a kernel slow, or keep it from being launched."""
    on_units = CASES[name].dtype in UNITS_TAKE and report.kernel not in WITHOUT_UNITS
    wgmma, mma = on_units and architecture >= 90, on_units and architecture < 90
    found = {
        f"{report.spilled} bytes of registers are spilled": report.spilled > MAX_SPILLED,
        f"{report.shared} bytes of shared memory": report.shared > MAX_SHARED[architecture],
        f"{report.wgmma} products on Hopper's matrix units": bool(report.wgmma) != wgmma,
        f"{report.mma} products on older matrix units": bool(report.mma) != mma,
    }
    found[f"{', '.join(report.unset)} are read before they are set"] = bool(report.unset)
    return [f"{report.kernel}: {fault}" for fault, there in found.items() if there]


# The checker itself


@triton.jit
def _two_products(left, right, answers, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    product = tl.dot(tl.load(left + at), tl.load(right + at))
    tl.store(answers + at, tl.dot(product.to(tl.bfloat16), tl.load(right + at)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("architecture", "wgmma", "mma"), [(90, True, False), (80, False, True)], ids=["sm_90", "sm_80"]
)
def test_a_product_is_seen(architecture: int, wgmma: bool, mma: bool) -> None:
    with only_compiled(architecture) as reports:
        numbers = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
        _two_products[(1,)](numbers, numbers, numbers.float(), 64)
    (report,) = reports
    assert (report.kernel, report.constants) == ("_two_products", "BLOCK=64")
    assert (bool(report.wgmma), bool(report.mma), report.spilled) == (wgmma, mma, 0)


def test_a_spill_is_a_fault() -> None:
    with only_compiled(80) as reports:
        numbers = torch.empty(128, 128, dtype=torch.bfloat16, device="meta")
        _two_products[(1,)](numbers, numbers, numbers.float(), 128)
    (spilled,) = faults(reports[0], "rows", 80)
    assert re.fullmatch(r"_two_products: \d+ bytes of registers are spilled", spilled)


@pytest.mark.parametrize(("spilled", "found"), [(32, 0), (40, 1)])
def test_a_spill_of_a_few_registers_is_none(spilled: int, found: int) -> None:
    report = Report("k", 4, 2, "", 100, spilled=spilled, shared=0, wgmma=8, mma=0)
    assert len(faults(report, "rows", 90)) == found


def test_what_is_too_large_or_on_other_units_is_a_fault() -> None:
    report = Report("k", 4, 2, "", 100, spilled=0, shared=228 * 1024, wgmma=0, mma=8)
    assert faults(report, "rows", 90) == [
        "k: 233472 bytes of shared memory",
        "k: 0 products on Hopper's matrix units",
        "k: 8 products on older matrix units",
    ]
