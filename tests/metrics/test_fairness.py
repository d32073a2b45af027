"""FedILC's fairness measures against the standard library and scipy."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tightframe import metrics

accuracies = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(accuracies)
def test_measures_equal_their_oracles(values: list[float]) -> None:
    assert metrics.accuracy_variance(values) == pytest.approx(statistics.variance(values), abs=1e-12)
    entropy, divergence = metrics.accuracy_entropy(values), metrics.divergence_from_uniform(values)
    if sum(values) == 0:
        assert math.isnan(entropy) and math.isnan(divergence)
        return
    assert entropy == pytest.approx(stats.entropy(values), abs=1e-9)
    uniform = np.full(len(values), 1 / len(values))
    assert divergence == pytest.approx(stats.entropy(values, uniform), abs=1e-9)
    assert divergence >= 0


def test_nine_sub_environments_as_the_paper_prints_them() -> None:
    """The scale of its tables: variance x 1000 of .606 to .809 beside entropy x 10 of 21.948 to 21.956."""
    values = np.array([0.36, 0.38, 0.39, 0.40, 0.41, 0.42, 0.42, 0.43, 0.45])
    assert 1000 * metrics.accuracy_variance(values) == pytest.approx(0.75)
    assert 10 * metrics.accuracy_entropy(values) == pytest.approx(21.95198, abs=1e-5)
    assert metrics.divergence_from_uniform([0.4] * 9) == pytest.approx(0, abs=1e-12)
    assert metrics.accuracy_entropy([0.4] * 9) == pytest.approx(math.log(9))


def test_one_or_no_accuracy() -> None:
    assert math.isnan(metrics.accuracy_variance([0.5]))
    assert metrics.accuracy_entropy([0.5]) == 0
    assert math.isnan(metrics.accuracy_variance([]))
    assert math.isnan(metrics.accuracy_entropy([]))
    assert math.isnan(metrics.divergence_from_uniform([]))


@pytest.mark.parametrize("wrong", [[0.5, math.nan], [0.5, 1.1], [-0.1, 0.5], [[0.5, 0.5]]])
def test_what_is_no_accuracy_is_refused(wrong: list[float]) -> None:
    for measure in (metrics.accuracy_variance, metrics.accuracy_entropy, metrics.divergence_from_uniform):
        with pytest.raises(ValueError, match="`accuracies`"):
            measure(wrong)
