"""PM(V) and PM(L) record by record and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as oracle

from tightframe import metrics


@st.composite
def judged(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(labels, predictions, a silo's training counts); classes may lack on either side."""
    num_classes = draw(st.integers(2, 5))
    n = draw(st.integers(1, 40))
    classes = st.lists(st.integers(0, num_classes - 1), min_size=n, max_size=n)
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 7, 300]), min_size=num_classes, max_size=num_classes))
    return np.array(draw(classes)), np.array(draw(classes)), np.array(counts)


@given(judged())
def test_personal_accuracies_are_sums_over_records(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    labels, predictions, counts = case
    confusion = metrics.confusion_matrix(labels, predictions, len(counts))
    valid = (counts > 0).astype(float)
    share = counts / max(counts.sum(), 1)
    for found, weights in (
        (metrics.valid_class_accuracy(confusion, counts), valid),
        (metrics.label_share_accuracy(confusion, counts), share),
        (metrics.weighted_accuracy(confusion, 3.0 * share), share),
    ):
        each = weights[labels]
        if each.sum() == 0:
            assert math.isnan(found)
        else:
            expected = oracle.accuracy_score(labels, predictions, sample_weight=each)
            assert found == pytest.approx(expected)


def test_all_classes_alike_is_plain_accuracy() -> None:
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 3, (2, 60))
    confusion = metrics.confusion_matrix(labels, predictions, 3)
    plain = oracle.accuracy_score(labels, predictions)
    assert metrics.valid_class_accuracy(confusion, np.array([5, 900, 1])) == pytest.approx(plain)
    assert metrics.label_share_accuracy(confusion, np.array([8, 8, 8])) == pytest.approx(plain)


def test_label_shares_favour_a_model_of_its_frequent_classes() -> None:
    """As in FedNH's tables: a local model is best on what it has most of, so PM(L) > PM(V)."""
    confusion = np.array([[95, 5, 0], [60, 40, 0], [70, 30, 0]])
    counts = np.array([900, 100, 0])
    assert metrics.valid_class_accuracy(confusion, counts) == pytest.approx((95 + 40) / 200)
    assert metrics.label_share_accuracy(confusion, counts) == pytest.approx(0.9 * 0.95 + 0.1 * 0.4)
    assert metrics.accuracy(confusion) == pytest.approx(135 / 300)


def test_what_does_not_fit_is_refused() -> None:
    confusion = np.eye(3, dtype=int)
    with pytest.raises(ValueError, match="`confusion`"):
        metrics.weighted_accuracy(np.ones((2, 3)), np.ones(2))
    for wrong in (np.ones(2), np.array([1, -1, 1]), np.array([1, math.nan, 1])):
        with pytest.raises(ValueError, match="not negative"):
            metrics.weighted_accuracy(confusion, wrong)
        with pytest.raises(ValueError, match="not negative"):
            metrics.valid_class_accuracy(confusion, wrong)
        with pytest.raises(ValueError, match="not negative"):
            metrics.label_share_accuracy(confusion, wrong)
