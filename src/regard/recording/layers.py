"""Layers of a recording, with their matrices or recorded answers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.errors import RegardError, check_index_bounds, check_whole, shape_text
from regard.images.patch_grid import Grid
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.real_tokens import texts_of
from regard.reductions.reduction import Reduction
from regard.reductions.top_k import Top, TopK, fitting, padded
from regard.text.tokens import Token

Content = TypeVar("Content")


@dataclass(frozen=True, eq=False)
class Lazy(Generic[Content]):
    """A function that reads an object; its repr is that of ``shown``, or of the object."""

    read: Callable[[], Content]
    shown: Content | None = None

    def __call__(self) -> Content:
        return self.read()

    def __repr__(self) -> str:
        return repr(self.read() if self.shown is None else self.shown)


@dataclass(frozen=True, eq=False)
class InMemory(Generic[Content]):
    """A function that returns an object in memory; others read it from a file."""

    content: Content

    def __call__(self) -> Content:
        return self.content

    def __repr__(self) -> str:
        return repr(self.content)


class Answers(Mapping[Reduction, Any]):
    """A mapping from reductions to their answers, with lookup by equality.

    Lookup needs no hash, because a user's own reduction may not be hashable.

    Args:
        pairs: each reduction with its answer.
    """

    def __init__(self, pairs: Iterable[tuple[Reduction, Any]] = ()) -> None:
        self._pairs = tuple((reduction, InMemory(answer)) for reduction, answer in pairs)

    @classmethod
    def reading(cls, pairs: Iterable[tuple[Reduction, Callable[[], Any]]]) -> "Answers":
        """Return answers that are read on access.

        Args:
            pairs: each reduction with a function that returns its answer.
        """
        answers = cls()
        answers._pairs = tuple(pairs)
        return answers

    def before(self, others: "Answers") -> "Answers":
        """Return these answers followed by others; for equal reductions the first is used."""
        return Answers.reading((*self._pairs, *others._pairs))

    def map(self, change: Callable[[Reduction, Any], Any]) -> "Answers":
        """Apply a function to all answers; answers that are read on access are changed then."""

        def changed(asked: Reduction, read: Callable[[], Any]) -> Callable[[], Any]:
            in_memory = isinstance(read, InMemory)
            return InMemory(change(asked, read())) if in_memory else lambda: change(asked, read())

        return Answers.reading((asked, changed(asked, read)) for asked, read in self._pairs)

    def __getitem__(self, reduction: Reduction) -> Any:
        """Return the answer to a reduction; a larger ``TopK`` answers a smaller one.

        Raises:
            KeyError: there is no answer to this reduction.
            RegardError: the file of the answer is damaged.
        """
        for asked, read in self._pairs:
            if _answers(asked, reduction):
                answer = read()
                if isinstance(reduction, TopK):
                    return Top(*(part[..., : reduction.k] for part in answer))
                return answer
        raise KeyError(reduction)

    def __contains__(self, reduction: object) -> bool:
        """Return True if there is an answer to a reduction, without reading it."""
        return any(_answers(asked, reduction) for asked in self)

    def __iter__(self) -> Iterator[Reduction]:
        """Yield the reductions in their order."""
        return (reduction for reduction, _ in self._pairs)

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self._pairs)

    def __repr__(self) -> str:
        """Return the reductions, without their answers."""
        return f"Answers({', '.join(map(repr, self))})"


def _answers(asked: Reduction, reduction: object) -> bool:
    """Return True if the answer to the first reduction contains the answer to the second."""
    if isinstance(asked, TopK) and isinstance(reduction, TopK):
        return reduction.k <= asked.k
    return asked is reduction or _equal(asked, reduction)


def _equal(first: Reduction, second: object) -> bool:
    """Return True if two reductions are equal; False if they cannot be compared."""
    try:
        return type(first) is type(second) and bool(first == second)
    except (RuntimeError, ValueError):  # from PyTorch and NumPy, for bool(tensor == tensor)
        return False


class NotKeptError(RegardError, KeyError):
    """An error for a layer whose matrix is not in the recording, which has only its answers.

    It is a KeyError, because a recording is a mapping to the recorded matrices.
    """

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class Origin(NamedTuple):
    """The position of a layer in its model, if layers or heads are missing from the recording.

    Attributes:
        layer: the index of the module, in the order in which modules ran.
        heads: the index in the model of each head; None if all heads were recorded.
    """

    layer: int
    heads: tuple[int, ...] | None = None


class Queries(NamedTuple):
    """The queries of the rows of a matrix: a contiguous part of all queries that ran.

    Attributes:
        start: the position of the first row among all queries that ran.
        ran: the number of queries that ran.
    """

    start: int
    ran: int


class Refusal(NamedTuple):
    """An attention that ran and was not recorded.

    Attributes:
        module: the name of the module that ran it.
        line: the location, ``file:line``; None if it is unknown.
        reason: the reason, with a remedy.
    """

    module: str
    line: str | None
    reason: str


@dataclass(frozen=True)
class Layer:
    """One layer of a recording.

    Attributes:
        name: the name in the recording.
        shape: the shape of the matrix, (..., num_heads, q_len, kv_len).
        matrix: a function that returns the matrix; None if only answers were recorded.
        answers: the answers that were computed while the model ran.
        origin: the position in the model; None if all layers and heads were recorded.
        queries: the queries of the rows; None if all queries were recorded.
        value: a function that returns the model's value, (..., num_kv_heads, kv_len, head_dim), so
            that ``matrix @ value`` is the layer's output; None if it was not recorded.
        grids: the grids of tokens that stand for the parts of pictures.
    """

    name: str
    shape: torch.Size
    matrix: Callable[[], AttentionMatrix] | None
    answers: Answers
    origin: Origin | None = None
    queries: Queries | None = None
    value: Callable[[], Tensor] | None = None
    grids: tuple[Grid, ...] = ()

    @property
    def positions(self) -> range:
        """The position of each row's query among all queries that ran."""
        start = 0 if self.queries is None else self.queries.start
        return range(start, start + self.shape[-2])

    @property
    def reads_itself(self) -> bool:
        """True if queries and keys can be the same text: as many keys as queries ran."""
        ran = self.shape[-2] if self.queries is None else self.queries.ran
        return ran == self.shape[-1]

    @property
    def texts(self) -> tuple[range, ...]:
        """The range of keys without padding for each batch entry.

        It is empty if only answers were recorded.
        """
        if self.matrix is None:
            return ()
        return texts_of(self.whole(), rows=self.positions if self.reads_itself else range(0))

    def model_index(self, index: int) -> int:
        """Return the index of this layer in the model, given its index in the recording."""
        return index if self.origin is None else self.origin.layer

    def head(self, index: int) -> int:
        """Return the index of a head in the model, given its index in the matrix."""
        if self.origin is None or self.origin.heads is None:
            return index
        return self.origin.heads[index]

    def whole(self) -> AttentionMatrix:
        """Return the matrix.

        Raises:
            RegardError: only answers were recorded, or the file of the matrix is damaged.
        """
        if self.matrix is None:
            raise NotKeptError(
                f"layer {self.name!r} has answers only, {_listed(self.answers)}; "
                "its query and key were not kept.\n"
                '    Observe the model again with keep="qk".'
            )
        return self.matrix()

    def whole_value(self) -> Tensor:
        """Return the value, (..., num_kv_heads, kv_len, head_dim).

        Raises:
            RegardError: the value was not recorded, or its file is damaged.
        """
        if self.value is None:
            raise RegardError(
                f"layer {self.name!r} has no value; it was not kept.\n"
                '    Observe the model again with keep="qkv".'
            )
        return self.value()

    def reduce(self, *reductions: Reduction) -> Any:
        """Return recorded answers, and compute missing ones from the matrix.

        The result is one answer for one reduction, and a tuple for several.

        Raises:
            RegardError: an answer is missing and the matrix was not recorded, or the file is
                damaged.
        """
        missing = [reduction for reduction in reductions if reduction not in self.answers]
        if missing and self.matrix is None:
            raise RegardError(
                f"layer {self.name!r} has no answer to {_short(missing[0])}, and its query and key "
                f"were not kept; it has {_listed(self.answers)}.\n"
                "    Observe the model again with this reduction in keep=[...], or with "
                'keep="qk".'
            )
        answered = self.answers
        if missing:
            computed = zip(missing, asked_of(self.whole(), missing), strict=True)
            answered = Answers(computed).before(answered)
        answers = tuple(answered[reduction] for reduction in reductions)
        return answers[0] if len(answers) == 1 else answers

    def entry(self, index: int) -> "Layer":
        """Return the layer with one entry of the batch, as a batch of 1.

        Raises:
            ValueError: the layer has no batch axis.
            IndexError: the batch has no such entry.
            RegardError: the answer to a user's own reduction has no batch axis.
        """
        if len(self.shape) < 4:
            raise ValueError(
                f"layer {self.name!r} has shape {shape_text(self.shape)}; it has no batch, whose "
                "entry could be taken.\n"
                "    It is one text already: ask it as it is."
            )
        start = check_index_bounds(check_whole("index", index), self.shape[0], 0)
        one = slice(start, start + 1)
        answers = self.answers.map(lambda asked, answer: self._entry_of(asked, answer, one))
        return replace(
            self,
            shape=torch.Size((1, *self.shape[1:])),
            matrix=None if self.matrix is None else lambda: self.whole()[one],
            value=None if self.value is None else lambda: self.whole_value()[one],
            answers=answers,
            grids=tuple(replace(grid, entry=0) for grid in self.grids if grid.entry == start),
        )

    def _entry_of(self, reduction: Reduction, answer: Any, one: slice) -> Any:
        tensors = answer if isinstance(answer, Top) else (answer,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.shape[:1] != self.shape[:1]:
                raise RegardError(
                    f"layer {self.name!r} has an answer to {_short(reduction)} that is not one for "
                    "each entry of the batch.\n"
                    "    Observe the model again with one text."
                )
        return Top(*(part[one] for part in answer)) if isinstance(answer, Top) else answer[one]

    def check_tokens(
        self, query_tokens: Sequence[Token] | None, key_tokens: Sequence[Token] | None
    ) -> None:
        """Check that there is one token for each query and each key, if tokens are known.

        Raises:
            ValueError: the number of tokens differs from q_len or kv_len.
        """
        sides = (("query", "q_len", query_tokens), ("key", "kv_len", key_tokens))
        for (side, length_name, tokens), length in zip(sides, self.shape[-2:], strict=True):
            if tokens is not None and len(tokens) != length:
                raise ValueError(
                    f"{side}_tokens has {len(tokens)} tokens; layer {self.name!r} has "
                    f"{length_name} = {length}.\n"
                    "    Give one token for each position, special tokens included."
                )

    def __repr__(self) -> str:
        """Return a description of the matrix, or its shape and the recorded answers."""
        if self.matrix is not None:
            return repr(self.matrix)
        return f"answers only, of shape {tuple(self.shape)}: {_listed(self.answers)}"


def one_text(
    query_tokens: Sequence[Token] | None, key_tokens: Sequence[Token] | None, rows: range
) -> bool:
    """Return True if queries and keys can be the same text: their tokens are equal or unknown.

    ``rows`` are the positions of the queries among the keys.
    """
    if query_tokens is None or key_tokens is None:
        return True
    return tuple(query_tokens) == tuple(key_tokens[rows.start : rows.stop])


def able_to_answer(layers: Sequence[Layer], reductions: Sequence[Reduction]) -> Sequence[Layer]:
    """Return the layers that have or can compute these answers; all layers if none can."""
    able = [
        layer
        for layer in layers
        if layer.matrix is not None or all(each in layer.answers for each in reductions)
    ]
    return able or layers


def asked_of(matrix: AttentionMatrix, reductions: Sequence[Reduction]) -> tuple[Any, ...]:
    """Compute the answers of a matrix in one pass, in the form that recordings use.

    A ``TopK`` with k larger than kv_len is padded to k.
    """
    answers = matrix.reduce(*(fitting(each, matrix.shape[-1]) for each in reductions))
    answers = answers if len(reductions) > 1 else (answers,)
    return tuple(padded(*each) for each in zip(reductions, answers, strict=True))


def layer_at(layers: Sequence[Layer], which: str | int) -> Layer:
    """Return the layer with a name, or at an index in the order in which layers ran.

    Raises:
        KeyError: no layer has this name.
        IndexError: the index is out of range.
    """
    if isinstance(which, int):
        if not layers:
            raise IndexError(f"layer is {which}; this recording has no layers yet.")
        if not -len(layers) <= which < len(layers):
            raise IndexError(
                f"layer is {which}; this recording has {len(layers)} layers, "
                f"0 to {len(layers) - 1}."
            )
        return layers[which]
    for layer in layers:
        if layer.name == which:
            return layer
    first = ", ".join(layer.name for layer in layers[:3]) + (", ..." if len(layers) > 3 else "")
    raise KeyError(f"layer is {which!r}; this recording has {first or 'no layers yet'}")


def recorded_indices(
    layers: Sequence[Layer],
    layer: int | None,
    head: int | None,
    owner: str = "this recording",
) -> tuple[int | None, int | None]:
    """Return the indices in a recording of a layer and a head with these numbers in the model.

    Args:
        layers: the layers of the recording.
        layer: the index of a layer in the model; None for none.
        head: the index of a head in that layer of the model, or in the first layer; None for none.
        owner: what has the layers, for messages.

    Raises:
        ValueError: the layer or the head was not recorded.
    """
    index = None
    if layer is not None:
        indices = [each.model_index(at) for at, each in enumerate(layers)]
        index = _index_of("layer", layer, indices, owner)
    if head is None:
        return index, None
    chosen = layers[index or 0]
    count = chosen.shape[-3] if len(chosen.shape) > 2 else 1
    of = f"layer {chosen.model_index(index or 0)} of {owner}"
    return index, _index_of("head", head, [chosen.head(at) for at in range(count)], of)


def _index_of(name: str, number: int, numbers: list[int], owner: str) -> int:
    if number in numbers:
        return numbers.index(number)
    text = f"{name}s {', '.join(map(str, numbers))}"
    if len(numbers) == 1:
        text = f"only {name} {numbers[0]}"
    elif numbers == list(range(len(numbers))):
        text = f"{name}s 0 to {numbers[-1]}"
    raise ValueError(f"{name} is {number}; {owner} has {text}.")


def tokens_of_rows(
    tokens: tuple[Token, ...] | None, layers: Sequence[Layer]
) -> tuple[Token, ...] | None:
    """Return the tokens of the recorded rows, given the tokens of all queries that ran.

    Tokens with another count are returned unchanged.

    Raises:
        ValueError: the layers differ in length, so that no tokens fit all of them.
    """
    other = next((each for each in layers if each.shape[-2:] != layers[0].shape[-2:]), None)
    if tokens is not None and other is not None:
        first, second = (
            f"{layer.name!r} has q_len = {layer.shape[-2]} and kv_len = {layer.shape[-1]}"
            for layer in (layers[0], other)
        )
        raise ValueError(
            f"query_tokens has {len(tokens)} tokens; layer {first}, layer {second}, and "
            "all layers must have one length.\n"
            "    Give each its own text: seen.part(names).with_tokens(...)."
        )
    kept = {(layer.queries, layer.shape[-2]) for layer in layers}
    if tokens is None or len(kept) != 1:
        return tokens
    [(queries, q_len)] = kept
    if queries is None or len(tokens) != queries.ran:
        return tokens
    return tokens[queries.start : queries.start + q_len]


def shape_of_all(function: str, layers: Sequence[Layer]) -> tuple[int, int, int]:
    """Return num_heads, q_len and kv_len, which all layers must share.

    Args:
        function: the name of the calling function in ``regard``, for errors.
        layers: the layers.

    Raises:
        ValueError: there are no layers, they differ in shape, or a batch has several texts.
    """
    call = f"{function.rpartition('.')[2]}()"
    if not layers:
        raise ValueError(
            f"this recording has no layers yet; {call} needs at least one.\n"
            "    Run the model inside the block of regard.observe first."
        )
    first = layers[0]
    for layer in layers:
        if any(n != 1 for n in layer.shape[:-3]):
            raise ValueError(
                f"layer {layer.name!r} has shape {shape_text(layer.shape)}; {call} looks at one "
                "text, a batch of 1.\n"
                "    Take one of them, seen.entry(0)."
            )
        if layer.shape[-3:] != first.shape[-3:]:
            raise ValueError(
                f"layer {layer.name!r} has shape {shape_text(layer.shape)} and {first.name!r} has "
                f"{shape_text(first.shape)}; num_heads, q_len and kv_len must be equal.\n"
                f"    Ask for them apart, regard.{function}(seen.part(names))."
            )
    return first.shape[-3] if len(first.shape) > 2 else 1, first.shape[-2], first.shape[-1]


def _listed(answers: Answers) -> str:
    return ", ".join(map(_short, answers)) or "no answers"


def _short(reduction: Reduction) -> str:
    """Return the repr of a reduction, or only its name if the repr is long."""
    written = repr(reduction)
    return written if len(written) <= 60 else f"{type(reduction).__name__}(...)"
