"""A site's file of withdrawn records, and the records that stay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tightframe.config.job import parse_job
from tightframe.config.site import open_data
from tightframe.data.arrays import ArrayData
from tightframe.data.base import FOLDS, class_patients
from tightframe.data.withdrawn import Named, Remaining, find, patients_of, read_file, record_ids
from tightframe.errors import DataError
from tightframe.phases import UNKNOWN


def arrays(**changes: Any) -> ArrayData:
    folds = {
        fold: (np.arange(4.0)[:, None] + place, np.array([0, 1, 0, 1])) for place, fold in enumerate(FOLDS)
    }
    values: dict[str, Any] = {"source": "arrays", "num_classes": 2, **changes}
    return ArrayData(folds, **values)


def test_a_line_names_a_record_or_a_patient(tmp_path: Path) -> None:
    path = tmp_path / "withdrawn.csv"
    path.write_text("# letters of May\n\nrecord, ISIC_0012345\npatient,Doe, Jane\nrecord,2\n")
    named = read_file(path)
    assert named.records == {"ISIC_0012345", "2"} and named.patients == {"Doe, Jane"}
    assert read_file(None) == Named()


@pytest.mark.parametrize("line", ["ISIC_0012345", "record", "record,", "records,4", "image,4"])
def test_another_form_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "withdrawn.csv"
    path.write_text(f"record,1\n{line}\n")
    with pytest.raises(DataError, match=r"^TF-214: .*line 2"):
        read_file(path)


def test_a_file_that_is_not_there_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^TF-214: .*withdrawn"):
        read_file(tmp_path / "withdrawn.csv")


def test_unknown_records_and_patients_are_refused_together() -> None:
    patients = {fold: np.array([1, 1, 2, 3]) for fold in FOLDS}
    data = arrays(patients=patients)
    with pytest.raises(DataError, match=r"^TF-214: .*2 are unknown \(7, train-9\)"):
        find(data, Named(frozenset({"train-0", "train-9"}), frozenset({"1", "7"})))
    assert find(data, Named(frozenset({"gone"})), gone={"gone"}) == frozenset()
    with pytest.raises(DataError, match="does not know its patients by name"):
        find(arrays(), Named(patients=frozenset({"1"})))


def test_a_patient_is_all_its_records_in_every_fold() -> None:
    data = arrays(patients={fold: np.array([1, 1, 2, 3]) for fold in FOLDS})
    found = find(data, Named(patients=frozenset({"1"})))
    assert found == {f"{fold}-{place}" for fold in FOLDS for place in (0, 1)}


def test_the_records_that_stay_keep_fold_order_values_and_patient() -> None:
    data = arrays(patients={fold: np.array([1, 1, 2, 3]) for fold in FOLDS})
    stays = Remaining(data, {"train-0", "test-3"})
    assert stays.labels("train").tolist() == [1, 0, 1] and stays.labels("validation").tolist() == [0, 1, 0, 1]
    values = [float(inputs) for inputs, _ in stays.records("train")]  # type: ignore[attr-defined]
    assert values == [1.0, 2.0, 3.0]
    assert np.asarray(stays.groups("test")).tolist() == [1, 1, 2]
    assert list(record_ids(stays, "train")) == ["train-1", "train-2", "train-3"]
    assert tuple(stays.record_shape("train")) == (1,)
    assert Remaining(arrays(), ()).groups("train") is None


class Bare:
    """Records of a data set that names neither them nor patients."""

    source = "bare"

    def __init__(self) -> None:
        self.checked: list[Any] = []

    def labels(self, fold: str) -> Any:
        return np.array([0, 1, 1])

    def check(self, progress: Any = None) -> None:
        self.checked.append(progress)


def test_patients_of_a_finding_are_those_with_it_or_without_it() -> None:
    """Of the second one value is unknown."""
    labels = np.array([[1, 1], [1, 0], [1, 0], [0, UNKNOWN], [0, 0]])
    data: Any = SimpleNamespace(groups=lambda fold: np.array([3, 3, 4, 4, 5]), labels=lambda fold: labels)
    assert class_patients(data, labels, 2).tolist() == [2, 1]


def test_patients_count_once_in_each_class() -> None:
    folds: Any = {fold: (np.zeros((6, 1)), np.array([0, 0, 0, 1, 1, 1])) for fold in FOLDS}
    patients: Any = {fold: np.array([7, 7, 8, 8, 9, 5]) for fold in FOLDS}
    known, unknown = (
        ArrayData(folds, source="six", num_classes=2, patients=item) for item in (patients, None)
    )
    names = ["train-0", "train-1", "train-3"]
    assert [item.tolist() for item in patients_of(known, "train", names, 2)] == [[1, 1], [2, 3], [1, 2]]
    assert [item.tolist() for item in patients_of(unknown, "train", names, 2)] == [[2, 1], [3, 3], [1, 2]]


def test_a_data_set_can_name_neither_records_nor_patients() -> None:
    data: Any = Bare()
    with pytest.raises(DataError, match="does not know its patients by name"):
        find(data, Named(patients=frozenset({"1"})))
    stays = Remaining(data, find(data, Named(frozenset({"train-1"}))))
    assert stays.places("train").tolist() == [0, 2] and stays.groups("train") is None
    said: Any = print
    stays.check(said)
    assert data.checked == [said], "withdrawn ones too are read"


@pytest.mark.parametrize("dataset", ["fed_isic2019", "fed_heart_disease", "eicu"])
def test_every_data_set_names_each_record_once(dataset: str) -> None:
    values = {"job_name": "x", "method": "fedavg", "model": "mlp", "rounds": 1, "min_sites": 1}
    options = {"fed_isic2019": {"image_size": 16}}.get(dataset, {})
    job = parse_job(
        {**values, "sites": ["a"], "dataset": dataset, "dataset_options": options, "summation": "plain"}
    )
    data = open_data(job, "a", None)
    names = [name for fold in FOLDS for name in record_ids(data, fold)]
    assert len(set(names)) == len(names) == sum(len(data.labels(fold)) for fold in FOLDS)
    assert hasattr(data, "record_ids")
