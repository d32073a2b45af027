"""Clinical reading of one class's score histogram: calibration, operating points, net benefit.

A histogram counts the one-vs-rest scores of a class in B equal bins of [0, 1], separately for its own records
(positives) and all others (negatives). From it follow

- **exactly**: sensitivity and specificity of the rule ``score >= k / B`` at each edge k, and functions of
  them: predictive values at a stated prevalence, and net benefit at threshold ``k / B``;
- **up to the scores' positions in their bins**: Brier score, calibration error, and the best values at a
  threshold between two edges. These are returned as lower and upper bounds, which hold for all scores with
  this histogram, and never as a single value between them.

A record of bin b has a score in ``[b / B, (b + 1) / B]``.

Intervals. For exact counts they are Wilson's (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927), for the sampling
of test records. For noisy counts they are Fieller's, for the noise alone (``noise_intervals``). A function of
several proportions has its limits at the corners of their box, each proportion at the level to the power of
one over their number, so that together they hold at the level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tightframe.metrics import noise_intervals

Floats = NDArray[np.float64]
LEVEL = 0.95
COUNT_FLOOR = 20.0
"""Least noisy number of a class's own records, and of others, for a reading."""
DEVIATIONS = 3.0
"""Least count for a reading, in standard deviations of its noise."""


def class_floor(cell: float, classes: int) -> float:
    """Return the least noisy number of a class's records for a reading of its scores.

    Args:
        cell: standard deviation of the noise in each of the ``classes`` cells that the number sums.
    """
    return max(COUNT_FLOOR, DEVIATIONS * cell * math.sqrt(classes))


_RECORDS_LEVEL, _SUM_LEVEL = 0.97, 0.98
"""Levels of a noisy number of records and of a noisy sum, which together make ``LEVEL``."""


@dataclass(frozen=True)
class Scores:
    """Score histogram of one class.

    Attributes:
        positives: counts (B,) of the class's own records, by their score.
        negatives: counts (B,) of all others.
        noise: standard deviation of the noise in each count; None if counts are exact.
        records: limits of the number of all records, if counts are noisy.

    Raises:
        ValueError: if the shapes differ, or only one of noise and limits of records is given.
    """

    positives: Floats
    negatives: Floats
    noise: float | None = None
    records: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("positives", "negatives"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        if self.positives.ndim != 1 or self.positives.shape != self.negatives.shape:
            raise ValueError(
                "Expected arguments `positives` and `negatives` of one shape (B,), but got "
                f"{self.positives.shape} and {self.negatives.shape}."
            )
        if not self.positives.size:
            raise ValueError("Expected at least one bin, but got none.")
        if (self.noise is None) != (self.records is None):
            raise ValueError("Expected arguments `noise` and `records` both or neither, but got one of them.")

    @property
    def bins(self) -> int:
        """B."""
        return len(self.positives)

    @property
    def edges(self) -> Floats:
        """Edges of the bins, (B + 1,), as thresholds; at the last one no record is positive."""
        return np.arange(self.bins + 1) / self.bins

    @property
    def told(self) -> bool:
        """True if there are enough positives and negatives for their noise."""
        least = 1.0
        if self.noise is not None:
            least = max(COUNT_FLOOR, DEVIATIONS * self.noise * math.sqrt(self.bins))
        return bool(self.positives.sum() >= least and self.negatives.sum() >= least)

    @property
    def prevalence(self) -> float:
        """Share of positives among the records; NaN without records."""
        total = float(self.positives.sum() + self.negatives.sum())
        return float(self.positives.sum()) / total if total > 0 else math.nan


@dataclass(frozen=True)
class Share:
    """A proportion, or a function of several, with its interval.

    Attributes:
        value: from the counts.
        low, high: limits of the interval.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """The rule that a record is positive whose score is at least ``threshold``.

    Attributes:
        threshold: an edge of the bins, ``edge / B``; at 1 no record is positive.
        edge: its number, from 0 to B.
        sensitivity: share of the positives at or above the threshold.
        specificity: share of the negatives below it.
        reachable: upper bound of the value that was *not* set, at a threshold between this edge and the next
            and over all scores in the bin; the value at the edge is the lower bound. None if counts are
            noisy.
    """

    threshold: float
    edge: int
    sensitivity: Share
    specificity: Share
    reachable: float | None = None


@dataclass(frozen=True)
class CalibrationBin:
    """One bin of a calibration curve.

    Attributes:
        low: least score of its records.
        high: largest score of its records.
        records: number of them (noisy, and possibly below 0, with noise).
        share: of positives among them; None if there are no records, or noise hides them.
    """

    low: float
    high: float
    records: float
    share: Share | None


def wilson(part: float, whole: float, level: float = LEVEL) -> Share:
    """Return a proportion of exact counts with Wilson's interval.

    ``(p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)``.

    Raises:
        ValueError: unless ``0 <= part <= whole`` and there is a record.

    >>> share = wilson(9, 10)
    >>> round(share.low, 4), round(share.high, 4)
    (0.5958, 0.9821)
    """
    if not 0 <= part <= whole or whole <= 0:
        raise ValueError(f"Expected a part of at least one record, but got {part:g} of {whole:g}.")
    share, square = part / whole, _normal(level) ** 2
    middle = share + square / (2 * whole)
    reach = math.sqrt(square * (share * (1 - share) / whole + square / (4 * whole**2)))
    scale = 1 + square / whole
    # For 0 or all records one limit is the share itself, which rounding must not move.
    low = 0.0 if part == 0 else (middle - reach) / scale
    high = 1.0 if part == whole else (middle + reach) / scale
    return Share(share, max(0.0, low), min(1.0, high))


def calibration(scores: Scores, level: float = LEVEL) -> list[CalibrationBin]:
    """Return the calibration curve: the share of positives among the records of each bin.

    Scores are known up to their bin; a share outside the bin is a deviation that no scores within it explain.
    """
    curve = []
    for index, (part, rest) in enumerate(zip(scores.positives, scores.negatives, strict=True)):
        low, high = scores.edges[index : index + 2].tolist()
        curve.append(
            CalibrationBin(low, high, float(part + rest), _share(part, rest, scores.noise, 1, 1, level))
        )
    return curve


def brier(scores: Scores) -> tuple[float, float]:
    """Return bounds of the class's Brier score ``mean((score - y)^2)``, y being 1 for positives, else 0.

    For exact counts both bounds are attained, with all scores at one end of their bins. For noisy counts they
    also include the noise, at ``LEVEL``. (G. W. Brier, Mon. Weather Rev. 78, 1950.)

    >>> brier(Scores(np.array([0, 3]), np.array([1, 0])))
    (0.0, 0.25)
    """
    low, high = scores.edges[:-1], scores.edges[1:]
    least = _weighted(scores, (1 - high) ** 2, low**2)
    most = _weighted(scores, (1 - low) ** 2, high**2)
    return _cut(least[0], most[1])


def mean_score(scores: Scores) -> tuple[float, float]:
    """Return bounds of the mean score of all records, to compare with the share of positives."""
    low, high = scores.edges[:-1], scores.edges[1:]
    return _cut(_weighted(scores, low, low)[0], _weighted(scores, high, high)[1])


def calibration_error(scores: Scores) -> tuple[float, float]:
    """Return bounds of the expected calibration error in the histogram's own bins.

    ``ECE = sum_b n_b / n |positives_b / n_b - mean score of bin b|``. The mean score is known up to the bin:
    the lower bound has it at the bin's nearest point to the share, the upper bound at the farther end. For
    noisy counts each summand ``|(1 - m) positives_b - m negatives_b|`` is off by at most the noise of that
    difference, and the sum by their sum, whose 98 % quantile is subtracted and added, so that the bounds hold
    at ``LEVEL`` whatever the noise. With few records in a bin ECE is too large even for a calibrated model.
    (M. P. Naeini et al., AAAI 2015.)

    >>> calibration_error(Scores(np.array([0, 4]), np.array([4, 0])))
    (0.0, 0.5)
    """
    low, high = scores.edges[:-1], scores.edges[1:]
    total = scores.positives + scores.negatives
    # |share - m| n_b = |positives - m n_b|, zero where m can be the share.
    below, above = scores.positives - low * total, scores.positives - high * total
    farthest = np.maximum(np.abs(below), np.abs(above))
    inside = below * above <= 0
    nearest = np.where(inside, 0.0, np.minimum(np.abs(below), np.abs(above)))
    off = 0.0
    if scores.noise is not None:
        off = scores.noise * _unit_error(scores.bins)
    fewest, most = _records(scores)
    return _cut(_over(float(nearest.sum()) - off, most), _over(float(farthest.sum()) + off, fewest))


def point_at(scores: Scores, edge: int, level: float = LEVEL) -> Point | None:
    """Return the rule at an edge of the bins; None if noise hides its sensitivity or specificity."""
    positives, negatives, bins = scores.positives, scores.negatives, scores.bins
    above, below = bins - edge, edge
    sensitivity = _share(positives[edge:].sum(), positives[:edge].sum(), scores.noise, above, below, level)
    specificity = _share(negatives[:edge].sum(), negatives[edge:].sum(), scores.noise, below, above, level)
    if sensitivity is None or specificity is None:
        return None
    return Point(edge / bins, edge, sensitivity, specificity)


def at_specificity(scores: Scores, least: float, level: float = LEVEL) -> Point | None:
    """Return the rule at the lowest edge from which on specificity is at least ``least``.

    Its sensitivity is a lower bound of the best one at that specificity; ``Point.reachable``, for thresholds
    within the bin below, is an upper bound.

    Args:
        scores: of a class.
        least: specificity, in [0, 1].

    Returns:
        None for a class without positives or negatives, or with too much noise.

    Raises:
        ValueError: unless ``least`` is a share.
    """
    _check_share("least", least)
    if not scores.told:
        return None
    enough = _reaches(np.concatenate([[0.0], np.cumsum(scores.negatives)]), least, scores.noise)
    # With noise the counts need not rise: from this edge on all suffice, as the last one always does.
    edge = scores.bins + 1 - int(np.argmin(np.append(enough[::-1], False)))
    point = point_at(scores, edge, level)
    if point is None or scores.noise is not None:
        return point
    reachable = float(scores.positives[max(edge - 1, 0) :].sum() / scores.positives.sum())
    return Point(point.threshold, edge, point.sensitivity, point.specificity, reachable)


def at_sensitivity(scores: Scores, least: float, level: float = LEVEL) -> Point | None:
    """Return the rule at the highest edge up to which sensitivity is at least ``least``.

    Its specificity is a lower bound of the best one, ``Point.reachable`` an upper bound; see
    ``at_specificity``.
    """
    turned = at_specificity(
        Scores(scores.negatives[::-1], scores.positives[::-1], scores.noise, scores.records), least, level
    )
    if turned is None:
        return None
    edge = scores.bins - turned.edge
    return Point(edge / scores.bins, edge, turned.specificity, turned.sensitivity, turned.reachable)


def predictive_values(
    scores: Scores, edge: int, prevalence: float, level: float = LEVEL
) -> tuple[Share, Share] | None:
    """Return PPV and NPV of the rule at an edge, in a population with this prevalence.

    ``PPV = se pi / (se pi + (1 - sp) (1 - pi))``, ``NPV = sp (1 - pi) / (sp (1 - pi) + (1 - se) pi)``
    (Bayes). PPV is NaN without positive calls, NPV without negative ones. Intervals are for sensitivity and
    specificity; the prevalence is taken as exact.

    Raises:
        ValueError: unless the prevalence is above 0 and below 1.
    """
    if not 0 < prevalence < 1:
        raise ValueError(f"Expected argument `prevalence` above 0 and below 1, but got {prevalence}.")
    point = point_at(scores, edge, _single_level(level, 2))
    if point is None:
        return None
    se, sp = point.sensitivity, point.specificity

    def ppv(sensitivity: float, specificity: float) -> float:
        hits = sensitivity * prevalence
        return _over(hits, hits + (1 - specificity) * (1 - prevalence))

    def npv(sensitivity: float, specificity: float) -> float:
        clear = specificity * (1 - prevalence)
        return _over(clear, clear + (1 - sensitivity) * prevalence)

    values = []
    for value in (ppv, npv):
        low, high = value(se.low, sp.low), value(se.high, sp.high)
        # A corner without such calls gives no limit.
        values.append(
            Share(
                value(se.value, sp.value),
                0.0 if math.isnan(low) else low,
                1.0 if math.isnan(high) else high,
            )
        )
    return values[0], values[1]


def net_benefit(
    scores: Scores, edge: int, prevalence: float | None = None, level: float = LEVEL
) -> Share | None:
    """Return the net benefit of treating all people with a score of at least ``t = edge / B``.

    ``NB = se pi - (1 - sp) (1 - pi) t / (1 - t)`` (A. J. Vickers, E. B. Elkin, Med. Decis. Making 26, 2006),
    in net true positives per person; with pi as in the test records it is ``TP / n - FP / n t / (1 - t)``.
    The same t is the score's threshold and sets the odds at which harm is weighed, so the score is taken as a
    probability.

    Args:
        scores: of a class.
        edge: from 0 to B - 1.
        prevalence: pi; by default that of the test records, then with its interval.

    Raises:
        ValueError: for the last edge, where t / (1 - t) is infinite.
    """
    if not 0 <= edge < scores.bins:
        raise ValueError(f"Expected argument `edge` from 0 to {scores.bins - 1}, but got {edge}.")
    single = _single_level(level, 2 if prevalence is not None else 3)
    point, pi = point_at(scores, edge, single), _prevalence(scores, prevalence, single)
    if point is None or pi is None:
        return None
    odds = point.threshold / (1 - point.threshold)

    def benefit(sensitivity: float, specificity: float, share: float) -> float:
        return sensitivity * share - (1 - specificity) * (1 - share) * odds

    se, sp = point.sensitivity, point.specificity
    # The benefit grows with each of the three.
    return Share(
        benefit(se.value, sp.value, pi.value),
        benefit(se.low, sp.low, pi.low),
        benefit(se.high, sp.high, pi.high),
    )


def treat_all(prevalence: float, threshold: float) -> float:
    """Return the net benefit of treating everybody: ``pi - (1 - pi) t / (1 - t)``.

    >>> round(treat_all(0.25, 0.2), 4)
    0.0625
    """
    return prevalence - (1 - prevalence) * threshold / (1 - threshold)


def _prevalence(scores: Scores, stated: float | None, level: float) -> Share | None:
    if stated is not None:
        return Share(stated, stated, stated)
    positives, negatives = float(scores.positives.sum()), float(scores.negatives.sum())
    return _share(positives, negatives, scores.noise, scores.bins, scores.bins, level)


def _share(
    part: float, rest: float, noise: float | None, part_cells: int, rest_cells: int, level: float
) -> Share | None:
    """Return ``part / (part + rest)`` of sums over some cells of a histogram."""
    if noise is None:
        return wilson(float(part), float(part + rest), level) if part + rest > 0 else None
    low, high = noise_intervals.share(
        np.array([part], np.float64),
        np.array([rest], np.float64),
        noise * math.sqrt(part_cells),
        noise * math.sqrt(rest_cells),
        _normal(level),
    )
    if not math.isfinite(low[0]) or part + rest <= 0:
        return None
    ends = noise_intervals.cut(float(low[0]), float(high[0]))
    return Share(min(max(float(part / (part + rest)), 0.0), 1.0), *ends)


@lru_cache(maxsize=8)
def _unit_error(bins: int) -> float:
    """Return a bound on how far noise of standard deviation 1 moves the sum of ``calibration_error``."""
    own, other = np.random.default_rng(noise_intervals.SEED).normal(size=(2, noise_intervals.DRAWS, bins))
    edges = np.arange(bins + 1) / bins
    # |(1 - m) own - m other| is convex in m, so within a bin it is largest at an end.
    ends = [np.abs((1 - end) * own - end * other) for end in (edges[:-1], edges[1:])]
    return float(np.quantile(np.maximum(*ends).sum(1), _SUM_LEVEL))


def _reaches(rising: Floats, least: float, noise: float | None) -> NDArray[np.bool_]:
    """Check at each edge whether the share of a cumulative count is at least ``least``.

    Exact counts are compared as integers, so that 9 of 10 is at least 0.9.
    """
    wanted = least * rising[-1]
    enough: NDArray[np.bool_] = rising >= (wanted if noise is not None else math.ceil(wanted - 1e-9))
    return enough


def _weighted(scores: Scores, own: Floats, other: Floats) -> tuple[float, float]:
    """Return limits of the mean over records of a weight by bin, equal if counts are exact."""
    total = float((scores.positives * own).sum() + (scores.negatives * other).sum())
    off = 0.0
    if scores.noise is not None:
        off = _normal(_SUM_LEVEL) * scores.noise * math.sqrt(float((own**2).sum() + (other**2).sum()))
    fewest, most = _records(scores)
    return _over(total - off, most), _over(total + off, fewest)


def _records(scores: Scores) -> tuple[float, float]:
    if scores.records is not None:
        return scores.records
    total = float(scores.positives.sum() + scores.negatives.sum())
    return total, total


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _cut(low: float, high: float) -> tuple[float, float]:
    if math.isnan(low) or math.isnan(high):
        return math.nan, math.nan
    return noise_intervals.cut(low, high)


def _single_level(level: float, number: int) -> float:
    return float(level ** (1 / number))


def _normal(level: float) -> float:
    """Return the two-sided quantile of the normal distribution."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"Expected argument `{name}` from 0 to 1, but got {value}.")
