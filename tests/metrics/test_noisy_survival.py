"""Survival from noisy bins of time: against lifelines, and how often limits and test hold."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

from tightframe.metrics import noisy_survival
from tightframe.privacy.releases.table_statistics import GRID, StatisticsConfig

BINS = 4


def drawn(stream: np.random.Generator, records: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Times in bins, 1 to ``BINS``, and whether they end with the event."""
    times, leaves = (np.ceil(stream.exponential(mean, records)) for mean in (scale, 5.0))
    return np.minimum(np.minimum(times, leaves), BINS).astype(int), (times <= leaves) & (times <= BINS)


def cells(times: np.ndarray, events: np.ndarray) -> np.ndarray:
    made = [np.bincount(times[chosen] - 1, minlength=BINS) for chosen in (events, ~events)]
    return np.stack(made).astype(float)


def test_with_next_to_no_noise_it_is_that_of_lifelines() -> None:
    from lifelines import KaplanMeierFitter
    from lifelines.statistics import multivariate_logrank_test

    stream = np.random.default_rng(1)
    parts = [drawn(stream, records, scale) for records, scale in ((300, 4.0), (200, 3.0), (90, 5.0))]
    groups = []
    for times, events in parts:
        noisy = cells(times, events) + stream.normal(0, 1e-7, (2, BINS))
        groups.append(noisy_survival.fitted(noisy, len(times)))
        found = noisy_survival.kaplan_meier(groups[-1], 1e-7)
        theirs = KaplanMeierFitter().fit(times, events)
        np.testing.assert_allclose(
            found.survival, theirs.survival_function_at_times(range(1, BINS + 1)), atol=1e-6
        )
        np.testing.assert_allclose(found.at_risk, theirs.event_table["at_risk"].iloc[1:], atol=1e-6)
        limits = theirs.confidence_interval_survival_function_.loc[1:].to_numpy()
        assert (found.high - found.low >= limits[:, 1] - limits[:, 0]).all()
        assert (found.high - found.low <= 1.4 * (limits[:, 1] - limits[:, 0])).all()
    times, events = (np.concatenate(column) for column in zip(*parts, strict=True))
    wanted = multivariate_logrank_test(times, np.repeat([0, 1, 2], [300, 200, 90]), events)
    assert noisy_survival.log_rank(groups, BINS, 1e-7) == pytest.approx(wanted.test_statistic, rel=1e-5)


@pytest.mark.parametrize(
    ("records", "multiplier", "scale"),
    [(150, 0.2, 4.0), (400, 2.5, 4.0), (400, 2.5, 200.0), (300, 0.01, 200.0)],
    ids=["sampling", "noise", "rare", "rare-exact"],
)
def test_limits_and_test_hold_as_often_as_they_say(records: int, multiplier: float, scale: float) -> None:
    """Four hundred releases of as many cohorts, with the noise that silos draw; two classes of one curve."""
    config = StatisticsConfig(multiplier, columns=5, numbers=2)
    deviation, stream = config.deviation(silos=1, honest=1), np.random.default_rng(2)
    releases, shape = 400, (2, 2 * BINS + 1)
    noise = config.share((releases, *shape), 1).astype(float) / GRID
    assert noise.std() == pytest.approx(deviation, rel=0.05)
    truth = np.exp(-np.arange(1, BINS + 1) / scale)
    held, told, rejected, tested = np.zeros(BINS), np.zeros(BINS), 0, 0
    for share in noise:
        groups = []
        for number, own in zip((records, records // 2), share, strict=True):
            exact = cells(*drawn(stream, number, scale))
            groups.append(noisy_survival.fitted(exact + own[1:].reshape(2, BINS), number + own[0]))
        found = noisy_survival.kaplan_meier(groups[0], deviation)
        bins = len(found.survival)
        for falling in (found.survival, found.low, found.high, found.at_risk):
            assert (np.diff(falling) <= 1e-12).all() and (falling >= 0).all()
        assert (found.low <= found.survival).all() and (found.survival <= found.high).all()
        assert found.high.max(initial=0) <= 1 and (found.events >= 0).all()
        held[:bins] += (found.low <= truth[:bins]) & (truth[:bins] <= found.high)
        told[:bins] += 1
        if shared := min(noisy_survival.reach(group, deviation) for group in groups):
            rejected += chi2.sf(noisy_survival.log_rank(groups, shared, deviation), 1) < 0.05
            tested += 1
    assert told.min() > 0.9 * releases and tested > 0.9 * releases
    # Four hundred draws of 95 % have a deviation of 1.1 points.
    assert (held / told >= 0.93).all(), held / told
    assert rejected / tested <= 0.08, rejected / tested


def test_of_other_curves_the_test_says_so_and_where_noise_is_large_nothing_is_told() -> None:
    stream, deviation = np.random.default_rng(3), 6.0
    exact = [cells(*drawn(stream, 600, scale)) for scale in (6.0, 2.5)]
    groups = [
        noisy_survival.fitted(one + stream.normal(0, deviation, one.shape), one.sum() + deviation)
        for one in exact
    ]
    shared = min(noisy_survival.reach(group, deviation) for group in groups)
    assert shared >= 2 and chi2.sf(noisy_survival.log_rank(groups, shared, deviation), 1) < 1e-6
    assert len(noisy_survival.kaplan_meier(groups[0], 500.0).survival) == 0
