"""The same as a pytest fixture: ``pytest_plugins = ["regard.testing.fixtures"]`` in conftest.py."""

from collections.abc import Callable

import pytest

from regard.testing.assertions import assert_attention


@pytest.fixture(name="assert_attention")
def attention() -> Callable[..., None]:
    """``regard.testing.assert_attention``."""
    return assert_attention
