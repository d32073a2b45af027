"""Neural collapse: how tightly features gather at their class means, and how those are arranged.

Source: Papyan, Han and Donoho, Prevalence of Neural Collapse During the Terminal Phase of Deep Learning
Training, PNAS 2020 (NC1 to NC3); Li et al., No Fear of Classifier Biases, ICCV 2023, for the cosines.
Features are those of one evaluation pass over all records; the cosines between silos' own means and
models need each silo's numbers, so they are for simulations only. What does not exist is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class Collapse:
    """All measures of one model, and which classes they are of.

    Attributes:
        nc1: see ``nc1``; towards 0 under collapse, as all measures.
        nc2_equinorm, nc2_equiangular: see ``nc2``.
        nc3: see ``nc3``; NaN without head weights.
        classes: that have records, ascending.
        dropped: classes without a record, which no measure looks at, ascending.
    """

    nc1: float
    nc2_equinorm: float
    nc2_equiangular: float
    nc3: float
    classes: tuple[int, ...]
    dropped: tuple[int, ...]


def collapse_measures(
    features: NDArray[Any], labels: NDArray[Any], num_classes: int, weights: NDArray[Any] | None = None
) -> Collapse:
    """NC1, NC2 and NC3 of the classes that have records, and which classes were dropped.

    Args:
        features: (n, d).
        labels: classes, integers (n,).
        num_classes: C.
        weights: class vectors of the head (C, d), for NC3.

    Raises:
        ValueError: if shapes do not fit or a class is not in [0, C).
    """
    features, labels = _checked(features, labels)
    if labels.size and int(labels.max()) >= num_classes:
        raise ValueError(
            f"Expected argument `labels` to be in [0, {num_classes}), but got {int(labels.max())}."
        )
    expected = (num_classes, features.shape[1])
    if weights is not None and weights.shape != expected:
        raise ValueError(f"Expected argument `weights` of shape {expected}, but got {weights.shape}.")
    present = np.unique(labels)
    equinorm, equiangular = nc2(features, labels)
    return Collapse(
        nc1=nc1(features, labels),
        nc2_equinorm=equinorm,
        nc2_equiangular=equiangular,
        nc3=float("nan") if weights is None else nc3(features, labels, weights),
        classes=tuple(present.tolist()),
        dropped=tuple(np.setdiff1d(np.arange(num_classes), present).tolist()),
    )


def nc1(features: NDArray[Any], labels: NDArray[Any]) -> float:
    """Variability collapse: ``tr(S_W S_B^+) / C`` over the C classes that have records.

    S_W is the mean over classes of the within-class covariance (divisor N_c), S_B the covariance of
    the class means around their own mean (divisor C), with its pseudo-inverse of rank C - 1 at most.

    Args:
        features: (n, d).
        labels: classes, integers (n,).

    Returns:
        0 under collapse; NaN for fewer than two classes, or if all class means are one point.

    Raises:
        ValueError: if shapes do not fit.

    >>> round(nc1(np.array([[0.0], [2.0], [9.0], [11.0]]), np.array([0, 0, 1, 1])), 6)  # 1 / 4.5**2 / 2
    0.024691
    """
    features, labels = _checked(features, labels)
    means, place = _class_means(features, labels)
    if len(means) < 2:
        return float("nan")
    centred = means - means.mean(0)
    _, scales, directions = np.linalg.svd(centred, full_matrices=False)
    # As numpy's own rank: what is below is rounding, and its inverse would be anything.
    kept = scales > scales.max() * max(centred.shape) * np.finfo(np.float64).eps
    kept[len(means) - 1 :] = False
    if not kept.any():
        return float("nan")
    # Along the principal directions of S_B its inverse is diagonal: no (d, d) matrix is needed.
    deviations = (features - means[place]) @ directions[kept].T
    counts = np.bincount(place)
    within = (deviations**2 / counts[place][:, None]).sum(0) / len(means)
    between = scales[kept] ** 2 / len(means)
    return float((within / between).sum() / len(means))


def nc2(features: NDArray[Any], labels: NDArray[Any]) -> tuple[float, float]:
    """Convergence of the class means to a simplex equiangular tight frame.

    With m_c the class means, centred by their own mean: equinorm ``std |m_c| / mean |m_c|``, equiangular
    the mean over pairs of ``|cos(m_c, m_c') + 1 / (C - 1)|``, over the C classes that have records.

    Args:
        features: (n, d).
        labels: classes, integers (n,).

    Returns:
        (equinorm, equiangular), both 0 for a simplex; NaN for fewer than two classes, or if all class
        means are one point.

    Raises:
        ValueError: if shapes do not fit.

    >>> [round(value, 12) for value in nc2(np.eye(3), np.array([0, 1, 2]))]
    [0.0, 0.0]
    """
    means, _ = _class_means(*_checked(features, labels))
    number = len(means)
    if number < 2:
        return float("nan"), float("nan")
    centred = means - means.mean(0)
    norms = np.linalg.norm(centred, axis=1)
    if norms.mean() <= SMALLEST_NORM:
        return float("nan"), float("nan")
    cosines = cosine_matrix(centred)[~np.eye(number, dtype=bool)]
    return float(norms.std() / norms.mean()), float(np.abs(cosines + 1 / (number - 1)).mean())


def nc3(features: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any]) -> float:
    """Self-duality: ``| W / |W|_F - M / |M|_F |_F`` with M the centred class means as rows.

    Rows of both are those of the classes that have records.

    Args:
        features: (n, d).
        labels: classes, integers (n,).
        weights: class vectors of the head (C, d); a frozen frame with vectors in columns is transposed.

    Returns:
        Between 0 (the head points at the class means) and 2; NaN for fewer than two classes, or if a
        norm is 0.

    Raises:
        ValueError: if shapes do not fit.
    """
    features, labels = _checked(features, labels)
    if (
        weights.ndim != 2
        or weights.shape[1] != features.shape[1]
        or (labels.size and labels.max() >= len(weights))
    ):
        raise ValueError(
            f"Expected argument `weights` of one row of {features.shape[1]} for each class, but got shape "
            f"{weights.shape}."
        )
    means, _ = _class_means(features, labels)
    if len(means) < 2:
        return float("nan")
    centred = means - means.mean(0)
    rows = np.asarray(weights, np.float64)[np.unique(labels)]
    sizes = np.linalg.norm(rows), np.linalg.norm(centred)
    if min(sizes) <= SMALLEST_NORM:
        return float("nan")
    return float(np.linalg.norm(rows / sizes[0] - centred / sizes[1]))


def cosine_to_class_mean(features: NDArray[Any], labels: NDArray[Any]) -> float:
    """FedETF's measure of NC1: the mean over records of the cosine with their class's mean.

    Args:
        features: (n, d).
        labels: classes, integers (n,).

    Returns:
        1 under collapse; NaN without records. A zero vector has cosine 0.

    Raises:
        ValueError: if shapes do not fit.
    """
    features, labels = _checked(features, labels)
    if not labels.size:
        return float("nan")
    means, place = _class_means(features, labels)
    return float((_unit(features) * _unit(means)[place]).sum(1).mean())


def silo_mean_cosine(means: NDArray[Any], held: NDArray[Any]) -> float:
    """FedETF's measure of agreement: mean cosine between silos' means of a class, over classes.

    A class that fewer than two silos hold has no pair and is left out.

    Args:
        means: each silo's class means (K, C, d).
        held: which silo holds which class, bool (K, C).

    Returns:
        The mean over classes of the mean over pairs of silos; NaN if no class has a pair.

    Raises:
        ValueError: if shapes do not fit.
    """
    if means.ndim != 3 or held.shape != means.shape[:2]:
        raise ValueError(
            "Expected arguments `means` of shape (K, C, d) and `held` of shape (K, C), but got "
            f"{means.shape} and {held.shape}."
        )
    chosen = held.astype(bool)
    pairs = [
        mean_pairwise_cosine(means[chosen[:, c], c]) for c in range(means.shape[1]) if chosen[:, c].sum() >= 2
    ]
    return float(np.mean(pairs)) if pairs else float("nan")


def cosine_matrix(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Cosines between the rows of (K, P), as (K, K); a zero row has cosine 0 with all.

    >>> cosine_matrix(np.array([[1.0, 0.0], [0.0, 3.0]])).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    unit = _unit(np.asarray(vectors, np.float64))
    return unit @ unit.T


def mean_pairwise_cosine(vectors: NDArray[Any]) -> float:
    """Mean cosine between different rows of (K, P), such as flattened heads; NaN for fewer than two rows."""
    number = len(vectors)
    if number < 2:
        return float("nan")
    return float(cosine_matrix(vectors)[~np.eye(number, dtype=bool)].mean())


def _class_means(
    features: NDArray[np.float64], labels: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(means of the classes that have records (K, d), each record's place among them (n,))."""
    present, place = np.unique(labels, return_inverse=True)
    sums = np.zeros((len(present), features.shape[1]))
    np.add.at(sums, place, features)
    return sums / np.bincount(place, minlength=len(present))[:, None], place


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), SMALLEST_NORM)


def _checked(features: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            "Expected arguments `features` of shape (n, d) and `labels` of shape (n,), but got "
            f"{features.shape} and {labels.shape}."
        )
    if not np.issubdtype(labels.dtype, np.integer) or (labels.size and labels.min() < 0):
        raise ValueError(f"Expected argument `labels` to be integers from 0 on, but got {labels.dtype}.")
    return np.asarray(features, np.float64), labels.astype(np.int64)
