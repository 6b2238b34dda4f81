"""An assertion that attention is right."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regard.diagnosis.checker import check
from regard.diagnosis.expectation import Spec


def assert_attention(
    thing: object,
    *class_args: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    means: Mapping[str, str] | None = None,
    axes: str | Mapping[str, str] | None = None,
    causal: bool | None = None,
    expect: Spec | None = None,
    run_dtype: torch.dtype | None = None,
    run_device: torch.device | str | None = None,
    **options: Any,
) -> None:
    """Raise with the whole report if attention is not what it is meant to be.

    With ``expect`` it must be right: it computes what the spec says. Without, it must be neither
    wrong nor something that check cannot tell; what is different from the standard is a warning.

    Args:
        thing: as ``regard.check`` takes it.
        *class_args: likewise.
        args: likewise.
        kwargs: likewise.
        means: likewise.
        axes: likewise.
        causal: likewise.
        expect: likewise.
        run_dtype: likewise.
        run_device: likewise.
        **options: likewise.

    Raises:
        AssertionError: it is wrong, or that cannot be told, or it is not what ``expect`` says; the
            message is the report.
        TypeError: as ``regard.check`` raises it.
        ValueError: likewise.

    Example:
        >>> import regard
        >>> from regard.testing import assert_attention
        >>> layer = regard.nn.SelfAttention(16, 4, mask=regard.Causal())
        >>> assert_attention(layer, expect=regard.spec(causal=True, heads=4))

        A fused function of query, key and value in half precision:

        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> def kernel(query, key, value):
        ...     return scaled_dot_product_attention(query, key, value)
        >>> assert_attention(kernel, expect=regard.spec(causal=False), run_dtype=torch.bfloat16)
    """
    report = check(
        thing,
        *class_args,
        args=args,
        kwargs=kwargs,
        means=means,
        axes=axes,
        causal=causal,
        expect=expect,
        run_dtype=run_dtype,
        run_device=run_device,
        **options,
    )
    if report.verdict == "different":
        warnings.warn(str(report), stacklevel=2)
    elif not report.ok:
        raise AssertionError(str(report))
