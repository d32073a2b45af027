"""The clinical reading of opened score histograms, as result files have it: nothing more leaves for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.metrics import clinical
from tightframe.results.parts.evaluation import ClassReading, Rule

READ_AT = 0.9
"""Specificity and sensitivity at which files have the other one; pages can be made for any."""


def reading(
    scores: NDArray[Any],
    class_names: Sequence[str],
    *,
    copies: int = 1,
    deviation: float | None = None,
    records: Sequence[tuple[float, float]] | None = None,
) -> dict[str, Any]:
    """Return the fields of ``FoldMetrics`` about scores.

    Args:
        scores: opened histograms (C, 2, bins).
        class_names: names of the C classes.
        copies: how often each record is counted, where silos share their test records.
        deviation: standard deviation of the noise in each count; None where counts are exact.
        records: limits of the number of records of each histogram, with noise.
    """
    exact = deviation is None
    whole = np.rint(scores).astype(np.int64) if exact else np.round(scores, 3)
    read: dict[str, ClassReading] = {}
    limits = [None] * len(class_names) if records is None else records
    for name, (positives, negatives), ends in zip(class_names, scores / copies, limits, strict=True):
        of_class = clinical.Scores(positives, negatives, deviation, ends)
        if of_class.told:
            read[name] = _class(of_class)
    noise = {} if exact else {"scores_deviation": deviation}
    histograms = {name: tuple(counts.tolist()) for name, counts in zip(class_names, whole, strict=True)}
    return {"scores": histograms, "read_at": READ_AT, "reading": read, **noise}


def _class(scores: clinical.Scores) -> ClassReading:
    return ClassReading(
        brier=_bounds(clinical.brier(scores)),
        calibration_error=_bounds(clinical.calibration_error(scores)),
        at_specificity=_rule(clinical.at_specificity(scores, READ_AT)),
        at_sensitivity=_rule(clinical.at_sensitivity(scores, READ_AT)),
    )


def _bounds(found: tuple[float, float]) -> tuple[float, float] | None:
    return found if math.isfinite(found[0]) and math.isfinite(found[1]) else None


def _rule(point: clinical.Point | None) -> Rule | None:
    if point is None:
        return None
    se, sp = point.sensitivity, point.specificity
    return Rule(
        threshold=point.threshold,
        sensitivity=se.value,
        sensitivity_interval=(se.low, se.high),
        specificity=sp.value,
        specificity_interval=(sp.low, sp.high),
        reachable=point.reachable,
    )
