"""Divergences between the rows of two attention matrices, the losses of distillation.

Each takes one pass over both matrices and forms neither.
"""

from typing import cast

import torch
from torch import Tensor

from regard.errors import check_same_device, shape_text
from regard.matrix.attention_matrix import AttentionMatrix, check_attention_matrix
from regard.reductions.divergences import JensenShannon, KullbackLeibler
from regard.reductions.row_statistics import Entropy
from regard.scores.score_source import accumulation_dtype


def kl(A: AttentionMatrix, B: AttentionMatrix) -> Tensor:
    """Compute the Kullback-Leibler divergence of each row of A from that of B, in nats.

    It is ``sum over j of A[i, j] (log A[i, j] - log B[i, j])``, which is 0 for equal rows. A key
    without weight in A adds 0. If a row of A may attend to a key that B masks, the row's divergence
    is inf, however small the weight of that key. A row of A without keys gives 0. With a sink_bias
    the sum covers the keys alone, and can be below 0.

    Args:
        A: (..., num_heads, q_len, kv_len); in distillation the teacher, ``teacher.detach()``.
        B: of the same shape; head_dim, masks, dtypes and kinds of scores may differ.

    Returns:
        (..., num_heads, q_len), float32, or float64 if A or B is; differentiable in both.

    Raises:
        TypeError: A or B is not an AttentionMatrix.
        ValueError: their shapes or devices differ.

    Example:
        >>> import torch, regard
        >>> teacher = regard.AttentionMatrix.from_weights(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> student = regard.AttentionMatrix.from_weights(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
        >>> regard.kl(teacher, student)
        tensor([0.1438, 0.6931])

    Source:
        Wang et al. 2020, "MiniLM: Deep Self-Attention Distillation", section 3.1.
    """
    asked, other = _checked(A, B)
    return cast(Tensor, asked.reduce(KullbackLeibler(other.source, other.mask)))


def cross_entropy(A: AttentionMatrix, B: AttentionMatrix) -> Tensor:
    """Compute the cross-entropy of each row of B relative to that of A, in nats.

    It is ``-sum over j of A[i, j] log B[i, j]``, the entropy of A plus ``kl(A, B)``. As a loss for
    B it has the gradient of ``kl``. The conventions are those of ``kl``.

    Args:
        A: (..., num_heads, q_len, kv_len); in distillation the teacher, ``teacher.detach()``.
        B: of the same shape; head_dim, masks, dtypes and kinds of scores may differ.

    Returns:
        (..., num_heads, q_len), float32, or float64 if A or B is; differentiable in both.

    Raises:
        TypeError: A or B is not an AttentionMatrix.
        ValueError: their shapes or devices differ.

    Example:
        >>> import torch, regard
        >>> teacher = regard.AttentionMatrix.from_weights(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> student = regard.AttentionMatrix.from_weights(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
        >>> regard.cross_entropy(teacher, student)
        tensor([0.8370, 0.6931])
    """
    asked, other = _checked(A, B)
    divergence, entropy = asked.reduce(KullbackLeibler(other.source, other.mask), Entropy())
    return divergence + entropy


def js(A: AttentionMatrix, B: AttentionMatrix) -> Tensor:
    """Compute the Jensen-Shannon divergence of each row of A and B, in nats, from 0 to log 2.

    It is the mean of the Kullback-Leibler divergences of both rows from their mean. It is
    symmetric, and finite where masks differ: log 2 if the rows share no key, half of that if one
    row has no keys.

    Args:
        A: (..., num_heads, q_len, kv_len).
        B: of the same shape; head_dim, masks, dtypes and kinds of scores may differ.

    Returns:
        (..., num_heads, q_len), float32, or float64 if A or B is; differentiable in both.

    Raises:
        TypeError: A or B is not an AttentionMatrix.
        ValueError: their shapes or devices differ.

    Example:
        >>> import torch, regard
        >>> one = regard.AttentionMatrix.from_weights(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        >>> other = regard.AttentionMatrix.from_weights(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> regard.js(one, other)
        tensor([0.6931, 0.0000])

    Source:
        Lin 1991, "Divergence Measures Based on the Shannon Entropy".
    """
    asked, other = _checked(A, B)
    return cast(Tensor, asked.reduce(JensenShannon(other.source, other.mask)))


def _checked(A: object, B: object) -> tuple[AttentionMatrix, AttentionMatrix]:
    """Return both matrices in one accumulation dtype."""
    asked, other = check_attention_matrix("A", A), check_attention_matrix("B", B)
    if other.shape != asked.shape:
        raise ValueError(
            f"B has shape {shape_text(other.shape)} and A has {shape_text(asked.shape)}; both must "
            "have one shape, (..., num_heads, q_len, kv_len).\n"
            "    Take the same part of both, such as A[:, :4]."
        )
    check_same_device("B", other.device, "A", asked.device, f"B.to({str(asked.device)!r})")
    wide = accumulation_dtype(torch.promote_types(asked.dtype, other.dtype))
    if wide == torch.float32:
        return asked, other
    return asked.to(wide), other.to(wide)
