"""Audits of the real release code, each with a control in which the promise is broken.

Noise is what the test's name says (``tests/support/randomness.py``). With other noise a right release fails
an audit about once in a hundred thousand runs: both of its bounds, of 99.9 % and more each, would have to be
wrong at once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from tests.support.audit import (
    Bounds,
    clopper_pearson,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    lower_bounds,
)

from tightframe.privacy import accounting
from tightframe.privacy.events import Gaussian
from tightframe.privacy.releases import class_sums
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig

TRIALS = 20_000
DELTA = 0.01
CONFIG = ClassSumsConfig(noise_multiplier=1.0)


def _audit(
    present: torch.Tensor, absent: torch.Tensor, config: ClassSumsConfig, *, honest: int, shares: int
) -> Bounds:
    """Runs of releases with and without the canary, scored by the best test there is."""
    direction = (present - absent).double()

    def scores(sums: torch.Tensor) -> NDArray[np.float64]:
        runs = sums.expand(TRIALS, *sums.shape)
        for _ in range(shares):
            runs = runs + class_sums.noise_for(tuple(runs.shape), config, honest)
        found: NDArray[np.float64] = ((runs - absent).double() * direction).sum((1, 2)).numpy()
        return found

    return lower_bounds(scores(absent), scores(present), delta=DELTA)


def _record() -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of 30 records with a canary of far too long a feature, and without it."""
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(31, 2)))
    features[30] = torch.tensor([300.0, -400.0])
    labels = torch.zeros(31, dtype=torch.int64)
    return (
        class_sums.class_sums(features, labels, 1, CONFIG),
        class_sums.class_sums(features[:30], labels[:30], 1, CONFIG),
    )


def _quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the noise that is promised, on every silo."""
    real = ClassSumsConfig.share_variance
    monkeypatch.setattr(ClassSumsConfig, "share_variance", lambda config, honest: real(config, honest) // 4)


def test_a_canary_record_and_half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon = gaussian_epsilon(1 / CONFIG.noise_multiplier, DELTA)
    assert accounting.epsilons(CONFIG.events(1), DELTA, prv=False).exact == pytest.approx(epsilon)
    found = _audit(*_record(), CONFIG, honest=1, shares=1)
    assert found.mu <= 1.0
    assert found.epsilon <= epsilon
    # The audit is worth something: it sees most of what there is.
    assert found.mu > 0.75
    _quarter(monkeypatch)
    caught = _audit(*_record(), CONFIG, honest=1, shares=1)
    assert caught.mu > 1.5
    assert caught.epsilon > epsilon


@pytest.mark.whole
def test_the_shares_of_the_least_silos_together_and_one_of_them_missing() -> None:
    epsilon = gaussian_epsilon(1.0, DELTA)
    together = _audit(*_record(), CONFIG, honest=3, shares=3)
    assert together.mu <= 1.0
    assert together.epsilon <= epsilon
    # The control: two of three shares are not what was promised.
    assert _audit(*_record(), CONFIG, honest=3, shares=2).mu > 1.0


def test_what_holds_if_no_other_silo_adds_noise() -> None:
    lone = CONFIG.lone_event(4)
    assert lone is not None
    found = _audit(*_record(), CONFIG, honest=4, shares=1)
    assert found.mu <= 1 / lone.noise_multiplier == 2.0
    assert found.epsilon <= gaussian_epsilon(2.0, DELTA)
    # It is not what holds together: therefore a site records both.
    assert found.mu > 1.5
    assert found.epsilon > gaussian_epsilon(1.0, DELTA)


@pytest.mark.whole
def test_a_canary_patient_and_one_whose_records_are_clipped_one_by_one() -> None:
    config = ClassSumsConfig(noise_multiplier=1.0, neighbours="patient")
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 2)))
    # Ten records of one patient, over two classes.
    features[30:] = torch.tensor([3.0, -4.0])
    labels = torch.arange(40) % 2
    patients = torch.cat([torch.arange(30), torch.full((10,), 77)])

    def sums(used: ClassSumsConfig, end: int, **people: Any) -> torch.Tensor:
        return class_sums.class_sums(features[:end], labels[:end], 2, used, **people)

    found = _audit(
        sums(config, 40, patients=patients),
        sums(config, 30, patients=patients[:30]),
        config,
        honest=1,
        shares=1,
    )
    assert 0.75 < found.mu <= 1.0
    assert found.epsilon <= gaussian_epsilon(1.0, DELTA)
    caught = _audit(sums(CONFIG, 40), sums(CONFIG, 30), CONFIG, honest=1, shares=1)
    assert caught.mu > 3
    assert caught.epsilon > gaussian_epsilon(1.0, DELTA)


@pytest.mark.parametrize(("silos", "lost"), [(6, 0), (6, 1), (6, 2), (10, 0), (10, 3)])
def test_the_total_has_the_promised_variance_with_all_silos_and_with_drop_outs(
    silos: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # c = 1; t as the secure sum's table has it, so that any t - c silos carry the promise.
    honest = {6: 4, 10: 6}[silos]
    shape, present = (4, 1500), silos - lost
    promised = CONFIG.noise_multiplier**2 * CONFIG.squared_sensitivity

    def carried() -> float:
        total = sum(class_sums.noise_for(shape, CONFIG, honest) for _ in range(present))
        assert isinstance(total, torch.Tensor)
        return float((total.double() ** 2).sum()) / promised

    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], shape[0] * shape[1])
    found = carried()
    assert low < found / (present / honest) < high
    assert found > low, "less than was promised"
    _quarter(monkeypatch)
    assert carried() / (present / honest) < low


def test_every_coordinate_of_every_class_has_its_noise() -> None:
    runs = class_sums.noise_for((3000, 3, 4), CONFIG, 1).double() / math.sqrt(CONFIG.squared_sensitivity)
    low, high = stats.chi2.ppf([1e-8, 1 - 1e-8], 3000)
    assert (((runs**2).sum(0) > low) & ((runs**2).sum(0) < high)).all()
    # And they are independent of one another.
    correlations = np.corrcoef(runs.reshape(3000, 12).T.numpy()) - np.eye(12)
    assert np.abs(correlations).max() < 6.5 / math.sqrt(3000)


# The audit itself.


@pytest.mark.parametrize(("successes", "trials"), [(0, 50), (1, 50), (17, 50), (50, 50), (3, 20_000)])
def test_clopper_pearson_equals_scipy(successes: int, trials: int) -> None:
    interval = stats.binomtest(successes, trials).proportion_ci(0.998, method="exact")
    assert clopper_pearson(successes, trials, 0.999) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
def test_the_audit_of_a_known_gaussian(mu: float) -> None:
    stream = np.random.default_rng(int(10 * mu))
    found = lower_bounds(stream.normal(size=TRIALS), stream.normal(mu, size=TRIALS), delta=DELTA)
    assert mu - 0.15 < found.mu <= mu
    assert 0.5 * gaussian_epsilon(mu, DELTA) < found.epsilon <= gaussian_epsilon(mu, DELTA)


def test_the_closed_form_is_the_accountants() -> None:
    for mu, delta in ((0.5, 1e-5), (1.0, DELTA), (5 / 3, 1e-5)):
        exact = accounting.epsilons([Gaussian(noise_multiplier=1 / mu)], delta, prv=False).exact
        assert gaussian_epsilon(mu, delta) == pytest.approx(exact, rel=1e-9)
        assert gaussian_delta(mu, gaussian_epsilon(mu, delta)) == pytest.approx(delta)
        assert gaussian_mu(gaussian_epsilon(mu, delta), delta) == pytest.approx(mu)
