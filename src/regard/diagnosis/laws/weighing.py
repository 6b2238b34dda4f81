"""Laws about the attention itself: weights that sum to 1, scores of query and key, heads apart."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.diagnosis.laws.arithmetic import SOFTMAXES
from regard.diagnosis.laws.core import Core, Cut, Values
from regard.diagnosis.laws.lab import Lab, NotTried, as_tensors, differs, normal
from regard.diagnosis.laws.law import UNUSED, Breach, Law
from regard.diagnosis.laws.tape import (
    Place,
    Step,
    addresses,
    first_place,
    in_words,
    is_theirs,
    reached,
)

__all__ = ["Heads", "Mixture", "Score", "core_of"]

Channel = tuple[Cut, int]
_Got = TypeVar("_Got")
_GATED = "Its output is multiplied with a gate, which was not judged."
_SMALL = 1e-2  # scores of this size square pass a cap unchanged


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
        if _rank(directions) < len(directions):
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


class Mixture(Law):
    """Each output is an average of the values: weights are at least 0 and sum to 1."""

    name = "mixture"
    formula = "output = A value, A >= 0, A 1 = 1"
    example = "weights = scores.softmax(-1) * mask  # rows sum to less than 1"

    def breach(self, lab: Lab) -> Breach | None:
        """Put indicators in the place of the values."""
        if has_no_projections(lab):
            return None
        w = core_of(lab)
        if "value" in w.missing:
            says = "Nothing in it acts as values: the output is linear in no projection."
            return Breach(says, is_definite=False, kind="missing")
        offset, constant, is_open = w.offset, w.constant, w.open_rows
        place = self._place(w)
        rest = offset
        if not w.core.is_direct:
            for numbers in w.core.contents.values():
                if numbers[0].shape != offset.shape or not numbers.is_floating_point():
                    continue
                without = offset - numbers[0]
                if not differs(without, without[:1]).any():
                    rest = without
                    lab.notes.append("Its input is added to the output: a residual connection.")
        if differs(rest, rest[:1]).any() or (w.core.is_direct and bool(rest.abs().max() > 1e-8)):
            says = f"With all values 0 the output is {float(offset.abs().max()):.3g}, not 0."
            return Breach(says, is_definite=False)
        kept = constant[:, is_open]
        if not kept.shape[1]:
            raise NotTried("No value reaches any output.")
        columns = w.core.columns_are_channels
        is_last = not columns and w.core.ends_with_values
        apart = differs(kept, kept[:, :1].expand_as(kept))
        sums = differs(kept, kept.clamp(0, 1).round())
        if (apart.any() or ((columns or is_last) and sums.any())) and not _has_sink(w):
            return self._not_averages(w, kept, apart, place)
        shares = w.shares[:, :, is_open]
        if columns and float(shares.min()) < -1e-9:
            return Breach(f"A weight is {float(shares.min()):.4f}; no weight is below 0.", place)
        return _returned_weights(w)

    @staticmethod
    def _place(w: Weighing) -> Place | None:
        return first_place(w.core.run.steps, lambda step: step.name in (*SOFTMAXES, "exp"))

    @staticmethod
    def _not_averages(w: Weighing, kept: Tensor, apart: Tensor, place: Place | None) -> Breach:
        bad = apart if apart.any() else differs(kept, kept.clamp(0, 1).round())
        channel, row, column = (int(n) for n in bad.nonzero()[0])
        got = kept[channel, :, column]
        one, other = float(got[0]), float(got[row])
        if apart.any():
            says = (
                "Values that are the same at every token should pass through unchanged: one "
                f"channel gives {one:.4f} in the first row and {other:.4f} in row {row + 1}."
            )
        else:
            says = f"The weights of a row sum to {other:.4f}; they should sum to 1."
        rows, tokens = min(4, kept.shape[1]), min(4, w.core.tokens)
        did = w.shares[channel, :tokens, :, column].T[w.open_rows][:rows]
        total = w.shares[channel, :, :, column].sum(0)[w.open_rows][:rows, None]
        right = did / torch.where(total == 0, 1.0, total)
        pair = None
        if not torch.allclose(did, right, atol=5e-4):
            pair = did, right, "weights, and the same divided by their sum: queries down"
        # A scale of the output may be meant where nothing else stands behind the weights.
        is_definite = _has_one_softmax(w) and (bool(apart.any()) or w.core.columns_are_channels)
        kind, weights = "", w.shares[channel, :, :, column]  # (tokens, rows)
        if w.core.columns_are_channels and not is_definite:
            # Other kinds of attention have no row of several weights that sums to 1.
            is_full = ~differs(weights.sum(0), weights.new_ones(())) & ((weights > 1e-9).sum(0) > 1)
            is_definite = bool(is_full.any()) or _is_scaled_by_key(w)
        if float(weights.min()) >= 0 and not differs(weights.sum(1), weights.new_ones(())).any():
            says += " The weights of each key sum to 1 over the queries."
            is_definite = True
            kind = _mistake_of_numpy(w)
        return Breach(says, place, pair, is_definite=is_definite, kind=kind)


def _is_scaled_by_key(w: Weighing) -> bool:
    """Return True if the weights are those of attention, each row and each key times a number."""
    if not w.core.is_direct or w.core.contents["query"].shape != w.core.contents["key"].shape:
        return False
    query, key = (
        w.core.contents[n].double().movedim(1, -2).flatten(0, -3) for n in ("query", "key")
    )
    weights = w.weights(w.core.bases(1))[0]  # (heads, rows, tokens)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if weights.shape != scores.shape or float(weights.min()) <= 0:
        return False
    rest = weights.log() - scores
    by_key = rest - rest[:, :, :1]
    is_of_keys = not bool(differs(by_key, by_key[:, :1].expand_as(by_key), 1e-6).any())
    return is_of_keys and bool((by_key.abs() > 1e-6).any())


def _mistake_of_numpy(w: Weighing) -> str:
    """Return the mistake that gives the weights of a function without operations of PyTorch."""
    if w.core.run.steps:
        return ""  # a repair of an operation tells the mistake
    contents = (w.core.contents[name].double().movedim(1, -2) for name in ("query", "key"))
    query, key = (t.flatten(0, -3) for t in contents)  # (heads, tokens, head_dim)
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


def _returned_weights(w: Weighing) -> Breach | None:
    """Compare matrices whose rows sum to 1, returned beside the output, with the weights."""
    returned = [t.detach().double() for t in as_tensors(w.core.run.result)]
    if w.missing or len(returned) < 2:
        return None
    try:
        weights = w.weights(w.core.bases(1))[0]  # (heads, rows, tokens)
    except NotTried:
        return None
    for matrices in returned:
        if matrices.shape[-2:] != weights.shape[-2:] or float(matrices.min()) < 0:
            continue
        for own in matrices.flatten(0, -3) if matrices.ndim > 2 else matrices[None]:
            is_sum = not differs(own.sum(-1), weights.new_ones(())).any()
            if is_sum and all(differs(own, one).any() for one in (*weights, weights.mean(0))):
                says = "A matrix that it returns has rows that sum to 1, and is not the weights."
                few = slice(0, 4)
                pair = own[few, few], weights[0, few, few], "what is returned, and the weights"
                return Breach(says, None, pair)
    return None


def _rank(matrix: Tensor) -> int:
    return int(cast(Tensor, torch.linalg.matrix_rank(matrix, rtol=1e-6)))  # pyright: ignore[reportUnknownMemberType]


def _has_one_softmax(w: Weighing) -> bool:
    """Return True if the weights are one softmax, on one line; a difference of two is none."""
    lines = {step.place for step in w.core.run.steps if step.name in SOFTMAXES}
    return len(lines) == 1 and not w.core.plan.mixes


def _has_sink(w: Weighing) -> bool:
    """Return True if what a row lacks to 1 is the weight of one more score."""
    if w.missing or not w.core.columns_are_channels:
        return False
    moved = w.core.bases(1)
    for cut, channel in w.key:
        moved[cut][:, w.core.places[cut][-1:, channel]] *= 3.0
    try:
        weights = w.weights(joined([*(w.scaled(f, w.query) for f in (0.0, 1.0, 2.0)), moved]))
    except NotTried:
        return False
    lacks = 1 - weights.sum(-1)  # (probes, heads, rows)
    if float(lacks.min()) < 1e-12 or float(lacks.max()) > 1 - 1e-12:
        return False
    logs = lacks[..., None].log() - weights.log()
    seen = logs[0].isfinite()
    first, second = (logs[1] - logs[0])[seen], (logs[2] - logs[1])[seen]
    others = seen & logs[3].isfinite()
    others[..., -1] = False
    # One more score follows the query, and knows nothing of the keys.
    is_bent = differs(first, second, 1e-6).any()
    return not bool(is_bent or differs(logs[3][others], logs[1][others], 1e-6).any())


class Score(Law):
    """The log-ratio of two weights is the query times the difference of two keys, scaled."""

    name = "score"
    formula = "log A[i, j] - log A[i, l] = query[i] . (key[j] - key[l]) / sqrt(head_dim)"
    example = "scores = q @ k.mT  # not divided by sqrt(head_dim)"

    def breach(self, lab: Lab) -> Breach | None:
        """Move queries and keys, and read the ratios of weights."""
        if has_no_projections(lab):
            return None
        w = core_of(lab)
        if "value" in w.missing:
            raise NotTried("Nothing in it acts as values: its output is linear in no projection.")
        if w.missing:
            wanted = " or as ".join({"query": "queries", "key": "keys"}[m] for m in w.missing)
            says = f"Nothing in it acts as {wanted}."
            return Breach(says, self._place(w), is_definite=False, kind="missing")
        if w.core.is_direct and (found := self._exchanged(w)) is not None:
            return found
        weights = w.weights(w.core.bases(1))[0]
        seen = (weights > 1e-12).all(0)  # (rows, tokens)
        rows = [i for i, own in enumerate(seen) if int(own.sum()) > 1]
        if not rows:
            raise NotTried("No row of its weights has two tokens in all heads.")
        live = [int(j) for j in seen[rows[-1]].nonzero()]
        probe = _Probe(w, rows[-1], live[-1], live[-2])
        found = self._twice(w) or self._others(probe, live) or self._bent(lab, probe)
        if found is None and not probe.is_bent:
            found = self._factor(lab, probe) or self._shift(probe, weights) or self._biased(w)
        return found or self._filled(probe)

    @staticmethod
    def _place(w: Weighing) -> Place | None:
        return w.core.run.steps[w.core.plan.scores].place if w.core.run.steps else None

    @staticmethod
    def _exchanged(w: Weighing) -> Breach | None:
        for cut in w.core.plan.cuts:
            roles = {role for (own, _), role in w.core.roles.items() if own == cut}
            role = next(iter(roles))
            if len(roles) == 1 and role not in ("nothing", cut):
                says = f"The argument for the {cut} acts as the {role}."
                return Breach(says, kind="" if cut == "value" else UNUSED.get(str(cut), ""))
        return None

    @staticmethod
    def _twice(w: Weighing) -> Breach | None:
        """Find a softmax of what a softmax gave."""
        steps = [step for step in w.core.run.steps if step.name == "_softmax"]
        for one, other in pairwise(steps):
            if set(other.reads) & one.writes and other.args[1:2] == one.args[1:2]:
                return Breach("The weights are a softmax of what a softmax gave.", other.place)
        return None

    def _others(self, probe: "_Probe", live: list[int]) -> Breach | None:
        """Only the row's own query and the two keys count."""
        w, row = probe.w, probe.row
        start = probe.ratio(w.core.bases(1))[0]
        keys = [j for j in live if j not in (probe.token, probe.other)]
        is_self = len(w.core.places[w.query[0][0]]) == len(w.offset)
        rest = [i for i in range(len(w.offset)) if is_self and i != row]
        others = ((w.key, keys, "key"), (w.query, rest, "query"))
        for channels, tokens, name in others:
            for token in tokens:
                values = w.core.placed(w.core.bases(1), channels, probe.noise(channels), token)
                moved = probe.ratio(values)[0]
                if differs(moved, start, 1e-6).any():
                    found = self._ratio(probe, start, moved, f"the {name} of token {token + 1}")
                    place = w.core.scattered(channels, token)
                    if place is None:
                        return found
                    kind = "keys-not-transposed" if name == "key" else ""
                    return replace(found, place=place, is_definite=True, kind=kind)
        return None

    def _ratio(self, probe: "_Probe", start: Tensor, moved: Tensor, what: str) -> Breach:
        at = int((moved - start).abs().argmax())
        return Breach(
            f"In row {probe.row + 1} the log-ratio of the weights of tokens {probe.token + 1} and "
            f"{probe.other + 1} is {float(start[at]):.4f}; with other numbers in {what} it is "
            f"{float(moved[at]):.4f}. It should stay.",
            self._place(probe.w),
            is_definite=_is_normed_over_tokens(probe.w),
            kind=_mistake_of_numpy(probe.w),
        )

    def _bent(self, lab: Lab, probe: "_Probe") -> Breach | None:
        """Twice the query is twice the score; what is not so is normed or capped."""
        w = probe.w
        if (clamp := self._clamp(w)) is not None:
            says = "The scores are clamped: some of them follow no query."
            return Breach(says, clamp, is_definite=False)
        for name, channels in (("query", w.query), ("key", w.key)):
            factors = (0.0, 1.0, 2.0, 8.0, -1.0, -2.0)
            scaled = joined([w.scaled(f, channels) for f in factors])
            zero, one, two, eight, minus, minus_two = probe.ratio(scaled)
            is_odd = not differs(one + minus, two + minus_two, 1e-6).any()
            is_linear = not differs(two - one, one - zero, 1e-6).any()
            is_linear = is_linear and not differs(eight - one, 7 * (one - zero), 1e-5).any()
            if is_linear and is_odd:
                continue
            is_normed = not differs(torch.stack([two, eight]), one, 1e-3).any()
            if is_odd and is_normed:
                lab.notes.append(
                    f"The scores are not linear in the {name}: it is normed. Their scale was not "
                    "judged."
                )
                probe.is_bent = True
                return None
            if is_odd and any(step.name in ("tanh", "tanh_") for step in self._between(w)):
                lab.notes.append("The scores are capped; the scale of small ones was judged.")
                probe.size = _SMALL
                return None
            return Breach(
                f"The log-ratio of two weights is {float(one[0]):.4f}; with the {name} doubled it "
                f"is {float(two[0]):.4f}, and with the opposite one {float(minus[0]):.4f}: neither "
                "a product, nor one of normed vectors, nor capped by tanh.",
                self._place(w),
                is_definite=False,
            )
        return None

    @staticmethod
    def _between(w: Weighing) -> list[Step]:
        """Return the operations between the scores and the softmax."""
        steps = w.core.run.steps
        behind = (n for n, s in enumerate(steps) if s.name in SOFTMAXES or s.name == "exp")
        last = next((n for n in behind if n > w.core.plan.scores), len(steps))
        return steps[w.core.plan.scores : last]

    def _clamp(self, w: Weighing) -> Place | None:
        """Return the line that limits scores, if it changes any that is not masked."""
        between = self._between(w)
        scores = reached(between, between[0].writes) if between else set[int]()
        for step in between:
            is_clamp = step.name in ("clamp", "clamp_min", "clamp_max", "hardtanh")
            if is_clamp and step.args[0].ndim and step.reads[0] in scores:
                before = step.args[0].clamp(min=-1e4)
                if before.shape[-1] > 1 and differs(step.outputs[0].clamp(min=-1e4), before).any():
                    return step.place
        return None

    def _factor(self, lab: Lab, probe: "_Probe") -> Breach | None:
        w = probe.w
        for forth, back, width in probe.slopes():
            if not width:
                continue
            if not math.isfinite(forth + back):
                raise NotTried("Some weights vanish where they should only shrink.")
            want, place, says = width**-0.5, self._place(w), ""
            if abs(abs(forth) - back) > 1e-4 * back:
                says = (
                    "Queries and keys do not meet number by number: their product is scaled by "
                    f"{forth:.4f} one way and by {back:.4f} the other."
                )
            elif forth < 0:
                says = f"Query times key is multiplied with {forth:.4f}, which is below 0."
            if says:
                return Breach(says, place, is_definite=False)
            if abs(forth - want) <= 1e-3 * want:
                continue
            if abs(forth - 1) < 1e-6 and _has_learned_bias(w):
                note = "The scores are not scaled, and a bias by distance is learned, as in T5."
            elif place is not None and not is_theirs(place.file):
                note = f"An installed package scales the scores by {forth:.4f}."
            elif _is_learned(probe):
                note = "The scale of the scores is learned; it was not judged."
            else:
                return Breach(
                    f"The product of query and key is scaled by {forth:.4f}; for head_dim {width} "
                    f"it should be {want:.4f} = 1/sqrt({width}).",
                    place,
                    kind="factor",
                    numbers=(forth, want),
                )
            lab.notes.append(note)
            return None
        return None

    def _shift(self, probe: "_Probe", weights: Tensor) -> Breach | None:
        """Compare the scores of a query and a key with those of the pair before them."""
        at = (probe.row - 1, probe.token - 1, probe.other - 1)
        if min(at) < 0 or not bool((weights[:, at[0], [at[1], at[2]]] > 1e-12).all()):
            return None
        if weights.shape[1] != weights.shape[2]:
            return None
        key = probe.noise(probe.w.key)
        one = probe.forth(key)
        other = _Probe(probe.w, *at, probe.size).forth(key)
        if not differs(other, one, 1e-6).any():
            return None
        most = int((other - one).abs().amax(0).argmax())
        says = (
            "The score of a query and a key depends on where they stand, not on their distance "
            f"alone: in head {most + 1} it changes by up to {float((other - one).abs().max()):.3g} "
            "one token further."
        )
        turned = self._turned(probe, key)
        if turned:
            says += f" It follows the position of the {turned} alone."
        # Arguments may hold keys that are turned already, as a cache does.
        is_definite = bool(turned) and not probe.w.core.is_direct
        return Breach(says, self._place(probe.w), is_definite=is_definite)

    @staticmethod
    def _turned(probe: "_Probe", key: Tensor) -> str:
        """Return ``query`` or ``key`` if the position of that alone turns the score; else nothing.

        What only scales the scores of a row, such as its number of keys, turns nothing.
        """

        def score(row: int, token: int) -> Tensor:
            own = _Probe(probe.w, row, token, probe.other - 1, probe.size)
            return own.forth(key)  # (channels, heads)

        if probe.other < 1 or probe.other > probe.row - 1:
            return ""
        last, before = score(probe.row, probe.token), score(probe.row, probe.other)
        above = score(probe.row - 1, probe.other)
        if not torch.stack([last, before, above]).isfinite().all():
            return ""
        for role, same, other in (("query", last, above), ("key", above, last)):
            along = torch.cosine_similarity(before, other, dim=0)
            if not differs(same, before, 1e-6).any() and float(along.min()) < 0.999:
                return role
        return ""

    def _biased(self, w: Weighing) -> Breach | None:
        """Without query and key the weights show a bias: it may be a mask that leaks."""
        values = w.core.placed(w.core.placed(w.core.bases(1), w.query, 0.0), w.key, 0.0)
        weights = w.weights(values)[0]
        rows, tokens = weights.shape[1:]
        if rows != tokens:
            return None
        logs = weights.clamp(min=1e-300).log()
        away = (logs[:, -1].flip(1).diff(), logs[:, 0].diff())  # before and after a token
        # Training may set a learned bias to any numbers.
        if tokens > 2 and any(map(_rises, away)) and not _has_learned_bias(w):
            says = "A bias raises the scores of distant keys; that of ALiBi lowers them."
            return Breach(says, self._place(w), is_definite=False)
        later = torch.ones(rows, tokens, dtype=torch.bool).triu(1)
        for own in weights:
            logs = own.clamp(min=1e-300).log()
            logs = logs - logs.diagonal()[:, None]
            if not (later.any() and logs[~later].abs().max() <= 1e-9):
                continue
            level = logs[later]
            is_step = not bool(differs(level, level[:1].expand_as(level), 1e-6).any())
            if is_step and -600 < float(level[0]) < -1e-6:
                return Breach(
                    f"Later tokens are lowered by {-float(level[0]):.4g} and not hidden: their "
                    f"weights are up to {float(own[later].max()):.2g}.",
                    self._place(w),
                )
        return None

    @staticmethod
    def _filled(probe: "_Probe") -> Breach | None:
        """Scores of later tokens that follow no query are a mask that hides nothing."""
        w = probe.w
        start = w.weights(w.core.bases(1))[0]
        rows, tokens = start.shape[1:]
        if rows != tokens or rows < 4 or not bool((start > 1e-12).all()):
            return None
        moved = w.weights(w.core.placed(w.core.bases(1), w.query, probe.noise(w.query)))[0]
        change = moved.log() - start.log()  # (heads, rows, tokens)
        spread = [change[:, i, i + 1 :] - change[:, i, i + 1 : i + 2] for i in range(rows - 2)]
        if any(bool((part.abs() > 1e-9).any()) for part in spread):
            return None
        if not bool((change[:, -1] - change[:, -1, :1] > 1e-6).any()):
            return None
        return Breach(
            "The weights of later tokens do not follow the query: their scores are filled with a "
            f"number, and weights up to {float(start.triu(1).max()):.2g} are left to them.",
            kind="mask-fill-value",
        )


def _is_normed_over_tokens(w: Weighing) -> bool:
    """Return True if a norm runs over the tokens, where another one runs over a token's numbers."""
    before = w.core.run.steps[: w.core.plan.scores]
    norms = [s.args for s in before if s.name == "linalg_vector_norm" and len(s.args) > 2]
    axes = [(x, int(axis) % x.ndim) for x, _, own, *_ in norms for axis in own or ()]
    sizes = [x.shape[axis] for x, axis in axes if axis < x.ndim - 1]
    return w.core.tokens in sizes and len(sizes) < len(axes)


class _Probe:
    """Ratios of two weights in one row."""

    def __init__(self, w: Weighing, row: int, token: int, other: int, size: float = 1.0) -> None:
        self.w, self.row, self.token, self.other = w, row, token, other
        self.is_bent = False
        self.size = size  # of what is put in the place of queries and keys
        self._drawn = 20

    def noise(self, channels: list[Channel]) -> Tensor:
        """Return a number for each channel, (1, channels), others with each call."""
        self._drawn += 1
        return 0.4 * self.size * normal(self._drawn, 1, len(channels))

    def ratio(self, values: Values) -> Tensor:
        """Return log-ratios, (probes, heads)."""
        rows = self.w.weights(values, (self.token, self.other))[:, :, self.row]
        return rows[..., 0].log() - rows[..., 1].log()

    def slopes(self) -> list[tuple[float, float, int]]:
        """Return the scale of the scores of each head, from queries and from keys, and its width.

        A width of 0: the head has no scores that move.
        """
        w = self.w
        key, query = self.noise(w.key), self.noise(w.query)
        queried = w.core.placed(self._empty(), w.query, query)
        forth = self.forth(key)
        back = self._moved(queried, w.key, self.token)
        found: list[tuple[float, float, int]] = []
        for ours, theirs in zip(forth.T, back.T, strict=True):
            mine, its = ours.abs() > 1e-7, theirs.abs() > 1e-7
            width, its_keys = int(mine.sum()), key[0][its]
            if not width or not len(its_keys):
                found.append((0.0, 0.0, 0))
                continue
            one = float((ours.square().sum() / its_keys.square().sum()).sqrt())
            other = float((theirs.square().sum() / query[0][mine].square().sum()).sqrt())
            # Next to itself, a token's query and key are turned alike by their positions.
            if self.token == self.row and width == len(its_keys):
                along = float(ours[mine] @ its_keys)
                one = -one if along < -0.99 * one * float(its_keys.square().sum()) else one
            found.append((one, other, width))
        return found

    def _empty(self) -> Values:
        w = self.w
        return w.core.placed(w.core.placed(w.core.bases(1), w.key, 0.0), w.query, 0.0)

    def forth(self, key: Tensor) -> Tensor:
        """Return how log-ratios follow each query channel, (channels, heads), for one key.

        Args:
            key: of the token, (1, channels); all other keys are 0.
        """
        keyed = self.w.core.placed(self._empty(), self.w.key, key, self.token)
        return self._moved(keyed, self.w.query, None)

    def _moved(self, values: Values, channels: list[Channel], token: int | None) -> Tensor:
        """Return how the log-ratios follow each channel, (channels, heads)."""
        start = self.ratio(values)
        many = {cut: t.repeat(len(channels), 1) for cut, t in values.items()}
        size = 0.1 * self.size
        step = size * torch.eye(len(channels), dtype=torch.float64)
        for k, (cut, c) in enumerate(channels):
            places = self.w.core.places[cut][:, c]
            places = places if token is None else places[token : token + 1]
            many[cut][k, places] += step[k, k]
        return (self.ratio(many) - start) / size


def _rises(steps: Tensor) -> bool:
    """Return True if the scores of each head rise by the same with each step."""
    return not bool(differs(steps, steps[:, :1]).any()) and float(steps.min()) > 1e-6


def _has_learned_bias(w: Weighing) -> bool:
    """Return True if a parameter moves the weights where all queries and keys are 0."""
    values = w.core.placed(w.core.placed(w.core.bases(1), w.query, 0.0), w.key, 0.0)
    return any(_moved_parameters(w, lambda: w.weights(values), 4096))


def _is_learned(probe: _Probe) -> bool:
    """Return True if a parameter beside the projections sets the scale."""

    def scales() -> Tensor:
        return torch.tensor([size for *size, _ in probe.slopes()])

    return any(_moved_parameters(probe.w, scales, 64))


def _moved_parameters(w: Weighing, measured: Callable[[], Tensor], most: int) -> Iterator[bool]:
    """Yield, for each parameter that is no projection, if it moves what is measured.

    Args:
        w: its weights, which still sum to 1 if the parameter stands before them.
        measured: what may move.
        most: the numbers that a parameter may have.
    """
    start, sums = measured(), w.weights(w.core.bases(1)).sum(-1)
    for parameter in _tables(w, most):
        is_before = _is_before(w, parameter, sums)
        moved = _with_other_numbers(parameter, ..., measured) if is_before else start
        yield bool(differs(moved, start, 1e-3).any())


def _is_before(w: Weighing, parameter: Tensor, sums: Tensor) -> bool:
    """Return True if a parameter stands before the softmax: weights still have the same sums."""
    own = _with_other_numbers(parameter, ..., lambda: w.weights(w.core.bases(1)).sum(-1))
    return not bool(differs(own, sums, 1e-6).any())


def _tables(w: Weighing, most: int) -> Iterator[Tensor]:
    """Yield the parameters of at most so many numbers that are no projections."""
    steps, cuts = w.core.run.steps, w.core.plan.cuts
    read = {at for number, step in enumerate(steps) if number not in cuts for at in step.reads}
    for parameter in w.core.run.parameters:
        if parameter.numel() <= most and not read.isdisjoint(addresses(parameter)):
            yield parameter


def _with_other_numbers(parameter: Tensor, part: Any, measured: Callable[[], _Got]) -> _Got:
    """Return what is measured while a part of a parameter has other numbers."""
    before = parameter.detach().clone()
    noise = normal(6, *before.shape).abs()
    with torch.no_grad():
        parameter[part] = (before * 1.25 + 0.1 * noise)[part]
        try:
            return measured()
        finally:
            parameter.copy_(before)


class Heads(Law):
    """Each head has queries, keys and values of its own, and stays in its place."""

    name = "heads"
    formula = "output[head h] depends on query[head h] alone"
    example = "k = k.repeat(1, groups, 1, 1)  # heads 0 1 0 1 where queries are 0 0 1 1"

    def breach(self, lab: Lab) -> Breach | None:
        """Compare which value channels and which query channels belong to which column."""
        if has_no_projections(lab):
            return None
        w = core_of(lab)
        if w.missing:
            raise NotTried("Queries, keys or values are missing.")
        found = self._slices(lab, w) or self._tied(w) or self._same_projections(w) or self._raw(w)
        if found is not None:
            return found
        kept = w.constant[:, w.open_rows][:, 0]
        rank = _rank(kept)
        if rank < min(kept.shape):
            return Breach(
                f"{len(w.value)} value channels reach the output in {rank} directions only."
            )
        heads = w.heads
        if w.core.is_direct and (found := self._out_of_place(w)) is not None:
            return found
        return self._order(lab, w, heads) or self._scrambled(w, len(heads)) or self._moved_rows(w)

    @staticmethod
    def _moved_rows(w: Weighing) -> Breach | None:
        """Find outputs that stand at the place of another token than their query."""
        core = w.core
        if core.plan.exit is None or not core.lab.sees_rows or len(core.contents) > 1:
            return None
        start = core.at_the_end(core.bases(1))[0]
        if len(start) != core.tokens:
            return None
        noise = torch.full((1, len(w.query)), 0.5, dtype=torch.float64)
        probes = [core.placed(core.bases(1), w.query, noise, at) for at in range(core.tokens)]
        rows = differs(core.at_the_end(joined(probes)), start, 1e-10).any(-1)  # (tokens, rows)
        # A later operation may join several rows, as a convolution does.
        wrong = rows.int().argmax(1) != torch.arange(core.tokens)
        if bool((rows.sum(1) != 1).any()) or not bool(wrong.any()):
            return None
        token = int(wrong.nonzero()[0])
        return Breach(
            f"The query of token {token + 1} moves output {int(rows[token].int().argmax()) + 1} "
            "and no other: outputs stand in another order than their tokens.",
        )

    @staticmethod
    def _scrambled(w: Weighing, heads: int) -> Breach | None:
        """Find a table with an axis for the heads whose numbers reach other heads.

        A table whose numbers move several heads each is one that heads share.
        """
        start, sums = w.outputs(w.core.bases(1))[0], w.weights(w.core.bases(1)).sum(-1)

        def moved(parameter: Tensor, part: Any) -> Tensor:
            own = _with_other_numbers(parameter, part, lambda: w.outputs(w.core.bases(1))[0])
            return differs(own, start, 1e-9).any(0)  # (heads,)

        for parameter in _tables(w, 4096) if heads > 1 else ():
            axes = [axis for axis, size in enumerate(parameter.shape) if size == heads]
            if not axes or not _is_before(w, parameter, sums):
                continue
            slices = [
                torch.stack([moved(parameter, (*[slice(None)] * axis, i)) for i in range(heads)])
                for axis in axes
            ]
            if any(bool((own.sum(1) <= 1).all()) for own in slices):
                continue
            few = torch.arange(0, parameter.numel(), max(1, parameter.numel() // 24))
            ones = [moved(parameter, torch.unravel_index(n, parameter.shape)) for n in few]
            counts = {int(own.sum()) for own in ones} - {0}
            if min(counts, default=heads) == 1:
                at = addresses(parameter)[0]
                places = (s.place for s in w.core.run.steps if s.place and at in s.reads)
                return Breach(
                    f"A table of shape {tuple(parameter.shape)} has an axis for the {heads} heads, "
                    "and each of its parts reaches several heads; it should reach its own.",
                    next(places, None),
                )
        return None

    @staticmethod
    def _same_projections(w: Weighing) -> Breach | None:
        cuts = [cut for cut in w.core.plan.cuts if isinstance(cut, int)]
        roles = {cut: {r for (c, _), r in w.core.roles.items() if c == cut} for cut in cuts}
        for one, other in combinations(cuts, 2):
            steps = [w.core.run.steps[cut] for cut in (one, other)]
            # Several heads of queries may share one head of keys and values.
            is_shared = roles[one] == roles[other] and "query" not in roles[one]
            if not is_shared and torch.equal(steps[0].outputs[0], steps[1].outputs[0]):
                says = "Two projections give the same numbers."
                if roles[one] == roles[other]:
                    return Breach(says, steps[0].place, kind="heads-share-projection")
                return Breach(says, steps[1].place, kind="wrong-projection")
        return None

    @staticmethod
    def _slices(lab: Lab, w: Weighing) -> Breach | None:
        """Each projection reads the whole token."""
        slots = lab.specimen.sources.values()
        if w.core.is_direct or any(slot.high or len(slot.axes) > 3 for slot in slots):
            return None
        moved = {name: t.clone() for name, t in w.core.contents.items()}
        for t in moved.values():
            t[..., 0] += 1.0
        for cut, share in w.core.shares_moved(moved).items():
            if 0 < share < 0.9:
                return Breach(
                    f"One number of a token reaches {share:.0%} of a projection: heads read "
                    "slices of the token where each should read all of it.",
                    w.core.run.steps[cut].place,
                    kind="heads-share-projection",
                )
        return None

    @staticmethod
    def _raw(w: Weighing) -> Breach | None:
        """Values are projected where queries and keys are."""
        plain, projected = ({type(cut) for cut, _ in c} for c in (w.value, [*w.query, *w.key]))
        if plain != {str} or projected != {int}:
            return None
        return Breach(
            "The values are the input itself, and queries and keys are projections of it.",
            is_definite=False,
            kind="wrong-values",
        )

    @staticmethod
    def _tied(w: Weighing) -> Breach | None:
        """No two numbers of the output are the same whatever the queries are."""
        if not w.core.columns_are_channels:
            return None
        values = w.core.bases(1)
        for n, channels in enumerate((w.query, w.key)):
            for token in range(len(w.core.places[channels[0][0]])):
                noise = normal(23 + 100 * n + token, 1, len(channels))
                values = w.core.placed(values, channels, noise, token)
        out = w.core(values)[0]  # (rows, columns)
        for column in range(1, out.shape[1]):
            same = ~differs(out[:, :column], out[:, column : column + 1].expand(-1, column), 1e-9)
            if bool(same.all(0).any()):
                other = int(same.all(0).nonzero()[0])
                return Breach(
                    f"Numbers {other + 1} and {column + 1} of the output are always the same: "
                    "heads share their queries, keys and values.",
                    kind="heads-share-projection",
                )
        return None

    @staticmethod
    def _out_of_place(w: Weighing) -> Breach | None:
        constant = w.constant[:, w.open_rows][:, 0]
        if constant.shape[0] != constant.shape[1]:
            return None
        for channel in range(constant.shape[0]):
            column = int(constant[channel].abs().argmax())
            if column != channel:
                return Breach(
                    f"Number {channel + 1} of a token's values comes out as number {column + 1}."
                )
        return None

    @staticmethod
    def _order(lab: Lab, w: Weighing, heads: list[tuple[int, Tensor]]) -> Breach | None:
        """Each query channel moves one head; heads and their values are in the same order."""
        weights = w.weights(w.core.bases(1))[0]
        many = w.core.bases(len(w.query))
        for k, (cut, c) in enumerate(w.query):
            many[cut][k, w.core.places[cut][:, c]] += 0.8
        # One token tells, if its weights can grow and shrink.
        is_free = ((weights > 1e-6) & (weights < 1 - 1e-6)).any(1).all(0)  # (tokens,)
        tokens = [int(j) for j in is_free.nonzero()[:1]] or list(range(len(is_free)))
        read = w.weights(many, tokens) - weights[:, :, tokens]
        moved = read.abs().amax((2, 3)) > 1e-9  # (channels, heads)
        counts = moved.sum(-1)
        if bool((counts > 1).any()):
            channel = int((counts > 1).nonzero()[0])
            lab.notes.append(
                f"Number {channel + 1} of a token's queries moves {int(counts[channel])} of "
                f"{len(heads)} heads: heads share their queries, or their scores are mixed."
            )
            return None
        values = [channel for channel, _ in heads]
        order = [values[int(row.nonzero()[0])] for row in moved if bool(row.any())]
        if (met := list(dict.fromkeys(order))) != sorted(met):
            return Breach(
                "The heads of the queries are in another order than those of the values they weigh."
            )
        if len(set(values)) < len(values) and order != sorted(order):
            return Breach(
                "Neighbouring query heads should share a head of keys and values, 0 0 1 1; here "
                f"they take turns, in the order {_turns(order)}.",
                kind="kv-heads-repeated-in-wrong-order",
            )
        return None


def _turns(order: list[int]) -> str:
    """Return the order of value heads that query channels meet, without repetitions."""
    names = {channel: str(i) for i, channel in enumerate(sorted(set(order)))}
    found: list[str] = []
    for channel in order:
        if not found or found[-1] != names[channel]:
            found.append(names[channel])
    return " ".join(found[:8])
