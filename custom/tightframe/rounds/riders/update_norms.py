"""Norms of updates as a rider: the lead sees that one silo's update is far longer than all others'.

Where a job has an ``update_norm``, every silo adds a one to the range that the norm of its own update lies
in, before it is rescaled; the sum is a histogram over silos, which names none. A silo with wrong records,
labels or units stands out. A silo that was changed to poison the model adds its one wherever it wants:
nothing here detects it.

The histogram is static, although updates change: a silo mostly stays in its range from round to round, so
that histograms over two cohorts would disclose the range of the silo by which they differ. After a drop-out
it stays shut.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Phase,
    Reading,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
    taken_out,
)
from tightframe.results.parts.ranges import NormBin, UpdateNorms
from tightframe.results.words import plural
from tightframe.rounds.riders.view import rider_view

SILOS = "norms/silos"
"""Field of the histogram (B,)."""
NOTE = "update_norms"
"""Name of the note: ``UpdateNorms``."""
FACTOR = 4.0
"""Factor between ends of ranges. Honest silos of unequal size differ by up to 5 (docs/decisions.md)."""
EDGES = tuple(FACTOR**power for power in range(-10, 1))
"""Upper ends of the ranges, over ``update_norm``; each belongs to its range. The last one has no end."""
APART = 2
"""Ranges by which one silo must exceed all others to be reported: more than ``FACTOR`` times as long."""
FEWEST = 3
"""Fewest silos among which one can stand out."""


def attach(phase: Phase, limit: float) -> Phase:
    """Return a phase in which each silo counts itself by its update's norm; the same without a norm.

    Args:
        phase: of a training round.
        limit: the job's ``update_norm``, in whose unit norms are reported.
    """
    norms = {item.name: item.norm for item in phase.schema.fields if item.norm is not None}
    if not norms:
        return phase
    (unit,) = set(norms.values())  # unit of the fields, which a method may scale
    schema = phase.schema + Schema((Field(SILOS, (len(EDGES) + 1,), bound=1.0, static=True),))

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        contribution = phase.contribute(silo, received, state)
        share = joint_norm(contribution.tensors[name] for name in norms) / unit
        rider_view(silo).context.log.info(
            "%s: the update's norm is %.3g%s",
            silo.name,
            share * limit,
            f": rescaled to {limit:g} (update_norm)" if share > 1 else "",
        )
        return replace(contribution, tensors={**contribution.tensors, SILOS: one_hot(share)})

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own, others = taken_out(totals, SILOS.__eq__)
        reading = phase.read(state, others, cohort)
        if not own:
            return reading
        try:
            histogram = read_total(own[SILOS], cohort.size - cohort.failed, limit)
        except ValueError as error:
            return reading.warning(f"round {cohort.round}: the norms of updates are not used: {error}")
        if histogram.apart:
            reading = reading.warning(f"round {cohort.round}: {in_words(histogram)}")
        return reading.noting(NOTE, histogram)

    return replace(phase, schema=schema, contribute=contribute, read=read)


def joint_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm of several tensors together; infinite if a value is not finite."""
    norm = float(torch.stack([torch.linalg.vector_norm(item.double().cpu()) for item in tensors]).norm())
    return norm if math.isfinite(norm) else math.inf


def one_hot(share: float) -> torch.Tensor:
    """Return a silo's part of the histogram, float64 (B,).

    Args:
        share: norm of its update over ``update_norm``.

    >>> one_hot(0.3).tolist().index(1.0), one_hot(1.0).tolist().index(1.0), one_hot(1.01).tolist().index(1.0)
    (10, 10, 11)
    """
    counts = torch.zeros(len(EDGES) + 1, dtype=torch.float64)
    counts[bisect.bisect_left(EDGES, share)] = 1.0
    return counts


def read_total(total: NDArray[np.float64], silos: int, limit: float) -> UpdateNorms:
    """Read an opened histogram.

    Args:
        total: number of silos in each range (B,).
        silos: in the sum, except those that could not contribute: they are in no range.
        limit: the job's ``update_norm``.

    Raises:
        ValueError: if it is not a histogram of this number of silos: one of them violated the protocol.
    """
    if (total != np.rint(total)).any() or total.min() < 0 or total.sum() != silos:
        raise ValueError(f"Expected a histogram of {plural(silos, 'silo')}, but got {total.tolist()}.")
    ends: list[float | None] = [0.0, *(limit * edge for edge in EDGES), None]
    places = [int(place) for place in np.flatnonzero(total)]
    histogram = tuple(
        NormBin(above=cast(float, ends[place]), up_to=ends[place + 1], silos=int(total[place]))
        for place in places
    )
    alone = silos >= FEWEST and len(places) > 1 and histogram[-1].silos == 1
    return UpdateNorms(limit=limit, histogram=histogram, apart=alone and places[-1] - places[-2] >= APART)


def in_words(norms: UpdateNorms) -> str:
    """Describe that one silo stands out, and the possible reasons."""
    *rest, top = norms.histogram
    others, norm = sum(item.silos for item in rest), f"{'' if top.up_to is None else 'of '}{top}"
    return (
        f"one silo's update has a norm {norm}, those of the {others} others are at most "
        f"{rest[-1].up_to:.3g}. Its records, labels or units may be wrong, or it has far more records. "
        "The sum does not name it: each silo's own log has the norm of its update"
    )
