from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.made_eicu import HOSPITAL, MEDICATION, PATIENT, order, unit, write, write_tables

from tightframe.data.eicu import Window
from tightframe.data.eicu import tables as eicu_tables
from tightframe.data.eicu.matrix import StayMatrix
from tightframe.data.eicu.tables import read_tables
from tightframe.errors import DataError

HOSPITALS = [[7, "<100", "f", "South"], [3, "", "", ""]]


@pytest.mark.parametrize(
    ("window", "reference", "stays", "drugs"),
    [("48h", "48h", 1555, 920), ("stay", "all", 1558, 1012)],
)
def test_the_demo_gives_the_reference_matrices(
    real_data: Path, window: Window, reference: str, stays: int, drugs: int
) -> None:
    """Made by other code: the same stays, drugs, labels and regions, in the same order."""
    matrix = read_tables(real_data / "eicu_demo", (window,)).matrices[window]
    assert (len(matrix), len(matrix.hicl), int(matrix.label.sum())) == (stays, drugs, 136)
    assert matrix.counts()["hospitals"] == 144
    path = real_data / "eicu_demo" / f"eicu_demo_drug_mortality_{reference}.npz"
    with np.load(path, allow_pickle=True) as stored:  # its texts are objects
        for ours, theirs in (
            *((name, name) for name in ("indptr", "indices", "label", "stay", "region", "hicl")),
            ("hospital", "hospitalid"),
        ):
            assert np.array_equal(getattr(matrix, ours), stored[theirs]), ours


def test_the_demos_rows_are_counted(real_data: Path) -> None:
    both = read_tables(real_data / "eicu_demo", ("48h", "stay"))
    assert set(both.matrices) == {"48h", "stay"}
    counts = both.counts
    assert (counts["unit_stays"], counts["hospital_stays"], counts["stays_without_outcome"]) == (
        2520,
        2174,
        25,
    )
    assert counts["orders"] == 75604
    # Published facts: 19 patients of the demo were in two hospitals, some of them with drugs in both.
    matrix = both.matrices["stay"]
    pairs = {*zip(matrix.patient.tolist(), matrix.hospital.tolist(), strict=True)}
    assert 0 < len(pairs) - len({patient for patient, _ in pairs}) <= 19


@pytest.mark.parametrize("end", [".csv", ".csv.gz"])
def test_what_counts_as_given(tmp_path: Path, end: str) -> None:
    patients = [
        unit(1, 10, 7, "Expired", "p-1"),
        unit(2, 10, 7, "Expired", "p-1"),  # another unit, the same hospital stay
        unit(3, 11, 3, "Alive", "p-1"),  # the same patient elsewhere
        unit(4, 12, 7, "", "p-2"),  # outcome unknown
        unit(5, 13, 7, "Alive", "p-3"),  # no usable order
        unit(6, 14, 3, "Alive", ""),
    ]
    orders = [
        order(1, 500, 2880),
        order(1, 500, 10),  # again: once in the matrix
        order(1, 400, 2881),
        order(2, 90, -60),  # started before the unit
        order(3, 500, 0),
        order(3, 77, 0, "Yes"),
        order(3, "", 0),
        order(4, 600, 0),
        order(5, 600, 0, "Yes"),
        order(6, 500, 9000),
        order(99, 700, 0),  # of no stay that the patient table has
    ]
    tables = read_tables(write_tables(tmp_path / "t", patients, HOSPITALS, orders, end=end), ("48h", "stay"))
    stay, early = tables.matrices["stay"], tables.matrices["48h"]
    assert stay.hicl.tolist() == [90, 400, 500]
    assert [stay.hospital.tolist(), stay.stay.tolist()] == [[3, 3, 7], [11, 14, 10]]
    assert stay.label.tolist() == [0, 0, 1]
    assert stay.region.tolist() == ["unknown", "unknown", "South"]
    assert stay.dense(range(3)).tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1]]
    assert stay.patient[0] == stay.patient[2] != stay.patient[1]
    assert early.hicl.tolist() == [90, 500]
    assert early.dense(range(2)).tolist() == [[0, 1], [1, 1]]
    assert early.stay.tolist() == [11, 10]
    assert tables.counts == {
        "unit_stays": 6,
        "hospital_stays": 5,
        "stays_without_outcome": 1,
        "stays_contradictory": 0,
        "orders": 11,
        "orders_cancelled": 2,
        "orders_without_code": 1,
        "orders_of_unknown_stays": 1,
    }


def test_stays_that_contradict_themselves_are_left_out_and_counted(tmp_path: Path) -> None:
    patients = [
        unit(1, 10, 7),
        unit(2, 10, 3),  # two hospitals
        unit(3, 11, 7, "Alive"),
        unit(4, 11, 7, "Expired"),  # two outcomes
        unit(5, 12, 7, "Alive", "p-1"),
        unit(6, 12, 7, "Alive", "p-2"),  # two patients
        unit(7, 13, 7, "Expired"),
        unit(8, 13, 7, ""),  # one outcome, once not said
    ]
    folder = write_tables(tmp_path, patients, HOSPITALS, [order(number, 5) for number in range(1, 9)])
    tables = read_tables(folder, ("48h",))
    assert tables.matrices["48h"].stay.tolist() == [13]
    assert tables.matrices["48h"].label.tolist() == [1]
    assert tables.counts["stays_contradictory"] == 3


def test_patients_without_an_id_are_not_one_patient(tmp_path: Path) -> None:
    patients = [[*unit(number, number, 7)[:-1], ""] for number in (1, 2)]
    matrix = read_tables(
        write_tables(tmp_path, patients, HOSPITALS, [order(1, 5), order(2, 5)]), ("48h",)
    ).matrices["48h"]
    assert len(set(matrix.patient.tolist())) == 2


def test_bounded_memory_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    patients = [unit(number, number, 7) for number in range(20)]
    drawn = rng.integers(0, 20, (400, 2))
    folder = write_tables(tmp_path, patients, HOSPITALS, [order(int(a), int(b)) for a, b in drawn])

    def dense() -> list[list[float]]:
        matrix: StayMatrix = read_tables(folder, ("stay",)).matrices["stay"]
        return matrix.dense(range(len(matrix))).tolist()

    expected = np.zeros((20, 20))
    expected[drawn[:, 0], drawn[:, 1]] = 1
    assert dense() == expected.tolist()
    monkeypatch.setattr(eicu_tables, "_PAIRS", 7)
    assert dense() == expected.tolist()


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr("tightframe.data.eicu.tables.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(eicu_tables, "_PROGRESS_ROWS", 2)
    lines: list[str] = []
    orders = [order(1, number) for number in range(5)]
    read_tables(write_tables(tmp_path, [unit(1, 1, 7)], HOSPITALS, orders), ("stay",), lines.append)
    assert lines == ["read 2 drug orders", "read 4 drug orders"]


def good(folder: Path) -> Path:
    return write_tables(folder, [unit(1, 10, 7), unit(2, 11, 3)], HOSPITALS, [order(1, 5), order(2, 6)])


def patients(*rows: list[Any]) -> Callable[[Path], None]:
    return lambda folder: write(folder / "patient.csv", PATIENT, [unit(1, 10, 7), *rows])


def orders(*rows: list[Any]) -> Callable[[Path], None]:
    return lambda folder: write(folder / "medication.csv", MEDICATION, [order(1, 5), *rows])


def cut_off(folder: Path) -> None:
    data = gzip.compress((folder / "medication.csv").read_bytes() * 50)
    (folder / "medication.csv").unlink()
    (folder / "medication.csv.gz").write_bytes(data[: len(data) // 2])


def bent(folder: Path) -> None:
    (folder / "medication.csv").unlink()
    (folder / "medication.csv.gz").write_bytes(b"no gzip at all")


@pytest.mark.parametrize(
    ("harm", "code", "said"),
    [
        (lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(), "TF-203", "no such folder"),
        (lambda f: (f / "hospital.csv").unlink(), "TF-205", r"\['hospital'\] are missing"),
        (lambda f: write(f / "patient.csv", PATIENT[1:], []), "TF-204", r"\['patientunitstayid'\] are"),
        (lambda f: (f / "hospital.csv").write_text(""), "TF-204", r"\['hospitalid', 'region'\] are"),
        (patients(unit(2, 11, 9)), "TF-204", "hospitalid of the hospital table in record 3 .*'9'"),
        (patients(unit(2, 11, 7, "Dead")), "TF-207", "record 3 .*'Dead'"),
        (patients(["x", *unit(2, 11, 7)[1:]]), "TF-204", "an integer as patientunitstayid .*'x'"),
        (patients(unit(2, 11, 7)[:-1]), "TF-204", "6 values in record 3 .*'5'"),
        (
            lambda f: write(f / "hospital.csv", HOSPITAL, [[7, "", "", "Texas"]]),
            "TF-204",
            "region of .*'Texas'",
        ),
        (orders(order(1, 5, 0, "Maybe")), "TF-204", "Yes or No in record 3 .*'Maybe'"),
        (orders(order(1, "5.5")), "TF-204", "an integer as drughiclseqno in record 3 .*'5.5'"),
        (orders(order(1, -4)), "TF-204", "drughiclseqno of 0.*'-4'"),
        (orders([1, 1, "", "No", "", 5]), "TF-204", "an integer as drugstartoffset .*''"),
        (patients(unit(2, 2**63, 7)), "TF-204", "64 bits as patienthealthsystemstayid in record 3 .*5808'"),
        (patients(unit(2, -(2**63) - 1, 7)), "TF-204", "64 bits as patienthealthsystemstayid in record 3"),
        (
            lambda f: [
                write(f / "hospital.csv", HOSPITAL, [[2**31, "", "", "South"]]),
                write(f / "patient.csv", PATIENT, [unit(1, 10, 2**31)]),
            ],
            "TF-204",
            "32 bits as hospitalid in record 2 .*hospital.csv.*'2147483648'",
        ),
        (cut_off, "TF-206", "to its end"),
        (bent, "TF-206", "to its end"),
        (lambda f: (f / "medication.csv").write_bytes(b"\xff\xfe\x00"), "TF-206", "to its end"),
        (lambda f: write(f / "medication.csv", MEDICATION, []), "TF-208", "there are none"),
        (
            lambda f: write(f / "patient.csv", PATIENT, [unit(1, 10, 7, ""), unit(2, 11, 3, "")]),
            "TF-208",
            "there are none",
        ),
    ],
)
def test_every_fault_has_its_code(
    tmp_path: Path, harm: Callable[[Path], object], code: str, said: str
) -> None:
    folder = good(tmp_path / "tables")
    assert len(read_tables(folder, ("48h",)).matrices["48h"]) == 2
    harm(folder)
    with pytest.raises(DataError, match=rf"^{code}: [\s\S]*{said}"):
        read_tables(folder, ("48h",))
