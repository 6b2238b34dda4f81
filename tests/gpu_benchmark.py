"""benchmarks.gpu for tests: its modules by name, tiny sizes, and a clock that is told the time."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

# Passes that need the logsumexp, which is timed with them.
BEHIND = ("column sums", "64 x 64 map", "16 x 16 spans", "transposed product")


class Modules:
    """benchmarks.gpu.<name>, imported when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"benchmarks.gpu.{name}")


def size(gpu: Any, tokens: int = 64, *, causal: bool = True, head_dim: int = 128) -> Any:
    """8 heads on 2, so that a test takes no time."""
    return gpu.size.Size(tokens, head_dim, 2, causal, num_heads=8)


def side(gpu: Any, name: str, **options: Any) -> Any:
    return gpu.sides.Side(name, lambda *_: lambda: name, **options)


def taking(gpu: Any, seconds: Callable[[str], float]) -> Any:
    """A clock by which a work takes what its answer says."""

    def take(works: Sequence[Any]) -> Any:
        found = seconds(works[0]())
        return gpu.clock.Timed(found, found, 2 * found, 5, 3 * 2**20, found / 10)

    return take
