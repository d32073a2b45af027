"""The oracle is scikit-learn: exactly on binned scores, within the stated bounds on raw ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as oracle
from tests.support.error_bounds import auroc_error_bound, average_precision_error_bound

from tightframe import metrics


@st.composite
def classified(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """(labels, predictions, C); classes may be absent."""
    num_classes = draw(st.integers(2, 6))
    n = draw(st.integers(1, 60))
    classes = st.lists(st.integers(0, num_classes - 1), min_size=n, max_size=n)
    return np.array(draw(classes)), np.array(draw(classes)), num_classes


@st.composite
def scored(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """(softmax scores, labels, bins): from random to sharp, some rounded so that they tie."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, num_classes = draw(st.integers(1, 80)), draw(st.integers(2, 5))
    labels = rng.integers(0, draw(st.integers(1, num_classes)), n)
    logits = rng.normal(size=(n, num_classes)) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    logits[np.arange(n), labels] += draw(st.sampled_from([0.0, 1.0, 4.0]))
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    decimals = draw(st.sampled_from([1, 2, None]))
    if decimals is not None:
        scores = scores.round(decimals)
    return scores, labels, draw(st.sampled_from([1, 2, 7, 32, 256]))


@pytest.mark.whole
@given(classified())
def test_confusion_and_recalls(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    labels, predictions, num_classes = case
    confusion = metrics.confusion_matrix(labels, predictions, num_classes)
    assert confusion.dtype == np.int64
    expected = oracle.confusion_matrix(labels, predictions, labels=range(num_classes))
    np.testing.assert_array_equal(confusion, expected)
    assert metrics.accuracy(confusion) == pytest.approx(oracle.accuracy_score(labels, predictions))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a predicted class without true records
        expected = oracle.balanced_accuracy_score(labels, predictions)
    assert metrics.balanced_accuracy(confusion) == pytest.approx(expected)
    recall = metrics.per_class_recall(confusion)
    expected = oracle.recall_score(
        labels, predictions, labels=range(num_classes), average=None, zero_division=np.nan
    )
    np.testing.assert_allclose(recall, expected)


@given(scored())
def test_histograms_count_every_score_once(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    scores, labels, bins = case
    histogram = metrics.score_histogram(scores, labels, bins)
    num_classes = scores.shape[1]
    assert histogram.shape == (num_classes, 2, bins)
    assert histogram.dtype == np.int64
    for c in range(num_classes):
        inner = np.searchsorted(np.arange(1, bins) / bins, scores[:, c], side="right")
        for row, chosen in enumerate((labels == c, labels != c)):
            assert histogram[c, row].sum() == chosen.sum()
            # numpy's edges and ours may differ by one rounding, so an edge is left some room.
            exact = np.abs(scores[:, c] * bins - np.rint(scores[:, c] * bins)) > 1e-9
            if exact.all():
                np.testing.assert_array_equal(histogram[c, row], np.bincount(inner[chosen], minlength=bins))


@pytest.mark.whole
@given(scored())
def test_ranking_metrics_equal_the_oracle_on_binned_scores_and_keep_their_bounds_on_raw_ones(
    case: tuple[np.ndarray, np.ndarray, int],
) -> None:
    scores, labels, bins = case
    histogram = metrics.score_histogram(scores, labels, bins)
    area, area_bound = metrics.auroc(histogram), auroc_error_bound(histogram)
    precision = metrics.average_precision(histogram)
    precision_bound = average_precision_error_bound(histogram)
    places = np.minimum((scores * bins).astype(int), bins - 1)
    for c in range(scores.shape[1]):
        truth = labels == c
        if not truth.any():
            assert np.isnan([area[c], area_bound[c], precision[c], precision_bound[c]]).all()
            continue
        assert precision[c] == pytest.approx(oracle.average_precision_score(truth, places[:, c]))
        raw = oracle.average_precision_score(truth, scores[:, c])
        assert abs(precision[c] - raw) <= precision_bound[c] + 1e-12
        if truth.all():
            assert np.isnan(area[c]) and np.isnan(area_bound[c])
            continue
        assert area[c] == pytest.approx(oracle.roc_auc_score(truth, places[:, c]))
        assert abs(area[c] - oracle.roc_auc_score(truth, scores[:, c])) <= area_bound[c] + 1e-12


def test_bounds_are_reached_and_shrink_with_the_bins() -> None:
    truth = np.array([1, 1, 0, 0, 0])
    scores = np.array([[0.2, 0.8], [0.2, 0.8], [0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])
    one_bin = metrics.score_histogram(scores, truth, 1)
    assert metrics.auroc(one_bin)[1] == 0.5
    assert auroc_error_bound(one_bin)[1] == 0.5  # the raw area is 1
    assert metrics.average_precision(one_bin)[1] == pytest.approx(0.4)
    assert average_precision_error_bound(one_bin)[1] == pytest.approx(0.6)  # the raw value is 1

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 4000)
    first = np.clip(rng.normal(0.5 - 0.2 * (labels - 0.5), 0.2), 0, 1)
    scores = np.stack([first, 1 - first], axis=1)
    bounds = []
    for bins in (8, 32, 128):
        histogram = metrics.score_histogram(scores, labels, bins)
        bounds.append((auroc_error_bound(histogram)[1], average_precision_error_bound(histogram)[1]))
    assert bounds[0] > bounds[1] > bounds[2]
    assert max(bounds[2]) < 0.01


def test_precision_may_also_be_too_high() -> None:
    # All negatives above two positives that share a bin but not a score.
    truth = np.array([0, 0, 0, 0, 0, 1, 1])
    second = np.array([0.9, 0.9, 0.9, 0.9, 0.9, 0.2, 0.3])
    histogram = metrics.score_histogram(np.stack([1 - second, second], axis=1), truth, 2)
    binned = metrics.average_precision(histogram)[1]
    raw = oracle.average_precision_score(truth, second)
    assert binned == pytest.approx(2 / 7)
    assert raw == pytest.approx((1 / 6 + 2 / 7) / 2)
    assert binned - raw <= average_precision_error_bound(histogram)[1] == pytest.approx(2 / 7 - 1 / 6)


def test_counts_of_many_silos_add_up() -> None:
    rng = np.random.default_rng(1)
    scores = rng.dirichlet(np.ones(4), 300)
    labels = rng.integers(0, 4, 300)
    parts = [metrics.score_histogram(scores[i::3], labels[i::3], 32) for i in range(3)]
    np.testing.assert_array_equal(sum(parts), metrics.score_histogram(scores, labels, 32))
    # Decoded totals are float64 and may be large; products of counts must not overflow.
    large = sum(parts) * 2.0**28
    np.testing.assert_allclose(metrics.auroc(large), metrics.auroc(sum(parts)))
    np.testing.assert_allclose(metrics.auroc((sum(parts) * 2**28).astype(np.int64)), metrics.auroc(large))


def test_nothing_counted_is_nan() -> None:
    confusion = np.zeros((3, 3), np.int64)
    assert np.isnan(metrics.accuracy(confusion))
    assert np.isnan(metrics.balanced_accuracy(confusion))
    assert np.isnan(metrics.per_class_recall(confusion)).all()
    empty = metrics.score_histogram(np.zeros((0, 3)), np.zeros(0, int), 4)
    assert empty.sum() == 0
    assert np.isnan(metrics.macro_mean(metrics.auroc(empty)))
    assert np.isnan(metrics.macro_mean(metrics.average_precision(empty)))


def test_float32_softmax_may_round_past_one() -> None:
    scores = np.array([[np.nextafter(np.float32(1), np.float32(2)), -1e-8]], np.float32)
    assert metrics.score_histogram(scores, np.array([0]), 4)[:, 0, :].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("bad", [1.5, -0.5, np.nan, np.inf])
def test_what_is_no_score_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="`scores`"):
        metrics.score_histogram(np.array([[bad, 0.5]]), np.array([0]), 4)


def test_what_does_not_fit_is_refused() -> None:
    two = np.array([0, 1])
    with pytest.raises(ValueError, match=r"`labels`.*\[0, 2\)"):
        metrics.confusion_matrix(np.array([0, 2]), two, 2)
    with pytest.raises(ValueError, match="`predictions`"):
        metrics.confusion_matrix(two, np.array([-1, 0]), 2)
    with pytest.raises(ValueError, match="`predictions`"):
        metrics.confusion_matrix(two, np.array([0.0, 1.0]), 2)
    with pytest.raises(ValueError, match="one shape"):
        metrics.confusion_matrix(two, np.array([0]), 2)
    with pytest.raises(ValueError, match="`scores`"):
        metrics.score_histogram(np.zeros((3, 2)), two, 4)
    with pytest.raises(ValueError, match="`bins`"):
        metrics.score_histogram(np.zeros((2, 2)), two, 0)
    with pytest.raises(ValueError, match="`labels`"):
        metrics.score_histogram(np.zeros((2, 2)), np.array([0, 2]), 4)
    with pytest.raises(ValueError, match="`confusion`"):
        metrics.accuracy(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="`histogram`"):
        metrics.auroc(np.zeros((2, 3, 4)))


@pytest.mark.parametrize(
    ("confusion", "expected"),
    [
        ([[50, 0], [40, 0]], (0, 1.0)),
        ([[0, 50, 0], [0, 40, 0], [0, 99, 1]], (1, 149 / 150)),
        ([[0, 0, 5], [0, 0, 4], [0, 0, 0]], (2, 1.0)),  # an answer that no record has
        ([[990, 0], [2, 8]], None),  # a good model where nearly all records are of one class
        ([[50, 0], [3, 37]], None),
        ([[30, 20], [0, 40]], None),
        ([[50, 0], [0, 0]], None),  # of records of one class nothing follows
        ([[0, 0], [0, 0]], None),
    ],
)
def test_a_model_with_one_answer_is_told_from_a_good_one(
    confusion: list[list[int]], expected: tuple[int, float] | None
) -> None:
    assert metrics.one_answer(np.array(confusion)) == expected
