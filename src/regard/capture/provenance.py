"""Provenance of a model's tensors: which storages hold scores, exponentials or weights.

Tracking is by storage, so all views of a storage are in the same stage. Storages are referenced
weakly. A product of query and key is kept alive until its scores are freed, because another softmax
may use them.

``MergeOrder`` tracks which storages hold heads before the batch in one axis.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes
from regard.capture.matrix_axes import WeightAxes
from regard.capture.proof import Sample
from regard.capture.score_chain import Step
from regard.matrix.attention_matrix import AttentionMatrix
from regard.tracing.tracer import Operation

__all__ = [
    "Attention",
    "Exponentials",
    "Lost",
    "MergeOrder",
    "Noise",
    "Provenance",
    "RowSums",
    "Scores",
    "Stage",
    "Track",
    "Weights",
    "storage_key",
]


@dataclass(frozen=True, slots=True)
class Scores:
    """The product of two activations, and the steps applied to it."""

    product: Product
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Exponentials:
    """The exponentials of scores."""

    scores: Scores


@dataclass(frozen=True, slots=True)
class RowSums:
    """The sums of exponentials along one axis; ``dim`` is negative, counted from the last axis."""

    scores: Scores
    dim: int


@dataclass(eq=False, slots=True)
class Attention:
    """The state of one softmax and its weights.

    Attributes:
        name: the name of the module that ran the attention; None outside the model.
        line: the location of the softmax, ``file:line``.
        place: the stride of the softmax's axis in its contiguous output; 0 for an axis of size 1.
        length: the size of that axis.
        trouble: the reason why it cannot be recorded, found at the softmax; None without one.
        matrix: the matrix of the model's own tensors; None once it is recorded or refused.
        changed: a sentence about the first operation that changed the weights; None without one.
        empty_rows: True for rows of the matrix that were 0 when they met the first value,
            (..., num_heads, q_len, 1); None without such rows.
        is_outer: True if head_dim is 1, as in products of positions and frequencies. If such a
            product is no attention, it is ignored without an error.
    """

    name: str | None
    line: str
    place: int
    length: int
    trouble: str | None = None
    matrix: AttentionMatrix | None = None
    weight_axes: WeightAxes | None = None
    sample: Sample | None = None
    changed: str | None = None
    empty_rows: Tensor | None = None
    is_outer: bool = False
    is_recorded: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """All or some weights of an attention.

    A cast gave them the relative error ``rounding``. ``may_have_empty_rows`` is True if an
    operation has set whole rows to 0.
    """

    attention: Attention
    rounding: float = 0.0
    is_dropped: bool = False
    may_have_empty_rows: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Scores after an operation that an AttentionMatrix cannot represent.

    ``through`` is its name with ``file:line``; ``modules`` were running at the product.
    """

    through: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers, from which dropout can be computed."""


Stage: TypeAlias = Scores | Exponentials | RowSums | Weights | Lost | Noise


@dataclass(frozen=True, slots=True)
class Track:
    """A tracked storage, with its axes in the product and its stage."""

    storage: StorageWeakRef
    axes: Axes | None
    stage: Stage

    def lies_in(self, tensor: object) -> bool:
        """Return True if a tensor is a view of this storage."""
        return isinstance(tensor, Tensor) and storage_key(tensor) == cast(int, self.storage.cdata)

    def of_view(self, tensor: Tensor) -> Axes | None:
        """Return the axes of a view of this storage; None if they cannot be determined."""
        return None if self.axes is None else self.axes.of_view(tensor)


class Provenance:
    """The tracked storages of a running model, whose parameters do not count as activations."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = _parameters_of(model)
        self._strangers: set[int | None] = {None}
        self._copies: dict[int, StorageWeakRef] = {}
        self._room = 64
        self._tracks: dict[int, Track] = {}

    def __bool__(self) -> bool:
        return bool(self._tracks)

    def __iter__(self) -> Iterator[Track]:
        return iter(self._tracks.values())

    def of(self, tensor: object) -> Track | None:
        """Return the track of a tensor's storage; None if it is not tracked."""
        if not self._tracks or not isinstance(tensor, Tensor):
            return None
        return self._tracks.get(cast(int, storage_key(tensor)))

    def stage_of(self, tensor: object) -> Stage | None:
        """Return the stage of a tensor's storage; None if it is not tracked."""
        track = self.of(tensor)
        return None if track is None else track.stage

    def put(self, tensor: object, axes: Axes | None, stage: Stage) -> None:
        """Set the axes and the stage of a tensor's storage."""
        if isinstance(tensor, Tensor) and storage_key(tensor) is not None:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._tracks[reference.cdata] = Track(reference, axes, stage)

    def drop(self, tensor: Tensor) -> None:
        """Stop tracking the storage of a tensor."""
        self._tracks.pop(cast(int, storage_key(tensor)), None)

    def forget(self) -> None:
        """Remove the tracks of storages that were freed."""
        if self._tracks:
            self._tracks = {
                key: track
                for key, track in self._tracks.items()
                if not cast(bool, track.storage.expired())
            }
        if len(self._copies) > self._room:
            copies = self._copies.items()
            self._copies = {key: copy for key, copy in copies if not copy.expired()}
            self._room = 2 * len(self._copies) + 64

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return True for a parameter of the model, a view of one, or a recorded copy of one."""
        key = storage_key(tensor)
        if key in self._parameters or key in self._copies:
            return True
        base = tensor._base  # pyright: ignore[reportPrivateUsage]
        if key in self._strangers or not any(isinstance(t, nn.Parameter) for t in (tensor, base)):
            return False
        # The model may have registered it after the block began.
        self._parameters = _parameters_of(self._model)
        if key not in self._parameters:
            self._strangers.add(key)
        return key in self._parameters

    def note_copy(self, parameter: object) -> None:
        """Record a copy of a parameter, such as a cast by autocast."""
        if isinstance(parameter, Tensor) and not self.is_parameter(parameter):
            reference = StorageWeakRef(parameter.untyped_storage())
            self._copies[reference.cdata] = reference


def _parameters_of(model: nn.Module) -> set[int | None]:
    """Return the storage keys of a model's parameters."""
    return {storage_key(parameter) for parameter in model.parameters()} - {None}


def storage_key(tensor: Tensor) -> int | None:
    """Return the key of a tensor's storage; None if the tensor has no storage."""
    try:
        return cast(int, cast(Any, tensor.untyped_storage())._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # ValueError: a lazy parameter
        return None


class MergeOrder:
    """The storages that a copy or a concatenation filled with heads before the batch.

    The shape (batch * num_heads, tokens, head_dim) does not show whether batch or heads come first.
    Heads come first in two cases. The heads were concatenated along the first axis. Or the model
    copied a transposed tensor, whose second axis has the larger stride.
    """

    def __init__(self) -> None:
        # The storage, the size of its merged axis, and head_dim.
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._room = 64

    def note_join(self, operation: Operation) -> None:
        """Record the output if several tensors were concatenated along the first axis."""
        if operation.func not in _ALONG:
            return
        tensors = cast("list[Tensor]", operation.args[0])
        dim = operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else 0)
        output = operation.output
        if dim == 0 and len(tensors) > 1 and output.ndim in (3, 4):
            self._note(output, output.shape[:-2].numel(), output.shape[-1])

    def note_copy(self, operation: Operation) -> None:
        """Record the output if the copied tensor has its first two axes transposed."""
        source = operation.args[0]
        if source.layout != torch.strided or source.ndim != 4 or source.is_nested:
            return
        (batch, heads), (further, near) = source.shape[:2], source.stride()[:2]
        if min(batch, heads) > 1 and 0 < further < near:
            self._note(operation.output, batch * heads, source.shape[-1])

    def is_heads_first(self, product: Product) -> bool:
        """Return True if the query or key of a product may have heads before the batch."""
        for factor in (product.left, product.right):
            known = self._storages.get(storage_key(factor) or 0)
            if known is not None and known[1:] == (factor.shape[0], factor.shape[-1]):
                return True
        return False

    def _note(self, tensor: object, merged: int, width: int) -> None:
        if not isinstance(tensor, Tensor) or storage_key(tensor) is None:
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        self._storages[reference.cdata] = (reference, merged, width)
        if len(self._storages) > self._room:
            alive = self._storages.items()
            self._storages = {key: each for key, each in alive if not each[0].expired()}
            self._room = 2 * len(self._storages) + 64


_ALONG = (torch.ops.aten.stack.default, torch.ops.aten.cat.default)
