"""The lower bound of epsilon from one run: exact fractions, SciPy's intervals and known mechanisms."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from tests.support.audit import gaussian_epsilon, one_run_bound, one_run_p_value, right_guesses


def _exact(canaries: int, guesses: int, right: int, odds: int, delta: Fraction) -> Fraction:
    """Theorem 5.2 word for word, in fractions, with e^eps = ``odds``."""
    accuracy = Fraction(odds, odds + 1)
    chance = [
        math.comb(guesses, w) * accuracy**w * (1 - accuracy) ** (guesses - w) for w in range(guesses + 1)
    ]
    alpha = max(
        Fraction(2, i) * sum(chance[w] for w in range(max(0, right - i), right))
        for i in range(1, canaries + 1)
    )
    return min(Fraction(1), sum(chance[right:], Fraction(0)) + delta * canaries * alpha)


@pytest.mark.parametrize("odds", [1, 2, 7])
@pytest.mark.parametrize(("canaries", "guesses"), [(12, 12), (40, 15)])
@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 1000), Fraction(1, 20)])
def test_the_p_value_is_the_theorems(odds: int, canaries: int, guesses: int, delta: Fraction) -> None:
    for right in range(guesses + 1):
        found = one_run_p_value(canaries, guesses, right, epsilon=math.log(odds), delta=float(delta))
        assert found == pytest.approx(float(_exact(canaries, guesses, right, odds, delta)), rel=1e-9)


@pytest.mark.parametrize(("guesses", "right"), [(20, 20), (100, 70), (600, 421), (50, 25)])
def test_without_delta_the_bound_is_clopper_and_pearsons(guesses: int, right: int) -> None:
    least = stats.binomtest(right, guesses, alternative="greater").proportion_ci(0.999).low
    expected = max(0.0, math.log(least / (1 - least)))
    assert one_run_bound(1000, guesses, right, delta=0.0) == pytest.approx(expected, abs=1e-6)


def test_canaries_that_leak_with_chance_delta_keep_the_bound_and_break_the_one_without() -> None:
    # Each bit is told with chance delta, else by randomised response: (epsilon, delta)-private for each.
    epsilon, delta, canaries = 1.0, 0.01, 100
    accuracy = delta + (1 - delta) / (1 + math.exp(-epsilon))
    chances = [float(stats.binom.sf(right - 1, canaries, accuracy)) for right in range(canaries + 1)]
    told = {
        used: [
            one_run_p_value(canaries, canaries, v, epsilon=epsilon, delta=used) for v in range(canaries + 1)
        ]
        for used in (delta, 0.0)
    }
    assert all(chance <= bound for chance, bound in zip(chances, told[delta], strict=True))
    assert any(chance > bound for chance, bound in zip(chances, told[0.0], strict=True))
    # Nor is the term for delta out of all proportion where bounds are read, at small chances.
    read = [v for v, chance in enumerate(chances) if chance > 1e-4]
    assert told[delta][read[-1]] < 30 * chances[read[-1]] + canaries * delta


def test_one_run_of_a_known_gaussian_is_bounded_by_its_epsilon_and_seen_with_a_sixth_of_its_noise() -> None:
    stream, canaries, each, delta = np.random.default_rng(11), 3000, 150, 1e-5

    def bounds(mu: float, runs: int) -> np.ndarray:
        found = []
        for _ in range(runs):
            present = stream.random(canaries) < 0.5
            right = right_guesses(stream.normal(size=canaries) + mu * present, present, each)
            # At so low a confidence a bound that is too high would show in some of the runs.
            found.append(one_run_bound(canaries, 2 * each, right, delta=delta, confidence=0.9))
        return np.array(found)

    promised = gaussian_epsilon(1.0, delta)
    kept = bounds(1.0, 40)
    assert (kept <= promised).all() and np.median(kept) > 0.3 * promised
    assert np.median(bounds(6.0, 5)) > promised


def test_guesses_are_the_highest_and_the_lowest_scores() -> None:
    scores = np.array([0.1, 5.0, -3.0, 4.0, -2.0, 0.0])
    present = np.array([True, True, False, False, True, False])
    assert right_guesses(scores, present, 1) == 2
    assert right_guesses(scores, present, 2) == 2
