"""Pooled statistics before round 1: class counts, and moments of the inputs, as sums over silos.

A method names what it needs (``Method.statistics``) and reads the result from its server state. The
class rules apply here too: a first sum has the flags of the classes that silos hold, and a second one the
counts of classes with enough holders. A count that is withheld is unknown, not zero. Moments leave out
classes that too few silos hold: otherwise moments less sums by class would be of these. Where no class has
enough holders, and so no sum, moments are of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tightframe.data.base import own_patients
from tightframe.data.table.disclosure import made_by_few
from tightframe.errors import RunError
from tightframe.phases import (
    ADMITTED,
    CLASS_COUNTS,
    FEATURE_MEAN,
    FEATURE_STD,
    FINDING_COUNTS,
    Cohort,
    Contribution,
    Field,
    Phase,
    Reading,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
)
from tightframe.rounds.moments import (
    COUNTS,
    MOMENT_BOUND,
    POOLED,
    SQUARES,
    SUMS,
    VALUES,
    WEIGHED,
    mean_and_deviation,
    packed,
)
from tightframe.rounds.riders.view import RiderView, rider_view

NOTHING = "statistics/flags"
"""A constant zero, in the exchange that has only the class rules' flags."""
COUNT_BOUND = 2.0**24


def phases(
    setting: Setting, names: tuple[str, ...], *, class_rules: bool, uniform: bool = False
) -> tuple[Phase, ...]:
    """Return the phases for the statistics that a method names; empty if it names none.

    Args:
        names: keys of ``_PARTS``.
        class_rules: whether the job's class rules are on.
        uniform: whether silos weigh the same.
    """
    if not names:
        return ()
    chosen = tuple(_PARTS[name](setting, uniform) for name in names)
    phase = _phase_of(chosen)
    if not class_rules or not any(item.per_class or item.over_classes for item in phase.schema.fields):
        return (phase,)
    # Under the class rules the first sum has only the flags of the classes that silos hold.
    by_class = tuple(part for part in chosen if any(item.per_class for item in part.fields))
    return (_phase_of(by_class) if by_class else _FLAGS_ONLY, phase)


def _phase_of(chosen: Sequence[_ClassCounts | _FindingCounts | _FeatureMoments]) -> Phase:
    schema = Schema(tuple(item for part in chosen for item in part.fields))

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        tensors: dict[str, torch.Tensor] = {}
        for part in chosen:
            tensors |= part.count(silo, broadcast)
        return Contribution(tensors)

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        pooled: dict[str, torch.Tensor] = {}
        for part in chosen:
            pooled |= part.conclude(totals, cohort)
        return state.evolve(extra={**state.extra, **pooled})

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        reading = Reading(state, totals)
        if VALUES in totals and float(totals[VALUES]) <= 0:
            return reading.warning(
                "inputs are not standardised, because no silo has enough patients of any class "
                "(`min_class_count` of each site): take more records, or class_rules=off"
            )
        return reading

    return Phase("statistics", schema, lambda state: {}, contribute, update, read)


_FLAGS_ONLY = Phase(
    "holders",
    Schema((Field(NOTHING, (), bound=1.0, static=True, over_classes=True),)),
    lambda state: {},
    lambda silo, broadcast, state: Contribution({NOTHING: torch.zeros((), dtype=torch.float64)}),
    lambda state, totals, cohort: state,
)
"""Exchange before moments alone, for the flags that the class rules add."""


class _ClassCounts:
    """``CLASS_COUNTS``: training records of each class over all silos, float64 (C,)."""

    def __init__(self, setting: Setting, uniform: bool) -> None:
        self.fields = (
            Field(
                COUNTS,
                (setting.num_classes,),
                bound=COUNT_BOUND,
                static=True,
                per_class=True,
                sensitivity=1.0,
            ),
        )

    def count(self, silo: SiloView, received: Tensors) -> dict[str, torch.Tensor]:
        return {COUNTS: silo.class_counts("train", distinct=True).to(torch.float64)}

    def conclude(self, totals: Totals, cohort: Cohort) -> dict[str, torch.Tensor]:
        return {CLASS_COUNTS: torch.as_tensor(totals[COUNTS])}


class _FindingCounts:
    """``FINDING_COUNTS``: training records with each finding and without it, float64 (K, 2)."""

    def __init__(self, setting: Setting, uniform: bool) -> None:
        shape = (setting.num_classes, 2)
        self.fields = (Field(COUNTS, shape, bound=COUNT_BOUND, static=True, per_class=True),)

    def count(self, silo: SiloView, received: Tensors) -> dict[str, torch.Tensor]:
        return {COUNTS: rider_view(silo).finding_counts().to(torch.float64)}

    def conclude(self, totals: Totals, cohort: Cohort) -> dict[str, torch.Tensor]:
        return {FINDING_COUNTS: torch.as_tensor(totals[COUNTS])}


class _FeatureMoments:
    """``FEATURE_MEAN`` and ``FEATURE_STD`` of the inputs over all silos, float64 (D,).

    D is the first axis of a record: a table's columns, an image's channels.
    """

    def __init__(self, setting: Setting, uniform: bool) -> None:
        width, by_class = setting.input_shape[0], not setting.findings
        self._values = math.prod(setting.input_shape[1:])
        self.fields = (
            Field(VALUES, (), bound=MOMENT_BOUND, static=True, over_classes=by_class),
            Field(SUMS, (width,), bound=MOMENT_BOUND, static=True, over_classes=by_class),
            Field(SQUARES, (width,), bound=MOMENT_BOUND, static=True, over_classes=by_class),
        )
        self._width = width
        self._most = 1 if uniform else WEIGHED

    def count(self, silo: SiloView, received: Tensors) -> dict[str, torch.Tensor]:
        view, place = rider_view(silo), 0
        # Of findings a record may have several: there the rules are on counts alone.
        times = view.times_in_moments(received.get(ADMITTED) if self.fields[0].over_classes else None)
        if self._values == 1:
            return self._of_table(view, times)
        values = torch.zeros((), dtype=torch.float64)
        sums, squares = (torch.zeros(self._width, dtype=torch.float64) for _ in range(2))
        for inputs, _ in silo.batches("train", augment=False, shuffle=False):
            columns = inputs.detach().to("cpu", torch.float64).reshape(len(inputs), self._width, -1)
            each = times[place : place + len(columns)]
            place += len(columns)
            values += each.sum() * columns.shape[2]
            sums += (columns * each[:, None, None]).sum((0, 2))
            squares += (columns.square() * each[:, None, None]).sum((0, 2))
        return {VALUES: values, SUMS: sums, SQUARES: squares}

    def _of_table(self, view: RiderView, times: torch.Tensor) -> dict[str, torch.Tensor]:
        """Count a table's columns; one whose moments few patients make counts as its median in each record.

        The model contains mean and deviation, for everybody who gets it. Where a job sums the columns
        themselves, they count as they are: the difference of both would be this silo's own values.
        """
        batches = view.batches("train", augment=False, shuffle=False)
        parts = [inputs.detach().to("cpu", torch.float64).reshape(-1, self._width) for inputs, _ in batches]
        columns = torch.cat(parts) if parts else torch.zeros(0, self._width, dtype=torch.float64)
        counted = (times > 0).numpy()
        if (least := view.min_class_count) > 1 and counted.any() and not view.sums_columns:
            owners = np.unique(own_patients(view.context.data)[counted], return_inverse=True)[1]
            for column in columns.T.numpy():
                if made_by_few(column[counted], owners, least):
                    column[:] = np.median(column[counted])
        each = times[:, None]
        return {
            VALUES: times.sum(),
            SUMS: (columns * each).sum(0),
            SQUARES: (columns.square() * each).sum(0),
        }

    def conclude(self, totals: Totals, cohort: Cohort) -> dict[str, torch.Tensor]:
        self._check_number(float(totals[VALUES]), cohort)
        pooled = packed(*(torch.as_tensor(totals[name]) for name in (VALUES, SUMS, SQUARES)))
        mean, deviation = mean_and_deviation(pooled)
        return {FEATURE_MEAN: mean, FEATURE_STD: deviation, POOLED: pooled}

    def _check_number(self, values: float, cohort: Cohort) -> None:
        """Refuse moments of more values than the silos' public weights allow.

        Raises:
            RunError: TF-526.
        """
        most = sum(cohort.weights.values()) * self._most * self._values
        if values > most * (1 + 1e-9):
            raise RunError(
                f"Expected pooled moments of at most {most:.0f} values, by the silos' public weights, but "
                f"got {values:.0f}: a silo sent a false number. Nothing is trained on them; run the job "
                "without that silo, if you know which it is.",
                code="TF-526",
            )


_PARTS: Mapping[str, Callable[[Setting, bool], _ClassCounts | _FindingCounts | _FeatureMoments]] = {
    "class_counts": _ClassCounts,
    "finding_counts": _FindingCounts,
    "feature_moments": _FeatureMoments,
}
