"""What the storages of a running model hold, as far as attention is concerned; known weakly.

A storage holds scores, or their exponentials, or weights, whatever views there are of it. A product
holds its query and key until its scores are gone: another softmax may be taken of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.capture.contractions import Mark, Product
from regard.capture.element_axes import Axes, Numbers
from regard.capture.score_chain import Step
from regard.capture.value_axes import Meeting
from regard.matrix.attention_matrix import AttentionMatrix

__all__ = [
    "Chosen",
    "Drawn",
    "Exponentials",
    "Finding",
    "Lost",
    "Noise",
    "Outcome",
    "Part",
    "Parts",
    "Scores",
    "Stage",
    "Totals",
    "Track",
    "Tracks",
    "Weights",
    "modules_of",
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
class Outcome:
    """What has become of the weights of one softmax, whatever was made of them.

    Attributes:
        met: whether they have met a value, as they were.
        shown: a bit for each key that has met a value where not all have in one product.
        emptied: the rows of the matrix that were made 0 as a whole; None: none.
        is_taken: whether its attention was taken, with those rows: they stay.
    """

    met: bool = False
    shown: int = 0
    emptied: Tensor | None = None
    is_taken: bool = False


@dataclass(eq=False, slots=True)
class Finding:
    """An attention that was found, until it is taken; its weights may be masked once more."""

    name: str
    matrix: AttentionMatrix
    meeting: Meeting | None = None
    outcome: Outcome = field(default_factory=Outcome)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a softmax gave.

    Attributes:
        normal: how far one step goes along the axis whose sums are 1; 0 where it has size 1.
        length: of that axis.
        name: of the module whose attention they are.
        line: where it was taken, ``file:line``.
        trouble: why its attention cannot be told; None where it was found.
        powers: the scores whose exponentials they are but for a factor a row, and their axes in the
            product; None where nobody knows.
        finding: their attention.
        short: whether rows sum to less than 1, as a sink has taken its share.
        meeting: with their value; None where nobody can tell which value is whose.
        thinned: whether chance has made some of them 0, and nothing has scaled the others up yet.
        outcome: of all that was made of this softmax.
        origin: the mark of the product, and where in it the softmax starts; None where nobody
            knows.
        pooled: the mark of the product of which more or fewer scores were made before the softmax;
            None where they were none, or as many.
        emptied: the rows of the matrix that were made 0 as a whole since; None: none.
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
    outcome: Outcome = field(default_factory=Outcome)
    origin: tuple[Mark, int] | None = None
    pooled: Mark | None = None
    emptied: Tensor | None = None

    def settle(self) -> bool:
        """Whether their attention is taken, or was, with the rows that they have by now."""
        if not self.outcome.is_taken:
            self.outcome.emptied = self.emptied
        taken, own = self.outcome.emptied, self.emptied
        return taken is own or (taken is not None and own is not None and torch.equal(taken, own))

    def meet(self) -> None:
        """Note that they have met a value, as they were."""
        self.outcome.met = True
        if self.origin is not None:
            self.origin[0].met = True


@dataclass(frozen=True, slots=True)
class Lost:
    """Scores that went through something unknown.

    Attributes:
        through: what it was, with its line.
        modules: the names of those that ran their product.
        pooled: the mark of that product where they have become more or fewer; None where not.
    """

    through: str
    modules: tuple[str, ...] = ()
    pooled: Mark | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some of the scores along an axis, those with the largest values or at given places.

    Attributes:
        scores: from which they were chosen.
        axes: of all of them.
        index: where they were, as ``gather`` takes it.
        dim: the axis.
        through: what chose them, with its line.
    """

    scores: Scores
    axes: Axes
    index: Tensor
    dim: int
    through: str


@dataclass(frozen=True, slots=True)
class Noise:
    """What chance has drawn, 0 or another number: a factor of dropout."""


@dataclass(frozen=True, slots=True)
class Part:
    """Scores or weights in a part of a storage."""

    axes: Axes
    stage: "Scores | Exponentials | Weights"


class Parts:
    """What lies in several parts of a storage, as a loop over rows puts it there.

    Args:
        storage: a tensor in it.
        through: what put the first part there, with its line.

    Attributes:
        whole: the scores that all parts are together, and their axes; None while nobody has asked.
    """

    def __init__(self, storage: Tensor, through: str) -> None:
        self.through = through
        self.whole: tuple[Scores, Axes] | None = None
        self._parts: dict[tuple[Numbers, Numbers, int], Part] = {}
        length = storage.untyped_storage().nbytes() // storage.element_size()
        self._taken = torch.zeros(length, dtype=torch.bool, device="cpu")
        self._largest = 0

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    @property
    def weights(self) -> Weights | None:
        """The weights in its first part; None where that holds scores."""
        first = next(iter(self)).stage
        return first if isinstance(first, Weights) else None

    def add(self, part: Part) -> None:
        """Note one more part, or that one holds something else from now on."""
        place = (part.axes.sizes, part.axes.strides, part.axes.offset)
        here = self._taken.as_strided(*place)
        if place not in self._parts and bool(here.any()):
            self._parts = {key: each for key, each in self._parts.items() if not _meet(key, place)}
        here.fill_(True)
        self._parts[place] = part
        self._largest = max(self._largest, here.numel())
        self.whole = None

    def change(self, axes: Axes, stage: "Stage") -> bool:
        """Note what a part holds from now on; False where these are no part's axes.

        Args:
            axes: of the part.
            stage: what it holds.
        """
        known = (axes.sizes, axes.strides, axes.offset) in self._parts
        if known and isinstance(stage, Scores | Exponentials | Weights):
            self.add(Part(axes, stage))
            return True
        return False

    def around(self, view: Tensor) -> Part | None:
        """The part in which a view of the storage lies as a whole; None where it does in none."""
        if not 0 < view.numel() <= self._largest:
            return None
        return next((part for part in self if part.axes.seen_as(view) is not None), None)

    def are_in(self, view: Tensor) -> bool:
        """Whether a view of the storage shows anything of a part."""
        seen = self._taken.as_strided(view.shape, view.stride(), view.storage_offset())
        return bool(seen.any())


def _meet(one: tuple[Numbers, Numbers, int], other: tuple[Numbers, Numbers, int]) -> bool:
    """Whether two views of one storage, (sizes, strides, offset), have a number in common."""
    stops = [
        1 + first + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        for sizes, strides, first in (one, other)
    ]
    marks = torch.zeros(max(stops), dtype=torch.bool, device="cpu")
    marks.as_strided(*one).fill_(True)
    return bool(marks.as_strided(*other).any())


Stage: TypeAlias = Scores | Exponentials | Totals | Drawn | Weights | Lost | Chosen | Noise | Parts


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

    Attributes:
        has_parts: whether a storage may hold several of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = _parameters_of(model)
        self._strangers: set[int | None] = {None}
        self._copies: dict[int, StorageWeakRef] = {}
        self._room = 64
        self._tracks: dict[int, Track] = {}
        self._spent: list[Product] = []
        self.has_parts = False

    def __bool__(self) -> bool:
        return bool(self._tracks)

    def of(self, tensor: object) -> Track | None:
        """What the storage of a tensor holds; None where it is nothing of interest."""
        track = self.held_by(tensor)
        if track is None or not isinstance(track.stage, Parts):
            return track
        parts = track.stage
        part = parts.around(cast(Tensor, tensor))
        if part is not None:
            return Track(track.storage, part.axes, part.stage)
        if parts.whole is not None:
            return Track(track.storage, parts.whole[1], parts.whole[0])
        return track

    def held_by(self, tensor: object) -> Track | None:
        """What the storage of a tensor holds as a whole, in one part or in several."""
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
        held = None if axes is None else self.held_by(tensor)
        parts = None if held is None else held.stage
        if axes is not None and isinstance(parts, Parts) and parts.change(axes, stage):
            return
        if storage_key(tensor) is not None:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._tracks[reference.cdata] = Track(reference, axes, stage)
            self.has_parts |= isinstance(stage, Parts)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter of the model, or a view or a noted copy of one."""
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

    def note_copy(self, parameter: Tensor) -> None:
        """Note a copy of a parameter, as autocast makes them."""
        if not self.is_parameter(parameter):
            reference = StorageWeakRef(parameter.untyped_storage())
            self._copies[reference.cdata] = reference

    def spend(self, product: Product) -> None:
        """Note that a softmax has been taken of a product: its exponentials have served."""
        self._spent.append(product)

    def forget(self) -> None:
        """Let go of what nobody can use any more."""
        if self._tracks:
            self._tracks = {
                key: _without_product(track)
                for key, track in self._tracks.items()
                if not (track.storage.expired() or self._is_spent(track.stage))
            }
            self._spent.clear()
            self.has_parts &= any(isinstance(t.stage, Parts) for t in self._tracks.values())
        if len(self._copies) > self._room:
            copies = self._copies.items()
            self._copies = {key: copy for key, copy in copies if not copy.expired()}
            self._room = 2 * len(self._copies) + 64

    def drop(self, tensor: Tensor) -> None:
        """Note that the storage of a tensor holds nothing of interest any more."""
        self._tracks.pop(cast(int, storage_key(tensor)), None)

    def _is_spent(self, stage: Stage) -> bool:
        if not isinstance(stage, Exponentials | Totals):
            return False
        return any(stage.scores.product is one for one in self._spent)


def _parameters_of(model: nn.Module) -> set[int | None]:
    """The storages of a model's parameters."""
    return {storage_key(parameter) for parameter in model.parameters()} - {None}


def _without_product(track: Track) -> Track:
    """Weights that have outlived what they were made for know their query and key no more."""
    weights = track.stage
    if not isinstance(weights, Weights) or (weights.powers is None and weights.finding is None):
        return track
    return replace(track, stage=replace(weights, powers=None, finding=None))


def modules_of(stage: Stage | None) -> tuple[str, ...]:
    """The names of the modules that were running as the product of some scores was taken."""
    match stage:
        case Scores(product=product):
            return product.modules
        case Exponentials(scores=scores) | Totals(scores=scores) | Drawn(scores=scores):
            return scores.product.modules
        case Chosen(scores=scores):
            return scores.product.modules
        case Lost(modules=modules):
            return modules
        case _:
            return ()


def storage_key(tensor: Tensor) -> int | None:
    """The storage that a tensor lies in; None where it has none of its own."""
    try:
        return cast(int, cast(Any, tensor.untyped_storage())._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # the last: of a lazy module's own
        return None
