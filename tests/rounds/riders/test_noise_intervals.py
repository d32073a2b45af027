"""What the server reads from noisy totals: exact metrics where noise is nothing, and what cannot be told."""

from __future__ import annotations

import functools
import json
import math
import re

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score, roc_auc_score

from tightframe import metrics
from tightframe.metrics import noise_intervals
from tightframe.privacy.releases.evaluation_totals import GRID, EvaluationConfig
from tightframe.results.outcome import noisy_lines
from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.results.rows import in_words
from tightframe.rounds.riders import noisy_evaluation

NAMES = ("A", "B", "C", "D")
BINS = 16
LITTLE = EvaluationConfig(noise_multiplier=0.01, num_classes=4)


@functools.cache
def _records(counts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    stream = np.random.default_rng(3)
    labels = np.repeat(np.arange(4), counts)
    scores = stream.dirichlet(np.ones(4), size=len(labels))
    scores[np.arange(len(labels)), labels] += stream.uniform(0, 0.8, size=len(labels))
    scores /= scores.sum(1, keepdims=True)
    return labels, scores.argmax(1), scores


@functools.cache
def _counted(counts: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    labels, predictions, scores = _records(counts)
    confusion = metrics.confusion_matrix(labels, predictions, 4).astype(float)
    return confusion, metrics.score_histogram(scores, labels, BINS)


def _totals(
    counts: list[int], noise: NDArray[np.float64] | None = None, config: EvaluationConfig = LITTLE
) -> dict[str, NDArray[np.float64]]:
    confusion, histogram = _counted(tuple(counts))
    if noise is not None:
        confusion = confusion + noise
    histogram = histogram * (config.score_units / GRID)
    fields = {"confusion": confusion, "scores": histogram}
    return {f"evaluation/{fold}/{name}": fields[name] for fold in ("validation", "test") for name in fields}


def _test(totals: dict[str, NDArray[np.float64]], config: EvaluationConfig = LITTLE) -> FoldMetrics:
    read = noisy_evaluation.summarise(totals, config, NAMES, silos=3, honest=3)
    assert read.test.noisy and read.validation.noisy
    json.dumps(read.as_json(), allow_nan=False)
    return read.test


def test_without_noise_the_metrics_are_scikit_learns() -> None:
    counts = [400, 150, 60, 30]
    labels, predictions, scores = _records(tuple(counts))
    test = _test(_totals(counts))
    assert test.accuracy == pytest.approx(accuracy_score(labels, predictions))
    assert test.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predictions))
    exact = metrics.auroc(metrics.score_histogram(scores, labels, BINS))
    assert test.auroc == pytest.approx(exact.mean(), abs=1e-6)
    assert test.class_records == dict(zip(NAMES, counts, strict=True)) and test.records == 640
    assert (test.classes_told, test.auroc_classes) == (4, 4)
    assert test.loss is None and test.average_precision is None


def test_classes_below_the_floor_have_no_recall_and_no_part_in_the_mean() -> None:
    counts = [400, 150, 19, 0]
    labels, predictions, _ = _records(tuple(counts))
    test = _test(_totals(counts))
    assert test.class_floor == 20.0
    assert [name for name, value in test.recall.items() if value is None] == ["C", "D"]
    enough = labels < 2
    told = np.mean([(predictions[labels == label] == label).mean() for label in (0, 1)])
    assert enough.sum() == 550 and test.balanced_accuracy == pytest.approx(told)
    assert test.classes_told == 2
    words = noisy_lines(test, "all silos", [])
    assert "   C too few to show" in words and "   D too few to show" in words
    assert next(line for line in words if "noisy balanced accuracy" in line).endswith("], 2 of 4 classes")


def test_the_floor_grows_with_the_noise() -> None:
    config = EvaluationConfig(20.0, 4)
    cell = config.deviation(silos=3, honest=3)
    test = _test(_totals([400, 150, 60, 30], config=config), config)
    assert test.class_floor == pytest.approx(3 * cell * math.sqrt(4)) and test.class_floor > 150
    assert test.classes_told == 1 and test.noise_deviation == pytest.approx(cell)
    # Histograms have more noise in their sums, so none of them tells.
    assert test.auroc is None and test.auroc_classes == 0


def test_no_class_may_be_told_and_nothing_is_made_up_then() -> None:
    test = _test(_totals([5, 5, 5, 4]))
    assert test.balanced_accuracy is None and test.accuracy is None and test.auroc is None
    assert set(test.recall.values()) == {None}
    assert "noisy balanced accuracy -, 0 of 4 classes" in in_words(test)
    helps = "   a larger privacy.evaluation_noise_share or privacy.epsilon has less noise"
    assert helps in noisy_lines(test, "all silos", [])
    assert helps not in noisy_lines(_test(_totals([400, 150, 60, 30])), "all silos", [])
    assert test.balanced_accuracy_interval is None and test.accuracy_interval is None


def test_negative_counts_make_no_negative_metric() -> None:
    noise = np.zeros((4, 4))
    noise[0, 0], noise[3] = -1e4, -500.0
    noise[1, 1] = 1e4
    test = _test(_totals([40_000, 150, 60, 30], noise=noise))
    assert 0 <= test.recall["A"] < 1 and test.recall["D"] is None
    assert test.class_records["D"] == 0
    noise[0, 0] = -39_900.0
    assert _test(_totals([40_000, 150, 60, 30], noise=noise)).recall["A"] in (None, 0.0)


@pytest.mark.whole
def test_the_deviation_told_is_that_of_the_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """By drawing noise many times, in both folds; without limits of areas, for which it is drawn, too."""
    monkeypatch.setattr(noise_intervals, "mean_area", lambda *_: (0.0, 1.0))
    config = EvaluationConfig(3.0, 4)
    counts = [2000, 900, 500, 300]
    cell = config.deviation(silos=3, honest=3)
    stream = np.random.default_rng(1)
    found = []
    for _ in range(150):
        totals = _totals(counts, config=config)
        for name in totals:
            if name.endswith("confusion"):
                totals[name] = totals[name] + stream.normal(0, cell, (4, 4))
        read = noisy_evaluation.summarise(totals, config, NAMES, silos=3, honest=3)
        found += [read.validation.balanced_accuracy, read.test.balanced_accuracy]
    quiet = _test(_totals(counts, config=config), config)
    assert np.std(found) == pytest.approx(quiet.balanced_accuracy_deviation, rel=0.2)
    assert np.mean(found) == pytest.approx(quiet.balanced_accuracy, abs=2e-3)


def test_people_are_told_that_each_number_is_noisy_and_how_far_it_can_be_trusted() -> None:
    test = _test(_totals([400, 150, 60, 30]))
    lines = noisy_lines(test, "all silos", [(1, test), (2, test)])
    said = "\n".join([*lines, in_words(test)])
    for name, of in (
        ("balanced accuracy", ", 4 of 4 classes"),
        ("accuracy", ""),
        ("AUROC", ", 4 of 4 classes"),
    ):
        assert re.search(rf"noisy {name} 0\.\d{{3}} \[0\.\d{{3}}, 0\.\d{{3}}\]{of}", said), said
    assert re.search(
        r"Noisy balanced accuracy by round:\n   1: 0\.\d+ \[0\.\d+, 0\.\d+\], 4 of 4 classes", said
    )
    assert re.search(r"Noisy recall:\n   A 0\.\d\d \[0\.\d\d, 0\.\d\d\]\n", said)
    assert "standard deviation" in said and "the 95% interval of the exact value" in said
    # No number of the exact kind, with three digits and no brackets, is left.
    numbers = re.findall(r"0\.\d{3}(?! \[)(?!,? ?\d?\.?\d*\])", re.sub(r"\[[^]]*\]", "[]", said))
    assert numbers == [], numbers


CASES = [
    # A model with one answer, records near the floor, and strongly uneven classes.
    ([[30, 0], [25, 0]], 5.0),
    ([[30, 5], [10, 15]], 5.0),
    ([[400, 20, 5], [40, 100, 10], [3, 2, 20]], 4.0),
    ([[n, *[0] * 7] for n in (600, 150, 90, 60, 45, 40, 35, 25)], 4.0),
    ([[3 + d * (i == j) for j in range(8)] for i, d in enumerate((500, 100, 60, 40, 30, 22, 20, 15))], 3.0),
]


@pytest.mark.whole
@pytest.mark.parametrize(("confusion", "cell"), CASES)
def test_intervals_have_the_exact_value_in_95_of_100_releases(
    confusion: list[list[float]], cell: float
) -> None:
    """The truth is known here; noise is drawn again and again, as a server would have opened it."""
    exact, stream, releases = np.array(confusion, float), np.random.default_rng(11), 1500
    rows, names = exact.sum(1), [str(i) for i in range(len(exact))]
    scores = np.zeros((len(exact), 2, BINS))
    held: dict[str, list[bool]] = {"balanced_accuracy": [], "accuracy": [], "recall": [], "records": []}
    for _ in range(releases):
        noisy = exact + stream.normal(0, cell, exact.shape)
        test = noisy_evaluation._fold(noisy, scores, names, cell, 1e9)
        told = [i for i, name in enumerate(names) if test.recall[name] is not None]
        truths = {"accuracy": np.trace(exact) / exact.sum(), "records": exact.sum()}
        if told:
            truths["balanced_accuracy"] = np.mean([exact[i, i] / rows[i] for i in told])
            share, ends = exact[told[-1], told[-1]] / rows[told[-1]], test.recall_interval[names[told[-1]]]
            held["recall"].append(ends[0] - 1e-9 <= share <= ends[1] + 1e-9)
        for name, truth in truths.items():
            if (ends := getattr(test, f"{name}_interval")) is not None:
                held[name].append(ends[0] - 1e-9 <= truth <= ends[1] + 1e-9)
    for name, seen in held.items():
        assert len(seen) > releases / 2
        # Three standard errors of a share that is 0.95.
        slack = 3 * math.sqrt(0.95 * 0.05 / len(seen))
        assert np.mean(seen) >= 0.95 - slack, (name, np.mean(seen))
        assert np.mean(seen) < 0.999, "an interval that always holds says nothing"


def test_intervals_of_findings_have_the_exact_value_in_95_of_100_releases() -> None:
    """Of two findings: the second is known of fewer records, and one kind of them is below the floor."""
    exact, cell, releases = np.array([[[300, 40], [25, 90]], [[150, 10], [6, 9]]], float), 3.0, 600
    stream, names, rows = np.random.default_rng(13), ["edema", "nodule"], exact.sum(2)
    scores = np.zeros((2, 2, BINS))
    rates = exact[0, 0, 0] / rows[0, 0], exact[0, 1, 1] / rows[0, 1]
    truths = {
        "accuracy": np.mean([np.trace(table) / table.sum() for table in exact]),
        "balanced_accuracy": np.mean(rates),
        "records": 480.0,
        "sensitivity": rates[1],
        "specificity": rates[0],
    }
    held: dict[str, list[bool]] = {name: [] for name in truths}
    for _ in range(releases):
        noisy, number = exact + stream.normal(0, cell, exact.shape), 480 + stream.normal(0, cell)
        test = noisy_evaluation._finding_fold(noisy, scores, number, names, (cell, 1e9), readable=False)
        if noisy[1, 1].sum() >= 20:
            continue
        assert test.findings is not None and test.findings["nodule"].sensitivity is None
        assert (test.classes_told, test.classes) == (1, 2)
        for name, truth in truths.items():
            part = test.findings["edema"] if name in ("sensitivity", "specificity") else test
            low, high = getattr(part, f"{name}_interval")
            held[name].append(low - 1e-9 <= truth <= high + 1e-9)
    for name, seen in held.items():
        assert len(seen) > releases / 2
        slack = 3 * math.sqrt(0.95 * 0.05 / len(seen))
        assert 0.95 - slack <= np.mean(seen) < 0.999, (name, np.mean(seen))


def test_findings_with_hardly_any_noise_have_scikit_learns_metrics() -> None:
    stream = np.random.default_rng(3)
    labels = stream.integers(0, 2, (4000, 3))
    scores = np.clip((stream.integers(0, 20, (4000, 3)) + 3 * labels) / 23 + 0.01, 0, 1)
    tables = metrics.finding_confusion(labels, scores >= 0.5).astype(float)
    histograms = metrics.score_histogram(scores, labels, 23).astype(float)
    test = noisy_evaluation._finding_fold(tables, histograms, 4000.0, list("abc"), (1e-3, 1e-3), True)
    assert test.auroc == pytest.approx(roc_auc_score(labels, scores, average="macro"))
    assert test.auroc_interval == pytest.approx((test.auroc, test.auroc), abs=1e-4)
    assert test.accuracy == pytest.approx(np.mean(labels == (scores >= 0.5)))
    for place, name in enumerate("abc"):
        found = (test.findings or {})[name]
        assert found.sensitivity == pytest.approx(recall_score(labels[:, place], scores[:, place] >= 0.5))
        assert found.auroc == pytest.approx(roc_auc_score(labels[:, place], scores[:, place]))
        brier = (test.reading or {})[name].brier
        assert brier is not None and brier[0] <= np.mean((scores - labels)[:, place] ** 2) <= brier[1]


@pytest.mark.whole
def test_the_interval_of_areas_has_the_exact_one_in_95_of_100_releases() -> None:
    counts, cell, bins = [400, 350, 60, 30], 3.0, 4.2
    labels, predictions, scores = _records(tuple(counts))
    confusion = metrics.confusion_matrix(labels, predictions, 4).astype(float)
    histogram = metrics.score_histogram(scores, labels, BINS).astype(float)
    areas, stream = metrics.auroc(histogram.astype(np.int64)), np.random.default_rng(12)
    held = []
    for _ in range(200):
        noisy = confusion + stream.normal(0, cell, confusion.shape)
        histograms = histogram + stream.normal(0, bins, histogram.shape)
        test = noisy_evaluation._fold(noisy, histograms, NAMES, cell, bins)
        row = noisy.sum(1)
        enough = np.stack([row, row.sum() - row]).min(0) >= max(20.0, 3 * bins * math.sqrt(BINS))
        assert test.auroc_classes == enough.sum() > 0
        low, high = test.auroc_interval
        held.append(low <= areas[enough].mean() <= high)
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / 200) <= np.mean(held) < 1


def test_limits_of_a_share_are_where_its_noise_just_reaches() -> None:
    """Fieller's, by the definition: at either limit the count is as far from 0 as its own noise goes."""
    part, rest, own, other = np.array([50.0]), np.array([70.0]), 6.0, 9.0
    for limit in noise_intervals.share(part, rest, own, other):
        spread = math.hypot(own * (1 - limit[0]), other * limit[0])
        assert abs(part[0] - limit[0] * 120) == pytest.approx(noise_intervals.NORMAL * spread)
    low, high = noise_intervals.share(np.array([3.0]), np.array([2.0]), 6.0, 9.0)
    assert (low[0], high[0]) == (-math.inf, math.inf), "noise as large as the count leaves all open"


def test_a_model_that_gives_one_answer_is_called_that_as_far_as_noise_lets_one_say() -> None:
    """The newcomers' case: about 0.58 for a model that has 0.5, because it says one class only."""
    empty = np.zeros((2, 2, BINS))

    def read(confusion: list[list[float]], cell: float) -> FoldMetrics:
        return noisy_evaluation._fold(np.array(confusion, float), empty, ("ill", "well"), cell, 1e9)

    sure = read([[400.0, 3.0], [350.0, -2.0]], 3.0)
    assert sure.one_answer.of_class == "ill" and sure.one_answer.certain is True
    assert "by noisy counts the model gives one answer: ill, also for" in in_words(sure)
    open_ = read([[60.0, 8.0], [45.0, 9.0]], 10.0)
    low, high = open_.balanced_accuracy_interval
    assert open_.balanced_accuracy > 0.5 and low < 0.5 < high
    assert open_.one_answer.certain is False
    lines = "\n".join(noisy_lines(open_, "all silos", []))
    assert "NOTE: the noise leaves open whether the model ever answers anything but ill" in lines
    assert read([[400.0, 3.0], [100.0, 250.0]], 3.0).one_answer is None
