"""Recordings of models, with one attention matrix for each attention that ran."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from regard.errors import RegardError, check_path, is_whole, kind_text
from regard.images.patch_grid import Grid
from regard.images.picture import Picture, keep
from regard.matrix.attention_matrix import AttentionMatrix
from regard.matrix.notebook_hook import notebook_bundle
from regard.matrix.rollouts import Rollout, rollout
from regard.recording.file_writer import check_target, write
from regard.recording.grids import boxes_of, checked_grids, image_of
from regard.recording.joining import Piece, joined
from regard.recording.layers import (
    Answers,
    InMemory,
    Layer,
    Origin,
    Queries,
    Refusal,
    able_to_answer,
    layer_at,
    one_text,
    tokens_of_rows,
)
from regard.recording.shard import Shard
from regard.reductions.reduction import Reduction, check_reductions
from regard.reductions.row_statistics import Entropy
from regard.reductions.sums import Pool, Sum
from regard.reductions.top_k import Top, TopK
from regard.text.escaping import visible
from regard.text.tokens import Token, as_tokens

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_EQUAL = 4  # layers that are listed one by one although they look alike


class _LayerName(str):
    """The name of a layer, which says where the matrix is if it is taken for one."""

    __slots__ = ()

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(
            f"{str(self)!r} is the name of a layer and has no {attribute!r}; a recording is a "
            "mapping.\n    For names and matrices write: for name, A in seen.items()"
        )


class Recording(Mapping[str, AttentionMatrix]):
    """The attention of a model, layer by layer: a mapping from names to matrices.

    ``seen["encoder.layer.0.attention.self"]`` is the matrix of the module with that name, and
    ``seen[3]`` is the matrix of the fourth layer in the order in which layers ran. The names of
    further calls of a module end with ``#2``, ``#3``. ``regard.observe`` makes a recording.

    The mapping contains the layers with a recorded matrix. ``layers``, ``shapes`` and ``kept`` also
    contain layers with recorded answers only.

    Attributes:
        model: the name of the model.
        query_tokens: one token for each query of the matrices; None if unknown.
        key_tokens: one token for each key; None if unknown.
        refused: the modules whose attention ran and was not recorded, each with line and reason.
        shard: the part of a distributed run that this is; None for a whole model.
        trials: the scores of special runs of the model, by layer name, kind and head; see
            ``regard.trials``. ``regard.heads`` reads them.
        pictures: the pictures that the model saw, from ``with_pictures``; empty without.

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
        self.trials: list[Mapping[str, Mapping[str, Sequence[float]]]] = []
        self.pictures: tuple[Picture, ...] = ()
        self.model = model
        self.query_tokens = as_tokens("query_tokens", query_tokens)
        self.key_tokens = as_tokens("key_tokens", key_tokens) or self.query_tokens
        for name, matrix in layers.items():
            self.add(name, matrix)

    def __getitem__(self, layer: str | int) -> AttentionMatrix:
        """Return the matrix of a layer, by name or by index in the order in which layers ran.

        Raises:
            KeyError: no layer has this name.
            IndexError: the index is out of range.
            RegardError: only answers of the layer were recorded (this is also a KeyError), or the
                file of the recording is damaged.
        """
        return layer_at(self.layers, layer).whole()

    def __contains__(self, layer: object) -> bool:
        """Return True if the matrix of a layer with this name was recorded."""
        return layer in self._layers and self._layers[cast(str, layer)].matrix is not None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the layers with a recorded matrix, in the order they ran."""
        layers = self._layers.items()
        return (_LayerName(name) for name, layer in layers if layer.matrix is not None)

    def __len__(self) -> int:
        """Return the number of layers with a recorded matrix."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """Return the name of the model, and a line for each layer, or for a run of equal ones."""
        lines: list[str] = []
        for text, group in groupby(enumerate(self._layers.values()), lambda pair: repr(pair[1])):
            run = [(index, visible(layer.name)) for index, layer in group]
            if len(run) > _MOST_EQUAL:
                (first, one), (last, other) = run[0], run[-1]
                run = [(f"{first} to {last}", f"{one} to {other}")]
            lines += [f"  {index}  {name}  {text}" for index, name in run]
        count = f"{len(self._layers)} layer{'s' * (len(self._layers) != 1)}"
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
        """Merge the recordings of all processes of a distributed run.

        Heads and batch entries are concatenated in the order of the processes.

        Args:
            parts: the recording of each process, in any order.

        Raises:
            RegardError: a part is missing, occurs twice, belongs to another run, or does not fit
                the others.

        Example:
            The processes have saved their parts with ``seen.save("run")``::

                regard.load("run")
        """
        recordings = tuple(parts)
        return merged(recordings, [_rank_of(each, at) for at, each in enumerate(recordings)])

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers, in the order in which they ran."""
        return tuple(self._layers.values())

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The shape (..., num_heads, q_len, kv_len) of each layer's matrix, recorded or not."""
        return {name: layer.shape for name, layer in self._layers.items()}

    @property
    def kept(self) -> Mapping[str, Mapping[Reduction, Any]]:
        """The answers of each layer that were recorded while the model ran."""
        return {name: layer.answers for name, layer in self._layers.items() if layer.answers}

    def value(self, layer: str | int) -> Tensor:
        """Return the value of a layer, recorded with ``keep="qkv"``.

        The layer's output is ``seen[layer] @ seen.value(layer)``.

        Args:
            layer: the name of the layer, or its index in the order in which layers ran.

        Returns:
            (..., num_kv_heads, kv_len, head_dim).

        Raises:
            RegardError: the value was not recorded.
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
        """Add a layer.

        Args:
            name: the name of the layer; if it exists, ``#2``, ``#3``, ... is added to it.
            matrix: the matrix; None for a layer with answers only.
            answers: each recorded reduction with its answer.
            shape: the shape of the matrix; needed if matrix is None.
            origin: the position in the model; None if all layers and heads are recorded.
            queries: the queries of the rows; None if all queries are recorded.

        Returns:
            The unique name of the layer.

        Raises:
            ValueError: both matrix and shape are None, or a length differs from the number of
                tokens.
        """
        size = shape if matrix is None else matrix.shape
        if size is None:
            raise ValueError(
                "matrix is None and shape is None; one of them must be there.\n"
                "    Pass shape=matrix.shape where only answers are kept."
            )
        kept = None if matrix is None else InMemory(matrix)
        return self.append(Layer(name, size, kept, Answers(answers), origin, queries=queries))

    def append(self, layer: Layer) -> str:
        """Add a layer as ``add`` does, and return its unique name.

        Raises:
            ValueError: a length differs from the number of tokens.
        """
        unique, count = layer.name, 1
        while unique in self._layers:
            count += 1
            unique = f"{layer.name}#{count}"
        self.put(replace(layer, name=unique))
        return unique

    def put(self, layer: Layer) -> None:
        """Add a layer, or replace the layer with the same name.

        Raises:
            ValueError: a length differs from the number of tokens.
        """
        layer.check_tokens(self.query_tokens, self.key_tokens)
        self._layers[layer.name] = layer

    def remove(self, name: str) -> None:
        """Remove a layer.

        Raises:
            KeyError: no layer has this name.
        """
        del self._layers[name]

    def with_tokens(
        self,
        query_tokens: Iterable[Token | str],
        key_tokens: Iterable[Token | str] | None = None,
    ) -> "Recording":
        """Return the same recording with tokens.

        Args:
            query_tokens: one token for each query that ran, recorded or not; a string is the text
                of one token.
            key_tokens: one token for each key. The default is the query tokens.

        Raises:
            TypeError: an element is neither a Token nor a string.
            ValueError: the number of tokens does not fit a matrix.
        """
        queries = as_tokens("query_tokens", query_tokens)
        keys = queries if key_tokens is None else as_tokens("key_tokens", key_tokens)
        same = self._with(())
        same.query_tokens, same.key_tokens = tokens_of_rows(queries, self.layers), keys
        for layer in self.layers:
            same.put(layer)
        return same

    def _with(self, layers: Iterable[Layer]) -> "Recording":
        """Return a recording of the same model and tokens with other layers."""
        tokens = {"query_tokens": self.query_tokens, "key_tokens": self.key_tokens}
        same = Recording({}, model=self.model, **tokens)
        same.refused, same.shard = list(self.refused), self.shard
        same.trials, same.pictures = list(self.trials), self.pictures
        for layer in layers:
            same.put(layer)
        return same

    def part(self, layers: Iterable[str | int]) -> "Recording":
        """Return a recording of some layers, with the same tokens.

        Args:
            layers: names, indices in the order in which layers ran, or both.

        Raises:
            TypeError: layers is a single name or index.
            KeyError: no layer has this name.
            IndexError: an index is out of range.

        Example:
            >>> import torch, regard
            >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
            >>> list(regard.Recording({"a": even, "b": even, "c": even}).part([0, "c"]))
            ['a', 'c']
        """
        if isinstance(layers, str) or is_whole(layers):
            raise TypeError(
                f"layers is {layers!r}; it takes several names or indices.\n"
                f"    Pass [{layers!r}] for that layer alone."
            )
        return self._with(layer_at(self.layers, layer) for layer in layers)

    def entry(self, index: int) -> "Recording":
        """Return a recording of one batch entry, as a batch of 1, with the same tokens.

        Args:
            index: the index of the batch entry.

        Raises:
            ValueError: a layer has no batch axis.
            IndexError: the batch has no such entry.
            RegardError: a recorded answer has no batch axis.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(3, 2, 5, 4)
            >>> regard.Recording({"layer": regard.attend(x, x)}).entry(2)["layer"].shape
            torch.Size([1, 2, 5, 5])
        """
        one = self._with(layer.entry(index) for layer in self.layers)
        one.shard = None
        return one

    def apart(self) -> "Recording":
        """Return a recording whose windows and tiles of a picture are layers of their own.

        A layer of which several batch entries have parts of a picture has the first of them in its
        place; the others follow all layers. They are named as in ``"layer part 3"``, and have the
        index of the layer in the model. Other layers are the same.

        Example:
            >>> import torch, regard
            >>> from PIL import Image
            >>> x = torch.zeros(2, 1, 4, 4)
            >>> tiles = [regard.grid(range(4), 2, 2, entry=entry) for entry in (0, 1)]
            >>> seen = regard.Recording({"layer": regard.attend(x, x)})
            >>> list(seen.with_pictures([Image.new("RGB", (64, 64))], tiles).apart())
            ['layer part 0', 'layer part 1']
        """
        layers, others = list[Layer](), list[Layer]()
        for index, layer in enumerate(self.layers):
            entries = sorted({0, *(grid.entry for grid in layer.grids)})
            if len(entries) < 2:
                layers.append(layer)
                continue
            for entry in entries:
                name, origin = f"{layer.name} part {entry}", layer.origin or Origin(index)
                part = replace(layer.entry(entry), name=name, origin=origin)
                (others if entry else layers).append(part)
        return self._with((*layers, *others))

    def with_pictures(
        self,
        pictures: "Sequence[Image | Picture]",
        grids: Grid | Sequence[Grid] | Mapping[str, Sequence[Grid]],
    ) -> "Recording":
        """Return the same recording with the pictures that the model saw.

        Args:
            pictures: the pictures, as images of Pillow. A smaller copy of each is kept, or only its
                size with ``regard.images.keep(image, data=False)``.
            grids: the grids of tokens that stand for the parts of the pictures, from
                ``regard.locate`` or ``regard.grid``: those of all layers, or a mapping from the
                names of layers to the grids of each. Layers that are missing have none.

        Raises:
            TypeError: pictures are not pictures, or grids are not grids.
            KeyError: no layer has this name.
            ValueError: a grid does not fit a layer or the pictures.

        Example:
            >>> import torch, regard
            >>> from PIL import Image
            >>> x = torch.zeros(1, 2, 5, 4)
            >>> seen = regard.Recording({"layer": regard.attend(x, x)})
            >>> photo, grid = Image.new("RGB", (64, 64)), regard.grid(range(1, 5), 2, 2)
            >>> seen = seen.with_pictures([photo], grid)
            >>> seen.image("layer", head=0, query=0)
            tensor([[0.2000, 0.2000],
                    [0.2000, 0.2000]])
        """
        same = self._with(self.layers)
        same.put_pictures(pictures, grids)
        return same

    def put_pictures(
        self,
        pictures: "Sequence[Image | Picture]",
        grids: Grid | Sequence[Grid] | Mapping[str, Sequence[Grid]],
    ) -> None:
        """Set the pictures and grids of this recording; see ``with_pictures``."""
        if isinstance(pictures, str) or not isinstance(pictures, Sequence):
            raise TypeError("pictures is no list; pass a list of images of Pillow.")
        kept = tuple(map(keep, pictures))
        by_name = checked_grids(self.layers, kept, grids)
        for layer in self.layers:
            self.put(replace(layer, grids=by_name.get(layer.name, ())))
        self.pictures = kept

    def forget_pixels(self) -> None:
        """Forget the content of the pictures; their sizes and grids stay.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(1, 4, 2)
            >>> seen = regard.Recording({"a": regard.attend(x, x)})
            >>> seen.put_pictures([regard.images.Picture(8, 8)], regard.grid(range(4), 2, 2))
            >>> seen.forget_pixels()
            >>> seen.pictures[0].data is None
            True
        """
        self.pictures = tuple(replace(picture, data=None) for picture in self.pictures)

    def layer_grids(self, layer: str | int) -> tuple[Grid, ...]:
        """Return the grids of a layer; empty if its tokens have no place in a picture."""
        return layer_at(self.layers, layer).grids

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids of tokens that stand for the parts of pictures; empty without pictures.

        Raises:
            RegardError: the layers have different grids.
        """
        every = [layer.grids for layer in self.layers]
        if any(each != every[0] for each in every):
            raise RegardError(
                "layers of this recording have different grids; there is no one answer.\n"
                "    Ask for one layer, seen.layer_grids(layer), or a part, seen.part(layers)."
            )
        return every[0] if every else ()

    @property
    def boxes(self) -> Tensor:
        """The box of each key token in its picture, (tokens, 4): x0, y0, x1, y1 in pixels.

        Tokens that stand for no part of a picture have NaN.

        Raises:
            RegardError: the recording has no grids, or its layers have different ones.
        """
        return boxes_of(self.layers, self.grids, self.pictures)

    def image(
        self,
        layer: str | int,
        head: int | None = None,
        *,
        query: int | str | Sequence[int] | None = None,
        grid: int | None = None,
        without: Sequence[int | str] = (),
    ) -> Tensor:
        """Return the attention to each part of a picture.

        Args:
            layer: the name of the layer, or its index in the order in which layers ran.
            head: the index of the head. The default is the mean over all heads.
            query: the position of the query among all queries that ran; a word of the text or the
                text of a special token, such as ``"[CLS]"``, for the mean over its tokens; or
                several positions, for their mean. The default is the mean over all recorded
                queries.
            grid: the index of one of several grids of the layer.
            without: keys to ignore, such as sinks, class and register tokens: positions, or the
                texts of their tokens. Each row is renormalised.

        Returns:
            (rows, columns): the weight on each part; the sum is the share of the picture. If the
            layer has several grids and ``grid`` is None, one value for each box, (boxes,), grid by
            grid and row by row.

        Raises:
            KeyError: no layer has this name.
            IndexError: the layer, head, grid or query is out of range.
            ValueError: no token has the text, or the layer has a batch of several entries.
            RegardError: the layer has no grid, or its matrix was not recorded.

        Example:
            >>> import torch, regard
            >>> x = torch.zeros(1, 2, 5, 4)
            >>> seen = regard.Recording({"layer": regard.attend(x, x)})
            >>> size, grid = regard.images.Picture(64, 64), regard.grid(range(1, 5), 2, 2)
            >>> seen.with_pictures([size], grid).image("layer", without=[0]).sum()
            tensor(1.)
        """
        chosen, tokens = layer_at(self.layers, layer), (self.query_tokens, self.key_tokens)
        return image_of(chosen, tokens, head=head, query=query, grid=grid, without=without)

    def reduce(
        self, *reductions: Reduction, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Compute several reductions of each layer, in one pass over the layer.

        Recorded answers are returned, and missing answers are computed. A layer that has neither
        the answers nor a matrix is omitted.

        Args:
            reductions: the reductions: ``regard.TopK(8)``, ``regard.Entropy()``, your own.
            progress: called with the number of finished layers and the number of layers.

        Returns:
            For each layer its answer, or a tuple of answers for several reductions.

        Raises:
            TypeError: an argument is not a reduction.
            ValueError: there are no reductions, or a reduction does not fit a matrix.
            RegardError: no layer has the answers, or query and key to compute them from.

        Example:
            >>> import torch, regard
            >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
            >>> regard.Recording({"layer": even}).reduce(regard.Entropy())
            {'layer': tensor([0.6931, 0.6931])}
        """
        if not reductions:
            raise ValueError(
                "reduce() has no reductions; it needs at least one.\n"
                "    Pass for example regard.Entropy(), regard.TopK(8)."
            )
        check_reductions("reduce()", reductions)
        able, answers = able_to_answer(self.layers, reductions), dict[str, Any]()
        for layer in able:
            answers[layer.name] = layer.reduce(*reductions)
            if progress is not None:
                progress(len(answers), len(able))
        return answers

    def topk(self, k: int) -> dict[str, Top]:
        """Return the k largest weights of each row and their keys, for each layer; see ``TopK``."""
        return cast(dict[str, Top], self.reduce(TopK(k)))

    def entropy(self) -> dict[str, Tensor]:
        """Return the entropy of each row in nats, (..., num_heads, q_len); see ``Entropy``."""
        return self.reduce(Entropy())

    def received(self) -> dict[str, Tensor]:
        """Return the attention that each key receives from all queries, (..., num_heads, kv_len).

        It is ``Sum(-2)``, the score that selects H2O's heavy hitters (Zhang et al. 2023, section
        4).
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
        """Write the recording as one safetensors file with JSON, which ``regard.load`` reads.

        The file is written atomically. It replaces an older recording, and no other file.

        Args:
            path: the file, ``run.safetensors``, in an existing folder. For a part of a distributed
                run, a folder, in which each process writes its own file.
            progress: called with the number of written layers and the number of layers.

        Raises:
            RegardError: a layer contains code (a ``score_mod``, a reduction of your own) or NaN,
                the file cannot be written, or it exists and is not a recording.

        Example:
            >>> import torch, regard
            >>> even = regard.attend(torch.zeros(2, 2), torch.zeros(2, 2))
            >>> regard.Recording({"layer": even}, model="Tiny").save("run.safetensors")
            >>> regard.load("run.safetensors").model
            'Tiny'
        """
        file = path if self.shard is None else self.shard.file(check_path(path))
        write(check_target(file), self, progress=progress)

    def rollout(self, residual: float = 0.5) -> Rollout:
        """Return the attention rollout of all layers; see ``rollout``.

        Raises:
            ValueError: queries and keys have different tokens; and the errors of ``rollout``.
        """
        layers = {layer.name: layer.whole() for layer in self.layers}
        rolled = rollout(layers, residual=residual)
        if not one_text(self.query_tokens, self.key_tokens, range(rolled.shape[-1])):
            raise ValueError(
                "query_tokens and key_tokens differ; only self-attention can be rolled out.\n"
                "    Take its layers and their tokens, "
                "seen.part(names).with_tokens(tokens).rollout()."
            )
        return rolled


def _rank_of(recording: Recording, index: int) -> str:
    return f"recording {index}" if recording.shard is None else f"rank {recording.shard.rank}"


def check_recording(name: str, seen: object) -> Recording:
    """Return a recording; raise a TypeError for anything else, such as a matrix."""
    if isinstance(seen, Recording):
        return seen
    raise TypeError(
        f"{name} is {kind_text(seen)}; it must be a Recording.\n"
        "    Make one with regard.observe(model), regard.load(path) or "
        "regard.Recording({name: A}); regard.show(A) draws a matrix itself."
    )


def merged(recordings: Sequence[Recording], names: Sequence[str]) -> Recording:
    """Merge the parts of a distributed run; see ``Recording.merge``.

    Args:
        recordings: the parts.
        names: the names of the parts, for errors.
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
        if other.pictures != first.pictures:
            raise RegardError(
                f"{name} has other pictures than {names[0]}; only equal ones can be merged.\n"
                "    Merge the parts first, then use seen.with_pictures."
            )
    whole = Recording(
        {}, model=first.model, query_tokens=first.query_tokens, key_tokens=first.key_tokens
    )
    whole.refused, whole.pictures = refused, first.pictures
    for layer in layers:
        whole.put(layer)
    return whole
