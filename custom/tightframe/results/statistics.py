"""Statistics of the sites' tables, over all silos: ``statistics.json``.

A withheld number is never written as zero: ``value`` is null if no total was opened, and ``withheld`` counts
the silos whose records an opened total lacks.
"""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from tightframe.results.files import ResultFile, Values

STATISTICS = "statistics.json"
NOISY = ("noisy", "untested")
"""Attributes that only noisy survival has."""


class Count(Values):
    """Number of records over the silos that disclose it.

    Attributes:
        value: None if fewer than ``TableStatistics.holders`` silos disclose it; with noise never below 0.
        withheld: number of silos that withhold theirs, which the value lacks; over all classes the maximum
            of one class.
        interval: limits of the exact number, for the noise alone; None if counts are exact.
    """

    value: int | None
    withheld: int = 0
    interval: tuple[int, int] | None = None

    @property
    def complete(self) -> bool:
        """Check whether the records of all silos are in the value."""
        return self.value is not None and not self.withheld


class Moments(Values):
    """Mean and deviation of a number.

    Attributes:
        records: with a value, over the silos that disclose them; None if too few do.
        withheld: number of silos that disclose none, because they have too few.
        mean, deviation: in the column's unit; the deviation has the divisor n - 1. None if there are too
            few records, or too few for the noise.
        mean_interval, deviation_interval: limits for the noise alone.
    """

    records: int | None
    withheld: int = 0
    mean: float | None = None
    deviation: float | None = None
    mean_interval: tuple[float, float] | None = None
    deviation_interval: tuple[float, float] | None = None


class Quantile(Values):
    """A quantile of a number, from its histogram.

    Attributes:
        share: of the records below it.
        low, high: limits over all positions of values and withheld records in their bins; with noise at
            ``TableStatistics.level``.
    """

    share: float
    low: float
    high: float


class OfClass(Values):
    """A column among the records of a class, or of all classes.

    Attributes:
        counts: of each bin, level or truth value.
        missing: records without a value.
        moments: of a number; else None.
        quantiles: known ones of a number.
    """

    counts: list[Count]
    missing: Count
    moments: Moments | None = None
    quantiles: list[Quantile] = []


class ColumnStatistics(Values):
    """One column of the contract.

    Attributes:
        column, kind, unit: as in the contract.
        names: of the levels, or the lower edges of the bins.
        edges: of a number's bins, one more than bins; else empty.
        classes: class -> the column among its records.
        overall: the column among all records.
    """

    column: str
    kind: str
    unit: str | None = None
    names: list[str]
    edges: list[float] = []
    classes: dict[str, OfClass]
    overall: OfClass


class Curve(Values):
    """Survival of a class (Kaplan-Meier) after each bin of time, up to the first withheld one.

    Attributes:
        at_risk: records at the beginning of each bin.
        events: in each bin.
        survival: None once no record is at risk; never rising, also with noise.
        low, high: 95 % limits, for sampling and any noise; None where exact survival is 0 or 1.
    """

    at_risk: list[int]
    events: list[int]
    survival: list[float | None]
    low: list[float | None]
    high: list[float | None]


class SurvivalStatistics(Values):
    """Survival by class, up to the first withheld cell, or to too few records for the noise.

    Attributes:
        ends: of the bins of time, which all times in a bin count as.
        unit: of the time.
        curves: class -> curve; None if its first bin is withheld.
        log_rank, degrees, p: test of equal curves of all classes; None unless all are known.
        until: end of the test's last bin; None if it covers all.
        noisy: whether curves are estimates from noisy counts, and limits and test include the noise.
        untested: why there is no test of noisy curves.
    """

    ends: list[float]
    unit: str | None = None
    curves: dict[str, Curve | None]
    log_rank: float | None = None
    degrees: int | None = None
    p: float | None = None
    until: float | None = None
    noisy: bool = False
    untested: str | None = None

    @model_serializer(mode="wrap")
    def _omit_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys of noisy curves from exact ones."""
        return {key: item for key, item in handler(self).items() if self.noisy or key not in NOISY}

    @property
    def lacks(self) -> list[str]:
        """Name the curves that are missing or end early, and why."""
        first, then = "a cell of the first bin is withheld", "a cell of the next bin is withheld"
        if self.noisy:
            first = then = "too few are left for the noise"
        unit = f" {self.unit}" if self.unit else ""
        lines = []
        for name, curve in self.curves.items():
            if curve is None:
                lines.append(f"no curve of {name}: {first}")
            elif len(curve.events) < len(self.ends):
                end = f"{self.ends[len(curve.events) - 1]:g}{unit}"
                lines.append(f"curve of {name} up to {end}: {then}")
        return lines


class TableStatistics(ResultFile):
    """``statistics.json``.

    Attributes:
        title: of the contract.
        contract: its SHA-256.
        records: class -> number of records; ``all_records`` of all classes.
        shares: class -> its share of all records (prevalence); empty unless all numbers are known.
        columns: in the contract's order.
        silos: in the sums.
        failed: number of silos that could not count, and are in no number.
        least: smallest and largest of the silos' minimum of patients per cell (``min_class_count``).
        named: whether the contract names patients; else cells count records.
        holders: least number of silos in an opened total.
        grid: fraction of its range to which a number was rounded before summing.
        noisy: whether totals carry the noise of differential privacy.
        epsilon, delta, neighbours: of the job; None without privacy.
        noise_deviation: standard deviation of the noise in a number of records.
        level: of the intervals.
        synthetic: whether the records were generated.
        survival: if the contract has time and event.
    """

    NAME = STATISTICS

    title: str
    contract: str
    records: dict[str, Count]
    all_records: Count
    shares: dict[str, float] = {}
    columns: list[ColumnStatistics]
    silos: list[str]
    failed: int = 0
    least: tuple[int, int]
    named: bool = True
    holders: int
    grid: float
    noisy: bool = False
    epsilon: float | None = None
    delta: float | None = None
    neighbours: str | None = None
    noise_deviation: float | None = None
    level: float | None = None
    synthetic: bool = False
    survival: SurvivalStatistics | None = None

    @model_serializer(mode="wrap")
    def _omit_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a missing survival."""
        return {key: item for key, item in handler(self).items() if key != "survival" or item is not None}

    @property
    def whom(self) -> str:
        """Name the unit that a silo counts in a cell."""
        return "patients" if self.named else "records"

    @property
    def withheld(self) -> bool:
        """Check whether any number lacks records."""
        parts = [part for item in self.columns for part in item.classes.values()]
        counts = [count for part in parts for count in (*part.counts, part.missing)]
        moments = [part.moments for part in parts if part.moments is not None]
        return (
            not all(count.complete for count in (*self.records.values(), *counts))
            or any(item.withheld or item.records is None for item in moments)
        ) and not self.noisy
