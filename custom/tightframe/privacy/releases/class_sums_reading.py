"""Class means and counts from opened releases of per-class sums: the server's half.

All of it is post-processing of what was released with noise, which costs no privacy: it reads totals and
public numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tightframe.privacy.events import PrivacyValueError, number, whole
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig
from tightframe.privacy.releases.noise import MAX_SILOS

_COUNT_DEVIATIONS = 3.0
"""Below so many standard deviations of its noise, a count does not tell a class from none."""


@dataclass(frozen=True)
class ClassReading:
    """Class means and counts of a release.

    Attributes:
        means: (C, d) float64, class means of the clipped features, of norm B at most; zero where not usable.
        counts: (C,) float64, noisy numbers of records, 1 at least.
        usable: (C,) bool, which classes are above the floor.
    """

    means: torch.Tensor
    counts: torch.Tensor
    usable: torch.Tensor


@dataclass(frozen=True)
class ReleaseAverage:
    """The average of a job's releases so far: R of them have the noise of one that spent it all.

    Older releases are of an older model, so each may count less than the next one: by ``decay``. All
    of its state is tensors, which a server's state carries from round to round.

    Attributes:
        total: (C, d + 1) float64, weighted sum of the releases, in units of the grid.
        weight: () float64, sum of their weights.
        noise: () float64, summed variance of their noise, in units of ``z**2 D**2``.
    """

    total: torch.Tensor
    weight: torch.Tensor
    noise: torch.Tensor

    @classmethod
    def empty(cls, num_classes: int, width: int) -> ReleaseAverage:
        """Return an average without a release; ``width`` is d + 1."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(torch.zeros(num_classes, width, dtype=torch.float64), zero, zero.clone())

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> ReleaseAverage:
        """Restore an average from its ``state``."""
        return cls(state["total"], state["weight"], state["noise"])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {"total": self.total, "weight": self.weight, "noise": self.noise}

    def add(
        self, total: torch.Tensor, *, silos: int = 1, honest: int = 1, decay: float = 1.0
    ) -> ReleaseAverage:
        """Return the average with one more release.

        Args:
            total: (C, d + 1) int64.
            honest: s - c, as it was for ``noise_for``.
            decay: what earlier releases count for beside this one; 1 is the plain average, 0 this one alone.

        Raises:
            PrivacyValueError: TF-700, for another shape or a decay outside of [0, 1].
        """
        if total.shape != self.total.shape or total.dtype != torch.int64:
            raise PrivacyValueError(
                f"Expected a release of shape {tuple(self.total.shape)} in int64, but got "
                f"{tuple(total.shape)} in {total.dtype}. Give the opened integers of the same job."
            )
        number("decay", decay, 0.0, 1.0)
        share = whole("silos", silos, 1, MAX_SILOS) / whole("honest", honest, 1, MAX_SILOS)
        return ReleaseAverage(
            self.total * decay + total.to(torch.float64),
            self.weight * decay + 1,
            self.noise * decay**2 + share,
        )

    def read(self, config: ClassSumsConfig) -> ClassReading:
        """Return class means and counts of the average: post-processing, which costs no privacy.

        A class is usable if its noisy count is at least ``count_floor`` and at least three standard
        deviations of the count's noise, so that of 700 classes that nobody has, one gets a mean of nothing
        but noise. Means longer than B are shortened to B, which can only bring them closer to the true ones.

        Raises:
            PrivacyValueError: TF-700, if there is no release yet.
        """
        weight = float(self.weight)
        if weight == 0:
            raise PrivacyValueError("Expected a release to read, but got none yet. Add one first.")
        average = self.total / weight
        counts = average[:, -1] / config.count_units
        sums = average[:, :-1] / config.grid
        # z D / lambda_int records: the standard deviation of a count's noise in one promised total.
        promised = config.noise_multiplier * math.sqrt(config.squared_sensitivity) / config.count_units
        deviation = promised * math.sqrt(float(self.noise)) / weight
        usable = counts >= max(config.count_floor, _COUNT_DEVIATIONS * deviation)
        counts = counts.clamp_min(1.0)
        means = sums / counts[:, None]
        norms = torch.linalg.vector_norm(means, dim=1, keepdim=True)
        means = means * torch.where(norms > config.feature_clip, config.feature_clip / norms, 1.0)
        return ClassReading(torch.where(usable[:, None], means, 0.0), counts, usable)
