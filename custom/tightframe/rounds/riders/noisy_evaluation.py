"""A silo's evaluation with noise, and what the server reads from the opened totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.metrics import NEARLY_ALL
from tightframe.phases import Tensors, Totals
from tightframe.privacy.releases import evaluation_totals
from tightframe.privacy.releases.evaluation_totals import EvaluationConfig
from tightframe.results.evaluation import Evaluation, FoldMetrics, OneAnswer
from tightframe.rounds.privacy_plan import PrivacyPlan
from tightframe.rounds.riders import evaluation, noise_intervals
from tightframe.rounds.riders.evaluation import FOLDS

if TYPE_CHECKING:
    from tightframe.rounds.silo.view import LocalSilo


def term(plan: PrivacyPlan, purpose: str) -> evaluation.Term:
    """Make a silo's term: its counts with its share of the noise, charged to its ledger before that is drawn.

    A silo without a record is charged and adds noise as all others do.

    Args:
        plan: of the job, with noisy evaluations.
        purpose: in the ledger.

    Raises:
        ValueError: if the plan has no noisy evaluation.
        BudgetError: by the term, TF-701; nothing is drawn then.
    """
    if plan.evaluation is None:
        raise ValueError("Expected a job with noisy evaluations, but its evaluation is local.")
    config = plan.evaluation.config

    def released(silo: LocalSilo, counted: Tensors) -> Tensors:
        events = evaluation_totals.events(config, 1)
        silo.charge(purpose, events, alone=evaluation_totals.lone_event(config, silo.honest))
        return with_noise(counted, config, silo.honest)

    return released


def with_noise(counted: Tensors, config: EvaluationConfig, honest: int) -> dict[str, torch.Tensor]:
    """The fields of ``EvaluationPlan.schema``: exact counts on the integer grid, with this silo's noise."""
    units = {"confusion": config.confusion_units, "scores": config.score_units}
    made: dict[str, torch.Tensor] = {}
    for fold in FOLDS:
        for name, unit in units.items():
            field = f"evaluation/{fold}/{name}"
            exact = evaluation_totals.in_units(counted[field].numpy(), unit)
            noisy = exact + evaluation_totals.noise_for(exact.shape, config, honest)
            made[field] = torch.from_numpy(evaluation_totals.as_numbers(noisy))
    return made


COUNT_FLOOR = 20.0
"""Fewer noisy records of a class are too few to tell how they fare."""
DEVIATIONS = 3.0
"""Neither do counts tell that are below so many standard deviations of their own noise."""
MOST = 0.9
"""The share of records, at its lower limit, from which on a model is sure to give one answer."""


def summarise(
    totals: Totals, config: EvaluationConfig, class_names: Sequence[str], *, silos: int, honest: int
) -> Evaluation:
    """Return metrics of each fold from opened noisy totals; see ``_fold``.

    Args:
        totals: the fields ``evaluation/...``.
        config: as the silos have it.
        class_names: C of them.
        silos: in the sum, each with its share of the noise.
        honest: t - c of the enrolled silos.
    """
    cell = evaluation_totals.cell_deviation(config, silos=silos, honest=honest)
    bin_deviation = cell * config.confusion_units / config.score_units
    read: dict[str, FoldMetrics] = {}
    for fold in FOLDS:
        units = {
            name: evaluation_totals.as_units(totals[f"evaluation/{fold}/{name}"])
            for name in ("confusion", "scores")
        }
        confusion = units["confusion"] / config.confusion_units
        scores = units["scores"] / config.score_units
        read[fold] = _fold(confusion, scores, class_names, cell, bin_deviation)
    return Evaluation(validation=read["validation"], test=read["test"])


def _fold(
    confusion: NDArray[np.float64],
    scores: NDArray[np.float64],
    class_names: Sequence[str],
    cell: float,
    bin_deviation: float,
) -> FoldMetrics:
    """Return metrics of one fold.

    ``noise_deviation`` is that of one cell of the confusion matrix, in records. ``recall`` is None for
    classes with fewer noisy records than ``class_floor``, and ``balanced_accuracy`` is over the other
    ``classes_told`` of ``classes``; ``balanced_accuracy_deviation`` is how far the noise alone moves it, to
    first order. ``auroc`` is over the ``auroc_classes`` whose histograms tell. What ends in ``_interval`` has
    the limits between which the exact value lies, as far as the noise goes, at ``level``.
    ``one_answer``: see ``_one_answer``. There is no loss, and no average precision: the bins that decide it
    are almost empty, so that it would be read from noise.
    """
    classes, row, hits = len(class_names), confusion.sum(1), np.diagonal(confusion)
    floor = max(COUNT_FLOOR, DEVIATIONS * cell * math.sqrt(classes))
    told = row >= floor
    safe = np.where(told, row, 1.0)
    recall = hits / safe
    limits = noise_intervals.share(hits, row - hits, cell, cell * math.sqrt(classes - 1))
    spread = cell / safe * np.sqrt((1 - recall) ** 2 + (classes - 1) * recall**2)
    total, right = float(confusion.sum()), float(np.trace(confusion))
    known = total >= max(COUNT_FLOOR, DEVIATIONS * cell * classes)
    number = int(told.sum())
    return FoldMetrics(
        noisy=True,
        noise_deviation=cell,
        level=noise_intervals.LEVEL,
        class_floor=floor,
        records=max(0, round(total)),
        records_interval=_records(total, cell * classes),
        loss=None,
        accuracy=float(np.clip(right / total, 0.0, 1.0)) if known else None,
        accuracy_interval=_accuracy(right, total, cell, classes) if known else None,
        # Cut as a whole: shares cut one by one would be too large together where a model has no hit at all.
        balanced_accuracy=float(np.clip(recall[told].mean(), 0.0, 1.0)) if number else None,
        balanced_accuracy_interval=noise_intervals.cut(
            *noise_intervals.mean(recall[told], limits[0][told], limits[1][told])
        )
        if number
        else None,
        balanced_accuracy_deviation=float(np.sqrt((spread[told] ** 2).sum()) / number) if number else None,
        classes_told=number,
        classes=classes,
        recall={
            name: float(np.clip(value, 0.0, 1.0)) if enough else None
            for name, value, enough in zip(class_names, recall, told, strict=True)
        },
        recall_interval={
            name: noise_intervals.cut(float(low), float(high)) if enough else None
            for name, low, high, enough in zip(class_names, *limits, told, strict=True)
        },
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
    )


def _records(count: float, noise: float) -> tuple[int, int]:
    """Limits of a number of records, which is none below 0."""
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
    """The mean area under the ROC curve over the classes whose histograms tell.

    The confusion matrix tells the numbers of a class's records and of all others with far less noise
    than histograms do, so each histogram is shifted evenly to have that sum.
    """
    bins, row = scores.shape[2], confusion.sum(1)
    numbers = np.stack([row, row.sum() - row], 1)
    enough = max(COUNT_FLOOR, DEVIATIONS * bin_deviation * math.sqrt(bins))
    told: NDArray[np.bool_] = np.asarray((numbers >= enough).all(1))
    if not told.any():
        return {"auroc": None, "auroc_interval": None, "auroc_classes": 0}
    value = float(np.clip(noise_intervals.area(scores[told], numbers[told]).mean(), 0.0, 1.0))
    limits = noise_intervals.mean_area(scores, confusion, told, cell, bin_deviation)
    return {
        "auroc": value,
        "auroc_interval": noise_intervals.cut(*limits),
        "auroc_classes": int(told.sum()),
    }


def _one_answer(confusion: NDArray[np.float64], class_names: Sequence[str], cell: float) -> OneAnswer | None:
    """Return the class that a model answers for all records, if the noise leaves that open; else None.

    Judged by the records of all *other* classes: how many of them have that answer, too. ``certain`` if that
    is nearly all of them even at the lower limit.
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
        certain=bool(low[0] >= MOST),
    )
