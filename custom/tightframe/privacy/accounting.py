"""Epsilon at a delta of events together.

Three analyses. *Exact*: where every record takes part in every release, any number of Gaussian
mechanisms is one Gaussian with mu = sqrt(sum 1/z^2) (Dong et al. 2019), whose epsilon is known in closed
form (Balle & Wang 2018). *RDP*: an upper bound for any composition of subsampled Gaussians, proved
for both directions, add and remove (Mironov, Talwar & Zhang 2019); Opacus computes it. *PRV*: Opacus'
numerical composition, tighter, but for one direction and by an approximation with error terms; it is
printed beside and never decides.

Nothing here is optimistic: results are rounded up, orders that cannot be computed are left out
(every order is a bound of its own), and what is not finite is refused. A composition does not depend
on the order of its events, to the last bit.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tightframe.errors import TightframeError
from tightframe.privacy.events import (
    MAX_STEPS,
    NOISE_MULTIPLIERS,
    Event,
    Gaussian,
    PrivacyValueError,
    SubsampledGaussian,
    as_event,
    checked_delta,
    number,
)
from tightframe.results.words import rounded_up

ORDERS: tuple[float, ...] = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *(float(order) for order in range(11, 64)),
    *(float(64 * factor) for factor in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)),
)
"""Rényi orders: all that Opacus takes by default (1.1 to 10.9, 12 to 63), and on to 1024, past which its
binomials overflow. Small orders decide where epsilon is large, large ones where it is well below 1."""

_COARSE = (
    1.1,
    1.3,
    1.6,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    6.0,
    8.0,
    10.0,
    14.0,
    20.0,
    28.0,
    40.0,
    63.0,
    128.0,
    320.0,
    1024.0,
)
"""Some of the orders, to find out near which of them the best one is."""
MAX_EPSILON = 1e6
_PRV_ERROR = 0.01
"""Opacus' own default: PRV is at least this much above the best possible value."""
_PRV_POINTS = 2**22
"""PRV is left out where it would take more grid points: about 1 GB and a minute."""
_SLACK = 1e-12
"""Absolute error of one step's exp((order - 1) * RDP) in Opacus: it cuts a series at e^-30."""


class BudgetError(TightframeError):
    """A budget does not hold what is asked of it (TF-701)."""

    code = "TF-701"


@dataclass(frozen=True)
class Epsilons:
    """Epsilon of one composition by each analysis.

    Attributes:
        rdp: proved upper bound, for all compositions.
        prv: by numerical composition; None where it was not asked for, or cannot be computed.
        exact: the value itself; None unless every record took part in every release.
    """

    rdp: float
    prv: float | None
    exact: float | None

    @property
    def guaranteed(self) -> float:
        """The smallest upper bound that is proved: what a budget is held against."""
        return self.rdp if self.exact is None else min(self.exact, self.rdp)


def epsilons(events: Iterable[Event], delta: float, *, prv: bool = True) -> Epsilons:
    """Return the epsilon of a composition.

    Args:
        events: all of them, in any order.
        delta: between 0 and 1.
        prv: whether to compute PRV, which can take a second or more.

    Raises:
        PrivacyValueError: TF-700 for a wrong value, or if there is no finite epsilon.
    """
    delta = checked_delta(delta)
    composition = _compose(events)
    exact = None if composition.sampled else _exact(composition.mu, delta)
    rdp = _rdp(composition, delta)
    for value in (rdp, exact):
        if value is not None and not 0 <= value <= MAX_EPSILON:
            raise PrivacyValueError(
                f"Expected these events to have an epsilon up to {MAX_EPSILON:g}, but got {value!r}. "
                "They protect nobody: use more noise."
            )
    return Epsilons(rdp, _prv(composition, delta) if prv else None, exact)


def guaranteed(events: Iterable[Event], delta: float) -> float:
    """Return the epsilon that budgets are held against; infinite where no analysis bounds it.

    Raises:
        PrivacyValueError: TF-700 for a wrong value.
    """
    return _guaranteed(_compose(events), checked_delta(delta))


def solve(
    plan: Callable[[float], Sequence[Event]],
    *,
    epsilon: float,
    delta: float,
    spent: Iterable[Event] = (),
) -> float:
    """Return the smallest noise multiplier with which a plan keeps to a budget, rounded up to 4 decimals.

    >>> sigma = solve(lambda noise: [Gaussian(noise)] * 10, epsilon=8.0, delta=1e-5)
    >>> guaranteed([Gaussian(sigma)] * 10, 1e-5) <= 8.0 < guaranteed([Gaussian(sigma - 2e-4)] * 10, 1e-5)
    True

    Args:
        plan: the events for a noise multiplier; the larger that is, the less they must cost. Events of
            another noise (counts that are released once) may be among them.
        epsilon: the whole budget.
        delta: between 0 and 1.
        spent: what was charged before; it counts against the same budget.

    Raises:
        BudgetError: TF-701, if no noise is enough.
        PrivacyValueError: TF-700.
    """
    epsilon, delta = checked_epsilon(epsilon), checked_delta(delta)
    before = tuple(spent)
    least, most = NOISE_MULTIPLIERS

    def fits(noise: float, orders: Sequence[float]) -> bool:
        # Fewer orders give a larger bound, which is one, too; so what fits by them fits.
        return _guaranteed(_compose([*before, *plan(noise)]), delta, orders) <= epsilon

    low, high = least, 1.0
    while not fits(high, _COARSE):
        low, high = high, high * 2
        if high > most:
            used = f" beside what costs {rounded_up(guaranteed(before, delta))} already" if before else ""
            raise BudgetError(
                f"Expected a noise multiplier up to {most:g} to keep the plan under epsilon {epsilon:g} at "
                f"delta {delta:g}{used}, but got none. Allow more epsilon or plan less."
            )
    high = _bisected(low, high, 1e-2, lambda noise: fits(noise, _COARSE))
    near = _orders_near(_best_order(_compose([*before, *plan(high)]), delta))
    low = high
    while low > least and fits(low, near):
        high, low = low, max(least, low * 0.97)
    return math.ceil(_bisected(low, high, 2e-5, lambda noise: fits(noise, near)) * 1e4) / 1e4


def _bisected(low: float, high: float, tolerance: float, fits: Callable[[float], bool]) -> float:
    """Return a value that fits, at most ``tolerance`` above one that does not (relative); ``high`` fits."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def fitting(event: Event, *, epsilon: float, delta: float, spent: Iterable[Event] = ()) -> int:
    """Return the number of such releases, or of such steps, that a budget still holds; 0 if none.

    >>> fitting(Gaussian(6.0), epsilon=8.004, delta=1e-5)
    100

    Args:
        event: a release, or steps (their number is not looked at).
        epsilon: the whole budget.
        delta: between 0 and 1.
        spent: what was charged before.

    Raises:
        PrivacyValueError: TF-700.
    """
    epsilon, delta = checked_epsilon(epsilon), checked_delta(delta)
    base = _compose(spent)
    rate = event.sampling_rate if isinstance(event, SubsampledGaussian) else 1.0

    def fits(count: int) -> bool:
        return _guaranteed(base.plus(event.noise_multiplier, rate, count), delta) <= epsilon

    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
        if high > MAX_STEPS:
            return MAX_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def checked_epsilon(epsilon: object) -> float:
    """Check epsilon: a float above 0.

    Raises:
        PrivacyValueError: TF-700.
    """
    value = number("epsilon", epsilon, 0.0, MAX_EPSILON)
    if value == 0.0:
        raise PrivacyValueError(
            "Expected `epsilon` to be above 0, but got 0.0. A budget of nothing is a job without releases."
        )
    return value


@dataclass(frozen=True)
class _Composition:
    """Events of one kind put together, sorted: the same for every order in which they came.

    Attributes:
        plain: (noise multiplier, releases) of those in which every record took part.
        sampled: (noise multiplier, sampling rate, steps) of the others.
    """

    plain: tuple[tuple[float, int], ...]
    sampled: tuple[tuple[float, float, int], ...]

    @property
    def mu(self) -> float:
        """The one Gaussian that all plain ones are; rounded up."""
        total = math.fsum(count / noise**2 for noise, count in self.plain)
        return math.nextafter(math.sqrt(total), math.inf) * (1 + 1e-15) if total else 0.0

    def plus(self, noise: float, rate: float, steps: int) -> _Composition:
        """Add steps; a rate of 1 is a release in which every record takes part."""
        if rate == 1.0:
            return _Composition((*self.plain, (noise, steps)), self.sampled)
        return _Composition(self.plain, (*self.sampled, (noise, rate, steps)))


def _compose(events: Iterable[Event]) -> _Composition:
    counts: Counter[tuple[float, float]] = Counter()
    for event in events:
        as_event(event)
        if isinstance(event, Gaussian):
            counts[event.noise_multiplier, 1.0] += 1
        else:
            counts[event.noise_multiplier, event.sampling_rate] += event.steps
    ordered = sorted((noise, rate, count) for (noise, rate), count in counts.items())
    return _Composition(
        tuple((noise, count) for noise, rate, count in ordered if rate == 1.0),
        tuple(item for item in ordered if item[1] != 1.0),
    )


def _guaranteed(composition: _Composition, delta: float, orders: Sequence[float] = ORDERS) -> float:
    if composition.sampled:
        return _rdp(composition, delta, orders)
    return _exact(composition.mu, delta)


def _exact(mu: float, delta: float) -> float:
    """Return the smallest epsilon with delta(epsilon) <= delta for one Gaussian of noise 1/mu, rounded up."""
    if mu == 0.0 or _gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # Zero-concentrated DP gives an upper bound to start from (Bun & Steinke 2016, lemma 3.5).
    low, high = 0.0, mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if _gaussian_delta(mu, middle) <= delta else (middle, high)
    return math.nextafter(high, math.inf)


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta of one Gaussian at epsilon (Balle & Wang 2018, theorem 8), rounded up.

    Phi(-b) - e^epsilon * Phi(-a) with b = epsilon/mu - mu/2 and a = b + mu. Both terms have the factor
    exp(-b^2/2), which is taken out, so that neither overflows and little cancels.
    """
    from scipy.special import erfcx, ndtr  # type: ignore[import-untyped]

    below = epsilon / mu - mu / 2
    above = below + mu
    first = float(ndtr(-below))
    second = math.exp(-(below**2) / 2) * float(erfcx(above / math.sqrt(2))) / 2
    # The bound of what rounding can have taken off: the exponent's error is that of b times b.
    return first - second + first * 1e-13 * (1 + below**2) * (1 + mu)


def _rdp(composition: _Composition, delta: float, orders: Sequence[float] = ORDERS) -> float:
    """Return the smallest bound over the orders (Balle et al. 2020, theorem 21), rounded up."""
    if not composition.plain and not composition.sampled:
        return 0.0
    best = min(_bound(composition, delta, order) for order in orders)
    return max(0.0, best * (1 + 1e-12))


def _bound(composition: _Composition, delta: float, order: float) -> float:
    """Return the bound of one order; infinite where Opacus cannot compute it."""
    # A sum of non-negative terms, correctly rounded.
    steps = [count * _step_rdp(noise, rate, order) for noise, rate, count in composition.sampled]
    total = math.fsum([order * composition.mu**2 / 2, *steps])
    return total - (math.log(delta) + math.log(order)) / (order - 1) + math.log1p(-1 / order)


def _best_order(composition: _Composition, delta: float) -> float:
    """Return the order of the smallest bound among a few."""
    return min(_COARSE, key=lambda order: _bound(composition, delta, order))


def _orders_near(order: float) -> tuple[float, ...]:
    """Return the orders around one, as far as the neighbours on both sides among the few."""
    place = _COARSE.index(order)
    least, most = _COARSE[max(0, place - 1)], _COARSE[min(len(_COARSE) - 1, place + 1)]
    return tuple(item for item in ORDERS if least <= item <= most)


@lru_cache(maxsize=65536)
def _step_rdp(noise: float, rate: float, order: float) -> float:
    """Return the Rényi divergence of one step at an order; infinite where Opacus cannot compute it."""
    from opacus.accountants.analysis.rdp import compute_rdp

    try:
        value = float(compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=order))
    except (ArithmeticError, ValueError):
        value = math.inf
    slack = _SLACK / (order - 1)
    if not value >= -slack:  # also NaN
        value = math.inf
    return max(value, 0.0) * (1 + 1e-9) + slack


def _prv(composition: _Composition, delta: float) -> float | None:
    """Compose numerically by Opacus; None where its grid would be too large or its numbers fail."""
    if not composition.plain and not composition.sampled:
        return 0.0
    import numpy as np
    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV, compute_safe_domain_size

    # All plain releases are one Gaussian, which is a step that takes every record.
    history = list(composition.sampled)
    if composition.plain:
        history = [(1 / composition.mu, 1.0, 1), *history]
    history = [(noise, rate, steps) for noise, rate, steps in history]
    error = delta / 1000
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # it takes log(0) at a rate of 1, and integrates a constant tail
        try:
            half = compute_safe_domain_size(
                prvs=[PoissonSubsampledGaussianPRV(rate, noise) for noise, rate, _ in history],
                max_self_compositions=[steps for _, _, steps in history],
                eps_error=_PRV_ERROR,
                delta_error=error,
            )
            steps = sum(steps for _, _, steps in history)
            mesh = _PRV_ERROR / math.sqrt(steps * math.log(12 / error) / 2)
            if not 2 * half / mesh <= _PRV_POINTS:
                return None
            accountant = PRVAccountant()
            accountant.history = history
            value = float(accountant.get_epsilon(delta, eps_error=_PRV_ERROR, delta_error=error))
        except (ArithmeticError, ValueError, RuntimeError):
            return None
    return value if 0 <= value <= MAX_EPSILON else None
