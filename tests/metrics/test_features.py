"""Eigenvalues of the features' correlation: numpy's own matrix, and golden values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tightframe import metrics

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "fedmr.npz")


@pytest.mark.parametrize(("n", "width", "k"), [(40, 7, 50), (40, 7, 3), (10, 60, 50), (128, 512, 50)])
def test_eigenvalues_equal_those_of_corrcoef(n: int, width: int, k: int) -> None:
    rng = np.random.default_rng(n + width)
    features = rng.normal(size=(n, width)) @ rng.normal(size=(width, width)) * 3.0 + 5.0
    expected = np.sort(np.linalg.eigvals(np.corrcoef(features.T)).real)[::-1][:k]
    found = metrics.correlation_eigenvalues(features, k)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)
    assert metrics.eigenvalue_spread(features, k, divisor=None) == pytest.approx(np.var(expected))
    assert metrics.eigenvalue_spread(features, k) == pytest.approx(
        ((expected - expected.mean()) ** 2).sum() / 128
    )


@pytest.mark.parametrize("case", range(int(GOLDEN["n_cases"])))
def test_table_7_of_fedmr(case: int) -> None:
    features = GOLDEN[f"c{case}_z"]
    expected = GOLDEN[f"c{case}_top50_eigs"]
    np.testing.assert_allclose(metrics.correlation_eigenvalues(features), expected, rtol=1e-9, atol=1e-12)
    for divisor, name in ((128, "div128"), (None, "divk")):
        found = metrics.eigenvalue_spread(features, divisor=divisor)
        np.testing.assert_allclose(found, GOLDEN[f"c{case}_top50_var_{name}"], rtol=1e-9)


def test_constant_features_have_no_correlation() -> None:
    features = np.random.default_rng(0).normal(size=(20, 3))
    padded = np.concatenate([features, np.full((20, 2), 4.0)], axis=1)
    expected = [*metrics.correlation_eigenvalues(features), 0.0, 0.0]
    np.testing.assert_allclose(metrics.correlation_eigenvalues(padded), expected, atol=1e-12)
    assert metrics.eigenvalue_spread(np.full((4, 3), 2.0)) == 0


@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (4,)])
def test_two_records_are_needed(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="n >= 2"):
        metrics.correlation_eigenvalues(np.zeros(shape))
