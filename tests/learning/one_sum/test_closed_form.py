"""Closed forms from sums against scikit-learn on the records themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid

from tightframe.learning.one_sum.closed_form import (
    ABSENT,
    INTERCEPT,
    centred,
    class_means,
    discriminant,
    generalised_cross_validation,
    ridge,
    target_weights,
    with_intercept,
)

CLASSES, WIDTH = 4, 6


def records(seed: int = 2, size: int = 240) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.choice(CLASSES, size, p=[0.5, 0.3, 0.15, 0.05])
    mixing = rng.normal(size=(WIDTH, WIDTH))
    features = 0.2 * rng.normal(size=(size, WIDTH)) @ mixing + rng.normal(size=(CLASSES, WIDTH))[labels]
    return features, labels


def sums_of(features: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = np.eye(CLASSES)[labels]
    made = (features.T @ features, targets.T @ features, targets.sum(0))
    return tuple(torch.from_numpy(item) for item in made)  # type: ignore[return-value]


@pytest.mark.parametrize("lam", [1e-3, 0.7, 50.0])
def test_ridge_is_scikit_learns(lam: float) -> None:
    features, labels = records()
    gram, sums = with_intercept(*sums_of(features, labels))
    wide = np.c_[features, np.full(len(features), INTERCEPT)]
    oracle = Ridge(alpha=lam, fit_intercept=False).fit(wide, np.eye(CLASSES)[labels])
    np.testing.assert_allclose(ridge(gram, sums, lam), oracle.coef_, rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match="positive"):
        ridge(gram, sums, 0.0)


def test_balanced_targets_are_those_of_weighted_labels() -> None:
    features, labels = records()
    gram, sums, counts = sums_of(features, labels)
    weights = target_weights(counts, "balanced").numpy()
    np.testing.assert_allclose(weights * counts.numpy(), len(labels) / CLASSES)
    oracle = Ridge(alpha=0.3, fit_intercept=False).fit(features, np.eye(CLASSES)[labels] * weights)
    found = ridge(gram, torch.from_numpy(weights)[:, None] * sums, 0.3)
    np.testing.assert_allclose(found, oracle.coef_, rtol=1e-8, atol=1e-10)
    empty = torch.tensor([4.0, 0.0, 12.0], dtype=torch.float64)
    assert target_weights(empty, "balanced").tolist() == [2.0, 0.0, pytest.approx(2 / 3)]
    assert target_weights(empty, "observed").tolist() == [1.0, 1.0, 1.0]


def gcv_of_the_hat_matrix(features: np.ndarray, targets: np.ndarray, lam: float) -> float:
    """Golub, Heath and Wahba's criterion from the residuals of the records."""
    hat = features @ np.linalg.solve(features.T @ features + lam * np.eye(features.shape[1]), features.T)
    residual = np.square(targets - hat @ targets).sum() / len(features)
    return float(residual / (1 - np.trace(hat) / len(features)) ** 2)


@pytest.mark.parametrize("size", [40, 240])
def test_cross_validation_from_sums_finds_the_grids_best_by_the_hat_matrix(size: int) -> None:
    features, labels = records(5, size)
    rng = np.random.default_rng(8)
    features = np.c_[features, 0.3 * rng.normal(size=(size, 24))]  # what there is to overfit by
    targets = np.eye(CLASSES)[labels]
    gram, sums, _ = sums_of(features, labels)
    found = generalised_cross_validation(gram, sums, size, size)
    scale = np.trace(features.T @ features) / features.shape[1]
    grid = [scale * 10 ** (step / 4) for step in range(-24, 13)]
    errors = [gcv_of_the_hat_matrix(features, targets, lam) for lam in grid]
    assert found == pytest.approx(grid[int(np.argmin(errors))], rel=1e-9)
    assert grid[0] < found < grid[-1], "not at an end of the grid"


def test_cross_validation_does_not_choose_where_nothing_is_left_to_judge_by() -> None:
    """More features than records: with a small penalty all records are fitted."""
    features, labels = records(4, 12)
    features = np.c_[features, np.random.default_rng(1).normal(size=(12, 30))]
    gram, sums, _ = sums_of(features, labels)
    found = generalised_cross_validation(gram, sums, 12, 12)
    scale = float(gram.trace()) / len(gram)
    assert math.isfinite(found) and found > 1e-3 * scale


def scores(features: np.ndarray, weight: torch.Tensor, bias: torch.Tensor) -> np.ndarray:
    """Scores with mean zero, because what all share says nothing."""
    made = features @ weight.numpy().T + bias.numpy()
    return np.asarray(made - made.mean(1, keepdims=True))


def test_discriminant_is_scikit_learns() -> None:
    """scikit-learn divides the scatter by N, the formula by N - C."""
    features, labels = records()
    gram, sums, counts = sums_of(features, labels)
    factor = len(labels) / (len(labels) - CLASSES)
    for priors, given in (("observed", None), ("balanced", [1 / CLASSES] * CLASSES)):
        oracle = LinearDiscriminantAnalysis(solver="svd", priors=given, tol=1e-12).fit(features, labels)
        weight, bias = discriminant(gram, sums, counts, 0.0, priors)  # type: ignore[arg-type]
        prior = torch.from_numpy(np.log(oracle.priors_))
        found = scores(features, factor * weight, factor * (bias - prior) + prior)
        told = oracle.decision_function(features)
        np.testing.assert_allclose(found, told - told.mean(1, keepdims=True), rtol=0, atol=1e-6)
    for shrinkage in (0.1, 1.0):
        shrunk = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(features, labels)
        weight, _ = discriminant(gram, sums, counts, shrinkage, "observed")
        np.testing.assert_allclose(weight * factor, shrunk.coef_, rtol=1e-8, atol=1e-9)


def test_a_covariance_without_inverse_has_a_discriminant() -> None:
    features, labels = records()
    features = np.c_[features, np.zeros(len(features)), features[:, 0]]
    weight, bias = discriminant(*sums_of(features, labels), 0.0, "observed")
    assert weight.isfinite().all() and bias.isfinite().all()
    # Nought but for how a processor's eigenvectors of nothing mix, which is its own affair.
    assert weight[:, -2].abs().max() < 1e-6 * weight.abs().max()
    right = (scores(features, weight, bias).argmax(1) == labels).mean()
    plain = LinearDiscriminantAnalysis().fit(features[:, :-2], labels)
    assert right >= plain.score(features[:, :-2], labels) - 0.01


def test_class_means_are_scikit_learns_nearest_centroid() -> None:
    features, labels = records()
    _, sums, counts = sums_of(features, labels)
    weight, bias = class_means(sums, counts)
    oracle = NearestCentroid().fit(features, labels)
    np.testing.assert_allclose(weight, oracle.centroids_, rtol=1e-12)
    others, _ = records(9)
    assert np.array_equal(scores(others, weight, bias).argmax(1), oracle.predict(others))


def test_a_class_without_records_never_wins_and_changes_nothing() -> None:
    features, labels = records()
    labels = np.where(labels == 3, 0, labels)
    gram, sums, counts = sums_of(features, labels)
    for weight, bias in (
        (ridge(gram, sums, 0.1), torch.zeros(CLASSES, dtype=torch.float64)),
        discriminant(gram, sums, counts, 0.01, "balanced"),
        class_means(sums, counts),
    ):
        after, shift = centred(weight, bias, counts >= 0.5)
        made = features @ after.numpy().T + shift.numpy()
        before = features @ weight.numpy().T + bias.numpy()
        assert np.array_equal(made.argmax(1), before[:, :3].argmax(1)) and (made[:, 3] == ABSENT).all()
        np.testing.assert_allclose(made[:, :3].mean(1), 0, atol=1e-8)
        np.testing.assert_allclose(made[:, 0] - made[:, 1], before[:, 0] - before[:, 1], atol=1e-8)
        mild = features @ after.numpy().T + centred(weight, bias, counts >= 0.5, 0.0)[1].numpy()
        assert np.array_equal(mild.argmax(1), made.argmax(1))
