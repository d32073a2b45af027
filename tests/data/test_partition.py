"""Partitions: what the papers say of sizes and classes, disjointness, and frozen draws."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tightframe.data import partition
from tightframe.data.partition import class_disjoint, dirichlet, follow, iid, shards

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
SMALL = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))


def table(labels: NDArray[Any], parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Records by silo and class."""
    return np.stack([np.bincount(labels[part], minlength=int(labels.max()) + 1) for part in parts])


def assert_disjoint(parts: list[NDArray[np.int64]], total: int) -> NDArray[np.int64]:
    """No index twice, each array ascending int64; returns all indices, sorted."""
    together = np.sort(np.concatenate(parts))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert np.all(np.diff(together) > 0)
    assert together.size == 0 or (together[0] >= 0 and together[-1] < total)
    return together


@pytest.mark.parametrize(("silos", "sigma"), [(5, 2), (10, 2), (10, 3), (10, 5), (50, 3), (100, 3)])
def test_class_disjoint_has_sigma_classes_a_silo_and_even_shares(silos: int, sigma: int) -> None:
    parts = class_disjoint(SMALL, silos, sigma, seed=4)
    # rho * sigma >= C: every class has a holder, so nothing is left out and nothing is there twice.
    assert len(assert_disjoint(parts, len(SMALL))) == len(SMALL)
    held = table(SMALL, parts)
    assert (np.count_nonzero(held, axis=1) == sigma).all()
    holders = np.count_nonzero(held, axis=0)
    assert holders.sum() == silos * sigma
    assert (holders >= 1).all()
    for label in range(10):
        shares = np.sort(held[:, label][held[:, label] > 0])
        assert set(shares) <= {100 // holders[label], -(-100 // holders[label])}


def test_class_disjoint_deals_the_first_slots_in_order() -> None:
    held = table(SMALL, class_disjoint(SMALL, 5, 2, seed=9))
    expected = np.zeros((5, 10), dtype=np.int64)
    for silo in range(5):
        expected[silo, [2 * silo, 2 * silo + 1]] = 100
    np.testing.assert_array_equal(held, expected)
    first = table(SMALL, class_disjoint(SMALL, 10, 3, seed=9))
    # Slots 0..9 are the classes in order: silo 3 holds class 9 and two that were drawn.
    assert all(
        np.flatnonzero(first[silo]).tolist() == [3 * silo, 3 * silo + 1, 3 * silo + 2] for silo in range(3)
    )
    assert first[3, 9] > 0


def test_later_slots_are_drawn_uniformly() -> None:
    """The eleventh silo's only class over 1,500 seeds: each class within five standard deviations."""
    labels = np.repeat(np.arange(10), 2)
    drawn = [int(labels[class_disjoint(labels, 11, 1, seed=seed)[10][0]]) for seed in range(1500)]
    counts = np.bincount(drawn, minlength=10)
    assert np.abs(counts - 150).max() < 5 * np.sqrt(1500 * 0.1 * 0.9)


def test_fewer_slots_than_classes_leave_classes_out() -> None:
    parts = class_disjoint(SMALL, 3, 2, seed=0)
    assert np.unique(SMALL[assert_disjoint(parts, len(SMALL))]).tolist() == [0, 1, 2, 3, 4, 5]


def test_all_classes_are_iid_by_dirichlet() -> None:
    held = table(CIFAR10, class_disjoint(CIFAR10, 10, 10, seed=1))
    assert held.sum() == len(CIFAR10)
    # Dir(1e5): shares of 0.1 with a standard deviation of about 0.1 * 0.003, plus one of rounding.
    assert np.abs(held[:9] - 500).max() <= 10
    parts = dirichlet(CIFAR10, 10, 1e5, variant="fedmr", seed=1)
    np.testing.assert_array_equal(held, table(CIFAR10, parts))


def test_too_few_records_for_all_classes_are_told_without_options_of_others() -> None:
    labels = np.arange(25, dtype=np.int64) % 7
    with pytest.raises(ValueError, match=r"3 silos of all 7 classes.*got 25: lower `silos`") as caught:
        class_disjoint(labels, 3, 7, seed=0)
    assert "min_size" not in str(caught.value) and "alpha" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "slots", "each"), [(CIFAR10, 2, 250), (CIFAR10, 5, 100), (CIFAR100, 20, 25)]
)
def test_shards_have_the_printed_slot_sizes(labels: NDArray[Any], slots: int, each: int) -> None:
    parts = shards(labels, 100, slots, seed=3)
    assert len(assert_disjoint(parts, len(labels))) == len(labels)
    assert {len(part) for part in parts} == {slots * each}
    held = table(labels, parts)
    assert set(np.unique(held)) <= {0, each, 2 * each}  # twice at a border of two permutations
    assert np.count_nonzero(held, axis=1).max() == slots


def test_a_class_may_repeat_at_a_border_only() -> None:
    """Ten classes, three slots: silos 3, 6, 10, ... lie across a border, the others never repeat."""
    repeated = set()
    for seed in range(40):
        held = table(SMALL, shards(SMALL, 10, 3, seed=seed))
        repeated |= set(np.flatnonzero(np.count_nonzero(held, axis=1) < 3).tolist())
    assert repeated == {3, 6}


@pytest.mark.parametrize("variant", ["fednh", "fedmr"])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0])
def test_the_capped_dirichlet_uses_all_records_and_bounds_the_sizes(variant: Any, alpha: float) -> None:
    parts = dirichlet(SMALL, 8, alpha, variant=variant, seed=5)
    assert len(assert_disjoint(parts, len(SMALL))) == len(SMALL)
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 10
    # Below the cap of 125 a silo may still get one whole class of 100.
    assert max(sizes) < 125 + 100


def test_a_full_silo_gets_nothing_of_later_classes() -> None:
    for seed in range(30):
        held = table(SMALL, dirichlet(SMALL, 4, 0.2, seed=seed, min_size=1))
        before = np.cumsum(held, axis=1) - held
        assert (held[before >= 250] == 0).all()


def test_fedetf_rounds_a_dirichlet_draw_and_knows_no_cap() -> None:
    """Against the rule written out record by record."""
    labels = np.sort(SMALL)
    parts = dirichlet(labels, 6, 0.1, variant="fedetf", seed=2)
    assert len(assert_disjoint(parts, len(labels))) == len(labels)
    draws = partition._generator(2, "dirichlet")
    expected = np.zeros((6, 10), dtype=np.int64)
    for label in range(10):
        draws.permutation(100)
        shares, left = draws.dirichlet([0.1] * 6), 100
        for silo in range(5):
            expected[silo, label] = min(round(float(shares[silo]) * 100), left)
            left -= expected[silo, label]
        expected[5, label] = left
    np.testing.assert_array_equal(table(labels, parts), expected)
    most = max(
        max(len(part) for part in dirichlet(labels, 6, 0.1, variant="fedetf", seed=s)) for s in range(20)
    )
    assert most > 1000 / 6 + 100, "without a cap some silo must exceed what the cap allows"


@pytest.mark.parametrize("variant", ["fednh", "fedetf", "fedmr"])
def test_the_mean_share_is_that_of_a_symmetric_dirichlet(variant: Any) -> None:
    """The first class is not capped: its shares have mean 1/K and variance (K-1) / (K^2 (K alpha + 1))."""
    shares = np.array(
        [
            table(SMALL, dirichlet(SMALL, 4, 1.0, variant=variant, seed=seed, min_size=0))[:, 0] / 100
            for seed in range(400)
        ]
    )
    variance = 3 / (16 * 5)
    np.testing.assert_allclose(shares.mean(axis=0), 0.25, atol=4 * np.sqrt(variance / 400) + 0.005)
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.25)


def test_a_minimum_that_no_draw_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in 100 draws with alpha 0\.3 the smallest of 10 silos"):
        dirichlet(SMALL, 10, 0.3, seed=0, min_size=95)
    with pytest.raises(ValueError, match="at least 1010 records for 10 silos"):
        dirichlet(SMALL, 10, 1.0, seed=0, min_size=101)


def test_a_tiny_alpha_still_uses_every_record() -> None:
    parts = dirichlet(SMALL, 7, 1e-6, seed=0, min_size=0)
    assert len(assert_disjoint(parts, len(SMALL))) == len(SMALL)


def test_iid_shares_are_even_and_mixed() -> None:
    parts = iid(SMALL, 7, seed=0)
    assert len(assert_disjoint(parts, len(SMALL))) == len(SMALL)
    assert {len(part) for part in parts} == {142, 143}
    held = table(SMALL, parts)
    assert held.min() >= 2
    assert not np.array_equal(parts[0], np.arange(143))


def test_follow_gives_a_test_set_the_mix_of_the_training_records() -> None:
    train = [np.repeat([0, 1], [30, 10]), np.repeat([0, 2], [10, 5])]
    test = np.repeat(np.arange(4), [40, 20, 9, 8])
    parts = follow(train, test, seed=0)
    assert len(assert_disjoint(parts, len(test))) == len(test)
    # Class 3, on which nobody trains, is divided evenly.
    assert table(test, parts).tolist() == [[30, 20, 0, 4], [10, 0, 9, 4]]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=2, max_size=6).filter(any),
    silos=st.integers(1, 9),
    sigma=st.integers(1, 6),
    seed=st.integers(0, 2**31 - 1),
    alpha=st.floats(0.01, 100),
)
def test_every_partition_is_disjoint_and_deterministic(
    counts: list[int], silos: int, sigma: int, seed: int, alpha: float
) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    classes = len(counts)
    sigma = min(sigma, classes - 1)
    makers: list[Callable[[], list[NDArray[np.int64]]]] = [
        lambda: class_disjoint(labels, silos, sigma, seed=seed, num_classes=classes),
        lambda: shards(labels, silos, sigma, seed=seed, num_classes=classes),
        lambda: dirichlet(labels, silos, alpha, seed=seed, min_size=0, num_classes=classes),
        lambda: dirichlet(labels, silos, alpha, variant="fedetf", seed=seed, num_classes=classes),
        lambda: iid(labels, silos, seed=seed),
    ]
    for make in makers:
        parts, again = make(), make()
        assert len(parts) == silos
        assert_disjoint(parts, len(labels))
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    for part, most in ((makers[0](), sigma), (makers[1](), sigma)):
        assert (np.count_nonzero(table(labels, part), axis=1) <= most).all()
    for make in makers[2:]:
        assert len(np.concatenate(make())) == len(labels)


def test_seeds_differ_and_draws_are_frozen() -> None:
    """A change of NumPy's streams or of ours would silently change every published partition."""

    def fingerprint(parts: list[NDArray[np.int64]]) -> str:
        return hashlib.sha256(b"|".join(part.tobytes() for part in parts)).hexdigest()[:12]

    made = {
        "class_disjoint": [class_disjoint(SMALL, 10, 3, seed=s) for s in (0, 1)],
        "dirichlet": [dirichlet(SMALL, 10, 0.3, seed=s) for s in (0, 1)],
        "shards": [shards(SMALL, 10, 2, seed=s) for s in (0, 1)],
        "iid": [iid(SMALL, 10, seed=s) for s in (0, 1)],
    }
    assert all(fingerprint(a) != fingerprint(b) for a, b in made.values())
    assert {name: fingerprint(parts[0]) for name, parts in made.items()} == FROZEN


FROZEN = {
    "class_disjoint": "e31566863af4",
    "dirichlet": "75c5ae0c4b53",
    "shards": "c4d0051b60de",
    "iid": "91272444eb9d",
}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: class_disjoint(SMALL, 5, 11, seed=0), r"`classes_per_silo` to be 1\.\.10, but got 11"),
        (lambda: shards(SMALL, 5, 0, seed=0), r"`classes_per_silo` to be 1\.\.10, but got 0"),
        (lambda: iid(SMALL, 0, seed=0), "`silos` to be at least 1"),
        (lambda: dirichlet(SMALL, 5, 0.0, seed=0), "`alpha` to be positive"),
        (lambda: dirichlet(SMALL, 5, 1.0, seed=0, variant="dai"), "but got 'dai'"),  # type: ignore[arg-type]
        (lambda: iid(np.zeros(0, np.int64), 2, seed=0), r"n of at least 1, but got \(0,\)"),
        (lambda: shards(SMALL, 5, 2, seed=0, num_classes=9), r"in \[0, 9\), but got values from 0 to 9"),
    ],
)
def test_wrong_parameters_are_named(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
