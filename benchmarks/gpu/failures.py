"""What fails on the GPU is a line in the report; what comes after it goes on."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from benchmarks.case import LeftOut

__all__ = ["Failed", "told"]


class Failed(LeftOut):
    """There should have been something here, and an error came instead."""


@contextmanager
def told() -> Generator[None, None, None]:
    """Whatever is raised inside becomes a ``LeftOut`` that says in one line what it was."""
    try:
        yield
    except LeftOut:
        raise
    except torch.OutOfMemoryError:
        raise LeftOut("out of memory") from None
    except Exception as error:
        said = [type(error).__name__, *str(error).splitlines()[:1]]
        raise Failed(f"failed: {': '.join(said)}") from error
