"""Survival from noisy numbers of events and of censored records; the size of the noise is public.

Each class has 2 B cells and its number of records: 2 B + 1 counts, each with independent noise of standard
deviation s. The cells' sum is fitted to the number of records, each count by as much (least squares), which
leaves noise of covariance ``s**2 (I - 1 1' / (2 B + 1))``. Estimates are those of ``survival`` from these
cells, which may be negative, so that noise stays symmetric; results are clipped and made monotone.

Limits and test add the variances of sampling and of noise, which is linearised (delta method). This holds if
noise is small compared with the records at risk: a curve ends before the first bin at whose end fewer than
``TOO_FEW`` deviations of their noise are still at risk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightframe.metrics.noise_intervals import NORMAL

Floats = NDArray[np.float64]
TOO_FEW = 5.0
UNSEEN = 2.0
"""Least number of uncounted events that limits assume in a bin."""


@dataclass(frozen=True)
class NoisyCurve:
    """Survival after each bin that has enough records for the noise, (b,).

    Attributes:
        at_risk, events: monotone, and not negative.
        survival: S, in [0, 1], never rising.
        low, high: its limits at 95 %, for sampling and noise.
    """

    at_risk: Floats
    events: Floats
    survival: Floats
    low: Floats
    high: Floats


def fitted(cells: Floats, records: float) -> Floats:
    """Fit noisy cells to a class's noisy number of records.

    Args:
        cells: events, then censored, in each bin, (2, B).
    """
    drawn: Floats = cells + (records - cells.sum()) / (cells.size + 1)
    return drawn


def reach(cells: Floats, deviation: float) -> int:
    """Return the number of bins with enough records at their end.

    Args:
        cells: ``fitted``, (2, B).
        deviation: s.
    """
    bins = cells.shape[1]
    left = _at_risk(cells) - cells[0]
    sums = 2.0 * (bins - np.arange(bins)) - 1
    noise = deviation * np.sqrt(sums - sums**2 / (cells.size + 1))
    enough = left >= np.maximum(TOO_FEW * noise, 1.0)
    return [*enough.tolist(), False].index(False)


def kaplan_meier(cells: Floats, deviation: float) -> NoisyCurve:
    """Return the product-limit estimate with limits ``S exp(+-z sd(log S))``.

    The variance of log S is Greenwood's, with some more events in each bin than counted, as few may by chance
    be none, plus that of the noise. Both limits never rise, and are moved outwards for that.

    Args:
        cells: ``fitted``, (2, B).
        deviation: s.
    """
    bins = reach(cells, deviation)
    at_risk = _at_risk(cells)
    events, left = cells[0, :bins], at_risk[:bins] - cells[0, :bins]
    log = np.cumsum(np.log(left / at_risk[:bins]))
    likely = np.clip(events, 0.0, None) + max(deviation, UNSEEN)
    sampled = np.cumsum(likely / (left * (left + likely)))
    slopes = np.stack([_log_slopes(cells, at_risk, place) for place in range(bins)]) if bins else np.empty(0)
    noise = np.array([_variance(one[None], deviation)[0, 0] for one in slopes])
    spread = NORMAL * np.sqrt(sampled + noise)
    low, high = (np.exp(np.minimum(log + way * spread, 0.0)) for way in (-1, 1))
    return NoisyCurve(
        _falling(np.clip(at_risk[:bins], 0.0, None)),
        np.clip(events, 0.0, None),
        _falling(np.exp(np.minimum(log, 0.0))),
        np.minimum.accumulate(low),
        np.maximum.accumulate(high[::-1])[::-1],
    )


def log_rank(groups: Sequence[Floats], bins: int, deviation: float) -> float:
    """Return the log-rank statistic of G groups, chi-squared with G - 1 degrees if their curves are equal.

    It is the squared distance between observed and expected events, by the sum of their hypergeometric
    covariance and that of the noise.

    Args:
        groups: the ``fitted`` cells of each, (2, B).
        bins: number of first bins, which all groups reach; later ones are censored.
        deviation: s.
    """
    cells = np.stack(groups)
    at_risk = np.stack([_at_risk(one) for one in groups])[:, :bins]
    events = cells[:, 0, :bins]
    all_events, all_risk = events.sum(0), at_risk.sum(0)
    share = at_risk / all_risk
    gaps = (events - share * all_events).sum(1)
    # Events below zero are noise, which is rarer in the total of all groups.
    weight = np.clip(all_events, 0.0, None) * (all_risk - np.clip(all_events, 0.0, None)) / (all_risk - 1)
    covariance = np.diag((share * weight).sum(1)) - (share * weight) @ share.T
    same = np.eye(len(groups))
    for group, _ in enumerate(groups):
        slopes = np.zeros((len(groups), 2, cells.shape[2]))
        moved = np.cumsum((same[group][:, None] - share) * all_events / all_risk, axis=1)
        slopes[:, :, :bins] = -moved[:, None]
        slopes[:, :, bins:] = -moved[:, None, -1:]
        slopes[:, 0, :bins] += same[group][:, None] - share
        covariance += _variance(slopes, deviation)
    inner = np.linalg.solve(covariance[1:, 1:], gaps[1:])  # the gaps sum to 0
    return max(float(gaps[1:] @ inner), 0.0)


def _variance(slopes: Floats, deviation: float) -> Floats:
    """Return the covariance of N numbers, given their slopes in a class's cells, (N, 2, B)."""
    flat = slopes.reshape(len(slopes), -1)
    total = flat.sum(1)
    covariance: Floats = deviation**2 * (flat @ flat.T - np.outer(total, total) / (flat.shape[1] + 1))
    return covariance


def _log_slopes(cells: Floats, at_risk: Floats, place: int) -> Floats:
    """Return the slopes of log S after a bin in all cells, (2, B)."""
    steps = np.zeros((2, cells.shape[1]))
    steps[0, : place + 1] = 1 / (at_risk[: place + 1] - cells[0, : place + 1])
    steps[1, : place + 1] = 1 / at_risk[: place + 1]
    before = np.cumsum(steps[0])
    slopes = np.tile(before - np.cumsum(steps[1]), (2, 1))
    slopes[0] -= steps[0]  # records with the event in a bin are not at risk at its end
    return slopes


def _at_risk(cells: Floats) -> Floats:
    counts: Floats = cells.sum(0)
    return np.cumsum(counts[::-1])[::-1]


def _falling(values: Floats) -> Floats:
    """Return the mean of the least value so far and the largest to come, which never rises."""
    return (np.minimum.accumulate(values) + np.maximum.accumulate(values[::-1])[::-1]) / 2
