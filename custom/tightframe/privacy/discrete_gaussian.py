"""Exact samples of the discrete Gaussian, from the operating system's generator.

The discrete Gaussian of variance parameter v gives an integer k with probability proportional to
``exp(-k**2 / (2 v))``. Noise on integers has no rounding that discloses the value, unlike floating-point
noise (Mironov 2012), and it can be masked and summed in an integer ring.

The method is that of Canonne, Kamath & Steinke, "The Discrete Gaussian for Differential Privacy"
(2020), algorithms 1 to 3, for many samples at once: v is an exact rational, every decision is a
comparison of integers, and no floating-point number takes part in any. Nothing is approximated: the
distance to the distribution above is 0. A coin of probability p is thrown by comparing a random word of
64 bits with the first 64 binary digits of p; where they are equal (once in 2**64 throws) the next 64
digits decide, computed exactly, and so on.

Random words come from ``os.urandom`` alone: there is no seed, and no fallback generator. The duration of a
call depends on the coins thrown, so nothing is promised against an attacker who can time a silo's processor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import TightframeError

Source: TypeAlias = Callable[[int], bytes]
"""Returns a number of random bytes; the operating system's generator everywhere but in tests."""
Coin: TypeAlias = Callable[[NDArray[np.intp]], NDArray[np.bool_]]
"""Throws one coin for each place."""

MIN_VARIANCE, MAX_VARIANCE = Fraction(1, 2**40), Fraction(2**112)
"""Accepted range: within it every count of the algorithm fits into 64 bits (a sample that does not
would be refused, and has a probability below exp(-1000))."""
_BLOCK = 1 << 15
"""Candidates at a time, so that intermediate values stay in cache."""
_WORD_BITS = 64
_WORD_MASK = 2**_WORD_BITS - 1


class RandomnessError(TightframeError):
    """The operating system's generator gives no random numbers (TF-720)."""

    code = "TF-720"


def discrete_gaussian(variance: Fraction | float, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Draw independent samples of the discrete Gaussian around 0.

    Args:
        variance: the parameter v above, exact; a float is the rational number that it represents. The
            variance of the samples is below v by a share of ``8 pi**2 v exp(-2 pi**2 v)``: 2e-7 at v = 1.

    Returns:
        int64 array of that shape.

    Raises:
        RandomnessError: TF-720 if the operating system gives no random numbers.
        ValueError: if the variance is not between ``MIN_VARIANCE`` and ``MAX_VARIANCE``.

    >>> noise = discrete_gaussian(2.0**40, (3, 5))
    >>> noise.shape, noise.dtype.name, bool((abs(noise) < 2**24).all())
    ((3, 5), 'int64', True)
    """
    return _sample(variance, math.prod(shape), system_bytes).reshape(shape)


def system_bytes(count: int) -> bytes:
    """Read a number of random bytes from the operating system.

    Raises:
        RandomnessError: TF-720 if it gives fewer, or an error.
    """
    try:
        drawn = os.urandom(count)
    except (OSError, NotImplementedError):
        drawn = b""
    if len(drawn) != count:
        raise RandomnessError(
            f"Expected {count} random bytes from the operating system's generator, but got {len(drawn)}. "
            "No noise was drawn and nothing was released; repair the machine's generator "
            "(`head -c 8 /dev/urandom` must work) and start again."
        )
    return drawn


def _sample(variance: Fraction | float, count: int, source: Source) -> NDArray[np.int64]:
    """Draw by algorithm 3: Laplace candidates of scale t, kept with ``exp(-(|y| - v/t)**2 / (2 v))``."""
    if not (math.isfinite(variance) and MIN_VARIANCE <= variance <= MAX_VARIANCE):
        raise ValueError(
            f"Expected argument `variance` to be from 2**-40 to 2**112, but got {float(variance):g}."
        )
    exact, coins = Fraction(variance), _Coins(source)
    samples, filled = np.empty(count, np.int64), 0
    while filled < count:
        # About two in five candidates are kept. The surplus at the end does not depend on the values, so
        # dropping it does not change the distribution.
        kept = _candidates(exact, min(_BLOCK, 3 * (count - filled) + 16), coins)[: count - filled]
        samples[filled : filled + kept.size] = kept
        filled += kept.size
    return samples


def _candidates(variance: Fraction, count: int, coins: _Coins) -> NDArray[np.int64]:
    """Return the samples accepted from ``count`` candidates."""
    bits = _scale_bits(variance)
    magnitudes, negative = _discrete_laplace(bits, count, coins)
    # With v = a/b: (|y| - v/t)**2 / (2 v) = (|y| t b - a)**2 / (2 a b t**2), in Python's integers.
    a, b, t = variance.numerator, variance.denominator, 1 << bits
    numerators = (magnitudes * (t * b) - a) ** 2
    kept = coins.exp_minus_ratio(numerators, 2 * a * b * t * t)
    # Python's integers raise if they do not fit into an int64.
    chosen = magnitudes[kept].astype(np.int64)
    return np.where(negative[kept], -chosen, chosen)


def _scale_bits(variance: Fraction) -> int:
    """Choose t = 2**bits next to the standard deviation: any t is correct, this one rejects few."""
    floor = max(1, math.floor(variance))
    bits = math.isqrt(floor).bit_length() - 1
    return bits + 1 if floor >= 1 << (2 * bits + 1) else bits


def _discrete_laplace(bits: int, count: int, coins: _Coins) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Draw by algorithm 2 for t = 2**bits, s = 1: ``P(y)`` proportional to ``exp(-|y| / t)``.

    Returns:
        Magnitudes as Python's integers (object array), and flags of negative ones; at most ``count``.
    """
    low = coins.bits(count, bits)
    # A coin of probability low/t: a second uniform number below 2**bits is smaller.
    low = low[coins.exp_minus(count, lambda places: coins.bits(places.size, bits) < low[places])]
    high, active = np.zeros(low.size, np.int64), np.arange(low.size)
    while active.size:
        active = active[coins.exp_minus_one(active.size)]
        high[active] += 1
    magnitudes = low.astype(object) + high.astype(object) * (1 << bits)
    negative = coins.bits(low.size, 1).astype(np.bool_)
    # Otherwise 0 would occur twice as often, as +0 and as -0.
    valid = ~(negative & (low == 0) & (high == 0))
    return magnitudes[valid], negative[valid]


class _Coins:
    """Coins of exact probabilities, thrown many at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def words(self, count: int) -> NDArray[np.uint64]:
        """Draw uniform words of 64 bits."""
        return np.frombuffer(self._source(8 * count), dtype="<u8")

    def bits(self, count: int, bits: int) -> NDArray[np.uint64]:
        """Draw uniform integers below ``2**bits``, for bits < 64."""
        if bits == 0:
            return np.zeros(count, np.uint64)
        return self.words(count) >> np.uint64(_WORD_BITS - bits)

    def heads(self, digits: NDArray[np.uint64], rest: Callable[[int], Fraction]) -> NDArray[np.bool_]:
        """Draw truth values, true with probability ``(digits[i] + rest(i)) / 2**64``, rest in [0, 1)."""
        words = self.words(digits.size)
        result = words < digits
        for place in np.flatnonzero(words == digits):
            result[place] = self._one(rest(int(place)))
        return result

    def _one(self, probability: Fraction) -> bool:
        """Draw one coin of a probability below 1, 64 digits at a time."""
        numerator, denominator = probability.numerator, probability.denominator
        while True:
            digits, numerator = divmod(numerator << _WORD_BITS, denominator)
            word = int(self.words(1)[0])
            if word != digits:
                return word < digits

    def one_in(self, divisor: int, count: int) -> NDArray[np.bool_]:
        """Draw truth values, true with probability ``1 / divisor``, for divisors from 2 on."""
        digits, rest = divmod(1 << _WORD_BITS, divisor)
        return self.heads(np.full(count, digits, np.uint64), lambda _: Fraction(rest, divisor))

    def exp_minus(self, count: int, coin: Coin) -> NDArray[np.bool_]:
        """Draw by algorithm 1: true with probability ``exp(-g[i])``, given coins of probability g[i] <= 1.

        Throw coins of probability g/1, g/2, g/3, ... until the first tails, which the K-th is with
        ``P(K > k) = g**k / k!``; K is odd with probability exp(-g). A coin of g/k is one of g and one of 1/k.
        """
        odd, active, k = np.zeros(count, np.bool_), np.arange(count), 1
        while active.size:
            goes_on = coin(active)
            if k > 1:
                goes_on = goes_on & self.one_in(k, active.size)
            if k % 2:
                odd[active[~goes_on]] = True
            active, k = active[goes_on], k + 1
        return odd

    def exp_minus_one(self, count: int) -> NDArray[np.bool_]:
        """Draw truth values, true with probability ``exp(-1)``."""
        return self.exp_minus(count, lambda places: np.ones(places.size, np.bool_))

    def exp_minus_ratio(self, numerators: NDArray[Any], denominator: int) -> NDArray[np.bool_]:
        """Draw truth values, true with ``exp(-numerators[i] / denominator)``; Python's integers from 0 on."""
        shifted = numerators << _WORD_BITS
        quotients = shifted // denominator
        remainders = shifted - quotients * denominator
        digits = (quotients & _WORD_MASK).astype(np.uint64)
        remaining = (quotients >> _WORD_BITS).astype(np.int64)
        # exp(-whole): that many coins of exp(-1), thrown until the first tails.
        result, active = np.ones(len(numerators), np.bool_), np.flatnonzero(remaining)
        while active.size:
            heads = self.exp_minus_one(active.size)
            result[active[~heads]] = False
            remaining[active] -= 1
            active = active[heads & (remaining[active] > 0)]
        places = np.flatnonzero(result)

        def fraction(chosen: NDArray[np.intp]) -> NDArray[np.bool_]:
            current = places[chosen]
            return self.heads(digits[current], lambda i: Fraction(int(remainders[current[i]]), denominator))

        result[places] = self.exp_minus(places.size, fraction)
        return result
