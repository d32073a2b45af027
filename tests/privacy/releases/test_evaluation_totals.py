"""Noisy evaluations: what one record changes, by trying all; the noise of a total; audits with controls.

Of the noise and its chances see ``test_class_sums_audit``.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from tests.support.audit import Bounds, gaussian_epsilon, lower_bounds

from tightframe import metrics
from tightframe.errors import ContributionError
from tightframe.privacy import accounting
from tightframe.privacy.events import PrivacyValueError
from tightframe.privacy.releases import evaluation_totals
from tightframe.privacy.releases.evaluation_totals import (
    EvaluationConfig,
    noise_for,
    term_bound,
)

TRIALS, DELTA = 20_000, 0.01
CONFIG = EvaluationConfig(noise_multiplier=1.0, num_classes=2)


def _vector(
    labels: NDArray[np.int64], predictions: NDArray[np.int64], scores: NDArray[np.float64], bins: int
) -> NDArray[np.int64]:
    """What is released of these records, before its noise, as one vector of integers."""
    config = EvaluationConfig(1.0, scores.shape[1])
    confusion = metrics.confusion_matrix(labels, predictions, scores.shape[1])
    histogram = metrics.score_histogram(scores, labels, bins)
    cells = evaluation_totals.in_units(confusion, config.confusion_units).ravel()
    return np.concatenate([cells, evaluation_totals.in_units(histogram, config.score_units).ravel()])


@pytest.mark.parametrize(("classes", "bins"), [(2, 5), (3, 3)])
def test_every_record_there_can_be_changes_the_vector_by_exactly_the_sensitivity(
    classes: int, bins: int
) -> None:
    places = (np.arange(bins) + 0.5) / bins
    every = list(itertools.product(range(classes), range(classes), *[places] * classes))
    labels, predictions = (np.array([record[i] for record in every]) for i in (0, 1))
    scores = np.array([record[2:] for record in every])
    whole = _vector(labels, predictions, scores, bins)
    squared = EvaluationConfig(1.0, classes).squared_sensitivity
    for place in range(len(every)):
        less = np.arange(len(every)) != place
        change = whole - _vector(labels[less], predictions[less], scores[less], bins)
        assert sum(int(value) ** 2 for value in change) == squared
        assert np.count_nonzero(change) == 1 + classes


@pytest.mark.parametrize("classes", [1, 2, 3, 8, 10, 700])
def test_weighted_histograms_cost_no_more_than_the_confusion_matrix(classes: int) -> None:
    config = EvaluationConfig(1.0, classes)
    cell, both = config.confusion_units**2, config.squared_sensitivity
    assert 1.99 * cell < both <= 2 * cell
    # Without weights the noise of a cell would be sqrt(1 + C).
    assert config.deviation(silos=1, honest=1) == pytest.approx(2**0.5, rel=3e-3)


@pytest.mark.parametrize(("silos", "lost"), [(6, 0), (6, 1), (6, 2)])
def test_the_total_has_the_promised_variance_with_all_silos_and_with_drop_outs(
    silos: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # c = 1, t = 5, so that any 4 silos carry the promise.
    honest, present, config = 4, silos - lost, EvaluationConfig(2.0, 8)
    promised = 4 * config.squared_sensitivity
    shape = (8, 8)

    def carried() -> float:
        total = sum(noise_for((60, *shape), config, honest).astype(np.float64) for _ in range(present))
        return float((np.asarray(total) ** 2).sum()) / promised

    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], 60 * 64)
    found = carried()
    assert low < found / (present / honest) < high
    assert found > low, "less than was promised"
    assert config.deviation(silos=present, honest=honest) == pytest.approx(
        (promised * present / honest) ** 0.5 / config.confusion_units
    )
    half = config.share_variance(honest) // 4
    monkeypatch.setattr(EvaluationConfig, "share_variance", lambda config, honest: half)
    assert carried() / (present / honest) < low


def _audit(*, honest: int, shares: int) -> Bounds:
    """Runs with and without a canary among 30 records, scored by the best test there is."""
    stream = np.random.default_rng(0)
    labels, predictions = stream.integers(2, size=31), stream.integers(2, size=31)
    scores = stream.uniform(size=(31, 2))
    present = _vector(labels, predictions, scores, 2)
    absent = _vector(labels[:30], predictions[:30], scores[:30], 2)
    # Integers that the canary does not touch have no part in the best test's score.
    touched = np.flatnonzero(present - absent)
    direction = (present - absent)[touched].astype(np.float64)

    def runs(sums: NDArray[np.int64]) -> NDArray[np.float64]:
        noise = sum(noise_for((TRIALS, touched.size), CONFIG, honest) for _ in range(shares))
        found: NDArray[np.float64] = ((sums - absent)[touched] + noise).astype(np.float64) @ direction
        return found

    return lower_bounds(runs(absent), runs(present), delta=DELTA)


def test_a_canary_record_and_half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon = gaussian_epsilon(1.0, DELTA)
    assert accounting.epsilons(CONFIG.events(1), DELTA, prv=False).exact == pytest.approx(epsilon)
    found = _audit(honest=1, shares=1)
    assert 0.75 < found.mu <= 1.0
    assert found.epsilon <= epsilon
    quarter = CONFIG.share_variance(1) // 4
    monkeypatch.setattr(EvaluationConfig, "share_variance", lambda config, honest: quarter)
    caught = _audit(honest=1, shares=1)
    assert caught.mu > 1.5
    assert caught.epsilon > epsilon


@pytest.mark.whole
def test_the_shares_of_the_least_silos_and_one_of_them_alone() -> None:
    together = _audit(honest=2, shares=2)
    assert together.mu <= 1.0
    assert together.epsilon <= gaussian_epsilon(1.0, DELTA)
    # The control: one of two shares is not what was promised, but what a site records beside it.
    alone = CONFIG.lone_event(2)
    assert alone is not None and alone.noise_multiplier == pytest.approx(0.5**0.5)
    assert 1.0 < _audit(honest=2, shares=1).mu <= 2**0.5
    assert CONFIG.lone_event(1) is None


def test_integers_survive_the_numbers_of_a_field() -> None:
    bound = term_bound(CONFIG, 2**24, 250)
    largest = round(bound * evaluation_totals.GRID)
    units = np.array([[0, 1, -1], [largest, -largest, 12345]])
    assert (CONFIG.as_units(CONFIG.as_numbers(units)) == units).all()
    assert largest * 250 < 2**53
    with pytest.raises(ContributionError, match="TF-404"):
        term_bound(EvaluationConfig(1e9, 2), 2**24, 250)


@pytest.mark.parametrize(("noise", "classes"), [(0.0, 2), (float("nan"), 2), (1.0, 0), (1.0, True)])
def test_values_that_make_no_sense(noise: float, classes: int) -> None:
    with pytest.raises(PrivacyValueError, match="TF-700"):
        EvaluationConfig(noise, classes)
