"""Noisy class counts: exact before the noise, sensitivity 1 by record and by patient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.support.audit import gaussian_epsilon, lower_bounds

from tightframe.privacy.events import PrivacyValueError
from tightframe.privacy.releases.class_sums import (
    COUNT_GRID,
    class_counts,
    count_noise,
    noisy_counts,
    read_counts,
)

LABELS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=30)


@given(LABELS)
def test_counts_and_what_one_record_or_patient_changes(drawn: list[tuple[int, int]]) -> None:
    labels, people = (torch.tensor(column) for column in zip(*drawn, strict=True))
    counts = class_counts(labels, 3)
    assert (counts / COUNT_GRID).tolist() == np.bincount(labels, minlength=3).tolist()
    by_patient = class_counts(labels, 3, patients=people)
    for gone in people.unique():
        keep = people != gone
        change = by_patient - class_counts(labels[keep], 3, patients=people[keep])
        assert 0.999 * COUNT_GRID**2 < sum(int(value) ** 2 for value in change) <= COUNT_GRID**2


def test_noise_has_the_promised_variance() -> None:
    noise = torch.cat([count_noise(20_000, 3.0, honest=4) for _ in range(2)]).double() / COUNT_GRID
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], 40_000)
    assert low < float((noise**2).sum()) / (9 / 4) < high


def test_counts_are_read_as_a_prior() -> None:
    total = torch.tensor([-5, COUNT_GRID // 2, 7 * COUNT_GRID])
    assert read_counts(total).tolist() == [1.0, 1.0, 7.0]
    labels = torch.arange(3).repeat_interleave(torch.tensor([1000, 500, 0]))
    found = noisy_counts(labels, 3, 2.0)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([1000, 500, 1], abs=12)
    assert found.min() >= 1
    assert not torch.equal(found, noisy_counts(labels, 3, 2.0))


def test_all_of_the_noise_is_in_a_silos_own_prior() -> None:
    """A canary's count in 20,000 priors; the control has a quarter of the variance."""
    delta, noise, trials = 0.01, 1.0, 20_000
    scores = {}
    for share in (1, 4):
        drawn = [count_noise(trials, noise, honest=share).double().numpy() / COUNT_GRID for _ in range(2)]
        scores[share] = lower_bounds(drawn[0] + 100, drawn[1] + 101, delta=delta)
    limit = gaussian_epsilon(1 / noise, delta)
    assert scores[1].mu <= 1 / noise
    assert scores[1].epsilon <= limit
    assert scores[4].mu > 1 / noise
    assert scores[4].epsilon > limit


@pytest.mark.parametrize("noise", [0.0, math.nan, 1e-4])
def test_no_noise_is_refused(noise: float) -> None:
    with pytest.raises(PrivacyValueError, match="noise_multiplier"):
        count_noise(3, noise, honest=1)


def test_labels_out_of_range_are_refused() -> None:
    with pytest.raises(PrivacyValueError, match="a label from 0 to 2"):
        class_counts(torch.tensor([0, 3]), 3)
