"""Confidence intervals of metrics from noisy counts, for the added noise alone, whose size is public.

Each cell of an opened confusion matrix is a count plus discrete Gaussian noise of known standard deviation,
independent of all other cells. In at least 95 of 100 releases the interval contains the metric of the same
records' exact counts. It does not include the sampling error of few records.

A share ``r = a / (a + b)`` of two noisy counts has Fieller's interval: all r for which ``a - r (a + b)`` is
within its own noise of 0, so that the noise of the denominator is included (E. C. Fieller, J. R. Stat. Soc.
B 16, 1954). Means of shares of different rows, whose noise is independent, have the MOVER's interval
(G. Y. Zou, A. Donner, Stat. Med. 27, 2008): the distances of the shares to their own limits, added in
quadrature.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95
NORMAL = 2.170090377584560
"""Two-sided quantile of the normal distribution for 97 %.

The same noisy counts select the classes with enough records, which costs up to two points of coverage near
the floor; with this quantile at least ``LEVEL`` remains.
"""
TAILS = (0.015, 0.985)
"""The same probabilities, for quantiles of random draws."""
DRAWS = 2000
SEED = 20_260_101
"""Seed of the draws for areas under curves: fixed, so that the same totals have the same interval."""


def share(
    part: Floats,
    rest: Floats,
    part_noise: Floats | float,
    rest_noise: Floats | float,
    normal: float = NORMAL,
) -> tuple[Floats, Floats]:
    """Compute Fieller's limits of ``part / (part + rest)``, of any shape, not clipped to [0, 1].

    Args:
        part: noisy counts.
        rest: noisy counts of the same shape.
        part_noise: standard deviation of the noise in ``part``.
        rest_noise: standard deviation of the noise in ``rest``.
        normal: two-sided quantile of the normal distribution for the level.

    Returns:
        Lower and upper limits; minus and plus infinity where the noise is too large to bound the share.

    >>> low, high = share(np.array([50.0]), np.array([50.0]), 2.0, 2.0)
    >>> [round(float(value[0]), 3) for value in (low, high)]
    [0.469, 0.531]
    """
    total = part + rest
    own, other = (normal * part_noise) ** 2, (normal * rest_noise) ** 2
    # total^2 r^2 - 2 part total r + part^2 <= own (1 - r)^2 + other r^2
    square, linear, constant = total**2 - own - other, part * total - own, part**2 - own
    bounded = (square > 0) & (total > 0)
    safe = np.where(bounded, square, 1.0)
    root = np.sqrt(np.maximum(linear**2 - safe * constant, 0.0))
    return (
        np.where(bounded, (linear - root) / safe, -math.inf),
        np.where(bounded, (linear + root) / safe, math.inf),
    )


def mean(values: Floats, low: Floats, high: Floats) -> tuple[float, float]:
    """Compute the MOVER's limits of the mean of independent values, not clipped.

    Args:
        values: estimates (n,).
        low: their lower limits (n,).
        high: their upper limits (n,).
    """
    middle, number = float(values.mean()), len(values)
    down = math.sqrt(float(((values - low) ** 2).sum())) / number
    up = math.sqrt(float(((high - values) ** 2).sum())) / number
    return middle - down, middle + up


def mean_area(
    scores: Floats, confusion: Floats, chosen: NDArray[np.bool_], cell: float, bin_noise: float
) -> tuple[float, float]:
    """Compute limits of the mean area under the ROC curve over some classes, not clipped.

    Redrawn noise is subtracted, which gives possible exact counts. There is no closed form, because areas are
    products of counts.

    Args:
        scores: noisy histograms, (C, 2, bins).
        confusion: noisy counts, (C, C).
        chosen: mask of the classes, (C,), at least one.
        cell: standard deviation of the noise in a cell of the confusion matrix.
        bin_noise: standard deviation of the noise in a bin.
    """
    draw = np.random.default_rng(SEED)
    classes = len(confusion)
    rows = confusion.sum(1) - draw.normal(0.0, cell * math.sqrt(classes), (DRAWS, classes))
    numbers = np.stack([rows, rows.sum(1, keepdims=True) - rows], 2)
    return _drawn(draw, scores, numbers, chosen, bin_noise)


def mean_finding_area(
    scores: Floats, numbers: Floats, chosen: NDArray[np.bool_], number_noise: float, bin_noise: float
) -> tuple[float, float]:
    """Compute limits of the mean area under the ROC curve over some findings, like ``mean_area``.

    Args:
        scores: noisy histograms, (K, 2, bins).
        numbers: noisy numbers of records with each finding and without it, (K, 2).
        chosen: mask of the findings, (K,), at least one.
        number_noise: standard deviation of the noise in each number.
        bin_noise: standard deviation of the noise in a bin.
    """
    draw = np.random.default_rng(SEED)
    drawn = numbers - draw.normal(0.0, number_noise, (DRAWS, *numbers.shape))
    return _drawn(draw, scores, drawn, chosen, bin_noise)


def _drawn(
    draw: np.random.Generator, scores: Floats, numbers: Floats, chosen: NDArray[np.bool_], bin_noise: float
) -> tuple[float, float]:
    """Return quantiles of the mean area over draws of the exact counts, of ``numbers`` (draws, C, 2)."""
    areas = np.zeros(DRAWS)
    for index in np.flatnonzero(chosen):
        exact = scores[index] - draw.normal(0.0, bin_noise, (DRAWS, *scores.shape[1:]))
        areas += area(exact, numbers[:, index])
    low, high = np.quantile(areas / chosen.sum(), TAILS)
    return float(low), float(high)


def area(histograms: Floats, numbers: Floats) -> Floats:
    """Compute the area under the ROC curve from histograms shifted evenly to known numbers of records.

    Args:
        histograms: scores of the records of a class and of all others, (..., 2, bins).
        numbers: of these records, (..., 2), not 0.
    """
    shift = (numbers - histograms.sum(-1)) / histograms.shape[-1]
    positives, negatives = np.moveaxis(histograms + shift[..., None], -2, 0)
    below = np.cumsum(negatives, axis=-1) - negatives / 2
    areas: Floats = (positives * below).sum(-1) / numbers.prod(-1)
    return areas


def cut(low: float, high: float) -> tuple[float, float]:
    """Clip the limits of a share to [0, 1]."""
    return min(max(low, 0.0), 1.0), min(max(high, 0.0), 1.0)
