"""Sampling and noise: their distributions, and that torch's seeds do not reach them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from scipy import stats

from tightframe.privacy.discrete_gaussian import RandomnessError
from tightframe.privacy.os_randomness import NOISE_CHUNK, MaskSeeds, poisson_batch, standard_normal


def seeded(seed: int):  # type: ignore[no-untyped-def]
    return np.random.default_rng(seed).bytes


def test_noise_is_standard_normal_and_independent() -> None:
    values = standard_normal(200_000, seeded(0)).numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(values.var() - 1) < 4 * np.sqrt(2 / len(values))
    assert abs(stats.kurtosis(values)) < 4 * np.sqrt(24 / len(values))
    # The two halves of a chunk come from the same pairs, as sine and cosine.
    chunk = values[:NOISE_CHUNK].reshape(2, -1)
    for one, other in ((values[:-1], values[1:]), (chunk[0], chunk[1]), (chunk[0] ** 2, chunk[1] ** 2)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(one))


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_the_test_of_the_noise_would_see_another_deviation(factor: float) -> None:
    values = factor * standard_normal(200_000, seeded(0)).numpy()
    assert stats.kstest(values, "norm").pvalue < 1e-3


def test_extreme_bytes_give_finite_noise() -> None:
    for byte in (b"\x00", b"\xff"):
        assert bool(standard_normal(5, lambda count, b=byte: b * count).isfinite().all())


@pytest.mark.parametrize("count", [0, 1, 2, 7, NOISE_CHUNK, NOISE_CHUNK + 1])
def test_there_is_as_much_noise_as_asked_for(count: int) -> None:
    assert standard_normal(count).shape == (count,)


def test_batches_are_poisson() -> None:
    rate, count, steps = 0.3, 50, 4000
    source = seeded(1)
    taken = np.zeros((steps, count), dtype=bool)
    for row in taken:
        row[poisson_batch(count, rate, source)] = True
    sizes = taken.sum(1)
    likely = np.arange(6, 25)
    expected = stats.binom.pmf(likely, count, rate)
    found = np.bincount(sizes, minlength=count + 1)[likely]
    assert stats.chisquare(found, expected / expected.sum() * found.sum()).pvalue > 1e-3
    shares = taken.mean(0)
    assert np.abs(shares - rate).max() < 4.5 * np.sqrt(rate * (1 - rate) / steps)
    between = np.corrcoef(taken.T.astype(float))
    assert np.abs(between[~np.eye(count, dtype=bool)]).max() < 5 / np.sqrt(steps)


def test_a_record_is_taken_with_the_very_probability() -> None:
    words = np.array([2**62 - 1, 2**62, 2**64 - 1, 0], dtype=np.uint64)
    assert poisson_batch(4, 0.25, lambda count: words.tobytes()[:count]) == [0, 3]


@pytest.mark.parametrize(("device", "drawn_from"), [("cpu", 2), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_masks_of_each_record_have_a_stream_of_their_own_on_the_device_that_draws_them(
    monkeypatch: pytest.MonkeyPatch, device: str, drawn_from: int
) -> None:
    """One stream for all would shift with one record more, and their sum by more than its bound."""
    generators = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(generators[:2]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch, "default_generator", generators[2])
    before = [generator.initial_seed() for generator in generators]
    starts = []
    for key in (1, 1, 2):
        seeds = MaskSeeds(torch.device(device), seeded(key))
        for _ in range(2):
            seeds.start_next()
            starts.append(generators[drawn_from].initial_seed())
    assert starts[:2] == starts[2:4] and len(set(starts)) == 4, "by record and key alone"
    others = [place for place in range(3) if place != drawn_from]
    assert all(generators[place].initial_seed() == before[place] for place in others)


def test_rate_one_takes_all_and_tiny_rates_take_nobody() -> None:
    assert poisson_batch(4, 1.0) == [0, 1, 2, 3]
    assert poisson_batch(1000, 1e-15) == []


def test_torch_and_numpy_seeds_do_not_repeat_the_draws() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        drawn.append((standard_normal(8).tolist(), poisson_batch(200, 0.5)))
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def test_without_the_systems_generator_nobody_is_drawn_and_there_is_no_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A generator that gives too little would leave records out of every batch, and unseen."""
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count - 8))
    with pytest.raises(RandomnessError, match="TF-720"):
        poisson_batch(50, 0.5)
    with pytest.raises(RandomnessError, match="TF-720"):
        standard_normal(8)
