"""The passes over a tile of scores, compiled by Numba for this machine.

A tile has some columns of some rows and fits in the cache. The tiles of a row are read one after
another. Meanwhile the row has three running numbers: its largest score so far, m; the sum of
exp(score - m); and the sum of exp(score - m) * (score - m). Sums are float32 over 512 columns and
float64 beyond.

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

# The columns of ``rows``, the running numbers of each row, and of ``norms``, which ``finish_rows``
# computes from them.
MAXIMUM, TOTAL, MOMENT = range(3)
REFERENCE, NORMALIZER, LOGSUMEXP, MEAN, ROW_SUM, OF_SINK = range(6)

_AT_ONCE = 512  # columns
_BISECTIONS = 8
_ROWS_ADDED = 16
_WITHIN, _WIDENING, _WIDEST = np.float32(64), np.float32(8), np.float32(1e6)
_MANY_KEYS, _BUCKETS = 256, 128
_f = np.float32
# Adding and subtracting this number rounds to a whole number, which then lies in the lowest bits.
_ROUNDING = _f(1.5 * 2**23)
_LOG2_E = _f(1.4426950408889634)
_LOG2_E_REST = _f(1.4426950408889634 - float(_LOG2_E))
# Taylor coefficients of 2**x.
_C1, _C2, _C3 = _f(0.6931471805599453), _f(0.2402265069591007), _f(0.05550410866482158)
_C4, _C5, _C6 = _f(0.009618129107628477), _f(0.0013333558146428443), _f(0.00015403530393381608)
# exp counts as 0 here and below, because a little lower the result is denormal, which is slow.
_LEAST = _f(-87.0)
_ZERO, _ONE, _TWO = _f(0), _f(1), _f(2)
_LN_2 = _f(math.log(2))
_A3, _A5, _A7, _A9, _A11, _A13 = (_f(1 / n) for n in range(3, 15, 2))  # of the series of atanh
# Taylor coefficients of exp(x), and of x t + log(1 - t^2) for t = tanh(x / 2).
_E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10 = (_f(1 / math.factorial(n)) for n in range(2, 11))
_T2, _T4, _T6, _T8 = _f(1 / 4), _f(-1 / 32), _f(1 / 288), _f(-17 / 46080)
_T10, _T12, _T14 = _f(31 / 806400), _f(-691 / 174182400), _f(5461 / 13412044800)
_FAR = _f(-1e30)  # less than the logarithm of any weight that counts
_NO_SCORE = _f(-np.inf)
_LOWEST = np.finfo(np.float32).min
_ALL_BUT_SIGN = np.int32(2**31 - 1)
_LAST_COLUMN = 2**32 - 1
NO_KEY = -(2**63)
"""Less than every integer that ``_keyed`` returns."""


def _compiled(*freedoms: str) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function to run without Python's global lock (GIL).

    The compiled function is cached on disk if a folder for it is writable.

    Args:
        freedoms: LLVM's fast-math flags, each of which permits a deviation from IEEE 754. None of
            those used here permits ignoring NaN or infinity.
    """
    # Python's error model tests for division by 0, which keeps a loop from vector instructions.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(freedoms)}

    def compile_it(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no folder for the cache
            return njit(**options)(function)

    return compile_it


_exact = _compiled("contract")
_summing = _compiled("contract", "nsz", "reassoc")
_inlined = njit(nogil=True, fastmath={"contract", "nsz", "reassoc"}, inline="always")


@_exact
def _exp(x):
    """Return exp(x) for x from -87 to 0, with an error of 1e-7; 0 at -87, NaN for NaN."""
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
    return _ZERO if x == _LEAST else np.int32(bits).view(np.float32)


@_exact
def _below(score, maximum):
    """Return score - maximum, raised to -87 if it is lower; NaN for NaN. At -87 the weight is 0."""
    x = score - maximum
    return _LEAST if x < _LEAST else x


@_inlined
def _exponentials(part, maximum, to):
    total, moment = _ZERO, _ZERO
    for j in range(part.shape[0]):
        x = _below(part[j], maximum)
        weight = _exp(x)
        to[j] = weight
        total += weight
        moment += weight * x
    return total, moment


@_summing
def add_tile(scores, weights, peaks, rows, shrunk, first, largest):
    """Update the three numbers of each row with a tile, and write exp(score - m), 0 where masked.

    A score of NaN or +inf makes the third number of its row NaN.

    Args:
        scores: (rows, columns), float32; -inf where masked.
        weights: (rows, columns), float32; (1, columns), which every row overwrites; or
            (0, columns): the weights overwrite the scores.
        peaks: (groups,), float32, memory that every row uses for ``_find_peaks``.
        rows: (rows, 3), float64.
        shrunk: (rows,), float32: the factor by which the earlier sums of a row were multiplied.
        first: the position of the first column in the matrix.
        largest: (rows, k), int64, the largest scores so far and their columns, both packed into one
            integer by ``_keyed``.
    """
    height, width = scores.shape
    in_place = weights.shape[0] == 0
    found = np.empty(peaks.shape[0] + width + largest.shape[1] + 1, np.int64)
    ordered, ends = np.empty(_MANY_KEYS, np.int64), np.empty(_BUCKETS, np.int64)
    for r in range(height):
        row = scores[r]
        _find_peaks(row, peaks)
        peak = _NO_SCORE
        for each in peaks:
            peak = each if each > peak else peak
        before = _f(rows[r, MAXIMUM])
        maximum = peak if peak > before else before
        total, moment = 0.0, 0.0
        if maximum == -math.inf:
            for j in range(width):
                moment += 0.0 if row[j] == _NO_SCORE else math.nan
            if in_place:
                row[:] = _ZERO
            else:
                weights[min(r, weights.shape[0] - 1)] = _ZERO
            shrunk[r] = _ONE
            rows[r, MOMENT] += moment
            continue
        if largest.shape[1]:  # before the scores are overwritten
            _take_largest(scores, r, peaks, first, largest, found, ordered, ends)
        for start in range(0, width, _AT_ONCE):
            part = row[start : start + _AT_ONCE]
            if in_place:  # two calls, because the compiler must know what shares memory
                some, moment_of_some = _exponentials(part, maximum, part)
            else:
                to = weights[min(r, weights.shape[0] - 1), start : start + _AT_ONCE]
                some, moment_of_some = _exponentials(part, maximum, to)
            total += some
            moment += moment_of_some
        factor = 1.0
        if maximum > before:
            factor = 0.0
            if before > -math.inf:
                rise = np.float64(maximum) - np.float64(before)
                factor = math.exp(-rise)
                rows[r, MOMENT] = factor * (rows[r, MOMENT] - rows[r, TOTAL] * rise)
                rows[r, TOTAL] *= factor
            rows[r, MAXIMUM] = maximum
        shrunk[r] = factor
        rows[r, TOTAL] += total
        rows[r, MOMENT] += moment


@_exact
def hide_outside(scores, rows, row, column, low, high):
    """Write -inf outside a band of the matrix, where a query may attend to no key.

    Args:
        scores: (heads * rows, columns), float32.
        rows: the number of rows of each head.
        row: the position of the first row in the matrix.
        column: the position of the first column.
        low: query i may attend to the keys from i + low ...
        high: ... to i + high.
    """
    width = scores.shape[1]
    for r in range(scores.shape[0]):
        first = row + r % rows - column
        scores[r, : min(max(first + low, 0), width)] = _NO_SCORE
        scores[r, min(max(first + high + 1, 0), width) :] = _NO_SCORE


@_summing
def count_keys(scores, peaks, rows, bound, counts):
    """Count the keys of each row of a tile whose score is near the maximum, before ``add_tile``.

    The maximum may rise with a later tile. Then no counted key may be near it any more. If that is
    true of some of them only, or cannot be told, the count is NaN.

    Args:
        scores: (rows, columns), float32; -inf where masked.
        peaks: (groups,), float32, memory that every row uses for ``_find_peaks``.
        rows: (rows, 3), float64, the running numbers of each row before this tile.
        bound: a key counts if its score minus the maximum is above this negative number.
        counts: (rows, 2), float64: the number of keys, and a lower bound of their scores.
    """
    height, width = scores.shape
    for r in range(height):
        row, before = scores[r], _f(rows[r, MAXIMUM])
        _find_peaks(row, peaks)
        maximum = before
        for peak in peaks:
            maximum = peak if peak > maximum else maximum
        if maximum == -math.inf:
            continue
        if counts[r, 0] > 0 and counts[r, 1] - maximum <= bound:
            counts[r, 0] = 0.0 if before - maximum <= bound else math.nan
            counts[r, 1] = math.inf
        near, nearer = _ZERO, _ZERO  # two counts, because the lowest score would be slow to find
        for j in range(width):
            below = row[j] - maximum
            near += _ONE if below > bound else _ZERO
            nearer += _ONE if below > bound / _TWO else _ZERO
        lowest = maximum + (bound / _TWO if near == nearer else bound)
        counts[r, 0] += near
        counts[r, 1] = min(counts[r, 1], lowest)


@_exact
def _find_peaks(row, peaks):
    """Write the largest score of each group of columns.

    Group g has the columns g, g + groups, g + 2 * groups and so on.
    """
    groups, width = peaks.shape[0], row.shape[0]
    parts = width // groups
    peaks[:] = row[:groups]
    i = 0
    while i + 3 < parts:  # each peak is read once for four scores
        a, b = row[i * groups : (i + 1) * groups], row[(i + 1) * groups : (i + 2) * groups]
        c, d = row[(i + 2) * groups : (i + 3) * groups], row[(i + 3) * groups : (i + 4) * groups]
        for g in range(groups):
            x = a[g] if a[g] > b[g] else b[g]
            y = c[g] if c[g] > d[g] else d[g]
            x = x if x > y else y
            peaks[g] = x if x > peaks[g] else peaks[g]
        i += 4
    for j in range(i * groups, width):
        g = j % groups
        peaks[g] = row[j] if row[j] > peaks[g] else peaks[g]


@_exact
def _rising(score):
    """Return an integer that increases with the score."""
    bits = _f(score).view(np.int32)
    return np.int32(bits ^ ((bits >> 31) & _ALL_BUT_SIGN))


@_exact
def _take_largest(scores, r, peaks, first, largest, found, ordered, ends):
    """Update the k largest scores of row r with those of a tile; ties go to the lowest column.

    No branch depends on whether a score is among them: the CPU would predict half of such branches
    wrongly.
    """
    groups, width, k = peaks.shape[0], scores.shape[1], largest.shape[1]
    last = largest[r, k - 1]
    bound = _lower_bound(peaks, k) if last == NO_KEY else _score_of(last)
    met = 0
    for g in range(groups):
        found[met] = g
        met += 1 if peaks[g] >= bound else 0
    begin = end = groups
    for i in range(met):
        for j in range(found[i], width, groups):
            found[end] = j
            end += 1 if scores[r, j] >= bound else 0
    if end == begin:
        return
    for i in range(begin, end):
        found[i] = _keyed(scores[r, found[i]], first + found[i])
    for i in range(k):
        found[end] = largest[r, i]
        end += 1 if largest[r, i] != NO_KEY else 0
    if end - begin > _MANY_KEYS:
        found[begin:end].sort()
        for i in range(min(k, end - begin)):
            largest[r, i] = found[end - 1 - i]
    else:
        _write_largest(found[begin:end], ordered, ends, largest[r])


@_exact
def _write_largest(found, ordered, ends, largest):
    """Write the largest of a few integers of ``_keyed``, in descending order.

    They are put into buckets by their scores, so that a sort by insertion has little left to do.

    Args:
        found: (count,), int64.
        ordered: (at least count,), int64, memory for the same integers in another order.
        ends: (buckets,), int64, memory for the position behind each bucket.
        largest: (k,), int64, is written.
    """
    low = high = _score_of(found[0])
    for key in found:
        score = _score_of(key)
        low = score if score < low else low
        high = score if score > high else high
    per_score = _f(ends.shape[0] - 1) / (high - low)
    ends[:] = 0
    for key in found:
        ends[_bucket(key, high, per_score, ends.shape[0])] += 1
    for i in range(1, ends.shape[0]):
        ends[i] += ends[i - 1]
    for key in found:
        bucket = _bucket(key, high, per_score, ends.shape[0])
        ends[bucket] -= 1
        ordered[ends[bucket]] = key
    for i in range(1, found.shape[0]):
        key, j = ordered[i], i
        while j > 0 and ordered[j - 1] < key:
            ordered[j] = ordered[j - 1]
            j -= 1
        ordered[j] = key
    for i in range(min(found.shape[0], largest.shape[0])):
        largest[i] = ordered[i]


@_exact
def _bucket(key, high, per_score, buckets):
    # The comparison also holds back NaN, from equal scores, and infinity.
    place = (high - _score_of(key)) * per_score
    return np.int64(place) if place < buckets else buckets - 1


@_exact
def _keyed(score, column):
    """Return an integer that increases with the score.

    For equal scores it is larger at the lower column.
    """
    # Adding 0.0 turns -0.0 into 0.0, so that both give the same integer.
    return (np.int64(_rising(score + _ZERO)) << 32) | (_LAST_COLUMN - column)


@_exact
def _score_of(key):
    rising = np.int32(key >> 32)
    return np.int32(rising ^ ((rising >> 31) & _ALL_BUT_SIGN)).view(np.float32)


def scores_and_columns(largest):
    """Return the scores and the columns of integers of ``_keyed``; -inf and -1 for ``NO_KEY``."""
    rising = (largest >> 32).astype(np.int32)
    scores = (rising ^ ((rising >> 31) & _ALL_BUT_SIGN)).view(np.float32)
    columns = _LAST_COLUMN - (largest & _LAST_COLUMN)
    none = largest == NO_KEY
    return np.where(none, _NO_SCORE, scores), np.where(none, -1, columns)


@_exact
def _lower_bound(peaks, k):
    """Return a bound that at least k peaks reach, if possible not many more.

    If there is no such bound, or it is far below the highest peak, return ``_LOWEST``.
    """
    high = low = peaks[0]
    for peak in peaks:
        high = peak if peak > high else high
        low = peak if peak < low else low
    within, lowest = _WITHIN, low
    low = lowest if lowest > high - within else high - within
    while _count(peaks, low) < k:
        if low == lowest or within > _WIDEST:
            return _LOWEST
        high = low
        within *= _WIDENING
        low = lowest if lowest > high - within else high - within
    for _ in range(_BISECTIONS):
        middle = _f(0.5) * low + _f(0.5) * high
        reached = _count(peaks, middle)
        if reached < k:
            high = middle
        else:
            low = middle
            if reached <= k + k // 4:
                break
    return low


@_summing
def _count(peaks, bound):
    reached = _ZERO
    for g in range(peaks.shape[0]):
        reached += _ONE if peaks[g] >= bound else _ZERO
    return reached


@_summing
def finish_rows(rows, sinks, norms):
    """Compute the normalizers and the statistics of complete rows from their three numbers.

    Args:
        rows: (rows, 3), float64.
        sinks: (rows,), float64: logits in the denominator; (0,) for none.
        norms: (rows, 6), float64, is written: the maximum (0 for a row without keys); the logsumexp
            minus the maximum (infinite for a row without keys); the logsumexp; the sum of
            weight * (score - maximum); the sum of the weights; the weight of the sink.
    """
    for r in range(rows.shape[0]):
        maximum, total = rows[r, MAXIMUM], rows[r, TOTAL]
        of_row = norms[r]
        of_row[:] = 0.0
        if maximum == -math.inf:
            of_row[NORMALIZER] = math.inf
            of_row[LOGSUMEXP] = -math.inf
            continue
        of_row[REFERENCE] = maximum
        normalizer = math.log(total)
        of_row[LOGSUMEXP] = maximum + normalizer
        of_row[ROW_SUM] = 1.0
        if sinks.shape[0]:
            beside = sinks[r] - maximum
            larger = max(normalizer, beside)
            with_sink = larger + math.log(math.exp(normalizer - larger) + math.exp(beside - larger))
            of_row[ROW_SUM] = math.exp(normalizer - with_sink)
            of_row[OF_SINK] = math.exp(beside - with_sink)
            # Not maximum + with_sink, which cancels if the sink is far above the scores.
            sum_of_both = larger if larger == beside else normalizer
            base = sinks[r] if larger == beside else maximum + normalizer
            of_row[LOGSUMEXP] = base + (with_sink - sum_of_both)
            normalizer = with_sink
        of_row[NORMALIZER] = normalizer
        of_row[MEAN] = rows[r, MOMENT] * math.exp(-normalizer)


@_summing
def sum_columns(weights, references, norms, places, first, sums, line):
    """Add the weights of each row of a tile to the sum over rows that the row belongs to.

    Args:
        weights: (rows, columns), float32: exp(score - reference).
        references: (rows,), float64; -inf for a row without keys so far.
        norms: (rows, 6), float64, as ``finish_rows`` writes them.
        places: (rows,), int64: the sum that a row belongs to, in rising order; -1 for none.
        first: the position of the tile's first column among the columns of the sums.
        sums: (places, columns of the sums), float64.
        line: (columns,), float32, memory for the sum of a few rows.
    """
    height, width = weights.shape
    r = 0
    while r < height:
        place, end = places[r], r + 1
        # Few rows at a time: float32 roundings of equal numbers add up.
        while end < min(height, r + _ROWS_ADDED) and places[end] == place:
            end += 1
        if place >= 0:
            line[:width] = _ZERO
            while r < end:
                a, of_a = weights[r], _factor(references[r], norms[r])
                if r + 3 < end:  # each number of the sum is read once for four rows
                    b, of_b = weights[r + 1], _factor(references[r + 1], norms[r + 1])
                    c, of_c = weights[r + 2], _factor(references[r + 2], norms[r + 2])
                    d, of_d = weights[r + 3], _factor(references[r + 3], norms[r + 3])
                    for j in range(width):
                        line[j] += (a[j] * of_a + b[j] * of_b) + (c[j] * of_c + d[j] * of_d)
                    r += 4
                else:
                    for j in range(width):
                        line[j] += a[j] * of_a
                    r += 1
            to = sums[place, first : first + width]
            for j in range(width):
                to[j] += line[j]
        r = end


@_exact
def _factor(reference, norms):
    if reference == -math.inf:
        return _ZERO
    return _f(math.exp(reference - norms[REFERENCE] - norms[NORMALIZER]))


@_summing
def relative_entropy(own, other, own_norms, other_norms, totals):
    """Add the terms of ``KullbackLeibler`` over a tile of two matrices.

    Args:
        own: (rows, columns), float32, the scores of the first matrix; -inf where masked.
        other: (rows, columns), float32, those of the second.
        own_norms: (rows, 6), float64, as ``finish_rows`` writes them.
        other_norms: the same of the second matrix.
        totals: (rows,), float64; infinite if only the second matrix masks a key.
    """
    height, width = own.shape
    for r in range(height):
        maximum, reference = _f(own_norms[r, REFERENCE]), _f(other_norms[r, REFERENCE])
        normalizer, other_normalizer = _finite(own_norms[r]), _finite(other_norms[r])
        shift, total = other_normalizer - normalizer, 0.0
        for start in range(0, width, _AT_ONCE):
            a, b = own[r, start : start + _AT_ONCE], other[r, start : start + _AT_ONCE]
            some, hidden = _ZERO, _ZERO
            for j in range(a.shape[0]):
                below = _log_weight(a[j], maximum, _ZERO)
                below_other = _log_weight(b[j], reference, _ZERO)
                p, q = _exp(_below(below, normalizer)), _exp(_below(below_other, other_normalizer))
                x = below_other - below - shift
                hidden += _ONE if (b[j] == _NO_SCORE) & (a[j] > _NO_SCORE) else _ZERO
                some += p * _rest_of_exp(x) if abs(x) < _ONE else q - p - p * x
            total += some if hidden == _ZERO else math.inf
        totals[r] += total


@_inlined
def _rest_of_exp(x):
    """Return exp(x) - 1 - x for x from -1 to 1; it is never negative."""
    series = _E10
    series = series * x + _E9
    series = series * x + _E8
    series = series * x + _E7
    series = series * x + _E6
    series = series * x + _E5
    series = series * x + _E4
    series = series * x + _E3
    series = series * x + _E2
    return x * x * series


@_summing
def pull_back_relative_entropy(own, other, own_norms, other_norms, gradients, constants):
    """Replace the scores of two matrices by gradients of ``KullbackLeibler``.

    With the weights p and q, and p_sum the sum of p over a row, the scores of the first become
    ``p (log(p) - log(q) - constant)``, those of the second ``p_sum q - p``, each times
    the gradient of the row.

    Args:
        own: (rows, columns), float32, the scores of the first matrix; -inf where masked.
        other: (rows, columns), float32, those of the second.
        own_norms: (rows, 6), float64, as ``finish_rows`` writes them.
        other_norms: the same of the second matrix.
        gradients: (rows,), float32, of the divergences; 0 where only the second masks a key.
        constants: (rows,), float32.
    """
    height, width = own.shape
    for r in range(height):
        maximum, reference = _f(own_norms[r, REFERENCE]), _f(other_norms[r, REFERENCE])
        normalizer, other_normalizer = _finite(own_norms[r]), _finite(other_norms[r])
        inverse = _f(math.exp(-normalizer))
        other_inverse = _f(math.exp(-other_normalizer) * own_norms[r, ROW_SUM])
        gradient, constant = gradients[r], constants[r] + normalizer - other_normalizer
        a, b = own[r], other[r]
        for j in range(width):
            x = _below(a[j], maximum)
            y = _ZERO if b[j] == _NO_SCORE else b[j] - reference
            p, q = _exp(x) * inverse, _exp(_below(b[j], reference)) * other_inverse
            a[j] = gradient * p * (x - y - constant)
            b[j] = gradient * (q - p)


@_exact
def _finite(norms):
    """Return the normalizer of a row, and 0 for a row without keys."""
    return _ZERO if norms[NORMALIZER] == math.inf else _f(norms[NORMALIZER])


@_inlined
def _log_weight(score, maximum, normalizer):
    """Return log(weight), at least ``_FAR``, also for a masked key."""
    x = (score - maximum) - normalizer
    return _FAR if x < _FAR else x


@_inlined
def _mixture(x):
    """Return |x|, the ratio r = exp(-|x|) of two weights, and log(2 / (1 + r)).

    log(1 + r) is 2 atanh(r / (2 + r)), whose series converges fast for r up to 1.
    """
    apart = abs(x)
    apart = -_LEAST if apart > -_LEAST else apart
    ratio = _exp(-apart)
    t = ratio / (_TWO + ratio)
    u = t * t
    series = _A13
    series = series * u + _A11
    series = series * u + _A9
    series = series * u + _A7
    series = series * u + _A5
    series = series * u + _A3
    series = series * u + _ONE
    return apart, ratio, _LN_2 - _TWO * t * series


@_inlined
def _close_mixture(x):
    """Return ``x t + log(1 - t^2)`` for t = tanh(x / 2) and x from -1 to 1."""
    square = x * x
    series = _T14
    series = series * square + _T12
    series = series * square + _T10
    series = series * square + _T8
    series = series * square + _T6
    series = series * square + _T4
    series = series * square + _T2
    return square * series


@_summing
def jensen_shannon(own, other, own_norms, other_norms, totals):
    """Add the terms of ``JensenShannon`` over a tile of two matrices.

    Args:
        own: (rows, columns), float32, the scores of the first matrix; -inf where masked.
        other: (rows, columns), float32, those of the second.
        own_norms: (rows, 6), float64, as ``finish_rows`` writes them.
        other_norms: the same of the second matrix.
        totals: (rows,), float64.
    """
    height, width = own.shape
    half = _f(0.5)
    for r in range(height):
        maximum, reference = _f(own_norms[r, REFERENCE]), _f(other_norms[r, REFERENCE])
        normalizer, other_normalizer = _finite(own_norms[r]), _finite(other_norms[r])
        shift, total = other_normalizer - normalizer, 0.0
        for start in range(0, width, _AT_ONCE):
            a, b = own[r, start : start + _AT_ONCE], other[r, start : start + _AT_ONCE]
            some = _ZERO
            for j in range(a.shape[0]):
                below = _log_weight(a[j], maximum, _ZERO)
                below_other = _log_weight(b[j], reference, _ZERO)
                x = below_other - below - shift
                apart, ratio, log_share = _mixture(x)
                larger = below - normalizer if x < _ZERO else below_other - other_normalizer
                weight = _exp(_below(larger, _ZERO))
                far = (_ONE + ratio) * log_share - apart * ratio
                near = half * (_ONE + ratio) * _close_mixture(apart)
                some += weight * (near if apart < _ONE else far)
            total += some
        totals[r] += total


@_summing
def expect_jensen_shannon(own, other, own_norms, other_norms, expected):
    """Add sum(p P) over a tile to each row, and the same of the second matrix.

    ``pull_back_jensen_shannon`` says what P is, and what the other arguments are.

    Args:
        own: (rows, columns), float32.
        other: (rows, columns), float32.
        own_norms: (rows, 6), float64.
        other_norms: (rows, 6), float64.
        expected: (rows, 2), float64.
    """
    height, width = own.shape
    half = _f(0.5)
    for r in range(height):
        maximum, reference = _f(own_norms[r, REFERENCE]), _f(other_norms[r, REFERENCE])
        normalizer, other_normalizer = _f(own_norms[r, NORMALIZER]), _f(other_norms[r, NORMALIZER])
        first, second = 0.0, 0.0
        for start in range(0, width, _AT_ONCE):
            a, b = own[r, start : start + _AT_ONCE], other[r, start : start + _AT_ONCE]
            some, some_other = _ZERO, _ZERO
            for j in range(a.shape[0]):
                log_p = _log_weight(a[j], maximum, normalizer)
                log_q = _log_weight(b[j], reference, other_normalizer)
                apart, _, log_share = _mixture(log_p - log_q)
                of_p = log_share - (_ZERO if log_p > log_q else apart)
                of_q = log_share - (apart if log_p > log_q else _ZERO)
                some += half * _exp(_below(log_p, _ZERO)) * of_p
                some_other += half * _exp(_below(log_q, _ZERO)) * of_q
            first += some
            second += some_other
        expected[r, 0] += first
        expected[r, 1] += second


@_summing
def pull_back_jensen_shannon(own, other, own_norms, other_norms, gradients, expected):
    """Replace the scores of two matrices by the gradients of ``JensenShannon``.

    With the weights p and q, and ``P = log(2 p / (p + q)) / 2``, the scores of the first matrix
    become p (P - sum(p P)), those of the second the same with p and q exchanged, each times the
    gradient of the row.

    Args:
        own: (rows, columns), float32, the scores of the first matrix; -inf where masked.
        other: (rows, columns), float32, those of the second.
        own_norms: (rows, 6), float64, as ``finish_rows`` writes them.
        other_norms: the same of the second matrix.
        gradients: (rows,), float32, of the divergences.
        expected: (rows, 2), float64: sum(p P), and the same of the second matrix.
    """
    height, width = own.shape
    half = _f(0.5)
    for r in range(height):
        maximum, reference = _f(own_norms[r, REFERENCE]), _f(other_norms[r, REFERENCE])
        normalizer, other_normalizer = _f(own_norms[r, NORMALIZER]), _f(other_norms[r, NORMALIZER])
        mean, other_mean, gradient = _f(expected[r, 0]), _f(expected[r, 1]), gradients[r]
        a, b = own[r], other[r]
        for j in range(width):
            log_p = _log_weight(a[j], maximum, normalizer)
            log_q = _log_weight(b[j], reference, other_normalizer)
            apart, _, log_share = _mixture(log_p - log_q)
            of_p = half * (log_share - (_ZERO if log_p > log_q else apart)) - mean
            of_q = half * (log_share - (apart if log_p > log_q else _ZERO)) - other_mean
            a[j] = gradient * _exp(_below(log_p, _ZERO)) * of_p
            b[j] = gradient * _exp(_below(log_q, _ZERO)) * of_q


@_summing
def expect(scores, norms, given, places, expected):
    """Add the sum of weight * gradient of each row to ``expected``.

    Args:
        scores: (rows, columns), float32; -inf where masked.
        norms: (rows, 6), float64, as ``finish_rows`` writes them.
        given: (places, columns), float32: gradients of the weights.
        places: (rows,), int64: which of these gradients a row has.
        expected: (rows,), float64.
    """
    height, width = scores.shape
    for r in range(height):
        row, of_row = scores[r], given[places[r]]
        maximum = _f(norms[r, REFERENCE])
        inverse = math.exp(-norms[r, NORMALIZER])
        total = 0.0
        for start in range(0, width, _AT_ONCE):
            part, gradient = row[start : start + _AT_ONCE], of_row[start : start + _AT_ONCE]
            some = _ZERO
            for j in range(part.shape[0]):
                some += _exp(_below(part[j], maximum)) * gradient[j]
            total += some
        expected[r] += total * inverse


@_summing
def pull_back(scores, norms, given, places, constants, slopes, first, columns, picked):
    """Replace scores by their gradients: weight * (given + constant + slope * (score - maximum)).

    Args:
        scores: (rows, columns), float32; -inf where masked.
        norms: (rows, 6), float64, as ``finish_rows`` writes them.
        given: (places, columns), float32: gradients of the weights.
        places: (rows,), int64: which of these gradients a row has.
        constants: (rows,), float32.
        slopes: (rows,), float32.
        first: the position of the first column in the matrix.
        columns: (rows, n), int64: the columns in the matrix of single weights that have additional
            gradients; -1 for none.
        picked: (rows, n), float32: these additional gradients; they are overwritten.
    """
    height, width = scores.shape
    for r in range(height):
        row, of_row = scores[r], given[places[r]]
        maximum = _f(norms[r, REFERENCE])
        inverse = _f(math.exp(-norms[r, NORMALIZER]))
        constant, slope = constants[r], slopes[r]
        for i in range(columns.shape[1]):  # before the scores are gone
            j = columns[r, i] - first
            if 0 <= j < width:
                picked[r, i] *= _exp(_below(row[j], maximum)) * inverse
        for j in range(width):
            x = _below(row[j], maximum)
            row[j] = _exp(x) * inverse * (of_row[j] + constant + slope * x)
        for i in range(columns.shape[1]):
            j = columns[r, i] - first
            if 0 <= j < width:
                row[j] += picked[r, i]
