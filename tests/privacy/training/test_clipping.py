"""Clipping by patient, against autograd's gradient of each patient's mean loss and against removal."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tightframe import models
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, Term, cross_entropy
from tightframe.privacy.os_randomness import KEY_BYTES, poisson_batch
from tightframe.privacy.training import dp_sgd
from tightframe.privacy.training.clipping import Members, PatientSum, clipped_sum
from tightframe.privacy.training.dp_sgd import PrivateSettings, private_fit
from tightframe.privacy.training.per_sample import ENGINES, EngineName, PrivacyError

Item = tuple[torch.Tensor, int]
WIDTH, CLASSES = 5, 3
# Interleaved, of one to five records each; numbers without meaning.
PATIENTS = np.array([7, 3, 7, 900, 3, 7, 12, 900, 7, 7, 1, 12])
COUNT = len(PATIENTS)


def build() -> nn.Module:
    spec = models.get("mlp")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spec.build(spec.options.model_validate({"widths": [8]}), (WIDTH,), CLASSES)


def items() -> list[Item]:
    """Records whose gradients are of very different lengths, so that some patients are clipped."""
    stream = torch.Generator().manual_seed(1)
    inputs = torch.randn(COUNT, WIDTH, generator=stream) * torch.linspace(0.1, 6, COUNT)[:, None]
    return [(inputs[i], i % CLASSES) for i in range(COUNT)]


def moved(records: list[Item], patients: Any, **changes: Any) -> torch.Tensor:
    """What training moves the parameters by, with a learning rate of 1: minus the sum of gradients over L."""
    model = build()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    steps = changes.pop("steps", 1)
    given = {"settings": PrivateSettings(1.0, 1.0, 1.0, 1.0), "device": "cpu", "probe": False} | changes
    stage = Stage((cross_entropy(),), OptimizerSettings("sgd", 1.0, 0.0, 0.0), steps=steps)
    private_fit(model, lambda step: records, [stage], patients=patients, **given)
    return (nn.utils.parameters_to_vector(model.parameters()).detach() - before).double()


def by_autograd(model: nn.Module, records: list[Item], patients: list[int], clip: float) -> torch.Tensor:
    """The sum over patients of the clipped gradient of the patient's mean loss."""
    total = torch.zeros(sum(item.numel() for item in model.parameters()), dtype=torch.float64)
    for patient in sorted(set(patients)):
        own = [record for record, owner in zip(records, patients, strict=True) if owner == patient]
        inputs, labels = torch.stack([item[0] for item in own]), torch.tensor([item[1] for item in own])
        loss = nn.functional.cross_entropy(model(inputs), labels)
        found = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.cat([item.flatten() for item in found]).double()
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise, which no setting allows."""
    monkeypatch.setattr(dp_sgd, "standard_normal", lambda count, _: torch.zeros(count, dtype=torch.float64))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", [2.5, 1e9])
def test_every_engine_gives_the_clipped_gradient_of_each_patients_mean_loss(
    silent: None, engine: EngineName, clip: float
) -> None:
    expected = by_autograd(build(), items(), PATIENTS.tolist(), clip)
    found = moved(items(), PATIENTS, engine=engine, settings=PrivateSettings(clip, 1.0, 1.0, 1.0))
    torch.testing.assert_close(-found, expected, rtol=1e-4, atol=1e-6)
    if clip < 3:  # patients of both kinds are there
        members = [
            [items()[i] for i in np.flatnonzero(patient == PATIENTS)] for patient in np.unique(PATIENTS)
        ]
        norms = [float(by_autograd(build(), own, [0] * len(own), 1e9).norm()) for own in members]
        assert min(norms) < clip < max(norms)


def test_patients_are_drawn_and_come_with_all_their_records(silent: None) -> None:
    """Several steps of Poisson batches of patients, as the same loop over them by autograd."""
    rate, steps, clip = 0.4, 6, 2.5
    source = np.random.default_rng(0).bytes
    source(KEY_BYTES)  # of dropout masks
    people = sorted(set(PATIENTS.tolist()))
    drawn = [poisson_batch(len(people), rate, source) for _ in range(steps)]
    assert any(not batch for batch in drawn) and max(map(len, drawn)) > 1
    model, learning = build(), 1.0
    before = nn.utils.parameters_to_vector(model.parameters()).detach().double()
    for batch in drawn:
        chosen = [i for i in range(COUNT) if PATIENTS[i] in {people[place] for place in batch}]
        gradient = by_autograd(model, [items()[i] for i in chosen], PATIENTS[chosen].tolist(), clip)
        now = nn.utils.parameters_to_vector(model.parameters()).detach().double()
        nn.utils.vector_to_parameters((now - learning * gradient / 2.0).float(), model.parameters())
    expected = nn.utils.parameters_to_vector(model.parameters()).detach().double() - before
    settings = PrivateSettings(clip, 1.0, rate, 2.0)
    found = moved(
        items(), PATIENTS, steps=steps, settings=settings, random_bytes=np.random.default_rng(0).bytes
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_any_one_patient_the_sum_changes_by_the_clipping_norm_at_most(silent: None) -> None:
    """Brute force over every patient, and over one of many records that all pull as hard as they can."""
    wild = [(torch.full((WIDTH,), 1e6), 0)] * 9
    records, patients = [*items(), *wild], np.concatenate([PATIENTS, np.full(9, 5000)])
    settings = PrivateSettings(0.5, 1.0, 1.0, 1.0)
    whole = {level: moved(records, owners, settings=settings) for level, owners in levels(patients)}
    changes: dict[str, list[float]] = {"patient": [], "record": []}
    for gone in np.unique(patients):
        keep = np.flatnonzero(patients != gone)
        left = [records[i] for i in keep]
        for level, owners in levels(patients[keep]):
            changes[level].append(float((whole[level] - moved(left, owners, settings=settings)).norm()))
    assert 0.499 < max(changes["patient"]) <= 0.5 * (1 + 1e-4)
    # The control: clipped record by record, the same patient moves it nine times as far.
    assert max(changes["record"]) > 4.4


def levels(patients: Any) -> list[tuple[str, Any]]:
    return [("patient", patients), ("record", None)]


def test_patients_of_one_record_each_are_records(silent: None) -> None:
    settings = PrivateSettings(0.7, 1.0, 0.5, 3.0)
    found = [
        moved(items(), owners, steps=4, settings=settings, random_bytes=np.random.default_rng(2).bytes)
        for owners in (np.arange(COUNT) * 3 - 50, None)
    ]
    assert torch.equal(*found)


def test_a_patient_with_a_gradient_that_is_not_finite_counts_as_zero(silent: None) -> None:
    spoilt = [(torch.full((WIDTH,), float("nan")), 0), (torch.ones(WIDTH), 1)]
    with_both = moved([*items(), *spoilt], np.concatenate([PATIENTS, [77, 77]]))
    torch.testing.assert_close(with_both, moved(items(), PATIENTS))


def test_gradients_in_any_portions_make_the_same_sum() -> None:
    stream = np.random.default_rng(0)
    for _ in range(50):
        sizes = stream.integers(1, 6, size=stream.integers(1, 7)).tolist()
        gradients = torch.from_numpy(stream.normal(size=(sum(sizes), 4)))
        expected = sum(clipped_sum([part.mean(0)[None]], 0.6) for part in torch.split(gradients, sizes))
        total = torch.zeros(4, dtype=torch.float64)
        patients = PatientSum(total, sizes, 0.6)
        cuts = sorted(stream.integers(0, sum(sizes) + 1, size=4).tolist())
        for part in np.split(np.arange(sum(sizes)), cuts):
            patients.add(gradients[part.tolist()])
        torch.testing.assert_close(total, expected)


def test_a_batch_that_does_not_fit_into_memory_is_added_in_parts(
    silent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = moved(items(), PATIENTS, engine="vmap")
    real, seen = dp_sgd.rows, []

    def scarce(group: Any) -> torch.Tensor:
        seen.append(len(group[0]))
        if len(group[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(group)

    monkeypatch.setattr(dp_sgd, "rows", scarce)
    torch.testing.assert_close(moved(items(), PATIENTS, engine="vmap"), expected, rtol=1e-5, atol=1e-7)
    assert seen[0] == COUNT and seen.count(1) + seen.count(2) >= COUNT // 2


def test_members_are_all_records_of_each_patient() -> None:
    members = Members.of(PATIENTS, COUNT)
    assert members.places == ((10,), (1, 4), (0, 2, 5, 8, 9), (6, 11), (3, 7))
    assert len(members) == 5 and members.records([4, 0]) == [3, 7, 10] and members.sizes([4, 0]) == [2, 1]
    for wrong in (PATIENTS[:-1], PATIENTS[:, None]):
        with pytest.raises(ValueError, match="one patient for each of 12 records"):
            Members.of(wrong, COUNT)


def test_a_term_that_couples_the_records_of_one_patient_is_refused_as_any_other() -> None:
    def spread(view: Any) -> torch.Tensor:
        return view.logits.var(0, unbiased=False).sum()

    model = build()
    before = copy.deepcopy(model.state_dict())
    stage = Stage((Term("spread", 1.0, spread, per_record=True),), OptimizerSettings("sgd", 1.0), steps=1)
    with pytest.raises(PrivacyError, match="'spread'"):
        private_fit(
            model,
            lambda step: items(),
            [stage],
            patients=np.zeros(COUNT, np.int64),
            settings=PrivateSettings(1.0, 1.0, 1.0, 1.0),
            device="cpu",
        )
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
