"""Whose each record is: from data sets that know, from arrays that say so, and refused where nobody knows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tightframe.data import DATASETS, get
from tightframe.data.arrays import FOLDS, ArrayData
from tightframe.data.base import record_patients
from tightframe.data.eicu import EicuOptions
from tightframe.data.eicu.silo import EicuData
from tightframe.data.eicu.twin import READMITTED, open_twin
from tightframe.data.heart import HeartOptions
from tightframe.data.heart.twin import open_twin as open_heart
from tightframe.data.image_sets import open_silos
from tightframe.errors import DataError

PART = EicuOptions(twin_scale=0.1, drugs=16)


def arrays(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for fold, count in zip(FOLDS, (6, 0, 3), strict=True):
        found |= {
            f"x_{fold}": np.zeros((count, 2)),
            f"y_{fold}": np.arange(count) % 3,
            f"patient_{fold}": np.arange(count, dtype=np.int32) // 2 + 40,
        }
    return found | changes


def opened(folder: Path, values: dict[str, Any]) -> ArrayData:
    np.savez(folder / "site.npz", **values)
    return ArrayData.read(folder / "site.npz", source="vital signs", num_classes=3)


def refused(data: Any, fold: Any = "train") -> DataError:
    with pytest.raises(DataError) as caught:
        record_patients(data, fold)
    return caught.value


def test_arrays_may_say_whose_their_records_are(tmp_path: Path) -> None:
    data = opened(tmp_path, arrays())
    data.check()
    found = record_patients(data, "train")
    assert found.dtype == np.int64 and found.tolist() == [40, 40, 41, 41, 42, 42]
    assert record_patients(data, "validation").tolist() == []
    silent = opened(tmp_path, {name: item for name, item in arrays().items() if "patient" not in name})
    silent.check()
    assert refused(silent).code == "TF-210" and "vital signs" in str(refused(silent))


@pytest.mark.parametrize("wrong", [np.arange(5), np.zeros((6, 1), np.int64), np.arange(6) / 2])
def test_patients_that_do_not_fit_the_records_are_named(tmp_path: Path, wrong: Any) -> None:
    data = opened(tmp_path, arrays(patient_train=wrong))
    with pytest.raises(DataError, match=r"^TF-206: .*one integer for each record as its patient"):
        data.check()
    # A server that leaves out the enrolment, and the check with it, gets no further.
    assert refused(opened(tmp_path, arrays(patient_train=wrong))).code == "TF-206"


def test_records_of_nobody_are_not_one_patient(tmp_path: Path) -> None:
    """Clipped as one, a further unknown patient would change their common mean by up to 2 C."""
    data = opened(tmp_path, arrays(patient_train=np.array([-1, 7, -1, 7, 8, -1])))
    data.check()  # a job that hides records takes them
    assert refused(data).code == "TF-210" and "3 of the 6 records" in str(refused(data))
    assert record_patients(data, "test").tolist() == [40, 40, 41]


def test_patients_of_one_fold_alone_are_no_patients(tmp_path: Path) -> None:
    values = arrays()
    del values["patient_test"]
    with pytest.raises(DataError, match=r"^TF-206: .*patient_FOLD for all of them or none"):
        opened(tmp_path, values)


def test_what_groups_gives_is_checked_also_of_other_peoples_data_sets(tmp_path: Path) -> None:
    data: Any = opened(tmp_path, arrays())
    for given, code in ((None, "TF-210"), ([1, 2], "TF-206"), (["a"] * 6, "TF-206"), ([0.5] * 6, "TF-206")):
        data.groups = lambda fold, given=given: given
        assert refused(data).code == code


def test_sets_without_patients_say_why() -> None:
    knowing = {item.name for item in DATASETS if not get(item.name).no_patients}
    assert knowing == {"eicu", "fed_heart_disease", "images", "table"}  # of two their contract says it
    digits = open_silos("digits", partition="iid", silos=3)["silo-0"]
    assert refused(digits).code == "TF-210"


def test_a_heart_record_is_a_patient() -> None:
    data = open_heart(0, HeartOptions())
    found = [record_patients(data, fold) for fold in FOLDS]
    together = np.concatenate(found)
    assert len(np.unique(together)) == len(together) == 303
    assert [len(item) for item in found] == [len(data.labels(fold)) for fold in FOLDS]


@pytest.mark.parametrize("changes", [{}, {"equal_sizes": True}, {"silos": "hospitals"}])
def test_generated_patients_have_several_stays_in_one_fold_of_one_hospital(changes: dict[str, Any]) -> None:
    data = open_twin(0, PART.model_copy(update=changes))
    # The records themselves, and the folds, know nothing of these patients.
    assert data.matrix.patient.tolist() == list(range(len(data.matrix)))
    places: dict[int, set[tuple[str, int]]] = {}
    stays = 0
    for fold in FOLDS:
        rows = data.rows(fold)
        for patient, hospital in zip(
            record_patients(data, fold).tolist(), data.matrix.hospital[rows].tolist(), strict=True
        ):
            places.setdefault(patient, set()).add((fold, hospital))
        stays += len(rows)
    assert all(len(found) == 1 for found in places.values())
    # Its share of further stays, up to five standard deviations.
    assert abs(1 - len(places) / stays - READMITTED) < 5 * (READMITTED / stays) ** 0.5


def test_generated_patients_are_frozen() -> None:
    groups = [open_twin(silo, PART).groups(fold) for silo in (0, 4, 5) for fold in FOLDS]
    found = hashlib.sha256(b"".join(item.astype("<i8").tobytes() for item in groups)).hexdigest()
    assert found == "4f72ad12e70e85a61ed8e4f08f1a7b3a9af397cdb7d58bb0b30d3aee5e7dd09d"
    # Repeated rows, of the same stay, are of the same patient.
    repeated: EicuData = open_twin(0, PART.model_copy(update={"oversample_minority": True}))
    rows, patients = repeated.rows("train"), repeated.groups("train")
    assert len(np.unique(rows)) < len(rows)
    assert len(set(zip(rows.tolist(), patients.tolist(), strict=True))) == len(np.unique(rows))
