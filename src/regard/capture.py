"""observe(model): what a model really attended to, and the model untouched.

``torch.overrides.TorchFunctionMode`` shows every call of ``scaled_dot_product_attention`` with its
meaning, on this thread, until the block ends; no module is patched, no hook is set. Its presence
would turn off the fast path of ``nn.MultiheadAttention`` and change the last bits of its output,
so a model that holds one is refused.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.errors import RegardError
from regard.masks import Causal, Keep, Mask
from regard.matrix import attend
from regard.recording import Recording

__all__ = ["observe"]


@contextmanager
def observe(model: nn.Module) -> Iterator[Recording]:
    """Watch what the attention of a model does while the block runs.

    Each ``scaled_dot_product_attention`` that a module of the model calls on this thread is kept as
    an AttentionMatrix: copies of its query and key (after rotary positions) with its mask and
    scale, detached. No output bit changes and nothing is left behind. Dropout on the weights is
    not part of what is kept.

    Args:
        model: any module that calls ``torch.nn.functional.scaled_dot_product_attention``: Hugging
            Face with ``attn_implementation="sdpa"`` (its default), timm, your own.

    Yields:
        The Recording; it fills as the model runs.

    Raises:
        TypeError: model is no ``nn.Module``.
        RegardError: the model holds an ``nn.MultiheadAttention`` or is compiled; or the block ended
            and no attention was seen.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), regard.nn.SelfAttention(8))
        >>> with regard.observe(model) as seen:
        ...     output = model(torch.randn(3, 4))
        >>> list(seen)
        ['1']
    """
    _check_model(model)
    seen = Recording({}, model=type(model).__name__)
    with _Watch(model, seen):
        yield seen
    if not seen:
        raise RegardError(
            f"no attention was seen in {type(model).__name__}; "
            "observe sees calls of scaled_dot_product_attention.\n"
            "    Run the model inside the block; load a Hugging Face model with "
            'attn_implementation="sdpa".'
        )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; observe needs a torch.nn.Module.\n"
            "    Pass the module whose forward runs the attention."
        )
    if type(model).__module__.startswith("torch._dynamo"):
        raise RegardError(
            "model is compiled; observe cannot look into compiled code.\n"
            "    Observe the model that was given to torch.compile."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise RegardError(
                f"model has an nn.MultiheadAttention at {name or type(model).__name__!r}; "
                "observing it would change the last bits of its output.\n"
                "    observe sees models that call scaled_dot_product_attention themselves."
            )


class _Watch(TorchFunctionMode):
    """Keeps the arguments of each attention call that comes from a module of the model."""

    def __init__(self, model: nn.Module, seen: Recording) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._root = type(model).__name__
        self._seen = seen
        self._masks: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            name = self._caller()
            if name is not None:
                self._keep(name, *args, **(kwargs or {}))
        return output

    def _caller(self) -> str | None:
        """The name of the innermost module of the model whose method is running."""
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            name = self._names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name or self._root
            frame = frame.f_back
        return None

    def _keep(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        mask: Mask | None = Causal(align="top-left") if is_causal else None
        bias: Tensor | None = None
        # Outside inference mode, so that what is kept can meet autograd later.
        with torch.inference_mode(False), torch.no_grad():
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                mask = Keep(self._kept_once(attn_mask))
            elif attn_mask is not None:
                bias = self._kept_once(attn_mask)
            matrix = attend(_copy(query), _copy(key), mask=mask, scale=scale, bias=bias)
        self._seen.add(name, matrix)

    def _kept_once(self, mask: Tensor) -> Tensor:
        """A copy of the mask; one copy serves all layers that share its content."""
        strides = zip(mask.shape, mask.stride(), strict=True)
        distinct = mask.detach()[tuple(slice(0, n if stride else 1) for n, stride in strides)]
        for kept in self._masks:
            same_kind = kept.shape == distinct.shape and kept.dtype == distinct.dtype
            if same_kind and kept.device == distinct.device and torch.equal(kept, distinct):
                return kept
        self._masks.append(_copy(distinct))
        return self._masks[-1]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
