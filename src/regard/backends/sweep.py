"""The sweep over blocks of complete rows: any reduction, any device, plain PyTorch.

Each thread holds a few blocks of 2^20 scores, or of 32 rows, whatever the length of the sequence; a
GPU holds a few of 2^25.
The backward pass computes each block again and differentiates it by itself.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, islice
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from regard.backends.backend import Backend, Between, nothing
from regard.backends.parallel import map_in_order
from regard.backends.recomputed import recomputed
from regard.errors import count_text
from regard.masks import Mask
from regard.reductions.block import Block, RowStatistics
from regard.reductions.reduction import Contribution, Reduction, contributions, rounded
from regard.scores.autocast import without_autocast
from regard.scores.box import Box, Cut, Index, as_slice, broadcast_index, cut_whole, length
from regard.scores.score_source import Scores, accumulation_dtype

# A block and its few temporaries should stay in the cache, and have enough rows for a fast matrix
# product.
BLOCK_SIZE = 2**20
MIN_ROWS, MAX_ROWS = 32, 128
# On a GPU a block should take longer than the CPU takes to queue its operations.
GPU_BLOCK_SIZE, GPU_MAX_ROWS = 2**25, 512
# Tensors of the size of a block: scores, weights, a bias or a mask, a temporary of the reduction.
BLOCKS_HELD = 4
_NO_GRAPH = "regard sweeps over blocks beside the graph"


@final
class Sweep(Backend):
    """Every reduction, in one sweep over blocks of rows."""

    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        of = SweepTask(source, mask, tuple(reductions), PlainBlocks())
        block = of.block_size * accumulation_dtype(source.dtype).itemsize
        return f"one sweep over {of.blocks_text}", of.memory(BLOCKS_HELD * block)

    def reduce(
        self,
        source: Scores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between = nothing,
    ) -> tuple[Any, ...]:
        return sweep(SweepTask(source, mask, tuple(reductions), PlainBlocks()), between)


def sweep(of: "SweepTask", between: Between = nothing) -> tuple[Any, ...]:
    """Compute one differentiable answer for each reduction."""
    if torch.compiler.is_compiling():
        # A graph would hold every block. The decorator imports Dynamo, so it is applied late.
        outside: Any = torch.compiler.disable(sweep, reason=_NO_GRAPH)
        return outside(of, between)
    pairs = zip(of.reductions, fill_buffers(of, between), strict=True)
    shape, dtype = of.source.shape, accumulation_dtype(of.source.dtype)
    return tuple(reduction.finish(rounded(sums, dtype), shape) for reduction, sums in pairs)


def fill_buffers(of: "SweepTask", between: Between = nothing) -> list[tuple[Tensor, ...]]:
    """Compute the differentiable sums of each reduction, before ``finish``."""
    buffers, saved = of.start(), of.blocks.rows_to_save(of)
    counts = [len(sums) for sums in buffers]

    def run() -> list[Tensor]:
        of.fill(buffers, saved, between)
        return [total for sums in buffers for total in sums]

    def pull_back(
        plan: tuple[Scores, Mask | None, tuple[Reduction, ...]],
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        arriving = iter(gradients)
        grouped = [tuple(islice(arriving, count)) for count in counts]
        return SweepTask(*plan, blocks, among).pull_back(grouped, saved)

    plan, blocks, among = (of.source, of.mask, of.reductions), of.blocks, of.among
    sums = iter(recomputed(run, pull_back, plan, of.tensors, saved))
    return [tuple(islice(sums, count)) for count in counts]


class BlockSize(NamedTuple):
    """The largest sizes of blocks.

    Attributes:
        together: the maximum number of scores in a block with several heads, or with all rows.
        scores: the maximum number of scores in a block with a part of the rows of one head.
        rows: the maximum number of rows in such a block.
    """

    together: int
    scores: int
    rows: int


def boxes(
    shape: torch.Size, mask: Mask | None, groups: Sequence[int], rows: range, size: BlockSize
) -> Iterator[Box]:
    """Yield the boxes of the blocks that cover these rows.

    A block holds several heads if rows are short, otherwise rows of one head. It holds whole groups
    of heads or lies inside one, for every group size, so that grouped heads share their keys.
    """
    *leading, _, kv_len = shape
    everywhere = tuple(slice(0, n) for n in leading)

    def some(part: tuple[slice, ...], rows: slice) -> slice:
        columns = slice(0, kv_len) if mask is None else mask.key_bounds(part, rows, shape).any
        # Rows without keys need an answer, too.
        return columns if columns.start < columns.stop else slice(0, 1)

    def width(rows: slice) -> int:
        return length(some(everywhere, rows))

    def parts(rows: slice) -> list[tuple[slice, ...]]:
        room = max(1, size.together // (length(rows) * width(rows)))
        return list(_leading_parts(tuple(leading), room, groups))

    # All blocks of one head follow each other, so that its keys stay in the cache.
    for alike, heights in groupby(_heights(rows, width, size), parts):
        heights_alike = list(heights)
        for part in alike:
            for height in heights_alike:
                yield Box(part, height, some(part, height))


def _heights(rows: range, width: Callable[[slice], int], size: BlockSize) -> Iterator[slice]:
    """Yield the rows of each block; blocks with fewer columns have more rows."""
    if len(rows) * width(as_slice(rows)) <= size.together:
        yield as_slice(rows)
        return
    while rows:
        tallest = rows[: size.rows]
        part = tallest[: max(MIN_ROWS, size.scores // width(as_slice(tallest)))]
        yield as_slice(part)
        rows = rows[len(part) :]


def _leading_parts(
    leading: tuple[int, ...], room: int, groups: Sequence[int]
) -> Iterator[tuple[slice, ...]]:
    """Yield parts of the leading axes with at most `room` matrices each.

    A part extends along the last axis first.
    """
    if not leading:
        yield ()
        return
    *outer, last = leading
    whole_or_part = (
        n for n in range(min(room, last), 0, -1) if all(n % g == 0 or g % n == 0 for g in groups)
    )
    step = next(whole_or_part)
    for rest in _leading_parts(tuple(outer), max(1, room // last), ()):
        for start in range(0, last, step):
            yield (*rest, slice(start, min(start + step, last)))


NewBlock = Callable[[Box, Cut], RowStatistics]
"""A function that returns the block of a box; the ``Cut`` cuts its tensors from the inputs."""


class Blocks(ABC):
    """A kind of block: how large its blocks are, and how they are made."""

    @abstractmethod
    def size(self, of: "SweepTask", *, graded: bool) -> BlockSize:
        """Return how large the blocks of the forward pass are, or of the backward pass."""

    @abstractmethod
    def rows_to_save(self, of: "SweepTask") -> tuple[Tensor, ...]:
        """Return memory for what the blocks of the forward pass leave for the backward pass."""

    @abstractmethod
    def of_thread(self, of: "SweepTask", saved: Sequence[Tensor]) -> NewBlock:
        """Return a function that makes the blocks of one thread; its blocks may share memory.

        ``saved`` is the result of ``rows_to_save``.
        """


@final
class PlainBlocks(Blocks):
    """Blocks in plain PyTorch."""

    def size(self, of: "SweepTask", *, graded: bool) -> BlockSize:
        if of.source.device.type == "cuda":
            return BlockSize(GPU_BLOCK_SIZE, GPU_BLOCK_SIZE, GPU_MAX_ROWS)
        return BlockSize(BLOCK_SIZE, BLOCK_SIZE, MAX_ROWS)

    def rows_to_save(self, of: "SweepTask") -> tuple[Tensor, ...]:
        return ()

    def of_thread(self, of: "SweepTask", saved: Sequence[Tensor]) -> NewBlock:
        return partial(Block, of.source, of.mask)


@final
@dataclass(frozen=True, eq=False)
class SweepTask:
    """A sweep over the blocks of a matrix that answers some reductions.

    Attributes:
        source: the scores.
        mask: which keys a query may attend to; None for all.
        reductions: the reductions to answer.
        blocks: the kind of block.
        among: where the reductions see the rows: at these positions, neighbours, in a matrix of
            that many rows; None for a matrix of no others.
    """

    source: Scores
    mask: Mask | None
    reductions: tuple[Reduction, ...]
    blocks: Blocks
    among: tuple[range, int] | None = None

    @property
    def rows(self) -> range:
        """The positions of the rows in the matrix that the reductions see."""
        return range(self.source.shape[-2]) if self.among is None else self.among[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that the reductions see."""
        *leading, q_len, kv_len = self.source.shape
        return torch.Size((*leading, q_len if self.among is None else self.among[1], kv_len))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that gradients flow to; some may occur several times."""
        extra = [tensor for reduction in self.reductions for tensor in reduction.tensors]
        return (*self.source.tensors, *extra)

    @property
    def threaded(self) -> bool:
        """True if several blocks may be computed at once, each on a thread of its own."""
        parts = (self.source, *(() if self.mask is None else (self.mask,)), *self.reductions)
        return self.source.device.type == "cpu" and all(part.runs_on_threads for part in parts)

    @cached_property
    def boxes(self) -> list[Box]:
        """The boxes of all blocks of the forward pass."""
        return self._boxes_of(self.blocks.size(self, graded=False))

    def _boxes_of(self, size: BlockSize) -> list[Box]:
        ranges = [reduction.rows(self.shape[-2]) for reduction in self.reductions]
        ranges = [rows for rows in ranges if len(rows)]
        if not ranges:
            return []
        alone = len(ranges) == 1
        rows = ranges[0] if alone else range(min(map(min, ranges)), max(map(max, ranges)) + 1)
        first, stop = (bisect_left(rows, end) for end in (self.rows.start, self.rows.stop))
        if first == stop:
            return []
        shift = self.rows.start
        rows = range(rows[first] - shift, rows[stop - 1] - shift + 1, rows.step)
        groups = {self.source.group, *(reduction.group for reduction in self.reductions)}
        return list(boxes(self.source.shape, self.mask, tuple(groups), rows, size))

    @cached_property
    def block_size(self) -> int:
        """The number of scores in the largest block."""
        return max((prod(box.size) for box in self.boxes), default=0)

    @property
    def blocks_text(self) -> str:
        """The number of blocks and their height, in words."""
        rows = max((length(box.rows) for box in self.boxes), default=0)
        return f"{count_text(len(self.boxes), 'block')} of at most {rows} rows"

    def memory(self, of_thread: int) -> int:
        """Return the bytes of the answers and of all threads, given those of one thread."""
        threads = min(torch.get_num_threads(), len(self.boxes)) if self.threaded else 1
        return sum(total.nbytes for sums in self.start() for total in sums) + threads * of_thread

    def start(self) -> list[tuple[Tensor, ...]]:
        """Return the empty buffers of each reduction."""
        shape, device = self.shape, self.source.device
        dtype = accumulation_dtype(self.source.dtype)
        return [reduction.start(shape, dtype, device) for reduction in self.reductions]

    def _placed(self, block: RowStatistics) -> RowStatistics:
        """Put a block where the reductions see it."""
        if self.among is not None:
            block.shape, block.box = self.shape, block.box.moved(self.rows.start)
        return block

    def fill(
        self,
        buffers: list[tuple[Tensor, ...]],
        saved: Sequence[Tensor],
        between: Between = nothing,
    ) -> None:
        """Accumulate the contributions of all blocks."""

        def worker() -> Callable[[Box], list[Sequence[Contribution]]]:
            new_block = self.blocks.of_thread(self, saved)

            def answer(box: Box) -> list[Sequence[Contribution]]:
                with torch.no_grad(), without_autocast(self.source.device):
                    block = self._placed(new_block(box, cut_whole))
                    return [
                        contributions(reduction, block, len(sums))
                        for reduction, sums in zip(self.reductions, buffers, strict=True)
                    ]

            return answer

        def take(answers: list[Sequence[Contribution]]) -> None:
            with torch.no_grad():
                for sums, parts in zip(buffers, answers, strict=True):
                    for total, part in zip(sums, parts, strict=True):
                        total[part.at].add_(part.value)

        map_in_order(self.boxes, worker, take, threaded=self.threaded, between=between)

    def pull_back(
        self, gradients: list[tuple[Tensor | None, ...]], saved: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of ``tensors``, None for zeros, given those of the buffers.

        Of a tensor that occurs several times, the last one has the gradient.
        """
        dtype = accumulation_dtype(self.source.dtype)
        boxes = self._boxes_of(self.blocks.size(self, graded=True))
        totals: dict[int, Tensor] = {}

        def worker() -> Callable[[Box], list[tuple[int, Index, Tensor]]]:
            new_block = self.blocks.of_thread(self, saved)

            def answer(box: Box) -> list[tuple[int, Index, Tensor]]:
                leaves = _Leaves(self.tensors)
                with torch.enable_grad(), without_autocast(self.source.device):
                    block = self._placed(new_block(box, leaves.cut))
                    values: list[Tensor] = []
                    arriving: list[Tensor] = []
                    for reduction, grads in zip(self.reductions, gradients, strict=True):
                        if all(grad is None for grad in grads):
                            continue
                        found = contributions(reduction, block, len(grads))
                        for part, grad in zip(found, grads, strict=True):
                            if grad is not None and part.value.requires_grad:
                                values.append(part.value)
                                arriving.append(grad[part.at].to(part.value.dtype))
                    return leaves.gradients(values, arriving)

            return answer

        def take(answers: list[tuple[int, Index, Tensor]]) -> None:
            with torch.no_grad():
                for place, index, gradient in answers:
                    if place not in totals:
                        totals[place] = _zeros(self.tensors[place].shape, gradient, dtype)
                    broadcast_index(totals[place], index).add_(gradient)

        map_in_order(boxes, worker, take, threaded=self.threaded)
        return [totals.get(place) for place in range(len(self.tensors))]


def _zeros(shape: torch.Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros with the memory layout of `like`: adding a transposed matrix is slow."""
    if len(shape) < 2 or like.stride(-1) <= like.stride(-2):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    return torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=like.device).mT


class _Leaves:
    """Slices of the inputs as leaves, so that one block can be differentiated by itself."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._taken: list[tuple[int, Index, Tensor]] = []

    def cut(self, tensor: Tensor, index: Index) -> Tensor:
        leaf = broadcast_index(tensor.detach(), index)
        if tensor.requires_grad:
            # Gradients of bfloat16 tensors are rounded once, when all blocks have been added.
            leaf = leaf.to(accumulation_dtype(leaf.dtype)).requires_grad_()
            self._taken.append((self._places[id(tensor)], index, leaf))
        return leaf

    def gradients(
        self, values: list[Tensor], arriving: list[Tensor]
    ) -> list[tuple[int, Index, Tensor]]:
        """Return the gradient of each slice, with the index of its tensor and its position."""
        if not values:
            return []
        torch.autograd.backward(values, arriving)  # blocks may cut more leaves meanwhile
        return [
            (place, index, leaf.grad) for place, index, leaf in self._taken if leaf.grad is not None
        ]
