"""A proved upper bound on epsilon from privacy-loss distributions.

The pair of distributions P, Q of one step, a Gaussian that takes the record with probability q, dominates
the step in each direction, P against Q if the record is removed and Q against P if it is added, also
in adaptive compositions (Zhu, Dong & Wang 2022, theorems 10 and 11). A step's loss is L = ln(dP/dQ) under
P; with the sum S of all, delta(epsilon) = E[(1 - e^(epsilon - S))+]. That is bounded from above:

1. *Grid.* The loss is moved to multiples of h so that each interval keeps its mass under P and under Q
   ("connect the dots", Doroshenko et al. 2022). This spreads dP/dQ at the same mean, so it dominates; the
   error is of order h^2 a step, where rounding every loss up (Koskela et al. 2020) has h. Mass below the grid
   is rounded up to its lowest point, and mass above it is counted at infinity.
2. *Composition* by FFT (Koskela et al. 2020; Gopi et al. 2021), of masses tilted by e^(lambda * L), which
   puts the weight where delta is determined, so that rounding is relative to delta and not to 1 (as in
   Alghamdi et al. 2023). Sums leave the window of the FFT and come back on its other side: those from below
   only add to the bound; those above are counted at infinity, by Chernoff's bound.
3. *Rounding.* Each source is bounded and added: functions of numpy and scipy (relative error 1e-13 for the
   normal distribution), inverses of the loss, transforms, powers and sums.

A coarser grid gives a larger bound, which is valid, too. Where even that grid would be too large, there is no
bound. Nothing needs Opacus or torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = tuple[float, float, int]
"""Noise multiplier, sampling rate, steps."""

FINE, COARSE = 2e-4, 4e-3
"""Approximate relative addition of the grid to epsilon, for reports and for searches."""
MAX_KINDS = 256
MAX_POINTS = 2**21
_MAX_WORK = 2**23
"""Most points of the grids of all kinds together."""
_LEAST_EPSILON, _MAX_EPSILON = 1e-6, 1000.0
"""Epsilons below the least need not be distinguished; above the largest, RDP is as good."""
_UNIT = 2.0**-53
_TAIL = 1e-5
"""Share of delta for each kind of cut tail."""
_TILTS = np.geomspace(1e-2, 1e7, 121)
_NODES = 1201


def upper_bound(kinds: Sequence[Kind], delta: float, tolerance: float = FINE) -> float | None:
    """Return an upper bound on epsilon at delta, for removing and for adding a record; None if too expensive.

    >>> 1.98 < upper_bound([(1.0, 0.05, 20)], 1e-5) < 1.99
    True

    Args:
        kinds: noise multiplier, sampling rate (1: all take part) and number of steps, each pair once, sorted.
        delta: between 0 and 1.
        tolerance: approximate relative addition of the grid to epsilon.
    """
    if not kinds:
        return 0.0
    if len(kinds) > MAX_KINDS:
        return None
    largest = 0.0
    for removed in (True, False):
        # Masses of 0 have the logarithm -inf; overflows far left of epsilon are never used.
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            try:
                bound = _direction(kinds, delta, tolerance, removed, largest)
                if bound is None and largest:  # the window was too small for such a coarse grid
                    bound = _direction(kinds, delta, tolerance, removed, 0.0)
            except (
                ArithmeticError,
                ValueError,
            ):  # overflow: no bound is better than a wrong one
                return None
        if bound is None or not 0.0 <= bound < math.inf:
            return None
        largest = max(largest, bound)
        if all(rate == 1.0 for _, rate, _ in kinds):
            break  # the same in both directions
    return largest


@dataclass(frozen=True)
class _Step:
    """One step in one direction, with the noise's axis turned so that the loss grows along it.

    Attributes:
        noise: standard deviation; the record moves the mean by 1.
        rate: q.
        removed: P = (1 - q) N(0, s^2) + q N(1, s^2) against Q = N(0, s^2); else Q against P, mirrored.
    """

    noise: float
    rate: float
    removed: bool

    def loss(self, place: Array) -> Array:
        """Return the loss at places."""
        sign = 1.0 if self.removed else -1.0
        exponent = (sign * 2 * place - 1) / (2 * self.noise**2)
        if self.rate == 1.0:
            return sign * exponent
        return sign * np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + exponent)

    def place(self, loss: Array) -> Array:
        """Return the place where the loss has a value; infinite beyond its range."""
        sign = 1.0 if self.removed else -1.0
        if self.rate == 1.0:
            return sign * (self.noise**2 * (sign * loss) + 0.5)
        least = math.log1p(-self.rate)
        above = sign * loss - least
        inside = above > 0
        above = np.where(inside, above, 1.0)
        log = (least - math.log(self.rate)) + above + np.log(-np.expm1(-above))
        return sign * np.where(inside, self.noise**2 * log + 0.5, -math.inf)

    def tails(self, place: Array) -> tuple[Array, Array]:
        """Return the probabilities above each place, under the step's own measure and under the other."""
        from scipy.special import ndtr  # type: ignore[import-untyped]

        sign = 1.0 if self.removed else -1.0
        without: Array = ndtr(-place / self.noise)
        shifted: Array = ndtr((sign - place) / self.noise)
        with_record = (1 - self.rate) * without + self.rate * shifted
        return (with_record, without) if self.removed else (without, with_record)

    def ends(self, deviations: float) -> tuple[float, float]:
        """Return the losses between which all mass but a normal distribution's tails lies."""
        low, high = -deviations * self.noise, deviations * self.noise
        if self.removed:
            high += 1.0
            low += 1.0 if self.rate == 1.0 else 0.0
        losses = self.loss(np.array([low, high]))
        return float(losses[0]), float(losses[1])


@dataclass(frozen=True)
class _Discrete:
    """A dominating distribution on multiples of the grid's spacing.

    Attributes:
        first: of the multiples.
        log_masses: of the multiples from there on; -inf for no mass.
        infinite: mass at infinity.
        shift: largest excess of a true loss over its rounded value.
    """

    first: int
    log_masses: Array
    infinite: float
    shift: float


def _discrete(step: _Step, spacing: float, deviations: float) -> _Discrete:
    """Return the dominating distribution of a step on a grid, rounded up."""
    low, high = step.ends(deviations)
    first, last = math.floor(low / spacing), math.ceil(high / spacing)
    losses: Array = np.arange(first, last + 1, dtype=np.float64) * spacing
    places = step.place(losses)
    own, other = step.tails(places)
    largest = max(abs(low), abs(high)) + spacing
    # Loss of the computed place against the grid's: its slope is at most 1/s^2, and small where
    # ln(above) is large.
    logs = abs(math.log(step.rate)) + (abs(math.log1p(-step.rate)) if step.rate < 1.0 else 0.0)
    reach = deviations + 1 / step.noise
    shift = 32 * _UNIT * (2 + largest + logs + reach / step.noise)
    # Relative error of a tail: that of ndtr, and of its argument (|z| + 1) times the argument's own.
    relative = 1e-13 + 16 * _UNIT * (reach + 1) ** 2
    width = -math.expm1(-spacing)
    upper = np.minimum(own * (1 + relative), 1.0)
    # Mass at or above each grid point but the first: between its own tail and the one before.
    curve = own - np.exp(losses) * other
    error = (8 * relative + 2 * shift) * own[:-1] / width
    above = (curve[:-1] - (1 - width) * curve[1:]) / width + error
    above = np.minimum(np.maximum(above, upper[1:]), upper[:-1])
    tails = np.minimum.accumulate(np.concatenate([[1.0], above, [upper[-1]]]))
    return _Discrete(first, np.log(tails[:-1] - tails[1:]), float(tails[-1]), shift)


@lru_cache(maxsize=512)
def _moments(step: _Step, deviations: float) -> Array:
    """Return ln E[e^(t L)] of one step at each tilt, by a sum over places: for choices, not for the proof."""
    low, high = -deviations * step.noise, deviations * step.noise + 1.0
    places = np.linspace(low, high, _NODES)
    own, _ = step.tails(places)
    weights = np.log(np.maximum(own[:-1] - own[1:], 1e-300))
    losses = step.loss((places[:-1] + places[1:]) / 2)
    exponents = weights + _TILTS[:, None] * losses
    most = exponents.max(axis=1)
    total: Array = most + np.log(np.exp(exponents - most[:, None]).sum(axis=1))
    return total


@dataclass(frozen=True)
class _Window:
    """Window and resolution of the computation.

    Attributes:
        tilt: lambda.
        far: a larger tilt, by which the tail above the window is bounded.
        spacing: h.
        first: multiple of h at which the window begins.
        points: their number, even.
    """

    tilt: float
    far: float
    spacing: float
    first: int
    points: int


def _window(
    steps: Sequence[_Step], kinds: Sequence[Kind], delta: float, allowed: float, least: float
) -> _Window | None:
    """Choose tilt, grid and window; any choice gives a valid bound, this one a small one.

    Args:
        steps: of the kinds, in one direction.
        kinds: with the numbers of steps.
        delta: between 0 and 1.
        allowed: approximate relative addition of the grid to epsilon.
        least: epsilon of the other direction: values below need not be resolved.
    """
    number = sum(count for _, _, count in kinds)
    deviations = _deviations(delta, number)
    moments = np.zeros_like(_TILTS)
    for step, (_, _, count) in zip(steps, kinds, strict=True):
        moments += count * _moments(step, deviations)
    # The bound of each moment (Balle et al. 2020, theorem 21).
    bounds = (moments - math.log(delta) + _TILTS * np.log(_TILTS) - (1 + _TILTS) * np.log1p(_TILTS)) / _TILTS
    best = 1 + int(np.argmin(bounds[1:-20]))
    tilt, epsilon = _lowest(bounds, best)
    if not epsilon <= _MAX_EPSILON:
        return None
    epsilon = max(epsilon, _LEAST_EPSILON)
    # Any smaller tilt is valid, too; where the moments have a kink, the window is small only further down.
    spans = [
        _span(moments, candidate, epsilon, delta)
        for candidate in (tilt, *(float(_TILTS[best - back]) for back in range(1, min(best, 9))))
    ]
    width, tilt_of_window, far, low, high = min(spans)
    if not width < math.inf:
        return None
    # A step's spread adds about (tilt + 1) h^2 / 12 to epsilon, and at most one.
    spread = 12 * allowed * max(epsilon, least) / (number * (tilt + 1))
    # It changes smoothly with the events, so that the bound does, too.
    spacing = min(math.sqrt(spread), 1.0)
    high += 4 * allowed * max(epsilon, least)
    for _ in range(4):
        points = _transform_size((high - low) / spacing + 32)
        ends = [step.ends(deviations) for step in steps]
        sizes = [(top - bottom) / spacing for bottom, top in ends]
        if max(points, *sizes) <= MAX_POINTS and sum(sizes) + points * len(steps) <= _MAX_WORK:
            return _Window(tilt_of_window, far, spacing, math.floor(low / spacing), points)
        spacing *= 2
    return None


def _span(
    moments: Array, tilt: float, epsilon: float, delta: float
) -> tuple[float, float, float, float, float]:
    """Return the needed width of the window for a tilt, the tilt, a larger one, and both ends.

    Mass that wraps around the window stays far below delta, by Chernoff's bounds.
    """
    cut = math.log(delta * _TAIL)
    beyond, below = np.greater(_TILTS, tilt * 1.1), np.less(_TILTS, tilt / 1.1)
    tops = (moments[beyond] - tilt * epsilon - cut) / (_TILTS[beyond] - tilt)
    bottoms = (tilt * epsilon - moments[below] + cut) / (tilt - _TILTS[below])
    far = int(np.argmin(tops))
    low = max(epsilon + cut / tilt, float(bottoms.max(initial=-math.inf)))
    high = float(tops[far])
    return high - low, tilt, float(_TILTS[beyond][far]), low, high


def _transform_size(least: float) -> int:
    """Return an even length with fast transforms."""
    from scipy.fft import next_fast_len  # type: ignore[import-untyped]

    return 2 * int(next_fast_len(math.ceil(min(least, 4 * MAX_POINTS) / 2), real=True))


def _lowest(bounds: Array, best: int) -> tuple[float, float]:
    """Return tilt and value of the vertex through the lowest bound and its neighbours, if they are near."""
    before, at, after = (float(value) for value in bounds[best - 1 : best + 2])
    curvature = before - 2 * at + after
    if not (curvature > 0 and at <= min(before, after) and max(before, after) < 1.5 * at):
        return float(_TILTS[best]), at
    part = (before - after) / (2 * curvature)
    tilt = float(_TILTS[best]) * float(_TILTS[1] / _TILTS[0]) ** part
    return tilt, at - curvature * part**2 / 2


def _deviations(delta: float, number: int) -> float:
    """Return the number of kept deviations of the noise; rounded up so that few values occur."""
    from scipy.special import ndtri

    return math.ceil(-4 * float(ndtri(delta * _TAIL / number))) / 4


def _direction(
    kinds: Sequence[Kind], delta: float, tolerance: float, removed: bool, least: float
) -> float | None:
    """Return the bound for one direction."""
    steps = [_Step(noise, rate, removed) for noise, rate, _ in kinds]
    window = _window(steps, kinds, delta, tolerance, least)
    if window is None:
        return None
    number = sum(count for _, _, count in kinds)
    parts = [_discrete(step, window.spacing, _deviations(delta, number)) for step in steps]
    counts = [count for _, _, count in kinds]
    losses: Array = (window.first + np.arange(window.points, dtype=np.float64)) * window.spacing
    masses, error, log_scale, relative = _composed(parts, counts, window)
    # Each mass rounded up: the transform's error, and the relative error of tilted masses and of scales.
    relative = math.expm1(
        relative + 64 * _UNIT * (abs(log_scale) + window.tilt * float(np.abs(losses).max()))
    )
    if not relative < 1e-2:
        return None
    masses = np.maximum(masses + error, 0.0) * (1 + relative)
    infinite = _above(parts, counts, window.far, window.spacing, float(losses[-1]))
    infinite += math.fsum(count * part.infinite for part, count in zip(parts, counts, strict=True))
    start = max(0, -window.first)  # no epsilon below 0, nor below the window
    if start >= window.points - 1:
        return None
    losses = losses[start:]
    weights = masses[start:] * np.exp(log_scale - window.tilt * losses)
    shift = math.fsum(count * part.shift for part, count in zip(parts, counts, strict=True))
    epsilon = _smallest(losses, weights, delta - infinite * (1 + 1e-9))
    return None if epsilon is None else (epsilon + shift) * (1 + 1e-12)


def _composed(
    parts: Sequence[_Discrete], counts: Sequence[int], window: _Window
) -> tuple[Array, float, float, float]:
    """Return the composition's tilted masses over the window, and bounds on their errors.

    Returns:
        masses, in the order of the window; the absolute error of each of them; ln of the scale by which
        an untilted mass is larger, e^(scale - tilt * loss); the relative error of tilting.
    """
    size = window.points
    transform = 20 * _UNIT * math.log2(size)  # Higham 2002, theorem 24.2, with room for other radices
    product = np.ones(size // 2 + 1, dtype=np.complex128)
    log_bound = np.zeros(size // 2 + 1)
    sources = []
    scales, relative = [], 0.0
    for part, count in zip(parts, counts, strict=True):
        scale, uncertain = _log_moment(part, window.tilt, window.spacing)
        relative += count * uncertain
        places = part.first + np.arange(len(part.log_masses))
        tilted = np.exp(part.log_masses + window.tilt * window.spacing * places - scale)
        folded = np.bincount(places % size, weights=tilted, minlength=size)
        spectrum = np.fft.rfft(folded)
        of_part = transform * math.sqrt(size * float(np.dot(folded, folded)))
        most = np.abs(spectrum) + of_part
        log_most = np.log(most)
        log_bound += count * log_most
        sources.append((count * (of_part + 8 * _UNIT * most), log_most))
        product *= _power(spectrum, count)
        scales.append(count * scale)
    # |a b - a' b'| <= |a - a'| max|b| + |b - b'| max|a|, over all steps.
    error = math.fsum(
        2 / size * float(np.sum(each * np.exp(log_bound - log_most))) for each, log_most in sources
    )
    error += transform * math.sqrt(2 / size * float(np.sum(np.abs(product) ** 2)))
    masses = np.roll(np.fft.irfft(product, size), -(window.first % size))
    return masses, error * (1 + 1e-6), math.fsum(scales), relative


def _power(values: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """Return a power by squaring: relative error at most 8 units times the exponent."""
    result = np.ones_like(values)
    while exponent:
        if exponent & 1:
            result *= values
        exponent >>= 1
        if exponent:
            values = values * values
    return result


def _log_moment(part: _Discrete, tilt: float, spacing: float) -> tuple[float, float]:
    """Return ln of the sum of masses times e^(tilt * loss), without infinity, and its largest error."""
    last = part.first + len(part.log_masses) - 1
    exponents = part.log_masses + tilt * spacing * np.arange(part.first, last + 1)
    most = float(exponents.max())
    value = most + math.log(float(np.exp(exponents - most).sum()))
    reach = tilt * spacing * max(abs(part.first), abs(last))
    return value, 8 * _UNIT * (800 + reach + abs(value))


def _above(
    parts: Sequence[_Discrete], counts: Sequence[int], tilt: float, spacing: float, top: float
) -> float:
    """Return Chernoff's bound on the mass of the composition above a loss."""
    exponent = -tilt * top * (1 - 1e-14)
    for part, count in zip(parts, counts, strict=True):
        value, uncertain = _log_moment(part, tilt, spacing)
        exponent += count * (value + uncertain)
    return math.exp(min(0.0, exponent + 1e-9))


def _smallest(losses: Array, weights: Array, delta: float) -> float | None:
    """Return the smallest epsilon, from the first loss on, at which delta holds; None if there is none.

    It is the one with sum of weights * (1 - e^(epsilon - loss))+ <= delta.
    """
    if not delta > 0:
        return None
    offsets = losses - losses[0]
    if offsets[-1] > 600:  # e^-offset must stay an ordinary number
        return None
    ratios = weights * np.exp(-offsets)
    # Sums over all from each one on, and their rounding.
    plain = np.cumsum(weights[::-1])[::-1] * (1 + 1e-9)
    scaled = np.cumsum(ratios[::-1])[::-1] * (1 - 1e-9)
    # delta at each loss but the last; its own term is 0.
    curve = plain[1:] - np.exp(offsets[:-1]) * scaled[1:]
    fitting = np.flatnonzero(curve <= delta)  # except where it overflowed
    if not len(fitting):
        return None
    place = int(fitting[0])
    if place == 0:
        return float(losses[0])
    # Between two losses the curve is linear in e^epsilon.
    offset = math.log((float(plain[place]) - delta) / float(scaled[place]))
    return float(losses[0]) + min(max(offset, float(offsets[place - 1])), float(offsets[place]))
