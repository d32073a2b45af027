"""Jobs that hide patients: what is refused, what is released, what is charged, that a federation trains."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ledgers import charges_of

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.data.arrays import ArrayData
from tightframe.data.base import SiloData
from tightframe.data.eicu import EicuOptions
from tightframe.data.eicu.twin import open_twin
from tightframe.errors import DataError, JobError, RunError
from tightframe.phases import Fold
from tightframe.privacy.events import SubsampledGaussian
from tightframe.privacy.ledger.entries import NeighboursError
from tightframe.privacy.releases.class_sums import COUNT_GRID
from tightframe.privacy.training import portions
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import private_view
from tightframe.rounds.silo.budget import Budget
from tightframe.rounds.silo.private_view import coarse_count, whole_patients
from tightframe.rounds.silo.view import RequestedSum
from tightframe.rounds.sums.simulated_identity import simulated_identity

SITES = ["site-1", "site-2", "site-3"]
OPTIONS = {"twin_scale": 0.02, "drugs": 32}
JOB: dict[str, Any] = {
    "job_name": "patients",
    "method": "fedavg",
    "dataset": "eicu",
    "dataset_options": OPTIONS,
    "model": "mlp",
    "model_options": {"widths": [4]},
    "sites": SITES,
    "min_sites": 3,
    "rounds": 2,
    "weights": "uniform",
    # To solve the noise for a budget takes seconds at each silo, and so does the price of steps in which not
    # everybody takes part.
    "training": {"epochs": 1, "batch_size": 4096, "learning_rate": 0.1},
    "privacy": {"epsilon": 60.0, "neighbours": "patient", "noise_multiplier": 1.0},
}


def twins() -> dict[str, SiloData]:
    return {site: open_twin(place, EicuOptions(**OPTIONS)) for place, site in enumerate(SITES)}  # type: ignore[arg-type]


class Nameless:
    """Records without what they say of patients."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name == "groups":
            raise AttributeError(name)
        return getattr(self._data, name)


def view(folder: Path, data: Any, **changes: Any) -> private_view.PrivateSilo:
    setup = prepare({**JOB, **changes})
    identity = partial(simulated_identity, "run", "site-1", production=False)
    context = SiloContext(
        "site-1", setup.job, None, run_dir=folder, records=data, job_id="run", identity=identity
    )
    return private_view.PrivateSilo(context, setup, torch.device("cpu"), 1, RequestedSum(SITES, 1))


def some(gone: int | None = None) -> ArrayData:
    """40 stays of 12 patients in any order, of very different length; without one of them."""
    stream = np.random.default_rng(3)
    values = stream.normal(size=(40, 32)) * stream.exponential(size=(40, 1))
    labels, patients = np.arange(40) % 2, stream.integers(0, 12, 40) * 7
    keep = np.ones(40, dtype=bool) if gone is None else patients != gone
    folds: dict[Fold, Any] = dict.fromkeys(("train", "validation", "test"), (values[keep], labels[keep]))
    owners: dict[Fold, Any] = dict.fromkeys(folds, patients[keep])
    return ArrayData(folds, source="some stays", num_classes=2, patients=owners)


def test_a_federation_trains_and_charges_patients(tmp_path: Path) -> None:
    data = twins()
    result = federation.run_job(parse_job(JOB), data=data, folder=tmp_path)
    assert result.outcome.trained and not result.outcome.not_enrolled
    assert "for one patient more or less" in "\n".join(result.outcome.rules)
    start = prepare(JOB).initial_state().model
    assert any(not torch.equal(value, start[name]) for name, value in result.state.model.items())
    for site in SITES:
        groups = data[site].groups("train")  # type: ignore[attr-defined]
        assert len(np.unique(groups)) < len(groups)  # some have several stays, so that the levels differ
        found = charges_of(tmp_path, site)
        assert [item.purpose for item in found] == ["round 1 training", "round 2 training"]
        assert {item.neighbours for item in found} == {"patient"}
        assert [item.event for item in found] == [SubsampledGaussian(1.0, 1.0, 1)] * 2


def test_the_rate_and_an_epochs_steps_are_those_of_patients(tmp_path: Path) -> None:
    data = twins()["site-1"]
    stays, patients = len(data.labels("train")), len(np.unique(data.groups("train")))  # type: ignore[attr-defined]
    settings = view(tmp_path, data, training={"batch_size": 16}).training_settings()
    known = coarse_count(patients)
    assert known < coarse_count(stays)
    assert settings.sampling_rate == 16 / known and settings.expected_batch == pytest.approx(16)
    assert settings.epoch_steps == int(np.ceil(known / 16))


def test_class_sums_and_counts_are_released_and_charged_by_patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedMR's class sums and FedETF's prior, whole runs without the probe, which a federation's has."""
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)
    for method, purpose in (("fedmr", "round 1 class sums"), ("fedetf", "class counts")):
        job = parse_job({**JOB, "method": method, "rounds": 1})
        result = federation.run_job(job, data=twins(), folder=tmp_path / method)
        assert result.outcome.trained
        found = charges_of(tmp_path / method, "site-1")
        assert purpose in [item.purpose for item in found]
        assert {item.neighbours for item in found} == {"patient"}


def test_a_silo_that_does_not_know_its_patients_stays_out_before_anything_is_trained(tmp_path: Path) -> None:
    data = twins()
    data["site-2"] = Nameless(data["site-2"])  # type: ignore[assignment]
    with pytest.raises(RunError, match="TF-509: before any training, site-2 refused: TF-210"):
        federation.run_job(parse_job(JOB), data=data, folder=tmp_path)
    assert not list(tmp_path.glob("*/silo_state/privacy/*/ledger.sqlite*")) or not charges_of(
        tmp_path, "site-1"
    )
    # A server that leaves the enrolment out gets no further.
    asked = view(tmp_path / "alone", data["site-2"])
    with pytest.raises(DataError, match="TF-210"):
        asked.fit(asked.load(prepare(JOB).initial_state().model), [])


def test_a_ledger_that_protects_records_refuses_patients(tmp_path: Path) -> None:
    data, records = twins()["site-1"], {"privacy": {"epsilon": 60.0, "noise_multiplier": 1.0}}
    event = SubsampledGaussian(1.0, 1.0, 1)
    view(tmp_path, data, **records)._budget.charge("round 1 training", (event,))
    with pytest.raises(NeighboursError, match="TF-706"):
        view(tmp_path, data)._budget.charge("round 2 training", (event,))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dataset": "fed_isic2019", "dataset_options": {}}, "Fed-ISIC2019 cannot hide patients"),
        ({"dataset": "digits", "dataset_options": {"silos": 3}}, "cannot hide patients, because its files"),
        ({"dataset_options": {"oversample_minority": True}}, "oversample_minority"),
        (
            {"privacy": {"neighbours": "patient", "evaluation": "noisy"}},
            "privacy.evaluation: Expected 'local' unless `neighbours` is 'record'",
        ),
        ({"privacy": {"neighbours": "hospital"}}, "privacy.neighbours"),
    ],
)
def test_jobs_that_cannot_hide_patients_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match="TF-101") as caught:
        prepare({**JOB, **changes})
    assert told in str(caught.value)


def _released(folder: Path, data: ArrayData, method: str) -> torch.Tensor:
    """Class sums, or class counts, of these records, in units of the grid, without noise."""
    asked = view(folder, data, method=method, training={"batch_size": 3})
    if method == "fedetf":
        return (asked.class_counts("train") * COUNT_GRID).round().to(torch.int64)
    sums, counts = asked.private_class_sums(lambda inputs: 2 * inputs[:, :6], 6)
    grid = asked._plan.class_sums.grid
    return (torch.cat([sums, counts[:, None]], 1) * grid).round().to(torch.int64)


@pytest.mark.parametrize("method", ["fedmr", "fedetf"])
def test_without_any_one_patient_a_release_changes_by_its_sensitivity_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Brute force, through the silo's own batches of three records, in which patients are cut apart."""
    monkeypatch.setattr(Budget, "charge", lambda *_, **__: None)
    monkeypatch.setattr(
        private_view.class_sums, "noise_for", lambda shape, *_: torch.zeros(shape, dtype=torch.int64)
    )
    monkeypatch.setattr(
        private_view.class_sums,
        "count_noise",
        lambda count, *_, **__: torch.zeros(count, dtype=torch.int64),
    )
    config = view(tmp_path, some(), method=method)._plan.class_sums
    limit = config.squared_sensitivity if method == "fedmr" else COUNT_GRID**2
    whole = _released(tmp_path / "whole", some(), method)
    owners = some().groups("train")
    assert owners is not None
    squared = []
    for gone in np.unique(owners):
        change = whole - _released(tmp_path / str(gone), some(int(gone)), method)
        squared.append(sum(int(value) ** 2 for value in change.flatten()))
    assert 0.99 * limit < max(squared) <= limit


def test_portions_hold_all_records_of_a_patient() -> None:
    stream = np.random.default_rng(0)
    for _ in range(200):
        sizes = stream.integers(1, 7, size=stream.integers(1, 8))
        owners = torch.from_numpy(np.repeat(stream.permutation(len(sizes)), sizes))
        values = torch.arange(len(owners), dtype=torch.float64)[:, None]
        size = int(stream.integers(1, 6))

        def batches(values: torch.Tensor = values, size: int = size) -> Iterator[Any]:
            for part in torch.split(values, size):
                yield part, part[:, 0].long()

        found = list(whole_patients(batches(), owners))
        assert torch.equal(torch.cat([item[0] for item in found]), values)
        assert torch.equal(torch.cat([item[1] for item in found]), values[:, 0].long())
        assert torch.equal(torch.cat([item[2] for item in found]), owners)
        seen = [patient for item in found for patient in set(item[2].tolist())]
        assert len(seen) == len(set(seen)) == len(sizes)


def test_portions_refuse_patients_that_are_apart_or_of_other_records() -> None:
    batches = [(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))]
    with pytest.raises(ValueError, match="to be consecutive"):
        list(whole_patients(batches, torch.tensor([1, 2, 1])))
    with pytest.raises(ValueError, match="Expected 5 records, but got 3"):
        list(whole_patients(batches, torch.tensor([1, 1, 2, 2, 2])))
