"""Metrics as pure functions of totals: counts summed over silos, never records.

Those of ``collapse`` look at features, so they are for one evaluator with all records.
"""

from tightframe.metrics.classification import (
    NEARLY_ALL,
    accuracy,
    auroc,
    auroc_error_bound,
    average_precision,
    average_precision_error_bound,
    balanced_accuracy,
    confusion_matrix,
    macro_mean,
    one_answer,
    per_class_recall,
    score_histogram,
)
from tightframe.metrics.collapse import (
    Collapse,
    collapse_measures,
    cosine_matrix,
    cosine_to_class_mean,
    mean_pairwise_cosine,
    nc1,
    nc2,
    nc3,
    silo_mean_cosine,
)
from tightframe.metrics.fairness import accuracy_entropy, accuracy_variance, divergence_from_uniform
from tightframe.metrics.features import correlation_eigenvalues, eigenvalue_spread
from tightframe.metrics.personal import (
    GENERAL_ROUNDS,
    LAST_ROUNDS,
    label_share_accuracy,
    last_rounds_mean,
    mean_over_silos,
    rounds_to_reach,
    valid_class_accuracy,
    weighted_accuracy,
)

__all__ = [
    "GENERAL_ROUNDS",
    "LAST_ROUNDS",
    "NEARLY_ALL",
    "Collapse",
    "accuracy",
    "accuracy_entropy",
    "accuracy_variance",
    "auroc",
    "auroc_error_bound",
    "average_precision",
    "average_precision_error_bound",
    "balanced_accuracy",
    "collapse_measures",
    "confusion_matrix",
    "correlation_eigenvalues",
    "cosine_matrix",
    "cosine_to_class_mean",
    "divergence_from_uniform",
    "eigenvalue_spread",
    "label_share_accuracy",
    "last_rounds_mean",
    "macro_mean",
    "mean_over_silos",
    "mean_pairwise_cosine",
    "nc1",
    "nc2",
    "nc3",
    "one_answer",
    "per_class_recall",
    "rounds_to_reach",
    "score_histogram",
    "silo_mean_cosine",
    "valid_class_accuracy",
    "weighted_accuracy",
]
