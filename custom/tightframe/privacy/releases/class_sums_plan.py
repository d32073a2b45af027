"""Plan of the releases of per-class sums: grid, noise, rounds and charge.

A release is the vector ``(S_1 .. S_C, lambda N_1 .. lambda N_C)`` of summed features and record counts
of every class, in integer units of ``2**-f``, with discrete Gaussian noise on every integer. Everything
here is known before a record is read, so that a job can be checked, priced and refused by processes
that never start torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tightframe.errors import ContributionError
from tightframe.phases import Neighbours
from tightframe.privacy.events import (
    MAX_STEPS,
    NEIGHBOURS,
    NOISE_MULTIPLIERS,
    PrivacyValueError,
    number,
    whole,
)
from tightframe.privacy.releases.noise import (
    EXACT_FLOAT,
    MAX_RECORDS,
    MAX_SILOS,
    TAIL_DEVIATIONS,
    NoisyRelease,
)

RING_BITS, RING_FRACTION_BITS = 64, 24
"""The ring of the sums, and its fraction bits (a grid must not be finer)."""


@dataclass(frozen=True)
class ClassSumsConfig(NoisyRelease):
    """Settings of the releases of per-class sums; the same at all silos of a job.

    Attributes:
        noise_multiplier: z, noise standard deviation of one release over its L2 sensitivity.
        feature_clip: B, the L2 norm to which each record's feature vector is clipped.
        fractional_bits: f; the integer grid has steps of ``2**-f``.
        count_weight: lambda, the weight of the counts relative to the sums: a larger one gives better counts
            and worse sums, at the same charge.
        releases: most releases of a job.
        count_floor: a class whose noisy count is below it keeps its old value.
        neighbours: the hidden unit: one record, or all records of one patient.

    Raises:
        PrivacyValueError: TF-700, if a value makes no sense.

    >>> config = ClassSumsConfig(noise_multiplier=2.0)
    >>> config.feature_limit, config.count_units
    (1048576, 314573)
    """

    noise_multiplier: float
    feature_clip: float = 1.0
    fractional_bits: int = 20
    count_weight: float = 0.3
    releases: int = 10
    count_floor: float = 20.0
    neighbours: Neighbours = "record"

    def __post_init__(self) -> None:
        exact = object.__setattr__
        exact(self, "noise_multiplier", number("noise_multiplier", self.noise_multiplier, *NOISE_MULTIPLIERS))
        exact(self, "feature_clip", number("feature_clip", self.feature_clip, 1e-6, 1e6))
        exact(self, "count_weight", number("count_weight", self.count_weight, 1e-6, 1e6))
        exact(self, "count_floor", number("count_floor", self.count_floor, 1.0, 1e9))
        whole("fractional_bits", self.fractional_bits, 0, RING_FRACTION_BITS)
        whole("releases", self.releases, 1, MAX_STEPS)
        if self.neighbours not in NEIGHBOURS:
            raise PrivacyValueError(
                f"Expected `neighbours` to be one of {NEIGHBOURS}, but got another value. Correct the value."
            )
        if self.feature_limit < 1 or self.count_units < 1:
            raise PrivacyValueError(
                "Expected `feature_clip` and `count_weight` to be at least one step of the grid, 2**-"
                f"{self.fractional_bits}, but got {self.feature_clip:g} and {self.count_weight:g}. "
                "Use more `fractional_bits`."
            )

    @property
    def grid(self) -> int:
        """Units in 1: ``2**f``."""
        return 1 << self.fractional_bits

    @property
    def feature_limit(self) -> int:
        """B_int, the largest L2 norm of one record's feature vector in units of the grid."""
        return math.floor(Fraction(self.feature_clip) * self.grid)

    @property
    def count_units(self) -> int:
        """lambda_int, what one record adds to its class's count, in units of the grid."""
        return round(Fraction(self.count_weight) * self.grid)

    @property
    def squared_sensitivity(self) -> int:
        """``D**2 = B_int**2 + lambda_int**2``: the largest squared L2 change by one record or one patient.

        Adding or removing a record changes one class: its sum by a vector of norm B_int at most, its
        count by lambda_int. A patient's contribution, over all classes, is clipped to the same D.
        """
        return self.feature_limit**2 + self.count_units**2


def noise_tail(config: ClassSumsConfig, honest: int) -> int:
    """Bound a silo's noise, in units: an integer is beyond it with a probability below ``2**-80``."""
    squared = TAIL_DEVIATIONS**2 * config.share_variance(honest)
    return math.isqrt(squared - 1) + 1


def largest_term(config: ClassSumsConfig, num_records: int) -> int:
    """Return the largest integer in the sums of ``num_records`` records, or patients, before noise."""
    coordinate = math.isqrt(config.squared_sensitivity - 1) + 1
    return whole("num_records", num_records, 1, MAX_RECORDS) * coordinate


def term_bound(config: ClassSumsConfig, num_records: int, honest: int) -> float:
    """Return the largest absolute value of a silo's noisy sums: the ``bound`` of their field.

    Args:
        num_records: a public limit of the records of one silo, never its actual number.
        honest: s - c, see ``share_variance``.
    """
    return (largest_term(config, num_records) + noise_tail(config, honest)) / config.grid


def wrap_bound(config: ClassSumsConfig, num_records: int, num_silos: int, honest: int) -> int:
    """Return the largest absolute integer of a total, the tail of the noise included, in grid units.

    Args:
        num_records: a public limit of the records of one silo.
        num_silos: n, terms of the sum.
        honest: s - c, see ``share_variance``.

    Raises:
        ContributionError: TF-404, if such a total could wrap around the ring, or would not be exact as a
            float64 on its way there.
    """
    silos = whole("num_silos", num_silos, 1, MAX_SILOS)
    largest = silos * (largest_term(config, num_records) + noise_tail(config, honest))
    # A field of the 64-bit ring counts in units of 2**-24, whatever the grid.
    ring_limit = 2 ** (RING_BITS - 1 - RING_FRACTION_BITS + config.fractional_bits)
    # In addition to the term, encoding may add one unit of the ring: as in `securesum.encoding`.
    limit = min(ring_limit - silos, EXACT_FLOAT)
    if largest >= limit:
        raise ContributionError(
            f"Expected the class sums of {num_silos} silos of up to {num_records} records, with their noise, "
            f"to stay below 2**{math.log2(limit):.1f} steps of the grid, but they could reach "
            f"2**{math.log2(largest):.1f}; use fewer `fractional_bits` or a smaller `feature_clip`.",
            code="TF-404",
        )
    return largest


def release_rounds(rounds: int, releases: int, *, predicts: bool = False) -> tuple[int, ...]:
    """Return the rounds, from 1 on, in which class sums are released: at most ``releases`` of them.

    The rounds are cut into equal stretches, and each stretch releases in its middle: so no release is
    of a model that has hardly been trained, none is further than half a stretch from the rounds that it
    represents, and the last ones still serve some rounds of training. The last round releases nothing,
    because no training would use it; a method that *predicts* with releases needs exactly that one, so it
    releases at each stretch's end instead.

    With fewer rounds there are fewer releases than requested: solve the noise for the resulting number, not
    for the requested one.

    Args:
        rounds: training rounds of the job.
        releases: the largest number of them.
        predicts: whether the method predicts with releases, not only trains with them.

    Raises:
        PrivacyValueError: TF-700, if either number is below 1.

    >>> release_rounds(50, 10)
    (3, 8, 13, 18, 23, 27, 32, 37, 42, 47)
    >>> release_rounds(50, 10, predicts=True)
    (5, 10, 15, 20, 25, 30, 35, 40, 45, 50)
    >>> release_rounds(4, 10), release_rounds(1, 10)
    ((1, 2, 3), (1,))
    """
    useful = whole("rounds", rounds, 1, MAX_STEPS)
    if not predicts:
        useful = max(1, useful - 1)
    count = min(whole("releases", releases, 1, MAX_STEPS), useful)
    if predicts:
        return tuple(-(-useful * (i + 1) // count) for i in range(count))
    return tuple(1 + (2 * i + 1) * useful // (2 * count) for i in range(count))
