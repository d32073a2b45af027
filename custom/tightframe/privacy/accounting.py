"""Epsilon at a delta of composed events.

Four analyses. *Exact*: where every record takes part in every release, any number of Gaussian
mechanisms is one Gaussian with mu = sqrt(sum 1/z^2) (Dong et al. 2019), whose epsilon is known in closed
form (Balle & Wang 2018). *PLD*: else privacy-loss distributions give an upper bound for both directions, add
and remove, within about 0.0002 of the value (``loss_distributions``). *RDP*: an upper bound for any
composition of subsampled Gaussians, for both directions (Mironov, Talwar & Zhang 2019), computed by Opacus;
it is used where the grid of PLD would be too large, as for billions of steps, hundreds of kinds of events, or
where epsilon is in the hundreds. *PRV*: Opacus' numerical composition, for one direction and by an
approximation with error terms; it is reported, and never used for a decision.

Nothing here is optimistic: results are rounded up, orders that cannot be computed are left out (every order
is a bound by itself), and values that are not finite are refused. A composition does not depend on the order
of its events, to the last bit.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

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
from tightframe.privacy.loss_distributions import COARSE, FINE, upper_bound
from tightframe.results.words import rounded_up

ORDERS: tuple[float, ...] = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *(float(order) for order in range(11, 64)),
    *(float(64 * factor) for factor in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)),
)
"""Rényi orders: Opacus' defaults (1.1 to 10.9, 12 to 63), and further ones to 1024, past which its binomials
overflow. Small orders are best where epsilon is large, large ones where it is well below 1."""

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
"""Some of the orders, to locate the best one."""
MAX_EPSILON = 1e6
_PRV_ERROR = 0.01
"""Opacus' own default: PRV is at least this much above the best possible value."""
_PRV_POINTS = 2**22
"""PRV is left out where it would take more grid points: about 1 GB and a minute."""
_FEW = 40
"""Prefixes of a ledger for which PLD is computed."""
_SLACK = 1e-12
"""Absolute error of one step's exp((order - 1) * RDP) in Opacus: it cuts a series at e^-30."""


class BudgetError(TightframeError):
    """A budget is too small for a request (TF-701)."""

    code = "TF-701"


@dataclass(frozen=True)
class Epsilons:
    """Epsilon of one composition by each analysis.

    Attributes:
        rdp: proved upper bound, for all compositions.
        pld: proved upper bound, tighter; None if the exact value is known, or its grid would be too large.
        prv: by numerical composition; None where it was not requested, or cannot be computed.
        exact: the value itself; None unless every record took part in every release.
    """

    rdp: float
    pld: float | None
    prv: float | None
    exact: float | None

    @property
    def guaranteed(self) -> float:
        """The smallest proved upper bound, which is compared with a budget."""
        return min(value for value in (self.rdp, self.pld, self.exact) if value is not None)


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
    pld = _pld(composition.kinds, delta, FINE) if composition.sampled else None
    return Epsilons(rdp, pld, _prv(composition, delta) if prv else None, exact)


def counts_on_others(spent: float, alone: float) -> bool:
    """Check whether an epsilon would be larger if no other silo added noise.

    Args:
        spent: guaranteed.
        alone: guaranteed, without others' noise.
    """
    return alone > spent * (1 + 1e-6)


def guaranteed(events: Iterable[Event], delta: float) -> float:
    """Return the epsilon that is compared with budgets; infinite where no analysis bounds it.

    Raises:
        PrivacyValueError: TF-700 for a wrong value.
    """
    return _guaranteed(_compose(events), checked_delta(delta))


def running(events: Sequence[Event], delta: float) -> list[float]:
    """Return the epsilon of each prefix of the events, as bounds that never fall.

    The last one is ``guaranteed`` of all. For many events PLD is computed for only some prefixes, evenly
    spread, and on the coarse grid; those between have the bound by RDP, or the next one by PLD if that is
    smaller.

    Raises:
        PrivacyValueError: TF-700 for a wrong value.
    """
    delta = checked_delta(delta)
    every = math.ceil(len(events) / _FEW)
    bounds: list[float] = []
    least = math.inf
    for count in range(len(events), 0, -1):
        composition = _compose(events[:count])
        looked = not composition.sampled or (len(events) - count) % every == 0
        # Spending never falls over time.
        if looked:
            bound = _guaranteed(composition, delta, tolerance=COARSE if bounds else FINE)
        else:
            bound = _rdp(composition, delta)
        least = min(least, bound)
        bounds.append(least)
    return bounds[::-1]


def solve(
    plan: Callable[[float], Sequence[Event]],
    *,
    epsilon: float,
    delta: float,
    spent: Iterable[Event] = (),
) -> float:
    """Return the smallest noise multiplier with which a plan stays within a budget, rounded up to 4 decimals.

    >>> sigma = solve(lambda noise: [Gaussian(noise)] * 10, epsilon=8.0, delta=1e-5)
    >>> guaranteed([Gaussian(sigma)] * 10, 1e-5) <= 8.0 < guaranteed([Gaussian(sigma - 2e-4)] * 10, 1e-5)
    True

    Args:
        plan: the events for a noise multiplier; the larger that is, the less they must cost. Events with a
            fixed noise (counts that are released once) may be among them.
        epsilon: the whole budget.
        delta: between 0 and 1.
        spent: events charged before; they count against the same budget.

    Raises:
        BudgetError: TF-701, if no noise is enough.
        PrivacyValueError: TF-700.
    """
    epsilon, delta = checked_epsilon(epsilon), checked_delta(delta)
    before = tuple(spent)
    least, most = NOISE_MULTIPLIERS

    def coarse(noise: float) -> float:
        # A coarser grid and fewer orders give larger bounds, which are valid, too.
        return _guaranteed(_compose([*before, *plan(noise)]), delta, _COARSE, COARSE)

    low, high = least, 1.0
    while coarse(high) > epsilon:
        low, high = high, high * 2
        if high > most:
            used = f" beside what costs {rounded_up(guaranteed(before, delta))} already" if before else ""
            raise BudgetError(
                f"Expected a noise multiplier up to {most:g} to keep the plan under epsilon {epsilon:g} at "
                f"delta {delta:g}{used}, but got none. Allow more epsilon or plan less."
            )
    if low == least:  # halved, because no grid is small enough where noise is far too small
        low = high / 2
        while low > least and coarse(low) <= epsilon:
            high, low = low, max(least, low / 2)
    high = _least(low, high, 1e-2, coarse, epsilon)
    # By RDP the best order is near the best one of a few; PLD does not use orders.
    composed = _compose([*before, *plan(high)])
    by_pld = not composed.sampled or _pld(composed.kinds, delta, FINE) is not None
    near = ORDERS if by_pld else _orders_near(min(_COARSE, key=lambda order: _bound(composed, delta, order)))

    def fine(noise: float) -> float:
        return _guaranteed(_compose([*before, *plan(noise)]), delta, near)

    while fine(high) > epsilon:  # larger on another grid
        high *= 1.001
    low = high
    while low > least and fine(low) <= epsilon:
        high, low = low, max(least, low * 0.97)
    multiplier = math.ceil(_least(low, high, 2e-5, fine, epsilon) * 1e4) / 1e4
    while fine(multiplier) > epsilon:
        multiplier = round(multiplier + 1e-4, 4)
    return multiplier


def _least(
    low: float, high: float, tolerance: float, cost: Callable[[float], float], epsilon: float
) -> float:
    """Return noise that costs at most epsilon, at most ``tolerance`` above noise that costs more (relative).

    ``high`` costs at most epsilon, ``low`` more. It tries points near where a power law between the two
    reaches epsilon, alternately a little above and below it, and the middle every third time.
    """
    above, below = math.inf, cost(high)
    for turn in itertools.count():
        if high - low <= tolerance * high:
            return high
        place = (low + high) / 2
        if turn % 3 < 2 and 0 < below < epsilon < above < math.inf:
            share = math.log(above / epsilon) / math.log(above / below)
            near = low * (high / low) ** share * (1 + (0.4, -0.4)[turn % 3] * tolerance)
            place = near if low < near < high else place
        if place in (low, high):
            return high
        if (value := cost(place)) <= epsilon:
            high, below = place, value
        else:
            low, above = place, value
    raise AssertionError  # pragma: no cover - the loop has no end of its own


def fitting(event: Event, *, epsilon: float, delta: float, spent: Iterable[Event] = ()) -> int:
    """Return the number of such releases, or of such steps, that still fit into a budget; 0 if none.

    >>> fitting(Gaussian(6.0), epsilon=8.004, delta=1e-5)
    100

    Args:
        event: a release, or steps (their number is ignored).
        epsilon: the whole budget.
        delta: between 0 and 1.
        spent: what was charged before.

    Raises:
        PrivacyValueError: TF-700.
    """
    epsilon, delta = checked_epsilon(epsilon), checked_delta(delta)
    base = _compose(spent)
    rate = event.sampling_rate if isinstance(event, SubsampledGaussian) else 1.0

    def fits(count: int, tolerance: float) -> bool:
        composition = base.plus(event.noise_multiplier, rate, count)
        return _guaranteed(composition, delta, tolerance=tolerance) <= epsilon

    low, high = 0, 1
    while fits(high, COARSE):
        low, high = high, high * 2
        if high > MAX_STEPS:
            return MAX_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, COARSE) else (low, middle)
    # The fine grid may have room for some more.
    high = low + 1
    while fits(high, FINE):
        low, high = high, min(high + max(1, high // 100), MAX_STEPS + 1)
        if low == MAX_STEPS:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, FINE) else (low, middle)
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
    """Events merged by kind and sorted: independent of their order.

    Attributes:
        plain: (noise multiplier, releases) of those in which every record took part.
        sampled: (noise multiplier, sampling rate, steps) of the others.
    """

    plain: tuple[tuple[float, int], ...]
    sampled: tuple[tuple[float, float, int], ...]

    @cached_property
    def mu(self) -> float:
        """The one Gaussian equivalent to all plain ones; rounded up."""
        total = math.fsum(count / noise**2 for noise, count in self.plain)
        return math.nextafter(math.sqrt(total), math.inf) * (1 + 1e-15) if total else 0.0

    @property
    def kinds(self) -> tuple[tuple[float, float, int], ...]:
        """Noise multiplier, rate and steps of each kind, sorted; all plain ones as one, rounded down."""
        counts: Counter[tuple[float, float]] = Counter()
        for noise, rate, steps in self.sampled:
            counts[noise, rate] += steps
        if self.plain:
            counts[1 / self.mu * (1 - 1e-15), 1.0] = 1
        return tuple(sorted((noise, rate, steps) for (noise, rate), steps in counts.items()))

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


def _guaranteed(
    composition: _Composition, delta: float, orders: tuple[float, ...] = ORDERS, tolerance: float = FINE
) -> float:
    """Return the smallest proved bound. Where PLD gives one, RDP is larger, and Opacus is not used."""
    if not composition.sampled:
        return _exact(composition.mu, delta)
    bound = _pld(composition.kinds, delta, tolerance)
    return _rdp(composition, delta, orders) if bound is None else bound


@lru_cache(maxsize=4096)
def _pld(kinds: tuple[tuple[float, float, int], ...], delta: float, tolerance: float) -> float | None:
    return upper_bound(kinds, delta, tolerance)


@lru_cache(maxsize=4096)
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
    # Bound of the rounding error: the exponent's error is that of b times b.
    return first - second + first * 1e-13 * (1 + below**2) * (1 + mu)


@lru_cache(maxsize=4096)
def _rdp(composition: _Composition, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
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


def _orders_near(order: float) -> tuple[float, ...]:
    """Return the orders around one, up to its neighbours on both sides among the coarse orders."""
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


@lru_cache(maxsize=1024)
def _prv(composition: _Composition, delta: float) -> float | None:
    """Compose numerically by Opacus; None where its grid would be too large or its numbers fail."""
    if not composition.plain and not composition.sampled:
        return 0.0
    import numpy as np
    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV, compute_safe_domain_size

    # All plain releases are one Gaussian, equivalent to a step that takes every record.
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
