"""The Triton kernels as a backend: which questions they answer, and on which machines."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch
from torch import Tensor

from regard.backends.backend import Backend, Unavailable
from regard.backends.recomputed import recomputed
from regard.backends.sdpa import Sdpa
from regard.backends.sweep import PlainBlocks, SweepTask, fill_buffers
from regard.backends.triton.operands import operands, query_factor, refused
from regard.errors import check_operand, dtype_text
from regard.masks import Mask
from regard.reductions.products import Output, TransposedOutput
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import Entropy, LogSumExp, MaxScore
from regard.reductions.sums import Pool, Segments, Sum
from regard.reductions.top_k import TopK
from regard.scores.autocast import without_autocast
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import Scores

if TYPE_CHECKING:
    from regard.backends.triton.derivatives import Derivatives
    from regard.backends.triton.launch import Launch, RowStatistics

__all__ = ["Triton", "unavailable_reason", "warn_once"]

MAX_K = 64
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)
MOST_STRIPS = 2**26  # numbers between two passes: 256 MiB
MOST_GROUPS = 16  # of keys in a tile, whose maxima a top-k keeps
LEAST_HEIGHT = 32  # of a tile that spans are cut for, in queries: it makes the most pieces
ANSWERED = (LogSumExp, MaxScore, Entropy, Sum, TopK, Pool, Segments, TransposedOutput)
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
        blocks = self.instead is not None
        try:
            return _answer_all(cast(QueryKeyScores, source), mask, reductions, blocks=blocks)
        except Exception as error:
            reason = None if self.instead is None else _machine_refusal(error)
            if self.instead is None or reason is None:
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
    if isinstance(source, QueryKeyScores) and torch.is_grad_enabled():
        positions = source.position_bias.tensors if source.position_bias is not None else ()
        biases = [each for each in (source.bias, *positions) if each is not None]
        if any(bias.requires_grad for bias in biases):
            return "no Triton kernel has the gradient of a bias"
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
    listed = 1 << (most - 1).bit_length() if most else 0
    numbers = [shape[:-1].numel() * listed * (1 + MOST_GROUPS * (listed > 1))]
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
    source: QueryKeyScores, mask: Mask | None, reductions: Sequence[Reduction], *, blocks: bool
) -> tuple[Any, ...]:
    """Return the answers.

    Args:
        source: the scores.
        mask: the mask, bound to them.
        reductions: those that ``Triton.refusal`` accepts.
        blocks: whether a backward pass that the GPU cannot run is done in blocks, with a warning.
    """
    if torch.compiler.is_compiling():
        # In a graph tensors have no memory for a kernel. The decorator imports Dynamo, so it is
        # applied late.
        outside: Any = torch.compiler.disable(_answer_all, reason=_NO_GRAPH)
        return outside(source, mask, reductions, blocks=blocks)
    for reduction in reductions:
        if not isinstance(reduction, Output):
            _buffers(reduction, source)
    kernels = tuple(r for r in reductions if not isinstance(r, Output))
    raw = iter(_raw_answers(source, mask, kernels, blocks=blocks))
    answers: list[Any] = []
    for reduction in reductions:
        if isinstance(reduction, Output):
            answers.append(_FUSED.reduce(source, mask, [reduction])[0])
        else:
            sums = tuple(next(raw) for _ in range(2 if isinstance(reduction, TopK) else 1))
            answers.append(reduction.finish(sums, source.shape))
    return tuple(answers)


_Plan = tuple[QueryKeyScores, Mask | None, tuple[Reduction, ...]]


def _raw_answers(
    source: QueryKeyScores, mask: Mask | None, reductions: tuple[Reduction, ...], *, blocks: bool
) -> tuple[Tensor, ...]:
    """Return what ``finish`` of each reduction takes, with gradients."""
    tensors = _tensors(source, reductions)
    graded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    request = _Request(source, mask, reductions, graded, {})
    names: list[str] = []
    saved: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        with without_autocast(source.device):
            raw = request.forward()
        kept = request.numbers
        names.extend(kept)
        saved.extend(kept.values())
        return raw

    def pull_back(
        plan: _Plan, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        again = _Request(*plan, True, dict(zip(names, saved, strict=True)))
        try:
            with without_autocast(again.source.device):
                return again.backward(gradients)
        except Exception as error:
            reason = _machine_refusal(error) if blocks else None
            if reason is None:
                raise
            warn_once(reason)
        return _gradients_of_blocks(plan, gradients)

    return recomputed(run, pull_back, (source, mask, reductions), tensors, saved)


def _tensors(source: QueryKeyScores, reductions: Sequence[Reduction]) -> tuple[Tensor, ...]:
    """Return all tensors that gradients flow to, each once."""
    extra = [tensor for reduction in reductions for tensor in reduction.tensors]
    return tuple({id(each): each for each in (*source.tensors, *extra)}.values())


def _gradients_of_blocks(plan: _Plan, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return what the sweep gives, where a GPU cannot run the kernels of a backward pass."""
    source, _, reductions = plan
    tensors = _tensors(source, reductions)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    with torch.enable_grad():
        buffers = [x for sums in fill_buffers(SweepTask(*plan, PlainBlocks())) for x in sums]
    pairs = [(x, g.to(x.dtype)) for x, g in zip(buffers, gradients, strict=True) if g is not None]
    sums, arriving = zip(*pairs, strict=True)
    of_leaves = iter(torch.autograd.grad(sums, leaves, arriving, allow_unused=True))
    return [next(of_leaves) if tensor.requires_grad else None for tensor in tensors]


@dataclass(frozen=True, eq=False)
class _Request:
    """Several reductions of one matrix; each pass runs once, when it is first needed."""

    source: QueryKeyScores
    mask: Mask | None
    reductions: tuple[Reduction, ...]
    graded: bool
    kept: dict[str, Tensor]  # numbers of the forward pass, in the backward pass

    @cached_property
    def launch(self) -> "Launch":
        from regard.backends.triton.launch import Launch  # imports triton

        return Launch(operands(self.source, self.mask, self.kept))

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The numbers of the forward pass that the backward pass reads, by name."""
        rows, packed = self.rows, self.launch.given.limits.packed
        numbers: dict[str, Tensor | None] = {
            "logsumexp": rows.logsumexp,
            "top": rows.norms.top,
            "above": rows.norms.above,
            "maximum": rows.maximum,
            "entropy": rows.entropy,
            "mass": rows.mass,
        }
        if self.largest_k:
            numbers["weights"], numbers["keys"] = self.largest
        if packed is not None:
            numbers["slots"], numbers["words"] = packed.slots, packed.words
        return {name: tensor for name, tensor in numbers.items() if tensor is not None}

    @cached_property
    def rows(self) -> "RowStatistics":
        if self.kept:
            from regard.backends.triton.launch import RowStatistics  # imports triton
            from regard.backends.triton.tile import Norms

            kept = self.kept
            norms = Norms(kept["top"], kept["above"])
            names = ("maximum", "entropy", "mass", "tiles", "maxima")
            return RowStatistics(kept["logsumexp"], norms, *map(kept.get, names))
        return self.launch.rows(
            maximum=MaxScore() in self.reductions,
            entropy=Entropy() in self.reductions,
            mass=Sum(-1) in self.reductions or self.source.sink_bias is not None,
            k=self.largest_k,
        )

    @cached_property
    def largest_k(self) -> int:
        """The largest k of the TopK reductions; 0 if there are none.

        The gradient of the largest score goes to its key, which the forward pass finds.
        """
        least = int(self.graded and MaxScore() in self.reductions)
        return max((r.k for r in self.reductions if isinstance(r, TopK)), default=least)

    @cached_property
    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest weights and their keys, (batch, num_heads, q_len, largest_k)."""
        if self.kept:
            return self.kept["weights"], self.kept["keys"]
        return self.launch.top(self.rows, self.largest_k)

    @cached_property
    def column_sums(self) -> Tensor:
        if self.grids is not None and self.grids.strip == 1:
            from regard.backends.triton.launch import joined_parts  # imports triton

            return joined_parts(self.grids.strips)
        return self.launch.column_sums(self.rows.norms)

    @cached_property
    def grids(self) -> "_Grids | None":
        """The mass of all pooled maps and segments by one pass over the columns, if that can be."""
        grids = [r for r in self.reductions if isinstance(r, Pool | Segments)]
        if not grids:
            return None
        sums = Sum(-2) in self.reductions
        return _Grids.by_strips(self.launch, self.rows, grids, sums=sums)

    def _mass(self, reduction: Pool | Segments) -> Tensor:
        down, across = _spans(reduction, self.source.shape)
        if self.grids is not None:
            return self.grids.mass(self.launch, down, across)
        return self.launch.spans(self.rows.norms, down, across)

    def forward(self) -> tuple[Tensor, ...]:
        """Return what ``finish`` of each reduction takes, with the axes of the matrix."""
        raw: list[Tensor] = []
        for reduction in self.reductions:
            for answer in self._raw(reduction):
                assert answer is not None
                # A copy, so that a change of an answer in place changes nothing that is saved.
                raw.append(answer.reshape(*self.source.shape[:-2], *answer.shape[2:]).clone())
        return tuple(raw)

    def _raw(self, reduction: Reduction) -> Sequence[Tensor | None]:
        """Return the sums of one reduction, with four axes or three."""
        match reduction:
            case LogSumExp():
                return (self.rows.logsumexp,)
            case MaxScore():
                return (self.rows.maximum,)
            case Entropy():
                return (self.rows.entropy,)
            case Sum(dim=-1):
                return (self.rows.mass,)
            case Sum():
                return (self.column_sums,)
            case TopK(k):
                return tuple(each[..., :k].contiguous() for each in self.largest)
            case TransposedOutput(operand):
                across = _four_axes(operand, self.launch.given.shape)
                return (self.launch.transposed_product(self.rows.norms, across),)
            case Pool() | Segments():
                return (self._mass(reduction),)
            case _:
                raise AssertionError(f"{reduction} is refused")

    def backward(self, arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of ``tensors``, from those of the raw answers."""
        from regard.backends.triton.derivatives import Derivatives

        factor = _power_for_half(self.source.dtype, arriving)
        of_answers = iter(arriving)
        derivatives = Derivatives(self.launch, self.rows)
        for reduction in self.reductions:
            numbers = next(of_answers)
            if isinstance(reduction, TopK):
                next(of_answers)  # of the indices
            if numbers is None:
                continue
            # One number may arrive for all entries, without memory of their own; kernels read it.
            numbers = (numbers if factor is None else numbers * factor).contiguous()
            numbers = numbers.view(*self.launch.given.shape[:2], *self._last_axes(numbers))
            match reduction:
                case LogSumExp():
                    derivatives.add_logsumexp(numbers)
                case MaxScore():
                    assert self.rows.maximum is not None
                    keys = self.largest[1][..., :1]
                    derivatives.add_scores(keys, self.rows.maximum[..., None], numbers[..., None])
                case Entropy():
                    derivatives.add_entropy(numbers)
                case Sum(dim=-1):
                    derivatives.add_row_sums(numbers)
                case Sum():
                    derivatives.add_column_sums(numbers)
                case TopK(k):
                    values, keys = (each[..., :k] for each in self.largest)
                    derivatives.add_weights(keys, values, numbers)
                case TransposedOutput(operand):
                    across = _four_axes(operand, self.launch.given.shape)
                    derivatives.add_product(id(operand), across, numbers)
                case Pool() | Segments():
                    derivatives.add_grid(*_spans(reduction, self.source.shape), numbers)
                case _:
                    raise AssertionError(f"{reduction} is refused")
        by_id = self._with_axes(derivatives)
        if factor is not None:
            by_id = {name: gradient / factor for name, gradient in by_id.items()}
        return [by_id.get(id(each)) for each in _tensors(self.source, self.reductions)]

    def _last_axes(self, numbers: Tensor) -> torch.Size:
        return numbers.shape[len(self.source.shape) - 2 :]

    def _with_axes(self, derivatives: "Derivatives") -> dict[int, Tensor]:
        """Return the gradients by id, in the shapes of the tensors."""
        source = self.source
        by_id: dict[int, Tensor] = {}
        if source.query.requires_grad:
            query = derivatives.query_gradient() * query_factor(source)
            by_id[id(source.query)] = query.view(source.query.shape)
        if source.key.requires_grad:
            key = derivatives.key_gradient().view(source.key.shape)
            by_id[id(source.key)] = by_id.get(id(source.key), 0) + key  # one tensor may be both
        if source.sink_bias is not None and source.sink_bias.requires_grad:
            of_sink = derivatives.sink_gradient().reshape(*source.shape[:-2], 1, 1)
            by_id[id(source.sink_bias)] = of_sink.sum_to_size(source.sink_bias.shape)
        for name, gradient in derivatives.operand_gradients():
            operand = next(each for r in self.reductions for each in r.tensors if id(each) == name)
            gradient = gradient.reshape(*source.shape[:-1], gradient.shape[-1])
            gradient = gradient.squeeze(-1) if operand.ndim == 1 else gradient
            by_id[name] = by_id.get(name, 0) + _grouped(gradient, operand.shape)
        return by_id


def _power_for_half(dtype: torch.dtype, arriving: Sequence[Tensor | None]) -> Tensor | None:
    """Return a power of 2 that brings float16 gradients to about 64; None for other dtypes.

    A kernel rounds the derivatives by scores to the dtype of the query, and those of the mean of an
    answer would be 0 in float16. Gradients are linear in what arrives, so the power is exact.
    """
    sizes = [each.abs().max() for each in arriving if each is not None]
    if dtype != torch.float16 or not sizes:
        return None
    size = torch.stack([each.double() for each in sizes]).max()
    power = torch.exp2(6 - size.log2().floor()).float()
    return torch.where((size > 0) & power.isfinite(), power, 1.0)


class _Grids(NamedTuple):
    """The mass of parts of the rows on strips of keys, from which all grids are added up.

    Attributes:
        parts: (start, stop) of the queries of each part, (parts, 2), on the CPU.
        strip: keys of a strip.
        strips: (batch, num_heads, parts, strips).
    """

    parts: Tensor
    strip: int
    strips: Tensor

    @classmethod
    def by_strips(
        cls,
        launch: "Launch",
        rows: "RowStatistics",
        grids: Sequence[Pool | Segments],
        *,
        sums: bool,
    ) -> "_Grids | None":
        """Run the pass; return None where parts are too short, or the strips too many.

        Args:
            launch: of the matrix.
            rows: its row statistics.
            grids: whose mass is asked.
            sums: whether the column sums are asked, too; strips of one key give them.
        """
        from regard.backends.triton.launch import (  # imports triton
            STRIPS,
            parts_of,
            spans_between,
        )

        *leading, q_len, kv_len = launch.given.shape
        spans = [_spans(grid, launch.given.shape) for grid in grids]
        all_rows = torch.tensor([0, q_len], device="cpu")
        parts = spans_between(torch.cat((all_rows, *(down.flatten() for down, _ in spans))))
        if int(parts.diff().min()) < launch.shortest_part:
            return None
        parts = parts_of(parts, launch.longest_part)
        columns = torch.cat([across.flatten() for _, across in spans])
        whole = [n for n in STRIPS if not bool((columns[columns < kv_len] % n).any())]

        def count(strip: int) -> int:
            return torch.Size(leading).numel() * len(parts) * -(-kv_len // strip)

        strip = 1 if sums and count(1) <= MOST_STRIPS else max(whole)
        if count(strip) > MOST_STRIPS:
            return None
        return cls(parts, strip, launch.strips(rows.norms, parts, strip))

    def mass(self, launch: "Launch", down: Tensor, across: Tensor) -> Tensor:
        """Return the mass of each span of queries on each span of keys."""
        begins = torch.searchsorted(self.parts[:, 0].contiguous(), down[:, 0].contiguous())
        ends = torch.searchsorted(self.parts[:, 1].contiguous(), down[:, 1].contiguous()) + 1
        columns = -(-across // self.strip)  # only the end of the keys lies inside a strip
        return launch.added(self.strips, torch.stack((begins, ends), -1), columns)


def _grouped(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient of (..., num_heads, q_len, width) over what the operand's axes share."""
    if len(shape) == 1:
        return gradient.reshape(-1, shape[0]).sum(0)
    if len(shape) > 2 and 1 < shape[-3] < gradient.shape[-3]:
        *batch, heads, length, width = gradient.shape
        groups = (*batch, shape[-3], heads // shape[-3], length, width)
        gradient = gradient.reshape(groups).sum(-3)
    return gradient.sum_to_size(shape)


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
