"""Read the opened totals of ``table_statistics``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.data.table.disclosure import UNIT_BITS, UNITS
from tightframe.data.table.tabulated import Layout, Place
from tightframe.metrics import noise_intervals, noisy_survival
from tightframe.metrics import survival as metrics_of_survival
from tightframe.phases import Totals
from tightframe.results.statistics import (
    ColumnStatistics,
    Count,
    Curve,
    Moments,
    OfClass,
    Quantile,
    SurvivalStatistics,
)
from tightframe.rounds.phases.table_statistics import HOLDERS, KINDS, PREFIX, WITHHELD, opened

SHARES = (0.25, 0.5, 0.75)
"""Shares of the quantiles."""
TOO_FEW = 3.0
"""Deviations of the noise that a number of records must exceed for a mean to be shown."""
_MISSED = 2 * (1 - NormalDist().cdf(noise_intervals.NORMAL))
"""Probability that noise is outside limits, see ``noise_intervals.NORMAL``."""
_JOINT = NormalDist().inv_cdf(1 - _MISSED / 6)
"""Standard deviations of joint limits of three numbers."""


@dataclass(frozen=True)
class Exact:
    """Exact totals of a column among some records, as whole numbers.

    Attributes:
        counts: of the bins or levels, and last of missing values; None where not opened.
        withheld: number of silos that withhold each.
        number: records in all bins, withheld ones included; None if unknown.
        lowest, highest: records of each bin if those in no count lie as low, or as high, as they can; None if
            unknown.
        moments: number, sum and sum of squares on the grid; None where none were opened.
        withheld_moments: number of silos that withhold them.
    """

    counts: tuple[int | None, ...]
    withheld: tuple[int, ...]
    number: int | None
    lowest: tuple[int, ...] | None
    highest: tuple[int, ...] | None
    moments: tuple[int, ...] | None
    withheld_moments: int = 0

    def __add__(self, other: Exact) -> Exact:
        pairs = zip(self.counts, other.counts, strict=True)
        return Exact(
            tuple(None if a is None or b is None else a + b for a, b in pairs),
            tuple(map(max, self.withheld, other.withheld)),
            None if self.number is None or other.number is None else self.number + other.number,
            _added(self.lowest, other.lowest),
            _added(self.highest, other.highest),
            _added(self.moments, other.moments),
            max(self.withheld_moments, other.withheld_moments),
        )


def _added(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if one is None or other is None else tuple(map(int.__add__, one, other))


def exact(totals: Totals, layout: Layout) -> tuple[dict[str, Count], list[ColumnStatistics]]:
    """Return the records of each class, and all columns, from exact totals.

    Args:
        totals: the fields of both exchanges.
    """
    integers = {name: np.rint(np.asarray(value)).astype(np.int64) for name, value in totals.items()}
    values = {kind: integers[f"{PREFIX}{kind}"] for kind in KINDS}
    holders = {kind: integers[f"{PREFIX}{kind}/{HOLDERS}"] for kind in KINDS}
    hidden = {kind: integers[f"{PREFIX}{kind}/{WITHHELD}"] for kind in KINDS}
    open_ = opened({kind: value.astype(np.float64) for kind, value in holders.items()})
    # A zero is known without being opened where no silo holds or withholds any.
    known = {kind: open_[kind] | ((holders[kind] == 0) & (hidden[kind] == 0)) for kind in KINDS}
    titles = layout.titles
    records = {
        title: _count(values["records"][label], known["records"][label], hidden["records"][label])
        for label, title in enumerate(titles)
    }
    columns = []
    for place in layout.places:
        parts = [_exact(place, label, values, known, hidden, holders) for label in range(layout.classes)]
        overall = parts[0]
        for part in parts[1:]:
            overall = overall + part
        columns.append(
            ColumnStatistics(
                **_described(layout, place),
                classes={
                    title: _of_class(layout, place, part) for title, part in zip(titles, parts, strict=True)
                },
                overall=_of_class(layout, place, overall),
            )
        )
    return records, columns


def _described(layout: Layout, place: Place) -> dict[str, Any]:
    column = place.column
    return {
        "column": column.column,
        "kind": column.kind,
        "unit": column.unit,
        "names": list(layout.names(column)),
        "edges": layout.edges(column) if place.number is not None else [],
    }


def _count(value: np.int64, known: np.bool_, hidden: np.int64) -> Count:
    return Count(value=int(value) if known else None, withheld=int(hidden))


def _exact(
    place: Place,
    label: int,
    totals: Mapping[str, NDArray[np.int64]],
    known: Mapping[str, NDArray[np.bool_]],
    hidden: Mapping[str, NDArray[np.int64]],
    holders: Mapping[str, NDArray[np.int64]],
) -> Exact:
    where = slice(place.start, place.end)
    values, open_ = totals["cells"][label, where].tolist(), known["cells"][label, where].tolist()
    withheld = hidden["cells"][label, where].tolist()
    moments, number, withholding = None, None, 0
    lowest = highest = None
    if place.number is not None:
        withholding = int(hidden["moments"][label, place.number])
        if known["moments"][label, place.number]:
            records, total, high, low = (int(item) for item in totals["moments"][label, place.number])
            moments = (records, total, (high << UNIT_BITS) + low)
            number = records
        if withholding:  # silos that withhold moments still count in the bins
            counted = known["records"][label] and open_[-1] and not withheld[-1]
            number = int(totals["records"][label]) - values[-1] if counted else None
        if number is not None:
            may_hold = [bool(silos) or not one for silos, one in zip(withheld[:-1], open_[:-1], strict=True)]
            lowest, highest = _extremes(number, values[:-1], may_hold)
    return Exact(
        tuple(value if one else None for value, one in zip(values, open_, strict=True)),
        tuple(withheld),
        number,
        lowest,
        highest,
        moments,
        withholding,
    )


def _extremes(
    records: int, counts: Sequence[int], may_hold: Sequence[bool]
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the bins' records if those in no count lie in the lowest, or the highest, that may hold any.

    Args:
        records: in all bins.
        counts: as opened, (bins,).
        may_hold: whether a bin may have such records, (bins,).
    """
    unplaced, places = records - sum(counts), [place for place, more in enumerate(may_hold) if more]
    if unplaced and not places:
        return None, None
    lowest, highest = list(counts), list(counts)
    if unplaced:
        lowest[places[0]] += unplaced
        highest[places[-1]] += unplaced
    return tuple(lowest), tuple(highest)


def _of_class(layout: Layout, place: Place, part: Exact) -> OfClass:
    counts = [
        Count(value=value, withheld=silos) for value, silos in zip(part.counts, part.withheld, strict=True)
    ]
    return OfClass(
        counts=counts[:-1],
        missing=counts[-1],
        moments=None if place.number is None else _moments(place, part),
        quantiles=[] if place.number is None else _quantiles(layout.edges(place.column), part),
    )


def _range(place: Place) -> tuple[float, float]:
    low, high = place.column.low, place.column.high
    assert low is not None and high is not None  # noqa: S101 - the contract has checked
    return low, high - low


def _moments(place: Place, part: Exact) -> Moments:
    if part.moments is None:
        return Moments(records=None, withheld=part.withheld_moments)
    (low, span), (records, total, squares) = _range(place), part.moments
    moments = Moments(records=records, withheld=part.withheld_moments)
    if records == 0:
        return moments
    # In whole numbers, so that nothing cancels: (n S2 - S1^2) / (n (n - 1)).
    spread = (records * squares - total * total) / (records * (records - 1)) if records > 1 else None
    return moments.model_copy(
        update={
            "mean": low + span * total / (records * UNITS),
            "deviation": None if spread is None else span * math.sqrt(max(spread, 0.0)) / UNITS,
        }
    )


def _quantiles(edges: Sequence[float], part: Exact) -> list[Quantile]:
    """Return limits of quantiles: the order statistics on both sides of each."""
    if not part.number or part.lowest is None or part.highest is None:
        return []
    lowest, highest = np.cumsum(part.lowest), np.cumsum(part.highest)
    quantiles = []
    for share in SHARES:
        at = (part.number - 1) * share
        below = int(np.searchsorted(lowest, math.floor(at), side="right"))
        above = int(np.searchsorted(highest, math.ceil(at), side="right"))
        quantiles.append(Quantile(share=share, low=edges[below], high=edges[above + 1]))
    return quantiles


def of_all(records: Mapping[str, Count], deviation: float | None) -> Count:
    """Return the number of records of all classes.

    Args:
        records: of each class.
        deviation: of the noise in each; None where they are exact.
    """
    if deviation is not None:
        return _near(sum(count.value or 0 for count in records.values()), deviation * math.sqrt(len(records)))
    values = [count.value for count in records.values() if count.value is not None]
    return Count(
        value=sum(values) if len(values) == len(records) else None,
        withheld=max(count.withheld for count in records.values()),
    )


def shares(records: Mapping[str, Count]) -> dict[str, float]:
    """Return each class's share of all records; empty if some silos' records are not counted."""
    total = sum(count.value or 0 for count in records.values())
    if not total or not all(count.complete for count in records.values()):
        return {}
    return {name: (count.value or 0) / total for name, count in records.items()}


def noisy(
    totals: Totals, layout: Layout, deviation: float
) -> tuple[dict[str, Count], list[ColumnStatistics]]:
    """Return the records of each class, and all columns, from totals with noise.

    Args:
        deviation: standard deviation of the noise in each total, in records.
    """
    values = {kind: np.asarray(totals[f"{PREFIX}{kind}"], dtype=np.float64) for kind in KINDS}
    titles = layout.titles
    records = {title: _near(values["records"][label], deviation) for label, title in enumerate(titles)}
    columns = [
        ColumnStatistics(
            **_described(layout, place),
            classes={
                title: _near_class(layout, place, values, slice(label, label + 1), deviation)
                for label, title in enumerate(titles)
            },
            overall=_near_class(layout, place, values, slice(None), deviation * math.sqrt(len(titles))),
        )
        for place in layout.places
    ]
    return records, columns


def _near(value: float, deviation: float, deviations: float = noise_intervals.NORMAL) -> Count:
    # A number below zero is noise alone: limits around zero are wider, and hold at least as often.
    value, reach = max(value, 0.0), deviations * deviation
    return Count(value=round(value), interval=(max(0, math.floor(value - reach)), math.ceil(value + reach)))


def _near_class(
    layout: Layout, place: Place, totals: Mapping[str, NDArray[np.float64]], labels: slice, deviation: float
) -> OfClass:
    """Return a column among the records of some classes.

    The number with a value has two estimates: all records less those without one, and the sum of the bins.
    Both are combined, weighted by their noise.

    Args:
        totals: by kind.
        deviation: standard deviation of the noise in each number of these records.
    """
    counts = totals["cells"][labels, place.start : place.end].sum(0)
    near = [_near(value, deviation) for value in counts.tolist()]
    column = OfClass(counts=near[:-1], missing=near[-1])
    if place.number is None:
        return column
    moments = totals["moments"][labels, place.number].sum(0)
    bins, less = counts[:-1], float(totals["records"][labels].sum() - counts[-1])
    number = (len(bins) * less + 2 * float(bins.sum())) / (len(bins) + 2)
    of_number = deviation * math.sqrt(2 * len(bins) / (len(bins) + 2))
    return column.model_copy(
        update={
            "moments": _near_moments(place, number, of_number, moments, deviation),
            "quantiles": _near_quantiles(layout.edges(place.column), bins, deviation),
        }
    )


def _near_moments(
    place: Place, records: float, of_records: float, moments: NDArray[np.float64], deviation: float
) -> Moments:
    """Return mean and deviation with limits that hold if number, sum and squares are within their limits.

    Args:
        records: noisy number of values.
        of_records: standard deviation of its noise.
        moments: noisy sum and sum of squares of the values, each in [-1, 1].
        deviation: standard deviation of their noise.
    """
    low, span = _range(place)
    if records < max(2.0, TOO_FEW * of_records):
        return Moments(records=max(0, round(records)))
    fewest, largest = max(records - _JOINT * of_records, 1.0), records + _JOINT * of_records
    reach, (total, squares) = _JOINT * deviation, moments.tolist()
    means = _ratio(total - reach, total + reach, fewest, largest, -1.0)
    seconds = _ratio(squares - reach, squares + reach, fewest, largest, 0.0)
    mean = min(max(total / records, -1.0), 1.0)
    spread = math.sqrt(max(squares / records - mean * mean, 0.0) * records / (records - 1))
    square = (
        (0.0 if means[0] <= 0 <= means[1] else min(abs(means[0]), abs(means[1])) ** 2),
        max(abs(means[0]), abs(means[1])) ** 2,
    )
    narrow = math.sqrt(max(seconds[0] - square[1], 0.0))
    wide = math.sqrt(max(seconds[1] - square[0], 0.0) * fewest / max(fewest - 1, 1.0))
    return Moments(
        records=round(records),
        mean=low + span * (mean + 1) / 2,
        mean_interval=(low + span * (means[0] + 1) / 2, low + span * (means[1] + 1) / 2),
        # Where noise makes the mean square smaller than the squared mean, there is only an upper limit.
        deviation=span * spread / 2 if spread else None,
        deviation_interval=(span * narrow / 2, span * wide / 2),
    )


def _ratio(low: float, high: float, fewest: float, largest: float, least: float) -> tuple[float, float]:
    """Return the limits of a mean, given those of sum and number; between ``least`` and 1."""
    lower, upper = min(low / fewest, low / largest), max(high / fewest, high / largest)
    return min(max(lower, least), 1.0), max(min(upper, 1.0), least)


def _near_quantiles(edges: Sequence[float], bins: NDArray[np.float64], deviation: float) -> list[Quantile]:
    """Return limits of quantiles that hold if the numbers below all edges are jointly within their limits."""
    deviations = NormalDist().inv_cdf(1 - _MISSED / (2 * len(bins)))
    below = np.concatenate([[0.0], bins.cumsum()])
    reach = deviations * deviation * np.sqrt(np.arange(len(bins) + 1))
    fewest, largest = below[-1] - reach[-1], below[-1] + reach[-1]
    if fewest <= 1:
        return []
    quantiles = []
    for share in SHARES:
        # Limits of the order statistics around the quantile; n is within its own limits.
        certain = np.flatnonzero(below + reach <= (fewest - 1) * share)
        beyond = np.flatnonzero(below - reach >= (largest - 1) * share + 2)
        low = edges[int(certain[-1])] if len(certain) else edges[0]
        high = edges[int(beyond[0])] if len(beyond) else edges[-1]
        quantiles.append(Quantile(share=share, low=low, high=high))
    return quantiles


def survival(
    layout: Layout, records: Mapping[str, Count], columns: Sequence[ColumnStatistics]
) -> SurvivalStatistics | None:
    """Return survival by class from exact counts, up to the first withheld cell; None without times.

    Only opened counts are read. The number at risk after these bins follows from the number of records of the
    class, which is opened, too; for curves and test these records are censored after the last bin.

    Args:
        records: of each class.
        columns: in the layout's order; the last one has the times.
    """
    timed, bins = layout.contract.survival, len(layout.ends)
    if timed is None:
        return None
    opened = {
        title: _until_withheld(part.counts, records[title], bins)
        for title, part in columns[-1].classes.items()
    }
    curves = {title: _curve(*cells) if cells.shape[1] > 1 else None for title, cells in opened.items()}
    ends = list(layout.ends)
    statistics = SurvivalStatistics(ends=ends, unit=timed.unit, curves=curves)
    shared = min(cells.shape[1] for cells in opened.values()) - 1
    if shared < 1 or len(opened) < 2:
        return statistics
    groups = np.stack([_cut(cells, shared) for cells in opened.values()])
    statistic, degrees = metrics_of_survival.log_rank(groups[:, 0], groups[:, 1])
    if degrees < 1:
        return statistics
    return _tested(statistics, statistic, degrees, shared)


def _tested(survival: SurvivalStatistics, statistic: float, degrees: int, bins: int) -> SurvivalStatistics:
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    p = float(torch.special.gammaincc(half[0], half[1]))  # of chi squared
    until = None if bins == len(survival.ends) else survival.ends[bins - 1]
    return survival.model_copy(update={"log_rank": statistic, "degrees": degrees, "p": p, "until": until})


def noisy_survival_of(totals: Totals, layout: Layout, deviation: float) -> SurvivalStatistics | None:
    """Return survival by class from noisy totals, until too few are at risk; None without times.

    Args:
        layout: of the cells; times are the last ones.
        deviation: standard deviation of the noise in each total, in records.
    """
    timed, bins, place = layout.contract.survival, len(layout.ends), layout.places[-1]
    if timed is None:
        return None
    records, cells = (np.asarray(totals[f"{PREFIX}{kind}"], np.float64) for kind in ("records", "cells"))
    groups = {  # the last cell, of records without a time, is noise alone: each record has a time
        title: noisy_survival.fitted(of[place.start : place.missing].reshape(2, bins), float(number))
        for title, of, number in zip(layout.titles, cells, records, strict=True)
    }
    estimates = {title: noisy_survival.kaplan_meier(of, deviation) for title, of in groups.items()}
    curves = {
        title: Curve(
            at_risk=np.rint(curve.at_risk).astype(int).tolist(),
            events=np.rint(curve.events).astype(int).tolist(),
            survival=curve.survival.tolist(),
            low=curve.low.tolist(),
            high=curve.high.tolist(),
        )
        for title, curve in estimates.items()
        if len(curve.survival)
    }
    statistics = SurvivalStatistics(
        ends=list(layout.ends),
        unit=timed.unit,
        curves={title: curves.get(title) for title in groups},
        noisy=True,
    )
    if len(groups) < 2:
        return statistics
    if too_few := [title for title in groups if title not in curves]:
        why = f"too few of {', '.join(too_few)} are left after the first bin for the noise"
        return statistics.model_copy(update={"untested": why})
    shared = min(len(curve.survival) for curve in estimates.values())
    statistic = noisy_survival.log_rank(list(groups.values()), shared, deviation)
    return _tested(statistics, statistic, len(groups) - 1, shared)


def _until_withheld(counts: Sequence[Count], records: Count, bins: int) -> NDArray[np.int64]:
    """Return events and censored records of the bins before a withheld cell; then the rest as censored.

    Args:
        counts: of events in each bin, then of censored records.

    Returns:
        (2, b + 1), for the first b bins.
    """
    complete = [
        one.complete and other.complete for one, other in zip(counts[:bins], counts[bins:], strict=True)
    ]
    last = 0 if records.value is None or records.withheld else [*complete, False].index(False)
    cells = np.array([count.value or 0 for count in counts], np.int64).reshape(2, bins)[:, :last]
    after = (records.value or 0) - cells.sum()
    return np.concatenate([cells, np.array([[0], [after]], np.int64)], axis=1)


def _cut(cells: NDArray[np.int64], bins: int) -> NDArray[np.int64]:
    """Return the first bins, and all later records as censored after them."""
    after = np.array([[0], [cells[:, bins:].sum()]], np.int64)
    return np.concatenate([cells[:, :bins], after], axis=1)


def _curve(events: NDArray[np.int64], censored: NDArray[np.int64]) -> Curve:
    """Return the curve of all bins but the last, which has no events."""
    curve = metrics_of_survival.kaplan_meier(events, censored)

    def listed(values: NDArray[np.float64]) -> list[float | None]:
        return [float(value) if math.isfinite(value) else None for value in values[:-1]]

    return Curve(
        at_risk=curve.at_risk[:-1].astype(int).tolist(),
        events=events[:-1].tolist(),
        survival=listed(curve.survival),
        low=listed(curve.low),
        high=listed(curve.high),
    )
