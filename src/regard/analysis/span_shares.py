"""The shares of attention from each part of a text to each other part, by layer and head."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal, cast

import torch
from torch import Tensor

from regard.errors import (
    check_index_bounds,
    check_progress,
    check_spans,
    check_whole,
    count_text,
    kind_text,
)
from regard.recording.layers import one_text, shape_of_all
from regard.recording.recording import Recording, check_recording
from regard.recording.without_keys import without_keys
from regard.reductions.sums import Segments
from regard.text.tables import Cell, Table

_MOST_KEYS = 8


@dataclass(frozen=True, eq=False)
class Shares:
    """The attention from each part of the queries to each part of the keys.

    Entry [layer, head, i, j] is the total weight from a query to the keys of part j, averaged over
    the queries of part i. If the parts cover all keys, each row sums to 1.
    ``regard.segment_shares(seen, ...)`` returns one.

    Attributes:
        weights: (layers, num_heads, query parts, key parts).
        layers: the names of the layers.
        queries: the names of the parts of the queries.
        keys: the names of the parts of the keys.
        indices: for each layer, its index in the model and the indices of its heads there.
        sinks: the positions of the keys that are ignored; empty if sinks count.
        over: the part of the queries whose shares were subtracted; None for plain shares.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 4, 2), torch.zeros(2, 4, 2))
        >>> seen = regard.Recording({"layer": even})
        >>> regard.segment_shares(seen, {"question": (0, 1), "document": (1, 4)})
        Shares of 1 layer with 2 heads; the mean over all of them:
                  question  document
        question    0.2500    0.7500
        document    0.2500    0.7500
    """

    weights: Tensor
    layers: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    indices: tuple[tuple[int, tuple[int, ...]], ...]
    sinks: tuple[int, ...] = ()
    over: str | None = None

    def beyond(self, query: str) -> "Shares":
        """Subtract the shares of one part of the queries from the shares of all other parts.

        The difference removes attention that does not depend on the question: attention to unknown
        sinks, to neighbours and to long parts. The method is ours; ``docs/heads.md`` has
        measurements.

        Args:
            query: a part of the queries that can attend to the same keys and precedes the question,
                such as ``Question:`` after the documents.

        Returns:
            The shares of the other parts of the queries; each is a difference from -1 to 1.

        Raises:
            ValueError: there is no such part or no other part, or the shares are already
                differences.

        Example:
            >>> import torch, regard
            >>> weights = torch.tensor([[0.8, 0.1, 0.1], [0.8, 0.1, 0.1], [0.7, 0.1, 0.2]])
            >>> A = regard.AttentionMatrix.from_weights(weights)
            >>> parts = {"first": (0, 1), "second": (1, 2), "third": (2, 3)}
            >>> queries = {"before": (1, 2), "answer": (2, 3)}
            >>> seen = regard.Recording({"layer": A})
            >>> shares = regard.segment_shares(seen, parts, queries=queries)
            >>> shares.beyond("before")
            Shares of 1 layer with 1 head, beyond those of 'before'; the mean over all of them:
                      first  second   third
            answer  -0.1000  0.0000  0.1000
        """
        if self.over is not None or query not in self.queries or len(self.queries) < 2:
            parts = ", ".join(map(repr, self.queries))
            raise ValueError(
                f"query is {query!r}; it must be one of several parts of plain shares, not of "
                f"{parts}{'' if self.over is None else f' beyond {self.over!r}'}.\n"
                '    Ask for both, queries={"before": ..., "answer": ...}.'
            )
        row = self.queries.index(query)
        others = [i for i in range(len(self.queries)) if i != row]
        weights = self.weights[..., others, :] - self.weights[..., row : row + 1, :]
        queries = tuple(self.queries[i] for i in others)
        return replace(self, weights=weights, queries=queries, over=query)

    def total(self) -> Tensor:
        """Return the mean over all layers and heads, (query parts, key parts)."""
        return self.weights.mean((0, 1))

    def table(self, per: Literal["head", "layer", "total"] = "head") -> Table:
        """Return a table with a row for each pair of parts; its share is the mean weight.

        Args:
            per: "head" has rows for each layer and head; "layer" has the mean over the heads of
                each layer; "total" has the mean over all layers and heads.

        Raises:
            ValueError: per has another value.
        """
        heads = [(layer, head) for layer, heads in self.indices for head in heads]
        owners: list[tuple[int, ...]]
        match per:
            case "head":
                owners, weights = [*heads], self.weights.flatten(0, 1)
            case "layer":
                owners, weights = [(layer,) for layer, _ in self.indices], self.weights.mean(1)
            case "total":
                owners, weights = [()], self.total()[None]
            case _:
                raise ValueError(f"per is {per!r}; it must be 'head', 'layer' or 'total'.")
        rows = [
            (*owner, query, key) for owner, query, key in product(owners, self.queries, self.keys)
        ]
        names = [*("layer", "head")[: len(owners[0])], "query", "key"]
        columns: dict[str, Sequence[Cell]] = dict(zip(names, zip(*rows, strict=True), strict=True))
        columns["share"] = cast(list[float], weights.flatten().tolist())
        return Table(columns)

    def __repr__(self) -> str:
        """Return the mean over all layers and heads as text: queries down, keys across."""
        layers, num_heads = self.weights.shape[:2]
        columns: dict[str, Sequence[Cell]] = {" ": self.queries}
        by_key = cast(list[list[float]], self.total().T.tolist())
        columns |= dict(zip(self.keys[:_MOST_KEYS], by_key, strict=False))
        more = len(self.keys) - _MOST_KEYS
        rest = f"\n... {more} more parts of the keys, in .table('total')" if more > 0 else ""
        of = f"{count_text(layers, 'layer')} with {count_text(num_heads, 'head')}"
        without = f", without {count_text(len(self.sinks), 'sink')}" if self.sinks else ""
        beyond = f", beyond those of {self.over!r}" if self.over is not None else ""
        table = repr(Table(columns))
        return f"Shares of {of}{without}{beyond}; the mean over all of them:\n{table}{rest}"


def segment_shares(
    seen: Recording,
    parts: Mapping[str, tuple[int, int]],
    *,
    queries: Mapping[str, tuple[int, int]] | None = None,
    sinks: bool | Sequence[int] = True,
    progress: Callable[[int, int], None] | None = None,
) -> Shares:
    """Return how much each part of the text attends to each other part, per layer and head.

    Args:
        seen: the recording.
        parts: for each name the span (start, stop) of its key tokens; spans must not overlap.
            ``regard.spans`` finds words, sentences, and the matches of a pattern.
        queries: the parts of the queries, counted from the first recorded query. The default is
            ``parts``, limited to the recorded queries.
        sinks: if False, ignore the weight on the first position and on special tokens, and
            renormalise each row. A sequence of positions ignores these positions instead. A query
            that attends to nothing else is ignored.
        progress: called with the number of finished layers and the number of layers.

    Returns:
        The shares, (layers, num_heads, query parts, key parts). They print as their mean;
        ``.table()`` holds all of them.

    Raises:
        TypeError: parts is not a mapping from names to spans, or sinks are not positions.
        ValueError: a part is empty, reaches beyond the text, or overlaps another; no part has a
            recorded query; layers differ in shape, or hold several texts.
        IndexError: a sink lies beyond the text.
        RegardError: query and key were not recorded.

    Example:
        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> seen = regard.Recording({"layer": regard.attend(x, x, mask=regard.Causal())})
        >>> parts = {"start": (0, 1), "rest": (1, 4)}
        >>> regard.segment_shares(seen, parts, sinks=False).total()
        tensor([[0., 0.],
                [0., 1.]])
    """
    layers = check_recording("seen", seen).layers
    check_progress(progress)
    _, q_len, kv_len = shape_of_all("segment_shares", layers)
    key_parts = checked_parts("parts", parts, "kv_len", kv_len)
    if queries is None:
        query_parts = _recorded_parts(seen, key_parts)
    else:
        query_parts = checked_parts("queries", queries, "q_len", q_len)
    out = _sinks(seen, sinks, kv_len)
    question = Segments(query_parts, key_parts)
    answers: list[Tensor] = []
    for layer in layers:
        if out:
            apart, spans = without_keys(layer.whole(), out), [*key_parts.values(), (0, kv_len)]
            answer = shares_of_rest(apart.segments(list(query_parts.values()), spans))
        else:
            answer = layer.reduce(question)
        answers.append(answer.reshape(-1, len(query_parts), len(key_parts)))
        if progress is not None:
            progress(len(answers), len(layers))
    names = tuple(layer.name for layer in layers)
    weights = torch.stack(answers)
    indices = tuple(
        (layer.model_index(index), tuple(map(layer.head, range(weights.shape[1]))))
        for index, layer in enumerate(layers)
    )
    return Shares(weights, names, tuple(query_parts), tuple(key_parts), indices, out)


def shares_of_rest(answer: Tensor) -> Tensor:
    """Return the shares of a matrix without some keys, (..., query parts, key parts).

    A query that attends to no other key is left out of the mean.

    Args:
        answer: its segments; the last key part is all keys, whose share is the part of the queries
            whose weights sum to 1, not to 0.
    """
    counted = answer[..., -1:]
    return answer[..., :-1] / counted.where(counted > 0, 1)


def _recorded_parts(
    seen: Recording, parts: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return the parts of the text, limited to the recorded queries and counted from the first."""
    rows, kv_len = seen.layers[0].positions, seen.layers[0].shape[-1]
    inside: dict[str, tuple[int, int]] = {}
    if all(layer.reads_itself and layer.positions == rows for layer in seen.layers) and one_text(
        seen.query_tokens, seen.key_tokens, rows
    ):
        inside = {
            name: (max(start, rows.start) - rows.start, min(stop, rows.stop) - rows.start)
            for name, (start, stop) in parts.items()
            if start < rows.stop and stop > rows.start
        }
    if not inside:
        raise ValueError(
            "queries is None; it must be given where queries and keys are different texts, or the "
            f"parts have no recorded query: {rows.start} to {rows.stop - 1}, with kv_len = "
            f"{kv_len}.\n    Give the parts of the queries, {{name: (start, stop)}}, counted from "
            "the first query that was kept."
        )
    return inside


def checked_parts(
    argument: str, parts: Mapping[str, Sequence[int]], length_name: str, length: int
) -> dict[str, tuple[int, int]]:
    """Validate the parts of a text, and return their spans (start, stop) by name.

    Args:
        argument: the name of the argument, for errors.
        parts: the argument.
        length_name: "kv_len" or "q_len", for errors.
        length: the number of tokens.

    Raises:
        TypeError: parts is not a mapping from names to spans.
        ValueError: there are no parts, or a part is empty, reaches beyond the text or overlaps
            another.
    """
    if not isinstance(cast(object, parts), Mapping):
        raise TypeError(
            f"{argument} is {kind_text(parts)}; it must be a mapping from names to spans.\n"
            '    Give {"question": (0, 9)}, or regard.spans.by_sentence(tokens).'
        )
    checked = dict(zip(parts, check_spans(argument, parts, length_name, length), strict=True))
    rising = sorted(checked.items(), key=lambda part: part[1])
    for (before, span), (after, next_span) in pairwise(rising):
        if next_span[0] < span[1]:
            raise ValueError(
                f"{argument} has {span} for {before!r} and {next_span} for {after!r}, which "
                "overlap; parts must lie apart, so that no weight counts twice.\n"
                "    Ask twice, once for each."
            )
    return checked


def _sinks(seen: Recording, sinks: bool | Sequence[int], kv_len: int) -> tuple[int, ...]:
    """Return the positions to ignore in order: the given ones, or those that recordings have."""
    if sinks is True:
        return ()
    if sinks is not False:
        positions = (check_index_bounds(check_whole("sinks", each), kv_len, -1) for each in sinks)
        return tuple(sorted(set(positions)))
    special = {index for index, token in enumerate(seen.key_tokens or ()) if token.special}
    texts = [text for layer in seen.layers for text in layer.texts]
    if not texts:  # padding cannot be detected from answers
        return tuple(sorted({0, *special}))
    text = range(min(each.start for each in texts), max(each.stop for each in texts))
    return tuple(sorted({text.start, *special.intersection(text)}))
