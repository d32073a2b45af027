"""What a site's own term of statistics would withhold, before any job: for the site alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tightframe.data.contract import Contract
from tightframe.data.table.disclosure import Term, term
from tightframe.data.table.silo import TableData
from tightframe.data.table.tabulated import Layout, tabulate
from tightframe.errors import DataError

BINS = (10, 5, 3, 2)
TIME_BINS = (10, 8, 6, 4, 3, 2)


@dataclass(frozen=True)
class Preview:
    """Cells that exact statistics withhold of a site's records.

    Attributes:
        least: m, the site's least number of patients in a cell.
        patients: whether they are known; else m counts records.
        cells: column -> number of bins -> how many of its cells, of all classes, and of how many.
        curves: class -> number of bins of time -> end of the last one before a withheld cell, 0 if it is the
            first; empty without ``survival``.
        ends: of the bins of time that were asked for, in place of bins of one width; may be empty.
    """

    least: int
    patients: bool
    cells: dict[str, dict[int, tuple[int, int]]]
    curves: dict[str, dict[int, float]]
    ends: tuple[float, ...] = ()


def preview(
    data: TableData, contract: Contract, least: int, bins_too: int | None = None, ends: Sequence[float] = ()
) -> Preview:
    """Return what is withheld, by the numbers of bins that a job may choose.

    Args:
        least: m.
        bins_too: one more number of bins.
        ends: of bins of time, as of ``statistics.time_ends``, in place of ``TIME_BINS``.

    Raises:
        DataError: TF-218 for ends that the contract's ``survival`` does not allow.
    """
    timed = contract.survival
    if ends and (
        timed is None or list(ends) != sorted(set(ends)) or not 0 < ends[0] <= ends[-1] < timed.high
    ):
        limit = "`survival`, which it has not" if timed is None else f"`high`, {timed.high:g}"
        raise DataError(
            f"Expected ends of bins of time above 0, ascending, and below the contract's {limit}; but got "
            f"{', '.join(format(end, 'g') for end in ends)}.",
            code="TF-218",
        )
    asked = [] if timed is None else [timed.ends(bins) for bins in TIME_BINS]
    if ends and timed is not None:
        asked = [(*ends, timed.high)]
    first = asked[-1] if asked else ()
    cells: dict[str, dict[int, tuple[int, int]]] = {}
    for bins in sorted({*BINS, bins_too or BINS[0]}, reverse=True):
        layout, made = _made(data, contract, least, bins, first)
        for place in layout.places[: len(layout.places) - (contract.survival is not None)]:
            hidden = made.withheld_cells[:, place.start : place.end]
            cells.setdefault(place.column.column, {})[bins] = (int(hidden.sum()), hidden.size)
    curves: dict[str, dict[int, float]] = {}
    for these in asked:
        layout, made = _made(data, contract, least, BINS[-1], these)
        bins = len(these)
        start = layout.places[-1].start
        broken = made.withheld_cells[:, start : start + 2 * bins].reshape(-1, 2, bins).max(axis=1)
        for title, row in zip(layout.titles, broken, strict=True):
            told = int(np.argmax(row)) if row.any() else bins
            curves.setdefault(title, {})[bins] = layout.ends[told - 1] if told else 0.0
    return Preview(least, contract.patient is not None, cells, curves, tuple(ends))


def _made(
    data: TableData, contract: Contract, least: int, bins: int, ends: tuple[float, ...]
) -> tuple[Layout, Term]:
    layout = Layout(contract, bins, ends)
    return layout, term(tabulate(data, layout), least)
