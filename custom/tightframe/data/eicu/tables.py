"""The published eICU tables as stay x drug matrices.

The input is the tables patient, hospital and medication, each ``.csv`` or ``.csv.gz``, as published on
PhysioNet, demo or full release. A row is a hospital stay with a known outcome and at least one drug; a
column is a drug by its HICL code. Cancelled orders and orders without a code do not count. For the
48-hour window an order counts if it starts at most 2,880 minutes after the admission to the unit that
ordered it; orders from before the admission count as well. Torch-free.
"""

from __future__ import annotations

import csv
import io
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import PROGRESS_SECONDS, Progress
from tightframe.data.eicu import REGIONS, WINDOW_MINUTES, Window
from tightframe.data.eicu.matrix import StayMatrix, compressed
from tightframe.data.unpacked import lines_of, open_gzip
from tightframe.errors import DataError

TABLES = ("patient", "hospital", "medication")

_PATIENT = (
    "patientunitstayid",
    "patienthealthsystemstayid",
    "hospitalid",
    "hospitaldischargestatus",
    "uniquepid",
)
_HOSPITAL = ("hospitalid", "region")
_MEDICATION = ("patientunitstayid", "drugstartoffset", "drugordercancelled", "drughiclseqno")
_OUTCOMES: Mapping[str, int] = {"Alive": 0, "Expired": 1}
_CODES = 2**24
"""Upper bound of HICL codes."""
_BITS: Mapping[str, int] = {"hospitalid": 32}
"""Bits of a column's integers in a ``StayMatrix``; 64 for columns that are not listed."""
_PAIRS = 4_000_000
"""Number of (stay, drug) pairs that are collected before duplicates are dropped."""
_PROGRESS_ROWS = 100_000


@dataclass
class _Stay:
    """A hospital stay, collected from its unit stays."""

    hospital: int
    patient: str
    named: bool
    outcomes: set[int] = field(default_factory=set)
    contradictory: bool = False


@dataclass(frozen=True)
class Tables:
    """The result of reading: a matrix for each window, and the number of rows of each kind."""

    matrices: Mapping[Window, StayMatrix]
    counts: Mapping[str, int]


def locate(folder: Path) -> dict[str, Path]:
    """Find the three tables in a folder; an uncompressed file takes precedence.

    Raises:
        DataError: TF-203 if there is no such folder, TF-205 if tables are missing.
    """
    if not folder.is_dir():
        raise DataError(
            f"Expected the eICU tables in {folder}, but there is no such folder: give the folder that holds "
            "them, and check that this process may read it."
        )
    paths: dict[str, Path] = {}
    for table in TABLES:
        for name in (f"{table}.csv", f"{table}.csv.gz"):
            if (folder / name).is_file():
                paths[table] = folder / name
                break
    missing = [table for table in TABLES if table not in paths]
    if missing:
        raise DataError(
            f"Expected the tables {', '.join(TABLES)} (.csv or .csv.gz) in {folder}, but {missing} are "
            "missing: download them from PhysioNet (eICU Collaborative Research Database, or its demo).",
            code="TF-205",
        )
    return paths


def read_tables(folder: Path, windows: Sequence[Window], progress: Progress | None = None) -> Tables:
    """Read the tables once, for one window or both.

    Args:
        windows: the windows for which to make a matrix.
        progress: receives a line from time to time.

    Raises:
        DataError: TF-203 or TF-205 if they are missing, TF-204 if one is malformed, TF-206 if one cannot
            be read to its end, TF-207 for an unknown outcome, TF-208 if no stay is usable.
    """
    paths = locate(folder)
    regions = _read_hospitals(paths["hospital"])
    stays, units, counts = _read_patients(paths["patient"], regions)
    numbers = {identifier: number for number, identifier in enumerate(sorted(stays))}
    places = {unit: numbers[stay] for unit, stay in units.items() if stay in numbers}
    prescribed = _read_medication(paths["medication"], units, places, windows, counts, progress)
    listed = [(identifier, stays[identifier]) for identifier in sorted(stays)]
    matrices = {window: _matrix(listed, regions, pairs) for window, pairs in prescribed.items()}
    for window, matrix in matrices.items():
        if len(matrix) == 0:
            raise DataError(
                f"Expected stays with drugs and a known outcome in {folder} ({window}), but there are none: "
                "check that the three tables are of one release.",
                code="TF-208",
            )
    return Tables(matrices, counts)


def _read_hospitals(path: Path) -> dict[int, str]:
    """Read the region of each hospital id."""
    regions: dict[int, str] = {}
    with _rows(path, _HOSPITAL) as rows:
        for number, (identifier, region) in rows:
            region_name = region or "unknown"
            if region_name not in REGIONS:
                raise _malformed(path, number, f"a region of {list(REGIONS[:-1])} or none", region)
            regions[_integer(path, number, "hospitalid", identifier)] = region_name
    return regions


def _read_patients(
    path: Path, regions: Mapping[int, str]
) -> tuple[dict[int, _Stay], dict[int, int], dict[str, int]]:
    """Read the patient table.

    Returns:
        Usable hospital stays (one known outcome, no contradiction) by id, the hospital stay of every unit
        stay, and counts.
    """
    stays: dict[int, _Stay] = {}
    units: dict[int, int] = {}
    with _rows(path, _PATIENT) as rows:
        for number, (unit, stay, hospital, outcome, patient) in rows:
            identifier, place = (
                _integer(path, number, name, text)
                for name, text in (("patienthealthsystemstayid", stay), ("hospitalid", hospital))
            )
            if place not in regions:
                raise _malformed(path, number, "a hospitalid of the hospital table", hospital)
            if outcome and outcome not in _OUTCOMES:
                raise DataError(
                    f"Expected hospitaldischargestatus to be Alive, Expired or empty in record {number} of "
                    f"{path}, but got {outcome!r}: check that this is eICU's patient table.",
                    code="TF-207",
                )
            units[_integer(path, number, "patientunitstayid", unit)] = identifier
            person = patient or f"stay {identifier}"
            record = stays.setdefault(identifier, _Stay(place, person, bool(patient)))
            record.contradictory |= (record.hospital, record.patient) != (place, person)
            if outcome:
                record.outcomes.add(_OUTCOMES[outcome])
    counts = {
        "unit_stays": len(units),
        "hospital_stays": len(stays),
        "stays_without_outcome": sum(not item.outcomes for item in stays.values()),
        "stays_contradictory": sum(
            item.contradictory or len(item.outcomes) > 1 for item in stays.values() if item.outcomes
        ),
    }
    usable = {key: item for key, item in stays.items() if len(item.outcomes) == 1 and not item.contradictory}
    return usable, units, counts


def _read_medication(
    path: Path,
    units: Mapping[int, int],
    places: Mapping[int, int],
    windows: Sequence[Window],
    counts: dict[str, int],
    progress: Progress | None,
) -> dict[Window, NDArray[np.int64]]:
    """Read the drugs given, by window: stay number times ``_CODES`` plus HICL code, ascending, distinct.

    Args:
        units: every unit stay of the patient table.
        places: number of the usable hospital stay, by unit stay.
        counts: updated with the number of orders of each kind.
        progress: receives a line from time to time.
    """
    prescribed = {window: _Pairs() for window in windows}
    orders = cancelled = uncoded = unmatched = 0
    last_report = time.monotonic()
    with _rows(path, _MEDICATION) as rows:
        for number, (unit, start, dropped, code) in rows:
            orders += 1
            due = orders % _PROGRESS_ROWS == 0 and time.monotonic() - last_report >= PROGRESS_SECONDS
            if due and progress:
                last_report = time.monotonic()
                progress(f"read {orders} drug orders")
            if dropped != "No":
                if dropped != "Yes":
                    raise _malformed(path, number, "drugordercancelled to be Yes or No", dropped)
                cancelled += 1
                continue
            if not code:
                uncoded += 1
                continue
            drug = _integer(path, number, "drughiclseqno", code)
            if not 0 <= drug < _CODES:
                raise _malformed(path, number, f"a drughiclseqno of 0..{_CODES - 1}", code)
            key = _integer(path, number, "patientunitstayid", unit)
            place = places.get(key)
            if place is None:
                unmatched += key not in units
                continue
            early = _integer(path, number, "drugstartoffset", start) <= WINDOW_MINUTES
            for window, pairs in prescribed.items():
                if early or window == "stay":
                    pairs.add(place * _CODES + drug)
    counts.update(
        orders=orders,
        orders_cancelled=cancelled,
        orders_without_code=uncoded,
        orders_of_unknown_stays=unmatched,
    )
    return {window: pairs.sorted() for window, pairs in prescribed.items()}


class _Pairs:
    """A set of integers that needs little more memory than its distinct values."""

    def __init__(self) -> None:
        self._new = array("q")
        self._distinct: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def add(self, value: int) -> None:
        self._new.append(value)
        if len(self._new) >= _PAIRS:
            self._distinct = self.sorted()
            self._new = array("q")

    def sorted(self) -> NDArray[np.int64]:
        """Return the distinct values, ascending."""
        return np.union1d(self._distinct, np.frombuffer(self._new, dtype=np.int64))


def _matrix(
    stays: Sequence[tuple[int, _Stay]], regions: Mapping[int, str], pairs: NDArray[np.int64]
) -> StayMatrix:
    """Build the matrix of the stays with at least one drug, ordered by hospital, then by stay."""
    number, code = pairs // _CODES, pairs % _CODES
    # Patients are numbered in the order of their ids, which are not copied from the tables. A stay without a
    # patient id gets a negative number: for some purposes it may count as a patient, for others not.
    names = sorted({item.patient for _, item in stays})
    nameless = {item.patient for _, item in stays if not item.named}
    patients = {name: -1 - place if name in nameless else place for place, name in enumerate(names)}
    named = sorted(np.unique(number).tolist(), key=lambda index: (stays[index][1].hospital, stays[index][0]))
    place = np.zeros(len(stays), dtype=np.int64)
    place[named] = np.arange(len(named))
    hicl, column = np.unique(code, return_inverse=True)
    indptr, indices = compressed(place[number], column.astype(np.int64), len(named))
    chosen = [stays[index] for index in named]
    return StayMatrix(
        indptr=indptr,
        indices=indices,
        label=np.array([next(iter(item.outcomes)) for _, item in chosen], dtype=np.uint8),
        hospital=np.array([item.hospital for _, item in chosen], dtype=np.int32),
        region=np.array([regions[item.hospital] for _, item in chosen], dtype="<U9"),
        stay=np.array([identifier for identifier, _ in chosen], dtype=np.int64),
        patient=np.array([patients[item.patient] for _, item in chosen], dtype=np.int32),
        hicl=hicl.astype(np.int32),
    )


@contextmanager
def _rows(path: Path, columns: Sequence[str]) -> Iterator[Iterator[tuple[int, tuple[str, ...]]]]:
    """Open a table and give its lines as (line number, values of these columns).

    Raises:
        DataError: TF-204 if a column or a line is not as expected, TF-206 if reading fails.
    """
    try:
        with _opened(path) as stream:
            reader = csv.reader(lines_of(stream))
            header = [name.strip().lower() for name in next(reader, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                raise DataError(
                    f"Expected the columns {list(columns)} in {path}, but {missing} are missing: "
                    "check that this is eICU's table of that name, with its header.",
                    code="TF-204",
                )
            yield _chosen(path, reader, len(header), [header.index(name) for name in columns])
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"Expected to read {path} to its end, but got: {error}; download it again and compare it with "
            "PhysioNet's SHA256SUMS.txt.",
            code="TF-206",
        ) from None


def _opened(path: Path) -> IO[str]:
    """Open a table as text; the csv module needs its line ends unchanged."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(open_gzip(path), newline="", encoding="utf-8-sig")
    return path.open(newline="", encoding="utf-8-sig")


def _chosen(
    path: Path, reader: Iterator[list[str]], width: int, places: Sequence[int]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    for number, row in enumerate(reader, start=2):
        if len(row) != width:
            raise _malformed(path, number, f"{width} values", f"{len(row)}")
        yield number, tuple([row[place] for place in places])


def _integer(path: Path, number: int, column: str, text: str) -> int:
    bits = _BITS.get(column, 64)
    try:
        value = int(text)
    except ValueError:
        raise _malformed(path, number, f"an integer as {column}", text) from None
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise _malformed(path, number, f"an integer of {bits} bits as {column}", text)
    return value


def _malformed(path: Path, number: int, expected: str, actual: str) -> DataError:
    return DataError(
        f"Expected {expected} in record {number} of {path}, but got {actual!r}: download the table again.",
        code="TF-204",
    )
