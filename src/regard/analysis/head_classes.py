"""Classification of heads into kinds, with one pass over each layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import torch

from regard.analysis.head_kinds import KINDS, MIXED, Head, kind_of
from regard.analysis.head_survey import Survey, of_each_head
from regard.errors import RegardError, check_progress
from regard.recording.layers import Layer, one_text
from regard.recording.recording import Recording, check_recording
from regard.text.tables import Cell, Table
from regard.text.tokens import Token

Scores = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Trial:
    """Scores of each head in a special run that measures them; see ``regard.trials``.

    Attributes:
        scores: for each layer name, and for each name of a kind, the score of each head. The layer
            names are those of a recording of the same model.

    Example:
        >>> import torch, regard
        >>> from regard.analysis.head_classes import Trial
        >>> even = regard.attend(torch.zeros(4, 1), torch.zeros(4, 1))
        >>> seen = regard.Recording({"layer": even})
        >>> regard.heads(seen, Trial({"layer": {"induction": (0.9,)}}))["kind"]
        ('induction',)
    """

    scores: Mapping[str, Scores]


@torch.no_grad()
def classify(
    layers: Iterable[Layer],
    query_tokens: Sequence[Token] | None = None,
    key_tokens: Sequence[Token] | None = None,
    *,
    trials: Sequence[Trial] = (),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Head, ...]:
    """Classify every head with one pass over each layer.

    For a batch, the scores are means over all texts. If only some queries were recorded, the scores
    are means over these. A layer with different numbers of queries and keys attends to another
    text. Positions mean nothing there, so it has no score for kinds that depend on positions.

    Args:
        layers: the layers of a recording.
        query_tokens: one token for each query; None if unknown, and then no token is special.
        key_tokens: one token for each key; for self-attention the same as the query tokens.
        trials: the results of special runs of the same model.
        progress: called with the number of finished layers and the number of layers.

    Raises:
        ValueError: a trial lacks a layer, or has another number of heads in it.
        RegardError: the weights of a layer contain NaN, or were not recorded.
    """
    check_progress(progress)
    chosen = tuple(layers)
    heads: list[Head] = []
    for index, layer in enumerate(chosen):
        survey = survey_of(layer, query_tokens, key_tokens)
        scores = of_each_head(survey.scores(layer.reduce(*survey.reductions)))
        for trial in trials:
            scores |= _trial_scores(trial, layer, len(next(iter(scores.values()))))
        if any(isnan(value) for values in scores.values() for value in values):
            raise RegardError(
                f"layer {layer.name!r} has weights that are not numbers (NaN); its heads have no "
                "kind.\n    Ask for the layers before it alone, seen.part(names)."
            )
        for head, values in enumerate(zip(*scores.values(), strict=True)):
            named = dict(zip(scores, values, strict=True))
            kind, score = kind_of(named)
            heads.append(Head(layer.model_index(index), layer.head(head), kind.name, score, named))
        if progress is not None:
            progress(index + 1, len(chosen))
    return tuple(heads)


def head_table(heads: Sequence[Head]) -> Table:
    """Return a table with a row for each head and a column for each measured score."""
    columns: dict[str, list[Cell]] = {
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
        "kind": [head.kind for head in heads],
        "score": [head.score for head in heads],
    }
    for kind in KINDS:
        if kind is not MIXED and any(kind.name in head.scores for head in heads):
            columns[kind.name] = [head.scores.get(kind.name) for head in heads]
    return Table(columns)


def heads(
    seen: Recording, *trials: Trial, progress: Callable[[int, int], None] | None = None
) -> Table:
    """Return the kind of each head and its score for every kind.

    Args:
        seen: the recording.
        trials: the results of special runs: ``regard.trials.repeated_tokens(model)`` measures
            induction and duplicate-token heads, ``regard.trials.needle`` retrieval heads. Those
            that the recording keeps, ``seen.trials``, count too.
        progress: called with the number of finished layers and the number of layers.

    Returns:
        A row for each head; ``docs/heads.md`` defines the scores, which are means over the
        recorded queries. A score is None, shown as ``-``, if the layer attends to another text and
        the kind needs positions.

    Raises:
        TypeError: seen is no recording.
        ValueError: a trial belongs to another model.
        RegardError: query and key were not recorded, or the weights contain NaN.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 4, 2), torch.zeros(2, 4, 2))
        >>> regard.heads(regard.Recording({"layer": even}))["kind"]
        ('uniform', 'uniform')
    """
    classified = classify(
        check_recording("seen", seen).layers,
        seen.query_tokens,
        seen.key_tokens,
        trials=(*trials_of(seen), *trials),
        progress=progress,
    )
    return head_table(classified)


def trials_of(seen: Recording) -> tuple[Trial, ...]:
    """Return the results of special runs that a recording keeps."""
    return tuple(map(Trial, seen.trials))


def survey_of(
    layer: Layer, query_tokens: Sequence[Token] | None, key_tokens: Sequence[Token] | None
) -> Survey:
    """Return the reductions that ``classify`` computes for a layer."""
    q_len, kv_len = layer.shape[-2:]
    queries, keys = _special(query_tokens, q_len), _special(key_tokens, kv_len)
    rows, texts = layer.positions, layer.texts
    if not layer.reads_itself or not one_text(query_tokens, key_tokens, rows):
        return Survey(queries, keys, texts=texts)
    if layer.queries is None:
        return Survey(queries, texts=texts)
    return Survey(queries, keys, rows.start, texts)


def _special(tokens: Sequence[Token] | None, length: int) -> tuple[bool, ...]:
    if tokens is None or len(tokens) != length:
        return (False,) * length
    return tuple(token.special for token in tokens)


def _trial_scores(trial: Trial, layer: Layer, num_heads: int) -> dict[str, list[float]]:
    """Return the scores of a trial for the heads of a layer."""
    if layer.name not in trial.scores:
        raise ValueError(
            f"trial has no layer {layer.name!r}; it has {', '.join(trial.scores) or 'none'}.\n"
            "    Run the trial on the model of the recording, and observe the same module."
        )
    scores = trial.scores[layer.name]
    count = min(map(len, scores.values()))
    indices = [layer.head(head) for head in range(num_heads)]
    all_recorded = layer.origin is None or layer.origin.heads is None
    if max(indices) >= count or (all_recorded and count != num_heads):
        raise ValueError(
            f"trial has {count} heads in layer {layer.name!r}; the recording has {num_heads}.\n"
            "    Run the trial on the model of the recording, all heads of it."
        )
    return {kind: [values[index] for index in indices] for kind, values in scores.items()}
