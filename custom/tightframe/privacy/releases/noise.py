"""Discrete Gaussian noise on a vector of integers, shared by the silos: common code of all releases.

Why the continuous Gaussian's epsilons hold for it. Let the noise have variance ``v + s**2``, with
s**2 = ``ROUNDING_VARIANCE``. Rounding a *continuous* Gaussian of variance v to an integer k at random, with
the weights ``exp(-(k - x)**2 / (2 s**2))``, gives the discrete Gaussian of variance ``v + s**2``, up to a
factor ``1 +- 4 exp(-2 pi**2 s**2)`` in each probability, that is ``1 +- 3e-77`` (Peikert, "An Efficient and
Parallel Gaussian Sampler for Lattices", 2010, theorem 3.1); and a sum of discrete Gaussians is one of the
summed variance, up to such a factor (Kairouz, Liu & Steinke, "The Distributed Discrete Gaussian Mechanism",
2021). A release is therefore post-processing of the Gaussian mechanism with noise multiplier z, and any bound
for that one, including the exact one, holds here, up to 1e-65 in epsilon for a million integers and a
thousand silos. The additional 9 squared units are negligible compared with a variance around ``2**40``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.privacy.discrete_gaussian import discrete_gaussian
from tightframe.privacy.events import NOISE_MULTIPLIERS, Gaussian, PrivacyValueError, number, whole

ROUNDING_VARIANCE = 9
"""s**2 above, added to every silo's variance; also the least variance to which it is added."""
TAIL_DEVIATIONS = 12
"""A discrete Gaussian's tail is no heavier than the Gaussian's: for four million integers, one of
them is further out than this with a probability below 2**-80."""
MAX_SILOS, MAX_RECORDS = 2**16, 2**40
EXACT_FLOAT = 2**53
"""Integers below it are exact as float64."""


class NoisyRelease(ABC):
    """A vector of integers in units of ``1 / grid``, released with total noise of ``z D``.

    Attributes:
        noise_multiplier: z.
    """

    noise_multiplier: float

    @property
    @abstractmethod
    def grid(self) -> int:
        """Units in 1."""

    @property
    @abstractmethod
    def squared_sensitivity(self) -> int:
        """``D**2``: the largest squared L2 change by the hidden unit, in squared units."""

    def share_variance(self, honest: int) -> int:
        """Return the variance of one silo's share of the noise, in squared units.

        Raises:
            PrivacyValueError: TF-700; see ``variance_of_share``.
        """
        return variance_of_share(self.noise_multiplier, self.squared_sensitivity, honest)

    def deviation(self, *, silos: int, honest: int) -> float:
        """Return the standard deviation of the noise in one number of an opened total.

        Args:
            silos: in the sum, each with its share.
            honest: s - c.
        """
        return math.sqrt(whole("silos", silos, 1, MAX_SILOS) * self.share_variance(honest)) / self.grid

    def tail(self) -> int:
        """Bound a silo's noise, in units, as if it added all: only enrolment shows who shares it."""
        return math.isqrt(TAIL_DEVIATIONS**2 * self.share_variance(1)) + 1

    def share(self, shape: tuple[int, ...], honest: int) -> NDArray[np.int64]:
        """Draw one silo's share of the noise, from the operating system's generator.

        Charge a release of records to the ledger before this is called.

        Args:
            honest: s - c: the shares of this number of silos together have the promised variance ``z**2
                D**2``.

        Raises:
            RandomnessError: TF-720, if the operating system gives no random numbers.
        """
        return discrete_gaussian(self.share_variance(honest), shape)

    def as_numbers(self, units: NDArray[np.int64]) -> NDArray[np.float64]:
        """Convert integers to the float64 numbers that a field carries: exact, below ``2**53`` units."""
        return units.astype(np.float64) / self.grid

    def as_units(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Convert a field's total back to integers."""
        units: NDArray[np.int64] = np.rint(np.asarray(numbers, np.float64) * self.grid).astype(np.int64)
        return units

    def events(self, releases: int) -> tuple[Gaussian, ...]:
        """Return the events of a number of releases: every record is in each, nothing is amplified."""
        return (Gaussian(noise_multiplier=self.noise_multiplier),) * releases

    def lone_event(self, honest: int) -> Gaussian | None:
        """Return the event of one release if no other silo adds noise: ``z / sqrt(s - c)``.

        None where ``honest`` is 1: all of the noise is the silo's own then.

        Raises:
            PrivacyValueError: TF-700; see ``variance_of_share``.
        """
        self.share_variance(honest)
        return None if honest == 1 else Gaussian(noise_multiplier=self.noise_multiplier / math.sqrt(honest))


def variance_of_share(noise_multiplier: float, squared_sensitivity: int, honest: int) -> int:
    """Return ``z**2 D**2 / honest``, rounded up, plus 9: ``honest`` silos add at least ``z**2 D**2``.

    Args:
        noise_multiplier: z.
        squared_sensitivity: ``D**2``, in squared units of the grid.
        honest: s - c, the least number of honest silos in any sum that can be opened
            (``rounds.privacy_plan.honest_silos``). A sum over more silos has more noise than promised: with n
            silos ``sqrt(n / (s - c))`` times the deviation.
            1 is local privacy: the silo's own noise is the promised one.

    Raises:
        PrivacyValueError: TF-700, if an argument is invalid, or the grid is too coarse for the noise.
    """
    noise = Fraction(number("noise_multiplier", noise_multiplier, *NOISE_MULTIPLIERS))
    share = noise**2 * squared_sensitivity / whole("honest", honest, 1, MAX_SILOS)
    if share < ROUNDING_VARIANCE:
        raise PrivacyValueError(
            f"Expected the variance of a silo's noise to be at least {ROUNDING_VARIANCE} squared steps of "
            f"the grid, but got {float(share):.3g}. Use more `fractional_bits`."
        )
    return math.ceil(share) + ROUNDING_VARIANCE
