"""What was seen in a model: one attention matrix for each attention it ran."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from regard.matrix import AttentionMatrix

__all__ = ["Recording", "Token"]


class Token(NamedTuple):
    """A piece of text as people write it.

    Attributes:
        text: the piece with the white space before it; joined, the tokens give the text again.
        special: whether the tokenizer added it, as ``[CLS]``; it is no part of the text.

    Example:
        >>> import regard
        >>> "".join(token.text for token in (regard.Token("Life"), regard.Token(" is")))
        'Life is'
    """

    text: str
    special: bool = False


class Recording(Mapping[str, AttentionMatrix]):
    """The attention that a model ran, layer by layer: a mapping from names to matrices.

    ``seen["encoder.layer.0.attention.self"]`` is the matrix of the module of that name, ``seen[3]``
    the fourth in the order they ran. A module that attended again has ``#2``, ``#3`` after its
    name. Make one with ``regard.observe``.

    Attributes:
        model: the name of the model.
        query_tokens: one token for each query of the matrices; None when not known.
        key_tokens: one token for each key; None when not known.

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
        query_tokens: Iterable[Token] | None = None,
        key_tokens: Iterable[Token] | None = None,
    ) -> None:
        self._layers = dict(layers)
        self.model = model
        self.query_tokens = None if query_tokens is None else tuple(query_tokens)
        self.key_tokens = self.query_tokens if key_tokens is None else tuple(key_tokens)
        for name, matrix in self._layers.items():
            _check_count(name, "q_len", matrix.shape[-2], "query_tokens", self.query_tokens)
            _check_count(name, "kv_len", matrix.shape[-1], "key_tokens", self.key_tokens)

    def __getitem__(self, layer: str | int) -> AttentionMatrix:
        """The matrix of a layer, by name or by its place in the order they ran.

        Raises:
            KeyError: no layer of that name.
            IndexError: no layer at that place.
        """
        names = list(self._layers)
        if isinstance(layer, int):
            if not names:
                raise IndexError(f"layer is {layer}; this recording has no layers yet.")
            if not -len(names) <= layer < len(names):
                raise IndexError(
                    f"layer is {layer}; this recording has {len(names)} layers, "
                    f"0 to {len(names) - 1}."
                )
            return self._layers[names[layer]]
        if layer not in self._layers:
            known = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise KeyError(f"layer is {layer!r}; this recording has {known or 'no layers yet'}")
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        """The names, in the order the layers ran."""
        return iter(self._layers)

    def __len__(self) -> int:
        """How many layers were seen."""
        return len(self._layers)

    def __repr__(self) -> str:
        """The model, and one line for each layer."""
        lines = [f"  {place}  {name}  {self[name]!r}" for place, name in enumerate(self)]
        return "\n".join([f"Recording of {self.model or 'a model'}, {len(self)} layers", *lines])

    def add(self, name: str, matrix: AttentionMatrix) -> None:
        """Keep one more matrix; a name that is taken gets ``#2``, ``#3``, ... after it."""
        unique, count = name, 1
        while unique in self._layers:
            count += 1
            unique = f"{name}#{count}"
        self._layers[unique] = matrix

    def with_tokens(
        self, query_tokens: Iterable[Token], key_tokens: Iterable[Token] | None = None
    ) -> "Recording":
        """The same recording, with the text.

        Args:
            query_tokens: one for each query.
            key_tokens: one for each key; the query tokens when left out.

        Raises:
            ValueError: their count differs from a matrix.
        """
        return Recording(
            self._layers, model=self.model, query_tokens=query_tokens, key_tokens=key_tokens
        )


def _check_count(
    name: str, length_name: str, length: int, argument: str, tokens: tuple[Token, ...] | None
) -> None:
    if tokens is not None and len(tokens) != length:
        raise ValueError(
            f"{argument} has {len(tokens)} tokens; layer {name!r} has {length_name} = {length}.\n"
            "    Give one token for each position, special tokens included."
        )
