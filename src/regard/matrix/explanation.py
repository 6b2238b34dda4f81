"""Which way an answer would be computed, why that one, and what it would cost, in words."""

from dataclasses import dataclass

from torch import Tensor

from regard.backends.choose import BACKENDS, choice
from regard.errors import bytes_text, kind_text, readable
from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.products import Output
from regard.reductions.reduction import Reduction, check_reductions
from regard.scores.query_key import QueryKeyScores

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """How a question would be answered, and what that costs; ``str`` says it in words.

    Costs are those of the answer itself. Its gradient takes about two and a half times as much
    again.

    Attributes:
        backend: "sdpa", "triton" or "sweep".
        how: what it does.
        refusals: why the backends before it in the table do not answer.
        flops: floating-point operations of the matrix products.
        forward_flops: those of one dense attention forward; 0 for scores that are given.
        held: the bytes held at once beside the inputs, the answers included.
        read: the bytes of the inputs that are read, again for every block of rows.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(16384, 64)
        >>> A = regard.attend(x, x, mask=regard.SlidingWindow(255, 0))
        >>> found = regard.explain(A)
        >>> found.backend, round(found.flops / found.forward_flops, 2)
        ('sdpa', 0.02)
    """

    backend: str
    how: str
    refusals: tuple[str, ...]
    flops: int
    forward_flops: int
    held: int
    read: int

    def __str__(self) -> str:
        """Two lines: the way and why, the costs."""
        share = ""
        if self.forward_flops:
            share = f" ({self.flops / self.forward_flops:.2f} of one forward)"
        work = readable(self.flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))
        return (
            f"{self.backend}: {'; '.join((self.how, *self.refusals))}.\n"
            f"    {work}{share}, {bytes_text(self.held)} held, {bytes_text(self.read)} read."
        )


def explain(matrix: AttentionMatrix, *reductions: Reduction) -> Explanation:
    """Which backend would answer, why that one, and what it would cost; nothing is computed.

    Args:
        matrix: the attention matrix.
        reductions: what would be asked in one ``reduce``; without any, ``A @ value`` with a value
            as wide as the key (for given scores, of one column).

    Returns:
        The backend, the reasons and the costs; print it to read them.

    Raises:
        TypeError: matrix is no attention matrix, or an argument is no reduction.
        ValueError: a reduction that does not fit the matrix.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(8, 4096, 64)
        >>> print(regard.explain(regard.attend(x, x, mask=regard.Causal())))
        sdpa: one fused causal call.
            18.3 GFLOP (0.53 of one forward), 8 MiB held, 152 MiB read.
    """
    if not isinstance(matrix, AttentionMatrix):
        raise TypeError(
            f"matrix is {kind_text(matrix)}; explain() needs an AttentionMatrix.\n"
            "    Make one with regard.attend(query, key)."
        )
    check_reductions("explain()", reductions)
    source, mask = matrix.source, matrix.mask
    asked = reductions or (Output(_any_value(matrix)),)
    name, refusals = choice(source, mask, asked)
    plan = BACKENDS[name].plan(source, mask, asked)
    head_dim = source.query.shape[-1] if isinstance(source, QueryKeyScores) else 0
    forward = 4 * source.shape.numel() * head_dim
    return Explanation(name, plan.how, refusals, plan.flops, forward, plan.held, plan.read)


def _any_value(matrix: AttentionMatrix) -> Tensor:
    source = matrix.source
    return source.key if isinstance(source, QueryKeyScores) else source.tensors[0][..., 0, :, None]
