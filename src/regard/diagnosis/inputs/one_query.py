"""Functions of one query, (head_dim), and of the keys and values of one text."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from regard.diagnosis.inputs.reading import Thing


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
    def call_for_each(*args: Any, **kwargs: Any) -> Tensor:
        passed = inspect.signature(thing.call).bind(*args, **kwargs).arguments

        def of_sample(b: int) -> Tensor:
            text = {**passed, **{name: passed[name][b] for name in others}}
            return torch.stack([thing.call(**{**text, query: row}) for row in passed[query][b]])

        return torch.stack([of_sample(b) for b in range(len(passed[query]))])

    return call_for_each
