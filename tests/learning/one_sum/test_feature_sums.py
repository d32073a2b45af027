"""Sums of a frozen feature map: exact, whatever the partition, the order and the batches."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tightframe import models
from tightframe.config.job import parse_job
from tightframe.errors import RunError, TrainingError
from tightframe.learning.one_sum.feature_sums import (
    BITS,
    COARSE,
    COUNTS,
    FINE,
    FINE_BITS,
    RECORD_BOUND,
    RECORDS,
    SUMS,
    FeatureSums,
    pooled,
    sum_fields,
)
from tightframe.phases import RING_DTYPE, Schema
from tightframe.rounds import codec
from tightframe.rounds.codec import unpack
from tightframe.rounds.setup import prepare

CLASSES, WIDTH, RECORDS_IN_ALL = 5, 7, 360


def records(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of lengths below and above one, with negative entries, and uneven classes."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (RECORDS_IN_ALL,), generator=stream).sort().values
    features = torch.randn(RECORDS_IN_ALL, WIDTH, generator=stream, dtype=torch.float64)
    return features * torch.rand(RECORDS_IN_ALL, 1, generator=stream, dtype=torch.float64), labels


def summed(features: torch.Tensor, labels: torch.Tensor, batch: int = 32) -> dict[str, torch.Tensor]:
    own = FeatureSums(CLASSES, WIDTH, products=True)
    for start in range(0, len(labels), batch):
        own.add(features[start : start + batch], labels[start : start + batch])
    return own.tensors()


SCHEMA = Schema(sum_fields(CLASSES, WIDTH, products=True))


def total(terms: list[dict[str, torch.Tensor]], parties: int) -> dict[str, np.ndarray]:
    """The integers of the sum of these terms, through the codec."""
    added: dict[str, np.ndarray] = {}
    for term in terms:
        groups = codec.encode(SCHEMA, term, share=1.0, parties=parties)
        for name, item in unpack(SCHEMA, "static", groups["static"]).items():
            added[name] = added.get(name, np.zeros(item.shape, RING_DTYPE[SCHEMA[name].ring])) + item
    return added


def dirichlet(labels: torch.Tensor, silos: int, alpha: float) -> list[torch.Tensor]:
    rng = np.random.default_rng(3)
    shares = rng.dirichlet([alpha] * silos, CLASSES)
    owner = torch.tensor([rng.choice(silos, p=shares[label]) for label in labels.tolist()])
    return [torch.nonzero(owner == silo).flatten() for silo in range(silos)]


def partitions(labels: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    everything = torch.arange(len(labels))
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    return {
        "one silo": [everything],
        "one silo, another order": [shuffled],
        "ten silos": list(shuffled.chunk(10)),
        "a class each": [torch.nonzero(labels == label).flatten() for label in range(CLASSES)],
        "Dirichlet 0.05": dirichlet(labels, 10, 0.05),
    }


@pytest.mark.parametrize("batch", [1, 7, 400])
@pytest.mark.parametrize("name", ["one silo, another order", "ten silos", "a class each", "Dirichlet 0.05"])
def test_every_partition_has_the_same_integers(name: str, batch: int) -> None:
    features, labels = records()
    expected = total([summed(features, labels)], 10)
    parts = partitions(labels)[name]
    assert sum(len(part) for part in parts) == RECORDS_IN_ALL
    found = total([summed(features[part], labels[part], batch) for part in parts], 10)
    assert all(np.array_equal(found[field], expected[field]) for field in expected)


def test_the_sums_are_those_of_the_rounded_records_exactly() -> None:
    """In rational numbers: nothing but the features is rounded."""
    features, labels = records()
    lengths = features.norm(dim=1, keepdim=True).clamp_min(1)
    units = (features / lengths * 2.0**BITS).round().to(torch.int64).numpy().astype(object)
    made = summed(features, labels)
    gram = units.T @ units
    rows, columns = np.triu_indices(WIDTH)
    carried = [
        (Fraction(high.item()) * 2 ** (2 * FINE_BITS) + Fraction(low.item())) / 2**BITS
        for high, low in zip(made[COARSE], made[FINE], strict=True)
    ]
    assert carried == [Fraction(int(gram[i, j]), 2 ** (2 * BITS)) for i, j in zip(rows, columns, strict=True)]
    for label in range(CLASSES):
        own = units[labels.numpy() == label].sum(0)
        assert [Fraction(value.item()) for value in made[SUMS][label]] == [
            Fraction(int(value), 2**BITS) for value in own
        ]
    assert torch.equal(made[COUNTS], torch.bincount(labels, minlength=CLASSES).double())
    assert float(made[RECORDS]) == RECORDS_IN_ALL


def test_what_is_pooled_is_the_second_moment_to_the_rounding_of_a_feature() -> None:
    features, labels = records()
    found = pooled({name: item.numpy() for name, item in summed(features, labels).items()})
    rows = features / features.norm(dim=1, keepdim=True).clamp_min(1)
    assert found.gram is not None and torch.equal(found.gram, found.gram.T)
    torch.testing.assert_close(found.gram, rows.T @ rows, rtol=0, atol=RECORDS_IN_ALL * 2.0**-BITS)
    assert float(torch.linalg.eigvalsh(found.gram).min()) > 0
    assert found.records == RECORDS_IN_ALL and found.known.all()
    means = torch.stack([rows[labels == label].mean(0) for label in range(CLASSES)])
    assert found.length == pytest.approx(float(means[labels].square().sum(1).mean().sqrt()), rel=1e-6)
    half = found.over(2.0)
    assert half.gram is not None and torch.equal(half.gram, found.gram / 4)
    assert torch.equal(half.sums, found.sums / 2) and half.counts is found.counts


def test_a_wider_radius_leaves_features_as_they_are() -> None:
    features, labels = records()
    own = FeatureSums(CLASSES, WIDTH, products=True, radius=2.0**7)
    own.add(features, labels)
    found = pooled({name: item.numpy() for name, item in own.tensors().items()}).over(2.0**-7)
    torch.testing.assert_close(found.gram, features.T @ features, rtol=0, atol=RECORDS_IN_ALL * 2.0**-16)


def test_features_that_hardly_differ_are_their_mean_at_all_records() -> None:
    """Also of what stays after a withdrawal, whatever that would be by itself."""
    features, labels = records()
    narrow = features / 16
    narrow[:, 0] = 0.1
    narrow[5, 0] += 1.4 * 2.0**-BITS
    plain = narrow.clone()
    plain[5, 0] = 0.1
    made = {name: FeatureSums(CLASSES, WIDTH, products=True, narrow=2.0**8) for name in ("all", "some")}
    made["all"].add(narrow, labels)
    made["some"].add(narrow[5::60], labels[5::60])
    constants = made["all"].constants()
    assert constants.isnan().sum() == WIDTH - 1 and constants[0] == round(0.1 * 2**BITS)
    of_all = made["all"].tensors()
    some = made["some"].tensors(constants)
    for expected, found in ((summed(plain, labels), of_all), (summed(plain[5::60], labels[5::60]), some)):
        assert all(torch.equal(found[name], expected[name]) for name in (SUMS, COUNTS, RECORDS))
        grams = [
            pooled({name: item.numpy() for name, item in each.items()}).gram for each in (found, expected)
        ]
        assert grams[0] is not None and grams[1] is not None and torch.equal(*grams)
    assert not torch.equal(summed(narrow, labels)[SUMS], of_all[SUMS])


def test_the_largest_sums_neither_wrap_nor_round() -> None:
    """Of 2^20 records of one class, all alike: at the bound of a silo's records."""
    own = FeatureSums(2, 2, products=True)
    own.add(torch.tensor([[0.6 + 2.0**-23, -0.8]], dtype=torch.float64), torch.tensor([0]))
    for part in own._parts.values():
        part *= RECORD_BOUND
    made = own.tensors()
    assert made[COUNTS].tolist() == [2.0**20, 0] and float(made[RECORDS]) == 2.0**20
    schema = Schema(sum_fields(2, 2, products=True))
    codec.check_schema(schema, 250)
    sent = codec.encode(schema, made, share=1.0, parties=250)["static"]
    integers = unpack(schema, "static", sent)
    units = [int(made[SUMS][0, column] / RECORD_BOUND * 2**BITS) for column in (0, 1)]
    coarse, fine = (integers[name].view(np.int64) for name in (COARSE, FINE))
    for place, (one, two) in enumerate(((0, 0), (0, 1), (1, 1))):
        whole = int(coarse[place]) * 2 ** (2 * FINE_BITS) + int(fine[place])
        assert whole == 2**20 * units[one] * units[two]


def test_features_that_are_not_finite_are_refused() -> None:
    for value in (float("nan"), float("inf")):
        own = FeatureSums(2, 2, products=False)
        own.add(torch.tensor([[value, 1.0]]), torch.tensor([0]))
        with pytest.raises(TrainingError, match="finite"):
            own.tensors()


@pytest.mark.whole
@pytest.mark.parametrize("spec", models.BACKBONES, ids=lambda spec: spec.name)
def test_every_backbone_has_features_in_float64(spec: models.BackboneSpec) -> None:
    """Those of a record are the same in any batch, to far below the grid."""
    shape = (3, 64, 64) if spec.name == "efficientnet_b0" else (3, 16, 16)
    shape = shape if spec.name in ("efficientnet_b0", "fedilc_cnn", "small_cnn", "mlp") else (3, 32, 32)
    small = {"wrn_28_10": {"widen_factor": 1}, "vgg11": {"hidden": [16]}}.get(spec.name, {})
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = spec.build(spec.options(**small), shape, 3).eval().double()
        inputs = torch.rand(5, *shape).double()
    with torch.no_grad():
        together = model.features(inputs)  # type: ignore[operator]
        alone = torch.cat([model.features(one[None]) for one in inputs])  # type: ignore[operator]
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_too_few_classes_or_a_class_that_lost_a_holder_end_the_run() -> None:
    features, labels = records()
    totals = {name: item.numpy() for name, item in summed(features, labels).items()}
    lost = {**totals, COUNTS: totals[COUNTS] * (np.arange(CLASSES) > 0)}
    with pytest.raises(RunError, match=r"^TF-510: .*lost one while"):
        pooled(lost)
    single = np.where(np.arange(CLASSES) == 1, totals[COUNTS], 0.0)
    with pytest.raises(RunError, match=r"^TF-510: .*two classes at least, but got 1"):
        pooled({**totals, COUNTS: single, RECORDS: single.sum()})


def test_all_fields_are_static_and_none_is_in_a_job_with_privacy() -> None:
    assert all(item.static and item.mechanism is None and not item.weighted for item in SCHEMA.fields)
    values = {
        **{"job_name": "x", "method": "fedavg", "dataset": "digits", "model": "mlp", "rounds": 2},
        **{"sites": ["a", "b", "c"], "min_sites": 3, "start": "fed3r"},
    }

    def summed(more: dict[str, Any]) -> set[str]:
        exchanges = prepare(parse_job({**values, **more})).plan.beginning()
        return {item.name for exchange in exchanges for item in exchange.phase.schema.fields}

    exact = {item.name for item in SCHEMA.fields}
    assert exact <= summed({})
    noisy = summed({"weights": "uniform", "privacy": {}})
    assert noisy and all(name.startswith("released/") for name in noisy)
