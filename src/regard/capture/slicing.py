"""Parts of the matrix of a query and a key: some heads, some queries, keys without repetition."""

from dataclasses import replace
from math import gcd
from typing import cast

import torch
from torch import Tensor

from regard.matrix.attention_matrix import AttentionMatrix
from regard.scores.given_scores import GivenScores
from regard.scores.query_key import QueryKeyScores
from regard.scores.score_source import reads_without_sync


def unrepeated(matrix: AttentionMatrix) -> AttentionMatrix:
    """Return the same attention, with one key for each group of heads that share it.

    Models repeat the keys of grouped-query attention before they call a function without groups.
    """
    source = matrix.source
    if not isinstance(source, QueryKeyScores) or source.group > 1 or not _may_look(matrix, source):
        return matrix
    key = drop_repeated_heads(source.key)
    return matrix if key is source.key else AttentionMatrix(replace(source, key=key), matrix.mask)


def _may_look(matrix: AttentionMatrix, source: QueryKeyScores) -> bool:
    """Return True if comparing the keys adds no device synchronisation."""
    of_mask = () if matrix.mask is None else matrix.mask.tensors
    return reads_without_sync(source.key) or bool(of_mask) or source.bias is not None


def some_heads(matrix: AttentionMatrix, heads: list[int]) -> AttentionMatrix:
    """Return the attention of some heads, in this order, (..., len(heads), q_len, kv_len).

    Keys stay shared if the same number of heads was chosen from each group.
    """
    at = torch.tensor(heads, device=matrix.device)

    def chosen(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[-3] == 1 else tensor.index_select(-3, at)

    if isinstance(matrix.source, GivenScores):
        return AttentionMatrix(matrix.source.map(chosen))
    source = cast(QueryKeyScores, matrix.source)
    source = replace(
        source,
        query=source.query.index_select(-3, at),
        key=_keys(source.key, [head // source.group for head in heads]),
        bias=None if source.bias is None else chosen(source.bias),
        position_bias=source.position_bias and source.position_bias.map(chosen),
        score_mod=source.score_mod and source.score_mod.map(chosen),
        sink_bias=None if source.sink_bias is None else chosen(source.sink_bias),
    )
    return AttentionMatrix(source, None if matrix.mask is None else matrix.mask.map(chosen))


def _keys(key: Tensor, kv_heads: list[int]) -> Tensor:
    """Return the key of each chosen head; one per group if all groups have the same size."""
    distinct = list(dict.fromkeys(kv_heads))
    group = len(kv_heads) // len(distinct)
    even = kv_heads == [head for head in distinct for _ in range(group)]
    return key.index_select(-3, torch.tensor(distinct if even else kv_heads, device=key.device))


def value_heads(value: Tensor, matrix: AttentionMatrix, heads: list[int] | None) -> Tensor:
    """Return the value of some heads of a matrix, or of all with None.

    The value is (..., num_kv_heads, kv_len, head_dim) or (..., num_heads, kv_len, head_dim). If
    heads share a key, equal values of neighbouring heads are also shared.
    """
    if value.ndim < 3:
        return value
    num_heads = matrix.shape[-3] if matrix.ndim > 2 else 1
    if matrix.source.group > 1 and value.shape[-3] == num_heads:
        value = drop_repeated_heads(value)
    shared = num_heads // value.shape[-3]
    return value if heads is None else _keys(value, [head // shared for head in heads])


def some_queries(matrix: AttentionMatrix, rows: range) -> AttentionMatrix:
    """Return the attention of some queries to all keys, as views; row i is query ``rows[i]``."""
    q_len = matrix.shape[-2]
    if rows == range(q_len):
        return matrix
    if isinstance(matrix.source, GivenScores):
        some = matrix.source.values[..., rows.start : rows.stop, :]
        return AttentionMatrix(replace(matrix.source, values=some))
    source = cast(QueryKeyScores, matrix.source)
    changed = source.rows(slice(rows.start, rows.stop), rows, q_len)
    mask = None if matrix.mask is None else matrix.mask.rows(rows, q_len)
    return AttentionMatrix(changed, mask)


def drop_repeated_heads(key: Tensor) -> Tensor:
    """Return the key with one head for each group of equal neighbours.

    The key is returned unchanged if it has no such groups of one size.
    """
    if key.ndim < 3 or key.shape[-3] == 1:
        return key
    num_heads = key.shape[-3]
    probe = key[..., :1, :]
    same = (probe[..., 1:, :, :] == probe[..., :-1, :, :]).flatten(-2).all(-1)
    fresh = (~same).flatten(0, -2).any(0) if same.ndim > 1 else ~same
    # One copy of all results to the CPU: each copy waits for the device.
    differs = cast(list[bool], fresh.tolist())
    group = gcd(num_heads, *(head for head, is_new in enumerate(differs, 1) if is_new))
    if group == 1:
        return key
    first, *repeats = cast(Tensor, key.unflatten(-3, (-1, group))).unbind(-3)
    # Heads are compared one by one: comparing with an expanded tensor takes 1.5 times as long.
    return first if all(torch.equal(first, each) for each in repeats) else key
