"""Values in which few patients of a hospital stand out, before exact sums are formed of its records.

A drug that one patient has had makes its row of the products of all columns that patient's record: whoever
reads the total has it, without an attack. The same holds for the difference of two columns that are equal in
all patients but one, and for a number of which one patient's value is larger than all others' together. So
in exact sums of training records a hospital takes

- the values of a column by which fewer than m patients stand out (``disclosure.who_stands_out``) as the
  median of the others,
- where a column of two values differs from an earlier one, or from its opposite, in fewer than m patients,
  these patients' values as that one's,
- and of up to 64 columns the value of one that follows from the others but in fewer than m patients (one of
  two drugs; two weights that are the same) as what would follow.

m is the hospital's ``min_class_count``. Noise covers single patients by itself, and its sensitivity would
not hold for values that depend on the other patients: under privacy all stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import SiloData, record_patients
from tightframe.data.table.disclosure import who_stands_out
from tightframe.errors import DataError

if TYPE_CHECKING:
    import torch

_TOGETHER = 4096
"""Records read at a time."""
NARROW = 64
"""Columns up to which all linear relations are looked at, not only those of two."""
SAMPLE = 512
"""Records by which a relation is found that most records keep."""
FOLLOWS, STEPS = 1e-4, 24
"""Difference from a fit, in standard deviations, up to which a value follows; steps of the fit."""


@dataclass(frozen=True)
class CommonValues:
    """What a hospital takes some values of its training records for.

    Attributes:
        starts: where each record's replaced values begin in the others, (n + 1,).
        columns, values: of them, (k,).
    """

    starts: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float32]

    def apply(self, inputs: torch.Tensor, records: Sequence[int]) -> torch.Tensor:
        """Return inputs (B, p) of these records with the values replaced; others keep every bit."""
        first, last = self.starts[list(records)], self.starts[np.asarray(records, dtype=np.int64) + 1]
        many = last - first
        if not many.any():
            return inputs
        rows = np.repeat(np.arange(len(many)), many)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many)
        import torch

        made = inputs.clone()
        made[torch.from_numpy(rows), torch.from_numpy(self.columns[places])] = torch.from_numpy(
            self.values[places]
        ).to(inputs)
        return made


def common_in(data: SiloData, least: int) -> CommonValues | None:
    """Return what a hospital's values are taken for in exact sums of rows; None if all stay as they are.

    Args:
        data: whose training records are read once.
        least: m.
    """
    found = _rows(data) if least > 1 else None
    return None if found is None else common_values(*found, least)


def few_in(data: SiloData, common: CommonValues | None, least: int) -> NDArray[np.bool_] | None:
    """Return ``few_columns`` of a hospital's training records; None of no records.

    Args:
        data: whose training records are read once.
        common: what some of their values are taken for.
        least: see ``few_columns``.
    """
    found = _rows(data)
    if found is None:
        return None
    rows, owners = found
    if common is not None:
        rows[np.repeat(np.arange(len(rows)), np.diff(common.starts)), common.columns] = common.values
    return few_columns(rows, owners, least)


def _rows(data: SiloData) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
    """Return the training records, (n, p), and the number of each one's patient, (n,); None of no records."""
    import torch
    from torch.utils.data import DataLoader

    records: Any = data.records("train")
    if not len(records):
        return None
    loader: DataLoader[Any] = DataLoader(records, batch_size=_TOGETHER, generator=torch.Generator())
    rows = torch.cat([inputs for inputs, _ in loader]).numpy()
    try:
        owners = record_patients(data, "train")
    except DataError:  # unknown: each record is a patient's
        owners = np.arange(len(rows))
    return rows, owners


def few_columns(rows: NDArray[np.float32], owners: NDArray[np.int64], least: int) -> NDArray[np.bool_]:
    """Return the columns by which few patients differ from all others, bool (p,).

    Or from an earlier column, or of up to 64 columns from what follows from the others.

    Args:
        rows: of training records, (n, p).
        owners: number of each record's patient, (n,).
        least: so many are not few.

    >>> rows = np.zeros((40, 4), np.float32)
    >>> rows[:20, 0], rows[7, 1], rows[:21, 2], rows[::2, 3] = 1, 1, 1, 1
    >>> few_columns(rows, np.arange(40), 5).tolist()  # one has the second, or the third alone
    [False, True, True, False]
    """
    owners = np.unique(owners, return_inverse=True)[1]
    few, other = np.zeros(rows.shape[1], dtype=np.bool_), np.zeros(rows.shape, dtype=np.bool_)
    two = np.zeros(rows.shape[1], dtype=np.bool_)
    for column in np.flatnonzero(rows.min(0) != rows.max(0)):
        values, times = np.unique(rows[:, column], return_counts=True)
        other[:, column], two[column] = rows[:, column] != values[times.argmax()], len(values) == 2
        few[column] = len(np.unique(owners[other[:, column]])) < least
    places = np.flatnonzero(two & ~few)
    for earlier, later, unlike in _alike(other[:, places], owners, least):
        few[places[later]] |= not few[places[earlier]] and len(np.unique(owners[unlike])) < least
    left = [place for place in np.flatnonzero(rows.min(0) != rows.max(0)) if not few[place]]
    if len(left) > NARROW or len(rows) < 2 * len(left) + 2:
        return few
    scaled = rows - rows.mean(0, dtype=np.float64)
    scaled /= np.maximum(scaled.std(0), 1e-30)
    some = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLE)).astype(np.int64)
    for place in left[::-1]:
        others = np.column_stack([scaled[:, [each for each in left if each != place]], np.ones(len(rows))])
        own = scaled[:, place]
        follows = np.abs(_least_absolute(others[some], own[some]) - own[some]) < FOLLOWS
        if 2 * follows.sum() > len(some):
            fit = np.linalg.lstsq(others[some][follows], own[some][follows], rcond=1e-10)[0]
            if len(np.unique(owners[np.abs(others @ fit - own) > FOLLOWS])) < least:
                few[place] = True
                left.remove(place)
    return few


def _alike(
    upper: NDArray[np.bool_], owners: NDArray[np.int64], least: int
) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Yield an earlier and a later column, (n, p), that few patients may tell apart, and which records do.

    They may be alike or opposite. Which these are is looked at again for each pair.
    """
    numbers, each, count = upper.astype(np.float32), upper.sum(0), len(upper)
    differ = each[:, None] + each[None, :] - 2 * np.rint(numbers.T @ numbers).astype(np.int64)
    most = int(np.bincount(owners).max()) * (least - 1)
    few = ((differ > 0) & (differ <= most)) | ((differ < count) & (count - differ <= most))
    for place, earlier in zip(*np.nonzero(np.tril(few, -1)), strict=True):
        unlike = upper[:, place] != upper[:, earlier]
        yield earlier, place, ~unlike if 2 * unlike.sum() > count else unlike


def common_values(rows: NDArray[np.float32], owners: NDArray[np.int64], least: int) -> CommonValues:
    """Return what a hospital's values are taken for.

    Args:
        rows: of its training records, (n, p).
        owners: number of each record's patient, (n,).
        least: m.

    >>> import torch
    >>> rows = np.zeros((40, 4), np.float32)
    >>> rows[:20, 0], rows[7, 1], rows[:21, 2], rows[::2, 3] = 1, 1, 1, 1
    >>> found = common_values(rows, np.arange(40), 5)
    >>> found.columns.tolist(), found.apply(torch.from_numpy(rows[[7, 20]]), [7, 20]).tolist()
    ([1, 2], [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    """
    made, owners = rows.copy(), np.unique(owners, return_inverse=True)[1]
    low, high = rows.min(0), rows.max(0)
    two = ((rows == low) | (rows == high)).all(0) & (low != high)
    for column in np.flatnonzero(low != high):
        _hide_who_stands_out(made[:, column], owners, least)
    _hide_who_differs(made, np.flatnonzero(two & (made.min(0) != made.max(0))), owners, least)
    _hide_who_breaks(made, owners, least)
    places = np.nonzero(made != rows)
    starts = np.searchsorted(places[0], np.arange(len(rows) + 1))
    return CommonValues(starts, places[1], made[places])


def _hide_who_stands_out(values: NDArray[np.float32], owners: NDArray[np.int64], least: int) -> None:
    """Set the values of those who stand out to the median, in place, until nobody does."""
    while values.min() != values.max():
        standing = who_stands_out(values.astype(np.float64), owners, least)
        if not standing.any():
            return
        others = np.sort(values[~standing])
        values[standing] = others[(len(others) - 1) // 2]


def _hide_who_differs(
    made: NDArray[np.float32], two: NDArray[np.int64], owners: NDArray[np.int64], least: int
) -> None:
    """Let columns of two values be as an earlier one, or its opposite, in the few patients that differ."""
    low, high = made.min(0), made.max(0)
    upper = made[:, two] == high[two]
    for _, place, unlike in _alike(upper, owners, least):
        if 0 < len(np.unique(owners[unlike])) < least:
            column = two[place]
            upper[unlike, place] ^= True
            made[:, column] = np.where(upper[:, place], high[column], low[column])


def _hide_who_breaks(made: NDArray[np.float32], owners: NDArray[np.int64], least: int) -> None:
    """Let columns follow from the others in the few patients in which they do not, but in all others do.

    The fit is of least absolute deviations (by iteratively reweighted least squares), which few outliers do
    not move. Without a patient of large leverage there is no such column: of k records that alone make
    a combination of columns differ from zero, one has a leverage of 1/k at least.
    """
    columns = np.flatnonzero(made.min(0) != made.max(0))
    if not 1 < len(columns) <= NARROW or len(made) < 2 * len(columns) + 2:
        return
    most = int(np.bincount(owners).max()) * (least - 1)
    for _ in range(len(columns)):
        rows = made[:, columns].astype(np.float64)
        rows = (rows - rows.mean(0)) / np.maximum(rows.std(0), 1e-30)
        left, size, _right = np.linalg.svd(np.column_stack([rows, np.ones(len(rows))]), full_matrices=False)
        if np.square(left[:, size > 1e-6 * size[0]]).sum(1).max() * most < 1:
            return
        changed = False
        for place, column in enumerate(columns):
            others = np.column_stack([np.delete(rows, place, 1), np.ones(len(rows))])
            fitted = _least_absolute(others, rows[:, place])
            off = np.abs(fitted - rows[:, place]) > FOLLOWS
            if 0 < len(np.unique(owners[off])) < least:
                own = made[:, column].astype(np.float64)
                made[off, column] = (fitted[off] * own.std() + own.mean()).astype(np.float32)
                rows[off, place], changed = fitted[off], True
        if not changed:
            return


def _least_absolute(others: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fit of a column by others, of least absolute deviations."""
    weight, floor, fitted = np.ones(len(own)), 1e-2, own
    for _ in range(STEPS):
        root = np.sqrt(weight)
        found = np.linalg.lstsq(others * root[:, None], own * root, rcond=1e-10)[0]
        fitted = others @ found
        weight, floor = 1 / np.maximum(np.abs(own - fitted), floor), max(floor / 4, 1e-8)
    return fitted
