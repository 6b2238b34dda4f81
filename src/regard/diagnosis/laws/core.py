"""Code as a function of query, key and value, whatever stands around its attention.

The last products with parameters before the scores are replaced by numbers of our own. The output
is read where the next such product takes it. So a module with any projections, and a function
without any, answer the same questions: which number moves which row. All probes run side by side in
the batch; code without a batch, or that loops over it, is run once for each probe.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor

from regard.diagnosis.laws.lab import Lab, NotTried, Run, differs, normal
from regard.diagnosis.laws.specimen import Contents
from regard.diagnosis.laws.tape import Place, Step, addresses, tensors_in

__all__ = ["Core", "Role", "Values"]

Role = Literal["query", "key", "value", "nothing"]
Cut = int | str
"""The number of an operation whose result is replaced, or the name of a source."""
Values = dict[Cut, Tensor]
"""Numbers in the place of each cut, flat, (probes, numbers)."""

_OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "convolution": (0, 1),
    "linear": (0, 1),
    "mv": (0, 1),
}
_CHUNK = 192


@dataclass(frozen=True, eq=False)
class _Plan:
    """Places where a run is cut and read.

    Attributes:
        cuts: operations and sources to be replaced.
        exit: the operation that takes the attention's output, and the number of its argument.
        scores: the first product of two numbers that both come from the cuts.
        mixes: a projection mixes scores or weights of several heads.
    """

    cuts: tuple[Cut, ...]
    exit: tuple[int, int] | None
    scores: int
    mixes: bool = False


class Core:
    """The code as a function of the numbers that its projections give, for one sample.

    Args:
        lab: runs the code.
        tokens: how many.

    Raises:
        NotTried: no attention can be cut out.
    """

    def __init__(self, lab: Lab, tokens: int) -> None:
        self.lab, self.tokens = lab, tokens
        # One copy for all runs: what needs a core is tried only if the law "pure" holds.
        self._call = lab.fresh()
        self.contents = lab.specimen.contents(1, tokens, seed=11, size=0.7)
        self._chunk = _CHUNK
        if not (self._is_same_for_any_batch() and self._is_cut_out(batch=2)):
            self._chunk = 1
            self._is_cut_out(batch=1)
        if self.plan.exit is not None and self._exit_shape().count(tokens) != 1:
            self.plan = replace(self.plan, exit=None)
        self.base: Values = {
            cut: self.contents[cut].double().flatten(1)
            if isinstance(cut, str)
            else self._moved(self.run, cut)[None]
            for cut in self.plan.cuts
        }
        self.places = self._places()

    def _wide(self, contents: Contents) -> Run:
        """Run one sample, as often as the batch that the plan was made for."""
        wide = {n: t.expand(self._batch, *t.shape[1:]) for n, t in contents.items()}
        return self.lab.run(wide, call=self._call, keeps=True)

    def _is_same_for_any_batch(self) -> bool:
        """Return True if two and three samples run the same operations."""
        if not self.lab.has_batch:
            return False
        names: list[list[str]] = []
        for batch in (2, 3):
            contents = self.lab.specimen.contents(batch, self.tokens)
            run = self.lab.run(contents, call=self._call, keeps=True)
            names.append([step.name for step in run.steps])
        try:
            self.lab.run(self.lab.specimen.contents(_CHUNK, self.tokens), call=self._call)
        except Exception:  # noqa: BLE001  # a static cache has room for a few samples
            self._chunk = 3
        return names[0] == names[1]

    @property
    def is_direct(self) -> bool:
        """Return True if query, key and value are arguments of the code."""
        return all(isinstance(cut, str) for cut in self.plan.cuts)

    @cached_property
    def columns_are_channels(self) -> bool:
        """Return True if the output is read before any later product with a parameter."""
        return self.is_direct or self.plan.exit is not None

    @property
    def ends_with_values(self) -> bool:
        """Return True if no later operation has a parameter."""
        last = self.plan.scores
        own = set(addresses(self.run.parameters))
        return all(own.isdisjoint(step.reads) for step in self.run.steps[last + 1 :])

    def _at(self, run: Run, cut: int | None) -> Tensor:
        """Return the tensor at a cut of a run; None: at its exit."""
        if cut is None:
            number, argument = self.plan.exit or (0, 0)
            return cast(Tensor, run.steps[number].args[argument]).detach().double()
        return run.steps[cut].outputs[0].double()

    def _flat(self, tensor: Tensor, cut: Cut | None, batch: int) -> Tensor:
        """Return the numbers of each sample, (batch, numbers)."""
        return tensor.reshape(self._splits[cut], batch, -1).transpose(0, 1).flatten(1)

    def _is_cut_out(self, batch: int) -> bool:
        """Find the cuts, and how many numbers stand before the batch in each and in what is read.

        Returns:
            False if probes cannot stand side by side in the batch.
        """
        self._batch = batch
        self.run = self._wide(self.contents)
        if not self.run.rows.isfinite().all():
            raise NotTried("Its output is not finite.")
        self.plan = _planned(self.lab, self.run, self.contents)
        exits: list[Cut | None] = [] if self.plan.exit is None else [None]
        self._splits = dict.fromkeys([*self.plan.cuts, *exits], 1)
        if batch == 1:
            return True
        one = self.lab.specimen.contents(2, self.tokens, seed=12, size=0.7)
        other = {n: t.flip(0) for n, t in one.items()}
        runs = [self.lab.run(contents, call=self._call, keeps=True) for contents in (one, other)]
        for cut in self._splits:
            if not isinstance(cut, str):
                split = _split_of(*(self._at(run, cut) for run in runs))
                if split is None:
                    return False
                self._splits[cut] = split
        return True

    def __call__(self, values: Values) -> Tensor:
        """Return the attention's output, (probes, rows, columns).

        Args:
            values: flat, (probes, numbers); cuts that are missing keep the numbers of the base.
        """
        probes = max(t.shape[0] for t in values.values())
        full = {cut: values.get(cut, base).expand(probes, -1) for cut, base in self.base.items()}
        parts = [
            self._side_by_side({cut: t[start : start + self._chunk] for cut, t in full.items()})
            for start in range(0, probes, self._chunk)
        ]
        return torch.cat(parts)

    def at_the_end(self, values: Values) -> Tensor:
        """Return what the whole code gives, (probes, rows, columns)."""
        whole = copy.copy(self)
        whole.plan = replace(self.plan, exit=None)
        return whole(values)

    def _side_by_side(self, values: Values) -> Tensor:
        probes = next(iter(values.values())).shape[0]
        batch = max(probes, self._batch)
        contents, replaced = self._laid_out(values, batch)
        run = self.lab.run(contents, call=self._call, replaced=replaced, read=self.plan.exit)
        if self.plan.exit is None:
            return run.rows[:probes]
        assert run.reading is not None
        shape = self._exit_shape()
        flat = self._flat(run.reading.double(), None, batch)[:probes].reshape(-1, *shape)
        return flat.movedim(shape.index(self.tokens) + 1, 1).flatten(2)  # (probes, rows, columns)

    def _laid_out(self, values: Values, batch: int) -> tuple[Contents, dict[int, Tensor]]:
        """Return values as contents of a batch, and as results of operations."""
        contents = {n: t.expand(batch, *t.shape[1:]) for n, t in self.contents.items()}
        replaced: dict[int, Tensor] = {}
        for cut, t in values.items():
            wide = t.expand(batch, -1)
            if isinstance(cut, str):
                contents[cut] = wide.reshape(batch, *self.contents[cut].shape[1:])
            else:
                apart = wide.reshape(batch, self._splits[cut], -1)
                replaced[cut] = apart.transpose(0, 1).contiguous()
        return contents, replaced

    def scattered(self, channels: Sequence[tuple[Cut, int]], token: int) -> Place | None:
        """Return the line that spreads the numbers of one token over several, and adds nothing."""
        moved = self.placed(self.base, channels, normal(19, 1, len(channels)), token)
        runs: list[Run] = []
        for values in (self.base, moved):
            contents, replaced = self._laid_out(values, self._batch)
            runs.append(self.lab.run(contents, call=self._call, replaced=replaced, keeps=True))
        for one, other in zip(*(run.steps[: self.plan.scores] for run in runs), strict=False):
            shape = list(one.outputs[0].shape) if one.outputs else []
            if shape.count(self.tokens) != 1 or other.outputs[0].shape != one.outputs[0].shape:
                continue
            changed = differs(other.outputs[0], one.outputs[0], 1e-12)
            by_token = changed.movedim(shape.index(self.tokens), 0).flatten(1).any(1)
            is_mixed = int(changed.sum()) * self.tokens > changed.numel()
            if int(by_token.sum()) > 1 and not is_mixed:
                return one.place
        return None

    def _exit_shape(self) -> list[int]:
        """Return the axes of one sample of what is read."""
        shape = list(self._at(self.run, None).shape)
        before, split = 1, self._splits[None]
        for axis, size in enumerate(shape):
            if before <= split < before * size:
                shape[axis] = size // self._batch
                break
            before *= size
        return shape

    def _places(self) -> dict[Cut, Tensor]:
        """Return which numbers of each cut belong to each token, (tokens, channels)."""
        found: dict[Cut, Tensor] = {}
        changed = [self.lab.specimen.changed(self.contents, token=j) for j in range(self.tokens)]
        others = [] if self.is_direct else [self._wide(contents) for contents in changed]
        parts = changed[0].items() if others and len(self.contents) > 1 else ()
        alone = {name: self._wide({**self.contents, name: t}) for name, t in parts}
        for cut, base in self.base.items():
            if isinstance(cut, str):
                shape = self.contents[cut].shape
                found[cut] = torch.arange(shape.numel()).view(shape[1], -1)
                continue
            outputs = [self._moved(run, cut) for run in others]
            places = [differs(own, base[0], 1e-12).nonzero().flatten() for own in outputs]
            sizes = {len(own) for own in places}
            if sizes != {len(base[0]) // self.tokens} or sizes == {0}:
                raise NotTried("A projection reads several tokens at once, or none.")
            found[cut] = torch.stack(places)
            for name, run in alone.items():
                moved = differs(self._moved(run, cut), base[0], 1e-12)[places[0]]
                if moved.any() and not moved.all():
                    raise NotTried(
                        f"It projects {name} and another argument as one text: pass the function "
                        "of query, key and value inside."
                    )
        return found

    def _moved(self, run: Run, cut: int) -> Tensor:
        """Return the numbers of one sample at a cut of another run."""
        return self._flat(self._at(run, cut), cut, self._batch)[0]

    def shares_moved(self, contents: Contents) -> dict[int, float]:
        """Return which share of each projection's numbers differs for other contents."""
        run = self._wide(contents)
        found: dict[int, float] = {}
        for cut, base in self.base.items():
            if isinstance(cut, int):
                found[cut] = float(differs(self._moved(run, cut), base[0], 1e-12).double().mean())
        return found

    @cached_property
    def roles(self) -> dict[tuple[Cut, int], Role]:
        """The role of each channel: linear is value; local to its row is query; else key.

        A channel that moves nothing has the role ``nothing``.
        """
        start = self(dict(self.base))[0]
        found: dict[tuple[Cut, int], Role] = {}
        for cut, places in self.places.items():
            tokens, channels = places.shape
            # Probes run one by one: an argument of its own is probed as a whole.
            width = channels if self._chunk == 1 and isinstance(cut, str) else 1
            groups = [places[:, c : c + width] for c in range(0, channels, width)]
            noise = 0.8 * normal(13, len(groups), tokens, width)
            probes = self.base[cut].repeat(4 * len(groups), 1).view(4, len(groups), -1)
            for n, at in enumerate(groups):
                probes[0, n, at] += noise[n]
                probes[1, n, at] -= noise[n]
                probes[2, n, at[0]] += noise[n, 0]
                probes[3, n, at[-1]] += noise[n, -1]
            out = self({cut: probes.flatten(0, 1)}).view(4, len(groups), *start.shape)
            for c in range(channels):
                found[cut, c] = self._role(start, out[:, c // width], tokens)
        return found

    @staticmethod
    def _role(start: Tensor, out: Tensor, tokens: int) -> Role:
        up, down, first, last = out
        if not any(bool(differs(o, start, 1e-10).any()) for o in out):
            return "nothing"
        if not differs(up + down, 2 * start, 1e-9).any():
            return "value"
        if tokens == start.shape[0]:
            rows = [differs(o, start, 1e-10).any(-1) for o in (first, last)]
            if not rows[0][1:].any() and not rows[1][:-1].any():
                return "query"
        return "key"

    def channels(self, role: Role) -> list[tuple[Cut, int]]:
        """Return the channels with a role, in order."""
        return [channel for channel, own in self.roles.items() if own == role]

    def placed(
        self,
        values: Values,
        channels: Sequence[tuple[Cut, int]],
        numbers: Tensor | float,
        token: int | None = None,
    ) -> Values:
        """Return values with other numbers in some channels, at one token or at all.

        Args:
            values: (probes, numbers).
            channels: to be set.
            numbers: one for all, or for each probe and channel, (probes, channels).
            token: None: all of them.
        """
        found = {cut: t.clone() for cut, t in values.items()}
        for k, (cut, c) in enumerate(channels):
            at = self.places[cut][:, c] if token is None else self.places[cut][token : token + 1, c]
            number = numbers[:, k, None] if isinstance(numbers, Tensor) else numbers
            found[cut][:, at] = number  # pyright: ignore[reportArgumentType]
        return found

    def bases(self, probes: int) -> Values:
        """Return the numbers of the base, once for each probe."""
        return {cut: t.repeat(probes, 1) for cut, t in self.base.items()}


def _split_of(one: Tensor, other: Tensor) -> int | None:
    """Return how many numbers stand before the batch of 2; None where no number fits.

    ``other`` holds the same two samples as ``one``, exchanged.
    """
    seen, candidates = 1, [1]
    for size in one.shape:
        seen *= size
        candidates += [seen, max(seen // 2, 1)]
    for split in dict.fromkeys(candidates):
        if one.numel() % (2 * split):
            continue
        apart, turned = one.reshape(split, 2, -1), other.reshape(split, 2, -1)
        if not differs(apart, turned.flip(1)).any():
            return split
    return None


def _planned(lab: Lab, run: Run, contents: Contents) -> _Plan:
    """Return where to cut: the last products with parameters before the scores, and the exit."""
    sources = _sources_of(lab, run)
    found = _walked(run.steps, sources)
    if found is None and {"query", "key", "value"} <= set(contents):
        return _Plan(("query", "key", "value"), None, 0)  # computed without PyTorch
    if found is None or not found.cuts:
        raise NotTried("No product of queries and keys was seen in it.")
    if found.exit is None and not lab.sees_rows:
        raise NotTried("Its output has no axis for the tokens.")
    values = lab.specimen.by_name(run.arguments)
    given = tensors_in([values[slot.name] for slot in lab.specimen.slots if not slot.source])
    own = {*addresses(run.parameters), *addresses([t for t in given if t.ndim == 1])}
    return replace(found, cuts=tuple(_behind_bias(run.steps, cut, own) for cut in found.cuts))


def _behind_bias(steps: list[Step], cut: Cut, parameters: set[int]) -> Cut:
    """Return the operation that adds a bias to a projection and to nothing else; else the cut."""
    if isinstance(cut, str):
        return cut
    projected = steps[cut].writes
    later = ((n, s) for n, s in enumerate(steps[cut + 1 :], cut + 1) if projected & set(s.reads))
    readers = [n for n, step in later if step.writes != projected or step.name.endswith("_")]
    if len(readers) != 1 or steps[readers[0]].name not in ("add", "sub"):
        return cut
    return readers[0] if parameters & set(steps[readers[0]].reads) else cut


def _sources_of(lab: Lab, run: Run) -> dict[int, frozenset[Cut]]:
    """Return, by storage, which source an argument of the run holds."""
    s = lab.specimen
    values = s.by_name(run.arguments)
    return {
        at: frozenset[Cut]({slot.source})
        for slot in s.slots
        if slot.source
        for at in addresses(values[slot.name])
    }


def _walked(steps: list[Step], sources: Mapping[int, frozenset[Cut]]) -> _Plan | None:
    """Follow the numbers from the arguments to the scores and on to the exit."""
    origins = dict(sources)
    nothing = frozenset[Cut]()
    scored: set[int] = set()
    valued: set[int] = set()
    cuts: dict[Cut, None] = {}
    scores, exit_, is_split, mixes = -1, None, False, False
    for number, step in enumerate(steps):
        reads, outs = step.reads, step.writes
        own = nothing.union(*(origins.get(at, nothing) for at in reads))
        is_scored, is_valued = (not s.isdisjoint(reads) for s in (scored, valued))
        pair = [(p, addresses(t)[0]) for p, t in _pair_of(step)]
        known = [(p, at) for p, at in pair if origins.get(at)]
        ends = [p for p, at in known if at in valued]
        fused = step.name.startswith("_scaled_dot_product") and bool(own)
        if (fused and not is_scored) or _meets(step, [at for _, at in known], scored):
            if exit_ is not None and not is_scored:
                is_split = True  # heads one after another, each with a projection at its end
            # A bias that was added to the scores comes from no query, key or value.
            fresh = [origins.get(at, nothing) for at in reads if at not in scored]
            cuts |= dict.fromkeys(nothing.union(*fresh))
            scores = number if scores < 0 else scores
            is_valued = is_valued or fused or is_scored
            is_scored = True
        elif len(pair) == 2 and len(known) == 1 and step.name != "mul" and not is_scored:
            own = frozenset({number})
        elif len(pair) == 2 and len(known) == 1 and step.name != "mul" and not is_valued:
            mixes = True
        elif len(pair) == 2 and len(ends) == 1:
            # A projection, or a gate that is computed from the input, and not from the scores.
            gates = [at for _, at in known if at not in valued and at not in scored]
            is_end = step.name != "mul" or bool(gates)
            exit_ = (number, ends[0]) if exit_ is None and is_end else exit_
        elif step.name == "native_layer_norm" and exit_ is None and reads[0] in valued:
            exit_ = (number, 0)  # behind a residual connection, and without an output projection
        scored |= outs if is_scored else set()
        valued |= outs if is_valued else set()
        for at in outs if own else ():
            origins[at] = own | origins.get(at, nothing) if at in reads else own
    if scores < 0:
        return None
    ordered = sorted(cuts, key=lambda cut: (isinstance(cut, str), str(cut).rjust(9)))
    return _Plan(tuple(ordered), None if is_split else exit_, scores, mixes)


def _meets(step: Step, known: list[int], scored: set[int]) -> bool:
    """Return True if an operation multiplies queries with keys, or weights with values."""
    if len(known) != 2:
        return False
    is_scored = {at in scored for at in known}
    if step.name == "mul":
        shapes = [t.shape for _, t in _pair_of(step)]
        # Numbers of equal shape are a gate; a row times its own norm is a norm.
        if shapes[0] == shapes[1] or (step.outputs[0].shape in shapes and len(is_scored) == 1):
            return False
    return is_scored != {True}


def _pair_of(step: Step) -> list[tuple[int, Tensor]]:
    """Return the two operands of a product with their places; empty for any other operation."""
    places = _OPERANDS.get(step.name)
    if places is None and step.name == "mul" and len(step.args) > 1:
        shapes = [t.shape for t in tensors_in(step.args[:2])]
        places = (0, 1) if len(shapes) == 2 else None
    operands = [(place, step.args[place]) for place in places or ()]
    return [(place, t) for place, t in operands if isinstance(t, Tensor)]
