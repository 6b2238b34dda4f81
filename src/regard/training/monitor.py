"""`Monitor`: statistics of every head of a model while it trains."""

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast, final

import torch.distributed as dist
from torch import nn

from regard.capture.observer import observe
from regard.errors import (
    RefusedWarning,
    RegardError,
    check_count,
    check_path,
    check_whole,
    kind_text,
)
from regard.recording.recording import Recording
from regard.training.alarms import Alarm, Alert, are_not_finite, is_dead
from regard.training.row_numbers import STATISTICS, Samples, samples_of
from regard.training.run_table import SHOWN, RunTable, made_folder
from regard.training.summaries import Key, Summary, are_several, layer_indices, summarize

Writer = Callable[[int, Mapping[str, float]], object]
Then = Literal["warn", "raise"] | Callable[[list[Alert]], object]


@final
class Monitor:
    """Statistics of every head of a model on the steps of a training that are due.

    Call it with the step around the forward pass. On a step that is due, the first forward pass is
    observed: it runs eagerly, and its output keeps every bit unless the model is compiled. Nothing
    is added to the model on other steps. With torch.distributed, make a monitor in every process,
    and call all of them; the statistics then cover the rows and heads of all processes, and the
    first process writes.

    Args:
        model: the module to observe.
        path: the folder of the table; ``docs/training.md`` describes it. None writes no table.
        every: a step is due if it is a multiple of this number.
        statistics: the names of the statistics; all by default.
        rows: only the last ``rows`` queries of each sequence are observed; all by default.
        alarm: an alarm of ``regard.alarms``, or several.
        then: if alarms fire: "warn", "raise", or a function that gets the list of alerts.
        save: a folder; if alarms fire, it gets a recording of the batch, without layers that have
            NaN or an infinity.
        writers: functions of ``regard.writers``, or your own, that get the step and the numbers.

    Attributes:
        model: the observed module.
        latest: the summaries of the last observed step, by layer and statistic.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a statistic is unknown, an alarm needs one that is left out, or there is no
            alarm for ``then`` and ``save``.
        RegardError: a folder cannot be written, or another monitor writes to it.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = regard.nn.SelfAttention(8, 2)
        >>> with regard.Monitor(model, every=10) as monitor:
        ...     for step in range(20):
        ...         with monitor(step):
        ...             loss = model(torch.zeros(1, 4, 8)).sum()
        ...         loss.backward()
        >>> monitor.latest["SelfAttention", "normalized_entropy"].mean
        tensor([1., 1.], dtype=torch.float64)
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | PathLike[str] | None = None,
        *,
        every: int = 100,
        statistics: Sequence[str] = STATISTICS,
        rows: int | None = None,
        alarm: Alarm | Sequence[Alarm] = (),
        then: Then = "warn",
        save: str | PathLike[str] | None = None,
        writers: Iterable[Writer] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is {kind_text(model)}; it must be a torch.nn.Module.\n"
                "    Pass the module whose forward runs the attention."
            )
        self.model, self.latest = model, dict[Key, Summary]()
        self._every = check_count("every", every)
        self._statistics = _checked_statistics(statistics)
        self._queries = None if rows is None else slice(-check_count("rows", rows), None)
        self._alarms = _checked_alarms(alarm, self._statistics)
        self._then = _checked_then(then)
        self._save = None if save is None else made_folder(check_path(save), "save")
        if not self._alarms and (save is not None or then != "warn"):
            raise ValueError(
                "then and save need an alarm, and alarm is empty.\n"
                "    Pass for example alarm=regard.alarms.max_score(100)."
            )
        self._writers, self._failed = _checked_writers(writers), set[str]()
        self._last: int | None = None
        self._path, self._rows = None if path is None else check_path(path), rows
        self._table: RunTable | None = None
        # A launcher such as Lightning's may start the process group after this.
        if are_several() or "LOCAL_RANK" not in os.environ:
            self._open_table()

    def __call__(self, step: int) -> AbstractContextManager[None]:
        """Return a block for the forward pass of a step; it is observed if the step is due.

        If a step has several forward passes, as in gradient accumulation, the first one is
        observed.

        Raises:
            TypeError: step is not a whole number.
            ValueError: step is below 0.
        """
        if not self.is_due(step):
            return nullcontext()
        self._last = step
        return self._observed(step)

    def is_due(self, step: int) -> bool:
        """Return True if the next forward pass of a step is to be observed.

        Raises:
            TypeError: step is not a whole number.
            ValueError: step is below 0.
        """
        if check_whole("step", step) < 0:
            raise ValueError(f"step is {step}; it must be at least 0.\n    Count steps from 0.")
        return step % self._every == 0 and step != self._last

    def __enter__(self) -> "Monitor":
        """Return the monitor."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the monitor."""
        self.close()
        if kind is None and self._last is None:
            warnings.warn(
                "the monitor observed no step.\n    Write with monitor(step): around the forward "
                "pass of each step.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Let another monitor write to the folder."""
        if self._table is not None:
            self._table.close()

    @property
    def _is_writer(self) -> bool:
        return not are_several() or dist.get_rank() == 0

    def _open_table(self) -> None:
        if self._table is None and self._path is not None and self._is_writer:
            self._table = RunTable(self._path, self._rows)

    @contextmanager
    def _observed(self, step: int) -> Generator[None, None, None]:
        """Observe the block. Only errors of the block itself and of alarms are raised."""
        weight = next(self.model.parameters(), None)
        # With a device, the recording has no part in the graph of the model.
        device = None if weight is None else weight.device
        block = observe(self.model, queries=self._queries, device=device, compiled="eager")
        seen = block.__enter__()
        try:
            yield
        except BaseException:
            with suppress(RegardError):
                block.__exit__(*sys.exc_info())
            raise
        problem: RegardError | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                block.__exit__(None, None, None)
            except RegardError as error:
                problem = error
        for each in caught:
            self._warn_once(str(each.message), each.category)
        if problem is not None:
            self._warn_once(f"a step was not observed: {problem}", RefusedWarning)
        self._read(step, seen)

    def _read(self, step: int, seen: Recording) -> None:
        """Compute the statistics of a recording, and pass them on."""
        samples: dict[str, tuple[Sequence[int], Samples]] = {}
        for layer in seen.layers:
            of_layer = self._try(f"layer {layer.name!r}", samples_of, layer, self._statistics)
            if of_layer is not None:
                heads = [layer.head(head) for head in range(of_layer.rows.shape[-1])]
                samples[layer.name] = heads, of_layer
        self.latest = summarize(samples)
        if not self.latest:
            return
        self._open_table()
        if self._table is not None:
            self._table.check(step, self.latest)
            place = f"writing a step to {self._table.folder}"
            self._try(place, self._table.write, step, self.latest)
        if self._is_writer and self._writers:
            numbers = _named_numbers(self.latest)
            for writer in self._writers:
                name = getattr(writer, "__qualname__", type(writer).__qualname__)
                self._try(f"the writer {name}", writer, step, numbers)
        alerts = [alert for alarm in self._alarms for alert in alarm.alerts(step, self.latest)]
        if alerts:
            self._alert(alerts, seen)

    def _alert(self, alerts: list[Alert], seen: Recording) -> None:
        """Save the recording of a step whose alarms fired, and call, warn or raise."""
        if self._save is not None:
            place = f"saving the batch to {self._save}"
            self._try(place, _save_finite, seen, self._save, alerts[0].step, self.latest)
        rest = len(alerts) - 1
        heads = "1 more head" if rest == 1 else f"{rest} more heads"
        more = f"\n    {heads} fired an alarm." if rest else ""
        if callable(self._then):
            self._then(alerts)
        elif self._then == "raise":
            raise RegardError(f"{alerts[0]}.{more}")
        elif self._is_writer:
            warnings.warn(f"{alerts[0]}.{more}", stacklevel=6)

    def _try(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; its first failure is a warning, because the training must go on."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  a writer may raise anything
            text = f"{what} failed: {type(error).__name__}: {error}"
            self._warn_once(text, UserWarning, cause=what)

    def _warn_once(self, text: str, category: type[Warning], *, cause: str | None = None) -> None:
        """Warn of a cause that was not warned of before; the text when left out."""
        if (cause or text) not in self._failed:
            self._failed.add(cause or text)
            warnings.warn(text, category, stacklevel=6)


def _save_finite(
    seen: Recording, folder: Path, step: int, summaries: Mapping[Key, Summary]
) -> None:
    """Save the layers whose numbers are finite; a file of a recording holds no NaN."""
    lost = {name for (name, _), each in summaries.items() if bool(are_not_finite(each).any())}
    finite = [layer.name for layer in seen.layers if layer.name not in lost]
    if not finite:
        raise RegardError("every layer has NaN or infinity, and a file holds numbers.")
    # The processes of a distributed run save their parts into one folder.
    name = f"step-{step:09}" + (".safetensors" if seen.shard is None else "")
    (seen.part(finite) if lost else seen).save(folder / name)


def _named_numbers(summaries: Mapping[Key, Summary]) -> dict[str, float]:
    """Return one number for each statistic and head, with names that sort."""
    layers = layer_indices(summaries)
    width = max(2, len(str(len(layers) - 1)))
    digits = max(2, len(str(max(max(each.heads) for each in summaries.values()))))
    numbers: dict[str, float] = {}
    for (name, statistic), summary in summaries.items():
        layer = f"L{layers[name]:0{width}}"
        values = getattr(summary, SHOWN[statistic]).tolist()
        for head, value in zip(summary.heads, values, strict=True):
            numbers[f"attention/{statistic}/{layer}H{head:0{digits}}"] = value
        if statistic == "normalized_entropy":
            numbers[f"attention/dead_heads/{layer}"] = float(
                is_dead(summary.p10, summary.p90).sum()
            )
    return numbers


def _checked_statistics(statistics: Any) -> tuple[str, ...]:
    names_text = f"The names are {', '.join(map(repr, STATISTICS))}."
    if isinstance(statistics, str) or not isinstance(statistics, Iterable):
        raise TypeError(
            f"statistics is {kind_text(cast(object, statistics))}; it must be a list of names.\n"
            f"    {names_text}"
        )
    names = tuple(cast("Iterable[Any]", statistics))
    for name in names:
        if name not in STATISTICS:
            raise ValueError(f"statistics has {name!r}, which is not known.\n    {names_text}")
    if not names:
        raise ValueError(f"statistics is empty; it must be a list of names.\n    {names_text}")
    return tuple(dict.fromkeys(names))


def _checked_alarms(alarm: Any, statistics: Sequence[str]) -> tuple[Alarm, ...]:
    given = cast("Sequence[Any]", alarm if isinstance(alarm, Sequence) else (alarm,))
    alarms = tuple(given)
    for each in alarms:
        if not isinstance(each, Alarm):
            raise TypeError(
                f"alarm is {kind_text(each)}; it must be an alarm.\n"
                "    Pass for example alarm=regard.alarms.max_score(100)."
            )
        if each.statistic not in ("", *statistics):
            raise ValueError(
                f"an alarm needs {each.statistic!r}, which is not among the statistics.\n"
                "    Add it to statistics, or leave statistics out."
            )
    return alarms


def _checked_writers(writers: Any) -> list[Writer]:
    is_one = callable(writers) or not isinstance(writers, Iterable)
    given: list[Any] = [writers] if is_one else [*cast("Iterable[Any]", writers)]
    for each in given:
        if not callable(each):
            raise TypeError(
                f"writers has {kind_text(each)}; it must be functions of the step and the numbers."
                '\n    Pass for example writers=[regard.writers.tensorboard("logs")].'
            )
    return given


def _checked_then(then: Any) -> Then:
    if then in ("warn", "raise") or callable(then):
        return then
    raise ValueError(
        f"then is {then!r}; it must be 'warn', 'raise' or a function.\n"
        "    A function gets the list of alerts of one step."
    )
