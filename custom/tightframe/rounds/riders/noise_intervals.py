"""Confidence intervals of metrics from noisy counts, for the noise alone: its size is public and exact.

Each cell of an opened confusion matrix is a count plus noise: normal to the grid, of known deviation, and
independent of all other cells. What the exact metric of the very same records would be lies in such an
interval in at least 95 of 100 releases. How few the records are is not in it.

A share ``r = a / (a + b)`` of two noisy counts has Fieller's interval: the r for which ``a - r (a + b)`` is
no further from 0 than its own noise goes, so that the noise in the denominator is in it (E. C. Fieller, J. R.
Stat. Soc. B 16, 1954). Means of shares of different rows, whose noise is independent, have that of the MOVER
(G. Y. Zou, A. Donner, Stat. Med. 27, 2008): each share's distance to its own limits, added as squares.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95
NORMAL = 2.170090377584560
"""The normal distribution's two-sided quantile for 97 %: which classes have enough records is decided by
the same noisy counts, which costs up to two points of coverage at the floor; ``LEVEL`` holds with that."""
TAILS = (0.015, 0.985)
"""The same of draws."""
DRAWS = 2000
SEED = 20_260_101
"""Of the draws for areas under curves: fixed, so that the same totals have the same interval."""


def share(part: Floats, rest: Floats, part_noise: float, rest_noise: float) -> tuple[Floats, Floats]:
    """Fieller's limits of ``part / (part + rest)``, of any shape, not cut to [0, 1].

    Args:
        part: a noisy count.
        rest: another one.
        part_noise: standard deviation of the noise in the one.
        rest_noise: of that in the other.

    Returns:
        Limits; minus and plus infinity where the noise leaves the share open.

    >>> low, high = share(np.array([50.0]), np.array([50.0]), 2.0, 2.0)
    >>> [round(float(value[0]), 3) for value in (low, high)]
    [0.469, 0.531]
    """
    total = part + rest
    own, other = (NORMAL * part_noise) ** 2, (NORMAL * rest_noise) ** 2
    # total^2 r^2 - 2 part total r + part^2 <= own (1 - r)^2 + other r^2
    square, linear, constant = total**2 - own - other, part * total - own, part**2 - own
    told = (square > 0) & (total > 0)
    safe = np.where(told, square, 1.0)
    root = np.sqrt(np.maximum(linear**2 - safe * constant, 0.0))
    return (
        np.where(told, (linear - root) / safe, -math.inf),
        np.where(told, (linear + root) / safe, math.inf),
    )


def mean(values: Floats, low: Floats, high: Floats) -> tuple[float, float]:
    """The MOVER's limits of the mean of independent values with limits of their own, not cut."""
    middle, number = float(values.mean()), len(values)
    down = math.sqrt(float(((values - low) ** 2).sum())) / number
    up = math.sqrt(float(((high - values) ** 2).sum())) / number
    return middle - down, middle + up


def mean_area(
    scores: Floats, confusion: Floats, told: NDArray[np.bool_], cell: float, bin_noise: float
) -> tuple[float, float]:
    """Limits of the mean area under the ROC curve of some classes, not cut.

    The noise is drawn again and taken off: what the exact counts may have been. There is no closed form, as
    areas are products of counts.

    Args:
        scores: noisy histograms, (C, 2, bins).
        confusion: noisy counts, (C, C).
        told: the classes, (C,), at least one.
        cell: standard deviation of the noise in a cell.
        bin_noise: of that in a bin.
    """
    draw = np.random.default_rng(SEED)
    classes = len(confusion)
    rows = confusion.sum(1) - draw.normal(0.0, cell * math.sqrt(classes), (DRAWS, classes))
    areas = np.zeros(DRAWS)
    for index in np.flatnonzero(told):
        exact = scores[index] - draw.normal(0.0, bin_noise, (DRAWS, *scores.shape[1:]))
        numbers = np.stack([rows[:, index], rows.sum(1) - rows[:, index]], 1)
        areas += area(exact, numbers)
    low, high = np.quantile(areas / told.sum(), TAILS)
    return float(low), float(high)


def area(histograms: Floats, numbers: Floats) -> Floats:
    """The area under the ROC curve by histograms that are shifted evenly to known numbers of records.

    Args:
        histograms: of records of a class and of all others, (..., 2, bins).
        numbers: how many there are of each, (..., 2), not 0.
    """
    shift = (numbers - histograms.sum(-1)) / histograms.shape[-1]
    positives, negatives = np.moveaxis(histograms + shift[..., None], -2, 0)
    below = np.cumsum(negatives, axis=-1) - negatives / 2
    areas: Floats = (positives * below).sum(-1) / numbers.prod(-1)
    return areas


def cut(low: float, high: float) -> tuple[float, float]:
    """Cut limits of what lies in [0, 1] by its meaning."""
    return min(max(low, 0.0), 1.0), min(max(high, 0.0), 1.0)
