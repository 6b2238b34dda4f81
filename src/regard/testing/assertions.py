"""An assertion that attention is right."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.diagnosis.checker import check

__all__ = ["assert_attention"]


def assert_attention(
    thing: object,
    *class_args: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    means: Mapping[str, str] | None = None,
    axes: str | Mapping[str, str] | None = None,
    causal: bool | None = None,
    **options: Any,
) -> None:
    """Raise with the whole report if attention is not right.

    Args:
        thing: as ``regard.check`` takes it.
        *class_args: likewise.
        args: likewise.
        kwargs: likewise.
        means: likewise.
        axes: likewise.
        causal: likewise.
        **options: likewise.

    Raises:
        AssertionError: it is wrong, or that cannot be told; the message is the report.
        TypeError: as ``regard.check`` raises it.
        ValueError: likewise.

    Example:
        >>> import regard
        >>> from regard.testing import assert_attention
        >>> assert_attention(regard.nn.SelfAttention(16, 4, mask=regard.Causal()), causal=True)
    """
    report = check(
        thing,
        *class_args,
        args=args,
        kwargs=kwargs,
        means=means,
        axes=axes,
        causal=causal,
        **options,
    )
    if not report.ok:
        raise AssertionError(str(report))
