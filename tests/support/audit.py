"""Lower bounds of epsilon from what a mechanism gives out: a canary's scores with and without it.

An audit proves nothing private; it catches what is not. Each test that uses this therefore has a control
in which the promise is broken, and must be caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats  # type: ignore[import-untyped]

CONFIDENCE = 0.999


@dataclass(frozen=True)
class Bounds:
    """Lower bounds that hold together with the confidence asked for.

    Attributes:
        epsilon: of (epsilon, delta)-DP, for any mechanism.
        mu: of Gaussian DP: no test between N(0, 1) and N(mu, 1) is better than those that were seen.
    """

    epsilon: float
    mu: float


def clopper_pearson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bounds of a probability, each of which alone holds with ``confidence``."""
    low = special.betaincinv(successes, trials - successes + 1, 1 - confidence) if successes else 0.0
    high = special.betaincinv(successes + 1, trials - successes, confidence) if successes < trials else 1.0
    return float(low), float(high)


def by_coin(
    scores: Callable[[NDArray[np.bool_]], NDArray[np.float64]], canaries: int, runs: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores of absent and of present canaries, each of which a coin lets in anew in each run.

    Args:
        scores: of one run, (canaries,), given which are in.
        canaries, runs: how many.
    """
    coins = np.random.default_rng(0)
    inside, outside = [], []
    for _ in range(runs):
        present = coins.random(canaries) < 0.5
        found = scores(present)
        inside.append(found[present])
        outside.append(found[~present])
    return np.concatenate(outside), np.concatenate(inside)


def lower_bounds(
    absent: NDArray[np.float64], present: NDArray[np.float64], *, delta: float, confidence: float = CONFIDENCE
) -> Bounds:
    """Bounds from scores of independent runs without and with the canary, which should score higher.

    Thresholds are chosen on one half of the runs and judged on the other, so that choosing costs nothing.
    """
    tuned, judged = (absent[::2], present[::2]), (absent[1::2], present[1::2])
    # Four probabilities are bounded for epsilon and mu each.
    single = 1 - (1 - confidence) / 4
    # Further out there are so few scores that luck chooses the threshold, and then often a bad one: mu is
    # found near the middle, epsilon where delta of the absent are left.
    thresholds = np.quantile(np.concatenate(tuned), np.linspace(0.005, 0.995, 199))
    central = thresholds[9:-9]

    def by_epsilon(threshold: float, scores: tuple[NDArray[np.float64], NDArray[np.float64]]) -> float:
        hits, alarms = _rates(threshold, scores, single)
        return math.log(max(hits - delta, 1e-12) / alarms)

    def by_mu(threshold: float, scores: tuple[NDArray[np.float64], NDArray[np.float64]]) -> float:
        hits, alarms = _rates(threshold, scores, single)
        return float(stats.norm.ppf(max(hits, 1e-12)) - stats.norm.ppf(min(alarms, 1 - 1e-12)))

    return Bounds(
        epsilon=by_epsilon(max(thresholds, key=lambda t: by_epsilon(t, tuned)), judged),
        mu=by_mu(max(central, key=lambda t: by_mu(t, tuned)), judged),
    )


def _rates(
    threshold: float, scores: tuple[NDArray[np.float64], NDArray[np.float64]], confidence: float
) -> tuple[float, float]:
    """At least so many hits, at most so many false alarms."""
    absent, present = scores
    hits = clopper_pearson(int((present > threshold).sum()), len(present), confidence)[0]
    return hits, clopper_pearson(int((absent > threshold).sum()), len(absent), confidence)[1]


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of the Gaussian mechanism of mu = sensitivity / noise (Balle & Wang 2018, theorem 8)."""
    first = stats.norm.cdf(mu / 2 - epsilon / mu)
    return float(first - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which that is ``delta``."""
    return float(optimize.brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, 200.0))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu that has this epsilon at this delta."""
    return float(optimize.brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 1e-3, 20.0))


def one_run_p_value(canaries: int, guesses: int, right: int, *, epsilon: float, delta: float) -> float:
    """The largest chance of so many right guesses from one run of an (epsilon, delta)-private mechanism.

    Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, theorem 5.2: each
    of m canaries is in by a fair coin; then, with W of Binomial(r, e^eps / (e^eps + 1)),

        P[right >= v] <= P[W >= v] + delta m max_i (2 / i) P[v > W >= v - i].

    Args:
        canaries: m.
        guesses: r; the attacker abstains from the other canaries.
        right: v.
        epsilon, delta: of the promise, for one record added or removed.
    """
    accuracy = special.expit(epsilon)
    # Below zero W has no values, so that no i above v can be the greatest.
    below = stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, accuracy)
    alpha = 2 * float(np.max(np.cumsum(below) / np.arange(1, right + 1), initial=0.0))
    return min(1.0, float(stats.binom.sf(right - 1, guesses, accuracy)) + delta * canaries * alpha)


def one_run_bound(
    canaries: int, guesses: int, right: int, *, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The lower bound of epsilon from one run: the largest epsilon that the right guesses refute, else 0.

    What refutes an epsilon refutes all below it, which promise more.
    """

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, right, epsilon=epsilon, delta=delta) < 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def right_guesses(scores: NDArray[np.float64], present: NDArray[np.bool_], each: int) -> int:
    """Right ones of 2 ``each`` guesses: the highest scores are said to be in, the lowest to be out."""
    order = np.argsort(scores)
    return int(present[order[-each:]].sum() + (~present[order[:each]]).sum())
