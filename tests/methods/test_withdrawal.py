"""Records taken out of an ended run of one sum: the model without them, to the bit; what is not opened."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.methods.test_one_sum import PIXELS, digits, equal

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.data.withdrawn import Remaining
from tightframe.errors import JobError, RunError, TightframeError
from tightframe.learning.withdrawal import records_in
from tightframe.phases import Fold
from tightframe.results.files import CHECKPOINT
from tightframe.rounds.following import state_sha256
from tightframe.rounds.server import resume
from tightframe.rounds.server.coordinator import Result

SILOS = ("a", "b", "c", "d")
FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
JOB: dict[str, Any] = {
    "job_name": "one-sum",
    "method": "fed3r",
    **PIXELS,
    "rounds": 1,
    "sites": list(SILOS),
    "min_sites": 4,
    "summation": "secure",
}
Names = Mapping[str, Sequence[str]]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Runs that end with an error on purpose fill no screen."""
    caplog.set_level(logging.CRITICAL, logger="tightframe.run")


def records(rare: int | None = None) -> dict[str, ArrayData]:
    """800 training digits at four silos, two records a patient in each fold.

    Args:
        rare: a class of which each silo has 6 training records only.
    """
    folds = digits()
    made: dict[str, ArrayData] = {}
    for place, site in enumerate(SILOS):
        parts, patients = {}, {}
        for fold in FOLDS:
            images, labels = (item[place::4] for item in folds[fold])
            if rare is not None and fold == "train":
                few = np.flatnonzero(labels == rare)[6:]
                images, labels = np.delete(images, few, axis=0), np.delete(labels, few)
            parts[fold] = (images, labels)
            patients[fold] = np.arange(len(labels)) // 2
        made[site] = ArrayData(parts, source="digits", num_classes=10, patients=patients)
    return made


def of_class(data: ArrayData, label: int, count: int, skip: int = 0) -> list[str]:
    """Lines that name training records of a class."""
    places = np.flatnonzero(data.labels("train") == label)[skip : skip + count]
    assert len(places) == count
    return [f"record,train-{place}" for place in places]


def without(data: Mapping[str, ArrayData], names: Names) -> dict[str, ArrayData]:
    """Records as a hospital without the named ones would have them, made without the code under test."""
    made = {}
    for site, silo in data.items():
        parts, patients = {}, {}
        for fold in FOLDS:
            of = silo.patient_ids(fold)
            assert of is not None
            keep = np.array(
                [
                    f"record,{fold}-{place}" not in names.get(site, ())
                    and f"patient,{of[place]}" not in names.get(site, ())
                    for place in range(len(of))
                ]
            )
            images, labels = silo._folds[fold]
            parts[fold] = (images[keep], labels[keep])
            patients[fold] = np.asarray(of, dtype=np.int64)[keep]
        made[site] = ArrayData(parts, source="digits", num_classes=10, patients=patients)
    return made


def entries(folder: Path, names: Names) -> dict[str, SiteEntry]:
    """Configurations of the sites, with their files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for site in SILOS:
        if site in names:  # a site without a file withdraws nothing
            path = folder / f"{site}.csv"
            path.write_text("# of 2026\n" + "\n".join(names[site]) + "\n")
            made[site] = SiteEntry(withdrawn={"digits": str(path)})
        else:
            made[site] = SiteEntry()
    return made


@dataclass
class Ended:
    """A run that has ended."""

    folder: Path
    data: Mapping[str, ArrayData]
    result: Result

    def job(self, least: int | None = None) -> JobConfig:
        return resume.withdrawal_job(self.folder / "server" / CHECKPOINT, least)

    def withdraw(self, names: Names, folder: Path, *, least: int | None = 1, **changes: Any) -> Ended:
        job = self.job(least)
        job = parse_job({**job.model_dump(mode="json"), **changes})
        found = federation.run_job(
            job, data=self.data, entries=entries(folder / "files", names), folder=folder, stopped=self.folder
        )
        return Ended(folder, self.data, found)


def run(data: Mapping[str, ArrayData], folder: Path, **changes: Any) -> Ended:
    job = parse_job({**JOB, **changes})
    return Ended(folder, data, federation.run_job(job, data=data, folder=folder))


def two_classes(data: Mapping[str, ArrayData], each: int = 2) -> dict[str, list[str]]:
    """Records of two classes at three of four silos: 12 by default."""
    return {
        site: [*of_class(data[site], 3, each), *of_class(data[site], 7, each)] for site in ("a", "b", "c")
    }


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of all records."""
    return run(records(), tmp_path_factory.mktemp("first"))


@pytest.mark.parametrize(
    ("method", "summation"),
    [("fed3r", "secure"), ("fed3r", "plain"), ("fedcgs", "secure"), ("fedncm", "plain")],
)
def test_the_model_is_that_of_a_run_without_the_records_to_the_bit(
    method: str, summation: str, tmp_path: Path
) -> None:
    """Model, total and all else of the state; records of validation and test folds are withdrawn, too."""
    data = records()
    whole = run(data, tmp_path / "whole", method=method, summation=summation)
    names = two_classes(data)
    names["a"] += ["record,validation-0", "record,test-1"]
    found = whole.withdraw(names, tmp_path / "withdrawn", least=10)
    expected = run(without(data, names), tmp_path / "again", method=method, summation=summation)
    assert equal(found.result.state.model, expected.result.state.model)
    assert state_sha256(found.result.state) == state_sha256(expected.result.state)
    assert not equal(found.result.state.model, whole.result.state.model)
    final, again = found.result.outcome.final(), expected.result.outcome.final()
    assert final is not None and again is not None and final.evaluation == again.evaluation
    assert records_in(found.result.state) == 788
