"""The server's reading of noisy class sums: averaged over releases, clipped, and only above a floor.

A method's ``update`` gets sums and numbers of records, as without privacy, but averaged over all releases so
far. This is post-processing of opened totals and costs no privacy budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tightframe.config.job import JobConfig
from tightframe.phases import Cohort, Field, Phase, Reading, ServerState, Totals
from tightframe.privacy.releases.class_sums_reading import ReleaseAverage
from tightframe.rounds.privacy_plan import PrivacyPlan, honest_silos, is_class_sum

STATE = "privacy/releases/"


def attach(phase: Phase, plan: PrivacyPlan, job: JobConfig) -> Phase:
    """Return a phase whose method gets noisy class sums as averages over the releases so far.

    There is no silo half: the silos' view of their records (``PrivateSilo``) adds the noise.
    """

    def read_sums(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        honest = honest_silos(job, cohort.enrolled)
        state, averaged = read(plan, phase, state, totals, silos=cohort.size, honest=honest)
        return phase.read(state, averaged, cohort)

    return replace(phase, read=read_sums)


def read(
    plan: PrivacyPlan, phase: Phase, state: ServerState, totals: Totals, *, silos: int, honest: int
) -> tuple[ServerState, Totals]:
    """Add a release to the state, and average the class sums over all releases for the method.

    Classes whose noisy count is below the floor get zero records, so that a method keeps its earlier values.

    Args:
        totals: as opened.
        silos: number of silos in the sum.
        honest: s - c of the enrolled silos.

    Returns:
        The state with this release, and the totals with averaged class sums.
    """
    class_fields = [item for item in phase.schema.fields if is_class_sum(item) and item.name in totals]
    if not class_fields:
        return state, totals
    sums, counts = _pair(class_fields)
    config = plan.class_sums
    numbers = np.concatenate([totals[sums.name], totals[counts.name][:, None]], 1)
    units = torch.from_numpy(config.as_units(numbers))
    earlier = {name.removeprefix(STATE): item for name, item in state.extra.items() if name.startswith(STATE)}
    average = ReleaseAverage.of(earlier) if earlier else ReleaseAverage.empty(*units.shape)
    average = average.add(units, silos=silos, honest=honest)
    reading = average.read(config)
    records = torch.where(reading.usable, reading.counts, 0.0)
    changed = {
        **totals,
        sums.name: (reading.means * records[:, None]).numpy(),
        counts.name: records.numpy(),
    }
    extra = {**state.extra, **{STATE + name: item for name, item in average.state().items()}}
    return state.evolve(extra=extra), changed


def _pair(fields: list[Field]) -> tuple[Field, Field]:
    """Return the field of sums (C, w) and that of numbers of records (C,) among a phase's class sums.

    Raises:
        ValueError: if there is not exactly one of each.
    """
    wide = [item for item in fields if len(item.shape) == 2]
    flat = [item for item in fields if len(item.shape) == 1]
    if len(wide) != 1 or len(flat) != 1:
        raise ValueError(
            "Expected a phase to have one field (C, w) and one (C,) of class sums, but got "
            f"{[item.name for item in fields]}."
        )
    return wide[0], flat[0]
