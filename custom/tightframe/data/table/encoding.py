"""Convert a site's text to records' values by the contract, and find every row that breaks it. Torch-free."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.contract import FOLD_CODES, Column, Contract, MultiLabel, Survival
from tightframe.data.forms import TableForm, named_columns
from tightframe.data.table import TableSite, Unit
from tightframe.data.table.sources.rows import Cells, Rows
from tightframe.errors import DataError
from tightframe.phases import UNKNOWN

SHOWN_ROWS = 10


@dataclass(frozen=True)
class Finding:
    """Rows that break one rule of a contract; contains no value of a record.

    Attributes:
        column: the contract's name of it; empty for a rule of whole rows.
        rule: the broken rule, in words.
    """

    column: str
    rule: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        """Return one line: the column, the rule, the number of rows, and the first of them."""
        where = f"{self.column}: " if self.column else ""
        return f"{where}{self.rule}: {rows_in_words(self.rows)}"


def rows_in_words(rows: Sequence[int]) -> str:
    """Return the number of rows, and the first row numbers.

    >>> rows_in_words([4]), rows_in_words([2, 3])
    ('1 row (4)', '2 rows (2, 3)')
    """
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", ..." if len(rows) > SHOWN_ROWS else "")
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'} ({shown})"


BOOLEANS: Mapping[str, float] = {
    **{"true": 1.0, "yes": 1.0, "1": 1.0},
    **{"false": 0.0, "no": 0.0, "0": 0.0},
}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}( .*)?")
_GROUPED = re.compile(r"[+-]?\d{1,3}([.,'\u2019 ]\d{3})+([.,]\d+)?")
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.I)
_MISSING = "no value, which the contract refuses"
_LARGEST = sys.float_info.max
_TINY, _ENOUGH = 0.01, 10

_AS_IT_IS = TableSite(file=Path("/table.csv"))
"""An entry that maps nothing."""

Faults = dict[str, list[int]]
"""Rule in words -> places of the rows that break it."""


@dataclass(frozen=True)
class Encoded:
    """Rows of a table as a contract's values, which are meaningless for rows in ``broken``.

    Attributes:
        features: float32 (n, D).
        labels: int64, classes (n,), or findings (n, K): 1, 0 or ``UNKNOWN``.
        folds: index of each row's fold in ``FOLD_CODES``, (n,); None without such a column.
        records, patients: names, (n,); None without such a column.
        broken: True for rows that break the contract, (n,).
        numbers: of the rows in their table, (n,).
        where: the source.
        missing: True where a row has no value of a column, (n, K).
        survival: time as a fraction of the longest, and 1 where the event happened, (n, 2); None without.
    """

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    folds: NDArray[np.int64] | None
    records: list[str] | None
    patients: list[str] | None
    broken: NDArray[np.bool_]
    findings: tuple[Finding, ...]
    numbers: NDArray[np.int64]
    where: str
    missing: NDArray[np.bool_]
    survival: NDArray[np.float64] | None = None


def check_mapping(contract: Contract, site: TableSite) -> None:
    """Refuse an entry whose names are not the contract's.

    Raises:
        DataError: TF-218, listing all problems.
    """
    levels = _levels(contract)
    problems = []
    if site.contract is not None and site.contract != contract.sha256():
        problems.append(
            f"`contract`: this site takes part with the contract {site.contract[:16]}... only, but the job "
            f"has {contract.sha256()[:16]}...; whoever answers for the records decides"
        )
    for own, column in site.columns.items():
        if column not in contract.wanted:
            problems.append(f"`columns`: {own!r} is mapped to {column!r}, which the contract does not have")
    for column in site.codes.keys() - levels.keys():
        problems.append(f"`codes`: the contract has no codes for a column {column!r}")
    for column, codes in site.codes.items():
        if column in levels and (unknown := sorted(set(codes.values()) - levels[column])):
            known = sorted(levels[column])
            problems.append(f"`codes`: {column!r} has {known[:20]}, but codes are mapped to {unknown[:20]}")
    timed = () if contract.survival is None else contract.survival.columns
    numbers = {item.column for item in (*contract.columns, *timed) if item.kind == "number"}
    for column in sorted(site.units.keys() - numbers):
        problems.append(f"`units`: the contract has no number {column!r}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise DataError(f"Expected the site's entry to fit the job's contract, but{listed}", code="TF-218")


def is_number(text: str, decimal: str = ".") -> bool:
    """Check whether a cell is a number: only digits, with one decimal mark and an exponent."""
    return _NUMBER.fullmatch(_pointed(text, decimal)) is not None


def _pointed(text: str, decimal: str) -> str:
    return text if decimal == "." else text.replace(".", "x").replace(decimal, ".")


def other_mark(rows: Rows, contract: Contract, site: TableSite) -> list[str]:
    """Return the columns of numbers whose values are mostly numbers only with the other decimal mark."""
    other = "." if site.decimal == "," else ","
    columns = []
    for item in contract.columns:
        cells = [cell for cell in rows.cells[item.column] if isinstance(cell, str)]
        marked = sum(is_number(cell, other) and not is_number(cell, site.decimal) for cell in cells)
        if item.kind == "number" and marked > len(cells) / 2:
            columns.append(item.column)
    return columns


def narrow(encoded: Encoded, contract: Contract) -> dict[str, float]:
    """Return each column of numbers -> fraction of its range that contains all its values, if that is tiny.

    That suggests another unit, such as grams where the contract has milligrams.
    """
    kept, shares, place = ~encoded.broken, {}, 0
    for index, item in enumerate(contract.columns):
        values = encoded.features[kept & ~encoded.missing[:, index], place]
        if item.kind == "number" and len(values) >= _ENOUGH and np.ptp(values) / 2 < _TINY:
            shares[item.column] = float(np.ptp(values)) / 2
        place += len(item.features)
    return shares


def no_numbers(rows: Rows, contract: Contract, site: TableSite) -> dict[str, list[str]]:
    """Return each column of numbers -> its other texts, for the site's own eyes.

    Where most are texts, only those known to ``advice`` are returned, so that no notes are shown.
    """
    timed = () if contract.survival is None else contract.survival.columns
    texts = {}
    for item in (*contract.columns, *timed):
        cells = [cell for cell in rows.cells[item.column] if isinstance(cell, str)]
        others = [cell for cell in cells if not is_number(cell, site.decimal)]
        if len(others) >= len(cells) / 2:
            others = [cell for cell in others if advice(cell) != _NO_VALUE]
        if item.kind == "number" and others:
            texts[item.column] = sorted(set(others))
    return texts


_NO_VALUE = "name in `missing` what stands for no value"


def advice(text: str) -> str:
    """Return advice about a text in a column of numbers.

    >>> advice("1,075.2"), advice("k.A.")
    ('write it without marks between thousands', 'name in `missing` what stands for no value')
    """
    if DATE.fullmatch(text):
        return "a date: give an age or a number of days"
    if _GROUPED.fullmatch(text):
        return "write it without marks between thousands"
    if _INFINITE.fullmatch(text):
        return "not finite: correct it, or leave the row out"
    return _NO_VALUE


def unknown_codes(rows: Rows, contract: Contract, site: TableSite) -> dict[str, list[str]]:
    """Return each column with codes -> codes unknown to the contract, for the site's own eyes."""
    timed = () if contract.survival is None else contract.survival.columns
    booleans = {item.column for item in (*contract.columns, *timed) if item.kind == "boolean"}
    if isinstance(contract.label, MultiLabel):
        booleans |= set(contract.label.columns)
    codes_of = {}
    for column, known in _levels(contract).items():
        codes = site.codes.get(column, {})
        mapped = {cell: codes.get(cell, cell) for cell in set(rows.cells[column]) if cell is not None}
        lower = column in booleans
        unknown = [cell for cell, code in mapped.items() if (code.lower() if lower else code) not in known]
        if unknown:
            codes_of[column] = sorted(unknown)
    return codes_of


def _levels(contract: Contract) -> dict[str, set[str]]:
    """Return each column with codes -> its codes."""
    levels = {item.column: set(item.vocabulary) for item in contract.columns if item.kind == "category"}
    levels |= {item.column: set(BOOLEANS) for item in contract.columns if item.kind == "boolean"}
    if contract.survival is not None:
        levels[contract.survival.event] = set(BOOLEANS)
    label = contract.label
    if isinstance(label, MultiLabel):
        levels |= {column: set(BOOLEANS) for column in label.columns}
    else:
        levels[label.column] = {item.code for item in label.classes}
    if contract.fold is not None:
        levels[contract.fold.column] = set(FOLD_CODES)
    return levels


def encode(rows: Rows, contract: Contract, site: TableSite) -> Encoded:
    """Return the values of all rows, and the rows that break the contract."""
    numbers = np.asarray(rows.numbers, dtype=np.int64)
    count = len(numbers)
    broken = np.zeros(count, dtype=np.bool_)
    findings: list[Finding] = []
    if rows.ragged:
        findings.append(Finding("", "another number of cells than the header", tuple(rows.ragged)))

    def note(column: str, faults: Faults) -> None:
        for rule, places in faults.items():
            broken[places] = True
            findings.append(Finding(column, rule, tuple(numbers[places].tolist())))

    features, of_columns = features_of(rows.cells, count, contract, site)
    for name, faults in of_columns.items():
        note(name, faults)
    labels, of_labels = _labels(rows.cells, contract, site)
    for name, faults in of_labels.items():
        note(name, faults)
    survival = None
    if contract.survival is not None:
        survival = _survival(rows.cells, contract.survival, site, note)
    folds = None
    if contract.fold is not None:
        fold_codes = {code: float(place) for place, code in enumerate(FOLD_CODES)}
        column_of_fold = contract.fold.column
        folds, faults = _codes(
            rows.cells[column_of_fold], fold_codes, site.codes.get(column_of_fold, {}), "fold"
        )
        note(column_of_fold, faults)
    named = {}
    for role, column_of_role in (("record", contract.record), ("patient", contract.patient)):
        if column_of_role is not None:
            named[role], faults = _names(rows.cells[column_of_role], once=role == "record")
            note(column_of_role, faults)
    return Encoded(
        features=features,
        labels=labels.astype(np.int64),
        folds=None if folds is None else folds.astype(np.int64),
        records=named.get("record"),
        patients=named.get("patient"),
        broken=broken,
        findings=tuple(findings),
        numbers=numbers,
        where=rows.where,
        missing=_missing(rows.cells, count, contract),
        survival=survival,
    )


def _survival(
    cells: Mapping[str, Cells], timed: Survival, site: TableSite, note: Callable[[str, Faults], None]
) -> NDArray[np.float64]:
    """Return times as parts of the longest, and events, (n, 2), and note faults.

    Args:
        note: takes a column's name and faults.
    """
    time, event = timed.columns
    unit, longer = site.units.get(time.column), timed.beyond == "censor"
    numbers, faults = _numbers(cells[time.column], time, unit, site.decimal, longer=longer)
    note(time.column, faults)
    read, faults = _column(cells[event.column], event, site)
    note(event.column, faults)
    times = (numbers + 1) / 2
    return np.stack([np.minimum(times, 1.0), np.where(times > 1.0, 0.0, read[:, 0])], axis=1)


def _labels(
    cells: Mapping[str, Cells], contract: Contract, site: TableSite
) -> tuple[NDArray[np.float64], dict[str, Faults]]:
    """Return the classes of rows, (n,), or their findings, (n, K), and the faults of each column."""
    label, faults = contract.label, {}
    if not isinstance(label, MultiLabel):
        classes = {item.code: float(place) for place, item in enumerate(label.classes)}
        codes = site.codes.get(label.column, {})
        values, faults[label.column] = _codes(cells[label.column], classes, codes, "class")
        return values, faults
    parts = []
    for item in label.findings:
        codes = site.codes.get(item.column, {})
        empty = {"refuse": None, "absent": 0.0, "unknown": float(UNKNOWN)}[item.missing]
        read, faults[item.column] = _codes(
            cells[item.column], BOOLEANS, codes, "boolean", lower=True, empty=empty
        )
        parts.append(read)
    return np.stack(parts, axis=1), faults


def _missing(cells: Mapping[str, Cells], count: int, contract: Contract) -> NDArray[np.bool_]:
    """Return where rows have no value in a column, (n, K)."""
    columns = [[cell is None for cell in cells[column.column]] for column in contract.columns]
    return np.array(columns, dtype=np.bool_).reshape(len(columns), count).T


def features_of(
    cells: Mapping[str, Cells], count: int, contract: Contract, site: TableSite
) -> tuple[NDArray[np.float32], dict[str, Faults]]:
    """Return the values of rows, (n, D), and the places of the rows that break each rule of a column."""
    parts, faults = [np.zeros((count, 0), np.float32)], {}
    for column in contract.columns:
        values, faults[column.column] = _column(cells[column.column], column, site)
        parts.append(values.astype(np.float32))
    return np.concatenate(parts, axis=1), faults


def form(options: Any) -> TableForm:
    """Return the conversion of a row with the contract's own names and codes to a record, for inference."""
    contract: Contract = options.contract
    names = [column.column for column in contract.columns]

    def encoded(columns: Sequence[str], values: Sequence[str]) -> tuple[NDArray[np.float32], list[str]]:
        cells: dict[str, Cells] = {
            column: [value or None] for column, value in zip(columns, values, strict=True)
        }
        features, problems = features_of(cells, 1, contract, _AS_IT_IS)
        return features[0], [f"{name}: {rule}" for name, faults in problems.items() for rule in faults]

    text = f"the columns {', '.join(names)} of the contract ({contract.title}), by its names, codes and units"
    return TableForm(partial(named_columns, names), encoded, text, values=contract.features)


def _column(cells: Cells, column: Column, site: TableSite) -> tuple[NDArray[np.float64], Faults]:
    """Return the values of a column's features, (n, k), and its faults."""
    codes = site.codes.get(column.column, {})
    if column.kind == "number":
        values, faults = _numbers(cells, column, site.units.get(column.column), site.decimal)
        return _with_indicator(values[:, None], cells, column), faults
    if column.kind == "boolean":
        known = dict(BOOLEANS)
        read, faults = _codes(cells, known, codes, "boolean", lower=True, empty=_empty(column))
        return _with_indicator(read[:, None], cells, column), faults
    known = {level: float(place) for place, level in enumerate(column.vocabulary)}
    read, faults = _codes(cells, known, codes, "level", empty=_empty(column))
    single = read[:, None] == np.arange(1, len(column.vocabulary))
    return _with_indicator(single.astype(np.float64), cells, column), faults


def _with_indicator(values: NDArray[np.float64], cells: Cells, column: Column) -> NDArray[np.float64]:
    if column.missing != "indicator":
        return values
    missing = np.array([cell is None for cell in cells], dtype=np.float64)
    return np.concatenate([values, missing[:, None]], axis=1)


def _empty(column: Column) -> float | None:
    """Return the code of a missing level or boolean; None if it is refused."""
    if column.missing == "refuse":
        return None
    if column.missing == "indicator":
        return 0.0
    return (
        float(column.vocabulary.index(column.fill))
        if isinstance(column.fill, str)
        else float(bool(column.fill))
    )


def _numbers(
    cells: Cells, column: Column, unit: Unit | None, decimal: str, *, longer: bool = False
) -> tuple[NDArray[np.float64], Faults]:
    """Return a number's values, scaled by its range to [-1, 1], (n,), and its faults.

    With ``longer`` values above the range are no faults, and scaled likewise.
    """
    low, high = column.low, column.high
    assert low is not None and high is not None  # noqa: S101 - the contract has checked
    fill = (low + high) / 2 if column.fill is None else float(column.fill)
    values = np.full(len(cells), fill, dtype=np.float64)
    faults: Faults = {}
    limits = f"outside {low:g} to {high:g}" + (f" {column.unit}" if column.unit else "")
    factor, offset = (1.0, 0.0) if unit is None else (unit.factor, unit.offset)
    for place, cell in enumerate(cells):
        if cell is None:
            if column.missing == "refuse":
                faults.setdefault(_MISSING, []).append(place)
            continue
        text = _pointed(cell, decimal)
        if not _NUMBER.fullmatch(text):
            faults.setdefault("no number", []).append(place)
            continue
        value = float(text) * factor + offset
        if low <= value <= (_LARGEST if longer else high):
            values[place] = value
        else:
            faults.setdefault(limits, []).append(place)
    return 2.0 * (values - low) / (high - low) - 1.0, faults


def _codes(
    cells: Cells,
    known: Mapping[str, float],
    codes: Mapping[str, str],
    what: str,
    *,
    lower: bool = False,
    empty: float | None = None,
) -> tuple[NDArray[np.float64], Faults]:
    """Return the index of each cell's code among the known ones, (n,), and the faults."""
    values = np.zeros(len(cells), dtype=np.float64)
    faults: Faults = {}
    for place, cell in enumerate(cells):
        if cell is None:
            if empty is None:
                faults.setdefault(_MISSING, []).append(place)
            else:
                values[place] = empty
            continue
        code = codes.get(cell, cell)
        value = known.get(code.lower() if lower else code)
        if value is None:
            faults.setdefault(f"a code that is no {what} of the contract", []).append(place)
        else:
            values[place] = value
    return values, faults


def _names(cells: Cells, *, once: bool) -> tuple[list[str], Faults]:
    """Return the names in a column, and the rows without one, or with one that an earlier row has."""
    faults: Faults = {}
    earlier: set[str] = set()
    for place, cell in enumerate(cells):
        if cell is None:
            faults.setdefault("no name", []).append(place)
        elif once and cell in earlier:
            faults.setdefault("the name of an earlier row", []).append(place)
        elif once:
            earlier.add(cell)
    return [cell or "" for cell in cells], faults
