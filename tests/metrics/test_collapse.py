"""Neural collapse against the definitions with explicit matrices, and against golden values."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity

from tightframe import metrics
from tightframe.geometry import simplex_etf

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "fedetf.npz")
COUNTS = [(7, 7, 7, 7), (1, 5, 20, 3), (4, 0, 9, 2), (0, 6, 0, 8)]


def _case(counts: tuple[int, ...], width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(counts) + width)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    centres = rng.normal(size=(len(counts), width)) + 1.0
    return centres[labels] + 0.3 * rng.normal(size=(len(labels), width)), labels


def _means(features: np.ndarray, labels: np.ndarray) -> dict[int, np.ndarray]:
    return {int(c): features[labels == c].mean(0) for c in np.unique(labels)}


@pytest.mark.parametrize("width", [2, 6, 30])
@pytest.mark.parametrize("counts", COUNTS)
def test_nc1_is_the_trace_with_explicit_matrices(counts: tuple[int, ...], width: int) -> None:
    features, labels = _case(counts, width)
    means = _means(features, labels)
    within = np.mean([np.cov(features[labels == c].T, bias=True) for c in means], axis=0)
    between = np.cov(np.stack(list(means.values())).T, bias=True)
    expected = np.trace(within @ np.linalg.pinv(between, rcond=1e-12, hermitian=True)) / len(means)
    assert metrics.nc1(features, labels) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("counts", COUNTS)
def test_nc2_and_nc3_are_their_formulas(counts: tuple[int, ...]) -> None:
    features, labels = _case(counts)
    means = _means(features, labels)
    centre = sum(means.values()) / len(means)
    lengths = [np.sqrt(((m - centre) ** 2).sum()) for m in means.values()]
    average = sum(lengths) / len(lengths)
    deviation = np.sqrt(sum((length - average) ** 2 for length in lengths) / len(lengths))
    gaps = [
        abs((means[a] - centre) @ (means[b] - centre) / lengths[i] / lengths[j] + 1 / (len(means) - 1))
        for (i, a), (j, b) in permutations(enumerate(means), 2)
    ]
    equinorm, equiangular = metrics.nc2(features, labels)
    assert equinorm == pytest.approx(deviation / average)
    assert equiangular == pytest.approx(np.mean(gaps), abs=1e-12)

    weights = np.random.default_rng(3).normal(size=(len(counts), 6))
    rows = np.stack([weights[c] for c in means])
    centred = np.stack([means[c] - centre for c in means])
    expected = np.sqrt(((rows / np.sqrt((rows**2).sum()) - centred / np.sqrt((centred**2).sum())) ** 2).sum())
    assert metrics.nc3(features, labels, weights) == pytest.approx(expected)


def test_all_measures_vanish_under_collapse_and_not_before() -> None:
    etf = np.asarray(simplex_etf(4, 9, seed=1)).T  # (C, d)
    labels = np.tile(np.arange(4), 5)
    collapsed = 3.0 * etf[labels] + 0.7
    found = metrics.collapse_measures(collapsed, labels, 4, 0.1 * etf)
    assert (found.classes, found.dropped) == ((0, 1, 2, 3), ())
    for value in (found.nc1, found.nc2_equinorm, found.nc2_equiangular, found.nc3):
        assert value == pytest.approx(0, abs=1e-7)
    noise = np.random.default_rng(0).normal(size=collapsed.shape)
    near = metrics.collapse_measures(collapsed + 0.1 * noise, labels, 4, 0.1 * etf)
    far = metrics.collapse_measures(collapsed + 1.0 * noise, labels, 4, 0.1 * etf)
    for name in ("nc1", "nc2_equinorm", "nc2_equiangular", "nc3"):
        assert 1e-4 < getattr(near, name) < getattr(far, name)
    assert metrics.nc3(collapsed, labels, -etf) == pytest.approx(2)


def test_measures_do_not_see_rotation_shift_scale_or_order() -> None:
    features, labels = _case((5, 2, 9, 0))
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
    weights = np.random.default_rng(2).normal(size=(4, 6))
    first = metrics.collapse_measures(features, labels, 4, weights)
    order = np.random.default_rng(3).permutation(len(labels))
    moved = (4.0 * features @ rotation + 2.5)[order]
    second = metrics.collapse_measures(moved, labels[order], 4, 0.2 * weights @ rotation)
    for name in ("nc1", "nc2_equinorm", "nc2_equiangular", "nc3"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-9)


def test_nc1_far_from_the_origin_does_not_invert_rounding() -> None:
    """Centred means have rank C - 1 whatever rounding leaves of the last direction."""
    features, labels = _case((5, 2, 9, 4))
    assert metrics.nc1(features + 1e6, labels) == pytest.approx(metrics.nc1(features, labels), rel=1e-6)


def test_classes_without_records_are_dropped_and_reported() -> None:
    features, labels = _case((4, 0, 9, 2, 0))
    weights = np.random.default_rng(2).normal(size=(5, 6))
    found = metrics.collapse_measures(features, labels, 5, weights)
    assert found.classes == (0, 2, 3) and found.dropped == (1, 4)
    packed = np.searchsorted([0, 2, 3], labels)
    expected = metrics.collapse_measures(features, packed, 3, weights[[0, 2, 3]])
    assert expected.dropped == ()
    for name in ("nc1", "nc2_equinorm", "nc2_equiangular", "nc3"):
        assert getattr(found, name) == getattr(expected, name)
    assert np.isnan(metrics.collapse_measures(features, labels, 5).nc3), "no weights, no NC3"


def test_what_does_not_exist_is_nan() -> None:
    rng = np.random.default_rng(0)
    one_class = rng.normal(size=(5, 3)), np.zeros(5, int)
    nothing = np.zeros((0, 3)), np.zeros(0, int)
    for features, labels in (one_class, nothing):
        found = metrics.collapse_measures(features, labels, 2, np.eye(2, 3))
        assert np.isnan([found.nc1, found.nc2_equinorm, found.nc2_equiangular, found.nc3]).all()
    assert found.classes == () and found.dropped == (0, 1)
    # Class means that are one point have no directions between them.
    same = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), np.array([0, 0, 1, 1])
    assert np.isnan([metrics.nc1(*same), *metrics.nc2(*same), metrics.nc3(*same, np.eye(2))]).all()
    assert np.isnan(metrics.nc3(*_case((3, 3)), np.zeros((2, 6))))
    assert np.isnan(metrics.cosine_to_class_mean(*nothing))
    assert np.isnan(metrics.mean_pairwise_cosine(np.ones((1, 4))))
    assert np.isnan(metrics.silo_mean_cosine(np.ones((2, 2, 3)), np.array([[True, False], [False, True]])))


def test_cosines_of_the_authors() -> None:
    found = metrics.cosine_to_class_mean(GOLDEN["nc_feats"], GOLDEN["nc_labels"])
    np.testing.assert_allclose(found, GOLDEN["nc1_cos_official"], rtol=1e-9)
    np.testing.assert_allclose(metrics.cosine_matrix(GOLDEN["cos_in"]), GOLDEN["cos_matrix"], rtol=1e-9)
    pairs = GOLDEN["cos_matrix"].sum() - np.trace(GOLDEN["cos_matrix"])
    count = len(GOLDEN["cos_in"])
    expected = pairs / (count * (count - 1))
    assert metrics.mean_pairwise_cosine(GOLDEN["cos_in"]) == pytest.approx(expected)


def test_cosine_to_class_mean_is_over_records_not_classes() -> None:
    features, labels = _case((1, 5, 20, 3))
    means = _means(features, labels)
    each = [cosine_similarity(features[i : i + 1], means[c][None])[0, 0] for i, c in enumerate(labels)]
    assert metrics.cosine_to_class_mean(features, labels) == pytest.approx(np.mean(each))
    assert metrics.cosine_to_class_mean(np.zeros((2, 3)), np.array([0, 1])) == 0


def test_silo_mean_cosine_leaves_out_classes_of_one_silo() -> None:
    means = np.random.default_rng(4).normal(size=(4, 3, 5))
    held = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]], bool)
    per_class = []
    for silos, c in (((0, 1, 2, 3), 0), ((0, 2), 1)):
        table = cosine_similarity(means[list(silos), c])
        per_class.append(table[np.triu_indices(len(silos), 1)].mean())
    assert metrics.silo_mean_cosine(means, held) == pytest.approx(np.mean(per_class))


def test_what_does_not_fit_is_refused() -> None:
    features, labels = _case((3, 3))
    with pytest.raises(ValueError, match="`features`"):
        metrics.nc1(features, labels[:-1])
    with pytest.raises(ValueError, match="`labels`"):
        metrics.nc2(features, labels.astype(float))
    with pytest.raises(ValueError, match="`labels`"):
        metrics.nc1(features, labels - 1)
    with pytest.raises(ValueError, match=r"`labels`.*\[0, 1\)"):
        metrics.collapse_measures(features, labels, 1)
    with pytest.raises(ValueError, match="`weights`"):
        metrics.collapse_measures(features, labels, 2, np.eye(2))
    for weights in (np.ones((2, 5)), np.ones((1, 6)), np.ones(6)):
        with pytest.raises(ValueError, match="`weights`"):
            metrics.nc3(features, labels, weights)
    with pytest.raises(ValueError, match="`held`"):
        metrics.silo_mean_cosine(np.ones((2, 3, 4)), np.ones((3, 2), bool))
