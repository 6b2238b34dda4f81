"""The passes over a tile of scores, compiled by Numba for this machine.

A tile has some columns of complete rows and lies in the cache. Each row keeps four numbers while
its tiles come one after the other: its largest score so far, m; the sum of exp(score - m); the sum
of exp(score - m) * (score - m); and the factor by which a new m has reduced both sums. Sums are
float32 over 512 columns and float64 beyond.

Source:
    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", for the running
    maximum.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeArgument=false, reportMissingParameterType=false

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit  # pyright: ignore[reportMissingTypeStubs]

__all__ = ["MAXIMUM", "MOMENT", "SHRUNK", "TOTAL", "add_tile", "expect", "pull_back", "sum_columns"]

# The numbers of a row.
MAXIMUM, TOTAL, MOMENT, SHRUNK = range(4)

_CHUNK = 512  # columns
_f = np.float32
# Adding and subtracting this number rounds to a whole number, which then lies in the lowest bits.
_ROUNDING = _f(1.5 * 2**23)
_LOG2_E = _f(1.4426950408889634)
_LOG2_E_REST = _f(1.4426950408889634 - float(_LOG2_E))
# Taylor's coefficients of 2**x, of which the last make up for those that are left out.
_C1, _C2, _C3 = _f(0.6931471805599453), _f(0.2402265069591007), _f(0.05550410866482158)
_C4, _C5, _C6 = _f(0.009618129107628477), _f(0.0013333558146428443), _f(0.00015403530393381608)
_LEAST = _f(-87.0)  # exp of less counts as 0: it would soon be a denormal number, which is slow
_ZERO, _ONE = _f(0), _f(1)
_NO_SCORE = _f(-np.inf)


def _compiled(*freedoms: str) -> Callable[[Any], Any]:
    """Compile a function that holds no lock, and cache it on disk where a folder can be written.

    Args:
        freedoms: what LLVM may do beyond IEEE 754. None of them lets it ignore NaN or infinity.
    """

    def compile_it(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, fastmath=set(freedoms))(function)
        except RuntimeError:  # no folder for the cache
            return njit(nogil=True, fastmath=set(freedoms))(function)

    return compile_it


_exact = _compiled("contract")
_summing = _compiled("contract", "nsz", "reassoc")


@_exact
def _exp(x):
    """Return exp(x) for x from -87 to 0, with an error of 1e-7; NaN for NaN."""
    shifted = x * _LOG2_E + _ROUNDING
    whole = shifted - _ROUNDING
    rest = x * _LOG2_E - whole + x * _LOG2_E_REST
    power = _C6
    power = power * rest + _C5
    power = power * rest + _C4
    power = power * rest + _C3
    power = power * rest + _C2
    power = power * rest + _C1
    power = power * rest + _ONE
    bits = _f(power).view(np.int32) + (_f(shifted).view(np.int32) << 23)
    return np.int32(bits).view(np.float32)


@_summing
def add_tile(scores, weights, peaks, rows, first, top_scores, top_columns):
    """Add a tile to the numbers of its rows, and write exp(score - m), 0 where masked.

    NaN and +inf make the third number of a row NaN.

    Args:
        scores: (rows, columns), float32; -inf where masked.
        weights: (rows, columns), float32, which may be the same memory; or (1, columns), which every
            row overwrites.
        peaks: (rows, groups), float32. The first columns of the tile are cut into equal parts; the
            i-th number is the largest of the i-th numbers of all parts.
        rows: (4, rows), float64.
        first: the position of the first column in the matrix.
        top_scores: (rows, k), float32, the largest scores so far; -inf where there are fewer.
        top_columns: (rows, k), int64, their positions.
    """
    height, width = scores.shape
    groups = peaks.shape[1]
    parts = width // groups
    for r in range(height):
        row, of_groups = scores[r], peaks[r]
        out = weights[min(r, weights.shape[0] - 1)]
        peak = _NO_SCORE
        for g in range(groups):
            peak = max(peak, of_groups[g])
        for j in range(parts * groups, width):
            peak = max(peak, row[j])
        before = _f(rows[MAXIMUM, r])
        maximum = max(before, peak)
        total, moment = 0.0, 0.0
        if maximum == -math.inf:
            for j in range(width):
                out[j] = _ZERO
                moment += 0.0 if row[j] == _NO_SCORE else math.nan
            rows[SHRUNK, r] = 1.0
            rows[MOMENT, r] += moment
            continue
        for start in range(0, width, _CHUNK):
            part, to = row[start : start + _CHUNK], out[start : start + _CHUNK]
            some, moment_of_some = _ZERO, _ZERO
            for j in range(part.shape[0]):
                x = part[j] - maximum
                x = max(x, _LEAST)
                weight = _ZERO if x == _LEAST else _exp(x)
                to[j] = weight
                some += weight
                moment_of_some += weight * x
            total += some
            moment += moment_of_some
        if top_scores.shape[1]:
            _take_largest(row, of_groups, first, top_scores[r], top_columns[r])
        shrunk = 1.0
        if maximum > before:
            shrunk = 0.0
            if before > -math.inf:
                rise = np.float64(maximum) - np.float64(before)
                shrunk = math.exp(-rise)
                rows[MOMENT, r] = shrunk * (rows[MOMENT, r] - rows[TOTAL, r] * rise)
                rows[TOTAL, r] *= shrunk
            rows[MAXIMUM, r] = maximum
        rows[SHRUNK, r] = shrunk
        rows[TOTAL, r] += total
        rows[MOMENT, r] += moment


@_exact
def _take_largest(row, peaks, first, top_scores, top_columns):
    """Take the scores of a row that belong to the k largest; ties go to the lowest position."""
    groups, width = peaks.shape[0], row.shape[0]
    parts = width // groups
    bound = top_scores[-1]
    if bound == -math.inf:
        bound = _lower_bound(peaks, top_scores.shape[0])
    for g in range(groups):
        if peaks[g] >= bound:
            for i in range(parts):
                j = i * groups + g
                if row[j] >= bound:
                    _insert(row[j], first + j, top_scores, top_columns)
    for j in range(parts * groups, width):
        if row[j] >= bound:
            _insert(row[j], first + j, top_scores, top_columns)


@_exact
def _lower_bound(peaks, k):
    """Return a number that at least k peaks reach, if possible few more; -inf if there are fewer."""
    high, low = _NO_SCORE, _NO_SCORE
    for g in range(peaks.shape[0]):
        high = max(high, peaks[g])
    low = high - _f(64)
    found = 0
    for _ in range(12):
        middle = low if found == 0 else _f(0.5) * low + _f(0.5) * high
        reached = 0
        for g in range(peaks.shape[0]):
            reached += 1 if peaks[g] >= middle else 0
        if reached >= k:
            low, found = middle, reached
            if reached <= k + k // 4:
                return low
        elif found == 0:
            return _NO_SCORE
        else:
            high = middle
    return low


@_exact
def _insert(score, column, top_scores, top_columns):
    """Insert a score into a list in falling order, where the lowest column of equal scores leads."""
    at = top_scores.shape[0] - 1
    if not _leads(score, column, top_scores[at], top_columns[at]):
        return
    while at > 0 and _leads(score, column, top_scores[at - 1], top_columns[at - 1]):
        top_scores[at] = top_scores[at - 1]
        top_columns[at] = top_columns[at - 1]
        at -= 1
    top_scores[at] = score
    top_columns[at] = column


@_exact
def _leads(score, column, other, other_column):
    return score > other or (score == other and column < other_column)


@_summing
def sum_columns(weights, factors, places, sums):
    """Add each row of weights, times its factor, to the sum at its place.

    Args:
        weights: (rows, columns), float32.
        factors: (rows,), float32.
        places: (rows,), int64, in rising order; rows at -1 count nowhere.
        sums: (places, columns), float32.
    """
    height, width = weights.shape
    r = 0
    while r < height:
        place = places[r]
        if place < 0:
            r += 1
            continue
        to, a, of_a = sums[place], weights[r], factors[r]
        if r + 3 < height and places[r + 3] == place:  # each number of the sum is read once
            b, c, d = weights[r + 1], weights[r + 2], weights[r + 3]
            of_b, of_c, of_d = factors[r + 1], factors[r + 2], factors[r + 3]
            for j in range(width):
                to[j] += (a[j] * of_a + b[j] * of_b) + (c[j] * of_c + d[j] * of_d)
            r += 4
        else:
            for j in range(width):
                to[j] += a[j] * of_a
            r += 1


@_summing
def expect(scores, norms, given, places, expected):
    """Add the sum of weight * gradient of each row to ``expected``.

    Args:
        scores: (rows, columns), float32; -inf where masked.
        norms: (2, rows), float64: the maximum and the logsumexp minus the maximum.
        given: (places, columns), float32: gradients of the weights.
        places: (rows,), int64: which of these gradients a row has.
        expected: (rows,), float64.
    """
    height, width = scores.shape
    for r in range(height):
        row, of_row = scores[r], given[places[r]]
        maximum = _f(norms[0, r])
        inverse = math.exp(-norms[1, r])
        total = 0.0
        for start in range(0, width, _CHUNK):
            part, gradient = row[start : start + _CHUNK], of_row[start : start + _CHUNK]
            some = _ZERO
            for j in range(part.shape[0]):
                x = part[j] - maximum
                x = max(x, _LEAST)
                weight = _ZERO if x == _LEAST else _exp(x)
                some += weight * gradient[j]
            total += some
        expected[r] += total * inverse


@_summing
def pull_back(scores, norms, given, places, constants, slopes, first, columns, picked):
    """Replace scores by their gradients: weight * (given + constant + slope * (score - maximum)).

    Args:
        scores: (rows, columns), float32; -inf where masked.
        norms: (2, rows), float64: the maximum and the logsumexp minus the maximum.
        given: (places, columns), float32: gradients of the weights.
        places: (rows,), int64: which of these gradients a row has.
        constants: (rows,), float32.
        slopes: (rows,), float32.
        first: the position of the first column in the matrix.
        columns: (rows, n), int64: positions of further gradients; -1 for none.
        picked: (rows, n), float32: these gradients, of single weights; they are overwritten.
    """
    height, width = scores.shape
    for r in range(height):
        row, of_row = scores[r], given[places[r]]
        maximum = _f(norms[0, r])
        inverse = _f(math.exp(-norms[1, r]))
        constant, slope = constants[r], slopes[r]
        for i in range(columns.shape[1]):  # before the scores are gone
            j = columns[r, i] - first
            if 0 <= j < width:
                x = row[j] - maximum
                x = max(x, _LEAST)
                picked[r, i] *= _ZERO if x == _LEAST else _exp(x) * inverse
        for j in range(width):
            x = row[j] - maximum
            x = max(x, _LEAST)
            weight = _ZERO if x == _LEAST else _exp(x) * inverse
            row[j] = weight * (of_row[j] + constant + slope * x)
        for i in range(columns.shape[1]):
            j = columns[r, i] - first
            if 0 <= j < width:
                row[j] += picked[r, i]
