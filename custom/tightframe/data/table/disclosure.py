"""Suppression of small cells in a silo's own term, before any sum. Torch-free.

The term could be published by itself: then even all the other silos together, who can subtract their terms
from a total, learn no more than that. ``m`` is the site's least number of patients (records, where patients
are unknown) in a cell.

- A class of fewer than m is withheld, and with it all of its cells, empty ones among them.
- A cell of fewer than m, but not empty, is withheld. The other cells and the number of records of the class
  would disclose it, so further cells are withheld with it, the smallest first, until they hold enough
  together (``withheld``); if there are none, the whole column is withheld, for this class. For times, the
  latest cells are withheld with it, so that a curve ends late.
- Fewer than m missing values of a number are hidden among values: further records, chosen by a fixed hash,
  count as missing with them, so that m are missing. The column's part of the term is of the other records.
- Mean and deviation of a number are of all its counted records. They are withheld for fewer than m records,
  and where few patients dominate them (``made_by_few``). They are rounded to parts of their own standard
  errors (``rounded_moments``): exact ones of a number of years disclose each of a dozen patients' values. If
  the number takes so few values that each bin has one or two, they would still be equations in withheld bins:
  then the silo withholds all of its bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightframe.data.table.tabulated import Layout, Place, Tabulated

UNIT_BITS = 20
"""Bits of a number's grid, whose step is ``2**-20`` of its range."""
UNITS = 1 << UNIT_BITS
MOMENTS = 4
"""Moments of a column of numbers: records, sum, and the sum of squares in two parts of 20 bits."""
FEW_VALUES = 8
"""Most distinct values of a number whose numbers of patients mean and deviation could disclose."""
DOMINANCE = 0.1
"""p of the p% rule: the sum of all but the two farthest patients must be at least this part of the
farthest's."""
ROUNDING = 4
"""Fewest steps of a rounded mean or deviation within its standard error."""
VALUES_OF_A_BIN = 3
"""Distinct values that a bin must have on average, so that sums do not disclose its number of records."""


@dataclass(frozen=True)
class Term:
    """Integers that a silo discloses, and flags of withheld ones.

    Attributes:
        records: of each class, (C,).
        cells: (C, M).
        moments: (C, N, 4), see ``moments_of``.
        withheld_records, withheld_cells, withheld_moments: 1 where it withholds: (C,), (C, M), (C, N).
    """

    records: NDArray[np.int64]
    cells: NDArray[np.int64]
    moments: NDArray[np.int64]
    withheld_records: NDArray[np.int64]
    withheld_cells: NDArray[np.int64]
    withheld_moments: NDArray[np.int64]


def term(table: Tabulated, least: int) -> Term:
    """Return a silo's term.

    Args:
        least: m, the site's least number of patients in a cell.
    """
    layout = table.layout
    shape = (layout.classes, layout.cells)
    result = Term(
        np.zeros(layout.classes, np.int64),
        np.zeros(shape, np.int64),
        np.zeros((layout.classes, layout.numbers, MOMENTS), np.int64),
        np.zeros(layout.classes, np.int64),
        np.zeros(shape, np.int64),
        np.zeros((layout.classes, layout.numbers), np.int64),
    )
    for label in range(layout.classes):
        rows = np.flatnonzero(table.labels == label)
        if 0 < len(np.unique(table.owners[rows])) < least:
            result.withheld_records[label] = 1
            result.withheld_cells[label] = 1
            result.withheld_moments[label] = 1
            continue
        result.records[label] = len(rows)
        for index, place in enumerate(layout.places):
            if place.number is None:
                levels, width = slice(place.start, place.end), place.end - place.start
                order = layout.latest_first if place is layout.places[-1] else ()
                _tell(result, label, levels, table, rows, table.cells[rows, index], width, least, order)
            else:
                _number(result, label, table, rows, index, place, least)
    return result


def _number(
    result: Term,
    label: int,
    table: Tabulated,
    rows: NDArray[np.int64],
    index: int,
    place: Place,
    least: int,
) -> None:
    """Count the bins, moments and missing values of a number, in place."""
    number, bins = place.number, place.missing - place.start
    assert number is not None  # noqa: S101 - called for numbers alone
    bins_of, owners = table.cells[rows, index], table.owners[rows]
    missing = bins_of == bins
    if 0 < len(np.unique(owners[missing])) < least:
        result.withheld_cells[label, place.missing] = 1
        for row in np.argsort(table.order(place.column.column, rows), kind="stable"):
            if len(np.unique(owners[missing])) >= least:
                break
            missing[row] = True
    else:
        result.cells[label, place.missing] = missing.sum()
    counted = rows[~missing]
    if not len(counted):
        return
    if len(np.unique(table.owners[counted])) < least:
        result.cells[label, place.missing] = 0
        result.withheld_cells[label, place.start : place.end] = 1
        result.withheld_moments[label, number] = 1
        return
    values = table.values[counted, number]
    by_few = least > 1 and made_by_few(values, table.owners[counted], least)
    if by_few:
        result.withheld_moments[label, number] = 1
    else:
        result.moments[label, number] = moments_of(values) if least == 1 else rounded_moments(values)
    where = slice(place.start, place.missing)
    _tell(result, label, where, table, counted, table.cells[counted, index], bins, least)
    hidden = result.withheld_cells[label, where]
    if not by_few and hidden.any() and len(np.unique(values)) < VALUES_OF_A_BIN * bins:
        result.cells[label, where] = 0
        result.withheld_cells[label, where] = 1


def _tell(
    result: Term,
    label: int,
    where: slice,
    table: Tabulated,
    rows: NDArray[np.int64],
    cell_of: NDArray[np.int64],
    width: int,
    least: int,
    order: Sequence[int] = (),
) -> None:
    """Count records in cells, in place; withhold cells that must not be disclosed."""
    if not len(rows):
        return
    counts = np.bincount(cell_of, minlength=width)[:width]
    most = int(table.owners.max()) + 1
    patients = np.unique(cell_of * most + table.owners[rows]) // most
    hidden = withheld(np.bincount(patients, minlength=width)[:width], least, order)
    result.cells[label, where] = np.where(hidden, 0, counts)
    result.withheld_cells[label, where] = hidden


def withheld(patients: NDArray[np.int64], least: int, order: Sequence[int] = ()) -> NDArray[np.bool_]:
    """Return the cells to be withheld of a set whose sum may be known.

    These are non-empty ones of fewer than ``least`` patients; then the smallest others, until there are at
    least two cells, which hold ``2 least`` more than one each; and with the last of them all cells of equal
    size, or one larger, so that the choice does not disclose which is smaller. All cells if the set has too
    few.

    Args:
        patients: of each cell, (k,).
        least: m.
        order: in which further cells are withheld, in place of the smallest first. Not with m = 2: then a
            cell known to be small is 1.

    >>> withheld(np.array([3, 40, 0, 60]), 5)
    array([ True,  True, False, False])
    >>> withheld(np.array([3, 6, 0]), 5), withheld(np.array([30, 6, 0]), 5)
    (array([ True,  True,  True]), array([False, False, False]))
    """
    hidden: NDArray[np.bool_] = (patients > 0) & (patients < least)
    if not hidden.any():
        return hidden
    by_place = len(order) > 0 and least > 2
    places = order if by_place else np.argsort(patients, kind="stable").tolist()
    others = [place for place in places if patients[place] >= least]
    while patients[hidden].sum() < hidden.sum() + 2 * least:  # never enough in one cell of fewer than m
        if not others:
            return np.ones_like(hidden)
        if by_place:
            hidden[others.pop(0)] = True
            continue
        last = patients[others[0]]
        while others and patients[others[0]] <= last + 1:
            hidden[others.pop(0)] = True
    return hidden


def made_by_few(values: NDArray[np.float64], owners: NDArray[np.int64], least: int) -> bool:
    """Return True if mean and deviation of a column disclose values of fewer than ``least`` patients.

    That is so if some stand out (``who_stands_out``), or if the column has few values, one of them of fewer
    patients: then the moments are equations in the values' numbers of patients.

    Args:
        owners: number of each record's patient, from 0.
        least: m.

    >>> made_by_few(np.repeat([0.0, 0.3, 0.5, 1.0], [30, 4, 26, 2]), np.arange(62), 5)
    True
    >>> made_by_few(np.linspace(-1, 1, 62), np.arange(62), 5)
    False
    """
    if who_stands_out(values, owners, least).any():
        return True
    rare, _ = _rare_values(values, owners, least)
    return bool(rare.any()) and len(rare) <= FEW_VALUES and 2 * len(rare) <= len(np.unique(owners))


def who_stands_out(values: NDArray[np.float64], owners: NDArray[np.int64], least: int) -> NDArray[np.bool_]:
    """Return the records by which fewer than ``least`` patients make a column differ from all others', (n,).

    - A few, fewer than m, have values that no m patients share, and all others have common values: they alone
      make the mean differ from a known one (a drug that nobody else has had).
    - One patient dominates (p% rule; Hundepool et al., Statistical Disclosure Control, 2012, section 4.2):
      the distances from the median, or their squares, of all but the two farthest are less than a tenth of
      the farthest one's. These are its records; without them another patient may dominate.

    Args:
        owners: number of each record's patient, from 0.
        least: m.

    >>> zeros, each = np.zeros(60), np.arange(62)
    >>> who_stands_out(np.concatenate([zeros, [0.4, 0.7]]), each, 5).nonzero()[0].tolist()
    [60, 61]
    """
    rare, held = _rare_values(values, owners, least)
    if rare.any() and not rare.all() and len(np.unique(owners[held])) < least:
        return held
    away = np.abs(values - np.median(values))
    for order, power in ((1, away), (2, away**2)):
        parts = np.bincount(owners, power)
        largest = np.sort(parts)
        if largest[:-2].sum() < ((1 + DOMINANCE) ** order - 1) * largest[-1]:
            dominates: NDArray[np.bool_] = owners == parts.argmax()
            return dominates
    return np.zeros(len(values), dtype=bool)


def _rare_values(
    values: NDArray[np.float64], owners: NDArray[np.int64], least: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the distinct values of fewer than ``least`` patients, and the records with such values."""
    distinct, which = np.unique(values, return_inverse=True)
    most = int(owners.max()) + 1
    pairs = np.unique(which.astype(np.int64) * most + owners)
    rare = np.bincount(pairs // most, minlength=len(distinct)) < least
    return rare, rare[which]


def rounded_moments(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ``moments_of`` values of this number, and of nearly this mean and deviation.

    The sum, and the squares of that mean and the deviation, are rounded to multiples of powers of two, which
    are at most a quarter of their standard errors (of normal values): far more columns of a hospital's
    patients have such moments than exact ones. Rounding means instead is not enough: a term would be a
    multiple of the hospital's own number of records, and the total would decompose.
    """
    q = np.rint((values + 1) / 2 * UNITS)
    count, total = len(q), int(q.sum())
    apart = float(np.square(q - q.mean()).sum())
    total = _rounded(total, math.sqrt(apart) / ROUNDING)
    squares = _rounded(total * total // count + round(apart), apart * math.sqrt(2 / count) / ROUNDING)
    return np.array([count, total, squares >> UNIT_BITS, squares & (UNITS - 1)], dtype=np.int64)


def _rounded(value: int, most: float) -> int:
    """Return the nearest multiple of the largest power of two that is at most ``most`` and at least 1."""
    bits = math.floor(math.log2(most)) if most > 1 else 0
    return (value + (1 << bits >> 1)) >> bits << bits


def moments_of(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return number, sum, and sum of squares in two parts, int64 (4,), of values in [-1, 1].

    Each counts as a whole number q of steps of ``2**-20`` of the range. The squares
    ``q**2 = high 2**20 + low`` are summed part by part, so that no sum of 2**24 records leaves the integers
    that a float64 has.
    """
    q = np.rint((values + 1) / 2 * UNITS).astype(np.int64)
    squares = q * q
    return np.array(
        [len(q), q.sum(), (squares >> UNIT_BITS).sum(), (squares & (UNITS - 1)).sum()], dtype=np.int64
    )


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shapes of withheld and disclosed numbers."""
    return {
        "records": (layout.classes,),
        "cells": (layout.classes, layout.cells),
        "moments": (layout.classes, layout.numbers),
    }
