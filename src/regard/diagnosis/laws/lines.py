"""On which line of somebody's code a mistake stands."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from regard.diagnosis.inputs.tape import Place, Step, addresses, reached, tensors_in

__all__ = ["Lines"]

_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm")
_SOFTMAXES = ("_softmax", "_safe_softmax", "_log_softmax")
_MASKING = ("masked_fill", "where", "add", "sub", "mul", "tril", "triu", "index_put", "fill")
_COMPARISONS = ("ge", "gt", "le", "lt")
_EXCHANGES = ("permute", "transpose", "t", "numpy_T")
_TURNS = ("eq", "ne", "mul", "sub", "rsub", "bitwise_not", "logical_not")
_FILLING = ("masked_fill", "where", "index_put", "fill")


class Lines:
    """The operations of one run, with what each depends on.

    Args:
        steps: of a run that kept them.
        inputs: the arguments that hold numbers of tokens.
        masks: those that a mistake is about; empty: all masks.
    """

    def __init__(
        self, steps: Sequence[Step], inputs: Sequence[Tensor], masks: Sequence[Tensor] = ()
    ) -> None:
        self._steps = steps
        self._masked = reached(steps, addresses(list(masks)))
        self._moved = reached(steps, addresses(list(inputs)))
        self._softmax = self._first_softmax()
        start = steps[self._softmax].writes if self._softmax >= 0 else set[int]()
        self._behind = reached(steps[self._softmax + 1 :], start)

    def of(self, name: str) -> Place | None:
        """Return the line of a mistake; None where no operation tells."""
        number = _FINDERS.get(name, Lines.weights)(self)
        number = self.weights() if number is None else number
        return None if number is None else self._steps[number].place

    @property
    def score_shape(self) -> torch.Size | None:
        """The shape of the scores; None where no product gave them."""
        number = self.scores()
        if number is None:
            return None
        step = self._steps[number]
        if "scaled_dot" in step.name:
            query, key = step.args[:2]
            return torch.Size([*query.shape[:-1], key.shape[-2]])
        return step.outputs[0].shape

    def _uses(self, step: Step) -> int:
        """Return how many arguments of an operation depend on the inputs."""
        return sum(at in self._moved for at in step.reads)

    def _first_softmax(self) -> int:
        for names in (_SOFTMAXES, ("scaled_dot",), ("exp", "exp_")):
            for number, step in enumerate(self._steps):
                named = step.name in names or (names == ("scaled_dot",) and names[0] in step.name)
                if named and self._uses(step):
                    return number
        return -1

    def _is_fused(self) -> bool:
        return self._softmax >= 0 and "scaled_dot" in self._steps[self._softmax].name

    def _before(self) -> Iterator[tuple[int, Step]]:
        """Yield the operations up to the softmax, the last first."""
        last = self._softmax if self._softmax >= 0 else len(self._steps)
        yield from reversed(list(enumerate(self._steps[:last])))

    def _after(self) -> Iterator[tuple[int, Step]]:
        """Yield the operations that depend on the weights."""
        for number, step in enumerate(self._steps):
            is_later = number > self._softmax >= 0
            if is_later and not self._behind.isdisjoint(step.reads):
                yield number, step

    def weights(self) -> int | None:
        return self._softmax if self._softmax >= 0 else None

    def scores(self) -> int | None:
        if self._is_fused():
            return self._softmax
        for names in (_PRODUCTS, ("mul", "sum")):
            for number, step in self._before():
                is_product = step.name in names and (step.name == "sum" or self._uses(step) >= 2)
                if is_product and self._uses(step):
                    return number
        return None

    def mixing(self) -> int | None:
        if self._is_fused():
            return self._softmax
        for number, step in self._after():
            if self._uses(step) >= 2 and step.name in (*_PRODUCTS, "mul"):
                sums = (n for n, s in self._after() if n > number and s.name == "sum")
                return next(sums, number) if step.name == "mul" else number
        return None

    def mixings(self) -> list[int]:
        """Return every product of weights with something that does not depend on them."""
        found: list[int] = []
        for number, step in self._after():
            behind = [at in self._behind for at in step.reads]
            if step.name in _PRODUCTS and sum(behind) == 1 and self._uses(step) >= 2:
                found.append(number)
        first = self.mixing()
        return found or ([] if first is None else [first])

    def columnwise(self) -> int | None:
        """Return weights times values number by number, as if values lay in columns."""
        for number, step in self._after():
            tensors = tensors_in(step.args)
            if step.name == "mul" and len(tensors) == 2 and self._uses(step) == 2:
                behind = [at in self._behind for at in step.reads]
                if tensors[0].shape == tensors[1].shape and sum(behind) == 1:
                    return number
        return None

    def place(self, number: int) -> Place | None:
        """Return the line of an operation."""
        return self._steps[number].place

    def masking(self) -> int | None:
        for number, step in enumerate(self._steps):
            plain = step.name.removesuffix("_")
            hides = plain in _MASKING or "scaled_dot" in plain
            if hides and self._uses(step) and not self._masked.isdisjoint(step.reads):
                return number
        if self._is_fused():
            return self._softmax
        for number, step in self._before():
            if not self._uses(step):
                continue
            plain = step.name.removesuffix("_")
            tensors = tensors_in(step.args)
            wide = [t for t in tensors if t.ndim >= 2 and t.numel() > 1]
            if plain in (*_FILLING, "tril", "triu"):
                return number
            if plain in _MASKING and len(wide) == 2 and self._uses(step) == 1:
                return number
        return self.weights()

    def turning_mask(self) -> int | None:
        """Return the last operation that gave a mask of the caller its meaning."""
        made = (n for n in self._made(_TURNS) if self._steps[n].writes <= self._masked)
        return next(made, self.masking())

    def bounding(self) -> int | None:
        """Return the first comparison or triangle that a mask comes from, as it stands."""
        made = list(self._made((*_COMPARISONS, "tril", "triu", *_EXCHANGES)))
        straight = takewhile(lambda n: self._steps[n].name not in _EXCHANGES, made)
        *_, number = (self.masking(), *straight)
        return number

    def _made(self, names: Sequence[str]) -> Iterator[int]:
        """Yield the operations of these names that the mask of ``masking`` comes from."""
        last = self.masking()
        if last is None:
            return
        wanted = set(self._steps[last].reads) - self._moved
        for number in range(last - 1, -1, -1):
            step = self._steps[number]
            if not wanted.isdisjoint(step.writes):
                wanted |= set(step.reads)
                if step.name.removesuffix("_") in names and step.place is not None:
                    yield number

    def thrown_away(self) -> int | None:
        def is_read(number: int) -> bool:
            later = self._steps[number + 1 :]
            return any(not self._steps[number].writes.isdisjoint(s.reads) for s in later)

        fills = (n for n, s in self._before() if s.name in ("masked_fill", "where"))
        return next((n for n in fills if self._uses(self._steps[n]) and not is_read(n)), None)

    def turning(self) -> int | None:
        turns = ((n, s) for n, s in self._before() if _turns_all_axes(s))
        return next((n for n, s in turns if self._uses(s)), None)


def _turns_all_axes(step: Step) -> bool:
    """Return True for x.T and the like; einsum permutes axes, too, but hardly ever so."""
    if step.name != "permute":
        return step.name in ("t", "numpy_T")
    axes = [int(axis) % len(step.args[1]) for axis in step.args[1]]
    return axes == sorted(axes, reverse=True)


_NAMES: dict[Callable[[Lines], int | None], str] = {
    Lines.scores: "wrong-projection heads-and-tokens-exchanged",
    Lines.masking: "mask-fill-value padding-on-queries mask-of-another-sample",
    Lines.turning_mask: "mask-inverted",
    Lines.bounding: "causal-off-by-one causal-top-left",
    Lines.thrown_away: "mask-unused",
    Lines.mixing: "wrong-values",
    Lines.turning: "transpose-of-batch",
}
_FINDERS = {name: finder for finder, names in _NAMES.items() for name in names.split()}
"""Finders of lines by mistake; for other mistakes a law gives the line."""
