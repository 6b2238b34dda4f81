"""Callbacks of a monitor: for the ``Trainer`` of transformers, and for Lightning."""

import sys
from contextlib import ExitStack
from typing import Any

from regard.errors import optional_module
from regard.tracing.tracer import is_compiled_module
from regard.training.monitor import Monitor

__all__ = ["lightning", "trainer"]


def trainer(monitor: Monitor) -> Any:
    """Return a callback for the ``Trainer`` of transformers.

    On a step that is due it observes the first forward pass of the model.

    Raises:
        RegardError: transformers is not installed.

    Example:
        >>> import torch, regard
        >>> monitor = regard.Monitor(torch.nn.Linear(1, 1))
        >>> type(regard.callbacks.trainer(monitor)).__name__
        'MonitorCallback'
    """
    transformers = optional_module(
        "transformers", "the callback needs transformers", "transformers"
    )
    base, block = transformers.TrainerCallback, ExitStack()

    def close(*called: Any) -> None:
        """Leave the block when the model has run; a hook gets None for an output if it failed."""
        failed = sys.exc_info() if called and called[-1] is None else (None, None, None)
        block.__exit__(*failed)

    class MonitorCallback(base):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not monitor.is_due(state.global_step):
                return
            block.enter_context(monitor(state.global_step))
            # A compiled call restores the modes of PyTorch when it returns, so that a hook inside
            # it cannot end the block. The block then ends after the backward pass.
            if not (args.torch_compile or is_compiled_module(monitor.model)):
                hook = monitor.model.register_forward_hook(close, always_call=True)
                block.callback(hook.remove)

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            close()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            close()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.close()

    return MonitorCallback()


def lightning(monitor: Monitor) -> Any:
    """Return a callback for the ``Trainer`` of Lightning.

    On a step that is due it observes what runs from the start of the batch to the backward pass.

    Raises:
        RegardError: Lightning is not installed.

    Example:
        >>> import torch, regard
        >>> monitor = regard.Monitor(torch.nn.Linear(1, 1))
        >>> callback = regard.callbacks.lightning(monitor)  # doctest: +SKIP
    """
    package = optional_module("lightning.pytorch", "the callback needs lightning", "lightning")
    base, block = package.Callback, ExitStack()

    class MonitorCallback(base):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            block.enter_context(monitor(trainer.global_step))

        def on_before_backward(self, *_: Any) -> None:
            block.close()

        def on_train_batch_end(self, *_: Any) -> None:
            block.close()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            block.__exit__(type(exception), exception, exception.__traceback__)

        def on_train_end(self, *_: Any) -> None:
            monitor.close()

    return MonitorCallback()
