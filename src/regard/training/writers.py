"""Writers of a monitor's numbers: TensorBoard, Weights & Biases and MLflow.

A writer is a function of the step and a mapping from names, such as ``attention/entropy/L05H03``,
to numbers.
"""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from regard.errors import check_path, kind_text, optional_module

__all__ = ["mlflow", "tensorboard", "wandb"]

_Writer = Callable[[int, Mapping[str, float]], None]
_MOST_METRICS = 1000  # of one request to MLflow


def tensorboard(path: str | PathLike[str]) -> _Writer:
    """Return a writer of event files for TensorBoard.

    Args:
        path: their folder.

    Raises:
        RegardError: tensorboard is not installed.

    Example:
        >>> import regard
        >>> write = regard.writers.tensorboard("logs")  # doctest: +SKIP
    """
    events = optional_module(
        "torch.utils.tensorboard", "writers.tensorboard() needs tensorboard", "tensorboard"
    ).SummaryWriter(check_path(path))

    def write_tensorboard(step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            events.add_scalar(name, number, step)
        events.flush()

    return write_tensorboard


def wandb(run: Any) -> _Writer:
    """Return a writer to a run of Weights & Biases; its x axis is ``attention/step``.

    Args:
        run: from ``wandb.init``.

    Raises:
        TypeError: it is no run.

    Example:
        >>> import regard
        >>> write = regard.writers.wandb(wandb.init(mode="offline"))  # doctest: +SKIP
    """
    if not hasattr(run, "define_metric"):
        raise TypeError(
            f"run is {kind_text(run)}; it must be a run of Weights & Biases.\n"
            "    Pass wandb.init(), or wandb.init(mode='offline')."
        )
    # The run may count its steps in another way, so the monitor's steps are a metric.
    run.define_metric("attention/*", step_metric="attention/step")

    def write_wandb(step: int, numbers: Mapping[str, float]) -> None:
        run.log({**numbers, "attention/step": step})

    return write_wandb


def mlflow() -> _Writer:
    """Return a writer to the active run of MLflow.

    Raises:
        RegardError: mlflow is not installed.

    Example:
        >>> import regard
        >>> write = regard.writers.mlflow()  # doctest: +SKIP
    """
    client = optional_module("mlflow", "writers.mlflow() needs mlflow", "mlflow")

    def write_mlflow(step: int, numbers: Mapping[str, float]) -> None:
        items = list(numbers.items())
        for start in range(0, len(items), _MOST_METRICS):
            client.log_metrics(dict(items[start : start + _MOST_METRICS]), step=step)

    return write_mlflow
