"""MiB of the process at its peak, from Linux's own account of it."""

import ctypes
import gc
from pathlib import Path

import torch

from benchmarks.tensors import HEAD_DIM
from benchmarks.turns import Work

__all__ = ["MIB", "added", "available", "peak", "warm_up"]

MIB = 2**20


def kilobytes(file: str, name: str) -> int:
    lines = Path(file).read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0])


def resident() -> float:
    """MiB in memory now."""
    return kilobytes("/proc/self/status", "VmRSS") / 1024


def peak(process: str = "self") -> float:
    """The most MiB in memory since a process began, or this one since `added` began."""
    return kilobytes(f"/proc/{process}/status", "VmHWM") / 1024


def available() -> float:
    """MiB that the machine could still give."""
    return kilobytes("/proc/meminfo", "MemAvailable") / 1024


def warm_up() -> None:
    """Start PyTorch's threads and load its kernels, forward and backward, without regard."""
    x = torch.randn(1, 1, 256, HEAD_DIM, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
    (x @ x.mT).softmax(-1).sum().backward()


def added(work: Work) -> float:
    """MiB that a work adds at its peak to what is in memory before it (Linux, proc(5))."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free counts as free
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident()
    answer = work()
    after = peak()
    del answer
    return max(after - before, 0.0)
