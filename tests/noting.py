"""The place in a test, in the error of a test that fails there."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noting(place: str) -> Iterator[None]:
    """Add a note to an error. A subtest for each place would take a fifth of the time of a test."""
    try:
        yield
    except Exception as error:
        error.add_note(place)
        raise
