"""Eigenvalues of the features' correlation matrix: they are equal where features use their space evenly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def correlation_eigenvalues(features: NDArray[np.floating], k: int = 50) -> NDArray[np.float64]:
    """Return the largest eigenvalues of the features' correlation matrix.

    Features are standardised by their mean and unbiased standard deviation over all records; a
    constant feature stays zero, and so does its row.

    Args:
        features: (n, d), n >= 2.
        k: how many at the most.

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
