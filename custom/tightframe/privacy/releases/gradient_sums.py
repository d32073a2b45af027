"""A noisy sum of clipped gradients, round by round: grid, noise and charge.

In each round every record (with patients hidden: every patient, with the mean gradient of all records) takes
part with one public probability q, independently at each silo. A record's gradient g over all P trained
parameters is clipped to length C and truncated to the grid of ``C 2^-f``, towards zero; the record also adds
a constant, from which the server learns the number of records::

    (trunc(2^f min(1, C / |g|) g / C), lambda_int),      D^2 = 2^2f + lambda_int^2

so that a record changes the sum of these integers by at most D, exactly. The silos' discrete Gaussian shares
add up to noise of standard deviation ``z D`` (``releases.noise``), and a round's opened total is one step of
DP-SGD on the records of all silos together: Kairouz, Liu and Steinke, The Distributed Discrete Gaussian
Mechanism for Federated Learning with Secure Aggregation, ICML 2021. A silo's own sampling at rate q amplifies
for each of its records, independent of the other silos' draws. Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tightframe.errors import ContributionError
from tightframe.privacy.events import (
    NOISE_MULTIPLIERS,
    Event,
    Gaussian,
    PrivacyValueError,
    SubsampledGaussian,
    number,
    whole,
)
from tightframe.privacy.releases.noise import (
    EXACT_FLOAT,
    MAX_RECORDS,
    MAX_SILOS,
    NoisyRelease,
)

MAX_BITS = 20
COUNT_WEIGHT = Fraction(1, 5)
"""lambda / C. The noise of the gradients grows by a factor sqrt(1 + 0.2^2), 2 %, for a number of records
known to 5 z in the first round, and to 5 z / sqrt(r) after r rounds."""


@dataclass(frozen=True)
class GradientSumConfig(NoisyRelease):
    """Settings of a job's noisy sums of gradients; the same at all silos.

    Attributes:
        noise_multiplier: z, the noise's standard deviation over the L2 sensitivity D.
        size: P, the number of trained parameters.
        sampling_rate: q.

    Raises:
        PrivacyValueError: TF-700, if a value makes no sense.

    >>> config = GradientSumConfig(noise_multiplier=2.0, size=650)
    >>> config.fractional_bits, config.count_units
    (20, 209715)
    """

    noise_multiplier: float
    size: int
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        number("noise_multiplier", self.noise_multiplier, *NOISE_MULTIPLIERS)
        whole("size", self.size, 1, 2**40)
        if not number("sampling_rate", self.sampling_rate, 0.0, 1.0):
            raise PrivacyValueError("Expected `sampling_rate` to be above 0, but got 0. Give a positive one.")

    @property
    def fractional_bits(self) -> int:
        """f: 20, or fewer, so that the squared norm of P integers of at most 2^f fits into 64 bits."""
        return min(MAX_BITS, (62 - self.size.bit_length()) // 2)

    @property
    def grid(self) -> int:
        """Units in 1, which is the clipping norm C: ``2**f``."""
        return 1 << self.fractional_bits

    @property
    def count_units(self) -> int:
        """lambda_int, what one record adds to the number of records."""
        return math.floor(COUNT_WEIGHT * self.grid)

    @property
    def squared_sensitivity(self) -> int:
        """``D**2 = 2**2f + lambda_int**2``."""
        return self.grid**2 + self.count_units**2

    def event(self, honest: int = 1) -> Event:
        """Return the privacy event of one round.

        Args:
            honest: s - c for the event if no other silo adds noise, ``z / sqrt(s - c)``.
        """
        noise = self.noise_multiplier / math.sqrt(honest)
        if self.sampling_rate >= 1:
            return Gaussian(noise)
        return SubsampledGaussian(noise, self.sampling_rate, 1)

    def records_deviation(self, shares: float, sums: float = 1.0) -> float:
        """Return the standard deviation of the noise in a number of records.

        Args:
            shares: variance of the noise, in shares of the promised ``z**2 D**2``.
            sums: number of sums in the mean that has this noise.
        """
        promised = self.noise_multiplier * math.sqrt(self.squared_sensitivity)
        return promised * math.sqrt(shares) / (sums * self.count_units)


def check_sum(config: GradientSumConfig, num_records: int, num_silos: int, bound: float) -> None:
    """Refuse noise with which a term could exceed its field's bound, or a total would not be exact.

    Args:
        num_records: a public limit of the records of one silo.
        bound: of the field, in units of the clipping norm.

    Raises:
        ContributionError: TF-404.
    """
    largest = whole("num_records", num_records, 1, MAX_RECORDS) * config.grid + config.tail()
    limit = min(math.floor(bound * config.grid), EXACT_FLOAT // whole("num_silos", num_silos, 1, MAX_SILOS))
    if largest >= limit:
        raise ContributionError(
            f"Expected the noisy sum of gradients of {num_silos} silos of up to {num_records} records to "
            f"stay below 2**{math.log2(limit):.1f} steps of the grid each, but noise of "
            f"{config.noise_multiplier:g} sensitivities could pass it; allow more of epsilon, or fewer "
            "rounds.",
            code="TF-404",
        )
