"""Check attention in the tests of other projects."""

from regard.testing.assertions import assert_attention

__all__ = ["assert_attention"]
