"""The discrete Gaussian against its probabilities.

Bytes are what the test's name says (``tests/support/randomness.py``). All limits are such that a right
sampler fails with other ones about once in ten million runs.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from tightframe.privacy import discrete_gaussian as module
from tightframe.privacy.discrete_gaussian import RandomnessError, discrete_gaussian

RARE = 1e-7
SMALL = [0.05, 0.3, 1, 2, 5.5, 30.25, Fraction(200, 7)]


def _probabilities(variance: Any, edge: int) -> NDArray[np.float64]:
    places = np.arange(-edge, edge + 1)
    weights = np.exp(-(places**2) / (2 * float(variance)))
    return weights / weights.sum()


def _chi_square(samples: NDArray[np.int64], variance: Any) -> float:
    """p-value against the exact probabilities; rare values are taken together."""
    edge = math.ceil(12 * math.sqrt(float(variance))) + 2
    assert np.abs(samples).max() <= edge
    expected = samples.size * _probabilities(variance, edge)
    found = np.bincount(samples + edge, minlength=2 * edge + 1)
    often = expected >= 10
    found_cells = np.append(found[often], found[~often].sum())
    expected_cells = np.append(expected[often], expected[~often].sum())
    keep = expected_cells > 1e-3
    if keep.sum() < 2:
        return 1.0
    statistic = ((found_cells - expected_cells)[keep] ** 2 / expected_cells[keep]).sum()
    return float(stats.chi2.sf(statistic, keep.sum() - 1))


@pytest.mark.parametrize("variance", SMALL)
def test_probabilities_of_small_variances(variance: Any) -> None:
    assert _chi_square(discrete_gaussian(variance, (60_000,)), variance) > RARE


def test_a_rounded_continuous_gaussian_would_be_found_out() -> None:
    rounded = np.rint(np.random.default_rng(1).normal(size=60_000)).astype(np.int64)
    assert _chi_square(rounded, 1) < RARE
    # The next best scale, off by 3 %, as well.
    assert _chi_square(discrete_gaussian(5.5 * 1.03**2, (60_000,)), 5.5) < RARE


def test_tails() -> None:
    samples = np.abs(discrete_gaussian(9, (200_000,)))
    probabilities = _probabilities(9, 60)
    for edge in (6, 9, 12):
        beyond = 2 * float(probabilities[60 + edge :].sum())
        assert stats.binomtest(int((samples >= edge).sum()), samples.size, beyond).pvalue > RARE


@pytest.mark.parametrize("variance", [1e3, 1e6, 1e12, 2.0**48, Fraction(10**24, 7), 2.0**112])
def test_large_variances(variance: Any) -> None:
    samples = discrete_gaussian(variance, (40_000,))
    scaled = samples.astype(np.float64) / math.sqrt(variance)
    low, high = stats.chi2.ppf([RARE, 1 - RARE], scaled.size)
    assert low < float((scaled**2).sum()) < high
    assert abs(float(scaled.sum())) / math.sqrt(scaled.size) < 5.6
    # In steps of the grid, a thousand and more in a deviation, it is the continuous one.
    uniform = np.random.default_rng(2).uniform(-0.5, 0.5, samples.size) / math.sqrt(variance)
    assert stats.kstest(scaled + uniform, "norm").pvalue > RARE


@pytest.mark.parametrize("variance", [1e6, 2.0**100])
def test_the_last_bits_are_uniform(variance: float) -> None:
    # Doubles around 2**50 have none, and this is where noise made of them shows what it hides.
    last = np.bincount(discrete_gaussian(variance, (40_000,)) % 16, minlength=16)
    assert stats.chisquare(last).pvalue > RARE


def test_samples_do_not_depend_on_each_other() -> None:
    samples = discrete_gaussian(1e6, (2, 40_000)).astype(np.float64) / 1e3
    for first, second in ((samples[0], samples[1]), (samples[0, 1:], samples[0, :-1])):
        assert abs(float(first @ second)) / math.sqrt(first.size) < 5.6


def test_signs_and_halves_are_even() -> None:
    samples = discrete_gaussian(1e8, (40_000,))
    for heads in (samples > 0, np.abs(samples) < 6745):
        assert stats.binomtest(int(heads.sum()), samples.size, 0.5).pvalue > RARE


def test_shape_and_type() -> None:
    assert discrete_gaussian(4, (3, 0, 2)).shape == (3, 0, 2)
    found = discrete_gaussian(Fraction(9, 2), (2, 3))
    assert found.shape == (2, 3)
    assert found.dtype == np.int64


def test_no_seed_makes_two_calls_agree() -> None:
    drawn = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        drawn.append(discrete_gaussian(2.0**40, (50,)))
    assert not np.array_equal(*drawn)
    assert len(np.intersect1d(*drawn)) < 5


def _raises(error: type[Exception]) -> Any:
    def generator(count: int) -> bytes:
        raise error("none")

    return generator


@pytest.mark.parametrize(
    "generator",
    [_raises(OSError), _raises(NotImplementedError), lambda count: bytes(count - 1), lambda _: b""],
)
def test_without_a_generator_it_stops(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", generator)
    with pytest.raises(RandomnessError, match=r"^TF-720: .*No noise was drawn") as caught:
        discrete_gaussian(4, (10,))
    assert caught.value.code == "TF-720"


@pytest.mark.parametrize("variance", [0, -1.0, math.nan, math.inf, 2.0**113, 1e-30])
def test_refused_variances(variance: float) -> None:
    with pytest.raises(ValueError, match="`variance` to be from"):
        discrete_gaussian(variance, (1,))


def test_starts_without_torch(root: Path) -> None:
    code = (
        "import sys, tightframe.privacy.discrete_gaussian, tightframe.privacy.releases.class_sums_plan\n"
        "assert not {'torch', 'opacus', 'scipy'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(root / "custom")}
    )


# The coins, word by word.


def _words(*words: int) -> module._Coins:
    left = list(words)
    return module._Coins(
        lambda count: b"".join([left.pop(0).to_bytes(8, "little") for _ in range(count // 8)])
    )


def test_equal_words_are_decided_by_the_next_digits() -> None:
    third = Fraction(1, 3)  # 0.0101... in binary
    digits = 0x5555_5555_5555_5555
    for last, expected in ((digits - 1, True), (digits + 1, False)):
        assert _words(digits, digits, last)._one(third) is expected
        # The digits after the first 64 are those of 1/3 again.
        found = _words(digits, 5, digits, last).heads(np.array([digits, 4], np.uint64), lambda _: third)
        assert found.tolist() == [expected, False]


def test_a_coin_of_probability_zero_never_falls_heads() -> None:
    assert not _words(0, 0, 7)._one(Fraction(0))
    with pytest.raises(IndexError):
        _words(0, 0)._one(Fraction(0))


def test_words_around_the_edge_of_one_in_three() -> None:
    edge = 2**64 // 3
    assert _words(0, edge - 1, edge + 1, 2**64 - 1).one_in(3, 4).tolist() == [True, True, False, False]


@pytest.mark.parametrize("ratio", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(9, 4), Fraction(5)])
def test_exponential_coins(ratio: Fraction) -> None:
    coins, count = module._Coins(os.urandom), 60_000
    numerators = np.full(count, ratio.numerator, object)
    found = int(coins.exp_minus_ratio(numerators, ratio.denominator).sum())
    assert stats.binomtest(found, count, math.exp(-ratio)).pvalue > RARE


def test_each_coin_has_its_own_probability() -> None:
    coins, count = module._Coins(os.urandom), 20_000
    numerators = np.array([0, 1, 4, 40] * count, object)
    found = coins.exp_minus_ratio(numerators, 4).reshape(-1, 4).sum(0)
    for number, numerator in zip(found, (0, 1, 4, 40), strict=True):
        assert stats.binomtest(int(number), count, math.exp(-numerator / 4)).pvalue > RARE


@pytest.mark.parametrize("whole", [1, 2, 3, 5, 8, 1000, 2**40 + 1, 2**112])
def test_the_scale_is_near_the_deviation(whole: int) -> None:
    ratio = Fraction(4 ** module._scale_bits(Fraction(whole)), whole)
    assert Fraction(49, 100) < ratio <= Fraction(2)
