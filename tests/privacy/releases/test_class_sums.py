"""Per-class sums: against a plain loop, and what one record or one patient can change in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightframe.privacy.events import PrivacyValueError
from tightframe.privacy.releases import class_sums as module
from tightframe.privacy.releases.class_sums import (
    SensitivityError,
    class_sums,
    clip_features,
    noise_for,
    on_grid,
)
from tightframe.privacy.releases.class_sums_plan import (
    ClassSumsConfig,
    largest_term,
    term_bound,
    wrap_bound,
)
from tightframe.securesum import encoding

CONFIG = ClassSumsConfig(noise_multiplier=2.0)
PATIENTS = ClassSumsConfig(noise_multiplier=2.0, neighbours="patient")
CLASSES, WIDTH = 3, 4
# Zero, tiny, at the bound, far over it, and what no feature should be.
NASTY = st.sampled_from(
    [0.0, 1e-9, 0.3, -0.5, 0.7071067811865476, 1.0, -1.0, 7.0, 1e20, -1e300, math.nan, math.inf]
)


@st.composite
def records(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features (B, d) float64, labels (B,), patients (B,); B from 1 to 8."""
    size = draw(st.integers(1, 8))
    rows = st.lists(NASTY | st.floats(-2, 2), min_size=WIDTH, max_size=WIDTH)
    features = draw(st.lists(rows, min_size=size, max_size=size))
    labels = draw(st.lists(st.integers(0, CLASSES - 1), min_size=size, max_size=size))
    people = draw(st.lists(st.sampled_from([-5, 0, 7, 2**40]), min_size=size, max_size=size))
    return torch.tensor(features, dtype=torch.float64), torch.tensor(labels), torch.tensor(people)


def _squared(difference: torch.Tensor) -> int:
    return sum(int(value) ** 2 for value in difference.reshape(-1))


def _some(records: int = 60, width: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    stream = np.random.default_rng(seed)
    features = torch.from_numpy(stream.normal(size=(records, width)).astype(np.float32) / 4)
    return features, torch.from_numpy(stream.integers(0, CLASSES, records))


@given(records(), st.floats(1e-3, 50))
def test_clipped_norms(drawn: Any, bound: float) -> None:
    features = drawn[0]
    clipped = clip_features(features, bound).numpy()
    assert np.isfinite(clipped).all()
    # In Python's own exact sums.
    assert all(math.sqrt(math.fsum(x * x for x in row)) <= bound for row in clipped.tolist())


def test_clipping_scales_and_leaves_short_ones() -> None:
    features = torch.tensor([[0.3, 0.4], [30.0, 40.0], [0.0, 0.0]], requires_grad=True)
    clipped = clip_features(features, 2.0)
    assert not clipped.requires_grad
    assert torch.equal(clipped[0], features[0].to(torch.float64))
    assert clipped[1].tolist() == pytest.approx([1.2, 1.6], rel=1e-9)
    assert clipped[2].tolist() == [0.0, 0.0]


@given(records(), st.integers(0, 24), st.sampled_from([0.5, 1.0, 3.7, 1 / 3]))
def test_integer_norms(drawn: Any, bits: int, bound: float) -> None:
    limit = math.floor(bound * 2**bits)
    units = on_grid(clip_features(drawn[0], limit / 2**bits), bits, bound)
    assert units.dtype == torch.int64
    assert all(_squared(row) <= limit**2 for row in units)


@pytest.mark.parametrize("width", [3, 512, 1280])
def test_integer_norms_of_real_widths_are_within_the_bound_and_next_to_it(width: int) -> None:
    features = (
        torch.from_numpy(np.random.default_rng(width).normal(size=(200, width)).astype(np.float32)) * 99
    )
    units = on_grid(clip_features(features, 1.0), 20, 1.0)
    found = [math.sqrt(_squared(row)) / 2**20 for row in units]
    assert max(found) <= 1
    assert min(found) > 1 - 1e-4  # towards zero takes half a step off each of 1,280


def test_the_grid_is_towards_zero() -> None:
    assert on_grid(torch.tensor([[0.49, -0.49, 0.3]]), 1, 1.0).tolist() == [[0, 0, 0]]
    assert on_grid(torch.tensor([[0.8, -0.55]]), 1, 1.0).tolist() == [[1, -1]]


@pytest.mark.parametrize("value", [1.0 + 2**-19, 1e30, math.nan, math.inf, -math.inf])
def test_unclipped_features_are_refused(value: float) -> None:
    with pytest.raises(SensitivityError, match=r"^TF-721: .*Nothing was released") as caught:
        on_grid(torch.tensor([[value, 0.0]], dtype=torch.float64), 20, 1.0)
    assert caught.value.code == "TF-721"
    assert str(value) not in str(caught.value)


def test_features_whose_coordinates_but_not_norm_are_within_the_bound_are_refused() -> None:
    with pytest.raises(SensitivityError):
        on_grid(torch.full((1, 2), 0.8), 20, 1.0)


def test_a_grid_too_fine_to_be_checked_is_refused() -> None:
    config = ClassSumsConfig(noise_multiplier=1.0, feature_clip=100.0, fractional_bits=24)
    with pytest.raises(PrivacyValueError, match="fewer `fractional_bits`"):
        class_sums(torch.zeros(1, 512), torch.zeros(1, dtype=torch.int64), 2, config)


@given(records())
def test_equals_a_plain_loop(drawn: Any) -> None:
    features, labels, _ = drawn
    expected = np.zeros((CLASSES, WIDTH + 1), np.int64)
    for row, label in zip(clip_features(features, 1.0).tolist(), labels.tolist(), strict=True):
        for place, value in enumerate(row):
            expected[label, place] += int(value * 2**20)  # int() is towards zero
        expected[label, WIDTH] += 314573
    assert class_sums(features, labels, CLASSES, CONFIG).tolist() == expected.tolist()


def test_neither_order_nor_batches_change_a_sum() -> None:
    features, labels = _some()
    whole = class_sums(features, labels, CLASSES, CONFIG)
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(labels)))
    assert torch.equal(whole, class_sums(features[order], labels[order], CLASSES, CONFIG))
    parts = [class_sums(features[i::7], labels[i::7], CLASSES, CONFIG) for i in range(7)]
    assert torch.equal(whole, torch.stack(parts).sum(0))
    nobody = class_sums(features[:0], labels[:0], CLASSES, CONFIG)
    assert nobody.shape == (CLASSES, 17)
    assert not nobody.any()


@given(records())
def test_any_one_record_changes_at_most_the_sensitivity(drawn: Any) -> None:
    features, labels, _ = drawn
    whole = class_sums(features, labels, CLASSES, CONFIG)
    for gone in range(len(labels)):
        keep = torch.arange(len(labels)) != gone
        without = class_sums(features[keep], labels[keep], CLASSES, CONFIG)
        assert _squared(whole - without) <= CONFIG.squared_sensitivity
        # One class at most, and its count exactly.
        assert (whole - without)[:, -1].tolist() == [
            CONFIG.count_units * (c == int(labels[gone])) for c in range(CLASSES)
        ]


@given(records())
def test_any_one_patient_changes_at_most_the_sensitivity(drawn: Any) -> None:
    features, labels, people = drawn
    whole = class_sums(features, labels, CLASSES, PATIENTS, patients=people)
    for gone in people.unique():
        keep = people != gone
        without = class_sums(features[keep], labels[keep], CLASSES, PATIENTS, patients=people[keep])
        assert _squared(whole - without) <= PATIENTS.squared_sensitivity


@pytest.mark.parametrize("width", [4, 512, 1280])
def test_the_sensitivity_is_reached_so_no_noise_is_wasted(width: int) -> None:
    features, labels = _some(40, width)
    people = torch.arange(40) // 20
    features = features * 100
    squared = CONFIG.squared_sensitivity
    one = class_sums(features[:1], labels[:1], CLASSES, CONFIG)
    assert 0.999 * squared < _squared(one) <= squared
    patient = class_sums(features[:20], labels[:20], CLASSES, PATIENTS, patients=people[:20])
    assert 0.999 * squared < _squared(patient) <= squared
    # The control: by records alone, this patient is far over it.
    assert _squared(class_sums(features[:20], labels[:20], CLASSES, CONFIG)) > 5 * squared


def test_patients_of_one_record_each_are_records() -> None:
    features, labels = _some()
    by_patient = class_sums(features * 9, labels, CLASSES, PATIENTS, patients=torch.arange(len(labels)) * 17)
    assert torch.equal(by_patient, class_sums(features * 9, labels, CLASSES, CONFIG))


def test_a_clipped_patient_keeps_the_means_of_its_classes() -> None:
    features, labels = _some()
    records = class_sums(features, labels, CLASSES, CONFIG).double()
    patient = class_sums(features, labels, CLASSES, PATIENTS, patients=torch.zeros_like(labels)).double()
    assert patient[:, -1].max() < records[:, -1].max() / 5
    np.testing.assert_allclose(patient / patient[:, -1:], records / records[:, -1:], atol=1e-4)


def test_many_records_of_a_patient_do_not_wrap_around() -> None:
    # 2**13 records of norm 2**20 each in one place: their squared sum is far over 2**63.
    features, labels = torch.ones(2**13, 1), torch.zeros(2**13, dtype=torch.int64)
    found = class_sums(features, labels, 2, PATIENTS, patients=labels)
    assert 0.999 < _squared(found) / PATIENTS.squared_sensitivity <= 1


def test_patients_are_given_where_they_are_hidden_and_only_there() -> None:
    features, labels = _some()
    with pytest.raises(PrivacyValueError, match="Expected patients for"):
        class_sums(features, labels, CLASSES, PATIENTS)
    with pytest.raises(PrivacyValueError, match="only for"):
        class_sums(features, labels, CLASSES, CONFIG, patients=labels)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [0], [[0], [1]]])
def test_labels_out_of_range_or_missing_are_refused(labels: list[Any]) -> None:
    with pytest.raises(PrivacyValueError, match="a label from 0 to 2 for each record"):
        class_sums(torch.zeros(2, 4), torch.tensor(labels), CLASSES, CONFIG)


def test_without_the_clip_of_patients_nothing_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last check stands by itself: here the scaling before it is broken.
    monkeypatch.setattr(module, "_MARGIN", 1.01)
    features, labels = _some()
    with pytest.raises(SensitivityError, match="TF-721"):
        class_sums(features, labels, CLASSES, PATIENTS, patients=torch.zeros_like(labels))
    with pytest.raises(SensitivityError, match="TF-721"):
        class_sums(features * 100, labels, CLASSES, CONFIG)


def test_noise_is_drawn_anew_for_every_integer() -> None:
    first, second = noise_for((8, 513), CONFIG, 4), noise_for((8, 513), CONFIG, 4)
    assert first.shape == (8, 513)
    assert first.dtype == torch.int64
    assert len(torch.cat([first, second]).unique()) > 0.99 * 2 * first.numel()
    deviation = float(first.double().std())
    assert deviation == pytest.approx(math.sqrt(CONFIG.share_variance(4)), rel=0.1)


@pytest.mark.parametrize("bits", [8, 20, 24])
def test_integers_come_through_the_ring_unchanged(bits: int) -> None:
    config = ClassSumsConfig(noise_multiplier=5.0, fractional_bits=bits)
    features, labels = _some(200, 32)
    terms = [
        class_sums(features[i::6], labels[i::6], CLASSES, config) + noise_for((CLASSES, 33), config, 4)
        for i in range(6)
    ]
    wrap_bound(config, 200, 6, 4)
    total = np.zeros(CLASSES * 33, np.uint64)
    for term in terms:
        values = config.as_numbers(term.numpy()).reshape(-1)
        bound = term_bound(config, 200, 4)
        encoding.add_into(total, encoding.encode(values, ring=64, bits=24, bound=bound, name="sums"))
    opened = encoding.decode(total, ring=64, bits=24).reshape(CLASSES, 33)
    assert (config.as_units(opened) == torch.stack(terms).sum(0).numpy()).all()


def test_no_sum_is_over_its_largest_term() -> None:
    features, labels = torch.full((50, 1), 1e9), torch.zeros(50, dtype=torch.int64)
    for config, people in ((CONFIG, None), (PATIENTS, torch.arange(50))):
        assert int(class_sums(features, labels, 1, config, patients=people).abs().max()) <= largest_term(
            config, 50
        )
