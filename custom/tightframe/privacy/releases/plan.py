"""What a release of per-class sums is planned to be: its grid, its noise, its rounds and its charge.

A release is the vector ``(S_1 .. S_C, lambda N_1 .. lambda N_C)`` of summed features and record counts
of every class, in integer units of ``2**-f``, with discrete Gaussian noise on every integer. Everything
here is known before a record is read, so that a job can be checked, priced and refused by processes
that never start torch.

Why the continuous Gaussian's epsilons hold for it. Let the noise have variance ``v + s**2``, with
s**2 = ``ROUNDING_VARIANCE``. Rounding a *continuous* Gaussian of variance v to an integer k at random, with
the weights ``exp(-(k - x)**2 / (2 s**2))``, gives the discrete Gaussian of variance ``v + s**2``, up to a
factor ``1 +- 4 exp(-2 pi**2 s**2)`` in each probability, that is ``1 +- 3e-77`` (Peikert, "An Efficient and
Parallel Gaussian Sampler for Lattices", 2010, theorem 3.1); and a sum of discrete Gaussians is one of the
summed variance, up to such a factor (Kairouz, Liu & Steinke, "The Distributed Discrete Gaussian Mechanism",
2021). A release is therefore post-processing of the Gaussian mechanism with noise multiplier z, and any
bound for that one, also the exact one, holds here, up to 1e-65 in epsilon for a million integers and a
thousand silos. The 9 squared units that this adds are nothing beside a variance around ``2**40``.
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
    Gaussian,
    PrivacyValueError,
    number,
    whole,
)

ROUNDING_VARIANCE = 9
"""s**2 above, added to every silo's variance; also the least variance that it is added to."""
TAIL_DEVIATIONS = 12
"""A discrete Gaussian's tail is no heavier than the Gaussian's: for four million integers, one of
them is further out than this with a probability below 2**-80."""
RING_BITS, RING_FRACTION_BITS = 64, 24
"""The ring in which the sums travel, and its own fraction bits (a grid must not be finer)."""
MAX_SILOS, MAX_RECORDS = 2**16, 2**40
_EXACT_FLOAT = 2**53


@dataclass(frozen=True)
class ClassSumsConfig:
    """How per-class sums are released; the same at all silos of a job.

    Attributes:
        noise_multiplier: z, noise standard deviation of one release over its L2 sensitivity.
        feature_clip: B, the L2 norm to which each record's feature vector is clipped.
        fractional_bits: f; the integer grid has steps of ``2**-f``.
        count_weight: lambda, the weight of the counts beside the sums: more of it gives better counts
            and worse sums, at the same charge.
        releases: at most so many a job.
        count_floor: a class whose noisy count is below it keeps its old value.
        neighbours: what is hidden: one record, or all records of one patient.

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


def squared_sensitivity(config: ClassSumsConfig) -> int:
    """``D**2 = B_int**2 + lambda_int**2``: the largest squared L2 change by one record or one patient.

    Adding or removing a record changes one class: its sum by a vector of norm B_int at most, its
    count by lambda_int. What a patient adds, over all classes, is clipped to the same D.
    """
    return config.feature_limit**2 + config.count_units**2


def share_variance(config: ClassSumsConfig, honest: int) -> int:
    """The variance of one silo's share of a release's noise, in squared units; see ``variance_of_share``."""
    return variance_of_share(config.noise_multiplier, squared_sensitivity(config), honest)


def variance_of_share(noise_multiplier: float, squared_sensitivity: int, honest: int) -> int:
    """``z**2 D**2 / honest``, rounded up, plus 9: any ``honest`` silos together add ``z**2 D**2`` at least.

    Args:
        noise_multiplier: z.
        squared_sensitivity: ``D**2``, in squared units of the grid.
        honest: t - c, the least number of honest silos in any sum that can be opened. A sum over more
            silos carries more noise than was promised: n silos ``sqrt(n / (t - c))`` times the deviation.
            1 is local privacy: the silo's own noise is all that is promised.

    Raises:
        PrivacyValueError: TF-700, if an argument makes no sense, or the grid is too coarse for the noise.
    """
    noise = Fraction(number("noise_multiplier", noise_multiplier, *NOISE_MULTIPLIERS))
    share = noise**2 * squared_sensitivity / whole("honest", honest, 1, MAX_SILOS)
    if share < ROUNDING_VARIANCE:
        raise PrivacyValueError(
            f"Expected the variance of a silo's noise to be at least {ROUNDING_VARIANCE} squared steps of "
            f"the grid, but got {float(share):.3g}. Use more `fractional_bits`."
        )
    return math.ceil(share) + ROUNDING_VARIANCE


def noise_tail(config: ClassSumsConfig, honest: int) -> int:
    """What no integer of a silo's noise is beyond, but with a probability below ``2**-80``, in units."""
    squared = TAIL_DEVIATIONS**2 * share_variance(config, honest)
    return math.isqrt(squared - 1) + 1


def largest_term(config: ClassSumsConfig, num_records: int) -> int:
    """The largest integer in the sums of ``num_records`` records, or patients, before noise, in units."""
    each = math.isqrt(squared_sensitivity(config) - 1) + 1
    return whole("num_records", num_records, 1, MAX_RECORDS) * each


def term_bound(config: ClassSumsConfig, num_records: int, honest: int) -> float:
    """The largest absolute value of a silo's noisy sums as a number: the ``bound`` of their field.

    Args:
        config: see there.
        num_records: a public limit of the records of one silo, never its actual number.
        honest: t - c, see ``share_variance``.
    """
    return (largest_term(config, num_records) + noise_tail(config, honest)) / config.grid


def wrap_bound(config: ClassSumsConfig, num_records: int, num_silos: int, honest: int) -> int:
    """The largest absolute integer of a total, the tail of the noise included, in units of the grid.

    Args:
        config: see there.
        num_records: a public limit of the records of one silo.
        num_silos: n, terms of the sum.
        honest: t - c, see ``share_variance``.

    Raises:
        ContributionError: TF-404, if such a total could wrap around the ring, or would not be exact as a
            float64 on its way there.
    """
    silos = whole("num_silos", num_silos, 1, MAX_SILOS)
    largest = silos * (largest_term(config, num_records) + noise_tail(config, honest))
    # A field of the 64-bit ring counts in units of 2**-24, whatever the grid.
    ring_limit = 2 ** (RING_BITS - 1 - RING_FRACTION_BITS + config.fractional_bits)
    # Beside the term itself, encoding may add one unit of the ring: as in `securesum.encoding`.
    limit = min(ring_limit - silos, _EXACT_FLOAT)
    if largest >= limit:
        raise ContributionError(
            f"Expected the class sums of {num_silos} silos of up to {num_records} records, with their noise, "
            f"to stay below 2**{math.log2(limit):.1f} steps of the grid, but they could reach "
            f"2**{math.log2(largest):.1f}; use fewer `fractional_bits` or a smaller `feature_clip`.",
            code="TF-404",
        )
    return largest


def release_rounds(rounds: int, releases: int, *, predicts: bool = False) -> tuple[int, ...]:
    """The training rounds, from 1 on, in which class sums are released: at most ``releases`` of them.

    The rounds are cut into equal stretches, and each stretch releases in its middle: so no release is
    of a model that has hardly been trained, none is further than half a stretch from the rounds
    that it stands for, and the last ones still reach some rounds of training. The last round releases
    nothing, because no training would use it; a method that *predicts* with what is released needs
    exactly that one, so it releases at each stretch's end instead.

    Fewer releases than asked for are made if there are fewer rounds: solve the noise for the number
    that comes out, not for the number asked for.

    Args:
        rounds: training rounds of the job.
        releases: how many at most.
        predicts: whether the method predicts with what is released, not only trains with it.

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


def events(config: ClassSumsConfig, releases: int) -> tuple[Gaussian, ...]:
    """What ``releases`` releases are charged as: every record takes part in each, nothing is amplified."""
    return (Gaussian(noise_multiplier=config.noise_multiplier),) * releases


def lone_events(config: ClassSumsConfig, releases: int, honest: int) -> tuple[Gaussian, ...]:
    """The same releases, if no other silo added any noise: ``z / sqrt(t - c)``, which a site also records."""
    # As `share_variance` refuses it, so does this.
    share_variance(config, honest)
    return (Gaussian(noise_multiplier=config.noise_multiplier / math.sqrt(honest)),) * releases
