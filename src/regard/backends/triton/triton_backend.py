"""The Triton kernels as a backend: which questions they answer, and on which machines."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor

from regard.backends.autograd_limits import only_backward
from regard.backends.backend import Backend, Unavailable
from regard.backends.sdpa import Sdpa
from regard.backends.triton.operands import operands, refused
from regard.errors import check_operand, dtype_text
from regard.masks import Mask
from regard.reductions.products import Output, TransposedOutput
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import Entropy, LogSumExp
from regard.reductions.sums import Pool, Segments, Sum
from regard.reductions.top_k import Top, TopK
from regard.scores.autocast import without_autocast
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

if TYPE_CHECKING:
    from regard.backends.triton.launch import Launch, RowStatistics

__all__ = ["Triton", "unavailable_reason", "warn_once"]

MAX_K = 64
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)
LEAST_HEIGHT = 32  # of a tile that spans are cut for, in queries: it makes the most pieces
ANSWERED = (LogSumExp, Entropy, Sum, TopK, Pool, Segments, TransposedOutput)
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
    and of the largest weights takes one more pass each, given their norms. ``Output`` beside
    them goes to the fused kernels. Answers have no gradients.

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
            or refused(source, mask)
            or unavailable_reason(source)
        )

    def describe(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[str, int]:
        memory = 3 * source.shape[:-1].numel() * torch.float32.itemsize  # logsumexp and norms
        memory += _between(reductions, source.shape)
        for reduction in reductions:
            if type(reduction) is Output:
                memory += _FUSED.describe(source, mask, [reduction])[1]
            else:
                memory += sum(buffer.nbytes for buffer in _buffers(reduction, source))
        return "Triton kernels that keep tiles of scores in registers", memory

    def reduce(
        self, source: Scores, mask: Mask | None, reductions: Sequence[Reduction]
    ) -> tuple[Any, ...]:
        if self.instead is None:
            return _answer_all(cast(QueryKeyScores, source), mask, reductions)
        try:
            return _answer_all(cast(QueryKeyScores, source), mask, reductions)
        except Exception as error:
            reason = _machine_refusal(error)
            if reason is None:
                raise
            warn_once(reason)
        return self.instead.reduce(source, mask, reductions)


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
    outputs = [r for r in reductions if type(r) is Output]
    others = [type(r).__name__ for r in reductions if type(r) not in (*ANSWERED, Output)]
    if others:
        return f"no Triton kernel gives {', '.join(others)}"
    if len(outputs) == len(reductions):
        return "no Triton kernel gives Output by itself"
    for output in outputs:
        if (refusal := _FUSED.refusal(source, mask, [output])) is not None:
            return refusal
    for reduction in reductions:
        if isinstance(reduction, TopK) and reduction.k > MAX_K:
            return f"the Triton kernel for TopK takes a k up to {MAX_K}, and it is {reduction.k}"
        if isinstance(reduction, TransposedOutput) and (
            lack := _operand_refusal(reduction.operand)
        ):
            return lack
    tensors = [*source.tensors, *(tensor for r in reductions for tensor in r.tensors)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "Triton kernels have no gradients"
    return None


def _operand_refusal(operand: Tensor) -> str | None:
    """Why no kernel multiplies this operand with the transposed matrix."""
    if operand.dtype not in DTYPES:
        return f"no Triton kernel multiplies {dtype_text(operand.dtype)}"
    if operand.ndim > 1 and operand.shape[-1] > MAX_HEAD_DIM:
        return f"Triton kernels multiply a width up to {MAX_HEAD_DIM}, not {operand.shape[-1]}"
    return None


def _between(reductions: Sequence[Reduction], shape: torch.Size) -> int:
    """Return the bytes that one pass stores for the next: tile lists, and sums of span pieces."""
    most = max((r.k for r in reductions if isinstance(r, TopK)), default=0)
    numbers = [shape[:-1].numel() * (1 + (1 << (most - 1).bit_length())) if most else 0]
    for reduction in reductions:
        if isinstance(reduction, Pool | Segments):
            down, across = _spans(reduction, shape)
            pieces = int((-(-down.diff() // LEAST_HEIGHT)).sum())
            if pieces > len(down):
                numbers.append(shape[:-2].numel() * pieces * len(across))
    return sum(numbers) * torch.float32.itemsize


def _buffers(reduction: Reduction, source: Scores) -> tuple[Tensor, ...]:
    """Check a reduction against the matrix, and return its buffers on the meta device."""
    if isinstance(reduction, TransposedOutput):
        operand, shape = reduction.operand, source.shape[:-1]
        check_operand("operand", operand, "q_len", shape, source.device)
        reduction = TransposedOutput(operand.to(_META))
    return reduction.start(source.shape, torch.float32, _META)


def _answer_all(
    source: QueryKeyScores, mask: Mask | None, reductions: Sequence[Reduction]
) -> tuple[Any, ...]:
    if torch.compiler.is_compiling():
        # In a graph tensors have no memory for a kernel. The decorator imports Dynamo, so it is
        # applied late.
        outside: Any = torch.compiler.disable(_answer_all, reason=_NO_GRAPH)
        return outside(source, mask, reductions)
    from regard.backends.triton.launch import Launch  # imports triton

    _Plain.apply(*source.tensors)
    for reduction in reductions:
        if not isinstance(reduction, Output):
            _buffers(reduction, source)
    with torch.no_grad(), without_autocast(source.device):
        request = _Request(source, mask, Launch(operands(source, mask)), tuple(reductions))
        return tuple(request.answer(reduction) for reduction in reductions)


class _Plain(torch.autograd.Function):
    """A no-op that rejects the wrappers of torch.func, which a kernel cannot read."""

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensors[0].new_zeros(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    vmap: Any = staticmethod(only_backward)
    jvp: Any = staticmethod(only_backward)


@dataclass(frozen=True, eq=False)
class _Request:
    """Several reductions of one matrix; each pass runs once, when it is first needed."""

    source: QueryKeyScores
    mask: Mask | None
    launch: "Launch"
    reductions: tuple[Reduction, ...]

    @cached_property
    def rows(self) -> "RowStatistics":
        return self.launch.rows(
            entropy=Entropy() in self.reductions,
            mass=Sum(-1) in self.reductions,
            largest=self.largest_k == 1,
            k=self.largest_k if self.largest_k > 1 else 0,
        )

    @cached_property
    def largest_k(self) -> int:
        """The largest k of the TopK reductions; 0 if there are none."""
        return max((r.k for r in self.reductions if isinstance(r, TopK)), default=0)

    @cached_property
    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest weights and their keys, (batch, num_heads, q_len, largest_k)."""
        if self.largest_k == 1:  # the pass over the rows finds one
            assert self.rows.value is not None
            assert self.rows.best is not None
            return self.rows.value[..., None], self.rows.best[..., None]
        return self.launch.top(self.rows, self.largest_k)

    @cached_property
    def column_sums(self) -> Tensor:
        return self.launch.column_sums(self.rows.norms)

    def answer(self, reduction: Reduction) -> Any:
        """Return the answer of one reduction, with the axes of the matrix."""
        shape = self.source.shape
        match reduction:
            case LogSumExp():
                return self._shaped(self.rows.logsumexp)
            case Entropy():
                return self._shaped(self.rows.entropy)
            case Sum(dim=-1):
                return self._shaped(self.rows.mass)
            case Sum():
                return self._shaped(self.column_sums)
            case TopK(k):
                return Top(*(self._shaped(each[..., :k]) for each in self.largest))
            case TransposedOutput(operand):
                product = self.launch.transposed_product(
                    self.rows.norms, _four_axes(operand, self.launch.given.shape)
                )
                return reduction.finish((self._shaped(product),), shape)
            case Pool() | Segments():
                down, across = _spans(reduction, shape)
                mass = self.launch.spans(self.rows.norms, down, across)
                return reduction.finish((self._shaped(mass),), shape)
            case _:
                return _FUSED.reduce(self.source, self.mask, [reduction])[0]

    def _shaped(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor.reshape(*self.source.shape[:-2], *tensor.shape[2:])


def _four_axes(operand: Tensor, shape: torch.Size) -> Tensor:
    """Return the operand as (batch, heads, q_len, width), with its grouped heads."""
    if operand.ndim == 1:
        operand = operand[:, None]
    operand = operand[(None,) * (len(shape) - operand.ndim)]
    operand = operand.expand(shape[0], *operand.shape[1:])
    return operand if operand.stride(-1) == 1 else operand.contiguous()


def _spans(reduction: Pool | Segments, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return (start, stop) of the spans of queries, and of the spans of keys."""
    if isinstance(reduction, Segments):
        return torch.tensor(reduction.query_pieces, device="cpu"), reduction.key_edges
    (cells,) = reduction.start(shape, torch.float32, _META)  # never filled
    edges = [
        torch.arange(n + 1, device="cpu") * shape[axis] // n
        for axis, n in zip((-2, -1), cells.shape[-2:], strict=True)
    ]
    down, across = (torch.stack((edge[:-1], edge[1:]), -1) for edge in edges)
    return down, across


def unavailable_reason(source: Scores) -> Unavailable | None:
    """Return why no kernel can read these tensors on this machine, as a clause, or None."""
    device = source.device
    found = find_spec("triton")
    if found is None or found.origin is None:  # a folder of that name is not a package
        return Unavailable("triton is not installed")
    if device.type != "cuda":
        from regard.backends.triton.launch import interpreted  # takes half a second

        if not (device.type == "cpu" and interpreted()):
            text = f"Triton kernels run on NVIDIA GPUs, and the matrix is on {device}"
            return Unavailable(text)
    elif torch.version.hip is not None:
        return Unavailable("Triton kernels are written for NVIDIA GPUs, and this is one of AMD")
    elif (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        has = ".".join(map(str, capability))
        return Unavailable(f"Triton kernels need compute capability {least}, and the GPU has {has}")
    if not isinstance(source, QueryKeyScores):
        return None
    if source.dtype not in DTYPES or source.key.dtype != source.dtype:
        return Unavailable(f"no Triton kernel takes {dtype_text(source.dtype)}")
    if (head_dim := source.query.shape[-1]) > MAX_HEAD_DIM:
        text = f"Triton kernels take a head_dim up to {MAX_HEAD_DIM}, and it is {head_dim}"
        return Unavailable(text)
    return None


@cache
def warn_once(reason: str) -> None:
    """Warn that another backend answers, the first time for each reason."""
    warnings.warn(
        f"the Triton kernels do not answer: {reason}; the sweep over blocks does, in more time.\n"
        "    Ask with backend='sweep' to choose it.",
        RuntimeWarning,
        stacklevel=5,
    )
