"""What the storages of a running model hold, as far as attention is concerned; known weakly.

A storage holds scores, or their exponentials, or weights, whatever views there are of it. A product
holds its query and key until its scores are gone, or until the next product after their softmax.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.capture.axes import Axes
from regard.capture.contractions import Product
from regard.capture.meetings import Meeting
from regard.capture.score_steps import Step
from regard.matrix import AttentionMatrix

__all__ = [
    "Chosen",
    "Drawn",
    "Exponentials",
    "Finding",
    "Lost",
    "Noise",
    "Scores",
    "Stage",
    "Totals",
    "Track",
    "Tracks",
    "Weights",
    "storage_key",
]


@dataclass(frozen=True, slots=True)
class Scores:
    """A product of two activations, and what was done to it."""

    product: Product
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Exponentials:
    """exp(scores)."""

    scores: Scores


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of exponentials along one axis.

    Attributes:
        scores: whose exponentials they are.
        axes: of the exponentials.
        dim: the axis, counted from the last.
        kept: whether it stays, with size 1.
        beside: what was added to the sums.
    """

    scores: Scores
    axes: Axes
    dim: int
    kept: bool
    beside: tuple[Tensor | float, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A product of exponentials and value, to be divided by their sums along an axis.

    Attributes:
        scores: whose exponentials they are.
        axes: of the exponentials.
        dim: the axis, counted from the last.
    """

    scores: Scores
    axes: Axes
    dim: int


@dataclass(eq=False, slots=True)
class Finding:
    """An attention that was found, until it is taken; its weights may be masked once more."""

    name: str
    matrix: AttentionMatrix
    meeting: Meeting | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """What a softmax gave.

    Attributes:
        normal: how far one step goes along the axis whose sums are 1; 0 where it has size 1.
        length: of that axis.
        name: of the module that took the softmax.
        line: the user's own.
        trouble: why its attention cannot be told; None where it was found.
        powers: the scores whose exponentials they are but for a factor a row, and their axes in the
            product; None where nobody knows.
        finding: their attention.
        short: whether rows sum to less than 1, as a sink has taken its share.
        meeting: with their value; None where nobody can tell which value is whose.
        thinned: whether chance has made some of them 0, and nothing has scaled the others up yet.
    """

    normal: int
    length: int
    name: str | None
    line: str
    trouble: str | None
    powers: tuple[Scores, Axes] | None = None
    finding: Finding | None = None
    short: bool = False
    meeting: Meeting | None = None
    thinned: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Scores that went through something unknown.

    Attributes:
        through: what it was, with the user's own line.
    """

    through: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some of the scores along an axis, those with the largest values or at given places.

    Attributes:
        scores: from which they were chosen.
        axes: of all of them.
        index: where they were, as ``gather`` takes it.
        dim: the axis.
        through: what chose them, with the user's own line.
    """

    scores: Scores
    axes: Axes
    index: Tensor
    dim: int
    through: str


@dataclass(frozen=True, slots=True)
class Noise:
    """What chance has drawn, 0 or another number: a factor of dropout."""


Stage: TypeAlias = Scores | Exponentials | Totals | Drawn | Weights | Lost | Chosen | Noise


@dataclass(frozen=True, slots=True)
class Track:
    """What one storage holds."""

    storage: StorageWeakRef
    axes: Axes | None
    stage: Stage

    def lies_in(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of this storage."""
        return storage_key(tensor) == cast(int, self.storage.cdata)


class Tracks:
    """What is known of the storages that are alive.

    Args:
        model: whose parameters are no activations.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {storage_key(parameter) for parameter in model.parameters()} - {None}
        self._copies: dict[int, StorageWeakRef] = {}
        self._room = 64
        self._tracks: dict[int, Track] = {}
        self._spent: list[Product] = []

    def __bool__(self) -> bool:
        return bool(self._tracks)

    def of(self, tensor: object) -> Track | None:
        """What the storage of a tensor holds; None where it is nothing of interest."""
        if not self._tracks or not isinstance(tensor, Tensor):
            return None
        return self._tracks.get(cast(int, storage_key(tensor)))

    def stage_of(self, tensor: object) -> Stage | None:
        """What the storage of a tensor holds, without where it lies."""
        track = self.of(tensor)
        return None if track is None else track.stage

    def scores_of(self, tensor: object) -> Scores | None:
        """The scores that the storage of a tensor holds; None where it holds none."""
        stage = self.stage_of(tensor)
        return stage if isinstance(stage, Scores) else None

    def powers_of(self, tensor: Tensor) -> tuple[Scores, Axes] | None:
        """The scores whose exponentials a tensor holds, and its axes in the product."""
        track = self.of(tensor)
        if track is None:
            return None
        powers = None
        if isinstance(track.stage, Exponentials) and track.axes is not None:
            powers = (track.stage.scores, track.axes)
        elif isinstance(track.stage, Weights):
            powers = track.stage.powers
        axes = None if powers is None else powers[1].seen_as(tensor)
        return None if powers is None or axes is None else (powers[0], axes)

    def put(self, tensor: Tensor, axes: Axes | None, stage: Stage) -> None:
        """Note what the storage of a tensor holds from now on."""
        if storage_key(tensor) is not None:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._tracks[reference.cdata] = Track(reference, axes, stage)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter of the model, or a view or a noted copy of one."""
        key = storage_key(tensor)
        return key in self._parameters or key in self._copies

    def note_copy(self, parameter: Tensor) -> None:
        """Note a copy of a parameter, as autocast makes them."""
        if not self.is_parameter(parameter):
            reference = StorageWeakRef(parameter.untyped_storage())
            self._copies[reference.cdata] = reference

    def spend(self, product: Product) -> None:
        """Note that a softmax has been taken of a product."""
        self._spent.append(product)

    def forget(self) -> None:
        """Let go of what nobody can use any more."""
        if self._tracks:
            self._tracks = {
                key: self._without_product(track)
                for key, track in self._tracks.items()
                if not (track.storage.expired() or self._is_spent(track.stage))
            }
            self._spent.clear()
        if len(self._copies) > self._room:
            copies = self._copies.items()
            self._copies = {key: copy for key, copy in copies if not copy.expired()}
            self._room = 2 * len(self._copies) + 64

    def drop(self, tensor: Tensor) -> None:
        """Note that the storage of a tensor holds nothing of interest any more."""
        self._tracks.pop(cast(int, storage_key(tensor)), None)

    def _is_spent(self, stage: Stage) -> bool:
        if isinstance(stage, Exponentials | Totals | Chosen):
            stage = stage.scores
        return isinstance(stage, Scores) and any(stage.product is one for one in self._spent)

    def _without_product(self, track: Track) -> Track:
        """Weights that have outlived what they were made for know their query and key no more."""
        if not isinstance(track.stage, Weights) or not self._spent:
            return track
        return replace(track, stage=replace(track.stage, powers=None, finding=None))


def storage_key(tensor: Tensor) -> int | None:
    """The storage that a tensor lies in; None where it has none of its own."""
    try:
        return cast(int, cast(Any, tensor.untyped_storage())._cdata)
    except (NotImplementedError, RuntimeError):
        return None
