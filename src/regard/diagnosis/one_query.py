"""Functions of one query, (head_dim), and of the keys and values of one text."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.reading import Thing

__all__ = ["of_each_query"]


def of_each_query(thing: Thing) -> Callable[..., Tensor] | None:
    """Return a function that calls another one for each query of each sample; None for no such.

    Its query is (batch, q_len, head_dim), its key and value are (batch, kv_len, head_dim).
    """
    roles = [thing.of(role) for role in ("query", "key", "value")]
    names = [argument.name for argument in roles if argument is not None]
    if len(names) < 3 or isinstance(thing.call, torch.nn.Module):
        return None
    query, *others = names

    @wraps(thing.call)
    def each(*args: Any, **kwargs: Any) -> Tensor:
        given = inspect.signature(thing.call).bind(*args, **kwargs).arguments
        rows = [
            [
                thing.call(**{**given, query: row, **{own: given[own][b] for own in others}})
                for row in sample
            ]
            for b, sample in enumerate(given[query])
        ]
        return torch.stack([torch.stack(own) for own in rows])

    return each
