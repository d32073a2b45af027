"""Bounds by privacy-loss distributions against dp-accounting, the closed form, Opacus' RDP and PRV."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tightframe.privacy import loss_distributions
from tightframe.privacy.accounting import epsilons, guaranteed, running, solve
from tightframe.privacy.events import Event, Gaussian, SubsampledGaussian
from tightframe.privacy.loss_distributions import COARSE, FINE, Kind, upper_bound

DELTA = 1e-5

GOOGLE: list[tuple[list[Kind], float, float, float]] = [
    ([(0.3, 0.001, 1)], 1e-05, 5.65374254, 5.65379254),
    ([(0.5, 0.001, 10)], 1e-05, 1.08558583, 1.08601614),
    ([(0.8, 0.001, 100)], 1e-05, 0.135974365, 0.140968738),
    ([(1.0, 0.001, 1000)], 1e-05, 0.0988537329, 0.148955844),
    ([(3.0, 0.001, 100)], 1e-05, 0.00358754337, 0.00861822371),
    ([(20.0, 0.001, 10000)], 1e-05, 0.00753133095, 0.0125316462),
    ([(5.0, 0.001, 1)], 1e-05, 0.000257025454, 0.000301524127),
    ([(0.3, 0.01, 1)], 1e-05, 10.5481622, 10.5482122),
    ([(0.5, 0.01, 10)], 1e-05, 4.36009858, 4.36060256),
    ([(0.8, 0.01, 100)], 1e-05, 1.50583787, 1.51083802),
    ([(1.0, 0.01, 1000)], 1e-05, 1.77823973, 1.82824365),
    ([(3.0, 0.01, 100)], 1e-05, 0.107392336, 0.112396088),
    ([(20.0, 0.01, 10000)], 1e-05, 0.155286797, 0.160293843),
    ([(5.0, 0.01, 1)], 1e-05, 0.00567866077, 0.00572916675),
    ([(0.3, 0.05, 1)], 1e-05, 13.6824659, 13.6825159),
    ([(0.5, 0.05, 10)], 1e-05, 8.55320865, 8.55370856),
    ([(0.8, 0.05, 100)], 1e-05, 5.73624325, 5.74124342),
    ([(1.0, 0.05, 1000)], 1e-05, 10.9366776, 10.9866792),
    ([(3.0, 0.05, 100)], 1e-05, 0.646453098, 0.651453995),
    ([(20.0, 0.05, 10000)], 1e-05, 0.922780869, 0.927955709),
    ([(5.0, 0.05, 1)], 1e-05, 0.0368105066, 0.0368607231),
    ([(0.3, 0.2, 1)], 1e-05, 16.2553927, 16.2554427),
    ([(0.5, 0.2, 10)], 1e-05, 18.1533114, 18.1538114),
    ([(0.8, 0.2, 100)], 1e-05, 21.8320049, 21.837005),
    ([(1.0, 0.2, 1000)], 1e-05, 61.1531581, 61.2031591),
    ([(3.0, 0.2, 100)], 1e-05, 2.97195766, 2.97695796),
    ([(20.0, 0.2, 10000)], 1e-05, 4.37814024, 4.38599543),
    ([(5.0, 0.2, 1)], 1e-05, 0.165150153, 0.165200108),
    ([(0.3, 0.5, 1)], 1e-05, 17.9053558, 17.9054058),
    ([(0.5, 0.5, 10)], 1e-05, 31.373968, 31.374468),
    ([(0.8, 0.5, 100)], 1e-05, 58.0661914, 58.0711915),
    ([(1.0, 0.5, 1000)], 1e-05, 218.569226, 218.619227),
    ([(3.0, 0.5, 100)], 1e-05, 8.38247573, 8.38747591),
    ([(20.0, 0.5, 10000)], 1e-05, 13.2127367, 13.2362141),
    ([(5.0, 0.5, 1)], 1e-05, 0.403382556, 0.40343258),
    ([(0.71, 64 / 9930, 7758)], 1e-05, 6.87677959, 7.26480918),
    ([(2.19, 64 / 351, 300)], 1e-05, 7.36982174, 7.38482231),
    ([(1.0, 0.05, 200)], 1e-05, 4.7559196, 4.76592002),
    ([(6.0, 1.0, 100)], 1e-05, 7.99869116, 8.00369135),
    ([(0.6, 1.0, 1)], 1e-05, 8.00364106, 8.00369106),
    ([(0.8, 0.02, 500), (2.0, 0.1, 50), (4.0, 1.0, 1)], 1e-06, 5.83358402, 5.86113525),
    ([(0.71, 64 / 9930, 7758), (12.0, 1.0, 10)], 1e-05, 6.98935349, 7.37788306),
    ([(1.0, 0.01, 1000), (1.5, 0.01, 1000), (3.0, 0.5, 20)], 1e-05, 3.95543131, 4.05643644),
    ([(1.0, 0.01, 500)], 1e-10, 2.71564886, 2.74058127),
    ([(3.0, 0.5, 20)], 0.001, 2.33280014, 2.33380018),
    ([(10.0, 0.9, 300)], 1e-06, 8.18064483, 8.18112015),
]
"""Kinds, delta, optimistic and pessimistic epsilon of dp-accounting 0.6.0, by

    python -m venv D && D/bin/pip install dp-accounting==0.6.0, and for each row, composed over its kinds,
    privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=h, pessimistic_estimate=...
    ).self_compose(steps), then get_epsilon_for_delta(delta)

with h = 1e-6 for one kind of noise 10 or more, else 1e-4. The optimistic one rounds losses down."""


@pytest.mark.whole
@pytest.mark.parametrize(("kinds", "delta", "optimistic", "pessimistic"), GOOGLE)
def test_between_google_s_estimates(
    kinds: list[Kind], delta: float, optimistic: float, pessimistic: float
) -> None:
    found = upper_bound(kinds, delta)
    assert found is not None and optimistic <= found <= pessimistic * 1.01
    coarse = upper_bound(kinds, delta, COARSE)
    assert coarse is not None and optimistic <= coarse <= pessimistic * 1.01 + 0.01
    if kinds[0][1] < 1.0:
        assert found <= epsilons(_events(kinds), delta, prv=False).rdp


def _events(kinds: list[Kind]) -> list[Event]:
    return [SubsampledGaussian(*kind) for kind in kinds]


@pytest.mark.parametrize("noise", [0.15, 0.6, 1.0, 6.0, 40.0, 1e3])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 1e-3])
def test_the_exact_gaussian(noise: float, delta: float) -> None:
    """Balle & Wang's closed form, never below and next to nothing above."""
    exact = epsilons([Gaussian(noise)], delta, prv=False).exact
    assert exact is not None
    found = upper_bound([(noise, 1.0, 1)], delta)
    if exact == 0.0:
        assert found is None or found < 1e-3
    else:
        assert found is not None and exact <= found <= exact * 1.001
    steps = upper_bound([(noise * 10, 1.0, 100)], delta)  # composed, not put together
    assert (steps is None or exact * (1 - 1e-12) <= steps) and (not exact or (steps or 0.0) <= exact * 1.002)


@pytest.mark.whole
@pytest.mark.parametrize(("rate", "noise"), [(0.3, 0.7), (0.01, 0.5), (0.5, 3.0), (0.05, 1.0)])
def test_one_step_by_integration(rate: float, noise: float) -> None:
    """Delta of one step in both directions by its definition, at the epsilon that was found."""
    x = np.linspace(-12 * noise, 1 + 12 * noise, 500_001)

    def normal(mean: float) -> NDArray[np.float64]:
        return np.exp(-(((x - mean) / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi))

    q = normal(0.0)
    p = (1 - rate) * q + rate * normal(1.0)

    def largest(epsilon: float) -> float:
        both = (p - math.exp(epsilon) * q, q - math.exp(epsilon) * p)
        return max(float(np.trapezoid(np.maximum(0.0, excess), x)) for excess in both)

    for delta in (1e-3, 1e-6):
        found = upper_bound([(noise, rate, 1)], delta)
        assert found is not None
        assert largest(found) <= delta * (1 + 1e-6) and largest(found * 0.99) > delta


@pytest.mark.parametrize(
    "kinds",
    [[(2.19, 64 / 351, 300)], [(1.0, 0.05, 200)], [(1.0, 0.01, 1000), (3.0, 0.5, 20)]],
)
def test_not_below_prv(kinds: list[Kind]) -> None:
    """PRV adds its error of 0.01 to a value: less twice that it is a lower bound, for one direction."""
    found = epsilons(_events(kinds), DELTA)
    assert found.pld is not None and found.prv is not None
    assert found.prv - 0.02 <= found.pld <= found.rdp and found.guaranteed == found.pld


def test_both_directions_count() -> None:
    """Adding a record costs more than removing one where noise is large and steps are few."""
    kinds: list[Kind] = [(20.0, 0.9, 3)]
    window = loss_distributions
    values = [window._direction(kinds, DELTA, FINE, removed, 0.0) for removed in (True, False)]
    bound = upper_bound(kinds, DELTA)
    assert all(value is not None and bound is not None and value <= bound for value in values)


def test_the_discrete_distribution_dominates_the_loss() -> None:
    """Its curve is at or above that of the step's own losses, everywhere."""
    for removed in (True, False):
        step = loss_distributions._Step(0.8, 0.05, removed)
        with np.errstate(divide="ignore"):
            part = loss_distributions._discrete(step, 0.05, 9.0)
        masses = np.exp(part.log_masses)
        losses = 0.05 * (part.first + np.arange(len(masses)))
        assert masses.sum() + part.infinite == pytest.approx(1.0, abs=1e-12)
        for epsilon in np.linspace(-2, 4, 97):
            own, other = step.tails(step.place(np.array([epsilon])))
            true = float(own[0] - math.exp(epsilon) * other[0])
            found = float(np.sum(masses * np.maximum(0.0, 1 - np.exp(epsilon - losses)))) + part.infinite
            assert true * (1 - 1e-9) - 1e-14 <= found <= true + 0.002


noises, rates = st.floats(0.5, 10.0), st.floats(0.001, 0.9)


@pytest.mark.whole
@settings(max_examples=40, deadline=None)
@given(
    noises, rates, st.integers(1, 400), st.sampled_from([1e-3, 1e-5, 1e-8]), st.sampled_from([FINE, COARSE])
)
def test_more_noise_fewer_steps_and_a_smaller_rate_never_cost_more(
    noise: float, rate: float, steps: int, delta: float, tolerance: float
) -> None:
    whole = upper_bound([(noise, rate, steps + steps // 50 + 1)], delta, tolerance)
    less = [
        upper_bound([(noise, rate, steps)], delta, tolerance),
        upper_bound([(noise * 1.05, rate, steps + steps // 50 + 1)], delta, tolerance),
        upper_bound([(noise, rate * 0.95, steps + steps // 50 + 1)], delta, tolerance),
    ]
    assert all(value is None or whole is None or value <= whole + 1e-9 for value in less)


@settings(max_examples=10, deadline=None)
@given(st.permutations(list(range(6))))
def test_order_does_not_matter(order: list[int]) -> None:
    events: list[Event] = [
        Gaussian(5.0),
        SubsampledGaussian(1.0, 0.01, 50),
        Gaussian(9.0),
        SubsampledGaussian(1.0, 0.01, 70),
        SubsampledGaussian(2.0, 0.2, 5),
        SubsampledGaussian(4.0, 1.0, 2),
    ]
    assert guaranteed([events[place] for place in order], DELTA) == guaranteed(events, DELTA)


def test_steps_one_by_one_never_cost_less() -> None:
    """The bound's own error changes smoothly with the events: parts of a plan are below the whole."""
    values = [upper_bound([(0.8, 0.01, 5000 + more)], DELTA, COARSE) for more in range(20)]
    assert all(value is not None for value in values) and values == sorted(values, key=lambda v: v or 0.0)


def test_what_is_too_expensive_has_no_bound() -> None:
    assert upper_bound([], DELTA) == 0.0
    assert upper_bound([(1.0, 0.1, 10**9)], DELTA) is None, "epsilon in the millions"
    assert upper_bound([(0.01, 0.5, 10**6)], DELTA) is None
    assert upper_bound([(1.0 + place / 1000, 0.1, 1) for place in range(300)], DELTA) is None
    found = epsilons([SubsampledGaussian(0.05, 0.1, 100)], DELTA, prv=False)
    assert found.pld is None and found.guaranteed == found.rdp
    assert epsilons([Gaussian(3.0)], DELTA, prv=False).pld is None, "known exactly"


def test_a_ledger_of_many_events() -> None:
    """Bounds that never fall, of which the last is the whole ledger's."""
    events: list[Event] = []
    for noise in (2.0, 3.1, 4.0):
        for _ in range(30):
            events += [SubsampledGaussian(noise, 0.01, 20), Gaussian(90.0)]
    found = running(events, DELTA)
    assert len(found) == 180 and found == sorted(found) and found[-1] == guaranteed(events, DELTA)
    assert found[0] >= guaranteed(events[:1], DELTA) * 0.999
    assert running([], DELTA) == []


def test_solved_noise_is_less_than_by_rdp() -> None:
    """And the job keeps its promise at each of its steps."""
    noise = solve(lambda z: [SubsampledGaussian(z, 64 / 351, 300)], epsilon=8.0, delta=DELTA)
    assert noise == pytest.approx(2.064, abs=0.002), "2.187 by RDP"
    for steps in (1, 100, 299, 300):
        assert guaranteed([SubsampledGaussian(noise, 64 / 351, steps)], DELTA) <= 8.0
