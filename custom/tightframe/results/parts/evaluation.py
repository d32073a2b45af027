"""Metrics of a model on the folds that training does not see, as all result files have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from tightframe.results.files import Values


class OneAnswer(Values):
    """A model that gives one answer whatever the record.

    Attributes:
        of_class: the class that it answers.
        share: of the other classes' records that get this answer, too.
        interval: limits of the share without the noise; None where counts are exact.
        certain: whether it holds at the lower limit.
    """

    of_class: str = Field(validation_alias="class", serialization_alias="class")
    share: float | None = None
    interval: tuple[float, float] | None = None
    certain: bool = True


class Rule(Values):
    """The rule that calls a record positive whose score for a class is at least ``threshold``.

    Attributes:
        threshold: an edge of the score histogram's bins; at 1 no record is positive.
        sensitivity, specificity: at that edge, and their limits: for the sampling of few records where
            counts are exact (Wilson), else for the noise alone.
        reachable: the most that the number which was not set could be at a threshold between this edge and
            the next; absent where counts are noisy.
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
        brier, calibration_error: lower and upper bound, wherever the scores lie in their bins (and, where
            counts are noisy, whatever the noise was, at 95 %).
        at_specificity: the rule with the most sensitivity at a specificity of ``FoldMetrics.read_at``.
        at_sensitivity: likewise the other way round.
    """

    brier: tuple[float, float] | None = None
    calibration_error: tuple[float, float] | None = None
    at_specificity: Rule | None = None
    at_sensitivity: Rule | None = None


class Finding(Values):
    """A finding of a multi-label, at a probability of 0.5.

    Attributes:
        confusion: test records where it is known: rows absent and present, columns what the model said; None
            if too few silos know it of enough records, as all that follows from it.
        sensitivity, specificity: of these counts.
        auroc, average_precision: from the score histogram.
        sensitivity_interval, specificity_interval: limits without the noise; None where counts are exact.
        records_interval: limits of the number of records where it is known, where counts are noisy.
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
    """Metrics of one fold; without records there is nothing else. Rows of ``confusion`` are true classes.

    With ``noisy`` all numbers come from totals with noise of ``noise_deviation`` records in each cell of the
    confusion matrix, and a class with fewer noisy records than ``class_floor`` has no recall. Limits between
    which exact numbers lie, as far as the noise goes, are in what ends in ``_interval``, at ``level``.
    ``balanced_accuracy`` is then over ``classes_told`` of ``classes``, ``auroc`` over ``auroc_classes``.

    ``scores`` has the score histogram of each class, with noise of ``scores_deviation`` in each count if
    noisy; ``reading`` what follows from it for a clinic, of the classes that have records of both kinds
    (with noise: enough of them).

    Of a multi-label ``findings`` has each one, ``recall`` their sensitivities, ``class_records`` the records
    that have them, of those told; ``accuracy`` and ``balanced_accuracy`` are means over findings, the
    latter over those with records of both kinds.
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
        """Show the main numbers; counts and curves fill a page.

        >>> FoldMetrics(records=2, accuracy=0.5, confusion=[[1, 0], [1, 0]])
        FoldMetrics(records=2, accuracy=0.5)
        """
        for name in ("records", "balanced_accuracy", "accuracy", "auroc", "loss"):
            if (told := getattr(self, name)) is not None:
                yield name, round(told, 4)

    @model_serializer(mode="wrap")
    def _as_made(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was not set: exact metrics have no keys of noise."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class Evaluation(Values):
    """Metrics of a model on both folds."""

    validation: FoldMetrics
    test: FoldMetrics
