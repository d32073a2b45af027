"""The server's reading of noisy evaluations: metrics, what they cannot tell, and lines for people.

All of it is post-processing of what was opened, and costs nothing.

Noisy counts can be negative. A cell that is cut at zero by itself would add its error to every sum that it
is part of, always upwards; so cells are added as they came, and what is cut is the result: a share of
records to [0, 1], a number of records at 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe import metrics
from tightframe.phases import Totals
from tightframe.privacy.releases import evaluation_totals
from tightframe.privacy.releases.evaluation_totals import EvaluationConfig
from tightframe.rounds.evaluation import FOLDS

COUNT_FLOOR = 20.0
"""Fewer noisy records of a class are too few to tell how they fare."""
DEVIATIONS = 3.0
"""Neither do counts tell that are below so many standard deviations of their own noise."""
TOO_FEW = "too few to tell"


def summarise(
    totals: Totals, config: EvaluationConfig, class_names: Sequence[str], *, silos: int, honest: int
) -> dict[str, dict[str, Any]]:
    """Metrics of each fold from opened noisy totals, as plain JSON values; see ``_fold``.

    Args:
        totals: the fields ``evaluation/...``.
        config: as the silos have it.
        class_names: C of them.
        silos: in the sum, each with its share of the noise.
        honest: t - c of the enrolled silos.
    """
    cell = evaluation_totals.cell_deviation(config, silos=silos, honest=honest)
    bin_deviation = cell * config.confusion_units / config.score_units
    read: dict[str, dict[str, Any]] = {}
    for fold in FOLDS:
        units = {
            name: evaluation_totals.as_units(totals[f"evaluation/{fold}/{name}"])
            for name in ("confusion", "scores")
        }
        confusion = units["confusion"] / config.confusion_units
        scores = units["scores"] / config.score_units
        read[fold] = _fold(confusion, scores, class_names, cell, bin_deviation)
    return read


def _fold(
    confusion: NDArray[np.float64],
    scores: NDArray[np.float64],
    class_names: Sequence[str],
    cell: float,
    bin_deviation: float,
) -> dict[str, Any]:
    """Metrics of one fold.

    ``noise_deviation`` is that of one cell of the confusion matrix, in records. ``recall`` is None for
    classes with fewer noisy records than ``class_floor``, and ``balanced_accuracy`` is over the other
    ``classes_told``; ``balanced_accuracy_deviation`` is how far the noise alone moves it, to first order.
    ``auroc`` is over the ``auroc_classes`` whose histograms tell. There is no loss, and no average
    precision: the bins that decide it are almost empty, so that it would be read from noise.
    """
    classes, row = len(class_names), confusion.sum(1)
    floor = max(COUNT_FLOOR, DEVIATIONS * cell * math.sqrt(classes))
    told = row >= floor
    safe = np.where(told, row, 1.0)
    recall = np.clip(np.diagonal(confusion) / safe, 0.0, 1.0)
    spread = cell / safe * np.sqrt((1 - recall) ** 2 + (classes - 1) * recall**2)
    total = float(confusion.sum())
    areas = _areas(confusion, scores, bin_deviation)
    number = int(told.sum())
    return {
        "noisy": True,
        "noise_deviation": cell,
        "class_floor": floor,
        "records": max(0, round(total)),
        "loss": None,
        "accuracy": float(np.clip(np.trace(confusion) / total, 0.0, 1.0))
        if total >= max(COUNT_FLOOR, DEVIATIONS * cell * classes)
        else None,
        "balanced_accuracy": float(recall[told].mean()) if number else None,
        "balanced_accuracy_deviation": float(np.sqrt((spread[told] ** 2).sum()) / number) if number else None,
        "classes_told": number,
        "recall": {
            name: float(value) if known else None
            for name, value, known in zip(class_names, recall, told, strict=True)
        },
        "class_records": {
            name: max(0, round(value)) for name, value in zip(class_names, row.tolist(), strict=True)
        },
        "auroc": float(np.nanmean(areas)) if np.isfinite(areas).any() else None,
        "auroc_classes": int(np.isfinite(areas).sum()),
        "average_precision": None,
    }


def _areas(
    confusion: NDArray[np.float64], scores: NDArray[np.float64], bin_deviation: float
) -> NDArray[np.float64]:
    """Areas under the ROC curve (C,); NaN where a histogram's own noise is too large for its records.

    The confusion matrix tells the numbers of a class's records and of all others with far less noise
    than histograms do, so each histogram is shifted evenly to have that sum.
    """
    bins, row = scores.shape[2], confusion.sum(1)
    numbers = np.stack([row, row.sum() - row], 1)
    shifted = scores + ((numbers - scores.sum(2)) / bins)[:, :, None]
    told = (numbers >= max(COUNT_FLOOR, DEVIATIONS * bin_deviation * math.sqrt(bins))).all(1)
    return np.where(told, np.clip(metrics.auroc(shifted), 0.0, 1.0), np.nan)


def is_noisy(evaluation: Mapping[str, Any] | None) -> bool:
    """Whether a row's evaluation is one with noise."""
    return evaluation is not None and bool(evaluation["test"].get("noisy"))


def balanced_words(test: Mapping[str, Any]) -> str:
    """``noisy balanced accuracy 0.612 (noise +- 0.031) over 6 of 8 classes``."""
    value, classes = test["balanced_accuracy"], len(test["recall"])
    if value is None:
        return f"noisy balanced accuracy - (every class has {TOO_FEW})"
    spread = test["balanced_accuracy_deviation"]
    return (
        f"noisy balanced accuracy {value:.3f} (noise +- {spread:.3f}) over {test['classes_told']} of "
        f"{classes} classes"
    )


def round_words(test: Mapping[str, Any]) -> str:
    """A model's metrics on one line."""
    return f"{balanced_words(test)}, noisy accuracy {_shown(test['accuracy'])}, {noise_words(test)}"


def noise_words(test: Mapping[str, Any]) -> str:
    """How much noise there is."""
    return f"noise of {test['noise_deviation']:.1f} records (standard deviation) in each confusion cell"


def screen_lines(test: Mapping[str, Any], whose: str, course: Sequence[tuple[int, Any]]) -> list[str]:
    """The last screen's lines.

    Args:
        test: metrics of the last model on the test fold.
        whose: of which silos the records are.
        course: round and evaluation of each model that was evaluated.
    """
    recall = ", ".join(
        f"{name} {TOO_FEW if value is None else f'{value:.2f}'}" for name, value in test["recall"].items()
    )
    lines = [
        f" Test records of {whose} (about {test['records']}, noisy): {balanced_words(test)},",
        f"   noisy accuracy {_shown(test['accuracy'])}, noisy AUROC {_shown(test['auroc'])} over "
        f"{test['auroc_classes']} of {len(test['recall'])} classes",
        f"   {noise_words(test)}; below {test['class_floor']:.0f} noisy records a class has {TOO_FEW}",
        f" Noisy recall: {recall}",
    ]
    if len(course) > 1:
        steps = [f"{number}: {_shown(found['test']['balanced_accuracy'])}" for number, found in course]
        lines.insert(3, f" Noisy balanced accuracy after round {', '.join(steps)}")
    return [*lines, " Exact test metrics: at each silo, in its own local_report.json"]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
