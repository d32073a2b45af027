"""Noisy statistics of tables: counts, sums and squares with exact discrete Gaussian noise.

A record adds 1 to the count of its class, and for each of the K columns 1 to one cell (a bin, a level, or no
value); for each of the N numbers it adds a value x in [-1, 1] and x**2 to two sums. In integers of the grid
``u = 2**20`` it changes the vector of all totals by

    D**2 = u**2 (1 + K + 2 N)

at most, whatever the record. To hide patients, each counts with one record, so that D is the same. Noise is
shared among silos as for an evaluation; see ``releases.noise`` for why the continuous Gaussian's epsilons
hold. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightframe.errors import ContributionError
from tightframe.privacy.events import NOISE_MULTIPLIERS, number, whole
from tightframe.privacy.releases.noise import (
    EXACT_FLOAT,
    MAX_RECORDS,
    MAX_SILOS,
    NoisyRelease,
)

GRID = 2**20
"""Units in one record, and in a number at the end of its range."""
BOUND = 2.0**26
"""Bound of each number in a silo's term, with its noise."""
MAX_COLUMNS = 2**16


@dataclass(frozen=True)
class StatisticsConfig(NoisyRelease):
    """Settings of a release of statistics.

    Attributes:
        noise_multiplier: z, of one release: all totals together.
        columns: K, of the contract.
        numbers: N, columns of numbers.

    Raises:
        PrivacyValueError: TF-700, if a value makes no sense.

    >>> StatisticsConfig(1.0, columns=3, numbers=2).squared_sensitivity == 8 * GRID**2
    True
    """

    noise_multiplier: float
    columns: int
    numbers: int

    def __post_init__(self) -> None:
        noise = number("noise_multiplier", self.noise_multiplier, *NOISE_MULTIPLIERS)
        object.__setattr__(self, "noise_multiplier", noise)
        whole("columns", self.columns, 1, MAX_COLUMNS)
        whole("numbers", self.numbers, 0, self.columns)

    @property
    def grid(self) -> int:
        """Units in one record."""
        return GRID

    @property
    def squared_sensitivity(self) -> int:
        """``D**2``: the largest squared L2 change by adding or removing one record."""
        return GRID**2 * (1 + self.columns + 2 * self.numbers)


def check_bound(config: StatisticsConfig, num_records: int, num_silos: int) -> None:
    """Refuse noise with which a silo's term could exceed ``BOUND``, or a total the integers of a float64.

    Args:
        num_records: a public limit of the records of one silo.

    Raises:
        ContributionError: TF-404.
    """
    largest = whole("num_records", num_records, 1, MAX_RECORDS) * GRID + config.tail()
    if largest > BOUND * GRID or whole("num_silos", num_silos, 1, MAX_SILOS) * BOUND * GRID >= EXACT_FLOAT:
        raise ContributionError(
            f"Expected the noisy statistics of {num_silos} silos to stay within their bounds, but noise of "
            f"{config.noise_multiplier:g} sensitivities, or so many silos, could pass them; allow it more of "
            "epsilon.",
            code="TF-404",
        )
