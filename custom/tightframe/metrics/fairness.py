"""How evenly a model serves its sub-environments: FedILC's measures over their accuracies.

Source: Zhu et al., FedILC: Weighted Geometric Mean and Invariant Gradient Covariance for Federated
Learning on Non-IID Data, 2022. The accuracies a_1..a_n are of one model on each (silo, sub-environment)
pair, for example 9 of them in the paper, whose tables print the variance times 1000 and the entropy
times 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def accuracy_variance(accuracies: Sequence[float] | NDArray[Any]) -> float:
    """The unbiased variance ``sum (a_i - mean)^2 / (n - 1)``: lower is fairer.

    The divisor n - 1 is the one that fits the values which the paper prints.

    Args:
        accuracies: (n,) in [0, 1].

    Returns:
        NaN for fewer than two accuracies.

    Raises:
        ValueError: if a value is not in [0, 1]: one sub-environment without a result leaves nothing to
            compare.

    >>> round(accuracy_variance([0.5, 0.7]), 6)
    0.02
    """
    values = _checked(accuracies)
    return float(values.var(ddof=1)) if len(values) > 1 else float("nan")


def accuracy_entropy(accuracies: Sequence[float] | NDArray[Any]) -> float:
    """The entropy ``-sum p_i ln p_i`` of ``p = a / sum a``, in nats: higher is fairer, ln n at the most.

    Args:
        accuracies: (n,) in [0, 1].

    Returns:
        NaN if there are none, or all are 0.

    Raises:
        ValueError: if a value is not in [0, 1].

    >>> round(accuracy_entropy([0.8] * 9), 5)
    2.19722
    """
    values = _checked(accuracies)
    total = values.sum()
    if total <= 0:
        return float("nan")
    shares = values / total
    shares = shares[shares > 0]  # 0 ln 0 is 0
    return float(-(shares * np.log(shares)).sum())


def divergence_from_uniform(accuracies: Sequence[float] | NDArray[Any]) -> float:
    """The Kullback-Leibler divergence of ``a / sum a`` from the uniform distribution: ``ln n - H``.

    Args:
        accuracies: (n,) in [0, 1].

    Returns:
        0 for equal accuracies, ln n at the most; NaN if there are none, or all are 0.

    Raises:
        ValueError: if a value is not in [0, 1].

    >>> round(divergence_from_uniform([1.0, 0.0]), 6)
    0.693147
    """
    entropy = accuracy_entropy(accuracies)
    return float(max(np.log(len(accuracies)) - entropy, 0.0)) if len(accuracies) else float("nan")


def _checked(accuracies: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
    values = np.asarray(accuracies, np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(
            f"Expected argument `accuracies` of shape (n,) in [0, 1], but got {values.tolist()}."
        )
    return values
