"""The recorder of the attention that a model runs: copies of query and key, or answers."""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.capture.call_group import Kept, queries_kept
from regard.capture.contractions import Mark
from regard.capture.generation import Run, Steps
from regard.capture.gradients import GraphTensors, is_checkpointed_without_graph
from regard.capture.layer_entries import Entries
from regard.capture.merged_answers import ask
from regard.capture.merging import Copies, Shared
from regard.capture.recorded_values import TakeValue, Values
from regard.capture.refusals import Problems
from regard.capture.selection import Selection
from regard.capture.slicing import some_heads, some_queries, unrepeated, value_heads
from regard.capture.tensor_copies import TensorCopies
from regard.capture.unseen_attention import compiled_error
from regard.errors import RegardError, check_path, check_progress
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.file_reader import read
from regard.recording.file_writer import Writer
from regard.recording.layers import InMemory, Origin, layer_at
from regard.recording.recording import Recording, Refusal
from regard.scores.query_key import QueryKeyScores

__all__ = ["Recorder"]

_APART = "the calls of {} cannot be put together"
_ON_META = (
    "it ran on the meta device, whose tensors have no numbers.\n"
    "    Run the model on another device."
)
_CHECKPOINTED = (
    "it ran in a reentrant checkpoint, through which no gradient of a recording can flow.\n"
    "    Checkpoint with use_reentrant=False."
)
_REFUSED = "the attention of {} cannot be kept"


class Recorder:
    """Keeps of each attention that it is given what is wanted.

    Args:
        seen: the recording that it fills.
        wanted: what to keep; all of query and key when left out.
        path: of a file to keep it in; in memory when left out.
        progress: called with how many attentions it was given, after each.

    Attributes:
        problems: why not all that was wanted is kept; all known when the keeper has been closed.
        gradients: whether the operation that is told of runs with gradients; whoever calls ``take``
            sets it.
        graph: the tensors that gradients flow through.

    Raises:
        TypeError: path is no path, or progress cannot be called.
        ValueError: path is empty.
        RegardError: no file can be written there.
    """

    def __init__(
        self,
        seen: Recording,
        wanted: Selection | None = None,
        path: str | os.PathLike[str] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        check_progress(progress, "one number")
        self.problems = Problems()
        self.gradients = False
        self.graph = GraphTensors()
        self._with_gradients = torch.is_grad_enabled()
        self._seen = seen
        self._wanted = wanted or Selection()
        self._path = None if path is None else check_path(path)
        self._writer = None if self._path is None else Writer(self._path)
        self._tensor_copies = TensorCopies(
            self._wanted.device, None if self._path is None else self._path.parent
        )
        self._shared = Shared()
        self._places: dict[str, int] = {}
        self._entries = Entries(seen)
        self._refused: set[str] = set()
        self._doubts: list[tuple[str, str, str | None, Mark]] = []
        self._progress = progress
        self._taken = 0
        self._gave_up = False
        self._steps = Steps()
        self._kept: dict[Run, Kept] = {}
        self._alone: list[tuple[str, Values, int]] = []

    def take(self, name: str, matrix: AttentionMatrix) -> TakeValue | None:
        """Keep an attention that a module has just run.

        Args:
            name: the module's.
            matrix: of the model's own tensors, which may change as soon as this returns.

        Returns:
            What its value is to be given to, the model's own tensor; None where it is not wanted.

        Raises:
            ValueError: it has no such heads, or a reduction does not fit it.
        """
        self._taken += 1
        take_value = self._keep(name, matrix)
        if self._progress is not None:
            self._progress(self._taken)
        return take_value

    def refuse(
        self, name: str, reason: str, line: str | None = None, cause: Exception | None = None
    ) -> None:
        """Keep nothing of what a module attended to, before and after; it is told in one error.

        What is left when one call is missing would look like the whole of it. Of a layer that is
        not wanted a fault alone is told: it may be of a part of one that is.

        Args:
            name: the module's.
            reason: why, with the remedy where there is one.
            line: where it ran, ``file:line``.
            cause: the exception behind it, a fault.
        """
        place = self._places.setdefault(name, len(self._places))
        if "meta tensor" in reason:  # in PyTorch's words
            reason = _ON_META
        if cause is not None or self._wanted.has_layer(name, place):
            self.problems.add(_REFUSED, name, reason, cause)
            if name not in self._refused:
                self._seen.refused.append(Refusal(name, line, reason))
        self._refused.add(name)
        self._entries.remove(name)
        self._kept = {run: kept for run, kept in self._kept.items() if kept.module != name}
        self._alone = [alone for alone in self._alone if alone[0] in self._seen]

    def refuse_compiled(self, name: str, what: str) -> None:
        """Note a compiled part of the model: what it runs is not recorded.

        Args:
            name: of the module.
            what: is compiled, ``"model has a compiled module at '0'"``.
        """
        reason = str(compiled_error(what))
        self.problems.add("{} is not looked into", name, reason)
        self._seen.refused.append(Refusal(name, None, reason))

    def doubt(self, name: str, reason: str, line: str | None, product: Mark) -> None:
        """Refuse what a module attended to, unless a product turns out to be kept by the end.

        Args:
            name: the module's.
            reason: as ``refuse`` takes it.
            line: likewise.
            product: whose own softmax may still meet a value.
        """
        self._places.setdefault(name, len(self._places))
        self._doubts.append((name, reason, line, product))

    def _keep(self, name: str, matrix: AttentionMatrix) -> TakeValue | None:
        place = self._places.setdefault(name, len(self._places))
        if self._gave_up:
            return None
        if name in self._refused or not self._wanted.has_layer(name, place):
            if isinstance(matrix.source, QueryKeyScores):
                with torch.no_grad():
                    self._steps.pass_by(name, matrix.source, matrix.mask)
            return None
        if matrix.device.type == "meta":
            self.refuse(name, _ON_META)
            return None
        # In files, elsewhere and in answers there are numbers alone.
        numbers = self._path or self._wanted.device or self._wanted.reductions
        gradients = self.gradients and not numbers
        if self._with_gradients and not (gradients or numbers) and is_checkpointed_without_graph():
            self.refuse(name, _CHECKPOINTED)
            return None
        # Outside inference mode, so that what is kept can meet autograd later.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            whole, heads = unrepeated(matrix), self._wanted.head_indices(matrix)
            part = whole if heads is None else some_heads(whole, heads)
        with torch.inference_mode(False), torch.no_grad():
            if self._wanted.names is not None or heads is not None:
                origin = Origin(place, None if heads is None else tuple(heads))
                self._entries.are_of(name, origin)
            try:
                if isinstance(part.source, QueryKeyScores):
                    values = self._take(name, part, part.source, gradients=gradients)
                else:
                    values = self._take_alone(name, part, gradients=gradients)
            except OSError as error:
                self._give_up(error)
                return None
        if values is None:
            return None
        group = whole.source.group if isinstance(whole.source, QueryKeyScores) else 1
        num_heads = whole.shape[-3] if whole.ndim > 2 else 1
        take = partial(self._take_value, values, num_heads, group, heads)
        return partial(take, gradients=gradients)

    def _show_graph(self, layer: str, part: AttentionMatrix) -> None:
        """Let gradients flow through a layer whose first call has just been added."""
        with torch.enable_grad():
            rows = self._wanted.rows(0, part.shape[-2], all_there=True)
            known = layer_at(self._seen.layers, layer)
            matrix = self.graph.matrix(known.whole(), some_queries(part, rows))
            self._seen.put(replace(known, matrix=InMemory(matrix)))

    def _take_value(
        self,
        values: Values,
        num_heads: int,
        group: int,
        heads: list[int] | None,
        value: Tensor,
        *,
        gradients: bool,
    ) -> None:
        """Keep the value of the call that was taken last; what is wrong with it is told later."""
        if self._gave_up:
            return
        with torch.inference_mode(False), torch.no_grad():
            try:
                values.add(value_heads(value, num_heads, group, heads))
                if gradients:
                    with torch.enable_grad():
                        values.in_graph = value_heads(value, num_heads, group, heads)
            except OSError as error:
                self._give_up(error)
            except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
                values.trouble = _reason(cause)

    def close(self) -> None:
        """Put together what belongs together: the block has ended."""
        for name, reason, line, product in self._doubts:
            if not product.met:
                self.refuse(name, reason, line)
        self._doubts.clear()
        lost: list[str] = []
        with torch.inference_mode(False), torch.no_grad():
            for run, kept in self._kept.items():
                try:
                    if run.parts > 1 and kept.name is not None:
                        lost += [repr(kept.name)] * self._has_graph(kept.name)
                    kept.put_together()
                except Exception as cause:  # noqa: BLE001  no fault of one layer loses the run
                    reason = f"{_reason(cause)}\n    Of this layer the first call alone is kept."
                    self.problems.add(_APART, kept.name or kept.module, reason, cause)
                if kept.name is not None and kept.values is not None:
                    self._put_value(kept.name, kept.values, run.kv_len)
            for alone in self._alone:
                self._put_value(*alone)
        self._kept.clear()
        self._alone.clear()
        if lost:
            warnings.warn(
                f"no gradients flow through the recording of {', '.join(lost)}, because several "
                "calls are put together.\n"
                "    Generate under torch.no_grad(), or run the model once on the whole text.",
                stacklevel=5,
            )
        complete = not self._gave_up and self._has_wanted()
        if self._writer is not None and complete and self._seen.layers:
            self._write(self._writer)
        elif self._writer is not None:
            self._writer.abandon()

    def abandon(self) -> None:
        """Put together what there is, and write no file: the block was left by an exception."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self.close()

    def _has_graph(self, layer: str) -> bool:
        matrix = layer_at(self._seen.layers, layer).matrix
        return matrix is not None and any(each.requires_grad for each in matrix().source.tensors)

    def warn(self, stacklevel: int) -> None:
        """Warn of layers whose calls could not be followed: they stand apart, in pieces."""
        names = [name for name in self._steps.fell_apart if name in self._seen.shapes]
        if names:
            more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
            warnings.warn(
                f"{names[0]!r}{more} did not go on from the end of the cache, as in assisted "
                "decoding, after a cache was cut back or copied, and in beams of a sliding window; "
                "what follows stands apart as '#2', '#3', ..., and tokens that were taken back are "
                "among the rows.\n"
                "    Generate without assistant and beams to record one matrix for each layer.",
                stacklevel=stacklevel + 1,
            )

    def _put_value(self, name: str, values: Values, kv_len: int) -> None:
        value = values.whole(kv_len)
        if value is not None:
            if values.in_graph is not None and self._has_graph(name):
                with torch.enable_grad():
                    value = self.graph.linked(value, values.in_graph)
            layer = layer_at(self._seen.layers, name)
            self._seen.put(replace(layer, value=InMemory(value)))
        else:
            self.problems.add("the value of {} cannot be kept", name, str(values.trouble))

    def _take_alone(self, name: str, part: AttentionMatrix, *, gradients: bool) -> Values | None:
        """Keep an attention of which only the scores are known; no other call goes on from it."""
        rows, values = self._wanted.rows(0, part.shape[-2], all_there=True), self._values()
        if not rows:
            return None
        queries, part = queries_kept(rows, part.shape[-2]), some_queries(part, rows)
        if self._wanted.reductions:
            pairs = ask(part, self._wanted.reductions, self._wanted.device)
            self._entries.add(name, None, answers=pairs, shape=part.shape, queries=queries)
            return None
        mask = None if part.mask is None else part.mask.map(self._tensor_copies.copy_once)
        matrix = AttentionMatrix(part.source.map(self._tensor_copies.copy), mask)
        name = self._entries.add(name, matrix, shape=matrix.shape, queries=queries)
        if gradients:
            self._show_graph(name, part)
        if values is not None:
            values.expect(None, matrix.shape)
            self._alone.append((name, values, matrix.shape[-1]))
        return values

    def _values(self) -> Values | None:
        return Values(self._tensor_copies) if self._wanted.values else None

    def _take(
        self, name: str, part: AttentionMatrix, source: QueryKeyScores, *, gradients: bool
    ) -> Values | None:
        asking, q_len = bool(self._wanted.reductions), part.shape[-2]
        # Where no keys are kept, those of one head tell which calls belong together.
        if asking and source.key.ndim > 2:
            source = replace(source, key=source.key[..., :1, :, :])
        found = self._steps.follow(name, source, part.mask)
        if found is None:
            copied = self._tensor_copies.copy(source.key)
            run = self._steps.begin(name, source, part.mask, copied)
            copies = None if asking else Copies(run, self._tensor_copies, self._shared)
            kept = Kept(
                name, run, self._wanted, self._entries, part.shape[:-2], copies, self._values()
            )
            self._kept[run], first, base, place = kept, 0, 0, None
        else:
            run, place = found
            kept, first, base = self._kept[run], run.q_len, place.base
            run.extend(place, source.key, q_len, self._tensor_copies.empty)
        if kept.values is not None:
            kept.values.expect(place, part.shape)
        kept.take(part, first, base)
        kept.show_first()
        if gradients and found is None and kept.name is not None:
            self._show_graph(kept.name, part)
        return kept.values

    def _has_wanted(self) -> bool:
        """Return True if the layers and queries that were wanted ran; what did not is a problem."""
        text = self._wanted.missing(
            list(self._places), any_kept=bool(self._seen.layers or self.problems)
        )
        if text is not None:
            self.problems.add_text(text)
        return text is None

    def _give_up(self, error: OSError) -> None:
        """Keep nothing more: the disk is full. The model runs on."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._gave_up = True
        self.problems.add_text(
            f"{self._path} cannot be written: {error.strerror}; nothing of it is left, "
            "and a file that was there is as it was.\n"
            "    Observe again with a path where there is room, or keep less."
        )

    def _write(self, writer: Writer) -> None:
        """Write the file, and let the recording read it from there."""
        try:
            for layer in self._seen.layers:
                writer.add(layer)
            seen = self._seen
            tokens = seen.query_tokens, seen.key_tokens
            writer.finish(model=seen.model, query_tokens=tokens[0], key_tokens=tokens[1])
            for layer in read(writer.path).layers:
                self._seen.put(layer)
        except RegardError as error:
            writer.abandon()
            self.problems.add_text(str(error), error)
        except Exception as cause:  # noqa: BLE001  what was seen stays in the recording
            writer.abandon()
            self.problems.add_text(
                f"{writer.path} cannot be written: {_reason(cause)}\n"
                "    The recording itself is whole; keep what you need of it.",
                cause,
            )


def _reason(cause: Exception) -> str:
    return f"{type(cause).__name__}: {cause}"
