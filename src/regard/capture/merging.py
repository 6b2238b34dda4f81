"""Merging of the calls that form one attention into one layer of the recording.

A group of calls has copies of its queries, masks and biases, or answers. With a spool, each call is
appended to it, so that what was finished can be loaded after a crash. Values are merged in the same
way as keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.capture.generation import Join, Run
from regard.capture.selection import Selection
from regard.capture.slicing import some_queries
from regard.capture.tensor_copies import TensorCopies
from regard.errors import RegardError
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.file_format import ORIGIN, Plain, plain_answers, plain_matrix
from regard.recording.file_writer import check_numbers
from regard.recording.layers import InMemory, Layer, Lazy, Origin, asked_of
from regard.recording.merged_calls import (
    CallAnswers,
    Calls,
    Columns,
    Extent,
    SpooledColumns,
)
from regard.recording.spool import Piece, Spool
from regard.reductions.reduction import Reduction
from regard.reductions.sums import Sum
from regard.reductions.top_k import Top
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores

ReadValue = Callable[[], Tensor]
"""A function that returns the value tensor of a call."""

_NEVER_SEEN = (
    "each of its queries has a value of its own, so that no value belongs to a key.\n"
    '    Write it as weights @ value over the keys, or observe with keep="qk".'
)
_UNFIT = 'its value has shape {}; its matrix has {}.\n    Observe with keep="qk".'


class Values:
    """The value of one attention, merged over its calls in the same way as its keys.

    ``trouble`` is the reason why it cannot be recorded; None without one. ``in_graph`` is the value
    of the last call as a part of autograd's graph; None without gradients.
    """

    def __init__(self, tensor_copies: TensorCopies) -> None:
        self.trouble: str | None = None
        self.in_graph: Tensor | None = None
        self._tensor_copies = tensor_copies
        self._columns: Columns | None = None

    def add(
        self, read: ReadValue | None, join: Join | None, shape: torch.Size, *, gradients: bool
    ) -> list[int] | None:
        """Copy the value of a call, where it joins its run.

        ``read`` returns it, (..., num_kv_heads, kv_len, head_dim); None if no value belongs to a
        key. ``shape`` is that of its matrix. Return the first new column and the number of its
        piece in the spool, without either if no columns are new; None if there is trouble.

        Raises:
            OSError: the disk is full.
        """
        if self.trouble is None and read is None:
            self.trouble = _NEVER_SEEN
        if self.trouble is not None or read is None:
            return None
        try:
            value = read()
            if not _fits(value, shape):
                raise RegardError(_UNFIT.format(tuple(value.shape), tuple(shape)))
            self.in_graph = value if gradients else None
            # All entries of a batch may share one value.
            value = value.detach().expand(*shape[:-3], *value.shape[-3:])
            self._columns = _with_new(self._columns, value, join, self._tensor_copies)
            return _noted(self._columns, join)
        except OSError:
            raise
        except Exception as cause:  # noqa: BLE001  the model's own run is never stopped
            name = "" if isinstance(cause, RegardError) else f"{type(cause).__name__}: "
            self.trouble = f"{name}{cause}"
            return None

    def merged(self, kv_len: int) -> Callable[[], Tensor] | None:
        """Return a function that returns the merged value, (..., num_kv_heads, kv_len, head_dim).

        If the result is None, ``trouble`` is the reason.
        """
        if self.trouble is not None or (columns := self._columns) is None:
            return None
        # The buffer may have room for keys that were never added.
        read = Lazy(lambda: columns.read(0, kv_len).contiguous())
        return read if isinstance(columns, SpooledColumns) else InMemory(read())


def _with_new(
    columns: Columns | None, tensor: Tensor, join: Join | None, copies: TensorCopies
) -> Columns:
    """Return columns with the new ones of a call, where it joins its run."""
    if columns is None or join is None:
        return copies.columns(tensor)
    if join.shared < join.stop:
        columns.append(join.base + join.shared, tensor[..., join.shared : join.stop, :])
    return columns


def _noted(columns: Columns, join: Join | None) -> list[int]:
    """Return the first new column of a call and its piece in the spool; neither without any."""
    if not isinstance(columns, SpooledColumns) or (join and join.shared == join.stop):
        return []
    first, piece = cast("tuple[int, Piece]", columns.latest)
    return [first, piece.number]


def _fits(value: Tensor, shape: torch.Size) -> bool:
    """Return True if a value has one vector per key, and num_kv_heads divides num_heads."""
    if value.ndim != len(shape) or value.shape[-2] != shape[-1]:
        return False
    batches = zip(value.shape[:-3], shape[:-3], strict=True)
    return all(n in (1, m) for n, m in batches) and (
        len(shape) == 2 or shape[-3] % value.shape[-3] == 0
    )


class CallGroup:
    """The recorded part of a run: copies of its queries and masks, or answers.

    Attributes:
        module: the name of the module.
        values: the value; None if it is not recorded.
        name: the name of the layer in the recording, which the recorder sets; None until a
            selected query has run.

    Args:
        number: the number of groups before this one.
        module: the name of the module.
        run: the calls, with their keys.
        selection: the queries or reductions to record.
        leading: the sizes of the batch axes and of the axis of heads.
        copies: the maker of copies.
        origin: the position in the model; None if all layers and heads are recorded.
    """

    def __init__(
        self,
        number: int,
        module: str,
        run: Run,
        selection: Selection,
        leading: torch.Size,
        copies: TensorCopies,
        origin: Origin | None,
    ) -> None:
        self.module = module
        self.values = Values(copies) if selection.values else None
        self.name: str | None = None
        self._number = number
        self._run = run
        self._selection = selection
        self._leading = leading
        self._copies = copies
        self._origin = origin
        asks = selection.reductions
        self._answers = CallAnswers(asks, selection.queries) if asks else None
        self._keys: Columns | None = None
        self._calls = None if asks else Calls(self._read_keys, copies.copy_once, copies.device)
        self._noted_keys = 0

    def add(
        self,
        matrix: AttentionMatrix,
        join: Join | None,
        read_value: ReadValue | None,
        *,
        gradients: bool,
    ) -> None:
        """Record the selected queries of a call, where it joins its run: copies, or answers.

        ``read_value`` returns the value of the call; None if no value belongs to a key.

        Raises:
            OSError: the disk is full.
            RegardError: a file cannot have this call.
        """
        first, base = self._run.q_len - matrix.shape[-2], 0 if join is None else join.base
        # If no call can continue the run, the first call has all of its queries.
        all_there = self._calls is None or self._run.traits is None
        there = self._selection.rows(first, matrix.shape[-2], all_there=all_there)
        part, first = some_queries(matrix, there) if there else None, first + there.start
        if self._answers is not None:
            if part is None:
                self._answers.skip()
            else:
                answers = asked_of(part, self._selection.reductions)
                answers = [_at(each, self._copies.device) for each in answers]
                self._answers.add(answers, range(first, first + len(there)), base)
                self._note_answers(answers, part, first, join)
            return
        query = None
        if part is not None:
            query = self._copies.copy(_rows_of(part))
            cast(Calls, self._calls).add(part, first, base, query)
        value = None
        key = _key_of(matrix, has_weights=self._copies.spool is not None)
        if key is not None:
            self._keys = _with_new(self._keys, key, join, self._copies)
        if self.values is not None:
            value = self.values.add(read_value, join, matrix.shape, gradients=gradients)
        if self._copies.spool is not None:
            self._note_call(matrix, part, query, value, join, first)

    def _read_keys(self, start: int, stop: int) -> Tensor:
        return cast(Columns, self._keys).read(start, stop)

    @property
    def kv_len(self) -> int:
        """The number of keys; for one call with the room of a cache that is not filled."""
        return self._run.keys.length if self._run.parts == 1 else self._run.kv_len

    @property
    def spills(self) -> bool:
        """True if rows attend to slots of a cache that no call has filled."""
        run = self._run
        return self._answers is None and run.parts > 1 and run.reach > run.kv_len

    def layer(self) -> Layer | None:
        """Return the layer of all calls so far; None if none of their queries is selected.

        The layer lacks the answers of reductions in ``unmerged``.
        """
        extent = Extent(self.kv_len, self._run.start, self._run.q_len)
        if self._answers is not None:
            layer = self._answers.layer(self.module, extent, self._leading)
        else:
            rows = self._selection.rows(0, extent.ran, all_there=True)
            layer = cast(Calls, self._calls).layer(self.module, extent, rows)
            if layer is not None and self._copies.spool is None:
                layer = replace(layer, matrix=InMemory(layer.whole()))
        return None if layer is None else replace(layer, origin=self._origin)

    @property
    def unmerged(self) -> list[Reduction]:
        """The reductions whose answers of several calls cannot be merged."""
        return [] if self._answers is None else self._answers.unmerged

    def _note_call(
        self,
        matrix: AttentionMatrix,
        part: AttentionMatrix | None,
        query: Callable[[], Tensor] | None,
        value: list[int] | None,
        join: Join | None,
        first: int,
    ) -> None:
        """Append the plain data of a call to the spool, after its keys, its query and its value."""
        spool = cast(Spool, self._copies.spool)
        keys = _noted(cast(Columns, self._keys), join) or None
        if keys and isinstance(matrix.source, QueryKeyScores):
            key = matrix.source.key
            check_numbers("key", key if join is None else key[..., join.shared : join.stop, :])

        def put(role: str, tensor: Tensor) -> str | int:
            if role == "key":
                return role
            check_numbers(role, tensor)
            if role in ("query", "values"):
                return cast(Piece, query).number
            return spool.append(tensor, once=True).number

        plain = None if part is None else plain_matrix(part, put)
        columns = matrix.shape[-1]
        self._note("call", first, join, keys=keys, value=value, columns=columns, matrix=plain)

    def _note_answers(
        self, answers: Sequence[Any], part: AttentionMatrix, first: int, join: Join | None
    ) -> None:
        """Append the answers of a call to the spool.

        A total is as long as all keys. If each call wrote it, the spool would grow with the square
        of the text, so it is written when the keys have grown by an eighth.
        """
        if (spool := self._copies.spool) is None:
            return
        asked, merged = self._selection.reductions, cast(CallAnswers, self._answers)
        is_due = 8 * self.kv_len >= 9 * self._noted_keys
        self._noted_keys = self.kv_len if is_due else self._noted_keys
        pairs = [
            (each, (merged.totals[at] if is_due else None) if each == Sum(-2) else answer)
            for at, (each, answer) in enumerate(zip(asked, answers, strict=True))
        ]

        def put(role: str, tensor: Tensor) -> int:
            check_numbers(role, tensor)
            return spool.append(tensor).number

        plain = plain_answers(pairs, put)
        self._note("answers", first, join, shape=list(part.shape), answers=plain)

    def _note(self, kind: str, first: int, join: Join | None, **more: Any) -> None:
        about: Plain = {
            "kind": kind,
            "run": self._number,
            "module": self.module,
            "origin": ORIGIN.write(self._origin, None, ""),
            "first": first,
            "base": 0 if join is None else join.base,
            "start": self._run.start,
            "ran": self._run.q_len,
            "kv_len": self.kv_len,
            "spills": self.spills,
        }
        cast(Spool, self._copies.spool).note({**about, **more})


def _key_of(matrix: AttentionMatrix, *, has_weights: bool) -> Tensor | None:
    """Return the key of a matrix; of given weights zeros with its columns, or None."""
    if isinstance(matrix.source, QueryKeyScores):
        return matrix.source.key
    return torch.zeros(matrix.shape[-1], 1, device="cpu") if has_weights else None


def _rows_of(part: AttentionMatrix) -> Tensor:
    """Return the query of a matrix, or the weights of which it was made."""
    source = part.source
    given = isinstance(source, GivenScores)
    return source.values if given else cast(QueryKeyScores, source).query


def _at(answer: Any, device: torch.device | None) -> Any:
    """Move an answer to the device if it is a tensor or a Top; return others unchanged."""
    if isinstance(answer, Tensor):
        return answer.detach().to(device)
    if isinstance(answer, Top):
        return Top(_at(answer.values, device), _at(answer.indices, device))
    return answer
