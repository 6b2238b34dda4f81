"""The weights of the attention inside of code, read off whatever stands around it."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.diagnosis.laws.core import Core, Cut, Values
from regard.diagnosis.laws.lab import Lab, NotTried, differs, normal
from regard.diagnosis.laws.tape import addresses, in_words

__all__ = [
    "Channel",
    "Weighing",
    "core_of",
    "has_no_projections",
    "is_before_weights",
    "joined",
    "mistake_of_numpy",
    "queries_and_keys",
    "rank_of",
    "tables_of",
    "with_other_numbers",
]

Channel = tuple[Cut, int]
_Got = TypeVar("_Got")
_GATED = "Its output is multiplied with a gate, which was not judged."


def core_of(lab: Lab) -> "Weighing":
    """Return the attention inside of the code, worked out once for each lab.

    Raises:
        NotTried: no attention can be cut out.
    """
    if not lab.specimen.has_tokens:
        raise NotTried("None of its axes stands for the tokens.")
    if lab.weighing is None:
        taken = {n for slot in lab.specimen.sources.values() for n in slot.axes}
        s = lab.specimen
        most = 11 if s.most_tokens is None else s.most_tokens
        lengths = [n for n in (5, 7, 6, 9, 11, 4, 3) if n not in taken and n <= most]
        tokens = s.tokens if s.is_fixed or not lengths else lengths[0]
        try:
            if tokens > 64:
                raise NotTried(f"{tokens} tokens are too many: pass an example with fewer.")
            core = Core(lab.for_first_sample(), tokens)
            lab.weighing = Weighing(core)
        except NotTried as error:
            lab.weighing = error
        except Exception as error:  # noqa: BLE001  # somebody's code may raise anything
            lab.weighing = NotTried(f"With other numbers inside it raises {in_words(error)}.")
    if isinstance(lab.weighing, NotTried):
        raise lab.weighing
    assert isinstance(lab.weighing, Weighing)
    return lab.weighing


def has_no_projections(lab: Lab) -> bool:
    """Return True if code gives softmax(x xᵀ) x, scaled or not: queries, keys and values are x."""
    s = lab.specimen
    if lab.model is not None and next(lab.model.parameters(), None) is not None:
        return False
    first, *others = s.sources.values()
    is_plain = first.kind == "content" and len(first.axes) == 2 + s.has_batch and s.has_tokens
    if others or s.masks or not is_plain or not lab.sees_rows:
        return False
    seen = lab.influence
    for tokens in (s.tokens, s.tokens if s.is_fixed else s.tokens + 2):
        contents = s.contents(s.batch if s.has_batch else 1, tokens, seed=17, size=0.5)
        [x] = contents.values()
        scores = x @ x.mT
        if not bool(seen.triu(1).any()):
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
        rows = lab.run(contents).rows
        rights = [(scores * scale).softmax(-1) @ x for scale in (1.0, x.shape[-1] ** -0.5)]
        if not any(r.shape == rows.shape and not differs(r, rows).any() for r in rights):
            return False
    return True


class Weighing:
    """The weights of a core, read off by putting indicators in the place of the values."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.query, self.key = core.channels("query"), core.channels("key")
        self.value = core.channels("value")
        self.gate: Tensor | float = 1.0  # what each output is multiplied with, (rows, columns)
        if not self.missing and core.columns_are_channels:
            self._leave_out_gate()
        if core.plan.exit is not None and core.run.steps[core.plan.exit[0]].name == "mul":
            core.lab.notes.append(_GATED)

    def _leave_out_gate(self) -> None:
        """Divide the outputs by a gate: numbers of a row's own token that no key moves."""
        active = self.constant.abs() > 1e-9  # (channels, rows, columns)
        is_level = not differs(self.constant, self.constant[:, :1].expand_as(active)).any()
        if is_level or bool((active.sum(0) != 1).any()):
            return
        channels = [*self.query, *self.key]
        ones = self.core.placed(self.core.bases(len(channels)), self.value, 1.0)
        moved = {cut: t.clone() for cut, t in ones.items()}
        for probe, (cut, c) in enumerate(channels):
            moved[cut][probe, self.core.places[cut][:, c]] += 0.8
        gates = differs(self.core(moved), self.core(ones)).flatten(1).any(1)
        by_query, by_key = gates[: len(self.query)], gates[len(self.query) :]
        if bool(by_key.any()) or bool(by_query.all()) or not bool(by_query.any()):
            return
        self.query = [own for own, is_gate in zip(self.query, by_query, strict=True) if not is_gate]
        self.gate = self.constant.sum(0)
        del self.constant
        self.core.lab.notes.append(_GATED)

    @property
    def missing(self) -> list[str]:
        """The roles that nothing plays."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        return [name for name, channels in named.items() if not channels]

    @cached_property
    def offset(self) -> Tensor:
        """The output where all values are 0, (rows, columns)."""
        return self.core(self.core.placed(self.core.bases(1), self.value, 0.0))[0]

    @cached_property
    def constant(self) -> Tensor:
        """The output for each value channel that is 1 at all tokens, (channels, rows, columns)."""
        return (self.core(self._one_each(None)) - self.offset) / self.gate

    @cached_property
    def shares(self) -> Tensor:
        """The same for 1 at one token alone, (channels, tokens, rows, columns)."""
        core, tokens = self.core, range(self.core.tokens)
        active = self.constant.abs().amax(1) > 1e-9  # (channels, columns)
        if bool((active.sum(0) == 1).all()):  # each column follows one channel: all of them at once
            empty = core.placed(core.bases(1), self.value, 0.0)
            ones = joined([core.placed(empty, self.value, 1.0, j) for j in tokens])
            return (core(ones) - self.offset) / self.gate * active[:, None, None]
        shares = [(core(self._one_each(j)) - self.offset) / self.gate for j in tokens]
        return torch.stack(shares, 1)

    def _one_each(self, token: int | None) -> Values:
        count = len(self.value)
        values = self.core.placed(self.core.bases(count), self.value, 0.0)
        eye = torch.eye(count, dtype=torch.float64)
        return self.core.placed(values, self.value, eye, token)

    @cached_property
    def open_rows(self) -> Tensor:
        """The rows that have a token to attend to, bool, (rows,)."""
        return self.constant.abs().amax((0, 2)) > 1e-12

    @cached_property
    def heads(self) -> list[tuple[int, Tensor]]:
        """A value channel of each head, and the direction of its output, (columns,), in order.

        Columns with the same weights belong to one head.

        Raises:
            NotTried: a projection after the attention mixes channels with different weights.
        """
        constant = self.constant[:, self.open_rows][:, 0]
        active = constant.abs() > 1e-9  # (channels, columns)
        found: list[tuple[int, Tensor]] = []
        seen: list[Tensor] = []
        is_apart = bool((active.sum(0) <= 1).all())
        pairs = list(enumerate(constant))
        if is_apart:
            eye = torch.eye(constant.shape[1], dtype=torch.float64)
            pairs = [(int(channel), eye[column]) for column, channel in active.T.nonzero()]
        for channel, direction in pairs:
            length = direction @ constant[channel]
            own = self.shares[channel]
            weights = own @ direction / length
            others = torch.einsum("tr,c->trc", weights, direction)
            if not is_apart and differs(own, others, 1e-7).any():
                raise NotTried("A projection after the attention mixes its channels.")
            if not any(not differs(weights, other, 1e-9).any() for other in seen):
                seen.append(weights)
                found.append((channel, direction))
        return found

    def weights(self, values: Values, tokens: Sequence[int] | None = None) -> Tensor:
        """Return the weights of each head for some queries and keys, (probes, heads, rows, tokens).

        Args:
            values: (probes, numbers).
            tokens: whose weights are read; None: those of all.
        """
        tokens = range(self.core.tokens) if tokens is None else tokens
        core = self.core
        channels = [self.value[c] for c in dict.fromkeys(c for c, _ in self.heads)]
        empty = core.placed(values, self.value, 0.0)
        ones = [core.placed(empty, channels, 1.0, j) for j in tokens]
        read = self.outputs(joined(ones))  # (tokens and probes, rows, heads)
        return read.view(len(tokens), -1, *read.shape[1:]).permute(1, 3, 2, 0)

    def outputs(self, values: Values) -> Tensor:
        """Return one number of the output of each head, (probes, rows, heads)."""
        directions = torch.stack([direction for _, direction in self.heads])
        if rank_of(directions) < len(directions):
            raise NotTried("A projection after the attention mixes its heads.")
        inverse = cast(Tensor, torch.linalg.pinv(directions))  # pyright: ignore[reportUnknownMemberType]
        return (self.core(values) - self.offset) / self.gate @ inverse

    def scaled(self, factor: float, channels: list[Channel]) -> Values:
        """Return the base with some channels multiplied by a factor, one probe."""
        values = self.core.bases(1)
        for cut, c in channels:
            values[cut][:, self.core.places[cut][:, c]] *= factor
        return values


def joined(parts: list[Values]) -> Values:
    """Return several probes as one."""
    return {cut: torch.cat([part[cut] for part in parts]) for cut in parts[0]}


def queries_and_keys(w: Weighing) -> tuple[Tensor, Tensor]:
    """Return the arguments of a function of query, key and value, (heads, tokens, head_dim)."""
    contents = (w.core.contents[name].double().movedim(1, -2) for name in ("query", "key"))
    query, key = (t.flatten(0, -3) for t in contents)
    return query, key


def mistake_of_numpy(w: Weighing) -> str:
    """Return the mistake that gives the weights of a function without operations of PyTorch."""
    if w.core.run.steps:
        return ""  # a repair of an operation tells the mistake
    query, key = queries_and_keys(w)
    weights = w.weights(w.core.bases(1))[0]  # (heads, rows, tokens)
    if query.shape != key.shape or weights.shape != (*query.shape[:-1], query.shape[-2]):
        return ""
    keys = torch.stack([key.mT, key.reshape(key.mT.shape)])
    scores, viewed = query @ keys / query.shape[-1] ** 0.5
    hidden = weights < 1e-12
    known = {
        "softmax-wrong-axis": scores.masked_fill(hidden, -torch.inf).softmax(-2),
        "values-mixed-along-wrong-axis": scores.masked_fill(hidden.mT, -torch.inf).softmax(-1).mT,
        "keys-not-transposed": viewed.masked_fill(hidden, -torch.inf).softmax(-1),
    }
    return next((name for name, own in known.items() if not differs(own, weights).any()), "")


def rank_of(matrix: Tensor) -> int:
    """Return the rank of a matrix up to rounding."""
    return int(cast(Tensor, torch.linalg.matrix_rank(matrix, rtol=1e-6)))  # pyright: ignore[reportUnknownMemberType]


def is_before_weights(w: Weighing, parameter: Tensor, sums: Tensor) -> bool:
    """Return True if a parameter stands before the softmax: weights still have the same sums."""
    own = with_other_numbers(parameter, ..., lambda: w.weights(w.core.bases(1)).sum(-1))
    return not bool(differs(own, sums, 1e-6).any())


def tables_of(w: Weighing, most: int) -> Iterator[Tensor]:
    """Yield the parameters of at most so many numbers that are no projections."""
    steps, cuts = w.core.run.steps, w.core.plan.cuts
    read = {at for number, step in enumerate(steps) if number not in cuts for at in step.reads}
    for parameter in w.core.run.parameters:
        if parameter.numel() <= most and not read.isdisjoint(addresses(parameter)):
            yield parameter


def with_other_numbers(parameter: Tensor, part: Any, measured: Callable[[], _Got]) -> _Got:
    """Return what is measured while a part of a parameter has other numbers."""
    before = parameter.detach().clone()
    noise = normal(6, *before.shape).abs()
    with torch.no_grad():
        parameter[part] = (before * 1.25 + 0.1 * noise)[part]
        try:
            return measured()
        finally:
            parameter.copy_(before)
