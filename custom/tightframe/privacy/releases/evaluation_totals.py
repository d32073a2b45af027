"""Noisy totals of an evaluation: confusion matrices and score histograms with exact discrete Gaussian noise.

A record is in one fold. There it adds 1 to one cell of the confusion matrix (its true class, the predicted
one), and 1 to one bin of the score histogram of *each* of the C classes. So without weights it would change
the vector of all counts by ``sqrt(1 + C)``, and most of the noise in the confusion matrix would be there for
the histograms. Histograms are therefore weighted by about ``1 / sqrt(C)``, which is divided out again after
the noise: in integer units of the grid ``u_c = 2**20`` for a cell and ``u_s = floor(u_c / sqrt(C))`` for a
bin,

    D**2 = u_c**2 + C u_s**2   <=   2 u_c**2,

exactly, whatever the record, the model and the number of bins. A cell then carries noise of ``z sqrt(2)``
records at most, a bin of ``z sqrt(2 C)``.

There is no loss among the totals. The loss of one record has no bound, and one that is clipped to a bound
would be another number, which takes its part of the noise that all others could do without.

Noise is shared among silos as that of class sums is, and drawn in integers; see ``release_plan`` for why the
continuous Gaussian's epsilons hold. Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import ContributionError
from tightframe.privacy.discrete_gaussian import discrete_gaussian
from tightframe.privacy.events import NOISE_MULTIPLIERS, Gaussian, number, whole
from tightframe.privacy.releases.plan import MAX_RECORDS, MAX_SILOS, TAIL_DEVIATIONS, variance_of_share

GRID = 2**20
"""Units in one record of a confusion cell: noise in whole records would need rounding."""
MAX_CLASSES = 2**16
_EXACT_FLOAT = 2**53


@dataclass(frozen=True)
class EvaluationConfig:
    """How an evaluation's totals are released.

    Attributes:
        noise_multiplier: z, of one release: all totals of both folds together.
        num_classes: C.

    Raises:
        PrivacyValueError: TF-700, if a value makes no sense.

    >>> config = EvaluationConfig(noise_multiplier=2.0, num_classes=8)
    >>> config.confusion_units, config.score_units
    (1048576, 370727)
    """

    noise_multiplier: float
    num_classes: int

    def __post_init__(self) -> None:
        noise = number("noise_multiplier", self.noise_multiplier, *NOISE_MULTIPLIERS)
        object.__setattr__(self, "noise_multiplier", noise)
        whole("num_classes", self.num_classes, 1, MAX_CLASSES)

    @property
    def confusion_units(self) -> int:
        """u_c, what one record adds to its cell of the confusion matrix."""
        return GRID

    @property
    def score_units(self) -> int:
        """u_s, what one record adds to its bin of each class's score histogram."""
        return math.isqrt(GRID**2 // self.num_classes)


def squared_sensitivity(config: EvaluationConfig) -> int:
    """``D**2 = u_c**2 + C u_s**2``: exactly what adding or removing one record changes, in squared L2."""
    return config.confusion_units**2 + config.num_classes * config.score_units**2


def share_variance(config: EvaluationConfig, honest: int) -> int:
    """The variance of one silo's share of the noise, in squared units; see ``release_plan``."""
    return variance_of_share(config.noise_multiplier, squared_sensitivity(config), honest)


def cell_deviation(config: EvaluationConfig, *, silos: int, honest: int) -> float:
    """Standard deviation of the noise in one cell of an opened confusion matrix, in records.

    Args:
        config: see there.
        silos: in the sum, each with its share.
        honest: t - c.
    """
    shares = whole("silos", silos, 1, MAX_SILOS) * share_variance(config, honest)
    return math.sqrt(shares) / config.confusion_units


def in_units(counts: NDArray[Any], units: int) -> NDArray[np.int64]:
    """Whole counts of records as integers of the grid: int64, of any shape."""
    whole_counts: NDArray[np.int64] = np.rint(counts).astype(np.int64)
    return whole_counts * units


def noise_for(shape: tuple[int, ...], config: EvaluationConfig, honest: int) -> NDArray[np.int64]:
    """One silo's share of the noise. Charge the release to the ledger before this is called.

    Raises:
        RandomnessError: TF-720, if the operating system gives no random numbers.
    """
    return discrete_gaussian(share_variance(config, honest), shape)


def as_numbers(units: NDArray[np.int64]) -> NDArray[np.float64]:
    """Integers as the float64 numbers that a field carries: exact, below ``2**53`` units."""
    return units.astype(np.float64) / GRID


def as_units(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """The integers again, from what a field's total says."""
    units: NDArray[np.int64] = np.rint(numbers * GRID).astype(np.int64)
    return units


def term_bound(config: EvaluationConfig, num_records: int, num_silos: int) -> float:
    """The largest absolute value of a silo's noisy totals as a number: the ``bound`` of their fields.

    Args:
        config: see there.
        num_records: a public limit of the records of one silo, never its actual number.
        num_silos: terms of the sum, whose total must be exact as a float64.

    Raises:
        ContributionError: TF-404, if such a total would not be exact.
    """
    # With all of the noise its own: a silo learns only at enrolment how many share it.
    tail = math.isqrt(TAIL_DEVIATIONS**2 * share_variance(config, 1)) + 1
    largest = whole("num_records", num_records, 1, MAX_RECORDS) * config.confusion_units + tail
    if whole("num_silos", num_silos, 1, MAX_SILOS) * largest >= _EXACT_FLOAT:
        raise ContributionError(
            f"Expected the noisy evaluation of {num_silos} silos to stay below 2**53 units, but noise of "
            f"{config.noise_multiplier:g} sensitivities could pass it; allow it more of epsilon.",
            code="TF-404",
        )
    return largest / GRID


def events(config: EvaluationConfig, releases: int) -> tuple[Gaussian, ...]:
    """What ``releases`` evaluations are charged as."""
    return (Gaussian(config.noise_multiplier),) * releases


def lone_event(config: EvaluationConfig, honest: int) -> Gaussian | None:
    """One evaluation as it is if no other silo adds noise; None where all of it is the silo's own."""
    if whole("honest", honest, 1, MAX_SILOS) == 1:
        return None
    return Gaussian(config.noise_multiplier / math.sqrt(honest))
