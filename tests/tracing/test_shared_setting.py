"""A setting of the process is made by the first of several blocks, and ended by the last one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from regard.tracing.shared_setting import SharedSetting


def test_a_setting_that_failed_is_made_by_the_next_block() -> None:
    made: list[str] = []

    @contextmanager
    def setting() -> Iterator[None]:
        made.append("tried")
        if len(made) == 1:
            raise RuntimeError("not now")
        yield
        made.append("ended")

    shared = SharedSetting(setting)
    with pytest.raises(RuntimeError, match="not now"), shared:
        pass
    with shared, shared:
        assert made == ["tried", "tried"]
    assert made == ["tried", "tried", "ended"]
