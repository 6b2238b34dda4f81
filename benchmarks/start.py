"""Seconds until one can start: the import, the command from the shell to its end, a compiler."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.case import Case, Effort, Measured, middle
from benchmarks.sides import compiled_flex
from benchmarks.tensors import random_inputs
from benchmarks.turns import seconds

__all__ = ["CASES"]

ADDED = """
from time import perf_counter
import torch
start = perf_counter()
import regard
print(perf_counter() - start)
"""
FIRST = """
from time import perf_counter
import torch, regard
A = regard.attend(torch.randn(512, 64), torch.randn(512, 64))
def ask():
    start = perf_counter()
    A.reduce(regard.Entropy(), regard.TopK(8), regard.Sum(-2), backend="cpu")
    return perf_counter() - start
print(ask() - ask())
"""
SENTENCE = "Life is short, eat dessert first"


def import_regard(effort: Effort) -> Measured:
    """What `import regard` adds after `import torch`, each time in a fresh process."""
    command = [sys.executable, "-c", ADDED]
    return middle([float(subprocess.check_output(command)) for _ in range(effort.repetitions)])


def first_statistics(effort: Effort) -> Measured:
    """What the first question of a process takes more than the second, with the code cached."""

    def once() -> float:
        printed = subprocess.check_output([sys.executable, "-c", FIRST])
        return float(printed)

    once()  # compiles and caches
    return middle([once() for _ in range(effort.repetitions)])


def see(effort: Effort) -> Measured:
    """Wall seconds of the command, in an empty folder."""
    command = [str(Path(sys.executable).with_name("regard")), "see", SENTENCE]

    def once() -> float:
        with TemporaryDirectory() as folder:
            return seconds(
                lambda: subprocess.run(command, cwd=folder, check=True, capture_output=True)
            )

    return middle([once() for _ in range(min(3, effort.repetitions))])


def compile_flex(_: Effort) -> Measured:
    """Seconds until FlexAttention has answered for the first time, with nothing in its cache."""
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return middle([seconds(lambda: compiled_flex()(random_inputs(512, 1)))])


CASES = (
    Case("start", "import regard, after import torch", "s", import_regard, goal=0.2),
    Case("start", "first statistics, compiled code cached", "s", first_statistics, goal=0.3),
    Case("start", f'regard see "{SENTENCE}"', "s", see, goal=10),
    Case("start", "FlexAttention compiles", "s", compile_flex),
)
