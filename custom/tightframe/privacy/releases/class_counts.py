"""Noisy numbers of records of each class, released once: the prior of FedETF's loss, and pooled counts.

A loss that uses a silo's true class counts is no sum over records: one record changes the prior of all
others. With counts that were released with noise, and charged, once, it is. One record changes one
count by 1, and what a patient adds is clipped to an L2 norm of 1, so the sensitivity is 1.
"""

from __future__ import annotations

import torch

from tightframe.privacy.discrete_gaussian import discrete_gaussian
from tightframe.privacy.releases.class_sums import summed
from tightframe.privacy.releases.noise import variance_of_share

COUNT_GRID = 2**20
"""Units in one record: counts are noised on a grid this fine, since noise in whole records would need
rounding that is coarse beside it."""


def class_counts(
    labels: torch.Tensor, num_classes: int, *, patients: torch.Tensor | None = None
) -> torch.Tensor:
    """Count records of each class, without noise, in units of ``1 / COUNT_GRID``.

    Args:
        labels: (B,) int64 in [0, C); each *different* record once.
        patients: (B,) int64, whose record it is, to hide patients. All records of a patient then count
            1 together, as an L2 norm over the classes; without it, each record counts 1.

    Returns:
        (C,) int64; sensitivity ``COUNT_GRID``.

    Raises:
        PrivacyValueError: TF-700, for a label that is not one.

    >>> (class_counts(torch.tensor([0, 2, 2]), 3) / COUNT_GRID).tolist()
    [1.0, 0.0, 2.0]
    """
    ones = torch.full((len(labels), 1), COUNT_GRID, dtype=torch.int64, device=labels.device)
    return summed(ones, labels, num_classes, COUNT_GRID**2, patients)[:, 0]


def count_noise(num_classes: int, noise_multiplier: float, honest: int) -> torch.Tensor:
    """Draw one silo's share of the noise: int64 (C,). Charge ``Gaussian(noise_multiplier)`` before.

    Args:
        noise_multiplier: z.
        honest: s - c where the counts are summed over silos; 1 where this silo's own are used.

    Raises:
        RandomnessError: TF-720, if the operating system gives no random numbers.
    """
    variance = variance_of_share(noise_multiplier, COUNT_GRID**2, honest)
    return torch.from_numpy(discrete_gaussian(variance, (num_classes,)))


def read_counts(total: torch.Tensor) -> torch.Tensor:
    """Return numbers of records, float64 (C,), from noisy units; 1 at least: a prior takes logarithms."""
    return (total.to(torch.float64) / COUNT_GRID).clamp_min(1.0)


def noisy_counts(
    labels: torch.Tensor, num_classes: int, noise_multiplier: float, *, patients: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw a silo's own class prior: its counts with all of the noise, float64 (C,), 1 at least.

    It never leaves the silo by itself, but what is trained with it does: charge
    ``Gaussian(noise_multiplier)`` once, before this is called, and use the result in all rounds.

    Args:
        labels: (B,) int64 in [0, C); each *different* record once.
        noise_multiplier: z; the sensitivity is 1.
        patients: (B,) int64, to hide patients.
    """
    units = class_counts(labels, num_classes, patients=patients)
    return read_counts(units + count_noise(num_classes, noise_multiplier, honest=1))
