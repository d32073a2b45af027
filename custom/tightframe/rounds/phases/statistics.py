"""Pooled statistics before round 1: class counts, and moments of the inputs, as sums over silos.

A method names what it needs (``Method.statistics``) and reads the result from its server state. The
class rules apply here too: a first sum has the flags of the classes that silos hold, and a second one the
counts of classes with enough holders. A count that is withheld is unknown, not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tightframe.phases import (
    CLASS_COUNTS,
    FEATURE_MEAN,
    FEATURE_STD,
    FINDING_COUNTS,
    Cohort,
    Contribution,
    Field,
    Phase,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
)
from tightframe.rounds.riders.view import rider_view

COUNTS = "statistics/counts"
VALUES, SUMS, SQUARES = "statistics/values", "statistics/sums", "statistics/squares"
COUNT_BOUND = 2.0**24
MOMENT_BOUND = 2.0**30
SMALLEST_STD = 1e-6


def phases(setting: Setting, names: tuple[str, ...], *, class_rules: bool) -> tuple[Phase, ...]:
    """Return the phases for the statistics that a method names; empty if it names none.

    Args:
        names: keys of ``_PARTS``.
        class_rules: whether the job's class rules are on.
    """
    if not names:
        return ()
    chosen = tuple(_PARTS[name](setting) for name in names)
    schema = Schema(tuple(item for part in chosen for item in part.fields))

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        tensors: dict[str, torch.Tensor] = {}
        for part in chosen:
            tensors |= part.count(silo)
        return Contribution(tensors)

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        pooled: dict[str, torch.Tensor] = {}
        for part in chosen:
            pooled |= part.conclude(totals)
        return state.evolve(extra={**state.extra, **pooled})

    phase = Phase("statistics", schema, lambda state: {}, contribute, update)
    # Under the class rules the first sum has only the flags of the classes that silos hold.
    twice = class_rules and any(item.per_class for item in schema.fields)
    return (phase, phase) if twice else (phase,)


class _ClassCounts:
    """``CLASS_COUNTS``: training records of each class over all silos, float64 (C,)."""

    def __init__(self, setting: Setting) -> None:
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

    def count(self, silo: SiloView) -> dict[str, torch.Tensor]:
        return {COUNTS: silo.class_counts("train", distinct=True).to(torch.float64)}

    def conclude(self, totals: Totals) -> dict[str, torch.Tensor]:
        return {CLASS_COUNTS: torch.as_tensor(totals[COUNTS])}


class _FindingCounts:
    """``FINDING_COUNTS``: training records with each finding and without it, float64 (K, 2)."""

    def __init__(self, setting: Setting) -> None:
        shape = (setting.num_classes, 2)
        self.fields = (Field(COUNTS, shape, bound=COUNT_BOUND, static=True, per_class=True),)

    def count(self, silo: SiloView) -> dict[str, torch.Tensor]:
        return {COUNTS: rider_view(silo).finding_counts().to(torch.float64)}

    def conclude(self, totals: Totals) -> dict[str, torch.Tensor]:
        return {FINDING_COUNTS: torch.as_tensor(totals[COUNTS])}


class _FeatureMoments:
    """``FEATURE_MEAN`` and ``FEATURE_STD`` of the inputs over all silos, float64 (D,).

    D is the first axis of a record: a table's columns, an image's channels.
    """

    def __init__(self, setting: Setting) -> None:
        width = setting.input_shape[0]
        self.fields = (
            Field(VALUES, (), bound=MOMENT_BOUND, static=True),
            Field(SUMS, (width,), bound=MOMENT_BOUND, static=True),
            Field(SQUARES, (width,), bound=MOMENT_BOUND, static=True),
        )
        self._width = width

    def count(self, silo: SiloView) -> dict[str, torch.Tensor]:
        values = torch.zeros((), dtype=torch.float64)
        sums, squares = (torch.zeros(self._width, dtype=torch.float64) for _ in range(2))
        for inputs, _ in silo.batches("train", augment=False, shuffle=False):
            columns = inputs.detach().to("cpu", torch.float64).reshape(len(inputs), self._width, -1)
            values += columns.shape[0] * columns.shape[2]
            sums += columns.sum((0, 2))
            squares += columns.square().sum((0, 2))
        return {VALUES: values, SUMS: sums, SQUARES: squares}

    def conclude(self, totals: Totals) -> dict[str, torch.Tensor]:
        values = max(float(totals[VALUES]), 1.0)
        mean = torch.as_tensor(totals[SUMS]) / values
        variance = torch.as_tensor(totals[SQUARES]) / values - mean.square()
        return {FEATURE_MEAN: mean, FEATURE_STD: variance.clamp_min(0).sqrt().clamp_min(SMALLEST_STD)}


_PARTS: Mapping[str, Callable[[Setting], _ClassCounts | _FindingCounts | _FeatureMoments]] = {
    "class_counts": _ClassCounts,
    "finding_counts": _FindingCounts,
    "feature_moments": _FeatureMoments,
}
