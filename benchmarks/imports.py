"""Seconds until one can start: the import, and the command from the shell to its end."""

import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.case import Case, Measured

__all__ = ["CASES"]

ADDED = """
from time import perf_counter
import torch
start = perf_counter()
import regard
print(perf_counter() - start)
"""
SENTENCE = "Life is short, eat dessert first"


def middle(seconds: list[float]) -> Measured:
    low, _, high = quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
    return Measured(median(seconds), low, high)


def import_regard(quick: bool) -> Measured:
    """What `import regard` adds after `import torch`, each time in a fresh process."""
    command = [sys.executable, "-c", ADDED]
    return middle([float(subprocess.check_output(command)) for _ in range(1 if quick else 7)])


def see(quick: bool) -> Measured:
    """Wall seconds of the command, in an empty folder."""
    command = [str(Path(sys.executable).with_name("regard")), "see", SENTENCE]
    seconds: list[float] = []
    for _ in range(1 if quick else 5):
        with TemporaryDirectory() as folder:
            start = perf_counter()
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            seconds.append(perf_counter() - start)
    return middle(seconds)


CASES = (
    Case("imports", "import regard, after import torch", "s", import_regard, goal=0.2),
    Case("imports", f'regard see "{SENTENCE}"', "s", see, goal=10),
)
