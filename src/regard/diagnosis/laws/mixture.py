"""The law of averages: weights are at least 0, and those of a query sum to 1."""

import torch
from torch import Tensor

from regard.diagnosis.laws.arithmetic import SOFTMAXES
from regard.diagnosis.laws.lab import Lab, NotTried, as_tensors, differs
from regard.diagnosis.laws.law import Breach, Law
from regard.diagnosis.laws.tape import Place, first_place
from regard.diagnosis.laws.weighing import (
    Weighing,
    core_of,
    has_no_projections,
    joined,
    mistake_of_numpy,
    queries_and_keys,
)

__all__ = ["Mixture"]


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
            kind = mistake_of_numpy(w)
        return Breach(says, place, pair, is_definite=is_definite, kind=kind)


def _is_scaled_by_key(w: Weighing) -> bool:
    """Return True if the weights are those of attention, each row and each key times a number."""
    if not w.core.is_direct or w.core.contents["query"].shape != w.core.contents["key"].shape:
        return False
    query, key = queries_and_keys(w)
    weights = w.weights(w.core.bases(1))[0]  # (heads, rows, tokens)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if weights.shape != scores.shape or float(weights.min()) <= 0:
        return False
    rest = weights.log() - scores
    by_key = rest - rest[:, :, :1]
    is_of_keys = not bool(differs(by_key, by_key[:, :1].expand_as(by_key), 1e-6).any())
    return is_of_keys and bool((by_key.abs() > 1e-6).any())


def _returned_weights(w: Weighing) -> Breach | None:
    """Compare matrices whose rows or columns sum to 1, beside the output, with the weights."""
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
            known = (*weights, weights.mean(0))
            is_sum = not differs(own.sum(-1), weights.new_ones(())).any()
            is_turned = any(not differs(own.mT, one).any() for one in known)
            if (is_sum or is_turned) and all(differs(own, one).any() for one in known):
                says = "A matrix that it returns has rows that sum to 1, and is not the weights."
                if is_turned:
                    says = "A matrix that it returns is the weights, with keys down."
                few = slice(0, 4)
                pair = own[few, few], weights[0, few, few], "what is returned, and the weights"
                return Breach(says, None, pair, kind="returned")
    return None


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
