"""The law of scores: query times key, divided by the square root of head_dim."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from regard.diagnosis.laws.arithmetic import SOFTMAXES
from regard.diagnosis.laws.core import Values
from regard.diagnosis.laws.lab import Lab, NotTried, differs, normal
from regard.diagnosis.laws.law import UNUSED, Breach, Law
from regard.diagnosis.laws.tape import Place, Step, is_theirs, reached
from regard.diagnosis.laws.weighing import (
    Channel,
    Weighing,
    core_of,
    has_no_projections,
    is_before_weights,
    joined,
    mistake_of_numpy,
    tables_of,
    with_other_numbers,
)
from regard.diagnosis.signature import definition_of
from regard.diagnosis.subject import source_of

__all__ = ["Score"]

_SMALL = 1e-2  # scores of this size square pass a cap unchanged


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
            kind=mistake_of_numpy(probe.w),
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
            # A bias by the key alone is that of ALiBi once a causal mask is passed.
            steps, s = logs.diff(), w.core.lab.specimen
            is_of_keys = not bool(differs(steps, steps[:, :1].expand_as(steps)).any())
            is_alibi = "alibi" in source_of(definition_of(s.call)).lower()
            is_definite = is_alibi and (s.causal is False or not is_of_keys)
            return Breach(says, self._place(w), is_definite=is_definite)
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
    for parameter in tables_of(w, most):
        counts = is_before_weights(w, parameter, sums)
        moved = with_other_numbers(parameter, ..., measured) if counts else start
        yield bool(differs(moved, start, 1e-3).any())
