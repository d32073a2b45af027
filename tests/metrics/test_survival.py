"""Survival from bins of time, against lifelines and scipy on the records themselves.

lifelines is imported where it is used: it takes a second, and each worker collects this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import CensoredData, chi2, ecdf, logrank

from tightframe.metrics.survival import kaplan_meier, log_rank


def drawn(seed: int, records: int, bins: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    stream = np.random.default_rng(seed)
    times = np.clip(np.ceil(stream.exponential(scale, records)), 1, bins).astype(int)
    return times, stream.random(records) < 0.6


def counts(times: np.ndarray, events: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    made = [np.bincount(times[chosen] - 1, minlength=bins) for chosen in (events, ~events)]
    return made[0], made[1]


def censored(times: np.ndarray, events: np.ndarray) -> CensoredData:
    return CensoredData(uncensored=times[events], right=times[~events])


def test_the_curve_is_scipys() -> None:
    times, events = drawn(1, 200, 12, 6.0)
    found = kaplan_meier(*counts(times, events, 12))
    sf = ecdf(censored(times, events)).sf
    at = np.arange(1, 13)
    np.testing.assert_allclose(found.survival, sf.evaluate(at))
    limits = sf.confidence_interval(method="log-log")
    told = np.isin(at, sf.quantiles) & ~np.isnan(found.low)
    places = np.searchsorted(sf.quantiles, at[told])
    np.testing.assert_allclose(found.low[told], limits.low.probabilities[places])
    np.testing.assert_allclose(found.high[told], limits.high.probabilities[places])
    np.testing.assert_array_equal(found.at_risk, [(times >= time).sum() for time in at])


def test_curve_limits_and_test_of_three_groups_are_those_of_lifelines() -> None:
    """Both limits are of log(-log S), by Greenwood's variance; the third group is small."""
    from lifelines import KaplanMeierFitter
    from lifelines.statistics import multivariate_logrank_test

    parts = [drawn(11, 200, 12, 6.0), drawn(12, 150, 12, 4.0), drawn(13, 9, 12, 5.0)]
    for times, events in parts:
        found, theirs = kaplan_meier(*counts(times, events, 12)), KaplanMeierFitter().fit(times, events)
        at = np.arange(1, times.max() + 1)
        told = found.survival[: len(at)]
        np.testing.assert_allclose(told, theirs.survival_function_at_times(at), atol=1e-12)
        limits = theirs.confidence_interval_survival_function_.loc[np.unique(times)].to_numpy()
        places, inside = np.unique(times) - 1, (told > 0) & (told < 1)
        chosen = inside[places]
        np.testing.assert_allclose(found.low[places[chosen]], limits[chosen, 0])
        np.testing.assert_allclose(found.high[places[chosen]], limits[chosen, 1])
    groups = np.stack([np.stack(counts(*part, 12)) for part in parts])
    statistic, degrees = log_rank(groups[:, 0], groups[:, 1])
    times, events = (np.concatenate(column) for column in zip(*parts, strict=True))
    wanted = multivariate_logrank_test(times, np.repeat([0, 1, 2], [200, 150, 9]), events)
    assert degrees == 2 and statistic == pytest.approx(wanted.test_statistic)
    assert chi2.sf(statistic, degrees) == pytest.approx(wanted.p_value)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (drawn(2, 150, 12, 6.0), drawn(3, 90, 12, 4.0)),
        (drawn(2, 150, 12, 6.0), drawn(3, 90, 12, 7.0)),
        (drawn(5, 990, 12, 6.0), drawn(6, 10, 12, 6.0)),  # of ninety-nine and one
    ],
)
def test_the_test_of_equal_curves_is_scipys_with_one_degree(one: Any, two: Any) -> None:
    groups = [np.stack(part) for part in zip(counts(*one, 12), counts(*two, 12), strict=True)]
    statistic, degrees = log_rank(groups[0], groups[1])
    wanted = logrank(censored(*one), censored(*two))
    assert degrees == 1 and statistic == pytest.approx(wanted.statistic**2)
    assert chi2.sf(statistic, 1) == pytest.approx(wanted.pvalue)


def test_more_groups_that_are_the_same_do_not_differ() -> None:
    same = np.stack([counts(*drawn(4, 80, 6, 3.0), 6)] * 3)
    statistic, degrees = log_rank(same[:, 0], same[:, 1])
    assert statistic == pytest.approx(0, abs=1e-9) and degrees == 2


def test_a_tiny_third_group_has_its_degree_and_an_empty_one_has_none() -> None:
    """By two groups and their 2 x 2 covariance, summed bin by bin."""
    parts = [drawn(7, 300_000, 8, 4.0), drawn(8, 200_000, 8, 4.0), (np.array([2]), np.array([True]))]
    groups = np.stack([counts(*part, 8) for part in parts] + [np.zeros((2, 8), int)])
    gaps, spread = np.zeros(2), np.zeros((2, 2))
    for time in range(8):
        risk = groups[:, :, time:].sum((1, 2)).astype(float)
        dead = groups[:, 0, time].astype(float)
        n, d = risk.sum(), dead.sum()
        gaps += dead[1:3] - d * risk[1:3] / n
        scale = d * (n - d) / (n - 1) / n**2
        spread += scale * (n * np.diag(risk[1:3]) - np.outer(risk[1:3], risk[1:3]))
    (a, b), (_, c) = spread
    wanted = (c * gaps[0] ** 2 - 2 * b * gaps[0] * gaps[1] + a * gaps[1] ** 2) / (a * c - b * b)
    statistic, degrees = log_rank(groups[:, 0], groups[:, 1])
    assert degrees == 2 and statistic == pytest.approx(wanted)


def test_nothing_to_compare_has_no_degree() -> None:
    alone = np.stack([counts(*drawn(9, 20, 6, 3.0), 6), np.zeros((2, 6), int)])
    assert log_rank(alone[:, 0], alone[:, 1]) == (0.0, 0)
