"""Summary of a site's table: each column in numbers, by class. Exact, so for the site alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import finding_counts, unknown_counts
from tightframe.data.contract import Column, Contract, MultiLabel
from tightframe.data.table import TableSite
from tightframe.data.table.disclosure import Term, term
from tightframe.data.table.encoding import Encoded, Finding, check_mapping, encode
from tightframe.data.table.silo import TableData, divided
from tightframe.data.table.sources.rows import Rows, read
from tightframe.data.table.tabulated import Layout, tabulate
from tightframe.errors import DataError

BINS = 12
GROUPS = ("no finding", "findings", "unknown")
"""Groups of records in place of classes, where a record may have several findings.

In the last group no finding is known to be present, and some are unknown.
"""


@dataclass(frozen=True)
class Summary:
    """One column of the records that keep the contract; values in its unit, missing ones left out.

    Attributes:
        missing: number of missing values.
        mean, deviation: of a number; the deviation has the divisor n - 1.
        quantiles: least, lower quartile, median, upper quartile, largest value of a number.
        names: levels, truth values or bins.
        counts: class title -> number of records with each of them.
    """

    column: Column
    missing: int
    mean: float | None
    deviation: float | None
    quantiles: tuple[float, ...]
    names: tuple[str, ...]
    counts: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Description:
    """A site's table by a contract.

    Attributes:
        records: class title -> number of records that keep the contract; of a multi-label, ``GROUPS``.
        findings: rules that other rows break.
        broken: number of such rows.
        columns: in the contract's order.
        present: finding of a multi-label -> number of records with it; a record may have several.
        unknown: finding -> number of records in which it is unknown.
        preview: cells that exact statistics would withhold; None for pictures.
    """

    where: str
    records: dict[str, int]
    findings: tuple[Finding, ...]
    broken: int
    columns: tuple[Summary, ...]
    present: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    preview: Preview | None = None


def describe(
    contract: Contract,
    site: TableSite,
    least: int | None = None,
    *,
    bins: int | None = None,
    ends: Sequence[float] = (),
) -> Description:
    """Return the summary of a site's table; rows that break the contract are counted and left out.

    Args:
        least: least number of patients in a cell of statistics, by the site's policy; None for no preview.
        bins: one more number of bins for the preview.
        ends: of bins of time for the preview, as of ``statistics.time_ends``.

    Raises:
        DataError: as ``read``, ``check_mapping`` and ``preview``.
    """
    check_mapping(contract, site)
    rows = read(contract, site)
    encoded = encode(rows, contract, site)
    kept = np.flatnonzero(~encoded.broken)
    labels, features = encoded.labels[kept], encoded.features[kept].astype(np.float64)
    labels, titles, of_findings = grouped(contract, labels)
    summaries, place = [], 0
    for column in contract.columns:
        width = len(column.features)
        cells = rows.cells[column.column]
        present = np.array([cells[row] is not None for row in kept], dtype=np.bool_)
        values = features[present][:, place : place + width]
        summaries.append(summary_of(column, values, labels[present], int((~present).sum()), titles))
        place += width
    previewed = None
    if least is not None:
        previewed = preview(divided(encoded, contract, in_folds=False), contract, least, bins, ends)
    return description(encoded, rows, labels, titles, summaries, preview=previewed, **of_findings)


def description(
    encoded: Encoded,
    rows: Rows,
    labels: NDArray[np.int64],
    titles: Sequence[str],
    summaries: Sequence[Summary],
    **more: Any,
) -> Description:
    """Return a site's description, by the labels of the records that keep the contract and their names."""
    counts = np.bincount(labels, minlength=len(titles)).tolist()
    broken = int(encoded.broken.sum()) + len(rows.ragged)
    records = dict(zip(titles, counts, strict=True))
    return Description(encoded.where, records, encoded.findings, broken, tuple(summaries), **more)


def grouped(
    contract: Contract, labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[str, ...], dict[str, dict[str, int]]]:
    """Return labels (n,) to group records by, the groups' names, and ``present`` and ``unknown`` of findings.

    Groups are the classes; records with several findings are grouped by whether they have any.
    """
    titles = contract.label.titles
    if not isinstance(contract.label, MultiLabel):
        return labels, titles, {}
    known = finding_counts(labels)
    present = dict(zip(titles, known[:, 0].tolist(), strict=True))
    unknown = unknown_counts(labels, titles)
    some, none = (labels == 1).any(axis=1), (labels == 0).all(axis=1)
    group = np.where(some, 1, np.where(none, 0, 2)).astype(np.int64)
    titles = GROUPS if (group == 2).any() else GROUPS[:2]
    return group, titles, {"present": present, "unknown": unknown}


def summary_of(
    column: Column,
    values: NDArray[np.float64],
    labels: NDArray[np.int64],
    missing: int,
    titles: Sequence[str],
) -> Summary:
    """Return a column's summary.

    Args:
        values: of its features, (n, k), as a model gets them, of the records that have one.
        labels: of these records, (n,).
        missing: number of records without one.
    """
    mean = deviation = None
    quantiles: tuple[float, ...] = ()
    if column.kind == "number":
        assert column.low is not None and column.high is not None  # noqa: S101 - the contract has checked
        numbers = (values[:, 0] + 1) / 2 * (column.high - column.low) + column.low
        if len(numbers):
            mean = float(numbers.mean())
            quantiles = tuple(np.quantile(numbers, (0, 0.25, 0.5, 0.75, 1)).tolist())
        deviation = float(numbers.std(ddof=1)) if len(numbers) > 1 else None
        edges = np.linspace(column.low, column.high, BINS + 1)
        bin_of = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, BINS - 1)
        names = [f"{edge:.3g}" for edge in edges[:-1]]
    else:
        levels = 2 if column.kind == "boolean" else len(column.vocabulary)
        # The first level has no value of its own: a record of it has zeros.
        bin_of = (values[:, : levels - 1] * np.arange(1, levels)).sum(axis=1).astype(np.int64)
        names = ["false", "true"] if column.kind == "boolean" else list(column.vocabulary)
    counts = {
        title: tuple(np.bincount(bin_of[labels == label], minlength=len(names)).tolist())
        for label, title in enumerate(titles)
    }
    return Summary(column, missing, mean, deviation, quantiles, tuple(names), counts)


TRIED_BINS = (10, 5, 3, 2)
TRIED_TIME_BINS = (10, 8, 6, 4, 3, 2)


@dataclass(frozen=True)
class Preview:
    """Cells that exact statistics withhold of a site's records.

    Attributes:
        least: m, the site's least number of patients in a cell.
        patients: whether patients are known; else m counts records.
        cells: column -> number of bins -> withheld cells, of all classes, and all cells.
        curves: class -> number of bins of time -> end of the last one before a withheld cell, 0 if it is the
            first; empty without ``survival``.
        ends: of the requested bins of time, in place of bins of one width; may be empty.
    """

    least: int
    patients: bool
    cells: dict[str, dict[int, tuple[int, int]]]
    curves: dict[str, dict[int, float]]
    ends: tuple[float, ...] = ()


def preview(
    data: TableData, contract: Contract, least: int, bins_too: int | None = None, ends: Sequence[float] = ()
) -> Preview:
    """Return the withheld cells, by the numbers of bins that a job may choose.

    Args:
        least: m.
        bins_too: one more number of bins.
        ends: of bins of time, as of ``statistics.time_ends``, in place of ``TRIED_TIME_BINS``.

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
    asked = [] if timed is None else [timed.ends(bins) for bins in TRIED_TIME_BINS]
    if ends and timed is not None:
        asked = [(*ends, timed.high)]
    first = asked[-1] if asked else ()
    cells: dict[str, dict[int, tuple[int, int]]] = {}
    for bins in sorted({*TRIED_BINS, bins_too or TRIED_BINS[0]}, reverse=True):
        layout, own_term = _term(data, contract, least, bins, first)
        for place in layout.places[: len(layout.places) - (contract.survival is not None)]:
            hidden = own_term.withheld_cells[:, place.start : place.end]
            cells.setdefault(place.column.column, {})[bins] = (int(hidden.sum()), hidden.size)
    curves: dict[str, dict[int, float]] = {}
    for times in asked:
        layout, own_term = _term(data, contract, least, TRIED_BINS[-1], times)
        bins = len(times)
        start = layout.places[-1].start
        broken = own_term.withheld_cells[:, start : start + 2 * bins].reshape(-1, 2, bins).max(axis=1)
        for title, row in zip(layout.titles, broken, strict=True):
            shown = int(np.argmax(row)) if row.any() else bins
            curves.setdefault(title, {})[bins] = layout.ends[shown - 1] if shown else 0.0
    return Preview(least, contract.patient is not None, cells, curves, tuple(ends))


def _term(
    data: TableData, contract: Contract, least: int, bins: int, ends: tuple[float, ...]
) -> tuple[Layout, Term]:
    layout = Layout(contract, bins, ends)
    return layout, term(tabulate(data, layout), least)
