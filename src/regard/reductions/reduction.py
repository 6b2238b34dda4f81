"""The base class of reductions: computations over a matrix, one block of complete rows at a time.

A reduction starts with buffers of zeros, returns for each block what to add to them and where, and
computes the answer from the sums. ``update`` depends on its block alone, so a block can be
recomputed for gradients, and blocks can come in any order.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from regard.errors import count_text, kind_text, with_article
from regard.reductions.block import Block, RowStatistics
from regard.reductions.needs import Needs
from regard.scores.box import Index


class Contribution(NamedTuple):
    """The contribution of one block to a buffer: ``buffer[at] += value``.

    Attributes:
        at: integers and slices for the first axes of the buffer, usually ``block.box.at_rows`` or
            ``block.box.at_columns``.
        value: what to add there.

    Example:
        >>> import torch, regard
        >>> regard.Contribution((slice(0, 2),), torch.ones(2)).value
        tensor([1., 1.])
    """

    at: Index
    value: Tensor


class Reduction(ABC):
    """A computation over an attention matrix, such as a sum or an entropy.

    To write your own, subclass Reduction and define ``start``, ``update`` and ``finish``.

    ``update`` runs on the calling thread, one block after another. On a CPU it can run on several
    threads at once, which is faster: set ``thread_safe = True`` in the class. ``update`` must then
    change only local variables. Each of these threads runs its PyTorch operations
    single-threaded and treats numbers below about 1e-38 as 0.

    Attributes:
        thread_safe: True if ``update`` may run on several threads at once; False by default. A
            subclass does not inherit it.
        reads_statistics: True if ``update`` reads no more of a block than ``box``, ``maximum``,
            ``log_normalizer``, ``logsumexp``, ``mean_shifted``, ``row_sum`` and ``visible_keys``.
            The compiled kernels of a CPU or a GPU then give them. False by default.

        by_heads: True if the axes of the answer begin with those of batch and heads. The answers of
            heads are then computed one after another, on several processes. False by default.
        by_rows: True if the axes of batch and heads are followed by that of the queries. Each
            process then answers for its own queries. False by default.

    Example:
        >>> import torch, regard
        >>> class SelfWeight(regard.Reduction):
        ...     '''The weight each query gives to its own position.'''
        ...     def start(self, shape, dtype, device):
        ...         return (torch.zeros(shape[:-1], dtype=dtype, device=device),)
        ...     def update(self, block):
        ...         offset = block.box.rows.start - block.box.columns.start
        ...         own = block.weights.diagonal(offset, dim1=-2, dim2=-1)
        ...         return (regard.Contribution(block.box.at_rows, own),)
        ...     def finish(self, buffers, shape):
        ...         return buffers[0]
        >>> x = torch.zeros(4, 1)
        >>> regard.attend(x, x).reduce(SelfWeight())
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    thread_safe: ClassVar[bool] = False
    reads_statistics: ClassVar[bool] = False
    by_heads: ClassVar[bool] = False
    by_rows: ClassVar[bool] = False

    @abstractmethod
    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Check the arguments against the matrix and return one buffer of zeros for each sum.

        A buffer for sums over many rows may be float64: it is rounded to ``dtype`` before
        ``finish``.

        Args:
            shape: the shape of the matrix, (..., num_heads, q_len, kv_len).
            dtype: the dtype of accumulated statistics, float32 or float64.
            device: the device of the matrix.
        """

    @abstractmethod
    def update(self, block: Block) -> tuple[Contribution, ...]:
        """Return what one block adds to each buffer; it must depend on the block alone."""

    @abstractmethod
    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Any:
        """Return the answer, from the filled buffers."""

    @property
    def needs(self) -> Needs:
        """The parts of a block that ``update`` reads; see ``reads_statistics``."""
        reads = self.reads_statistics
        return Needs(block=not reads, keys=reads, mean_shifted=reads)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The reduction's own tensors that gradients flow to; read them with ``block.part``.

        Keep them in attributes, or in lists, tuples and dicts there. Then a checkpoint frees them,
        and ``saved_tensors_hooks`` move them.
        """
        return ()

    @property
    def runs_on_threads(self) -> bool:
        """True if ``update`` is thread-safe, and so are the arguments of a regard reduction."""
        return vars(type(self)).get("thread_safe", False)

    @property
    def group(self) -> int:
        """Group size: a block holds whole groups of heads or lies inside one.

        It is above 1 only for a reduction that also reads a second matrix, such as
        ``KullbackLeibler``: the number of query heads that share a key head in that matrix.
        """
        return 1

    def rows(self, q_len: int) -> range:
        """Return the rows that the answer depends on; a step is one of ``box.rows``, too."""
        return range(q_len)


def rounded(buffers: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the filled buffers, with floating-point ones rounded to the dtype."""
    return tuple(total.to(dtype) if total.is_floating_point() else total for total in buffers)


def check_reductions(call: str, reductions: Sequence[object]) -> None:
    """Check that each argument of a call is an instance of a reduction.

    Raises:
        TypeError: an argument is something else, for example a reduction's class.
    """
    for reduction in reductions:
        if not isinstance(reduction, Reduction):
            came = reduction.__name__ if isinstance(reduction, type) else type(reduction).__name__
            raise TypeError(
                f"{call} got {came}; each argument must be an instance of a reduction.\n"
                "    Pass for example regard.Entropy(), regard.TopK(8)."
            )


def contributions(
    reduction: Reduction, block: RowStatistics, buffers: int
) -> Sequence[Contribution]:
    """Call ``update``, and check that it returns one contribution for each buffer.

    Raises:
        TypeError: it returns something else.
    """
    found: object = reduction.update(cast(Block, block))
    if isinstance(found, tuple | list) and not isinstance(found, Contribution):
        items = cast(Sequence[object], found)
        if len(items) == buffers and all(isinstance(item, Contribution) for item in items):
            return cast(Sequence[Contribution], items)
        came = f"{with_article(type(found).__name__)} of {len(items)}"
    else:
        came = kind_text(found)
    raise TypeError(
        f"update() of {type(reduction).__name__} returned {came}; it must return a tuple of "
        f"{count_text(buffers, 'Contribution')}, one for each buffer of start().\n"
        "    For example return (regard.Contribution(block.box.at_rows, numbers),)."
    )


class RowStatistic(Reduction):
    """A reduction with one number for each query; each block gives the numbers of its rows."""

    reads_statistics = True
    by_heads = by_rows = True

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]
