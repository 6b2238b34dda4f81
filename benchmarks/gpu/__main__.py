"""``python -m benchmarks.gpu``: is it right, how long does it take, beside what; in 8 minutes."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.case import LeftOut
from benchmarks.gpu import correctness, report
from benchmarks.gpu.clock import Budget, seconds_of, timed
from benchmarks.gpu.failures import told
from benchmarks.gpu.rows import Row, Take, measured
from benchmarks.gpu.sides import SIDES
from benchmarks.gpu.size import GOALS_AT, LENGTHS, Size, sizes

RESULTS = Path(__file__).parent.parent / "results" / "gpu"
BUDGET_S = 7.5 * 60  # of the eight minutes; imports and the picture take the rest
DEVICE = "cuda"
NO_GPU, WRONG = 2, 1
SQUARE = 8192  # of the matrix product that the peak is measured by


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--length", type=int, action="append", metavar="TOKENS", help="at this length; repeatable"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the JSON goes, and the plot beside it; benchmarks/results/gpu/<gpu>.json",
    )
    return parser.parse_args(given)


def lacking() -> str | None:
    """Why nothing can be measured here, in one sentence."""
    if not torch.cuda.is_available():
        return "There is no NVIDIA GPU that PyTorch can use, so there is nothing to measure."
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'regard[gpu]'."
    return None


def peak_tflops() -> float | None:
    """What a large matrix product of random numbers in bfloat16 reaches; None: it failed."""
    try:
        with told():
            left, right = torch.randn(2, SQUARE, SQUARE, device="cuda").bfloat16()
            seconds_of(lambda: left @ right, 3)
            return 2 * SQUARE**3 / min(seconds_of(lambda: left @ right, 10).on_gpu) / 1e12
    except LeftOut as reason:
        print(f"The peak of the matrix units is not measured: {reason}", file=sys.stderr)
        return None


def check(path: Path, known: dict[str, object]) -> list[correctness.Checked]:
    """Compare with what is exact; show and write each line."""
    found: list[correctness.Checked] = []
    for checked in correctness.check(DEVICE):
        print(report.checked_line(checked), flush=True)
        found.append(checked)
        report.write(path, known, None, found, [])
    return found


def measure(
    path: Path,
    chosen: list[Size],
    budget: Budget,
    take: Take,
    known: dict[str, object],
    peak: float | None,
    checks: list[correctness.Checked],
) -> list[Row]:
    """Time each side at each size; show and write each line."""
    rows: list[Row] = []
    for row in measured(SIDES, chosen, DEVICE, budget, take, checks):
        print(report.line(row), flush=True)
        rows.append(row)
        report.write(path, known, peak, checks, rows)
    return rows


def main(options: argparse.Namespace) -> int:
    """0; 1 when an answer is wrong, which is not timed then, or a side failed; 2 without a GPU."""
    reason = lacking()
    if reason is not None:
        print(reason, file=sys.stderr)
        return NO_GPU
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic then
    budget = Budget(BUDGET_S)
    known = report.facts()
    path = options.output or RESULTS / report.file_name(known["gpu"])
    print("  ".join(f"{name} {value}" for name, value in known.items()))
    checks = check(path, known)
    right = all(checked.right for checked in checks)
    if not right:
        print("Not all answers are right: those that are wrong are not timed.", file=sys.stderr)
    peak = peak_tflops()
    rows = measure(path, sizes(options.length or LENGTHS), budget, timed, known, peak, checks)
    print(report.peak_line(rows, peak, GOALS_AT))
    print("\n".join((*report.given_logsumexp(rows, GOALS_AT), *report.against_dense(rows))))
    print(f"results: {path}")
    if find_spec("matplotlib") is not None:
        from benchmarks.gpu.plot import picture

        print(f"plot: {picture(rows, known, path.with_suffix('.svg'))}")
    return WRONG if not right or any(row.get("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(arguments()))
