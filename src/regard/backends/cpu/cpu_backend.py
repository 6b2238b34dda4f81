"""The compiled kernels as a backend: which questions they answer, and on which machines."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor

from regard.backends.backend import Backend, Between, nothing
from regard.backends.sweep import Blocks, BlockSize, NewBlock, SweepTask, sweep
from regard.masks import Mask
from regard.reductions.block import Block, RowStatistics
from regard.reductions.needs import Needs, joined
from regard.reductions.reduction import Reduction
from regard.scores.box import Box, Cut
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

TILE = 2048  # columns; a product with many more is slower
ROWS = 256  # of one head, computed at once
KEPT = 2**22  # scores: of rows whose weights are kept until they are complete
MAX_K = 128  # the largest weights of a row are sorted again with each tile
_FEWEST_BLOCKS, _MOST_PARTS = 32, 4
_HAS_NUMBA = find_spec("numba") is not None
_MISSING = (
    "Numba is not installed; with pip install 'regard[cpu]' this is two to seven times as fast"
)
_BYTES = torch.float32.itemsize
_LEAST = 2**16  # scores; below, starting Numba takes longer than the plain sweep


@final
class Cpu(Backend):
    """All of regard's usual statistics in one pass of compiled code over tiles in the cache."""

    def applies(self, source: Scores) -> bool:
        return source.device.type == "cpu" and source.shape.numel() >= _LEAST

    def refusal(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> str | None:
        if others := [type(r).__name__ for r in reductions if r.needs.block]:
            return f"no compiled kernel gives {', '.join(others)}"
        if any(r.needs.k > MAX_K for r in reductions):
            return f"the compiled kernels give at most {MAX_K} largest weights"
        if source.device.type != "cpu":
            return "the compiled kernels need tensors on the CPU"
        if source.dtype == torch.float64:
            return "the compiled kernels compute in float32"
        return None if _HAS_NUMBA else _MISSING

    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        of = SweepTask(source, mask, tuple(reductions), _FusedBlocks())
        # Sums over rows need the weights of complete rows; other statistics are done with a tile.
        tile = max(ROWS * TILE, KEPT) if _needs(reductions).weights else ROWS * TILE
        return f"one compiled pass over {of.blocks_text}", of.memory(tile * _BYTES)

    def reduce(
        self,
        source: Scores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between = nothing,
    ) -> tuple[Any, ...]:
        return sweep(SweepTask(source, mask, tuple(reductions), _FusedBlocks()), between)


@final
class _FusedBlocks(Blocks):
    """Blocks in parts of rows, and parts in tiles of columns."""

    def size(self, of: SweepTask, *, graded: bool) -> BlockSize:
        together, shape = ROWS * TILE, of.source.shape
        if graded and not _has_small_gradients(of):
            return BlockSize(together, KEPT, ROWS)
        # Many parts are less overhead, many blocks keep all threads busy.
        parts = max(1, min(_MOST_PARTS, shape[:-1].numel() // (_FEWEST_BLOCKS * ROWS)))
        return BlockSize(together, parts * ROWS * shape[-1], parts * ROWS)

    def rows_to_save(self, of: SweepTask) -> tuple[Tensor, ...]:
        from regard.backends.cpu.saved_rows import unsaved_rows

        wants = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in of.tensors)
        saves = wants and has_gradients(of.reductions)
        return unsaved_rows(of.source.shape, _needs(of.reductions)) if saves else ()

    def of_thread(self, of: SweepTask, saved: Sequence[Tensor]) -> NewBlock:
        # Numba takes a moment to start, so it is imported when the first block is needed.
        from regard.backends.cpu.fused_block import FusedBlock, NotFiniteError, Workspace
        from regard.backends.cpu.saved_rows import SavedRows

        needs = _needs(of.reductions)
        workspace = Workspace(ROWS, TILE, KEPT)
        rows = SavedRows(saved) if saved else None

        def block(box: Box, cut: Cut) -> RowStatistics:
            if box.rows.step or (torch.is_grad_enabled() and rows is None):
                return Block(of.source, of.mask, box, cut)
            try:
                return FusedBlock(of.source, of.mask, box, cut, needs, workspace, rows)
            except NotFiniteError:
                return Block(of.source, of.mask, box, cut)

        return block


def _has_small_gradients(of: SweepTask) -> bool:
    """Return True if the gradients of a block are much smaller than its scores."""
    source = of.source
    is_product = isinstance(source, QueryKeyScores) and source.is_product
    needs = _needs(of.reductions)
    return is_product and not (needs.products or needs.divergences)


def has_gradients(reductions: Sequence[Reduction]) -> bool:
    """Return True if the compiled kernels give all gradients of some reductions."""
    needs = _needs(reductions)
    return not (needs.products or needs.largest_score)


def _needs(reductions: Sequence[Reduction]) -> Needs:
    return joined(reduction.needs for reduction in reductions)
