"""Spent epsilon as a rider: the lead learns in which range it lies at each silo, round by round.

With the last phase of a round every silo adds a one to the range that its own epsilon lies in; the sum is a
histogram over silos. Where its policy discloses the number, a silo also writes it into its own place of a
vector that is zero for all other silos. Both are functions of the silo's ledger: of the job, of repeated
charges, and of the number of its records as rounded by ``rounds.silo.private_view.coarse_count``, which its
updates show anyway; never of a single record.

They belong to the update group and not to the static one: that is opened for only one cohort of a data set,
ever, so that the first silo whose budget is spent would keep all others from any further job.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

import numpy as np
import torch

from tightframe.config.job import JobConfig, Privacy
from tightframe.config.profiles import EpsilonShown
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
from tightframe.results.parts.ranges import Bin, Spent
from tightframe.results.words import plural, rounded_up
from tightframe.rounds.riders.view import RiderView, rider_view

BINS, SHOWN = "privacy/epsilon_bins", "privacy/epsilon_shown"
EDGES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, math.inf)
"""Upper ends of the ranges, the same for all jobs: an epsilon on an edge lies below it."""
UNIT = 1000
"""Exact numbers travel in thousandths, rounded up: whole numbers, which a sum keeps exactly."""


def fields(job: JobConfig) -> Schema:
    """Return the fields of the ranges (B,) and of the exact numbers (n,), one for each silo in roster order.

    Raises:
        ValueError: if the job has no privacy.
    """
    most = thousandths(_privacy(job).epsilon)
    return Schema(
        (
            Field(BINS, (len(EDGES),), bound=1.0, mechanism="charges"),
            Field(SHOWN, (len(job.roster),), bound=float(most), mechanism="charges"),
        )
    )


NOTE = "epsilon"
"""Name of the note: ``Spent``."""


def attach(phase: Phase, job: JobConfig) -> Phase:
    """Return a round's last phase, in which each silo reports the job's cost up to and including it."""

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        contribution = phase.contribute(silo, broadcast, state)
        # After the phase, which charges for its noise; so a repeated round is reported with its repeats.
        return replace(contribution, tensors={**contribution.tensors, **told(rider_view(silo))})

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own, others = taken_out(totals, (BINS, SHOWN).__contains__)
        reading = phase.read(state, others, cohort)
        try:
            return reading.noting(NOTE, read_totals(job, own, sorted(cohort.weights), cohort.round))
        except ValueError as error:
            return reading.warning(
                f"round {cohort.round}: what silos report of their epsilon is not used: {error}"
            )

    return replace(phase, schema=phase.schema + fields(job), contribute=contribute, read=read)


def told(silo: RiderView) -> dict[str, torch.Tensor]:
    """Return this silo's part of the two sums, by its ledger; a silo whose training failed adds it, too."""
    form = silo.context.policy.epsilon_shown
    return terms(silo.spent() if form != "nothing" else 0.0, form, silo.name, silo.setup.job.roster)


def terms(spent: float, how: EpsilonShown, name: str, roster: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return one silo's part of the two sums.

    Args:
        spent: epsilon that the job has cost its records.
        how: the form in which its policy discloses it.
        roster: the silos of the job, sorted.

    Returns:
        float64 tensors (B,) and (n,); zeros where the policy discloses nothing.
    """
    bins = torch.zeros(len(EDGES), dtype=torch.float64)
    numbers = torch.zeros(len(roster), dtype=torch.float64)
    if how != "nothing":
        bins[bisect.bisect_left(EDGES, spent)] = 1.0
    if how == "exact":
        # Zero stands for a number that is not disclosed.
        numbers[list(roster).index(name)] = max(1, thousandths(spent))
    return {BINS: bins, SHOWN: numbers}


def thousandths(epsilon: float) -> int:
    """Return epsilon in thousandths, rounded up.

    >>> thousandths(3.2131), thousandths(8.0)
    (3214, 8000)
    """
    return int(Decimal(rounded_up(epsilon)) * UNIT)


def read_totals(job: JobConfig, totals: Totals, cohort: Sequence[str], round_number: int) -> Spent | None:
    """Read the two sums at the server.

    Args:
        totals: of the two fields; none where the phase is not a round's last.
        cohort: the silos in the sum.

    Returns:
        None without the two fields.

    Raises:
        ValueError: if they cannot be sums of silos' parts: one of them violated the protocol.
    """
    if not totals:
        return None
    privacy = _privacy(job)
    bins, numbers = totals[BINS], totals[SHOWN]
    integral = bool((np.concatenate([bins, numbers]) == np.rint(np.concatenate([bins, numbers]))).all())
    shown = {site: float(value) for site, value in zip(job.roster, numbers, strict=True) if value}
    most = bisect.bisect_left(EDGES, privacy.epsilon)
    ranges = Counter(bisect.bisect_left(EDGES, value / UNIT) for value in shown.values())
    if (
        not integral
        or bins.min() < 0
        or bins.sum() > len(cohort)
        or bins[most + 1 :].any()
        or not set(shown) <= set(cohort)
        or any(not 0 < value <= thousandths(privacy.epsilon) for value in shown.values())
        or any(count > bins[place] for place, count in ranges.items())
    ):
        raise ValueError(
            f"Expected a histogram of {plural(len(cohort), 'silo')} within epsilon {privacy.epsilon:g}, and "
            f"exact numbers of some of them, but got {bins.tolist()} and {numbers.tolist()}."
        )
    return spent(
        round_number,
        privacy.epsilon,
        privacy.delta,
        len(cohort),
        [int(value) for value in bins],
        {site: value / UNIT for site, value in shown.items()},
    )


def spent(
    round_number: int,
    promised: float,
    delta: float,
    silos: int,
    bins: Sequence[int],
    shown: Mapping[str, float],
) -> Spent:
    """Return the epsilon that silos reported in one round.

    Args:
        round_number: last round whose charges count.
        promised: most that the job may cost each silo.
        silos: in the sum.
        bins: number of silos in each range of ``EDGES``.
        shown: silo -> its own epsilon, rounded up, of those that disclose it.
    """
    ends = itertools.pairwise((0.0, *EDGES))
    histogram = tuple(
        Bin(above=low, up_to=min(high, promised), silos=count)
        for (low, high), count in zip(ends, bins, strict=True)
        if count
    )
    return Spent(
        round=round_number,
        promised=promised,
        delta=delta,
        range=(histogram[0].above, histogram[-1].up_to) if histogram else None,
        histogram=histogram,
        untold=silos - sum(bins),
        shown=dict(sorted(shown.items())),
    )


def _privacy(job: JobConfig) -> Privacy:
    if job.privacy is None:
        raise ValueError("Expected a job with `privacy`, but it has none.")
    return job.privacy
