"""How far areas from histograms of scores can be from those on the raw scores: the tests' own bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tightframe.metrics.classification import Counts, _from_top, _share, _split


def auroc_error_bound(histogram: Counts) -> NDArray[np.float64]:
    """Return the largest distance of ``auroc`` from the area on the raw scores, (C,).

    Bins keep the order of scores that lie in different bins. A pair within one bin counts 1/2
    where the raw scores would count 0, 1/2 or 1, so the error is at most half the share of (positive,
    negative) pairs that share a bin: ``sum_b p_b n_b / (2 P N)``.

    >>> auroc_error_bound(np.array([[[0, 1, 3], [4, 1, 0]]])).tolist()
    [0.025]
    """
    positives, negatives = _split(histogram)
    tied = (positives * negatives).sum(axis=1) / 2
    return _share(tied, positives.sum(axis=1) * negatives.sum(axis=1))


def average_precision_error_bound(histogram: Counts) -> NDArray[np.float64]:
    """Return the largest distance of ``average_precision`` from the value on the raw scores, (C,).

    Consider a bin of p positives and n negatives with T positives and F negatives above it. On raw
    scores each of the p positives takes the precision at its own threshold, where T + i positives
    (1 <= i <= p) and F + j negatives (0 <= j <= n) are found. ``(T + i) / (T + i + F + j)`` grows with
    i and falls with j, so it lies between ``(T + 1) / (T + 1 + F + n)`` and ``(T + p) / (T + p + F)``,
    as does the binned value ``(T + p) / (T + p + F + n)``. The differences to either end, weighted by
    p / P and summed over bins, bound the error upwards and downwards; the larger is returned.

    >>> average_precision_error_bound(np.array([[[0, 1, 3], [4, 0, 0]]])).tolist()
    [0.0]
    """
    positives, negatives = _split(histogram)
    hits, false = _from_top(positives), _from_top(negatives)
    binned = _share(hits, hits + false)
    highest = _share(hits, hits + false - negatives)
    first = hits - positives + 1
    lowest = _share(first, first + false)
    present = positives > 0
    above = np.where(present, positives * (highest - binned), 0.0).sum(axis=1)
    below = np.where(present, positives * (binned - lowest), 0.0).sum(axis=1)
    return _share(np.maximum(above, below), positives.sum(axis=1))
