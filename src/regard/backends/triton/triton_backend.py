"""The Triton kernels as a backend: which questions they answer, and on which machines."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import Any, cast, final

import torch
from torch import Tensor

from regard.backends.backend import Backend, Between, nothing
from regard.backends.recomputed import recomputed
from regard.backends.sdpa import Sdpa
from regard.backends.sweep import PlainBlocks, SweepTask, fill_buffers
from regard.backends.triton.operands import bytes_of_bits, refused
from regard.backends.triton.requested_answers import Kept, Request
from regard.backends.triton.whole_matrix import Answer, WholeMatrix, with_gradient
from regard.errors import check_operand, dtype_text
from regard.masks import Mask
from regard.reductions.divergences import Divergence
from regard.reductions.needs import Needs, joined
from regard.reductions.products import TransposedOutput
from regard.reductions.reduction import Contribution, Reduction, contributions
from regard.scores.autocast import without_autocast
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

MAX_K = 64
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)
MOST_GROUPS = 16  # of keys in a tile, whose maxima a top-k keeps
ROW_NUMBERS = 5  # logsumexp, norms, largest score and sum of each row
PASSES = 4  # of which a request tells: rows, their entries, sums over rows, the rest
LEAST_HEIGHT = 32  # of a tile that spans are cut for, in queries: it makes the most parts
# What Triton says, in no error of its own, of a machine without a compiler, a driver or a folder.
MACHINES = ("C compiler", "active drivers", "libcuda", "cache dir")
_FUSED = Sdpa()
_META = torch.device("meta")
_NO_GRAPH = "regard launches its Triton kernels beside the graph"


@final
@dataclass(frozen=True)
class Triton(Backend):
    """Every statistic of rows and columns in one pass over tiles that never leave the registers.

    The rows are read once for all questions about them; questions about the columns, of cells
    and of the largest weights take one more pass each, given their norms. ``Output`` beside
    them goes to the fused kernels. The gradient of any of them is one pass over rows and one over
    keys.

    Attributes:
        instead: what answers, with a warning, where a GPU has too little memory, or nothing to
            compile with; None: an error.
    """

    instead: Backend | None = None

    def applies(self, source: Scores) -> bool:
        return source.device.type == "cuda"

    def refusal(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> str | None:
        return (
            _reductions_refusal(source, mask, reductions)
            or refused(source)
            or unavailable_reason(source)
        )

    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        needs = _needs(reductions)
        memory = (ROW_NUMBERS + needs.mean_shifted) * source.shape[:-1].numel()
        memory = memory * torch.float32.itemsize
        memory += _between(needs, source.shape) + bytes_of_bits(source, mask)
        memory *= 1 + len(needs.divergences)
        for reduction in reductions:
            if reduction.needs.values:
                memory += _FUSED.describe(source, mask, [reduction])[1]
            else:
                memory += sum(buffer.nbytes for buffer in _buffers(reduction, source))
        return "Triton kernels that keep tiles of scores in registers", memory

    def reduce(
        self,
        source: Scores,
        mask: Mask | None,
        reductions: Sequence[Reduction],
        between: Between = nothing,
    ) -> tuple[Any, ...]:
        blocks = self.instead is not None
        try:
            scores = cast(QueryKeyScores, source)
            return _answer_all(scores, mask, reductions, between, blocks=blocks)
        except Exception as error:
            reason = None if self.instead is None else _machine_refusal(error)
            if self.instead is None or reason is None:
                raise
            warn_once(reason)
        return self.instead.reduce(source, mask, reductions, between)


def _machine_refusal(error: Exception) -> str | None:
    """Why this machine cannot run a kernel, as a clause; None: the error is another."""
    from triton.compiler.errors import (  # pyright: ignore[reportMissingTypeStubs]
        CompilationError,
    )
    from triton.runtime.errors import (  # pyright: ignore[reportMissingTypeStubs]
        OutOfResources,
        PTXASError,
    )

    said = " ".join(str(error).split())
    match error:
        case torch.OutOfMemoryError():
            return "the memory of the GPU is full"
        case OutOfResources():
            return f"a multiprocessor of this GPU is too small for a tile ({said})"
        case CompilationError() | PTXASError() | CalledProcessError() | OSError():
            return f"this machine does not compile them ({said})"
        case RuntimeError() | AssertionError() if any(words in said for words in MACHINES):
            return f"this machine does not compile them ({said})"
        case _:
            return None


def _reductions_refusal(
    source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
) -> str | None:
    """Why these questions have no kernel."""
    q_len = source.shape[-2]
    outputs = [r for r in reductions if r.needs.values]
    needs = _needs(reductions)
    if others := [type(r).__name__ for r in reductions if r.needs.block]:
        return f"no Triton kernel gives {', '.join(others)}"
    if len(outputs) == len(reductions):
        return "no Triton kernel gives Output by itself"
    for output in outputs:
        if (refusal := _FUSED.refusal(source, mask, [output])) is not None:
            return refusal
    if needs.k > MAX_K:
        return f"the Triton kernel for TopK takes a k up to {MAX_K}, and it is {needs.k}"
    some_rows = [r for r in reductions if r.needs.tiles and r.rows(q_len) != range(q_len)]
    if some_rows or any(len(columns) > MAX_K for columns in needs.tiles):
        return f"Triton kernels give tiles of all rows and of at most {MAX_K} columns"
    lacks = (*map(_operand_refusal, needs.operands), *map(_other_refusal, needs.divergences))
    return next((lack for lack in lacks if lack is not None), None)


def _other_refusal(divergence: Divergence) -> str | None:
    """Why no kernel reads the other matrix of a divergence."""
    other = divergence.source
    lack = refused(other) or unavailable_reason(other)
    return None if lack is None else f"{lack}, in the other matrix"


def _operand_refusal(operand: Tensor) -> str | None:
    """Why no kernel multiplies this operand with the transposed matrix."""
    if operand.dtype not in DTYPES:
        return f"no Triton kernel multiplies {dtype_text(operand.dtype)}"
    if operand.ndim > 1 and operand.shape[-1] > MAX_HEAD_DIM:
        return f"Triton kernels multiply a width up to {MAX_HEAD_DIM}, not {operand.shape[-1]}"
    return None


def _between(needs: Needs, shape: torch.Size) -> int:
    """Return the bytes that one pass stores for the next: tile lists, and sums of span parts."""
    listed = 1 << (needs.k - 1).bit_length() if needs.k else 0
    numbers = [shape[:-1].numel() * listed * (1 + MOST_GROUPS * (listed > 1))]
    for sums in needs.sums:
        down, across = sums.spans(shape)
        parts = sum(-((start - stop) // LEAST_HEIGHT) for start, stop in down)
        if across is not None and parts > len(down):
            numbers.append(shape[:-2].numel() * parts * len(across))
    return sum(numbers) * torch.float32.itemsize


def _buffers(reduction: Reduction, source: Scores) -> tuple[Tensor, ...]:
    """Check a reduction against the matrix, and return its buffers on the meta device."""
    if isinstance(reduction, TransposedOutput):
        operand, shape = reduction.operand, source.shape[:-1]
        check_operand("operand", operand, "q_len", shape, source.device)
        reduction = TransposedOutput(operand.to(_META))
    return reduction.start(source.shape, torch.float32, _META)


def _answer_all(
    source: QueryKeyScores,
    mask: Mask | None,
    reductions: Sequence[Reduction],
    between: Between,
    *,
    blocks: bool,
) -> tuple[Any, ...]:
    """Return the answers.

    Args:
        source: the scores.
        mask: the mask, bound to them.
        reductions: those that ``Triton.refusal`` accepts.
        between: called when the kernels of each reduction have been launched.
        blocks: whether a backward pass that the GPU cannot run is done in blocks, with a warning.
    """
    if torch.compiler.is_compiling():
        # In a graph tensors have no memory for a kernel. The decorator imports Dynamo, so it is
        # applied late.
        outside: Any = torch.compiler.disable(_answer_all, reason=_NO_GRAPH)
        return outside(source, mask, reductions, between, blocks=blocks)
    asked = [reduction for reduction in reductions if not reduction.needs.values]
    empty = {id(reduction): _buffers(reduction, source) for reduction in asked}
    total = PASSES + len(reductions) - len(asked)
    done = iter(range(total + 1))

    def count() -> None:
        between(next(done), total)

    count()
    matrix = _whole(source, mask, tuple(asked), count, blocks=blocks)
    answers: list[Any] = []
    for reduction in reductions:
        if reduction.needs.values:
            answers.append(_FUSED.reduce(source, mask, [reduction])[0])
            count()
            continue
        buffers = empty[id(reduction)]
        with without_autocast(source.device):
            parts = contributions(reduction, matrix, len(buffers))
            sums = tuple(_filled(*pair) for pair in zip(buffers, parts, strict=True))
            answers.append(reduction.finish(sums, source.shape))
    return tuple(answers)


def _filled(empty: Tensor, part: Contribution) -> Tensor:
    """Return a buffer with the contribution of all rows.

    It is a copy, so that a change of an answer in place changes nothing that is saved.
    """
    if part.value.shape == empty.shape:
        return part.value.clone(memory_format=torch.contiguous_format)
    total = torch.zeros(empty.shape, dtype=part.value.dtype, device=part.value.device)
    total[part.at] += part.value
    return total


_Plan = tuple[QueryKeyScores, Mask | None, tuple[Reduction, ...]]


def _whole(
    source: QueryKeyScores,
    mask: Mask | None,
    reductions: tuple[Reduction, ...],
    between: Callable[[], None],
    *,
    blocks: bool,
) -> WholeMatrix:
    """Return all rows of the matrix, with gradients."""
    needs = _needs(reductions)
    tensors = _tensors_of(source, reductions)
    graded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    request = Request(source, mask, needs, graded, {})
    names: list[Answer] = []
    kept: list[Kept] = []
    saved: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        with without_autocast(source.device):
            numbers = request.forward(between)
        if graded:
            kept.extend(request.numbers)
            saved.extend(request.numbers.values())
        names.extend(numbers)
        return tuple(numbers.values())

    def pull_back(
        plan: _Plan, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        source, mask, reductions = plan
        pairs = zip(names, gradients, strict=True)
        arriving = {name: gradient for name, gradient in pairs if gradient is not None}
        again = Request(source, mask, _needs(reductions), True, dict(zip(kept, saved, strict=True)))
        tensors = _tensors_of(source, reductions)
        try:
            with without_autocast(source.device):
                by_id = again.backward(arriving)
        except Exception as error:
            reason = _machine_refusal(error) if blocks else None
            if reason is None:
                raise
            warn_once(reason)
            return _gradients_of_blocks(again, arriving, tensors)
        return [by_id.get(id(tensor)) for tensor in tensors]

    answers = recomputed(run, pull_back, (source, mask, reductions), tensors, saved)
    return WholeMatrix(source.shape, needs, dict(zip(names, answers, strict=True)))


def _needs(reductions: Sequence[Reduction]) -> Needs:
    return joined(reduction.needs for reduction in reductions)


def _tensors_of(source: QueryKeyScores, reductions: Sequence[Reduction]) -> tuple[Tensor, ...]:
    """Return all tensors that gradients flow to, each once."""
    extra = [tensor for reduction in reductions for tensor in reduction.tensors]
    return tuple({id(each): each for each in (*source.tensors, *extra)}.values())


def _gradients_of_blocks(
    request: Request, arriving: Mapping[Answer, Tensor], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return what the sweep gives, where a GPU cannot run the kernels of a backward pass."""
    source, needs = request.source, request.needs
    pairs = [
        pair
        for name, gradient in arriving.items()
        for pair in with_gradient(name, gradient, needs, source.shape)
    ]
    reductions, gradients = zip(*pairs, strict=True)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    with torch.enable_grad():
        filled = fill_buffers(SweepTask(source, request.mask, reductions, PlainBlocks()))
        sums = [buffers[0] for buffers in filled]
    arriving_at = [gradient.to(x.dtype) for x, gradient in zip(sums, gradients, strict=True)]
    of_leaves = iter(torch.autograd.grad(sums, leaves, arriving_at, allow_unused=True))
    return [next(of_leaves) if tensor.requires_grad else None for tensor in tensors]


def unavailable_reason(source: Scores) -> str | None:
    """Return why no kernel can read these tensors on this machine, as a clause, or None."""
    device = source.device
    found = find_spec("triton")
    if found is None or found.origin is None:  # a folder of that name is not a package
        return "triton is not installed"
    if device.type != "cuda":
        from regard.backends.triton.launch import interpreted  # takes half a second

        if not (device.type == "cpu" and interpreted()):
            return f"Triton kernels run on NVIDIA GPUs, and the matrix is on {device}"
    elif torch.version.hip is not None:
        return "Triton kernels are written for NVIDIA GPUs, and this is one of AMD"
    elif (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        has = ".".join(map(str, capability))
        return f"Triton kernels need compute capability {least}, and the GPU has {has}"
    if not isinstance(source, QueryKeyScores):
        return None
    if source.dtype not in DTYPES or source.key.dtype != source.dtype:
        return f"no Triton kernel takes {dtype_text(source.dtype)}"
    if (head_dim := source.query.shape[-1]) > MAX_HEAD_DIM:
        return f"Triton kernels take a head_dim up to {MAX_HEAD_DIM}, and it is {head_dim}"
    return None


@cache
def warn_once(reason: str) -> None:
    """Warn that another backend answers, and of its price, the first time for each reason."""
    warnings.warn(
        f"the Triton kernels do not answer: {reason}; the sweep over blocks does, in "
        "the time of about 130 fused forward passes.\n"
        "    Ask with backend='sweep' to choose it.",
        RuntimeWarning,
        stacklevel=5,
    )
