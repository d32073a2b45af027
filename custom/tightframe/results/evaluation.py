"""Metrics of a model on the folds that training does not see, as all result files have them."""

from __future__ import annotations

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


class FoldMetrics(Values):
    """Metrics of one fold; without records there is nothing else. Rows of ``confusion`` are true classes.

    With ``noisy`` all numbers come from totals with noise of ``noise_deviation`` records in each cell of the
    confusion matrix, and a class with fewer noisy records than ``class_floor`` has no recall. Limits between
    which exact numbers lie, as far as the noise goes, are in what ends in ``_interval``, at ``level``.
    ``balanced_accuracy`` is then over ``classes_told`` of ``classes``, ``auroc`` over ``auroc_classes``.
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

    @model_serializer(mode="wrap")
    def _as_made(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was not set: exact metrics have no keys of noise."""
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class Evaluation(Values):
    """Metrics of a model on both folds."""

    validation: FoldMetrics
    test: FoldMetrics
