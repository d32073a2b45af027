"""Sums of frozen features: what one record or patient can change, by brute force, and audits with controls.

Of the noise and its chances see ``test_class_sums_audit``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.audit import Bounds, gaussian_epsilon, lower_bounds

from tightframe.errors import ContributionError
from tightframe.privacy import accounting
from tightframe.privacy.events import PrivacyValueError
from tightframe.privacy.releases.frozen_sums import FrozenTotals, whole_features
from tightframe.privacy.releases.frozen_sums_plan import (
    GRID,
    MOST_RECORDS,
    PARTS,
    FrozenSumsConfig,
    Part,
    check_bound,
    checked_records,
)

CONFIG = FrozenSumsConfig(noise_multiplier=1.0, products=True)
TRIALS, DELTA = 20_000, 0.01
Parts = dict[str, torch.Tensor]


def summed(
    features: torch.Tensor,
    labels: torch.Tensor,
    patients: torch.Tensor | None = None,
    *,
    classes: int = 3,
    products: bool = True,
) -> Parts:
    totals = FrozenTotals(classes, features.shape[1], products=products)
    totals.add(whole_features(features), labels, patients)
    return totals.parts()


def moved(config: FrozenSumsConfig, one: Parts, other: Parts) -> Fraction:
    """The squared change in units of the promised noise at z = 1, in exact arithmetic."""
    assert set(one) == set(other) == set(config.parts)
    return sum(
        (
            Fraction(sum(int(item) ** 2 for item in (one[name] - other[name]).flatten().tolist()))
            / config.part(name).squared_sensitivity
            for name in one
        ),
        Fraction(0),
    )


EXTREME = [
    [1.0, 0, 0, 0],
    [0.5, 0.5, 0.5, 0.5],
    [-300.0, 400.0, 0, 0],
    [1e300, 1e300, 0, 0],
    [1e-300, 0, 0, 0],
    [math.inf, 0, 1, 1],
    [math.nan, 1, 1, 1],
    [0.70710678118, -0.70710678119, 0, 0],
]


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("weights", [(0.5, 0.15), (1.0, 1.0), (0.01, 30.0)])
def test_no_record_moves_the_sums_by_more_than_the_noise_is_for(
    products: bool, weights: tuple[float, float]
) -> None:
    config = FrozenSumsConfig(1.0, products, *weights)
    stream = np.random.default_rng(3)
    drawn = stream.normal(size=(60, 4)) * 10.0 ** stream.integers(-3, 4, size=(60, 1))
    found = []
    for record in [*EXTREME, *drawn.tolist()]:
        features = torch.tensor([*drawn[:5].tolist(), record], dtype=torch.float64)
        labels = torch.arange(6) % 3
        whole, less = (summed(features[:end], labels[:end], products=products) for end in (6, 5))
        found.append(moved(config, whole, less))
    assert max(found) <= 1
    assert max(found) > 0.99, "a record of length 1 uses all of it"
    # The bound is of a vector of this norm: the same parts with twice the weight of G would be over it.
    longer = FrozenSumsConfig(1.0, True, 2.0, 0.01).part("diagonal").squared_sensitivity
    assert Fraction(GRID**2, longer) < 1


@pytest.mark.parametrize("products", [True, False])
def test_no_patient_moves_them_more_and_added_records_would(products: bool) -> None:
    config = FrozenSumsConfig(1.0, products)
    stream = np.random.default_rng(4)
    found, unweighted = [], []
    for count in (1, 2, 3, 7, 50):
        for same in (True, False):
            own = stream.normal(size=(count, 4)) * 10
            own = np.tile(own[:1], (count, 1)) if same else own
            features = torch.from_numpy(np.concatenate([stream.normal(size=(6, 4)), own]))
            labels = torch.cat([torch.arange(6) % 3, torch.arange(count) % (1 if same else 3)])
            patients = torch.cat([torch.tensor([1, 1, 2, 3, 3, 3]), torch.full((count,), 9)])
            order = torch.from_numpy(stream.permutation(len(labels)))
            kept = order[patients[order] != 9]
            whole = summed(features[order], labels[order], patients[order], products=products)
            less = summed(features[kept], labels[kept], patients[kept], products=products)
            found.append(moved(config, whole, less))
            plain = (summed(features[of], labels[of], products=products) for of in (order, kept))
            unweighted.append(moved(config, *plain))
    assert 0.99 < max(found) <= 1
    assert max(unweighted) > 100


def test_the_integers_are_the_sums_of_products() -> None:
    """An independent formula in float64, within what cutting to 2^-12 changes."""
    stream = np.random.default_rng(5)
    features, labels = stream.normal(size=(40, 5)), stream.integers(3, size=40)
    phi = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1)
    made = summed(torch.from_numpy(features), torch.from_numpy(labels))
    gram, rows = phi.T @ phi, np.triu_indices(5, 1)
    told = {"diagonal": np.diag(gram), "products": gram[rows], "counts": np.bincount(labels, minlength=3)}
    told["sums"] = np.eye(3)[labels].T @ phi
    for name, item in made.items():
        np.testing.assert_allclose(item.numpy() / GRID, told[name], rtol=0, atol=40 * 2.0**-11)
    cut = np.trunc(phi * 4096)
    np.testing.assert_array_equal(made["products"].numpy(), (cut.T @ cut)[rows])
    patients = torch.from_numpy(np.repeat(np.arange(20), 2))
    halved = summed(torch.from_numpy(features), torch.from_numpy(labels), patients)
    assert int(halved["counts"].sum()) == 20 * GRID
    np.testing.assert_allclose(halved["diagonal"].numpy() / GRID, np.diag(gram) / 2, atol=40 * 2.0**-11)


def noise(parts: Parts, config: FrozenSumsConfig, honest: int, shares: int) -> Parts:
    runs = {name: item.new_zeros(TRIALS, *item.shape) for name, item in parts.items()}
    for _ in range(shares):
        for name, item in runs.items():
            runs[name] = item + torch.from_numpy(config.part(name).share(tuple(item.shape), honest))
    return runs


def audit(
    present: Parts, absent: Parts, config: FrozenSumsConfig = CONFIG, *, honest: int = 1, shares: int = 1
) -> Bounds:
    """The best test there is: along what the canary changes, each number over its variance.

    With and without the canary the sums get the same draws of noise, which know neither. Hits and false
    alarms are bounded each by itself, so that the bounds need runs that are independent among each.
    """
    drawn = noise(absent, config, honest, shares)

    def scores(parts: Parts) -> Any:
        total = torch.zeros(TRIALS, dtype=torch.float64)
        for name, item in drawn.items():
            direction = (present[name] - absent[name]).double() / config.part(name).share_variance(1)
            total += ((item + parts[name] - absent[name]).double() * direction).flatten(1).sum(1)
        return total.numpy()

    return lower_bounds(scores(absent), scores(present), delta=DELTA)


def canary() -> tuple[Parts, Parts]:
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(31, 2)))
    features[30] = torch.tensor([300.0, -400.0])
    labels = torch.zeros(31, dtype=torch.int64)
    return tuple(summed(features[:end], labels[:end], classes=1) for end in (31, 30))  # type: ignore[return-value]


def quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the noise that is promised, on every silo."""
    real = Part.share_variance
    monkeypatch.setattr(Part, "share_variance", lambda part, honest: real(part, honest) // 4)


@pytest.mark.whole
def test_a_canary_record_and_half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilon = gaussian_epsilon(1.0, DELTA)
    assert accounting.epsilons(CONFIG.events(1), DELTA, prv=False).exact == pytest.approx(epsilon)
    found = audit(*canary())
    assert 0.75 < found.mu <= 1.0
    assert found.epsilon <= epsilon
    quarter(monkeypatch)
    caught = audit(*canary())
    assert caught.mu > 1.5
    assert caught.epsilon > epsilon


@pytest.mark.whole
@pytest.mark.parametrize("name", ["products", "counts"])
def test_a_canary_and_half_the_noise_of_one_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's noise is needed: weights that give every part a share that an audit can see."""
    config = FrozenSumsConfig(1.0, True, product_weight=1.4, count_weight=1.0)
    half = config.part(name).squared_sensitivity
    real = Part.share_variance
    monkeypatch.setattr(
        Part,
        "share_variance",
        lambda part, honest: real(part, honest) // (64 if part.squared_sensitivity == half else 1),
    )
    assert audit(*canary(), config).mu > 1.2


@pytest.mark.whole
def test_a_canary_patient_and_one_whose_records_are_all_added() -> None:
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 2)))
    features[30:] = torch.tensor([3.0, -4.0])
    labels, patients = torch.arange(40) % 2, torch.cat([torch.arange(30), torch.full((10,), 77)])

    def sums(end: int, by_patient: bool) -> Parts:
        return summed(features[:end], labels[:end], patients[:end] if by_patient else None, classes=2)

    found = audit(sums(40, True), sums(30, True))
    # Over two classes: a mean of two kinds of vectors is shorter than either.
    assert 0.5 < found.mu <= 1.0
    assert found.epsilon <= gaussian_epsilon(1.0, DELTA)
    caught = audit(sums(40, False), sums(30, False))
    assert caught.mu > 3
    assert caught.epsilon > gaussian_epsilon(1.0, DELTA)


@pytest.mark.whole
def test_the_shares_of_the_least_silos_and_what_holds_alone() -> None:
    assert audit(*canary(), honest=3, shares=3).mu <= 1.0
    assert audit(*canary(), honest=3, shares=2).mu > 1.0
    lone = CONFIG.lone_event(4)
    assert lone is not None and lone.noise_multiplier == 0.5
    assert 1.5 < audit(*canary(), honest=4, shares=1).mu <= 2.0


@pytest.mark.whole
@pytest.mark.parametrize(
    ("silos", "lost", "honest"),
    # t - c by the secure sum's table, with c = 1; n - c where sums open whole only.
    [(4, 0, 2), (4, 1, 2), (6, 0, 4), (6, 1, 4), (10, 3, 6), (4, 0, 3), (6, 0, 5), (10, 0, 9)],
)
def test_the_total_has_the_promised_variance_with_all_silos_and_with_drop_outs(
    silos: int, lost: int, honest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against z^2 D^2 over the squared weights, by the formula of the specification."""
    config = FrozenSumsConfig(1.5, True, product_weight=0.7, count_weight=0.4)
    squared = 0.7**2 + 1 + 0.4**2
    weights = {"diagonal": 0.7, "products": 0.7 * math.sqrt(2), "sums": 1.0, "counts": 0.4}
    low, high = stats.chi2.ppf([1e-8, 1 - 1e-8], 4000)

    def carried(name: str) -> float:
        part = config.part(name)
        total = sum(part.as_numbers(part.share((4000,), honest)) for _ in range(silos - lost))
        return float((np.asarray(total) ** 2).sum()) * weights[name] ** 2 / (1.5**2 * squared)

    for name in PARTS:
        found = carried(name)
        assert low < found * honest / (silos - lost) < high
        assert found > low, "less than was promised"
    quarter(monkeypatch)
    assert all(carried(name) * honest / (silos - lost) < low for name in PARTS)


def test_values_that_make_no_sense_are_refused() -> None:
    for values in ({"product_weight": 0.0}, {"count_weight": math.inf}, {"neighbours": "ward"}):
        with pytest.raises(PrivacyValueError):
            FrozenSumsConfig(1.0, True, **values)  # type: ignore[arg-type]
    with pytest.raises(PrivacyValueError, match="sums, counts, but got 'diagonal'"):
        FrozenSumsConfig(1.0, products=False).part("released/diagonal")
    with pytest.raises(PrivacyValueError, match="from 0 to 2"):
        summed(torch.zeros(1, 2), torch.tensor([3]))
    assert checked_records(MOST_RECORDS, "record") == MOST_RECORDS
    with pytest.raises(PrivacyValueError, match="at most 1048576 patients"):
        checked_records(MOST_RECORDS + 1, "patient")


def test_a_term_stays_within_its_bound_and_a_total_exact() -> None:
    check_bound(CONFIG, 2.0**21, 250)
    with pytest.raises(ContributionError, match="of 4 silos to stay within"):
        check_bound(FrozenSumsConfig(1e5, True), 2.0**21, 4)
