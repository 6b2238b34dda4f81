"""Attention without some keys, such as sinks: each row is a softmax over the other keys."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from regard.masks import Keep
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.real_tokens import numbers_of
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import MASKED_SCORE


def without_keys(matrix: AttentionMatrix, keys: Sequence[int]) -> AttentionMatrix:
    """Return a matrix with some keys masked, and without a sink beside the scores.

    The softmax is computed again over the other keys, because next to a dominant sink their weights
    would round to 0. A row that attends to the masked keys alone is 0: a bias or a given score so
    low that it masks (-5,000) is one of no other key, unless all keys of the row are as low.

    Example:
        >>> import torch, regard
        >>> from regard.recording.without_keys import without_keys
        >>> A = regard.AttentionMatrix.from_scores(torch.tensor([[3.0, 2.0, 2.0]]))
        >>> without_keys(A, (0,)).to_dense()
        tensor([[0.0000, 0.5000, 0.5000]])
    """
    if not keys:
        return matrix
    visible = torch.ones(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    visible[torch.tensor(keys, device=matrix.device)] = False
    if (numbers := numbers_of(matrix)) is not None:
        low = numbers.detach() <= MASKED_SCORE
        visible = visible & (~low | low.all(-1, keepdim=True))
    mask = Keep(visible).bind(matrix.shape, matrix.device)
    source = matrix.source
    if isinstance(source, QueryKeyScores):
        source = replace(source, sink_bias=None)
    return AttentionMatrix(source, mask if matrix.mask is None else matrix.mask & mask)
