"""Words for what a silo's term of a sum holds: before a job, and in the silo's own report after it."""

from __future__ import annotations

from collections.abc import Mapping

SUMS: Mapping[str, str] = {
    "statistics": "statistics, before round 1",
    "before": "before round 1",
    "train": "training rounds",
    "after": "after the last round",
    "closing": "closing, on the last model",
    "personal": "personal models",
}
"""Kinds of sums in words."""
TERMS: Mapping[str, str] = {
    "classes": "flags of the classes that it holds",
    "closing": "a note that it has closed the run",
    "evaluation": "counts of right and wrong answers and histograms of scores, by class",
    "frozen": "sums of frozen features and of their products, counts of records, by class",
    "gradient": "gradients of the model",
    "moments": "means and variances of features, by class",
    "own": "results of its own models",
    "failed": "a flag that it could not contribute",
    "norms": "the range of its update's norm",
    "personal": "accuracies of its personal model, in steps of 1/32",
    "privacy": "its range of spent epsilon",
    "prototype": "sums of features, by class",
    "prototypes": "sums of features, by class",
    "released": "products of features, sums of features and counts of records, by class",
    "statistics": "counts of records, moments of inputs",
    "temperature": "losses of validation records at several temperatures",
    "training": "training losses",
    "update": "changes of the model",
}
"""Meaning of fields by the first part of their names; others are a method's own and shown by name."""


def described(numbers: Mapping[str, int]) -> str:
    """Return the numbers of a term in words.

    Args:
        numbers: by the first part of the fields' names.

    >>> described({"update": 1226, "failed": 1})
    'changes of the model (1,226); a flag that it could not contribute (1)'
    """
    return "; ".join(f"{TERMS.get(name, name)} ({number:,})" for name, number in numbers.items())
