"""Small eICU tables, made up, with PhysioNet's columns."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENT = (
    *("patientunitstayid", "patienthealthsystemstayid", "gender"),
    *("hospitalid", "hospitaldischargestatus", "uniquepid"),
)
HOSPITAL = ("hospitalid", "numbedscategory", "teachingstatus", "region")
MEDICATION = (
    *("medicationid", "patientunitstayid", "drugstartoffset"),
    *("drugordercancelled", "drugname", "drughiclseqno"),
)


def unit(number: int, stay: int, hospital: int, outcome: str = "Alive", patient: str = "") -> list[Any]:
    """A unit stay."""
    return [number, stay, "Female", hospital, outcome, patient or f"p-{stay}"]


def order(unit: int, hicl: int | str, start: int = 0, cancelled: str = "No") -> list[Any]:
    """A drug order; the name has a comma, as the published ones do."""
    return [1, unit, start, cancelled, 'HEPARIN 5,000 "U"', hicl]


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table, compressed if its name says so."""
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(header)
    writer.writerows(rows)
    data = stream.getvalue().encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def write_tables(
    folder: Path,
    patients: Sequence[Sequence[Any]],
    hospitals: Sequence[Sequence[Any]],
    orders: Sequence[Sequence[Any]],
    *,
    end: str = ".csv",
) -> Path:
    """The three tables in a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / f"patient{end}", PATIENT, patients)
    write(folder / f"hospital{end}", HOSPITAL, hospitals)
    write(folder / f"medication{end}", MEDICATION, orders)
    return folder


def clinic(folder: Path) -> Path:
    """Eight hospitals in two regions: 1 to 4 with 30 stays each, 5 to 8 with 10, every fifth stay a death."""
    patients, orders = [], []
    for hospital in range(1, 9):
        for index in range(30 if hospital <= 4 else 10):
            stay = hospital * 1000 + index
            patients.append(unit(stay, stay, hospital, "Expired" if index % 5 == 0 else "Alive"))
            orders += [order(stay, 100 + hospital), order(stay, 200), order(stay, 300 + index % 5)]
    places = [[hospital, "<100", "f", "Midwest" if hospital % 2 else "South"] for hospital in range(1, 9)]
    return write_tables(folder, patients, places, orders)
