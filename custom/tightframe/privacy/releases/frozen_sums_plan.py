"""Plan of the one release of sums of frozen features: weights, grid, noise and charge.

A record has a feature vector phi and a class y. The release is, over all records,

    G = sum phi phi^T  (d, d; its diagonal and the rest of its upper triangle)
    B = sum phi y^T    (C, d)
    n = sum y          (C,)

in integers, with discrete Gaussian noise on each. Features are truncated to multiples of ``2**-12`` within
the unit ball, so that all products are multiples of ``2**-24``, the step of the grid, exactly.

**Sensitivity.** With public weights a, b = 1 and c, which distribute precision, let ``D**2 = a**2 + b**2 +
c**2`` (a = 0 where G is not summed), and let an entry's noise have the deviation

    z D / a on G's diagonal,   z D / (a sqrt 2) off it,   z D / b on B,   z D / c on n.

This is the Gaussian mechanism of noise multiplier z: divide each coordinate by its deviation, which is
public; then all noise has deviation 1, and a record moves the vector by the square root of

    (a**2 (sum_i phi_i**4 + 2 sum_(i<j) phi_i**2 phi_j**2) + b**2 |phi|**2 + c**2) / (z D)**2
        = (a**2 |phi|**4 + b**2 |phi|**2 + c**2) / (z D)**2  <=  1 / z**2.

Adding or removing **one patient** moves it by no more. A patient's m records at a silo enter with weight 1 /
m: in units of the noise their term is the mean of m vectors of norm at most 1 / z, for any classes. In
integers the sum over the m records is divided by m and rounded towards zero, which lengthens no coordinate.

``releases.noise`` explains why a discrete Gaussian costs as much as the continuous one; there each coordinate
is rounded by itself, so variances may differ between coordinates. Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from tightframe.errors import ContributionError
from tightframe.phases import Neighbours
from tightframe.privacy.events import (
    NEIGHBOURS,
    NOISE_MULTIPLIERS,
    Gaussian,
    PrivacyValueError,
    number,
    whole,
)
from tightframe.privacy.releases.noise import EXACT_FLOAT, MAX_SILOS, NoisyRelease

FEATURE_BITS = 12
"""Fraction bits of a feature. Products, and the ring of a sum, have twice as many."""
GRID = 1 << (2 * FEATURE_BITS)
"""Units in 1, of all parts."""
MOST_RECORDS = 2**20
"""Most records, or patients, of a silo: with 250 silos all totals stay exact as float64."""
WEIGHTS = (1e-3, 1e3)
"""Smallest and largest weight of a part."""
PartName = Literal["diagonal", "products", "sums", "counts"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""G's diagonal, the rest of its upper triangle, B, and n."""


@dataclass(frozen=True)
class Part(NoisyRelease):
    """One part of the release, whose numbers all have noise of the same variance.

    Attributes:
        noise_multiplier: z, of the whole release.
        squared_scale: ``D**2 / weight**2``, in squared units, rounded up.
    """

    noise_multiplier: float
    squared_scale: int

    @property
    def grid(self) -> int:
        """Units in 1."""
        return GRID

    @property
    def squared_sensitivity(self) -> int:
        """The largest squared change of this part by one record if the others do not change."""
        return self.squared_scale


@dataclass(frozen=True)
class FrozenSumsConfig:
    """Settings of the release; the same at all silos of a job.

    Attributes:
        noise_multiplier: z.
        products: whether G is released.
        product_weight: a.
        count_weight: c.
        neighbours: the hidden unit: one record, or all records of one patient.

    Raises:
        PrivacyValueError: TF-700, if a value makes no sense.

    >>> config = FrozenSumsConfig(noise_multiplier=2.0, products=True, product_weight=1.0, count_weight=0.5)
    >>> [round(config.part(name).deviation(silos=4, honest=4), 3) for name in PARTS]
    [3.0, 2.121, 3.0, 6.0]
    """

    noise_multiplier: float
    products: bool
    product_weight: float = 0.5
    count_weight: float = 0.15
    neighbours: Neighbours = "record"

    def __post_init__(self) -> None:
        exact = object.__setattr__
        exact(self, "noise_multiplier", number("noise_multiplier", self.noise_multiplier, *NOISE_MULTIPLIERS))
        exact(self, "product_weight", number("product_weight", self.product_weight, *WEIGHTS))
        exact(self, "count_weight", number("count_weight", self.count_weight, *WEIGHTS))
        if self.neighbours not in NEIGHBOURS:
            raise PrivacyValueError(
                f"Expected `neighbours` to be one of {NEIGHBOURS}, but got another value. Correct the value."
            )

    def part(self, name: str) -> Part:
        """Return one part of the release.

        Args:
            name: of the part, see ``PARTS``; a prefix up to a slash, as in a field's name, is ignored.

        Raises:
            PrivacyValueError: TF-700, if this release has no such part.
        """
        short = name.rpartition("/")[2]
        if short not in self.parts:
            raise PrivacyValueError(
                f"Expected a part of the release, {', '.join(self.parts)}, but got {short!r}. "
                "Give one of them."
            )
        weights = self._squared_weights
        scale = sum(weights.values()) / weights["diagonal" if short == "products" else short]
        # Off the diagonal an entry stands for two: its variance is half, and its contribution counts twice.
        units = scale * GRID**2 / (2 if short == "products" else 1)
        return Part(self.noise_multiplier, math.ceil(units))

    @property
    def parts(self) -> tuple[PartName, ...]:
        """Names of the parts that this release has."""
        return PARTS if self.products else ("sums", "counts")

    def events(self, releases: int) -> tuple[Gaussian, ...]:
        """Return the privacy events of a number of releases."""
        return self.part("sums").events(releases)

    def lone_event(self, honest: int) -> Gaussian | None:
        """Return the event of one release if no other silo adds noise; see ``NoisyRelease``."""
        return self.part("sums").lone_event(honest)

    @property
    def _squared_weights(self) -> dict[str, Fraction]:
        weights = {"sums": Fraction(1), "counts": Fraction(self.count_weight) ** 2}
        return weights | ({"diagonal": Fraction(self.product_weight) ** 2} if self.products else {})


def check_bound(config: FrozenSumsConfig, bound: float, num_silos: int) -> None:
    """Refuse a release if a silo's term could exceed its bound, or the total would not be exact.

    Args:
        bound: of the fields of the release.

    Raises:
        ContributionError: TF-404.
    """
    largest = MOST_RECORDS * GRID + max(config.part(name).tail() for name in config.parts)
    silos = whole("num_silos", num_silos, 1, MAX_SILOS)
    if largest > bound * GRID or silos * largest >= EXACT_FLOAT:
        raise ContributionError(
            f"Expected the noisy sums of {num_silos} silos to stay within {bound:g} each, but with a noise "
            f"multiplier of {config.noise_multiplier:g} and these weights they could pass it: allow more "
            "epsilon, or larger `product_weight` and `count_weight`.",
            code="TF-404",
        )


def checked_records(count: int, neighbours: Neighbours) -> int:
    """Return a number of records, or patients, if it is allowed in one release.

    Raises:
        PrivacyValueError: TF-700.
    """
    if count > MOST_RECORDS:
        raise PrivacyValueError(
            f"Expected at most {MOST_RECORDS} {neighbours}s in a release of frozen features, but "
            f"this site has more. Split them into two sites, or use another method."
        )
    return count
