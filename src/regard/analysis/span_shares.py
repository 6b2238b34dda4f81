"""The shares of attention from each part of a text to each other part, by layer and head."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from regard.errors import RegardError, check_memory, check_progress, count_text, is_whole, kind_text
from regard.recording.layers import Layer, one_text, shape_of_all
from regard.recording.recording import Recording
from regard.reductions.block import Block
from regard.reductions.reduction import Contribution, Reduction
from regard.reductions.sums import Segments
from regard.scores.score_source import lowest_score
from regard.text.tables import Cell, Table
from regard.text.tokens import Token

__all__ = ["Shares", "checked_parts", "segment_shares"]

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
        places: for each layer, its index in the model and the indices of its heads there.
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
    places: tuple[tuple[int, tuple[int, ...]], ...]
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
            >>> asked = {"before": (1, 2), "answer": (2, 3)}
            >>> drawn = regard.segment_shares(regard.Recording({"layer": A}), parts, queries=asked)
            >>> drawn.beyond("before")
            Shares of 1 layer with 1 head, beyond those of 'before'; the mean over all of them:
                      first  second   third
            answer  -0.1000  0.0000  0.1000
        """
        if self.over is not None or query not in self.queries or len(self.queries) < 2:
            has = f"beyond {self.over!r}, of " if self.over is not None else ""
            raise ValueError(
                f"query is {query!r}; the shares are {has}{', '.join(map(repr, self.queries))}, "
                "and it must be one of several.\n"
                '    Ask for both, segments(parts, queries={"before": ..., "answer": ...}), '
                'then .beyond("before").'
            )
        place = self.queries.index(query)
        others = [i for i in range(len(self.queries)) if i != place]
        weights = self.weights[..., others, :] - self.weights[..., place : place + 1, :]
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
        if per not in ("head", "layer", "total"):
            raise ValueError(
                f"per is {per!r}; it must be 'head', 'layer' or 'total'.\n"
                "    It says over what the mean is taken: nothing, heads, layers and heads."
            )
        axes = {"head": (), "layer": (1,), "total": (0, 1)}[per]
        values = self.weights.mean(axes, keepdim=True) if axes else self.weights
        places = list(zip(*product(*map(range, values.shape)), strict=True))
        columns: dict[str, Sequence[Cell]] = {}
        if per != "total":
            columns["layer"] = [self.places[layer][0] for layer in places[0]]
        if per == "head":
            columns["head"] = [
                self.places[layer][1][head] for layer, head in zip(*places[:2], strict=True)
            ]
        columns["query"] = [self.queries[place] for place in places[2]]
        columns["key"] = [self.keys[place] for place in places[3]]
        columns["share"] = values.flatten().tolist()
        return Table(columns)

    def __repr__(self) -> str:
        """Return the mean over all layers and heads as text: queries down, keys across."""
        layers, num_heads = self.weights.shape[:2]
        columns: dict[str, Sequence[Cell]] = {" ": [_short(name) for name in self.queries]}
        by_key = cast(list[list[float]], self.total().T[:_MOST_KEYS].tolist())
        for name, shares in zip(self.keys, by_key, strict=False):
            columns[_short(name) if _short(name) not in columns else name] = shares
        more = len(self.keys) - len(by_key)
        rest = f"\n... {more} more parts of the keys, in .table('total')" if more else ""
        of = f"{count_text(layers, 'layer')} with {count_text(num_heads, 'head')}"
        without = f", without {count_text(len(self.sinks), 'sink')}" if self.sinks else ""
        if self.over is not None:
            without += f", beyond those of {_short(self.over)!r}"
        return f"Shares of {of}{without}; the mean over all of them:\n{Table(columns)!r}{rest}"


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"


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
    layers = seen.layers
    query_tokens, key_tokens = seen.query_tokens, seen.key_tokens
    check_progress(progress)
    *_, kv_len = shape_of_all("segment_shares", layers)
    key_parts = checked_parts("parts", parts, "kv_len", kv_len)
    if queries is None:
        _check_one_text(layers, query_tokens, key_tokens)
        query_parts = key_parts if _all_ran(layers) else _recorded_parts(layers, key_parts)
    else:
        query_parts = _checked_queries(queries, layers[0])
    out = _own_sinks(layers, key_tokens) if sinks is False else _named_sinks(sinks, kv_len)
    question = Segments(query_parts, key_parts)
    without = _WithoutSinks(tuple(query_parts.values()), tuple(key_parts.values()), out)
    answers: list[Tensor] = []
    for layer in layers:
        answer = layer.whole().reduce(without) if out else _answer_of(layer, question)
        answers.append(answer.reshape(-1, len(query_parts), len(key_parts)))
        if progress is not None:
            progress(len(answers), len(layers))
    names = tuple(layer.name for layer in layers)
    weights = torch.stack(answers)
    places = tuple(
        (layer.place(index), tuple(map(layer.head, range(weights.shape[1]))))
        for index, layer in enumerate(layers)
    )
    return Shares(weights, names, tuple(query_parts), tuple(key_parts), places, out)


def _answer_of(layer: Layer, question: Segments) -> Tensor:
    """Return the recorded answer, or compute it from query and key."""
    if layer.matrix is None and question not in layer.answers:
        spans = [each for each in layer.answers if isinstance(each, Segments)]
        kept = "; ".join(_spans_text(each) for each in spans) or "none"
        raise RegardError(
            f"layer {layer.name!r} has no answer for {_spans_text(question)}, and its query and "
            f"key were not kept; the parts that were kept are {kept}.\n"
            "    Observe the model again with regard.Segments(parts) in keep=[...], or with "
            'keep="qk".'
        )
    return cast(Tensor, layer.reduce(question))


def _spans_text(question: Segments) -> str:
    keys = question.query_spans if question.key_spans is None else question.key_spans
    same = Segments(question.query_spans) == question
    return f"{keys}" if same else f"{keys}, asked by {question.query_spans}"


def _check_one_text(
    layers: Sequence[Layer],
    query_tokens: Sequence[Token] | None,
    key_tokens: Sequence[Token] | None,
) -> None:
    """Raise an error if queries and keys have different tokens."""
    for layer in layers:
        if layer.reads_itself and not one_text(query_tokens, key_tokens, layer.positions):
            raise ValueError(
                "queries is None; it must be given where query_tokens and key_tokens differ.\n"
                "    Give the parts of the queries, {name: (start, stop)}, counted from the first "
                "query that was kept."
            )


def _all_ran(layers: Sequence[Layer]) -> bool:
    """Return True if the rows are all queries of the text of the keys."""
    return all(layer.reads_itself and layer.queries is None for layer in layers)


def _recorded_parts(
    layers: Sequence[Layer], parts: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return the parts of the text, limited to the recorded queries and counted from the first."""
    first = layers[0]
    _, q_len, kv_len = shape_of_all("segment_shares", layers)
    kept = first.positions
    if any(not layer.reads_itself or layer.positions != kept for layer in layers):
        raise ValueError(
            f"queries is None; it must be given where q_len = {q_len} and kv_len = {kv_len} "
            "differ.\n    Give the parts of the queries, {name: (start, stop)}, counted from the "
            "first query that was kept."
        )
    inside = {
        name: (max(start, kept.start) - kept.start, min(stop, kept.stop) - kept.start)
        for name, (start, stop) in parts.items()
        if start < kept.stop and stop > kept.start
    }
    if not inside:
        raise ValueError(
            f"parts has no query that was kept, {kept.start} to {kept.stop - 1} of {kv_len}; one "
            "part at least must have one where queries is None.\n    Give the parts of the "
            "queries, {name: (start, stop)}, counted from the first query that was kept."
        )
    return inside


def _checked_queries(queries: object, layer: Layer) -> dict[str, tuple[int, int]]:
    """Validate the parts of the queries, counted in rows."""
    first = 0 if layer.queries is None else layer.queries.start
    return checked_parts("queries", queries, "q_len", layer.shape[-2], first)


@final
@dataclass(frozen=True)
class _WithoutSinks(Reduction):
    """``Segments`` of weights that ignore some keys, with each row renormalised to sum to 1.

    A query that attends to no other key is left out of the mean. The softmax is computed again over
    the remaining scores, because next to a dominant sink the weights would round to 0.

    Attributes:
        query_parts: the spans (start, stop) of the queries, which do not overlap.
        key_parts: the spans (start, stop) of the keys, which do not overlap.
        sinks: the positions of the keys to ignore, at least one.
    """

    thread_safe = True

    query_parts: tuple[tuple[int, int], ...]
    key_parts: tuple[tuple[int, int], ...]
    sinks: tuple[int, ...]

    def rows(self, q_len: int) -> range:
        return range(min(self.query_parts)[0], max(self.query_parts)[1])

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        size = (*shape[:-2], len(self.query_parts) + 1, len(self.key_parts) + 1)
        check_memory("segment_shares()", size, dtype, remedy="Ask for fewer parts.")
        return (
            torch.zeros(size, dtype=dtype, device=device),
            torch.zeros(size[:-1], dtype=dtype, device=device),
        )

    def update(self, block: Block) -> tuple[Contribution, ...]:
        box, device = block.box, block.maximum.device
        row_part = _membership(self.query_parts, box.rows, device)
        column_part = _membership(self.key_parts, box.columns, device)
        first, last = box.columns.start, box.columns.stop
        inside = [place - first for place in self.sinks if first <= place < last]
        lowest = lowest_score(block.maximum.dtype)
        shifted = block.shifted.index_fill(-1, torch.tensor(inside, device=device).long(), lowest)
        some = shifted.detach().amax(-1, keepdim=True) > lowest  # (..., rows, 1)
        weights = torch.softmax(shifted, -1)
        met = cast(Tensor, row_part.unique())
        members = ((met[:, None] == row_part) & some.mT).to(weights.dtype)  # (..., met, rows)
        by_query = members @ weights
        by_part = weights.new_zeros(*by_query.shape[:-1], len(self.key_parts) + 1)
        by_part = by_part.index_add(-1, column_part, by_query)
        total = by_part.new_zeros(*by_part.shape[:-2], len(self.query_parts) + 1, by_part.shape[-1])
        counts = by_part.new_zeros(total.shape[:-1])
        return (
            Contribution(box.leading, total.index_copy(-2, met, by_part)),
            Contribution(
                box.leading, counts.index_add(-1, row_part, some.squeeze(-1).to(counts.dtype))
            ),
        )

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        total, counts = buffers
        return (total / counts.clamp(min=1)[..., None])[..., :-1, :-1]


def _membership(parts: Sequence[tuple[int, int]], positions: slice, device: torch.device) -> Tensor:
    """Return the index of the part of each position; the number of parts if it is in none."""
    member = torch.full((positions.stop - positions.start,), len(parts), device="cpu")
    for place, (start, stop) in enumerate(parts):
        member[max(0, start - positions.start) : max(0, stop - positions.start)] = place
    return member.to(device)


def checked_parts(
    argument: str, parts: object, length_name: str, length: int, first: int = 0
) -> dict[str, tuple[int, int]]:
    """Validate the parts of a text, and return their spans (start, stop) by name.

    Args:
        argument: the name of the argument, for errors.
        parts: the argument.
        length_name: "kv_len" or "q_len", for errors.
        length: the number of tokens.
        first: the position of the first token, for errors.

    Raises:
        TypeError: parts is not a mapping from names to spans.
        ValueError: there are no parts, or a part is empty, reaches beyond the text or overlaps
            another.
    """
    counted = f"counted from query {first}, the first that was kept"
    remedy = (
        f"    Give {{name: (start, stop)}} with 0 <= start < stop <= {length_name} = {length}, "
        f"{counted if first else 'or regard.spans.by_sentence(tokens)'}."
    )
    if not isinstance(parts, Mapping):
        raise TypeError(
            f"{argument} is {kind_text(parts)}; it must be a mapping from names to spans.\n{remedy}"
        )
    if not parts:
        raise ValueError(f"{argument} is empty; it must have at least one part.\n{remedy}")
    checked: dict[str, tuple[int, int]] = {}
    for name, span in cast(Mapping[Any, Any], parts).items():
        if not isinstance(name, str):
            raise TypeError(
                f"{argument} has the name {name!r}, {kind_text(name)}; each must be a string.\n"
                f"{remedy}"
            )
        edges = list(cast(Sequence[Any], span)) if isinstance(span, list | tuple) else []
        if list(map(is_whole, edges)) != [True, True]:
            raise TypeError(
                f"{argument} has {span!r} for {name!r}; each span must be two whole numbers.\n"
                f"{remedy}"
            )
        start, stop = int(edges[0]), int(edges[1])
        if start >= stop:
            raise ValueError(
                f"{argument} has {(start, stop)} for {name!r}, which is empty; each span must hold "
                f"at least one token.\n{remedy}"
            )
        if start < 0 or stop > length:
            raise ValueError(
                f"{argument} has {(start, stop)} for {name!r}; each span must lie within the text."
                f"\n{remedy}"
            )
        checked[name] = (start, stop)
    _check_apart(argument, checked)
    return checked


def _check_apart(argument: str, parts: dict[str, tuple[int, int]]) -> None:
    rising = sorted(parts.items(), key=lambda part: part[1])
    for (before, span), (after, next_span) in pairwise(rising):
        if next_span[0] < span[1]:
            raise ValueError(
                f"{argument} has {span} for {before!r} and {next_span} for {after!r}, which "
                "overlap; parts must lie apart, so that no weight counts twice.\n"
                "    Ask twice, once for each."
            )


def _own_sinks(layers: Sequence[Layer], tokens: Sequence[Token] | None) -> tuple[int, ...]:
    """Return the positions of the first token without padding and of special tokens, in order."""
    special = {place for place, token in enumerate(tokens or ()) if token.special}
    texts = [text for layer in layers for text in layer.texts]
    if not texts:  # padding cannot be detected from answers
        return tuple(sorted({0, *special}))
    text = range(min(each.start for each in texts), max(each.stop for each in texts))
    return tuple(sorted({text.start, *special.intersection(text)}))


def _named_sinks(sinks: object, length: int) -> tuple[int, ...]:
    """Validate the argument ``sinks``, and return the positions to ignore in order."""
    if sinks is True:
        return ()
    remedy = "    Give positions from 0 to kv_len - 1; False takes the first and special tokens."
    positions = list(cast(Sequence[Any], sinks)) if isinstance(sinks, list | tuple | range) else []
    if not positions or not all(map(is_whole, positions)):
        raise TypeError(
            f"sinks is {sinks!r}; it must be True, False or whole numbers, at least one.\n{remedy}"
        )
    for place in positions:
        if not 0 <= place < length:
            raise ValueError(
                f"sinks has {place}; each must be a position, with kv_len = {length}.\n{remedy}"
            )
    return tuple(sorted(set(map(int, positions))))
