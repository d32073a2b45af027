"""Noisy totals of an evaluation: confusion matrices and score histograms with exact discrete Gaussian noise.

A record is in one fold. There it adds 1 to one cell of the confusion matrix (its true class, the predicted
one), and 1 to one bin of the score histogram of *each* of the C classes. So without weights it would change
the vector of all counts by ``sqrt(1 + C)``, and most of the noise in the confusion matrix would be due to the
histograms. Histograms are therefore weighted by about ``1 / sqrt(C)``, which is divided out again after the
noise: in integer units of the grid ``u_c = 2**20`` for a cell and ``u_s = floor(u_c / sqrt(C))`` for a bin,

    D**2 = u_c**2 + C u_s**2   <=   2 u_c**2,

exactly, for any record, model and number of bins. A cell then carries noise of at most ``z sqrt(2)`` records,
a bin of ``z sqrt(2 C)``.

A record with K findings is in a cell of each finding's own 2 x 2 table, in a bin of each histogram, and in
the number of records, which is counted separately because findings may be unknown. Without weights, with K
cells, K bins and one, all of ``u_c``,

    D**2 <= (2 K + 1) u_c**2,

exactly, if all are known.

The totals contain no loss. The loss of one record has no bound, and a clipped loss would be another number,
which needs a share of the noise budget that all others could do without.

Noise is shared among silos as for class sums, and drawn in integers; see ``releases.noise`` for why the
continuous Gaussian's epsilons hold. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import ContributionError
from tightframe.phases import Field, Fold, Schema
from tightframe.privacy.events import NOISE_MULTIPLIERS, Gaussian, number, whole
from tightframe.privacy.releases.noise import (
    EXACT_FLOAT,
    MAX_RECORDS,
    MAX_SILOS,
    NoisyRelease,
)

GRID = 2**20
"""Units in one record of a confusion cell: noise in whole records would need rounding."""
MAX_CLASSES = 2**16


@dataclass(frozen=True)
class EvaluationConfig(NoisyRelease):
    """Settings of an evaluation's release.

    Attributes:
        noise_multiplier: z, of one release: all totals of both folds together.
        num_classes: C, or the number of findings K.
        findings: whether a record may have several of them, or none.

    Raises:
        PrivacyValueError: TF-700, if a value is invalid.

    >>> config = EvaluationConfig(noise_multiplier=2.0, num_classes=8)
    >>> config.confusion_units, config.score_units
    (1048576, 370727)
    """

    noise_multiplier: float
    num_classes: int
    findings: bool = False

    def __post_init__(self) -> None:
        noise = number("noise_multiplier", self.noise_multiplier, *NOISE_MULTIPLIERS)
        object.__setattr__(self, "noise_multiplier", noise)
        whole("num_classes", self.num_classes, 1, MAX_CLASSES)

    @property
    def grid(self) -> int:
        """Units in one record of a confusion cell."""
        return GRID

    @property
    def squared_sensitivity(self) -> int:
        """``D**2 = u_c**2 + C u_s**2``: exactly the squared L2 change by adding or removing one record.

        With findings ``(K + 1) u_c**2 + K u_s**2``, which is the maximum.
        """
        cells = self.num_classes + 1 if self.findings else 1
        return cells * self.confusion_units**2 + self.num_classes * self.score_units**2

    @property
    def confusion_units(self) -> int:
        """u_c, what one record adds to its cell of the confusion matrix."""
        return GRID

    @property
    def score_units(self) -> int:
        """u_s, what one record adds to its bin of each class's score histogram."""
        if self.findings:
            return GRID
        return math.isqrt(GRID**2 // self.num_classes)


@dataclass(frozen=True)
class EvaluationPlan:
    """The noisy evaluations of a job.

    Attributes:
        config: of each of them.
        after: training rounds whose models are evaluated, including the last round's at the closing.
        spare: number of evaluations that may be repeated.
        bound: on the absolute value of each number in a silo's term.
    """

    config: EvaluationConfig
    after: tuple[int, ...]
    spare: int
    bound: float

    @property
    def events(self) -> tuple[Gaussian, ...]:
        """Privacy events of the evaluations, repeats included."""
        return self.config.events(len(self.after) + self.spare)

    def in_round(self, number: int) -> bool:
        """Check whether a training round evaluates the model that it begins with."""
        return number - 1 in self.after

    def schema(self, folds: Sequence[Fold], score_bins: int) -> Schema:
        """Return the fields: confusion (C, C) and scores (C, 2, bins) of each fold. There is no loss.

        With findings confusion (K, 2, 2), and records ().

        None is static, and no class rule applies: the noise protects them for any cohort.
        """
        classes = self.config.num_classes
        shapes: dict[str, tuple[int, ...]] = {"confusion": (classes, classes)}
        if self.config.findings:
            shapes = {"confusion": (classes, 2, 2), "records": ()}
        shapes["scores"] = (classes, 2, score_bins)
        return Schema(
            tuple(
                Field(f"evaluation/{fold}/{name}", shape, bound=self.bound, mechanism="evaluation")
                for fold in folds
                for name, shape in shapes.items()
            )
        )

    def describe(self) -> str:
        """Describe the evaluations, as part of a line."""
        rounds = [f"after round {number}" for number in self.after[:-1]]
        if len(rounds) >= 6:
            return f"noisy totals of the evaluation of {len(self.after)} models"
        return f"noisy totals of the evaluation {', '.join([*rounds, 'of the last model'])}"


def in_units(counts: NDArray[Any], units: int) -> NDArray[np.int64]:
    """Convert counts of records to integers of the grid: int64, of any shape."""
    whole_counts: NDArray[np.int64] = np.rint(counts).astype(np.int64)
    return whole_counts * units


def noise_for(shape: tuple[int, ...], config: EvaluationConfig, honest: int) -> NDArray[np.int64]:
    """Draw one silo's share of the noise. Charge the release to the ledger before this is called.

    Raises:
        RandomnessError: TF-720, if the operating system gives no random numbers.
    """
    return config.share(shape, honest)


def term_bound(config: EvaluationConfig, num_records: int, num_silos: int) -> float:
    """Return the largest absolute value of a silo's noisy totals: the ``bound`` of their fields.

    Args:
        num_records: a public limit of the records of one silo, never its actual number.
        num_silos: terms of the sum, whose total must be exact as a float64.

    Raises:
        ContributionError: TF-404, if such a total would not be exact.
    """
    largest = whole("num_records", num_records, 1, MAX_RECORDS) * config.confusion_units + config.tail()
    if whole("num_silos", num_silos, 1, MAX_SILOS) * largest >= EXACT_FLOAT:
        raise ContributionError(
            f"Expected the noisy evaluation of {num_silos} silos to stay below 2**53 units, but noise of "
            f"{config.noise_multiplier:g} sensitivities could pass it; allow it more of epsilon.",
            code="TF-404",
        )
    return largest / GRID
