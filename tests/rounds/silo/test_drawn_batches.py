"""Batches of a silo whose policy refuses full ones: drawn anew, of at most half of its records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import HEART

from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.errors import DataError
from tightframe.learning.stages import OptimizerSettings, Stage, Term
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.silo.view import LocalSilo

CPU = torch.device("cpu")


class Repeated(ArrayData):
    """Records of which each is in the training fold twice, as oversampling does."""

    def distinct_labels(self) -> Any:
        return self.labels("train")[::2]


def records(size: int, kind: type[ArrayData] = ArrayData) -> ArrayData:
    """Records whose every value is the record's number."""
    folds = {}
    for fold, number in (("train", size), ("validation", 3), ("test", 3)):
        inputs = np.repeat(np.arange(number, dtype=np.float32)[:, None], 13, axis=1)
        folds[fold] = (inputs, np.arange(number) % 2)
    return kind(folds, source="numbers", num_classes=2)


def context(
    folder: Path, data: ArrayData, batch_size: int, policy: Any = "standard", **job: Any
) -> SiloContext:
    values = {
        **HEART,
        "sites": ["a", "b", "c"],
        "min_sites": 3,
        "training": {"batch_size": batch_size},
        **job,
    }
    block = PolicyBlock(profile=policy)
    return SiloContext(
        "a", parse_job(values), SiteEntry(policy=block), folder, records=data, production=True, job_id="j"
    )


def batches(of: SiloContext, epoch: int = 0) -> list[list[int]]:
    """The numbers of the records in each batch of an epoch."""
    of.state_folder.mkdir(parents=True, exist_ok=True)
    silo = LocalSilo(of, prepare(of.job), CPU, 1)
    made = silo.batches("train", augment=False, shuffle=True, epoch=epoch)
    return [inputs[:, 0].int().tolist() for inputs, _ in made]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9, 13, 31, 60])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 16, 65_536])
def test_no_batch_has_more_than_half_of_the_records(tmp_path: Path, size: int, batch_size: int) -> None:
    made = batches(context(tmp_path, records(size), batch_size))
    assert max(map(len, made)) <= max(1, size // 2)
    held = [count for count in np.bincount(np.arange(size) % 2) if count >= 5]
    assert sum(map(len, made)) == sum(held) or not held, (
        "as many draws as records of classes that are not few"
    )
    assert all(len(set(batch)) == len(batch) for batch in made), "no record twice in a batch"


@pytest.mark.parametrize("batch_size", [1, 2, 16, 30, 65_536])
@pytest.mark.parametrize("held", [0, 5, 60, 61])
def test_few_records_of_a_class_change_no_silos_number_of_batches(
    tmp_path: Path, held: int, batch_size: int
) -> None:
    """FedNova sums the steps. With 61 records, of which one did not count, batches of 29 made three of 60."""
    numbers = set()
    for few in (0, 1, 2, 3, 4):
        labels = np.repeat([0, 1], [held or 2 + few // 2, few])
        inputs = np.arange(len(labels) * 13, dtype=np.float32).reshape(-1, 13)
        folds: Any = dict.fromkeys(("train", "validation", "test"), (inputs, labels))
        data = ArrayData(folds, source="numbers", num_classes=2)
        of = context(tmp_path / f"{few}", data, batch_size)
        made = batches(of)
        assert max(map(len, made)) <= max(1, len(labels) // 2)
        numbers.add(len(made))
    assert len(numbers) == 1


def test_records_that_are_repeated_count_once(tmp_path: Path) -> None:
    made = batches(context(tmp_path, records(20, Repeated), 65_536))
    assert max(map(len, made)) == 5


def test_each_batch_is_a_draw_of_its_own(tmp_path: Path) -> None:
    """So an epoch leaves records out, and which ones changes with the epoch and with the silo's secret."""
    of, other = (context(tmp_path / name, records(60), 30) for name in ("one", "other"))
    first, second = batches(of), batches(of, epoch=1)
    left_out = [
        set(range(60)) - {number for batch in made for number in batch}
        for made in (first, second, batches(other))
    ]
    assert all(8 <= len(numbers) <= 22 for numbers in left_out)  # of 60 a quarter, in two draws of half
    assert len({frozenset(numbers) for numbers in left_out}) == 3
    assert batches(of) == first, "within a job it is repeatable"


@pytest.mark.parametrize(
    ("policy", "job"), [("research", {}), ("standard", {"privacy": {}, "weights": "uniform"})], ids=str
)
def test_elsewhere_an_epoch_has_each_record_once(tmp_path: Path, policy: str, job: dict[str, Any]) -> None:
    """Under a policy that accepts full batches, and with privacy, whose draws are of another kind."""
    made = batches(context(tmp_path, records(9), 65_536, policy, **job))
    assert [sorted(batch) for batch in made] == [list(range(9))]


def test_a_site_with_one_training_record_does_not_enrol(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^TF-208: .*at least 2 training records"):
        SiloSession(context(tmp_path, records(1), 4))._read_records()
    SiloSession(context(tmp_path, records(1), 4, "research"))._read_records()


@pytest.mark.parametrize("how", [{"epochs": 3}, {"steps": 120}, {"epochs": 1}], ids=str)
def test_a_unit_that_one_record_moves_stays_however_often_batches_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, int]
) -> None:
    """Each of 60 records moves its own unit, and those that come twice as often as others are not two."""
    monkeypatch.setattr(SiloContext, "common", lambda self, units=0, *, rounded=False: None)
    pair = SiteEntry(policy=PolicyBlock(profile="standard", min_class_count=2))
    of = replace(context(tmp_path, records(60), 1), entry=pair)
    of.state_folder.mkdir(parents=True)
    silo = LocalSilo(of, prepare(of.job), CPU, 1)

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 60)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return self.layer(numbers[:, 1:2] + 1).gather(1, numbers[:, :1].long())

    model = Own()
    before = model.layer.weight.detach().clone()
    moved = Term("moved", 1.0, lambda view: view.logits.sum(), per_record=True)
    silo.fit(model, [Stage([moved], OptimizerSettings("sgd", 0.1), **how)])
    assert torch.equal(model.layer.weight, before)


@pytest.mark.parametrize("patients", [1, 10], ids=str)
def test_a_unit_that_one_patients_records_move_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patients: int
) -> None:
    """Of 60 patients with ten records each, so many move each unit."""
    monkeypatch.setattr(SiloContext, "common", lambda self, units=0, *, rounded=False: None)
    data = records(600)
    data._patients = {fold: np.arange(600) // 10 for fold in ("train", "validation", "test")}
    of = replace(context(tmp_path, data, 16), entry=SiteEntry(policy=PolicyBlock(profile="standard")))
    of.state_folder.mkdir(parents=True)
    silo = LocalSilo(of, prepare(of.job), CPU, 1)

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 60 // patients)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            units = numbers[:, :1].long() // (10 * patients)
            return self.layer(1 + numbers[:, 1:2] / 600).gather(1, units)

    model = Own()
    before = model.layer.weight.detach().clone()
    summed = Term("summed", 1.0, lambda view: view.logits.sum(), per_record=True)
    silo.fit(model, [Stage([summed], OptimizerSettings("sgd", 0.1), epochs=2)])
    assert (model.layer.weight == before).all() if patients == 1 else (model.layer.weight != before).all()
    with silo.unit_records(model) as units:  # in their order
        for numbers, _ in silo.batches("train", augment=False, shuffle=False):
            torch.autograd.grad(model(numbers).sum(), model.layer.weight)
    assert units.few()["layer.weight"].all() == (patients == 1)
