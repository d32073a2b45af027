"""Measures from single papers: accuracies of personal models, and eigenvalues of features.

PM(V) and PM(L). Source: Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes,
AAAI 2023. FedNH's slides and its experiments name the two weightings the other way round. Here, as in its
tables, **V** is for *valid classes* and **L** for *label distribution*. The paper takes a personal model on a
test set that all silos share; on a silo's own test fold the values depend on that fold.

Eigenvalues of the features' correlation matrix are equal if features use their space evenly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def weighted_accuracy(confusion: NDArray[Any], class_weights: NDArray[Any]) -> float:
    """Return an accuracy weighted by class: ``sum_j a(y_j) 1[y_j = y^_j] / sum_j a(y_j)`` over records j.

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
    """Return PM(V): the accuracy on classes that the silo trained on, ``a(y) = 1[n_y > 0]``.

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
    """Return PM(L): the accuracy with each class at its share of the silo's records, ``a(y) = n_y / n``.

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


def _counts(label_counts: NDArray[Any]) -> NDArray[np.float64]:
    counts = np.asarray(label_counts, np.float64)
    if not (counts >= 0).all():
        raise ValueError(f"Expected counts that are not negative, but got {counts.tolist()}.")
    return counts


def correlation_eigenvalues(features: NDArray[np.floating], k: int = 50) -> NDArray[np.float64]:
    """Return the largest eigenvalues of the features' correlation matrix.

    Features are standardised by their mean and unbiased standard deviation over all records; a
    constant feature and its row stay zero.

    Args:
        features: (n, d), n >= 2.
        k: most eigenvalues.

    Returns:
        Descending, (min(d, k),) float64.

    Raises:
        ValueError: if there are fewer than two records.
    """
    values = np.asarray(features, dtype=np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise ValueError(f"Expected `features` of shape (n, d) with n >= 2, but got {values.shape}.")
    deviation = values.std(axis=0, ddof=1)
    standardised = (values - values.mean(axis=0)) / np.where(deviation == 0, 1.0, deviation)
    correlation = standardised.T @ standardised / (len(values) - 1)
    return np.linalg.eigvalsh(correlation)[::-1][:k]


def eigenvalue_spread(features: NDArray[np.floating], k: int = 50, divisor: float | None = 128) -> float:
    """Return the spread of the k largest eigenvalues: their squared deviations over ``divisor``.

    Source: Fan et al., Federated Learning under Partially Class-Disjoint Data via Manifold
    Reshaping, TMLR 2023, table 7. The printed divisor is 128, which is their batch size.

    Args:
        features: (n, d), n >= 2.
        divisor: None divides by their number, which gives the variance.

    Raises:
        ValueError: if there are fewer than two records.

    >>> round(eigenvalue_spread(np.array([[0.0, 0.0], [1.0, 1.0]]), divisor=None), 6)
    1.0
    """
    eigenvalues = correlation_eigenvalues(features, k)
    squares = float(((eigenvalues - eigenvalues.mean()) ** 2).sum())
    return squares / (len(eigenvalues) if divisor is None else divisor)
