"""The head on which a fresh page opens, the heads that stand out, and a cell that shows each."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from regard.analysis.head_kinds import Head, meaning, stand_out
from regard.recording.recording import Recording
from regard.reductions.products import WeightTile
from regard.text.tokens import Token
from regard.view.tiles.manifest import Opening, first_sequence, patch_keys, sink_keys

_LETTERS = re.compile(r"[^\W\d_]")
_CONTENT = 4  # letters of a word that is probably no article or preposition
_LEAST_MEANING = 0.1  # of a head on which a page may open for its words
_MOST_HEADS = 16  # that are weighed for their words
_SEEN = 0.1  # the share from which a cell shows a pattern
_MOST_QUERIES = 512  # that are weighed to find the clearest cell
_MOST_WEIGHTS = 2**24

Kinds = Sequence[Sequence[Head | None]]


def openings(
    recording: Recording,
    kinds: Kinds,
    asked: tuple[int | None, int | None] = (None, None),
    among: Iterable[int] | None = None,
) -> tuple[Opening, list[Opening]]:
    """Return where a page of a recording opens, and the head of each kind that stands out.

    It opens on the head that says most about the words: on a pair of words of which one looks at
    the other more than all the others do. In a picture without words it opens on the head whose
    class token looks most clearly at one part of it. If there is none, it opens on the first head
    that stands out and whose pattern this text shows. Each cell is a content word and the key that
    it attends to.

    Args:
        recording: what was seen.
        kinds: the heads of each layer.
        asked: the indices of the layer and of the head to open, as far as they are chosen.
        among: the layers that may be opened; all of them when left out.

    Example:
        >>> import torch, regard
        >>> from regard.view.tiles.layer_survey import layer_kinds
        >>> from regard.view.tiles.page_opening import openings
        >>> A = regard.AttentionMatrix.from_weights(torch.eye(2)[None])
        >>> seen = regard.Recording({"layer": A}, query_tokens=["Life", " is"])
        >>> openings(seen, [layer_kinds(seen, 0, lambda _: None)])[0]
        Opening(layer=0, head=0, query=1, key=1)
    """
    cells, (layer, number) = _Cells(recording), asked
    indices = {
        id(head): (at, index)
        for at, row in enumerate(kinds)
        for index, head in enumerate(row)
        if head is not None
    }
    classified = [head for row in kinds for head in row if head is not None]
    notable = [cells.opening(*indices[id(head)], head.kind) for head, _ in stand_out(classified)]
    layers = {*(range(len(kinds)) if among is None else among)} if layer is None else {layer}
    if number is not None:
        head = kinds[layer or 0][number]
        return cells.opening(layer or 0, number, None if head is None else head.kind), notable
    if (of_picture := cells.of_picture(layers)) is not None:
        return of_picture, notable
    classified = [head for head in classified if indices[id(head)][0] in layers]
    if (of_words := cells.of_words(classified, indices)) is not None:
        return of_words, notable
    candidates = [cells.opening(*indices[id(h)], h.kind) for h, _ in stand_out(classified)]
    candidates = candidates or [cells.opening(min(layers, default=0), 0, None)]
    return next((one for one in candidates if one.key is not None), candidates[0]), notable


def blind_opening(recording: Recording) -> Opening:
    """Return where a page opens while the kinds of the heads are not known."""
    return _Cells(recording).opening(0, 0, None)


class _Cells:
    """The clearest cells of the heads of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._texts: dict[int, tuple[list[Token], list[Token]]] = {}

    def opening(self, layer: int, head: int, kind: str | None) -> Opening:
        """Return a head at a content word that shows its kind; key is None if no word does."""
        cell = None if kind is None else self._clearest(layer, head, kind)
        if cell is not None:
            return Opening(layer=layer, head=head, query=cell[0], key=cell[1])
        queries, _ = self._text(layer)
        words = [at for at, token in enumerate(queries) if _worth(token) > 0]
        plain = [at for at, token in enumerate(queries) if not token.special]
        return Opening(layer=layer, head=head, query=(words or plain or [0])[-1], key=None)

    def of_words(
        self, heads: Sequence[Head], indices: dict[int, tuple[int, int]]
    ) -> Opening | None:
        """Return the head with the most telling pair of words; None if no head tells of words.

        A pair tells as much as the key gets from this query more than from the others: a head in
        which all tokens look at one word says nothing about any of them.
        """
        best, opening = 0.0, None
        telling = [head for head in heads if meaning(head) >= _LEAST_MEANING]
        for head in sorted(telling, key=meaning, reverse=True)[:_MOST_HEADS]:
            layer, number = indices[id(head)]
            rows, shares, worth = self._weighed(layer, number)
            seen = (shares > 0).sum(0)  # the rows that may look at each key
            others = (shares.sum(0) - shares) / (seen - 1).clamp(min=1)
            values = (shares - others) * worth
            if self._is_one_text(layer):
                values[range(len(rows)), rows] = 0
            if (value := meaning(head) * float(values.max())) > best:
                query, key = divmod(int(values.argmax()), values.shape[1])
                best, opening = value, Opening(layer, number, rows[query], key)
        return opening

    def of_picture(self, layers: Iterable[int]) -> Opening | None:
        """Return the head whose class token looks most clearly at one part of a picture.

        None if no layer has a class token and patches, or if a layer has words.
        """
        clearest, opening = 0.0, None
        for layer in layers:
            queries, _ = self._text(layer)
            if not all(token.special for token in queries):
                return None
            patches, grids = patch_keys(self._recording, layer), self._recording.layer_grids(layer)
            classes = [at for at in range(len(queries)) if at not in patches]
            *_, heads, _, _ = (1, *self._recording.layers[layer].shape)
            for head in range(heads if classes and grids else 0):
                shares = self._recording.image(layer, head, query=classes[0], grid=0)
                if (clarity := _clarity(shares)) > clearest:
                    key = grids[0].tokens[int(shares.argmax())]
                    clearest = clarity
                    opening = Opening(layer=layer, head=head, query=classes[0], key=key)
        return opening

    def _text(self, layer: int) -> tuple[list[Token], list[Token]]:
        """Return the tokens of queries and keys; those of patches and unknown ones have no text."""
        if layer not in self._texts:
            seen, shape = self._recording, self._recording.layers[layer].shape[-2:]
            patches = patch_keys(seen, layer)
            queries, keys = (
                [Token("")] * length if tokens is None or len(tokens) != length else [*tokens]
                for tokens, length in zip((seen.query_tokens, seen.key_tokens), shape, strict=True)
            )
            keys = [Token("", True) if at in patches else token for at, token in enumerate(keys)]
            is_one = seen.query_tokens == seen.key_tokens and len(queries) == len(keys)
            self._texts[layer] = keys if is_one else queries, keys
        return self._texts[layer]

    def _is_one_text(self, layer: int) -> bool:
        queries, keys = self._text(layer)
        return queries is keys

    def _weighed(
        self, layer: int, head: int, *, with_sinks: bool = False
    ) -> tuple[range, Tensor, Tensor]:
        """Return some rows of a head, their shares, and how much each pair of tokens says."""
        queries, keys = self._text(layer)
        matrix = first_sequence(self._recording.layers[layer].whole())[head]
        step = -(-len(queries) // max(1, min(_MOST_QUERIES, _MOST_WEIGHTS // len(keys))))
        rows = range(0, len(queries), step)
        shares = cast(Tensor, matrix.reduce(WeightTile(rows, range(len(keys))))).float().cpu()
        worth = torch.tensor([_worth(queries[at]) for at in rows], device="cpu")
        last = max(patch_keys(self._recording, layer), default=-1)
        if queries is keys and last < len(keys) - 1:  # a word before a picture may not look at it
            worth[: (last + step) // step] = 0
        key_worth = torch.tensor([_worth(token) for token in keys], device="cpu")
        key_worth[list(sink_keys(self._recording, layer))] = 0
        if with_sinks:
            key_worth.fill_(1)
        return rows, shares.nan_to_num(0), worth[:, None] * key_worth

    def _clearest(self, layer: int, head: int, kind: str) -> tuple[int, int] | None:
        rows, shares, worth = self._weighed(layer, head, with_sinks=kind.endswith("sink"))
        values = shares * worth
        if kind in _PATTERNS and self._is_one_text(layer):
            column = _PATTERNS[kind](self._text(layer)[1])[:: rows.step, None]
            is_shown = (column >= 0) & (column < values.shape[1])
            column = column.clamp(0, values.shape[1] - 1)
            is_shown &= shares.gather(1, column) >= _SEEN
            values = torch.zeros_like(values).scatter(
                1, column, values.gather(1, column) * is_shown
            )
        if not values.max() > 0:
            return None
        query, key = divmod(int(values.argmax()), values.shape[1])
        return rows[query], key


def _clarity(shares: Tensor) -> float:
    """Return how clearly shares of a grid, (rows, columns), lie on one part of it.

    It is the share of the grid, times Moran's I of neighbouring patches
    (https://doi.org/10.2307/2332142), which is near 0 for single patches, times one minus the
    normalised entropy, which is 0 for equal shares.
    """
    total, shares = float(shares.sum()), shares.double()
    if shares.numel() < 2 or not 0 < total < math.inf:
        return 0.0
    parts = cast(Tensor, torch.special.entr(shares / total))  # -p log p of each patch
    even = float(parts.sum()) / math.log(shares.numel())
    apart = shares - shares.mean()
    beside = (apart[1:] * apart[:-1]).flatten(), (apart[:, 1:] * apart[:, :-1]).flatten()
    variance = float(apart.square().mean())
    return total * (1 - even) * float(torch.cat(beside).mean()) / variance if variance else 0.0


def _worth(token: Token) -> float:
    """Return how much a token says: a content word more than an article, a full stop nothing."""
    letters = 0 if token.special else len(_LETTERS.findall(token.text))
    return min(1.0, letters / _CONTENT)


def _earlier(tokens: Sequence[Token]) -> Tensor:
    """Return the last earlier place of each token of a text; -2 without one."""
    last: dict[str, int] = {}
    places: list[int] = []
    for at, token in enumerate(tokens):
        places.append(last.get(token.text.strip(), -2))
        last[token.text.strip()] = at
    return torch.tensor(places, device="cpu")


def _beside(by: int) -> Callable[[Sequence[Token]], Tensor]:
    return lambda tokens: torch.arange(len(tokens), device="cpu") + by


_PATTERNS: dict[str, Callable[[Sequence[Token]], Tensor]] = {
    "induction": lambda tokens: _earlier(tokens) + 1,
    "duplicate token": _earlier,
    "retrieval": lambda tokens: torch.cat((_earlier(tokens)[1:], torch.tensor([-1], device="cpu"))),
    "previous token": _beside(-1),
    "next token": _beside(1),
    "self": _beside(0),
    "first-token sink": lambda tokens: torch.zeros(len(tokens), dtype=torch.long, device="cpu"),
}
"""The key that each query attends to in a head of a kind, where the kind says which."""
