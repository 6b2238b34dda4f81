"""Explanations of how a question would be computed, in words."""

from dataclasses import dataclass

from torch import Tensor

from regard.backends.choose import BACKENDS, choice
from regard.backends.distributed.sharded_scores import ShardedScores
from regard.errors import bytes_text, kind_text
from regard.matrix.attention_matrix import AttentionMatrix
from regard.reductions.products import Output
from regard.reductions.reduction import Reduction, check_reductions
from regard.scores.query_key import QueryKeyScores


@dataclass(frozen=True)
class Explanation:
    """The backend that would answer, the reason for the choice, and the memory it needs.

    ``str`` gives one line for the backend, and one for each backend that refuses.

    Attributes:
        backend: "sdpa", "triton", "cpu" or "sweep".
        how: how the backend computes the answer, in a phrase.
        refusals: for each backend that comes before this one in the table, why it does not answer.
        memory: an estimate of the bytes needed in addition to the inputs, including the answers
            but not the memory of a backward pass.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(16384, 64)
        >>> found = regard.explain(regard.attend(x, x, mask=regard.Causal()), regard.Entropy())
        >>> found.backend, found.refusals
        ('cpu', {'sdpa': 'no fused kernel gives Entropy'})
    """

    backend: str
    how: str
    refusals: dict[str, str]
    memory: int

    def __str__(self) -> str:
        """Return a line for the backend and its memory, and one for each backend that refuses."""
        lines = [f"{self.backend}: {self.how}; {bytes_text(self.memory)} of memory."]
        lines += [f"    Not {name}: {reason}." for name, reason in self.refusals.items()]
        return "\n".join(lines)


def explain(matrix: AttentionMatrix, *reductions: Reduction) -> Explanation:
    """Return which backend would answer, why, and the memory it needs, without computing anything.

    Args:
        matrix: the attention matrix.
        reductions: the arguments of one ``reduce``. The default is the product ``A @ value``, with
            a value as wide as the key, or of one column for given scores or weights.

    Returns:
        An explanation; print it to read it.

    Raises:
        TypeError: matrix is not an AttentionMatrix, or an argument is not a reduction.
        ValueError: a reduction does not fit the matrix.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(8, 4096, 64)
        >>> print(regard.explain(regard.attend(x, x, mask=regard.Causal())))
        sdpa: one fused causal call; 8 MiB of memory.
    """
    if not isinstance(matrix, AttentionMatrix):
        raise TypeError(
            f"matrix is {kind_text(matrix)}; explain() needs an AttentionMatrix.\n"
            "    Make one with regard.attend(query, key)."
        )
    check_reductions("explain()", reductions)
    asked = reductions or (Output(_any_value(matrix)),)
    name, refusals = choice(matrix.source, matrix.mask, asked)
    how, memory = BACKENDS[name].describe(matrix.source, matrix.mask, asked)
    return Explanation(name, how, refusals, memory)


def _any_value(matrix: AttentionMatrix) -> Tensor:
    source = matrix.source
    if isinstance(source, QueryKeyScores | ShardedScores):
        return source.key
    return source.tensors[0][..., 0, :, None]
