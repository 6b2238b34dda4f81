"""Code of one query, (head_dim) or (batch, head_dim), and of the keys and values of texts."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.inputs.lab import as_tensors
from regard.diagnosis.inputs.reading import CONTENTS, Thing
from regard.diagnosis.inputs.signature import signature_of
from regard.diagnosis.inputs.subject import independent


def things_of_queries(thing: Thing) -> Iterator[Thing]:
    """Yield code that calls other code for each query of each sample, or for each query.

    It takes queries (batch, q_len, dim) and texts (batch, kv_len, dim); the other code takes one
    query, (dim), with the text of one sample, or one of each sample, (batch, dim).
    """
    needed = [argument for argument in thing.arguments if argument.required]
    if len(needed) < 2 or any(argument.role not in CONTENTS for argument in needed):
        return
    query, *texts = needed
    if thing.kind == "qkv" and not isinstance(thing.call, nn.Module):
        names = [argument.name for argument in texts]
        yield replace(thing, call=_for_each(thing.call, query.name, names))
    yield replace(thing, call=_for_each(thing.call, query.name))


def of_queries(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Return code that takes many queries of each sample, and an example call of it.

    Args:
        call: takes one query, (dim), beside the text of one sample, (tokens, dim), or one of each
            sample, (batch, dim), beside (batch, tokens, dim).
        args: of an example call, by position.
        kwargs: by name.

    Returns:
        None for code of another example.
    """
    try:
        passed = signature_of(call).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    floats = {n: t for n, t in passed.items() if isinstance(t, Tensor) and t.is_floating_point()}
    if not floats:
        return None
    (name, query), *others = floats.items()
    texts = dict(others)
    if query.ndim == 1 and len(texts) == len(passed) - 1:
        batched = {n: t[None].expand(2, *t.shape) for n, t in texts.items()}
        query, alone = query.expand(2, -1), [*texts]
    else:
        batched, alone = texts, list[str]()
    read = [t for t in batched.values() if t.ndim == 3 and t.shape[:1] == query.shape[:1]]
    if query.ndim != 2 or not read or any(t.ndim == 2 for t in batched.values()):
        return None
    queries = query[:, None].expand(-1, read[0].shape[1], -1)
    return _for_each(call, name, alone), {**passed, **batched, name: queries}


def _for_each(
    call: Callable[..., Any], name: str, alone: Collection[str] = ()
) -> Callable[..., Any]:
    """Return code that calls other code for each of the queries that an argument holds.

    Args:
        call: the other code.
        name: the argument of its query.
        alone: those that hold the text of one sample; none if it takes a batch.
    """
    if not isinstance(call, nn.Module):
        return wraps(call)(partial(_called_for_each, call, name, alone))
    many = independent(call)
    one = many.forward
    vars(many)["forward"] = wraps(one)(partial(_called_for_each, one, name, alone))
    return many


def _called_for_each(
    one: Callable[..., Any], name: str, alone: Collection[str], *args: Any, **kwargs: Any
) -> list[Tensor]:
    passed = inspect.signature(one).bind(*args, **kwargs).arguments
    if not alone:
        return _stacked([one(**{**passed, name: q}) for q in passed[name].unbind(1)], 1)
    samples: list[Any] = []
    for b, queries in enumerate(passed[name]):
        text = {**passed, **{argument: passed[argument][b] for argument in alone}}
        samples.append(_stacked([one(**{**text, name: q}) for q in queries], 0))
    return _stacked(samples, 0)


def _stacked(results: Sequence[Any], axis: int) -> list[Tensor]:
    """Return the tensors of several results, each of them stacked."""
    return [torch.stack(tensors, axis) for tensors in zip(*map(as_tensors, results), strict=True)]
