"""Records of a table as cells: each column's bins or levels, by class, for statistics. Torch-free.

Findings (multi-label) are columns of booleans here, and all records are one class: tables by several findings
would overlap, and their differences would disclose single records.

The contract fixes all of it: a number's range is cut into bins of one width, a category has its levels, a
boolean false and true, and each column has one more cell, the last, for records without a value.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tightframe.data.contract import Column, Contract, MultiLabel
from tightframe.data.table.silo import TableData, content_names
from tightframe.phases import UNKNOWN

ALL = ("all records",)
"""The one class of records with findings."""
SALT = "tightframe-untold-v1"
_NEXT = 1e-5
"""Part of a bin's width below an edge within which a value counts to the next bin: values are float32."""

_LONGEST = 80
"""Characters of a name within the name of a level, which has 200 at most."""


@dataclass(frozen=True)
class Place:
    """Position of a column's cells.

    Attributes:
        start, end: its first cell, and the one after its last; the last one counts records without a value.
        number: place among the columns of numbers; None for others.
    """

    column: Column
    start: int
    end: int
    number: int | None

    @property
    def missing(self) -> int:
        """The cell of records without a value."""
        return self.end - 1


@dataclass(frozen=True)
class Layout:
    """The cells of a contract.

    Attributes:
        bins: of a number.
        ends: of the bins of time, (B,), the last one the longest time; empty without ``survival``.
    """

    contract: Contract
    bins: int
    ends: tuple[float, ...] = ()

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The contract's columns, one for each finding, and one of times with and without event."""
        label = self.contract.label
        findings = label.titles if isinstance(label, MultiLabel) else ()
        booleans = (Column(column=title, kind="boolean") for title in findings)
        return (*self.contract.columns, *booleans, *self._times())

    def _times(self) -> tuple[Column, ...]:
        """Return one column with a level for each bin of time with the event, then for each without."""
        if (timed := self.contract.survival) is None:
            return ()
        bins = list(zip((0.0, *self.ends), self.ends, strict=False))
        levels = [
            f"{what[:_LONGEST]}, {timed.time[:_LONGEST]} {low:.6g} to {high:.6g}"
            for what in (timed.event, "censored")
            for low, high in bins
        ]
        return (Column(column=f"{timed.time}, {timed.event}", kind="category", vocabulary=tuple(levels)),)

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the classes."""
        label = self.contract.label
        return ALL if isinstance(label, MultiLabel) else label.titles

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The columns' cells, in order."""
        places, start, numbers = [], 0, 0
        for column in self.columns:
            end = start + len(self.names(column)) + 1
            places.append(Place(column, start, end, numbers if column.kind == "number" else None))
            start, numbers = end, numbers + (column.kind == "number")
        return tuple(places)

    def names(self, column: Column) -> tuple[str, ...]:
        """Return the names of a column's levels, or the lower edges of its bins."""
        if column.kind == "number":
            return tuple(f"{edge:.6g}" for edge in self.edges(column)[:-1])
        return ("false", "true") if column.kind == "boolean" else column.vocabulary

    def edges(self, column: Column) -> list[float]:
        """Return the edges of a number's bins, in its unit."""
        assert column.low is not None and column.high is not None  # noqa: S101 - the contract has checked
        width = (column.high - column.low) / self.bins
        return [column.low + width * place for place in range(self.bins)] + [column.high]

    @property
    def latest_first(self) -> tuple[int, ...]:
        """Places of the cells of times among their own, the latest first; empty without times."""
        bins = len(self.ends)
        return tuple(place for last in reversed(range(bins)) for place in (last, bins + last))

    @property
    def cells(self) -> int:
        """M, cells of a class."""
        return self.places[-1].end

    @property
    def numbers(self) -> int:
        """N, columns of numbers."""
        return sum(place.number is not None for place in self.places)

    @property
    def classes(self) -> int:
        """C."""
        return len(self.titles)


@dataclass(frozen=True)
class Tabulated:
    """Records as cells.

    Attributes:
        layout: of the cells.
        labels: int64 (n,).
        cells: of each record in each column, counted from the column's first, int64 (n, K).
        values: of each number, in its range from -1 to 1, (n, N); 0 where there is none.
        names: of the records; of their values where the contract has no column of names.
        owners: number of each record's patient, (n,); of the record where patients are unknown.
    """

    layout: Layout
    labels: NDArray[np.int64]
    cells: NDArray[np.int64]
    values: NDArray[np.float64]
    names: list[str]
    owners: NDArray[np.int64]

    def order(self, purpose: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number for each of these records, by which some are chosen: the same in every job.

        Args:
            purpose: name of the column whose few missing values the chosen hide; empty for one of each
                patient.
            rows: places of the records.
        """
        names = [self.names[row] for row in rows]
        return np.array(
            [
                int.from_bytes(hashlib.sha256(f"{SALT}/{purpose}/{name}".encode()).digest()[:7], "big")
                for name in names
            ],
            dtype=np.int64,
        )

    def one_of_each_patient(self) -> Tabulated:
        """Return one record of each patient, by a fixed hash: the same in each job."""
        order = self.order("", np.arange(len(self.names)))
        chosen = np.lexsort((order, self.owners))
        first = np.ones(len(chosen), dtype=np.bool_)
        first[1:] = self.owners[chosen][1:] != self.owners[chosen][:-1]
        kept = np.sort(chosen[first])
        return Tabulated(
            self.layout,
            self.labels[kept],
            self.cells[kept],
            self.values[kept],
            [self.names[row] for row in kept],
            self.owners[kept],
        )


def tabulate(data: TableData, layout: Layout) -> Tabulated:
    """Return a silo's records of all folds as cells."""
    features, labels, indicated = data.everything()
    contents = content_names(features, labels) if layout.contract.record is None else None
    missing = _indicated(features, layout) if indicated is None else indicated
    if labels.ndim == 2:
        # Each finding is a column with its own value.
        features = np.concatenate([features, (labels == 1).astype(np.float32)], axis=1)
        missing = np.concatenate([missing, labels == UNKNOWN], axis=1)
        labels = np.zeros(len(labels), dtype=np.int64)
    if data.survival is not None:
        times, events = data.survival.T
        # A time at an end is in the bin that ends there: all times of a bin count as its end.
        ends = np.array(layout.ends) / layout.ends[-1]
        reach = ends + _NEXT * np.diff(ends, prepend=0.0)
        bins = len(ends)
        places = np.minimum(np.searchsorted(reach, times), bins - 1)
        levels = places + np.where(events > 0, 0, bins)
        of_times = (levels[:, None] == np.arange(1, 2 * bins)).astype(np.float32)
        features = np.concatenate([features, of_times], axis=1)
        missing = np.concatenate([missing, np.zeros((len(missing), 1), np.bool_)], axis=1)
    cells = np.zeros((len(labels), len(layout.places)), dtype=np.int64)
    values = np.zeros((len(labels), layout.numbers), dtype=np.float64)
    first = 0
    for index, place in enumerate(layout.places):
        width, last = len(place.column.features), place.missing - place.start
        of_column = features[:, first : first + width].astype(np.float64)
        if place.number is not None:
            values[:, place.number] = np.clip(of_column[:, 0], -1.0, 1.0)
            share = (values[:, place.number] + 1) / 2
            level = np.minimum(np.floor(share * layout.bins + _NEXT), layout.bins - 1).astype(np.int64)
        else:
            # The first level has no value of its own: a record of it has zeros.
            level = np.rint(of_column[:, : last - 1] @ np.arange(1, last)).astype(np.int64)
        cells[:, index] = np.where(missing[:, index], last, level)
        if place.number is not None:
            values[missing[:, index], place.number] = 0.0
        first += width
    names, owners = data.named()
    # Names that distinguish records of equal values depend on the other records; content names do not.
    return Tabulated(layout, labels, cells, values, contents or names, owners)


def _indicated(features: NDArray[np.float32], layout: Layout) -> NDArray[np.bool_]:
    """Return where indicator columns mark a missing value, (n, K): for generated records."""
    missing = np.zeros((len(features), len(layout.contract.columns)), dtype=np.bool_)
    last = -1
    for index, column in enumerate(layout.contract.columns):
        last += len(column.features)
        if column.missing == "indicator":
            missing[:, index] = features[:, last] > 0
    return missing
