"""Recordings of models: one attention matrix for each attention that ran."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from regard.errors import RegardError, check_path, is_whole
from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.notebook_hook import notebook_bundle
from regard.matrix.rollouts import Rollout
from regard.recording.file_writer import write
from regard.recording.joining import Piece, joined
from regard.recording.layers import (
    Answers,
    InMemory,
    Layer,
    Origin,
    Queries,
    Refusal,
    layer_at,
    reduce_all,
    tokens_of_rows,
)
from regard.recording.shard import Shard
from regard.recording.text_match import rollout_of_text
from regard.reductions.reduction import Reduction
from regard.reductions.row_statistics import Entropy
from regard.reductions.sums import Pool, Sum
from regard.reductions.top_k import Top, TopK
from regard.text.escaping import visible
from regard.text.tokens import Token, as_tokens

__all__ = ["Recording", "Refusal", "merged"]


class Recording(Mapping[str, AttentionMatrix]):
    """The attention of a model, layer by layer: a mapping from names to matrices.

    ``seen["encoder.layer.0.attention.self"]`` is the matrix of the module of that name, ``seen[3]``
    that of the fourth layer in the order in which they ran. A module that attended again has
    ``#2``, ``#3`` after its name. Make a recording with ``regard.observe``.

    The mapping has the layers whose matrices were kept. ``layers``, ``shapes`` and ``kept`` have
    all others, too.

    Attributes:
        model: the name of the model.
        query_tokens: one token for each query of the matrices; None when not known.
        key_tokens: one token for each key; None when not known.
        refused: the modules whose attention ran and was not recorded, each with line and reason.
        shard: the place of this recording in a distributed run; None if it is the whole.

    Example:
        >>> import torch, regard, regard.nn
        >>> layer = regard.nn.SelfAttention(16, num_heads=2)
        >>> with regard.observe(layer) as seen:
        ...     output = layer(torch.randn(5, 16))
        >>> seen[0].shape
        torch.Size([2, 5, 5])
    """

    def __init__(
        self,
        layers: Mapping[str, AttentionMatrix],
        *,
        model: str = "",
        query_tokens: Iterable[Token | str] | None = None,
        key_tokens: Iterable[Token | str] | None = None,
    ) -> None:
        self._layers: dict[str, Layer] = {}
        self.refused: list[Refusal] = []
        self.shard: Shard | None = None
        self.model = model
        self.query_tokens = as_tokens("query_tokens", query_tokens)
        self.key_tokens = as_tokens("key_tokens", key_tokens) or self.query_tokens
        for name, matrix in layers.items():
            self.add(name, matrix)

    def __getitem__(self, layer: str | int) -> AttentionMatrix:
        """Return the matrix of a layer, by name or by its place in the order in which they ran.

        Raises:
            KeyError: there is no layer of that name.
            IndexError: there is no layer at that place.
            RegardError: only answers of that layer were kept (also a KeyError), or the file of the
                recording is damaged.
        """
        return layer_at(self.layers, layer).whole()

    def __contains__(self, layer: object) -> bool:
        """Return whether the matrix of a layer of that name was kept."""
        return layer in self._layers and self._layers[cast(str, layer)].matrix is not None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the layers whose matrices were kept, in the order they ran."""
        return (name for name, layer in self._layers.items() if layer.matrix is not None)

    def __len__(self) -> int:
        """Return the number of layers whose matrices were kept."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """Return the name of the model, and one line for each layer."""
        layers = enumerate(self._layers.values())
        lines = [f"  {place}  {visible(layer.name)}  {layer!r}" for place, layer in layers]
        count = f"{len(lines)} layer{'s' * (len(lines) != 1)}"
        return "\n".join([f"Recording of {visible(self.model) or 'a model'}, {count}", *lines])

    _repr_mimebundle_ = notebook_bundle

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to pickle a recording, because a pickle can run code when it is loaded."""
        raise TypeError(
            "pickle has a Recording; a recording is saved as a file that runs no code.\n"
            '    Use seen.save("run.safetensors") and regard.load("run.safetensors").'
        )

    @staticmethod
    def merge(parts: "Iterable[Recording]") -> "Recording":
        """Return one recording of what the processes of a distributed run have recorded.

        Heads, rows of the batch and layers are joined in the order of the processes.

        Args:
            parts: the recording of each process, in any order.

        Raises:
            RegardError: a part is missing, there twice, of another run, or does not fit the others.

        Example:
            The processes have saved their parts with ``seen.save("run")``::

                regard.load("run")
        """
        recordings = tuple(parts)
        return merged(recordings, [_rank_of(each, at) for at, each in enumerate(recordings)])

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Each layer, in the order in which they ran."""
        return tuple(self._layers.values())

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The shape of each layer's matrix, kept or not: (..., num_heads, q_len, kv_len)."""
        return {name: layer.shape for name, layer in self._layers.items()}

    @property
    def kept(self) -> Mapping[str, Mapping[Reduction, Any]]:
        """The answers that were kept as the model ran, layer by layer: ``seen.kept[name]``."""
        return {name: layer.answers for name, layer in self._layers.items() if layer.answers}

    def value(self, layer: str | int) -> Tensor:
        """Return the value of a layer, kept by ``keep="qkv"``: ``seen[layer] @ it`` is its output.

        Args:
            layer: its name, or its place in the order they ran.

        Returns:
            (..., num_kv_heads, kv_len, head_dim).

        Raises:
            RegardError: it was not kept.
        """
        return layer_at(self.layers, layer).whole_value()

    def add(
        self,
        name: str,
        matrix: AttentionMatrix | None,
        *,
        answers: Iterable[tuple[Reduction, Any]] = (),
        shape: torch.Size | None = None,
        origin: Origin | None = None,
        queries: Queries | None = None,
    ) -> str:
        """Keep one more layer.

        Args:
            name: one that is taken gets ``#2``, ``#3``, ... after it.
            matrix: None where only answers are kept.
            answers: each reduction that was asked, with its answer.
            shape: of the matrix, where it is not kept.
            origin: what it is of its model, where only some layers or heads are kept.
            queries: which queries its rows are, where only some are kept.

        Returns:
            The name that it has now.

        Raises:
            ValueError: neither matrix nor shape, or a length that differs from the tokens'.
        """
        size = shape if matrix is None else matrix.shape
        if size is None:
            raise ValueError(
                "matrix is None and shape is None; one of them must be there.\n"
                "    Pass shape=matrix.shape where only answers are kept."
            )
        unique, count = name, 1
        while unique in self._layers:
            count += 1
            unique = f"{name}#{count}"
        kept = None if matrix is None else InMemory(matrix)
        self.put(Layer(unique, size, kept, Answers(answers), origin, queries=queries))
        return unique

    def put(self, layer: Layer) -> None:
        """Keep a layer as it is, in place of the one of its name where there is one.

        Raises:
            ValueError: its lengths differ from the tokens'.
        """
        layer.check_tokens(self.query_tokens, self.key_tokens)
        self._layers[layer.name] = layer

    def remove(self, name: str) -> None:
        """Leave out a layer, by its name; a KeyError where there is none of it."""
        del self._layers[name]

    def with_tokens(
        self,
        query_tokens: Iterable[Token | str],
        key_tokens: Iterable[Token | str] | None = None,
    ) -> "Recording":
        """Return the same recording with its text.

        Args:
            query_tokens: one for each query that ran, kept or not; a string is the text of one.
            key_tokens: one for each key; the query tokens when left out.

        Raises:
            TypeError: something else than tokens.
            ValueError: their count differs from a matrix.
        """
        queries = as_tokens("query_tokens", query_tokens)
        keys = queries if key_tokens is None else as_tokens("key_tokens", key_tokens)
        return self._with(self.layers, tokens_of_rows(queries, self.layers), keys)

    def _with(
        self,
        layers: Iterable[Layer],
        query_tokens: Iterable[Token] | None,
        key_tokens: Iterable[Token] | None,
    ) -> "Recording":
        """Return a recording of the same model."""
        tokens = {"query_tokens": query_tokens, "key_tokens": key_tokens}
        same = Recording({}, model=self.model, **tokens)
        same.refused, same.shard = list(self.refused), self.shard
        for layer in layers:
            same.put(layer)
        return same

    def part(self, layers: Iterable[str | int]) -> "Recording":
        """Return a recording of some of the layers, with the text.

        Args:
            layers: names, places in the order the layers ran, or both.

        Raises:
            TypeError: layers is a single name.
            KeyError: no layer of that name.
            IndexError: no layer at that place.

        Example:
            >>> import torch, regard
            >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
            >>> list(regard.Recording({"a": even, "b": even, "c": even}).part([0, "c"]))
            ['a', 'c']
        """
        if isinstance(layers, str) or is_whole(layers):
            raise TypeError(
                f"layers is {layers!r}; it takes several names or places.\n"
                f"    Pass [{layers!r}] for that layer alone."
            )
        some = (layer_at(self.layers, layer) for layer in layers)
        return self._with(some, self.query_tokens, self.key_tokens)

    def entry(self, index: int) -> "Recording":
        """Return one entry of the batch, as a batch of 1, with the text.

        Args:
            index: of the entry.

        Raises:
            ValueError: a layer has no batch.
            IndexError: the batch has no such entry.
            RegardError: what was kept of a layer is not told for each entry.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(3, 2, 5, 4)
            >>> regard.Recording({"layer": regard.attend(x, x)}).entry(2)["layer"].shape
            torch.Size([1, 2, 5, 5])
        """
        entries = (layer.entry(index) for layer in self.layers)
        one = self._with(entries, self.query_tokens, self.key_tokens)
        one.shard = None
        return one

    def reduce(
        self, *reductions: Reduction, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Compute the answers to several questions for each layer, in one pass over it.

        A kept answer is given as it is, the rest computed; a layer that can do neither is left out.

        Args:
            reductions: what to ask: ``regard.TopK(8)``, ``regard.Entropy()``, your own.
            progress: called with the layers done and the layers in all.

        Returns:
            For each layer its answer, or a tuple of them for several reductions.

        Raises:
            TypeError: an argument that is no reduction.
            ValueError: no reductions, or one that does not fit a matrix.
            RegardError: no layer kept the answers, nor query and key to compute them from.

        Example:
            >>> import torch, regard
            >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
            >>> regard.Recording({"layer": even}).reduce(regard.Entropy())
            {'layer': tensor([0.6931, 0.6931])}
        """
        return reduce_all(self.layers, reductions, progress)

    def topk(self, k: int) -> dict[str, Top]:
        """Return the k largest weights of each row and their keys, for each layer; see ``TopK``."""
        return cast(dict[str, Top], self.reduce(TopK(k)))

    def entropy(self) -> dict[str, Tensor]:
        """Return the entropy of each row in nats, (..., num_heads, q_len); see ``Entropy``."""
        return self.reduce(Entropy())

    def received(self) -> dict[str, Tensor]:
        """Return the attention that each key receives from all queries, (..., num_heads, kv_len).

        It is ``Sum(-2)``, what H2O keeps the heaviest keys by (Zhang et al. 2023, section 4).
        """
        return self.reduce(Sum(-2))

    def pool(self, rows: int, columns: int) -> dict[str, Tensor]:
        """Return the mean weight in each cell of at most rows x columns; see ``Pool``."""
        return self.reduce(Pool(rows, columns))

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Write the recording as one file, safetensors with JSON; ``regard.load`` reads it.

        The file is written whole or not at all. It takes the place of an older recording, and of
        nothing else.

        Args:
            path: of the file, ``run.safetensors``; its folder exists. For a part of a distributed
                run, of a folder, in which each process has a file.
            progress: called with the layers written and the layers in all.

        Raises:
            RegardError: a layer holds code (a ``score_mod``, a reduction of your own) or NaN, or
                the file cannot be written, or is there and is not a recording.

        Example:
            >>> import torch, regard
            >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
            >>> regard.Recording({"layer": even}, model="Tiny").save("run.safetensors")
            >>> regard.load("run.safetensors").model
            'Tiny'
        """
        write(
            path if self.shard is None else self.shard.file(check_path(path)),
            self.layers,
            model=self.model,
            query_tokens=self.query_tokens,
            key_tokens=self.key_tokens,
            refused=self.refused,
            shard=self.shard,
            progress=progress,
        )

    def rollout(self, residual: float = 0.5) -> Rollout:
        """Return where the tokens of the last layer come from; see ``rollout``."""
        layers = {layer.name: layer.whole() for layer in self.layers}
        return rollout_of_text(layers, self.query_tokens, self.key_tokens, residual)


def _rank_of(recording: Recording, place: int) -> str:
    return f"recording {place}" if recording.shard is None else f"rank {recording.shard.rank}"


def merged(recordings: Sequence[Recording], names: Sequence[str]) -> Recording:
    """Return one recording of the parts of a distributed run; see ``Recording.merge``.

    Args:
        recordings: the parts.
        names: of the parts, for errors.
    """
    both = zip(names, recordings, strict=True)
    pieces = [Piece(name, each.shard, each.layers, tuple(each.refused)) for name, each in both]
    layers, refused = joined(pieces)
    first = recordings[0]
    for name, other in zip(names, recordings, strict=True):
        for tokens in ("query_tokens", "key_tokens"):
            if getattr(other, tokens) != getattr(first, tokens):
                raise RegardError(
                    f"{name} has other {tokens} than {names[0]}; a recording has one text.\n"
                    "    Look at each alone, or set them to None before they are saved."
                )
    whole = Recording(
        {}, model=first.model, query_tokens=first.query_tokens, key_tokens=first.key_tokens
    )
    whole.refused = refused
    for layer in layers:
        whole.put(layer)
    return whole
