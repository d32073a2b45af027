"""Metrics as pure functions of totals: counts summed over silos, never records.

Eigenvalues are of features, so they need one evaluator with all records.
"""

from tightframe.metrics.classification import (
    NEARLY_ALL,
    accuracy,
    auroc,
    average_precision,
    balanced_accuracy,
    confusion_matrix,
    finding_confusion,
    macro_mean,
    one_answer,
    per_class_recall,
    score_histogram,
)
from tightframe.metrics.papers import (
    correlation_eigenvalues,
    eigenvalue_spread,
    label_share_accuracy,
    valid_class_accuracy,
    weighted_accuracy,
)

__all__ = [
    "NEARLY_ALL",
    "accuracy",
    "auroc",
    "average_precision",
    "balanced_accuracy",
    "confusion_matrix",
    "correlation_eigenvalues",
    "eigenvalue_spread",
    "finding_confusion",
    "label_share_accuracy",
    "macro_mean",
    "one_answer",
    "per_class_recall",
    "score_histogram",
    "valid_class_accuracy",
    "weighted_accuracy",
]
