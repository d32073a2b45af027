"""What tables print of personal and global models: PM(V), PM(L), General, Personal, last rounds.

Sources: Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023,
for PM(V) and PM(L); Li et al., No Fear of Classifier Biases, ICCV 2023, for General and Personal; Huang et
al., Neural Collapse Inspired Federated Learning with Non-iid Data, 2023, for the mean of the last 50
rounds; Fan et al., Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping, TMLR
2023, table 4, for the rounds until a value is reached.

FedNH's slides and its experiments name the two weightings the other way round. Here, as in its tables,
**V** is for *valid classes* and **L** for *label distribution*. Both are of a personal model on a test
set that all silos share; on a silo's own test fold they are what that fold makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GENERAL_ROUNDS = 5
"""FedETF's General is the mean test accuracy of this many last rounds."""
LAST_ROUNDS = 50
"""FedAvg_ETF's accuracy is the mean of this many last rounds."""


def weighted_accuracy(confusion: NDArray[Any], class_weights: NDArray[Any]) -> float:
    """``sum_j a(y_j) 1[y_j = y^_j] / sum_j a(y_j)`` over records j: an accuracy weighted by class.

    Args:
        confusion: counts (C, C), rows true classes, columns predicted ones.
        class_weights: a, not negative, (C,).

    Returns:
        NaN if no record has a weight.

    Raises:
        ValueError: if shapes do not fit or a weight is negative.

    >>> weighted_accuracy(np.array([[8, 2], [6, 4]]), np.array([3, 1]))
    0.7
    """
    if confusion.ndim != 2 or confusion.shape[0] != confusion.shape[1]:
        raise ValueError(f"Expected argument `confusion` of shape (C, C), but got {confusion.shape}.")
    weights = np.asarray(class_weights, np.float64)
    if weights.shape != confusion.shape[:1] or not ((weights >= 0) & np.isfinite(weights)).all():
        raise ValueError(
            f"Expected {len(confusion)} weights that are not negative, but got {weights.tolist()}."
        )
    hits = float(weights @ np.diagonal(confusion).astype(np.float64))
    records = float(weights @ confusion.sum(axis=1).astype(np.float64))
    return hits / records if records > 0 else float("nan")


def valid_class_accuracy(confusion: NDArray[Any], label_counts: NDArray[Any]) -> float:
    """PM(V): the accuracy on records of the classes that the silo trained on, ``a(y) = 1[n_y > 0]``.

    Args:
        confusion: of the silo's model, counts (C, C), rows true.
        label_counts: the silo's training records of each class (C,).

    Returns:
        NaN if no record is of such a class.

    Raises:
        ValueError: if shapes do not fit or a count is negative.

    >>> valid_class_accuracy(np.array([[8, 2], [6, 4]]), np.array([30, 0]))
    0.8
    """
    counts = _counts(label_counts)
    return weighted_accuracy(confusion, (counts > 0).astype(np.float64))


def label_share_accuracy(confusion: NDArray[Any], label_counts: NDArray[Any]) -> float:
    """PM(L): the accuracy with each class at its share of the silo's training records, ``a(y) = n_y / n``.

    Args:
        confusion: of the silo's model, counts (C, C), rows true.
        label_counts: the silo's training records of each class (C,).

    Returns:
        NaN if no record is of a class that the silo trained on.

    Raises:
        ValueError: if shapes do not fit or a count is negative.

    >>> label_share_accuracy(np.array([[8, 2], [6, 4]]), np.array([30, 10]))
    0.7
    """
    counts = _counts(label_counts)
    return weighted_accuracy(confusion, counts / max(counts.sum(), 1.0))


def mean_over_silos(values: Sequence[float] | NDArray[Any], active: Sequence[bool] | None = None) -> float:
    """Mean of a personal accuracy over silos, each counting once; FedETF's Personal, FedNH's PM.

    Args:
        values: of each silo (K,); NaN where a silo has none, which is left out.
        active: the silos of the last round (K,), the only ones that FedNH's experiments average; all
            by default.

    Returns:
        NaN if no silo has a value.

    Raises:
        ValueError: if shapes differ.
    """
    array = np.asarray(values, np.float64)
    chosen = np.ones(array.shape, bool) if active is None else np.asarray(active, bool)
    if array.ndim != 1 or chosen.shape != array.shape:
        raise ValueError(
            f"Expected arguments `values` and `active` of one shape (K,), but got {array.shape} and "
            f"{chosen.shape}."
        )
    return _mean(array[chosen])


def last_rounds_mean(by_round: Sequence[float | None], last: int) -> float:
    """Mean of a metric over the last rounds; a round without a value (None or NaN) is left out.

    Args:
        by_round: the metric after each round, in order.
        last: how many rounds; ``GENERAL_ROUNDS`` for FedETF's General, ``LAST_ROUNDS`` for FedAvg_ETF.

    Returns:
        NaN if none of these rounds has a value.

    Raises:
        ValueError: if there are fewer rounds, or ``last`` is not positive.

    >>> last_rounds_mean([0.1, 0.4, None, 0.6], 3)
    0.5
    """
    if not 1 <= last <= len(by_round):
        raise ValueError(
            f"Expected argument `last` to be from 1 to the {len(by_round)} rounds, but got {last}."
        )
    return _mean(_values(by_round)[-last:])


def rounds_to_reach(by_round: Sequence[float | None], target: float) -> int | None:
    """The first round (1-based) after which a metric is at least ``target``; None if it never is.

    >>> rounds_to_reach([0.2, None, 0.5, 0.7], 0.5)
    3
    """
    reached = np.flatnonzero(_values(by_round) >= target)
    return int(reached[0]) + 1 if reached.size else None


def _values(by_round: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in by_round], np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else float("nan")


def _counts(label_counts: NDArray[Any]) -> NDArray[np.float64]:
    counts = np.asarray(label_counts, np.float64)
    if not (counts >= 0).all():
        raise ValueError(f"Expected counts that are not negative, but got {counts.tolist()}.")
    return counts
