"""Classification metrics from a confusion matrix and from per-class score histograms.

Both kinds of counts are sums over records, so the metrics of all silos together are those of the
summed counts. Rows of a confusion matrix are true classes, columns predicted ones. A score
histogram has shape (C, 2, bins): for each class c the scores of class c in equal-width bins of
[0, 1], of the records of class c ([c, 0], the positives) and of all others ([c, 1], the negatives).
Undefined metrics, such as those of a class without records, are NaN.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Counts: TypeAlias = NDArray[Any]
"""Integer or float counts."""

# Softmax in float32 may leave [0, 1] by a rounding error; values further off are not scores.
_SCORE_TOLERANCE = 1e-6

NEARLY_ALL = 0.98
"""Least share of records with the same answer at which a model gives one answer."""


def confusion_matrix(labels: NDArray[Any], predictions: NDArray[Any], num_classes: int) -> NDArray[np.int64]:
    """Count the records of each (true, predicted) pair of classes.

    Args:
        labels: true classes, integers (n,).
        predictions: predicted classes, integers (n,).

    Returns:
        Counts (C, C), rows true, columns predicted.

    Raises:
        ValueError: if shapes differ or a class is not in [0, C).

    >>> confusion_matrix(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    _check_classes("labels", labels, num_classes)
    _check_classes("predictions", predictions, num_classes)
    if labels.shape != predictions.shape:
        raise ValueError(
            f"Expected arguments `labels` and `predictions` of one shape, but got {labels.shape} "
            f"and {predictions.shape}."
        )
    cells = labels.astype(np.int64) * num_classes + predictions.astype(np.int64)
    counts = np.bincount(cells, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes).astype(np.int64, copy=False)


def finding_confusion(labels: NDArray[Any], answers: NDArray[Any]) -> NDArray[np.int64]:
    """Count the records of each (true, answered) pair of each finding.

    Args:
        labels: 1 if a record has a finding, 0 if not, other values if unknown, (n, K).
        answers: whether the model predicts it, bool (n, K).

    Returns:
        Counts (K, 2, 2), rows true (absent, present), columns answered, without unknown labels.

    Raises:
        ValueError: if shapes differ.

    >>> finding_confusion(np.array([[0], [1], [-1]]), np.array([[True], [True], [False]])).tolist()
    [[[0, 1], [0, 1]]]
    """
    if labels.ndim != 2 or labels.shape != answers.shape:
        raise ValueError(
            "Expected arguments `labels` and `answers` of one shape (n, K), but got "
            f"{labels.shape} and {answers.shape}."
        )
    truths, answered = ((labels == 0, labels == 1), (~answers, answers))
    rows = [[(truth & answer).sum(0) for answer in answered] for truth in truths]
    return np.moveaxis(np.array(rows, dtype=np.int64), 2, 0)


def score_histogram(scores: NDArray[Any], labels: NDArray[Any], bins: int) -> NDArray[np.int64]:
    """Count the one-vs-rest scores of each class, separately for its own records and all others.

    Args:
        scores: in [0, 1], (n, C); usually probabilities.
        labels: true classes, integers (n,), or findings (n, C) as in ``finding_confusion``.
        bins: number of equal-width bins of [0, 1]; 1 belongs to the last.

    Returns:
        Counts (C, 2, bins): [c, 0] positives, [c, 1] negatives.

    Raises:
        ValueError: if shapes do not fit, a score is not in [0, 1] or a class not in [0, C).

    >>> score_histogram(np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([0, 0]), 2).tolist()
    [[[1, 1], [0, 0]], [[0, 0], [1, 1]]]
    """
    if scores.ndim != 2 or labels.shape not in (scores.shape[:1], scores.shape):
        raise ValueError(
            "Expected arguments `scores` of shape (n, C) and `labels` of shape (n,), but got "
            f"{scores.shape} and {labels.shape}."
        )
    if bins < 1:
        raise ValueError(f"Expected argument `bins` to be at least 1, but got {bins}.")
    num_classes = scores.shape[1]
    if labels.ndim == 1:
        _check_classes("labels", labels, num_classes)
    if not ((scores >= -_SCORE_TOLERANCE) & (scores <= 1 + _SCORE_TOLERANCE)).all():
        raise ValueError("Expected argument `scores` to be in [0, 1], but got values outside it or NaN.")
    place = np.clip((scores.astype(np.float64) * bins).astype(np.int64), 0, bins - 1)
    classes = np.arange(num_classes)
    negative = labels[:, None] != classes if labels.ndim == 1 else labels != 1
    cells = (2 * classes + negative) * bins + place
    if labels.ndim == 2:
        cells = cells[(labels == 0) | (labels == 1)]
    counts = np.bincount(cells.reshape(-1), minlength=num_classes * 2 * bins)
    return counts.reshape(num_classes, 2, bins).astype(np.int64, copy=False)


def accuracy(confusion: Counts) -> float:
    """Return the share of records on the diagonal; NaN without records.

    >>> accuracy(np.array([[3, 1], [0, 4]]))
    0.875
    """
    _check_confusion(confusion)
    return _share(np.trace(confusion), confusion.sum()).item()


def per_class_recall(confusion: Counts) -> NDArray[np.float64]:
    """Return the share of each true class that is predicted correctly, (C,); NaN without records.

    >>> per_class_recall(np.array([[3, 1], [0, 0]])).tolist()
    [0.75, nan]
    """
    _check_confusion(confusion)
    return _share(np.diagonal(confusion), confusion.sum(axis=1))


def balanced_accuracy(confusion: Counts) -> float:
    """Return the mean recall over the classes with records; NaN without records.

    >>> balanced_accuracy(np.array([[3, 1, 0], [0, 1, 0], [0, 0, 0]]))
    0.875
    """
    return macro_mean(per_class_recall(confusion))


def macro_mean(values: NDArray[np.float64]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none.

    >>> macro_mean(np.array([0.5, np.nan, 1.0]))
    0.75
    """
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else float("nan")


def one_answer(confusion: Counts) -> tuple[int, float] | None:
    """Return the class that a model answers for nearly all records of any class, if there is one.

    The records of all *other* classes decide: if most records are of one class, a good model often answers
    it. With records of only one class there is no result.

    Args:
        confusion: (C, C), rows are true classes.

    Returns:
        The class, and the share of the other classes' records with this answer; None for any other model.

    >>> one_answer(np.array([[5, 0], [3, 0]])), one_answer(np.array([[99, 0], [0, 1]]))
    ((0, 1.0), None)
    """
    counts = np.asarray(confusion)
    answer = int(counts.sum(0).argmax())
    own, others = counts[answer], np.delete(counts, answer, axis=0)
    records = others.sum()
    if not records or own[answer] < NEARLY_ALL * own.sum():
        return None
    share = float(others[:, answer].sum() / records)
    return (answer, share) if share >= NEARLY_ALL else None


def auroc(histogram: Counts) -> NDArray[np.float64]:
    """Return the area under the one-vs-rest ROC curve of each class, (C,).

    It is the share of (positive, negative) pairs in which the positive scores higher, with one half for
    pairs within a bin: the trapezoid rule on the binned scores. NaN for a class without positives or without
    negatives.

    >>> auroc(np.array([[[0, 1, 3], [4, 1, 0]]])).tolist()
    [0.975]
    """
    positives, negatives = _split(histogram)
    below = np.cumsum(negatives, axis=1) - negatives
    ordered = (positives * (below + negatives / 2)).sum(axis=1)
    return _share(ordered, positives.sum(axis=1) * negatives.sum(axis=1))


def average_precision(histogram: Counts) -> NDArray[np.float64]:
    """Return the average precision of each class one-vs-rest, (C,); NaN for a class without positives.

    ``sum_b (R_b - R_(b-1)) * precision_b`` with a threshold below each bin, from the highest: the
    standard step-wise sum without interpolation, with ties within a bin.

    >>> average_precision(np.array([[[0, 1, 3], [4, 1, 0]]])).tolist()
    [0.95]
    """
    positives, negatives = _split(histogram)
    precision = _share(_from_top(positives), _from_top(positives) + _from_top(negatives))
    steps = np.where(positives > 0, positives * precision, 0.0).sum(axis=1)
    return _share(steps, positives.sum(axis=1))


def _split(histogram: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return positives and negatives (C, bins) in float64, whose products cannot overflow."""
    if histogram.ndim != 3 or histogram.shape[1] != 2:
        raise ValueError(f"Expected argument `histogram` of shape (C, 2, bins), but got {histogram.shape}.")
    values = histogram.astype(np.float64)
    return values[:, 0], values[:, 1]


def _from_top(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Count each bin and all bins above it."""
    return np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]


def _share(part: Any, whole: Any) -> NDArray[np.float64]:
    """Return ``part / whole``, NaN where ``whole`` is 0."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    shares = np.full(whole.shape, np.nan)
    np.divide(part, whole, out=shares, where=whole != 0)
    return shares


def _check_confusion(confusion: Counts) -> None:
    if confusion.ndim != 2 or confusion.shape[0] != confusion.shape[1]:
        raise ValueError(f"Expected argument `confusion` of shape (C, C), but got {confusion.shape}.")


def _check_classes(name: str, values: NDArray[Any], num_classes: int) -> None:
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"Expected argument `{name}` to be integers of shape (n,), but got {values.dtype} of shape "
            f"{values.shape}."
        )
    if values.size and (values.min() < 0 or values.max() >= num_classes):
        raise ValueError(
            f"Expected argument `{name}` to be in [0, {num_classes}), but got values from {values.min()} "
            f"to {values.max()}."
        )
