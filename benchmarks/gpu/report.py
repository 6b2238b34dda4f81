"""The results in words and as a file, and what follows from them."""

import json
import platform
import re
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu.correctness import Checked
from benchmarks.gpu.rows import Row
from benchmarks.gpu.sides import BOTH, FORWARD
from benchmarks.gpu.size import Size
from regard.recording.version import version

__all__ = [
    "against_dense",
    "checked_line",
    "facts",
    "file_name",
    "given_logsumexp",
    "line",
    "peak_line",
    "write",
]

DENSE, OURS = "dense: output and five statistics", "output and five statistics"
PEAK_SHARE = 0.6
CPU_SHARE = 0.9  # of the time on the GPU: a call that takes as long to be queued waits for the CPU
GIVEN, ITS_MASK = "logsumexp, ", ("mask_mod", "A | B")


def facts() -> dict[str, Any]:
    """The GPU and the versions; nothing that names the machine."""
    import triton

    properties: Any = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": triton.__version__,
        "regard": version(),
        "commit": machine.commit(),
    }


def file_name(gpu: str) -> str:
    """`nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def checked_line(checked: Checked) -> str:
    """One comparison with float64."""
    said = "right" if checked.right else "WRONG"
    found = checked.failed if checked.error is None else f"error {checked.error:.1e}"
    return f"{checked.size.text}  {checked.name:29}  {said}  {found}"


def line(row: Row) -> str:
    """One measurement."""
    size = Size(row["tokens"], row["head_dim"], row["num_kv_heads"], row["causal"])
    head = f"{size.text}  {row['side']:36}"
    if "left_out" in row:
        return f"{head}  left out: {row['left_out']}"
    forwards = "" if row["forwards"] is None else f"{row['forwards']:g} forwards"
    if row["peer"] == BOTH and row["of_peer"] is not None:
        forwards += f", {row['of_peer']:g} with backward"
    # Where the forward was not measured, nobody knows whether the goal is reached.
    missed = " MISSED" if row["reached"] is False else ""
    goal = "" if row["goal"] is None else f"goal {row['goal']:g}{missed}"
    waits = row["queued_ms"] > CPU_SHARE * row["milliseconds"]
    cells = (
        f"{row['milliseconds']:>8g} ms",
        f"{forwards:34}",
        f"{row['tflops']:>6g} TFLOP/s",
        f"{row['memory_mib']:>8g} MiB",
        goal,
        "the CPU is the limit" if waits else "",
    )
    return f"{head}  {'  '.join(cells)}".rstrip()


def peak_line(rows: Sequence[Row], peak_tflops: float | None, goals_at: tuple[int, int]) -> str:
    """The most of the matrix units' measured peak that the score product of one pass reached."""
    here = [
        row["tflops"]
        for row in rows
        if row["side"] in ("logsumexp", "row statistics")
        and (row["tokens"], row["head_dim"]) == goals_at
        and "left_out" not in row
    ]
    if not here or peak_tflops is None:
        return "share of the matrix peak: not measured"
    share = max(here) / peak_tflops
    said = "" if share >= PEAK_SHARE else ", MISSED"
    return (
        f"share of the matrix peak: {share:.2f} of {peak_tflops:.0f} TFLOP/s in the score product "
        f"(goal {PEAK_SHARE:g}{said})"
    )


def given_logsumexp(rows: Sequence[Row], goals_at: tuple[int, int]) -> list[str]:
    """What the passes that need the logsumexp take by themselves, at the size of the goals."""
    found = _by_size(rows)
    lines: list[str] = []
    for (side, *size), row in found.items():
        alone, forward = found.get(("logsumexp", *size)), found.get((FORWARD, *size))
        here = side.startswith(GIVEN) and not side.endswith(ITS_MASK)
        here &= tuple(size[:2]) == goals_at
        if not here or alone is None or forward is None:
            continue
        ratio = (row["milliseconds"] - alone["milliseconds"]) / forward["milliseconds"]
        what = side.removeprefix(GIVEN)
        lines.append(f"{Size(*size).text}  {what} given logsumexp: {ratio:.2f} forwards")
    return lines


def _by_size(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    return {
        (row["side"], row["tokens"], row["head_dim"], row["num_kv_heads"], row["causal"]): row
        for row in rows
        if "left_out" not in row
    }


def against_dense(rows: Sequence[Row]) -> list[str]:
    """How much faster and smaller than forming the matrix, where both were measured."""
    found = _by_size(rows)
    lines: list[str] = []
    for (side, *size), row in found.items():
        ours = found.get((OURS, *size))
        if side != DENSE or ours is None:
            continue
        faster = row["milliseconds"] / ours["milliseconds"]
        smaller = row["memory_mib"] / max(ours["memory_mib"], 1)
        lines.append(
            f"{Size(*size).text}  {faster:.1f} times faster than dense, "
            f"{smaller:.0f} times less memory"
        )
    return lines


def write(
    path: Path,
    known: dict[str, Any],
    peak_tflops: float | None,
    checks: Sequence[Checked],
    rows: Sequence[Row],
) -> None:
    """All of it as JSON, written anew after each line: what is done is kept, come what may."""
    content = {
        "machine": known,
        "matrix_peak_tflops": peak_tflops,
        "checks": [
            {
                "asked": each.name,
                "size": each.size.text,
                # JSON has no NaN
                "error": None if each.error is None or isnan(each.error) else each.error,
                "right": each.right,
                "failed": each.failed,
            }
            for each in checks
        ],
        "results": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)
