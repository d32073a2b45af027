"""What a site's own term of statistics would withhold, before any job: for the site alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightframe.data.contract import Contract
from tightframe.data.table.disclosure import Term, term
from tightframe.data.table.silo import TableData
from tightframe.data.table.tabulated import Layout, tabulate

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
    """

    least: int
    patients: bool
    cells: dict[str, dict[int, tuple[int, int]]]
    curves: dict[str, dict[int, float]]


def preview(data: TableData, contract: Contract, least: int) -> Preview:
    """Return what is withheld, by the numbers of bins that a job may choose."""
    cells: dict[str, dict[int, tuple[int, int]]] = {}
    for bins in BINS:
        layout, made = _made(data, contract, least, bins, BINS[-1])
        for place in layout.places[: len(layout.places) - (contract.survival is not None)]:
            hidden = made.withheld_cells[:, place.start : place.end]
            cells.setdefault(place.column.column, {})[bins] = (int(hidden.sum()), hidden.size)
    curves: dict[str, dict[int, float]] = {}
    for bins in TIME_BINS if contract.survival is not None else ():
        layout, made = _made(data, contract, least, BINS[-1], bins)
        start = layout.places[-1].start
        broken = made.withheld_cells[:, start : start + 2 * bins].reshape(-1, 2, bins).max(axis=1)
        for title, row in zip(layout.titles, broken, strict=True):
            told = int(np.argmax(row)) if row.any() else bins
            curves.setdefault(title, {})[bins] = layout.ends[told - 1] if told else 0.0
    return Preview(least, contract.patient is not None, cells, curves)


def _made(data: TableData, contract: Contract, least: int, bins: int, time_bins: int) -> tuple[Layout, Term]:
    timed = contract.survival
    layout = Layout(contract, bins, () if timed is None else timed.ends(time_bins))
    return layout, term(tabulate(data, layout), least)
