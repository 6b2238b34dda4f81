"""The recorder of a model's attention, which keeps copies of query and key, or answers."""

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from regard.capture.distribution import GATHERED, Distribution, HeadRange
from regard.capture.generation import Call, Join, Run, Runs
from regard.capture.gradients import GraphTensors, is_checkpointed_without_graph
from regard.capture.merging import CallGroup, ReadValue, Values
from regard.capture.refusals import Problems
from regard.capture.selection import Selection
from regard.capture.slicing import some_heads, some_queries, unrepeated, value_heads
from regard.capture.tensor_copies import TensorCopies
from regard.errors import (
    RefusedWarning,
    RegardError,
    bytes_text,
    check_number,
    check_path,
    check_progress,
    is_sharded,
)
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.file_format import REFUSAL, about, plain_reduction
from regard.recording.file_reader import read
from regard.recording.file_writer import (
    check_replaceable,
    check_target,
    unwritable,
    write,
)
from regard.recording.layers import InMemory, Origin, Refusal, layer_at
from regard.recording.merged_calls import SPILLED
from regard.recording.recording import Recording
from regard.recording.spool import Spool, spool_of
from regard.scores.given_scores import GivenScores

_APART = "the calls of {} cannot be put together"
WITHOUT_NUMBERS = (
    "it ran on the meta device or in FakeTensorMode, whose tensors have no numbers.\n"
    "    Run the model on another device."
)
_CHECKPOINTED = (
    "it ran in a reentrant checkpoint, through which no gradient of a recording can flow.\n"
    "    Checkpoint with use_reentrant=False."
)
_UNMERGED = (
    "{} of several calls cannot be merged to one of all.\n"
    '    Observe with keep="qk", and ask the recording.'
)
_TOO_LARGE = (
    "its weights do not follow from a query and a key, so they would be kept; they take {}, beside "
    "{} of other layers, and max_weights is {:g} GiB.\n"
    "    Observe with keep=[...], heads=, layers=, path= or a larger max_weights=, or load the "
    'model with attn_implementation="sdpa".'
)
_WENT_BACK = (
    "did not go on from the end of the cache, as in beam search and assisted decoding, or after a "
    "cache was cut back, copied or used as a ring; what follows is recorded apart as '#2', '#3', "
    "..., and tokens that were taken back are among the rows.\n"
    "    Generate without beams and assistant to record one matrix for each layer."
)
_GUESSED = (
    "ended with a call that added several tokens to the cache; if they were guessed, as in "
    "assisted decoding and prompt lookup, the last rows may be of tokens that were taken back.\n"
    "    Generate without guesses, or let the model read the finished text."
)
_REFUSED = "the attention of {} cannot be kept"


class Recorder:
    """A recorder of the selected part of each attention.

    Attributes:
        selection: the selected part.
        without: the layers in which this process has none of the selected heads.
        problems: the reasons why parts of the selection are missing; complete after ``close``.
        graph: the tensors of the model that gradients flow to.
        progress_error: the exception that ``progress`` raised; it is not called again.

    Raises:
        TypeError: path is not a path, or progress cannot be called.
        ValueError: path is empty.
        RegardError: the file cannot be written.
    """

    def __init__(
        self,
        seen: Recording,
        selection: Selection | None = None,
        path: str | os.PathLike[str] | None = None,
        progress: Callable[[int], None] | None = None,
        distribution: Distribution | None = None,
        max_weights: float = 4.0,
    ) -> None:
        self._max_weights = check_number(
            "max_weights", max_weights, "Pass the GiB of weights that may be kept in memory."
        )
        self._kept: dict[str, int] = {}  # the bytes of weights by module
        check_progress(progress, "one number")
        self.problems = Problems()
        self.graph = GraphTensors()
        self._seen = seen
        self.selection = selection or Selection()
        self._path = None if path is None else check_path(path)
        if self._path is not None and seen.shard is not None:
            self._path = seen.shard.file(self._path)
        self._distribution = distribution
        self.without: dict[str, None] = {}
        self._spool = None if self._path is None else self._begun(self._path)
        self._tensor_copies = TensorCopies(self.selection.device, self._spool)
        self._indices: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}  # the names of the layers of each module
        self._refused: set[str] = set()
        self._progress = progress
        self.progress_error: Exception | None = None
        self._count = 0
        self._failure: OSError | None = None  # of the spool, after which nothing is recorded
        self._is_left = False  # by an exception
        self._runs = Runs()
        self._call_groups: dict[Run, CallGroup] = {}

    def _begun(self, path: Path) -> Spool:
        """Begin the spool of a file, after all checks."""
        for reduction in self.selection.reductions:
            plain_reduction(reduction)
        queries = self.selection.queries
        part = spool_of(check_target(path))
        check_replaceable(part)
        try:
            spool = Spool(part)
            spool.note({**about(self._seen), "queries": [queries.start, queries.stop]})
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise unwritable(path, error) from error
        return spool

    def record(
        self,
        name: str,
        matrix: AttentionMatrix,
        read_value: ReadValue | None = None,
        *,
        gradients: bool = False,
    ) -> None:
        """Record an attention that a module has just run, from the model's own tensors.

        ``read_value`` returns the model's value; None if each query has a value of its own. Calls
        of given weights or scores are merged by it. With ``gradients``, gradients flow through the
        recording to the model.

        Raises:
            ValueError: the attention lacks a selected head, or a reduction does not fit it.
        """
        self._count += 1
        self._record(name, matrix, read_value, gradients=gradients)
        self._report_progress()

    def reserve(self, name: str) -> None:
        """Count a module among the layers, in the order in which they run."""
        self._indices.setdefault(name, len(self._indices))

    def has(self, name: str) -> bool:
        """Return True if attention of a module is recorded."""
        return bool(self._names.get(name))

    def skips(self, name: str) -> bool:
        """Return True if an attention that a module has just run is not selected, and count it."""
        index = self._indices.setdefault(name, len(self._indices))
        if name not in self._refused and self.selection.has_layer(name, index):
            return False
        self._count += 1
        self._report_progress()
        return True

    def _report_progress(self) -> None:
        """Call ``progress``; store its first exception, which is no fault of the layer."""
        if self._progress is None or self.progress_error is not None:
            return
        try:
            self._progress(self._count)
        except Exception as error:  # noqa: BLE001  raised when the block ends
            self.progress_error = error

    def refuse(
        self, name: str, reason: str, line: str | None = None, cause: Exception | None = None
    ) -> None:
        """Remove all attention of a module from the recording, and record none of it later.

        If one call is missing, the others would look like a complete layer. The refusal of a layer
        that is not selected is ignored. Its exceptions are reported, because the module may contain
        a selected layer.
        """
        index = self._indices.setdefault(name, len(self._indices))
        if "meta tensor" in reason:  # a message of PyTorch
            reason = WITHOUT_NUMBERS
        if cause is not None or self.selection.has_layer(name, index):
            self.problems.add(_REFUSED, name, reason, cause)
            if name not in self._refused:
                self._seen.refused.append(Refusal(name, line, reason))
                self._note_refusal(name, self._seen.refused[-1])
        self._refused.add(name)
        self._kept.pop(name, None)
        for layer in self._names.pop(name, ()):
            self._seen.remove(layer)
        self._call_groups = {
            run: calls for run, calls in self._call_groups.items() if calls.module != name
        }

    def _note_refusal(self, module: str, refusal: Refusal) -> None:
        if self._spool is not None and self._failure is None:
            try:
                plain = REFUSAL.write(refusal, None, "")
                self._spool.note({"kind": "refused", "module": module, "refused": plain})
            except OSError as error:
                self._failure = error

    def _record(
        self, name: str, matrix: AttentionMatrix, read_value: ReadValue | None, *, gradients: bool
    ) -> None:
        index = self._indices.setdefault(name, len(self._indices))
        if self._failure is not None:
            return
        if any(map(is_sharded, matrix.source.tensors)):
            self.refuse(name, GATHERED)
            return
        if name in self._refused or not self.selection.has_layer(name, index):
            with torch.no_grad():
                value = None if read_value is None else read_value()
                self._runs.add(name, Call.of(matrix, value))
            return
        if any(map(has_no_numbers, matrix.source.tensors)):
            self.refuse(name, WITHOUT_NUMBERS)
            return
        # Files, copies on another device and answers hold no graph.
        numbers = self._path or self.selection.device or self.selection.reductions
        gradients = gradients and not numbers
        if not (gradients or numbers) and is_checkpointed_without_graph():
            self.refuse(name, _CHECKPOINTED)
            return
        # Copies are made outside inference mode, so that autograd can use them later.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            whole = unrepeated(matrix)
            chosen, numbers_of_heads = self._chosen_heads(name, whole)
            if chosen == []:
                self.without[name] = None
                return
            part = whole if chosen is None else some_heads(whole, chosen)

        def value_of_part() -> Tensor:
            with torch.set_grad_enabled(gradients):
                return value_heads(cast(ReadValue, read_value)(), whole, chosen)

        some_value = None if read_value is None else value_of_part
        with torch.inference_mode(False), torch.no_grad():
            is_part = self.selection.names is not None or numbers_of_heads is not None
            origin = Origin(index, numbers_of_heads) if is_part else None
            if (reason := self._too_large(name, part)) is not None:
                self.refuse(name, reason)
                return
            value = None if read_value is None else read_value()
            calls, join = self._group_of(name, Call.of(part, value), origin)
            try:
                self._add_call(calls, part, join, some_value, gradients=gradients)
            except OSError as error:
                self._failure = error

    def _too_large(self, name: str, part: AttentionMatrix) -> str | None:
        """Return why the weights of a call cannot be kept in memory; None if they can."""
        if self._path or self.selection.reductions or not isinstance(part.source, GivenScores):
            return None
        rows = self.selection.rows(0, part.shape[-2], all_there=True)
        size = part.source.values.nbytes * len(rows) // max(part.shape[-2], 1)
        kept = sum(self._kept.values())
        if kept + size > self._max_weights * 2**30:
            return _TOO_LARGE.format(bytes_text(size), bytes_text(kept), self._max_weights)
        self._kept[name] = self._kept.get(name, 0) + size
        return None

    def _chosen_heads(
        self, name: str, matrix: AttentionMatrix
    ) -> tuple[list[int] | None, tuple[int, ...] | None]:
        """Return the indices of the selected heads in this process, and in the whole model.

        They are None for all heads in their order.

        Raises:
            ValueError: the model lacks a selected head, or this process's heads are unknown.
        """
        num_heads = matrix.shape[-3] if len(matrix.shape) > 2 else 1
        heads = HeadRange(0, num_heads, num_heads)
        if self._distribution is not None:
            heads = self._distribution.heads(name, matrix)
        selected = self.selection.head_indices(heads.total)
        numbers = [head for head in selected if heads.first <= head < heads.first + heads.size]
        here = [head - heads.first for head in numbers]
        is_all, is_whole = here == [*range(num_heads)], numbers == [*range(heads.total)]
        return None if is_all else here, None if is_whole else tuple(numbers)

    def _show_graph(self, layer: str, part: AttentionMatrix) -> None:
        """Connect a layer, whose first call has just been added, to the model's graph."""
        with torch.enable_grad():
            rows = self.selection.rows(0, part.shape[-2], all_there=True)
            recorded = layer_at(self._seen.layers, layer)
            matrix = self.graph.matrix(recorded.whole(), some_queries(part, rows))
            self._seen.put(replace(recorded, matrix=InMemory(matrix)))

    def close(self) -> None:
        """Merge the calls of each layer and write the file; call this when the block has ended."""
        lost: list[str] = []
        with torch.inference_mode(False), torch.no_grad():
            spilled = [calls.module for calls in self._call_groups.values() if calls.spills]
            for name in dict.fromkeys(spilled):
                self.refuse(name, SPILLED)
            for run, calls in self._call_groups.items():
                try:
                    if run.parts > 1 and calls.name is not None:
                        lost += [repr(calls.name)] * self._has_graph(calls.name)
                        self._merge(calls, calls.name)
                except Exception as cause:  # noqa: BLE001  no fault of one layer loses the run
                    reason = f"{_reason(cause)}\n    Of this layer the first call alone is kept."
                    self.problems.add(_APART, calls.name or calls.module, reason, cause)
                if calls.name is not None and calls.values is not None:
                    self._put_value(calls.name, calls.values, calls.kv_len)
        self._call_groups.clear()
        if self._refused:
            self._number_layers()
        if lost:
            warnings.warn(
                f"no gradients flow through the recording of {', '.join(lost)}, because several "
                "calls are put together.\n"
                "    Generate under torch.no_grad(), or run the model once on the whole text.",
                stacklevel=5,
            )
        if self._seen.shard is not None:
            self._seen.shard = self._seen.shard._replace(without=tuple(self.without))
        if self._failure is None and self._has_selection() and not self._is_left:
            self._write()
        elif self._spool is not None:
            self._leave(self._spool)

    def _number_layers(self) -> None:
        """Store the index of each layer in the model; refused layers leave gaps in the order."""
        if any(len(names) > 1 for names in self._names.values()):
            return  # the calls of one module have one index
        for module, names in self._names.items():
            for name in names:
                layer = layer_at(self._seen.layers, name)
                origin = layer.origin or Origin(self._indices[module])
                self._seen.put(replace(layer, origin=origin))

    def _merge(self, calls: CallGroup, name: str) -> None:
        """Replace a layer by the merged layer of all calls, without answers that cannot merge."""
        layer = calls.layer()
        if layer is not None and (layer.matrix is not None or layer.answers):
            grids = layer_at(self._seen.layers, name).grids
            self._seen.put(replace(layer, name=name, grids=grids))
        elif layer is not None:
            self._names[calls.module].remove(name)
            self._seen.remove(name)
        if calls.unmerged:
            reason = _UNMERGED.format(", ".join(map(repr, calls.unmerged)))
            self.problems.add("{} lack answers", name, reason)

    def abandon(self, exception: BaseException) -> None:
        """Merge the calls, and write no file; call this if an exception ended the block."""
        self._is_left = True
        self.close()
        if self._spool is not None and self._seen.layers:
            exception.add_note(f"{self._spool.path} has what regard recorded before.")

    def _has_graph(self, layer: str) -> bool:
        matrix = layer_at(self._seen.layers, layer).matrix
        return matrix is not None and any(each.requires_grad for each in matrix().source.tensors)

    def warn(self, stacklevel: int) -> None:
        """Warn of all problems, and of layers whose calls could not be merged."""
        problem = self.problems.error()
        if problem is not None:
            category = RefusedWarning if self._seen.refused else UserWarning
            text = f"{problem}\n    seen.refused has every reason."
            warnings.warn(text, category, stacklevel=stacklevel + 1)
        went_back = [name for name in self._runs.broken if name in self._seen.shapes]
        guessed = [name for name in self._runs.guessed if name in self._seen.shapes]
        text, names = (_WENT_BACK, went_back) if went_back else (_GUESSED, guessed)
        if names:
            more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
            warnings.warn(f"{names[0]!r}{more} {text}", stacklevel=stacklevel + 1)

    def _put_value(self, name: str, values: Values, kv_len: int) -> None:
        value = values.merged(kv_len)
        if value is not None:
            if values.in_graph is not None and self._has_graph(name):
                with torch.enable_grad():
                    value = InMemory(self.graph.linked(value(), values.in_graph))
            layer = layer_at(self._seen.layers, name)
            self._seen.put(replace(layer, value=value))
        else:
            self.problems.add("the value of {} cannot be kept", name, str(values.trouble))

    def _group_of(
        self, name: str, call: Call, origin: Origin | None
    ) -> tuple[CallGroup, Join | None]:
        """Return the group of calls that a call continues, or begins, and its join there."""
        run, join = self._runs.add(name, call)
        if join is None:
            number, leading = len(self._call_groups), call.matrix.shape[:-2]
            self._call_groups[run] = CallGroup(
                number, name, run, self.selection, leading, self._tensor_copies, origin
            )
        return self._call_groups[run], join

    def _add_call(
        self,
        calls: CallGroup,
        part: AttentionMatrix,
        join: Join | None,
        read_value: ReadValue | None,
        *,
        gradients: bool,
    ) -> None:
        calls.add(part, join, read_value, gradients=gradients)
        layer = None if calls.name is not None else calls.layer()
        if layer is not None:
            calls.name = self._seen.append(layer)
            self._names.setdefault(layer.name, []).append(calls.name)
        if gradients and join is None and calls.name is not None:
            self._show_graph(calls.name, part)

    def _has_selection(self) -> bool:
        """Return True if all selected layers and queries ran; otherwise add a problem."""
        text = self.selection.missing(
            list(self._indices), any_kept=bool(self._seen.layers or self.problems or self.without)
        )
        if text is not None:
            self.problems.add_text(text)
        return text is None

    def _leave(self, spool: Spool) -> None:
        """Leave the spool as the file of the recording, or remove it if no layer is in it."""
        spool.end()
        if self._failure is None:
            if self._seen.layers and not self._is_left:
                self.problems.add_text(f"{spool.path} has what was recorded.")
        else:
            # The calls in memory may be ahead of the spool.
            for name in self._seen.shapes:
                self._seen.remove(name)
            for layer in read(cast(Path, spool.path)).layers:
                self._seen.put(layer)
            left = f"{spool.path} has what was finished until then"
            if not self._seen.layers:
                left = "nothing of it is left, and a file that was there is as it was"
            self.problems.add_text(
                f"{self._path} cannot be written: {self._failure.strerror}; {left}.\n"
                "    Observe again with a path where there is room, or keep less."
            )
        if not self._seen.layers:
            spool.remove()

    def _write(self) -> None:
        """Write the file, and let the recording read its tensors from it."""
        if self._spool is None or self._path is None:
            return
        if self._seen.layers or self.without:
            try:
                write(self._path, self._seen, self._spool)
            except Exception as cause:  # noqa: BLE001  the spool has all layers
                unwritten = f"{self._path} cannot be written: {_reason(cause)}"
                self.problems.add_text(
                    f"{cause if isinstance(cause, RegardError) else unwritten}\n"
                    f"    {self._spool.path} has what was recorded; load it with regard.load.",
                    cause,
                )
                self._spool.end()
                return
            for layer in read(self._path).layers:
                self._seen.put(layer)
        self._spool.remove()


def has_no_numbers(tensor: Tensor) -> bool:
    """Return True for a tensor of the meta device and for a FakeTensor, which names another one."""
    try:
        return tensor.untyped_storage().device.type == "meta"
    except (NotImplementedError, RuntimeError):  # a tensor without a storage, such as a sparse one
        return tensor.device.type == "meta"


def _reason(cause: Exception) -> str:
    return f"{type(cause).__name__}: {cause}"
