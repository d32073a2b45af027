"""Statistics of the sites' tables, as sums: the only exchanges of a job with ``statistics``.

Without privacy a silo's term is one that it could publish by itself (``data.table.disclosure``). A first
exchange sums, for each number, how many silos disclose it (and have any) and how many withhold it; a second
one sums the numbers themselves, those that three silos disclose. With privacy there is one exchange, of all
numbers with noise, and nothing is withheld.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from tightframe.data.table.disclosure import MOMENTS, UNITS, Term, shapes, term
from tightframe.data.table.tabulated import Layout, Tabulated, tabulate
from tightframe.errors import JobError
from tightframe.options import listed
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Method,
    Phase,
    Reading,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
)
from tightframe.privacy.releases.table_statistics import BOUND, GRID
from tightframe.rounds.riders.class_rules import MIN_HOLDERS
from tightframe.rounds.riders.view import rider_view

if TYPE_CHECKING:
    from tightframe.config.job import Statistics
    from tightframe.data.contract import Contract

NOTE = "table_statistics"
"""Name of the note with all totals, by field name."""
PREFIX = "statistics/table/"
KINDS = ("records", "cells", "moments")
HOLDERS, WITHHELD = "holders", "withheld"
COUNT_BOUND = 2.0**24
"""Bound of a silo's records; sums of values and squares are in units of a range."""
_SCALE = np.array([1.0, UNITS, UNITS, UNITS])
"""Steps of the grid in a unit of each moment: 2**-20, so that the ring's 24 bits hold it exactly."""
TABLE = "table"
PURPOSE = "statistics"
"""Purpose of the charge in the ledger."""


def layout_of(dataset: str, options: Any, settings: Statistics) -> Layout:
    """Return the cells of a job's contract.

    Args:
        dataset: name of the data set.
        options: of it, validated.

    Raises:
        JobError: TF-101, if the data set has no contract of a table, or columns made of its names (a finding,
            time with event) are none or are called as others.
    """
    if dataset != TABLE:
        raise JobError(
            [
                f"statistics: Expected the data set {TABLE!r}, whose contract says what its columns are, but "
                f"got {dataset!r}: of other data sets there are no statistics before training"
            ]
        )
    layout = Layout(options.contract, settings.bins, _ends(options.contract, settings))
    try:
        names = [column.column for column in layout.columns]
    except ValidationError as error:
        raise JobError(
            [f"statistics: no cells for {problem}" for problem in listed(error, "survival.")]
        ) from None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise JobError(
            [
                f"statistics: Expected names of their own for columns, findings and time with event, but got "
                f"{twice}: give the finding another title, or rename a column in the contract"
            ]
        )
    return layout


def _ends(contract: Contract, settings: Statistics) -> tuple[float, ...]:
    """Return the ends of the bins of time; empty if the contract has no times."""
    if (timed := contract.survival) is None:
        if settings.time_ends:
            raise JobError(["statistics.time_ends: Expected a contract with `survival`, but it has none"])
        return ()
    if settings.time_ends and settings.time_ends[-1] >= timed.high:
        raise JobError(
            [
                f"statistics.time_ends: Expected ends below the contract's longest time, {timed.high:g}, "
                f"but got {settings.time_ends[-1]:g}"
            ]
        )
    return (*settings.time_ends, timed.high) if settings.time_ends else timed.ends(settings.time_bins)


def phases(layout: Layout, *, private: bool) -> tuple[Phase, ...]:
    """Return the exchanges.

    Args:
        private: whether the totals are noisy.
    """
    return (_noisy(layout),) if private else (_flags(layout), _numbers(layout))


def _name(kind: str, what: str = "") -> str:
    return f"{PREFIX}{kind}" + (f"/{what}" if what else "")


def _table(silo: SiloView, layout: Layout) -> Tabulated:
    data: Any = rider_view(silo).context.data
    return tabulate(data, layout)


def _term(silo: SiloView, layout: Layout) -> Term:
    return term(_table(silo, layout), rider_view(silo).min_class_count)


def _flags(layout: Layout) -> Phase:
    """Return the exchange that sums the flags of disclosed and withheld numbers."""
    schema = Schema(
        tuple(
            Field(_name(kind, what), shape, bound=1.0, bits=0, static=True)
            for kind, shape in shapes(layout).items()
            for what in (HOLDERS, WITHHELD)
        )
    )

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        own = _term(silo, layout)
        sums = {"records": own.records, "cells": own.cells, "moments": own.moments[:, :, 0]}
        hidden = {
            "records": own.withheld_records,
            "cells": own.withheld_cells,
            "moments": own.withheld_moments,
        }
        flags = {_name(kind, HOLDERS): (values > 0).astype(np.int64) for kind, values in sums.items()}
        flags |= {_name(kind, WITHHELD): values for kind, values in hidden.items()}
        return Contribution({name: _float64(values) for name, values in flags.items()})

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        cohort.check_flags(totals, totals)
        known = {name: torch.as_tensor(np.asarray(value)) for name, value in totals.items()}
        return state.evolve(extra={**state.extra, **known})

    return Phase("table-holders", schema, _nothing, contribute, update)


def _numbers(layout: Layout) -> Phase:
    """Return the exchange that sums the numbers that enough silos disclose."""
    wide = {**shapes(layout), "moments": (layout.classes, layout.numbers, MOMENTS)}
    schema = Schema(
        tuple(
            Field(_name(kind), shape, bound=COUNT_BOUND, bits=None if kind == "moments" else 0, static=True)
            for kind, shape in wide.items()
        )
    )

    def broadcast(state: ServerState) -> Tensors:
        names = [_name(kind, HOLDERS) for kind in KINDS]
        return {name: state.extra[name] for name in names if name in state.extra}

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        own = _term(silo, layout)
        holders = {kind: received[_name(kind, HOLDERS)].numpy() for kind in KINDS}
        open_ = opened(holders)
        numbers = {
            "records": own.records * open_["records"],
            "cells": own.cells * open_["cells"],
            "moments": own.moments * open_["moments"][:, :, None] / _SCALE,
        }
        return Contribution({_name(kind): _float64(values) for kind, values in numbers.items()})

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        flags = {name: value.numpy() for name, value in state.extra.items() if name.startswith(PREFIX)}
        reading = Reading(state, totals)
        if not totals:
            return reading
        steps = {_name("moments"): np.asarray(totals[_name("moments")]) * _SCALE}
        return reading.noting(NOTE, {**flags, **totals, **steps})

    return Phase("table-numbers", schema, broadcast, contribute, _unchanged, read)


def opened(holders: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.bool_]]:
    """Return which numbers are summed: those that three silos disclose, of classes that three silos disclose.

    Args:
        holders: by ``KINDS``, the number of silos that disclose each number.
    """
    records = holders["records"] >= MIN_HOLDERS - 0.5
    return {
        "records": records,
        "cells": (holders["cells"] >= MIN_HOLDERS - 0.5) & records[:, None],
        "moments": (holders["moments"] >= MIN_HOLDERS - 0.5) & records[:, None],
    }


def _noisy(layout: Layout) -> Phase:
    """Return the exchange that sums all numbers with noise."""
    wide = {**shapes(layout), "moments": (layout.classes, layout.numbers, 2)}
    schema = Schema(
        tuple(Field(_name(kind), shape, bound=BOUND, mechanism="statistics") for kind, shape in wide.items())
    )

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = rider_view(silo)
        plan = view.setup.privacy
        if plan is None or plan.statistics is None:
            raise ValueError("Expected a job with noisy statistics, but it plans none.")
        table, config = _table(silo, layout), plan.statistics.config
        if plan.privacy.neighbours == "patient":
            table = table.one_of_each_patient()
        exact = in_units(table)
        view.charge(PURPOSE, config.events(1), alone=config.lone_event(view.honest))
        noisy = {
            _name(kind): config.as_numbers(values + config.share(values.shape, view.honest))
            for kind, values in exact.items()
        }
        return Contribution({name: torch.from_numpy(values) for name, values in noisy.items()})

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        reading = Reading(state, totals)
        return reading.noting(NOTE, dict(totals)) if totals else reading

    return Phase("table-noisy", schema, _nothing, contribute, _unchanged, read)


def in_units(table: Tabulated) -> dict[str, NDArray[np.int64]]:
    """Return exact counts, sums and squares in integers of the grid ``2**-20``, by kind.

    A record adds ``2**20`` to one class and to one cell of each column, and for each number x in [-1, 1] at
    most that to x and to x**2.
    """
    layout = table.layout
    records = np.bincount(table.labels, minlength=layout.classes).astype(np.int64)
    cells = np.zeros((layout.classes, layout.cells), np.int64)
    moments = np.zeros((layout.classes, layout.numbers, 2), np.int64)
    for index, place in enumerate(layout.places):
        np.add.at(cells, (table.labels, place.start + table.cells[:, index]), 1)
        if place.number is not None:
            x = table.values[:, place.number]
            np.add.at(moments[:, place.number, 0], table.labels, np.rint(x * GRID).astype(np.int64))
            np.add.at(moments[:, place.number, 1], table.labels, np.rint(x * x * GRID).astype(np.int64))
    return {"records": records * GRID, "cells": cells * GRID, "moments": moments}


def _float64(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64))


def _nothing(state: ServerState) -> Tensors:
    return {}


def _unchanged(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    return state


class NoOptions(BaseModel):
    """Options of a job that has no method."""

    model_config = ConfigDict(frozen=True, extra="forbid")


METHOD = Method(
    name="statistics",
    title="Statistics before training",
    paper="none: nothing is trained",
    config=NoOptions,
    init_server=lambda setting, seed: ServerState(model={}),
    plan=lambda setting, number, rounds: (),
    private=lambda options: None,
)
"""Stands for a method in a job with ``statistics``; in no registry."""
