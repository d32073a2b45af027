"""Noisy sums of gradients: sensitivity in integers, noise with drop-outs, charges, and an audit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from opacus.accountants import PRVAccountant
from scipy import stats
from tests.support.audit import Bounds, gaussian_epsilon, lower_bounds

from tightframe.errors import ContributionError
from tightframe.privacy import accounting
from tightframe.privacy.events import Gaussian, PrivacyValueError, SubsampledGaussian
from tightframe.privacy.releases.gradient_sums import GradientSumConfig, check_sum

TRIALS = 20_000
DELTA = 0.01
CONFIG = GradientSumConfig(noise_multiplier=1.0, size=3)


def quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the noise that is promised, on every silo."""
    real = GradientSumConfig.share_variance
    monkeypatch.setattr(GradientSumConfig, "share_variance", lambda config, honest: real(config, honest) // 4)


def audit(config: GradientSumConfig, *, honest: int, shares: int) -> Bounds:
    """Rounds with and without a record whose clipped gradient is as long as it may be."""
    canary = np.array([config.grid, 0, 0, config.count_units], dtype=np.int64)
    coins = np.random.default_rng(1)

    def scores(present: bool) -> NDArray[np.float64]:
        runs = np.zeros((TRIALS, 4), dtype=np.int64)
        for _ in range(shares):
            runs = runs + config.share(runs.shape, honest)
        drawn = (coins.random(TRIALS) < config.sampling_rate) & present
        return (runs + drawn[:, None] * canary) @ canary.astype(np.float64)

    return lower_bounds(scores(False), scores(True), delta=DELTA)


def test_the_largest_change_by_a_record_is_the_sensitivity_that_noise_is_measured_in() -> None:
    assert CONFIG.squared_sensitivity == CONFIG.grid**2 + CONFIG.count_units**2
    assert math.sqrt(CONFIG.squared_sensitivity) / CONFIG.grid == pytest.approx(math.hypot(1, 0.2), rel=1e-6)


@pytest.mark.parametrize("size", [1, 650, 4_000_000, 2**23, 90_000_000, 2**33])
def test_squared_norms_of_any_models_integers_fit_into_64_bits(size: int) -> None:
    config = GradientSumConfig(1.0, size)
    assert size * config.grid**2 < 2**63
    assert config.fractional_bits == 20 or (size + 1) * (4 * config.grid**2) >= 2**62, "as fine as may be"
    # Then truncation takes less than one part in eight of an entry of a clipped gradient, spread evenly.
    assert config.grid / math.sqrt(size) > 8 or size > 2**32


@pytest.mark.whole
def test_a_canary_and_half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon = gaussian_epsilon(1.0, DELTA)
    found = audit(CONFIG, honest=1, shares=1)
    assert 0.75 < found.mu <= 1.0
    assert found.epsilon <= epsilon
    quarter(monkeypatch)
    caught = audit(CONFIG, honest=1, shares=1)
    assert caught.mu > 1.5
    assert caught.epsilon > epsilon


@pytest.mark.whole
def test_the_least_silos_shares_together_one_missing_and_one_alone() -> None:
    together = audit(CONFIG, honest=3, shares=3)
    assert 0.75 < together.mu <= 1.0
    assert audit(CONFIG, honest=3, shares=2).mu > 1.0
    alone = CONFIG.event(3)
    assert alone == Gaussian(1 / math.sqrt(3))
    lone = audit(CONFIG, honest=3, shares=1)
    assert 1.0 < lone.mu <= 1 / alone.noise_multiplier


def test_drawn_records_are_in_a_smaller_danger_as_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GradientSumConfig(0.5, 3, sampling_rate=0.3)
    assert config.event() == SubsampledGaussian(0.5, 0.3, 1)
    epsilon = accounting.guaranteed([config.event()], DELTA)
    assert epsilon < 0.75 * gaussian_epsilon(2.0, DELTA), "drawing amplifies"
    found = audit(config, honest=1, shares=1)
    # Of 20,000 trials about 0.60 epsilon is seen, with a deviation of 0.05.
    assert 0.3 * epsilon < found.epsilon <= epsilon
    quarter(monkeypatch)
    assert audit(config, honest=1, shares=1).epsilon > epsilon


@pytest.mark.parametrize(
    ("silos", "lost", "honest"), [(4, 0, 2), (4, 1, 2), (6, 0, 4), (6, 2, 4), (10, 3, 6)]
)
def test_the_total_has_the_promised_variance_with_all_silos_and_with_drop_outs(
    silos: int, lost: int, honest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    present, size = silos - lost, 6000
    promised = CONFIG.noise_multiplier**2 * CONFIG.squared_sensitivity

    def carried() -> float:
        total = sum(CONFIG.share((size,), honest) for _ in range(present))
        return float((np.asarray(total, np.float64) ** 2).sum()) / promised

    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], size)
    found = carried()
    assert low < found / (present / honest) < high
    assert found > low, "less than was promised"
    quarter(monkeypatch)
    assert carried() / (present / honest) < low


@pytest.mark.parametrize(("rate", "rounds"), [(1.0, 30), (0.25, 100)])
def test_rounds_cost_what_central_dp_sgd_costs(rate: float, rounds: int) -> None:
    """By the closed form of the Gaussian mechanism, or Opacus' numerical composition."""
    config = GradientSumConfig(5.0, 650, rate)
    spent = accounting.guaranteed([config.event()] * rounds, 1e-5)
    if rate == 1:
        assert spent == pytest.approx(gaussian_epsilon(math.sqrt(rounds) / 5.0, 1e-5), rel=1e-6)
        return
    accountant = PRVAccountant()
    accountant.history = [(5.0, rate, rounds)]
    assert spent == pytest.approx(float(accountant.get_epsilon(1e-5)), abs=0.012)


def test_what_dp_accounting_says_of_them() -> None:
    """Written down from Google's ``dp-accounting`` 0.6.0.

    ``PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(SelfComposedDpEvent(
    PoissonSampledDpEvent(q, GaussianDpEvent(z)), R)).get_epsilon(1e-5)`` for (z, q, R); at q = 1 without
    ``PoissonSampledDpEvent``.
    """
    for (noise, rate, rounds), expected in DP_ACCOUNTING.items():
        config = GradientSumConfig(noise, 650, rate)
        spent = accounting.guaranteed([config.event()] * rounds, 1e-5)
        assert spent == pytest.approx(expected, rel=5e-3)


DP_ACCOUNTING = {
    (5.0, 1.0, 30): 4.866082848676754,
    (5.0, 0.25, 100): 2.069456885408886,
    (20.8, 1.0, 31): 0.9984837440767422,
    (2.0, 0.1, 200): 3.3596607440700863,
}


def test_a_number_of_records_is_known_better_with_every_sum() -> None:
    # In one promised total the constant of a record, 0.2, has noise of z D = sqrt(1.04).
    assert CONFIG.records_deviation(1.0) == pytest.approx(math.sqrt(1.04) / 0.2, rel=1e-5)
    assert CONFIG.records_deviation(16.0, 16.0) == pytest.approx(CONFIG.records_deviation(1.0) / 4)


def test_noise_that_no_field_holds_is_refused() -> None:
    check_sum(GradientSumConfig(1e5, 650), 2**24, 100, 2.0**28)
    with pytest.raises(ContributionError, match="noise of 1e\\+09 sensitivities"):
        check_sum(GradientSumConfig(1e9, 650), 2**24, 100, 2.0**28)
    with pytest.raises(ContributionError, match="250 silos"):
        check_sum(GradientSumConfig(2e6, 650), 2**24, 250, 2.0**28)


@pytest.mark.parametrize(
    "wrong", [{"noise_multiplier": 0.0}, {"size": 0}, {"sampling_rate": 0.0}, {"sampling_rate": 1.5}]
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PrivacyValueError, match=next(iter(wrong))):
        GradientSumConfig(**{"noise_multiplier": 1.0, "size": 3, **wrong})
