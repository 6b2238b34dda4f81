"""Products of a batch with one matrix, as PyTorch computes them where no dispatch mode is active.

``matmul`` multiplies (batch, n, m) by (1, m, k) as ``batch`` products. While a
``TorchDispatchMode`` is active, PyTorch folds them into one product of (batch · n, m) by (m, k), as
it does for a second factor that requires gradients (``isTensorSubclassLike`` in
aten/src/ATen/native/LinearAlgebra.cpp); its last bits differ. A factor that is expanded beforehand
is multiplied as without a mode. A mode is called after that choice, so the factor is expanded by a
kernel of the operation, which is registered while any mode of ours is active.
Under ``torch.vmap`` a product makes its choice before that kernel, and keeps the folded bits.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from regard.tracing.shared_setting import SharedSetting

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # pyright: ignore[reportPrivateUsage]
PRODUCTS = torch.ops.aten.matmul.default, torch.ops.aten.matmul.out
"""The operations that choose."""

_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMPS", "AutogradXPU")


def whole(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a product; a batch of one that PyTorch would fold is expanded."""
    if first.ndim == second.ndim == 3 and len(first) != len(second):
        if len(second) == 1 and not _folds(second):
            return first, second.expand(len(first), -1, -1)
        if len(first) == 1 and not _folds(first):
            return first.expand(len(second), -1, -1), second
    return first, second


def _folds(factor: Tensor) -> bool:
    """Return True if PyTorch multiplies by this matrix in one product without a mode, too."""
    is_wrapped = bool(cast(Any, torch)._C._functorch.is_functorch_wrapped_tensor(factor))
    return factor.requires_grad or is_wrapped or type(factor) not in (Tensor, Parameter)


def _kernel(overload: Any) -> Callable[..., Tensor]:
    def multiply(first: Tensor, second: Tensor, **out: Tensor) -> Tensor:
        return overload._op_dk(_COMPOSITE, *whole(first, second), **out)

    return multiply


KERNEL = _kernel(None).__code__
"""The code of the kernel, whose frames are none of the model's."""


@contextmanager
def _registered() -> Generator[None]:
    """Register the kernel, and leave PyTorch as it was."""
    library: Any = torch.library.Library("aten", "IMPL")
    for key in _KEYS:
        for overload in PRODUCTS:
            library.impl(overload, _kernel(overload), key)
    try:
        yield
    finally:
        library._destroy()


WHOLE_BATCHES = SharedSetting(_registered)
"""The kernel, which is registered while a mode of any thread is active."""
