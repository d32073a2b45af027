"""Tables known by combinations of columns, with others or other units; different ones are never alike."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tightframe.data.columns import MOST_COLUMNS, marked
from tightframe.data.content import Content
from tightframe.data.table.sources.rows import row_content
from tightframe.privacy.ledger.entries import ALIKE, DataNoted

Table = list[list[str]]
SECRET = b"s" * 32


def noted(rows: Table, secret: bytes = SECRET) -> DataNoted:
    content = Content.of(row_content(row) for row in rows)
    return DataNoted("ward", content.digest, content.sketch, marked(content.combinations, secret))


def alike(one: DataNoted, other: DataNoted) -> int:
    """Most equal places of two combinations."""
    ours, theirs = (np.frombuffer(bytes.fromhex(each.columns or "")[8:], np.uint8) for each in (one, other))
    pairs = itertools.product(ours.reshape(-1, 64), theirs.reshape(-1, 64))
    most = max((int((a == b).sum()) for a, b in pairs), default=0)
    assert one.has_columns_of(other) == (most >= ALIKE)
    return most


def clinic(count: int, seed: int) -> Table:
    """Patients with a number of their own, ages, laboratory values, findings and an outcome."""
    generator = np.random.default_rng(seed)
    columns: list[Any] = [
        [f"P{number:05d}" for number in range(count)],
        generator.integers(18, 95, count),
        generator.integers(0, 2, count),
        np.round(generator.normal(200, 45, count)).astype(int),
        np.round(generator.normal(13.5, 1.8, count), 1),
        np.round(generator.normal(1.1, 0.3, count), 2),
        np.round(generator.normal(132, 18, count)).astype(int),
        ["" if value < 0.3 else f"{value:.1f}" for value in generator.random(count)],
        (generator.random(count) < 0.2).astype(int),
    ]
    return [list(map(str, row)) for row in zip(*columns, strict=True)]


def without(rows: Table, place: int) -> Table:
    return [row[:place] + row[place + 1 :] for row in rows]


def rounded(rows: Table, place: int) -> Table:
    return [[*row[:place], row[place] and row[place][:-1], *row[place + 1 :]] for row in rows]


def scaled(rows: Table) -> Table:
    """Every number in another unit."""

    def other(place: int, cell: str) -> str:
        return cell if place == 0 or not cell else repr(float(cell) * (place + 0.0113) - 3.3)

    return [[other(place, cell) for place, cell in enumerate(row)] for row in rows]


def replaced(rows: Table, share: float, more: int = 0) -> Table:
    """So many rows are others, each with so many more columns."""
    gone = int(share * len(rows))
    return [[*row, *["7"] * more] for row in rows[gone:] + clinic(len(rows), 99)[:gone]]


CHANGES: dict[str, Callable[[Table], Table]] = {
    "another order of the rows": lambda rows: rows[::-1],
    "a column more": lambda rows: [[str((37 * place) % 1009 / 7), *row] for place, row in enumerate(rows)],
    "columns in another order": lambda rows: [row[::-1] for row in rows],
    "other patient numbers": lambda rows: [[f"Q{7 * place}", *row[1:]] for place, row in enumerate(rows)],
    "numbers written otherwise": lambda rows: [
        [*(cell and f"{float(cell):.3f}" for cell in row[:0:-1]), row[0]] for row in [*rows[9:], *rows[:9]]
    ],
    "words among numbers, written otherwise": lambda rows: [
        ["?"] * len(rows[0]),
        *([row[0], *(cell and f"{float(cell):.3f}" for cell in row[1:])][::-1] for row in rows[1:]),
    ],
    "two columns less, one more": lambda rows: [[*row[:3], *row[5:], "x"] for row in rows],
    "all units changed": scaled,
    "all units changed, and rows shuffled": lambda rows: scaled(rows)[::-1],
    "all units changed, to three digits": lambda rows: [
        [row[0], *(cell and f"{float(cell) / 18.02:.3g}" for cell in row[1:])] for row in rows
    ],
    "all units changed, columns in another order": lambda rows: [row[::-1] for row in scaled(rows)],
    "all units changed, a row less": lambda rows: scaled(rows[1:]),
    "all units changed, a column less": lambda rows: without(scaled(rows), 4),
    "a fifth of the rows replaced, a column more": lambda rows: replaced(rows, 0.2, 1),
    "a fifth of the rows less, a column rounded": lambda rows: rounded(rows[len(rows) // 5 :], 3),
    **{f"without column {place}": lambda rows, at=place: without(rows, at) for place in range(9)},
    **{f"column {place} rounded": lambda rows, at=place: rounded(rows, at) for place in range(9)},
}


@pytest.mark.parametrize("count", [120, 1000])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_same_records_with_other_columns_are_recognised(
    change: Callable[[Table], Table], count: int
) -> None:
    rows = clinic(count, 1)
    assert alike(noted(rows), noted(change(rows))) > ALIKE + 5


def test_one_column_of_numbers_that_nobody_else_has_is_enough() -> None:
    """As of patients at a large hospital: such numbers repeat as seldom as chance would have it."""
    numbers = np.random.default_rng(5).integers(10**8, size=(2, 300)).astype(str)
    one, same = ([[number, str(row % k)] for row, number in enumerate(numbers[0])] for k in (2, 3))
    assert alike(noted(one), noted(same)) == 64
    among_words = [["?", "?"], *([f" {number}.0", flag] for number, flag in same)]
    assert alike(noted(one), noted(among_words)) >= 60
    assert alike(noted(one), noted([[number, "1"] for number in numbers[1]])) < 12


def test_which_combinations_are_kept_is_the_tables_own() -> None:
    """Those of the least hash are kept: some stay without the columns that tell most."""
    generator = np.random.default_rng(6)
    labs = [np.round(generator.normal(0, 1000 - 60 * place, 900)).astype(int) for place in range(12)]
    rows = [list(map(str, row)) for row in zip(*labs, strict=True)]
    fewer = [row[:2:-1] for row in scaled([["", *row] for row in rows])]
    by_value = [row[:2:-1] for row in rows]
    assert len(Content.of(map(row_content, rows)).combinations) == 48
    assert alike(noted(rows), noted(by_value)) == 64
    assert alike(noted(rows), noted(fewer)) > ALIKE


def test_no_column_is_added_to_those_that_suffice() -> None:
    rows = [[f"{row * row / 7:.6f}", str(row % 3), str(row % 5)] for row in range(200)]
    assert len(Content.of(map(row_content, rows)).combinations) == 1


@pytest.mark.parametrize(("share", "least", "most"), [(0.3, ALIKE, 64), (0.65, 0, ALIKE - 1), (0.9, 0, 15)])
def test_from_about_half_of_the_records_in_common(share: float, least: int, most: int) -> None:
    rows = clinic(1000, 2)
    assert least <= alike(noted(rows), noted(replaced(rows, share, 1))) <= most


def designs(count: int, seed: int) -> Iterator[tuple[str, Table]]:
    """Tables of different records in which columns are the same, or nearly, from table to table."""
    generator = np.random.default_rng(seed)
    labs, few = generator.normal(size=(4, count)), generator.integers(0, 3, (3, count))
    numbers, hours = np.arange(count), [str(np.datetime64("2026-01-01T00") + hour) for hour in range(count)]
    common = generator.normal(size=count)
    tables: dict[str, list[Any]] = {
        "row numbers twice": [numbers + 1, numbers + 1001, *few],
        "row numbers and laboratory values": [numbers, *(np.round(30 * lab).astype(int) for lab in labs)],
        "hours": [hours, *few],
        "a grid of patients and hours": [numbers // 24, numbers % 24 + 1000, few[0], np.round(5 * labs[0])],
        "yes or no": list((generator.random((40, count)) < generator.random((40, 1))).astype(int)),
        "columns that tell of each other": [np.round(20 * common + 3 * lab).astype(int) for lab in labs],
        "dates": [generator.integers(0, 365, count), generator.integers(18, 95, count), *few],
        "many unknown": [np.where(labs[0] > 0.5, np.round(lab, 1), "") for lab in labs],
    }
    for name, columns in tables.items():
        yield name, [list(map(str, row)) for row in zip(*columns, strict=True)]


@pytest.mark.whole
@pytest.mark.parametrize("count", [46, 400])
def test_other_records_of_the_same_design_are_never_taken_for_the_same(count: int) -> None:
    """The most of any draw stays far below ``ALIKE``."""
    for seed in range(6):
        for (name, one), (_, other) in zip(designs(count, seed), designs(count, 1000 + seed), strict=True):
            assert alike(noted(one), noted(other)) <= ALIKE - 9, name


def test_columns_of_few_values_or_rows_that_repeat_have_no_combination() -> None:
    rows = dict(designs(400, 0))["yes or no"]
    assert Content.of(map(row_content, rows)).combinations == ()
    twice = clinic(400, 0)[:300]
    assert Content.of(map(row_content, twice)).combinations != ()
    assert Content.of(map(row_content, twice + twice[:100])).combinations == ()
    assert Content.of(map(row_content, clinic(30, 0))).combinations == (), "so few, that chance would tell"


def lines(path: Path) -> Table:
    raw = path.read_bytes()
    return list(csv.reader((gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()))


@pytest.mark.whole
def test_real_hospitals_are_different_and_so_are_halves_of_one(real_data: Path) -> None:
    """Heart's four, and regions of the eICU demo, without the numbers that tell patients apart."""
    hearts = [
        lines(real_data / "fed_heart_disease" / f"processed.{name}.data")
        for name in ("cleveland", "hungarian", "switzerland", "va")
    ]
    header, *stays = lines(real_data / "eicu_demo" / "patient.csv.gz")
    kept = [place for place, name in enumerate(header) if not name.endswith("id")]
    region = {row[0]: row[3] for row in lines(real_data / "eicu_demo" / "hospital.csv.gz")[1:]}
    hospital = header.index("hospitalid")
    regions = [
        [[row[place] for place in kept] for row in stays if region[row[hospital]] == name]
        for name in ("Midwest", "South", "West", "Northeast")
    ]
    for sites in (hearts, regions):
        halves = [part for rows in sites if len(rows) > 150 for part in (rows[::2], rows[1::2])]
        known = [noted(rows) for rows in sites]
        for one, other in itertools.chain(
            itertools.combinations(known, 2), itertools.combinations(map(noted, halves), 2)
        ):
            assert alike(one, other) <= ALIKE - 9
        for rows, whole in zip(sites, known, strict=True):
            for place in range(0, len(rows[0]), 5):
                assert alike(whole, noted(without(rows, place))) == 64


def test_nothing_is_compared_under_another_secret_or_without_columns() -> None:
    """What the ledger keeps is a byte a place that only its secret makes."""
    rows = clinic(200, 3)
    one, other = noted(rows), noted(rows, b"t" * 32)
    assert one.secret_id != other.secret_id and not one.has_columns_of(other)
    forged = DataNoted("ward", "ab" * 32, columns=one.secret_id + (other.columns or "")[16:])
    assert alike(one, forged) < 12, "bytes of another secret agree by chance alone"
    older = DataNoted("ward", "ab" * 32)
    assert not older.has_columns_of(older) and not one.has_columns_of(older)


def test_rows_of_another_length_are_left_out_and_wide_tables_have_none() -> None:
    rows = clinic(200, 4)
    ragged = [rows[0], rows[1][:-1], *rows[1:], [*rows[2], "1"]]
    assert (
        Content.of(map(row_content, ragged)).combinations == Content.of(map(row_content, rows)).combinations
    )
    wide = [[*row, *["0"] * (MOST_COLUMNS - 9)] for row in rows]
    assert Content.of(map(row_content, wide)).combinations != ()
    assert Content.of(row_content([*row, "0"]) for row in wide).combinations == ()
    assert Content.of(iter(())).combinations == ()
