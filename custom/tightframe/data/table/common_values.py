"""Replace values in which few patients of a hospital stand out, before exact sums of its records.

A drug that only one patient has had makes its row of the products of all columns that patient's record:
anybody who reads the total has it, without an attack. The same holds for the difference of two columns that
are equal in all patients but one, and for a number of which one patient's value is larger than all others'
together. So in exact sums of training records a hospital takes

- the values of a column by which fewer than m patients stand out (``disclosure.who_stands_out``) as the
  median of the others,
- where a column of two values differs from an earlier one, or from its opposite, in fewer than m patients,
  these patients' values from that one,
- and, with up to 64 columns, the value of a column that follows from the others except in fewer than m
  patients (one of two drugs; two weights that are the same) as the value that would follow.

m is the hospital's ``min_class_count``. Where a layer of d units is trained on the values, m is, for one
column and for two, at least d times half of ``records_per_feature``: in a column that few records have, a
total is the sum of their slopes alone, each times zero or one for each unit. For columns that up to seven
records have, 32 quotients by the next layer's weights disclosed, in one round, the units for which most of
them fire, and their outcome, and in twelve rounds 56 of 67 such records completely, by integer programming.
Leaving the weights of such columns unchanged instead would disclose others' sums of slopes, without this
hospital's, where a column has one value. Noise covers single patients by itself, and its sensitivity would
not hold for values that depend on other patients: under privacy no value is replaced.

In pictures whose pixels a layer's units see individually, pixels in which few records are off the lowest or
highest value are set to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import SiloData, own_patients
from tightframe.data.table.disclosure import who_stands_out

if TYPE_CHECKING:
    import torch

_TOGETHER, _AT_ONCE = 4096, 64
"""Records of a table, and pictures, read at a time."""
_ROUNDING = 1e-6
"""Rounding error of a number of patients, summed from their records' parts."""
NARROW = 64
"""Most columns for which all linear relations are checked, not only those of two."""
FOLLOWS, STEPS = 1e-4, 24
"""Difference from a fit, in standard deviations, up to which a value follows; steps of the fit."""


@dataclass(frozen=True)
class CommonValues:
    """Values that replace some of a hospital's own in exact sums of training records.

    Attributes:
        starts: where each record's replaced values begin in ``columns`` and ``values``, (n + 1,).
        columns, values: of the replaced values, (k,).
        varied: number of columns with several values.
        lost: columns among them that keep only one.
    """

    starts: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float32]
    varied: int
    lost: tuple[int, ...]

    def apply(self, inputs: torch.Tensor, records: Sequence[int]) -> torch.Tensor:
        """Return inputs (B, p) of these records with the values replaced; others keep every bit."""
        first, last = self.starts[list(records)], self.starts[np.asarray(records, dtype=np.int64) + 1]
        many = last - first
        if not many.any():
            return inputs
        rows = np.repeat(np.arange(len(many)), many)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many)
        import torch

        replaced = inputs.clone()
        replaced[torch.from_numpy(rows), torch.from_numpy(self.columns[places])] = torch.from_numpy(
            self.values[places]
        ).to(inputs)
        return replaced


@dataclass(frozen=True)
class CommonPixels:
    """Values that replace pixels in which few of a hospital's training pictures differ from the rest.

    Attributes:
        few: pixels, and channels, in which fewer than ``least`` patients are off the lowest or highest value.
        value: that replaces all values of such a pixel.
    """

    few: torch.Tensor
    value: torch.Tensor

    def apply(self, inputs: torch.Tensor, records: Sequence[int]) -> torch.Tensor:
        """Return pictures (B, ...) with the values replaced."""
        return inputs.where(~self.few.to(inputs.device), self.value.to(inputs.device))


def common_pixels(data: SiloData, least: int) -> CommonPixels | None:
    """Return the values that replace a hospital's pixels where a layer's units see each pixel individually.

    Nearly all pictures have one value at the rim. A column of a total that only one record changes has its
    slopes, hence its label, its batches and, with the next layer's weights, equations on all its pixels; in
    products it has the picture.

    Args:
        data: whose training records are read once. Each counts as its share of its patient's records.
        least: fewer patients than this are few; with few patients in total, half of them.
    """
    import torch

    owners = own_patients(data)
    patients = int(owners.max(initial=-1)) + 1
    least = min(least, (patients + 1) // 2)
    if least < 2:
        return None
    parts = torch.from_numpy(1 / np.bincount(owners)[owners])
    ends, level = torch.empty(0), torch.empty(0)
    for inputs, part in zip(_inputs(data, _AT_ONCE), parts.split(_AT_ONCE), strict=True):
        now = torch.stack([inputs.amin(0), inputs.amax(0)])
        if not len(ends):
            ends, level = now, torch.zeros(now.shape, dtype=parts.dtype)
        moved = torch.stack([now[0] < ends[0], now[1] > ends[1]])
        ends = now.where(moved, ends)
        at_end = (inputs == ends[:, None]).double()
        level = level.masked_fill(moved, 0) + torch.einsum("b,eb...->e...", part, at_end)
    off = patients - level
    few = (off > _ROUNDING) & (off < least - _ROUNDING)
    return CommonPixels(few.any(0), ends[0].where(few[0], ends[1]))


def common_in(data: SiloData, least: int, wide: int | None = None) -> CommonValues | None:
    """Return the values that replace a hospital's own in exact sums of rows; None if all stay unchanged.

    Args:
        data: whose training records are read once.
        least, wide: see ``common_values``.
    """
    import torch

    if least < 2 or not len(data.labels("train")):
        return None
    rows = torch.cat(list(_inputs(data, _TOGETHER))).numpy()
    return common_values(rows, own_patients(data), least, wide)


def _inputs(data: SiloData, together: int) -> Iterator[torch.Tensor]:
    """Yield the inputs of training records, in batches of a given size."""
    import torch
    from torch.utils.data import DataLoader

    records: Any = data.records("train")
    loader: DataLoader[Any] = DataLoader(records, batch_size=together, generator=torch.Generator())
    yield from (inputs for inputs, _ in loader)


def common_values(
    rows: NDArray[np.float32], owners: NDArray[np.int64], least: int, wide: int | None = None
) -> CommonValues:
    """Return the values that replace a hospital's own.

    Args:
        rows: of its training records, (n, p).
        owners: number of each record's patient, (n,).
        least: m.
        wide: the same for one column, and for two; by default m.

    >>> import torch
    >>> rows = np.zeros((40, 4), np.float32)
    >>> rows[:20, 0], rows[7, 1], rows[:21, 2], rows[::2, 3] = 1, 1, 1, 1
    >>> found = common_values(rows, np.arange(40), 5)
    >>> found.columns.tolist(), found.apply(torch.from_numpy(rows[[7, 20]]), [7, 20]).tolist()
    ([1, 2], [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    """
    values, owners = rows.copy(), np.unique(owners, return_inverse=True)[1]
    # With fewer than twice as many patients, a minority counts as few: otherwise nobody would stand out.
    wide = least if wide is None else max(least, min(wide, (int(owners.max()) + 1) // 2))
    low, high = rows.min(0), rows.max(0)
    varied = low != high
    two = ((rows == low) | (rows == high)).all(0) & varied
    for column in np.flatnonzero(varied):
        _hide_who_stands_out(values[:, column], owners, wide)
    _hide_who_differs(values, np.flatnonzero(two & (values.min(0) != values.max(0))), owners, wide)
    _hide_who_breaks(values, owners, least)
    places = np.nonzero(values != rows)
    starts = np.searchsorted(places[0], np.arange(len(rows) + 1))
    lost = np.flatnonzero(varied & (values.min(0) == values.max(0)))
    return CommonValues(starts, places[1], values[places], int(varied.sum()), tuple(lost.tolist()))


def _hide_who_stands_out(values: NDArray[np.float32], owners: NDArray[np.int64], least: int) -> None:
    """Set the values of patients who stand out to the median, in place, until nobody does."""
    while values.min() != values.max():
        standing = who_stands_out(values.astype(np.float64), owners, least)
        if not standing.any():
            return
        others = np.sort(values[~standing])
        values[standing] = others[(len(others) - 1) // 2]


def _hide_who_differs(
    values: NDArray[np.float32], two: NDArray[np.int64], owners: NDArray[np.int64], least: int
) -> None:
    """Set columns of two values to an earlier column, or its opposite, in the few patients that differ."""
    low, high = values.min(0), values.max(0)
    upper = values[:, two] == high[two]
    numbers, ones, count = upper.astype(np.float32), upper.sum(0), len(values)
    differ = ones[:, None] + ones[None, :] - 2 * np.rint(numbers.T @ numbers).astype(np.int64)
    most = int(np.bincount(owners).max()) * (least - 1)
    differ_in_few = ((differ > 0) & (differ <= most)) | ((differ < count) & (count - differ <= most))
    for place, earlier in zip(*np.nonzero(np.tril(differ_in_few, -1)), strict=True):
        unlike = upper[:, place] != upper[:, earlier]
        if 2 * unlike.sum() > count:
            unlike = ~unlike
        if 0 < len(np.unique(owners[unlike])) < least:
            column = two[place]
            upper[unlike, place] ^= True
            values[:, column] = np.where(upper[:, place], high[column], low[column])


def _hide_who_breaks(values: NDArray[np.float32], owners: NDArray[np.int64], least: int) -> None:
    """Make columns follow from the others in the few patients in which they do not, but in all others do.

    The fit is of least absolute deviations (by iteratively reweighted least squares), which few outliers do
    not move. Without a patient of large leverage there is no such column: if only k records make a
    combination of columns differ from zero, one of them has a leverage of at least 1/k.
    """
    columns = np.flatnonzero(values.min(0) != values.max(0))
    if not 1 < len(columns) <= NARROW or len(values) < 2 * len(columns) + 2:
        return
    most = int(np.bincount(owners).max()) * (least - 1)
    for _ in range(len(columns)):
        rows = values[:, columns].astype(np.float64)
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
                own = values[:, column].astype(np.float64)
                values[off, column] = (fitted[off] * own.std() + own.mean()).astype(np.float32)
                rows[off, place], changed = fitted[off], True
        if not changed:
            return


def _least_absolute(others: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least absolute deviations fit of a column by others."""
    weight, floor, fitted = np.ones(len(own)), 1e-2, own
    for _ in range(STEPS):
        root = np.sqrt(weight)
        coefficients = np.linalg.lstsq(others * root[:, None], own * root, rcond=1e-10)[0]
        fitted = others @ coefficients
        weight, floor = 1 / np.maximum(np.abs(own - fitted), floor), max(floor / 4, 1e-8)
    return fitted
