"""Survival from numbers of events and of censored records in bins of time: sums over records.

All times of a bin count as its end. A record that is censored in a bin is at risk in it, as with tied times.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Curve:
    """Survival after each bin.

    Attributes:
        at_risk: records at the beginning of each bin, (B,).
        survival: S, (B,); NaN once no record is at risk.
        low, high: its limits at ``LEVEL``, by Greenwood's variance of ``log(-log S)``; NaN where S is 0 or 1.
    """

    at_risk: Floats
    survival: Floats
    low: Floats
    high: Floats


def kaplan_meier(events: NDArray[np.int64], censored: NDArray[np.int64]) -> Curve:
    """Return the product-limit estimate ``S_b = prod_(i <= b) (1 - d_i / n_i)``.

    Source: Kaplan and Meier, Nonparametric Estimation from Incomplete Observations, JASA 53, 1958.

    Args:
        events: d, of each bin, (B,).
        censored: likewise.

    >>> kaplan_meier(np.array([1, 1]), np.array([1, 1])).survival.tolist()
    [0.75, 0.375]
    """
    at_risk = _from_end(events + censored)
    with np.errstate(divide="ignore", invalid="ignore"):
        survival = np.cumprod(1 - events / at_risk)
        spread = np.sqrt(np.cumsum(events / (at_risk * (at_risk - events)))) / np.log(survival)
        reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * np.abs(spread)
        low, high = survival ** np.exp(reach), survival ** np.exp(-reach)
    inside = (survival > 0) & (survival < 1)
    limits: tuple[Floats, Floats] = np.where(inside, low, np.nan), np.where(inside, high, np.nan)
    return Curve(at_risk, np.asarray(survival, np.float64), *limits)


def log_rank(events: NDArray[np.int64], censored: NDArray[np.int64]) -> tuple[float, int]:
    """Return the log-rank statistic of G groups and its degrees of freedom.

    The degrees are one less than the groups that share a bin of events with others; 0 if there are none.
    The statistic is the squared distance between observed and expected events, by their hypergeometric
    covariance.
    Source: Peto and Peto, Asymptotically Efficient Rank Invariant Test Procedures, JRSS A 135, 1972.

    Args:
        events: of each group and bin, (G, B).
        censored: likewise.
    """
    at_risk = np.stack([_from_end(row) for row in events + censored])
    all_events, all_risk = events.sum(0), at_risk.sum(0)
    share = np.divide(at_risk, all_risk, out=np.zeros(at_risk.shape), where=all_risk > 0)
    gaps = (events - share * all_events).sum(1)
    rest = np.divide(all_risk - all_events, all_risk - 1, out=np.zeros(all_risk.shape), where=all_risk > 1)
    weight = all_events * rest
    variance = (share * (1 - share) * weight).sum(1)
    compared = np.flatnonzero(variance > 0)
    if not len(compared):
        return 0.0, 0
    others = compared[compared != np.argmax(variance)]  # the gaps sum to 0, so one is redundant
    covariance = np.diag((share * weight).sum(1)) - (share * weight) @ share.T
    inner = np.linalg.solve(covariance[np.ix_(others, others)], gaps[others])
    return max(float(gaps[others] @ inner), 0.0), len(others)


def _from_end(counts: NDArray[np.int64]) -> Floats:
    return np.cumsum(counts[::-1])[::-1].astype(np.float64)
