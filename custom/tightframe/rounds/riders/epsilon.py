"""Spent epsilon as a rider: the lead learns in which range it lies at each silo, round by round.

With the last phase of a round every silo adds a one to the range that its own epsilon lies in; the sum is a
histogram over silos. Where its policy lets the number out, a silo also writes it into its own place of a
vector that is zero for everybody else. Both are functions of what stands in the silo's ledger: of the job,
of what was charged again, and of the number of its records as ``rounds.silo.private_view.coarse_count``
rounds it, which its updates show anyway; never of a single record.

They belong to the update group and not to the static one: that is open for one cohort of a data set for
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
"""The upper ends of the ranges, the same for all jobs: an epsilon on an edge lies below it."""
UNIT = 1000
"""Exact numbers travel in thousandths, rounded up: whole numbers, which a sum keeps exactly."""


def fields(job: JobConfig) -> Schema:
    """The ranges (B,) and, one for each silo of the job in roster order, the exact numbers (n,).

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
    """A round's last phase, in which each silo tells what the job has cost up to and including it."""

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        made = phase.contribute(silo, broadcast, state)
        # After it, because it charges what it draws; so a round that is repeated is told with its repeats.
        return replace(made, tensors={**made.tensors, **told(rider_view(silo))})

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own, others = taken_out(totals, (BINS, SHOWN).__contains__)
        reading = phase.read(state, others, cohort)
        try:
            return reading.noting(NOTE, read_totals(job, own, sorted(cohort.weights), cohort.round))
        except ValueError as error:
            return reading.warning(
                f"round {cohort.round}: what silos tell of their epsilon is not used: {error}"
            )

    return replace(phase, schema=phase.schema + fields(job), contribute=contribute, read=read)


def told(silo: RiderView) -> dict[str, torch.Tensor]:
    """Return this silo's part of the two sums, by its ledger; a silo whose training failed tells it, too."""
    how = silo.context.policy.epsilon_shown
    return terms(silo.spent() if how != "nothing" else 0.0, how, silo.name, silo.setup.job.roster)


def terms(spent: float, how: EpsilonShown, name: str, roster: Sequence[str]) -> dict[str, torch.Tensor]:
    """One silo's part of the two sums.

    Args:
        spent: the epsilon that the job has cost its records.
        how: what its policy lets out.
        roster: the silos of the job, sorted.

    Returns:
        float64 tensors (B,) and (n,); zeros where the policy lets nothing out.
    """
    bins = torch.zeros(len(EDGES), dtype=torch.float64)
    numbers = torch.zeros(len(roster), dtype=torch.float64)
    if how != "nothing":
        bins[bisect.bisect_left(EDGES, spent)] = 1.0
    if how == "exact":
        # Zero stands for a number that is not told.
        numbers[list(roster).index(name)] = max(1, thousandths(spent))
    return {BINS: bins, SHOWN: numbers}


def thousandths(epsilon: float) -> int:
    """Epsilon in thousandths, never less than it is.

    >>> thousandths(3.2131), thousandths(8.0)
    (3214, 8000)
    """
    return int(Decimal(rounded_up(epsilon)) * UNIT)


def read_totals(job: JobConfig, totals: Totals, cohort: Sequence[str], round_number: int) -> Spent | None:
    """The server's reading of the two sums.

    Args:
        totals: of the two fields; none where the phase is not a round's last.
        cohort: the silos in the sum.

    Returns:
        None without the two fields.

    Raises:
        ValueError: if they cannot be sums of what silos tell: somebody did not keep to the protocol.
    """
    if not totals:
        return None
    privacy = _privacy(job)
    bins, numbers = totals[BINS], totals[SHOWN]
    whole = bool((np.concatenate([bins, numbers]) == np.rint(np.concatenate([bins, numbers]))).all())
    told = {site: float(value) for site, value in zip(job.roster, numbers, strict=True) if value}
    most = bisect.bisect_left(EDGES, privacy.epsilon)
    ranges = Counter(bisect.bisect_left(EDGES, value / UNIT) for value in told.values())
    if (
        not whole
        or bins.min() < 0
        or bins.sum() > len(cohort)
        or bins[most + 1 :].any()
        or not set(told) <= set(cohort)
        or any(not 0 < value <= thousandths(privacy.epsilon) for value in told.values())
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
        {site: value / UNIT for site, value in told.items()},
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
        round_number: up to and including which the charges count.
        promised: the most that the job may cost each silo, which none passes.
        silos: in the sum.
        bins: how many of them lie in each range of ``EDGES``.
        shown: silo -> its own epsilon, rounded up, of those that tell it.
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
