"""Evaluation with noise: the silo's charge and noisy term, and metrics with intervals from the totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.metrics import NEARLY_ALL, noise_intervals
from tightframe.metrics.clinical import COUNT_FLOOR, DEVIATIONS, class_floor
from tightframe.phases import Tensors, Totals
from tightframe.privacy.releases import evaluation_totals
from tightframe.privacy.releases.evaluation_totals import EvaluationConfig
from tightframe.results.parts.evaluation import Evaluation, Finding, FoldMetrics, OneAnswer
from tightframe.rounds.privacy_plan import PrivacyPlan
from tightframe.rounds.riders import evaluation
from tightframe.rounds.riders.evaluation import FOLDS
from tightframe.rounds.riders.view import RiderView


def term(plan: PrivacyPlan, purpose: str) -> evaluation.Term:
    """Return a function that makes a silo's term: its counts with its share of the noise.

    The charge is written to the silo's ledger before the noise is drawn. A silo without records is charged
    and adds noise like all others.

    Args:
        plan: of the job, with noisy evaluations.

    Raises:
        ValueError: if the plan has no noisy evaluation.
        BudgetError: TF-701, by the function returned; nothing is drawn then.
    """
    if plan.evaluation is None:
        raise ValueError("Expected a job with noisy evaluations, but its evaluation is local.")
    config = plan.evaluation.config

    def released(silo: RiderView, counted: Tensors) -> Tensors:
        silo.charge(purpose, config.events(1), alone=config.lone_event(silo.honest))
        return with_noise(counted, config, silo.honest)

    return released


def with_noise(counted: Tensors, config: EvaluationConfig, honest: int) -> dict[str, torch.Tensor]:
    """Return the fields of ``EvaluationPlan.schema``: counts on the integer grid plus this silo's noise.

    Args:
        counted: exact counts, as of ``evaluation.count``.
        honest: s - c of the enrolled silos, among whom the noise is divided.
    """
    units = _units(config)
    fields: dict[str, torch.Tensor] = {}
    for fold in FOLDS:
        for name, unit in units.items():
            field = f"evaluation/{fold}/{name}"
            exact = evaluation_totals.in_units(counted[field].numpy(), unit)
            noisy = exact + evaluation_totals.noise_for(exact.shape, config, honest)
            fields[field] = torch.from_numpy(np.asarray(config.as_numbers(noisy)))
    return fields


def _units(config: EvaluationConfig) -> dict[str, int]:
    """Return the units of each of a fold's fields."""
    of_all = {"confusion": config.confusion_units, "scores": config.score_units}
    return of_all | ({"records": config.confusion_units} if config.findings else {})


CERTAIN_SHARE = 0.9
"""Lower limit of the share of records from which a model certainly gives one answer."""


def summarise(
    totals: Totals, config: EvaluationConfig, class_names: Sequence[str], *, silos: int, honest: int
) -> Evaluation:
    """Compute the metrics of each fold from opened noisy totals; see ``_fold``.

    Args:
        totals: the fields ``evaluation/...``.
        class_names: names of the C classes.
        silos: number of silos in the sum, each with its share of the noise.
        honest: s - c of the enrolled silos.
    """
    cell = config.deviation(silos=silos, honest=honest)
    bin_deviation = cell * config.confusion_units / config.score_units
    read: dict[str, FoldMetrics] = {}
    for fold in FOLDS:
        counts = {
            name: config.as_units(totals[f"evaluation/{fold}/{name}"]) / units
            for name, units in _units(config).items()
        }
        confusion, scores, readable = counts["confusion"], counts["scores"], fold == "test"
        if config.findings:
            records = float(counts["records"])
            read[fold] = _finding_fold(
                confusion, scores, records, class_names, (cell, bin_deviation), readable=readable
            )
        else:
            read[fold] = _fold(confusion, scores, class_names, cell, bin_deviation, readable=readable)
    return Evaluation(validation=read["validation"], test=read["test"])


def _fold(
    confusion: NDArray[np.float64],
    scores: NDArray[np.float64],
    class_names: Sequence[str],
    cell: float,
    bin_deviation: float,
    readable: bool = True,
) -> FoldMetrics:
    """Compute the metrics of one fold.

    ``noise_deviation`` is the standard deviation in one cell of the confusion matrix, in records. ``recall``
    is None for classes with fewer noisy records than ``class_floor``, and ``balanced_accuracy`` is the mean
    over the other ``classes_told`` of ``classes``; ``balanced_accuracy_deviation`` is its standard deviation
    by the noise alone, to first order. ``auroc`` is the mean over the ``auroc_classes`` with enough records
    for their noise. Values that end in ``_interval`` are confidence limits at ``level``, for the noise alone.
    ``one_answer``: see ``_one_answer``. There is no loss, and no average precision: the bins that determine
    it are almost empty, so that noise would dominate it.
    """
    classes, row, hits = len(class_names), confusion.sum(1), np.diagonal(confusion)
    floor = class_floor(cell, classes)
    total, right = float(confusion.sum()), float(np.trace(confusion))
    records = _records(total, cell * classes)
    known = total >= max(COUNT_FLOOR, DEVIATIONS * cell * classes)
    return FoldMetrics(
        noisy=True,
        noise_deviation=cell,
        level=noise_intervals.LEVEL,
        class_floor=floor,
        records=max(0, round(total)),
        records_interval=records,
        loss=None,
        accuracy=float(np.clip(right / total, 0.0, 1.0)) if known else None,
        accuracy_interval=_accuracy(right, total, cell, classes) if known else None,
        **_recall(hits, row, class_names, cell, floor),
        class_records={
            name: max(0, round(value)) for name, value in zip(class_names, row.tolist(), strict=True)
        },
        class_records_interval={
            name: _records(value, cell * math.sqrt(classes))
            for name, value in zip(class_names, row.tolist(), strict=True)
        },
        **_areas(confusion, scores, cell, bin_deviation),
        average_precision=None,
        one_answer=_one_answer(confusion, class_names, cell) if known else None,
        **(
            evaluation.read_scores(scores, class_names, deviation=bin_deviation, records=[records] * classes)
            if readable
            else {}
        ),
    )


def _finding_fold(
    tables: NDArray[np.float64],
    scores: NDArray[np.float64],
    records: float,
    class_names: Sequence[str],
    noise: tuple[float, float],
    readable: bool,
) -> FoldMetrics:
    """Compute the metrics of one fold whose records have findings, as ``_fold`` does.

    Noise is independent in all cells, even where a record is in several, so that intervals of means are those
    of independent values.

    Args:
        tables: noisy counts (K, 2, 2), rows absent and present.
        scores: noisy histograms (K, 2, bins).
        records: noisy number of records.
        noise: standard deviation in a cell, and in a bin.
        readable: whether scores are read for a clinic.
    """
    cell, bin_deviation = noise
    rows, spread = tables.sum(2), cell * math.sqrt(2)
    limits = [_records(value, 2 * cell) for value in tables.sum((1, 2)).tolist()]
    areas, of_areas = _finding_areas(scores, rows[:, ::-1], spread, bin_deviation)
    rates, of_rates = _finding_rates(tables, cell)
    findings = {
        name: Finding(
            confusion=np.maximum(0, np.rint(tables[place])).astype(int).tolist(),
            sensitivity=rates[place][1][0],
            specificity=rates[place][0][0],
            auroc=areas[place],
            sensitivity_interval=rates[place][1][1],
            specificity_interval=rates[place][0][1],
            records_interval=limits[place],
        )
        for place, name in enumerate(class_names)
    }
    present = dict(zip(class_names, rows[:, 1].tolist(), strict=True))
    return FoldMetrics(
        noisy=True,
        noise_deviation=cell,
        level=noise_intervals.LEVEL,
        records=max(0, round(records)),
        records_interval=_records(records, cell),
        loss=None,
        **of_rates,
        recall={name: item.sensitivity for name, item in findings.items()},
        recall_interval={name: item.sensitivity_interval for name, item in findings.items()},
        class_records={name: max(0, round(number)) for name, number in present.items()},
        class_records_interval={name: _records(number, spread) for name, number in present.items()},
        findings=findings,
        **of_areas,
        average_precision=None,
        **(
            evaluation.read_scores(scores, class_names, deviation=bin_deviation, records=limits)
            if readable
            else {}
        ),
    )


_Limited: TypeAlias = tuple[float | None, tuple[float, float] | None]
"""A share and its limits; None if they are too noisy."""


def _finding_rates(
    tables: NDArray[np.float64], cell: float
) -> tuple[list[tuple[_Limited, _Limited]], dict[str, Any]]:
    """Return specificity and sensitivity of each finding, and the fields that are means of such shares.

    A row with fewer noisy records than the floor has no share.
    """
    rows, records = tables.sum(2), tables.sum((1, 2))
    floor = class_floor(cell, 2)
    enough: NDArray[np.bool_] = np.asarray(rows >= floor)
    hits = np.stack([tables[:, 0, 0], tables[:, 1, 1]], 1)
    shares = hits / np.where(enough, rows, 1.0)
    low, high = noise_intervals.share(hits, rows - hits, cell, cell)

    def rate(place: int, row: int) -> _Limited:
        part = (slice(place, place + 1), row)
        return _mean(shares[part], low[part], high[part]) if enough[place, row] else (None, None)

    present: NDArray[np.bool_] = np.asarray(records >= max(COUNT_FLOOR, DEVIATIONS * cell * 2))
    right, spread = hits.sum(1), cell * math.sqrt(2)
    ends = noise_intervals.share(right, records - right, spread, spread)
    accuracy = _mean(right[present] / records[present], ends[0][present], ends[1][present])
    paired: NDArray[np.bool_] = np.asarray(enough.all(1))
    balanced = _mean(shares[paired].ravel(), low[paired].ravel(), high[paired].ravel())
    deviations = cell / rows[paired] * np.sqrt((1 - shares[paired]) ** 2 + shares[paired] ** 2)
    return [(rate(place, 0), rate(place, 1)) for place in range(len(tables))], {
        "class_floor": floor,
        "accuracy": accuracy[0],
        "accuracy_interval": accuracy[1],
        "balanced_accuracy": balanced[0],
        "balanced_accuracy_interval": balanced[1],
        "balanced_accuracy_deviation": math.sqrt(float((deviations**2).sum())) / deviations.size
        if paired.any()
        else None,
        "classes_told": int(paired.sum()),
        "classes": len(tables),
    }


def _finding_areas(
    scores: NDArray[np.float64], numbers: NDArray[np.float64], spread: float, bin_deviation: float
) -> tuple[list[float | None], dict[str, Any]]:
    """Return the area of each finding with enough records for its noise, and the fields of their mean.

    Args:
        scores: noisy histograms (K, 2, bins).
        numbers: noisy numbers of records with each finding and without it, (K, 2).
        spread: standard deviation of the noise in a number.
        bin_deviation: of that in a bin.
    """
    least = max(COUNT_FLOOR, DEVIATIONS * bin_deviation * math.sqrt(scores.shape[2]))
    drawn: NDArray[np.bool_] = np.asarray((numbers >= least).all(1))
    if not drawn.any():
        return [None] * len(scores), {"auroc": None, "auroc_interval": None, "auroc_classes": 0}
    areas = np.clip(noise_intervals.area(scores, np.where(drawn[:, None], numbers, 1.0)), 0.0, 1.0)
    limits = noise_intervals.mean_finding_area(scores, numbers, drawn, spread, bin_deviation)
    values = [float(area) if there else None for area, there in zip(areas, drawn, strict=True)]
    return values, {
        "auroc": float(areas[drawn].mean()),
        "auroc_interval": noise_intervals.cut(*limits),
        "auroc_classes": int(drawn.sum()),
    }


def _mean(values: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> _Limited:
    """Return the mean of shares and its limits; None without any."""
    if not values.size:
        return None, None
    ends = noise_intervals.cut(*noise_intervals.mean(values, low, high))
    return float(np.clip(values.mean(), 0.0, 1.0)), ends


def _recall(
    hits: NDArray[np.float64],
    row: NDArray[np.float64],
    class_names: Sequence[str],
    cell: float,
    floor: float,
) -> dict[str, Any]:
    """Compute recall by class, and balanced accuracy over the classes with at least ``floor`` noisy records.

    Args:
        hits: noisy diagonal of the confusion matrix, (C,).
        row: its noisy row sums, (C,).
        class_names: names of the C classes.
        cell: standard deviation of the noise in a cell.
        floor: least noisy number of records of a class.
    """
    classes, enough = len(class_names), row >= floor
    safe = np.where(enough, row, 1.0)
    recall = hits / safe
    limits = noise_intervals.share(hits, row - hits, cell, cell * math.sqrt(classes - 1))
    spread = cell / safe * np.sqrt((1 - recall) ** 2 + (classes - 1) * recall**2)
    number = int(enough.sum())
    return {
        # Only the mean is clipped: clipping each recall would bias the average upwards where there are no
        # hits.
        "balanced_accuracy": float(np.clip(recall[enough].mean(), 0.0, 1.0)) if number else None,
        "balanced_accuracy_interval": noise_intervals.cut(
            *noise_intervals.mean(recall[enough], limits[0][enough], limits[1][enough])
        )
        if number
        else None,
        "balanced_accuracy_deviation": float(np.sqrt((spread[enough] ** 2).sum()) / number)
        if number
        else None,
        "classes_told": number,
        "classes": classes,
        "recall": {
            name: float(np.clip(value, 0.0, 1.0)) if shown else None
            for name, value, shown in zip(class_names, recall, enough, strict=True)
        },
        "recall_interval": {
            name: noise_intervals.cut(float(low), float(high)) if shown else None
            for name, low, high, shown in zip(class_names, *limits, enough, strict=True)
        },
    }


def _records(count: float, noise: float) -> tuple[int, int]:
    """Return the limits of a number of records, neither below 0."""
    reach = noise_intervals.NORMAL * noise
    return max(0, math.floor(count - reach)), max(0, math.ceil(count + reach))


def _accuracy(right: float, total: float, cell: float, classes: int) -> tuple[float, float]:
    wrong_noise = cell * math.sqrt(classes**2 - classes)
    low, high = noise_intervals.share(
        np.array([right]), np.array([total - right]), cell * math.sqrt(classes), wrong_noise
    )
    return noise_intervals.cut(float(low[0]), float(high[0]))


def _areas(
    confusion: NDArray[np.float64], scores: NDArray[np.float64], cell: float, bin_deviation: float
) -> dict[str, Any]:
    """Compute the mean area under the ROC curve over the classes with enough records for their noise.

    The confusion matrix gives the numbers of a class's records and of all others with far less noise than
    the histograms do, so each histogram is shifted evenly to match that sum.
    """
    bins, row = scores.shape[2], confusion.sum(1)
    numbers = np.stack([row, row.sum() - row], 1)
    enough = max(COUNT_FLOOR, DEVIATIONS * bin_deviation * math.sqrt(bins))
    chosen: NDArray[np.bool_] = np.asarray((numbers >= enough).all(1))
    if not chosen.any():
        return {"auroc": None, "auroc_interval": None, "auroc_classes": 0}
    value = float(np.clip(noise_intervals.area(scores[chosen], numbers[chosen]).mean(), 0.0, 1.0))
    limits = noise_intervals.mean_area(scores, confusion, chosen, cell, bin_deviation)
    return {
        "auroc": value,
        "auroc_interval": noise_intervals.cut(*limits),
        "auroc_classes": int(chosen.sum()),
    }


def _one_answer(confusion: NDArray[np.float64], class_names: Sequence[str], cell: float) -> OneAnswer | None:
    """Return the class that a model may predict for all records, within the noise; None if it does not.

    The test uses the records of all *other* classes: the share for which the model predicts that class too.
    ``certain`` if this is nearly all of them even at the lower limit.
    """
    classes = len(class_names)
    answer = int(confusion.sum(0).argmax())
    others = np.delete(confusion, answer, axis=0)
    if others.size == 0:
        return None
    part, rest = float(others[:, answer].sum()), float(np.delete(others, answer, axis=1).sum())
    low, high = noise_intervals.share(
        np.array([part]), np.array([rest]), cell * math.sqrt(classes - 1), cell * (classes - 1)
    )
    if high[0] < NEARLY_ALL:
        return None
    return OneAnswer(
        of_class=class_names[answer],
        share=float(np.clip(part / (part + rest), 0.0, 1.0)) if part + rest > 0 else None,
        interval=noise_intervals.cut(float(low[0]), float(high[0])),
        certain=bool(low[0] >= CERTAIN_SHARE),
    )
