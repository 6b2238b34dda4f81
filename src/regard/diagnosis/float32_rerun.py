"""Code that computes in half precision inside, run as if it computed in float32.

Rounding to 8 or 11 bits hides what a check compares. The mistakes are the same without it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FEW_BITS", "Lifted"]

FEW_BITS = (torch.float16, torch.bfloat16)


class Lifted(TorchDispatchMode):
    """Gives float32 wherever the code asks for float16 or bfloat16.

    Example:
        >>> import torch
        >>> from regard.diagnosis.float32_rerun import Lifted
        >>> with Lifted():
        ...     print(torch.ones(2).bfloat16().dtype)
        torch.float32
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap the handler, so that the first operation imports PyTorch's compiler.
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        wide = {
            name: torch.float32 if _is_few(value) else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **wide)


def _is_few(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in FEW_BITS
