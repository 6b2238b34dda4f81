"""The strongest weights of each token, for the terminal and for ``--json``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from regard.analysis.head_classes import classify, trials_of
from regard.analysis.head_kinds import Head
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Layer, recorded_indices
from regard.recording.recording import Recording
from regard.reductions.products import WeightTile
from regard.text.tokens import Token
from regard.view.tiles.manifest import first_sequence

# A first token that is text counts as a sink if it gets so much more than even attention; ours.
_SINK = 0.1
# Rows are averaged over heads in blocks of about so many weights, 64 MiB in float32.
_WEIGHTS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Share:
    """A token and the share of attention that it gets, from 0 to 1."""

    token: int
    share: float


@dataclass(frozen=True)
class Row:
    """The strongest weights of one token, in the mean over the selected heads.

    Attributes:
        token: its place.
        top: the tokens that it attends to most, largest share first.
        on_sinks: the share that goes to sinks.
        top_text: the same without sinks, as shares of what is left; empty when nothing is.
        strongest: its largest share for another token that is no sink.
    """

    token: int
    top: tuple[Share, ...]
    on_sinks: float
    top_text: tuple[Share, ...]
    strongest: float


@dataclass(frozen=True)
class Summary:
    """A recording of one text in numbers.

    Attributes:
        model: the name of the model.
        tokens: of the text.
        layers: their names.
        layer: whose heads the rows are the mean of, its index in the model; None for all layers.
        head: the only one, its index in that layer of the model; None for all heads.
        num_selected: how many heads that is.
        sinks: places of the tokens that take attention whatever the query: the special ones, and
            the first one when it gets 10 points more of the attention, in the mean over all heads,
            than causal attention gives it that is spread evenly.
        rows: one for each token.
        heads: every head with its kind.
    """

    model: str
    tokens: tuple[Token, ...]
    layers: tuple[str, ...]
    layer: int | None
    head: int | None
    num_selected: int
    sinks: tuple[int, ...]
    rows: tuple[Row, ...]
    heads: tuple[Head, ...]


@torch.no_grad()
def summarise(
    recording: Recording,
    layer: int | None = None,
    head: int | None = None,
    top: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Summarise what each token attends to most, and the kind of each head.

    Args:
        recording: of self-attention, one text, with tokens.
        layer: the layer to show, by its index in the model; the mean over all when left out.
        head: the head of that layer to show, by its index in the model.
        top: how many tokens to name for each; all of them in a shorter text.
        progress: called with the steps done and the steps in all.

    Raises:
        ValueError: the recording has no tokens, or no such layer or head.
    """
    tokens = recording.query_tokens
    if tokens is None:
        raise ValueError("recording has no tokens.\n    Give them: recording.with_tokens(tokens).")
    matrices = _selected(recording, layer, head)
    steps = len(recording.layers) + len(tokens)

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, steps)

    heads = classify(
        recording.layers,
        tokens,
        trials=trials_of(recording),
        progress=lambda done, _: tell(done),
    )
    sinks = _sinks(tokens, heads)
    rows: list[Row] = []
    for block in _mean_rows(matrices):
        rows += _rows(block, len(rows), sinks, top)
        tell(len(recording.layers) + len(rows))
    count = sum(matrix.shape[0] for matrix in matrices)
    names, model = tuple(recording.shapes), recording.model
    return Summary(model, tokens, names, layer, head, count, sinks, tuple(rows), heads)


def _one_text(layer: Layer) -> AttentionMatrix:
    """Return a layer as a matrix of shape (num_heads, q_len, kv_len)."""
    matrix, name = layer.whole(), layer.name
    if any(n != 1 for n in matrix.shape[:-3]):
        raise ValueError(
            f"layer {name!r} has shape {tuple(matrix.shape)}; one text is looked at, a batch of 1."
        )
    if matrix.shape[-2] != matrix.shape[-1]:
        raise ValueError(
            f"layer {name!r} has q_len {matrix.shape[-2]} and kv_len {matrix.shape[-1]}; "
            "what is looked at is a text that attends to itself."
        )
    return first_sequence(matrix)


def _selected(recording: Recording, layer: int | None, head: int | None) -> list[AttentionMatrix]:
    """Return the layers to average, each with its selected heads."""
    matrices = [_one_text(each) for each in recording.layers]
    model = recording.model or "this recording"
    layer, head = recorded_indices(recording.layers, layer, head, model)
    if layer is None:
        return matrices
    matrix = matrices[layer]
    return [matrix] if head is None else [matrix[head : head + 1]]


def _sinks(tokens: Sequence[Token], heads: Sequence[Head]) -> tuple[int, ...]:
    special = {place for place, token in enumerate(tokens) if token.special}
    on_first = sum(head.scores["first-token sink"] for head in heads) / len(heads)
    even = sum(1 / (place + 1) for place in range(len(tokens))) / len(tokens)
    if on_first >= even + _SINK and len(tokens) > 2:
        special.add(0)
    return tuple(sorted(special))


def _mean_rows(matrices: Sequence[AttentionMatrix]) -> Iterator[Tensor]:
    """Blocks of rows of the mean over all heads, (rows, kv_len); never all of it at once."""
    count = sum(matrix.shape[0] for matrix in matrices)
    q_len, kv_len = matrices[0].shape[-2:]
    step = max(1, _WEIGHTS_AT_ONCE // (kv_len * max(matrix.shape[0] for matrix in matrices)))
    for start in range(0, q_len, step):
        window = WeightTile(range(start, min(start + step, q_len)), range(kv_len))
        total = torch.zeros(len(window.at_rows), kv_len, device="cpu")
        for matrix in matrices:
            total += matrix.reduce(window).sum(0).cpu()
        yield total / count


def _rows(weights: Tensor, first: int, sinks: Sequence[int], top: int) -> list[Row]:
    """Return the rows of a block that begins at token ``first``."""
    is_text = torch.ones(weights.shape[-1], dtype=torch.bool, device="cpu")
    is_text[list(sinks)] = False
    on_text = weights * is_text
    left = on_text.sum(-1)
    queries = torch.arange(len(weights), device="cpu")
    others = on_text.clone()
    others[queries, queries + first] = 0
    strongest = cast("list[float]", others.amax(-1).tolist())
    best = _top(weights, top)
    best_text = _top(on_text / left.clamp(min=torch.finfo(left.dtype).tiny)[:, None], top)
    on_sinks = cast("list[float]", (weights.sum(-1) - left).clamp(0, 1).tolist())
    return [
        Row(first + i, best[i], on_sinks[i], best_text[i], strongest[i])
        for i in range(len(weights))
    ]


def _top(shares: Tensor, count: int) -> list[tuple[Share, ...]]:
    """Return the tokens with the largest shares, without those that have none."""
    values, tokens = shares.sort(dim=-1, descending=True, stable=True)
    most = cast("list[list[float]]", values[:, :count].tolist())
    where = cast("list[list[int]]", tokens[:, :count].tolist())
    return [
        tuple(Share(token, share) for token, share in zip(*row, strict=True) if share > 0)
        for row in zip(where, most, strict=True)
    ]
