"""Metrics as pure functions of totals: counts summed over silos, never records."""

from tightframe.metrics.classification import (
    accuracy,
    auroc,
    auroc_error_bound,
    average_precision,
    average_precision_error_bound,
    balanced_accuracy,
    confusion_matrix,
    macro_mean,
    per_class_recall,
    score_histogram,
)
from tightframe.metrics.features import correlation_eigenvalues, eigenvalue_spread

__all__ = [
    "accuracy",
    "auroc",
    "auroc_error_bound",
    "average_precision",
    "average_precision_error_bound",
    "balanced_accuracy",
    "confusion_matrix",
    "correlation_eigenvalues",
    "eigenvalue_spread",
    "macro_mean",
    "per_class_recall",
    "score_histogram",
]
