"""What the server reads from noisy totals: exact metrics where noise is nothing, and what cannot be told."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from tightframe import metrics
from tightframe.privacy.releases.evaluation_totals import GRID, EvaluationConfig, cell_deviation
from tightframe.rounds.private import noisy_metrics

NAMES = ("A", "B", "C", "D")
BINS = 16
LITTLE = EvaluationConfig(noise_multiplier=0.01, num_classes=4)


def _records(counts: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    stream = np.random.default_rng(3)
    labels = np.repeat(np.arange(4), counts)
    scores = stream.dirichlet(np.ones(4), size=len(labels))
    scores[np.arange(len(labels)), labels] += stream.uniform(0, 0.8, size=len(labels))
    scores /= scores.sum(1, keepdims=True)
    return labels, scores.argmax(1), scores


def _totals(
    counts: list[int], noise: NDArray[np.float64] | None = None, config: EvaluationConfig = LITTLE
) -> dict[str, NDArray[np.float64]]:
    labels, predictions, scores = _records(counts)
    confusion = metrics.confusion_matrix(labels, predictions, 4).astype(float)
    if noise is not None:
        confusion += noise
    histogram = metrics.score_histogram(scores, labels, BINS) * (config.score_units / GRID)
    fields = {"confusion": confusion, "scores": histogram}
    return {f"evaluation/{fold}/{name}": fields[name] for fold in ("validation", "test") for name in fields}


def _test(totals: dict[str, NDArray[np.float64]], config: EvaluationConfig = LITTLE) -> dict[str, Any]:
    read = noisy_metrics.summarise(totals, config, NAMES, silos=3, honest=3)
    assert set(read) == {"validation", "test"} and noisy_metrics.is_noisy(read)
    json.dumps(read, allow_nan=False)
    return read["test"]


def test_without_noise_the_metrics_are_scikit_learns() -> None:
    counts = [400, 150, 60, 30]
    labels, predictions, scores = _records(counts)
    test = _test(_totals(counts))
    assert test["accuracy"] == pytest.approx(accuracy_score(labels, predictions))
    assert test["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predictions))
    exact = metrics.auroc(metrics.score_histogram(scores, labels, BINS))
    assert test["auroc"] == pytest.approx(exact.mean(), abs=1e-6)
    assert test["class_records"] == dict(zip(NAMES, counts, strict=True)) and test["records"] == 640
    assert (test["classes_told"], test["auroc_classes"]) == (4, 4)
    assert test["loss"] is None and test["average_precision"] is None


def test_classes_below_the_floor_have_no_recall_and_no_part_in_the_mean() -> None:
    counts = [400, 150, 19, 0]
    labels, predictions, _ = _records(counts)
    test = _test(_totals(counts))
    assert test["class_floor"] == 20.0
    assert [name for name, value in test["recall"].items() if value is None] == ["C", "D"]
    enough = labels < 2
    told = np.mean([(predictions[labels == label] == label).mean() for label in (0, 1)])
    assert enough.sum() == 550 and test["balanced_accuracy"] == pytest.approx(told)
    assert test["classes_told"] == 2
    words = noisy_metrics.screen_lines(test, "all silos", [])
    assert any("C too few to tell, D too few to tell" in line for line in words)
    assert any("over 2 of 4 classes" in line for line in words)


def test_the_floor_grows_with_the_noise() -> None:
    config = EvaluationConfig(20.0, 4)
    cell = cell_deviation(config, silos=3, honest=3)
    test = _test(_totals([400, 150, 60, 30], config=config), config)
    assert test["class_floor"] == pytest.approx(3 * cell * math.sqrt(4)) and test["class_floor"] > 150
    assert test["classes_told"] == 1 and test["noise_deviation"] == pytest.approx(cell)
    # Histograms have more noise in their sums, so none of them tells.
    assert test["auroc"] is None and test["auroc_classes"] == 0


def test_no_class_may_be_told_and_nothing_is_made_up_then() -> None:
    test = _test(_totals([5, 5, 5, 4]))
    assert test["balanced_accuracy"] is None and test["accuracy"] is None and test["auroc"] is None
    assert set(test["recall"].values()) == {None}
    assert "too few to tell" in noisy_metrics.round_words(test)


def test_negative_counts_make_no_negative_metric() -> None:
    noise = np.zeros((4, 4))
    noise[0, 0], noise[3] = -1e4, -500.0
    noise[1, 1] = 1e4
    test = _test(_totals([40_000, 150, 60, 30], noise=noise))
    assert 0 <= test["recall"]["A"] < 1 and test["recall"]["D"] is None
    assert test["class_records"]["D"] == 0
    noise[0, 0] = -39_900.0
    assert _test(_totals([40_000, 150, 60, 30], noise=noise))["recall"]["A"] in (None, 0.0)


def test_the_deviation_told_is_that_of_the_metric() -> None:
    """By drawing noise many times."""
    config = EvaluationConfig(3.0, 4)
    counts = [2000, 900, 500, 300]
    cell = cell_deviation(config, silos=3, honest=3)
    stream = np.random.default_rng(1)
    found = [
        _test(_totals(counts, stream.normal(0, cell, (4, 4)), config), config)["balanced_accuracy"]
        for _ in range(300)
    ]
    quiet = _test(_totals(counts, config=config), config)
    assert np.std(found) == pytest.approx(quiet["balanced_accuracy_deviation"], rel=0.2)
    assert np.mean(found) == pytest.approx(quiet["balanced_accuracy"], abs=2e-3)


def test_people_are_told_that_each_number_is_noisy() -> None:
    test = _test(_totals([400, 150, 60, 30]))
    lines = noisy_metrics.screen_lines(test, "all silos", [(1, {"test": test}), (2, {"test": test})])
    for metric in ("balanced accuracy", "accuracy", "AUROC"):
        assert f"noisy {metric} " in "\n".join(lines)
    assert "Noisy recall" in "\n".join(lines) and "standard deviation" in "\n".join(lines)
    assert "Noisy balanced accuracy after round 1: 0." in "\n".join(lines)
