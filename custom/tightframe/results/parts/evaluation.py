"""Metrics of a model on validation and test records, in the form of all result files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from tightframe.results.files import Values


class OneAnswer(Values):
    """A model that gives one answer to every record.

    Attributes:
        of_class: the class that it answers.
        share: of the other classes' records that also get this answer.
        interval: limits of the share without the noise; None if counts are exact.
        certain: whether it holds at the lower limit.
    """

    of_class: str = Field(validation_alias="class", serialization_alias="class")
    share: float | None = None
    interval: tuple[float, float] | None = None
    certain: bool = True


class Rule(Values):
    """The rule that a record is positive whose score for a class is at least ``threshold``.

    Attributes:
        threshold: an edge of the score histogram's bins; at 1 no record is positive.
        sensitivity, specificity: at that edge, with limits for sampling (Wilson) if counts are exact, else
            for the noise alone.
        reachable: upper bound of the value that was not set, at a threshold between this edge and the next;
            absent if counts are noisy.
    """

    threshold: float
    sensitivity: float
    sensitivity_interval: tuple[float, float]
    specificity: float
    specificity_interval: tuple[float, float]
    reachable: float | None = None


class ClassReading(Values):
    """Scores of a class, one-vs-rest, read from its score histogram.

    Attributes:
        brier, calibration_error: lower and upper bound over all positions of scores in their bins (with
            noisy counts also over the noise, at 95 %).
        at_specificity: the rule of greatest sensitivity at a specificity of ``FoldMetrics.read_at``.
        at_sensitivity: the rule of greatest specificity at that sensitivity.
    """

    brier: tuple[float, float] | None = None
    calibration_error: tuple[float, float] | None = None
    at_specificity: Rule | None = None
    at_sensitivity: Rule | None = None


class Finding(Values):
    """A finding of a multi-label task, at a probability of 0.5.

    Attributes:
        confusion: test records with known finding: rows absent and present, columns predictions; None, like
            all that follows from it, if too few silos know it in enough records.
        sensitivity, specificity: of these counts.
        auroc, average_precision: from the score histogram.
        sensitivity_interval, specificity_interval: limits without the noise; None if counts are exact.
        records_interval: limits of the number of records with known finding, if counts are noisy.
    """

    confusion: tuple[tuple[int, int], tuple[int, int]] | None
    sensitivity: float | None = None
    specificity: float | None = None
    auroc: float | None = None
    average_precision: float | None = None
    sensitivity_interval: tuple[float, float] | None = None
    specificity_interval: tuple[float, float] | None = None
    records_interval: tuple[int, int] | None = None


Counts = tuple[list[int | float], list[int | float]]
"""Score histogram of a class: its own records, and all others, in equal bins of [0, 1]."""


class FoldMetrics(Values):
    """Metrics of one fold, empty without records. Rows of ``confusion`` are true classes.

    With ``noisy`` all numbers come from totals with noise of ``noise_deviation`` records in each cell of the
    confusion matrix, and a class with fewer noisy records than ``class_floor`` has no recall. Fields ending
    in ``_interval`` are limits of the exact number for the noise alone, at ``level``.
    ``balanced_accuracy`` is then over ``classes_told`` of ``classes``, ``auroc`` over ``auroc_classes``.

    ``scores`` has the score histogram of each class, with noise of ``scores_deviation`` in each count if
    noisy; ``reading`` the clinical reading of classes with positive and negative records (with noise:
    enough of both).

    In a multi-label task ``findings`` has each finding, ``recall`` their sensitivities, ``class_records``
    the known records that have them; ``accuracy`` and ``balanced_accuracy`` are means over findings, the
    latter over those with positive and negative records.
    """

    noisy: bool = False
    noise_deviation: float | None = None
    level: float | None = None
    class_floor: float | None = None
    records: int
    records_interval: tuple[int, int] | None = None
    loss: float | None = None
    accuracy: float | None = None
    accuracy_interval: tuple[float, float] | None = None
    balanced_accuracy: float | None = None
    balanced_accuracy_interval: tuple[float, float] | None = None
    balanced_accuracy_deviation: float | None = None
    classes_told: int | None = None
    classes: int | None = None
    recall: dict[str, float | None] = {}
    recall_interval: dict[str, tuple[float, float] | None] = {}
    class_records: dict[str, int] = {}
    class_records_interval: dict[str, tuple[int, int]] = {}
    auroc: float | None = None
    auroc_interval: tuple[float, float] | None = None
    auroc_classes: int | None = None
    average_precision: float | None = None
    one_answer: OneAnswer | None = None
    confusion: list[list[int]] | None = None
    findings: dict[str, Finding] | None = None
    scores: dict[str, Counts] | None = None
    scores_deviation: float | None = None
    read_at: float | None = None
    reading: dict[str, ClassReading] | None = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the main numbers, without counts and curves.

        >>> FoldMetrics(records=2, accuracy=0.5, confusion=[[1, 0], [1, 0]])
        FoldMetrics(records=2, accuracy=0.5)
        """
        for name in ("records", "balanced_accuracy", "accuracy", "auroc", "loss"):
            if (number := getattr(self, name)) is not None:
                yield name, round(number, 4)

    @model_serializer(mode="wrap")
    def _omit_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unset values: exact metrics have no keys of noise."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class Evaluation(Values):
    """Metrics of a model on both folds."""

    validation: FoldMetrics
    test: FoldMetrics
