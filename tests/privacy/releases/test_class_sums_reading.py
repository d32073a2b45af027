"""Reading releases: exact without noise, floors and averages with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tightframe.learning.class_sums import ratio_of_sums
from tightframe.privacy.events import PrivacyValueError
from tightframe.privacy.releases.class_sums import (
    ClassReading,
    ReleaseAverage,
    class_sums,
    clip_features,
    noise_for,
)
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig

CONFIG = ClassSumsConfig(noise_multiplier=2.0)
CLASSES, WIDTH = 4, 8


def _silo(
    counts: tuple[int, ...] = (300, 190, 25, 0), width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor]:
    stream = np.random.default_rng(7)
    labels = np.repeat(np.arange(len(counts)), counts)
    centres = stream.normal(size=(len(counts), width))
    centres *= 0.9 / np.linalg.norm(centres, axis=1, keepdims=True)
    features = centres[labels] + 0.05 * stream.normal(size=(labels.size, width)) / math.sqrt(width)
    return torch.from_numpy(features), torch.from_numpy(labels)


def _means(features: torch.Tensor, labels: torch.Tensor, classes: int = CLASSES) -> torch.Tensor:
    clipped = clip_features(features, 1.0)
    return torch.stack([clipped[labels == c].mean(0).nan_to_num() for c in range(classes)])


def _read(total: torch.Tensor, config: ClassSumsConfig, *, silos: int = 1, honest: int = 1) -> ClassReading:
    """One release by itself."""
    return ReleaseAverage.empty(*total.shape).add(total, silos=silos, honest=honest).read(config)


def test_without_noise_the_means_and_counts_are_read() -> None:
    features, labels = _silo()
    reading = _read(class_sums(features, labels, CLASSES, CONFIG), CONFIG)
    np.testing.assert_allclose(reading.means[:3], _means(features, labels)[:3], atol=2**-18)
    assert reading.counts.tolist() == pytest.approx([300, 190, 25, 1], rel=1e-5)
    assert reading.usable.tolist() == [True, True, True, False]
    assert not reading.means[3].any()
    assert reading.means.dtype == reading.counts.dtype == torch.float64


def test_classes_under_the_floor_are_not_usable() -> None:
    features, labels = _silo()
    config = ClassSumsConfig(noise_multiplier=2.0, count_floor=26.0)
    reading = _read(class_sums(features, labels, CLASSES, config), config)
    assert reading.usable.tolist() == [True, True, False, False]
    assert not reading.means[2:].any()
    # As methods read class sums: a class without records keeps what it has.
    records = torch.where(reading.usable, reading.counts, 0.0)
    previous = torch.full((CLASSES, WIDTH), 5.0)
    merged, seen = ratio_of_sums(previous, reading.means * records[:, None], records)
    assert seen.tolist() == [True, True, False, False]
    assert merged.dtype == torch.float32
    assert (merged[2:] == 5).all()
    np.testing.assert_allclose(merged[:2], _means(features, labels)[:2], atol=1e-5)


def test_the_floor_rises_with_the_noise_of_the_counts() -> None:
    features, labels = _silo()
    total = class_sums(features, labels, CLASSES, CONFIG)
    # Three deviations of z D / lambda_int: 3 * 2 * 3.48 = 20.9 records alone, and of six silos where four
    # carry the promise, sqrt(6/4) of it: 25.6.
    deviation = 2 * math.sqrt(CONFIG.squared_sensitivity) / CONFIG.count_units
    assert 3 * deviation == pytest.approx(20.88, abs=0.01)
    assert _read(total, CONFIG).usable.tolist() == [True, True, True, False]
    assert _read(total, CONFIG, silos=6, honest=4).usable.tolist() == [True, True, False, False]


def test_a_class_of_nobody_hardly_ever_gets_a_mean() -> None:
    config = ClassSumsConfig(noise_multiplier=6.0)
    nobody = noise_for((4000, 3), config, 1)
    usable = int(_read(nobody, config).usable.sum())
    assert usable <= 4000 * 0.00135 + 6 * math.sqrt(4000 * 0.00135)
    # The control: by the bare floor of 20 records, one in six.
    bare = (nobody[:, -1] / config.count_units >= 20).double().mean()
    assert bare > 0.12


def test_shortening_long_means_brings_them_closer() -> None:
    # The noise of a mean has the norm 2.1 sqrt(d) / count: two and more, for any count that is likely.
    features, labels = _silo((60, 60, 60, 60), 4096)
    true = _means(features, labels)
    total = class_sums(features, labels, CLASSES, CONFIG) + noise_for((CLASSES, 4097), CONFIG, 1)
    reading = _read(total, CONFIG)
    raw = total[:, :-1] / CONFIG.grid / reading.counts[:, None]
    assert (raw.norm(dim=1) > 1)[reading.usable].all(), "not the case that this is about"
    assert reading.usable.any()
    assert (reading.means.norm(dim=1) <= 1 + 1e-12).all()
    assert ((reading.means - true).norm(dim=1) < (raw - true).norm(dim=1))[reading.usable].all()


def test_the_average_of_releases_has_the_noise_of_one_that_spent_it_all() -> None:
    features, labels = _silo((2000, 2000), 64)
    true, config = _means(features, labels, 2), ClassSumsConfig(noise_multiplier=20.0)
    exact, average = class_sums(features, labels, 2, config), ReleaseAverage.empty(2, 65)
    single = []
    for _ in range(16):
        release = exact + noise_for((2, 65), config, 1)
        average = average.add(release)
        single.append(_read(release, config))
    errors = torch.stack([(reading.means - true).norm(dim=1) for reading in single]).mean(0)
    averaged = (average.read(config).means - true).norm(dim=1)
    np.testing.assert_allclose(errors / averaged, 4, rtol=0.4)
    # So the floor sinks as well: three deviations are now 52 records, not 209.
    small = torch.zeros(1, 65, dtype=torch.int64)
    small[0, -1] = 100 * config.count_units
    many = ReleaseAverage.empty(1, 65)
    for _ in range(16):
        many = many.add(small)
    assert not _read(small, config).usable.any()
    assert many.read(config).usable.all()


def test_the_state_of_an_average_is_tensors() -> None:
    features, labels = _silo()
    total = class_sums(features, labels, CLASSES, CONFIG)
    average = ReleaseAverage.empty(*total.shape).add(total, silos=6, honest=4)
    stored = {name: tensor.clone() for name, tensor in average.state().items()}
    assert all(isinstance(tensor, torch.Tensor) for tensor in stored.values())
    again = ReleaseAverage.of(stored).add(total * 3, silos=5, honest=4)
    straight = average.add(total * 3, silos=5, honest=4)
    for name, tensor in straight.state().items():
        assert torch.equal(tensor, again.state()[name])
    assert torch.equal(straight.total / straight.weight, total.double() * 2)
    assert float(straight.noise) == 6 / 4 + 5 / 4


def test_older_releases_count_less_by_decay() -> None:
    first, second = torch.full((1, 2), 100), torch.full((1, 2), 400)
    average = ReleaseAverage.empty(1, 2).add(first).add(second, decay=0.5)
    assert (average.total / average.weight).tolist() == [[300.0, 300.0]]
    assert float(average.noise) == 1.25
    latest = ReleaseAverage.empty(1, 2).add(first).add(second, decay=0.0).state()
    for name, tensor in ReleaseAverage.empty(1, 2).add(second).state().items():
        assert torch.equal(latest[name], tensor)


def test_what_is_no_release_is_refused() -> None:
    average = ReleaseAverage.empty(2, 3)
    with pytest.raises(PrivacyValueError, match="none yet"):
        average.read(CONFIG)
    for wrong in (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 3)):
        with pytest.raises(PrivacyValueError, match="Expected a release of shape"):
            average.add(wrong)
    for options in ({"decay": 1.5}, {"decay": math.nan}, {"silos": 0}, {"honest": 0}):
        with pytest.raises(PrivacyValueError, match="TF-700"):
            average.add(torch.zeros(2, 3, dtype=torch.int64), **options)  # type: ignore[arg-type]
