"""The one place that tracks where tensors come from: which storages hold scores or weights.

A storage holds scores, their exponentials or weights, whatever views there are of it. Storages are
known weakly. A product of query and key is held until its scores are gone, because another softmax
may be taken of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.capture.contractions import Product
from regard.capture.element_axes import Axes
from regard.capture.proof import Sample
from regard.capture.score_chain import Step
from regard.capture.value_axes import Meeting
from regard.matrix.attention_matrix import AttentionMatrix

__all__ = [
    "Attention",
    "Exponentials",
    "Lost",
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
    """A product of two activations, and the steps since."""

    product: Product
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Exponentials:
    """exp(scores)."""

    scores: Scores


@dataclass(frozen=True, slots=True)
class RowSums:
    """The sums of exponentials along one axis, counted from the last."""

    scores: Scores
    dim: int


@dataclass(eq=False, slots=True)
class Attention:
    """One softmax and what has become of its weights.

    Attributes:
        name: the module whose attention it is; None outside the model.
        line: where the softmax was taken, ``file:line``.
        place: how far one step along the softmax's axis goes in its output; 0 where it has size 1.
        length: of that axis.
        trouble: why it cannot be recorded, known at the softmax.
        matrix: of the model's own tensors, until it is recorded.
        meeting: which axes of a value are whose; None where nobody can tell.
        sample: rows of its scores and weights.
        changed: the first operation that made something else of its weights, in a sentence.
        emptied: the rows of the matrix that were made 0 as a whole when they met the value.
        is_outer: whether the vectors have one number, as positions and frequencies do; what is no
            attention then is ignored.
        is_recorded: whether all weights have met a value.
        is_refused: whether it was refused.
    """

    name: str | None
    line: str
    place: int
    length: int
    trouble: str | None = None
    matrix: AttentionMatrix | None = None
    meeting: Meeting | None = None
    sample: Sample | None = None
    changed: str | None = None
    emptied: Tensor | None = None
    is_outer: bool = False
    is_recorded: bool = False
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of an attention, or some of them.

    Attributes:
        attention: whose they are.
        is_dropped: whether dropout has made some of them 0.
        rounding: the largest relative error of a cast.
        emptied: the rows of the matrix that were made 0 as a whole.
    """

    attention: Attention
    rounding: float = 0.0
    is_dropped: bool = False
    emptied: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Scores that went through an operation that has no place in a matrix.

    Attributes:
        through: the operation, with its line.
        modules: the names of those that ran the product.
    """

    through: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers of which dropout is made."""


Stage: TypeAlias = Scores | Exponentials | RowSums | Weights | Lost | Noise


@dataclass(frozen=True, slots=True)
class Track:
    """The stage that one storage holds."""

    storage: StorageWeakRef
    axes: Axes | None
    stage: Stage

    def lies_in(self, tensor: object) -> bool:
        """Return True if a tensor is a view of this storage."""
        return isinstance(tensor, Tensor) and storage_key(tensor) == cast(int, self.storage.cdata)

    def seen_as(self, tensor: Tensor) -> Axes | None:
        """Return the axes of a view; None where nobody can tell."""
        return None if self.axes is None else self.axes.seen_as(tensor)


class Provenance:
    """The stages that the storages of a running model hold.

    Args:
        model: whose parameters are no activations.
    """

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
        """Return what the storage of a tensor holds; None if it is nothing of interest."""
        if not self._tracks or not isinstance(tensor, Tensor):
            return None
        return self._tracks.get(cast(int, storage_key(tensor)))

    def stage_of(self, tensor: object) -> Stage | None:
        """Return what the storage of a tensor holds, without where it lies."""
        track = self.of(tensor)
        return None if track is None else track.stage

    def put(self, tensor: object, axes: Axes | None, stage: Stage) -> None:
        """Note what the storage of a tensor holds from now on."""
        if isinstance(tensor, Tensor) and storage_key(tensor) is not None:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._tracks[reference.cdata] = Track(reference, axes, stage)

    def drop(self, tensor: Tensor) -> None:
        """Note that the storage of a tensor holds nothing of interest any more."""
        self._tracks.pop(cast(int, storage_key(tensor)), None)

    def forget(self) -> None:
        """Let go of storages that are gone."""
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
        """Return True for a parameter of the model, and for a view or a noted copy of one."""
        key = storage_key(tensor)
        if key in self._parameters or key in self._copies:
            return True
        base = tensor._base  # pyright: ignore[reportPrivateUsage]
        if key in self._strangers or not any(isinstance(t, nn.Parameter) for t in (tensor, base)):
            return False
        # The model may have got it while it runs.
        self._parameters = _parameters_of(self._model)
        if key not in self._parameters:
            self._strangers.add(key)
        return key in self._parameters

    def note_copy(self, parameter: object) -> None:
        """Note a copy of a parameter, as autocast makes them."""
        if isinstance(parameter, Tensor) and not self.is_parameter(parameter):
            reference = StorageWeakRef(parameter.untyped_storage())
            self._copies[reference.cdata] = reference


def _parameters_of(model: nn.Module) -> set[int | None]:
    """Return the storages of a model's parameters."""
    return {storage_key(parameter) for parameter in model.parameters()} - {None}


def storage_key(tensor: Tensor) -> int | None:
    """Return the storage that a tensor lies in; None where it has none of its own."""
    try:
        return cast(int, cast(Any, tensor.untyped_storage())._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # the last: of a lazy module's own
        return None
