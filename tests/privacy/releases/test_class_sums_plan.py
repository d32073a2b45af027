"""The plan of a release: its bounds against the ring's own check, its noise against the closed form."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.audit import gaussian_delta, gaussian_mu

from tightframe.errors import ContributionError
from tightframe.privacy import accounting
from tightframe.privacy.events import Gaussian, PrivacyValueError
from tightframe.privacy.releases.class_sums_plan import (
    ClassSumsConfig,
    largest_term,
    noise_tail,
    release_rounds,
    term_bound,
    wrap_bound,
)
from tightframe.privacy.releases.noise import ROUNDING_VARIANCE, variance_of_share
from tightframe.securesum import encoding

CONFIG = ClassSumsConfig(noise_multiplier=2.0)


def test_sensitivity_in_units() -> None:
    assert CONFIG.squared_sensitivity == (2**20) ** 2 + round(0.3 * 2**20) ** 2
    coarse = ClassSumsConfig(noise_multiplier=1.0, feature_clip=2.75, fractional_bits=1, count_weight=1.0)
    # 5.5 units of norm are 5 at most in whole ones: down, never up.
    assert (coarse.feature_limit, coarse.count_units, coarse.squared_sensitivity) == (5, 2, 29)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": None},
        {"feature_clip": -1.0},
        {"feature_clip": math.inf},
        {"count_weight": 0.0},
        {"fractional_bits": 25},
        {"fractional_bits": -1},
        {"fractional_bits": 2.0},
        {"fractional_bits": 1, "count_weight": 0.1},
        {"releases": 0},
        {"count_floor": 0.5},
        {"neighbours": "site"},
    ],
)
def test_refused_values(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyValueError, match="TF-700"):
        ClassSumsConfig(**{"noise_multiplier": 2.0, **changes})


def test_the_defaults_are_those_of_the_job() -> None:
    assert (CONFIG.releases, CONFIG.feature_clip, CONFIG.count_weight) == (10, 1.0, 0.3)
    assert CONFIG.neighbours == "record"


@given(st.floats(0.01, 100), st.floats(1e-3, 10), st.integers(12, 24), st.integers(1, 200))
def test_the_least_shares_carry_the_promise_and_hardly_more(
    noise: float, clip: float, bits: int, honest: int
) -> None:
    config = ClassSumsConfig(noise_multiplier=noise, feature_clip=clip, fractional_bits=bits)
    promised = Fraction(noise) ** 2 * config.squared_sensitivity
    if promised < ROUNDING_VARIANCE * honest:
        with pytest.raises(PrivacyValueError, match="fractional_bits"):
            config.share_variance(honest)
        return
    carried = config.share_variance(honest) * honest
    assert promised + ROUNDING_VARIANCE <= carried <= promised + (ROUNDING_VARIANCE + 1) * honest


def test_the_rounding_is_nothing_on_the_default_grid() -> None:
    assert CONFIG.share_variance(4) * 4 / (4 * CONFIG.squared_sensitivity) - 1 < 1e-10


def test_too_coarse_a_grid_for_the_noise_is_refused() -> None:
    with pytest.raises(PrivacyValueError, match=r"at least 9 squared steps.*Use more `fractional_bits`"):
        variance_of_share(0.5, 4, 1)
    with pytest.raises(PrivacyValueError, match="honest"):
        variance_of_share(0.5, 2**20, 0)


def _weights(variance: float, edge: int) -> np.ndarray:
    weights = np.exp(-(np.arange(-edge, edge + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


def _delta(noise: np.ndarray, shift: int, epsilon: float) -> float:
    """Exactly: the most that any event can be likelier with the shift than e^epsilon times without it."""
    moved = np.concatenate([np.zeros(shift), noise])
    still = np.concatenate([noise, np.zeros(shift)])
    return float(np.maximum(moved - math.exp(epsilon) * still, 0).sum())


@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize(("noise", "squared"), [(0.61, 100), (1.0, 36), (2.0, 25), (3.0, 49)])
def test_the_continuous_closed_form_bounds_the_summed_integers(
    noise: float, squared: int, shares: int
) -> None:
    variance = variance_of_share(noise, squared, shares)
    edge, total = math.ceil(14 * math.sqrt(variance)), np.ones(1)
    for _ in range(shares):
        total = np.convolve(total, _weights(variance, edge))
    for epsilon in (0.0, 0.3, 1.0, 2.0, 4.0):
        exact = _delta(total, math.isqrt(squared), epsilon)
        assert exact <= gaussian_delta(1 / noise, epsilon) * (1 + 1e-9) + 1e-15
        # The control: without its share of noise it does not hold.
        assert shares == 1 or _delta(_weights(variance, edge), math.isqrt(squared), epsilon) > gaussian_delta(
            1 / noise, epsilon
        )


@pytest.mark.parametrize("shift", [(3, 4), (5, 0), (4, 1), (1, 1)])
def test_the_closed_form_bounds_the_integers_in_every_direction(shift: tuple[int, int]) -> None:
    squared = shift[0] ** 2 + shift[1] ** 2
    noise = max(1.0, math.sqrt(9.5 / squared))
    variance = variance_of_share(noise, squared, 1)
    line = _weights(variance, math.ceil(12 * math.sqrt(variance)))
    plane = np.pad(np.outer(line, line), 5)
    moved = np.roll(plane, shift, axis=(0, 1))
    for epsilon in (0.0, 0.5, 2.0, 4.0):
        exact = float(np.maximum(moved - math.exp(epsilon) * plane, 0).sum())
        assert exact <= gaussian_delta(1 / noise, epsilon) * (1 + 1e-9) + 1e-15


def test_usefulness_as_the_design_says() -> None:
    """Noise as a share of a unit class mean: 190 records, epsilon 8 at 1e-5, d = 512, counts of weight 1."""
    mu, shares = gaussian_mu(8.0, 1e-5), []
    for releases in (1, 10, 100):
        config = ClassSumsConfig(noise_multiplier=math.sqrt(releases) / mu, count_weight=1.0)
        deviation = math.sqrt(config.share_variance(1)) / config.grid
        shares.append(deviation * math.sqrt(512) / 190)
    assert shares == pytest.approx([0.10, 0.32, 1.01], abs=0.005)


def test_the_default_weight_of_the_counts_pays_for_most_of_the_overshoot() -> None:
    # Six silos, of which any four carry the promise: all six carry sqrt(6 / 4) of it.
    mu, found = gaussian_mu(8.0, 1e-5), []
    for releases in (1, 10, 100):
        config = ClassSumsConfig(noise_multiplier=math.sqrt(releases) / mu)
        found.append(math.sqrt(6 * config.share_variance(4)) / config.grid * math.sqrt(512) / 190)
    assert found == pytest.approx([0.091, 0.289, 0.914], abs=0.001)


@pytest.mark.parametrize("releases", [1, 7, 100])
def test_what_is_charged(releases: int) -> None:
    planned = CONFIG.events(releases)
    assert planned == (Gaussian(noise_multiplier=2.0),) * releases
    # R releases are one Gaussian of mu = sqrt(R) / z.
    epsilon = accounting.epsilons(planned, 1e-5, prv=False).exact
    assert epsilon is not None
    assert gaussian_mu(epsilon, 1e-5) == pytest.approx(math.sqrt(releases) / 2, rel=1e-6)
    assert CONFIG.lone_event(4) == Gaussian(noise_multiplier=1.0)


def test_no_record_more_than_its_tail() -> None:
    variance = CONFIG.share_variance(4)
    tail = noise_tail(CONFIG, 4)
    assert (tail - 1) ** 2 < 144 * variance <= tail**2
    # Subgaussian: 2 exp(-12**2 / 2) for one integer.
    assert 2 * math.exp(-72) * 2**22 < 2.0**-80


def test_the_ring_is_the_protocols() -> None:
    from tightframe.privacy.releases import class_sums_plan as release_plan

    assert release_plan.RING_FRACTION_BITS == encoding.FRACTION_BITS_64


@given(
    st.floats(0.01, 1e4),
    st.floats(1e-2, 1e5),
    st.integers(10, 24),
    st.integers(1, 2**32),
    st.integers(1, 1000),
)
def test_what_passes_never_wraps(noise: float, clip: float, bits: int, records: int, silos: int) -> None:
    config = ClassSumsConfig(noise_multiplier=noise, feature_clip=clip, fractional_bits=bits)
    try:
        bound = wrap_bound(config, records, silos, 1)
    except ContributionError as error:
        assert error.code == "TF-404"
        reached = silos * (largest_term(config, records) + noise_tail(config, 1))
        assert reached >= min(2**53, 2**39 * config.grid - silos), "refused without need"
        return
    assert bound == silos * (largest_term(config, records) + noise_tail(config, 1)) < 2**53
    field = term_bound(config, records, 1)
    assert field * config.grid * silos == bound
    encoding.check_no_wrap(64, encoding.FRACTION_BITS_64, field, silos)


def test_what_could_wrap_is_refused() -> None:
    fine = ClassSumsConfig(noise_multiplier=2.0, fractional_bits=24)
    assert wrap_bound(fine, 10_000, 6, 4) < 2**53
    # Noise alone is enough for it: that the tail is part of the check.
    noisy = ClassSumsConfig(noise_multiplier=1e8, fractional_bits=24)
    assert 6 * largest_term(noisy, 1) < 2**30
    with pytest.raises(ContributionError, match=r"^TF-404: .*with their noise"):
        wrap_bound(noisy, 1, 6, 4)
    # The ring before the mantissa: 2**47 steps of 2**-8 are 2**63 units of it.
    coarse = ClassSumsConfig(noise_multiplier=1.0, fractional_bits=8)
    most = 2**47 // largest_term(coarse, 1)
    assert wrap_bound(coarse, most - 20, 1, 1) < 2**47
    with pytest.raises(ContributionError, match="stay below"):
        wrap_bound(coarse, most + 1, 1, 1)


@given(st.integers(1, 300), st.integers(1, 40), st.booleans())
def test_rounds_of_releases(rounds: int, releases: int, predicts: bool) -> None:
    chosen = release_rounds(rounds, releases, predicts=predicts)
    last = rounds if predicts else max(1, rounds - 1)
    assert len(chosen) == min(releases, last)
    assert list(chosen) == sorted(set(chosen))
    assert 1 <= chosen[0] <= chosen[-1] <= last
    steps = np.diff(chosen)
    assert steps.size == 0 or steps.max() - steps.min() <= 1, "not even"
    stretch = last / len(chosen)
    if predicts:
        assert chosen[-1] == rounds
    else:
        assert last - chosen[-1] <= stretch / 2, "the last one is too early to stand for the end"
        assert chosen[0] <= stretch / 2 + 1


@pytest.mark.parametrize(("rounds", "releases"), [(0, 1), (1, 0), (-3, 2)])
def test_no_rounds_or_releases(rounds: int, releases: int) -> None:
    with pytest.raises(PrivacyValueError, match="TF-700"):
        release_rounds(rounds, releases)
