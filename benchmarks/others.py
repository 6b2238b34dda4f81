"""How much of the machine other programs took while something was measured."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Others", "watch"]

STAT = Path("/proc/stat")


class Others:
    """What `watch` saw.

    Attributes:
        share: of all cores' time, from 0 to 1; None where Linux does not tell.
    """

    share: float | None = None


@contextmanager
def watch() -> Iterator[Others]:
    """Watch a block whose own work is in this process and in children that end in it."""
    others = Others()
    before = _seconds()
    yield others
    after = _seconds()
    if before is not None and after is not None:
        total, busy, own = (b - a for a, b in zip(before, after, strict=True))
        others.share = max(0.0, (busy - own) / total) if total else 0.0


def _seconds() -> tuple[float, float, float] | None:
    """Seconds of all cores so far: in all, not idle, and spent by us and our children."""
    if not STAT.exists():
        return None
    fields = [int(field) for field in STAT.read_text().splitlines()[0].split()[1:9]]
    total = sum(fields) / os.sysconf("SC_CLK_TCK")
    idle = (fields[3] + fields[4]) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return total, total - idle, sum(own[:4])
